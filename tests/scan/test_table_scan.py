"""Rows of a version: who reads which bytes, what is skipped, and that no row is lost, doubled or changed."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.columnar.predicate import evaluate
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.errors import SchemaError
from pyspark_lookup.lookup.read import ReadPlan, ReadTask
from pyspark_lookup.scan import table_scan
from pyspark_lookup.scan.open_file import Slice
from pyspark_lookup.scan.table_scan import cut_shares
from pyspark_lookup.storage.stores import FileVersion
from tests.support.data_files import write_file
from tests.support.fakes import Host, make_host
from tests.support.fuzzing import fuzzed

TAIL = 64 * 1024  # what opening a large parquet file asks for


def write_parquet(path: Path, group: int | None = None, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=group, compression="none")
    return path


def read_batches(host: Host, plan: ReadPlan, task: ReadTask | None = None) -> list[pa.RecordBatch]:
    return list(host.reader.read(plan, task or ReadTask(0, 1), None))


def read_rows(host: Host, plan: ReadPlan, task: ReadTask | None = None) -> list[dict[str, Any]]:
    return [row for batch in read_batches(host, plan, task) for row in batch.to_pylist()]


def read(path: Path, more: Mapping[str, str] | None = None, columns: pa.Schema | None = None) -> list[dict[str, Any]]:
    host = make_host(str(path), None)
    return read_rows(host, host.planned(path, more, columns)[0])


def moved(host: Host, before: Mapping[str, int]) -> dict[str, int]:
    after = host.metrics.snapshot()
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


SIZES = st.one_of(
    st.lists(st.one_of(st.integers(1, 20), st.integers(1, 2**40)), min_size=1, max_size=12),
    st.lists(st.integers(1000, 10**9), min_size=1, max_size=12),
)


@fuzzed(150)
@given(SIZES, st.integers(1, 40), st.booleans())
def test_shares_partition_every_byte(sizes: list[int], count: int, splittable: bool) -> None:
    """Each file's bytes come once, in order, in shares that are about equal: below 1.5 of them it stays whole, above it is cut, if it can be."""
    files = tuple(FileVersion(f"s3://b/{number:03}", size, "v") for number, size in enumerate(sizes))
    shares = cut_shares(files, range(count), count, splittable)
    assert shares == [cut_shares(list(files), [number], count, splittable)[0] for number in range(count)]
    pieces = [piece for share in shares for piece in share]
    for file in files:
        parts = [piece for piece in pieces if piece.file == file]
        assert [piece.start for piece in parts] == [0, *(piece.end for piece in parts[:-1])]
        assert parts[-1].end == file.size
    assert [piece.file.url for piece in pieces] == sorted(piece.file.url for piece in pieces)
    mean = sum(sizes) / count
    for piece in pieces:
        if not splittable or piece.file.size < 1.49 * mean:
            assert piece.whole
        elif piece.file.size > max(1.51 * mean, 1):  # a byte cannot be cut
            assert not piece.whole
    empty = (FileVersion("s3://b/x", 0, "v"),)  # read, and found damaged, by one task
    shares_of_none = cut_shares(empty, range(count), count, splittable)
    assert shares_of_none == [(Slice(empty[0], 0, 0),), *[()] * (count - 1)]
    if splittable and min(sizes) >= 1000:
        assert max(sum(piece.end - piece.start for piece in share) for share in shares) <= 2.5 * mean + count


def test_planning_takes_one_pass_over_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of the files are added up once for all shares, of which there may be thousands."""
    sizes = mock.Mock(wraps=table_scan.file_sizes)
    monkeypatch.setattr(table_scan, "file_sizes", sizes)
    files = tuple(FileVersion(f"s3://b/{number:03}", 100, "v") for number in range(90))
    assert len(cut_shares(files, range(30), 30, True)) == 30
    assert sizes.call_count == 1


FORMS = ("parquet", "arrow", "csv", "json", "orc")


@pytest.mark.parametrize(
    ("where", "opened", "groups", "ids"),
    [
        ("dt = 2", "2", 4, [*range(20, 40)]),
        ("dt IS NULL", "_", 4, [*range(60, 80)]),
        ("dt <> 2", "123", 12, [*range(20), *range(40, 60)]),  # bounds do not exclude a value within them
        ("dt = 1 OR id >= 65", "123_", 7, [*range(20), *range(65, 80)]),
        ("dt = 1 AND dt = 2", "", 0, []),
        ("id = 35", "123_", 1, [35]),
        ("id < 5 OR id > 75", "123_", 2, [*range(5), *range(76, 80)]),
        ("few IS NOT NULL", "123_", 1, [*range(20, 25)]),
        ("few IS NULL AND id < 25", "123_", 4, [*range(20)]),
        ("text LIKE 't4%'", "123_", 2, [*range(40, 50)]),
    ],
)
def test_what_cannot_match_is_pruned(tmp_path: Path, where: str, opened: str, groups: int, ids: list[int]) -> None:
    """Files whose partition, and row groups whose bounds or null counts exclude a match, are not read, and are counted."""
    for number, dt in enumerate(["1", "2", "3", "__HIVE_DEFAULT_PARTITION__"]):
        numbers = range(number * 20, number * 20 + 20)
        few = pa.array([i if 20 <= i < 25 else None for i in numbers], pa.int32())
        write_parquet(
            tmp_path / f"dt={dt}" / "a.parquet",
            5,
            id=pa.array(numbers),
            few=few,
            text=pa.array([f"t{i:02}" for i in numbers]),
        )
    host = make_host(str(tmp_path), None)
    plan, _ = host.planned(tmp_path, {"where": where})
    before = host.metrics.snapshot()
    host.store.calls.clear()
    assert [row["id"] for row in read_rows(host, plan)] == ids
    gets = {subject[0].split("dt=")[1][0] for kind, subject in host.store.calls if kind == "get"}  # type: ignore[index]
    assert gets == set(opened)
    counts = moved(host, before)
    assert counts.get("filesPrunedCount", 0) == 4 - len(opened)
    assert counts.get("rowGroupsPrunedCount", 0) == 4 * len(opened) - groups
    assert counts.get("rowGroupsReadCount", 0) == groups


NUMBERS, TEXTS = st.integers(-3, 6), st.text("ab", max_size=2)
OPERATORS = ["=", "<>", "<", "<=", ">", ">="]
LEAVES = st.one_of(
    st.builds("{0} {1} {2}".format, st.sampled_from("np"), st.sampled_from([*OPERATORS, "<=>"]), NUMBERS),
    st.builds("s {0} '{1}'".format, st.sampled_from(OPERATORS), TEXTS),
    st.builds("{0} IN ({1}, {2})".format, st.sampled_from("np"), NUMBERS, NUMBERS | st.just("NULL")),
    st.builds("s LIKE '{0}%'".format, TEXTS),
    st.builds("{0} IS NULL".format, st.sampled_from("nps")),
)
TESTS = LEAVES | st.builds("{0} {1} NOT ({2})".format, LEAVES, st.sampled_from(["AND", "OR"]), LEAVES)
# Runs of one value make row groups that statistics tell apart.
ROWS = st.lists(st.tuples(st.none() | NUMBERS, st.none() | TEXTS), min_size=1, max_size=12).map(
    lambda rows: sorted(rows, key=lambda row: (row[0] is None, row[0] or 0))
)
# A file's partition, its columns beside `i`, its rows' values of `n` and `s`, and how many of them are in a row group.
File = tuple[int | None, str, list[tuple[int | None, str | None]], int]
SMALL_FILES = st.tuples(st.none() | st.integers(0, 3), st.sampled_from(["", "n", "s", "ns"]), ROWS, st.integers(1, 5))


@fuzzed(120)
@given(
    st.sampled_from([*FORMS, "parquet", "parquet"]),
    st.lists(SMALL_FILES, max_size=4),
    TESTS,
    st.integers(1, 4),
    st.sampled_from(["i", "i,p", "s,i,n", "p", ""]),
)
def test_filtered_rows_are_those_of_all(form: str, files: list[File], where: str, count: int, columns: str) -> None:
    """Over partitions, missing columns, nulls and pruned row groups the rows are those of all that the predicate (see test_predicate) is true of."""
    files = [(1, "ns", [(1, "a"), (None, None)], 1), *files]
    everything: list[dict[str, Any]] = []
    schema = pa.schema([("i", pa.int64()), ("n", pa.int32()), ("s", pa.string()), ("p", pa.int32())])
    with tempfile.TemporaryDirectory() as directory:
        partitions = ("__HIVE_DEFAULT_PARTITION__" if file[0] is None else file[0] for file in files)
        numbered = (f"p={partition}/{number}.{form}" for number, partition in enumerate(partitions))
        for name, (p, file_columns, rows, group) in sorted(zip(numbered, files, strict=True)):
            file_rows = [
                {"n": n if "n" in file_columns else None, "s": s if "s" in file_columns else None, "p": p}
                for n, s in rows
            ]
            file_rows = [{"i": number, **row} for number, row in enumerate(file_rows, len(everything))]
            everything += file_rows
            Path(directory, name).parent.mkdir(exist_ok=True)
            write_file(
                Path(directory, name), pa.Table.from_pylist(file_rows, schema).select(["i", *file_columns]), group
            )
        host = make_host(directory, None)
        plan, _ = host.planned(Path(directory), {"where": where, **({"columns": columns} if columns else {})})
        parts = [batch for number in range(count) for batch in read_batches(host, plan, ReadTask(number, count))]
    (batch,) = pa.Table.from_pylist(everything, schema).combine_chunks().to_batches()
    chunk = dict(zip(schema.names, batch.columns, strict=True))
    expected = batch.filter(evaluate(parse_where(where, schema), chunk, batch.num_rows))
    names = plan.projection.columns.names
    assert names == columns.split(",") if columns else sorted(names) == sorted(schema.names)
    assert [row for part in parts for row in part.to_pylist()] == expected.select(names).to_pylist()
    assert all(part.num_rows and part.schema.equals(plan.projection.columns, check_metadata=True) for part in parts)


GROUPS, GROUP_ROWS = 4, 20_000


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 4 row groups that bounds of `id` do not tell apart; each column chunk is far above the merge gap."""
    rows = GROUPS * GROUP_ROWS
    ids = pa.array([2 * ((i * 7919) % rows) for i in range(rows)], pa.int64())
    noise = {name: pa.array([os.urandom(16) for _ in range(rows)]) for name in ("one", "two")}
    path = tmp_path_factory.mktemp("wide") / "wide.parquet"
    table = pa.table({"id": ids, **noise})
    pq.write_table(table, path, row_group_size=GROUP_ROWS, compression="none", use_dictionary=False)
    return path


def chunks(path: Path, *columns: str) -> dict[int, list[tuple[int, int]]]:
    """(offset, length) of the columns' chunks by row group."""
    metadata = pq.read_metadata(path)
    names = metadata.schema.to_arrow_schema().names
    chunks_by_group = {}
    for group in range(metadata.num_row_groups):
        of_group = [metadata.row_group(group).column(names.index(name)) for name in columns]
        chunks_by_group[group] = [(chunk.data_page_offset, chunk.total_compressed_size) for chunk in of_group]
    return chunks_by_group


@pytest.mark.parametrize(
    ("more", "first", "second", "rows"),
    [
        # The others only of the row group with the row; the predicate's column need not be returned.
        ({"where": "id = 4242", "columns": "id,one"}, ["id"], ["one"], 1),
        ({"where": "id = 4242", "columns": "two"}, ["id"], ["two"], 1),
        # A key within the bounds but in no row costs its column; outside of them the footer's statistics answer.
        ({"where": "id = 4243"}, ["id"], [], 0),
        ({"where": "id = -1"}, [], [], 0),
        ({"columns": "two"}, ["two"], [], GROUPS * GROUP_ROWS),
        ({"where": "id >= 0"}, ["id"], ["one", "two"], GROUPS * GROUP_ROWS),
    ],
    ids=str,
)
def test_what_is_fetched(wide: Path, more: dict[str, str], first: list[str], second: list[str], rows: int) -> None:
    """The predicate's columns come first, whole; the others of the row groups where it is true; no byte twice."""
    host = make_host(str(wide), None)
    plan, _ = host.planned(wide, more)
    host.store.calls.clear()
    actual = read_rows(host, plan)
    assert [list(row) for row in actual] == [more.get("columns", "id,one,two").split(",")] * rows
    tail, *gets = [subject[1:] for kind, subject in host.store.calls if kind == "get"]  # type: ignore[index]
    assert tail[1] == TAIL not in {length for _, length in gets}
    tested = [part for group in chunks(wide, *first).values() for part in group]
    assert sorted(gets[: len(tested)]) == tested
    place = pq.read_table(wide)["id"].to_pylist().index(4242)
    groups = [place // GROUP_ROWS] if rows == 1 else range(GROUPS)
    later_chunks = [part for group in groups for part in chunks(wide, *second)[group]]
    # Chunks that lie side by side are one request.
    assert all(
        any(at <= start < end <= at + size for at, size in gets) for start, end in ((a, a + b) for a, b in later_chunks)
    )
    assert sum(length for _, length in gets) == sum(length for _, length in [*tested, *later_chunks])


Files = Mapping[str, Mapping[str, Any] | None]
INT8, INT32, INT64 = (pa.array([2], kind) for kind in (pa.int8(), pa.int32(), pa.int64()))
NAMED: Files = {"a": {"id": [1], "name": ["a"], "rest": [1.5]}}
TYPED: Files = {"a": {"id": INT32, "name": ["a"]}, "b": {"id": INT32, "name": ["b"]}}
OLD: Files = {"dt=1/a": {"id": [1], "old": ["o"]}, "dt=2/a": {"id": [2], "old": ["o"]}}
LACKING: Files = {**OLD, "dt=2/a": {"id": [2]}}
LARGE: Files = {"dt=1/k=9223372036854775808/a": {"id": [1]}}
IN_LARGE = {"id": 1, "dt": 1, "k": 2**63}
TWO_DAYS: Files = {f"dt={n}/a": {"id": [n], "dt": ["wrong"]} for n in (5, 6)}
SPELLED = {"columns": "NAME,dt,iD", "where": "ID = 2 AND DT = 5"}
LOST_COLUMN = "no file .* has column 'name' any more.*plan again"
NO_DT = "'dt' was planned as int32, which '{}' of .* is not.*: .*plan again"
CHANGES: list[tuple[Files, Mapping[str, str], Files, Sequence[dict[str, Any]] | str]] = [
    # A planned column that is in no file any more is an error if it is returned or tested.
    (NAMED, {"columns": "name,id"}, {"a": {"id": [1], "name": ["a"]}}, [{"name": "a", "id": 1}]),
    (NAMED, {"columns": "name,id"}, {"a": {"id": [1]}}, LOST_COLUMN),
    (NAMED, {"columns": "id", "where": "name = 'a'"}, {"a": {"id": [1]}}, LOST_COLUMN),
    (NAMED, {"columns": "id"}, {"a": {"id": [1]}}, [{"id": 1}]),
    # What is selected or pruned leaves the table's columns as they are: one that its files lack is null, not lost.
    *((LACKING, more, {}, [{"id": 2, "old": None, "dt": 2}]) for more in ({"partition": "max_pt()"}, {"partition": "dt=2"}, {"where": "dt = 2"})),
    # A task that opens only some files asks what the version has before it reads a missing column as null.
    (OLD, {"where": "dt = 2"}, {"dt=2/a": {"id": [2]}}, [{"id": 2, "old": None, "dt": 2}]),
    (OLD, {"where": "dt = 2"}, {"dt=2/a": {"id": [2]}, "dt=1/a": {"id": [1]}}, "no file .* has column 'old'"),
    # A type that does not widen to the planned one is an error, not a cast.
    (TYPED, {}, {"b": {"id": INT64, "name": ["b"]}}, r"'id' was planned as int32 but is int64 in file://.*/b\.parquet: the table changed.*load\(\)"),
    (TYPED, {"columns": "name"}, {"b": {"id": INT64, "name": ["b"]}}, [{"name": "a"}, {"name": "b"}]),
    (TYPED, {}, {"b": {"id": INT8, "name": ["b"]}}, [{"id": 2, "name": "a"}, {"id": 2, "name": "b"}]),
    # Files outside the planned directories, or below values of another type.
    (LARGE, {}, {}, [IN_LARGE]),
    (LARGE, {}, {"b": {"id": [2]}}, r"/b\.parquet lies in no dt=… directory.*plan again"),
    *((LARGE, {}, {f"dt={dt}/k=1/c": {"id": [3]}}, NO_DT.format(dt)) for dt in ("x", "1_0", "2147483648")),
    (LARGE, {}, {"dt=1/k=92233720368547758080/c": {"id": [3]}}, "'k' was planned as decimal128.*; plan again"),
    (LARGE, {}, {"dt=__HIVE_DEFAULT_PARTITION__/k=5/d": {"id": [4]}}, [IN_LARGE, {"id": 4, "dt": None, "k": 5}]),
    # Columns that files or directories gain wait for the next plan.
    ({"a": {"id": [1]}}, {}, {"b": {"new": ["n"], "id": [2]}}, [{"id": 1}, {"id": 2}]),
    ({"a": {"id": [1]}}, {}, {"a": None, "dt=1/a": {"id": [3]}}, [{"id": 3}]),
    # Options may spell columns otherwise than the files, and later files otherwise than the plan.
    ({"Dt=5/a": {"Id": [1, 2], "Name": ["a", "b"]}}, SPELLED, {}, [{"Name": "b", "Dt": 5, "Id": 2}]),
    ({"Dt=5/a": {"Id": [1, 2], "Name": ["a", "b"]}}, SPELLED, {"Dt=5/a": {"iD": [2, 3], "nAME": ["c", "d"]}}, [{"Name": "c", "Dt": 5, "Id": 2}]),
    # A column of files and directories is the directories'.
    *((TWO_DAYS, {"where": where}, {}, [{"id": 6, "dt": 6}]) for where in ("dt = 6 OR id = 7", "dt > 5 AND id > 0")),
    (TWO_DAYS, {"columns": "dt"}, {"dt=5/a": {"id": [5], "DT": ["wrong"]}}, [{"dt": 5}, {"dt": 6}]),
]  # fmt: skip


@pytest.mark.parametrize(("before", "more", "after", "expected"), CHANGES, ids=range(len(CHANGES)))
def test_a_table_that_is_planned_once_and_read_after_changes(
    tmp_path: Path, before: Files, more: Mapping[str, str], after: Files, expected: list[dict[str, Any]] | str
) -> None:
    """The columns are those of the plan; what cannot be read so any more is an error that names the column and the file."""
    for number, files in enumerate((before, after)):
        for name, columns in files.items():
            path = tmp_path / f"{name}.parquet"
            path.unlink() if columns is None else write_parquet(path, **columns)
        if not number:
            host = make_host(str(tmp_path), None)
            plan, (task,) = host.planned(tmp_path, more)
    if isinstance(expected, str):
        with pytest.raises(SchemaError, match=expected):
            read_rows(host, plan, task)
    else:
        assert read_rows(host, plan, task) == expected


def test_a_wider_planned_type_is_cast_without_loss(tmp_path: Path) -> None:
    """A reader's schema may be wider than the table: files and partitions are read, tested and returned so."""
    write_parquet(
        tmp_path / "dt=1" / "a.parquet", id=pa.array([1, 2], pa.int32()), x=pa.array([0.5, None], pa.float32())
    )
    wide = pa.schema([("x", pa.float64()), ("id", pa.int64()), ("dt", pa.int64())])
    expected = [{"x": 0.5, "id": 1, "dt": 1}, {"x": None, "id": 2, "dt": 1}]
    assert read(tmp_path, {"where": "id >= 1 AND dt = 1"}, wide) == expected
    assert read(tmp_path, {"where": "x > 0.25"}, wide) == expected[:1]
    assert len(read(tmp_path, {"where": "id = 2"}, pa.schema([("id", pa.decimal128(12, 2))]))) == 1
    host = make_host(str(tmp_path), None)
    for narrow in (pa.schema([("id", pa.int16())]), pa.schema([("id", pa.string())]), pa.schema([("dt", pa.string())])):
        with pytest.raises(SchemaError, match=f"'{narrow.names[0]}' was planned as"):
            host.planned(tmp_path, None, narrow)
