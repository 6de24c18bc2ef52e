"""`ColumnFiles`: the data files of a version of a large table, as columns. A `FileVersion` object is made only for a file that is requested.

A query reads few files of a large table. So no step may make an object for each file of the version: neither the first read in a new process,
nor the step to a version in which a commit changed some files, nor the search for the files that a query needs.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Numbers, as_array, as_bools, as_indices, as_int64
from pyspark_lookup.columnar.predicate import ColumnStats, Predicate, StatsColumns, may_match, may_match_files
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.storage.stores import Deletes, EqualityGroup, FileVersion, PartitionValues


class FileColumns(abc.ABC):
    """Data files as columns, one row for each file. The files never change in place, so their bytes may be cached.

    `urls`: text, ascending. `sizes`: bytes (int64).
    """

    urls: pa.Array
    sizes: Numbers

    @abc.abstractmethod
    def file(self, row: int) -> FileVersion:
        """The file at a row of these columns."""

    @property
    def modified_at_s(self) -> Numbers:
        """When the files were modified (Unix time); 0.0 where that is not known."""
        return np.zeros(len(self.sizes))

    def partition_of(self, file: FileVersion) -> PartitionValues:
        """The values of the partition columns of a file that was added since these columns were made."""
        return file.partition or ()

    @abc.abstractmethod
    def row_names(self, rows: Numbers) -> pa.Array:
        """For each of the files at `rows`, the text that `name_rows` returns."""

    def name_rows(self, file: FileVersion) -> str:
        """A text by which files are compared: files with equal texts contain the same rows.

        It has the file's URL, its size and identity if the file may be overwritten, and its deletes, except for deletes whose keys are known.
        """
        state = [] if file.immutable else [str(file.size), file.identity]
        return "\0".join([file.url, *state, *(deletes.name for deletes in file.deletes if deletes.keys is None)])

    def identities(self, rows: Numbers) -> pa.Array | None:
        """The identities of the files at `rows`, if all of them are immutable; None if only an object for each file would tell this."""
        return None

    def compare_rows(self, other: FileColumns) -> Numbers | None:
        """For each file, whether it contains the same rows as the file at the same place in `other`; None if `other` has columns of other files."""
        return np.ones(len(self.sizes), np.bool_) if other is self else None

    def find_deletes(self, rows: Numbers) -> Iterable[Deletes]:
        """The deletes by position that concern the files at `rows`, each at least once."""
        return (deletes for row in rows.tolist() for deletes in self.file(row).deletes)

    def find_equality(self, rows: Numbers) -> Iterable[EqualityGroup]:
        """The groups of deletes by value that concern the files at `rows`, each at least once."""
        return ()

    @abc.abstractmethod
    def partition_values(self, name: str) -> pa.Array:
        """The values of a partition column as text; null where the column is null."""

    @abc.abstractmethod
    def statistics(self, name: str) -> StatsColumns | None:
        """The statistics of a column that the files contain (no partition column); None if they are not known."""


ParseText = Callable[[str | None, pa.DataType], object]
"""A function that returns a partition column's value from its text (None: null) and type. Raises ValueError if the type has no such value."""


class ColumnFiles(Sequence[FileVersion]):
    """Files of a version, ascending by URL: some of the files in `columns`, and `others`, files added since these columns were made.

    `order`: for each file its row in `columns` (0 or more), or -1 minus its place in `others`.
    """

    def __init__(self, columns: FileColumns, others: tuple[FileVersion, ...], order: Numbers) -> None:
        self.columns = columns
        self._others = others
        self.order = order

    @classmethod
    def merge(cls, columns: FileColumns, rows: Numbers, others: Iterable[FileVersion]) -> ColumnFiles:
        """The files at `rows` (ascending) of `columns`, together with the files `others`."""
        added = tuple(sorted(others, key=lambda file: file.url))
        places = [_find_place(columns.urls, file.url) for file in added]
        order = np.insert(rows, np.searchsorted(rows, places), -1 - np.arange(len(added))) if added else rows
        return cls(columns, added, order)

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, place: int) -> FileVersion: ...
    @overload
    def __getitem__(self, place: slice) -> ColumnFiles: ...
    def __getitem__(self, place: int | slice) -> FileVersion | ColumnFiles:
        if isinstance(place, slice):
            return self.take(np.arange(len(self))[place])
        row = int(self.order[place])
        return self.columns.file(row) if row >= 0 else self._others[-1 - row]

    def __iter__(self) -> Iterator[FileVersion]:
        for row in self.order.tolist():
            yield self.columns.file(row) if row >= 0 else self._others[-1 - row]

    def take(self, places: Numbers) -> ColumnFiles:
        """The files at `places`, which are ascending."""
        return ColumnFiles(self.columns, self._others, self.order[places])

    @cached_property
    def rows(self) -> Numbers:
        """The rows of `columns` whose files are among these files, ascending."""
        return self.order[self.order >= 0]

    @cached_property
    def others(self) -> tuple[FileVersion, ...]:
        """The files that are not in the columns, ascending by URL."""
        return tuple(self._others[place] for place in sorted((-1 - self.order[self.order < 0]).tolist()))

    @cached_property
    def sizes(self) -> Numbers:
        """The sizes of the files in bytes, as int64."""
        return self._join(self.columns.sizes, [file.size for file in self._others], np.int64)

    @cached_property
    def modified_at_s(self) -> Numbers:
        """When the files were modified (Unix time); 0.0 where that is not known."""
        return self._join(self.columns.modified_at_s, [file.modified_at_s or 0.0 for file in self._others], np.float64)

    @cached_property
    def cacheable(self) -> bool:
        """Whether data that was read from the files may be cached."""
        return all(file.cacheable for file in self._others)

    @cached_property
    def is_settled(self) -> bool:
        """Whether all files are `settled`."""
        return all(file.settled for file in self._others)

    def settled(self) -> ColumnFiles:
        """The same files, each marked as `settled`."""
        others = tuple(dataclasses.replace(file, settled=True) for file in self._others)
        return ColumnFiles(self.columns, others, self.order)

    def _join(self, in_columns: Numbers, of_others: Sequence[float], kind: type) -> Numbers:
        """A value for each of these files. `in_columns`: a value for each row of `columns`. `of_others`: a value for each of `others`."""
        if not self._others:
            return in_columns[self.order]
        # In `order`, -1 is the first of the other files. To numpy it is the last item, so these are appended in reverse order.
        return np.concatenate([in_columns, np.array(of_others[::-1], kind)])[self.order]

    def prune(
        self,
        predicate: Predicate,
        partitions: pa.Schema,
        parse: ParseText,
        footers: Mapping[str, StatsColumns] | None = None,
    ) -> ColumnFiles:
        """The files that may have rows for which the predicate is true. Raises the ValueError that `parse` raises for a partition value.

        `partitions`: the partition columns. `footers`: for some columns, by name, the statistics in the files' footers, with a row for each
        row of `columns`.
        """

        def stats_columns(name: str) -> StatsColumns | None:
            if name not in partitions.names:
                in_footers = None if footers is None else footers.get(name)
                return self.columns.statistics(name) if in_footers is None else in_footers
            texts = pc.dictionary_encode(self.columns.partition_values(name), null_encoding="encode")
            kind = partitions.field(name).type
            distinct_values = pa.array([parse(text, kind) for text in texts.dictionary.to_pylist()], kind)
            return StatsColumns.from_constants(distinct_values.take(texts.indices))

        def stats(file: FileVersion, name: str) -> ColumnStats | None:
            if name in partitions.names:
                text = dict(self.columns.partition_of(file)).get(name)
                return ColumnStats.from_constant(parse(text, partitions.field(name).type))
            return None if file.statistics is None else file.statistics.bounds.get(name)

        in_columns = may_match_files(predicate, stats_columns, len(self.columns.sizes))
        of_others = [may_match(predicate, functools.partial(stats, file)) for file in self._others]
        return self.take(np.flatnonzero(self._join(in_columns, of_others, np.bool_)))

    @cached_property
    def deletes(self) -> tuple[Deletes, ...]:
        """The deletes by position that concern the files, each once."""
        in_columns = self.columns.find_deletes(self.rows)
        of_others = (deletes for file in self._others for deletes in file.deletes)
        return tuple({deletes.name: deletes for deletes in (*in_columns, *of_others)}.values())

    @cached_property
    def equality(self) -> tuple[EqualityGroup, ...]:
        """The groups of deletes by value that concern the files, each once."""
        in_columns = self.columns.find_equality(self.rows)
        of_others = (group for file in self._others for group in file.equality)
        return tuple({id(group): group for group in (*in_columns, *of_others)}.values())

    def difference(self, other: ColumnFiles) -> ColumnFiles:
        """The files that `other` lacks, or has with other deleted rows."""
        is_same = self.columns.compare_rows(other.columns)
        if is_same is None:
            return self.take(np.flatnonzero(~as_bools(pc.is_in(self.row_names, value_set=other.row_names))))
        new, gone = self._lacking(other, is_same), other._lacking(self, is_same)
        if not len(new) or not len(gone):
            return new
        # A file may be in the columns of one version, and among `others` of the second version.
        is_known = pc.is_in(new.row_names, value_set=gone.row_names)
        return new.take(np.flatnonzero(~as_bools(is_known)))

    def _lacking(self, other: ColumnFiles, is_same: Numbers) -> ColumnFiles:
        """The files of this object that `other` lacks, or has with other rows. Both objects have the same `columns`.

        A file that only one of the two has in `columns`, while the other has it among `others`, counts as lacking.
        """
        is_known = np.zeros(len(self.columns.sizes), np.bool_)
        is_known[other.rows] = True
        known_names = {self.columns.name_rows(file) for file in other._others}
        is_new = [self.columns.name_rows(file) not in known_names for file in self._others]
        return self.take(np.flatnonzero(self._join(~(is_known & is_same), is_new, np.bool_)))

    @cached_property
    def row_names(self) -> pa.Array:
        names = (self.columns.name_rows(file) for file in reversed(self._others))
        return self._join_texts(self.columns.row_names(self.rows), names)

    def _join_texts(self, in_columns: pa.Array, of_others: Iterable[str | None]) -> pa.Array:
        """A text for each of these files. `in_columns`: those of the files at `rows`. `of_others`: those of `others`, in reverse order."""
        texts = pa.array(list(of_others), pa.string())
        is_other = self.order < 0
        order = np.where(is_other, self.order + len(in_columns) + len(texts), np.cumsum(~is_other) - 1)
        return pa.concat_arrays([in_columns, texts]).take(as_indices(order))

    @cached_property
    def state_names(self) -> pa.Array:
        """For each immutable file its `FileVersion.state_name`, which determines its bytes; null for other files."""
        identities = self.columns.identities(self.rows)
        if identities is None:
            names = pa.nulls(len(self.rows), pa.string())
        else:
            urls = self.columns.urls.take(as_indices(self.rows))
            sizes = as_array(self.columns.sizes[self.rows]).cast(pa.string())
            names = pc.binary_join_element_wise(urls, sizes, identities, "\0")
        return self._join_texts(names, (file.state_name for file in reversed(self._others)))

    def group_by_partition(self, names: Sequence[str]) -> tuple[Numbers, list[FileVersion]]:
        """(for each file the number of its group, the first file of each group). Files with equal partition values are in one group."""
        texts = [pa.concat_arrays([self.columns.partition_values(name), self._texts(name)]) for name in names]
        groups = np.zeros(len(texts[0]), np.int64)
        for column in texts:
            codes = as_int64(pc.dictionary_encode(column, null_encoding="encode").indices.cast(pa.int64()))
            groups = np.unique(groups * (int(codes.max(initial=0)) + 1) + codes, return_inverse=True)[1]
        groups = groups[self.order]
        _, first_places, groups = np.unique(groups, return_index=True, return_inverse=True)
        return groups, [self[int(place)] for place in first_places]

    def _texts(self, name: str) -> pa.Array:
        """The values of a partition column of the files in `others`, in reverse order."""
        texts = (dict(self.columns.partition_of(file)).get(name) for file in reversed(self._others))
        return pa.array(list(texts), pa.string())


def _find_place(urls: pa.Array, url: str) -> int:
    """The row before which a URL belongs among `urls`, which are ascending."""
    low, high = 0, len(urls)
    while low < high:
        middle = (low + high) // 2
        if urls[middle].as_py() < url:
            low = middle + 1
        else:
            high = middle
    return low
