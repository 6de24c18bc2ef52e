"""What every reader of plain files must answer, row by row by the documented rules. Nothing of the package is used here."""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.models.answers import Content, Row, is_date, is_number, is_whole, partition_value
from tests.models.values import ImpossibleError, converted, finished, shown, united

DataFile = tuple[Path, tuple[tuple[str, str | None], ...]]
"""A file, and the values that its directories say."""


def content_of(data_files: Iterable[DataFile], busy: bool) -> Content:
    """What these files hold. `busy`: whether a job writes among them."""
    try:
        return _content(list(data_files), busy)
    except ImpossibleError as problem:
        return Content(problem=str(problem), busy=busy)


def _content(data_files: list[DataFile], busy: bool) -> Content:
    if not data_files:
        raise ImpossibleError("no files")
    if len({tuple(name for name, _ in values) for _, values in data_files}) > 1:
        raise ImpossibleError("files in different partition columns")
    files = [_read(path) for path, _ in data_files]
    types: dict[str, pa.DataType] = {}
    conflicts: dict[str, str] = {}
    for schema, _, _ in files:
        for field in schema:
            kind = shown(field.type)
            try:
                types[field.name] = united(types[field.name], kind) if field.name in types else kind
            except ImpossibleError as problem:
                conflicts[field.name] = str(problem)
    types |= dict.fromkeys(conflicts, pa.null())
    data = pa.schema([(name, finished(kind)) for name, kind in types.items()])
    told = [dict(values) for _, values in data_files]
    partitions = pa.schema([(name, _partition_type({values[name] for values in told} - {None})) for name in told[0]])
    content: list[tuple[Row, tuple[Row, ...]]] = []
    for (_, values), (_, rows, instants) in zip(data_files, files, strict=True):
        own = {name: partition_value(value, partitions.field(name).type) for name, value in values}
        own_rows: list[Row] = []
        columns = [(field.name, field.type, field.name in instants) for field in data if field.name not in conflicts]
        for row in rows:
            of_row = {name: converted(row.get(name), kind, utc) for name, kind, utc in columns}
            own_rows.append({**dict.fromkeys(conflicts), **of_row, **own})
        content.append((own, tuple(own_rows)))
    return Content(data, partitions, tuple(content), conflicts, busy=busy, ordered=True)


@functools.lru_cache(maxsize=256)
def _read_version(path: Path, identity: tuple[int, ...]) -> tuple[pa.Schema, list[Row], set[str]]:
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            leaves = [file.metadata.schema.column(number) for number in range(file.metadata.num_columns)]
            instants = {leaf.path.split(".")[0] for leaf in leaves if leaf.physical_type == "INT96"}
            table = file.read()
    else:
        with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as reader:
            table, instants = reader.read_all(), set()
    instant = pa.timestamp("us", "UTC")
    fields = [f.with_type(instant) if f.name in instants and pa.types.is_timestamp(f.type) else f for f in table.schema]
    columns = [column.to_pylist() for column in table.columns]
    rows = [dict(zip(table.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]
    return pa.schema(fields), rows, instants


def _read(path: Path) -> tuple[pa.Schema, list[Row], set[str]]:
    """(its columns, its rows, columns whose times are instants without saying so)."""
    status = path.stat()
    return _read_version(path, (status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size))


def _partition_type(values: set[Any]) -> pa.DataType:
    """Whole numbers are int, bigint or a decimal, ISO dates dates, other numbers doubles, and all else is text."""
    if not values:
        return pa.string()
    whole = [int(value) for value in values if is_whole(value)]
    small = all(-(2**31) <= number < 2**31 for number in whole)
    if len(whole) == len(values):
        if small:
            return pa.int32()
        if all(-(2**63) <= number < 2**63 for number in whole):
            return pa.int64()
        return pa.decimal128(max(len(str(abs(number))) for number in whole), 0)
    if all(is_date(value) for value in values):
        return pa.date32()
    return pa.float64() if small and all(is_number(value) for value in values) else pa.string()
