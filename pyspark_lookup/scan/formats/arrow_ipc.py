"""Arrow IPC files (Feather V2): blocks are the tail with the footer, dictionaries, and record batches."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import pyarrow as pa

from pyspark_lookup.columnar.types import lenient_schema, without_counterpart
from pyspark_lookup.scan.formats.arrow_schema import Table, narrow
from pyspark_lookup.scan.formats.model import BATCH_ROWS, FileIndex, FooterFormat, RangesFile, Unit, inside, reading
from pyspark_lookup.storage.stores import FileVersion, Range


class ArrowFormat(FooterFormat):
    name, magic, frame = "Arrow IPC", b"ARROW1", 18

    def _index(self, file: FileVersion, source: RangesFile, start: int, length: int) -> FileIndex:
        source.seek(start)
        footer = bytearray(source.read())
        dictionaries, batches = _ipc_blocks(footer)
        inside(file, self.name, dictionaries + batches)
        tail, wide = None, {}
        try:
            schema = _open(source).schema
        except pa.ArrowNotImplementedError:
            in_footer = Table.root(footer).table(1)
            wide = {} if in_footer is None else narrow(in_footer)
            if not wide:
                raise
            tail = start, bytes(footer)
            schema = _open(source.with_tail(*tail)).schema
        schema = pa.schema([without_counterpart(field, wide.get(field.name), file.url) for field in schema])
        return ArrowIndex(file, schema, dictionaries, batches, tail)


def _open(source: RangesFile) -> pa.ipc.RecordBatchFileReader:
    source.seek(0)
    return pa.ipc.open_file(pa.PythonFile(source, mode="r"))


class ArrowIndex(FileIndex):
    """An Arrow IPC footer. Its record batches are read as a whole, so columns are pruned after the read.

    `tail`: where the file's footer begins, and the bytes to read instead of it.
    """

    def __init__(
        self,
        file: FileVersion,
        schema: pa.Schema,
        dictionaries: list[Range],
        batches: list[Range],
        tail: tuple[int, bytes] | None = None,
    ) -> None:
        self._file = file
        self._dictionaries = dictionaries
        self._batches = batches
        self._tail = tail
        self.schema = lenient_schema(schema, file.url)
        self.units = [Unit(number, offset + length // 2) for number, (offset, length) in enumerate(batches)]

    def ranges(self, unit: Unit, columns: Sequence[str]) -> list[Range]:
        return [*self._dictionaries, self._batches[unit.number]]

    def batches(self, unit: Unit, columns: Sequence[str], source: RangesFile) -> Iterator[pa.RecordBatch]:
        with reading(self._file, ArrowFormat.name):
            file = _open(source if self._tail is None else source.with_tail(*self._tail))
            batch = file.get_batch(unit.number).select(list(columns))
            batch.validate(full=True)  # bad offsets or codes would read other memory; checks about 2 GB/s
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def _ipc_blocks(footer: bytearray) -> tuple[list[Range], list[Range]]:
    """(dictionaries, record batches) of an IPC footer, which pyarrow reads but does not expose.

    "table Footer { version: MetadataVersion; schema: Schema; dictionaries: [Block]; recordBatches:
    [Block]; … }", "struct Block { offset: long; metaDataLength: int; bodyLength: long }" (Arrow's
    File.fbs).
    """
    table = Table.root(footer)

    def blocks(field: int) -> list[Range]:
        entries = (struct.unpack_from("<qi4xq", footer, at) for at in table.elements(field, 24))
        return [(start, metadata + body) for start, metadata, body in entries]

    return blocks(2), blocks(3)
