"""Deletes of Iceberg tables: position delete files, deletion vectors, and equality delete files."""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.orc
import pyarrow.parquet as pq

from pyspark_lookup.columnar.keys import Numbers, one_array, sort_distinct
from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.columnar.roaring import checked_blob, read_roaring
from pyspark_lookup.columnar.types import schema_of_text
from pyspark_lookup.core.decoding import UNREADABLE, as_count, as_text, describe_fault
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.errors import DamagedFileError, raise_ours
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.sources.iceberg.entries import value_from_json, value_to_json
from pyspark_lookup.sources.iceberg.metadata import Locations
from pyspark_lookup.storage.stores import (
    DELETE_FILE,
    IMMUTABLE,
    PART_OF_FILE,
    EqualityColumns,
    FileStatistics,
    FileVersion,
    Range,
    StoredColumn,
)
from pyspark_lookup.versions.model import DELETES

_PATH_ID, _POSITION_ID = 2147483546, 2147483545
_FIELD_IDS = (b"PARQUET:field_id", b"iceberg.id")


@dataclasses.dataclass(frozen=True)
class PositionDeletes:
    """A position delete file. `table`: the table's URL. `location` and `root`: see `Locations`."""

    url: str
    size: int
    format: FileFormatName
    table: str
    location: str
    root: str

    keys = None

    @property
    def name(self) -> str:
        return self.url

    @property
    def place(self) -> tuple[FileVersion, Range]:
        return FileVersion(self.url, self.size, IMMUTABLE), (0, self.size)

    def positions(self, data: bytes | memoryview) -> Mapping[str, Numbers]:
        locations = Locations(self.location, self.root)
        try:
            table = self._rows(pa.BufferReader(data))
            paths, places = table.column(0).cast(pa.string()), table.column(1)
            is_complete = pc.and_(pc.is_valid(paths), pc.is_valid(places))  # a row may be null
            codes = one_array(paths.filter(is_complete)).dictionary_encode()
            rows = one_array(places.filter(is_complete).cast(pa.int64())).to_numpy()
            order = np.lexsort((rows, codes.indices.to_numpy()))
            starts = np.searchsorted(codes.indices.to_numpy()[order], np.arange(len(codes.dictionary) + 1))
            positions: dict[str, Numbers] = {}
            for number, path in enumerate(codes.dictionary.to_pylist()):
                part = sort_distinct(rows[order[starts[number] : starts[number + 1]]])
                if part[0] < 0:
                    raise ValueError(f"impossible position {part[0]} of a deleted row in {path}")
                key = locations.resolve_url(path).removeprefix(self.table + "/")
                positions[key] = sort_distinct(np.concatenate([positions[key], part])) if key in positions else part
        except (*UNREADABLE, pa.ArrowException, OSError) as problem:
            raise_ours(
                DamagedFileError(
                    f"{redact('path', self.url)} is not a readable delete file: {describe_fault(problem)}: restore this file"
                ),
                problem,
            )
        return positions

    def _rows(self, source: pa.BufferReader) -> pa.Table:
        """The path and the position in each row of the file. These columns are found by their field ids, or by their names in a file without
        ids."""
        if self.format is FileFormatName.ORC:
            file: Any = pa.orc.ORCFile(source)
            schema = file.schema
        else:
            file = pq.ParquetFile(source)
            schema = file.schema_arrow
        ids = {(field.metadata or {}).get(key): field.name for field in schema for key in _FIELD_IDS}
        names = [ids.get(b"%d" % _PATH_ID, "file_path"), ids.get(b"%d" % _POSITION_ID, "pos")]
        table: pa.Table = file.read(columns=names)
        return table.select(names)

    def to_json(self) -> list[Any]:
        return ["iceberg-positions", self.url, self.size, self.format.value, self.table, self.location, self.root]

    @classmethod
    def from_json(cls, record: Any) -> PositionDeletes:
        """The deletes that `to_json` wrote; `record` lacks the kind, its first item. Raises TypeError or ValueError for a malformed
        record."""
        url, size, form, *places = record
        return cls(as_text(url), as_count(size), FileFormatName(form), *map(as_text, places))


@dataclasses.dataclass(frozen=True)
class PuffinVector:
    """A deletion vector: `size` bytes at `offset` of the Puffin file at `url`.

    `path`: the data file whose rows it deletes, as a path below the table, or a URL. `cardinality`: the number of deleted rows.
    """

    path: str
    url: str
    offset: int
    size: int
    cardinality: int

    keys = None

    @property
    def name(self) -> str:
        return f"{self.url}@{self.offset}#{self.path}"

    @property
    def place(self) -> tuple[FileVersion, Range]:
        return FileVersion(self.url, 0, PART_OF_FILE), (self.offset, self.size)

    def positions(self, data: bytes | memoryview) -> Mapping[str, Numbers]:
        try:
            rows = read_roaring(checked_blob(data, self.size - 8), self.cardinality)
        except (*UNREADABLE, struct.error) as problem:
            redacted_path = redact("path", self.url)
            raise DamagedFileError(
                f"{redacted_path}: the deletion vector at byte {self.offset} is damaged: {describe_fault(problem)}: restore this file"
            ) from None
        return {self.path: rows}

    def to_json(self) -> list[Any]:
        return ["iceberg-vector", self.path, self.url, self.offset, self.size, self.cardinality]

    @classmethod
    def from_json(cls, record: Any) -> PuffinVector:
        """The deletes that `to_json` wrote; `record` lacks the kind, its first item. Raises TypeError or ValueError for a malformed
        record."""
        path, url, *counts = record
        return cls(as_text(path), as_text(url), *map(as_count, counts))


@dataclasses.dataclass(frozen=True)
class EqualityDeletes:
    """An equality delete file. It deletes each row of a data file that has the same values in `columns` as a row of the delete file.

    `sequence`: the file's data sequence number. `schema`: the columns, under unique names, as text. `current_columns`: the columns among them
    that the table still has. `bounds`: the bounds of these columns, by name, as far as the file's entry states them; they show which keys the
    deletes may concern.
    """

    url: str
    size: int
    format: FileFormatName
    sequence: int
    schema: str
    columns: tuple[StoredColumn, ...]
    current_columns: tuple[StoredColumn, ...]
    bounds: Mapping[str, ColumnStats] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """The file's URL and its sequence number: a file that was added again deletes rows of more data files."""
        return f"{self.url}@{self.sequence}"

    @property
    def keys(self) -> FileVersion:
        return FileVersion(
            self.url,
            self.size,
            DELETE_FILE,
            statistics=FileStatistics(None, self.bounds),
            columns=self.current_columns,
            format=self.format,
            sequence=self.sequence,
        )

    @property
    def compared(self) -> tuple[tuple[StoredColumn, ...], str]:
        return self.columns, self.schema

    def without_bounds(self) -> EqualityDeletes:
        return dataclasses.replace(self, bounds={})

    @cached_property
    def equality(self) -> EqualityColumns:
        return EqualityColumns(dataclasses.replace(self.keys, columns=self.columns), _schema_of_text(self.schema))

    def to_json(self) -> list[Any]:
        columns = [[column.to_json() for column in column_set] for column_set in (self.columns, self.current_columns)]
        bounds = [
            [name, value_to_json(stats.low), value_to_json(stats.high), stats.null_count, stats.rows]
            for name, stats in self.bounds.items()
        ]
        place = [self.url, self.size, self.format.value, self.sequence]
        return ["iceberg-equality", *place, self.schema, *columns, bounds]

    @classmethod
    def from_json(cls, record: Any) -> EqualityDeletes:
        """The deletes that `to_json` wrote; `record` lacks the kind, its first item. Raises TypeError or ValueError for a malformed
        record."""
        url, size, form, sequence, schema, *columns, bounds = record
        stored_columns, current_columns = (tuple(map(StoredColumn.from_json, column_set)) for column_set in columns)
        _schema_of_text(as_text(schema))
        form, counts = FileFormatName(form), (as_count(size), as_count(sequence))
        stats = {
            as_text(name): ColumnStats(
                value_from_json(low), value_from_json(high), None if nulls is None else int(nulls), int(rows)
            )
            for name, low, high, nulls, rows in bounds
        }
        return cls(as_text(url), counts[0], form, counts[1], schema, stored_columns, current_columns, stats)


_schema_of_text = functools.lru_cache(maxsize=16)(schema_of_text)  # many delete files have the same columns

DELETES["iceberg-positions"] = PositionDeletes.from_json
DELETES["iceberg-vector"] = PuffinVector.from_json
DELETES["iceberg-equality"] = EqualityDeletes.from_json
