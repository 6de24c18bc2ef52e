"""The files of a large directory as columns: nothing else about the table changes, whatever happens to it, and other processes map them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.columnar.predicate import Compare
from pyspark_lookup.errors import OptionError, PysparkLookupError
from pyspark_lookup.scan import footers
from pyspark_lookup.scan.formats.model import detect_format
from pyspark_lookup.scan.open_file import Slice
from pyspark_lookup.scan.table_scan import Scan
from pyspark_lookup.sources.files.source import data_files
from pyspark_lookup.storage.stores import FileVersion, ListedFiles, Listing, open_store
from pyspark_lookup.versions import listed_columns
from pyspark_lookup.versions.file_columns import ColumnFiles
from pyspark_lookup.versions.listed_columns import (
    columns_of,
    lacks_states,
    lacks_urls,
    one_of_each_extension,
    to_column_files,
)
from pyspark_lookup.versions.model import Kind, TableVersion, partition_value
from tests.support.fakes import wait_until_settled
from tests.support.fuzzing import fuzzed
from tests.support.lake_tables import counting, opened
from tests.support.large_tables import Lose, check_record

FILES = 24


@pytest.fixture(autouse=True)
def columns_from_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few files are many, few changes make new columns, and few footers are read at once."""
    monkeypatch.setattr(ListedFiles, "least", 4)
    monkeypatch.setattr(listed_columns, "_ADDED_AT_MOST", 2)
    monkeypatch.setattr(listed_columns, "_GONE_AT_MOST", 2)
    monkeypatch.setattr(footers, "_FEW", 0)
    monkeypatch.setattr(footers, "_AT_ONCE", 3)


def write_files(path: Path, *numbers: int, days: Sequence[str] = "1", value: int | None = None) -> Path:
    """Files of ten rows with ids of their own, in the directories of these days in turn; the last one's path."""
    targets = [path / f"day={days[number % len(days)]}" / f"f{number:03}.parquet" for number in numbers]
    for number, target in zip(numbers, targets, strict=True):
        ids = [*range(number * 10, number * 10 + 10)]
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": ids, "v": [number if value is None else value] * 10}), target)
    wait_until_settled(*targets)
    return targets[-1]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "t"
    write_files(path, *range(FILES), days=("1", "2", "%20x"))
    (path / "_SUCCESS").write_bytes(b"")
    return path


def expected(path: Path) -> dict[int, tuple[int, str]]:
    """id -> (v, day), read from the files as they are."""
    rows = {}
    for file in path.glob("day=*/*.parquet"):
        day = unquote(file.parent.name.partition("=")[2])
        for row in pq.ParquetFile(file).read().to_pylist():
            rows[row["id"]] = row["v"], day
    return rows


def index_rows(rows: pa.Table) -> dict[int, tuple[int, str]]:
    return {row["id"]: (row["v"], str(row["day"])) for row in rows.to_pylist()}


def segments(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("**/snapshots/*/*")}


@pytest.fixture
def opened_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are opened, in their order."""
    names: list[str] = []
    open_files = Scan._open

    def note(self: Scan, table: Any, pieces: Sequence[Slice], *more: Any) -> Any:
        names.extend(piece.file.url.rpartition("/")[2] for piece in pieces)
        return open_files(self, table, pieces, *more)

    monkeypatch.setattr(Scan, "_open", note)
    return names


def test_footers_are_read_once_per_host(
    table: Path, tmp_path: Path, restart: Callable[[], None], opened_files: list[str]
) -> None:
    """Later reads, also of other processes, open only the files that may have matching rows."""
    first = opened(table, tmp_path / "cache", keys="id")
    assert [row["v"] for row in first.get(15)] == [1]
    assert len(opened_files) == 2 * FILES + 1  # for the schema, for the statistics, for the rows
    restart()
    opened_files.clear()
    second = opened(table, tmp_path / "cache", keys="id")
    assert [row["v"] for row in second.get(25)] == [2]
    assert second.get(-1) == []
    assert index_rows(second.scan(predicate="id = 33")) == {33: (3, "1")}
    assert opened_files == ["f002.parquet", "f003.parquet"]
    write_files(table, FILES, days="3")
    opened_files.clear()
    assert [row["v"] for row in second.get(FILES * 10)] == [FILES]
    assert {*opened_files} == {f"f{FILES:03}.parquet"}


def test_a_version_is_mapped(table: Path, tmp_path: Path, restart: Callable[[], None]) -> None:
    """Another process lists the directory once, and needs nothing else. The version is the same as that of objects."""
    cache = tmp_path / "cache"
    version = opened(table, cache).version
    assert segments(cache) == {"files", "schemas-parquet"}
    restart()
    second = opened(table, cache)
    lists = 1 + len([*table.glob("day=*")])
    assert counting(second, lambda: second.version) == (0, lists, 0, 0)
    assert second.version == version
    assert segments(cache) == {"files", "schemas-parquet"}
    with mock.patch.object(ListedFiles, "least", 10**6):
        restart()
        assert opened(table, tmp_path / "another").version == version


def test_columns_whose_record_was_removed(table: Path, tmp_path: Path) -> None:
    """The record of columns is read once in a process, so it may be swept while they are in use. The next version that uses them has it again."""
    cache = tmp_path / "cache"
    reader = opened(table, cache)
    version = reader.version
    (record,) = cache.glob("**/records/listed/*")
    record.unlink()
    write_files(table, FILES)
    assert reader.version != version
    assert [*cache.glob("**/records/listed/*")] == [record]


def test_a_reload_makes_few_objects(
    table: Path, tmp_path: Path, restart: Callable[[], None], made_objects: list[str]
) -> None:
    """A full cache adds the rows of one more file without making an object for every file, in the same process and in a new one.

    Some become objects: the first of each directory, which names its partition, and those that are not yet in the columns.
    """
    reader = opened(table, tmp_path / "cache", "full", "id")
    for number in range(6):
        assert index_rows(reader.scan()) == expected(table)
        assert len({*made_objects}) <= (FILES if number == 0 else FILES // 2)
        engine = reader._engine()
        check_record(engine.reader.resolver.discover(reader._options)[1])
        write_files(table, FILES + number)
        if number % 2:
            restart()
            reader = opened(table, tmp_path / "cache", "full", "id")
        made_objects.clear()


def test_columns_that_are_lost(table: Path, tmp_path: Path, restart: Callable[[], None], lose: Lose) -> None:
    """Once the columns are lost, the store is asked, and footers are read again."""
    for number in range(3):
        reader = opened(table, tmp_path / "cache", keys="id")
        for key in (15, 16):
            assert reader.get(key)[0]["v"] == 1
        assert index_rows(reader.scan()) == expected(table)
        lose((tmp_path / "cache").glob("**/snapshots/*/*"))
        write_files(table, FILES + number)
        restart()


def test_partial_caches_keep_rows_of_unchanged_files(table: Path, tmp_path: Path, restart: Callable[[], None]) -> None:
    """Rows of files that have not changed stay cached, also for one partition only; a removed file's bounds are known from its footer."""
    for options in ({}, {"partition": "day=1"}):
        reader = opened(table, tmp_path / "cache", mode="partial", keys="id", **options)
        assert [[row["v"] for row in reader.get(key)] for key in (5, 35, 95)] == [[0], [3], [9]]
        write_files(table, 3, value=-3)
        for _ in range(2):
            before = reader.metrics()
            assert [[row["v"] for row in reader.get(key)] for key in (5, 35, 95)] == [[0], [-3], [9]]
            after = reader.metrics()
            assert after["hitCount"] - before["hitCount"] >= 2
            restart()
            reader = opened(table, tmp_path / "cache", mode="partial", keys="id", **options)
        write_files(table, 3)


def test_a_partition_column_gets_another_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is carried over when the type changes: the partition of a removed file has no value of the new type."""
    monkeypatch.setattr(footers, "_FEW", 64)
    write_files(tmp_path / "t", *range(6), days="1x")
    reader = opened(tmp_path / "t", tmp_path / "cache", mode="partial", keys="id")
    assert [row["day"] for key in (5, 15) for row in reader.get(key)] == ["1", "x"]
    for file in (tmp_path / "t" / "day=x").glob("*.parquet"):
        os.replace(file, tmp_path / "t" / "day=1" / file.name)
    wait_until_settled(*(tmp_path / "t").rglob("*.parquet"))
    assert [row["day"] for key in (5, 15) for row in reader.get(key)] == [1, 1]


@pytest.mark.parametrize("selected", ["max_pt()", "day=1", "day=2", "day=%20x", "day=none"])
def test_partitions_are_selected(table: Path, tmp_path: Path, selected: str) -> None:
    reader = opened(table, tmp_path / "cache", partition=selected)
    in_objects = opened(table, tmp_path / "another", partition=selected)
    rows, of_day = index_rows(reader.scan()), index_rows(reader.scan(predicate="day = '2'"))
    assert of_day == {key: row for key, row in rows.items() if row[1] == "2"}
    with mock.patch.object(ListedFiles, "least", 10**6):
        assert index_rows(in_objects.scan()) == rows


PARTS = st.sampled_from(["a", "k=1", "_k=1", "_x", ".x", "_SUCCESS", "b.parquet", "_temporary", "_spark_metadata", "ü"])


@fuzzed(200)
@given(
    names=st.lists(st.lists(PARTS, min_size=1, max_size=3), min_size=1, max_size=12),
    sizes=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    pattern=st.sampled_from(["", "file:///d/*", "file:///d/k=1/*", "file:///d/*/*.parquet"]),
)
def test_data_files_are_selected_as_from_objects(names: list[list[str]], sizes: list[int], pattern: str) -> None:
    urls = {"file:///d/" + "/".join(parts): size for parts, size in zip(names, sizes, strict=False)}
    files = tuple(FileVersion(url, size, "i", 1.0) for url, size in sorted(urls.items()))
    directories = frozenset(
        "/".join(parts[:depth]) for parts in names for depth in range(1, len(parts)) if "_temporary" not in parts
    )
    answers: list[object] = []
    for collection in (files, ListedFiles.from_files(files)):
        listing = Listing("file:///d", collection, directories)
        try:
            answers.append([*data_files(pattern or "file:///d", Kind.GLOB if pattern else Kind.DIRECTORY, listing)])
        except PysparkLookupError as problem:
            answers.append(str(problem))
    assert answers[0] == answers[1]


@fuzzed(200)
@given(
    states=st.lists(st.tuples(st.text("ab/%ü", max_size=3), st.integers(0, 3), st.sampled_from("xy")), max_size=9),
    other_states=st.lists(
        st.tuples(st.text("ab/%ü", max_size=3), st.integers(0, 3), st.sampled_from("xy")), max_size=9
    ),
)
def test_listings_compare_as_objects_do(
    states: list[tuple[str, int, str]], other_states: list[tuple[str, int, str]]
) -> None:
    files, other_files = (
        tuple(FileVersion(f"s3://b/{name}", *state) for name, *state in sorted({s[0]: s for s in drawn}.values()))
        for drawn in (states, other_states)
    )
    listed, other_listed = ListedFiles.from_files(files), ListedFiles.from_files(other_files)
    assert tuple(listed) == files
    assert TableVersion.digest_of_listing("t", listed) == TableVersion("t", files).digest
    places = {file: number for number, file in enumerate(files)}
    assert listed.find(other_listed).tolist() == [places.get(file, -1) for file in other_files]
    for lacks in (lacks_urls, lacks_states):
        assert lacks(listed, other_listed) == lacks(files, other_files)
    earlier = to_column_files(listed, "s3://b", None)
    assert isinstance(earlier, ColumnFiles)
    later = to_column_files(other_listed, "s3://b", columns_of(earlier))
    assert tuple(later) == other_files
    assert tuple(earlier.difference(later)) == tuple(file for file in files if file not in other_files)
    assert TableVersion("t", later).digest == TableVersion("t", other_files).digest


@pytest.mark.parametrize("names", ["a.parquet b.PARQUET", "a.csv.gz b.csv.bz2", "a.csv b", "a.gz c.csv.gz", "parquet a.parquet"])  # fmt: skip
def test_the_format_is_found_as_from_objects(names: str) -> None:
    files = tuple(FileVersion(f"s3://b/{name}", 1, "x") for name in names.split())
    answers: list[object] = []
    for collection in (files, to_column_files(ListedFiles.from_files(files), "s3://b", None)):
        try:
            answers.append(detect_format([file.url for file in one_of_each_extension(collection)]))
        except OptionError as problem:
            answers.append(str(problem))
    assert answers[0] == answers[1]


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    """Columns have only names that are UTF-8, so such a listing has objects."""
    write_files(tmp_path / "t", *range(6))
    os.rename(write_files(tmp_path / "t", 6), os.fsencode(tmp_path) + b"/t/day=1/caf\xe9.parquet")
    assert isinstance(open_store(str(tmp_path), {}).list_status(str(tmp_path / "t"), lambda kind: None).files, tuple)
    reader = opened(tmp_path / "t", tmp_path / "cache", keys="id")
    assert reader.get(65)[0]["v"] == 6


def test_values_of_partitions_that_are_not_selected() -> None:
    """A value that the type of the selected partitions does not have is not parsed."""
    urls = [f"s3://b/day={day}/f{number}.parquet" for day in ("1" + "0" * 20, "7") for number in range(4)]
    files = to_column_files(ListedFiles.from_files([FileVersion(url, 9, "e1") for url in urls]), "s3://b", None)
    assert isinstance(files, ColumnFiles)
    day = pa.schema({"day": pa.int32()})
    kept = files.take(np.arange(4, 8)).prune(Compare("day", "=", 7), day, partition_value)
    assert [file.url for file in kept] == urls[4:]
    with pytest.raises(ValueError):
        files.prune(Compare("day", "=", 7), day, partition_value)
