"""Tables of other systems: what a function is asked, and which of its answers are taken."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import LookupFunctionError, OptionError, PysparkLookupError, SchemaError
from pyspark_lookup.base.metrics import UNSET
from pyspark_lookup.cache.memory import KEY_INDEX
from tests.providers.common import (
    CACHES,
    KINDS,
    ONCE,
    PARTIAL,
    SCHEMA,
    USERS,
    Answer,
    AsyncByKey,
    ByKey,
    Desk,
    Options,
    SyncFunction,
    beside,
    counted,
    ids,
    in_turn,
    made,
    names,
    pairs,
    raises,
    rows_of,
    users,
)


def named(keys: pa.Table) -> pa.Table:
    """A row named x for every key."""
    return keys.append_column("name", pa.array(["x"] * keys.num_rows))


def test_batches_by_default(desk: Desk) -> None:
    """Without a size of its own a function gets all keys in one call, an asynchronous one 128."""
    for kind, sizes in (("sync", [300]), ("async", [44, 128, 128])):
        function = made(kind, named)
        assert len(pairs(desk.serve(function), *range(300))) == 300
        assert sorted(len(keys) for keys in function.log.asked) == sizes


@KINDS
@CACHES
def test_a_function_is_opened_once(desk: Desk, kind: str, cache: Options) -> None:
    """Each process opens its function once, before the first lookup; nothing happens before one is needed."""
    first, second = (made(kind, rows_of(USERS)) for _ in range(2))
    table = desk.serve([first, second], cache)
    assert (table.get(None), pairs(table, None, None), table.describe()["columns"]["name"]) == ([], [], "string")
    assert first.log.names == []
    for key in (1, 2, 2, 4):
        table.get(key)
    assert first.log.names[:2] == ["open", "lookup"]
    desk.restart()
    table.get(5)
    table.get(6)
    assert first.log.names.count("open") == 1
    assert second.log.names == ["open", "lookup", "lookup"]


@KINDS
def test_one_thread(desk: Desk, kind: str) -> None:
    """However many threads ask, a function is used by one that is none of them, one lookup after the other."""
    running: list[int] = []
    overlaps: list[int] = []

    def answer(keys: pa.Table) -> pa.Table:
        running.append(1)
        overlaps.append(len(running))
        found = rows_of(USERS)(keys)
        running.pop()
        return found

    function = made(kind, answer)
    table = desk.serve(function)
    waits = [beside(lambda: [names(table, key) for key in (1, 2, 3, 1)]) for _ in range(4)]
    for wait in waits:
        assert wait() == [["Alice"], ["Bob", "Charlie"], [], ["Alice"]]
    (thread,) = {thread for _, thread in function.log.events}
    assert thread != threading.get_ident()
    assert len(function.log.loops) == (kind == "async")  # no loop is seen to run where none is needed
    assert set(overlaps) == {1}
    assert function.log.names.count("open") == 1


@pytest.mark.parametrize("make", [ByKey, AsyncByKey])
@CACHES
def test_one_key_at_a_time(desk: Desk, make: Callable[[], ByKey | AsyncByKey], cache: Options) -> None:
    """A function of single keys gets each as a dictionary, once if it is cached; None and nothing both mean no rows."""
    function = make()
    table = desk.serve(function, cache)
    assert table.get(3) == []
    for _ in range(2):
        assert pairs(table, 3, 2, 1, 2) == [(1, "Bob"), (1, "Charlie"), (2, "Alice"), (3, "Bob"), (3, "Charlie")]
    times = [1, 1, 1] if cache else [2, 2, 3]
    assert [function.asked.count({"id": key}) for key in (1, 2, 3)] == times
    if cache:
        assert counted(table, "numCachedRecords") == {"hitCount": 6, "missCount": 3, "loadCount": 3, "numCachedRecords": 4}  # fmt: skip
    if isinstance(function, AsyncByKey):
        assert set(function.sizes) == {1}  # without a size of its own


# --- keys of other kinds ---------------------------------------------------------------------------------

KEY_TYPES = [
    (pa.int32(), pa.array([7], pa.int8())),
    (pa.int64(), pa.array([7], pa.uint16())),
    (pa.string(), pa.array(["ä"], pa.large_string())),
    (pa.string(), pa.array(["ä"]).dictionary_encode()),
    (pa.large_string(), pa.array(["ä"])),
    (pa.binary(), pa.array([b"\0"], pa.large_binary())),
    (pa.bool_(), pa.array([False])),
    (pa.date32(), pa.array([datetime.date(2024, 2, 29)])),
    (pa.timestamp("us", "UTC"), pa.array([datetime.datetime(2024, 2, 29)], pa.timestamp("ms", "UTC"))),
    (pa.decimal128(10, 2), pa.array([decimal.Decimal("1.10")], pa.decimal128(5, 2))),
    (pa.float64(), pa.array([0.5], pa.float32())),
]


@pytest.mark.parametrize(("kind", "keys"), KEY_TYPES, ids=[f"{kind} {keys.type}" for kind, keys in KEY_TYPES])
@CACHES
def test_keys_have_the_tables_types(desk: Desk, kind: pa.DataType, keys: pa.Array, cache: Options) -> None:
    """In whatever type keys are given, a function gets columns named and typed as the table's."""
    function = SyncFunction(named)
    table = desk.serve(function, {**cache, "lookup.keys": "code"}, pa.schema([("code", kind), ("name", pa.string())]))
    assert table.get_many(pa.table({"code": keys})).column("name").to_pylist() == ["x"]
    (asked,) = function.log.tables
    stored = pa.string() if kind == pa.large_string() else kind
    assert (asked.column_names, asked.schema.types) == (["code"], [stored])
    assert asked.column(0).to_pylist() == keys.cast(kind).to_pylist()


@KINDS
@CACHES
def test_composite_keys(desk: Desk, kind: str, cache: Options) -> None:
    """Keys of several columns, in any order and with a null in any of them, are one key each."""
    schema = pa.schema([("name", pa.string()), ("city", pa.string()), ("id", pa.int64())])
    values = [("Alice", "Bern", 1), (None, "Rome", 1), ("Bob", "Bern", 2)]
    rows = [dict(zip(schema.names, row, strict=True)) for row in values]

    def answer(keys: pa.Table) -> pa.Table:
        wanted = {(key["id"], key["city"]) for key in keys.to_pylist()}
        return pa.Table.from_pylist([row for row in rows if (row["id"], row["city"]) in wanted], schema)

    function = made(kind, answer)
    options = {**cache, **ONCE, "lookup.keys": "id,city"}
    table = desk.serve(function, options, schema)
    found = table.get_many(pa.table({"city": ["Bern", "Rome", None, "Bern", "Bern"], "id": [1, 1, 1, None, 1]}))
    assert found.column_names == ["id", "city", "name", KEY_INDEX]
    assert found.column("name").to_pylist() == ["Alice", None, "Alice"]
    assert found.column(KEY_INDEX).to_pylist() == [0, 1, 4]
    assert function.log.asked == [[(1, "Bern"), (1, "Rome")]]
    assert function.log.tables[0].schema.equals(pa.schema([("id", pa.int64()), ("city", pa.string())]))
    assert table.get((2, "Bern")) == [{"id": 2, "city": "Bern", "name": "Bob"}]
    assert table.get((2, None)) == []
    if cache:
        assert counted(table) == {"hitCount": 1, "missCount": 3, "loadCount": 3}
    function.answer = lambda keys: pa.Table.from_pylist(rows, schema)
    with pytest.raises(LookupFunctionError, match=r"id = 1, city = 'Bern', which is not among key id = 7, city = 'x'$"):
        table.get((7, "x"))


@KINDS
@CACHES
def test_float_keys(desk: Desk, kind: str, cache: Options) -> None:
    """NaN is a key, asked for once whatever its bits; -0.0 is 0.0, and rows with either answer it, each as it was given."""
    rows = pa.table({"id": [-0.0, math.nan, 0.0, 1.5], "n": [0, 1, 2, 3]})
    function = made(kind, lambda keys: rows)
    table = desk.serve(function, cache, rows.schema)
    other_nan = np.frombuffer(np.uint64(0xFFF8000000000001).tobytes(), np.float64)[0]
    asked = pa.table({"id": pa.array([math.nan, 0.0, -0.0, other_nan, 1.5], pa.float64())})
    for _ in range(2):
        found = table.get_many(asked)
        assert found.column(KEY_INDEX).to_pylist() == [0, 1, 1, 2, 2, 3, 4]
        assert found.column("n").to_pylist() == [1, 0, 2, 0, 2, 1, 3]
        assert [math.copysign(1, zero) for zero in found.column("id").to_pylist()[1:3]] == [-1, 1]
    assert [len(keys) for keys in function.log.asked] == ([3] if cache else [3, 3])
    if cache:
        assert counted(table) == {"hitCount": 7, "missCount": 3, "loadCount": 3}


def test_keys_that_the_column_cannot_hold(desk: Desk) -> None:
    """A number too large for the key column is nobody's key, and is not asked for."""
    function = SyncFunction(named)
    table = desk.serve(function, schema=pa.schema([("id", pa.int32()), ("name", pa.string())]))
    assert pairs(table, 2**40, 7) == [(1, "x")]
    assert function.log.asked == [[7]]
    with pytest.raises(SchemaError):
        table.get_many(pa.table({"id": ["seven"]}))


# --- what is taken ----------------------------------------------------------------------------------------------


FORMS: dict[str, Callable[[pa.Table], Any]] = {
    "a batch": lambda rows: rows.combine_chunks().to_batches()[0],
    "narrow integers": lambda rows: rows.set_column(0, "id", rows.column("id").cast(pa.int8())),
    "unsigned integers": lambda rows: rows.set_column(0, "id", rows.column("id").cast(pa.uint32())),
    "large text": lambda rows: rows.set_column(1, "name", rows.column("name").cast(pa.large_string())),
    "a view of text": lambda rows: rows.set_column(1, "name", rows.column("name").cast(pa.string_view())),
    "codes": lambda rows: rows.set_column(1, "name", rows.column("name").dictionary_encode()),
    "codes of keys": lambda rows: rows.set_column(0, "id", rows.column("id").dictionary_encode()),
    "chunks": lambda rows: pa.concat_tables([rows.slice(n, 1) for n in range(rows.num_rows)]),
    "chunks of codes": lambda rows: pa.concat_tables(
        [pa.table({"id": [row["id"]], "name": pa.array([row["name"]]).dictionary_encode()}) for row in rows.to_pylist()]
    ),
    "an empty chunk": lambda rows: pa.concat_tables([rows.slice(0, 0), rows]),
    "a slice": lambda rows: pa.concat_tables([rows, rows]).combine_chunks().slice(rows.num_rows, rows.num_rows),
    "no null allowed": lambda rows: rows.cast(pa.schema([pa.field(f.name, f.type, False) for f in SCHEMA])),
    "other order": lambda rows: rows.select(["name", "id"]),
}


@pytest.mark.parametrize("form", FORMS)
@CACHES
def test_answers_in_other_forms(desk: Desk, form: str, cache: Options) -> None:
    """An answer may have narrower types, codes, chunks and another order of columns; the table's types come out."""
    table = desk.serve(SyncFunction(lambda keys: FORMS[form](rows_of(USERS)(keys))), cache)
    for _ in range(2):
        assert pairs(table, 2, 3, 1) == [(0, "Bob"), (0, "Charlie"), (2, "Alice")]
        found = table.get_many(ids(1)).schema
        assert (found.names, found.types) == (["id", "name", KEY_INDEX], [pa.int64(), pa.string(), pa.int64()])


NOTHING: dict[str, Any] = {
    "typed": SCHEMA.empty_table(),
    "untyped": pa.table({"id": [], "name": []}),
    "no chunk": pa.Table.from_batches([], SCHEMA),
    "a batch": pa.RecordBatch.from_arrays([pa.array([], field.type) for field in SCHEMA], schema=SCHEMA),
}


@pytest.mark.parametrize("nothing", NOTHING)
@KINDS
@CACHES
def test_answers_without_rows(desk: Desk, kind: str, nothing: str, cache: Options) -> None:
    """A table without rows says that no key has any."""
    function = made(kind, lambda keys: NOTHING[nothing])
    table = desk.serve(function, cache)
    assert (table.get(1), pairs(table, 1, 2)) == ([], [])


@CACHES
def test_other_columns_of_the_schema_are_left_out(desk: Desk, cache: Options) -> None:
    """Columns that were not asked for may come, if the schema has them, and may be wrong in nothing but their values."""
    wide = pa.table({"city": ["Bern"], "id": [1], "name": ["Alice"]})
    table = desk.serve(SyncFunction(lambda keys: wide), {**cache, "lookup.columns": "name"}, wide.schema)
    assert table.get(1) == [{"id": 1, "name": "Alice"}]


@CACHES
def test_values_of_all_kinds(desk: Desk, cache: Options) -> None:
    """Nulls, nested values and values of every width come back as they were answered."""
    tag = pa.struct([("k", pa.string()), ("v", pa.int32())])
    kinds = {"tags": pa.list_(pa.field("element", tag)), "seen": pa.timestamp("us", "UTC"), "share": pa.float32()}
    schema = pa.schema({"id": pa.int64(), "amount": pa.decimal128(12, 3), **kinds, "raw": pa.binary()})
    moment = datetime.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=datetime.timezone.utc)
    rows = [
        {"id": 1, "amount": decimal.Decimal("1.125"), "tags": [{"k": "a", "v": 1}, None], "seen": moment},
        {"id": 1, "amount": None, "tags": [], "seen": None, "share": math.inf, "raw": b"\0"},
        {"id": 2},
    ]
    answer = pa.Table.from_pylist(rows, schema)
    table = desk.serve(SyncFunction(lambda keys: answer), cache, schema)
    for _ in range(2):
        found = table.get_many(ids(1, 2))
        assert found.drop_columns([KEY_INDEX]).equals(answer)
        assert found.column(KEY_INDEX).to_pylist() == [0, 0, 1]


@pytest.mark.parametrize("columns", [SCHEMA, pa.schema([("id", pa.int64())])], ids=["chosen", "all there are"])
@CACHES
def test_key_columns_alone(desk: Desk, columns: pa.Schema, cache: Options) -> None:
    """A table of which only the keys are wanted says which of them are there."""
    function = SyncFunction(lambda keys: rows_of(USERS)(keys).select(columns.names))
    table = desk.serve(function, {**cache, "lookup.columns": "id"}, columns)
    for _ in range(2):
        assert table.get_many(ids(1, 3, 2)).to_pydict() == {"id": [1, 2, 2], KEY_INDEX: [0, 2, 2]}


# --- what is refused --------------------------------------------------------------------------------------------


UNASKED = "which is not among"


class Panic(BaseException):
    """What libraries in Rust raise when they panic."""


def table(**columns: Any) -> Answer:
    """Answers with these columns, whatever is asked."""
    return lambda keys: pa.table(columns)


def columns(*named: tuple[str, list[Any]]) -> Answer:
    """The same where names may be there twice."""
    return lambda keys: pa.Table.from_arrays([pa.array(values) for _, values in named], [name for name, _ in named])


BAD: dict[str, tuple[Answer, str]] = {
    "raises": (raises(ValueError("no route to host")), r"ValueError\('no route to host'\)"),
    "raises a timeout of its own": (raises(TimeoutError("theirs")), r"TimeoutError\('theirs'\)"),
    "raises the end of an iteration": (raises(StopIteration()), "StopIteration"),
    "raises one of our errors": (raises(OptionError("theirs")), r"OptionError\('theirs'\)"),
    "is cancelled": (raises(asyncio.CancelledError()), "CancelledError"),
    "exits": (raises(SystemExit(3)), "SystemExit"),
    "panics": (raises(Panic("index out of bounds")), "Panic"),
    "None": (lambda keys: None, "returned NoneType"),
    "a list": (lambda keys: [{"id": 1, "name": "x"}], "returned list"),
    "an array": (lambda keys: keys.column("id"), "returned ChunkedArray"),
    "no columns": (table(), "column 'id' is missing"),
    "no key column": (table(name=["x"]), "column 'id' is missing; it returned name, its schema has id, name"),
    "a column less": (table(id=[1]), "column 'name' is missing"),
    "a column less without rows": (table(id=pa.array([], pa.int64())), "column 'name' is missing"),
    "another spelling": (table(ID=[1], name=["x"]), "column 'id' is missing"),
    "an unknown column": (table(id=[1], name=["x"], zip=[1]), "column 'zip' is not in its schema"),
    "the key column twice": (columns(("id", [1]), ("id", [1]), ("name", ["x"])), "column 'id' is there twice"),
    "another column twice": (columns(("id", [1]), ("name", ["x"]), ("name", ["y"])), "column 'name' is there twice"),
    "another type": (table(id=[1], name=[5]), "column 'name' is int64, its schema says string"),
    "another type of key": (table(id=["1"], name=["x"]), "column 'id' is string, its schema says int64"),
    "a wider type": (table(id=[1.0], name=["x"]), "column 'id' is double, its schema says int64"),
    "a type that Spark lacks": (table(id=[1], name=pa.array([1], pa.time64("us"))), "name"),
    "another type, in part null": (table(id=[1, 1], name=[5, None]), "column 'name' is int64"),
    "a key that nobody asked for": (table(id=[1, 77], name=["x", "y"]), f"id = 77, {UNASKED}"),
    "a null key": (table(id=[1, None], name=["x", "y"]), f"id = None, {UNASKED}"),
}


@pytest.mark.parametrize("bad", BAD)
@KINDS
@CACHES
def test_a_bad_answer_is_an_error_and_nothing_else(desk: Desk, kind: str, bad: str, cache: Options) -> None:
    """Whatever is wrong, the error names the provider and the key and says what; nothing is kept, and a good answer is taken next."""
    answer, says = BAD[bad]
    function = made(kind, in_turn(answer, rows_of(USERS)))
    table = desk.serve(function, {**cache, **ONCE})
    with pytest.raises(LookupFunctionError, match=says) as caught:
        table.get(1)
    assert "provider_1:make" in str(caught.value)
    assert "id = 1" in str(caught.value)
    assert table.metrics()["latestLoadTime"] == UNSET
    assert table.metrics()["numCachedRecords"] <= 0
    assert counted(table) == ({"missCount": 1, "numLoadFailures": 1} if cache else {})
    assert (names(table, 1), names(table, 1)) == (["Alice"], ["Alice"])
    assert counted(table) == ({"missCount": 2, "numLoadFailures": 1, "loadCount": 1, "hitCount": 1} if cache else {})
    assert function.log.names == ["open", "lookup", "lookup"] + ([] if cache else ["lookup"])


def test_a_row_of_another_call_is_not_taken(desk: Desk) -> None:
    """What a call answers is about its own keys, also where another call of the same lookup asks for the others."""
    table = desk.serve(SyncFunction(lambda keys: rows_of(USERS)(ids(1, 2)), 1), ONCE)
    with pytest.raises(LookupFunctionError, match=f"id = [12], {UNASKED} key id = [12]$"):
        pairs(table, 1, 2)


@pytest.mark.parametrize("retries", [0, 2])
@KINDS
def test_opening_may_fail(desk: Desk, kind: str, retries: int) -> None:
    """A function that could not be opened is not used; opening is tried again as a lookup is, with attempts of its own."""
    function = made(kind, in_turn(raises(OSError()), rows_of(USERS)) if retries else rows_of(USERS))
    function.opens = in_turn(*[raises(OSError("refused"))] * (retries or 1), lambda: None)
    table = desk.serve(function, {**PARTIAL, "lookup.max-retries": retries})
    if not retries:
        with pytest.raises(LookupFunctionError, match=r"id = 1: OSError\('refused'\)"):
            table.get(1)
        assert function.log.events == []
        assert counted(table) == {"missCount": 1, "numLoadFailures": 1}
    assert names(table, 1) == ["Alice"]
    assert function.log.names == ["open", "lookup", "lookup"][: 3 if retries else 2]
    assert len(desk.clock.slept) == (3 if retries else 0)


BAD_VERSIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "a number": (lambda: 5, r"version\(\) of provider provider_1:make returned 5: return a text"),
    "None": (lambda: None, "returned None: return a text"),
    "nothing": (lambda: "", "returned '': return a text"),
    "bytes": (lambda: b"1", "returned b'1': return a text"),
    "an error": (raises(ValueError("gone")), r"provider provider_1:make failed, version\(\): ValueError\('gone'\)"),
}


@pytest.mark.parametrize("bad", BAD_VERSIONS)
@CACHES
def test_a_bad_version(desk: Desk, bad: str, cache: Options) -> None:
    """Nothing is answered while the version is not known, not even what is held; then it is again."""
    function = users()
    version, says = BAD_VERSIONS[bad]
    table = desk.serve(function, {**cache, **ONCE}, version=in_turn(lambda: "1", version, lambda: "1"))
    assert names(table, 1) == ["Alice"]
    with pytest.raises(LookupFunctionError, match=says):
        table.get(1)
    assert names(table, 1) == ["Alice"]
    assert function.log.asked == ([[1]] if cache else [[1], [1]])


@pytest.mark.parametrize("size", [-1, "5", 2.5])
def test_a_size_that_is_none(desk: Desk, size: Any) -> None:
    """A batch size that is no positive number is an error that names the provider."""
    with pytest.raises(PysparkLookupError, match="provider_1:make"):
        desk.serve(SyncFunction(rows_of(USERS), size), ONCE).get(1)
