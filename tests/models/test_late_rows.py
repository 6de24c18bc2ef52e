"""Facts that wait for their row in a stream that is stopped, killed and harmed: each leaves once, at the time and with the row that the model says."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pyspark_lookup.spark.features import STATEFUL_PROCESSORS
from tests.models.late_rows import Batch, Fact, History, Stage, Version, check
from tests.support.fuzzing import seeds
from tests.support.sparks import needs

_PHASES = 5


@pytest.mark.nightly
@pytest.mark.spark
@needs(STATEFUL_PROCESSORS)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("connect", "seed"), [*((False, seed) for seed in seeds(2)), *((True, seed) for seed in seeds(1))]
)
def test_any_history_is_as_the_model_says(tmp_path: Path, connect: bool, seed: int) -> None:
    """Two lookups in one query, over tables that change at any time, restarts, kills of the driver, tasks and batches that fail."""
    counts = History(tmp_path, seed, connect).run(_PHASES)
    print(dict(counts))
    assert counts["facts"] >= 10
    assert counts["told"] >= 5


# --- what judges them, by day ---------------------------------------------------------------------

VERSIONS = (Version(0, 10, {0: [1]}), Version(100, 110, {0: [2], 5: [50, 51]}))
STAGES = [Stage(VERSIONS, False, True, 1000, 10), Stage((Version(0, 10, {0: [1], 7: [70]}),), True, True, 1000, 10)]
AT_US = 5_000_000


def row(
    fact: int, value0: int | None, waited0: int, left0: int, value1: int | None, waited1: int, left1: int
) -> dict[str, Any]:
    names = ("fact", "t0_value", "waited0", "left0", "t1_value", "waited1", "left1")
    return dict(zip(names, (fact, value0, waited0, left0, value1, waited1, left1), strict=True))


def make_metrics(number: int, digest: str, waiting: int, woken: int, expired: int) -> dict[str, Any]:
    numbers = {"waiting": waiting, "woken": woken, "expired": expired, "crowded": 0}
    return {f"late_t{number}_x_1": numbers, f"lookup_t{number}_x_2": {"digest": digest}}


RIGHT = [
    # Of three facts one has both rows, one waits for the first, and one for the second.
    Batch(0, 50, 0, True, [Fact(0, (0, 0), AT_US), Fact(1, (5, 7), AT_US), Fact(2, (0, 8), AT_US)],
          [row(0, 1, 0, 50, 1, 0, 50)], 60, make_metrics(0, "a", 1, 0, 0) | make_metrics(1, "c", 1, 0, 0)),
    Batch(1, 200, 0, True, [],
          [row(1, 50, 150_000, 200, 70, 0, 200), row(1, 51, 150_000, 200, 70, 0, 200)], 210,
          make_metrics(0, "b", 0, 1, 0) | make_metrics(1, "c", 1, 0, 0)),
    Batch(2, 300, 5_999, True, [Fact(3, (6, None), AT_US)], [], 310, None),
    Batch(3, 310, 6_000, False, [], [], 320, None),  # without a row, nothing is visited
    Batch(4, 1300, 6_000, True, [], [row(2, 1, 0, 50, None, 1_250_000, 1300), row(3, None, 1_000_000, 1300, None, 0, 1300)],
          1310, make_metrics(0, "b", 0, 0, 1) | make_metrics(1, "c", 0, 0, 1)),
]  # fmt: skip


def test_a_right_stream_passes() -> None:
    """The check accepts facts that have their rows, that wait for them, and whose time is over."""
    counts = check(RIGHT, STAGES)
    assert counts == {"batches": 5, "facts": 4, "told": 6, "woken": 1, "expired": 2, "ticks": 3}


def changed(number: int, **fields: Any) -> list[Batch]:
    batches = list(RIGHT)
    batches[number] = dataclasses.replace(batches[number], **fields)
    return batches


def moved(first: int, second: int) -> list[Batch]:
    """The batches, with the rows of one micro-batch in a later one."""
    rows = [{**row, "left0": RIGHT[second].at_ms, "left1": RIGHT[second].at_ms} for row in RIGHT[first].rows]
    batches = changed(first, rows=[])
    batches[second] = dataclasses.replace(batches[second], rows=[*batches[second].rows, *rows])
    return batches


@pytest.mark.parametrize(
    "batches",
    [
        changed(1, rows=RIGHT[1].rows[:1]),  # a row is lost
        changed(1, rows=[*RIGHT[1].rows, RIGHT[1].rows[0]]),  # one comes twice
        changed(0, rows=[row(0, 2, 0, 50, 1, 0, 50)]),  # of a version that was not there yet
        changed(0, rows=[*RIGHT[0].rows, row(1, None, 0, 50, 70, 0, 50)]),  # too early
        moved(1, 2),  # too late
        moved(4, 3),
        RIGHT[:4],  # never
        changed(1, rows=[{**row, "waited0": 0} for row in RIGHT[1].rows]),
        changed(1, told=make_metrics(0, "b", 1, 1, 0) | make_metrics(1, "c", 1, 0, 0)),  # metrics that are wrong
        changed(1, told=make_metrics(0, "a", 0, 1, 0) | make_metrics(1, "c", 1, 0, 0)),  # two versions with one name
    ],
)  # fmt: skip
def test_a_wrong_stream_is_found(batches: Sequence[Batch]) -> None:
    """An impossible stream is an error that names the place."""
    with pytest.raises(AssertionError, match=r"micro-batch|facts that are still there|rows of no"):
        check(batches, STAGES)
