"""Spark's data source, streams, joins and SQL functions: the only package that imports pyspark."""
