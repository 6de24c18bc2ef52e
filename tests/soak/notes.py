"""Notes of processes: JSON lines that are on the disk before their writer goes on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Notes:
    """A process's notes. Times are of the machine's monotonic clock, which all processes share."""

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(exist_ok=True)
        self._file = (directory / f"{name}.jsonl").open("a")
        self._name = name

    def add(self, kind: str, **values: Any) -> None:
        note = {"who": self._name, "kind": kind, "at": time.monotonic_ns() / 1e9, **values}
        self._file.write(json.dumps(note) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def notes_in(directory: Path) -> list[dict[str, Any]]:
    """All notes of a directory, by time; a last line that a kill has cut off is none."""
    return sorted(_notes(directory), key=lambda note: note["at"])


def _notes(directory: Path) -> Iterator[dict[str, Any]]:
    for path in directory.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue


class Following:
    """The notes that come to a directory while one looks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}

    def new(self) -> list[dict[str, Any]]:
        """Those since the last call."""
        found = []
        for path in self._directory.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:  # cut off by a kill, and gone on with by the next process
                    continue
        return sorted(found, key=lambda note: note["at"])
