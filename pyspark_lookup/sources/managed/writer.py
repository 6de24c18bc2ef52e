"""`TableWriter`: writes to a managed table, from the allocation of a write id to the commit or abort.

The driver calls `begin`. Then tasks in any process write files, and the driver calls `commit` with these files, or `abort`.

A commit is one event in the log. Before that event nobody sees a row of the write. After it everybody does, even if the writer never learns
that its commit succeeded.

`Heartbeats` shows which writers are alive. `Aborts` ends writes without a commit, and removes the files that they leave behind. A write is
also aborted if its writer has shown no heartbeat for `lookup.write.timeout`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.ddl import columns_ddl
from pyspark_lookup.columnar.keys import cast_keys, check_key_types
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.columnar.types import resolve_names
from pyspark_lookup.core.decoding import as_count, as_number, as_text
from pyspark_lookup.errors import (
    CommitUnknownError,
    DamagedFileError,
    NotATableError,
    OptionError,
    SchemaError,
    TableFormatError,
    UfsError,
    UfsNotFoundError,
    UfsUnavailableError,
    WriteConflictError,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.managed.conflicts import ByKey, Effect, Independent, Keeping, NewKeys, RowsByKey, Where
from pyspark_lookup.sources.managed.data_files import (
    DataFiles,
    Job,
    WriteSizes,
    define,
    extend_definition,
    find_kept_columns,
    match_definition,
    named_files,
    own_write,
    remove_files,
    write_directory,
)
from pyspark_lookup.sources.managed.log import (
    Abort,
    Allocate,
    Batch,
    Commit,
    Create,
    DataFile,
    Definition,
    Event,
    NotificationLog,
    TableState,
    Write,
    WriteMode,
)
from pyspark_lookup.sources.managed.log.state import parse_properties
from pyspark_lookup.sources.managed.options import WriteOptions
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.stores import LOG_DIRECTORY, FileVersion, Listing
from pyspark_lookup.storage.stores.store import is_own
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.model import Table
from pyspark_lookup.versions.resolver import EnclosingTables

_BEATS = 8  # a writer puts this many heartbeats per timeout


class Heartbeats:
    """The heartbeats of one table's writers. `timeout_s`: a writer without a heartbeat for this long counts as dead.

    A heartbeat is a file that a writer puts from time to time. Each host counts a write's heartbeats, and measures on its own steady clock
    for how long the count has not changed. So no two clocks are compared.

    All writers of a process share one object: a write may have many short tasks, and a heartbeat is due long after the end of each.
    """

    def __init__(self, ufs: Ufs, context: HostContext, url: str, timeout_s: float) -> None:
        self._ufs = ufs
        self._context = context
        self._directory = f"{url}/{LOG_DIRECTORY}/heartbeats"
        self._key = key_of("heartbeats", ufs.scope, url)
        self.timeout_s = timeout_s
        self._due_s: dict[
            int, float
        ] = {}  # by write id: when this process puts the next heartbeat, on the steady clock

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats of a writer."""
        return self.timeout_s / _BEATS

    def start(self, write_id: int) -> None:
        """Begin a task of a write. The write's first heartbeat from this process is due `interval_s` after its first task began."""
        now_s = self._context.clock.steady_s()
        # Drop the entries of writes that have ended.
        recent = {id_: due_s for id_, due_s in [*self._due_s.items()] if now_s - due_s < self.timeout_s}
        self._due_s = {write_id: now_s + self.interval_s, **recent}

    def beat(self, write_id: int) -> None:
        """Put a heartbeat for the write if one is due. Call this often."""
        now_s = self._context.clock.steady_s()
        if now_s < self._due_s.get(write_id, now_s):
            return
        self._due_s[write_id] = now_s + self.interval_s
        self._ufs.put_if_absent(self._path(write_id, f"{self._context.rng.getrandbits(64):016x}"), b"alive")

    def dead(self, table_id: str, open_ids: Sequence[int]) -> list[int]:
        """The ids of the open writes that have shown this host no heartbeat for `timeout_s`.

        Asks the store (one LIST) at most once per `interval_s`. A call in between returns no ids.
        """
        if self._context.disk is None or not open_ids:
            return []
        now_s = self._context.clock.steady_s()
        record = self._context.disk.get_record("heartbeat", self._key, _check_record)
        if record is None or (record["boot"], record["table"]) != (self._context.clock.boot, table_id):
            record = {"boot": self._context.clock.boot, "table": table_id, "looked_s": now_s, "ids": {}}
        recorded_ids: dict[int, list[Any]] = record["ids"]
        # A write that this host sees for the first time counts as one without heartbeats. If it has some, the next check sees that their
        # number has changed.
        ids = {id_: recorded_ids.get(id_, [0, now_s]) for id_ in open_ids}
        dead = []
        if now_s - record["looked_s"] >= self.interval_s:
            names = self._names()
            for id_, (count, since_s) in ids.items():
                signs = sum(name.startswith(f"{id_:020d}-") for name in names)
                ids[id_] = [signs, now_s if signs != count else since_s]
            dead = [id_ for id_, (_, since_s) in ids.items() if now_s - since_s >= self.timeout_s]
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
    """The record, checked. For each write it has the number of heartbeats, and since when this number has not changed.

    Raises one of `decoding.UNREADABLE` for a malformed record.
    """
    ids = {int(id_): [as_count(signs), as_number(since_s)] for id_, (signs, since_s) in record["ids"].items()}
    return {
        "boot": as_text(record["boot"]),
        "table": as_text(record["table"]),
        "looked_s": as_number(record["looked_s"]),
        "ids": ids,
    }


_log = logging.getLogger("pyspark_lookup.writing")


class Aborts:
    """Aborts writes of the managed table at `log.url`. `heartbeats`: the heartbeats of the table's writers."""

    def __init__(self, ufs: Ufs, log: NotificationLog, context: HostContext, heartbeats: Heartbeats) -> None:
        self._ufs = ufs
        self._log = log
        self._context = context
        self._redacted_path = log.redacted_path
        self.heartbeats = heartbeats

    def abort(
        self, job: Job, files: Iterable[DataFile], reason: str = "", batch: Batch | None = None
    ) -> TableState | None:
        """Make sure that no row of the job is ever seen, and remove its files. Does nothing if the job is committed.

        Returns the table's state after the abort; None if there is no table. Raises UfsError if the store fails; the write then stays open,
        and its files stay.
        """
        state = self._log.latest() if batch is not None or job.write_id is None else None
        if batch is not None and state is not None and state.is_committed(batch):
            _log.warning(
                "batch %d of query %s is committed in %s: not aborted", batch.id, batch.query, self._redacted_path
            )
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
                _log.warning("write %d of %s is committed: not aborted", write_id, self._redacted_path)
                return state
        self.remove(job, files, state)
        return state

    def remove(self, job: Job, files: Iterable[DataFile], state: TableState | None) -> None:
        """Remove a job's files and the files that its failed tasks have left, except for files that the log names."""
        if state is not None:
            self.discard(job, files, state)
            self.tidy(job, state)

    def discard(self, job: Job, files: Iterable[DataFile], state: TableState) -> None:
        """Remove the files of a job that the log does not name."""
        if state.table_id != job.table_id:
            return  # the table that is now at this path may use a directory of the same name
        named_paths = named_files(state, job)
        remove_files(
            self._ufs,
            self._log.url,
            (file for file in files if file.path not in named_paths and job.has_put(file.path)),
        )

    def tidy(self, job: Job, state: TableState) -> None:
        """Remove the files that failed tasks of the job have left. If the store fails, they stay until a vacuum removes them."""
        if state.table_id != job.table_id:
            return
        with contextlib.suppress(UfsError):
            named_paths = named_files(state, job)
            with contextlib.suppress(UfsNotFoundError):
                for file in self._ufs.list_files(f"{self._log.url}/{job.directory}"):
                    name = file.url.removeprefix(self._log.url + "/")
                    if name not in named_paths and job.has_put(name):  # other files in the directory stay
                        self._ufs.delete(file.url)
            if job.write_id is not None and self._context.clock.steady_s() - job.began_s > self.heartbeats.interval_s:
                self.heartbeats.forget(job.write_id)

    def abort_dead(self, state: TableState) -> bool:
        """Abort the writes whose writers are dead. Returns whether there were any such writes."""
        dead = self.heartbeats.dead(state.table_id, [write.id for write in state.open_writes()])
        for write_id in dead:
            nonce, directory = state.writes[write_id].nonce, write_directory(write_id)
            job = Job(state.table_id, write_id, WriteMode.APPEND, directory, state.definition, 0.0, nonce)
            _log.warning(
                "aborting write %d of %s: its writer has shown no sign of life for lookup.write.timeout = %g s",
                write_id,
                self._redacted_path,
                self.heartbeats.timeout_s,
            )
            self.abort(job, (), f"no sign of life for {self.heartbeats.timeout_s:g} s")
        return bool(dead)


def append_unseen(
    log: NotificationLog, make: Callable[[TableState, str, float], Event | None], after: TableState | None = None
) -> TableState:
    """Append an event that makes no row visible.

    Raises UfsUnavailableError, which says that nothing was written, even if it is unknown whether the log has the event.
    """
    try:
        return log.append(make, after)
    except CommitUnknownError as problem:
        raise_ours(nothing_written(log, problem), problem)


def nothing_written(log: NotificationLog, problem: CommitUnknownError) -> UfsUnavailableError:
    """The error for a write of which no row has become visible."""
    return UfsUnavailableError(
        f"nothing was written to {log.redacted_path}: {problem.__cause__ or problem}; write again"
    )


def check_place(ufs: Ufs, url: str, enclosing: EnclosingTables) -> None:
    """Raise NotATableError if the directory of a new table has other files, TableFormatError if it lies inside another table."""
    url_text = redact("path", url)
    try:
        status = ufs.get_status(url)
    except UfsNotFoundError:
        status = None
    if isinstance(status, Listing) and (label := enclosing.label_of(status)) is not None:
        raise NotATableError(
            f"{url_text} is {label}: lookupcache can read it, but writes only managed tables; write to it with its own tools"
        )
    if status is not None and (isinstance(status, FileVersion) or status.files or status.directories):
        raise NotATableError(
            f"{url_text} {'is a file' if isinstance(status, FileVersion) else 'holds files'} that format('lookupcache') did not write, so it cannot become a managed table: "
            "write to another path, or write plain files with df.write.parquet and read them with lookupcache"
        )
    # A drop, vacuum or copy of the outer table would also affect the files of the new one.
    above = enclosing.find(url)
    if above is not None:
        directory, kind = above
        raise TableFormatError(f"{url_text} lies inside {redact('path', directory)}, {kind}: write to another path")


# --- writes ---------------------------------------------------------------------------------------

_OF_ROWS = (
    WriteMode.APPEND,
    WriteMode.UPSERT,
    WriteMode.DELETE,
    WriteMode.DELETE_WHERE,
)  # such a write is not committed if it changes no row


class TableWriter:
    """Writes to the managed table at `log.url`; the first write creates the table.

    `on_commit` is called with the table id and the log position of each commit.
    """

    def __init__(
        self,
        ufs: Ufs,
        log: NotificationLog,
        context: HostContext,
        options: LookupOptions,
        table: Table,
        rows: RowsByKey,
        on_commit: Callable[[str, int], None],
        sizes: WriteSizes,
        enclosing: EnclosingTables,
        heartbeats: Heartbeats,
    ) -> None:
        self._ufs = ufs
        self._enclosing = enclosing
        self._log = log
        self._options = options
        self._table = table
        self._rows = rows
        self._on_commit = on_commit
        self._sizes = sizes
        self._context = context
        self._aborts = Aborts(ufs, log, context, heartbeats)
        self.abort, self.discard = self._aborts.abort, self._aborts.discard
        self._redacted_path = log.redacted_path

    # --- the driver's side ------------------------------------------------------------------------

    def begin(self, schema: pa.Schema, mode: WriteMode, name: str | None = None, first: bool = False) -> Job:
        """Begin a write of rows with these columns, and return the job that its tasks need. Allocates the write id, unless `name` is given.

        `name`: the directory for the files. The id is then allocated at the commit, and the write may begin again under this name. `first`:
        this is the first write of a transaction, so other writes may follow under the same id, also writes by key. Raises SchemaError,
        OptionError or NotATableError if the table cannot take the write.
        """
        state = self._log.latest() or self._create(schema)
        kept_columns = () if first else self.find_kept_columns(state.definition, schema, mode)
        if first and state.definition.keys and mode is not WriteMode.OVERWRITE:
            mode = WriteMode.UPSERT
        latest_state = None if self._aborts.abort_dead(state) else state
        write_id: int | None = None
        nonces = [""]
        if name is None:
            write_ids: list[int] = []

            def allocate(state: TableState, nonce: str, at_s: float) -> Event:
                extend_definition(state, schema, self._options, mode.by_key, self._redacted_path)
                write_ids[:] = [state.high_watermark + 1]
                nonces[:] = [nonce]
                return Allocate(state.position + 1, state.table_id, nonce, at_s, write_ids[0], mode)

            state = append_unseen(self._log, allocate, after=latest_state)
            write_id = write_ids[0]
            name = write_directory(write_id)
        definition = extend_definition(state, schema, self._options, mode.by_key, self._redacted_path)
        return Job(
            state.table_id, write_id, mode, name, definition, self._context.clock.steady_s(), nonces[0], kept_columns
        )

    def find_kept_columns(self, definition: Definition, schema: pa.Schema, mode: WriteMode) -> tuple[str, ...]:
        """The columns that the rows of an upsert lack and in which existing rows keep their values; none for other modes.

        Raises SchemaError if the options do not allow rows without these columns.
        """
        return (
            find_kept_columns(definition, schema, self._options, self._redacted_path)
            if mode is WriteMode.UPSERT
            else ()
        )

    def create(self, schema: pa.Schema) -> None:
        """Create the table without rows, unless it exists. Raises SchemaError if it exists with other columns or keys."""
        definition = (self._log.latest() or self._create(schema)).definition
        requested = define(schema, self._options.files.keys or definition.keys, self._redacted_path)
        if definition.schema != requested.schema or definition.keys != requested.keys:
            raise SchemaError(
                f"{self._redacted_path} is a table with the columns {columns_ddl(definition.schema)} and the keys {', '.join(definition.keys) or '(none)'}, "
                f"not with {columns_ddl(requested.schema)} and {', '.join(requested.keys) or '(none)'}: leave lookup.schema, lookup.keys and lookup.create-if-not-exists out"
            )

    def _create(self, schema: pa.Schema) -> TableState:
        check_place(self._ufs, self._log.url, self._enclosing)
        definition = define(schema, self._options.files.keys or (), self._redacted_path)
        table_id = f"{self._context.rng.getrandbits(128):032x}"
        try:
            created_state = self._log.create(
                lambda nonce, at_s: Create(1, table_id, nonce, at_s, definition, self._sizes.log_page)
            )
        except CommitUnknownError as problem:
            raise_ours(nothing_written(self._log, problem), problem)
        state = created_state or self._log.latest()
        if state is None:
            raise UfsNotFoundError(
                f"{self._redacted_path}: the table was removed while it was being created: write again"
            )
        return state

    def effect(self, job: Job, files: Sequence[DataFile]) -> Effect:
        """The effect of a commit of these files on the rows of other writes, by the job's mode and the options."""
        if job.kept_columns:

            def write_rows(definition: Definition, rows: pa.Table) -> list[DataFile]:
                return self.write(dataclasses.replace(job, definition=definition), rows.to_batches(), "kept")

            row_names = [name for name in job.definition.schema.names if name not in job.kept_columns]
            return Keeping(self._rows, self._table, files, row_names, write_rows)
        if job.mode.by_key:

            def keys(definition: Definition) -> pa.Table:
                new_keys = self._rows.read_keys(definition, files)
                self._rows.check_different(new_keys)
                return new_keys

            return ByKey(self._rows, self._table, keys)
        if self._options.kind(WriteOptions).unique_keys:
            # An overwrite leaves the rows of writes with a higher write id.
            own_write_id = job.write_id if job.mode is WriteMode.OVERWRITE else None
            return NewKeys(
                self._rows, dataclasses.replace(self._table, own_write_id=own_write_id), files, job.directory
            )
        return Independent()

    def deletion(self, keys: pa.Table) -> Effect:
        """The effect that deletes the rows with these keys. `keys`: the key columns, in the table's types."""
        return ByKey(self._rows, self._table, lambda _: keys)

    def deletion_where(self, where: str) -> Effect:
        """The effect that deletes the rows for which a predicate is true."""
        return Where(self._rows, self._table, where)

    def commit(
        self, job: Job, files: Sequence[DataFile], batch: Batch | None = None, effect: Effect | None = None
    ) -> TableState | None:
        """Add the rows of the files to the table, all at once. Returns the state after the commit; None if the batch was already committed.

        `effect`: replaces the effect of the job's mode. A write that would change nothing is not committed. Raises WriteConflictError,
        NonUniqueKeyError or SchemaError if the commit is impossible; another UfsError if the store fails (the write is then aborted, if
        possible); CommitUnknownError if the store does not say whether the write is committed.
        """
        if not files and effect is None and job.mode is not WriteMode.OVERWRITE:
            self._give_up(job, files, "no rows")
            return self._log.latest()
        state, job = self._allocate(job, batch)
        if job.write_id is None:
            assert batch is not None
            self._context.metrics.inc("batchSkippedCount")
            _log.warning(
                "batch %d of %s is not written to %s: this batch, or a later one of that name, is already committed. If its rows are new, because "
                "the query went back to an old checkpoint, give it a new checkpoint directory, and a new name in lookup.write.batch if that is "
                "set. It then reads its source from the start again, so appended rows may be in the table twice",
                batch.id,
                batch.query,
                self._redacted_path,
            )
            self._aborts.remove(job, files, state)
            return None
        try:
            # Rows that lack columns are completed first; `Keeping` writes those files.
            new_files = () if job.kept_columns and effect is None else files
            state = self._commit(job, job.write_id, new_files, batch, effect or self.effect(job, files))
        except Exception as problem:
            state = self._end(job, files, problem)
        if not state.writes[job.write_id].committed:
            self._give_up(job, files, "no rows")
            return self._log.latest()
        self._on_commit(state.table_id, self.commit_position(job, state))
        self._aborts.tidy(job, state)
        return state

    def commit_position(self, job: Job, state: TableState) -> int:
        """The log position of a job's commit; the position of the current version if the job has no commit."""
        write = own_write(state, job)
        return write.ended_at if write is not None and write.committed and write.ended_at is not None else state.newest

    def _give_up(self, job: Job, files: Sequence[DataFile], reason: str = "") -> None:
        """Abort a job. If the store fails, the write stays open, and its rows stay invisible."""
        with contextlib.suppress(UfsError, DamagedFileError):
            self.abort(job, files, reason)

    def _end(self, job: Job, files: Sequence[DataFile], problem: Exception) -> TableState:
        """The state after a commit that seemed to fail, if the job turns out to be committed; otherwise raises the error `problem`.

        The race: the commit's event may still arrive. So an abort is put into the log, and whichever of the two comes first decides: no event
        of the write can follow its abort.
        """
        try:
            state = self.abort(job, files)
        except (UfsError, DamagedFileError):
            raise problem from problem.__cause__
        write = None if state is None else own_write(state, job)
        if state is not None and write is not None and write.committed:
            return state
        if write is not None and isinstance(problem, CommitUnknownError):
            raise_ours(nothing_written(self._log, problem), problem)
        raise problem from problem.__cause__

    def _commit(
        self, job: Job, write_id: int, files: Sequence[DataFile], batch: Batch | None, effect: Effect
    ) -> TableState:
        """Commit the write, unless it would change nothing. Returns the state after that."""
        state = self._log.cached_state()
        is_stale = state is None or state.table_id != job.table_id or write_id not in state.writes
        if is_stale or not isinstance(effect, Independent):
            state = self._log.latest()
        after: TableState | None = None
        while True:
            if state is None:
                raise UfsNotFoundError(
                    f"{self._redacted_path} is not (or no longer) a managed table: its log is empty or gone: check the path, or write again, which creates a new table"
                )
            definition = self._check(state, job, write_id, effect)
            rows = effect.look(state, definition)
            files = (*files, *effect.added)
            deletes = [self._files(job).put_deletes(rows)] if rows is not None and rows.num_rows else []
            write = state.writes[write_id]
            if files or deletes or (effect.replaces and not write.replaces):
                state = after = append_unseen(
                    self._log, self._writes(job, write_id, effect, files, deletes), after=after
                )
            files = ()
            if job.mode in _OF_ROWS and not state.writes[write_id].does_something:
                return state
            state = after = self._log.append(self._commits(job, write_id, effect, batch), after=after)
            if state.writes[write_id].committed:
                return state

    def _writes(
        self, job: Job, write_id: int, effect: Effect, files: Sequence[DataFile], deletes: Sequence[DataFile]
    ) -> Callable[[TableState, str, float], Event]:
        def write(state: TableState, nonce: str, at_s: float) -> Event:
            self._check(state, job, write_id, effect)
            # The first event of a compaction names the writes that it replaces, even if it adds no files.
            replaces = () if state.writes[write_id].replaces else effect.replaces
            contents = tuple(files), tuple(deletes), replaces
            return Write(state.position + 1, state.table_id, nonce, at_s, write_id, *contents)

        return write

    def _commits(
        self, job: Job, write_id: int, effect: Effect, batch: Batch | None
    ) -> Callable[[TableState, str, float], Event | None]:
        def commit(state: TableState, nonce: str, at_s: float) -> Event | None:
            definition = self._check(state, job, write_id, effect)
            if batch is not None and state.is_committed(batch):
                raise WriteConflictError(
                    f"{self._redacted_path}: another writer has committed batch {batch.id} of query {batch.query}, so this one has written nothing: do not write the batch again"
                )
            if effect.is_due(state):
                return None  # the write must look into newer commits first
            new_definition = definition if definition.schema != state.definition.schema else None
            return Commit(state.position + 1, state.table_id, nonce, at_s, write_id, new_definition, batch)

        return commit

    def _allocate(self, job: Job, batch: Batch | None) -> tuple[TableState | None, Job]:
        """(the state, the job with a write id). The job gets no write id if its batch is already committed. The state is None if the job had
        an id before."""
        if job.write_id is not None:
            return None, job
        allocations: list[tuple[int, str]] = []

        def allocate(state: TableState, nonce: str, at_s: float) -> Event | None:
            self._check_same(state, job)
            allocations.clear()
            if batch is not None and state.is_committed(batch):
                return None
            allocations.append((state.high_watermark + 1, nonce))
            return Allocate(state.position + 1, state.table_id, nonce, at_s, allocations[0][0], job.mode)

        state = append_unseen(self._log, allocate)
        write_id, nonce = allocations[0] if allocations else (None, "")
        return state, dataclasses.replace(job, write_id=write_id, nonce=nonce)

    def _check(self, state: TableState, job: Job, write_id: int, effect: Effect) -> Definition:
        """The table's definition after a commit of the job. Raises the error that makes the commit impossible."""
        self._check_same(state, job)
        if write_id in state.writes and own_write(state, job) is None:
            raise WriteConflictError(
                f"{self._redacted_path} was restored from a copy since this write began: write again"
            )
        try:
            state.check_open(write_id)
        except WriteConflictError as problem:
            raise WriteConflictError(f"{self._redacted_path}: {problem}") from None
        if not isinstance(effect, Independent) and state.definition.keys != job.definition.keys:
            raise WriteConflictError(
                f"the key columns of {self._redacted_path} have changed since this write began: write again"
            )
        effect.check(state)
        definition = match_definition(state.definition, job.definition.schema, True, self._redacted_path)
        if definition.schema != state.definition.schema and not self._options.kind(WriteOptions).merge_schema:
            raise WriteConflictError(f"{self._redacted_path}: another write has changed the columns: write again")
        return definition

    def _check_same(self, state: TableState, job: Job) -> None:
        if state.table_id != job.table_id:
            raise WriteConflictError(
                f"{self._redacted_path} was dropped and recreated since this write began: write again"
            )

    def cast_key_table(self, keys: pa.Table) -> pa.Table:
        """The keys, cast to the types of the table's key columns.

        Raises SchemaError for values that do not fit, OptionError for a table without key columns, UfsNotFoundError if there is no table.
        """
        state = self._log.latest()
        if state is None:
            raise UfsNotFoundError(
                f"{self._redacted_path} is not a managed table, so nothing can be deleted: check the path"
            )
        fields = [state.definition.schema.field(name) for name in state.definition.keys]
        if not fields:
            raise OptionError(
                f"{self._redacted_path} has no key columns, so nothing can be deleted by key: name them with LookupTable.alter(keys=…)"
            )
        return pa.Table.from_arrays(cast_keys(keys, fields), names=[field.name for field in fields])

    def delete(self, keys: pa.Table) -> int:
        """Delete the rows with these keys, in one commit. Returns the commit's log position; the current version's position if nothing
        changes."""
        key_table = self.cast_key_table(keys)
        state = self._log.cached_state()
        if key_table.num_rows:
            job = self.begin(key_table.schema, WriteMode.DELETE)
            state = self.commit(job, (), effect=self.deletion(key_table))
            assert state is not None
            return self.commit_position(job, state)
        assert state is not None
        return state.newest

    def delete_where(self, where: str) -> int:
        """Delete the rows for which a predicate is true, in one commit. Returns the commit's log position; the current version's if nothing
        changes.

        Raises PredicateError for an invalid predicate.
        """
        state = self._log.latest()
        if state is None:
            raise UfsNotFoundError(
                f"{self._redacted_path} is not a managed table, so nothing can be deleted: check the path"
            )
        parse_where(where, state.definition.schema)
        job = self.begin(state.definition.schema, WriteMode.DELETE_WHERE)
        committed_state = self.commit(job, (), effect=self.deletion_where(where))
        assert committed_state is not None
        return self.commit_position(job, committed_state)

    def alter(self, columns: pa.Schema | None, keys: Sequence[str] | None, properties: Mapping[str, str] | None) -> int:
        """Change the table's definition, in one commit. Returns the commit's log position; the current version's position if nothing changes.

        `columns` are added; `keys` replace the key columns; `properties` are set. Raises SchemaError for columns that the table has with
        other types, and for keys that the table does not have or that are named twice, UfsNotFoundError if there is no table.
        """

        def alter_definition(definition: Definition) -> Definition:
            new_definition = (
                definition if columns is None else match_definition(definition, columns, True, self._redacted_path)
            )
            key_names = definition.keys
            origin = f"{self._redacted_path}: argument keys"
            if keys is not None:
                key_names = tuple(resolve_names(keys, new_definition.schema, "lookup.keys", origin))
            if len(set(key_names)) < len(key_names):
                raise SchemaError(f"{origin} = {list(keys or ())!r} names a column twice: name each column once")
            check_key_types([new_definition.schema.field(name) for name in key_names])
            new_properties = {**definition.properties, **(properties or {})}
            parse_properties(new_properties)
            return Definition(new_definition.schema, key_names, new_properties)

        allocations: list[tuple[int, str]] = []

        def allocate(state: TableState, nonce: str, at_s: float) -> Event | None:
            allocations.clear()
            if alter_definition(state.definition) == state.definition:
                return None
            allocations.append((state.high_watermark + 1, nonce))
            return Allocate(state.position + 1, state.table_id, nonce, at_s, allocations[0][0], WriteMode.ALTER)

        state = append_unseen(self._log, allocate)
        if not allocations:
            return state.newest
        ((write_id, own_nonce),) = allocations
        directory = write_directory(write_id)
        job = Job(state.table_id, write_id, WriteMode.ALTER, directory, state.definition, 0.0, own_nonce)

        def commit(state: TableState, nonce: str, at_s: float) -> Event:
            self._check(state, job, write_id, Independent())
            return Commit(state.position + 1, state.table_id, nonce, at_s, write_id, alter_definition(state.definition))

        try:
            state = self._log.append(commit, after=state)
        except Exception as problem:
            state = self._end(job, (), problem)
        position = self.commit_position(job, state)
        self._on_commit(state.table_id, position)
        return position

    # --- a transaction's side ---------------------------------------------------------------------

    def widen(self, job: Job, schema: pa.Schema, by_key: bool) -> Job:
        """The job, extended so that it can also take rows with these columns. Raises the errors of `begin`."""
        state = self._log.cached_state()
        if state is None or state.table_id != job.table_id:
            raise WriteConflictError(
                f"{self._redacted_path} was dropped and recreated since this write began: write again"
            )
        if extend_definition(state, schema, self._options, by_key, self._redacted_path).keys != job.definition.keys:
            raise WriteConflictError(
                f"the key columns of {self._redacted_path} have changed since this write began: write again"
            )
        definition = match_definition(
            job.definition, schema, self._options.kind(WriteOptions).merge_schema, self._redacted_path
        )
        return dataclasses.replace(job, definition=definition)

    def put_files(self, job: Job, files: Sequence[DataFile], rows: pa.Table | None) -> None:
        """Write a delete file that names `rows` of other files, and add it and `files` to the job's write in the log. The job's commit makes
        both effective."""
        deletes = [self._files(job).put_deletes(rows)] if rows is not None and rows.num_rows else []
        if job.write_id is not None and (files or deletes):
            self._log.append(self._writes(job, job.write_id, Independent(), files, deletes))

    # --- a task's side ----------------------------------------------------------------------------

    def write(self, job: Job, batches: Iterable[pa.RecordBatch], prefix: str) -> list[DataFile]:
        """Write the rows of one task, and return their files. Each attempt of a task writes its own files; only those passed to `commit`
        count."""
        return self._files(job).write(self._beating(job, batches), prefix)

    def write_ordered(self, job: Job, parts: Iterable[Iterable[pa.RecordBatch]], prefix: str) -> list[DataFile]:
        """Write rows that come in parts ordered by key, and return their files (see `DataFiles.write_ordered`)."""
        return self._files(job).write_ordered((self._beating(job, part) for part in parts), prefix)

    def _files(self, job: Job) -> DataFiles:
        return DataFiles(self._ufs, self._log.url, job, self._context.rng, self._sizes)

    def _beating(self, job: Job, batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        if job.write_id is not None:
            self._aborts.heartbeats.start(job.write_id)
        for batch in batches:
            if job.write_id is not None:
                with contextlib.suppress(UfsError):
                    self._aborts.heartbeats.beat(job.write_id)
            yield batch
