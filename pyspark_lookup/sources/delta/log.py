"""`DeltaLog`: reads the log of a Delta table, with its checkpoints, and follows it from commit to commit.

A commit never changes once it exists, and the identity of its file tells this table from another one at the same path. So each read asks
for the last cached commit and the commits after it: with one listing if the store can list from a name on, else with a request for each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import decimal
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_lookup.core.decoding import UNREADABLE, as_count, as_text, as_texts
from pyspark_lookup.core.memory import check_room
from pyspark_lookup.errors import (
    DamagedFileError,
    NotSupportedError,
    SourceChangedError,
    UfsNotFoundError,
    VersionGoneError,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.delta.actions import Add, DeltaState, Key, Replay, check_commit, parse_actions
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.stores import IMMUTABLE, FileVersion, add_log_directory
from pyspark_lookup.storage.ufs import Ufs
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
"""The columns of a checkpoint that are read, each with those of its fields that are read (None: all)."""

_ROW_BYTES = 1000  # of memory per file, approximately
_CHECKED_BYTES = 64 * 1024 * 1024  # free memory is checked each time that this many bytes are needed

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
    # For the same version, a checkpoint in a single file comes first: the parts of one in several files may come from two writers.
    return sorted(
        checkpoints, key=lambda checkpoint: (-checkpoint.version, len(checkpoint.files), checkpoint.files[0].url)
    )


def read_checkpoint(checkpoint: Checkpoint, read: Read) -> Iterator[dict[str, Any]]:
    """The actions of a checkpoint, and of its sidecars. Raises DamagedFileError if a file of either is malformed."""
    directory = checkpoint.files[0].url.rsplit("/", 1)[0]
    sidecars: list[FileVersion] = []
    for file, data in zip(checkpoint.files, read(checkpoint.files), strict=True):
        for action in _actions(file, data):
            sidecar = action.get("sidecar")
            if sidecar is None:
                yield action
            else:
                path = unquote(as_text(sidecar["path"]))
                url = path if ":" in path or path.startswith("/") else f"{directory}/_sidecars/{path}"
                sidecars.append(FileVersion(url, as_count(sidecar["sizeInBytes"]), IMMUTABLE))
    for file, data in zip(sidecars, read(sidecars), strict=True):
        yield from _actions(file, data)


def _actions(file: FileVersion, data: bytes) -> Iterator[dict[str, Any]]:
    redacted_path = redact("path", file.url)
    try:
        if file.url.endswith(".json"):
            yield from parse_actions(data, redacted_path)
            return
        # Spark writes bounds of instants as INT96, which may be in the year 9999.
        source = pq.ParquetFile(
            pa.BufferReader(data), page_checksum_verification=True, coerce_int96_timestamp_unit="us"
        )
        columns = {field.name: field for field in source.schema_arrow}
        selected_columns: list[str] = []
        for name, fields in _COLUMNS.items():
            if name in columns:
                field_names = [field.name for field in columns[name].type]
                selected_columns += (
                    [name] if fields is None else [f"{name}.{field}" for field in fields if field in field_names]
                )
        new = 0  # files; other rows, such as those of removed files, are dropped
        for batch in source.iter_batches(columns=selected_columns):
            new += batch.num_rows - batch.column("add").null_count if "add" in columns else 0
            if new * _ROW_BYTES > _CHECKED_BYTES:
                check_room(new * _ROW_BYTES, f"{redacted_path}: {new} rows of a Delta checkpoint")
                new = 0
            for action in _to_rows(batch):
                add = action.get("add")
                if add is not None and not add.get("stats") and add.get("stats_parsed"):
                    add["stats"] = json.dumps(add["stats_parsed"], default=_json_of_value)
                yield action
    except (*UNREADABLE, pa.ArrowException, OSError) as problem:
        raise_ours(DamagedFileError(f"{redacted_path} is not a Delta checkpoint: {problem}"), problem)


def _to_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    try:
        return list(batch.to_pylist())
    except (
        OverflowError,
        ValueError,
    ):  # a bound is a day that Python's types cannot hold: read on without parsed statistics
        place = batch.schema.get_field_index("add")
        if place < 0:
            raise
        add = batch.column(place)
        fields = [field for field in add.type if field.name != "stats_parsed"]
        slim_add = pa.StructArray.from_arrays(
            [add.field(field.name) for field in fields], fields=fields, mask=add.is_null()
        )
        return list(batch.set_column(place, "add", slim_add).to_pylist())


def _json_of_value(value: Any) -> str | float:
    """A value of `stats_parsed` in the form that JSON statistics use, where a decimal is a number with a double's digits."""
    if isinstance(value, decimal.Decimal):
        return float(value)
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


LOG_DIRECTORY = add_log_directory("_delta_log")
_COMMIT = re.compile(r"(\d{20})\.json")
_TAIL_AT_MOST = 64  # commits on record after a state, before the state is recorded again
_COPIES = 5  # of a log in memory: its bytes, its text, and its parsed values
_EARLIER_KEPT = 4  # states of earlier versions, per process


@dataclasses.dataclass(frozen=True)
class _CachedLog:
    """The latest state, the file of its last commit, and what the host's records have of it: an earlier state, and the commits since."""

    state: DeltaState
    last_file: FileVersion
    base: DeltaState
    tail: tuple[bytes, ...] = ()


class DeltaLog:
    """The log of the table at `url`, as this process reads it. Safe for threads, not across forks."""

    def __init__(self, ufs: Ufs, blocks: BlockCache, context: HostContext, url: str) -> None:
        self.url = url
        self._ufs = ufs
        self._blocks = blocks
        self._context = context
        self._directory = f"{url}/{LOG_DIRECTORY}"
        self._redacted_path = redact("path", url)
        self._key = key_of("delta", ufs.scope, url)
        self._lock = threading.Lock()
        self._cached_log: _CachedLog | None = None
        self._earlier: dict[int, DeltaState] = {}

    # --- the current version ----------------------------------------------------------------------

    def cached_state(self, version: int = 0) -> DeltaState | None:
        """The newest state that this process has read, or the host's record of one if the process has none as new as `version`.

        None if there is neither. No store call. The state may be of a table that has been dropped since.
        """
        with self._lock:
            if self._cached_log is None or self._cached_log.state.version < version:
                recorded_log = self._read_record()
                if recorded_log is not None and (
                    self._cached_log is None or recorded_log.state.version > self._cached_log.state.version
                ):
                    self._cached_log = recorded_log
            return None if self._cached_log is None else self._cached_log.state

    def latest(self) -> DeltaState:
        """The table's state now: one listing if nothing is new, and one read for each new commit.

        Raises UfsNotFoundError if there is no log, DamagedFileError if it contradicts itself, NotSupportedError for features that this
        reader lacks.
        """
        self.cached_state()
        with self._lock:
            cached_log = self._cached_log
        newer = None if cached_log is None else self._list_newer(cached_log)
        if cached_log is None or newer is None:
            return self._read_all()
        if not newer:
            return cached_log.state
        try:
            texts = self._read(newer)
        except SourceChangedError:  # clean-up has just removed a commit; a checkpoint has its contents
            return self._read_all()
        state = self._advance(cached_log.state, newer, texts)
        self._keep(_CachedLog(state, newer[-1], cached_log.base, (*cached_log.tail, *texts)))
        return state

    def _list_newer(self, cached_log: _CachedLog) -> list[FileVersion] | None:
        """The commits after the cached ones. None if the file of the last cached commit has changed or is gone, so that the log may be another
        table's."""
        version = cached_log.state.version
        if not self._ufs.lists_after:
            newer: list[FileVersion] = []
            with contextlib.suppress(UfsNotFoundError):
                while True:
                    newer.append(self._ufs.get_meta(self._path(version + len(newer) + 1)))
            # The race: the table may be replaced between two requests. So the cached commit is requested last: if it is still
            # there after the next ones were seen, they are of the same table.
            try:
                return newer if self._ufs.get_meta(cached_log.last_file.url) == cached_log.last_file else None
            except UfsNotFoundError:
                return None
        commits = _find_commits(self._ufs.list_files(self._directory, f"{version:020}"))
        if commits.pop(version, None) != cached_log.last_file:
            return None
        return self._in_order(commits, version)

    def _in_order(self, commits: dict[int, FileVersion], after: int) -> list[FileVersion]:
        """The files of commits, in the order of their versions. Raises DamagedFileError if a version is missing."""
        for number, version in enumerate(sorted(commits), after + 1):
            if version != number:
                raise DamagedFileError(
                    f"{self._redacted_path}: the Delta log has a gap: {number:020}.json is missing before version {version}"
                )
        return [commits[version] for version in sorted(commits)]

    def _advance(self, state: DeltaState | None, commits: Sequence[FileVersion], texts: Sequence[bytes]) -> DeltaState:
        """The state after these commits. Raises DamagedFileError that names the commit that cannot be applied."""
        replay = Replay() if state is None else Replay.from_state(state)
        for file, text in zip(commits, texts, strict=True):
            redacted_path = redact("path", file.url)
            try:
                replay.apply(parse_actions(text, redacted_path))
                replay.version = _parse_version(file)
            except UNREADABLE as problem:
                raise_ours(DamagedFileError(f"{redacted_path} is not a Delta commit: {problem}"), problem)
        return self._build_state(replay)

    def _build_state(self, replay: Replay) -> DeltaState:
        try:
            state = replay.state()
            state.check()
            return state
        except NotSupportedError as problem:
            raise NotSupportedError(
                f"{self._redacted_path}, version {replay.version} of a Delta table: {problem}"
            ) from None
        except UNREADABLE as problem:
            raise_ours(
                DamagedFileError(f"{self._redacted_path}, version {replay.version} of a Delta table: {problem}"),
                problem,
            )

    # --- from a checkpoint on -----------------------------------------------------------------------

    def _read_all(self) -> DeltaState:
        with self._lock:
            self._cached_log, self._earlier = None, {}
        state, last_file = self._replay(None)
        self._keep(_CachedLog(state, last_file, state))
        return state

    def _replay(self, version: int | None) -> tuple[DeltaState, FileVersion]:
        """(the state at a version, the file of its last commit), replayed from the newest complete checkpoint that is not after it.

        `version` None: the newest version.
        Raises VersionGoneError for a version that the log does not have, UfsNotFoundError if there is no log.
        """
        hint = self._read_hint() if version is None else None
        if hint is not None:
            files = self._ufs.list_files(self._directory, f"{hint:020}")
            with contextlib.suppress(DamagedFileError, SourceChangedError, UfsNotFoundError):
                return self._replay_listing(files, None)
        return read_again(
            lambda: self._replay_listing(self._ufs.list_files(self._directory), version),
            DamagedFileError,
            SourceChangedError,
        )

    def _replay_listing(self, listing: Sequence[FileVersion], version: int | None) -> tuple[DeltaState, FileVersion]:
        commits = _find_commits(listing)
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
                f"{self._redacted_path} has no version {version}: the log has {min(commits)} to {max(commits)}"
            )
        newest = (
            max({*commits, *(checkpoint.version for checkpoint in find_checkpoints(listing))})
            if version is None
            else version
        )
        first_damage: DamagedFileError | None = None
        for checkpoint in find_checkpoints(listing):
            if checkpoint.version > newest:
                continue
            try:
                replay = Replay(checkpoint.version)
                replay.apply(read_checkpoint(checkpoint, self._read_blocks), checkpoint=True)
                state = replay.state()
                with contextlib.suppress(NotSupportedError):  # a later commit may have dropped the feature
                    state.check()
            except (DamagedFileError, SourceChangedError, *UNREADABLE) as problem:  # also if a sidecar is missing
                first_damage = first_damage or DamagedFileError(f"{self._redacted_path}: {problem}")
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
            f"{self._redacted_path}: the Delta log begins with version {min(commits)} and has no complete checkpoint to start from"
        )

    def _follow(
        self, state: DeltaState | None, after: int, commits: dict[int, FileVersion], newest: int
    ) -> tuple[DeltaState, FileVersion]:
        new_commits = {version: file for version, file in commits.items() if after < version <= newest}
        files = self._in_order(new_commits, after)
        state = self._advance(state, files, self._read(files))
        if newest not in commits:
            raise DamagedFileError(
                f"{self._redacted_path}: the Delta log lacks {newest:020}.json, the commit of its newest checkpoint"
            )
        return state, commits[newest]

    def _read_hint(self) -> int | None:
        """The version of the newest checkpoint according to the file `_last_checkpoint`, which may be out of date; None if it is missing or
        damaged."""
        # Writers of checkpoints overwrite the file in place, so a reader may find it missing or half-written.
        with contextlib.suppress(UfsNotFoundError, SourceChangedError, *UNREADABLE):
            file = self._ufs.get_meta(f"{self._directory}/_last_checkpoint")
            return as_count(json.loads(self._ufs.read_ranges(file, [(0, file.size)])[0])["version"])
        return None

    # --- earlier versions -------------------------------------------------------------------------

    def read_state(self, version: int, state: DeltaState | None = None) -> DeltaState:
        """The state at a version. `state`: the latest state, if the caller has it. Raises VersionGoneError if the log does not have the version."""
        state = self.latest() if state is None else state
        earlier_state = self.find_cached_state(state.table_id, version)
        if earlier_state is None:
            earlier_state, _ = self._replay(version)
            self._keep_earlier(earlier_state)
        return earlier_state

    def find_cached_state(self, table_id: str, version: int) -> DeltaState | None:
        """The state of a table at a version, if this process or host has it; else None. No store call."""
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

    def commits(self) -> list[tuple[int, FileVersion]]:
        """(version, file) of the commits in the log, oldest first."""
        return sorted(_find_commits(self._ufs.list_files(self._directory)).items())

    def commit_times(
        self, state: DeltaState, commits: Sequence[tuple[int, FileVersion]] | None = None
    ) -> list[tuple[int, int]]:
        """(version, Unix ms) of `commits`, by default of all commits in the log, oldest first. The time is a commit's timestamp as Delta defines it.

        That is the time at which the commit's file was written, or its `inCommitTimestamp` once the table has
        `delta.enableInCommitTimestamps`.
        """
        commits = self.commits() if commits is None else commits
        has_commit_times = state.configuration.get("delta.enableInCommitTimestamps", "").lower() == "true"
        try:
            since = (
                int(state.configuration.get("delta.inCommitTimestampEnablementVersion") or 0)
                if has_commit_times
                else math.inf
            )
        except ValueError as problem:
            raise DamagedFileError(
                f"{self._redacted_path}, version {state.version} of a Delta table: {problem}"
            ) from None
        recorded_times: list[tuple[int, int]] = []
        for version, file in commits:
            at_ms: Any = None
            if version >= since:
                commit_infos = (action["commitInfo"] for action in self.read_commit(file) if action.get("commitInfo"))
                info: dict[str, Any] = next(commit_infos, {})
                at_ms = info.get("inCommitTimestamp")
            at_ms = int((file.modified_at_s or 0) * 1000) if at_ms is None else as_count(at_ms)
            recorded_times.append((version, at_ms))
        # The files of a copied log are newer than its commits. So no commit before the first one with an inCommitTimestamp counts
        # as later than that.
        limit = next((at_ms for version, at_ms in recorded_times if version >= since), math.inf)
        times: list[tuple[int, int]] = []
        for version, at_ms in recorded_times:
            later = max(at_ms, times[-1][1] + 1) if times else at_ms
            times.append((version, later if version >= since else int(min(later, limit - 1))))
        return times

    def read_commit(self, file: FileVersion) -> list[dict[str, Any]]:
        """The actions of a commit. Raises DamagedFileError if it is malformed."""
        redacted_path = redact("path", file.url)
        try:
            actions = parse_actions(self._read_blocks([file])[0], redacted_path)
            check_commit(actions)
            return actions
        except UNREADABLE as problem:
            raise_ours(DamagedFileError(f"{redacted_path} is not a Delta commit: {problem}"), problem)

    # --- files ------------------------------------------------------------------------------------

    def _path(self, version: int) -> str:
        return f"{self._directory}/{version:020}.json"

    def _read(self, files: Sequence[FileVersion]) -> list[bytes]:
        """The contents of commits. These reads bypass the block cache, because the host's records hold a state and the commits after it."""
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

    # --- what this host knows ---------------------------------------------------------------------

    def _read_record(self) -> _CachedLog | None:
        disk = self._context.disk
        if disk is None:
            return None
        base: DeltaState | None = disk.get_record("log", self._key, _state_from_json)
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
                state.check()
                return _CachedLog(state, last_file, base, texts)
            raise ValueError("written by another release, which supports more features")

        return disk.get_record("log-tail", f"{self._key}-{base.version}", add_tail)

    def _keep(self, log: _CachedLog) -> None:
        """Cache a state, in this process and on the host, unless a newer state of the same table is cached."""
        with self._lock:
            previous_log = self._cached_log
            is_same_table = previous_log is not None and previous_log.state.table_id == log.state.table_id
            if previous_log is not None and is_same_table and previous_log.state.version > log.state.version:
                return
            if len(log.tail) > _TAIL_AT_MOST:
                log = _CachedLog(log.state, log.last_file, log.state)
            self._cached_log = log
        disk = self._context.disk
        if disk is None:
            return
        try:
            if log.base is log.state:
                disk.replace_record("log", self._key, _state_to_json(log.state))
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


def _find_commits(files: Sequence[FileVersion]) -> dict[int, FileVersion]:
    """The files of the commits in a listing, by version; files in directories below the log are left out."""
    commits = {}
    for file in files:
        directory, _, name = file.url.rpartition("/")
        match = _COMMIT.fullmatch(name) if directory.endswith(f"/{LOG_DIRECTORY}") else None
        if match is not None:
            commits[int(match[1])] = file
    return commits


def _parse_version(file: FileVersion) -> int:
    return int(file.url.rsplit("/", 1)[-1].partition(".")[0])


def _state_to_json(state: DeltaState) -> dict[str, Any]:
    return {
        "version": state.version,
        "metadata": state.metadata,
        "protocol": state.protocol,
        "files": [add.to_json() for add in state.files.values()],
        "rewrites": state.rewrites,
    }


def _replay_texts(base: DeltaState, texts: Sequence[bytes]) -> Replay:
    """The state after applying commits, given as texts, to `base`."""
    replay = Replay.from_state(base)
    for text in texts:
        replay.apply(parse_actions(text, "the host's record of the log"))
        replay.version += 1
    return replay


def _state_from_json(record: Any) -> DeltaState:
    """The state that `_state_to_json` wrote. Raises one of `decoding.UNREADABLE` if it is malformed."""
    files = [Add.from_json(row) for row in record["files"]]
    rewrites = tuple((_parse_keys(new), _parse_keys(old)) for new, old in record["rewrites"])
    metadata = {**record["metadata"]}
    as_text(metadata["id"])
    files_by_key = {add.key: add for add in files}
    return Replay(as_count(record["version"]), metadata, {**record["protocol"]}, files_by_key, rewrites).state()


def _parse_keys(pairs: Any) -> tuple[Key, ...]:
    return tuple((as_text(path), as_text(vector)) for path, vector in pairs)
