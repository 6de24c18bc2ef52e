"""File formats: the byte ranges of a file's schema, statistics and rows, and how these are decoded.

A format never reads from storage. It names ranges, and the caller brings their bytes; through `RangesFile` pyarrow reads them as one file.
Call `open_index` with the bytes of more and more ranges, until it returns an index instead of ranges.
"""

import pyarrow as pa

from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.options.groups import CsvOptions
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
    """The format of that name. `block_size`: in bytes, for formats without blocks of their own. `declared`: the columns that the user declares."""
    if name is FileFormatName.PARQUET:
        return ParquetFormat()
    if name is FileFormatName.ARROW:
        return ArrowFormat()
    return WholeFileFormat(name, block_size, csv or CsvOptions(), declared)
