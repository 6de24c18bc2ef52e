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

from pyspark_lookup import lookup_join, register_lookup
from tests.spark.common import catalog_options, load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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


def collected(df: DataFrame) -> tuple[str, list[Any]]:
    """The schema and the rows."""
    return df.schema.simpleString(), sorted(df.collect(), key=lambda row: int(row.id))


@pytest.mark.parametrize("sep", [",", ";", "\t"])
def test_csv_is_read_as_spark_reads_it(spark: SparkSession, tmp_path: Path, sep: str) -> None:
    """Generated files, several of a table: all texts without inference, or parsed to a schema. (Spark takes no empty text.)"""
    for seed in range(3):
        found = [row for row in rows(seed) if row["text"] != ""]
        (tmp_path / f"{seed}.csv").write_text(csv_of(found, sep))
    ours = spark.read.format("lookupcache").options(**{"lookup.csv.sep": sep, "lookup.csv.infer-schema": "false"})
    theirs = spark.read.options(sep=sep, header=True, multiLine=True, escape='"', nullValue="")
    assert collected(ours.load(str(tmp_path))) == collected(theirs.csv(str(tmp_path)))
    assert collected(ours.schema(SCHEMA).load(str(tmp_path))) == collected(theirs.schema(SCHEMA).csv(str(tmp_path)))


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
    ours, theirs = (spark.read.format(form).schema(schema).load(str(tmp_path)) for form in ("lookupcache", "json"))
    assert collected(ours) == collected(theirs)


def test_what_spark_has_written(spark: SparkSession, tmp_path: Path) -> None:
    """Spark's own files come back as they were, which its reader does not: it takes empty text for null."""
    rows = [(number, text and text.strip()) for number, text in enumerate(TEXTS)]  # it trims what it writes
    spark.createDataFrame(rows, "id int, text string").coalesce(1).write.csv(str(tmp_path / "csv"), header=True)
    assert load(spark, tmp_path / "csv", {"lookup.csv.escape": "\\"}).orderBy("id").collect() == rows


@pytest.mark.parametrize("form", ["csv", "json"])
def test_what_others_have_written(spark: SparkSession, tmp_path: Path, form: str) -> None:
    """Texts, types and nulls come back as pandas, polars and DuckDB have written them."""
    texts = [text for text in TEXTS if text != ""]
    numbers = range(len(texts))
    held = {"id": list(numbers), "text": texts, "n": [1.5 + n for n in numbers], "zip": [f"0{n}" for n in numbers]}
    pandas, polars = pd.DataFrame(held), pl.DataFrame(held)
    places = [tmp_path / writer / f"a.{form}" for writer in ("pandas", "polars", "duckdb")]
    for path in places:
        path.parent.mkdir()
    if form == "csv":
        pandas.to_csv(places[0], index=False)
        polars.write_csv(places[1])
        duckdb.sql(f"COPY (SELECT * FROM polars) TO '{places[2]}' (HEADER)")
    else:
        pandas.to_json(places[0], orient="records")
        polars.write_ndjson(places[1])
        duckdb.sql(f"COPY (SELECT * FROM polars) TO '{places[2]}' (FORMAT json)")
    expected = list(zip(*held.values(), strict=True))
    for path in places:
        schema, found = collected(load(spark, path.parent))
        assert (path, schema) == (path, "struct<id:bigint,text:string,n:double,zip:string>")
        assert (path, found) == (path, expected)


def test_schemas_from_sql(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """A table that SQL creates with `lookup.schema` and a dialect has those columns, in joins and functions too."""
    (tmp_path / "a.csv").write_text("1;0150\n2;x\n")
    options = {"lookup.schema": "id INT, zip STRING", "lookup.csv.header": "false", "lookup.csv.sep": ";"}
    spark.sql(f"CREATE TABLE {name} {catalog_options(tmp_path, options)}")
    assert spark.table(name).schema.simpleString() == "struct<id:int,zip:string>"
    assert spark.sql(f"SELECT zip FROM {name} WHERE id = 1").collect() == [("0150",)]
    ids = spark.range(1, 3).selectExpr("CAST(id AS INT) AS id")
    assert lookup_join(ids, str(tmp_path), "id", options=options).orderBy("id").collect() == [(1, "0150"), (2, "x")]
    register_lookup(spark, name, str(tmp_path), key="id", options=options)
    assert spark.sql(f"SELECT {name}(2).zip").collect() == [("x",)]
