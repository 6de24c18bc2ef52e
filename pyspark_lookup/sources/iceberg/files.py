"""`IcebergFiles`: the data files of a snapshot with their deletes, statistics and partitions, in the form that a `TableVersion` has.

The module also knows a table's columns: their Arrow types, and the field ids and names that they have in the table's files.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.calendars import widened
from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.columnar.types import MOST_NESTED, VARIANT, lenient_schema, text_of_schema, type_of_column
from pyspark_lookup.core.decoding import UNREADABLE, as_text, as_texts, show
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.errors import NotSupportedError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.sources.iceberg.deletes import EqualityDeletes, PositionDeletes, PuffinVector
from pyspark_lookup.sources.iceberg.entries import (
    DATA,
    EQUALITY_DELETES,
    POSITION_DELETES,
    Entry,
    identity_fields,
    is_told_in_text,
    narrow,
    parse_bound,
    partition_stats,
    text_of_value,
)
from pyspark_lookup.sources.iceberg.metadata import (
    IcebergMetadata,
    Locations,
    PartitionField,
    Selection,
    parse_authority,
    plain_location,
)
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.stores import (
    IMMUTABLE,
    Deletes,
    EqualityGroup,
    FileStatistics,
    FileVersion,
    StoredColumn,
)

_TYPES = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", tz="UTC"),
    "string": pa.string(),
    "uuid": pa.string(),
    "binary": pa.binary(),
    "unknown": pa.string(),  # null in every row
    "variant": VARIANT,
}
_DECIMAL = re.compile(r"decimal\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_FIXED = re.compile(r"fixed\[\s*\d+\s*\]")


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a primitive type that is not inside a list or map. `path`: the names of the structs around it, then its own name."""

    field_id: int
    path: tuple[str, ...]
    iceberg_type: str
    type: pa.DataType


def arrow_schema(schema: Mapping[str, Any]) -> pa.Schema:
    """The columns of a schema, with the types that Spark gives them. A column whose type is not supported gets an `unreadable_type`."""
    names = [as_text(field["name"]) for field in schema["fields"]]
    types = [type_of_column(_parse_type, field["type"], field["name"]) for field in schema["fields"]]
    return lenient_schema(pa.schema(list(zip(names, types, strict=True))))


def _parse_type(definition: Any, depth: int = 0) -> pa.DataType:
    if depth > MOST_NESTED:
        raise NotSupportedError(f"it has a type nested more than {MOST_NESTED} deep, which is not supported")
    depth += 1
    if isinstance(definition, str):
        if definition in _TYPES:
            return _TYPES[definition]
        decimal = _DECIMAL.fullmatch(definition)
        if decimal is not None and len(decimal[1]) <= 2 and 0 < int(decimal[1]) <= 38 and len(decimal[2]) <= 2:
            return pa.decimal128(int(decimal[1]), int(decimal[2]))
        if _FIXED.fullmatch(definition):
            return pa.binary()
    elif isinstance(definition, dict):
        kind = definition.get("type")
        if kind == "struct":
            return pa.struct(
                [pa.field(as_text(f["name"]), _parse_type(f["type"], depth)) for f in definition["fields"]]
            )
        if kind == "list":
            return pa.list_(pa.field("element", _parse_type(definition["element"], depth)))
        if kind == "map":
            return pa.map_(
                _parse_type(definition["key"], depth), pa.field("value", _parse_type(definition["value"], depth))
            )
    raise NotSupportedError(f"type {show(definition)} is not supported")


def stored_columns(schema: Mapping[str, Any], name_mapping: Sequence[Any] | None) -> tuple[StoredColumn, ...]:
    """How files store the columns: by field id, or, in files without ids, by the names in `name_mapping` (None: there is no mapping)."""
    return tuple(stored_column(field, name_mapping) for field in schema["fields"])


def stored_column(field: Mapping[str, Any], name_mapping: Sequence[Any] | None) -> StoredColumn:
    return _make_stored_column(
        as_text(field["name"]), int(field["id"]), field["type"], field.get("initial-default"), name_mapping
    )


def _make_stored_column(
    name: str, field_id: int, kind: Any, default: Any, mapping: Sequence[Any] | None
) -> StoredColumn:
    mapped_field: Mapping[str, Any] = next((entry for entry in mapping or () if entry.get("field-id") == field_id), {})
    inner = None if mapping is None else mapped_field.get("fields") or []
    text = None if default is None else default if isinstance(default, str) else json.dumps(default)
    names = None if mapping is None else as_texts(mapped_field.get("names") or [])
    parts = tuple(_parts(kind, inner))
    return StoredColumn(name, name, field_id, parts, names, text, kind == "uuid")


def _parts(kind: Any, mapping: Sequence[Any] | None) -> Iterator[StoredColumn]:
    shape = kind.get("type") if isinstance(kind, dict) else None
    if shape == "struct":
        yield from (stored_column(field, mapping) for field in kind["fields"])
    elif shape == "list":
        yield _make_stored_column("element", int(kind["element-id"]), kind["element"], None, mapping)
    elif shape == "map":
        yield _make_stored_column("key", int(kind["key-id"]), kind["key"], None, mapping)
        yield _make_stored_column("value", int(kind["value-id"]), kind["value"], None, mapping)


def flat_columns(schema: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[Column]:
    """The columns of a schema that can have bounds or partitions. Columns of unsupported types are left out."""
    for field in schema["fields"]:
        kind, names = field["type"], (*path, as_text(field["name"]))
        if isinstance(kind, dict) and kind.get("type") == "struct":
            yield from flat_columns(kind, names)
        elif isinstance(kind, str) and kind != "variant":
            try:
                yield Column(int(field["id"]), names, kind, _parse_type(kind))
            except NotSupportedError:
                continue


def find_field(schemas: Sequence[Mapping[str, Any]], field_id: int) -> tuple[Mapping[str, Any], ...]:
    """The path to a field: the structs around it, the outermost first, and then the field itself. Empty if no schema has the field id.

    The first schema that has the field id counts.
    """
    return next((field_path for schema in schemas if (field_path := _find(schema["fields"], field_id))), ())


def _find(fields: Sequence[Mapping[str, Any]], field_id: int) -> tuple[Mapping[str, Any], ...]:
    for field in fields:
        if int(field["id"]) == field_id:
            return (field,)
        kind = field["type"]
        if isinstance(kind, dict) and kind.get("type") == "struct" and (inner := _find(kind["fields"], field_id)):
            return (field, *inner)
    return ()


_FORMATS = {"PARQUET": FileFormatName.PARQUET, "ORC": FileFormatName.ORC}
_PUFFIN = "PUFFIN"
_PATH_ID = 2147483546

Group = tuple[int, tuple[Any, ...]]
"""A file's partition as a key: (spec id, values)."""


@dataclasses.dataclass(frozen=True)
class SequencedDeletes:
    """Deletes, with the highest data sequence number of the files to which they apply.

    `paths`: the lowest and the highest location of the data files that they name, if known.
    """

    sequence: int
    deletes: Deletes
    paths: tuple[str | None, str | None] = (None, None)

    def may_name(self, location: str) -> bool:
        """Whether the deletes may name this data file."""
        low, high = self.paths
        # Locations cannot be compared with the bounds if the scheme or server is spelled in another way, or if the bounds were cut off
        # inside the server's name.
        if (
            low is None
            or high is None
            or not parse_authority(low) == parse_authority(high) == parse_authority(location)
        ):
            return True
        return low <= location <= high


class IcebergFiles:
    """Makes the data files of snapshots that are read with one schema. `table`: the table's URL.

    Raises NotSupportedError for features that this reader lacks, one of `decoding.UNREADABLE` for contradictory metadata.
    """

    def __init__(self, table: str, metadata: IcebergMetadata, selection: Selection, locations: Locations) -> None:
        self._table, self._metadata, self._locations = table, metadata, locations
        self.schema = arrow_schema(selection.schema)
        self.columns = stored_columns(selection.schema, metadata.name_mapping)
        self._identity = (
            f"{IMMUTABLE}{key_of(metadata.table_id)}"  # another table may later have a file of the same name
        )
        self._flat = {column.field_id: column for column in flat_columns(selection.schema)}
        self._equality_columns: dict[
            tuple[int, ...], tuple[str, tuple[StoredColumn, ...], tuple[StoredColumn, ...]]
        ] = {}
        self._directories: dict[str, str] = {}
        self._schemas = [selection.schema, *(metadata.schemas[id_] for id_ in sorted(metadata.schemas, reverse=True))]

    def partitions(self, names: Iterable[frozenset[str]]) -> tuple[str, ...]:
        """The columns by which a reader can select files: each file has a single value of the column, and the value can be written as text.

        `names`: for each file, the names of the columns that have a single value in it.
        """
        in_text = {column.path[0] for column in self._flat.values() if is_told_in_text(column.iceberg_type)}
        distinct_names = {*names}
        partition_columns = in_text.intersection(*distinct_names) if distinct_names else ()
        return tuple(name for name in self.schema.names if name in partition_columns)

    def files(self, entries: Sequence[Entry]) -> tuple[FileVersion, ...]:
        """The data files among the entries, each with the deletes that apply to it."""
        data = [entry for entry in entries if entry.content == DATA]
        deletes = DeleteFileIndex(self, [entry for entry in entries if entry.content != DATA], lambda: data)
        return tuple(sorted((self.file(entry, deletes) for entry in data), key=lambda file: file.url))

    def file(self, entry: Entry, deletes: DeleteFileIndex) -> FileVersion:
        """The data file of an entry. `deletes`: the deletes of its snapshot."""
        url = self.resolve_url(entry.location)
        return FileVersion(
            url,
            entry.size,
            # If a file is removed and added again, earlier deletes no longer apply to it, so its identity must differ.
            f"{self._identity}-{entry.sequence}",
            partition=self.partition(entry),
            deletes=deletes.find(entry, url),
            equality=deletes.find_equality(entry),
            sequence=entry.sequence,
            statistics=FileStatistics(entry.rows if entry.rows >= 0 else None, _Bounds(self, entry)),
            columns=self.columns,
            format=self.parse_format(entry),
        )

    def identities(self, sequences: pa.Array) -> pa.Array:
        """The identities of data files with these sequence numbers."""
        return pc.binary_join_element_wise(self._identity, sequences.cast(pa.string()), "-")

    def check(self, entry: Entry) -> None:
        """Raise NotSupportedError, or one of `decoding.UNREADABLE`, if the file of an entry could not be read."""
        self.partition_values(entry)
        if entry.content == DATA:
            self.parse_format(entry)

    def parse_format(self, entry: Entry) -> FileFormatName:
        if entry.format not in _FORMATS:
            raise NotSupportedError(
                f"{redact('path', entry.location)} is a file of format {entry.format}, which is not supported: read the table with "
                "format('iceberg')"
            )
        return _FORMATS[entry.format]

    def _fields(self, entry: Entry) -> Sequence[tuple[PartitionField, Any]]:
        return list(zip(self._spec(entry.spec_id), self.partition_values(entry), strict=True))

    def _spec(self, spec_id: int) -> tuple[PartitionField, ...]:
        if spec_id not in self._metadata.specs:
            raise ValueError(f"there is no partition spec {spec_id}")
        return self._metadata.specs[spec_id]

    def partition_values(self, entry: Entry) -> tuple[Any, ...]:
        """The values of a file's partition, in the order of the fields of its spec."""
        field_ids = tuple(field.field_id for field in self._spec(entry.spec_id))
        if entry.partition_ids == field_ids:
            return entry.partition
        values_by_id = dict(zip(entry.partition_ids, entry.partition, strict=True))
        if values_by_id.keys() <= {*field_ids}:
            return tuple(values_by_id.get(field_id) for field_id in field_ids)
        # Format 1 identifies partition fields by their position, and some of its writers give them other ids.
        if len(entry.partition) != len(field_ids):
            raise ValueError(
                f"{entry.location} has a partition of {len(entry.partition)} values, its spec has {len(field_ids)}"
            )
        return entry.partition

    def partition(self, entry: Entry) -> tuple[tuple[str, str | None], ...]:
        """(column, value as text) for each column that has a single value in the file. The file itself may lack these columns."""
        partition = {}
        values = self.partition_values(entry)
        for field_id, place in identity_fields(self._spec(entry.spec_id)).items():
            column, value = self._flat.get(field_id), values[place]
            if column is not None and len(column.path) == 1:
                with contextlib.suppress(
                    *UNREADABLE
                ):  # a day that Python's types cannot hold; the file itself has the value, too
                    partition[column.path[0]] = None if value is None else text_of_value(value, column.iceberg_type)
        return tuple(sorted(partition.items()))

    @cached_property
    def bounded_columns(self) -> dict[str, Column]:
        """The columns that can have bounds, by name."""
        return {column.path[0]: column for column in self._flat.values() if len(column.path) == 1}

    def find_stats(self, entry: Entry, name: str) -> ColumnStats | None:
        """The statistics of a column in a file; None if the file's entry states none."""
        column = self.bounded_columns.get(name)
        if column is None:
            return None
        with contextlib.suppress(*UNREADABLE):  # values that cannot be compared
            return narrow(self._column_stats(entry, column), self.partition_stats(entry, column, max(entry.rows, 1)))
        return None

    def partition_stats(self, entry: Entry, column: Column, rows: int) -> ColumnStats | None:
        """The statistics of a column that follow from the partition of a file with `rows` rows; None if none follow."""
        stats = None
        for field, value in self._fields(entry):
            if field.source == column.field_id:
                stats = narrow(stats, partition_stats(field, value, column.iceberg_type, column.type, rows))
        return stats

    def _column_stats(self, entry: Entry, column: Column) -> ColumnStats | None:
        """The statistics of a column in a file, as the manifest states them; None if it states none."""
        id_, kind = column.field_id, column.iceberg_type
        nulls, values = entry.nulls.get(id_), entry.values.get(id_)
        if nulls is not None and (entry.rows < 0 or values not in (None, entry.rows)):
            nulls = None
        bounded = kind != "uuid"
        low = parse_bound(entry.lower.get(id_), kind, column.type) if bounded else None
        high = parse_bound(entry.upper.get(id_), kind, column.type) if bounded else None
        if low is None or high is None or low > high:
            low = high = None
        elif pa.types.is_temporal(column.type):
            low, high = widened(
                low, high
            )  # dates in a file that another program wrote may be of the calendar before 1582
        if low is None and nulls is None:
            return None
        return ColumnStats(low, high, nulls, max(entry.rows, 1))

    # --- deletes ----------------------------------------------------------------------------------

    @property
    def has_plain_urls(self) -> bool:
        """Whether locations that have the same canonical spelling also have the same URL, as on local disks and S3."""
        return self._locations.root.startswith(("file:", "s3:"))

    def resolve_url(self, location: str) -> str:
        """The URL of a location, see `Locations.resolve_url`. Directories that were resolved before are cached."""
        directory, _, name = location.rpartition("/")
        url_directory = self._directories.get(directory)
        if url_directory is not None and name not in ("", ".", ".."):
            return url_directory + name
        url = self._locations.resolve_url(location)
        if directory and url.endswith(f"/{name}") and name not in ("", ".", ".."):
            self._directories[directory] = url.removesuffix(name)
        return url

    def relative_path(self, url: str) -> str:
        return url.removeprefix(self._table + "/")

    def position_deletes(self, entry: Entry) -> PositionDeletes:
        places = self._table, self._locations.location, self._locations.root
        return PositionDeletes(self.resolve_url(entry.location), entry.size, self.parse_format(entry), *places)

    def equality_deletes(self, entry: Entry) -> EqualityDeletes:
        """The equality delete file of an entry. Raises ValueError if no schema has one of the columns by which it deletes."""
        if entry.equality_ids not in self._equality_columns:
            self._equality_columns[entry.equality_ids] = self._find_equality_columns(entry)
        columns = self._equality_columns[entry.equality_ids]
        return EqualityDeletes(
            self.resolve_url(entry.location),
            entry.size,
            self.parse_format(entry),
            entry.sequence,
            *columns,
            _Bounds(self, entry, [column.name for column in columns[2]]),
        )

    def _find_equality_columns(self, entry: Entry) -> tuple[str, tuple[StoredColumn, ...], tuple[StoredColumn, ...]]:
        """(the schema of the columns that a delete file compares, how files store these columns, the columns among them that the table still
        has)."""
        fields, columns = [], []
        columns_by_id = {column.field_id: column for column in self.columns}
        for field_id in sorted(entry.equality_ids):
            field_path = find_field(self._schemas, field_id)
            if not field_path:
                raise ValueError(f"{entry.location} deletes by the field {field_id}, which no schema of the table has")
            current_column = columns_by_id.get(field_id)
            name = f"\0{field_id}" if current_column is None else current_column.name  # a name that no column has
            isolated_field = _isolate_field(field_path)
            fields.append(arrow_schema({"fields": [isolated_field]}).field(0).with_name(name))
            columns.append(dataclasses.replace(stored_column(isolated_field, self._metadata.name_mapping), name=name))
        if not fields:
            raise ValueError(f"{entry.location} is an equality delete file without columns")
        current_columns = tuple(columns_by_id[id_] for id_ in entry.equality_ids if id_ in columns_by_id)
        return text_of_schema(pa.schema(fields)), tuple(columns), current_columns

    def is_global(self, spec_id: int) -> bool:
        """Whether no field of a spec is in use, so that equality deletes with this spec apply to the files of all specs."""
        return all(field.transform == "void" for field in self._spec(spec_id))


def _isolate_field(field_path: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last field of a path of nested fields, inside structs that have no other field."""
    field = field_path[-1]
    for around in reversed(field_path[:-1]):
        field = {**around, "type": {"type": "struct", "fields": [field]}}
    return field


class _Bounds(Mapping[str, ColumnStats]):
    """The statistics of a file's columns by name, each found when it is first needed. `names`: only of these columns."""

    def __init__(self, files: IcebergFiles, entry: Entry, names: Sequence[str] | None = None) -> None:
        self._files = files
        self._entry = entry
        self._names = names
        self._stats: dict[str, ColumnStats | None] = {}

    def __getitem__(self, name: str) -> ColumnStats:
        if name not in self._stats:
            is_known = self._names is None or name in self._names
            self._stats[name] = self._files.find_stats(self._entry, name) if is_known else None
        stats = self._stats[name]
        if stats is None:
            raise KeyError(name)
        return stats

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._files.bounded_columns if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class DeleteFileIndex:
    """The deletes of a snapshot, by the data files to which they apply (the specification's "Scan Planning").

    `oldest`: returns data files of the snapshot, including those with the lowest sequence number of each partition.
    """

    def __init__(self, files: IcebergFiles, deletes: Iterable[Entry], oldest: Callable[[], Iterable[Entry]]) -> None:
        self._files = files
        self._positions: dict[Group, list[SequencedDeletes]] = defaultdict(list)
        self._equality: dict[Group | None, EqualityGroup] = {}
        self._of_file: dict[str, list[SequencedDeletes]] = defaultdict(list)
        self._vectors: dict[str, Entry] = {}
        self._shared: dict[tuple[int, ...], tuple[Deletes, ...]] = {}
        self._shared_groups: dict[tuple[int, ...], tuple[EqualityGroup, ...]] = {}
        equality: dict[Group | None, list[EqualityDeletes]] = defaultdict(list)
        for entry in deletes:
            if entry.content == POSITION_DELETES:
                self._add_positions(entry)
            elif entry.content == EQUALITY_DELETES:
                group = None if files.is_global(entry.spec_id) else self.group(entry)
                equality[group].append(files.equality_deletes(entry))
            else:
                raise NotSupportedError(
                    f"{redact('path', entry.location)} has the content type {entry.content}, which is not supported: read the table with "
                    "format('iceberg')"
                )
        for sequenced in self._positions.values():
            sequenced.sort(key=lambda item: item.sequence)
        if equality:
            # For each group of deletes, the lowest sequence number of the data files that it may concern.
            lowest: dict[Group | None, int] = {}
            for entry in oldest():
                for group in (None, self.group(entry)):
                    lowest[group] = min(lowest.get(group, entry.sequence), entry.sequence)
            for group, group_deletes in equality.items():
                in_order = EqualityGroup(tuple(sorted(group_deletes, key=lambda item: item.sequence)))
                self._equality[group] = EqualityGroup(in_order.after(lowest.get(group, in_order.sequence)))

    def group(self, entry: Entry) -> Group:
        """The partition of a file, as a key."""
        return entry.spec_id, _comparable(self._files.partition_values(entry))

    @property
    def has_positions(self) -> bool:
        """Whether there are position deletes."""
        return bool(self._vectors or self._of_file or self._positions)

    @property
    def has_equality(self) -> bool:
        """Whether there are equality deletes that apply to at least one data file."""
        return any(group.files for group in self._equality.values())

    @property
    def named(self) -> Collection[str]:
        """The canonical locations of the data files that have a deletion vector, or a delete file for this file only."""
        return self._vectors.keys() | self._of_file.keys()

    @property
    def by_partition(self) -> Mapping[Group, Sequence[SequencedDeletes]]:
        """The position deletes that may concern several data files of a partition, in the order of their sequence numbers."""
        return self._positions

    @property
    def equality_groups(self) -> Mapping[Group | None, EqualityGroup]:
        """The equality deletes of each partition. The key None stands for those of all partitions. A group may be empty."""
        return self._equality

    def _add_positions(self, entry: Entry) -> None:
        if entry.format == _PUFFIN:
            if entry.referenced is None or entry.offset is None or entry.length is None:
                raise ValueError(f"{entry.location} has a deletion vector without its position or its data file")
            path = plain_location(entry.referenced)
            if path in self._vectors:
                raise ValueError(f"{entry.referenced} has two deletion vectors")
            self._vectors[path] = entry
            return
        deletes = self._files.position_deletes(entry)
        low, high = (
            parse_bound(bounds_by_id.get(_PATH_ID), "string", pa.string())
            for bounds_by_id in (entry.lower, entry.upper)
        )
        data_location = entry.referenced or (low if low == high else None)
        if data_location is not None:
            self._of_file[plain_location(data_location)].append(SequencedDeletes(entry.sequence, deletes))
        else:
            self._positions[self.group(entry)].append(SequencedDeletes(entry.sequence, deletes, (low, high)))

    def find_equality(self, entry: Entry) -> tuple[EqualityGroup, ...]:
        """The groups of equality deletes that apply to a data file. Files with the same groups share one tuple."""
        if not self._equality:
            return ()
        groups = (self._equality.get(None), self._equality.get(self.group(entry)))
        applicable = tuple(
            group for group in groups if group is not None and group.files and group.sequence > entry.sequence
        )
        return self._shared_groups.setdefault(tuple(map(id, applicable)), applicable)

    def find(self, entry: Entry, url: str) -> tuple[Deletes, ...]:
        """The position deletes that apply to a data file. Files with the same deletes share one tuple."""
        path = plain_location(entry.location)
        vector = self._vectors.get(path)
        if vector is not None and vector.sequence >= entry.sequence:
            vector_url = self._files.resolve_url(vector.location)
            vector_deletes = PuffinVector(
                self._files.relative_path(url), vector_url, vector.offset or 0, vector.length or 0, vector.rows
            )
            return (vector_deletes,)
        matches = [match for match in self._of_file.get(path, ()) if match.sequence >= entry.sequence]
        if self._positions:
            matches += [
                match
                for match in _select_applicable(self._positions.get(self.group(entry), ()), entry)
                if match.may_name(entry.location)
            ]
        deletes = tuple(match.deletes for match in matches)
        return self._shared.setdefault(tuple(map(id, deletes)), deletes)


def _select_applicable(sequenced: Sequence[SequencedDeletes], entry: Entry) -> Sequence[SequencedDeletes]:
    """The deletes that apply to a data file. `sequenced`: the candidates, in the order of their sequence numbers."""
    return sequenced[bisect.bisect_left(sequenced, entry.sequence, key=lambda item: item.sequence) :]


def _comparable(partition: tuple[Any, ...]) -> tuple[Any, ...]:
    """A partition in a form that can be a key: floats as their bits, except that all NaN are equal."""
    return tuple(
        ("NaN" if math.isnan(value) else value.hex()) if isinstance(value, float) else value for value in partition
    )
