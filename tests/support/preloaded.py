"""PySpark's daemon, which has already imported what its workers import: Spark forks one for each plan, and the tests make many.

The tests' own sessions and those over Connect run on it. Other programs that tests start run on PySpark's: applications, clusters, the
pages of the documentation.
"""

import contextlib
import gc
import importlib
import runpy
import sys
from pathlib import Path

USED = (
    "numpy", "pandas", "pyarrow.compute", "pyarrow.dataset", "pyspark.worker", "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.plan_data_source_read", "pyspark_lookup.spark.change_stream", "pyspark_lookup.spark.planning",
    "pyspark_lookup.spark.reading", "pyspark_lookup.spark.writer",
)  # fmt: skip


def python_variables(home: Path) -> dict[str, str]:
    """The environment variables by which a Spark that is started now runs its Python on this daemon, by a script in `home`."""
    # Spark runs it by an unquoted shell command, and the checkout's path may have a space.
    script = home / "python"
    script.symlink_to(Path(__file__).with_name("python"))
    return {
        "LOOKUPCACHE_TESTS_PYTHON": sys.executable,
        "PYSPARK_PYTHON": str(script),
        "PYSPARK_DRIVER_PYTHON": str(script),
    }


if __name__ == "__main__":
    for name in USED:
        with contextlib.suppress(ImportError):  # not every Spark has all of them
            importlib.import_module(name)
    # After each task PySpark collects garbage: not in what is imported here.
    gc.collect()
    gc.freeze()
    # Workers call `invalidate_caches`, at which from Python 3.13 on an importer of a zip file forgets what is in it. `pkgutil` then
    # fails on it, and Spark finds no sources; on a new one it does not.
    sys.path_importer_cache.clear()
    runpy.run_module("pyspark.daemon", run_name="__main__")
