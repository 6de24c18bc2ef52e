"""Vacuum: removes the files that only versions from before the retention time need.

The race: a reader may be about to read such a version. So an event in the log first names the writes that lose their files, and only then are
the files removed. Whoever reads the log knows that every version that needs one of these writes is gone.

All times are on the store's clock, which says when events and files were written. To learn the current time, a vacuum writes a small file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging

from pyspark_lookup.errors import (
    CommitUnknownError,
    OptionError,
    PysparkLookupError,
    UfsError,
    UfsNotFoundError,
    UfsUnavailableError,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.managed.log import Event, NotificationLog, TableState, Vacuum
from pyspark_lookup.sources.managed.log import state as properties
from pyspark_lookup.storage.stores import LOG_DIRECTORY, FileVersion
from pyspark_lookup.storage.stores.store import is_data_file, is_own, whole_name
from pyspark_lookup.storage.ufs import Ufs

_log = logging.getLogger("pyspark_lookup.writing")

_SHARE = 0.1
"""The least time between two vacuums that commits start, as a share of `lookup.write.vacuum-after`."""


@dataclasses.dataclass(frozen=True)
class Vacuumed:
    """The result of a vacuum: how many data files it has removed, and their size in bytes.

    `oldest`: every version from this log position on can still be read (None: all versions can).
    """

    files: int
    bytes: int
    oldest: int | None


def vacuum_if_due(ufs: Ufs, log: NotificationLog, nonce: str) -> None:
    """Vacuum after a commit if the table's property `lookup.write.vacuum-after` asks for it, at most ten times in that period.

    Errors are only logged, because the commit has succeeded.
    """
    state = log.cached_state()
    if state is None:
        return
    try:
        after_s = properties.parse_properties(state.definition.properties).vacuum_after_s
        if after_s is None:
            return
        put_at_s, now_s = log.put_at_s(state.vacuumed_at), log.put_at_s(state.position)
        between_s = after_s * (_SHARE if state.oldest > 1 else 1)
        if put_at_s is None or now_s is None or abs(now_s - put_at_s) >= between_s:
            vacuum(ufs, log, nonce, after_s, force=False, unasked=True)
    except PysparkLookupError as problem:
        _log.warning("%s was not vacuumed: %s", log.redacted_path, problem)


def vacuum(
    ufs: Ufs, log: NotificationLog, nonce: str, older_than_s: float, force: bool, unasked: bool = False
) -> Vacuumed:
    """Remove the files that no version of the last `older_than_s` seconds needs.

    `unasked`: a commit has started this vacuum. The log then gets an event even if nothing is removed, so that other commits know of the
    vacuum. Raises OptionError if `older_than_s` is less than `properties.KEPT_S` and `force` is not set, UfsNotFoundError if there is no
    table, and UfsError if the store fails; the next vacuum then removes the rest.
    """
    if older_than_s < 0 or (older_than_s < properties.KEPT_S and not force):
        raise OptionError(
            f"argument older_than = {older_than_s:g} s: give at least {properties.KEPT_S:g} s, because queries and writes under way may "
            "need the files; if nothing reads or writes the table meanwhile, force=True allows any time from 0 on, but "
            "older versions, and changes that streams have not read yet, can then no longer be read"
        )
    where = log.redacted_path
    state = log.latest()
    if state is None:
        raise UfsNotFoundError(f"{where} is not a managed table, so there is nothing to vacuum: check the path")
    table_id = state.table_id
    log_retention_s = properties.parse_properties(state.definition.properties).log_retention_s
    until_s = _now_s(ufs, log, nonce) - older_than_s
    oldest = _oldest(log, state, until_s)

    def make_event(state: TableState, nonce: str, at_s: float) -> Event | None:
        if state.table_id != table_id or (oldest is None and not unasked):
            return None
        new_oldest = max(oldest or 1, state.oldest)
        ids = _removable(state, new_oldest) if oldest is not None else ()
        pages = new_oldest // state.page > state.oldest // state.page or state.oldest < new_oldest < state.since
        if not ids and not pages and not unasked:
            return None
        return Vacuum(state.position + 1, state.table_id, nonce, at_s, ids, new_oldest)

    try:
        state = log.append(make_event, after=state)
    except CommitUnknownError as problem:
        raise_ours(
            UfsUnavailableError(f"{where} was not vacuumed: {problem.__cause__ or problem}; vacuum again"), problem
        )
    if state.table_id != table_id:
        raise UfsNotFoundError(f"{where} was dropped and recreated during this vacuum: vacuum it again")
    removed_files = _sweep(ufs, log, state, until_s)
    log.pages.trim(state, until_s - log_retention_s)
    return Vacuumed(
        len(removed_files), sum(file.size for file in removed_files), state.oldest if state.oldest > 1 else None
    )


def _now_s(ufs: Ufs, log: NotificationLog, nonce: str) -> float:
    """The current time on the store's clock, taken from a file that is written for this purpose."""
    url = f"{log.url}/{LOG_DIRECTORY}/vacuum-{nonce}"
    ufs.put_if_absent(url, nonce.encode())
    try:
        return _put_at_s(ufs.get_meta(url))
    finally:
        with contextlib.suppress(UfsError):
            ufs.delete(url)


def _put_at_s(file: FileVersion) -> float:
    if file.modified_at_s is None:
        raise UfsError(
            f"{redact('path', file.url)}: the store does not say when this file was written, so the table cannot be vacuumed: move it to a "
            "store that tells the time of a write"
        )
    return file.modified_at_s


def _oldest(log: NotificationLog, state: TableState, until_s: float) -> int | None:
    """The position of the version that was current at `until_s`; None if there was none, or the log no longer has it."""
    position = log.find_position(state, until_s)
    if position is None:
        return None
    earlier_state = log.pages.find_state(state, position)
    return max((change.position for change in earlier_state.changes if change.position <= position), default=None)


def _removable(state: TableState, oldest: int) -> tuple[int, ...]:
    """The ids of the committed writes whose files no version from the position `oldest` on needs."""
    if oldest < state.since:
        return ()
    needed_ids = {write.id for write in state.find_needed(oldest)}
    ended_writes = (write for write in state.writes.values() if write.committed and (write.ended_at or 0) <= oldest)
    return tuple(write.id for write in ended_writes if write.does_something and write.id not in needed_ids)


def _sweep(ufs: Ufs, log: NotificationLog, state: TableState, until_s: float) -> list[FileVersion]:
    """Remove the files that the log does not name and that were written before `until_s`. Returns the removed data files.

    Only files with names that this package gives are removed. A stream's checkpoint and files of other programs stay.
    """
    named_paths = {file.path for file in log.pages.files(state)}
    open_prefixes = tuple(f"write-{write.id:020d}/" for write in state.open_writes())
    heartbeat_prefixes = tuple(f"{LOG_DIRECTORY}/heartbeats/{write.id:020d}-" for write in state.open_writes())
    removed_files = []
    for file in ufs.list_tree(log.url):
        path = file.url.removeprefix(log.url + "/")
        if path in named_paths or path.startswith((*open_prefixes, *heartbeat_prefixes)) or _put_at_s(file) > until_s:
            continue
        whole = whole_name(path)
        is_data = is_data_file(whole)
        # In the log's directory only heartbeats, files that tell the time (see `_now_s`) and unfinished files are removed.
        is_temporary = path.startswith((f"{LOG_DIRECTORY}/heartbeats/", f"{LOG_DIRECTORY}/vacuum-")) or path != whole
        if not is_data and not (is_temporary and is_own(whole)):
            continue
        ufs.delete(file.url)
        if is_data:
            removed_files.append(file)
    return removed_files
