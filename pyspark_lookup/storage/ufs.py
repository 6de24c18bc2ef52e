"""`Ufs`: the only access to remote storage, over any fsspec URL. It lists files, and reads and puts them.

`Ufs` counts every attempt by kind and by bytes, repeats attempts after transient errors, and translates foreign errors into ours. It caches
nothing, not even listings, so each answer is the store's answer now. Reads are pinned to a `FileVersion`: bytes of another version are never
returned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import tenacity

from pyspark_lookup.core.memory import check_room, has_room
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.core.threads import run_in_order
from pyspark_lookup.errors import (
    PutUnknownError,
    SourceChangedError,
    UfsError,
    UfsNotFoundError,
    UfsThrottledError,
    UfsTimeoutError,
    UfsUnavailableError,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.stores import FileVersion, Listing, Range, Store
from pyspark_lookup.storage.stores.store import is_own, whole_name

T = TypeVar("T")

_CONCURRENT_GETS = 16  # requests for bytes that run at the same time
_UNANSWERED = (UfsUnavailableError, UfsTimeoutError)
"""Errors of requests that the store may have executed nevertheless. Another attempt may succeed."""
_PATIENCE_S = 60.0
"""How long a request is repeated if the store refuses it because it gets too many requests, as the sum of the pauses. If the request failed
earlier, its query or load would begin again, and the store would get still more requests."""


class _ShortReadError(UfsUnavailableError):
    """The store returned fewer bytes than requested."""


class _LastAttempt(tenacity.stop.stop_base):
    """Tells whether an attempt is the last one. Refusals by a store that gets too many requests do not count until `_PATIENCE_S` is over."""

    def __init__(self, max_retries: int) -> None:
        self._max_retries = max_retries

    def __call__(self, state: Any) -> bool:
        refused = vars(state).get("refused", 0)
        if isinstance(state.outcome.exception(), UfsThrottledError) and state.idle_for < _PATIENCE_S:
            state.refused = refused + 1
            return self._max_retries == 0
        return bool(state.attempt_number - refused > self._max_retries)


class Ufs:
    """The store of one table. Its calls are counted, and repeated after transient errors; its reads are pinned to a version of a file.

    Up to `max_retries` (>= 0) attempts follow the first one, after transient errors only. More follow if the store refuses requests because
    it gets too many, unless `max_retries` is 0. `sleep` waits for the seconds between two attempts. An instance must not be used after a
    fork.
    """

    def __init__(
        self, store: Store, metrics: CacheMetricGroup, max_retries: int, sleep: Callable[[float], None]
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._retry = tenacity.Retrying(
            stop=_LastAttempt(max_retries),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=5),
            retry=tenacity.retry_if_exception_type(_UNANSWERED),
            before_sleep=lambda state: metrics.inc("ufsRetryCount"),
            sleep=sleep,
            reraise=True,
        )

    def _call(self, ask: Callable[..., T], *args: Any) -> T:
        """The store's answer, after retries if needed."""
        try:
            return ask(*args)  # the first attempt without tenacity, which takes longer than a local disk
        except _UNANSWERED as problem:
            failed: list[Exception] = [problem]

        def attempt() -> T:
            if failed:
                raise failed.pop()
            return ask(*args)

        return self._retry(attempt)

    @property
    def scope(self) -> str:
        """The store's identity: protocol, endpoint and host. The same path in stores of different scopes means different files."""
        return self._store.scope

    def url_of(self, path: str) -> str:
        """The canonical URL of a path in this store (`s3a://b/x` -> `s3://b/x`). Makes no call."""
        return self._store.url_of(path)

    def get_meta(self, path: str) -> FileVersion:
        """The identity and size of a file, from the store now (one call).

        Raises UfsNotFoundError if there is no such file, another UfsError if the store fails.
        """
        file = self._call(self._store.get_meta, path, self._count)
        if file is None:
            raise UfsNotFoundError(f"{redact('path', path)} does not exist")
        return file

    def find_meta(self, path: str) -> FileVersion | None:
        """Like `get_meta`; None if there is no such file.

        Logs are followed by asking for their next file, which is usually missing. For a missing local file, the store returns None instead of
        raising an error, which is cheaper.
        """
        try:
            return self._call(self._store.get_meta, path, self._count)
        except UfsNotFoundError:
            return None

    def list_status(self, path: str) -> Listing:
        """All files below a directory, in the order of their URLs (one call per directory or page).

        Directories named `.…` or `_…` are reported, but their files are not listed, except for `_spark_metadata`. Raises UfsNotFoundError if
        the directory does not exist, another UfsError if the store fails.
        """
        return self._call(self._store.list_status, path, self._count)

    def get_status(self, path: str) -> FileVersion | Listing:
        """The version of a file or the listing of a directory, for a path that may be either.

        One call if the store or the name shows which it is; otherwise two.
        """
        return self._retry(self._store.get_status, path, self._count)

    def read_ranges(self, file: FileVersion, ranges: Sequence[Range], at_once: int = _CONCURRENT_GETS) -> list[bytes]:
        """The bytes of each range, all of exactly this version of the file (one call per range, `at_once` calls at a time).

        Raises SourceChangedError if the file was replaced or removed, another UfsError if the store fails.
        """
        if not ranges:
            return []
        # The sizes may come from a table's log or metadata, which may be wrong, so the memory is checked first.
        size = sum(length for _, length in ranges)
        if not has_room(size):
            check_room(size, f"{redact('path', file.url)}: the ranges to read")
        try:
            parts = self._read_pinned(file, ranges, at_once)
        except _ShortReadError:
            self._check_unchanged(file)
            raise
        self._check_unchanged(file)
        return parts

    def _read_pinned(self, file: FileVersion, ranges: Sequence[Range], at_once: int) -> list[bytes]:
        with self._store.pin(file) as read:

            def get(part: Range) -> bytes:
                return self._call(self._read, file, read, part)

            if len(ranges) == 1 or at_once == 1:
                return [get(part) for part in ranges]
            # The threads end with this call: a thread that ran on would be missing in a forked child.
            return list(run_in_order(get, ranges, min(at_once, len(ranges))))

    def _check_unchanged(self, file: FileVersion) -> None:
        """Raise SourceChangedError if the file is no longer this version. Called after the bytes were read, for stores that cannot pin.

        The race: the file may be replaced between the question for its version and the read of its bytes. An identity never returns once it
        has changed. So if the identity is equal before and after, all bytes are of this version.
        """
        if self._store.pins or file.immutable:
            return
        try:
            unchanged = self.get_meta(file.url) == file
        except UfsNotFoundError:
            unchanged = False
        if not unchanged:
            raise SourceChangedError(f"{redact('path', file.url)} was replaced or removed while it was read")

    def read_many(self, requests: Iterable[tuple[FileVersion, Sequence[Range]]]) -> list[list[bytes]]:
        """The results of `read_ranges` for several files, in the order of `requests`. The files are read at the same time."""
        jobs = list(requests)
        if len(jobs) <= 1:
            return [self.read_ranges(file, ranges) for file, ranges in jobs]
        files = min(_CONCURRENT_GETS, len(jobs))
        return list(run_in_order(lambda job: self.read_ranges(job[0], job[1], _CONCURRENT_GETS // files), jobs, files))

    def list_files(self, path: str, after: str = "", at_most: int | None = None) -> tuple[FileVersion, ...]:
        """The files directly in a directory whose names come after `after`, sorted by name (one call per page).

        Raises UfsNotFoundError if the directory does not exist (on S3 the result is empty instead), another UfsError if the store fails.
        """
        return self._call(self._store.list_files, path, after, at_most, self._count)

    def has_directory(self, path: str) -> bool:
        """Whether a path is a directory (one call; on a local disk a stat, which is not counted). Raises UfsError if the store fails."""
        return self._call(self._store.has_directory, path, self._count)

    def list_tree(self, path: str) -> tuple[FileVersion, ...]:
        """All files below a directory, whatever their names (S3: one call per page; local: one per directory)."""
        return self._retry(self._store.list_tree, path, self._count)

    def last_change_s(self, path: str) -> tuple[float | None, float]:
        """(when a directory or anything in it last changed, the current time). The first is None if the store does not say.

        Both are Unix times on the store's clock. Raises UfsNotFoundError if the directory does not exist.
        """
        return self._retry(self._store.last_change_s, path, self._count)

    def delete(self, path: str) -> None:
        """Remove a file of a managed table, if it exists (one call).

        Raises ValueError for a name that lookupcache does not give to files, NotSupportedError for stores that cannot have managed tables.
        """
        _check_own(path)
        self._retry(self._store.delete, path, self._count)

    def delete_many(self, directory: str, names: Sequence[str]) -> None:
        """Remove the named files of a directory, as far as they exist, in any order (S3: a call per thousand). Raises the errors of
        `delete`."""
        for name in names:
            _check_own(f"{directory}/{name}")
        self._retry(self._store.delete_many, directory, names, self._count)

    @property
    def lists_after(self) -> bool:
        """Whether `list_files(after=...)` costs only as much as the files that it returns, however many files come before these."""
        return self._store.lists_after

    def put_if_absent(self, path: str, data: bytes) -> FileVersion | None:
        """Put `data` as a new file. Returns the file if this call has put it; None if another file is there.

        The race: another writer may put a file at the same path, and the store's answer may get lost. So `data` must contain a nonce, by
        which it differs from the data of any other writer. After an attempt without an answer, the file is read back: its bytes show who has
        put it. Raises NotSupportedError for stores without an exclusive create, PutUnknownError if an attempt had no answer and the file
        cannot be read back either, another UfsError if the file was not put, and ValueError for empty data.
        """
        if not data:
            raise ValueError("data is empty: an empty file would not show which writer wrote it")
        unanswered = False

        def attempt() -> FileVersion | None:
            nonlocal unanswered
            try:
                new_file = self._store.put_if_absent(path, data, self._count)
            except _UNANSWERED:
                unanswered = True
                raise
            if new_file is not None:
                self._metrics.inc("ufsPutBytes", len(data))
                return new_file
            try:
                return self._find_written(path, data)
            except UfsNotFoundError:
                url = redact("path", path)
                raise UfsUnavailableError(
                    f"{url}: the store says both that the file exists and that it does not: try again later"
                ) from None

        try:
            return self._retry(attempt)
        except UfsError as problem:
            # An earlier attempt may have succeeded without an answer: read the file to find out.
            with contextlib.suppress(UfsError):
                return self._find_written(path, data)
            if unanswered:
                raise_ours(
                    PutUnknownError(f"it is unknown whether {redact('path', path)} was written: {problem}"), problem
                )
            raise

    def _find_written(self, path: str, data: bytes) -> FileVersion | None:
        """The file at `path` if its bytes are `data`; None if it has other bytes. Raises UfsNotFoundError if there is no file."""
        file = self.get_meta(path)
        if file.size != len(data):
            return None
        first_read = self.read_ranges(file, [(0, file.size)])[0]
        if first_read == data:
            return file
        second_read = self.read_ranges(file, [(0, file.size)])[0]
        if second_read not in (first_read, data):
            raise UfsUnavailableError(f"{redact('path', path)}: two reads returned different bytes: try again later")
        return file if second_read == data else None

    def _read(self, file: FileVersion, read: Callable[[int, int], bytes], part: Range) -> bytes:
        offset, length = part
        self._count("get")
        data = read(offset, length)
        self._metrics.inc("ufsGetBytes", len(data))
        if len(data) != length:
            raise _ShortReadError(
                f"{redact('path', file.url)}: the store returned only {len(data)} of {length} bytes at {offset}: try again later"
            )
        return data

    def _count(self, kind: str) -> None:
        self._metrics.inc(f"ufs{kind.capitalize()}Count")


def _check_own(path: str) -> None:
    """Raise ValueError unless the file's name is one that lookupcache gives to files of managed tables."""
    if not is_own(path) and not is_own(whole_name(path)):
        raise ValueError(f"{redact('path', path)} was not removed: its name is not that of a file of a managed table")
