"""Writing a managed table, without Spark: rows to files, files to commits."""

from pyspark_lookup.writing.files import DataFiles, matched
from pyspark_lookup.writing.heartbeat import Heartbeats
from pyspark_lookup.writing.table import Job, TableWriter

__all__ = ["DataFiles", "Heartbeats", "Job", "TableWriter", "matched"]
