"""`RecordedColumns`: the data files of a version of a large table, as columns in a self-contained record.

The host keeps the columns of the current version of a Delta or Iceberg table, and replaces them as the table grows. A snapshot, or the log of a
partial cache's changes, may need an older version. So its record has all files of that version, and refers to no other columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Numbers, as_array, as_bools, as_indices, as_int64
from pyspark_lookup.columnar.predicate import StatsColumns
from pyspark_lookup.core.decoding import as_counts, as_texts
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.storage.stores import (
    Deletes,
    EqualityGroup,
    FileVersion,
    PartitionValues,
    StoredColumn,
)
from pyspark_lookup.versions.column_segments import batch_from_text, batch_to_text
from pyspark_lookup.versions.directories import parse_partition
from pyspark_lookup.versions.file_columns import ColumnFiles, FileColumns, split_by_code

_SCHEMA = pa.schema(
    {
        "url": pa.string(),
        "size": pa.int64(),
        "identity": pa.string(),
        "row_name": pa.string(),
        "modified_at_s": pa.float64(),
        "partition": pa.int32(),
        "format": pa.string(),
        "deletes": pa.int32(),
        "equality": pa.int32(),
        "sequence": pa.int64(),
    }
)
_DELETES = pa.schema({"name": pa.string(), "deletes": pa.string(), "has_keys": pa.bool_()})
_LISTS = pa.schema({"numbers": pa.list_(pa.int32())})


class RecordedDeletes:
    """The position deletes in a record. A table may have one for each of its files, so only those that are requested become objects.

    `deletes`: a row for each delete: `Deletes.name`, `Deletes.to_json` as JSON text, and whether it has a file of its keys (`Deletes.keys`).
    `lists`: the combinations of deletes that apply to a file, each as a list of row numbers. `parse`: returns the deletes for what
    `Deletes.to_json` returned. Raises ValueError for a null, or a row number out of range.
    """

    def __init__(self, deletes: pa.RecordBatch, lists: pa.RecordBatch, parse: Callable[[Any], Deletes]) -> None:
        if any(column.null_count for column in (*deletes.columns, lists.column(0), lists.column(0).flatten())):
            raise ValueError("a delete lacks a value")
        numbers = as_int64(lists.column(0).flatten().cast(pa.int64()))
        if numbers.min(initial=0) < 0 or numbers.max(initial=-1) >= deletes.num_rows:
            raise ValueError("the number of a delete is out of range")
        self._names, self._texts, has_keys = deletes.columns
        self.have_keys = bool(as_bools(has_keys).any())
        self._numbers = numbers
        self._starts = np.cumsum(
            np.concatenate([[0], as_int64(pc.list_value_length(lists.column(0)).cast(pa.int64()))])
        )
        self._parse = parse
        self._parsed: dict[int, Deletes] = {}
        self._combinations: dict[int, tuple[Deletes, ...]] = {}

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, code: int) -> tuple[Deletes, ...]:
        """The deletes of a combination: for each request the same tuple."""
        if code not in self._combinations:
            numbers = self._numbers[self._starts[code] : self._starts[code + 1]].tolist()
            self._combinations.setdefault(code, tuple(map(self._delete, numbers)))
        return self._combinations[code]

    def _delete(self, number: int) -> Deletes:
        # An Iceberg delete file may be in as many combinations as there are files.
        if number not in self._parsed:
            self._parsed.setdefault(number, self._parse(json.loads(self._texts[number].as_py())))
        return self._parsed[number]

    @property
    def have_deletes(self) -> Numbers:
        """For each combination, whether it has deletes."""
        return np.diff(self._starts) > 0

    def names(self, codes: Numbers) -> pa.Array:
        """The names of the deletes in some combinations, each once."""
        return self._names.take(as_indices(self._find_numbers(codes)))

    def find(self, codes: Numbers) -> list[Deletes]:
        """The deletes in some combinations, each once."""
        return [self._delete(number) for number in self._find_numbers(codes).tolist()]

    def _find_numbers(self, codes: Numbers) -> Numbers:
        is_used = np.zeros(len(self), np.bool_)
        is_used[codes] = True
        return np.unique(self._numbers[np.repeat(is_used, np.diff(self._starts))])


class RecordedColumns(FileColumns):
    """The files in a record.

    `batch`: a row for each file. Its columns `partition`, `deletes` and `equality` are indices into `partitions`, `deletes` and `equality`.
    `columns`: how all files store the table's columns. Raises ValueError for a null (except for a format), an unknown format, a negative size, or
    an index out of range.
    """

    def __init__(
        self,
        batch: pa.RecordBatch,
        partitions: Sequence[PartitionValues | None],
        deletes: RecordedDeletes,
        equality: Sequence[tuple[EqualityGroup, ...]],
        columns: tuple[StoredColumn, ...] | None,
    ) -> None:
        if any(batch.column(name).null_count for name in _SCHEMA.names if name != "format"):
            raise ValueError("a file lacks a value")
        self.urls, self._identities, self._formats = (batch.column(name) for name in ("url", "identity", "format"))
        self.sizes, self._sequences = as_int64(batch.column("size")), as_int64(batch.column("sequence"))
        self._row_names = batch.column("row_name")
        self._modified_at_s = np.asarray(batch.column("modified_at_s"))
        self._codes = [as_int64(batch.column(name).cast(pa.int64())) for name in ("partition", "deletes", "equality")]
        self._partitions, self._deletes, self._equality, self._columns = partitions, deletes, equality, columns
        for name in self._formats.unique().drop_null().to_pylist():
            FileFormatName(name)  # raises ValueError
        if self.sizes.min(initial=0) < 0:
            raise ValueError("a file has a negative size")
        for codes, count in zip(self._codes, (len(partitions), len(deletes), len(equality)), strict=True):
            if codes.min(initial=0) < 0 or codes.max(initial=-1) >= count:
                raise ValueError("a file's index of its partition, deletes or equality deletes is out of range")

    def file(self, row: int) -> FileVersion:
        partition, deletes, equality = (int(codes[row]) for codes in self._codes)
        form, modified_at_s = self._formats[row].as_py(), float(self._modified_at_s[row])
        return FileVersion(
            self.urls[row].as_py(),
            int(self.sizes[row]),
            self._identities[row].as_py(),
            modified_at_s or None,
            partition=self._partitions[partition],
            deletes=self._deletes[deletes],
            columns=self._columns,
            format=None if form is None else FileFormatName(form),
            equality=self._equality[equality],
            sequence=int(self._sequences[row]),
        )

    @property
    def sequences(self) -> Numbers:
        return self._sequences

    @property
    def modified_at_s(self) -> Numbers:
        return self._modified_at_s

    def identities(self, rows: Numbers) -> pa.Array:
        return self._identities.take(as_indices(rows))

    def row_names(self, rows: Numbers) -> pa.Array:
        return self._row_names.take(as_indices(rows))

    def partition_codes(self) -> tuple[Numbers, Sequence[PartitionValues | None]]:
        return self._codes[0], self._partitions

    def partition_values(self, name: str) -> pa.Array:
        texts = [dict(values or ()).get(name) for values in self._partitions]
        return pa.array(texts, pa.string()).take(as_indices(self._codes[0]))

    @property
    def formats(self) -> pa.Array:
        return self._formats

    def statistics(self, name: str) -> StatsColumns | None:
        return None  # the record has none: its readers compare files, and do not prune them

    @cached_property
    def has_deletes(self) -> Numbers:
        return self._deletes.have_deletes[self._codes[1]]

    def deletes_of(self, row: int) -> tuple[Deletes, ...]:
        return self._deletes[int(self._codes[1][row])]

    def delete_names(self, rows: Numbers) -> pa.Array:
        return self._deletes.names(self._codes[1][rows])

    def find_deletes(self, rows: Numbers) -> list[Deletes]:
        return self._deletes.find(self._codes[1][rows])

    @property
    def row_names_have_all_deletes(self) -> bool:
        return not self._deletes.have_keys

    def find_equality_rows(self) -> list[tuple[EqualityGroup, Numbers]]:
        rows = split_by_code(self._codes[2], len(self._equality))
        parts: dict[int, tuple[EqualityGroup, list[Numbers]]] = {}
        for code, groups in enumerate(self._equality):
            for group in groups:
                parts.setdefault(id(group), (group, []))[1].append(rows[code])
        return [(group, np.concatenate(some)) for group, some in parts.values()]

    def find_equality(self, rows: Numbers) -> list[EqualityGroup]:
        codes = np.flatnonzero(np.bincount(self._codes[2][rows])).tolist()
        return [group for code in codes for group in self._equality[code]]


def files_to_record(files: ColumnFiles) -> dict[str, Any]:
    """The files of a version as a JSON value, with their position deletes, and without statistics. Of equality deletes, it has only the names."""
    states = files.states
    partition_codes, partitions = files.partition_codes
    deletes, lists, delete_codes = _list_deletes(files)
    # The groups that apply to a file become the digits of one number, so that `unique` finds the distinct combinations. There are at most two: the
    # group of all partitions, and that of the file's own.
    groups = files.find_equality_places()
    digits = np.zeros(len(files), np.int64)
    for number, (_, places) in enumerate(groups):
        digits[places] = digits[places] * (len(groups) + 1) + number + 1
    combinations, equality_codes = np.unique(digits, return_inverse=True)
    columns = [
        states.urls.cast(pa.string()),
        as_array(files.sizes),
        states.identities,
        files.row_names,
        as_array(files.modified_at_s),
        pa.array(partition_codes, pa.int32()),
        files.formats,
        pa.array(delete_codes, pa.int32()),
        pa.array(equality_codes, pa.int32()),
        as_array(files.sequences),
    ]
    return {
        "columns": batch_to_text(pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)),
        "partitions": partitions,
        "deletes": batch_to_text(deletes),
        "lists": batch_to_text(lists),
        "groups": [group.names for group, _ in groups],
        "equality": [[digit - 1 for digit in _split_digits(some, len(groups) + 1)] for some in combinations.tolist()],
        "stored": None if not files or files[0].columns is None else [column.to_json() for column in files[0].columns],
    }


def _list_deletes(files: ColumnFiles) -> tuple[pa.RecordBatch, pa.RecordBatch, Numbers]:
    """(the position deletes of the files, the combinations of them, for each file the number of its combination).

    The first two are what `RecordedDeletes` takes. The first combination has no deletes.
    """
    codes = np.zeros(len(files), np.int64)
    needs_objects = files.has_deletes.copy()
    in_columns = np.flatnonzero(files.has_deletes & (files.order >= 0))
    vectors = files.columns.encode_vectors(files.order[in_columns])
    parts = []
    if vectors is not None:
        needs_objects[in_columns] = False
        codes[in_columns] = 1 + np.arange(len(in_columns))
        parts.append([*vectors, pa.repeat(False, len(in_columns))])
    vector_count = 0 if vectors is None else len(in_columns)
    deletes_by_name: dict[str, Deletes] = {}
    code_by_names: dict[tuple[str, ...], int] = {}
    for place in np.flatnonzero(needs_objects).tolist():
        named_deletes = {deletes.name: deletes for deletes in files.deletes_of(place)}
        deletes_by_name.update(named_deletes)
        codes[place] = code_by_names.setdefault(tuple(named_deletes), 1 + vector_count + len(code_by_names))
    texts = [json.dumps(deletes.to_json()) for deletes in deletes_by_name.values()]
    has_keys = [deletes.keys is not None for deletes in deletes_by_name.values()]
    parts.append(
        [pa.array([*deletes_by_name], pa.string()), pa.array(texts, pa.string()), pa.array(has_keys, pa.bool_())]
    )
    numbers = {name: vector_count + number for number, name in enumerate(deletes_by_name)}
    shared_lists = [[numbers[name] for name in names] for names in code_by_names]
    starts = np.concatenate(
        [[0], np.arange(vector_count + 1), vector_count + np.cumsum([*map(len, shared_lists)], dtype=np.int64)]
    )
    values = np.concatenate(
        [np.arange(vector_count), np.array([number for some in shared_lists for number in some], np.int64)]
    )
    lists = pa.ListArray.from_arrays(pa.array(starts, pa.int32()), pa.array(values, pa.int32()))
    columns = [pa.concat_arrays(column) for column in zip(*parts, strict=True)]
    return (
        pa.RecordBatch.from_arrays(columns, schema=_DELETES),
        pa.RecordBatch.from_arrays([lists], schema=_LISTS),
        codes,
    )


def _split_digits(number: int, base: int) -> list[int]:
    """The digits of a number in the base `base`, the most significant one first; none for 0."""
    digits: list[int] = []
    while number:
        number, digit = divmod(number, base)
        digits.insert(0, digit)
    return digits


def files_from_record(
    record: Any, deletes_by_name: Mapping[str, Any], parse_deletes: Callable[[Any], Deletes]
) -> ColumnFiles:
    """The files that `files_to_record` described. `deletes_by_name`: the equality deletes of the version. `parse_deletes`: returns the position
    deletes for what `Deletes.to_json` returned.

    Raises one of `decoding.UNREADABLE` for any other value.
    """
    groups = [EqualityGroup.from_names(as_texts(names), deletes_by_name) for names in record["groups"]]
    columns = RecordedColumns(
        batch_from_text(record["columns"], _SCHEMA),
        [parse_partition(partition) for partition in record["partitions"]],
        RecordedDeletes(
            batch_from_text(record["deletes"], _DELETES), batch_from_text(record["lists"], _LISTS), parse_deletes
        ),
        [tuple(groups[number] for number in as_counts(numbers)) for numbers in record["equality"]],
        None if record["stored"] is None else tuple(map(StoredColumn.from_json, record["stored"])),
    )
    return ColumnFiles(columns, (), np.arange(len(columns.sizes)))
