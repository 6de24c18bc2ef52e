"""Writes rows to data files: in the table's columns, sorted by key, in row groups small enough for a point read."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_lookup.errors import PutUnknownError, UfsError, UfsUnavailableError, raise_ours
from pyspark_lookup.sources.managed.definitions import conform
from pyspark_lookup.sources.managed.jobs import Job
from pyspark_lookup.sources.managed.log import DataFile
from pyspark_lookup.sources.managed.sizes import WriteSizes
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.deletes import delete_file_bytes, distinct_places

_AT_ONCE = 4  # this many files' rows are sorted together if rows come in order


def remove_files(ufs: Ufs, url: str, files: Iterable[DataFile]) -> None:
    """Remove files of the table at `url` that no version will need. A file that cannot be removed stays."""
    with contextlib.suppress(UfsError):
        for file in files:
            ufs.delete(f"{url}/{file.path}")


def _slices(table: pa.Table, size: int) -> Iterator[pa.Table]:
    """The table in slices of about `size` bytes."""
    rows = max(table.num_rows * size // max(table.nbytes, 1), 1)
    return (table.slice(start, rows) for start in range(0, table.num_rows, rows))


class DataFiles:
    """Writes rows to new files of a job of the table at `url`. The job's mark is in the files' names."""

    def __init__(self, ufs: Ufs, url: str, job: Job, rng: random.Random, sizes: WriteSizes) -> None:
        self._ufs = ufs
        self._url = url
        self._job = job
        self._definition = job.definition
        self._rng = rng
        self._sizes = sizes

    def write(self, batches: Iterable[pa.RecordBatch], prefix: str) -> list[DataFile]:
        """Write the rows, and return their files; none without rows. If it fails, the files put so far are removed."""
        return self._put_all((self._sorted(table) for table in self._tables(batches, self._sizes.file_bytes)), prefix)

    def write_ordered(self, parts: Iterable[Iterable[pa.RecordBatch]], prefix: str) -> list[DataFile]:
        """Write rows that come in parts ordered by key, and return their files. The key ranges of two files do not overlap."""
        if not self._definition.keys:
            return self.write(itertools.chain.from_iterable(parts), prefix)
        # A part is sorted as one table, unless it is much larger than expected.
        size = self._sizes.file_bytes
        sorted_parts = (self._sorted(table) for part in parts for table in self._tables(part, _AT_ONCE * size))
        return self._put_all((piece for table in sorted_parts for piece in _slices(table, size)), prefix)

    def _put_all(self, tables: Iterable[pa.Table], prefix: str) -> list[DataFile]:
        files: list[DataFile] = []
        try:
            for table in tables:
                files.append(self._put_table(table, f"{self._job.directory}/{prefix}-{len(files):05d}"))
        except BaseException:
            remove_files(self._ufs, self._url, files)
            raise
        return files

    def _tables(self, batches: Iterable[pa.RecordBatch], at_most: int) -> Iterator[pa.Table]:
        schema = self._definition.schema
        pending: list[pa.RecordBatch] = []
        size = 0
        for batch in batches:
            rows = max(batch.num_rows * self._sizes.file_bytes // max(batch.nbytes, 1), 1)
            for start in range(0, batch.num_rows, rows):  # a caller's table may be one large batch
                pending.append(conform(batch.slice(start, rows), schema, self._url))
                size += pending[-1].nbytes
                if size >= at_most:
                    yield pa.Table.from_batches(pending, schema)
                    pending, size = [], 0
        if pending:
            yield pa.Table.from_batches(pending, schema)

    def put_deletes(self, rows: pa.Table) -> DataFile:
        """Write a delete file that names rows of other files (see `versions.deletes`)."""
        places = distinct_places(rows)
        return self._put_bytes(delete_file_bytes(places), f"{self._job.directory}/deletes", places.num_rows)

    def _sorted(self, table: pa.Table) -> pa.Table:
        keys = self._definition.keys
        return table.sort_by([(name, "ascending") for name in keys]) if keys else table

    def _put_table(self, table: pa.Table, path: str) -> DataFile:
        least, most = self._sizes.row_group_rows
        group = min(max(self._sizes.row_group_bytes * table.num_rows // max(table.nbytes, 1), least), most)
        sink = pa.BufferOutputStream()
        pq.write_table(
            table, sink, row_group_size=group, compression="zstd", compression_level=1, write_page_checksum=True
        )
        return self._put_bytes(sink.getvalue().to_pybytes(), path, table.num_rows)

    def _put_bytes(self, data: bytes, path: str, rows: int) -> DataFile:
        while True:  # until the name is free: an existing file is never replaced
            name = f"{path}-{self._job.mark}-{self._rng.getrandbits(64):016x}.parquet"
            try:
                if self._ufs.put_if_absent(f"{self._url}/{name}", data):
                    return DataFile(name, len(data), rows)
            except PutUnknownError as problem:  # if the file was put nevertheless, nothing names it
                raise_ours(UfsUnavailableError(f"nothing was written to {self._url}: {problem.__cause__}"), problem)
