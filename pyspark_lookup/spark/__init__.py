"""Spark's data source, streams, joins and SQL functions: the only package that imports pyspark."""

import gc
import sys

import pyspark_lookup.core  # noqa: F401 - refuses a Python that is too old

_contexts = sys.modules.get("pyspark.taskcontext")
if _contexts is not None and _contexts.TaskContext.get() is not None:
    # This is a worker of Spark that is about to import our modules. The garbage collections during these imports would go through all objects
    # of pyarrow, pandas and PySpark, which takes longer than importing any of our modules.
    gc.freeze()
