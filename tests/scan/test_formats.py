"""File formats: what is asked of a file, what comes out of it, and how a damaged one is told."""

import bz2
import datetime
import decimal
import gzip
import io
import itertools
import json
import random
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.columnar.types import cast_column, spark_type
from pyspark_lookup.core.credentials import printable
from pyspark_lookup.errors import DamagedFileError, OptionError, SchemaError
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.scan.formats import BATCH_ROWS, FileIndex, RangesFile, Unit
from pyspark_lookup.scan.formats.arrow_ipc import Table
from pyspark_lookup.scan.formats.model import detect_format
from pyspark_lookup.scan.open_file import open_format
from pyspark_lookup.storage.stores import FileVersion, Range
from tests.support.fuzzing import fuzzed, memory_at_most

BLOCK = 4096
SMALL = 256 * 1024  # up to here a file comes in one range
UTC = datetime.timezone.utc


class Stored:
    """A file in a store that serves announced ranges only, and lists them. A range outside it is an error."""

    def __init__(self, name: str, content: bytes) -> None:
        self.content = content
        self.file = FileVersion(f"s3://bucket/{name}", len(content), "v1")
        self.form = open_format(detect_format([name]), BLOCK)
        self.requested: list[list[Range]] = []
        self.contents: dict[Range, bytes] = {}

    def bring(self, ranges: list[Range]) -> dict[Range, bytes]:
        for offset, length in ranges:
            assert 0 <= offset <= offset + length <= len(self.content), f"{(offset, length)} is outside the file"
        return {(offset, length): self.content[offset : offset + length] for offset, length in ranges}

    def open(self, planned: pa.Schema | None = None) -> FileIndex:
        ranges = self.form.first_ranges(self.file)
        for _ in range(3):
            self.requested.append(ranges)
            self.contents.update(self.bring(ranges))
            index = self.form.open_index(self.file, self.contents, planned)
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
        head = {} if self.file.url.endswith(".parquet") else self.contents
        for batch in index.batches(unit, columns, RangesFile(len(self.content), {**head, **ranges}, refuse)):
            batch.validate(full=True)
            assert set(columns) == set(batch.schema.names)
            assert batch.num_rows <= BATCH_ROWS
            yield batch

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows, in Spark's types."""
        index = self.open()
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
FORMATS = {
    FileFormatName.PARQUET: "part-0.parquet part-0.c000.snappy.parquet A.PARQ a.pq a.csv?b.parquet",
    FileFormatName.ARROW: "a.arrow a.feather a.ipc", FileFormatName.CSV: "a.csv a.csv.gz a.CSV.BZ2",
    FileFormatName.JSON: "a.json a.jsonl.gz a.ndjson", FileFormatName.ORC: "a.orc",
}  # fmt: skip


def test_formats_by_name() -> None:
    """The end of a name tells the format, in any letter case, before a compression and a web query; none, or two formats, are errors."""
    assert detect_format(["https://b/a.csv?versionId=x.parquet"]) is FileFormatName.CSV
    for expected, names in FORMATS.items():
        for name in names.split():
            assert detect_format([f"s3://b.csv/d.orc/{name}", f"s3://b/{name}"]) is expected
    for name in ("data", "a.txt", "a.gz", "csv", "parquet.d", "a.csv.zip", ""):
        with pytest.raises(OptionError, match=r"name of s3://b\.csv/.* does not show its format: set lookup\.format"):
            detect_format(["s3://b/a.csv", f"s3://b.csv/{name}"])
    with pytest.raises(OptionError, match=r"files of several formats: a\.csv, c\.parquet: .*lookup\.format"):
        detect_format(["a.csv", "b.csv.gz", "c.parquet", "d.parquet"])


@fuzzed(300)
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
    assert (file.readable(), file.seekable(), file.size()) == (True, True, size)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, size + 5))
        whence = data.draw(st.sampled_from([io.SEEK_SET, io.SEEK_CUR, io.SEEK_END]))
        step = at - (0, model.tell(), size)[whence]
        assert file.seek(step, whence) == model.seek(step, whence)
        length = data.draw(st.integers(0, size + 5) | st.sampled_from([-1, None]))
        assert bytes(file.read(length)) == model.read(length)
        into, expected = bytearray(b"." * at), bytearray(b"." * at)
        assert (file.readinto(into), into) == (model.readinto(expected), expected)
        assert file.tell() == model.tell()
    cached = {at for offset, length in ranges for at in range(offset, offset + length)}
    assert all(length > 0 and cached.isdisjoint(range(offset, offset + length)) for offset, length in fetched)


@pytest.mark.parametrize("kind", [FileFormatName.PARQUET, FileFormatName.ARROW])
def test_a_small_file_comes_in_one_range(kind: FileFormatName) -> None:
    """A file of up to 256 KiB is asked for once, whole; a larger one by its last 64 KiB, then its parts."""
    heads = {SMALL: (0, SMALL), SMALL + 1: (SMALL + 1 - 65536, 65536), 0: (0, 0), 70_000: (0, 70_000)}
    for size, head in heads.items():
        assert open_format(kind, BLOCK).first_ranges(FileVersion("a", size, "v")) == [head]
    assert open_format(kind, BLOCK).splittable


@pytest.mark.parametrize("name", ["wide.parquet", "long.arrow"])
def test_a_footer_larger_than_the_tail(name: str) -> None:
    """A footer of more than 64 KiB is asked for in one more range, exactly; then the file reads as any."""
    if name == "wide.parquet":
        columns = {f"column {n} {'x' * 40}": pa.array([n, None, n + 1]) for n in range(800)}
        table = pa.table({**columns, "noise": noise(100_000, 3)})
        content, mark = parquet(table, compression="none"), 4
    else:
        table = pa.table({"id": range(5000), "noise": noise(40, 5000)})
        content, mark = arrow(table, 1), 6
    (footer,) = struct.unpack_from("<I", content, len(content) - mark - 4)
    assert footer > 65536
    stored = Stored(name, content)
    assert stored.table().equals(table)
    end = footer + 4 + mark
    assert stored.requested == [[(len(content) - 65536, 65536)], [(len(content) - end, end)]]


def test_parquet_only_the_chunks_of_asked_columns() -> None:
    """A unit's ranges are the chunks of the asked columns, nested ones with all their leaves; its middle lies in its row group."""
    table = SAMPLE.append_column("noise", noise(6000, 50))
    content = parquet(table, row_group_size=20, compression="none")
    assert len(content) > SMALL
    stored = Stored("a.parquet", content)
    index = stored.open()
    metadata = pq.read_metadata(io.BytesIO(content))
    assert [unit.number for unit in index.units] == [0, 1, 2]
    for unit in index.units:
        group = metadata.row_group(unit.number)
        parts: dict[str, list[Range]] = {name: [] for name in table.schema.names}
        for chunk in map(group.column, range(group.num_columns)):
            start = min(filter(None, [chunk.dictionary_page_offset, chunk.data_page_offset]))
            parts[chunk.path_in_schema.split(".")[0]].append((start, chunk.total_compressed_size))
        for columns in (["id"], ["pair", "name"], ["tags"], []):
            assert index.ranges(unit, columns) == [part for name in columns for part in parts[name]]
        everything = index.ranges(unit, table.schema.names)
        assert everything == [part for of_column in parts.values() for part in of_column]
        rows = pa.Table.from_batches(list(stored.batches(index, unit, ["pair", "name"])))
        assert rows.to_pydict() == table.select(["pair", "name"]).slice(20 * unit.number, 20).to_pydict()
        assert min(start for start, _ in everything) <= unit.middle < max(sum(part) for part in everything)


# Dots, spaces, quotes and letters of any script in names are just names, beside structs of the same path.
ODD_NAMES = ["a.b", "a.b.c", "", " ", '`q` "r"\'', "größe/尺寸🙂", "list.element", "element"]
ODD_TABLE = pa.table({"a": [{"b": 1, "c": "x"}], "list": [[8]], **{name: [n] for n, name in enumerate(ODD_NAMES)}})
MANY = pa.table({"id": range(3000), "name": [f"n{n}" for n in range(3000)]})
MANY_TEXT = b"id,name\n" + b"".join(b"%d,n%d\n" % (n, n) for n in range(3000))
MEMBERS = MANY_TEXT[:5000], MANY_TEXT[5000:]
LONG = pa.table({"id": [1, 2, 3], "text": ["a", "line\n" * 500_000, "b"]})
FILES: list[tuple[str, bytes, pa.Table]] = [
    ("a.parquet", parquet(SAMPLE), SAMPLE),
    ("a.parquet", parquet(SAMPLE, compression="zstd", data_page_version="2.0", data_page_size=10), SAMPLE),
    ("a.parquet", parquet(SAMPLE, compression="lz4", store_schema=False, version="1.0"), SAMPLE),
    ("a.parquet", parquet(SAMPLE, compression="brotli", write_page_index=True, write_page_checksum=True), SAMPLE),
    ("a.parquet", parquet(ODD_TABLE), ODD_TABLE),
    *(("a.arrow", arrow(SAMPLE, 20, compression=compression), SAMPLE) for compression in (None, "lz4", "zstd")),
    *((f"a.{form.__name__}", form(SAMPLE.slice(0, 0)), SAMPLE.slice(0, 0)) for form in (parquet, arrow, orc)),
    ("a.orc", orc(SAMPLE), SAMPLE),
    ("a.csv", MANY_TEXT, MANY),
    ("a.CSV.GZ", b"".join(map(gzip.compress, MEMBERS)), MANY),
    ("a.csv.bz2", b"".join(map(bz2.compress, MEMBERS)), MANY),
    ("a.csv", ("id,text\n" + "".join(f'{row["id"]},"{row["text"]}"\n' for row in LONG.to_pylist())).encode(), LONG),
    ("a.json", "\n".join(map(json.dumps, LONG.to_pylist())).encode(), LONG),
]


@pytest.mark.parametrize(
    ("name", "content", "expected"), FILES, ids=[f"{number} {file[0]}" for number, file in enumerate(FILES)]
)
def test_rows(name: str, content: bytes, expected: pa.Table) -> None:
    """Every encoding, codec and layout gives the rows that were written, in the asked columns and order."""
    stored, names = Stored(name, content), expected.schema.names
    for columns in (names, names[::-1], *([name] for name in names)):
        rows = stored.table(columns)
        assert rows.schema.names == columns
        assert rows.to_pylist() == expected.select(columns).to_pylist()
    assert stored.table().schema.names == names
    if name.endswith((".parquet", ".arrow")):
        assert all(requested == [(0, len(content))] for requested in stored.requested)


NAN = float("nan")
DAY, TIME = datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3)
BOUNDED: list[tuple[list[Any], list[pa.DataType]]] = [
    ([-7, None, 3], [pa.int8(), pa.int64()]), ([3, None, 2**32 - 1], [pa.uint32()]),
    ([-2.5, None, 1.5], [pa.float32(), pa.float64()]),
    (["b", None, "ä"], [pa.string(), pa.dictionary(pa.int8(), pa.string())]), ([b"b", None, b"\xff"], [pa.binary()]),
    ([decimal.Decimal("-3.50"), None, decimal.Decimal("1.25")], [pa.decimal128(9, 2), pa.decimal128(30, 2)]),
    ([DAY.replace(year=1969), None, DAY], [pa.date32()]),
    ([TIME.replace(year=1969), None, TIME], [pa.timestamp("us"), pa.timestamp("ms")]),
    ([TIME.replace(year=1969, tzinfo=UTC), None, TIME.replace(tzinfo=UTC)], [pa.timestamp("us", "UTC")]),
]  # fmt: skip
TENSOR = pa.fixed_shape_tensor(pa.int8(), [1])
STATS: list[tuple[pa.Array, dict[str, Any], ColumnStats | None]] = [
    *((pa.array(of, kind), {}, ColumnStats(of[0], of[2], 1, 3)) for of, kinds in BOUNDED for kind in kinds),
    # None without statistics, of nested columns and of nanoseconds.
    (pa.array([1, 2]), {"write_statistics": False}, None),
    (pa.array([1, 2], pa.timestamp("ns")), {}, None),
    (pa.array([[1], [2]]), {}, None),
    (pa.array([1, 2], pa.duration("ms")), {}, None),
    (pa.ExtensionArray.from_storage(TENSOR, pa.array([[1]], pa.list_(pa.int8(), 1))), {}, None),
    (pa.array([None, None], pa.int32()), {}, ColumnStats(None, None, 2, 2)),
    (pa.array([NAN, 1.0, 3.0, NAN]), {}, ColumnStats(1.0, 3.0, 0, 4)),
    (pa.array([NAN, NAN]), {}, ColumnStats(None, None, 0, 2)),
    # Half floats and JSON texts have bounds as raw bytes.
    *((pa.array([1.5, -2.5, None], pa.float16()), {"store_schema": s}, ColumnStats(None, None, 1, 3)) for s in (True, False)),
    *((pa.array(['"a"', '"b"', None], pa.json_()), {"store_schema": s}, ColumnStats(None, None, 1, 3)) for s in (True, False)),
    *((pa.array([b"ab", b"cd"], pa.binary(2)), {"store_schema": s}, ColumnStats(b"ab", b"cd", 0, 2)) for s in (True, False)),
    (pa.array([0, 2**31 - 1], pa.int32()).view(pa.date32()), {}, ColumnStats(None, None, 0, 2)),
    (pa.array([-(2**62), 2**62], pa.int64()).view(pa.timestamp("us")), {}, ColumnStats(None, None, 0, 2)),
]  # fmt: skip


def test_parquet_stats() -> None:
    """Bounds are the least and greatest value in the column's own Python type, with nulls and rows counted, where they are known."""
    for column, options, expected in STATS:
        index = Stored("a.parquet", parquet(pa.table({"c": column}), **options)).open()
        bounds = index.stats(index.units[0], "c")
        assert bounds == expected, column.type
        assert bounds is None or expected is None or type(bounds.low) is type(expected.low)
        assert index.stats(index.units[0], "other") is None


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
    assert stored.requested == [[(len(content) - 65536, 65536)]]
    ranges = [index.ranges(unit, ["id"]) for unit in index.units]
    shared = set.intersection(*map(set, ranges))
    assert len(shared) == 2  # the dictionaries of two columns
    unshared = [[part for part in parts if part not in shared] for parts in ranges]
    assert [len(parts) for parts in unshared] == [1] * 5
    spans = sorted([*shared, *(parts[0] for parts in unshared)])
    assert all(start + length <= following for (start, length), (following, _) in itertools.pairwise(spans))
    for unit, ((start, length),) in zip(index.units, unshared, strict=True):
        assert start <= unit.middle < start + length
        assert index.ranges(unit, []) == index.ranges(unit, table.schema.names) == ranges[unit.number]
        assert index.stats(unit, "id") is None
        assert sum(batch.num_rows for batch in stored.batches(index, unit, [])) == 1000
    assert index.schema.field("word").type == pa.string()
    assert stored.table().to_pylist() == table.to_pylist()


@pytest.mark.parametrize(
    ("name", "head", "line", "last", "row"),
    [
        ("a.csv", "id\n", "1\n", "2.5\n", {"id": 2.5}),
        ("a.csv", "id\n", "1\n", "x\n", {"id": "x"}),
        ("a.csv", "id\n", "1\n", "5000000000\n", {"id": 5_000_000_000}),
        ("a.json", "", '{"id": 1}\n', '{"id": 1.5, "late": true}\n', {"id": 1.5, "late": True}),
    ],
)
def test_a_late_value_decides_the_type(name: str, head: str, line: str, last: str, row: dict[str, Any]) -> None:
    """Every value counts for the columns and types, be it the last after megabytes."""
    text = head + line * (1_300_000 // len(line)) + last
    stored = Stored(name, text.encode())
    assert stored.open().schema == pa.Table.from_pylist([row]).schema
    assert stored.table().slice(1_300_000 // len(line)).to_pylist() == [row]


def write_csv(table: pa.Table) -> bytes:
    out = io.BytesIO()
    pa.csv.write_csv(table, out)
    return out.getvalue()


FLAT = SAMPLE.select(["id", "name", "amount", "day"])
GOOD: dict[str, bytes] = {
    "d.parquet": parquet(SAMPLE, row_group_size=20), "d.arrow": arrow(dictionaries(3, 10), 10),
    "z.arrow": arrow(SAMPLE, 20, compression="zstd"), "d.csv": write_csv(FLAT), "d.csv.gz": gzip.compress(write_csv(FLAT)),
    "d.csv.bz2": bz2.compress(write_csv(FLAT)),
    "d.json": "\n".join(json.dumps(row, default=str) for row in SAMPLE.to_pylist()).encode(),
    "d.json.gz": gzip.compress(b'{"a":1}\n' * 50), "d.orc": orc(SAMPLE),
}  # fmt: skip
BINARY = [name for name in GOOD if name not in ("d.csv", "d.json")]


def read_or_damaged(name: str, content: bytes) -> bool:
    """Whether a read raises DamagedFileError, whose message must name the file and quote the parser's error. Any other error passes through."""
    try:
        Stored(name, content).table()
    except DamagedFileError as problem:
        assert str(problem).startswith(f"s3://bucket/{name} is not a readable ")
        # Control characters stand in neither; a cause that had some begins with its type.
        cause_text = "" if problem.__cause__ is None else re.sub(r"^(OSError|Arrow\w+): ", "", str(problem.__cause__))
        assert printable(cause_text.rstrip(" .:\n").replace("\n", " "), lines=True) in str(problem)
        return True
    return False


def patched(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


@pytest.mark.parametrize("name", GOOD)
def test_what_is_no_file_of_its_format(name: str) -> None:
    """A file cut anywhere is damaged, by name, but for text and ORC's last mark; so are bytes of another format or a broken stream."""
    content = GOOD[name]
    text = name.startswith(("d.csv", "d.json"))
    assert read_or_damaged(name, b"") is not text
    step = max(len(content) // 80, 1)
    points = {*range(1, len(content), step), *range(1, min(40, len(content))), *range(len(content) - 30, len(content))}
    for point in sorted(points):
        if not read_or_damaged(name, content[:point]) and name in BINARY:
            assert name == "d.orc", f"cut at {point} of {len(content)}"
            assert Stored(name, content[:point]).table() == Stored(name, content).table()
    for other_name, foreign in GOOD.items():
        if name.split(".", 1)[1] == other_name.split(".", 1)[1]:
            assert not read_or_damaged(name, foreign)
        elif name != "d.csv" and (name, other_name) != ("d.csv.gz", "d.json.gz"):  # anything may be CSV
            assert read_or_damaged(name, foreign)
    if name.endswith((".gz", ".bz2")):
        for at in (0, 12, len(content) // 2, len(content) - 5):
            assert read_or_damaged(name, patched(content, at, bytes(byte ^ 0xFF for byte in content[at : at + 4])))
        assert read_or_damaged(name, patched(content, 10, b"\xff" * 20))


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow"])
@fuzzed(100)
@given(length=st.integers(-(2**31), 2**31 - 1) | st.integers(-50, 5000))
def test_a_footer_of_another_length(name: str, length: int) -> None:
    """A wrong length of the footer is damage, whether the footer would then begin within the file or not."""
    good, announced = GOOD[name], struct.pack("<i", length)
    at = len(good) - (8 if name == "d.parquet" else 10)
    assert announced == good[at : at + 4] or read_or_damaged(name, patched(good, at, announced))


def test_an_arrow_footer_that_announces_more_than_there_is() -> None:
    """The announced length of a list of blocks is not believed: no room is made for four billion of them."""
    good = GOOD["d.arrow"]
    start = len(good) - 10 - struct.unpack("<i", good[-10:-6])[0]
    for field in (2, 3):
        at = Table.root(bytearray(good[start:]))._target(field)
        with memory_at_most(2**28), pytest.raises(DamagedFileError, match="a vector of 4294967295 elements"):
            Stored("d.arrow", patched(good, start + at, b"\xff" * 4)).table()


@fuzzed(300)
@given(name=st.sampled_from([name for name in GOOD if not name.endswith((".parquet", ".orc"))]), data=st.data())
def test_flipped_bytes(name: str, data: st.DataObject) -> None:
    """Flipped bytes give other values, damage, a type Spark lacks or quotes that need an option, and no read beyond the file or memory."""
    content = bytearray(GOOD[name])
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3)):
        content[at] = data.draw(st.integers(0, 255))
    try:
        read_or_damaged(name, bytes(content))
    except (SchemaError, OptionError) as problem:
        assert f"s3://bucket/{name}" in str(problem)


@pytest.mark.parametrize("name", ["d.arrow", "d.parquet"])
def test_parts_outside_the_file(name: str) -> None:
    """A footer that puts a part outside the file is damage, found before any byte there is asked for."""
    content = GOOD["d.arrow"] if name == "d.arrow" else parquet(SAMPLE, row_group_size=20, use_dictionary=False)
    start = Stored(name, content).open().ranges(Unit(1, 0), ["id"])[-1][0]
    for bad in (-8, len(content) + 8, 2**60):
        if name == "d.arrow":
            damaged = patched(content, content.rindex(struct.pack("<q", start)), struct.pack("<q", bad))
        else:
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


def test_arrow_numbers_beyond_the_batch() -> None:
    """Offsets that point outside a text's buffer are damage, not other memory; so are codes for no value of the dictionary."""
    texts = pa.array(["aaaa", "bbbb"])
    codes = pa.array(["a", "b", "a", "b", "b"]).dictionary_encode()
    for column, good, bads in (
        (texts, (0, 4, 8), [(0, 4, 2**30), (0, -4, 8), (0, 9, 8), (2**20, 4, 8)]),
        (codes, (0, 1, 0, 1, 1), [(0, 1, 0, 1, 10**6)]),
    ):
        content = arrow(pa.table({"s": column}))
        stored_numbers = struct.pack(f"<{len(good)}i", *good)
        assert content.count(stored_numbers) == 1
        for bad in bads:
            assert read_or_damaged("d.arrow", content.replace(stored_numbers, struct.pack(f"<{len(bad)}i", *bad)))


NO_TEXT: list[tuple[str, bytes]] = [
    ("d.arrow", arrow(pa.table({"column": [1]})).replace(b"column", b"col\xffmn")),
    ("d.parquet", parquet(pa.table({"column": [1]}), store_schema=False).replace(b"column", b"col\xffmn")),
    ("d.json", b'{"col\xffmn": 1}\n'),
    ("d.csv", b"id,s\n1,a\n2,\xff\n"),
    ("d.json", b'{"id":1,"s":"a"}\n{"id":2,"s":"\xff"}\n'),
]


def test_text_that_is_no_utf8() -> None:
    """A name or a value that is not UTF-8 is damage, also where its type was planned."""
    for name, content in NO_TEXT:
        assert read_or_damaged(name, content)
        with pytest.raises(DamagedFileError, match=r"lookup\.csv\.encoding" if name == "d.csv" else r"\.") as caught:
            Stored(name, content).open(pa.schema([("id", pa.int64()), ("s", pa.string())]))
        assert caught.value.__cause__ is not None
