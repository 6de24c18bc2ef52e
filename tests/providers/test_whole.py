"""Tables of other systems: whole tables, and scans of tables that are asked by key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import LookupFunctionError, OptionError
from pyspark_lookup.cache.full import full_cache
from pyspark_lookup.engine.lookup_table import LookupTable
from pyspark_lookup.options.reload_trigger import CacheReloadTrigger
from pyspark_lookup.providers.functions import FullCachingLookupProvider, LookupContext, LookupProvider
from tests.providers.common import (
    BOUND_S,
    CACHES,
    KINDS,
    ONCE,
    PARTIAL,
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
    raises,
    rows_of,
    users,
)

PEOPLE = {1: ["Julian"], 3: ["Jark", "Jackson"], 4: ["Fabian"]}


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
        """A reload now; raises what it raises."""
        assert self.opened.wait(BOUND_S)
        assert self._context is not None
        self._context.trigger_reload().result(BOUND_S)


class Whole:
    """A table that is scanned: `people` are its rows, `scans` counts, `problem` is raised by the next scans."""

    def __init__(self, people: Mapping[int, Sequence[str]] = PEOPLE) -> None:
        self.people = dict(people)
        self.version = "1"
        self.scans = 0
        self.problem: Exception | None = None
        self.trigger = Manual()

    def scan(self) -> Iterator[pa.RecordBatch]:
        self.scans += 1
        for key, found in self.people.items():
            if self.problem is not None and key > 1:
                raise self.problem
            yield pa.RecordBatch.from_pydict({"id": [key] * len(found), "name": list(found)}, SCHEMA)

    def triggered(self, context: LookupContext) -> LookupProvider:
        return FullCachingLookupProvider(self.scan, SCHEMA, self.trigger)

    def versioned(self, context: LookupContext) -> LookupProvider:
        return FullCachingLookupProvider(self.scan, SCHEMA, version=lambda: self.version)

    def plain(self, context: LookupContext) -> LookupProvider:
        return FullCachingLookupProvider(self.scan, SCHEMA)


def everybody(table: LookupTable) -> dict[int, list[str]]:
    """All rows of a scan, by id."""
    found: dict[int, list[str]] = {}
    for row in table.scan().to_pylist():
        found.setdefault(row["id"], []).append(row["name"])
    return found


def test_a_whole_table_is_loaded_by_the_first_lookup(desk: Desk) -> None:
    """Nothing is scanned before; then every lookup and scan is answered from one copy, absences included."""
    whole = Whole()
    table = desk.table(whole.triggered)
    assert whole.scans == 0
    assert [names(table, key) for key in (1, 2, 3, 4)] == [["Julian"], [], ["Jark", "Jackson"], ["Fabian"]]
    assert everybody(table) == PEOPLE
    assert table.get(None) == []
    assert whole.scans == 1
    assert counted(table) == {"hitCount": 4, "loadCount": 1}
    gauges = table.metrics()
    assert (gauges["numCachedRecords"], gauges["snapshotReadThroughCount"]) == (4, 0)
    assert gauges["latestLoadTime"] >= 0


def test_a_trigger_of_its_own_reloads(desk: Desk) -> None:
    """Changes are seen after the trigger fired, not before; it learns of a reload that fails, after which the last copy serves."""
    whole = Whole()
    table = desk.table(whole.triggered)
    assert everybody(table) == PEOPLE
    whole.people = {2: ["Alex"], 3: PEOPLE[3], 4: ["Frank"]}
    desk.clock.tick(1)
    assert [names(table, key) for key in (1, 2, 4)] == [["Julian"], [], ["Fabian"]]
    whole.trigger.fire()
    assert [names(table, key) for key in (1, 2, 4)] == [[], ["Alex"], ["Frank"]]
    assert everybody(table) == whole.people
    whole.people, whole.problem = {1: ["Julia"], 2: ["Alexa"]}, ValueError("cut off")
    desk.clock.tick(1)
    with pytest.raises(LookupFunctionError, match=r"failed, scan\(\): ValueError\('cut off'\)"):
        whole.trigger.fire()
    assert [names(table, key) for key in (1, 2)] == [[], ["Alex"]]
    assert counted(table) == {"hitCount": 8, "loadCount": 2, "numLoadFailures": 1}
    whole.problem = None
    whole.trigger.fire()
    assert [names(table, key) for key in (1, 2)] == [["Julia"], ["Alexa"]]
    table.close()
    assert whole.trigger.closed.wait(BOUND_S)


@pytest.mark.parametrize("make", ["triggered", "versioned"])
def test_reload_now(desk: Desk, make: str) -> None:
    """`LookupTable.reload` copies the table as it is; where a version says that nothing changed it scans nothing."""
    whole = Whole()
    table = desk.table(getattr(whole, make))
    first = table.reload()
    assert (names(table, 1), whole.scans) == (["Julian"], 1)
    desk.clock.tick(1)
    assert (table.reload() == first) == (make == "versioned")
    whole.people, whole.version = {1: ["Julia"]}, "2"
    desk.clock.tick(1)
    assert table.reload() != first
    assert everybody(table) == {1: ["Julia"]}
    assert whole.scans == (2 if make == "versioned" else 3)


def test_a_new_version_is_copied_by_the_next_lookup(desk: Desk) -> None:
    """Where there is a version no trigger is needed: a lookup of another version copies the table, once for a host."""
    whole = Whole()
    table = desk.table(whole.versioned)
    assert (names(table, 1), names(table, 1), whole.scans) == (["Julian"], ["Julian"], 1)
    for number in range(2, 4):
        whole.version, whole.people = str(number), {1: [f"n{number}"], number: ["x"]}
        assert names(table, 1) == [f"n{number}"]
        assert everybody(table) == whole.people
        assert whole.scans == number
    assert table.metrics()["numCachedRecords"] == 2
    desk.restart()
    assert (names(table, 3), whole.scans) == (["x"], 3)


PERIODIC = {"lookup.cache": "FULL", "lookup.full-cache.periodic-reload.interval": "5 min"}


TIMED = {
    "lookup.cache": "FULL",
    "lookup.full-cache.reload-strategy": "TIMED",
    "lookup.full-cache.timed-reload.iso-time": "10:15Z",
}


def test_schedules_of_the_options(desk: Desk) -> None:
    """A provider with neither a trigger nor a version is reloaded as the options say, or refused without any."""
    whole = Whole()
    says = r"neither a reload trigger nor a version\(\): set lookup.full-cache.reload-strategy"
    with pytest.raises(OptionError, match=says):
        desk.table(whole.plain)
    for options in (PERIODIC, TIMED):
        assert names(desk.table(whole.plain, options), 1) == ["Julian"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lookup.cache": "NONE"}, "lookup.cache = 'NONE': provider .* brings a cache of the kind 'FULL'"),
        (PARTIAL, "lookup.cache = 'PARTIAL': provider .* brings a cache of the kind 'FULL'"),
        ({"lookup.metadata.source": "UFS"}, r"lookup.metadata.source = 'UFS': provider .* has no version\(\)"),
        (PERIODIC, r"lookup.full-cache.periodic-reload.interval"),
    ],
    ids=["NONE", "PARTIAL", "UFS", "a schedule"],
)
def test_options_beside_a_whole_table(desk: Desk, options: Options, says: str) -> None:
    """Another kind of cache, versions where there are none and an interval beside a trigger are contradictions."""
    with pytest.raises(OptionError, match=says):
        desk.table(Whole().triggered, options)


def batch(**columns: list[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


SCANS: dict[str, tuple[Callable[[], Any], str]] = {
    "an error": (raises(ValueError("cut off")), "cut off"),
    "None": (lambda: None, "TypeError"),
    "dictionaries": (lambda: [{"id": 1, "name": "x"}], "TypeError"),
    "one batch and no list": (lambda: batch(id=[1], name=["x"]), "TypeError"),
    "a column less": (lambda: [batch(id=[1])], "column 'name' is missing"),
    "an unknown column": (lambda: [batch(id=[1], name=["x"], zip=[1])], "column 'zip' is not in its schema"),
    "another type": (lambda: [batch(id=[1], name=[1])], "column 'name' is int64"),
}


@pytest.mark.parametrize("bad", SCANS)
def test_bad_scans(desk: Desk, bad: str) -> None:
    """A scan that fails or gives anything but the schema's columns is an error, and no copy of it is kept."""
    scan, says = SCANS[bad]
    scans = in_turn(scan, lambda: [batch(name=["x"], id=pa.array([1], pa.int8()))])
    table = desk.table(lambda context: FullCachingLookupProvider(scans, SCHEMA, Manual()))
    with pytest.raises(LookupFunctionError, match=says) as caught:
        table.get(1)
    assert "provider_1:make" in str(caught.value)
    desk.clock.tick(1)
    assert names(table, 1) == ["x"]


def test_rows_without_a_key_are_scanned(desk: Desk) -> None:
    """A row whose key is null is nobody's answer, but a row of the table. No batches are no rows."""
    batches = [pa.RecordBatch.from_pydict({"id": [None, 1], "name": ["x", "y"]}, SCHEMA)]
    trigger = Manual()
    table = desk.table(lambda context: FullCachingLookupProvider(lambda: batches, SCHEMA, trigger))
    assert pairs(table, None, 1) == [(1, "y")]
    assert table.scan().num_rows == 2
    batches.clear()
    desk.clock.tick(1)
    trigger.fire()
    assert (table.get(1), everybody(table)) == ([], {})
    assert table.scan().schema.equals(SCHEMA)


def test_a_whole_table_by_predicate_and_columns(desk: Desk) -> None:
    """Columns and predicates hold for a copy as for files; a factory that brings no others than it was told brings enough."""
    schema = pa.schema([*SCHEMA, ("blob", pa.binary())])
    rows = pa.Table.from_pylist([{"id": key, "name": name} for key in PEOPLE for name in PEOPLE[key]], schema)

    def factory(context: LookupContext) -> LookupProvider:
        wanted = [*context.keys, *(schema.names[1:] if context.columns is None else context.columns)]
        return FullCachingLookupProvider(rows.select(wanted).to_batches, schema, version=lambda: "1")

    table = desk.table(factory, {"lookup.columns": "name", "lookup.where": "id > 1"})
    assert table.scan().sort_by("name").to_pydict() == {"name": ["Fabian", "Jackson", "Jark"]}
    assert table.scan(["name"], "name = 'Jark'").to_pydict() == {"name": ["Jark"]}
    assert (table.get(1), table.get(4)) == ([], [{"id": 4, "name": "Fabian"}])


@pytest.mark.parametrize("why", ["no directory", "no time to wait"])
def test_a_whole_table_without_a_copy(desk: Desk, why: str) -> None:
    """Where there is no copy, or not yet, a lookup scans the provider's table."""
    whole = Whole()
    options: Options = {"lookup.cache": "FULL", "lookup.full-cache.build-wait": "0 s"}
    if why == "no directory":
        options = {"lookup.cache.dir": "/proc/no/such/directory"}
    table = desk.table(whole.versioned, options)
    assert [names(table, key) for key in (1, 2, 3)] == [["Julian"], [], ["Jark", "Jackson"]]


@pytest.mark.parametrize("options", [{}, {"lookup.cache": "FULL"}], ids=["alone", "with FULL"])
def test_a_trigger_of_its_own_is_enough(desk: Desk, options: Options) -> None:
    """Saying what holds anyway, lookup.metadata.source=CACHE, takes no interval that is never used."""
    assert names(desk.table(Whole().triggered, {"lookup.metadata.source": "CACHE", **options}), 1) == ["Julian"]


def test_a_new_version_is_written_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a whole table takes the place of the one before it: there is nothing to make one of."""
    folds: list[int] = []
    monkeypatch.setattr(full_cache, "_is_worth_compacting", lambda snapshot: folds.append(len(snapshot.layers)))
    whole = Whole()
    table = desk.table(whole.versioned)
    for number in range(3):
        whole.version = str(number)
        table.reload()
    assert folds == [1, 1, 1]


# --- by key ------------------------------------------------------------------------------------------------


@CACHES
def test_a_scan_needs_keys(desk: Desk, cache: Options) -> None:
    """A table that gives rows by key only cannot be scanned unless it is said for which keys, and the error says how."""
    function = users()
    for where in (None, "id > 1", "id = 1 OR name = 'x'", "name = 'Bob'", "id BETWEEN 1 AND 2", "NOT id = 1"):
        table = desk.serve(function, {**cache, **({"lookup.where": where} if where else {})})
        with pytest.raises(OptionError, match=r"gives rows by key only; say which in lookup.where .*IN \(1, 2\)"):
            table.scan()
    assert function.log.events == []


@pytest.mark.parametrize(
    ("where", "asked", "found"),
    [
        ("id IN (1, 2)", [[1, 2]], {"Alice", "Bob", "Charlie"}),
        ("id = 2", [[2]], {"Bob", "Charlie"}),
        ("2 = id", [[2]], {"Bob", "Charlie"}),
        ("id IN (2, 2, 3, 2)", [[2, 3]], {"Bob", "Charlie"}),
        ("id IN (1, 2) AND name LIKE 'C%'", [[1, 2]], {"Charlie"}),
        ("id IN (1, 2) AND id = 2", [[2]], {"Bob", "Charlie"}),
        ("id IN (3, 4)", [[3, 4]], set()),
        ("id IN (2, 99999999999999999999)", [[2]], {"Bob", "Charlie"}),
    ],
)
@KINDS
@CACHES
def test_a_scan_for_some_keys(
    desk: Desk, kind: str, where: str, asked: list[list[int]], found: set[str], cache: Options
) -> None:
    """A predicate, of the table or of the scan, that fixes the keys makes it a lookup: those are asked for, once, and no others."""
    function = made(kind, rows_of(USERS))
    rows = desk.serve(function, {**cache, "lookup.where": where}).scan()
    assert set(rows.column("name").to_pylist()) == found
    assert rows.schema.equals(SCHEMA)
    table = desk.serve(function, cache)
    for _ in range(2):
        assert set(table.scan(["name"], where).column("name").to_pylist()) == found
    assert names(table, 2) == ["Bob", "Charlie"]  # a lookup finds what a scan has brought
    more = [] if [2] in asked or [1, 2] in asked or [2, 3] in asked else [[2]]
    assert function.log.asked == (asked * 2 + more if cache else [*asked * 3, [2]])


@CACHES
def test_a_scan_for_composite_keys(desk: Desk, cache: Options) -> None:
    """All key columns must be fixed; then every combination is asked for."""
    schema = pa.schema([*SCHEMA, ("n", pa.int64())])
    row = {"id": 1, "name": "x", "n": 5}
    function = SyncFunction(lambda keys: pa.Table.from_pylist([row], schema))
    table = desk.serve(function, {**cache, "lookup.keys": "id,name"}, schema)
    assert table.scan(None, "name IN ('x', 'y') AND id IN (1, 2)").to_pylist() == [row]
    assert function.log.asked == [[(1, "x"), (1, "y"), (2, "x"), (2, "y")]]
    with pytest.raises(OptionError, match="rows by key only"):
        table.scan(None, "id = 1")


def test_columns_beyond_those_that_are_kept(desk: Desk) -> None:
    """A scan by key for a column that lookup.columns leaves out asks the provider each time; keys are counted as ever."""
    rows = pa.table({"id": [1], "name": ["Alice"], "city": ["Bern"]})
    function = SyncFunction(lambda keys: rows)
    table = desk.serve(function, {**PARTIAL, **ONCE, "lookup.columns": "name"}, rows.schema)
    for _ in range(2):
        assert table.scan(["city"], "id = 1").to_pylist() == [{"city": "Bern"}]
    assert counted(table) == {"missCount": 2, "loadCount": 2}
    function.answer = raises(OSError())
    with pytest.raises(LookupFunctionError):
        table.scan(["city"], "id = 1")
    assert counted(table) == {"missCount": 3, "loadCount": 2, "numLoadFailures": 1}
