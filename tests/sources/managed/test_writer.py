"""Writes of managed tables without Spark: what is accepted, what becomes visible when, and who reads it."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import errors
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.sources.managed.log import Batch, DataFile, WriteMode
from pyspark_lookup.storage.stores import FileVersion
from pyspark_lookup.storage.ufs import Ufs
from tests.support.fakes import CACHES
from tests.support.managed_tables import SCHEMA, Site, list_ids, rows, write_ids

APPEND, OVERWRITE = WriteMode.APPEND, WriteMode.OVERWRITE
INTERVAL = {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "1 min"}
TRIGGER = {"lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 min"}


def test_the_first_write_creates_the_table(site: Site) -> None:
    """Columns and keys are those of the first write, which is visible at once; others are widened, lack columns, have any order."""
    position = site.table({"lookup.keys": "ID"}).write(rows(2, 1))
    state = site.state()
    assert (state.position, state.definition.schema, state.definition.keys) == (position, SCHEMA, ("id",))
    assert site.table(host="b").scan() == rows(1, 2)
    assert site.table(host="b").get(2) == [{"id": 2, "name": "a"}]
    assert site.files() == site.committed()
    site.table().write(pa.table({"NAME": ["b"], "ID": pa.array([3], pa.int16())}))
    site.table().write(pa.table({"id": pa.array([4], pa.int32())}))
    assert site.table().scan() == pa.table({"id": [1, 2, 3, 4], "name": ["a", "a", "b", None]}, SCHEMA)
    with pytest.raises(errors.SchemaError, match=r"table2: the key column 'key' is not among the columns \(id, name\)"):
        site.table({"lookup.keys": "key", "path": f"{site.path}2"}).write(rows(1))
    assert not Path(f"{site.path}2").exists()


def test_other_places_are_refused(site: Site, tmp_path: Path) -> None:
    """No table is made of somebody's files, nor in a store without an exclusive create, nor by a glob; nothing is left there."""
    site.path.mkdir()
    pq.write_table(rows(1), site.path / "x.parquet")
    pq.write_table(rows(1), tmp_path / "file")
    for path, error, says in (
        (site.path, errors.NotATableError, "holds files that .* did not write"),
        (tmp_path / "file", errors.NotATableError, "is a file that .* did not write"),
        ("memory://writing/table", errors.NotSupportedError, "memory"),
        *((tmp_path / glob, errors.PysparkLookupError, None) for glob in ("a[1]", "a*", "{a,b}/t")),
    ):
        with pytest.raises(error, match=says):
            site.table({"path": str(path)}).write(rows(1))
    assert list(tmp_path.rglob("*.parquet")) == [site.path / "x.parquet"]


UNIQUE = {"lookup.write.unique-keys": "true"}
KEYLESS, BATCH, PAST = {"path": "keyless"}, {"lookup.write.batch": "orders:9"}, {"lookup.version": "1"}
WHERE = {"lookup.where": "id > 5"}
OF_FILES = {"lookup.format": "parquet", "lookup.partition": "max_pt()"}
OF_LOGS = {"lookup.version": "1", "lookup.valid-write-ids": "t:1:9::"}
ONE_ROW = {"id": [1], "name": ["a"]}
Arguments = Any  # of a call: None, rows by column, or the only one
REFUSED: list[tuple[type[Exception], dict[str, str], str, Arguments, str]] = [
    (errors.SchemaError, {}, "write", {"id": [1], "x": [1]}, r"'x'.*lookup.write.merge-schema"),
    (errors.SchemaError, {}, "write", {"id": ["1"]}, "'id' is BIGINT"),
    (errors.SchemaError, {"lookup.write.merge-schema": "true"}, "write", {"id": [1], "name": [1]}, "'name'"),
    (errors.SchemaError, {}, "delete", {"id": ["one"]}, "'id'"),
    (errors.NonUniqueKeyError, {}, "upsert", {"id": [3, 4, 3], "name": ["a"] * 3}, "id = 3"),
    (errors.OptionError, {"lookup.keys": "id,name"}, "write", ONE_ROW, "'id,name': the key columns of .* are id: "),
    (errors.OptionError, {**KEYLESS, **UNIQUE}, "write", ONE_ROW, "key columns"),
    *((errors.OptionError, KEYLESS, call, ONE_ROW, "key columns") for call in ("upsert", "delete")),
    # Names that files of hidden rows use.
    (errors.SchemaError, {"path": "new"}, "write", {"id": [1], "_LOOKUP_FILE": [1]}, "rename the column"),
    (errors.SchemaError, {}, "alter", pa.schema([("_lookup_row", pa.string())]), "rename the column"),
    (errors.OptionError, {**KEYLESS, **CACHES["PARTIAL"]}, "get", 1, r"lookup\.keys"),
    (errors.OptionError, BATCH, "delete", ONE_ROW, r"lookup\.write\.batch is for single writes of rows"),
    (errors.OptionError, BATCH, "transaction", None, r"lookup\.write\.batch is for single writes of rows"),
    *((errors.OptionError, PAST, call, ONE_ROW, "is for reads") for call in ("upsert", "delete")),
    *(
        (errors.OptionError, WHERE, call, ONE_ROW, f"= 'id > 5' is for reads .* which rows the {call} replaces")
        for call in ("upsert", "delete")
    ),
    (errors.OptionError, PAST, "compact", None, "is for reads"),
    *((errors.OptionError, {}, "vacuum", text, "older_than") for text in ("6 d", "-1 d", "soon")),
    (errors.UfsNotFoundError, {"path": "nothing"}, "vacuum", None, "nothing"),
    *((errors.OptionError, {key: value}, "write", ONE_ROW, key) for key, value in OF_FILES.items()),
    *((errors.OptionError, {key: value}, "scan", None, key) for key, value in OF_FILES.items()),
    *((errors.OptionError, {key: value, "path": "plain"}, "scan", None, key) for key, value in OF_LOGS.items()),
]


def test_what_is_refused(site: Site) -> None:
    """Rows that do not fit, keys that are none, and options about other tables are refused, by name; nothing is left there."""
    site.created().write(rows(1))
    site.table({"path": str(site.path.with_name("keyless"))}).write(rows(1))
    pq.write_table(rows(1), site.path.with_name("plain"))
    before = site.state().version().digest, site.files(), []

    for error, options, call, argument, message in REFUSED:
        path = {"path": str(site.path.with_name(options["path"]))} if "path" in options else {}
        arguments = [] if argument is None else [pa.table(argument) if isinstance(argument, dict) else argument]
        with pytest.raises(error, match=message):
            getattr(site.table({**options, **path}), call)(*arguments)
        assert (site.state().version().digest, site.files(), site.state().open_writes()) == before


def test_writes_through_a_condition(site: Site) -> None:
    """With lookup.where rows are appended only: other writes would take rows that the condition hides, also in a transaction."""
    site.created().write(rows(1))
    table = site.table(WHERE)
    table.write(rows(6))
    for call in (lambda writer: writer.write(rows(7), "overwrite"), lambda writer: writer.delete(1)):
        with pytest.raises(errors.OptionError, match=r"is for reads .* such as LookupTable\(path\)"):
            call(table)
        with pytest.raises(errors.OptionError, match="is for reads"), table.transaction() as transaction:
            transaction.write(rows(8))
            call(transaction)
    assert list_ids(site.table().scan()) == [1, 6]


def test_files_are_sorted_and_groups_bounded(site: Site) -> None:
    """Rows of a file are sorted by key, and no row group is too large for a point read; large writes make several files."""
    site.resize(file_bytes=4 * 2**20)
    order = random.Random(1).sample(range(300_000), 300_000)
    table = site.created()
    many = pa.table({"id": order, "name": ["x" * 10] * len(order)}, SCHEMA)
    table.write(pa.RecordBatchReader.from_batches(SCHEMA, many.to_batches(10_000)))
    table.write(pa.table({"id": range(2000), "name": ["x" * 5000] * 2000}, SCHEMA))
    files = [pq.ParquetFile(site.path / name) for name in site.files()]
    assert len(files) > 2
    for file in files:
        ids = file.read(["id"]).column("id").to_pylist()
        assert ids == sorted(ids)
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        assert all(group.num_rows <= 1024 or group.total_byte_size < 2 * 2**20 for group in groups)
    assert table.scan().num_rows == 302_000


def test_unique_keys(site: Site) -> None:
    """A key that is there twice, in the rows or with the table's, is refused and nothing is left of it; null is not a key."""
    table = site.created(UNIQUE)
    table.write(rows(1, 2, None, None))
    for repeated, remedy in ((rows(3, 4, 3), "once"), (rows(5, 2), "upsert"), (rows(None, 1), "upsert")):
        files = site.files()
        with pytest.raises(errors.NonUniqueKeyError, match=rf"id = [123] .*{remedy}"):
            table.write(repeated)
        assert (list_ids(table.scan()), site.files()) == ([None, None, 1, 2], files)
    table.write(rows(3, None))
    assert table.write(rows(1, 2), "overwrite") == site.state().position
    with pytest.raises(errors.NonUniqueKeyError):
        table.write(rows(7, 7), "overwrite")
    assert (list_ids(table.scan()), site.state().open_writes()) == ([1, 2], [])


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


def test_rows_that_end_in_an_error(site: Site) -> None:
    """Rows that fail on their way are not visible, whatever was written of them is removed, and the write is over."""
    site.resize(file_bytes=1)
    table = site.created()

    def batches() -> Iterator[pa.RecordBatch]:
        for ids in ((1, 2), (3,)):
            yield from rows(*ids).to_batches()
        assert site.files() != []
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        table.write(pa.RecordBatchReader.from_batches(SCHEMA, batches()))
    assert (table.scan(), site.files(), site.state().open_writes()) == (rows(), [], [])


@pytest.mark.parametrize("name", [None, "job-1"])
def test_a_commit_whose_answer_was_lost(site: Site, name: str | None) -> None:
    """The commit's outcome is an error of its own; giving up then removes nothing of what is committed."""
    site.created()
    writer, batch = site.writer(), Batch("q", 1) if name else None
    job = writer.begin(SCHEMA, APPEND, name)
    files = write_ids(writer, job, 1)

    def silent(*_: object) -> None:
        raise errors.UfsTimeoutError("no answer")

    def arrived() -> None:
        if b'"commit"' in max((site.path / "_lookup" / "log").glob("*.json")).read_bytes():
            site.interrupt(silent)
            silent()

    site.interrupt(after=arrived)
    with pytest.raises(errors.CommitUnknownError, match="commit"):
        writer.commit(job, files, batch)
    site.interrupt()
    writer.abort(job, files, batch=batch)
    assert list_ids(site.table().scan()) == [1]
    assert site.files() == site.committed()


def test_files_of_other_attempts(site: Site) -> None:
    """A commit removes what failed or slower attempts of its tasks have left; it does not remove other writes' files."""
    site.created()
    writer = site.writer()
    job, second = writer.begin(SCHEMA, APPEND), writer.begin(SCHEMA, APPEND)
    attempts = [write_ids(writer, job, 1, 2) for _ in range(3)]
    beside = write_ids(writer, second, 3)
    writer.commit(job, attempts[1])
    assert site.files() == sorted(file.path for file in [*attempts[1], *beside])
    writer.commit(second, beside)
    assert list_ids(site.table().scan()) == [1, 2, 3]


TIMEOUT = {"lookup.write.timeout": "80 s"}


def watched(site: Site, seconds: int, boot: str = "boot-1") -> None:
    """Let time pass on a host where others begin writes now and then, and end them."""
    writer = site.writer(TIMEOUT, boot=boot)
    for _ in range(0, seconds, 8):
        site.clock.tick(8)
        writer.abort(writer.begin(SCHEMA, APPEND), ())


def test_a_dead_writer_is_aborted(site: Site) -> None:
    """Without a sign of life for the timeout a write is over, and its commit refused; others list the signs of life a few times only."""
    site.created()
    writer = site.writer(TIMEOUT, host="b")
    job = writer.begin(SCHEMA, APPEND)
    files = write_ids(writer, job, 1)
    watched(site, 32)
    site.calls()
    watched(site, 40)
    assert 1 <= len([path for kind, path in site.calls() if kind == "files" and "heartbeats" in str(path)]) <= 3
    site.clock.tick(2)
    assert [write.id for write in site.state().open_writes()] == [job.write_id]
    watched(site, 24)
    assert (site.state().open_writes(), site.files()) == ([], [])
    with pytest.raises(errors.WriteConflictError, match=r"aborted.*lookup.write.timeout"):
        writer.commit(job, files)
    assert site.table().scan() == rows()


@pytest.mark.parametrize("tasks", [1, 40])
def test_a_living_writer_is_not(site: Site, tasks: int) -> None:
    """A write that shows signs of life goes on as long as it likes, in one long task or many short ones; it shows few, and they go when it is done."""
    site.created()
    job = site.writer(TIMEOUT, host="b").begin(SCHEMA, APPEND)

    def slow(ids: range) -> Iterator[pa.RecordBatch]:
        for id_ in ids:
            watched(site, 8)
            yield from rows(id_).to_batches()

    files: list[DataFile] = []
    for first in range(0, 40, 40 // tasks):
        writer = site.writer(TIMEOUT, host="b")
        files += writer.write(job, slow(range(first, first + 40 // tasks)), "part")
    assert 16 <= len(list((site.path / "_lookup" / "heartbeats").iterdir())) <= 40
    writer.commit(job, files)
    assert list_ids(site.table().scan()) == list(range(40))
    assert not (site.path / "_lookup" / "heartbeats").exists()


@pytest.mark.parametrize("change", ["boot", "recreated"])
def test_the_watch_begins_again(site: Site, change: str) -> None:
    """Another boot's clock, and what was seen of a dropped table, say nothing of a write."""
    site.created()
    job = site.writer(TIMEOUT, host="b").begin(SCHEMA, APPEND)
    watched(site, 72)
    boot = "boot-2" if change == "boot" else "boot-1"
    if change == "recreated":
        shutil.rmtree(site.path)
        site.created()
        job = site.writer(TIMEOUT, host="b").begin(SCHEMA, APPEND)
    watched(site, 72, boot)
    assert job.write_id in [write.id for write in site.state().open_writes()]
    watched(site, 24, boot)
    assert site.state().open_writes() == []


@pytest.mark.parametrize("source", ["UFS", "CACHE"])
@pytest.mark.parametrize("cache", CACHES)
def test_reads_see_the_hosts_writes(site: Site, cache: str, source: str) -> None:
    """A host reads what it has written, in every mode; another one does in UFS mode, and in CACHE mode with a floor."""
    options = {**CACHES[cache], **({} if source == "UFS" else TRIGGER if cache == "FULL" else INTERVAL)}
    writer, same_host, other_host = site.created(), site.table(options), site.table(options, host="b")

    def read(table: LookupTable) -> tuple[list[int | None], list[Any]]:
        return list_ids(table.scan()), table.get(number)

    for number in range(1, 4):
        before, after = (list(range(1, number)), []), (list(range(1, number + 1)), [{"id": number, "name": "a"}])
        assert read(other_host) == before
        writer.write(rows(number))
        assert read(same_host) == after
        if source == "CACHE":
            # A full cache that a floor has asked to reload may have done so only now.
            assert read(other_host) == before or (cache == "FULL" and number > 1)
            floored = site.table({**options, "lookup.floor": str(writer.floor)}, host="b")
            assert read(floored) == after
            if cache == "FULL":
                other_host.reload()
            else:
                other_host = floored
        assert read(other_host) == after
        site.calls()
        read(other_host)  # a version that it has read: each read asks for the next event and the last one, no more
        kinds = [kind for kind, _ in site.calls()]
        # Again, the reload that a floor has asked for may come only now.
        is_late_reload = (cache, source, kinds) == ("FULL", "CACHE", ["head"] * 2)
        assert is_late_reload or kinds == (["head"] * 4 if source == "UFS" else [])


def test_the_write_mode_of_the_options(site: Site) -> None:
    """With `lookup.write.mode` = upsert an append is an upsert, also in a transaction; an overwrite is refused."""
    table = site.table({"lookup.keys": "id", "lookup.write.mode": "upsert"})
    table.write(rows(1, 2))
    table.write(rows(2, 3))
    with table.transaction() as transaction:
        transaction.write(rows(3, 4), "append")
    assert sorted(table.scan()["id"].to_pylist()) == [1, 2, 3, 4]
    with pytest.raises(errors.OptionError, match=r"lookup\.write\.mode = 'upsert' is for the mode append"):
        table.write(rows(5), "overwrite")


def test_a_batch_of_a_name_is_written_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """`lookup.write.batch`: the same number, or a lower one, of a name is not written again, from whatever host; other names are."""
    site.created()

    def write(batch: str, *ids: int, mode: str = "append", host: str = "a") -> int:
        return site.table({"lookup.write.batch": batch}, host).write(rows(*ids), mode)

    first = write("orders:5", 1)
    with caplog.at_level("WARNING"):
        assert write("orders:5", 2) == write("orders:4", 3, host="b") == first == site.state().position
    assert "batch 4 of orders is not written" in caplog.text
    assert list_ids(site.table().scan()) == [1]
    assert site.files() == site.committed()
    write("orders:6", 4, mode="upsert")
    write("returns:1", 5)
    write("returns:2")
    write("returns:2", 6)  # nothing was written of it
    assert list_ids(site.table(host="late").scan()) == [1, 4, 5, 6]
    write("orders:7", 7, mode="overwrite")
    assert list_ids(site.table().scan()) == [7]
    assert [site.table(host=host).metrics()["batchSkippedCount"] for host in ("a", "b")] == [1, 1]
