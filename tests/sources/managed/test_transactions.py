"""Transactions: what they see, what others see of them, and what is left of those that end badly."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup import LookupTable, errors
from tests.support.fuzzing import fuzzed
from tests.support.managed_tables import Site, list_ids, rows

SCHEMA = pa.schema([("id", pa.int64()), ("part", pa.string()), ("v", pa.int64())])
Row = tuple[int | None, str | None, int]
keys = st.tuples(st.none() | st.integers(0, 6), st.sampled_from(["a", "b"]))
modes = st.sampled_from(["append", "append", "upsert", "upsert", "delete", "overwrite"])
writes = modes.flatmap(
    lambda mode: st.tuples(st.just(mode), st.lists(keys, min_size=1, max_size=8, unique=mode == "upsert"))
)


def make_table(rows: list[Row]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) if rows else [(), (), ()]
    return pa.table(dict(zip(SCHEMA.names, columns, strict=True)), SCHEMA)


def list_rows(table: pa.Table) -> list[Row]:
    return sorted(zip(*(table.column(name).to_pylist() for name in SCHEMA.names), strict=True), key=repr)


def kinds(path: Path) -> list[str]:
    return [json.loads(file.read_text())["kind"] for file in sorted((path / "_lookup" / "log").iterdir())]


def test_an_error_inside_takes_it_all_back(site: Site) -> None:
    """After an error in the block nothing of it is left: no row, no file, and the write is aborted."""
    table = site.created()
    table.write(rows(1))
    before = site.files()
    with pytest.raises(ZeroDivisionError), table.transaction() as t:
        t.write(rows(2))
        t.delete(pa.table({"id": [1]}))
        print(1 / 0)
    assert (list_ids(table.scan()), site.files(), kinds(site.path)[-1]) == ([1], before, "abort")
    for ended in (t.scan, lambda: t.write(rows(3))):
        with pytest.raises(ValueError, match="has ended"):
            ended()


def test_what_it_refuses(site: Site) -> None:
    """A transaction refuses rows of other columns, keys that occur twice or in a table without keys, and unknown modes, and goes on without that write."""
    table = site.created()
    table.write(rows(1))
    with table.transaction() as t:
        t.write(rows(2))
        for error, refused in (
            (errors.SchemaError, lambda: t.write(pa.table({"id": [1], "other": [1]}))),
            (errors.SchemaError, lambda: t.write(pa.table({"id": ["one"]}), "overwrite")),
            (errors.OptionError, lambda: t.write(rows(2), "replace")),
            (errors.NonUniqueKeyError, lambda: t.upsert(rows(3, 3))),
            (errors.SchemaError, lambda: t.delete(pa.table({"id": ["x"]}))),
        ):
            with pytest.raises(error):
                refused()
            assert list_ids(t.scan()) == [1, 2]
        t.write(rows(3))
    assert list_ids(table.scan()) == [1, 2, 3]
    assert site.files() == site.committed()
    with site.table({"path": f"{site.path}-keyless"}).transaction() as t:
        t.write(rows(1))
        for by_key in (t.upsert, t.delete):
            with pytest.raises(errors.OptionError, match=r"needs key columns|no key columns"):
                by_key(rows(1))


def test_a_store_that_fails(site: Site) -> None:
    """After an event that may or may not be in the log, a transaction is given up: it goes on with nothing, and says so."""
    table = site.created()
    t = table.transaction()
    t.write(rows(4))

    def fail(kind: str, subject: object) -> None:
        if kind == "put" and "/log/" in str(subject):
            raise errors.UfsUnavailableError("injected")

    site.interrupt(fail)
    with pytest.raises(errors.UfsUnavailableError):
        t.write(rows(5))
    site.interrupt()
    for goes_on in (lambda: t.write(rows(6)), t.commit):
        with pytest.raises(errors.UfsUnavailableError, match="nothing of it will be committed"):
            goes_on()
    assert (list_ids(table.scan()), kinds(site.path)[-1], site.files()) == ([], "abort", [])


def replayed(state: list[Row], history: list[Any], number: int) -> list[Row]:
    """The rows after the writes of a transaction, whose overwrites leave what others began after it, and undo its own writes by key."""
    overwrites = [place for place, (step, _) in enumerate(history) if step == "overwrite"]
    for step, keys_of_step in history[max(overwrites, default=0) :]:
        named = {key for key in keys_of_step if None not in key} if step in ("upsert", "delete") else set()
        remaining = [row for row in state if row[:2] not in named and (step != "overwrite" or row[2] == 100 + number)]
        state = remaining if step == "delete" else remaining + [(*key, number) for key in keys_of_step]
    return state


@given(st.lists(st.tuples(st.lists(writes, max_size=4), writes, st.booleans()), min_size=1, max_size=4))
@fuzzed(12)
def test_any_transactions_are_as_the_model(tmp_path_factory: pytest.TempPathFactory, history: list[Any]) -> None:
    """Random transactions, some given up, beside writes of others: what is seen inside and after is what a model says."""
    home = tmp_path_factory.mktemp("transactions")
    table = LookupTable(str(home / "t"), {"lookup.cache.dir": str(home / "cache"), "lookup.keys": "id,part"})
    table.write(make_table([]))
    state: list[Row] = []
    for number, (inside, (step, keys_of_step), given_up) in enumerate(history):
        t = table.transaction()
        for count, (how, keys_of_write) in enumerate(inside, 1):
            new = make_table([(*key, number) for key in keys_of_write])
            t.delete(new.select(["id", "part"])) if how == "delete" else t.write(new, how)
            assert list_rows(t.scan()) == sorted(replayed(state, inside[:count], number), key=repr)
        beside = make_table([(*key, 100 + number) for key in keys_of_step])
        table.delete(beside.select(["id", "part"])) if step == "delete" else table.write(beside, step)
        state = replayed(state, [(step, keys_of_step)], 100 + number)
        if given_up:
            t.abort()
            t.abort()
        else:
            conflict = step == "overwrite" or (step != "append" and "overwrite" in [how for how, _ in inside])
            try:
                t.commit()
                state = replayed(state, inside, number)
                assert step != "overwrite" or {how for how, _ in inside} <= {"delete"}  # of which nothing may have come
            except errors.WriteConflictError:
                assert conflict
        assert list_rows(table.scan()) == sorted(state, key=repr)
    table.close()
