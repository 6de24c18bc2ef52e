"""`configure(spark)`: the session settings that suit lookupcache best."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession

# The same confs as in conf/spark-defaults.conf, which gives the reason for each; a test compares the two.
RECOMMENDED: Mapping[str, str] = {
    "spark.sql.pyspark.worker.logging.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
}


def configure(spark: SparkSession) -> SparkSession:
    """Set the recommended confs on a session, and return the session. A conf that already has another value is changed.

    The package works without these confs. With them, its logs can be queried, and an Arrow UDF that reads a scan's rows gets larger batches.
    """
    for key, value in RECOMMENDED.items():
        spark.conf.set(key, value)
    return spark
