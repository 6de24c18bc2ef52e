"""`NotificationLog`: a managed table's log in the store, one file per event, and how far this host knows it.

`<table>/_lookup/log/<position>.json` are the events, put by exclusive create at the first free position, so
that all readers see one order. `<table>/_lookup/checkpoints/` holds the state after some of them, named so
that the newest comes first. A state once read is kept in this process and on this host; what is new since
is found by asking for the next position, and that the table is still the same one by asking for the last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pyspark_lookup.base.decoding import number_of, texts_of
from pyspark_lookup.base.errors import (
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
from pyspark_lookup.io.block_cache import make_path_key
from pyspark_lookup.io.context import HostContext
from pyspark_lookup.io.disk import Disk, key_of
from pyspark_lookup.io.stores import FileVersion
from pyspark_lookup.io.ufs import Ufs
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.table.log import properties
from pyspark_lookup.table.log.checkpoints import Checkpoints, state_of_json, state_to_json
from pyspark_lookup.table.log.event_files import EventFiles
from pyspark_lookup.table.log.events import Event, event_bytes, event_of
from pyspark_lookup.table.log.pages import LogPages
from pyspark_lookup.table.log.state import TableState
from pyspark_lookup.table.restarts import read_again

_log = logging.getLogger("pyspark_lookup.notifications")
_TAIL_AT_MOST = 100  # events in the host's record beside a state
_RACES = 1000  # positions lost in a row: others are putting events faster than one can be put here
_PROBED = 64  # events that are asked for by name where a listing costs what the whole directory holds
TRUSTED_S = 86400.0
"""For how long a host goes on from the state that it knows. Later the log is read anew: what came next may have been put and trimmed."""
_CLOCK_STEP_S = 60.0  # back, that a clock is forgiven
_IN_VAIN = 8  # times that one position is lost to an event that the store does not show


@dataclasses.dataclass(frozen=True)
class _Known:
    """A state, the file of its last event as it was seen (None: not yet), and how the host's records tell it.

    They hold the state after `base`, and the events since then: a commit changes the small one of the two. `looked_s`: the wall
    clock's time when it was the latest.
    """

    state: TableState
    base: int
    tail: tuple[bytes, ...]
    last: FileVersion | None
    looked_s: float = 0.0


class NotificationLog:
    """The log of the table at `url`, as this process reads and writes it. Safe for threads, not across forks."""

    def __init__(self, ufs: Ufs, context: HostContext, url: str) -> None:
        self._ufs = ufs
        self._context = context
        self.url = url
        self._events = EventFiles(ufs, url)
        self._checkpoints = Checkpoints(ufs, url)
        self.pages = LogPages(self._events, self._checkpoints, redact("path", url))
        self._key = key_of("log", ufs.scope, url)
        self._lock = threading.Lock()
        self._known: _Known | None = None

    # --- reading ----------------------------------------------------------------------------------

    def known(self, position: int = 0) -> TableState | None:
        """The newest state this process has read, or this host, if it goes as far as `position`. No store call.

        It may be of a table that was dropped since.
        """
        with self._lock:
            if self._known is None or self._known.state.position < position:
                kept = self._read_kept()
                if kept is not None and (self._known is None or kept.state.position > self._known.state.position):
                    self._known = kept
            return self._known.state if self._known is not None else None

    def latest(self) -> TableState | None:
        """The table's state now; None if there is no log. Two calls where nothing is new since the host read it last.

        Raises DamagedFileError for a log that contradicts itself, NotSupportedError for one of a later format.
        """
        self.known()
        with self._lock:
            known = self._known
        if known is None or self._age_s(known) > TRUSTED_S or known.state.position == 1:  # which stays when others go
            return self._read_all()
        state, last = known.state, known.last
        try:
            newer = self._after(state)
        except (UfsNotFoundError, SourceChangedError):
            return self._read_all()  # it is being removed
        # The last event known, after the next one: while it is there, what came before it was this table's.
        found = self._is_same(state, last)
        if found is None:
            return self._read_all()
        if newer:
            try:
                state = state.advance(event for _, event in newer)
            except DamagedFileError:
                return self._read_all()  # another table's, put here between the two questions
            found = newer[-1][0]
        if newer or found != last or self._age_s(known) > TRUSTED_S / 4:
            self._keep(state, [event for _, event in newer], found)
        return state

    def _age_s(self, known: _Known) -> float:
        """How long ago this host found that a state was the latest; infinity for a clock that was set back since."""
        age_s = self._context.clock.wall_s() - known.looked_s
        return age_s if age_s > -_CLOCK_STEP_S else math.inf

    def _after(self, state: TableState) -> list[tuple[FileVersion, Event]]:
        """The events that follow a state, with their files."""
        files: list[FileVersion] = []
        with contextlib.suppress(UfsNotFoundError):
            for ahead in range(1, 2 if self._ufs.lists_after else _PROBED):
                files.append(self._events.get_meta(state.position + ahead))
            return self._events.after(state.position, state.table_id)
        return self._events.read(files)

    def _is_same(self, state: TableState, last: FileVersion | None) -> FileVersion | None:
        """The file of the state's last event, if it still is that event; None if it is not."""
        try:
            file = self._events.get_meta(state.position)
            if file == last:
                return file
            # A copied table's files are others, with the same in them.
            ((_, event),) = self._events.read([file])
        except (UfsNotFoundError, SourceChangedError):
            return None
        return file if event.nonce == state.nonce else None

    def _read_all(self) -> TableState | None:
        """The state from the newest checkpoint and the events after it."""
        with self._lock:
            self._known = None
        self.pages.forget()  # which may be of a history that is no longer this one

        def read() -> tuple[TableState | None, list[tuple[FileVersion, Event]]]:
            return self._from_checkpoint() or (None, self._events.after(0, None))

        try:
            # Events may be trimmed behind a checkpoint that was not there yet.
            state, found = read_again(read, DamagedFileError, SourceChangedError)
        except UfsNotFoundError:
            return None
        if not found:
            return None
        state = state or TableState.begin(found[0][1], redact("path", self._events.path(1)))
        state = state.advance(event for _, event in found[1:])
        self._keep(state, None, found[-1][0])
        return state

    def _from_checkpoint(self) -> tuple[TableState, list[tuple[FileVersion, Event]]] | None:
        """The newest checkpoint's state and the events from its last one on; None if there is none of this table."""
        for state in self._checkpoints.newest_first():
            # A checkpoint may come late, after its table was dropped and another one was made; a copy may have one of what came
            # after its events.
            with contextlib.suppress(DamagedFileError):
                found = self._events.after(state.position - 1, state.table_id)
                if found and (found[0][1].nonce, found[0][1].table_id) == (state.nonce, state.table_id):
                    return state, found
        return None

    def position_at(self, state: TableState, until_s: float) -> int | None:
        """The last position up to which every event was put by then, on the store's clock; None if none was, of those there are."""
        begin = self.pages.begin(state)
        late = (position for position, at_s in self.put_times(begin).items() if at_s > until_s)
        position = min(min(late, default=state.position + 1) - 1, state.position)
        return None if position == begin else position

    def put_at_s(self, position: int) -> float | None:
        """When an event was put, on the store's clock; None if it was trimmed meanwhile. Raises UfsError if the store does not say."""
        with self._lock:
            known = self._known
        last = known.last if known is not None and known.state.position == position else None
        if last is not None and last.modified_at_s is not None:
            return last.modified_at_s
        try:
            file = self._events.get_meta(position)
        except UfsNotFoundError:
            return None
        if file.modified_at_s is None:
            raise UfsError(f"{redact('path', file.url)}: the store does not say when it was put")
        return file.modified_at_s

    def put_times(self, after: int, at_most: int | None = None) -> dict[int, float]:
        """When each event after a position was put, on the store's clock, as far as it says: one LIST."""
        listed = self._events.list_after(after, at_most)
        return {position: file.modified_at_s for position, file in listed if file.modified_at_s is not None}

    # --- what this host knows ---------------------------------------------------------------------

    def _read_kept(self) -> _Known | None:
        """What the host's records say: a state, and what came after it."""
        if self._context.disk is None:
            return None
        origin = "the host's record of the log"
        base: TableState | None = self._context.disk.get_record(
            "log", self._key, lambda found: state_of_json(found, origin)
        )
        if base is None:
            return None

        def with_tail(found: Any) -> _Known:
            if found["table"] != base.table_id:
                return alone
            texts = tuple(text.encode() for text in texts_of(found["events"]))
            events = [event_of(text, n, origin) for n, text in enumerate(texts, base.position + 1)]
            last = None if found["last"] is None else FileVersion.from_json(found["last"])
            return _Known(base.advance(events), base.position, texts, last, number_of(found["looked_s"]))

        alone = _Known(base, base.position, (), None)
        return self._context.disk.get_record("log-tail", self._tail_key(base.position), with_tail) or alone

    def _keep(self, state: TableState, events: Sequence[Event] | None, last: FileVersion | None) -> None:
        """Know the state, which follows what was known by those events (None: by others); a newer one that is known stays."""
        with self._lock:
            before = self._known
            if before is not None and before.state.table_id == state.table_id:
                if before.state.position > state.position:
                    return
                follows = events is not None and before.state.position + len(events) == state.position
                tail = (*before.tail, *map(event_bytes, events or ())) if follows else None
            else:
                tail = None
            base = before.base if before is not None else 0
            if tail is None or len(tail) > _TAIL_AT_MOST:
                tail, base = None, state.position
            looked_s = self._context.clock.wall_s()
            self._known = _Known(state, base, tail or (), last, looked_s)
        if self._context.disk is None:
            return
        try:
            if tail is None:
                self._context.disk.replace_record("log", self._key, state_to_json(state))
                if before is not None:
                    self._context.disk.remove_record("log-tail", self._tail_key(before.base))
            seen = None if last is None else last.to_json()
            texts = [text.decode() for text in tail or ()]
            value = {"table": state.table_id, "events": texts, "last": seen, "looked_s": looked_s}
            self._context.disk.replace_record("log-tail", self._tail_key(base), value)
        except OSError:
            self._context.metrics.inc("cacheFailureCount")
        if before is not None and before.state.table_id == state.table_id:
            self._forget_files(self._context.disk, before.state, state)

    def _forget_files(self, disk: Disk, before: TableState, state: TableState) -> None:
        """Keep no block of files that were replaced pages ago, or vacuumed: who still reads such a version fetches them again."""
        if (before.since, before.oldest) != (state.since, state.oldest):
            gone = before.paths() - state.paths()
            disk.forget_files(make_path_key(self._ufs.scope, f"{self.url}/{path}") for path in gone)

    def _tail_key(self, base: int) -> str:
        return f"{self._key}-{base}"

    # --- writing ----------------------------------------------------------------------------------

    def create(self, make: Callable[[str, float], Event]) -> TableState | None:
        """Put the first event, which `make` makes of a nonce and the time; None if there was one already."""
        event = make(self._nonce(), self._context.clock.wall_s())
        file = self._put(event)
        if file is None:
            return None
        state = TableState.begin(event, "the event just put")
        with self._lock:
            self._known = None
        self._keep(state, None, file)
        return state

    def append(
        self, make: Callable[[TableState, str, float], Event | None], after: TableState | None = None
    ) -> TableState:
        """Put the event that `make` makes of the state it follows, a nonce and the time; the state with it.

        Where another writer is first, it is made anew, of the state with that writer's event. With None nothing is put;
        what `make` raises is raised. `after`: the state as an append returned it just now, which need not be asked for. Raises CommitUnknownError if the store does not say whether the event was put,
        UfsNotFoundError if the table is gone.
        """
        lost_at, in_vain = 0, 0
        for _ in range(_RACES):
            state, after = after or self.latest(), None
            if state is None:
                raise UfsNotFoundError(f"{redact('path', self.url)} is no managed table (any more)")
            event = make(state, self._nonce(), self._context.clock.wall_s())
            if event is None:
                return state
            file = self._put(event)
            if file is None:
                # A store may not show the event that took the place: it is asked again, with pauses.
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
        shown = redact("path", self.url)
        if in_vain >= _IN_VAIN:
            raise UfsUnavailableError(
                f"{shown}: the store says that event {lost_at} of the log is there, and does not show it: try again later"
            )
        raise UfsUnavailableError(f"{shown}: {_RACES} other writers were first: try again later")

    def _trim(self, state: TableState, last: FileVersion) -> None:
        """Remove what is older than what vacuum and the table's log retention keep, by the time at which the last event was put."""
        with contextlib.suppress(PysparkLookupError):  # the event is there: whoever has put it is not to put it again
            put_at_s = last.modified_at_s or self._events.get_meta(state.position).modified_at_s
            if put_at_s is not None:
                found = properties.parse_properties(state.definition.properties)
                kept_s = (found.vacuum_after_s or properties.KEPT_S) + found.log_retention_s
                self.pages.trim(state, put_at_s - kept_s)

    def _put(self, event: Event) -> FileVersion | None:
        """Put an event; None if another one has its position. Raises CommitUnknownError if that cannot be found out."""
        try:
            return self._ufs.put_if_absent(self._events.path(event.position), event_bytes(event))
        except PutUnknownError as problem:
            raise_ours(self._unknown(event, problem), problem)

    def _unknown(self, event: Event, problem: Exception) -> CommitUnknownError:
        return CommitUnknownError(
            f"whether event {event.position} ({event.kind}) of {redact('path', self.url)} was put is unknown: {problem}. "
            f"Its nonce is {event.nonce}; look for it in the log before writing again"
        )

    def _has_followed(self, state: TableState, event: Event) -> bool:
        """Whether an event that was just put follows the one it was made to follow; else it is taken back.

        Between the look at the log and the put the table may have been dropped, and another one made.
        """
        with self._lock:
            last = self._known.last if self._known is not None and self._known.state is state else None
        try:
            # Others may have seen the event, and put theirs after it: no single answer makes it go.
            if self._is_same(state, last) is not None or self._events.lists(state.position, state.nonce):
                return True
            self._ufs.delete(self._events.path(event.position))
        except (UfsError, DamagedFileError) as problem:
            raise_ours(self._unknown(event, problem), problem)
        with self._lock:
            self._known = None
        return False

    def _nonce(self) -> str:
        return f"{self._context.rng.getrandbits(128):032x}"
