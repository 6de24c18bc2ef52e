"""Dates, times and intervals as Spark has written them, compared with what its own readers give."""

import contextlib
import datetime
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, SparkSession

from pyspark_lookup import LookupTable
from tests.support.spark_tables import conf

pytestmark = pytest.mark.spark
# Juneau crossed the date line; not Asia/Manila, whose mean time the zone database has corrected since Spark made its tables.
ZONES = [
    "America/Los_Angeles", "Asia/Kolkata", "Europe/Amsterdam", "UTC", "America/Juneau", "Australia/Sydney", "+05:30",
]  # fmt: skip
EDGES = ["0001-01-01", "0100-03-01", "1500-02-28", "1500-03-01", "1582-10-04", "1582-10-15", "1834-12-31", "1883-11-18", "1900-01-01", "1937-07-01", "1970-01-01", "2262-04-12", "9999-12-31"]  # fmt: skip
_DAY = 86400 * 10**6


def values(seed: str, count: int) -> list[int]:
    """Times in microseconds since 1970, cut to milliseconds: around the edges, and anywhere between the years 1 and 9999."""
    rng = random.Random(seed)
    edges = [(datetime.date.fromisoformat(text) - datetime.date(1970, 1, 1)).days * _DAY for text in EDGES]
    low, high = edges[0] + 2 * _DAY, edges[-1] - _DAY
    edge_times = [min(max(edge + rng.randrange(-_DAY, _DAY), low), high) for edge in edges for _ in range(4)]
    return [at - at % 1000 for at in edges + edge_times + [rng.randrange(low, high) for _ in range(count)]]


def frame(spark: SparkSession, times: list[int]) -> DataFrame:
    """A row for each time, with its date, as instant and local time, nested, and as an interval."""
    rows = spark.createDataFrame(list(enumerate(times)), "id INT, at BIGINT").coalesce(1)
    return rows.selectExpr(
        "id",
        "date_from_unix_date(CAST(floor(at / 86400000000D) AS INT)) AS d",
        "timestamp_micros(at) AS t",
        "TIMESTAMP_NTZ'1970-01-01' + make_dt_interval(0, 0, 0, CAST(at AS DECIMAL(38, 6)) / 1000000) AS l",
        "make_dt_interval(0, 0, 0, CAST(at AS DECIMAL(38, 6)) / 1000000) AS i",
        "named_struct('t', timestamp_micros(at), 'd', date_from_unix_date(CAST(floor(at / 86400000000D) AS INT))) AS s",
        "IF(id % 7 = 0, NULL, array(timestamp_micros(at), NULL)) AS a",
        "map(id, timestamp_micros(at)) AS m",
    )


def numbers_by_spark(spark: SparkSession, path: str, form: str) -> list[list[Any]]:
    """The values as Spark reads them, as numbers: days and microseconds."""
    rows = spark.read.format(form).load(path).selectExpr(
        "id", "unix_date(d)", "unix_micros(t)", "timestampdiff(MICROSECOND, TIMESTAMP_NTZ'1970-01-01', l)",
        "timestampdiff(MICROSECOND, TIMESTAMP_NTZ'1970-01-01', TIMESTAMP_NTZ'1970-01-01' + i)",
        "unix_micros(s.t)", "unix_date(s.d)", "unix_micros(a[0])", "unix_micros(m[id])",
    )  # fmt: skip
    return sorted([list(row) for row in rows.collect()], key=lambda row: row[0])


def numbers_by_us(table: LookupTable) -> list[list[Any]]:
    """The values as this package reads them, as the same numbers."""
    rows = table.scan().sort_by("id")
    arrays = {name: rows.column(name).combine_chunks() for name in rows.column_names}
    nested, lists = arrays["s"], arrays["a"]
    firsts = pc.list_element(pc.if_else(lists.is_valid(), lists, pa.scalar([None], lists.type)), 0)
    columns = [*(arrays[name] for name in ("id", "d", "t", "l", "i")), nested.field("t"), nested.field("d"), firsts]
    columns.append(arrays["m"].items)
    numbers = [of.cast(pa.int32() if pa.types.is_date32(of.type) else pa.int64()).to_pylist() for of in columns]
    return [list(row) for row in zip(*numbers, strict=True)]


def check(spark: SparkSession, path: Path, form: str, cache: Path) -> None:
    """Compare with Spark's own reader: a scan, lookups by key, and a predicate that uses statistics."""
    expected = numbers_by_spark(spark, str(path), form)
    options = {"lookup.cache.dir": str(cache)}
    assert numbers_by_us(LookupTable(str(path), options)) == expected
    days = pa.array([row[1] for row in expected[:40]], pa.int32()).cast(pa.date32())
    times = pa.array([row[2] for row in expected[:40]]).cast(pa.timestamp("us", "UTC"))
    for name, keys in {"d": days, "t": times}.items():
        matches = LookupTable(str(path), {**options, "lookup.keys": name}).get_many(pa.table({name: keys.unique()}))
        assert set(matches.column("id").to_pylist()) >= set(range(40))
    edge = "TIMESTAMP'1850-01-01 00:00:00 UTC'"
    where = LookupTable(str(path), {**options, "lookup.where": f"t < {edge} AND d > DATE'1582-10-10'"}).scan()
    by_spark = spark.read.format(form).load(str(path)).where(f"t < {edge} AND d > DATE'1582-10-10'")
    assert sorted(where.column("id").to_pylist()) == sorted(row.id for row in by_spark.select("id").collect())


def write_parquet(spark: SparkSession, rows: DataFrame, path: Path, zone: str, mode: str, kind: str) -> None:
    names = ["sql.session.timeZone", "sql.parquet.datetimeRebaseModeInWrite", "sql.parquet.int96RebaseModeInWrite", "sql.parquet.outputTimestampType"]  # fmt: skip
    with contextlib.ExitStack() as confs:
        for name, value in zip(names, (zone, mode, mode, kind), strict=True):
            confs.enter_context(conf(spark, f"spark.{name}", value))
        rows.write.option("parquet.block.size", 4096).parquet(str(path))


def test_times_in_a_hybrid_calendar(spark: SparkSession, tmp_path: Path) -> None:
    """Dates and INT96 timestamps written in a zone that once had its own mean time, in Parquet's legacy mode and in ORC, with types that ORC lacks."""
    rows, zone = frame(spark, values("day", 100)), ZONES[0]
    write_parquet(spark, rows, tmp_path / "parquet", zone, "LEGACY", "INT96")
    rows.write.orc(str(tmp_path / "orc"))
    for form in ("parquet", "orc"):
        check(spark, tmp_path / form, form, tmp_path / "cache")


@pytest.mark.nightly
@pytest.mark.parametrize("zone", ZONES)
def test_all_times(spark: SparkSession, tmp_path: Path, zone: str) -> None:
    """Every mode and type of Parquet over many more instants, in many zones; ORC in each compression."""
    for mode in ("LEGACY", "CORRECTED"):
        for kind in ("INT96", "TIMESTAMP_MICROS", "TIMESTAMP_MILLIS"):
            path = tmp_path / f"{mode}-{kind}"
            write_parquet(spark, frame(spark, values(f"{zone} {mode} {kind}", 2000)), path, zone, mode, kind)
            check(spark, path, "parquet", tmp_path / "cache")
    for compression in ("zlib", "snappy", "lz4", "lzo", "zstd", "none"):
        path = tmp_path / compression
        frame(spark, values(f"{zone} {compression}", 2000)).write.option("compression", compression).orc(str(path))
        check(spark, path, "orc", tmp_path / "cache")
