"""Hive-style partition directories: their values and types, and the selection by `lookup.partition`."""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from pyspark_lookup.columnar.types import decimal_of_text
from pyspark_lookup.errors import NotATableError, OptionError, SchemaError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.storage.stores import FileVersion, PartitionValues
from pyspark_lookup.versions.model import Table, TableVersion

_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


_INTEGER = re.compile(r"[+-]?\d{1,38}")


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "inf", "-inf")  # in Spark's spelling, and in Rust's


def partition_values(root: str, url: str) -> PartitionValues:
    """(column, raw value) of the `k=v` directories between the root and a file."""
    parts = url[len(root) :].strip("/").split("/")[:-1]
    pairs = (part.partition("=") for part in parts if "=" in part)
    return tuple((_unescape(k), None if v == _NULL_PARTITION else _unescape(v)) for k, _, v in pairs if k)


def _unescape(text: str) -> str:
    """The decoded text of a directory's name. If it is not UTF-8, each byte becomes one character, as in Spark, so that names stay distinct."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        return unquote(text, encoding="latin-1")


def raw_partition_values(table: Table, file: FileVersion) -> PartitionValues:
    """(column, raw value) of each partition column of a file, from the table's metadata if it has them, else from the directories."""
    return partition_values(table.root, file.url) if file.partition is None else file.partition


def partition_fields(table: Table, files: Sequence[FileVersion]) -> pa.Schema:
    """The partition columns of a version and their types, inferred from all values as in Spark.

    Integers become int32, int64 or a decimal, ISO dates date32, other numbers float64, the rest string (also times, and a mixture that
    float64 would round). Raises NotATableError naming two files whose directories have different columns.
    """
    columns: dict[str, list[str | None]] = {}
    first: tuple[str, ...] | None = None
    for file in files:
        pairs = raw_partition_values(table, file)
        names = tuple(name for name, _ in pairs)
        if len({name.lower() for name in names}) < len(names):
            raise NotATableError(
                f"{redact('path', file.url)} lies in two directories of one partition column: {list(names)}"
            )
        if first is None:
            first = names
        if names != first:
            raise NotATableError(
                f"{file.url} has partition columns {list(names)} but {files[0].url} has {list(first)}: "
                "give the directory or glob of one table"
            )
        for name, value in pairs:
            columns.setdefault(name, []).append(value)
    declared_fields = {field.name.lower(): field for field in table.declared or ()}
    fields = []
    for name, values in columns.items():
        field = declared_fields.get(name.lower())
        if field is not None and field.name != name:
            raise SchemaError(
                f"column {field.name!r} of lookup.schema is spelled {name!r} in the directories: spell it the same way"
            )
        fields.append(pa.field(name, _partition_type(values) if field is None else field.type))
    return pa.schema(fields)


def _partition_type(values: list[str | None]) -> pa.DataType:
    distinct_values = {value for value in values if value is not None}
    integers = [int(value) for value in distinct_values if _INTEGER.fullmatch(value)]
    bits = max(((n if n >= 0 else ~n).bit_length() + 1 for n in integers), default=0)
    if distinct_values and len(integers) == len(distinct_values):
        digits = max(len(str(abs(n))) for n in integers)
        return pa.int32() if bits <= 32 else pa.int64() if bits <= 64 else pa.decimal128(digits, 0)
    if distinct_values and all(_is_date(value) for value in distinct_values):
        return pa.date32()
    numbers = all(_NUMBER.fullmatch(value) for value in distinct_values)
    return pa.float64() if distinct_values and numbers and bits <= 32 else pa.string()


def _is_date(value: str) -> bool:
    try:
        return re.fullmatch(r"\d{4}-\d\d-\d\d", value) is not None and bool(datetime.date.fromisoformat(value))
    except ValueError:
        return False


def partition_value(value: str | None, kind: pa.DataType) -> object:
    """A raw partition value as a Python value of its column's type. Raises ValueError if it is not of that type."""
    if value is None:
        return None
    if pa.types.is_decimal(kind) and kind.scale:
        return decimal_of_text(value, kind)
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        # Python reads more spellings (1_000) than inference takes for numbers; the same holds for the other types.
        number = int(value) if _INTEGER.fullmatch(value) else None
        highest = 10**kind.precision - 1 if pa.types.is_decimal(kind) else (1 << (kind.bit_width - 1)) - 1
        lowest = -highest if pa.types.is_decimal(kind) else -highest - 1
        if number is None or not lowest <= number <= highest:
            raise ValueError(value)
        return decimal.Decimal(number) if pa.types.is_decimal(kind) else number
    if pa.types.is_date(kind):
        if not _is_date(value):
            raise ValueError(value)
        return datetime.date.fromisoformat(value)
    if pa.types.is_floating(kind):
        if not _NUMBER.fullmatch(value) and value not in _NO_NUMBERS:
            raise ValueError(value)
        return pa.scalar(float(value), kind).as_py()  # in the form that rows have
    if not pa.types.is_string(kind):  # the type that the user has declared
        try:
            return pa.array([value]).cast(kind)[0].as_py()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise ValueError(value) from None
    return value


def select_partitions(table: Table, version: TableVersion, options: LookupOptions) -> tuple[FileVersion, ...]:
    """The files of a version that `lookup.partition` selects: those of the latest partition, or those with the given values.

    `max_pt()` is the largest value of the first partition column, then the largest of the second with that value, and so on; a null value
    is the smallest. Raises OptionError for a table or column without partitions.
    """
    files = version.files
    if options.files.partition is None:
        return files
    fields = partition_fields(table, files) if version.metadata is None else version.metadata.columns[1]
    if not fields.names:
        raise OptionError(f"option lookup.partition = {options.files.partition!r}: {table.url} has no k=v directories")
    typed_values = {file: typed_partition_values(table, file, fields) for file in files}
    if options.files.partition.replace(" ", "").lower() == "max_pt()":
        selected_files = list(files)
        for name in fields.names:
            ordered_values = [
                _order_key(value) for file in selected_files if (value := typed_values[file][name]) is not None
            ]
            latest = max(ordered_values) if ordered_values else None
            selected_files = [file for file in selected_files if _order_key(typed_values[file][name]) == latest]
        return tuple(selected_files)
    selected_values: dict[str, object] = {}
    name_by_lowercase = {name.lower(): name for name in fields.names}
    for pair in options.files.partition.split(","):
        column, separator, value = (part.strip() for part in pair.partition("="))
        name = name_by_lowercase.get(column.lower(), "")
        if not separator or not name:
            raise OptionError(
                f"option lookup.partition = {options.files.partition!r}: expected max_pt() or k=v,… over {', '.join(fields.names)}"
            )
        try:
            raw = None if value == _NULL_PARTITION else _unescape(value)
            selected_values[name] = partition_value(raw, fields.field(name).type)
        except ValueError:
            raise OptionError(
                f"option lookup.partition = {options.files.partition!r}: {value!r} is not a valid {fields.field(name).type} for column {name}"
            ) from None
    return tuple(
        file
        for file in files
        if all(_order_key(typed_values[file][name]) == _order_key(value) for name, value in selected_values.items())
    )


def typed_partition_values(table: Table, file: FileVersion, fields: pa.Schema) -> dict[str, object]:
    """Column -> value of a file's partition columns. Raises SchemaError if one is missing, or a value is not of its column's type."""
    values = dict(raw_partition_values(table, file))
    typed_values: dict[str, object] = {}
    for field in fields:
        if field.name not in values:
            raise SchemaError(
                f"{file.url} lies in no {field.name}=… directory, as the table's files did when the query was planned: "
                "the table changed; plan again (a new load() or SQL statement; a catalog table must be created again)"
            )
        try:
            typed_values[field.name] = partition_value(values[field.name], field.type)
        except ValueError:
            if table.declared is not None:
                raise SchemaError(
                    f"{redact('path', file.url)}: the value {values[field.name]!r} of partition column {field.name!r} is not a valid {field.type}, its "
                    "type in lookup.schema or .schema(…): declare a type that the values of all its directories have (STRING always "
                    "does), or move this directory out of the table"
                ) from None
            raise SchemaError(
                f"partition column {field.name!r} was planned as {field.type}, which {values[field.name]!r} of {file.url} is "
                "not: the table changed; plan again (a new load() or SQL statement; a catalog table must be created again)"
            ) from None
    return typed_values


def _order_key(value: Any) -> Any:
    """A key by which values sort and compare as in Spark: NaN equals NaN, and is above all numbers."""
    return None if value is None else (value != value, 0 if value != value else value)  # noqa: PLR0124
