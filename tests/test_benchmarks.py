"""The runner of the benchmarks reads what they print, and knows all of them; the simulation of a cluster is what it simulates."""

import sys
from pathlib import Path

import pytest

from benchmarks import run, sim_cluster


def test_a_replayed_host_is_like_a_real_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the simulation of a cluster: as many requests and bytes, at the same times up to the latencies, which are random. No lookup fails."""
    monkeypatch.setattr(sys, "argv", ["sim_cluster", "--quick"])
    assert {path.stem for path in Path(run.__file__).parent.glob("bench_*.py")} == set(run.BENCHMARKS)
    sim_cluster.main()
    printed = capsys.readouterr().out
    assert "failed" not in printed
    costs, check, requests, *times = run.tables_in(printed)
    assert {row[0] for row in costs.rows} == set(sim_cluster.MODES)
    real, replayed = check.rows[:4], check.rows[4:]
    for one, other in zip(real, replayed, strict=True):
        assert one[1] == other[1]
        assert one[2:6] == pytest.approx(other[2:6], rel=0.1)
        assert one[7:] == pytest.approx(other[7:], abs=1.5)
    assert all(row[-3] <= row[-2] <= row[-1] < 150 for table in times for row in table.rows)
    assert [row[2] for row in requests.rows if row[1] == "a minute"]
