"""The actions of a Delta log that name data files, parsed."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from pyspark_lookup.core.decoding import as_count, as_decimal, as_positive, as_text, show
from pyspark_lookup.core.forks import cached_property

Key = tuple[str, str]
"""The pair by which a remove action identifies a file: (path, unique id of its deletion vector, empty without one)."""
_INT_AT_MOST = 2**31 - 1  # the largest value of the protocol's type `Int`
_VECTOR_BYTES, _ROW_BYTES = 2**20, 32  # a vector takes less than the first, plus the second for each deleted row
_ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:|/")


@dataclasses.dataclass(frozen=True)
class Vector:
    """A deletion vector as the log describes it: where it is stored, its size in bytes, and `cardinality`, the number of deleted rows."""

    storage: str
    data: str
    offset: int
    size: int
    cardinality: int

    @classmethod
    def from_descriptor(cls, descriptor: Any) -> Vector | None:
        """The vector that the `deletionVector` of an action describes; None for an action without one.

        Raises one of `decoding.UNREADABLE` for a malformed descriptor.
        """
        if descriptor is None:
            return None
        offset, size, rows = (
            descriptor.get("offset"),
            as_count(descriptor["sizeInBytes"]),
            as_count(descriptor["cardinality"]),
        )
        place = 0 if offset is None else as_count(offset)
        # The store will be asked for `size` bytes, so a damaged log must not make that more than a vector can have.
        if max(place, size) > _INT_AT_MOST or size > _VECTOR_BYTES + rows * _ROW_BYTES:
            raise ValueError(f"an impossible deletion vector: {size} bytes at {place} for {rows} rows")
        return cls(as_text(descriptor["storageType"]), as_text(descriptor["pathOrInlineDv"]), place, size, rows)


@dataclasses.dataclass(frozen=True)
class Add:
    """A data file, from an `add` action. `path`: as the log spells it, maybe percent-encoded. `statistics`: JSON text; None if the log has
    none."""

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
        """The statistics of the file's columns; None if the log has none, or they cannot be parsed."""
        return Statistics.parse(self.statistics)

    @classmethod
    def from_action(cls, action: Mapping[str, Any]) -> Add:
        """The data file that an `add` action names. Raises one of `decoding.UNREADABLE` for a malformed action."""
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
        """The action as a JSON array, which `from_json` reads."""
        vector = None if self.vector is None else dataclasses.astuple(self.vector)
        return [self.path, self.partition, self.size, self.modified_ms, self.statistics, vector]

    @classmethod
    def from_json(cls, record: Any) -> Add:
        """The action that `to_json` wrote. Raises one of `decoding.UNREADABLE` for a malformed record."""
        path, partition, size, modified_ms, statistics, vector = record
        pairs = tuple((as_text(name), None if value is None else as_text(value)) for name, value in partition)
        storage, data, *counts = vector or ("", "", 0, 0, 0)
        parsed_vector = Vector(as_text(storage), as_text(data), *map(as_count, counts)) if vector else None
        return cls(as_text(path), pairs, as_positive(size), int(modified_ms), statistics, parsed_vector)


def key_of_file(path: str, vector: Vector | None) -> Key:
    return path, "" if vector is None else f"{vector.storage}{vector.data}@{vector.offset}"


def is_absolute(path: str) -> bool:
    """Whether the path of a data file is absolute. Otherwise it is relative to the table's directory."""
    return _ABSOLUTE.match(path) is not None


def decode_path(path: str) -> str:
    return unquote(path)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The statistics of a data file from the log, by the names that the columns have in the file. A struct has a mapping of its fields'
    values."""

    rows: int | None
    low: Mapping[str, Any]
    high: Mapping[str, Any]
    nulls: Mapping[str, Any]
    tight: bool

    @classmethod
    def parse(cls, text: str | None) -> Statistics | None:
        """The statistics in the JSON text of an `Add`; None if the text cannot be parsed. Scans work without statistics."""
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


def parse_actions(text: bytes) -> list[dict[str, Any]]:
    """The actions in a commit, or in a checkpoint in JSON. Raises ValueError if an action is malformed, or if there is none."""
    actions = []
    for number, line in enumerate(text.split(b"\n"), 1):  # not splitlines: texts may contain other line ends
        if line.strip():
            action = json.loads(line)
            if not isinstance(action, dict):
                raise ValueError(f"line {number} is not an action: {show(action)}")
            actions.append(action)
    if not actions:
        raise ValueError("it is empty")
    return actions
