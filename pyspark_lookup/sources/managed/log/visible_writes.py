"""`VisibleWrites`: which of the writes that are valid in a list of write ids make up a version.

Visible are the rows of the highest valid overwrite and of the writes above it. A compaction takes the place of the writes that it has
compacted. A write by key deletes rows that were committed before it.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyspark_lookup.core.write_ids import ValidWriteIdList
from pyspark_lookup.sources.managed.log.events import WriteMode
from pyspark_lookup.sources.managed.log.writes import TableWrite, TableWrites

_REWRITES_AT_MOST = 8


class VisibleWrites:
    """The visible writes under a list of valid `write_ids`. `position`: that of the log's last event.

    `valid`: the valid writes, without compactions that have no effect. `visible`: those with visible rows. `deleting`: those that may
    delete some of these rows. All are in the order of their ids.
    """

    def __init__(self, writes: TableWrites, write_ids: ValidWriteIdList, position: int) -> None:
        self._writes = writes
        self._position = position
        self.valid, replaced = self._find_usable(write_ids)
        self.visible = self._find_visible(replaced)
        self.deleting = self._find_deleting(replaced)

    def _find_usable(self, write_ids: ValidWriteIdList) -> tuple[list[TableWrite], set[int]]:
        """(the valid writes, the ids of those that compactions among them replace).

        A compaction takes the place of its writes as they were at its commit. It is left out if the list lets through only some of them, or
        leaves out a write that was committed before the compaction and could have deleted or replaced their rows.
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
            # A compaction that the state no longer has is part of a usable one.
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
        """The writes that may delete visible rows: those with deletes that were committed after the first visible write.

        These include writes that an overwrite has replaced: they may have been committed after rows of a higher write id, which are still
        visible.
        """
        first = min((self.end(write) for write in self.visible if write.files), default=self._position + 1)
        deleting_writes = (
            write for write in self.valid if (write.deletes or write.vacuumed) and write.id not in replaced_ids
        )
        return [write for write in deleting_writes if self.end(write) >= first]

    @property
    def needed_writes(self) -> list[TableWrite]:
        """The writes whose rows are visible or that delete some, each once."""
        return list({write.id: write for write in (*self.visible, *self.deleting)}.values())

    def rewrites(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """(names of its files, names of the files that they replaced) for each of the latest compactions, oldest first."""
        compactions = sorted((write for write in self.valid if write.replaces), key=self.end)
        for write in compactions[-_REWRITES_AT_MOST:]:
            replaced_writes = [self._writes[id_] for id_ in write.replaces if id_ in self._writes]
            if len(replaced_writes) == len(write.replaces) and not any(
                replaced_write.vacuumed for replaced_write in replaced_writes
            ):
                # Its deletes may come from writes that are in no version any more, so they count as new.
                file_names = tuple(file.name for file in write.files)
                yield file_names, tuple(name for replaced_write in replaced_writes for name in replaced_write.names)

    def end(self, write: TableWrite) -> int:
        """The position at which a write ended. For an open write, whose rows its transaction sees, the position of the next event."""
        return self._position + 1 if write.ended_at is None else write.ended_at
