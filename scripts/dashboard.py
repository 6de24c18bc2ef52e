"""Draws conf/grafana/lookupcache.json as it looks over a run of the demo: each panel's queries, answered by a real Prometheus.

Started by scripts/dashboard. It shows that Prometheus understands every query, and what it answers. The drawing is ours, not
Grafana's. Also takes a picture of the demo's report. Exits with 1 if a query fails, or most panels stay empty.
"""

import argparse
import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

ROOT = Path(__file__).parents[1]
INTERVAL_S = 1
UNITS = {
    "s": (1e3, " ms"),
    "bytes": (1e-6, " MB"),
    "Bps": (1e-3, " kB/s"),
    "percentunit": (100, " %"),
    "ops": (1, "/s"),
    "reqps": (1, "/s"),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: list[Any]) -> Iterator[None]:
    """Run a program until the block ends."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


def ask(url: str, path: str, **parameters: Any) -> Any:
    with urllib.request.urlopen(f"{url}{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
        return json.loads(answer.read())


def wait_until_served(url: str, path: str) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url + path, timeout=5).read()
            return
        time.sleep(0.2)
    raise SystemExit(f"{url} does not answer")


def series(url: str, query: str, start: float, end: float) -> list[dict[str, Any]]:
    """The results of a panel's query over a period, with its variables replaced as Grafana does for All."""
    plain = query.replace("$__rate_interval", f"{10 * INTERVAL_S}s")
    for variable in ("$table", "$host", "$application"):
        plain = plain.replace(variable, ".*")
    return list(ask(url, "/api/v1/query_range", query=plain, start=start, end=end, step=INTERVAL_S)["data"]["result"])


def legend(text: str, labels: dict[str, str]) -> str:
    label = re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], "").rsplit("/", 1)[-1], text)
    return label.strip()


def draw(url: str, start: float, end: float, target: Path) -> int:
    """Draw all panels in their places. Returns how many have data."""
    panels = json.loads((ROOT / "conf" / "grafana" / "lookupcache.json").read_text())["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = plt.figure(figsize=(14, height * 0.36))
    filled = 0
    for panel in panels:
        place = panel["gridPos"]
        x0, top, wide, high = place["x"] / 24, 1 - place["y"] / height, place["w"] / 24, place["h"] / height
        axes = figure.add_axes((x0 + 0.045, top - high + 0.2 / height * 8, wide - 0.065, high - 0.34 / height * 8))
        axes.set_title(panel["title"], fontsize=8, loc="left")
        scale, unit = UNITS.get(panel["fieldConfig"]["defaults"]["unit"], (1, ""))
        queries = [
            (target, labelled) for target in panel["targets"] for labelled in series(url, target["expr"], start, end)
        ]
        lines = [
            (
                legend(target["legendFormat"], labelled["metric"]),
                [(float(at) - start, float(value) * scale) for at, value in labelled["values"]],
            )
            for target, labelled in queries
        ]
        lines = [(name, [(at, value) for at, value in points if not math.isnan(value)]) for name, points in lines]
        lines = [(name, points) for name, points in lines if points]
        filled += bool(lines)
        if unit == " ms" and max((value for _, points in lines for _, value in points), default=0) > 1000:
            lines = [(name, [(at, value / 1000) for at, value in points]) for name, points in lines]
            unit = " s"
        if panel["type"] == "stat":
            axes.axis("off")
            latest = f"{lines[0][1][-1][1]:.3g}{unit}" if lines else "no data"
            axes.text(0.5, 0.4, latest, fontsize=20, ha="center", va="center", color="#1f7a4d")
            continue
        for name, points in lines:
            axes.plot([at for at, _ in points], [value for _, value in points], label=name, linewidth=1.2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _, unit=unit: f"{value:g}{unit}"))
        axes.tick_params(labelsize=6)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if any(name for name, _ in lines):
            axes.legend(fontsize=5.5, ncols=2, loc="best")
    figure.savefig(target, dpi=80)
    return filled


def picture(page: Path, target: Path) -> None:
    """A screenshot of a page in a browser."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser is not None
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=900,1330"]
    subprocess.run([*command, f"--screenshot={target}", page.as_uri()], check=True, capture_output=True, timeout=120)


def main(home: Path, out: Path) -> None:
    cache = home / "demo" / "cache"
    cache.mkdir(parents=True, mode=0o700)
    metrics, port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    scrape = {"job_name": "lookupcache", "static_configs": [{"targets": [f"127.0.0.1:{metrics}"]}]}
    config = {"global": {"scrape_interval": f"{INTERVAL_S}s"}, "scrape_configs": [scrape]}
    (home / "prometheus.yml").write_text(json.dumps(config))  # YAML knows JSON
    serve = [sys.executable, "-m", "pyspark_lookup", "serve-metrics", "--port", str(metrics), "--cache-dir", str(cache)]
    prometheus = ["prometheus", f"--config.file={home / 'prometheus.yml'}", f"--storage.tsdb.path={home / 'tsdb'}"]
    prometheus += [f"--web.listen-address=127.0.0.1:{port}"]
    with running(serve), running(prometheus):
        wait_until_served(f"http://127.0.0.1:{metrics}", "/metrics")
        wait_until_served(url, "/-/ready")
        start = time.time()
        demo = [sys.executable, ROOT / "scripts" / "demo.py", "--home", home / "demo", "--report", home / "report.html"]
        subprocess.run([*demo, "--plot", home / "stream.png"], check=True)
        time.sleep(3 * INTERVAL_S)
        filled = draw(url, start, time.time(), out / "dashboard.png")
    picture(home / "report.html", out / "report.png")
    print(f"drew {filled} panels with data in {out / 'dashboard.png'}, and {out / 'report.png'}")
    sys.exit(filled < 12)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--home", type=Path, help="where to work, new (default: a temporary directory)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lookupcache-dashboard-") as directory:
        main(arguments.home or Path(directory), arguments.out)
