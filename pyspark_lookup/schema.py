"""Arrow schemas as Spark takes them: types normalised, schemas of files merged, batches cast.

Spark accepts one Arrow type per SQL type, exactly (`to_arrow_schema`). `spark_type` gives it for any
type a file may hold; `merge_schemas` unites files (missing columns are null, types may widen
without loss); `cast_column` brings a column there or fails without losing data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.errors import SchemaError

__all__ = ["cast_column", "check_readable", "merge_schemas", "resolve_names", "spark_schema", "spark_type", "widens"]

_UNSIGNED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}
_INTS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
_INT_DIGITS = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}


def spark_type(kind: pa.DataType) -> pa.DataType:
    """The Arrow type in which Spark takes columns of `kind`. Raises SchemaError if there is none."""
    if isinstance(kind, pa.BaseExtensionType):
        return spark_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return spark_type(kind.value_type)
    if pa.types.is_run_end_encoded(kind):
        return spark_type(kind.value_type)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    ):
        return pa.binary()
    if kind in _UNSIGNED:
        return _UNSIGNED[kind]
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_date(kind):
        return pa.date32()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz="UTC" if kind.tz is not None else None)
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_decimal(kind):
        if kind.precision > 38 or not 0 <= kind.scale <= kind.precision:
            raise SchemaError(f"type {kind} has no counterpart in Spark (decimals go up to 38 digits)")
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_null(kind):
        return pa.string()  # nothing was ever written to it; Spark infers string as well
    if pa.types.is_map(kind):
        return pa.map_(spark_type(kind.key_type), _child("value", kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([_child(field.name, field.type) for field in kind])
    if (
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    ):
        return pa.list_(_child("element", kind.value_type))
    if pa.types.is_signed_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return kind
    raise SchemaError(f"type {kind} has no counterpart in Spark")


def _child(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, spark_type(kind), nullable=True)


def spark_schema(schema: pa.Schema, origin: str) -> pa.Schema:
    """`schema` with every type as Spark takes it, all columns nullable, without metadata.

    Raises SchemaError naming `origin` and the column for a type Spark lacks or a name given twice.
    """
    fields = []
    seen: dict[str, str] = {}
    for field in schema:
        try:
            fields.append(pa.field(field.name, spark_type(field.type), nullable=True))
        except SchemaError as problem:
            raise SchemaError(f"{origin}: column {field.name!r}: {problem}; leave it out with lookup.columns") from None
        folded = field.name.casefold()
        if folded in seen:
            raise SchemaError(f"{origin}: columns {seen[folded]!r} and {field.name!r} differ at most in letter case")
        seen[folded] = field.name
    return pa.schema(fields)


def widens(narrow: pa.DataType, wide: pa.DataType) -> bool:
    """Whether every value of `narrow` (as Spark takes it) is a value of `wide` without loss."""
    if narrow == wide:
        return True
    if narrow in _INTS and wide in _INTS:
        return _INTS.index(narrow) < _INTS.index(wide)
    if pa.types.is_decimal(wide):
        whole = wide.precision - wide.scale
        if narrow in _INTS:
            return bool(whole >= _INT_DIGITS[narrow])
        if pa.types.is_decimal(narrow):
            return bool(wide.scale >= narrow.scale and whole >= narrow.precision - narrow.scale)
    if pa.types.is_float64(wide):
        return narrow in (pa.float32(), pa.int8(), pa.int16(), pa.int32())
    if pa.types.is_list(narrow) and pa.types.is_list(wide):
        return widens(narrow.value_type, wide.value_type)
    if pa.types.is_map(narrow) and pa.types.is_map(wide):
        return widens(narrow.key_type, wide.key_type) and widens(narrow.item_type, wide.item_type)
    if pa.types.is_struct(narrow) and pa.types.is_struct(wide):
        return [f.name for f in narrow] == [f.name for f in wide] and all(
            widens(a.type, b.type) for a, b in zip(narrow, wide, strict=True)
        )
    return False


@dataclasses.dataclass
class _Column:
    name: str
    type: pa.DataType
    origin: str


def merge_schemas(schemas: Iterable[tuple[str, pa.Schema]]) -> pa.Schema:
    """One schema for files given as (name, schema as Spark takes it), in order of first appearance.

    Raises SchemaError naming the column, both types and both files if types do not widen.
    """
    columns: dict[str, _Column] = {}
    for origin, schema in schemas:
        for field in schema:
            known = columns.setdefault(field.name.casefold(), _Column(field.name, field.type, origin))
            if known.name != field.name:
                raise SchemaError(
                    f"column {known.name!r} of {known.origin} is spelled {field.name!r} in {origin}: rewrite one of them"
                )
            if widens(known.type, field.type):
                known.type, known.origin = field.type, origin if known.type != field.type else known.origin
            elif not widens(field.type, known.type):
                raise SchemaError(
                    f"column {field.name!r} is {known.type} in {known.origin} but {field.type} in {origin}: "
                    "rewrite one of them, or leave the column out with lookup.columns"
                )
    return pa.schema([pa.field(c.name, c.type) for c in columns.values()])


def check_readable(planned: pa.Field, found: pa.DataType, origin: str) -> None:
    """Raise SchemaError unless a column of type `found` in `origin` can be read as `planned`."""
    if not widens(found, planned.type):
        raise SchemaError(
            f"column {planned.name!r} was planned as {planned.type} but is {found} in {origin}: the table changed; "
            "plan again (a new load() or SQL statement; a catalog table must be created again)"
        )


def resolve_names(wanted: Sequence[str], schema: pa.Schema, option: str) -> list[str]:
    """The schema's spelling of each wanted column, ignoring letter case as Spark does.

    Raises SchemaError naming the option and the table's columns for an unknown one.
    """
    spellings = {name.casefold(): name for name in schema.names}
    for name in wanted:
        if name.casefold() not in spellings:
            raise SchemaError(f"option {option}: the table has no column {name!r}; it has {', '.join(schema.names)}")
    return [spellings[name.casefold()] for name in wanted]


def cast_column(column: pa.Array, kind: pa.DataType, name: str, origin: str) -> pa.Array:
    """`column` as `kind`, or SchemaError naming the column and file if a value would change."""
    if column.type == kind:
        return column
    try:
        if isinstance(column, pa.ExtensionArray):
            column = column.storage
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pa.types.is_null(column.type):
            return pa.nulls(len(column), kind)
        if pa.types.is_struct(kind) or pa.types.is_list(kind) or pa.types.is_map(kind):
            return _cast_nested(column, kind, name, origin)
        if pa.types.is_timestamp(column.type) and column.type.tz is None and kind == pa.timestamp("us", tz="UTC"):
            column = column.cast(pa.timestamp("us"))  # INT96: instants in UTC without saying so
        return column if column.type == kind else pc.cast(column, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as problem:
        raise SchemaError(f"column {name!r} of {origin} cannot be read as {kind}: {problem}") from problem


def _cast_nested(column: pa.Array, kind: pa.DataType, name: str, origin: str) -> pa.Array:
    """A nested column rebuilt with cast children; offsets and validity are kept."""
    if pa.types.is_struct(kind):
        # flatten() applies the parent's nulls and offset to the children.
        children = [
            cast_column(child, field.type, f"{name}.{field.name}", origin)
            for child, field in zip(column.flatten(), kind, strict=True)
        ]
        mask = column.is_null() if column.null_count else None
        if not children:
            return column
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    if pa.types.is_map(kind):
        keys = cast_column(column.keys, kind.key_type, f"{name}.key", origin)
        items = cast_column(column.items, kind.item_type, f"{name}.value", origin)
        offsets = _offsets(column)
        return pa.MapArray.from_arrays(offsets, keys, items, type=kind)
    if pa.types.is_fixed_size_list(column.type) or not pa.types.is_list(column.type):
        column = column.cast(pa.list_(pa.field("element", column.type.value_type)))
    values = cast_column(column.values, kind.value_type, f"{name}.element", origin)
    return pa.ListArray.from_arrays(_offsets(column), values, type=kind)


def _offsets(column: pa.Array) -> pa.Array:
    """A list's or map's offsets into its values, with null at the rows that are null."""
    offsets = column.offsets
    if column.null_count == 0:
        return offsets
    validity = pa.concat_arrays([column.is_valid(), pa.array([True])])
    return pc.if_else(validity, offsets, pa.scalar(None, pa.int32()))
