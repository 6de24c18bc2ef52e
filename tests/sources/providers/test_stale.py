"""lookup.on-error=STALE: where a provider fails, the last rows that the host has cached answer, however old they are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.cache.partial import host_cache
from pyspark_lookup.errors import LookupFunctionError, OptionError
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.sources.providers.functions import LookupContext, LookupFunctionProvider, LookupProvider
from pyspark_lookup.sources.registry import parse_options
from tests.support.lookup_functions import ONCE, SCHEMA, Desk, Plain, make_function, names, pairs, users

STALE = {"lookup.on-error": "STALE", **ONCE}
PARTIAL = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 1000}


class Outage:
    """A system with names by id, and a version. While it is `down`, every call fails; `calls` counts them."""

    def __init__(self) -> None:
        self.rows = {number: f"name {number}" for number in range(10)}
        self.number, self.down, self.calls = 1, False, 0

    def call(self) -> None:
        self.calls += 1
        if self.down:
            raise ConnectionError("no route")

    def version(self) -> str:
        return str(self.number)

    def failing_version(self) -> str:
        self.call()
        return str(self.number)

    def look_up(self, keys: pa.Table) -> pa.Table:
        self.call()
        rows = [{"id": key, "name": self.rows[key]} for key in keys["id"].to_pylist() if key in self.rows]
        return pa.Table.from_pylist(rows, SCHEMA)

    def scan(self) -> Iterator[pa.RecordBatch]:
        self.call()
        yield pa.RecordBatch.from_pylist([{"id": key, "name": name} for key, name in self.rows.items()], SCHEMA)

    def provider(self, context: LookupContext) -> LookupProvider:
        return LookupFunctionProvider(make_function("sync", self.look_up), SCHEMA, self.version, scan=self.scan)

    def unversioned(self, context: LookupContext) -> LookupProvider:
        return LookupFunctionProvider(make_function("sync", self.look_up), SCHEMA)

    def failing(self, context: LookupContext) -> LookupProvider:
        return LookupFunctionProvider(make_function("sync", self.look_up), SCHEMA, self.failing_version, scan=self.scan)

    def change(self) -> None:
        """All rows change."""
        self.number += 1
        self.rows = {key: f"{name} in {self.number}" for key, name in self.rows.items()}


def check_outage(table: LookupTable, outage: Outage) -> None:
    """While the system is down, keys that were cached have their last rows, also if they had none; others fail."""
    outage.down = True
    assert pairs(table, 1, 2, 77, 1) == [(0, "name 1"), (1, "name 2"), (3, "name 1")]
    assert table.metrics()["staleKeyCount"] == 3
    with pytest.raises(LookupFunctionError, match="id = 5") as failed:
        table.get_many(pa.table({"id": [1, 5]}))
    assert failed.value.rows["name"].to_pylist() == ["name 1"]
    outage.down = False
    assert names(table, 1) == [outage.rows[1]]


def test_rows_of_an_earlier_version(desk: Desk) -> None:
    outage = Outage()
    table = desk.table(outage.provider, {**PARTIAL, **STALE})
    pairs(table, 1, 2, 77)
    outage.change()
    check_outage(table, outage)


def test_rows_that_have_expired_or_were_invalidated(desk: Desk) -> None:
    outage = Outage()
    table = desk.table(outage.unversioned, {**PARTIAL, "lookup.partial-cache.expire-after-write": "1 min", **STALE})
    pairs(table, 1, 2, 77)
    desk.clock.tick(61)
    check_outage(table, outage)
    pairs(table, 1, 2)
    table.invalidate([1, 2])
    outage.down = True
    assert pairs(table, 1, 2) == [(0, "name 1"), (1, "name 2")]


def test_merges_keep_the_last_rows(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are merged while the system is up, and what they have of earlier versions stays; the newest of a key answers."""
    monkeypatch.setattr(host_cache, "_SEGMENTS_AT_MOST", 2)
    outage = Outage()
    name = desk.name(outage.provider)
    table = desk.table(name, {**PARTIAL, **STALE})
    pairs(table, 1, 2, 3)
    for _ in range(4):
        outage.change()
        for key in (3, 4, 5, 6):
            names(table, key)
    assert table.metrics()["sharedMergeCount"] > 0
    outage.change()
    outage.down = True
    desk.restart()
    restarted = desk.table(name, {**PARTIAL, **STALE})
    assert pairs(restarted, 1, 2, 3)[:2] == [(0, "name 1"), (1, "name 2")]
    assert names(restarted, 3)[0].endswith("in 5")


def test_a_version_that_cannot_be_found(desk: Desk) -> None:
    """The last one that a process of the host has found stands in for it: its rows are in the cache, also for a new process."""
    outage = Outage()
    name = desk.name(outage.failing)
    for mode in (PARTIAL, {"lookup.cache": "FULL"}):
        outage.down = False
        pairs(desk.table(name, {**mode, **STALE}), 1, 2)
        outage.down = True
        desk.restart()
        table = desk.table(name, {**mode, **STALE})
        assert pairs(table, 1, 2) == [(0, "name 1"), (1, "name 2")]
        assert table.metrics()["staleServedCount"] > 0


def test_a_copy_that_cannot_be_renewed(desk: Desk) -> None:
    outage = Outage()
    table = desk.table(outage.provider, {"lookup.cache": "FULL", **STALE})
    assert names(table, 1) == ["name 1"]
    outage.change()
    outage.down = True
    assert names(table, 1) == ["name 1"]
    assert table.scan().num_rows == 10
    assert table.metrics()["staleServedCount"] >= 1
    outage.down = False
    assert names(table, 1) == ["name 1 in 2"]


def test_an_open_circuit_answers_with_the_last_rows(desk: Desk) -> None:
    """While the circuit is open, the last rows answer, and nobody calls the system."""
    outage = Outage()
    table = desk.table(outage.provider, {**PARTIAL, **STALE, "lookup.circuit-breaker.wait-duration": "30 s"})
    pairs(table, 1, 2)
    outage.change()
    outage.down = True
    for _ in range(6):
        assert names(table, 1) == ["name 1"]
    calls = outage.calls
    assert names(table, 2) == ["name 2"]
    assert outage.calls == calls


def test_stale_needs_a_cache(desk: Desk, tmp_path: Path) -> None:
    """Without a cache, with a cache of the provider's own, and for files, the option is an error."""
    with pytest.raises(OptionError, match=r"lookup\.on-error = 'STALE' needs lookup\.cache"):
        names(desk.serve(users(), STALE), 1)
    with pytest.raises(OptionError, match=r"lookup\.on-error = 'STALE' needs a cache of lookupcache"):
        names(desk.serve(users(), STALE, cache=Plain()), 1)
    options: dict[str, Any] = {"path": str(tmp_path), "lookup.on-error": "STALE"}
    with pytest.raises(
        OptionError, match=r"lookup\.on-error = 'STALE' is for tables of a provider or database: remove it"
    ):
        parse_options(options)
