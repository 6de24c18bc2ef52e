"""A soak from beginning to end: everything is started, harmed while it runs, stopped, and what came out is checked.

`python -m tests.soak.run --minutes 30` says what came of it as a dict, and keeps the directory if anything is wrong.
"""

from __future__ import annotations

import collections
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import nightly
from tests.history.checker import check, states
from tests.proxy import GRAVES
from tests.soak import tables
from tests.soak.chaos import Chaos, Clocks
from tests.soak.checker import Findings, batches_of, check_batches, check_rows, epochs_by_position
from tests.soak.directories import check_directory
from tests.soak.parts import Parts
from tests.soak.watch import Pulse, Watch
from tests.soak.writers import Digests
from tests.workers import Following, Notes, notes_in

HANG_S = 60.0
_SAMPLED_EVERY_S = 2.0


class Soak:
    """A soak that runs."""

    def __init__(self, parts: Parts, chaos: Chaos, hang_s: float, log: Callable[[str], None]) -> None:
        self._parts = parts
        self._chaos = chaos
        self._log = log
        self._following = Following(parts.notes)
        self._counts = collections.Counter[str]()
        self._written = 0
        self._pulse = Pulse(hang_s, time.monotonic())
        self._watch = Watch(parts.cluster, parts.application, parts.directories)

    def run(self, seconds: float) -> None:
        """Do harm for so long, and until each kind is done, at most twice as long; then stop the stream. AssertionError if it hangs."""
        began = time.monotonic()
        sample_at = 0.0
        while (now := time.monotonic()) < began + seconds or (self._chaos.left and now < began + 2 * seconds):
            time.sleep(0.1)
            self._parts.workers.check_alive()
            self._follow()
            self._chaos.tick(now, self._written)
            if now >= sample_at:
                self._watch.sample(now)
                sample_at = now + _SAMPLED_EVERY_S
        self._chaos.end()
        self._parts.stop()

    def _follow(self) -> None:
        """Take in what has happened, and see whether the stream goes on."""
        for note in self._following.new():
            kind = note["kind"]
            if note["who"] != "application":
                continue
            self._written += kind == "written"
            self._pulse.heard(kind, note["at"])
            if kind in ("ended", "not started"):
                self._counts[f"query {kind}"] += 1
                self._log(f"{kind}: {note['error']}")
        self._pulse.check(time.monotonic())

    def check(self) -> dict[str, Any]:
        """What came of it. `wrong` is empty if all is well."""
        parts = self._parts
        requests = parts.fail({})
        Digests(parts.endpoint, str(parts.work / "cache-writers"), Notes(parts.notes, "last")).note_new()
        notes = notes_in(parts.notes)
        findings = Findings(self._watch.wrong())
        epochs = self._check_managed(notes, findings)
        batches = batches_of(parts.work, notes)
        check_batches(batches, notes, epochs, findings)
        check_rows(batches, findings)
        directories = {}
        for directory in parts.directories:
            directories[directory.name], wrong = check_directory(directory)
            findings.wrong += wrong
        kinds = collections.Counter(note["kind"] for note in notes)
        took = [note["ms"] for note in notes if note["kind"] == "progress"]
        stream = {**self._counts, "median micro-batch (ms)": statistics.median(took), "slowest (ms)": max(took)}
        silences = {"heard of": self._pulse.silent_s, "written": self._pulse.unwritten_s}
        return {
            **findings.counts,
            "harm": self._chaos.counts,
            "harm not done": sorted(self._chaos.left),
            "stream": {**stream, **{f"longest without being {what} (s)": round(s, 1) for what, s in silences.items()}},
            "requests": requests,
            "writes": {
                kind: kinds[kind] for kind in ("published", "acknowledged", "failed", "unknown", "compact", "vacuum")
            },
            "directories": directories,
            "medians of the quarters": self._watch.told(),
            "wrong": findings.wrong,
        }

    def _check_managed(self, notes: list[dict[str, Any]], findings: Findings) -> dict[int, str]:
        """Check what writers were told of the managed table; its epochs by position."""
        s3 = tables.client(self._parts.store)

        def read(bucket: str, name: str) -> bytes:
            data: bytes = s3.get_object(Bucket=bucket, Key=name)["Body"].read()
            return data

        removed = set(tables.names_below(s3, "managed/", GRAVES))
        events = [read(tables.BUCKET, name) for name in tables.names_below(s3, "managed/_lookup/log/")]
        (self._parts.work / "events.jsonl").write_bytes(b"\n".join(events))
        try:
            found, tags = states(
                events, lambda path: read(GRAVES if f"managed/{path}" in removed else tables.BUCKET, f"managed/{path}")
            )
            check(notes, found, tags, lambda who: False, lambda who: False)
        except AssertionError as problem:
            findings.wrong.append(str(problem))
            return {}
        return epochs_by_position(found, findings)


def soak(
    work: Path, seconds: float, seed: int, hang_s: float = HANG_S, log: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """What a soak of so many seconds came to; AssertionError if it could not go on, or hung for `hang_s` (`Pulse`)."""
    rng = random.Random(seed)
    clocks = Clocks(work)
    if clocks.missing:
        log(f"clocks are not stepped: {clocks.missing}")
    parts = Parts(work, rng)
    try:
        parts.start([clocks.variables(number) for number in range(2)])
        log("the stream runs")
        running = Soak(parts, Chaos(rng, parts, clocks), hang_s, log)
        running.run(seconds)
        return running.check()
    finally:
        parts.close()


def main() -> None:
    minutes, seed = nightly.arguments(__doc__)
    with nightly.directory("soak") as work:
        told = soak(work, minutes * 60, seed, log=lambda text: print(text, flush=True))
        print(json.dumps(told, indent=1), flush=True)
        if told["wrong"]:
            sys.exit(1)


if __name__ == "__main__":
    main()
