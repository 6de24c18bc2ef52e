"""`Pointer`: where a table's current metadata lies, by a directory's version hint, a metadata file, or a catalog."""

from __future__ import annotations

import dataclasses
from typing import Any

from pyspark_lookup.core.decoding import as_text
from pyspark_lookup.errors import DamagedFileError, UfsNotFoundError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.stores import FileVersion
from pyspark_lookup.storage.ufs import Ufs

METADATA_DIRECTORY, METADATA_SUFFIX = "metadata", ".metadata.json"
HINT = "version-hint.text"
_HINT_BYTES = 1000


@dataclasses.dataclass(frozen=True)
class Pointer:
    """Where a table's metadata lies. `source_file`: the file that says so, a hint or the metadata file itself (None: a catalog said so).

    `modified_at_s`: when that file was written. `size`: the metadata's, if known. `table_id`: the table's, if the catalog has told it.

    A table that was created anew may have a hint with the same content, and so with the same ETag.
    """

    location: str
    source_file: FileVersion | None = None
    modified_at_s: float | None = None
    size: int | None = dataclasses.field(default=None, compare=False)
    table_id: str | None = None

    @classmethod
    def from_file(cls, location: str, source_file: FileVersion, size: int | None = None) -> Pointer:
        """A pointer to a metadata file, read from a hint or given by the user."""
        return cls(location, source_file, source_file.modified_at_s, size)

    @property
    def settled(self) -> bool:
        """Whether `source_file` is so old that a later change gives it another identity."""
        return self.source_file is None or self.source_file.cacheable

    def matches_hint(self, hint: FileVersion) -> bool:
        """Whether the pointer was read from this state of a hint, as far as the store's identities show."""
        return (self.source_file, self.modified_at_s) == (hint, hint.modified_at_s) and self.settled and hint.cacheable

    def to_json(self) -> list[Any]:
        return [self.location, None if self.source_file is None else self.source_file.to_json(), self.table_id]

    @classmethod
    def from_json(cls, record: Any) -> Pointer:
        """Decode what `to_json` wrote. Raises TypeError or ValueError if it is malformed."""
        location, source_file, table_id = record
        if source_file is not None:
            return cls.from_file(as_text(location), FileVersion.from_json(source_file))
        return cls(as_text(location), table_id=None if table_id is None else as_text(table_id))


def read_pointer(ufs: Ufs, table: str, last_pointer: Pointer | None) -> Pointer:
    """Where the version hint of the table at a URL points now. One call if the hint is still that of `last_pointer`.

    Raises UfsNotFoundError without a hint, DamagedFileError for one that names no file.
    """
    directory = f"{table}/{METADATA_DIRECTORY}"
    hint = ufs.get_meta(f"{directory}/{HINT}")
    if last_pointer is not None and last_pointer.matches_hint(hint):
        return last_pointer
    redacted_path = redact("path", hint.url)
    if hint.size > _HINT_BYTES:
        raise DamagedFileError(f"{redacted_path} is not a version hint: it has {hint.size} bytes")
    try:
        hint_text = ufs.read_ranges(hint, [(0, hint.size)])[0].decode().strip()
    except UnicodeDecodeError as problem:
        raise DamagedFileError(f"{redacted_path} is not a version hint: {problem}") from None
    for name in _names(hint_text):
        try:
            file = ufs.get_meta(f"{directory}/{name}")
            return Pointer.from_file(file.url, hint, file.size)
        except UfsNotFoundError:
            continue
    raise DamagedFileError(
        f"{redacted_path} names version {hint_text!r}, but there is no file {' or '.join(_names(hint_text))}"
    )


def _names(hint_text: str) -> list[str]:
    """The names of the metadata files that a hint may mean."""
    if not hint_text or "/" in hint_text:
        return []
    if hint_text.endswith((METADATA_SUFFIX, f"{METADATA_SUFFIX}.gz")):
        return [hint_text]
    starts = [f"v{hint_text}", hint_text] if hint_text.isdecimal() else [hint_text]
    return [
        start + end for start in starts for end in (METADATA_SUFFIX, f".gz{METADATA_SUFFIX}", f"{METADATA_SUFFIX}.gz")
    ]
