"""The stores: an identity for each file, listings, reads pinned to a version.

This is the only one of our packages that imports fsspec. Instances belong to one process.
"""

from pyspark_lookup.storage.stores.opening import open_store
from pyspark_lookup.storage.stores.store import (
    CATALOG_SCHEME,
    DELETE_FILE,
    IMMUTABLE,
    LOCAL_GRANULE_S,
    LOG_DIRECTORY,
    PART_OF_FILE,
    SETTLED_AFTER_S,
    Count,
    Deletes,
    EqualityColumns,
    FileStatistics,
    FileVersion,
    Listing,
    PartitionValues,
    Range,
    Store,
    StoredColumn,
    add_log_directory,
)

__all__ = [
    "CATALOG_SCHEME",
    "DELETE_FILE",
    "IMMUTABLE",
    "LOCAL_GRANULE_S",
    "LOG_DIRECTORY",
    "PART_OF_FILE",
    "SETTLED_AFTER_S",
    "Count",
    "Deletes",
    "EqualityColumns",
    "FileStatistics",
    "FileVersion",
    "Listing",
    "PartitionValues",
    "Range",
    "Store",
    "StoredColumn",
    "add_log_directory",
    "open_store",
]
