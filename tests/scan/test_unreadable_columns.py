"""A column that cannot be read refuses itself, not its table: in files, in Delta tables; of Iceberg tables see tests/sources/iceberg."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pyspark_lookup.errors import NotSupportedError, PredicateError, SchemaError
from tests.support.data_files import write_file
from tests.support.fuzzing import share
from tests.support.lake_tables import MODES, opened

TIMES = pa.array([1, 2], pa.time64("us"))
COLUMNS: dict[str, pa.Array] = {
    "time": TIMES,
    "in a struct": pa.array(
        [{"a": 1, "t": datetime.time(1)}, None], pa.struct([("a", pa.int64()), ("t", pa.time64("us"))])
    ),
    "256 bits": pa.array([1, 2], pa.decimal256(50, 0)),
}
UNION = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])])
FILES: dict[str, tuple[str, pa.Array]] = {
    **{f"parquet, {name}": ("a.parquet", column) for name, column in COLUMNS.items()},
    **{f"arrow, {name}": ("a.arrow", column) for name, column in COLUMNS.items()},
    "arrow, interval": ("a.arrow", pa.array([(1, 2, 3), None], pa.month_day_nano_interval())),
    "arrow, union": ("a.arrow", UNION),
    "orc, union": ("a.orc", UNION),
}
ROWS = [{"id": 1, "v": "a"}, {"id": 2, "v": "b"}]


WAYS_OUT = {"columns": "id, v"}, {"schema": "id BIGINT, v STRING"}


def check(table: Path, cache: Path, number: int, ways_out: Sequence[dict[str, str]] = WAYS_OUT) -> None:
    """All columns, or `odd`, are refused by name; those beside it are read, by night in every mode."""
    name = "odd"
    for mode in share(list(MODES), number % len(MODES), len(MODES)):
        for options in ({}, {"columns": f"id, `{name}`"}):
            for read in (lambda r: r.scan(), lambda r: r.get(2), lambda r: r.schema):
                pattern = f"(?i){name}.*: name the other columns in lookup.columns, in lookup.schema"
                with pytest.raises(SchemaError, match=pattern) as refusal:
                    read(opened(table, cache, mode, "id", **options))
                assert isinstance(refusal.value, NotSupportedError)
        with pytest.raises(PredicateError, match=f"(?i){name}.*: name another column"):
            opened(table, cache, mode, "id", columns="id", where=f"`{name}` IS NULL").scan()
        for options in ways_out:
            reader = opened(table, cache, mode, "id", **options)
            assert sorted(reader.scan().to_pylist(), key=lambda row: row["id"]) == ROWS
            assert reader.get(2) == ROWS[1:]
            assert opened(table, cache, mode, "id", where="v = 'b'", **options).scan().to_pylist() == ROWS[1:]


@pytest.mark.parametrize("title", FILES)
def test_columns_of_files(tmp_path: Path, title: str) -> None:
    name, column = FILES[title]
    (tmp_path / "t").mkdir()
    write_file(tmp_path / "t" / name, pa.table({"odd": column, "id": [1, 2], "v": ["a", "b"]}))
    check(tmp_path / "t", tmp_path / "cache", list(FILES).index(title))


OTHER_TABLES: dict[str, tuple[str, object]] = {
    "polars, int128, parquet": ("a.parquet", pl.Series([2**100, None], dtype=pl.Int128)),
    "polars, struct of int128, arrow": ("a.arrow", pl.Series([{"a": 1}, None], dtype=pl.Struct({"a": pl.Int128}))),
    "duckdb, interval": ("a.parquet", "INTERVAL 1 DAY"),
}


@pytest.mark.parametrize("title", OTHER_TABLES)
def test_columns_of_files_of_others(tmp_path: Path, title: str) -> None:
    """Types for which pyarrow refuses the whole file, and types that it takes for others."""
    name, column = OTHER_TABLES[title]
    path = tmp_path / "t" / name
    path.parent.mkdir()
    if isinstance(column, str):
        rows = f"SELECT {column} AS odd, i AS id, chr((96 + i)::INT) AS v FROM range(1, 3) AS t(i)"
        duckdb.connect().execute(f"COPY ({rows}) TO '{path}' (FORMAT parquet)")
    else:
        frame = pl.DataFrame({"odd": column, "id": [1, 2], "v": pl.Series(["a", "b"], dtype=pl.Categorical)})
        frame.write_parquet(path) if path.suffix == ".parquet" else frame.write_ipc(path, compression="zstd")
    check(path.parent, tmp_path / "cache", list(OTHER_TABLES).index(title))


def _nested(depth: int) -> str:
    field = '{"type": "struct", "fields": [{"name": "a", "nullable": true, "metadata": {}, "type": '
    return field * depth + '"long"' + "}]}" * depth


DELTA_TYPES = {
    "interval": "interval year to month",
    "struct": {"type": "struct", "fields": [{"name": "x", "type": "geography", "nullable": True, "metadata": {}}]},
    "array": {"type": "array", "elementType": "invented", "containsNull": True},
}
DELTA_TYPES = {name: json.dumps(kind) for name, kind in DELTA_TYPES.items()} | {str(n): _nested(n) for n in (101, 200)}


@pytest.mark.parametrize("title", DELTA_TYPES)
def test_columns_of_delta_tables(tmp_path: Path, title: str) -> None:
    table = tmp_path / "t"
    write_deltalake(str(table), pa.table({"id": [1, 2], "v": ["a", "b"]}))
    (commit,) = (table / "_delta_log").glob("*.json")
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    (metadata,) = (action["metaData"] for action in actions if "metaData" in action)
    schema = json.loads(metadata["schemaString"])
    schema["fields"].append({"name": "odd", "type": "ODD", "nullable": True, "metadata": {}})
    metadata["schemaString"] = json.dumps(schema).replace('"ODD"', DELTA_TYPES[title])
    commit.write_text("\n".join(map(json.dumps, actions)))
    check(table, tmp_path / "cache", list(DELTA_TYPES).index(title), WAYS_OUT[:1])


DISAGREEING: dict[str, tuple[dict[str, pa.Array], dict[str, pa.Array]]] = {
    "types": ({"odd": pa.array(["a"])}, {"odd": pa.array([5])}),
    "spellings": ({"odd": pa.array(["a"])}, {"ODD": pa.array(["b"])}),
    "one without a counterpart": ({"odd": pa.array([1])}, {"odd": TIMES[:1]}),
    "two in one file": ({"odd": pa.array([1]), "ODD": pa.array([1])}, {}),
}


@pytest.mark.parametrize("title", DISAGREEING)
def test_files_that_disagree_on_a_column(tmp_path: Path, cache_dir: Path, title: str) -> None:
    """A column of which files have types that nothing unites, or two spellings, refuses itself, and names them; so does a type that Spark lacks."""
    (tmp_path / "t").mkdir()
    for number, (name, columns) in enumerate(zip("ab", DISAGREEING[title], strict=True), 1):
        write_file(tmp_path / "t" / f"{name}.parquet", pa.table({"id": [number], "v": [name], **columns}))
    check(tmp_path / "t", cache_dir, list(DISAGREEING).index(title))
