"""Workflows, hooks, forms and metadata agree with the package."""

import configparser
import itertools
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools
import yaml

from benchmarks import run, sim_cluster
from scripts.release_notes import package_version, release_notes, with_absolute_links
from tests.support.sparks import FEATURES

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS: dict[str, Any] = {path.name: yaml.safe_load(path.read_text()) for path in GITHUB.glob("workflows/*.yml")}
README = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")


def test_the_matrix_is_what_the_readme_names() -> None:
    """CI has a job for each Spark and each Python that the README names, and for each pair that was tested."""
    matrix = WORKFLOWS["tests.yml"]["jobs"]["versions"]["strategy"]["matrix"]
    assert matrix["spark"] == re.findall(r"\| Spark (\d\.\d) ", README) == [job["spark"] for job in matrix["include"]]
    assert f"for spark in {' '.join(matrix['spark'])}; do" in (ROOT / "scripts" / "test").read_text()
    classifiers = SETUP["metadata"]["classifiers"]
    assert matrix["python"] == re.findall(r":: (3\.\d+)$", classifiers, re.MULTILINE)
    assert f">={matrix['python'][0]}" == SETUP["options"]["python_requires"]
    excluded = {(job["spark"], job["python"]) for job in matrix["exclude"]}
    assert excluded == set(re.findall(r"Spark (\d\.\d) does not support Python (\d\.\d+)", README))
    tested = next(line for line in README.splitlines() if line.startswith("| tested with"))
    pairs = {
        (spark, python)
        for cell in tested.split("|")[2:-1]
        for spark, python in itertools.product(re.findall(r"(\d\.\d)\.\d", cell), re.findall(r"3\.1\d", cell))
    }
    assert len(pairs) >= 6
    assert pairs <= set(itertools.product(matrix["spark"], matrix["python"])) - excluded


def test_the_readme_names_what_not_every_spark_has() -> None:
    """The table has a row for each feature, and says yes for each Spark that has it."""
    rows = [line for line in README.splitlines() if re.search(r"\| (yes|no) \|$", line)]
    columns = re.findall(r"\| Spark (\d\.\d) ", README)
    for feature in FEATURES:
        (row,) = (line for line in rows if feature.title in line)
        answers = row.split("|")[2:-1]
        has = [tuple(map(int, spark.split("."))) >= tuple(map(int, feature.since.split("."))) for spark in columns]
        assert [answer.strip() == "yes" for answer in answers] == has, feature.title


def test_workflows_may_do_little() -> None:
    """Actions are named by commit, with the version beside it. Nothing but a job that publishes may write, and no job waits for ever."""
    writing = set()
    for name, workflow in WORKFLOWS.items():
        text = (GITHUB / "workflows" / name).read_text()
        uses = re.findall(r"uses: (?!\./)(.*)", text)
        assert [use for use in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", use)] == []
        assert workflow["permissions"] == {"contents": "read"}
        assert "concurrency" in workflow
        assert "secrets." not in text
        for job, definition in workflow["jobs"].items():
            assert "uses" in definition or "timeout-minutes" in definition
            if "permissions" in definition:
                writing.add((name, job, *sorted(definition["permissions"])))
    assert writing == {
        ("docs.yml", "deploy", "id-token", "pages"),
        ("release.yml", "publish", "id-token"),
        ("release.yml", "github", "contents"),
    }


def test_hooks_are_the_checks_of_the_tests() -> None:
    """A commit runs the checks of `scripts/test`, with the same arguments."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [hook["entry"].removeprefix(".venv/bin/python -m ").removesuffix(" --force-exclude") for hook in repository["hooks"]]  # fmt: skip
    assert hooks == re.findall(r'^    "\$python" -m ((?:ruff|mypy).*?)(?: &)?$', (ROOT / "scripts" / "test").read_text(), re.MULTILINE)  # fmt: skip


def test_there_is_one_home() -> None:
    """The repository's address is that of setup.cfg wherever it is named. Links to places that do not change are by https."""
    urls = dict(line.split(" = ") for line in SETUP["metadata"]["project_urls"].strip().splitlines())
    home = urls["Source"]
    assert {url for url in urls.values() if not url.startswith(home)} == {urls["Documentation"]}
    forms = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "config.yml").read_text())
    assert all(link["url"].startswith(f"{home}/") for link in forms["contact_links"])
    assert f"\nrepo_url: {home}\n" in (ROOT / "mkdocs.yml").read_text()
    assert f"\nsite_url: {urls['Documentation']}/\n" in (ROOT / "mkdocs.yml").read_text()


def test_no_file_names_a_registry() -> None:
    """Links lead to a project's own page, and pip installs from where the reader has configured it to look."""
    directories = [".github", "benchmarks", "conf", "docs", "examples", "pyspark_lookup", "scripts"]
    files = [
        *ROOT.glob("*"),
        ROOT / ".pre-commit-config.yaml",
        *(path for name in directories for path in (ROOT / name).rglob("*")),
    ]
    suffixes = {"", ".cfg", ".conf", ".css", ".js", ".md", ".py", ".sh", ".toml", ".yaml", ".yml"}
    texts = [path for path in files if path.is_file() and path.suffix in suffixes]
    registry = re.compile(r"(pypi|pythonhosted|npmjs|unpkg|debian)\.(org|com)")
    assert [str(path) for path in texts if registry.search(path.read_text(encoding="utf-8"))] == []


def test_release_notes() -> None:
    """A tag is released if it is that of the version, and the changelog has a dated section for it."""
    changelog = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- A.\n\n## [0.1.0] - 2026-11-30\n\n- B.\n"
    assert release_notes("v0.2.0", "0.2.0", changelog) == "### Added\n\n- A.\n"
    assert release_notes("v0.1.0", "0.1.0", changelog) == "- B.\n"
    for tag, version, text, problem in (
        ("v0.2.0", "0.1.0", changelog, "the tag must be v0.1.0"),
        ("0.2.0", "0.2.0", changelog, "the tag must be v0.2.0"),
        ("v0.3.0", "0.3.0", changelog, "no section"),
        ("v0.2.0", "0.2.0", changelog.replace(" - 2026-12-01", ""), "no section"),
        ("v0.2.0", "0.2.0", changelog.replace("### Added\n\n- A.\n", ""), "no section"),
    ):
        with pytest.raises(ValueError, match=problem):
            release_notes(tag, version, text)
    assert re.fullmatch(r"\d+\.\d+\.\d+", package_version())


def test_links_of_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The description that PyPI shows, and the notes of a release, link to files of the repository at the release's tag."""
    described: dict[str, str] = {}
    monkeypatch.setattr(setuptools, "setup", described.update)
    runpy.run_path(str(ROOT / "setup.py"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    home = SETUP["metadata"]["project_urls"].partition("Source = ")[2].partition("\n")[0]
    for text in (described["long_description"], with_absolute_links(changelog, package_version())):
        links = re.findall(r"\]\(([^)\s]+)\)", text)
        assert [link for link in links if not link.startswith("https://")] == []
        files = [link.partition("#")[0] for link in links if link.startswith(f"{home}/")]
        assert len(files) > 10
        assert all((ROOT / file.removeprefix(f"{home}/blob/v{package_version()}/")).exists() for file in files)


@pytest.mark.nightly
def test_a_replayed_host_is_like_a_real_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host in the simulation of a cluster makes as many requests for as many bytes, at the same times up to random latencies. No lookup fails."""
    monkeypatch.setattr(sys, "argv", ["sim_cluster", "--quick"])
    sim_cluster.main()
    printed = capsys.readouterr().out
    assert "failed" not in printed
    costs, check, requests, *times = run.tables_in(printed)
    assert {row[0] for row in costs.rows} == set(sim_cluster.MODES)
    real, replayed = check.rows[:4], check.rows[4:]
    for real_row, replayed_row in zip(real, replayed, strict=True):
        assert real_row[1] == replayed_row[1]
        assert real_row[2:6] == pytest.approx(replayed_row[2:6], rel=0.1)
        assert real_row[7:] == pytest.approx(replayed_row[7:], abs=1.5)
    assert all(row[-3] <= row[-2] <= row[-1] < 150 for table in times for row in table.rows)
    assert [row[2] for row in requests.rows if row[1] == "a minute"]
