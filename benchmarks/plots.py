"""Draws the plots of docs/performance.md from the tables of benchmarks/README.md.

python -m benchmarks.plots
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl

from benchmarks.run import tables_in

mpl.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[1]
OURS, OTHERS = "#2f6fb0", "#b9c3cf"


def rows_below(heading: str, column: str) -> list[tuple[str, float]]:
    """Read (label, number) of each row of a column of the README, from the first table below a heading that has it. Rows without a number are left out."""
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    section = text[text.index(heading) :]
    table = next(table for table in tables_in(section) if column in table.columns)
    place = table.columns.index(column)
    points = []
    for row in table.rows:
        number = re.match(r"\**([\d.,]+)", str(row[place]))
        if number is not None:
            label = " · ".join(str(cell) for cell in row[:place] if isinstance(cell, str))
            points.append((re.sub(r"[*`]|\s*\(.*?\)", "", label), float(number[1].replace(",", ""))))
    return points


def drawn(name: str, title: str, unit: str, rows: list[tuple[str, float]], highlighted: str) -> None:
    """Draw bars. Those whose label matches the pattern `highlighted` stand out."""
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.36 * len(rows)), layout="constrained")
    colors = [OURS if re.search(highlighted, label) else OTHERS for label, _ in rows]
    bars = axes.barh(range(len(rows)), [value for _, value in rows], color=colors)
    axes.bar_label(bars, [f"{value:g}" for _, value in rows], padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(unit, fontsize=8)
    axes.set_title(title, fontsize=9, loc="left")
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "plots" / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    mpl.rcParams["svg.hashsalt"] = "lookupcache"  # the same picture for the same numbers
    lookups = [
        row
        for row in rows_below("## How many keys a second", "(a)")
        if "gather" not in row[0] and "probe" not in row[0]
    ]
    drawn(
        "lookups",
        "Whole lookups, 10M rows × 5 columns, int64 key, one core",
        "million keys a second",
        lookups,
        "ours|LookupTable",
    )
    batches = rows_below("## What does a lookup join cost?", "addBatch median s")
    drawn("micro-batches", "A micro-batch of 10,000 rows: addBatch", "seconds", batches, "lookup_join")
    scans = rows_below("## How long does a warm full scan take", "median s")
    drawn("scans", "A warm full scan of 10M rows", "seconds", scans, "lookupcache")
    partial = rows_below("## What does a partial cache cost per key", "Arrow zipf")
    drawn("partial", "A partial cache in a process, Arrow to Arrow, zipf keys", "CPU ns per key", partial, "ours")


if __name__ == "__main__":
    main()
