"""Tables of other systems: how a provider is made, of which options, for which tables and processes; whole tables, scans, bad keys."""

import asyncio
import dataclasses
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.cache.memory import KEY_INDEX, DefaultLookupCache, LookupCache
from pyspark_lookup.errors import (
    LookupFunctionError,
    LookupTimeoutError,
    OptionError,
    PysparkLookupError,
    UnreadableColumnError,
)
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.options.reload_trigger import CacheReloadTrigger
from pyspark_lookup.sources.providers.functions import (
    FullCachingLookupProvider,
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
    Desk,
    Options,
    Plain,
    SyncFunction,
    beside,
    counted,
    in_turn,
    make_answer,
    make_function,
    names,
    pairs,
    provider,
    raises,
    users,
)
from tests.support.workers import in_fresh_process

PEOPLE: dict[int | None, list[str]] = {1: ["Julian"], 3: ["Jark", "Jackson"], 4: ["Fabian"]}


class Manual(CacheReloadTrigger):
    """Reloads when a test says so."""

    def __init__(self) -> None:
        self.opened, self.closed = threading.Event(), threading.Event()
        self._context: CacheReloadTrigger.Context | None = None

    def open(self, context: CacheReloadTrigger.Context) -> None:
        self._context = context
        self.opened.set()

    def close(self) -> None:
        self.closed.set()

    def fire(self) -> None:
        """Trigger a reload and wait for it. Raises the error of the reload."""
        assert self.opened.wait(BOUND_S)
        self._context.trigger_reload().result(BOUND_S)


class Whole:
    """A table that is scanned: `people` are its rows, `scans` counts, `problem` is raised by the next scans."""

    def __init__(self) -> None:
        self.people = dict(PEOPLE)
        self.version = "1"
        self.scans = 0
        self.problem: Exception | None = None
        self.trigger = Manual()

    def scan(self) -> Iterator[pa.RecordBatch]:
        self.scans += 1
        for key, row_names in self.people.items():
            if self.problem is not None and key == 2:
                raise self.problem
            yield pa.RecordBatch.from_pydict({"id": [key] * len(row_names), "name": list(row_names)}, SCHEMA)

    def triggered(self, context: LookupContext) -> LookupProvider:
        return FullCachingLookupProvider(self.scan, SCHEMA, self.trigger)

    def versioned(self, context: LookupContext) -> LookupProvider:
        return FullCachingLookupProvider(self.scan, SCHEMA, version=lambda: self.version)


def test_what_a_factory_is_told(desk: Desk) -> None:
    """Keys, options without their prefix, and the path; what was not given is None. Once more if not all columns are wanted."""
    contexts: list[LookupContext] = []
    schema = pa.schema([("id", pa.int64()), ("more", pa.int64()), ("name", pa.string()), ("flag", pa.bool_())])

    def factory(context: LookupContext) -> LookupProvider:
        contexts.append(context)
        return provider(users(), schema)

    desk.table(factory)
    assert contexts.pop() == LookupContext(("id",), None, {}, None)
    options = {
        "lookup.keys": "name,id",
        "lookup.provider.table": "users",
        "lookup.provider.connect.timeout": 5,
        "lookup.provider.safe": True,
    }
    parsed = {"table": "users", "connect.timeout": "5", "safe": "true"}
    context = LookupContext(("name", "id"), None, parsed, "jdbc:anything/at all")
    desk.table(factory, options, path="jdbc:anything/at all")
    assert contexts == [context]
    more = {"lookup.columns": "flag, `name`", "lookup.where": "more = 1"}
    desk.table(factory, {**options, **more}, path="jdbc:anything/at all")
    assert contexts[1:] == [context, dataclasses.replace(context, columns=("more", "flag"))]
    with pytest.raises(AttributeError):
        context.keys = ()  # type: ignore[misc]


def test_factories_that_fail(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factory that is not there, is none, cannot be imported or raises is an error of the option; the next table tries again."""
    (tmp_path / "broken_provider_of_ours.py").write_text("raise RuntimeError('half of a module')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, says in (
        ("no_such_module_of_ours:make", r"failed: ModuleNotFoundError"),
        (f"{__name__}:Whole.nobody", r"failed: AttributeError"),
        (f"{__name__}:SCHEMA", r"failed: TypeError\(.*not callable"),
        ("broken_provider_of_ours:make", r"RuntimeError\('half of a module'\)"),
        ("a module:make", "expected module:factory"),
    ):
        with pytest.raises(OptionError, match=f"option lookup.provider = '{name}'.*{says}"):
            desk.table(name)
    error, result = OptionError("option lookup.provider.table is missing"), provider(users())
    name = desk.name(in_turn(raises(ValueError("gone")), raises(error), lambda context: result))
    for says in (rf"{name}' failed: ValueError\('gone'\)", r"^option lookup.provider.table is missing$"):
        with pytest.raises(OptionError, match=says):
            desk.table(name)
    assert names(desk.table(name), 1) == ["Alice"]


def make_schema(**more: pa.DataType) -> pa.Schema:
    return pa.schema({"id": pa.int64(), **more})


NO_PROVIDER = r"': the factory returned (.|\n)*: make it return a LookupProvider"
# What a factory returns instead of a provider that can be taken, or asked; the error's kind, and what it says.
RETURNED: list[tuple[Any, type[Exception], str]] = [
    *((returned, OptionError, NO_PROVIDER) for returned in (None, users(), LookupFunctionProvider)),
    (provider(users(), None), OptionError, ""),  # type: ignore[arg-type]
    (LookupProvider(SCHEMA), OptionError, ".* has neither a lookup function nor a scan"),
    *((provider(SyncFunction(make_answer(USERS), size)), PysparkLookupError, "") for size in (-1, "5", 2.5)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("returned", "kind", "says"), RETURNED, ids=range(len(RETURNED)))
def test_a_factory_that_returns_something_else(desk: Desk, returned: Any, kind: type[Exception], says: str) -> None:
    """What is not a provider is refused by the factory's name, and so is a provider that can answer nothing."""
    with pytest.raises(kind, match=f"provider_1:make{says}"):
        desk.table(lambda context: returned).get(1)


def test_columns_that_cannot_be_read(desk: Desk) -> None:
    """Columns that cannot be read are refused by name, unless lookup.columns leaves them out; so are keys."""
    schema = make_schema(name=pa.string(), at=pa.time64("us"), A=pa.int64(), a=pa.int64())
    name = desk.name(lambda context: provider(users(), schema))
    for options, says in (
        ({}, r"column 'at': type time64.*\(provider .*provider_1:make\).* without 'at': name the other columns"),
        ({"lookup.columns": "id, a"}, "columns 'A' and 'a' differ at most in letter case"),
        ({"lookup.keys": "at"}, "column 'at': type time64"),
    ):
        with pytest.raises(UnreadableColumnError, match=says):
            desk.table(name, options).get(1)
    for mode in ({}, BY_ROWS | {"lookup.partial-cache.expire-after-write": "1 min"}):
        assert desk.table(name, {"lookup.columns": "name", **mode}).get(1) == [{"id": 1, "name": "Alice"}]


Make = Callable[[LookupContext], LookupProvider]
BY_ROWS: Options = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 5}
FULL: Options = {"lookup.cache": "FULL"}
PERIODIC: Options = {**FULL, "lookup.full-cache.periodic-reload.interval": "5 min"}


def keyed(version: bool = False, cache: Callable[[], LookupCache | None] = lambda: None, kind: str = "sync") -> Make:
    return lambda context: provider(
        make_function(kind, make_answer(USERS)), SCHEMA, (lambda: "1") if version else None, cache()
    )


def lasting() -> LookupCache:
    return DefaultLookupCache.new_builder().max_rows(5).build()


# What each kind of provider is refused beside.
REFUSED: list[tuple[Make, list[tuple[Options, str]]]] = [
    (keyed(), [
        ({"lookup.async.capacity": 5}, r"lookup.async.capacity has no meaning, because provider .* is synchronous"),
        ({"lookup.view": "files"}, r"describe\(\), metrics\(\) or"),
        (FULL, "has no scan function: set lookup.cache = .PARTIAL"),
        (BY_ROWS, r"has no version\(\).*set lookup.partial-cache.expire-after-write"),
        ({"lookup.provider.password": "hunter2"}, "lookup.provider.password looks like a credential"),
        ({"lookup.version": "3"}, "lookup.version"),
        ({"lookup.valid-write-ids": "t:0:5::"}, "lookup.valid-write-ids"),
    ]),
    (keyed(version=True), [({"lookup.cache": "PARTIAL"}, "would grow for ever")]),
    (lambda context: LookupFunctionProvider(users(), SCHEMA, changes=lambda since: None), [
        (PARTIAL, r"has changes\(\) but no version\(\)"),
    ]),
    (keyed(cache=lasting), [(NONE, r"has no version\(\) that tells when rows have changed")]),
    *((keyed(cache=Plain, kind=kind), [
        (PARTIAL, "lookup.partial-cache.expire-after-write: provider .* has its own cache"),
        (FULL, "lookup.cache = 'FULL': provider .* works only with 'PARTIAL'"),
    ]) for kind in ("sync", "async")),
    (Whole().versioned, [
        ({"lookup.async.capacity": 5}, "lookup.async.capacity has no meaning, because provider .* is read as a whole"),
    ]),
    (lambda context: FullCachingLookupProvider(Whole().scan, SCHEMA), [
        (NONE, r"neither a reload trigger nor a version\(\): set lookup.full-cache.periodic-reload.interval"),
    ]),
    (Whole().triggered, [
        (PARTIAL, "lookup.cache = 'PARTIAL': provider .* works only with 'FULL'"),
        ({"lookup.metadata.source": "UFS"}, r"lookup.metadata.source = 'UFS': provider .* has no version\(\)"),
        (PERIODIC, "lookup.full-cache.periodic-reload.interval"),
    ]),
]  # fmt: skip


def test_options_beside_what_a_provider_is(desk: Desk) -> None:
    """An option that a provider cannot follow, or would ignore or contradict, is refused by its name."""
    for make, refused in REFUSED:
        for options, says in refused:
            with pytest.raises(OptionError, match=says):
                desk.table(make, options).get(1)


def test_a_table_needs_a_path_or_a_provider_with_keys(desk: Desk) -> None:
    """Without a path and a provider there is no table; a table that is asked by key says by which."""
    with pytest.raises(OptionError, match="path is missing"):
        LookupTable(None, {"lookup.keys": "id"})
    with pytest.raises(OptionError, match=r"lookup.keys is missing: .* provider .*, among id, name"):
        LookupTable(None, {"lookup.provider": desk.name(lambda context: provider(users()))})


@EITHER
def test_tables_of_the_same_options_are_one(desk: Desk, kind: str, cache: Options) -> None:
    """Within a process they share a provider, its function, its cache and its counters; so does a pickled copy of one."""
    function = make_function(kind, make_answer(USERS))
    providers = iter([function])  # the provider of a second one could not be made
    name = desk.name(lambda context: provider(next(providers)))
    tables = [desk.table(name, cache) for _ in range(2)]
    tables.append(pickle.loads(pickle.dumps(tables[0])))
    for table in tables:
        assert names(table, 1) == ["Alice"]
    assert function.log.names.count("open") == 1
    assert function.log.requested_keys == ([[1]] if cache else [[1]] * 3)
    for table in tables if cache else []:
        assert counted(table) == {"hitCount": 2, "missCount": 1, "loadCount": 1}
    tables[0].close()
    with pytest.raises(ValueError, match="closed"):
        tables[0].get(1)
    assert names(tables[1], 2) == ["Bob", "Charlie"]


@pytest.mark.parametrize(
    ("more", "lookups", "hits"),
    [({"lookup.provider.region": "eu"}, 2, 1), ({"lookup.keys": "name"}, 2, 2), ({"lookup.max-retries": 7}, 1, 3)],
)
def test_tables_of_other_options(desk: Desk, more: Options, lookups: int, hits: int) -> None:
    """Other options of the provider are another table; other columns and keys are of the same table, and need other rows."""
    function = SyncFunction(lambda keys: pa.table({"id": [1], "name": ["Alice"]}))
    name = desk.name(lambda context: provider(function))
    first, second = desk.table(name, PARTIAL), desk.table(name, {**PARTIAL, **more})
    for _ in range(2):
        assert len(first.get(1)) == 1
        assert len(second.get("Alice" if "lookup.keys" in more else 1)) == 1
    assert len(function.log.tables) == lookups
    misses = 4 - hits if hits > 1 else 1
    assert counted(first) == {"hitCount": hits, "missCount": misses, "loadCount": misses}


def test_a_factory_may_use_a_table(desk: Desk, tmp_path: Path) -> None:
    """A provider may be made of what another table says."""
    pq.write_table(pa.table({"host": ["db1"]}), tmp_path / "hosts.parquet")
    hosts: list[list[str]] = []

    def factory(context: LookupContext) -> LookupProvider:
        inner = LookupTable(str(tmp_path / "hosts.parquet"), {"lookup.cache.dir": str(desk.cache_dir)})
        hosts.append(inner.scan().column("host").to_pylist())
        return provider(users())

    def use() -> list[str]:
        table = desk.table(factory)
        desk.restart()  # so that the factory is asked once more, by the lookup
        return names(table, 1)

    try:
        assert beside(use)() == ["Alice"]
        assert hosts == [["db1"]] * 2
    finally:
        desk.abandon()


@KINDS
def test_a_function_is_closed_with_the_last_table(desk: Desk, kind: str) -> None:
    """When the last table that uses it is closed, so is a function, in its thread; what is asked afterwards opens it again."""
    function = make_function(kind, make_answer(USERS))
    name = desk.name(lambda context: provider(function))
    unused, first, second, third = (desk.table(name) for _ in range(4))
    unused.describe()
    unused.close()
    assert function.log.events == []  # nor is it closed if it was not opened
    assert names(first, 1) == names(second, 1) == ["Alice"]
    first.close()
    first.close()
    assert function.log.names == ["open", "lookup", "lookup"]
    second.close()
    assert function.log.names == ["open", "lookup", "lookup", "close"]
    assert len({thread for _, thread in function.log.events}) == 1
    assert names(third, 2) == ["Bob", "Charlie"]
    assert function.log.names[4:] == ["open", "lookup"]


def test_closing_may_fail(desk: Desk, prompt: None, gate: threading.Event) -> None:
    """An error that a function raises when it is closed is ignored, and a function that hangs then is given up."""
    for problem in (raises(OSError("gone")), lambda: gate.wait(BOUND_S)):
        function = users()
        function.close = problem  # type: ignore[method-assign]
        table = desk.serve(function, QUICK)
        assert names(table, 1) == ["Alice"]
        assert beside(table.close)() is None
        with pytest.raises(ValueError, match="closed"):
            table.get(1)


def test_what_a_table_says_of_itself(desk: Desk) -> None:
    """A table's path is the provider's name, its version is of the text of version(), its options are shown."""
    table = desk.serve(users(), {"lookup.provider.region": "eu"}, version=lambda: "1")
    description = table.describe()
    assert description["path"].startswith("provider:provider_1:make/")
    assert (description["columns"], description["version"]) == ({"id": "int64", "name": "string"}, table.version)
    assert "lookup.provider.region='eu'" in description["options"]
    with pytest.raises(OptionError, match=r"only 'FULL' has a snapshot"):
        table.reload()


FORK_GATE, FORK_ASKED = threading.Event(), threading.Event()


def hanging_for_13(keys: pa.Table) -> pa.Table:
    """The users, at once but for a 13th."""
    if keys.column("id").to_pylist() == [13]:
        FORK_ASKED.set()
        FORK_GATE.wait(BOUND_S)
    return make_answer({**USERS, 13: ["Judas"]})(keys)


FORKED = SyncFunction(hanging_for_13)


def forked_users(context: LookupContext) -> LookupProvider:
    return provider(FORKED)


def use_and_fork(cache_dir: str) -> None:
    """Look up, fork while a lookup hangs, look up in both."""
    options = {"lookup.provider": f"{__name__}:forked_users", "lookup.keys": "id", "lookup.cache.dir": cache_dir}
    table, log = LookupTable(None, {**options, **PARTIAL}), FORKED.log
    assert names(table, 1) == ["Alice"]
    hanging = beside(lambda: names(table, 13))
    assert FORK_ASKED.wait(BOUND_S)
    assert (log.names, log.requested_keys) == (["open", "lookup", "lookup"], [[1], [13]])
    # The host shares the first row, and the child shares its own with its parent.
    child = os.fork()
    if not child:
        signal.alarm(int(BOUND_S))
        try:
            assert [names(table, key) for key in (1, 2, 3)] == [["Alice"], ["Bob", "Charlie"], []]
            assert log.requested_keys[2:] == [[2], [3]]
            assert log.names[3:] == ["open", "lookup", "lookup"]
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    FORK_GATE.set()
    assert (hanging(), names(table, 2)) == (["Judas"], ["Bob", "Charlie"])
    assert (log.names[3:], log.requested_keys[2:], table.metrics()["missCount"]) == ([], [], 4)


def test_a_forked_child_opens_a_function_of_its_own(tmp_path: Path) -> None:
    """A table that was used before a fork answers in the child, by a new function, even while the parent's hangs."""
    in_fresh_process(use_and_fork, str(tmp_path / "cache"))


def everybody(table: LookupTable) -> dict[int | None, list[str]]:
    """All rows of a scan, by id."""
    names: dict[int | None, list[str]] = {}
    for row in table.scan().to_pylist():
        names.setdefault(row["id"], []).append(row["name"])
    return names


def test_a_trigger_of_its_own_reloads(desk: Desk) -> None:
    """From the first lookup on one copy answers all; the trigger makes others, and learns of a reload that fails."""
    whole = Whole()
    table = desk.table(whole.triggered)
    assert whole.scans == 0
    assert [names(table, key) for key in (1, 2, 3, 4)] == [["Julian"], [], ["Jark", "Jackson"], ["Fabian"]]
    assert everybody(table) == PEOPLE
    assert table.get(None) == []
    assert whole.scans == 1
    assert counted(table, "numCachedRecords") == {"hitCount": 4, "loadCount": 1, "numCachedRecords": 4}
    assert table.metrics()["latestLoadTime"] >= 0
    whole.people = {2: ["Alex"], 3: PEOPLE[3], None: ["Nobody"]}  # a row of the table, and nobody's answer
    desk.clock.tick(1)
    assert everybody(table) == PEOPLE
    whole.trigger.fire()
    assert everybody(table) == whole.people
    assert table.get(None) == []
    people, whole.people, whole.problem = whole.people, {1: ["Julia"], 2: ["Alexa"]}, ValueError("cut off")
    desk.clock.tick(1)
    with pytest.raises(LookupFunctionError, match=r"failed \(scan\(\)\): ValueError\('cut off'\)"):
        whole.trigger.fire()
    assert everybody(table) == people
    assert counted(table) == {"hitCount": 4, "loadCount": 2, "numLoadFailures": 1}
    whole.problem = None
    whole.trigger.fire()
    assert everybody(table) == whole.people
    whole.people = {}
    desk.clock.tick(1)
    whole.trigger.fire()
    assert (table.get(1), table.scan()) == ([], SCHEMA.empty_table())
    table.close()
    assert whole.trigger.closed.wait(BOUND_S)


SCANS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "TypeError"),
    "a column less": (lambda: [pa.RecordBatch.from_pydict({"id": [1]})], "column 'name' is missing"),
    "another type": (lambda: [pa.RecordBatch.from_pydict({"id": [1], "name": [1]})], "column 'name' is int64"),
}


@pytest.mark.parametrize("bad", SCANS)
def test_bad_scans(desk: Desk, bad: str) -> None:
    """A scan that fails or gives anything but the schema's columns is an error, and no copy of it is kept."""
    scan, says = SCANS[bad]
    scans = in_turn(scan, lambda: [pa.RecordBatch.from_pydict({"name": ["x"], "id": pa.array([1], pa.int8())})])
    table = desk.table(lambda context: FullCachingLookupProvider(scans, SCHEMA, Manual()))
    with pytest.raises(LookupFunctionError, match=says) as caught:
        table.get(1)
    assert "provider_1:make" in str(caught.value)
    desk.clock.tick(1)
    assert names(table, 1) == ["x"]


@pytest.mark.parametrize(
    ("where", "lookups", "expected"),
    [
        ("id IN (1, 2) AND name LIKE 'C%'", [[1, 2]], {"Charlie"}),
        ("id IN (1, 2) AND id = 2", [[2]], {"Bob", "Charlie"}),
        ("id IN (3, 4)", [[3, 4]], set()),
    ],
)
@EITHER
def test_a_scan_for_some_keys(
    desk: Desk, kind: str, where: str, lookups: list[list[int]], expected: set[str], cache: Options
) -> None:
    """A predicate, of the table or of the scan, that fixes the keys makes it a lookup: those are asked for, once, and no others."""
    function = make_function(kind, make_answer(USERS))
    rows = desk.serve(function, {**cache, "lookup.where": where}).scan()
    assert set(rows.column("name").to_pylist()) == expected
    assert rows.schema.equals(SCHEMA)
    table = desk.serve(function, cache)
    for _ in range(2):
        assert set(table.scan(["name"], where).column("name").to_pylist()) == expected
    assert names(table, 2) == ["Bob", "Charlie"]  # a lookup finds what a scan has brought
    more = [] if expected else [[2]]
    assert function.log.requested_keys == (lookups * 2 + more if cache else [*lookups * 3, [2]])


@CACHES
def test_a_scan_that_does_not_say_which_keys(desk: Desk, cache: Options) -> None:
    """A table that gives rows by key only cannot be scanned unless all key columns are fixed; the error says how."""
    schema = pa.schema([*SCHEMA, ("n", pa.int64())])
    row = {"id": 1, "name": "x", "n": 5}
    function = SyncFunction(lambda keys: pa.Table.from_pylist([row], schema))
    for where in (None, "id > 1", "id = 1 OR n = 2", "n = 1", "id BETWEEN 1 AND 2", "NOT id = 1"):
        table = desk.serve(function, {**cache, **({"lookup.where": where} if where else {})}, schema)
        with pytest.raises(OptionError, match=r"returns rows by key only: name the keys in lookup.where .*IN \(1, 2\)"):
            table.scan()
    assert function.log.events == []
    table = desk.serve(function, {**cache, "lookup.keys": "id,name"}, schema)
    with pytest.raises(OptionError, match="rows by key only"):
        table.scan(None, "id = 1")
    assert table.scan(None, "name IN ('x', 'y') AND id IN (1, 2)").to_pylist() == [row]
    assert function.log.requested_keys == [[(1, "x"), (1, "y"), (2, "x"), (2, "y")]]


NAMES = {n: [f"n{n}"] for n in range(1000)}


def fail_keys(*poison: int) -> Answer:
    """Answers any keys but these."""

    def answer(keys: pa.Table) -> pa.Table:
        for key in keys.column("id").to_pylist():
            if key in poison:
                raise ValueError(f"no {key}")
        return make_answer(NAMES)(keys)

    return answer


@EITHER
@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("poison", [(13,), (1, 2, 3), tuple(range(1, 31, 2))])
def test_what_a_bad_key_costs(desk: Desk, kind: str, cache: Options, size: int | None, poison: tuple[int, ...]) -> None:
    """The error names a key that failed, how many more did, and why; it has the rows of the others, which are kept."""
    function = make_function(kind, fail_keys(*poison), size)
    table = desk.serve(function, {**cache, **ONCE})
    more = f"; {len(poison) - 1} more of 30 keys failed, too" if len(poison) > 1 else ""
    # Which key comes first is not said.
    says = rf"^provider provider_1:make failed to look up key id = (\d+): ValueError\('no \1'\){more}$"
    with pytest.raises(LookupFunctionError, match=says) as caught:
        pairs(table, *range(1, 31))
    assert isinstance(caught.value.__cause__, ValueError)
    rows, failures = caught.value.rows, caught.value.failures
    assert sorted(failures) == [key - 1 for key in poison]
    assert all(f"'no {place + 1}'" in str(reason) for place, reason in failures.items())
    answered = [key for key in range(1, 31) if key not in poison]
    assert rows.column("name").to_pylist() == [f"n{key}" for key in answered]
    assert rows.column(KEY_INDEX).to_pylist() == [key - 1 for key in answered]
    calls = len(function.log.requested_keys)
    assert len(pairs(table, *answered)) == len(answered)
    if cache:
        assert len(function.log.requested_keys) == calls
        assert counted(table) == {
            "missCount": 30, "numLoadFailures": len(poison), "loadCount": len(answered), "hitCount": len(answered)
        }  # fmt: skip


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize("size", [None, 1, 10])
def test_a_system_that_is_down_gets_few_calls_more(desk: Desk, size: int | None, retries: int) -> None:
    """After the attempts of one call, three single keys are tried."""
    function = make_function("sync", fail_keys(*range(100)), size)
    table = desk.serve(function, {**PARTIAL, "lookup.max-retries": retries})
    with pytest.raises(LookupFunctionError, match="key id = 0"):
        pairs(table, *range(100))
    assert len(function.log.requested_keys) == retries + 1 + 3
    assert len(desk.clock.slept) == retries
    assert counted(table) == {"missCount": 100, "numLoadFailures": 100}


@CACHES
def test_a_key_that_takes_too_long(desk: Desk, cache: Options) -> None:
    """An asynchronous call that is late is cancelled and fails for its keys, which are not asked for again; its function goes on."""
    cancelled = threading.Event()

    async def answer(keys: pa.Table) -> pa.Table:
        if 13 in keys.column("id").to_pylist():
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        return make_answer(NAMES)(keys)

    function = make_function("async", answer, 2)
    table = desk.serve(function, {**cache, **ONCE, "lookup.async.timeout": "200 ms"})
    with pytest.raises(
        LookupTimeoutError, match=r"= 0.2 s \(key id = 1\d and 1 more\): raise the option if the system needs longer$"
    ) as caught:
        pairs(table, *range(10, 16))
    assert caught.value.rows.num_rows == 4
    assert cancelled.wait(BOUND_S)
    assert names(table, 7) == ["n7"]
    assert (function.log.names, len(function.log.loops)) == (["open", *["lookup"] * 4], 1)
