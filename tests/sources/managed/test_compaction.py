"""Compactions and vacuums: what they fold and remove, what they leave alone, and what readers see of them."""

import dataclasses
import itertools
import logging
import shutil
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import errors
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.lookup.metadata_tables import ViewTask, view_batches
from pyspark_lookup.options.enums import View
from pyspark_lookup.sources.managed.conflicts import KeyedRows
from pyspark_lookup.sources.managed.data_files import Job
from pyspark_lookup.sources.managed.log import TableState, WriteMode
from pyspark_lookup.sources.managed.log.log import state_from_json, state_to_json
from pyspark_lookup.sources.managed.writer import TableWriter
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.versions.model import PATH
from tests.support.managed_tables import (
    DAY_S,
    MODES,
    OFF,
    SCHEMA,
    Site,
    aged,
    beside,
    list_ids,
    of_ids,
    rows,
    wide,
    write_ids,
)


def appended(site: Site, count: int) -> LookupTable:
    """A table of so many appends of ten rows each."""
    table = site.created(OFF)
    for number in range(count):
        table.write(of_ids(number * 10, number * 10 + 10))
    return table


def folds(state: TableState) -> list[int]:
    return [write.id for write in state.writes.values() if write.mode is WriteMode.COMPACT and write.committed]


@pytest.mark.parametrize("keys", ["id", None])
def test_many_small_files_become_one(site: Site, keys: str | None) -> None:
    """A compaction leaves one file in the order of the keys, with every row and no deleted one; a second one finds nothing to do."""
    table = site.table(OFF if keys is None else {**OFF, "lookup.keys": keys})
    for low in (200, 0, 100):
        table.write(of_ids(low, low + 100))
    before = table.scan().sort_by("id")
    position = table.compact()
    (file,) = site.committed()
    ids = pq.read_table(site.path / file).column("id").to_pylist()
    assert ids == (list(range(300)) if keys else [*range(200, 300), *range(200)])
    assert table.scan().sort_by("id") == before
    assert table.compact() == position == site.state().position
    assert table.describe()["version"] == table.version
    if keys:
        table.upsert(of_ids(10, 20, "new"))
        table.delete(pa.table({"id": range(50, 300)}))
        table.compact()
        (file,) = site.committed()
        assert pq.read_table(site.path / file).column("name").to_pylist() == ["a"] * 10 + ["new"] * 10 + ["a"] * 30
        assert list(site.state().deletes(site.state().valid_write_ids())) == []


def test_a_compaction_that_cannot_be_read_is_not_committed(site: Site) -> None:
    """A compaction reads its files before it commits: one that a store has damaged leaves the table as it was."""
    table = appended(site, 3)
    before = site.state().position

    def damage(*_: object) -> None:
        for path in site.path.rglob("compacted-*.parquet"):
            site.interrupt()
            with path.open("r+b") as file:
                file.seek(40)
                file.write(bytes(8))

    site.interrupt(damage)
    with pytest.raises(errors.DamagedFileError):
        table.compact()
    assert folds(site.state()) == []
    assert site.state().find_needed() == site.state().find_needed(before)
    assert list_ids(site.table(host="late").scan()) == list(range(30))


@pytest.mark.parametrize(
    ("keys", "size", "files"),
    [
        ({"id": [*range(500), *range(250, 748), None, None]}, 2000, 6),
        ({"k": [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, None, 1.5, 2.5] * 2}, 100, 1),
    ],
    ids=["many values", "floats"],
)
def test_rows_are_folded_in_parts(site: Site, keys: dict[str, list[Any]], size: int, files: int) -> None:
    """More than fits in memory is put in order part by part: no row is lost, also of nulls, NaN, infinities and zeros."""
    site.resize(merge_bytes=size, file_bytes=3 * size // 2, row_group_rows=(2, 20), row_group_bytes=size // 20)
    table = site.table({**OFF, "lookup.keys": ",".join(keys)})
    count = len(next(iter(keys.values())))
    whole = pa.table({**keys, "v": range(count)})
    for half in range(2):
        table.write(whole.slice(half * count // 2, count // 2))
    table.compact()
    assert len(site.committed()) >= files
    assert sorted(table.scan().column("v").to_pylist()) == list(range(count))
    if "id" in keys:
        lists = [pq.read_table(site.path / file).column("id").drop_null().to_pylist() for file in site.committed()]
        assert all(ids == sorted(ids) for ids in lists)
        assert all(lower[-1] <= upper[0] for lower, upper in itertools.pairwise(sorted(ids for ids in lists if ids)))


def test_writes_beside_a_compaction(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is appended, upserted and deleted while a compaction runs stays so, also for readers that have cached rows of before it."""
    table = appended(site, 2)
    readers = [site.table(mode, host) for mode in MODES.values() for host in ("b", "c")]
    keys = pa.table({"id": range(45)})
    for reader in readers[::2]:
        assert reader.get_many(keys).num_rows == 20

    def changes() -> None:
        table.upsert(rows(17, 30, name="new"))
        table.delete(pa.table({"id": [5, 30]}))  # which the upsert says nothing about, but for 30
        table.write(rows(40))

    beside(site, monkeypatch, changes)
    expected = [*range(5), *range(6, 20), 40]
    for folded in ([3], None):
        table.compact()
        assert folded is None or folds(site.state()) == folded
        for reader in readers:
            assert list_ids(reader.get_many(keys)) == list_ids(reader.scan()) == expected
            assert [row["name"] for row in reader.get(17)] == ["new"]
            assert reader.get(5) == reader.get(30) == []


def test_two_compactions_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """One compaction wins; the other finds its rows folded already, and then nothing to do."""
    table, second = appended(site, 3), site.table(OFF, host="b")
    beside(site, monkeypatch, second.compact)
    table.compact()
    assert len(folds(site.state())) == 1
    assert list_ids(table.scan()) == list(range(30))


def test_a_list_of_some_of_what_was_folded(site: Site) -> None:
    """A list of some writes is answered from their own files; where a delete came after the compaction it is refused, as nobody knows what that hides."""
    table = site.created(OFF)
    for id_ in (1, 2, 3):
        table.write(rows(id_))
    table.delete(pa.table({"id": [1]}))
    before = table.valid_write_ids
    table.compact()
    after = table.valid_write_ids
    without = [type(before)(after.table, after.high_watermark, open=[id_]) for id_ in (3, 4)]  # a write, and the delete
    for ids, expected in ((before, [2, 3]), (after, [2, 3]), (without[0], [2]), (without[1], [1, 2, 3])):
        assert list_ids(table.scan(valid_write_ids=ids)) == expected
    table.delete(pa.table({"id": [2]}))
    last = table.valid_write_ids
    assert [list_ids(table.scan(valid_write_ids=ids)) for ids in (after, last)] == [[2, 3], [3]]
    for id_ in range(1, 6):
        with pytest.raises(errors.VersionGoneError, match="deletes rows of files that a compaction has written"):
            table.scan(valid_write_ids=type(before)(last.table, last.high_watermark, open=[id_]))


def test_keys_that_were_changed(site: Site) -> None:
    """Upserts by key columns that are not the current ones are folded with all that they hide; alone they are refused by name."""
    table = site.created(OFF)
    table.write(wide(0, 500))
    table.upsert(rows(1, name="new"))
    table.upsert(rows(2, name="new"))
    table.alter(keys=["name"])
    site.resize(compact_bytes=20_000)
    with pytest.raises(errors.WriteConflictError, match=r"key columns have changed.*alter\(keys=…\), compact"):
        table.compact()
    table.alter(keys=["id"])
    table.compact()
    site.resize(compact_bytes=2**26)
    assert list_ids(table.scan()) == list(range(500))
    table.alter(keys=["name"])
    table.compact()
    assert list_ids(table.scan()) == list(range(500))
    assert len(site.committed()) == 1


def test_a_damaged_delete_file(site: Site) -> None:
    """Of many delete files, the one with a row that names no deleted row is named."""
    table = site.created(OFF)
    table.write(rows(1, 2, 3))
    for id_ in (1, 2, 3):
        table.delete(pa.table({"id": [id_]}))
    state, options = site.state(), parse_options(site.options("a", OFF))
    keyed_rows = site.runtime.engine(options).managed._parts(options)[2]
    files = list(state.deletes(state.valid_write_ids()))
    assert len(keyed_rows.read_delete_files(state.definition, files)) == 3
    damaged = site.path / files[1].path
    marks = pq.read_table(damaged)
    pq.write_table(marks.set_column(marks.schema.get_field_index(PATH), PATH, pa.nulls(1, pa.string())), damaged)
    files[1] = dataclasses.replace(files[1], size=damaged.stat().st_size)
    with pytest.raises(errors.DamagedFileError, match=rf"{files[1].path} is a damaged delete file"):
        keyed_rows.read_delete_files(state.definition, files)


def test_commits_compact(site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of lookup.write.compact-after small writes folds them; none before does; with 0 nobody does."""
    table = site.created({"lookup.write.compact-after": "5"})
    for id_ in range(4):
        table.upsert(rows(id_))
    assert folds(site.state()) == []
    table.upsert(rows(4))
    assert len(folds(site.state())) == 1
    table.delete(pa.table({"id": [0]}))
    for id_ in range(5, 15):
        table.write(rows(id_))
    count = len(folds(site.state()))
    assert 2 <= count <= 4
    for id_ in range(15, 21):
        site.table(OFF).write(rows(id_))
    assert len(folds(site.state())) == count
    # An error is logged, and the write is committed all the same.
    monkeypatch.setattr(KeyedRows, "count", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING):
        table.write(rows(21))
    assert "another commit will try again" in caplog.text
    assert list_ids(table.scan()) == list(range(1, 22))


def test_partial_keeps_its_keys(site: Site) -> None:
    """Keys that are cached stay so over a compaction, also of deltas that came after they were; changed ones do not."""
    table = site.created(OFF)
    table.write(wide(0, 2000))
    reader = site.table(MODES["partial"], host="b")
    keys = pa.table({"id": range(0, 2000, 100)})
    reader.get_many(keys)
    table.upsert(rows(7, 8, name="new"))
    reader.get_many(keys)
    table.upsert(rows(100, 101, name="new"))
    for small in (20_000, 2**26):  # the small writes, then all of it
        site.resize(compact_bytes=small)
        table.compact()
        misses = reader.metrics()["missCount"]
        answer = reader.get_many(keys)
        assert reader.metrics()["missCount"] - misses <= 1
        assert answer.column("name").to_pylist()[1] == "new"


def test_a_delete_between_the_start_and_the_reads_of_a_compaction(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compaction leaves out the deleted row, and the delete then applies to nothing: a partial cache that knew neither drops the row."""
    table, begin = appended(site, 2), TableWriter.begin
    pending = [lambda: table.delete(pa.table({"id": [3]}))]

    def begin_slowly(self: TableWriter, *args: Any) -> Job:
        job = begin(self, *args)
        if args[1] is WriteMode.COMPACT:
            pending.pop()()  # by a later write id, from the same process, whose log this is
        return job

    reader = site.table(MODES["partial"], host="b")
    assert [row["id"] for row in reader.get(3)] == [3]
    monkeypatch.setattr(TableWriter, "begin", begin_slowly)
    table.compact()
    assert list(site.state().deletes(site.state().valid_write_ids())) == []
    assert (reader.get(3), len(reader.get(13))) == ([], 1)


def test_vacuum_removes_what_no_version_needs(site: Site) -> None:
    """Files of replaced writes go after older_than, in the store's time; versions that need them, and were not current since, are gone."""
    table = site.created(OFF)
    first, second = table.write(rows(1)), table.write(rows(2), "overwrite")
    table.upsert(rows(2, 3, name="new"))
    assert table.vacuum() == {"files": 0, "bytes": 0, "oldest": None}
    aged(site, 10, but=second)  # the upsert came just now
    assert (table.vacuum()["oldest"], list_ids(site.table({"lookup.version": str(second)}).scan())) == (second, [2])
    message = r"version \d+ needs files of write 1, which were vacuumed"
    for mode in MODES.values():
        with pytest.raises(errors.VersionGoneError, match=message):
            site.table({**mode, "lookup.version": str(first)}, host="b").scan()
    compacted = table.compact()
    aged(site, 8)
    removed = table.vacuum()
    assert (removed["files"], removed["oldest"]) == (3, compacted)
    assert site.files() == site.committed()
    assert list_ids(table.scan()) == [2, 3]
    assert table.vacuum()["files"] == 0
    # What one vacuum has removed is gone for the answer of a gentler one, too; the versions view says what it does not know.
    last = table.write(rows(4), "overwrite")
    assert [table.vacuum("0 s", force=True)["oldest"], table.vacuum()["oldest"]] == [last] * 2
    options = parse_options({**site.options("a", {}), "lookup.view": "versions"})
    (batch,) = view_batches(site.runtime.engine(options), ViewTask(View.VERSIONS), options, bytes)
    added = {row["version"]: row["rows_added"] for row in batch.to_pylist()}
    assert (added[first], added[last]) == (None, 1)
    assert state_from_json(state_to_json(site.state()), "a copy").oldest == last


def test_a_table_that_sees_to_itself(site: Site) -> None:
    """Commits vacuum after `lookup.write.vacuum-after`, at most ten times in that time, and trim the log; a failure then fails no commit."""

    def fail(kind: str, _: object) -> None:
        if kind == "tree":
            raise errors.UfsUnavailableError("down")

    site.resize(log_page=4)
    table = site.created(OFF)
    table.alter(properties={"lookup.write.vacuum-after": "7 d", "lookup.log.retention": "0 s"})
    for number in range(5):
        last = table.write(rows(number), "overwrite")
        table.scan()
    aged(site, 6)
    site.clock.tick(400 * DAY_S)  # which is no matter: times are the store's
    assert (table.write(rows(8), "overwrite") > last, site.state().oldest) == (True, 1)
    site.clock.tick(-800 * DAY_S)
    aged(site, 2, but=last)
    table.write(rows(9), "overwrite")
    state = site.state()
    assert (state.oldest, len(site.files())) == (last, 3)
    assert len(list((site.path.parent / "cache/a/v1/blocks").glob("*/*"))) <= 3  # nor is what is gone kept here
    events = sorted(int(path.stem) for path in (site.path / "_lookup/log").iterdir())
    assert events == [1, *range(last // 4 * 4 + 1, state.position + 1)]
    for options in ({"lookup.version": "3"}, {"lookup.valid-write-ids": f"{state.table_id}:2:9223372036854775807::"}):
        for host in ("a", "b"):
            with pytest.raises(
                errors.VersionGoneError,
                match=rf"only versions from {last} on|needs files that were compacted or vacuumed",
            ):
                site.table(options, host).scan()
    log = site.runtime.engine(parse_options(site.options("a", {}))).managed.log(str(site.path))
    with pytest.raises(
        errors.VersionGoneError, match=f"lookup.stream.start = {last} the changes that the log still has"
    ):
        list(log.pages.changes(state, 2, state.position))
    aged(site, 0.6)
    assert table.write(rows(10), "overwrite") == site.state().position  # no vacuum follows
    aged(site, 0.2)
    site.interrupt(fail)
    table.write(rows(11), "overwrite")
    assert list_ids(table.scan()) == [11]


def test_vacuum_removes_orphans(site: Site) -> None:
    """Files that failed attempts have left go; those of an open write stay, and so does what is not a write's: checkpoints, notes, another table."""
    table = site.created(OFF)
    table.write(rows(1))
    writer = site.writer()
    job = writer.begin(SCHEMA, WriteMode.APPEND)
    files = write_ids(writer, job, 5)
    dead = writer.begin(SCHEMA, WriteMode.APPEND)
    writer.abort(dead, ())
    orphans = [
        site.path / f"write-{dead.write_id:020d}/part-00000-0123456789abcdef.parquet",
        site.path / "stream-q/000000000001-x/part-00000-0123456789abcdef.parquet",
        site.path / f"_lookup/heartbeats/{dead.write_id:020d}-00",
        site.path / "_lookup/log/.00000000000000000009.json.1234",
        site.path / "write-00000000000000000001/.part-00000-0123456789abcdef.parquet.1234",
    ]
    foreign_files = [
        site.path / f"_lookup/heartbeats/{job.write_id:020d}-00",
        site.path / "_checkpoint/offsets/0",
        site.path / "notes.txt",
        site.path / "inner/write-1/part.parquet",
    ]
    for path in (*orphans, *foreign_files):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    with pytest.raises(errors.NotATableError, match=r"lies inside .*, a managed table: write to another path"):
        site.table({"path": f"{site.path}/a/b"}).write(rows(2))
    inner = site.path / "other"  # as it could be before
    names = ("other", "inner", "stream-q", "*-0123456789abcdef*", ".*", f"write-{job.write_id:020d}")
    shutil.copytree(site.path, inner, ignore=shutil.ignore_patterns(*names))
    assert table.vacuum()["files"] == 0
    aged(site, 8)
    assert table.vacuum() == {"files": 3, "bytes": 3, "oldest": None}
    assert not any(path.exists() for path in orphans)
    assert all(path.exists() for path in foreign_files)
    assert list_ids(site.table({"path": str(inner)}, host="late").scan()) == [1]
    writer.commit(job, files)
    assert list_ids(table.scan()) == [1, 5]


def test_rows_that_were_loaded_after_two_compactions_stay(site: Site) -> None:
    """A second compaction replaces what the first one wrote. Rows that were loaded since are still answered from the cache after an append elsewhere."""
    writer, table = site.created(OFF), site.table(MODES["partial"], host="b")
    for first in (0, 100):
        for start in (first, first + 50):
            writer.write(of_ids(start, start + 50))
        table.get(first)  # the host has the bounds of files that compactions replace
        writer.compact()
        table.get(first)
    keys = of_ids(20, 40).select(["id"])
    assert table.get_many(keys).num_rows == 20
    for start in (1000, 2000):
        writer.write(of_ids(start, start + 10))
        before = table.metrics()["missCount"]
        assert table.get_many(keys).num_rows == 20
        assert table.metrics()["missCount"] == before
