"""`Schedule` runs a table's reload trigger in one process of the host. `Jobs` runs a table's background loads, one at a time.

A schedule consists of a lock, and of the times of reloads in the table's state, which all processes share. The process with the lock runs the
trigger; if this process dies, the kernel releases the lock. So a new worker starts no reload of its own, and a reload that became due while no
worker was alive starts as soon as a worker gets the lock.

`Jobs` is a queue of background loads. Its thread ends when the queue is empty.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import threading
from collections.abc import Callable

from pyspark_lookup.core.clock import Timer
from pyspark_lookup.core.threads import ProcessEndsError, has_ended, is_ending
from pyspark_lookup.errors import VersionGoneError, redact_cause
from pyspark_lookup.options.enums import ReloadStrategy
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.parsing import make
from pyspark_lookup.options.reload_trigger import (
    Blackout,
    CacheReloadTrigger,
    DueTrigger,
    LastReload,
    PeriodicCacheReloadTrigger,
    TimedCacheReloadTrigger,
)
from pyspark_lookup.storage.context import HostContext, Start
from pyspark_lookup.storage.disk import Disk, Lock, key_of
from pyspark_lookup.versions.model import TableVersion


@dataclasses.dataclass(frozen=True)
class Job:
    """A background job: a load of `version` (None: the store's current version), or one of two jobs for which nobody waits.

    `compact`: merge the layers of the latest snapshot. `tidy`: remove expired snapshots. `due`: a load for the schedule; it is skipped if
    another process has loaded the table since `seen_s`, the end (Unix time) of the latest load that was known when the job was queued.
    """

    version: TableVersion | None
    future: concurrent.futures.Future[None]
    compact: bool = False
    tidy: bool = False
    due: bool = False
    seen_s: float | None = None


class Jobs:
    """A queue of jobs. `do`: called for each job, in a thread that `start` starts."""

    def __init__(self, name: str, start: Start, do: Callable[[Job], None]) -> None:
        self._name = name
        self._start = start
        self._do = do
        self._mutex = threading.Lock()
        self._jobs: list[Job] = []  # the first one runs
        self._running: Job | None = None
        self._working = self._closed = False

    def ask(
        self,
        version: TableVersion | None,
        compact: bool = False,
        tidy: bool = False,
        due: bool = False,
        seen_s: float | None = None,
    ) -> concurrent.futures.Future[None]:
        """Queue a job and return its future. If an equal job is waiting or running, return the future of that job.

        But if a load of the current version, other than one for the schedule, is running, queue another: the running load may have asked the
        store too early.
        """
        with self._mutex:
            for job in self._jobs:
                may_be_stale = job is self._running and version is None and not tidy and not due
                if (job.version, job.compact, job.tidy, job.due) == (version, compact, tidy, due) and not may_be_stale:
                    return job.future
            if version is not None:  # no snapshot is built for a version that is no longer the latest one
                for job in [job for job in self._jobs if job.version is not None and job is not self._running]:
                    self._jobs.remove(job)
                    job.future.set_exception(
                        VersionGoneError("a newer version appeared before the snapshot of this one was built")
                    )
            job = Job(version, concurrent.futures.Future(), compact, tidy, due, seen_s)
            job.future.set_running_or_notify_cancel()  # several callers may wait for the future, so none of them may cancel it
            self._jobs.append(job)
            begin = not self._working
            self._working = True
        if begin:
            try:
                self._start(self._name, self._work)
            except RuntimeError as problem:  # there are too many threads
                self._stop(problem)
        return job.future

    def _stop(self, problem: BaseException) -> None:
        """Record that the thread ends. Jobs that are waiting fail with `problem`."""
        with self._mutex:
            self._working = False
            waiting, self._jobs = self._jobs, []
        for job in waiting:
            job.future.set_exception(problem)

    def _work(self) -> None:
        while True:
            with self._mutex:
                closed = self._closed or is_ending()
                if not self._jobs and not closed:
                    self._working = False
                    return
                job = self._running = self._jobs[0] if not closed else None
            if job is None:
                self._stop(concurrent.futures.CancelledError())
                return
            problem: BaseException | None = None
            try:
                self._do(job)
            except ProcessEndsError:
                problem = concurrent.futures.CancelledError()
            except BaseException as raised:
                problem = raised
            with self._mutex:
                self._jobs.remove(job)
                self._running = None
            if problem is None:
                job.future.set_result(None)
            else:
                job.future.set_exception(problem)

    def close(self) -> None:
        """Start no more jobs. Waiting jobs are cancelled; a running job goes on to its end."""
        self._closed = True


_log = logging.getLogger("pyspark_lookup.snapshot")
_CLOSE_WAIT_S = 1.0
_BUSY_S = 0.2  # if too many reloads are running, an action that is due is tried again after this time
_POLL_S = 1.0  # within this time, a process notices that the process with the schedule's lock has died, or that the clock was set


def make_trigger(options: LookupOptions) -> CacheReloadTrigger | None:
    """The trigger that the options describe; None if they describe no reloads. Raises OptionError if a custom trigger cannot be made."""
    strategy = options.full_cache.strategy
    if isinstance(strategy, str):
        return make("lookup.full-cache.reload-strategy", strategy, options, CacheReloadTrigger)  # type: ignore[type-abstract]
    if strategy is ReloadStrategy.TIMED:
        assert options.full_cache.iso_time is not None
        return TimedCacheReloadTrigger(options.full_cache.iso_time, options.full_cache.interval_days)
    if options.full_cache.interval_s is None:
        return None
    return PeriodicCacheReloadTrigger(options.full_cache.interval_s, options.full_cache.schedule_mode)


@dataclasses.dataclass(eq=False)
class _Action:
    """A function to run at the Unix time `at_s`. Each action is equal only to itself."""

    at_s: float
    run: Callable[[], object]


@dataclasses.dataclass(eq=False, repr=False)
class Schedule(CacheReloadTrigger.Context):
    """Runs the trigger of one table while this process holds the host's lock for the schedule. It is also the trigger's `Context` (FLIP-221).

    `name`: a hash of the table and the schedule's options; if a table is read with different options, it has several schedules. `url`: that
    of the table, for logs. `make`: returns the trigger. `reload`: starts a reload and returns its future; its argument says whether this is the reload that is due. `last`:
    returns the times of the latest reload by any process. `jitter_s`: the host makes its reloads later by a part of this time, which is
    computed from the names of the host and of the schedule.
    """

    name: str
    url: str
    make: Callable[[], CacheReloadTrigger | None]
    reload: Callable[[bool], concurrent.futures.Future[None]]
    last: Callable[[], LastReload | None]
    blackout: Blackout | None
    jitter_s: float
    disk: Disk
    context: HostContext

    def __post_init__(self) -> None:
        self._mutex = threading.Lock()
        self._timer: Timer | None = None
        self._given_up = threading.Event()  # set after `close`, once the schedule's lock is released
        self._actions: list[_Action] = []
        self._put_off: concurrent.futures.Future[None] | None = None
        self._lease: Lock | None = None
        self.late_s = self.jitter_s * int(key_of(self.context.name, self.name)[:8], 16) / 16**8
        self._wall_ahead_s = 0.0  # wall clock minus steady clock when actions last ran
        self._trigger: CacheReloadTrigger | None = None
        self._running = self._closed = self._broken = self._is_made = self._opened = False

    def ensure(self) -> None:
        """Take part in the schedule from now on: this process runs the trigger whenever no other process of the host does."""
        with self._mutex:
            if self._running or self._closed:
                return
            self._running = True
        self._make_trigger()
        # A custom trigger may be slow: it has a timer of its own, so that no other table waits for it.
        is_builtin = self._trigger is None or isinstance(self._trigger, DueTrigger)
        self._timer = (is_builtin and self.context.timer) or Timer(self.context.start)
        try:
            self._timer.run_soon(self._step)
        except RuntimeError as problem:  # there are too many threads; queries still start overdue reloads
            self._running = False
            if not has_ended():
                _log.warning("this process does not run the reload schedule of %s: %s", self.url, problem)

    def due_s(self, last: LastReload | None, now_s: float) -> float:
        """The Unix time at which the reload after `last` is due; infinity after `close`, and for a custom trigger, whose times are not known."""
        self._make_trigger()
        if self._closed or self._broken or not isinstance(self._trigger, DueTrigger):
            return math.inf
        due_s = self._trigger.due_s(last, now_s)
        if due_s <= now_s and self.blackout is not None:
            free_s = self.blackout.postponed_s(now_s)
            return free_s + self.late_s if free_s > now_s else due_s
        return due_s

    def _take(self) -> bool:
        """Acquire the schedule's lock, unless another process has it. Returns whether this process has the lock."""
        if self._lease is None:
            try:
                self._lease = self.disk.acquire("reload", f"{self.name}-schedule", 0.0)
            except OSError:
                return False
        return self._lease is not None

    def run_due(self) -> float:
        """Run the actions that are due, if this process has the schedule's lock or can get it. Returns the seconds until the next call."""
        if self._broken or not self._take():
            return _POLL_S
        if not self._opened and not self._open():
            self._release()  # in another process the trigger may work
            return _POLL_S
        if self._clock_set_back():
            # The actions' times are now too late by an unknown amount. So all actions run now; they read the clock and plan new times.
            with self._mutex:
                for action in self._actions:
                    action.at_s = -math.inf
        while (due := self._next_due()) is not None:
            if self._timer is not None and not self._timer.has_room():
                with self._mutex:
                    self._actions.append(due)
                return _BUSY_S
            try:
                due.run()
            except Exception as problem:  # raised by a custom trigger: the schedule goes on
                _log.error("reload trigger of %s failed", self.url, exc_info=redact_cause(problem))
        with self._mutex:
            next_s = min((action.at_s for action in self._actions), default=math.inf)
        return min(max(next_s - self.context.clock.wall_s(), 0.0), _POLL_S)

    def _make_trigger(self) -> None:
        with self._mutex:
            if self._is_made:
                return
            self._is_made = True
            try:
                self._trigger = self.make()
                if isinstance(self._trigger, DueTrigger):
                    self._trigger.late_s = self.late_s
            except Exception as problem:
                self._broken = True
                _log.error("reload trigger of %s cannot be created", self.url, exc_info=redact_cause(problem))

    def _open(self) -> bool:
        """Open the trigger. Returns whether it works."""
        self._opened = True
        self._make_trigger()
        try:
            if self._trigger is not None:
                self._trigger.open(self)
        except Exception as problem:
            self._broken = True  # from now on this process leaves the schedule alone, so the error is logged once
            _log.error("reload trigger of %s cannot be opened", self.url, exc_info=redact_cause(problem))
        return not self._broken

    def _clock_set_back(self) -> bool:
        """Whether the wall clock was set back since the last call, by more than gradual corrections do."""
        before, self._wall_ahead_s = self._wall_ahead_s, self.context.clock.wall_s() - self.context.clock.steady_s()
        return self._wall_ahead_s < before - _POLL_S

    def _next_due(self) -> _Action | None:
        with self._mutex:
            first = min(self._actions, key=lambda action: action.at_s, default=None)
            if first is None or first.at_s > self.context.clock.wall_s():
                return None
            self._actions.remove(first)
            return first

    def _step(self) -> float | None:
        """Run the actions that are due. The timer calls this, and calls it again after the returned number of seconds (None: never)."""
        if self._closed:
            self._release()
            self._given_up.set()
            return None
        return self.run_due()

    def _wake(self) -> bool:
        """Ask the timer to call `_step` soon. Returns False if there is no timer that will."""
        timer = self._timer
        if timer is not None and self._running:
            with contextlib.suppress(RuntimeError):
                timer.run_soon(self._step)
                return True
        return False

    def close(self) -> None:
        """Close the trigger and release the schedule's lock."""
        with self._mutex:
            self._closed = True
        try:
            if self._trigger is not None:
                self._trigger.close()
        except Exception as problem:  # raised by a custom trigger: the lock must be released nevertheless
            _log.error("reload trigger of %s cannot be closed", self.url, exc_info=redact_cause(problem))
        if not self._wake():
            self._release()
        elif self._timer is not None and self._timer.can_be_awaited:
            self._given_up.wait(_CLOSE_WAIT_S)  # times out if a trigger blocks the timer

    def _release(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    # --- functions that a trigger calls --------------------------------------------------------------

    def current_processing_time(self) -> float:
        return self.context.clock.wall_s()

    def last_reload(self) -> LastReload | None:
        return self.last()

    def schedule(self, at_s: float, action: Callable[[], object]) -> Callable[[], None]:
        planned = _Action(at_s, action)
        with self._mutex:
            self._actions.append(planned)
        self._wake()

        def cancel() -> None:
            with self._mutex:
                if planned in self._actions:
                    self._actions.remove(planned)

        return cancel

    def trigger_reload(self) -> concurrent.futures.Future[None]:
        """Start a reload now, or when the blackout ends. Returns its future."""
        if self.blackout is not None:
            now_s = self.context.clock.wall_s()
            free_s = self.blackout.postponed_s(now_s)
            if free_s > now_s:
                return self._postpone(free_s + self.late_s)
        future = self.reload(isinstance(self._trigger, DueTrigger))
        if self._timer is not None:
            self._timer.add_work(future)
        return future

    def _postpone(self, at_s: float) -> concurrent.futures.Future[None]:
        """Plan one reload for the end of a blackout, however many reloads become due until then. Returns the future of this reload."""
        if self._put_off is not None:
            return self._put_off
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        self._put_off = future

        def begin() -> None:
            self._put_off = None
            self.trigger_reload().add_done_callback(lambda inner: _copy(inner, future))

        self.schedule(at_s, begin)
        return future


def _copy(inner: concurrent.futures.Future[None], outer: concurrent.futures.Future[None]) -> None:
    problem = concurrent.futures.CancelledError() if inner.cancelled() else inner.exception()
    if problem is not None:
        outer.set_exception(problem)
    else:
        outer.set_result(None)
