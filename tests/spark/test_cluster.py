"""Two executors on a real master with two workers, as on one host and as on two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable
from tests.cluster import NOTHING, Cluster, environment
from tests.fakes import wait_until_settled
from tests.spark.test_source import put

pytestmark = [pytest.mark.spark, pytest.mark.nightly, pytest.mark.timeout(280)]

KEYS = 400
BATCHES = 12
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

@sf.udf("string")
def place(key):
    "Which executor computes a row."
    return os.environ["LOOKUPCACHE_CONF"]

def say(word, **facts):
    print(json.dumps([word, facts]), flush=True)
    return sys.stdin.readline().strip()
"""


class Application:
    """A Spark application that tells what it does, line by line, and waits for an answer to each."""

    def __init__(self, cluster: Cluster, script: str, conf: Mapping[str, str] = NOTHING) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _APPLICATION + script, cluster.master, str(cluster.home), json.dumps(dict(conf))],
            env=environment(cluster.confs[0]),
            cwd=cluster.home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(cluster.home / "application.log").open("w"),
            text=True,
        )
        self._log = cluster.home / "application.log"

    def hear(self, word: str) -> dict[str, Any]:
        """What it says next, which is about `word`."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("["):
                found, facts = json.loads(line)
                assert found == word
                return dict(facts)
        raise AssertionError(f"ended before {word}:\n" + self._log.read_text()[-4000:])

    def answer(self, text: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(params=[True, False], ids=["one directory", "a directory each"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, [tmp_path / ("cache" if request.param else f"cache{number}") for number in range(2)])
    yield made
    made.close()


def loads(cluster: Cluster, path: Path) -> dict[Path, int]:
    """How many snapshots of a table each directory has built."""
    tables = {d: LookupTable(str(path), {"lookup.cache.dir": str(d)}) for d in cluster.directories}
    return {directory: table.metrics()["loadCount"] for directory, table in tables.items()}


_QUERY = """
options = {"lookup.cache": "FULL"}
facts = spark.range(0, 4000, 1, 8).withColumn("id", sf.expr("id % 400"))
joined = lookup_join(facts, home + "/dim.parquet", "id", strategy="cache", options=options)
rows = joined.withColumn("place", place("id")).collect()
say("built", count=len(rows), versions=sorted({r.version for r in rows if r.version is not None}), places=sorted({r.place for r in rows}))

stream = spark.readStream.schema("id long").option("maxFilesPerTrigger", "1").parquet(home + "/events")
joined = lookup_join(stream.repartition(4), home + "/dim", "id", columns=["version"], options={**options, "lookup.partition": "max_pt()"})
def write(batch, number):
    say("batch", number=number)
    batch.withColumn("place", place("id")).write.mode("overwrite").parquet(f"{home}/out/{number:03}")
query = joined.writeStream.foreachBatch(write).option("checkpointLocation", home + "/checkpoint").start()
query.processAllAvailable()
query.stop()
say("streamed")

@sf.udf("long")
def slow(key):
    import time
    time.sleep(0.002)
    open(home + "/slow", "a").close()
    return key
many = spark.range(0, 6000, 1, 12).withColumn("id", sf.expr("id % 400"))
joined = lookup_join(many.withColumn("id", slow("id")), home + "/dim.parquet", "id", strategy="cache", options=options)
found = {}
thread = threading.Thread(target=lambda: found.update(rows=joined.collect()))
thread.start()
say("started")
thread.join()
say("survived", versions=sorted({str(r.version) for r in found["rows"]}), count=len(found["rows"]))
"""


def test_two_executors(cluster: Cluster, tmp_path: Path) -> None:
    """One snapshot build for each directory; a stream over a table that changes all the time has one version in each micro-batch, on
    both executors, and none older than before; an executor that is killed costs the retry of its tasks, no more."""
    path = put(tmp_path / "dim.parquet", 1, range(0, KEYS, 2))
    tmp_path.joinpath("events").mkdir()
    for number in range(BATCHES):
        pq.write_table(pa.table({"id": list(range(KEYS))}), tmp_path / "events" / f"{number:03}.parquet")

    def publish(version: int) -> None:
        put(tmp_path / "dim" / f"v={version:04}" / "part.parquet", version, range(0, KEYS, 2))

    publish(1)
    application = Application(cluster, _QUERY)
    try:
        built = application.hear("built")
        assert (built["count"], built["versions"]) == (4000, [1])
        assert len(built["places"]) == 2
        assert loads(cluster, path) == dict.fromkeys(cluster.directories, 1)
        application.answer()

        streamed = threading.Event()

        def change() -> None:
            version = 2
            while not streamed.is_set():
                publish(version)
                version += 1
                streamed.wait(0.03)  # a directory of thousands of versions would be slow to list

        writer = threading.Thread(target=change)
        writer.start()
        try:
            for _ in range(BATCHES):
                application.hear("batch")
                application.answer()
            application.hear("streamed")
        finally:
            streamed.set()
            writer.join()
        versions, places = [], set[str]()
        for directory in sorted((tmp_path / "out").iterdir()):
            rows = ds.dataset(directory).to_table().to_pylist()
            assert len(rows) == KEYS
            found = {row["version"] for row in rows if row["id"] % 2 == 0}
            assert len(found) == 1, (directory.name, found)
            versions.append(found.pop())
            places |= {row["place"] for row in rows}
        assert versions == sorted(versions)
        assert len(set(versions)) > BATCHES // 2
        assert len(places) == 2

        (tmp_path / "slow").unlink(missing_ok=True)
        application.answer()
        application.hear("started")
        while not (tmp_path / "slow").exists():
            threading.Event().wait(0.01)
        put(path, 2, range(0, KEYS, 2))  # what has begun goes on with the version it began with
        os.kill(cluster.executor(1), signal.SIGKILL)
        application.answer()
        survived = application.hear("survived")
        assert survived["count"] == 6000
        assert survived["versions"] == ["1", "None"]
    finally:
        application.close()
        wait_until_settled(path)
