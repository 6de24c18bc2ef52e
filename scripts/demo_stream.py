"""The demo's streaming act: flights arrive in micro-batches, and an airline is renamed while the stream runs."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib import pyplot as plt
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from pyspark_lookup import lookup_join

BATCHES = 24
RENAMED_IN = 12
SCHEMA = "carrier string, flight long, dest string"


@dataclasses.dataclass
class Batch:
    """The time that a micro-batch took, the version of the airlines that it saw, and the names that it gave United's flights."""

    number: int
    ms: int = 0
    version: str = ""
    names: set[str] = dataclasses.field(default_factory=set)
    flights: int = 0


def run_stream(
    spark: SparkSession, flights: pa.Table, airlines: Path, home: Path, rename: Callable[[], None]
) -> list[Batch]:
    """The micro-batches of a stream of flights joined to the airlines, which `rename` changes while one of them runs."""
    arriving = home / "arriving"
    arriving.mkdir()
    rows = flights.num_rows // BATCHES
    for number in range(BATCHES):
        part = flights.slice(number * rows, rows).select(["carrier", "flight", "dest"])
        pq.write_table(part, arriving / f"{number:03}.parquet")
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", "1").parquet(str(arriving))
    named = lookup_join(stream, str(airlines), on="carrier", columns=["name"])
    batches = [Batch(number) for number in range(BATCHES)]

    def write(batch: DataFrame, number: int) -> None:
        if number == RENAMED_IN:
            rename()  # the version of this batch was resolved when it began: the next one sees it
        united = batch.groupBy(sf.when(sf.col("carrier") == "UA", sf.col("name")).alias("name")).count().collect()
        batches[number].names = {row.name for row in united if row.name is not None}
        batches[number].flights = sum(row["count"] for row in united)

    query = named.writeStream.foreachBatch(write).option("checkpointLocation", str(home / "checkpoint")).start()
    try:
        query.processAllAvailable()
        for progress in query.recentProgress:
            for observed in progress["observedMetrics"].values():
                batch = batches[progress["batchId"]]
                batch.version, batch.ms = observed["digest"], progress["durationMs"]["triggerExecution"]
    finally:
        query.stop()
    return batches


def plot(batches: list[Batch], path: Path) -> None:
    """Draw a bar for the time of each micro-batch, with a colour for each version of the table."""
    mpl.use("agg")
    colours = {version: f"C{number}" for number, version in enumerate(dict.fromkeys(b.version for b in batches))}
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for version, colour in colours.items():
        of_version = [batch for batch in batches if batch.version == version]
        label = f"version {version[:8]}: {', '.join(sorted(of_version[0].names))}"
        axes.bar([b.number for b in of_version], [b.ms for b in of_version], color=colour, label=label)
    axes.set(
        title="Flights joined to airlines: each micro-batch and the version it used",
        xlabel="micro-batch",
        ylabel="trigger, ms",
    )
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
