"""The writers of a soak, each a process of its own that notes what it is about to do and what it has done.

Run as `python -m tests.soak.writers <JSON: role, name, notes, endpoint, seed>`; they write through the proxy, at `endpoint`,
and go on until they are killed. Started again, they go on from what is there.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq
from botocore.exceptions import BotoCoreError, ClientError

from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import PysparkLookupError, VersionGoneError
from pyspark_lookup.engine.runtime import runtime
from pyspark_lookup.options.lookup_options import LookupOptions
from tests.history.worker import noted
from tests.soak import tables
from tests.workers import Notes

SWEPT_EVERY = 15
KEPT_PUBLISHES = 15
T = TypeVar("T")
VACUUMED_AFTER_S = 60


class Publisher:
    """Replaces the plain table again and again, whole, under new names."""

    def __init__(self, given: dict[str, Any], notes: Notes) -> None:
        self._notes = notes
        self._rng = random.Random(given["seed"])
        self._s3 = tables.client(given["endpoint"])
        options = {"lookup.cache.dir": given["cache"], "lookup.max-retries": "8", **tables.storage(given["endpoint"])}
        self._table = LookupTable(tables.PUBLISHED, options)

    def run(self) -> None:
        names = self._names()
        number = max(map(_number_of, names), default=0)
        if names:
            self._note(number)
        while True:
            number += 1
            self._put(number, "base", range(tables.BASE_KEYS))
            _pause(self._rng, 1.0, 4.0)
            self._put(number, "more", range(tables.BASE_KEYS, tables.KEYS))
            _pause(self._rng, 2.0, 8.0)
            if number % SWEPT_EVERY == 0:
                for name in self._names():
                    if _number_of(name) <= number - KEPT_PUBLISHES:
                        _done(lambda name=name: self._s3.delete_object(Bucket=tables.BUCKET, Key=name))
                        self._note(number)

    def _names(self) -> list[str]:
        return _done(lambda: tables.names_below(self._s3, "published/"))

    def _put(self, number: int, part: str, keys: range) -> None:
        """Put a file under a new name, and note it."""
        rows = tables.padded(self._rng, keys, publish=number)
        sink = io.BytesIO()
        pq.write_table(rows, sink)
        key = f"published/v={number:06}/{part}-{self._rng.getrandbits(32):08x}.parquet"
        _done(lambda: self._s3.put_object(Bucket=tables.BUCKET, Key=key, Body=sink.getvalue()))
        self._note(number)

    def _note(self, number: int) -> None:
        """What the table is now, with the digest that readers are told of it."""
        parts = [name.split("/")[2].split("-")[0] for name in self._names() if _number_of(name) == number]
        self._notes.add("published", number=number, parts=sorted(parts), digest=_done(lambda: self._table.version))


def _done(call: Callable[[], T]) -> T:
    """What a call comes to, made until it comes to something."""
    while True:
        try:
            return call()
        except (PysparkLookupError, BotoCoreError, ClientError):
            time.sleep(0.5)


def _number_of(name: str) -> int:
    return int(name.split("v=")[1].split("/", maxsplit=1)[0])


class Committer:
    """Gives all keys of the managed table a new epoch, in one way or another."""

    def __init__(self, given: dict[str, Any], notes: Notes) -> None:
        self._notes = notes
        self._rng = random.Random(given["seed"])
        self._index = given["index"]
        self._table = _managed(given)

    def run(self) -> None:
        while True:
            tag = str(time.monotonic_ns() // 1_000_000 * 10 + self._index)
            mode = self._rng.choices(["upsert", "overwrite", "transaction"], [5, 1, 4])[0]
            some = self._rng.sample(range(tables.KEYS), tables.KEYS // 2)
            others = sorted(set(range(tables.KEYS)).difference(some))
            steps = [("delete", f"{tag}.0", some), ("upsert", f"{tag}.1", others), ("append", f"{tag}.2", some)]
            what = {"steps": steps} if mode == "transaction" else {}
            self._notes.add("begin", tag=tag, mode=mode)
            noted(self._notes, functools.partial(self._commit, tag, mode, steps), tag=tag, mode=mode, **what)
            _pause(self._rng, 3.0, 12.0)

    def _commit(self, tag: str, mode: str, steps: Any) -> int | None:
        if mode != "transaction":
            return self._table.write(self._rows(range(tables.KEYS), tag), mode)
        with self._table.transaction() as t:
            for how, own, keys in steps:
                rows = self._rows(keys, own)
                t.delete(rows.select(["id"])) if how == "delete" else t.write(rows, how)
        return t.position

    def _rows(self, keys: Any, tag: str) -> Any:
        return tables.padded(self._rng, keys, tag=tag, n=0)


class Upkeep:
    """Compactions and vacuums."""

    def __init__(self, given: dict[str, Any], notes: Notes) -> None:
        self._notes = notes
        self._rng = random.Random(given["seed"])
        self._table = _managed(given)
        self._digests = Digests(given["endpoint"], given["cache"], notes)

    def run(self) -> None:
        while True:
            _pause(self._rng, 6.0, 15.0)
            how = self._rng.choice(["compact", "vacuum"])
            try:
                self._digests.note_new()  # what a vacuum may remove
                done = self._table.compact() if how == "compact" else self._table.vacuum(f"{VACUUMED_AFTER_S} s", True)
            except PysparkLookupError as problem:
                self._notes.add("error", how=how, error=f"{type(problem).__name__} {problem}")
            else:
                self._notes.add(how, done=done)


class Digests:
    """Which digest readers are told of each version of the managed table."""

    def __init__(self, endpoint: str, cache: str, notes: Notes) -> None:
        options = {"path": tables.MANAGED, "lookup.cache.dir": cache, "lookup.max-retries": "8"}
        self._options = LookupOptions.parse({**options, **tables.storage(endpoint)})
        self._notes = notes
        self._known = 0

    def note_new(self) -> None:
        """Note those that were not noted by this object and can still be read."""
        state = runtime().engine(self._options).reader.resolver.log(tables.MANAGED).latest()
        for change in state.changes if state is not None else ():
            if change.position > self._known:
                with contextlib.suppress(VersionGoneError):
                    self._notes.add("version", position=change.position, digest=state.version(change.position).digest)
                self._known = change.position


def _managed(given: dict[str, Any]) -> LookupTable:
    options = {"lookup.keys": "id", "lookup.cache.dir": given["cache"], "lookup.max-retries": "8"}
    options["lookup.write.compact-after"] = "6"
    return LookupTable(tables.MANAGED, {**options, **tables.storage(given["endpoint"])})


def _pause(rng: random.Random, least_s: float, most_s: float) -> None:
    time.sleep(rng.uniform(least_s, most_s))


ROLES: dict[str, Callable[[dict[str, Any], Notes], Any]] = {
    "publisher": Publisher,
    "committer": Committer,
    "upkeep": Upkeep,
}


def main() -> None:
    given = json.loads(sys.argv[1])
    ROLES[given["role"]](given, Notes(Path(given["notes"]), given["name"])).run()


if __name__ == "__main__":
    main()
