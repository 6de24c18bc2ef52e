"""Options of a host: its caches (FLIP-221), and its connections to stores."""

from __future__ import annotations

import dataclasses
import datetime
import os
import tempfile
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from pyspark_lookup.errors import OptionError
from pyspark_lookup.options.enums import CacheMode, OnReloadFailure, ReloadStrategy
from pyspark_lookup.options.parsing import (
    BOOLEAN,
    COUNT,
    DURATION,
    LONG,
    MIB,
    MOST,
    POSITIVE_DURATION,
    Kind,
    choice,
    option,
    parse_reload_strategy,
    parse_text,
    size,
    whole_number,
)
from pyspark_lookup.options.reload_trigger import Blackout, ScheduleMode, parse_blackout, parse_iso_time

PARTIAL = "lookup.partial-cache."
FULL = "lookup.full-cache."
_DAYS = Kind("integer", whole_number(1, 99_999, "a whole number of days, at least 1 day and at most 99999"))


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """What a host caches of the table, and where."""

    # fmt: off
    mode: CacheMode = option(
        "lookup.cache", choice(CacheMode), CacheMode.NONE,
        doc="What a host caches (FLIP-221). NONE: blocks of the files. PARTIAL: also the rows of the keys that were "
            "looked up. FULL: all rows, decoded and indexed, on local disk.",
    )
    path: str | None = option(
        "lookup.cache.dir", Kind("path", parse_text), None, default_text="`lookupcache-<uid>` in the system's temporary directory",
        doc="Directory of this host's cache, mode 0700, on a local disk.",
    )
    max_bytes: int | None = option(
        "lookup.cache.max-bytes", size(MIB, MOST), None, default_text="a quarter of its disk, or half of the free space if that is less",
        doc="Budget for everything in the cache directory: blocks, snapshots, rows by key, records.",
    )
    # fmt: on

    def directory(self) -> Path:
        """The path of this host's cache. Nothing is created here."""
        if self.path is not None:
            return Path(self.path).expanduser().absolute()
        return Path(tempfile.gettempdir()) / f"lookupcache-{os.getuid()}"


@dataclasses.dataclass(frozen=True)
class StorageOptions:
    """How a host connects to the store. `parameters`: keyword arguments of the fsspec filesystem."""

    # fmt: off
    max_retries: int = option(
        "lookup.max-retries", COUNT, 3,
        doc="How often a call is repeated after a transient error of the store (FLIP-221), with growing pauses.",
    )
    parameters: tuple[tuple[str, Any], ...] = option(
        "lookup.storage.*", Kind("any", str), (), hashed=False,
        doc="Passed to the fsspec filesystem, e.g. `lookup.storage.endpoint_url`, `lookup.storage.anon`; never "
            "credentials.",
    )
    # fmt: on


@dataclasses.dataclass(frozen=True)
class PartialCacheOptions:
    """The bounds of the partial cache."""

    # fmt: off
    expire_after_access_s: float | None = option(
        "lookup.partial-cache.expire-after-access", DURATION, None,
        doc="With PARTIAL: drop a key that was not looked up for this long. PARTIAL needs at least one of "
            "`expire-after-access`, `expire-after-write`, `max-rows` and `max-bytes`.",
    )
    expire_after_write_s: float | None = option(
        "lookup.partial-cache.expire-after-write", DURATION, None,
        doc="With PARTIAL: drop a key this long after it was loaded. Needed for a provider without versions.",
    )
    max_rows: int | None = option(
        "lookup.partial-cache.max-rows", LONG, None,
        doc="With PARTIAL: the maximum number of rows, in each process and in the cache that a host's processes share; a key "
            "without rows counts as one.",
    )
    max_bytes: int | None = option(
        "lookup.partial-cache.max-bytes", size(0, MOST), None,
        doc="With PARTIAL: the maximum number of bytes, in each process and in the cache that a host's processes share.",
    )
    cache_missing_key: bool = option(
        "lookup.partial-cache.cache-missing-key", BOOLEAN, True,
        doc="With PARTIAL: remember that a key has no rows.",
    )
    # fmt: on

    @property
    def bounded(self) -> bool:
        """Whether the partial cache has a bound."""
        bounds = (self.expire_after_access_s, self.expire_after_write_s, self.max_rows, self.max_bytes)
        return any(bound is not None for bound in bounds)

    @property
    def parameters(self) -> dict[str, Any]:
        """These options as parameters of `DefaultLookupCache`."""
        return dataclasses.asdict(self)

    def check(self, explicit: AbstractSet[str], mode: CacheMode, needs_bound: bool) -> None:
        """Raise OptionError for explicit options that have no effect with this kind of cache, or if the cache has no bound."""
        explicit_keys = sorted(key for key in explicit if key.startswith(PARTIAL))
        if mode is not CacheMode.PARTIAL:
            if explicit_keys:
                raise OptionError(
                    f"option {explicit_keys[0]} has no effect with lookup.cache = {mode.value!r}: set lookup.cache = 'PARTIAL', or remove it"
                )
            return
        bounds = ("expire-after-access", "expire-after-write", "max-rows", "max-bytes")
        if not self.bounded and needs_bound:
            raise OptionError(
                "option lookup.cache = 'PARTIAL': without a bound the cache would grow for ever; set one of "
                + ", ".join(PARTIAL + bound_name for bound_name in bounds)
            )


@dataclasses.dataclass(frozen=True)
class FullCacheOptions:
    """When the full cache reloads, and the memory, disk and time that it may take."""

    # fmt: off
    strategy: ReloadStrategy | str = option(
        "lookup.full-cache.reload-strategy", Kind("PERIODIC, TIMED or `module:factory`", parse_reload_strategy), ReloadStrategy.PERIODIC,
        doc="With FULL: what triggers reloads. With lookup.metadata.source=CACHE, PERIODIC also needs "
            "`periodic-reload.interval`. A factory takes the `LookupOptions`"
            " and returns a `CacheReloadTrigger`.",
    )
    interval_s: float | None = option(
        "lookup.full-cache.periodic-reload.interval", POSITIVE_DURATION, None,
        doc="PERIODIC: time between reloads.",
    )
    schedule_mode: ScheduleMode = option(
        "lookup.full-cache.periodic-reload.schedule-mode", choice(ScheduleMode), ScheduleMode.FIXED_DELAY,
        doc="PERIODIC: the next reload is due one interval after the last one has ended (FIXED_DELAY), or whole intervals "
            "after the first load began (FIXED_RATE).",
    )
    iso_time: datetime.time | None = option(
        "lookup.full-cache.timed-reload.iso-time", Kind("ISO time", parse_iso_time), None,
        doc="TIMED: time of day, local or with an offset: `10:15`, `10:15Z`, `10:15+07:00`.",
    )
    interval_days: int = option(
        "lookup.full-cache.timed-reload.interval-in-days", _DAYS, 1,
        doc="TIMED: days between reloads.",
    )
    blackout: Blackout | None = option(
        "lookup.full-cache.blackout", Kind("times of day", parse_blackout), None,
        doc="Times of day at which no scheduled reload starts, e.g. `22:00-06:00, 12:00-13:00`. A reload that comes due "
            "waits until they end.",
    )
    build_wait_s: float = option(
        "lookup.full-cache.build-wait", DURATION, 30.0, default_text="30 s",
        doc="How long a query waits for a snapshot. With UFS: for the snapshot of a new version; after that, the query "
            "reads the files. With CACHE: for an overdue reload; after that, the query uses the old snapshot, or fails "
            "if `on-reload-failure` or `max-staleness` requires it. If another process is still loading the first "
            "snapshot after this time, the query reads the files.",
    )
    build_memory_bytes: int | None = option(
        "lookup.full-cache.build-memory", size(16 * MIB, MOST), None, default_text="an eighth of the free memory, at most 2 GiB",
        doc="The memory that the build of a snapshot may use. Rows that do not fit go to temporary files in the cache "
            "directory.",
    )
    retain_s: float | None = option(
        "lookup.full-cache.retain", DURATION, None, default_text="10 min, or two intervals if that is longer",
        doc="How long a superseded snapshot stays on disk.",
    )
    on_reload_failure: OnReloadFailure = option(
        "lookup.full-cache.on-reload-failure", choice(OnReloadFailure), OnReloadFailure.KEEP,
        doc="With CACHE, if a reload has failed, or is overdue and has not ended after `build-wait`: answer from the "
            "last snapshot, or fail until a reload succeeds.",
    )
    max_staleness_s: float | None = option(
        "lookup.full-cache.max-staleness", POSITIVE_DURATION, None, default_text="any age",
        doc="With CACHE: never answer from a snapshot older than this. A query then waits for a reload, or fails.",
    )
    # fmt: on

    @property
    def reloads(self) -> bool:
        """Whether a trigger reloads the full cache."""
        return self.strategy is not ReloadStrategy.PERIODIC or self.interval_s is not None

    @property
    def schedule(self) -> tuple[Any, ...]:
        """The options that determine when the full cache reloads."""
        periodic = self.interval_s, self.schedule_mode
        return self.strategy, *periodic, self.iso_time, self.interval_days, self.blackout

    @property
    def retained_s(self) -> float:
        """How long a superseded snapshot stays."""
        if self.retain_s is not None:
            return self.retain_s
        interval_s = self.interval_s or 0.0
        if self.strategy is ReloadStrategy.TIMED:
            interval_s = 86400.0 * self.interval_days
        return max(600.0, 2 * interval_s)

    def check(self, explicit: AbstractSet[str], mode: CacheMode, cached: bool, needs_trigger: bool) -> None:
        """Raise OptionError for explicit options that have no effect with this kind of cache, or that need another one.

        `cached`: this host decides which version is current. `needs_trigger`: no trigger comes from elsewhere.
        """
        explicit_keys = sorted(key for key in explicit if key.startswith(FULL))
        if mode is not CacheMode.FULL:
            if explicit_keys:
                raise OptionError(
                    f"option {explicit_keys[0]} has no effect with lookup.cache = {mode.value!r}: set lookup.cache = 'FULL', or remove it"
                )
            return
        strategy = self.strategy
        strategy_name = strategy if isinstance(strategy, str) else strategy.value
        for prefix, required in ((FULL + "periodic-reload.", "PERIODIC"), (FULL + "timed-reload.", "TIMED")):
            misplaced = [key for key in explicit_keys if key.startswith(prefix)] if strategy_name != required else []
            if misplaced:
                raise OptionError(
                    f"option {misplaced[0]} has no effect with {FULL}reload-strategy = {strategy_name!r}: set {required!r}, or remove it"
                )
        if strategy_name == "TIMED" and self.iso_time is None:
            raise OptionError(f"option {FULL}timed-reload.iso-time is missing: set a time such as '10:15' or '10:15Z'")
        wants = cached and needs_trigger
        wants |= any("reload-strategy" in key or "periodic-reload" in key for key in explicit_keys)
        if strategy_name == "PERIODIC" and self.interval_s is None and wants:
            why = (
                "with lookup.cache = 'FULL' and lookup.metadata.source = 'CACHE', reloads need a schedule; "
                if cached
                else ""
            )
            raise OptionError(f"option {FULL}periodic-reload.interval is missing: {why}set a duration such as '5 min'")
        if self.blackout is not None and not self.reloads and FULL + "blackout" in explicit_keys:
            raise OptionError(
                f"option {FULL}blackout is for scheduled reloads: set {FULL}periodic-reload.interval, too"
            )
        if cached and "lookup.metadata.sync-interval" in explicit:
            raise OptionError(
                "option lookup.metadata.sync-interval: with lookup.cache = 'FULL' the reload strategy says when to ask the "
                f"store; set {FULL}periodic-reload.interval instead"
            )
        for key in () if cached else ("on-reload-failure", "max-staleness"):
            if FULL + key in explicit_keys:
                raise OptionError(
                    f"option {FULL}{key} has no effect with lookup.metadata.source = 'UFS', where every query asks the store for the "
                    "version: set lookup.metadata.source = 'CACHE', or remove it"
                )
        if self.max_staleness_s is not None and self.max_staleness_s < (self.interval_s or 0):
            raise OptionError(
                f"option {FULL}max-staleness = {self.max_staleness_s:g} s is less than {FULL}periodic-reload.interval = "
                f"{self.interval_s:g} s: queries would fail between reloads"
            )
