"""Runs the benchmarks, keeps what they print as numbers, plots it, and compares it with an earlier run by ratios.

    python -m benchmarks.run                         # all of them at full size: some hours
    python -m benchmarks.run --quick                 # sizes for a laptop's lunch break; not comparable with the others
    python -m benchmarks.run --only bench_scan,bench_metrics --against results/before.json

Writes `<out>/results.json`, `<out>/<benchmark>.txt` as printed and `<out>/<benchmark>-<n>.svg`, one per table with seconds, and prints
each number that differs from the earlier run by more than `--tolerance`. Exits with 1 if a benchmark fails. Single times
move with the machine: where a table has ratios to a peer of the same run, these are compared, and times are not.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

# The arguments for `--quick`.
BENCHMARKS: dict[str, list[str]] = {
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
    "bench_udf": ["--rows", "500000", "--runs", "3"],
    "bench_managed": ["--parts", "commit,planning", "--runs", "5"],
    "bench_changes": ["--parts", "points", "--runs", "3"],
    "bench_delta": ["--rows", "1000000", "--files", "20", "--runs", "3", "--commits", "1000"],
    "bench_iceberg": ["--rows", "1000000", "--files", "20", "--runs", "3"],
    "bench_flink": ["--rows", "100000", "--rounds", "1"],
}
_TIMES = re.compile(r"(^|\s)(median|p50|p99|s|ms|ns|us)(\s|$)")
_RATIOS = re.compile(r"ratio|×|faster|share|hit|to compacted")


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that a benchmark has printed: its title, its columns, and its rows, numbers where they are numbers."""

    title: str
    columns: list[str]
    rows: list[list[Any]]


def tables_in(text: str) -> list[Table]:
    """The Markdown tables in what a benchmark prints, each with the heading or line before it."""
    found: list[Table] = []
    title, header = "", list[str]()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            header = []
            if line.strip():
                title = line.strip("# ").strip()
        elif not header:
            header = cells
            found.append(Table(title, header, []))
        elif not set("".join(cells)) <= set("-: "):
            found[-1].rows.append([_number(cell) for cell in cells])
    return [table for table in found if table.rows]


def _number(cell: str) -> Any:
    plain = cell.replace(",", "")
    return float(plain) if re.fullmatch(r"-?\d+(\.\d+)?", plain) else cell


def compared(before: dict[str, Any], now: dict[str, Any], tolerance: float) -> Iterator[str]:
    """What differs by more than a factor of 1 + tolerance: a line each. Tables with ratios are compared by these alone."""
    for name in sorted(before.keys() & now.keys()):
        earlier = {(table["title"], *table["columns"]): table for table in before[name]}
        for table in now[name]:
            old = earlier.get((table["title"], *table["columns"]))
            if old is not None:
                yield from _differences(name, table["title"], table["columns"], old["rows"], table["rows"], tolerance)


def _differences(
    name: str, title: str, columns: Sequence[str], old: list[list[Any]], new: list[list[Any]], tolerance: float
) -> Iterator[str]:
    ratios = [place for place, column in enumerate(columns) if _RATIOS.search(column)]
    measured = ratios or [place for place, column in enumerate(columns) if _TIMES.search(column)]
    known = {_label(row, measured): row for row in old}
    for row in new:
        label = _label(row, measured)
        for place in measured if label in known else ():
            was, is_ = known[label][place], row[place]
            if isinstance(was, float) and isinstance(is_, float) and min(was, is_) > 0:
                factor = is_ / was
                if not 1 / (1 + tolerance) <= factor <= 1 + tolerance:
                    yield f"{name}: {title}: {label}: {columns[place]} was {was:g}, is {is_:g} ({factor:.2f} times)"


def _label(row: list[Any], measured: Sequence[int]) -> str:
    return ", ".join(cell for place, cell in enumerate(row) if isinstance(cell, str) and place not in measured)


def plotted(table: Table, target: Path) -> bool:
    """Draw a table's first column of times as bars; False if it has none."""
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


def _machine() -> dict[str, Any]:
    versions = f"Python {platform.python_version()}, Linux {platform.release()}"
    return {"cores": os.cpu_count(), "machine": platform.machine(), "versions": versions}


def _run(name: str, arguments: Sequence[str], out: Path) -> list[Table] | None:
    """What a benchmark has printed; None if it failed, after saying why."""
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
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="names of benchmarks, with commas")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--against", type=Path, help="the results.json of an earlier run (default: the one in --out)")
    parser.add_argument("--tolerance", type=float, default=0.25)
    given = parser.parse_args()
    names = given.only.split(",")
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"--only {unknown[0]}: there are {', '.join(BENCHMARKS)}")
    given.out.mkdir(parents=True, exist_ok=True)
    earlier = given.against or given.out / "results.json"
    before = json.loads(earlier.read_text(encoding="utf-8")) if earlier.exists() else None
    found = {name: _run(name, BENCHMARKS[name] if given.quick else [], given.out) for name in names}
    results = {name: [dataclasses.asdict(table) for table in tables] for name, tables in found.items() if tables}
    for name, tables in found.items():
        for number, table in enumerate(tables or (), 1):
            plotted(table, given.out / f"{name}-{number}.svg")
    at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    whole = {"at": at, "quick": given.quick, "machine": _machine(), "results": results}
    (given.out / "results.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
    if before is None:
        print("no earlier results to compare with")
    elif before["quick"] != given.quick:
        print(f"{earlier} was measured with other sizes: not compared")
    else:
        differences = list(compared(before["results"], results, given.tolerance))
        print(f"compared with {before['at']}: {len(differences)} numbers moved by more than {given.tolerance:.0%}")
        print("\n".join(f"  {line}" for line in differences))
    sys.exit(any(tables is None for tables in found.values()))


if __name__ == "__main__":
    main()
