"""Parquet files that tests put in place."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def put(path: Path, **columns: Any) -> Path:
    """A parquet file in place of what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    pq.write_table(pa.table(columns), new)
    os.replace(new, path)
    return path
