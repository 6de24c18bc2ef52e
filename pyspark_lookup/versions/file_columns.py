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
from pyspark_lookup.storage.stores import IMMUTABLE, Deletes, EqualityGroup, FileVersion, PartitionValues


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

    def partition_codes(self) -> tuple[Numbers, Sequence[PartitionValues | None]]:
        """(for each file the number of its partition, `FileVersion.partition` of each partition)."""
        return np.zeros(len(self.sizes), np.int64), [None]

    @property
    def formats(self) -> pa.Array:
        """The name of each file's format as text; null: the table's format."""
        return pa.nulls(len(self.sizes), pa.string())

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

    @abc.abstractmethod
    def identities(self, rows: Numbers) -> pa.Array:
        """The identities of the files at `rows`."""

    def compare_rows(self, other: FileColumns) -> Numbers | None:
        """For each file, whether it contains the same rows as the file at the same place in `other`; None if `other` has columns of other files."""
        return np.ones(len(self.sizes), np.bool_) if other is self else None

    @property
    def has_deletes(self) -> Numbers:
        """For each file, whether position deletes may apply to it."""
        return np.zeros(len(self.sizes), np.bool_)

    def find_deletes(self, rows: Numbers) -> Iterable[Deletes]:
        """The position deletes that apply to the files at `rows`, each at least once."""
        return (deletes for row in rows[self.has_deletes[rows]].tolist() for deletes in self.deletes_of(row))

    def deletes_of(self, row: int) -> tuple[Deletes, ...]:
        """`FileVersion.deletes` of the file at a row."""
        return self.file(row).deletes

    def encode_vectors(self, rows: Numbers) -> tuple[pa.Array, pa.Array] | None:
        """The deletion vectors of the files at `rows`, one for each: (`Deletes.name`, what `Deletes.to_json` returns, as JSON text).

        None if the files may have other deletes, or if their vectors must become objects.
        """
        return None

    def delete_names(self, rows: Numbers) -> pa.Array:
        """The names of the position deletes that apply to the files at `rows`, perhaps some of them several times."""
        return pa.array([deletes.name for deletes in self.find_deletes(rows)], pa.string())

    @property
    def row_names_have_all_deletes(self) -> bool:
        """Whether `row_names` names all position deletes. It leaves out those that have a file of key columns (`Deletes.keys`)."""
        return True

    @property
    def sequences(self) -> Numbers:
        """`FileVersion.sequence` of each file."""
        return np.zeros(len(self.sizes), np.int64)

    def find_equality_rows(self) -> Iterable[tuple[EqualityGroup, Numbers]]:
        """Pairs (a group of equality deletes, the rows of these columns whose files it applies to), one for each group."""
        return ()

    def find_equality(self, rows: Numbers) -> Iterable[EqualityGroup]:
        """The groups of equality deletes that apply to the files at `rows`, each at least once."""
        return ()

    @abc.abstractmethod
    def partition_values(self, name: str) -> pa.Array:
        """The values of a partition column as text; null where the column is null."""

    @abc.abstractmethod
    def statistics(self, name: str) -> StatsColumns | None:
        """The statistics of a column that the files contain (no partition column); None if they are not known."""


class EmptyColumns(FileColumns):
    """Columns without rows, for a version whose files are all objects."""

    def __init__(self) -> None:
        self.urls, self.sizes = pa.array([], pa.string()), np.zeros(0, np.int64)

    def file(self, row: int) -> FileVersion:
        raise IndexError(row)

    def identities(self, rows: Numbers) -> pa.Array:
        return pa.array([], pa.string())

    def row_names(self, rows: Numbers) -> pa.Array:
        return pa.array([], pa.string())

    def partition_values(self, name: str) -> pa.Array:
        return pa.array([], pa.string())

    def statistics(self, name: str) -> StatsColumns | None:
        return None


@dataclasses.dataclass(frozen=True)
class FileStates:
    """What tells the states of some files apart, as columns: `urls` (binary), `sizes` (int64, in bytes) and `identities` (text).

    URLs are binary because a local file's name need not be UTF-8. The identity is "" for a file whose bytes may not be cached.
    """

    urls: pa.Array
    sizes: Numbers
    identities: pa.Array

    def __len__(self) -> int:
        return len(self.sizes)

    def url(self, place: int) -> str:
        return decode_url(self.urls[place].as_py())

    def take(self, places: Numbers) -> FileStates:
        """The states of the files at `places`."""
        indices = as_indices(places)
        return FileStates(self.urls.take(indices), self.sizes[places], self.identities.take(indices))

    def find(self, other: FileStates) -> Numbers:
        """For each file of `other`, the place where these files have it in the same state; otherwise -1.

        Only the last of several files with one URL is compared. A file with the identity "" is never found.
        """
        if not len(self):
            return np.full(len(other), -1)
        places = _find_in(other.urls, self.urls)
        at = np.maximum(places, 0)
        is_same = (self.sizes[at] == other.sizes) & as_bools(
            pc.equal(self.identities.take(as_indices(at)), other.identities)
        )
        return np.where((places >= 0) & is_same & as_bools(pc.not_equal(other.identities, "")), places, -1)

    def find_urls(self, urls: Iterable[str]) -> Numbers:
        """For each URL, the place of its file among these files; -1 if there is none."""
        return _find_in(pa.array(list(map(encode_url, urls)), pa.binary()), self.urls)


def encode_rows(columns: Iterable[pa.Array], count: int) -> Numbers:
    """A code for each of `count` rows (int64, consecutive from 0). Two rows have the same code if and only if all `columns` are equal; null equals null."""
    numbers = np.zeros(count, np.int64)
    for column in columns:
        codes = as_int64(pc.dictionary_encode(column, null_encoding="encode").indices.cast(pa.int64()))
        numbers = np.unique(numbers * (int(codes.max(initial=0)) + 1) + codes, return_inverse=True)[1]
    return numbers


def split_by_code(codes: Numbers, count: int) -> list[Numbers]:
    """For each code from 0 to `count` - 1, the rows that have it, ascending. `codes`: the code of each row. `count`: at least 1."""
    order = np.argsort(codes, kind="stable")
    return np.split(order, np.searchsorted(codes[order], np.arange(1, count)))


def encode_url(url: str) -> bytes:
    """A URL as UTF-8. Surrogates, which stand for bytes of a file name that are not UTF-8, are encoded, too. The bytes sort as the texts do."""
    return url.encode("utf-8", "surrogatepass")


def decode_url(data: bytes) -> str:
    """The URL that `encode_url` encoded."""
    return data.decode("utf-8", "surrogatepass")


def _find_in(urls: pa.Array, among: pa.Array) -> Numbers:
    """For each URL, its last place in `among`; -1 if it is not there. A version may name a file twice: then the last place stands for both."""
    backwards = among.take(as_indices(np.arange(len(among))[::-1]))
    places = as_int64(pc.fill_null(pc.index_in(urls, value_set=backwards), -1).cast(pa.int64()))
    return np.where(places >= 0, len(among) - 1 - places, -1)


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

    @classmethod
    def from_files(cls, files: Sequence[FileVersion]) -> ColumnFiles:
        """`files` itself if it is a `ColumnFiles`, otherwise the same files beside columns without rows. `files`: ascending by URL."""
        return (
            files if isinstance(files, ColumnFiles) else cls(EmptyColumns(), tuple(files), -1 - np.arange(len(files)))
        )

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, place: int) -> FileVersion: ...
    @overload
    def __getitem__(self, place: slice) -> ColumnFiles: ...
    def __getitem__(self, place: int | slice) -> FileVersion | ColumnFiles:
        if isinstance(place, slice):
            return ColumnFiles(self.columns, self._others, self.order[place])
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
    def sequences(self) -> Numbers:
        """`FileVersion.sequence` of each file."""
        return self._join(self.columns.sequences, [file.sequence for file in self._others], np.int64)

    @cached_property
    def has_deletes(self) -> Numbers:
        """For each file, whether position deletes may apply to it."""
        return self._join(self.columns.has_deletes, [bool(file.deletes) for file in self._others], np.bool_)

    @cached_property
    def states(self) -> FileStates:
        """The states of the files."""
        others = self._others[::-1]
        columns = (
            (
                self.columns.urls.take(as_indices(self.rows)).cast(pa.binary()),
                [encode_url(file.url) for file in others],
            ),
            (self.columns.identities(self.rows), [file.identity if file.cacheable else "" for file in others]),
        )
        urls, identities = (self._join_values(in_columns, of_others) for in_columns, of_others in columns)
        return FileStates(urls, self.sizes, identities)

    @cached_property
    def formats(self) -> pa.Array:
        """The name of each file's format as text; null: the table's format."""
        names = (None if file.format is None else file.format.value for file in reversed(self._others))
        return self._join_values(self.columns.formats.take(as_indices(self.rows)), names)

    @cached_property
    def partition_codes(self) -> tuple[Numbers, list[PartitionValues | None]]:
        """(for each file the number of its partition, `FileVersion.partition` of each partition)."""
        codes, partitions = self.columns.partition_codes()
        partitions = [*partitions]
        numbers = {partition: number for number, partition in enumerate(partitions)}
        for file in self._others:
            if file.partition not in numbers:
                numbers[file.partition] = len(partitions)
                partitions.append(file.partition)
        of_others = [numbers[file.partition] for file in self._others]
        return self._join(codes, of_others, np.int64), partitions

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
            codes = as_int64(texts.indices.cast(pa.int64()))
            # Values of other files need not be of the type, which may come from these files only.
            is_used = np.bincount(codes[self.rows], minlength=len(texts.dictionary)) > 0
            distinct_texts = zip(texts.dictionary.to_pylist(), is_used.tolist(), strict=True)
            distinct_values = pa.array([parse(text, kind) if used else None for text, used in distinct_texts], kind)
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
        """The position deletes that apply to the files, each once."""
        in_columns = self.columns.find_deletes(self.rows)
        of_others = (deletes for file in self._others for deletes in file.deletes)
        return tuple({deletes.name: deletes for deletes in (*in_columns, *of_others)}.values())

    def deletes_of(self, place: int) -> tuple[Deletes, ...]:
        """`FileVersion.deletes` of the file at a place."""
        row = int(self.order[place])
        return self.columns.deletes_of(row) if row >= 0 else self._others[-1 - row].deletes

    @cached_property
    def delete_names(self) -> pa.Array:
        """The names of the position deletes that apply to the files, perhaps some of them several times."""
        names = [deletes.name for file in self.others for deletes in file.deletes]
        return pa.concat_arrays([self.columns.delete_names(self.rows), pa.array(names, pa.string())])

    @cached_property
    def row_names_have_all_deletes(self) -> bool:
        """Whether `row_names` names all position deletes. It leaves out those that have a file of key columns (`Deletes.keys`)."""
        has_keys = any(deletes.keys is not None for file in self._others for deletes in file.deletes)
        return self.columns.row_names_have_all_deletes and not has_keys

    @cached_property
    def equality(self) -> tuple[EqualityGroup, ...]:
        """The groups of equality deletes that apply to the files, each once."""
        in_columns = self.columns.find_equality(self.rows)
        of_others = (group for file in self._others for group in file.equality)
        return tuple({id(group): group for group in (*in_columns, *of_others)}.values())

    def find_equality_places(self) -> list[tuple[EqualityGroup, Numbers]]:
        """Pairs (a group of equality deletes, the places of the files that it applies to), for each group that applies to a file."""
        is_in_columns = self.order >= 0
        place_of_row = np.full(len(self.columns.sizes), -1)
        place_of_row[self.order[is_in_columns]] = np.flatnonzero(is_in_columns)
        places = {id(group): (group, [place_of_row[rows]]) for group, rows in self.columns.find_equality_rows()}
        for place in np.flatnonzero(~is_in_columns).tolist():
            for group in self[place].equality:
                places.setdefault(id(group), (group, []))[1].append(np.array([place]))
        sorted_places = ((group, np.sort(np.concatenate(parts))) for group, parts in places.values())
        return [(group, some[some >= 0]) for group, some in sorted_places if (some >= 0).any()]

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
        return self._join_values(self.columns.row_names(self.rows), names)

    def _join_values(self, in_columns: pa.Array, of_others: Iterable[str | bytes | None]) -> pa.Array:
        """A value for each of these files. `in_columns`: those of the files at `rows`. `of_others`: those of `others`, in reverse order."""
        values = pa.array(list(of_others), in_columns.type)
        if not len(values):
            return in_columns
        is_other = self.order < 0
        order = np.where(is_other, self.order + len(in_columns) + len(values), np.cumsum(~is_other) - 1)
        return pa.concat_arrays([in_columns, values]).take(as_indices(order))

    @cached_property
    def state_names(self) -> pa.Array:
        """For each immutable file its `FileVersion.state_name`, which determines its bytes; null for other files."""
        identities = self.columns.identities(self.rows)
        identities = pc.if_else(pc.starts_with(identities, IMMUTABLE), identities, None)
        urls = self.columns.urls.take(as_indices(self.rows))
        sizes = as_array(self.columns.sizes[self.rows]).cast(pa.string())
        names = pc.binary_join_element_wise(urls, sizes, identities, "\0")
        return self._join_values(names, (file.state_name for file in reversed(self._others)))

    def group_by_partition(self, names: Sequence[str]) -> tuple[Numbers, list[FileVersion]]:
        """(for each file the number of its group, the first file of each group). Files with equal partition values are in one group."""
        texts = [pa.concat_arrays([self.columns.partition_values(name), self._texts(name)]) for name in names]
        groups = encode_rows(texts, len(texts[0]))[self.order]
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
