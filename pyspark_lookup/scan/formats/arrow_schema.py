"""Parts of Arrow's schemas that pyarrow does not expose or cannot read, decoded from the flatbuffers."""

from __future__ import annotations

import base64
import re
import struct

_INT = 2  # its number in the union Type
_MOST_BITS = 64  # of integers that pyarrow reads; Polars writes some with 128, which have two buffers as well
# In a Parquet footer, which is in Thrift's compact protocol: the key, the length of the value, the value.
_IN_PARQUET = re.compile(rb"ARROW:schema\x18[\x80-\xff]*[\x00-\x7f]([A-Za-z0-9+/]+={0,2})")


class Table:
    """A table in a flatbuffer. It starts with the signed distance back to its vtable, which has a 16-bit offset for each field."""

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
        """The positions of a vector's elements, each of `size` bytes. Raises ValueError if they are not in the data."""
        at = self._target(field)
        count = 0 if at is None else self.number("<I", at)
        if at is None or not count:
            return []
        if count * size > len(self.data) - at - 4:  # before memory is allocated for their positions
            raise ValueError(f"a vector of {count} elements, which reach beyond its bytes")
        return [at + 4 + size * place for place in range(count)]

    def tables(self, field: int) -> list[Table]:
        return [Table(self.data, at + self.number("<I", at)) for at in self.elements(field, 4)]


def narrow_parquet(footer: bytes) -> tuple[bytes, dict[str, str]]:
    """A Parquet footer whose embedded Arrow schema is narrowed, and the types that `narrow` returns."""
    part = _IN_PARQUET.search(footer)
    if part is None:
        return footer, {}
    message = bytearray(base64.b64decode(part[1]))
    # The message follows its length; since Arrow 0.15 a marker comes before that.
    header = Table.root(message, 8 if message.startswith(b"\xff\xff\xff\xff") else 4).table(2)
    wide = {} if header is None else narrow(header)
    return footer[: part.start(1)] + base64.b64encode(message) + footer[part.end(1) :], wide


def narrow(schema: Table) -> dict[str, str]:
    """Declare a schema's 128-bit integers as 64-bit ones, in place, so that pyarrow reads it. Returns the type of these integers by column.

    "table Schema { endianness; fields: [Field]; … }" (Arrow's Schema.fbs)
    """
    wide = {field.text(0): _narrow(field) for field in schema.tables(1)}
    return {name: kind for name, kind in wide.items() if kind is not None}


def _narrow(field: Table) -> str | None:
    """The type of a column's wide integers, which are narrowed; None if it has none.

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
