"""CSV and JSON beside Spark's own readers: the same rows of the same files, whoever wrote them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pandas as pd
import polars as pl
import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

TEXTS = ["plain", "", None, 'a "quoted" word', "comma, semicolon; tab\t", "two\nlines", "back\\slash", "end\\", 'both \\" of them', "ü 漢 🙂", " spaces ", "NA", "null", "'", "1e3"]  # fmt: skip
SCHEMA = "id INT, text STRING, n DECIMAL(12, 3), d DOUBLE, day DATE, at TIMESTAMP, ok BOOLEAN"


def rows(seed: int, count: int = 60) -> list[dict[str, Any]]:
    rng = random.Random(seed)

    def one(number: int) -> dict[str, Any]:
        day = f"20{rng.randrange(10, 30)}-0{rng.randrange(1, 10)}-1{rng.randrange(10)}"
        return {
            "id": 100 * seed + number,
            "text": rng.choice(TEXTS),
            "n": rng.choice([None, f"{rng.randrange(-(10**6), 10**6)}.{rng.randrange(1000):03}"]),
            "d": rng.choice([None, repr(rng.uniform(-1e6, 1e6)), str(rng.randrange(100))]),
            "day": rng.choice([None, day]),
            "at": rng.choice(
                [None, f"{day}T10:11:12.{rng.randrange(10**6):06}{rng.choice(['Z', '+02:00', '-11:30'])}"]
            ),
            "ok": rng.choice([None, "true", "false"]),
        }

    return [one(number) for number in range(count)]


def csv_of(found: list[dict[str, Any]], sep: str) -> str:
    """All is quoted but what is not there."""
    lines = [list(found[0]), *(list(row.values()) for row in found)]
    quoted = [["" if value is None else '"' + str(value).replace('"', '""') + '"' for value in line] for line in lines]
    return "".join(f"{sep.join(line)}\n" for line in quoted)


def same(
    spark: SparkSession, path: Path, form: str, ours: dict[str, str], theirs: dict[str, Any], schema: str | None
) -> list[Any]:
    """What both readers give, which is the same."""
    reader, other = spark.read.format("lookupcache").options(**ours), spark.read.format(form).options(**theirs)
    if schema is not None:
        reader, other = reader.schema(schema), other.schema(schema)
    found, expected = (df.load(str(path)).orderBy("id") for df in (reader, other))
    assert found.schema.simpleString() == expected.schema.simpleString()
    assert found.collect() == expected.collect()
    return list(found.collect())


@pytest.mark.parametrize("schema", [None, SCHEMA], ids=["texts", "declared"])
@pytest.mark.parametrize("sep", [",", ";", "\t"])
def test_csv_is_read_as_spark_reads_it(spark: SparkSession, tmp_path: Path, sep: str, schema: str | None) -> None:
    """Generated files, several of a table: all texts without inference, or parsed to a schema. (Spark takes no empty text.)"""
    for seed in range(3):
        found = [row for row in rows(seed) if row["text"] != ""]
        (tmp_path / f"{seed}.csv").write_text(csv_of(found, sep))
    ours = {"lookup.csv.sep": sep, "lookup.csv.infer-schema": "false"}
    theirs = {"sep": sep, "header": True, "multiLine": True, "escape": '"', "nullValue": ""}
    if schema is None:  # by their texts, as the ids are
        read = spark.read.format("lookupcache").options(**ours).load(str(tmp_path))
        other = spark.read.options(**theirs).csv(str(tmp_path))
        assert sorted(read.collect(), key=str) == sorted(other.collect(), key=str)
        return
    same(spark, tmp_path, "csv", ours, theirs, schema)


def test_json_is_read_as_spark_reads_it(spark: SparkSession, tmp_path: Path) -> None:
    """The same with JSON lines, nested ones too."""
    schema = f"{SCHEMA}, nested STRUCT<tags: ARRAY<STRING>, counts: MAP<STRING, BIGINT>>"
    for seed in range(3):
        lines = []
        for number, row in enumerate(rows(seed)):
            numbers = {name: json.loads(row[name]) for name in ("d", "ok") if row[name] is not None}
            nested = [None, {"tags": ["a", None]}, {"counts": {"x": number}}, {"tags": [], "more": 1}][number % 4]
            exact = "" if row["n"] is None else f', "n": {row["n"]}'
            plain = json.dumps({**row, **numbers, "nested": nested, "n": None})[:-1]
            lines.append(plain.replace(', "n": null', exact) + "}")
        (tmp_path / f"{seed}.json").write_text("\n".join(lines))
    same(spark, tmp_path, "json", {}, {}, schema)


def test_what_spark_has_written(spark: SparkSession, tmp_path: Path) -> None:
    """Spark's own files come back as they were, which its reader does not: it takes empty text for null."""
    rows = [(number, text and text.strip()) for number, text in enumerate(TEXTS)]  # it trims what it writes
    spark.createDataFrame(rows, "id int, text string").coalesce(1).write.csv(str(tmp_path / "csv"), header=True)
    read = spark.read.format("lookupcache").option("lookup.csv.escape", "\\").load(str(tmp_path / "csv"))
    found = [tuple(row) for row in read.orderBy("id").collect()]
    assert found == rows


@pytest.mark.parametrize("writer", ["pandas", "polars", "duckdb"])
@pytest.mark.parametrize("form", ["csv", "json"])
def test_what_others_have_written(spark: SparkSession, tmp_path: Path, writer: str, form: str) -> None:
    """Texts, types and nulls come back as they were written."""
    texts = [text for text in TEXTS if text != ""]
    held = {"id": list(range(len(texts))), "text": texts, "n": [1.5 + n for n in range(len(texts))], "zip": [f"0{n}" for n in range(len(texts))]}  # fmt: skip
    path = str(tmp_path / f"a.{form}")
    if writer == "pandas":
        frame = pd.DataFrame(held)
        frame.to_csv(path, index=False) if form == "csv" else frame.to_json(path, orient="records")
    elif writer == "polars":
        table = pl.DataFrame(held)
        table.write_csv(path) if form == "csv" else table.write_ndjson(path)
    else:
        frame = pl.DataFrame(held)
        duckdb.sql(f"COPY (SELECT * FROM frame) TO '{path}' " + ("(HEADER)" if form == "csv" else "(FORMAT json)"))
    read = spark.read.format("lookupcache").load(str(tmp_path))
    assert read.schema.simpleString() == "struct<id:bigint,text:string,n:double,zip:string>"
    expected = [tuple(row) for row in zip(*held.values(), strict=True)]
    assert [tuple(row) for row in read.orderBy("id").collect()] == expected


def test_schemas_from_sql(spark: SparkSession, tmp_path: Path) -> None:
    """A table that SQL creates with `lookup.schema` and a dialect has those columns, in joins and functions too."""
    from pyspark_lookup import lookup_join, register_lookup  # noqa: PLC0415 - beside a session

    (tmp_path / "a.csv").write_text("1;0150\n2;x\n")
    options = {"lookup.schema": "id INT, zip STRING", "lookup.csv.header": "false", "lookup.csv.sep": ";"}
    given = ", ".join(f"'{key}' '{value}'" for key, value in options.items())
    spark.sql(f"CREATE TABLE zips USING lookupcache OPTIONS (path '{tmp_path}', {given})")
    try:
        assert spark.table("zips").schema.simpleString() == "struct<id:int,zip:string>"
        assert spark.sql("SELECT zip FROM zips WHERE id = 1").collect()[0].zip == "0150"
    finally:
        spark.sql("DROP TABLE zips")
    ids = spark.range(1, 3).selectExpr("CAST(id AS INT) AS id")
    joined = lookup_join(ids, str(tmp_path), "id", options=options).orderBy("id").collect()
    assert [(row.id, row.zip) for row in joined] == [(1, "0150"), (2, "x")]
    register_lookup(spark, "zip_of", str(tmp_path), key="id", options=options)
    assert spark.sql("SELECT zip_of(2).zip AS z").collect()[0].z == "x"


def test_a_schema_that_contradicts_the_option(spark: SparkSession, tmp_path: Path) -> None:
    """Both say what the columns are: they have to say the same."""
    (tmp_path / "a.csv").write_text("id\n1\n")
    reader = spark.read.format("lookupcache").option("lookup.schema", "id INT")
    assert reader.schema("id int").load(str(tmp_path)).collect()[0].id == 1
    with pytest.raises(Exception, match=r"option lookup\.schema = 'id INT' contradicts \.schema\('id BIGINT'\)"):
        reader.schema("id bigint").load(str(tmp_path)).collect()
