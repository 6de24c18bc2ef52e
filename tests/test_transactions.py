"""Transactions: what they see, what others see of them, and what is left of those that end badly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import (
    CommitUnknownError,
    NonUniqueKeyError,
    OptionError,
    SchemaError,
    UfsError,
    UfsNotFoundError,
    UfsPermissionError,
    UfsTimeoutError,
    UfsUnavailableError,
    WriteConflictError,
)
from pyspark_lookup.table.log import WriteMode
from tests.fuzzing import MORE
from tests.test_by_key import MODES, Row, rows_of, table_of, writes
from tests.test_compaction import failing
from tests.test_writing import SCHEMA, Site, ids_of, put, rows, site

__all__ = ["site"]


def kinds(path: Path) -> list[str]:
    return [json.loads(file.read_text())["kind"] for file in sorted((path / "_lookup" / "log").iterdir())]


def test_the_list_marks_its_own_id(site: Site) -> None:
    """The list of write ids of a transaction lets its own writes through, and nothing that others began since."""
    table = site.created()
    table.write(rows(1))
    with table.transaction() as t:
        before = t.valid_write_ids
        table.write(rows(2))
        t.write(rows(3))
        seen = t.valid_write_ids
        assert before is not None
        assert seen is not None
        assert [id_ for id_ in range(1, 5) if before.is_valid(id_)] == [1]
        assert [id_ for id_ in range(1, 5) if seen.is_valid(id_)] == [1, 3]
        assert ids_of(t.scan()) == [1, 3]
    assert ids_of(table.scan()) == [1, 2, 3]


def test_an_error_inside_takes_it_all_back(site: Site) -> None:
    """After an error in the block nothing of it is left: no row, no file, and the write is aborted."""
    table = site.created()
    table.write(rows(1))
    before = site.files()
    with pytest.raises(ZeroDivisionError), table.transaction() as t:
        t.write(rows(2))
        t.delete(pa.table({"id": [1]}))
        print(1 / 0)
    assert (ids_of(table.scan()), site.files(), kinds(site.path)[-1]) == ([1], before, "abort")
    with pytest.raises(ValueError, match="has ended"):
        t.scan()
    with pytest.raises(ValueError, match="has ended"):
        t.write(rows(3))


def test_without_writes_it_puts_no_event(site: Site) -> None:
    """Reads, no rows, and no keys are no writes: no event, no file."""
    table = site.created()
    before = kinds(site.path)
    with table.transaction() as t:
        assert t.scan().num_rows == 0
        t.write(rows())
        t.upsert(rows())
        t.delete(pa.table({"id": pa.array([], pa.int64())}))
    assert (kinds(site.path), t.position) == (before, None)


def test_a_delete_of_nothing(site: Site) -> None:
    """A transaction of which no row came commits nothing."""
    table = site.created()
    version = table.version
    with table.transaction() as t:
        t.delete(pa.table({"id": [9]}))
    assert (table.version, kinds(site.path)[-1], t.position) == (version, "abort", None)


def test_it_can_create_the_table(site: Site) -> None:
    """The first write of a transaction creates the table; before it there is nothing to read."""
    table = site.table({"lookup.keys": "id"})
    with table.transaction() as t:
        with pytest.raises(UfsNotFoundError):
            t.scan()
        t.write(rows(1))
        t.upsert(rows(1, name="new"))
        assert [row["name"] for row in t.scan().to_pylist()] == ["new"]
    assert [row["name"] for row in table.scan().to_pylist()] == ["new"]


def test_conflicts(site: Site) -> None:
    """An overwrite that others have committed since it began, or other keys: refused by name, and nothing is left."""
    table, other = site.created(), site.table(host="b")
    table.write(rows(1))
    for change, words in (
        (lambda: other.write(rows(9), "overwrite"), "replaced"),
        (lambda: other.alter(keys=["name"]), "other key columns"),
    ):
        with pytest.raises(WriteConflictError, match=words), table.transaction() as t:
            t.upsert(rows(1, name="mine"))
            change()
        assert "mine" not in table.scan().column("name").to_pylist()
    assert kinds(site.path)[-1] == "abort"


def test_what_it_refuses(site: Site) -> None:
    """Rows of other columns, keys twice, modes that are none: the transaction goes on without that write."""
    table = site.created()
    table.write(rows(1))
    with table.transaction() as t:
        with pytest.raises(SchemaError):
            t.write(pa.table({"id": [1], "other": [1]}))
        with pytest.raises(OptionError, match="mode"):
            t.write(rows(2), "replace")
        t.write(rows(2))
        with pytest.raises(NonUniqueKeyError):
            t.upsert(rows(3, 3))
        with pytest.raises(SchemaError):
            t.delete(pa.table({"id": ["x"]}))
        assert ids_of(t.scan()) == [1, 2]
    assert ids_of(table.scan()) == [1, 2]
    assert site.files() == site.committed()


def test_unique_keys(site: Site) -> None:
    """With lookup.write.unique-keys a key that is there, own or another's, is refused; one that it has deleted is not."""
    table = site.created({"lookup.write.unique-keys": "true"})
    table.write(rows(1, 2))
    with table.transaction() as t:
        t.write(rows(3))
        for wrong in (1, 3):
            with pytest.raises(NonUniqueKeyError, match=f"id = {wrong}"):
                t.write(rows(wrong))
        t.delete(pa.table({"id": [1]}))
        t.write(rows(1, name="again"))
    assert ids_of(table.scan()) == [1, 2, 3]
    with pytest.raises(NonUniqueKeyError, match="id = 5"), table.transaction() as t:
        t.write(rows(5))
        site.table(host="b").write(rows(5))
    assert ids_of(table.scan()) == [1, 2, 3, 5]


def test_new_columns(site: Site) -> None:
    """With lookup.write.merge-schema it sees columns that it adds; others when it is committed."""
    table = site.created({"lookup.write.merge-schema": "true"})
    table.write(rows(1))
    with table.transaction() as t:
        t.write(pa.table({"id": [2], "name": ["b"], "more": [7]}))
        t.write(pa.table({"id": [3], "most": ["x"]}))
        assert t.scan().column_names == ["id", "name", "more", "most"]
        assert t.scan(["more"], "id = 1").to_pylist() == [{"more": None}]
        assert table.scan().column_names == ["id", "name"]
    assert table.scan().sort_by("id").column("most").to_pylist() == [None, None, "x"]


def test_a_table_without_keys(tmp_path: Path) -> None:
    """It appends and overwrites; what is by key is refused."""
    table = LookupTable(str(tmp_path / "t"), {"lookup.cache.dir": str(tmp_path / "c")})
    table.write(rows(1))
    with table.transaction() as t:
        t.write(rows(1))
        with pytest.raises(OptionError, match="no key columns"):
            t.upsert(rows(1))
        with pytest.raises(OptionError, match="no key columns"):
            t.delete(pa.table({"id": [1]}))
    assert ids_of(table.scan()) == [1, 1]


def test_commit_and_abort_by_hand(site: Site) -> None:
    """Both end it before the block does; an abort leaves nothing, and is no error twice."""
    table = site.created()
    with table.transaction() as t:
        t.write(rows(1))
        t.commit()
        assert ids_of(table.scan()) == [1]
    with table.transaction() as t:
        t.write(rows(2))
        t.abort()
        t.abort()
    assert ids_of(table.scan()) == [1]
    assert site.files() == site.committed()


def test_a_table_that_was_dropped(site: Site) -> None:
    """Dropped and made anew: what was written before is refused by name."""
    table = site.created()
    t = table.transaction()
    t.write(rows(1))
    shutil.rmtree(site.path)
    site.table({"lookup.keys": "id"}, host="b").write(rows(5))
    for refused in (lambda: t.write(rows(2)), t.commit):
        with pytest.raises((WriteConflictError, UfsNotFoundError)):
            refused()
    assert ids_of(site.table(host="c").scan()) == [5]


def test_a_store_that_fails(site: Site) -> None:
    """A write whose files the store does not take is no part of it; one that may be in the log or not ends it badly."""
    table = site.created()
    with table.transaction() as t:
        t.write(rows(1))
        with failing(site, lambda kind, path: kind == "put" and "part" in path), pytest.raises(UfsUnavailableError):
            t.write(rows(2))
        t.write(rows(3))
    assert ids_of(table.scan()) == [1, 3]
    t = table.transaction()
    t.write(rows(4))
    with failing(site, lambda kind, path: kind == "put" and "/log/" in path), pytest.raises(UfsUnavailableError):
        t.write(rows(5))
    for goes_on in (lambda: t.write(rows(6)), t.commit):
        with pytest.raises(UfsUnavailableError, match="given up"):
            goes_on()
    assert (ids_of(table.scan()), kinds(site.path)[-1]) == ([1, 3], "abort")
    assert site.files() == site.committed()


@pytest.mark.parametrize("step", ["write", "upsert"])
@pytest.mark.parametrize("refusal", [UfsPermissionError, UfsNotFoundError, UfsUnavailableError])
def test_a_lost_answer_that_is_refused_later(site: Site, step: str, refusal: type[UfsError]) -> None:
    """A write's event arrives, its answer is lost, and the store refuses from then on: the transaction is given up, and the
    table stays as it was, whatever its caller does next."""
    table = site.created({"lookup.max-retries": "2"})
    table.write(rows(1))
    position = table.describe()["position"]
    with pytest.raises(UfsUnavailableError, match="nothing of it will be committed"), table.transaction() as t:
        t.write(rows(2))
        lose_answer_of(site, "_lookup/log/", refusal)
        with pytest.raises(UfsUnavailableError, match="given up"):
            getattr(t, step)(rows(1, 3, name="new"))
        restore(site)
        with pytest.raises(UfsUnavailableError, match="given up"):
            getattr(t, step)(rows(1, 3, name="new"))
    assert table.scan() == site.table(host="late").scan() == rows(1)
    table.upsert(rows(1, 3, name="new"))
    assert ids_of(site.table(host="later").scan()) == [1, 3]
    assert site.table({"lookup.version": str(position)}, host="past").scan() == rows(1)


@pytest.mark.parametrize("refusal", [UfsPermissionError, UfsNotFoundError, UfsUnavailableError])
def test_a_commit_whose_answer_is_lost(site: Site, refusal: type[UfsError]) -> None:
    """A commit that landed is acknowledged where the log can be asked, and unknown where it cannot: never a failure."""
    table = site.created({"lookup.max-retries": "2"})
    for lasting in (False, True):
        with table.transaction() as t:
            t.write(rows(1))
            lose_answer_of(site, "_lookup/log/", refusal, lasting)
            if lasting:
                with pytest.raises(CommitUnknownError):
                    t.commit()
            else:
                t.commit()
        restore(site)
    assert ids_of(site.table(host="late").scan()) == [1, 1]


def test_an_overwrite_inside_that_fails(site: Site) -> None:
    """Rows that do not fit in place of what the transaction has written: refused, and what it has written still counts."""
    table = site.created()
    table.write(rows(1))
    with table.transaction() as t:
        t.write(rows(2))
        with pytest.raises(SchemaError):
            t.write(pa.table({"id": ["one"]}), "overwrite")
        t.write(rows(3))
        assert ids_of(t.scan()) == [1, 2, 3]
    assert ids_of(table.scan()) == [1, 2, 3]


def lose_answer_of(site: Site, part: str, refusal: type[UfsError], lasting: bool = True) -> None:
    """Have the next put below `part` arrive unanswered, and let the store refuse what follows: everything, or one more put."""
    refused: list[str] = []

    def lost() -> None:
        for store in site.stores:
            store.before, store.after = refuse, lambda: None
        raise UfsTimeoutError("lost")

    def refuse(kind: str, subject: object) -> None:
        if lasting or (kind == "put" and not refused):
            refused.append(kind)
            raise refusal("refused")

    def watch(kind: str, subject: object) -> None:
        if kind == "put" and part in str(subject):
            for store in site.stores:
                store.after = lost

    for store in site.stores:
        store.before = watch


def restore(site: Site) -> None:
    for store in site.stores:
        store.before, store.after = lambda kind, subject: None, lambda: None


def test_one_that_dies(tmp_path: Path) -> None:
    """A process that is killed inside leaves nothing that anybody sees, and a write that is aborted after the timeout."""
    path = tmp_path / "t"
    table = LookupTable(str(path), {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "c")})
    table.write(rows(1))
    script = f"""
        import os, signal, pyarrow as pa
        from pyspark_lookup import LookupTable
        table = LookupTable({str(path)!r}, {{"lookup.cache.dir": {str(tmp_path / "d")!r}}})
        with table.transaction() as t:
            t.upsert(pa.table({{"id": [1, 2], "name": ["x", "x"]}}))
            assert t.scan().num_rows == 2
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env={**os.environ}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert kinds(path)[-1] == "write"
    for mode in MODES.values():
        reader = LookupTable(str(path), {**mode, "lookup.cache.dir": str(tmp_path / "c")})
        assert [(row["id"], row["name"]) for row in reader.scan().to_pylist()] == [(1, "a")]
        assert reader.get(2) == []


def test_a_write_that_began_before(site: Site) -> None:
    """An overwrite with a lower write id is refused after it, as after any write by key."""
    table = site.created()
    table.write(rows(1))
    writer = site.writer(host="b")
    early = writer.begin(SCHEMA, WriteMode.OVERWRITE)
    with table.transaction() as t:
        t.upsert(rows(1, name="mine"))
    with pytest.raises(WriteConflictError, match="by key"):
        writer.commit(early, put(writer, early, 7))


def replayed(state: list[Row], history: list[Any], number: int) -> list[Row]:
    for step, asked in history:
        named = {key for key in asked if None not in key} if step in ("upsert", "delete") else set()
        kept = [row for row in state if row[:2] not in named] if step != "overwrite" else []
        state = kept if step == "delete" else kept + [(*key, number) for key in asked]
    return state


@given(st.lists(st.tuples(st.lists(writes, max_size=4), writes, st.booleans()), min_size=1, max_size=4))
@settings(max_examples=12 * MORE, deadline=None)
def test_any_transactions_are_as_the_model(tmp_path_factory: pytest.TempPathFactory, history: list[Any]) -> None:
    """Random transactions, some given up, beside writes of others: what is seen inside and after is what a model says."""
    home = tmp_path_factory.mktemp("transactions")
    own = {"lookup.cache.dir": str(home / "cache")}
    table = LookupTable(str(home / "t"), {**own, "lookup.keys": "id,part"})
    table.write(table_of([]))
    state: list[Row] = []
    for number, (inside, (step, asked), given_up) in enumerate(history):
        t = table.transaction()
        for count, (how, what) in enumerate(inside):
            given_rows = table_of([(*key, number) for key in what])
            if how == "delete":
                t.delete(given_rows.select(["id", "part"]))
            else:
                t.write(given_rows, how)
            assert rows_of(t.scan()) == sorted(replayed(state, inside[: count + 1], number), key=repr)
        if step != "overwrite":  # which would make it a conflict
            beside = table_of([(*key, 100 + number) for key in asked])
            table.delete(beside.select(["id", "part"])) if step == "delete" else table.write(beside, step)
            state = replayed(state, [(step, asked)], 100 + number)
        if given_up:
            t.abort()
        else:
            try:
                t.commit()
            except WriteConflictError:
                assert "overwrite" in [how for how, _ in inside]
                assert step in ("upsert", "delete")
            else:
                overwrites = [n for n, (how, _) in enumerate(inside) if how == "overwrite"]
                # What was committed beside an overwrite after it began has a higher write id, and stays.
                later = [row for row in state if row[2] == 100 + number] if overwrites and step == "append" else []
                state = replayed(state, inside, number)
                if overwrites:
                    named = {
                        k
                        for how, ks in inside[overwrites[-1] :]
                        if how in ("upsert", "delete")
                        for k in ks
                        if None not in k
                    }
                    state += [row for row in later if row[:2] not in named]
        assert rows_of(table.scan()) == sorted(state, key=repr)
    table.close()
