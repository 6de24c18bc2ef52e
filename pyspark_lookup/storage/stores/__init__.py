"""The stores: local disks, S3, and all others through fsspec. They identify, list, read and write files.

No other package of ours imports fsspec. A store must not be used after a fork.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from fsspec.core import split_protocol

from pyspark_lookup.errors import OptionError
from pyspark_lookup.options.lookup_options import is_local
from pyspark_lookup.storage.stores.fsspec import FsspecStore
from pyspark_lookup.storage.stores.listed_files import ListedFiles, key_of_column, split_urls
from pyspark_lookup.storage.stores.local import LocalStore
from pyspark_lookup.storage.stores.s3 import S3Store
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
    EqualityDeletes,
    EqualityGroup,
    FileStatistics,
    FileVersion,
    Listing,
    PartitionValues,
    Range,
    Store,
    StoredColumn,
    add_log_directory,
)
from pyspark_lookup.storage.stores.vended import (
    CredentialHolder,
    VendedCredentials,
    VendedStore,
    azure_account,
    renewed_after_s,
    with_vended,
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
    "CredentialHolder",
    "Deletes",
    "EqualityColumns",
    "EqualityDeletes",
    "EqualityGroup",
    "FileStatistics",
    "FileVersion",
    "VendedCredentials",
    "VendedStore",
    "ListedFiles",
    "Listing",
    "PartitionValues",
    "Range",
    "Store",
    "StoredColumn",
    "add_log_directory",
    "azure_account",
    "key_of_column",
    "open_store",
    "renewed_after_s",
    "split_urls",
    "with_vended",
]


def open_store(path: str, storage_options: Mapping[str, Any], now_s: Callable[[], float] = time.time) -> Store:
    """The store that a path or URL names. Raises OptionError for a protocol that fsspec does not know."""
    protocol, _ = split_protocol(path)
    if is_local(path):
        if storage_options:
            raise OptionError(
                f"option lookup.storage.{next(iter(storage_options))}: local paths take no storage options: remove it"
            )
        return LocalStore(now_s)
    if protocol in ("s3", "s3a", "s3n"):
        return S3Store(storage_options)
    return FsspecStore(path, str(protocol), storage_options, now_s)
