"""Tables of other systems: whole tables."""

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
from tests.providers.common import BOUND_S, PARTIAL, SCHEMA, Desk, Options, counted, in_order, names, pairs

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
        self.trigger: Manual | None = None

    def scan(self) -> Iterator[pa.RecordBatch]:
        self.scans += 1
        for key, found in self.people.items():
            if self.problem is not None and key > 1:
                raise self.problem
            yield pa.RecordBatch.from_pydict({"id": [key] * len(found), "name": list(found)}, SCHEMA)

    def triggered(self, context: LookupContext) -> LookupProvider:
        self.trigger = Manual()
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
    """Rows that came, changed and went are seen after the trigger fired, and not before."""
    whole = Whole()
    table = desk.table(whole.triggered)
    assert [names(table, key) for key in (1, 2, 4)] == [["Julian"], [], ["Fabian"]]
    whole.people = {2: ["Alex"], 3: PEOPLE[3], 4: ["Frank"]}
    desk.clock.tick(1)
    assert [names(table, key) for key in (1, 2, 4)] == [["Julian"], [], ["Fabian"]]
    assert whole.trigger is not None
    whole.trigger.fire()
    assert [names(table, key) for key in (1, 2, 4)] == [[], ["Alex"], ["Frank"]]
    assert everybody(table) == whole.people
    assert counted(table)["loadCount"] == 2
    table.close()
    assert whole.trigger.closed.wait(BOUND_S)


def test_a_reload_that_fails_leaves_what_there_is(desk: Desk) -> None:
    """The last copy goes on serving, the trigger learns of the failure, and a later reload is not lost."""
    whole = Whole()
    table = desk.table(whole.triggered)
    assert names(table, 1) == ["Julian"]
    whole.people, whole.problem = {1: ["Julia"], 2: ["Alex"]}, ValueError("cut off")
    desk.clock.tick(1)
    assert whole.trigger is not None
    with pytest.raises(LookupFunctionError, match=r"failed, scan\(\): ValueError\('cut off'\)"):
        whole.trigger.fire()
    assert [names(table, key) for key in (1, 2)] == [["Julian"], []]
    assert counted(table) == {"hitCount": 3, "loadCount": 1, "numLoadFailures": 1}
    whole.problem = None
    whole.trigger.fire()
    assert [names(table, key) for key in (1, 2)] == [["Julia"], ["Alex"]]


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
    """Where there is a version no trigger is needed: a lookup of another version copies the table."""
    whole = Whole()
    table = desk.table(whole.versioned)
    assert (names(table, 1), names(table, 1), whole.scans) == (["Julian"], ["Julian"], 1)
    for number in range(2, 6):
        whole.version, whole.people = str(number), {1: [f"n{number}"], number: ["x"]}
        assert names(table, 1) == [f"n{number}"]
        assert everybody(table) == whole.people
        assert whole.scans == number
    assert table.metrics()["numCachedRecords"] == 2


def test_another_process_uses_the_copy(desk: Desk) -> None:
    """A host copies a version once."""
    whole = Whole()
    table = desk.table(whole.versioned)
    assert names(table, 1) == ["Julian"]
    desk.restart()
    assert names(table, 3) == ["Jark", "Jackson"]
    assert whole.scans == 1


def test_schedules_of_the_options(desk: Desk) -> None:
    """A provider with neither a trigger nor a version is reloaded as the options say, or refused without any."""
    whole = Whole()
    with pytest.raises(
        OptionError, match=r"neither a reload trigger nor a version\(\): set lookup.full-cache.reload-strategy"
    ):
        desk.table(whole.plain)
    periodic = {"lookup.cache": "FULL", "lookup.full-cache.periodic-reload.interval": "5 min"}
    table = desk.table(whole.plain, periodic)
    assert names(table, 1) == ["Julian"]
    timed = {
        "lookup.cache": "FULL",
        "lookup.full-cache.reload-strategy": "TIMED",
        "lookup.full-cache.timed-reload.iso-time": "10:15Z",
    }
    assert names(desk.table(whole.plain, timed), 1) == ["Julian"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lookup.cache": "NONE"}, "lookup.cache = 'NONE': provider .* brings a cache of the kind 'FULL'"),
        (PARTIAL, "lookup.cache = 'PARTIAL': provider .* brings a cache of the kind 'FULL'"),
        ({"lookup.metadata.source": "UFS"}, r"lookup.metadata.source = 'UFS': provider .* has no version\(\)"),
    ],
    ids=["NONE", "PARTIAL", "UFS"],
)
def test_options_beside_a_whole_table(desk: Desk, options: Options, says: str) -> None:
    """Another kind of cache, and versions where there are none, are contradictions."""
    with pytest.raises(OptionError, match=says):
        desk.table(Whole().triggered, options)


SCANS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "TypeError"),
    "dictionaries": (lambda: [{"id": 1, "name": "x"}], "TypeError"),
    "one batch and no list": (lambda: pa.RecordBatch.from_pydict({"id": [1], "name": ["x"]}), "TypeError"),
    "a column less": (lambda: [pa.RecordBatch.from_pydict({"id": [1]})], "column 'name' is missing"),
    "an unknown column": (
        lambda: [pa.RecordBatch.from_pydict({"id": [1], "name": ["x"], "zip": [1]})],
        "column 'zip' is not in its schema",
    ),
    "another type": (lambda: [pa.RecordBatch.from_pydict({"id": [1], "name": [1]})], "column 'name' is int64"),
}


@pytest.mark.parametrize("bad", SCANS)
def test_bad_scans(desk: Desk, bad: str) -> None:
    """A scan that gives anything but the schema's columns is an error, and no copy of it is kept."""
    scan, says = SCANS[bad]
    scans = [scan, lambda: [pa.RecordBatch.from_pydict({"name": ["x"], "id": pa.array([1], pa.int8())})]]
    name = desk.name(lambda context: FullCachingLookupProvider(lambda: in_order(scans), SCHEMA, Manual()))
    table = desk.table(name)
    with pytest.raises(LookupFunctionError, match=says) as caught:
        table.get(1)
    assert name in str(caught.value)
    desk.clock.tick(1)
    assert names(table, 1) == ["x"]


def test_an_empty_table(desk: Desk) -> None:
    """No batches are no rows."""
    whole = Whole({})
    table = desk.table(whole.versioned)
    assert (table.get(1), everybody(table)) == ([], {})
    assert table.scan().schema.equals(SCHEMA)


def test_rows_without_a_key_are_scanned(desk: Desk) -> None:
    """A row whose key is null is nobody's answer, but a row of the table."""
    batch = pa.RecordBatch.from_pydict({"id": [None, 1], "name": ["x", "y"]}, SCHEMA)
    table = desk.table(lambda context: FullCachingLookupProvider(lambda: [batch], SCHEMA, Manual()))
    assert pairs(table, None, 1) == [(1, "y")]
    assert table.scan().num_rows == 2


def test_a_whole_table_by_predicate_and_columns(desk: Desk) -> None:
    """Columns and predicates of the options and of a scan hold for a copy as for files."""
    whole = Whole()
    table = desk.table(whole.versioned, {"lookup.columns": "name", "lookup.where": "id > 1"})
    assert table.scan().column_names == ["name"]
    assert sorted(table.scan().column("name").to_pylist()) == ["Fabian", "Jackson", "Jark"]
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


def test_a_copy_of_a_version_that_fails(desk: Desk) -> None:
    """A scan that fails is the lookup's error, with what the provider said."""
    whole = Whole()
    whole.problem = ValueError("cut off")
    table = desk.table(whole.versioned)
    with pytest.raises(LookupFunctionError, match="cut off"):
        table.get(1)


def test_a_whole_table_with_some_columns(desk: Desk) -> None:
    """A factory that brings no other columns than it was told brings enough for a copy, too."""
    schema = pa.schema([*SCHEMA, ("blob", pa.binary())])

    def factory(context: LookupContext) -> LookupProvider:
        wanted = [*context.keys, *(schema.names[1:] if context.columns is None else context.columns)]
        rows = pa.Table.from_pylist([{"id": 1, "name": "Alice"}], schema).select(wanted)
        return FullCachingLookupProvider(rows.to_batches, schema, version=lambda: "1")

    table = desk.table(factory, {"lookup.columns": "name"})
    assert table.scan().to_pylist() == [{"name": "Alice"}]
    assert table.get(1) == [{"id": 1, "name": "Alice"}]


def test_a_schedule_beside_a_trigger_of_its_own(desk: Desk) -> None:
    """An interval that would be ignored is refused, as bounds beside a cache of its own are."""
    options = {"lookup.cache": "FULL", "lookup.full-cache.periodic-reload.interval": "5 min"}
    with pytest.raises(OptionError, match=r"lookup.full-cache.periodic-reload.interval"):
        desk.table(Whole().triggered, options)


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
