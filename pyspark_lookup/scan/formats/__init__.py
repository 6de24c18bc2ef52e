"""File formats: which byte ranges of a file have its schema, statistics and rows, and how these are decoded.

A format never reads from storage. It names the ranges that it needs, and the caller reads their bytes. `RangesFile` shows them to pyarrow as a
file. A file is opened step by step: `first_ranges` names the first ranges, and `open_index` takes the bytes of all ranges read so far. It
returns further ranges, or the file's index when it has all bytes that it needs.
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
    """The format with the name `name`. `declared`: the columns that the user declares; None: each file's own columns are read.

    `block_size`: for a format whose files have no parts of their own (CSV, JSON, ORC), the size in bytes of the ranges that are read.
    """
    if name is FileFormatName.PARQUET:
        return ParquetFormat()
    if name is FileFormatName.ARROW:
        return ArrowFormat()
    return WholeFileFormat(name, block_size, csv or CsvOptions(), declared)
