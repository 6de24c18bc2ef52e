"""`hints`: what to tune next, in words, from what a table's processes have counted on a host."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from pyspark_lookup.core.metrics import BOUNDS_MS, UNSET, cumulate_buckets
from pyspark_lookup.storage.disk import DiskSpace

_ENOUGH = 20  # events, before a rate says something


@dataclasses.dataclass(frozen=True)
class Hint:
    """Something to do: its symptom, and what would help. `urgent`: rows or queries are at stake, not speed."""

    symptom: str
    advice: str
    urgent: bool = False


def hit_rate(values: Mapping[str, int]) -> float | None:
    """The share of keys that a cache has answered; None without any."""
    return _rate(values["hitCount"], values["missCount"])


def block_hit_rate(values: Mapping[str, int]) -> float | None:
    """The share of blocks that were on disk; None without any."""
    return _rate(values["blockHitCount"], values["blockMissCount"])


def saved_bytes(values: Mapping[str, int]) -> int:
    """Bytes that reading the table anew for every query would have fetched, beyond those that were."""
    return max(values["resolvedBytes"] - values["ufsGetBytes"], 0)


def quantile_ms(values: Mapping[str, int], name: str, share: float) -> float | None:
    """The bound below which that share of a time's values lies, in ms; infinite above the last; None without any."""
    count = values[f"{name}Count"]
    if not count:
        return None
    for bound_ms, below in zip(BOUNDS_MS, cumulate_buckets(values, name), strict=True):
        if below >= share * count:
            return float(bound_ms)
    return float("inf")


def hints(values: Mapping[str, int]) -> list[Hint]:
    """What the counters of one table on one host advise, the most urgent first; [] if nothing."""
    return sorted(_find_hints(values), key=lambda hint: not hint.urgent)


def disk_hints(space: DiskSpace) -> list[Hint]:
    """What the use of a cache directory advises."""
    if not 0 <= space.free < space.budget - space.used_bytes:
        return []
    return [
        Hint(
            "Less is free on the disk of the cache directory than its budget allows for.",
            "Lower lookup.cache.max-bytes, or leave it out: then half of what is free is used. Or move lookup.cache.dir to a larger disk.",
            urgent=True,
        )
    ]


def _rate(hits: int, misses: int) -> float | None:
    return hits / (hits + misses) if hits + misses else None


def _find_hints(values: Mapping[str, int]) -> Iterator[Hint]:
    failures, loads = values["numLoadFailures"], values["loadCount"]
    if failures:
        yield Hint(
            f"Loads that failed: {failures:,} ({loads:,} went well).",
            "Look for 'lookupcache reload-failed' or 'lookup-failed' in the logs; with a full cache, lookup.full-cache.max-staleness "
            "says how old an answer may become.",
            urgent=True,
        )
    if values["staleServedCount"]:
        yield Hint(
            f"{values['staleServedCount']:,} answers came from a version that could not be renewed in time.",
            "Mend the store or the writer of the table; lookup.full-cache.on-reload-failure=FAIL refuses such answers.",
            urgent=True,
        )
    if values["cacheFailureCount"] + values["blockDamagedCount"] + values["snapshotDamagedCount"]:
        yield Hint(
            f"The cache directory failed {values['cacheFailureCount']:,} times; {values['blockDamagedCount']:,} blocks and "
            f"{values['snapshotDamagedCount']:,} snapshots were damaged.",
            "Answers came from the store instead. Run 'pyspark-lookup check --repair', and look at the disk.",
            urgent=True,
        )
    if values["snapshotOverBudgetCount"]:
        yield Hint(
            f"{values['snapshotOverBudgetCount']:,} times there was no room for a snapshot: the table was read from its files.",
            "Raise lookup.cache.max-bytes, or set lookup.cache=PARTIAL for this table or for others of this host.",
        )
    block_rate = block_hit_rate(values)
    if block_rate is not None and block_rate <= 0.8 and values["blockEvictedCount"] >= _ENOUGH:
        yield Hint(
            f"{values['blockEvictedCount']:,} blocks were removed for space, and only {block_rate:.0%} of those asked for were there.",
            "Raise lookup.cache.max-bytes.",
        )
    if values["blockRefusedCount"] >= _ENOUGH:
        yield Hint(
            f"{values['blockRefusedCount']:,} blocks were too large for the cache, or of files that changed moments ago.",
            "Raise lookup.cache.max-bytes (a block may take an eighth of it), and put new files under new names.",
        )
    if values["snapshotReadThroughCount"]:
        yield Hint(
            f"{values['snapshotReadThroughCount']:,} queries read the files because the snapshot was not ready.",
            "Warm the hosts first ('pyspark-lookup warm', pyspark_lookup.warm), or raise lookup.full-cache.build-wait.",
        )
    key_rate, keys = hit_rate(values), values["hitCount"] + values["missCount"]
    if key_rate is not None and key_rate <= 0.5 and keys >= 1000:
        yield Hint(
            f"Only {key_rate:.0%} of the keys were answered from the cache.",
            "Raise lookup.partial-cache.max-rows, or use lookup.cache=FULL: 'pyspark-lookup advise' says which, from a trace of keys.",
        )
    lookups = values["lookupTimeCount"]
    if lookups >= 10 * _ENOUGH and not keys:
        yield Hint(
            f"{lookups:,} lookups were made without a cache of rows (lookup.cache=NONE).",
            "Set lookup.cache=FULL for a table that fits on local disk, PARTIAL for hot keys of a larger one.",
        )
    calls = values["ufsHeadCount"] + values["ufsListCount"] + values["ufsGetCount"]
    if values["ufsRetryCount"] >= _ENOUGH and values["ufsRetryCount"] * 20 >= calls:
        yield Hint(
            f"{values['ufsRetryCount']:,} of {calls:,} calls to the store were repeated.",
            "The store is slow or throttles: lookup.metadata.source=CACHE asks it less often.",
        )
    lag = values.get("reloadLag", UNSET)
    if lag != UNSET and lag >= 86_400_000:
        yield Hint(
            f"What was answered from last was known to be current {lag / 3_600_000:.0f} hours ago.",
            "If the table is still in use, look at its reloads: with CACHE, lookup.metadata.sync-interval or a reload trigger renews it.",
        )
