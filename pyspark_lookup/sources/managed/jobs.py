"""`Job`: a write under way, and what the log says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pyspark_lookup.sources.managed.log import Definition, TableState, TableWrite, WriteMode
from pyspark_lookup.storage.stores.own_files import is_data_file


@dataclasses.dataclass(frozen=True)
class Job:
    """A write under way: all that its tasks and its commit need, in any process.

    `write_id` None: it is allocated at the commit. `definition`: the columns of its files. `nonce`: of the event that has allocated the id;
    a table that was restored from a copy may have given the id to another write as well. `kept_columns`: the columns that its rows lack, in
    which existing rows keep their values.
    """

    table_id: str
    write_id: int | None
    mode: WriteMode
    directory: str
    definition: Definition
    began_s: float
    nonce: str = ""
    kept_columns: tuple[str, ...] = ()

    @property
    def mark(self) -> str:
        """The 16 digits of a nonce by which the job's files are recognised: only their names have it. "" if no nonce is known."""
        of_write = self.write_id is not None and self.directory == write_directory(self.write_id)
        return self.nonce[:16] if of_write else self.directory.rpartition("-")[2]

    def has_put(self, name: str) -> bool:
        """Whether a task of the job has put the file with this name below the table's directory."""
        directory, _, last = name.rpartition("/")
        return bool(self.mark) and directory == self.directory and f"-{self.mark}-" in last and is_data_file(name)


def write_directory(write_id: int) -> str:
    return f"write-{write_id:020d}"


def batch_directory(batch: tuple[str, int], nonce: str) -> str:
    """The directory for the files of one attempt to write a batch."""
    return f"stream-{batch[0]}/{batch[1]:012d}-{nonce}"


def own_write(state: TableState, job: Job) -> TableWrite | None:
    """The job's write, if the state has it. A write with its id may be another one, if the table was restored from a copy."""
    write = state.writes.get(job.write_id) if state.table_id == job.table_id else None
    return None if write is None or (job.nonce and write.nonce and job.nonce != write.nonce) else write


def named_files(state: TableState, job: Job) -> set[str]:
    """The files in a job's directory that writes in the log name, except for aborted writes."""
    writes: Iterable[TableWrite] = state.writes.values() if state.table_id == job.table_id else ()
    job_write = state.writes.get(job.write_id)
    if job_write is not None and job.directory == write_directory(job_write.id):
        writes = [job_write]  # no other write has files in it
    paths = (file.path for write in writes for file in (*write.files, *write.deletes))
    return {path for path in paths if path.startswith(job.directory + "/")}
