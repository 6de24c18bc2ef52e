"""A history that failed is made short: steps go as long as the same goes wrong without them."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.models.histories import History
from tests.models.machine import Discrepancy, Reader, run
from tests.models.processes import Nursery

_AT_MOST_S = 120.0


def shortened(history: History, wrong: Discrepancy, nursery: Nursery) -> tuple[History, Discrepancy]:
    """A shorter history with a discrepancy of the same signature, and that discrepancy; as short as two minutes allow.

    Only the reader that was wrong is asked, after each step, if that is enough; else all are where it ended.
    """
    until = time.monotonic() + _AT_MOST_S
    readers: Sequence[Reader] | None = None
    if len(parts := wrong.reader.split("/")) == 4:
        readers = [Reader(*parts)]

    def again(shorter: History) -> Discrepancy | None:
        with tempfile.TemporaryDirectory(prefix="lookupcache-shorter-", ignore_cleanup_errors=True) as root:
            same = run(shorter, Path(root), nursery, readers)
        return next((one for one in same if one.signature == wrong.signature), None)

    best = dataclasses.replace(history, steps=history.steps[: wrong.step])
    if again(best) is None:
        readers = None
        if again(best) is None:
            return history, wrong  # a race; the seed may show it once more
    for number in reversed(range(len(best.steps))):
        shorter = dataclasses.replace(best, steps=best.steps[:number] + best.steps[number + 1 :])
        if time.monotonic() < until and (same := again(shorter)) is not None:
            best, wrong = shorter, same
    return best, wrong
