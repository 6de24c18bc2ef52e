"""Where a table's current metadata lies: what a directory's version hint says, or a metadata file itself."""

from __future__ import annotations

import dataclasses
from typing import Any

from pyspark_lookup.base.decoding import text_of
from pyspark_lookup.base.errors import DamagedFileError, UfsNotFoundError
from pyspark_lookup.io.stores import FileVersion
from pyspark_lookup.io.ufs import Ufs
from pyspark_lookup.options.conf_file import redact

METADATA_DIRECTORY, METADATA_SUFFIX = "metadata", ".metadata.json"
HINT = "version-hint.text"
_HINT_BYTES = 1000


@dataclasses.dataclass(frozen=True)
class Pointer:
    """Where the metadata lies, and what said so: a hint, or the metadata file itself (None: a catalog). `modified_at_s`: when that was written.
    `size`: the metadata's, as far as it was asked for. `table_id`: of the table, if the catalog says that.

    A table that was made anew may have a hint of the same content, and so of the same ETag.
    """

    location: str
    said_by: FileVersion | None = None
    modified_at_s: float | None = None
    size: int | None = dataclasses.field(default=None, compare=False)
    table_id: str | None = None

    @classmethod
    def of(cls, location: str, said_by: FileVersion, size: int | None = None) -> Pointer:
        return cls(location, said_by, said_by.modified_at_s, size)

    @property
    def settled(self) -> bool:
        """Whether what said so can be told from its next state."""
        return self.said_by is None or self.said_by.cacheable

    def is_of(self, hint: FileVersion) -> bool:
        """Whether it was read from this state of a hint, as far as its store tells."""
        return (self.said_by, self.modified_at_s) == (hint, hint.modified_at_s) and self.settled and hint.cacheable

    def to_json(self) -> list[Any]:
        return [self.location, None if self.said_by is None else self.said_by.to_json(), self.table_id]

    @classmethod
    def from_json(cls, found: Any) -> Pointer:
        """What `to_json` wrote. Raises TypeError or ValueError for anything else."""
        location, said_by, table_id = found
        if said_by is not None:
            return cls.of(text_of(location), FileVersion.from_json(said_by))
        return cls(text_of(location), table_id=None if table_id is None else text_of(table_id))


def read_pointer(ufs: Ufs, table: str, known: Pointer | None) -> Pointer:
    """What the hint of the table at a URL says now: one call if it is the one that is `known`.

    Raises UfsNotFoundError without a hint, DamagedFileError for one that names no file.
    """
    directory = f"{table}/{METADATA_DIRECTORY}"
    hint = ufs.get_meta(f"{directory}/{HINT}")
    if known is not None and known.is_of(hint):
        return known
    shown = redact("path", hint.url)
    if hint.size > _HINT_BYTES:
        raise DamagedFileError(f"{shown} is no version hint: it has {hint.size} bytes")
    try:
        said = ufs.read_ranges(hint, [(0, hint.size)])[0].decode().strip()
    except UnicodeDecodeError as problem:
        raise DamagedFileError(f"{shown} is no version hint: {problem}") from None
    for name in _names(said):
        try:
            file = ufs.get_meta(f"{directory}/{name}")
            return Pointer.of(file.url, hint, file.size)
        except UfsNotFoundError:
            continue
    raise DamagedFileError(f"{shown} says {said!r}, of which there is no file {' or '.join(_names(said))}")


def _names(said: str) -> list[str]:
    """The files that a hint may mean."""
    if not said or "/" in said:
        return []
    if said.endswith((METADATA_SUFFIX, f"{METADATA_SUFFIX}.gz")):
        return [said]
    starts = [f"v{said}", said] if said.isdecimal() else [said]
    return [
        start + end for start in starts for end in (METADATA_SUFFIX, f".gz{METADATA_SUFFIX}", f"{METADATA_SUFFIX}.gz")
    ]
