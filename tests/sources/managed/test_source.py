"""Managed tables as readers have them: versions by position on any host, caches that follow, what a table may turn into."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import OptionError, SchemaError, VersionGoneError
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.storage.stores import FileVersion
from pyspark_lookup.versions.model import Table, TableVersion, VersionMetadata
from tests.support.fakes import CACHES, Host, make_host
from tests.support.managed_tables import Site
from tests.support.version_tokens import Process

PARTIAL, FULL = CACHES["PARTIAL"], CACHES["FULL"]


def rows(ids: range | list[int], version: int = 1) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "version": pa.array([version] * len(ids), pa.int64())})


class Dim:
    """A managed table and a host that writes it."""

    def __init__(self, tmp_path: Path) -> None:
        self.path, self._cache = tmp_path / "dim", tmp_path / "cache"
        self.writer = self.table("writer", {"lookup.keys": "id"})

    def table(self, host: str, options: dict[str, str] | None = None) -> LookupTable:
        return LookupTable(str(self.path), {"lookup.cache.dir": str(self._cache / host), **(options or {})})

    def discover(self) -> tuple[Host, Table, TableVersion, VersionMetadata]:
        """A host that has read the table's log, and what it knows."""
        host = make_host(str(self.path), self._cache / "host")
        table, version = host.resolver.discover(parse_options({"path": str(self.path)}))
        return host, table, version, version.metadata


@pytest.fixture
def dim(tmp_path: Path) -> Dim:
    """A table with the rows 0 to 99 of version 1."""
    result = Dim(tmp_path)
    result.writer.write(rows(range(100)))
    return result


def test_a_host_never_goes_back(dim: Dim) -> None:
    """A resolution that was slow to be recorded does not replace that of a later position. A version without write ids is an error."""
    host, table, old, _ = dim.discover()
    dim.writer.write(rows([100], 2))
    new = host.resolver.current_versions.ask(table)
    assert host.resolver.host.learn(table, old, host.clock.steady_s + 1000) == new
    assert host.resolver.host.last(table)["digest"] == new.digest
    with pytest.raises(ValueError, match="is no longer a table of the kind MANAGED"):
        host.reader.versions.schema(table, TableVersion(table.id, new.files))


def test_a_commit_that_a_slow_resolution_cannot_know(dim: Dim, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host goes on reading what it has committed; a floor that a commit raises is not taken away by who finds an older one obsolete."""
    host, table, old, log = dim.discover()
    versions, began_s = host.resolver.host, host.clock.steady_s
    host.clock.tick(1)
    versions.raise_floor(table, log.table_id, log.position + 3)
    assert versions.learn(table, old, began_s) == old
    assert versions.floor(table.url) == (log.table_id, log.position + 3)
    host.clock.tick(1)
    assert versions.learn(table, old, host.clock.steady_s) == old
    assert versions.floor(table.url) is None  # the log was asked later, and has no such commit
    versions.raise_floor(table, "0" * 32, 7)
    judge, raised = versions._is_obsolete, []

    def judged(url: str, floor: Any, started_s: float) -> bool:
        obsolete = judge(url, floor, started_s)
        if not raised:
            raised.append(True)
            versions.raise_floor(table, log.table_id, log.position)
        return obsolete

    monkeypatch.setattr(versions, "_is_obsolete", judged)
    host.clock.tick(1)
    versions.learn(table, old, host.clock.steady_s)
    assert versions.floor(table.url) == (log.table_id, log.position)


def test_a_newer_version_whose_files_nobody_knows(dim: Dim, tmp_path: Path) -> None:
    """A slow resolution gives the newer version up for an older one only once the store, asked again, says the same."""
    slow, fast = (make_host(str(dim.path), tmp_path / "host") for _ in range(2))
    options = parse_options({"path": str(dim.path)})
    table, old = slow.resolver.discover(options)
    get_meta = slow.store._inner.get_meta
    interleaved: list[TableVersion] = []

    def interleave(path: str, count: Callable[[str], None]) -> FileVersion:
        try:
            return get_meta(path, count)
        finally:
            if not interleaved:  # the log ended here …
                dim.writer.write(rows([100], 2))
                interleaved.append(fast.resolver.current_versions.ask(table))
                slow.disk.remove_record("files", interleaved[0].digest)  # … and its successor was lost again

    slow.store._inner.get_meta = interleave  # type: ignore[method-assign,assignment]
    assert slow.resolver.current_versions.ask(table) == interleaved[0] != old


def test_a_list_of_write_ids_keeps_its_definition(site: Site) -> None:
    """The rows of a list have the columns and keys they had, whatever the table is altered to; the list's digest stays, too."""
    table = site.created()
    table.write(pa.table({"id": [1], "name": ["a"]}))
    lists = [str(table.valid_write_ids)]
    for change in ({"columns": pa.schema([("more", pa.int64())])}, {"keys": ["name"]}):
        table.alter(**change)
        lists.append(str(table.valid_write_ids))

    def read(host: str) -> list[tuple[Any, ...]]:
        readers = [site.table({"lookup.valid-write-ids": text}, host) for text in lists]
        return [(tuple(table.schema.names), table.keys, table.version, table.scan().num_rows) for table in readers]

    first, wider = ("id", "name"), ("id", "name", "more")
    before = read("a")
    assert [facts[:2] for facts in before] == [(first, ("id",)), (wider, ("id",)), (wider, ("name",))]
    assert before[-1][2] == table.version
    table.write(pa.table({"id": [2], "name": ["b"], "more": [3]}))
    table.alter(keys=["id"])
    assert read("late") == before
    row = [{"id": 1, "name": "a", "more": None}]
    assert site.table({"lookup.valid-write-ids": lists[2]}).get("a") == table.get("a", valid_write_ids=lists[2]) == row
    for options in ({"lookup.version": "99"}, {"lookup.valid-write-ids": lists[2].replace(":3:", ":9:")}):
        with pytest.raises(VersionGoneError):
            site.table(options).scan()


def test_a_full_cache_fetches_what_a_commit_added(dim: Dim) -> None:
    """Only an append's own file is fetched, and nothing for an event that changes no rows; a deleted row is not found in the base."""
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
    dim.writer.delete(pa.table({"id": [8]}))
    assert reader.get(8) == []
    assert reader.get_many([8]).num_rows == 0
    assert len(reader.get(9)) == 1


def test_a_snapshot_of_an_older_version_has_rows_deleted_later(dim: Dim, tmp_path: Path) -> None:
    """A host that has a newer version's rows fetches those that they lack when a query asks for an older version."""
    options = {"lookup.keys": "id", **FULL}
    first_host, second_host = (Process(dim.path, tmp_path / host, options) for host in ("one", "two"))
    first = first_host.announce()
    dim.writer.delete(pa.table({"id": [5]}))
    second = second_host.announce()
    for token, count in ((first, 100), (second, 99)):
        table, version = second_host.receive(token)
        full = second_host.host.reader.fulls.get_cache(table, second_host.options)
        assert full.build(version, 10.0).rows == count


def test_columns_keys_and_properties_can_be_altered(dim: Dim, tmp_path: Path) -> None:
    """An alter event adds columns, changes the keys and sets properties; one that changes nothing, or cannot be, is not put."""
    assert dim.table("reader", FULL).get(1) == [{"id": 1, "version": 1}]
    note = pa.schema([("note", pa.string())])
    position = dim.writer.alter(note, ["version"], {"owner.token": "us"})
    assert dim.writer.alter(note, ["version"], {"owner.token": "us"}) == position
    assert dim.table("reader").scan(predicate="id = 1").to_pylist() == [{"id": 1, "version": 1, "note": None}]
    for columns, keys, says in (
        (pa.schema([("note", pa.int64())]), None, "note"),
        (None, ["nothing"], r"^file:\S+: argument keys: the table has no column 'nothing'"),
        (None, ["id", "ID"], r"^file:\S+: argument keys = \['id', 'ID'\] names a column twice"),
    ):
        with pytest.raises(SchemaError, match=says):
            dim.writer.alter(columns, keys)
    for name, value in (("write.vacuum-after", "6 d"), ("log.retention", "soon"), ("log.kept", "1 d")):
        with pytest.raises(OptionError, match=f"lookup.{name}.*(7 d or more|unknown|a duration)"):
            dim.writer.alter(properties={f"lookup.{name}": value})
    reader = dim.table("reader", FULL)
    assert len(reader.get(1)) == 100
    description = reader.describe()
    assert (description["keys"], description["properties"], description["position"]) == (
        ["version"],
        {"owner.token": "us"},
        position,
    )
    assert (description["kind"], description["valid_write_ids"]) == (
        "MANAGED",
        f"{description['table_id']}:2:9223372036854775807::",
    )
    assert str(dim.writer.valid_write_ids) == description["valid_write_ids"]
    assert (dim.writer.floor, reader.floor) == (f"{description['table_id']}:{position}", None)


def test_a_copy_in_another_store_is_read(dim: Dim) -> None:
    """A store that is not written to is read: a managed table copied there is one."""
    dim.writer.write(rows([100], 2))
    memory = fsspec.filesystem("memory")
    memory.put(str(dim.path), "/copied/dim", recursive=True)
    try:
        for options in CACHES.values():
            copy = LookupTable("memory://copied/dim", {"lookup.cache.dir": str(dim.path) + "-cache", **options})
            assert copy.scan().num_rows == 101
            assert copy.get(100) == [{"id": 100, "version": 2}]
    finally:
        memory.rm("/copied", recursive=True)
