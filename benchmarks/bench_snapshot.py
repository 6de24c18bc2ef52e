"""What does a full cache's snapshot cost: to build, to reload after a small change, to open, to keep in memory?

Every time is taken inside a process of its own, started for it, with the files in the page cache:

build    10M rows of five columns from 20 local parquet files, checksums and fsync included, beside what
         `pyarrow.parquet.read_table(use_threads=False)` takes to read them; goal at most 4 times that.
reload   one of 100 files replaced, then `reload()`, over and over; goal at most 15 % of the full build's
         time, and no more bytes fetched than that file has. Local, and from an S3 server on this machine.
open     an existing snapshot until it can be probed (goal 20 ms, imports apart) and until the first 65,536
         keys are answered (goal 150 ms).
memory   four processes on one snapshot: what each adds, from /proc/<pid>/smaps_rollup.
curve    1M to 100M rows: time on one core and on all, memory, disk, lookups per second; goals for the
         largest table: at most 1.3 times the time per row of 10M, all cores at least 1.5 times as fast as one.

    python -m benchmarks.bench_snapshot [--parts build,reload,open,memory,curve] [--rows N] [--runs N]
"""

from __future__ import annotations

import argparse
import base64
import inspect
import json
import logging
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import servers
from benchmarks.bench_lookup import BATCH, COLUMNS, lookup_options, make_lookup_table
from benchmarks.common import report
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.sources.registry import parse_options

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("build", "reload", "open", "memory")
CURVE = (1_000_000, 3_000_000, 10_000_000, 30_000_000)
WORKERS = 4
PROBED_BATCHES = 20
BUCKET, PREFIX = "bench", "lookup"


# --- what runs in processes of its own: each function is the whole program of one ------------------


def built(path: str, options: dict[str, str], core: int) -> dict[str, float]:
    """Make a snapshot where there is none."""
    import os  # noqa: PLC0415
    import resource  # noqa: PLC0415
    import threading  # noqa: PLC0415
    import time  # noqa: PLC0415

    if core >= 0:
        os.sched_setaffinity(0, {core})
    from pyspark_lookup import LookupTable  # noqa: PLC0415

    anonymous = [0]

    def watch() -> None:
        while True:
            with open("/proc/self/status") as status:
                found = next(line for line in status if line.startswith("RssAnon"))
            anonymous[0] = max(anonymous[0], int(found.split()[1]) * 1024)
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()
    started, cpu_before = time.perf_counter(), time.process_time()
    table = LookupTable(path, options)
    table.warm()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_before
    rows, size = (table.metrics()[name] for name in ("numCachedRecords", "numCachedBytes"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "cpu": cpu, "rows": rows, "bytes": size, "peak": peak, "anonymous": anonymous[0]}


def read(path: str, threads: bool, core: int) -> dict[str, float]:
    """Read the same files into an Arrow table."""
    import os  # noqa: PLC0415
    import resource  # noqa: PLC0415
    import time  # noqa: PLC0415

    if core >= 0:
        os.sched_setaffinity(0, {core})
    import pyarrow.parquet as pq  # noqa: PLC0415

    started, cpu_before = time.perf_counter(), time.process_time()
    table = pq.read_table(path, use_threads=threads)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "cpu": cpu, "rows": table.num_rows, "bytes": table.nbytes, "peak": peak}


def reloaded(path: str, options: dict[str, str], bucket: str, changes: list[list[Any]], core: int) -> list[list[float]]:
    """[seconds, bytes of the changed file, bytes fetched, requests] of a full load and of a reload after each change.

    A change is [new file, name in the table, a key in it, its new price]. `bucket` "": a local table.
    """
    import os  # noqa: PLC0415
    import shutil  # noqa: PLC0415
    import time  # noqa: PLC0415

    if core >= 0:
        os.sched_setaffinity(0, {core})
    from pyspark_lookup import LookupTable  # noqa: PLC0415

    table = LookupTable(path, options)
    found = []
    for change in [None, *changes]:
        if change is not None and bucket:
            import boto3  # noqa: PLC0415

            client = boto3.client("s3", endpoint_url=options["lookup.storage.endpoint_url"])
            client.upload_file(change[0], bucket, f"{path.split('/', 3)[3]}/{change[1]}")
        elif change is not None:
            shutil.copyfile(change[0], f"{path}/.new")
            os.replace(f"{path}/.new", f"{path}/{change[1]}")
            time.sleep(0.1)  # a file of just now is let rest by the load, which would be in its time
        before = table.metrics()
        started = time.perf_counter()
        table.reload()
        seconds = time.perf_counter() - started
        after = table.metrics()
        size = os.path.getsize(change[0]) if change is not None else 0
        found.append([seconds, size, *(after[name] - before[name] for name in ("ufsGetBytes", "ufsGetCount"))])
        if change is not None:
            (row,) = table.get(change[2])
            assert row["price"] == change[3], (row, change)
    return found


def opened(planned: str, keys_path: str, names: list[str]) -> dict[str, float]:
    """Open a snapshot as a worker does that was sent a plan, and answer batches of keys."""
    import itertools  # noqa: PLC0415
    import time  # noqa: PLC0415

    started = time.perf_counter()
    import base64  # noqa: PLC0415
    import pickle  # noqa: PLC0415
    import resource  # noqa: PLC0415

    import pyarrow as pa  # noqa: PLC0415

    from pyspark_lookup.columnar.keys import Keys  # noqa: PLC0415
    from pyspark_lookup.lookup.runtime import runtime  # noqa: PLC0415

    table, options = pickle.loads(base64.b64decode(planned))
    batches = pa.ipc.open_file(keys_path).read_all().column(0).chunks
    imported = time.perf_counter()
    full = runtime().engine(options).reader.fulls.get_cache(table, options)
    assert full is not None
    current = full.current()
    assert current is not None
    _, snapshot = current
    open_at = time.perf_counter()
    ends = []
    for batch in batches:
        answer = snapshot.get(names, Keys([batch]))
        assert len(answer.keys) == len(batch)
        ends.append(time.perf_counter())
    later = sorted(end - begin for begin, end in itertools.pairwise(ends))
    return {
        "imports": imported - started,
        "open": open_at - imported,
        "first": ends[0] - open_at,
        "both": ends[0] - imported,
        "later": later[len(later) // 2],
        "major faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
    }


def answered(path: str, options: dict[str, str], keys_path: str) -> dict[str, float]:
    """A new LookupTable, and its first answers."""
    import itertools  # noqa: PLC0415
    import time  # noqa: PLC0415

    started = time.perf_counter()
    import pyarrow as pa  # noqa: PLC0415

    from pyspark_lookup import LookupTable  # noqa: PLC0415

    keys = pa.ipc.open_file(keys_path).read_all()
    batches = [pa.table([batch], [keys.column_names[0]]) for batch in keys.column(0).chunks]
    imported = time.perf_counter()
    table = LookupTable(path, options)
    ends = []
    for batch in batches:
        assert table.get_many(batch).num_rows == batch.num_rows
        ends.append(time.perf_counter())
    later = sorted(end - begin for begin, end in itertools.pairwise(ends))
    return {"imports": imported - started, "both": ends[0] - imported, "later": later[len(later) // 2]}


def worker(planned: str, keys_path: str, names: list[str]) -> None:
    """Do what standard input says: open the snapshot, probe it, tell what memory is used; a line back for each."""
    import base64  # noqa: PLC0415
    import json  # noqa: PLC0415
    import pickle  # noqa: PLC0415
    import sys  # noqa: PLC0415
    from pathlib import Path  # noqa: PLC0415

    import pyarrow as pa  # noqa: PLC0415

    from pyspark_lookup.columnar.keys import Keys  # noqa: PLC0415
    from pyspark_lookup.lookup.runtime import runtime  # noqa: PLC0415

    table, options = pickle.loads(base64.b64decode(planned))
    batches = pa.ipc.open_file(keys_path).read_all().column(0).chunks
    snapshot = None
    for line in sys.stdin:
        sizes = {}
        if line.strip() == "open":
            full = runtime().engine(options).reader.fulls.get_cache(table, options)
            assert full is not None
            current = full.current()
            assert current is not None
            snapshot = current[1]
        elif line.strip() == "probe":
            assert snapshot is not None
            for batch in batches:
                assert len(snapshot.get(names, Keys([batch])).keys) == len(batch)
        else:
            rows = (row.split() for row in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
            sizes = {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}
        print(json.dumps(sizes), flush=True)


def fresh(function: Callable[..., Any], *args: object, prefix: Sequence[str] = ()) -> Any:
    """Run a function in a new process, which imports only what the function imports. Returns its result."""
    process = subprocess.run(
        [*prefix, *_command(function, args)], stdout=subprocess.PIPE, cwd=ROOT, check=True, text=True
    )
    return json.loads(process.stdout.splitlines()[-1])


def _command(function: Callable[..., Any], args: tuple[object, ...]) -> list[str]:
    code = f"from __future__ import annotations\n{inspect.getsource(function)}\nimport json\n"
    return [sys.executable, "-c", f"{code}print(json.dumps({function.__name__}(*{args!r})))"]


# --- the parts --------------------------------------------------------------------------------------


def measure_build(args: argparse.Namespace, path: Path, cache: Path) -> None:
    """(i) Measure a build beside pyarrow's read of the same files, in turn."""
    for where, core in (("pinned to one core", args.core), ("not pinned", -1)):
        seconds: dict[str, list[float]] = {}
        cpu: dict[str, list[float]] = {}
        last: dict[str, dict[str, float]] = {}
        for number in range(1 + args.runs):
            runs: dict[str, Callable[[], Any]] = {
                "read_table(use_threads=False)": lambda: fresh(read, str(path), False, core),  # noqa: B023
                "build": lambda: fresh(built, str(path), lookup_options("id", cache, cached=True), core),  # noqa: B023
            }
            if core < 0:
                runs["read_table(use_threads=True)"] = lambda: fresh(read, str(path), True, -1)
            for name, run in runs.items():
                last[name] = run()
                shutil.rmtree(cache, ignore_errors=True)
                if number:
                    seconds.setdefault(name, []).append(last[name]["seconds"])
                    cpu.setdefault(name, []).append(last[name]["cpu"])
        assert len({result["rows"] for result in last.values()}) == 1, last
        report(
            f"Building a snapshot, {args.rows:,} rows × 5 columns, {where}", seconds, "read_table(use_threads=False)"
        )
        for name, result in last.items():
            print(
                f"- {name}: {statistics.median(cpu[name]):.3f} s of CPU, {result['bytes'] / 1e6:.0f} MB, peak memory of the process "
                f"{result['peak'] / 1e6:.0f} MB"
            )
        for clock, times in (("time", seconds), ("CPU", cpu)):
            ratio = _ratio(times["build"], times["read_table(use_threads=False)"])
            _tell(f"build, times pyarrow's read ({clock})", ratio, 4)


def _ratio(seconds: list[float], peer_seconds: list[float]) -> float:
    return statistics.median(time_s / peer_s for time_s, peer_s in zip(seconds, peer_seconds, strict=True))


def measure_reload(args: argparse.Namespace, path: Path, cache: Path) -> None:
    """(ii) Measure a full load, and reloads after one file of many has changed, from each store."""
    with tempfile.TemporaryDirectory(prefix="reload-", dir=args.data) as work:
        changes = _changes(path, Path(work), args.changes)
        runs = []
        for _ in range(args.runs):
            table = Path(work) / "table"
            shutil.copytree(path, table, copy_function=os.link)
            options = lookup_options("id", cache, cached=True)
            runs.append(fresh(reloaded, str(table), options, "", changes, args.core))
            shutil.rmtree(table)
            shutil.rmtree(cache)
        _show_reloads(f"local files, pinned to one core, {args.rows:,} rows", runs)
        runs = []
        with servers.s3(path, BUCKET, PREFIX, args.delay_ms / 1000) as endpoint:
            for number in range(args.runs):
                options = lookup_options("id", cache, cached=True) | {"lookup.storage.endpoint_url": endpoint}
                # The changes of a run stay in the bucket, so each run needs new ones.
                next_changes = _changes(path, Path(work), args.changes, number + 1)
                runs.append(fresh(reloaded, f"s3://{BUCKET}/{PREFIX}", options, BUCKET, next_changes, -1))
                shutil.rmtree(cache)
        _show_reloads(f"S3 on this machine, {args.delay_ms:g} ms a request, {args.rows:,} rows", runs)


def _changes(path: Path, work: Path, count: int, round_number: int = 0) -> list[list[Any]]:
    """Write new versions of some files of a table: the same rows with other prices."""
    rng = np.random.default_rng(round_number)
    changes: list[list[Any]] = []
    names = sorted(file.name for file in path.iterdir())
    for number in range(count):
        name = names[(number * 37 + 5) % len(names)]
        table = pq.read_table(path / name)
        prices = rng.random(table.num_rows)
        target = work / f"changed-{number}.parquet"
        pq.write_table(table.set_column(1, "price", pa.array(prices)), target, compression="zstd")
        changes.append([str(target), name, table.column("id")[7].as_py(), float(prices[7])])
    return changes


def _show_reloads(where: str, runs: list[list[list[float]]]) -> None:
    print(f"\n## Reloading after 1 of 100 files changed: {where}")
    print("| load | runs | median s | max s | share of the full load | MB fetched | MB of the file | requests |")
    print("|---|---|---|---|---|---|---|---|")
    shares, over = [], []
    for number in range(len(runs[0])):
        seconds = [run[number][0] for run in runs]
        share = 100 * statistics.median(run[number][0] / run[0][0] for run in runs)
        size, fetched, requests = (statistics.median(run[number][place] for run in runs) for place in (1, 2, 3))
        print(
            f"| {f'change {number}' if number else 'full'} | {len(seconds)} | {statistics.median(seconds):.3f} | "
            f"{max(seconds):.3f} | {share:.1f} % | {fetched / 1e6:.3f} | {f'{size / 1e6:.3f}' if number else ''} | {requests:g} |"
        )
        if number:
            shares.append(share)
            over += [run[number][2] / run[number][1] for run in runs]
    _tell("reload, % of the full load, median of the changes", statistics.median(shares), 15)
    _tell("reload, % of the full load, the slowest change", max(shares), 15)
    _tell("reload, bytes fetched per byte of the file, most", max(over), 1)


def measure_open(args: argparse.Namespace, path: Path, cache: Path, keys_path: Path) -> None:
    """(iii) Measure how fresh processes open an existing snapshot."""
    options = lookup_options("id", cache, cached=True)
    planned, names = _planned(path, options), [name for name in COLUMNS if name != "id"]
    openings = []
    whole = []
    for number in range(1 + args.opens):
        runs = fresh(opened, planned, str(keys_path), names), fresh(answered, str(path), options, str(keys_path))
        if number:
            openings.append(runs[0])
            whole.append(runs[1])
    print(f"\n## Opening a snapshot of {args.rows:,} rows in a fresh process")
    print("| what | processes | median ms | p99 ms | max ms |")
    print("|---|---|---|---|---|")
    labels = {
        "imports": "imports (apart)",
        "open": "opening",
        "first": f"first {BATCH:,} keys",
        "both": f"opening and first {BATCH:,} keys",
        "later": f"later {BATCH:,} keys (median of a process)",
    }
    for name, text in labels.items():
        _show_times(text, [result[name] for result in openings])
    _show_times("LookupTable made, and first get_many (CACHE)", [result["both"] for result in whole])
    _show_times("later get_many (median of a process)", [result["later"] for result in whole])
    print(
        f"- major page faults in all {len(openings)} processes: {sum(result['major faults'] for result in openings):g}"
    )
    _tell("opening, ms", 1000 * statistics.median(result["open"] for result in openings), 20)
    _tell("opening and first batch, ms", 1000 * statistics.median(result["both"] for result in openings), 150)


def _show_times(label: str, seconds: list[float]) -> None:
    times = [1000 * time_s for time_s in seconds]
    print(
        f"| {label} | {len(times)} | {statistics.median(times):.1f} | {float(np.percentile(times, 99)):.1f} | {max(times):.1f} |"
    )


def measure_memory(args: argparse.Namespace, path: Path, cache: Path, keys_path: Path, size: float) -> None:
    """(iv) Measure the memory of several processes on one snapshot."""
    planned = _planned(path, lookup_options("id", cache, cached=True))
    names = [name for name in COLUMNS if name != "id"]
    command = _command(worker, (planned, str(keys_path), names))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    workers = [subprocess.Popen(command, cwd=ROOT, text=True, **pipes) for _ in range(WORKERS)]  # type: ignore[call-overload]

    def ask(question: str) -> list[dict[str, int]]:
        answers = []
        for process in workers:
            process.stdin.write(f"{question}\n")
            process.stdin.flush()
            answers.append(json.loads(process.stdout.readline()))
        return answers

    print(f"\n## Memory of {WORKERS} processes on one snapshot of {args.rows:,} rows ({size / 1e6:.0f} MB on disk)")
    print("| when | each: RSS MB | PSS MB | private clean MB | private dirty MB | all: PSS MB |")
    print("|---|---|---|---|---|---|")
    pss = []
    for when, question in (
        ("imports done", "tell"),
        ("snapshot open", "open"),
        (f"{PROBED_BATCHES} batches probed", "probe"),
    ):
        ask(question)
        usages = ask("tell")
        medians = [
            statistics.median(usage[k] for usage in usages) / 1e6
            for k in ("Rss", "Pss", "Private_Clean", "Private_Dirty")
        ]
        pss.append(sum(usage["Pss"] for usage in usages))
        print(f"| {when} | {' | '.join(f'{value:.1f}' for value in medians)} | {pss[-1] / 1e6:.1f} |")
    print(f"- all {WORKERS} together grew by {(pss[-1] - pss[0]) / size:.2f} times the snapshot")
    for process in workers:
        process.stdin.close()
        process.wait()


def measure_curve(args: argparse.Namespace, work: Path) -> None:
    """(v) Measure builds of ever larger tables, and lookups in them."""
    sizes = sorted({rows for rows in CURVE if rows <= args.curve_rows} | {args.curve_rows})
    print(
        f"\n## From {sizes[0]:,} to {sizes[-1]:,} rows × 5 columns, {args.curve_runs} builds each, files in the page cache"
    )
    print(
        "| rows | one core: median s | all: median s | max s | us a row, all | all, times faster | CPU s, all | anonymous memory MB "
        "| disk MB | lookups a second |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    seconds_per_row, faster = {}, 0.0
    for rows in sizes:
        path = make_lookup_table(args.data, rows, max(rows // 500_000, 1), unique=False, seed=args.seed)
        keys_path = write_keys(path, work / "keys.arrow", args.seed)
        options = lookup_options("id", work / "cache", cached=True)
        results: dict[int, list[dict[str, float]]] = {args.core: [], -1: []}
        answers: list[float] = []
        for _ in range(args.curve_runs):
            for core, runs in results.items():
                shutil.rmtree(work / "cache", ignore_errors=True)
                subprocess.run(["sh", "-c", f"cat '{path}'/* > /dev/null; sync"], check=True)
                runs.append(fresh(built, str(path), options, core))
            answers.append(BATCH / fresh(answered, str(path), options, str(keys_path))["later"])
        one_core, all_cores = ([run["seconds"] for run in results[core]] for core in (args.core, -1))
        seconds_per_row[rows] = statistics.median(all_cores) / rows
        faster = statistics.median(one_core) / statistics.median(all_cores)
        cpu, anonymous = (statistics.median(run[key] for run in results[-1]) for key in ("cpu", "anonymous"))
        print(
            f"| {rows:,} | {statistics.median(one_core):.2f} | {statistics.median(all_cores):.2f} | {max(all_cores):.2f} | "
            f"{seconds_per_row[rows] * 1e6:.3f} | {faster:.2f} | {cpu:.1f} | {anonymous / 1e6:.0f} | {results[-1][0]['bytes'] / 1e6:.0f} | "
            f"{statistics.median(answers):,.0f} |",
            flush=True,
        )
        shutil.rmtree(work / "cache", ignore_errors=True)
    few = 10_000_000
    if few in seconds_per_row and sizes[-1] > few:
        _tell(
            f"{sizes[-1]:,} rows, time a row over that of {few:,}",
            seconds_per_row[sizes[-1]] / seconds_per_row[few],
            1.3,
        )
        print(f"- all cores over one: {faster:.2f} times as fast, goal 1.5: {'reached' if faster >= 1.5 else 'MISSED'}")


def _planned(path: Path, options: dict[str, str]) -> str:
    """Encode the table and the options as a plan carries them to workers."""
    parsed = parse_options({**options, "path": str(path)})
    table = runtime().engine(parsed).reader.find(parsed).table
    return base64.b64encode(pickle.dumps((table, parsed))).decode()


def _tell(label: str, value: float, goal: float) -> None:
    print(f"- {label}: {value:.2f}, goal at most {goal:g}: {'reached' if value <= goal else 'MISSED'}")


def write_keys(path: Path, target: Path, seed: int) -> Path:
    """Write batches of keys as an Arrow file. All of them are keys of the table."""
    ids = pq.read_table(path, columns=["id"]).column("id").to_numpy()
    rng = np.random.default_rng(seed)
    schema = pa.schema([("id", pa.int64())])
    with pa.OSFile(str(target), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for _ in range(PROBED_BATCHES):
            batch = pa.array(ids[rng.integers(0, len(ids), BATCH)])
            writer.write_batch(pa.RecordBatch.from_arrays([batch], schema=schema))
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--runs", type=int, default=5, help="builds, and loads followed by reloads")
    parser.add_argument("--changes", type=int, default=5, help="reloads after each full load; the fourth joins deltas")
    parser.add_argument("--opens", type=int, default=15, help="processes that open the snapshot")
    parser.add_argument("--curve-rows", type=int, default=100_000_000, help="of the largest table of the curve")
    parser.add_argument("--curve-runs", type=int, default=3, help="builds of each table of the curve")
    parser.add_argument("--delay-ms", type=float, default=30, help="of each request to the S3 server")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--core", type=int, default=1, help="the one that is pinned to")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    work = Path(tempfile.mkdtemp(prefix="snapshot-", dir=args.data))
    try:
        if "curve" in args.parts:
            measure_curve(args, work)
        if set(PARTS) & set(args.parts):
            path = make_lookup_table(args.data, args.rows, 20, unique=False, seed=args.seed)
        if "build" in args.parts:
            measure_build(args, path, work / "built")
        if "reload" in args.parts:
            many = make_lookup_table(args.data, args.rows, 100, unique=False, seed=args.seed)
            measure_reload(args, many, work / "reloaded")
        if {"open", "memory"} & set(args.parts):
            keys_path = write_keys(path, work / "keys.arrow", args.seed)
            build = fresh(built, str(path), lookup_options("id", work / "cache", cached=True), -1)
        if "open" in args.parts:
            measure_open(args, path, work / "cache", keys_path)
        if "memory" in args.parts:
            measure_memory(args, path, work / "cache", keys_path, build["bytes"])
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
