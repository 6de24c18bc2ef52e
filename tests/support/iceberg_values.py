"""Types and values of the Iceberg specification, as the tests' writer and oracle need them: Arrow types, transforms, bounds, defaults."""

import datetime
import decimal
import functools
import math
import uuid
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyiceberg import conversions
from pyiceberg.transforms import parse_transform
from pyiceberg.types import IcebergType, PrimitiveType
from pyiceberg.utils.truncate import truncate_upper_bound_binary_string, truncate_upper_bound_text_string

Kind = Any
"""A type as metadata has it: a text, or a dictionary that describes a struct, list or map."""
Field = dict[str, Any]
ID_KEYS = {"parquet": b"PARQUET:field_id", "orc": b"iceberg.id"}
"""What a format calls the field ids of its columns."""
_DAY = datetime.date(1970, 1, 1)
EXACT = decimal.Context(prec=100)
_EPOCH = datetime.datetime(1970, 1, 1)
_EPOCH_UTC = _EPOCH.replace(tzinfo=datetime.timezone.utc)
_MICROSECOND = datetime.timedelta(microseconds=1)
_PLAIN = {
    "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(), "float": pa.float32(), "double": pa.float64(),
    "date": pa.date32(), "timestamp": pa.timestamp("us"), "timestamptz": pa.timestamp("us", "UTC"),
    "string": pa.string(), "binary": pa.binary(),
}  # fmt: skip


def arrow_type(kind: Kind, form: str = "spark", ids: bool = False) -> pa.DataType:
    """The type in Spark, or in a file of the format `form`, there with field ids or without."""
    if isinstance(kind, dict):
        if kind["type"] == "struct":
            return pa.struct([arrow_field(field, form, ids) for field in kind["fields"]])
        inner = {name: arrow_field({"id": kind[f"{name}-id"], "name": name, "type": kind[name]}, form, ids)
                 for name in ("element", "key", "value") if name in kind}  # fmt: skip
        if kind["type"] == "list":
            return pa.list_(inner["element"])
        return pa.map_(inner["key"].with_nullable(False), inner["value"])
    if kind.startswith("decimal"):
        return pa.decimal128(*parse_decimal(kind))
    if kind.startswith("fixed"):
        return pa.binary() if form == "spark" else pa.binary(int(kind[6:-1]))
    if kind == "uuid":
        return {"spark": pa.string(), "parquet": pa.uuid(), "orc": pa.binary()}[form]
    return _PLAIN[kind]


def arrow_field(field: Field, form: str = "spark", ids: bool = False) -> pa.Field:
    metadata = {ID_KEYS[form]: str(field["id"])} if ids else None
    return pa.field(field["name"], arrow_type(field["type"], form, ids), metadata=metadata)


def parse_decimal(kind: str) -> tuple[int, int]:
    """Precision and scale of `decimal(p, s)`."""
    precision, _, scale = kind[8:-1].partition(",")
    return int(precision), int(scale)


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def ordered(value: Any) -> Any:
    """What sorts values as bounds do: -0.0 is below 0.0."""
    return (value, math.copysign(1, value)) if isinstance(value, float) else value


def raw(kind: Kind, value: Any) -> Any:
    """A value as manifests have it: dates and times are numbers."""
    if isinstance(value, datetime.datetime):
        return (value - (_EPOCH if value.tzinfo is None else _EPOCH_UTC)) // _MICROSECOND
    if isinstance(value, datetime.date):
        return (value - _DAY).days
    if isinstance(value, uuid.UUID):
        return value.bytes
    if isinstance(value, decimal.Decimal):
        return value.quantize(decimal.Decimal(1).scaleb(-parse_decimal(kind)[1]), context=EXACT)
    return value


def from_raw(kind: Kind, value: Any) -> Any:
    """The value of which `raw` made this one."""
    if kind == "date" and isinstance(value, int):
        return _DAY + datetime.timedelta(value)
    if kind in ("timestamp", "timestamptz") and isinstance(value, int):
        return (_EPOCH if kind == "timestamp" else _EPOCH_UTC) + value * _MICROSECOND
    return uuid.UUID(bytes=value) if kind == "uuid" and isinstance(value, bytes) else value


def from_json(kind: Kind, value: Any) -> Any:
    """A default of a column, as metadata has it."""
    return value if value is None or isinstance(kind, dict) else conversions.from_json(iceberg_type(kind), value)


@functools.cache
def _transform(transform: str, kind: str) -> tuple[Callable[[Any], Any], str]:
    """A function that does what PyIceberg's transform does, and the type of its results."""
    parsed, source = parse_transform(transform), iceberg_type(kind)
    return parsed.transform(source), str(parsed.result_type(source))


@functools.cache
def iceberg_type(kind: str) -> PrimitiveType:
    return IcebergType.handle_primitive_type(kind, lambda _: None)


def result_kind(transform: str, kind: str) -> str:
    return _transform(transform, kind)[1]


def transformed(transform: str, kind: str, value: Any) -> Any:
    """What a transform gives for a value, raw."""
    return None if value is None else _transform(transform, kind)[0](raw(kind, value))


def to_bytes(kind: str, value: Any) -> bytes:
    """A bound, not truncated; `value` may be raw."""
    return conversions.to_bytes(iceberg_type(kind), raw(kind, value))


def truncated_bounds(kind: str, low: Any, high: Any, length: int = 16) -> tuple[bytes, bytes | None]:
    """Bounds of which texts and bytes are cut; no upper one, if nothing so short is above."""
    if kind == "string":
        low, high = low[:length], truncate_upper_bound_text_string(high, length)
        high = high and high.replace("\ud800", "\ue000")  # half of a pair is no character
    elif kind == "binary":
        low, high = low[:length], truncate_upper_bound_binary_string(high, length)
    return to_bytes(kind, low), None if high is None else to_bytes(kind, high)
