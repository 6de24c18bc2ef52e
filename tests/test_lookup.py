"""Lookups by key: FULL answers as NONE does and as a merge in pandas does, for keys of every type."""

from __future__ import annotations

import datetime
import decimal
import itertools
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import OptionError, SchemaError
from tests.fakes import wait_until_settled
from tests.fuzzing import MORE

_serial = itertools.count()
UTC = datetime.timezone.utc

# Few values of each type, so that generated keys meet, with those that are easily taken for another.
KEYS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int32": (pa.int32(), st.integers(-5, 5) | st.sampled_from([2**31 - 1, -(2**31)])),
    "dense int64": (pa.int64(), st.integers(10, 20)),
    "sparse int64": (pa.int64(), st.integers(-3, 3).map(lambda n: n * 10**15) | st.sampled_from([2**63 - 1, -(2**63)])),
    "string": (pa.string(), st.sampled_from(["", "a", "a\0", "b", "é", "x" * 40, "x" * 39 + "y", "x" * 3000])),
    "binary": (pa.binary(), st.sampled_from([b"", b"\0", b"\0\0", b"\xff" * 9, b"12345678", b"123456789"])),
    "double": (pa.float64(), st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1.5, 5e-324])),
    "float": (pa.float32(), st.sampled_from([0.0, -0.0, math.nan, 0.25, -1.0])),
    "boolean": (pa.bool_(), st.booleans()),
    "date": (pa.date32(), st.dates(datetime.date(2024, 2, 27), datetime.date(2024, 3, 2))),
    "timestamp": (pa.timestamp("us"), st.integers(0, 3).map(lambda n: datetime.datetime(2024, 1, 1, 0, 0, 0, n))),
    "instant": (
        pa.timestamp("us", "UTC"),
        st.integers(0, 3).map(lambda n: datetime.datetime(1969, 1, 1, n, tzinfo=UTC)),
    ),
    "decimal": (pa.decimal128(38, 2), st.sampled_from([decimal.Decimal(d) for d in ("0.00", "-0.01", "1.10")])),
}
ADVERSE = settings(
    deadline=None,
    max_examples=5 * MORE,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


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


def chosen(data: st.DataObject, kinds: list[str], rows: int) -> dict[str, pa.Array]:
    """Key columns of generated values, some null."""
    return {
        f"k{n}": pa.array(data.draw(st.lists(KEYS[kind][1] | st.none(), min_size=rows, max_size=rows)), KEYS[kind][0])
        for n, kind in enumerate(kinds)
    }


@pytest.mark.parametrize("kind", KEYS)
@ADVERSE
@given(data=st.data())
def test_full_answers_as_none_and_as_pandas(kind: str, tmp_path: Path, data: st.DataObject) -> None:
    """Unique or duplicate keys of every type, null ones, ones that are not there: the same rows in the same order."""
    check(tmp_path, data, [kind])


@ADVERSE
@given(data=st.data(), kinds=st.lists(st.sampled_from(sorted(KEYS)), min_size=2, max_size=3))
def test_composite_keys_answer_as_none_and_as_pandas(tmp_path: Path, data: st.DataObject, kinds: list[str]) -> None:
    """Keys of several columns of any types: equal where all columns are, and never with a null."""
    check(tmp_path, data, kinds)


def check(tmp_path: Path, data: st.DataObject, kinds: list[str]) -> None:
    names = [f"k{n}" for n in range(len(kinds))]
    tables, start = [], 0
    for _ in range(data.draw(st.integers(1, 3))):
        rows = data.draw(st.integers(1, 25))
        columns = chosen(data, kinds, rows)
        tables.append(
            pa.table({**columns, "row": range(start, start + rows), "text": [f"t{r % 3}" for r in range(rows)]})
        )
        start += rows
    none, full = both(tmp_path, tables, ",".join(names))
    keys = pa.table(chosen(data, kinds, data.draw(st.integers(0, 30))))
    found = full.get_many(keys)
    same(none.get_many(keys), found)
    assert found.column_names == [*names, "row", "text", "key_index"]
    assert found.select(["key_index", "row"]).to_pylist() == merged(pa.concat_tables(tables), keys, names)
    metrics = full.metrics()
    assert (metrics["snapshotReadThroughCount"], metrics["numCachedRecords"]) == (0, start)
    shutil.rmtree(none.describe()["path"].removeprefix("file://"))


def merged(table: pa.Table, keys: pa.Table, names: list[str]) -> list[dict[str, int]]:
    """(key_index, row) of a merge in pandas over texts of the key values, null keys left out."""

    def texts(rows: pa.Table) -> pd.DataFrame:
        columns = {}
        for name in names:
            values = rows.column(name).to_pylist()
            columns[name] = [None if v is None else repr(v + 0.0 if isinstance(v, float) else v) for v in values]
        return pd.DataFrame(columns, dtype=object)

    left = texts(keys).assign(key_index=range(keys.num_rows)).dropna()
    right = texts(table).assign(row=table.column("row").to_pylist()).dropna()
    joined = left.merge(right, on=names).sort_values(["key_index", "row"])
    rows: list[dict[str, int]] = joined[["key_index", "row"]].to_dict("records")
    return rows


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
