"""What the README, the configuration files and the changelog say is true."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest

import pyspark_lookup
from pyspark_lookup.columnar.ddl import parse_columns
from pyspark_lookup.options.conf_file import conf_file_options, conf_file_secrets
from pyspark_lookup.options.lookup_options import LookupOptions, options_table
from pyspark_lookup.scan.formats.inference import infer_texts
from pyspark_lookup.spark.session import RECOMMENDED

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "joins.md").read_text(encoding="utf-8")
DIMENSIONS = (ROOT / "docs" / "dimensions.md").read_text(encoding="utf-8")
MANAGED = (ROOT / "docs" / "managed.md").read_text(encoding="utf-8")
SQL = (ROOT / "docs" / "sql.md").read_text(encoding="utf-8")
SECURITY = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
CONF = ROOT / "conf" / "lookupcache.conf"
KNOWN = re.findall(r"^\| `(lookup\.[^`*]+)", options_table(), re.MULTILINE)


def test_options_table() -> None:
    """The table of options is the generated one."""
    found = re.search(r"<!-- options -->\n(.*?)\n?<!-- /options -->", OPTIONS, re.DOTALL)
    assert found is not None
    assert found[1] == options_table(), (
        "put what pyspark_lookup.options.lookup_options.options_table() returns between the markers"
    )


def test_pages_name_known_options() -> None:
    """Every option that the README, the changelog or a page mentions exists."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    mentioned = set(re.findall(r"`(lookup\.[a-z._-]*[a-z])", text))
    prefixes = ("lookup.storage", "lookup.provider.")
    assert {key for key in mentioned if not key.startswith(prefixes)} <= set(KNOWN)


def test_files_guide() -> None:
    """Its Python block gives what stands below it, and its table of types is true."""
    guide = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)\n# (\[.*?\])\n```", guide, re.DOTALL)
    scope: dict[str, object] = {"datetime": datetime}
    exec(block[0].replace("LookupTable(path, options)", "rows = LookupTable(path, options)"), scope)
    assert scope["rows"] == eval(block[1], scope)
    rows = re.findall(r"^\| (`.+?`) \| `([A-Z_]+(?:\([\d, ]+\))?)` \|", guide, re.MULTILINE)
    assert len(rows) == 11
    for values, kind in rows:
        texts = pa.array(re.findall(r"`(.+?)`", values))
        assert infer_texts(texts).type() == parse_columns(f"c {kind}").field("c").type, values


def test_readme_starts_with_what_it_is() -> None:
    """The first screen has what it is for, how it is installed, the two commands and the example, in this order."""
    parts = [README.index(text) for text in ("It is for", "pip install", "scripts/demo", "scripts/test", "```python")]
    assert parts == sorted(parts)
    assert README[: README.index("```python")].count("\n") < 30
    assert README[README.index("UFS") :].startswith("UFS`, the underlying file system")


@pytest.mark.slow
@pytest.mark.spark
def test_readme_examples_run(tmp_path: Path) -> None:
    """The README's Python blocks run as pasted into an activated environment, and show the new row."""
    assert re.findall(r"\|\s*2\|\s*(\w+)\|", pasted(README, tmp_path, shell=False)) == ["NULL", "Bergen", "Bergen"]


@pytest.mark.nightly
@pytest.mark.spark
def test_guide_examples_run(tmp_path: Path) -> None:
    """So do those of the guide to joins."""
    shown = pasted(GUIDE, tmp_path)
    assert "strategy: broadcast (a batch, and 2 rows" in shown
    assert shown.count("Kennedy") >= 3


@pytest.mark.nightly
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


@pytest.mark.nightly
@pytest.mark.spark
def test_sql_examples_run(tmp_path: Path) -> None:
    """And those of the guide to SQL, in spark-sql with a Hive metastore: what follows `--` is what comes."""
    blocks = re.findall(r"```sql\n(.*?)```", SQL, re.DOTALL)
    (tmp_path / "guide.sql").write_text("\n".join(blocks).replace("/tmp/lookup-sql", str(tmp_path)), encoding="utf-8")
    bin_ = Path(pyspark.__file__).parent / "bin"
    command = [bin_ / "spark-sql", "--master", "local[2]", "-S", "-f", "guide.sql"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    lines = [line.replace("\t", " ") for line in ran.stdout.splitlines()]
    versions = [line for line in lines if re.match(r"\d+ 2\d{3}-", line)]
    assert [line.split()[-2:] for line in versions] == [
        ["create", "0"],
        ["append", "2"],
        ["upsert", "2"],
        ["append", "1"],
        ["append", "1"],
        ["overwrite", "4"],
    ]
    assert versions[1].startswith("4 ")
    assert [line for line in lines if line not in versions] == [
        *("EWR 0020", "JFK 0010"),
        *("1 Kennedy", "2 Newark", "3 NULL"),
        "JFK Kennedy",
        "2 2",
        *("BOS NULL", "EWR Newark Liberty", "JFK Kennedy", "LGA LaGuardia"),
        *("EWR Newark NULL", "JFK Kennedy NULL"),
        *("2026-03-01 2.50", "2026-06-01 2.75"),
    ]


@pytest.mark.nightly
@pytest.mark.spark
def test_dimension_examples_run(tmp_path: Path) -> None:
    """And those of the guide to dimensions, which say what they print."""
    shown = pasted(DIMENSIONS, tmp_path)
    said = re.findall(r"^print\(.*\)  # (.*)$", DIMENSIONS, re.MULTILINE)
    assert said == [line for line in shown.splitlines() if line in said]
    assert len(said) == 5


def pasted(text: str, tmp_path: Path, shell: bool = True) -> str:
    """What the Python blocks of a text print, run as one program in an activated environment, and then its shell blocks."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYSPARK_")}
    environ["PATH"] = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), environ["PATH"]])
    environ["PYTHONPATH"] = str(ROOT)  # the examples are installed with a checkout only
    (tmp_path / "pyspark-lookup").write_text(f"#!/bin/sh\nexec '{sys.executable}' -m pyspark_lookup \"$@\"\n")
    (tmp_path / "pyspark-lookup").chmod(0o755)
    shown = ""
    programs = {"python": [sys.executable], **({"sh": ["bash", "-euo", "pipefail"]} if shell else {})}
    for language, program in programs.items():
        script = tmp_path / f"example.{language}"
        script.write_text("\n".join(re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)), encoding="utf-8")
        ran = subprocess.run(
            [*program, script], env=environ, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
        )
        assert ran.returncode == 0, ran.stderr
        shown += ran.stdout
    return shown


# Those with more to be said of what they print have a test of their own.
APART = {"joins.md", "managed.md", "dimensions.md", "sql.md"}
PAGES = [
    pytest.param(
        path, id=path.name, marks=[pytest.mark.spark, pytest.mark.nightly] if "pyspark.sql" in path.read_text() else []
    )
    for path in sorted((ROOT / "docs").glob("*.md"))
    if path.name not in APART
]


@pytest.mark.parametrize("path", PAGES)
def test_pages_run(path: Path, tmp_path: Path) -> None:
    """The blocks of each page run as they stand, and print what the page says that they print."""
    text = path.read_text(encoding="utf-8")
    shown = pasted(text, tmp_path).splitlines()
    said = re.findall(r"^ *print\(.*\)  # (.*)$", text, re.MULTILINE)
    assert said == [line for line in shown if line in said]


def test_every_kind_of_block_is_known() -> None:
    """A page has blocks that run (python, sh, sql), and such that are shown (text, yaml); README's may name scripts of a checkout."""
    for path in (ROOT / "docs").glob("*.md"):
        assert set(re.findall(r"^ *```(\w*)$", path.read_text(encoding="utf-8"), re.MULTILINE)) <= {
            "",
            "python",
            "sh",
            "sql",
            "text",
            "yaml",
        }


def links(path: Path) -> list[str]:
    """The targets of a page's links that are not on the web."""
    found = re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    return [target for target in found if not target.startswith(("http:", "https:"))]


def anchors(path: Path) -> set[str]:
    """The names by which headings of a page are linked to."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))],
    ids=lambda path: path.name,
)
def test_links_lead_somewhere(path: Path) -> None:
    """Every link to a file of the project, or to a heading in one, has its target."""
    for target in links(path):
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_every_page_is_in_the_navigation() -> None:
    """The website's navigation in mkdocs.yml names each page in docs/, and no other; the rest come from scripts/docs_hooks.py."""
    named = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    generated = ["changelog.md", "contributing.md", "index.md"]
    assert sorted(named) == sorted([path.name for path in (ROOT / "docs").glob("*.md")] + generated)


@pytest.mark.nightly
@pytest.mark.spark
def test_demo_claims_hold(tmp_path: Path) -> None:
    """The demo runs, everything it claims about what was fetched and seen holds, and it draws its stream."""
    command = [sys.executable, ROOT / "scripts" / "demo.py", "--plot", tmp_path / "stream.png"]
    command += ["--report", tmp_path / "report.html"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("    yes: ") == 10
    assert (tmp_path / "stream.png").read_bytes().startswith(b"\x89PNG")
    assert "airlines.parquet" in (tmp_path / "report.html").read_text()


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
