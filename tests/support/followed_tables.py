"""Random histories of a table in a system, beside lookups by the processes of two hosts: what a lookup may show, and which keys it may ask for.

`World` knows each row that the table has had, and when. A `System` writes to the system, and says what it was asked. A `Reader` is a cache with a
way of following the table, on one host. All time is that of one clock, which the history moves.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pyspark_lookup.lookup.runtime
from pyspark_lookup import LookupTable
from pyspark_lookup.errors import PysparkLookupError
from pyspark_lookup.lookup.lookup_join import Lookup, LookupSpec, issue_token
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.storage.context import in_thread
from tests.support.fakes import FakeClock

KEYS = range(14)
AGED = {
    "lookup.cache": "PARTIAL",
    "lookup.partial-cache.max-rows": "10000",
    "lookup.partial-cache.expire-after-write": "60 s",
}
KEY, CITY = pa.field("id", pa.int32()), pa.schema([("city", pa.string())])
Options = dict[str, Any]
Rows = dict[int, str]


@dataclasses.dataclass(frozen=True)
class Write:
    """A statement. `op`: insert, upsert, update, delete, move (to the key `to`), append (to all values), clear, or touch (no row)."""

    op: str
    key: int = -1
    value: str = ""
    to: int = -1

    def apply(self, rows: Rows) -> tuple[Rows, set[int]]:
        """(the rows after it, the keys whose rows it may have changed)."""
        if self.op == "clear":
            return {}, set(rows)
        if self.op == "append":
            return {key: value + self.value for key, value in rows.items()}, set(rows)
        if self.op == "touch":
            return rows, set()
        if self.op == "move":
            return {**{key: value for key, value in rows.items() if key != self.key}, self.to: rows[self.key]}, {self.key, self.to}  # fmt: skip
        other_rows = {key: value for key, value in rows.items() if key != self.key}
        return (other_rows if self.op == "delete" else {**other_rows, self.key: self.value}), {self.key}


@dataclasses.dataclass
class Requests:
    """What a system was asked: for which keys, and how often for all rows, for its version, and for changes."""

    keys: list[int] = dataclasses.field(default_factory=list)
    scans: int = 0
    versions: int = 0
    changes: int = 0

    def __add__(self, more: Requests) -> Requests:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(more), strict=True)
        return Requests(*(count + more_count for count, more_count in pairs))


@dataclasses.dataclass(frozen=True)
class Way:
    """A cache, and how it follows the table. `age_s`: how old rows may be. `expires_s`: how long a cache needs no new rows. `answered_s`: how old
    rows are when the system answers with them. `early_s`: by how much rows enter the cache as older than they are, so that they expire when the
    system says so."""

    cache: str
    options: Options
    age_s: float = 0.0
    expires_s: float = math.inf
    answered_s: float = 0.0
    early_s: float = 0.0
    versions: bool = False
    changes: bool = False

    def __str__(self) -> str:
        return f"{self.cache} {'changes' if self.changes else 'versions' if self.versions else 'ages'} {self.age_s:g}"


class System(abc.ABC):
    """A system with a table of the columns `id` and `city`, whose rows are those of a `World`."""

    path: str | None
    options: Options
    ways: Sequence[Way]
    world: World
    writes: Sequence[str] = ("insert", "upsert", "update", "delete", "move", "append", "clear", "touch")
    clears_all = False
    """Whether to remove all rows is a change of any key, and not of the keys that had rows."""

    @abc.abstractmethod
    def write(self, writes: Sequence[Write], keys: set[int], commit: bool) -> None:
        """Carry out some statements in one transaction, or try to. `keys`: those whose rows they may change."""

    @abc.abstractmethod
    def take_requests(self) -> Requests:
        """What it was asked since the last call."""

    def disconnect(self) -> None:  # noqa: B027 # most need none
        """End the connections of lookups."""

    def maintain(self, statements: Sequence[str]) -> None:  # noqa: B027 # most have none
        """Run statements of docs/databases.md, in one transaction."""

    @contextlib.contextmanager
    def interrupted(self, between: Callable[[], None]) -> Iterator[None]:
        """A block in which `between` is called before and after requests of lookups."""
        yield


class World:
    """What the table has had: for each key the values, each with (number, time) from which on it is there. `number`: that of the last write."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.rows: Rows = {}
        self.number = 0
        self.written_s = -math.inf
        self.values: dict[int, list[tuple[int, float, str | None]]] = {key: [(0, -math.inf, None)] for key in range(-1, len(KEYS) + 2)}  # fmt: skip
        # By key: the number and time of the last write that named it.
        self.changed: dict[int, tuple[int, float]] = dict.fromkeys(self.values, (0, -math.inf))
        self.all_changed = 0
        self.forgotten_s = -math.inf  # when a write was last a change of any key, or the system forgot earlier changes

    def commit(self, rows: Rows, keys: set[int], of_all: bool) -> None:
        self.number += 1
        self.written_s = self.clock.steady_s
        self.rows = rows
        self.changed |= dict.fromkeys(keys, (self.number, self.written_s))
        if of_all:
            self.all_changed, self.forgotten_s = self.number, self.written_s
        for key, values in self.values.items():
            if values[-1][2] != rows.get(key):
                values.append((self.number, self.clock.steady_s, rows.get(key)))

    def get_value(self, key: int, at_s: float) -> str | None:
        """The value of a key at a time."""
        return next((value for _, since_s, value in reversed(self.values[key]) if since_s <= at_s), None)

    def allowed(self, key: int, number: int, since_s: float) -> set[str | None]:
        """The values of a key that were there after the write `number`, or later than `since_s`."""
        values = self.values[key]
        ends = [*((n, s) for n, s, _ in values[1:]), (math.inf, math.inf)]
        return {value for (_, _, value), (n, s) in zip(values, ends, strict=True) if n > number or s > since_s}


@dataclasses.dataclass
class Reader:
    """What the processes of a host know together through one cache.

    `lookups`: by key, the latest write and the time when its rows were requested last. `forgotten_keys`: keys whose changes since then
    the system no longer has. `latest_write`: the one when the system was last asked for its version. `loaded_s`: when all rows were last copied.
    `looked_up_s`: when keys were looked up last.
    """

    host: int
    way: Way
    tables: dict[int, LookupTable] = dataclasses.field(default_factory=dict)
    lookups: dict[int, tuple[int, float]] = dataclasses.field(default_factory=dict)
    forgotten_keys: set[int] = dataclasses.field(default_factory=set)
    latest_write: int = -1
    loaded_s: float = -math.inf
    looked_up_s: float = -math.inf


def runtime_options(table: LookupTable) -> LookupOptions:
    """A table's options, as a process that plans a query has them."""
    return pyspark_lookup.lookup.runtime.runtime().effective(parse_options(table.given))


def _start(name: str, run: Callable[[], None]) -> None:
    """Start a thread, but none that follows the real time: whatever is due is found by the next lookup."""
    if name != "lookupcache-schedule-timer":
        in_thread(name, run)


class History:
    """A history in a system. `ways`: how many of its ways are taken; the first two always are."""

    def __init__(self, system: System, root: Path, seed: int, ways: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._system = system
        self._rng = random.Random(seed)
        self.clock = FakeClock(time.time())  # or what the hosts have would look old enough to be swept
        self.world = system.world = World(self.clock)
        self._root = root
        self._monkeypatch = monkeypatch
        self._numbers = iter(range(10**9))
        self._processes: dict[tuple[int, int], Runtime] = {}
        self._ended: list[tuple[Runtime, LookupTable]] = []
        chosen_ways = [*system.ways[:2], *self._rng.sample(system.ways[2:], min(ways - 2, len(system.ways) - 2))]
        self._readers = [Reader(host, way) for host in range(2) for way in chosen_ways]
        self._invalidated: dict[int, dict[int, tuple[int, float]]] = {0: {}, 1: {}}
        self._writes_between = False
        self.counted = collections.Counter[str]()

    def run(self, steps: int) -> None:
        try:
            self._write(always=True)
            with self._system.interrupted(self._between):
                for _ in range(steps):
                    self.clock.tick(self._rng.choice((0.0, 0.5, 7.0, 25.0)))
                    acts = (self._write, self._look, self._query, self._scan, self._invalidate, self._restart, self._disconnect, self._maintain)  # fmt: skip
                    self._rng.choices(acts, (6, 9, 3, 1, 1, 1, 1, 1))[0]()
            for reader in self._readers:
                self._look(reader, [*KEYS])
        finally:
            self._close()

    # --- writes -----------------------------------------------------------------------------------

    def _write(self, always: bool = False) -> None:
        rows, keys, writes, of_all = self.world.rows, set[int](), list[Write](), False
        for _ in range(8 if always else self._rng.randint(1, 3)):
            write = self._drawn(rows)
            rows, changed = write.apply(rows)
            keys |= changed
            of_all |= write.op == "clear" and self._system.clears_all
            writes.append(write)
        commit = always or self._rng.random() < 0.8
        self._system.write(writes, keys, commit)
        if commit:
            self.world.commit(rows, keys, of_all)

    def _drawn(self, rows: Rows) -> Write:
        absent, value = [key for key in KEYS if key not in rows], f"city {next(self._numbers)}"
        ops = [op for op in self._system.writes if op in ("upsert", "touch") or (absent if op == "insert" else rows)]
        ops = [op for op in ops if op != "move" or absent]
        op = self._rng.choices(ops, [1 if op in ("clear", "append", "touch") else 5 for op in ops])[0]
        key = self._rng.choice(absent if op == "insert" else [*KEYS] if op == "upsert" else [*rows] or [-1])
        return Write(op, key, f"+{value}" if op == "append" else value, self._rng.choice(absent or [-1]))

    def _between(self) -> None:
        """Before or after a request of a lookup: others write."""
        if self._writes_between and self._rng.random() < 0.15:
            self._writes_between = False
            self._write()
            self._writes_between = True

    def _maintain(self) -> None:
        """Forget old changes, or take the recipe's way after a restored backup."""
        if not any(reader.way.versions for reader in self._readers):
            return
        if self._rng.random() < 0.5:
            removed = "DELETE FROM customers_changes WHERE n <= (SELECT trimmed FROM customers_version)"
            self._system.maintain(["UPDATE customers_version SET trimmed = n", removed])
            self.world.forgotten_s = self.clock.steady_s
            for reader in self._readers:
                if reader.latest_write < self.world.number:
                    reader.forgotten_keys |= {*self.world.changed}
        else:
            self._system.maintain(["UPDATE customers_version SET trimmed = n + 1000, n = n + 1000"])
            self.world.commit(self.world.rows, set(), True)

    # --- lookups ----------------------------------------------------------------------------------

    def _table(self, reader: Reader) -> LookupTable:
        """The reader's table in one of the host's processes, which becomes the current one."""
        number = self._rng.randrange(2)
        process = self._processes.get((reader.host, number))
        if process is None:
            process = self._processes[reader.host, number] = Runtime(self.clock.host(f"boot {reader.host}"), random.Random(next(self._numbers)), start=_start)  # fmt: skip
        self._monkeypatch.setattr(pyspark_lookup.lookup.runtime, "_current", process)
        table = reader.tables.get(number)
        if table is None:
            options = {"lookup.keys": "id", "lookup.cache.dir": str(self._root / f"host {reader.host}")}
            table = LookupTable(self._system.path, {**options, **self._system.options, **reader.way.options})
            reader.tables[number] = table
            self._ended.append((process, table))
        return table

    def _look(self, reader: Reader | None = None, keys: Sequence[int] | None = None) -> None:
        """A query of a process of its own, which asks for the version and looks keys up."""
        reader, keys = reader or self._rng.choice(self._readers), keys or self._drawn_keys()
        table = self._table(reader)
        self._system.take_requests()
        number, now_s = self.world.number, self.clock.steady_s
        with self._disturbed():
            answer = table.get_many(self._key_table(keys))
        cities: dict[int, list[str]] = collections.defaultdict(list)
        for row in answer.to_pylist():
            assert row["id"] == keys[row["key_index"]]
            cities[row["key_index"]].append(row["city"])
        self._check_answer(reader, keys, cities, self._system.take_requests(), number, now_s)

    def _query(self) -> None:
        """A query of both hosts: a process of one asks for the version, which travels to tasks of either."""
        way, keys = self._rng.choice(self._readers).way, self._drawn_keys()
        readers = [reader for reader in self._readers if reader.way is way]
        self._rng.shuffle(readers)
        options = runtime_options(self._table(readers[0]))
        self._system.take_requests()
        number, now_s = self.world.number, self.clock.steady_s
        with self._disturbed():
            token = issue_token(options, None)
        issued = self._system.take_requests()
        for reader in readers if self._rng.random() < 0.5 else readers[::-1]:
            # The other host may not know the version, and may find that it is gone. A process that asks for changes first asks what type versions have.
            before, calls = (issued, [1, 2]) if reader is readers[0] else (Requests(), [0, 1, 2])
            spec = LookupSpec(self._table(reader).given, pa.schema([KEY]), CITY, tuple(CITY.names))
            with self._disturbed():
                rows = Lookup(spec, {}).find(self._key_table(keys).columns, token, None)
            cities: dict[int, list[str]] = collections.defaultdict(list)
            for place, city in zip(rows.keys.tolist(), rows.columns[0].to_pylist(), strict=True):
                cities[place].append(city)
            self._check_answer(reader, keys, cities, before + self._system.take_requests(), number, now_s, calls)

    def _drawn_keys(self) -> list[int]:
        return self._rng.choices([*KEYS, len(KEYS)], k=self._rng.choice((1, 3, 10)))

    def _key_table(self, keys: Sequence[int]) -> pa.Table:
        return pa.table([pa.array([*keys, None], KEY.type)], schema=pa.schema([KEY]))

    @contextlib.contextmanager
    def _disturbed(self) -> Iterator[None]:
        """A block during which others write."""
        self._writes_between = True
        try:
            yield
        finally:
            self._writes_between = False

    def _check_answer(
        self,
        reader: Reader,
        keys: Sequence[int],
        cities: Mapping[int, list[str]],
        requests: Requests,
        number: int,
        now_s: float,
        calls: Sequence[int] = (1,),
    ) -> None:
        assert cities.keys() <= set(range(len(keys))), f"{reader.way}: rows of no key"
        for place, key in enumerate(keys):
            self._check(reader, key, cities[place], number, now_s)
        self._check_asked(reader, keys, requests, number, now_s, calls)
        self.counted[f"{reader.way.cache} lookups"] += 1

    def _scan(self) -> None:
        reader = self._rng.choice([reader for reader in self._readers if reader.way.cache != "PARTIAL"])
        if not self._can_scan:
            return
        table = self._table(reader)
        self._system.take_requests()
        number, now_s = self.world.number, self.clock.steady_s
        rows: dict[int, list[str]] = collections.defaultdict(list)
        for row in table.scan().to_pylist():
            rows[row["id"]].append(row["city"])
        for key in KEYS:
            self._check(reader, key, rows[key], number, now_s)
        if reader.way.cache == "FULL":
            self._note_full(reader, self._system.take_requests(), number, now_s)

    @property
    def _can_scan(self) -> bool:
        return any(way.cache == "FULL" for way in self._system.ways)

    def _check(self, reader: Reader, key: int, cities: list[str], number: int, now_s: float) -> None:
        """A key has one of the values that it had since the lookup began, or is as old as it may be, but was not invalidated since."""
        assert len(cities) <= 1, f"{reader.way}: key {key} has several rows: {cities}"
        way = reader.way
        allowed = self.world.allowed(key, number, now_s - way.age_s if way.age_s else math.inf)
        if way.cache == "PARTIAL" and key in self._invalidated[reader.host]:
            number, at_s = self._invalidated[reader.host][key]
            allowed &= self.world.allowed(key, number, at_s - way.answered_s if way.answered_s else math.inf)
        value = cities[0] if cities else None
        assert value in allowed, f"{reader.way}, host {reader.host}: key {key} is {value!r}, and may be {allowed}"

    def _check_asked(
        self, reader: Reader, keys: Sequence[int], requests: Requests, number: int, now_s: float, calls: Sequence[int]
    ) -> None:
        way, distinct = reader.way, sorted(set(keys))
        for key in requests.keys:
            self.counted[f"{way.cache} keys"] += 1
            assert key in distinct or way.cache == "FULL", f"{way}: key {key} was asked for, beside {distinct}"
        if way.cache == "NONE":
            assert sorted(requests.keys) == distinct, f"{way}: {requests}"
        elif way.cache == "PARTIAL":
            for key in requests.keys:
                why = self._why_asked(reader, key, number, now_s)
                assert why, (
                    f"{way}: key {key} was asked for although nothing has changed since {reader.lookups[key]}, now {number}, {now_s}"
                )
                self.counted[why] += 1
            reader.latest_write, reader.looked_up_s = number, now_s
            reader.lookups |= dict.fromkeys(requests.keys, (number, now_s))
            reader.forgotten_keys -= {*requests.keys}
        else:
            self._check_full(reader, requests, number, now_s)
            self._note_full(reader, requests, number, now_s)
        if way.versions and way.age_s == 0:
            assert requests.versions in calls, f"{way}: {requests}, expected {calls} calls of version()"
            assert requests.changes <= way.changes, f"{way}: {requests}"

    def _why_asked(self, reader: Reader, key: int, number: int, now_s: float) -> str:
        """Why a partial cache may ask for a key; "" if it may not."""
        if key not in reader.lookups:
            return "first"
        at, at_s = reader.lookups[key]
        # The ways share the rows of a host: a lookup in which they have expired may remove them for all.
        others = (other for other in self._readers if other.host == reader.host and other.way.cache == "PARTIAL")
        if now_s - at_s >= reader.way.expires_s or any(r.looked_up_s - at_s >= r.way.expires_s for r in others):
            return "expired"
        if self._invalidated[reader.host].get(key, (0, -math.inf))[1] >= at_s - reader.way.early_s:
            return "invalidated"
        # The version under which rows are cached may be older than they are, so what happened after it counts, too.
        version_s = at_s - reader.way.age_s
        if reader.way.changes:
            changed, changed_s = self.world.changed[key]
            is_forgotten = (
                key in reader.forgotten_keys or self.world.all_changed > at or self.world.forgotten_s > version_s
            )
            return "changed" if changed > at or changed_s > version_s else "all" if is_forgotten else ""
        later = self.world.number > at or self.world.written_s > version_s
        return "version" if reader.way.versions and later else ""

    def _check_full(self, reader: Reader, requests: Requests, number: int, now_s: float) -> None:
        way = reader.way
        may_scan = reader.latest_write < 0
        if way.changes:
            for key in requests.keys:
                assert self.world.changed[key][0] > reader.latest_write, f"{way}: key {key} was fetched, and had not changed since {reader.latest_write}"  # fmt: skip
            may_scan |= bool(reader.forgotten_keys) or self.world.all_changed > reader.latest_write
        else:
            assert not requests.keys, f"{way}: {requests}"
            may_scan |= now_s - reader.loaded_s >= way.expires_s or (
                way.versions and self.world.number > reader.latest_write
            )
        assert requests.scans <= may_scan, (
            f"{way}: {requests.scans} scans, at most {may_scan}, since {reader.latest_write}"
        )

    def _note_full(self, reader: Reader, requests: Requests, number: int, now_s: float) -> None:
        if requests.versions or requests.scans:
            reader.latest_write = number
            reader.forgotten_keys.clear()
        if requests.scans or requests.changes:
            reader.loaded_s = now_s

    # --- what else happens ------------------------------------------------------------------------

    def _invalidate(self) -> None:
        readers = [reader for reader in self._readers if reader.way.cache == "PARTIAL"]
        if readers:
            reader, keys = self._rng.choice(readers), self._rng.sample(KEYS, 3)
            self._table(reader).invalidate(self._key_table(keys))
            self.clock.tick(0.001)
            self._invalidated[reader.host] |= dict.fromkeys(keys, (self.world.number, self.clock.steady_s))

    def _restart(self) -> None:
        """A process ends, and another one begins."""
        host, number = self._rng.randrange(2), self._rng.randrange(2)
        self._processes.pop((host, number), None)
        for reader in self._readers:
            if reader.host == host:
                reader.tables.pop(number, None)

    def _disconnect(self) -> None:
        self._system.disconnect()

    def _close(self) -> None:
        for process, table in self._ended:
            self._monkeypatch.setattr(pyspark_lookup.lookup.runtime, "_current", process)
            with contextlib.suppress(PysparkLookupError):
                table.close()
