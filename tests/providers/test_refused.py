"""Tables of other systems: answers that are not taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import LookupFunctionError, LookupTimeoutError, OptionError, PysparkLookupError
from pyspark_lookup.base.metrics import UNSET
from tests.providers.common import (
    CACHES,
    KINDS,
    ONCE,
    PARTIAL,
    QUICK,
    USERS,
    Answer,
    Desk,
    Options,
    SyncFunction,
    counted,
    ids,
    in_order,
    in_turn,
    made,
    names,
    pairs,
    provider,
    raises,
    rows_of,
)

UNASKED = "which is not among"


BAD: dict[str, tuple[Answer, str]] = {
    "raises": (raises(ValueError("no route to host")), r"ValueError\('no route to host'\)"),
    "raises a timeout of its own": (raises(TimeoutError("theirs")), r"TimeoutError\('theirs'\)"),
    "raises the end of an iteration": (raises(StopIteration()), "StopIteration"),
    "raises one of our errors": (raises(OptionError("theirs")), r"OptionError\('theirs'\)"),
    "is cancelled": (raises(asyncio.CancelledError()), "CancelledError"),
    "None": (lambda keys: None, "returned NoneType"),
    "a list": (lambda keys: [{"id": 1, "name": "x"}], "returned list"),
    "an array": (lambda keys: keys.column("id"), "returned ChunkedArray"),
    "no columns": (lambda keys: pa.table({}), "column 'id' is missing"),
    "no key column": (
        lambda keys: pa.table({"name": ["x"]}),
        "column 'id' is missing; it returned name, its schema has id, name",
    ),
    "a column less": (lambda keys: pa.table({"id": [1]}), "column 'name' is missing"),
    "a column less without rows": (lambda keys: pa.table({"id": pa.array([], pa.int64())}), "column 'name' is missing"),
    "another spelling": (lambda keys: pa.table({"ID": [1], "name": ["x"]}), "column 'id' is missing"),
    "an unknown column": (
        lambda keys: pa.table({"id": [1], "name": ["x"], "zip": [1]}),
        "column 'zip' is not in its schema",
    ),
    "the key column twice": (
        lambda keys: pa.Table.from_arrays([pa.array([1]), pa.array([1]), pa.array(["x"])], ["id", "id", "name"]),
        "column 'id' .* there twice",
    ),
    "another type": (lambda keys: pa.table({"id": [1], "name": [5]}), "column 'name' is int64, its schema says string"),
    "another type of key": (
        lambda keys: pa.table({"id": ["1"], "name": ["x"]}),
        "column 'id' is string, its schema says int64",
    ),
    "a wider type": (
        lambda keys: pa.table({"id": pa.array([1.0]), "name": ["x"]}),
        "column 'id' is double, its schema says int64",
    ),
    "another type, in part null": (lambda keys: pa.table({"id": [1, 1], "name": [5, None]}), "column 'name' is int64"),
    "a key that nobody asked for": (lambda keys: pa.table({"id": [1, 77], "name": ["x", "y"]}), f"id = 77, {UNASKED}"),
    "a null key": (lambda keys: pa.table({"id": [1, None], "name": ["x", "y"]}), f"id = None, {UNASKED}"),
}


@pytest.mark.parametrize("bad", BAD)
@KINDS
@CACHES
def test_a_bad_answer_is_an_error_and_nothing_else(desk: Desk, kind: str, bad: str, cache: Options) -> None:
    """Whatever is wrong, the error names the provider and the key and says what; nothing is kept, and a good answer is taken next."""
    answer, says = BAD[bad]
    function = made(kind, in_turn(answer, rows_of(USERS)))
    name = desk.name(lambda context: provider(function))
    table = desk.table(name, {**cache, **ONCE})
    with pytest.raises(LookupFunctionError, match=says) as caught:
        table.get(1)
    assert name in str(caught.value)
    assert "id = 1" in str(caught.value)
    assert table.metrics()["latestLoadTime"] == UNSET
    assert table.metrics()["numCachedRecords"] <= 0
    failed = {"missCount": 1, "numLoadFailures": 1} if cache else {}
    assert counted(table) == failed
    assert names(table, 1) == ["Alice"]
    assert names(table, 1) == ["Alice"]
    assert counted(table) == ({"missCount": 2, "numLoadFailures": 1, "loadCount": 1, "hitCount": 1} if cache else {})
    assert function.log.opened == 1
    assert len(function.log.asked) == (2 if cache else 3)


@KINDS
def test_a_failure_takes_nothing_with_it(desk: Desk, kind: str) -> None:
    """Keys of a batch that were held before are hits and stay; of those that failed each counts as one failure."""
    function = made(kind, in_turn(rows_of(USERS), raises(ValueError()), rows_of(USERS)))
    table = desk.serve(function, {**PARTIAL, **ONCE})
    assert names(table, 1) == ["Alice"]
    with pytest.raises(LookupFunctionError, match=r"id = 2 and 1 more|id = 3 and 1 more"):
        pairs(table, 1, 2, 3, 2, None)
    assert counted(table) == {"hitCount": 2, "missCount": 3, "loadCount": 1, "numLoadFailures": 2}
    assert table.metrics()["numCachedRecords"] == 1
    assert names(table, 1) == ["Alice"]
    assert pairs(table, 1, 2, 3) == [(0, "Alice"), (1, "Bob"), (1, "Charlie")]
    assert counted(table) == {"hitCount": 4, "missCount": 5, "loadCount": 3, "numLoadFailures": 2}
    assert function.log.asked == [[1], [2, 3], [2, 3]]


@KINDS
def test_one_bad_piece_fails_the_lookup(desk: Desk, kind: str) -> None:
    """Of a batch in several calls of which one fails nothing is kept; the error names a key of that call."""
    held = {n: [f"n{n}"] for n in range(6)}
    good = [True]

    def answer(keys: pa.Table) -> pa.Table:
        if 4 in keys.column("id").to_pylist() and not good[0]:
            raise ValueError("not 4")
        return rows_of(held)(keys)

    table = desk.serve(made(kind, answer, 1), {**PARTIAL, **ONCE})
    good[0] = False
    with pytest.raises(LookupFunctionError, match="key id = 4: "):
        pairs(table, *range(6))
    assert counted(table) == {"missCount": 6, "numLoadFailures": 6}
    good[0] = True
    assert len(pairs(table, *range(6))) == 6
    assert counted(table) == {"missCount": 12, "numLoadFailures": 6, "loadCount": 6}


def test_a_row_of_another_call_is_not_taken(desk: Desk) -> None:
    """What a call answers is about its own keys, also where another call of the same lookup asks for the others."""
    table = desk.serve(SyncFunction(lambda keys: rows_of(USERS)(ids(1, 2)), 1), ONCE)
    with pytest.raises(LookupFunctionError, match=f"id = [12], {UNASKED} key id = [12]$"):
        pairs(table, 1, 2)


@KINDS
def test_opening_may_fail(desk: Desk, kind: str) -> None:
    """A function that could not be opened is not used; the next lookup opens it."""
    function = made(kind, rows_of(USERS))
    problems = [OSError("refused")]
    opened = function.open

    def fails_first() -> Any:
        if problems:
            raise problems.pop()
        return opened()

    function.open = fails_first  # type: ignore[method-assign]
    table = desk.serve(function, {**PARTIAL, **ONCE})
    with pytest.raises(LookupFunctionError, match=r"id = 1: OSError\('refused'\)"):
        table.get(1)
    assert function.log.events == []
    assert names(table, 1) == ["Alice"]
    assert [event for event, _ in function.log.events] == ["open", "lookup"]
    assert counted(table) == {"missCount": 2, "numLoadFailures": 1, "loadCount": 1}


@KINDS
def test_opening_is_tried_again(desk: Desk, kind: str) -> None:
    """What fails while a function is opened is tried again like a lookup, with attempts of its own."""
    function = made(kind, in_turn(raises(OSError()), rows_of(USERS)))
    problems = [OSError("refused"), OSError("refused")]
    opened = function.open

    def fails_first() -> Any:
        if problems:
            raise problems.pop()
        return opened()

    function.open = fails_first  # type: ignore[method-assign]
    table = desk.serve(function, {"lookup.max-retries": 2})
    assert names(table, 1) == ["Alice"]
    assert [event for event, _ in function.log.events] == ["open", "lookup", "lookup"]
    assert len(desk.clock.slept) == 3


@pytest.mark.parametrize("bad", [lambda: 5, lambda: None, lambda: "", lambda: b"1"])
@CACHES
def test_a_version_is_a_text(desk: Desk, bad: Callable[[], Any], cache: Options) -> None:
    """A version of any other kind, or an empty one, is an error that says what it was; nothing is asked for."""
    function = SyncFunction(rows_of(USERS))
    answers = [bad, lambda: "1"]
    name = desk.name(lambda context: provider(function, version=lambda: in_order(answers)))
    table = desk.table(name, {**cache, **ONCE})
    with pytest.raises(LookupFunctionError, match=r"version\(\) of provider .* returned .*: return a text") as caught:
        table.get(1)
    assert name in str(caught.value)
    assert function.log.events == []
    assert names(table, 1) == ["Alice"]


@CACHES
def test_a_version_may_fail(desk: Desk, cache: Options) -> None:
    """Nothing is answered while the version is not known, not even what is held; then it is again."""
    function = SyncFunction(rows_of(USERS))
    problems: list[Exception] = []

    def version() -> str:
        if problems:
            raise problems[0]
        return "1"

    table = desk.serve(function, {**cache, **ONCE}, version=version)
    assert names(table, 1) == ["Alice"]
    problems.append(ValueError("gone"))
    with pytest.raises(LookupFunctionError, match=r"provider .* failed, version\(\): ValueError\('gone'\)"):
        table.get(1)
    problems.clear()
    assert names(table, 1) == ["Alice"]
    assert function.log.asked == ([[1]] if cache else [[1], [1]])


def test_the_column_that_is_there_twice_is_named(desk: Desk) -> None:
    """Of three columns of which the last two have one name, that name is what is wrong."""
    twice = pa.Table.from_arrays([pa.array([1]), pa.array(["x"]), pa.array(["y"])], ["id", "name", "name"])
    with pytest.raises(LookupFunctionError) as caught:
        desk.serve(SyncFunction(lambda keys: twice), ONCE).get(1)
    assert "column 'name' is" in str(caught.value)


def test_a_type_that_spark_lacks(desk: Desk) -> None:
    """A column of a type that has no counterpart is an error like that of any other wrong type."""
    odd = pa.table({"id": [1], "name": pa.array([1], pa.time64("us"))})
    name = desk.name(lambda context: provider(SyncFunction(lambda keys: odd)))
    with pytest.raises(PysparkLookupError) as caught:
        desk.table(name, ONCE).get(1)
    assert isinstance(caught.value, LookupFunctionError)
    assert name in str(caught.value)


@pytest.mark.parametrize("size", [-1, "5", 2.5])
def test_a_size_that_is_none(desk: Desk, size: Any) -> None:
    """A batch size that is no positive number is an error that names the provider."""
    with pytest.raises(PysparkLookupError, match="provider_1:make"):
        desk.serve(SyncFunction(rows_of(USERS), size), ONCE).get(1)


class Panic(BaseException):
    """What libraries in Rust raise when they panic."""


@pytest.mark.parametrize("problem", [SystemExit(3), Panic("index out of bounds")], ids=["exit", "panic"])
def test_errors_of_other_kinds(desk: Desk, prompt: None, problem: BaseException) -> None:
    """What is no Exception is an error like any other, at once."""
    with pytest.raises(LookupFunctionError, match=r"SystemExit|Panic") as caught:
        desk.serve(SyncFunction(raises(problem)), QUICK).get(1)
    assert not isinstance(caught.value, LookupTimeoutError)
