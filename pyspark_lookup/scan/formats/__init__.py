"""File formats: which byte ranges a file's schema, statistics and rows lie in, and how they decode.

A format never touches storage. It names ranges; the caller brings their bytes; `RangesFile` lets
pyarrow read them as one file. `open_index` is called until it no longer asks for more ranges.
"""

import pyarrow as pa

from pyspark_lookup.options.enums import CsvOptions, FileFormatName
from pyspark_lookup.scan.formats.arrow_ipc import ArrowFormat
from pyspark_lookup.scan.formats.inference import Inferred, join_inferred
from pyspark_lookup.scan.formats.model import BATCH_ROWS, Data, FileFormat, FileIndex, RangesFile, Unit
from pyspark_lookup.scan.formats.parquet import ParquetFormat
from pyspark_lookup.scan.formats.whole_file import WholeFileFormat

__all__ = [
    "BATCH_ROWS",
    "Data",
    "FileFormat",
    "FileIndex",
    "Inferred",
    "RangesFile",
    "Unit",
    "join_inferred",
    "open_format",
]


def open_format(
    name: FileFormatName, block_size: int, csv: CsvOptions | None = None, declared: pa.Schema | None = None
) -> FileFormat:
    """The format of that name. `block_size`: bytes, for formats without natural blocks. `declared`: the columns of text files."""
    if name is FileFormatName.PARQUET:
        return ParquetFormat()
    if name is FileFormatName.ARROW:
        return ArrowFormat()
    return WholeFileFormat(name, block_size, csv or CsvOptions(), declared)
