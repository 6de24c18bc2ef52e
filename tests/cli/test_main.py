"""The command line as scripts use it: what it prints, and how it ends."""

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pyspark_lookup
from pyspark_lookup import LookupTable
from pyspark_lookup.cli import advise as advise_command
from tests.support.broken_imports import BLOCKER
from tests.support.command_line import KEYED, Ran, Run, run

__all__ = ["run"]
ROOT = Path(pyspark_lookup.__file__).parent.parent


@pytest.fixture
def dim(tmp_path: Path) -> Path:
    (tmp_path / "dim").mkdir()
    pq.write_table(pa.table({"id": range(10), "name": [f"n{n}" for n in range(10)]}), tmp_path / "dim" / "a.parquet")
    return tmp_path / "dim"


def count_requests(run: Run, path: Path) -> int:
    (table,) = run("stats", path, "--json").json["tables"]
    return int(table["values"]["ufsListCount"] + table["values"]["ufsHeadCount"])


def test_keys_are_forgotten(run: Run, tmp_path: Path, cache_dir: Path) -> None:
    """After `invalidate`, the host's processes load the keys again; with a full cache it is an error that says what to do."""
    options = {"lookup.keys": "id", "lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "9"}
    path = str(tmp_path / "dim")
    table = LookupTable(path, {**options, "lookup.cache.dir": str(cache_dir)})
    table.write([{"id": 1}, {"id": 2}])
    for key in (1, 2, -1):
        table.get(key)
    result = run("invalidate", path, 1, -1)
    assert (result.code, result.out.split()) == (0, ["keys", "2"])
    for key in (1, 2, -1):
        table.get(key)
    metrics = table.metrics()
    assert (metrics["loadCount"], metrics["hitCount"]) == (5, 1)
    refused = run("invalidate", path, 1, "-o", "lookup.cache=FULL")
    assert (refused.code, refused.err.count("use reload()")) == (2, 1)


def test_describe_and_get(run: Run, dim: Path) -> None:
    """`describe` shows what a table is, `get` rows by keys in the key column's type, for people and as JSON; a missing key is named, with exit code 3."""
    result = run("describe", dim, "--json")
    assert (result.code, result.json["columns"]) == (0, {"id": "int64", "name": "string"})
    assert (result.json["files"], result.json["kind"]) == (1, "DIRECTORY")
    assert re.search(r"^columns +id int64, name string$", run("describe", dim).out, re.MULTILINE)
    before = count_requests(run, dim)
    result = run("get", dim, 3, 1, *KEYED, "--json")
    assert (result.code, result.json) == (0, [{"id": 3, "name": "n3"}, {"id": 1, "name": "n1"}])
    assert count_requests(run, dim) == before + 1
    result = run("get", dim, 3, *KEYED, "-o", "lookup.columns=name", "--json")
    assert result.json == [{"id": 3, "name": "n3"}]
    lines = run("get", dim, 3, *KEYED).out.splitlines()
    assert [line.split() for line in lines] == [["id", "name"], ["3", "n3"]]
    for absent in (99, -1):
        partly = run("get", dim, absent, 3, *KEYED, "--json")
        assert (partly.code, partly.json) == (3, [{"id": 3, "name": "n3"}])
        assert partly.err == f"no row for {absent}\n"
    assert run("get", dim, "3,n3", "-o", "lookup.keys=id,name", "--json").json == [{"id": 3, "name": "n3"}]


def test_names_move_no_cursor(run: Run, tmp_path: Path) -> None:
    """Control characters in the names of columns are escaped in the header of a table of rows."""
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"id": [1], "a\x1b[2J\r\nb": ["x"]}), tmp_path / "t" / "a.parquet")
    result = run("get", tmp_path / "t", 1, *KEYED)
    assert [line.split() for line in result.out.splitlines()] == [["id", r"a\x1b[2J\r\nb"], ["1", "x"]]


def test_numbers_that_json_lacks(run: Run, tmp_path: Path) -> None:
    """With --json, a float that is no number in JSON is a text, also inside a list, a struct or a map; the output is JSON for any reader."""
    floats = [float("nan"), float("inf"), float("-inf"), 0.5]
    spelled = ["NaN", "Infinity", "-Infinity", 0.5]
    nested = pa.struct([("a", pa.list_(pa.float64())), ("b", pa.map_(pa.string(), pa.float64()))])
    columns = {"id": range(4), "x": floats, "n": pa.array([{"a": [x], "b": [("k", x)]} for x in floats], nested)}
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "t" / "a.parquet")
    result = run("get", tmp_path / "t", *range(4), *KEYED, "--json")
    rows = json.loads(result.out, parse_constant=pytest.fail)
    assert [(row["x"], row["n"]["a"]) for row in rows] == [(text, [text]) for text in spelled]
    assert result.out.count('"NaN"') == 3


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["get", "DIM", "x", "-o", "lookup.keys=id"], 2, "column id is int64"),
        (["get", "DIM", "1,2", "-o", "lookup.keys=id,name", "3"], 2, "2 values are needed, for id, name"),
        (["get", "DIM", "1"], 2, "lookup.keys is missing"),
        (["get", "DIM", "1", "-o", "lookup.keys=gone"], 1, "the table has no column 'gone'"),
        (["describe", "DIM", "-o", "lookup.keys"], 2, "expected KEY=VALUE"),
        (["describe", "DIM", "-o", "lookup.keys=id", "-o", "lookup.keys=id"], 2, "given twice"),
        (["describe", "DIM/gone"], 1, "does not exist"),
        (["compact", "DIM"], 1, "not a managed table"),
        (["vacuum", "DIM", "--older-than", "1 h"], 2, "604800"),
        (["report", "DIM/a.parquet"], 2, "is not an HTML page"),
    ],
)
def test_what_goes_wrong_says_so(run: Run, dim: Path, arguments: list[str], code: int, said: str) -> None:
    """An error is one message on stderr and its exit code, never a traceback; nothing is on stdout, and no file is overwritten."""
    before = (dim / "a.parquet").read_bytes()
    result = run(*(argument.replace("DIM", str(dim)) for argument in arguments))
    assert (result.code, result.out) == (code, "")
    assert said in result.err
    assert "Traceback" not in result.err
    assert (dim / "a.parquet").read_bytes() == before


def test_versions_files_and_upkeep(run: Run, dim: Path, tmp_path: Path, cache_dir: Path) -> None:
    """The log's versions of a managed table, those that the host knows of a plain one, and the current files; compaction and vacuum."""
    path = str(tmp_path / "managed")
    options = {"lookup.keys": "id", "lookup.write.compact-after": "0", "lookup.cache.dir": str(cache_dir)}
    table = LookupTable(path, options)
    for id_ in range(3):
        table.write([{"id": id_, "name": f"n{id_}"}])
    answer = run("versions", path, "--json").json
    assert [(row["operation"], row["rows_added"]) for row in answer] == [("create", 0), *[("append", 1)] * 3]
    assert run("versions", path).out.splitlines()[0].split()[:3] == ["version", "committed_at", "operation"]
    assert [row["rows"] for row in run("files", path, "--json").json] == [1, 1, 1]
    run("get", dim, 1, *KEYED)
    assert [row["files"] for row in run("versions", dim, "--json").json] == [1]
    assert str(dim / "a.parquet") in run("files", dim).out
    answer = run("compact", path, "--json").json
    assert (answer["files_before"], answer["files"]) == (3, 1)
    assert run("vacuum", path, "--older-than", "0 s", "--force", "--json").json["files"] == 3
    assert table.scan().num_rows == 3


def test_advise(run: Run, dim: Path, tmp_path: Path) -> None:
    """`advise` turns a table and a trace into options with reasons; a file that is no trace is refused by name."""
    (tmp_path / "trace.txt").write_text("\n".join(str(n % 7) for n in range(700)))
    (tmp_path / "words.txt").write_text("one\n")
    for name, column in (("trace", "id"), ("other", "key")):
        pq.write_table(pa.table({column: [1, 2, 1]}), tmp_path / f"{name}.parquet")

    def advise(trace: str) -> Ran:
        return run("advise", dim, "--trace", tmp_path / trace, *KEYED, "--json")

    advice = advise("trace.txt").json
    assert (advice["options"], advice["distinct_keys"]) == ({"lookup.cache": "FULL"}, 7)
    assert advice["sizes"][-1] == {"max_rows": 7, "requests": 700, "hits": 693, "hit_rate": 0.99}
    assert advise("trace.parquet").json["distinct_keys"] == 2
    assert "column id is int64" in advise("words.txt").err
    assert "no key column 'id'" in advise("other.parquet").err
    (tmp_path / "latin.txt").write_bytes(b"\xe9\n")
    (tmp_path / "text.parquet").write_text("1\n")
    pq.write_table(pa.table({"id": ["x"]}), tmp_path / "texts.parquet")
    for name in ("latin.txt", "text.parquet", "texts.parquet"):
        assert re.fullmatch(
            rf"error: --trace \S+{name}: it cannot be read .* key columns id in the table's types\n", advise(name).err
        )


@pytest.mark.parametrize("rows", [10, 1000])
def test_advise_for_a_database(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """A small database table is measured; a large one, which is not read to the end, gets the size that the trace shows."""
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
        connection.execute("CREATE TABLE customers (id INTEGER NOT NULL, name TEXT)")
        connection.executemany("INSERT INTO customers VALUES (?, ?)", [(number, "x" * 90) for number in range(rows)])
    monkeypatch.setattr(advise_command, "_READ_AT_MOST", 10_000)
    (tmp_path / "trace.txt").write_text("1\n1\n2\n")
    url, table = f"sqlite:///{tmp_path}/shop.db", ("-o", "lookup.table=customers")
    advice = run("advise", url, "--trace", tmp_path / "trace.txt", *KEYED, *table, "--json").json
    if rows == 10:
        assert advice["options"] == {"lookup.cache": "FULL"}
    else:
        assert advice["options"] == {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1"}
        assert "more than 0 MiB of rows, or returns them by key only" in advice["because"][0]


def test_a_warm_host(run: Run, dim: Path, cache_dir: Path, tmp_path: Path) -> None:
    """A warm host answers without the store, and `stats` shows what warming took; `check` finds damage (exit code 3) and repairs it; a cleared cache works."""
    for command in ("stats", "check", "clear"):  # there is no cache directory yet, and they make none
        result = run(command)
        assert (result.code, cache_dir.exists()) == (2, False)
        assert "--cache-dir" in result.err
    warmed = run("warm", dim, *KEYED, "--json")
    assert (warmed.code, warmed.json["rows"]) == (0, 10)
    assert "10 rows" in run("warm", dim, *KEYED).out
    result = run("stats", "--json").json
    (table,) = result["tables"]
    assert table["url"].endswith("/dim")
    assert table["values"]["snapshotBuildCount"] == 1
    assert result["disk"]["segments"] > 0
    assert len(run("stats", dim / ".." / "dim", "--json").json["tables"]) == 1
    output = run("stats", dim).out
    for line in (r"snapshotBuildCount +1", r"ufsGetBytes +[\d.]+ [KM]?i?B", r"loadTimeMicros +[\d.]+ s"):
        assert re.search(f"^ *{line}$", output, re.MULTILINE)
    for name in ("dim", f"{dim}2"):  # a part of the path, and another path
        absent = run("stats", name, "--json")
        assert (absent.code, absent.json["tables"]) == (3, [])
        assert str(dim) in absent.err
    target = tmp_path / "lookupcache.prom"
    assert run("serve-metrics", "--textfile", target).code == 0
    series = r'^lookupcache_processes\{application="",host=".+",table=".+/dim"\} '
    assert re.search(series, target.read_text(), re.MULTILINE)
    assert [run("report", tmp_path / "page.html").code for _ in range(2)] == [0, 0]
    assert run("check").code == 0
    (block, *_) = [path for path in (cache_dir / "v1" / "blocks").rglob("*-*") if path.is_file()]
    block.write_bytes(b"noise")
    result = run("check", "--json")
    assert (result.code, len(result.json["damaged"])) == (3, 1)
    mended = run("check", "--repair")
    assert (mended.code, "(removed)" in mended.out) == (0, True)
    assert run("check").code == 0
    assert run("clear", "--json").json["files"] > 0
    assert list((cache_dir / "v1" / "snapshots").glob("*/*")) == []
    assert run("check", "--json").json["blocks"] == 0
    assert run("get", dim, 3, *KEYED, "-o", "lookup.cache=FULL", "--json").json == [{"id": 3, "name": "n3"}]
    assert run("check").code == 0


def test_metrics_are_served(dim: Path, cache_dir: Path) -> None:
    """Prometheus gets the sums over all processes of the host, as they are when it asks, until the server is told to end."""
    command = [sys.executable, "-m", "pyspark_lookup", "serve-metrics", "--port", "0", "--cache-dir", str(cache_dir)]
    with LookupTable(str(dim), {"lookup.keys": "id", "lookup.cache.dir": str(cache_dir)}) as table:
        table.get(1)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
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


def test_what_it_needs(dim: Path, tmp_path: Path, cache_dir: Path) -> None:
    """The command line runs without Spark and Java, and imports neither; without its own packages it says what is missing, and how to get it."""

    def ran(path: str, *arguments: object) -> tuple[int, str, str]:
        env = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": path}
        command = [sys.executable, *map(str, arguments)]
        process = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        return process.returncode, process.stdout, process.stderr

    bare = BLOCKER.format(blocked=["pyspark", "py4j", "pandas"], error="ModuleNotFoundError")
    get = ["get", str(dim), "3", *KEYED, "--cache-dir", str(cache_dir), "--json"]
    code, out, err = ran(str(ROOT), "-c", f"{bare}\nfrom pyspark_lookup.cli import main\nmain({get})")
    assert (code, json.loads(out), err) == (0, [{"id": 3, "name": "n3"}], "")
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError('no click', name='click')")
    code, out, err = ran(f"{tmp_path}{os.pathsep}{ROOT}", "-m", "pyspark_lookup")
    assert (code, err) == (1, "click is not installed: pip install 'pyspark-lookup[cli]'\n")
    (tmp_path / "click.py").unlink()
    (tmp_path / "pyarrow.py").write_text("raise ImportError('pyarrow requires NumPy 2.0')")
    code, out, err = ran(f"{tmp_path}{os.pathsep}{ROOT}", "-m", "pyspark_lookup")
    assert (code, err) == (1, "pyarrow requires NumPy 2.0\n")
    use = "try:\n    from pyspark_lookup import LookupTable\nexcept ImportError as problem:\n    print(problem)"
    code, out, err = ran(f"{tmp_path}{os.pathsep}{ROOT}", "-c", use)
    assert (code, err) == (0, "")
    assert out == "pyspark_lookup: pyarrow requires NumPy 2.0; pip install 'pyarrow<26', or a newer NumPy\n"
