"""Statistics of a version's files, as a record holds them: an Arrow table with a row for each file, which is read only when it is needed."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.core.decoding import as_text
from pyspark_lookup.storage.stores import FileStatistics, FileVersion

_PARTS = ("nulls", "rows", "buckets", "bucket")  # of a column, beside its bounds; numbers


def statistics_to_text(files: Sequence[FileVersion], schema: pa.Schema) -> str | None:
    """The statistics of files, in their order, as a text; None if no file has any. `schema`: the table's columns."""
    statistics = [file.statistics for file in files]
    if all(entry is None for entry in statistics):
        return None
    counts = [None if entry is None else entry.rows for entry in statistics]
    columns: dict[str, pa.Array] = {
        "": pa.array([entry is not None for entry in statistics], pa.bool_()),
        "rows": pa.array(counts, pa.int64()),
    }
    names = dict.fromkeys(name for entry in statistics if entry is not None for name in entry.bounds)
    for name in (name for name in names if schema.get_field_index(name) >= 0):
        bounds = [None if entry is None else entry.bounds.get(name) for entry in statistics]
        kind = schema.field(name).type
        try:
            low, high = (
                pa.array([None if stats is None else getattr(stats, side) for stats in bounds], kind)
                for side in ("low", "high")
            )
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            continue
        columns |= {f"low:{name}": low, f"high:{name}": high}
        numbers = [_numbers(stats) for stats in bounds]
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


def statistics_from_text(text: Any, count: int) -> list[FileStatistics | None]:
    """The statistics of `count` files, as `statistics_to_text` wrote them. Raises TypeError or ValueError for anything else."""
    try:
        table = pa.ipc.open_stream(pa.py_buffer(base64.b64decode(as_text(text), validate=True))).read_all()
        table = table.combine_chunks()
        table.validate(full=True)
    except (OSError, pa.ArrowException) as problem:
        raise ValueError(str(problem)) from None
    if table.num_rows != count:
        raise ValueError(f"statistics of {table.num_rows} files, of {count}")
    has_statistics, rows = table.column("").to_pylist(), table.column("rows").to_pylist()
    return [
        FileStatistics(rows[place], _Bounds(table, place)) if has_statistics[place] else None for place in range(count)
    ]


class _Bounds(Mapping[str, ColumnStats]):
    """The bounds of a file's columns, read from its row of the table when they are asked for."""

    def __init__(self, table: pa.Table, row: int) -> None:
        self._table = table
        self._row = row

    def __getitem__(self, name: str) -> ColumnStats:
        if self._table.schema.get_field_index(f"low:{name}") < 0:
            raise KeyError(name)
        nulls, rows, buckets, bucket = (self._value(part, name) for part in _PARTS)
        if rows is None:
            raise KeyError(name)
        bucket_pair = None if buckets is None else (buckets, bucket)
        return ColumnStats(self._value("low", name), self._value("high", name), nulls, rows, bucket_pair)

    def _value(self, part: str, name: str) -> Any:
        return self._table.column(f"{part}:{name}")[self._row].as_py()

    def __iter__(self) -> Iterator[str]:
        names = (name.removeprefix("low:") for name in self._table.column_names if name.startswith("low:"))
        return (name for name in names if self._value("rows", name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
