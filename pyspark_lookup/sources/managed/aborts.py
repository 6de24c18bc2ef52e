"""`Heartbeats` shows which writers are alive. `Aborts` ends writes without a commit, and removes the files that they leave behind.

A write is also aborted if its writer has shown no heartbeat for `lookup.write.timeout`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pyspark_lookup.core.decoding import as_count, as_number, as_text
from pyspark_lookup.errors import CommitUnknownError, UfsError, UfsNotFoundError, UfsUnavailableError, raise_ours
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.managed.data_files import Job, named_files, own_write, remove_files, write_directory
from pyspark_lookup.sources.managed.log import Abort, Batch, DataFile, Event, NotificationLog, TableState, WriteMode
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.stores import LOG_DIRECTORY
from pyspark_lookup.storage.stores.store import is_own
from pyspark_lookup.storage.ufs import Ufs

_BEATS = 8  # heartbeats per timeout


class Heartbeats:
    """The heartbeats of one table's writers. `timeout_s`: a writer that shows none for this long is dead.

    A writer that takes long puts a file now and then. Each host counts these files, and measures on its own steady clock how long the count
    has not changed. So no two clocks are compared.
    """

    def __init__(self, ufs: Ufs, context: HostContext, url: str, timeout_s: float) -> None:
        self._ufs = ufs
        self._context = context
        self._directory = f"{url}/{LOG_DIRECTORY}/heartbeats"
        self._key = key_of("heartbeats", ufs.scope, url)
        self._timeout_s = timeout_s
        self._next_s = context.clock.steady_s() + self.interval_s

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats of a writer."""
        return self._timeout_s / _BEATS

    def beat(self, write_id: int) -> None:
        """Put a heartbeat of the write if one is due. Call it often."""
        if self._context.clock.steady_s() < self._next_s:
            return
        self._next_s = self._context.clock.steady_s() + self.interval_s
        self._ufs.put_if_absent(self._path(write_id, f"{self._context.rng.getrandbits(64):016x}"), b"alive")

    def dead(self, table_id: str, open_ids: Sequence[int]) -> list[int]:
        """The open writes that have shown this host no heartbeat for `timeout_s`.

        Asks the store with one LIST, a few times within the timeout at most.
        """
        if self._context.disk is None or not open_ids:
            return []
        now_s = self._context.clock.steady_s()
        record = self._context.disk.get_record("heartbeat", self._key, _check_record)
        if record is None or (record["boot"], record["table"]) != (self._context.clock.boot, table_id):
            record = {"boot": self._context.clock.boot, "table": table_id, "looked_s": now_s, "ids": {}}
        recorded_ids: dict[int, list[Any]] = record["ids"]
        # A write that this host sees for the first time counts as one without heartbeats. If it has some, the next check sees a
        # change.
        ids = {id_: recorded_ids.get(id_, [0, now_s]) for id_ in open_ids}
        dead = []
        if now_s - record["looked_s"] >= self.interval_s:
            names = self._names()
            for id_, (count, since_s) in ids.items():
                signs = sum(name.startswith(f"{id_:020d}-") for name in names)
                ids[id_] = [signs, now_s if signs != count else since_s]
            dead = [id_ for id_, (_, since_s) in ids.items() if now_s - since_s >= self._timeout_s]
            record["looked_s"] = now_s
        try:
            if ids != recorded_ids or record["looked_s"] == now_s:
                self._context.disk.replace_record("heartbeat", self._key, {**record, "ids": ids})
        except OSError:
            return []
        return dead

    def forget(self, write_id: int) -> None:
        """Remove the heartbeats of a write that has ended."""
        for name in self._names():
            if name.startswith(f"{write_id:020d}-"):
                self._ufs.delete(f"{self._directory}/{name}")

    def _names(self) -> list[str]:
        try:
            return [file.url.rsplit("/", 1)[-1] for file in self._ufs.list_files(self._directory) if is_own(file.url)]
        except UfsNotFoundError:
            return []

    def _path(self, write_id: int, nonce: str) -> str:
        return f"{self._directory}/{write_id:020d}-{nonce}"


def _check_record(record: Any) -> dict[str, Any]:
    """The record if it is valid. For each write it has the number of heartbeats, and since when this number has not changed."""
    ids = {int(id_): [as_count(signs), as_number(since_s)] for id_, (signs, since_s) in record["ids"].items()}
    return {
        "boot": as_text(record["boot"]),
        "table": as_text(record["table"]),
        "looked_s": as_number(record["looked_s"]),
        "ids": ids,
    }


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
