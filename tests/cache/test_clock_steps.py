"""The wall clock stepped by an hour, either way: nothing is served for longer than it may be, and nothing is kept for ever."""

from pathlib import Path

import pytest

from pyspark_lookup.errors import ReloadFailedError
from tests.support.full_cache import CACHE, Table, publish

HOUR_S = 3600.0
LIMITED = {**CACHE, "lookup.full-cache.max-staleness": "10 min"}
each_step = pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S], ids=["forward", "back"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table of one file in version 1."""
    return publish(tmp_path / "dim", 0, 1)


def reloads(table: Table) -> int:
    """Run the schedule as its loop does; how many loads that makes."""
    table.full.schedule.run_due()
    return table.later.loads()


@each_step
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mode", ["FIXED_DELAY", "FIXED_RATE"])
def test_a_reload_comes_within_its_interval(path: Path, cache_dir: Path, step_s: float, mode: str, late: bool) -> None:
    """PERIODIC: a step does not put the next reload off, nor change their pace, also for a process that begins after it."""
    options = {**LIMITED, "lookup.full-cache.periodic-reload.schedule-mode": mode}
    table = Table(path, cache_dir, options)
    clock = table.host.clock
    assert table.versions(0) == [1]
    assert late or reloads(table) == 0
    clock.tick(30)
    publish(path, 0, 2)
    clock.wall_s += step_s
    if late:
        table = Table(path, cache_dir, options, clock)
        table.versions(0)
    made = reloads(table)
    for _ in range(60):
        clock.tick(1)
        made += reloads(table)
    assert made >= 1
    assert table.versions(0) == [2]
    made = 0
    for _ in range(180):
        clock.tick(1)
        made += reloads(table)
    assert 2 <= made <= 4


def test_timers_after_the_clock_was_set_back(path: Path, cache_dir: Path) -> None:
    """What a trigger has scheduled runs once, at its time or when the clock was set back; each timer can be cancelled by itself."""
    table = Table(path, cache_dir, CACHE)
    clock, schedule = table.host.clock, table.full.schedule
    ran: list[float] = []

    def action() -> None:
        ran.append(clock.steady_s)

    schedule.run_due()
    began_s = clock.steady_s
    schedule.schedule(clock.wall_s + 5, action)
    schedule.schedule(clock.wall_s + 6, action)()
    schedule.schedule(clock.wall_s + 7, action)
    cancel = schedule.schedule(clock.wall_s + 8, action)
    for _ in range(5):
        clock.tick(1)
        schedule.run_due()
    assert ran == [began_s + 5]
    clock.wall_s -= HOUR_S
    cancel()
    schedule.run_due()
    assert ran == [began_s + 5] * 2
    clock.wall_s += HOUR_S
    clock.tick(60)
    schedule.run_due()
    assert len(ran) == 2


@each_step
def test_the_limit_of_staleness_holds(path: Path, cache_dir: Path, step_s: float) -> None:
    """lookup.full-cache.max-staleness counts time that has passed, whatever clocks show; with the store down nothing is served."""
    table = Table(path, cache_dir, LIMITED)
    assert table.versions(0) == [1]
    publish(path, 0, 2)
    table.host.clock.wall_s += step_s
    table.host.clock.tick(601)
    table.down()
    with pytest.raises(ReloadFailedError):
        table.versions(0)
    table.up()
    assert table.versions(0) == [2]
