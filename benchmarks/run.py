"""Runs the benchmarks, keeps what they print as numbers, plots it, and compares it with an earlier run by ratios.

    python -m benchmarks.run                         # all of them at full size: some hours
    python -m benchmarks.run --small                 # sizes for a laptop's lunch break; not comparable with the others
    python -m benchmarks.run --only bench_scan,bench_metrics --against results/before.json
    python -m benchmarks.run --quick                 # ten minutes: have the ratios become worse since the last release?
    python -m benchmarks.run --quick --record        # the ratios of a release

Writes `<out>/results.json`, `<out>/<benchmark>.txt` as printed and `<out>/<benchmark>-<n>.svg`, one per table with seconds, and prints
each number that differs from the earlier run by more than `--tolerance`. Exits with 1 if a benchmark fails. Single times
move with the machine: where a table has ratios to a peer of the same run, these are compared, and times are not.

`--quick` runs a few benchmarks at small sizes. It looks only at ratios of our times to those of a peer that took turns with us, each the
median of pairs, and compares them with `benchmarks/ratios.json`. If a ratio is more than 20 % larger, its benchmark runs once more, and the
smaller ratio counts. If that is still too large, or a benchmark fails, it exits with 1. `--record` writes the file anew, with the means of two runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

# The arguments for `--small`.
BENCHMARKS: dict[str, list[str]] = {
    "bench_cold": ["--runs", "2"],
    "bench_overhead": ["--runs", "5"],
    "bench_metrics": ["--runs", "500"],
    "bench_scan": ["--rows", "1000000", "--runs", "3"],
    "bench_files": ["--tables", "20"],
    "bench_get": ["--rows", "100000", "--runs", "500"],
    "bench_lookup": ["--rows", "100000", "--runs", "3"],
    "bench_partial": ["--rows", "100000", "--runs", "3"],
    "bench_snapshot": ["--rows", "1000000", "--runs", "3"],
    "bench_join": ["--rows", "100000", "--runs", "3"],
    "bench_star": ["--rounds", "2", "--runs", "3"],
    "bench_late": ["--rows", "100000", "--waiting", "10000", "--rounds", "1", "--batches", "5"],
    "bench_ranges": ["--scale", "0.02", "--runs", "3"],
    "bench_diskcache": ["--runs", "1"],
    "bench_databases": [
        "--rows",
        "100000",
        "--of",
        "200000",
        "--runs",
        "3",
        "--rounds",
        "1",
        "--batches",
        "4",
        "--seconds",
        "2",
    ],
    "bench_udf": ["--rows", "500000", "--runs", "3"],
    "bench_managed": ["--parts", "commit,planning", "--runs", "5"],
    "bench_changes": ["--parts", "points", "--runs", "3"],
    "bench_delta": ["--rows", "1000000", "--files", "20", "--runs", "3", "--commits", "1000"],
    "bench_iceberg": ["--rows", "1000000", "--files", "20", "--runs", "3"],
    "bench_flink": ["--rows", "100000", "--rounds", "1"],
}
# The arguments for `--quick`, and the names that our contenders begin with.
QUICK: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "bench_get": (["--rows", "100000", "--runs", "2000"], ("CACHE", "UFS")),
    "bench_metrics": (["--runs", "500"], ("with metrics",)),
    "bench_overhead": (["--runs", "20"], ("lookupcache",)),
    "bench_scan": (["--rows", "2000000", "--runs", "5", "--only", "local"], ("lookupcache",)),
    "bench_cold": (["--runs", "2"], ("lookups",)),
    "bench_star": (["--only", "batch", "--rows", "500000", "--runs", "3"], ("5 lookups",)),
    "bench_snapshot": (["--parts", "build", "--rows", "1000000", "--runs", "3"], ("build",)),
    "bench_managed": (["--parts", "commit", "--runs", "10"], ("LookupTable",)),
}
RATIOS = Path(__file__).parent / "ratios.json"
_WORSE = 1.2
_TO_PEER = "ratio to peer"
_TIMES = re.compile(r"(^|\s)(median|p50|p99|s|ms|ns|us)(\s|$)")
_RATIOS = re.compile(r"ratio|×|faster|share|hit|to compacted")


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that a benchmark has printed. Cells that are numbers are floats, others are text."""

    title: str
    columns: list[str]
    rows: list[list[Any]]


def tables_in(text: str) -> list[Table]:
    """Parse the Markdown tables that a benchmark prints, each with the heading or line before it."""
    tables: list[Table] = []
    title, header = "", list[str]()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            header = []
            # The lines with the command and the machine belong to the heading before them.
            if line.strip() and not line.startswith(("command: ", "machine: ")):
                title = line.strip("# ").strip()
        elif not header:
            header = cells
            tables.append(Table(title, header, []))
        elif not set("".join(cells)) <= set("-: "):
            tables[-1].rows.append([_number(cell) for cell in cells])
    return [table for table in tables if table.rows]


def _number(cell: str) -> Any:
    plain = cell.replace(",", "")
    return float(plain) if re.fullmatch(r"-?\d+(\.\d+)?", plain) else cell


def compared(before: dict[str, Any], current: dict[str, Any], tolerance: float) -> Iterator[str]:
    """Yield a line for each number that differs by more than a factor of 1 + tolerance. Where a table has ratios, only these are compared."""
    for name in sorted(before.keys() & current.keys()):
        earlier = {(table["title"], *table["columns"]): table for table in before[name]}
        for table in current[name]:
            old = earlier.get((table["title"], *table["columns"]))
            if old is not None:
                yield from _differences(name, table["title"], table["columns"], old["rows"], table["rows"], tolerance)


def _differences(
    name: str, title: str, columns: Sequence[str], old: list[list[Any]], new: list[list[Any]], tolerance: float
) -> Iterator[str]:
    ratios = [place for place, column in enumerate(columns) if _RATIOS.search(column)]
    measured = ratios or [place for place, column in enumerate(columns) if _TIMES.search(column)]
    old_rows = {_label(row, measured): row for row in old}
    for row in new:
        label = _label(row, measured)
        for place in measured if label in old_rows else ():
            was, is_ = old_rows[label][place], row[place]
            if isinstance(was, float) and isinstance(is_, float) and min(was, is_) > 0:
                factor = is_ / was
                if not 1 / (1 + tolerance) <= factor <= 1 + tolerance:
                    yield f"{name}: {title}: {label}: {columns[place]} was {was:g}, is {is_:g} ({factor:.2f} times)"


def _label(row: list[Any], measured: Sequence[int]) -> str:
    return ", ".join(cell for place, cell in enumerate(row) if isinstance(cell, str) and place not in measured)


def plotted(table: Table, target: Path) -> bool:
    """Draw a table's first column of times as bars. Returns False if it has none."""
    places = [place for place, column in enumerate(table.columns) if _TIMES.search(column)]
    rows = [row for row in table.rows if places and isinstance(row[places[0]], float)]
    if not rows:
        return False
    labels = [", ".join(str(cell) for cell in row[: places[0]] if isinstance(cell, str)) for row in rows]
    values = [row[places[0]] for row in rows]
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.4 * len(rows)), layout="constrained")
    bars = axes.barh(range(len(rows)), values, color="#2f6fb0")
    axes.bar_label(bars, [f"{value:g}" for value in values], padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(table.columns[places[0]])
    axes.set_title(table.title[:100], fontsize=9, loc="left")
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target)
    plt.close(figure)
    return True


# --- ratios ---------------------------------------------------------------------------------------


def ratios_in(name: str, tables: Sequence[Table], prefixes: tuple[str, ...]) -> dict[str, float]:
    """The ratios to their peer of contenders whose names begin with one of `prefixes`, by a text that names benchmark, table and both."""
    ratios: dict[str, float] = {}
    for table in tables:
        place = next((n for n, column in enumerate(table.columns) if column.startswith(_TO_PEER)), None)
        peer = next((row[0] for row in table.rows if place is not None and row[place] == "peer"), None)
        for row in table.rows if peer is not None else ():
            if isinstance(row[place], float) and str(row[0]).startswith(prefixes):
                ratios[f"{name}: {table.title}: {row[0]} to {peer}"] = row[place]
    return ratios


def worse_ratios(recorded: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """The names of the recorded ratios that are worse now, or that the benchmark no longer prints."""
    return [name for name, ratio in recorded.items() if measured.get(name, math.inf) > ratio * _WORSE]


Measure = Callable[[str], dict[str, float] | None]
"""A function that runs a benchmark and returns its ratios, by name; None if it fails."""


def check_ratios(names: Sequence[str], recorded: Mapping[str, float], measure: Measure) -> bool:
    """Whether all benchmarks run and no ratio is worse than recorded, in the better of two attempts. Prints each ratio."""
    fine = True
    for name in names:
        expected = {key: ratio for key, ratio in recorded.items() if key.startswith(f"{name}: ")}
        measured = measure(name)
        if measured is not None and worse_ratios(expected, measured) and (repeated := measure(name)) is not None:
            measured = {key: min(ratio, repeated.get(key, ratio)) for key, ratio in measured.items()}
        if measured is None:
            fine = False
            continue
        worse = worse_ratios(expected, measured)
        fine = fine and not worse
        for key in dict.fromkeys((*expected, *measured)):
            was, is_ = expected.get(key), measured.get(key)
            verdict = "WORSE" if key in worse else "not recorded" if was is None else "ok"
            print(
                f"  {verdict}: {key}: {'missing' if is_ is None else f'{is_:.2f}'}{'' if was is None else f', recorded {was:.2f}'}"
            )
    return fine


def record_ratios(names: Sequence[str], recorded: Mapping[str, float], measure: Measure) -> dict[str, float] | None:
    """The recorded ratios, with those of the named benchmarks measured anew: the means of two runs. None if a benchmark fails."""
    ratios = {key: ratio for key, ratio in recorded.items() if key.partition(":")[0] not in names}
    for name in names:
        first, second = measure(name), measure(name)
        if first is None or second is None:
            return None
        ratios |= {key: round((ratio + second[key]) / 2, 3) for key, ratio in first.items()}
    return dict(sorted(ratios.items()))


def _guard(names: Sequence[str], out: Path, path: Path, record: bool) -> bool:
    """Check the ratios, or record them at `path`. Returns whether all is well."""

    def measure(name: str) -> dict[str, float] | None:
        arguments, prefixes = QUICK[name]
        tables = _run(name, arguments, out)
        return None if tables is None else ratios_in(name, tables, prefixes)

    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"ratios": {}}
    if not record:
        print(f"compared with the ratios of {stored.get('at')}, {stored.get('machine')}")
        return check_ratios(names, stored["ratios"], measure)
    ratios = record_ratios(names, stored["ratios"], measure)
    if ratios is not None:
        path.write_text(
            json.dumps({"at": _timestamp(), "machine": _machine(), "ratios": ratios}, indent=1) + "\n", encoding="utf-8"
        )
    return ratios is not None


def _timestamp() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _machine() -> dict[str, Any]:
    versions = f"Python {platform.python_version()}, Linux {platform.release()}"
    return {"cores": os.cpu_count(), "machine": platform.machine(), "versions": versions}


def _run(name: str, arguments: Sequence[str], out: Path) -> list[Table] | None:
    """Run a benchmark. Returns the tables that it prints, or None, after printing why, if it fails."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    print(f"{name} {' '.join(arguments)}".rstrip(), flush=True)
    with open(out / f"{name}.log", "w", encoding="utf-8") as log:
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
    (out / f"{name}.txt").write_text(ran.stdout, encoding="utf-8")
    if ran.returncode:
        print(f"  failed with {ran.returncode}: see {out / f'{name}.log'}")
        return None
    return tables_in(ran.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", help="names of benchmarks, with commas")
    parser.add_argument("--small", action="store_true", help="small sizes")
    parser.add_argument("--quick", action="store_true", help="compare ratios with the recorded ones")
    parser.add_argument("--record", action="store_true", help="with --quick: record the ratios instead")
    parser.add_argument("--ratios", type=Path, default=RATIOS, help="the file with the recorded ratios")
    parser.add_argument("--against", type=Path, help="the results.json of an earlier run (default: the one in --out)")
    parser.add_argument("--tolerance", type=float, default=0.25)
    args = parser.parse_args()
    benchmarks = QUICK if args.quick else BENCHMARKS
    names = list(benchmarks) if args.only is None else args.only.split(",")
    unknown = sorted(set(names) - set(benchmarks))
    if unknown:
        parser.error(f"--only {unknown[0]}: there are {', '.join(benchmarks)}")
    if args.record and not args.quick:
        parser.error("--record: give --quick, too")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.quick:
        sys.exit(not _guard(names, args.out, args.ratios, args.record))
    earlier = args.against or args.out / "results.json"
    before = json.loads(earlier.read_text(encoding="utf-8")) if earlier.exists() else None
    tables_by_name = {name: _run(name, BENCHMARKS[name] if args.small else [], args.out) for name in names}
    results = {
        name: [dataclasses.asdict(table) for table in tables] for name, tables in tables_by_name.items() if tables
    }
    for name, tables in tables_by_name.items():
        for number, table in enumerate(tables or (), 1):
            plotted(table, args.out / f"{name}-{number}.svg")
    whole = {"at": _timestamp(), "small": args.small, "machine": _machine(), "results": results}
    (args.out / "results.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
    if before is None:
        print("no earlier results to compare with")
    elif before["small"] != args.small:
        print(f"{earlier} was measured with other sizes: not compared")
    else:
        differences = list(compared(before["results"], results, args.tolerance))
        print(f"compared with {before['at']}: {len(differences)} numbers moved by more than {args.tolerance:.0%}")
        print("\n".join(f"  {line}" for line in differences))
    sys.exit(any(tables is None for tables in tables_by_name.values()))


if __name__ == "__main__":
    main()
