"""Upserts whose rows lack columns: refused, unless somebody says what is to be in them; nothing committed meanwhile is lost."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import NonUniqueKeyError, SchemaError, WriteConflictError
from pyspark_lookup.sources.managed.log import NotificationLog
from tests.support.fuzzing import fuzzed
from tests.support.managed_tables import Site

KEEP, NULL = ({"lookup.write.missing-columns": text} for text in ("KEEP", "NULL"))
SCHEMA = pa.schema([("id", pa.int64()), ("a", pa.string()), ("b", pa.int64())])
Row = dict[str, Any]


def rows(*values: Row) -> pa.Table:
    """Rows with the columns of the first one."""
    return pa.Table.from_pylist(list(values), pa.schema([SCHEMA.field(name) for name in values[0]]))


def create(site: Site, *values: Row) -> LookupTable:
    table = site.table({"lookup.keys": "id", "lookup.write.compact-after": "0"})
    table.write(pa.Table.from_pylist(list(values), SCHEMA))
    return table


def read_rows(table: LookupTable) -> list[Row]:
    return table.scan().sort_by("id").to_pylist()


def test_a_missing_column_is_refused(site: Site) -> None:
    """The error names the column and both answers; nothing is written; appends may lack columns as ever."""
    table = create(site, {"id": 1, "a": "x", "b": 1})
    before = site.state().position
    for write in (table.upsert, lambda rows: table.write(rows, "upsert")):
        message = r"have no column 'b': .*lookup\.write\.missing-columns to KEEP .*or NULL .*lost"
        with pytest.raises(SchemaError, match=message):
            write(rows({"id": 1, "a": "y"}))
    assert site.state().position == before
    with pytest.raises(SchemaError, match="have no key column 'id'"):
        site.table(KEEP).upsert(rows({"a": "y"}))
    table.write(rows({"id": 2, "a": "z"}))
    assert read_rows(table) == [{"id": 1, "a": "x", "b": 1}, {"id": 2, "a": "z", "b": None}]


def test_a_key_that_two_rows_have(site: Site) -> None:
    """Whose values to keep cannot be said; nothing is written."""
    table = create(site, {"id": 1, "a": "x", "b": 1}, {"id": 1, "a": "y", "b": 2})
    twice = r"key id = 1 is in the table more than once.* value of 'b'.* delete the key's rows"
    with pytest.raises(NonUniqueKeyError, match=twice):
        site.table(KEEP).upsert(rows({"id": 1, "a": "z"}))
    with pytest.raises(NonUniqueKeyError, match="key id = 2 is in the new rows more than once: write each key once"):
        site.table(KEEP).upsert(rows({"id": 2, "a": "z"}, {"id": 2, "a": "q"}))
    assert len(read_rows(table)) == 2


IDS = st.integers(1, 4)
FULL = st.fixed_dictionaries({"id": IDS, "a": st.sampled_from("xyz"), "b": st.integers(0, 9)})
KEYLESS = FULL | FULL.map(lambda row: {**row, "id": None})
ROWS = st.lists(FULL, min_size=1, max_size=3, unique_by=lambda row: row["id"])
OTHER_WRITES = st.tuples(st.sampled_from(["upsert", "keep", "delete", "overwrite", "compact"]), ROWS)


def act(site: Site, kind: str, values: list[Row], model: dict[Any, Row]) -> None:
    """Write as another writer, to the table and to the model."""
    table = site.table({"lookup.write.compact-after": "0", **KEEP}, host="b")
    match kind:
        case "upsert":
            table.upsert(pa.Table.from_pylist(values, SCHEMA))
            model.update({row["id"]: row for row in values})
        case "keep":
            table.upsert(rows(*({"id": row["id"], "b": row["b"]} for row in values)))
            model.update({row["id"]: {**row, "a": model.get(row["id"], {"a": None})["a"]} for row in values})
        case "delete":
            table.delete(pa.table({"id": [row["id"] for row in values]}))
            for row in values:
                model.pop(row["id"], None)
        case "overwrite":
            table.write(pa.Table.from_pylist(values, SCHEMA), "overwrite")
            model.clear()
            model.update({row["id"]: row for row in values})
        case "compact":
            table.compact()


@contextlib.contextmanager
def before_events(act: Callable[[int], None]) -> Iterator[None]:
    """Do something before each event that is appended to a log, told its number; not before those of that."""
    append, count, inside = NotificationLog.append, itertools.count(1), False

    def meanwhile(log: NotificationLog, make: Callable[..., Any], after: Any = None) -> Any:
        nonlocal inside
        if not inside:
            inside = True
            act(next(count))
            inside = False
        return append(log, make, after)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NotificationLog, "append", meanwhile)
        yield


@fuzzed(20)
@given(
    first=st.lists(FULL, max_size=4, unique_by=lambda row: row["id"]),
    upserted=st.lists(KEYLESS, min_size=1, max_size=4, unique_by=lambda row: row["id"]),
    other_writes=st.dictionaries(st.integers(1, 6), OTHER_WRITES, max_size=3),
    keeps=st.booleans(),
)
@example(  # before its commit, after its write id and its files: they are written anew, and rows without a key are there once
    first=[{"id": 1, "a": "x", "b": 1}],
    upserted=[{"id": None, "a": "n", "b": 0}, {"id": 1, "a": "m", "b": 0}],
    other_writes={3: ("upsert", [{"id": 1, "a": "q", "b": 77}])},
    keeps=True,
)
def test_nothing_that_others_commit_is_lost(
    site: Site, tmp_path_factory: Any, first: list[Row], upserted: list[Row], other_writes: dict[int, Any], keeps: bool
) -> None:
    """Whatever another writer does before any of its events, a kept value is that of the commit before its own; null for a new row, or by NULL."""
    site.path = tmp_path_factory.mktemp("table") / "t"
    create(site, *first)
    model = {row["id"]: row for row in first}

    def meanwhile(number: int) -> None:
        if number in other_writes:
            act(site, *other_writes[number], model)

    table = site.table({**(KEEP if keeps else NULL), "lookup.write.compact-after": "0"})
    try:
        with before_events(meanwhile):
            table.upsert(rows(*({"a": row["a"], "id": row["id"]} for row in upserted)).rename_columns(["A", "ID"]))
    except WriteConflictError:  # an overwrite has replaced all rows since it began
        assert "overwrite" in {kind for kind, _ in other_writes.values()}
    else:
        earlier = model if keeps else {}
        model.update({row["id"]: {**row, "b": earlier.get(row["id"], {"b": None})["b"]} for row in upserted})
    expected = [model[key] for key in sorted(model, key=lambda key: (key is None, key))]
    assert read_rows(site.table()) == read_rows(site.table(host="late")) == expected
    site.table().compact()
    assert read_rows(site.table(host="later")) == expected
