"""Arrow IPC files (Feather V2). The byte ranges that are read are the tail with the footer, the dictionaries, and record batches.

This module also decodes parts of Arrow's flatbuffers that pyarrow does not expose, or cannot read.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator, Sequence

import pyarrow as pa

from pyspark_lookup.columnar.types import lenient_schema, without_counterpart
from pyspark_lookup.scan.formats.model import BATCH_ROWS, FileIndex, FooterFormat, RangesFile, Unit, inside, reading
from pyspark_lookup.storage.stores import FileVersion, Range

_INT = 2  # the number of the type Int in the union Type of Arrow's Schema.fbs
# Pyarrow reads integers of up to this many bits; Polars writes some of 128, which have the same two buffers.
_MOST_BITS = 64
# Finds the Arrow schema in a Parquet footer, which is in Thrift's compact protocol: the key, the length of the value, the value.
_IN_PARQUET = re.compile(rb"ARROW:schema\x18[\x80-\xff]*[\x00-\x7f]([A-Za-z0-9+/]+={0,2})")


class Table:
    """A table of a flatbuffer: a record with fields.

    It starts with the signed distance back to its vtable, which has a 16-bit offset for each field.
    """

    def __init__(self, data: bytearray, at: int) -> None:
        self.data, self._at = data, at
        self._places = at - self.number("<i", at)

    @classmethod
    def root(cls, data: bytearray, at: int = 0) -> Table:
        return cls(data, at + struct.unpack_from("<I", data, at)[0])

    def number(self, form: str, at: int) -> int:
        return int(struct.unpack_from(form, self.data, at)[0])

    def place(self, field: int) -> int | None:
        """The position of a field; None if the table lacks it."""
        slot = 4 + 2 * field
        if slot >= self.number("<H", self._places):
            return None
        offset = self.number("<H", self._places + slot)
        return self._at + offset if offset else None

    def _target(self, field: int) -> int | None:
        """The position of the table, text or vector that a field points to."""
        at = self.place(field)
        return None if at is None else at + self.number("<I", at)

    def table(self, field: int) -> Table | None:
        at = self._target(field)
        return None if at is None else Table(self.data, at)

    def text(self, field: int) -> str:
        at = self._target(field)
        return "" if at is None else self.data[at + 4 : at + 4 + self.number("<I", at)].decode(errors="replace")

    def elements(self, field: int, size: int) -> list[int]:
        """The positions of the elements of a field that is a vector, each of `size` bytes. Raises ValueError if one is beyond the data."""
        at = self._target(field)
        count = 0 if at is None else self.number("<I", at)
        if at is None or not count:
            return []
        if count * size > len(self.data) - at - 4:  # checked before memory is allocated for the positions
            raise ValueError(f"a vector of {count} elements reaches beyond the end of the data")
        return [at + 4 + size * place for place in range(count)]

    def tables(self, field: int) -> list[Table]:
        return [Table(self.data, at + self.number("<I", at)) for at in self.elements(field, 4)]


def narrow_parquet(footer: bytes) -> tuple[bytes, dict[str, str]]:
    """(a Parquet footer with its embedded Arrow schema changed by `narrow`, the types that `narrow` returns)."""
    part = _IN_PARQUET.search(footer)
    if part is None:
        return footer, {}
    message = bytearray(base64.b64decode(part[1]))
    # The message begins after its length; since Arrow 0.15, a marker of four bytes comes before the length.
    header = Table.root(message, 8 if message.startswith(b"\xff\xff\xff\xff") else 4).table(2)
    wide = {} if header is None else narrow(header)
    return footer[: part.start(1)] + base64.b64encode(message) + footer[part.end(1) :], wide


def narrow(schema: Table) -> dict[str, str]:
    """Declare the 128-bit integers of a schema as 64-bit integers, in place, so that pyarrow reads the schema.

    Returns the name of the wide type, such as `int128`, for each column with such integers. Fields of the flatbuffer are found by their order:
    "table Schema { endianness; fields: [Field]; … }" (Arrow's Schema.fbs).
    """
    wide = {field.text(0): _narrow(field) for field in schema.tables(1)}
    return {name: kind for name, kind in wide.items() if kind is not None}


def _narrow(field: Table) -> str | None:
    """Declare the wide integers in a column as 64-bit integers. Returns the name of their type; None if the column has none.

    "table Field { name: string; nullable: bool; type_type: Type; type: Type; dictionary: …; children: [Field]; … }",
    "table Int { bitWidth: int; is_signed: bool; }"
    """
    wide_type = None
    tag, kind = field.place(2), field.table(3)
    if tag is not None and field.data[tag] == _INT and kind is not None:
        bits, signed = kind.place(0), kind.place(1)
        if bits is not None and (count := kind.number("<i", bits)) > _MOST_BITS:
            struct.pack_into("<i", field.data, bits, _MOST_BITS)
            wide_type = f"{'int' if signed is not None and field.data[signed] else 'uint'}{count}"
    for part in field.tables(5):
        wide_type = _narrow(part) or wide_type
    return wide_type


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
    """The index of an Arrow IPC file. A record batch is read with all its columns; those that are not requested are dropped afterwards.

    `tail`: where the file's footer begins, and the bytes to read instead of this footer; None: the footer in the file.
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
            # Without this, bad offsets or codes would read foreign memory; it checks about 2 GB/s.
            batch.validate(full=True)
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def _ipc_blocks(footer: bytearray) -> tuple[list[Range], list[Range]]:
    """(ranges of the dictionaries, ranges of the record batches) in an IPC footer, which pyarrow reads but does not expose.

    "table Footer { version: MetadataVersion; schema: Schema; dictionaries: [Block]; recordBatches:
    [Block]; … }", "struct Block { offset: long; metaDataLength: int; bodyLength: long }" (Arrow's
    File.fbs).
    """
    table = Table.root(footer)

    def blocks(field: int) -> list[Range]:
        entries = (struct.unpack_from("<qi4xq", footer, at) for at in table.elements(field, 24))
        return [(start, metadata + body) for start, metadata, body in entries]

    return blocks(2), blocks(3)
