"""Joins to other systems, and to what fails: retries, misses, `lookup.on-error`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PythonException

from pyspark_lookup import explain_lookup, lookup_join, register_lookup
from pyspark_lookup.base.errors import OptionError
from tests.spark.service import Service
from tests.spark.test_join_streams import events, in_memory, stream_of
from tests.spark.test_source import put

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
CACHED = {"lookup.cache": "PARTIAL", "lookup.partial-cache.expire-after-write": "1 h", "lookup.max-retries": "0"}


@pytest.fixture
def service(tmp_path: Path) -> Service:
    made = Service(tmp_path)
    made.put({1: "Oslo", 2: "Bergen"})
    return made


def options_of(tmp_path: Path, kind: str = "cities", **others: str) -> dict[str, Any]:
    return {"lookup.provider": f"tests.spark.service:{kind}", "lookup.provider.home": str(tmp_path), **others}


def enriched(spark: SparkSession, ids: str, options: dict[str, Any], how: str = "left") -> DataFrame:
    facts = spark.sql(f"SELECT explode(array({ids})) AS id").coalesce(1)
    return lookup_join(facts, None, "id", how, options=options)


@pytest.mark.parametrize("kind", ["cities", "async_cities"])
def test_a_provider(spark: SparkSession, tmp_path: Path, service: Service, kind: str) -> None:
    """A join to a provider asks it for the different keys of a batch, once while they are cached; so does a SQL function."""
    options = options_of(tmp_path, kind, **CACHED)
    if kind == "async_cities":
        options |= {"lookup.async.capacity": "2", "lookup.async.timeout": "30 s"}
    joined = enriched(spark, "1, 2, 3, NULL, 1", options)
    expected = [(1, "Oslo"), (2, "Bergen"), (3, None), (None, None), (1, "Oslo")]
    assert [tuple(row) for row in joined.collect()] == expected
    assert service.asked() == [[1, 2, 3]]
    assert [tuple(row) for row in enriched(spark, "3, 2, 1", options, "inner").collect()] == [
        (2, "Bergen"),
        (1, "Oslo"),
    ]
    register_lookup(spark, "service_city", None, "id", options=options)
    assert spark.sql("SELECT service_city(2).city").collect() == [("Bergen",)]
    assert service.asked() == [[1, 2, 3]]
    assert "a provider's table" in explain_lookup(joined)


def test_a_failure_fails_the_query(spark: SparkSession, tmp_path: Path, service: Service) -> None:
    """By default: after n + 1 attempts, with an error that names the provider; nothing is remembered of it."""
    service.break_down()
    options = options_of(tmp_path, **{**CACHED, "lookup.max-retries": "1"})
    with pytest.raises(
        PythonException, match=r"LookupFunctionError.*tests\.spark\.service:cities.*the service is down"
    ):
        enriched(spark, "1, 2", options).collect()
    assert len(service.asked()) % 2 == 0
    service.break_down(False)
    assert [row.city for row in enriched(spark, "1, 2", options).collect()] == ["Oslo", "Bergen"]


@pytest.mark.parametrize("how", ["left", "inner"])
def test_a_failure_as_a_column(spark: SparkSession, tmp_path: Path, service: Service, how: str) -> None:
    """`lookup.on-error=NULL`: rows pass with the reason; cached keys are still answered, null keys have no error, and the inner join
    keeps what it does not know. Nothing is remembered of a failure."""
    options = options_of(tmp_path, **CACHED, **{"lookup.on-error": "NULL"})
    assert enriched(spark, "1, 7", options).select("lookup_error").distinct().collect() == [(None,)]
    service.break_down()
    rows = [tuple(row) for row in enriched(spark, "1, 2, NULL, 7, 8", options, how).collect()]
    said = [error for _, _, error in rows if error]
    assert all("LookupFunctionError" in error and "the service is down" in error for error in said)
    known = [(id_, city, bool(error)) for id_, city, error in rows]
    kept = [(None, None, False), (7, None, False)] if how == "left" else []
    assert sorted(known, key=str) == sorted([(1, "Oslo", False), (2, None, True), *kept, (8, None, True)], key=str)
    service.break_down(False)
    assert enriched(spark, "2", options).collect()[0].city == "Bergen"


def test_a_failure_in_sql(spark: SparkSession, tmp_path: Path, service: Service) -> None:
    """The struct of a SQL function has the reason as well."""
    service.break_down()
    options = options_of(tmp_path, **CACHED, **{"lookup.on-error": "NULL"})
    register_lookup(spark, "failing_city", None, "id", options=options)
    (row,) = spark.sql("SELECT failing_city(1) AS c").collect()
    assert row.c.city is None
    assert "the service is down" in row.c.lookup_error
    assert spark.sql("SELECT * FROM failing_city_rows(1)").collect()[0].lookup_error is not None


def test_a_table_that_cannot_be_resolved(spark: SparkSession, tmp_path: Path) -> None:
    """A stream goes on while the table is gone, with the reason in its rows, and is well again when the table is."""
    path = put(tmp_path / "dim.parquet", 1)
    events(tmp_path / "events", 1, range(3))
    options = {"lookup.cache": "FULL", "lookup.on-error": "NULL", "lookup.max-retries": "0"}
    query = in_memory(
        lookup_join(stream_of(spark, tmp_path / "events"), str(path), "id", options=options), "unresolved"
    )
    try:
        query.processAllAvailable()
        path.unlink()
        events(tmp_path / "events", 2, range(3))
        query.processAllAvailable()
        put(path, 3)
        events(tmp_path / "events", 3, range(3))
        query.processAllAvailable()
    finally:
        query.stop()
    rows = spark.table("unresolved").groupBy("batch", "version", "lookup_error").count().orderBy("batch").collect()
    assert [(row.version, row["count"]) for row in rows] == [(1, 3), (None, 3), (3, 3)]
    assert [row.lookup_error is not None for row in rows] == [False, True, False]
    assert "UfsNotFoundError" in rows[1].lookup_error


def test_strategies_that_do_not_fit(spark: SparkSession, tmp_path: Path, service: Service) -> None:
    """What a broadcast cannot do is an error when it is asked for."""
    facts = spark.range(3)
    with pytest.raises(OptionError, match=r"lookup\.on-error = 'NULL' needs strategy='cache'"):
        lookup_join(
            facts, str(put(tmp_path / "d.parquet", 1)), "id", strategy="broadcast", options={"lookup.on-error": "NULL"}
        )
    joined = lookup_join(facts, None, "id", strategy="broadcast", options=options_of(tmp_path, **CACHED))
    with pytest.raises(Exception, match="it gives rows by key only"):
        joined.collect()
