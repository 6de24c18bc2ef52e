"""A user's script, for `mypy --strict`: it is checked, not run. Lines with `ignore` are mistakes that the types tell."""

import polars as pl
from pyspark.sql import DataFrame, SparkSession

from pyspark_lookup import LookupTable, explain_lookup, lookup_join, register_lookup, warm

options = {"lookup.keys": "id", "lookup.cache": "FULL", "lookup.partial-cache.max-rows": 100}


def enrich(spark: SparkSession, orders: DataFrame) -> DataFrame:
    cities = spark.read.format("lookupcache").options(**{"lookup.keys": "id"}).load("s3://bucket/cities")
    joined = lookup_join(orders, "s3://bucket/cities", on={"city_id": "id"}, how="inner", options=options)
    lookup_join(orders, "s3://bucket/cities", "id", how="rite")  # type: ignore[arg-type]
    lookup_join(orders, "s3://bucket/cities", "id", strategy="fast")  # type: ignore[arg-type]
    register_lookup(spark, "city", "s3://bucket/cities", key="id", options={"lookup.cache": "FULL"})
    warm(spark, "s3://bucket/cities", options=options)
    text: str = explain_lookup(joined)
    print(text)
    return joined.join(cities, "id")


def write(frame: pl.DataFrame) -> int:
    with LookupTable("s3://bucket/cities", options) as table:
        table.write([{"id": 1, "city": "Oslo"}])
        table.write([{"id": 1}], "replace")  # type: ignore[arg-type]
        table.delete([1, 2])
        names: list[str] = table.get_many([3]).column_names
        with table.transaction() as t:
            t.upsert([{"id": 4, "city": "Hamar"}])
        print(names, table.get(1)[0]["city"], table)
        return table.upsert(frame)
