"""What people and programs see of the caches: Prometheus' metrics, the dashboard, the report, the log, hints and sizes."""

import html
import json
import logging
import random
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import pyspark_lookup
from pyspark_lookup.cli.host_commands import HostCollector, series_names
from pyspark_lookup.cli.report import report
from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.core.metrics import COUNTERS, GAUGES, HOST_GAUGES, CacheMetricGroup
from pyspark_lookup.storage.disk import Disk
from pyspark_lookup.storage.host_metrics import Publisher, Reload, Waiting, remember_reload
from tests.support.fakes import FakeClock

DASHBOARD = Path(pyspark_lookup.__file__).parent.parent / "conf" / "grafana" / "lookupcache.json"
CLOCK = FakeClock(1_000_000.0).host()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "cache", 10**9, CacheMetricGroup(), CLOCK.wall_s, random.Random(1))


def counted(disk: Disk, url: str, application: str = "", **values: int) -> Publisher:
    publisher = Publisher(CacheMetricGroup(), disk, url.strip("/").replace("/", "_"), url, CLOCK)
    publisher.application = application
    for name, value in values.items():
        (publisher.metrics.inc if name in COUNTERS else publisher.metrics.set_gauge)(name, value)
    publisher.publish()
    return publisher


def exposed(disk: Disk) -> dict[str, float]:
    """The values of a scrape, by series, table, application and bucket."""
    registry = CollectorRegistry()
    registry.register(HostCollector(disk, CLOCK))
    text = generate_latest(registry).decode()
    return {
        " ".join(
            [sample.name, *(sample.labels[key] for key in ("table", "application", "le") if sample.labels.get(key))]
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_has_the_sums_of_all_processes(disk: Disk) -> None:
    """Counters and times are sums by application, gauges the latest, in seconds and bytes, under the names that `series_names` gives."""
    gauges = {"metadataCacheCount": 1, "versionAsOf": 999_000_000, "latestLoadTime": 1500}
    first = counted(disk, "/t", hitCount=5, ufsGetBytes=100, **gauges)
    second, other_table = counted(disk, "/t", hitCount=7), counted(disk, "/u", hitCount=1)
    apps = [counted(disk, "/t", f"app-{n % 2}", hitCount=10**n) for n in range(4)]
    first.metrics.time("lookupTime", 0.002)
    first.metrics.time("lookupTime", 100.0)
    first.publish()
    samples = {name.removeprefix("lookupcache_"): value for name, value in exposed(disk).items()}
    expected = {
        "hit_total /t": 12, "hit_total /t app-0": 101, "hit_total /t app-1": 1010, "processes /t app-1": 2,
        "hit_total /u": 1, "ufs_get_bytes_total /t": 100, "latest_load_seconds /t": 1.5,
        "version_as_of_timestamp_seconds /t": 999_000, "reload_lag_seconds /t": 1000, "processes /t": 2,
        "lookup_seconds_sum /t": pytest.approx(100.002), "lookup_seconds_bucket /t 0.003": 1,
        "lookup_seconds_bucket /t 60": 1, "lookup_seconds_bucket /t +Inf": 2, "disk_budget": 10**9,
    }  # fmt: skip
    assert {name: samples.get(name) for name in expected} == expected
    assert "latest_load_seconds /u" not in samples
    every = counted(disk, "/v", metadataCacheCount=1, **dict.fromkeys(GAUGES, 1))
    every.remember_waiting("lookup", 0, Waiting(10**12, 1, 10**12))
    names = {name.split()[0] for name in exposed(disk)}
    assert names == series_names()
    assert len(names) > len([*GAUGES, *HOST_GAUGES]) + 30
    del second, other_table, every, apps


def test_the_dashboard() -> None:
    """The dashboard asks only for series that this package exposes, by labels that they have, and loads without edits."""
    text = DASHBOARD.read_text()
    dashboard = json.loads(text)
    series = set(re.findall(r"lookupcache_\w+", text))
    assert len(series) > 25
    assert series <= series_names()
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] and panel["targets"] for panel in panels)
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", text)) <= variables | {"__rate_interval", "__all"}
    assert "__inputs" not in dashboard
    assert set(re.findall(r"(\w+)=~", text)) == {"table", "host", "application"}


def busy(disk: Disk) -> list[Publisher]:
    """A host with two tables. The loads of one fail, and its name contains a script."""
    times = {"lookupTimeCount": 100, "lookupTimeMicros": 10**6, "lookupTimeUpTo10": 60, "lookupTimeUpTo30": 40}
    counts = {"hitCount": 999, "missCount": 1, "resolvedBytes": 10**9, "ufsGetBytes": 10**7}
    good = counted(disk, "s3://bucket/airports", **counts, **times)
    bad = counted(disk, "s3://bucket/<script>alert(1)</script>", numLoadFailures=2, loadCount=1, staleServedCount=5, networkSkippedCount=7)  # fmt: skip
    for n in range(5):
        error = "no answer" if n == 3 else ""
        remember_reload(disk, "k", "s3://bucket/airports", Reload(1000.0 * n, 1.0 + n, "v", 10**6, 10**7, 10**6, error))
    return [good, bad]


def test_the_report_says_what_was_counted(disk: Disk) -> None:
    """The report shows hit rates, latency, bytes saved, reloads (failed ones marked) and advice. Names are escaped, and nothing comes from the network."""
    assert "No process has used this cache directory yet" in report(disk, CLOCK)
    publishers = busy(disk)
    # The third partition was given to another host, and another lookup ended long ago.
    for lookup, partition, at_s, facts, oldest_s in (
        ("a", 0, 1e6, 3, 1e6 - 300), ("a", 1, 1e6 - 1, 0, None), ("a", 2, 1e6 - 3600, 50, 0),
        ("b", 0, 1e6 - 9000, 1200, 1e6 - 200),
    ):  # fmt: skip
        oldest_us = None if oldest_s is None else int(oldest_s * 1e6)
        publishers[0].remember_waiting(lookup, partition, Waiting(int(at_s * 1e6), facts, oldest_us))
    page = report(disk, CLOCK)
    links = re.findall(r'(?:src|href|action)="([^"]*)"', page)
    assert {link for link in links if not link.startswith("data:")} == {"#t1", "#t2"}
    assert not re.search(r"url\(|@import|<script", page)
    words = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())
    for phrase in (
        *("99.9% of keys", "≤ 10 ms half of 100 lookups", "≤ 30 ms 99 of 100", "990 MB saved, 99.0% of re-reading"),
        *(
            "Loads that failed: 2 (1 succeeded)",
            "Nothing to tune",
            "1,203 facts wait for their row, the oldest for 5 min",
            "7 times a network could not be read",
            "<script>alert(1)</script>",
        ),
    ):
        assert phrase in words, phrase
    bars = re.findall(r"<rect[^>]*>", page)
    assert [len(bars), sum('class="failed"' in bar for bar in bars)] == [5, 1]
    for bar in bars:
        x, width = (float(re.findall(rf' {name}="([\d.]+)"', bar)[0]) for name in ("x", "width"))
        assert 0 <= x <= 600 - width + 0.1
    del publishers


def test_the_report_in_a_browser(disk: Disk, tmp_path: Path) -> None:
    """A browser shows it without an error, and without anything wider than a phone."""
    publishers = busy(disk)
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert browser is not None, "no Chromium: scripts/test installs one"
    # Only a script in the page can tell how wide the browser has laid it out.
    probe = "<script>document.title = [document.documentElement.scrollWidth, innerWidth, document.querySelectorAll('rect').length]</script>"
    page = tmp_path / "report.html"
    page.write_text(report(disk, CLOCK).replace("</body>", probe + "</body>"), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += ["--window-size=390,900", f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    browser_run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in browser_run.stderr
    title = re.search(r"<title>(\d+),(\d+),(\d+)</title>", browser_run.stdout)
    page_width, window_width, bars = map(int, title.groups())
    assert page_width <= window_width
    assert bars == 5
    del publishers


def test_a_line_of_the_log_can_be_read_back(caplog: pytest.LogCaptureFixture) -> None:
    """Each field is `key=value`; what would end a value, or the line, is quoted; the record has them as they are."""
    with caplog.at_level(logging.INFO):
        error = 'x="1"\ny\\z'
        log_event(logging.getLogger("pyspark_lookup.tests"), logging.INFO, "reload", table="/a b", error=error, seconds=1.23456, rows=3, none="")  # fmt: skip
    (record,) = caplog.records
    message = record.getMessage()
    assert message == 'lookupcache reload table="/a b" error="x=\\"1\\"\\ny\\\\z" seconds=1.235 rows=3 none=""'
    assert json.loads(message.split("error=")[1].split(" seconds=")[0]) == error
    assert dict(part.split("=", 1) for part in shlex.split(message)[2:])["rows"] == "3"
    assert record.lookup_fields["seconds"] == 1.23456  # type: ignore[attr-defined]
