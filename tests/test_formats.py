"""File formats: what is asked of a file, what comes out of it, and how a damaged one is told."""

from __future__ import annotations

import bz2
import datetime
import decimal
import gzip
import io
import itertools
import json
import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_lookup.base.errors import DamagedFileError, OptionError, SchemaError
from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.columnar.types import cast_column, spark_type
from pyspark_lookup.io.ufs import FileVersion, Range
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.scan.formats import BATCH_ROWS, FileIndex, RangesFile, Unit, open_format
from pyspark_lookup.scan.formats.spark_types import spark_fields
from pyspark_lookup.table.file_names import format_of
from tests.fuzzing import MORE

FORMATS = {
    ".parquet": FileFormatName.PARQUET,
    ".arrow": FileFormatName.ARROW,
    ".csv": FileFormatName.CSV,
    ".json": FileFormatName.JSON,
    ".orc": FileFormatName.ORC,
}
BLOCK = 4096
SMALL = 256 * 1024  # up to here a file comes in one range
UTC = datetime.timezone.utc


class Stored:
    """A file in a store that serves announced ranges only, and lists them. A range outside it is an error."""

    def __init__(self, name: str, content: bytes) -> None:
        self.content = content
        self.file = FileVersion(f"s3://bucket/{name}", len(content), "v1")
        self.form = open_format(format_of([name]), BLOCK)
        self.asked: list[list[Range]] = []
        self.held: dict[Range, bytes] = {}

    def bring(self, ranges: list[Range]) -> dict[Range, bytes]:
        for offset, length in ranges:
            assert 0 <= offset <= offset + length <= len(self.content), f"{(offset, length)} is outside the file"
        return {(offset, length): self.content[offset : offset + length] for offset, length in ranges}

    def open(self, planned: pa.Schema | None = None) -> FileIndex:
        ranges = self.form.first_ranges(self.file)
        for _ in range(3):
            self.asked.append(ranges)
            self.held.update(self.bring(ranges))
            index = self.form.open_index(self.file, self.held, planned)
            if not isinstance(index, list):
                return index
            ranges = index
        raise AssertionError("the index asks for ever more ranges")

    def batches(self, index: FileIndex, unit: Unit, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The unit decoded from the head and the ranges announced for these columns: any other is refused."""

        def refuse(part: Range) -> bytes:
            raise AssertionError(f"{part} was not announced")

        ranges = self.bring(index.ranges(unit, columns))
        # Parquet needs no more than these; the others see their footer, or blocks, again.
        head = {} if self.file.url.endswith(".parquet") else self.held
        for batch in index.batches(unit, columns, RangesFile(len(self.content), {**head, **ranges}, refuse)):
            batch.validate(full=True)
            assert set(columns) == set(batch.schema.names)
            assert batch.num_rows <= BATCH_ROWS
            yield batch

    def table(self, columns: Sequence[str] | None = None, planned: pa.Schema | None = None) -> pa.Table:
        """All rows, in Spark's types."""
        index = self.open(planned)
        schema = pa.schema([(f.name, spark_type(f.type)) for f in index.schema])
        schema = schema if columns is None else pa.schema([schema.field(name) for name in columns])
        batches = [
            pa.RecordBatch.from_arrays(
                [cast_column(batch.column(f.name), f.type, f.name, self.file.url) for f in schema], schema=schema
            )
            for unit in index.units
            for batch in self.batches(index, unit, schema.names)
        ]
        return pa.Table.from_batches(batches, schema)


def parquet(table: pa.Table, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()


def arrow(table: pa.Table, rows: int = 1000, **options: Any) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_file(out, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in table.to_batches(rows):
            writer.write_batch(batch)
    return out.getvalue()


def orc(table: pa.Table) -> bytes:
    out = io.BytesIO()
    pa.orc.write_table(table, out)
    return out.getvalue()


def noise(bytes_each: int, rows: int, seed: int = 1) -> pa.Array:
    """Values that no codec makes small."""
    source = random.Random(seed)
    return pa.array([source.randbytes(bytes_each) for _ in range(rows)])


SAMPLE = pa.table(
    {
        "id": pa.array(range(50), pa.int32()),
        "name": [None if n % 7 == 3 else f"name {n}" for n in range(50)],
        "amount": pa.array([decimal.Decimal(n) / 4 for n in range(50)], pa.decimal128(9, 2)),
        "day": [datetime.date(2020, 1, 1) + datetime.timedelta(n) for n in range(50)],
        "at": pa.array([datetime.datetime(2020, 1, 1, 0, n) for n in range(50)], pa.timestamp("us")),
        "tags": [[f"t{n}", None] if n % 3 else None for n in range(50)],
        "pair": [{"x": n, "y": [n]} if n % 4 else None for n in range(50)],
    }
)

# --- names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("part-0.parquet", FileFormatName.PARQUET),
        ("part-0.c000.snappy.parquet", FileFormatName.PARQUET),
        ("A.PARQ", FileFormatName.PARQUET),
        ("a.pq", FileFormatName.PARQUET),
        ("a.arrow", FileFormatName.ARROW),
        ("a.feather", FileFormatName.ARROW),
        ("a.ipc", FileFormatName.ARROW),
        ("a.csv", FileFormatName.CSV),
        ("a.csv.gz", FileFormatName.CSV),
        ("a.CSV.BZ2", FileFormatName.CSV),
        ("a.json", FileFormatName.JSON),
        ("a.jsonl.gz", FileFormatName.JSON),
        ("a.ndjson", FileFormatName.JSON),
        ("a.orc", FileFormatName.ORC),
        ("a.csv?versionId=x.parquet", FileFormatName.CSV),
    ],
)
def test_format_of(name: str, expected: FileFormatName) -> None:
    """The end of a file's name tells the format, in any letter case, before a compression and a query."""
    assert format_of([f"s3://b.csv/d.orc/{name}", f"s3://b/{name}"]) is expected


@pytest.mark.parametrize("name", ["data", "a.txt", "a.gz", "csv", "parquet.d", "a.csv.zip", ""])
def test_format_of_unknown(name: str) -> None:
    """A name that tells no format is an error that names the file and the option."""
    with pytest.raises(OptionError, match=r"the format of s3://b\.csv/.* is not told by its name: set lookup\.format"):
        format_of(["s3://b/a.csv", f"s3://b.csv/{name}"])


def test_format_of_mixed() -> None:
    """Files of two formats are an error that names one file of each."""
    with pytest.raises(OptionError, match=r"files of several formats: a\.csv, c\.parquet: .*lookup\.format"):
        format_of(["a.csv", "b.csv.gz", "c.parquet", "d.parquet"])


# --- RangesFile ------------------------------------------------------------------------------------------


@settings(max_examples=300 * MORE, deadline=None)
@given(st.data())
def test_ranges_file_reads_as_the_file(data: st.DataObject) -> None:
    """Seek, tell, read and readinto give what a file of those bytes gives, over gaps, overlaps and fetches."""
    content = data.draw(st.binary(min_size=0, max_size=60))
    size = len(content)
    spans = st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda span: (min(span), max(span)))
    parts = data.draw(st.lists(spans, max_size=5))
    ranges = {(start, end - start): memoryview(content)[start:end] for start, end in parts}
    fetched: list[Range] = []

    def fetch(part: Range) -> bytes:
        fetched.append(part)
        return content[part[0] : part[0] + part[1]]

    file, model = RangesFile(size, ranges, fetch), io.BytesIO(content)
    assert file.readable()
    assert file.seekable()
    assert file.size() == size
    for _ in range(data.draw(st.integers(1, 6))):
        match data.draw(st.sampled_from(["seek", "from here", "from end", "read", "readinto", "all"])):
            case "seek":
                at = data.draw(st.integers(0, size + 5))
                assert file.seek(at) == model.seek(at)
            case "from here":
                step = data.draw(st.integers(-model.tell(), size))
                assert file.seek(step, io.SEEK_CUR) == model.seek(step, io.SEEK_CUR)
            case "from end":
                step = data.draw(st.integers(-size, 3))
                assert file.seek(step, io.SEEK_END) == model.seek(step, io.SEEK_END)
            case "read":
                length = data.draw(st.integers(0, size + 5))
                assert bytes(file.read(length)) == model.read(length)
            case "readinto":
                into, expected = bytearray(b"." * data.draw(st.integers(0, size + 5))), bytearray()
                expected[:] = into
                assert file.readinto(into) == model.readinto(expected)
                assert into == expected
            case "all":
                rest = data.draw(st.sampled_from([-1, None]))
                assert bytes(file.read(rest)) == model.read()
        assert file.tell() == model.tell()
    covered = {at for offset, length in ranges for at in range(offset, offset + length)}
    for offset, length in fetched:
        assert length > 0
        assert covered.isdisjoint(range(offset, offset + length)), "fetched what it holds"


def test_ranges_file_hands_out_what_it_holds() -> None:
    """A read inside one range is a view of it, without a copy."""
    held = b"0123456789"
    file = RangesFile(100, {(20, 10): held}, lambda part: b"")
    file.seek(22)
    found = file.read(5)
    assert isinstance(found, memoryview)
    assert found.obj is held
    assert bytes(found) == b"23456"


def test_ranges_file_takes_the_longest_range() -> None:
    """Of ranges that overlap, a read takes the one that holds most of it, so that one view serves."""
    whole = bytes(range(100))
    file = RangesFile(100, {(0, 50): whole[:50], (10, 5): whole[10:15], (10, 60): whole[10:70]}, lambda part: b"")
    file.seek(12)
    found = file.read(50)
    assert isinstance(found, memoryview)
    assert found == whole[12:62]


# --- parquet ---------------------------------------------------------------------------------------------


def test_parquet_small_file_comes_in_one_range() -> None:
    """A file of up to 256 KiB is asked for once, whole; a larger one by its last 64 KiB, then its column chunks."""
    table = pa.table({"id": range(1000), "noise": noise(240, 1000)})
    content = parquet(table, compression="none", use_dictionary=False)
    assert SMALL - 20_000 < len(content) < SMALL
    for size, head in (
        (SMALL, (0, SMALL)),
        (SMALL + 1, (SMALL + 1 - 65536, 65536)),
        (0, (0, 0)),
        (70_000, (0, 70_000)),
    ):
        file = FileVersion("a.parquet", size, "v")
        assert open_format(FileFormatName.PARQUET, BLOCK).first_ranges(file) == [head]
        assert open_format(FileFormatName.ARROW, BLOCK).first_ranges(file) == [head]
    small = Stored("a.parquet", content)
    assert small.table() == table
    assert small.asked == [[(0, len(content))]]


def test_parquet_footer_larger_than_the_tail() -> None:
    """A footer of more than 64 KiB is asked for in one more range, exactly; then the file reads as any."""
    table = pa.table({f"column {n} {'x' * 40}": pa.array([n, None, n + 1]) for n in range(800)}).append_column(
        "noise", noise(100_000, 3)
    )
    content = parquet(table, compression="none")
    (footer,) = struct.unpack("<I", content[-8:-4])
    assert footer > 65536
    stored = Stored("wide.parquet", content)
    assert stored.table() == table
    assert stored.asked == [[(len(content) - 65536, 65536)], [(len(content) - footer - 8, footer + 8)]]


def test_parquet_only_the_chunks_of_asked_columns() -> None:
    """A unit's ranges are the chunks of the asked columns, nested ones with all their leaves, in its row group alone."""
    table = SAMPLE.append_column("noise", noise(6000, 50))
    content = parquet(table, row_group_size=20, compression="none")
    assert len(content) > SMALL
    stored = Stored("a.parquet", content)
    index = stored.open()
    metadata = pq.read_metadata(io.BytesIO(content))
    assert [unit.number for unit in index.units] == [0, 1, 2]
    for unit in index.units:
        group = metadata.row_group(unit.number)
        for columns in (["id"], ["pair", "name"], ["tags"], [], table.schema.names):
            expected = []
            for name in columns:
                for leaf in range(group.num_columns):
                    chunk = group.column(leaf)
                    if chunk.path_in_schema.split(".")[0] == name:
                        start = min(filter(None, [chunk.dictionary_page_offset, chunk.data_page_offset]))
                        expected.append((start, chunk.total_compressed_size))
            assert index.ranges(unit, columns) == expected
            found = pa.Table.from_batches(list(stored.batches(index, unit, columns)))
            assert found.num_rows == (20, 20, 10)[unit.number]
            assert found.to_pydict() == table.select(columns).slice(20 * unit.number, 20).to_pydict()


def test_parquet_units_lie_apart_in_the_file() -> None:
    """Each row group's middle is between its first and last byte, so every group belongs to one slice."""
    content = parquet(SAMPLE, row_group_size=9)
    index = Stored("a.parquet", content).open()
    spans = [index.ranges(unit, SAMPLE.schema.names) for unit in index.units]
    assert len(spans) == 6
    for unit, ranges in zip(index.units, spans, strict=True):
        assert min(start for start, _ in ranges) <= unit.middle < max(start + length for start, length in ranges)
    middles = [unit.middle for unit in index.units]
    assert middles == sorted(set(middles))


@pytest.mark.parametrize("columns", [["name", "id"], ["pair"], ["at", "tags", "day"], None])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dictionary": False, "compression": "none"},
        {"compression": "zstd", "data_page_version": "2.0", "data_page_size": 10},
        {"compression": "gzip", "row_group_size": 1},
        {"compression": "lz4", "store_schema": False, "version": "1.0"},
        {"compression": "brotli", "write_page_index": True, "write_page_checksum": True},
    ],
    ids=str,
)
def test_parquet_rows(options: dict[str, Any], columns: list[str] | None) -> None:
    """Every encoding, codec and page layout gives the rows that were written, in the asked columns and order."""
    found = Stored("a.parquet", parquet(SAMPLE, **options)).table(columns)
    expected = SAMPLE if columns is None else SAMPLE.select(columns)
    assert found.schema.names == expected.schema.names
    assert found.to_pylist() == expected.to_pylist()


def test_parquet_without_rows() -> None:
    """A file of zero rows, with a row group or without, has its columns and no unit with rows."""
    out = io.BytesIO()
    with pq.ParquetWriter(out, SAMPLE.schema):
        pass
    none = Stored("none.parquet", out.getvalue())
    assert none.open().units == []
    assert none.table().schema.names == SAMPLE.schema.names
    one = Stored("one.parquet", parquet(SAMPLE.slice(0, 0)))
    assert one.table().num_rows == 0
    assert one.table(["pair"]).schema.names == ["pair"]


def test_parquet_large_unit_comes_in_batches() -> None:
    """A row group of more rows than a batch comes in several, in order."""
    rows = BATCH_ROWS * 2 + 5
    stored = Stored("a.parquet", parquet(pa.table({"id": range(rows)}), row_group_size=rows))
    index = stored.open()
    batches = list(stored.batches(index, index.units[0], ["id"]))
    assert len(batches) == 3
    assert pa.Table.from_batches(batches)["id"].to_pylist() == list(range(rows))


def test_parquet_odd_names() -> None:
    """Dots, spaces, quotes and letters of any script in names are just names, beside structs of the same path."""
    table = pa.table(
        {
            "a": [{"b": 1, "c": "x"}],
            "a.b": [2],
            "a.b.c": [3],
            "": [4],
            " ": [5],
            '`q` "r"\'': [6],
            "größe/尺寸🙂": [7],
            "list": [[8]],
            "list.element": [9],
            "element": [10],
        }
    )
    for name in table.schema.names:
        assert Stored("a.parquet", parquet(table)).table([name]).to_pylist() == table.select([name]).to_pylist()
    assert Stored("a.parquet", parquet(table)).table().to_pylist() == table.to_pylist()


def test_parquet_dictionaries() -> None:
    """A column stored as an Arrow dictionary is planned as its values and reads as them."""
    words = pa.array(["a", "b", None, "a"] * 10).dictionary_encode()
    table = pa.table({"word": words, "words": pa.ListArray.from_arrays(pa.array([0, 3, 40], pa.int32()), words).slice(0, 2)[:1].take(pa.array([0] * 40))})  # fmt: skip
    stored = Stored("a.parquet", parquet(table))
    assert stored.open().schema.types == [pa.string(), pa.list_(pa.field("element", pa.string()))]
    assert stored.table().to_pylist() == [{"word": w, "words": ["a", "b", None]} for w in words.to_pylist()]


INSTANTS = [datetime.datetime(2021, 5, 6, 7, 8, 9, 123456), None, datetime.datetime(1066, 10, 14, 9), datetime.datetime(3000, 1, 1)]  # fmt: skip


def test_parquet_int96_is_an_instant() -> None:
    """INT96 timestamps, flat or at any depth, are instants in UTC of any year; real clock times beside them stay so."""
    kind = pa.timestamp("us")
    table = pa.table(
        {
            "clock": pa.array([b"x"] * 4),
            "flat": pa.array(INSTANTS, kind),
            "listed": pa.array([[i] for i in INSTANTS], pa.list_(kind)),
            "inside": pa.array([{"n": 1, "t": i, "l": [i, None]} for i in INSTANTS], pa.struct([("n", pa.int8()), ("t", kind), ("l", pa.list_(kind))])),
            "mapped": pa.array([[("k", i)] for i in INSTANTS], pa.map_(pa.string(), kind)),
            "text": ["a", "b", "c", None],
        }
    )  # fmt: skip
    stored = Stored("hive.parquet", parquet(table, use_deprecated_int96_timestamps=True, store_schema=False))
    utc = pa.timestamp("us", "UTC")
    schema = stored.open().schema
    assert schema.field("flat").type == utc
    assert schema.field("listed").type == pa.list_(pa.field("element", utc))
    assert schema.field("inside").type == pa.struct(
        [("n", pa.int8()), ("t", utc), ("l", pa.list_(pa.field("element", utc)))]
    )
    assert schema.field("mapped").type == pa.map_(pa.string(), utc)
    assert schema.field("text").type == pa.string()
    assert schema.field("clock").type == pa.binary()
    expected = [i and i.replace(tzinfo=UTC) for i in INSTANTS]
    found = stored.table()
    assert found["flat"].to_pylist() == expected
    assert found["listed"].to_pylist() == [[i] for i in expected]
    assert found["inside"].to_pylist() == [{"n": 1, "t": i, "l": [i, None]} for i in expected]
    assert found["mapped"].to_pylist() == [[("k", i)] for i in expected]
    index = stored.open()
    assert all(index.stats(index.units[0], name) is None for name in ("flat", "listed", "inside", "mapped"))


def test_parquet_clock_times_stay_clock_times() -> None:
    """A timestamp that is not INT96 is an instant only if the file says so."""
    table = pa.table({"clock": pa.array(INSTANTS, pa.timestamp("us")), "instant": pa.array(INSTANTS, pa.timestamp("ms", "UTC"))})  # fmt: skip
    schema = Stored("a.parquet", parquet(table, coerce_timestamps="us")).open().schema
    assert schema.types == [pa.timestamp("us"), pa.timestamp("us", "UTC")]


def stats_of(column: pa.Array, **options: Any) -> ColumnStats | None:
    index = Stored("a.parquet", parquet(pa.table({"c": column}), **options)).open()
    return index.stats(index.units[0], "c")


D = decimal.Decimal


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([3, None, -7], pa.int8()),
        ([3, None, -7], pa.int64()),
        ([3, None, 2**32 - 1], pa.uint32()),
        ([1.5, None, -2.5], pa.float32()),
        ([1.5, None, -2.5], pa.float64()),
        ([True, None, False], pa.bool_()),
        (["b", None, "ä"], pa.string()),
        ([b"b", None, b"\xff"], pa.binary()),
        ([D("1.25"), None, D("-3.50")], pa.decimal128(9, 2)),
        ([D("1.25"), None, D("-3.50")], pa.decimal128(30, 2)),
        ([datetime.date(2020, 1, 2), None, datetime.date(1969, 1, 2)], pa.date32()),
        ([datetime.datetime(2020, 1, 2, 3), None, datetime.datetime(1969, 1, 2)], pa.timestamp("us")),
        ([datetime.datetime(2020, 1, 2, 3), None, datetime.datetime(1969, 1, 2)], pa.timestamp("ms")),
        (
            [datetime.datetime(2020, 1, 2, 3, tzinfo=UTC), None, datetime.datetime(1969, 1, 2, tzinfo=UTC)],
            pa.timestamp("us", "UTC"),
        ),
        (["b", None, "a"], pa.dictionary(pa.int8(), pa.string())),
    ],
    ids=str,
)
def test_parquet_stats(values: list[Any], kind: pa.DataType) -> None:
    """Bounds are the least and greatest value in the column's own Python type, with nulls and rows counted."""
    found = stats_of(pa.array(values, kind))
    there = [value for value in values if value is not None]
    assert found == ColumnStats(min(there), max(there), 1, 3)
    assert type(found.low) is type(there[0])


def test_parquet_stats_that_tell_less() -> None:
    """Without statistics, for nested columns and for nanoseconds there are none; nulls only have no bounds."""
    assert stats_of(pa.array([1, 2]), write_statistics=False) is None
    assert stats_of(pa.array([1, 2], pa.timestamp("ns"))) is None
    assert stats_of(pa.array([[1], [2]])) is None
    assert stats_of(pa.array([{"x": 1}])) is None
    assert stats_of(pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int8()))) is None
    assert stats_of(pa.array([None, None], pa.int32())) == ColumnStats(None, None, 2, 2)
    index = Stored("a.parquet", parquet(pa.table({"c": [1]}))).open()
    assert index.stats(index.units[0], "other") is None
    assert stats_of(pa.array([1, 2], pa.duration("ms"))) is None
    tensors = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int8(), [1]), pa.array([[1]], pa.list_(pa.int8(), 1))
    )
    assert stats_of(tensors) is None


@pytest.mark.parametrize("store_schema", [True, False])
def test_parquet_bounds_stored_as_bytes_are_none(store_schema: bool) -> None:
    """Half floats and JSON texts, whose bounds come as raw bytes, have none to compare with their values."""
    for column in (pa.array([1.5, -2.5, None], pa.float16()), pa.array(['"a"', '"b"', None], pa.json_())):
        assert stats_of(column, store_schema=store_schema) == ColumnStats(None, None, 1, 3)
    assert stats_of(pa.array([b"ab", b"cd"], pa.binary(2)), store_schema=store_schema) == ColumnStats(
        b"ab", b"cd", 0, 2
    )


def test_parquet_stats_with_nan() -> None:
    """NaN is never a bound: the others bound, and NaN alone bounds nothing."""
    nan = float("nan")
    assert stats_of(pa.array([nan, 1.0, 3.0, nan])) == ColumnStats(1.0, 3.0, 0, 4)
    assert stats_of(pa.array([nan, nan])) == ColumnStats(None, None, 0, 2)


def test_parquet_stats_beyond_python() -> None:
    """A date or time beyond year 9999 or before year 1 bounds nothing, and is no error."""
    days = pa.array([0, 2**31 - 1], pa.int32()).view(pa.date32())
    times = pa.array([-(2**62), 2**62], pa.int64()).view(pa.timestamp("us"))
    for column in (days, times):
        found = stats_of(column)
        assert found is not None
        assert found.high is None
        assert (found.null_count, found.rows) == (0, 2)


# --- Arrow IPC -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("columns", [None, ["tags", "id"], []])
def test_arrow_rows(compression: str | None, columns: list[str] | None) -> None:
    """Files of several batches, compressed or not, give the rows that were written."""
    stored = Stored("a.arrow", arrow(SAMPLE, 20, compression=compression))
    index = stored.open()
    assert [unit.number for unit in index.units] == [0, 1, 2]
    names = SAMPLE.schema.names if columns is None else columns
    batches = [batch for unit in index.units for batch in stored.batches(index, unit, names)]
    assert [batch.num_rows for batch in batches] == [20, 20, 10]
    assert [row for batch in batches for row in batch.to_pylist()] == SAMPLE.select(names).to_pylist()
    assert all(index.stats(unit, "id") is None for unit in index.units)


def dictionaries(batches: int, rows: int) -> pa.Table:
    """Batches that share the dictionary of a flat and of a nested column, with incompressible rows."""
    words = pa.array([f"word {n}" for n in range(100)])
    codes = pa.array([n % 100 for n in range(rows)], pa.int16())
    word = pa.DictionaryArray.from_arrays(codes, words)
    nested = pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), word)
    schema = pa.schema([("id", pa.int64()), ("word", word.type), ("words", nested.type), ("noise", pa.binary())])
    return pa.Table.from_batches(
        [
            pa.RecordBatch.from_arrays([pa.array(range(n * rows, (n + 1) * rows)), word, nested, noise(100, rows, n)], schema=schema)
            for n in range(batches)
        ]
    )  # fmt: skip


def test_arrow_ranges_are_dictionaries_and_the_batch() -> None:
    """A unit needs its record batch and every dictionary, nothing of other batches, whatever columns are asked."""
    table = dictionaries(5, 1000)
    content = arrow(table, 1000)
    assert len(content) > SMALL
    stored = Stored("a.arrow", content)
    index = stored.open()
    assert stored.asked == [[(len(content) - 65536, 65536)]]
    ranges = [index.ranges(unit, ["id"]) for unit in index.units]
    shared = set.intersection(*map(set, ranges))
    assert len(shared) == 2  # the dictionaries of two columns
    own = [[part for part in parts if part not in shared] for parts in ranges]
    assert [len(parts) for parts in own] == [1] * 5
    spans = sorted([*shared, *(parts[0] for parts in own)])
    assert all(start + length <= following for (start, length), (following, _) in itertools.pairwise(spans))
    for unit, ((start, length),) in zip(index.units, own, strict=True):
        assert start <= unit.middle < start + length
        assert index.ranges(unit, []) == index.ranges(unit, table.schema.names) == ranges[unit.number]
    assert index.schema.field("word").type == pa.string()
    assert stored.table().to_pylist() == table.to_pylist()


def test_arrow_footer_larger_than_the_tail() -> None:
    """A footer of more than 64 KiB is asked for in one more range, exactly."""
    table = pa.table({"id": range(5000), "noise": noise(40, 5000)})
    content = arrow(table, 1)
    (footer,) = struct.unpack("<i", content[-10:-6])
    assert footer > 65536
    stored = Stored("a.arrow", content)
    index = stored.open()
    assert stored.asked == [[(len(content) - 65536, 65536)], [(len(content) - footer - 10, footer + 10)]]
    assert len(index.units) == 5000
    for number in (0, 1, 2500, 4999):
        (batch,) = stored.batches(index, index.units[number], ["id"])
        assert batch.to_pydict() == {"id": [number]}


def test_arrow_without_batches() -> None:
    """A file of zero batches has its columns and no unit; a batch of zero rows gives none."""
    none = Stored("a.arrow", arrow(SAMPLE.slice(0, 0)))
    assert none.open().units == []
    assert none.table().schema.names == SAMPLE.schema.names
    out = io.BytesIO()
    with pa.ipc.new_file(out, SAMPLE.schema) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([], SAMPLE.schema))
        writer.write_table(SAMPLE)
    assert Stored("a.arrow", out.getvalue()).table().to_pylist() == SAMPLE.to_pylist()


def test_arrow_large_batch_is_cut() -> None:
    """A record batch of more rows than a batch comes in several, in order."""
    rows = BATCH_ROWS + 7
    stored = Stored("a.arrow", arrow(pa.table({"id": range(rows)}), rows))
    index = stored.open()
    batches = list(stored.batches(index, index.units[0], ["id"]))
    assert [batch.num_rows for batch in batches] == [BATCH_ROWS, 7]
    assert pa.Table.from_batches(batches)["id"].to_pylist() == list(range(rows))


def test_feather_v1_is_refused() -> None:
    """The first Feather format is told apart from a damaged file."""
    with pytest.raises(DamagedFileError, match=r"s3://bucket/old\.feather .*Feather version 1 is not supported"):
        Stored("old.feather", b"FEA1" + bytes(100) + struct.pack("<i", 50) + b"FEA1").open()


def test_arrow_stream_is_refused() -> None:
    """A stream, which has no footer, is not the file format."""
    out = io.BytesIO()
    with pa.ipc.new_stream(out, SAMPLE.schema) as writer:
        writer.write_table(SAMPLE)
    with pytest.raises(DamagedFileError, match="does not end with ARROW1"):
        Stored("a.arrow", out.getvalue()).open()


# --- CSV -------------------------------------------------------------------------------------------------


def csv_rows(text: str, planned: pa.Schema | None = None, name: str = "a.csv") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = Stored(name, text.encode()).table(planned=planned).to_pylist()
    return found


@pytest.mark.parametrize(("last", "kind"), [("2.5", pa.float64()), ("x", pa.string()), ("5000000000", pa.int64())])
def test_csv_late_value_decides_the_type(last: str, kind: pa.DataType) -> None:
    """Every value counts for the type, be it the last after megabytes."""
    text = "id\n" + "1\n" * 1_500_000 + f"{last}\n"
    stored = Stored("a.csv", text.encode())
    assert stored.open().schema.field("id").type == kind
    assert str(stored.table()["id"][-1].as_py()) == last


@pytest.mark.parametrize("text", ["id,name", "id,name\n", "id,name\r\n"])
def test_csv_header_only(text: str) -> None:
    """A header line alone, ended or not, is a table of those columns without rows."""
    stored = Stored("a.csv", text.encode())
    assert stored.open().schema == pa.schema([("id", pa.null()), ("name", pa.null())])
    assert csv_rows(text) == []


def test_csv_planned_types() -> None:
    """Values are read as planned where they fit; columns not planned are inferred, absent ones not made up."""
    planned = pa.schema([("zip", pa.string()), ("n", pa.float64()), ("gone", pa.int8()), ("D", pa.decimal128(9, 2))])
    stored = Stored("a.csv", b"zip,n,d,more\n01234,1,1.5,7\n")
    index = stored.open(planned)
    assert index.schema == pa.schema(
        [("zip", pa.string()), ("n", pa.float64()), ("d", pa.decimal128(9, 2)), ("more", pa.int64())]
    )
    assert stored.table(planned=planned).to_pylist() == [{"zip": "01234", "n": 1.0, "d": D("1.50"), "more": 7}]


def test_csv_value_that_does_not_fit_the_plan() -> None:
    """A value of another type than planned shows in the file's schema, for the caller to refuse."""
    planned = pa.schema([("id", pa.int64()), ("day", pa.date32())])
    schema = Stored("a.csv", b"id,day\n1,2020-01-01\nx,2020-01-02\n").open(planned).schema
    assert schema == pa.schema([("id", pa.string()), ("day", pa.date32())])


def test_csv_compressed() -> None:
    """`.gz` and `.bz2` files, of several members too, read as what they hold."""
    text = b"id,name\n" + b"".join(b"%d,n%d\n" % (n, n) for n in range(3000))
    expected = Stored("a.csv", text).table()
    assert expected.num_rows == 3000
    halves = text[:5000], text[5000:]
    assert Stored("a.csv.gz", gzip.compress(text)).table() == expected
    assert Stored("a.CSV.GZ", b"".join(map(gzip.compress, halves))).table() == expected
    assert Stored("a.csv.bz2", b"".join(map(bz2.compress, halves))).table() == expected


def test_csv_names_twice() -> None:
    """A column named twice is an error of the schema that names the file."""
    with pytest.raises(SchemaError, match=r"s3://bucket/a\.csv: columns 'a' and 'A' differ"):
        Stored("a.csv", b"a,A\n1,2\n").open()


@pytest.mark.parametrize("name", ["a.csv", "a.json"])
def test_text_with_a_value_of_megabytes(name: str) -> None:
    """A row larger than any read-ahead is a row."""
    value = "line\n" * 500_000
    lines = ["id,text", '1,"a"', f'2,"{value}"', '3,"b"']
    if name == "a.json":
        lines = [json.dumps({"id": n, "text": text}) for n, text in enumerate(["a", value, "b"], 1)]
    found = Stored(name, "\n".join(lines).encode()).table()
    assert found.to_pydict() == {"id": [1, 2, 3], "text": ["a", value, "b"]}


# --- JSON lines ------------------------------------------------------------------------------------------


def test_json_late_field_after_megabytes() -> None:
    """Every line counts for the columns and types."""
    text = b'{"id": 1}\n' * 200_000 + b'{"id": 1.5, "late": true}\n'
    stored = Stored("a.json", text)
    assert stored.open().schema == pa.schema([("id", pa.float64()), ("late", pa.bool_())])
    assert stored.table().slice(200_000).to_pylist() == [{"id": 1.5, "late": True}]


def test_json_planned_types() -> None:
    """Values are read as planned where they fit; a planned column that the file lacks is not made up."""
    planned = pa.schema([("id", pa.float64()), ("DAY", pa.date32()), ("gone", pa.string()), ("late", pa.int64())])
    stored = Stored("a.json", b'{"id": 1, "more": "x"}\n{"id": 2, "late": null}\n')
    schema = stored.open(planned).schema
    assert set(schema.names) == {"id", "more", "late"}
    assert schema.field("id").type == pa.float64()
    assert sorted(stored.table(["id", "more"], planned).to_pylist(), key=str) == [
        {"id": 1.0, "more": "x"},
        {"id": 2.0, "more": None},
    ]


def test_json_value_that_does_not_fit_the_plan() -> None:
    """A value of another type than planned shows in the file's schema, for the caller to refuse."""
    schema = Stored("a.json", b'{"id": "x"}\n').open(pa.schema([("id", pa.int64())])).schema
    assert schema == pa.schema([("id", pa.string())])


# --- whole files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.orc"])
def test_whole_files_are_asked_for_in_blocks(name: str) -> None:
    """The blocks are aligned, cover the file once, and are all that the one unit needs."""
    table = pa.table({"id": range(5000), "noise": [f"{n * 7919 % 10007}" for n in range(5000)]})
    content = {
        "a.csv": lambda: b"id,noise\n" + b"".join(b"%d,%d\n" % (n, n) for n in range(5000)),
        "a.json": lambda: b"".join(b'{"id":%d}\n' % n for n in range(5000)),
        "a.orc": lambda: orc(table),
    }[name]()
    stored = Stored(name, content)
    index = stored.open()
    blocks = [(start, min(BLOCK, len(content) - start)) for start in range(0, len(content), BLOCK)]
    assert len(blocks) > 2
    assert stored.asked == [blocks]
    assert [(unit.number, unit.middle) for unit in index.units] == [(0, 0)]
    assert index.ranges(index.units[0], ["id"]) == blocks
    assert index.stats(index.units[0], "id") is None
    assert stored.table(["id"])["id"].to_pylist() == list(range(5000))


@pytest.mark.parametrize("columns", [None, ["pair"], ["tags", "id"]])
def test_orc_rows(columns: list[str] | None) -> None:
    """ORC gives the asked columns, flat and nested, in the asked order."""
    found = Stored("a.orc", orc(SAMPLE)).table(columns)
    expected = SAMPLE if columns is None else SAMPLE.select(columns)
    assert found.schema.names == expected.schema.names
    assert found.to_pylist() == expected.to_pylist()


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.orc"])
def test_whole_files_without_columns_still_count(name: str) -> None:
    """A unit read without any column has its number of rows."""
    content = {"a.csv": b"id\n1\n2\n", "a.json": b'{"id":1}\n{"id":2}\n', "a.orc": orc(SAMPLE.slice(0, 2))}[name]
    stored = Stored(name, content)
    index = stored.open()
    assert sum(batch.num_rows for batch in stored.batches(index, index.units[0], [])) == 2


# --- splittable ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "kind"), list(FORMATS.items()))
def test_splittable(suffix: str, kind: FileFormatName) -> None:
    """Only formats with units of their own may be shared by several tasks."""
    assert open_format(kind, BLOCK).splittable is (suffix in (".parquet", ".arrow"))


# --- damaged and foreign files ---------------------------------------------------------------------------


def csv_of(table: pa.Table) -> bytes:
    out = io.BytesIO()
    pa.csv.write_csv(table, out)
    return out.getvalue()


FLAT = SAMPLE.select(["id", "name", "amount", "day"])
GOOD: dict[str, bytes] = {
    "d.parquet": parquet(SAMPLE, row_group_size=20),
    "d.arrow": arrow(dictionaries(3, 10), 10),
    "z.arrow": arrow(SAMPLE, 20, compression="zstd"),
    "d.csv": csv_of(FLAT),
    "d.csv.gz": gzip.compress(csv_of(FLAT)),
    "d.csv.bz2": bz2.compress(csv_of(FLAT)),
    "d.json": "\n".join(json.dumps(row, default=str) for row in SAMPLE.to_pylist()).encode(),
    "d.json.gz": gzip.compress(b'{"a":1}\n' * 50),
    "d.orc": orc(SAMPLE),
}
BINARY = [name for name in GOOD if name not in ("d.csv", "d.json")]


def read_or_damaged(name: str, content: bytes) -> bool:
    """Whether the file is told to be damaged, by name. Any other error passes through."""
    try:
        Stored(name, content).table()
    except DamagedFileError as problem:
        assert str(problem).startswith(f"s3://bucket/{name} is not a readable ")
        return True
    return False


@pytest.mark.parametrize("name", GOOD)
def test_empty_file(name: str) -> None:
    """A file of no bytes is damaged, but for one of text: Spark writes it where there was no row."""
    assert read_or_damaged(name, b"") is not name.startswith(("d.csv", "d.json"))


@pytest.mark.parametrize("name", GOOD)
def test_truncated_file(name: str) -> None:
    """A file cut anywhere is damaged, by name; a text cut between lines may still be one, and ORC's last mark is optional."""
    content = GOOD[name]
    step = max(len(content) // 150, 1)
    points = {*range(0, len(content), step), *range(min(40, len(content))), *range(len(content) - 30, len(content))}
    for point in sorted(points):
        if read_or_damaged(name, content[:point]) or name not in BINARY:
            continue
        if point == 0 and name.startswith(("d.csv", "d.json")):
            continue
        assert name == "d.orc", f"cut at {point} of {len(content)}"
        assert Stored(name, content[:point]).table() == Stored(name, content).table()


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("other", GOOD)
def test_file_of_another_format(name: str, other: str) -> None:
    """Bytes of another format are damaged ones of this; only text has no mark to tell by."""
    damaged = read_or_damaged(name, GOOD[other])
    if name.split(".", 1)[1] == other.split(".", 1)[1]:
        assert not damaged
    elif name != "d.csv" and (name, other) != ("d.csv.gz", "d.json.gz"):  # anything may be CSV
        assert damaged


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow", "d.orc"])
@settings(max_examples=100 * MORE, deadline=None)
@given(content=st.binary(max_size=300))
def test_random_bytes_between_marks(name: str, content: bytes) -> None:
    """The format's marks around bytes that mean nothing make no file."""
    start, end = {
        "d.parquet": (b"PAR1", b"PAR1"),
        "d.arrow": (b"ARROW1\0\0", b"ARROW1"),
        "d.orc": (b"ORC", b"ORC\x17"),
    }[name]
    assert read_or_damaged(name, start + content + end)
    footer = struct.pack("<i", len(content))
    assert read_or_damaged(name, start + content + footer + end)


@settings(max_examples=300 * MORE, deadline=None)
@given(
    name=st.sampled_from(["d.parquet", "d.arrow", "z.arrow"]),
    length=st.integers(-(2**31), 2**31 - 1) | st.integers(-50, 5000),
)
def test_flipped_footer_length(name: str, length: int) -> None:
    """Any other footer length, be it negative or larger than the file, is damage."""
    content, mark = GOOD[name], 4 if name == "d.parquet" else 6
    at = len(content) - mark - 4
    (true,) = struct.unpack_from("<i", content, at)
    if length != true:
        assert read_or_damaged(name, content[:at] + struct.pack("<i", length) + content[at + 4 :])


@settings(max_examples=300 * MORE, deadline=None)
@given(name=st.sampled_from([name for name in GOOD if not name.endswith((".parquet", ".orc"))]), data=st.data())
def test_flipped_bytes(name: str, data: st.DataObject) -> None:
    """Flipped bytes give other values, damage or a type Spark lacks, but never a read beyond the file or memory.

    Not for parquet and ORC, whose parsers in pyarrow may end the process.
    """
    content = bytearray(GOOD[name])
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3)):
        content[at] = data.draw(st.integers(0, 255))
    try:
        read_or_damaged(name, bytes(content))
    except SchemaError as problem:
        assert f"s3://bucket/{name}" in str(problem)


@pytest.mark.parametrize("which", ["negative", "beyond", "huge"])
@pytest.mark.parametrize("name", ["d.arrow", "d.parquet"])
def test_parts_outside_the_file(name: str, which: str) -> None:
    """A footer that puts a part outside the file is damage, found before any byte there is asked for."""
    content = GOOD[name]
    if name == "d.arrow":
        bad = {"negative": -8, "beyond": len(content) + 8, "huge": 2**60}[which]
        start, _ = Stored(name, content).open().ranges(Unit(1, 0), [])[-1]
        at = content.rindex(struct.pack("<q", start))
        damaged = content[:at] + struct.pack("<q", bad) + content[at + 8 :]
    else:
        content = parquet(SAMPLE, row_group_size=20, use_dictionary=False)
        bad = {"negative": -8, "beyond": len(content), "huge": 2**60}[which]
        start, _ = Stored(name, content).open().ranges(Unit(1, 0), ["id"])[0]
        at = len(content) - 8 - struct.unpack("<I", content[-8:-4])[0]
        assert varint(start) in content[at:-8]
        footer = content[at:-8].replace(varint(start), varint(bad))
        damaged = content[:at] + footer + struct.pack("<I", len(footer)) + b"PAR1"
    with pytest.raises(DamagedFileError, match=rf"s3://bucket/{name} .* is not inside its {len(damaged)} bytes"):
        Stored(name, damaged).open()


def varint(number: int) -> bytes:
    """A number as Thrift's compact protocol writes it in parquet footers."""
    zigzag = (number << 1) ^ (number >> 63)
    out = bytearray()
    while zigzag >= 128:
        out.append(zigzag & 127 | 128)
        zigzag >>= 7
    return bytes([*out, zigzag])


@pytest.mark.parametrize("name", ["d.csv.gz", "d.csv.bz2", "d.json.gz"])
def test_flipped_compression(name: str) -> None:
    """A compressed file is damaged wherever its stream, its checksum or its length is."""
    content = GOOD[name]
    for at in (0, 12, len(content) // 2, len(content) - 5):
        assert read_or_damaged(
            name, content[:at] + bytes(byte ^ 0xFF for byte in content[at : at + 4]) + content[at + 4 :]
        )
    assert read_or_damaged(name, content[:10] + b"\xff" * 20 + content[30:])


def test_arrow_offsets_beyond_the_batch() -> None:
    """A text whose offsets point outside its buffer is damage, not other memory."""
    content = arrow(pa.table({"s": ["aaaa", "bbbb"]}))
    good = struct.pack("<iii", 0, 4, 8)
    assert content.count(good) == 1
    for bad in ((0, 4, 2**30), (0, -4, 8), (0, 9, 8), (2**20, 4, 8)):
        assert read_or_damaged("d.arrow", content.replace(good, struct.pack("<iii", *bad)))


def test_arrow_codes_beyond_the_dictionary() -> None:
    """A code that stands for no value of its dictionary is damage."""
    content = arrow(pa.table({"s": pa.array(["a", "b", "a", "b", "b"]).dictionary_encode()}))
    good = struct.pack("<iiiii", 0, 1, 0, 1, 1)
    assert content.count(good) == 1
    assert read_or_damaged("d.arrow", content.replace(good, struct.pack("<iiiii", 0, 1, 0, 1, 10**6)))


@pytest.mark.parametrize("name", ["d.arrow", "d.json", "d.parquet"])
def test_column_name_that_is_no_text(name: str) -> None:
    """A column name that is not UTF-8 is damage."""
    table = pa.table({"column": [1]})
    content = {"d.arrow": arrow(table), "d.json": b'{"column": 1}\n', "d.parquet": parquet(table, store_schema=False)}[
        name
    ]
    assert b"column" in content
    assert read_or_damaged(name, content.replace(b"column", b"col\xffmn"))


@pytest.mark.parametrize("name", ["d.csv", "d.json"])
def test_text_that_is_no_utf8(name: str) -> None:
    """A text value that is not UTF-8 is damage, also where its type was planned."""
    content = {"d.csv": b"id,s\n1,a\n2,\xff\n", "d.json": b'{"id":1,"s":"a"}\n{"id":2,"s":"\xff"}\n'}[name]
    assert read_or_damaged(name, content)
    with pytest.raises(DamagedFileError, match=r"lookup\.csv\.encoding" if name == "d.csv" else None):
        Stored(name, content).open(pa.schema([("id", pa.int64()), ("s", pa.string())]))


def test_damage_keeps_its_cause() -> None:
    """The error says what the parser said, and has it as its cause."""
    content = GOOD["z.arrow"]
    with pytest.raises(DamagedFileError) as caught:
        Stored("z.arrow", content[:-300] + b"\xff" * 200 + content[-100:]).table()
    assert caught.value.__cause__ is not None
    assert str(caught.value.__cause__) in str(caught.value)


@pytest.mark.parametrize("kind", [FileFormatName.PARQUET, FileFormatName.ARROW])
def test_decoding_fetches_what_was_not_brought(kind: FileFormatName) -> None:
    """A range that the caller left out is fetched, so a reader that asks for more still reads."""
    name = "d.parquet" if kind is FileFormatName.PARQUET else "d.arrow"
    content = GOOD[name]
    stored = Stored(name, content)
    index = stored.open()
    fetched: list[Range] = []

    def fetch(part: Range) -> bytes:
        fetched.append(part)
        return content[part[0] : part[0] + part[1]]

    rows = sum(batch.num_rows for batch in index.batches(index.units[0], ["id"], RangesFile(len(content), {}, fetch)))
    assert rows == index_rows(name)
    assert fetched


def index_rows(name: str) -> int:
    return 20 if name == "d.parquet" else 10


def test_errors_of_the_store_pass_through() -> None:
    """An error of the store while decoding is not called damage."""

    class StoreError(DamagedFileError):
        """Stands for any error of this package."""

    def failure(part: Range) -> bytes:
        raise StoreError("the store said no")

    for name in ("d.parquet", "d.arrow"):
        index = Stored(name, GOOD[name]).open()
        with pytest.raises(StoreError, match="the store said no"):
            list(index.batches(index.units[0], ["id"], RangesFile(len(GOOD[name]), {}, failure)))


@pytest.mark.parametrize(
    "text",
    [b"", b"interval", b'{"interval": 1}', b'{"fields": "interval"}', b'{"fields": [{"name": "i"}], "x": "variant"}'],
)
def test_what_is_not_sparks_schema(text: bytes) -> None:
    """What somebody else keeps under the key of Spark's schema says nothing of the columns."""
    fields = [pa.field("i", pa.int64())]
    assert spark_fields(fields, {b"org.apache.spark.sql.parquet.row.metadata": text}, "file:///x") == fields
    assert spark_fields(fields, None, "file:///x") == fields
