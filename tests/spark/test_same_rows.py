"""The same rows as Spark's own readers, for generated tables and generated predicates, and for text files."""

import dataclasses
import datetime
import functools
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from pyspark_lookup import LookupTable
from pyspark_lookup.spark.types import struct_type
from tests.support.fuzzing import BY_NIGHT, MORE
from tests.support.spark_columns import (
    DAY,
    DAYS,
    FOREIGN,
    NESTED,
    PRIMITIVES,
    ROWS,
    SEED,
    TEXT,
    TIMES,
    Column,
    T,
    arrow_table,
    drawn,
    whole_numbers,
)
from tests.support.spark_tables import FULL, conf, load
from tests.support.sparks import DATA_SOURCES, needs

pytestmark = [needs(DATA_SOURCES), pytest.mark.spark, pytest.mark.slow]
PREDICATES = 25 * MORE if BY_NIGHT else 8  # per table


def mix_values(values: Sequence[T], fresh: st.SearchStrategy[T]) -> st.SearchStrategy[T]:
    """Draw mostly values of the table, so that predicates match some rows."""
    present = [value for value in values if value is not None]
    return (st.sampled_from(present) | st.sampled_from(present) | fresh) if present else fresh


def quoted(text: str) -> str:
    escapes = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return "'" + "".join(escapes.get(char, char) for char in text) + "'"


def double(value: float) -> str:
    if math.isnan(value) or math.isinf(value):
        return f"CAST('{value}' AS DOUBLE)"
    return f"{value!r}D" if "e" not in repr(value) else repr(value)


def instant(value: datetime.datetime, hours: int) -> str:
    """The same instant, written in a zone `hours` from UTC."""
    shifted = value.astimezone(datetime.timezone(datetime.timedelta(hours=hours)))
    return f"TIMESTAMP '{shifted.isoformat(' ')}'"


def literals(column: Column, samples: Sequence[Any]) -> st.SearchStrategy[str]:
    """SQL literals for a column: mostly values of the table, in every spelling, and numbers outside the column's type."""
    kind, values = column.type, mix_values(samples, column.values)
    if pa.types.is_boolean(kind):
        return st.sampled_from(["true", "false"])
    if pa.types.is_integer(kind):
        most = 2**kind.bit_width
        beyond = st.sampled_from([most, -most, 2 * most, most // 2, 10**25, -(10**25)]).map(str)
        long = values.map(lambda i: f"{i}L" if abs(i) < 2**62 else str(i))
        halves = st.integers(-1000, 1000).map("{}.5".format)
        return values.map(str) | values.map("{}.00".format) | values.map(float).map(double) | long | halves | beyond
    if pa.types.is_decimal(kind):
        most, exact = 10 ** (kind.precision - kind.scale), values.map("{:f}".format)
        ways = [exact, exact, st.integers(-most + 1, most - 1).map(str), values.map(float).map(double)]
        if kind.precision < 37:  # with more, Spark rounds and lookup.where refuses
            beyond = st.sampled_from([most, -most, most + 1, 20 * most]).map(str)
            ways += [beyond, st.builds("{0:f}{1:02}".format, values, st.integers(0, 99))]
        return st.one_of(ways)
    if pa.types.is_floating(kind):
        single = values.filter(lambda v: math.isnan(v) or math.isinf(v) or abs(v) < 3e38)
        small = st.decimals(-1000, 1000, places=2, allow_nan=False).map("{:f}".format)
        specials = st.sampled_from(["0.0", "-0.0D", "CAST('NaN' AS DOUBLE)", "CAST('-Infinity' AS DOUBLE)", "0.1F"])
        cast = single.map("CAST('{!r}' AS FLOAT)".format)
        return values.map(double) | small | st.integers(-5, 2**33).map(str) | cast | specials
    if pa.types.is_binary(kind):
        return values.map(lambda b: f"X'{b.hex()}'")
    if pa.types.is_date(kind):
        return values.map("DATE '{}'".format) | values.map("'{}'".format)
    if pa.types.is_timestamp(kind):
        if kind.tz is not None:
            return st.builds(instant, values, st.sampled_from([0, 0, 1, -8, 13]))
        return st.one_of(
            values.map("TIMESTAMP_NTZ '{}'".format), values.map("'{}'".format), DAYS.map("DATE '{}'".format)
        )
    return values.map(quoted)


@dataclasses.dataclass
class Table:
    """Files in a directory, the columns they hold, and a few known values of each."""

    path: Path
    columns: list[Column]
    known: dict[str, list[Any]]


def written_by_arrow(path: Path, rng: random.Random, spark: SparkSession) -> Table:
    """Several files of small row groups, in each of the encodings pyarrow offers."""
    columns = [*PRIMITIVES, *NESTED, *FOREIGN]
    table, samples = arrow_table(columns, rng)
    path.mkdir(parents=True)
    flags = [True, False]
    choices = {
        "row_group_size": [7, 20, 80], "compression": ["snappy", "zstd", "gzip", "none"], "use_dictionary": flags,
        "version": ["1.0", "2.6"], "data_page_version": ["1.0", "2.0"], "store_decimal_as_integer": flags,
        "write_statistics": [*[True] * 4, False],
    }  # fmt: skip
    for start in range(0, ROWS, 80):
        how = {name: rng.choice(values) for name, values in choices.items()}
        pq.write_table(table.slice(start, 80), path / f"part-{start}.parquet", **how)
    return Table(path, columns, samples)


def written_in_partitions(path: Path, rng: random.Random, spark: SparkSession) -> Table:
    """Hive directories of an integer, a date and a text column, with nulls and characters that are escaped."""
    columns = PRIMITIVES[:12]
    table, samples = arrow_table(columns, rng)
    null = "__HIVE_DEFAULT_PARTITION__"
    days, towns = ["2024-01-01", "2024-02-29"], ["Bonn %2F Beuel", "a%3Db", null]
    places = list(itertools.product(["-7", "2024", null], days, towns))
    for number, (year, day, town) in enumerate(places):
        directory = path / f"year={year}" / f"day of={day}" / f"Town={town}"
        directory.mkdir(parents=True)
        start, end = (ROWS * n // len(places) for n in (number, number + 1))
        pq.write_table(table.slice(start, end - start), directory / "data.parquet", row_group_size=5)
    partitions: dict[Column, list[Any]] = {
        Column("year", pa.int32(), whole_numbers(32)): [-7, 2024],
        Column("day of", pa.date32(), DAYS): [datetime.date(2024, 1, 1), datetime.date(2024, 2, 29)],
        Column("Town", pa.string(), TEXT): ["Bonn / Beuel", "a=b"],
    }
    return Table(
        path,
        [*columns, *partitions],
        samples | {column.name: column_values for column, column_values in partitions.items()},
    )


def written_by_spark(path: Path, rng: random.Random, spark: SparkSession, timestamps: str) -> Table:
    """Files as Spark writes them; INT96 timestamps among them."""
    columns = [*PRIMITIVES, *NESTED]
    table, samples = arrow_table(columns, rng)
    with conf(spark, "spark.sql.parquet.outputTimestampType", timestamps):
        frame = spark.createDataFrame(table, struct_type(table.schema)).repartitionByRange(2, "row_id")
        frame.write.option("parquet.block.size", "4096").option("parquet.page.size", "512").parquet(str(path))
    return Table(path, columns, samples)


def leaves(table: Table) -> st.SearchStrategy[str]:
    """A comparison of one column, in every form that `lookup.where` accepts."""
    compared = [c for c in table.columns if c.compared]
    comparisons = [_comparisons(c, table.known[c.name]) for c in compared]
    kinds = ("IS NULL", "IS NOT NULL")
    nulls = st.sampled_from([f"{c.sql} {kind}" for c in table.columns for kind in kinds])
    nulls |= st.sampled_from([f"{c.sql} <=> NULL" for c in compared])
    constants = st.sampled_from(["true", "false", "(NULL AND true)"])
    return st.sampled_from(range(12)).flatmap(
        lambda n: constants if n == 0 else nulls if n <= 2 else st.one_of(comparisons)
    )


def _comparisons(column: Column, samples: Sequence[Any]) -> st.SearchStrategy[str]:
    literal = literals(column, samples)
    several = st.lists(literal | literal | st.just("NULL"), min_size=1, max_size=4).map(", ".join)
    negation = st.sampled_from(["", "NOT "])
    operators = ["=", "==", "<>", "!=", "<", "<=", ">", ">="]

    def built(form: str, *parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.builds(form.format, st.just(column.sql), *parts)

    ways = [
        built("{0} {1} {2}", st.sampled_from(operators), literal),
        built("{2} {1} {0}", st.sampled_from(operators), literal),
        built("{0} <=> {1}", literal),
        built("{0} {1}IN ({2})", negation, several),
        built("{0} {1}BETWEEN {2} AND {3}", negation, literal, literal),
    ]
    if column.values is TEXT:
        prefix = mix_values(list(samples), TEXT).map(lambda t: "".join(c for c in t[:2] if c not in "%_\\"))
        ways.append(built("{0} {1}LIKE {2}", negation, prefix.map(lambda p: quoted(p + "%"))))
    if pa.types.is_boolean(column.type):
        ways.append(st.just(column.sql.upper()))
    return st.one_of(ways)


def predicates(table: Table) -> st.SearchStrategy[str]:
    """Comparisons combined by AND, OR and NOT."""

    def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        two = st.builds("({0} {1} {2})".format, inner, st.sampled_from(["AND", "OR"]), inner)
        return two | st.builds("NOT ({0})".format, inner) | st.builds("{0} AND NOT {1}".format, inner, inner)

    return st.recursive(leaves(table), combined, max_leaves=4)


def hits_of_frames(frames: Sequence[DataFrame]) -> list[set[int]]:
    """Return the row ids of each frame; up to 45 frames share a Spark job."""
    if not frames:
        return []
    batch = frames[:45]
    for number, frame in enumerate(batch):
        frame.createOrReplaceTempView(f"q{number}")
    parts = (f"SELECT {number} AS q, row_id FROM q{number}" for number in range(len(batch)))
    answers = batch[0].sparkSession.sql(" UNION ALL ".join(parts)).toArrow().to_pydict()
    pairs = list(zip(answers["q"], answers["row_id"], strict=True))
    assert len(pairs) == len(set(pairs)), "a row twice"
    row_ids = [{row_id for q, row_id in pairs if q == number} for number in range(len(batch))]
    return row_ids + hits_of_frames(frames[45:])


def rows_by_id(table: pa.Table) -> dict[int, str]:
    """Rows as text, in which NaN equals itself, and -0.0 does not equal 0.0."""
    rows = {row["row_id"]: repr(row) for row in table.to_pylist()}
    assert len(rows) == table.num_rows == ROWS
    return rows


WRITERS: dict[str, Callable[[Path, random.Random, SparkSession], Table]] = {
    **dict.fromkeys(["arrow-1", "arrow-2", "arrow-3"][: 3 if MORE > 1 else 1], written_by_arrow),
    "partitions": written_in_partitions,
    "spark-micros": functools.partial(written_by_spark, timestamps="TIMESTAMP_MICROS"),
}
if BY_NIGHT:  # by day test_stored_times has these times
    WRITERS["spark-int96"] = functools.partial(written_by_spark, timestamps="INT96")


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Table]]:
    """Each table, written once."""
    root = tmp_path_factory.mktemp("same_rows")
    # With pushdown, Spark's own reader misses rows of -0.0 in row groups whose dictionary lacks 0.0.
    with conf(spark, "spark.sql.parquet.filterPushdown", "false"):
        yield {name: write(root / name, random.Random(f"{SEED} {name}"), spark) for name, write in WRITERS.items()}


def generated(name: str, table: Table) -> list[str]:
    return list(dict.fromkeys(drawn(predicates(table), PREDICATES, f"predicates of {name}")))


@pytest.mark.parametrize("name", WRITERS)
def test_whole_tables_are_equal(name: str, tables: dict[str, Table], spark: SparkSession, tmp_path: Path) -> None:
    """Scans of whole tables, in Spark and without it, return the values and types that Spark reads, also from a copy that this package wrote."""
    path, copy = str(tables[name].path), str(tmp_path / "copy")
    spark_frame = spark.read.parquet(path)
    spark_frame.write.format("lookupcache").mode("append").save(copy)
    whole = spark_frame.toArrow()
    results = [LookupTable(path, options).scan().cast(whole.schema) for options in ({}, FULL)]
    for actual in (load(spark, path), load(spark, copy)):
        assert actual.dtypes == spark_frame.dtypes
        results.append(actual.toArrow())
    for rows in results:
        assert rows_by_id(rows) == rows_by_id(whole), f"seed {SEED}"


def test_predicates_answer_as_spark_does(tables: dict[str, Table], spark: SparkSession) -> None:
    """Generated predicates select the same rows as in Spark, from files, some of which they prune, and from full caches."""
    compared = pruned = probed = 0
    for name, table in tables.items():
        texts = generated(name, table)
        spark_frame = spark.read.parquet(str(table.path))
        expected = dict(zip(texts, hits_of_frames([spark_frame.where(text) for text in texts]), strict=True))
        keys = [column.sql for column in table.columns if column.compared]
        for key in ["", *keys]:
            with LookupTable(str(table.path), {"lookup.keys": key, **FULL} if key else {}) as lookup_table:
                for text in [text for text in texts if key in text]:
                    row_ids = lookup_table.scan(columns=["row_id"], predicate=text).column("row_id").to_pylist()
                    assert sorted(row_ids) == sorted(expected[text]), f"seed {SEED}, table {name}, key {key}: {text}"
                    probed += bool(key)
                metrics = lookup_table.metrics()
            assert metrics["snapshotReadThroughCount"] == 0
            pruned += 0 if key else metrics["rowGroupsPrunedCount"]
        assert name != "partitions" or metrics["filesPrunedCount"] > 0
        compared += len(texts)
    assert min(compared, pruned, probed) >= len(tables) * PREDICATES * 5 // 6


CELLS = ["plain", "", None, 'a "quoted" word', "comma, semicolon; tab\t", "two\nlines", "back\\slash", "end\\", 'both \\" of them', "ü 漢 🙂", " spaces ", "NA", "null", "'", "1e3"]  # fmt: skip
CELL_TYPES = "id INT, text STRING, n DECIMAL(12, 3), d DOUBLE, day DATE, at TIMESTAMP, ok BOOLEAN"
TEXT_COLUMNS = {
    "text": st.sampled_from(CELLS),
    "n": st.none() | st.decimals(-(10**6), 10**6, places=3).map("{:f}".format),
    "d": st.none() | st.floats(-1e6, 1e6).map(repr) | st.integers(0, 100).map(str),
    "day": st.none() | st.dates(DAY, datetime.date(2030, 1, 1)).map(str),
    "at": st.none() | st.builds("{}{}".format, TIMES.map(datetime.datetime.isoformat), st.sampled_from(["Z", "+02:00", "-11:30"])),
    "ok": st.sampled_from([None, "true", "false"]),
}  # fmt: skip


def rows_of_text(number: int) -> list[dict[str, Any]]:
    """Generated rows, whose values are text or null."""
    rows = drawn(st.tuples(*TEXT_COLUMNS.values()), 60, f"text {number}")
    return [{"id": 100 * number + n, **dict(zip(TEXT_COLUMNS, row, strict=True))} for n, row in enumerate(rows)]


def format_csv(rows: list[dict[str, Any]], sep: str) -> str:
    """A CSV file in which every value is quoted, and null is empty."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    quoted = [["" if value is None else '"' + str(value).replace('"', '""') + '"' for value in line] for line in lines]
    return "".join(f"{sep.join(line)}\n" for line in quoted)


def collected(df: DataFrame) -> tuple[str, list[Any]]:
    return df.schema.simpleString(), sorted(df.collect(), key=lambda row: int(row.id))


def test_csv_is_read_as_spark_reads_it(spark: SparkSession, tmp_path: Path) -> None:
    """A table of several generated files: as text without inference, or parsed to a schema. No text is empty, because Spark does not read such texts."""
    sep = ";"
    for number in range(3):
        rows = [row for row in rows_of_text(number) if row["text"] != ""]
        (tmp_path / f"{number}.csv").write_text(format_csv(rows, sep))
    by_lookup = spark.read.format("lookupcache").options(**{"lookup.csv.sep": sep, "lookup.csv.infer-schema": "false"})
    by_spark = spark.read.options(sep=sep, header=True, multiLine=True, escape='"', nullValue="")
    assert collected(by_lookup.load(str(tmp_path))) == collected(by_spark.csv(str(tmp_path)))
    typed, by_spark = by_lookup.schema(CELL_TYPES).load(str(tmp_path)), by_spark.schema(CELL_TYPES).csv(str(tmp_path))
    assert collected(typed) == collected(by_spark)


def test_json_is_read_as_spark_reads_it(spark: SparkSession, tmp_path: Path) -> None:
    """A table of several generated files of JSON lines, with nested values."""
    schema = f"{CELL_TYPES}, half STRING, nested STRUCT<tags: ARRAY<STRING>, counts: MAP<STRING, BIGINT>>"
    for seed in range(3):
        lines = []
        for number, row in enumerate(rows_of_text(seed)):
            numbers = {name: json.loads(row[name]) for name in ("d", "ok") if row[name] is not None}
            nested = [None, {"tags": ["a", None]}, {"counts": {"x": number}}, {"tags": [], "more": 1}][number % 4]
            exact = "" if row["n"] is None else f', "n": {row["n"]}'
            # Halves of UTF-16 surrogate pairs.
            half = ["\ud83d", "\ude00\ud83d", "x\ud83d\\", "\U0001f600\ude00"][number % 4]
            plain = json.dumps({**row, **numbers, "half": half, "nested": nested, "n": None})[:-1]
            lines.append(plain.replace(', "n": null', exact) + "}")
        (tmp_path / f"{seed}.json").write_text("\n".join(lines))
    actual, expected = (spark.read.format(form).schema(schema).load(str(tmp_path)) for form in ("lookupcache", "json"))
    assert collected(actual) == collected(expected)
