"""Data files that tests put in place."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv, feather, orc


def write_parquet(path: Path, **columns: Any) -> Path:
    """A parquet file in place of what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    pq.write_table(pa.table(columns), new)
    os.replace(new, path)
    return path


def write_file(path: Path, table: pa.Table, rows: int | None = None) -> None:
    """A file of the format that its name says, with so many rows in each unit of it, if it has units."""
    match path.suffix:
        case ".parquet":
            pq.write_table(table, path, row_group_size=rows)
        case ".arrow":
            feather.write_feather(table, path, chunksize=rows, compression="uncompressed")
        case ".csv":
            csv.write_csv(table, path)
        case ".json":
            path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
        case ".orc":
            orc.write_table(table, path)
