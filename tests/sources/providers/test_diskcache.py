"""Tables of providers whose rows by key are in a database of diskcache."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.cache.disk_lookup_cache import DiskCacheLookupCache
from pyspark_lookup.errors import OptionError
from tests.support.lookup_functions import PARTIAL, USERS, Desk, SyncFunction, counted, make_answer, pairs, provider

STORE = {"lookup.partial-cache.store": "DISKCACHE", "lookup.partial-cache.max-bytes": "16 MiB"}


def test_the_option(desk: Desk) -> None:
    """Rows that one process has looked up are known to the next one, and after an invalidation to nobody."""
    function = SyncFunction(make_answer(USERS))
    table = desk.serve(function, {**PARTIAL, **STORE})
    assert pairs(table, 1, 2, 3, 1) == [(0, "Alice"), (1, "Bob"), (1, "Charlie"), (3, "Alice")]
    desk.restart()
    assert pairs(table, 3, 1) == [(1, "Alice")]
    assert function.log.requested_keys == [[1, 2, 3]]
    assert counted(table) == {"hitCount": 3, "missCount": 3, "loadCount": 3}
    function.answer = make_answer({1: ["Alicia"]})
    desk.clock.tick(1)
    table.invalidate([1])
    desk.clock.tick(1)  # a load that begins at the moment of the call does not count
    assert pairs(table, 1, 2) == [(0, "Alicia"), (1, "Bob"), (1, "Charlie")]
    desk.restart()
    assert pairs(table, 1, 2) == [(0, "Alicia"), (1, "Bob"), (1, "Charlie")]
    assert function.log.requested_keys == [[1, 2, 3], [1]]


@pytest.mark.parametrize("by_option", [True, False], ids=["option", "provider"])
def test_versions_behind_a_table(desk: Desk, tmp_path: Path, by_option: bool) -> None:
    """Rows of another version are not served, by whoever they were cached; those of a version that comes back are."""
    version = ["v1"]
    function = SyncFunction(make_answer(USERS))
    cache = None if by_option else DiskCacheLookupCache(tmp_path / "c", max_bytes=2**24)
    options = {"lookup.cache": "PARTIAL", **(STORE if by_option else {})}
    table = desk.table(lambda context: provider(function, version=lambda: version[0], cache=cache), options)
    assert pairs(table, 1) == [(0, "Alice")]
    version[0], function.answer = "v2", make_answer({1: ["Alicia"]})
    desk.restart()
    assert pairs(table, 1, 2) == [(0, "Alicia")]
    assert pairs(table, 1, 2) == [(0, "Alicia")]
    assert function.log.requested_keys == [[1], [1, 2]]


def test_changes_behind_a_table(desk: Desk) -> None:
    """A new version costs the keys that have changed, in every process."""
    version = [1]
    changed = {1: [], 2: [1]}
    function = SyncFunction(make_answer(USERS))

    def changes(since: str) -> pa.Table:
        numbers = [key for number, keys in changed.items() if number > int(since) for key in keys]
        return pa.table({"id": pa.array(numbers, pa.int64())})

    def make(context: Any) -> Any:
        result = provider(function, version=lambda: str(version[0]))
        result.changes = changes
        return result

    table = desk.table(make, {"lookup.cache": "PARTIAL", **STORE})
    assert pairs(table, 1, 2) == [(0, "Alice"), (1, "Bob"), (1, "Charlie")]
    version[0], function.answer = 2, make_answer({1: ["Alicia"]})
    assert pairs(table, 1, 2) == [(0, "Alicia"), (1, "Bob"), (1, "Charlie")]
    desk.restart()
    assert pairs(table, 1, 2) == [(0, "Alicia"), (1, "Bob"), (1, "Charlie")]
    assert function.log.requested_keys == [[1, 2], [1]]


REFUSED = {
    "needs lookup.partial-cache.max-bytes": {"lookup.partial-cache.store": "DISKCACHE", "lookup.partial-cache.expire-after-write": "1 h"},
    "option lookup.partial-cache.max-rows has no effect with": {**STORE, "lookup.partial-cache.max-rows": "5"},
    "option lookup.partial-cache.expire-after-access has no effect with": {**STORE, "lookup.partial-cache.expire-after-access": "5 s"},
    "option lookup.on-error = 'STALE' needs the last rows": {**STORE, **PARTIAL, "lookup.on-error": "STALE"},
    "give 1 MiB or more": {**STORE, "lookup.partial-cache.max-bytes": "100 kB"},
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_options_that_make_no_sense(desk: Desk, text: str) -> None:
    """Senseless options are refused by name."""
    with pytest.raises(OptionError, match=text):
        desk.serve(SyncFunction(make_answer(USERS)), {"lookup.cache": "PARTIAL", **REFUSED[text]})
