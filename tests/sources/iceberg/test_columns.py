"""The files of a large Iceberg table as columns, beside what `test_large_tables` says: each file is what it is alone, and so are its deletes."""

import datetime
import errno
import itertools
import random
import zoneinfo
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.compute as pc
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.columnar.predicate import And, ColumnStats, Compare, In, IsNull, Or, Predicate, may_match
from pyspark_lookup.errors import CacheFullError
from pyspark_lookup.lookup import lookup_table as api
from pyspark_lookup.sources.iceberg import entry_columns, snapshots
from pyspark_lookup.sources.iceberg.source import IcebergSource
from pyspark_lookup.storage.disk import Disk, SegmentWriter
from pyspark_lookup.storage.stores import FileVersion
from pyspark_lookup.versions.file_columns import ColumnFiles
from pyspark_lookup.versions.model import TableVersion, differing_files, partition_value
from tests.models.adapter import Ground
from tests.models.histories import ICEBERG, Setup, Step
from tests.models.iceberg import Iceberg
from tests.support.disks import flipped
from tests.support.fakes import wait_until_settled
from tests.support.fuzzing import BY_NIGHT, by_day, seeds
from tests.support.iceberg_manifests import File
from tests.support.iceberg_writing import IcebergTable
from tests.support.lake_tables import opened
from tests.support.large_lakes import LargeIceberg, read_live_rows, row, scan_rows, snapshot_files
from tests.support.large_tables import check_record

Begin = Callable[[int], None]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, restart: Callable[[], None], mapped_from: int) -> Begin:
    """Begins another process, in which tables have their files as columns from `count` files on."""

    def begin(count: int = 10) -> None:
        monkeypatch.setattr(IcebergSource, "mapped_from", count)
        restart()

    begin()
    return begin


def follow_versions(reader: LookupTable) -> Callable[[], TableVersion]:
    """The current version, as the process of now knows it, also when another one has begun."""
    engine = reader._engine()
    return lambda: engine.reader.resolver.discover(reader._options)[1]


# One time zone, as columns and as objects spell it.
_ZONE, _UTC = repr(zoneinfo.ZoneInfo("UTC")), repr(datetime.timezone.utc)


def describe(file: FileVersion) -> dict[str, Any]:
    """All that a version says of a file. A version on record leaves out the sequence numbers that no equality deletes need."""
    assert file.statistics is not None
    sequence = file.sequence if file.equality else 0
    return {
        "file": (file.url, file.size, file.identity, file.partition, file.columns, file.format, sequence),
        "deletes": [deletes.to_json() for deletes in file.deletes],
        "equality": [(group.names, [deletes.to_json() for deletes in group.files]) for group in file.equality],
        "rows": file.statistics.rows,
        "bounds": {name: repr(stats).replace(_ZONE, _UTC) for name, stats in dict(file.statistics.bounds).items()},
    }


def compare(actual: TableVersion, alone: TableVersion) -> None:
    """Check that both versions have the same files, described in the same words."""
    assert actual.metadata == alone.metadata
    by_url = lambda description: (description["file"][0], description["file"][2])  # noqa: E731
    assert sorted(map(describe, actual.files), key=by_url) == sorted(map(describe, alone.files), key=by_url)
    assert {group.names for group in actual.equality} == {group.names for group in alone.equality}
    assert {deletes.name for deletes in actual.deletes} == {deletes.name for deletes in alone.deletes}
    assert (actual.bytes, actual.cacheable, actual.is_settled) == (alone.bytes, alone.cacheable, alone.is_settled)


def make_predicates(table: Iceberg, rng: random.Random) -> list[Predicate]:
    """Some conditions on values that the table may have."""
    predicates: list[Predicate] = []
    for field in table.table.fields:
        if isinstance(field["type"], dict):
            continue
        name = field["name"]
        values = [value for value in (table.value(field) for _ in range(3)) if value is not None]
        values = [str(value) if field["type"] == "uuid" else value for value in values]
        for value in values:
            predicates.append(Compare(name, rng.choice(["=", "<", ">=", "<>"]), value))
        predicates += [In(name, tuple(values), rng.random() < 0.2), IsNull(name, rng.random() < 0.5)]
    sample = rng.sample(predicates, min(len(predicates), 12))
    return [*sample, And((sample[0], sample[-1])), Or((sample[1], sample[-2]))]


def check_pruning(version: TableVersion, nodes: Sequence[Predicate]) -> None:
    """Check that of many files those are ruled out that are ruled out alone."""
    assert isinstance(version.files, ColumnFiles) and version.metadata is not None
    _, partitions = version.metadata.columns
    for node in nodes:
        urls = [file.url for file in version.files.prune(node, partitions, partition_value)]

        def stats(file: FileVersion, name: str) -> ColumnStats | None:
            if name in partitions.names:
                text = dict(file.partition or ())[name]
                return ColumnStats.from_constant(partition_value(text, partitions.field(name).type))
            return None if file.statistics is None else file.statistics.bounds.get(name)

        expected = [
            file.url
            for file in version.files
            if may_match(node, lambda name, file=file: stats(file, name))  # type: ignore[misc]
        ]
        assert urls == expected, node


STEPS = [op for op in ICEBERG if op != "write_branch"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(2))
def test_any_history(tmp_path: Path, process: Begin, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step, in a process that goes on and in a new one, the columns say what objects say; and how two versions differ."""
    rng = random.Random(seed)
    monkeypatch.setattr(snapshots, "_TAIL_AT_MOST", rng.choice([2, 6, 128]))
    monkeypatch.setattr(entry_columns, "_PARTS_AT_MOST", rng.choice([2, 16]))
    monkeypatch.setattr(entry_columns, "_GROUP_ROWS", 2)
    monkeypatch.setattr(entry_columns, "_CHUNK_ROWS", rng.choice([3, 16384]))
    monkeypatch.setattr(entry_columns, "_BUFFERED_ENTRIES", rng.choice([1, 1024]))
    count = rng.choice([1, 4])
    table = Iceberg(Ground(tmp_path, Setup()), rng)
    name, options = getattr(table, "name", str(tmp_path / "dim.parquet")), getattr(table, "options", {})

    def reader(host: str) -> LookupTable:
        return LookupTable(name, {"lookup.cache.dir": str(tmp_path / host), "lookup.keys": "id", **options})

    try:
        process(count)
        goes_on = follow_versions(reader("columns"))
        earlier: list[tuple[TableVersion, TableVersion]] = []
        for number in range(14 if BY_NIGHT else 6):
            table.take(Step(rng.choice(STEPS), (), seed), rng)
            process(10**9)
            alone = follow_versions(reader(f"objects{number}"))()
            process(count)
            for version in (goes_on(), follow_versions(reader("columns"))()):
                compare(version, alone)
                check_record(version)
                assert isinstance(version.files, ColumnFiles) or len(version.files) < count
            if isinstance(version.files, ColumnFiles):
                check_pruning(version, make_predicates(table, rng))
                earlier.append((version, alone))
                old, old_alone = rng.choice(earlier)
                for start, end in ((version, old), (old, version)):
                    changes = differing_files(start, end)
                    expected = differing_files(*((alone, old_alone) if start is version else (old_alone, alone)))
                    assert changes is not None and expected is not None
                    assert [files.keys() for files in changes] == [files.keys() for files in expected]
        assert earlier or count > 1
    finally:
        table.close()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("count", [1, 1000], ids=["columns", "objects"])
def test_a_file_that_is_named_twice(tmp_path: Path, process: Begin, count: int, version: int) -> None:
    """A file that a snapshot lists twice has its rows twice, without a cache, in a full cache and after each change. An equality delete deletes both."""
    process(count)
    table = IcebergTable.create(tmp_path / "t", {"id": "int", "name": "string"}, version=version)
    twice = table.data([{"id": 5, "name": "twice"}])
    table.commit([*table.data([{"id": 6, "name": "once"}]), *twice, *twice])
    readers = [opened(tmp_path / "t", tmp_path / mode, mode, "id") for mode in ("none", "full")]
    counts = [2, 2, 2, 2, 2, *([0] if version > 1 else [])]
    for number, expected in enumerate(counts):
        wait_until_settled(tmp_path / "t" / "metadata" / "version-hint.text")
        for reader in readers:
            assert (len(reader.get(5)), reader.scan().num_rows) == (expected, 1 + expected + number)
        add = table.data([{"id": 100 + number, "name": "later"}])
        table.commit([*add, *([table.equality([{"id": 5}], ["id"])] if number == 4 and version > 1 else ())])
    assert readers[1].metrics()["numLoadFailures"] == 0


@pytest.mark.parametrize("count", [1, 1000], ids=["columns", "objects"])
def test_a_record_has_deletes_of_all_kinds(tmp_path: Path, process: Begin, count: int) -> None:
    """The record of a version has the position deletes, vectors and equality deletes that apply to each file, and its sequence number."""
    process(count)
    columns = {"id": "int", "region": "string"}
    table = IcebergTable.create(tmp_path / "t", columns, spec=[("region", "identity")], version=3)
    files = [table.data([{"id": id_, "region": region} for id_ in range(3)]) for region in ("eu", "us", "eu")]
    table.commit([file for some in files for file in some])
    version = follow_versions(opened(tmp_path / "t", tmp_path / "cache"))
    assert isinstance(version().files, ColumnFiles) is (count == 1)
    table.commit([table.positions([(files[0][0], 1), (files[2][0], 2)])])
    table.commit(
        [
            *table.vectors([(files[1][0], [0])]),
            table.equality([{"id": 0}], ["id"], partition=table.make_partition({"region": "eu"})),
        ]
    )
    wait_until_settled(tmp_path / "t" / "metadata" / "version-hint.text")
    current = version()
    assert sorted((len(file.deletes), len(file.equality)) for file in current.files) == [(1, 0), (1, 1), (1, 1)]
    check_record(current)


def test_many_deletes_of_several_files(tmp_path: Path, process: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which files position deletes may name is what it is for each file alone, and the locations of all files are parsed once."""
    process(1)
    extract_regex, rng = pc.extract_regex, random.Random(7)
    calls: list[Any] = []
    monkeypatch.setattr(pc, "extract_regex", lambda *args: calls.append(args) or extract_regex(*args))
    table = IcebergTable.create(tmp_path / "t", {"id": "int", "region": "string"}, spec=[("region", "identity")])
    files = [file for region in ("eu", "us") for _ in range(8) for file in table.data([{"id": 1, "region": region}])]
    for file in files[::3]:
        file["file_path"] = file["file_path"].replace("file:///", "file:/")  # the same place, spelled in another way
    for added in (files[:6], files[6:12], files[12:]):
        pairs = [rng.sample(some, 2) for some in (files[:8], files[8:]) for _ in range(3)]
        bounds = rng.sample([1000, 1000, 1000, 12, None, None], len(pairs))
        deletes = [
            table.positions([(file, 0) for file in pair], bounds=n) for pair, n in zip(pairs, bounds, strict=True)
        ]
        table.commit([*added, *deletes[:5]])  # of earlier files, of these, and of later ones
    version = follow_versions(opened(tmp_path / "t", tmp_path / "cache"))()
    columns = version.files.columns  # type: ignore[union-attr]
    alone = [columns.file(row).deletes for row in range(len(columns.urls))]
    assert columns.has_deletes.tolist() == [bool(deletes) for deletes in alone]
    assert {deletes.name for deletes in version.deletes} == {deletes.name for some in alone for deletes in some}
    assert columns.row_names(np.arange(len(alone))).to_pylist() == [columns.name_rows(file) for file in version.files]
    assert 1 < len({*alone}) < len(alone) and len(calls) == 1


@pytest.fixture
def large(tmp_path: Path) -> LargeIceberg:
    return LargeIceberg(tmp_path)


def test_a_pinned_snapshot_has_its_own_columns(
    large: LargeIceberg, tmp_path: Path, process: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The columns of the current version stay as they are, whoever reads an earlier one."""
    monkeypatch.setattr(snapshots, "_TAIL_AT_MOST", 4)
    first, before = large.version(), large.rows()
    large.table.commit(rewrite=True)
    large.append(row(1000))
    earlier_files: set[str] = set()
    for _ in range(3):
        assert scan_rows(opened(large.path, tmp_path / "cache")) == large.rows()
        assert scan_rows(opened(large.path, tmp_path / "cache", version=first)) == before
        files = snapshot_files(tmp_path / "cache", "entries-")
        assert not earlier_files or files == earlier_files
        earlier_files = files
        process()
    assert len({name for name in earlier_files if "-" not in name.removeprefix("entries-")}) == 2


def test_records_have_no_secret(large: LargeIceberg, tmp_path: Path, process: Begin) -> None:
    """Of the table's properties, a record has the name mapping only."""
    large.table.meta["properties"] = {"password": "hidden-treasure"}
    large.append(row(1))
    assert opened(large.path, tmp_path / "cache").version
    records = [*(tmp_path / "cache").glob("**/records/definition/*")]
    assert records and b"schemas" in records[0].read_bytes()
    assert b"hidden-treasure" not in b"".join(path.read_bytes() for path in records)


COLUMNS = {"id": "int", "name": "string", "region": "string"}


@pytest.mark.parametrize(
    ("mode", "harm"),
    by_day(itertools.product(["none", "partial"], ["nothing", "removed", "damaged", "record", "full"]), 2),
)
def test_the_index_of_equality_deletes(
    tmp_path: Path, process: Begin, mode: str, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process maps it and opens no delete file, each commit extends it; if it is lost, the delete files are read again."""
    table = IcebergTable.create(tmp_path / "t", COLUMNS)
    table.commit(table.data([row(number) for number in range(100)]))
    rng = random.Random(0)
    deletes: list[Path] = []

    def upsert(count: int) -> None:
        for number in range(count):
            rows = [row(key, name=f"v{number}") for key in rng.sample(range(100), 3)]
            deleted = table.equality([{"id": record["id"]} for record in rows], ["id"])
            deletes.append(table.local(deleted["file_path"]))
            table.commit([deleted, *table.data(rows)])

    upsert(8)
    if harm == "full":
        monkeypatch.setattr(Disk, "create_segment", mock.Mock(side_effect=CacheFullError("no room")))
    for round_ in range(4 if BY_NIGHT else 2):
        reader, expected = opened(table.home, tmp_path / "cache", mode, "id"), read_live_rows(table)
        assert scan_rows(reader) == expected
        for key in rng.sample(range(100), 5):
            assert reader.get(key) == [record for record in expected if record["id"] == key]
        if harm == "nothing" and round_:
            wait_until_settled(table.home / "metadata" / "version-hint.text")
        parts = [*(tmp_path / "cache").glob("**/snapshots/*/part-*")]
        assert parts or harm == "full"
        indexes = {path.parent.name for path in parts}
        for path in parts:
            if harm == "removed":
                path.unlink()
            elif harm == "damaged":
                path.write_bytes(flipped(path.read_bytes(), 800))
        if harm == "record":
            for name in indexes:
                for path in (tmp_path / "cache").glob(f"**/records/log/{name}"):
                    path.write_bytes(path.read_bytes()[:-3])
        process()
        if harm == "nothing":
            for path in deletes:  # a new process does not look at them
                path.rename(path.with_suffix(".gone"))
            new_process = opened(table.home, tmp_path / "cache", mode, "id")
            assert scan_rows(new_process) == scan_rows(reader)
            for path in deletes:
                path.with_suffix(".gone").rename(path)
        upsert(rng.choice([1, 3]))
        assert len(parts) < 12


def test_an_older_snapshot_leaves_the_index_alone(tmp_path: Path, process: Begin) -> None:
    """A process that reads an older snapshot finds fewer deletes, and the newer processes still find theirs on record."""
    table = IcebergTable.create(tmp_path / "t", COLUMNS)
    table.commit(table.data([row(number) for number in range(30)]))
    snapshots_made = []
    for number in range(12):
        table.commit([table.equality([{"id": number}], ["id"])])
        snapshots_made.append(table.meta["current-snapshot-id"])
    assert opened(table.home, tmp_path / "cache", keys="id").scan().num_rows == 18
    before = snapshot_files(tmp_path / "cache", "part-")
    for _ in range(2):
        process()
        assert opened(table.home, tmp_path / "cache", keys="id", version=snapshots_made[8]).scan().num_rows == 21
        assert snapshot_files(tmp_path / "cache", "part-") == before
    assert opened(table.home, tmp_path / "cache", keys="id").scan().num_rows == 18


def test_indexes_that_two_processes_extend(tmp_path: Path, process: Begin) -> None:
    """Each goes on with the parts of the other, and a third finds all of them."""
    table = IcebergTable.create(tmp_path / "t", COLUMNS)
    table.commit(table.data([row(number) for number in range(30)]))
    for number in range(10):
        table.commit([table.equality([{"id": number}], ["id"])])
    engines = []
    for _ in range(2):
        process()
        reader = opened(table.home, tmp_path / "cache", keys="id")
        assert reader.get(1) == []
        engines.append((reader, api.runtime()))
    for number in range(10, 14):
        table.commit([table.equality([{"id": number}], ["id"])])
        for reader, runtime in engines if number % 2 else engines[::-1]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(api, "runtime", lambda runtime=runtime: runtime)
                assert (reader.get(number), len(reader.get(number + 1))) == ([], 1)
    process()
    for path in table.home.glob("data/*"):
        if path.name in {entry.file["file_path"].rpartition("/")[2] for entry in table.live() if entry.file["content"]}:
            path.unlink()
    new_process = opened(table.home, tmp_path / "cache", keys="id")
    assert [len(new_process.get(key)) for key in (0, 13, 14)] == [0, 0, 1]


def test_a_cache_directory_that_was_full(tmp_path: Path, process: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that were made while the disk had no room are written, with their statistics, as soon as there is room."""
    process(3)
    table = IcebergTable.create(tmp_path / "t", {"id": "int", "name": "string"})
    for number in range(5):
        table.commit(table.data([{"id": number, "name": "full"}]))
    reader = opened(tmp_path / "t", tmp_path / "cache", "none", "id")

    def refuse(*_: Any, **__: Any) -> SegmentWriter:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "create_segment", refuse)
        assert reader.scan().num_rows == 5
    for number in range(5, 12):
        table.commit(table.data([{"id": number, "name": "room"}]))
        wait_until_settled(tmp_path / "t" / "metadata" / "version-hint.text")
        assert (reader.scan().num_rows, len(reader.get(3))) == (number + 1, 1)


def test_deletes_that_are_added_again(tmp_path: Path, process: Begin) -> None:
    """A delete file that is added again deletes rows of the files since then, too."""
    process()
    table = IcebergTable.create(tmp_path / "t", {"id": "int", "name": "string"})
    rows = [{"id": number, "name": "first"} for number in range(4)]
    (first,) = table.data(rows)
    deletes = table.equality([{"id": 3}], ["id"])
    commits: list[tuple[list[File], list[int]]] = [
        ([first], [0, 1, 2, 3]),
        ([deletes, table.positions([(first, 1)])], [0, 2]),
        (table.data(rows[2:]), [0, 2, 2, 3]),
        ([deletes], [0, 2, 2]),
    ]
    readers = [opened(tmp_path / "t", tmp_path / mode, mode, "id") for mode in ("none", "partial", "full")]
    for files, ids in commits:
        table.commit(files)
        wait_until_settled(tmp_path / "t" / "metadata" / "version-hint.text")
        for reader in readers:
            assert sorted(reader.scan().column("id").to_pylist()) == ids
            assert [len(reader.get(number)) for number in range(4)] == [ids.count(number) for number in range(4)]


def test_a_file_that_is_named_twice_with_two_numbers(tmp_path: Path, process: Begin) -> None:
    """If a data file is added again while it is there, each reader applies the deletes of its path to both, also a full cache that knew one of them."""
    process()
    table = IcebergTable.create(tmp_path / "t", {"id": "int", "name": "string"})
    (file,) = table.data([{"id": number, "name": "row"} for number in range(4)])
    readers = [opened(tmp_path / "t", tmp_path / mode, mode, "id") for mode in ("none", "full")]
    for files, ids in (
        ([file], [0, 1, 2, 3]),
        ([table.positions([(file, 1)])], [0, 2, 3]),
        ([file], [0, 0, 2, 2, 3, 3]),
        ([table.positions([(file, 3)])], [0, 0, 2, 2]),
    ):
        table.commit(files)
        wait_until_settled(tmp_path / "t" / "metadata" / "version-hint.text")
        assert [sorted(reader.scan().column("id").to_pylist()) for reader in readers] == [ids] * 2
