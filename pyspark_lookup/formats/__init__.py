"""File formats: which byte ranges a file's schema, statistics and rows lie in, and how they decode.

A format never touches storage. It names ranges; the caller brings their bytes; `RangesFile` lets
pyarrow read them as one file. `open_index` is called until it no longer asks for more ranges.
"""

from pyspark_lookup.formats.inference import Inferred, joined
from pyspark_lookup.formats.model import BATCH_ROWS, Data, FileFormat, FileIndex, RangesFile, Unit
from pyspark_lookup.formats.names import format_of
from pyspark_lookup.formats.opening import open_format

__all__ = [
    "BATCH_ROWS",
    "Data",
    "FileFormat",
    "FileIndex",
    "Inferred",
    "RangesFile",
    "Unit",
    "format_of",
    "joined",
    "open_format",
]
