"""ORC: one task decodes a file whole, by the calendar, types and time zones that the file names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.orc

from pyspark_lookup.base.forks import cached_property
from pyspark_lookup.columnar.calendars import Convert, convert_columns, gregorian_dates
from pyspark_lookup.columnar.types import parts_of, spark_schema
from pyspark_lookup.io.stores import FileVersion, Range
from pyspark_lookup.scan.formats.model import BATCH_ROWS, FileIndex, RangesFile, Unit, reading
from pyspark_lookup.scan.formats.orc_tail import OrcTail, read_tail


class OrcIndex(FileIndex):
    def __init__(self, file: FileVersion, content: bytes, ranges: list[Range]) -> None:
        self._file, self._ranges, self._content = file, ranges, content
        self._stored = pa.orc.ORCFile(pa.BufferReader(content)).schema
        self.schema = spark_schema(self._stored, file.url)
        self.units = [Unit(0, 0)]
        # As old versions of Hive call them, whatever the table calls them.
        self.nameless = bool(self.schema.names) and all(name.startswith("_col") for name in self.schema.names)
        converts = {field.name: list(self._leaves(field.type)) for field in self._stored}
        self._converts = {name: leaves for name, leaves in converts.items() if any(leaves)}

    @property
    def stored_schema(self) -> pa.Schema:
        return self._stored

    @cached_property
    def _tail(self) -> OrcTail:
        return read_tail(self._content)

    def _leaves(self, kind: pa.DataType) -> Iterator[Convert | None]:
        """How each flat part of a column is converted to what the file says it is."""
        shape, parts = parts_of(kind)
        if shape is not None:
            for part in parts:
                yield from self._leaves(part)
        else:
            yield gregorian_dates if pa.types.is_date32(kind) and self._tail.hybrid else None

    def ranges(self, unit: Unit, columns: Sequence[str]) -> list[Range]:
        return self._ranges

    def batches(self, unit: Unit, columns: Sequence[str], source: RangesFile) -> Iterator[pa.RecordBatch]:
        with reading(self._file, "orc"):
            # Without any column it would read no row.
            read = list(columns) or self.schema.names[:1]
            table = pa.orc.ORCFile(pa.BufferReader(self._content)).read(columns=read).select(list(columns))
            for batch in table.to_batches(BATCH_ROWS):
                yield convert_columns(batch, self._converts)
