"""Data files as different programs write them: pyarrow, DuckDB and Polars."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq


def _group_rows(table: pa.Table) -> int:
    """Several row groups in every file, and not too many."""
    return max(4, table.num_rows // 6)


def file_bytes(table: pa.Table, form: str, writer: str, scratch: Path) -> bytes:
    """The file that holds a table, as `writer` writes it; as pyarrow does where the writer lacks one of the types."""
    path = scratch / f"written.{form}"
    path.unlink(missing_ok=True)
    try:
        _WRITERS[form, writer](table, path)
    except Exception:  # each library has errors of its own for types it does not know
        path.unlink(missing_ok=True)
        _WRITERS[form, "pyarrow"](table, path)
    content = path.read_bytes()
    os.unlink(path)
    return content


def _parquet(table: pa.Table, path: Path, int96: bool = False) -> None:
    how: dict[str, Any] = {"compression": "none", "use_dictionary": False, "use_deprecated_int96_timestamps": int96}
    pq.write_table(table, path, row_group_size=_group_rows(table), **how)


def _duckdb_parquet(table: pa.Table, path: Path) -> None:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("rows", table)
        connection.execute(f"COPY rows TO '{path}' (FORMAT parquet, ROW_GROUP_SIZE {_group_rows(table)})")


def _arrow(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table, max_chunksize=_group_rows(table))


_WRITERS: dict[tuple[str, str], Callable[[pa.Table, Path], object]] = {
    ("parquet", "pyarrow"): _parquet,
    ("parquet", "int96"): lambda table, path: _parquet(table, path, True),  # as Spark writes times
    ("parquet", "duckdb"): _duckdb_parquet,
    ("parquet", "polars"): lambda table, path: pl.DataFrame(table).write_parquet(
        path, row_group_size=_group_rows(table)
    ),
    ("arrow", "pyarrow"): _arrow,
    ("arrow", "duckdb"): lambda table, path: pyarrow.feather.write_feather(table, path, compression="lz4"),
    ("arrow", "polars"): lambda table, path: pl.DataFrame(table).write_ipc(path),
}
