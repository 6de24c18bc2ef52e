"""Facts that wait for their row: histories of arrivals, changes, failed batches and deadlines, against a model that is a dictionary."""

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pyspark_lookup.errors import LookupFunctionError, SchemaError
from pyspark_lookup.lookup.late_facts import PARTS, LatePart, Version, WaitCounts, WaitRules, divide, from_bytes
from pyspark_lookup.lookup.version_token import VersionToken
from tests.support.fuzzing import MORE

FACTS = pa.schema([("fact", pa.int64()), ("key", pa.string()), ("at", pa.timestamp("us", "UTC"))])
KEYS = pa.schema([("_lookup_key_0", pa.string())])
ADDED = pa.schema([("value", pa.int64())])
SECOND = 1_000_000
Table = dict[str, list[int]]


class Memory:
    """The state of a part, in memory. `reads`: what was read of it."""

    def __init__(self) -> None:
        self.index: bytes | None = None
        self.chunks: dict[tuple[str, int], bytes] = {}
        self.reads: list[str] = []

    def read_index(self) -> bytes | None:
        return self.index

    def write_index(self, data: bytes | None) -> None:
        self.index = data

    def read(self, kind: str, chunk: int) -> bytes:
        self.reads.append(kind)
        return self.chunks[kind, chunk]

    def write(self, kind: str, chunk: int, data: bytes) -> None:
        self.chunks[kind, chunk] = data

    def remove(self, kind: str, chunk: int) -> None:
        del self.chunks[kind, chunk]


class Tables:
    """The versions of a table, how often keys were looked up in them, and the keys of each call."""

    def __init__(self) -> None:
        self.versions: list[Table] = [{}]
        self.looked_up = 0
        self.failure: Exception | None = None
        self.calls: list[list[str]] = []

    def look_up(self, keys: Sequence[pa.Array], version: Version) -> Iterator[tuple[int, Any, pa.StructArray]]:
        if self.failure is not None:
            raise self.failure
        table, texts = self.versions[version[0]], keys[0].to_pylist()
        self.looked_up += len(texts)
        self.calls.append(texts)
        for start in range(0, len(texts), 50):  # in several runs, as a lookup with large results
            rows = [table.get(text, []) if text is not None else [] for text in texts[start : start + 50]]
            values = pa.array([value for row in rows for value in row], pa.int64())
            yield start, np.array(list(map(len, rows))), pa.StructArray.from_arrays([values], fields=list(ADDED))


def rules(**changes: Any) -> WaitRules:
    fields = {"wait_us": 100 * SECOND, "event": None, "outer": True, "part_rows": 10**6, "waited": "waited"}
    fields |= {"facts": FACTS, "keys": KEYS, "added": ADDED, "lookup": "00" * 16, "table": "s3://lake/customers"}
    return WaitRules(**(fields | changes))


def fact_batch(facts: Sequence[tuple[int, str | None, int | None]]) -> pa.RecordBatch:
    numbers, keys, times = zip(*facts, strict=True) if facts else ((), (), ())
    columns = [pa.array(numbers, pa.int64()), pa.array(keys, pa.string()), pa.array(times, FACTS.field("at").type)]
    return pa.RecordBatch.from_arrays(columns, schema=FACTS)


class World:
    """The parts of one lookup. `batch` is a micro-batch; what it returns counts, unless it `fails`. `sizes`: arguments of `LatePart`."""

    def __init__(self, wait: WaitRules, **sizes: int) -> None:
        self.sizes = sizes
        self.rules = WaitRules.from_text(wait.to_text())
        self.tables = Tables()
        self.states = [Memory() for _ in range(PARTS)]
        self.counts = WaitCounts()

    def batch(
        self,
        facts: Sequence[tuple[int, str | None, int | None]],
        now_us: int,
        watermark_us: int = 0,
        fails: bool = False,
    ) -> list[tuple[Any, ...]]:
        version = len(self.tables.versions) - 1, 0
        states = copy.deepcopy(self.states) if fails else self.states
        batch = fact_batch(facts)
        keys = [batch.column("key")]
        answers = self.tables.look_up(keys, version)
        parcels = [*divide(self.rules, batch, keys, keys, answers)] if facts else []
        results: list[bytes | pa.RecordBatch] = []
        total = WaitCounts()
        for number, state in enumerate(states):
            part = LatePart(state, self.rules, self.tables.look_up, now_us, watermark_us, **self.sizes)
            results += part.wake(version)
            for parcel in parcels:
                if parcel.part == number:
                    results += part.wake(version)
                    results += [] if parcel.results is None else [parcel.results]
                    if parcel.facts is not None and parcel.keys is not None:
                        keys_batch = from_bytes(parcel.keys, KEYS)
                        results += part.arrive(from_bytes(parcel.facts, FACTS), keys_batch)
            results += part.finish()
            total += part.counts
        self.counts = total
        rows = []
        for result in results:
            table = from_bytes(result, self.rules.results) if isinstance(result, bytes) else result
            table.validate(full=True)
            columns = [table.column(0), table.column(1), table.column(3), table.column(4).view(pa.int64())]
            rows += list(zip(*(column.to_pylist() for column in columns), strict=True))
        return sorted(rows, key=repr)


@pytest.mark.parametrize("by_event", [False, True], ids=["arrival", "watermark"])
@pytest.mark.parametrize("outer", [False, True], ids=["inner", "left"])
@pytest.mark.parametrize("seed", range(4, 4 + MORE))  # the fourth finds all faults of tests/mutations
def test_histories(seed: int, outer: bool, by_event: bool) -> None:
    """Each fact leaves once: in the first batch whose version has its key, with all rows of that version, or when its time is over."""
    rng = random.Random(f"{seed} {outer} {by_event}")
    world = World(rules(outer=outer, event=2 if by_event else None), chunk_rows=8, small_chunks=3)
    names = [f"key{number}" for number in range(rng.choice([3, 40, 400]))]
    waiting: dict[int, tuple[str, int, int]] = {}
    now_us, watermark_us, next_fact = 10**15, 10**15 - 50 * SECOND, 0
    for _ in range(40):
        now_us += rng.randrange(20) * SECOND
        watermark_us = max(watermark_us, now_us - rng.randrange(40, 90) * SECOND)
        if rng.random() < 0.4:
            table = {key: rows for key, rows in world.tables.versions[-1].items() if rng.random() < 0.9}
            table |= {rng.choice(names): [rng.randrange(100) for _ in range(rng.choice([1, 1, 3]))] for _ in range(3)}
            world.tables.versions.append(table)
        facts = []
        for _ in range(rng.choice([0, 1, 5, 60, 200])):
            time_us = None if rng.random() < 0.02 else now_us - rng.randrange(200) * SECOND
            facts.append((next_fact, None if rng.random() < 0.05 else rng.choice(names), time_us))
            next_fact += 1
        expected: list[tuple[Any, ...]] = []
        table, clock_us = world.tables.versions[-1], watermark_us if by_event else now_us
        stay: dict[int, tuple[str, int, int]] = {}
        arrivals = {
            fact: (key, now_us, now_us if not by_event else -(2**62) if time_us is None else time_us)
            for fact, key, time_us in facts
        }
        for fact, (key, arrived_us, due_us) in (waiting | arrivals).items():
            waited_us = now_us - arrived_us
            if key is not None and key in table:
                expected += [(fact, key, value, waited_us) for value in table[key]]
            elif key is None or due_us + 100 * SECOND <= clock_us:
                expected += [(fact, key, None, waited_us)] if outer else []
            else:
                stay[fact] = key, arrived_us, due_us
        for fails in [*[True] * rng.choice([0, 0, 1]), False]:
            assert world.batch(facts, now_us, watermark_us, fails) == sorted(expected, key=repr)
        waiting = stay
        assert world.counts.waiting == len(waiting)
        assert world.counts.held == len(waiting.keys() & arrivals.keys())
        assert world.counts.oldest_us == min((arrived for _, arrived, _ in waiting.values()), default=None)
    chunks = sum(len(state.chunks) for state in world.states) // 2
    assert chunks <= len(waiting) // 2 + 4 * PARTS
    for state in world.states:
        if state.index is None:
            assert not state.chunks


def test_waiting_costs_nothing() -> None:
    """In a batch with the same version, nothing is looked up or read but the index; a new version costs one lookup of the keys that wait."""
    world = World(rules())
    world.batch([(number, f"key{number}", 0) for number in range(1000)], 0)
    assert world.counts.waiting == world.tables.looked_up == 1000
    for state in world.states:
        state.reads.clear()  # small chunks were merged
    assert world.batch([], 50 * SECOND) == []
    assert world.tables.looked_up == 1000
    assert not any(state.reads for state in world.states)
    world.tables.versions.append({"key7": [1]})
    assert world.batch([], 60 * SECOND) == [(7, "key7", 1, 60 * SECOND)]
    assert world.tables.looked_up == 2000
    assert sum(state.reads.count("facts") for state in world.states) == 1
    assert world.counts == WaitCounts(waiting=999, woken=1, oldest_us=0)


def test_a_key_has_one_part() -> None:
    """A fact goes to the part of its key, whether the key has a row and whatever else is in its batch: a task may run again on its own."""
    world, rng = World(rules()), random.Random(5)
    world.tables.versions.append({f"key{number}": [number] for number in range(0, 40, 2)})
    parts: dict[str, set[int]] = {}
    for version in (0, 1):
        for size in (1, 30, 300):
            batch = fact_batch([(number, f"key{rng.randrange(40)}", 0) for number in range(size)])
            keys = [batch.column("key")]
            for parcel in divide(world.rules, batch, keys, keys, world.tables.look_up(keys, (version, 0))):
                for data, schema in ((parcel.results, world.rules.results), (parcel.facts, FACTS)):
                    for key in [] if data is None else from_bytes(data, schema).column("key").to_pylist():
                        parts.setdefault(key, set()).add(parcel.part)
    assert all(len(numbers) == 1 for numbers in parts.values())
    assert len(set.union(*parts.values())) > PARTS // 2


def test_too_many_wait() -> None:
    """Beyond the limit of a part, the facts that came first pass without a row, and are counted."""
    world = World(rules(part_rows=10))
    for number in range(25):
        rows = world.batch([(number, "key", 0)], number * SECOND)
        assert rows == ([(number - 10, "key", None, 10 * SECOND)] if number >= 10 else [])
        assert world.counts.crowded == int(number >= 10)
    assert world.counts.waiting == 10


def test_the_oldest_make_room() -> None:
    """Facts pass in the order of their arrival, also if chunks with later ones were merged into those with earlier ones."""
    world = World(rules(part_rows=40), chunk_rows=8, small_chunks=3)
    answered: list[int] = []
    for now_s in range(60):
        facts = [(100 * now_s + number, "key", 0) for number in range(8 if now_s % 5 == 2 else 1)]
        answered += sorted(row[0] for row in world.batch(facts, now_s * SECOND))
    assert len(answered) > 80
    assert answered == sorted(answered)
    assert world.counts.waiting == 40


def test_another_wait_after_a_restart() -> None:
    """A deadline counts from the arrival, so another `wait` also holds for facts that wait already."""
    world = World(rules())
    world.batch([(1, "key", 0)], 0)
    world.rules = rules(wait_us=200 * SECOND)
    assert world.batch([], 150 * SECOND) == []
    world.rules = rules(wait_us=120 * SECOND)
    assert world.batch([], 151 * SECOND) == [(1, "key", None, 151 * SECOND)]


def test_other_columns_after_a_restart() -> None:
    """Facts that wait with other columns, keys or times are an error that says what to do, also if the types are the same."""
    timed = FACTS.append(pa.field("seen", FACTS.field("at").type))
    other_type, other_name = pa.schema([("0 key", pa.int64())]), pa.schema([("0 id", pa.string())])
    for before, after in (
        ({}, {"keys": other_type}),
        ({}, {"keys": other_name}),
        ({}, {"event": 2}),
        ({"facts": timed, "event": 2}, {"facts": timed, "event": 3}),
        ({}, {"facts": timed}),
    ):
        world = World(rules(**before))
        batch = fact_batch([(1, "key", 10**9)])
        if "facts" in before:
            batch = batch.append_column("seen", batch.column("at"))
        keys = [batch.column("key")]
        (parcel,) = (p for p in divide(world.rules, batch, keys, keys, world.tables.look_up(keys, (0, 0))) if p.facts)
        part = LatePart(world.states[0], world.rules, world.tables.look_up, 0, 0)
        assert [*part.wake((0, 0))] == []
        assert parcel.facts is not None and parcel.keys is not None
        assert [*part.arrive(from_bytes(parcel.facts, world.rules.facts), from_bytes(parcel.keys, KEYS))] == []
        assert [*part.finish()] == []
        nullable = [field.with_nullable(False) for field in world.rules.facts]  # this is no change
        LatePart(world.states[0], rules(**(before | {"facts": pa.schema(nullable)})), world.tables.look_up, 0, 0)
        with pytest.raises(SchemaError, match=r"^s3://lake/customers: .* undo the change until no row waits"):
            LatePart(world.states[0], rules(**(before | after)), world.tables.look_up, 0, 0)


def test_another_lookup_after_a_restart() -> None:
    """Keys may have other rows in the same version, for instance by another `lookup.where`: they are looked up again, once."""
    world = World(rules())
    world.batch([(1, "key", 0)], 0)
    world.tables.versions[0]["key"] = [5]
    assert world.batch([], SECOND) == []
    world.rules = rules(lookup="01" * 16)
    assert world.batch([], 2 * SECOND) == [(1, "key", 5, 2 * SECOND)]


def test_files_that_were_too_new() -> None:
    """In a version whose rows may have changed, each micro-batch looks up the keys that wait once more."""
    world = World(rules())
    number, _ = VersionToken(0, "0" * 15, None, 0.0, cacheable=False).to_numbers()
    world.tables.versions += [{} for _ in range(number)]
    world.batch([(1, "key", 0), (2, "other", 0)], 0)
    world.tables.versions[number]["key"] = [5]
    assert world.batch([], SECOND) == [(1, "key", 5, SECOND)]


def test_a_provider_is_asked_again_after_a_time() -> None:
    """Without versions, each key that has no row is asked for again, once in a call for all of its facts, and never sooner than after the delay."""
    world = World(rules(by_key=True, retry_us=10 * SECOND, wait_us=1000 * SECOND), chunk_rows=4, small_chunks=100)
    facts = [(number, f"key{number % 7}", 0) for number in range(100)]
    world.batch(facts, 0)
    requests: list[tuple[int, list[str]]] = []
    answered: set[int] = set()
    for now_s in range(1, 100, 3):
        if now_s == 49:
            world.tables.versions[0] = {"key3": [1, 2], "key5": [3]}
        new = [(1000 + now_s, "key0", 0)]
        world.tables.calls.clear()
        rows = world.batch(new, now_s * SECOND)
        assert world.tables.calls.pop(0) == ["key0"]  # a new fact is looked up at once
        requests += [(now_s, call) for call in world.tables.calls]
        assert not rows or now_s >= 49
        expected = [n for n, key, _ in facts if key in world.tables.versions[0]]
        assert sorted(row[0] for row in rows) == sorted(expected + [n for n in expected if n % 7 == 3]) or not rows
        answered |= {row[0] for row in rows}
    assert answered == {number for number in range(100) if number % 7 in (3, 5)}
    for key in range(7):
        times = [now_s for now_s, call in requests if f"key{key}" in call]
        assert times == ([10, 22, 34, 46, 58] if key in (3, 5) else [10, 22, 34, 46, 58, 70, 82, 94])
        assert all(call.count(f"key{key}") <= 1 for _, call in requests)


def test_a_provider_is_asked_again_in_another_version() -> None:
    """With versions, a change asks for each key once, and time asks for none."""
    world = World(rules(by_key=True), chunk_rows=4, small_chunks=100)
    world.batch([(number, f"key{number % 7}", 0) for number in range(100)], 0)
    world.tables.calls.clear()
    assert world.batch([], 90 * SECOND) == []
    assert world.tables.calls == []
    world.tables.versions.append({"key6": [4]})
    rows = world.batch([], 91 * SECOND)
    assert {row[0] for row in rows} == {number for number in range(100) if number % 7 == 6}
    assert sorted(key for call in world.tables.calls for key in call) == [f"key{key}" for key in range(7)]


@pytest.mark.parametrize("retry_us", [10 * SECOND, None])
def test_a_lookup_that_fails(retry_us: int | None) -> None:
    """With lookup.on-error = STALE facts go on waiting, and are looked up again later; otherwise the error ends the micro-batch."""
    world, strict_world = (
        World(rules(by_key=True, retry_us=retry_us, outlasts_errors=stale)) for stale in (True, False)
    )
    for each in (world, strict_world):
        assert each.batch([(1, "a", None)], SECOND) == []
        each.tables.versions.append({})
        each.tables.failure = LookupFunctionError("no answer")
    with pytest.raises(LookupFunctionError, match="no answer"):
        strict_world.batch([], 20 * SECOND)
    assert world.batch([], 20 * SECOND) == []
    world.tables.failure = None
    world.tables.versions[-1]["a"] = [7]
    if retry_us is not None:
        assert world.batch([], 29 * SECOND) == []
    assert [result[:2] for result in world.batch([], 31 * SECOND)] == [(1, "a")]


def test_large_results() -> None:
    """Facts that are large and have many rows make results in pieces, because Arrow and Spark take at most 2 GiB as one."""
    world = World(rules())
    large = f"{'x' * 1_000_000}"
    world.tables.versions.append({large: list(range(50)), "small": [7]})
    batch = fact_batch([(1, "small", 0), (2, large, 0), (3, "small", 0)])
    keys = [batch.column("key")]
    parcels = list(divide(world.rules, batch, keys, keys, world.tables.look_up(keys, (1, 0))))
    assert max(len(parcel.results or b"") for parcel in parcels) < 20_000_000
    rows = [from_bytes(parcel.results, world.rules.results) for parcel in parcels if parcel.results]
    assert sorted((n, v) for part in rows for n, v in zip(*map(pa.Array.to_pylist, (part["fact"], part["value"])), strict=True)) == [
        (1, 7), *((2, value) for value in range(50)), (3, 7)
    ]  # fmt: skip
    world = World(rules())
    world.batch([(2, large, 0)], 0)
    world.tables.versions.append({large: list(range(50))})
    assert sorted(row[2] for row in world.batch([], SECOND)) == list(range(50))


def test_large_facts() -> None:
    """Chunks are bounded in bytes as well, and facts come back as they were."""
    world = World(rules())
    keys = [f"{'x' * 300_000}{number}" for number in range(40)]
    world.batch([(number, key, 0) for number, key in enumerate(keys)], 0)
    assert all(len(data) < 5 * 2**20 for state in world.states for data in state.chunks.values())
    world.tables.versions.append({key: [number] for number, key in enumerate(keys)})
    assert world.batch([], SECOND) == sorted(((n, k, n, SECOND) for n, k in enumerate(keys)), key=repr)
    assert not any(state.chunks or state.index for state in world.states)
