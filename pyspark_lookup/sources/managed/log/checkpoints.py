"""`Checkpoints`: states of a managed table's log in the store. Also converts a state to and from JSON, for checkpoints and the host's records.

`LogPages`: earlier states, page by page, and the log's trimming. A state covers the last two pages. For each page before them there is a
checkpoint at its end.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark_lookup.core.decoding import UNREADABLE, as_count, as_counts, as_number, as_positive, as_text
from pyspark_lookup.core.write_ids import ValidWriteIdList
from pyspark_lookup.errors import DamagedFileError, SourceChangedError, UfsError, UfsNotFoundError, VersionGoneError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.managed.log.events import (
    DIGITS,
    FORMAT,
    DataFile,
    EventFiles,
    WriteMode,
    definition_json,
    parse,
    parse_definition,
    parse_files,
    parse_table_id,
    seal,
)
from pyspark_lookup.sources.managed.log.state import Change, TableState, TableWrite, TableWrites
from pyspark_lookup.storage.stores import LOG_DIRECTORY
from pyspark_lookup.storage.ufs import Ufs

_log = logging.getLogger("pyspark_lookup.notifications")
_EVERY = 50  # events between two checkpoints
_CHECKPOINTS_KEPT = 3


class Checkpoints:
    """The checkpoints of the table at `url`: a few of the latest, and one at the end of each page of the log."""

    def __init__(self, ufs: Ufs, url: str) -> None:
        self._ufs = ufs
        self._directory = f"{url}/{LOG_DIRECTORY}/checkpoints"

    def _path(self, position: int) -> str:
        return f"{self._directory}/{10**DIGITS - position:0{DIGITS}d}.json"  # the newest comes first

    def newest_first(self) -> Iterator[TableState]:
        """The checkpoints' states, the newest first; a checkpoint that is damaged or gone is left out, with a warning in the log."""
        for at_most in (_CHECKPOINTS_KEPT, None):
            try:
                files = self._ufs.list_files(self._directory, after="", at_most=at_most)
            except UfsNotFoundError:
                return
            for file in files[0 if at_most else _CHECKPOINTS_KEPT :]:
                try:
                    (data,) = self._ufs.read_ranges(file.as_immutable(), [(0, file.size)])
                    yield parse_state(data, redact("path", file.url))
                except (DamagedFileError, UfsNotFoundError, SourceChangedError) as problem:
                    _log.warning(
                        "a checkpoint of the log cannot be read; reading an older one, or the log from its beginning: %s",
                        problem,
                    )
            if len(files) < _CHECKPOINTS_KEPT:
                break

    def read(self, position: int) -> TableState:
        """The state in the checkpoint at a position. Raises UfsNotFoundError or SourceChangedError if there is none, DamagedFileError."""
        file = self._ufs.get_meta(self._path(position))
        (data,) = self._ufs.read_ranges(file.as_immutable(), [(0, file.size)])
        return parse_state(data, redact("path", file.url))

    def page_ends(self, page: int) -> list[int]:
        """The positions of the checkpoints that end a page, ascending. One LIST. `page`: the number of events in a page."""
        try:
            files = self._ufs.list_files(self._directory)
        except UfsNotFoundError:
            return []
        names = (file.url.rsplit("/", 1)[-1].removesuffix(".json") for file in files)
        positions = (10**DIGITS - int(name) for name in names if name.isdecimal())
        return sorted(position for position in positions if position % page == 0)

    def put_if_due(self, state: TableState) -> bool:
        """Write a checkpoint if the state is at a position that gets one. Returns whether that position ends a page.

        A failure to write is ignored: without the checkpoint, reading the log only takes longer.
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
    """The state as a JSON value."""
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
    """The state that `state_to_json` wrote. Raises DamagedFileError if it is malformed."""
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
        raise DamagedFileError(f"{origin} is not a state of a table's log: {problem!r}") from None
    return state


def _parse_write(row: Any) -> TableWrite:
    id_, mode, allocated_at, ended_at, committed, files, deletes, replaces, (least, rank), vacuumed, nonce = row
    if not isinstance(committed, bool) or not isinstance(vacuumed, bool) or not isinstance(mode, str):
        raise ValueError(f"write {id_!r} has values of a wrong type")
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
    """Raise ValueError if the parts of a state that was read contradict each other."""
    changes = [change.position for change in state.changes]
    definition_positions = [position for position, _ in state.definitions]
    for positions in (changes, definition_positions):
        begins = positions and (positions[0] == 1 if not state.since else 1 <= positions[0] <= state.since)
        if not begins or positions != sorted(set(positions)) or positions[-1] > state.position:
            raise ValueError("positions begin after the table's first event, are out of order, or end after its last")
    is_inside = 1 <= state.oldest <= state.position and 0 <= state.since < state.position
    if not is_inside:
        raise ValueError("its positions are outside the log")
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
            raise ValueError(f"write {write.id} contradicts itself")
    commits = {write.ended_at: write.id for write in state.writes.values() if write.committed}
    changed_ids = {c.position: c.write_id for c in state.changes if c.write_id is not None and c.position > state.since}
    if changed_ids != {
        position: id_ for position, id_ in commits.items() if position is not None and position > state.since
    }:
        raise ValueError("its commits and its changes differ")


def parse_state(data: bytes, origin: str) -> TableState:
    """The state in a checkpoint's file. Raises DamagedFileError, and NotSupportedError for a later format."""
    return state_from_json(parse(data, origin), origin)


_STATES_KEPT = 4  # states at the ends of pages


class LogPages:
    """The pages of a table's log; `redacted_path` names the table in errors. In all methods `state` is the log's latest."""

    def __init__(self, events: EventFiles, checkpoints: Checkpoints, redacted_path: str) -> None:
        self._events = events
        self._checkpoints = checkpoints
        self._redacted_path = redacted_path
        self._states: dict[tuple[str, int], TableState] = {}
        self._ends: dict[
            tuple[str, str], int
        ] = {}  # for lists of write ids, the end of the page whose state covers them

    def find_state(self, state: TableState, position: int) -> TableState:
        """The state that covers a position: `state`, or an earlier one, at the end of the position's page.

        Raises VersionGoneError if the log no longer has that position.
        """
        return (
            state if position >= state.since else self._page_end_state(state, -(-position // state.page) * state.page)
        )

    def _page_end_state(self, state: TableState, end: int) -> TableState:
        """The state at the end of a page."""
        end_state = self._states.get((state.table_id, end))
        if end_state is None:
            end_state = self._read(state, end)
            recent = list(self._states.items())[1 - _STATES_KEPT :]
            self._states = {**dict(recent), (state.table_id, end): end_state}
        return end_state

    def _read(self, state: TableState, end: int) -> TableState:
        """The state at the end of a page: from its checkpoint, or, if the writer died before it wrote one, from an earlier checkpoint and the
        events since."""
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
            f"{self._redacted_path}: the log of table {state.table_id} was trimmed: it has the versions from position {first} on. Restart "
            f"a stream with a new checkpoint, from the current table (lookup.stream.start = SNAPSHOT) or, without the changes before them, from "
            f"later changes (lookup.stream.start = {first})"
        )

    def _replay(self, state: TableState, base: int, end: int) -> TableState | None:
        """The state at `end`, from the checkpoint at `base` (0: from the first event) and the events since; None if an event is missing."""
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
        """(state, change) of the changes after position `after`, up to `until`, in order. The state covers the change's position and the one
        before it.

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
        """The files that versions from `state.oldest` on need, and those of open writes. A file may come more than once."""
        ends = range(-(-state.oldest // state.page) * state.page, state.since + 1, state.page)
        for part in (*(self._page_end_state(state, end) for end in ends), state):
            for write in part.writes.values():
                if not self.is_vacuumed(state, write):
                    yield from (*write.files, *write.deletes)

    def begin(self, state: TableState) -> int:
        """The position before the first change that the log still has."""
        if state.since:
            with contextlib.suppress(UfsNotFoundError):
                self._events.get_meta(2)
                return 0
        ends = self._checkpoints.page_ends(state.page) if state.since else []
        return min([state.since, *(end - state.page for end in ends)])

    def is_vacuumed(self, state: TableState, write: TableWrite) -> bool:
        """Whether the files of a write, of any page, have been vacuumed."""
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
        """Forget the states that were read."""
        self._states, self._ends = {}, {}

    def find_state_by_write_ids(self, state: TableState, write_ids: ValidWriteIdList) -> TableState:
        """The state that covers an earlier list of write ids: it is at the end of the first page by which all writes of the list were committed."""
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

        `until_s`: only pages whose last event was put before this time, on the store's clock. The first event always stays: its put creates
        a table.
        """
        ends = self._checkpoints.page_ends(state.page)
        last_end = 0
        # The page before each end can be removed, because the checkpoint at the end covers what follows.
        for next_end in ends[1:]:
            end = next_end - state.page
            if end >= state.oldest or end > state.since:
                break
            with contextlib.suppress(UfsNotFoundError):  # another process has begun to trim this page and died
                put_at_s = self._events.get_meta(end).modified_at_s
                if put_at_s is None or put_at_s > until_s:
                    break
            last_end = end
        files = self._events.list_following(1, at_most=last_end) if last_end else []
        positions = [position for position, _ in files if position <= last_end]
        self._events.delete(positions)
        for end in ends:
            if end <= last_end:
                self._checkpoints.delete(end)
        return len(positions)
