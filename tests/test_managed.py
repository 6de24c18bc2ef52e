"""Managed tables as readers have them: versions by position on any host, caches that follow, what a table may turn into."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import NotSupportedError, OptionError, SchemaError, VersionGoneError
from pyspark_lookup.io.disk import Disk
from pyspark_lookup.io.stores import FileVersion
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.table.model import TableVersion
from tests.fakes import make_host
from tests.test_version_token import Process
from tests.test_writing import INTERVAL, SCHEMA, TRIGGER, Site, site

__all__ = ["site"]

FULL = {"lookup.cache": "FULL"}
PARTIAL = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000"}
MODES = {"none": {}, "partial": PARTIAL, "full": FULL}
SOURCES = {"none": INTERVAL, "partial": INTERVAL, "full": TRIGGER}


def rows(ids: range | list[int], version: int = 1) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "version": pa.array([version] * len(ids), pa.int64())})


class Dim:
    """A managed table and a host that writes it."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "dim"
        self._cache = tmp_path / "cache"
        self.writer = self.table("writer", {"lookup.keys": "id"})

    def table(self, host: str, options: dict[str, str] | None = None) -> LookupTable:
        return LookupTable(str(self.path), {"lookup.cache.dir": str(self._cache / host), **(options or {})})

    def drop(self) -> None:
        shutil.rmtree(self.path)


@pytest.fixture
def dim(tmp_path: Path) -> Dim:
    """A table with the rows 0 to 99 of version 1."""
    made = Dim(tmp_path)
    made.writer.write(rows(range(100)))
    return made


# --- one version, on any host ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_another_host_finds_the_version_it_was_told(dim: Dim, tmp_path: Path, mode: str) -> None:
    """A host told of a version that is no longer the newest reads that one, by its position in the log."""
    options = {"lookup.keys": "id", **MODES[mode]}
    one, two = (Process(dim.path, tmp_path / host, options) for host in ("one", "two"))
    first = one.announce()
    dim.writer.write(rows([100], 2))
    dim.writer.write(rows([5], 3), "overwrite")
    assert one.states(first) == two.states(first) == {1}
    second = two.announce()
    assert one.states(second) == two.states(second) == {3}
    assert one.gone() + two.gone() == 0


def test_a_version_of_a_dropped_table_is_gone(dim: Dim, tmp_path: Path) -> None:
    """A host told of a version whose table was dropped and created anew fails, or takes the new one if it is to."""
    one, two = (Process(dim.path, tmp_path / host, {"lookup.keys": "id"}) for host in ("one", "two"))
    told = one.announce()
    dim.drop()
    for version in (8, 9):
        dim.writer.write(rows([1], version), "overwrite")
    with pytest.raises(VersionGoneError):
        two.told(told)
    newer = Process(dim.path, tmp_path / "three", {"lookup.keys": "id", "lookup.on-version-gone": "NEWER"})
    assert newer.states(told) == {9}


def test_a_table_is_not_read_without_a_list(dim: Dim, tmp_path: Path) -> None:
    """Inside, a version of a managed table that came without write ids is an error: no rows of it are read."""
    host = make_host(str(dim.path), tmp_path / "host")
    table, version = host.resolver.discover(LookupOptions.parse({"path": str(dim.path)}))
    assert host.reader.versions.schema(table, version)[0].names == ["id", "version"]
    with pytest.raises(ValueError, match="without its list of write ids"):
        host.reader.versions.schema(table, TableVersion(table.id, version.files))


def test_a_host_never_goes_back(dim: Dim, tmp_path: Path) -> None:
    """A resolution that was slow to be recorded does not replace that of a later position, though it began later."""
    host = make_host(str(dim.path), tmp_path / "host")
    options = LookupOptions.parse({"path": str(dim.path)})
    table, old = host.resolver.discover(options)
    dim.writer.write(rows([100], 2))
    new = host.resolver.ask(table)
    assert host.resolver.host.learned(table, old, host.clock.steady_s + 1000) == new
    last = host.resolver.host.last(table)
    assert last is not None
    assert last["digest"] == new.digest


def test_a_commit_that_a_slow_resolution_cannot_know(dim: Dim, tmp_path: Path) -> None:
    """What this host has committed it goes on reading, though one that began to ask before does not find it in the log."""
    host = make_host(str(dim.path), tmp_path / "host")
    table, old = host.resolver.discover(LookupOptions.parse({"path": str(dim.path)}))
    assert old.metadata is not None
    versions, began_s = host.resolver.host, host.clock.steady_s
    host.clock.tick(1)
    versions.raise_floor(table, old.metadata.table_id, old.metadata.position + 3)
    assert versions.learned(table, old, began_s) == old
    assert versions.floor(table.url) == (old.metadata.table_id, old.metadata.position + 3)
    host.clock.tick(1)
    assert versions.learned(table, old, host.clock.steady_s) == old
    assert versions.floor(table.url) is None  # the log was asked later, and has no such commit


def test_a_floor_that_is_raised_while_it_is_judged(dim: Dim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds the floor of a table that is gone does not take away the one that a commit raises meanwhile."""
    host = make_host(str(dim.path), tmp_path / "host")
    table, version = host.resolver.discover(LookupOptions.parse({"path": str(dim.path)}))
    assert version.metadata is not None
    versions, log = host.resolver.host, version.metadata
    versions.raise_floor(table, "0" * 32, 7)
    judge, raised = versions._is_obsolete, []

    def judged(url: str, floor: Any, started_s: float) -> bool:
        found = judge(url, floor, started_s)
        if not raised:
            raised.append(True)
            versions.raise_floor(table, log.table_id, log.position)
        return found

    monkeypatch.setattr(versions, "_is_obsolete", judged)
    host.clock.tick(1)
    versions.learned(table, version, host.clock.steady_s)
    assert versions.floor(table.url) == (log.table_id, log.position)


def test_a_floor_that_the_disk_does_not_take(dim: Dim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk the host forgets what it knew, and this process knows its commit: both ask the store."""
    host = make_host(str(dim.path), tmp_path / "host")
    table, version = host.resolver.discover(LookupOptions.parse({"path": str(dim.path)}))
    assert version.metadata is not None
    versions = host.resolver.host

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "replace_record", full)
        versions.raise_floor(table, version.metadata.table_id, version.metadata.position + 3)
    assert versions.last(table) is None
    assert versions.floor(table.url) == (version.metadata.table_id, version.metadata.position + 3)
    versions.raise_floor(table, version.metadata.table_id, version.metadata.position + 6)
    assert versions.floor(table.url) == (version.metadata.table_id, version.metadata.position + 6)


def test_a_row_of_records_that_has_no_end(dim: Dim, tmp_path: Path) -> None:
    """A name that no record follows: the answer is the store's, and costs no more than that."""
    host = make_host(str(dim.path), tmp_path / "host")
    table, version = host.resolver.discover(LookupOptions.parse({"path": str(dim.path)}))
    (row,) = (tmp_path / "host").glob("v1/records/table~*")
    (row / "ffffffffffffffff").write_bytes(b"noise")
    assert host.resolver.ask(table) == version
    assert host.metrics.snapshot()["cacheFailureCount"] > 0


def test_a_newer_version_whose_files_nobody_knows(dim: Dim, tmp_path: Path) -> None:
    """A slow resolution gives it up for an older one only once the store, asked again, says the same."""
    slow, fast = (make_host(str(dim.path), tmp_path / "host") for _ in range(2))
    options = LookupOptions.parse({"path": str(dim.path)})
    table, old = slow.resolver.discover(options)
    asked = slow.store._inner.get_meta
    interleaved: list[TableVersion] = []

    def interleave(path: str, count: Callable[[str], None]) -> FileVersion:
        try:
            return asked(path, count)
        finally:
            if not interleaved:  # the log ended here …
                dim.writer.write(rows([100], 2))
                interleaved.append(fast.resolver.ask(table))
                assert slow.disk is not None
                slow.disk.remove_record("files", interleaved[0].digest)  # … and its successor was lost again

    slow.store._inner.get_meta = interleave  # type: ignore[method-assign,assignment]
    assert slow.resolver.ask(table) == interleaved[0] != old


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", ["UFS", "CACHE"])
def test_a_restored_table_is_the_restored_one(site: Site, tmp_path: Path, mode: str, source: str) -> None:
    """A table that goes on from a copy gives its own rows, though other rows had the same write ids and positions here."""
    more = {**MODES[mode], **(SOURCES[mode] if source == "CACHE" else {})}
    backup = tmp_path / "backup"
    table = site.created({"lookup.write.compact-after": "0"})
    table.write(written(1, "both"))
    shutil.copytree(site.path, backup)
    for number in (2, 3):
        table.write(written(number, "first"))
    held = site.table(more)
    assert names(held) == {1: "both", 2: "first", 3: "first"}
    for commits in (0, 1, 2, 4):  # fewer, as many and more than there were
        shutil.rmtree(site.path)
        shutil.copytree(backup, site.path)
        for number in range(2, 2 + commits):
            table.upsert(written(number, f"{commits}"))
        site.clock.tick(61)
        expected = {1: "both", **dict.fromkeys(range(2, 2 + commits), f"{commits}")}
        for reader in (held, site.table(more)):
            if source == "CACHE" and mode == "full":
                reader.reload()
            assert names(reader) == expected
        site.restart()
        assert names(site.table(more)) == names(site.table(more, host=f"late-{commits}")) == expected


def test_two_copies_that_change_places(site: Site, tmp_path: Path) -> None:
    """Two live copies of a table, moved to each other's place: readers see the one that is there, by scan and by key."""
    other = tmp_path / "other"
    table = site.created()
    table.write(written(1, "both"))
    shutil.copytree(site.path, other)
    table.write(written(2, "one"))
    site.table({"path": str(other)}).write(written(2, "two"))
    readers = [site.table(mode) for mode in MODES.values()]
    for number in range(4):
        expected = {1: "both", 2: ("one", "two")[number % 2]}
        assert [names(reader) for reader in readers] == [expected] * len(readers)
        site.path.rename(tmp_path / "between")
        other.rename(site.path)
        (tmp_path / "between").rename(other)


def test_a_list_of_write_ids_keeps_its_definition(site: Site) -> None:
    """What a list lets through has the columns and keys it had, whatever the table is altered to; so has its digest."""
    table = site.created()
    table.write(written(1, "a"))
    wider, keyed = pa.schema([("more", pa.int64())]), ["name"]
    before = [str(table.valid_write_ids)]
    for change in ({"columns": wider}, {"keys": keyed}):
        table.alter(**change)
        before.append(str(table.valid_write_ids))
    pinned = [site.table({"lookup.valid-write-ids": text}) for text in before]
    found = [(reader.schema.names, reader.keys, reader.version) for reader in pinned]
    assert [found[:2] for found in found] == [
        (["id", "name"], ("id",)),
        (["id", "name", "more"], ("id",)),
        (["id", "name", "more"], ("name",)),
    ]
    assert found[-1][2] == table.version
    table.write(pa.table({"id": [2], "name": ["b"], "more": [3]}))
    table.alter(keys=["id"])
    later = [site.table({"lookup.valid-write-ids": text}, host="late") for text in before]
    assert [(reader.schema.names, reader.keys, reader.version) for reader in later] == found
    assert [reader.scan().num_rows for reader in later] == [1, 1, 1]
    assert later[2].get("a") == [{"id": 1, "name": "a", "more": None}]


def test_keys_that_are_named_twice(site: Site) -> None:
    """A key column in two spellings is refused, and nothing is committed."""
    table = site.created()
    position = table.describe()["position"]
    with pytest.raises(SchemaError, match="named twice"):
        table.alter(keys=["id", "ID"])
    assert table.describe()["position"] == position


def written(number: int, name: str) -> pa.Table:
    return pa.table({"id": [number], "name": [name]}, SCHEMA)


def names(table: LookupTable) -> dict[int, str]:
    """The table's rows, found alike by a scan and by key."""
    found = {row["id"]: row["name"] for row in table.scan().to_pylist()}
    by_key = {key: [row["name"] for row in table.get(key)] for key in (*found, 99)}
    assert by_key == {**{key: [name] for key, name in found.items()}, 99: []}
    return found


def test_planned_tasks_of_a_removed_file_fail(dim: Dim) -> None:
    """Files of a managed table are never replaced: one that is missing is an error, not another version."""
    table = dim.table("reader", {"lookup.version-at": "PLAN"})
    assert table.scan().num_rows == 100
    for file in dim.path.rglob("*.parquet"):
        file.unlink()
    with pytest.raises(VersionGoneError):
        dim.table("another").scan()


# --- caches follow the log -----------------------------------------------------------------------------


def test_a_full_cache_fetches_what_a_commit_added(dim: Dim) -> None:
    """An append becomes a delta: only its file is fetched; an event that changes no rows fetches nothing."""
    reader = dim.table("reader", FULL)
    assert len(reader.get(7)) == 1
    before = reader.metrics()
    dim.writer.write(rows([7, 200], 2))
    assert [row["version"] for row in reader.get(7)] == [1, 2]
    after = reader.metrics()
    added = sum(file.stat().st_size for file in dim.path.glob(f"write-{2:020d}/*"))
    events = sum((dim.path / "_lookup" / "log" / f"{n:020d}.json").stat().st_size for n in (5, 6, 7))
    assert after["ufsGetBytes"] - before["ufsGetBytes"] <= added + events
    dim.writer.alter(properties={"owner": "us"})
    loads = after["loadCount"]
    assert len(reader.get(200)) == 1
    assert reader.metrics()["loadCount"] - loads <= 1


def test_a_deleted_key_that_is_asked_for_alone(dim: Dim) -> None:
    """A snapshot whose base still has a deleted row does not find it, also where nothing else is asked for."""
    reader = dim.table("reader", FULL)
    assert len(reader.get(7)) == 1
    dim.writer.delete(pa.table({"id": [7]}))
    assert reader.get(7) == []
    assert len(reader.get(8)) == 1


def test_a_snapshot_of_an_older_version_has_the_rows_deleted_since(dim: Dim, tmp_path: Path) -> None:
    """A host that has a newer version's rows fetches those that they lack when a query asks for an older version."""
    options = {"lookup.keys": "id", **FULL}
    one, two = (Process(dim.path, tmp_path / host, options) for host in ("one", "two"))
    first = one.announce()
    dim.writer.delete(pa.table({"id": [5]}))
    second = two.announce()
    for token, count in ((first, 100), (second, 99)):
        table, version = two.told(token)
        full = two.host.reader.fulls.of(table, two.options)
        assert full is not None
        snapshot = full.build(version, 10.0)
        assert snapshot is not None
        assert snapshot.rows == count


@pytest.mark.parametrize("mode", MODES)
def test_uncommitted_rows_are_in_no_cache(dim: Dim, mode: str) -> None:
    """A write's files lie there, its events too, and no mode shows a row of it before the commit."""
    reader = dim.table("reader", MODES[mode])

    def peek(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert reader.get(300) == []
        assert reader.scan().num_rows == 100
        return batch

    new = rows([300], 2)
    batches = (peek(batch) for batch in new.to_batches())
    dim.writer.write(pa.RecordBatchReader.from_batches(new.schema, batches))
    assert [row["version"] for row in reader.get(300)] == [2]


# --- the definition ------------------------------------------------------------------------------------


def test_columns_keys_and_properties_can_be_altered(dim: Dim) -> None:
    """An alter event adds columns, changes the keys and sets properties; one that changes nothing is not put."""
    reader = dim.table("reader", FULL)
    assert reader.get(1) == [{"id": 1, "version": 1}]
    position = dim.writer.alter(pa.schema([("note", pa.string())]), ["version"], {"owner": "us"})
    assert dim.writer.alter(pa.schema([("note", pa.string())]), ["version"], {"owner": "us"}) == position
    assert dim.table("reader").scan(predicate="id = 1").to_pylist() == [{"id": 1, "version": 1, "note": None}]
    found = dim.table("reader", FULL)
    assert len(found.get(1)) == 100
    described = found.describe()
    assert (described["keys"], described["properties"], described["position"]) == (
        ["version"],
        {"owner": "us"},
        position,
    )
    with pytest.raises(SchemaError, match="note"):
        dim.writer.alter(pa.schema([("note", pa.int64())]))
    with pytest.raises(SchemaError, match="no column 'nothing'"):
        dim.writer.alter(keys=["nothing"])


def test_what_a_table_says_of_itself(dim: Dim, tmp_path: Path) -> None:
    """Its id, its list of write ids, the floor of this host; a table of plain files has none of them."""
    position = dim.writer.write(rows([100]))
    described = dim.writer.describe()
    assert described["kind"] == "MANAGED"
    assert described["keys"] == ["id"]
    assert str(dim.writer.valid_write_ids) == described["valid_write_ids"]
    assert described["valid_write_ids"] == f"{described['table_id']}:2:9223372036854775807::"
    assert dim.writer.floor == f"{described['table_id']}:{position}"
    assert dim.table("elsewhere").floor is None
    pq.write_table(rows(range(3)), tmp_path / "plain.parquet")
    plain = LookupTable(str(tmp_path / "plain.parquet"), {"lookup.cache.dir": str(tmp_path / "c")})
    with pytest.raises(NotSupportedError, match="write ids"):
        _ = plain.valid_write_ids
    with pytest.raises(OptionError, match=r"lookup.version = '3' is for managed tables"):
        LookupTable(str(tmp_path / "plain.parquet"), {"lookup.version": "3"}).scan()
    with pytest.raises(OptionError, match=r"'append', 'overwrite' or 'upsert'"):
        dim.writer.write(rows([1]), "merge")


def test_keys_of_the_log_are_the_tables(dim: Dim) -> None:
    """Lookups and the partial cache need no lookup.keys where the log has them, and are refused where nothing has."""
    assert dim.table("reader", PARTIAL).get(5) == [{"id": 5, "version": 1}]
    other = LookupTable(str(dim.path) + "-keyless", {"lookup.cache.dir": str(dim.path) + "-cache"})
    other.write(rows([1]))
    for options in ({}, PARTIAL):
        table = LookupTable(str(dim.path) + "-keyless", {"lookup.cache.dir": str(dim.path) + "-cache", **options})
        with pytest.raises(OptionError, match=r"lookup\.keys"):
            table.get(1)


# --- what else may lie there ---------------------------------------------------------------------------


def test_a_copy_in_another_store_is_read(dim: Dim) -> None:
    """A store that is not written to is read: a managed table copied there is one."""
    dim.writer.write(rows([100], 2))
    memory = fsspec.filesystem("memory")
    memory.put(str(dim.path), "/copied/dim", recursive=True)
    try:
        for options in MODES.values():
            copy = LookupTable("memory://copied/dim", {"lookup.cache.dir": str(dim.path) + "-cache", **options})
            assert copy.scan().num_rows == 101
            assert copy.get(100) == [{"id": 100, "version": 2}]
        with pytest.raises(NotSupportedError, match="memory"):
            LookupTable("memory://copied/dim").write(rows([1]))
    finally:
        memory.rm("/copied", recursive=True)
