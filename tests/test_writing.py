"""Writes of managed tables without Spark: what is accepted, what becomes visible when, and who reads it."""

from __future__ import annotations

import dataclasses
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.base import errors
from pyspark_lookup.engine import lookup_table as api
from pyspark_lookup.engine import runtime as runtime_module
from pyspark_lookup.engine.lookup_table import LookupTable
from pyspark_lookup.engine.runtime import Runtime
from pyspark_lookup.io.stores import FileVersion, open_store
from pyspark_lookup.io.ufs import Ufs
from pyspark_lookup.managed import Job, TableWriter
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.table.log import Batch, DataFile, TableState, WriteMode
from tests.fakes import FakeClock
from tests.fuzzing import by_day
from tests.test_notifications import Watched

APPEND, OVERWRITE = WriteMode.APPEND, WriteMode.OVERWRITE
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
ORDER = [("id", "ascending"), ("name", "ascending")]
CACHES: dict[str, dict[str, str]] = {
    "NONE": {},
    "PARTIAL": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000"},
    "FULL": {"lookup.cache": "FULL"},
}
INTERVAL = {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "1 min"}
TRIGGER = {"lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 min"}


def rows(*ids: int | None, name: str = "a") -> pa.Table:
    return pa.table({"id": ids, "name": [name] * len(ids)}, SCHEMA)


def ids_of(table: pa.Table) -> list[int | None]:
    found: list[int | None] = table.column("id").to_pylist()
    return sorted(found, key=lambda id_: (id_ is not None, id_))


class Site:
    """A table's place and the hosts that use it, which differ in their cache directories."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = tmp_path / "table"
        self.clock = FakeClock(time.time() + 60)
        self.stores: list[Watched] = []
        self._cache = tmp_path / "cache"

        def opened(*args: Any) -> Watched:
            self.stores.append(Watched(open_store(*args)))
            return self.stores[-1]

        monkeypatch.setattr(runtime_module, "open_store", opened)
        self.runtime = Runtime(self.clock.host(), random.Random())
        monkeypatch.setattr(api, "runtime", lambda: self.runtime)

    def resize(self, **sizes: Any) -> None:
        """Have all that is opened here, now and later, write and compact by these `WriteSizes`."""
        self.runtime._sizes = dataclasses.replace(self.runtime._sizes, **sizes)
        for engine in self.runtime._engines.values():
            engine.sizes = self.runtime._sizes

    def options(self, host: str, more: dict[str, str]) -> dict[str, str]:
        own = {"path": str(self.path), "lookup.cache.dir": str(self._cache / host), "lookup.max-retries": "0"}
        return {**own, **more}

    def table(self, more: dict[str, str] | None = None, host: str = "a") -> LookupTable:
        return LookupTable(None, self.options(host, more or {}))

    def created(self, more: dict[str, str] | None = None) -> LookupTable:
        """The table, just created without rows, with the key `id`."""
        self.table({"lookup.keys": "id"}).write(rows())
        return self.table(more)

    def restart(self) -> None:
        """Have what is opened from now on be of another process."""
        self.runtime = Runtime(self.clock.host(), random.Random())

    def writer(self, more: dict[str, str] | None = None, host: str = "a", boot: str = "boot-1") -> TableWriter:
        options = LookupOptions.parse(self.options(host, more or {}))
        runtime = self.runtime if boot == "boot-1" else Runtime(self.clock.host(boot), random.Random())
        return runtime.engine(options).writer(options)

    def state(self) -> TableState:
        engine = self.runtime.engine(LookupOptions.parse(self.options("look", {})))
        state = engine.reader.resolver.log(str(self.path)).latest()
        assert state is not None
        return state

    def files(self) -> list[str]:
        """The data files that lie there."""
        return sorted(str(path.relative_to(self.path)) for path in self.path.rglob("*.parquet"))

    def committed(self) -> list[str]:
        state = self.state()
        return sorted(found[0].path for found in state.files(state.valid_write_ids()))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def put(writer: TableWriter, job: Job, *ids: int | None) -> list[DataFile]:
    return writer.write(job, rows(*ids).to_batches(), "part")


def test_the_first_write_creates_the_table(site: Site) -> None:
    """Columns and keys are those of the first write, which is visible at once, and kept in the log."""
    position = site.table({"lookup.keys": "ID"}).write(rows(2, 1))
    assert position == site.state().position
    assert (site.state().definition.schema, site.state().definition.keys) == (SCHEMA, ("id",))
    assert site.table(host="b").scan() == rows(1, 2)
    assert site.table(host="b").get(2) == [{"id": 2, "name": "a"}]
    assert site.files() == site.committed()
    with pytest.raises(errors.SchemaError, match="no column 'key'"):
        site.table({"lookup.keys": "key", "path": f"{site.path}2"}).write(rows(1))
    assert not Path(f"{site.path}2").exists()


def test_other_places_are_refused(site: Site, tmp_path: Path) -> None:
    """No table is made of somebody's files, nor in a store without an exclusive create; nothing is left there."""
    site.path.mkdir()
    pq.write_table(rows(1), site.path / "x.parquet")
    pq.write_table(rows(1), tmp_path / "file")
    for path in (site.path, tmp_path / "file"):
        with pytest.raises(errors.NotATableError, match="did not write"):
            site.table({"path": str(path)}).write(rows(1))
    assert [path.name for path in site.path.rglob("*")] == ["x.parquet"]
    with pytest.raises(errors.NotSupportedError, match="memory"):
        site.table({"path": "memory://writing/table"}).write(rows(1))


@pytest.mark.parametrize("path", ["a[1]", "a*", "{a,b}/t"])
def test_wildcards_are_refused(site: Site, tmp_path: Path, path: str) -> None:
    """A glob names no place for a table: nothing is written where it could not be read."""
    with pytest.raises(errors.PysparkLookupError):
        site.table({"path": str(tmp_path / path)}).write(rows(1))
    assert list(tmp_path.rglob("*.parquet")) == []


def test_rows_take_the_tables_columns(site: Site) -> None:
    """Narrower types are widened, missing columns are null, order and letter case are the table's."""
    table = site.created()
    table.write(pa.table({"NAME": ["b"], "ID": pa.array([2], pa.int16())}))
    table.write(pa.table({"id": pa.array([3], pa.int32())}))
    assert table.scan() == pa.table({"id": [2, 3], "name": ["b", None]}, SCHEMA)


@pytest.mark.parametrize(
    ("given", "options", "error", "says"),
    [
        ({"id": [1], "x": [1]}, {}, errors.SchemaError, r"'x'.*lookup.write.merge-schema"),
        ({"id": ["1"]}, {}, errors.SchemaError, "'id' is BIGINT"),
        ({"id": [1], "name": [1]}, {"lookup.write.merge-schema": "true"}, errors.SchemaError, "'name'"),
        ({"id": [1]}, {"lookup.keys": "name"}, errors.OptionError, "lookup.keys"),
        ({"id": [1]}, {"lookup.keys": "id,name"}, errors.OptionError, "lookup.keys"),
        ({"id": [1]}, {"lookup.format": "parquet"}, errors.OptionError, "lookup.format"),
    ],
)
def test_rows_that_do_not_fit(
    site: Site, given: dict[str, list[Any]], options: dict[str, str], error: type[Exception], says: str
) -> None:
    """Rows of other columns, types or keys are refused, by name, before anything is written."""
    site.created()
    position = site.state().position
    with pytest.raises(error, match=says):
        site.table(options).write(pa.table(given))
    assert (site.state().position, site.files()) == (position, [])


def test_columns_can_be_added(site: Site) -> None:
    """lookup.write.merge-schema adds columns at the end; older rows have null there, older versions do not have them."""
    table = site.created()
    before = table.write(rows(1))
    site.table({"lookup.write.merge-schema": "true"}).write(pa.table({"x": [0.5], "id": [2]}))
    wider = pa.schema([*SCHEMA, pa.field("x", pa.float64())])
    assert table.scan() == pa.table({"id": [1, 2], "name": ["a", None], "x": [None, 0.5]}, wider)
    assert site.table({"lookup.version": str(before)}).scan() == rows(1)


def test_files_are_sorted_and_groups_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a file are sorted by key, and no row group is too large for a point read; large writes make several files."""
    site.resize(file_bytes=4 * 2**20)
    order = list(range(300_000))
    random.Random(1).shuffle(order)
    table = site.created()
    many = pa.table({"id": order, "name": ["x" * 10] * len(order)}, SCHEMA)
    table.write(pa.RecordBatchReader.from_batches(SCHEMA, many.to_batches(10_000)))
    table.write(pa.table({"id": range(2000), "name": ["x" * 5000] * 2000}, SCHEMA))
    found = [pq.ParquetFile(site.path / name) for name in site.files()]
    assert len(found) > 2
    for file in found:
        ids = file.read(["id"]).column("id").to_pylist()
        assert ids == sorted(ids)
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            assert group.num_rows <= 1024 or group.total_byte_size < 2 * 2**20
    assert table.scan().num_rows == 302_000


UNIQUE = {"lookup.write.unique-keys": "true"}


def test_unique_keys(site: Site) -> None:
    """A key that is there twice, in the rows or with the table's, is refused and nothing is left of it; null is no key."""
    table = site.created(UNIQUE)
    table.write(rows(1, 2, None, None))
    for again in (rows(3, 4, 3), rows(5, 2), rows(None, 1)):
        files = site.files()
        with pytest.raises(errors.NonUniqueKeyError, match=r"id = [123]"):
            table.write(again)
        assert (ids_of(table.scan()), site.files()) == ([None, None, 1, 2], files)
    table.write(rows(3, None))
    assert table.write(rows(1, 2), "overwrite") == site.state().position
    assert ids_of(table.scan()) == [1, 2]
    with pytest.raises(errors.NonUniqueKeyError):
        table.write(rows(7, 7), "overwrite")
    assert ids_of(table.scan()) == [1, 2]
    assert site.state().open_writes() == []
    with pytest.raises(errors.OptionError, match="no key columns"):
        site.table({**UNIQUE, "path": f"{site.path}2"}).write(rows(1))


@pytest.mark.parametrize("name", [None, "job-1"])
def test_unique_keys_of_concurrent_writes(site: Site, name: str | None) -> None:
    """Of two writes of one key that both began before the other ended, the second commit is refused and its files go."""
    site.created()
    one, two = site.writer(UNIQUE), site.writer(UNIQUE, host="b")
    jobs = one.begin(SCHEMA, APPEND), two.begin(SCHEMA, APPEND, name)
    files = put(one, jobs[0], 1, 2), put(two, jobs[1], 2, 3)
    one.commit(jobs[0], files[0])
    with pytest.raises(errors.NonUniqueKeyError, match="id = 2"):
        two.commit(jobs[1], files[1])
    assert ids_of(site.table().scan()) == [1, 2]
    assert site.files() == [file.path for file in files[0]]
    assert site.state().open_writes() == []


def test_a_file_of_which_nothing_is_known_is_not_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store does not say whether a data file was put, the write fails, and the log names none."""
    table = site.created()
    put_if_absent = Ufs.put_if_absent

    def unanswered(self: Ufs, path: str, data: bytes) -> FileVersion | None:
        if path.endswith(".parquet"):
            raise errors.PutUnknownError("no answer")
        return put_if_absent(self, path, data)

    monkeypatch.setattr(Ufs, "put_if_absent", unanswered)
    with pytest.raises(errors.UfsUnavailableError, match="nothing was written"):
        table.write(rows(1))
    assert site.committed() == []


def test_overwrites(site: Site) -> None:
    """An overwrite's rows stand in place of all others, also if they are none; an append of none changes nothing."""
    table = site.created()
    table.write(rows(1, 2))
    table.write(rows(3), "OVERWRITE")
    assert ids_of(table.scan()) == [3]
    version, files = table.version, site.files()
    table.write(rows())
    assert (table.version, site.files(), site.state().open_writes()) == (version, files, [])
    table.write(rows(), "overwrite")
    assert table.scan() == rows()
    table.write(rows(4))
    assert (ids_of(table.scan()), table.get(3), table.get(4)) == ([4], [], [{"id": 4, "name": "a"}])
    for mode in ("merge", "delete"):
        with pytest.raises(errors.OptionError, match="'append', 'overwrite' or 'upsert'"):
            table.write(rows(1), mode)


def test_rows_that_end_in_an_error(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fail on their way are not visible, whatever was written of them is removed, and the write is over."""
    site.resize(file_bytes=1)
    table = site.created()

    def some() -> Iterator[pa.RecordBatch]:
        yield from rows(1, 2).to_batches()
        yield from rows(3).to_batches()
        assert site.files() != []
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        table.write(pa.RecordBatchReader.from_batches(SCHEMA, some()))
    assert (table.scan(), site.files(), site.state().open_writes()) == (rows(), [], [])


def test_an_append_that_an_overwrite_has_passed(site: Site) -> None:
    """Its rows could never be seen, so it is refused by name and its files go; one that began later is not."""
    table = site.created()
    writer = site.writer()
    old = writer.begin(SCHEMA, APPEND)
    files = put(writer, old, 1)
    table.write(rows(2), "overwrite")
    young = writer.begin(SCHEMA, APPEND)
    with pytest.raises(errors.WriteConflictError, match=r"write \d+ .*began before write \d+"):
        writer.commit(old, files)
    writer.commit(young, put(writer, young, 3))
    assert ids_of(table.scan()) == [2, 3]
    assert site.files() == site.committed()
    assert len(site.files()) == 2


def test_a_table_recreated_under_a_write(site: Site) -> None:
    """A write that began on a table that is gone is refused; the new table has nothing of it."""
    site.created()
    writer = site.writer()
    job = writer.begin(SCHEMA, APPEND)
    files = put(writer, job, 1)
    shutil.rmtree(site.path)
    table = site.created()
    with pytest.raises(errors.WriteConflictError, match="created anew"):
        writer.commit(job, files)
    assert (table.scan(), site.state().open_writes()) == (rows(), [])


@pytest.mark.parametrize("name", [None, "job-1"])
def test_a_commit_whose_answer_was_lost(site: Site, name: str | None) -> None:
    """The commit's outcome is an error of its own; giving up then removes nothing of what is committed."""
    site.created()
    writer, batch = site.writer(), Batch("q", 1)
    job = writer.begin(SCHEMA, APPEND, name)
    files = put(writer, job, 1)

    def silent(kind: str, subject: object) -> None:
        raise errors.UfsTimeoutError("no answer")

    def arrived() -> None:
        newest = max((site.path / "_lookup" / "log").glob("*.json"))
        if b'"commit"' in newest.read_bytes():
            for store in site.stores:
                store.before = silent
            raise errors.UfsTimeoutError("no answer")

    for store in site.stores:
        store.after = arrived
    with pytest.raises(errors.CommitUnknownError, match="commit"):
        writer.commit(job, files, batch if name else None)
    for store in site.stores:
        store.before, store.after = lambda kind, subject: None, lambda: None
    writer.abort(job, files, batch=batch if name else None)
    assert ids_of(site.table().scan()) == [1]
    assert site.files() == site.committed()


def test_files_of_other_attempts(site: Site) -> None:
    """What failed or slower attempts of tasks have left is removed by the commit; other writes' files are not."""
    site.created()
    writer = site.writer()
    job, other = writer.begin(SCHEMA, APPEND), writer.begin(SCHEMA, APPEND)
    attempts = [put(writer, job, 1, 2) for _ in range(3)]
    beside = put(writer, other, 3)
    writer.commit(job, attempts[1])
    assert site.files() == sorted(file.path for file in [*attempts[1], *beside])
    writer.commit(other, beside)
    assert ids_of(site.table().scan()) == [1, 2, 3]


@pytest.mark.parametrize("host", ["a", "b"])
def test_a_batch_is_committed_once(site: Site, host: str, caplog: pytest.LogCaptureFixture) -> None:
    """A streaming query's batch that begins again, as after a lost acknowledgement, adds nothing and takes nothing away."""
    site.created()
    for attempt, where in enumerate(("a", host, host)):
        writer = site.writer(host=where)
        job = writer.begin(SCHEMA, APPEND, "query-7")
        state = writer.commit(job, put(writer, job, 1, 2), Batch("query", 7))
        assert (state is None) == (attempt > 0)
        assert ids_of(site.table(host="c").scan()) == [1, 2]
        assert site.files() == site.committed()
    writer = site.writer()
    job = writer.begin(SCHEMA, APPEND, "query-6")
    with caplog.at_level("WARNING"):
        assert writer.commit(job, put(writer, job, 6), Batch("query", 6)) is None
    assert "batch 6 of query query is not written" in caplog.text
    assert site.table().metrics()["batchSkippedCount"] == (3 if host == "a" else 1)
    job = writer.begin(SCHEMA, APPEND, "query-8")
    assert writer.commit(job, put(writer, job, 8), Batch("query", 8)) is not None
    assert ids_of(site.table().scan()) == [1, 2, 8]
    assert site.state().open_writes() == []


TIMEOUT = {"lookup.write.timeout": "80 s"}


def watched(site: Site, seconds: int, boot: str = "boot-1") -> None:
    """Let time pass on a host where others begin writes now and then, and end them."""
    writer = site.writer(TIMEOUT, boot=boot)
    for _ in range(0, seconds, 8):
        site.clock.tick(8)
        writer.abort(writer.begin(SCHEMA, APPEND), ())


def test_a_dead_writer_is_aborted(site: Site) -> None:
    """A write that shows no sign of life for the timeout, watched by one host, is over; its commit is refused."""
    site.created()
    writer = site.writer(TIMEOUT, host="b")
    job = writer.begin(SCHEMA, APPEND)
    files = put(writer, job, 1)
    watched(site, 72)
    site.clock.tick(2)
    assert [write.id for write in site.state().open_writes()] == [job.write_id]
    watched(site, 24)
    assert (site.state().open_writes(), site.files()) == ([], [])
    with pytest.raises(errors.WriteConflictError, match=r"aborted.*lookup.write.timeout"):
        writer.commit(job, files)
    assert site.table().scan() == rows()


def test_a_living_writer_is_not(site: Site) -> None:
    """A write that shows signs of life goes on as long as it likes; it shows few, and they go when it is done."""
    site.created()
    writer = site.writer(TIMEOUT, host="b")
    job = writer.begin(SCHEMA, APPEND)

    def slow() -> Iterator[pa.RecordBatch]:
        for id_ in range(40):
            watched(site, 8)
            yield from rows(id_).to_batches()

    files = writer.write(job, slow(), "part")
    assert [write.id for write in site.state().open_writes()] == [job.write_id]
    assert 16 <= len(list((site.path / "_lookup" / "heartbeats").iterdir())) <= 40
    writer.commit(job, files)
    assert ids_of(site.table().scan()) == list(range(40))
    assert not (site.path / "_lookup" / "heartbeats").exists()


@pytest.mark.parametrize("change", ["boot", "recreated"])
def test_the_watch_begins_again(site: Site, change: str) -> None:
    """Another boot's clock, and what was seen of a dropped table, say nothing of a write."""
    site.created()
    job = site.writer(TIMEOUT, host="b").begin(SCHEMA, APPEND)
    watched(site, 72)
    if change == "recreated":
        shutil.rmtree(site.path)
        site.created()
        job = site.writer(TIMEOUT, host="b").begin(SCHEMA, APPEND)
    boot = "boot-2" if change == "boot" else "boot-1"
    watched(site, 72, boot=boot)
    assert job.write_id in [write.id for write in site.state().open_writes()]
    watched(site, 24, boot=boot)
    assert site.state().open_writes() == []


def test_watching_costs_little(site: Site) -> None:
    """However many writes begin while one is open, the signs of life are listed a few times in the timeout."""
    site.created()
    site.writer(TIMEOUT, host="b").begin(SCHEMA, APPEND)
    writer = site.writer(TIMEOUT)
    writer.abort(writer.begin(SCHEMA, APPEND), ())
    site.clock.tick(40)
    for store in site.stores:
        store.calls.clear()
    for _ in range(10):
        writer.abort(writer.begin(SCHEMA, APPEND), ())
        site.clock.tick(1)
    listed = [path for store in site.stores for kind, path in store.calls if kind == "files" and "heartbeats" in str(path)]  # fmt: skip
    assert 1 <= len(listed) <= 2


@pytest.mark.parametrize("cache", CACHES)
def test_time_travel(site: Site, cache: str) -> None:
    """In each cache mode, a position or a list of write ids gives what was there, next to the current version."""
    table = site.created(CACHES[cache])
    steps = [(rows(1, 2), "append"), (rows(2, 3, name="b"), "append"), (rows(4), "overwrite"), (rows(1, name="c"), "append")]  # fmt: skip
    found: list[tuple[int, str, pa.Table]] = []
    for given, mode in steps:
        position = table.write(given, mode)
        found.append((position, str(site.state().valid_write_ids()), table.scan()))
    assert [ids_of(scan) for _, _, scan in found] == [[1, 2], [1, 2, 2, 3], [4], [1, 4]]
    for _ in range(2):
        for position, write_ids, scan in found:
            pinned = site.table({**CACHES[cache], "lookup.version": str(position)}, host="b")
            assert pinned.scan().sort_by(ORDER) == scan.sort_by(ORDER)
            assert table.scan(valid_write_ids=write_ids).sort_by(ORDER) == scan.sort_by(ORDER)
            for key in range(1, 5):
                expected = [row for row in scan.to_pylist() if row["id"] == key]
                assert pinned.get(key) == table.get(key, valid_write_ids=write_ids) == expected
        assert (ids_of(table.scan()), table.get(2)) == ([1, 4], [])
    for options in ({"lookup.version": "99"}, {"lookup.valid-write-ids": write_ids.replace(":4:", ":9:")}):
        with pytest.raises(errors.VersionGoneError):
            site.table({**CACHES[cache], **options}).scan()


READS = [(cache, source) for cache in CACHES for source in ("UFS", "CACHE")]


def reading(cache: str, source: str) -> dict[str, str]:
    return {**CACHES[cache], **({} if source == "UFS" else TRIGGER if cache == "FULL" else INTERVAL)}


@pytest.mark.parametrize(("cache", "source"), READS)
def test_reads_see_the_hosts_writes(site: Site, cache: str, source: str) -> None:
    """What a host has written it reads, in every mode; another one does in UFS mode, and in CACHE mode with a floor."""
    writer = site.created()
    own, other = site.table(reading(cache, source)), site.table(reading(cache, source), host="b")
    expected: list[int | None] = []
    for number in range(1, 4):
        before = ids_of(other.scan()), other.get(number)
        assert before == (expected, [])
        writer.write(rows(number))
        expected = [*expected, number]
        after = expected, [{"id": number, "name": "a"}]
        assert (ids_of(own.scan()), own.get(number)) == after
        if source == "CACHE":
            assert (ids_of(other.scan()), other.get(number)) == before
            floored = site.table({**reading(cache, source), "lookup.floor": str(writer.floor)}, host="b")
            assert (ids_of(floored.scan()), floored.get(number)) == after
            other = other if cache == "FULL" else floored
            if cache == "FULL":
                other.reload()
        assert (ids_of(other.scan()), other.get(number)) == after


@pytest.mark.parametrize(
    ("cache", "source", "commits"), by_day([(*read, commits) for read in READS for commits in (1, 3, 5)], 4)
)
def test_no_rows_of_a_dropped_table(site: Site, cache: str, source: str, commits: int) -> None:
    """A table in the place of a dropped one is read at once in UFS mode, in CACHE mode when the store is asked next."""
    writer = site.created()
    for number in range(3):
        writer.write(rows(number, number + 10, name="old"))
    tables = [site.table(reading(cache, source), host) for host in ("a", "b")]
    assert [ids_of(table.scan()) for table in tables] == [[0, 1, 2, 10, 11, 12]] * 2
    assert all(table.get(1)[0]["name"] == "old" for table in tables)
    shutil.rmtree(site.path)
    site.created().write(rows(1, 7, name="new"))
    for _ in range(1, commits):
        writer.write(rows(7, name="new"))
    if source == "CACHE":
        site.clock.tick(61)
        for table in tables if cache == "FULL" else ():
            table.reload()
    tables += [site.table(reading(cache, source), host) for host in ("a", "b")]
    for table in tables:
        assert ids_of(table.scan()) == [1, *[7] * commits]
        assert (table.get(1), table.get(2)) == ([{"id": 1, "name": "new"}], [])
        assert [row["name"] for row in table.get(7)] == ["new"] * commits


@pytest.mark.parametrize("option", [{"lookup.format": "parquet"}, {"lookup.partition": "max_pt()"}, {"lookup.settle": "1 s"}, {"lookup.success-file": "true"}])  # fmt: skip
def test_options_about_others_files(site: Site, option: dict[str, str]) -> None:
    """Options about files that somebody else writes are refused for a managed table, those about its log elsewhere."""
    table = site.created()
    for ask in (lambda: site.table(option).scan(), lambda: site.table(option).write(rows(1))):
        with pytest.raises(errors.OptionError, match=next(iter(option))):
            ask()
    plain = site.path.with_name("plain.parquet")
    pq.write_table(rows(1), plain)
    for given in ({"lookup.version": "1"}, {"lookup.valid-write-ids": "t:1:9223372036854775807::"}):
        with pytest.raises(errors.OptionError, match=next(iter(given))):
            site.table({**given, "path": str(plain)}).scan()
    assert table.scan() == rows()


@pytest.mark.parametrize("cache", CACHES)
def test_an_unchanged_table_costs_two_heads(site: Site, cache: str) -> None:
    """Once a host has read a version, a scan or a lookup asks the store for the next event and the last one, no more."""
    site.created().write(rows(1, 2))
    table = site.table(CACHES[cache])
    for ask in (table.scan, lambda: table.get(1)):
        ask()
        for store in site.stores:
            store.calls.clear()
        ask()
        assert [kind for store in site.stores for kind, _ in store.calls] == ["head", "head"]


def test_a_batch_of_a_name_is_written_once(site: Site) -> None:
    """`lookup.write.batch`: the same number, or a lower one, of a name is not written again, from whatever host; other names are."""
    site.created()

    def write(batch: str, *ids: int, mode: str = "append", host: str = "a") -> int:
        return site.table({"lookup.write.batch": batch}, host).write(rows(*ids), mode)

    first = write("orders:5", 1)
    assert write("orders:5", 2) == write("orders:4", 3, host="b") == first == site.state().position
    assert ids_of(site.table().scan()) == [1]
    write("orders:6", 4, mode="upsert")
    write("returns:1", 5)
    write("returns:2")
    write("returns:2", 6)  # nothing was written of it
    assert ids_of(site.table(host="late").scan()) == [1, 4, 5, 6]
    write("orders:7", 7, mode="overwrite")
    assert ids_of(site.table().scan()) == [7]
    assert [site.table(host=host).metrics()["batchSkippedCount"] for host in ("a", "b")] == [1, 1]
    table = site.table({"lookup.write.batch": "orders:9"})
    for refused in (lambda: table.delete(pa.table({"id": [1]})), table.transaction):
        with pytest.raises(errors.OptionError, match=r"lookup\.write\.batch is for single writes of rows"):
            refused()
