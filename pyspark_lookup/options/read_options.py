"""Options of a read: what it shows of a table, and of which version."""

from __future__ import annotations

import dataclasses

from pyspark_lookup.options.declaring import MIB, MOST, NAME, NAMES, POSITIVE_COUNT, Kind, choice, option, size
from pyspark_lookup.options.enums import (
    FilterPushdown,
    MetadataSource,
    OnError,
    OnVersionGone,
    Overlap,
    StreamStart,
    VersionAt,
    View,
)
from pyspark_lookup.options.parsing import (
    parse_commit,
    parse_position,
    parse_stream_start,
    parse_sync_interval_s,
    parse_text,
    parse_write_ids,
)


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """See `LookupOptions`, of which these are a part."""

    # fmt: off
    columns: tuple[str, ...] | None = option(
        "lookup.columns", NAMES, None, shown="all",
        doc="Columns to read, in this order.",
    )
    where: str | None = option(
        "lookup.where", Kind("SQL predicate", parse_text), None, shown="all rows",
        doc="Rows to read: `=`, `<>`, `<`, `<=`, `>`, `>=`, `<=>`, `IN`, `BETWEEN`, `LIKE 'prefix%'`, `IS [NOT] "
            "NULL`, `AND`, `OR`, `NOT` over this table's columns; prunes files and row groups.",
    )
    valid_from: str | None = option(
        "lookup.valid-from", NAME, None,
        doc="The column that says from when a row is valid, for `lookup_join(…, as_of=…)`; null: always was.",
    )
    valid_to: str | None = option(
        "lookup.valid-to", NAME, None,
        doc="... and before when; null: still is. Without it a row is valid until the next one of its key.",
    )
    overlap: Overlap = option(
        "lookup.overlap", choice(Overlap), Overlap.ERROR,
        doc="Where two rows of a key are valid at once: fail, or take the one that is valid since later.",
    )
    view: View = option(
        "lookup.view", choice(View), View.DATA,
        doc="What a read returns: the rows; the files of the current version; the versions this host knows; its "
            "counters; one row about the current version; the version as a SQL function takes it; or, of a managed "
            "table, what its commits have changed (`readStream`).",
    )
    metrics_tasks: int = option(
        "lookup.metrics.tasks", POSITIVE_COUNT, 32,
        doc="With lookup.view=metrics: tasks that look for hosts to answer; best several times as many as executors.",
    )
    metadata_source: MetadataSource = option(
        "lookup.metadata.source", choice(MetadataSource), MetadataSource.UFS,
        doc="Who says which version is current: the store, once per query, or this host.",
    )
    sync_interval_s: float | None = option(
        "lookup.metadata.sync-interval", Kind("-1, 0 or duration", parse_sync_interval_s), None, shown="required with CACHE, but for FULL",
        doc="With CACHE: ask the store again when the known version is older than this (-1 never, 0 always).",
    )
    version: int | None = option(
        "lookup.version", Kind("log position", parse_position), None, shown="the current version",
        doc="Of a managed table: read the version after this event of its log (time travel).",
    )
    valid_write_ids: str | None = option(
        "lookup.valid-write-ids", Kind("`table:5:2:2:4`", parse_write_ids), None,
        doc="Of a managed table: read what this list lets through, in Hive's form: table id, high watermark, least "
            "open id, open ids, aborted ids.",
    )
    floor: str | None = option(
        "lookup.floor", Kind("`table id:log position`", parse_commit), None,
        doc="Of a managed table, with CACHE: what is read includes this commit (`LookupTable.floor` of its writer). "
            "Commits of the own host are included without it.",
    )
    version_at: VersionAt = option(
        "lookup.version-at", choice(VersionAt), VersionAt.AUTO,
        doc="When a scan resolves its version. AUTO: at reading if the table fits one task, else at planning.",
    )
    on_version_gone: OnVersionGone | None = option(
        "lookup.on-version-gone", choice(OnVersionGone), None, shown="NEWER; of a managed table FAIL",
        doc="When a file was replaced after the version was resolved: read the newer one, or fail.",
    )
    on_error: OnError = option(
        "lookup.on-error", choice(OnError), OnError.FAIL,
        doc="Of joins and SQL functions: when a lookup failed in every attempt, fail the query, or go on with null in"
            " its columns and the reason in the column `lookup_error`.",
    )
    filter_pushdown: FilterPushdown = option(
        "lookup.filter-pushdown", choice(FilterPushdown), FilterPushdown.AUTO,
        doc="Prune by filters Spark pushes. AUTO: only on a Spark that scopes them to their scan (5.0).",
    )
    split_size: int = option(
        "lookup.scan.split-size", size(MIB, MOST), 128 * MIB, shown="128 MiB",
        doc="A scan above this many file bytes is split into several tasks.",
    )
    stream_start: StreamStart | int = option(
        "lookup.stream.start", Kind("SNAPSHOT, LATEST or log position", parse_stream_start), StreamStart.SNAPSHOT,
        doc="Of a stream of changes: begin with the rows there are; with what is committed from now on; or with what "
            "was after this position.",
    )
    stream_max_rows: int | None = option(
        "lookup.stream.max-rows-per-trigger", POSITIVE_COUNT, None,
        doc="Of a stream of changes: a micro-batch takes commits of about so many rows, or one.",
    )
    stream_max_files: int | None = option(
        "lookup.stream.max-files-per-trigger", POSITIVE_COUNT, None,
        doc="... of so many files.",
    )
    stream_max_bytes: int | None = option(
        "lookup.stream.max-bytes-per-trigger", size(1, MOST), None,
        doc="... of so many bytes.",
    )
    # fmt: on

    @property
    def pinned(self) -> int | str | None:
        """Which version of a managed table is read, if not the current one."""
        return self.version if self.version is not None else self.valid_write_ids

    @property
    def stream_limits(self) -> tuple[int | None, int | None, int | None]:
        """At most so many rows, files and bytes in a micro-batch."""
        return self.stream_max_rows, self.stream_max_files, self.stream_max_bytes
