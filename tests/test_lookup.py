"""Lookups by key, in FULL as in NONE: what is asked for how, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import OptionError, SchemaError
from tests.fakes import wait_until_settled

_serial = itertools.count()


def both(
    directory: Path, tables: list[pa.Table], keys: str, more: Mapping[str, str] = MappingProxyType({})
) -> tuple[LookupTable, LookupTable]:
    """The same files under NONE and under FULL."""
    path = directory / f"t{next(_serial)}"
    path.mkdir()
    for number, table in enumerate(tables):
        pq.write_table(table, path / f"{number}.parquet", row_group_size=7)
        wait_until_settled(path / f"{number}.parquet")
    options = {"lookup.keys": keys, "lookup.cache.dir": str(directory / "cache"), **more}
    return LookupTable(str(path), options), LookupTable(str(path), {**options, "lookup.cache": "FULL"})


def same(one: pa.Table, other: pa.Table) -> None:
    """Equal schemas and rows in order; NaN is NaN, and zeros have signs."""
    assert one.schema.equals(other.schema)
    assert repr(one.to_pylist()) == repr(other.to_pylist())


def test_many_keys_are_answered_in_batches(tmp_path: Path) -> None:
    """More keys than a batch holds: key_index goes on counting."""
    table = pa.table({"id": range(1000), "v": range(1000)})
    none, full = both(tmp_path, [table], "id")
    keys = pa.table({"id": pa.array([n % 2000 for n in range(150_000)])})
    found = full.get_many(keys)
    same(none.get_many(keys), found)
    assert found.num_rows == 75_000
    assert found.column("key_index")[-1].as_py() == 148_999


def test_get_takes_a_value_a_tuple_or_a_dictionary(tmp_path: Path) -> None:
    """One key: its rows as dictionaries, [] where there is none, in both modes."""
    table = pa.table({"a": [1, 1, 2], "b": ["x", "x", "y"], "v": [10, 20, 30]})
    for source in both(tmp_path, [table], "a,b"):
        assert source.get((1, "x")) == [{"a": 1, "b": "x", "v": 10}, {"a": 1, "b": "x", "v": 20}]
        assert source.get({"b": "y", "a": 2}) == [{"a": 2, "b": "y", "v": 30}]
        assert source.get((1, "y")) == []
        assert source.get((None, "x")) == []
        with pytest.raises(TypeError, match="2 columns"):
            source.get((1, "x", 3))


def test_keys_of_other_types_are_refused(tmp_path: Path) -> None:
    """Text for a number's key is an error that names both; a number out of the column's range is just not there."""
    table = pa.table({"id": pa.array([1, 2], pa.int8()), "v": [1, 2]})
    for source in both(tmp_path, [table], "id"):
        with pytest.raises(SchemaError, match=r"'id'.*string.*int8"):
            source.get("1")
        assert source.get(1000) == []
        assert source.get(2) == [{"id": 2, "v": 2}]


def test_a_lookup_needs_keys(tmp_path: Path) -> None:
    """Without lookup.keys a scan works and a lookup is an error that says what to set."""
    table = pa.table({"id": [1], "v": [1]})
    for source in both(tmp_path, [table], "id"):
        plain = LookupTable(
            source.describe()["path"], {"lookup.cache.dir": str(tmp_path / "cache"), "lookup.cache": "FULL"}
        )
        assert plain.scan().to_pylist() == [{"id": 1, "v": 1}]
        with pytest.raises(OptionError, match=r"lookup\.keys is missing"):
            plain.get(1)


def test_a_column_named_as_the_answers_own_is_refused(tmp_path: Path) -> None:
    """key_index is the answer's: a table that has one says so, and can leave it out."""
    table = pa.table({"id": [1], "key_index": [5]})
    for source in both(tmp_path, [table], "id"):
        with pytest.raises(SchemaError, match="key_index"):
            source.get(1)
    for source in both(tmp_path, [table], "id", {"lookup.columns": "id"}):
        assert source.get(1) == [{"id": 1}]


def test_columns_that_a_snapshot_leaves_out_are_read_from_the_files(tmp_path: Path) -> None:
    """With lookup.columns the snapshot holds those; a scan or predicate over others is right all the same."""
    table = pa.table({"id": [1, 2, 3], "a": ["x", "y", "z"], "b": [10, 20, 30]})
    none, full = both(tmp_path, [table], "id", {"lookup.columns": "id,a"})
    for source in (none, full):
        assert source.scan(["b", "id"]).to_pylist() == [{"b": 10, "id": 1}, {"b": 20, "id": 2}, {"b": 30, "id": 3}]
        assert source.scan(predicate="b = 20").to_pylist() == [{"id": 2, "a": "y"}]
        assert source.scan(["a"], "id = 3").to_pylist() == [{"a": "z"}]
        assert source.get(2) == [{"id": 2, "a": "y"}]
    assert full.metrics()["loadCount"] == 1
    assert full.metrics()["snapshotReadThroughCount"] == 2


NESTED = pa.table(
    {
        "id": [1, 2, 3, 2],
        "list": [[1, None], [], None, [3]],
        "struct": [{"a": 1, "b": "x"}, None, {"a": None, "b": None}, {"a": 2, "b": ""}],
        "map": pa.array([[("a", 1)], [], None, [("b", None)]], pa.map_(pa.string(), pa.int64())),
        "deep": [[{"x": ["a", None]}], None, [None], []],
        "bytes": [b"", None, b"\0", b"x"],
        "flag": [True, None, False, True],
    }
)


@pytest.mark.nightly
def test_more_than_two_gib_of_text_in_a_column(tmp_path: Path) -> None:
    """A column whose text needs 64-bit offsets is kept, looked up and scanned like any other."""
    rows, width = 36_000, 64 * 1024
    path = tmp_path / "big"
    path.mkdir()
    for number in range(4):
        ids = range(number * rows // 4, (number + 1) * rows // 4)
        texts = pa.array([f"{n:08d}" + "x" * (width - 8) for n in ids])
        pq.write_table(pa.table({"id": ids, "text": texts}), path / f"{number}.parquet", row_group_size=3000)
        wait_until_settled(path / f"{number}.parquet")
    options = {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "cache"), "lookup.cache": "FULL"}
    full = LookupTable(str(path), options)
    full.warm()
    assert full.metrics()["numCachedBytes"] > 2**31
    found = full.get_many(pa.table({"id": [35_999, 0, 17_000, 36_000]}))
    assert [text[:8] for text in found.column("text").to_pylist()] == ["00035999", "00000000", "00017000"]
    assert {len(text) for text in found.column("text").to_pylist()} == {width}
