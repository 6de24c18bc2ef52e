"""A failing history made short: steps are left out for as long as it fails in the same way."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.differential.histories import History
from tests.differential.machine import Discrepancy, Reader, run
from tests.differential.processes import Nursery

__all__ = ["report", "run_in_new_directory", "shortened"]

_SHOWN = 4


def run_in_new_directory(
    history: History, nursery: Nursery, readers: Sequence[Reader] | None = None, at_end: int | None = None
) -> list[Discrepancy]:
    """What is wrong in a history, whose files are gone afterwards."""
    root = Path(tempfile.mkdtemp(prefix="lookupcache-differential-"))
    try:
        return run(history, root, nursery, readers, **({} if at_end is None else {"at_end": at_end}))
    finally:
        shutil.rmtree(root, ignore_errors=True)


def shortened(history: History, found: Discrepancy, nursery: Nursery) -> tuple[History, Discrepancy]:
    """A shorter history with a discrepancy of the same signature, and that discrepancy.

    Only the reader that was wrong is asked, after each step, if that is enough; else all are where it ended.
    """
    readers: Sequence[Reader] | None = None
    if len(parts := found.reader.split("/")) == 4:
        readers = [Reader(*parts)]
    best, wrong = dataclasses.replace(history, steps=history.steps[: found.step]), found
    again = _same(best, wrong, nursery, readers)
    if again is None:
        readers = None
        again = _same(best, wrong, nursery, readers)
    if again is None:
        return history, found  # a race; the seed may show it once more
    number = 0
    while number < len(best.steps):
        shorter = dataclasses.replace(best, steps=best.steps[:number] + best.steps[number + 1 :])
        again = _same(shorter, wrong, nursery, readers)
        if again is None:
            number += 1
        else:
            best, wrong = shorter, again
    return best, wrong


def _same(
    history: History, wanted: Discrepancy, nursery: Nursery, readers: Sequence[Reader] | None
) -> Discrepancy | None:
    found = run_in_new_directory(history, nursery, readers)
    return next((one for one in found if one.signature == wanted.signature), None)


def report(history: History, found: Sequence[Discrepancy]) -> str:
    """What to print of a history that failed."""
    lines = [f"LOOKUPCACHE_SEED={history.seed}: {len(found)} answers were wrong"]
    lines += [str(one) for one in found[:_SHOWN]]
    return "\n".join([*lines, str(history)])
