"""The command line as scripts use it: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import pyspark_lookup
from pyspark_lookup import LookupTable
from pyspark_lookup.cli import host_commands, main, table_commands

Run = Callable[..., "Ran"]


class Ran:
    """A command that has ended: its exit code, what it printed, and said beside that."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, on a cache directory of its own."""

    def go(*arguments: str, cache: bool = True) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, *(["--cache-dir", str(cache_dir)] if cache else [])])
        said = capsys.readouterr()
        return Ran(ended.value.code if isinstance(ended.value.code, int) else 0, said.out, said.err)

    return go


@pytest.fixture
def dim(tmp_path: Path) -> Path:
    """A plain table of ten rows."""
    (tmp_path / "dim").mkdir()
    pq.write_table(pa.table({"id": range(10), "name": [f"n{n}" for n in range(10)]}), tmp_path / "dim" / "a.parquet")
    return tmp_path / "dim"


@pytest.fixture
def managed(tmp_path: Path, cache_dir: Path) -> LookupTable:
    """A managed table of three commits of one row."""
    options = {"lookup.keys": "id", "lookup.write.compact-after": "0", "lookup.cache.dir": str(cache_dir)}
    table = LookupTable(str(tmp_path / "managed"), options)
    for id_ in range(3):
        table.write(pa.table({"id": [id_], "name": [f"n{id_}"]}))
    return table


def test_describe(run: Run, dim: Path) -> None:
    """What a table is, for people and as JSON."""
    found = run("describe", str(dim), "--json")
    assert found.code == 0
    assert found.json["columns"] == {"id": "int64", "name": "string"}
    assert (found.json["files"], found.json["kind"]) == (1, "DIRECTORY")
    assert re.search(r"^columns +id int64, name string$", run("describe", str(dim)).out, re.MULTILINE)


def test_get(run: Run, dim: Path) -> None:
    """Rows by keys of the command line, in the key column's type; what is not there is said, and is exit code 3."""
    found = run("get", str(dim), "3", "1", "-o", "lookup.keys=id", "--json")
    assert (found.code, found.json) == (0, [{"id": 3, "name": "n3"}, {"id": 1, "name": "n1"}])
    lines = run("get", str(dim), "3", "-o", "lookup.keys=id").out.splitlines()
    assert [line.split() for line in lines] == [["id", "name"], ["3", "n3"]]
    partly = run("get", str(dim), "3", "99", "-o", "lookup.keys=id", "--json")
    assert (partly.code, len(partly.json), partly.err) == (3, 1, "no row for 99\n")
    two = run("get", str(dim), "3,n3", "-o", "lookup.keys=id,name", "--json")
    assert two.json == [{"id": 3, "name": "n3"}]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["get", "DIM", "x", "-o", "lookup.keys=id"], 2, "column id is int64"),
        (["get", "DIM", "1,2", "-o", "lookup.keys=id,name", "3"], 2, "2 values are needed, for id, name"),
        (["get", "DIM", "1"], 2, "lookup.keys is missing"),
        (["get", "DIM"], 2, "KEYS"),
        (["describe", "DIM", "-o", "lookup.keys"], 2, "expected KEY=VALUE"),
        (["describe", "DIM", "-o", "lookup.keys=id", "-o", "lookup.keys=id"], 2, "given twice"),
        (["describe", "DIM", "-o", "lookup.keyz=id"], 2, "lookup.keyz"),
        (["describe", "DIM/gone"], 1, "does not exist"),
        (["compact", "DIM"], 1, "no managed table"),
        (["vacuum", "DIM", "--older-than", "1 h"], 2, "604800"),
        (["vacuum", "DIM", "--older-than", "soon"], 2, "older_than"),
        (["nothing"], 2, "No such command"),
    ],
)
def test_what_goes_wrong_says_so(run: Run, dim: Path, arguments: list[str], code: int, said: str) -> None:
    """An error is one message on stderr and its exit code, never a traceback; nothing is on stdout."""
    found = run(*(argument.replace("DIM", str(dim)) for argument in arguments), cache=arguments[0] != "nothing")
    assert (found.code, found.out) == (code, "")
    assert said in found.err
    assert "Traceback" not in found.err


def test_versions_and_files(run: Run, dim: Path, managed: LookupTable) -> None:
    """The log's versions of a managed table, those that the host knows of a plain one; and the current files."""
    path = managed.given["path"]
    found = run("versions", path, "--json").json
    assert [(row["operation"], row["rows_added"]) for row in found] == [("create", 0), *[("append", 1)] * 3]
    assert run("versions", path).out.splitlines()[0].split()[:3] == ["version", "committed_at", "operation"]
    assert [row["rows"] for row in run("files", path, "--json").json] == [1, 1, 1]
    run("get", str(dim), "1", "-o", "lookup.keys=id")
    assert [row["files"] for row in run("versions", str(dim), "--json").json] == [1]
    assert str(dim / "a.parquet") in run("files", str(dim)).out


def test_upkeep(run: Run, managed: LookupTable) -> None:
    """Compaction and vacuum from the command line."""
    path = managed.given["path"]
    found = run("compact", path, "--json").json
    assert (found["files_before"], found["files"]) == (3, 1)
    assert run("vacuum", path, "--older-than", "0 s", "--force", "--json").json["files"] == 3
    assert managed.scan().num_rows == 3


def test_warm_and_stats(run: Run, dim: Path) -> None:
    """A warm host answers without the store; what was done for that is in `stats`."""
    warmed = run("warm", str(dim), "-o", "lookup.keys=id", "--json")
    assert (warmed.code, warmed.json["rows"]) == (0, 10)
    assert "10 rows" in run("warm", str(dim), "-o", "lookup.keys=id").out
    found = run("stats", "--json").json
    (table,) = found["tables"]
    assert table["url"].endswith("/dim")
    assert table["values"]["snapshotBuildCount"] == 1
    assert found["disk"]["segments"] > 0
    assert len(run("stats", str(dim / ".." / "dim"), "--json").json["tables"]) == 1
    shown = run("stats", str(dim)).out
    assert re.search(r"snapshotBuildCount +1$", shown, re.MULTILINE)
    assert re.search(r"ufsGetBytes +[\d.]+ [KM]?i?B$", shown, re.MULTILINE)
    assert re.search(r"loadTimeMicros +[\d.]+ s$", shown, re.MULTILINE)
    for name in ("dim", f"{dim}2"):  # a part of a place, and another one
        absent = run("stats", name, "--json")
        assert (absent.code, absent.json["tables"]) == (3, [])
        assert str(dim) in absent.err


def test_check_and_clear(run: Run, dim: Path, cache_dir: Path) -> None:
    """Damage is found (exit code 3), mended, and gone; a cleared cache is empty, and works."""
    run("warm", str(dim), "-o", "lookup.keys=id")
    assert run("check").code == 0
    (block, *_) = [path for path in (cache_dir / "v1" / "blocks").rglob("*-*") if path.is_file()]
    block.write_bytes(b"noise")
    found = run("check", "--json")
    assert (found.code, len(found.json["damaged"])) == (3, 1)
    mended = run("check", "--repair")
    assert mended.code == 0
    assert "(removed)" in mended.out
    assert run("check").code == 0
    cleared = run("clear", "--json").json
    assert cleared["files"] > 0
    assert list((cache_dir / "v1" / "snapshots").glob("*/*")) == []
    assert run("check", "--json").json["blocks"] == 0
    assert (
        run("get", str(dim), "3", "-o", "lookup.keys=id", "-o", "lookup.cache=FULL", "--json").json[0]["name"] == "n3"
    )
    assert run("check").code == 0


def test_a_cache_directory_that_is_not_there(run: Run, tmp_path: Path) -> None:
    """Commands about the host make none."""
    for command in ("stats", "check", "clear"):
        found = run(command, "--cache-dir", str(tmp_path / "none"), cache=False)
        assert (found.code, (tmp_path / "none").exists()) == (2, False)
        assert "--cache-dir" in found.err


def test_metrics_are_served(dim: Path, cache_dir: Path) -> None:
    """Prometheus gets the sums over all processes of the host, as they are when it asks, until the server is told to end."""
    options = {"lookup.keys": "id", "lookup.cache.dir": str(cache_dir)}
    with LookupTable(str(dim), options) as table:
        table.get(1)
        command = [
            sys.executable,
            "-m",
            "pyspark_lookup",
            "serve-metrics",
            "--port",
            "0",
            "--cache-dir",
            str(cache_dir),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().split()[-1]
                assert ask(url, "lookupcache_lookup_seconds_count", dim) == 1.0
                table.get(2)
                table.metrics()
                assert ask(url, "lookupcache_lookup_seconds_count", dim) == 2.0
                assert ask(url, "lookupcache_ufs_get_bytes_total", dim) == table.metrics()["ufsGetBytes"]
            finally:
                server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=30) == 0


def ask(url: str, name: str, dim: Path) -> float:
    with urllib.request.urlopen(url) as answer:
        text = answer.read().decode()
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name}{{") and f'{dim}"' in line]
    return float(line.split()[-1])


def test_metrics_as_a_file(run: Run, dim: Path, tmp_path: Path) -> None:
    """The same as a file for node_exporter's textfile collector."""
    run("get", str(dim), "1", "-o", "lookup.keys=id")
    target = tmp_path / "lookupcache.prom"
    assert run("serve-metrics", "--textfile", str(target)).code == 0
    assert re.search(r'^lookupcache_processes\{host=".+",table=".+/dim"\} ', target.read_text(), re.MULTILINE)


def test_neither_spark_nor_java(dim: Path, cache_dir: Path) -> None:
    """The command line runs where there is no Spark and no Java, and imports neither."""
    code = (
        "import sys\n"
        "class Refused:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('pyspark', 'py4j', 'pandas'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Refused())\n"
        "from pyspark_lookup.cli import main\n"
        f"main(['get', {str(dim)!r}, '3', '-o', 'lookup.keys=id', '--cache-dir', {str(cache_dir)!r}, '--json'])\n"
    )
    root = Path(pyspark_lookup.__file__).parent.parent
    env = {"PATH": "", "HOME": str(cache_dir), "PYTHONPATH": str(root)}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads(found.stdout) == [{"id": 3, "name": "n3"}]


def test_without_its_packages(tmp_path: Path) -> None:
    """Where the extra was not installed the command says what is missing, and how to get it."""
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError('no click', name='click')")
    root = Path(pyspark_lookup.__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    found = subprocess.run(
        [sys.executable, "-m", "pyspark_lookup"], env=env, capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (1, "click is not installed: pip install 'pyspark-lookup[cli]'\n")


def test_help_names_every_command() -> None:
    """`--help` of each command tells its options."""
    for command in (*table_commands.COMMANDS, *host_commands.COMMANDS):
        shown = CliRunner().invoke(command, ["--help"])
        assert shown.exit_code == 0
        assert (command.help or "").split(".")[0][:30] in " ".join(shown.output.split())


def test_a_report_takes_the_place_of_reports_only(run: Run, dim: Path, tmp_path: Path) -> None:
    """A file that is no page is never overwritten; a page is."""
    before = (dim / "a.parquet").read_bytes()
    found = run("report", str(dim / "a.parquet"))
    assert (found.code, (dim / "a.parquet").read_bytes()) == (2, before)
    assert "is no HTML page" in found.err
    run("files", str(dim))  # a host that has a cache directory
    assert [run("report", str(tmp_path / "page.html")).code for _ in range(2)] == [0, 0]


def test_get_takes_negative_keys(run: Run, dim: Path) -> None:
    """A key that begins with a hyphen is a key; what looks like an option of get still is one."""
    found = run("get", str(dim), "-1", "3", "-o", "lookup.keys=id", "--json")
    assert (found.code, found.json) == (3, [{"id": 3, "name": "n3"}])
    assert "no row for -1" in found.err
