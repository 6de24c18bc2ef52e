"""`NotificationLog`: a managed table's log in the store, one file per event, and what this host has cached of it.

`<table>/_lookup/log/<position>.json` are the events. Writers race for the first free position, and exclusive create lets one of them win,
so all readers see one order. `<table>/_lookup/checkpoints/` holds the state after some of the events; the name of the newest comes first.
Each state that was read is cached in this process and on this host. A reader finds new events by asking for the next position, and makes
sure that the table is still the same by asking for the last event that it knows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pyspark_lookup.core.decoding import as_number, as_texts
from pyspark_lookup.errors import (
    CommitUnknownError,
    DamagedFileError,
    PutUnknownError,
    PysparkLookupError,
    SourceChangedError,
    UfsError,
    UfsNotFoundError,
    UfsUnavailableError,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.managed.log import state as properties
from pyspark_lookup.sources.managed.log.checkpoints import Checkpoints, LogPages, state_from_json, state_to_json
from pyspark_lookup.sources.managed.log.events import Event, EventFiles, event_bytes, parse_event
from pyspark_lookup.sources.managed.log.state import TableState
from pyspark_lookup.storage.block_cache import make_path_key
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk, key_of
from pyspark_lookup.storage.stores import FileVersion
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.executions import read_again

_log = logging.getLogger("pyspark_lookup.notifications")
_TAIL_AT_MOST = 100  # events that the host records after a state
_RACES = 1000  # positions lost in a row to faster writers
_PROBED = 64  # events requested by name, in stores where a listing costs as much as the whole directory
TRUSTED_S = 86400.0
"""How long a host continues from its cached state. After that it reads the log again, because the next events may have been put and trimmed."""
_CLOCK_STEP_S = 60.0  # steps of a clock that are tolerated
_IN_VAIN = 8  # times that a position is lost to an event that the store does not return


@dataclasses.dataclass(frozen=True)
class _CachedLog:
    """The latest state, the file of its last event (None: not requested yet), and how the host's two records hold that state.

    One record holds the state at position `base`, the other the `tail` of events since, so that a commit rewrites only the small one.
    `looked_s`: when the store last said that this is the latest state, by the wall clock.
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
        self._events = EventFiles(ufs, url)
        self._checkpoints = Checkpoints(ufs, url)
        self.pages = LogPages(self._events, self._checkpoints, redact("path", url))
        self._key = key_of("log", ufs.scope, url)
        self._lock = threading.Lock()
        self._cached_log: _CachedLog | None = None

    # --- reading ----------------------------------------------------------------------------------

    def cached_state(self, position: int = 0) -> TableState | None:
        """The newest state that this process has read, or the host's record of one if the process has none as new as `position`.

        None if there is neither. No store call. The state may be of a table that has been dropped since.
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
        """The table's state now; None if there is no log. Two calls if nothing is new since this host last read it.

        Raises DamagedFileError if the log contradicts itself, NotSupportedError if its format is later.
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
        # The race: the table may be dropped and created anew between two requests. So the last known event is requested after the next
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
        """Seconds since the store last told this host that a state is the latest; infinity if the clock was set back since then."""
        age_s = self._context.clock.wall_s() - cached_log.looked_s
        return age_s if age_s > -_CLOCK_STEP_S else math.inf

    def _read_following(self, state: TableState) -> list[tuple[FileVersion, Event]]:
        """(file, event) of the events that follow a state."""
        files: list[FileVersion] = []
        with contextlib.suppress(UfsNotFoundError):
            for ahead in range(1, 2 if self._ufs.lists_after else _PROBED):
                files.append(self._events.get_meta(state.position + ahead))
            return self._events.read_following(state.position, state.table_id)
        return self._events.read(files)

    def _is_same(self, state: TableState, cached_file: FileVersion | None) -> FileVersion | None:
        """The file of the state's last event if it is still that event; None if it is not."""
        try:
            file = self._events.get_meta(state.position)
            if file == cached_file:
                return file
            # A copied table has other files with the same contents.
            ((_, event),) = self._events.read([file])
        except (UfsNotFoundError, SourceChangedError):
            return None
        return file if event.nonce == state.nonce else None

    def _read_all(self) -> TableState | None:
        """The latest state, read anew from the newest checkpoint and the events after it; None if there is no log."""
        with self._lock:
            self._cached_log = None
        self.pages.forget()  # they may be of another history

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
        state = state.advance(event for _, event in events[1:])
        self._keep(state, None, events[-1][0])
        return state

    def _from_checkpoint(self) -> tuple[TableState, list[tuple[FileVersion, Event]]] | None:
        """(the newest checkpoint's state, the events from its position on); None if this table has no checkpoint."""
        for state in self._checkpoints.newest_first():
            # A writer may put a checkpoint late, after its table was dropped and another one created. A copy of a table may have a
            # checkpoint that is ahead of its events.
            with contextlib.suppress(DamagedFileError):
                events = self._events.read_following(state.position - 1, state.table_id)
                if events and (events[0][1].nonce, events[0][1].table_id) == (state.nonce, state.table_id):
                    return state, events
        return None

    def find_position(self, state: TableState, until_s: float) -> int | None:
        """The last position up to which every event was put by `until_s`, on the store's clock; None if the first event that is left was put
        later."""
        begin = self.pages.begin(state)
        late_positions = (position for position, at_s in self.put_times(begin).items() if at_s > until_s)
        position = min(min(late_positions, default=state.position + 1) - 1, state.position)
        return None if position == begin else position

    def put_at_s(self, position: int) -> float | None:
        """When an event was put, on the store's clock; None if the event has been trimmed. Raises UfsError if the store has no such time."""
        with self._lock:
            cached_log = self._cached_log
        last_file = cached_log.last_file if cached_log is not None and cached_log.state.position == position else None
        if last_file is not None and last_file.modified_at_s is not None:
            return last_file.modified_at_s
        try:
            file = self._events.get_meta(position)
        except UfsNotFoundError:
            return None
        if file.modified_at_s is None:
            raise UfsError(f"{redact('path', file.url)}: the store does not say when it was written")
        return file.modified_at_s

    def put_times(self, after: int, at_most: int | None = None) -> dict[int, float]:
        """position -> when that event was put, on the store's clock, for the events after a position. One LIST."""
        files = self._events.list_following(after, at_most)
        return {position: file.modified_at_s for position, file in files if file.modified_at_s is not None}

    # --- what this host knows ---------------------------------------------------------------------

    def _read_record(self) -> _CachedLog | None:
        """The state that the host has on record; None if it has none that can be read."""
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

        `events`: those that led from the cached state to it; None: it was read from the store as a whole.
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
        """Drop the cached blocks of replaced or vacuumed files, which no later state has. A reader of an old version fetches them again."""
        if (before.since, before.oldest) != (state.since, state.oldest):
            obsolete_paths = before.paths() - state.paths()
            disk.forget_files(make_path_key(self._ufs.scope, f"{self.url}/{path}") for path in obsolete_paths)

    def _tail_key(self, base: int) -> str:
        return f"{self._key}-{base}"

    # --- writing ----------------------------------------------------------------------------------

    def create(self, make: Callable[[str, float], Event]) -> TableState | None:
        """Put the first event, which `make` returns for a nonce and the time; None if the log has a first event already."""
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
        """Put the event that `make` returns for the current state, a nonce and the time. Returns the state after it.

        The race: if another writer takes the position first, `make` is called again with the state after that writer's event. If `make`
        returns None, nothing is put; if it raises, so does this. `after`: the state that an append has just returned, which saves asking
        the store. Raises CommitUnknownError if the store does not say whether the event was put, UfsNotFoundError if the table is gone.
        """
        lost_at, in_vain = 0, 0
        for _ in range(_RACES):
            state, after = after or self.latest(), None
            if state is None:
                raise UfsNotFoundError(f"{redact('path', self.url)} is not (or no longer) a managed table")
            event = make(state, self._nonce(), self._context.clock.wall_s())
            if event is None:
                return state
            file = self._put_event(event)
            if file is None:
                # The store may not show the event that took the position yet: it is asked again, with pauses.
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
        redacted_path = redact("path", self.url)
        if in_vain >= _IN_VAIN:
            raise UfsUnavailableError(
                f"{redacted_path}: the store says that event {lost_at} of the log exists, but does not return it: try again later"
            )
        raise UfsUnavailableError(
            f"{redacted_path}: other writers were faster {_RACES} times in a row: try again later"
        )

    def _trim(self, state: TableState, last_file: FileVersion) -> None:
        """Remove the pages that neither the last vacuum nor the table's log retention keeps. Age counts back from the last event."""
        # The commit has succeeded: an error here must not make its writer repeat it.
        with contextlib.suppress(PysparkLookupError):
            put_at_s = last_file.modified_at_s or self._events.get_meta(state.position).modified_at_s
            if put_at_s is not None:
                upkeep = properties.parse_properties(state.definition.properties)
                kept_s = (upkeep.vacuum_after_s or properties.KEPT_S) + upkeep.log_retention_s
                self.pages.trim(state, put_at_s - kept_s)

    def _put_event(self, event: Event) -> FileVersion | None:
        """Put an event; None if its position is taken. Raises CommitUnknownError if the store does not say whether it was put."""
        try:
            return self._ufs.put_if_absent(self._events.path(event.position), event_bytes(event))
        except PutUnknownError as problem:
            raise_ours(self._unknown_error(event, problem), problem)

    def _unknown_error(self, event: Event, problem: Exception) -> CommitUnknownError:
        return CommitUnknownError(
            f"it is unknown whether event {event.position} ({event.kind}) of {redact('path', self.url)} was written: {problem}. "
            f"If the log's event {event.position} has the nonce {event.nonce}, it was: check this before writing again"
        )

    def _has_followed(self, state: TableState, event: Event) -> bool:
        """Whether the event that was just put follows the state for which it was made. If not, it is removed again.

        The race: between the read of the log and the put, the table may have been dropped and another one created at its path.
        """
        with self._lock:
            cached_file = (
                self._cached_log.last_file if self._cached_log is not None and self._cached_log.state is state else None
            )
        try:
            # Others may have seen the event and put theirs after it. So it is removed only if both requests miss the event before it.
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
