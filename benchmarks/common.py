"""What the benchmarks share: the table, the session, the timing, the printed result."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

# Before a JVM starts: its workers inherit these.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_DEFAULT_REGION": "us-east-1"}
_TICKS = os.sysconf("SC_CLK_TCK")


def make_table(directory: Path, rows: int, files: int, seed: int, row_group: int = 500_000) -> Path:
    """Write a table of `rows` customers (id, name, segment, score, since) in zstd parquet files. Made once."""
    table = directory / f"customers-{rows}-{files}-{row_group}-{seed}"
    if (table / "done").exists():
        return table / "data"
    rng = np.random.default_rng(seed)
    (table / "data").mkdir(parents=True, exist_ok=True)
    file_rows = rows // files
    segments = np.array(["retail", "wholesale", "public", "partner"])
    for number in range(files):
        columns = {
            "id": np.arange(number * file_rows, (number + 1) * file_rows),
            "name": pa.array(np.char.add("customer-", rng.integers(0, rows // 2, file_rows).astype(str))),
            "segment": pa.array(segments[rng.integers(0, 4, file_rows)]),
            "score": rng.random(file_rows),
            "since": pa.array(rng.integers(0, 20_000, file_rows).astype("int32"), pa.date32()),
        }
        pq.write_table(
            pa.table(columns), table / "data" / f"part-{number}.parquet", compression="zstd", row_group_size=row_group
        )
    (table / "done").touch()
    return table / "data"


def session(cores: int, conf: Mapping[str, str] | None = None) -> SparkSession:
    """Start a local session that logs only errors."""
    builder = SparkSession.builder.master(f"local[{cores}]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.driver.memory", "3g")
    for key, value in (conf or {}).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def alternate(contenders: Mapping[str, Callable[[], object]], warmup: int, runs: int) -> dict[str, list[float]]:
    """Time the contenders in turn, so that a drift of the machine affects all of them alike. Returns the seconds of each run."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warmup + runs):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def cpu_s() -> tuple[float, float]:
    """(CPU seconds of this process and its descendants so far, including those that have ended; the part of Spark's Python workers)."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    workers: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, text = path.read_text().rpartition(")")
        except OSError:  # the process has ended
            continue
        process, fields = int(path.parent.name), text.split()
        if process != os.getpid() and head.rpartition("(")[2].startswith("python"):
            workers.add(process)
        children.setdefault(int(fields[1]), []).append(process)
        seconds[process] = sum(map(int, fields[11:15])) / _TICKS
    pending, total_s, workers_s = [os.getpid()], 0.0, 0.0
    while pending:
        process = pending.pop()
        total_s += seconds.get(process, 0.0)
        workers_s += seconds.get(process, 0.0) if process in workers else 0.0
        pending += children.get(process, [])
    return total_s, workers_s


def report(question: str, seconds: Mapping[str, list[float]], peer: str) -> None:
    """Print each contender's median, p99 and largest time, and the median of its ratios to the peer, run by run."""
    print(f"\n## {question}")
    print(f"command: {' '.join(['python', '-m', *_module(), *sys.argv[1:]])}")
    print(
        f"machine: {os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}"
    )
    print("| contender | runs | median s | p99 s | max s | ratio to peer (median of pairs) |")
    print("|---|---|---|---|---|---|")
    for name, times in seconds.items():
        ratios = [time_s / peer_s for time_s, peer_s in zip(times, seconds[peer], strict=True)]
        ratio = "peer" if name == peer else f"{statistics.median(ratios):.2f}"
        p99 = float(np.percentile(times, 99))
        print(f"| {name} | {len(times)} | {statistics.median(times):.3f} | {p99:.3f} | {max(times):.3f} | {ratio} |")


def _module() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    return [spec.name] if spec else [sys.argv[0]]
