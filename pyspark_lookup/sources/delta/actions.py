"""The actions of a Delta log, and the state of a table that follows from them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from pyspark_lookup.core.decoding import as_count, as_decimal, as_positive, as_text, as_texts, show
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.errors import NotSupportedError

READER_FEATURES = frozenset(
    {
        "columnMapping",
        "deletionVectors",
        "timestampNtz",
        "typeWidening",
        "typeWidening-preview",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
"""The reader features that are supported. Not `catalogManaged`: such a table may have commits that its log does not show yet."""
_OF_TYPES = frozenset({"variantType", "variantType-preview", "variantShredding-preview"})
"""Features of column types that are not supported. A table may list them, and only its columns of such types are refused: delta-rs lists them even
if no column has such a type."""
Key = tuple[str, str]
"""What identifies a file in a remove action: (path, unique id of its deletion vector, or an empty text)."""
Rewrites = tuple[tuple[tuple[Key, ...], tuple[Key, ...]], ...]
"""For each of the latest commits that changed no data: (the files that it added, the files that these replace)."""
_LEGACY_VERSION, _FEATURES_VERSION = 2, 3
_INT_AT_MOST = 2**31 - 1  # of the protocol's `Int`
_VECTOR_BYTES, _ROW_BYTES = 2**20, 32  # more than a vector takes, and than each row in it
_END_OF_TIME_MS = 253_402_300_800_000  # the year 10000
_ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:|/")


@dataclasses.dataclass(frozen=True)
class Vector:
    """A deletion vector as the log describes it."""

    storage: str
    data: str
    offset: int
    size: int
    cardinality: int

    @classmethod
    def from_descriptor(cls, descriptor: Any) -> Vector | None:
        """The vector that the `deletionVector` of an action describes; None for an action without one. Raises one of `decoding.UNREADABLE` if it is
        malformed."""
        if descriptor is None:
            return None
        offset, size, rows = (
            descriptor.get("offset"),
            as_count(descriptor["sizeInBytes"]),
            as_count(descriptor["cardinality"]),
        )
        place = 0 if offset is None else as_count(offset)
        # As many bytes would be requested from the store, so a damaged log must not ask for more than a vector can have.
        if max(place, size) > _INT_AT_MOST or size > _VECTOR_BYTES + rows * _ROW_BYTES:
            raise ValueError(f"an impossible deletion vector: {size} bytes at {place} for {rows} rows")
        return cls(as_text(descriptor["storageType"]), as_text(descriptor["pathOrInlineDv"]), place, size, rows)


@dataclasses.dataclass(frozen=True)
class Add:
    """A data file. `path`: as the log spells it, maybe percent-encoded. `statistics`: their JSON text; None if there are none."""

    path: str
    partition: tuple[tuple[str, str | None], ...]
    size: int
    modified_ms: int
    statistics: str | None
    vector: Vector | None

    @property
    def key(self) -> Key:
        return key_of_file(self.path, self.vector)

    @cached_property
    def parsed(self) -> Statistics | None:
        """The statistics of the file's columns; None if the log has none, or they cannot be read."""
        return Statistics.parse(self.statistics)

    @classmethod
    def from_action(cls, action: Mapping[str, Any]) -> Add:
        """The data file that an `add` action names. Raises one of `decoding.UNREADABLE` if it is malformed."""
        values = action["partitionValues"]
        pairs = values.items() if isinstance(values, Mapping) else () if values is None else values
        partition = tuple(
            sorted((as_text(name), None if value is None else as_text(value) or None) for name, value in pairs)
        )
        statistics = action.get("stats")
        return cls(
            as_text(action["path"]),
            partition,
            as_positive(action["size"]),  # an empty file would have no rows
            int(action.get("modificationTime") or 0),
            statistics if isinstance(statistics, str) and statistics else None,
            Vector.from_descriptor(action.get("deletionVector")),
        )

    def to_json(self) -> list[Any]:
        """The action as a JSON value."""
        vector = None if self.vector is None else dataclasses.astuple(self.vector)
        return [self.path, self.partition, self.size, self.modified_ms, self.statistics, vector]

    @classmethod
    def from_json(cls, record: Any) -> Add:
        """Decode what `to_json` wrote. Raises one of `decoding.UNREADABLE` if it is malformed."""
        path, partition, size, modified_ms, statistics, vector = record
        pairs = tuple((as_text(name), None if value is None else as_text(value)) for name, value in partition)
        storage, data, *counts = vector or ("", "", 0, 0, 0)
        parsed_vector = Vector(as_text(storage), as_text(data), *map(as_count, counts)) if vector else None
        return cls(as_text(path), pairs, as_positive(size), int(modified_ms), statistics, parsed_vector)


def key_of_file(path: str, vector: Vector | None) -> Key:
    return path, "" if vector is None else f"{vector.storage}{vector.data}@{vector.offset}"


def is_absolute(path: str) -> bool:
    """Whether a data file's path is absolute, not relative to the table."""
    return _ABSOLUTE.match(path) is not None


def decode_path(path: str) -> str:
    return unquote(path)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """A data file's statistics from the log, by the names that columns have in the file. A struct has a mapping of its fields' values."""

    rows: int | None
    low: Mapping[str, Any]
    high: Mapping[str, Any]
    nulls: Mapping[str, Any]
    tight: bool

    @classmethod
    def parse(cls, text: str | None) -> Statistics | None:
        """The statistics of an `Add`, from their JSON text; None if the text cannot be read, because scans work without statistics."""
        if text is None:
            return None
        try:
            stats = json.loads(text, parse_float=as_decimal)
            rows = stats.get("numRecords")
            parts = (stats.get(name) or {} for name in ("minValues", "maxValues", "nullCount"))
            low, high, nulls = (part if isinstance(part, dict) else {} for part in parts)
            tight = stats.get("tightBounds", True) is True
            return cls(None if rows is None else as_count(rows), low, high, nulls, tight)
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None


@dataclasses.dataclass(frozen=True)
class DeltaState:
    """A table at a version: its `metaData` and `protocol` actions, and its data files by their keys."""

    version: int
    metadata: Mapping[str, Any]
    protocol: Mapping[str, Any]
    files: Mapping[Key, Add]
    rewrites: Rewrites = ()
    memo: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def table_id(self) -> str:
        return as_text(self.metadata["id"])

    @cached_property
    def schema(self) -> Any:
        return json.loads(as_text(self.metadata["schemaString"]))

    @property
    def partition_columns(self) -> tuple[str, ...]:
        return as_texts(self.metadata["partitionColumns"])

    @property
    def configuration(self) -> dict[str, str]:
        configuration = self.metadata.get("configuration")
        pairs = (
            configuration.items()
            if isinstance(configuration, Mapping)
            else ()
            if configuration is None
            else configuration
        )
        return {as_text(name): as_text(value) for name, value in pairs}

    @property
    def mapping(self) -> str:
        """The mode of the column mapping: `none`, `name` or `id`."""
        mode = self.configuration.get("delta.columnMapping.mode", "none")
        if mode not in ("none", "name", "id"):
            raise NotSupportedError(f"delta.columnMapping.mode = {mode!r} is not supported")
        return mode if self._maps_columns() else "none"

    def _maps_columns(self) -> bool:
        if self.protocol["minReaderVersion"] == _LEGACY_VERSION:
            return True
        # In tables that were upgraded from reader version 2, Delta on Spark lists the feature only for writers.
        feature_lists = (self.protocol.get(f"{role}Features") or () for role in ("reader", "writer"))
        return any("columnMapping" in features for features in feature_lists)

    def check(self) -> None:
        """Raise NotSupportedError if this package does not support the table's reader version or one of its reader features.

        Raises one of `decoding.UNREADABLE` if the metadata is malformed.
        """
        least = as_count(self.protocol["minReaderVersion"])
        if least > _FEATURES_VERSION:
            raise NotSupportedError(f"it requires reader version {least}; up to {_FEATURES_VERSION} is supported")
        required_features = set(as_texts(self.protocol["readerFeatures"])) if least == _FEATURES_VERSION else set()
        unknown = sorted(required_features - READER_FEATURES - _OF_TYPES)
        if unknown:
            raise NotSupportedError(f"it requires the reader feature {', '.join(unknown)}, which is not supported")
        _ = self.mapping, self.table_id
        names = {field["name"] for field in self.schema["fields"]}
        for place, name in enumerate(self.partition_columns):
            if name not in names:
                raise ValueError(f"the table has no column {name}, by which it is partitioned")
            if name in self.partition_columns[:place]:
                raise ValueError(f"the table is partitioned by the column {name} twice")


@dataclasses.dataclass
class Replay:
    """A state under construction, to which the actions of one version after the other are applied."""

    version: int = -1
    metadata: Mapping[str, Any] | None = None
    protocol: Mapping[str, Any] | None = None
    files: dict[Key, Add] = dataclasses.field(default_factory=dict)
    rewrites: Rewrites = ()

    @classmethod
    def from_state(cls, state: DeltaState) -> Replay:
        return cls(state.version, state.metadata, state.protocol, dict(state.files), state.rewrites)

    def apply(self, actions: Iterable[Mapping[str, Any]], checkpoint: bool = False) -> None:
        """Apply the actions of one commit, or of a `checkpoint`. (All actions of a checkpoint are marked as changing no data.)

        Raises one of `decoding.UNREADABLE` if they are malformed.
        """
        added_files: list[Add] = []
        removed_keys: list[Key] = []
        changes_data = False
        for action in actions:
            add, remove = action.get("add"), action.get("remove")
            if add is not None:
                added_files.append(Add.from_action(add))
                changes_data |= add.get("dataChange") is not False
            if remove is not None:
                removed_keys.append(
                    key_of_file(as_text(remove["path"]), Vector.from_descriptor(remove.get("deletionVector")))
                )
                changes_data |= remove.get("dataChange") is not False
            metadata, protocol = action.get("metaData"), action.get("protocol")
            self.metadata = self.metadata if metadata is None else metadata
            self.protocol = self.protocol if protocol is None else protocol
        for key in removed_keys:  # first: a file's vector may be replaced by another one in the same commit
            self.files.pop(key, None)
        self.files.update((add.key, add) for add in added_files)
        if added_files and removed_keys and not changes_data and not checkpoint:
            self.rewrites = (*self.rewrites[-7:], (tuple(add.key for add in added_files), tuple(removed_keys)))

    def state(self) -> DeltaState:
        """The state so far, unchecked. Raises ValueError if the table's metadata or protocol is missing."""
        if self.metadata is None or self.protocol is None:
            raise ValueError(f"version {self.version} lacks the table's {'protocol' if self.metadata else 'metadata'}")
        for name in ("id", "schemaString"):
            if not isinstance(self.metadata.get(name), str):
                raise ValueError(f"its metadata has no {name}")
        vector_paths = [path for path, vector in self.files if vector]
        if len({*vector_paths}) < len(vector_paths) or any((path, "") in self.files for path in vector_paths):
            raise ValueError("it lists a data file twice, with different deletion vectors")
        return DeltaState(self.version, self.metadata, self.protocol, self.files, self.rewrites)


def check_commit(actions: Sequence[Mapping[str, Any]]) -> None:
    """Raise one of `decoding.UNREADABLE` if a commit contradicts itself, or its time is out of range."""
    Replay().apply(actions)
    for action in actions:
        info = action.get("commitInfo")
        at_ms = None if info is None else info.get("inCommitTimestamp")
        if at_ms is not None and as_count(at_ms) >= _END_OF_TIME_MS:
            raise ValueError(f"its inCommitTimestamp {at_ms} is out of range")


def parse_actions(text: bytes, origin: str) -> list[dict[str, Any]]:
    """The actions in a JSON commit or checkpoint. Raises ValueError if an action is malformed."""
    actions = []
    for number, line in enumerate(text.split(b"\n"), 1):  # not splitlines: texts may contain other line ends
        if line.strip():
            action = json.loads(line)
            if not isinstance(action, dict):
                raise ValueError(f"line {number} is not an action: {show(action)}")
            actions.append(action)
    if not actions:
        raise ValueError(f"{origin} is empty")
    return actions
