"""Two executors on a real master with two workers, as on one host and as on two. (With harm and streams: `tests/soak`.)"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from pyspark_lookup import LookupTable
from tests.cluster import NOTHING, Cluster, environment
from tests.spark.common import put, said_by

pytestmark = [pytest.mark.spark, pytest.mark.nightly, pytest.mark.timeout(280)]

_APPLICATION = """
import json, os, sys, threading
from pyspark.sql import SparkSession, functions as sf
from pyspark_lookup import lookup_join
master, home, conf = sys.argv[1:]
builder = (SparkSession.builder.master(master).config("spark.ui.enabled", "false").config("spark.executor.memory", "1g")
    .config("spark.executor.cores", "1").config("spark.cores.max", "2").config("spark.sql.shuffle.partitions", "4")
    .config("spark.driver.host", "127.0.0.1").config("spark.ui.showConsoleProgress", "false")
    .config("spark.scheduler.minRegisteredResourcesRatio", "1.0"))
for key, value in json.loads(conf).items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
"""
Made = Callable[[list[Path]], Cluster]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    """A cluster whose executors have these cache directories."""
    clusters: list[Cluster] = []

    def make(directories: list[Path]) -> Cluster:
        clusters.append(Cluster(tmp_path, directories))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


def said(cluster: Cluster, script: str, conf: Mapping[str, str] = NOTHING) -> list[str]:
    """What an application on the cluster says."""
    arguments = (cluster.master, cluster.home, json.dumps(dict(conf)))
    return said_by(cluster.home, _APPLICATION + script, *arguments, variables=environment(cluster.confs[0]))


_QUERY = """
@sf.udf("string")
def place(key):
    "Which executor computes a row."
    return os.environ["LOOKUPCACHE_CONF"]

facts = spark.range(0, 4000, 1, 8).withColumn("id", sf.expr("id % 400"))
joined = lookup_join(facts, home + "/dim.parquet", "id", strategy="cache", options={"lookup.cache": "FULL"})
rows = joined.withColumn("place", place("id")).collect()
print("BUILT", len(rows), {row.version for row in rows if row.version is not None}, len({row.place for row in rows}))
"""


@pytest.mark.parametrize("names", [["cache"] * 2, ["cache0", "cache1"]], ids=["one directory", "a directory each"])
def test_two_executors(made: Made, tmp_path: Path, names: list[str]) -> None:
    """One snapshot build for each directory, whose version both executors answer from."""
    path = put(tmp_path / "dim.parquet", 1, range(0, 400, 2))
    cluster = made([tmp_path / name for name in names])
    assert said(cluster, _QUERY) == ["BUILT 4000 {1} 2"]
    tables = [LookupTable(str(path), {"lookup.cache.dir": str(directory)}) for directory in set(cluster.directories)]
    assert [table.metrics()["loadCount"] for table in tables] == [1] * len(tables)


# Spark runs such an attempt beside the first one, both put files.
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "200ms",
}
_WRITE = """
def slow(batches):
    from pathlib import Path
    from pyspark import TaskContext
    context = TaskContext.get()
    number, attempt = context.partitionId(), context.attemptNumber()
    Path(home, f"began-{number}-{attempt}").touch()
    yield from batches
    if number == 1 and attempt == 0:
        # Until the speculative attempt has given all its rows; then the two race.
        while not Path(home, "second").exists():
            threading.Event().wait(0.02)
    elif number == 1:
        Path(home, "second").touch()

rows = spark.range(0, 1000, 1, 2).mapInArrow(slow, "id long")
rows.write.format("lookupcache").mode("append").option("lookup.keys", "id").save(home + "/table")
"""


def test_speculative_attempts_add_no_rows(made: Made, tmp_path: Path) -> None:
    """The commit names the files of one attempt of each task; those of the other are not read."""
    said(made([tmp_path / "cache"] * 2), _WRITE, SPECULATION)
    assert {path.name for path in tmp_path.glob("began-1-*")} >= {"began-1-0", "began-1-1"}
    with LookupTable(str(tmp_path / "table")) as table:
        assert sorted(table.scan().column("id").to_pylist()) == list(range(1000))
    events = [json.loads(path.read_text()) for path in sorted((tmp_path / "table" / "_lookup" / "log").iterdir())]
    files = [path for event in events if event["kind"] == "write" for path, _, _ in event["files"]]
    assert len({Path(path).name.split("-")[1] for path in files}) == len(files) == 2  # one of each task
