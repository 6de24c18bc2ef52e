"""What others do in the middle of a compaction, a transaction or a write by key, and what must not come of it."""

import contextlib
import shutil
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.errors import NonUniqueKeyError, PysparkLookupError, UfsNotFoundError, WriteConflictError
from pyspark_lookup.sources.managed import Job, TableWriter
from pyspark_lookup.sources.managed.conflicts import KeyedRows
from pyspark_lookup.sources.managed.log import WriteMode
from tests.support.managed_tables import MODES, OFF, SCHEMA, Site, beside, list_ids, rows, write_ids

UNIQUE = {**OFF, "lookup.write.unique-keys": "true"}


def named(table: pa.Table) -> list[tuple[int, str]]:
    return sorted((row["id"], row["name"]) for row in table.to_pylist())


def test_a_delete_by_other_keys_beside_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a compaction runs, keys are altered there and back, and rows deleted between by the other keys."""
    table = site.created(OFF)
    table.write(rows(1, name="x"))
    table.write(rows(2, name="y"))

    def changes() -> None:
        second = site.table(OFF, host="c")
        second.alter(keys=["name"])
        site.table(OFF, host="c").delete(pa.table({"name": ["x"]}))
        second.alter(keys=["id"])

    beside(site, monkeypatch, changes)
    table.compact()
    assert list_ids(table.scan()) == [2]


def test_a_column_that_is_added_as_it_begins(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that adds a column between its write id and its look at the table keeps its values."""
    more = {**OFF, "lookup.write.merge-schema": "true"}
    table = site.created(more)
    table.write(rows(1))
    table.write(rows(3))
    writer = site.writer(more)
    job = writer.begin(pa.schema([*SCHEMA, ("more", pa.int64())]), WriteMode.APPEND)
    files = writer.write(job, pa.table({"id": [2], "name": ["b"], "more": [7]}).to_batches(), "part")
    begin = TableWriter.begin

    def begin_and_commit(self: TableWriter, schema: pa.Schema, mode: WriteMode, *more: Any) -> Job:
        compaction = begin(self, schema, mode, *more)
        if mode is WriteMode.COMPACT and files:
            writer.commit(job, list(files))
            files.clear()
        return compaction

    monkeypatch.setattr(TableWriter, "begin", begin_and_commit)
    table.compact()
    assert table.scan().sort_by("id").column("more").to_pylist() == [None, 7, None]


CHANGED = pytest.raises(WriteConflictError, match=r"key columns of .* have changed")


def test_keys_that_are_altered(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deletes, writes of unique keys and transactions are refused by name: they delete no rows by keys that differ from those they began with."""
    table = site.created(OFF)
    table.write(pa.table({"id": [1, 1], "name": ["x", "y"]}, SCHEMA))
    writer = site.writer(host="b")
    keys = writer.cast_key_table(pa.table({"id": [1]}))
    job = writer.begin(keys.schema, WriteMode.DELETE)
    with CHANGED, table.transaction() as t:
        t.write(rows(6))
        table.alter(keys=["id", "name"])
        t.delete(pa.table({"id": [1], "name": ["x"]}))
    with CHANGED:
        writer.commit(job, (), effect=writer.deletion(keys))
    with CHANGED, table.transaction() as t:
        t.write(rows(6))
        t.delete(pa.table({"id": [6], "name": ["a"]}))
        table.alter(keys=["id"])
        table.write(rows(77))
    check_new, pending = KeyedRows.check_new, [1]

    def checked(self: KeyedRows, *more: Any) -> None:
        check_new(self, *more)
        if pending:
            pending.pop()
            table.alter(keys=["name"])
            table.write(rows(78, name="78"))

    monkeypatch.setattr(KeyedRows, "check_new", checked)
    with CHANGED:
        site.table(UNIQUE, host="b").write(rows(6, name="six"))
    assert named(table.scan()) == [(1, "x"), (1, "y"), (77, "a"), (78, "78")]
    assert not site.state().open_writes()
    table = site.table({**OFF, "path": f"{site.path}-without-keys"})
    table.write(rows(1, 2))
    with CHANGED, table.transaction() as t:
        t.write(rows(3))
        table.alter(keys=["id"])
        t.upsert(rows(1, name="new"))  # what began without keys is not written by key
    assert named(table.scan()) == [(1, "a"), (2, "a")]


def test_an_append_beside_an_upsert_stays(site: Site) -> None:
    """An append that an upsert overtakes adds its rows, an overwrite is refused; what a delete has hidden stays so beside an overwrite."""
    table, writer, keys = site.created(), site.writer(host="b"), pa.table({"id": [1]})
    table.write(rows(1))
    append, overwrite = (writer.begin(rows().schema, mode) for mode in (WriteMode.APPEND, WriteMode.OVERWRITE))
    table.upsert(rows(1, name="new"))
    writer.commit(append, write_ids(writer, append, 5))
    assert {(row["id"], row["name"]) for row in table.scan().to_pylist()} == {(1, "new"), (5, "a")}
    with pytest.raises(WriteConflictError, match="a committed upsert or delete"):
        writer.commit(overwrite, write_ids(writer, overwrite, 6))
    delete = writer.begin(keys.schema, WriteMode.DELETE)
    overwrite = writer.begin(rows().schema, WriteMode.OVERWRITE)
    table.write(rows(1, 2))
    assert writer.commit(delete, (), effect=writer.deletion(keys)) is not None
    assert list_ids(table.scan()) == [2, 5]
    writer.commit(overwrite, write_ids(writer, overwrite, 7))
    for mode in MODES.values():
        assert list_ids(site.table(mode, host="c").scan()) == [2, 7]


def test_an_overwrite_beside_an_append(site: Site) -> None:
    """Rows that stay beside an overwrite, because they came later, are searched for its keys."""
    table = site.created(UNIQUE)
    writer = site.writer(UNIQUE, host="b")
    job = writer.begin(SCHEMA, WriteMode.OVERWRITE)
    second = writer.begin(SCHEMA, WriteMode.OVERWRITE)
    table.write(rows(1))
    with pytest.raises(NonUniqueKeyError, match="id = 1"):
        writer.commit(job, write_ids(writer, job, 1))
    writer.commit(second, write_ids(writer, second, 2))
    assert list_ids(table.scan()) == [1, 2]


def test_a_transaction_that_others_have_aborted(site: Site) -> None:
    """After its timeout a transaction reads nothing that would lack its own writes."""
    table = site.created(OFF)
    table.write(rows(1, 2))
    t = table.transaction()
    t.delete(pa.table({"id": [1]}))
    t.write(rows(3))
    (write,) = site.state().open_writes()
    state = site.state()
    job = Job(state.table_id, write.id, WriteMode.UPSERT, f"write-{write.id:020d}", state.definition, 0.0)
    site.writer(host="b").abort(job, (), "no sign of life")
    table.scan()
    with pytest.raises(WriteConflictError, match="others have aborted"):
        t.scan()
    with pytest.raises(WriteConflictError, match="aborted"):
        t.commit()


def test_a_table_that_is_made_anew_as_a_write_ends(site: Site) -> None:
    """Writers of the old table are refused by name, and remove none of the new table's files, which lie in directories of the same names."""
    table = site.created(OFF)
    table.write(rows(1))
    writer, t = site.writer(host="b"), table.transaction()
    job = writer.begin(SCHEMA, WriteMode.APPEND)
    files = write_ids(writer, job, 2)
    t.write(rows(3))
    shutil.rmtree(site.path)
    recreated = site.table({**OFF, "lookup.keys": "id"}, host="z")
    for id_ in (7, 8, 9):
        recreated.write(rows(id_))
    with contextlib.suppress(PysparkLookupError):
        writer.abort(job, files)
    for refused in (lambda: writer.commit(job, files), lambda: t.write(rows(2)), t.commit):
        with pytest.raises((WriteConflictError, UfsNotFoundError)):
            refused()
    assert list_ids(site.table(OFF, host="y").scan()) == [7, 8, 9]


@pytest.mark.parametrize("during_the_search", [False, True])
@pytest.mark.parametrize("mode", [WriteMode.APPEND, WriteMode.UPSERT])
def test_a_key_that_is_committed_while_it_looks(
    site: Site, monkeypatch: pytest.MonkeyPatch, mode: WriteMode, during_the_search: bool
) -> None:
    """A write sees a key that others commit before it looks for its keys, or (`during_the_search`) once it has begun to look."""
    site.created(UNIQUE)
    first, second = site.writer(UNIQUE), site.writer(UNIQUE, host="b")
    job, beside_it = first.begin(SCHEMA, mode), second.begin(SCHEMA, mode)
    files = first.write(job, rows(1, name="mine").to_batches(), "part")
    second_files = second.write(beside_it, rows(1, name="theirs").to_batches(), "part")
    keys_of = KeyedRows.read_keys
    looked: list[str] = []

    def look_and_commit(self: KeyedRows, *args: Any) -> pa.Table:
        looked.append("")
        if len(looked) == 1:
            second.commit(beside_it, second_files)
        return keys_of(self, *args)

    if during_the_search:
        monkeypatch.setattr(KeyedRows, "read_keys", look_and_commit)
    else:
        second.commit(beside_it, second_files)
    if mode is WriteMode.APPEND:
        with pytest.raises(NonUniqueKeyError, match="id = 1"):
            first.commit(job, files)
    else:
        first.commit(job, files)
    assert named(site.table(UNIQUE).scan()) == [(1, "theirs" if mode is WriteMode.APPEND else "mine")]
    assert site.state().open_writes() == []
    assert (files[0].path in site.files()) is (mode is WriteMode.UPSERT)
