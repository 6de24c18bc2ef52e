"""`LogPages`: earlier states of a managed table's log, page by page, and the log's trimming.

A state covers the last two pages. For each page before them there is a checkpoint at its end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pyspark_lookup.core.write_ids import ValidWriteIdList
from pyspark_lookup.errors import DamagedFileError, SourceChangedError, UfsNotFoundError, VersionGoneError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.managed.log.checkpoints import Checkpoints
from pyspark_lookup.sources.managed.log.events import DataFile, EventFiles
from pyspark_lookup.sources.managed.log.state import TableState
from pyspark_lookup.sources.managed.log.writes import Change, TableWrite

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
