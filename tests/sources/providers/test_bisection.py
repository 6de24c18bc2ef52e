"""A key that a system cannot answer costs the row of that key, and no other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pyarrow as pa
import pytest

from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.errors import LookupFunctionError, LookupTimeoutError
from pyspark_lookup.lookup.lookup_join import Lookup, LookupSpec, issue_token
from pyspark_lookup.sources.providers.provider import Bisection, Call, Outcome
from pyspark_lookup.sources.registry import parse_options
from tests.support.lookup_functions import (
    CACHES,
    KINDS,
    ONCE,
    PARTIAL,
    SCHEMA,
    Answer,
    Desk,
    Options,
    Plain,
    SyncFunction,
    counted,
    ids,
    made,
    pairs,
    provider,
    rows_of,
)

NAMES = {n: [f"n{n}"] for n in range(1000)}


def fails_for(*poison: int) -> Answer:
    """Answers any keys but these."""

    def answer(keys: pa.Table) -> pa.Table:
        for key in keys.column("id").to_pylist():
            if key in poison:
                raise ValueError(f"no {key}")
        return rows_of(NAMES)(keys)

    return answer


@KINDS
@CACHES
@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize("poison", [(13,), (1, 30), (1, 2, 3), tuple(range(1, 31, 2))])
def test_what_a_bad_key_costs(desk: Desk, kind: str, cache: Options, size: int | None, poison: tuple[int, ...]) -> None:
    """The error names a key that failed, how many more did, and why; it has the rows of the others, which are kept."""
    function = made(kind, fails_for(*poison), size)
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
    calls = len(function.log.asked)
    assert len(pairs(table, *answered)) == len(answered)
    if cache:
        assert len(function.log.asked) == calls
        assert counted(table) == {
            "missCount": 30, "numLoadFailures": len(poison), "loadCount": len(answered), "hitCount": len(answered)
        }  # fmt: skip


def test_values_that_do_not_fit_are_bad_keys(desk: Desk) -> None:
    """A row of a key that nobody asked for is the fault of the key for which it comes."""

    def answer(keys: pa.Table) -> pa.Table:
        rows = rows_of(NAMES)(keys)
        return pa.concat_tables([rows, rows_of(NAMES)(ids(77))]) if 13 in keys.column("id").to_pylist() else rows

    table = desk.serve(SyncFunction(answer), {**PARTIAL, **ONCE})
    with pytest.raises(LookupFunctionError, match=r"a row with key id = 77, which is not among key id = 13$"):
        pairs(table, 1, 2, 13, 14)
    assert counted(table) == {"missCount": 4, "numLoadFailures": 1, "loadCount": 3}


def test_a_cache_of_its_own_keeps_what_was_answered(desk: Desk) -> None:
    """Whichever cache a provider brings."""
    cache = Plain()
    table = desk.serve(SyncFunction(fails_for(13)), ONCE, cache=cache)
    with pytest.raises(LookupFunctionError, match="id = 13"):
        pairs(table, 12, 13, 14)
    assert cache.size() == 2


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize("size", [None, 1, 10])
def test_a_system_that_is_down_gets_few_calls_more(desk: Desk, size: int | None, retries: int) -> None:
    """After the attempts of one call, three single keys are tried."""
    function = made("sync", fails_for(*range(100)), size)
    table = desk.serve(function, {**PARTIAL, "lookup.max-retries": retries})
    with pytest.raises(LookupFunctionError, match="key id = 0"):
        pairs(table, *range(100))
    assert len(function.log.asked) == retries + 1 + 3
    assert len(desk.clock.slept) == retries
    assert counted(table) == {"missCount": 100, "numLoadFailures": 100}


def test_a_key_that_takes_too_long(desk: Desk) -> None:
    """An asynchronous call that is late fails for its keys, which are not asked for again; the others have their rows."""

    async def answer(keys: pa.Table) -> pa.Table:
        if 13 in keys.column("id").to_pylist():
            await asyncio.Event().wait()
        return rows_of(NAMES)(keys)

    function = made("async", answer, 2)
    table = desk.serve(function, {**PARTIAL, **ONCE, "lookup.async.timeout": "200 ms"})
    with pytest.raises(LookupTimeoutError, match=r"id = 1[23] and 1 more$") as caught:
        pairs(table, *range(10, 16))
    assert caught.value.rows.num_rows == 4
    assert len(function.log.asked) == 3


def joined(desk: Desk, options: Options, *keys: int | None) -> list[tuple[int, str | None, str | None]]:
    """What a lookup join with lookup.on-error=NULL gives: place of the key, name, reason."""
    spec = LookupSpec({**options, "lookup.on-error": "NULL"}, ids().schema, SCHEMA, ("id", "name"))
    parsed = parse_options(spec.options)
    rows = Lookup(spec, {}).find([ids(*keys).column("id").combine_chunks()], issue_token(parsed, None), None)
    return [(int(place), rows.columns[1][n].as_py(), rows.columns[2][n].as_py()) for n, place in enumerate(rows.keys)]


@CACHES
def test_a_join_goes_on_without_the_bad_key(desk: Desk, cache: Options) -> None:
    """With lookup.on-error=NULL the reason stands in the bad key's rows only, each with its own."""
    function = SyncFunction(fails_for(13, 15))
    name = desk.name(lambda context: provider(function))
    options = {"lookup.provider": name, "lookup.keys": "id", "lookup.cache.dir": str(desk.cache_dir), **cache}
    options["lookup.max-retries"] = "0"
    for _ in range(2):
        rows = joined(desk, options, 1, 13, 14, None, 13, 15)
        assert [(place, name) for place, name, _ in rows] == [(0, "n1"), (1, None), (2, "n14"), (4, None), (5, None)]
        reasons = [reason for _, _, reason in rows]
        assert [reasons[0], reasons[2]] == [None, None]
        assert (
            reasons[1]
            == reasons[3]
            == (f"LookupFunctionError: provider {name} failed to look up key id = 13: ValueError('no 13')")
        )
        assert "id = 15" in str(reasons[4])
        if cache:
            assert not any({1, 14} & set(keys) for keys in function.log.asked[5:])


def test_the_bad_keys_of_any_batch() -> None:
    """Whatever keys are bad, each key is answered or fails by itself, in no more calls than twice its keys; unless too many are bad."""
    rng = random.Random(7)
    for _ in range(300):
        count, size = rng.choice([rng.randint(1, 120), rng.randint(1, 4)]), rng.choice([1, 2, 7, 50, 200])
        bad = set(rng.sample(range(count), rng.randint(0, count)))
        made_calls = 0

        def make_calls(calls: Sequence[Call], patience: int, bad: set[int] = bad) -> list[Outcome]:
            nonlocal made_calls
            outcomes: list[Outcome] = []
            in_a_row = 0
            for call in calls:
                if in_a_row >= patience:
                    outcomes.append(None)
                    continue
                made_calls += 1
                wrong = bad & set(call.keys.tolist())
                in_a_row = in_a_row + 1 if wrong else 0
                outcomes.append(LookupFunctionError(str(sorted(wrong))) if wrong else ids())
            return outcomes

        bisection = Bisection(count, size)
        bisection.run(make_calls)
        answered = [key for keys, _ in bisection.rows for key in keys.tolist()]
        assert sorted([*answered, *bisection.failures]) == list(range(count))
        assert bad <= set(bisection.failures)
        if len(bad) <= 3 or not answered:
            assert set(bisection.failures) == bad or not answered
        if count <= min(size, 4):  # of few keys each is tried
            assert set(bisection.failures) == bad
        assert made_calls <= 2 * count + 3 * (1 + count // size)
