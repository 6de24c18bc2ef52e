"""A speculative attempt of a write task: Spark runs it beside the first one, both put files, and the rows are there once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyspark_lookup import LookupTable
from tests.cluster import Cluster
from tests.spark.test_cluster import Application

pytestmark = [pytest.mark.spark, pytest.mark.nightly, pytest.mark.timeout(280)]

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
say("written")
"""


def test_speculative_attempts_add_no_rows(tmp_path: Path) -> None:
    """The commit names the files of one attempt of each task; those of the other are not read."""
    cluster = Cluster(tmp_path, [tmp_path / "cache"] * 2)
    application = Application(cluster, _WRITE, SPECULATION)
    try:
        application.hear("written")
        application.answer()
    finally:
        application.close()
        cluster.close()
    assert {path.name for path in tmp_path.glob("began-1-*")} >= {"began-1-0", "began-1-1"}
    with LookupTable(str(tmp_path / "table")) as table:
        assert sorted(table.scan().column("id").to_pylist()) == list(range(1000))
    events = [json.loads(path.read_text()) for path in sorted((tmp_path / "table" / "_lookup" / "log").iterdir())]
    files = [path for event in events if event["kind"] == "write" for path, _, _ in event["files"]]
    assert len({Path(path).name.split("-")[1] for path in files}) == len(files) == 2  # one of each task
