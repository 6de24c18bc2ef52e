"""PySpark's daemon, with imported beforehand what its workers import: Spark forks one for each plan and the tests make many.

Sessions of the tests' own run on it (`conftest.spark`). Whatever starts a program of its own runs on PySpark's: applications,
Connect, clusters, the pages of the documentation.
"""

from __future__ import annotations

import importlib
import runpy
import sys

USED = (
    "numpy",
    "pandas",
    "pyarrow.compute",
    "pyarrow.dataset",
    "pyspark.worker",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark_lookup.spark.change_stream",
    "pyspark_lookup.spark.planning",
    "pyspark_lookup.spark.reading",
    "pyspark_lookup.spark.writer",
    "tests.toy_source",
)

if __name__ == "__main__":
    for name in USED:
        importlib.import_module(name)
    # Workers call `invalidate_caches`, at which from Python 3.13 on an importer of a zip file forgets what is in it. `pkgutil` then
    # fails on it, and Spark finds no sources; on a new one it does not.
    sys.path_importer_cache.clear()
    runpy.run_module("pyspark.daemon", run_name="__main__")
