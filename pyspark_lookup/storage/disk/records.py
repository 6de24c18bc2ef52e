"""`Records`: small JSON values of the host, each created exclusively or replaced as a whole. `Counters`: the counters of processes.

A series is a set of records with ascending numbers. Only the newest record counts; the next record gets the next number.

Each process has a small file of counters, which outlives the process. The file has a header with the process and the names of the numbers,
then the numbers and their checksum, which are replaced in place by one write. The process holds a lock on its file. If nobody holds the lock,
the process has ended, and its numbers may be merged into a total.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from pyspark_lookup.core.decoding import UNREADABLE, as_name, as_texts
from pyspark_lookup.storage.disk.directory import (
    HEADER_BYTES,
    NEW_FILE,
    LockedFile,
    find_older,
    is_own_file,
    is_unlocked,
    list_directories,
    list_entries_below,
    list_names,
    read_content,
    unwrap,
    use_file,
    wrap,
)
from pyspark_lookup.storage.disk.space import Space, on_disk

T = TypeVar("T")

_DAY_S = 86400.0
_HELD_AT_MOST_S = 3600.0  # after this time a cached value is read again, which marks its record as used
_GRANULE_S = 0.02  # the resolution of file times: a file that changed this recently may change again without a new time
_DAYS_KEPT = {
    1: ("authorised", "execution", "plan", "unsettled", "asked", "missing", "silence"),
    7: (
        "bounds",
        "changed",
        "changes",
        "definition",
        "files",
        "vended",
        "listed",
        "manifest",
        "manifests",
        "place",
        "schema",
    ),
    30: (
        "floor",
        "heartbeat",
        "log",
        "log-tail",
        "pointer",
        "provided",
        "reloads",
        "snapshot",
        "superseded",
        "table",
        "version",
        "token",
        "waiting",
    ),
    # Without its record "segment", a segment is checked once more. Records "invalidated" must outlive the snapshots that they describe.
    60: ("segment", "invalidated", "principal-key"),
    math.inf: ("metrics",),  # sums that are never reset
}
# These times count from the last use. A record that is read is touched before half of its time is over.
_OTHERS_KEPT_S = 30 * _DAY_S  # for kinds that only another release knows
_RECORDS_KEPT_S = {kind: days * _DAY_S for days, kinds in _DAYS_KEPT.items() for kind in kinds}
SERIES = "~"  # separates kind and key in the name of a directory with a series of records
_NUMBERED = re.compile("[0-9a-f]{16}")
_NEWEST_TRIES = 8
_FORGOTTEN = "forgotten"  # the value of the newest record of a removed series


def _numbered(number: int) -> str:
    return f"{number:016x}"


def _as_it_is(value: Any) -> Any:
    return value


class Held(Generic[T]):
    """The value of a file or directory. It is kept in memory, and read again when a stat shows that the file has changed.

    `absent`: the value if there is no file.
    """

    def __init__(self, path: Path, read: Callable[[], T], absent: T, now_s: Callable[[], float]) -> None:
        self._path = str(path)
        self._read = read
        self._absent = absent
        self._now_s = now_s
        self._latest: tuple[tuple[int, ...], float, T] | None = None

    def get(self) -> T:
        """The current value."""
        try:
            status = os.lstat(self._path)
        except FileNotFoundError:
            return self._absent
        except OSError:
            return self._read()
        signs = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        now_s, latest = self._now_s(), self._latest
        if latest is not None and latest[0] == signs and abs(now_s - latest[1]) < _HELD_AT_MOST_S:
            return latest[2]
        value = self._read()
        old = now_s - max(status.st_mtime, status.st_ctime) > _GRANULE_S
        self._latest = (signs, now_s, value) if old and value is not None else None
        return value


class Records(Space):
    """A directory with records, each with a kind and a key.

    Readers check a record's value with a function `parse`. If it raises one of `UNREADABLE`, the record counts as damaged.
    """

    def get_record(self, kind: str, key: str, parse: Callable[[Any], Any] = _as_it_is) -> Any | None:
        """A record's value, as `parse` returns it; None if there is no record, or if it is damaged. Damaged records are counted."""
        try:
            path = self._place("records", kind, key)
            data, used_at = read_content(path)
            value = record_value(data, f"{kind}/{key}")
            parsed = None if value is None else parse(value)
        except FileNotFoundError:
            return None
        except (OSError, *UNREADABLE):
            parsed = None
        if parsed is None:
            self._metrics.inc("cacheFailureCount")
        elif abs(self._now_s() - used_at) > min(_DAY_S, _RECORDS_KEPT_S.get(kind, _OTHERS_KEPT_S) / 2):
            with contextlib.suppress(OSError):
                os.utime(path)
        return parsed

    def hold_record(self, kind: str, key: str, parse: Callable[[Any], Any] = _as_it_is) -> Held[Any | None]:
        """The value of `get_record`, for frequent calls: the file is read again only after a change."""
        path = self._root / "records" / kind / as_name(key)
        return Held(path, lambda: self.get_record(kind, key, parse), None, self._now_s)

    def has_record(self, kind: str, key: str) -> bool:
        """Whether there is an undamaged record."""
        try:
            data, _ = read_content(self._place("records", kind, key))
        except OSError:
            return False
        return unwrap(data, f"{kind}/{key}") is not None

    def create_record(self, kind: str, key: str, value: Any, parse: Callable[[Any], Any] = _as_it_is) -> Any:
        """Record `value`, unless there is a record with this key. Returns the recorded value, as `parse` returns it.

        The race: several processes may record at once. Creation is exclusive, so all of them return the same value. Raises OSError if the
        directory cannot be written.
        """
        path = self._place("records", kind, key)
        for _ in range(3):
            if self._put_new(path, wrap(json_bytes(value), f"{kind}/{key}")):
                return parse(value)
            winner = self.get_record(kind, key, parse)
            if winner is not None:
                return winner
            # The race: another process may just have replaced the damaged record by a good one. So it is read again under a lock, and removed
            # only if it is still damaged.
            with self._lock("repair.lock"):
                if os.path.lexists(path) and self.get_record(kind, key, parse) is None:
                    self._drop("records", path)  # the next attempt creates it again
        raise OSError(
            f"record {path} cannot be created, because the file or directory at this path is not a record: move it away"
        )

    def newest_record(self, kind: str, key: str, parse: Callable[[Any], Any] = _as_it_is) -> tuple[int, Any | None]:
        """(number, value) of the newest record of a series.

        (0, None) if the series is empty, (number, None) if the newest record is damaged or says that the series was removed.
        """
        series = f"{kind}{SERIES}{key}"
        number = 0

        def read(value: Any) -> Any:
            return _FORGOTTEN if value == _FORGOTTEN else parse(value)

        for _ in range(_NEWEST_TRIES):
            numbers = self._numbers(series)
            if numbers:
                number = max(numbers)
                value = self.get_record(series, _numbered(number), read)
                if value is not None or number in self._numbers(series):
                    return number, None if value == _FORGOTTEN else value
        return number, None  # other processes replace the newest record faster than it can be read

    def hold_newest(self, kind: str, key: str, parse: Callable[[Any], Any] = _as_it_is) -> Held[tuple[int, Any | None]]:
        """The value of `newest_record`, for frequent calls: the record is read again only after a change."""
        path = self._root / "records" / as_name(f"{kind}{SERIES}{key}")
        return Held(path, lambda: self.newest_record(kind, key, parse), (0, None), self._now_s)

    def newest_signs(self, kind: str, key: str) -> tuple[int, ...]:
        """The number, inode and times of the newest record of a series, without reading it. They also differ if the series was removed and
        begun again."""
        series = f"{kind}{SERIES}{key}"
        number = max(self._numbers(series), default=0)
        try:
            status = os.lstat(self._place("records", series, _numbered(number)))
        except OSError:
            return (number,)
        return number, status.st_ino, status.st_mtime_ns, status.st_ctime_ns

    def succeed_record(self, kind: str, key: str, number: int, value: Any) -> bool:
        """Add a record to a series, after the record `number`. Returns False if another process was first; the caller then reads the newest
        record again.

        The race: two processes may follow the same record. Exclusive create of the next number lets only one of them win. There is no lock: a
        process that is suspended between reading and writing blocks no other process, and overwrites no newer record. Raises OSError if the
        directory cannot be written.
        """
        series = f"{kind}{SERIES}{key}"
        path = self._place("records", series, _numbered(number + 1))
        if not self._put_new(path, wrap(json_bytes(value), f"{series}/{path.name}")):
            return False
        numbers = self._numbers(series)
        # The race: later records may have replaced this number before, so that its name was free; or another process has already added the
        # next record.
        if max(numbers, default=0) != number + 1:
            return False
        for older in numbers:
            if older < number:  # record `number` stays, because a listing that is under way may miss the new name
                self.remove_record(series, _numbered(older))
        return True

    def forget_records(self, kind: str, key: str) -> None:
        """Remove a series of records. Its numbers go on, so that a process that read the series earlier cannot add to it."""
        series = f"{kind}{SERIES}{key}"
        with contextlib.suppress(OSError):
            for _ in range(_NEWEST_TRIES):
                number = max(self._numbers(series), default=0)
                if not number:
                    return
                if self.succeed_record(kind, key, number, _FORGOTTEN):
                    self.remove_record(series, _numbered(number))
                    return
        # The mark that the series is removed cannot be written to a full disk, but the records can be removed.
        for number in self._numbers(series):
            self.remove_record(series, _numbered(number))

    def _numbers(self, series: str) -> set[int]:
        with contextlib.suppress(OSError):
            names = os.listdir(self._place("records", series))
            return {int(name, 16) for name in names if _NUMBERED.fullmatch(name)}
        return set()

    def replace_record(self, kind: str, key: str, value: Any) -> None:
        """Write a record. A record with the same key is replaced. Raises OSError if the directory cannot be written."""
        path = self._place("records", kind, key)
        data = wrap(json_bytes(value), f"{kind}/{key}")
        before = 0
        with contextlib.suppress(OSError):
            before = path.lstat().st_size
        with self._within_budget(on_disk(len(data)) - on_disk(before)):
            self._publish(path, data)

    def _put_new(self, path: Path, data: bytes) -> bool:
        """Write a record unless there is one. Returns whether there was none."""
        if os.path.lexists(path):
            return False
        try:
            with self._within_budget(on_disk(len(data))):
                if not self._publish_new(path, data):
                    raise FileExistsError(path)
        except FileExistsError:
            return False
        return True

    @contextlib.contextmanager
    def _within_budget(self, size: int) -> Iterator[None]:
        """Take `size` bytes of the budget for a `with` block, and give them back if the block fails. A negative `size` is given back after
        the block."""
        reserved = max(size, 0)
        try:
            self.take("records", reserved)
        except TimeoutError:
            # The process that holds the account's lock is suspended. The record is written nevertheless; a recount will find it.
            reserved = 0
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                self.take("records", -reserved)
            raise
        with contextlib.suppress(OSError):
            self.take("records", min(size, 0))

    def records(self, kind: str, prefix: str, parse: Callable[[Any], Any] = _as_it_is) -> Iterator[tuple[str, Any]]:
        """(key, value) of each undamaged record of a kind whose key starts with `prefix`. Each value is the one that `parse` returns."""
        for name in sorted(list_names(self._root / "records" / kind)):
            if name.startswith(prefix) and (value := self.get_record(kind, name, parse)) is not None:
                yield name, value

    def remove_record(self, kind: str, key: str) -> None:
        """Remove a record, if it exists."""
        with contextlib.suppress(OSError):
            self._drop("records", self._place("records", kind, key))

    def _sweep_records(self, now_s: float) -> None:
        for path in list_entries_below(self._root / "records"):
            with contextlib.suppress(OSError):
                kind = path.parent.name.partition(SERIES)[0]
                if now_s - path.lstat().st_mtime > _RECORDS_KEPT_S.get(kind, _OTHERS_KEPT_S):
                    self._remove(path)
        for directory in list_directories(self._root / "records"):
            if SERIES in directory.name:
                self._remove_directory(directory)  # fails unless it is empty

    def _damaged_records(self) -> Iterator[Path]:
        for path in list_entries_below(self._root / "records"):
            with contextlib.suppress(FileNotFoundError):
                if record_value(read_content(path)[0], f"{path.parent.name}/{path.name}") is None:
                    yield path


def is_known_kind(directory: str) -> bool:
    """Whether a directory of records has the name of a kind that this release knows."""
    return directory.partition(SERIES)[0] in _RECORDS_KEPT_S


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def record_value(blob: bytes, name: str) -> Any | None:
    """The value in a record's file; None if the file is damaged or belongs to another record."""
    data = unwrap(blob, name)
    try:
        return None if data is None else json.loads(bytes(data))
    except (ValueError, RecursionError):
        return None


_READS = 20  # attempts to read a file whose process may be writing it
_COUNTS_KEPT_S = 90 * 86400.0  # counts of ended processes that have not changed for this long are removed
_LARGEST_HEAD = 1 << 20  # bytes of a file of counters that are read


@dataclasses.dataclass(frozen=True)
class Counts:
    """The counts of a process, or the total of several processes. `name`: the name of the file. `about`: the table and the process.

    `alive`: whether the process is still running; False for a total.
    """

    name: str
    about: Mapping[str, Any]
    values: Mapping[str, int]
    alive: bool

    @property
    def includes(self) -> frozenset[str]:
        """The names of the files whose numbers this total includes; empty for the counts of one process."""
        return frozenset(self.about.get("includes", ()))


class CounterFile(LockedFile):
    """The file with this process's counters, which is written in place. Must not be used after a fork."""

    def __init__(self, fd: int, start: int) -> None:
        super().__init__(fd)
        self._start = start

    def write(self, data: bytes) -> None:
        """Replace the numbers: one int64 in this machine's byte order for each name. Raises OSError if the disk fails."""
        os.pwrite(self.fd, data + _checksum(data), self._start)

    def is_removed(self) -> bool:
        """Whether the file has no name any more, because the cache directory was removed."""
        return os.fstat(self.fd).st_nlink == 0

    def close(self) -> None:
        """Close the file. Its numbers stay."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.take())

    def __del__(self) -> None:
        self.close()


class Counters(Records):
    """A directory with the counters of processes. The prefix of a file's name shows to which table the counters belong."""

    def new_counters(self, name: str, about: Mapping[str, Any], values: Mapping[str, int]) -> CounterFile:
        """A new file for this process's counters, with these first values. Raises OSError if the directory cannot be written."""
        return self._retry(lambda: self._new_counters(name, about, values))

    def _new_counters(self, name: str, about: Mapping[str, Any], values: Mapping[str, int]) -> CounterFile:
        head = wrap(json_bytes({**about, "names": list(values)}), f"counters/{name}")
        temporary = self._temporary()
        descriptor = self._open(temporary, NEW_FILE)
        file = CounterFile(descriptor, len(head))
        try:
            with contextlib.suppress(OSError):  # some file systems have no such locks; the file is then never merged
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
        """The counts of all processes, by name. Each process is counted once. Damaged files are left out."""
        for _ in range(_READS):
            before = self._totals(prefix)
            process_counts = [
                counts for name in self._counter_names(prefix) if (counts := self._counts(name)) is not None
            ]
            # The race: a total may be replaced during this loop, so that the files that it includes are missed or read twice. Then all files
            # are read again.
            if self._totals(prefix) == before:
                break
        included = frozenset[str]().union(*(counts.includes for counts in process_counts))
        return [counts for counts in process_counts if counts.name not in included]

    def _totals(self, prefix: str) -> list[tuple[str, int]]:
        """(name, inode) of each total with a prefix. A total that was replaced has another inode."""
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

        `group`: returns the name of the total into which each file goes, by the file's name; files that it leaves out go into the total "".
        `merge`: returns a total's `about` and numbers. Raises OSError if the directory cannot be written.
        """
        if len(self._counter_names(prefix)) <= above:
            return
        with self._lock("total.lock"):
            # The race: a process may have died after it wrote a total, and before it removed the files that the total includes.
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
                    # The race: a reader may come after this line and before the files are removed, and this process may die in between. So
                    # the total names the files that it includes, and readers count them once.
                    self.new_counters(total, {**about, "includes": [*merged_names, *unremoved]}, values)
                    self._forget_included(total)

    def _forget_included(self, total: str) -> list[str]:
        """Remove the files that a total includes. Returns the names of the files that could not be removed."""
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
        """Remove totals, and the files of ended processes, that have not changed for a long time."""
        files = (self._root / "counters" / name for name in self._counter_names(""))
        for path in find_older(_COUNTS_KEPT_S, now_s, files):
            with contextlib.suppress(OSError), use_file(path) as descriptor:
                if not _is_alive(descriptor):
                    self._remove(path)

    def _damaged_counters(self) -> list[Path]:
        directory = self._root / "counters"
        return [directory / name for name in self._counter_names("") if self._counts(name) is None]


def _is_alive(descriptor: int) -> bool:
    """Whether the process that writes a file of counters may be alive. If so, the file is not merged into a total."""
    try:
        return not is_unlocked(descriptor)
    except OSError:
        return True


def _parse(blob: bytes, name: str) -> tuple[dict[str, Any], dict[str, int]] | None:
    """(about, values) in a file of counters; None if the file is damaged."""
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
    """The layout of the numbers in a file of counters: one int64 for each name, in this machine's byte order.

    No other machine reads this machine's cache directory.
    """
    return struct.Struct(f"={len(names)}q")
