"""Converts columns between SQL text (`id INT, tags ARRAY<STRING>`) and Arrow schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from pyspark_lookup.columnar.types import MOST_NESTED, VARIANT, is_deeper, is_variant
from pyspark_lookup.core.decoding import UNREADABLE, show

if TYPE_CHECKING:
    from sqlglot import exp

_TYPES = {
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "SMALLINT": pa.int16(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "TIMESTAMP_NTZ": pa.timestamp("us"),
    "INTERVAL DAY TO SECOND": pa.duration("us"),
    "VARIANT": VARIANT,
}
_SPELLED = {
    "TEXT": "STRING",
    "VARCHAR": "STRING",
    "CHAR": "STRING",
    "VARBINARY": "BINARY",
    "TIMESTAMPTZ": "TIMESTAMP",
    "TIMESTAMPLTZ": "TIMESTAMP",
    "TIMESTAMPNTZ": "TIMESTAMP_NTZ",
}
_EXPECTED = "columns and their types as in CREATE TABLE, such as 'id INT, name STRING, tags ARRAY<STRING>'"


def parse_columns(text: str) -> pa.Schema:
    """The schema that a text such as `id INT, name STRING` describes. Raises ValueError for other texts, and for a column named twice."""
    # Imported here, because sqlglot takes long to import (see `sql_predicate.parse_where`).
    import sqlglot
    from sqlglot import exp
    from sqlglot.errors import SqlglotError

    try:
        (statement,) = sqlglot.parse(f"CREATE TABLE t ({text}\n)", dialect="spark")
    except (SqlglotError, *UNREADABLE):
        raise ValueError(_EXPECTED) from None
    schema = statement.this if isinstance(statement, exp.Create) else None
    if not isinstance(schema, exp.Schema):
        raise ValueError(_EXPECTED)
    fields: dict[str, pa.Field] = {}
    for column in schema.expressions:
        if not isinstance(column, exp.ColumnDef) or not isinstance(column.kind, exp.DataType):
            raise ValueError(f"{_EXPECTED}; not {show(column.sql(dialect='spark'))}")
        if column.constraints:
            raise ValueError(f"only a name and a type for each column, not {show(column.sql(dialect='spark'))}")
        if column.name.lower() in fields:
            raise ValueError(f"each column once; {show(column.name)} is named twice")
        kind = _to_arrow_type(column.kind)
        if is_deeper(kind, MOST_NESTED):
            raise ValueError(f"types nested {MOST_NESTED} deep at most; that of {show(column.name)} is deeper")
        fields[column.name.lower()] = pa.field(column.name, kind)
    if not fields:
        raise ValueError(_EXPECTED)
    return pa.schema(list(fields.values()))


def _to_arrow_type(kind: exp.DataType) -> pa.DataType:
    from sqlglot import exp

    name = kind.this.name if isinstance(kind.this, exp.DataType.Type) else kind.sql(dialect="spark").upper()
    inner = [part for part in kind.expressions if isinstance(part, exp.DataType)]
    fields = [part for part in kind.expressions if isinstance(part, exp.ColumnDef)]
    if name == "DECIMAL":
        numbers = [int(part.name) for part in kind.expressions]
        precision, scale = (numbers or [10])[0], (*numbers, 0, 0)[1]
        if len(numbers) <= 2 and 1 <= precision <= 38 and 0 <= scale <= precision:
            return pa.decimal128(precision, scale)
    if name in ("ARRAY", "LIST") and len(inner) == 1:
        return pa.list_(pa.field("element", _to_arrow_type(inner[0])))
    if name == "MAP" and len(inner) == 2:
        return pa.map_(_to_arrow_type(inner[0]), pa.field("value", _to_arrow_type(inner[1])))
    if name == "STRUCT" and fields and len(fields) == len(kind.expressions):
        parts = [(part.name, part.kind) for part in fields if isinstance(part.kind, exp.DataType)]
        return pa.struct([pa.field(name, _to_arrow_type(part)) for name, part in parts])
    arrow_type = _TYPES.get(_SPELLED.get(name, name))
    if arrow_type is None:
        raise ValueError(f"Spark types; {show(kind.sql(dialect='spark'))} is not one that can be read")
    return arrow_type


def columns_ddl(schema: pa.Schema) -> str:
    """A schema as a text that `parse_columns` reads, such as `id INT, name STRING`."""
    return ", ".join(f"{_quote(field.name)} {type_ddl(field.type)}" for field in schema)


def type_ddl(kind: pa.DataType) -> str:
    """The name of a type in Spark's SQL, such as `ARRAY<INT>`; for a type that Spark lacks, Arrow's name."""
    if pa.types.is_decimal(kind):
        return f"DECIMAL({kind.precision}, {kind.scale})"
    if pa.types.is_list(kind):
        return f"ARRAY<{type_ddl(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"MAP<{type_ddl(kind.key_type)}, {type_ddl(kind.item_type)}>"
    if pa.types.is_struct(kind) and not is_variant(kind):
        return "STRUCT<" + ", ".join(f"{_quote(field.name)}: {type_ddl(field.type)}" for field in kind) + ">"
    return next((name for name, arrow_type in _TYPES.items() if arrow_type == kind), str(kind).upper())


def _quote(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else "`" + name.replace("`", "``") + "`"
