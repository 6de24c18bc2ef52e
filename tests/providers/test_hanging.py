"""Tables of other systems: calls that hang."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import LookupTimeoutError
from pyspark_lookup.providers.functions import FullCachingLookupProvider, LookupContext, LookupProvider
from tests.providers.common import (
    BOUND_S,
    CACHES,
    KINDS,
    ONCE,
    PARTIAL,
    QUICK,
    SCHEMA,
    USERS,
    AsyncFunction,
    Desk,
    Function,
    Options,
    SyncFunction,
    beside,
    counted,
    holding,
    in_turn,
    made,
    names,
    provider,
    rows_of,
)


@KINDS
@CACHES
def test_a_lookup_that_hangs(desk: Desk, prompt: None, gate: threading.Event, kind: str, cache: Options) -> None:
    """It is given up after the timeout, with the provider, the option and the key in the error; a new function answers next."""
    functions: list[Function] = []

    def factory(context: LookupContext) -> LookupProvider:
        functions.append(made(kind, rows_of(USERS) if functions else holding(gate, rows_of(USERS))))
        return provider(functions[-1])

    name = desk.name(factory)
    table = desk.table(name, {**cache, **QUICK})
    with pytest.raises(LookupTimeoutError, match="id = 1") as caught:
        table.get(1)
    assert isinstance(caught.value, TimeoutError)
    assert f"provider {name} did not answer within lookup.async.timeout = 0.6 s" in str(caught.value)
    assert counted(table) == ({"missCount": 1, "numLoadFailures": 1} if cache else {})
    assert names(table, 1) == ["Alice"]
    assert [[event for event, _ in function.log.events] for function in functions] == [["open", "lookup"]] * 2
    assert functions[0].log.events[0][1] != functions[1].log.events[0][1]
    assert names(table, 1) == ["Alice"]
    assert counted(table) == ({"missCount": 2, "numLoadFailures": 1, "loadCount": 1, "hitCount": 1} if cache else {})


def test_what_a_hanging_call_answers_late_is_nobodys(desk: Desk, prompt: None) -> None:
    """Once it was given up, its answer is neither returned nor kept, and its thread ends with it."""
    gate = threading.Event()
    threads: list[threading.Thread] = []

    def slow(keys: pa.Table) -> pa.Table:
        threads.append(threading.current_thread())
        gate.wait(BOUND_S)
        return rows_of({1: ["too late"]})(keys)

    functions = [SyncFunction(slow), SyncFunction(rows_of(USERS))]
    left = iter(functions)
    table = desk.table(lambda context: provider(next(left)), {**PARTIAL, **QUICK})
    with pytest.raises(LookupTimeoutError):
        table.get(1)
    gate.set()
    threads[0].join(BOUND_S)
    assert not threads[0].is_alive()
    assert names(table, 1) == ["Alice"]
    assert names(table, 1) == ["Alice"]
    assert [len(function.log.asked) for function in functions] == [1, 1]


@KINDS
def test_opening_that_hangs(desk: Desk, prompt: None, gate: threading.Event, kind: str) -> None:
    """It is given up as a lookup is, and the next lookup opens a new function."""
    functions: list[Function] = []

    def factory(context: LookupContext) -> LookupProvider:
        function = made(kind, rows_of(USERS))
        if not functions:
            function.open = lambda: gate.wait(BOUND_S)  # type: ignore[assignment,method-assign,return-value]
        functions.append(function)
        return provider(function)

    table = desk.table(factory, {**PARTIAL, **QUICK})
    with pytest.raises(LookupTimeoutError, match="id = 1"):
        table.get(1)
    assert names(table, 1) == ["Alice"]
    assert [[event for event, _ in function.log.events] for function in functions] == [[], ["open", "lookup"]]
    assert counted(table) == {"missCount": 2, "numLoadFailures": 1, "loadCount": 1}


@CACHES
def test_a_version_that_hangs(desk: Desk, prompt: None, gate: threading.Event, cache: Options) -> None:
    """It is given up as well, and a new provider is asked next."""
    functions = [SyncFunction(rows_of(USERS)) for _ in range(2)]
    made_so_far: list[SyncFunction] = []

    def factory(context: LookupContext) -> LookupProvider:
        first = not made_so_far
        made_so_far.append(functions[len(made_so_far)])
        return provider(made_so_far[-1], version=lambda: str(gate.wait(BOUND_S)) if first else "1")

    table = desk.table(factory, {**cache, **QUICK})
    with pytest.raises(LookupTimeoutError, match=r"0.6 s, version\(\)"):
        table.get(1)
    assert names(table, 1) == ["Alice"]
    assert [function.log.asked for function in functions] == [[], [[1]]]


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
    table, other = desk.table(name, options), desk.table(name, options)
    assert names(table, 2) == ["Bob"]
    hangs += [False, True]
    desk.clock.tick(1)
    with pytest.raises(LookupTimeoutError, match=r"0.6 s, a batch of scan\(\)"):
        table.reload()
    assert names(table, 2) == names(other, 2) == ["Bob"]
    desk.clock.tick(1)
    other.reload()
    assert hangs == []


@CACHES
def test_an_asynchronous_lookup_that_waits_for_ever(desk: Desk, prompt: None, cache: Options) -> None:
    """One that can be cancelled is, and its function goes on."""
    cancelled = threading.Event()

    async def forever(keys: pa.Table) -> pa.Table:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    function = AsyncFunction(in_turn(forever, rows_of(USERS)))
    table = desk.serve(function, {**cache, **QUICK})
    with pytest.raises(LookupTimeoutError, match=r"within lookup.async.timeout = 0.6 s, key id = 1$"):
        table.get(1)
    assert cancelled.wait(BOUND_S)
    assert names(table, 1) == ["Alice"]
    assert function.log.opened == 1
    assert len(function.log.loops) == 1


def test_who_waits_for_a_call_that_hangs_goes_on(desk: Desk, prompt: None, gate: threading.Event) -> None:
    """Who waits for its turn behind a call that hangs has a new function when that is given up."""
    functions: list[SyncFunction] = []
    hanging = threading.Event()

    def answer(keys: pa.Table) -> pa.Table:
        hanging.set()
        gate.wait(BOUND_S)
        return rows_of(USERS)(keys)

    def factory(context: LookupContext) -> LookupProvider:
        functions.append(SyncFunction(rows_of(USERS) if functions else answer))
        return provider(functions[-1])

    table = desk.table(factory, QUICK)
    first = beside(lambda: table.get(1))
    assert hanging.wait(BOUND_S)
    assert names(table, 2) == ["Bob", "Charlie"]
    assert isinstance(first(BOUND_S), LookupTimeoutError)
    assert [len(function.log.asked) for function in functions] == [1, 1]


def test_a_late_open_opens_no_other_function(desk: Desk, prompt: None) -> None:
    """A new function is opened before its first lookup, even when the old one's open() ends before that."""
    gate = threading.Event()
    threads: list[threading.Thread] = []
    functions: list[SyncFunction] = []

    def slow() -> None:
        threads.append(threading.current_thread())
        gate.wait(BOUND_S)

    def factory(context: LookupContext) -> LookupProvider:
        function = SyncFunction(rows_of(USERS))
        if not functions:
            function.open = slow  # type: ignore[method-assign]
        functions.append(function)
        return provider(function)

    table = desk.table(factory, QUICK)
    with pytest.raises(LookupTimeoutError):
        table.get(1)
    gate.set()
    threads[0].join(BOUND_S)
    assert names(table, 1) == ["Alice"]
    assert [event for event, _ in functions[1].log.events] == ["open", "lookup"]


def test_a_function_that_is_replaced_while_it_is_opened(desk: Desk, prompt: None) -> None:
    """A new function is opened before its first lookup, also where the old one is being opened when it is made."""
    opening, opened, hangs = threading.Event(), threading.Event(), threading.Event()
    functions: list[SyncFunction] = []
    asked = itertools.count()

    def slow() -> None:
        opening.set()
        opened.wait(BOUND_S)

    def version() -> str:
        if next(asked) == 1:
            hangs.wait(BOUND_S)
        return "1"

    def factory(context: LookupContext) -> LookupProvider:
        function = SyncFunction(rows_of(USERS))
        if not functions:
            function.open = slow  # type: ignore[method-assign]
        functions.append(function)
        return provider(function, version=version)

    table = desk.table(factory, {**ONCE, "lookup.async.timeout": "1 s"})
    first = beside(lambda: names(table, 1))
    assert opening.wait(BOUND_S)
    second = beside(lambda: table.get(2))
    try:
        assert isinstance(second(BOUND_S), LookupTimeoutError)
    finally:
        opened.set()
        hangs.set()
    assert first(BOUND_S) == ["Alice"]
    assert names(table, 2) == ["Bob", "Charlie"]
    assert [event for event, _ in functions[1].log.events] == ["open", "lookup"]


def test_a_provider_that_cannot_be_made_again(desk: Desk, prompt: None, gate: threading.Event) -> None:
    """A call that hung is a timeout whatever comes next; a provider that cannot be made again is made at the next lookup."""
    functions: list[SyncFunction] = []

    def factory(context: LookupContext) -> LookupProvider:
        functions.append(SyncFunction(rows_of(USERS) if functions else holding(gate, rows_of(USERS))))
        if len(functions) == 2:
            raise OSError("not now")
        return provider(functions[-1])

    table = desk.table(factory, QUICK)
    with pytest.raises(LookupTimeoutError):
        table.get(1)
    assert names(table, 1) == ["Alice"]
    assert [len(function.log.asked) for function in functions] == [1, 0, 1]


def test_a_hit_waits_for_no_lookup(desk: Desk) -> None:
    """A key that is held is answered while another one is being looked up, with a version() as well as without."""
    gate, asking = threading.Event(), threading.Event()

    def slow(keys: pa.Table) -> pa.Table:
        asking.set()
        gate.wait(BOUND_S)
        return rows_of(USERS)(keys)

    table = desk.serve(SyncFunction(in_turn(rows_of(USERS), slow)), PARTIAL, version=lambda: "1")
    assert names(table, 1) == ["Alice"]
    other = beside(lambda: table.get(2))
    assert asking.wait(BOUND_S)
    hit = beside(lambda: names(table, 1))
    try:
        assert hit(0.3) == ["Alice"]
    finally:
        gate.set()
        other(BOUND_S)


def test_after_an_interrupt(desk: Desk, prompt: None, gate: threading.Event) -> None:
    """Who interrupts a lookup that takes long can look up something else at once: a new function answers."""
    functions: list[SyncFunction] = []
    waited: list[bool] = []

    def slow(keys: pa.Table) -> pa.Table:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        waited.append(gate.wait(BOUND_S))
        return rows_of(USERS)(keys)

    def factory(context: LookupContext) -> LookupProvider:
        functions.append(SyncFunction(rows_of(USERS) if functions else slow))
        return provider(functions[-1])

    table = desk.table(factory)
    was = signal.signal(signal.SIGINT, signal.default_int_handler)  # one in the background of a shell has none
    try:
        with pytest.raises(KeyboardInterrupt):
            table.get(1)
    finally:
        signal.signal(signal.SIGINT, was)
    assert names(table, 1) == ["Alice"]
    assert waited == []  # it stands still yet
