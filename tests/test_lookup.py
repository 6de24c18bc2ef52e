"""Lookups by key, in FULL as in NONE: what is asked for how, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import OptionError, SchemaError
from tests.fakes import wait_until_settled

Opens = Callable[..., LookupTable]


@pytest.fixture(params=["NONE", "FULL"])
def opens(request: pytest.FixtureRequest, tmp_path: Path) -> Opens:
    """Opens a table of these rows, with these options."""

    def opened(rows: pa.Table, **options: str) -> LookupTable:
        pq.write_table(rows, tmp_path / "t.parquet", row_group_size=7)
        wait_until_settled(tmp_path / "t.parquet")
        given = {"cache": request.param, "cache.dir": str(tmp_path / "cache"), **options}
        return LookupTable(str(tmp_path / "t.parquet"), {f"lookup.{key}": value for key, value in given.items()})

    return opened


def test_many_keys_are_answered_in_batches(opens: Opens) -> None:
    """More keys than a batch holds: key_index goes on counting."""
    keys = [n % 2000 for n in range(150_000)]
    found = opens(pa.table({"id": range(1000), "v": range(1000)}), keys="id").get_many(keys)
    held = [(place, key) for place, key in enumerate(keys) if key < 1000]
    assert found.column("key_index").to_pylist() == [place for place, _ in held]
    assert found.column("id").to_pylist() == found.column("v").to_pylist() == [key for _, key in held]


def test_get_takes_a_value_a_tuple_or_a_dictionary(opens: Opens) -> None:
    """One key: its rows as dictionaries, [] where there is none."""
    table = opens(pa.table({"a": [1, 1, 2], "b": ["x", "x", "y"], "v": [10, 20, 30]}), keys="a,b")
    assert table.get((1, "x")) == [{"a": 1, "b": "x", "v": 10}, {"a": 1, "b": "x", "v": 20}]
    assert table.get({"b": "y", "a": 2}) == [{"a": 2, "b": "y", "v": 30}]
    assert table.get((1, "y")) == table.get((None, "x")) == []
    with pytest.raises(TypeError, match="2 columns"):
        table.get((1, "x", 3))


def test_keys_of_other_types_are_refused(opens: Opens) -> None:
    """Text for a number's key is an error that names both; a number out of the column's range is just not there."""
    table = opens(pa.table({"id": pa.array([1, 2], pa.int8()), "v": [1, 2]}), keys="id")
    with pytest.raises(SchemaError, match=r"'id'.*string.*int8"):
        table.get("1")
    assert table.get(1000) == []
    assert table.get(2) == [{"id": 2, "v": 2}]


def test_a_lookup_needs_keys(opens: Opens) -> None:
    """Without lookup.keys a scan works and a lookup is an error that says what to set."""
    table = opens(pa.table({"id": [1], "v": [1]}))
    assert table.scan().to_pylist() == [{"id": 1, "v": 1}]
    with pytest.raises(OptionError, match=r"lookup\.keys is missing"):
        table.get(1)


def test_a_column_named_as_the_answers_own_is_refused(opens: Opens) -> None:
    """key_index is the answer's: a table that has one says so, and can leave it out."""
    rows = pa.table({"id": [1], "key_index": [5]})
    with pytest.raises(SchemaError, match=r"key_index.*leave it out by lookup\.columns"):
        opens(rows, keys="id").get(1)
    assert opens(rows, keys="id", columns="id").get(1) == [{"id": 1}]


def test_columns_that_a_snapshot_leaves_out_are_read_from_the_files(opens: Opens) -> None:
    """With lookup.columns the snapshot holds those; a scan or predicate over others is right all the same."""
    rows = pa.table({"id": [1, 2, 3], "a": ["x", "y", "z"], "b": [10, 20, 30]})
    table = opens(rows, keys="id", columns="id,a")
    assert table.scan(["b", "id"]).to_pylist() == [{"b": 10, "id": 1}, {"b": 20, "id": 2}, {"b": 30, "id": 3}]
    assert table.scan(predicate="b = 20").to_pylist() == [{"id": 2, "a": "y"}]
    assert table.scan(["a"], "id = 3").to_pylist() == [{"a": "z"}]
    assert table.get(2) == [{"id": 2, "a": "y"}]
    metrics = table.metrics()
    assert (metrics["loadCount"], metrics["snapshotReadThroughCount"]) in ((0, 0), (1, 2))  # NONE, FULL


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
