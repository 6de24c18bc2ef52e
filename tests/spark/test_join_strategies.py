"""Which way `lookup_join` takes, and that it says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pyspark_lookup import LookupTable, explain_lookup, lookup_join
from pyspark_lookup.spark import join
from tests.spark.common import MODES, events, put, running, saved, stream_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
CACHE_MODE = {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "1 h"}
SAID: list[tuple[dict[str, Any], str, list[str]]] = [
    ({}, "auto", ["broadcast (a batch, and 10 rows", "NONE, by default"]),
    ({}, "cache", ["cache (asked for)", "lookup.cache = FULL"]),
    ({}, "broadcast", ["broadcast (asked for)"]),
    (MODES["none"], "cache", ["cache (asked for)", "lookup.cache = NONE;"]),
    (MODES["partial"], "auto", ["cache (lookup.cache = PARTIAL"]),
    ({"lookup.on-error": "NULL"}, "auto", ["cache (lookup.on-error = NULL)", "lookup.cache = FULL"]),
    (CACHE_MODE, "cache", ["cache (asked for)", "NONE, by default; lookup.metadata.source = CACHE"]),
]


def test_a_batch(spark: SparkSession, tmp_path: Path) -> None:
    """A batch over a small table is a broadcast unless something speaks against it; the explanation says what."""
    path = put(tmp_path / "dim.parquet", 1)
    for options, strategy, says in SAID:
        joined = lookup_join(spark.range(3), str(path), "id", strategy=strategy, options=options)
        text = explain_lookup(joined.filter("version = 1").select("id"))
        assert [part for part in [*says, f"table: {path}", "on: id = id (left)"] if part not in text] == []
        assert joined.count() == 3
    assert explain_lookup(spark.range(3)) == "no lookup join in this DataFrame"


def test_what_auto_goes_by(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows, whether keys repeat (which a snapshot knows), bytes, and whether it is a stream; the log says why as well."""
    monkeypatch.setattr(join, "_BROADCAST_ROWS", 9)
    monkeypatch.setattr(join, "_BROADCAST_REPEATED_ROWS", 15)

    def explained(path: Path, **options: str) -> str:
        return explain_lookup(lookup_join(spark.range(3), str(path), "id", options=options))

    unique = put(tmp_path / "unique.parquet", 1)
    repeated = saved(tmp_path / "repeated.parquet", {"id": [1, 1, *range(10)], "v": range(12)})
    with caplog.at_level(logging.INFO, "pyspark_lookup.join"):
        assert "cache (10 rows are more than 9)" in explained(unique)
    assert "cache (10 rows are more than 9)" in caplog.text
    assert "cache (12 rows are more than 9)" in explained(repeated)
    LookupTable(str(repeated), {"lookup.keys": "id", "lookup.cache": "FULL"}).warm()
    assert "broadcast (a batch, and 12 repeated rows are no more than 15)" in explained(repeated)
    monkeypatch.setattr(join, "_BROADCAST_ROWS", 100)
    events(tmp_path / "events", 1)
    stream = stream_of(spark, tmp_path / "events")
    assert "cache (a stream" in explain_lookup(lookup_join(stream, str(unique), "id"))
    large = saved(tmp_path / "large.parquet", {"id": range(300_000), "v": range(300_000)}, group=300_000)
    text = explained(large, **{"lookup.scan.split-size": "1 MiB"})
    assert "are more than lookup.scan.split-size" in text
    assert "lookup.cache = NONE, by default" in text
    lines = tmp_path / "lines.csv"
    lines.write_text("id,v\n1,2\n")
    assert "not known before they are read" in explained(lines)


def test_a_stream_with_a_broadcast(spark: SparkSession, tmp_path: Path) -> None:
    """Asked for, a broadcast in a stream sees changes too, also where the table takes several tasks to read."""
    put(tmp_path / "dim" / "1.parquet", 1, range(100_000, 200_000))
    events(tmp_path / "events", 0, range(10))
    options, stream = {"lookup.scan.split-size": "1 MiB"}, stream_of(spark, tmp_path / "events")
    joined = lookup_join(stream, str(tmp_path / "dim"), "id", strategy="broadcast", options=options)
    with running(joined, "broadcasts") as query:
        for version in (1, 2):
            put(tmp_path / "dim" / "0.parquet", version, range(100_000))
            events(tmp_path / "events", version, range(10))
            query.processAllAvailable()
    assert {row.batch: row.version for row in spark.table("broadcasts").collect()} == {0: 1, 1: 1, 2: 2}
