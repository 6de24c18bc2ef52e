"""What tests through Spark share: tables that are replaced, their calls to the store, streams and what comes of them."""

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming import StreamingQuery

from pyspark_lookup import LookupTable, lookup_join, read_table
from tests.support.fakes import wait_until_settled

FULL = {"lookup.cache": "FULL"}
MODES: dict[str, dict[str, Any]] = {
    "full": FULL,
    "partial": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "100000"},
    "none": {"lookup.cache": "NONE"},
}
WAYS: dict[str, dict[str, Any]] = {
    **{name: {"strategy": "cache", "options": mode} for name, mode in MODES.items()},
    "broadcast": {"strategy": "broadcast"},
}
NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


def saved(path: Path, rows: pa.Table | dict[str, Any], group: int = 1000) -> Path:
    """Publish a file of rows by rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.table(rows), new, row_group_size=group)
    os.replace(new, path)
    wait_until_settled(path)
    return path


def publish_version(path: Path, version: int, ids: range = range(10), group: int = 1000) -> Path:
    """Publish a file of rows (id, version)."""
    return saved(path, {"id": list(ids), "version": [version] * len(ids)}, group)


def load(spark: SparkSession, path: object, options: Mapping[str, Any] = NO_OPTIONS) -> DataFrame:
    return read_table(spark, str(path), options)


def catalog_options(path: object, options: Mapping[str, object] = NO_OPTIONS) -> str:
    """What follows CREATE TABLE … for a table of ours."""
    pairs = ", ".join(f"'{key}' '{value}'" for key, value in {"path": path, **options}.items())
    return f"USING lookupcache OPTIONS ({pairs})"


class Calls:
    """Store calls to one table by all processes of this host, since the last look."""

    def __init__(self, path: object, options: Mapping[str, str] = NO_OPTIONS) -> None:
        self._table = LookupTable(str(path), options)
        self._last = self._table.metrics()

    def take_metrics(self) -> dict[str, int]:
        metrics = self._table.metrics()
        delta = {name: metrics[name] - self._last[name] for name in metrics}
        self._last = metrics
        return delta

    def calls(self) -> tuple[int, int, int]:
        """(heads, lists, gets)."""
        delta = self.take_metrics()
        return delta["ufsHeadCount"], delta["ufsListCount"], delta["ufsGetCount"]


@contextlib.contextmanager
def conf(spark: SparkSession, key: str, value: str) -> Iterator[None]:
    before = spark.conf.get(key, None)  # None: not set
    spark.conf.set(key, value)
    try:
        yield
    finally:
        spark.conf.unset(key) if before is None else spark.conf.set(key, before)


def events(directory: Path, number: int, keys: range = range(200)) -> None:
    """A file of the stream: (id, event, batch)."""
    rows = {"id": list(keys), "event": [number * 100_000 + key for key in keys], "batch": [number] * len(keys)}
    saved(directory / f"{number:03}.parquet", rows)


def stream_events(spark: SparkSession, directory: Path) -> DataFrame:
    """Events, a file in each micro-batch."""
    reader = spark.readStream.schema("id long, event long, batch long").option("maxFilesPerTrigger", "1")
    return reader.parquet(str(directory))


def read_in_all_ways(
    stream: DataFrame, table: Path | str, column: str, options: Mapping[str, str] = NO_OPTIONS
) -> DataFrame:
    """A stream with the values that the table has in a column, by lookups of each way and by a scan."""
    for way, way_options in WAYS.items():
        how = {**way_options, "options": {**options, **way_options.get("options", {})}}
        stream = lookup_join(stream, str(table), "id", columns=[column], prefix=f"{way}_", **how)
    scanned = load(stream.sparkSession, table, options).selectExpr("id", f"{column} AS scan_{column}")
    return stream.join(sf.broadcast(scanned), "id", "left")


@contextlib.contextmanager
def running(stream: DataFrame, name: str, mode: str = "append") -> Iterator[StreamingQuery]:
    """A query whose rows are in the table of that name."""
    query = stream.writeStream.format("memory").queryName(name).outputMode(mode).start()
    try:
        yield query
    finally:
        query.stop()


def each_batch(stream: DataFrame, checkpoint: Path, act: Callable[[DataFrame, int], None]) -> None:
    """Carry out what there is to do: `act` on each micro-batch."""
    writer = stream.writeStream.foreachBatch(act).option("checkpointLocation", str(checkpoint))
    assert writer.trigger(availableNow=True).start().awaitTermination(240)


def collect_batches(stream: DataFrame, checkpoint: Path) -> list[list[tuple[Any, ...]]]:
    """The rows of each micro-batch that has some."""
    batches: list[list[tuple[Any, ...]]] = []
    each_batch(stream, checkpoint, lambda batch, _: batches.append(sorted(map(tuple, batch.collect()), key=repr)))
    return [batch for batch in batches if batch]


def run_command(*command: object, timeout_s: float = 600, **more: Any) -> str:
    """What a command prints; its failure fails the test with all it says."""
    completed = subprocess.run(
        [*map(str, command)], check=False, capture_output=True, text=True, timeout=timeout_s, **more
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def run_script(
    home: Path, script: str, *arguments: object, variables: Mapping[str, str] = NO_OPTIONS, timeout_s: float = 240
) -> list[str]:
    """What a Python program of its own prints that begins with a word in capitals."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **variables}
    printed = run_command(sys.executable, "-c", script, *arguments, timeout_s=timeout_s, cwd=home, env=env)
    return [line for line in printed.splitlines() if line.split(" ")[0].isupper()]


CONNECT = """
import socket
from pyspark.sql import SparkSession
from pyspark.sql.connect.client import DefaultChannelBuilder
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
DefaultChannelBuilder.default_port = staticmethod(lambda: port)  # else 15002, which another test's server may have
connect = SparkSession.builder.remote("local[2]").config("spark.connect.grpc.binding.port", port)
connect = connect.config("spark.sql.shuffle.partitions", "2").config("spark.ui.enabled", "false")
"""
"""The begin of a program for `run_script`: `connect` builds a session of Spark Connect, with a server of its own on a free port."""


def made_files(home: Path) -> dict[str, str]:
    """Paths of the facts and of tables in which keys repeat, are null, and are of several types."""
    rng = random.Random(11)

    def draw_array(values: Any, count: int, kind: pa.DataType) -> pa.Array:
        return pa.array([None if rng.random() < 0.15 else rng.choice(values) for _ in range(count)], kind)

    def rows(count: int, highest: int) -> pa.Table:
        codes, numbers, weights = ["de", "fr", "", "ö", "xx"], range(highest), [0.0, 1.0, 2.5, -0.0, float("nan")]
        columns = {
            "id": (numbers, pa.int64()), "small": (numbers, pa.int32()), "parent": (numbers, pa.int64()),
            "weight": (weights, pa.float64()), "code": (codes, pa.string()), "label": (codes[:3], pa.string()),
        }  # fmt: skip
        return pa.table({name: draw_array(values, count, kind) for name, (values, kind) in columns.items()})

    tables = {"facts": rows(40, 8), "few": rows(6, 6), "many": rows(20, 9), "none": rows(0, 1)}
    paths = {name: saved(home / name / "rows.parquet", table, 16) for name, table in tables.items()}
    # Streams are of directories.
    return {name: str(path.parent if name == "facts" else path) for name, path in paths.items()}
