"""A `LookupTable` as an Arrow C stream: what other libraries make of it."""

from __future__ import annotations

from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable

ROWS = pa.table({"id": [1, 2**40], "name": ["a", None], "parts": [[1], [2, 3]]})


@pytest.fixture
def table(tmp_path: Path) -> LookupTable:
    made = LookupTable(str(tmp_path / "t"), {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "cache")})
    made.write(ROWS)
    return made


def test_what_takes_a_stream(table: LookupTable, tmp_path: Path) -> None:
    """It has the rows of now, each time; so has another table that is written from it."""
    for _ in range(2):
        expected = table.scan()
        assert pa.table(table) == expected
        assert pl.DataFrame(table).to_dicts() == expected.to_pylist()
        assert pl.from_arrow(table).to_list() == expected.to_pylist()
        with duckdb.connect() as connection:
            connection.register("dim", table)
            found = connection.execute("SELECT * FROM dim WHERE id > 0").fetchall()
        assert found == [tuple(row.values()) for row in expected.to_pylist()]
        table.write(ROWS.slice(0, 1))
    other = LookupTable(str(tmp_path / "other"), {"lookup.cache.dir": str(tmp_path / "cache")})
    other.write(table)
    assert other.scan() == table.scan()
    changes = LookupTable(table.given["path"], {"lookup.changes-from": 1, "lookup.cache.dir": str(tmp_path / "cache")})
    assert pl.DataFrame(changes).height == 4
