"""`FullCache` finds the snapshot that answers a query, and builds the next one (FLIP-221's full cache). A snapshot has all rows of a version.

In UFS mode, a query asks for the snapshot of the version that it reads. If there is none yet, the query waits a while, and then reads the files.
In CACHE mode, the latest snapshot answers, even if the store has a newer version; a schedule replaces the snapshot from time to time. A query
that finds a reload overdue waits a while for it. In both modes, all rows of an answer are of the version that is reported, and no snapshot is
visible before it is complete.

One process of the host at a time loads a table, under a lock, and reuses the layers of the load before. A query that needs no load takes no
lock.

`FullTables` has the full caches of this process: one for each table and each choice of keys, columns, partitions and schedule.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from tqdm.auto import tqdm

from pyspark_lookup.cache.full.derived import DerivedArrays
from pyspark_lookup.cache.full.loader import (
    DECODED_AT_MOST,
    Layout,
    Progress,
    SnapshotLoader,
    StoredLayer,
    bytes_per_file_byte,
)
from pyspark_lookup.cache.full.schedule import Job, Jobs, Schedule, make_trigger
from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.cache.full.store import Refused, State, StoredSnapshots, StoredVersion
from pyspark_lookup.core.forks import resets_in_child
from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.core.threads import check
from pyspark_lookup.errors import (
    CHANGED_KIND,
    CacheFullError,
    LookupFunctionError,
    ReloadFailedError,
    SourceChangedError,
    UfsError,
    foreign_text,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import CacheMode, OnError, OnReloadFailure
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.reload_trigger import CacheReloadTrigger, LastReload
from pyspark_lookup.scan.table_scan import TableScan
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk, key_of
from pyspark_lookup.storage.host_metrics import Reload, remember_reload
from pyspark_lookup.versions.executions import read_with_restarts
from pyspark_lookup.versions.model import Table, TableVersion, select_partitions
from pyspark_lookup.versions.resolver import CurrentVersions, TableKinds

_progress_log = logging.getLogger("pyspark_lookup.progress")
_BAR_AFTER_S = 1.0
_LINE_EVERY_S = 10.0


class _Bar(tqdm):  # type: ignore[misc]
    """A progress bar of tqdm without tqdm's thread, and with a lock that a forked child replaces.

    The race: a child may be forked while its parent draws a bar. It must not inherit a lock that nobody will release.
    """

    monitor_interval = 0

    @classmethod
    def reset_in_child(cls) -> None:
        cls.set_lock(threading.RLock())


_Bar.reset_in_child()
resets_in_child(_Bar)


@contextlib.contextmanager
def draw_progress(
    label: Callable[[], str], now_s: Callable[[], float], interactive: bool | None = None
) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a `with` block. The block gets a function, which it calls with (bytes done, bytes in total).

    `label`: returns the text in front of the bar or line. `interactive`: draw a bar (None: if somebody watches the output). Otherwise log a line
    every ten seconds, and one at the end if any line was logged. A block of less than a second shows nothing.
    """
    if _is_interactive() if interactive is None else interactive:
        with _Bar(desc=label(), unit="B", unit_scale=True, delay=_BAR_AFTER_S, mininterval=0, leave=False) as bar:

            def draw(done_bytes: int, total_bytes: int) -> None:
                bar.total = total_bytes
                bar.update(done_bytes - bar.n)

            yield draw
        return
    started = logged_s = now_s()
    has_logged = False

    def log(done_bytes: int, total_bytes: int) -> None:
        nonlocal logged_s, has_logged
        if now_s() - logged_s >= _LINE_EVERY_S or (has_logged and done_bytes >= total_bytes):
            logged_s, has_logged = now_s(), True
            _progress_log.info(
                "%s: %d %% of %d bytes after %.0f s",
                label(),
                100 * done_bytes // max(total_bytes, 1),
                total_bytes,
                logged_s - started,
            )

    yield log


def _is_interactive() -> bool:
    """Whether somebody watches the output, because it goes to a terminal or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


_log = logging.getLogger("pyspark_lookup.snapshot")


@dataclasses.dataclass(frozen=True)
class LoadLog:
    """Logs, counts and records the loads of the table at `url`, whose snapshots are stored under `key`."""

    key: str
    url: str
    disk: Disk
    context: HostContext

    def fall_back(self, level: int, reason: str, instead: str = "reading the files") -> None:
        """Log why a query is not answered from the snapshot that it asks for. `instead`: what the query does instead."""
        log_event(_log, level, "fallback", table=self.url, reason=reason, instead=instead)

    def received(self) -> int:
        """How many bytes this process has received from the store so far."""
        return self.context.metrics.snapshot()["ufsGetBytes"]

    def succeeded(self, started_s: float, seconds: float, snapshot: Snapshot, received: int, failures: int) -> None:
        """Record a load that succeeded. `received`: what `received()` returned before the load. `failures`: how many loads failed before it."""
        self.context.metrics.inc("loadCount")
        self.context.metrics.time("loadTime", seconds)
        self.context.metrics.set_gauge("latestLoadTime", int(seconds * 1000))
        version, fetched = snapshot.version.digest, self.received() - received
        reload = Reload(started_s, seconds, version, snapshot.rows, snapshot.bytes, fetched)
        self._remember(reload)
        facts = {"version": reload.version, "seconds": seconds, "rows": reload.rows, "bytes": reload.bytes}
        # A failure was logged as a warning, so the load that ends the failures is logged as one, too.
        level = logging.WARNING if failures else logging.INFO
        log_event(_log, level, "reload", table=self.url, **facts, fetched=fetched, failures_before=failures)

    def failed(
        self, started_s: float, seconds: float, problem: BaseException, version_count: int, failures: int
    ) -> None:
        """Record a load that failed. `version_count`: how many stored versions can still answer. `failures`: how many loads failed before it."""
        self.context.metrics.inc("numLoadFailures")
        level = logging.INFO if failures else logging.WARNING
        log_event(
            _log, level, "reload-failed", table=self.url, seconds=seconds, kept=version_count, error=repr(problem)
        )
        self._remember(Reload(started_s, seconds, error=foreign_text(str(problem))[:500] or type(problem).__name__))

    def refused(self, now_s: float, problem: BaseException, before: bool) -> None:
        """Record a load for which the cache directory has no room. Logs it, unless there was no room for the last load either (`before`)."""
        self.context.metrics.inc("snapshotOverBudgetCount")
        if not before:
            self.fall_back(logging.WARNING, f"there is no room for a snapshot: {problem}")
            self._remember(Reload(now_s, 0.0, error=f"not built: {problem}"[:500]))

    def _remember(self, reload: Reload) -> None:
        with contextlib.suppress(OSError):
            remember_reload(self.disk, self.key, self.url, reload)


# --- reloads that are overdue ---------------------------------------------------------------------

_ON_TIME_S = 0.5  # a running schedule starts a due reload within this time, even on a busy machine


@dataclasses.dataclass(eq=False, repr=False)
class OverdueReloads:
    """Starts the overdue reloads of one table, and lets queries of this process wait for them.

    The race: if each process lives for one query only, no process may be alive when a reload becomes due, and a process that is alive may be
    suspended. So each query that finds that a reload is due asks for it, even if other queries have asked, and waits up to
    `lookup.full-cache.build-wait`. So its answer is at most as old as one interval and one load together. The wait counts from the start of
    the load: a later query waits only for the rest of the time.

    `limit_s`: how long to wait for a reload. `tell`: called with a reason, once for each reload, if the wait ends before the reload.
    """

    schedule: Schedule
    jobs: Jobs
    stored: StoredSnapshots
    context: HostContext
    limit_s: float
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        # `_due` is (state, wall clock minus steady clock, time): the reload after this state is not due before this time, unless the
        # difference changes because the wall clock was set. `_awaited` is (the future of the reload for which queries wait, the time on the
        # steady clock at which the first of these queries began to wait).
        self._due: tuple[State | None, float, float] = None, 0.0, math.inf
        self._awaited: tuple[concurrent.futures.Future[None] | None, float] = None, 0.0

    def due_s(self, state: State) -> float:
        """The Unix time at which the reload after a state is due, which may be in the past."""
        due_state, ahead_s, until_s = self._due
        now_s = self.context.clock.wall_s()
        ahead_now_s = now_s - self.context.clock.steady_s()
        if due_state is not state or now_s >= until_s or abs(ahead_now_s - ahead_s) > _ON_TIME_S:
            until_s = self.schedule.due_s(self._last(state), now_s)
            self._due = state, ahead_now_s, until_s
        return until_s

    def _last(self, state: State) -> LastReload | None:
        """The times of the latest reload, corrected if the wall clock was set back since."""
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
        """Queue the reload that follows `state`. It is skipped if another process reloads the table before it starts."""
        return self.jobs.ask(None, due=True, seen_s=state.finished_at_s)

    def wait(self, state: State) -> bool:
        """Wait for the reload after a state if this reload is overdue. Returns whether it was overdue."""
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
            # The load itself logs and counts its errors. Queries go on using the current snapshot.
            if isinstance(problem, OSError) and not isinstance(problem, UfsError):
                self.context.metrics.inc("cacheFailureCount")
        return True

    def _is_on_time(self, state: State, due_s: float) -> bool:
        """Whether a query need not wait for a due reload, because the reload began in time: until its end, the snapshot is as young as promised.

        If the reload has not begun, and is late by less than the last load took, it is begun here, in the background. A load that takes much
        longer than the load before may be that of a suspended process, and does not count as begun.
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
        """How many seconds are left to wait for a load. The wait counts from `since_s`, or from the start of the load if another process has begun it
        earlier."""
        clock = self.context.clock
        waited_s = clock.steady_s() - since_s
        if state.loading_since_s is not None and self.stored.is_locked():
            waited_s = max(waited_s, clock.wall_s() - state.loading_since_s)
        return max(self.limit_s - waited_s, 0.0)


def last_reload(state: State) -> LastReload | None:
    """The times of the latest load by any process, successful or not, in the form that triggers take; None if there was none."""
    if state.first_started_at_s is None or state.started_at_s is None or state.finished_at_s is None:
        return None
    return LastReload(state.first_started_at_s, state.started_at_s, state.finished_at_s)


# --- the cache ------------------------------------------------------------------------------------

_GIVE_UP_S = 60.0
_TIDY_EVERY_S = 10.0
_DERIVED_WAIT_S = 60.0  # at least: to compute arrays in each process takes longer than to wait for one
_SILENT_S = 600.0  # a load that has made no progress for so long counts as stuck


class IndexBuilder(Protocol):
    """Builds an index of snapshots, and stores it beside each of them (`FullCache.derived`)."""

    def build_index(self, snapshot: Snapshot) -> None: ...


@dataclasses.dataclass(eq=False, repr=False)
class FullCache:
    """The full cache of one table, for one choice of keys, columns and partitions: finds, builds and reloads its snapshots on this host."""

    key: str
    table: Table
    options: LookupOptions
    layout_of: Callable[[TableVersion], Layout]
    kinds: TableKinds
    current_versions: CurrentVersions
    loader: SnapshotLoader
    disk: Disk
    context: HostContext
    trigger: CacheReloadTrigger | None = None

    def __post_init__(self) -> None:
        self._reloads = self.options.full_cache.reloads or self.trigger is not None
        find_version = functools.partial(self.current_versions.find_recorded, self.table)
        self._stored = StoredSnapshots(
            self.key, self.table, self.disk, self.context, self.options.full_cache.retained_s, find_version
        )
        self._load_log = LoadLog(self.key, self._url, self.disk, self.context)
        self._jobs = Jobs(f"lookupcache-load-{self.key[:8]}", self.context.start, self._do)
        self._gave_up_at_s: float | None = None
        self._index_builders: tuple[weakref.ref[IndexBuilder], ...] = ()
        self._tidy_from_s = self._use_from_s = float("-inf")
        # The last snapshot that `find` returned, with the state and the digest by which it was found. The reference is weak, because an unused
        # snapshot must be unmapped to be evicted.
        self._latest: tuple[State, str, weakref.ref[Snapshot]] | None = None
        self.schedule = Schedule(
            key_of(self.key, *self.options.full_cache.schedule),
            self._url,
            lambda: self.trigger or make_trigger(self.options),
            self.ask_reload,
            lambda: last_reload(self._stored.state()),
            self.options.full_cache.blackout,
            self.options.full_cache.jitter_s,
            self.disk,
            self.context,
        )
        tell = functools.partial(self._load_log.fall_back, logging.WARNING, instead="the last snapshot")
        wait_s = self.options.full_cache.build_wait_s
        self._overdue = OverdueReloads(self.schedule, self._jobs, self._stored, self.context, wait_s, tell)

    def find(self, version: TableVersion) -> Snapshot | None:
        """The snapshot of a version if this host has it, otherwise None. Makes no call to the store, and does not wait."""
        latest = self._latest
        if latest is not None and latest[0] is self._stored.recorded.get() and latest[1] == version.digest:
            state, snapshot = latest[0], latest[2]()
        else:
            state, snapshot = None, None
        if state is None or snapshot is None:
            state, snapshot = self._stored.find(lambda state: state.find(version.digest), version)
            if snapshot is not None and state.refused is None:
                self._latest = state, version.digest, weakref.ref(snapshot)
        self._tidy_up(state)
        return snapshot

    @property
    def derived(self) -> DerivedArrays:
        """The arrays that are stored beside the snapshots."""
        wait_s = max(self.options.full_cache.build_wait_s, _DERIVED_WAIT_S)
        return DerivedArrays(self.key, self.disk, self.context, wait_s)

    def add_index_builder(self, builder: IndexBuilder) -> None:
        """From now on, have `builder` build its index of each new snapshot before queries see the snapshot. The cache keeps no reference to it.

        If two threads add at once, one of the builders may be lost. Then the first lookup builds the index, and its builder is added again.
        """
        builders = [builder, *(known for known in (ref() for ref in self._index_builders) if known is not None)]
        self._index_builders = tuple(weakref.ref(each) for each in dict.fromkeys(builders))

    def _build_indexes(self, snapshot: Snapshot) -> None:
        for builder in [ref() for ref in self._index_builders]:
            try:
                if builder is not None:
                    builder.build_index(snapshot)
            except Exception as problem:  # a lookup builds the index, and fails if that fails again
                _log.info(
                    "the index of a snapshot of %s is left to the first lookup: %s",
                    self._url,
                    foreign_text(str(problem)),
                )

    def build(self, version: TableVersion, wait_s: float, exact: bool = False) -> Snapshot | None:
        """The snapshot of a version, which is built if there is none; None if the build takes longer than `wait_s` or fails.

        With `lookup.on-error` = STALE, a build that fails because of the provider gives the latest snapshot, of whatever version. A thread builds
        the snapshot, and goes on after `wait_s`. No snapshot is built of a version that is not `cacheable`, nor while `can_keep` is False. After a compaction
        of the table, returns the snapshot of the version before, which has the same rows. `exact`: return only a snapshot of the same files.
        """
        if self._reloads:
            self.schedule.ensure()
        snapshot = self.find(version)
        if snapshot is not None or not self._choose(version).cacheable or not self.can_keep:
            return snapshot
        future = self._jobs.ask(version)
        equal_snapshot = (
            None if exact or self.options.files.partition is not None else self._stored.find_same_rows(version)
        )
        if equal_snapshot is not None:
            return equal_snapshot
        try:
            future.result(timeout=wait_s)
        except CacheFullError:  # logged and counted where it was raised
            return None
        except concurrent.futures.TimeoutError:
            self._load_log.fall_back(logging.INFO, f"the snapshot is not ready after {wait_s:g} s")
        except Exception as problem:  # logged and counted where it was raised; the files may be readable
            if isinstance(problem, OSError) and not isinstance(problem, UfsError):
                self._give_up()
            self._load_log.fall_back(logging.INFO, f"there is no snapshot: {problem}")
            if self.options.read.on_error is OnError.STALE and isinstance(problem, LookupFunctionError):
                _, latest = self._stored.find(lambda state: state.latest)
                if latest is not None:
                    self.context.metrics.inc("staleServedCount")
                    return latest
        return self.find(version)

    def current(self) -> tuple[TableVersion, Snapshot] | None:
        """(version of the latest snapshot, latest snapshot). Loads the first snapshot if there is none.

        Waits up to `lookup.full-cache.build-wait` for an overdue reload, and for the first load by another process. None if the cache directory
        has no room for the first snapshot or for a newer one, or if another process has not ended the first load in this time. Raises the
        error of the first load, and ReloadFailedError if `lookup.full-cache.on-reload-failure` or `.max-staleness` require it.
        """
        state, snapshot, is_late = self._find_latest()
        if state.gone:  # the last load did not find the table, but the caller has just found it
            self._load_anew(state)
            state, snapshot = self._stored.find(_served)
        if snapshot is None:
            snapshot = self._load_first()
        elif self.options.full_cache.on_reload_failure is OnReloadFailure.FAIL and state.failures:
            self.schedule.ensure()
            raise ReloadFailedError(
                f"the last reload of {self._url} failed, and lookup.full-cache.on-reload-failure = FAIL refuses older answers until a reload succeeds: "
                f"{state.error.rstrip('. ')}. Correct the cause and call reload(), or set lookup.full-cache.on-reload-failure = KEEP to answer from the last snapshot"
            )
        elif self._is_stale(state):
            self.schedule.ensure()
            snapshot = self._renew(state)
        elif is_late and self.options.full_cache.on_reload_failure is OnReloadFailure.FAIL:
            self.schedule.ensure()
            raise ReloadFailedError(
                f"the overdue reload of {self._url} has not ended after lookup.full-cache.build-wait = "
                f"{self.options.full_cache.build_wait_s:g} s: try again later, or set lookup.full-cache.on-reload-failure = KEEP to answer "
                "from the last snapshot"
            )
        elif state.failures or is_late:
            self.context.metrics.inc("staleServedCount")
        self._serve(state)
        return None if snapshot is None else (snapshot.version, snapshot)

    def unchanged(self, version: TableVersion) -> Snapshot | None:
        """The snapshot of a version if `current` would return it without a reload, a wait or an error; otherwise None."""
        state, snapshot = self._stored.find(_served)
        if snapshot is None or snapshot.version.digest != version.digest or state.gone or state.failures:
            return None
        if (self._reloads and self._overdue.is_due(state)) or self._is_stale(state):
            return None
        self._serve(state)
        return snapshot

    def _serve(self, state: State) -> None:
        """Before a snapshot answers a query: set the gauge of its age, take part in the schedule, and remove expired snapshots."""
        self.schedule.ensure()
        self._tidy_up(state)
        self.context.metrics.set_gauge("versionAsOf", int((state.loaded_at_s or self.context.clock.wall_s()) * 1000))

    def latest(self) -> TableVersion | None:
        """The version of the latest snapshot; None if there is none. Makes no call to the store, unless a reload is overdue."""
        state, snapshot, _ = self._find_latest()
        return None if snapshot is None or state.gone else snapshot.version

    def _find_latest(self) -> tuple[State, Snapshot | None, bool]:
        """(the host's state of the table, the latest snapshot, whether the snapshot is late: its reload is overdue and did not end in time)."""
        state, snapshot = self._stored.find(_served)
        if (snapshot is None and state.refused is None) or not self._reloads:
            return state, snapshot, False
        if self._has_given_up:
            return state, snapshot, self._overdue.is_due(state)
        if not self._overdue.wait(state):
            return state, snapshot, False
        after, snapshot = self._stored.find(_served)
        return after, snapshot, after.finished_at_s == state.finished_at_s

    def _load_anew(self, state: State) -> None:
        """Load the store's current version, unless another process has loaded it since `state`, or keeps the lock longer than `build_wait_s`."""
        with self._stored.lock(self.options.full_cache.build_wait_s) as is_locked:
            if is_locked and self._stored.state().finished_at_s == state.finished_at_s:
                self._load(None, None)

    def _give_up(self) -> None:
        """Build nothing for a minute: a cache directory that is full or cannot be mapped will hardly work at the next query."""
        self._gave_up_at_s = self.context.clock.steady_s()

    @property
    def _has_given_up(self) -> bool:
        return self._gave_up_at_s is not None and self.context.clock.steady_s() - self._gave_up_at_s < _GIVE_UP_S

    @property
    def can_keep(self) -> bool:
        """Whether to build a snapshot: False if in the last minute there was no room for one, or the cache directory failed."""
        refused = self._stored.state().refused
        recent = refused is not None and abs(self.context.clock.wall_s() - refused.at_s) < _GIVE_UP_S
        return not recent and not self._has_given_up

    def _load_first(self) -> Snapshot | None:
        if not self.can_keep:
            return None
        failures = self._stored.state().failures
        try:
            with self._stored.lock(self.options.full_cache.build_wait_s) as is_locked:
                if not is_locked:
                    self._give_up()
                    reason = (
                        f"another process has not ended the first load after {self.options.full_cache.build_wait_s:g} s"
                    )
                    self._load_log.fall_back(logging.INFO, reason)
                    return None
                state = self._stored.state()  # the process that had the lock before may have loaded the snapshot
                snapshot = self._stored.open(_served(state))
                # If the load of the process that had the lock before has failed, do not ask the store again.
                if snapshot is None and state.failures > failures:
                    raise ReloadFailedError(f"the first load of {self._url} failed: {state.error}")
                return snapshot or self._load(None, None)
        except CacheFullError:
            return None
        except OSError as problem:
            if isinstance(problem, UfsError):
                raise
            self._give_up()
            self.context.metrics.inc("cacheFailureCount")
            self._load_log.fall_back(logging.WARNING, f"no snapshot can be kept: {problem}")
            return None

    def _is_stale(self, state: State) -> bool:
        limit_s = self.options.full_cache.max_staleness_s
        clock = self.context.clock
        return limit_s is not None and state.age_s(clock.wall_s(), clock.steady_s(), clock.boot) > limit_s

    def _renew(self, state: State) -> Snapshot:
        """A snapshot that is not older than `max_staleness_s`; if need be, this call loads it. Raises ReloadFailedError if there is none.

        The race: many queries may find at the same time that the snapshot is too old. The first one that gets the lock loads. The others then
        find the new snapshot, or that the load has failed, and do not ask the store again.
        """
        with self._stored.lock(self.options.full_cache.build_wait_s) as is_locked:
            after = self._stored.state()
            snapshot = self._stored.open(after.latest)
            if snapshot is not None and not self._is_stale(after):
                return snapshot
            # The race: while this query waited for the lock, the load of another query may have failed. That load has just asked the store,
            # so this query does not ask again.
            why = after.error
            if is_locked and after.failures == state.failures:
                try:
                    return self._load(None, None)
                except Exception as problem:
                    why = foreign_text(str(problem)) or type(problem).__name__
        reason = (
            f"has not ended after lookup.full-cache.build-wait = {self.options.full_cache.build_wait_s:g} s: try again later, or raise "
            "one of these options"
        )
        raise ReloadFailedError(
            f"the snapshot of {self._url} is older than lookup.full-cache.max-staleness = "
            f"{self.options.full_cache.max_staleness_s:g} s, and its reload {f'failed: {why}' if is_locked else reason}"
        )

    # --- loading ----------------------------------------------------------------------------------

    def reload(self) -> Snapshot:
        """Load a snapshot of the store's current version in this thread, and return it.

        Raises the errors of `SnapshotLoader.load`, and ReloadFailedError if another process is loading and makes no progress.
        """
        with self._stored.lock(silent_s=_SILENT_S) as is_locked:
            if not is_locked:
                raise ReloadFailedError(
                    f"{self._url} cannot be loaded: another process on this host holds {self._stored.lock_path} and has made no progress "
                    f"for {_SILENT_S / 60:g} minutes: resume or end that process, then try again"
                )
            return self._load(None, None)

    def ask_reload(self, due: bool = False) -> concurrent.futures.Future[None]:
        """Start a reload in a thread, and return its future; if one is waiting to start, return the future of that one.

        A reload that is running does not count, because it may have asked the store too early. `due`: the schedule asks, because a reload is
        due. Then a running reload counts, also one by another process.
        """
        return self._overdue.ask(self._stored.state()) if due else self._jobs.ask(None)

    def _do(self, job: Job) -> None:
        try:
            with self._stored.lock():
                state = self._stored.state()
                if job.tidy:
                    self._stored.write(state)
                elif job.compact:
                    latest = self._stored.open(state.latest)
                    if latest is not None and latest.is_worth_compacting():
                        self._compact(state, latest)
                elif job.due:
                    # Skip this load if the process that had the lock before has reloaded the table.
                    if state.finished_at_s == job.seen_s or self._overdue.is_due(state):
                        self._load(None, False)
                elif job.version is None or self._stored.open(state.find(job.version.digest)) is None:
                    self._load(job.version, False)
        except Exception as problem:
            if (job.tidy or job.compact) and not isinstance(problem, CacheFullError):  # nobody waits for this job
                what = "compacting the latest snapshot" if job.compact else "removing old snapshots"
                _log.warning("%s of %s failed and will be tried again: %s", what, self._url, problem)
            raise

    def _load(self, version: TableVersion | None, watched: bool | None) -> Snapshot:
        """Load a version (None: the store's current version), record it as the latest, and return its snapshot. The caller holds the lock.

        `watched`: draw a progress bar (None: if somebody watches the output).
        """
        state, clock = self._stored.state(), self.context.clock
        started_s, steady_s = clock.wall_s(), clock.steady_s()
        received = self._load_log.received()
        with contextlib.suppress(OSError):
            self._stored.record(dataclasses.replace(state, loading_since_s=started_s))
        first_s = started_s if state.first_started_at_s is None else state.first_started_at_s
        state = dataclasses.replace(state, first_started_at_s=first_s, started_at_s=started_s, loading_since_s=None)
        try:
            with draw_progress(lambda: f"loading {self._url}", clock.steady_s, watched) as report:

                def tell(done_bytes: int, total: int) -> None:
                    self._stored.show_progress()
                    report(done_bytes, total)

                self._stored.show_progress()
                snapshot, stored = self._make(state, version, tell)
                self._build_indexes(snapshot)
        except CacheFullError as problem:
            self._refuse(state, problem)
            raise
        except BaseException as problem:
            check()  # raises if the process is ending: such a load has not failed, and the next process repeats it
            took_s, version_count = clock.steady_s() - steady_s, len(state.versions)
            self._load_log.failed(started_s, took_s, problem, version_count, state.failures)
            is_gone = isinstance(problem, CHANGED_KIND) and self.kinds.forget_kind(self.table)
            failures, error = state.failures + 1, foreign_text(str(problem) or type(problem).__name__)[:500]
            self._leave(dataclasses.replace(state, failures=failures, error=error, gone=is_gone))
            raise
        seconds, failures, latest = clock.steady_s() - steady_s, state.failures, state.latest
        # Layers are compared, too: if the layers of a version were damaged, the same version was loaded again, with other layers.
        if version is None or latest is None or (latest.digest, latest.layers) != (stored.digest, stored.layers):
            state = state.with_version(stored, clock.wall_s())
        state = dataclasses.replace(
            state.ended(clock),
            loaded_at_s=started_s,
            loaded_steady_s=steady_s,
            boot=clock.boot,
            failures=0,
            error="",
            gone=False,
            refused=None,
        )
        self._record(state)
        self._load_log.succeeded(started_s, seconds, snapshot, received, failures)
        if snapshot.is_worth_compacting():
            self._jobs.ask(None, compact=True)
        return snapshot

    def _refuse(self, state: State, problem: CacheFullError) -> None:
        """Record, for all processes of the host, that the cache directory's budget has no room for the table. Logs this once."""
        now_s = self.context.clock.wall_s()
        self._load_log.refused(now_s, problem, state.refused is not None)
        refused = Refused(now_s, str(problem)[:500], problem.wanted, problem.of_bytes)
        self._leave(dataclasses.replace(state, refused=refused))

    def _leave(self, state: State) -> None:
        """Record a load that failed, and remove the files that the load has written."""
        with contextlib.suppress(OSError):
            self._record(state.ended(self.context.clock))

    def _record(self, state: State) -> None:
        """Record a state. If this fails, raise OSError, and build nothing for a minute, so that not every query tries again."""
        try:
            self._stored.write(state)
        except OSError:
            self._give_up()
            raise

    def refusal(self, version: TableVersion) -> str | None:
        """The reason why this host has no room for a snapshot of a version; None if the host has the snapshot, or seems to have room for it."""
        state, selected_version = self._stored.state(), self._choose(version)
        if state.refused is not None:
            return state.refused.reason
        if (
            state.find(version.digest) is not None
            or self.disk.lacks("segments", selected_version.bytes * DECODED_AT_MOST) <= 0
        ):
            return None
        try:
            self.disk.check_room(
                self.loader.estimate(selected_version, self.layout_of(version), max(selected_version.bytes, 1), None)
            )
        except CacheFullError as problem:
            return str(problem)
        return None

    def _make(self, state: State, version: TableVersion | None, report: Progress) -> tuple[Snapshot, StoredVersion]:
        """(the snapshot of a version, its entry in the table's state). `version`: None for the store's current version.

        The snapshot is built from the latest snapshot and the files that have changed since.
        """

        def load(version: TableVersion) -> tuple[Snapshot, StoredVersion]:
            selected_version, stored_version = self._choose(version), state.find(version.digest)
            unchanged = self._stored.open(stored_version, version)
            if unchanged is not None and stored_version is not None and selected_version.cacheable:
                # The table may not change for months, and unused records are evicted.
                self._stored.keep_version(unchanged)
                return unchanged, stored_version
            # Unmap all older snapshots, so that they can be evicted if room is needed.
            self._stored.forget(state.latest)
            # None if the record of that version was evicted although its layers were not.
            last_version = None if state.latest is None else self._stored.version(state.latest)
            last = self._stored.map_compatible(state.latest, last_version, version)
            stored = state.latest.layers if state.latest is not None else ()
            # The whole version decides on the types of columns, even if the snapshot has only some of its partitions.
            layout = self.layout_of(version)
            share = None if state.refused is None else state.refused.wanted / state.refused.of_bytes
            layers: tuple[StoredLayer, ...] | None = None
            try:
                layers = self._load_changes(
                    state, selected_version, layout, last, last_version, report
                ) or self.loader.load(
                    selected_version,
                    layout,
                    last,
                    stored,
                    self._choose(last_version) if last_version else None,
                    report,
                    share,
                )
            except CacheFullError:
                if last is None:
                    raise
                share = bytes_per_file_byte(last)
            if layers is None:  # unmap the current snapshot, so that it can be evicted, unless a query is reading it
                unchanged = last = None
                self._stored.forget()
                layers = self.loader.load(selected_version, layout, None, (), None, report, share)
            self.context.metrics.inc("snapshotBuildCount")
            return self._stored.add(version, layers)

        def resolve() -> TableVersion:
            """The store's current version, after a wait until its files are so old that a later change gives them another identity."""
            current = self.current_versions.ask(self.table, patient=state.latest is None)
            return self.current_versions.settle(self.table, current)

        def renew(gone_version: TableVersion, change: SourceChangedError) -> TableVersion:
            if version is not None:
                raise change
            return resolve()

        first = resolve() if version is None else version
        return read_with_restarts(self.table, first, load, renew)[0]

    def _load_changes(
        self,
        state: State,
        version: TableVersion,
        layout: Layout,
        last: Snapshot | None,
        last_version: TableVersion | None,
        report: Progress,
    ) -> tuple[StoredLayer, ...] | None:
        """The layers of a version, made from the latest ones and the rows of the keys that have changed; None if the table must be read as a whole.

        If the version was loaded some time before the latest one, the table was set back. Then rows may be older than those of both, and
        nobody can be asked for the changes. `last_version`: the version of `last`; None: not known.
        """
        if last is None or state.latest is None or last_version is None:
            return None
        if not self.loader.scan.tells_changes or version.digest in state.known:
            return None
        return self.loader.load_changes(version, layout, last, state.latest.layers, last_version, report)

    def _choose(self, version: TableVersion) -> TableVersion:
        """The version with only the files that `lookup.partition` selects."""
        if self.options.files.partition is None:
            return version
        return version.of_files(select_partitions(self.table, version, self.options))

    def _compact(self, state: State, latest: Snapshot) -> None:
        """Replace the layers of the latest snapshot by one base. Reads nothing from the store."""
        assert state.latest is not None
        version, selected_version = latest.version, self._choose(latest.version)
        if not selected_version.cacheable:
            return
        layout = self.layout_of(version)
        if self.loader.scan.tells_changes:
            layers = self.loader.merge_layers(version, layout, latest)
        else:
            stored_layers = state.latest.layers
            layers = self.loader.load(
                selected_version,
                layout,
                latest,
                stored_layers,
                selected_version,
                lambda done, total: None,
                compact=True,
            )
        snapshot, stored = self._stored.add(version, layers)
        self._build_indexes(snapshot)
        self._stored.write(state.with_version(dataclasses.replace(stored, digest=state.latest.digest), 0.0))
        self.context.metrics.inc("snapshotCompactionCount")

    def _tidy_up(self, state: State) -> None:
        """Record that the snapshots are in use, and remove expired ones in a thread, each at most every 10 seconds. A segment that is in use stays
        until a later call."""
        now_s = self.context.clock.steady_s()
        if now_s >= self._use_from_s:
            self._use_from_s = now_s + _TIDY_EVERY_S
            self.disk.use_table(self.key)
        if now_s < self._tidy_from_s or not (state.left or len(state.versions) > 1):
            return
        if state.left or self._stored.find_expired(state):
            self._tidy_from_s = now_s + _TIDY_EVERY_S
            self._jobs.ask(None, tidy=True)

    @property
    def _url(self) -> str:
        return redact("path", self.table.url)

    def close(self) -> None:
        """Leave the schedule, and unmap all snapshots. A load that is running goes on to its end."""
        self._jobs.close()
        self.schedule.close()
        self._stored.forget()


def _served(state: State) -> StoredVersion | None:
    """The stored version that answers queries in CACHE mode; None if there is none, or if the host had no room for a newer one."""
    return state.latest if state.refused is None else None


@dataclasses.dataclass(eq=False, repr=False)
class FullTables:
    """The full caches of this process. `trigger`: replaces the reload schedule of the options."""

    scan: TableScan
    kinds: TableKinds
    current_versions: CurrentVersions
    layout_of: Callable[[Table, LookupOptions, TableVersion], Layout]
    context: HostContext
    trigger: CacheReloadTrigger | None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._caches: dict[tuple[object, ...], FullCache] = {}
        self._users: dict[FullCache, weakref.WeakSet[object]] = {}
        self._latest: tuple[Table, LookupOptions, FullCache] | None = None  # the last result of `get_cache`
        # The object that owns these caches: a running schedule keeps it alive by this reference.
        self.owner: object = None

    def get_cache(self, table: Table, options: LookupOptions) -> FullCache | None:
        """The full cache of a table for these options; None if they ask for another cache, or there is no cache directory."""
        if options.cache.mode is not CacheMode.FULL or self.context.disk is None:
            return None
        latest = self._latest
        if latest is not None and latest[0] is table and latest[1] is options:
            return latest[2]
        # The predicate is a part of the key, because a cache has the columns that it needs in addition to those of `lookup.columns`.
        columns = None if options.read.columns is None else (options.read.columns, options.read.where)
        # The format is, too: read as another one, the same files have other rows.
        key_parts = (
            table.id,
            table.format,
            options.files.keys,
            columns,
            options.files.partition,
            options.version.source.value,
        )
        place = (key_parts, options.full_cache)
        with self._lock:
            if place not in self._caches:
                key = key_of(*key_parts)
                self._caches[place] = FullCache(
                    key,
                    table,
                    options,
                    functools.partial(self._lay_out, table, options),
                    self.kinds,
                    self.current_versions,
                    SnapshotLoader(
                        self.scan,
                        self.context.disk,
                        self.context.rng,
                        table,
                        key,
                        options.full_cache.build_memory_bytes,
                    ),
                    self.context.disk,
                    self.context,
                    self.trigger,
                )
            cache = self._caches[place]
            self._latest = table, options, cache
            return cache

    def _lay_out(self, table: Table, options: LookupOptions, version: TableVersion) -> Layout:
        return self.layout_of(table, options, version)

    def hold(self, table: Table, options: LookupOptions, user: object) -> None:
        """Keep the cache of a table, and so its schedule, until `user` calls `let_go` or is garbage-collected."""
        full = self.get_cache(table, options)
        if full is not None:
            self._users.setdefault(full, weakref.WeakSet()).add(user)

    def let_go(self, table: Table, options: LookupOptions, user: object) -> None:
        """Stop keeping the cache that `hold` keeps for `user`. If no other user holds it, close it. Files on disk stay."""
        full = self.get_cache(table, options)
        users = self._users.get(full) if full is not None else None
        if full is None or users is None:
            return
        users.discard(user)
        if not users:
            with self._lock:
                del self._users[full]
                self._caches = {place: cache for place, cache in self._caches.items() if cache is not full}
                self._latest = None
            full.close()
