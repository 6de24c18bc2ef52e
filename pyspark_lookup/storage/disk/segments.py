"""`Segments`: large files of named regions, each written once, and mapped into memory by every process that reads it.

    "LKUPSEG1", and a digest of the name    8 bytes, 16 bytes
    regions, each from a multiple of 64     as many bytes as were reserved
    footer                                  JSON: {"meta": …, "regions": {name: [offset, length, CRC-32]}}
    footer's length, its CRC-32, magic      <QI8s

A file gets its name (`snapshots/<table>/<name>`) by rename, after it was flushed to the disk. Opening it checks the digest and the footer.
The regions are checked only once: a record then has the file's size, time and inode, and the regions are checked again if these change.

Beside the file may be `<name>.used`, with int64 numbers that are written in place. A mapping holds a shared lock on its file as long as
anything uses the mapping. This pins the file: it is not removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark_lookup.core.decoding import UNREADABLE, as_counts, as_texts
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.storage.disk.directory import (
    LEFTOVER_AFTER_S,
    SEGMENT_MAGIC,
    find_older,
    is_own_file,
    key_of,
    list_directories,
    list_entries,
    list_entries_below,
    list_names,
    lock_soon,
    sync_directory,
    use_file,
)
from pyspark_lookup.storage.disk.records import Records
from pyspark_lookup.storage.disk.space import ReservedFile, on_disk

_HEAD_BYTES = len(SEGMENT_MAGIC) + 16
_TAIL = struct.Struct("<QI8s")
_ALIGNMENT = 64
_CHECKED_AT_ONCE = 16 * 1024 * 1024  # bytes
_NUMBERS = ".used"
DERIVED = "derived-"
"""The names of segments that were computed from other segments begin so."""
_TOUCH_AFTER_S = 60.0

_Regions = Mapping[str, tuple[int, int, int]]
"""The offset, length and CRC-32 of each region. All regions are within the file."""


@dataclasses.dataclass(frozen=True)
class OpenSegment:
    """A mapped segment: its metadata, its regions, and its size in bytes. The file is pinned while any region is in use."""

    meta: dict[str, Any]
    regions: Mapping[str, memoryview]
    bytes: int


class SegmentWriter:
    """A segment that is being written, within the budget. Append the bytes of every region in order, then publish or close the segment."""

    def __init__(self, file: ReservedFile, sizes: Mapping[str, int]) -> None:
        self.file = file
        self._regions: dict[str, list[int]] = {}  # (offset, size, CRC-32 of the bytes so far)
        self._bytes_written: dict[str, int] = {}
        self._end = _HEAD_BYTES
        self.durable = True
        try:
            for name, size in sizes.items():
                self._place(name, size)
            self.file.resize(self._end)
            self._write(SEGMENT_MAGIC, 0)
        except OSError:
            self.close()
            raise

    def reserve(self, name: str, size: int) -> None:
        """Add a region of `size` bytes after the others, to be filled with `append`. Raises CacheFullError if there is no room for it."""
        self._place(name, size)
        self.file.resize(self._end)

    def _place(self, name: str, size: int) -> None:
        self._end += -self._end % _ALIGNMENT
        self._regions[name], self._bytes_written[name] = [self._end, size, 0], 0
        self._end += size

    def append(self, name: str, data: Any) -> None:
        """Append `data` (any buffer) to a region. Raises ValueError if the region would exceed its size."""
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        (offset, size, crc), start = self._regions[name], self._bytes_written[name]
        if start + len(view) > size:
            raise ValueError(f"region {name} should have {size} bytes")
        self._regions[name][2] = zlib.crc32(view, crc)
        self._bytes_written[name] = start + len(view)
        self._write(view, offset + start)

    def _write(self, data: bytes | memoryview, at: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self.file.fd, view, at)
            view, at = view[count:], at + count

    def add(self, name: str, data: Any) -> None:
        """Add a region with `data`."""
        self.reserve(name, memoryview(data).nbytes)
        self.append(name, data)

    def finish(self, meta: Mapping[str, Any], durable: bool = True) -> None:
        """Write the footer. `durable`: whether to flush the file to the disk before it gets its name. Raises ValueError if a region is
        incomplete."""
        short = [name for name, (_, size, _) in self._regions.items() if self._bytes_written[name] != size]
        if short:
            raise ValueError(f"regions {short} are not complete")
        footer = json.dumps({"meta": meta, "regions": self._regions}, separators=(",", ":")).encode()
        tail = _TAIL.pack(len(footer), zlib.crc32(footer), SEGMENT_MAGIC)
        self.file.resize(self._end + len(footer) + len(tail))
        self._write(footer + tail, self._end)
        self.durable = durable

    def bind(self, table: str, name: str) -> None:
        """Write a digest of the segment's name into it, and flush a durable segment to the disk. Raises OSError if that fails."""
        self._write(_name_digest(table, name), len(SEGMENT_MAGIC))
        if self.durable:
            os.fsync(self.file.fd)

    def close(self) -> None:
        """Close the file, and remove it if it was not published."""
        self.file.close()


class Segments(Records):
    """A directory with segments, by table and name."""

    def __init__(
        self,
        root: Path,
        max_bytes: int | None,
        metrics: CacheMetricGroup,
        now_s: Callable[[], float],
        creates: bool = True,
    ) -> None:
        super().__init__(root, max_bytes, metrics, now_s, creates)
        self._used_s: dict[str, float] = {}  # by table: when a process last recorded that the table is in use

    def create_segment(self, sizes: Mapping[str, int], out_of: ReservedFile | None = None) -> SegmentWriter:
        """A new segment with regions of these sizes in bytes. It first uses the bytes that `out_of` has reserved.

        Raises CacheFullError if there is no room for the segment, another OSError if it cannot be written.
        """
        return SegmentWriter(self.reserve(0, out_of), sizes)

    def publish_segment(self, table: str, name: str, writer: SegmentWriter) -> None:
        """Give a finished segment its name, under which readers find it. Raises OSError if that fails."""
        directory = self._root / "snapshots" / table
        writer.bind(table, name)
        status = os.fstat(writer.file.fd)
        writer.file.publish(directory / name)
        # A segment that was not flushed gets no record that its bytes are checked: after a crash it may be incomplete.
        if not writer.durable:
            return
        self.replace_record("segment", f"{table}-{name}", _signature(status))
        with contextlib.suppress(OSError):  # if a crash loses the name, the segment is only missing
            sync_directory(directory)

    def use_table(self, table: str) -> None:
        """Record that a table's segments are in use, because unused tables are evicted first. Recorded at most once a minute, to save
        writes."""
        now_s = self._now_s()
        if abs(now_s - self._used_s.get(table, -math.inf)) <= _TOUCH_AFTER_S:
            return
        with contextlib.suppress(OSError):
            path = self._place("snapshots", table)
            used_s = os.lstat(path).st_mtime
            if abs(now_s - used_s) > _TOUCH_AFTER_S:
                os.utime(path, (now_s, now_s))
                used_s = now_s
            self._used_s[table] = used_s

    def supersede_segments(self, table: str, names: Sequence[str]) -> None:
        """Record which segments the latest version of a table does not need, because these are evicted first. Raises OSError if that
        fails."""
        if tuple(sorted(names)) != self.superseded_segments(table):
            self.replace_record("superseded", table, sorted(names))

    def superseded_segments(self, table: str) -> tuple[str, ...]:
        """The segments that `supersede_segments` has recorded for a table."""
        return self.get_record("superseded", table, as_texts) or ()

    def segments(self, table: str) -> list[str]:
        """The names of a table's segments."""
        return sorted(name for name in list_names(self._root / "snapshots" / table) if not name.endswith(_NUMBERS))

    def open_segment(self, table: str, name: str) -> OpenSegment | None:
        """A segment, mapped and pinned; None if it is missing, damaged or cannot be mapped. A damaged segment is removed."""
        try:
            with use_file(self._place("snapshots", table, name)) as fd:
                status = os.fstat(fd)
                if not _has_ends(fd, status, table, name):
                    self.discard_segment(table, name)
                    return None
                # Without the lock, the file may be removed while it is in use, but the mapping stays valid.
                lock_soon(fd, fcntl.LOCK_SH)
                # The mapping keeps a duplicate of fd, and with it the lock, until its last user is gone.
                view = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as problem:  # ValueError: the limit of the address space
            if isinstance(problem, OSError) and problem.errno == errno.ELOOP:  # a link, which is not followed
                self.discard_segment(table, name)
            else:
                self._metrics.inc("cacheFailureCount")
            return None
        footer = _footer(view)
        if footer is None or not self._is_checked(table, name, status, view, footer[1]):
            del view
            self.discard_segment(table, name)
            return None
        meta, regions = footer
        views = {key: view[offset : offset + length] for key, (offset, length, _) in regions.items()}
        return OpenSegment(meta, views, status.st_size)

    def discard_segment(self, table: str, name: str) -> None:
        """Remove a segment that is damaged, or not of the form that its reader expects, and count it."""
        self._metrics.inc("snapshotDamagedCount")
        with contextlib.suppress(OSError):
            self._drop("segments", self._place("snapshots", table, name))
        self.remove_record("segment", f"{table}-{name}")

    def _is_checked(self, table: str, name: str, status: os.stat_result, view: memoryview, regions: _Regions) -> bool:
        """Whether the regions are as they were written. Reads every byte, unless that was done since the file last changed."""
        if self.get_record("segment", f"{table}-{name}") == _signature(status):
            return True
        if not _regions_intact(view, regions):
            return False
        with contextlib.suppress(OSError):
            self.replace_record("segment", f"{table}-{name}", _signature(status))
        return True

    def remove_segment(self, table: str, name: str) -> bool:
        """Remove a segment unless a process has mapped it. Returns whether it is gone."""
        try:
            path = self._place("snapshots", table, name)
            with use_file(path) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The race: a reader may open the segment now. It waits for this lock, and then maps the removed file, which stays valid.
                is_removed = self._drop("segments", path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        if is_removed:
            self._drop("segments", path.with_name(f"{name}{_NUMBERS}"))
            self.remove_record("segment", f"{table}-{name}")
        return is_removed

    def is_mapped(self, table: str, name: str) -> bool:
        """Whether a process has mapped a segment; False if there is no such segment."""
        try:
            with use_file(self._place("snapshots", table, name)) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def unlink_segment(self, table: str, name: str) -> None:
        """Remove a segment and its numbers, even if it is mapped. Readers keep their mapping."""
        for suffix in ("", _NUMBERS):
            with contextlib.suppress(OSError):
                self._drop("segments", self._place("snapshots", table, f"{name}{suffix}"))
        self.remove_record("segment", f"{table}-{name}")

    def open_numbers(self, table: str, name: str, count: int, create: bool = False) -> memoryview | None:
        """`count` (> 0) int64 numbers beside a segment, which all processes map for writing; None if that fails. They are 0 at first.

        Nothing protects the numbers, so use them only for values that may be lost or wrong. The process that publishes the segment creates
        them first (`create`).
        """
        size = 8 * max(count, 1)
        try:
            path = self._place("snapshots", table, f"{name}{_NUMBERS}")
            with self._use(path, os.O_RDWR | (os.O_CREAT if create else 0)) as fd:
                if not is_own_file(os.fstat(fd)) or os.fstat(fd).st_nlink > 1:
                    raise OSError(errno.EPERM, "the file does not belong to this user alone", str(path))
                self.take("segments", max(on_disk(size) - on_disk(os.fstat(fd).st_size), 0))
                # On a disk that is full, writing to a mapped hole would kill the process.
                os.posix_fallocate(fd, 0, size)
                return memoryview(mmap.mmap(fd, size))
        except FileNotFoundError:  # the segment has just been removed
            return None
        except (OSError, ValueError):
            self._metrics.inc("cacheFailureCount")
            return None

    def _sweep_segments(self, now_s: float) -> None:
        """Remove the segments of tables whose record has not been used for long, and numbers without a segment."""
        for directory in list_directories(self._root / "snapshots"):
            in_use = any(self.has_record(kind, directory.name) for kind in ("snapshot", "log", "listed"))
            for path in find_older(LEFTOVER_AFTER_S, now_s, list_entries(directory)):
                if path.suffix == _NUMBERS:
                    if not path.with_suffix("").exists():
                        self._drop("segments", path)
                elif not in_use:
                    self.remove_segment(directory.name, path.name)
            if not in_use:
                self._remove_directory(directory)

    def _damaged_segments(self) -> list[Path]:
        """The segments whose footer or regions are not as they were written. Reads every byte."""
        damaged = []
        for path in list_entries_below(self._root / "snapshots"):
            if path.suffix == _NUMBERS:
                continue
            with contextlib.suppress(FileNotFoundError):
                if not _is_whole(path):
                    damaged.append(path)
        return damaged


def _is_whole(path: Path) -> bool:
    """Whether a file is a segment as it was written. Reads every byte."""
    try:
        with use_file(path) as fd:
            status = os.fstat(fd)
            if not _has_ends(fd, status, path.parent.name, path.name):
                return False
            view = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            return False
        raise
    footer = _footer(view)
    return footer is not None and _regions_intact(view, footer[1])


def _name_digest(table: str, name: str) -> bytes:
    return bytes.fromhex(key_of(table, name))


def _has_ends(fd: int, status: os.stat_result, table: str, name: str) -> bool:
    """Whether an open file begins and ends like the segment with this name.

    Other files are not mapped: files that are incomplete after a crash, and files of other programs.
    """
    if not is_own_file(status) or status.st_size < _HEAD_BYTES + _TAIL.size:
        return False
    last = os.pread(fd, len(SEGMENT_MAGIC), status.st_size - len(SEGMENT_MAGIC))
    return last == SEGMENT_MAGIC and os.pread(fd, _HEAD_BYTES, 0) == SEGMENT_MAGIC + _name_digest(table, name)


def _signature(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _footer(view: memoryview) -> tuple[dict[str, Any], _Regions] | None:
    """(meta, regions) of a file that begins and ends like a segment; None if the footer is damaged."""
    length, crc, _ = _TAIL.unpack(view[-_TAIL.size :])
    end = len(view) - _TAIL.size - length
    if end < _HEAD_BYTES:
        return None
    text = view[end : len(view) - _TAIL.size]
    if zlib.crc32(text) != crc:
        return None
    try:
        footer = json.loads(bytes(text))
        meta, regions = footer["meta"], {name: _region(region, end) for name, region in footer["regions"].items()}
    except UNREADABLE:
        return None
    return (meta, regions) if isinstance(meta, dict) else None


def _region(record: Any, end: int) -> tuple[int, int, int]:
    offset, length, crc = as_counts(record)
    if offset + length > end:
        raise ValueError("a region ends after the end of the file")
    return offset, length, crc


def _regions_intact(view: memoryview, regions: _Regions) -> bool:
    for offset, length, crc in regions.values():
        actual_crc = 0
        for start in range(offset, offset + length, _CHECKED_AT_ONCE):
            actual_crc = zlib.crc32(view[start : min(start + _CHECKED_AT_ONCE, offset + length)], actual_crc)
        if actual_crc != crc:
            return False
    return True
