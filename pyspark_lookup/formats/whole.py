"""CSV, JSON lines and ORC: blocks are aligned ranges, and one task decodes a file whole."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.orc

from pyspark_lookup.errors import NotSupportedError, PysparkLookupError
from pyspark_lookup.formats.model import BATCH_ROWS, Data, FileIndex, RangesFile, Unit, damaged
from pyspark_lookup.formats.names import DECOMPRESS, base_name
from pyspark_lookup.options import FileFormatName
from pyspark_lookup.predicate import ColumnStats
from pyspark_lookup.schema import spark_schema
from pyspark_lookup.ufs import FileVersion, Range

__all__ = ["WholeFileFormat", "WholeFileIndex"]


class WholeFileFormat:
    """Blocks: aligned ranges. The schema is inferred from the whole file; one task decodes it."""

    splittable = False

    def __init__(self, name: FileFormatName, block_size: int) -> None:
        self._name = name
        self._block_size = block_size

    def first_ranges(self, file: FileVersion) -> list[Range]:
        starts = range(0, file.size, self._block_size)
        return [(start, min(self._block_size, file.size - start)) for start in starts]

    def open_index(
        self, file: FileVersion, data: Mapping[Range, Data], planned: pa.Schema | None
    ) -> FileIndex | list[Range]:
        blocks = [data[part] for part in self.first_ranges(file)]
        content = bytes(blocks[0]) if len(blocks) == 1 else b"".join(blocks)
        try:
            for suffix, decompress in DECOMPRESS.items():
                if base_name(file.url).endswith(suffix):
                    content = decompress(content)
            if len(content) >= 2**31 - 1 and self._name is not FileFormatName.ORC:
                raise NotSupportedError(
                    f"{file.url} holds {len(content)} bytes of {self._name.value}, which is read as one piece of up to "
                    "2 GiB: split it, or write parquet"
                )
            if self._name is FileFormatName.ORC:
                table = None
                schema = pa.orc.ORCFile(pa.BufferReader(content)).schema
            else:
                table = _parse(self._name, content, planned)
                schema = table.schema
            return WholeFileIndex(file, self._name, schema, table, content, self.first_ranges(file))
        except PysparkLookupError:
            raise
        except (pa.ArrowException, OSError, EOFError, ValueError, zlib.error) as problem:
            raise damaged(file, self._name.value, problem) from problem


class WholeFileIndex:
    """A file decoded as one unit."""

    def __init__(
        self,
        file: FileVersion,
        name: FileFormatName,
        schema: pa.Schema,
        table: pa.Table | None,
        content: bytes,
        ranges: list[Range],
    ) -> None:
        self._file, self._name, self._table, self._content, self._ranges = file, name, table, content, ranges
        self.schema = spark_schema(schema, file.url)
        self.units = [Unit(0, 0)]

    def stats(self, unit: Unit, column: str) -> ColumnStats | None:
        return None

    def rows(self, unit: Unit) -> int | None:
        return None  # not without reading them

    def ranges(self, unit: Unit, columns: Sequence[str]) -> list[Range]:
        return self._ranges

    def batches(self, unit: Unit, columns: Sequence[str], source: RangesFile) -> Iterator[pa.RecordBatch]:
        try:
            table = self._table
            if table is None:
                # Without any column it would read no row.
                wanted = list(columns) or self.schema.names[:1]
                table = pa.orc.ORCFile(pa.BufferReader(self._content)).read(columns=wanted)
            yield from table.select(list(columns)).to_batches(BATCH_ROWS)
        except (pa.ArrowException, OSError) as problem:
            raise damaged(self._file, self._name.value, problem) from problem


def _parse(name: FileFormatName, content: bytes, planned: pa.Schema | None) -> pa.Table:
    """CSV with a header line or JSON lines as a table of the file's own columns; types as planned where given.

    Where a value does not fit its planned type, types are inferred, for the caller to compare.
    """
    read = _read_json if name is FileFormatName.JSON else _read_csv
    wanted = {} if planned is None else {field.name: field.type for field in planned}
    try:
        table = read(content, wanted)
    except pa.ArrowInvalid:
        if not wanted:
            raise
        return read(content, {})
    names = table.schema.names
    if name is FileFormatName.JSON:
        # A JSON reader adds the columns it is told of. Those without a value may not be in the file.
        told = {n: kind for n, kind in wanted.items() if table.column(n).null_count < table.num_rows}
        if len(told) < len(wanted):
            names = read(content, told).schema.names
    folded = {n.casefold(): kind for n, kind in wanted.items()}
    spelled = {n: folded[n.casefold()] for n in names if n.casefold() in folded}
    if not spelled.keys() <= wanted.keys():  # in another letter case
        table = read(content, spelled)
    return table.select(names)


def _read_json(content: bytes, types: Mapping[str, pa.DataType]) -> pa.Table:
    schema = pa.schema(list(types.items())) if types else None
    options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer")
    read = pa.json.ReadOptions(block_size=_one_block(content))
    table = pa.json.read_json(pa.BufferReader(content), read, options)
    table.validate(full=True)  # the reader lets texts through that are no UTF-8
    return table


def _read_csv(content: bytes, types: Mapping[str, pa.DataType]) -> pa.Table:
    if not content.endswith((b"\n", b"\r")):
        content += b"\n"  # a header line alone is no CSV to pyarrow without it
    read = pa.csv.ReadOptions(block_size=_one_block(content))
    parse = pa.csv.ParseOptions(newlines_in_values=True)
    convert = {"null_values": [""], "strings_can_be_null": True, "quoted_strings_can_be_null": False}

    def table(types: Mapping[str, pa.DataType]) -> pa.Table:
        options = pa.csv.ConvertOptions(column_types=dict(types), **convert)
        return pa.csv.read_csv(pa.BufferReader(content), read, parse, options)

    inferred = table(types)
    # Spark takes no time of day: such columns stay the text they were.
    times = {field.name: pa.string() for field in inferred.schema if pa.types.is_time(field.type)}
    return table({**types, **times}) if times else inferred


def _one_block(content: bytes) -> int:
    """Inference must see every value, or a file could not be read by its own schema."""
    return max(len(content) + 1, 1024)
