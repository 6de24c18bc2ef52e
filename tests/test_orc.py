"""ORC files as Hive and Spark write them: columns without names, types that only Spark has, time zones, times far away."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import orc

from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import SchemaError

MODES: dict[str, dict[str, str]] = {
    "NONE": {},
    "PARTIAL": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "100"},
    "FULL": {"lookup.cache": "FULL"},
}


@pytest.mark.parametrize("mode", MODES)
def test_columns_without_names(tmp_path: Path, cache_dir: Path, mode: str) -> None:
    """Hive's `_col0`, `_col1` are the declared columns by their places, those of the directories left out; beside files with names."""
    home = tmp_path / "t"
    (home / "day=1").mkdir(parents=True)
    (home / "day=2").mkdir()
    orc.write_table(pa.table({"_col0": [1, 2], "_col1": ["a", "b"]}), home / "day=1" / "a.orc")
    orc.write_table(pa.table({"_col0": [3]}), home / "day=1" / "b.orc")
    orc.write_table(pa.table({"name": ["d", "e"], "_col0": [0, 0], "id": [4, 5]}), home / "day=2" / "c.orc")
    schema = "id BIGINT, day INT, name STRING, more DOUBLE"
    options = {"lookup.cache.dir": str(cache_dir), "lookup.schema": schema, "lookup.keys": "id", **MODES[mode]}
    table = LookupTable(str(home), options)
    rows = {1: ("a", 1), 2: ("b", 1), 3: (None, 1), 4: ("d", 2), 5: ("e", 2)}
    expected = [{"id": id_, "day": day, "name": name, "more": None} for id_, (name, day) in rows.items()]
    assert sorted(table.scan().to_pylist(), key=lambda row: row["id"]) == expected
    for row in expected:
        assert table.get(row["id"]) == [row]
    assert table.get(6) == []
    where = LookupTable(str(home), {**options, "lookup.where": "name = 'b'", "lookup.columns": "id, name"})
    assert where.scan().to_pylist() == [{"id": 2, "name": "b"}]
    # Another version, of which the answers were carried over where no changed file may have the key.
    orc.write_table(pa.table({"_col0": [2, 6], "_col1": ["B", "f"]}), home / "day=2" / "d.orc")
    table = LookupTable(str(home), options)
    assert sorted(row["name"] for row in table.get(2)) == ["B", "b"]
    assert [row["name"] for row in table.get(6)] == ["f"]


def test_columns_without_names_that_are_not_declared(tmp_path: Path, cache_dir: Path) -> None:
    """More of them than are declared cannot be told; without a declaration they are called as in the file."""
    path = tmp_path / "a.orc"
    orc.write_table(pa.table({"_col0": [1], "_col1": ["a"]}), path)
    options = {"lookup.cache.dir": str(cache_dir)}
    assert LookupTable(str(path), options).scan().to_pylist() == [{"_col0": 1, "_col1": "a"}]
    table = LookupTable(str(path), {**options, "lookup.schema": "id BIGINT"})
    with pytest.raises(
        SchemaError, match=r"a.orc has 2 columns without names, but lookup.schema has 1: id: declare all"
    ):
        table.scan()
    table = LookupTable(str(path), {**options, "lookup.schema": "_col1 BIGINT, _col0 STRING"})
    assert table.scan().to_pylist() == [{"_col1": 1, "_col0": "a"}]
