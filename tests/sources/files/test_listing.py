"""What a path means: which files are data, which partitions they lie in, and what is not a table at all."""

import dataclasses
import datetime
import decimal
import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup import errors
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.sources.files.source import data_files, refuse_tables
from pyspark_lookup.sources.registry import SOURCES, parse_options
from pyspark_lookup.storage.stores import FileVersion, Listing
from pyspark_lookup.versions.directories import partition_values
from pyspark_lookup.versions.model import (
    DeleteFile,
    Kind,
    Table,
    TableVersion,
    partition_fields,
    partition_value,
    select_partitions,
)
from tests.support.fakes import FakeClock, make_host

ROOT = "file:///data/dim"


def listing(*names: str, empty: Sequence[str] = ()) -> Listing:
    """A listing of ROOT: files by relative name, a name that ends in `/` is a directory without files."""
    directories = {name.rstrip("/") for name in names if name.endswith("/")}
    file_names = [name for name in names if not name.endswith("/")]
    for name in (*file_names, *directories):
        parts = name.split("/")
        directories.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    files = [FileVersion(f"{ROOT}/{name}", 0 if name in empty else 7, "v1") for name in (*file_names, *empty)]
    return Listing(ROOT, tuple(sorted(files, key=lambda f: f.url)), frozenset(directories))


def data_names(listed: Listing, pattern: str | None = None, success_file: bool = False) -> list[str]:
    """Relative names of the data files of a directory, or of a glob below it."""
    url, kind = (ROOT, Kind.DIRECTORY) if pattern is None else (f"{ROOT}/{pattern}", Kind.GLOB)
    refuse_tables(url, kind, listed, SOURCES)
    return [file.url[len(ROOT) + 1 :] for file in data_files(url, kind, listed, success_file)]


def make_directory(*names: str) -> tuple[Table, tuple[FileVersion, ...]]:
    """A directory table and its data files."""
    table = Table(ROOT, "file", Kind.DIRECTORY, FileFormatName.PARQUET)
    return table, data_files(ROOT, Kind.DIRECTORY, listing(*names))


def write_file(path: Path, rows: int = 1) -> Path:
    """A small parquet file on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": range(rows)}), path)
    return path


def discovered(path: Path) -> tuple[Table, TableVersion]:
    return make_host(str(path), None).resolver.discover(parse_options({"path": str(path)}))


def test_names_with_underscore_or_dot_are_skipped_at_any_depth() -> None:
    """Files named or below a directory named `_…` or `.…` are not data, nor are those of zero bytes; `_k=v` directories are."""
    listed = listing(
        "a.parquet", "_b.parquet", ".c.parquet", "_d/e.parquet", ".f/g.parquet", "h/_i/j.parquet", "h/.k/l.parquet",
        "h/_m.parquet", "h/n/o.parquet", "_p=1/q.parquet", "_p=1/_r=2/s.parquet", "_p=1/_t.parquet", ".u=1/v.parquet",
        "_SUCCESS", "_metadata", ".a.parquet.crc", empty=["c.parquet", "h/_started", "h/d.parquet"],
    )  # fmt: skip
    for pattern in (None, "*"):
        assert data_names(listed, pattern) == ["_p=1/_r=2/s.parquet", "_p=1/q.parquet", "a.parquet", "h/n/o.parquet"]
    assert data_names(listed, "*.parquet") == ["a.parquet"]
    hidden = "file:///home/.cache/_tables/dim"  # names above the table say nothing
    listed = Listing(hidden, (FileVersion(f"{hidden}/x/a.parquet", 1, "1"),), frozenset({"x"}))
    assert data_files(hidden, Kind.DIRECTORY, listed) == listed.files


MANY = ("a.parquet", "b.parquet", "b.csv", "x/a.parquet", "x/deep/a.parquet", "y/a.parquet", "z1/a.parquet")
GLOBS = {
    "*.parquet": ["a.parquet", "b.parquet"],
    "[ac].parquet": ["a.parquet"],
    "[^a].parquet": ["b.parquet"],
    "[a-b].*": ["a.parquet", "b.csv", "b.parquet"],
    "{a,b}.{csv,orc}": ["b.csv"],
    "{x,{y,z?}}/a.parquet": ["x/a.parquet", "y/a.parquet", "z1/a.parquet"],
    "{x/deep,y}/*.parquet": ["x/deep/a.parquet", "y/a.parquet"],
    "*/a.parquet": ["x/a.parquet", "y/a.parquet", "z1/a.parquet"],
    "*": sorted(MANY),
    "??.csv": [],
}


def test_a_glob_matches_component_by_component(tmp_path: Path) -> None:
    """`*`, `?`, `[…]` and `{a,b}` match within one path component; a matching directory gives all files below it."""
    for name in MANY:
        write_file(tmp_path / name)
    host = make_host(str(tmp_path), None)
    for pattern, names in GLOBS.items():
        table = Table(host.ufs.url_of(f"{tmp_path}/{pattern}"), "file", Kind.GLOB, None)
        listed = host.ufs.list_status(table.root)
        if names:
            files = data_files(table.url, table.kind, listed)
            assert [file.url.removeprefix(f"file://{tmp_path}/") for file in files] == names, pattern
        else:
            with pytest.raises(errors.TableEmptyError, match="no file matches the glob"):
                data_files(table.url, table.kind, listed)


def test_partition_directories_below_a_root_count() -> None:
    """Each `k=v` directory is a column, outermost first, plain ones between them are none; nor is what lies above a file or a glob."""
    listed = listing("dt=1/x/hh=02/a.parquet", "dt=2/y/hh=3/b.parquet").files
    schema = pa.schema([("dt", pa.int32()), ("hh", pa.int32())])
    for path, kind, files, fields in (
        ("", Kind.DIRECTORY, listed, schema),
        ("/dt=*/*/hh=*/*.parquet", Kind.GLOB, listed, schema),
        ("/dt=1/*/*", Kind.GLOB, listed[:1], pa.schema([schema.field("hh")])),
        ("/dt=1/a.parquet", Kind.FILE, (FileVersion(f"{ROOT}/dt=1/a.parquet", 1, "1"),), pa.schema([])),
    ):
        assert partition_fields(Table(f"{ROOT}{path}", "file", kind, FileFormatName.PARQUET), files) == fields


def test_what_lies_beside_a_glob_is_none_of_its_business() -> None:
    """Another table's log or job directory counts only where the glob's own files may lie."""
    listed = listing(
        "a/x.parquet", "b/_delta_log/", "b/.hoodie/", "b/_temporary/", "c/metadata/v1.metadata.json", "c/.spark-staging-1/"
    )  # fmt: skip
    assert data_names(listed, "a*/*.parquet") == ["a/x.parquet"]
    assert data_names(listed, "a/[x].parquet") == ["a/x.parquet"]
    for pattern in ("*/*.parquet", "{a,b}/*.parquet"):
        with pytest.raises(errors.TableFormatError, match="Delta"):
            data_names(listed, pattern)
    with pytest.raises(errors.TableFormatError, match="Iceberg"):
        data_names(listed, "[ac]/*.parquet")
    with pytest.raises(errors.TableBusyError, match="_temporary"):
        data_names(listing("b/x.parquet", "b/_temporary/"), "b*")


@pytest.mark.parametrize(
    ("values", "kind", "typed"),
    [
        (["1", "02", "-3"], pa.int32(), [1, 2, -3]),
        (["2147483647", "-2147483648"], pa.int32(), [2**31 - 1, -(2**31)]),
        (["2147483648", "1"], pa.int64(), [2**31, 1]),
        (["9223372036854775808", "1"], pa.decimal128(19, 0), [decimal.Decimal(2**63), decimal.Decimal(1)]),
        (["2024-01-31", "0001-01-01"], pa.date32(), [datetime.date(2024, 1, 31), datetime.date(1, 1, 1)]),
        (["2024-02-30"], pa.string(), ["2024-02-30"]),
        (["1.5", "2", "-.5e1"], pa.float64(), [1.5, 2.0, -5.0]),
        (["1.5", "2147483648"], pa.string(), ["1.5", "2147483648"]),
        (["", "1"], pa.string(), ["", "1"]),
        (["nan"], pa.string(), ["nan"]),
        (["1_000"], pa.string(), ["1_000"]),
        (["7", None], pa.int32(), [7, None]),
        ([None], pa.string(), [None]),
    ],
)
def test_partition_values_are_typed_by_all_of_them(
    values: list[str | None], kind: pa.DataType, typed: list[object]
) -> None:
    """int32, int64, decimal, date, double or string: the narrowest that holds every value exactly; nulls fit any."""
    names = [f"k={'__HIVE_DEFAULT_PARTITION__' if v is None else v}/{n}.parquet" for n, v in enumerate(values)]
    table, files = make_directory(*names)
    assert partition_fields(table, files) == pa.schema([("k", kind)])
    raw = {int(file.url[-9]): partition_values(ROOT, file.url) for file in files}
    assert raw == {number: (("k", value),) for number, value in enumerate(values)}
    assert [partition_value(value, kind) for value in values] == typed


def test_values_that_are_none_of_their_columns_type() -> None:
    """A value that inference would not have taken for a type is not read as that type later either."""
    for kind, value in (
        (pa.int32(), "2147483648"),
        (pa.int64(), "1_000"),
        (pa.decimal128(3, 0), "1234"),
        (pa.date32(), "20240131"),
        (pa.float64(), "\u0663.5"),
    ):
        with pytest.raises(ValueError):
            partition_value(value, kind)


def test_escapes_in_names_of_directories() -> None:
    """Names and values are unescaped as UTF-8; of what is none each byte is a character, as in Spark. Lone signs stay."""
    url = f"{ROOT}/a%3Db=x%2Fy/c=1%252/d=1+1=2/e=100%/f=/plain/g=%ff/h=%FE%C3/i=%C3%A9/x=1.parquet"
    values = ["x/y", "1%2", "1+1=2", "100%", "", "\xff", "\xfe\xc3", "\xe9"]
    assert partition_values(ROOT, url) == tuple(zip(["a=b", *"cdefghi"], values, strict=True))


def test_disagreeing_directories_name_two_files() -> None:
    """Files whose directories name other columns are not one table: the error shows a file of each."""
    for first, second in (("a.parquet", "dt=1/b.parquet"), ("dt=1/hh=2/a.parquet", "hh=2/dt=1/b.parquet")):
        with pytest.raises(errors.NotATableError, match="one table") as caught:
            partition_fields(*make_directory(first, second))
        assert all(f"{ROOT}/{name}" in str(caught.value) for name in (first, second))
    with pytest.raises(errors.NotATableError, match="two directories of one partition column"):
        partition_fields(*make_directory("a=1/A=2/x.parquet"))


def selected(partition: str, *names: str) -> list[str]:
    """The relative names of the files that `lookup.partition` leaves."""
    table, files = make_directory(*names)
    options = parse_options({"path": "/data/dim", "lookup.partition": partition})
    return [file.url[len(ROOT) + 1 :] for file in select_partitions(table, TableVersion(table.id, files), options)]


NULL = "__HIVE_DEFAULT_PARTITION__"
PARTS = ["dt=1/c=a b/x", "dt=1/c=é/x", "dt=2/c=é/x", f"dt={NULL}/c=é/x"]


@pytest.mark.parametrize(
    ("partition", "names", "expected"),
    [
        ("max_pt()", ["dt=9/a", "dt=10/a", "dt=10/b"], ["dt=10/a", "dt=10/b"]),
        (" MAX_PT( ) ", ["dt=-1/a", "dt=-2/a"], ["dt=-1/a"]),
        ("max_pt()", ["dt=010/a", "dt=10/a", "dt=9/a"], ["dt=010/a", "dt=10/a"]),
        ("max_pt()", ["dt=x9/a", "dt=x10/a"], ["dt=x9/a"]),
        ("max_pt()", [f"dt={NULL}/a", "dt=-5/a"], ["dt=-5/a"]),
        ("max_pt()", [f"dt={NULL}/a"], [f"dt={NULL}/a"]),
        ("max_pt()", ["y=2024/m=12/a", f"y=2025/m={NULL}/a", "y=2025/m=1/a"], ["y=2025/m=1/a"]),
        ("max_pt()", ["y=2024/m=12/a", f"y=2025/m={NULL}/a"], [f"y=2025/m={NULL}/a"]),
        ("dt=1", PARTS, PARTS[:2]),
        ("dt=01", PARTS, PARTS[:2]),
        (" DT = 1 , C = a b ", PARTS, PARTS[:1]),
        ("c=%C3%A9,dt=2", PARTS, PARTS[2:3]),
        (f"dt={NULL}", PARTS, PARTS[3:]),
        ("dt=3", PARTS, []),
    ],
)
def test_partition_selects_files(partition: str, names: list[str], expected: list[str]) -> None:
    """`max_pt()`: level by level the largest value in the column's type, null below all; `k=v,…`: typed values, names in any case."""
    assert sorted(selected(partition, *names)) == sorted(expected)


@pytest.mark.parametrize(
    ("partition", "names", "message"),
    [
        ("max_pt()", ["a.parquet"], "has no k=v directories"),
        ("day=1", ["dt=1/a.parquet"], "the partition columns of .* are dt$"),
        ("dt", ["dt=1/hh=2/a.parquet"], "the partition columns of .* are dt, hh$"),
        ("dt=x", ["dt=1/a.parquet"], "'x' is not a valid int32 for column dt"),
    ],
)
def test_a_partition_that_cannot_be_is_an_option_error(partition: str, names: list[str], message: str) -> None:
    """A table without partitions, an unknown column or a value of another type: the error names the option and why."""
    with pytest.raises(errors.OptionError, match=message) as caught:
        selected(partition, *names)
    assert "lookup.partition" in str(caught.value)


FOREIGN = {
    "_delta_log/00000000000000000000.json": (errors.PysparkLookupError, "Delta (table|commit)"),
    ".hoodie/hoodie.properties": (errors.TableFormatError, r"Hudi table.*format\('hudi'\)"),
    "metadata/v3.metadata.json": (errors.TableFormatError, "Iceberg table.*catalog"),
    "_temporary/": (errors.TableBusyError, "remove .*_temporary, which loses"),
    "_temporary/0/_temporary/attempt_1/part-0.parquet": (errors.TableBusyError, "_temporary.*lookup.busy-timeout"),
    "__magic/": (errors.TableBusyError, "remove .*__magic, which loses"),
    "__magic_job-1/": (errors.TableBusyError, "remove .*__magic_job-1, which loses"),
    ".staging_1/": (errors.TableBusyError, r"remove .*\.staging_1, which loses"),
}


@pytest.mark.parametrize("marker", FOREIGN)
def test_a_foreign_or_busy_directory_is_never_half_a_table(tmp_path: Path, marker: str) -> None:
    """A table format's log or a job's directory at any depth, also of a glob, is its named error with the way out."""
    kind, message = FOREIGN[marker]
    path = tmp_path / "dim" / "dt=1" / "hh=2"
    write_file(path / "a.parquet")
    (path / marker).mkdir(parents=True) if marker.endswith("/") else write_file(path / marker)
    for place in path.rglob("*"):
        os.utime(place, (FakeClock().wall_s, FakeClock().wall_s))  # else it is of a job that died long ago
    for table_path in (tmp_path / "dim", tmp_path / "dim" / "*"):
        with pytest.raises(kind, match=message) as caught:
            discovered(table_path)
        assert f"dt=1/hh=2/{marker.split('/', maxsplit=1)[0]}" in str(caught.value)


def test_which_directories_are_a_version(tmp_path: Path) -> None:
    """Names that only resemble markers are data; no data is an empty table; with lookup.success-file it is busy without `_SUCCESS`."""
    names = ["delta_log/c", "metadata/a", "metadata/metadata.json", "x/v1.metadata.json", "y/magic/b"]
    assert data_names(listing(*names, "_temporary")) == names
    for hidden in ((), ("x/",), ("_a.parquet", ".b/c.parquet"), ("_SUCCESS",)):
        with pytest.raises(errors.TableEmptyError, match=r"holds no data file.*_ or"):
            data_names(listing(*hidden, empty=["started.parquet"]))
    for names, says in (
        (["a.parquet"], r"_SUCCESS.*lookup\.success-file = true"),
        (["x/a.parquet", "x/_SUCCESS"], "_SUCCESS"),
        (["a.parquet", "_temporary/"], "_temporary"),  # which says more than the missing mark
    ):
        with pytest.raises(errors.TableBusyError, match=says):
            data_names(listing(*names), success_file=True)
    assert data_names(listing("a.parquet", empty=["_SUCCESS"]), success_file=True) == ["a.parquet"]
    assert data_names(listing("a.parquet")) == ["a.parquet"]
    path = str(write_file(tmp_path / "a.parquet"))
    with pytest.raises(errors.OptionError, match=r"lookup\.success-file"):
        make_host(path, None).reader.find(parse_options({"path": path, "lookup.success-file": "true"}))


# Sizes and identities that run into each other when they are written side by side.
FILES = st.dictionaries(
    st.sampled_from(["s3://b/t/a", "s3://b/t/a1", "s3://b/t/b"]),
    st.tuples(st.sampled_from([1, 11, 111]), st.sampled_from(["", "1", "11", "1,", '"1"'])),
    max_size=3,
)
Files = dict[str, tuple[int, str]]


def make_version(files: Files, table_id: str = "t") -> TableVersion:
    return TableVersion(table_id, tuple(FileVersion(url, *files[url]) for url in sorted(files)))


@given(FILES, FILES, st.booleans())
def test_digests_are_equal_if_and_only_if_the_files_are(files: Files, other_files: Files, settled: bool) -> None:
    """Any added, removed, resized or rewritten file is another digest, as another table is; when a version was seen is not."""
    first, second = make_version(files), make_version(other_files)
    assert (first.digest == second.digest) == (files == other_files)
    assert first.digest != make_version(files, "u").digest
    assert (len(first.digest), first.bytes) == (15, sum(size for size, _ in files.values()))
    touched = tuple(dataclasses.replace(file, modified_at_s=5.0, settled=settled) for file in first.files)
    later = TableVersion("t", touched)
    assert (later, later.digest, later.settled().digest) == (first, first.digest, first.digest)
    assert all(file.settled for file in later.settled().files)


def test_deleted_rows_make_another_digest() -> None:
    """The same files with more, or other, deletes have another digest."""
    several = [(), (DeleteFile("s3://a/dim/one", 1),), (DeleteFile("s3://a/dim/two", 1),)]
    files = [FileVersion("s3://a/dim/a", 1, "i", deletes=deletes) for deletes in several]
    assert len({TableVersion("t", (file,)).digest for file in files}) == 3
