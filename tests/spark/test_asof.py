"""As-of lookups through Spark: the same rows as Spark's own join on ranges, in every cache mode, and as a stream."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as sf

from pyspark_lookup import LookupTable, explain_lookup, lookup_join
from tests.fuzzing import by_day
from tests.spark.common import MODES, batches_of, load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

VALIDITY = {"lookup.valid-from": "valid_from", "lookup.valid-to": "valid_to"}
TYPES = {
    "instant": (pa.timestamp("us", "UTC"), 86_400_000_000),
    "local": (pa.timestamp("us"), 86_400_000_000),
    "date": (pa.date32(), 1),
    "number": (pa.int64(), 1),
}


def history(seed: int, kind: str, overlaps: bool) -> pa.Table:
    """Rows of 60 keys with gaps, nulls on both ends, and overlaps if wanted; a key's rows begin at different times."""
    draw = random.Random(seed)
    form, unit = TYPES[kind]
    found: list[tuple[int, int | None, int | None, str]] = []
    for key in range(60):
        at = draw.randrange(5)
        count = draw.randrange(6)
        for number in range(count):
            length = draw.randrange(1, 6)
            start = None if number == 0 and draw.random() < 0.3 else at
            end = None if number == count - 1 and draw.random() < 0.4 else at + length
            found.append((key, start, end, f"{key}-{number}"))
            at += draw.randrange(1, length + 1) if overlaps else length + draw.randrange(3)
    draw.shuffle(found)

    def column(place: int) -> pa.Array:
        values = [None if row[place] is None else row[place] * unit for row in found]  # type: ignore[operator]
        return pa.array(values, pa.int32() if kind == "date" else pa.int64()).cast(form)

    names = {"id": [row[0] for row in found], "valid_from": column(1), "valid_to": column(2)}
    return pa.table({**names, "name": [row[3] for row in found]})


def events(spark: SparkSession, seed: int, kind: str) -> DataFrame:
    draw = random.Random(seed)
    form, unit = TYPES[kind]
    times = [None if draw.random() < 0.1 else draw.randrange(30) * unit for _ in range(2000)]
    at = pa.array(times, pa.int32() if kind == "date" else pa.int64()).cast(form)
    ids = [None if draw.random() < 0.05 else draw.randrange(70) for _ in times]
    found = spark.createDataFrame(pa.table({"event": range(len(times)), "id": pa.array(ids, pa.int64()), "at": at}))
    return found.withColumn("at", found["at"].cast("timestamp_ntz")) if kind == "local" else found


def by_range(found: DataFrame, table: DataFrame, how: str) -> list[tuple[Any, ...]]:
    """Spark's own answer: of the rows that are valid the one that begins last."""
    right = table.withColumnRenamed("id", "key")
    begun = right.valid_from.isNull() | (right.valid_from <= found["at"])
    ended = right.valid_to.isNull() | (found["at"] < right.valid_to)
    rows = found.join(right, (found.id == right.key) & found["at"].isNotNull() & begun & ended, how)
    newest = rows.groupBy("event", found.id, "at").agg(sf.max_by("name", sf.struct("valid_from")).alias("name"))
    return names_of(newest)


def names_of(rows: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, rows.select("event", "name").collect()))


@pytest.mark.parametrize(("kind", "mode"), by_day(itertools.product(TYPES, MODES), 4))
def test_as_a_join_on_ranges(spark: SparkSession, tmp_path: Path, kind: str, mode: str) -> None:
    """Generated histories with gaps and nulls: what Spark's join on ranges gives. Where two rows are valid at once: an error that
    names the key, or the one that is valid since later."""
    found, options = events(spark, 2, kind), {**MODES[mode], **VALIDITY}
    for overlaps in (False, True):
        path = str(tmp_path / str(overlaps))
        table = LookupTable(path, {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "c")})
        table.write(history(1, kind, overlaps))
        if overlaps:
            with pytest.raises(
                Exception, match=r"several rows \(up to \d\) of one key are valid at once.*id = \d+ at "
            ):
                lookup_join(found, path, "id", as_of="at", options=options).collect()
            options["lookup.overlap"] = "NEWEST"
        for how in ("left", "inner"):
            joined = lookup_join(found, path, "id", how=how, columns=["name"], as_of="at", options=options)
            assert names_of(joined) == by_range(found, load(spark, path), how)


def test_a_stream_of_events(spark: SparkSession, tmp_path: Path) -> None:
    """A stream sees rows that were closed and opened by a transaction between two micro-batches. Without valid_to a row is valid
    until the next one of its key."""
    path = str(tmp_path / "t")
    table = LookupTable(path, {"lookup.keys": "id,valid_from", "lookup.cache.dir": str(tmp_path / "c")})

    def row(since: int, until: int | None, city: str) -> pa.Table:
        times = {"valid_from": pa.array([since]), "valid_to": pa.array([until], pa.int64())}
        return pa.table({"id": [1], **times, "city": [city]})

    table.write(row(0, None, "Rome"))
    (tmp_path / "in").mkdir()
    stream = spark.readStream.schema("id long, at long").parquet(str(tmp_path / "in"))
    joined = lookup_join(stream, path, "id", columns=["city"], as_of="at", options=VALIDITY)
    facts = spark.createDataFrame([(1, -1), (1, 9), (1, 10)], "id long, at long").coalesce(1)  # one file is seen whole
    for later in ("Rome", "Oslo"):
        facts.write.mode("append").parquet(str(tmp_path / "in"))
        (found,) = batches_of(joined, tmp_path / "checkpoint")
        assert sorted(found, key=lambda row: row[1]) == [(1, -1, None), (1, 9, "Rome"), (1, 10, later)]
        with table.transaction() as t:  # type 2: close the row that is valid, and open the next
            t.upsert(row(0, 10, "Rome"))
            t.upsert(row(10, None, "Oslo"))
    since = {"lookup.valid-from": "valid_from"}
    until_next = lookup_join(facts, path, "id", columns=["city"], as_of="at", options=since)
    assert [row.city for row in until_next.orderBy("at").collect()] == [None, "Rome", "Oslo"]
    assert "as of: at, by valid_from" in explain_lookup(until_next)


def test_what_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Without the columns' names, by a column that is not there, of another type, or broadcast: errors when it is called."""
    path = str(tmp_path / "t")
    LookupTable(path, {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "c")}).write(history(1, "date", False))
    found = events(spark, 2, "date").withColumn("text", sf.lit("x")).withColumn("instant", sf.current_timestamp())
    for as_of, more, words in (
        ("at", {}, "argument as_of needs the table's columns"),
        ("then", VALIDITY, "no column 'then'"),
        ("text", VALIDITY, "'text' is string, the table's 'valid_from' is date"),
        ("instant", VALIDITY, "'instant' is timestamp"),
        ("at", {"lookup.valid-from": "since"}, "no column 'since'"),
        ("at", {**VALIDITY, "lookup.valid-to": "name"}, "both must be of one type"),
        ("at", {**VALIDITY, "lookup.overlap": "LAST"}, "lookup.overlap = 'LAST'"),
    ):
        with pytest.raises(Exception, match=words):
            lookup_join(found, path, "id", as_of=as_of, options=more)
    with pytest.raises(Exception, match="strategy='cache'"):
        lookup_join(found, path, "id", as_of="at", strategy="broadcast", options=VALIDITY)
    with pytest.raises(Exception, match=r"lookup.valid-from.*no column 'since'"):
        load(spark, path, {"lookup.valid-from": "since"})
