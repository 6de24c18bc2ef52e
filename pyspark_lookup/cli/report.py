"""`report`: an HTML page about this host's caches that can be read in a minute. The page loads nothing from the network."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.resources
import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jinja2

from pyspark_lookup import __version__
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.credentials import printable
from pyspark_lookup.core.metrics import BOUNDS_MS, UNSET, cumulate_buckets
from pyspark_lookup.storage.disk import Disk, DiskSpace
from pyspark_lookup.storage.host_metrics import Reload, TableCounts, read_reloads, read_table_counts

_ENOUGH = 20  # some advice needs at least this many events, because fewer may be chance


@dataclasses.dataclass(frozen=True)
class Hint:
    """Advice to the operator: a symptom, and a remedy. `urgent`: rows or queries are at stake, not only speed."""

    symptom: str
    advice: str
    urgent: bool = False


def hit_rate(values: Mapping[str, int]) -> float | None:
    """The share of the requested keys that a cache has answered; None if no key was requested."""
    return _rate(values["hitCount"], values["missCount"])


def block_hit_rate(values: Mapping[str, int]) -> float | None:
    """The share of the requested blocks that were in the cache directory; None if no block was requested."""
    return _rate(values["blockHitCount"], values["blockMissCount"])


def saved_bytes(values: Mapping[str, int]) -> int:
    """How many more bytes would have been fetched if every query had read its whole table again."""
    return max(values["resolvedBytes"] - values["ufsGetBytes"], 0)


def quantile_ms(values: Mapping[str, int], name: str, share: float) -> float | None:
    """The lowest bound of `BOUNDS_MS` such that at least a `share` of the durations counted under `name` are not longer.

    Infinite if there is no such bound; None if no duration was counted.
    """
    count = values[f"{name}Count"]
    if not count:
        return None
    for bound_ms, below in zip(BOUNDS_MS, cumulate_buckets(values, name), strict=True):
        if below >= share * count:
            return float(bound_ms)
    return float("inf")


def hints(values: Mapping[str, int]) -> list[Hint]:
    """The advice that follows from the counters of one table on one host, the most urgent first."""
    return sorted(_find_hints(values), key=lambda hint: not hint.urgent)


def disk_hints(space: DiskSpace) -> list[Hint]:
    """The advice that follows from the space that a cache directory takes."""
    if not 0 <= space.free < space.budget - space.used_bytes:
        return []
    return [
        Hint(
            "The disk of the cache directory has less free space than the directory's budget.",
            "Lower lookup.cache.max-bytes, or leave it out: then the budget is half of the free space. Or move lookup.cache.dir to a larger disk.",
            urgent=True,
        )
    ]


def _rate(hits: int, misses: int) -> float | None:
    return hits / (hits + misses) if hits + misses else None


def _find_hints(values: Mapping[str, int]) -> Iterator[Hint]:
    failures, loads = values["numLoadFailures"], values["loadCount"]
    if failures:
        yield Hint(
            f"Loads that failed: {failures:,} ({loads:,} succeeded).",
            "Look for 'lookupcache reload-failed' or 'lookup-failed' in the logs; with a full cache, lookup.full-cache.max-staleness "
            "says how old an answer may become.",
            urgent=True,
        )
    if values["staleServedCount"]:
        yield Hint(
            f"{values['staleServedCount']:,} answers came from a version that could not be renewed in time.",
            "Repair the store or the writer of the table; lookup.full-cache.on-reload-failure=FAIL refuses such answers.",
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
            f"{values['snapshotOverBudgetCount']:,} times there was no disk space for a snapshot: the table was read from its files.",
            "Raise lookup.cache.max-bytes, or set lookup.cache=PARTIAL for this table or for others of this host.",
        )
    block_rate = block_hit_rate(values)
    if block_rate is not None and block_rate <= 0.8 and values["blockEvictedCount"] >= _ENOUGH:
        yield Hint(
            f"{values['blockEvictedCount']:,} blocks were removed for space, and only {block_rate:.0%} of the requested blocks were in the cache.",
            "Raise lookup.cache.max-bytes.",
        )
    if values["blockRefusedCount"] >= _ENOUGH:
        yield Hint(
            f"{values['blockRefusedCount']:,} blocks were too large for the cache, or belong to files that had just changed.",
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
            "Raise lookup.partial-cache.max-rows, or use lookup.cache=FULL: 'pyspark-lookup advise' recommends one of them, from a trace of keys.",
        )
    if values["lateCrowdedCount"]:
        yield Hint(
            f"{values['lateCrowdedCount']:,} facts passed without a row before their time was over, because too many waited.",
            "Raise the argument wait_max_rows of lookup_join, or shorten wait; 'late-rows-crowded' in the logs says when it happened.",
            urgent=True,
        )
    if values["networkSkippedCount"] + values["rangeEmptyCount"]:
        yield Hint(
            f"Rows that match nothing: {values['networkSkippedCount']:,} times a network could not be read, {values['rangeEmptyCount']:,} times a range was empty.",
            "Correct the table; without lookup.on-bad-network=SKIP a lookup fails, and names the file and the row.",
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
            f"The version of the last answers was last known to be current {lag / 3_600_000:.0f} hours ago.",
            "If the table is still in use, look at its reloads: with CACHE, lookup.metadata.sync-interval or a reload trigger renews it.",
        )


# --- the report -----------------------------------------------------------------------------------

_TEMPLATE = importlib.resources.files("pyspark_lookup.cli").joinpath("report.html.jinja")  # works from a zip, too
_SHOWN_RELOADS = 100
_FIRST = 5  # the most tables in a line of the overview
_UNFOLDED = 8  # if there are more tables, their sections are folded
_STALE_S, _SLOW_MS, _LARGE_BYTES = 60.0, 10.0, 256 * 2**20
_WIDTH, _HEIGHT = 600.0, 90.0


class _Bar(NamedTuple):
    """A reload in the timeline: its position in the drawing, and the text of its tooltip (`says`)."""

    x: float
    y: float
    width: float
    height: float
    failed: bool
    says: str


class _Timeline(NamedTuple):
    bars: Sequence[_Bar]
    begins: str
    ends: str
    longest: str


@dataclasses.dataclass(frozen=True)
class _TableSection:
    """A table's section of the page. `anchor`: the target of links. `failing`: the table's failures, in words."""

    anchor: str
    counts: TableCounts
    failing: str
    lag_s: float | None
    oldest_s: float | None
    hit_rate: float | None
    block_hit_rate: float | None
    typical_ms: float | None
    slow_ms: float | None
    saved: int
    saved_share: float | None
    hints: Sequence[Hint]
    timeline: _Timeline | None

    @property
    def size(self) -> int:
        return self.counts.values["numCachedBytes"]


class _Finding(NamedTuple):
    """A line of the overview: a kind of problem, the tables that have it most, each with a remark, and the number of other tables that have
    it."""

    title: str
    tables: Sequence[tuple[_TableSection, str]]
    more: int


def report(disk: Disk, clock: HostClock) -> str:
    """The page about the tables in a cache directory, as HTML."""
    reloads = read_reloads(disk)
    tables = read_table_counts(disk, clock)
    sections = [_table_section(f"t{n}", table, reloads.get(table.url, [])) for n, table in enumerate(tables, 1)]
    space = disk.space()
    environment = jinja2.Environment(
        finalize=lambda value: printable(value) if type(value) is str else value,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(age=_duration, size=_size, percent=_percent, ms=_ms, count=lambda value: f"{value:,}")
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        tables=sections,
        overview=_overview(sections),
        folded=len(sections) > _UNFOLDED,
        space=space,
        disk_hints=disk_hints(space),
        host=socket.gethostname(),
        at=_instant(clock.wall_s()),
        version=__version__,
        saved=sum(table.saved for table in sections),
        timeline_size=(_WIDTH, _HEIGHT),
    )


def _overview(sections: Sequence[_TableSection]) -> list[_Finding]:
    """The tables with failures, then the stale tables, the slow and the large ones. In each group, the worst tables come first."""
    ranked: list[tuple[str, list[tuple[float, _TableSection, str]]]] = [
        ("Failing", [(len(table.failing), table, table.failing) for table in sections if table.failing]),
        (
            "Stale",
            [(lag, table, f"{_duration(lag)} old") for table in sections if (lag := table.lag_s or 0) >= _STALE_S],
        ),
        ("Slow", [(slow, table, _ms(slow)) for table in sections if (slow := table.slow_ms or 0) > _SLOW_MS]),
        ("Large", [(size, table, _size(size)) for table in sections if (size := table.size) >= _LARGE_BYTES]),
    ]
    findings = []
    for title, tables in ranked:
        worst = sorted(tables, key=lambda one: -one[0])
        if worst:
            first = [(table, says) for _, table, says in worst[:_FIRST]]
            findings.append(_Finding(title, first, len(worst) - len(first)))
    return findings


def _failing(table: TableCounts, reloads: Sequence[Reload]) -> str:
    """The failures of a table in words; "" if there are none."""
    parts = []
    if reloads and reloads[-1].error:
        parts.append(f"the last reload failed: {reloads[-1].error}")
    failed = table.values["numLoadFailures"]
    if failed:
        parts.append(f"{failed:,} loads failed")
    parts += [hint.symptom for hint in hints(table.values) if hint.urgent and not (failed and "failed" in hint.symptom)]
    return "; ".join(parts)


def _table_section(anchor: str, table: TableCounts, reloads: Sequence[Reload]) -> _TableSection:
    values = table.values
    resolved_bytes = values["resolvedBytes"]
    lag_ms = values["reloadLag"]
    return _TableSection(
        anchor,
        table,
        _failing(table, reloads),
        None if lag_ms == UNSET else lag_ms / 1000,
        None if values["lateOldest"] == UNSET else values["lateOldest"] / 1000,
        hit_rate(values),
        block_hit_rate(values),
        quantile_ms(values, "lookupTime", 0.5),
        quantile_ms(values, "lookupTime", 0.99),
        saved_bytes(values),
        saved_bytes(values) / resolved_bytes if resolved_bytes else None,
        hints(values),
        _timeline(reloads[-_SHOWN_RELOADS:]),
    )


def _timeline(reloads: Sequence[Reload]) -> _Timeline | None:
    """The reloads as bars over time; None if there are none. A bar's width and height show how long the reload took. Both are at least 3
    pixels."""
    if not reloads:
        return None
    first, last = reloads[0].at_s, max(reload.at_s + reload.seconds for reload in reloads)
    span = max(last - first, 1.0)
    longest = max(reload.seconds for reload in reloads)
    bars = []
    for reload in reloads:
        width = max(reload.seconds / span * _WIDTH, 3.0)
        height = max(reload.seconds / max(longest, 1e-9) * _HEIGHT, 3.0)
        x = min((reload.at_s - first) / span * _WIDTH, _WIDTH - width)
        says = f"{_instant(reload.at_s)}: {reload.error or f'{reload.rows:,} rows, {_size(reload.fetched)} fetched'}, {reload.seconds:.2f} s"
        bars.append(_Bar(x, _HEIGHT - height, width, height, bool(reload.error), says))
    return _Timeline(bars, _instant(first), _instant(last), f"{longest:.2f} s")


def _instant(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _size(count: float) -> str:
    if count < 0:
        return "unknown"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("not reached")


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    return f"{share:.1%}" if share < 0.9995 or share == 1 else "99.9%"


def _ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"≤ {value:g} ms" if math.isfinite(value) else "over 60 s"
