"""Managed tables, without Spark: their log and their versions, the files that hold their rows, and the commits of these files."""

from pyspark_lookup.sources.managed.compaction import Compactor
from pyspark_lookup.sources.managed.data_files import DataFiles, Job, WriteSizes, batch_directory, match_definition
from pyspark_lookup.sources.managed.open_transaction import OpenWrites
from pyspark_lookup.sources.managed.vacuum import Vacuumed, vacuum, vacuum_if_due
from pyspark_lookup.sources.managed.writer import Heartbeats, TableWriter

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
