"""`DeltaLog`: reads the log of a Delta table, with its checkpoints, and follows it from commit to commit.

A commit never changes once it exists, and the identity of its file shows whether the table was replaced by another one at the same path. So
each read asks for the last commit that is cached and for the commits after it: with one listing if the store can list from a name on,
otherwise with one request for each commit.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_lookup.core.decoding import UNREADABLE, as_count, as_text, as_texts, describe_fault
from pyspark_lookup.core.memory import check_room
from pyspark_lookup.errors import (
    DamagedFileError,
    NotSupportedError,
    SourceChangedError,
    UfsError,
    UfsNotFoundError,
    VersionGoneError,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.delta.actions import Add, Key, parse_actions
from pyspark_lookup.sources.delta.base_files import BaseBuilder, BaseFiles, open_base, statistics_texts
from pyspark_lookup.sources.delta.state import DataFiles, DeltaState, Replay, check_commit
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk, key_of
from pyspark_lookup.storage.stores import IMMUTABLE, FileVersion, add_log_directory
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.column_segments import remove_unneeded
from pyspark_lookup.versions.executions import read_again

_NAME = re.compile(
    r"(?P<version>\d{20})\.checkpoint"
    r"(?:\.(?P<part>\d{10})\.(?P<parts>\d{10})|\.(?P<uuid>[0-9a-fA-F-]{36}))?\.(?P<format>parquet|json)"
)
_COLUMNS = {
    "add": (
        "path",
        "partitionValues",
        "size",
        "modificationTime",
        "dataChange",
        "stats",
        "stats_parsed",
        "deletionVector",
    ),
    "metaData": None,
    "protocol": None,
    "sidecar": ("path", "sizeInBytes"),
}
"""The columns of a checkpoint that are read. For each, the fields that are read (None: all)."""

_ROW_BYTES = 1000  # approximate memory for a data file
_CHECKED_BYTES = 64 * 1024 * 1024  # the host's free memory is checked each time that this many more bytes are needed
_BATCH_ROWS = 32_768  # rows of a checkpoint that are decoded together

Read = Callable[[Sequence[FileVersion]], list[bytes]]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its version, and the files that it is made of."""

    version: int
    files: tuple[FileVersion, ...]


def find_checkpoints(files: Sequence[FileVersion]) -> list[Checkpoint]:
    """The complete checkpoints in a listing, the newest first."""
    checkpoints: list[Checkpoint] = []
    parts: dict[tuple[int, int], dict[int, FileVersion]] = {}
    for file in files:
        match = _NAME.fullmatch(file.url.rsplit("/", 1)[-1])
        if match is None:
            continue
        version = int(match["version"])
        if match["part"] is None:
            if match["uuid"] is not None or match["format"] == "parquet":
                checkpoints.append(Checkpoint(version, (file,)))
        else:
            parts.setdefault((version, int(match["parts"])), {})[int(match["part"])] = file
    for (version, count), part_files in parts.items():
        if (len(part_files), min(part_files), max(part_files)) == (count, 1, count):
            checkpoints.append(Checkpoint(version, tuple(part_files[number] for number in sorted(part_files))))
    # Of two checkpoints of the same version, the one in a single file comes first: the parts of the other may come from two writers.
    return sorted(
        checkpoints, key=lambda checkpoint: (-checkpoint.version, len(checkpoint.files), checkpoint.files[0].url)
    )


Adds: TypeAlias = pa.StructArray
"""The `add` actions of some rows of a checkpoint, none of them null."""


def read_checkpoint(checkpoint: Checkpoint, read: Read) -> Iterator[dict[str, Any] | Adds]:
    """The actions of a checkpoint and of its sidecars. `add` actions of Parquet files come as columns, all others one by one.

    Raises DamagedFileError for a malformed file.
    """
    directory = checkpoint.files[0].url.rsplit("/", 1)[0]
    sidecars: list[FileVersion] = []
    for file, data in zip(checkpoint.files, read(checkpoint.files), strict=True):
        for action in _actions(file, data):
            sidecar = action.get("sidecar") if isinstance(action, dict) else None
            if sidecar is None:
                yield action
            else:
                path = unquote(as_text(sidecar["path"]))
                url = path if ":" in path or path.startswith("/") else f"{directory}/_sidecars/{path}"
                sidecars.append(FileVersion(url, as_count(sidecar["sizeInBytes"]), IMMUTABLE))
    for file, data in zip(sidecars, read(sidecars), strict=True):
        yield from _actions(file, data)


def _actions(file: FileVersion, data: bytes) -> Iterator[dict[str, Any] | Adds]:
    redacted_path = redact("path", file.url)
    try:
        if file.url.endswith(".json"):
            yield from parse_actions(data)
            return
        # Spark writes timestamps in the statistics as INT96. As nanoseconds, the default, the year 9999 would overflow.
        source = pq.ParquetFile(
            pa.BufferReader(data), page_checksum_verification=True, coerce_int96_timestamp_unit="us"
        )
        columns = {field.name: field for field in source.schema_arrow}
        if len(columns) < len(source.schema_arrow):
            raise ValueError(f"two columns have one name in {source.schema_arrow.names}")
        selected_columns: list[str] = []
        for name, fields in _COLUMNS.items():
            if name in columns:
                field_names = [field.name for field in columns[name].type]
                selected_columns += (
                    [name] if fields is None else [f"{name}.{field}" for field in fields if field in field_names]
                )
        new = 0  # files; other rows, such as those of removed files, are dropped
        for batch in source.iter_batches(batch_size=_BATCH_ROWS, columns=selected_columns):
            new += batch.num_rows - batch.column("add").null_count if "add" in columns else 0
            if new * _ROW_BYTES > _CHECKED_BYTES:
                check_room(new * _ROW_BYTES, f"{redacted_path}: {new} rows of a Delta checkpoint")
                new = 0
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                values = column.drop_null() if column.null_count else column
                if name == "add":
                    yield values
                else:
                    yield from ({name: value} for value in values.to_pylist())
    except (*UNREADABLE, pa.ArrowException, OSError) as problem:
        raise_ours(_damaged_error(file, "checkpoint", problem), problem)


RESTORE_LOG = "restore the files of the table's log"


def _damaged_error(file: FileVersion, kind: str, problem: BaseException) -> DamagedFileError:
    return DamagedFileError(
        f"{redact('path', file.url)} is not a Delta {kind}: {describe_fault(problem)}: restore this file"
    )


LOG_DIRECTORY = add_log_directory("_delta_log")
_COMMIT = re.compile(r"(\d{20})\.json")
_STAGED = "_staged_commits"
_TAIL_AT_MOST = 64  # the host's records have at most this many commits after the recorded state
_COPIES = 5  # a log takes about this many times its size in memory: as bytes, as text and as parsed values
_EARLIER_KEPT = 4  # states of earlier versions that a process caches


@dataclasses.dataclass(frozen=True)
class RatifiedCommits:
    """What a catalog says about the log of a table that it manages: the newest version, and the commits that may not be published yet.

    `staged`: by version, the name of the commit's file in the directory `_staged_commits` of the log, its size in bytes, and its time (Unix
    seconds). For these versions, a published file is not read.
    """

    version: int
    staged: Mapping[int, tuple[str, int, float]]


@dataclasses.dataclass(frozen=True)
class _CachedLog:
    """The latest state, the file of its last commit, and the content of the host's two records: an earlier state, and the commits after
    it."""

    state: DeltaState
    last_file: FileVersion
    base: DeltaState
    tail: tuple[bytes, ...] = ()


class DeltaLog:
    """The log of the table at `url`, as this process reads it. Thread-safe, but not to be used after a fork.

    `mapped_from`: from this number of files on, they are in columns that all processes of the host map, see `BaseFiles`. `catalog_id`: the id
    of the table in its catalog; None: the table is read by its path. The table of another id at the same URL has another log. Only the log of
    a table with such an id may have commits that are not published: methods then take what the catalog says about them, as `ratified`.
    """

    def __init__(
        self,
        ufs: Ufs,
        blocks: BlockCache,
        context: HostContext,
        url: str,
        mapped_from: int,
        catalog_id: str | None = None,
    ) -> None:
        self.url = url
        self._in_catalog = catalog_id is not None
        self._mapped_from = mapped_from
        self._ufs = ufs
        self._blocks = blocks
        self._context = context
        self._directory = f"{url}/{LOG_DIRECTORY}"
        self._redacted_path = redact("path", url)
        self._key = key_of("delta", ufs.scope, url, *(() if catalog_id is None else (catalog_id,)))
        self._lock = threading.Lock()
        self._cached_log: _CachedLog | None = None
        self._earlier: dict[int, DeltaState] = {}

    # --- the current version ----------------------------------------------------------------------

    def cached_state(self, version: int = 0) -> DeltaState | None:
        """The newest state that this process has cached. If it has none, or only one before `version`, the host's cached state, if that is
        newer.

        None if neither has a state. Makes no call to the store. The state may be that of a table that has been dropped since.
        """
        with self._lock:
            if self._cached_log is None or self._cached_log.state.version < version:
                recorded_log = self._read_record()
                if recorded_log is not None and (
                    self._cached_log is None or recorded_log.state.version > self._cached_log.state.version
                ):
                    self._cached_log = recorded_log
            return None if self._cached_log is None else self._cached_log.state

    def latest(self, ratified: RatifiedCommits | None = None) -> DeltaState:
        """The table's state now. One listing if nothing is new, and one read for each new commit.

        With `ratified`, no listing if nothing is new or all new commits are staged. Raises UfsNotFoundError if there is no log,
        DamagedFileError if the log contradicts itself, NotSupportedError for features that this reader lacks.
        """
        self.cached_state()
        with self._lock:
            cached_log = self._cached_log
        if cached_log is not None and ratified is not None and ratified.version < cached_log.state.version:
            # The race: another process has asked the catalog later, and has recorded a newer version.
            return self.read_state(ratified.version, cached_log.state, ratified)
        newer = None if cached_log is None else self._list_newer(cached_log, ratified)
        if cached_log is None or newer is None:
            return self._read_all(ratified)
        if not newer:
            return cached_log.state
        try:
            texts = self._read(newer)
        except SourceChangedError:  # a clean-up of the log has just removed a commit; a checkpoint has its actions
            return self._read_all(ratified)
        state = self._advance(cached_log.state, newer, texts)
        return self._keep(_CachedLog(state, newer[-1], cached_log.base, (*cached_log.tail, *texts)))

    def _list_newer(self, cached_log: _CachedLog, ratified: RatifiedCommits | None) -> list[FileVersion] | None:
        """The commits after the last cached one; None if the file of that commit has changed or is gone, so that this may be another table's
        log."""
        version = cached_log.state.version
        if ratified is not None:
            # The catalog has said that this is the same table, and its commits never change.
            newer_versions = range(version + 1, ratified.version + 1)
            is_published = any(number not in ratified.staged for number in newer_versions)
            published = self._ufs.list_files(self._directory, f"{version:020}") if is_published else ()
            commits = self._add_staged(_find_commits(published), ratified)
            return self._in_order({number: commits[number] for number in newer_versions if number in commits}, version)
        if not self._ufs.lists_after:
            newer: list[FileVersion] = []
            while (commit := self._ufs.find_meta(self._path(version + len(newer) + 1))) is not None:
                newer.append(commit)
            # The race: the table may be replaced between two requests. So the cached commit is requested last: if it is still there after
            # the new commits were found, they belong to the same table.
            return newer if self._ufs.find_meta(cached_log.last_file.url) == cached_log.last_file else None
        commits = _find_commits(self._ufs.list_files(self._directory, f"{version:020}"))
        if commits.pop(version, None) != cached_log.last_file:
            return None
        return self._in_order(commits, version)

    def _add_staged(
        self, published: dict[int, FileVersion], ratified: RatifiedCommits | None
    ) -> dict[int, FileVersion]:
        """The files of the commits that count, by version: of those in the log, and of those that only the catalog knows."""
        if ratified is None:
            return published
        staged = {
            version: FileVersion(f"{self._directory}/{_STAGED}/{name}", size, IMMUTABLE, modified_at_s)
            for version, (name, size, modified_at_s) in ratified.staged.items()
        }
        return {version: file for version, file in {**published, **staged}.items() if version <= ratified.version}

    def _in_order(self, commits: dict[int, FileVersion], after: int) -> list[FileVersion]:
        """The files of commits, in the order of their versions. Raises DamagedFileError if a version after `after` is missing."""
        for number, version in enumerate(sorted(commits), after + 1):
            if version != number:
                raise DamagedFileError(
                    f"{self._redacted_path}: the Delta log has a gap: {number:020}.json is missing before version {version}: restore this file"
                )
        return [commits[version] for version in sorted(commits)]

    def _advance(self, state: DeltaState | None, commits: Sequence[FileVersion], texts: Sequence[bytes]) -> DeltaState:
        """The state after these commits. Raises DamagedFileError that names the commit that cannot be applied."""
        replay = Replay() if state is None else Replay.from_state(state)
        for file, text in zip(commits, texts, strict=True):
            try:
                replay.apply(parse_actions(text))
                replay.version = _parse_version(file)
            except UNREADABLE as problem:
                raise_ours(_damaged_error(file, "commit", problem), problem)
        return self._build_state(replay)

    def _build_state(self, replay: Replay) -> DeltaState:
        try:
            state = replay.state()
            state.check(self._in_catalog)
            return state
        except NotSupportedError as problem:
            raise NotSupportedError(
                f"{self._redacted_path}, version {replay.version} of a Delta table: {problem}"
            ) from None
        except UNREADABLE as problem:
            raise_ours(
                DamagedFileError(
                    f"{self._redacted_path}: version {replay.version} of the Delta table cannot be read: {describe_fault(problem)}: {RESTORE_LOG}"
                ),
                problem,
            )

    # --- from a checkpoint on -----------------------------------------------------------------------

    def _read_all(self, ratified: RatifiedCommits | None = None) -> DeltaState:
        with self._lock:
            self._cached_log, self._earlier = None, {}
        state, last_file = self._replay(None, ratified)
        return self._keep(_CachedLog(state, last_file, state))

    def _replay(self, version: int | None, ratified: RatifiedCommits | None) -> tuple[DeltaState, FileVersion]:
        """(the state at a version, the file of its last commit), computed from a checkpoint and the commits after it.

        The checkpoint is the newest complete one that is not after the version. `version` None: the newest version. Raises VersionGoneError
        for a version that the log does not have, UfsNotFoundError if there is no log.
        """
        hint = self._read_hint() if version is None else None
        if hint is not None:
            files = self._ufs.list_files(self._directory, f"{hint:020}")
            with contextlib.suppress(DamagedFileError, SourceChangedError, UfsNotFoundError):
                return self._replay_listing(files, None, ratified)
        return read_again(
            lambda: self._replay_listing(self._ufs.list_files(self._directory), version, ratified),
            DamagedFileError,
            SourceChangedError,
        )

    def _replay_listing(
        self, listing: Sequence[FileVersion], version: int | None, ratified: RatifiedCommits | None
    ) -> tuple[DeltaState, FileVersion]:
        commits = self._add_staged(_find_commits(listing), ratified)
        if not commits:
            checkpoint_version = max((checkpoint.version for checkpoint in find_checkpoints(listing)), default=None)
            instead = (
                f"so it is not a Delta table. To read all its files as they are (deleted rows, too), move {LOG_DIRECTORY} away"
                if checkpoint_version is None
                else f"but a checkpoint of version {checkpoint_version}, which may not be the newest: restore {checkpoint_version:020}.json and the commits after it"
            )
            raise UfsNotFoundError(f"{self._redacted_path}: {LOG_DIRECTORY} holds no commit, {instead}")
        if version is not None and not min(commits) <= version <= max(commits):
            raise VersionGoneError(
                f"{self._redacted_path} has no version {version}: the log has the versions {min(commits)} to {max(commits)}"
            )
        newest = version
        if newest is None and ratified is not None:
            newest = ratified.version
        if newest is None:
            newest = max({*commits, *(checkpoint.version for checkpoint in find_checkpoints(listing))})
        first_damage: DamagedFileError | None = None
        for checkpoint in find_checkpoints(listing):
            if checkpoint.version > newest:
                continue
            try:
                # Only the newest state gets a record. Columns of an earlier state would have none, so nobody would remove them from the disk.
                state = self._replay_checkpoint(checkpoint, self._context.disk if version is None else None)
                with contextlib.suppress(NotSupportedError):  # a later commit may have dropped the feature
                    state.check(self._in_catalog)
            except (
                DamagedFileError,
                SourceChangedError,
                *UNREADABLE,
            ) as problem:  # SourceChangedError: a sidecar is missing
                advice = "" if isinstance(problem, DamagedFileError) else f": {RESTORE_LOG}"
                fault = describe_fault(problem)
                first_damage = first_damage or DamagedFileError(f"{self._redacted_path}: {fault}{advice}")
                continue
            return self._follow(state, checkpoint.version, commits, newest)
        if min(commits) == 0:
            return self._follow(None, -1, commits, newest)
        if version is not None and first_damage is None:
            oldest = min((checkpoint.version for checkpoint in find_checkpoints(listing)), default=None)
            since = "" if oldest is None else f"; the oldest version that can be read is {oldest}"
            raise VersionGoneError(
                f"{self._redacted_path} has no version {version} any more: the commits before it were removed from the log{since}"
            )
        raise first_damage or DamagedFileError(
            f"{self._redacted_path}: the Delta log begins with version {min(commits)} and has no complete checkpoint to start from: restore a "
            "checkpoint, or the commits before this version"
        )

    def _replay_checkpoint(self, checkpoint: Checkpoint, disk: Disk | None) -> DeltaState:
        """The state in a checkpoint. `disk`: where the columns are written if there are many files; None: they stay in memory."""
        try:
            return self._replay_actions(checkpoint, disk)
        except UfsError:
            raise
        except OSError:  # the cache directory has no room for the files
            self._context.metrics.inc("cacheFailureCount")
            return self._replay_actions(checkpoint, None)
        except pa.ArrowException as problem:
            raise ValueError(str(problem)) from None

    def _replay_actions(self, checkpoint: Checkpoint, disk: Disk | None) -> DeltaState:
        replay, actions = Replay(checkpoint.version), []
        builder: BaseBuilder | None = None
        waiting: list[Adds] = []
        try:
            for part in read_checkpoint(checkpoint, self._read_blocks):
                if isinstance(part, dict):
                    actions.append(part)
                    continue
                waiting.append(part)
                if builder is None and sum(map(len, waiting)) >= self._mapped_from:
                    builder = BaseBuilder(disk, self._key)
                if builder is not None:
                    for adds in waiting:
                        builder.add_batch(adds)
                    waiting = []
            if builder is not None:
                replay.base = builder.finish()
        finally:
            if builder is not None:
                builder.close()
        actions += ({"add": add} for adds in waiting for add in to_rows(adds))
        replay.apply(actions, checkpoint=True)
        return replay.state()

    def _follow(
        self, state: DeltaState | None, after: int, commits: dict[int, FileVersion], newest: int
    ) -> tuple[DeltaState, FileVersion]:
        new_commits = {version: file for version, file in commits.items() if after < version <= newest}
        files = self._in_order(new_commits, after)
        state = self._advance(state, files, self._read(files))
        if newest not in commits:
            raise DamagedFileError(
                f"{self._redacted_path}: the Delta log lacks {newest:020}.json, the commit of its newest checkpoint: restore this file"
            )
        return state, commits[newest]

    def _read_hint(self) -> int | None:
        """The version of the newest checkpoint, according to the file `_last_checkpoint`; None if that file is missing or damaged.

        The file may be out of date.
        """
        # The race: writers of checkpoints overwrite the file in place, so a reader may find it missing or half-written.
        with contextlib.suppress(UfsNotFoundError, SourceChangedError, *UNREADABLE):
            file = self._ufs.get_meta(f"{self._directory}/_last_checkpoint")
            return as_count(json.loads(self._ufs.read_ranges(file, [(0, file.size)])[0])["version"])
        return None

    # --- earlier versions -------------------------------------------------------------------------

    def read_state(
        self, version: int, state: DeltaState | None = None, ratified: RatifiedCommits | None = None
    ) -> DeltaState:
        """The state at a version. `state`: the latest state, if the caller has it. Raises VersionGoneError if the log does not have the
        version."""
        state = self.latest(ratified) if state is None else state
        earlier_state = self.find_cached_state(state.table_id, version)
        if earlier_state is None:
            earlier_state, _ = self._replay(version, ratified)
            self._keep_earlier(earlier_state)
        return earlier_state

    def find_cached_state(self, table_id: str, version: int) -> DeltaState | None:
        """The state of the table `table_id` at a version, if this process or this host has cached it; otherwise None. Makes no store call."""
        self.cached_state(version)
        with self._lock:
            cached_log, earlier = self._cached_log, self._earlier.get(version)
        if earlier is not None and earlier.table_id == table_id:
            return earlier
        if (
            cached_log is None
            or cached_log.state.table_id != table_id
            or not cached_log.base.version <= version <= cached_log.state.version
        ):
            return None
        if version == cached_log.state.version:
            return cached_log.state
        with contextlib.suppress(NotSupportedError, *UNREADABLE):
            earlier_state = self._build_state(
                _replay_texts(cached_log.base, cached_log.tail[: version - cached_log.base.version])
            )
            self._keep_earlier(earlier_state)
            return earlier_state
        return None

    def _keep_earlier(self, state: DeltaState) -> None:
        with self._lock:
            self._earlier = {**dict(list(self._earlier.items())[-_EARLIER_KEPT + 1 :]), state.version: state}

    def commits(self, ratified: RatifiedCommits | None = None) -> list[tuple[int, FileVersion]]:
        """(version, file) of the commits in the log, oldest first. One LIST."""
        return sorted(self._add_staged(_find_commits(self._ufs.list_files(self._directory)), ratified).items())

    def commit_times(self, state: DeltaState, commits: Sequence[tuple[int, FileVersion]]) -> list[tuple[int, int]]:
        """(version, Unix ms) of `commits`, oldest first. The times are the timestamps of the commits.

        Delta defines a commit's timestamp as its `inCommitTimestamp`, once the table has `delta.enableInCommitTimestamps`; before that, as
        the time at which the commit's file was written.
        """
        since = self._dated_since(state)
        recorded_times = [
            (version, self._read_time(file) if version >= since else _written_at_ms(file)) for version, file in commits
        ]
        # In a copied log, the files are newer than the commits. So the commits without an inCommitTimestamp count as earlier than the first
        # commit that has one.
        limit = next((at_ms for version, at_ms in recorded_times if version >= since), math.inf)
        times: list[tuple[int, int]] = []
        for version, at_ms in recorded_times:
            later = max(at_ms, times[-1][1] + 1) if times else at_ms
            times.append((version, later if version >= since else int(min(later, limit - 1))))
        return times

    def select_commits(
        self, state: DeltaState, commits: Sequence[tuple[int, FileVersion]], at_ms: int
    ) -> Sequence[tuple[int, FileVersion]]:
        """A few of `commits`, among which `commit_times` finds the last one up to `at_ms` (Unix ms). Reads few commits."""
        since = self._dated_since(state)
        first = bisect.bisect_left(commits, since, key=lambda commit: commit[0])
        dated = commits[first:]
        if dated and self._read_time(dated[-1][1]) <= at_ms:
            return dated[-1:]
        # The protocol requires these times to ascend.
        count = bisect.bisect_right(dated, at_ms, key=lambda commit: self._read_time(commit[1]))
        return dated[count - 1 : count + 1] if count else commits[: first + 1]

    def _dated_since(self, state: DeltaState) -> float:
        """The first version whose commit states its own time; infinity if none does."""
        if state.configuration.get("delta.enableInCommitTimestamps", "").lower() != "true":
            return math.inf
        try:
            return int(state.configuration.get("delta.inCommitTimestampEnablementVersion") or 0)
        except ValueError as problem:
            raise DamagedFileError(
                f"{self._redacted_path}: version {state.version} of the Delta table cannot be read: its property "
                f"delta.inCommitTimestampEnablementVersion is not a whole number ({problem}): {RESTORE_LOG}"
            ) from None

    def _read_time(self, file: FileVersion) -> int:
        """The `inCommitTimestamp` of a commit, or the time at which its file was written if it has none (Unix ms)."""
        infos = (action["commitInfo"] for action in self.read_commit(file) if action.get("commitInfo"))
        info: dict[str, Any] = next(infos, {})
        at_ms = info.get("inCommitTimestamp")
        return _written_at_ms(file) if at_ms is None else as_count(at_ms)

    def read_commit(self, file: FileVersion) -> list[dict[str, Any]]:
        """The actions of a commit. Raises DamagedFileError for a malformed commit."""
        try:
            actions = parse_actions(self._read_blocks([file])[0])
            check_commit(actions)
            return actions
        except UNREADABLE as problem:
            raise_ours(_damaged_error(file, "commit", problem), problem)

    # --- files ------------------------------------------------------------------------------------

    def _path(self, version: int) -> str:
        return f"{self._directory}/{version:020}.json"

    def _read(self, files: Sequence[FileVersion]) -> list[bytes]:
        """The contents of commits. They are not kept in the block cache, because the host's records have a state and the commits after it."""
        self._check_room(files)
        return [parts[0] for parts in self._ufs.read_many([(file, [(0, file.size)]) for file in files])]

    def _read_blocks(self, files: Sequence[FileVersion]) -> list[bytes]:
        self._check_room(files)
        locations = [self._blocks.get_blocks_and_locations(file.url, file) for file in files]
        return [
            bytes(parts[0])
            for parts in self._blocks.read([(location, [(0, location.file.size)]) for location in locations])
        ]

    def _check_room(self, files: Sequence[FileVersion]) -> None:
        size = sum(file.size for file in files)
        check_room(size * _COPIES, f"{self._redacted_path}: {size} bytes of its Delta log")

    # --- the host's records -----------------------------------------------------------------------

    def _read_record(self) -> _CachedLog | None:
        disk = self._context.disk
        if disk is None:
            return None
        base: DeltaState | None = disk.get_record("log", self._key, functools.partial(self._parse_state, disk))
        if base is None:
            return None

        def add_tail(record: Any) -> _CachedLog:
            if record["table"] != base.table_id:
                raise ValueError("it is of another table")
            texts, last_file = (
                tuple(text.encode() for text in as_texts(record["commits"])),
                FileVersion.from_json(record["last"]),
            )
            if _parse_version(last_file) != base.version + len(texts):
                raise ValueError("a commit is missing")
            state = _replay_texts(base, texts).state() if texts else base
            with contextlib.suppress(NotSupportedError):
                state.check(self._in_catalog)
                return _CachedLog(state, last_file, base, texts)
            raise ValueError("written by another release, which supports more features")

        return disk.get_record("log-tail", f"{self._key}-{base.version}", add_tail)

    def _parse_state(self, disk: Disk, record: Any) -> DeltaState | None:
        """The state that `_state_to_json` wrote; None if its columns are gone. Raises one of `decoding.UNREADABLE` for a malformed record."""
        added = [Add.from_json(row) for row in record["files"]]
        rewrites = tuple((_parse_keys(new), _parse_keys(old)) for new, old in record["rewrites"])
        metadata = {**record["metadata"]}
        as_text(metadata["id"])
        base = None
        if record["base"] is not None:
            try:
                base = open_base(disk, self._key, record["base"])
            except pa.ArrowException as problem:
                raise ValueError(str(problem)) from None
            if base is None:
                return None
            disk.use_table(self._key)
        gone = {as_count(row) for row in record["gone"]}
        if gone and (base is None or max(gone) >= base.rows):
            raise ValueError(
                f"it removes row {max(gone)} (counted from 0), but its columns have {0 if base is None else base.rows} rows"
            )
        added_by_key = {add.key: add for add in added}
        protocol = {**record["protocol"]}
        return Replay(as_count(record["version"]), metadata, protocol, added_by_key, rewrites, base, gone).state()

    def _move_to_columns(self, disk: Disk, log: _CachedLog) -> _CachedLog:
        """The same log. Its files are in a new base if it has many and no base yet, or if many were added or removed since its base."""
        files = log.state.files
        if len(files.added) + len(files.gone) <= self._mapped_from and (
            files.base is not None or len(files) < self._mapped_from
        ):
            return log
        base: BaseFiles | None = None  # a table without files has no columns
        if files.base is None:
            builder = BaseBuilder(disk, self._key)
            try:
                for add in files.added.values():
                    builder.add_file(add)
                base = builder.finish()
            finally:
                builder.close()
        elif len(files):
            base = files.base.next_base(np.array(sorted(files.gone), np.int64), [*files.added.values()])
        state = dataclasses.replace(log.state, files=DataFiles({}, base), memo={})
        moved = _CachedLog(state, log.last_file, state)
        with self._lock:
            if self._cached_log is log:
                self._cached_log = moved
        return moved

    def _keep(self, log: _CachedLog) -> DeltaState:
        """Cache a state, in this process and on the host, unless a newer state of the same table is cached. Returns the state."""
        with self._lock:
            previous_log = self._cached_log
            is_same_table = previous_log is not None and previous_log.state.table_id == log.state.table_id
            if previous_log is not None and is_same_table and previous_log.state.version > log.state.version:
                return log.state
            if (
                len(log.tail) > _TAIL_AT_MOST
                or len(log.state.files.added) - len(log.base.files.added) > self._mapped_from
            ):
                log = _CachedLog(log.state, log.last_file, log.state)
            self._cached_log = log
        disk = self._context.disk
        if disk is None:
            return log.state
        try:
            if log.base is log.state:
                log = self._move_to_columns(disk, log)
                disk.replace_record("log", self._key, _state_to_json(log.state))
                base = log.state.files.base
                remove_unneeded(disk, self._key, () if base is None else (*base.segment_prefixes,))
            value = {
                "table": log.state.table_id,
                "commits": [text.decode() for text in log.tail],
                "last": log.last_file.to_json(),
            }
            disk.replace_record("log-tail", f"{self._key}-{log.base.version}", value)
            if previous_log is not None and previous_log.base.version != log.base.version:
                disk.remove_record("log-tail", f"{self._key}-{previous_log.base.version}")
        except OSError:
            self._context.metrics.inc("cacheFailureCount")
        return log.state


def _find_commits(files: Sequence[FileVersion]) -> dict[int, FileVersion]:
    """The files of the commits in a listing, by version. Files in directories below the log's are left out."""
    commits = {}
    for file in files:
        directory, _, name = file.url.rpartition("/")
        match = _COMMIT.fullmatch(name) if directory.endswith(f"/{LOG_DIRECTORY}") else None
        if match is not None:
            commits[int(match[1])] = file
    return commits


def _written_at_ms(file: FileVersion) -> int:
    return int((file.modified_at_s or 0) * 1000)


def _parse_version(file: FileVersion) -> int:
    return int(file.url.rsplit("/", 1)[-1].partition(".")[0])


def _state_to_json(state: DeltaState) -> dict[str, Any]:
    base = None if state.files.base is None else state.files.base.to_json()
    if state.files.base is not None and base is None:
        raise OSError("the cache directory has no room for the files of this state")
    return {
        "version": state.version,
        "metadata": state.metadata,
        "protocol": state.protocol,
        "files": [add.to_json() for add in state.files.added.values()],
        "base": base,
        "gone": sorted(state.files.gone),
        "rewrites": state.rewrites,
    }


def to_rows(adds: Adds) -> list[dict[str, Any]]:
    """The `add` actions of a checkpoint one by one, with their statistics as JSON text."""
    texts = statistics_texts(adds).to_pylist()
    fields = [field for field in adds.type if field.name not in ("stats", "stats_parsed")]
    plain = pa.StructArray.from_arrays([adds.field(field.name) for field in fields], fields=fields)
    return [{**row, "stats": text} for row, text in zip(plain.to_pylist(), texts, strict=True)]


def _replay_texts(base: DeltaState, texts: Sequence[bytes]) -> Replay:
    """The state after `base` and the commits in `texts`, still under construction."""
    replay = Replay.from_state(base)
    for text in texts:
        replay.apply(parse_actions(text))
        replay.version += 1
    return replay


def _parse_keys(pairs: Any) -> tuple[Key, ...]:
    return tuple((as_text(path), as_text(vector)) for path, vector in pairs)
