"""Deleted rows of data files: how each kind of deletes is decoded from a record, and the delete files of managed tables.

A delete file is a Parquet file that names rows of other files by path and position, like Iceberg's position deletes, and also has their key
columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pyspark_lookup.columnar.keys import Numbers, one_array
from pyspark_lookup.core.decoding import UNREADABLE, as_count, as_text
from pyspark_lookup.errors import DamagedFileError, raise_ours
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.stores import DELETE_FILE, Deletes, FileVersion, Range

PATH, ROW = "_lookup_file", "_lookup_row"
"""The columns that locate a row: its file's path below the table, and its position in the file (int64, from 0)."""


def place_fields() -> list[pa.Field]:
    """The fields of `PATH` and `ROW`."""
    return [pa.field(PATH, pa.string()), pa.field(ROW, pa.int64())]


def distinct_places(rows: pa.Table) -> pa.Table:
    """The rows sorted by `PATH` and `ROW`, without duplicates: two overlapping writes may both have deleted a row."""
    sorted_rows = rows.sort_by([(PATH, "ascending"), (ROW, "ascending")]).combine_chunks()
    if sorted_rows.num_rows < 2:
        return sorted_rows
    differs = (
        pc.not_equal(column.slice(1), column.slice(0, len(column) - 1))
        for column in (one_array(sorted_rows.column(name)) for name in (PATH, ROW))
    )
    is_first = pa.concat_arrays([pa.array([True]), pc.or_(*differs)])
    return sorted_rows.filter(is_first)


def delete_file_bytes(rows: pa.Table) -> bytes:
    """The content of a delete file with these rows, as `distinct_places` returns them: key columns, `PATH` and `ROW`."""
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd", compression_level=1, write_page_checksum=True)
    data = bytes(sink.getvalue().to_pybytes())
    _parse_positions("deleted rows", data)  # a delete file that cannot be read would make the table unreadable
    return data


@dataclasses.dataclass(frozen=True)
class DeleteFile:
    """A delete file of a managed table, by its URL and size."""

    url: str
    size: int

    equality = None

    @property
    def name(self) -> str:
        return self.url

    @property
    def place(self) -> tuple[FileVersion, Range]:
        return self.keys, (0, self.size)

    @property
    def keys(self) -> FileVersion:
        return FileVersion(self.url, self.size, DELETE_FILE)

    def positions(self, data: bytes | memoryview) -> Mapping[str, Numbers]:
        return _parse_positions(self.url, data)

    def to_json(self) -> list[Any]:
        return ["file", self.url, self.size]

    @classmethod
    def from_json(cls, record: Any) -> DeleteFile:
        """Decode what `to_json` wrote, without the kind in front. Raises TypeError or ValueError if it is malformed."""
        url, size = record
        return cls(as_text(url), as_count(size))


DELETES: dict[str, Callable[[Any], Deletes]] = {"file": DeleteFile.from_json}
"""For each kind of deletes the function that decodes it from a record, by the first item of its `to_json`."""


def _parse_positions(url: str, data: bytes | memoryview) -> dict[str, Numbers]:
    """Path -> positions of the rows that a delete file names, ascending and distinct. Raises DamagedFileError, which names `url`.

    A file may name a position twice: compactions of earlier releases wrote such files after two writes by key had overlapped.
    """
    try:
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
            table = file.read([PATH, ROW]).combine_chunks()
            row_count = file.metadata.num_rows
        table.validate(full=True)
        if table.num_rows != row_count:  # a footer with a truncated list of row groups still parses
            raise ValueError(f"{row_count} rows were expected, not {table.num_rows}")
        if table.schema.types != [field.type for field in place_fields()] or any(c.null_count for c in table.columns):
            raise ValueError("each row must have a path and a position")
        paths, rows = table.column(PATH).to_numpy(), table.column(ROW).to_numpy()
        starts = np.flatnonzero(np.concatenate([[len(rows) > 0], paths[1:] != paths[:-1]]))
        parts = np.split(rows, starts[1:]) if len(starts) else []
        places = {str(paths[start]): part for start, part in zip(starts, parts, strict=True)}
        if len(places) < len(parts) or any(part[0] < 0 or (np.diff(part) < 0).any() for part in parts):
            raise ValueError("the positions of each file must be together and ascending")
        places = {path: np.unique(part) for path, part in places.items()}
    except (*UNREADABLE, pa.ArrowException, OSError) as problem:
        redacted_path = redact("path", url)
        raise_ours(DamagedFileError(f"{redacted_path} is not a readable delete file: {problem}"), problem)
    return places
