"""The host's cache directory: blocks, records, segments, counters, claims, locks, and a budget for all of them. Only this package touches its
files.

Layout, below a directory of mode 0700 that this user owns::

    v1/CACHEDIR.TAG                                                a marker: everything below v1 is a cache of lookupcache
    v1/blocks/<2 hex>/<path key>/<version key>/<offset>-<length>   one block
    v1/records/<kind>/<key>                                        one small JSON value
    v1/snapshots/<table key>/<name>                                one segment of a table's snapshots
    v1/counters/<table key>-<host>-<process>-<8 hex>               a process's counters, written in place
    v1/claims/<table key>/<name>                                   keys that a process is loading
    v1/locks/<kind>-<3 hex>                                        an empty file to lock; never removed
    v1/locks/limit-<key>                                           the same, with the state of a limit of calls
    v1/tmp/                                                        files that are being written; `*.reserved`: those of long builds
    v1/usage                                                       the bytes that all files take, as three numbers, see `space`

A block or a record has a header (magic, length, CRC-32, digest of its name) and a payload; `segments` and `records` describe segments and
counters. Writers rename or link blocks, records, claims and segments into place, so such a file is complete or missing. Counters and `usage`
are changed in place. Readers take no lock; to them, a damaged file is the same as a missing one. Nothing is ever unpickled. The directory
belongs to one user, for all worker processes of the host. If somebody removes it, or a part of it, while it is in use, the next writer makes
it again.
"""

from pyspark_lookup.storage.disk.blocks import SWEEP_EVERY_S, BlockKey, Disk, DiskReport, DiskSpace, empty_space
from pyspark_lookup.storage.disk.directory import (
    LAYOUT,
    Lock,
    digest_of,
    is_cache_directory,
    key_of,
    key_of_texts,
    memory_backed,
)
from pyspark_lookup.storage.disk.records import CounterFile, Counts, Held
from pyspark_lookup.storage.disk.segments import DERIVED, OpenSegment, SegmentWriter
from pyspark_lookup.storage.disk.space import ReservedFile, on_disk

__all__ = [
    "BlockKey",
    "CounterFile",
    "Counts",
    "DERIVED",
    "Disk",
    "DiskReport",
    "DiskSpace",
    "Held",
    "LAYOUT",
    "Lock",
    "OpenSegment",
    "ReservedFile",
    "SWEEP_EVERY_S",
    "SegmentWriter",
    "empty_space",
    "is_cache_directory",
    "digest_of",
    "key_of",
    "key_of_texts",
    "memory_backed",
    "on_disk",
]
