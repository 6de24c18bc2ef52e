"""Commands that work on this host's cache directory."""

from __future__ import annotations

import dataclasses
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pyspark_lookup.cli.output import ABSENT, CACHE_DIR, CLOCK, JSON, bytes_text, count_text, open_disk, show, shown_url
from pyspark_lookup.cli.report import report
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.credentials import printable
from pyspark_lookup.core.metrics import (
    BOUNDS_MS,
    COUNTERS,
    GAUGES,
    HOST_GAUGES,
    TABLE_GAUGES,
    TIMES,
    UNSET,
    bucket_names,
    cumulate_buckets,
)
from pyspark_lookup.errors import OptionError, raise_ours
from pyspark_lookup.storage.disk import Disk
from pyspark_lookup.storage.host_metrics import TableCounts, disk_gauges, read_table_counts

_PREFIX = "lookupcache_"
_LABELS = ("table", "host")
_COUNTED = (*_LABELS, "application")
_IN_SECONDS = {
    "latestLoadTime": "latest_load_seconds",
    "versionAsOf": "version_as_of_timestamp_seconds",
    "reloadLag": "reload_lag_seconds",
    "lateOldest": "late_oldest_seconds",
}
_OF_TABLES = {**GAUGES, **TABLE_GAUGES}
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
    """The names of all Prometheus series that this host serves, as queries use them."""
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
        values = disk_gauges(self._disk)
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


@click.command()
@click.argument("path", required=False)
@CACHE_DIR
@JSON
def stats(path: str | None, cache_dir: str | None, as_json: bool) -> None:
    """Show this host's counters of each table (or of the table at PATH), and disk use. Exit code 3 if there are no counters of that table."""
    disk = open_disk(cache_dir)
    all_tables = read_table_counts(disk, CLOCK)
    url = None if path is None else shown_url(path, cache_dir)
    tables = [table for table in all_tables if url in (None, table.url)]
    space = dataclasses.asdict(disk.space())
    if as_json:
        show({"tables": [dataclasses.asdict(table) for table in tables], "disk": space}, as_json)
    if url is not None and not tables:
        known_urls = ", ".join(table.url for table in all_tables) or "none"
        click.echo(f"no process of this host has counters for {url}; tables known here: {known_urls}", err=True)
        sys.exit(ABSENT)
    if as_json:
        return
    for table in tables:
        click.echo(f"{table.url}  ({table.processes} processes)")
        for name in (*COUNTERS, *GAUGES, "reloadLag"):
            if table.values[name] not in (0, UNSET) and "UpTo" not in name:
                click.echo(f"  {name:<28} {count_text(name, table.values[name]):>24}")
    click.echo(
        f"cache directory: {bytes_text(space['blocks'])} of blocks, {bytes_text(space['segments'])} of snapshots and shared loads, "
        f"{bytes_text(space['records'])} of records; at most {bytes_text(space['budget'])} in all; {bytes_text(space['free'])} free"
    )


@click.command()
@click.option(
    "--repair", is_flag=True, help="Remove damaged files and leftovers; their contents are fetched again when needed."
)
@CACHE_DIR
@JSON
def check(repair: bool, cache_dir: str | None, as_json: bool) -> None:
    """Read everything in the cache directory and report what is damaged. Exit code 3 if something is damaged and was not repaired."""
    damage = open_disk(cache_dir).check(repair)
    if as_json:
        show({**dataclasses.asdict(damage), "repaired": repair}, as_json)
    else:
        click.echo(f"{damage.blocks:,} blocks, {bytes_text(damage.bytes)}")
        for problem, names in (("damaged", damage.damaged), ("left over", damage.leftovers)):
            for name in names:
                click.echo(f"{problem}: {name}{' (removed)' if repair else ''}")
    if damage.damaged and not repair:
        sys.exit(ABSENT)


@click.command()
@CACHE_DIR
@JSON
def clear(cache_dir: str | None, as_json: bool) -> None:
    """Empty the cache: blocks, snapshots, shared loads, records, counters of processes that have ended. Running queries go on, and fetch again
    what they need."""
    file_count, byte_count = open_disk(cache_dir).clear()
    show({"files": file_count, "bytes": byte_count}, as_json)


@click.command("serve-metrics")
@click.option("--port", type=click.IntRange(0, 65535), default=9425, show_default=True, help="0: any free port.")
@click.option(
    "--address", default="127.0.0.1", show_default=True, help="The address to listen on; 0.0.0.0: all addresses."
)
@click.option(
    "--textfile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the metrics to this file once, for node_exporter, instead of serving them.",
)
@CACHE_DIR
def serve_metrics(port: int, address: str, textfile: Path | None, cache_dir: str | None) -> None:
    """Serve this host's metrics to Prometheus, at /metrics, until interrupted."""
    registry = CollectorRegistry()
    registry.register(HostCollector(open_disk(cache_dir), CLOCK))
    if textfile is not None:
        write_to_textfile(str(textfile), registry)
        return
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as problem:
        raise_ours(
            OptionError(f"--address {address} --port {port}: {problem.strerror}: choose another address or port"),
            problem,
        )
    click.echo(f"serving metrics at http://{address}:{server.server_port}/metrics")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    server.shutdown()
    thread.join()


@click.command("report")
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT.HTML")
@CACHE_DIR
def report_command(target: Path, cache_dir: str | None) -> None:
    """Write one page about this host's caches: hit rates, latency, bytes saved, reloads, and what to tune next."""
    if target.exists() and not target.read_bytes()[:512].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise OptionError(
            f"{target} exists and is not an HTML page, so it is not overwritten: give another name for OUT.HTML"
        )
    target.write_text(report(open_disk(cache_dir), CLOCK), encoding="utf-8")
    click.echo(f"wrote {target}")


COMMANDS = (stats, check, clear, serve_metrics, report_command)
