"""Which way `lookup_join` takes, and that it says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable, explain_lookup, lookup_join
from pyspark_lookup.spark import join
from tests.fakes import wait_until_settled
from tests.spark.test_join_streams import events, stream_of
from tests.spark.test_source import put

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
PARTIAL = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "100"}
CACHE_MODE = {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "1 h"}


@pytest.mark.parametrize(
    ("options", "strategy", "says"),
    [
        ({}, "auto", ["broadcast (a batch, and 10 rows", "NONE, by default"]),
        ({}, "cache", ["cache (asked for)", "lookup.cache = FULL"]),
        ({}, "broadcast", ["broadcast (asked for)"]),
        ({"lookup.cache": "NONE"}, "cache", ["cache (asked for)", "lookup.cache = NONE;"]),
        (PARTIAL, "auto", ["cache (lookup.cache = PARTIAL"]),
        ({"lookup.on-error": "NULL"}, "auto", ["cache (lookup.on-error = NULL)", "lookup.cache = FULL"]),
        (CACHE_MODE, "cache", ["cache (asked for)", "NONE, by default; lookup.metadata.source = CACHE"]),
    ],
)
def test_a_batch(spark: SparkSession, tmp_path: Path, options: dict[str, Any], strategy: str, says: list[str]) -> None:
    """A batch over a small table is a broadcast unless something speaks against it; the explanation says what."""
    path = put(tmp_path / "dim.parquet", 1)
    joined = lookup_join(spark.range(3), str(path), "id", strategy=strategy, options=options)
    text = explain_lookup(joined.filter("version = 1").select("id"))
    assert [part for part in says if part not in text] == []
    assert f"table: {path}" in text
    assert "on: id = id (left)" in text
    assert joined.count() == 3


def test_what_auto_goes_by(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows, whether keys repeat (which a snapshot knows), bytes, and whether it is a stream; the log says why as well."""
    monkeypatch.setattr(join, "_BROADCAST_ROWS", 9)
    monkeypatch.setattr(join, "_BROADCAST_REPEATED_ROWS", 15)
    unique = put(tmp_path / "unique.parquet", 1)
    repeated = tmp_path / "repeated.parquet"
    pq.write_table(pa.table({"id": [1, 1, *range(10)], "v": range(12)}), repeated)
    wait_until_settled(repeated)
    with caplog.at_level(logging.INFO, "pyspark_lookup.join"):
        assert "cache (10 rows are more than 9)" in explain_lookup(lookup_join(spark.range(3), str(unique), "id"))
    assert "cache (10 rows are more than 9)" in caplog.text
    assert "cache (12 rows are more than 9)" in explain_lookup(lookup_join(spark.range(3), str(repeated), "id"))
    LookupTable(str(repeated), {"lookup.keys": "id", "lookup.cache": "FULL"}).warm()
    text = explain_lookup(lookup_join(spark.range(3), str(repeated), "id"))
    assert "broadcast (a batch, and 12 repeated rows are no more than 15)" in text
    monkeypatch.setattr(join, "_BROADCAST_ROWS", 100)
    events(tmp_path / "events", 1)
    text = explain_lookup(lookup_join(stream_of(spark, tmp_path / "events"), str(unique), "id"))
    assert "cache (a stream" in text
    large = tmp_path / "large.parquet"
    pq.write_table(pa.table({"id": range(300_000), "v": range(300_000)}), large, compression="none")
    options = {"lookup.scan.split-size": "1 MiB"}
    text = explain_lookup(lookup_join(spark.range(3), str(large), "id", options=options))
    assert "are more than lookup.scan.split-size" in text
    assert "lookup.cache = NONE, by default" in text
    lines = tmp_path / "lines.csv"
    lines.write_text("id,v\n1,2\n")
    assert "not known before they are read" in explain_lookup(lookup_join(spark.range(3), str(lines), "id"))
    assert explain_lookup(spark.range(3)) == "no lookup join in this DataFrame"


def test_a_stream_with_a_broadcast(spark: SparkSession, tmp_path: Path) -> None:
    """Asked for, a broadcast in a stream sees changes too, also where the table takes several tasks to read."""
    directory = tmp_path / "dim"
    for number in range(2):
        put(directory / f"{number}.parquet", 1, range(number * 100_000, (number + 1) * 100_000))
    events(tmp_path / "events", 1, range(10))
    options = {"lookup.scan.split-size": "1 MiB"}
    joined = lookup_join(
        stream_of(spark, tmp_path / "events"), str(directory), "id", strategy="broadcast", options=options
    )
    query = joined.writeStream.format("memory").queryName("broadcasts").start()
    try:
        query.processAllAvailable()
        put(directory / "0.parquet", 2, range(100_000))
        events(tmp_path / "events", 2, range(10))
        query.processAllAvailable()
    finally:
        query.stop()
    found = {row.batch: row.version for row in spark.table("broadcasts").collect()}
    assert found == {1: 1, 2: 2}
