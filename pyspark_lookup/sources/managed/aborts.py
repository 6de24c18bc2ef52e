"""`Aborts`: ends writes without a commit, and removes the files that they leave behind."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable

from pyspark_lookup.errors import CommitUnknownError, UfsError, UfsNotFoundError, UfsUnavailableError, raise_ours
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.managed.data_files import remove_files
from pyspark_lookup.sources.managed.heartbeat import Heartbeats
from pyspark_lookup.sources.managed.jobs import Job, named_files, own_write, write_directory
from pyspark_lookup.sources.managed.log import Abort, Batch, DataFile, Event, NotificationLog, TableState, WriteMode
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.ufs import Ufs

_log = logging.getLogger("pyspark_lookup.writing")


class Aborts:
    """Aborts writes of the managed table at `log.url`. `timeout_s`: a writer that shows no heartbeat for this long is dead."""

    def __init__(self, ufs: Ufs, log: NotificationLog, context: HostContext, timeout_s: float) -> None:
        self._ufs = ufs
        self._log = log
        self._context = context
        self._timeout_s = timeout_s
        self._url = redact("path", log.url)
        self.hearts = Heartbeats(ufs, context, log.url, timeout_s)

    def abort(
        self, job: Job, files: Iterable[DataFile], reason: str = "", batch: Batch | None = None
    ) -> TableState | None:
        """Make sure that no row of the job is ever seen, and remove its files. Does nothing if the job is committed.

        Returns the table's state after that; None if there is no table. Raises a UfsError if the store cannot be asked; the write then
        stays open, and its files stay.
        """
        state = self._log.latest() if batch is not None or job.write_id is None else None
        if batch is not None and state is not None and state.is_committed(batch):
            _log.warning("batch %d of query %s is committed: not aborted", batch.id, batch.query)
            return state
        if job.write_id is not None:
            write_id = job.write_id

            def abort(state: TableState, nonce: str, at_s: float) -> Event | None:
                write = own_write(state, job)
                if write is None or write.ended_at is not None:
                    return None
                return Abort(state.position + 1, state.table_id, nonce, at_s, write_id, reason)

            try:
                state = append_unseen(self._log, abort)
            except UfsNotFoundError:
                return None
            write = own_write(state, job)
            if write is None:
                return state
            if write.committed:
                # The commit is in the log, but its answer was lost.
                _log.warning("write %d of %s is committed: not aborted", write_id, self._url)
                return state
        self.remove(job, files, state)
        return state

    def remove(self, job: Job, files: Iterable[DataFile], state: TableState | None) -> None:
        """Remove a job's files and leftovers of its tasks, except for files that a write in the log names."""
        if state is not None:
            self.discard(job, files, state)
            self.tidy(job, state)

    def discard(self, job: Job, files: Iterable[DataFile], state: TableState) -> None:
        """Remove the files among a job's that no write in the log names."""
        if state.table_id != job.table_id:
            return  # another table may use a directory of that name
        named_paths = named_files(state, job)
        remove_files(
            self._ufs,
            self._log.url,
            (file for file in files if file.path not in named_paths and job.has_put(file.path)),
        )

    def tidy(self, job: Job, state: TableState) -> None:
        """Remove leftovers of the job's tasks. If the store fails, they stay until a vacuum."""
        if state.table_id != job.table_id:
            return
        with contextlib.suppress(UfsError):
            named_paths = named_files(state, job)
            with contextlib.suppress(UfsNotFoundError):
                for file in self._ufs.list_files(f"{self._log.url}/{job.directory}"):
                    name = file.url.removeprefix(self._log.url + "/")
                    if name not in named_paths and job.has_put(name):  # other files in the directory stay
                        self._ufs.delete(file.url)
            if job.write_id is not None and self._context.clock.steady_s() - job.began_s > self.hearts.interval_s:
                self.hearts.forget(job.write_id)

    def abort_dead(self, state: TableState) -> bool:
        """Abort the writes whose writers are dead. True if there were any."""
        dead = self.hearts.dead(state.table_id, [write.id for write in state.open_writes()])
        for write_id in dead:
            nonce, directory = state.writes[write_id].nonce, write_directory(write_id)
            job = Job(state.table_id, write_id, WriteMode.APPEND, directory, state.definition, 0.0, nonce)
            _log.warning(
                "aborting write %d of %s: its writer has shown no sign of life for lookup.write.timeout",
                write_id,
                self._url,
            )
            self.abort(job, (), f"no sign of life for {self._timeout_s:g} s")
        return bool(dead)


def append_unseen(
    log: NotificationLog, make: Callable[[TableState, str, float], Event | None], after: TableState | None = None
) -> TableState:
    """Append an event that makes no row visible. Raises UfsUnavailableError if it is unknown whether the log has the event: nothing counts as
    written then."""
    try:
        return log.append(make, after)
    except CommitUnknownError as problem:
        raise_ours(nothing_written(log, problem), problem)


def nothing_written(log: NotificationLog, problem: CommitUnknownError) -> UfsUnavailableError:
    """The error for a write of which nothing has become visible."""
    return UfsUnavailableError(f"nothing was written to {redact('path', log.url)}: {problem.__cause__ or problem}")
