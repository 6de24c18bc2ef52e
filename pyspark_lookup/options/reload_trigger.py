"""Triggers, which compute when a full cache is reloaded (as in FLIP-221, Flink's lookup caches), and `Blackout`: times without reloads.

A trigger remembers no times. It computes from the last reload by any process of the host, so another process can continue a schedule. The
trigger's `Context` has the clock, the timer and the threads. Times are Unix seconds.
"""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import datetime
import enum
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from pyspark_lookup.errors import NotSupportedError, OptionError
from pyspark_lookup.options.parsing import check_argument, is_number

_MAX_DAYS = 36_500
_DAY = datetime.timedelta(days=1)
_ZERO = datetime.timedelta()
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{3}(?:[0-9]{3})?)?)?"
_ZONE = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])?"
_ISO_TIME = re.compile(f"{_TIME}{_ZONE}")
_WINDOW = re.compile(rf"({_TIME})\s*-\s*({_TIME})({_ZONE})")


class ScheduleMode(enum.Enum):
    """When a periodic reload is due: one interval after the end of the last reload, or whole intervals after the start of the first load."""

    FIXED_DELAY = "FIXED_DELAY"
    FIXED_RATE = "FIXED_RATE"


@dataclasses.dataclass(frozen=True)
class LastReload:
    """When a table was last reloaded on this host, by any process, in Unix seconds.

    `first_started_at_s`: when the first load of this schedule began, from which FIXED_RATE counts. `started_at_s` and `finished_at_s`: when
    the latest reload began and ended, even if it failed.
    """

    first_started_at_s: float
    started_at_s: float
    finished_at_s: float


class CacheReloadTrigger(abc.ABC):
    """Decides when a full cache reloads (FLIP-221). Subclass this class for a schedule of your own.

    At any time, the trigger of a table is open in at most one process of the host. No method may block.
    """

    class Context(abc.ABC):
        """The functions that the cache offers to its trigger. Any thread may call them."""

        @abc.abstractmethod
        def current_processing_time(self) -> float:
            """The current Unix time, in seconds (in FLIP-221 it is in milliseconds)."""

        def current_watermark(self) -> NoReturn:
            """Raises NotSupportedError: a Spark worker has no watermark."""
            raise NotSupportedError("there is no watermark in a Spark worker: use current_processing_time()")

        @abc.abstractmethod
        def trigger_reload(self) -> concurrent.futures.Future[None]:
            """Ask for a reload. The future is done when the reload has ended; it has the exception of a reload that failed (not so in Flink)."""

        @abc.abstractmethod
        def last_reload(self) -> LastReload | None:
            """The last reload by any process of this host; None before the first has ended."""

        @abc.abstractmethod
        def schedule(self, at_s: float, action: Callable[[], object]) -> Callable[[], None]:
            """Run `action` once on the cache's own timer, not before Unix time `at_s`. Returns a function that cancels it.

            If the clock is set back meanwhile, `action` runs at once, because `at_s` may then be far away. So `action` must read the time,
            and call `schedule` again if it is too early.
            """

    @abc.abstractmethod
    def open(self, context: Context) -> None:
        """Begin to ask `context` for reloads."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop asking for reloads. A reload that is running goes on to its end."""


def _cancel_nothing() -> None:
    """Does nothing. It stands in for the function that cancels the planned reload while none is planned."""


def _is_first(last: LastReload) -> bool:
    return last.started_at_s == last.first_started_at_s


class DueTrigger(CacheReloadTrigger):
    """A trigger that reloads when `next_due_s` says so; if several reloads were missed, it makes one. A pickled copy is not open (FLIP-221).

    `late_s`: how much later than `next_due_s` says this host reloads, except for its first load.
    """

    _waits = True  # whether a reload must end before the next one is planned
    late_s = 0.0

    def __init__(self) -> None:
        self._context: CacheReloadTrigger.Context | None = None
        self._cancel: Callable[[], None] = _cancel_nothing

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_context": None, "_cancel": _cancel_nothing}

    @abc.abstractmethod
    def next_due_s(self, last: LastReload | None, now_s: float) -> float:
        """The time at which the next reload is due; a time in the past means now."""

    @abc.abstractmethod
    def _due_after_s(self, last: LastReload | None, now_s: float) -> float:
        """The time after `now_s` at which a reload is due, if one is requested at `now_s`. `last`: the reload before the one requested."""

    def due_s(self, last: LastReload | None, now_s: float) -> float:
        """The time at which this host makes the next reload: when it is due, or `late_s` later if it is not the first load. A time in the
        past means now."""
        if last is None:
            return self.next_due_s(None, now_s)
        if _is_first(last):
            return self.next_due_s(last, now_s) + self.late_s
        return self.next_due_s(self._without_delay(last), now_s - self.late_s) + self.late_s

    def _planned_s(self, last: LastReload | None, now_s: float) -> float:
        """The time after `now_s` at which this host makes a reload, if one is requested at `now_s`. `last`: as in `_due_after_s`."""
        if last is None:
            return self._due_after_s(None, now_s)
        return self._due_after_s(self._without_delay(last), now_s - self.late_s) + self.late_s

    def _without_delay(self, last: LastReload) -> LastReload:
        """The last reload with the times that it would have on a host without delay.

        With its real times, FIXED_DELAY would add the delay to each interval, and FIXED_RATE could leave out a reload. The first load is
        never delayed: a host that starts loads at once.
        """
        if _is_first(last):
            return last
        late_s = self.late_s
        return LastReload(last.first_started_at_s, last.started_at_s - late_s, last.finished_at_s - late_s)

    def open(self, context: CacheReloadTrigger.Context) -> None:
        self.close()
        self._context = context
        last, now_s = context.last_reload(), context.current_processing_time()
        self._plan(context, last, self.due_s(last, now_s))

    def close(self) -> None:
        self._context = None
        self._cancel()

    def _plan(self, context: CacheReloadTrigger.Context, last: LastReload | None, due_s: float) -> None:
        cancel = self._cancel = context.schedule(due_s, functools.partial(self._fire, context, last, due_s))
        # The race: another thread may have called close() before `_cancel` was set, which cancelled only the timer before this one.
        # So this timer is cancelled here.
        if self._context is not context:
            cancel()

    def _fire(self, context: CacheReloadTrigger.Context, planned_after: LastReload | None, due_s: float) -> None:
        if self._context is not context:
            return
        last, now_s = context.last_reload(), context.current_processing_time()
        # A reload in the meantime, such as one by another process, changes the plan. If there was no reload and `due_s` has not come, the
        # clock was set back: the time that is computed now may be earlier than `due_s`. If it is later, `due_s` stays: otherwise each time
        # the clock is set back could put the reload off.
        if last != planned_after:
            due_s = self.due_s(last, now_s)
        elif due_s > now_s:
            due_s = min(due_s, self.due_s(last, now_s))
        if due_s > now_s:
            self._plan(context, last, due_s)
        elif self._waits:
            try:
                reload = context.trigger_reload()
            except Exception:
                self._plan_next(context, last)
                raise
            reload.add_done_callback(lambda _: self._plan_next(context, last))
        else:
            self._plan(context, last, self._planned_s(last, now_s))
            context.trigger_reload()

    def _plan_next(self, context: CacheReloadTrigger.Context, before: LastReload | None) -> None:
        if self._context is not context:
            return
        last, now_s = context.last_reload(), context.current_processing_time()
        # A reload that was refused does not change `last`, and must not be requested again at once.
        due_s = self._planned_s if last == before else self.due_s
        self._plan(context, last, due_s(last, now_s))


class PeriodicCacheReloadTrigger(DueTrigger):
    """Reloads every `interval_s` seconds, counted from the end of the last reload, or from the start of the first one.

    FIXED_DELAY: `interval_s` after the last reload has ended, successful or not. FIXED_RATE: at the start of the first reload plus multiples
    of `interval_s`, even if a reload is still running; if several reloads were missed, one is made (in Flink they pile up). In both modes,
    the first reload is due at once, and the next one is due within one interval from now, even if the clock was set back.

    Raises OptionError unless the interval is a finite number greater than zero.
    """

    def __init__(self, interval_s: float, mode: ScheduleMode = ScheduleMode.FIXED_DELAY) -> None:
        if not is_number(interval_s) or not 0 < interval_s < math.inf:
            raise OptionError(
                f"option lookup.full-cache.periodic-reload.interval = {interval_s!r} s: expected a duration greater than zero, "
                "such as '5 min'"
            )
        check_argument("mode", mode, ScheduleMode, "ScheduleMode.FIXED_DELAY or ScheduleMode.FIXED_RATE")
        super().__init__()
        self.interval_s = interval_s
        self.mode = mode
        self._waits = mode is ScheduleMode.FIXED_DELAY

    def next_due_s(self, last: LastReload | None, now_s: float) -> float:
        if last is None:
            return now_s
        if self.mode is ScheduleMode.FIXED_DELAY:
            return min(last.finished_at_s, now_s) + self.interval_s
        due_s = self._grid_point_s(last.first_started_at_s, last.started_at_s)
        return min(due_s, now_s + self.interval_s) if last.started_at_s > now_s else due_s

    def _due_after_s(self, last: LastReload | None, now_s: float) -> float:
        if last is None or self.mode is ScheduleMode.FIXED_DELAY:
            return now_s + self.interval_s
        return self._grid_point_s(last.first_started_at_s, now_s)

    def _grid_point_s(self, anchor_s: float, after_s: float) -> float:
        """The first `anchor_s + k * interval_s` after `after_s`."""
        k = math.floor((after_s - anchor_s) / self.interval_s)
        # The quotient is rounded, so `k` may be off by one in either direction.
        points = (anchor_s + (k + i) * self.interval_s for i in range(3))
        return next((point for point in points if point > after_s), math.nextafter(after_s, math.inf))


class TimedCacheReloadTrigger(DueTrigger):
    """Reloads once at the start, then at the next `reload_time`, and then every `interval_days` calendar days at that time.

    `reload_time` is local to `zone` (None: the system's) unless it has an offset. On a day when clocks are put forward and skip
    `reload_time`, the offset before the change applies (02:30 becomes 03:30). On a day when they are put back and show `reload_time` twice,
    the first of the two counts. The days count from the first `reload_time`, so a reload by hand, or a late one, does not shift later
    reloads. If the clock was set back since the last reload, the next reload is at the next `reload_time`. Raises OptionError unless
    `interval_days` is from 1 to 36500.
    """

    def __init__(self, reload_time: datetime.time, interval_days: int = 1, zone: datetime.tzinfo | None = None) -> None:
        check_argument("reload_time", reload_time, datetime.time, "a datetime.time, such as datetime.time(3, 30)")
        check_argument("zone", zone, (datetime.tzinfo, type(None)), "a datetime.tzinfo, such as datetime.timezone.utc")
        if not is_number(interval_days) or not 1 <= interval_days <= _MAX_DAYS:
            raise OptionError(
                f"option lookup.full-cache.timed-reload.interval-in-days = {interval_days!r}: expected at least 1 day and "
                f"at most {_MAX_DAYS}"
            )
        super().__init__()
        self.reload_time = reload_time
        self.interval_days = interval_days
        self._zone = reload_time.tzinfo or zone

    def next_due_s(self, last: LastReload | None, now_s: float) -> float:
        if last is None:
            return now_s
        if last.started_at_s > now_s:
            return self._first_s(now_s)
        if _is_first(last):
            return self._first_s(last.started_at_s)
        return self._after_s(last, last.started_at_s)

    def _due_after_s(self, last: LastReload | None, now_s: float) -> float:
        if last is None:
            return min(due_s for due_s, _ in self._instants_around(now_s) if due_s > now_s)
        return self._after_s(last, now_s)

    def _first_s(self, at_s: float) -> float:
        """The first reload time at or after `at_s`."""
        return min(due_s for due_s, _ in self._instants_around(at_s) if due_s >= at_s)

    def _after_s(self, last: LastReload, at_s: float) -> float:
        """The first reload time after `at_s` that is a whole number of intervals after the first reload time of all."""
        anchor_s = last.first_started_at_s
        _, anchor = min(entry for entry in self._instants_around(anchor_s) if entry[0] >= anchor_s)
        latest = max(day for due_s, day in self._instants_around(at_s) if due_s <= at_s)
        # Negative if the clock was set back to a day before the first reload. The reloads are then on the same days as they would have been.
        steps = (latest - anchor).days // self.interval_days + 1
        return _instant_s(anchor + steps * self.interval_days * _DAY, self.reload_time, self._zone)

    def _instants_around(self, at_s: float) -> list[tuple[float, datetime.date]]:
        return [(_instant_s(day, self.reload_time, self._zone), day) for day in _days_around(at_s, self._zone)]


@dataclasses.dataclass(frozen=True)
class Blackout:
    """Times of day at which no reload begins. `parse_blackout` parses a `Blackout` from a string; `str` returns such a string, in a
    normal form and without `zone`.

    `windows` are (start, end), including the start and excluding the end; a window whose end is earlier than its start goes past midnight.
    The two times of a window have the same offset, or no offset: then they are local to `zone` (None: the system's). If a change of clocks
    skips a start or an end, or shows it twice, the longer of the possible windows counts.

    Raises ValueError if a window is empty, or if the windows leave no time of the day free.
    """

    windows: tuple[tuple[datetime.time, datetime.time], ...]
    zone: datetime.tzinfo | None = None

    def __post_init__(self) -> None:
        if any(start == end for start, end in self.windows):
            raise ValueError("windows whose end differs from their start")
        # Whether a local window overlaps one with an offset depends on the day. Assume the worst case, that they never overlap.
        local = [window for window in self.windows if window[0].utcoffset() is None]
        fixed = [window for window in self.windows if window not in local]
        if _measure(local) + _measure(fixed) >= _DAY:
            raise ValueError("windows that leave some time of the day free for reloads")

    def postponed_s(self, at_s: float) -> float:
        """The first time from `at_s` on that lies in no window. Times are Unix times in seconds."""
        while ends := [end_s for start_s, end_s in self._spans_around(at_s) if start_s <= at_s < end_s]:
            at_s = max(ends)
        return at_s

    def _spans_around(self, at_s: float) -> Iterator[tuple[float, float]]:
        for start, end in self.windows:
            zone = start.tzinfo or self.zone
            for day in _days_around(at_s, zone):
                until = day if start < end else day + _DAY
                starts = (_instant_s(day, start, zone, fold) for fold in (0, 1))
                yield min(starts), max(_instant_s(until, end, zone, fold) for fold in (0, 1))

    def __str__(self) -> str:
        return ", ".join(_window_text(start, end) for start, end in self.windows)


def _instant_s(day: datetime.date, time: datetime.time, zone: datetime.tzinfo | None, fold: int = 0) -> float:
    """The Unix time at which clocks of `zone` (None: the system's) show this day and time. `fold`: 1 for the second time that they show it."""
    return datetime.datetime.combine(day, time.replace(fold=fold), zone).timestamp()


def _days_around(at_s: float, zone: datetime.tzinfo | None) -> list[datetime.date]:
    """The local day of an instant, the two days before and the day after: some zones once skipped a whole day."""
    today = datetime.datetime.fromtimestamp(at_s, zone).date()
    return [today + days * _DAY for days in range(-2, 2)]


def _measure(windows: Iterable[tuple[datetime.time, datetime.time]]) -> datetime.timedelta:
    """How much of a day the windows cover together. Either all windows are local, or all have offsets."""
    at = covered = _ZERO
    pieces: list[tuple[datetime.timedelta, datetime.timedelta]] = []
    for window in windows:
        start, end = (_since_midnight(time) for time in window)
        pieces += [(start, end)] if start < end else [(start, _DAY), (_ZERO, end)]
    for start, end in sorted(pieces):
        covered += max(end, at) - max(start, at)
        at = max(end, at)
    return covered


def _since_midnight(time: datetime.time) -> datetime.timedelta:
    """The time since midnight; for a time with an offset, since midnight in UTC."""
    local = datetime.timedelta(0, time.second, time.microsecond, 0, time.minute, time.hour)
    return (local - (time.utcoffset() or _ZERO)) % _DAY


def _window_text(start: datetime.time, end: datetime.time) -> str:
    first, last = (time.replace(tzinfo=None).isoformat() for time in (start, end))
    offset = start.isoformat().removeprefix(first).replace("+00:00", "Z")
    return f"{first.removesuffix(':00')}-{last.removesuffix(':00')}{offset}"


def parse_iso_time(text: str) -> datetime.time:
    """The time of day of a text such as `10:15`, `10:15:30`, `10:15Z` or `10:15+07:00`. A time without an offset is local.

    Seconds may have 3 or 6 decimals. Raises ValueError for any other text.
    """
    # Python versions differ in which texts they parse, such as '10' or '1015': accept the same texts in all of them.
    if not _ISO_TIME.fullmatch(text.strip()):
        raise ValueError("an ISO time such as '10:15', '10:15Z' or '10:15+07:00'")
    return datetime.time.fromisoformat(text.strip().replace("Z", "+00:00"))


def parse_blackout(text: str, zone: datetime.tzinfo | None = None) -> Blackout:
    """The `Blackout` of a text such as `22:00-06:00, 12:00-13:00Z`. A window without a `Z` or offset at its end is local to `zone`.

    Raises ValueError for a text of another form, and for windows that `Blackout` refuses.
    """
    windows: list[tuple[datetime.time, datetime.time]] = []
    for part in text.split(","):
        match = _WINDOW.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                "times of day such as '22:00-06:00, 12:00-13:00'; a window that is not local ends with 'Z' or an offset, such as "
                "'22:00-06:00+02:00'; midnight is 00:00"
            )
        start, end, offset = match.groups()
        windows.append((parse_iso_time(start + offset), parse_iso_time(end + offset)))
    return Blackout(tuple(windows), zone)
