"""What each kind of store offers: an identity per file, a listing, reads pinned to a version.

This is the only package of ours that imports fsspec. Instances belong to one process.
"""

from pyspark_lookup.io.stores.opening import open_store
from pyspark_lookup.io.stores.store import (
    HIDDEN,
    IMMUTABLE,
    LOCAL_GRANULE_S,
    LOG_DIRECTORY,
    SETTLED_AFTER_S,
    Count,
    FileVersion,
    Listing,
    Range,
    Store,
)

__all__ = [
    "HIDDEN",
    "IMMUTABLE",
    "LOCAL_GRANULE_S",
    "LOG_DIRECTORY",
    "SETTLED_AFTER_S",
    "Count",
    "FileVersion",
    "Listing",
    "Range",
    "Store",
    "open_store",
]
