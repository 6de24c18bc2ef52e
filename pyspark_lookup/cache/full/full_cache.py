"""`FullCache`: which snapshot answers, and how the next one comes to be (FLIP-221's full cache).

UFS: a query asks for the version it has resolved; if that is not built, it waits a while and then
reads the files themselves. CACHE: the latest snapshot answers, whatever the store has by now, and the
schedule replaces it from time to time; a query that finds that overdue waits a while for it. In neither
mode does a row come from another version than the one that is said, and in neither is a snapshot seen
before it is complete.

Loads of a table are made by one process of the host at a time, under a lock, each on top of what the
one before left. A query that needs no load takes no lock.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable

from pyspark_lookup.base import progress
from pyspark_lookup.base.errors import (
    CacheFullError,
    ReloadFailedError,
    SourceChangedError,
    UfsError,
    UfsNotFoundError,
    foreign_text,
)
from pyspark_lookup.base.threads import check
from pyspark_lookup.cache.full.load_log import LoadLog
from pyspark_lookup.cache.full.load_queue import Job, Jobs
from pyspark_lookup.cache.full.loader import (
    DECODED_AT_MOST,
    Layout,
    Progress,
    SnapshotLoader,
    StoredLayer,
    share_of,
)
from pyspark_lookup.cache.full.overdue import OverdueReloads, last_reload
from pyspark_lookup.cache.full.schedule import Schedule, trigger_of
from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.cache.full.store import Refused, State, StoredSnapshots, StoredVersion
from pyspark_lookup.io.context import HostContext
from pyspark_lookup.io.disk import Disk, key_of
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import OnReloadFailure
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.reload_trigger import CacheReloadTrigger
from pyspark_lookup.table.model import Table, TableVersion
from pyspark_lookup.table.partitions import select_partitions
from pyspark_lookup.table.resolver import Resolver
from pyspark_lookup.table.restarts import read_with_restarts

_log = logging.getLogger("pyspark_lookup.snapshot")
_GIVE_UP_S = 60.0
_TIDY_EVERY_S = 10.0
_SILENT_S = 600.0  # a load without progress for so long counts as stuck


@dataclasses.dataclass(eq=False, repr=False)
class FullCache:
    """Snapshots of one table (its keys, columns and partitions) on this host, as this process sees them."""

    key: str
    table: Table
    options: LookupOptions
    layout_of: Callable[[TableVersion], Layout]
    resolver: Resolver
    loader: SnapshotLoader
    disk: Disk
    context: HostContext
    trigger: CacheReloadTrigger | None = None

    def __post_init__(self) -> None:
        self._reloads = self.options.reloads or self.trigger is not None
        known = functools.partial(self.resolver.find_recorded, self.table)
        self._stored = StoredSnapshots(self.key, self.table, self.disk, self.context, self.options.retained_s, known)
        self._told = LoadLog(self.key, self._url, self.disk, self.context)
        self._jobs = Jobs(f"lookupcache-load-{self.key[:8]}", self.context.start, self._do)
        self._gave_up_at_s: float | None = None
        self._tidy_from_s = float("-inf")
        self.schedule = Schedule(
            key_of(self.key, *self.options.schedule),
            lambda: self.trigger or trigger_of(self.options),
            self.ask_reload,
            lambda: last_reload(self._stored.state()),
            self.options.blackout,
            self.disk,
            self.context,
        )
        tell = functools.partial(self._told.fall_back, logging.WARNING, instead="the last snapshot")
        wait_s = self.options.build_wait_s
        self._overdue = OverdueReloads(self.schedule, self._jobs, self._stored, self.context, wait_s, tell)

    def find(self, version: TableVersion) -> Snapshot | None:
        """The snapshot of a version if it is on this host. No store call, no waiting."""
        state, snapshot = self._stored.find(lambda state: state.find(version.digest), version)
        self._tidy_up(state)
        return snapshot

    def build(self, version: TableVersion, wait_s: float, exact: bool = False) -> Snapshot | None:
        """The snapshot of a version, built if it is not there; None if that takes longer than `wait_s` or fails.

        The building goes on beside the caller. A version that cannot be told from another is not built. After a compaction the
        answer is the snapshot of before, which has the same rows, unless it has to be of the same files (`exact`).
        """
        if self._reloads:
            self.schedule.ensure()
        found = self.find(version)
        if found is not None or not self._choose(version).cacheable or not self.can_keep:
            return found
        done = self._jobs.ask(version)
        same = None if exact or self.options.partition is not None else self._stored.find_same_rows(version)
        if same is not None:
            return same
        try:
            done.result(timeout=wait_s)
        except CacheFullError:  # said and counted where it was found
            return None
        except concurrent.futures.TimeoutError:
            self._told.fall_back(logging.INFO, f"the snapshot is not ready after {wait_s:g} s")
        except Exception as problem:  # said and counted where it happened; the files may be readable
            if isinstance(problem, OSError) and not isinstance(problem, UfsError):
                self._give_up()
            self._told.fall_back(logging.INFO, f"there is no snapshot: {problem}")
        return self.find(version)

    def current(self) -> tuple[TableVersion, Snapshot] | None:
        """The latest snapshot and its version; without one it is loaded, and a load of others, or one that is overdue, waited for a while.

        None if the cache directory cannot hold it, or one that is newer, or others go on loading. Raises what the first load raised, and
        ReloadFailedError where `lookup.full-cache.on-reload-failure` or `.max-staleness` say so.
        """
        state, snapshot, late = self._find_latest()
        if state.gone:  # as the last load found it; whoever asks has just found it to be there again
            self._load_after(state)
            state, snapshot = self._stored.find(_served)
        if snapshot is None:
            snapshot = self._load_first()
        elif self.options.on_reload_failure is OnReloadFailure.FAIL and state.failures:
            self.schedule.ensure()
            raise ReloadFailedError(f"the last reload of {self._url} failed: {state.error}")
        elif self._is_stale(state):
            self.schedule.ensure()
            snapshot = self._renew(state)
        elif late and self.options.on_reload_failure is OnReloadFailure.FAIL:
            self.schedule.ensure()
            raise ReloadFailedError(
                f"the reload of {self._url} that is due has not ended after lookup.full-cache.build-wait = "
                f"{self.options.build_wait_s:g} s"
            )
        elif state.failures or late:
            self.context.metrics.inc("staleServedCount")
        self._serve(state)
        return None if snapshot is None else (snapshot.version, snapshot)

    def unchanged(self, version: TableVersion) -> Snapshot | None:
        """The snapshot of a version, if `current` would answer with it and has nothing to say of it but how old it is."""
        state, snapshot = self._stored.find(_served)
        if snapshot is None or snapshot.version.digest != version.digest or state.gone or state.failures:
            return None
        if (self._reloads and self._overdue.is_due(state)) or self._is_stale(state):
            return None
        self._serve(state)
        return snapshot

    def _serve(self, state: State) -> None:
        """Say how old what is answered from is, and see to what follows it."""
        self.schedule.ensure()
        self._tidy_up(state)
        self.context.metrics.set_gauge("versionAsOf", int((state.loaded_at_s or self.context.clock.wall_s()) * 1000))

    def latest(self) -> TableVersion | None:
        """The version of the latest snapshot; None without one. No store call, unless a reload is overdue."""
        state, snapshot, _ = self._find_latest()
        return None if snapshot is None or state.gone else snapshot.version

    def _find_latest(self) -> tuple[State, Snapshot | None, bool]:
        """What this host has last; and whether that is older than its schedule promises, for a reload is overdue and has not ended."""
        state, snapshot = self._stored.find(_served)
        if (snapshot is None and state.refused is None) or not self._reloads:
            return state, snapshot, False
        if self._has_given_up:
            return state, snapshot, self._overdue.is_due(state)
        if not self._overdue.wait(state):
            return state, snapshot, False
        after, snapshot = self._stored.find(_served)
        return after, snapshot, after.finished_at_s == state.finished_at_s

    def _load_after(self, state: State) -> None:
        """Load what the store has, unless somebody else has since, or does so for long."""
        with self._stored.lock(self.options.build_wait_s) as held:
            if held and self._stored.state().finished_at_s == state.finished_at_s:
                self._load(None, None)

    def _give_up(self) -> None:
        """Build nothing for a while: a directory that is full or cannot be mapped will not be better at the next query."""
        self._gave_up_at_s = self.context.clock.steady_s()

    @property
    def _has_given_up(self) -> bool:
        return self._gave_up_at_s is not None and self.context.clock.steady_s() - self._gave_up_at_s < _GIVE_UP_S

    @property
    def can_keep(self) -> bool:
        """Whether a snapshot can be kept here, as far as is known."""
        refused = self._stored.state().refused
        recent = refused is not None and abs(self.context.clock.wall_s() - refused.at_s) < _GIVE_UP_S
        return not recent and not self._has_given_up

    def _load_first(self) -> Snapshot | None:
        if not self.can_keep:
            return None
        failures = self._stored.state().failures
        try:
            with self._stored.lock(self.options.build_wait_s) as held:
                if not held:
                    self._give_up()
                    late = f"another process has not ended the first load after {self.options.build_wait_s:g} s"
                    self._told.fall_back(logging.INFO, late)
                    return None
                state = self._stored.state()  # whoever held the lock before may have made it
                snapshot = self._stored.open(_served(state))
                if snapshot is None and state.failures > failures:  # or has asked the store on our behalf
                    raise ReloadFailedError(f"the first load of {self._url} failed: {state.error}")
                return snapshot or self._load(None, None)
        except CacheFullError:
            return None
        except OSError as problem:
            if isinstance(problem, UfsError):
                raise
            self._give_up()
            self.context.metrics.inc("cacheFailureCount")
            self._told.fall_back(logging.WARNING, f"no snapshot can be kept: {problem}")
            return None

    def _is_stale(self, state: State) -> bool:
        limit_s = self.options.max_staleness_s
        clock = self.context.clock
        return limit_s is not None and state.age_s(clock.wall_s(), clock.steady_s(), clock.boot) > limit_s

    def _renew(self, state: State) -> Snapshot:
        """A snapshot in place of one that may not be served any more; whoever comes first loads it."""
        with self._stored.lock(self.options.build_wait_s) as held:
            after = self._stored.state()
            snapshot = self._stored.open(after.latest)
            if snapshot is not None and not self._is_stale(after):
                return snapshot
            # One that failed while we waited for the lock has asked the store on our behalf.
            if held and after.failures == state.failures:
                with contextlib.suppress(Exception):
                    return self._load(None, None)
                after = self._stored.state()
        late = f"has not ended after lookup.full-cache.build-wait = {self.options.build_wait_s:g} s"
        raise ReloadFailedError(
            f"the snapshot of {self._url} is older than lookup.full-cache.max-staleness = "
            f"{self.options.max_staleness_s:g} s, and its reload {f'failed: {after.error}' if held else late}"
        )

    # --- loading ----------------------------------------------------------------------------------

    def reload(self) -> Snapshot:
        """A snapshot of the store's current version, now, in this thread. Raises what the load raises.

        Raises ReloadFailedError if another process is loading and makes no progress.
        """
        with self._stored.lock(silent_s=_SILENT_S) as is_locked:
            if not is_locked:
                raise ReloadFailedError(
                    f"{self._url} cannot be loaded: another process on this host holds {self._stored.lock_path} and has made no progress "
                    f"for {_SILENT_S / 60:g} minutes: resume or end that process, then try again"
                )
            return self._load(None, None)

    def ask_reload(self, due: bool = False) -> concurrent.futures.Future[None]:
        """A reload beside the caller; one that waits already will do, one that runs may have asked the store before.

        `due`: the one that the schedule wants, whoever makes it.
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
                    # Whoever held the lock before may have made it.
                    if state.finished_at_s == job.seen_s or self._overdue.is_due(state):
                        self._load(None, False)
                elif job.version is None or self._stored.open(state.find(job.version.digest)) is None:
                    self._load(job.version, False)
        except Exception as problem:
            if (job.tidy or job.compact) and not isinstance(problem, CacheFullError):  # nobody waits for it
                _log.warning("tidying the snapshots of %s failed: %s", self._url, problem)
            raise

    def _load(self, version: TableVersion | None, watched: bool | None) -> Snapshot:
        """Load a version, the store's current one if None, and make it the latest. The lock is held.

        `watched`: whether somebody waits for it at a terminal (None: found out).
        """
        state, clock = self._stored.state(), self.context.clock
        started_s, steady_s = clock.wall_s(), clock.steady_s()
        received = self._told.received()
        with contextlib.suppress(OSError):
            self._stored.record(dataclasses.replace(state, loading_since_s=started_s))
        first_s = started_s if state.first_started_at_s is None else state.first_started_at_s
        state = dataclasses.replace(state, first_started_at_s=first_s, started_at_s=started_s, loading_since_s=None)
        try:
            with progress.show(f"loading {self._url}", clock.steady_s, watched) as report:

                def tell(done: int, total: int) -> None:
                    self._stored.show_progress()
                    report(done, total)

                self._stored.show_progress()
                snapshot, stored = self._make(state, version, tell)
        except CacheFullError as problem:
            self._refuse(state, problem)
            raise
        except BaseException as problem:
            check()  # a load that the end of the process ends has not failed: the next process makes it
            took_s, kept = clock.steady_s() - steady_s, len(state.versions)
            self._told.failed(started_s, took_s, problem, kept, state.failures)
            gone = isinstance(problem, UfsNotFoundError) and self.resolver.forget_kind(self.table)
            failures, error = state.failures + 1, foreign_text(str(problem))[:500]
            self._leave(dataclasses.replace(state, failures=failures, error=error, gone=gone))
            raise
        seconds, failures, held = clock.steady_s() - steady_s, state.failures, state.latest
        # One whose layers were damaged has the digest of that which takes its place.
        if version is None or held is None or (held.digest, held.layers) != (stored.digest, stored.layers):
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
        self._stored.keep_version(snapshot)
        self._told.done(started_s, seconds, snapshot, received, failures)
        if snapshot.is_worth_compacting():
            self._jobs.ask(None, compact=True)
        return snapshot

    def _refuse(self, state: State, problem: CacheFullError) -> None:
        """Remember that the budget has no room for the table, for all processes of the host; said once."""
        now_s = self.context.clock.wall_s()
        self._told.refused(now_s, problem, state.refused is not None)
        refused = Refused(now_s, str(problem)[:500], problem.wanted, problem.of_bytes)
        self._leave(dataclasses.replace(state, refused=refused))

    def _leave(self, state: State) -> None:
        """Record how a load went that came to nothing, and remove what it has written."""
        with contextlib.suppress(OSError):
            self._record(state.ended(self.context.clock))

    def _record(self, state: State) -> None:
        """Put a state on record. OSError if it cannot be: nobody will know, and not every query is to try again."""
        try:
            self._stored.write(state)
        except OSError:
            self._give_up()
            raise

    def refusal(self, version: TableVersion) -> str | None:
        """Why this host would keep no snapshot of a version, for want of room; None if it has one, or room as far as can be told."""
        state, chosen = self._stored.state(), self._choose(version)
        if state.refused is not None:
            return state.refused.reason
        if state.find(version.digest) is not None or self.disk.lacks("segments", chosen.bytes * DECODED_AT_MOST) <= 0:
            return None
        try:
            self.disk.check_room(self.loader.estimate(chosen, self.layout_of(version), max(chosen.bytes, 1), None))
        except CacheFullError as problem:
            return str(problem)
        return None

    def _make(self, state: State, version: TableVersion | None, report: Progress) -> tuple[Snapshot, StoredVersion]:
        """A version's snapshot, of which only what changed is fetched."""

        def load(version: TableVersion) -> tuple[Snapshot, StoredVersion]:
            chosen, known = self._choose(version), state.find(version.digest)
            unchanged = self._stored.open(known, version)
            if unchanged is not None and known is not None and chosen.cacheable:
                return unchanged, known
            self._stored.forget(state.latest)  # what is superseded may be needed as room
            last = self._stored.map_for(state.latest, version)
            stored = state.latest.layers if state.latest is not None else ()
            # The types of columns are those of the whole version, whatever is kept of it.
            layout = self.layout_of(version)
            share = None if state.refused is None else state.refused.wanted / state.refused.of_bytes
            layers: tuple[StoredLayer, ...] | None = None
            try:
                layers = self.loader.load(chosen, layout, last, stored, report, share)
            except CacheFullError:
                if last is None:
                    raise
                share = share_of(last)
            if layers is None:  # the snapshot there is makes room, if nobody reads it
                unchanged = last = None
                self._stored.forget()
                layers = self.loader.load(chosen, layout, None, (), report, share)
            self.context.metrics.inc("snapshotBuildCount")
            return self._stored.add(version, layers)

        def resolve() -> TableVersion:
            """The store's current version, with its files old enough to be told from their next state."""
            found = self.resolver.ask(self.table, patient=state.latest is None)
            return self.resolver.settle(self.table, found)

        def renew(gone: TableVersion, change: SourceChangedError) -> TableVersion:
            if version is not None:
                raise change
            return resolve()

        first = resolve() if version is None else version
        return read_with_restarts(self.table, first, load, renew)[0]

    def _choose(self, version: TableVersion) -> TableVersion:
        """What `lookup.partition` leaves of a version."""
        if self.options.partition is None:
            return version
        return version.of_files(select_partitions(self.table, version, self.options))

    def _compact(self, state: State, latest: Snapshot) -> None:
        """One base in place of the latest version's layers; nothing is fetched."""
        assert state.latest is not None
        version, chosen = latest.version, self._choose(latest.version)
        if not chosen.cacheable:
            return
        layout = self.layout_of(version)
        layers = self.loader.load(chosen, layout, latest, state.latest.layers, lambda done, total: None, compact=True)
        _, stored = self._stored.add(version, layers)
        self._stored.write(state.with_version(dataclasses.replace(stored, digest=state.latest.digest), 0.0))
        self.context.metrics.inc("snapshotCompactionCount")

    def _tidy_up(self, state: State) -> None:
        """Have what is past its time removed, beside the caller; now and then, for somebody may be using it."""
        now_s = self.context.clock.steady_s()
        if now_s < self._tidy_from_s:
            return
        if state.left or self._stored.find_expired(state):
            self._tidy_from_s = now_s + _TIDY_EVERY_S
            self._jobs.ask(None, tidy=True)

    @property
    def _url(self) -> str:
        return redact("path", self.table.url)

    def close(self) -> None:
        """Stop taking part in the schedule and forget open snapshots; a load under way ends by itself."""
        self._jobs.close()
        self.schedule.close()
        self._stored.forget()


def _served(state: State) -> StoredVersion | None:
    """The version that queries in CACHE mode read: not one in whose place there was no room for a newer one."""
    return state.latest if state.refused is None else None
