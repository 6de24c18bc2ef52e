"""The runner of the benchmarks: what it reads from their output, and when a ratio is worse than at the last release."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.run import QUICK, Table, check_ratios, plotted, ratios_in, record_ratios, tables_in

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
    """Each has the heading before it, and numbers are numbers. One without rows is left out, and one with times is drawn."""
    first, second = tables_in(PRINTED)
    assert first.title == "A scan"
    assert first.rows == [["ours", 30.0, 0.042, 1.18], ["theirs", 30.0, 0.036, "peer"]]
    assert second.rows == [[10_000.0, "a new host", 0.222]]
    assert plotted(first, tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert not plotted(Table("x", ["name", "files"], [["a", 1.0]]), tmp_path / "b.svg")
    assert [file.name for file in tmp_path.iterdir()] == ["a.svg"]


def test_our_ratios_are_found_by_name() -> None:
    """Only the ratios of our contenders count, each named by its benchmark, its table and its peer."""
    assert ratios_in("bench_scan", tables_in(PRINTED), ("our",)) == {"bench_scan: A scan: ours to theirs": 1.18}
    assert ratios_in("bench_scan", tables_in(PRINTED), ("their", "a new")) == {}


RECORDED = {"one: t: a to p": 1.0, "one: t: b to p": 2.0, "two: t: a to p": 1.0}


@pytest.mark.parametrize(
    ("runs", "fine", "attempts"),
    [
        ([{"one: t: a to p": 1.19, "one: t: b to p": 1.0}], True, 1),
        ([{"one: t: a to p": 1.3, "one: t: b to p": 2.0}, {"one: t: a to p": 1.0, "one: t: b to p": 9.0}], True, 2),
        ([{"one: t: a to p": 1.3, "one: t: b to p": 2.0}, {"one: t: a to p": 1.21, "one: t: b to p": 2.0}], False, 2),
        ([{"one: t: a to p": 1.0}, {"one: t: a to p": 1.0}], False, 2),
        ([{**RECORDED, "one: t: new to p": 7.0}], True, 1),
        ([{"one: t: a to p": 1.3}, None], False, 2),
        ([None], False, 1),
    ],
    ids=["within 20 %", "better again", "worse twice", "missing", "not recorded", "worse, then failed", "failed"],
)
def test_a_worse_ratio_fails_at_the_second_attempt(
    runs: list[dict[str, float] | None], fine: bool, attempts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The smaller ratio of two attempts counts, and ratios of other benchmarks do not. A ratio that is no longer measured is worse."""
    measured: list[str] = []

    def measure(name: str) -> dict[str, float] | None:
        measured.append(name)
        return runs[len(measured) - 1]

    assert check_ratios(["one"], RECORDED, measure) is fine
    assert measured == ["one"] * attempts
    assert ("WORSE" in capsys.readouterr().out) is (not fine and runs[0] is not None)


def test_recorded_ratios_are_the_means_of_two_runs() -> None:
    """Ratios of benchmarks that did not run stay. Nothing is recorded if a benchmark fails."""
    runs: list[dict[str, float] | None] = [{"one: t: a to p": 1.0}, {"one: t: a to p": 2.0}, None, {}]
    assert record_ratios(["one"], RECORDED, lambda _: runs.pop(0)) == {"one: t: a to p": 1.5, "two: t: a to p": 1.0}
    assert record_ratios(["one"], RECORDED, lambda _: runs.pop(0)) is None


def test_every_benchmark_is_known() -> None:
    """The runner knows all benchmarks, and the recorded ratios are those of the benchmarks that the guard runs."""
    assert {path.stem for path in Path(run.__file__).parent.glob("bench_*.py")} == set(run.BENCHMARKS)
    assert {name.partition(":")[0] for name in json.loads(run.RATIOS.read_text())["ratios"]} == set(QUICK)


@pytest.mark.nightly
def test_the_guard_runs_a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard records what a small benchmark prints, and then compares with that: it fails for ratios that nobody reaches."""
    arguments, contenders = QUICK["bench_get"]
    small = [*arguments, "--rows", "1000", "--runs", "50", "--warmup", "20", "--core", "-1", "--data", str(tmp_path)]
    monkeypatch.setitem(QUICK, "bench_get", (small, contenders))
    path = tmp_path / "ratios.json"

    def guard(*more: str) -> int:
        argv = ["run", "--quick", "--only", "bench_get", "--out", str(tmp_path / "out"), "--ratios", str(path), *more]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            run.main()
        return int(ended.value.code or 0)

    assert guard("--record") == 0
    recorded = json.loads(path.read_text())
    ratios = {name.rpartition(": ")[2] for name in recorded["ratios"]}
    assert ratios == {"CACHE to a listing", "UFS to a listing", "UFS to CACHE"}
    path.write_text(json.dumps({**recorded, "ratios": dict.fromkeys(recorded["ratios"], 0.01)}))
    assert guard() == 1
    path.write_text(json.dumps({**recorded, "ratios": dict.fromkeys(recorded["ratios"], 1e6)}))
    assert guard() == 0
