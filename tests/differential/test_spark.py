"""Histories of directories that Spark jobs write, in between what others write there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from tests.differential.histories import History, Setup, Step
from tests.differential.machine import run
from tests.differential.processes import Nursery
from tests.differential.shorten import report
from tests.differential.tables import Place
from tests.fuzzing import seeds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

_SHAPES = ("int32", "int64", "string", "list64", "struct32", "map", "date32", "stamp", "instant", "dec12", "binary")
_VALUES = ("01", "2", "eu", "1.50")
_JOBS = ("append", "append", "overwrite")
_AT_END = 30


@pytest.mark.parametrize("partitioned", [False, True], ids=["flat", "partitioned"])
def test_what_spark_jobs_write(
    tmp_path: Path,
    nursery: Nursery,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    partitioned: bool,
) -> None:
    """Appends and overwrites of Spark, of timestamps in either form, are read alike, beside files of other writers."""
    for seed in seeds(1):
        root = tmp_path / str(seed)
        root.mkdir()
        history = drawn(seed, spark, monkeypatch, partitioned)
        found = run(history, root, nursery, at_end=_AT_END)
        if found:
            pytest.fail(report(history, found), pytrace=False)


def drawn(seed: int, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, partitioned: bool) -> History:
    """The history of a seed, some of whose steps are jobs of Spark."""
    rng = random.Random(f"{seed} {partitioned}")
    partitions = (("r", _VALUES),) if partitioned else ()
    shape = rng.choice(_SHAPES)

    def job(place: Place, step: Step, rng: random.Random) -> None:
        if place.kind != "directory":
            return
        how, int96 = step.args
        kind = "INT96" if int96 else "TIMESTAMP_MICROS"
        spark.conf.set("spark.sql.parquet.outputTimestampType", kind)
        rows = place.drawn_rows(rng, "int64", shape, 12)
        if partitioned:
            rows = rows.append_column("r", pa.array([rng.choice(_VALUES) for _ in range(rows.num_rows)]))
        frame = spark.createDataFrame(rows)
        writer = frame.repartition(2).write.mode(how)
        (writer.partitionBy("r") if partitioned else writer).parquet(str(place.path))

    def put(op: str) -> Step:
        file = (rng.randrange(4), tuple(rng.randrange(4) for _ in partitions), "int64", shape, 8, "rename", "pyarrow")
        return Step(op, file if op == "put" else ("directory", *file), rng.getrandbits(32))

    monkeypatch.setitem(Place.more, "job", job)
    steps = [put("become")]
    for _ in range(4):
        steps.append(Step("job", (rng.choice(_JOBS), rng.random() < 0.5), rng.getrandbits(32)))
        steps += [put("put")] if rng.random() < 0.3 else []
    setup = Setup(partitions=partitions, partition="r=01" if partitioned else "max_pt()")
    return History(setup, tuple(steps), seed)
