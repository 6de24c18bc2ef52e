"""`Manifest` and `Entry`: the manifests of a snapshot, and the files that they list."""

from __future__ import annotations

import contextlib
import dataclasses
import decimal
import math
import struct
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.types import EXACT
from pyspark_lookup.core.decoding import UNREADABLE
from pyspark_lookup.sources.iceberg.partitions import python_value

DATA, POSITION_DELETES, EQUALITY_DELETES = 0, 1, 2
"""The values of a data_file's `content`."""
_DAY_US = 86_400_000_000
_NUMBERS = {("date", 4): "<i", ("timestamp", 8): "<q", ("timestamptz", 8): "<q"}


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest, as the manifest list names it. `length` and `spec_id` are None if a snapshot of format 1 has no such list."""

    location: str
    length: int | None
    spec_id: int | None
    sequence: int


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A live file: `location` as written, `partition` by the field ids `partition_ids`, `sequence` the data sequence number.

    `referenced`, `offset` and `length` are those of a deletion vector.
    """

    location: str
    content: int
    format: str
    spec_id: int
    partition_ids: tuple[int, ...]
    partition: tuple[Any, ...]
    sequence: int
    size: int
    rows: int
    lower: Mapping[int, bytes]
    upper: Mapping[int, bytes]
    nulls: Mapping[int, int]
    values: Mapping[int, int]
    equality_ids: tuple[int, ...]
    referenced: str | None
    offset: int | None
    length: int | None


def parse_bound(data: bytes | None, iceberg_type: str, kind: pa.DataType) -> Any:
    """A bound as a Python value (the specification's "Binary single-value serialization"); None if it has no value to compare by."""
    if data is None:
        return None
    with contextlib.suppress(*UNREADABLE, struct.error):
        if iceberg_type in ("int", "long"):
            return int.from_bytes(data, "little", signed=True) if len(data) in (4, 8) else None
        if iceberg_type in ("float", "double"):
            value = struct.unpack("<f" if len(data) == 4 else "<d", data)[0]
            return None if math.isnan(value) else float(value)
        if iceberg_type == "boolean":
            return data != b"\0"
        if iceberg_type == "string":
            return data.decode()
        if iceberg_type == "binary" or iceberg_type.startswith("fixed"):
            return data
        if pa.types.is_decimal(kind):
            unscaled = int.from_bytes(data, "big", signed=True)
            return decimal.Decimal(unscaled).scaleb(-kind.scale, EXACT)
        form = _NUMBERS.get((iceberg_type, len(data)))
        if form is not None:
            return python_value(struct.unpack(form, data)[0], iceberg_type)
        # The bound of a date, written before the column was widened.
        if iceberg_type.startswith("timestamp") and len(data) == 4:
            return python_value(struct.unpack("<i", data)[0] * _DAY_US, iceberg_type)
    return None
