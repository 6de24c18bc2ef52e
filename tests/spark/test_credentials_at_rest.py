"""Everything that Spark and lookupcache leave on the disk after reads of governed tables: event logs, checkpoints, caches, temporary files, logs.

A separate program reads tables whose catalogs vend credentials, in all ways, also after the grants are revoked; then the test searches all that it left.
"""

import base64
import gzip
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.support.governed_catalog import GovernedCatalog, GovernedTable
from tests.support.s3server import Mirror, S3Server
from tests.support.short_credentials import ShortCredentials
from tests.support.sparks import STATEFUL_PROCESSORS, needs
from tests.support.unity_catalog import UnityServer

IDS = 12
PROGRAM = r"""
import contextlib, io, json, logging, sys
from pathlib import Path
from pyspark import StorageLevel
from pyspark.sql import SparkSession
from pyspark_lookup import LookupTable, explain_lookup, lookup_join, register_lookup
from pyspark_lookup.cli import main

logging.basicConfig(level=logging.INFO)
logging.getLogger("pyspark_lookup").setLevel(logging.DEBUG)
home, tables, ids = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
settings = {
    "spark.eventLog.enabled": "true", "spark.eventLog.compress": "false", "spark.eventLog.dir": f"file://{home}/events",
    "spark.local.dir": home / "local", "spark.broadcast.compress": "false", "spark.shuffle.compress": "false", "spark.rdd.compress": "false",
    "spark.sql.warehouse.dir": home / "warehouse", "spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2", "spark.driver.memory": "1g",
    "spark.python.authenticate.socketTimeout": "5m", "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
}
builder = SparkSession.builder.master("local[2]")
for key, value in settings.items():
    builder = builder.config(key, str(value))
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("INFO")
mode = spark._jvm.org.apache.spark.sql.execution.ExplainMode
told = []


def tell(frame):
    execution = frame._jdf.queryExecution()
    told.extend([execution.explainString(mode.fromString(name)) for name in ("extended", "formatted", "codegen")])
    told.extend([execution.toString(), str(frame.schema), repr(frame)])


def refused(act, name):
    try:
        act()
    except Exception as problem:
        told.extend([str(problem), repr(problem)])
        assert "does not let this principal read" in str(problem), (name, str(problem))
        return
    raise AssertionError(f"{name} was not refused")


def run(stream, number):
    (home / f"facts{number}").mkdir(exist_ok=True)
    query = stream.writeStream.format("parquet").option("path", str(home / f"out{number}"))
    query = query.option("checkpointLocation", str(home / f"checkpoint{number}")).trigger(availableNow=True).start()
    query.awaitTermination()
    told.append(json.dumps([str(one) for one in query.recentProgress]))


def send(number, first):
    spark.range(first, first + ids).write.mode("append").parquet(str(home / f"facts{number}"))


again, streams = [], []
for number, (path, options) in enumerate(tables):
    facts = spark.range(ids)
    always = {**options, "lookup.catalog.authorise-every": "0 s"}
    frames = {"scan": spark.read.format("lookupcache").options(**always).load(path)}
    frames["cache"] = lookup_join(facts, path, on={"id": "id"}, options={**always, "lookup.cache": "FULL"}, strategy="cache")
    frames["broadcast"] = lookup_join(facts, path, on={"id": "id"}, options=always, strategy="broadcast")
    register_lookup(spark, f"name_of_{number}", path, key="id", options=always)
    frames["function"] = spark.sql(f"SELECT name_of_{number}(id).name AS name FROM range({ids})")
    listed = ", ".join(f"'{key}' '{value}'" for key, value in {"path": path, **always}.items())
    spark.sql(f"CREATE TABLE governed_{number} USING lookupcache OPTIONS ({listed})")
    frames["table"] = spark.table(f"governed_{number}")
    for name, frame in frames.items():
        names = sorted(row.name for row in frame.collect())
        assert names == sorted(f"n{id}" for id in range(ids)), (name, names)
        tell(frame)
        again.append((f"{name} of {path}", frame))
    told.append(explain_lookup(frames["cache"]))
    told += [str(row) for row in spark.sql(f"DESCRIBE TABLE EXTENDED governed_{number}").collect()]
    stored = frames["scan"].repartition(2).persist(StorageLevel.DISK_ONLY)
    assert stored.count() == ids
    send(number, 0)
    stream = lookup_join(spark.readStream.schema("id long").parquet(str(home / f"facts{number}")), path, on="id", options=always, wait="1 hour")
    send(number, 1000)  # no row of the table: they wait, in the state
    run(stream, number)
    streams.append(stream)
    for view in ("metrics", "files"):
        told += [str(row) for row in spark.read.format("lookupcache").options(**always, **{"lookup.view": view}).load(path).collect()]
    with LookupTable(path, {**always, "lookup.cache": "FULL"}) as table:
        assert table.get(1)[0]["name"] == "n1"
        told += [repr(table), str(table.metrics()), str(table.describe()), str(table.versions())]
print("REVOKE", flush=True)
sys.stdin.readline()
for name, frame in again:
    if not name.startswith("broadcast"):  # whose rows Spark keeps for this DataFrame
        refused(frame.collect, name)
for number, (path, options) in enumerate(tables):
    refused(lambda: lookup_join(spark.range(ids), path, on={"id": "id"}, options=options, strategy="broadcast").collect(), "a new broadcast")
    refused(lambda: spark.read.format("lookupcache").options(**options).load(path), "a new scan")
    send(number, 2000)
    refused(lambda: run(streams[number], number), "the stream")
    refused(lambda: LookupTable(path, options).get(1), "a LookupTable")
for command in (["report", str(home / "report.html")], ["stats"], ["check"], ["serve-metrics", "--help"]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*command, "--cache-dir", str(home / "cache")])
    told.append(out.getvalue())
(home / "told.txt").write_text("\n".join(told))
print("DONE", flush=True)
sys.stdin.readline()
spark.stop()
"""


def contents(path: Path) -> Iterator[bytes]:
    """The bytes of a file, and those that archives and compressed files have inside."""
    yield path.read_bytes()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from map(archive.read, archive.namelist())
    if path.suffix == ".gz":
        yield gzip.decompress(path.read_bytes())


def holding(home: Path, secrets: list[bytes]) -> list[tuple[str, bytes]]:
    """Each secret that is in a file below a directory: (the file's path, the secret)."""
    files = [path for path in home.rglob("*") if path.is_file() and not path.is_symlink()]
    return [
        (str(path.relative_to(home)), secret)
        for path in files
        for data in contents(path)
        for secret in secrets
        if secret in data
    ]


@needs(STATEFUL_PROCESSORS)
@pytest.mark.timeout(1200)
@pytest.mark.nightly
@pytest.mark.spark
def test_nothing_of_a_credential_is_left(s3: S3Server, tmp_path: Path) -> None:
    store = ShortCredentials(s3)
    names = [f"n{id}" for id in range(IDS)]
    home = tmp_path / "home"
    for directory in ("events", "local", "tmp"):
        (home / directory).mkdir(parents=True)
    with GovernedCatalog(store, s3.endpoint) as rest_catalog, UnityServer(store.vend) as unity:
        rest_catalog.tokens["rest-token-SESAME42"] = "ann"
        rest_catalog.grants.add(("ann", "ns.table"))
        table = GovernedTable(rest_catalog, s3, tmp_path, "table", {"id": "long", "name": "string"})
        table.write([{"id": id, "name": name} for id, name in enumerate(names)])
        mirror = Mirror(tmp_path / "airports", f"{tmp_path.name}-airports", s3)
        write_deltalake(str(mirror.local), pa.table({"id": [*range(IDS)], "name": names}))
        mirror.send()
        unity.clients["client"] = "client-secret-SESAME43", "ann"
        unity.create("main.travel.airports", mirror.url, "ann")
        store.open_keys.clear()  # from now on nobody reads without vended credentials
        common = {
            "lookup.keys": "id", "lookup.cache.dir": str(home / "cache"), "lookup.storage.endpoint_url": s3.endpoint, "lookup.max-retries": "0",
        }  # fmt: skip
        named = {"lookup.catalog": "tests", "lookup.catalog.type": "rest", "lookup.catalog.uri": rest_catalog.uri}
        tables: list[tuple[str, dict[str, str]]] = [
            ("ns.table", {**common, **named}),
            ("main.travel.airports", {**common, "lookup.catalog": "unity", "lookup.catalog.uri": unity.uri}),
        ]
        variables = {
            "PYICEBERG_CATALOG__TESTS__TOKEN": "rest-token-SESAME42",
            "UNITY_CATALOG_CLIENT_ID": "client",
            "UNITY_CATALOG_CLIENT_SECRET": "client-secret-SESAME43",
            "AWS_ACCESS_KEY_ID": "AKIAOFTHEPROCESS0042",
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-process-SESAME44",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TMPDIR": str(home / "tmp"),
            "SPARK_LOCAL_DIRS": str(home / "local"),
        }
        paths = {"client", *(variables[name] for name in ("PYTHONPATH", "TMPDIR", "SPARK_LOCAL_DIRS"))}
        # No preloaded daemons: PyIceberg reads its part of the environment when it is imported.
        python = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}

        def secrets() -> list[bytes]:
            texts = {text for vended in store.issued for text in vended.values()} | {
                *rest_catalog.tokens,
                *unity.tokens,
            }
            texts |= {*variables.values()} - paths
            pair = base64.b64encode(b"client:client-secret-SESAME43")
            return [*(text.encode() for text in texts), *(base64.b64encode(text.encode()) for text in texts), pair]

        with (home / "program.log").open("wb") as log:
            program = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(home), json.dumps(tables), str(IDS)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=home,
                env={**os.environ, **python, **variables},
            )  # fmt: skip
            try:
                assert await_line(program.stdout, "REVOKE"), (home / "program.log").read_text()[-9000:]
                rest_catalog.grants.clear()
                unity.readers["main.travel.airports"].clear()
                answer(program)
                assert await_line(program.stdout, "DONE"), (home / "program.log").read_text()[-5000:]
                assert len(store.issued) > 4
                # Search while the program's temporary files are there, and again when it has ended.
                while_running = holding(home, secrets())
                answer(program)
                assert program.wait(300) == 0
            finally:
                program.kill()
                program.wait()
        assert (while_running, holding(home, secrets())) == ([], [])
    # The search covers the files that it is meant to: they hold these texts.
    for place, text in {
        "events": b"ns.table",
        "told.txt": b"main.travel.airports",
        "program.log": b"ns.table",
        "cache": b"n11",
    }.items():
        assert [
            path for path in [home / place, *(home / place).rglob("*")] if path.is_file() and text in path.read_bytes()
        ], place
    for number in range(len(tables)):
        assert any((home / f"checkpoint{number}" / "state").rglob("*.zip"))


def await_line(lines: IO[Any] | None, word: str) -> bool:
    assert lines is not None
    return any(line.strip() == word for line in lines)


def answer(program: "subprocess.Popen[str]") -> None:
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()
