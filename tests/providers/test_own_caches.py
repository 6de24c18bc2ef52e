"""Tables of other systems: caches that providers bring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import LookupFunctionError, OptionError
from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.cache.memory import KEY_INDEX, CachedRows, DefaultLookupCache, LookupCache
from pyspark_lookup.providers.functions import LookupContext, LookupProvider
from tests.providers.common import (
    KINDS,
    ONCE,
    PARTIAL,
    USERS,
    Desk,
    Function,
    Options,
    SyncFunction,
    counted,
    made,
    names,
    provider,
    raises,
    rows_of,
)


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
    """A provider's own cache is asked first and told what was loaded; no option is needed, and a version() neither."""
    function, cache = made(kind, rows_of(USERS)), DictCache()
    table = desk.serve(function, cache=cache)
    assert [names(table, key) for key in (1, 3, 1, 3, 2)] == [["Alice"], [], ["Alice"], [], ["Bob", "Charlie"]]
    assert function.log.asked == [[1], [3], [2]]
    assert {key: [row["name"] for row in rows] for key, rows in cache.held.items()} == {
        1: ["Alice"],
        3: [],
        2: ["Bob", "Charlie"],
    }
    assert counted(table) == {"hitCount": 2, "missCount": 3, "loadCount": 3}
    gauges = table.metrics()
    assert (gauges["numCachedRecords"], gauges["numCachedBytes"]) == (3, 300)
    assert cache.calls.count("open") == 1
    cache.invalidate({"id": 1})
    assert names(table, 1) == ["Alice"]
    assert function.log.asked[-1] == [1]


def test_a_cache_of_its_own_is_emptied_for_a_new_version(desk: Desk) -> None:
    """It holds rows of one version: when there is another it is closed and opened anew."""
    version, held, cache = ["1"], {1: ["Alice"]}, DictCache()
    function = SyncFunction(rows_of(held))
    table = desk.serve(function, version=lambda: version[0], cache=cache)
    assert (names(table, 1), names(table, 1)) == (["Alice"], ["Alice"])
    version[0], held[1] = "2", ["Alicia"]
    assert (names(table, 1), names(table, 1)) == (["Alicia"], ["Alicia"])
    assert function.log.asked == [[1], [1]]
    assert [call for call in cache.calls if call in ("open", "close")] == ["open", "close", "open"]


def test_a_cache_of_its_own_is_one_processs(desk: Desk) -> None:
    """Nobody knows its bounds but its class, so nothing of it is shared by the host."""
    functions = [SyncFunction(rows_of(USERS)) for _ in range(2)]
    left = iter(functions)
    table = desk.table(lambda context: provider(next(left), cache=DictCache()))
    table.get(1)
    desk.restart()
    table.get(1)
    assert [function.log.asked for function in functions] == [[[1]], [[1]]]


@KINDS
def test_a_failure_tells_a_cache_nothing(desk: Desk, kind: str) -> None:
    """What could not be looked up is not put."""
    cache = DictCache()
    table = desk.serve(made(kind, raises(OSError())), ONCE, cache=cache)
    with pytest.raises(LookupFunctionError):
        table.get(1)
    assert "put" not in cache.calls
    assert counted(table) == {"missCount": 1, "numLoadFailures": 1}


@KINDS
def test_a_default_cache_of_its_own(desk: Desk, kind: str) -> None:
    """A DefaultLookupCache brings the bounds that it was built with; with them its host shares what was loaded."""
    functions: list[Function] = []

    def factory(context: LookupContext) -> LookupProvider:
        functions.append(made(kind, rows_of(USERS)))
        cache = DefaultLookupCache(expire_after_write_s=60.0, cache_missing_key=False, clock=desk.clock.host().steady_s)
        return provider(functions[-1], cache=cache)

    table = desk.table(factory)
    assert [names(table, key) for key in (1, 3, 1, 3)] == [["Alice"], [], ["Alice"], []]
    assert functions[0].log.asked == [[1], [3], [3]]
    desk.restart()
    desk.clock.tick(59)
    assert names(table, 1) == ["Alice"]
    assert functions[1].log.asked == []
    desk.clock.tick(1)
    assert names(table, 1) == ["Alice"]
    assert functions[1].log.asked == [[1]]


def test_a_default_cache_of_its_own_must_expire_or_have_versions(desk: Desk) -> None:
    """Without a version its rows would never be too old."""
    function = SyncFunction(rows_of(USERS))
    forever = DefaultLookupCache.new_builder().max_rows(5).build()
    with pytest.raises(OptionError, match=r"has no version\(\), so nothing tells when a row has changed"):
        desk.serve(function, cache=forever)
    assert names(desk.serve(function, cache=forever, version=lambda: "1"), 1) == ["Alice"]


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


def test_a_cache_of_its_own_may_be_asked_for(desk: Desk) -> None:
    """Saying lookup.cache=PARTIAL beside it is no contradiction."""
    function = SyncFunction(rows_of(USERS))
    table = desk.serve(function, {"lookup.cache": "PARTIAL"}, cache=DictCache())
    assert (names(table, 1), names(table, 1)) == (["Alice"], ["Alice"])
    assert len(function.log.asked) == 1


def test_a_cache_of_its_own_serves_one_table(desk: Desk, tmp_path: Path) -> None:
    """Tables with cache directories of their own see each other's rows of an older version as little as any others."""
    version, held = ["1"], {1: ["Alice"]}
    name = desk.name(
        lambda context: provider(SyncFunction(rows_of(held)), version=lambda: version[0], cache=DictCache())
    )
    one, two = (desk.table(name, {"lookup.cache.dir": str(tmp_path / place)}) for place in ("one", "two"))
    assert names(one, 1) == ["Alice"]
    version[0], held[1] = "2", ["Alicia"]
    assert names(two, 1) == ["Alicia"]
