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

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

VALIDITY = {"lookup.valid-from": "valid_from", "lookup.valid-to": "valid_to"}
MODES: dict[str, dict[str, str]] = {
    "none": {"lookup.cache": "NONE"},
    "partial": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "10000"},
    "full": {"lookup.cache": "FULL"},
}
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


def by_range(found: DataFrame, table: DataFrame, how: str) -> list[Any]:
    """Spark's own answer: of the rows that are valid the one that begins last."""
    right = table.withColumnRenamed("id", "key")
    begun = right.valid_from.isNull() | (right.valid_from <= found["at"])
    ended = right.valid_to.isNull() | (found["at"] < right.valid_to)
    rows = found.join(right, (found.id == right.key) & found["at"].isNotNull() & begun & ended, how)
    newest = rows.groupBy("event", found.id, "at").agg(sf.max_by("name", sf.coalesce(sf.col("valid_from").cast("string"), sf.lit(""))).alias("name"))  # fmt: skip
    return sorted(newest.select("event", "name").collect())


@pytest.mark.parametrize(("kind", "mode"), by_day(itertools.product(TYPES, MODES), 4))
def test_as_a_join_on_ranges(spark: SparkSession, tmp_path: Path, kind: str, mode: str) -> None:
    """Generated histories with gaps and nulls, left and inner: what Spark's join on ranges gives."""
    path = str(tmp_path / "t")
    LookupTable(path, {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "c")}).write(history(1, kind, False))
    table = spark.read.format("lookupcache").load(path)
    found = events(spark, 2, kind)
    for how in ("left", "inner"):
        joined = lookup_join(
            found, path, "id", how=how, columns=["name"], as_of="at", options={**MODES[mode], **VALIDITY}
        )
        assert sorted(joined.select("event", "name").collect()) == by_range(found, table, how)


@pytest.mark.parametrize("mode", MODES)
def test_overlaps(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    """Where two rows are valid at once: an error that names the key, or the one that is valid since later."""
    path = str(tmp_path / "t")
    LookupTable(path, {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "c")}).write(history(3, "number", True))
    table = spark.read.format("lookupcache").load(path)
    found = events(spark, 4, "number").filter("at >= 10")  # numbers of two digits: by_range compares texts
    with pytest.raises(Exception, match=r"several rows \(up to \d\) of one key are valid at once.*id = \d+ at \d+"):
        lookup_join(found, path, "id", as_of="at", options={**MODES[mode], **VALIDITY}).collect()
    rows = table.filter("valid_from IS NULL OR valid_from >= 10")
    path = str(tmp_path / "late")
    rows.write.format("lookupcache").mode("append").option("lookup.keys", "id").save(path)
    options = {**MODES[mode], **VALIDITY, "lookup.overlap": "NEWEST"}
    joined = lookup_join(found, path, "id", columns=["name"], as_of="at", options=options)
    assert sorted(joined.select("event", "name").collect()) == by_range(found, rows, "left")


def test_until_the_next(spark: SparkSession, tmp_path: Path) -> None:
    """Without valid_to a row is valid until the next one of its key."""
    path = str(tmp_path / "t")
    prices = pa.table({"item": ["a", "a", "b"], "since": [0, 10, 5], "price": [1.0, 2.0, 7.0]})
    LookupTable(path, {"lookup.keys": "item", "lookup.cache.dir": str(tmp_path / "c")}).write(prices)
    sold = spark.createDataFrame([("a", 0), ("a", 9), ("a", 10), ("b", 4), ("b", 99), ("c", 1)], "item string, at long")
    joined = lookup_join(sold, path, "item", columns=["price"], as_of="at", options={"lookup.valid-from": "since"})
    assert [row.price for row in joined.orderBy("item", "at").collect()] == [1.0, 1.0, 2.0, None, 7.0, None]
    assert "as of: at, by since" in explain_lookup(joined)


def test_a_stream_of_events(spark: SparkSession, tmp_path: Path) -> None:
    """A running stream sees rows that were closed and opened by a transaction between two micro-batches."""
    path = str(tmp_path / "t")
    table = LookupTable(path, {"lookup.keys": "id,valid_from", "lookup.cache.dir": str(tmp_path / "c")})
    schema = pa.schema(
        [("id", pa.int64()), ("valid_from", pa.int64()), ("valid_to", pa.int64()), ("city", pa.string())]
    )
    table.write(pa.table({"id": [1], "valid_from": [0], "valid_to": [None], "city": ["Rome"]}, schema))
    (tmp_path / "in").mkdir()
    source = spark.readStream.schema("id long, at long").parquet(str(tmp_path / "in"))
    joined = lookup_join(source, path, "id", columns=["city"], as_of="at", options=VALIDITY)
    found: list[Any] = []

    def keep(batch: DataFrame, _: int) -> None:
        found.extend(tuple(row) for row in batch.orderBy("at").collect())

    query = joined.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        for number in range(2):
            facts = spark.createDataFrame([(1, 5), (1, 15)], "id long, at long").coalesce(1)  # one file is seen whole
            facts.write.mode("append").parquet(str(tmp_path / "in"))
            query.processAllAvailable()
            if number == 0:
                with table.transaction() as t:  # type 2: close the row that is valid, and open the next
                    t.upsert(pa.table({"id": [1], "valid_from": [0], "valid_to": [10], "city": ["Rome"]}, schema))
                    t.write(pa.table({"id": [1], "valid_from": [10], "valid_to": [None], "city": ["Oslo"]}, schema))
    finally:
        query.stop()
    assert found == [(1, 5, "Rome"), (1, 15, "Rome"), (1, 5, "Rome"), (1, 15, "Oslo")]


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
        spark.read.format("lookupcache").option("lookup.valid-from", "since").load(path)
