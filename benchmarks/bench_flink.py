"""How do a full cache's lookup and our `DefaultLookupCache` compare with Flink's `DefaultLookupCache`?

1M rows of five columns by a random int key; uniform and zipf keys, with hits only and with half of them
misses. Flink runs in a JVM of its own (SerialGC, expireAfterWrite, keys built beforehand), ours in a fresh
Python process, in turn on one core, with the same keys. Times are CPU per key of the thread that looks up:
Flink's garbage collector and compiler are not counted. Flink gives back a row object it holds already; ours
is shown as the probe alone (which rows) and with all five columns copied out as Arrow. Neither is a whole
join. Goals: 5 times Flink for the probe, twice with the row copy. Our `DefaultLookupCache` holds the same rows in the
memory of the process; its get tells the access, as Flink's does not with expireAfterWrite. Puts are of batches, rows
built beforehand.

Flink's classes come from PyPI (`apache-flink-libraries`, 330 MB; the jars are kept under --work); a JDK is needed:
`apt-get install openjdk-17-jdk-headless`.

    python -m benchmarks.bench_flink [--rows N] [--rounds N] [--work DIR]
"""

from __future__ import annotations

import argparse
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.bench_lookup import BATCH, COLUMNS, ZIPF, lookup_options
from benchmarks.bench_snapshot import fresh

SOURCE = Path(__file__).resolve().parent / "flink" / "DefaultLookupCacheBench.java"
JARS = ("flink-dist", "flink-table-api-java-uber")
WORKLOADS = {
    "uniform": "uniform, 100 % hits",
    "uniform-half": "uniform, 50 % hits",
    "zipf": f"zipf {ZIPF}, 100 % hits",
    "zipf-half": f"zipf {ZIPF}, 50 % hits",
}


def jars(work: Path, version: str) -> list[Path]:
    """Find the jars of a Flink release that the cache needs. They are downloaded once."""
    jar_paths = [path for name in JARS for path in work.glob(f"{name}-{version}.jar")]
    if len(jar_paths) == len(JARS):
        return jar_paths
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    if subprocess.run([*command, "-d", str(work), f"apache-flink-libraries=={version}"], check=False).returncode:
        raise SystemExit(
            f"apache-flink-libraries {version}: not to be had from the package index, so nothing is measured"
        )
    (wheel,) = work.glob(f"apache_flink_libraries-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in JARS:
            (work / f"{name}-{version}.jar").write_bytes(archive.read(f"pyflink/lib/{name}-{version}.jar"))
    wheel.unlink()
    return [work / f"{name}-{version}.jar" for name in JARS]


def compiled(work: Path, jar_paths: list[Path], options: str) -> list[str]:
    """Compile the benchmark's Java class. Returns the command that runs it."""
    if shutil.which("java") is None or shutil.which("javac") is None:
        raise SystemExit("java and javac: not installed; apt-get install openjdk-17-jdk-headless")
    classpath = ":".join([str(work / "classes"), *map(str, jar_paths)])
    subprocess.run(["javac", "-cp", classpath, "-d", str(work / "classes"), str(SOURCE)], check=True)
    return ["java", *options.split(), "-cp", classpath, "DefaultLookupCacheBench"]


def write(directory: Path, rows: int, batches: int, seed: int) -> None:
    """Write the table, and the keys of each workload as little-endian ints. Stored ids are even, so an odd key is a miss."""
    rng = np.random.default_rng(seed)
    ids = np.unique(rng.integers(0, 2**30, rows + rows // 50 + 10) * 2)
    ids = rng.permutation(ids)[:rows].astype("<i4")
    columns = [
        pa.array(ids),
        pa.array(ids / 2.0),
        pa.array([f"name-{number:019d}" for number in ids.tolist()]),
        pa.array([f"segment-{number % 1000:05d}-of-customers" for number in ids.tolist()]),
        pa.array([f"country-{number % 200:03d}" for number in ids.tolist()]),
    ]
    (directory / "table").mkdir()
    pq.write_table(pa.table(columns, COLUMNS), directory / "table" / "part-0.parquet", compression="zstd")
    ids.tofile(directory / "entries.bin")
    weights = np.cumsum(np.arange(1, rows + 1) ** -ZIPF)
    ids = rng.permutation(ids)  # the hot rows lie anywhere in the table
    for workload in WORKLOADS:
        count = batches * BATCH
        if workload.startswith("zipf"):
            picked = np.searchsorted(weights, rng.random(count) * weights[-1])
        else:
            picked = rng.integers(0, rows, count)
        keys = ids[picked]
        if workload.endswith("half"):
            keys = keys + rng.integers(0, 2, count, dtype=np.int32)
        keys.astype("<i4").tofile(directory / f"keys-{workload}.bin")


def looked_up(
    directory: str, path: str, options: dict[str, str], size: int, warmup: int, workloads: list[str]
) -> dict[str, dict[str, object]]:
    """Of each workload: hits and sums, and CPU ns of each batch's probe and of its whole lookup; in a process of its own."""
    import time  # noqa: PLC0415

    import numpy as np  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    from pyspark_lookup.cache.memory import KEY_INDEX, DefaultLookupCache  # noqa: PLC0415
    from pyspark_lookup.columnar.keys import Keys, as_indices  # noqa: PLC0415
    from pyspark_lookup.lookup.runtime import runtime  # noqa: PLC0415
    from pyspark_lookup.sources.registry import parse_options  # noqa: PLC0415

    parsed = parse_options({**options, "path": path})
    reader = runtime().engine(parsed).reader
    full = reader.fulls.get_cache(reader.find(parsed).table, parsed)
    assert full is not None
    current = full.current()
    assert current is not None
    snapshot = current[1]
    (layer,) = snapshot.layers
    names = [name for name in snapshot.schema.names if name != "id"]
    cache = DefaultLookupCache.new_builder().expire_after_write(3600).build()
    rows, puts = pq.read_table(path), []
    for start in range(0, rows.num_rows - size + 1, size):
        batch = rows.slice(start, size).combine_chunks()
        keyed = batch.append_column(KEY_INDEX, pa.array(np.arange(size)))
        start_ns = time.process_time_ns()
        cache.put_many(batch.select(["id"]), keyed)
        puts.append(time.process_time_ns() - start_ns)
    last_rows = rows.slice(rows.num_rows // size * size)
    cache.put_many(
        last_rows.select(["id"]), last_rows.append_column(KEY_INDEX, pa.array(np.arange(last_rows.num_rows)))
    )
    held = cache._entries
    assert held is not None
    results: dict[str, dict[str, object]] = {}
    for workload in workloads:
        numbers = np.fromfile(f"{directory}/keys-{workload}.bin", "<i4")
        batches = [pa.array(numbers[start : start + size]) for start in range(0, len(numbers), size)]
        probes, wholes = [], []
        gets, copies = [], []
        hits, timed_hits, ids, prices = 0, 0, 0, 0.0
        # In passes of their own: right after a probe, the memory of the same keys would be near.
        for keys in batches:
            start_ns = time.process_time_ns()
            given_keys = Keys([keys])
            matches = layer.segment.probe(given_keys, given_keys.hashes(snapshot.seed))
            probes.append(time.process_time_ns() - start_ns)
            hits -= len(matches.rows)
        for number, keys in enumerate(batches):
            start_ns = time.process_time_ns()
            answer = snapshot.get(names, Keys([keys]))
            table = pa.table(
                [pc.take(keys, as_indices(answer.keys), boundscheck=False), *answer.columns], ["id", *names]
            )
            wholes.append(time.process_time_ns() - start_ns)
            hits += table.num_rows
            if number >= warmup:
                ids += pc.sum(table.column("id")).as_py()
                prices += pc.sum(table.column("price")).as_py()
                timed_hits += table.num_rows
        assert hits == 0, (workload, hits)
        for keys in batches:
            start_ns = time.process_time_ns()
            entries = cache._live(held, Keys([keys]), cache._time())
            entries = entries[entries >= 0]
            held.touch(entries, cache._log.add(entries, cache._now_s))
            held.locate_rows(entries)
            gets.append(time.process_time_ns() - start_ns)
            hits -= len(entries)
        for keys in batches:
            asked = pa.table([keys], ["id"])
            start_ns = time.process_time_ns()
            rows = cache.get_many(asked).rows
            copies.append(time.process_time_ns() - start_ns)
            assert rows is not None
            hits += rows.num_rows
        assert hits == 0, (workload, hits)
        times = {"probe": probes, "whole": wholes, "get": gets, "copy": copies}
        results[workload] = {"sums": [timed_hits, ids, prices]} | {name: each[warmup:] for name, each in times.items()}
    results["put"] = {"put": puts}
    return results


def measure(directory: Path, java: list[str], args: argparse.Namespace) -> None:
    pinned = ["taskset", "-c", str(args.core)] if args.core >= 0 and shutil.which("taskset") else []
    cache = directory / "cache"
    call = (str(directory), str(directory / "table"), lookup_options("id", cache, cached=True), BATCH, args.warmup)
    print(
        "| keys | round | Flink ns/key | FULL: probe | Flink / that | + 5 columns | Flink / that "
        "| DefaultLookupCache: get | Flink / that | + 5 columns | Flink / that |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    ways = ("probe", "whole", "get", "copy")
    ratios: dict[str, list[list[float]]] = {workload: [] for workload in WORKLOADS}
    puts: list[tuple[float, float]] = []
    for number in range(args.rounds):
        command = [*pinned, *java, str(directory), str(BATCH), str(args.warmup), *WORKLOADS]
        process = subprocess.run(command, capture_output=True, check=False, text=True)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: {process.stderr}")
        results = fresh(looked_up, *call, list(WORKLOADS), prefix=pinned)
        for line in process.stdout.splitlines():
            workload, hits, ids, prices, *times = line.split()
            result = results[workload]
            flink = statistics.median(map(float, times)) / BATCH
            if workload == "put":
                puts.append((flink, statistics.median(result["put"]) / BATCH))
                continue
            assert [int(hits), int(ids), float(prices)] == result["sums"], (line[:80], result["sums"])
            medians = [statistics.median(result[way]) / BATCH for way in ways]
            ratios[workload].append([flink / time for time in medians])
            cells = " | ".join(f"{time:.0f} | {flink / time:.1f}" for time in medians)
            print(f"| {WORKLOADS[workload]} | {number + 1} | {flink:.0f} | {cells} |")
    for workload, rounds in ratios.items():
        values = [statistics.median(row[place] for row in rounds) for place in range(len(ways))]
        verdicts = ["reached" if value >= goal else "MISSED" for value, goal in zip(values, (5, 2, 5, 2), strict=True)]
        print(
            f"- {WORKLOADS[workload]}: FULL: Flink / probe {values[0]:.1f}, goal 5: {verdicts[0]}; with 5 columns {values[1]:.1f}, goal 2: "
            f"{verdicts[1]}; DefaultLookupCache: Flink / get {values[2]:.1f}; with 5 columns {values[3]:.1f}"
        )
    for number, (flink, cache_ns) in enumerate(puts):
        print(
            f"- put, round {number + 1}: Flink {flink:.0f} ns/key, DefaultLookupCache {cache_ns:.0f}: {flink / cache_ns:.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=21, help="timed, of each workload")
    parser.add_argument("--warmup", type=int, default=21, help="batches before them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--core", type=int, default=1, help="the one that both run on; -1: any")
    parser.add_argument("--java-options", default="-XX:+UseSerialGC -Xms6g -Xmx6g")
    parser.add_argument("--flink-version", default="2.3.0")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench" / "flink")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    java = compiled(args.work, jars(args.work, args.flink_version), args.java_options)
    about = subprocess.run(["java", "-version"], stderr=subprocess.PIPE, check=True, text=True).stderr.splitlines()[0]
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=args.work))
    try:
        write(directory, args.rows, args.warmup + args.batches, args.seed)
        print(f"\n## Flink {args.flink_version} DefaultLookupCache.getIfPresent and ours, {args.rows:,} int keys")
        print(f"command: {' '.join(['python', '-m', 'benchmarks.bench_flink', *sys.argv[1:]])}")
        print(
            f"machine: {platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}, {about}, {args.java_options}"
        )
        measure(directory, java, args)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
