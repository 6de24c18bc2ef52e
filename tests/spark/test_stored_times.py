"""Dates, times and intervals as Spark has written them, compared with what its own readers give."""

from __future__ import annotations

import datetime
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from tests.support.fuzzing import by_day

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
ZONES = ["America/Los_Angeles", "Asia/Kolkata", "Europe/Amsterdam", "UTC"]
MORE_ZONES = [
    "Africa/Casablanca",
    "America/St_Johns",
    "America/Juneau",  # crossed the date line; not Asia/Manila, whose mean time the zone database has corrected since Spark made its tables
    "Asia/Tokyo",
    "Australia/Sydney",
    "Europe/Dublin",
    "+05:30",
]
EDGES = ["0001-01-01", "0100-03-01", "1500-02-28", "1500-03-01", "1582-10-04", "1582-10-15", "1834-12-31", "1883-11-18", "1900-01-01", "1937-07-01", "1970-01-01", "2262-04-12", "9999-12-31"]  # fmt: skip
_DAY = 86400 * 10**6
_NUMBER = pa.int64()


def values(seed: str, count: int) -> list[int]:
    """Microseconds since 1970: around the edges, and anywhere between the years 1 and 9999; each milliseconds."""
    rng = random.Random(seed)
    edges = [(datetime.date.fromisoformat(text) - datetime.date(1970, 1, 1)).days * _DAY for text in EDGES]
    low, high = edges[0] + 2 * _DAY, edges[-1] - _DAY
    near = [min(max(edge + rng.randrange(-_DAY, _DAY), low), high) for edge in edges for _ in range(4)]
    return [at - at % 1000 for at in edges + near + [rng.randrange(low, high) for _ in range(count)]]


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
    """What Spark reads, as numbers: days and microseconds."""
    rows = spark.read.format(form).load(path).selectExpr(
        "id", "unix_date(d)", "unix_micros(t)", "timestampdiff(MICROSECOND, TIMESTAMP_NTZ'1970-01-01', l)",
        "timestampdiff(MICROSECOND, TIMESTAMP_NTZ'1970-01-01', TIMESTAMP_NTZ'1970-01-01' + i)",
        "unix_micros(s.t)", "unix_date(s.d)", "unix_micros(a[0])", "unix_micros(m[id])",
    )  # fmt: skip
    return sorted([list(row) for row in rows.collect()], key=lambda row: row[0])


def numbers_by_us(table: LookupTable) -> list[list[Any]]:
    rows = table.scan().sort_by("id").combine_chunks()

    def of(column: pa.Array, kind: pa.DataType = _NUMBER) -> list[int | None]:
        found: list[int | None] = column.cast(kind).to_pylist()
        return found

    def only(name: str) -> pa.Array:
        return rows.column(name).combine_chunks()

    nested = only("s")
    first = iter(of(only("a").flatten())[::2])
    columns = [
        of(only("id")), of(only("d"), pa.int32()), of(only("t")), of(only("l")), of(only("i")),
        of(nested.field("t")), of(nested.field("d"), pa.int32()),
        [next(first) if valid else None for valid in only("a").is_valid().to_pylist()], of(only("m").items),
    ]  # fmt: skip
    return [list(row) for row in zip(*columns, strict=True)]


def check(spark: SparkSession, path: Path, form: str, cache: Path) -> None:
    """What Spark's own reader gives: by scan, by key, and by a predicate with statistics."""
    expected = numbers_by_spark(spark, str(path), form)
    options = {"lookup.cache.dir": str(cache)}
    assert numbers_by_us(LookupTable(str(path), options)) == expected
    days = pa.array([row[1] for row in expected[:40]], pa.int32()).cast(pa.date32())
    times = pa.array([row[2] for row in expected[:40]]).cast(pa.timestamp("us", "UTC"))
    for name, keys in {"d": days, "t": times}.items():
        found = LookupTable(str(path), {**options, "lookup.keys": name}).get_many(pa.table({name: keys.unique()}))
        assert set(found.column("id").to_pylist()) >= set(range(40))
    edge = "TIMESTAMP'1850-01-01 00:00:00 UTC'"
    where = LookupTable(str(path), {**options, "lookup.where": f"t < {edge} AND d > DATE'1582-10-10'"}).scan()
    by_spark = spark.read.format(form).load(str(path)).where(f"t < {edge} AND d > DATE'1582-10-10'")
    assert sorted(where.column("id").to_pylist()) == sorted(row.id for row in by_spark.select("id").collect())


def write_parquet(spark: SparkSession, rows: DataFrame, path: Path, zone: str, mode: str, kind: str) -> None:
    names = ["sql.session.timeZone", "sql.parquet.datetimeRebaseModeInWrite", "sql.parquet.int96RebaseModeInWrite", "sql.parquet.outputTimestampType"]  # fmt: skip
    before = {name: spark.conf.get(f"spark.{name}") for name in names}
    try:
        for name, value in zip(names, (zone, mode, mode, kind), strict=True):
            spark.conf.set(f"spark.{name}", value)
        rows.write.option("parquet.block.size", 4096).parquet(str(path))
    finally:
        for name, value in before.items():
            spark.conf.set(f"spark.{name}", str(value))


@pytest.mark.parametrize("zone", by_day(ZONES[:3], 3))
def test_parquet_in_legacy_mode(spark: SparkSession, tmp_path: Path, zone: str) -> None:
    """Dates and INT96 of a session in a zone with a local mean time of its own, as Spark reads them."""
    write_parquet(spark, frame(spark, values(zone, 100)), tmp_path / "t", zone, "LEGACY", "INT96")
    check(spark, tmp_path / "t", "parquet", tmp_path / "cache")


def test_orc(spark: SparkSession, tmp_path: Path) -> None:
    """In the hybrid calendar, with types that ORC lacks."""
    frame(spark, values("orc", 100)).write.orc(str(tmp_path / "t"))
    check(spark, tmp_path / "t", "orc", tmp_path / "cache")


@pytest.mark.nightly
@pytest.mark.parametrize("zone", ZONES + MORE_ZONES)
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
