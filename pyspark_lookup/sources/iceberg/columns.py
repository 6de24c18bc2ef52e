"""`IcebergColumns`: the data files of a snapshot of a large table as columns, with the deletes that apply to them."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Numbers, as_array, as_bools, as_indices
from pyspark_lookup.columnar.predicate import StatsColumns
from pyspark_lookup.core.decoding import UNREADABLE
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.errors import NotSupportedError
from pyspark_lookup.sources.iceberg.bounds import column_stats, constants, narrow_columns
from pyspark_lookup.sources.iceberg.entries import DATA, Entry
from pyspark_lookup.sources.iceberg.entry_columns import EntryColumns
from pyspark_lookup.sources.iceberg.files import Column, DeleteFileIndex, Group, IcebergFiles, SequencedDeletes
from pyspark_lookup.sources.iceberg.metadata import parse_authority, plain_location
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.stores import Deletes, EqualityGroup, FileVersion, PartitionValues
from pyspark_lookup.versions.file_columns import ColumnFiles, FileColumns, split_by_code

_WORD = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15  # odd; multiplying by it makes a code depend on the order of the deletes


class IcebergColumns(FileColumns):
    """The files of one snapshot: the files in the `rows` of `base`, and those of the `added` entries. `list_deletes`: returns the snapshot's
    delete files. A lookup that caches answer does not need them."""

    def __init__(
        self,
        files: IcebergFiles,
        base: EntryColumns,
        rows: Numbers,
        added: Sequence[Entry],
        list_deletes: Callable[[], Sequence[Entry]],
    ) -> None:
        self.files = files
        self.base = base
        self.urls, self.sizes = base.urls, base.sizes
        self._rows = rows
        self._added = added
        self._list_deletes = list_deletes

    @cached_property
    def _deletes(self) -> Sequence[Entry]:
        return self._list_deletes()

    @cached_property
    def index(self) -> DeleteFileIndex:
        """The snapshot's deletes, by the data files to which they apply."""
        return DeleteFileIndex(self.files, self._deletes, self._oldest)

    def version_files(self) -> ColumnFiles:
        """The data files of the snapshot, for the `files` of a `TableVersion`."""
        others = [self.files.file(entry, self.index) for entry in self._added]
        return ColumnFiles.merge(self, self._rows, others)

    def entries(self) -> list[Entry]:
        """The entries of the snapshot: data files and delete files."""
        return [*map(self.base.entry, self._rows.tolist()), *self._added, *self._deletes]

    def partitions(self) -> tuple[str, ...]:
        """See `IcebergFiles.partitions`."""
        codes = np.flatnonzero(np.bincount(self.base.partition_codes[self._rows])).tolist()
        entries = (*map(self._partition_entry, codes), *self._added)
        return self.files.partitions(frozenset(name for name, _ in self.files.partition(entry)) for entry in entries)

    def _partition_entry(self, code: int) -> Entry:
        """An entry that has the partition with the number `code`, but no file."""
        return Entry("", DATA, "", *self.base.partition(code), 0, 0, 1, {}, {}, {}, {}, (), None, None, None)

    def file(self, row: int) -> FileVersion:
        return self.files.file(self.base.entry(row), self.index)

    # --- columns of the table ---------------------------------------------------------------------

    def identities(self, rows: Numbers) -> pa.Array:
        return self.files.identities(as_array(self.base.sequences[rows]))

    def partition_codes(self) -> tuple[Numbers, Sequence[PartitionValues]]:
        codes = range(len(self.base.partitions))
        return self.base.partition_codes, [self.files.partition(self._partition_entry(code)) for code in codes]

    @property
    def formats(self) -> pa.Array:
        return pc.utf8_lower(self.base.formats)

    def partition_values(self, name: str) -> pa.Array:
        codes = range(len(self.base.partitions))
        texts = [dict(self.files.partition(self._partition_entry(code))).get(name) for code in codes]
        return pa.array(texts, pa.string()).take(as_indices(self.base.partition_codes))

    def statistics(self, name: str) -> StatsColumns | None:
        column = self.files.bounded_columns.get(name)
        if column is None:
            return None
        key = key_of(column.field_id, column.iceberg_type, column.type)[:16]
        return self.base.stats(key, lambda: self._parse_statistics(column))

    def _parse_statistics(self, column: Column) -> StatsColumns:
        base = self.base
        stats = column_stats(base.statistics(column.field_id), base.row_counts, column.iceberg_type, column.type)
        entries = map(self._partition_entry, range(len(base.partitions)))
        partition_stats = [self.files.partition_stats(entry, column, 1) for entry in entries]
        if all(one is None for one in partition_stats):
            return stats
        return narrow_columns(stats, constants(partition_stats, column.type), base.partition_codes)

    # --- deletes ----------------------------------------------------------------------------------

    def _oldest(self) -> Iterable[Entry]:
        """One of the oldest files of each partition, and the files that were added to `base`."""
        return (*(self.base.entry(row) for row in _first_of_each(self.base, self._rows)), *self._added)

    @property
    def sequences(self) -> Numbers:
        return self.base.sequences

    @cached_property
    def has_deletes(self) -> Numbers:
        if not self.index.has_positions:
            return np.zeros(self.base.rows, np.bool_)
        has_deletes: Numbers = self._is_named.copy()
        for _, rows in self._by_partition():
            has_deletes[rows] = True
        return has_deletes

    def find_equality_rows(self) -> Iterable[tuple[EqualityGroup, Numbers]]:
        groups = self.index.equality_groups
        if not self.index.has_equality:
            return
        if None in groups and groups[None].files:
            yield groups[None], np.flatnonzero(self.base.sequences < groups[None].sequence)
        rows_by_code = split_by_code(self.base.partition_codes, len(self.base.partitions))
        for group, codes in self._find_codes({group for group in groups if groups[group].files}).items():
            rows = np.concatenate([rows_by_code[code] for code in codes])
            yield groups[group], rows[self.base.sequences[rows] < groups[group].sequence]

    def _find_codes(self, groups: Container[Group | None]) -> dict[Group, list[int]]:
        """For each of the partitions `groups` that `base` has, its codes in `base`."""
        codes: dict[Group, list[int]] = {}
        for code in range(len(self.base.partitions)):
            group = self.index.group(self._partition_entry(code))
            if group in groups:
                codes.setdefault(group, []).append(code)
        return codes

    def find_equality(self, rows: Numbers) -> Iterable[EqualityGroup]:
        if not self.index.has_equality or not len(rows):
            return
        if {*self.index.equality_groups} == {None}:
            rows = rows[[int(np.argmin(self.base.sequences[rows]))]]
        for row in _first_of_each(self.base, rows):
            yield from self.index.find_equality(self.base.entry(row))

    def find_deletes(self, rows: Numbers) -> Iterable[Deletes]:
        if not self.index.has_positions:
            return
        concerned = np.zeros(self.base.rows, np.bool_)
        concerned[rows] = True
        for row in np.flatnonzero(concerned & self._is_named).tolist():
            yield from self.file(row).deletes
        for deletes, some in self._by_partition():
            if concerned[some].any():
                yield deletes

    def name_rows(self, file: FileVersion) -> str:
        code = 0
        for deletes in file.deletes:
            code = _combine(code, deletes.name)
        return f"{file.url}\0{file.sequence}\0{code}"

    def row_names(self, rows: Numbers) -> pa.Array:
        numbers = [as_array(values[rows]).cast(pa.string()) for values in (self.base.sequences, self._delete_codes)]
        return pc.binary_join_element_wise(self.urls.take(as_indices(rows)), *numbers, "\0")

    def compare_rows(self, other: FileColumns) -> Numbers | None:
        if not isinstance(other, IcebergColumns) or other.base is not self.base:
            return None
        is_same: Numbers = self._delete_codes == other._delete_codes
        return is_same

    @cached_property
    def _delete_codes(self) -> Numbers:
        """A number for each file of `base`. Files with different position deletes have different numbers."""
        codes = np.zeros(self.base.rows, np.uint64)
        if not self.index.has_positions:
            return codes
        for deletes, rows in self._by_partition():
            codes[rows] = codes[rows] * np.uint64(_FACTOR) + np.uint64(_hash(deletes.name))
        for row in np.flatnonzero(self._is_named).tolist():
            code = 0
            for deletes in self.file(row).deletes:
                code = _combine(code, deletes.name)
            codes[row] = code
        return codes

    @cached_property
    def _is_named(self) -> Numbers:
        """For each file of `base`, whether it may have a deletion vector, or a delete file for this file only."""
        named = self.index.named
        if not named:
            return np.zeros(self.base.rows, np.bool_)
        urls = set()
        for location in named:
            with contextlib.suppress(NotSupportedError, *UNREADABLE):  # the location is not that of a file of the table
                urls.add(self.files.resolve_url(location))
        is_named = as_bools(pc.is_in(self.urls, value_set=pa.array(sorted(urls), pa.string())))
        if not self.files.has_plain_urls:  # one path may have several URLs
            plain = (plain_location(location) in named for location in self.base.locations.to_pylist())
            is_named |= np.fromiter(plain, np.bool_, self.base.rows)
        return is_named

    def _by_partition(self) -> Iterable[tuple[Deletes, Numbers]]:
        """(deletes, the rows of `base` that they concern) for the deletes that may concern several files of a partition. A row may be repeated.

        Files that may have a deletion vector, or a delete file for this file only, are left out.
        """
        for sequenced, parts in self._rows_by_deletes:
            rows = np.concatenate(parts)
            yield sequenced.deletes, rows[self.base.sequences[rows] <= sequenced.sequence]

    @cached_property
    def _rows_by_deletes(self) -> list[tuple[SequencedDeletes, tuple[Numbers, ...]]]:
        """For the deletes of `_by_partition`, the rows whose files they may name (see `SequencedDeletes.may_name`), whatever their sequence number.

        The rows are slices of arrays that the deletes of a partition share: there may be many deletes of many files.
        """
        groups = self.index.by_partition
        if not groups:
            return []
        base, ranges = self.base, list[tuple[SequencedDeletes, tuple[Numbers, ...]]]()
        places = split_by_code(base.partition_codes[base.by_location], len(base.partitions))
        for group, codes in self._find_codes(groups).items():
            rows = base.by_location[np.sort(np.concatenate([places[code] for code in codes]))]
            rows = rows[~self._is_named[rows]]
            incomparable_rows: dict[str, Numbers] = {}
            for sequenced in groups[group]:
                low, high = sequenced.paths
                if low is None or high is None or parse_authority(low) != parse_authority(high):
                    ranges.append((sequenced, (rows,)))
                    continue
                authority = parse_authority(low)
                if authority not in incomparable_rows:
                    differs = pc.not_equal(base.authorities.take(as_indices(rows)), authority)
                    incomparable_rows[authority] = rows[as_bools(differs)]
                start = bisect.bisect_left(rows, low, key=self._location)
                stop = bisect.bisect_right(rows, high, key=self._location)
                ranges.append((sequenced, (rows[start:stop], incomparable_rows[authority])))
        return ranges

    def _location(self, row: int) -> str:
        location: str = self.base.locations[int(row)].as_py()
        return location


def _first_of_each(base: EntryColumns, rows: Numbers) -> list[int]:
    """For each partition among `rows`, one row with the lowest sequence number."""
    order = np.lexsort((base.sequences[rows], base.partition_codes[rows]))
    _, first = np.unique(base.partition_codes[rows][order], return_index=True)
    first_rows: list[int] = rows[order][first].tolist()
    return first_rows


def _hash(name: str) -> int:
    return int(key_of(name)[:16], 16)


def _combine(code: int, name: str) -> int:
    return (code * _FACTOR + _hash(name)) & _WORD
