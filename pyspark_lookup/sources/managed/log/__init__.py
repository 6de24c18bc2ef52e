"""The notification log of a managed table (after Hive's): its events, the state of the table after them, and the log's files in the store."""

from pyspark_lookup.sources.managed.log.events import (
    Abort,
    Allocate,
    Batch,
    Commit,
    Create,
    DataFile,
    Definition,
    Event,
    Vacuum,
    Write,
    WriteMode,
    event_bytes,
)
from pyspark_lookup.sources.managed.log.log import NotificationLog
from pyspark_lookup.sources.managed.log.state import Change, EarlierStateError, TableState, TableWrite

__all__ = [
    "Abort",
    "Allocate",
    "Batch",
    "Change",
    "Commit",
    "Create",
    "DataFile",
    "Definition",
    "EarlierStateError",
    "Event",
    "NotificationLog",
    "TableState",
    "TableWrite",
    "Vacuum",
    "Write",
    "WriteMode",
    "event_bytes",
]
