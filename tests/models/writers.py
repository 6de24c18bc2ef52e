"""Data files as different programs write them: pyarrow, DuckDB, Polars, by night Spark."""

from __future__ import annotations

import datetime
import functools
import importlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

from tests.models.values import shown
from tests.support.fuzzing import BY_NIGHT

_SPARK_CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
}


def _group_rows(table: pa.Table) -> int:
    """Several row groups in every file, and not too many."""
    return max(4, table.num_rows // 6)


def file_bytes(table: pa.Table, form: str, writer: str, scratch: Path) -> bytes:
    """The file that holds a table, as `writer` writes it; as pyarrow does where the writer lacks one of the types.

    Some lists of fixed size that are null make files that pyarrow itself refuses: these are written as plain lists.
    """
    if form == "json":
        return _json(table)
    path = scratch / f"written.{form}"
    path.unlink(missing_ok=True)
    try:
        _WRITERS[form, writer](table, path)
        _check_readable(form, path)
    except Exception:  # each library has errors of its own for types it does not know
        path.unlink(missing_ok=True)
        try:
            _WRITERS[form, "pyarrow"](table, path)
            _check_readable(form, path)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            _WRITERS[form, "pyarrow"](_simple(table), path)
    content = path.read_bytes()
    os.unlink(path)
    return content


def _check_readable(form: str, path: Path) -> None:
    if form == "parquet":
        with pq.ParquetFile(path) as file:
            file.read()


def _simple(table: pa.Table) -> pa.Table:
    """The same rows in the plainest types."""
    fields = [pa.field(field.name, shown(field.type)) for field in table.schema]
    columns = [pa.array(table.column(field.name).to_pylist(), field.type) for field in fields]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _parquet(table: pa.Table, path: Path, int96: bool = False) -> None:
    how: dict[str, Any] = {"compression": "none", "use_dictionary": False, "use_deprecated_int96_timestamps": int96}
    pq.write_table(table, path, row_group_size=_group_rows(table), **how)


def _duckdb_parquet(table: pa.Table, path: Path) -> None:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("rows", table)
        connection.execute(f"COPY rows TO '{path}' (FORMAT parquet, ROW_GROUP_SIZE {_group_rows(table)})")


def _polars(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _arrow(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table, max_chunksize=_group_rows(table))


@functools.lru_cache(maxsize=1)
def _spark() -> Any:
    """One JVM for all histories of a process. It takes seconds to start, so by day pyarrow writes in its place."""
    if not BY_NIGHT:
        raise LookupError("no Spark by day")
    builder = importlib.import_module("pyspark.sql").SparkSession.builder.master("local[1]")
    for name, value in _SPARK_CONF.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


def _spark_parquet(table: pa.Table, path: Path) -> None:
    directory = path.with_suffix(".written")
    times = ("INT96", "TIMESTAMP_MICROS", "TIMESTAMP_MILLIS")[table.num_rows % 3]
    spark = _spark()
    spark.conf.set("spark.sql.parquet.outputTimestampType", times)
    spark.createDataFrame(table).coalesce(1).write.mode("overwrite").parquet(str(directory))
    (part,) = directory.glob("*.parquet")
    part.replace(path)
    shutil.rmtree(directory)


_WRITERS: dict[tuple[str, str], Callable[[pa.Table, Path], object]] = {
    ("parquet", "pyarrow"): _parquet,
    ("parquet", "int96"): lambda table, path: _parquet(table, path, True),  # as Spark writes times
    ("parquet", "duckdb"): _duckdb_parquet,
    ("parquet", "polars"): lambda table, path: _polars(table).write_parquet(path, row_group_size=_group_rows(table)),
    ("parquet", "spark"): _spark_parquet,
    ("arrow", "pyarrow"): _arrow,
    ("arrow", "duckdb"): lambda table, path: pyarrow.feather.write_feather(table, path, compression="lz4"),
    ("arrow", "polars"): lambda table, path: _polars(table).write_ipc(path),
}


def _json(table: pa.Table) -> bytes:
    def text(value: Any) -> str:
        assert isinstance(value, (datetime.date, bytes)), value
        return str(value)

    return "".join(json.dumps(row, default=text) + "\n" for row in table.to_pylist()).encode()
