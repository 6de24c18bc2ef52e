"""What a Delta table costs at the store: nothing new, a commit, deleted rows, rewritten files; and a host that has never seen it."""

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pyspark_lookup import LookupTable
from pyspark_lookup.scan.table_scan import Scan
from tests.support.delta_tables import give_vectors, replay_files, write_vector, write_vectors
from tests.support.fuzzing import by_day
from tests.support.lake_tables import MODES, counting
from tests.support.s3server import Mirror, S3Server


class Remote(Mirror):
    """A Delta table that is written on this disk, and lies there or on S3."""

    def __init__(self, home: Path, server: S3Server | None) -> None:
        super().__init__(home / "table", f"delta-{home.name}", server)
        self._home = home

    def open(self, mode: str = "full", host: str = "cache") -> LookupTable:
        options = {"lookup.cache.dir": str(self._home / host), "lookup.keys": "id", **MODES[mode]}
        return LookupTable(self.url, options | {f"lookup.{name}": text for name, text in self.storage.items()})

    def write(self, rows: dict[str, list[Any]], **settings: Any) -> None:
        write_deltalake(str(self.local), pa.table(rows), mode="append", **settings)
        self.send()


@pytest.fixture(params=by_day(["disk", "s3"], 2))
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    remote = Remote(tmp_path, request.getfixturevalue("s3") if request.param == "s3" else None)
    configuration = {"delta.enableDeletionVectors": "true"}
    for number in range(5):
        settings: dict[str, Any] = {"configuration": configuration} if not number else {}
        remote.write({"id": [*range(number * 10, number * 10 + 10)], "name": [f"n{number}"] * 10}, **settings)
    DeltaTable(str(remote.local)).create_checkpoint()
    remote.write({"id": [100], "name": ["last"]})
    return remote


def unchanged(remote: Remote) -> tuple[int, int, int]:
    """What proves that nothing is new: on S3 a listing, elsewhere a look at the last commit and at the one after it."""
    return (0, 1, 0) if remote.url.startswith("s3:") else (2, 0, 0)


@pytest.mark.parametrize(("remote", "mode"), by_day(itertools.product(["disk", "s3"], MODES), 2), indirect=["remote"])
def test_what_is_new(remote: Remote, mode: str) -> None:
    table = remote.open(mode)
    assert table.get_many([3, 100]).num_rows == 2
    assert counting(table, lambda: table.get_many([3, 100]))[:3] == unchanged(remote)
    fresh = remote.open(mode)  # of another query, of the same host
    assert counting(fresh, lambda: fresh.get_many([3]))[:3] == unchanged(remote)
    remote.write({"id": [200], "name": ["new"]})
    heads, lists, gets, _ = counting(table, lambda: table.get_many([3, 200]))
    assert (heads, lists) == ((3, 0) if unchanged(remote)[0] else (0, 1))
    # The commit, and the new file, whose footer may come with it.
    assert gets in (2, 3)
    assert table.get(200) == [{"id": 200, "name": "new"}]
    assert counting(table, lambda: table.get(200))[:3] == unchanged(remote)


def test_a_host_that_comes_late_starts_from_the_checkpoint(remote: Remote) -> None:
    """A late host reads the checkpoint and what follows it, and no other commit."""
    for number in range(5):
        (remote.local / "_delta_log" / f"{number:020}.json").write_text("not to be read")
    new_host = remote.open("none", "late")
    assert new_host.scan().num_rows == 51


def test_vectors_and_rewritten_files(remote: Remote) -> None:
    """Rows that a vector deletes are gone from a full cache without a byte of data files; a rewritten table is fetched once."""
    table = remote.open()
    assert table.scan().num_rows == 51
    # The names are random: the first file is that of the first commit.
    add = next(iter(replay_files(remote.local, 5).values()))
    version = give_vectors(remote.local, [add], [write_vector(remote.local, [0, 3], "i")])
    remote.send()
    _, _, gets, size = counting(table, table.scan)
    commit = (remote.local / "_delta_log" / f"{version:020}.json").stat().st_size
    assert (gets, size) == (1, commit)
    assert table.scan().num_rows == 49


def test_a_full_cache_reads_only_vectors_that_changed(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload reads only the vectors that changed. If a file gets a smaller vector, or none, the rows that are no longer deleted are back."""
    read_urls: list[str] = []

    def read_deleted(self: Scan, table: Any, files: Any, read: Any = Scan.read_deleted) -> Any:
        read_urls.extend(file.url for file in files if file.deletes)
        return read(self, table, files)

    def deleted_rows() -> set[int]:
        return {*range(50), 100} - {*table.scan().column("id").to_pylist()}

    monkeypatch.setattr(Scan, "read_deleted", read_deleted)
    table = remote.open()
    assert deleted_rows() == set()
    adds = [*replay_files(remote.local, 5).values()][:4]
    version = give_vectors(remote.local, adds, write_vectors(remote.local, [[0], [1], [2], [3]]))
    remote.send()
    assert (deleted_rows(), len(read_urls)) == ({0, 11, 22, 33}, 4)
    for positions, deleted in (([2, 5], {0, 11, 22, 25, 33}), ([5], {0, 11, 25, 33})):
        read_urls.clear()
        add = next(add for add in replay_files(remote.local, version).values() if add["path"] == adds[2]["path"])
        version = give_vectors(remote.local, [add], [write_vector(remote.local, positions, "u")])
        remote.send()
        assert (deleted_rows(), read_urls) == (deleted, [f"{remote.url}/{add['path']}"])
    DeltaTable(str(remote.local)).restore(5)
    remote.send()
    read_urls.clear()
    assert (deleted_rows(), read_urls) == (set(), [])


def test_vectors_that_share_a_file(remote: Remote) -> None:
    """Vectors in one file are one request, and each is that of its data file."""
    table = remote.open()
    assert table.scan().num_rows == 51
    adds = [*replay_files(remote.local, 5).values()][:3]
    give_vectors(remote.local, adds, write_vectors(remote.local, [[0], [1, 2], [3, 4, 5]]))
    remote.send()
    assert counting(table, table.scan)[2] == 2
    assert {*range(30)} - {*table.scan().column("id").to_pylist()} == {0, 11, 12, 23, 24, 25}


def test_what_an_updated_table_keeps(remote: Remote) -> None:
    """A partial cache keeps all keys over OPTIMIZE, those outside the rewritten files over UPDATE, and those outside a new file's bounds."""
    table = remote.open("partial")
    keys = [3, 13, 23, 33, 43, 100, 500]

    def misses() -> int:
        before = table.metrics()["missCount"]
        table.get_many(keys)
        return table.metrics()["missCount"] - before

    assert (misses(), misses()) == (7, 0)
    DeltaTable(str(remote.local)).update(predicate="id = 3", new_values={"name": "new"})
    remote.send()
    assert (misses(), misses()) == (1, 0)
    assert table.get(3) == [{"id": 3, "name": "new"}]
    DeltaTable(str(remote.local)).optimize.compact()
    remote.send()
    assert (misses(), misses()) == (0, 0)
    remote.write({"id": [20, 40], "name": ["a", "b"]})
    assert (misses(), misses()) == (2, 0)  # 23 and 33 lie between them


def test_a_full_cache_goes_on_while_it_adopts_an_optimized_table(remote: Remote) -> None:
    """OPTIMIZE changes no rows, so queries need not wait for its file, here one that cannot be read yet; later removes name it."""
    table = remote.open()
    rows = sorted(table.scan().to_pylist(), key=lambda row: row["id"])
    before = {*remote.local.glob("*.parquet")}
    DeltaTable(str(remote.local)).optimize.compact()
    (new_file,) = {*remote.local.glob("*.parquet")} - before
    aside = new_file.rename(remote.local.parent / "aside")
    remote.send()
    assert table.get(3) == [{"id": 3, "name": "n0"}]
    assert sorted(table.scan().to_pylist(), key=lambda row: row["id"]) == rows
    size = aside.rename(new_file).stat().st_size
    remote.send()
    assert counting(table, table.reload)[3] <= size
    add = next(iter(replay_files(remote.local, 6).values()))
    give_vectors(remote.local, [add], [write_vector(remote.local, range(5), "u")])
    remote.send()
    heads, lists, gets, _ = counting(table, lambda: table.get(3))
    assert (heads + lists, gets) == (sum(unchanged(remote)) + (not lists), 2)  # the commit, and the vector
    assert table.scan().num_rows == len(rows) - 5
