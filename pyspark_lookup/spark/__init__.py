"""Spark's data source, streams, joins and SQL functions: the only package that imports pyspark."""

import pyspark_lookup.core  # noqa: F401 - refuses a Python that is too old
