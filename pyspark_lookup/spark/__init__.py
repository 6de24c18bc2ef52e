"""What Spark calls, and what calls Spark: the only package that imports pyspark."""
