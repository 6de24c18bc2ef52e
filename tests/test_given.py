"""Rows and keys as people have them: whatever exports Arrow, lists of dictionaries, plain lists; and what is none."""

from __future__ import annotations

import datetime
import decimal
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import pyspark_lookup
from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import DamagedFileError, NonUniqueKeyError, OptionError, SchemaError, TableFormatError
from tests.test_writing import Site, site

__all__ = ["site"]

ROWS = [{"id": 1, "name": "a"}, {"id": 2, "name": None}]
TABLE = pa.Table.from_pylist(ROWS)
GIVEN: dict[str, Any] = {
    "table": lambda: TABLE,
    "batch": lambda: TABLE.to_batches()[0],
    "reader": TABLE.to_reader,
    "dictionaries": lambda: ROWS,
    "a tuple of dictionaries": lambda: tuple(ROWS),
    "pandas": lambda: pd.DataFrame(ROWS),
    "pandas with an index": lambda: pd.DataFrame(ROWS, index=["x", "y"]),
    "polars": lambda: pl.DataFrame(ROWS),
    "duckdb": lambda: duckdb.sql("SELECT * FROM (VALUES (1::BIGINT, 'a'), (2, NULL)) AS t(id, name)"),
}
KEYS: dict[str, Any] = {
    "list": lambda: [2, 1, 7],
    "tuple": lambda: (2, 1, 7),
    "range": lambda: range(2, -1, -1),
    "numpy": lambda: np.array([2, 1, 7]),
    "array": lambda: pa.array([2, 1, 7]),
    "chunks": lambda: pa.chunked_array([[2, 1], [7]]),
    "pandas series": lambda: pd.Series([2, 1, 7]),
    "polars series": lambda: pl.Series([2, 1, 7]),
    "dictionaries": lambda: [{"id": 2}, {"id": 1}, {"id": 7}],
    "table": lambda: pa.table({"id": [2, 1, 7]}),
    "batch": lambda: pa.record_batch({"ID": [2, 1, 7]}),
    "pandas": lambda: pd.DataFrame({"id": [2, 1, 7]}),
    "polars": lambda: pl.DataFrame({"id": [2, 1, 7]}),
    "duckdb": lambda: duckdb.sql("SELECT unnest([2, 1, 7]) AS id"),
}


@pytest.mark.parametrize("how", GIVEN)
def test_rows_of_every_kind(site: Site, how: str) -> None:
    """Each kind creates a table, adds to it, takes rows' places and is written in a transaction."""
    make = GIVEN[how]
    table = site.table({"lookup.keys": "id"})
    table.write(make())
    table.upsert(make())
    with table.transaction() as t:
        t.upsert(make())
    assert table.scan().select(["id", "name"]).to_pylist() == ROWS
    assert table.schema == pa.schema([("id", pa.int64()), ("name", pa.string())])
    table.write(make(), "overwrite")
    assert table.scan().num_rows == 2


@pytest.mark.parametrize("how", KEYS)
@pytest.mark.parametrize("cache", ["NONE", "FULL"])
def test_keys_of_every_kind(site: Site, how: str, cache: str) -> None:
    """Each kind looks rows up, and removes them."""
    site.table({"lookup.keys": "id"}).write(ROWS)
    table = site.table({"lookup.cache": cache})
    found = table.get_many(KEYS[how]())
    assert list(zip(found["id"].to_pylist(), found["key_index"].to_pylist(), strict=True)) == [(2, 0), (1, 1)]
    with table.transaction() as t:
        assert t.get_many(KEYS[how]()).num_rows == 2
    table.delete(KEYS[how]())
    assert table.scan().num_rows == 0


def test_keys_of_several_columns(site: Site) -> None:
    """Tuples in the order of the keys, as the log says, or dictionaries; lists of strings are texts, not names."""
    site.table({"lookup.keys": ["a", "b"]}).write([{"a": "x", "b": 1, "v": 1}, {"a": "y", "b": 2, "v": 2}])
    site.restart()
    table = site.table(host="fresh")
    for keys in ([("y", 2), ("x", 2)], [["y", 2]], [{"b": 2, "a": "y"}], pl.DataFrame({"b": [2], "a": ["y"]})):
        assert table.get_many(keys)["v"].to_pylist() == [2]
    for keys in (["xy"], [("x",)], [("x", 1, 2)], [1]):
        with pytest.raises(TypeError, match=r"lookup\.keys has 2 columns, a, b"):
            table.get_many(keys)
    site.restart()
    assert site.table(host="another").delete([("x", 1)]) == site.state().position
    assert table.scan()["v"].to_pylist() == [2]


NO_ROWS = [7, "x", None, {"id": 1}, [1, 2], np.array([1]), pl.Series([1]), object()]


NO_KEYS = [7, "x", None, {"id": 1}, object(), [object()]]


def test_what_are_no_rows_and_no_keys(site: Site) -> None:
    """The error says what rows or keys are, and nothing is written."""
    table = site.created()
    before = site.state().position
    for wrong in NO_ROWS:
        for write in (table.write, table.upsert):
            with pytest.raises(TypeError, match=r"rows are a pyarrow Table, .* or a list of dictionaries"):
                write(wrong)
    for wrong in NO_KEYS:
        for ask in (table.get_many, table.delete):
            with pytest.raises(TypeError, match="keys are a list of values"):
                ask(wrong)
    with pytest.raises(TypeError, match="names of columns are texts"):
        table.write([{1: 2}])  # type: ignore[dict-item]
    with pytest.raises(SchemaError, match="the rows"):
        table.write(pd.DataFrame({"id": [3, "x"]}))
    assert site.state().position == before


def test_rows_take_the_types_of_the_table(site: Site) -> None:
    """Python's numbers are of the table's types where they fit; dictionaries may lack columns, in any of them."""
    table = site.table({"lookup.keys": "id"})
    table.write(
        pa.table({"id": pa.array([1], pa.int32()), "at": pa.array([None], pa.timestamp("us", "UTC")), "n": [0.5]})
    )
    table.write([{"id": 2}, {"id": 3, "n": 1}, {"ID": 4, "n": None}][:2])
    assert table.scan().to_pylist()[1:] == [{"id": 2, "at": None, "n": None}, {"id": 3, "at": None, "n": 1.0}]
    for wrong in ([{"id": 2**40}], [{"id": "x"}], [{"n": object()}]):
        with pytest.raises(SchemaError, match=r"column .(id|n). of the rows"):
            table.write(wrong)
    before = site.state().position
    assert table.write([]) == before


def test_a_bound_that_is_none(site: Site) -> None:
    """Flink's habit: the largest long says that there is no bound; a larger one is a mistake."""
    site.table({"lookup.keys": "id"}).write(ROWS)
    table = site.table({"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 2**63 - 1})
    assert table.get(1) == table.get(1) == ROWS[:1]
    assert table.metrics()["hitCount"] == 1
    says = r"lookup\.partial-cache\.max-rows = '9{20}'.*: expected a whole number, 0 to 9223372036854775807"
    with pytest.raises(OptionError, match=says):
        LookupTable("x", {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "9" * 20})


def test_what_a_table_shows_of_itself(site: Site) -> None:
    """Its place, its cache and the version it has seen; nothing is asked for that."""
    site.table({"lookup.keys": "id"}).write(ROWS)
    table = site.table({"lookup.cache": "FULL"}, host="fresh")
    assert repr(table) == f"LookupTable('{site.path}', FULL, not read yet)"
    version = table.version
    before = sum(len(store.calls) for store in site.stores)
    assert repr(table) == f"LookupTable('{site.path}', FULL, version {version})"
    assert sum(len(store.calls) for store in site.stores) == before > 0
    table.close()
    assert repr(table) == f"LookupTable('{site.path}', FULL, closed)"
    assert "secret" not in repr(LookupTable("s3://bucket/t?X-Amz-Signature=secret"))


def test_public_names() -> None:
    """`dir` shows what is for users."""
    assert dir(pyspark_lookup) == sorted(pyspark_lookup.__all__)


@pytest.mark.slow
def test_a_users_script_is_typed() -> None:
    """What a user writes passes `mypy --strict`, and what has no meaning does not."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "", str(Path(__file__).parent / "typed_script.py")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_dictionaries_that_lack_different_columns(site: Site) -> None:
    """What an upsert's dictionary does not have is not null: nothing is lost."""
    rows = [{"id": 1, "a": "x", "b": 10}, {"id": 2, "a": "y", "b": 20}]
    site.table({"lookup.keys": "id"}).write(rows)
    for options in ({}, {"lookup.write.missing-columns": "KEEP"}, {"lookup.write.missing-columns": "NULL"}):
        table = site.table(options)
        with pytest.raises(SchemaError, match="some of the dictionaries have no 'a'"):
            table.upsert([{"id": 1, "a": "z"}, {"id": 2, "b": 5}])
        with pytest.raises(SchemaError, match="some of the dictionaries have no 'a'"), table.transaction() as t:
            t.upsert([{"id": 1, "a": "z"}, {"id": 2, "b": 5}])
        assert table.scan().to_pylist() == rows


MOMENT = datetime.datetime(2024, 1, 2, 5)


VALUES: list[tuple[pa.DataType, Any, Any]] = [
    (pa.float32(), 0.5, 0.5),
    (pa.float32(), 1e300, None),
    (pa.date32(), MOMENT.date(), MOMENT.date()),
    (pa.date32(), MOMENT, None),
    (pa.timestamp("us"), MOMENT, MOMENT),
    (pa.timestamp("us"), MOMENT.replace(tzinfo=datetime.timezone.utc), None),
    (pa.timestamp("us", "UTC"), MOMENT, None),
    (pa.decimal128(10, 2), 5, decimal.Decimal("5.00")),
    (pa.decimal128(10, 2), decimal.Decimal("0.125"), None),
    (pa.int16(), 40000, None),
    (pa.string(), 5, None),
    (pa.bool_(), 1, None),
]


def test_values_of_dictionaries_do_not_change(site: Site) -> None:
    """They are the table's, or an error."""
    table = site.table({"lookup.keys": "id"})
    kinds = [("id", pa.int64()), *((f"v{n}", kind) for n, (kind, _, _) in enumerate(VALUES))]
    table.write(pa.schema(kinds).empty_table())
    for n, (_, value, kept) in enumerate(VALUES):
        if kept is None:
            with pytest.raises(SchemaError, match=f"column 'v{n}' of the rows"):
                table.write([{"id": n, f"v{n}": value}])
        else:
            table.write([{"id": n, f"v{n}": value}])
            assert table.get(n)[0][f"v{n}"] == kept


def test_categories_of_polars(site: Site) -> None:
    """Texts by codes are texts."""
    table = site.table({"lookup.keys": "id"})
    table.write(pl.DataFrame({"id": ["a", "b"], "v": ["x", "y"]}, schema={"id": pl.Categorical, "v": pl.Categorical}))
    assert table.get("b") == [{"id": "b", "v": "y"}]
    table.delete(pl.DataFrame({"id": ["a"]}, schema={"id": pl.Categorical}))
    assert table.scan().num_rows == 1


@pytest.mark.parametrize(
    "keys",
    [
        pa.table({"amount": [1]}),
        pa.table({"b": [1], "a": [2]}),
        pd.DataFrame({"amount": [1]}),
        pl.DataFrame({"amount": [1]}),
        [{"amount": 1}],
        [{"id": 1}, {"b": 1}],
    ],
    ids=["another column", "others", "pandas", "polars", "dictionaries", "one of them"],
)
def test_columns_of_keys_count_by_their_names(site: Site, keys: Any) -> None:
    """A table of keys without the key columns is refused, and deletes nothing."""
    table = site.table({"lookup.keys": "id"})
    table.write(ROWS)
    for ask in (table.delete, table.get_many):
        with pytest.raises(SchemaError, match=r"keys have the columns .*; lookup\.keys are id|have no"):
            ask(keys)
    assert table.scan().num_rows == 2


def test_an_index_with_a_name_is_a_column(site: Site) -> None:
    """Rows of pandas whose key became the index, as after a groupby, keep it; rows without their key are refused."""
    table = site.table({"lookup.keys": "id"})
    frame = pd.DataFrame(ROWS)
    table.write(frame.set_index("id"))
    table.upsert(frame.assign(name="b").groupby("id").agg({"name": "max"}))
    assert table.get(1) == [{"id": 1, "name": "b"}]
    assert table.get_many(frame[["id", "name"]].set_index("id")).num_rows == 2
    with pytest.raises(SchemaError, match="no key column 'id'"):
        table.write([{"name": "q"}])
    assert table.scan().num_rows == 2


def test_odd_arguments_are_named(site: Site) -> None:
    """What is of another kind than an argument wants is an error that says what to give; NaN is a key."""
    table = site.table({"lookup.keys": "d"})
    table.write([{"d": 1.5, "Name": "a"}, {"d": float("nan"), "Name": "n"}])
    assert table.get_many([float("nan"), 1.5]).num_rows == 2
    assert table.get({"D": 1.5}) == [{"d": 1.5, "Name": "a"}]
    with pytest.raises(TypeError, match="positional argument"):
        table.get(1.5, "x")  # type: ignore[misc]  # a second value is no version
    with pytest.raises(SchemaError, match="no key column can hold"):
        table.get(2**70)
    with pytest.raises(SchemaError, match=r"argument columns = 'Name': give a list of names, such as \['Name'\]"):
        table.scan("Name")
    with pytest.raises(SchemaError, match="give a list of names"):
        table.scan([])
    with pytest.raises(TypeError, match=r"columns are a pyarrow\.Schema"):
        table.alter({"w": "INT"})  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="argument columns = 'w': expected columns"):
        table.alter("w")
    table.alter("w INT")
    assert table.get(1.5) == [{"d": 1.5, "Name": "a", "w": None}]
    assert table.vacuum(datetime.timedelta(days=8))["files"] == 0
    with pytest.raises(OptionError, match=r"lookup.key = 'id'.*did you mean lookup.keys"):
        LookupTable(str(site.path), {"lookup.key": "id"})


def test_files_of_a_managed_table_are_no_table(tmp_path: Path) -> None:
    """Whoever names what is above, inside or across a managed table is refused: its log alone says which rows are valid."""
    options = {"lookup.cache.dir": str(tmp_path / "c")}
    with LookupTable(str(tmp_path / "lake" / "a"), {"lookup.keys": "id", **options}) as table:
        table.write(ROWS)
        table.upsert([{"id": 1, "name": "new"}])
        table.delete([2])
    (file, *_) = (tmp_path / "lake" / "a").glob("write-*/*.parquet")
    places = ["", "/*", "/a/*", "/a/*/*.parquet", f"/a/{file.parent.name}", f"/a/{file.parent.name}/{file.name}"]
    for place in places:
        with pytest.raises(TableFormatError, match=r"managed table.*read it|managed table.*read .*/lake/a"):
            LookupTable(f"{tmp_path}/lake{place}", options).scan()


def test_a_failed_first_write_says_that_it_made_the_table(tmp_path: Path) -> None:
    """Columns that no commit has used are named as such, with the way to say them anew."""
    options = {"lookup.keys": "id", "lookup.write.unique-keys": "true", "lookup.cache.dir": str(tmp_path / "c")}
    with LookupTable(str(tmp_path / "t"), options) as table:
        with pytest.raises(NonUniqueKeyError):
            table.write([{"id": 1, "v": 1}, {"id": 1, "v": 2}])
        with pytest.raises(SchemaError, match=r"Nothing was ever committed to the table.*remove its directory"):
            table.write(pa.table({"id": ["1"], "v": [1]}))


def test_a_broken_source_file_is_no_damage_of_the_cache(tmp_path: Path) -> None:
    """A file that the store itself has broken is an error, and no word about the cache."""
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.csv").write_bytes("id,name\n1,Köln\n".encode("latin-1"))
    table = LookupTable(str(tmp_path / "t"), {"lookup.cache.dir": str(tmp_path / "c")})
    with pytest.raises(DamagedFileError):
        table.scan()
    assert table.metrics()["blockDamagedCount"] == 0
