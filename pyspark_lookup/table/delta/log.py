"""`DeltaLog`: the log of a Delta table, tailed.

A commit that is there never changes, and its file's identity tells this table from another one at the same place. So what
follows the last commit known, with that commit, is all that is asked for: one listing where a store lists from a name on, else a
look at each of the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import threading
from collections.abc import Sequence
from typing import Any

from pyspark_lookup.base.decoding import UNREADABLE, count_of, text_of, texts_of
from pyspark_lookup.base.errors import (
    DamagedFileError,
    NotSupportedError,
    SourceChangedError,
    UfsNotFoundError,
    VersionGoneError,
    raise_ours,
)
from pyspark_lookup.base.memory import check_room
from pyspark_lookup.io.block_cache import BlockCache
from pyspark_lookup.io.context import HostContext
from pyspark_lookup.io.disk import key_of
from pyspark_lookup.io.stores import DELTA_LOG_DIRECTORY, FileVersion
from pyspark_lookup.io.ufs import Ufs
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.table.delta.actions import Add, DeltaState, Key, Replay, actions_of, check_commit
from pyspark_lookup.table.delta.checkpoint import checkpoints_in, read_checkpoint
from pyspark_lookup.table.restarts import read_again

_COMMIT = re.compile(r"(\d{20})\.json")
_TAIL_AT_MOST = 64  # commits on record after a state, until that is recorded anew
_COPIES = 5  # of a log in memory: its bytes, its text, and what is parsed
_EARLIER_KEPT = 4  # states of earlier versions, in a process


@dataclasses.dataclass(frozen=True)
class _Known:
    """A state, its last commit's file, and what it came from: an earlier state, and the commits after that."""

    state: DeltaState
    last: FileVersion
    base: DeltaState
    tail: tuple[bytes, ...] = ()


class DeltaLog:
    """The log of the table at `url`, as this process reads it. Safe for threads, not across forks."""

    def __init__(self, ufs: Ufs, blocks: BlockCache, context: HostContext, url: str) -> None:
        self.url = url
        self._ufs = ufs
        self._blocks = blocks
        self._context = context
        self._directory = f"{url}/{DELTA_LOG_DIRECTORY}"
        self._shown = redact("path", url)
        self._key = key_of("delta", ufs.scope, url)
        self._lock = threading.Lock()
        self._known: _Known | None = None
        self._earlier: dict[int, DeltaState] = {}

    # --- the current version ----------------------------------------------------------------------

    def known(self, version: int = 0) -> DeltaState | None:
        """The newest state this process has read, or this host, if it goes as far as `version`. No store call.

        It may be of a table that was dropped since.
        """
        with self._lock:
            if self._known is None or self._known.state.version < version:
                kept = self._read_kept()
                if kept is not None and (self._known is None or kept.state.version > self._known.state.version):
                    self._known = kept
            return None if self._known is None else self._known.state

    def latest(self) -> DeltaState:
        """The table's state now: one listing where nothing is new, and one read for each new commit.

        Raises UfsNotFoundError without a log, DamagedFileError for one that contradicts itself, NotSupportedError for what is not
        known here.
        """
        self.known()
        with self._lock:
            known = self._known
        newer = None if known is None else self._newer(known)
        if known is None or newer is None:
            return self._read_all()
        if not newer:
            return known.state
        try:
            texts = self._read(newer)
        except SourceChangedError:  # a checkpoint holds what clean-up has just removed
            return self._read_all()
        state = self._advance(known.state, newer, texts)
        self._keep(_Known(state, newer[-1], known.base, (*known.tail, *texts)))
        return state

    def _newer(self, known: _Known) -> list[FileVersion] | None:
        """The commits that follow; None if the last one known is another, or is not there."""
        version = known.state.version
        if not self._ufs.lists_after:
            newer: list[FileVersion] = []
            with contextlib.suppress(UfsNotFoundError):
                while True:
                    newer.append(self._ufs.get_meta(self._path(version + len(newer) + 1)))
            # After the next ones: while it is there, what came before them was this table's.
            try:
                return newer if self._ufs.get_meta(known.last.url) == known.last else None
            except UfsNotFoundError:
                return None
        commits = _commits_in(self._ufs.list_files(self._directory, f"{version:020}"))
        if commits.pop(version, None) != known.last:
            return None
        return self._in_order(commits, version)

    def _in_order(self, commits: dict[int, FileVersion], after: int) -> list[FileVersion]:
        """Commits by version. Raises DamagedFileError if one is missing."""
        for number, version in enumerate(sorted(commits), after + 1):
            if version != number:
                raise DamagedFileError(
                    f"{self._shown}: the Delta log has a gap, {number:020}.json is missing before version {version}"
                )
        return [commits[version] for version in sorted(commits)]

    def _advance(self, state: DeltaState | None, commits: Sequence[FileVersion], texts: Sequence[bytes]) -> DeltaState:
        """The state after commits. Raises DamagedFileError naming the one that makes no sense."""
        replay = Replay() if state is None else Replay.of(state)
        for file, text in zip(commits, texts, strict=True):
            shown = redact("path", file.url)
            try:
                replay.apply(actions_of(text, shown))
                replay.version = _version_of(file)
            except UNREADABLE as problem:
                raise_ours(DamagedFileError(f"{shown} is no Delta commit: {problem}"), problem)
        return self._state_of(replay)

    def _state_of(self, replay: Replay) -> DeltaState:
        try:
            state = replay.state()
            state.check()
            return state
        except NotSupportedError as problem:
            raise NotSupportedError(f"{self._shown}, version {replay.version} of a Delta table: {problem}") from None
        except UNREADABLE as problem:
            raise_ours(
                DamagedFileError(f"{self._shown}, version {replay.version} of a Delta table: {problem}"), problem
            )

    # --- from a checkpoint on -----------------------------------------------------------------------

    def _read_all(self) -> DeltaState:
        with self._lock:
            self._known, self._earlier = None, {}
        state, last = self._replay(None)
        self._keep(_Known(state, last, state))
        return state

    def _replay(self, version: int | None) -> tuple[DeltaState, FileVersion]:
        """(the state at a version (None: the newest), the file of its last commit), from the newest checkpoint before it that is whole.

        Raises VersionGoneError for a version that is not there, UfsNotFoundError without a log.
        """
        hint = self._hint() if version is None else None
        if hint is not None:
            listed = self._ufs.list_files(self._directory, f"{hint:020}")
            with contextlib.suppress(DamagedFileError, SourceChangedError, UfsNotFoundError):
                return self._replay_of(listed, None)
        return read_again(
            lambda: self._replay_of(self._ufs.list_files(self._directory), version),
            DamagedFileError,
            SourceChangedError,
        )

    def _replay_of(self, listed: Sequence[FileVersion], version: int | None) -> tuple[DeltaState, FileVersion]:
        commits = _commits_in(listed)
        if not commits:
            last = max((one.version for one in checkpoints_in(listed)), default=None)
            instead = (
                f"so it is no Delta table. To read all its files as they are (deleted rows, too), move {DELTA_LOG_DIRECTORY} away"
                if last is None
                else f"but a checkpoint of version {last}, which may not be the newest: restore {last:020}.json and the commits after it"
            )
            raise UfsNotFoundError(f"{self._shown}: {DELTA_LOG_DIRECTORY} holds no commit, {instead}")
        if version is not None and not min(commits) <= version <= max(commits):
            raise VersionGoneError(
                f"{self._shown} has no version {version}: the log has {min(commits)} to {max(commits)}"
            )
        newest = max({*commits, *(one.version for one in checkpoints_in(listed))}) if version is None else version
        damaged: DamagedFileError | None = None
        for checkpoint in checkpoints_in(listed):
            if checkpoint.version > newest:
                continue
            try:
                replay = Replay(checkpoint.version)
                replay.apply(read_checkpoint(checkpoint, self._read_blocks), checkpoint=True)
                state = replay.state()
                with contextlib.suppress(NotSupportedError):  # of what a later commit may have dropped
                    state.check()
            except (DamagedFileError, SourceChangedError, *UNREADABLE) as problem:  # also if a sidecar is missing
                damaged = damaged or DamagedFileError(f"{self._shown}: {problem}")
                continue
            return self._follow(state, checkpoint.version, commits, newest)
        if min(commits) == 0:
            return self._follow(None, -1, commits, newest)
        if version is not None and damaged is None:
            oldest = min((one.version for one in checkpoints_in(listed)), default=None)
            since = "" if oldest is None else f", which is made of {oldest} on"
            raise VersionGoneError(
                f"{self._shown} has no version {version} any more: what came before it was removed from the log{since}"
            )
        raise damaged or DamagedFileError(
            f"{self._shown}: the Delta log begins with version {min(commits)}, and has no whole checkpoint to begin with"
        )

    def _follow(
        self, state: DeltaState | None, after: int, commits: dict[int, FileVersion], newest: int
    ) -> tuple[DeltaState, FileVersion]:
        wanted = {version: file for version, file in commits.items() if after < version <= newest}
        files = self._in_order(wanted, after)
        state = self._advance(state, files, self._read(files))
        if newest not in commits:
            raise DamagedFileError(f"{self._shown}: the Delta log lacks {newest:020}.json, of its newest checkpoint")
        return state, commits[newest]

    def _hint(self) -> int | None:
        """The version of the newest checkpoint, as `_last_checkpoint` says, which may be old, or damaged."""
        with contextlib.suppress(UfsNotFoundError, SourceChangedError, *UNREADABLE):  # a checkpoint replaces it
            file = self._ufs.get_meta(f"{self._directory}/_last_checkpoint")
            return count_of(json.loads(self._ufs.read_ranges(file, [(0, file.size)])[0])["version"])
        return None

    # --- earlier versions -------------------------------------------------------------------------

    def at(self, version: int, state: DeltaState | None = None) -> DeltaState:
        """The state at a version of the table that is there now (`state`, if it is known). Raises VersionGoneError."""
        state = self.latest() if state is None else state
        found = self.known_at(state.table_id, version)
        if found is None:
            found, _ = self._replay(version)
            self._keep_earlier(found)
        return found

    def known_at(self, table_id: str, version: int) -> DeltaState | None:
        """The state of a table at a version, as far as this host has it on record. No store call."""
        self.known(version)
        with self._lock:
            known, earlier = self._known, self._earlier.get(version)
        if earlier is not None and earlier.table_id == table_id:
            return earlier
        if (
            known is None
            or known.state.table_id != table_id
            or not known.base.version <= version <= known.state.version
        ):
            return None
        if version == known.state.version:
            return known.state
        with contextlib.suppress(NotSupportedError, *UNREADABLE):
            found = self._state_of(_replayed(known.base, known.tail[: version - known.base.version]))
            self._keep_earlier(found)
            return found
        return None

    def _keep_earlier(self, state: DeltaState) -> None:
        with self._lock:
            self._earlier = {**dict(list(self._earlier.items())[-_EARLIER_KEPT + 1 :]), state.version: state}

    def commits(self) -> list[tuple[int, FileVersion]]:
        """The commits that are there, oldest first."""
        return sorted(_commits_in(self._ufs.list_files(self._directory)).items())

    def commit_times(
        self, state: DeltaState, commits: Sequence[tuple[int, FileVersion]] | None = None
    ) -> list[tuple[int, int]]:
        """The commits that are there (or those given), oldest first, and when each was made (Unix ms), as Delta has it.

        That is when its file was written; since the table has `delta.enableInCommitTimestamps`, what the commit says.
        """
        commits = self.commits() if commits is None else commits
        says = state.configuration.get("delta.enableInCommitTimestamps", "").lower() == "true"
        try:
            since = int(state.configuration.get("delta.inCommitTimestampEnablementVersion") or 0) if says else math.inf
        except ValueError as problem:
            raise DamagedFileError(f"{self._shown}, version {state.version} of a Delta table: {problem}") from None
        found: list[tuple[int, int]] = []
        for version, file in commits:
            at_ms: Any = None
            if version >= since:
                said = (action["commitInfo"] for action in self.read_commit(file) if action.get("commitInfo"))
                info: dict[str, Any] = next(said, {})
                at_ms = info.get("inCommitTimestamp")
            at_ms = int((file.modified_at_s or 0) * 1000) if at_ms is None else count_of(at_ms)
            found.append((version, at_ms))
        # What a file's copy says of earlier commits is no later than what the others say themselves.
        limit = next((at_ms for version, at_ms in found if version >= since), math.inf)
        times: list[tuple[int, int]] = []
        for version, at_ms in found:
            later = max(at_ms, times[-1][1] + 1) if times else at_ms
            times.append((version, later if version >= since else int(min(later, limit - 1))))
        return times

    def read_commit(self, file: FileVersion) -> list[dict[str, Any]]:
        """The actions of a commit. Raises DamagedFileError."""
        shown = redact("path", file.url)
        try:
            actions = actions_of(self._read_blocks([file])[0], shown)
            check_commit(actions)
            return actions
        except UNREADABLE as problem:
            raise_ours(DamagedFileError(f"{shown} is no Delta commit: {problem}"), problem)

    # --- files ------------------------------------------------------------------------------------

    def _path(self, version: int) -> str:
        return f"{self._directory}/{version:020}.json"

    def _read(self, files: Sequence[FileVersion]) -> list[bytes]:
        """Whole commits, which are on record as a state and its tail: no block is kept of them."""
        self._check_room(files)
        return [parts[0] for parts in self._ufs.read_many([(file, [(0, file.size)]) for file in files])]

    def _read_blocks(self, files: Sequence[FileVersion]) -> list[bytes]:
        self._check_room(files)
        locations = [self._blocks.get_blocks_and_locations(file.url, file) for file in files]
        return [bytes(parts[0]) for parts in self._blocks.read([(of, [(0, of.file.size)]) for of in locations])]

    def _check_room(self, files: Sequence[FileVersion]) -> None:
        size = sum(file.size for file in files)
        check_room(size * _COPIES, f"{self._shown}: {size} bytes of its Delta log")

    # --- what this host knows ---------------------------------------------------------------------

    def _read_kept(self) -> _Known | None:
        disk = self._context.disk
        if disk is None:
            return None
        base: DeltaState | None = disk.get_record("delta", self._key, _state_of_json)
        if base is None:
            return None

        def with_tail(found: Any) -> _Known:
            if found["table"] != base.table_id:
                raise ValueError("of another table")
            texts, last = (
                tuple(text.encode() for text in texts_of(found["commits"])),
                FileVersion.from_json(found["last"]),
            )
            if _version_of(last) != base.version + len(texts):
                raise ValueError("a commit is missing")
            state = _replayed(base, texts).state() if texts else base
            with contextlib.suppress(NotSupportedError):
                state.check()
                return _Known(state, last, base, texts)
            raise ValueError("of another release, which knows more")

        return disk.get_record("delta-tail", f"{self._key}-{base.version}", with_tail)

    def _keep(self, known: _Known) -> None:
        """Know a state; a newer one of that table that is known stays."""
        with self._lock:
            before = self._known
            same = before is not None and before.state.table_id == known.state.table_id
            if before is not None and same and before.state.version > known.state.version:
                return
            if len(known.tail) > _TAIL_AT_MOST:
                known = _Known(known.state, known.last, known.state)
            self._known = known
        disk = self._context.disk
        if disk is None:
            return
        try:
            if known.base is known.state:
                disk.replace_record("delta", self._key, _state_to_json(known.state))
            value = {
                "table": known.state.table_id,
                "commits": [text.decode() for text in known.tail],
                "last": known.last.to_json(),
            }
            disk.replace_record("delta-tail", f"{self._key}-{known.base.version}", value)
            if before is not None and before.base.version != known.base.version:
                disk.remove_record("delta-tail", f"{self._key}-{before.base.version}")
        except OSError:
            self._context.metrics.inc("cacheFailureCount")


def _commits_in(files: Sequence[FileVersion]) -> dict[int, FileVersion]:
    """The commits in a listing, by version; what lies in directories below is none."""
    found = {}
    for file in files:
        directory, _, name = file.url.rpartition("/")
        match = _COMMIT.fullmatch(name) if directory.endswith(f"/{DELTA_LOG_DIRECTORY}") else None
        if match is not None:
            found[int(match[1])] = file
    return found


def _version_of(file: FileVersion) -> int:
    return int(file.url.rsplit("/", 1)[-1].partition(".")[0])


def _state_to_json(state: DeltaState) -> dict[str, Any]:
    return {
        "version": state.version,
        "metadata": state.metadata,
        "protocol": state.protocol,
        "files": [add.to_json() for add in state.files.values()],
        "rewrites": state.rewrites,
    }


def _replayed(base: DeltaState, texts: Sequence[bytes]) -> Replay:
    """A state after the commits that follow it, as they were read before."""
    replay = Replay.of(base)
    for text in texts:
        replay.apply(actions_of(text, "the host's record of the log"))
        replay.version += 1
    return replay


def _state_of_json(found: Any) -> DeltaState:
    """What `_state_to_json` wrote. Raises one of `decoding.UNREADABLE` for anything else."""
    files = [Add.from_json(row) for row in found["files"]]
    rewrites = tuple((_keys_of(new), _keys_of(old)) for new, old in found["rewrites"])
    metadata = {**found["metadata"]}
    text_of(metadata["id"])
    known = {add.key: add for add in files}
    return Replay(count_of(found["version"]), metadata, {**found["protocol"]}, known, rewrites).state()


def _keys_of(found: Any) -> tuple[Key, ...]:
    return tuple((text_of(path), text_of(vector)) for path, vector in found)
