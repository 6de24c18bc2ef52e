"""A `LookupTable` as an Arrow C stream: what other libraries make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ([pa.int64(), pa.large_string(), pa.large_list(pa.int64())], None),
        ([pa.int32(), pa.string(), pa.list_(pa.int64())], ROWS.schema.types),  # which one value does not fit
    ],
    ids=str,
)
def test_a_schema_that_is_asked_for(table: LookupTable, asked: list[Any], given: list[Any] | None) -> None:
    """Types are as they are asked for, where that changes no value; other columns are not an answer."""
    wanted = pa.schema(list(zip(ROWS.schema.names, asked, strict=True)))
    stream = table.__arrow_c_stream__(wanted.__arrow_c_schema__())
    found = pa.RecordBatchReader._import_from_c_capsule(stream).read_all()
    assert [str(kind).replace("element", "item") for kind in found.schema.types] == [
        str(kind).replace("element", "item") for kind in given or asked
    ]
    assert found.to_pylist() == ROWS.to_pylist()
    with pytest.raises(ValueError, match="names"):
        table.__arrow_c_stream__(pa.schema([("id", pa.int64())]).__arrow_c_schema__())
