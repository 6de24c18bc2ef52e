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
from tests.soak import proxy, tables
from tests.soak.chaos import Chaos
from tests.soak.checker import Findings, batches_of, check_batches, check_commits, check_rows, epochs_by_position
from tests.soak.directories import check_directory
from tests.soak.notes import Following, Notes, notes_in
from tests.soak.parts import Parts
from tests.soak.watch import Pulse, Watch
from tests.soak.writers import Archive, Digests

HANG_S = 60.0
_SAMPLED_EVERY_S = 2.0


class Soak:
    """A soak that runs. `wrong`: what was seen to be so, in words."""

    def __init__(self, parts: Parts, rng: random.Random, hang_s: float, log: Callable[[str], None]) -> None:
        self._parts = parts
        self._log = log
        self._following = Following(parts.notes)
        self.wrong: list[str] = []
        self.counts = collections.Counter[str]()
        self._written = 0
        self._pulse = Pulse(hang_s, time.monotonic())
        self._chaos = Chaos(
            rng, parts.cluster, parts.disk, parts.clocks, parts.order, self._storm, lambda: parts.restart_writer(rng)
        )
        self._watch = Watch(parts.cluster, parts.application, parts.directories)

    def _storm(self, rages: bool) -> None:
        proxy.set_faults(self._parts.endpoint, {**proxy.FAULTS, **(proxy.STORM if rages else {})})

    def run(self, seconds: float) -> None:
        """Do harm for so long, and until each kind is done, at most twice as long; then stop the stream. AssertionError if it hangs."""
        began = time.monotonic()
        sample_at = 0.0
        while (now := time.monotonic()) < began + seconds or (self._chaos.left and now < began + 2 * seconds):
            time.sleep(0.1)
            self._parts.check_alive()
            self._follow()
            self._chaos.tick(now, self._written)
            if now >= sample_at:
                self._watch.sample(now)
                sample_at = now + _SAMPLED_EVERY_S
        self._chaos.end()
        self._parts.stop_application()

    def _follow(self) -> None:
        """Take in what has happened, and see whether the stream goes on."""
        for note in self._following.new():
            kind = note["kind"]
            if note["who"] != "application":
                continue
            self._written += kind == "written"
            self._pulse.heard(kind, note["at"])
            if kind in ("ended", "not started"):
                self.counts[f"query {kind}"] += 1
                self._log(f"{kind}: {note['error']}")
        self._pulse.check(time.monotonic())

    def check(self) -> dict[str, Any]:
        """What came of it. `wrong` is empty if all is well."""
        self._parts.stop_writers()
        notes, events = self._last_notes()
        (self._parts.work / "events.jsonl").write_bytes(b"\n".join(events))
        findings = Findings([*self.wrong, *self._watch.wrong()])
        epochs = epochs_by_position(events, notes)
        batches = batches_of(self._parts.work, notes)
        check_commits(notes, epochs, findings)
        check_batches(batches, notes, epochs, findings)
        check_rows(batches, findings)
        directories = {}
        for directory in self._parts.directories:
            directories[directory.name], wrong = check_directory(directory)
            findings.wrong += wrong
        kinds = collections.Counter(note["kind"] for note in notes)
        writes = {kind: kinds[kind] for kind in ("published", "committed", "failed", "unknown", "compact", "vacuum")}
        took = [note["ms"] for note in notes if note["kind"] == "progress"]
        stream = {**self.counts, "median micro-batch (ms)": statistics.median(took), "slowest (ms)": max(took)}
        silences = {"heard of": self._pulse.silent_s, "written": self._pulse.unwritten_s}
        return {
            **findings.counts,
            "harm": {**self._chaos.counts, **self._parts.missing()},
            "harm not done": sorted(self._chaos.left),
            "stream": {**stream, **{f"longest without being {what} (s)": round(s, 1) for what, s in silences.items()}},
            "requests": proxy.counts(self._parts.endpoint),
            "writes": writes,
            "directories": directories,
            "medians of the quarters": self._watch.told(),
            "wrong": findings.wrong,
        }

    def _last_notes(self) -> tuple[list[dict[str, Any]], list[bytes]]:
        """(all notes, with those of the last writes; the events of the managed table's log)."""
        parts = self._parts
        proxy.set_faults(parts.endpoint, dict.fromkeys(proxy.FAULTS, 0.0))
        last = Notes(parts.notes, "last")
        Archive(parts.store, last).note_new()
        Digests({"endpoint": parts.endpoint, "cache": str(parts.work / "cache-writers")}, last).note_new()
        s3 = tables.client(parts.store)
        names = tables.names_below(s3, "managed/_lookup/log/")
        return notes_in(parts.notes), [s3.get_object(Bucket=tables.BUCKET, Key=name)["Body"].read() for name in names]


def soak(
    work: Path, seconds: float, seed: int, hang_s: float = HANG_S, log: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """What a soak of so many seconds came to; AssertionError if it could not go on, or hung for `hang_s` (`Pulse`)."""
    rng = random.Random(seed)
    parts = Parts(work, rng)
    try:
        parts.start()
        log("the stream runs")
        running = Soak(parts, rng, hang_s, log)
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
