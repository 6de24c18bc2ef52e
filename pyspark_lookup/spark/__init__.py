"""The edges that know pyspark."""
