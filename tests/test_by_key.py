"""Upserts and deletes: what a table holds is what a model holds, in every cache mode, and the last commit of a key counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import NonUniqueKeyError, OptionError, SchemaError, WriteConflictError
from pyspark_lookup.notifications import WriteMode
from tests.test_writing import Site, ids_of, put, rows, site

__all__ = ["site"]

SCHEMA = pa.schema([("id", pa.int64()), ("part", pa.string()), ("v", pa.int64())])
MODES: dict[str, dict[str, str]] = {
    "none": {},
    "partial": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000"},
    "full": {"lookup.cache": "FULL"},
}
Row = tuple[int | None, str | None, int]

keys = st.tuples(st.none() | st.integers(0, 6), st.sampled_from(["a", "b"]))
batches = st.lists(keys, min_size=1, max_size=8)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), batches),
        st.tuples(st.just("upsert"), st.lists(keys, min_size=1, max_size=8, unique=True)),
        st.tuples(st.just("delete"), batches),
        st.tuples(st.just("overwrite"), batches),
    ),
    min_size=1,
    max_size=8,
)


def table_of(found: list[Row]) -> pa.Table:
    columns = list(zip(*found, strict=True)) if found else [(), (), ()]
    return pa.table(dict(zip(SCHEMA.names, columns, strict=True)), SCHEMA)


def rows_of(table: pa.Table) -> list[Row]:
    return sorted(zip(*(table.column(name).to_pylist() for name in SCHEMA.names), strict=True), key=repr)


def applied(state: list[Row], step: str, asked: list[tuple[int | None, str]], version: int) -> list[Row]:
    """The model: rows with a null in their key have none, so nothing replaces or removes them."""
    named = {key for key in asked if None not in key}
    new = [(*key, version) for key in asked]
    if step == "append":
        return state + new
    if step == "overwrite":
        return new
    kept = [row for row in state if row[:2] not in named]
    return kept if step == "delete" else kept + new


@pytest.mark.parametrize("mode", MODES)
@given(steps)
@settings(max_examples=25, deadline=None)
def test_any_sequence_is_as_the_model(tmp_path_factory: pytest.TempPathFactory, mode: str, history: list[Any]) -> None:
    """Random appends, upserts, deletes and overwrites, against a list: scans, lookups of every key, and each version again."""
    home = tmp_path_factory.mktemp("by-key")
    options = {"lookup.cache.dir": str(home / "cache")}
    writer = LookupTable(str(home / "t"), {**options, "lookup.keys": "id,part"})
    writer.write(table_of([]))
    reader = LookupTable(str(home / "t"), {**options, **MODES[mode]})
    state: list[Row] = []
    known: list[tuple[int, list[Row]]] = []
    for version, (step, asked) in enumerate(history):
        before, state = state, applied(state, step, asked, version)
        given_rows = table_of([(*key, version) for key in asked])
        if step == "delete":
            position = writer.delete(given_rows.select(["id", "part"]))
        else:
            position = writer.write(given_rows, step)
        assert rows_of(reader.scan()) == sorted(state, key=repr)
        for key in ((id_, part) for id_ in range(7) for part in ("a", "b")):
            found = sorted(tuple(row[name] for name in SCHEMA.names) for row in reader.get(key))
            assert found == sorted(row for row in state if row[:2] == key)
        if step != "delete" or before != state:
            known.append((position, sorted(state, key=repr)))
    for position, expected in known:
        past = LookupTable(str(home / "t"), {**options, **MODES[mode], "lookup.version": position})
        assert rows_of(past.scan()) == expected
    for table in (writer, reader):
        table.close()


def last_event(site: Site) -> str:
    log = site.path / "_lookup" / "log"
    return str(json.loads(max(log.iterdir()).read_text())["kind"])


def test_what_an_upsert_may_not_be(site: Site, tmp_path: Path) -> None:
    """Two rows of one key, rows without the key columns' types, tables without keys: refused, and nothing is left of it."""
    table = site.created()
    table.write(rows(1, 2))
    with pytest.raises(NonUniqueKeyError, match="id = 3"):
        table.upsert(rows(3, 4, 3))
    assert (ids_of(table.scan()), last_event(site)) == ([1, 2], "abort")
    assert site.files() == site.committed()
    with pytest.raises(SchemaError):
        table.delete(pa.table({"id": ["one"]}))
    keyless = LookupTable(str(tmp_path / "keyless"), {"lookup.cache.dir": str(tmp_path / "c")})
    keyless.write(rows(1))
    for refused in (lambda: keyless.upsert(rows(1)), lambda: keyless.delete(pa.table({"id": [1]}))):
        with pytest.raises(OptionError, match="no key columns"):
            refused()


def test_a_delete_of_nothing_is_no_commit(site: Site) -> None:
    """Keys that no row has, and no keys, change nothing."""
    table = site.created()
    position = table.write(rows(1, 2))
    version = table.version
    for asked in ([9], []):
        table.delete(pa.table({"id": pa.array(asked, pa.int64())}))
    assert (table.version, ids_of(table.scan())) == (version, [1, 2])
    assert table.describe()["position"] == position


def test_the_commit_that_is_last_counts(site: Site) -> None:
    """Of two upserts of a key that began one way and end the other, the one that commits last counts; both are committed."""
    table = site.created()
    table.write(rows(1, 2))
    first, second = site.writer(host="b"), site.writer(host="c")
    one, two = first.begin(rows().schema, WriteMode.UPSERT), second.begin(rows().schema, WriteMode.UPSERT)
    ones = first.write(one, rows(1, name="one").to_batches(), "part")
    twos = second.write(two, rows(1, 3, name="two").to_batches(), "part")
    second.commit(two, twos)
    first.commit(one, ones)
    assert {(row["id"], row["name"]) for row in table.scan().to_pylist()} == {(1, "one"), (2, "a"), (3, "two")}


def test_an_append_beside_an_upsert_stays(site: Site) -> None:
    """An append that began before an upsert and is committed after it adds its rows; an overwrite that did is refused."""
    table = site.created()
    table.write(rows(1))
    writer = site.writer(host="b")
    append = writer.begin(rows().schema, WriteMode.APPEND)
    overwrite = writer.begin(rows().schema, WriteMode.OVERWRITE)
    table.upsert(rows(1, name="new"))
    writer.commit(append, put(writer, append, 5))
    assert {(row["id"], row["name"]) for row in table.scan().to_pylist()} == {(1, "new"), (5, "a")}
    with pytest.raises(WriteConflictError, match="by key"):
        writer.commit(overwrite, put(writer, overwrite, 6))
    assert ids_of(table.scan()) == [1, 5]


@pytest.mark.parametrize("mode", MODES)
def test_readers_keep_up(site: Site, mode: str) -> None:
    """A hundred small upserts and deletes, each seen at once by a reader in each mode; untouched keys stay cached."""
    table = site.created()
    table.write(pa.table({"id": range(1000), "name": ["0"] * 1000}, rows().schema))
    reader = site.table(MODES[mode], host="b")
    assert reader.get(999)[0]["name"] == "0"
    for number in range(1, 51):
        table.upsert(rows(7, 200 + number, name=str(number)))
        assert [row["name"] for row in reader.get(7)] == [str(number)]
        table.delete(pa.table({"id": [100 + number]}))
        assert reader.get(100 + number) == []
        assert reader.get(999)[0]["name"] == "0"
    assert reader.scan().num_rows == 950


def test_a_delete_outlives_an_overwrite_beside_it(site: Site) -> None:
    """What a delete hides of an append with a higher write id stays hidden when an overwrite between the two is committed."""
    table = site.created()
    writer = site.writer(host="b")
    keys = pa.table({"id": [1]})
    delete = writer.begin(keys.schema, WriteMode.DELETE)
    overwrite = writer.begin(rows().schema, WriteMode.OVERWRITE)
    table.write(rows(1, 2))
    assert writer.commit(delete, (), keys=keys) is not None
    assert ids_of(table.scan()) == [2]
    writer.commit(overwrite, put(writer, overwrite, 7))
    for mode in MODES.values():
        assert ids_of(site.table(mode, host="c").scan()) == [2, 7]
