"""Delta and Iceberg tables that other projects wrote: archives beside the checkout, not in it."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from tests.support.lake_tables import Rows, rows_of

ARCHIVES = Path(os.environ.get("LOOKUPCACHE_TABLES") or Path(__file__).parents[3] / "shared" / "tables")
"""`delta.tgz` and `iceberg.tgz`: test data of delta-io/delta-rs, delta-io/delta and duckdb/duckdb-iceberg."""


def unpack(archive: str, home: Path) -> Path:
    """`home`, with what the archive holds in it. Skips the test if the archive is not there."""
    path = ARCHIVES / archive
    if not path.is_file():
        pytest.skip(f"{path} is not there: LOOKUPCACHE_TABLES names the directory of the tables that others wrote")
    with tarfile.open(path) as tar:
        tar.extractall(home, filter="data")
    return home


def check_rows(opened: Callable[[str, str | None], LookupTable], mode: str, expected: Rows) -> None:
    """A table has these rows: by a scan without a cache, and in a mode by a scan and by the values of its first flat column as keys.

    `opened`: the table in a mode, with a key or without one.
    """
    rows = opened("none", None).scan()
    assert rows_of(rows) == expected
    types = pa.types
    flat = [f.name for f in rows.schema if not types.is_nested(f.type) and not types.is_floating(f.type)]
    if not flat or not rows.num_rows:
        return
    key = flat[0]
    keys = pa.table({key: rows.column(key).unique().drop_null()})
    table = opened(mode, key)
    answer = table.get_many(keys)
    assert rows_of(answer.drop_columns(["key_index"])) == rows_of(rows.filter(rows.column(key).is_valid())), key
    assert {*answer.column("key_index").to_pylist()} == {*range(keys.num_rows)}
    if mode != "partial":
        assert rows_of(table.scan()) == expected
