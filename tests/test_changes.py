"""The changes of a managed table: played back they are its versions, whatever was done to it."""

from __future__ import annotations

import collections
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_lookup.base.errors import NotSupportedError, SchemaError, VersionGoneError
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.managed.change_feed import (
    CHANGE_TYPE,
    LOG_POSITION,
    change_columns,
    changed_rows,
    changes_between,
    cost,
    snapshot_of,
)
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.table.log import TableState, WriteMode
from pyspark_lookup.table.model import Kind
from tests.fuzzing import MORE
from tests.test_by_key import SCHEMA, Model, steps
from tests.test_compaction import OFF
from tests.test_writing import Site, rows, site

__all__ = ["site"]

Row = tuple[Any, ...]


def state_of(site: Site, more: dict[str, str] | None = None) -> tuple[Any, Any, TableState]:
    options = LookupOptions.parse(site.options("stream", more or {}))
    engine = site.runtime.engine(options)
    state = engine.reader.resolver.log_of(options)
    assert state is not None
    return engine.reader, engine.reader.resolver.table_of(options, Kind.MANAGED), state


def changes_of(
    site: Site, after: int = 1, appends_only: bool = False, where: str | None = None
) -> list[dict[str, Any]]:
    reader, table, state = state_of(site)
    columns = change_columns(state.definition.schema)
    wanted = None if where is None else parse_where(where, columns)
    tasks = changes_between(table, state, after, state.position, appends_only)
    batches = changed_rows(reader.versions.files, list(tasks), columns, wanted)
    return [row for batch in batches for row in batch.to_pylist()]


def played(rows_before: collections.Counter[Row], found: list[Row]) -> collections.Counter[Row]:
    """The rows after some changes; what is taken away must be there."""
    now = collections.Counter(rows_before)
    for row in found:
        if row[-1] in ("delete", "update_preimage"):
            now[row[:-1]] -= 1
    for row in found:
        if row[-1] in ("insert", "update_postimage"):
            now[row[:-1]] += 1
    assert all(count >= 0 for count in now.values())
    return +now


@given(history=steps, small=st.sampled_from([0, 4000, 2**26]))
@settings(max_examples=12 * MORE, deadline=None)
def test_changes_played_back_are_the_versions(
    tmp_path_factory: pytest.TempPathFactory, history: list[Any], small: int
) -> None:
    """Random histories without vacuums: from any version on the changes lead to every later one; both images of an update have its key."""
    model = Model(tmp_path_factory.mktemp("changes"), {}, small)
    model.note()
    for step, write, beside, _ in history:
        if step != "vacuum":
            model.take(step, write, beside)
    options = LookupOptions.parse({**model.own, "path": model.path})
    reader = model.engine.reader
    table = reader.resolver.table_of(options, Kind.MANAGED)
    state = reader.resolver.log_of(options)
    assert state is not None
    columns = change_columns(SCHEMA)
    begin = min(model.versions)
    now = collections.Counter(model.versions[begin])
    whole = changed_rows(reader.versions.files, snapshot_of(table, state, begin), columns, None)
    snapshot = [row for batch in whole for row in batch.to_pylist()]
    assert collections.Counter(tuple(row[name] for name in SCHEMA.names) for row in snapshot) == now
    for change in state.changes:
        if change.position <= begin:
            continue
        tasks = changes_between(table, state, change.position - 1, change.position, False)
        found = [
            row
            for batch in changed_rows(reader.versions.files, list(tasks), columns, None)
            for row in batch.to_pylist()
        ]
        assert {row[LOG_POSITION] for row in found} <= {change.position}
        assert len(found) <= cost(state, change)[0]
        now = played(now, [tuple(row[name] for name in [*SCHEMA.names, CHANGE_TYPE]) for row in found])
        if change.position in model.versions:
            assert now == collections.Counter(model.versions[change.position])
        images = [{(row["id"], row["part"]) for row in found if row[CHANGE_TYPE] == kind} for kind in ("update_preimage", "update_postimage")]  # fmt: skip
        assert images[0] == images[1]
    every = changes_between(table, state, begin, state.position, False)
    found = [
        row for batch in changed_rows(reader.versions.files, list(every), columns, None) for row in batch.to_pylist()
    ]
    begun = collections.Counter(model.versions[begin])
    for row in found:  # those of all commits together: what is left is what is there
        begun[tuple(row[name] for name in SCHEMA.names)] += (
            1 if row[CHANGE_TYPE] in ("insert", "update_postimage") else -1
        )
    assert +begun == now
    model.close()


def test_the_rows_there_are_have_the_positions_of_their_commits(site: Site) -> None:
    """A stream begins with the rows there are: each at the commit that added it; what was folded is at the compaction."""
    table = site.created(OFF)
    first, second = table.write(rows(1, 2)), table.upsert(rows(2, 3, name="b"))
    table.alter(properties={"a": "b"})

    def seen() -> dict[int, int]:
        reader, managed, state = state_of(site)
        columns = change_columns(state.definition.schema)
        batches = changed_rows(reader.versions.files, snapshot_of(managed, state, state.position), columns, None)
        found = [row for batch in batches for row in batch.to_pylist()]
        assert {row[CHANGE_TYPE] for row in found} == {"insert"}
        return {row["id"]: row[LOG_POSITION] for row in found}

    assert seen() == {1: first, 2: second, 3: second}
    folded = table.compact()
    last = table.write(rows(4))
    assert seen() == {1: folded, 2: folded, 3: folded, 4: last}


def test_kinds_of_changes(site: Site) -> None:
    """Appends insert; upserts insert or update; deletes delete; an overwrite deletes and inserts; a compaction changes nothing."""
    table = site.created(OFF)
    at = [table.write(rows(1, 2)), table.upsert(rows(2, 3, name="b")), table.delete(pa.table({"id": [1]}))]
    table.compact()
    at.append(table.write(rows(7), "overwrite"))
    found = [(row[LOG_POSITION], row[CHANGE_TYPE], row["id"], row["name"]) for row in changes_of(site)]
    assert sorted(found) == sorted(
        [
            (at[0], "insert", 1, "a"),
            (at[0], "insert", 2, "a"),
            (at[1], "update_preimage", 2, "a"),
            (at[1], "update_postimage", 2, "b"),
            (at[1], "insert", 3, "b"),
            (at[2], "delete", 1, "a"),
            (at[3], "delete", 2, "b"),
            (at[3], "delete", 3, "b"),
            (at[3], "insert", 7, "a"),
        ]
    )
    assert changes_of(site, after=at[2], where="id = 3 AND _change_type = 'delete'") == [
        {"id": 3, "name": "b", CHANGE_TYPE: "delete", LOG_POSITION: at[3]}
    ]


def test_a_transaction_is_one_change(site: Site) -> None:
    """Rows that it wrote and took back itself are no change; what it did to others' rows is, once."""
    table = site.created(OFF)
    table.write(rows(1, 2))
    with table.transaction() as t:
        t.write(rows(3, 4))
        t.upsert(rows(1, 3, name="b"))
        t.upsert(rows(1, name="c"))
        t.delete(pa.table({"id": [2, 4]}))
    found = [(row[CHANGE_TYPE], row["id"], row["name"]) for row in changes_of(site) if row[LOG_POSITION] == t.position]
    assert sorted(found) == [
        ("delete", 2, "a"),
        ("insert", 3, "b"),
        ("update_postimage", 1, "c"),
        ("update_preimage", 1, "a"),
    ]


def test_two_deletes_of_one_row(site: Site) -> None:
    """A row that two writers delete at once is deleted by the first of them."""
    table = site.created(OFF)
    table.write(rows(1))
    writer = site.writer(host="b")
    keys = pa.table({"id": [1]})
    late = writer.begin(rows().schema, WriteMode.UPSERT)
    files = writer.write(late, rows(1, name="late").to_batches(), "part")
    effect = writer.effect(late, files)
    state = site.state()
    effect.look(state, state.definition)
    first = table.delete(keys)
    writer.commit(late, files, effect=effect)
    found = [(row[LOG_POSITION], row[CHANGE_TYPE], row["name"]) for row in changes_of(site, after=first - 1)]
    assert found == [(first, "delete", "a"), (site.state().position, "insert", "late")]


def test_keys_that_were_changed(site: Site) -> None:
    """Each commit's updates are told by the keys of its time."""
    table = site.created(OFF)
    table.write(rows(1, 2))
    table.upsert(rows(1, name="b"))
    table.alter(keys=["name"])
    table.upsert(pa.table({"id": [9], "name": ["b"]}))
    found = [(row[CHANGE_TYPE], row["id"], row["name"]) for row in changes_of(site)]
    assert sorted(found) == [
        ("insert", 1, "a"),
        ("insert", 2, "a"),
        ("update_postimage", 1, "b"),
        ("update_postimage", 9, "b"),
        ("update_preimage", 1, "a"),
        ("update_preimage", 1, "b"),
    ]


def test_what_is_no_stream_of_rows(site: Site) -> None:
    """Who asks for rows that are added meets an upsert, a delete or an overwrite by name; appends and compactions he does not."""
    table = site.created(OFF)
    table.write(rows(1))
    table.write(rows(2))
    table.compact()
    assert [row["id"] for row in changes_of(site, appends_only=True)] == [1, 2]
    for change in (lambda: table.upsert(rows(1)), lambda: table.delete(pa.table({"id": [1]})), lambda: table.write(rows(5), "overwrite")):  # fmt: skip
        position = site.state().position
        change()
        with pytest.raises(NotSupportedError, match=r"takes rows away.*lookup.view = changes"):
            changes_of(site, after=position, appends_only=True)
    assert changes_of(site, after=position - 1, appends_only=False) != []


def test_what_was_vacuumed(site: Site) -> None:
    """Changes whose files are gone are an error that says how to go on; later ones are not."""
    table = site.created(OFF)
    first = table.write(rows(1))
    second = table.upsert(rows(1, name="b"))
    table.compact()
    table.vacuum("0 s", force=True)
    last = table.upsert(rows(1, name="c"))
    for after in (1, first):
        with pytest.raises(VersionGoneError, match="vacuumed before it was read"):
            changes_of(site, after=after)
    assert {row[LOG_POSITION] for row in changes_of(site, after=second)} == {last}


def test_columns_of_that_name(site: Site) -> None:
    """A table that has a column _change_type cannot say its changes beside it."""
    with pytest.raises(SchemaError, match="_change_type"):
        change_columns(pa.schema([("_change_type", pa.int64())]))
