"""Random histories all night, each read in every way after its last step; failures are made short and printed.

`python -m tests.models.run --minutes 30` goes on after a failure, and shows one history for each kind of failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.models.histories import History, draw
from tests.models.machine import Discrepancy, Reader, report, run
from tests.models.processes import Nursery
from tests.support import nightly


def run_in_new_directory(
    history: History, nursery: Nursery, readers: Sequence[Reader] | None = None
) -> list[Discrepancy]:
    """What is wrong in a history, whose files are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="lookupcache-differential-", ignore_cleanup_errors=True) as root:
        return run(history, Path(root), nursery, readers)


def shortened(history: History, found: Discrepancy, nursery: Nursery) -> tuple[History, Discrepancy]:
    """A shorter history with a discrepancy of the same signature, and that discrepancy.

    Only the reader that was wrong is asked, after each step, if that is enough; else all are where it ended.
    """
    readers: Sequence[Reader] | None = None
    if len(parts := found.reader.split("/")) == 4:
        readers = [Reader(*parts)]
    best, wrong = dataclasses.replace(history, steps=history.steps[: found.step]), found

    def again(shorter: History) -> Discrepancy | None:
        same = run_in_new_directory(shorter, nursery, readers)
        return next((one for one in same if one.signature == wrong.signature), None)

    if again(best) is None:
        readers = None
        if again(best) is None:
            return history, found  # a race; the seed may show it once more
    for number in reversed(range(len(best.steps))):
        shorter = dataclasses.replace(best, steps=best.steps[:number] + best.steps[number + 1 :])
        if (same := again(shorter)) is not None:
            best, wrong = shorter, same
    return best, wrong


def main() -> int:
    minutes, seed = nightly.arguments(__doc__)
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    count = 0
    kinds: dict[str, list[int]] = {}
    with contextlib.closing(Nursery()) as nursery:
        while time.monotonic() < began + 60 * minutes:
            history = draw(seed + count)
            count += 1
            for one in run_in_new_directory(history, nursery):
                seeds = kinds.setdefault(one.signature, [])
                if not seeds:
                    short, found = shortened(history, one, nursery)
                    print(report(short, [found]), flush=True)
                if history.seed not in seeds:
                    seeds.append(seed + count - 1)
    print(f"{count} histories in {(time.monotonic() - began) / 60:.1f} minutes, {len(kinds)} kinds of failures")
    for signature, seeds in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        print(f"{len(seeds):5} {signature}  e.g. LOOKUPCACHE_SEED={seeds[0]}")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
