"""Rows of a version: who reads which bytes, what is skipped, and that no row is lost, doubled or changed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.base.errors import SchemaError
from pyspark_lookup.columnar.predicate import evaluate
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.engine import planner
from pyspark_lookup.engine.plan import ReadPlan, ReadTask
from pyspark_lookup.io.stores import FileVersion
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.contract import share_of, slices_of
from pyspark_lookup.scan.open_file import Slice
from tests.fakes import Host, make_host
from tests.fuzzing import fuzzed

NONE: Mapping[str, str] = MappingProxyType({})
TAIL = 64 * 1024  # what opening a large parquet file asks for


def put(path: Path, group: int | None = None, **columns: Any) -> Path:
    """A parquet file of these columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=group, compression="none")
    return path


def planned(
    host: Host, path: Path, more: Mapping[str, str] = NONE, columns: pa.Schema | None = None
) -> tuple[ReadPlan, list[ReadTask]]:
    """The plan of a read with these options, of the columns they leave or of given ones."""
    options = LookupOptions.parse({"path": str(path), **{f"lookup.{key}": value for key, value in more.items()}})
    found = planner.find(host.reader, options)
    wanted = planner.table_columns(found, options) if columns is None else columns
    made = planner.plan_read(found, options, wanted, host.clock.host())
    return made, planner.plan_tasks(host.reader, found, made)


def batches_of(host: Host, made: ReadPlan, task: ReadTask | None = None) -> list[pa.RecordBatch]:
    """A task's batches; without one, those of the only task."""
    return list(host.reader.read(made, task or ReadTask(0, 1), None))


def rows_of(host: Host, made: ReadPlan, task: ReadTask | None = None) -> list[dict[str, Any]]:
    return [row for batch in batches_of(host, made, task) for row in batch.to_pylist()]


def read(path: Path, more: Mapping[str, str] = NONE, columns: pa.Schema | None = None) -> list[dict[str, Any]]:
    """All rows of a fresh read without a cache."""
    host = make_host(str(path), None)
    return rows_of(host, planned(host, path, more, columns)[0])


def moved(host: Host, before: Mapping[str, int]) -> dict[str, int]:
    """The counters that moved since `before`."""
    after = host.metrics.snapshot()
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


# --- shares ---------------------------------------------------------------------------------------

SIZES = st.one_of(
    st.lists(st.one_of(st.integers(1, 20), st.integers(1, 2**40)), min_size=1, max_size=12),
    st.lists(st.integers(1000, 10**9), min_size=1, max_size=12),
)


def versions_of(sizes: Sequence[int]) -> tuple[FileVersion, ...]:
    return tuple(FileVersion(f"s3://b/{number:03}", size, "v") for number, size in enumerate(sizes))


@fuzzed(150)
@given(SIZES, st.integers(1, 40), st.booleans())
def test_shares_partition_every_byte(sizes: list[int], count: int, splittable: bool) -> None:
    """Over all tasks each file's bytes come once, in order, in shares that are about equal; asked again the answer is the same.

    A file below 1.5 shares stays whole, one above is cut, one that cannot be split never is.
    """
    files = versions_of(sizes)
    shares = [share_of(files, number, count, splittable) for number in range(count)]
    assert shares == [share_of(list(files), number, count, splittable) for number in range(count)]
    pieces = [piece for share in shares for piece in share]
    for file in files:
        own = [piece for piece in pieces if piece.file == file]
        assert [piece.start for piece in own] == [0, *(piece.end for piece in own[:-1])]
        assert own[-1].end == file.size
    assert [piece.file.url for piece in pieces] == sorted(piece.file.url for piece in pieces)
    mean = sum(sizes) / count
    for piece in pieces:
        if not splittable or piece.file.size < 1.49 * mean:
            assert piece.whole
        elif piece.file.size > max(1.51 * mean, 1):  # a byte cannot be cut
            assert not piece.whole
    if splittable and min(sizes) >= 1000:
        assert max(sum(piece.end - piece.start for piece in share) for share in shares) <= 2.5 * mean + count


def test_an_empty_file_is_opened_by_the_first_task() -> None:
    """A file that became empty is read, and found damaged, by one task."""
    files = (FileVersion("s3://b/x", 0, "v"),)
    assert share_of(files, 0, 3, True) == slices_of(files) == (Slice(files[0], 0, 0),)
    assert share_of(files, 1, 3, True) == share_of(files, 2, 3, True) == ()


FORMS = ("parquet", "arrow", "csv", "json", "orc")


def write(path: Path, table: pa.Table, rows: int = 97) -> None:
    """A file of the format that its name says, with so many rows in each unit of it."""
    match path.suffix:
        case ".parquet":
            pq.write_table(table, path, row_group_size=rows)
        case ".arrow":
            pyarrow.feather.write_feather(table, path, chunksize=rows, compression="uncompressed")
        case ".csv":
            pa.csv.write_csv(table, path)
        case ".json":
            path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
        case ".orc":
            pa.orc.write_table(table, path)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("form", FORMS)
def test_several_tasks_lose_and_double_no_row(tmp_path: Path, form: str, count: int) -> None:
    """The tasks' rows one after another are the whole read's: row groups go where their middle lies."""
    start = 0
    for number, rows in enumerate((1500, 3, 400, 0, 97)):
        ids = pa.array(range(start, start + rows), pa.int64())
        table = pa.table({"id": ids, "text": pa.array([f"t{i}" for i in range(start, start + rows)], pa.string())})
        if rows or form in ("parquet", "arrow"):
            write(tmp_path / f"{number}.{form}", table)
        start += rows
    host = make_host(str(tmp_path), None)
    made, _ = planned(host, tmp_path)
    parts = [rows_of(host, made, ReadTask(number, count)) for number in range(count)]
    assert [row for part in parts for row in part] == [{"id": i, "text": f"t{i}"} for i in range(2000)]
    if count <= 3:  # rows lie as bytes do, so no task may have next to nothing
        assert min(map(len, parts)) > (100 if form in ("parquet", "arrow") else -1)


# --- batches --------------------------------------------------------------------------------------


def test_many_small_files_become_few_batches_in_order(tmp_path: Path) -> None:
    """150 files of 1000 rows come as batches of nearly 64k rows, never more, in order of the files."""
    for number in range(150):
        put(tmp_path / f"{number:03}.parquet", id=pa.array(range(number * 1000, number * 1000 + 1000)))
    host = make_host(str(tmp_path), None)
    batches = batches_of(host, planned(host, tmp_path)[0])
    assert [batch.num_rows for batch in batches] == [65_000, 65_000, 20_000]
    assert pa.concat_arrays([batch.column("id") for batch in batches]).to_pylist() == list(range(150_000))


def test_a_sparse_filter_still_gives_few_batches(tmp_path: Path) -> None:
    """What a predicate leaves of many batches is put together again, and counted as rows read."""
    path = put(tmp_path / "a.parquet", group=5000, id=pa.array(range(100_000)), m=pa.array([i % 50 for i in range(100_000)]))  # fmt: skip
    host = make_host(str(path), None)
    made, _ = planned(host, path, {"where": "m = 7"})
    before = host.metrics.snapshot()
    batches = batches_of(host, made)
    assert [batch.num_rows for batch in batches] == [2000]
    assert batches[0].column("id").to_pylist() == list(range(7, 100_000, 50))
    assert moved(host, before)["rowsReadCount"] == 2000


def test_every_batch_has_exactly_the_projections_schema(tmp_path: Path) -> None:
    """Names, order, types, nullability and metadata, also of batches from files that lack columns or spell types otherwise."""
    words = pa.array(["x", None]).dictionary_encode()
    put(tmp_path / "p=1" / "a.parquet", 10, id=pa.array([1, 2], pa.int16()), name=words)
    put(tmp_path / "p=2" / "b.parquet", 10, id=pa.array([3], pa.int64()), when=pa.array([5], pa.timestamp("ms")))
    put(tmp_path / "p=3" / "c.parquet", 10, name=pa.array(["y"], pa.large_string()), id=pa.array([4], pa.uint16()))
    host = make_host(str(tmp_path), None)
    marked = [pa.field("p", pa.int64(), metadata={"a": "b"}), pa.field("id", pa.int64(), nullable=False)]
    for more, columns in ((NONE, None), ({"columns": "when,p,id"}, None), (NONE, pa.schema(marked))):
        made, _ = planned(host, tmp_path, more, columns)
        assert columns is None or made.projection.columns is columns
        for batch in batches_of(host, made):
            assert batch.schema.equals(made.projection.columns, check_metadata=True)
            batch.validate(full=True)
    found = [(row["p"], row["id"], row["name"]) for row in read(tmp_path)]
    assert found == [(1, 1, "x"), (1, 2, None), (2, 3, None), (3, 4, "y")]


# --- pruning --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "opened", "dts"),
    [
        ("dt = 2", "2", [2]),
        ("dt > 1 AND n >= 0", "23", [2, 3]),
        ("dt IS NULL", "_", [None]),
        ("dt <> 2", "123", [1, 3]),  # bounds do not exclude a value within them
        ("dt = 1 OR n >= 30", "123_", [1, 3, None]),
        ("dt = 1 AND dt = 2", "", []),
        ("n >= 0", "123_", [1, 2, 3, None]),
    ],
)
def test_files_are_pruned_by_partition_value(tmp_path: Path, where: str, opened: str, dts: list[int | None]) -> None:
    """Files whose partition cannot match are not asked for one byte, and counted."""
    for dt, n in ((1, 10), (2, 20), (3, 30), (None, 40)):
        put(tmp_path / f"dt={'__HIVE_DEFAULT_PARTITION__' if dt is None else dt}" / "a.parquet", n=[n])
    host = make_host(str(tmp_path), None)
    made, _ = planned(host, tmp_path, {"where": where})
    before = host.metrics.snapshot()
    host.store.calls.clear()
    assert [row["dt"] for row in rows_of(host, made)] == dts
    gets = {subject[0].split("dt=")[1][0] for kind, subject in host.store.calls if kind == "get"}  # type: ignore[index]
    assert gets == set(opened)
    assert moved(host, before).get("filesPrunedCount", 0) == 4 - len(opened)


@pytest.mark.parametrize(
    ("where", "groups", "ids"),
    [
        ("id = 35", 1, [35]),
        ("id < 10 OR id > 95", 2, [*range(10), *range(96, 100)]),
        ("id = 1000", 0, []),
        ("few IS NOT NULL", 1, list(range(20, 30))),
        ("few IS NULL AND id < 25", 2, list(range(20))),
        ("text LIKE 't4%'", 1, list(range(40, 50))),
        ("id >= 0", 10, list(range(100))),
    ],
)
def test_row_groups_are_pruned_by_statistics(tmp_path: Path, where: str, groups: int, ids: list[int]) -> None:
    """Row groups whose bounds or null counts exclude a match are not decoded; both kinds are counted."""
    few = pa.array([i if 20 <= i < 30 else None for i in range(100)], pa.int32())
    text = pa.array([f"t{i:02}" for i in range(100)])
    path = put(tmp_path / "a.parquet", 10, id=pa.array(range(100)), few=few, text=text)
    host = make_host(str(path), None)
    made, _ = planned(host, path, {"where": where})
    before = host.metrics.snapshot()
    assert [row["id"] for row in rows_of(host, made)] == ids
    counts = moved(host, before)
    assert counts.get("rowGroupsPrunedCount", 0) == 10 - groups
    assert counts.get("rowGroupsReadCount", 0) == groups


NUMBERS, TEXTS = st.integers(-3, 6), st.text("ab", max_size=2)
# Columns are of the files, `p` of the directories.
TESTS = st.recursive(
    st.one_of(
        st.builds(
            "{0} {1} {2}".format,
            st.sampled_from("np"),
            st.sampled_from(["=", "<>", "<", "<=", ">", ">=", "<=>"]),
            NUMBERS,
        ),
        st.builds("s {0} '{1}'".format, st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), TEXTS),
        st.builds("{0} IN ({1}, {2})".format, st.sampled_from("np"), NUMBERS, NUMBERS | st.just("NULL")),
        st.builds("s IN ('{0}', '{1}')".format, TEXTS, TEXTS),
        st.builds("s LIKE '{0}%'".format, TEXTS),
        st.builds("{0} IS NULL".format, st.sampled_from("nps")),
    ),
    lambda inner: (
        st.builds("NOT ({0})".format, inner)
        | st.builds("({0}) {1} ({2})".format, inner, st.sampled_from(["AND", "OR"]), inner)
    ),
    max_leaves=5,
)


@dataclasses.dataclass
class SmallFile:
    """A file of a generated table: its partition, its columns beside `i`, and its rows' values."""

    p: int | None
    has_n: bool
    has_s: bool
    rows: list[tuple[int | None, str | None]]
    group: int


SMALL_FILES = st.builds(
    SmallFile,
    p=st.none() | st.integers(0, 3),
    has_n=st.booleans(),
    has_s=st.booleans(),
    # Runs of one value make row groups that statistics tell apart.
    rows=st.lists(st.tuples(st.none() | NUMBERS, st.none() | TEXTS), min_size=1, max_size=12).map(
        lambda rows: sorted(rows, key=lambda row: (row[0] is None, row[0] or 0))
    ),
    group=st.integers(1, 5),
)


@fuzzed(120)
@given(
    st.sampled_from([*FORMS, "parquet", "parquet"]),
    st.lists(SMALL_FILES, max_size=4),
    TESTS,
    st.integers(1, 4),
    st.sampled_from(["i", "i,p", "s,i,n", "p", ""]),
)
def test_filtered_rows_are_those_of_all(
    form: str, files: list[SmallFile], where: str, count: int, columns: str
) -> None:
    """Over partitions, missing columns, nulls and pruned row groups the rows are those of all that the predicate is true of.

    Batches are as planned, and none is empty. What a predicate means of one row is the subject of test_predicate and, beside
    Spark, of test_same_rows.
    """
    files = [SmallFile(1, True, True, [(1, "a"), (None, None)], 1), *files]
    everything: list[dict[str, Any]] = []
    schema = pa.schema([("i", pa.int64()), ("n", pa.int32()), ("s", pa.string()), ("p", pa.int32())])
    with tempfile.TemporaryDirectory() as directory:
        numbered = sorted(
            (f"p={'__HIVE_DEFAULT_PARTITION__' if file.p is None else file.p}/{number}.{form}", number, file)
            for number, file in enumerate(files)
        )
        for name, _, file in numbered:
            first = len(everything)
            everything += [
                {"i": first + row, "n": n if file.has_n else None, "s": s if file.has_s else None, "p": file.p}
                for row, (n, s) in enumerate(file.rows)
            ]
            held = ["i", *(["n"] if file.has_n else []), *(["s"] if file.has_s else [])]
            Path(directory, name).parent.mkdir(exist_ok=True)
            write(Path(directory, name), pa.Table.from_pylist(everything[first:], schema).select(held), file.group)
        host = make_host(directory, None)
        made, _ = planned(host, Path(directory), {"where": where, **({"columns": columns} if columns else {})})
        found = [batch for number in range(count) for batch in batches_of(host, made, ReadTask(number, count))]
    (batch,) = pa.Table.from_pylist(everything, schema).combine_chunks().to_batches()
    chunk = dict(zip(schema.names, batch.columns, strict=True))
    expected = batch.filter(evaluate(parse_where(where, schema), chunk, batch.num_rows))
    assert [row for part in found for row in part.to_pylist()] == expected.select(
        made.projection.columns.names
    ).to_pylist()
    assert made.projection.columns.names == (columns.split(",") if columns else schema.names)
    assert all(part.num_rows and part.schema.equals(made.projection.columns, check_metadata=True) for part in found)


# --- which bytes ----------------------------------------------------------------------------------

GROUPS, GROUP_ROWS = 4, 20_000


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A file of 4 row groups that bounds of `id` do not tell apart; each column chunk is far above the merge gap."""
    rows = GROUPS * GROUP_ROWS
    ids = pa.array([2 * ((i * 7919) % rows) for i in range(rows)], pa.int64())
    noise = {name: pa.array([os.urandom(16) for _ in range(rows)]) for name in ("one", "two")}
    path = tmp_path / "wide.parquet"
    table = pa.table({"id": ids, **noise})
    pq.write_table(table, path, row_group_size=GROUP_ROWS, compression="none", use_dictionary=False)
    return path


def chunks(path: Path, *columns: str) -> dict[int, list[tuple[int, int]]]:
    """(offset, length) of the columns' chunks by row group."""
    metadata = pq.read_metadata(path)
    names = metadata.schema.to_arrow_schema().names
    found = {}
    for group in range(metadata.num_row_groups):
        of_group = [metadata.row_group(group).column(names.index(name)) for name in columns]
        found[group] = [(chunk.data_page_offset, chunk.total_compressed_size) for chunk in of_group]
    return found


def gets_of(host: Host, made: ReadPlan) -> tuple[list[tuple[int, int]], list[dict[str, Any]]]:
    """The (offset, length) requests of a read after its tail, and the rows."""
    host.store.calls.clear()
    rows = rows_of(host, made)
    gets = [subject[1:] for kind, subject in host.store.calls if kind == "get"]  # type: ignore[index]
    (tail,) = [part for part in gets if part[1] == TAIL]
    assert gets[0] == tail
    return gets[1:], rows  # type: ignore[return-value]


def flat(parts: Mapping[int, list[tuple[int, int]]]) -> list[tuple[int, int]]:
    return [part for group in parts.values() for part in group]


def covered(gets: Sequence[tuple[int, int]]) -> set[int]:
    """The KiB that requests touch; asserts that no byte is asked for twice."""
    ordered = sorted(gets)
    assert all(offset + length <= following for (offset, length), (following, _) in itertools.pairwise(ordered))
    return {kib for offset, length in gets for kib in range(offset // 1024, (offset + length) // 1024 + 1)}


@pytest.mark.parametrize(
    ("more", "first", "then", "rows"),
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
def test_only_what_is_needed_is_fetched(
    wide: Path, more: dict[str, str], first: list[str], then: list[str], rows: int
) -> None:
    """The predicate's columns come first, whole; the others of the row groups where it is true; no byte twice."""
    host = make_host(str(wide), None)
    made, _ = planned(host, wide, more)
    gets, found = gets_of(host, made)
    assert len(found) == rows
    if found:
        assert list(found[0]) == more.get("columns", "id,one,two").split(",")
    tested = flat(chunks(wide, *first))
    assert sorted(gets[: len(tested)]) == tested
    (place,) = [i for i, value in enumerate(pq.read_table(wide)["id"].to_pylist()) if value == 4242]
    groups = [place // GROUP_ROWS] if rows == 1 else range(GROUPS)
    others = [part for group in groups for part in chunks(wide, *then)[group]]
    assert covered(gets) == covered([*tested, *others])


def test_a_second_read_of_one_version_fetches_nothing(wide: Path, cache_dir: Path) -> None:
    """What a selective read brought stays: the same read again makes its metadata call only, another column adds itself."""
    host = make_host(str(wide), cache_dir)
    one, two = (planned(host, wide, {"where": "id = 4242", "columns": column})[0] for column in ("one", "two"))
    first = rows_of(host, one)
    host.store.calls.clear()
    assert rows_of(host, one) == first
    assert host.store.kinds() == ["head"]
    rows_of(host, two)
    (get,) = [subject[1:] for kind, subject in host.store.calls if kind == "get"]  # type: ignore[index]
    assert get in flat(chunks(wide, "two"))


def test_a_read_of_many_row_groups_is_one_phase(tmp_path: Path) -> None:
    """Above eight row groups a second round of requests does not pay: each group's neighbouring columns come together."""
    rows = 9 * 10_000
    ids, noise = pa.array([(i * 7919) % rows for i in range(rows)]), pa.array([os.urandom(16) for _ in range(rows)])
    path = put(tmp_path / "a.parquet", 10_000, id=ids, noise=noise)
    host = make_host(str(path), None)
    made, _ = planned(host, path, {"where": "id = 4242"})
    gets, rows_found = gets_of(host, made)
    assert len(rows_found) == 1
    assert sum(length for _, length in gets) > 9 * 10_000 * 24


# --- columns --------------------------------------------------------------------------------------


class Changing:
    """A table that is planned once and read after changes."""

    def __init__(self, path: Path, more: Mapping[str, str] = NONE) -> None:
        self.host = make_host(str(path), None)
        self.plan, _ = planned(self.host, path, more)

    def read(self) -> list[dict[str, Any]]:
        return rows_of(self.host, self.plan)


def test_a_lost_column_is_an_error_only_if_it_is_needed(tmp_path: Path) -> None:
    """A planned column that is in no file any more is named, whether it is returned or only tested; others may go."""
    path = tmp_path / "a.parquet"
    put(path, id=[1], name=["a"], rest=[1.5])
    returned, tested = Changing(path, {"columns": "name,id"}), Changing(path, {"columns": "id", "where": "name = 'a'"})
    without = Changing(path, {"columns": "id"})
    put(path, id=[1], name=["a"])
    assert returned.read() == [{"name": "a", "id": 1}]
    put(path, id=[1])
    for scan in (returned, tested):
        with pytest.raises(SchemaError, match=r"'name' is in no file .*plan again"):
            scan.read()
    assert without.read() == [{"id": 1}]


def test_a_changed_type_names_the_column_both_types_and_the_file(tmp_path: Path) -> None:
    """A type that does not widen to the planned one is an error, not a cast."""
    put(tmp_path / "a.parquet", id=pa.array([1], pa.int32()), name=["a"])
    put(tmp_path / "b.parquet", id=pa.array([2], pa.int32()), name=["b"])
    scan, other = Changing(tmp_path), Changing(tmp_path, {"columns": "name"})
    put(tmp_path / "b.parquet", id=pa.array([2], pa.int64()), name=["b"])
    with pytest.raises(SchemaError, match=r"'id' was planned as int32 but is int64 in file://.*/b\.parquet"):
        scan.read()
    assert other.read() == [{"name": "a"}, {"name": "b"}]
    put(tmp_path / "b.parquet", id=pa.array([2], pa.int8()), name=["b"])
    assert scan.read() == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]


def test_a_vanished_partition_column_is_named(tmp_path: Path) -> None:
    """Files outside the planned directories, or below values of another type, are errors that name the column."""
    put(tmp_path / "dt=1" / "k=9223372036854775808" / "a.parquet", id=[1])
    scan = Changing(tmp_path)
    assert scan.read() == [{"id": 1, "dt": 1, "k": 2**63}]
    new = put(tmp_path / "b.parquet", id=[2])
    with pytest.raises(SchemaError, match=r"/b\.parquet lies in no dt=… directory.*plan again"):
        scan.read()
    new.unlink()
    for dt, k, told in (
        ("x", "1", "'dt' was planned as int32, which 'x' of .* is not"),
        ("1_0", "1", "'dt' was planned as int32, which '1_0' of .* is not"),
        ("2147483648", "1", "'dt' was planned as int32, which '2147483648' of .* is not"),
        ("1", "92233720368547758080", "'k' was planned as decimal128"),
    ):
        new = put(tmp_path / f"dt={dt}" / f"k={k}" / "c.parquet", id=[3])
        with pytest.raises(SchemaError, match=f"{told}.*: plan again"):
            scan.read()
        new.unlink()
    put(tmp_path / "dt=__HIVE_DEFAULT_PARTITION__" / "k=5" / "d.parquet", id=[4])
    assert scan.read() == [{"id": 1, "dt": 1, "k": 2**63}, {"id": 4, "dt": None, "k": 5}]


def test_a_new_column_waits_for_the_next_plan(tmp_path: Path) -> None:
    """Columns that files or directories gain are ignored by a plan made before."""
    put(tmp_path / "a.parquet", id=[1])
    scan = Changing(tmp_path)
    put(tmp_path / "b.parquet", new=["n"], id=[2])
    assert scan.read() == [{"id": 1}, {"id": 2}]
    assert read(tmp_path) == [{"id": 1, "new": None}, {"id": 2, "new": "n"}]
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "b.parquet").unlink()
    put(tmp_path / "dt=1" / "a.parquet", id=[3])
    assert scan.read() == [{"id": 3}]
    assert read(tmp_path) == [{"id": 3, "dt": 1}]


def test_names_are_found_in_any_letter_case(tmp_path: Path) -> None:
    """Options may spell columns otherwise than the files, and later files otherwise than the plan."""
    path = put(tmp_path / "Dt=5" / "a.parquet", Id=[1, 2], Name=["a", "b"])
    more = {"columns": "NAME,dt,iD", "where": "ID = 2 AND DT = 5"}
    assert read(tmp_path, more) == [{"Name": "b", "Dt": 5, "Id": 2}]
    scan = Changing(tmp_path, more)
    put(path, iD=[2, 3], nAME=["c", "d"])
    assert scan.read() == [{"Name": "c", "Dt": 5, "Id": 2}]


def test_a_wider_planned_type_is_cast_without_loss(tmp_path: Path) -> None:
    """A reader's schema may be wider than the table: files and partitions are read, tested and returned so."""
    put(tmp_path / "dt=1" / "a.parquet", id=pa.array([1, 2], pa.int32()), x=pa.array([0.5, None], pa.float32()))
    wide = pa.schema([("x", pa.float64()), ("id", pa.int64()), ("dt", pa.int64())])
    assert read(tmp_path, {"where": "id >= 1 AND dt = 1"}, wide) == [
        {"x": 0.5, "id": 1, "dt": 1},
        {"x": None, "id": 2, "dt": 1},
    ]
    assert read(tmp_path, {"where": "x > 0.25"}, wide) == [{"x": 0.5, "id": 1, "dt": 1}]
    assert len(read(tmp_path, {"where": "id = 2"}, pa.schema([("id", pa.decimal128(12, 2))]))) == 1
    host = make_host(str(tmp_path), None)
    for narrow in (pa.schema([("id", pa.int16())]), pa.schema([("id", pa.string())]), pa.schema([("dt", pa.string())])):
        with pytest.raises(SchemaError, match=f"'{narrow.names[0]}' was planned as"):
            planned(host, tmp_path, NONE, narrow)


@pytest.mark.parametrize("spelling", ["dt", "DT"])
def test_a_column_of_files_and_directories_is_the_directorys(tmp_path: Path, spelling: str) -> None:
    """Values, type and spelling come from the directory, in rows and in predicates."""
    put(tmp_path / "dt=5" / "a.parquet", **{"id": [1], spelling: ["wrong"]})
    put(tmp_path / "dt=6" / "a.parquet", **{"id": [2], spelling: ["wrong"]})
    assert read(tmp_path) == [{"id": 1, "dt": 5}, {"id": 2, "dt": 6}]
    assert read(tmp_path, {"where": "dt = 6 OR id = 7"}) == [{"id": 2, "dt": 6}]
    assert read(tmp_path, {"columns": "dt", "where": "dt >= 5 AND id > 0"}) == [{"dt": 5}, {"dt": 6}]


@pytest.mark.parametrize("more", [{"partition": "max_pt()"}, {"partition": "dt=2"}, {"where": "dt = 2"}], ids=str)
def test_a_column_only_in_other_partitions_is_null(tmp_path: Path, more: dict[str, str]) -> None:
    """What is selected or pruned leaves the table's columns as they are: one that its files lack is null, not lost."""
    put(tmp_path / "dt=1" / "a.parquet", id=[1], old=["o"])
    put(tmp_path / "dt=2" / "a.parquet", id=[2])
    assert read(tmp_path, more) == [{"id": 2, "old": None, "dt": 2}]


def test_a_column_lost_everywhere_is_noticed_from_a_part(tmp_path: Path) -> None:
    """A task that opens only some files asks what the version has before it reads a missing column as null."""
    for dt in (1, 2):
        put(tmp_path / f"dt={dt}" / "a.parquet", id=[dt], old=["o"])
    host = make_host(str(tmp_path), None)
    plan, (task,) = planned(host, tmp_path, {"where": "dt = 2"})
    put(tmp_path / "dt=2" / "a.parquet", id=[2])
    assert rows_of(host, plan, task) == [{"id": 2, "old": None, "dt": 2}]
    put(tmp_path / "dt=1" / "a.parquet", id=[1])
    with pytest.raises(SchemaError, match="'old' is in no file"):
        rows_of(host, plan, task)
