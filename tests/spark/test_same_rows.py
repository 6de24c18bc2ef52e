"""The same rows as Spark's own reader, for generated tables and generated predicates."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from pyspark_lookup import LookupTable
from pyspark_lookup.spark.types import struct_type
from tests.fuzzing import MORE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

T = TypeVar("T")
SEED = int(os.environ.get("LOOKUPCACHE_TEST_SEED", "20240131"))
ROWS = 240
PREDICATES = 25 * MORE  # per table
THROUGH_SPARK = 4 * MORE  # of them, per table and way
PUSHED = 4 * MORE
UTC = datetime.timezone.utc


def drawn(strategy: st.SearchStrategy[T], count: int, salt: str) -> list[T]:
    """`count` values of a strategy, the same for the same seed and salt."""
    found: list[T] = []

    @hypothesis.seed(f"{SEED} {salt}")
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def collect(value: T) -> None:
        found.append(value)

    collect()
    return found


# --- literals: a value as Spark SQL writes it -----------------------------------------------------


def quoted(text: str) -> str:
    escapes = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return "'" + "".join(escapes.get(char, char) for char in text) + "'"


def double(value: float) -> str:
    if math.isnan(value) or math.isinf(value):
        return f"CAST('{value}' AS DOUBLE)"
    return f"{value!r}D" if "e" not in repr(value) else repr(value)


def exact(value: decimal.Decimal) -> str:
    return format(value, "f")


def date(value: datetime.date) -> str:
    return f"DATE '{value.isoformat()}'"


def instant(value: datetime.datetime, hours: int = 0) -> str:
    """The same instant, written in a zone `hours` from UTC."""
    shifted = value.astimezone(datetime.timezone(datetime.timedelta(hours=hours)))
    return f"TIMESTAMP '{shifted.isoformat(' ')}'"


def wall_clock(value: datetime.datetime) -> str:
    return f"TIMESTAMP_NTZ '{value.isoformat(' ')}'"


# --- columns --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Column:
    """A column's name and type, values for its rows, and SQL literals to compare them with (None: only IS NULL)."""

    name: str
    type: pa.DataType
    values: st.SearchStrategy[Any]
    literals: Callable[[Sequence[Any]], st.SearchStrategy[str]] | None
    text: bool = False

    @property
    def sql(self) -> str:
        return f"`{self.name}`"


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x1a\b"), max_size=4) | st.sampled_from(
    ["", "a", "ab", "abc", "b", "é", "éa", "z", "\U0001f600", "\uffff", "it's", "a\\b", "a%b", "a_b", " a", "A", "\0"]
)
DAYS = st.dates(datetime.date(1, 1, 3), datetime.date(9999, 12, 28)) | st.dates(
    datetime.date(2024, 1, 1), datetime.date(2024, 1, 9)
)
TIMES = st.datetimes(datetime.datetime(1901, 1, 1), datetime.datetime(2200, 1, 1)) | st.datetimes(
    datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 2)
)
HOURS = st.sampled_from([0, 0, 1, -8, 13])


def either(values: Sequence[T], fresh: st.SearchStrategy[T]) -> st.SearchStrategy[T]:
    """Mostly values of the table, so that predicates have answers."""
    known = [value for value in values if value is not None]
    return (st.sampled_from(known) | st.sampled_from(known) | fresh) if known else fresh


def whole_numbers(bits: int) -> st.SearchStrategy[int]:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return st.integers(low, high) | st.integers(-3, 3) | st.sampled_from([low, low + 1, high - 1, high])


def integer_literals(values: Sequence[int], bits: int) -> st.SearchStrategy[str]:
    near = either(values, whole_numbers(bits))
    outside = st.sampled_from([2**bits, -(2**bits), 2 ** (bits - 1), 10**25, -(10**25)])
    halves = st.builds(lambda i: f"{i}.5", st.integers(-1000, 1000))
    return st.one_of(
        near.map(str), near.map(str), near.map(str), outside.map(str), halves, near.map(lambda i: f"{i}.00"),
        near.map(float).map(double), near.map(lambda i: f"{i}L" if abs(i) < 2**62 else str(i)),
    )  # fmt: skip


def decimal_literals(values: Sequence[decimal.Decimal], precision: int, scale: int) -> st.SearchStrategy[str]:
    near = either(values, decimals(precision, scale))
    most = 10 ** (precision - scale)
    whole = st.integers(-most + 1, most - 1)
    ways = [near.map(exact), near.map(exact), whole.map(str), near.map(float).map(double)]
    if precision < 37:  # with more, Spark rounds and lookup.where refuses
        ways.append(st.sampled_from([most, -most, most + 1, 20 * most]).map(str))
        ways.append(st.builds(lambda v, d: f"{exact(v)}{d:02}", near, st.integers(0, 99)))
    return st.one_of(ways)


def decimals(precision: int, scale: int) -> st.SearchStrategy[decimal.Decimal]:
    most = 10**precision - 1
    digits = st.integers(-most, most) | st.integers(-300, 300) | st.sampled_from([most, -most, 0])
    return digits.map(lambda d: decimal.Decimal(d).scaleb(-scale, decimal.Context(prec=60)))


def float_literals(values: Sequence[float]) -> st.SearchStrategy[str]:
    near = either(values, st.floats(width=32))
    small = st.decimals(-1000, 1000, places=2, allow_nan=False)
    single = near.filter(lambda v: math.isnan(v) or math.isinf(v) or abs(v) < 3e38)
    return st.one_of(
        near.map(double), near.map(double), small.map(exact), st.integers(-5, 2**33).map(str),
        single.map(lambda v: f"CAST('{v!r}' AS FLOAT)"),
        st.sampled_from(["0.0", "-0.0D", "CAST('NaN' AS DOUBLE)", "CAST('-Infinity' AS DOUBLE)", "0.1F"]),
    )  # fmt: skip


def integers(name: str, bits: int, kind: pa.DataType | None = None) -> Column:
    return Column(
        name, kind or getattr(pa, f"int{bits}")(), whole_numbers(bits), lambda known: integer_literals(known, bits)
    )


def numbers(name: str, precision: int, scale: int) -> Column:
    return Column(
        name,
        pa.decimal128(precision, scale),
        decimals(precision, scale),
        lambda known: decimal_literals(known, precision, scale),
    )


def times(name: str, zone: str | None) -> Column:
    if zone is None:
        return Column(
            name,
            pa.timestamp("us"),
            TIMES,
            lambda known: st.one_of(
                either(known, TIMES).map(wall_clock),
                either(known, TIMES).map(lambda v: f"'{v.isoformat(' ')}'"),
                DAYS.map(date),
            ),
        )
    zoned = TIMES.map(lambda t: t.replace(tzinfo=UTC))
    return Column(name, pa.timestamp("us", zone), zoned, lambda known: st.builds(instant, either(known, zoned), HOURS))


def strings(name: str, kind: pa.DataType) -> Column:
    return Column(name, kind, TEXT, lambda known: either(known, TEXT).map(quoted), text=True)


PRIMITIVES = [
    Column("flag", pa.bool_(), st.booleans(), lambda known: st.sampled_from(["true", "false"])),
    integers("tiny", 8),
    integers("small", 16),
    integers("plain", 32),
    integers("Big Number", 64),
    Column("single", pa.float32(), st.floats(width=32), float_literals),
    Column("double", pa.float64(), st.floats() | st.sampled_from([0.0, -0.0, math.nan, 0.1]), float_literals),
    numbers("money", 9, 2),
    numbers("precise", 18, 6),
    numbers("huge", 38, 10),
    strings("name", pa.string()),
    Column(
        "bytes",
        pa.binary(),
        st.binary(max_size=3),
        lambda known: either(known, st.binary(max_size=3)).map(lambda b: f"X'{b.hex()}'"),
    ),
    Column("day", pa.date32(), DAYS, lambda known: either(known, DAYS).flatmap(
        lambda d: st.sampled_from([date(d), f"'{d.isoformat()}'"]))),
    times("at", "UTC"),
    times("wall.clock", None),
]  # fmt: skip

NESTED = [
    Column("pair", pa.struct([("x", pa.int32()), ("y", pa.string())]),
           st.fixed_dictionaries({"x": st.none() | whole_numbers(32), "y": st.none() | TEXT}), None),
    Column("list", pa.list_(pa.int64()), st.lists(st.none() | whole_numbers(64), max_size=3), None),
    Column("map", pa.map_(pa.string(), pa.float64()),
           st.dictionaries(TEXT, st.none() | st.floats(), max_size=2).map(lambda d: list(d.items())), None),
    Column("deep", pa.list_(pa.struct([("at", pa.timestamp("us", "UTC")), ("tags", pa.map_(pa.string(), pa.list_(pa.date32())))])),
           st.lists(st.none() | st.fixed_dictionaries({
               "at": st.none() | TIMES.map(lambda t: t.replace(tzinfo=UTC)),
               "tags": st.none() | st.dictionaries(TEXT, st.lists(st.none() | DAYS, max_size=2), max_size=2).map(lambda d: list(d.items())),
           }), max_size=2), None),
]  # fmt: skip

# Types that Arrow writes and Spark does not, but reads.
FOREIGN = [
    integers("u8", 16, pa.uint8()),
    integers("u16", 32, pa.uint16()),
    integers("u32", 64, pa.uint32()),
    strings("long text", pa.large_string()),
    strings("codes", pa.dictionary(pa.int16(), pa.string())),
    times("paris", "Europe/Paris"),
    Column("list of long text", pa.large_list(pa.large_string()), st.lists(st.none() | TEXT, max_size=2), None),
]


# --- tables ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Table:
    """Files in a directory, the columns they hold, and a few known values of each."""

    path: Path
    columns: list[Column]
    known: dict[str, list[Any]]


def column_values(column: Column, rows: int, rng: random.Random) -> tuple[list[Any], list[Any]]:
    """(values of the rows with nulls among them, the distinct ones they are taken from)."""
    values = column.values
    if pa.types.is_unsigned_integer(column.type):
        values = st.integers(0, 2**column.type.bit_width - 1)
    pool = drawn(values, 14, f"values of {column.name} {rng.random()}")
    nulls = rng.choice([0.0, 0.1, 0.1, 0.6])
    picked = [None if rng.random() < nulls else rng.choice(pool) for _ in range(rows)]
    return picked, pool


def arrow_table(columns: Sequence[Column], rng: random.Random) -> tuple[pa.Table, dict[str, list[Any]]]:
    arrays, known = {"row_id": pa.array(range(ROWS))}, {}
    for column in columns:
        values, known[column.name] = column_values(column, ROWS, rng)
        arrays[column.name] = pa.array(values, column.type)
    table = pa.table(arrays)
    ordered = rng.choice([c.name for c in columns if c.literals and not pa.types.is_dictionary(c.type)])
    # Sorted by one column, so that the bounds of row groups differ and prune.
    order = pa.compute.sort_indices(table, [(ordered, "ascending")])
    shuffled = table.take(order)
    return shuffled.set_column(0, "row_id", pa.array(range(ROWS))), known


def written_by_arrow(path: Path, rng: random.Random) -> Table:
    """Several files of small row groups, in each of the encodings pyarrow offers."""
    columns = [*PRIMITIVES, *NESTED, *FOREIGN]
    table, known = arrow_table(columns, rng)
    path.mkdir(parents=True)
    for number, start in enumerate(range(0, ROWS, 80)):
        pq.write_table(
            table.slice(start, 80),
            path / f"part-{number}.parquet",
            row_group_size=rng.choice([7, 20, 80]),
            compression=rng.choice(["snappy", "zstd", "gzip", "none"]),
            use_dictionary=rng.choice([True, False]),
            version=rng.choice(["1.0", "2.6"]),
            data_page_version=rng.choice(["1.0", "2.0"]),
            store_decimal_as_integer=rng.choice([True, False]),
            write_statistics=rng.random() < 0.8,
        )
    return Table(path, columns, known)


def written_in_partitions(path: Path, rng: random.Random) -> Table:
    """Hive directories of an integer, a date and a text column, with nulls and characters that are escaped."""
    columns = PRIMITIVES[:12]
    table, known = arrow_table(columns, rng)
    places = [
        (year, day, town)
        for year in ("-7", "2024", "__HIVE_DEFAULT_PARTITION__")
        for day in ("2024-01-01", "2024-02-29")
        for town in ("Bonn %2F Beuel", "a%3Db", "__HIVE_DEFAULT_PARTITION__")
    ]
    for number, (year, day, town) in enumerate(places):
        directory = path / f"year={year}" / f"day of={day}" / f"Town={town}"
        directory.mkdir(parents=True)
        some = table.slice(
            number * ROWS // len(places), (number + 1) * ROWS // len(places) - number * ROWS // len(places)
        )
        pq.write_table(some, directory / "data.parquet", row_group_size=5)
    years, days = [-7, 2024], [datetime.date(2024, 1, 1), datetime.date(2024, 2, 29)]
    partitions = [
        integers("year", 32),
        Column("day of", pa.date32(), DAYS, lambda known: either(known, DAYS).map(date)),
        strings("Town", pa.string()),
    ]
    towns = ["Bonn / Beuel", "a=b"]
    return Table(path, [*columns, *partitions], known | {"year": years, "day of": days, "Town": towns})


def written_by_spark(path: Path, rng: random.Random, spark: SparkSession, timestamps: str) -> Table:
    """Files as Spark writes them; INT96 timestamps among them."""
    columns = [*PRIMITIVES, *NESTED]
    table, known = arrow_table(columns, rng)
    spark.conf.set("spark.sql.parquet.outputTimestampType", timestamps)
    try:
        frame = spark.createDataFrame(table, struct_type(table.schema)).repartitionByRange(2, "row_id")
        frame.write.option("parquet.block.size", "4096").option("parquet.page.size", "512").parquet(str(path))
    finally:
        spark.conf.unset("spark.sql.parquet.outputTimestampType")
    return Table(path, columns, known)


# --- predicates -----------------------------------------------------------------------------------


def leaves(table: Table) -> st.SearchStrategy[str]:
    """A comparison of one column, in each of the ways `lookup.where` knows."""
    compared = [c for c in table.columns if c.literals is not None]
    each = [_comparisons(c, table.known[c.name]) for c in compared]
    nulls = st.sampled_from(table.columns).flatmap(
        lambda c: st.sampled_from([f"{c.sql} IS NULL", f"{c.sql} IS NOT NULL"])
    ) | st.sampled_from([f"{c.sql} <=> NULL" for c in compared])
    constants = st.sampled_from(["true", "false", "(NULL AND true)"])
    return st.sampled_from(range(12)).flatmap(lambda n: constants if n == 0 else nulls if n <= 2 else st.one_of(each))


def _comparisons(column: Column, known: Sequence[Any]) -> st.SearchStrategy[str]:
    assert column.literals is not None
    literal = column.literals([value for value in known if value is not None])
    listed = st.lists(literal | literal | st.just("NULL"), min_size=1, max_size=4).map(", ".join)
    negation = st.sampled_from(["", "NOT "])
    ways = [
        st.builds("{0} {1} {2}".format, st.just(column.sql), st.sampled_from(["=", "==", "<>", "!=", "<", "<=", ">", ">="]), literal),
        st.builds("{0} {1} {2}".format, literal, st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), st.just(column.sql)),
        st.builds("{0} <=> {1}".format, st.just(column.sql), literal),
        st.builds("{0} {1}IN ({2})".format, st.just(column.sql), negation, listed),
        st.builds("{0} {1}BETWEEN {2} AND {3}".format, st.just(column.sql), negation, literal, literal),
    ]  # fmt: skip
    if column.text:
        prefix = either(list(known), TEXT).map(lambda t: "".join(c for c in t[:2] if c not in "%_\\"))
        ways.append(
            st.builds("{0} {1}LIKE {2}".format, st.just(column.sql), negation, prefix.map(lambda p: quoted(p + "%")))
        )
    if pa.types.is_boolean(column.type):
        ways.append(st.just(column.sql.upper()))
    return st.one_of(ways)


def predicates(table: Table) -> st.SearchStrategy[str]:
    """Leaves under AND, OR and NOT."""

    def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        two = st.builds("({0} {1} {2})".format, inner, st.sampled_from(["AND", "OR"]), inner)
        return two | st.builds("NOT ({0})".format, inner) | st.builds("{0} AND NOT {1}".format, inner, inner)

    return st.recursive(leaves(table), combined, max_leaves=4)


# --- comparison -----------------------------------------------------------------------------------


def hits_of_frames(frames: Sequence[DataFrame]) -> list[set[int]]:
    """The row ids of each frame, all in one Spark job."""
    for number, frame in enumerate(frames):
        frame.createOrReplaceTempView(f"q{number}")
    found: list[set[int]] = [set() for _ in frames]
    parts = (f"SELECT {number} AS q, row_id FROM q{number}" for number in range(len(frames)))
    answers = frames[0].sparkSession.sql(" UNION ALL ".join(parts)).toArrow()
    for q, row_id in zip(answers.column("q").to_pylist(), answers.column("row_id").to_pylist(), strict=True):
        assert row_id not in found[q], "a row twice"
        found[q].add(row_id)
    return found


def plain(value: Any) -> Any:
    """A value under which NaN equals itself, and -0.0 does not equal 0.0."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else (math.copysign(1.0, value), value)
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def rows_by_id(table: pa.Table) -> dict[int, Any]:
    found = {row["row_id"]: plain(row) for row in table.to_pylist()}
    assert len(found) == table.num_rows
    return found


def differences(ours: pa.Table, theirs: pa.Table) -> list[tuple[int, str, Any, Any]]:
    """Where two tables differ: (row id, column, ours, theirs)."""
    found, expected = rows_by_id(ours), rows_by_id(theirs)
    assert found.keys() == expected.keys()
    return [
        (row_id, name, found[row_id][name], value)
        for row_id, row in expected.items()
        for name, value in row.items()
        if found[row_id][name] != value
    ]


MAKERS: dict[str, Callable[[Path, random.Random, Any], Table]] = {
    "arrow-1": lambda path, rng, spark: written_by_arrow(path, rng),
    "arrow-2": lambda path, rng, spark: written_by_arrow(path, rng),
    "arrow-3": lambda path, rng, spark: written_by_arrow(path, rng),
    "partitions": lambda path, rng, spark: written_in_partitions(path, rng),
    "spark-int96": lambda path, rng, spark: written_by_spark(path, rng, spark, "INT96"),
    "spark-micros": lambda path, rng, spark: written_by_spark(path, rng, spark, "TIMESTAMP_MICROS"),
}


if MORE == 1:  # by day
    for number in "23":
        del MAKERS[f"arrow-{number}"]


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Table]]:
    """Each table, written once."""
    root = tmp_path_factory.mktemp("same_rows")
    # With it, Spark's reader drops rows of -0.0 where a row group's dictionary says they are not 0.0.
    spark.conf.set("spark.sql.parquet.filterPushdown", "false")
    yield {name: make(root / name, random.Random(f"{SEED} {name}"), spark) for name, make in MAKERS.items()}
    spark.conf.unset("spark.sql.parquet.filterPushdown")


def generated(name: str, table: Table) -> list[str]:
    return list(dict.fromkeys(drawn(predicates(table), PREDICATES, f"predicates of {name}")))


@pytest.mark.parametrize("name", MAKERS)
def test_whole_tables_are_equal(name: str, tables: dict[str, Table], spark: SparkSession) -> None:
    """Every value of every row is Spark's, through Spark and without it, and so are the column types."""
    table = tables[name]
    theirs, ours = spark.read.parquet(str(table.path)), spark.read.format("lookupcache").load(str(table.path))
    assert ours.dtypes == theirs.dtypes
    expected = theirs.toArrow()
    assert expected.num_rows == ROWS
    assert not differences(ours.toArrow(), expected)
    assert not differences(LookupTable(str(table.path)).scan(), expected)
    assert not differences(LookupTable(str(table.path), {"lookup.cache": "FULL"}).scan(), expected)


def test_predicates_answer_as_spark_does(tables: dict[str, Table], spark: SparkSession) -> None:
    """Generated predicates select the rows that Spark's reader gives, and some of them prune."""
    compared = pruned = probed = 0
    for name, table in tables.items():
        texts = generated(name, table)
        theirs = spark.read.parquet(str(table.path))
        expected: list[set[int]] = []
        for start in range(0, len(texts), 45):
            expected += hits_of_frames([theirs.where(text) for text in texts[start : start + 45]])
        with LookupTable(str(table.path)) as ours:
            for text, rows in zip(texts, expected, strict=True):
                found = ours.scan(columns=["row_id"], predicate=text).column("row_id").to_pylist()
                assert len(found) == len(set(found)), f"seed {SEED}, table {name}: a row twice for {text}"
                assert set(found) == rows, f"seed {SEED}, table {name}: {text}"
            metrics = ours.metrics()
            pruned += metrics["rowGroupsPrunedCount"]
            if name == "partitions":
                assert metrics["filesPrunedCount"] > 0
            probed += from_snapshots(name, table, dict(zip(texts, expected, strict=True)))
        compared += len(texts)
    print(f"seed {SEED}: {compared} predicates compared, {pruned} row groups pruned, {probed} asked of snapshots")
    assert min(compared, pruned, probed) >= len(tables) * PREDICATES * 5 // 6


def from_snapshots(name: str, table: Table, expected: Mapping[str, set[int]]) -> int:
    """Ask the full caches over each column as key for the predicates that name it; how many that were."""
    asked = 0
    for column in table.columns:
        if column.literals is None:
            continue
        options = {"lookup.keys": f"`{column.name}`", "lookup.cache": "FULL"}
        with LookupTable(str(table.path), options) as full:
            for text in [text for text in expected if column.sql in text]:
                found = full.scan(columns=["row_id"], predicate=text).column("row_id").to_pylist()
                assert sorted(found) == sorted(expected[text]), f"seed {SEED}, table {name}, key {column.name}: {text}"
                asked += 1
            assert full.metrics()["snapshotReadThroughCount"] == 0
    return asked


@pytest.mark.parametrize("way", ["where", "filter", "both"])
def test_predicates_answer_alike_in_spark(way: str, tables: dict[str, Table], spark: SparkSession) -> None:
    """`lookup.where`, a Spark filter above a read, and both at once select the rows that Spark's reader gives."""
    compared = 0
    for name, table in tables.items():
        texts = generated(name, table)[-THROUGH_SPARK:]
        pairs = list(zip(texts, reversed(texts), strict=True))
        theirs = spark.read.parquet(str(table.path))
        whole = spark.read.format("lookupcache").load(str(table.path))

        def read(text: str, path: Path = table.path) -> DataFrame:
            return spark.read.format("lookupcache").option("lookup.where", text).load(str(path))

        if way == "where":
            ours = [read(one) for one, _ in pairs]
        elif way == "filter":
            ours = [whole.where(one) for one, _ in pairs]
        else:
            ours = [read(one).where(other) for one, other in pairs]
        expected = [theirs.where(one).where(other if way == "both" else "true") for one, other in pairs]
        for pair, found, rows in zip(pairs, hits_of_frames(ours), hits_of_frames(expected), strict=True):
            assert found == rows, f"seed {SEED}, table {name}, {way}: {pair}"
        compared += len(pairs)
    print(f"seed {SEED}: {compared} predicates compared by {way}")
    assert compared >= len(tables) * THROUGH_SPARK * 5 // 6


def test_pushed_filters_answer_as_spark_does(tables: dict[str, Table], spark: SparkSession) -> None:
    """With `lookup.filter-pushdown`, what Spark pushes prunes row groups and loses no row."""
    compared = pruned = 0
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        for name, table in tables.items():
            parts = drawn(leaves(table), 2 * PUSHED, f"pushed to {name}")
            texts = [f"({one}) AND ({other})" for one, other in zip(parts[::2], parts[1::2], strict=False)]
            theirs = spark.read.parquet(str(table.path))
            before = LookupTable(str(table.path)).metrics()
            # Each read is loaded for itself: until Spark 5.0 the scans of one relation share what was pushed to any.
            reader = spark.read.format("lookupcache").option("lookup.filter-pushdown", "true")
            ours = [reader.load(str(table.path)).where(text) for text in texts]
            expected = [theirs.where(text) for text in texts]
            for text, found, rows in zip(texts, hits_of_frames(ours), hits_of_frames(expected), strict=True):
                assert found == rows, f"seed {SEED}, table {name}, pushed: {text}"
            after = LookupTable(str(table.path)).metrics()
            pruned += after["rowGroupsPrunedCount"] - before["rowGroupsPrunedCount"]
            compared += len(texts)
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    print(f"seed {SEED}: {compared} pushed predicates compared, {pruned} row groups pruned")
    assert min(compared, pruned) >= len(tables) * PUSHED * 2 // 3
