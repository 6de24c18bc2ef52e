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
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pyspark_lookup.base.decoding import texts_of
from pyspark_lookup.base.errors import (
    CommitUnknownError,
    DamagedFileError,
    PutUnknownError,
    SourceChangedError,
    UfsError,
    UfsNotFoundError,
    UfsUnavailableError,
)
from pyspark_lookup.io.context import HostContext
from pyspark_lookup.io.disk import key_of
from pyspark_lookup.io.stores import LOG_DIRECTORY, FileVersion
from pyspark_lookup.io.ufs import Ufs
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.table.log.events import Event, event_bytes, event_of, seal
from pyspark_lookup.table.log.state import TableState

_log = logging.getLogger("pyspark_lookup.notifications")
_DIGITS = 20
_CHECKPOINT_EVERY = 50
_CHECKPOINTS_KEPT = 3
_TAIL_AT_MOST = 100  # events in the host's record beside a state
_RACES = 1000  # positions lost in a row: others are putting events faster than one can be put here
_IN_VAIN = 8  # times that one position is lost to an event that the store does not show


@dataclasses.dataclass(frozen=True)
class _Known:
    """A state, the file of its last event as it was seen (None: not yet), and how the host's records tell it.

    They hold the state after `base`, and the events since then: a commit changes the small one of the two.
    """

    state: TableState
    base: int
    tail: tuple[bytes, ...]
    last: FileVersion | None


class NotificationLog:
    """The log of the table at `url`, as this process reads and writes it. Safe for threads, not across forks."""

    def __init__(self, ufs: Ufs, context: HostContext, url: str) -> None:
        self._ufs = ufs
        self._context = context
        self.url = url
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
        if known is None:
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
        if newer or found != last:
            self._keep(state, [event for _, event in newer], found)
        return state

    def _after(self, state: TableState) -> list[tuple[FileVersion, Event]]:
        """The events that follow a state, with their files."""
        following = self._path(state.position + 1)
        try:
            self._ufs.get_meta(following)
        except UfsNotFoundError:
            return []
        return self._events_after(state.position, state.table_id)

    def _is_same(self, state: TableState, last: FileVersion | None) -> FileVersion | None:
        """The file of the state's last event, if it still is that event; None if it is not."""
        try:
            file = self._ufs.get_meta(self._path(state.position))
            if file == last:
                return file
            # A copied table's files are others, with the same in them.
            event = self._event(file, self._read(file))
        except (UfsNotFoundError, SourceChangedError):
            return None
        return file if event.nonce == state.nonce else None

    def _events_after(self, position: int, table_id: str | None) -> list[tuple[FileVersion, Event]]:
        """All events after a position, with their files, which one LIST names. `table_id` None: the first event says it."""
        listed = self._ufs.list_files(self._directory("log"), after=self._name(position))
        files = {file.url.rsplit("/", 1)[-1]: file for file in listed if file.url.endswith(".json")}
        following: list[FileVersion] = []
        while files:
            name = self._name(position + len(following) + 1)
            file = files.pop(name, None) or self._find_missed(name)
            if file is None:
                break
            following.append(file)
        found = self._parse(following)
        if files:
            beyond = min(files)
            own = table_id or (found[0][1].table_id if found else None)
            # A writer that was slow puts one into the table that took its own's place, and takes it back.
            if own is None or any(event.table_id == own for _, event in self._parse(list(files.values()))):
                raise DamagedFileError(
                    f"{redact('path', self.url)}: the log has no event {position + len(found) + 1} but {beyond}: "
                    "restore it, or drop the table"
                )
        return found

    def _find_missed(self, name: str) -> FileVersion | None:
        """The file of an event that a listing did not name, though it named a later one; None if it is not there.

        A local directory that is listed while somebody adds to it may show the later of two new files only.
        """
        try:
            return self._ufs.get_meta(f"{self._directory('log')}/{name}")
        except UfsNotFoundError:
            return None

    def _parse(self, files: Sequence[FileVersion]) -> list[tuple[FileVersion, Event]]:
        texts = self._ufs.read_many([(file.as_immutable(), [(0, file.size)]) for file in files])
        return [(file, self._event(file, text)) for file, (text,) in zip(files, texts, strict=True)]

    def _event(self, file: FileVersion, text: bytes) -> Event:
        name = file.url.rsplit("/", 1)[-1].removesuffix(".json")
        if not name.isdecimal():
            raise DamagedFileError(f"{redact('path', file.url)} is no event of a table's log")
        try:
            return event_of(text, int(name), redact("path", file.url))
        except DamagedFileError:  # on its way here, perhaps
            return event_of(self._read(file), int(name), redact("path", file.url))

    def _read_all(self) -> TableState | None:
        """The state from the newest checkpoint and the events after it."""
        with self._lock:
            self._known = None
        try:
            state, found = self._from_checkpoint() or (None, self._events_after(0, None))
        except UfsNotFoundError:
            return None
        if not found:
            return None
        state = state or TableState.begin(found[0][1], redact("path", self._path(1)))
        state = state.advance(event for _, event in found[1:])
        self._keep(state, None, found[-1][0])
        return state

    def _from_checkpoint(self) -> tuple[TableState, list[tuple[FileVersion, Event]]] | None:
        """The newest checkpoint's state and the events from its last one on; None if there is none of this table."""
        state = self._checkpoint()
        if state is None:
            return None
        found = self._events_after(state.position - 1, state.table_id)
        # A checkpoint may come late, after its table was dropped and another one was made.
        if not found or (found[0][1].nonce, found[0][1].table_id) != (state.nonce, state.table_id):
            return None
        return state, found

    def _checkpoint(self) -> TableState | None:
        """The newest checkpoint that can be read; None without one."""
        try:
            newest = self._ufs.list_files(self._directory("checkpoints"), after="", at_most=1)
        except UfsNotFoundError:
            return None
        for file in newest:
            try:
                return TableState.of_bytes(self._read(file), redact("path", file.url))
            except (DamagedFileError, UfsNotFoundError, SourceChangedError) as problem:
                _log.warning("reading the log from its beginning: %s", problem)
        return None

    def _read(self, file: FileVersion) -> bytes:
        return self._ufs.read_ranges(file.as_immutable(), [(0, file.size)])[0]

    def times(self) -> dict[int, float]:
        """When each event was put, by position, in Unix time on the store's clock: one LIST per page of them."""
        found = self._ufs.list_files(self._directory("log"))
        names = ((file.url.rsplit("/", 1)[-1].removesuffix(".json"), file.modified_at_s) for file in found)
        return {int(name): at_s for name, at_s in names if name.isdecimal() and at_s is not None}

    # --- what this host knows ---------------------------------------------------------------------

    def _read_kept(self) -> _Known | None:
        """What the host's records say: a state, and what came after it."""
        if self._context.disk is None:
            return None
        origin = "the host's record of the log"
        base: TableState | None = self._context.disk.get_record(
            "log", self._key, lambda found: TableState.from_json(found, origin)
        )
        if base is None:
            return None

        def with_tail(found: Any) -> _Known:
            if found["table"] != base.table_id:
                return alone
            texts = tuple(text.encode() for text in texts_of(found["events"]))
            events = [event_of(text, n, origin) for n, text in enumerate(texts, base.position + 1)]
            last = None if found["last"] is None else FileVersion.from_json(found["last"])
            return _Known(base.advance(events), base.position, texts, last)

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
            self._known = _Known(state, base, tail or (), last)
        if self._context.disk is None:
            return
        try:
            if tail is None:
                self._context.disk.replace_record("log", self._key, state.to_json())
                if before is not None:
                    self._context.disk.remove_record("log-tail", self._tail_key(before.base))
            seen = None if last is None else last.to_json()
            texts = [text.decode() for text in tail or ()]
            value = {"table": state.table_id, "events": texts, "last": seen}
            self._context.disk.replace_record("log-tail", self._tail_key(base), value)
        except OSError:
            self._context.metrics.inc("cacheFailureCount")

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
                if event.position % _CHECKPOINT_EVERY == 0:
                    self._put_checkpoint(state)
                return state
        shown = redact("path", self.url)
        if in_vain >= _IN_VAIN:
            raise UfsUnavailableError(
                f"{shown}: the store says that event {lost_at} of the log is there, and does not show it: try again later"
            )
        raise UfsUnavailableError(f"{shown}: {_RACES} other writers were first: try again later")

    def _put(self, event: Event) -> FileVersion | None:
        """Put an event; None if another one has its position. Raises CommitUnknownError if that cannot be found out."""
        try:
            return self._ufs.put_if_absent(self._path(event.position), event_bytes(event))
        except PutUnknownError as problem:
            raise self._unknown(event, problem) from problem

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
            if self._is_same(state, last) is not None or self._is_listed(state):
                return True
            self._ufs.delete(self._path(event.position))
        except (UfsError, DamagedFileError) as problem:
            raise self._unknown(event, problem) from problem
        with self._lock:
            self._known = None
        return False

    def _is_listed(self, state: TableState) -> bool:
        """Whether a listing of the log shows the state's last event: asked in another way than by its name."""
        found = self._ufs.list_files(self._directory("log"), after=self._name(state.position - 1), at_most=1)
        return any((event.position, event.nonce) == (state.position, state.nonce) for _, event in self._parse(found))

    def _put_checkpoint(self, state: TableState) -> None:
        """Put a checkpoint; without it reading the log for the first time takes longer, no more."""
        data = seal(state.to_json())
        with contextlib.suppress(UfsError):
            self._ufs.put_if_absent(self._checkpoint_path(state.position), data)
            # Who has just listed it may still read the one before.
            old = state.position - _CHECKPOINTS_KEPT * _CHECKPOINT_EVERY
            if old > 0:
                self._ufs.delete(self._checkpoint_path(old))

    def _checkpoint_path(self, position: int) -> str:
        return f"{self._directory('checkpoints')}/{10**_DIGITS - position:0{_DIGITS}d}.json"

    def _nonce(self) -> str:
        return f"{self._context.rng.getrandbits(128):032x}"

    def _directory(self, name: str) -> str:
        return f"{self.url}/{LOG_DIRECTORY}/{name}"

    def _name(self, position: int) -> str:
        return f"{position:0{_DIGITS}d}.json"

    @staticmethod
    def first_event(url: str) -> str:
        """The file that a managed table at `url` begins with."""
        return f"{url}/{LOG_DIRECTORY}/log/{1:0{_DIGITS}d}.json"

    def _path(self, position: int) -> str:
        return f"{self._directory('log')}/{self._name(position)}"
