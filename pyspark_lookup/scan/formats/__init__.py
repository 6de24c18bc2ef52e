"""File formats: which byte ranges of a file have its schema, statistics and rows, and how these are decoded.

A format never reads from storage. It names the ranges that it needs, and the caller reads their bytes. `RangesFile` shows them to pyarrow as a
file. A file is opened step by step: `first_ranges` names the first ranges, and `open_index` takes the bytes of all ranges read so far. It
returns further ranges, or the file's index when it has all bytes that it needs.
"""

from pyspark_lookup.scan.formats.inference import Inferred, join_inferred
from pyspark_lookup.scan.formats.model import BATCH_ROWS, Data, FileFormat, FileIndex, RangesFile, Unit

__all__ = [
    "BATCH_ROWS",
    "Data",
    "FileFormat",
    "FileIndex",
    "Inferred",
    "RangesFile",
    "Unit",
    "join_inferred",
]
