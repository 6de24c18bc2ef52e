"""Counters of processes: one small file per process, written in place, which outlives it.

A file is a header with the process and the names of its numbers, followed by the numbers and a checksum, which one write replaces. The
process holds a lock on its file. If the lock is free, the process has ended, and its numbers may be merged into a total.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import struct
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from pyspark_lookup.core.decoding import UNREADABLE, as_texts
from pyspark_lookup.storage.disk.directory import (
    HEADER_BYTES,
    NEW_FILE,
    find_older,
    is_own_file,
    is_unlocked,
    list_names,
    use_file,
    wrap,
)
from pyspark_lookup.storage.disk.records import Records, json_bytes, record_value
from pyspark_lookup.storage.disk.space import on_disk

_READS = 20  # of a file whose process may be writing it
_TOTAL_KEPT_S = 90 * 86400.0
_LARGEST_HEAD = 1 << 20


@dataclasses.dataclass(frozen=True)
class Counts:
    """The counts of a process, or the total of several (`includes`). `about`: the table and process that they belong to."""

    name: str
    about: Mapping[str, Any]
    values: Mapping[str, int]
    alive: bool

    @property
    def includes(self) -> frozenset[str]:
        """The names of the files whose numbers are part of these."""
        return frozenset(self.about.get("includes", ()))


class CounterFile:
    """The file of this process's counters, written in place. Not for use after a fork."""

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor = descriptor
        self._start = start

    def write(self, data: bytes) -> None:
        """Replace the numbers: one int64 in this machine's byte order for each name. Raises OSError if the disk fails."""
        os.pwrite(self._descriptor, data + _checksum(data), self._start)

    def is_removed(self) -> bool:
        """Whether the file has lost its name, because the cache directory was removed."""
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Close the file. Its numbers stay."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


class Counters(Records):
    """A directory with the counters of processes. The prefix of a file's name shows which table they belong to."""

    def new_counters(self, name: str, about: Mapping[str, Any], values: Mapping[str, int]) -> CounterFile:
        """Create a file for this process, with these numbers. Raises OSError if the directory cannot be written."""
        return self._retry(lambda: self._new_counters(name, about, values))

    def _new_counters(self, name: str, about: Mapping[str, Any], values: Mapping[str, int]) -> CounterFile:
        head = wrap(json_bytes({**about, "names": list(values)}), f"counters/{name}")
        temporary = self._temporary()
        descriptor = self._open(temporary, NEW_FILE)
        file = CounterFile(descriptor, len(head))
        try:
            with contextlib.suppress(OSError):  # some file systems have no such locks: then the file is never merged
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with self._within_budget(on_disk(len(head) + _numbers(values).size)):
                os.pwrite(descriptor, head, 0)
                file.write(_numbers(values).pack(*values.values()))
                self._rename(temporary, self._root / "counters" / name)
        except OSError:
            self._remove(temporary)
            raise
        return file

    def counters(self, prefix: str) -> list[Counts]:
        """The counts of all processes, by name, each counted once. Damaged files are left out."""
        for _ in range(_READS):
            before = self._totals(prefix)
            process_counts = [
                counts for name in self._counter_names(prefix) if (counts := self._counts(name)) is not None
            ]
            # The race: a total may be replaced meanwhile, and the files that it includes be missed or read twice. Then all are
            # read again.
            if self._totals(prefix) == before:
                break
        included = frozenset[str]().union(*(counts.includes for counts in process_counts))
        return [counts for counts in process_counts if counts.name not in included]

    def _totals(self, prefix: str) -> list[tuple[str, int]]:
        """The totals of a prefix as (name, inode): a replaced total has another inode."""
        totals = []
        for name in self._counter_names(prefix):
            with contextlib.suppress(OSError):
                if name.endswith("-ended"):
                    totals.append((name, os.stat(self._root / "counters" / name).st_ino))
        return totals

    def merge_counters(
        self,
        prefix: str,
        above: int,
        merge: Callable[[list[Counts]], tuple[dict[str, Any], dict[str, int]]],
        group: Callable[[list[Counts]], Mapping[str, str]] = lambda every: {},
    ) -> None:
        """Replace the files of ended processes by totals, if a prefix has more than `above` files.

        `group`: maps a file's name to the name of its total; files that it does not have belong to the total "". `merge`: makes a total's
        `about` and numbers. Raises OSError if the directory cannot be written.
        """
        if len(self._counter_names(prefix)) <= above:
            return
        with self._lock("total.lock"):
            # The race: a process may have died after it wrote a total and before it removed the files that the total includes.
            leftovers = {name: self._forget_included(name) for name, _ in self._totals(prefix)}
            every = self.counters(prefix)
            groups, ended = group(every), dict[str, list[Counts]]()
            for counts in every:
                if not counts.alive or counts.name in leftovers:
                    ended.setdefault(groups.get(counts.name, ""), []).append(counts)
            for name, parts in ended.items():
                total = f"{prefix}-{name}-ended" if name else f"{prefix}-ended"
                merged_names = [counts.name for counts in parts if counts.name != total]
                if merged_names:
                    about, values = merge(parts)
                    unremoved = [name for counts in parts for name in leftovers.get(counts.name, ())]
                    # The total names the files that it includes. So a reader counts them once, even between this line and their
                    # removal, or if this process dies in between.
                    self.new_counters(total, {**about, "includes": [*merged_names, *unremoved]}, values)
                    self._forget_included(total)

    def _forget_included(self, total: str) -> list[str]:
        """Remove the files that a total includes. Returns the names of those that could not be removed."""
        counts = self._counts(total) if (self._root / "counters" / total).exists() else None
        paths = [self._root / "counters" / name for name in sorted(counts.includes)] if counts is not None else []
        return [path.name for path in paths if not self._drop("records", path) and path.exists()]

    def _counter_names(self, prefix: str) -> list[str]:
        return sorted(name for name in list_names(self._root / "counters") if name.startswith(prefix))

    def _counts(self, name: str) -> Counts | None:
        try:
            with use_file(self._place("counters", name)) as descriptor:
                for _ in range(_READS if is_own_file(os.fstat(descriptor)) else 0):
                    parsed = _parse(os.pread(descriptor, _LARGEST_HEAD, 0), name)
                    if parsed is not None:
                        return Counts(name, *parsed, alive=_is_alive(descriptor))
        except FileNotFoundError:
            return None
        except OSError:
            pass
        self._metrics.inc("cacheFailureCount")
        return None

    def _sweep_counters(self, now_s: float) -> None:
        """Remove totals that have not changed for a long time."""
        totals = (self._root / "counters" / name for name in self._counter_names("") if name.endswith("-ended"))
        for path in find_older(_TOTAL_KEPT_S, now_s, totals):
            self._remove(path)

    def _damaged_counters(self) -> list[Path]:
        directory = self._root / "counters"
        return [directory / name for name in self._counter_names("") if self._counts(name) is None]


def _is_alive(descriptor: int) -> bool:
    """Whether the process that counts in a file may be alive. If so, the file is not merged into a total."""
    try:
        return not is_unlocked(descriptor)
    except OSError:
        return True


def _parse(blob: bytes, name: str) -> tuple[dict[str, Any], dict[str, int]] | None:
    """(about, values) of a file; None if it is damaged."""
    length = HEADER_BYTES + int.from_bytes(blob[8:16], "little")
    head = record_value(blob[:length], f"counters/{name}")
    if not isinstance(head, dict):
        return None
    try:
        names = as_texts(head["names"])
        numbers = _numbers(names)
        data = blob[length : length + numbers.size]
        if _checksum(data) != blob[length + numbers.size :]:
            return None
        return {key: value for key, value in head.items() if key != "names"}, dict(
            zip(names, numbers.unpack(data), strict=True)
        )
    except (*UNREADABLE, struct.error):
        return None


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


def _numbers(names: Collection[str]) -> struct.Struct:
    """One int64 for each name, in this machine's byte order: no other machine reads its cache directory."""
    return struct.Struct(f"={len(names)}q")
