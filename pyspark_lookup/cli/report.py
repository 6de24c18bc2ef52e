"""`report`: one page about what this host's caches do, that a person reads in a minute. It needs no network."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.resources
import math
import socket
from collections.abc import Sequence
from typing import NamedTuple

import jinja2

from pyspark_lookup import __version__
from pyspark_lookup.cli.hints import Hint, block_hit_rate, disk_hints, hints, hit_rate, quantile_ms, saved_bytes
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.metrics import UNSET
from pyspark_lookup.core.printable import printable
from pyspark_lookup.storage.disk import Disk
from pyspark_lookup.storage.host_metrics import Reload, TableCounts, read_reloads, read_table_counts

_TEMPLATE = importlib.resources.files("pyspark_lookup.cli").joinpath("report.html.jinja")  # also from a zip
_SHOWN_RELOADS = 100
_FIRST = 5  # tables in a line of the overview
_UNFOLDED = 8  # with more tables, each section is folded
_STALE_S, _SLOW_MS, _LARGE_BYTES = 60.0, 10.0, 256 * 2**20
_WIDTH, _HEIGHT = 600.0, 90.0


class _Bar(NamedTuple):
    """A reload in the timeline: its place in the drawing, and its tooltip."""

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
    """A table's section of the page. `anchor`: the target of links. `failing`: what has gone wrong, in words."""

    anchor: str
    counts: TableCounts
    failing: str
    lag_s: float | None
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
    """A line of the overview: the tables to look at first, each with a remark."""

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
    """What fails, then what is stale, slow and large, the worst first."""
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
    """What has gone wrong; "" if nothing has."""
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
    """The reloads over time, as bars: the height shows how long each took; the width is at least visible."""
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
