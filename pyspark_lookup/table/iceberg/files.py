"""`IcebergFiles`: the files of a snapshot, with their deletes, statistics and partitions, as a `TableVersion` has them."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.base.decoding import UNREADABLE
from pyspark_lookup.base.errors import NotSupportedError
from pyspark_lookup.columnar.calendars import widened
from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.columnar.types import text_of_schema
from pyspark_lookup.io.disk import key_of
from pyspark_lookup.io.stores import IMMUTABLE, Deletes, FileStatistics, FileVersion
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.table.iceberg.deletes import EqualityDeletes, PositionDeletes, PuffinVector
from pyspark_lookup.table.iceberg.entries import DATA, EQUALITY_DELETES, POSITION_DELETES, Entry, bound_of
from pyspark_lookup.table.iceberg.locations import Locations, authority_of, plain_location
from pyspark_lookup.table.iceberg.metadata import Chosen, IcebergMetadata, PartitionField
from pyspark_lookup.table.iceberg.partitions import (
    bounds_of_partition,
    identity_fields,
    is_told_in_text,
    narrow,
    text_of_value,
)
from pyspark_lookup.table.iceberg.schema import (
    Column,
    arrow_schema,
    find_field,
    flat_columns,
    stored_column,
    stored_columns,
)

_FORMATS = {"PARQUET": FileFormatName.PARQUET, "ORC": FileFormatName.ORC}
_PUFFIN = "PUFFIN"
_PATH_ID = 2147483546

Group = tuple[int, tuple[Any, ...]]
"""The spec and the partition of a file."""


@dataclasses.dataclass(frozen=True)
class _Placed:
    """Deletes, and from which data sequence number on down they apply; `paths`: the bounds of the data files that they name."""

    sequence: int
    deletes: Deletes
    paths: tuple[str | None, str | None] = (None, None)

    def may_name(self, location: str) -> bool:
        low, high = self.paths
        # Paths that are spelled in another way, or bounds that are cut within the server's name, do not compare.
        if low is None or high is None or not authority_of(low) == authority_of(high) == authority_of(location):
            return True
        return low <= location <= high


class IcebergFiles:
    """The files of snapshots that are read with one schema. `table`: the URL that their versions are of.

    Raises NotSupportedError for what is not known here, one of `decoding.UNREADABLE` for what makes no sense.
    """

    def __init__(self, table: str, metadata: IcebergMetadata, chosen: Chosen, locations: Locations) -> None:
        self._table, self._metadata, self._locations = table, metadata, locations
        self.schema = arrow_schema(chosen.schema)
        self.columns = stored_columns(chosen.schema, metadata.name_mapping)
        self._identity = f"{IMMUTABLE}{key_of(metadata.table_id)}"  # a name may be used again by another table
        self._flat = {column.field_id: column for column in flat_columns(chosen.schema)}
        self._schemas = [chosen.schema, *(metadata.schemas[id_] for id_ in sorted(metadata.schemas, reverse=True))]

    def partitions(self, files: Sequence[FileVersion]) -> tuple[str, ...]:
        """The columns of which each file has one value, which its partition says and users can."""
        told = {column.path[0] for column in self._flat.values() if is_told_in_text(column.iceberg_type)}
        for file in files:
            told &= {name for name, _ in file.partition or ()}
        return tuple(name for name in self.schema.names if name in told) if files else ()

    def files(self, entries: Sequence[Entry]) -> tuple[FileVersion, ...]:
        """The data files among the entries, with what the others delete of them."""
        deletes = _DeletesOf(self, entries)
        found = [self._file(entry, deletes) for entry in entries if entry.content == DATA]
        return tuple(sorted(found, key=lambda file: file.url))

    def _file(self, entry: Entry, deletes: _DeletesOf) -> FileVersion:
        url = self._locations.url_of(entry.location)
        return FileVersion(
            url,
            entry.size,
            # Where it was added again, deletes from before concern it no more.
            f"{self._identity}-{entry.sequence}",
            partition=self._partition(entry),
            deletes=deletes.of(entry, url),
            statistics=FileStatistics(entry.rows if entry.rows >= 0 else None, self._bounds(entry)),
            columns=self.columns,
            format=self.format_of(entry),
        )

    def format_of(self, entry: Entry) -> FileFormatName:
        if entry.format not in _FORMATS:
            raise NotSupportedError(
                f"{redact('path', entry.location)} is a file of format {entry.format}, which is not read"
            )
        return _FORMATS[entry.format]

    def _fields(self, entry: Entry) -> Sequence[tuple[PartitionField, Any]]:
        return list(zip(self._spec(entry.spec_id), self.partition_of(entry), strict=True))

    def _spec(self, spec_id: int) -> tuple[PartitionField, ...]:
        if spec_id not in self._metadata.specs:
            raise ValueError(f"there is no partition spec {spec_id}")
        return self._metadata.specs[spec_id]

    def partition_of(self, entry: Entry) -> tuple[Any, ...]:
        """The values of a file's partition, as its spec has them in order."""
        wanted = tuple(field.field_id for field in self._spec(entry.spec_id))
        if entry.partition_ids == wanted:
            return entry.partition
        said = dict(zip(entry.partition_ids, entry.partition, strict=True))
        if said.keys() <= {*wanted}:
            return tuple(said.get(field_id) for field_id in wanted)
        # Format 1 knew them by their place, and some of its writers have numbered them otherwise.
        if len(entry.partition) != len(wanted):
            raise ValueError(
                f"{entry.location} has a partition of {len(entry.partition)} values, its spec has {len(wanted)}"
            )
        return entry.partition

    def _partition(self, entry: Entry) -> tuple[tuple[str, str | None], ...]:
        """The values of columns that all rows of the file have, and that it need not have itself."""
        found = {}
        values = self.partition_of(entry)
        for field_id, place in identity_fields(self._spec(entry.spec_id)).items():
            column, value = self._flat.get(field_id), values[place]
            if column is not None and len(column.path) == 1:
                with contextlib.suppress(*UNREADABLE):  # of a day that Python lacks; the file has it, too
                    found[column.path[0]] = None if value is None else text_of_value(value, column.iceberg_type)
        return tuple(sorted(found.items()))

    def _bounds(self, entry: Entry) -> Mapping[str, ColumnStats]:
        by_id = {id_: self._bound(entry, column) for id_, column in self._flat.items() if len(column.path) == 1}
        for field, value in self._fields(entry):
            column = None if field.source is None else self._flat.get(field.source)
            if column is not None and len(column.path) == 1:
                said = bounds_of_partition(field, value, column.iceberg_type, column.type, max(entry.rows, 1))
                by_id[column.field_id] = narrow(by_id[column.field_id], said)
        return {self._flat[id_].path[0]: stats for id_, stats in by_id.items() if stats is not None}

    def _bound(self, entry: Entry, column: Column) -> ColumnStats | None:
        """What a manifest says of a column's values in a file; None: nothing."""
        id_, kind = column.field_id, column.iceberg_type
        nulls, values = entry.nulls.get(id_), entry.values.get(id_)
        if nulls is not None and (entry.rows < 0 or values not in (None, entry.rows)):
            nulls = None
        bounded = kind != "uuid"
        low = bound_of(entry.lower.get(id_), kind, column.type) if bounded else None
        high = bound_of(entry.upper.get(id_), kind, column.type) if bounded else None
        if low is None or high is None or low > high:
            low = high = None
        elif pa.types.is_temporal(column.type):
            low, high = widened(low, high)  # those of files that were added are as their footers have them
        if low is None and nulls is None:
            return None
        return ColumnStats(low, high, nulls, max(entry.rows, 1))

    # --- deletes ----------------------------------------------------------------------------------

    def url_of(self, location: str) -> str:
        return self._locations.url_of(location)

    def path_of(self, url: str) -> str:
        return url.removeprefix(self._table + "/")

    def position_deletes(self, entry: Entry) -> PositionDeletes:
        places = self._table, self._locations.location, self._locations.root
        return PositionDeletes(self.url_of(entry.location), entry.size, self.format_of(entry), *places)

    def equality_deletes(self, entry: Entry) -> EqualityDeletes:
        """Raises ValueError if no schema has one of its columns."""
        fields, columns = [], []
        now = {column.field_id: column for column in self.columns}
        for field_id in sorted(entry.equality_ids):
            found = find_field(self._schemas, field_id)
            if not found:
                raise ValueError(f"no schema has the field {field_id}, which {entry.location} deletes by")
            own = now.get(field_id)
            name = f"\0{field_id}" if own is None else own.name  # no column has such a name
            alone = _alone(found)
            fields.append(arrow_schema({"fields": [alone]}).field(0).with_name(name))
            columns.append(dataclasses.replace(stored_column(alone, self._metadata.name_mapping), name=name))
        if not fields:
            raise ValueError(f"{entry.location} deletes by no column")
        known = tuple(now[id_] for id_ in entry.equality_ids if id_ in now)
        schema = text_of_schema(pa.schema(fields))
        return EqualityDeletes(
            self.url_of(entry.location), entry.size, self.format_of(entry), schema, tuple(columns), known
        )

    def is_global(self, spec_id: int) -> bool:
        """Whether files of a spec belong to no partition, so that deletes by value concern those of all."""
        return all(field.transform == "void" for field in self._spec(spec_id))


def _alone(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last of some fields that lie in each other, with nothing beside it."""
    field = found[-1]
    for around in reversed(found[:-1]):
        field = {**around, "type": {"type": "struct", "fields": [field]}}
    return field


class _DeletesOf:
    """Which deletes among the entries apply to which data files (the specification's "Scan Planning")."""

    def __init__(self, files: IcebergFiles, entries: Sequence[Entry]) -> None:
        self._files = files
        self._positions: dict[Group, list[_Placed]] = defaultdict(list)
        self._equality: dict[Group | None, list[_Placed]] = defaultdict(list)
        self._of_file: dict[str, list[_Placed]] = defaultdict(list)
        self._vectors: dict[str, Entry] = {}
        self._shared: dict[tuple[int, ...], tuple[Deletes, ...]] = {}
        for entry in entries:
            if entry.content == POSITION_DELETES:
                self._add_positions(entry)
            elif entry.content == EQUALITY_DELETES:
                group = (
                    None if files.is_global(entry.spec_id) else (entry.spec_id, _comparable(files.partition_of(entry)))
                )
                self._equality[group].append(_Placed(entry.sequence - 1, files.equality_deletes(entry)))
            elif entry.content != DATA:
                raise NotSupportedError(f"{redact('path', entry.location)} is of content {entry.content}")
        for placed in (*self._positions.values(), *self._equality.values()):
            placed.sort(key=lambda one: one.sequence)

    def _add_positions(self, entry: Entry) -> None:
        if entry.format == _PUFFIN:
            if entry.referenced is None or entry.offset is None or entry.length is None:
                raise ValueError(f"{entry.location} has a deletion vector, and it is not said where or of which file")
            path = plain_location(entry.referenced)
            if path in self._vectors:
                raise ValueError(f"{entry.referenced} has two deletion vectors")
            self._vectors[path] = entry
            return
        deletes = self._files.position_deletes(entry)
        low, high = (bound_of(some.get(_PATH_ID), "string", pa.string()) for some in (entry.lower, entry.upper))
        only = entry.referenced or (low if low == high else None)
        if only is not None:
            self._of_file[plain_location(only)].append(_Placed(entry.sequence, deletes))
        else:
            group = entry.spec_id, _comparable(self._files.partition_of(entry))
            self._positions[group].append(_Placed(entry.sequence, deletes, (low, high)))

    def of(self, entry: Entry, url: str) -> tuple[Deletes, ...]:
        """The deletes of a data file, one value for files with the same ones."""
        group, path = (entry.spec_id, _comparable(self._files.partition_of(entry))), plain_location(entry.location)
        placed = [*_since(self._equality.get(None, ()), entry), *_since(self._equality.get(group, ()), entry)]
        vector = self._vectors.get(path)
        if vector is not None and vector.sequence >= entry.sequence:
            where = self._files.url_of(vector.location)
            of = PuffinVector(self._files.path_of(url), where, vector.offset or 0, vector.length or 0, vector.rows)
            return (of, *(one.deletes for one in placed))
        placed += [one for one in self._of_file.get(path, ()) if one.sequence >= entry.sequence]
        placed += [one for one in _since(self._positions.get(group, ()), entry) if one.may_name(entry.location)]
        found = tuple(one.deletes for one in placed)
        return self._shared.setdefault(tuple(map(id, found)), found)


def _since(placed: Sequence[_Placed], entry: Entry) -> Sequence[_Placed]:
    """Of deletes in the order of their numbers those that apply to a file."""
    return placed[bisect.bisect_left(placed, entry.sequence, key=lambda one: one.sequence) :]


def _comparable(partition: tuple[Any, ...]) -> tuple[Any, ...]:
    """A partition as a key: floats by their bits, but NaN equals NaN."""
    return tuple(
        ("NaN" if math.isnan(value) else value.hex()) if isinstance(value, float) else value for value in partition
    )
