"""`NotificationLog`: a managed table's log in the store, one file per event, and the host's cached copy of the log.

Each file `<table>/_lookup/log/<position>.json` is one event. Writers race for the first free position. The store creates a file only if none
of that name exists, so exactly one writer wins, and all readers see the events in one order. A reader finds new events by asking for the next
position. Then it asks again for the last event that it knows, to make sure that the table is still the same.

The events up to a position add up to a state (`TableState`). `<table>/_lookup/checkpoints/` has the states at some positions, under names
that make a listing show the newest first. This process and this host cache the latest state that they have read.

The log is divided into pages of `PAGE` events. The latest state can tell all versions of the last two pages. Each page before these has a
checkpoint at its end, which can tell the versions of that page. `LogPages` reads these checkpoints, and removes pages that no longer matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pyspark_lookup.core.decoding import (
    UNREADABLE,
    as_count,
    as_counts,
    as_number,
    as_positive,
    as_text,
    as_texts,
    describe_fault,
)
from pyspark_lookup.core.write_ids import ValidWriteIdList
from pyspark_lookup.errors import (
    CommitUnknownError,
    DamagedFileError,
    PutUnknownError,
    PysparkLookupError,
    SourceChangedError,
    UfsError,
    UfsNotFoundError,
    UfsUnavailableError,
    VersionGoneError,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.managed.log import state as properties
from pyspark_lookup.sources.managed.log.events import (
    DIGITS,
    FORMAT,
    DataFile,
    Event,
    EventFiles,
    LaterReleaseError,
    WriteMode,
    definition_json,
    event_bytes,
    parse,
    parse_definition,
    parse_event,
    parse_files,
    parse_table_id,
    seal,
)
from pyspark_lookup.sources.managed.log.state import Change, TableState, TableWrite, TableWrites
from pyspark_lookup.storage.block_cache import make_path_key
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk, key_of
from pyspark_lookup.storage.stores import LOG_DIRECTORY, FileVersion
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.executions import read_again

_log = logging.getLogger("pyspark_lookup.notifications")
_EVERY = 50  # events from one checkpoint to the next
_CHECKPOINTS_KEPT = 3


class Checkpoints:
    """The checkpoints of the table at `url`. A checkpoint is a file with the table's state at a position.

    The last few checkpoints stay, and those at the ends of pages.
    """

    def __init__(self, ufs: Ufs, url: str) -> None:
        self._ufs = ufs
        self._directory = f"{url}/{LOG_DIRECTORY}/checkpoints"

    def _path(self, position: int) -> str:
        return f"{self._directory}/{10**DIGITS - position:0{DIGITS}d}.json"  # so that a listing shows the newest first

    def newest_first(self) -> Iterator[TableState]:
        """The states in the checkpoints, the newest first. A damaged or vanished checkpoint is skipped, with a logged warning. Raises
        LaterReleaseError for a checkpoint of a later format."""
        for at_most in (_CHECKPOINTS_KEPT, None):
            try:
                files = self._ufs.list_files(self._directory, after="", at_most=at_most)
            except UfsNotFoundError:
                return
            for file in files[0 if at_most else _CHECKPOINTS_KEPT :]:
                try:
                    (data,) = self._ufs.read_ranges(file.as_immutable(), [(0, file.size)])
                    yield parse_state(data, redact("path", file.url))
                except LaterReleaseError:
                    raise  # older checkpoints and events may be trimmed, and would then seem to be missing
                except (DamagedFileError, UfsNotFoundError, SourceChangedError) as problem:
                    _log.warning(
                        "a checkpoint of the log cannot be read; reading an older one, or the log from its beginning: %s",
                        problem,
                    )
            if len(files) < _CHECKPOINTS_KEPT:
                break

    def read(self, position: int) -> TableState:
        """The state in the checkpoint at a position.

        Raises UfsNotFoundError if there is no checkpoint, SourceChangedError if the checkpoint was removed or replaced meanwhile,
        DamagedFileError if it is malformed.
        """
        file = self._ufs.get_meta(self._path(position))
        (data,) = self._ufs.read_ranges(file.as_immutable(), [(0, file.size)])
        return parse_state(data, redact("path", file.url))

    def page_ends(self, page: int) -> list[int]:
        """The positions of the checkpoints at the ends of pages, ascending. One LIST. `page`: the number of events in a page."""
        try:
            files = self._ufs.list_files(self._directory)
        except UfsNotFoundError:
            return []
        names = (file.url.rsplit("/", 1)[-1].removesuffix(".json") for file in files)
        positions = (10**DIGITS - int(name) for name in names if name.isdecimal())
        return sorted(position for position in positions if position % page == 0)

    def put_if_due(self, state: TableState) -> bool:
        """Write a checkpoint of the state if one is due at its position. Returns whether that position ends a page.

        Errors of the store are ignored: without the checkpoint, readers only need longer.
        """
        every = math.gcd(_EVERY, state.page)
        if state.position % every:
            return False
        with contextlib.suppress(UfsError):
            self._ufs.put_if_absent(self._path(state.position), seal(state_to_json(state)))
            # The latest few stay: a reader that listed them before this one was written may still be reading one of them.
            old = state.position - _CHECKPOINTS_KEPT * every
            if old > 0 and old % state.page:
                self._ufs.delete(self._path(old))
        return state.position % state.page == 0

    def delete(self, position: int) -> None:
        self._ufs.delete(self._path(position))


def state_to_json(state: TableState) -> dict[str, Any]:
    """The state as a JSON object, which `state_from_json` reads."""
    writes = [
        [
            write.id,
            write.mode.value,
            write.allocated_at,
            write.ended_at,
            write.committed,
            [[file.path, file.size, file.rows] for file in write.files],
            [[file.path, file.size, file.rows] for file in write.deletes],
            list(write.replaces),
            [write.least, write.rank],
            write.vacuumed,
            write.nonce,
        ]
        for write in state.writes.values()
    ]
    return {
        "format": FORMAT,
        "table": state.table_id,
        "position": state.position,
        "nonce": state.nonce,
        "page": state.page,
        "since": state.since,
        "watermark": state.watermark,
        "high_watermark": state.high_watermark,
        "replaced_by": state.replaced_by,
        "keyed_by": state.keyed_by,
        "rekeyed_at": state.rekeyed_at,
        "deleted_where_at": state.deleted_where_at,
        "writes": writes,
        "definitions": [[position, definition_json(definition)] for position, definition in state.definitions],
        "batches": state.batches,
        "oldest": state.oldest,
        "vacuumed": state.vacuumed_at,
        "changes": [[change.position, change.at_s, change.write_id] for change in state.changes],
    }


def state_from_json(record: Mapping[str, Any], origin: str) -> TableState:
    """The state that `state_to_json` wrote. Raises DamagedFileError for a malformed record. `origin` names the record in the error."""
    try:
        head = parse_table_id(record["table"]), as_count(record["position"]), as_text(record["nonce"])
        state = TableState(*head, as_positive(record["page"]))
        state.since, state.watermark = as_count(record["since"]), as_count(record["watermark"])
        state.high_watermark = as_count(record["high_watermark"])
        state.replaced_by, state.keyed_by = as_count(record["replaced_by"]), as_count(record["keyed_by"])
        state.rekeyed_at = as_count(record["rekeyed_at"])
        state.deleted_where_at = as_count(record.get("deleted_where_at", 0))
        state.writes = TableWrites(map(_parse_write, record["writes"]))
        state.definitions = [(as_count(position), parse_definition(text)) for position, text in record["definitions"]]
        state.oldest, state.vacuumed_at = as_count(record["oldest"]), as_count(record.get("vacuumed", 1))
        state.batches = {as_text(query): as_count(batch) for query, batch in record["batches"].items()}
        state.changes = [
            Change(as_count(position), as_number(at), None if id_ is None else as_count(id_))
            for position, at, id_ in record["changes"]
        ]
        _check(state, len(record["writes"]))
    except UNREADABLE as problem:
        raise DamagedFileError(f"{origin} is not a state of a table's log: {describe_fault(problem)}") from None
    return state


def _parse_write(row: Any) -> TableWrite:
    id_, mode, allocated_at, ended_at, committed, files, deletes, replaces, (least, rank), vacuumed, nonce = row
    if not isinstance(committed, bool) or not isinstance(vacuumed, bool) or not isinstance(mode, str):
        raise ValueError(f"write {id_!r}: its mode is not text, or a flag is not true or false")
    return TableWrite(
        as_count(id_),
        WriteMode(mode),
        as_count(allocated_at),
        parse_files(files),
        None if ended_at is None else as_count(ended_at),
        committed,
        parse_files(deletes),
        as_counts(replaces),
        as_count(least),
        as_count(rank),
        vacuumed,
        as_text(nonce),
    )


def _check(state: TableState, rows: int) -> None:
    """Raise ValueError if the parts of a parsed state contradict each other. `rows`: the number of writes in the parsed record."""
    changes = [change.position for change in state.changes]
    definition_positions = [position for position, _ in state.definitions]
    for positions in (changes, definition_positions):
        begins = positions and (positions[0] == 1 if not state.since else 1 <= positions[0] <= state.since)
        if not begins or positions != sorted(set(positions)) or positions[-1] > state.position:
            raise ValueError(
                "the positions of its changes or definitions begin too late, are out of order, or are beyond the end of the log"
            )
    is_inside = 1 <= state.oldest <= state.position and 0 <= state.since < state.position
    if not is_inside:
        raise ValueError(f"position {state.oldest} or {state.since} is outside the log, which ends at {state.position}")
    ids = [write.id for write in state.writes.values()]
    later = [id_ for id_ in ids if id_ > state.watermark]
    is_complete = later == list(range(state.watermark + 1, state.watermark + 1 + len(later)))
    if (
        len(ids) != rows
        or ids != sorted(ids)
        or not is_complete
        or state.watermark + len(later) != state.high_watermark
    ):
        raise ValueError("write ids are out of order, or some are missing")
    for write in state.writes.values():
        is_inside = 1 <= write.allocated_at < (write.ended_at or state.position + 1) <= state.position + 1
        has_ranks = 1 <= write.least <= write.rank if write.replaces else write.least == write.rank == write.id
        if not write.id or not is_inside or not has_ranks or (write.committed and write.ended_at is None):
            raise ValueError(f"the positions or ranks of write {write.id} contradict each other")
    commits = {write.ended_at: write.id for write in state.writes.values() if write.committed}
    changed_ids = {c.position: c.write_id for c in state.changes if c.write_id is not None and c.position > state.since}
    if changed_ids != {
        position: id_ for position, id_ in commits.items() if position is not None and position > state.since
    }:
        raise ValueError("its changes are not those of its committed writes")


def parse_state(data: bytes, origin: str) -> TableState:
    """The state in the bytes of a checkpoint. Raises DamagedFileError for malformed bytes, NotSupportedError for the format of a later
    release."""
    return state_from_json(parse(data, origin), origin)


_STATES_KEPT = 4  # states at the ends of pages that a process caches


class LogPages:
    """The pages of a table's log, each with the same number of events. `redacted_path` names the table in errors.

    A state "covers" a position if it can tell the version and the change at this position. The latest state covers the last two pages. The
    state at the end of an earlier page covers that page. In all methods, `state` is the log's latest state.
    """

    def __init__(self, events: EventFiles, checkpoints: Checkpoints, redacted_path: str) -> None:
        self._events = events
        self._checkpoints = checkpoints
        self._redacted_path = redacted_path
        self._states: dict[tuple[str, int], TableState] = {}
        self._ends: dict[
            tuple[str, str], int
        ] = {}  # (table id, list of write ids) -> the end of the page whose state can tell the list's version

    def find_state(self, state: TableState, position: int) -> TableState:
        """The state that covers a position: `state` itself, or the state at the end of the position's page.

        Raises VersionGoneError if the log no longer has that page.
        """
        return (
            state if position >= state.since else self._page_end_state(state, -(-position // state.page) * state.page)
        )

    def _page_end_state(self, state: TableState, end: int) -> TableState:
        """The state at the end of a page, from this process's cache or the store."""
        end_state = self._states.get((state.table_id, end))
        if end_state is None:
            end_state = self._read(state, end)
            recent = list(self._states.items())[1 - _STATES_KEPT :]
            self._states = {**dict(recent), (state.table_id, end): end_state}
        return end_state

    def _read(self, state: TableState, end: int) -> TableState:
        """Read the state at the end of a page from its checkpoint. If the writer died before it put that checkpoint, the state is computed
        from an earlier checkpoint and the events after it."""
        ends: list[int] = []
        with contextlib.suppress(SourceChangedError):
            with contextlib.suppress(UfsNotFoundError, DamagedFileError):
                end_state = self._checkpoints.read(end)
                if end_state.table_id == state.table_id:
                    return end_state
            ends = self._checkpoints.page_ends(state.page)
            for base in (*reversed([before for before in ends if before < end]), 0):
                with contextlib.suppress(UfsNotFoundError, DamagedFileError):
                    replayed_state = self._replay(state, base, end)
                    if replayed_state is not None:
                        return replayed_state
        first = max(ends[0] - state.page if ends else state.since, state.oldest)
        raise VersionGoneError(
            f"{self._redacted_path}: the log was trimmed, and only versions from {first} on can be read: read one of them, or take a newer list of write "
            "ids (LookupTable.valid_write_ids). A stream starts again with a new checkpoint: with lookup.stream.start = SNAPSHOT it returns all current rows, "
            f"and with lookup.stream.start = {first} the changes that the log still has; those before are lost"
        )

    def _replay(self, state: TableState, base: int, end: int) -> TableState | None:
        """The state at `end`, from the checkpoint at `base` (0: from the first event) and the events after it; None if an event is
        missing."""
        files = [file for _, file in self._events.list_following(base, at_most=end - base)]
        events = [event for _, event in self._events.read(files)]
        if len(events) < end - base or events[-1].position != end:
            return None
        if not base:
            before, events = TableState.begin(events[0], redact("path", self._events.path(1))), events[1:]
        else:
            before = self._checkpoints.read(base)
        return before.advance(events) if before.table_id == state.table_id else None

    def changes(self, state: TableState, after: int, until: int) -> Iterator[tuple[TableState, Change]]:
        """(state, change) for each change after position `after` and up to `until`, in order. The state covers the change's position and the
        position before it.

        Raises the errors of `find_state`.
        """
        while after < until:
            part = (
                state if after >= state.since else self._page_end_state(state, (after // state.page + 1) * state.page)
            )
            for change in part.changes:
                if after < change.position <= until:
                    yield part, change
            after = part.position

    def files(self, state: TableState) -> Iterator[DataFile]:
        """The data files and delete files that any version from position `state.oldest` on needs, and those of open writes. A file may come
        more than once."""
        ends = range(-(-state.oldest // state.page) * state.page, state.since + 1, state.page)
        for part in (*(self._page_end_state(state, end) for end in ends), state):
            for write in part.writes.values():
                if not self.is_vacuumed(state, write):
                    yield from (*write.files, *write.deletes)

    def begin(self, state: TableState) -> int:
        """The position before the first change that the log still has."""
        if state.since and self._events.find_meta(2) is not None:
            return 0
        ends = self._checkpoints.page_ends(state.page) if state.since else []
        return min([state.since, *(end - state.page for end in ends)])

    def is_vacuumed(self, state: TableState, write: TableWrite) -> bool:
        """Whether a vacuum has removed the files of a write. `write` may come from the state of any page."""
        if write.vacuumed:
            return True
        current_write = state.writes.get(write.id)
        if current_write is not None or state.oldest == 1:
            return (current_write or write).vacuumed
        oldest = self.find_state(state, state.oldest)
        if "needed" not in oldest.memo or oldest.memo["needed"][0] != state.oldest:
            oldest.memo["needed"] = state.oldest, {needed_write.id for needed_write in oldest.find_needed(state.oldest)}
        needed_ids = oldest.memo["needed"][1]
        return write.does_something and (write.ended_at or 0) <= state.oldest and write.id not in needed_ids

    def forget(self) -> None:
        """Forget the states that were read: their table may have been dropped."""
        self._states, self._ends = {}, {}

    def find_state_by_write_ids(self, state: TableState, write_ids: ValidWriteIdList) -> TableState:
        """The state that can tell the version that an earlier list of write ids describes.

        It is the state at the end of a page: the first page at whose end all writes of the list were committed.
        """
        place = state.table_id, str(write_ids)
        if place not in self._ends:
            end_state = self._search_pages(state, write_ids)
            if end_state is state:
                return state
            self._ends = {**dict(list(self._ends.items())[1 - _STATES_KEPT :]), place: end_state.position}
        return self._page_end_state(state, self._ends[place])

    def _search_pages(self, state: TableState, write_ids: ValidWriteIdList) -> TableState:
        page_ends = self._checkpoints.page_ends(state.page)
        ends = range(page_ends[0], state.since + 1, state.page) if page_ends else range(0)
        low, high = 0, len(ends)
        while low < high:
            middle = (low + high) // 2
            if self._page_end_state(state, ends[middle]).high_watermark >= write_ids.high_watermark:
                high = middle
            else:
                low = middle + 1
        for end in ends[low:]:
            end_state = self._page_end_state(state, end)
            if not any(write_ids.is_valid(write.id) for write in end_state.open_writes()):
                return end_state
        return state

    def trim(self, state: TableState, until_s: float) -> int:
        """Remove the events and checkpoints of pages that no version from `state.oldest` on needs. Returns the number of events removed.

        `until_s`: a page is removed only if its last event was put before this time, on the store's clock. The first event always stays,
        because no second writer can create the table while that event exists.
        """
        ends = self._checkpoints.page_ends(state.page)
        last_end = 0
        # All pages up to `end` may go, because the page after them has a checkpoint at `next_end`, which covers that page.
        for next_end in ends[1:]:
            end = next_end - state.page
            if end >= state.oldest or end > state.since:
                break
            event = self._events.find_meta(end)  # None: another process began to trim this page and died
            if event is not None and (event.modified_at_s is None or event.modified_at_s > until_s):
                break
            last_end = end
        files = self._events.list_following(1, at_most=last_end) if last_end else []
        positions = [position for position, _ in files if position <= last_end]
        self._events.delete(positions)
        for end in ends:
            if end <= last_end:
                self._checkpoints.delete(end)
        return len(positions)


_TAIL_AT_MOST = 100  # the host's record of the log has at most this many events after its state
_RACES = 1000  # an append fails after it has lost this many positions in a row to faster writers
_PROBED = 64  # new events are requested by name up to this number, in stores that can only list the whole log
TRUSTED_S = 86400.0
"""How many seconds a host trusts a cached state after the store has confirmed it. Later, events may have been put and trimmed meanwhile, so the
log is read from the newest checkpoint on."""
_CLOCK_STEP_S = 60.0  # a clock may be set back by this much without effect
_IN_VAIN = 8  # an append fails after it has lost a position this often to an event that the store does not return


@dataclasses.dataclass(frozen=True)
class _CachedLog:
    """The latest state that is known, and how the host's two records on disk hold it.

    One record has the state at position `base`. The other has `tail`, the events after `base` as bytes, so that a commit rewrites only this
    small record. `last_file`: the file of the state's last event (None: not requested yet). `looked_s`: when the store last confirmed that
    this is the latest state, by the wall clock.
    """

    state: TableState
    base: int
    tail: tuple[bytes, ...]
    last_file: FileVersion | None
    looked_s: float = 0.0


class NotificationLog:
    """The log of the table at `url`, as this process reads and writes it. Thread-safe, but not to be used after a fork."""

    def __init__(self, ufs: Ufs, context: HostContext, url: str) -> None:
        self._ufs = ufs
        self._context = context
        self.url = url
        self.redacted_path = redact("path", url)
        self._events = EventFiles(ufs, url)
        self._checkpoints = Checkpoints(ufs, url)
        self.pages = LogPages(self._events, self._checkpoints, self.redacted_path)
        self._key = key_of("log", ufs.scope, url)
        self._lock = threading.Lock()
        self._cached_log: _CachedLog | None = None

    # --- reading ----------------------------------------------------------------------------------

    def cached_state(self, position: int = 0) -> TableState | None:
        """The newest state that this process has cached. If it has none, or only one before `position`, the host's cached state, if that is
        newer.

        None if neither has a state. Makes no call to the store. The state may be that of a table that has been dropped since.
        """
        with self._lock:
            if self._cached_log is None or self._cached_log.state.position < position:
                recorded_log = self._read_record()
                if recorded_log is not None and (
                    self._cached_log is None or recorded_log.state.position > self._cached_log.state.position
                ):
                    self._cached_log = recorded_log
            return self._cached_log.state if self._cached_log is not None else None

    def latest(self) -> TableState | None:
        """The table's state now; None if there is no log. Two calls to the store if the log has no new event since this host last read it.

        Raises DamagedFileError if the log contradicts itself, NotSupportedError if its format is that of a later release.
        """
        self.cached_state()
        with self._lock:
            cached_log = self._cached_log
        # Event 1 stays when the events after it are trimmed, so a missing event 2 does not mean that nothing is new.
        if cached_log is None or self._age_s(cached_log) > TRUSTED_S or cached_log.state.position == 1:
            return self._read_all()
        state, cached_file = cached_log.state, cached_log.last_file
        try:
            newer = self._read_following(state)
        except (UfsNotFoundError, SourceChangedError):
            return self._read_all()  # the log is being removed
        # The race: the table may be dropped and recreated between two requests. So the last known event is requested after the next
        # one: if it is still there, the next one belongs to the same table.
        last_file = self._is_same(state, cached_file)
        if last_file is None:
            return self._read_all()
        if newer:
            try:
                state = state.advance(event for _, event in newer)
            except DamagedFileError:
                return self._read_all()  # it is another table's, put between the two requests
            last_file = newer[-1][0]
        if newer or last_file != cached_file or self._age_s(cached_log) > TRUSTED_S / 4:
            self._keep(state, [event for _, event in newer], last_file)
        return state

    def _age_s(self, cached_log: _CachedLog) -> float:
        """Seconds since the store last confirmed to this host that the cached state is the latest; infinity if the clock was set back since
        then."""
        age_s = self._context.clock.wall_s() - cached_log.looked_s
        return age_s if age_s > -_CLOCK_STEP_S else math.inf

    def _read_following(self, state: TableState) -> list[tuple[FileVersion, Event]]:
        """(file, event) of each event after a state."""
        files: list[FileVersion] = []
        for ahead in range(1, 2 if self._ufs.lists_after else _PROBED):
            file = self._events.find_meta(state.position + ahead)
            if file is None:
                return self._events.read(files)
            files.append(file)
        return self._events.read_following(state.position, state.table_id)

    def _is_same(self, state: TableState, cached_file: FileVersion | None) -> FileVersion | None:
        """The file of the state's last event, if the store still has that event; otherwise None."""
        file = self._events.find_meta(state.position)
        if file is None or file == cached_file:
            return file
        try:
            # A copied table has other files with the same contents.
            ((_, event),) = self._events.read([file])
        except (UfsNotFoundError, SourceChangedError):
            return None
        return file if event.nonce == state.nonce else None

    def _read_all(self) -> TableState | None:
        """The latest state, read again from the newest checkpoint and the events after that checkpoint; None if there is no log."""
        with self._lock:
            self._cached_log = None
        self.pages.forget()  # they may belong to a table that was dropped

        def read() -> tuple[TableState | None, list[tuple[FileVersion, Event]]]:
            return self._from_checkpoint() or (None, self._events.read_following(0, None))

        try:
            # The race: events may be trimmed after a checkpoint that did not exist when this read began.
            state, events = read_again(read, DamagedFileError, SourceChangedError)
        except UfsNotFoundError:
            return None
        if not events:
            return None
        state = state or TableState.begin(events[0][1], redact("path", self._events.path(1)))
        try:
            state = state.advance(event for _, event in events[1:])
        except DamagedFileError as problem:
            raise DamagedFileError(
                f"{self.redacted_path}: {problem}: restore the file of that event, or remove the table's directory, which loses its rows"
            ) from None
        self._keep(state, None, events[-1][0])
        return state

    def _from_checkpoint(self) -> tuple[TableState, list[tuple[FileVersion, Event]]] | None:
        """(the newest usable state in a checkpoint, the events from its position on); None if this table has no usable checkpoint."""
        for state in self._checkpoints.newest_first():
            # A writer may put a checkpoint late, after its table was dropped and another one created. A copy of a table may have a
            # checkpoint that is ahead of its events.
            with contextlib.suppress(DamagedFileError):
                events = self._events.read_following(state.position - 1, state.table_id)
                if events and (events[0][1].nonce, events[0][1].table_id) == (state.nonce, state.table_id):
                    return state, events
        return None

    def find_position(self, state: TableState, until_s: float) -> int | None:
        """The position before the first event that was put after `until_s`, on the store's clock; the last position if there is no such
        event.

        None if the first event that the log still has was put after `until_s`.
        """
        begin = self.pages.begin(state)
        late_positions = (position for position, at_s in self.put_times(begin).items() if at_s > until_s)
        position = min(min(late_positions, default=state.position + 1) - 1, state.position)
        return None if position == begin else position

    def put_at_s(self, position: int) -> float | None:
        """When an event was put, on the store's clock; None if the event has been trimmed.

        Raises UfsError if the store does not tell when a file was written.
        """
        with self._lock:
            cached_log = self._cached_log
        last_file = cached_log.last_file if cached_log is not None and cached_log.state.position == position else None
        if last_file is not None and last_file.modified_at_s is not None:
            return last_file.modified_at_s
        file = self._events.find_meta(position)
        if file is None:
            return None
        if file.modified_at_s is None:
            raise UfsError(
                f"{redact('path', file.url)}: the store does not say when this file was written, so neither time travel nor vacuum works "
                "for this table: move it to a store that tells the time of a write"
            )
        return file.modified_at_s

    def put_times(self, after: int, at_most: int | None = None) -> dict[int, float]:
        """For each event after the position `after`: its position, and when it was put, on the store's clock. One LIST.

        Events for which the store tells no time are left out.
        """
        files = self._events.list_following(after, at_most)
        return {position: file.modified_at_s for position, file in files if file.modified_at_s is not None}

    # --- the host's record of the log -------------------------------------------------------------

    def _read_record(self) -> _CachedLog | None:
        """The cached log in this host's cache directory; None if the directory has no readable record of the log."""
        if self._context.disk is None:
            return None
        origin = "the host's record of the log"
        base: TableState | None = self._context.disk.get_record(
            "log", self._key, lambda record: state_from_json(record, origin)
        )
        if base is None:
            return None

        def add_tail(record: Any) -> _CachedLog:
            if record["table"] != base.table_id:
                return without_tail
            texts = tuple(text.encode() for text in as_texts(record["events"]))
            events = [parse_event(text, n, origin) for n, text in enumerate(texts, base.position + 1)]
            last_file = None if record["last"] is None else FileVersion.from_json(record["last"])
            return _CachedLog(base.advance(events), base.position, texts, last_file, as_number(record["looked_s"]))

        without_tail = _CachedLog(base, base.position, (), None)
        return self._context.disk.get_record("log-tail", self._tail_key(base.position), add_tail) or without_tail

    def _keep(self, state: TableState, events: Sequence[Event] | None, last_file: FileVersion | None) -> None:
        """Cache a state, in this process and on the host, unless a newer state of the same table is cached.

        `events`: the events between the cached state and `state`. None: `state` was read from the store as a whole.
        """
        with self._lock:
            previous_log = self._cached_log
            if previous_log is not None and previous_log.state.table_id == state.table_id:
                if previous_log.state.position > state.position:
                    return
                is_successor = events is not None and previous_log.state.position + len(events) == state.position
                tail = (*previous_log.tail, *map(event_bytes, events or ())) if is_successor else None
            else:
                tail = None
            base = previous_log.base if previous_log is not None else 0
            if tail is None or len(tail) > _TAIL_AT_MOST:
                tail, base = None, state.position
            looked_s = self._context.clock.wall_s()
            self._cached_log = _CachedLog(state, base, tail or (), last_file, looked_s)
        if self._context.disk is None:
            return
        try:
            if tail is None:
                self._context.disk.replace_record("log", self._key, state_to_json(state))
                if previous_log is not None:
                    self._context.disk.remove_record("log-tail", self._tail_key(previous_log.base))
            last_record = None if last_file is None else last_file.to_json()
            texts = [text.decode() for text in tail or ()]
            value = {"table": state.table_id, "events": texts, "last": last_record, "looked_s": looked_s}
            self._context.disk.replace_record("log-tail", self._tail_key(base), value)
        except OSError:
            self._context.metrics.inc("cacheFailureCount")
        if previous_log is not None and previous_log.state.table_id == state.table_id:
            self._forget_files(self._context.disk, previous_log.state, state)

    def _forget_files(self, disk: Disk, before: TableState, state: TableState) -> None:
        """Drop the cached blocks of files that `before` names and `state` does not: they were replaced or vacuumed.

        A reader of an old version fetches these blocks again.
        """
        if (before.since, before.oldest) != (state.since, state.oldest):
            obsolete_paths = before.paths() - state.paths()
            disk.forget_files(make_path_key(self._ufs.scope, f"{self.url}/{path}") for path in obsolete_paths)

    def _tail_key(self, base: int) -> str:
        return f"{self._key}-{base}"

    # --- writing ----------------------------------------------------------------------------------

    def create(self, make: Callable[[str, float], Event]) -> TableState | None:
        """Put the first event, which `make` returns for a nonce and the time. Returns the state after it; None if the log already has a first
        event."""
        event = make(self._nonce(), self._context.clock.wall_s())
        file = self._put_event(event)
        if file is None:
            return None
        state = TableState.begin(event, "the event just put")
        with self._lock:
            self._cached_log = None
        self._keep(state, None, file)
        return state

    def append(
        self, make: Callable[[TableState, str, float], Event | None], after: TableState | None = None
    ) -> TableState:
        """Put the event that `make` returns for the current state, a nonce and the time. Returns the state after the event.

        The race: if another writer takes the position first, `make` is called again with the state after that writer's event. If `make`
        returns None, nothing is put, and the current state is returned. Errors of `make` are passed on.

        `after`: the state that another append has just returned; giving it saves a question to the store. Raises CommitUnknownError if the
        store does not say whether the event was put, UfsNotFoundError if the table is gone.
        """
        lost_at, in_vain = 0, 0
        for _ in range(_RACES):
            state, after = after or self.latest(), None
            if state is None:
                raise UfsNotFoundError(
                    f"{self.redacted_path} is not (or no longer) a managed table: its log is empty or gone; check the path"
                )
            event = make(state, self._nonce(), self._context.clock.wall_s())
            if event is None:
                return state
            file = self._put_event(event)
            if file is None:
                # The store may not show yet which event has taken the position: it is asked again, with pauses.
                in_vain = in_vain + 1 if event.position == lost_at else 0
                lost_at = event.position
                if in_vain >= _IN_VAIN:
                    break
                if in_vain:
                    self._context.clock.sleep(min(0.05 * 2**in_vain, 5.0) * self._context.rng.uniform(0.5, 1))
            elif self._has_followed(state, event):
                state = state.advance([event])
                self._keep(state, [event], file)
                if self._checkpoints.put_if_due(state):
                    self._trim(state, file)
                return state
        if in_vain >= _IN_VAIN:
            raise UfsUnavailableError(
                f"{self.redacted_path}: the store says that event {lost_at} of the log exists, but does not return it: try again later"
            )
        raise UfsUnavailableError(
            f"{self.redacted_path}: other writers were faster {_RACES} times in a row: try again later"
        )

    def _trim(self, state: TableState, last_file: FileVersion) -> None:
        """Remove the pages of the log that no readable version needs, once the time that the table's properties set for them is over.

        This time counts back from the last event.
        """
        # The commit has succeeded: an error here must not make its writer repeat it.
        with contextlib.suppress(PysparkLookupError):
            event = last_file if last_file.modified_at_s else self._events.find_meta(state.position)
            put_at_s = None if event is None else event.modified_at_s
            if put_at_s is not None:
                upkeep = properties.parse_properties(state.definition.properties)
                kept_s = (upkeep.vacuum_after_s or properties.KEPT_S) + upkeep.log_retention_s
                self.pages.trim(state, put_at_s - kept_s)

    def _put_event(self, event: Event) -> FileVersion | None:
        """Put an event, and return its file; None if its position is taken.

        Raises CommitUnknownError if the store does not say whether the event was put.
        """
        try:
            return self._ufs.put_if_absent(self._events.path(event.position), event_bytes(event))
        except PutUnknownError as problem:
            raise_ours(self._unknown_error(event, problem), problem)

    def _unknown_error(self, event: Event, problem: Exception) -> CommitUnknownError:
        return CommitUnknownError(
            f"it is unknown whether event {event.position} ({event.kind}) is in the log of {self.redacted_path}: {problem.__cause__ or problem}. "
            f"The event is in the log if {redact('path', self._events.path(event.position))} contains {event.nonce}: look there before you "
            "write again"
        )

    def _has_followed(self, state: TableState, event: Event) -> bool:
        """Whether the event that was just put follows the state for which it was made. If not, the event is removed again.

        The race: between the read of the log and the put, the table may have been dropped and another one created at its path.
        """
        with self._lock:
            cached_file = (
                self._cached_log.last_file if self._cached_log is not None and self._cached_log.state is state else None
            )
        try:
            # Other writers may have seen the event and put theirs after it. So it is removed only if two requests, by name and by LIST,
            # both miss the event before it.
            if self._is_same(state, cached_file) is not None or self._events.is_listed(state.position, state.nonce):
                return True
            self._ufs.delete(self._events.path(event.position))
        except (UfsError, DamagedFileError) as problem:
            raise_ours(self._unknown_error(event, problem), problem)
        with self._lock:
            self._cached_log = None
        return False

    def _nonce(self) -> str:
        return f"{self._context.rng.getrandbits(128):032x}"
