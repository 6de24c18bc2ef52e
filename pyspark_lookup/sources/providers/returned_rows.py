"""Checks the rows that a provider's functions return, against its schema and the requested keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from pyspark_lookup.columnar.hash_index import match_rows, take_matches
from pyspark_lookup.columnar.keys import Keys, one_array
from pyspark_lookup.columnar.types import cast_column, spark_type, widens
from pyspark_lookup.core.credentials import names_shown
from pyspark_lookup.errors import LookupFunctionError, SchemaError, raise_ours


class ReturnedRows:
    """Checks rows of the provider `name`, whose columns are `schema`. Raises LookupFunctionError that names the provider and a key."""

    def __init__(self, name: str, schema: pa.Schema) -> None:
        self._name = name
        self._schema = schema

    def with_columns(self, rows: Any, keys: pa.Table, columns: pa.Schema) -> pa.Table:
        """The checked result of a function: a table with the key columns, `columns`, and no columns that the schema lacks."""
        if isinstance(rows, pa.RecordBatch):
            rows = pa.Table.from_batches([rows])
        if not isinstance(rows, pa.Table):
            raise LookupFunctionError(
                f"provider {self._name} returned {type(rows).__name__} for {show_keys(keys)}: return a pyarrow.Table"
            )
        self._check_columns(rows, self._fields(keys, columns), f"lookup of {show_keys(keys)}")
        return rows

    def by_key(self, rows: pa.Table, keys: pa.Table, columns: pa.Schema) -> pa.Table:
        """The rows of `with_columns`, each with one of the requested keys, with `columns` and `KEY_INDEX`."""
        rows = self._cast(rows, self._fields(keys, columns), f"lookup of {show_keys(keys)}")
        matches = match_rows(rows, keys.column_names, Keys([one_array(column) for column in keys.columns]))
        if len(matches.rows) < rows.num_rows:
            unrequested_row = np.setdiff1d(np.arange(rows.num_rows), matches.rows)[0]
            key = rows.select(keys.column_names).slice(int(unrequested_row), 1)
            raise LookupFunctionError(
                f"provider {self._name} returned a row with {show_keys(key)}, which is not among {show_keys(keys)}"
            )
        return take_matches(rows, matches, columns)

    def conform(self, rows: pa.Table, columns: pa.Schema, operation: str) -> pa.Table:
        """The rows with exactly these columns. They may have other columns of the schema, which are dropped."""
        self._check_columns(rows, columns, operation)
        return self._cast(rows, columns, operation)

    def _fields(self, keys: pa.Table, columns: pa.Schema) -> pa.Schema:
        fields = [self._schema.field(name) for name in keys.column_names]
        return pa.schema([*fields, *(field for field in columns if field.name not in keys.column_names)])

    def _check_columns(self, rows: pa.Table, columns: pa.Schema, operation: str) -> None:
        missing = [name for name in columns.names if name not in rows.column_names]
        unknown = [name for name in rows.column_names if name not in self._schema.names]
        repeated = [name for name in rows.column_names if rows.column_names.count(name) > 1]
        if missing or unknown or repeated:
            says = "is missing" if missing else "is not in its schema" if unknown else "is there twice"
            column_problem = f"column {(missing or unknown or repeated)[0]!r} {says}"
            raise LookupFunctionError(
                f"provider {self._name}, {operation}: {column_problem}; it returned {names_shown(rows.column_names)}, its schema has {names_shown(self._schema.names)}"
            )
        for field in columns:
            column = rows.column(field.name)
            column_text = f"provider {self._name}, {operation}: column {field.name!r}"
            try:
                fits = widens(spark_type(column.type), field.type) or column.null_count == len(column)
            except SchemaError as problem:
                raise_ours(LookupFunctionError(f"{column_text}: {problem}"), problem)
            if not fits:
                raise LookupFunctionError(f"{column_text} is {column.type}, its schema says {field.type}")

    def _cast(self, rows: pa.Table, columns: pa.Schema, operation: str) -> pa.Table:
        arrays = []
        for field in columns:
            try:
                column = rows.column(field.name).combine_chunks()
                arrays.append(cast_column(column, field.type, field.name, f"provider {self._name}"))
                arrays[-1].validate(full=True)  # Arrow accepts any bytes as text
            except SchemaError as problem:
                raise_ours(
                    LookupFunctionError(f"provider {self._name}, {operation}: column {field.name!r}: {problem}"),
                    problem,
                )
            except pa.ArrowInvalid as problem:
                says = "holds text that is not UTF-8: decode it, or declare the column as binary"
                says = says if "UTF8" in str(problem) else f"is not a valid {field.type}: {problem}"
                raise_ours(
                    LookupFunctionError(f"provider {self._name}, {operation}: column {field.name!r} {says}"), problem
                )
        return pa.Table.from_arrays(arrays, schema=columns)


def show_keys(keys: pa.Table) -> str:
    """Keys for a message: the first, and how many more there are."""
    first = ", ".join(f"{name} = {value!r}" for name, value in keys.slice(0, 1).to_pylist()[0].items())
    return f"key {first}" + (f" and {keys.num_rows - 1} more" if keys.num_rows > 1 else "")
