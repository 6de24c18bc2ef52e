"""The runner of the benchmarks: what it reads from their output, and how it compares."""

from __future__ import annotations

from pathlib import Path

from benchmarks import run
from benchmarks.run import BENCHMARKS, Table, compared, plotted, tables_in

PRINTED = """
## A scan
command: python -m benchmarks.bench_scan
| contender | runs | median s | ratio to peer (median of pairs) |
|---|---|---|---|
| ours | 30 | 0.042 | 1.18 |
| theirs | 30 | 0.036 | peer |

| commits | who asks | median s |
|---|---|---|
| 10,000 | a new host | 0.222 |
more words
| empty | table |
|---|---|
"""


def test_tables_are_read_from_what_is_printed() -> None:
    """Each table with the line before it, numbers as numbers; one without rows is none. A new benchmark has its place in the runner."""
    first, second = tables_in(PRINTED)
    assert first.title == "command: python -m benchmarks.bench_scan"
    assert first.rows == [["ours", 30.0, 0.042, 1.18], ["theirs", 30.0, 0.036, "peer"]]
    assert second.rows == [[10_000.0, "a new host", 0.222]]
    assert {path.stem for path in Path(run.__file__).parent.glob("bench_*.py")} == set(BENCHMARKS)


def results(*rows: list[object], ratio: bool = True) -> dict[str, object]:
    columns = ["contender", "median s", *(["ratio to peer"] if ratio else [])]
    return {"bench_scan": [{"title": "A scan", "columns": columns, "rows": list(rows)}]}


def test_ratios_are_compared_where_there_are_some() -> None:
    """A machine that is twice as slow moves no ratio; what moved is said with both numbers. Without ratios times are compared."""
    before = results(["ours", 1.0, 1.2], ["theirs", 0.8, "peer"])
    assert list(compared(before, results(["ours", 2.0, 1.3], ["theirs", 1.6, "peer"]), 0.25)) == []
    (line,) = compared(before, results(["ours", 1.0, 2.4], ["new", 5.0, 5.0]), 0.25)
    assert line == "bench_scan: A scan: ours: ratio to peer was 1.2, is 2.4 (2.00 times)"
    (line,) = compared(results(["ours", 1.0], ratio=False), results(["ours", 0.5], ratio=False), 0.25)
    assert line.endswith("median s was 1, is 0.5 (0.50 times)")
    assert list(compared(before, {"bench_other": []}, 0.25)) == []


def test_a_table_with_times_is_drawn(tmp_path: Path) -> None:
    """As a picture that scales; one without times is not."""
    table = tables_in(PRINTED)[0]
    assert plotted(table, tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert not plotted(Table("x", ["name", "files"], [["a", 1.0]]), tmp_path / "b.svg")
    assert not (tmp_path / "b.svg").exists()
