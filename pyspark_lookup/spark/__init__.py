"""Spark's data source, streams, joins and SQL functions: the only package that imports pyspark."""

import gc
import sys

import pyspark_lookup.core  # noqa: F401 - refuses a Python that is too old

_contexts = sys.modules.get("pyspark.taskcontext")
if _contexts is not None and _contexts.TaskContext.get() is not None:
    # This is a worker that is about to import our modules. Their garbage collections would go through all that pyarrow, pandas and PySpark have
    # brought in, which takes longer than any of the modules.
    gc.freeze()
