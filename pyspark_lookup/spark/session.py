"""`configure(spark)`: the session settings that suit lookupcache best."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession

# Kept equal to conf/spark-defaults.conf, which says why for each; a test compares them.
RECOMMENDED: Mapping[str, str] = {
    "spark.sql.pyspark.worker.logging.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
}


def configure(spark: SparkSession) -> SparkSession:
    """Set the recommended run-time confs on a session, also in place of other values, and return the session.

    `lookupcache` works without them. They make its logs queryable, and give an Arrow UDF after a scan larger batches.
    """
    for key, value in RECOMMENDED.items():
        spark.conf.set(key, value)
    return spark
