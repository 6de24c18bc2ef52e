"""`OverdueReloads`: what a query does about a reload that is due, so that its answer is one interval and one load old at most.

If every process lives for one query only, none may be alive when a reload comes due; and one that is may be stopped. So the
query that finds a reload due begins it, and waits up to `lookup.full-cache.build-wait`. That time counts from the beginning of
the load: a later query waits only for what is left of it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable

from pyspark_lookup.cache.full.load_queue import Jobs
from pyspark_lookup.cache.full.schedule import Schedule
from pyspark_lookup.cache.full.store import State, StoredSnapshots
from pyspark_lookup.errors import UfsError
from pyspark_lookup.options.reload_trigger import LastReload
from pyspark_lookup.storage.context import HostContext

_ON_TIME_S = 0.5  # a live schedule begins a due reload within this time, also on a busy machine


@dataclasses.dataclass(eq=False, repr=False)
class OverdueReloads:
    """Begins and awaits the overdue reloads of one table, for the queries of this process.

    `limit_s`: how long to wait for a reload. `tell`: called with the reason, once per reload, when the wait is given up.
    """

    schedule: Schedule
    jobs: Jobs
    stored: StoredSnapshots
    context: HostContext
    limit_s: float
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        # (state, lead of the wall clock over the steady one, time): after this state nothing is due before this time, unless
        # the lead changes, as the wall clock was set then. And the reload that is awaited, since when on the steady clock.
        self._due: tuple[State | None, float, float] = None, 0.0, math.inf
        self._awaited: tuple[concurrent.futures.Future[None] | None, float] = None, 0.0

    def due_s(self, state: State) -> float:
        """When the reload after a state is due (Unix time); in the past if it is overdue."""
        due_state, ahead_s, until_s = self._due
        now_s = self.context.clock.wall_s()
        ahead_now_s = now_s - self.context.clock.steady_s()
        if due_state is not state or now_s >= until_s or abs(ahead_now_s - ahead_s) > _ON_TIME_S:
            until_s = self.schedule.due_s(self._last(state), now_s)
            self._due = state, ahead_now_s, until_s
        return until_s

    def _last(self, state: State) -> LastReload | None:
        """The latest attempt, with its times corrected if the wall clock was set back since."""
        last, clock = last_reload(state), self.context.clock
        if last is None or state.finished_boot != clock.boot:
            return last
        back_s = clock.steady_s() - state.finished_steady_s - (clock.wall_s() - last.finished_at_s)
        if back_s <= _ON_TIME_S:
            return last
        started_s, first_s = last.started_at_s - back_s, last.first_started_at_s
        return LastReload(
            started_s if first_s == last.started_at_s else first_s, started_s, last.finished_at_s - back_s
        )

    def is_due(self, state: State) -> bool:
        """Whether the reload after a state is due."""
        return self.due_s(state) <= self.context.clock.wall_s()

    def ask(self, state: State) -> concurrent.futures.Future[None]:
        """Start the reload after a state in a thread. Another process's reload counts as well."""
        return self.jobs.ask(None, due=True, seen_s=state.finished_at_s)

    def wait(self, state: State) -> bool:
        """Wait for the reload after a state if it is overdue. Returns whether it was."""
        if not self.is_due(state) or self._is_on_time(state, due_s := self.due_s(state)):
            return False
        future = self.ask(state)
        first = self._awaited[0] is not future
        if first:
            self._awaited = future, self.context.clock.steady_s()
        try:
            future.result(timeout=self._left_s(state, self._awaited[1]))
        except concurrent.futures.TimeoutError:
            if first:
                late_s = self.context.clock.wall_s() - due_s
                self.tell(f"a reload that was due {late_s:.0f} s ago has not ended after {self.limit_s:g} s")
        except Exception as problem:
            # The load's own errors are logged and counted where they are raised. The present snapshot goes on serving.
            if isinstance(problem, OSError) and not isinstance(problem, UfsError):
                self.context.metrics.inc("cacheFailureCount")
        return True

    def _is_on_time(self, state: State, due_s: float) -> bool:
        """Whether the reload that is due is running and began in time: until it ends, the present snapshot is as young as promised.

        A load that takes much longer than the one before may be that of a process which stands still.
        """
        begun_s, now_s = state.loading_since_s, self.context.clock.wall_s()
        last_s = (state.finished_at_s or 0.0) - (state.started_at_s or 0.0)
        if begun_s is not None and self.stored.is_locked():
            return begun_s - due_s <= _ON_TIME_S and 0 <= now_s - begun_s <= max(self.limit_s, 2 * last_s)
        if now_s - due_s < last_s:
            self.ask(state)
            return True
        return False

    def _left_s(self, state: State, since_s: float) -> float:
        """How long to wait on for a load: this process has waited since `since_s`, and another one may have begun it earlier."""
        clock = self.context.clock
        waited_s = clock.steady_s() - since_s
        if state.loading_since_s is not None and self.stored.is_locked():
            waited_s = max(waited_s, clock.wall_s() - state.loading_since_s)
        return max(self.limit_s - waited_s, 0.0)


def last_reload(state: State) -> LastReload | None:
    """How the latest attempt of any process went, as triggers take it."""
    if state.first_started_at_s is None or state.started_at_s is None or state.finished_at_s is None:
        return None
    return LastReload(state.first_started_at_s, state.started_at_s, state.finished_at_s)
