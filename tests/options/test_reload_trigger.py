"""Reload triggers: when a reload is due, what asks for it, and the times of day that put it off."""

import concurrent.futures
import contextlib
import datetime
import math
import os
import pickle
import time
import zoneinfo
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pyspark_lookup.options.reload_trigger import (
    Blackout,
    CacheReloadTrigger,
    DueTrigger,
    LastReload,
    PeriodicCacheReloadTrigger,
    ScheduleMode,
    TimedCacheReloadTrigger,
    parse_blackout,
    parse_iso_time,
)
from tests.support.fakes import FakeClock

UTC = datetime.timezone.utc
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
NEW_YORK = zoneinfo.ZoneInfo("America/New_York")
SAMOA = zoneinfo.ZoneInfo("Pacific/Apia")
ZONES = [UTC, BERLIN, NEW_YORK, *map(zoneinfo.ZoneInfo, ("Asia/Kathmandu", "Australia/Lord_Howe", "America/Sao_Paulo"))]
OFFSETS = st.integers(-23 * 4, 23 * 4).map(
    lambda quarters: datetime.timezone(datetime.timedelta(minutes=15 * quarters))
)
DELAY, RATE = ScheduleMode.FIXED_DELAY, ScheduleMode.FIXED_RATE
DAY = 86400.0
NOON = 4_000_017_600.0  # 2096-10-02 12:00 UTC


class ManualContext(CacheReloadTrigger.Context):
    """A cache that notes what a trigger asks for and runs timers when told. A reload ends when the test says so, or after `reload_s`."""

    def __init__(self, now_s: float = NOON, last: LastReload | None = None, reload_s: float | None = None) -> None:
        self.clock = FakeClock(now_s)
        self.last = last
        self.reload_s = reload_s
        self.timers: list[tuple[float, Callable[[], object]]] = []
        self.asked: list[float] = []
        self.running: concurrent.futures.Future[None] | None = None
        self.started_s = 0.0

    def current_processing_time(self) -> float:
        return self.clock.wall_s

    def last_reload(self) -> LastReload | None:
        return self.last

    def trigger_reload(self) -> concurrent.futures.Future[None]:
        self.asked.append(self.clock.wall_s)
        if self.running is None:
            self.running = concurrent.futures.Future()
            self.started_s = self.clock.wall_s
            if self.reload_s is not None:
                self.schedule(self.clock.wall_s + self.reload_s, self.end)
        return self.running

    def schedule(self, at_s: float, action: Callable[[], object]) -> Callable[[], None]:
        timer = (at_s, action)
        self.timers.append(timer)

        def cancel() -> None:
            if timer in self.timers:
                self.timers.remove(timer)

        return cancel

    def reloaded(self, started_s: float, finished_s: float) -> None:
        """Let the host know of an attempt, as any of its processes does."""
        first_s = self.last.first_started_at_s if self.last else started_s
        self.last = LastReload(first_s, started_s, finished_s)

    def end(self, problem: Exception | None = None, trace: bool = True) -> None:
        """End the reload that runs; without `trace` the host's record of the last one stays as it was."""
        reload, self.running = self.running, None
        if trace:
            self.reloaded(self.started_s, self.clock.wall_s)
        if problem is None:
            reload.set_result(None)
        else:
            reload.set_exception(problem)

    def due(self) -> list[float]:
        return sorted(at_s for at_s, _ in self.timers)

    def run_until(self, until_s: float) -> None:
        """Let time pass, running timers as they come due; too many mean a busy loop."""
        for _ in range(1000):
            timer = min(self.timers, key=lambda timer: timer[0], default=(math.inf, lambda: None))
            if timer[0] > until_s:
                self.clock.wall_s = max(self.clock.wall_s, until_s)
                return
            self.timers.remove(timer)
            self.clock.wall_s = max(self.clock.wall_s, timer[0])
            timer[1]()
        pytest.fail("the trigger runs in circles")

    def run_due(self) -> None:
        self.run_until(self.clock.wall_s)


def opened(trigger: CacheReloadTrigger, context: ManualContext) -> ManualContext:
    trigger.open(context)
    return context


def unix(text: str) -> float:
    moment = datetime.datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


@contextlib.contextmanager
def system_zone(name: str) -> Iterator[None]:
    try:
        with mock.patch.dict(os.environ, TZ=name):
            time.tzset()
            yield
    finally:
        time.tzset()


SECONDS = st.floats(0, 4e9)
INTERVALS = st.floats(1e-2, 1e7)


@given(st.sampled_from(ScheduleMode), INTERVALS, SECONDS, SECONDS, SECONDS, st.floats(-4e9, 1e9))
def test_when_a_periodic_reload_is_due(
    mode: ScheduleMode, interval_s: float, first: float, start: float, took: float, later: float
) -> None:
    """FIXED_DELAY: one interval after the last reload's end; FIXED_RATE: a multiple of it after the first start; never later than in an interval."""
    trigger = PeriodicCacheReloadTrigger(interval_s, mode)
    started = start if mode is DELAY else first + start
    last = LastReload(first, started, started + took)
    now_s = last.finished_at_s + later
    due = trigger.next_due_s(last, now_s)
    assert due <= now_s + interval_s + 1e-5
    if mode is DELAY and later >= 0:
        assert due == last.finished_at_s + interval_s
    elif mode is RATE and now_s >= started:
        assert started < due <= started + interval_s + 1e-5
        assert abs(math.remainder(due - first, interval_s)) < 1e-5


TRIGGERS = [
    lambda: PeriodicCacheReloadTrigger(10),
    lambda: PeriodicCacheReloadTrigger(10, RATE),
    lambda: TimedCacheReloadTrigger(datetime.time(12), 1, UTC),
]
each_trigger = pytest.mark.parametrize("make", TRIGGERS, ids=["delay", "rate", "timed"])


@pytest.mark.parametrize("mode", ScheduleMode)
@pytest.mark.parametrize("last", [None, LastReload(NOON - 50, NOON - 20, NOON - 20)])
@pytest.mark.parametrize("end", ["failed", "refused", "cancelled", "cannot be asked for"])
def test_no_end_of_a_reload_ends_the_schedule(mode: ScheduleMode, last: LastReload | None, end: str) -> None:
    """After a reload that failed, was refused or cancelled, or could not be asked for, the next comes a full interval later."""
    context = opened(PeriodicCacheReloadTrigger(10, mode), ManualContext(last=last))
    for now_s in (NOON, NOON + 10, NOON + 20):
        if end == "cannot be asked for":
            with (
                mock.patch.object(context, "trigger_reload", side_effect=RuntimeError("no")),
                pytest.raises(RuntimeError, match="no"),
            ):
                context.run_until(now_s)
        else:
            context.run_until(now_s)
            assert context.asked[-1] == now_s
            if end == "cancelled":
                assert context.running.cancel()
                context.running = None
            else:
                context.end(OSError("the store is away"), trace=end == "failed")
        context.run_due()
        assert context.due() == [now_s + 10]


@given(st.sampled_from(ScheduleMode), st.lists(st.sampled_from([0.0, 0.25, 3.0, 10.0, 25.0]), min_size=1, max_size=8))
def test_a_schedule_of_slow_and_fast_reloads(mode: ScheduleMode, takes: list[float]) -> None:
    """Over any run of reloads FIXED_DELAY keeps the pause, and FIXED_RATE the grid with one reload per point."""
    context = opened(PeriodicCacheReloadTrigger(10, mode), ManualContext())
    ends: list[float] = []
    for takes_s in takes:
        while context.running is None:
            context.run_until(context.due()[0])
        context.run_until(context.started_s + takes_s)
        ends.append(context.clock.wall_s)
        context.end()
    if mode is DELAY:
        assert context.asked == [NOON] + [end + 10 for end in ends[:-1]]
    else:
        assert context.asked == [NOON + 10 * k for k in range(len(context.asked))]
    assert len(context.due()) == 1


@each_trigger
def test_a_late_host_is_late_once(make: Callable[[], DueTrigger]) -> None:
    """A late host loads at once the first time, reloads late by its delay the next time, and then as often as other hosts, though each reload takes time."""
    late_trigger, prompt_trigger = make(), make()
    late_trigger.late_s = 9.9375
    times = []
    for trigger in (late_trigger, prompt_trigger):
        context = opened(trigger, ManualContext(NOON - 3600, reload_s=0.125))
        while len(context.asked) < 4:
            context.run_until(context.due()[0])
        times.append(context.asked)
    assert times[0] == [NOON - 3600, *(at_s + 9.9375 for at_s in times[1][1:])]
    assert pickle.loads(pickle.dumps(late_trigger)).late_s == 9.9375


@each_trigger
@pytest.mark.parametrize("problem", [None, OSError("gone")])
def test_a_closed_trigger_plans_nothing(make: Callable[[], CacheReloadTrigger], problem: Exception | None) -> None:
    """A closed trigger plans nothing, whatever is under way. It may be closed twice, and opened again for another context."""
    trigger = make()
    context = opened(trigger, ManualContext())
    ((_, action),) = context.timers
    trigger.close()
    trigger.close()
    action()
    assert (context.asked, context.timers) == ([], [])
    trigger = make()
    context = opened(trigger, ManualContext())
    context.run_due()
    trigger.close()
    with mock.patch.object(context, "schedule") as schedule:
        context.end(problem)
    schedule.assert_not_called()
    assert (context.asked, context.timers) == ([NOON], [])
    trigger = make()
    old = opened(trigger, ManualContext())
    old.run_due()
    new = opened(trigger, ManualContext())
    old.end()
    assert (old.timers, new.due()) == ([], [NOON])


@each_trigger
def test_close_while_a_timer_is_being_set(make: Callable[[], CacheReloadTrigger]) -> None:
    """A close from another thread, between the decision to plan and the timer, leaves no timer."""
    trigger = make()

    class Closing(ManualContext):
        def schedule(self, at_s: float, action: Callable[[], object]) -> Callable[[], None]:
            trigger.close()
            return super().schedule(at_s, action)

    assert opened(trigger, Closing()).timers == []


TIMES = st.builds(datetime.time, st.integers(0, 23) | st.integers(1, 3), st.sampled_from([0, 15, 30, 45]))
DAYS = st.integers(1, 10) | st.sampled_from([28, 30, 100])
# How far from a reload time something is: at it, a moment or days to either side.
NEAR = st.sampled_from([0.0, 0.001, -0.001, 900.0, -900.0, 3600.0, -3600.0]) | st.integers(
    -12 * 86_400_000, 12 * 86_400_000
).map(lambda ms: ms / 1000)
# Days on which clocks skip an hour, show one twice, or skip the day.
CHANGES = {
    BERLIN: [datetime.date(2026, 3, 29), datetime.date(2026, 10, 25)],
    NEW_YORK: [datetime.date(2026, 3, 8), datetime.date(2026, 11, 1)],
    SAMOA: [datetime.date(2011, 12, 30)],
}


def calendar_grid(
    reload_time: datetime.time, days: int, zone: datetime.tzinfo, first_s: float, steps: range
) -> list[float]:
    """The reload times of the steps from the first at or after the first start, found by leafing a calendar."""

    def at_s(day: datetime.date) -> float:
        return datetime.datetime.combine(day, reload_time, zone).timestamp()

    day = datetime.datetime.fromtimestamp(first_s, zone).date() - datetime.timedelta(days=2)
    while at_s(day) < first_s:
        day += datetime.timedelta(days=1)
    return [at_s(day + datetime.timedelta(days=days * step)) for step in steps]


@st.composite
def first_starts(draw: st.DrawFn, reload_time: datetime.time, zone: datetime.tzinfo) -> float:
    """The start of a first load, often near a reload time or at it, and shortly before the clocks change."""
    days = st.dates(datetime.date(2026, 1, 1), datetime.date(2026, 12, 31))
    if zone in CHANGES:
        days |= st.builds(
            lambda day, n: day + datetime.timedelta(n), st.sampled_from(CHANGES[zone]), st.integers(-4, 1)
        )
    return datetime.datetime.combine(draw(days), reload_time, zone).timestamp() + draw(NEAR)


@given(st.data(), TIMES, st.sampled_from([*ZONES, *CHANGES]), DAYS, st.integers(-5, 40) | st.integers(0, 3), NEAR)
def test_a_timed_reload_is_the_next_on_the_grid(
    data: st.DataObject, reload_time: datetime.time, zone: datetime.tzinfo, days: int, step: int, near: float
) -> None:
    """The first grid time after the last start, or the next time of day after a start that is to come; clocks that change skip or double none."""
    first = data.draw(first_starts(reload_time, zone))
    grid = calendar_grid(reload_time, days, zone, first, range(-20, 60))
    started = grid[20 + step] + near
    expected = grid[20] if started == first else min(at_s for at_s in grid if at_s > started)
    last, ahead = LastReload(first, started, started), LastReload(first, started + 1, started + 1)
    set_back = TimedCacheReloadTrigger(reload_time, days, zone).next_due_s(ahead, started)
    assert set_back == calendar_grid(reload_time, 1, zone, started, range(1))[0]
    for at_time in (reload_time, reload_time.replace(fold=1)):
        assert TimedCacheReloadTrigger(at_time, days, zone).next_due_s(last, started) == expected
    if isinstance(zone, zoneinfo.ZoneInfo):
        with system_zone(zone.key):
            assert TimedCacheReloadTrigger(reload_time, days).next_due_s(last, started) == expected
    else:
        trigger = TimedCacheReloadTrigger(reload_time.replace(tzinfo=zone), days, BERLIN)
        assert trigger.next_due_s(last, started) == expected


def test_a_refused_timed_load_waits_for_its_time() -> None:
    """An initial load that leaves no trace is asked for again at the next time of day, not at once."""
    context = opened(TimedCacheReloadTrigger(datetime.time(12, 30), 7, UTC), ManualContext())
    context.run_due()
    context.end(trace=False)
    context.run_due()
    assert (context.asked, context.due()) == ([NOON], [NOON + 1800])


@given(st.times(), st.none() | OFFSETS, st.sampled_from(["minutes", "seconds", "milliseconds", "microseconds"]))
def test_iso_times(at: datetime.time, zone: datetime.tzinfo | None, precision: str) -> None:
    """A time of day is local without an offset, and otherwise has the one it names."""
    text = at.replace(tzinfo=zone).isoformat(precision)
    for spelling in (text, f" {text} ", text.replace("+00:00", "Z"), text.replace("+00:00", "-00:00")):
        found = parse_iso_time(spelling)
        assert found.replace(tzinfo=None).isoformat("microseconds").startswith(at.isoformat(precision))
        assert found.utcoffset() == at.replace(tzinfo=zone).utcoffset()


@pytest.mark.parametrize(
    "text",
    [
        "", "10", "1015", "24:00", "10:15:60", "10:15:30.5", "10:15+07", "10:15+24:00", "10:15z", "10:15 Z", "10:15\n10:15", "١٠:١٥",
        "2026-05-04T10:15", "10:15[Europe/Berlin]",
    ],
)  # fmt: skip
def test_bad_iso_times(text: str) -> None:
    """A text that only some versions of Python parse, or not as a time of day, is refused with examples."""
    with pytest.raises(ValueError, match=r"^an ISO time such as '10:15', '10:15Z' or '10:15\+07:00'$"):
        parse_iso_time(text)


@pytest.mark.parametrize(
    ("zone", "text", "at", "free"),
    [
        (BERLIN, "22:00-06:00", "2026-03-28T23:00+01:00", "2026-03-29T06:00+02:00"),  # 7 hours
        (BERLIN, "12:00-13:00", "2026-07-01T12:00+02:00", "2026-07-01T13:00+02:00"),
        # An edge that the clocks skip lies as early (start) or late (end) as it can be read.
        (BERLIN, "02:30-03:30", "2026-03-29T03:10+02:00", "2026-03-29T03:30+02:00"),
        (BERLIN, "01:30-02:30", "2026-03-29T01:45+01:00", "2026-03-29T03:30+02:00"),
        (BERLIN, "02:15-02:45", "2026-10-25T02:20+02:00", "2026-10-25T02:45+01:00"),
        # A free half hour that the clocks skip is not there that day.
        (BERLIN, "02:45-02:15", "2026-03-28T03:00+01:00", "2026-03-30T02:15+02:00"),
        (BERLIN, "22:00-06:00Z", "2026-03-28T23:00+01:00", "2026-03-29T08:00+02:00"),
        (SAMOA, "22:00-06:00", "2011-12-29T23:00-10:00", "2011-12-31T06:00+14:00"),
        (SAMOA, "22:00-06:00", "2011-12-31T03:00+14:00", "2011-12-31T06:00+14:00"),
    ],
)  # fmt: skip
def test_local_blackouts_follow_the_clocks(zone: zoneinfo.ZoneInfo, text: str, at: str, free: str) -> None:
    """A local window holds for what clocks show on that day; where that is unclear, the wider reading counts."""
    assert parse_blackout(text, zone).postponed_s(unix(at)) == unix(free)
    with system_zone(zone.key):
        assert parse_blackout(text).postponed_s(unix(at)) == unix(free)


NO_WINDOWS = r"^times of day such as '22:00-06:00, 12:00-13:00'"
EMPTY = "whose end differs from their start"  # it could mean nothing or the whole day
ALL_DAY = "leave some time of the day free"  # local beside offset ones: if they could


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["", "22:00", "22:00-24:00", "22:00-06:00,", "22:00 06:00", "22:00-06:00;12:00-13:00", "22:00Z-06:00Z", "22:00-06:00+2"], NO_WINDOWS),
        (["12:00-12:00", "22:00-06:00, 00:00-00:00Z"], EMPTY),
        (["00:00-12:00, 12:00-00:00", "22:00-06:00Z, 06:00-22:00Z", "00:00-12:00Z, 14:00-02:00+02:00", "08:00-20:00, 21:00-09:00Z"], ALL_DAY),
    ],
)  # fmt: skip
def test_bad_blackouts(texts: list[str], words: str) -> None:
    """A text that is not a list of windows is refused with an example of one; so are windows that are empty, or cover the day together."""
    for text in texts:
        with pytest.raises(ValueError, match=words):
            parse_blackout(text)


MINUTES = st.integers(0, 24 * 60 - 1).map(lambda minute: f"{minute // 60:02}:{minute % 60:02}")
WINDOWS = st.lists(st.tuples(MINUTES, MINUTES), min_size=1, max_size=4).map(
    lambda pairs: ", ".join(f"{start}-{end}" for start, end in pairs)
)


def is_black(blackout: Blackout, at_s: float, zone: datetime.tzinfo) -> bool:
    clock_time = datetime.datetime.fromtimestamp(at_s, zone).time()
    return any(
        start <= clock_time < end if start < end else not end <= clock_time < start for start, end in blackout.windows
    )


@given(WINDOWS, st.sampled_from(ZONES) | OFFSETS, st.integers(0, 60 * 24 * 365), st.floats(0, DAY))
def test_what_is_postponed_is_free(text: str, zone: datetime.tzinfo, minute: int, later: float) -> None:
    """The time is not before the one asked for, outside every window, in order, and where clocks do not change reached through black time only."""
    try:
        blackout = parse_blackout(text, zone)
    except ValueError:  # the example is passed over
        assume(False)
    at_s = unix("2026-01-01") + 60 * minute
    free = blackout.postponed_s(at_s)
    assert at_s <= free
    assert not is_black(blackout, free, zone)
    assert blackout.postponed_s(free) == free
    assert free <= blackout.postponed_s(at_s + later)
    if isinstance(zone, datetime.timezone):
        assert free < at_s + DAY
        assert all(is_black(blackout, at_s + 60 * k, zone) for k in range(int((free - at_s) / 60)))
