"""File formats: which byte ranges a file's schema, statistics and rows lie in, and how they decode.

A format never touches storage. It names ranges; the caller brings their bytes; `RangesFile` lets
pyarrow read them as one file. `open_index` is called until it no longer asks for more ranges.
"""

from pyspark_lookup.scan.formats.inference import Inferred, joined
from pyspark_lookup.scan.formats.model import BATCH_ROWS, Data, FileFormat, FileIndex, RangesFile, Unit
from pyspark_lookup.scan.formats.registry import open_format

__all__ = [
    "BATCH_ROWS",
    "Data",
    "FileFormat",
    "FileIndex",
    "Inferred",
    "RangesFile",
    "Unit",
    "joined",
    "open_format",
]
