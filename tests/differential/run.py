"""Random histories all night, each read in every way after its last step; failures are made short and printed.

`python -m tests.differential.run --minutes 30` goes on after a failure, and shows one history for each kind of failure.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time

from tests import nightly
from tests.differential.histories import draw
from tests.differential.processes import Nursery
from tests.differential.shorten import report, run_in_new_directory, shortened


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
