"""Streams of a managed table's changes (`readStream`). An offset of a stream is the log position of the last commit that it has consumed.

One process on the driver plans the micro-batches. A task gets the list of the files with its rows, so it does not read the table's log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from pyspark_lookup.core.decoding import UNREADABLE, as_count, as_text, show
from pyspark_lookup.errors import DamagedFileError, OptionError, SourceChangedError, VersionGoneError, raise_ours
from pyspark_lookup.lookup.catalog_tables import added_columns
from pyspark_lookup.lookup.metadata_tables import managed_state, read_share, shares
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import StreamStart, View
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.managed.change_feed import ChangeTask, changes_between, cost, plan_snapshot
from pyspark_lookup.sources.managed.log import NotificationLog, TableState
from pyspark_lookup.sources.managed.options import ChangeOptions
from pyspark_lookup.sources.managed.source import read_version
from pyspark_lookup.spark.features import (
    STREAM_LIMITS,
    DataSourceStreamReader,
    InputPartition,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxFiles,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark_lookup.spark.planning import stream_options
from pyspark_lookup.spark.reading import session_options
from pyspark_lookup.spark.types import arrow_schema
from pyspark_lookup.spark.worker_errors import errors_without_traceback
from pyspark_lookup.versions.model import Table

_NEW_CHECKPOINT = (
    "a new checkpoint: the stream then begins at lookup.stream.start, by default with all current rows, also those that it has returned before, but "
    "not with the deletes that it has missed"
)
_LIMITS: Mapping[Any, str] = {ReadMaxRows: "max_rows", ReadMaxFiles: "max_files", ReadMaxBytes: "max_bytes"}


def stream_reader(options: Mapping[str, str], schema: StructType) -> ChangeReader:
    """The reader of a stream of changes. Raises OptionError for an option that a stream cannot have, NotSupportedError for an option that this
    Spark does not support."""
    parsed = stream_options(options, schema)
    if parsed.pinned is not None:
        raise OptionError(f"option {next(iter(parsed.pins))} is for batch reads: in a stream use lookup.stream.start")
    if parsed.kind(ChangeOptions).first is not None:
        raise OptionError("option lookup.changes-from is for batch reads: in a stream use lookup.stream.start")
    if parsed.read.view not in (View.DATA, View.CHANGES):
        raise OptionError(
            f"option lookup.view = {parsed.read.view.value!r} is for batch reads: in a stream use data or changes"
        )
    for limit, name in zip(parsed.kind(ChangeOptions).limits, ("rows", "files", "bytes"), strict=True):
        if limit is not None:
            instead = "remove the option; each micro-batch then takes all new commits"
            STREAM_LIMITS.require(f"option lookup.stream.max-{name}-per-trigger", instead)
    return ChangeReader(parsed, arrow_schema(schema), added_columns(schema))


@errors_without_traceback
class ChangeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Tells Spark the offsets and tasks of a stream of changes. It lives on the driver as long as the streaming query."""

    def __init__(self, options: LookupOptions, columns: pa.Schema, added: Sequence[str] = ()) -> None:
        self._options = options
        self._columns = columns
        self._added = added
        self._table: Table | None = None
        self._until: int | None = None
        # The offset at which the next micro-batch begins, for a Spark that does not say.
        self._reached: dict[str, Any] | None = None

    # --- offsets ----------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """The offset before the first commit to consume. Position 0 means that the table's current rows come first."""
        state, start = self._state(), self._options.kind(ChangeOptions).start
        position = 0 if start is StreamStart.SNAPSHOT else state.position if start is StreamStart.LATEST else start
        assert isinstance(position, int)
        if position > state.position:
            raise OptionError(
                f"option lookup.stream.start = '{position}': the log of the table ends at {state.position}; give an earlier position, or LATEST"
            )
        self._reached = self._offset(state, position)
        return self._reached

    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        """The offset at which the next micro-batch ends: as far as `limit` allows, but after at least one commit if there is one.

        Before 4.2, Spark has no read limits (admission control) and passes no arguments. The first micro-batch of a restarted query then always
        goes to the end of the log, even if there is nothing new.
        """
        start = self._reached if start is None else start
        state = self._state(*(() if start is None else (start,)))
        until = state.position if self._until is None else min(self._until, state.position)
        self._reached = self._offset(state, until) if start is None else self._next(state, start, until, limit)
        return self._reached

    def _next(self, state: TableState, start: dict[str, Any], until: int, limit: ReadLimit | None) -> dict[str, Any]:
        after = _parse_offset(start)[1]
        if after == 0:
            # One micro-batch has all of the table's current rows, so that they are of one version.
            assert self._table is not None
            return self._offset(state, until) if read_version(self._log(), self._table, state, until).files else start
        spent = [0, 0, 0]
        end = after
        for part, change in self._log().pages.changes(state, after, until):
            more = cost(part, change)
            spent = list(map(sum, zip(spent, more, strict=True)))
            if end > after and _exceeds(limit, spent):
                break
            if any(more):
                end = change.position
        return self._offset(state, end)

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit of micro-batches that `lookup.stream.max-…-per-trigger` sets; without this option, none."""
        limits = zip(_LIMITS, self._options.kind(ChangeOptions).limits, strict=True)
        return next((limit(most) for limit, most in limits if most is not None), ReadAllAvailable())

    def prepareForTriggerAvailableNow(self) -> None:
        """From now on, let this run of the query end at the current end of the log. The next run reads later commits."""
        self._until = self._state().position

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The offset of the log's end, which the query's progress shows."""
        state = self._state()
        return self._offset(state, state.position)

    def _offset(self, state: TableState, position: int) -> dict[str, Any]:
        return {"table": state.table_id, "position": position}

    def _log(self) -> NotificationLog:
        assert self._table is not None
        return runtime().engine(self._options).managed.log(self._table.url)

    def _state(self, *offsets: Mapping[str, Any]) -> TableState:
        """The current state of the table's log. Raises VersionGoneError if the offsets are of another log, or are after its end."""
        engine = runtime().engine(self._options)
        state = managed_state(engine, self._options)
        self._table = engine.managed.table(self._options)
        for table_id, position in map(_parse_offset, offsets):
            if table_id != state.table_id:
                raise VersionGoneError(
                    f"{redact('path', self._options.files.path)} was dropped and recreated since this stream began: "
                    f"start again with {_NEW_CHECKPOINT}"
                )
            if position > state.position:
                raise VersionGoneError(
                    f"{redact('path', self._options.files.path)}: the log ends at {state.position}, before what this stream has "
                    f"consumed ({position}). Was the table restored? Start again with {_NEW_CHECKPOINT}"
                )
        return state

    # --- tasks ------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of the micro-batch between two offsets: the same tasks each time it is planned."""
        state = self._state(start, end)
        assert self._table is not None
        self._reached = end
        after, until = _parse_offset(start)[1], _parse_offset(end)[1]
        if after == 0:
            # Spark may also ask for an empty micro-batch, in which an aggregation completes its results.
            tasks = plan_snapshot(self._table, self._log(), state, until) if until else []
        else:
            rows_only = self._options.read.view is View.DATA
            tasks = list(changes_between(self._table, self._log(), state, after, until, rows_only))
        return [InputPartition((self._options, self._columns, self._added, share)) for share in shares(tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(*partition.value)

    def commit(self, end: dict[str, Any]) -> None:
        pass

    def stop(self) -> None:
        runtime().engine(self._options).publish_metrics()

    def __reduce__(self) -> tuple[Any, ...]:
        return ChangeReader, (self._options, self._columns)


def _parse_offset(offset: Any) -> tuple[str, int]:
    """(table id, log position) of an offset. Raises DamagedFileError for an offset that another source wrote."""
    try:
        return as_text(offset["table"]), as_count(offset["position"])
    except UNREADABLE:
        raise DamagedFileError(
            f"{show(offset)} in this stream's checkpoint is not an offset of a lookupcache table: start again with {_NEW_CHECKPOINT}"
        ) from None


def _exceeds(limit: ReadLimit | None, spent: Sequence[int]) -> bool:
    """Whether `spent` (rows, files, bytes) exceeds the limit of a micro-batch."""
    name = _LIMITS.get(type(limit))
    return name is not None and dict(zip(_LIMITS.values(), spent, strict=True))[name] > getattr(limit, name)


def _read(
    options: LookupOptions, columns: pa.Schema, added: Sequence[str], tasks: Sequence[ChangeTask]
) -> Iterator[pa.RecordBatch]:
    """The changed rows of some tasks. `added`: columns that ALTER TABLE has added, which the table itself may not have yet."""
    options = options.on_host(session_options())
    engine = runtime().engine(options)
    try:
        yield from read_share(engine, options, columns, tasks, added)
    except SourceChangedError as gone:
        raise_ours(
            VersionGoneError(
                f"{gone}: files of changes that this stream reads were vacuumed. Start again with {_NEW_CHECKPOINT}"
            ),
            gone,
        )
    finally:
        engine.publish_metrics()
