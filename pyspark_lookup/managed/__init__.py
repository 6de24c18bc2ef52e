"""Writing a managed table, without Spark: rows to files, files to commits."""

from pyspark_lookup.managed.compaction import Compactor
from pyspark_lookup.managed.data_files import DataFiles
from pyspark_lookup.managed.definitions import match_definition
from pyspark_lookup.managed.heartbeat import Heartbeats
from pyspark_lookup.managed.jobs import Job, batch_directory
from pyspark_lookup.managed.open_transaction import OpenWrites
from pyspark_lookup.managed.sizes import WriteSizes
from pyspark_lookup.managed.vacuum import Vacuumed, vacuum, vacuum_if_due
from pyspark_lookup.managed.writer import TableWriter

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
    "match_definition",
    "vacuum",
    "vacuum_if_due",
]
