"""CSV, JSON and ORC files, each of which one task reads and decodes as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from pyspark_lookup.columnar.types import has_variant, lenient_schema
from pyspark_lookup.core import memory
from pyspark_lookup.errors import NotSupportedError, SchemaError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.options.groups import CsvOptions
from pyspark_lookup.scan.formats.inference import fits
from pyspark_lookup.scan.formats.model import (
    BATCH_ROWS,
    TEXT_AT_MOST,
    Data,
    FileIndex,
    RangesFile,
    Unit,
    decompressed,
    reading,
)
from pyspark_lookup.scan.formats.orc import OrcIndex
from pyspark_lookup.scan.formats.text import CsvFile, JsonFile
from pyspark_lookup.storage.stores import FileVersion, Range

_COPIES = 3  # how many copies of a text are in memory while it is read


class WholeFileFormat:
    """A format whose files are decoded as a whole, by one task. The schema of a CSV or JSON file is inferred from all its values.

    Files are read and cached in ranges of `block_size` bytes. `declared`: the columns that the user declares (`lookup.schema`); text is parsed
    as their types.
    """

    splittable = False

    def __init__(
        self, name: FileFormatName, block_size: int, csv: CsvOptions, declared: pa.Schema | None = None
    ) -> None:
        self._name = name
        self._block_size = block_size
        self._csv = csv
        self._declared = declared

    def first_ranges(self, file: FileVersion) -> list[Range]:
        starts = range(0, file.size, self._block_size)
        return [(start, min(self._block_size, file.size - start)) for start in starts]

    def open_index(
        self, file: FileVersion, data: Mapping[Range, Data], planned: pa.Schema | None
    ) -> FileIndex | list[Range]:
        blocks = [data[part] for part in self.first_ranges(file)]
        content = bytes(blocks[0]) if len(blocks) == 1 else b"".join(blocks)
        with reading(file, self._name.value):
            content = bytes(decompressed(file, content))
            if self._name is FileFormatName.ORC:
                return OrcIndex(file, content, self.first_ranges(file), self._declared)
            if len(content) > TEXT_AT_MOST:
                raise NotSupportedError(
                    f"{redact('path', file.url)} has {len(content)} bytes of {self._name.value}, which is read as a whole, 2 GiB at most: "
                    "split it, or write parquet"
                )
            if not memory.has_room(len(content) * _COPIES):
                raise NotSupportedError(
                    f"{redact('path', file.url)} has {len(content)} bytes of {self._name.value}, which is read as a whole and takes about "
                    f"{len(content) * _COPIES} bytes of memory, but only {memory.free_bytes()} are free: split it, or write parquet"
                )
            text: CsvFile | JsonFile
            if self._name is FileFormatName.JSON:
                text = JsonFile(content)
            else:
                text = CsvFile(content, self._csv, file.url, self._declared.names if self._declared else None)
            return _TextIndex(file, text, planned, self._declared is not None, self.first_ranges(file))


class _TextIndex(FileIndex):
    """The index of a CSV or JSON file. A column has the planned type if its values fit that type, otherwise the type inferred from its values.

    `parsed`: the user has declared the planned types, so texts are parsed as these types, whatever types would be inferred.
    """

    def __init__(
        self,
        file: FileVersion,
        text: CsvFile | JsonFile,
        planned: pa.Schema | None,
        parsed: bool,
        ranges: list[Range],
    ) -> None:
        types = {field.name.lower(): field.type for field in planned or ()}
        misfits: dict[str, str] = {}
        self.inferred = {}
        self._arrays: dict[str, pa.Array] = {}
        kinds: dict[str, pa.DataType] = {}
        for column in text.names:
            kind = types.get(column.lower())
            if kind is not None and not has_variant(kind):  # text has no bytes of a VARIANT
                try:
                    # The type was inferred from other files. Here numbers may be written with more zeros, so they are compared by value, too.
                    if parsed or fits(text.infer(column), kind) or fits(text.infer(column, by_value=True), kind):
                        self._arrays[column] = text.column(column, kind)
                        kinds[column] = kind
                        continue
                except SchemaError as problem:
                    misfits[column] = str(problem)
            inferred = text.infer(column)
            self.inferred[column], kinds[column] = inferred, inferred.type()
        self.schema = lenient_schema(pa.schema([pa.field(column, kinds[column]) for column in text.names]), file.url)
        self.units = [Unit(0, 0)]
        self._text, self._kinds, self._ranges = text, kinds, ranges
        self.misfits = misfits

    def ranges(self, unit: Unit, columns: Sequence[str]) -> list[Range]:
        return self._ranges

    def batches(self, unit: Unit, columns: Sequence[str], source: RangesFile) -> Iterator[pa.RecordBatch]:
        for column in columns:
            if column not in self._arrays:
                self._arrays[column] = self._text.column(column, self._kinds[column])
        arrays = [self._arrays[column] for column in columns]
        if not arrays:
            yield pa.RecordBatch.from_struct_array(pa.nulls(self._text.rows, pa.struct([])))
            return
        yield from pa.Table.from_arrays(arrays, list(columns)).to_batches(BATCH_ROWS)
