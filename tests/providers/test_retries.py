"""Tables of other systems: trying again."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import LookupFunctionError, OptionError
from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.engine.lookup_table import LookupTable
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.providers import ProvidedTable
from pyspark_lookup.providers.functions import LookupContext, LookupProvider
from tests.fakes import FakeClock
from tests.providers.common import (
    CACHES,
    KINDS,
    ONCE,
    PARTIAL,
    RETRY,
    SCHEMA,
    USERS,
    Desk,
    Options,
    SyncFunction,
    counted,
    ids,
    in_turn,
    made,
    names,
    pairs,
    provider,
    raises,
    rows_of,
)


@pytest.mark.parametrize("retries", [0, 1, 3])
@KINDS
@CACHES
def test_attempts(desk: Desk, kind: str, retries: int, cache: Options) -> None:
    """What fails every time is tried once more than lookup.max-retries says, and the error says how often."""
    function = made(kind, raises(OSError("down")))
    table = desk.serve(function, {**cache, "lookup.max-retries": retries})
    often = f" in {retries + 1} attempts" if retries else ""
    with pytest.raises(
        LookupFunctionError, match=rf"look up key id = 1 and 1 more{often}: OSError\('down'\)"
    ) as caught:
        pairs(table, 1, 2)
    assert isinstance(caught.value.__cause__, OSError)
    assert function.log.asked == [[1, 2]] * (retries + 1)
    assert len(desk.clock.slept) == retries
    assert table.metrics()["lookupRetryCount"] == 2 * retries
    assert counted(table) == ({"missCount": 2, "numLoadFailures": 2} if cache else {})
    assert function.log.opened == 1


def test_three_retries_by_default(desk: Desk) -> None:
    """Without an option there are four attempts, as FLIP-221 has it."""
    function = SyncFunction(raises(OSError()))
    with pytest.raises(LookupFunctionError, match="in 4 attempts"):
        desk.serve(function).get(1)
    assert len(function.log.asked) == 4


@KINDS
@CACHES
def test_a_failure_that_passes(desk: Desk, kind: str, cache: Options) -> None:
    """An attempt that fails and one that does not are one load: no failure is counted, but the attempt is."""
    function = made(kind, in_turn(raises(OSError("closed")), rows_of(USERS)))
    table = desk.serve(function, {**cache, "lookup.max-retries": 3})
    assert names(table, 1) == ["Alice"]
    assert function.log.asked == [[1], [1]]
    assert counted(table, "lookupRetryCount") == {
        "lookupRetryCount": 1,
        **({"missCount": 1, "loadCount": 1} if cache else {}),
    }
    assert names(table, 1) == ["Alice"]
    assert len(function.log.asked) == (2 if cache else 3)


@KINDS
def test_a_wrong_answer_is_not_asked_for_again(desk: Desk, kind: str) -> None:
    """Other columns will not be better the second time: only what is raised is tried again."""
    function = made(kind, lambda keys: pa.table({"id": [1]}))
    with pytest.raises(LookupFunctionError, match="'name' is missing"):
        desk.serve(function, {"lookup.max-retries": 3}).get(1)
    assert len(function.log.asked) == 1


def test_only_the_call_that_failed_is_tried_again(desk: Desk) -> None:
    """Of several calls each has attempts of its own."""
    failed: list[int] = []

    def answer(keys: pa.Table) -> pa.Table:
        if keys.column("id").to_pylist() == [2] and len(failed) < 2:
            failed.append(2)
            raise OSError()
        return rows_of(USERS)(keys)

    function = SyncFunction(answer, 1)
    table = desk.serve(function, {"lookup.max-retries": 2})
    assert len(pairs(table, 1, 2, 3)) == 3
    assert sorted(itertools.chain(*function.log.asked)) == [1, 2, 2, 2, 3]


def test_attempts_are_further_and_further_apart(desk: Desk) -> None:
    """Between attempts the host's clock waits, by chance up to 100 ms, then up to twice as long each time, never above 5 s."""
    table = desk.serve(SyncFunction(raises(OSError())), {"lookup.max-retries": 40})
    with pytest.raises(LookupFunctionError, match="in 41 attempts"):
        table.get(1)
    slept = desk.clock.slept
    assert len(slept) == 40
    assert all(0 <= seconds <= min(5.0, 0.1 * 2**n) for n, seconds in enumerate(slept))
    assert max(slept[6:]) > 2.0  # fails once in 10**13 runs
    assert len(set(slept)) > 30


def test_a_late_row(desk: Desk) -> None:
    """A key without rows is asked for again after a while, alone; the row it has by then is what is remembered."""
    function = SyncFunction(in_turn(rows_of({1: ["Alice"]}), rows_of(USERS)))
    table = desk.serve(function, {**PARTIAL, **RETRY})
    assert pairs(table, 2, 1, 2) == [(0, "Bob"), (0, "Charlie"), (1, "Alice"), (2, "Bob"), (2, "Charlie")]
    assert function.log.asked == [[1, 2], [2]]
    assert desk.clock.slept == [7.0]
    assert names(table, 2) == ["Bob", "Charlie"]
    assert counted(table, "lookupRetryCount") == {"hitCount": 2, "missCount": 2, "loadCount": 2, "lookupRetryCount": 1}


@KINDS
@CACHES
def test_a_row_that_never_comes(desk: Desk, kind: str, cache: Options) -> None:
    """After the last asking a key has no rows; only that is remembered."""
    function = made(kind, rows_of(USERS))
    table = desk.serve(function, {**cache, **RETRY})
    assert pairs(table, 1, 3, 4) == [(0, "Alice")]
    assert function.log.asked == [[1, 3, 4]] + [[3, 4]] * 3
    assert desk.clock.slept == [7.0] * 3
    assert table.get(3) == []
    assert len(function.log.asked) == (4 if cache else 8)
    if cache:
        assert counted(table, "lookupRetryCount") == {
            "hitCount": 1,
            "missCount": 3,
            "loadCount": 3,
            "lookupRetryCount": 6,
        }


def test_a_row_that_comes_at_the_last_asking(desk: Desk) -> None:
    """Nobody is told of an absence before the last asking: until then there is nothing to remember."""
    table: list[LookupTable] = []
    seen: list[int] = []

    def note(keys: pa.Table) -> pa.Table:
        seen.append(table[0].metrics()["loadCount"])
        return SCHEMA.empty_table()

    function = SyncFunction(in_turn(note, note, note, rows_of(USERS)))
    table.append(desk.serve(function, {**PARTIAL, **RETRY}))
    assert names(table[0], 1) == ["Alice"]
    assert seen == [0, 0, 0]
    assert names(table[0], 1) == ["Alice"]
    assert function.log.asked == [[1]] * 4


def test_an_absence_that_is_not_remembered_is_asked_for_again(desk: Desk) -> None:
    """With cache-missing-key=false each lookup asks all the times again; a key with rows is held."""
    function = SyncFunction(rows_of(USERS))
    table = desk.serve(function, {**PARTIAL, **RETRY, "lookup.partial-cache.cache-missing-key": "false"})
    assert (table.get(3), table.get(3), names(table, 1), names(table, 1)) == ([], [], ["Alice"], ["Alice"])
    assert function.log.asked == [[3]] * 8 + [[1]]
    assert counted(table) == {"hitCount": 1, "missCount": 3, "loadCount": 3}
    assert table.metrics()["numCachedRecords"] == 1


@KINDS
def test_an_error_while_asking_again(desk: Desk, kind: str) -> None:
    """It is an error and no absence, and what the first asking brought is not kept either."""
    function = made(kind, in_turn(rows_of(USERS), raises(OSError("down")), rows_of({**USERS, 3: ["Dora"]})))
    table = desk.serve(function, {**PARTIAL, **RETRY, **ONCE})
    with pytest.raises(LookupFunctionError, match=r"key id = 3: OSError\('down'\)"):
        pairs(table, 1, 3)
    assert counted(table) == {"missCount": 2, "numLoadFailures": 2}
    assert pairs(table, 1, 3) == [(0, "Alice"), (1, "Dora")]
    assert function.log.asked == [[1, 3], [3], [1, 3]]


def test_errors_and_absences_are_tried_again_apart(desk: Desk) -> None:
    """Attempts after errors are counted anew at each asking."""
    down = raises(OSError("down"))
    nobody = rows_of({})
    function = SyncFunction(in_turn(down, nobody, down, rows_of(USERS)))
    table = desk.serve(function, {**RETRY, "lookup.max-retries": 1})
    assert names(table, 1) == ["Alice"]
    assert table.metrics()["lookupRetryCount"] == 3
    assert [seconds for seconds in desk.clock.slept if seconds == 7.0] == [7.0]
    assert len(desk.clock.slept) == 3


@pytest.mark.parametrize("chosen", [c for n in (1, 2) for c in itertools.combinations(sorted(RETRY), n)])
def test_the_options_of_asking_again_come_together(desk: Desk, chosen: tuple[str, ...]) -> None:
    """Some of the three are as good as a mistake."""
    with pytest.raises(
        OptionError,
        match=r"lookup.retry.predicate, lookup.retry.fixed-delay and lookup.retry.max-attempts: give all three or none",
    ):
        desk.serve(SyncFunction(rows_of(USERS)), {key: RETRY[key] for key in chosen})


def test_a_table_asks_again_on_its_own_clock(tmp_path: Path) -> None:
    """`ProvidedTable` waits on the clock that it is given, and counts into the group that it is given."""
    options = {"lookup.provider": f"{__name__}:absent_users", "lookup.keys": "id", **RETRY}
    clock, metrics = FakeClock(), CacheMetricGroup()
    provided = ProvidedTable(LookupOptions.parse(options), clock.host())
    rows = provided.lookup(ids(3), pa.schema([("name", pa.string())]), metrics)
    assert rows.to_pydict() == {"name": [], KEY_INDEX: []}
    assert clock.slept == [7.0] * 3
    assert metrics.snapshot()["lookupRetryCount"] == 3


def absent_users(context: LookupContext) -> LookupProvider:
    """Nobody is there."""
    return provider(SyncFunction(rows_of({})))
