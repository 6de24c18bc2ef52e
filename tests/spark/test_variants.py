"""VARIANT columns through Spark, beside Spark's own reader of the files that it wrote, shredded or not."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable, UnreadableColumnError, lookup_join, register_lookup
from tests.support.delta_tables import log_of_files
from tests.support.spark_tables import WAYS, conf, load, saved
from tests.support.sparks import DATA_SOURCES, UDFS, VARIANTS, needs
from tests.support.variants import decode, random_value, shredded

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

SHREDDED = "a int, b string, c struct<x decimal(9, 2), y timestamp>, d array<double>, e binary"
ROWS = 40
FEATURES = "variantType", "variantShredding-preview"
TYPED = """to_variant_object(named_struct('a', INT(id), 'b', IF(id % 2 = 0, 'even', NULL), 'c', named_struct('x', CAST(id / 4 AS DECIMAL(9, 2)),
    'y', timestamp_micros(id * 1234567)), 'd', array(id * 0.5D, NULL), 'e', encode(STRING(id), 'utf-8'), 'f', timestamp_micros(id)::timestamp_ntz,
    'g', CAST(id AS FLOAT), 'h', CAST(id AS DECIMAL(38, 3)), 'i', id * 1e10D, 'j', id % 3 = 0))"""
VALUE = f"""CASE WHEN id % 7 = 0 THEN NULL WHEN id % 7 = 1 THEN {TYPED} WHEN id % 7 = 2 THEN date_from_unix_date(id)::variant
    ELSE try_parse_json(text) END"""


def random_json(rng: random.Random, depth: int = 3) -> Any:
    draw = rng.random()
    if depth and draw < 0.5:
        return {name: random_json(rng, depth - 1) for name in rng.sample("abcdexy", rng.randint(0, 5))}
    if depth and draw < 0.7:
        return [random_json(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return rng.choice([None, True, 1, -7, 2**40, 1.5, 1e100, 12.25, "", "text", "é" * 40])


def describe_values(df: DataFrame, *columns: str) -> list[Any]:
    """What Spark makes of the column `v`: as JSON, its schema, and a field."""
    of_v = ["to_json(v)", "schema_of_variant(v)", "try_variant_get(v, '$.b', 'string')"]
    return sorted(df.selectExpr("id", *of_v, *columns).collect(), key=lambda row: row.id)


@needs(VARIANTS)
@pytest.mark.parametrize(
    "shape", [pytest.param(None, marks=pytest.mark.nightly, id="plain"), pytest.param(SHREDDED, id="shredded")]
)
def test_same_values_as_sparks_reader(spark: SparkSession, tmp_path: Path, cache_dir: Path, shape: str | None) -> None:
    """Scans, joins of all kinds and SQL functions return what Spark reads, of Parquet and of Delta."""
    rng = random.Random(str(shape))
    texts = [(number, json.dumps(random_json(rng))) for number in range(ROWS)]
    rows = spark.createDataFrame(texts, "id BIGINT, text STRING").selectExpr("id", f"{VALUE} AS v")
    rows, more = rows.selectExpr("*", "named_struct('v', v) AS s"), ["to_json(s)"]
    if shape is None:  # Spark 4.3 cannot write shredded values beside arrays and maps of VARIANT
        rows = rows.selectExpr("*", "array(v, NULL, v) AS l", "map('k', v) AS m")
        more.append("to_json(named_struct('l', l, 'm', m))")
    of_shredding = {
        "writeShredding.enabled": str(shape is not None).lower(),
        "inferShreddingSchema": "false",
        "forceShreddingSchemaForTest": shape or "",
        "allowReadingShredded": "true",
    }
    path = tmp_path / "t"
    with contextlib.ExitStack() as stack:
        for key, value in of_shredding.items():
            stack.enter_context(conf(spark, f"spark.sql.variant.{key}", value))
        rows.coalesce(1).write.parquet(str(path))
        expected = describe_values(spark.read.parquet(str(path)), *more)
    assert sum(row[1] is not None for row in expected) > ROWS // 2
    (file,) = path.glob("*.parquet")
    assert ("typed_value" in str(pq.read_schema(file))) == (shape is not None)
    for kind in ("parquet", "delta"):
        if kind == "delta":
            log_of_files(path, rows.schema.jsonValue(), *FEATURES)
        if DATA_SOURCES:
            assert load(spark, path).schema["v"].dataType.simpleString() == "variant"
            assert describe_values(load(spark, path, {"lookup.where": "id >= 0"}), *more) == expected, kind
    facts = spark.range(ROWS + 5)
    for way, arguments in WAYS.items():
        options = {"lookup.cache.dir": str(cache_dir), **arguments.get("options", {})}
        joined = lookup_join(facts, str(path), on="id", **{**arguments, "options": options})
        assert describe_values(joined, *more)[:ROWS] == expected, way
    for way, udfs in UDFS.items():
        with udfs():
            register_lookup(spark, "by_id", str(path), key="id", options={"lookup.cache.dir": str(cache_dir)})
            assert (
                describe_values(facts.selectExpr("id", "by_id(id) AS r").selectExpr("id", "r.*"), *more)[:ROWS]
                == expected
            ), way


def test_a_spark_without_variants(spark: SparkSession, tmp_path: Path) -> None:
    """Only the column that this Spark lacks is refused, and the errors say how to leave it out."""
    values = [random_value(random.Random(seed)) for seed in range(3)]
    column = shredded(values, None, random.Random(0))
    saved(tmp_path / "t" / "a.parquet", pa.table({"id": [0, 1, 2], "n": ["a", "b", "c"], "v": column}))
    path = tmp_path / "t"
    fields = {"id": "long", "n": "string", "v": "variant"}
    columns = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields.items()]
    log_of_files(path, {"type": "struct", "fields": columns}, *FEATURES)
    pairs = LookupTable(str(path)).scan()["v"].to_pylist()
    assert [decode(pair["metadata"], pair["value"]) for pair in pairs] == values
    assert load(spark, path, {"lookup.columns": "id, n"}).count() == 3
    joined = lookup_join(spark.range(3), str(path), on="id", columns=["n"])
    assert sorted(joined.collect()) == [(0, "a"), (1, "b"), (2, "c")]
    if not VARIANTS:
        with pytest.raises(
            UnreadableColumnError, match=r"column 'v' is a VARIANT.* without 'v': name the other columns"
        ):
            load(spark, path)
        for columns in (None, ["v"]):
            with pytest.raises(UnreadableColumnError, match=r"column 'v' is a VARIANT.* out, with columns=\[…\]"):
                lookup_join(spark.range(3), str(path), on="id", columns=columns)


def test_columns_that_cannot_be_read_are_left_out_of_lookups(spark: SparkSession, tmp_path: Path) -> None:
    """A lookup that names only other columns works; any other lookup is refused, with how to leave them out."""
    rows = {"id": [1, 2], "n": ["a", "b"], "at": pa.array([1, 2], pa.time64("us"))}
    path = saved(tmp_path / "a.parquet", pa.table(rows))
    for arguments in WAYS.values():
        joined = lookup_join(spark.range(3), str(path), on="id", columns=["n"], **arguments)
        assert sorted(joined.collect()) == [(0, None), (1, "a"), (2, "b")]
    register_lookup(spark, "named", str(path), key="id", columns=["n"])
    assert spark.range(1, 3).selectExpr("named(id).n").collect() == [("a",), ("b",)]
    for columns in (None, ["at"]):
        refused = pytest.raises(UnreadableColumnError, match=r"column 'at': type time64.* out, with columns=\[…\]")
        with refused:
            lookup_join(spark.range(3), str(path), on="id", columns=columns)
        with refused:
            register_lookup(spark, "named", str(path), key="id", columns=columns)
    with pytest.raises(UnreadableColumnError, match="column 'at': type time64"):
        lookup_join(spark.range(3), str(path), on={"id": "at"}, columns=["n"])
