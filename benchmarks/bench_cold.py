"""What does the first lookup join of a fresh session cost, and how much of that is Spark's own start of Python?

    python -m benchmarks.bench_cold [--runs N]

Six chained lookups in tables of 1,000 rows, nothing cached. Each contender has a process, a JVM and a session of its own, which has run a
query without Python; the contenders take turns. The peer, `constants`, has functions in place of ours that return constants: a
`mapInArrow` function that returns one row, which Spark broadcasts as it does the versions, and an Arrow UDF that returns as many columns.
So the peer shows what Spark's workers, their imports of pyarrow, and as many columns cost.

"calls" is the building of the DataFrame, "first run" its first execution. CPU seconds are those of the whole process tree, on which other
programs of the machine have little influence; "workers" is the share of Spark's Python workers. Goal: a first run of at most 3 s, or no longer
than the peer's. Then: what imports cost in a worker.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.common import cpu_s, make_table, report, session

TABLES, ROWS = 6, 1000
CONTENDERS = ("constants", "lookups, cache", "lookups, auto")
PEER = CONTENDERS[0]
IMPORTS = {
    "numpy and pyarrow": ("", "import pyarrow"),
    "pandas": ("import pyarrow", "import pandas"),
    "what Spark's workers run": ("", "import pyspark.worker"),
    "pyspark_lookup in a worker, after these": (
        "import pyspark.worker, pyarrow",
        "import pyspark_lookup.spark.reading",
    ),
    "sqlglot (only for lookup.where, lookup.schema)": ("import pyarrow", "import sqlglot"),
}
_IMPORT = "import resource\n{}\ndef cpu_s():\n    used = resource.getrusage(resource.RUSAGE_SELF)\n    return used.ru_utime + used.ru_stime\nbefore_s = cpu_s()\n{}\nprint(cpu_s() - before_s)"


def constant_functions(df: Any) -> Any:
    """Add the columns of a pass over six tables to `df`, by functions that return only constants."""
    from pyspark.sql import functions as sf  # noqa: PLC0415
    from pyspark.sql.pandas.functions import arrow_udf  # noqa: PLC0415
    from pyspark.util import PythonEvalType  # noqa: PLC0415

    kinds = {"name": "string", "segment": "string", "score": "double", "since": "date"}
    columns = {f"t{number}_{name}": kind for number in range(TABLES) for name, kind in kinds.items()}
    fields = [
        pa.field(name, {"string": pa.string(), "double": pa.float64(), "date": pa.date32()}[kind])
        for name, kind in columns.items()
    ]

    def version(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        yield pa.RecordBatch.from_pydict({"version": [b"v" * 150]})

    def rows(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        for arrays in batches:
            count = len(arrays[0])
            values = [
                pa.array(["customer-1"] * count, field.type)
                if field.type == pa.string()
                else pa.array([1] * count)
                .cast(pa.int32() if field.type == pa.date32() else field.type)
                .cast(field.type)
                for field in fields
            ]
            structs = pa.StructArray.from_arrays(values, fields=fields)
            yield pa.ListArray.from_arrays(pa.array(range(count + 1), pa.int32()), structs)

    struct = ", ".join(f"{name}: {kind}" for name, kind in columns.items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = arrow_udf(rows, f"array<struct<{struct}>>", PythonEvalType.SQL_SCALAR_ARROW_ITER_UDF)
    versions = df.sparkSession.range(0, 1, 1, 1).mapInArrow(version, "version binary")
    keys = [sf.col(f"k{number}") for number in range(TABLES)]
    joined = df.crossJoin(sf.broadcast(versions))
    return joined.select("*", sf.inline_outer(function(*keys, sf.col("version")))).drop("version")


def run_contender(name: str, directory: Path) -> dict[str, float]:
    """Run a contender in a new session in this process. Returns its seconds, its CPU seconds and its number of Spark jobs."""
    from pyspark_lookup import lookup_join  # noqa: PLC0415

    warnings.simplefilter("ignore")
    spark = session(2)
    tables = [make_table(directory, ROWS, 1, seed) for seed in range(TABLES)]
    df = spark.range(0, ROWS, 1, 2).selectExpr(*(f"id % {900 + n} AS k{n}" for n in range(TABLES)))
    df.collect()
    cache = tempfile.mkdtemp(dir=directory)
    marks = [(time.perf_counter(), *cpu_s())]
    if name == PEER:
        enriched = constant_functions(df)
    else:
        enriched = df
        for number, table in enumerate(tables):
            enriched = lookup_join(
                enriched,
                str(table),
                {f"k{number}": "id"},
                prefix=f"t{number}_",
                strategy="auto" if name.endswith("auto") else "cache",
                options={"lookup.cache.dir": cache},
            )
    marks.append((time.perf_counter(), *cpu_s()))
    for _ in range(2):
        enriched.write.format("noop").mode("overwrite").save()
        marks.append((time.perf_counter(), *cpu_s()))
    jobs = len(spark.sparkContext.statusTracker().getJobIdsForGroup(None))
    spark.stop()
    measured: dict[str, float] = {"jobs": jobs}
    for phase, before, after in zip(("calls", "first run", "second run"), marks, marks[1:], strict=False):
        for unit, was, is_ in zip(("", ", CPU", ", workers"), before, after, strict=True):
            measured[phase + unit] = is_ - was
    return measured


def fresh_process(name: str, directory: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.bench_cold", "--contender", name, "--dir", str(directory)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True)
    measured: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return measured


def show_imports(runs: int) -> None:
    print("\n## Imports, CPU seconds\n\n| what | median s | ratio to peer |\n|---|---|---|")
    seconds = {
        label: statistics.median(
            float(subprocess.run([sys.executable, "-c", _IMPORT.format(*parts)], stdout=subprocess.PIPE, check=True).stdout)
            for _ in range(runs)
        )
        for label, parts in IMPORTS.items()
    }  # fmt: skip
    peer = next(iter(seconds))
    for label, median_s in seconds.items():
        print(f"| {label} | {median_s:.3f} | {'peer' if label == peer else f'{median_s / seconds[peer]:.2f}'} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.contender is not None:
        print(json.dumps(run_contender(args.contender, args.dir)))
        return
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for number in range(args.runs):
        for name in CONTENDERS[:: -1 if number % 2 else 1]:
            rounds[name].append(fresh_process(name, args.dir))
    for figure in (
        "calls",
        "calls, CPU",
        "first run",
        "first run, CPU",
        "first run, workers",
        "second run",
        "second run, CPU",
    ):
        seconds = {name: [measured[figure] for measured in runs] for name, runs in rounds.items()}
        report(f"Six lookups in a fresh session, {figure}", seconds, PEER)
    for name, runs in rounds.items():
        print(f"\n{name}: {runs[0]['jobs']:.0f} Spark jobs in both runs")
    show_imports(args.runs)


if __name__ == "__main__":
    main()
