"""Days and instants of the hybrid calendar: by the arithmetic of others, and in files whose footer says so."""

import datetime
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from pyspark_lookup import LookupTable
from pyspark_lookup.columnar.calendars import ZoneHistory, convert_leaves, gregorian_dates, gregorian_days, widened
from pyspark_lookup.columnar.predicate import ColumnStats, Compare, may_match
from pyspark_lookup.errors import SchemaError
from tests.support.delta_tables import append_commit, replay_files
from tests.support.fakes import CACHES
from tests.support.orc_files import JULIAN, PROLEPTIC, orc_file

EPOCH = datetime.date(1970, 1, 1)


def julian_day(year: int, month: int, day: int) -> int:
    """Days since 1970 of a day of the Julian calendar, counted one by one from a leap day on."""
    before = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)[month - 1] + (year % 4 == 0 and month > 2)
    return 365 * (year - 1) + (year - 1) // 4 + before + day - 1 - 719164


def test_hybrid_days_keep_their_fields() -> None:
    """A day of the Julian calendar is the Gregorian day with its name, or March 1 where there is no February 29."""
    first = datetime.date(1, 1, 1)
    days, expected = [], []
    for number in range(0, (datetime.date(1582, 10, 5) - first).days, 7):
        day = first + datetime.timedelta(number)
        days.append(julian_day(day.year, day.month, day.day))
        expected.append((day - EPOCH).days)
    assert gregorian_days(np.array(days)).tolist() == expected
    assert julian_day(1582, 10, 4) == -141428  # the day before 1582-10-15
    leap = [julian_day(year, 2, 29) for year in (100, 1500)]
    march = [(datetime.date(year, 3, 1) - EPOCH).days for year in (100, 1500)]
    assert gregorian_days(np.array(leap)).tolist() == march
    later = np.array([-141427, -1, 0, 2932896])
    assert gregorian_days(later).tolist() == later.tolist()
    # Before the year 1, and where 32 bits end, days stay in their order.
    far = gregorian_days(np.arange(-2 * 10**9, 0, 10**6 + 1))
    assert (np.diff(far) > 0).all()


@pytest.mark.parametrize(
    ("zone", "seconds", "difference"),
    [
        ("UTC", -62135769600, 172800),
        ("America/Los_Angeles", -12219264001, -864422),
        ("America/Los_Angeles", -12219264000, -422),
        ("Asia/Kolkata", -3645235808, -1400),
        ("Asia/Kolkata", -3155695330, 530),
        ("America/Whitehorse", -12219267600, 7212),
        ("CET", -12219296400, 0),
        ("GMT+5:30", -14825827800, -864000),
        ("+05:30", -14825827800, -777600),  # `java.util` does not know it
        ("GMT-8", -12219264000, 0),
    ],
)
def test_hybrid_instants(zone: str, seconds: int, difference: int) -> None:
    """Seconds of the hybrid calendar become those of Spark's own tables, in zones with a local mean time or a changed standard time, and at offsets."""
    assert ZoneHistory.from_zone(zone).gregorian_seconds(np.array([seconds])).tolist() == [seconds + difference]


def test_an_unknown_zone_is_named() -> None:
    """An unknown zone is an error, because it is of no use to guess where old times were written."""
    for zone in ("Middle/Earth", "../etc/passwd"):
        with pytest.raises(SchemaError, match=f"zone '{zone}', .* install tzdata"):
            ZoneHistory.from_zone(zone)


def test_nested_columns_are_converted_where_they_are_dates() -> None:
    """Nulls, slices and fields' metadata stay as they are."""
    lists, maps = pa.list_(pa.field("e", pa.date32())), pa.map_(pa.string(), pa.date32())
    kind = pa.struct([pa.field("d", pa.date32(), metadata={"id": "1"}), ("many", lists), ("by", maps)])
    old, new = julian_day(1206, 3, 31), (datetime.date(1206, 3, 31) - EPOCH).days

    def rows(day: int) -> pa.Array:
        values = [
            None, {"d": day, "many": [day, None, 5], "by": [("a", day), ("b", None)]}, {"d": None, "many": None, "by": None},
            {"d": 7, "many": [], "by": []},
        ]  # fmt: skip
        plain = pa.struct([("d", pa.int32()), ("many", pa.list_(pa.int32())), ("by", pa.map_(pa.string(), pa.int32()))])
        return pa.array(values, plain).cast(kind)

    for start in range(4):
        converted = convert_leaves(rows(old)[start:], iter([gregorian_dates, gregorian_dates, None, gregorian_dates]))
        converted.validate(full=True)
        assert converted.equals(rows(new)[start:])
        assert converted.type.field("d").metadata == {b"id": b"1"}


FIRST = datetime.date(1582, 10, 15)  # of the Gregorian calendar
OLD = [datetime.date(1, 1, 1), datetime.date(1206, 3, 31), datetime.date(1582, 10, 4), FIRST, None]


def hybrid(day: datetime.date | None) -> int | None:
    if day is None:
        return None
    return julian_day(day.year, day.month, day.day) if day < FIRST else (day - EPOCH).days


@pytest.mark.parametrize("mode", CACHES)
def test_dates_of_orc(tmp_path: Path, cache_dir: Path, mode: str) -> None:
    """The footer names the calendar. Where it does not, dates of Java's writers are hybrid, those of others are not. Iceberg's names the wrong one."""
    stored = pa.table({"d": pa.array([hybrid(day) for day in OLD], pa.int32()).cast(pa.date32()), "n": range(len(OLD))})
    plain = pa.table({"d": pa.array(OLD, pa.date32()), "n": range(len(OLD))})
    with_id = pa.schema([pa.field("d", pa.date32(), metadata={"iceberg.id": "1"}), pa.field("n", pa.int64())])
    for name, content in {
        "julian": orc_file(stored, JULIAN),
        "hive": orc_file(stored, writer=0),
        "proleptic": orc_file(plain, PROLEPTIC, writer=0),
        "cpp": orc_file(plain),
        "iceberg": orc_file(plain.cast(with_id), JULIAN, writer=0),
    }.items():
        path = tmp_path / f"{name}.orc"
        path.write_bytes(content)
        options = {"lookup.keys": "d", "lookup.cache.dir": str(cache_dir), **CACHES[mode]}
        table = LookupTable(str(path), options)
        assert set(table.scan().column("d").to_pylist()) == set(OLD), name
        for number, day in enumerate(OLD[:-1]):
            assert table.get(day) == [{"d": day, "n": number}]
        where = LookupTable(str(path), {**options, "lookup.where": "d < DATE'1582-10-10'"})
        assert sorted(where.scan().column("n").to_pylist()) == [0, 1, 2]


LOS_ANGELES = {-59006419200: 85978, -12219264001: -864422, -12219264000: -422, -2717640001: -422, -2717640000: 0, 7: 0}
"""Seconds of the hybrid calendar, and how much later the same local time is in the other."""
LEGACY = {"version": "4.0.0", "legacyDateTime": "", "legacyINT96": "", "timeZone": "America/Los_Angeles"}


def parquet_of_spark(footer: dict[str, str], unit: str, bounded: bool | list[str] = True) -> bytes:
    """A file of days (`d`), times (`t`), both within a struct (`s`) and numbers (`n`), a row group each, as they are stored."""
    times = pa.array([*LOS_ANGELES, None][: len(LOS_ANGELES)], pa.int64()).cast(pa.timestamp("s", "UTC"))
    times = times.cast(pa.timestamp("us" if unit == "int96" else unit, "UTC"))
    days = pa.array([*map(hybrid, OLD), 7][: len(times)], pa.int32()).cast(pa.date32())
    nested = pa.StructArray.from_arrays([days, pa.ListArray.from_arrays(range(len(times) + 1), times)], ["d", "t"])
    table = pa.table({"n": range(len(times)), "d": days, "t": times, "s": nested})
    if unit != "int96":  # of which all are instants
        table = table.append_column("local", times.cast(pa.timestamp(unit)))
    out = io.BytesIO()
    with pq.ParquetWriter(
        out, table.schema, use_deprecated_int96_timestamps=unit == "int96", write_statistics=bounded, store_schema=False
    ) as writer:
        writer.write_table(table, row_group_size=1)
        writer.add_key_value_metadata({f"org.apache.spark.{key}": value for key, value in footer.items()})
    return out.getvalue()


def check_legacy(options: dict[str, str], path: str, days: bool = True, times: bool = True) -> None:
    """Days and times are those that were written, by scan, by key, and by statistics."""
    options = {"lookup.keys": "n", **options}
    seconds = [at + (more if times else 0) for at, more in LOS_ANGELES.items()]
    dates = [*(OLD if days else [None] * len(OLD)), datetime.date(1970, 1, 8)]
    rows = LookupTable(path, options).scan().sort_by("n")
    stored_times, nested = (rows.column(name).combine_chunks() for name in ("t", "s"))
    assert (stored_times.cast(pa.int64()).to_numpy() // 10**6).tolist() == seconds
    assert nested.field("t").flatten().cast(pa.int64()).equals(stored_times.cast(pa.int64()))
    if "local" in rows.column_names:
        assert rows.column("local").cast(pa.int64()).to_pylist() == [at * 10**6 for at in LOS_ANGELES]
    for key in ("d", "t") if days else ("t",):
        keys = rows.column(key).drop_null()
        assert LookupTable(path, {**options, "lookup.keys": key}).get_many(pa.table({key: keys})).num_rows == len(keys)
    if days:
        assert rows.column("d").to_pylist() == nested.field("d").to_pylist() == dates
        where = LookupTable(path, {**options, "lookup.where": "d = DATE'1206-03-31'"})
        assert where.scan().column("n").to_pylist() == [1]
    edge = "1582-10-15 07:45:57" if times else "1582-10-15 07:59:59"
    where = LookupTable(path, {**options, "lookup.where": f"t <= TIMESTAMP'{edge} UTC'"})
    assert sorted(where.scan().column("n").to_pylist()) == [0, 1]


@pytest.mark.parametrize("mode", CACHES)
def test_times_of_legacy_parquet(tmp_path: Path, cache_dir: Path, mode: str) -> None:
    """Times have the old calendar in LEGACY mode and in files of Spark 2.4, in those of Spark 3.0 in INT96 only. What is not a time in a zone stays."""
    options = {"lookup.cache.dir": str(cache_dir), **CACHES[mode]}
    zone = {"timeZone": LEGACY["timeZone"]}
    cases: list[tuple[dict[str, str], str, bool, bool]] = [
        (LEGACY, "us", True, True), (LEGACY, "ms", True, True), (LEGACY, "int96", True, True),
        ({"version": "2.4.8", **zone}, "us", True, True), ({"version": "2.4.8", **zone}, "int96", True, True),
        ({"version": "3.0.3", **zone}, "int96", False, True), ({"version": "3.1.0", **zone}, "int96", False, False),
        ({"version": "4.0.0", "legacyINT96": "", **zone}, "us", False, False),
        ({"version": "10.0.0", **zone}, "us", False, False), ({"legacyDateTime": "", **zone}, "us", False, False),
    ]  # fmt: skip
    for number, (footer, unit, days, times) in enumerate(cases if mode == "NONE" else cases[:3]):
        path = tmp_path / f"{number}.parquet"
        path.write_bytes(parquet_of_spark(footer, unit))
        check_legacy(options, str(path), days, times)


def test_legacy_parquet_in_delta(tmp_path: Path, cache_dir: Path) -> None:
    """Legacy files of converted tables are read right, whether the statistics are as the footers have them or as Spark has read the values."""
    content, delta = parquet_of_spark(LEGACY, "us"), tmp_path / "delta"
    write_deltalake(str(delta), pq.read_table(io.BytesIO(content)))
    (add,) = replay_files(delta, 0).values()
    (delta / add["path"]).write_bytes(content)
    remove = {"path": add["path"], "deletionTimestamp": 1, "dataChange": True}
    append_commit(delta, [{"remove": remove}, {"add": {**add, "size": len(content)}}])
    for mode in CACHES.values():
        check_legacy({"lookup.cache.dir": str(cache_dir), **mode}, str(delta))
    # Each bound is that of the stored value, too late or too early by ten days.
    for stored, day in (("1206-04-07", "1206-03-31"), ("1582-10-14", "1582-10-04")):
        low = ColumnStats(*widened(*[datetime.date.fromisoformat(stored)] * 2), 0, 1)
        assert may_match(Compare("d", "=", datetime.date.fromisoformat(day)), {"d": low}.get)
