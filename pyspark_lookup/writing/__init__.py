"""Writing a managed table, without Spark: rows to files, files to commits."""

from pyspark_lookup.writing.compaction import Compactor
from pyspark_lookup.writing.files import DataFiles, matched
from pyspark_lookup.writing.heartbeat import Heartbeats
from pyspark_lookup.writing.jobs import Job, batch_directory
from pyspark_lookup.writing.sizes import WriteSizes
from pyspark_lookup.writing.table import TableWriter
from pyspark_lookup.writing.transaction import OpenWrites
from pyspark_lookup.writing.vacuum import Vacuumed, vacuum

__all__ = [
    "Compactor",
    "DataFiles",
    "Heartbeats",
    "Job",
    "OpenWrites",
    "TableWriter",
    "Vacuumed",
    "WriteSizes",
    "batch_directory",
    "matched",
    "vacuum",
]
