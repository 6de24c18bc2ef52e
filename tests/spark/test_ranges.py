"""`lookup_join` by ranges, networks and prefixes, beside Spark's own joins on the same conditions and Python's `ipaddress`."""

from __future__ import annotations

import ipaddress
import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from pyspark_lookup import LookupTable, explain_lookup, lookup_join, register_lookup
from pyspark_lookup.errors import OptionError, SchemaError
from pyspark_lookup.spark import features
from tests.support.fuzzing import BY_NIGHT
from tests.support.lake_tables import MODES
from tests.support.spark_tables import catalog_options, collect_batches, conf
from tests.support.sparks import DATA_SOURCES, needs

pytestmark = pytest.mark.spark
FULL = MODES["full"]
# The type of the bounds, that of the values, and a value made of a number from 0 to 40.
TYPES = {
    "int": ("int", "long", "{} - 20"),
    "decimal": ("decimal(10,2)", "decimal(20,4)", "{} / 4 - 3"),
    "double": (
        "double",
        "double",
        "CASE WHEN {0} = 39 THEN double('NaN') WHEN {0} = 0 THEN -0.0D ELSE {0} / 3D - 4 END",
    ),
    "date": ("date", "date", "date_add(DATE'1969-12-20', CAST({} AS int))"),
    "timestamp": ("timestamp", "timestamp", "timestamp_micros({} * 1000000000000L - 20000000000000L)"),
    "text": ("string", "string", "substring('abcabdacbbca', 1 + {0} % 7, {0} % 5)"),
}
BOUNDS = {"[]": (">=", "<="), "[)": (">=", "<"), "(]": (">", "<="), "()": (">", "<")}


def make_ranges(spark: SparkSession, path: str, kind: str, seed: str, keys: int) -> None:
    """Write ranges of a few keys; some lack a bound, are empty, or overlap."""
    draw = random.Random(seed)
    rows = []
    for number in range(60):
        low = draw.randrange(40)
        high = low + draw.randrange(-1, 12)
        rows.append((draw.randrange(keys), *(None if draw.random() < 0.1 else n for n in (low, min(high, 40))), number))
    bound_type, _, text = TYPES[kind]
    columns = [
        f"CASE WHEN {n} IS NOT NULL THEN CAST({text.format(n)} AS {bound_type}) END AS {n}" for n in ("low", "high")
    ]
    frame = spark.createDataFrame(rows, "key int, low int, high int, number int")
    frame.selectExpr("key", *columns, "number").coalesce(1).write.parquet(path)


def facts(spark: SparkSession, kind: str) -> DataFrame:
    _, kind_of_value, text = TYPES[kind]
    value = f"CAST({text.format('id % 41')} AS {kind_of_value})"
    rows = spark.range(300).selectExpr(
        "id AS fact", "CAST(id * 7 % 5 AS int) AS k", f"IF(id % 20 = 13, NULL, {value}) AS value"
    )
    return rows.repartition(2)


@pytest.mark.parametrize(
    ("kind", "mode", "bounds", "keyed"),
    [
        ("decimal", "full", "[)", False),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in [
            ("double", "partial", "(]", True), ("int", "full", "[]", True), ("text", "none", "[]", False), ("int", "none", "()", False), ("date", "none", "[]", True), ("timestamp", "full", "[)", False), ("text", "full", "()", True)]),
    ],
)  # fmt: skip
def test_ranges_are_joined_as_spark_does(
    spark: SparkSession, tmp_path: Path, kind: str, mode: str, bounds: str, keyed: bool
) -> None:
    path, options = str(tmp_path / "ranges"), {**MODES[mode], "lookup.range.bounds": bounds}
    make_ranges(spark, path, kind, f"{kind} {mode}", 6)
    above, below = BOUNDS[bounds]
    on = {"k": "key"} if keyed else None
    table = spark.read.parquet(path).where("low IS NULL OR high IS NULL OR low <= high")
    condition = f"value IS NOT NULL AND (low IS NULL OR value {above} low) AND (high IS NULL OR value {below} high)"
    for how in ("left", "inner", "left_semi", "left_anti") if BY_NIGHT else ("left", "left_anti"):
        columns = [] if how.startswith("left_") else ["number"]
        joined = lookup_join(
            facts(spark, kind), path, on, how, columns or None, between={"value": ("low", "high")}, options={**options, "lookup.overlap": "ALL"}
        )  # fmt: skip
        by_spark = facts(spark, kind).join(table, sf.expr(condition + (" AND k = key" if keyed else "")), how)
        output_columns = ["fact", *columns]
        assert sorted(map(str, joined.select(*output_columns).collect())) == sorted(
            map(str, by_spark.select(*output_columns).collect())
        )
    newest = lookup_join(facts(spark, kind), path, on, "inner", between={"value": ("low", "high")}, options={**options, "lookup.overlap": "NEWEST"})  # fmt: skip
    by_spark = facts(spark, kind).join(table, sf.expr(condition + (" AND k = key" if keyed else "")))
    latest = by_spark.groupBy("fact").agg(sf.expr("max_by(low, struct(low IS NOT NULL, low))").alias("low"))
    actual, expected = (
        sorted(str(row).replace("-0.0)", "0.0)") for row in df.select("fact", "low").collect())
        for df in (newest, latest)
    )
    assert actual == expected
    assert "between: value, by low and high" in explain_lookup(newest)
    with pytest.raises(Exception, match=r"rows.* match the value .*, e\.g\. \(low = .*\) and \(low = .*NARROWEST"):
        lookup_join(facts(spark, kind), path, on, between={"value": ("low", "high")}, options=options).collect()


def test_networks_are_those_of_python(spark: SparkSession, tmp_path: Path) -> None:
    """An address gets its smallest network, whether networks are text, two addresses or an address with a length, and addresses are text, bytes or integers."""
    draw = random.Random(5)
    networks = {
        str(ipaddress.ip_network((draw.getrandbits(bits) & ((1 << bits) - (1 << bits - 6)), draw.choice(lengths)), strict=False))
        for bits, lengths in [(32, range(2, 33, 3)), (128, range(2, 129, 9))]
        for _ in range(60)
    }  # fmt: skip
    addresses = [
        ipaddress.ip_network(text)[0] + draw.randrange(2)
        for text in sorted(networks)
        if not text.endswith(("/32", "/128"))
    ]
    rows = []
    for text in sorted(networks):
        network = ipaddress.ip_network(text)
        rows.append((text, str(network[0]), str(network[-1]), network.prefixlen))
    spark.createDataFrame(rows, "network string, first string, last string, length int").coalesce(1).write.parquet(
        str(tmp_path / "nets")
    )
    fact_rows = [(str(a), a.packed, int(a) if a.version == 4 else -1) for a in addresses] + [
        ("no address", b"xyz", -2),
        (None, None, None),
    ]
    df = spark.createDataFrame(fact_rows, "text string, bytes binary, number long")
    expected = {}
    for address in addresses:
        holding = [n for n in map(ipaddress.ip_network, networks) if n.version == address.version and address in n]
        expected[str(address)] = str(max(holding, key=lambda n: n.prefixlen)) if holding else None
    for column, by in [("text", "network"), ("bytes", ("first", "last")), ("number", ("first", "length"))]:
        joined = lookup_join(df, str(tmp_path / "nets"), columns=["network"], cidr={column: by}, options=FULL)
        for row in joined.collect():
            expected_network = expected.get(row.text) if column != "number" or (row.number or -1) >= 0 else None
            assert row.network == expected_network, row


@needs(DATA_SOURCES)
def test_addresses_of_other_types(spark: SparkSession, tmp_path: Path) -> None:
    """VARCHAR is text, a column without a type has no address, and the blanks of CHAR are an error."""
    path = str(tmp_path / "nets")
    spark.sql("SELECT '10.0.0.0/8' AS network").write.parquet(path)
    with conf(spark, "spark.sql.preserveCharVarcharTypeInfo", "true"):
        for value, network in (("CAST('10.1.2.3' AS VARCHAR(20))", "10.0.0.0/8"), ("NULL", None)):
            rows = lookup_join(spark.sql(f"SELECT {value} AS ip"), path, cidr={"ip": "network"}).collect()
            assert [row.network for row in rows] == [network]
        with pytest.raises(SchemaError, match=r"key 'ip' is char\(20\), whose values are padded"):
            lookup_join(spark.sql("SELECT CAST('10.1.2.3' AS CHAR(20)) AS ip"), path, cidr={"ip": "network"})


def test_functions_of_ranges(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """A function of SQL takes the key and then the value; without keys only the value. With `multi` it returns all rows that match."""
    brackets, nets, codes = (str(tmp_path / table) for table in ("brackets", "nets", "codes"))
    spark.sql("SELECT * FROM VALUES ('DE', 0, 9, 1), ('DE', 10, NULL, 2) AS t(country, low, high, rate)").write.parquet(
        brackets
    )
    spark.sql("SELECT * FROM VALUES ('10.0.0.0/8', 'a'), ('10.1.0.0/16', 'b') AS t(network, place)").write.parquet(nets)
    spark.sql("SELECT * FROM VALUES ('4', 'four'), ('49', 'DE') AS t(code, place)").write.parquet(codes)
    register_lookup(spark, f"{name}_rate", brackets, "country", between=("low", "high"), columns=["rate"])
    register_lookup(spark, f"{name}_geo", nets, cidr="network")
    register_lookup(spark, f"{name}_all", nets, cidr="network", multi=True, options={"lookup.overlap": "ALL"})
    register_lookup(spark, f"{name}_code", codes, starts_with="code")
    register_lookup(spark, f"{name}_one", nets, cidr="network", options={"lookup.overlap": "ALL"})
    with pytest.raises(
        Exception, match=r"several rows \(up to 2\) for one key, here cidr = '10\.1\.2\.3': .*multi=True"
    ):
        spark.sql(f"SELECT {name}_one('10.1.2.3').place").collect()
    row = spark.sql(
        f"SELECT {name}_rate('DE', CAST(id AS INT)).rate AS rate, {name}_geo(ip).place AS place, {name}_code(CAST(id AS STRING)).place AS code, "
        f"size({name}_all(ip)) AS places FROM VALUES (49, '10.1.2.3') AS t(id, ip)"
    ).first()  # fmt: skip
    assert row is not None
    assert tuple(row) == (2, "b", "DE", 2)
    if features.SQL_FUNCTIONS:
        assert [tuple(row) for row in spark.sql(f"SELECT * FROM {name}_geo_rows('10.9.9.9')").collect()] == [
            ("10.0.0.0/8", "a")
        ]


@pytest.mark.nightly
def test_tables_that_know_their_columns(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """The columns to match by come from the catalog table, the properties of a managed table or the options of the lookup; arguments override them."""
    brackets, nets, codes = (str(tmp_path / table) for table in ("brackets", "nets", "codes"))
    spark.sql("SELECT * FROM VALUES ('DE', 0, 9, 1), ('DE', 10, NULL, 2) AS t(country, low, high, rate)").write.parquet(
        brackets
    )
    spark.sql("SELECT * FROM VALUES ('4', 'four'), ('49', 'DE') AS t(code, place)").write.parquet(codes)
    managed = LookupTable(nets, {"lookup.keys": "network"})
    managed.write([{"network": "10.0.0.0/8", "other": "11.0.0.0/8"}, {"network": "10.1.0.0/16", "other": "10.1.2.3"}])
    with pytest.raises(OptionError, match=r"table property lookup.cidrs is unknown"):
        managed.alter(properties={"lookup.cidrs": "network"})
    with pytest.raises(OptionError, match=r"lookup.cidr = 'a..b..c': expected a column of the table"):
        managed.alter(properties={"lookup.cidr": "a..b..c"})
    with pytest.raises(OptionError, match=r"argument key is missing: .*which a table may also store"):
        register_lookup(spark, f"{name}_geo", nets)
    managed.alter(properties={"lookup.cidr": "network"})
    df = spark.sql("SELECT 'DE' AS country, 12 AS income, '10.1.2.3' AS ip, '4930' AS number")
    for joined, expected in (
        (lookup_join(df, nets, cidr="ip", columns=["network"]), "10.1.0.0/16"),
        (lookup_join(df, nets, cidr={"ip": "other"}, columns=["network"]), "10.1.0.0/16"),
        (lookup_join(df, nets, cidr="ip", columns=["network"], options={"lookup.cidr": "other", "lookup.overlap": "NEWEST"}), "10.1.0.0/16"),
        (lookup_join(df, brackets, "country", between="income", columns=["rate"], options={"lookup.range": "low..high"}), 2),
        (lookup_join(df, codes, starts_with="number", columns=["place"], options={"lookup.starts-with": "CODE"}), "DE"),
    ):  # fmt: skip
        assert [row[4] for row in joined.collect()] == [expected]
    for arguments, words in (
        ({"between": "income"}, r"argument between = 'income': .*give \{'income': \('low', 'high'\)\}, or set lookup.range"),
        ({"cidr": {"ip": "network"}, "options": {"lookup.cidr": "other"}}, "lookup.cidr = 'other' differs from the argument cidr, network"),
        ({"cidr": "ip", "options": {"lookup.cidr": "nets"}}, "option lookup.cidr: the table has no column 'nets'"),
    ):  # fmt: skip
        with pytest.raises((OptionError, SchemaError), match=words):
            lookup_join(df, nets, **arguments)
    with pytest.raises(
        OptionError, match=r"options lookup.range and lookup.cidr each .* give the argument between or cidr"
    ):
        register_lookup(
            spark, f"{name}_geo", nets, options={"lookup.range": "network..other", "lookup.cidr": "network"}
        )
    register_lookup(spark, f"{name}_geo", nets)
    row = spark.sql(f"SELECT {name}_geo('10.9.9.9').network, {name}_geo('x1').network").first()
    assert tuple(row) == ("10.0.0.0/8", None)
    if features.SQL_FUNCTIONS:  # Spark makes text of a number; its address is found nevertheless
        row = spark.sql(f"SELECT {name}_geo(167838211).network, {name}_geo(1L).network, {name}_geo(-1)").first()
        assert tuple(row) == ("10.1.0.0/16", None, None)
    for value_type, value in (("BIGINT", "167838211"), ("BINARY", "X'0A010203'")):
        register_lookup(spark, f"{name}_{value_type}", nets, value_type=value_type)
        assert spark.sql(f"SELECT {name}_{value_type}({value}).network").first()[0] == "10.1.0.0/16"
    for value_type, words in (("FLOAT", "argument cidr has the type float"), ("TEXTS", "value_type = 'TEXTS': give an SQL type")):  # fmt: skip
        with pytest.raises((OptionError, SchemaError), match=words):
            register_lookup(spark, f"{name}_geo", nets, value_type=value_type)
    with pytest.raises(OptionError, match="value_type = 'INT' is for functions with between, cidr or starts_with"):
        register_lookup(spark, f"{name}_geo", nets, "network", value_type="INT")
    if DATA_SOURCES:
        options = {"lookup.keys": "country,low", "lookup.range": "low..high"}
        spark.sql(f"CREATE TABLE {name} {catalog_options(brackets, options)}")
        register_lookup(spark, f"{name}_rate", name)
        register_lookup(spark, f"{name}_exact", name, value_type="DECIMAL(12, 1)")
        row = spark.sql(
            f"SELECT {name}_rate('DE', 9.7).rate, {name}_exact('DE', 9.7).rate, {name}_rate('EE', 1)"
        ).first()
        assert tuple(row) == (1, None, None)
        joined = lookup_join(df, name, "country", between="income", columns=["rate"])
        assert [row.rate for row in joined.collect()] == [2]


TABLES: dict[str, tuple[str, dict[str, str], list[dict[str, Any]]]] = {
    "between": ("key,low", {"lookup.range": "low..high"}, [{"key": 1, "low": 0, "high": 9, "rate": 1}, {"key": 1, "low": 10, "high": 12, "rate": 2}]),
    "as_of": ("key,since", {"lookup.valid-from": "since", "lookup.valid-to": "until"}, [{"key": 1, "since": 0, "until": None, "city": "Rome"}, {"key": 2, "since": 0, "until": 5, "city": "Lima"}]),
    "cidr": ("network", {"lookup.cidr": "network"}, [{"network": "10.0.0.0/8", "place": "company"}, {"network": "::/0", "place": "any"}]),
    "starts_with": ("code", {"lookup.starts-with": "code"}, [{"code": "49", "land": "DE"}, {"code": "", "land": "any"}]),
}  # fmt: skip
"""For each kind of match the keys of a managed table, its properties and its rows."""


@pytest.mark.parametrize("mode", ["full", *(pytest.param(mode, marks=pytest.mark.nightly) for mode in ("none", "partial"))])  # fmt: skip
def test_batches_streams_and_functions_follow_tables_that_change(
    spark: SparkSession, tmp_path: Path, name: str, mode: str
) -> None:
    """Batches, streams and functions return what `LookupTable` returns of the version that is current when the query or micro-batch begins; four lookups share a pass."""
    cache = {"lookup.cache.dir": str(tmp_path / "c")}
    tables: dict[str, LookupTable] = {}
    for kind, (keys, properties, rows) in TABLES.items():
        tables[kind] = LookupTable(tmp_path / kind, {"lookup.keys": keys, **cache})
        tables[kind].write(rows)
        tables[kind].alter(properties=properties)
    facts = [(1, 9, "10.1.2.3", "4930"), (1, 11, "10.9.9.9", "1"), (2, 4, None, "49"), (2, 5, "2001::1", None), (None, 5, "x", "")]  # fmt: skip
    schema = "key long, v long, ip string, number string"
    spark.createDataFrame(facts, schema).coalesce(1).createOrReplaceTempView(name)
    for kind in ("between", "cidr", "starts_with"):
        register_lookup(spark, f"{name}_{kind}", str(tmp_path / kind), options=MODES["full"])

    def joined(df: DataFrame) -> DataFrame:
        keyed, whole = MODES[mode], MODES["none" if mode == "none" else "full"]
        df = lookup_join(df, str(tmp_path / "between"), "key", columns=["rate"], between="v", options=keyed)
        df = lookup_join(df, str(tmp_path / "as_of"), "key", columns=["city"], as_of="v", options=keyed)
        df = lookup_join(df, str(tmp_path / "cidr"), columns=["place"], cidr="ip", options=whole)
        return lookup_join(df, str(tmp_path / "starts_with"), columns=["land"], starts_with="number", options=whole)

    def expected() -> list[tuple[Any, ...]]:
        rows = []
        for key, v, ip, number in facts:
            matches = [
                (tables["between"].get(key, between=v), "rate"), (tables["as_of"].get(key, as_of=v), "city"),
                (tables["cidr"].get(cidr=ip), "place"), (tables["starts_with"].get(starts_with=number), "land"),
            ]  # fmt: skip
            rows.append((key, v, ip, number, *(rows[0][column] if rows else None for rows, column in matches)))
        return sorted(rows, key=repr)

    (tmp_path / "in").mkdir()
    stream = joined(spark.readStream.schema(schema).parquet(str(tmp_path / "in")))
    calls = f"{name}_between(key, v).rate, {name}_cidr(ip).place, {name}_starts_with(number).land"
    first = expected()
    for number in range(2):
        rows = expected()
        assert sorted(map(tuple, joined(spark.table(name)).collect()), key=repr) == rows
        functions = sorted(map(tuple, spark.sql(f"SELECT key, v, ip, number, {calls} FROM {name}").collect()), key=repr)
        assert functions == [(*row[:5], *row[6:]) for row in rows]
        spark.table(name).write.mode("append").parquet(str(tmp_path / "in"))
        assert collect_batches(stream, tmp_path / "checkpoint") == [rows]
        if number == 0:
            tables["between"].upsert([{"key": 1, "low": 0, "high": 10, "rate": 3}])
            tables["between"].delete([{"key": 1, "low": 10}])
            with tables["as_of"].transaction() as t:  # type 2: close the row that is valid, and open the next
                assert [row["city"] for row in t.get(1, as_of=3)] == ["Rome"]
                t.upsert([{"key": 1, "since": 0, "until": 10, "city": "Rome"}])
                t.upsert([{"key": 1, "since": 10, "until": None, "city": "Oslo"}])
            tables["cidr"].write([{"network": "10.1.0.0/16", "place": "Berlin"}])
            tables["starts_with"].write([{"code": "493", "land": "Berlin"}])
    changed = [row for row, before in zip(expected(), first, strict=True) if row != before]
    assert changed == [(1, 11, "10.9.9.9", "1", None, "Oslo", "company", "any"), (1, 9, "10.1.2.3", "4930", 3, "Rome", "Berlin", "Berlin")]  # fmt: skip


def test_what_matches_refuse(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    spark.sql("SELECT 1 AS low, 2L AS high, 3 AS top, 'a' AS text, array(1) AS list").write.parquet(path)
    df = spark.sql("SELECT 1 AS value, 'x' AS ip, 1.5D AS ratio")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"between": {"value": ("low", "high")}}, "'low' is int32, 'high' is int64; both must have the same type"),
        ({"between": {"ip": ("low", "top")}}, "key 'ip' is string, the table's 'low' is int"),
        ({"between": {"ratio": ("high", "high")}}, "cannot be compared without loss"),
        ({"between": {"value": ("low", "tops")}}, "argument between.*tops"),
        ({"between": {"value": "low"}}, r"argument between = \{'value': 'low'\}: give one column of df .*'low', 'high'"),
        ({"between": {"value": ("low", "top"), "ip": ("low", "top")}}, "argument between = .*give one column"),
        ({"cidr": {"ip": "low"}}, "argument cidr: 'low' is int32; a network is one column of text, or two"),
        ({"cidr": {"ratio": "text"}}, "argument cidr: 'ratio' is double; addresses must be"),
        ({"starts_with": {"ip": "low"}}, "argument starts_with: 'low' is int32; prefixes must be text or binary"),
        ({"starts_with": {"ip": "text"}, "cidr": {"ip": "text"}}, "arguments cidr and starts_with: give only one of them"),
        ({"starts_with": {"ip": "text"}, "strategy": "broadcast"}, "argument starts_with needs strategy='cache'"),
        ({"starts_with": {"ip": "text"}, "options": MODES["partial"]}, "lookup.cache = 'PARTIAL' caches rows by key, and a lookup with only the argument starts_with"),
        ({"starts_with": {"ip": "text"}, "options": {"lookup.range.bounds": "][", **FULL}}, r"lookup.range.bounds = '\]\['"),
    ]  # fmt: skip
    for arguments, words in refused:
        with pytest.raises((OptionError, SchemaError), match=words):
            lookup_join(df, path, **arguments)
    with pytest.raises(
        OptionError, match=r"argument between = 'low': give the table's columns, e\.g\. \('low', 'high'\)"
    ):
        register_lookup(spark, "refused", path, between="low")
    with pytest.raises(OptionError, match=r"lookup\.range\.bounds is for lookups with as_of or between .*: remove it"):
        lookup_join(df, path, {"value": "low"}, options={"lookup.range.bounds": "[]"})
