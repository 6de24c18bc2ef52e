"""The runner of the benchmarks: what it reads from their output, and how it compares."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import run, sim_cluster
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
    """Each with the line before it, numbers as numbers; one with times is drawn. The runner knows all benchmarks."""
    first, second = tables_in(PRINTED)
    assert first.title == "command: python -m benchmarks.bench_scan"
    assert first.rows == [["ours", 30.0, 0.042, 1.18], ["theirs", 30.0, 0.036, "peer"]]
    assert second.rows == [[10_000.0, "a new host", 0.222]]
    assert plotted(first, tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert not plotted(Table("x", ["name", "files"], [["a", 1.0]]), tmp_path / "b.svg")
    assert [file.name for file in tmp_path.iterdir()] == ["a.svg"]
    assert {path.stem for path in Path(run.__file__).parent.glob("bench_*.py")} == set(BENCHMARKS)


def test_a_replayed_host_does_what_a_real_one_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the simulation of a cluster: as many requests and bytes, at the same times up to the latencies, which are random. No lookup fails."""
    monkeypatch.setattr(sys, "argv", ["sim_cluster", "--quick"])
    sim_cluster.main()
    printed = capsys.readouterr().out
    assert "failed" not in printed
    costs, check, requests, *times = tables_in(printed)
    assert {row[0] for row in costs.rows} == set(sim_cluster.MODES)
    real, replayed = check.rows[:4], check.rows[4:]
    for one, other in zip(real, replayed, strict=True):
        assert one[1] == other[1]
        assert one[2:6] == pytest.approx(other[2:6], rel=0.1)
        assert one[7:] == pytest.approx(other[7:], abs=1.5)
    assert all(row[-3] <= row[-2] <= row[-1] < 150 for table in times for row in table.rows)
    assert [row[2] for row in requests.rows if row[1] == "a minute"]
