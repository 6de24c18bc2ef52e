"""Tables of other systems: rows by key, cached, by us or by the provider itself; and any history of lookups."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_lookup.base.errors import LookupFunctionError, OptionError, PredicateError, SchemaError
from pyspark_lookup.base.metrics import UNSET, CacheMetricGroup
from pyspark_lookup.cache.memory import KEY_INDEX, CachedRows, DefaultLookupCache, LookupCache
from pyspark_lookup.providers.functions import LookupContext, LookupProvider
from tests.fuzzing import MORE
from tests.providers.common import (
    CACHES,
    FLIP,
    KINDS,
    NONE,
    ONCE,
    PARTIAL,
    RETRY,
    SCHEMA,
    USERS,
    Desk,
    Options,
    SyncFunction,
    counted,
    in_turn,
    made,
    names,
    pairs,
    provider,
    raises,
    rows_of,
    users,
)

IDS = st.integers(0, 9) | st.none()
ROWS = st.tuples(st.integers(0, 9), st.sampled_from(["x", "y", ""]), st.sampled_from([0, 0, 0, 1, 3, 6]))


@settings(max_examples=30 * MORE, deadline=None)
@given(
    batches=st.lists(st.tuples(st.lists(IDS, max_size=8), st.booleans()), min_size=1, max_size=6),
    rows=st.lists(ROWS, max_size=12),
    size=st.integers(1, 4),
    kind=st.sampled_from(["sync", "async"]),
    cache=st.sampled_from([PARTIAL, NONE, {**PARTIAL, "lookup.partial-cache.cache-missing-key": False}]),
    retries=st.integers(0, 2),
    askings=st.sampled_from([1, 1, 2, 3]),
    seed=st.integers(0, 99),
    fails=st.sets(st.integers(0, 12), max_size=5),
)
def test_any_history(
    batches: list[tuple[list[int | None], bool]],
    rows: list[tuple[int, str, int]],
    size: int,
    kind: str,
    cache: Options,
    retries: int,
    askings: int,
    seed: int,
    fails: set[int],
) -> None:
    """Whatever is asked, fails and comes late, in whatever pieces and processes of a host: answers are those of a dictionary.

    Each key is asked for in full calls until it is held, and not again by another process. Calls that fail are tried again, each
    by itself; keys without rows are asked for again, alone. A call that fails too often takes its whole batch with it and nothing
    else; counters add up. A process opens its function when it needs it. `rows`: (id, name, after how many calls it is there).
    """
    shuffled = random.Random(seed)
    calls: list[tuple[list[int], dict[int, list[str]] | None]] = []  # the keys, and their rows; None: it failed

    def answer(keys: pa.Table) -> pa.Table:
        asked, number = keys.column("id").to_pylist(), len(calls)
        if number in fails:
            calls.append((asked, None))
            raise OSError("down")
        held = {key: [name for id_, name, after in rows if id_ == key and number >= after] for key in asked}
        calls.append((asked, held))
        order = [key for key in asked for _ in held[key]]
        shuffled.shuffle(order)
        left = {key: iter(held[key]) for key in order}
        return pa.table({"id": order, "name": [next(left[key]) for key in order]}, schema=SCHEMA)

    retried = slept = 0

    def replayed(
        left: set[int], trace: Iterator[tuple[list[int], dict[int, list[str]] | None]]
    ) -> dict[int, list[str]] | None:
        """What the calls of a batch brought, which must be those that are allowed; None if it failed."""
        nonlocal retried, slept
        found: dict[int, list[str]] = {}
        for asking in range(askings if left else 0):
            slept, retried = slept + (asking > 0), retried + (len(left) if asking else 0)
            pieces = []
            for _ in range(-(-len(left) // size)):
                for attempt in range(retries + 1):
                    keys, brought = next(trace)
                    assert not attempt or keys == pieces[-1]
                    pieces += [] if attempt else [keys]
                    if brought is not None:
                        break
                    retried += len(keys) if attempt < retries else 0
                else:
                    return None
                found |= brought
            assert [len(keys) for keys in pieces[:-1]] == [size] * (len(pieces) - 1)
            assert sorted(itertools.chain(*pieces)) == sorted(left)
            left = {key for key in left if not found[key]}
            if not left:
                break
        return found

    function = made(kind, answer, size)
    again = {**RETRY, "lookup.retry.max-attempts": askings - 1} if askings > 1 else {}
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as monkeypatch:
        desk = Desk(Path(directory) / "cache", monkeypatch)
        table = desk.serve(function, {**cache, **again, "lookup.max-retries": retries, "lookup.async.capacity": 1})
        known: dict[int, list[str]] = {}
        hits = misses = failures = opened = 0
        is_open = False
        for batch, elsewhere in batches:
            if elsewhere:
                desk.restart()
                is_open = False
            valid = [key for key in batch if key is not None]
            new = set(valid) - set(known)
            misses, hits = misses + len(new), hits + len(valid) - len(new)
            opened, is_open = opened + (bool(new) and not is_open), is_open or bool(new)
            before = len(calls)
            try:
                answered = pairs(table, *batch)
            except LookupFunctionError:
                answered = None
            trace = iter(calls[before:])
            found = replayed(new, trace)
            assert list(trace) == []
            assert (answered is None) == (found is None)
            if found is None:
                failures += len(new)
                continue
            held = known | found
            assert answered == [(n, name) for n, key in enumerate(batch) if key is not None for name in held[key]]
            if cache:
                known |= {key: names for key, names in found.items() if names or len(cache) == len(PARTIAL)}
        assert function.log.names.count("open") == opened
        metrics = table.metrics()
        assert [metrics[name] for name in FLIP] == ([hits, misses, misses - failures, failures] if cache else [0] * 4)
        assert metrics["lookupRetryCount"] == retried
        assert desk.clock.slept.count(7.0) == slept
        if misses and cache and not any(elsewhere for _, elsewhere in batches):
            assert metrics["numCachedRecords"] == sum(max(len(names), 1) for names in known.values())
        desk.close()


# --- what is cached ---------------------------------------------------------------------------------------------


VERSIONED: Options = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 100}


def test_gauges_are_set_by_the_first_load(desk: Desk) -> None:
    """Before the first lookup no gauge is set; the time of the latest load is that of the lookup, whatever it found."""
    function = users()
    table = desk.serve(function, PARTIAL)
    before = table.metrics()
    assert {before[name] for name in ("latestLoadTime", "numCachedRecords", "numCachedBytes")} == {UNSET}
    held = function.answer
    function.answer = lambda keys: (desk.clock.tick(0.25), held(keys))[1]
    table.get(3)
    after = table.metrics()
    assert (after["latestLoadTime"], after["numCachedRecords"]) == (250, 1)
    assert after["numCachedBytes"] > 0
    function.answer = raises(OSError())
    with pytest.raises(LookupFunctionError):
        table.get(1)
    assert table.metrics()["latestLoadTime"] == 250


@pytest.mark.parametrize(("retry", "times"), [(NONE, 1), (RETRY, 4)], ids=["once", "asked again"])
def test_absences_are_not_kept_on_request(desk: Desk, retry: Options, times: int) -> None:
    """With cache-missing-key=false a key without rows is looked up each time, a new row is seen at once and kept."""
    held = {1: ["Alice"]}
    function = SyncFunction(rows_of(held))
    table = desk.serve(function, {**PARTIAL, **retry, "lookup.partial-cache.cache-missing-key": False})
    assert (table.get(3), table.get(3)) == ([], [])
    held[3] = ["Dora"]
    assert (names(table, 3), names(table, 3)) == (["Dora"], ["Dora"])
    assert function.log.asked == [[3]] * (2 * times + 1)
    assert counted(table) == {"hitCount": 1, "missCount": 3, "loadCount": 3}
    assert table.metrics()["numCachedRecords"] == 1


def test_an_answer_is_as_old_as_it_may_be(desk: Desk) -> None:
    """Without versions a row is answered until it is as old as expire-after-write says, counted from before it was asked for."""
    held = {1: ["Alice"]}

    def slow(keys: pa.Table) -> pa.Table:
        found = rows_of(held)(keys)
        desk.clock.tick(10)
        return found

    function = SyncFunction(slow)
    table = desk.serve(function, PARTIAL)
    assert names(table, 1) == ["Alice"]
    held[1] = ["Alicia"]
    desk.clock.tick(3589)
    assert names(table, 1) == ["Alice"]
    desk.clock.tick(1)
    assert names(table, 1) == ["Alicia"]
    assert len(function.log.asked) == 2


@pytest.mark.parametrize("source", ["UFS", "CACHE"])
def test_a_new_version_is_seen_by_the_next_lookup(desk: Desk, source: str) -> None:
    """Everything is asked for again when the version is another, absences too; it is asked for once per query or interval."""
    version, held = ["1"], {1: ["Alice"]}
    asked: list[str] = []

    def ask() -> str:
        asked.append(version[0])
        return version[0]

    function = SyncFunction(rows_of(held))
    interval = {"lookup.metadata.sync-interval": "5 min"} if source == "CACHE" else {}
    table = desk.serve(function, {**VERSIONED, "lookup.metadata.source": source, **interval}, version=ask)
    assert (names(table, 1), table.get(3)) == (["Alice"], [])
    held.update({1: ["Alicia"], 3: ["Dora"]})
    assert (names(table, 1), table.get(3)) == (["Alice"], [])  # as long as the provider says that nothing changed
    version[0] = "2"
    if source == "CACHE":
        desk.clock.tick(300)
        assert names(table, 1) == ["Alice"]
        desk.clock.tick(1)
    assert (names(table, 1), names(table, 3)) == (["Alicia"], ["Dora"])
    assert function.log.asked == [[1], [3]] * 2
    assert asked == (["1", "2"] if source == "CACHE" else ["1"] * 4 + ["2"] * 2)
    desk.clock.tick(10**6)
    assert names(table, 1) == ["Alicia"]  # no time makes it old
    assert counted(table) == {"hitCount": 3 + (source == "CACHE"), "missCount": 4, "loadCount": 4}


@CACHES
def test_predicates(desk: Desk, cache: Options) -> None:
    """`lookup.where` holds for the answer whatever the provider fetches; a key whose rows fail it is held, and has none."""
    function = users()
    table = desk.serve(function, {**cache, "lookup.where": "name <> 'Bob' AND name LIKE 'C%'"})
    assert [names(table, key) for key in (1, 2, 1, 2)] == [[], ["Charlie"]] * 2
    assert function.log.asked == [[1], [2]] * (1 if cache else 2)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"lookup.keys": "zip"}, SchemaError, "lookup.keys: the table has no column 'zip'; it has id, name"),
        ({"lookup.columns": "zip"}, SchemaError, "lookup.columns: the table has no column 'zip'; it has id, name"),
        ({"lookup.where": "zip = 1"}, PredicateError, "no column 'zip'"),
        ({"lookup.where": "zip = 1", "lookup.columns": "name"}, PredicateError, "no column 'zip'"),
        ({"lookup.where": "name > 1"}, PredicateError, "name"),
    ],
    ids=str,
)
def test_columns_that_are_not_there(desk: Desk, options: Options, kind: type[Exception], says: str) -> None:
    """Options that name other columns than the provider's are refused at the first query, before the function is asked."""
    function = users()
    with pytest.raises(kind, match=says):
        desk.serve(function, options).get(1)
    assert function.log.events == []


@CACHES
def test_columns_reach_the_provider(desk: Desk, cache: Options) -> None:
    """A factory is told which columns are wanted, those of the predicate too, and need bring no others."""
    schema = pa.schema([*SCHEMA, ("flag", pa.bool_()), ("rest", pa.int64())])
    rows = [{"id": 1, "name": "Alice", "flag": True}, {"id": 1, "name": "Alicia", "flag": False}]
    everything = pa.Table.from_pylist(rows, schema)

    def factory(context: LookupContext) -> LookupProvider:
        wanted = [*context.keys, *(schema.names if context.columns is None else context.columns)]
        return provider(SyncFunction(lambda keys: everything.select(wanted)), schema)

    table = desk.table(factory, {**cache, "lookup.columns": "name", "lookup.where": "flag = true AND id IN (1)"})
    for _ in range(2):
        assert table.get(1) == [{"id": 1, "name": "Alice"}]
    assert table.scan().to_pylist() == [{"name": "Alice"}]
    with pytest.raises(LookupFunctionError, match="column 'rest' is missing"):
        table.scan(["rest"])


# --- caches that providers bring --------------------------------------------------------------------------------


class DictCache(LookupCache):
    """A cache in a few lines, of tables with the key column id, and what was done to it."""

    def __init__(self) -> None:
        self.held: dict[Any, list[dict[str, Any]]] = {}
        self.calls: list[str] = []
        self._schema: pa.Schema | None = None

    def open(self, metrics: CacheMetricGroup) -> None:
        self.calls.append("open")

    def get_many(self, keys: pa.Table) -> CachedRows:
        self.calls.append("get")
        return self._rows(keys)

    def peek_many(self, keys: pa.Table) -> CachedRows:
        self.calls.append("peek")
        return self._rows(keys)

    def _rows(self, keys: pa.Table) -> CachedRows:
        wanted = keys.column("id").to_pylist()
        present = np.array([key in self.held for key in wanted], np.bool_)
        if self._schema is None:
            return CachedRows(present, None)
        rows = [{**row, KEY_INDEX: n} for n, key in enumerate(wanted) for row in self.held.get(key, ())]
        return CachedRows(present, pa.Table.from_pylist(rows, self._schema))

    def put_many(self, keys: pa.Table, rows: pa.Table, ages_s: Any = None) -> None:
        self.calls.append("put")
        self._schema = rows.schema
        for n, key in enumerate(keys.column("id").to_pylist()):
            self.held[key] = [row for row in rows.to_pylist() if row[KEY_INDEX] == n]

    def invalidate_many(self, keys: pa.Table) -> None:
        for key in keys.column("id").to_pylist():
            self.held.pop(key, None)

    def size(self) -> int:
        return len(self.held)

    def bytes(self) -> int:
        return 100 * len(self.held)

    def close(self) -> None:
        self.calls.append("close")
        self.held.clear()


@KINDS
def test_a_cache_of_its_own(desk: Desk, kind: str) -> None:
    """A provider's own cache is asked first and told what was loaded, not what failed; no option is needed, and a version() neither."""
    function, cache = made(kind, in_turn(raises(OSError()), rows_of(USERS))), DictCache()
    table = desk.serve(function, {**ONCE, "lookup.cache": "PARTIAL"} if kind == "sync" else ONCE, cache=cache)
    with pytest.raises(LookupFunctionError):
        table.get(1)
    assert "put" not in cache.calls
    assert [names(table, key) for key in (1, 3, 1, 3, 2)] == [["Alice"], [], ["Alice"], [], ["Bob", "Charlie"]]
    assert function.log.asked == [[1], [1], [3], [2]]
    assert {key: [row["name"] for row in rows] for key, rows in cache.held.items()} == {**USERS, 3: []}
    assert counted(table) == {"hitCount": 2, "missCount": 4, "loadCount": 3, "numLoadFailures": 1}
    gauges = table.metrics()
    assert (gauges["numCachedRecords"], gauges["numCachedBytes"]) == (3, 300)
    assert cache.calls.count("open") == 1
    cache.invalidate({"id": 1})
    assert names(table, 1) == ["Alice"]
    assert function.log.asked[-1] == [1]


def test_a_cache_of_its_own_is_emptied_for_a_new_version(desk: Desk, tmp_path: Path) -> None:
    """It holds rows of one version, process and table: for another version it is closed and opened anew.

    Nobody knows its bounds but its class, so nothing of it is shared by the host.
    """
    version, held, caches = ["1"], {1: ["Alice"]}, list[DictCache]()
    function = SyncFunction(rows_of(held))

    def factory(context: LookupContext) -> LookupProvider:
        caches.append(DictCache())
        return provider(function, version=lambda: version[0], cache=caches[-1])

    name = desk.name(factory)
    table, other = desk.table(name), desk.table(name, {"lookup.cache.dir": str(tmp_path / "other")})
    assert (names(table, 1), names(table, 1)) == (["Alice"], ["Alice"])
    version[0], held[1] = "2", ["Alicia"]
    assert names(other, 1) == ["Alicia"]
    assert (names(table, 1), names(table, 1)) == (["Alicia"], ["Alicia"])
    assert function.log.asked == [[1]] * 3
    assert [call for call in caches[0].calls if call in ("open", "close")][:3] == ["open", "close", "open"]
    desk.restart()
    assert names(table, 1) == ["Alicia"]
    assert function.log.asked == [[1]] * 4


@KINDS
def test_a_default_cache_of_its_own(desk: Desk, kind: str) -> None:
    """A DefaultLookupCache brings the bounds that it was built with; with them its host shares what was loaded."""
    function = made(kind, rows_of(USERS))

    def factory(context: LookupContext) -> LookupProvider:
        cache = DefaultLookupCache(expire_after_write_s=60.0, cache_missing_key=False, clock=desk.clock.host().steady_s)
        return provider(function, cache=cache)

    table = desk.table(factory)
    assert [names(table, key) for key in (1, 3, 1, 3)] == [["Alice"], [], ["Alice"], []]
    assert function.log.asked == [[1], [3], [3]]
    desk.restart()
    desk.clock.tick(59)
    assert names(table, 1) == ["Alice"]
    assert len(function.log.asked) == 3
    desk.clock.tick(1)
    assert names(table, 1) == ["Alice"]
    assert function.log.asked[3:] == [[1]]


def test_a_default_cache_of_its_own_must_expire_or_have_versions(desk: Desk) -> None:
    """Without a version its rows would never be too old."""
    forever = DefaultLookupCache.new_builder().max_rows(5).build()
    with pytest.raises(OptionError, match=r"has no version\(\), so nothing tells when a row has changed"):
        desk.serve(users(), cache=forever)
    assert names(desk.serve(users(), cache=forever, version=lambda: "1"), 1) == ["Alice"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({**PARTIAL}, "lookup.partial-cache.expire-after-write: provider .* brings a cache of its own"),
        ({"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 5}, "brings a cache of its own"),
        ({"lookup.cache": "NONE"}, "lookup.cache = 'NONE': provider .* brings a cache of the kind 'PARTIAL'"),
        ({"lookup.cache": "FULL"}, "lookup.cache = 'FULL': provider .* brings a cache of the kind 'PARTIAL'"),
    ],
    ids=["expiry", "rows", "NONE", "FULL"],
)
@pytest.mark.parametrize(
    "cache", [DictCache, lambda: DefaultLookupCache(expire_after_write_s=60.0)], ids=["own", "default"]
)
@KINDS
def test_options_beside_a_cache_of_its_own(
    desk: Desk, kind: str, cache: Callable[[], LookupCache], options: Options, says: str
) -> None:
    """Bounds of another cache would be ignored, and another kind is a contradiction: both are refused."""
    with pytest.raises(OptionError, match=says):
        desk.serve(made(kind, rows_of(USERS)), options, cache=cache())
