"""The runner of the benchmarks: what it reads from their output, and how it compares."""

from __future__ import annotations

from pathlib import Path

from benchmarks import run
from benchmarks.run import BENCHMARKS, Table, plotted, tables_in

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


def test_tables_are_read_from_what_is_printed(tmp_path: Path) -> None:
    """Each with the line before it, numbers as numbers; one without rows is none, and one with times is drawn. The runner knows all
    benchmarks."""
    first, second = tables_in(PRINTED)
    assert first.title == "command: python -m benchmarks.bench_scan"
    assert first.rows == [["ours", 30.0, 0.042, 1.18], ["theirs", 30.0, 0.036, "peer"]]
    assert second.rows == [[10_000.0, "a new host", 0.222]]
    assert plotted(first, tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert not plotted(Table("x", ["name", "files"], [["a", 1.0]]), tmp_path / "b.svg")
    assert [file.name for file in tmp_path.iterdir()] == ["a.svg"]
    assert {path.stem for path in Path(run.__file__).parent.glob("bench_*.py")} == set(BENCHMARKS)
