"""What the README, the configuration files and the changelog say is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyspark_lookup
from pyspark_lookup.conf import conf_file_options, conf_file_secrets
from pyspark_lookup.options import LookupOptions, options_table
from pyspark_lookup.spark.session import RECOMMENDED

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "joins.md").read_text(encoding="utf-8")
DIMENSIONS = (ROOT / "docs" / "dimensions.md").read_text(encoding="utf-8")
MANAGED = (ROOT / "docs" / "managed.md").read_text(encoding="utf-8")
CONF = ROOT / "conf" / "lookupcache.conf"
KNOWN = re.findall(r"^\| `(lookup\.[^`*]+)", options_table(), re.MULTILINE)


def test_readme_options_table() -> None:
    """The README's table of options is the generated one."""
    found = re.search(r"<!-- options -->\n(.*?)\n?<!-- /options -->", README, re.DOTALL)
    assert found is not None
    assert found[1] == options_table(), "put what pyspark_lookup.options.options_table() returns between the markers"


def test_readme_names_known_options() -> None:
    """Every option that the README or the changelog mentions exists."""
    text = README + GUIDE + DIMENSIONS + MANAGED + (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    mentioned = set(re.findall(r"`(lookup\.[a-z._-]*[a-z])", text))
    prefixes = ("lookup.storage", "lookup.provider.")
    assert {key for key in mentioned if not key.startswith(prefixes)} <= set(KNOWN)


def test_readme_starts_with_what_it_is() -> None:
    """The first screen has what it does not do, the two commands and the example, in this order."""
    parts = [README.index(text) for text in ("does **not**", "scripts/demo", "scripts/test", "```python")]
    assert parts == sorted(parts)
    assert README[: README.index("```python")].count("\n") < 30


@pytest.mark.slow
@pytest.mark.spark
def test_readme_examples_run(tmp_path: Path) -> None:
    """The README's Python blocks run as pasted into an activated environment, and show the new row."""
    assert re.findall(r"\|\s*2\|\s*(\w+)\|", pasted(README, tmp_path)) == ["NULL", "Bergen", "Bergen"]


@pytest.mark.slow
@pytest.mark.spark
def test_guide_examples_run(tmp_path: Path) -> None:
    """So do those of the guide to joins."""
    shown = pasted(GUIDE, tmp_path)
    assert "strategy: broadcast (a batch, and 2 rows" in shown
    assert shown.count("Kennedy") >= 3


@pytest.mark.slow
@pytest.mark.spark
def test_managed_examples_run(tmp_path: Path) -> None:
    """And those of the guide to managed tables."""
    shown = pasted(MANAGED, tmp_path)
    assert re.findall(r"^\| (BOS|EWR|JFK|LGA)\|", shown, re.MULTILINE)[:4] == ["BOS", "EWR", "JFK", "LGA"]
    assert "['BOS', 'EWR', 'JFK', 'LGA']" in shown
    assert re.search(r"\|\s*1\|\s*JFK\|John F. Kennedy\|", shown)
    assert re.search(r"^[0-9a-f]{32}:8:9223372036854775807::\n2$", shown, re.MULTILINE)
    assert "\n3 4\n3\n" in shown
    assert "{'files': 0, 'bytes': 0, 'oldest': None}" in shown
    assert re.search(r"\| JFK\|John F. Kennedy\|\s+insert\|", shown)
    assert re.findall(r"\|\s*(create|append|upsert|delete|overwrite)\|", shown) == [
        "create",
        "append",
        "append",
        "append",
        "upsert",
        "delete",
        "upsert",
        "append",
        "overwrite",
    ]


@pytest.mark.slow
@pytest.mark.spark
def test_dimension_examples_run(tmp_path: Path) -> None:
    """And those of the guide to dimensions, which say what they print."""
    shown = pasted(DIMENSIONS, tmp_path)
    said = re.findall(r"^print\(.*\)  # (.*)$", DIMENSIONS, re.MULTILINE)
    assert said == [line for line in shown.splitlines() if line in said]
    assert len(said) == 5


def pasted(text: str, tmp_path: Path) -> str:
    """What the Python blocks of a text print, run as one program in an activated environment."""
    script = tmp_path / "example.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), encoding="utf-8")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYSPARK_")}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ["PATH"]])
    ran = subprocess.run(
        [sys.executable, script], env=environ, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.spark
def test_demo_claims_hold(tmp_path: Path) -> None:
    """The demo runs, everything it claims about what was fetched and seen holds, and it draws its stream."""
    command = [sys.executable, ROOT / "scripts" / "demo.py", "--plot", tmp_path / "stream.png"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("    yes: ") == 10
    assert (tmp_path / "stream.png").read_bytes().startswith(b"\x89PNG")


def test_spark_defaults_are_the_recommended_ones() -> None:
    """conf/spark-defaults.conf holds what configure() sets, each line after a comment that says why."""
    lines = (ROOT / "conf" / "spark-defaults.conf").read_text(encoding="utf-8").splitlines()
    settings = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert dict(settings) == RECOMMENDED
    assert len(settings) == len(RECOMMENDED)
    assert all(lines[at - 1].startswith("# ") for at, line in enumerate(lines) if line.startswith("spark."))


def uncommented(tmp_path: Path) -> dict[str, str]:
    """What the shipped conf file says with every commented line in use."""
    copy = tmp_path / "lookupcache.conf"
    copy.write_text(re.sub(r"(?m)^#(?=\S)", "", CONF.read_text(encoding="utf-8")), encoding="utf-8")
    return conf_file_options({"LOOKUPCACHE_CONF": str(copy)})


def test_conf_file_changes_nothing_as_shipped() -> None:
    """conf/lookupcache.conf loads, and sets nothing until a line is uncommented."""
    assert conf_file_options({"LOOKUPCACHE_CONF": str(CONF)}) == {}


def test_conf_file_lines_are_valid(tmp_path: Path) -> None:
    """Every line of conf/lookupcache.conf is a known option with a valid value, all of them together too."""
    values = uncommented(tmp_path)
    LookupOptions.parse({"path": "s3://bucket/dim"}, conf=values)
    for key in values:
        assert key in KNOWN or key.startswith("lookup.storage."), key
    assert set(conf_file_secrets({"LOOKUPCACHE_CONF": str(tmp_path / "lookupcache.conf")})) == {"key", "secret"}


def test_conf_file_shows_the_defaults(tmp_path: Path) -> None:
    """A commented line is the default, but for those whose comment says what the default is."""
    examples = {
        "lookup.metadata.source",
        "lookup.metadata.sync-interval",
        "lookup.settle",
        "lookup.cache.dir",
        "lookup.on-version-gone",
    }
    examples |= {f"lookup.full-cache.{key}" for key in ("max-staleness", "retain", "blackout")}
    shown = {k: v for k, v in uncommented(tmp_path).items() if k not in examples and ".storage." not in k}
    path = {"path": "s3://bucket/dim"}
    assert len(shown) >= 6
    assert LookupOptions.parse(path, conf=shown) == LookupOptions.parse(path)


def test_changelog_mentions_the_version() -> None:
    """The changelog has this version."""
    assert pyspark_lookup.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
