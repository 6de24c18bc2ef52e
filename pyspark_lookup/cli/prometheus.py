"""`HostCollector`: the counters of this host's processes, as Prometheus metrics.

The numbers are read from the cache directory for each request, so they include all processes, even those that have ended. A counter
`hitCount` is `lookupcache_hit_total`, `ufsGetBytes` is `lookupcache_ufs_get_bytes_total`; times are histograms in seconds; gauges keep
their names, in seconds and bytes. Labels: `table` (its URL) and `host`; counters of processes also have `application`, the id of the Spark
application for which they work.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.credentials import printable
from pyspark_lookup.core.metrics import (
    BOUNDS_MS,
    COUNTERS,
    GAUGES,
    HOST_GAUGES,
    TIMES,
    UNSET,
    bucket_names,
    cumulate_buckets,
)
from pyspark_lookup.storage.disk import Disk
from pyspark_lookup.storage.host_metrics import TableCounts, host_gauges, read_table_counts

_PREFIX = "lookupcache_"
_LABELS = ("table", "host")
_COUNTED = (*_LABELS, "application")
_IN_SECONDS = {
    "latestLoadTime": "latest_load_seconds",
    "versionAsOf": "version_as_of_timestamp_seconds",
    "reloadLag": "reload_lag_seconds",
}
_OF_TABLES = {**GAUGES, "reloadLag": HOST_GAUGES["reloadLag"]}
_OF_HOST = {name: doc for name, doc in HOST_GAUGES.items() if name not in _OF_TABLES}
_IN_HISTOGRAMS = {counter for name in TIMES for counter in (f"{name}Count", f"{name}Micros", *bucket_names(name))}
_PROCESSES = f"{_PREFIX}processes"


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _counter(name: str) -> str:
    return _PREFIX + _snake(name.removesuffix("Count"))


def _gauge(name: str) -> str:
    return _PREFIX + _IN_SECONDS.get(name, _snake(name))


def _time(name: str) -> str:
    return f"{_PREFIX}{_snake(name.removesuffix('Time'))}_seconds"


def series_names() -> frozenset[str]:
    """The names of all series, as queries use them."""
    counters = {f"{_counter(name)}_total" for name in COUNTERS if name not in _IN_HISTOGRAMS}
    gauges = {_gauge(name) for name in (*GAUGES, *HOST_GAUGES)}
    times = {f"{_time(name)}_{part}" for name in TIMES for part in ("bucket", "count", "sum")}
    return frozenset({*counters, *gauges, *times, _PROCESSES})


class HostCollector(Collector):
    """The metrics of all tables in a cache directory, for a `prometheus_client` registry."""

    def __init__(self, disk: Disk, clock: HostClock) -> None:
        self._disk = disk
        self._clock = clock
        self._host = socket.gethostname()

    def collect(self) -> Iterator[Metric]:
        tables = read_table_counts(self._disk, self._clock)
        labeled_counts = [
            ((*self._labels(t), printable(name)), counts) for t in tables for name, counts in t.by_application.items()
        ]
        for name, doc in COUNTERS.items():
            if name not in _IN_HISTOGRAMS:
                counter = CounterMetricFamily(_counter(name), doc, labels=_COUNTED)
                for labels, counts in labeled_counts:
                    counter.add_metric(labels, counts.values[name])
                yield counter
        for name, doc in TIMES.items():
            histogram = HistogramMetricFamily(_time(name), doc, labels=_COUNTED)
            for labels, counts in labeled_counts:
                histogram.add_metric(labels, *_histogram(name, counts.values))
            yield histogram
        for name, doc in _OF_TABLES.items():
            gauge = GaugeMetricFamily(_gauge(name), doc, labels=_LABELS)
            for table in tables:
                if table.values[name] != UNSET:
                    scale = 1000 if name in _IN_SECONDS else 1
                    gauge.add_metric(self._labels(table), table.values[name] / scale)
            yield gauge
        processes = GaugeMetricFamily(_PROCESSES, "processes that use the table now", labels=_COUNTED)
        for labels, counts in labeled_counts:
            processes.add_metric(labels, counts.processes)
        yield processes
        values = host_gauges(self._disk, {"versionAsOf": UNSET}, self._clock)
        for name, doc in _OF_HOST.items():
            gauge = GaugeMetricFamily(_gauge(name), doc, labels=("host",))
            if values[name] != UNSET:
                gauge.add_metric((self._host,), values[name])
            yield gauge

    def _labels(self, table: TableCounts) -> tuple[str, str]:
        return printable(table.url), self._host


def _histogram(name: str, values: Mapping[str, int]) -> tuple[list[tuple[str, float]], float]:
    buckets = [
        (f"{bound_ms / 1000:g}", below)
        for bound_ms, below in zip(BOUNDS_MS, cumulate_buckets(values, name), strict=True)
    ]
    return [*buckets, ("+Inf", values[f"{name}Count"])], values[f"{name}Micros"] / 1e6
