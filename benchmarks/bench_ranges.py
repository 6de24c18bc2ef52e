"""What do lookups of IP networks and of rows that were valid at a time cost, beside what else does them?

    python -m benchmarks.bench_ranges [--only bare,networks,asof,periods,stream] [--scale 1] [--runs 5]

`bare`: 4M IPv4 addresses (integers, batches of 65,536) against 350,000 networks, most of which lie inside others, as in routing tables and
registries; one core, no Spark. Goal: 5M addresses/s, and as fast as each peer. `polars.join_asof` and DuckDB's ASOF JOIN cannot choose among
overlapping ranges: they get the disjoint segments of our own index, so that only the search is compared. `polars.join_where`, DuckDB's
inequality join and maxminddb get fewer addresses. `maxminddb` (its own tree, written by `mmdb_writer`) and ClickHouse's `ip_trie`
dictionary (`chdb`) are measured if these packages are installed: `pip install maxminddb mmdb_writer chdb`, which the extra `bench` does not.

`networks`: the same in Spark, `local[2]`, beside Spark's join on `ip BETWEEN first AND last` with the broadcast hint, which compares each
address with each network and so gets fewer addresses. Goal: 20 times as many addresses a second. Spark's equality join by each length of a
prefix is what one writes by hand instead.

`asof`: 2M facts against 10 periods of each of 1M keys, beside Spark's ASOF JOIN (4.3) and DuckDB's. Goal: ahead of both. `periods`: a lookup
among 1 to 1,000 periods of a key; goal: at most twice as long. `stream`: micro-batches of 10,000 facts against 3.5M networks, beside the
equality lookup of a table of this size; goal: 1.2.

`--scale` makes all sizes smaller.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Must be set before polars is imported: one core, however many the machine has.
os.environ.setdefault("POLARS_MAX_THREADS", "1")

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from benchmarks.bench_join import time_batches
from benchmarks.common import alternate, report, session
from pyspark_lookup import LookupTable, lookup_join
from pyspark_lookup.columnar.ranges import Pick, RangeIndex, Ranges

ADDRESSES, NETWORKS, LARGE_NETWORKS = 4_000_000, 350_000, 3_500_000
FACTS, KEYS, PERIODS = 2_000_000, 1_000_000, 10
BATCH, MICRO_BATCH = 65_536, 10_000
SHARES = {8: 0.0003, 12: 0.003, 14: 0.01, 16: 0.05, 18: 0.04, 20: 0.1, 21: 0.1, 22: 0.15, 23: 0.1, 24: 0.4467}
"""The share of each prefix length among the networks, about as in a routing table. Most networks lie inside others."""
END = 10**15
Numbers = np.ndarray[Any, np.dtype[Any]]
Contender = tuple[int, Callable[[], Any]]
"""The number of values that a contender looks up, and a function that looks them up and returns the sum of the `place` of the rows it finds."""


# --- data -----------------------------------------------------------------------------------------


def dotted(numbers: Numbers) -> Numbers:
    """Format IPv4 addresses as text."""
    parts = [(numbers >> shift & 255).astype(str) for shift in (24, 16, 8, 0)]
    return functools.reduce(lambda left, right: np.char.add(np.char.add(left, "."), right), parts)


def make_networks(home: Path, count: int) -> Path:
    """Write a table of `count` different networks: `network` (text), `first`, `last`, `bits` and `place` (numbers)."""
    path = home / f"networks-{count}.parquet"
    if not path.exists():
        rng = np.random.default_rng(3)
        lengths = rng.choice(list(SHARES), 3 * count, p=list(SHARES.values()))
        first = rng.integers(0, 2**32, 3 * count) >> (32 - lengths) << (32 - lengths)
        _, places = np.unique(first << 6 | lengths, return_index=True)
        places = rng.permutation(places)[:count]
        first, lengths = first[places], lengths[places]
        text = np.char.add(np.char.add(dotted(first), "/"), lengths.astype(str))
        last = first + (1 << 32 - lengths) - 1
        columns = {"network": text, "first": first, "last": last, "bits": lengths, "place": np.arange(len(first))}
        pq.write_table(pa.table(columns), path)
    return path


def make_addresses(home: Path, count: int) -> Path:
    """Write a table of `count` IPv4 addresses, as numbers."""
    path = home / f"addresses-{count}.parquet"
    if not path.exists():
        pq.write_table(pa.table({"ip": np.random.default_rng(4).integers(0, 2**32, count)}), path)
    return path


def make_periods(home: Path, keys: int, periods: int, facts: int) -> tuple[Path, Path]:
    """Write (a table with so many `periods` of each key: `id`, `since`, `price`; facts: `k`, `at`). Times are microseconds."""
    table, events = home / f"periods-{keys}-{periods}.parquet", home / f"facts-{keys}-{facts}.parquet"
    rng, instant = np.random.default_rng(5), pa.timestamp("us", "UTC")
    if not table.exists():
        since = np.sort(rng.integers(0, END, (keys, periods)), axis=1).ravel()
        columns = {"id": np.repeat(np.arange(keys), periods), "since": pa.array(since).cast(instant)}
        rows = pa.table({**columns, "price": np.arange(len(since))})
        pq.write_table(rows.take(pa.array(rng.permutation(len(since)))), table)
    if not events.exists():
        at = pa.array(rng.integers(0, END, facts)).cast(instant)
        pq.write_table(pa.table({"k": rng.integers(0, keys, facts), "at": at}), events)
    return table, events


# --- what is measured -----------------------------------------------------------------------------


def rates(question: str, contenders: Mapping[str, Contender], reference: str, runs: int) -> dict[str, float]:
    """Print how many values a second each contender looks up, and how many times faster `reference` is (median of pairs). Returns these factors."""
    sums = {name: (count, int(run())) for name, (count, run) in contenders.items()}  # the first run, which warms up
    for name, (count, amount) in sums.items():
        amounts = [other_amount for other_count, other_amount in sums.values() if other_count == count]
        print(f"{name}: sum {amount}{'' if set(amounts) == {amount} else ', DIFFERS'}")
    times = alternate({name: run for name, (_, run) in contenders.items()}, 0, runs)
    per_value = {name: [t / contenders[name][0] for t in samples] for name, samples in times.items()}
    print(f"\n## {question}")
    print(f"machine: {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print("| contender | values | median s | M values/s | ours is so many times faster |")
    print("|---|---|---|---|---|")
    faster = {}
    for name, samples in per_value.items():
        faster[name] = statistics.median(
            peer_s / own_s for own_s, peer_s in zip(per_value[reference], samples, strict=True)
        )
        count, median = contenders[name][0], statistics.median(times[name])
        print(f"| {name} | {count:,} | {median:.3f} | {count / median / 1e6:.3f} | {faster[name]:.2f} |", flush=True)
    return faster


def in_batches(values: pa.Array, look_up: Callable[[pa.Array], int]) -> int:
    return sum(look_up(values[start : start + BATCH]) for start in range(0, len(values), BATCH))


def total(column: Any) -> int:
    return int(pc.sum(column).as_py() or 0)


def segments(networks: pa.Table) -> pa.Table:
    """Cut the networks into disjoint segments by our own index, for peers that cannot choose among overlapping ones: `start`, `place` (null: none)."""
    ranges = Ranges.from_bounds(*(networks.column(name).combine_chunks() for name in ("first", "last")), (True, True))
    index = RangeIndex.build(ranges, Pick.NARROWEST)
    winners = index.winners[:-1].astype(np.int64)
    places = networks.column("place").combine_chunks().take(pa.array(winners, mask=winners < 0))
    return pa.table({"start": index.starts, "place": places})


def bench_bare(home: Path, scale: float, runs: int) -> None:
    path, networks = (
        make_networks(home, int(NETWORKS * scale)),
        pq.read_table(make_networks(home, int(NETWORKS * scale))),
    )
    addresses = pq.read_table(make_addresses(home, int(ADDRESSES * scale))).column("ip").combine_chunks()
    count = len(addresses)
    options = {"lookup.cache": "FULL", "lookup.cache.dir": str(home / "cache"), "lookup.columns": "place"}
    table = LookupTable(path, {**options, "lookup.cidr": "network"})
    by_numbers = LookupTable(path, {**options, "lookup.range": "first..last", "lookup.overlap": "NARROWEST"})
    name = "get_many(cidr=…)"
    contenders: dict[str, Contender] = {
        name: (count, lambda: in_batches(addresses, lambda ips: total(table.get_many(cidr=ips).column("place")))),
        "get_many(between=…)": (
            count,
            lambda: in_batches(addresses, lambda ips: total(by_numbers.get_many(between=ips).column("place"))),
        ),
    }
    few = addresses[: max(count // 40, 1000)]
    texts = pa.array(dotted(addresses[: count // 4].to_numpy()))
    contenders["get_many(cidr=…), addresses of text"] = (
        len(texts),
        lambda: in_batches(texts, lambda ips: total(table.get_many(cidr=ips).column("place"))),
    )
    contenders |= _polars(networks, addresses, addresses[: max(count // 4000, 100)])
    contenders |= _duckdb(networks, addresses, few)
    if importlib.util.find_spec("maxminddb"):
        contenders["maxminddb, one by one"] = _maxminddb(home, networks, few)
    if importlib.util.find_spec("chdb"):
        contenders["ClickHouse, ip_trie"] = _clickhouse(home, networks, home / f"addresses-{count}.parquet", count)
    os.sched_setaffinity(0, {0})
    pa.set_cpu_count(1)
    rates(f"IPv4 addresses in {networks.num_rows:,} networks, one core", contenders, name, runs)


def _polars(networks: pa.Table, addresses: pa.Array, few: pa.Array) -> dict[str, Contender]:
    import polars as pl  # noqa: PLC0415 # for this part only

    cut, whole = (pl.DataFrame(pl.from_arrow(rows)) for rows in (segments(networks), networks))
    facts, few_facts = (pl.DataFrame({"ip": pl.from_arrow(column)}) for column in (addresses, few))

    def search() -> int:
        sorted_facts = facts.sort("ip")
        return int(sorted_facts.join_asof(cut.set_sorted("start"), left_on="ip", right_on="start")["place"].sum())

    def where() -> int:
        pairs = few_facts.with_row_index("n").join_where(
            whole, pl.col("ip") >= pl.col("first"), pl.col("ip") <= pl.col("last")
        )
        return int(pairs.sort("bits").group_by("n").agg(pl.col("place").last())["place"].sum())

    return {
        "polars.join_asof, of our segments": (len(addresses), search),
        "polars.join_where, then the narrowest": (len(few), where),
    }


def _duckdb(networks: pa.Table, addresses: pa.Array, few: pa.Array) -> dict[str, Contender]:
    import duckdb  # noqa: PLC0415

    connection = duckdb.connect(config={"threads": 1})
    tables = {
        "networks": networks,
        "segments": segments(networks),
        "facts": pa.table({"ip": addresses}),
        "few": pa.table({"ip": few}),
    }
    for name, rows in tables.items():
        connection.register("arrow_rows", rows)
        connection.execute(f"CREATE TABLE {name} AS SELECT row_number() OVER () AS n, * FROM arrow_rows")
    asof = "SELECT sum(place) FROM facts ASOF LEFT JOIN segments ON ip >= start"
    pairs = (
        "SELECT f.n, arg_max(place, bits) AS place FROM few f JOIN networks ON ip BETWEEN first AND last GROUP BY f.n"
    )
    return {
        "DuckDB, ASOF JOIN of our segments": (len(addresses), lambda: connection.execute(asof).fetchone()[0]),
        "DuckDB, inequality join, then the narrowest": (
            len(few),
            lambda: connection.execute(f"SELECT sum(place) FROM ({pairs})").fetchone()[0],
        ),
    }


def _maxminddb(home: Path, networks: pa.Table, few: pa.Array) -> Contender:
    import maxminddb  # noqa: PLC0415
    from mmdb_writer import MMDBWriter  # noqa: PLC0415
    from netaddr import IPNetwork, IPSet  # noqa: PLC0415

    path = home / f"networks-{networks.num_rows}.mmdb"
    if not path.exists():
        writer = MMDBWriter(ip_version=4, int_type="u32")
        # The shortest first, because a network replaces those that lie inside it.
        for text, place in sorted(zip(networks["network"].to_pylist(), networks["place"].to_pylist(), strict=True), key=lambda n: int(n[0].partition("/")[2])):  # fmt: skip
            writer.insert_network(IPSet([IPNetwork(text)]), {"place": place})
        writer.to_db_file(str(path))
    reader = maxminddb.open_database(str(path), maxminddb.MODE_MMAP_EXT)
    texts = dotted(few.to_numpy()).tolist()

    def get_all() -> int:
        records: Any = map(reader.get, texts)
        return sum(record["place"] for record in records if record is not None)

    return len(texts), get_all


def _clickhouse(home: Path, networks: pa.Table, addresses: Path, count: int) -> Contender:
    from chdb.session import Session  # noqa: PLC0415

    csv = home / f"networks-{networks.num_rows}.csv"
    rows = zip(networks["network"].to_pylist(), networks["place"].to_pylist(), strict=True)
    csv.write_text("network,place\n" + "".join(f"{network},{place}\n" for network, place in rows))
    clickhouse = Session(str(home / "clickhouse"))
    clickhouse.query("CREATE DATABASE IF NOT EXISTS b ENGINE = Atomic")
    clickhouse.query("DROP DICTIONARY IF EXISTS b.geo")
    clickhouse.query("DROP TABLE IF EXISTS b.networks")
    clickhouse.query(f"CREATE TABLE b.networks ENGINE = Memory AS SELECT assumeNotNull(network) AS network, assumeNotNull(toInt64(place)) AS place FROM file('{csv}', 'CSVWithNames')")  # fmt: skip
    clickhouse.query("DROP TABLE IF EXISTS b.addresses")
    clickhouse.query(
        f"CREATE TABLE b.addresses ENGINE = Memory AS SELECT assumeNotNull(ip) AS ip FROM file('{addresses}', 'Parquet')"
    )
    clickhouse.query(
        "CREATE DICTIONARY b.geo (network String, place Int64 DEFAULT 0) PRIMARY KEY network SOURCE(CLICKHOUSE(TABLE 'networks' DB 'b')) "
        "LAYOUT(IP_TRIE) LIFETIME(0)"
    )
    query = (
        "SELECT sum(dictGet('b.geo', 'place', tuple(toIPv4(toUInt32(ip))))) FROM b.addresses SETTINGS max_threads = 1"
    )
    return count, lambda: str(clickhouse.query(query, "CSV")).strip()


def bench_networks(spark: SparkSession, home: Path, scale: float, runs: int) -> None:
    path, addresses = make_networks(home, int(NETWORKS * scale)), make_addresses(home, int(ADDRESSES * scale))
    count = int(ADDRESSES * scale)
    few = max(count // 2000, 100)
    options = {"lookup.cache": "FULL", "lookup.cache.dir": str(home / "cache")}
    facts, networks = spark.read.parquet(str(addresses)), spark.read.parquet(str(path))
    few_facts = facts.limit(few).withColumn("n", sf.monotonically_increasing_id()).repartition(2).cache()
    few_facts.count()

    def by_lookup(df: DataFrame) -> DataFrame:
        return lookup_join(df, str(path), cidr={"ip": "network"}, columns=["place"], options=options)

    def by_range() -> DataFrame:
        between = sf.expr("ip BETWEEN first AND last")
        pairs = few_facts.join(sf.broadcast(networks), between, "left")
        return pairs.groupBy("n").agg(sf.expr("max_by(place, bits)").alias("place"))

    def by_length(df: DataFrame) -> DataFrame:
        numbered = df.withColumn("n", sf.monotonically_increasing_id())
        candidates = numbered.crossJoin(sf.broadcast(networks.select("bits").distinct()))
        prefix = sf.expr("shiftleft(shiftright(ip, CAST(32 - bits AS INT)), CAST(32 - bits AS INT))").alias("first")
        pairs = candidates.select("n", "bits", prefix).join(
            sf.broadcast(networks.select("bits", "first", "place")), ["bits", "first"]
        )
        return pairs.groupBy("n").agg(sf.expr("max_by(place, bits)").alias("place"))

    def sum_places(df: DataFrame) -> int:
        return int(df.agg(sf.sum("place")).first()[0] or 0)

    name = "lookup_join(cidr=…)"
    contenders: dict[str, Contender] = {
        name: (count, lambda: sum_places(by_lookup(facts))),
        "Spark, equality join by each length": (count, lambda: sum_places(by_length(facts))),
        "Spark, broadcast join by range": (few, lambda: sum_places(by_range())),
    }
    faster = rates(f"IPv4 addresses in {int(NETWORKS * scale):,} networks, local[2]", contenders, name, runs)
    print(f"- times Spark's own range join: {faster['Spark, broadcast join by range']:.0f}, goal 20")


def bench_asof(spark: SparkSession, home: Path, scale: float, runs: int) -> None:
    import duckdb  # noqa: PLC0415

    table, events = make_periods(home, int(KEYS * scale), PERIODS, int(FACTS * scale))
    options = {"lookup.cache": "FULL", "lookup.cache.dir": str(home / "cache"), "lookup.valid-from": "since"}
    facts = spark.read.parquet(str(events))
    spark.read.parquet(str(table)).createOrReplaceTempView("bench_periods")
    facts.createOrReplaceTempView("bench_facts")
    joined = functools.partial(
        lookup_join, facts, str(table), {"k": "id"}, columns=["price"], as_of="at", options=options
    )
    query = "SELECT {} FROM {} f {} JOIN {} p {} f.k = p.id"
    connection = duckdb.connect(config={"threads": 2})

    def by_duckdb() -> int:
        asof = query.format("sum(price)", f"'{events}'", "ASOF LEFT", f"'{table}'", "ON f.at >= p.since AND")
        return int(connection.execute(asof).fetchone()[0])

    def by_spark() -> int:
        asof = query.format(
            "sum(price)", "bench_facts", "LEFT ASOF", "bench_periods", "MATCH_CONDITION (f.at >= p.since) ON"
        )
        return int(spark.sql(asof).first()[0])

    prices = LookupTable(table, {**options, "lookup.keys": "id"})

    def without_spark() -> int:
        batches = pq.read_table(events).to_batches(BATCH)
        return sum(total(prices.get_many(b.column("k"), as_of=b.column("at")).column("price")) for b in batches)

    contenders: dict[str, Callable[[], int]] = {
        "lookup_join(as_of=…)": lambda: int(joined().agg(sf.sum("price")).first()[0]),
        "get_many(as_of=…), one thread, no Spark": without_spark,
        "DuckDB's ASOF JOIN, 2 threads": by_duckdb,
    }
    try:
        spark.sql(
            query.format("1", "bench_facts", "LEFT ASOF", "bench_periods", "MATCH_CONDITION (f.at >= p.since) ON")
        )
        contenders["Spark's ASOF JOIN"] = by_spark
    except Exception as problem:  # Spark's parser raises it before 4.3
        print(f"this Spark has no ASOF JOIN: {type(problem).__name__}")
    print({name: run() for name, run in contenders.items()})
    times = alternate(contenders, 0, runs)
    question = f"{int(FACTS * scale):,} facts as of {PERIODS} periods of each of {int(KEYS * scale):,} keys, local[2]"
    report(question, times, "lookup_join(as_of=…)")


def bench_periods(home: Path, scale: float, runs: int) -> None:
    """Measure how a lookup's time grows with the periods of a key, while the number of rows stays the same."""
    rows, count = int(KEYS * scale), int(FACTS * scale) // 10
    contenders: dict[str, Callable[[], object]] = {}
    for periods in (1, 10, 100, 1000):
        table, events = make_periods(home, rows // periods, periods, count)
        options = {"lookup.cache": "FULL", "lookup.cache.dir": str(home / "cache"), "lookup.keys": "id"}
        prices, facts = LookupTable(table, {**options, "lookup.valid-from": "since"}), pq.read_table(events)
        contenders[f"{periods:,} periods"] = functools.partial(_get_prices, prices, facts)
    times = alternate(contenders, 1, runs)
    report(
        f"{count:,} facts as of the periods of a key, {rows:,} rows, batches of {BATCH:,}, without Spark",
        times,
        "1 periods",
    )


def _get_prices(prices: LookupTable, facts: pa.Table) -> None:
    for batch in facts.to_batches(BATCH):
        prices.get_many(batch.column("k"), as_of=batch.column("at"))


def bench_stream(spark: SparkSession, home: Path, scale: float, rounds: int) -> None:
    count = int(LARGE_NETWORKS * scale)
    path, events = make_networks(home, count), home / f"requests-{count}"
    if not events.exists():
        rng = np.random.default_rng(6)
        events.mkdir()
        for number in range(40):
            facts = pa.table({"ip": rng.integers(0, 2**32, MICRO_BATCH), "k": rng.integers(0, count, MICRO_BATCH)})
            pq.write_table(facts, events / f"{number:03}.parquet")
    options = {"lookup.cache": "FULL", "lookup.cache.dir": str(home / "cache")}
    contenders: dict[str, Callable[[DataFrame], DataFrame]] = {
        "equality lookup": lambda df: lookup_join(df, str(path), {"k": "place"}, columns=["bits"], options=options),
        "networks": lambda df: lookup_join(df, str(path), cidr={"ip": "network"}, columns=["bits"], options=options),
    }
    times: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, enrich in contenders.items():
            times[name] += time_batches(spark, events, enrich, home, 12, "ip long, k long")
    for part in ("addBatch", "triggerExecution"):
        seconds = {name: [batch[part] for batch in batches] for name, batches in times.items()}
        report(f"A micro-batch of {MICRO_BATCH:,} facts, {count:,} rows, {part}", seconds, "equality lookup")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="bare,networks,asof,periods,stream", help="parts, with commas")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    parts = args.only.split(",")
    start_s = time.perf_counter()
    try:
        if {"networks", "asof", "stream"} & set(parts):
            spark = session(2, {"spark.sql.join.asofJoin.enabled": "true"})  # off by default in 4.3
            if "networks" in parts:
                bench_networks(spark, args.data, args.scale, args.runs)
            if "asof" in parts:
                bench_asof(spark, args.data, args.scale, args.runs)
            if "stream" in parts:
                bench_stream(spark, args.data, args.scale, max(args.runs // 2, 1))
            spark.stop()
        if "periods" in parts:
            bench_periods(args.data, args.scale, args.runs)
        if "bare" in parts:  # comes last, because it pins this process to one core
            bench_bare(args.data, args.scale, args.runs)
    finally:
        shutil.rmtree(args.data / "cache", ignore_errors=True)
        shutil.rmtree(args.data / "clickhouse", ignore_errors=True)
    print(f"\nall parts took {time.perf_counter() - start_s:.0f} s")


if __name__ == "__main__":
    main()
