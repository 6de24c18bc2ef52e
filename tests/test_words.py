"""What users read who misspell something: the words of what they gave, and what to write instead."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import pyspark_lookup
from pyspark_lookup.cli.main import _group
from pyspark_lookup.core.credentials import names_shown
from pyspark_lookup.errors import LookupFunctionError, OptionError, PysparkLookupError, SchemaError
from pyspark_lookup.lookup.catalog_tables import absolute_path
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.lookup.planner import planned_names
from pyspark_lookup.sources.providers.functions import LookupFunction, LookupFunctionProvider
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.storage.stores.fsspec import FsspecStore

MEANT = {
    "keys": "lookup.keys", "cache": "lookup.cache", "header": "lookup.csv.header", "sep": "lookup.csv.sep",
    "versionAsOf": "lookup.version", "timestampAsOf": "lookup.timestamp", "snapshot-id": "lookup.version", "branch": "lookup.branch",
    "as-of-timestamp": "lookup.timestamp", "delimiter": "lookup.csv.sep", "nullValue": "lookup.csv.null-value", "format": "lookup.format",
    "inferSchema": "lookup.csv.infer-schema", "mergeSchema": "lookup.write.merge-schema", "where": "lookup.where",
    "maxFilesPerTrigger": "lookup.stream.max-files-per-trigger", "startingVersion": "lookup.stream.start", "max-retries": "lookup.max-retries",
    "lookup.cache.ttl": "lookup.partial-cache.expire-after-write", "lookup.cache.max-rows": "lookup.partial-cache.max-rows",
    "lookup.partial-cache.cache-missing-keys": "lookup.partial-cache.cache-missing-key", "lookup.keyz": "lookup.keys", "provider": "lookup.provider",
    "lookup_keys": "lookup.keys", "lookup.cacheDir": "lookup.cache.dir", "cache-dir": "lookup.cache.dir", "version": "lookup.version",
    "expire-after-write": "lookup.partial-cache.expire-after-write", "timestamp": "lookup.timestamp", "columns": "lookup.columns",
}  # fmt: skip


@pytest.mark.parametrize("given", MEANT)
def test_the_option_that_is_meant(given: str) -> None:
    """By how it ends, by what Delta, Iceberg, Spark and Flink call it, or by how it is spelled."""
    with pytest.raises(OptionError) as caught:
        parse_options({"path": "/t", given: "1"})
    assert str(caught.value) == f"unknown option {given.lower()} = '1': did you mean {MEANT[given]}?"


def test_an_option_like_no_other() -> None:
    """A list of all options helps nobody."""
    with pytest.raises(OptionError) as caught:
        parse_options({"path": "/t", "zzz.qqq": "1"})
    assert len(str(caught.value)) < 100


PLACES = {
    "s3:/b/x": "'s3://b/x'", "s3a:b/x": "'s3a://b/x'", "hdfs:/x": "'hdfs://<namenode>/x'", "gs:/b/x": "'gs://b/x'",
    "abfss:/c@a/x": "'abfss://c@a/x'", "dbfs:/x": "'/dbfs/x'", "DBFS://x": "'/dbfs/x'", "delta.`/p`": "'/p'", "parquet.`s3://b/x`": "'s3://b/x'",
    "S3:///b/x": "'s3://b/x'", "https:/h/x": "'https://h/x'",
    "file://localhost/x": "'file:///x'", "FILE://host/x": "'file:///…'", "C:\\x": "Windows drives are not", "c:/x": "Windows drives are not", r"\\srv\x": "Windows drives are not",
    "$HOME/x": "variable $HOME is not", "${HOME}/x": "variable ${HOME} is not", "file://$HOME/x": "$HOME is not", "%TEMP%/x": "%TEMP% is not",
}  # fmt: skip


@pytest.mark.parametrize("path", PLACES)
def test_paths_of_other_programs(path: str) -> None:
    """What would be a strange local file is an error that has the right spelling, for reads, writes and Spark."""
    for use in (LookupTable, absolute_path):
        with pytest.raises(OptionError, match=r"^option path = ") as caught:
            use(path)
        assert PLACES[path] in str(caught.value)


@pytest.mark.parametrize("name", ["a b", "a%20b", "größe", "100%", "$5", "a$b", "~", "a\nb", "C:x"])
def test_odd_names_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They are taken literally, relative or absolute; an error about one is one line."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"id": [1]}), tmp_path / name)
    for path in (f"./{name}", f"{tmp_path}/{name}", f"file:{tmp_path}/{name}", f"file://{tmp_path}/{name}"):
        options = {"lookup.format": "parquet", "lookup.cache.dir": str(tmp_path / "c")}
        assert LookupTable(path, options).scan().num_rows == 1
        with pytest.raises(PysparkLookupError, match=r"^file:///.* does not exist$") as caught:
            LookupTable(f"{path}/none", {"lookup.cache.dir": str(tmp_path / "c")}).scan()
        assert "\n" not in str(caught.value)


def test_schemes_in_capitals(tmp_path: Path) -> None:
    """Are those in lower case; other text of a path stays."""
    assert parse_options({"path": "S3://B/X"}).files.path == "s3://B/X"
    assert parse_options({"path": "Memory://X"}).files.path == "memory://X"
    pq.write_table(pa.table({"id": [1]}), tmp_path / "A.parquet")
    assert LookupTable(f"FILE:{tmp_path}/A.parquet").scan().num_rows == 1
    for literal in ("/a:b/c", "%Y%m/t", "%E4%BD%A0/t", "%20%/t"):
        assert parse_options({"path": literal}).files.path == literal


def test_a_path_object(tmp_path: Path) -> None:
    """A pathlib.Path is a path, as the argument, as the option, and as another option that is one."""
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"id": [1]}), tmp_path / "t" / "a.parquet")
    assert LookupTable(tmp_path / "t" / "a.parquet", {"lookup.cache.dir": tmp_path / "c"}).scan().num_rows == 1
    assert LookupTable(None, {"path": tmp_path / "t"}).scan().num_rows == 1
    assert parse_options({"path": tmp_path}).files.path == str(tmp_path)  # type: ignore[dict-item]


def test_hdfs_without_java() -> None:
    """Is one line that names JAVA_HOME, of the 15,000 characters that Arrow has to say."""
    problem = OSError("Unable to load libjvm\n" + "dlopen(/usr/lib/jvm/libjvm.so) failed\n" * 300)
    with (
        mock.patch("fsspec.get_filesystem_class", side_effect=problem),
        pytest.raises(OptionError, match="JAVA_HOME") as caught,
    ):
        FsspecStore("hdfs://nn/x", "hdfs", {}, lambda: 0.0)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_words_of_what_was_given() -> None:
    """A column that a table has lost, one that somebody has declared, and an option of a write."""
    there = pa.schema([("id", pa.int64())])
    with pytest.raises(
        SchemaError, match=r"^/t has no column 'x' \(it has id\), which it had .* the table changed; plan again"
    ):
        planned_names(["id", "x"], there, "/t")
    with pytest.raises(SchemaError, match=r"^/t has no column 'x' \(it has id\), which the given schema names$"):
        planned_names(["x"], there, "/t", declared=True)
    with pytest.raises(OptionError, match=r"lookup.write.mode = 'x' \(write option\): expected"):
        parse_options({"path": "/t", "lookup.write.mode": "x"}, origin="write option")


def test_what_a_table_cannot_do(tmp_path: Path) -> None:
    """The option's own value is named, and a table by what it is."""
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    options = {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "c")}
    partial = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "9"}
    with LookupTable(tmp_path / "a.parquet", options | partial) as table:
        with pytest.raises(OptionError, match=r"^option lookup.cache = 'PARTIAL': only lookup.cache = 'FULL' has a"):
            table.warm()
        with pytest.raises(TypeError, match=r"^keys of type int cannot be read \(.*\): give keys as a list"):
            table.get_many(1)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"a\.parquet is a table of plain files and keeps no versions$"):
        LookupTable(tmp_path / "a.parquet", {**options, "lookup.version": "1"}).scan()


class Bytes(LookupFunction):
    """Answers with text that is none, for some keys."""

    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("tags", pa.list_(pa.string()))])

    def lookup(self, keys: pa.Table) -> pa.Table:
        ids = keys.column("id").to_pylist()
        names = [b"\xff\xfe" if key == 13 else b"x" for key in ids]
        tags = [b"\xc3" if key == 15 else b"t" for key in ids]
        offsets = pa.array(range(len(ids) + 1), pa.int32())
        return pa.table(
            [keys.column("id"), _unchecked(names), pa.ListArray.from_arrays(offsets, _unchecked(tags))],
            schema=self.schema,
        )


def _unchecked(texts: list[bytes]) -> pa.Array:
    """Text as drivers in C make it, from bytes that nobody looks at."""
    return pa.StringArray.from_buffers(len(texts), *pa.array(texts, pa.binary()).buffers()[1:])


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("provider_of_bytes")
    module.make = lambda context: LookupFunctionProvider(Bytes(), Bytes.schema)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return "provider_of_bytes:make"


def test_text_that_is_no_utf8(cache_dir: Path, texts: str) -> None:
    """Is an error that names the provider, the key and the column, also within lists; other keys are answered."""
    options = {"lookup.provider": texts, "lookup.keys": "id", "lookup.cache.dir": cache_dir, "lookup.max-retries": 0}
    with LookupTable(None, options) as table:
        for key, column in ((13, "name"), (15, "tags")):
            says = rf"^provider {texts}, lookup of key id = {key}: column '{column}' holds text that is not UTF-8"
            with pytest.raises(LookupFunctionError, match=says):
                table.get_many(pa.table({"id": [1, key, 2]}))
        assert table.get(1) == [{"id": 1, "name": "x", "tags": ["t"]}]


def run(*arguments: object) -> str:
    result = CliRunner().invoke(_group, [str(one) for one in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


def test_what_the_command_line_shows(tmp_path: Path, cache_dir: Path, texts: str) -> None:
    """Values that no terminal obeys; of a table what matters; and in counters no path where none ever was."""
    pq.write_table(pa.table({"id": ["a\x1b[2J"], "name": ["b\r\nc\x9b\u202ed"]}), tmp_path / "x.parquet")
    at = ("--cache-dir", cache_dir)
    shown = run("get", tmp_path / "x.parquet", "a\x1b[2J", "-o", "lookup.keys=id", *at)
    assert all(line.isprintable() for line in shown.splitlines())
    assert r"b\r\nc\x9b\u202ed" in shown
    described = run("describe", tmp_path / "x.parquet", "-o", "lookup.keys=id", *at)
    assert "LookupOptions" not in described
    assert "lookup.keys = id" in described
    assert "files    1\n" in described
    described = run("describe", "x", "-o", f"lookup.provider={texts}", "-o", "lookup.keys=id", *at)
    assert "PROVIDER" in described
    assert not {"files", "bytes"} & set(described.split())
    with contextlib.suppress(OSError):
        LookupTable(tmp_path / "typo", {"lookup.cache.dir": cache_dir}).scan()
    for command in (("stats",), ("serve-metrics", "--textfile", tmp_path / "m.prom"), ("report", tmp_path / "r.html")):
        shown = run(*command, *at) + "".join(
            path.read_text() for path in tmp_path.glob("?.*m*") if path.suffix != ".parquet"
        )
        assert "x.parquet" in shown
        assert "typo" not in shown
    assert "Large" not in (tmp_path / "r.html").read_text()
    assert "typo" in run("stats", tmp_path / "typo", *at)  # nothing is known of it
    assert "tables known here: file:" in run("stats", tmp_path / "typo", *at)


def test_the_report_from_a_zip(tmp_path: Path) -> None:
    """The page's template is found where the package is in an archive."""
    package = Path(pyspark_lookup.__file__).parent
    with zipfile.ZipFile(tmp_path / "p.zip", "w") as archive:
        for path in package.rglob("*"):
            if path.suffix in (".py", ".jinja"):
                archive.write(path, path.relative_to(package.parent))
    (tmp_path / "c").mkdir(mode=0o700)
    code = f"from pyspark_lookup.cli import main; main(['report', {str(tmp_path / 'r.html')!r}, '--cache-dir', {str(tmp_path / 'c')!r}])"
    pq.write_table(pa.table({"id": [1]}), tmp_path / "x.parquet")
    LookupTable(tmp_path / "x.parquet", {"lookup.cache.dir": tmp_path / "c"}).scan()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path / "p.zip"), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "r.html").read_text().startswith("<!")


def test_the_column_that_is_meant(tmp_path: Path) -> None:
    """The error suggests it by its spelling, wherever a column is named; of many columns it lists the first ones."""
    options = {"lookup.cache.dir": str(tmp_path / "c"), "lookup.keys": "id"}
    table = LookupTable(tmp_path / "t", options)
    table.write([{"id": 1, "name": "a"}])
    for act in (
        lambda: LookupTable(tmp_path / "t", {**options, "lookup.columns": "nmae"}).scan(),
        lambda: table.scan(columns=["Nmae"]), lambda: table.write([{"id": 1, "nmae": "a"}]),
        lambda: table.delete(where="nmae = 'a'"),
    ):  # fmt: skip
        with pytest.raises(PysparkLookupError, match=r"(?i)no column 'nmae'; .*id, name: did you mean 'name'[?]"):
            act()
    wide = names_shown([f"c{number}" for number in range(5000)], "nothing of these")
    assert wide.startswith("c0, c1, ")
    assert wide.endswith(", c29, … (5000 in all)")
