"""Providers that tell which keys have changed: caches keep all other rows, ask for the changed ones alone, and never answer with older rows."""

import decimal
import functools
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.cache.partial import change_log, host_cache
from pyspark_lookup.errors import LookupFunctionError
from pyspark_lookup.lookup.lookup_join import Lookup, LookupSpec, issue_token
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.sources.providers.functions import (
    AsyncLookupFunctionProvider,
    LookupContext,
    LookupFunctionProvider,
    LookupProvider,
    PartialCachingLookupProvider,
)
from pyspark_lookup.sources.registry import parse_options
from tests.support.fuzzing import seeds
from tests.support.lookup_functions import QUICK, SCHEMA, Desk, Plain, make_function, names, pairs

PARTIAL = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 10_000}
FULL = {"lookup.cache": "FULL"}
MODES = pytest.mark.parametrize("mode", [PARTIAL, FULL], ids=["PARTIAL", "FULL"])


def load_all(mode: dict[str, Any]) -> tuple[list[int], int]:
    """What `Shop.calls` returns if a table loads all rows."""
    return ([*range(110)], 0) if mode is PARTIAL else ([], 1)


class Shop:
    """A system whose version is the length of its log of changed keys.

    `looked_up` and `scans` count lookups and scans. `before` is called with the name of each call before it runs.
    """

    def __init__(self, count: int = 100) -> None:
        self.rows = {number: f"name {number}" for number in range(count)}
        self.log: list[tuple[int, Any]] = []
        self.looked_up, self.requested = list[int](), list[int]()
        self.since: list[str] = []
        self.scans = 0
        self.before: Callable[[str], object] = lambda call: None
        self.answer: Callable[[str], Any] = self.changed

    def write_row(self, key: int, name: str | None) -> None:
        """Change a row; without a name, delete it."""
        self.rows.pop(key, None)
        if name is not None:
            self.rows[key] = name
        self.log.append((len(self.log) + 1, key))

    def version(self) -> str:
        self.before("version")
        return str(len(self.log))

    def changed(self, since: str) -> Any:
        return pa.table({"id": pa.array([key for number, key in self.log if number > int(since)], pa.int64())})

    def changes(self, since: str) -> Any:
        self.since.append(since)
        self.before("changes")
        return self.answer(since)

    def look_up(self, keys: pa.Table) -> pa.Table:
        self.before("lookup")
        requested = self.requested = keys["id"].to_pylist()
        self.looked_up += requested
        rows = [{"id": key, "name": self.rows[key]} for key in requested if key in self.rows]
        self.before("answer")
        return pa.Table.from_pylist(rows, SCHEMA)

    def scan(self) -> Iterator[pa.RecordBatch]:
        self.scans += 1
        yield pa.RecordBatch.from_pylist([{"id": key, "name": name} for key, name in self.rows.items()], SCHEMA)

    def provider(self, context: LookupContext, kind: str = "sync") -> LookupProvider:
        cls: Any = LookupFunctionProvider if kind == "sync" else AsyncLookupFunctionProvider
        function = make_function(kind, self.look_up, 8)
        return cls(function, SCHEMA, self.version, changes=self.changes, scan=self.scan)

    def calls(self) -> tuple[list[int], int]:
        """The keys that were looked up and the number of scans, since the last call."""
        keys, scans = sorted(self.looked_up), self.scans
        self.looked_up, self.scans = [], 0
        return keys, scans

    def check(self, table: LookupTable, keys: Iterable[int] = range(110)) -> None:
        """The table has the rows of this system for all keys."""
        keys = list(keys)
        assert pairs(table, *keys) == [(place, self.rows[key]) for place, key in enumerate(keys) if key in self.rows]


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.mark.parametrize("versioned", [True, False])
def test_each_host_answers_from_its_own_copy(desk: Desk, shop: Shop, tmp_path: Path, versioned: bool) -> None:
    """In CACHE mode, a host that gets its version from another host scans: it can neither read that host's copy nor look up each key."""
    function = make_function("sync", shop.look_up)
    version = shop.version if versioned else None
    name = desk.name(lambda context: LookupFunctionProvider(function, SCHEMA, version, scan=shop.scan))
    reloaded = {**FULL, "lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "60 s"}

    def make_options(host: str) -> dict[str, str]:
        return desk.table(name, {**reloaded, "lookup.cache.dir": str(tmp_path / host)}).given

    def look_up(host: str, token: bytes) -> list[str]:
        keys, columns = pa.schema([("id", pa.int64())]), pa.schema([("name", pa.string())])
        spec = LookupSpec(make_options(host), keys, columns, ("name",))
        return Lookup(spec, {}).find([pa.array([1, 2])], token, None).columns[0].to_pylist()

    token = issue_token(runtime().effective(parse_options(make_options("a"))), None)
    assert look_up("a", token) == ["name 1", "name 2"]
    assert shop.calls() == ([], 1)
    desk.restart()
    desk.clock.tick(1)
    shop.write_row(1, "changed")
    for scans in (1, 0, 0):
        assert look_up("b", token) == ["changed", "name 2"]
        assert shop.calls() == ([], scans)
    shop.write_row(2, "changed, too")
    desk.clock.tick(61)
    assert look_up("b", token) == ["changed", "changed, too"]
    assert shop.calls()[0] == []


@MODES
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_only_changed_keys_are_looked_up(desk: Desk, shop: Shop, mode: dict[str, Any], kind: str) -> None:
    """A new version costs one lookup of each inserted, changed or deleted key, also for several versions at once and in the host's other processes."""
    name = desk.name(functools.partial(shop.provider, kind=kind))
    table = desk.table(name, mode)
    shop.check(table)
    assert shop.calls() == load_all(mode)
    shop.write_row(1, "new")
    shop.check(table)
    assert shop.calls() == ([1], 0)
    for key, value in ((2, "two"), (3, None), (105, "inserted"), (2, "two again")):
        shop.write_row(key, value)
    shop.check(table)
    assert shop.calls() == ([2, 3, 105], 0)
    shop.check(table)
    desk.restart()
    shop.check(desk.table(name, mode))
    shop.write_row(4, "four")
    shop.check(desk.table(name, mode))
    assert shop.calls() == ([4], 0)
    assert shop.since == ["0", "1", "5"]
    desk.clock.tick(1)
    assert table.metrics()["changesCallCount"] >= 1


def test_a_copy_of_many_versions(desk: Desk, shop: Shop) -> None:
    """However many layers a copy has, and while they are compacted, only changed keys are looked up, and scans have the same rows."""
    table = desk.table(shop.provider, FULL)
    shop.check(table)
    shop.calls()
    rng = random.Random(7)
    for number in range(16):
        changed = {rng.randrange(110) for _ in range(rng.randrange(1, 4))}
        for key in changed:
            shop.write_row(key, None if rng.random() < 0.3 else f"{key} in {number}")
        shop.check(table)
        assert shop.calls() == (sorted(changed), 0)
        assert sorted(table.scan()["name"].to_pylist()) == sorted(shop.rows.values())
    assert table.metrics()["snapshotCompactionCount"] > 0


@MODES
def test_what_changes_may_answer(desk: Desk, shop: Shop, mode: dict[str, Any]) -> None:
    """`changes` may name unchanged, repeated and unknown keys, add columns, use a narrower type, or return a batch."""
    table = desk.table(shop.provider, mode)
    shop.check(table)
    shop.calls()
    answers = (
        pa.table({"id": [1, 1, 50, 777, 1]}),
        pa.table({"id": pa.array([1, 50, 777], pa.int32()), "name": ["", "", ""]}),
        pa.record_batch({"id": pa.array([1, 50, 777], pa.int64())}),
    )
    for number, answer in enumerate(answers):
        shop.answer = lambda since, answer=answer: answer
        shop.write_row(1, f"{number}")
        shop.check(table)
        assert shop.calls() == ([1, 50] + [777] * (mode is FULL), 0)


@MODES
@pytest.mark.parametrize(
    "answer",
    [None, pa.table({"key": [1]}), pa.table({"id": ["1"]}), [1], "raises", "hangs"],
    ids=["None", "other column", "other type", "no table", "raises", "hangs"],
)
def test_after_a_bad_answer_all_keys_count_as_changed(
    desk: Desk, shop: Shop, gate: threading.Event, mode: dict[str, Any], answer: Any
) -> None:
    """If `changes` fails, all keys are looked up again, or the table is scanned, and the failure is counted; `changes` is called for the next version."""
    desk.gives_up = answer == "hangs"

    def answer_wrongly(since: str) -> Any:
        if answer == "raises":
            raise ConnectionError("no route")
        if answer == "hangs":
            gate.wait()
        return answer

    table = desk.table(shop.provider, {**mode, **QUICK})
    shop.check(table)
    shop.calls()
    shop.answer = answer_wrongly
    shop.write_row(1, "new")
    shop.check(table)
    assert shop.calls() == load_all(mode)
    assert table.metrics()["changesFailureCount"] == (answer is not None)
    shop.answer = shop.changed
    shop.write_row(2, "newer")
    shop.check(table)
    assert shop.calls() == ([2], 0)


@MODES
def test_a_table_that_is_set_back(desk: Desk, shop: Shop, mode: dict[str, Any]) -> None:
    """If an earlier version comes back, or a lower number, `changes` is not called: the log may have been set back, too."""
    table = desk.table(shop.provider, {**mode, "lookup.full-cache.retain": "0 s"} if mode is FULL else mode)
    for version in range(5):
        shop.write_row(version, f"in {version}")
    shop.check(table)
    saved_rows, saved_log = dict(shop.rows), list(shop.log)
    shop.write_row(5, "lost")
    shop.write_row(6, "lost, too")
    shop.check(table)
    shop.rows, shop.log = saved_rows, saved_log
    shop.check(table)
    shop.calls()
    shop.log = shop.log[:3]
    shop.rows[3], shop.rows[4] = "name 3", "name 4"
    calls = len(shop.since)
    shop.check(table)
    assert len(shop.since) == calls
    assert shop.calls() == load_all(mode)
    shop.write_row(7, "after")
    shop.check(table)
    assert shop.calls() == ([7], 0)


@MODES
def test_versions_that_are_no_numbers_may_come_back(desk: Desk, shop: Shop, mode: dict[str, Any]) -> None:
    """If the host has seen the version before, the table was set back: all rows are read again, whatever the log of changes says."""

    def lettered(context: LookupContext) -> LookupProvider:
        function = make_function("sync", shop.look_up)
        changes = lambda since: shop.changes(since.removeprefix("v"))  # noqa: E731
        return LookupFunctionProvider(function, SCHEMA, lambda: f"v{len(shop.log)}", changes=changes, scan=shop.scan)

    table = desk.table(lettered, {**mode, "lookup.full-cache.retain": "0 s"} if mode is FULL else mode)
    shop.write_row(1, "one")
    shop.check(table)
    for key in (2, 3):
        shop.write_row(key, "later")
        desk.clock.tick(60)
        shop.check(table)
    shop.rows[2], shop.rows[3], shop.log = "name 2", "name 3", shop.log[:1]
    if mode is FULL:
        desk.restart()
        table = desk.table(lettered, mode)
    shop.calls()
    shop.check(table)
    assert shop.calls() == load_all(mode)


def test_too_many_changes_for_lookups_are_a_scan(desk: Desk) -> None:
    """A sixteenth of the rows is looked up; one key more, and the table is scanned."""
    shop = Shop(16 * 1100)
    table = desk.table(shop.provider, FULL)
    assert len(names(table, 1)) == 1
    for count, expected in ((1100, (1100, 0)), (1101, (0, 1))):
        shop.calls()
        for key in range(count):
            shop.write_row(key, f"of {count}")
        assert names(table, 5) == [f"of {count}"]
        keys, scans = shop.calls()
        assert (len(keys), scans) == expected


def test_rows_without_a_key_change_with_a_scan(desk: Desk, shop: Shop) -> None:
    """A null among the changed keys makes a full cache scan, as no lookup returns that row. A partial cache has no such rows, and goes on."""
    whole, partial = desk.table(shop.provider, FULL), desk.table(shop.provider, PARTIAL)
    shop.check(whole)
    shop.check(partial)
    shop.calls()
    shop.answer = lambda since: pa.table({"id": pa.array([1, None], pa.int64())})
    shop.write_row(1, "one")
    shop.check(whole)
    assert shop.calls() == ([], 1)
    shop.check(partial)
    assert shop.calls() == ([1], 0)


KEYS = [
    (pa.float64(), [math.nan, 0.0, 1.5], [-math.nan, -0.0], [0, 1]),
    (pa.decimal128(12, 2), [decimal.Decimal("1.50"), decimal.Decimal("-2")], [decimal.Decimal("1.5")], [0]),
    (pa.string(), ["a", "A", "a "], ["a "], [2]),
    (pa.date32(), [1, 2], [2], [1]),
]


@MODES
@pytest.mark.parametrize(("kind", "keys", "changed", "places"), KEYS, ids=[str(kind) for kind, *_ in KEYS])
def test_keys_of_any_type(
    desk: Desk, mode: dict[str, Any], kind: pa.DataType, keys: list[Any], changed: list[Any], places: list[int]
) -> None:
    """Keys are compared as lookups compare them: NaN is NaN, and -0.0 is 0.0."""
    schema, version, looked_up = pa.schema([("id", kind), ("n", pa.int64())]), ["1"], list[int]()
    column = pa.array(keys, kind)
    values = list(range(len(keys)))

    def to_texts(keys: Any) -> list[str]:
        return [str(key + 0 if isinstance(key, float) else key) for key in keys.to_pylist()]

    def look_up(keys: pa.Table) -> pa.Table:
        numbers = [to_texts(column).index(text) for text in to_texts(keys["id"])]
        looked_up.extend(numbers)
        return pa.table({"id": column.take(numbers), "n": [values[number] for number in numbers]}, schema)

    def factory(context: LookupContext) -> LookupProvider:
        return LookupFunctionProvider(
            make_function("sync", look_up),
            schema,
            lambda: version[0],
            changes=lambda since: pa.table({"id": pa.array(changed, kind)}),
            scan=lambda: iter([pa.record_batch({"id": column, "n": values}, schema)]),
        )

    table = desk.table(factory, mode)
    assert table.get_many(pa.table({"id": column}))["n"].to_pylist() == values
    looked_up.clear()
    for place in places:
        values[place] += 100
    version[0] = "2"
    assert table.get_many(pa.table({"id": column}))["n"].to_pylist() == values
    assert sorted(looked_up) == places


def test_a_cache_of_a_provider_keeps_what_has_not_changed(desk: Desk, shop: Shop) -> None:
    """The changed keys are removed from it, and it stays open; if the changes are unknown, it is emptied."""
    cache = Plain()

    def factory(context: LookupContext) -> LookupProvider:
        function = make_function("sync", shop.look_up)
        return PartialCachingLookupProvider(function, cache, SCHEMA, shop.version, changes=shop.changes)

    table = desk.table(factory)
    shop.check(table, range(20))
    shop.calls()
    shop.write_row(3, "three")
    shop.check(table, range(20))
    assert (shop.calls(), cache.opened, cache.closed) == (([3], 0), 1, 0)
    shop.answer = lambda since: None
    shop.write_row(3, "3")
    shop.check(table, range(20))
    assert (shop.calls(), cache.opened, cache.closed) == (([*range(20)], 0), 2, 1)


def test_a_provider_with_a_scan_serves_each_mode(desk: Desk, shop: Shop) -> None:
    """Without a cache, lookups call the function and scans call `scan`; the same factory serves all three modes."""
    for mode in ({}, PARTIAL, FULL):
        table = desk.table(shop.provider, mode)
        shop.calls()
        assert names(table, 1) == ["name 1"]
        assert shop.calls() == (([], 1) if mode is FULL else ([1], 0))
        assert table.scan().num_rows == 100
        assert shop.calls() == ([], 0 if mode is FULL else 1)


def test_a_key_that_cannot_be_looked_up_does_not_stop_a_copy(desk: Desk, shop: Shop) -> None:
    """If some keys fail, the table is scanned; if all fail, the system is down, and the next query tries again."""
    table = desk.table(shop.provider, {**FULL, **QUICK})
    shop.check(table)

    def fail(call: str) -> None:
        if call == "answer" and (bad is None or bad in shop.requested):
            raise ValueError("bad key")

    bad: int | None = 2
    shop.write_row(1, "one")
    shop.write_row(2, "two")
    shop.before = fail
    shop.calls()
    shop.check(table)
    assert shop.calls()[1] == 1
    bad = None
    shop.write_row(3, "three")
    with pytest.raises(LookupFunctionError):
        names(table, 3)
    assert shop.calls()[1] == 0
    shop.before = lambda call: None
    shop.check(table)
    assert shop.calls() == ([3], 0)


class Watched(Shop):
    """A shop that records which states of a row a reader may see, and which lookups were unnecessary.

    `time` counts events. `states` has all states of each row, with the times when they began.
    """

    def __init__(self) -> None:
        super().__init__(12)
        self.time = 0
        self.states: dict[int, list[tuple[int, str | None]]] = {key: [(0, self.rows.get(key))] for key in range(16)}
        self.loaded_at: dict[int, int] = {}  # when the latest load of a key began that has ended
        self.named_at: dict[int, int] = {}  # when `changes` last named a key
        self.loading: list[int] = []
        self.unnecessary: list[str] = []

    def write_row(self, key: int, name: str | None) -> None:
        super().write_row(key, name)
        self.time += 1
        self.states[key].append((self.time, name))

    def changed(self, since: str) -> Any:
        changed_rows = super().changed(since)
        self.time += 1
        self.named_at |= dict.fromkeys(changed_rows["id"].to_pylist(), self.time)
        return changed_rows

    def look_up(self, keys: pa.Table) -> pa.Table:
        requested = keys["id"].to_pylist()
        self.time += 1
        began_at = self.time
        for key in requested:
            loaded_at = self.loaded_at.get(key)
            if loaded_at is not None and self.named_at.get(key, -1) < loaded_at and key not in self.loading:
                self.unnecessary.append(f"{key} at {self.time}: loaded at {loaded_at}, and not changed since")
        self.loading += requested
        try:
            return super().look_up(keys)
        finally:
            for key in requested:
                self.loading.remove(key)
                self.loaded_at[key] = began_at

    def allowed(self, key: int, since: int) -> set[str | None]:
        """The states of a row at some time from `since` until now."""
        states = self.states[key]
        return {
            name
            for number, (_, name) in enumerate(states)
            if number + 1 == len(states) or states[number + 1][0] > since
        }


@pytest.mark.parametrize("seed", seeds(1))
def test_any_history_of_several_processes(desk: Desk, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Rows change, and other processes look up, at any moment inside a lookup: before and after its version, the changes and its rows.

    No lookup shows a row from before its version, and no key is looked up again that has not changed.
    """
    # A process that waits would wait for the one that it interrupts.
    monkeypatch.setattr(change_log, "_LOCK_WAIT_S", 0.0)
    monkeypatch.setattr(change_log, "_STEPS_AT_MOST", 12)
    monkeypatch.setattr(host_cache, "_SEGMENTS_AT_MOST", 2)
    rng, shop = random.Random(seed), Watched()
    # The second process may be interrupted in a lookup in which the first one was interrupted, and so on.
    tables: list[tuple[Any, LookupTable]] = []
    name = desk.name(shop.provider)
    for _ in range(3):
        desk.restart()
        tables.append((desk._processes[-1], desk.table(name, PARTIAL)))
    busy: list[int] = []

    def interrupt(call: str) -> None:
        for _ in range(rng.choice((0, 0, 1, 2))):
            if rng.random() < 0.6:
                shop.write_row(rng.randrange(16), rng.choice((None, f"at {shop.time}")))
            else:
                look_up()

    def look_up() -> None:
        idle = [number for number in range(len(tables)) if number not in busy]
        if not idle:
            return
        number = rng.choice(idle)
        process, table = tables[number]
        before = runtime()
        keys = sorted(rng.sample(range(16), rng.randrange(1, 6)))
        busy.append(number)
        desk._be(process)
        since = shop.time
        try:
            names_by_key = dict.fromkeys(keys)
            for place, text in pairs(table, *keys):
                names_by_key[keys[place]] = text
        finally:
            desk._be(before)
            busy.remove(number)
        for key in keys:
            assert names_by_key[key] in shop.allowed(key, since), (
                seed,
                key,
                names_by_key[key],
                since,
                shop.states[key],
            )

    for process, table in tables:  # the first query of a host makes the others wait
        desk._be(process)
        assert names(table, 1) == ["name 1"]
    shop.before = interrupt
    for _ in range(20):
        look_up()
        if rng.random() < 0.5:
            shop.write_row(rng.randrange(16), rng.choice((None, f"at {shop.time}")))
    assert shop.unnecessary == []
    assert len(shop.since) > 5
