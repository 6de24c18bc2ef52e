"""Deletion vectors: the deleted rows of a Delta data file, as 64-bit roaring bitmaps."""

from __future__ import annotations

import base64
import dataclasses
import struct
import uuid
from collections.abc import Mapping
from typing import Any

from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.columnar.roaring import checked_blob, read_roaring
from pyspark_lookup.core.decoding import UNREADABLE, as_count, as_text
from pyspark_lookup.errors import DamagedFileError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.delta.actions import is_absolute
from pyspark_lookup.storage.stores import PART_OF_FILE, FileVersion, Range

# Z85 (ZeroMQ 32) is base 85 with other digits than Python's.
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_DIGITS = {ord(z85_digit): ord(b85_digit) for z85_digit, b85_digit in zip(_Z85, _B85, strict=True)}
_UUID_DIGITS = 20


def decode_z85(text: str) -> bytes:
    """The bytes of a Z85 text. Raises ValueError for any other text.

    The last five digits may begin with `#`, one for each byte that the last four bytes lack: writers in Rust pad them so.
    """
    if len(text) % 5 or not set(text) <= set(_Z85):
        raise ValueError(f"not Z85: {text[:40]!r}")
    last_digits = text[-5:].lstrip("#")
    missing = len(text[-5:]) - len(last_digits)
    if not 1 <= missing <= 3:
        return base64.b85decode(text.translate(_DIGITS))
    digits = text[:-5] + _Z85[0] * missing + last_digits
    content = base64.b85decode(digits.translate(_DIGITS))
    if any(content[-4 : missing - 4]):
        raise ValueError(f"not Z85: {text[-5:]!r} at its end")
    return content[:-4] + content[missing - 4 :]


@dataclasses.dataclass(frozen=True)
class DeletionVector:
    """A deletion vector of one data file. `storage` and `data`: the log's `storageType` (`i`, `u` or `p`) and `pathOrInlineDv`.

    `path`: the data file's, below the table, or its URL if it is elsewhere. `url`: the file with the vector; None if the log itself has it.
    """

    path: str
    storage: str
    data: str
    offset: int
    size: int
    cardinality: int
    url: str | None

    @property
    def name(self) -> str:
        """The protocol's unique id of the vector, and the data file's path."""
        return f"{self.storage}{self.data}@{self.offset}#{self.path}"

    @property
    def place(self) -> tuple[FileVersion, Range] | None:
        return None if self.url is None else (FileVersion(self.url, 0, PART_OF_FILE), (self.offset, self.size + 8))

    keys = None
    equality = None

    def positions(self, data: bytes | memoryview) -> Mapping[str, Numbers]:
        try:
            blob = decode_z85(self.data)[: self.size] if self.url is None else checked_blob(data, self.size)
            rows = read_roaring(blob, self.cardinality)
        except (*UNREADABLE, struct.error) as problem:
            prefix = "the deletion vector of " if self.url is None else ""
            place = "" if self.url is None else f" at {self.offset}"
            redacted_path = redact("path", self.path if self.url is None else self.url)
            raise DamagedFileError(f"{prefix}{redacted_path}{place} is damaged: {problem}") from None
        return {self.path: rows}

    def to_json(self) -> list[Any]:
        return ["vector", self.path, self.storage, self.data, self.offset, self.size, self.cardinality, self.url]

    @classmethod
    def from_json(cls, record: Any) -> DeletionVector:
        """The deletion vector in a `to_json` record without its first element, the kind. Raises TypeError or ValueError if it is malformed."""
        path, storage, data, offset, size, cardinality, url = record
        place = None if url is None else as_text(url)
        counts = (as_count(offset), as_count(size), as_count(cardinality))
        return cls(as_text(path), as_text(storage), as_text(data), *counts, place)


def vector_url(table: str, storage: str, data: str) -> str | None:
    """The URL of a vector's file; None if the vector is in the log. Raises ValueError for a storage type that the protocol does not have."""
    if storage == "i":
        return None
    if storage == "p" and is_absolute(data):
        return data
    if storage != "u" or len(data) < _UUID_DIGITS:
        raise ValueError(f"a deletion vector has the unknown or malformed storageType {storage!r}")
    prefix, name = data[:-_UUID_DIGITS], uuid.UUID(bytes=decode_z85(data[-_UUID_DIGITS:]))
    return "/".join([table, *([prefix] if prefix else []), f"deletion_vector_{name}.bin"])
