"""What the README, the configuration files and the changelog say is true."""

import contextlib
import datetime
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import SparkSession

import pyspark_lookup.testing
from pyspark_lookup.cli import advise, host_commands, table_commands
from pyspark_lookup.cli.host_commands import series_names
from pyspark_lookup.columnar.ddl import parse_columns
from pyspark_lookup.core.metrics import COUNTERS, GAUGES, HOST_GAUGES, TIMES
from pyspark_lookup.lookup.metadata_tables import view_schema
from pyspark_lookup.options.conf_file import conf_file_options, conf_file_secrets
from pyspark_lookup.options.enums import View
from pyspark_lookup.options.lookup_options import options_table
from pyspark_lookup.scan.formats.inference import infer_texts
from pyspark_lookup.sources.managed.change_feed import CHANGE_COLUMNS
from pyspark_lookup.sources.managed.log.state import LOG_RETENTION, VACUUM_AFTER
from pyspark_lookup.sources.registry import OPTIONS, parse_options
from pyspark_lookup.spark.features import DATA_SOURCES
from pyspark_lookup.spark.session import RECOMMENDED
from scripts.licences import direct_requirements, find_licence
from tests.support.fuzzing import BY_NIGHT

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
TOP = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")]
TEXTS = {path.relative_to(ROOT / "docs" if path in DOCS else ROOT).as_posix(): path.read_text(encoding="utf-8") for path in [*TOP, *DOCS]}  # fmt: skip
README = TEXTS["README.md"]
CONF = ROOT / "conf" / "lookupcache.conf"
OPTION_KEYS = re.findall(r"^\| `(lookup\.[^`*]+)", options_table(OPTIONS), re.MULTILINE)


def test_options_table() -> None:
    """The table of options is the generated one."""
    table = re.search(r"<!-- options -->\n(.*?)\n?<!-- /options -->", TEXTS["options.md"], re.DOTALL)
    assert table[1] == options_table(OPTIONS), "put what options_table(OPTIONS) returns between the markers"


def test_pages_name_known_things() -> None:
    """Every option that a page mentions exists, the changelog has this version, blocks are run or shown, and mkdocs.yml names each page."""
    mentioned = set(re.findall(r"`(lookup\.[a-z._-]*[a-z])", "".join(TEXTS.values())))
    prefixes = ("lookup.storage", "lookup.provider.", "lookup.catalog.", "lookup.http.header")
    of_tables = {LOG_RETENTION, VACUUM_AFTER}
    assert {key for key in mentioned if not key.startswith(prefixes)} <= {*OPTION_KEYS, *of_tables}
    assert pyspark_lookup.__version__ in TEXTS["CHANGELOG.md"]
    kinds = {kind for text in TEXTS.values() for kind in re.findall(r"^ *```(\w*)$", text, re.MULTILINE)}
    assert kinds <= {"", "python", "sh", "sql", "text", "yaml", "mermaid"}
    named = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {"index.md", "changelog.md", "contributing.md", "reporting.md", "conduct.md"}
    assert sorted(named) == sorted({path.relative_to(ROOT / "docs").as_posix() for path in DOCS} | pages)


def test_the_picture_of_the_packages() -> None:
    """docs/design.md draws the packages of its table, and no others."""
    picture, _ = re.findall(r"```mermaid\n(.*?)```", TEXTS["design.md"], re.DOTALL)
    assert sorted(re.findall(r'(\w+)\["<b>\1</b>', picture)) == sorted(re.findall(r"^\| `(\w+)/` \|", TEXTS["design.md"], re.MULTILINE))  # fmt: skip


def test_api_reference() -> None:
    """docs/reference/ has each public name once, and no others."""
    text = "".join(text for name, text in TEXTS.items() if name.startswith("reference/"))
    names = re.findall(r"^::: pyspark_lookup\.(\w+)$", text, re.MULTILINE)
    assert sorted([*names, "__version__"]) == sorted(pyspark_lookup.__all__)
    of_tests = re.findall(r"^::: pyspark_lookup\.testing\.(\w+)$", text, re.MULTILINE)
    assert sorted(of_tests) == sorted(pyspark_lookup.testing.__all__)


def test_reference_of_metrics_events_and_views() -> None:
    """The page has all of them: each metric with its meaning and its name in Prometheus, each event that the package logs, the columns of each view."""
    text = TEXTS["reference/metrics.md"]
    rows = re.findall(r"^\| `(\w+)` \| `(lookupcache_\w+)` \| (.*) \|$", text, re.MULTILINE)
    of_times = {f"{name}{part}" for name in TIMES for part in ("Count", "Micros")}
    metrics = {**COUNTERS, **GAUGES, **HOST_GAUGES, **TIMES}
    assert {name: meaning for name, _, meaning in rows} == {name: meaning for name, meaning in metrics.items() if name not in of_times and "UpTo" not in name}  # fmt: skip
    of_histograms = re.compile("_(bucket|count|sum)$")
    series = {of_histograms.sub("", name) if "_seconds_" in name else name for name in series_names()}
    assert {name for _, name, _ in rows} | {"lookupcache_processes"} == series
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "pyspark_lookup").rglob("*.py"))
    events = re.findall(r'log_event\(\s*\w+,\s*[\w.]+,\s*"([\w-]+)"', sources)
    assert sources.count("log_event(") == len(events) + 1
    assert set(re.findall(r"^\| `([\w-]+)` \| (?:INFO|WARNING)", text, re.MULTILINE)) == set(events)
    views = {
        view: view_schema(view).names for view in (View.FILES, View.VERSIONS, View.METRICS, View.SUMMARY, View.TOKEN)
    }
    for view, columns in views.items():
        assert f"| `{view.value}` | {', '.join(f'`{column}`' for column in columns)} |" in text
    (changes,) = re.findall(r"^\| `changes` \| (.*?) \|", text, re.MULTILINE)
    assert re.findall(r"`(\w+)`", changes) == CHANGE_COLUMNS.names


def test_reference_of_the_command_line() -> None:
    """The page has each command with its arguments and its own options."""
    rows = dict(re.findall(r"^\| `([\w-]+)(.*\|)$", TEXTS["reference/command-line.md"], re.MULTILINE))
    commands = [*host_commands.COMMANDS, *table_commands.COMMANDS, *advise.COMMANDS]
    assert sorted(rows) == sorted(str(command.name) for command in commands)
    for command in commands:
        options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        assert set(re.findall(r"`(--[\w-]+)", rows[str(command.name)])) == options - {
            "--option",
            "--cache-dir",
            "--json",
        }
        arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
        assert len(re.findall(r"\[?[A-Z.]+…?\]?", rows[str(command.name)].partition("`")[0])) == len(arguments)


def test_licences_of_dependencies() -> None:
    """docs/dependencies.md names each package that setup.cfg requires, with its extras, and licences as the packages state them that are here."""
    rows = re.findall(r"^\| ([\w-]+) \| (.+) \| (always|with .*) \|$", TEXTS["dependencies.md"], re.MULTILINE)
    installed = {name: [""] if extras == "always" else re.findall("`(\\w+)`", extras) for name, _, extras in rows}
    for extra, names in direct_requirements().items():
        assert [name for name in names if extra not in installed[name] and "" not in installed[name]] == []
        assert not extra or f"| `{extra}`" in TEXTS["dependencies.md"] or f"`{extra}`, " in TEXTS["dependencies.md"] or f", `{extra}` |" in TEXTS["dependencies.md"]  # fmt: skip
    # Earlier releases, which this environment may have, spell them otherwise: BSD License, Apache 2.0.
    kinds = re.compile(r"Apache|BSD|MIT|MPL|PSF|GPL|Zlib|CC0")
    checked = 0
    for name, licence, _ in rows:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            stated = kinds.findall(find_licence(importlib.metadata.metadata(name).json))
            assert set(stated) <= set(kinds.findall(licence)), name
            checked += 1
    assert checked > 25


def test_files_guide() -> None:
    """The page's Python block gives what the comment at its end says, and its table of types is true."""
    guide = TEXTS["files.md"]
    (block,) = re.findall(r"```python\n(.*?)\n# (\[.*?\])\n```", guide, re.DOTALL)
    scope: dict[str, object] = {"datetime": datetime}
    exec(block[0].replace("LookupTable(path, options)", "rows = LookupTable(path, options)"), scope)
    assert scope["rows"] == eval(block[1], scope)
    rows = re.findall(r"^\| (`.+?`) \| `([A-Z_]+(?:\([\d, ]+\))?)` \|", guide, re.MULTILINE)
    assert len(rows) == 11
    for values, kind in rows:
        texts = pa.array(re.findall(r"`(.+?)`", values))
        assert infer_texts(texts).type() == parse_columns(f"c {kind}").field("c").type, values


@pytest.mark.slow
@pytest.mark.spark
def test_readme_examples_run(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The README's Python blocks show the new row: by day in the tests' session, by night as pasted into an activated environment."""
    text = README
    if not DATA_SOURCES:
        load = 'spark.read.format("lookupcache").load(path)'
        assert load in text
        for old, new in (
            (load, "read_table(spark, path)"), ("import lookup_join", "import lookup_join, read_table"),
            ("cities.toArrow()", "pa.Table.from_pandas(cities.toPandas())"), ("import tempfile", "import tempfile; import pyarrow as pa"),
        ):  # fmt: skip
            text = text.replace(old, new)
    if BY_NIGHT:
        output = pasted(text, tmp_path, shell=False)
    else:
        exec(blocks(text, "python"), {})
        output = capsys.readouterr().out
    assert re.findall(r"\|\s*2\|\s*(\w+)\|", output) == ["NULL", "Bergen", "Bergen"]


@pytest.mark.nightly
@pytest.mark.spark
def test_sql_examples_run(tmp_path: Path) -> None:
    """The examples of the guide to SQL run in spark-sql with a Hive metastore: the comments after `--` show their results."""
    guide = blocks(TEXTS["sql.md"], "sql").replace("/tmp/lookup-sql", str(tmp_path))
    (tmp_path / "guide.sql").write_text(guide, encoding="utf-8")
    bin_ = Path(pyspark.__file__).parent / "bin"
    command = [bin_ / "spark-sql", "--master", "local[2]", "-S", "-f", "guide.sql"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    lines = [line.replace("\t", " ") for line in ran.stdout.splitlines()]
    versions = [line for line in lines if re.match(r"\d+ 2\d{3}-", line)]
    commits = [" ".join(line.split()[-2:]) for line in versions]
    assert commits == ["create 0", "append 2", "upsert 2", "append 1", "append 1", "overwrite 4"]
    assert versions[1].startswith("4 ")
    assert [line for line in lines if line not in versions] == [
        *("EWR 0020", "JFK 0010"),
        *("1 Kennedy", "2 Newark", "3 NULL"),
        "JFK Kennedy",
        "2 2",
        *("BOS NULL", "EWR Newark Liberty", "JFK Kennedy", "LGA LaGuardia"),
        *("EWR Newark NULL", "JFK Kennedy NULL"),
        *("BOS", "LGA"),
        *("2026-03-01 2.50", "2026-06-01 2.75"),
    ]


def blocks(text: str, language: str) -> str:
    return "\n".join(re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL))


def pasted(text: str, tmp_path: Path, shell: bool = True) -> str:
    """The output of a text's Python blocks, run as one program in an activated environment, and then that of its shell blocks."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYSPARK_")}
    environ["PATH"] = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), environ["PATH"]])
    environ["PYTHONPATH"] = str(ROOT)  # the examples are installed with a checkout only
    (tmp_path / "pyspark-lookup").write_text(f"#!/bin/sh\nexec '{sys.executable}' -m pyspark_lookup \"$@\"\n")
    (tmp_path / "pyspark-lookup").chmod(0o755)
    output = ""
    programs = {"python": [sys.executable], **({"sh": ["bash", "-euo", "pipefail"]} if shell else {})}
    for language, program in programs.items():
        script = tmp_path / f"example.{language}"
        script.write_text(blocks(text, language), encoding="utf-8")
        shared: dict[str, Any] = {"env": environ, "cwd": tmp_path, "capture_output": True, "text": True}
        ran = subprocess.run([*program, script], check=False, timeout=200, **shared)
        assert ran.returncode == 0, ran.stderr
        output += ran.stdout
    return output


EXPECTED_OUTPUT: dict[str, dict[str, list[str]]] = {
    "joins.md": {r"strategy: (\w+ \(a batch) of about": ["cache (a batch"] * 2, r"Kennedy": ["Kennedy"] * 3},
    "managed.md": {
        r"^\| (BOS|EWR|JFK|LGA)\|": ["BOS", "EWR", "JFK", "LGA"], r"^\['BOS', 'EWR', (.*)\]$": ["'JFK', 'LGA'"],
        r"\|\s*1\|\s*JFK\|(.*?)\|": ["John F. Kennedy"], r"^[0-9a-f]{32}:8:9223372036854775807::\n(.*)$": ["2"],
        r"^3 4\n(.*)$": ["3"], r"^\{'files': 0, 'bytes': 0, (.*)\}": ["'oldest': None"],
        r"\| JFK\|John F. Kennedy\|\s+(\w+)\|": ["insert"],
        r"\|\s*(create|append|upsert|delete|overwrite)\|":
            ["create", "append", "append", "append", "upsert", "delete", "upsert", "append", "overwrite"],
    },
}  # fmt: skip
PAGES = [
    pytest.param(
        path,
        id=path.name,
        marks=[pytest.mark.spark, pytest.mark.nightly]
        if "pyspark.sql" in path.read_text()
        else [pytest.mark.nightly]  # many commands, each a process of its own
        if path.name == "operations.md"
        else [],
    )
    for path in DOCS
    if path.name != "sql.md" and re.search(r"```(python|sh)$", path.read_text(), re.MULTILINE)
]


BY_DAY = [page.values[0] for page in PAGES if not page.marks]
RUN_EACH = (
    "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path, run_name='__main__'); print('--- end of page')"
)


@pytest.fixture(scope="module")
def everyday_output(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The output of the pages that run by day, by name: all run in one process, for the sake of its imports."""
    home = tmp_path_factory.mktemp("pages")
    for path in BY_DAY:
        (home / path.name).write_text(blocks(TEXTS[path.name], "python"), encoding="utf-8")
        assert "```sh" not in TEXTS[path.name]
    command = [sys.executable, "-c", RUN_EACH, *(path.name for path in BY_DAY)]
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=home, capture_output=True, text=True, check=False, timeout=200
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    outputs = ran.stdout.split("--- end of page\n")
    return {path.name: output for path, output in zip(BY_DAY, outputs, strict=False)}


@pytest.mark.parametrize("path", PAGES)
def test_pages_run(path: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The blocks of each page run as they stand, and print what the page says that they print."""
    if path in BY_DAY:
        output = request.getfixturevalue("everyday_output")[path.name]
    else:
        output = pasted(TEXTS[path.name], tmp_path)
    for pattern, expected in EXPECTED_OUTPUT.get(path.name, {}).items():
        assert re.findall(pattern, output, re.MULTILINE)[: len(expected)] == expected
    if path.name not in EXPECTED_OUTPUT:
        promised_lines = re.findall(r"^ *print\(.*\)  # (.*)$", TEXTS[path.name], re.MULTILINE)
        assert promised_lines == [line for line in output.splitlines() if line in promised_lines]


@pytest.mark.parametrize("path", [*TOP, *DOCS, *(ROOT / ".github").glob("*.md")], ids=lambda path: path.relative_to(ROOT).as_posix())  # fmt: skip
def test_links_lead_somewhere(path: Path) -> None:
    """Every link to a file of the project, or to a heading in one, has its target."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            name, _, anchor = target.partition("#")
            file = path.parent / name if name else path
            assert file.exists(), target
            lines = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE) if anchor else [""]
            assert anchor in {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}, target


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


def test_conf_file(tmp_path: Path) -> None:
    """conf/lookupcache.conf sets nothing; each line that is uncommented is a known option, valid with all others, and mostly the default."""
    assert conf_file_options({"LOOKUPCACHE_CONF": str(CONF)}) == {}
    copy = tmp_path / "lookupcache.conf"
    copy.write_text(re.sub(r"(?m)^#(?=\S)", "", CONF.read_text(encoding="utf-8")), encoding="utf-8")
    values = conf_file_options({"LOOKUPCACHE_CONF": str(copy)})
    path = {"path": "s3://bucket/dim"}
    parse_options(path, conf=values)
    assert [key for key in values if key not in OPTION_KEYS and not key.startswith("lookup.storage.")] == []
    assert set(conf_file_secrets({"LOOKUPCACHE_CONF": str(copy)})) == {"key", "secret"}
    examples = (
        "full-cache.max-staleness full-cache.retain full-cache.blackout metadata.source metadata.sync-interval settle"
    )
    examples = {f"lookup.{key}" for key in f"{examples} cache.dir cache.max-bytes on-version-gone".split()}
    defaults = {key: value for key, value in values.items() if key not in examples and ".storage." not in key}
    assert len(defaults) >= 6
    assert parse_options(path, conf=defaults) == parse_options(path, conf={})
