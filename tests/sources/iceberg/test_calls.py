"""What an Iceberg table costs at its catalog and its store: nothing new, a snapshot, deleted rows, rewritten files; and a host that comes late."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from pyspark_lookup import LookupTable
from pyspark_lookup.scan.table_scan import Scan
from pyspark_lookup.sources.iceberg.source import IcebergSource
from pyspark_lookup.storage.stores import EqualityGroup, local
from pyspark_lookup.storage.ufs import Ufs
from tests.support.fuzzing import by_day
from tests.support.iceberg_definition import in_catalog, sql_catalog
from tests.support.iceberg_manifests import Entry, File
from tests.support.iceberg_oracle import DATA
from tests.support.iceberg_writing import IcebergTable
from tests.support.lake_tables import MODES, counting, opened
from tests.support.rest_catalog import RestCatalog
from tests.support.s3server import Mirror, S3Server

COLUMNS = {"id": "int", "name": "string"}
FILES = 6


class Remote(Mirror):
    """An Iceberg table that is written on this disk, and lies there or on S3; users name it by its hint, or in a catalog here."""

    def __init__(self, home: Path, kind: str, server: S3Server | None, version: int = 2) -> None:
        super().__init__(home / "table", f"iceberg-{home.name}", server)
        self.cache, self.kind = home / "cache", kind
        self._closing = contextlib.ExitStack()
        self._catalog: dict[str, str] | None = None
        publish = None
        if kind == "sql":
            catalog, self._catalog = sql_catalog(home)
            self._closing.callback(catalog.close)
            publish = in_catalog(catalog, "ns.table")
        elif kind == "rest":
            self.rest_catalog = self._closing.enter_context(RestCatalog())
            self._catalog = {"type": "rest", "uri": self.rest_catalog.uri}
            publish = self.rest_catalog.publisher("ns.table")
        self.table = IcebergTable.create(self.local, COLUMNS, version, publish=publish, location=self.url)

    def close(self) -> None:
        self._closing.close()

    def write(self, rows: list[dict[str, Any]]) -> int:
        return self.commit(self.table.data(rows))

    def commit(self, *args: Any, **kwargs: Any) -> int:
        snapshot = self.table.commit(*args, **kwargs)
        self.send()
        return snapshot

    def data_files(self) -> list[Entry]:
        """The live data files, in the order in which they were added."""
        entries = [entry for entry in self.table.live() if entry.file["content"] == DATA]
        return sorted(entries, key=lambda entry: entry.sequence)

    def open(self, mode: str = "full", cache: Path | None = None, **options: str) -> LookupTable:
        name = self.url if self._catalog is None else "ns.table"
        return opened(name, cache or self.cache, mode, "id", self._catalog, **self.storage, **options)

    def calls(self, act: Callable[[], Any]) -> list[str]:
        """The calls that the catalog gets meanwhile."""
        if self.kind == "rest":
            before = len(self.rest_catalog.requests)
            act()
            return self.rest_catalog.requests[before:]
        statements: list[str] = []

        def note(_: Any, __: Any, statement: str, *___: Any) -> None:
            statements.append(statement)

        event.listen(Engine, "before_cursor_execute", note)
        try:
            act()
        finally:
            event.remove(Engine, "before_cursor_execute", note)
        return statements

    @property
    def pointer(self) -> tuple[int, int]:
        """(requests to the store, calls of the catalog) of a query while nothing is new."""
        return (1, 0) if self.kind == "hint" else (0, 1)


def _make(request: pytest.FixtureRequest, home: Path, version: int = 2) -> Remote:
    store, _, kind = request.param.partition("-")
    remote = Remote(home, kind, request.getfixturevalue("s3") if store == "s3" else None, version)
    request.addfinalizer(remote.close)
    for number in range(FILES):
        remote.write([{"id": number * 10 + place, "name": f"n{number}"} for place in range(10)])
    return remote


STORES = ["disk-hint", "disk-sql", "disk-rest", "s3-hint"]
# By day each of them in one mode.
EVERY = by_day([(store, [*MODES][(number + n) % 3]) for number, store in enumerate(STORES) for n in range(3)], 3)


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint can be told from its next state as soon as it is written: without it a look so soon after a commit reads it again."""
    monkeypatch.setattr(local, "LOCAL_GRANULE_S", 0.0)


@pytest.fixture(params=STORES)
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    return _make(request, tmp_path)


@pytest.fixture(params=by_day(["disk-sql", "s3-hint"], 2))
def remote_v3(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    """A table of format 3."""
    return _make(request, tmp_path, 3)


def costs(remote: Remote, table: LookupTable, act: Callable[[], Any]) -> tuple[int, int]:
    """(requests to the store, calls of the catalog)."""
    requests, calls = requests_and_calls(remote, table, act)
    return sum(requests), calls


def requests_and_calls(remote: Remote, table: LookupTable, act: Callable[[], Any]) -> tuple[list[int], int]:
    """([heads, lists, gets] of the store, calls of the catalog)."""
    counts: list[int] = []
    calls = remote.calls(lambda: counts.extend(counting(table, act)))
    return counts[:3], len(calls)


@pytest.mark.parametrize(("remote", "mode"), EVERY, indirect=["remote"])
def test_a_new_snapshot(remote: Remote, mode: str) -> None:
    """Nothing new costs one look at the pointer; of a new snapshot each new file of metadata and data is looked at and read once."""
    table = remote.open(mode)
    assert table.get_many([3, 44]).num_rows == 2
    for reader in (table, table, remote.open(mode)):
        assert costs(remote, reader, lambda reader=reader: reader.get_many([3, 44])) == remote.pointer  # type: ignore[misc]
    assert costs(remote, table, lambda: table.get(500))[1] == remote.pointer[1]
    remote.write([{"id": 100, "name": "new"}])
    (heads, lists, gets), calls = requests_and_calls(remote, table, lambda: table.get_many([3, 100]))
    assert calls == remote.pointer[1]
    # Looked at: the hint, the metadata, the list. Read: these, the manifest, and of the file its index and rows.
    looked = {"hint": 3, "sql": 2, "rest": 1}[remote.kind]
    assert (heads, lists) == (looked, 0)
    assert gets - looked in (2, 3)
    assert table.get(100) == [{"id": 100, "name": "new"}]
    assert costs(remote, table, lambda: table.get_many([3, 100])) == remote.pointer


def test_a_host_that_comes_late(remote: Remote, tmp_path: Path) -> None:
    """A late host reads the newest metadata, its list and the live manifests, whatever was before."""
    for path in remote.local.glob("metadata/v*.metadata.json"):
        if path != remote.table.metadata:
            path.unlink()
    new_host = remote.open("none", tmp_path / "late")
    (_, _, gets), calls = requests_and_calls(remote, new_host, lambda: new_host.get(3))
    assert new_host.scan().num_rows == FILES * 10
    read = {"hint": 2, "sql": 1, "rest": 0}[remote.kind] + 1 + FILES  # …, the list, the manifests
    assert gets - read in (1, 2)
    assert calls <= 5  # a REST catalog is asked for its configuration first; an SQL one opens its connection


@pytest.mark.parametrize("kind", ["equality", "positions", "vector"])
def test_full_deletes_without_data_files(remote_v3: Remote, kind: str) -> None:
    """100 deletes by value, by position or by vector are applied to what the snapshot has."""
    remote_v3.write([{"id": 1000 + number, "name": "many"} for number in range(500)])
    table = remote_v3.open()
    assert table.scan().num_rows == FILES * 10 + 500
    last = remote_v3.data_files()[-1].file
    ways: dict[str, Callable[[], list[File]]] = {
        "equality": lambda: [remote_v3.table.equality([{"id": 1000 + number} for number in range(100)], ["id"])],
        "positions": lambda: [remote_v3.table.positions([(last, number) for number in range(100)])],
        "vector": lambda: remote_v3.table.vectors([(last, range(100))]),
    }
    deletes = ways[kind]()
    for entry in remote_v3.data_files():  # a byte of those that are there now would be an error
        path = remote_v3.table.local(entry.file["file_path"])
        path.write_bytes(b"\0" * path.stat().st_size)
    remote_v3.send()
    remote_v3.commit(deletes)
    newest = sorted(remote_v3.local.glob("metadata/*"), key=lambda path: path.stat().st_mtime_ns)[-5:]
    metadata_bytes = sum(path.stat().st_size for path in newest)  # of metadata.json, the list and the manifests
    assert counting(table, table.scan)[3] <= deletes[0]["file_size_in_bytes"] + metadata_bytes
    assert sorted(table.scan().column("id").to_pylist()) == [*range(FILES * 10), *range(1100, 1500)]
    assert (table.get(1050), len(table.get(1100))) == ([], 1)


@pytest.mark.parametrize("kind", ["equality", "positions", "vector"])
def test_a_full_cache_applies_only_new_deletes(remote_v3: Remote, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload applies only the deletes since the last version. A rollback, also to a snapshot that was never loaded, brings rows back."""
    applied: list[list[str]] = []

    def read_deleted(self: Scan, table: Any, files: Any, read: Any = Scan.read_deleted) -> Any:
        applied.extend([deletes.name for deletes in file.deletes] for file in files)
        return read(self, table, files)

    def deleted_values(self: Scan, table: Any, group: EqualityGroup, read: Any = Scan.deleted_values) -> Any:
        applied.append([*group.names])
        return read(self, table, group)

    def deletes_of(key: int) -> list[File]:
        file = remote_v3.data_files()[key // 10].file
        if kind == "equality":
            return [remote_v3.table.equality([{"id": key}], ["id"])]
        return (
            [remote_v3.table.positions([(file, key % 10)])]
            if kind == "positions"
            else remote_v3.table.vectors([(file, [key % 10])])
        )

    monkeypatch.setattr(Scan, "read_deleted", read_deleted)
    monkeypatch.setattr(Scan, "deleted_values", deleted_values)
    table = remote_v3.open()
    rows = FILES * 10
    snapshots = []
    for deleted in (0, 2, 4):
        assert table.scan().num_rows == rows - deleted
        assert sum(map(len, applied)) == (2 if deleted else 0)  # there are none before the first commit
        applied.clear()
        snapshots.append(remote_v3.commit(deletes_of(11 * deleted)))
        remote_v3.commit(deletes_of(11 * deleted + 11))
    for deleted, snapshot in ((3, snapshots[1]), (1, snapshots[0]), (5, snapshots[2])):  # none of them was ever loaded
        remote_v3.table.set_current(snapshot)
        remote_v3.send()
        assert {*table.scan().column("id").to_pylist()} == {*range(rows)} - {11 * number for number in range(deleted)}


@pytest.mark.parametrize("mode", ["none", "partial"])
def test_each_delete_file_is_read_once(remote_v3: Remote, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host asks for all deletes by value at once, and for those of later commits only; another process of the host asks for none."""
    requested_urls: list[list[str]] = []
    read_many = Ufs.read_many

    def note(self: Ufs, requests: Any) -> Any:
        requested_urls.append([file.url for file, _ in requests])
        return read_many(self, requests)

    monkeypatch.setattr(Ufs, "read_many", note)
    deletes: list[File] = []

    def upsert(count: int) -> None:
        for number in range(count):
            rows = [{"id": number, "name": "upserted"}, {"id": 60 + number, "name": "new"}]
            deletes.append(remote_v3.table.equality(rows, ["id"]))
            remote_v3.commit([deletes[-1], *remote_v3.table.data(rows)])

    def rounds() -> list[int]:
        """The number of delete files in each of the last requests."""
        names = {file["file_path"].rpartition("/")[2] for file in deletes}
        counts = [sum(url.rpartition("/")[2] in names for url in urls) for urls in requested_urls]
        requested_urls.clear()
        return [count for count in counts if count]

    upsert(8)
    table = remote_v3.open(mode)
    assert table.get(3) == [{"id": 3, "name": "upserted"}]
    assert rounds() == [8]
    assert [len(table.get(number)) for number in (5, 30, 61)] == [1, 1, 1]
    assert rounds() == []
    upsert(2)
    assert table.get(1) == [{"id": 1, "name": "upserted"}]
    assert rounds() == [2]
    assert remote_v3.open(mode).get(2) == [{"id": 2, "name": "upserted"}]
    assert rounds() == []


def misses(table: LookupTable, keys: list[int]) -> int:
    before = table.metrics()["missCount"]
    table.get_many(keys)
    return int(table.metrics()["missCount"] - before)


def test_what_a_partial_cache_keeps(remote_v3: Remote) -> None:
    """Compactions and rewritten manifests evict nothing; new files and deletes evict what lies in their bounds, or those of their files."""
    table, keys = remote_v3.open("partial"), [3, 13, 23, 33, 43, 500]
    assert (misses(table, keys), misses(table, keys)) == (6, 0)
    remote_v3.commit(rewrite=True)  # new manifests, of the same files
    assert (misses(table, keys), misses(table, keys)) == (0, 0)
    for replaced in (remote_v3.data_files()[:2], remote_v3.data_files()[2:4]):  # two compactions between two queries
        rows = [row for entry in replaced for _, row in remote_v3.table.live_rows(entry)]
        remote_v3.commit(remote_v3.table.data(rows), replaced, "replace")
    assert (misses(table, keys), misses(table, keys)) == (0, 0)
    remote_v3.write([{"id": 20, "name": "a"}, {"id": 40, "name": "b"}])
    assert (misses(table, keys), misses(table, keys)) == (2, 0)  # 23 and 33 lie between them
    remote_v3.commit([remote_v3.table.equality([{"id": 1}, {"id": 15}], ["id"])])
    assert (misses(table, keys), misses(table, keys)) == (2, 0)  # 3 and 13
    assert (table.get(1), len(table.get(3))) == ([], 1)
    remote_v3.commit([remote_v3.table.equality([{"name": "n4"}], ["name"])])  # says nothing of keys
    assert table.get(43) == []
    misses(table, keys)
    (position,) = [
        (entry.file, at)
        for entry in remote_v3.data_files()
        for at, row in remote_v3.table.live_rows(entry)
        if row["id"] == 3
    ]
    remote_v3.commit([remote_v3.table.positions([position])])
    assert (0 < misses(table, keys) < 6, table.get(3)) == (True, [])


@pytest.mark.parametrize(("mode", "mapped_from"), [("partial", 250), ("partial", 1), ("full", 1)])
def test_deletes_that_outlive_a_compaction(
    remote_v3: Remote, mode: str, mapped_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delete by value may stay for another file when its rows are compacted away, and go with that file. The compaction evicts nothing that
    was cached under the delete, but what was cached before it is not what the compaction wrote."""
    monkeypatch.setattr(IcebergSource, "mapped_from", mapped_from)
    first, *others = remote_v3.data_files()
    remote_v3.commit([], others)
    early, late, watching = remote_v3.open(mode), remote_v3.open(mode, remote_v3.cache / "late"), remote_v3.open("none")
    assert len(early.get(3)) == 1
    remote_v3.write([{"id": 100, "name": "other"}])
    other = remote_v3.data_files()[-1]
    remote_v3.commit([remote_v3.table.equality([{"id": 3}], ["id"])])
    assert (late.get(3), len(late.get(1)), len(watching.get(1))) == ([], 1, 1)
    rows = [row for _, row in remote_v3.table.live_rows(first)]
    (file,) = remote_v3.table.data(rows)
    remote_v3.commit([file], [first], "replace")
    assert len(watching.get(1)) == 1
    path = remote_v3.table.local(file["file_path"])
    aside = path.rename(remote_v3.local.parent / "aside")
    remote_v3.send()
    assert (misses(late, [1, 3]), late.get(3), len(late.get(1))) == (0, [], 1)  # without the new file
    aside.rename(path)
    remote_v3.commit([], [other])  # and the delete, which applies to nothing any more
    assert (misses(late, [1]), len(watching.get(1))) == (0, 1)
    assert (early.get(3), len(early.get(1))) == ([], 1)
