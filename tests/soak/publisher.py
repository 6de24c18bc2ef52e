"""The writer of a soak's plain table, which notes what that is after each step, until it is killed. Started again, it goes on from there."""

import io
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import PysparkLookupError
from tests.soak import tables
from tests.support.workers import Notes

SWEPT_EVERY = 15  # publishes, of which so many are kept
T = TypeVar("T")


class Publisher:
    """Replaces the plain table again and again, whole, under new names."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._notes = Notes(Path(arguments["notes"]), arguments["name"])
        self._rng = random.Random(arguments["seed"])
        self._s3 = boto3.client(
            "s3", endpoint_url=arguments["endpoint"], config=Config(retries={"total_max_attempts": 8})
        )
        options = {
            "lookup.cache.dir": arguments["cache"],
            "lookup.max-retries": "8",
            "lookup.storage.endpoint_url": arguments["endpoint"],
        }
        self._table = LookupTable(tables.PUBLISHED, options)

    def run(self) -> None:
        number = max(map(_parse_number, self._names()), default=0)
        if number:
            self._note(number)
        while True:
            number += 1
            self._publish(number, "base", range(tables.BASE_KEYS))
            time.sleep(self._rng.uniform(1, 4))
            self._publish(number, "more", range(tables.BASE_KEYS, tables.KEYS))
            time.sleep(self._rng.uniform(2, 8))
            if number % SWEPT_EVERY == 0:
                for name in self._names():
                    if _parse_number(name) <= number - SWEPT_EVERY:
                        _retry(lambda name=name: self._s3.delete_object(Bucket=tables.BUCKET, Key=name))
                        self._note(number)

    def _names(self) -> list[str]:
        listing: dict[str, Any] = _retry(lambda: self._s3.list_objects_v2(Bucket=tables.BUCKET, Prefix="published/"))
        return [entry["Key"] for entry in listing.get("Contents", [])]

    def _publish(self, number: int, part: str, keys: range) -> None:
        pads = [self._rng.randbytes(tables.PAD_BYTES) for _ in keys]
        sink = io.BytesIO()
        pq.write_table(pa.table({"id": keys, "publish": [number] * len(keys), "pad": pads}), sink)
        key = f"published/v={number:06}/{part}-{self._rng.getrandbits(32):08x}.parquet"
        _retry(lambda: self._s3.put_object(Bucket=tables.BUCKET, Key=key, Body=sink.getvalue()))
        self._note(number)

    def _note(self, number: int) -> None:
        """Note the current state of the table, with the digest that readers are told of it."""
        parts = {name.split("/")[2].split("-")[0] for name in self._names() if _parse_number(name) == number}
        self._notes.add("published", number=number, parts=len(parts), digest=_retry(lambda: self._table.version))


def _retry(call: Callable[[], T]) -> T:
    """Make a call until it succeeds; returns its result."""
    while True:
        try:
            return call()
        except (PysparkLookupError, BotoCoreError, ClientError):
            time.sleep(0.5)


def _parse_number(name: str) -> int:
    return int(name.split("v=")[1].split("/", maxsplit=1)[0])


if __name__ == "__main__":
    Publisher(json.loads(sys.argv[1])).run()
