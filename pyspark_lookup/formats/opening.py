"""The format that an option names."""

from __future__ import annotations

from pyspark_lookup.formats.arrow import ArrowFormat
from pyspark_lookup.formats.model import (
    FileFormat,
)
from pyspark_lookup.formats.parquet import ParquetFormat
from pyspark_lookup.formats.whole import WholeFileFormat
from pyspark_lookup.options import FileFormatName

__all__ = ["open_format"]


def open_format(name: FileFormatName, block_size: int) -> FileFormat:
    """The format of that name; `block_size` in bytes is for formats without natural blocks."""
    if name is FileFormatName.PARQUET:
        return ParquetFormat()
    if name is FileFormatName.ARROW:
        return ArrowFormat()
    return WholeFileFormat(name, block_size)
