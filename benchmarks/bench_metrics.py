"""What do metrics cost of a lookup? The same lookups with this package's counters and without any.

Batches of 10,000 keys, as the tasks of a join have them and as `LookupTable.get_many` has, and single keys, out of a full cache of
1M rows on a local disk, in CACHE mode (no metadata call) and in UFS mode (a HEAD of a local file). "without": the same table, whose
counters do nothing and are published nowhere for that one call; "unpublished": it counts. Calls alternate at random, for the cost
is a hundredth of what a call's time varies by; "with, again" shows how much the comparison itself is off by. Goal: under 1 % of a
batch's time.

    python -m benchmarks.bench_metrics [--rows N] [--runs N]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import report
from pyspark_lookup import LookupTable
from pyspark_lookup.lookup.lookup_join import LookupSpec, PassSpec, Stage, issue_token, open_pass, options_from_json
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.versions.executions import Execution

BATCH = 10_000
MODES = {
    "CACHE": {"lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 h"},
    "UFS": {},
}
_WARMUP = 50


def find_counters(table: LookupTable) -> list[tuple[object, str]]:
    """The (object, name) of the methods with which a table's engine publishes and counts. The two that publish come first."""
    engine = runtime().engine(table._options)
    publishing = [(engine, "publish_metrics"), (engine, "publish_soon")]
    return [*publishing, *((engine.reader.metrics, name) for name in ("inc", "time", "set_gauge"))]


def open_join(table: LookupTable, keys: pa.Array) -> Callable[[], object]:
    """A function that does what a task of `lookup_join` does for a batch with these keys."""
    options = table.given
    execution = Execution("bench", "1")
    columns = pa.schema([("name", pa.string()), ("x", pa.float64())])
    lookup = LookupSpec(options, pa.schema([("id", keys.type)]), columns, ("name", "x"))
    spec = PassSpec((Stage(lookup, (0,), (0,), "left"),), many=False)
    version = issue_token(runtime().effective(options_from_json(json.dumps(options))), execution)
    tokens = pa.array([version] * len(keys), pa.binary())
    lookups = open_pass(spec.to_text(), {})
    assert not any(part.null_count for part in lookups.answers([keys], [tokens], [execution]))

    def call() -> None:
        list(lookups.answers([keys], [tokens], [execution]))
        lookups.publish()

    return call


def time_calls(call: Callable[[], object], counting: list[tuple[object, str]], runs: int) -> dict[str, list[float]]:
    """Time calls with and without counting, in a new random order in each round."""
    silenced = {"with metrics": [], "with, again": [], "unpublished": counting[:2], "without": counting}
    names = list(silenced)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    rng = random.Random(7)
    for number in range(_WARMUP + runs):
        for name in rng.sample(names, len(names)):
            for owner, method in silenced[name]:
                setattr(owner, method, lambda *given: None)  # only on this object: its class is unchanged
            started = time.perf_counter()
            call()
            took_s = time.perf_counter() - started
            for owner, method in silenced[name]:
                delattr(owner, method)
            if number >= _WARMUP:
                seconds[name].append(took_s)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-metrics-") as directory:
        path = Path(directory) / "dim.parquet"
        rows = args.rows
        pq.write_table(
            pa.table({"id": np.arange(rows), "name": [f"n{n}" for n in range(rows)], "x": np.arange(rows) * 0.5}), path
        )
        batch = pa.table({"id": np.random.default_rng(3).integers(0, rows, BATCH)})
        for source, options in MODES.items():
            options = {"lookup.keys": "id", "lookup.cache": "FULL", **options}
            with LookupTable(str(path), {**options, "lookup.cache.dir": f"{directory}/{source}"}) as table:
                table.warm()
                calls = {
                    f"{BATCH:,} keys of a join": open_join(table, batch.column("id").combine_chunks()),
                    f"{BATCH:,} keys": lambda table=table: table.get_many(batch),
                    "a single key": lambda table=table: table.get(7),
                }
                for label, call in calls.items():
                    times = time_calls(call, find_counters(table), args.runs)
                    report(f"{label}, FULL, {source}", times, "without")
                    medians = {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}
                    for name in ("with metrics", "with, again", "unpublished"):
                        more_us = medians[name] - medians["without"]
                        print(f"\n{name}: {more_us:.1f} us of {medians[name]:.0f}, {more_us / medians[name]:.2%}")


if __name__ == "__main__":
    main()
