"""Joins to other systems, and to what fails: retries, misses, `lookup.on-error`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PythonException

from pyspark_lookup import explain_lookup, lookup_join, register_lookup
from pyspark_lookup.base.errors import OptionError
from tests.spark.common import events, put, running, stream_of
from tests.spark.service import Service

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
CACHED = {"lookup.cache": "PARTIAL", "lookup.partial-cache.expire-after-write": "1 h", "lookup.max-retries": "0"}
NULL = {"lookup.on-error": "NULL"}


@pytest.fixture
def service(tmp_path: Path) -> Service:
    made = Service(tmp_path)
    made.put({1: "Oslo", 2: "Bergen"})
    return made


def options_of(tmp_path: Path, kind: str = "cities", **others: str) -> dict[str, Any]:
    own = {"lookup.provider": f"tests.spark.service:{kind}", "lookup.provider.home": str(tmp_path)}
    return {**own, **CACHED, **others}


def enriched(spark: SparkSession, ids: str, options: dict[str, Any], how: str = "left") -> DataFrame:
    facts = spark.sql(f"SELECT explode(array({ids})) AS id").coalesce(1)
    return lookup_join(facts, None, "id", how, options=options)


@pytest.mark.parametrize("kind", ["cities", "async_cities"])
def test_a_provider(spark: SparkSession, tmp_path: Path, service: Service, name: str, kind: str) -> None:
    """A join to a provider asks it for the different keys of a batch, once while they are cached; so does a SQL function."""
    options = options_of(tmp_path, kind)
    if kind == "async_cities":
        options |= {"lookup.async.capacity": "2", "lookup.async.timeout": "30 s"}
    joined = enriched(spark, "1, 2, 3, NULL, 1", options)
    assert joined.collect() == [(1, "Oslo"), (2, "Bergen"), (3, None), (None, None), (1, "Oslo")]
    assert service.asked() == [[1, 2, 3]]
    assert enriched(spark, "3, 2, 1", options, "inner").collect() == [(2, "Bergen"), (1, "Oslo")]
    register_lookup(spark, name, None, "id", options=options)
    assert spark.sql(f"SELECT {name}(2).city").collect() == [("Bergen",)]
    assert service.asked() == [[1, 2, 3]]
    assert "a provider's table" in explain_lookup(joined)


@pytest.mark.parametrize("how", ["left", "inner"])
def test_a_failure_as_a_column(spark: SparkSession, tmp_path: Path, service: Service, name: str, how: str) -> None:
    """`lookup.on-error=NULL`: rows pass with the reason; cached keys are still answered, null keys have no error, and the inner join
    keeps what it does not know. Nothing is remembered of a failure. A SQL function has the reason as well. By default the query fails,
    after n + 1 attempts, with an error that names the provider."""
    options = options_of(tmp_path, **NULL)
    assert enriched(spark, "1, 7", options).select("lookup_error").distinct().collect() == [(None,)]
    service.break_down()
    rows = [tuple(row) for row in enriched(spark, "1, 2, NULL, 7, 8", options, how).collect()]
    said = [error for _, _, error in rows if error]
    known = [(id_, city, bool(error)) for id_, city, error in rows]
    kept = [(None, None, False), (7, None, False)] if how == "left" else []
    assert sorted(known, key=str) == sorted([(1, "Oslo", False), (2, None, True), *kept, (8, None, True)], key=str)
    register_lookup(spark, name, None, "id", options=options)
    (row,) = spark.sql(f"SELECT {name}(2) AS c").collect()
    assert row.c.city is None
    said += [row.c.lookup_error, spark.sql(f"SELECT * FROM {name}_rows(2)").collect()[0].lookup_error]
    assert all("LookupFunctionError" in error and "the service is down" in error for error in said)
    asked = len(service.asked())
    says = r"LookupFunctionError.*tests\.spark\.service:cities.*the service is down"
    with pytest.raises(PythonException, match=says):
        enriched(spark, "2", options_of(tmp_path, **{"lookup.max-retries": "1"})).collect()
    assert (len(service.asked()) - asked) % 2 == 0
    service.break_down(False)
    assert enriched(spark, "2", options).collect()[0].city == "Bergen"


def test_a_table_that_cannot_be_resolved(spark: SparkSession, tmp_path: Path) -> None:
    """A stream goes on while the table is gone, with the reason in its rows, and is well again when the table is."""
    path = put(tmp_path / "dim.parquet", 1)
    (tmp_path / "events").mkdir()
    options = {"lookup.cache": "FULL", "lookup.max-retries": "0", **NULL}
    joined = lookup_join(stream_of(spark, tmp_path / "events"), str(path), "id", options=options)
    with running(joined, "unresolved") as query:
        for version in (1, 2, 3):
            path.unlink() if version == 2 else put(path, version)
            events(tmp_path / "events", version, range(3))
            query.processAllAvailable()
    rows = spark.table("unresolved").orderBy("batch").collect()
    assert [row.version for row in rows] == [1, 1, 1, None, None, None, 3, 3, 3]
    assert ["UfsNotFoundError" in str(row.lookup_error) for row in rows] == [row.version is None for row in rows]


def test_strategies_that_do_not_fit(spark: SparkSession, tmp_path: Path) -> None:
    """What a broadcast cannot do is an error when it is asked for."""
    facts, path = spark.range(3), str(put(tmp_path / "d.parquet", 1))
    with pytest.raises(OptionError, match=r"lookup\.on-error = 'NULL' needs strategy='cache'"):
        lookup_join(facts, path, "id", strategy="broadcast", options=NULL)
    joined = lookup_join(facts, None, "id", strategy="broadcast", options=options_of(tmp_path))
    with pytest.raises(Exception, match="it gives rows by key only"):
        joined.collect()
