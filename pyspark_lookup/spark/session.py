"""`configure(spark)`: the session settings that serve lookupcache best."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession

# Kept equal to conf/spark-defaults.conf, which says why for each; a test compares them.
RECOMMENDED: Mapping[str, str] = {
    "spark.sql.pyspark.worker.logging.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
}


def configure(spark: SparkSession) -> SparkSession:
    """Set the recommended run-time confs on a session, overwriting its own; returns the session.

    `lookupcache` works without: these make its logs queryable and the batches larger that an Arrow UDF
    behind a scan gets.
    """
    for key, value in RECOMMENDED.items():
        spark.conf.set(key, value)
    return spark
