"""`TableState`: what a managed table's log says up to a position, and which of its versions follow from that.

A version is what a `ValidWriteIdList` lets through: the files of the highest valid overwrite and of the valid
writes above it. Equal sets of such writes are equal versions, whatever else the lists know (HIVE-21637's
equivalence), so a version's digest is made of them.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pyspark_lookup.base.decoding import UNREADABLE, count_of, counts_of, number_of, text_of
from pyspark_lookup.base.errors import DamagedFileError, VersionGoneError, WriteConflictError
from pyspark_lookup.base.write_ids import ValidWriteIdList
from pyspark_lookup.columnar.types import text_of_schema
from pyspark_lookup.io.disk import key_of
from pyspark_lookup.table.log.events import (
    FORMAT,
    Abort,
    Allocate,
    Alter,
    Batch,
    Commit,
    Create,
    DataFile,
    Definition,
    Event,
    Vacuum,
    Write,
    WriteMode,
    definition_json,
    definition_of,
    files_of,
    id_of,
    parse,
)
from pyspark_lookup.table.log.visible_writes import VisibleWrites
from pyspark_lookup.table.log.writes import Change, TableWrite
from pyspark_lookup.table.model import VersionMetadata

_VISIBLE_KEPT = 4  # of the lists that versions were asked for by


class TableState:
    """A managed table after the event at `position`, whose nonce is `nonce`; never changed once made."""

    def __init__(self, table_id: str, position: int, nonce: str) -> None:
        self.table_id = table_id
        self.position = position
        self.nonce = nonce
        self.writes: dict[int, TableWrite] = {}
        self.batches: dict[str, int] = {}
        self.changes: list[Change] = []
        self.oldest = 1  # from this position on every version can be read
        self.memo: dict[Any, Any] = {}  # what others have made of this state; not part of it
        self._visible_by_ids: dict[ValidWriteIdList, VisibleWrites] = {}
        self._definitions: list[tuple[int, Definition]] = []
        self._replaced_by = 0  # the highest overwrite that is committed
        self._keyed_by = 0  # the highest write by key that is

    # --- from events ------------------------------------------------------------------------------

    @classmethod
    def begin(cls, event: Event, origin: str) -> TableState:
        """The state after a table's first event. Raises DamagedFileError if it is none."""
        if not isinstance(event, Create) or event.position != 1:
            raise DamagedFileError(f"{origin} does not create the table, as its first event should")
        state = cls(event.table_id, 1, event.nonce)
        state._define(event.position, event.at_s, event.definition)
        return state

    def advance(self, events: Iterable[Event]) -> TableState:
        """The state after those events too. Raises DamagedFileError if one cannot follow what is before it."""
        state = TableState(self.table_id, self.position, self.nonce)
        state.writes, state.batches = dict(self.writes), dict(self.batches)
        state.changes, state._definitions = list(self.changes), list(self._definitions)
        state._replaced_by, state._keyed_by, state.oldest = self._replaced_by, self._keyed_by, self.oldest
        for event in events:
            state._take(event)
        return state

    def _take(self, event: Event) -> None:
        if event.position != self.position + 1:
            raise DamagedFileError(f"event {event.position} of table {self.table_id} follows event {self.position}")
        if event.table_id != self.table_id:
            # A writer of a table that was dropped here has put it, and died before it saw that.
            self.position, self.nonce = event.position, event.nonce
            return
        match event:
            case Allocate():
                if event.write_id != self.high_watermark + 1:
                    raise self._contradiction(event, f"allocates write id {event.write_id}")
                self.writes[event.write_id] = TableWrite(event.write_id, event.mode, event.position, nonce=event.nonce)
            case Write():
                write = self._open(event, event.write_id)
                files, deletes = (*write.files, *event.files), (*write.deletes, *event.deletes)
                self.writes[write.id] = dataclasses.replace(write, files=files, deletes=deletes)
                self._replace(event, write.id, event.replaces)
            case Commit():
                self._commit(event, self._open(event, event.write_id))
            case Abort():
                write = self._open(event, event.write_id)
                ended = TableWrite(write.id, write.mode, write.allocated_at, ended_at=event.position, nonce=write.nonce)
                self.writes[write.id] = ended
            case Alter():
                self._define(event.position, event.at_s, event.definition)
            case Vacuum():
                for id_ in event.write_ids:
                    if id_ not in self.writes or self.writes[id_].ended_at is None:
                        raise self._contradiction(event, f"removes the files of write {id_}, which has not ended")
                    self.writes[id_] = dataclasses.replace(self.writes[id_], files=(), deletes=(), vacuumed=True)
                if event.oldest > event.position:
                    raise self._contradiction(event, f"keeps what is after event {event.oldest} only")
                self.oldest = max(self.oldest, event.oldest)
            case _:
                raise self._contradiction(event, "creates the table once more")
        self.position, self.nonce = event.position, event.nonce

    def _replace(self, event: Event, write_id: int, replaces: tuple[int, ...]) -> None:
        """Take it that a compaction's files have the rows of those writes."""
        if not replaces:
            return
        if any(id_ >= write_id or not self.writes[id_].committed for id_ in replaces):
            raise self._contradiction(event, f"compacts writes into write {write_id} that were not committed before")
        self.writes[write_id] = self.writes[write_id].replacing(self.writes, replaces)

    def _commit(self, event: Commit, write: TableWrite) -> None:
        self.writes[write.id] = dataclasses.replace(write, ended_at=event.position, committed=True)
        self._rank(write)
        if event.definition is not None:
            self._definitions.append((event.position, event.definition))
        if event.batch is not None:
            self.batches[event.batch.query] = event.batch.id
        self.changes.append(Change(event.position, event.at_s, write.id))

    def _rank(self, write: TableWrite) -> None:
        if write.mode is WriteMode.OVERWRITE:
            self._replaced_by = max(self._replaced_by, write.id)
        if write.mode.by_key or (write.deletes and not write.replaces):
            self._keyed_by = max(self._keyed_by, write.id)

    def _define(self, position: int, at_s: float, definition: Definition) -> None:
        self._definitions.append((position, definition))
        self.changes.append(Change(position, at_s, None))

    def _open(self, event: Event, write_id: int) -> TableWrite:
        write = self.writes.get(write_id)
        if write is None or write.ended_at is not None:
            raise self._contradiction(event, f"is about write id {write_id}, which is not open")
        return write

    def _contradiction(self, event: Event, what: str) -> DamagedFileError:
        return DamagedFileError(f"event {event.position} of table {self.table_id} {what}: the log is damaged")

    # --- what a writer may do ---------------------------------------------------------------------

    @property
    def high_watermark(self) -> int:
        """The highest write id that was allocated; 0 without any."""
        return len(self.writes)

    @property
    def definition(self) -> Definition:
        """The table's columns, keys and properties now."""
        return self._definitions[-1][1]

    def definition_at(self, position: int) -> Definition:
        """The same as it was after the event at a position."""
        last = bisect.bisect_right(self._definitions, position, key=lambda definition: definition[0]) - 1
        return self._definitions[last][1]

    def rekeyed(self, position: int) -> bool:
        """Whether the key columns were others at some time since a position."""
        keys = self.definition_at(position).keys
        return any(definition.keys != keys for at, definition in self._definitions if at > position)

    def open_writes(self) -> list[TableWrite]:
        """The writes that have not ended, by id."""
        return [write for write in self.writes.values() if write.ended_at is None]

    def check_open(self, write_id: int) -> TableWrite:
        """The write, if it may still be committed. Raises WriteConflictError by name if it may not."""
        write = self.writes.get(write_id)
        if write is None or (write.ended_at is not None and not write.committed):
            raise WriteConflictError(
                f"write {write_id} of table {self.table_id} was aborted, by its writer or because nothing was heard of that "
                "for lookup.write.timeout: write again"
            )
        if write.committed:
            raise WriteConflictError(f"write {write_id} of table {self.table_id} is committed already")
        if write.mode is WriteMode.OVERWRITE and self._keyed_by > write_id:
            # Its rows would stay beside those of the same keys.
            raise WriteConflictError(
                f"write {write_id} of table {self.table_id}, an overwrite, began before write {self._keyed_by}, which has "
                "written by key and is committed: write again"
            )
        if write.mode is WriteMode.OVERWRITE:
            self._check_compactions(write_id)
        if self._replaced_by > write_id and write.mode is not WriteMode.ALTER:
            raise WriteConflictError(
                f"write {write_id} of table {self.table_id} began before write {self._replaced_by}, which has replaced the "
                "table's rows and is committed: its rows would never be seen; write again"
            )
        return write

    def _check_compactions(self, write_id: int) -> None:
        """Raise WriteConflictError if an overwrite would replace some of the rows of a compaction, and not others."""
        for write in self.writes.values():
            if write.committed and write.replaces and write.least < write_id < write.rank:
                raise WriteConflictError(
                    f"write {write_id} of table {self.table_id}, an overwrite, began before write {write.rank}, which was "
                    f"compacted together with older ones by write {write.id}: write again"
                )

    def is_committed(self, batch: Batch) -> bool:
        """Whether a stream's micro-batch, or a later one of that stream, is committed."""
        return self.batches.get(batch.query, -1) >= batch.id

    # --- versions ---------------------------------------------------------------------------------

    def valid_write_ids(self, position: int | None = None) -> ValidWriteIdList:
        """Which writes are valid after the event at `position` (None: now). Raises ValueError for one beyond the log."""
        at = self.position if position is None else position
        if not 1 <= at <= self.position:
            raise ValueError(f"log position {at} of table {self.table_id}: the log goes from 1 to {self.position}")
        # Ids are allocated in the log's order.
        allocated = bisect.bisect_right(
            range(1, len(self.writes) + 1), at, key=lambda id_: self.writes[id_].allocated_at
        )
        invalid = [write for write in self.writes.values() if not write.committed or (write.ended_at or 0) > at]
        invalid = [write for write in invalid if write.id <= allocated]
        opened = [write.id for write in invalid if write.ended_at is None or write.ended_at > at]
        aborted = {write.id for write in invalid}.difference(opened)
        return ValidWriteIdList(self.table_id, allocated, opened, aborted)

    def version(self, position: int | None = None) -> VersionMetadata:
        """The version after the event at `position` (None: now). Raises ValueError for one beyond the log."""
        write_ids = self.valid_write_ids(position)
        at = self.position if position is None else position
        last = bisect.bisect_right(self.changes, at, key=lambda change: change.position) - 1
        return self._version(write_ids, at, self.changes[last].position)

    def version_of(self, write_ids: ValidWriteIdList, own: int | None = None) -> VersionMetadata:
        """The version that a list lets through, with the columns and keys that the table had after the last of these writes.

        `own`: an open write that it may let through, in the table's present columns.

        Raises ValueError for a list of another table, or one that is ahead of the log (a write's files are not usable before
        its commit), and VersionGoneError if it lets through a write that was aborted.
        """
        if write_ids.table != self.table_id:
            raise ValueError(f"the list {str(write_ids)!r} is not of this table, whose id is {self.table_id}")
        if write_ids.high_watermark > self.high_watermark:
            raise ValueError(
                f"the list {str(write_ids)!r} is ahead of the log, in which {self.high_watermark} writes have begun"
            )
        for write in self.writes.values():
            if write.committed or not write_ids.is_valid(write.id) or (write.id == own and write.ended_at is None):
                continue
            if write.id == own:
                raise WriteConflictError(
                    f"write {own} of table {self.table_id} was aborted by others: begin another one"
                )
            if write.ended_at is None:
                raise ValueError(f"the list {str(write_ids)!r} is ahead of the log: write {write.id} is not committed")
            raise VersionGoneError(f"write {write.id} of table {self.table_id} was aborted: its rows cannot be read")
        self._check_marks(write_ids, own)
        valid = self._visible(write_ids).valid
        ends = max((write.ended_at for write in valid if write.ended_at is not None), default=1)
        if own is not None:
            return self._version(write_ids, self.position, self.position)
        # Definitions without a write id, of earlier releases, go with the writes before them.
        following = min(
            (c.position for c in self.changes if c.position > ends and c.write_id), default=self.position + 1
        )
        unnumbered = (c.position for c in self.changes if c.write_id is None and c.position < following)
        at = max([ends, *unnumbered])
        return self._version(write_ids, at, at)

    def _check_marks(self, write_ids: ValidWriteIdList, own: int | None) -> None:
        """Raise VersionGoneError if a list lets through deletes in the files of a compaction that it does not see.

        What a transaction deletes, `own`, are rows as it sees them.
        """
        visible = self._visible(write_ids)
        usable = {write.id for write in visible.valid}
        left_out = [w.ended_at or 0 for w in self.writes.values() if w.committed and w.replaces and w.id not in usable]
        first = min(left_out, default=self.position + 1)
        for write in visible.valid:
            if write.deletes and visible.end(write) > first and not write.replaces and write.id != own:
                raise VersionGoneError(
                    f"the list {str(write_ids)!r} lets through write {write.id}, which was made after a compaction, and not all "
                    "that was replaced by it: which rows it deletes among those is not known"
                )

    def _version(self, write_ids: ValidWriteIdList, at: int, position: int) -> VersionMetadata:
        last = bisect.bisect_right(self._definitions, at, key=lambda definition: definition[0]) - 1
        defined_at, definition = self._definitions[last]
        found = self._visible(write_ids)
        for write in found.needed:
            if write.vacuumed:
                raise VersionGoneError(
                    f"version {position} of table {self.table_id} needs files of write {write.id}, which were vacuumed: read a "
                    "later version, or vacuum what is older only"
                )
        # Write ids are not enough: two copies of a table that went on apart have given the same ones to other writes.
        labels = [",".join(write.label for write in writes) for writes in (found.visible, found.deleting)]
        schema = text_of_schema(definition.schema)
        digest = key_of("log", self.table_id, str(defined_at), schema, definition.keys, *labels)
        rewrites = tuple(found.rewrites())
        return VersionMetadata(
            self.table_id, position, str(write_ids), digest, definition.keys, schema, rewrites=rewrites
        )

    def find_needed(self, position: int | None = None) -> list[TableWrite]:
        """The writes that the version at a position (None: now) is made of: those whose rows are visible, and those that delete some."""
        return self._visible(self.valid_write_ids(position)).needed

    def find_visible(self, position: int | None = None) -> list[TableWrite]:
        """Those whose rows are visible."""
        return self._visible(self.valid_write_ids(position)).visible

    def files(self, write_ids: ValidWriteIdList) -> Iterator[tuple[DataFile, int, float]]:
        """The files whose rows are visible, with their write's id and the time of its commit."""
        times = {change.write_id: change.at_s for change in self.changes}
        for write in self._visible(write_ids).visible:
            for file in write.files:
                yield file, write.id, times.get(write.id, 0.0)

    def deletes(self, write_ids: ValidWriteIdList) -> Iterator[DataFile]:
        """The files that say which rows of `files` are deleted."""
        return (file for write in self._visible(write_ids).deleting for file in write.deletes)

    def _visible(self, write_ids: ValidWriteIdList) -> VisibleWrites:
        """What counts where a list says what is valid."""
        found = self._visible_by_ids.get(write_ids)
        if found is None:
            if len(self._visible_by_ids) >= _VISIBLE_KEPT:
                self._visible_by_ids.clear()
            found = self._visible_by_ids[write_ids] = VisibleWrites(self.writes, write_ids, self.position)
        return found

    # --- checkpoints ------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The state as JSON can hold it."""
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
                write.vacuumed,
                write.nonce,
            ]
            for write in self.writes.values()
        ]
        return {
            "format": FORMAT,
            "table": self.table_id,
            "position": self.position,
            "nonce": self.nonce,
            "writes": writes,
            "definitions": [[position, definition_json(definition)] for position, definition in self._definitions],
            "batches": self.batches,
            "oldest": self.oldest,
            "changes": [[change.position, change.at_s, change.write_id] for change in self.changes],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any], origin: str) -> TableState:
        """The state that `to_json` wrote. Raises DamagedFileError for anything else."""
        try:
            state = cls(id_of(found["table"]), count_of(found["position"]), text_of(found["nonce"]))
            for number, (id_, mode, allocated_at, ended_at, committed, files, *more) in enumerate(found["writes"], 1):
                ended = None if ended_at is None else count_of(ended_at)
                deletes, replaces, vacuumed, *nonce = more
                write = TableWrite(
                    id_, WriteMode(mode), count_of(allocated_at), files_of(files), ended, committed, files_of(deletes)
                )
                write = dataclasses.replace(write, vacuumed=bool(vacuumed), nonce=text_of(*nonce) if nonce else "")
                if replaces:
                    write = write.replacing(state.writes, counts_of(replaces))
                within = write.allocated_at < (write.ended_at or state.position + 1) <= state.position + 1
                if id_ != number or not isinstance(committed, bool) or not within or (committed and ended is None):
                    raise ValueError(f"write {number} cannot be")
                state.writes[number] = write
                if write.committed:
                    state._rank(write)
            state._definitions = [(count_of(position), definition_of(text)) for position, text in found["definitions"]]
            state.oldest = count_of(found["oldest"])
            state.batches = {text_of(query): count_of(batch) for query, batch in found["batches"].items()}
            state.changes = [
                Change(count_of(position), number_of(at), None if id_ is None else count_of(id_))
                for position, at, id_ in found["changes"]
            ]
            state._check()
        except UNREADABLE as problem:
            raise DamagedFileError(f"{origin} is no state of a table's log: {problem!r}") from None
        return state

    def _check(self) -> None:
        """Raise ValueError where the parts of a state that was read contradict each other."""
        changes = [change.position for change in self.changes]
        defined = [position for position, _ in self._definitions]
        for positions in (changes, defined):
            if (
                not positions
                or positions[0] != 1
                or positions != sorted(set(positions))
                or positions[-1] > self.position
            ):
                raise ValueError("a table is created by its first event, and nothing comes after its last")
        if not 1 <= self.oldest <= self.position:
            raise ValueError("the oldest version that can be read is one of the log")
        commits = {write.ended_at: write.id for write in self.writes.values() if write.committed}
        if {c.position: c.write_id for c in self.changes if c.write_id is not None} != commits:
            raise ValueError("its commits are others than its changes")

    @classmethod
    def of_bytes(cls, data: bytes, origin: str) -> TableState:
        """The state in a checkpoint's file. Raises DamagedFileError, and NotSupportedError for a later format."""
        return cls.from_json(parse(data, origin), origin)
