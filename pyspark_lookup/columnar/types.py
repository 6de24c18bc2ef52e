"""Converts Arrow types, schemas and columns to those that Spark has, and merges the schemas of files.

For each SQL type, Spark accepts exactly one Arrow type (see PySpark's `to_arrow_schema`). `spark_type` returns this type for any type in a
file. `merge_schemas` makes one schema for several files: a column that a file lacks is null, and types may widen without loss. `cast_column`
converts a column to a type, or raises an error if a value would change.
"""

from __future__ import annotations

import base64
import dataclasses
import decimal
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.core.credentials import names_shown
from pyspark_lookup.errors import NotSupportedError, SchemaError, UnreadableColumnError, raise_ours

_UNSIGNED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}
EXACT = decimal.Context(prec=76)
"""A context in which decimals of 38 digits, and the sum or product of two, are not rounded. Python's own context rounds to 28 digits."""
MOST_NESTED = 100
"""The deepest nesting of a column's type. Arrow's own limit is about 120, and Python limits the depth of recursion, too."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NOTHING = pa.string()
CREATE_AGAIN = "DROP TABLE, which leaves its files but loses its options, and CREATE TABLE with the same options"
"""What errors advise if the catalog's columns or options of a table are wrong."""
PLAN_AGAIN = f"plan again with a new load() or SQL statement (a catalog table: {CREATE_AGAIN})"
"""What errors advise after a table's columns have changed under a planned query."""
_INTS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)
_INT_DIGITS = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
VARIANT = pa.struct(
    [
        pa.field("value", pa.binary(), nullable=False),
        pa.field("metadata", pa.binary(), nullable=False, metadata={b"variant": b"true"}),
    ]
)
"""The type in which Spark exchanges VARIANT columns with Python. Only its metadata tells it from an ordinary struct."""


_COLLATED = b"spark.field"  # in the metadata of a column with collations, the key under which Spark's field of the column is, as JSON


def with_collations(field: pa.Field, in_spark: Mapping[str, Any]) -> pa.Field:
    """The column `field`, with Spark's field of it in its metadata if it has a collation.

    By this metadata, functions that compare texts by their bytes recognise and refuse such a column. `in_spark`: Spark's field, as parsed JSON.
    """
    try:
        text = json.dumps(dict(in_spark))
    except RecursionError:
        return field  # `spark_type` refuses a type that is nested so deeply
    # In this package every column may have nulls, whatever the file says.
    nullable = re.sub(r'"(nullable|containsNull|valueContainsNull)": false', r'"\1": true', text)
    return field.with_metadata({_COLLATED: nullable}) if "__COLLATIONS" in text else field


def collated_field(field: pa.Field) -> dict[str, Any] | None:
    """Spark's field of a column with collations, as parsed JSON; None for any other column."""
    text = (field.metadata or {}).get(_COLLATED)
    return None if text is None else json.loads(text)


def is_variant(kind: pa.DataType) -> bool:
    """Whether a type is `VARIANT`."""
    return bool(kind == VARIANT and kind.equals(VARIANT, check_metadata=True))


def has_variant_parts(kind: pa.DataType) -> bool:
    """Whether a type is a struct with the fields by which Parquet stores a VARIANT."""
    if not pa.types.is_struct(kind):
        return False
    types = {field.name: field.type for field in kind}
    has_metadata = "metadata" in types and is_binary(types["metadata"])
    return has_metadata and len(types) > 1 and types.keys() <= {"metadata", "value", "typed_value"}


def has_variant(kind: pa.DataType) -> bool:
    """Whether a type is `VARIANT`, or has it in one of its parts."""
    return is_variant(kind) or any(map(has_variant, split_type(kind)[1]))


def spark_type(kind: pa.DataType, nothing: pa.DataType = _NOTHING) -> pa.DataType:
    """The Arrow type to which columns of type `kind` are converted for Spark. Raises SchemaError if Spark has no such type.

    `nothing`: what Arrow's null type becomes, also as a part of `kind`; by default string, as when Spark infers types.
    """
    if is_deeper(kind, MOST_NESTED):
        raise SchemaError(f"a type nested more than {MOST_NESTED} deep is not supported")
    return _spark_type(kind, nothing)


def _spark_type(kind: pa.DataType, nothing: pa.DataType) -> pa.DataType:
    if (reason := unreadable(kind)) is not None:
        raise SchemaError(reason)
    if is_variant(kind):
        return VARIANT
    if isinstance(kind, pa.BaseExtensionType):
        return spark_type(kind.storage_type, nothing)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return spark_type(kind.value_type, nothing)
    if is_text(kind):
        return pa.string()
    if is_binary(kind):
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
        return nothing
    shape, parts = split_type(kind)
    if shape is not None:
        return with_parts(kind, [_spark_type(part, nothing) for part in parts])
    if pa.types.is_signed_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return kind
    raise SchemaError(f"type {kind} has no counterpart in Spark")


def is_deeper(kind: pa.DataType, depth: int) -> bool:
    """Whether a type is nested deeper than `depth` levels."""
    level = [kind]
    while level and depth >= 0:
        level = [kind.field(number).type for kind in level for number in range(kind.num_fields)]
        depth -= 1
    return bool(level)


def unreadable_type(reason: str) -> pa.DataType:
    """A placeholder for a type that cannot be read. `reason`: e.g. `type time64[us] has no counterpart in Spark`."""
    return pa.opaque(pa.null(), reason, __name__)


def without_counterpart(field: pa.Field, kind: str | None, url: str) -> pa.Field:
    """The column `field` of the file at `url`; if Spark lacks its type in the file, its type becomes an `unreadable_type`.

    `kind`: the name of such a type in the file; None for a column that Spark can read.
    """
    if kind is None:
        return field
    return field.with_type(unreadable_type(f"column {field.name!r}: type {kind} has no counterpart in Spark ({url})"))


def type_of_column(parse: Callable[[Any], pa.DataType], declared: Any, column: str) -> pa.DataType:
    """The Arrow type that `parse` returns for the type `declared` in a table's metadata; an `unreadable_type` if `parse` raises NotSupportedError."""
    try:
        return parse(declared)
    except NotSupportedError as problem:
        return unreadable_type(f"column {column!r} cannot be read: {problem}")


def unreadable(kind: pa.DataType) -> str | None:
    """The reason why a column of type `kind` cannot be read; None if it can be read."""
    return kind.type_name if isinstance(kind, pa.OpaqueType) and kind.vendor_name == __name__ else None


def check_all_readable(schema: pa.Schema, place: str = "") -> None:
    """Raise UnreadableColumnError for the first column that cannot be read. The error says why, and how to leave the column out.

    `place`: the table, as the error's text begins.
    """
    for field in schema:
        if (reason := unreadable(field.type)) is not None:
            raise UnreadableColumnError(
                f"{place}{reason}: read the table without {field.name!r}: name the other columns in lookup.columns, in lookup.schema (files and databases) or in .schema(…)"
            )


def is_text(kind: pa.DataType) -> bool:
    """Whether a type is text, in any of its layouts."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_binary(kind: pa.DataType) -> bool:
    """Whether a type is binary, in any of its layouts."""
    tests = (pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return bool(pa.types.is_binary(kind) or any(test(kind) for test in tests))


def split_type(kind: pa.DataType) -> tuple[object, list[pa.DataType]]:
    """(a value that is equal for types that are nested alike; the types of the parts) of a nested type. (None, []) for a flat type.

    Types are nested alike if both are lists, both are maps, or both are structs with the same field names.
    """
    if pa.types.is_map(kind):
        return "map", [kind.key_type, kind.item_type]
    if pa.types.is_struct(kind):
        return tuple(field.name for field in kind), [field.type for field in kind]
    if any(test(kind) for test in _LISTS):
        return "list", [kind.value_type]
    return None, []


def with_parts(kind: pa.DataType, parts: Sequence[pa.DataType]) -> pa.DataType:
    """A type nested like `kind`, whose parts have the types `parts` and are nullable."""
    if pa.types.is_map(kind):
        return pa.map_(parts[0], pa.field("value", parts[1]))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, part) for field, part in zip(kind, parts, strict=True)])
    return pa.list_(pa.field("element", parts[0]))


def spark_schema(schema: pa.Schema, origin: str) -> pa.Schema:
    """The same columns with the types that Spark takes (`spark_type`), all nullable, without metadata other than collations.

    A column of Arrow's null type keeps it, because another file may say which type the column has. Raises SchemaError naming `origin` and
    the column if Spark lacks its type, or if two names differ at most in letter case.
    """
    return _schema(schema, functools.partial(_refuse, origin))


def _refuse(origin: str, problem: str) -> pa.DataType:
    raise SchemaError(f"{origin}: {problem}; convert or rename the column, or leave it out")


def lenient_schema(schema: pa.Schema, url: str = "") -> pa.Schema:
    """The schema that `spark_schema` returns, but with an `unreadable_type` for each column for which `spark_schema` would raise an error.

    `url`: the file to name in the reason why a type cannot be read; if empty, the reason names no file.
    """
    return _schema(schema, lambda problem: unreadable_type(f"{problem} ({url})" if url else problem))


def _schema(schema: pa.Schema, instead: Callable[[str], pa.DataType]) -> pa.Schema:
    """The columns that `spark_schema` returns. `instead`: returns the type of a column that cannot be read, or raises an error."""
    fields: dict[str, pa.Field] = {}
    spellings: dict[str, str] = {}
    for field in schema:
        try:
            kind = spark_type(field.type, nothing=pa.null())
        except SchemaError as problem:
            kind = field.type if unreadable(field.type) is not None else instead(f"column {field.name!r}: {problem}")
        first_spelling = spellings.setdefault(field.name.lower(), field.name)
        if first_spelling != field.name or field.name in fields:
            kind = instead(f"columns {first_spelling!r} and {field.name!r} differ at most in letter case")
            fields[first_spelling] = pa.field(first_spelling, kind)
        fields[field.name] = pa.field(field.name, kind, metadata=_collations(field))
    return pa.schema(list(fields.values()))


def widens(narrow: pa.DataType, wide: pa.DataType) -> bool:
    """Whether `wide` can hold every value of `narrow` without loss. `narrow`: a type that `spark_type` returns."""
    if narrow == wide or pa.types.is_null(narrow):
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
    return _each_part(narrow, wide, widens)


def converts(stored: pa.DataType, planned: pa.DataType) -> bool:
    """Whether some values of the type `stored` can be read as `planned`. `cast_column` then tries each value."""
    if widens(stored, planned) or (_is_number(stored) and _is_number(planned)):
        return True
    if {stored, planned} == {pa.string(), pa.binary()}:
        return True
    if is_variant(planned):
        return has_variant_parts(stored)
    return _each_part(stored, planned, converts)


def _each_part(kind: pa.DataType, other_kind: pa.DataType, holds: Callable[[pa.DataType, pa.DataType], bool]) -> bool:
    """Whether two types are nested alike, and `holds` is true for each pair of corresponding parts. False for types that are not nested."""
    if is_variant(kind) or is_variant(other_kind):
        return False
    (shape, parts), (other_shape, other_parts) = split_type(kind), split_type(other_kind)
    return shape is not None and shape == other_shape and all(map(holds, parts, other_parts))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def is_source(decoded: pa.Schema, requested: pa.Schema) -> bool:
    """Whether rows that were decoded from files as `decoded`, and then cast, are the same as rows decoded from these files as `requested`.

    So each decoded type must widen to the requested one. Text widens to no other type, not even the text that stands for a column without
    values: this column may have values in the other type.
    """
    names = {*decoded.names}
    return all(widens(decoded.field(f.name).type, f.type) for f in requested if f.name in names)


@dataclasses.dataclass
class _Column:
    """A column of several files. `origins`: its types, each with the first file that has it. `type`: the first type, or why there is none."""

    name: str
    type: pa.DataType
    origin: str
    metadata: dict[bytes, bytes] | None
    origins: dict[pa.DataType, str] = dataclasses.field(default_factory=dict)

    def unite(self) -> pa.DataType:
        """The type to which all types widen. It is an `unreadable_type` if there is none."""
        united_type = _unite([*self.origins])
        if united_type is not None:
            return united_type
        pairs = itertools.combinations(self.origins.items(), 2)
        (kind, origin), (other_kind, other_origin) = next(
            (pair for pair in pairs if _unite([kind for kind, _ in pair]) is None), [*self.origins.items()][:2]
        )
        return unreadable_type(f"column {self.name!r} is {kind} in {origin} but {other_kind} in {other_origin}")


def merge_schemas(schemas: Iterable[tuple[str, pa.Schema]]) -> pa.Schema:
    """One schema for several files, each given as (name, `spark_schema` of the file). Columns are in the order in which they first appear.

    A column's type is the one to which its types in all files widen. If there is none, it is an `unreadable_type`, whose reason names the
    column, two of its types, and a file with each.
    """
    columns: dict[str, _Column] = {}
    for origin, schema in schemas:
        for field in schema:
            column = _Column(field.name, field.type, origin, _collations(field))
            merged = columns.setdefault(field.name.lower(), column)
            if merged.name != field.name and unreadable(field.type) is None and unreadable(merged.type) is None:
                merged.type = unreadable_type(
                    f"column {merged.name!r} of {merged.origin} is spelled {field.name!r} in {origin}"
                )
            if unreadable(merged.type) is not None or unreadable(field.type) is not None:
                merged.type = field.type if unreadable(merged.type) is None else merged.type
                continue
            merged.origins.setdefault(field.type, origin)
    fields = []
    for column in columns.values():
        kind = column.type if unreadable(column.type) is not None else column.unite()
        kind = kind if unreadable(kind) is not None else spark_type(kind)
        fields.append(pa.field(column.name, kind, metadata=column.metadata))
    return pa.schema(fields)


def _collations(field: pa.Field) -> dict[bytes, bytes] | None:
    """The part of a field's metadata that merged schemas keep: its collations; None for a field without collations."""
    text = (field.metadata or {}).get(_COLLATED)
    return None if text is None else {_COLLATED: text}


def _unite(kinds: Sequence[pa.DataType]) -> pa.DataType | None:
    """The type to which all types widen; None if there is none. It is one of them or, if they are nested alike, a type nested like them, whose parts
    are united in the same way."""
    for kind in kinds:
        if all(widens(other_kind, kind) for other_kind in kinds):
            return kind
    kinds = [kind for kind in kinds if not pa.types.is_null(kind)]
    if any(map(is_variant, kinds)):
        return None
    shapes, parts = zip(*map(split_type, kinds), strict=True)
    if shapes[0] is None or any(shape != shapes[0] for shape in shapes):
        return None
    part_types = [_unite(some) for some in zip(*parts, strict=True)]
    return None if None in part_types else with_parts(kinds[0], part_types)


def check_readable(
    planned: pa.Field, stored: pa.DataType, origin: str, declared: bool = False, misfit: str | None = None
) -> None:
    """Raise SchemaError unless a column of type `stored` in `origin` can be read as `planned`.

    `declared`: the user has declared the type, so a read tries to convert each value (`converts`). `misfit`: the message about a value for
    which this failed.
    """
    check_all_readable(pa.schema([planned.with_type(stored)]))
    value = f" ({misfit})" if misfit is not None else ""
    if declared and (misfit is not None or not converts(stored, planned.type)):
        raise SchemaError(
            f"column {planned.name!r} of {origin} is {show_type(stored)} and cannot be read as {show_type(planned.type)}, its type in lookup.schema or "
            f".schema(…){value}: declare a type that fits its values"
        )
    if not declared and not widens(stored, planned.type):
        raise SchemaError(
            f"column {planned.name!r} was planned as {show_type(planned.type)} but is {show_type(stored)} in {origin}{value}: the table changed; "
            f"{PLAN_AGAIN}"
        )


def show_type(kind: pa.DataType) -> str:
    """The name of a type in errors: Arrow's, except for VARIANT."""
    return "VARIANT" if is_variant(kind) else str(kind)


def resolve_names(names: Sequence[str], schema: pa.Schema, option: str, origin: str | None = None) -> list[str]:
    """The spelling of each of `names` in a schema of Arrow or of Spark, ignoring letter case as Spark does.

    `origin`: what errors say about where the names come from; None: they name `option`.

    Raises SchemaError naming the option and the table's columns for an unknown name, UnreadableColumnError for a column that cannot be
    read.
    """
    origin = origin or f"option {option}"
    spellings = {name.lower(): name for name in schema.names}
    for name in names:
        if name.lower() not in spellings:
            raise SchemaError(f"{origin}: the table has no column {name!r}; it has {names_shown(schema.names, name)}")
    spelled = [spellings[name.lower()] for name in names]
    if isinstance(schema, pa.Schema):
        if option == "lookup.columns":
            check_all_readable(pa.schema([schema.field(name) for name in spelled]))
        for name in spelled:
            if (reason := unreadable(schema.field(name).type)) is not None:
                raise UnreadableColumnError(f"{origin}: {reason}: name another column")
    return spelled


def cast_column(column: pa.Array, kind: pa.DataType, name: str, origin: str) -> pa.Array:
    """`column` as type `kind`. Raises SchemaError naming the column (`name`) and the file (`origin`) if a value would change."""
    if column.type == kind:
        return column
    try:
        if isinstance(column, pa.ExtensionArray):
            column = column.storage
        if pa.types.is_dictionary(column.type):
            column = without_dictionary(column)
        if pa.types.is_run_end_encoded(column.type):
            column = pc.run_end_decode(column)
        if pa.types.is_null(column.type):
            return pa.nulls(len(column), kind)
        if pa.types.is_struct(kind) or pa.types.is_list(kind) or pa.types.is_map(kind):
            return _cast_nested(column, kind, name, origin)
        if pa.types.is_timestamp(column.type) and column.type.tz is None and kind == pa.timestamp("us", tz="UTC"):
            column = column.cast(pa.timestamp("us"))  # INT96: instants in UTC, though the type does not say so
        return cast_exactly(column, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as problem:
        raise_ours(
            SchemaError(
                f"column {name!r} of {origin} does not fit {kind}: {problem}; correct its values, or give the column another type"
            ),
            problem,
        )


def conform_columns(columns: Mapping[str, pa.Array], rows: int, schema: pa.Schema, origin: str) -> pa.RecordBatch:
    """A batch of `rows` rows with the columns of `schema`. A column that is in `columns` (by name) is cast by `cast_column`, any other is null."""
    arrays = [
        cast_column(columns[field.name], field.type, field.name, origin)
        if field.name in columns
        else pa.nulls(rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def cast_exactly(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A flat column as type `kind`. Raises ArrowInvalid if a value would change, ArrowNotImplementedError for types without a conversion."""
    if column.type == kind:
        return column
    if pa.types.is_decimal(kind) and pa.types.is_integer(column.type):
        # Arrow refuses a cast from int64 to a decimal too narrow for some int64; from decimal(20, 0) it refuses only values that do not fit.
        column = column.cast(pa.decimal128(20, 0))
    converted = pc.cast(column, kind)
    source_type = spark_type(column.type)
    # Texts and bytes keep every value; and a text may spell a date or a boolean in several ways.
    is_kept = is_text(kind) or is_binary(kind) or (is_text(source_type) and not _is_number(kind))
    if not (is_kept or widens(source_type, kind) or _are_equal(converted.cast(source_type), column.cast(source_type))):
        raise pa.ArrowInvalid("a value would change")
    return converted


def decimal_of_text(text: str, kind: pa.DataType) -> decimal.Decimal:
    """The decimal that a text states, with the scale of the decimal type `kind`. Raises ValueError if the type cannot hold its exact value."""
    if _NUMBER.fullmatch(text) is None:
        raise ValueError(f"{text[:80]!r} is not a valid {kind}")
    try:
        exact = decimal.Decimal(text)
        if exact.is_zero() or exact.adjusted() < kind.precision - kind.scale:
            number = exact.quantize(decimal.Decimal(1).scaleb(-kind.scale), context=EXACT)
            if number == exact:
                return number
    except decimal.InvalidOperation:  # the exponent is beyond Python's limits
        pass
    raise ValueError(f"{text[:80]!r} is not a valid {kind}")


def without_dictionary(column: pa.DictionaryArray) -> pa.Array:
    """A dictionary column, decoded: a column with its values in place of their codes."""
    values = column.dictionary
    if pa.types.is_string_view(values.type) or pa.types.is_binary_view(values.type):  # Arrow's kernels take no views
        values = values.cast(spark_type(values.type))
        column = pa.DictionaryArray.from_arrays(column.indices, values)
    return column.dictionary_decode()


def _are_equal(column: pa.Array, other_column: pa.Array) -> bool:
    is_equal = pc.equal(column, other_column)
    if pa.types.is_floating(column.type):
        is_equal = pc.or_(is_equal, pc.and_(pc.is_nan(column), pc.is_nan(other_column)))
    return bool(pc.all(is_equal, min_count=0).as_py())


def _cast_nested(column: pa.Array, kind: pa.DataType, name: str, origin: str) -> pa.Array:
    """A nested column with its parts cast to those of `kind`. The other arguments, and the errors, are those of `cast_column`."""
    if pa.types.is_struct(kind):
        # flatten() applies the parent's nulls and offset to the children.
        children = [
            cast_column(child, field.type, f"{name}.{field.name}", origin)
            for child, field in zip(column.flatten(), kind, strict=True)
        ]
        mask = column.is_null() if column.null_count else None
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    column = list_of_entries(column) if pa.types.is_map(column.type) else column
    offsets, inner = flatten_offsets(column), column.flatten()
    if pa.types.is_map(kind):
        keys = cast_column(inner.field(0), kind.key_type, f"{name}.key", origin)
        items = cast_column(inner.field(1), kind.item_type, f"{name}.value", origin)
        return pa.MapArray.from_arrays(offsets, keys, items, type=kind)
    values = cast_column(inner, kind.value_type, f"{name}.element", origin)
    return pa.ListArray.from_arrays(offsets, values, type=kind)


def list_of_entries(column: pa.MapArray) -> pa.ListArray:
    """A map column as a list column of its entries (structs), over the same buffers, because Arrow's kernels take no maps."""
    entries, buffers = column.values, column.buffers()[:2]  # view() miscounts items that are all null
    return pa.ListArray.from_buffers(
        pa.list_(entries.type), len(column), buffers, column.null_count, column.offset, children=[entries]
    )


def flatten_offsets(column: pa.Array) -> pa.Array:
    """The offsets of a list column's rows in the values that its flatten() returns; null for rows that are null.

    The column's own offsets may differ: those of a null row may span values, and those of a list view may be in any order.
    """
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    ends = pc.cumulative_sum(lengths.cast(pa.int64())).cast(pa.int32())
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    if column.null_count == 0:
        return offsets
    validity = pa.concat_arrays([column.is_valid(), pa.array([True])])
    return pc.if_else(validity, offsets, pa.scalar(None, pa.int32()))


def text_of_schema(schema: pa.Schema) -> str:
    """A schema, without its metadata, as a text for JSON."""
    return base64.b64encode(schema.remove_metadata().serialize()).decode()


def schema_of_text(text: str) -> pa.Schema:
    """The schema that `text_of_schema` wrote as `text`. Raises ValueError for any other text."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text, validate=True)))
    except (TypeError, OSError, pa.ArrowException) as problem:
        raise ValueError(f"not a schema: {problem}") from None
