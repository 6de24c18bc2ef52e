"""Arrow's schemas as the flatbuffers that they are, as far as pyarrow does not show or read them."""

from __future__ import annotations

import base64
import re
import struct

_INT = 2  # of the union Type
_MOST_BITS = 64  # of the integers that pyarrow reads; Polars writes such of 128, which take two buffers, too
# In the footer of a Parquet file, in Thrift's compact protocol: the key, and a value with its length before it.
_IN_PARQUET = re.compile(rb"ARROW:schema\x18[\x80-\xff]*[\x00-\x7f]([A-Za-z0-9+/]+={0,2})")


class Table:
    """A table in a flatbuffer: it starts with the signed distance back to its vtable, which has a 16-bit place for each field."""

    def __init__(self, data: bytearray, at: int) -> None:
        self.data, self._at = data, at
        self._places = at - self.number("<i", at)

    @classmethod
    def root(cls, data: bytearray, at: int = 0) -> Table:
        return cls(data, at + struct.unpack_from("<I", data, at)[0])

    def number(self, form: str, at: int) -> int:
        return int(struct.unpack_from(form, self.data, at)[0])

    def place(self, field: int) -> int | None:
        """Where a field is; None: it is not there."""
        slot = 4 + 2 * field
        if slot >= self.number("<H", self._places):
            return None
        offset = self.number("<H", self._places + slot)
        return self._at + offset if offset else None

    def _target(self, field: int) -> int | None:
        """Where the table, text or vector is that a field leads to."""
        at = self.place(field)
        return None if at is None else at + self.number("<I", at)

    def table(self, field: int) -> Table | None:
        at = self._target(field)
        return None if at is None else Table(self.data, at)

    def text(self, field: int) -> str:
        at = self._target(field)
        return "" if at is None else self.data[at + 4 : at + 4 + self.number("<I", at)].decode(errors="replace")

    def elements(self, field: int, size: int) -> list[int]:
        """Where the elements of a vector are, of that many bytes each."""
        at = self._target(field)
        return [] if at is None else [at + 4 + size * place for place in range(self.number("<I", at))]

    def tables(self, field: int) -> list[Table]:
        return [Table(self.data, at + self.number("<I", at)) for at in self.elements(field, 4)]


def narrow_parquet(footer: bytes) -> tuple[bytes, dict[str, str]]:
    """A Parquet file's footer as `narrow` makes the schema in it, and what it says."""
    part = _IN_PARQUET.search(footer)
    if part is None:
        return footer, {}
    message = bytearray(base64.b64decode(part[1]))
    # A message that has its length before it, since Arrow 0.15 behind a mark.
    header = Table.root(message, 8 if message.startswith(b"\xff\xff\xff\xff") else 4).table(2)
    wide = {} if header is None else narrow(header)
    return footer[: part.start(1)] + base64.b64encode(message) + footer[part.end(1) :], wide


def narrow(schema: Table) -> dict[str, str]:
    """Write into a schema that integers of 128 bits have 64, for it can be read then; returns the columns that have them, and their type.

    "table Schema { endianness; fields: [Field]; … }" (Arrow's Schema.fbs)
    """
    wide = {field.text(0): _narrow(field) for field in schema.tables(1)}
    return {name: kind for name, kind in wide.items() if kind is not None}


def _narrow(field: Table) -> str | None:
    """The wide integers that a column has.

    "table Field { name: string; nullable: bool; type_type: Type; type: Type; dictionary: …; children: [Field]; … }",
    "table Int { bitWidth: int; is_signed: bool; }"
    """
    found = None
    tag, kind = field.place(2), field.table(3)
    if tag is not None and field.data[tag] == _INT and kind is not None:
        bits, signed = kind.place(0), kind.place(1)
        if bits is not None and (count := kind.number("<i", bits)) > _MOST_BITS:
            struct.pack_into("<i", field.data, bits, _MOST_BITS)
            found = f"{'int' if signed is not None and field.data[signed] else 'uint'}{count}"
    for part in field.tables(5):
        found = _narrow(part) or found
    return found
