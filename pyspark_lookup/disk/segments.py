"""Segments: large files of named regions, written once, mapped by every process that reads them.

    "LKUPSEG1"                              8 bytes
    regions, each from a multiple of 64     as many bytes as was said before writing
    footer                                  JSON: {"meta": …, "regions": {name: [offset, length, CRC-32]}}
    footer's length, its CRC-32, magic      <QI8s

A file gets its name (`snapshots/<table>/<name>`) by rename, after it is on the disk. Opening checks
the footer; the regions were checked once since the file was last touched, which a record says, and
are read through if it was. Beside it may lie `<name>.used`, int64 numbers that are written in place. A mapping holds a shared lock on its file for as long as anything uses
it: that is the pin which keeps the file from being removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark_lookup.disk.files import LEFTOVER_AFTER_S
from pyspark_lookup.disk.records import Records

__all__ = ["OpenSegment", "SegmentWriter", "Segments"]

_MAGIC = b"LKUPSEG1"
_TAIL = struct.Struct("<QI8s")
_ALIGNMENT = 64
_CHECKED_AT_ONCE = 16 * 1024 * 1024
_NUMBERS = ".used"


@dataclasses.dataclass(frozen=True)
class OpenSegment:
    """A mapped segment: what its writer said of it, and its regions. Pinned while any region is in use."""

    meta: dict[str, Any]
    regions: Mapping[str, memoryview]
    bytes: int


class SegmentWriter:
    """A segment being written into `tmp/`. Give every region its bytes in order, then publish or abandon it."""

    def __init__(self, path: Path, sizes: Mapping[str, int]) -> None:
        self.path = path
        self._sizes = dict(sizes)
        self._offsets: dict[str, int] = {}
        end = len(_MAGIC)
        for name, size in sizes.items():
            end += -end % _ALIGNMENT
            self._offsets[name] = end
            end += size
        self._end = end
        self._written = dict.fromkeys(sizes, 0)
        self._crcs = dict.fromkeys(sizes, 0)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self._write(_MAGIC, 0)
        except OSError:
            self.close()
            raise

    def append(self, name: str, data: Any) -> None:
        """Write `data` (any buffer) behind what the region has. ValueError if it is more than was said."""
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        done = self._written[name]
        if done + len(view) > self._sizes[name]:
            raise ValueError(f"region {name} was to have {self._sizes[name]} bytes")
        self._crcs[name] = zlib.crc32(view, self._crcs[name])
        self._written[name] = done + len(view)
        self._write(view, self._offsets[name] + done)

    def _write(self, data: bytes | memoryview, at: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, at)
            view, at = view[count:], at + count

    def add(self, name: str, data: Any) -> None:
        """One more region, all at once, behind the others."""
        self._end += -self._end % _ALIGNMENT
        size = memoryview(data).nbytes
        self._offsets[name], self._sizes[name], self._written[name], self._crcs[name] = self._end, size, 0, 0
        self._end += size
        self.append(name, data)

    def finish(self, meta: Mapping[str, Any], durable: bool = True) -> None:
        """Write the footer and, if it is to be `durable`, bring everything to the disk. ValueError if a region lacks bytes."""
        short = [name for name, size in self._sizes.items() if self._written[name] != size]
        if short:
            raise ValueError(f"regions {short} are not complete")
        regions = {name: [self._offsets[name], self._sizes[name], self._crcs[name]] for name in self._sizes}
        footer = json.dumps({"meta": meta, "regions": regions}, separators=(",", ":")).encode()
        tail = _TAIL.pack(len(footer), zlib.crc32(footer), _MAGIC)
        self._write(footer + tail, self._end)
        if durable:
            os.fsync(self._fd)

    def close(self) -> None:
        """Give the file up; one that was not published is removed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(OSError):
            os.unlink(self.path)


class Segments(Records):
    """A directory with segments, by table and name."""

    def create_segment(self, sizes: Mapping[str, int]) -> SegmentWriter:
        """A new segment with regions of these sizes in bytes. OSError if it cannot be written."""
        return SegmentWriter(self._temporary(), sizes)

    def publish_segment(self, table: str, name: str, writer: SegmentWriter, checked: bool = True) -> None:
        """Give a finished segment its name; nobody has seen it before. OSError if it cannot be.

        `checked`: need not be read through when it is opened. Only for one that lies on the disk by now.
        """
        directory = self._root / "snapshots" / table
        directory.mkdir(mode=0o700, exist_ok=True)
        status = os.stat(writer.path)
        os.replace(writer.path, directory / name)
        if not checked:
            return
        self.replace_record("segment", f"{table}-{name}", _signature(status))
        with contextlib.suppress(OSError):  # a crash that forgets the name makes it a miss
            fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def spill_file(self) -> Path:
        """A name for a temporary file of this process; whoever creates it removes it."""
        return self._temporary()

    def segments(self, table: str) -> list[str]:
        """Names of the segments of a table on disk."""
        try:
            names = os.listdir(self._root / "snapshots" / table)
            return sorted(name for name in names if not name.endswith(_NUMBERS))
        except OSError:
            return []

    def open_segment(self, table: str, name: str) -> OpenSegment | None:
        """A segment, mapped and pinned; None if it is not there, or damaged (then it is removed) or cannot be mapped."""
        path = self._root / "snapshots" / table / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            status = os.fstat(fd)
            if not status.st_size:  # what a crash may leave of one that was not brought to the disk
                self._metrics.inc("snapshotDamagedCount")
                self._remove(path)
                return None
            # The mapping keeps a duplicate of fd, and by it the lock, until its last user is gone.
            mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # an address space limit
            self._metrics.inc("cacheFailureCount")
            return None
        finally:
            os.close(fd)
        view = memoryview(mapped)
        footer = _footer(view)
        if footer is None or not self._is_checked(table, name, status, view, footer):
            self._metrics.inc("snapshotDamagedCount")
            del view
            self._remove(path)
            self.remove_record("segment", f"{table}-{name}")
            return None
        regions = {key: view[offset : offset + length] for key, (offset, length, _) in footer["regions"].items()}
        return OpenSegment(footer["meta"], regions, status.st_size)

    def _is_checked(self, table: str, name: str, status: os.stat_result, view: memoryview, footer: Any) -> bool:
        """Whether the regions are as they were written; read through unless they were since the last change."""
        if self.get_record("segment", f"{table}-{name}") == _signature(status):
            return True
        if not _regions_intact(view, footer):
            return False
        with contextlib.suppress(OSError):
            self.replace_record("segment", f"{table}-{name}", _signature(status))
        return True

    def remove_segment(self, table: str, name: str) -> bool:
        """Remove a segment unless somebody has it mapped; whether it is gone."""
        path = self._root / "snapshots" / table / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Under the lock: who opens it now waits, and then finds it gone or reads it to its end.
            gone = self._remove(path)
        except OSError:
            return False
        finally:
            os.close(fd)
        self.remove_record("segment", f"{table}-{name}")
        return gone

    def unlink_segment(self, table: str, name: str) -> None:
        """Remove a segment and its numbers; who has it mapped goes on reading it."""
        for suffix in ("", _NUMBERS):
            self._remove(self._root / "snapshots" / table / f"{name}{suffix}")
        self.remove_record("segment", f"{table}-{name}")

    def open_numbers(self, table: str, name: str, count: int, create: bool = False) -> memoryview | None:
        """`count` (> 0) int64 beside a segment, zero at first, mapped for writing by all processes; None if they cannot be.

        For what may be lost and may be wrong: nothing protects them. Who publishes the segment creates them before.
        """
        path = self._root / "snapshots" / table / f"{name}{_NUMBERS}"
        size = 8 * max(count, 1)
        try:
            if create:
                path.parent.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
            try:
                # On a disk that is full, writing to a mapped hole would kill the process.
                os.posix_fallocate(fd, 0, size)
                return memoryview(mmap.mmap(fd, size))
            finally:
                os.close(fd)
        except FileNotFoundError:  # the segment has just been removed
            return None
        except (OSError, ValueError):
            self._metrics.inc("cacheFailureCount")
            return None

    def segment_bytes(self) -> int:
        """Bytes of all segments on disk."""
        total = 0
        for path in (self._root / "snapshots").glob("*/*"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

    def _sweep_segments(self, now_s: float) -> None:
        """Remove the segments of tables whose record has gone unused for long, and numbers without a segment."""
        for directory in (self._root / "snapshots").iterdir():
            in_use = self.has_record("snapshot", directory.name)
            for path in list(directory.iterdir()):
                with contextlib.suppress(OSError):
                    if now_s - path.stat().st_mtime <= LEFTOVER_AFTER_S:
                        continue
                    if path.suffix == _NUMBERS:
                        if not path.with_suffix("").exists():
                            self._remove(path)
                    elif not in_use:
                        self.remove_segment(directory.name, path.name)
            if not in_use:
                with contextlib.suppress(OSError):
                    directory.rmdir()

    def _damaged_segments(self) -> list[Path]:
        """Segments whose footer or a region is not as it was written; every byte is read."""
        found = []
        for path in (self._root / "snapshots").glob("*/*"):
            if path.suffix == _NUMBERS:
                continue
            with contextlib.suppress(FileNotFoundError):
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
                view = memoryview(mapped)
                footer = _footer(view)
                if footer is None or not _regions_intact(view, footer):
                    found.append(path)
        return found


def _signature(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _footer(view: memoryview) -> Any | None:
    """The footer; None if the file is not whole."""
    if len(view) < len(_MAGIC) + _TAIL.size or bytes(view[: len(_MAGIC)]) != _MAGIC:
        return None
    length, crc, magic = _TAIL.unpack(view[-_TAIL.size :])
    if magic != _MAGIC or length > len(view) - _TAIL.size - len(_MAGIC):
        return None
    text = view[len(view) - _TAIL.size - length : len(view) - _TAIL.size]
    return json.loads(bytes(text)) if zlib.crc32(text) == crc else None


def _regions_intact(view: memoryview, footer: Any) -> bool:
    for offset, length, crc in footer["regions"].values():
        found = 0
        for start in range(offset, offset + length, _CHECKED_AT_ONCE):
            found = zlib.crc32(view[start : min(start + _CHECKED_AT_ONCE, offset + length)], found)
        if found != crc:
            return False
    return True
