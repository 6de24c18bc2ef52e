"""The processes of a cluster and an application, found in /proc, and what they hold."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Process:
    """A process at one moment: `session` is the id of its session, `parent` of its parent."""

    id: int
    parent: int
    session: int
    command: str


def all_processes() -> Iterator[Process]:
    """Those of this machine that are alive."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):  # it may end while we look
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if state != "Z":
                    yield Process(int(entry.name), int(parent), int(session), command)


def python_workers(session: int) -> list[int]:
    """The Python workers of a session's executors, and the daemons that fork them."""
    return [found.id for found in all_processes() if found.session == session and "pyspark.daemon" in found.command]


def descendants(of: int) -> list[Process]:
    """The processes that a process has started, and those that these have."""
    found: list[Process] = []
    known = {of}
    pending = sorted(all_processes(), key=lambda process: process.id)
    while grown := [process for process in pending if process.parent in known and process.id not in known]:
        found += grown
        known |= {process.id for process in grown}
    return found


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a process holds: resident bytes, and open files."""

    resident: int
    handles: int


def usage(process: int) -> Usage | None:
    """What a process holds now; None if it has ended."""
    try:
        resident = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        return Usage(resident, len(os.listdir(f"/proc/{process}/fd")))
    except (OSError, IndexError):
        return None
