"""`read_table`: a table as a DataFrame on every Spark; without data sources in Python by tasks that plan and read."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from pyspark_lookup import LookupTable, explain_lookup, lookup_join, read_table
from pyspark_lookup.errors import NotSupportedError, OptionError, UfsNotFoundError, VersionGoneError
from pyspark_lookup.spark import features, load
from pyspark_lookup.spark.lookup_pass import estimated_rows, plan_text
from pyspark_lookup.spark.reading import Resolve
from pyspark_lookup.spark.source import DefaultSource
from tests.support.spark_tables import Calls, collect_batches, events, publish_version, saved, stream_events
from tests.support.sparks import DATA_SOURCES, without

pytestmark = pytest.mark.spark


@pytest.fixture(params=[pytest.param("a source", marks=pytest.mark.nightly), "tasks"])
def reading(request: pytest.FixtureRequest) -> Iterator[None]:
    with without(*[DATA_SOURCES] * (request.param == "tasks")):
        yield


def versions(path: Path, count: int, first: int = 0) -> None:
    """Files of a directory, each a task of its own with the smallest split size."""
    for number in range(count):
        fill = random.Random(number).randbytes(2**20)
        version = first + number
        saved(path / f"{version}.parquet", {"id": [number], "version": [version], "fill": [fill]})


@pytest.mark.usefixtures("reading")
def test_rows_columns_and_versions(spark: SparkSession, tmp_path: Path) -> None:
    """Each query has the newest rows, read by as many tasks as there are splits; options and views are those of `spark.read`."""
    versions(tmp_path / "dim", 3)
    table = read_table(spark, tmp_path / "dim", {"lookup.scan.split-size": "1 MiB", "lookup.keys": ["id"]})
    assert table.rdd.getNumPartitions() == 3
    assert sorted(row.id for row in table.select("*").collect()) == [0, 1, 2]
    versions(tmp_path / "dim", 5)
    table = read_table(spark, tmp_path / "dim", {"lookup.scan.split-size": "1 MiB"})
    assert table.select("id").where("id > 2").count() == 2
    selection = read_table(spark, tmp_path / "dim", {"lookup.columns": "version", "lookup.where": "id = 1"})
    assert [tuple(row) for row in selection.collect()] == [(1,)]
    files = read_table(spark, tmp_path / "dim", {"lookup.view": "files"})
    assert files.count() == 5
    metrics = read_table(spark, tmp_path / "dim", {"Lookup.View": "METRICS"})
    for _ in range(2):  # in each query, one of the tasks answers for its host
        assert metrics.where("name = 'ufsListCount'").count() == 1


@pytest.mark.usefixtures("reading")
def test_a_join_of_all_rows_and_a_lookup(spark: SparkSession, tmp_path: Path) -> None:
    """A broadcast, a join with the table itself, and a lookup in one query agree, batch by batch of a stream, while the table changes."""
    path = publish_version(tmp_path / "dim.parquet", 1, range(200))
    (tmp_path / "events").mkdir()
    stream = stream_events(spark, tmp_path / "events")
    joined = lookup_join(stream, str(path), "id", strategy="broadcast", prefix="b_")
    assert "strategy: broadcast" in explain_lookup(joined)
    joined = lookup_join(joined, str(path), "id", strategy="cache", prefix="c_")
    joined = joined.join(sf.broadcast(read_table(spark, path).withColumnRenamed("version", "scanned")), "id")
    for number in (1, 2):
        publish_version(path, number, range(200))
        events(tmp_path / "events", number)
        (rows,) = collect_batches(joined.select("b_version", "c_version", "scanned"), tmp_path / "checkpoint")
        assert set(rows) == {(number, number, number)}
        assert len(rows) == 200


@pytest.mark.usefixtures("reading")
def test_managed_tables(spark: SparkSession, tmp_path: Path) -> None:
    """An earlier version; and changes of the named columns, up to the commit that was the newest one when the read was planned."""
    table = LookupTable(tmp_path / "t", {"lookup.keys": "id"})

    def read(**options: str) -> list[tuple[object, ...]]:
        rows = read_table(spark, tmp_path / "t", {f"lookup.{key}": text for key, text in options.items()})
        return sorted(map(tuple, rows.collect()))

    table.write(pa.table({"id": [1, 2], "v": ["a", "b"]}))
    options = {"lookup.changes-from": "1", "lookup.columns": "id"}
    changes = read_table(spark, tmp_path / "t", options)
    expected = sorted(tuple(row)[:2] for row in changes.select("*").collect())
    assert expected == [(1, "insert"), (2, "insert")]
    table.upsert([{"id": 2, "v": "c"}])
    assert (read(), read(version="4")) == ([(1, "a"), (2, "c")], [(1, "a"), (2, "b")])
    assert read_table(spark, tmp_path / "t", options).count() == 4
    if not features.DATA_SOURCES:
        assert sorted(tuple(row)[:2] for row in changes.select("*").collect()) == expected


@pytest.mark.usefixtures("reading")
def test_mistakes(spark: SparkSession, tmp_path: Path) -> None:
    """Mistakes are errors that name them: when the table is planned, or in one line when a query runs."""
    with pytest.raises((OptionError, PySparkException), match=r"lookup.cach"):
        read_table(spark, tmp_path, {"lookup.cach": "FULL"}).collect()
    with pytest.raises((UfsNotFoundError, PySparkException), match="does not exist"):
        read_table(spark, tmp_path / "none").collect()
    path = publish_version(tmp_path / "dim.parquet", 1)
    table = read_table(spark, path)
    path.unlink()
    with pytest.raises(PySparkException, match="does not exist"):
        table.select("id").collect()


def test_a_spark_without_sources_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The format is refused by name when it is first used, with the way out."""
    refusal = r"data sources in Python.*pyspark_lookup\.read_table"
    with without(DATA_SOURCES), pytest.raises(NotSupportedError, match=refusal):
        DefaultSource({"path": "x"})


def test_calls_of_a_read_by_tasks(spark: SparkSession, tmp_path: Path) -> None:
    """An unchanged table costs one call in each query, whatever its number of tasks."""
    versions(tmp_path / "dim", 3)
    with without(DATA_SOURCES):
        table = read_table(spark, tmp_path / "dim", {"lookup.scan.split-size": "1 MiB"})
        table.select("*").collect()
        calls = Calls(tmp_path / "dim")
        table.select("*").collect()
    assert calls.calls() == (0, 1, 0)


def test_tasks_are_not_tiny(spark: SparkSession, tmp_path: Path) -> None:
    """Spark broadcasts the table only if it is told to: it does not take the few rows that describe the tasks for the table."""
    path = publish_version(tmp_path / "dim.parquet", 1)
    with without(DATA_SOURCES):
        table = read_table(spark, path)
    facts = spark.range(10_000_000)
    assert "BroadcastHashJoin" not in plan_text(facts.join(table, "id", "left"))
    assert "BroadcastHashJoin" in plan_text(facts.join(sf.broadcast(table), "id", "left"))
    rows = estimated_rows(table)
    assert rows > 2**20


@pytest.mark.usefixtures("reading")
def test_a_second_action(spark: SparkSession, tmp_path: Path) -> None:
    """Tasks read the version of the first action again if the second one runs the same plan; one that makes a plan reads the current version."""
    path = publish_version(tmp_path / "dim.parquet", 0)
    table = read_table(spark, path)
    table.createTempView("second_action")
    actions: dict[str, tuple[Callable[[], list[Any]], bool]] = {
        "collect": (table.collect, True),
        "toLocalIterator": (lambda: list(table.toLocalIterator()), True),
        "rdd": (lambda: table.rdd.take(1), True),
        "take": (lambda: table.take(1), False),
        "count": (lambda: [table.agg(sf.max("version").alias("version")).first()], False),
        "select": (lambda: table.select("*").collect(), False),
        "view": (lambda: spark.table("second_action").collect(), False),
    }
    lags = {}
    for number, (name, (run, _)) in enumerate(actions.items()):
        publish_version(path, number)
        lags[name] = run()[0].version - number
    tasks = not features.DATA_SOURCES
    numbered = enumerate((name, same_plan) for name, (_, same_plan) in actions.items())
    expected = {name: -number if tasks and same_plan else 0 for number, (name, same_plan) in numbered}
    spark.catalog.dropTempView("second_action")
    assert lags == expected


def _rows_of_host(cache: Path, planned: load._Planned, numbers: list[int], token: dict[str, int]) -> list[int]:
    """The versions in the rows of some tasks of a read, on the host with this cache directory."""
    options = json.dumps({**planned.options, "lookup.cache.dir": str(cache)})
    share = load.ReadShare(options, planned.schema.json(), planned.tasks, "read")
    columns = {name: pa.array([value] * len(numbers)) for name, value in token.items()}
    batches = share(iter([pa.record_batch({"id": numbers, **columns})]))
    return [row for batch in batches for row in batch.column("version").to_pylist()]


def test_hosts_do_not_mix_versions(tmp_path: Path) -> None:
    """A host fails if the files of the version were replaced, even if a newer version may be read: another host has already read its share of the old one."""
    versions(tmp_path / "dim", 3)
    options = {"path": str(tmp_path / "dim"), "lookup.scan.split-size": "1 MiB", "lookup.on-version-gone": "NEWER"}
    planned = load._plan(options)
    first_host, second_host = tmp_path / "here", tmp_path / "there"
    names = load.token_columns("version")
    resolve = Resolve("v", [(json.dumps({**options, "lookup.cache.dir": str(first_host)}), None)], names)
    (token,) = next(resolve(iter(()))).select(names[:2]).to_pylist()
    assert planned.tasks == 3
    assert _rows_of_host(first_host, planned, [0], token) == [0]
    for file in (tmp_path / "dim").iterdir():
        file.unlink()
    versions(tmp_path / "dim", 3, first=10)
    with pytest.raises(VersionGoneError):
        _rows_of_host(second_host, planned, [1, 2], token)


@pytest.mark.parametrize("in_conf_file", [False, True])
def test_errors_of_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_conf_file: bool) -> None:
    """They fail the query, unless an option or the conf file lets the last version of a provider stand in."""
    (tmp_path / "conf").write_text("lookup.on-error = STALE\n" if in_conf_file else "")
    monkeypatch.setenv("LOOKUPCACHE_CONF", str(tmp_path / "conf"))
    resolve = mock.MagicMock()
    monkeypatch.setattr(load, "resolve_versions", resolve)
    for options in ({}, {"lookup.on-error": "NULL"}, {"lookup.on-error": "stale"}):
        load._version(mock.Mock(), options, load._Planned(mock.Mock(), 1, {}, True), None)
        ((text, _),) = resolve.call_args.args[2].values()
        stale = options.get("lookup.on-error", "STALE" if in_conf_file else "") in ("STALE", "stale")
        assert json.loads(text) == (options if stale else {"lookup.on-error": "FAIL"})


def test_hosts_cut_files_alike(tmp_path: Path) -> None:
    """The size of the tasks is that of the planning process, whatever a host's conf file says."""
    versions(tmp_path / "dim", 2)
    planned = load._plan({"path": str(tmp_path / "dim"), "lookup.scan.split-size": "1 MiB"})
    assert planned.options["lookup.scan.split-size"] == str(2**20)
    assert "lookup.scan.split-size" not in load._plan({"path": str(tmp_path / "dim")}).options
