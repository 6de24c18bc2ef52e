"""Random histories of facts that wait for their row in two lookups, one after the other, and a model that says what each micro-batch returns.

The model replays what Spark's checkpoint says of each micro-batch: its time, its watermark, and the files of facts that it read. A
micro-batch may have used any version that was current between its start and its commit. Its rows show which ones are possible.
"""

import collections
import dataclasses
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake

from pyspark_lookup import LookupTable
from tests.support.preloaded import python_variables
from tests.support.spark_tables import MODES, saved
from tests.support.workers import Workers, read_notes

Content = Mapping[int, Sequence[int]]
"""The rows of a table: the values of each key."""
_PROBE = 0  # a key that is always there, whose value is another one after each change
_KEYS = 12
_WAITS_MS = (1_000, 8_000, 3_600_000)
_LAST_WAIT_MS = 1
_BOUND_S = 600.0  # far above what a micro-batch takes beside other tests
_FIRST_S, _FAR_S = (
    1_800_000_000,
    1_900_000_000,
)  # times of facts: the first ones, and those that end all waiting by the watermark

# --- the model ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Version:
    """A version of a table: when its write began and ended (Unix ms), and its rows."""

    begun_ms: float
    done_ms: float
    content: Content


@dataclasses.dataclass(frozen=True)
class Stage:
    """One of the two lookups. `last_from`: the number of the micro-batch from which on facts wait for `_LAST_WAIT_MS`."""

    versions: Sequence[Version]
    by_watermark: bool
    outer: bool
    wait_ms: int
    last_from: int


@dataclasses.dataclass(frozen=True)
class Fact:
    number: int
    keys: tuple[int | None, int | None]
    at_us: int


@dataclasses.dataclass(frozen=True)
class Batch:
    """A committed micro-batch. `has_tick`: the package's own source had a row. `rows`: those in the sink, with (fact, value, waited, left) of each lookup.

    `told`: the metrics that Spark reported, by name. None if the query ended before that.
    """

    number: int
    at_ms: int
    watermark_ms: int
    has_tick: bool
    facts: Sequence[Fact]
    rows: Sequence[Mapping[str, Any]]
    committed_ms: float
    told: Mapping[str, Mapping[str, Any]] | None


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A fact that waits in a lookup. `ident`: its number, and the value that the previous lookup gave it."""

    ident: tuple[int | None, ...]
    fact: Fact
    arrived_us: int


@dataclasses.dataclass
class Outcome:
    """What a lookup does in a micro-batch: the facts that leave, each with a value, and those that stay."""

    leave: list[tuple[Waiting, int | None]]
    stay: list[Waiting]
    woken: int = 0
    expired: int = 0

    def rows(self, batch: Batch) -> collections.Counter[tuple[Any, ...]]:
        """(number of the fact and values, time for which it has waited) of each result."""
        return collections.Counter(
            ((*leaving.ident, value), batch.at_ms * 1000 - leaving.arrived_us) for leaving, value in self.leave
        )


def play(
    stage: Stage, number: int, batch: Batch, before: Sequence[Waiting], new: Sequence[Waiting], content: Content
) -> Outcome:
    """The outcome that the contract of a lookup demands. `before`: the facts that wait. `content`: the rows of the version that it uses."""
    wait_ms = stage.wait_ms if batch.number < stage.last_from else _LAST_WAIT_MS
    over_us = 1000 * ((batch.watermark_ms if stage.by_watermark else batch.at_ms) - wait_ms)
    outcome = Outcome([], [])
    for place, waiting in enumerate([*before, *new]):
        key = waiting.fact.keys[number]
        values = () if key is None else content.get(key, ())
        is_over = (waiting.fact.at_us if stage.by_watermark else waiting.arrived_us) <= over_us
        outcome.leave += [(waiting, value) for value in values]
        outcome.woken += bool(values) and place < len(before)
        if not values and key is not None and not is_over:
            outcome.stay.append(waiting)
        elif not values:
            outcome.expired += key is not None
            outcome.leave += [(waiting, None)] if stage.outer else []
    return outcome


def check(batches: Sequence[Batch], stages: Sequence[Stage]) -> collections.Counter[str]:
    """Check a stream. Returns how often each event happened.

    Raises AssertionError if a fact left too early, too late, twice, never, or with a version that was not current.
    """
    waiting: list[list[Waiting]] = [[] for _ in stages]
    oldest = [0] * len(stages)
    places_by_digest: dict[tuple[int, str], set[int]] = {}
    left_first = _left_first(batches)
    counts = collections.Counter(batches=len(batches), facts=sum(len(batch.facts) for batch in batches))
    for batch in batches:
        new = [Waiting((fact.number,), fact, batch.at_ms * 1000) for fact in batch.facts]
        for number, stage in enumerate(stages):
            actual = left_first.pop(batch.at_ms, collections.Counter()) if number == 0 else _left_last(batch)
            where = f"micro-batch {batch.number}, lookup {number}"
            if not new and not batch.has_tick:
                assert not actual, f"{where}: rows, although no part was visited"
                continue
            possible = {}
            for place in _current(stage.versions, oldest[number], batch):
                outcome = play(stage, number, batch, waiting[number], new, stage.versions[place].content)
                if outcome.rows(batch) == actual:
                    possible[place] = outcome
                else:
                    counts["other versions"] += 1
            if not possible:
                raise AssertionError(
                    _explain(where, stage, number, batch, waiting[number], new, oldest[number], actual)
                )
            oldest[number] = min(possible)
            outcome = possible[oldest[number]]
            metrics = {
                name.split("_")[0]: _named(row) for name, row in (batch.told or {}).items() if f"_t{number}_" in name
            }
            if metrics:
                places = places_by_digest.setdefault((number, metrics["lookup"]["digest"]), set(possible))
                places &= set(possible)
                assert places, f"{where}: no version fits all micro-batches that name {metrics['lookup']}"
                expected = {
                    "waiting": len(outcome.stay),
                    "woken": outcome.woken,
                    "expired": outcome.expired,
                    "crowded": 0,
                }
                assert {name: metrics["late"][name] for name in expected} == expected, (
                    f"{where}: {metrics['late']}, not {expected}"
                )
                counts["told"] += 1
            counts += collections.Counter(woken=outcome.woken, expired=outcome.expired, ticks=int(not new))
            waiting[number] = outcome.stay
            new = [
                Waiting((*leaving.ident, value), leaving.fact, batch.at_ms * 1000) for leaving, value in outcome.leave
            ]
    assert not left_first, f"rows of no micro-batch: {left_first}"
    assert not any(waiting), f"facts that are still there: {waiting}"
    return counts


def _named(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Metrics by name. Spark Connect reports their values in one list, and the names in a schema."""
    if row.keys() != {"values", "schema"}:
        return row
    return dict(zip([field["name"] for field in row["schema"]["fields"]], row["values"], strict=True))


def _current(versions: Sequence[Version], oldest: int, batch: Batch) -> Iterator[int]:
    """The places of the versions that may have been current when a micro-batch used one: after its start, and before its commit."""
    earlier = [place for place, version in enumerate(versions) if version.done_ms < batch.at_ms]
    for place in range(max(oldest, *earlier, 0), len(versions)):
        if versions[place].begun_ms <= batch.committed_ms:
            yield place


def _left_first(batches: Sequence[Batch]) -> dict[int, collections.Counter[tuple[Any, ...]]]:
    """The rows that left the first lookup, by the time of their micro-batch. The second lookup may make several rows of one."""
    rows = {(row["left0"], (row["fact"], row["t0_value"]), row["waited0"]) for batch in batches for row in batch.rows}
    results: dict[int, collections.Counter[tuple[Any, ...]]] = collections.defaultdict(collections.Counter)
    for at_ms, ident, waited_us in rows:
        results[at_ms][ident, waited_us] += 1
    return results


def _left_last(batch: Batch) -> collections.Counter[tuple[Any, ...]]:
    """The rows that left the last lookup in a micro-batch."""
    assert all(row["left1"] == batch.at_ms for row in batch.rows)
    return collections.Counter(((row["fact"], row["t0_value"], row["t1_value"]), row["waited1"]) for row in batch.rows)


def _explain(
    where: str, stage: Stage, number: int, batch: Batch, before: Sequence[Waiting], new: Sequence[Waiting],
    oldest: int, actual: collections.Counter[tuple[Any, ...]],
) -> str:  # fmt: skip
    lines = [f"{where}, at {batch.at_ms}, watermark {batch.watermark_ms}: no version explains its rows"]
    for place in _current(stage.versions, oldest, batch):
        expected = play(stage, number, batch, before, new, stage.versions[place].content).rows(batch)
        lines.append(f"version {place}: missing {dict(expected - actual)}, too many {dict(actual - expected)}")
    return "\n".join(lines)


# --- tables that change ---------------------------------------------------------------------------


class Table:
    """A table of one kind, which the test changes while a stream looks facts up in it."""

    def __init__(self, home: Path, number: int, kind: str, rng: random.Random) -> None:
        self.kind, self.path = kind, str(home / f"t{number}.{kind}")
        self.versions: list[Version] = []
        self._rng = rng
        self._options = {"lookup.keys": "id", "lookup.cache.dir": str(home / "cache-writers")}
        self.change()

    def change(self) -> None:
        """Make another version: keys are removed, added, added again, or get other values."""
        rng, number = self._rng, len(self.versions) + 1
        before = dict(self.versions[-1].content) if self.versions else {}
        removed_keys = [key for key in before if key != _PROBE and rng.random() < 0.3]
        remaining = {key: values for key, values in before.items() if key not in removed_keys}
        new = {rng.randrange(1, _KEYS): self._values(number, place) for place in range(rng.randrange(4))}
        new |= {_PROBE: [number]}
        if self.kind == "managed" and removed_keys:
            self._write(lambda table: table.delete(pa.table({"id": removed_keys})), remaining)
        if self.kind == "managed":
            self._write(lambda table: table.upsert(_rows(new)), remaining | new)
        elif self.kind == "delta":
            self._write(lambda _: write_deltalake(self.path, _rows(remaining | new), mode="overwrite"), remaining | new)
        else:
            self._write(lambda _: saved(Path(self.path), _rows(remaining | new)), remaining | new)

    def _write(self, act: Callable[[LookupTable], object], content: Content) -> None:
        begun_ms = time.time() * 1000
        act(LookupTable(self.path, self._options))
        self.versions.append(Version(begun_ms, time.time() * 1000, content))

    def _values(self, number: int, place: int) -> list[int]:
        """Values that no other write has. A managed table gets only one, since its keys are replaced one by one."""
        count = 1 if self.kind == "managed" else self._rng.choice([1, 1, 3])
        return [1000 * number + 10 * place + copy for copy in range(count)]


def _rows(content: Content) -> pa.Table:
    pairs = [(key, value) for key, values in content.items() for value in values]
    return pa.table({"id": [key for key, _ in pairs], "value": [value for _, value in pairs]})


# --- a history ------------------------------------------------------------------------------------


class History:
    """A stream, its tables, and what happens to them. `counts`: how often."""

    def __init__(self, home: Path, seed: int, connect: bool) -> None:
        self.counts = collections.Counter[str]()
        self._home, self._rng = home, random.Random(seed)
        rng = self._rng
        kinds = rng.sample(["parquet", "managed", "delta"], 2)
        self._tables = [Table(home, number, kind, rng) for number, kind in enumerate(kinds)]
        self._by_watermark = rng.choice(
            [(True, False), (False, True), (False, False)]
        )  # Spark refuses a second watermark
        self._hows = (
            rng.choice(["left", "inner"]),
            "left",
        )  # what the first one returns shows only if the second one does not drop it
        self._waits_ms = [rng.choice(_WAITS_MS) for _ in kinds]
        self._workers = Workers(home)
        self._clock_s, self._facts, self._files, self._orders = _FIRST_S, 0, 0, 0
        tables = [
            {"path": table.path, "options": MODES[rng.choice(list(MODES))], "by_watermark": by, "how": how}
            for table, by, how in zip(self._tables, self._by_watermark, self._hows, strict=True)
        ]
        self._given = {"home": str(home), "connect": connect, "tables": tables}
        self._variables = python_variables(home)
        self.counts["connect" if connect else "classic"] += 1
        print(seed, self._given["tables"], self._waits_ms, flush=True)
        (home / "facts").mkdir()

    def run(self, phases: int) -> collections.Counter[str]:
        """Play the history, and check it."""
        try:
            self._start()
            for _ in range(phases):
                self._play_phase()
            last_from = self._end()
        finally:
            if "stream" in self._workers.running:
                self._kill()
        stages = [
            Stage(table.versions, by, how == "left", wait_ms, last_from)
            for table, by, how, wait_ms in zip(
                self._tables, self._by_watermark, self._hows, self._waits_ms, strict=True
            )
        ]
        return self.counts + check(read_batches(self._home), stages)

    def _play_phase(self) -> None:
        rng = self._rng
        trigger = rng.choice(["100 milliseconds", "100 milliseconds", ""])
        self._send()
        self._order(trigger, self._waits_ms, rng.choice([0.0, 0.05, 0.15]))
        for _ in range(rng.randint(2, 5)):
            before = self._committed()
            for _ in range(rng.choice([0, 1, 1, 2])):
                self._send()
            for _ in range(rng.choice([0, 1, 1])):
                rng.choice(self._tables).change()
            if trigger:
                self._wait(lambda before=before: self._committed() > before, "a micro-batch")
        if not trigger:
            self._wait_for_end()
        if rng.random() < 0.6:
            self._kill()
            self._start()

    def _end(self) -> int:
        """Have all facts leave. Returns the number of the first micro-batch in which they wait no longer."""
        self._order("", self._waits_ms, 0.0)
        self._wait_for_end()
        last_from = max(self._commits()) + 1
        self._clock_s = _FAR_S
        for _ in range(3):  # the first run makes the watermark, the next one has a row
            self._send(2)
            self._order("", [_LAST_WAIT_MS, _LAST_WAIT_MS], 0.0)
            self._wait_for_end()
        self._workers.tell("stream", "stop")
        self._workers.must_end("stream", _BOUND_S)
        return last_from

    def _send(self, probes: int = 1) -> None:
        """Write a file of facts. Some have a key that always has a row, which shows the version that was used."""
        rng, count = self._rng, self._rng.choice([0, 3, 12])
        self._clock_s += rng.randrange(12)
        keys: list[tuple[int | None, int | None]] = [(_PROBE, _PROBE)] * probes
        if self._clock_s < _FAR_S:
            choices = [*range(1, _KEYS + 2), None]
            keys += [(rng.choice(choices), rng.choice(choices)) for _ in range(count)]
        times = [self._clock_s - rng.choice([0, 0, rng.randrange(40)]) for _ in keys]
        columns = {
            "fact": pa.array(range(self._facts, self._facts + len(keys)), pa.int64()),
            "key0": pa.array([key for key, _ in keys], pa.int64()),
            "key1": pa.array([key for _, key in keys], pa.int64()),
            "at": pa.array([time_s * 1_000_000 for time_s in times], pa.timestamp("us", "UTC")),
        }
        self._facts, self._files = self._facts + len(keys), self._files + 1
        saved(self._home / "facts" / f"{self._files:05}.parquet", pa.table(columns))

    def _start(self) -> None:
        environment = {**os.environ, **self._variables}
        self._workers.start(
            "stream",
            "tests.models.late_stream",
            self._given,
            stdin=subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )

    def _kill(self) -> None:
        """Kill the driver: its Python and its JVM at the same time."""
        os.killpg(self._workers.running["stream"].pid, signal.SIGKILL)
        self._workers.kill("stream")
        self.counts["kills"] += 1

    def _order(self, trigger: str, waits_ms: Sequence[int], harm: float) -> None:
        self._orders += 1
        order = {"number": self._orders, "trigger": trigger, "waits": [f"{ms} ms" for ms in waits_ms], "harm": harm}
        self._workers.tell("stream", json.dumps(order))

    def _wait_for_end(self) -> None:
        self._wait(lambda: any(note.get("order") == self._orders for note in self._notes("done")), "the end of a run")

    def _wait(self, until: Callable[[], bool], event: str) -> None:
        start_s = time.monotonic()
        while not until():
            assert time.monotonic() - start_s < _BOUND_S, f"{event}: not there after {_BOUND_S} s"
            self._workers.check_alive()
            time.sleep(0.1)

    def _notes(self, kind: str) -> list[dict[str, Any]]:
        return [note for note in read_notes(self._home / "notes") if note["kind"] == kind]

    def _commits(self) -> list[int]:
        directory = self._home / "checkpoint" / "commits"
        return [int(path.name) for path in directory.iterdir() if path.name.isdigit()] if directory.exists() else []

    def _committed(self) -> int:
        return len(self._commits())


# --- what Spark says ------------------------------------------------------------------------------


def read_batches(home: Path) -> list[Batch]:
    """The committed micro-batches of a history, from Spark's checkpoint, the sink, and the metrics that Spark reported."""
    checkpoint = home / "checkpoint"
    metrics = {
        note["batch"]: json.loads(note["observed"]) for note in read_notes(home / "notes") if note["kind"] == "progress"
    }
    files = _find_files(checkpoint)
    batches, before, ticks = list[Batch](), -1, 0
    for number in sorted(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit()):
        _, metadata, *offsets = (checkpoint / "offsets" / str(number)).read_text().splitlines()
        values = json.loads(metadata)
        sources = [json.loads(text) for text in offsets if text != "-"]
        (log,) = (offset["logOffset"] for offset in sources if "logOffset" in offset)
        last_tick = sum(offset["offset"] for offset in sources if "logOffset" not in offset)
        facts = [fact for at in range(before + 1, log + 1) for path in files.get(at, ()) for fact in _read_facts(path)]
        rows = pq.read_table(home / "out" / f"{number:06}").to_pylist()
        committed_ms = (checkpoint / "commits" / str(number)).stat().st_mtime * 1000 + 50
        batches.append(
            Batch(
                number, values["batchTimestampMs"], values["batchWatermarkMs"], last_tick > ticks, facts, rows, committed_ms,
                metrics.get(number),
            )
        )  # fmt: skip
        before, ticks = log, last_tick
    return batches


def _find_files(checkpoint: Path) -> dict[int, list[str]]:
    """The files of facts, by the offset at which Spark read them."""
    offsets = dict[str, int]()
    for log in (checkpoint / "sources").glob("*/*"):
        for line in log.read_text().splitlines() if not log.name.startswith(".") else ():
            if line.startswith("{") and "path" in (entry := json.loads(line)):
                offsets[entry["path"]] = entry["batchId"]
    files = dict[int, list[str]]()
    for path, offset in offsets.items():
        files.setdefault(offset, []).append(path.removeprefix("file://"))
    return files


def _read_facts(path: str) -> list[Fact]:
    columns = pq.read_table(path)
    times = columns["at"].cast(pa.int64()).to_pylist()
    keys = zip(columns["key0"].to_pylist(), columns["key1"].to_pylist(), strict=True)
    return [Fact(number, pair, at) for number, pair, at in zip(columns["fact"].to_pylist(), keys, times, strict=True)]
