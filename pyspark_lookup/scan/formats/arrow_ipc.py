"""Arrow IPC files (Feather V2): blocks are the tail with the footer, dictionaries, and record batches."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import pyarrow as pa

from pyspark_lookup.columnar.types import lenient_schema
from pyspark_lookup.io.stores import FileVersion, Range
from pyspark_lookup.scan.formats.model import BATCH_ROWS, FileIndex, FooterFormat, RangesFile, Unit, inside, reading


class ArrowFormat(FooterFormat):
    name, magic, frame = "Arrow IPC", b"ARROW1", 18

    def _index(self, file: FileVersion, source: RangesFile, start: int, length: int) -> FileIndex:
        source.seek(start)
        dictionaries, batches = _ipc_blocks(bytes(source.read(length)))
        source.seek(0)
        schema = pa.ipc.open_file(pa.PythonFile(source, mode="r")).schema
        inside(file, self.name, dictionaries + batches)
        return ArrowIndex(file, schema, dictionaries, batches)


class ArrowIndex(FileIndex):
    """An Arrow IPC footer: its record batches are whole, so columns are pruned after the read."""

    def __init__(self, file: FileVersion, schema: pa.Schema, dictionaries: list[Range], batches: list[Range]) -> None:
        self._file = file
        self._dictionaries = dictionaries
        self._batches = batches
        self.schema = lenient_schema(schema, file.url)
        self.units = [Unit(number, offset + length // 2) for number, (offset, length) in enumerate(batches)]

    def ranges(self, unit: Unit, columns: Sequence[str]) -> list[Range]:
        return [*self._dictionaries, self._batches[unit.number]]

    def batches(self, unit: Unit, columns: Sequence[str], source: RangesFile) -> Iterator[pa.RecordBatch]:
        with reading(self._file, ArrowFormat.name):
            batch = pa.ipc.open_file(pa.PythonFile(source, mode="r")).get_batch(unit.number).select(list(columns))
            batch.validate(full=True)  # bad offsets or codes would read other memory: about 2 GB/s
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def _ipc_blocks(footer: bytes) -> tuple[list[Range], list[Range]]:
    """(dictionaries, record batches) of an IPC footer, which pyarrow reads but does not show.

    "table Footer { version: MetadataVersion; schema: Schema; dictionaries: [Block]; recordBatches:
    [Block]; … }", "struct Block { offset: long; metaDataLength: int; bodyLength: long }" (Arrow's
    File.fbs). A flatbuffer table starts with the signed distance back to its vtable, which holds a
    16-bit field offset per field after two 16-bit sizes; a vector is reached by a 32-bit distance.
    """
    (table,) = struct.unpack_from("<I", footer, 0)
    (back,) = struct.unpack_from("<i", footer, table)
    vtable = table - back
    (vtable_bytes,) = struct.unpack_from("<H", footer, vtable)

    def blocks(field: int) -> list[Range]:
        slot = 4 + 2 * field
        (offset,) = struct.unpack_from("<H", footer, vtable + slot) if slot < vtable_bytes else (0,)
        if not offset:
            return []
        at = table + offset
        vector = at + struct.unpack_from("<I", footer, at)[0]
        (count,) = struct.unpack_from("<I", footer, vector)
        entries = (struct.unpack_from("<qi4xq", footer, vector + 4 + 24 * number) for number in range(count))
        return [(start, metadata + body) for start, metadata, body in entries]

    return blocks(2), blocks(3)
