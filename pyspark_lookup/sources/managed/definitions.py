"""Definitions of managed tables: columns, keys, and rows that fit them."""

from __future__ import annotations

import pyarrow as pa

from pyspark_lookup.columnar.ddl import type_ddl
from pyspark_lookup.columnar.keys import check_key_types
from pyspark_lookup.columnar.types import conform_columns, spark_schema, spark_type, widens
from pyspark_lookup.core.credentials import names_shown
from pyspark_lookup.errors import OptionError, SchemaError
from pyspark_lookup.options.enums import MissingColumns
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.managed.log import Definition, TableState
from pyspark_lookup.sources.managed.options import WriteOptions
from pyspark_lookup.versions.model import PATH, ROW


def define(schema: pa.Schema, keys: tuple[str, ...], origin: str) -> Definition:
    """A new table's definition, from the columns of the first rows. Raises SchemaError for types or keys that a table cannot have."""
    spark_columns = spark_schema(schema, origin)
    columns = pa.schema([pa.field(field.name, spark_type(field.type)) for field in spark_columns])
    if not columns.names:
        raise SchemaError(f"{origin}: a table needs a column")
    if len({key.lower() for key in keys}) < len(keys):
        raise SchemaError(f"option lookup.keys = {','.join(keys)!r}: a column is named twice")
    spelled_names = {name.lower(): name for name in columns.names}
    for key in keys:
        if key.lower() not in spelled_names:
            raise SchemaError(
                f"option lookup.keys: the rows have no column {key!r}; they have {names_shown(columns.names, key)}"
            )
    _check_names(columns)
    names = tuple(spelled_names[key.lower()] for key in keys)
    check_key_types([columns.field(name) for name in names])
    return Definition(columns, names)


def match_definition(definition: Definition, schema: pa.Schema, merge: bool, origin: str) -> Definition:
    """The table's definition once rows of `schema` are in it: the same, or with more columns at the end.

    Rows may lack columns, which are then null, and may have narrower types. Raises SchemaError for a column of another type, and for one
    that the table does not have, unless `merge` is set.
    """
    rows = spark_schema(schema, origin)
    table_fields = {field.name.lower(): field for field in definition.schema}
    new_fields = []
    for field in rows:
        table_field = table_fields.get(field.name.lower())
        if table_field is None:
            if not merge:
                raise SchemaError(
                    f"{origin}: the table has no column {field.name!r}; set lookup.write.merge-schema = true to add it; the table has "
                    f"{names_shown(definition.schema.names, field.name)}"
                )
            new_fields.append(pa.field(field.name, spark_type(field.type)))
        elif not widens(field.type, table_field.type):
            raise SchemaError(
                f"{origin}: column {table_field.name!r} is {type_ddl(table_field.type)} in the table and {type_ddl(field.type)} in the rows: cast "
                "them. If ALTER TABLE … ALTER COLUMN … TYPE has changed it in the catalog, DROP TABLE there (its files stay) and CREATE "
                "TABLE it anew"
            )
    if not new_fields:
        return definition
    _check_names(pa.schema(new_fields))
    return Definition(pa.schema([*definition.schema, *new_fields]), definition.keys, definition.properties)


def find_kept_columns(
    definition: Definition, schema: pa.Schema, options: LookupOptions, origin: str
) -> tuple[str, ...]:
    """The columns that rows of `schema` lack, if `lookup.write.missing-columns` says that existing rows keep their values in them.

    Raises SchemaError for a missing key column, and for any other if the option is not set.
    """
    row_names = {name.lower() for name in schema.names}
    lacking = tuple(name for name in definition.schema.names if name.lower() not in row_names)
    keys = [name for name in lacking if name in definition.keys]
    if keys:
        raise SchemaError(f"{origin}: the rows of an upsert have no key column {keys[0]!r}")
    if lacking and options.kind(WriteOptions).missing_columns is None:
        raise SchemaError(
            f"{origin}: the rows of an upsert have no column {lacking[0]!r}: give it, or set lookup.write.missing-columns "
            "to KEEP (an existing row keeps its value) or NULL (the existing value is lost)"
        )
    return lacking if options.kind(WriteOptions).missing_columns is MissingColumns.KEEP else ()


def _check_names(columns: pa.Schema) -> None:
    for name in columns.names:
        if name.lower() in (PATH, ROW):
            raise SchemaError(f"column {name!r}: delete files use that name; rename it")


def conform(batch: pa.RecordBatch, schema: pa.Schema, origin: str) -> pa.RecordBatch:
    """Rows in the table's columns and types. Raises SchemaError for a value that does not fit."""
    row_columns = {name.lower(): column for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    table_columns = {name: row_columns[name.lower()] for name in schema.names if name.lower() in row_columns}
    return conform_columns(table_columns, batch.num_rows, schema, origin)


def extend_definition(
    state: TableState, schema: pa.Schema, options: LookupOptions, by_key: bool, origin: str
) -> Definition:
    """The table's definition once rows of `schema` are written, `by_key` or not. Raises SchemaError or OptionError."""
    keys = options.files.keys
    definition = state.definition
    if keys is not None and [k.lower() for k in keys] != [k.lower() for k in definition.keys]:
        raise OptionError(
            f"option lookup.keys = {','.join(keys)!r}: {origin} was created with the keys {','.join(definition.keys) or 'none'!r}; "
            "leave the option out"
        )
    row_names = {name.lower() for name in schema.names}
    lacking = [key for key in definition.keys if key.lower() not in row_names]
    if lacking:
        raise SchemaError(f"{origin}: the rows have no key column {lacking[0]!r}: lookups could not find them; add it")
    if (options.kind(WriteOptions).unique_keys or by_key) and not definition.keys:
        operation = "an upsert or delete" if by_key else "option lookup.write.unique-keys"
        raise OptionError(f"{operation}: {origin} has no key columns (lookup.keys)")
    try:
        return match_definition(definition, schema, options.kind(WriteOptions).merge_schema, origin)
    except SchemaError as problem:
        if state.since or any(write.committed for write in state.writes.values()):
            raise
        raise SchemaError(
            f"{problem}. (Nothing has been committed to this table yet: its columns are those of its creation or of a first write "
            "that failed. To declare other columns, remove its directory)"
        ) from None
