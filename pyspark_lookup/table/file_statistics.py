"""Statistics of a version's files as a record can hold them: a table in Arrow's format, of which a file takes a row when it is asked for it."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.base.decoding import text_of
from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.io.stores import FileStatistics, FileVersion

_PARTS = ("nulls", "rows", "buckets", "bucket")  # of a column, beside its bounds; numbers


def statistics_to_text(files: Sequence[FileVersion], schema: pa.Schema) -> str | None:
    """The statistics of files in their order; None if there are none. `schema`: the table's columns."""
    every = [file.statistics for file in files]
    if not any(one is not None for one in every):
        return None
    counts = [None if one is None else one.rows for one in every]
    columns: dict[str, pa.Array] = {
        "": pa.array([one is not None for one in every], pa.bool_()),
        "rows": pa.array(counts, pa.int64()),
    }
    names = dict.fromkeys(name for one in every if one is not None for name in one.bounds)
    for name in (name for name in names if schema.get_field_index(name) >= 0):
        bounds = [None if one is None else one.bounds.get(name) for one in every]
        kind = schema.field(name).type
        try:
            low, high = (
                pa.array([None if one is None else getattr(one, side) for one in bounds], kind)
                for side in ("low", "high")
            )
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            continue
        columns |= {f"low:{name}": low, f"high:{name}": high}
        numbers = [_numbers(one) for one in bounds]
        for place, part in enumerate(_PARTS):
            columns[f"{part}:{name}"] = pa.array([row[place] for row in numbers], pa.int64())
    table = pa.Table.from_arrays(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return base64.b64encode(sink.getvalue()).decode()


def _numbers(stats: ColumnStats | None) -> tuple[int | None, ...]:
    if stats is None:
        return (None,) * len(_PARTS)
    return stats.null_count, stats.rows, *(stats.bucket or (None, None))


def statistics_of_text(found: Any, count: int) -> list[FileStatistics | None]:
    """What `statistics_to_text` wrote, of so many files. Raises TypeError or ValueError for anything else."""
    try:
        table = pa.ipc.open_stream(pa.py_buffer(base64.b64decode(text_of(found), validate=True))).read_all()
        table = table.combine_chunks()
        table.validate(full=True)
    except (OSError, pa.ArrowException) as problem:
        raise ValueError(str(problem)) from None
    if table.num_rows != count:
        raise ValueError(f"statistics of {table.num_rows} files, of {count}")
    known, rows = table.column("").to_pylist(), table.column("rows").to_pylist()
    return [FileStatistics(rows[place], _Bounds(table, place)) if known[place] else None for place in range(count)]


class _Bounds(Mapping[str, ColumnStats]):
    """The bounds of a file's columns: a row of a table."""

    def __init__(self, table: pa.Table, row: int) -> None:
        self._table = table
        self._row = row

    def __getitem__(self, name: str) -> ColumnStats:
        if self._table.schema.get_field_index(f"low:{name}") < 0:
            raise KeyError(name)
        nulls, rows, buckets, bucket = (self._value(part, name) for part in _PARTS)
        if rows is None:
            raise KeyError(name)
        own = None if buckets is None else (buckets, bucket)
        return ColumnStats(self._value("low", name), self._value("high", name), nulls, rows, own)

    def _value(self, part: str, name: str) -> Any:
        return self._table.column(f"{part}:{name}")[self._row].as_py()

    def __iter__(self) -> Iterator[str]:
        names = (name.removeprefix("low:") for name in self._table.column_names if name.startswith("low:"))
        return (name for name in names if self._value("rows", name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
