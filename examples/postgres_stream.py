"""Joins a stream with a table of a PostgreSQL server: python examples/postgres_stream.py postgresql://db.example.com/shop

The table is `customers (id, name, city)`. The password comes from where libpq looks for it, such as ~/.pgpass or PGPASSWORD, on each machine.
"""

import sys

from pyspark.sql import DataFrame, SparkSession

from pyspark_lookup import lookup_join


def orders_with_customers(spark: SparkSession, url: str) -> DataFrame:
    """A stream of orders with their customers' names and cities. Each row is at most a minute old."""
    orders = spark.readStream.format("rate").load().selectExpr("value AS order_id", "int(value % 100) AS customer_id")
    options = {
        "lookup.table": "public.customers",
        "lookup.cache": "PARTIAL",
        "lookup.partial-cache.expire-after-write": "1 min",
    }
    return lookup_join(orders, url, on={"customer_id": "id"}, columns=["name", "city"], options=options)


if __name__ == "__main__":
    session = SparkSession.builder.getOrCreate()
    orders_with_customers(session, sys.argv[1]).writeStream.format("console").start().awaitTermination()
