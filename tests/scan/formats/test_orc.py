"""ORC files as Hive and Spark write them: columns without names, types that only Spark has, time zones, times far away."""

import array
import contextlib
import datetime
import io
import random
import re
import weakref
import zlib
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import orc

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import SchemaError
from pyspark_lookup.scan.formats import RangesFile
from pyspark_lookup.scan.formats.orc import OrcIndex, decompress_lzo, read_tail, unsigned_numbers
from pyspark_lookup.storage.stores import FileVersion
from tests.support.fakes import CACHES
from tests.support.orc_files import JULIAN, PROLEPTIC, orc_file


def scan(path: Path, cache_dir: Path, **options: str) -> pa.Table:
    """All rows; options by the ends of their names."""
    named = {f"lookup.{name}": text for name, text in options.items()}
    return LookupTable(str(path), {"lookup.cache.dir": str(cache_dir), **named}).scan()


@pytest.mark.parametrize("when", [datetime.datetime(2020, 1, 1), datetime.datetime(9999, 1, 1)])
def test_a_name_that_is_also_a_path(tmp_path: Path, cache_dir: Path, when: datetime.datetime) -> None:
    """A column `a.b` is read beside a struct `a` with a field `b`, whichever comes first."""
    row = {"a.b": when, "a": {"b": 1, "c": when}, "a.c": 3}
    for names in (list(row), list(reversed(row))):
        orc.write_table(pa.Table.from_pylist([row]).select(names), tmp_path / "t.orc")
        table = LookupTable(str(tmp_path / "t.orc"), {"lookup.cache.dir": str(cache_dir)})
        for columns in (None, ["a.b"], ["a"], ["a.c"]):
            assert table.scan(columns).to_pylist() == [{name: row[name] for name in columns or names}]


@pytest.mark.parametrize("mode", CACHES)
def test_columns_without_names(tmp_path: Path, cache_dir: Path, mode: str) -> None:
    """Hive's `_col0`, `_col1` are the declared columns by their places, those of the directories left out; beside files with names."""
    home = tmp_path / "t"
    (home / "day=1").mkdir(parents=True)
    (home / "day=2").mkdir()
    orc.write_table(pa.table({"_col0": [1, 2], "_col1": ["a", "b"]}), home / "day=1" / "a.orc")
    orc.write_table(pa.table({"_col0": [3]}), home / "day=1" / "b.orc")
    orc.write_table(pa.table({"name": ["d", "e"], "_col0": [0, 0], "id": [4, 5]}), home / "day=2" / "c.orc")
    schema = "id BIGINT, day INT, name STRING, more DOUBLE"
    options = {"lookup.cache.dir": str(cache_dir), "lookup.schema": schema, "lookup.keys": "id", **CACHES[mode]}
    table = LookupTable(str(home), options)
    rows = {1: ("a", 1), 2: ("b", 1), 3: (None, 1), 4: ("d", 2), 5: ("e", 2)}
    expected = [{"id": id_, "day": day, "name": name, "more": None} for id_, (name, day) in rows.items()]
    assert sorted(table.scan().to_pylist(), key=lambda row: row["id"]) == expected
    for row in expected:
        assert table.get(row["id"]) == [row]
    assert table.get(6) == []
    where = LookupTable(str(home), {**options, "lookup.where": "name = 'b'", "lookup.columns": "id, name"})
    assert where.scan().to_pylist() == [{"id": 2, "name": "b"}]
    # Another version, of which the answers were carried over where no changed file may have the key.
    orc.write_table(pa.table({"_col0": [2, 6], "_col1": ["B", "f"]}), home / "day=2" / "d.orc")
    table = LookupTable(str(home), options)
    assert sorted(row["name"] for row in table.get(2)) == ["B", "b"]
    assert [row["name"] for row in table.get(6)] == ["f"]


def test_columns_without_names_that_are_not_declared(tmp_path: Path, cache_dir: Path) -> None:
    """A file with more unnamed columns than are declared is refused; without a declaration, columns are called as in the file."""
    path = tmp_path / "a.orc"
    orc.write_table(pa.table({"_col0": [1], "_col1": ["a"]}), path)
    assert scan(path, cache_dir).to_pylist() == [{"_col0": 1, "_col1": "a"}]
    words = r"a.orc has 2 columns without names, but lookup.schema or .schema.…. has 1: id: declare all"
    with pytest.raises(SchemaError, match=words):
        scan(path, cache_dir, schema="id BIGINT")
    assert scan(path, cache_dir, schema="_col1 BIGINT, _col0 STRING").to_pylist() == [{"_col1": 1, "_col0": "a"}]


PATCHED = [2030, 2000, 2020, 1000000, *range(2040, 2191, 10)]


@pytest.mark.parametrize(
    ("version", "data", "expected"),
    [
        (1, "610007", [7] * 100), (1, "61ff64", list(range(100, 0, -1))), (1, "fb020306070b", [2, 3, 6, 7, 11]),
        (2, "0a2710", [10000] * 5), (2, "5e035ca1ab1edeadbeef", [23713, 43806, 57005, 48879]),
        (2, "8e132b2107d01e00147028323c46505a646e78828c96a0aab4befce8", PATCHED),
        (2, "c609020222424246", [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]), (2, "c0020403", [4, 2, 0]),
    ],
)  # fmt: skip
def test_runs_of_numbers(version: int, data: str, expected: list[int]) -> None:
    """The examples of ORC's specification are decoded, alone and one behind another; a stream that ends too soon is an error."""
    stream = bytes.fromhex(data)
    assert unsigned_numbers(stream * 3, 3 * len(expected), version).tolist() == 3 * expected
    assert unsigned_numbers(stream, len(expected) - 1, version).tolist() == expected[:-1]
    for end in range(len(stream)):
        with pytest.raises(ValueError, match="ends after 0 of"):
            unsigned_numbers(stream[:end], len(expected), version)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (b"\x15abcd\x11\0\0", b"abcd"),
        (b"\x14abc\x27\x08\0\x11\0\0", b"abc" * 4),  # a match that overlaps itself
        (b"\0\1" + b"x" * 19 + b"\x27\x49\0y\x11\0\0", b"x" * 28 + b"y"),  # a long literal, and one behind a match
        (b"\x15abcd\x20\0\1\x0c\0\x11\0\0", b"abcd" * 73 + b"a"),  # a long match
        (b"\x15abcd\x4c\0\xe0\0\x11\0\0", b"abcdabc" + b"c" * 8),  # the short forms
    ],
)
def test_lzo(block: bytes, expected: bytes) -> None:
    """Each kind of instruction is decompressed; a block that is cut, or longer than it may be, is an error."""
    assert decompress_lzo(memoryview(block), len(expected)) == expected
    for end in range(len(block)):
        with pytest.raises(ValueError, match="an LZO block"):
            decompress_lzo(memoryview(block)[:end], len(expected))
    if len(expected) > len(block):
        with pytest.raises(ValueError, match="an LZO block"):
            decompress_lzo(memoryview(block), len(expected) - 1)


FAR = ["0001-01-01 00:00:00", "1677-09-21 00:12:43", "2262-04-11 23:47:17", "2300-01-01 00:00:00.000001"]
FAR += ["9999-12-31 23:59:59.999999"]
EPOCH = datetime.datetime(1970, 1, 1)


def micros(values: list[str]) -> list[int]:
    return [(datetime.datetime.fromisoformat(text) - EPOCH) // datetime.timedelta(microseconds=1) for text in values]


def times_table(seed: int, rows: int) -> pa.Table:
    """Times of any year, some null, at the top and nested; runs of all kinds of fractions."""
    rng = random.Random(seed)
    steps = [1, 10, 1000, 10**6, 10**9, 86400 * 10**6]
    values: list[int | None] = micros(FAR)
    while len(values) < rows:
        first, step = rng.randrange(-(10**16), 10**16), rng.choice(steps)
        run = [first + step * number for number in range(rng.choice([1, 3, 20, 700]))]
        run = [rng.randrange(-(10**16), 10**16) for _ in run] if rng.random() < 0.3 else run
        values += [None if rng.random() < 0.1 else value for value in run]
    values = values[:rows]
    times = pa.array(values, pa.int64()).cast(pa.timestamp("us"))
    offsets = pa.array([0, *sorted(rng.choices(range(rows + 1), k=rows - 1)), rows], pa.int32())
    mask = pa.array([rng.random() < 0.1 for _ in range(rows)])
    nested = pa.StructArray.from_arrays([times, pa.array(range(rows))], ["t", "n"], mask=mask)
    keys = pa.array([str(number) for number in range(rows)])
    columns = {
        "n": pa.array(range(rows)), "t": times, "z": times.cast(pa.timestamp("us", "UTC")), "s": nested,
        "many": pa.ListArray.from_arrays(offsets, nested), "by": pa.MapArray.from_arrays(offsets, keys, times),
    }  # fmt: skip
    return pa.table(columns)


@pytest.mark.parametrize("compression", ["uncompressed", "zlib", "snappy", "lz4", "zstd"])
def test_times_of_any_year(tmp_path: Path, cache_dir: Path, compression: str) -> None:
    """Times that 64 bits of nanoseconds do not hold are read, nested, in several stripes; a file of them is as good as any other."""
    table = times_table(7, 5000)
    orc.write_table(table, tmp_path / "a.orc", compression=compression, stripe_size=1024, batch_size=1500)
    rows = scan(tmp_path / "a.orc", cache_dir)
    rows.validate(full=True)
    for field in table.schema:
        assert rows.column(field.name).cast(field.type).to_pylist() == table.column(field.name).to_pylist(), field


SUMMER, WINTER, OLD = "2020-07-01 12:00:00", "2020-01-01 12:00:00.000001", "1930-06-01 00:00:00"


@pytest.mark.parametrize(("zone", "shifts"), [("CET", (1, 0, 0)), ("EST", (0, 0, 0)), ("GMT", (0, 0, 0))])
def test_time_zones_of_writers(tmp_path: Path, cache_dir: Path, zone: str, shifts: tuple[int, ...]) -> None:
    """Spark's times are instants: what was stored in seconds since the writer's 2015. Others are what its clock has shown."""
    base = {"CET": -3600, "EST": 18000, "GMT": 0}[zone]
    stored = micros([SUMMER, WINTER, OLD])
    table = pa.table({"t": pa.array(stored, pa.int64()).cast(pa.timestamp("us"))})
    instants = [value + base * 10**6 for value in stored]
    local = [value + hours * 3600 * 10**6 for value, hours in zip(stored, shifts, strict=True)]
    field = pa.field("t", pa.timestamp("us"), metadata={"spark.sql.catalyst.type": "timestamp"})
    marked = table.cast(pa.schema([field]))
    contents = {
        "old": orc_file(table, zone=zone, spark=True),
        "new": orc_file(marked, zone=zone),
        "hive": orc_file(table, zone=zone),
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.orc").write_bytes(content)

    def read(name: str, **more: str) -> tuple[pa.DataType, list[int]]:
        column = scan(tmp_path / f"{name}.orc", cache_dir, **more).column("t")
        return column.type, column.cast(pa.int64()).to_pylist()

    utc = pa.timestamp("us", "UTC")
    assert read("old") == read("new") == read("hive", schema="t TIMESTAMP") == (utc, instants)
    assert read("hive") == read("hive", schema="t TIMESTAMP_NTZ") == (pa.timestamp("us"), local)
    with pytest.raises(SchemaError, match=r"column 't' of .*new.orc is timestamp\[us, tz=UTC\] and cannot be read"):
        read("new", schema="t TIMESTAMP_NTZ")


@pytest.mark.parametrize("calendar", [JULIAN, PROLEPTIC])
def test_old_times(tmp_path: Path, cache_dir: Path, calendar: int) -> None:
    """Before 1582 the calendar counts, before 1900 what `java.util` takes for the offset of a time zone."""
    stored = micros(["1500-01-01 00:00:00", "1850-01-01 00:00:00", FAR[-1]])
    table = pa.table({"t": pa.array(stored, pa.int64()).cast(pa.timestamp("us"))})
    (tmp_path / "a.orc").write_bytes(orc_file(table, calendar, writer=0, zone="PRC"))
    local = scan(tmp_path / "a.orc", cache_dir).column("t").to_pylist()
    old = "1499-12-23 00:00:00" if calendar == JULIAN else "1500-01-01 00:00:00"
    assert local == [datetime.datetime.fromisoformat(text) for text in (old, "1850-01-01 00:00:00", FAR[-1])]
    instants = scan(tmp_path / "a.orc", cache_dir, schema="t TIMESTAMP").column("t").cast(pa.int64()).to_pylist()
    mean = (8 * 3600 + 5 * 60 + 43) * 10**6  # of Shanghai
    assert instants == [micros([old])[0] - mean, stored[1] - mean, stored[2] - 8 * 3600 * 10**6]


def test_types_that_spark_says(tmp_path: Path, cache_dir: Path) -> None:
    """TIMESTAMP_NTZ and intervals are numbers in ORC, at the top and nested; `lookup.schema` may name the real types."""

    def marked(name: str, spark_type_name: str) -> pa.Field:
        return pa.field(name, pa.int64(), metadata={"spark.sql.catalyst.type": spark_type_name})

    fields = [marked("t", "timestamp_ntz"), marked("i", "interval day to second")]
    fields += [pa.field("s", pa.struct([marked("t", "timestamp_ntz"), pa.field("n", pa.int64())]))]
    fields += [pa.field("a", pa.list_(marked("item", "timestamp_ntz")))]
    fields += [pa.field("m", pa.map_(pa.string(), marked("value", "interval hour to minute")))]
    (far,) = micros(FAR[-1:])
    columns = [[far, None], [far, 5], [{"t": far, "n": 1}, None], [[far, None], []], [[("x", 5)], None]]
    orc.write_table(pa.table(columns, pa.schema(fields)), tmp_path / "a.orc")
    at, five = datetime.datetime.fromisoformat(FAR[-1]), datetime.timedelta(microseconds=5)
    expected = [
        {"t": at, "i": at - EPOCH, "s": {"t": at, "n": 1}, "a": [at, None], "m": [("x", five)]},
        {"t": None, "i": five, "s": None, "a": [], "m": None},
    ]
    declared = (
        "t TIMESTAMP_NTZ, i INTERVAL DAY TO SECOND, s STRUCT<t: TIMESTAMP_NTZ, n: BIGINT>, a ARRAY<TIMESTAMP_NTZ>"
    )
    for more in ({}, {"schema": f"{declared}, m MAP<STRING, INTERVAL DAY TO SECOND>"}):
        assert scan(tmp_path / "a.orc", cache_dir, **more).to_pylist() == expected


def spark_columns(spark_type_name: str, kind: pa.DataType) -> pa.Table:
    """A column that is a number in ORC, and of another type in Spark; and the same column as a part of a struct."""
    part = pa.field("x", kind, metadata={"spark.sql.catalyst.type": spark_type_name})
    schema = pa.schema([pa.field("n", pa.int64()), part, pa.field("s", pa.struct([part]))])
    return pa.table([[1], [2], [{"x": 3}]], schema)


FAR_AWAY = pa.array([10**13], pa.int64()).cast(pa.timestamp("s"))
REFUSED: list[tuple[bytes, str, str]] = [
    (orc_file(pa.table({"n": [1], "x": FAR_AWAY})), "x", "column 'x' of file:.*a.orc has a time beyond what microseconds"),
    (
        orc_file(pa.table({"n": [1], "x": pa.array([0], pa.timestamp("us"))}), zone="XYZ", spark=True), "x",
        "a.orc has times in the time zone 'XYZ', which this machine does not know",
    ),
    *(
        (orc_file(spark_columns(spark_type_name, kind)), name, f"column '{name}' is of Spark's type {re.escape(spark_type_name)}")
        for spark_type_name, kind in (("time(6)", pa.int64()), ("interval year to month", pa.int32())) for name in "xs"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("content", "column", "words"), REFUSED, ids=[f"{words} {name}" for _, name, words in REFUSED])
def test_a_column_that_cannot_be_read(tmp_path: Path, cache_dir: Path, content: bytes, column: str, words: str) -> None:
    """An unreadable column is refused by name when it is read; other columns are read."""
    (tmp_path / "a.orc").write_bytes(content)
    with pytest.raises(SchemaError, match=words):
        scan(tmp_path / "a.orc", cache_dir, columns=f"n, {column}")
    assert scan(tmp_path / "a.orc", cache_dir, columns="n").to_pylist() == [{"n": 1}]


def test_rows_without_columns(tmp_path: Path) -> None:
    """The rows are counted when no column is read, though the first column has times that are far away."""
    (tmp_path / "a.orc").write_bytes(content := orc_file(times_table(1, 100).drop("n")))
    index = OrcIndex(FileVersion("file:///a.orc", len(content), "1"), content, [])
    source = RangesFile(len(content), {(0, len(content)): content}, lambda part: b"")
    assert sum(batch.num_rows for batch in index.batches(index.units[0], [], source)) == 100


def test_an_index_keeps_no_bytes() -> None:
    """The index of a file, of which many are kept, does not keep the file: rows are read from the bytes that a read brings."""
    rows = times_table(1, 100)
    content = array.array("B", orc_file(rows))
    index = OrcIndex(FileVersion("file:///a.orc", len(content), "1"), memoryview(content), [])
    fetched, kept = bytes(content), weakref.ref(content)
    del content
    assert kept() is None
    source = RangesFile(len(fetched), {}, lambda part: fetched[part[0] : sum(part)])
    assert sum(batch.num_rows for batch in index.batches(index.units[0], rows.column_names, source)) == 100


def test_damaged_tails() -> None:
    """A damaged tail, which is read here and not by pyarrow, says something else or is an error for damage; nothing else comes of it."""
    contents = []
    for compression in ("uncompressed", "zlib", "lz4", "zstd"):
        out = io.BytesIO()
        orc.write_table(times_table(3, 200), out, compression=compression)
        contents.append(out.getvalue())
    rng = random.Random(5)
    for _ in range(100):
        content = bytearray(rng.choice(contents))
        for _ in range(rng.choice([1, 1, 3, 10])):
            content[-1 - min(int(rng.expovariate(0.005)), len(content) - 1)] = rng.choice([0, 255, rng.randrange(256)])
        with contextlib.suppress(ValueError, OSError, zlib.error):
            tail = read_tail(bytes(content))
            assert tail.hybrid in (True, False)
            tail.with_seconds()
            for stripe in tail.stripes:
                assert isinstance(stripe.time_zone, str)
                tail.fractions(stripe, 2, 150)
