"""The format that an option names."""

from __future__ import annotations

import pyarrow as pa

from pyspark_lookup.options.enums import CsvOptions, FileFormatName
from pyspark_lookup.scan.formats.arrow_ipc import ArrowFormat
from pyspark_lookup.scan.formats.model import FileFormat
from pyspark_lookup.scan.formats.parquet import ParquetFormat
from pyspark_lookup.scan.formats.whole_file import WholeFileFormat


def open_format(
    name: FileFormatName, block_size: int, csv: CsvOptions | None = None, declared: pa.Schema | None = None
) -> FileFormat:
    """The format of that name. `block_size`: bytes, for formats without natural blocks. `declared`: the columns of text files."""
    if name is FileFormatName.PARQUET:
        return ParquetFormat()
    if name is FileFormatName.ARROW:
        return ArrowFormat()
    return WholeFileFormat(name, block_size, csv or CsvOptions(), declared)
