"""Options of the partial and of the full cache (FLIP-221)."""

from __future__ import annotations

import dataclasses
import datetime
from typing import TYPE_CHECKING, Any

from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.errors import OptionError
from pyspark_lookup.options.enums import CacheMode, MetadataSource, OnReloadFailure, ReloadStrategy
from pyspark_lookup.options.parsing import (
    BOOLEAN,
    DURATION,
    LONG,
    MIB,
    MOST,
    POSITIVE_DURATION,
    Kind,
    choice,
    option,
    parse_reload_strategy,
    size,
    whole_number,
)
from pyspark_lookup.options.reload_trigger import Blackout, ScheduleMode, parse_blackout, parse_iso_time

if TYPE_CHECKING:
    from pyspark_lookup.options.lookup_options import LookupOptions

PARTIAL = "lookup.partial-cache."
FULL = "lookup.full-cache."
_DAYS = Kind("integer", whole_number(1, 99_999, "a whole number of days, at least 1 day and at most 99999"))


@dataclasses.dataclass(frozen=True)
class PartialCacheOptions:
    # fmt: off
    partial_expire_after_access_s: float | None = option(
        "lookup.partial-cache.expire-after-access", DURATION, None,
        doc="With PARTIAL: forget a key that was not looked up for this long. At least one of the four bounds is needed.",
    )
    partial_expire_after_write_s: float | None = option(
        "lookup.partial-cache.expire-after-write", DURATION, None,
        doc="With PARTIAL: forget a key this long after it was loaded. Needed for a provider without versions.",
    )
    partial_max_rows: int | None = option(
        "lookup.partial-cache.max-rows", LONG, None,
        doc="With PARTIAL: the maximum number of rows, in each process and in the cache that a host's processes share; a key "
            "without rows counts as one.",
    )
    partial_max_bytes: int | None = option(
        "lookup.partial-cache.max-bytes", size(0, MOST), None,
        doc="With PARTIAL: the maximum number of bytes, in each process and in the cache that a host's processes share.",
    )
    partial_cache_missing_key: bool = option(
        "lookup.partial-cache.cache-missing-key", BOOLEAN, True,
        doc="With PARTIAL: remember that a key has no rows.",
    )
    # fmt: on

    @property
    def bounded(self) -> bool:
        """Whether anything bounds the partial cache."""
        return any(value is not None for name, value in self.partial_cache.items() if name != "cache_missing_key")

    @property
    def partial_cache(self) -> dict[str, Any]:
        """What bounds the partial cache, by the parameters of `DefaultLookupCache`."""
        names = (field.name for field in dataclasses.fields(PartialCacheOptions))
        return {name.removeprefix("partial_"): getattr(self, name) for name in names}


def check_partial_cache(options: LookupOptions) -> None:
    """Raise OptionError for options of the partial cache that would be ignored, or without any bound."""
    explicit_keys = sorted(key for key in options.explicit if key.startswith(PARTIAL))
    if options.cache is not CacheMode.PARTIAL:
        if explicit_keys:
            raise OptionError(
                f"option {explicit_keys[0]}: lookup.cache is {options.cache.value!r} and should be 'PARTIAL', else it has no effect"
            )
        return
    bounds = ("expire-after-access", "expire-after-write", "max-rows", "max-bytes")
    if not options.bounded and options.provider is None:
        raise OptionError(
            "option lookup.cache = 'PARTIAL' without any bound would grow for ever: set one of "
            + ", ".join(PARTIAL + bound_name for bound_name in bounds)
        )


@dataclasses.dataclass(frozen=True)
class FullCacheOptions:
    # fmt: off
    reload_strategy: ReloadStrategy | str = option(
        "lookup.full-cache.reload-strategy", Kind("PERIODIC, TIMED or `module:factory`", parse_reload_strategy), ReloadStrategy.PERIODIC,
        doc="With FULL: what triggers reloads. Required with lookup.metadata.source=CACHE. A factory takes the `LookupOptions`"
            " and returns a `CacheReloadTrigger`.",
    )
    reload_interval_s: float | None = option(
        "lookup.full-cache.periodic-reload.interval", POSITIVE_DURATION, None,
        doc="PERIODIC: time between reloads.",
    )
    reload_schedule_mode: ScheduleMode = option(
        "lookup.full-cache.periodic-reload.schedule-mode", choice(ScheduleMode), ScheduleMode.FIXED_DELAY,
        doc="PERIODIC: the interval starts when the last reload ends (FIXED_DELAY), or on a fixed grid (FIXED_RATE).",
    )
    reload_iso_time: datetime.time | None = option(
        "lookup.full-cache.timed-reload.iso-time", Kind("ISO time", parse_iso_time), None,
        doc="TIMED: time of day, local or with an offset: `10:15`, `10:15Z`, `10:15+07:00`.",
    )
    reload_interval_days: int = option(
        "lookup.full-cache.timed-reload.interval-in-days", _DAYS, 1,
        doc="TIMED: days between reloads.",
    )
    blackout: Blackout | None = option(
        "lookup.full-cache.blackout", Kind("times of day", parse_blackout), None,
        doc="With a reload strategy: times in which no reload starts, e.g. `22:00-06:00, 12:00-13:00`; one that comes due "
            "waits for their end.",
    )
    build_wait_s: float = option(
        "lookup.full-cache.build-wait", DURATION, 30.0, default_text="30 s",
        doc="How long a query waits for a snapshot. With UFS: for the snapshot of a new version; then the query reads the files "
            "themselves. With CACHE: for an overdue reload; then the query uses the old snapshot, or fails if "
            "`on-reload-failure` or `max-staleness` demands it. For a first load by another process: then the query reads "
            "the files.",
    )
    build_memory_bytes: int | None = option(
        "lookup.full-cache.build-memory", size(16 * MIB, MOST), None, default_text="an eighth of what is free, at most 2 GiB",
        doc="How much memory building a snapshot may take; further rows go to temporary files in the cache directory.",
    )
    retain_s: float | None = option(
        "lookup.full-cache.retain", DURATION, None, default_text="10 min, or two intervals if that is longer",
        doc="How long a superseded snapshot stays on disk.",
    )
    on_reload_failure: OnReloadFailure = option(
        "lookup.full-cache.on-reload-failure", choice(OnReloadFailure), OnReloadFailure.KEEP,
        doc="With CACHE, after a reload that failed, or is overdue and not done after `build-wait`: serve the last snapshot, or "
            "fail until a reload succeeds.",
    )
    max_staleness_s: float | None = option(
        "lookup.full-cache.max-staleness", POSITIVE_DURATION, None, default_text="any age",
        doc="With CACHE: never serve a snapshot older than this; a query then waits for a reload, or fails.",
    )
    # fmt: on

    @property
    def reloads(self) -> bool:
        """Whether a trigger reloads the full cache."""
        return self.reload_strategy is not ReloadStrategy.PERIODIC or self.reload_interval_s is not None

    @cached_property
    def full_cache(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(FullCacheOptions))

    @property
    def schedule(self) -> tuple[Any, ...]:
        """What says when the full cache is reloaded."""
        periodic = self.reload_interval_s, self.reload_schedule_mode
        return self.reload_strategy, *periodic, self.reload_iso_time, self.reload_interval_days, self.blackout

    @property
    def retained_s(self) -> float:
        """How long a superseded snapshot stays."""
        if self.retain_s is not None:
            return self.retain_s
        interval_s = self.reload_interval_s or 0.0
        if self.reload_strategy is ReloadStrategy.TIMED:
            interval_s = 86400.0 * self.reload_interval_days
        return max(600.0, 2 * interval_s)


def check_full_cache(options: LookupOptions) -> None:
    """Raise OptionError for options of the full cache that would be ignored, or lack another."""
    explicit_keys = sorted(key for key in options.explicit if key.startswith(FULL))
    if options.cache is not CacheMode.FULL:
        if explicit_keys:
            raise OptionError(
                f"option {explicit_keys[0]}: lookup.cache is {options.cache.value!r} and should be 'FULL', else it has no effect"
            )
        return
    strategy = options.reload_strategy
    strategy_name = strategy if isinstance(strategy, str) else strategy.value
    for prefix, required in ((FULL + "periodic-reload.", "PERIODIC"), (FULL + "timed-reload.", "TIMED")):
        misplaced = [key for key in explicit_keys if key.startswith(prefix)] if strategy_name != required else []
        if misplaced:
            raise OptionError(
                f"option {misplaced[0]}: {FULL}reload-strategy is {strategy_name!r} and should be {required!r}"
            )
    cached = options.metadata_source is MetadataSource.CACHE
    if strategy_name == "TIMED" and options.reload_iso_time is None:
        raise OptionError(f"Missing '{FULL}timed-reload.iso-time': a time such as '10:15' or '10:15Z'")
    # A provider may bring a trigger of its own.
    wants = cached and options.provider is None
    wants |= any("reload-strategy" in key or "periodic-reload" in key for key in explicit_keys)
    if strategy_name == "PERIODIC" and options.reload_interval_s is None and wants:
        why = (
            "lookup.cache = 'FULL' reloads on a schedule with lookup.metadata.source = 'CACHE'; set a"
            if cached
            else "set a"
        )
        raise OptionError(f"Missing '{FULL}periodic-reload.interval': {why} duration such as '5 min'")
    if options.blackout is not None and not options.reloads and FULL + "blackout" in explicit_keys:
        raise OptionError(f"option {FULL}blackout is for scheduled reloads: set {FULL}periodic-reload.interval too")
    if cached and "lookup.metadata.sync-interval" in options.explicit:
        raise OptionError(
            "option lookup.metadata.sync-interval: with lookup.cache = 'FULL' the reload strategy says when to ask the "
            f"store; set {FULL}periodic-reload.interval instead"
        )
    for key in () if cached else ("on-reload-failure", "max-staleness"):
        if FULL + key in explicit_keys:
            raise OptionError(
                f"option {FULL}{key} has no meaning with lookup.metadata.source = {options.metadata_source.value!r}: "
                "every query checks the version at the store"
            )
    if options.max_staleness_s is not None and options.max_staleness_s < (options.reload_interval_s or 0):
        raise OptionError(
            f"option {FULL}max-staleness = {options.max_staleness_s:g} s is less than {FULL}periodic-reload.interval = "
            f"{options.reload_interval_s:g} s: queries would fail between reloads"
        )
