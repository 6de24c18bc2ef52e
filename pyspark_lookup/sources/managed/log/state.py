"""`TableState`: a managed table after the events up to a position, with its writes and changes, and the versions that follow from them.

A version has the rows that a `ValidWriteIdList` includes: those of the highest valid overwrite and of the valid writes above it. Two lists
that include the same writes are the same version, even if they differ otherwise (as in HIVE-21637). So a version's digest is computed from
these writes.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pyspark_lookup.columnar.types import text_of_schema
from pyspark_lookup.core.write_ids import ValidWriteIdList
from pyspark_lookup.errors import DamagedFileError, OptionError, VersionGoneError, WriteConflictError
from pyspark_lookup.options.groups import OF_MATCHES
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.parsing import DURATION
from pyspark_lookup.sources.managed.log.events import (
    RESTORE,
    Abort,
    Allocate,
    Batch,
    Commit,
    Create,
    DataFile,
    Definition,
    Event,
    Vacuum,
    Write,
    WriteMode,
)
from pyspark_lookup.storage.disk import digest_of
from pyspark_lookup.versions.model import VersionMetadata


@dataclasses.dataclass(frozen=True)
class TableWrite:
    """A write: its id and mode, its files so far, and the positions at which its id was allocated and at which it ended (None: it is open).

    `deletes`: delete files, which name rows of other writes. `replaces`: for a compaction, the ids of the writes whose rows are in its files;
    `least` and `rank` are the lowest and highest write ids of these rows. `vacuumed`: its files were removed. `nonce`: the nonce of the event
    that allocated the id.
    """

    id: int
    mode: WriteMode
    allocated_at: int
    files: tuple[DataFile, ...] = ()
    ended_at: int | None = None
    committed: bool = False
    deletes: tuple[DataFile, ...] = ()
    replaces: tuple[int, ...] = ()
    least: int = 0
    rank: int = 0
    vacuumed: bool = False
    nonce: str = ""

    def __post_init__(self) -> None:
        if not self.rank:
            object.__setattr__(self, "least", self.id)
            object.__setattr__(self, "rank", self.id)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def label(self) -> str:
        """The text that stands for the write in a version's digest: its id and the names of its files, which are unique.

        The label of an open write, which its own transaction sees, changes with each file that is added.
        """
        names = self.names
        first, last = (names[0], names[-1]) if names else ("", "")
        return f"{self.id}+{len(self.files)}+{len(self.deletes)}+{first}+{last}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the write's data files and delete files. No two files of a table have the same name."""
        return tuple(file.name for file in (*self.files, *self.deletes))

    @property
    def does_something(self) -> bool:
        """Whether the write has data files or delete files."""
        return bool(self.files or self.deletes)

    def as_compaction(self, writes: TableWrites, replaces: tuple[int, ...]) -> TableWrite:
        """This write as a compaction that also replaces the writes with the ids `replaces`."""
        least = min(writes[id_].least for id_ in replaces)
        rank = max(writes[id_].rank for id_ in replaces)
        return dataclasses.replace(self, replaces=(*self.replaces, *replaces), least=least, rank=rank)


_NEWER_AT_MOST = 64  # if `_newer` has more writes than this, a copy merges them into `_older`


class TableWrites:
    """Writes by id, in the order of their ids. Copying takes time for the latest additions only, not for all writes."""

    __slots__ = ("_newer", "_older")

    def __init__(self, writes: Iterable[TableWrite] = ()) -> None:
        self._older = {write.id: write for write in writes}  # shared with copies
        self._newer: dict[int, TableWrite] = {}

    def copy(self) -> TableWrites:
        if len(self._newer) > _NEWER_AT_MOST:
            return TableWrites(self.values())
        writes = TableWrites()
        writes._older, writes._newer = self._older, dict(self._newer)
        return writes

    def store(self, write: TableWrite) -> None:
        """Add a write with a new highest id, or replace the write that has its id."""
        self._newer[write.id] = write

    def get(self, write_id: int | None) -> TableWrite | None:
        if write_id is None:
            return None
        return self._newer.get(write_id) or self._older.get(write_id)

    def __getitem__(self, write_id: int) -> TableWrite:
        write = self.get(write_id)
        if write is None:
            raise KeyError(write_id)
        return write

    def __contains__(self, write_id: int | None) -> bool:
        return write_id in self._newer or write_id in self._older

    def __len__(self) -> int:
        return len(self._older.keys() | self._newer.keys())

    def values(self) -> Iterator[TableWrite]:
        if not self._newer:
            yield from self._older.values()
            return
        for id_, write in self._older.items():
            yield self._newer.get(id_, write)
        for id_, write in self._newer.items():
            if id_ not in self._older:
                yield write


@dataclasses.dataclass(frozen=True)
class Change:
    """An event that made a version: its position, its Unix time on the writer's clock, and the id of the write that it commits (None: it
    creates the table)."""

    position: int
    at_s: float
    write_id: int | None


KEPT_S = 7 * 86400.0
"""Seconds. Unless it is forced, vacuum removes a file only if no version has needed it for this long, which is longer than queries run."""
LOG_RETENTION, VACUUM_AFTER = "lookup.log.retention", "lookup.write.vacuum-after"


@dataclasses.dataclass(frozen=True)
class TableProperties:
    """How long a table keeps its log and its files, in seconds.

    `log_retention_s`: how much longer than a version's files its events are kept. Vacuum may remove the files first, and the events this long
    afterwards. `vacuum_after_s`: commits remove files that no version has needed for this long (None: commits never vacuum).
    """

    log_retention_s: float = KEPT_S
    vacuum_after_s: float | None = None


def parse_properties(properties: Mapping[str, str]) -> TableProperties:
    """The `TableProperties` that a table's properties set. Properties that do not begin with `lookup.` are the user's own and are ignored.

    Raises OptionError for an unknown property that begins with `lookup.`, and for an invalid value.
    """
    durations_s: dict[str, float] = {}
    for key, text in properties.items():
        if not key.startswith("lookup."):
            continue
        if key in OF_MATCHES:
            LookupOptions().override({key: text})
            continue
        if key not in (LOG_RETENTION, VACUUM_AFTER):
            raise OptionError(
                f"table property {key} is unknown: use {LOG_RETENTION}, {VACUUM_AFTER}, or an option of lookups by range, such as lookup.range"
            )
        try:
            durations_s[key] = DURATION.parse(text)
        except ValueError as problem:
            raise OptionError(f"table property {key} = {text!r}: expected {problem}") from None
    vacuum_after_s = durations_s.get(VACUUM_AFTER)
    if vacuum_after_s is not None and vacuum_after_s < KEPT_S:
        raise OptionError(
            f"table property {VACUUM_AFTER} = {properties[VACUUM_AFTER]!r}: expected 7 d or more, because queries "
            "and writes under way may need the files"
        )
    return TableProperties(durations_s.get(LOG_RETENTION, KEPT_S), vacuum_after_s)


_REWRITES_AT_MOST = 8  # compactions that a version's metadata lists


class VisibleWrites:
    """The writes whose rows a reader with the list `write_ids` sees. `position`: the position of the log's last event.

    The rows of the highest valid overwrite and of the writes above it are visible. A compaction takes the place of the writes that it
    replaces. A write by key deletes rows that were committed before it.

    `valid`: the valid writes, without unusable compactions (see `_find_usable`). `visible`: the writes that have visible rows. `deleting`:
    the writes that may delete some of these rows. All three are in the order of the write ids.
    """

    def __init__(self, writes: TableWrites, write_ids: ValidWriteIdList, position: int) -> None:
        self._writes = writes
        self._position = position
        self.valid, replaced = self._find_usable(write_ids)
        self.visible = self._find_visible(replaced)
        self.deleting = self._find_deleting(replaced)

    def _find_usable(self, write_ids: ValidWriteIdList) -> tuple[list[TableWrite], set[int]]:
        """(the valid writes without unusable compactions, the ids of the writes that usable compactions replace).

        A compaction has the rows of the writes that it replaces, as they were at its commit. It is unusable for a list that includes only
        some of these writes. It is also unusable if the list leaves out a write that was committed before the compaction and may have deleted
        or replaced their rows.
        """
        # This runs once per commit: with a long log, a call of `write_ids.is_valid` per write would be too slow.
        invalid = {*write_ids.open_ids, *write_ids.aborted_ids}
        valid = []
        for write in self._writes.values():
            # A list need not name writes that were aborted long ago.
            is_aborted = write.ended_at is not None and not write.committed
            if is_aborted or write.id > write_ids.high_watermark:
                invalid.add(write.id)
            elif write.id not in invalid:
                valid.append(write)
        unseen_writes = (self._writes[id_] for id_ in invalid if id_ in self._writes)
        adding_modes = (WriteMode.APPEND, WriteMode.ALTER)
        changing_writes = (
            write for write in unseen_writes if write.committed and (write.deletes or write.mode not in adding_modes)
        )
        limit = min((self.end(write) for write in changing_writes), default=self._position + 1)
        compactions = [write for write in valid if write.replaces]
        replaced_ids, usable_ids = set[int](), set[int]()
        for write in sorted(compactions, key=self.end):
            # If this compaction replaces an older one that the state no longer has, the older one was usable.
            unusable_ids = {
                id_ for id_ in write.replaces if id_ in self._writes and self._writes[id_].replaces
            } - usable_ids
            if self.end(write) < limit and not unusable_ids and invalid.isdisjoint(write.replaces):
                usable_ids.add(write.id)
                replaced_ids.update(write.replaces)
        if len(usable_ids) < len(compactions):
            valid = [write for write in valid if not write.replaces or write.id in usable_ids]
        return valid, replaced_ids

    def _find_visible(self, replaced_ids: set[int]) -> list[TableWrite]:
        base = max((write.id for write in self.valid if write.mode is WriteMode.OVERWRITE), default=0)
        return [
            write
            for write in self.valid
            if write.rank >= base
            and write.id not in replaced_ids
            and (write.files or write.deletes or write.vacuumed or write.id == base)
        ]

    def _find_deleting(self, replaced_ids: set[int]) -> list[TableWrite]:
        """The writes that may delete visible rows: they have delete files and were committed after the first visible write.

        A write with a lower id than the highest valid overwrite may be among them: it deletes visible rows of higher write ids if it was
        committed after them.
        """
        first = min((self.end(write) for write in self.visible if write.files), default=self._position + 1)
        deleting_writes = (
            write for write in self.valid if (write.deletes or write.vacuumed) and write.id not in replaced_ids
        )
        return [write for write in deleting_writes if self.end(write) >= first]

    @property
    def needed_writes(self) -> list[TableWrite]:
        """The writes that have visible rows or that may delete some, each once."""
        return list({write.id: write for write in (*self.visible, *self.deleting)}.values())

    def rewrites(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """For each of the latest compactions, oldest first: (names of its data files, names of the files that they replaced).

        A compaction is left out if the names of the replaced files are no longer known.
        """
        compactions = sorted((write for write in self.valid if write.replaces), key=self.end)
        replaced_ids = {id_ for write in compactions[:-_REWRITES_AT_MOST] for id_ in write.replaces}
        for write in compactions[-_REWRITES_AT_MOST:]:
            replaced_ids.update(write.replaces)
            replaced_writes = [self._writes[id_] for id_ in write.replaces if id_ in self._writes]
            if len(replaced_writes) == len(write.replaces) and not any(
                replaced_write.vacuumed for replaced_write in replaced_writes
            ):
                # The compaction's delete files may have rows of writes that no version has any more. So they count as new: they are left out here.
                file_names = tuple(file.name for file in write.files)
                replaced_names = tuple(name for replaced_write in replaced_writes for name in replaced_write.names)
                # The race: a delete was committed before the compaction, but is not among the writes that it replaced. The compaction's files
                # lack the deleted rows, and later the delete may go, because it applies to nothing.
                first, last = min(map(self.end, replaced_writes)), self.end(write)
                other_deletes = tuple(
                    file.name
                    for other in self.valid
                    if other.deletes and other.id not in replaced_ids and first < self.end(other) < last
                    for file in other.deletes
                )
                yield (*file_names, *other_deletes), (*replaced_names, *other_deletes)

    def end(self, write: TableWrite) -> int:
        """The position at which a write ended. For an open write, whose rows its transaction sees, the position of the next event."""
        return self._position + 1 if write.ended_at is None else write.ended_at


_VISIBLE_KEPT = 4  # cached lists of write ids


class EarlierStateError(LookupError):
    """Raised for a position, or a list of write ids, whose version is too old for this state: see `LogPages.find_state`."""


class TableState:
    """A managed table after the event at `position`, whose nonce is `nonce`. Immutable.

    A state can tell the versions at the positions from `since` on. So it has the writes that are open, that ended after `since`, or that the
    version at `since` needs. For earlier positions use `LogPages.find_state`. A page has `page` events, and `since` is the start of the page
    before that of `position`.
    """

    def __init__(self, table_id: str, position: int, nonce: str, page: int) -> None:
        self.table_id = table_id
        self.position = position
        self.nonce = nonce
        self.page = page
        self.since = 0
        self.watermark = 0  # the highest write id at `since`; `writes` has all later ones
        self.high_watermark = 0  # the highest write id now
        self.writes = TableWrites()
        self.batches: dict[str, int] = {}
        self.changes: list[Change] = []
        self.oldest = 1  # every version from this position on can be read
        self.memo: dict[Any, Any] = {}  # values that callers have computed from this state; not part of it
        self._visible_by_ids: dict[ValidWriteIdList, VisibleWrites] = {}
        self.definitions: list[tuple[int, Definition]] = []
        self.replaced_by = 0  # the highest write id of a committed overwrite
        self.keyed_by = 0  # the highest write id of a committed write by key
        self.rekeyed_at = 0  # the position of the last definition whose keys differ from those of the one before it
        self.deleted_where_at = 0  # the position of the last delete by a predicate
        self.vacuumed_at = 1  # the position of the last vacuum, or of the table's creation

    # --- from events ------------------------------------------------------------------------------

    @classmethod
    def begin(cls, event: Event, origin: str) -> TableState:
        """The state after a table's first event. Raises DamagedFileError for an event that does not create a table."""
        if not isinstance(event, Create) or event.position != 1:
            raise DamagedFileError(f"{origin} does not create the table, as its first event should: {RESTORE}")
        state = cls(event.table_id, 1, event.nonce, event.page)
        state.definitions = [(event.position, event.definition)]
        state.changes = [Change(event.position, event.at_s, None)]
        return state

    def advance(self, events: Iterable[Event]) -> TableState:
        """The state after these events. Raises DamagedFileError for an event that contradicts the events before it."""
        state = TableState(self.table_id, self.position, self.nonce, self.page)
        state.since, state.watermark, state.high_watermark = self.since, self.watermark, self.high_watermark
        state.writes, state.batches = self.writes.copy(), dict(self.batches)
        state.changes, state.definitions = list(self.changes), list(self.definitions)
        state.replaced_by, state.keyed_by, state.oldest = self.replaced_by, self.keyed_by, self.oldest
        state.rekeyed_at, state.vacuumed_at = self.rekeyed_at, self.vacuumed_at
        state.deleted_where_at = self.deleted_where_at
        for event in events:
            state._take(event)
        return state

    def with_open_write(self, own_write: TableWrite) -> TableState:
        """This state with one more write, which is still open: the table as the write's own transaction sees it."""
        state = self.advance(())
        state.writes.store(own_write)
        state.high_watermark = own_write.id
        return state

    def _take(self, event: Event) -> None:
        self._apply(event)
        if self.position % self.page == 0 and self.position > self.page:
            self._forget(self.position - self.page)

    def _forget(self, since: int) -> None:
        """Drop the writes, changes and definitions that only versions before the position `since` need."""
        needed_ids = {write.id for write in self.find_needed(since)}
        kept_writes = (
            w for w in self.writes.values() if w.ended_at is None or w.ended_at > since or w.id in needed_ids
        )
        watermark = self.valid_write_ids(since).high_watermark
        self.writes = TableWrites(kept_writes)
        self.changes = self.changes[self._last_change(since) :]
        self.definitions = self.definitions[self._last_definition(since) :]
        self.since, self.watermark = since, watermark
        self._visible_by_ids.clear()

    def _apply(self, event: Event) -> None:
        if event.position != self.position + 1:
            raise DamagedFileError(f"the log is damaged: event {event.position} follows event {self.position}")
        if event.table_id != self.table_id:
            # The event belongs to another table, which was at this path before. Its writer put it late, and died before removing it again.
            self.position, self.nonce = event.position, event.nonce
            return
        match event:
            case Allocate():
                if event.write_id != self.high_watermark + 1:
                    raise self._contradiction(event, f"allocates write id {event.write_id}")
                self.writes.store(TableWrite(event.write_id, event.mode, event.position, nonce=event.nonce))
                self.high_watermark = event.write_id
            case Write():
                write = self._open(event, event.write_id)
                files, deletes = (*write.files, *event.files), (*write.deletes, *event.deletes)
                self.writes.store(dataclasses.replace(write, files=files, deletes=deletes))
                self._replace(event, write.id, event.replaces)
            case Commit():
                self._commit(event, self._open(event, event.write_id))
            case Abort():
                write = self._open(event, event.write_id)
                aborted_write = TableWrite(
                    write.id, write.mode, write.allocated_at, ended_at=event.position, nonce=write.nonce
                )
                self.writes.store(aborted_write)
            case Vacuum():
                for id_ in event.write_ids:
                    ended_write = self.writes.get(id_)
                    if ended_write is None and id_ <= self.watermark:
                        continue
                    if ended_write is None or ended_write.ended_at is None:
                        raise self._contradiction(event, f"removes the files of write {id_}, which has not ended")
                    self.writes.store(dataclasses.replace(ended_write, files=(), deletes=(), vacuumed=True))
                if event.oldest > event.position:
                    raise self._contradiction(event, f"keeps the versions from event {event.oldest} on, which is later")
                self.oldest, self.vacuumed_at = max(self.oldest, event.oldest), event.position
            case _:
                raise self._contradiction(event, "creates the table once more")
        self.position, self.nonce = event.position, event.nonce

    def _replace(self, event: Event, write_id: int, replaces: tuple[int, ...]) -> None:
        """Record that the files of the compaction `write_id` have the rows of the writes that it replaces."""
        if not replaces:
            return
        if any(id_ >= write_id or id_ not in self.writes or not self.writes[id_].committed for id_ in replaces):
            raise self._contradiction(event, f"says that write {write_id} compacts writes that are not committed")
        self.writes.store(self.writes[write_id].as_compaction(self.writes, replaces))

    def _commit(self, event: Commit, write: TableWrite) -> None:
        self.writes.store(dataclasses.replace(write, ended_at=event.position, committed=True))
        self._rank(write)
        if write.mode is WriteMode.DELETE_WHERE:
            self.deleted_where_at = event.position
        if event.definition is not None:
            if event.definition.keys != self.definition.keys:
                self.rekeyed_at = event.position
            self.definitions.append((event.position, event.definition))
        if event.batch is not None:
            self.batches[event.batch.query] = event.batch.id
        self.changes.append(Change(event.position, event.at_s, write.id))

    def _rank(self, write: TableWrite) -> None:
        if write.mode is WriteMode.OVERWRITE:
            self.replaced_by = max(self.replaced_by, write.id)
        if write.mode.by_key or (write.deletes and not write.replaces):
            self.keyed_by = max(self.keyed_by, write.id)

    def _open(self, event: Event, write_id: int) -> TableWrite:
        write = self.writes.get(write_id)
        if write is None or write.ended_at is not None:
            raise self._contradiction(event, f"is about write id {write_id}, which is not open")
        return write

    def _contradiction(self, event: Event, fault: str) -> DamagedFileError:
        return DamagedFileError(f"the log is damaged: event {event.position} {fault}")

    # --- what a writer may do ---------------------------------------------------------------------

    @property
    def definition(self) -> Definition:
        """The table's columns, keys and properties now."""
        return self.definitions[-1][1]

    def find_definition(self, position: int) -> Definition:
        """The table's columns, keys and properties after the event at a position."""
        return self.definitions[self._last_definition(position)][1]

    def _last_definition(self, position: int) -> int:
        return max(bisect.bisect_right(self.definitions, position, key=lambda definition: definition[0]) - 1, 0)

    def _last_change(self, position: int) -> int:
        return max(bisect.bisect_right(self.changes, position, key=lambda change: change.position) - 1, 0)

    def has_new_keys(self, position: int) -> bool:
        """Whether the table was given other key columns after a position."""
        return position < self.rekeyed_at

    def paths(self) -> set[str]:
        """The paths of the data files and delete files of the writes in this state."""
        return {file.path for write in self.writes.values() for file in (*write.files, *write.deletes)}

    def open_writes(self) -> list[TableWrite]:
        """The writes that have not ended, by id."""
        return [write for write in self.writes.values() if write.ended_at is None]

    def check_open(self, write_id: int) -> TableWrite:
        """The write, if it may still be committed. Raises WriteConflictError with the reason if it may not."""
        write = self.writes.get(write_id)
        if write is None or (write.ended_at is not None and not write.committed):
            raise WriteConflictError(
                f"write {write_id} was aborted by its writer, or by others because its writer showed no sign of life for "
                "lookup.write.timeout: write again"
            )
        if write.committed:
            raise WriteConflictError(f"write {write_id} is committed already: do not write its rows again")
        if write.mode is WriteMode.OVERWRITE and self.keyed_by > write_id:
            # The rows of both writes would be visible, some with the same keys.
            raise WriteConflictError(
                f"write {write_id}, an overwrite, began before write {self.keyed_by}, which is a committed upsert or delete: write again"
            )
        if write.mode is WriteMode.OVERWRITE:
            self._check_compactions(write_id)
        if self.replaced_by > write_id and write.mode is not WriteMode.ALTER:
            raise WriteConflictError(
                f"write {write_id} began before write {self.replaced_by}, which has replaced the table's rows and is committed, so the rows of "
                f"write {write_id} would never be seen: write again"
            )
        return write

    def _check_compactions(self, write_id: int) -> None:
        """Raise WriteConflictError if an overwrite would replace only some of the rows in a compaction's files."""
        for write in self.writes.values():
            if write.committed and write.replaces and write.least < write_id < write.rank:
                raise WriteConflictError(
                    f"write {write_id}, an overwrite, began before write {write.rank}, which was compacted together with older writes by "
                    f"write {write.id}: write again"
                )

    def is_committed(self, batch: Batch) -> bool:
        """Whether a stream's micro-batch, or a later one of the same stream, has been committed."""
        return self.batches.get(batch.query, -1) >= batch.id

    # --- versions ---------------------------------------------------------------------------------

    @property
    def newest(self) -> int:
        """The position of the current version: that of the last event that made a version."""
        return self.changes[-1].position

    def valid_write_ids(self, position: int | None = None) -> ValidWriteIdList:
        """The list of the writes that are valid after the event at `position` (None: now).

        The list names the aborted writes that ended after the last end of a page up to the position. Earlier aborted writes need no mention, because
        they have no rows. Raises ValueError for a position beyond the log, EarlierStateError for a position before `since`.
        """
        at = self.position if position is None else position
        if not 1 <= at <= self.position:
            raise ValueError(
                f"there is no version {at} (the newest is {self.newest}): give one that LookupTable.versions() lists"
            )
        if at < self.since:
            raise EarlierStateError(
                f"log position {at} of table {self.table_id} is before position {self.since}, where this state begins"
            )
        highest_id, open_ids, aborted_ids = self.watermark, [], []
        for write in self.writes.values():
            if write.allocated_at > at:
                break  # ids are allocated in the log's order, so all later writes are beyond the position, too
            highest_id = max(highest_id, write.id)
            if write.ended_at is None or write.ended_at > at:
                open_ids.append(write.id)
            elif not write.committed and write.ended_at > self._page_begin(at):
                aborted_ids.append(write.id)
        return ValidWriteIdList(self.table_id, highest_id, open_ids, aborted_ids)

    def _page_begin(self, position: int) -> int:
        """The last position up to `position`, itself included, at which a page ends: a multiple of `page`; 0 if there is none."""
        return position // self.page * self.page

    def version(self, position: int | None = None) -> VersionMetadata:
        """The version after the event at `position` (None: now). Raises the errors of `valid_write_ids`."""
        write_ids = self.valid_write_ids(position)
        at = self.position if position is None else position
        return self._version(write_ids, at, self.changes[self._last_change(at)].position)

    def resolve_version(self, write_ids: ValidWriteIdList, own_write_id: int | None = None) -> VersionMetadata:
        """The version that a list of write ids describes, with the columns and keys that the table had after the last of the list's writes.

        `own_write_id`: an open write that the list may include, for the transaction that makes this write. The version then has the table's
        current columns.

        Raises ValueError for the list of another table, and for a list that is ahead of the log, because a write's files are not usable
        before its commit. Raises VersionGoneError if the list includes an aborted write, and EarlierStateError if only an earlier state can
        tell the version.
        """
        if write_ids.table != self.table_id:
            raise ValueError(
                f"the list of write ids {str(write_ids)!r} is of another table: the id of this one is {self.table_id}; take a list from "
                "LookupTable.valid_write_ids of this table"
            )
        if write_ids.high_watermark > self.high_watermark:
            raise ValueError(
                f"the list {str(write_ids)!r} is ahead of the log, in which {self.high_watermark} writes have begun: take a list from "
                "LookupTable.valid_write_ids"
            )
        self._check_covered(write_ids)
        for write in self.writes.values():
            if (
                write.committed
                or not write_ids.is_valid(write.id)
                or (write.id == own_write_id and write.ended_at is None)
            ):
                continue
            if write.id == own_write_id:
                raise WriteConflictError(f"write {own_write_id} was aborted by others: begin another transaction")
            if write.ended_at is None:
                raise ValueError(
                    f"the list {str(write_ids)!r} is ahead of the log: write {write.id} is not committed; take a list from LookupTable.valid_write_ids"
                )
            if write.ended_at <= self._page_begin(self.position):
                continue  # lists that were made in later pages do not name this aborted write
            raise VersionGoneError(
                f"write {write.id} was aborted: its rows cannot be read; take a newer list (LookupTable.valid_write_ids)"
            )
        self._check_marks(write_ids, own_write_id)
        if own_write_id is not None:
            return self._version(write_ids, self.position, self.position)
        valid = self._visible(write_ids).valid
        at = max([self.changes[0].position, *(write.ended_at for write in valid if write.ended_at is not None)])
        return self._version(write_ids, at, at)

    def _check_covered(self, write_ids: ValidWriteIdList) -> None:
        """Raise EarlierStateError if a list leaves out a write that was committed up to `since`: this state lacks the rows that the write
        replaced."""

        def is_earlier(id_: int) -> bool:
            write = self.writes.get(id_)
            if write is None:
                return id_ <= self.watermark
            return write.committed and (write.ended_at or 0) <= self.since

        excluded_ids = (*write_ids.open_ids, *write_ids.aborted_ids) if self.since else ()
        if write_ids.high_watermark < self.watermark or any(map(is_earlier, excluded_ids)):
            raise EarlierStateError(
                f"the list {str(write_ids)!r} dates from before log position {self.since}, where this state begins"
            )

    def _check_marks(self, write_ids: ValidWriteIdList, own_write_id: int | None) -> None:
        """Raise VersionGoneError if a list includes a write that deletes rows of a compaction's files, but does not include that compaction.

        A transaction's own write is exempt, because it deletes only rows that the transaction sees.
        """
        visible = self._visible(write_ids)
        usable_ids = {write.id for write in visible.valid}
        excluded_ends = [
            w.ended_at or 0 for w in self.writes.values() if w.committed and w.replaces and w.id not in usable_ids
        ]
        first = min(excluded_ends, default=self.position + 1)
        for write in visible.valid:
            if write.deletes and visible.end(write) > first and not write.replaces and write.id != own_write_id:
                raise VersionGoneError(
                    f"the list {str(write_ids)!r} includes write {write.id}, which deletes rows of files that a compaction has written, but the list "
                    f"lacks this compaction, or writes on which the compaction depends. So it is not known which rows write {write.id} deletes: take a "
                    "newer list (LookupTable.valid_write_ids)"
                )

    def _version(self, write_ids: ValidWriteIdList, at: int, position: int) -> VersionMetadata:
        defined_at, definition = self.definitions[self._last_definition(at)]
        visible_writes = self._visible(write_ids)
        for write in visible_writes.needed_writes:
            if write.vacuumed:
                raise VersionGoneError(
                    f"version {position} needs files of write {write.id}, which were vacuumed: read a later version, and in future vacuum only "
                    "versions that are no longer read"
                )
        # Write ids are not enough: two copies of a table may give the same id to different writes.
        labels = [
            ",".join(write.label for write in writes) for writes in (visible_writes.visible, visible_writes.deleting)
        ]
        schema = text_of_schema(definition.schema)
        digest = digest_of("log", self.table_id, str(defined_at), schema, definition.keys, *labels)
        rewrites = tuple(visible_writes.rewrites())
        return VersionMetadata(
            self.table_id, position, str(write_ids), digest, definition.keys, schema, (), rewrites, position
        )

    def find_needed(self, position: int | None = None) -> list[TableWrite]:
        """The writes that make up the version at a position (None: now): those with visible rows, and those that delete some of these
        rows."""
        return self.find_needed_writes(self.valid_write_ids(position))

    def find_needed_writes(self, write_ids: ValidWriteIdList) -> list[TableWrite]:
        """The writes that make up the version that a list of write ids describes."""
        return self._visible(write_ids).needed_writes

    def find_visible(self, position: int | None = None) -> list[TableWrite]:
        """The writes whose rows are visible in the version at a position (None: now)."""
        return self._visible(self.valid_write_ids(position)).visible

    def files(self, write_ids: ValidWriteIdList) -> Iterator[tuple[DataFile, int, float]]:
        """(file, write id, Unix time of the commit) of each file with visible rows."""
        times = {change.write_id: change.at_s for change in self.changes}
        for write in self._visible(write_ids).visible:
            for file in write.files:
                yield file, write.id, times.get(write.id, 0.0)

    def deletes(self, write_ids: ValidWriteIdList) -> Iterator[DataFile]:
        """The delete files that apply to the result of `files`."""
        return (file for write in self._visible(write_ids).deleting for file in write.deletes)

    def _visible(self, write_ids: ValidWriteIdList) -> VisibleWrites:
        visible_writes = self._visible_by_ids.get(write_ids)
        if visible_writes is None:
            if len(self._visible_by_ids) >= _VISIBLE_KEPT:
                self._visible_by_ids.clear()
            visible_writes = self._visible_by_ids[write_ids] = VisibleWrites(self.writes, write_ids, self.position)
        return visible_writes
