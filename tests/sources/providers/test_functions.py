"""Tables of other systems: what a function is asked, which answers are taken and kept, what its failures do; any history of lookups."""

import asyncio
import functools
import itertools
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.cache.memory import KEY_INDEX, DefaultLookupCache
from pyspark_lookup.core.metrics import UNSET
from pyspark_lookup.errors import LookupFunctionError, LookupTimeoutError, OptionError, SchemaError
from pyspark_lookup.sources.providers.functions import (
    AsyncKeyLookupFunction,
    FullCachingLookupProvider,
    KeyLookupFunction,
    LookupContext,
    LookupFunctionProvider,
    LookupProvider,
)
from tests.support.lookup_functions import (
    BOUND_S,
    CACHES,
    EITHER,
    KINDS,
    NONE,
    ONCE,
    PARTIAL,
    QUICK,
    SCHEMA,
    USERS,
    Answer,
    AsyncFunction,
    Desk,
    Options,
    Plain,
    SyncFunction,
    beside,
    counted,
    ids,
    in_turn,
    make_answer,
    make_function,
    names,
    pairs,
    provider,
    raises,
    users,
)
from tests.support.memory_cache import Dictionary


class ByKey(KeyLookupFunction):
    """Users one at a time."""

    schema = SCHEMA
    keys: list[Mapping[str, Any]]

    def lookup_key(self, key: Mapping[str, Any]) -> Iterable[Mapping[str, Any]] | None:
        self.keys.append(key)
        names = USERS.get(key["id"])
        return None if names is None else ({**key, "name": name} for name in names)


class AsyncByKey(AsyncKeyLookupFunction):
    """Users one at a time, after other coroutines had their turn."""

    schema = SCHEMA
    keys: list[Mapping[str, Any]]

    async def lookup_key(self, key: Mapping[str, Any]) -> Iterable[Mapping[str, Any]] | None:
        await asyncio.sleep(0)
        return ByKey.lookup_key(self, key)  # type: ignore[arg-type]


def test_a_date_that_python_does_not_have() -> None:
    """A key with a date before the year 1 cannot be a dictionary: the error names its column, and how to look the key up."""
    keys = pa.table({"id": pa.array([-(10**6)], pa.int32()).view(pa.date32())})
    for look_up in (ByKey().lookup, lambda keys: asyncio.run(AsyncByKey().lookup(keys))):
        with pytest.raises(
            SchemaError, match=r"'id' of type date32.* no Python type can hold .*: leave the key out, or override"
        ):
            look_up(keys)


@KINDS
@CACHES
def test_one_thread(desk: Desk, kind: str, cache: Options) -> None:
    """However many threads ask, from a running event loop too, a function is used by one that is none of them, one call at a time."""
    running, overlaps = list[int](), list[int]()

    def answer(keys: pa.Table) -> pa.Table:
        running.append(1)
        overlaps.append(len(running))
        rows = make_answer(USERS)(keys)
        running.pop()
        return rows

    function = make_function(kind, answer)
    table = desk.serve(function, cache)

    async def main() -> list[list[str]]:
        inside = names(table, 2)
        threads = await asyncio.gather(*(asyncio.to_thread(names, table, key) for key in (1, 2, 3, 1) * 3))
        return [inside, *threads]

    assert asyncio.run(main()) == [["Bob", "Charlie"], *[["Alice"], ["Bob", "Charlie"], [], ["Alice"]] * 3]
    (thread,) = {thread for _, thread in function.log.events}
    assert thread != threading.get_ident()
    assert len(function.log.loops) == (kind == "async")  # no loop is seen to run where none is needed
    assert set(overlaps) == {1}
    assert function.log.names.count("open") == 1


@pytest.mark.parametrize("make", [ByKey, AsyncByKey])
@CACHES
def test_one_key_at_a_time(desk: Desk, make: type[ByKey | AsyncByKey], cache: Options) -> None:
    """A function of single keys gets each as a dictionary, once if it is cached; None and nothing both mean no rows."""
    function = make()
    function.keys = []
    table = desk.serve(function, cache)
    for _ in range(2):
        assert pairs(table, 3, 2, 1, 2) == [(1, "Bob"), (1, "Charlie"), (2, "Alice"), (3, "Bob"), (3, "Charlie")]
    assert [function.keys.count({"id": key}) for key in (1, 2, 3)] == ([1, 1, 1] if cache else [2, 2, 2])
    if cache:
        assert counted(table, "numCachedRecords") == {"hitCount": 5, "missCount": 3, "loadCount": 3, "numCachedRecords": 4}  # fmt: skip


@EITHER
def test_keys_without_rows_are_asked_for_again(desk: Desk, kind: str, cache: Options) -> None:
    """With lookup.retry keys are asked for again after the delay, in full calls, unless they have rows by then; no absence is told before the last time."""
    users: dict[int, list[str]] = {1: ["Alice"]}
    counts: list[int] = []

    def answer(keys: pa.Table) -> pa.Table:
        counts.append(table.metrics()["loadCount"])
        if len(counts) == 5:
            users[2] = ["Bob"]
        return make_answer(users)(keys)

    retry = {"predicate": "lookup_miss", "fixed-delay": "7 s", "max-attempts": 2}
    function, in_turns = make_function(kind, answer, 2), {"lookup.async.capacity": 1} if kind == "async" else {}
    table = desk.serve(function, {**cache, **ONCE, **in_turns, **{f"lookup.retry.{k}": v for k, v in retry.items()}})
    assert pairs(table, 1, 2, 3, 4, None) == [(0, "Alice"), (1, "Bob")]
    assert [len(keys) for keys in function.log.requested_keys] == [2, 2, 2, 1, 2, 1]
    assert desk.clock.slept == [7.0, 7.0]
    assert set(counts) == {0}
    assert table.metrics()["lookupRetryCount"] == 6
    assert counted(table) == ({"missCount": 4, "loadCount": 4} if cache else {})


@EITHER
def test_composite_keys(desk: Desk, kind: str, cache: Options) -> None:
    """Keys of several columns are one key each, in any order, with a null in any; a number that no column can hold is nobody's."""
    schema = pa.schema([("name", pa.string()), ("city", pa.large_string()), ("id", pa.int32())])
    values = [("Alice", "Bern", 1), (None, "Rome", 1), ("Bob", "Bern", 2)]
    rows = [dict(zip(schema.names, row, strict=True)) for row in values]

    def answer(keys: pa.Table) -> pa.Table:
        requested = {(key["id"], key["city"]) for key in keys.to_pylist()}
        return pa.Table.from_pylist([row for row in rows if (row["id"], row["city"]) in requested], schema)

    function = make_function(kind, answer)
    table = desk.serve(function, {**cache, **ONCE, "lookup.keys": "id,city"}, schema)
    cities = ["Bern", "Rome", None, "Bern", "Bern", "Bern"]
    result = table.get_many(pa.table({"city": cities, "id": [1, 1, 1, None, 1, 2**40]}))
    assert result.column("name").to_pylist() == ["Alice", None, "Alice"]
    assert result.column(KEY_INDEX).to_pylist() == [0, 1, 4]
    assert function.log.requested_keys == [[(1, "Bern"), (1, "Rome")]]
    assert function.log.tables[0].schema.equals(pa.schema([("id", pa.int32()), ("city", pa.string())]))
    assert table.get((2, "Bern")) == [{"id": 2, "city": "Bern", "name": "Bob"}]
    assert table.get((2, None)) == []
    with pytest.raises(SchemaError):
        table.get(("seven", "Bern"))
    function.answer = lambda keys: pa.Table.from_pylist(rows, schema)
    with pytest.raises(
        LookupFunctionError,
        match=r"id = 1, city = 'Bern', which is not among the requested keys \(key id = 7, city = 'x'\): return rows of these keys only$",
    ):
        table.get((7, "x"))


FORMS: dict[str, Callable[[pa.Table], Any]] = {
    "narrow integers": lambda rows: rows.set_column(0, "id", rows.column("id").cast(pa.int8())),
    "codes of keys": lambda rows: rows.set_column(0, "id", rows.column("id").dictionary_encode()),
    "chunks of codes": lambda rows: pa.concat_tables(
        [pa.table({"id": [row["id"]], "name": pa.array([row["name"]]).dictionary_encode()}) for row in rows.to_pylist()]
    ),
    "an empty chunk": lambda rows: pa.concat_tables([rows.slice(0, 0), rows]),
    "other order": lambda rows: rows.select(["name", "id"]),
}


@pytest.mark.parametrize("form", FORMS)
@CACHES
def test_answers_in_other_forms(desk: Desk, form: str, cache: Options) -> None:
    """An answer may have narrower types, codes, chunks and another order of columns; the table's types come out."""
    table = desk.serve(SyncFunction(lambda keys: FORMS[form](make_answer(USERS)(keys))), cache)
    for _ in range(2):
        assert pairs(table, 2, 3, 1) == [(0, "Bob"), (0, "Charlie"), (2, "Alice")]
        schema = table.get_many(ids(1)).schema
        assert (schema.names, schema.types) == (["id", "name", KEY_INDEX], [pa.int64(), pa.string(), pa.int64()])


UNASKED = "which is not among"


class Panic(BaseException):
    """What libraries in Rust raise when they panic."""


def table(**columns: Any) -> Answer:
    """Answers with these columns, whatever is asked."""
    return lambda keys: pa.table(columns)


def columns(*named: tuple[str, list[Any]]) -> Answer:
    """Answers with these columns, of which several may have one name."""
    return lambda keys: pa.Table.from_arrays([pa.array(values) for _, values in named], [name for name, _ in named])


BAD: dict[str, tuple[Answer, str]] = {
    "raises": (raises(ValueError("no route to host")), r"ValueError\('no route to host'\)"),
    "raises one of our errors": (raises(OptionError("theirs")), "theirs"),
    "is cancelled": (raises(asyncio.CancelledError()), "CancelledError"),
    "panics": (raises(Panic("index out of bounds")), "Panic"),
    "a list": (lambda keys: [{"id": 1, "name": "x"}], "returned list"),
    "no key column": (table(name=["x"]), "column 'id' is missing; the rows have name, the schema has id, name"),
    "an unknown column": (table(id=[1], name=["x"], zip=[1]), "column 'zip' is not in the schema"),
    "the key column twice": (columns(("id", [1]), ("id", [1]), ("name", ["x"])), "column 'id' appears twice"),
    "another type": (table(id=[1], name=[5]), "column 'name' is int64, but string in the schema: return that type"),
    "a key that nobody asked for": (table(id=[1, 77], name=["x", "y"]), f"id = 77, {UNASKED}"),
    "a null key": (table(id=[1, None], name=["x", "y"]), f"id = None, {UNASKED}"),
}


@pytest.mark.parametrize("bad", BAD)
@EITHER
def test_a_bad_answer_is_an_error_and_nothing_else(desk: Desk, kind: str, bad: str, cache: Options) -> None:
    """Whatever is wrong, the error names the provider and the key and says what; nothing is kept, and a good answer is taken next."""
    answer, says = BAD[bad]
    function = make_function(kind, in_turn(answer, make_answer(USERS)))
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
    """A call answers for its own keys only, also where another call of the same lookup asks for the others."""
    table = desk.serve(SyncFunction(lambda keys: make_answer(USERS)(ids(1, 2)), 1), ONCE)
    with pytest.raises(
        LookupFunctionError,
        match=f"id = [12], {UNASKED} the requested keys .key id = [12].: return rows of these keys only$",
    ):
        pairs(table, 1, 2)


@KINDS
def test_opening_may_fail(desk: Desk, kind: str) -> None:
    """A function that could not be opened is not used; opening is tried again as a lookup is, with attempts of its own."""
    function = make_function(kind, in_turn(raises(OSError()), make_answer(USERS)))
    function.opens = in_turn(*[raises(OSError("refused"))] * 5, lambda: None)
    table = desk.serve(function, {**PARTIAL, "lookup.max-retries": 2})
    with pytest.raises(LookupFunctionError, match=r"id = 1.*OSError\('refused'\)"):
        table.get(1)
    assert function.log.events == []
    assert counted(table) == {"missCount": 1, "numLoadFailures": 1}
    assert names(table, 1) == ["Alice"]
    assert function.log.names == ["open", "lookup", "lookup"]


@CACHES
def test_a_bad_version(desk: Desk, cache: Options) -> None:
    """Nothing is answered while the version is not known, not even what is held; then it is again."""
    function, fail = users(), raises(ValueError("gone"))
    table = desk.serve(function, {**cache, **ONCE}, version=in_turn(lambda: "1", lambda: 5, fail, lambda: "1"))
    assert names(table, 1) == ["Alice"]
    for message in (r"provider_1:make returned 5: return a str", r"failed \(version\(\)\): ValueError\('gone'\)"):
        with pytest.raises(LookupFunctionError, match=message):
            table.get(1)
    assert names(table, 1) == ["Alice"]
    assert function.log.requested_keys == ([[1]] if cache else [[1], [1]])


VERSIONED: Options = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 100}


@pytest.mark.parametrize("source", ["UFS", "CACHE"])
def test_a_new_version_is_seen_by_the_next_lookup(desk: Desk, source: str) -> None:
    """Everything is asked for again when the version is another, absences too; it is asked for once per query or interval."""
    version, users = ["1"], {1: ["Alice"]}
    versions: list[str] = []

    def ask() -> str:
        versions.append(version[0])
        return version[0]

    function = SyncFunction(make_answer(users))
    interval = {"lookup.metadata.sync-interval": "5 min"} if source == "CACHE" else {}
    table = desk.serve(function, {**VERSIONED, "lookup.metadata.source": source, **interval}, version=ask)
    assert (names(table, 1), table.get(3)) == (["Alice"], [])
    users.update({1: ["Alicia"], 3: ["Dora"]})
    assert (names(table, 1), table.get(3)) == (["Alice"], [])  # as long as the provider says that nothing changed
    version[0] = "2"
    if source == "CACHE":
        desk.clock.tick(300)
        assert names(table, 1) == ["Alice"]
        desk.clock.tick(1)
    assert (names(table, 1), names(table, 3)) == (["Alicia"], ["Dora"])
    assert function.log.requested_keys == [[1], [3]] * 2
    assert versions == (["1", "2"] if source == "CACHE" else ["1"] * 4 + ["2"] * 2)
    desk.clock.tick(10**6)
    assert names(table, 1) == ["Alicia"]  # no time makes it old
    assert counted(table) == {"hitCount": 3 + (source == "CACHE"), "missCount": 4, "loadCount": 4}


@pytest.mark.parametrize("way", ["a loop of its own", "coroutine functions"])
def test_versions_of_asynchronous_clients(desk: Desk, way: str) -> None:
    """version() and changes() may run an event loop of their own, or be coroutine functions."""
    version = ["1"]

    async def find_version() -> str:
        await asyncio.sleep(0)
        return version[0]

    async def find_changes(since: str) -> pa.Table:
        await asyncio.sleep(0)
        return ids(1)

    def made(function: Any) -> Any:
        return function if way == "coroutine functions" else lambda *args: asyncio.run(function(*args))

    function = users()
    table = desk.table(
        lambda context: LookupFunctionProvider(function, SCHEMA, made(find_version), changes=made(find_changes)),
        VERSIONED,
    )
    for version[0] in ("1", "2"):
        assert (names(table, 1), names(table, 2)) == (["Alice"], ["Bob", "Charlie"])
    assert function.log.requested_keys == [[1], [2], [1]]


@KINDS
@pytest.mark.parametrize("make", [Plain, Dictionary])
def test_a_cache_of_its_own(desk: Desk, kind: str, make: Callable[[], Plain | Dictionary]) -> None:
    """A provider's cache is asked first and told what was loaded, not what failed; it has the table's live metrics, and counts hits and misses once."""
    function, cache = make_function(kind, in_turn(raises(OSError()), make_answer(USERS))), make()
    table = desk.serve(function, {**ONCE, "lookup.cache": "PARTIAL"} if kind == "sync" else ONCE, cache=cache)
    with pytest.raises(LookupFunctionError):
        table.get(1)
    assert cache.size() == 0
    assert [names(table, key) for key in (1, 3, 1, 3, 2)] == [["Alice"], [], ["Alice"], [], ["Bob", "Charlie"]]
    assert function.log.requested_keys == [[1], [1], [3], [2]]
    assert counted(table) == {"hitCount": 2, "missCount": 4, "loadCount": 3, "numLoadFailures": 1}
    gauges = table.metrics()
    size = cache.bytes() if make is Plain else len(USERS) + 2
    assert (gauges["numCachedRecords"], gauges["numCachedBytes"]) == (cache.size(), size) != (0, 0)
    assert cache.opened == 1
    for forget in (lambda: cache.invalidate({"id": 1}), lambda: table.invalidate([1, 3])):
        forget()
        assert (names(table, 1), names(table, 2)) == (["Alice"], ["Bob", "Charlie"])
    assert table.get(3) == []
    assert function.log.requested_keys[4:] == [[1], [1], [3]]


def test_a_cache_of_its_own_is_emptied_for_a_new_version(desk: Desk, tmp_path: Path) -> None:
    """A provider's cache is of one version, process and table: opened anew for another version, and shared with nobody, as nobody knows its bounds."""
    version, users, caches = ["1"], {1: ["Alice"]}, list[Plain]()
    function = SyncFunction(make_answer(users))

    def factory(context: LookupContext) -> LookupProvider:
        caches.append(Plain())
        return provider(function, version=lambda: version[0], cache=caches[-1])

    name = desk.name(factory)
    table, second = desk.table(name), desk.table(name, {"lookup.cache.dir": str(tmp_path / "other")})
    assert (names(table, 1), names(table, 1)) == (["Alice"], ["Alice"])
    version[0], users[1] = "2", ["Alicia"]
    assert names(second, 1) == ["Alicia"]
    assert (names(table, 1), names(table, 1)) == (["Alicia"], ["Alicia"])
    assert function.log.requested_keys == [[1]] * 3
    assert (caches[0].opened, caches[0].closed) == (2, 1)
    desk.restart()
    assert names(table, 1) == ["Alicia"]
    assert function.log.requested_keys == [[1]] * 4


@KINDS
def test_a_default_cache_of_its_own(desk: Desk, kind: str) -> None:
    """A DefaultLookupCache brings the bounds that it was built with; with them its host shares what was loaded."""
    function = make_function(kind, make_answer(USERS))

    def factory(context: LookupContext) -> LookupProvider:
        cache = DefaultLookupCache(expire_after_write_s=60.0, cache_missing_key=False, clock=desk.clock.host().steady_s)
        return provider(function, cache=cache)

    table = desk.table(factory)
    assert [names(table, key) for key in (1, 3, 1, 3)] == [["Alice"], [], ["Alice"], []]
    assert function.log.requested_keys == [[1], [3], [3]]
    desk.restart()
    desk.clock.tick(59)
    assert names(table, 1) == ["Alice"]
    assert len(function.log.requested_keys) == 3
    desk.clock.tick(1)
    assert names(table, 1) == ["Alice"]
    assert function.log.requested_keys[3:] == [[1]]


@pytest.mark.parametrize(
    ("kind", "cache", "where", "answers_late"),
    [
        ("sync", PARTIAL, "lookup", True), ("sync", PARTIAL, "open", False), ("sync", PARTIAL, "version", True),
        ("async", NONE, "lookup", False), ("async", NONE, "open", True), ("async", NONE, "version", False),
    ],
)  # fmt: skip
def test_a_lookup_that_hangs(
    desk: Desk, prompt: None, kind: str, cache: Options, where: str, answers_late: bool
) -> None:
    """A hanging lookup is given up after the timeout, and so is its thread; a late answer is not kept; a new function answers as soon as there is one."""
    gate, threads = threading.Event(), list[threading.Thread]()

    def hang() -> str:
        threads.append(threading.current_thread())
        return str(gate.wait(BOUND_S))

    def too_late(keys: pa.Table) -> pa.Table:
        hang()
        return make_answer({1: ["too late"]})(keys)

    first, second = (
        make_function(kind, too_late if where == "lookup" else make_answer(USERS)),
        make_function(kind, make_answer(USERS)),
    )
    if where == "open":
        first.opens = hang
    version = in_turn(hang, lambda: "1") if where == "version" else None
    functions = iter([first, *[None] * answers_late, second])

    def factory(context: LookupContext) -> LookupProvider:
        if (function := next(functions)) is None:
            raise OSError("not now")
        return provider(function, version=version)

    table = desk.table(factory, {**cache, **QUICK})
    try:
        with pytest.raises(LookupTimeoutError, match=r"version\(\)" if where == "version" else "key id = 1") as caught:
            table.get(1)
        assert isinstance(caught.value, TimeoutError)
        assert "provider provider_1:make did not answer within lookup.async.timeout = 0.6 s" in str(caught.value)
        failed = {"missCount": 1, "numLoadFailures": 1} if cache and where != "version" else {}
        assert counted(table) == failed
        if answers_late:
            gate.set()
            threads[0].join(BOUND_S)
            assert not threads[0].is_alive()
        assert (names(table, 1), names(table, 1)) == (["Alice"], ["Alice"])
    finally:
        gate.set()
    assert second.log.names == ["open", "lookup"] + ([] if cache else ["lookup"])
    assert answers_late or second.log.events[0][1] != threads[0].ident
    if cache:
        assert counted(table) == {"hitCount": 1, **failed, "missCount": 1 + len(failed) // 2, "loadCount": 1}


def test_a_scan_that_hangs(desk: Desk, prompt: None, gate: threading.Event) -> None:
    """A reload that waits for a batch is given up, and the host's lock with it: what there is serves, and others can reload."""
    hangs = [False]

    def scan() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"id": [1], "name": ["Alice"]})
        if hangs.pop():
            gate.wait(BOUND_S)
        yield pa.RecordBatch.from_pydict({"id": [2], "name": ["Bob"]})

    options = {"lookup.cache": "FULL", "lookup.metadata.source": "CACHE", **QUICK}
    options["lookup.full-cache.periodic-reload.interval"] = "365 d"
    name = desk.name(lambda context: FullCachingLookupProvider(scan, SCHEMA))
    table, second = desk.table(name, options), desk.table(name, options)
    assert names(table, 2) == ["Bob"]
    hangs += [False, True]
    desk.clock.tick(1)
    with pytest.raises(LookupTimeoutError, match=r"0.6 s \(a batch of scan\(\)\)"):
        table.reload()
    assert names(table, 2) == names(second, 2) == ["Bob"]
    desk.clock.tick(1)
    second.reload()
    assert hangs == []


def test_a_factory_that_hangs(desk: Desk, prompt: None, gate: threading.Event) -> None:
    """Other tables answer while a factory hangs. All who wait for it give it up after the timeout, and the next table asks it again."""
    hanging, calls = threading.Event(), itertools.count()

    def factory(context: LookupContext) -> LookupProvider:
        if not next(calls):
            hanging.set()
            gate.wait(BOUND_S)
        return provider(users())

    opened = desk.serve(users(), PARTIAL)
    for options in (QUICK, NONE):
        calls, name = itertools.count(), desk.name(factory)
        hanging.clear()
        waiting = [beside(lambda name=name, options=options: desk.table(name, options)) for _ in range(2)]
        assert hanging.wait(BOUND_S)
        if options is QUICK:
            message = f"{name} has not returned within lookup.async.timeout = 0.6 s"
            for result in waiting:
                with pytest.raises(LookupTimeoutError, match=message):
                    raise result()
            assert names(desk.table(name, options), 1) == ["Alice"]
        else:
            for table in (lambda: opened, lambda: desk.serve(users(), PARTIAL)):
                assert beside(lambda table=table: names(table(), 1))() == ["Alice"]
            gate.set()
            assert [names(result(), 1) for result in waiting] == [["Alice"], ["Alice"]]
            assert next(calls) == 1  # both have one provider


@pytest.mark.parametrize("method", ["scan", "version"])
def test_nobody_waits_for_a_call_of_another_process_that_hangs(desk: Desk, gate: threading.Event, method: str) -> None:
    """While one process waits for a reload, or for a version, another whose answer is due as well gives the one that it has."""
    hanging, calls = threading.Event(), itertools.count(1)

    def call() -> str:
        if next(calls) == 2:
            hanging.set()
            gate.wait(BOUND_S)
        return "1"

    def scan() -> Iterator[pa.RecordBatch]:
        call()
        yield from make_answer(USERS)(ids(1, 2)).to_batches()

    options = {**PARTIAL, "lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "1 s"}
    if method == "version":
        table = desk.serve(users(), options, version=call)
        first: Callable[[], Any] = functools.partial(names, table, 1)
    else:
        options = {"lookup.cache": "FULL", "lookup.full-cache.periodic-reload.interval": "1 s"}
        options["lookup.full-cache.build-wait"] = "100 ms"
        table = desk.table(lambda context: FullCachingLookupProvider(scan, SCHEMA), options)
        first = table.reload  # which runs no schedule, as the command line does not
    first()
    desk.clock.tick(2)
    waiting = beside(first)
    assert hanging.wait(BOUND_S)
    desk.restart()
    assert beside(lambda: names(table, 1))() == ["Alice"]
    gate.set()
    waiting()


def test_lookups_behind_a_version_that_hangs_ask_again(desk: Desk, prompt: None, gate: threading.Event) -> None:
    """Lookups behind a version that is given up ask anew, for as long as they would have: its time is not theirs."""
    hanging = threading.Event()

    def hang() -> str:
        hanging.set()
        return str(gate.wait(BOUND_S))

    table = desk.serve(users(), {"lookup.async.timeout": "1 s"}, version=in_turn(hang, lambda: "1"))
    first = beside(lambda: table.get(1))
    assert hanging.wait(BOUND_S)
    behind = [beside(lambda: names(table, 1)) for _ in range(3)]
    assert isinstance(first(), LookupTimeoutError)
    assert [result() for result in behind] == [["Alice"]] * 3


def test_a_hit_waits_for_no_lookup(desk: Desk, gate: threading.Event) -> None:
    """A key that is held is answered while another one is being looked up, with a version() as well as without."""
    asking = threading.Event()

    def slow(keys: pa.Table) -> pa.Table:
        asking.set()
        gate.wait(BOUND_S)
        return make_answer(USERS)(keys)

    table = desk.serve(SyncFunction(in_turn(make_answer(USERS), slow)), PARTIAL, version=lambda: "1")
    assert names(table, 1) == ["Alice"]
    result = beside(lambda: table.get(2))
    assert asking.wait(BOUND_S)
    assert beside(lambda: names(table, 1))(BOUND_S / 4) == ["Alice"]
    gate.set()
    result()


def test_after_an_interrupt(desk: Desk, prompt: None, gate: threading.Event) -> None:
    """Who interrupts a lookup that takes long can look up something else at once: a new function answers."""
    waited: list[bool] = []
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def slow(keys: pa.Table) -> pa.Table:
        # A signal that comes just before the main thread waits is only handled after the wait: Python's rule, so it comes again.
        while not interrupted.wait(0.05):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        waited.append(gate.wait(BOUND_S))
        return make_answer(USERS)(keys)

    table = desk.serve([SyncFunction(slow), users()])
    was = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            table.get(1)
    finally:
        signal.signal(signal.SIGINT, was)
    assert names(table, 1) == ["Alice"]
    assert waited == []  # it stands still yet


@pytest.mark.parametrize(
    ("options", "retries"), [({"lookup.max-retries": 0}, 0), ({"lookup.max-retries": 1}, 1), (NONE, 3)]
)
@EITHER
def test_attempts(desk: Desk, kind: str, options: Options, retries: int, cache: Options) -> None:
    """A lookup that fails is tried once more than lookup.max-retries says, which the error tells; a wrong answer is not asked for again."""
    function = make_function(kind, raises(OSError("down")))
    table = desk.serve(function, {**cache, **options})
    often = f" in {retries + 1} attempts" if retries else ""
    says = rf"look up key id = [12] and 1 more{often}: OSError\('down'\)"
    with pytest.raises(LookupFunctionError, match=says) as caught:
        pairs(table, 1, 2)
    assert isinstance(caught.value.__cause__, OSError)
    assert function.log.requested_keys[: retries + 1] == [[1, 2]] * (retries + 1)
    assert sorted(function.log.requested_keys[retries + 1 :]) == [[1], [2]]  # is it one of them?
    assert len(desk.clock.slept) == retries
    assert table.metrics()["lookupRetryCount"] == 2 * retries
    assert counted(table) == ({"missCount": 2, "numLoadFailures": 2} if cache else {})
    function.answer = lambda keys: pa.table({"id": [1]})
    with pytest.raises(LookupFunctionError, match="'name' is missing"):
        table.get(1)
    assert function.log.requested_keys[retries + 3 :] == [[1]]
    assert function.log.names.count("open") == 1


@pytest.mark.parametrize(("capacity", "calls", "most"), [(1, 6, 1), (3, 10, 3), (100, 7, 7)])
def test_capacity_limits_the_calls_at_once(desk: Desk, capacity: int, calls: int, most: int) -> None:
    """As many calls as the capacity are under way together, never more, and each answer goes to its own key; after a failure few new calls are begun."""
    running, peak = [0], [0]

    async def answer(keys: pa.Table) -> pa.Table:
        running[0] += 1
        peak[0] = max(peak[0], running[0])
        for _ in range(keys.column("id")[0].as_py() % 4 + 1):
            await asyncio.sleep(0)
        running[0] -= 1
        return make_answer({n: [f"n{n}"] for n in range(calls)})(keys)

    function = AsyncFunction(answer, 1)
    table = desk.serve(function, {**ONCE, "lookup.async.capacity": capacity})
    assert pairs(table, *range(calls)) == [(n, f"n{n}") for n in range(calls)]
    assert (peak[0], running[0]) == (most, 0)
    function.answer = raises(ValueError())
    with pytest.raises(LookupFunctionError):
        pairs(table, *range(calls))
    assert calls < len(function.log.requested_keys) <= calls + capacity + 8


def test_a_wrong_answer_cancels_the_other_calls(desk: Desk, prompt: None) -> None:
    """An answer that would be wrong for any key is the lookup's end: calls under way are over before the next lookup begins."""
    cancelled, running, peak = list[int](), [0], [0]
    failing = True

    async def answer(keys: pa.Table) -> pa.Table:
        (key,) = keys.column("id").to_pylist()
        running[0] += 1
        peak[0] = max(peak[0], running[0])
        try:
            if key == 3 and failing:
                return pa.table({"id": [3]})
            await (asyncio.Event().wait() if failing else asyncio.sleep(0))
        except asyncio.CancelledError:
            cancelled.append(key)
            await asyncio.sleep(0)  # gives its connection back
            raise
        finally:
            running[0] -= 1
        return make_answer({n: [f"n{n}"] for n in range(9)})(keys)

    function = AsyncFunction(answer, 1)
    table = desk.serve(function, {**PARTIAL, **ONCE, "lookup.async.capacity": 5})
    # Which key comes first is not said: the failing one is among the first five.
    with pytest.raises(LookupFunctionError, match="'name' is missing"):
        pairs(table, 1, 2, 3, 4, 5)
    failing = False
    assert len(pairs(table, 1, 2, 3, 4, 5)) == 5
    assert sorted(cancelled) == [1, 2, 4, 5]
    assert (peak[0], running[0]) == (5, 0)
    assert counted(table) == {"missCount": 10, "numLoadFailures": 5, "loadCount": 5}


def test_the_timeout_is_for_each_call(desk: Desk) -> None:
    """Ten calls of a third of the timeout each, one after the other, are not too slow."""

    async def answer(keys: pa.Table) -> pa.Table:
        await asyncio.sleep(0.03)
        return make_answer({n: ["x"] for n in range(10)})(keys)

    options = {**ONCE, "lookup.async.capacity": 1, "lookup.async.timeout": "200 ms"}
    assert len(pairs(desk.serve(AsyncFunction(answer, 1), options), *range(10))) == 10
