"""Options of a read (which columns, rows and version), and of writes to managed tables."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable

from pyspark_lookup.errors import OptionError
from pyspark_lookup.options import enums
from pyspark_lookup.options.iceberg_options import Ref
from pyspark_lookup.options.parsing import (
    BOOLEAN,
    COUNT,
    MIB,
    MOST,
    NAME,
    NAMES,
    POSITIVE_COUNT,
    POSITIVE_DURATION,
    Kind,
    choice,
    option,
    parse_batch,
    parse_commit,
    parse_instant,
    parse_stream_start,
    parse_sync_interval_s,
    parse_text,
    parse_write_ids,
    size,
    whole_number,
)

EXPLICIT = "lookup.given"
"""Of a read that is part of a lookup, no option of users': the names of those that were given for it, the others being its table's."""
BUILT = "lookup.built"
"""Of such a read, too: the micro-batch in whose `foreachBatch` function the lookup was built, and when, as JSON."""
OF_AS_OF = frozenset({"lookup.valid-from", "lookup.valid-to", "lookup.overlap"})
Pin = int | datetime.datetime | str | Ref
"""A version of a table: its number, the one that was current at a time, a list of valid write ids, or a branch or tag."""
_NUMBER = whole_number(
    0, 2**63 - 1, "a version of the table, as LookupTable.versions() lists them (of a managed table 1 or more)"
)
_CHANGES = whole_number(1, 2**63 - 1, "a version of the table, as LookupTable.versions() lists them, 1 or more")


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    # fmt: off
    columns: tuple[str, ...] | None = option(
        "lookup.columns", NAMES, None, default_text="all",
        doc="Columns to read, in this order.",
    )
    where: str | None = option(
        "lookup.where", Kind("SQL predicate", parse_text), None, default_text="all rows",
        doc="Rows to read: `=`, `<>`, `<`, `<=`, `>`, `>=`, `<=>`, `IN`, `BETWEEN`, `LIKE 'prefix%'`, `IS [NOT] "
            "NULL`, `AND`, `OR`, `NOT` over this table's columns; prunes files and row groups.",
    )
    valid_from: str | None = option(
        "lookup.valid-from", NAME, None,
        doc="The column with the time from which a row is valid, for `lookup_join(…, as_of=…)`; null: it always was.",
    )
    valid_to: str | None = option(
        "lookup.valid-to", NAME, None,
        doc="... and the one with the time before which it is valid; null: it still is. Default: until the key's next row.",
    )
    overlap: enums.Overlap = option(
        "lookup.overlap", choice(enums.Overlap), enums.Overlap.ERROR,
        doc="If two rows of a key are valid at the same time: fail, or take the row whose validity started last.",
    )
    view: enums.View = option(
        "lookup.view", choice(enums.View), enums.View.DATA,
        doc="What a read returns: the rows; the files of the current version; the versions this host knows; its "
            "counters; one row about the current version; the version as a SQL function takes it; or the "
            "changes that a managed table's commits made (`readStream`, or `lookup.changes-from`).",
    )
    metadata_source: enums.MetadataSource = option(
        "lookup.metadata.source", choice(enums.MetadataSource), enums.MetadataSource.UFS,
        doc="Who says which version is current: the store, once per query, or this host.",
    )
    sync_interval_s: float | None = option(
        "lookup.metadata.sync-interval", Kind("-1, 0 or duration", parse_sync_interval_s), None, default_text="required with CACHE, unless FULL",
        doc="With CACHE: ask the store again when the known version is older than this (-1 never, 0 always).",
    )
    version: int | None = option(
        "lookup.version", Kind("version number", _NUMBER), None, default_text="the current version",
        doc="Of a table that keeps its versions: read this one (time travel), as `lookup.view=versions` lists them.",
    )
    timestamp: datetime.datetime | None = option(
        "lookup.timestamp", Kind("ISO 8601 time", parse_instant), None,
        doc="... the version that was current at this time, such as `2026-03-01T12:00:00+01:00`; without a zone, in UTC.",
    )
    changes_from: int | None = option(
        "lookup.changes-from", Kind("version number", _CHANGES), None,
        doc="Of a managed table: read the changes of the commits from this one on (inclusive), as `lookup.view=changes`.",
    )
    changes_to: int | None = option(
        "lookup.changes-to", Kind("version number", _CHANGES), None, default_text="the current version",
        doc="... up to this commit (inclusive).",
    )
    valid_write_ids: str | None = option(
        "lookup.valid-write-ids", Kind("`table:5:2:2:4`", parse_write_ids), None,
        doc="Of a managed table: read only the writes that this list admits, in Hive's format: table id, high watermark, least "
            "open id, open ids, aborted ids.",
    )
    floor: str | None = option(
        "lookup.floor", Kind("`table id:log position`", parse_commit), None,
        doc="Of a managed table, with CACHE: the read includes at least this commit (`LookupTable.floor` of its writer). "
            "Commits of the same host are always included.",
    )
    version_at: enums.VersionAt = option(
        "lookup.version-at", choice(enums.VersionAt), enums.VersionAt.AUTO,
        doc="When a scan resolves its version. AUTO: at reading if the table fits one task, else at planning.",
    )
    on_version_gone: enums.OnVersionGone | None = option(
        "lookup.on-version-gone", choice(enums.OnVersionGone), None, default_text="NEWER; FAIL for tables that keep versions",
        doc="When a file was replaced after the version was resolved: read the newer one, or fail.",
    )
    on_error: enums.OnError = option(
        "lookup.on-error", choice(enums.OnError), enums.OnError.FAIL,
        doc="Of joins and SQL functions: when a lookup failed in every attempt, fail the query, or go on with null in"
            " its columns and the reason in the column `lookup_error`.",
    )
    split_size: int = option(
        "lookup.scan.split-size", size(MIB, MOST), 128 * MIB, default_text="128 MiB",
        doc="A scan of more file bytes than this is split into several tasks.",
    )
    stream_start: enums.StreamStart | int = option(
        "lookup.stream.start", Kind("SNAPSHOT, LATEST or log position", parse_stream_start), enums.StreamStart.SNAPSHOT,
        doc="Of a stream of changes: start with all current rows (SNAPSHOT), with the commits from now on (LATEST), or "
            "with the commits after this position.",
    )
    stream_max_rows: int | None = option(
        "lookup.stream.max-rows-per-trigger", POSITIVE_COUNT, None,
        doc="Of a stream of changes: a micro-batch takes commits of about this many rows in total, but at least one commit.",
    )
    stream_max_files: int | None = option(
        "lookup.stream.max-files-per-trigger", POSITIVE_COUNT, None,
        doc="... of about this many files.",
    )
    stream_max_bytes: int | None = option(
        "lookup.stream.max-bytes-per-trigger", size(1, MOST), None,
        doc="... of about this many bytes.",
    )
    # fmt: on

    @property
    def version_pins(self) -> dict[str, Pin]:
        """The options that name a version to read, by key."""
        pins = {
            "lookup.version": self.version,
            "lookup.timestamp": self.timestamp,
            "lookup.valid-write-ids": self.valid_write_ids,
        }
        return {key: value for key, value in pins.items() if value is not None}

    @property
    def stream_limits(self) -> tuple[int | None, int | None, int | None]:
        """The most rows, files and bytes of a micro-batch; None: no limit."""
        return self.stream_max_rows, self.stream_max_files, self.stream_max_bytes


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    # fmt: off
    create_if_not_exists: bool = option(
        "lookup.create-if-not-exists", BOOLEAN, False,
        doc="Of CREATE TABLE: if nothing is at the path, make a managed table there, with the columns of "
            "lookup.schema and the keys of lookup.keys.",
    )
    write_mode: enums.KeyedWrite | None = option(
        "lookup.write.mode", choice(enums.KeyedWrite), None,
        doc="Of writes in Spark's append mode: upsert, which replaces the rows that have the same keys.",
    )
    write_unique_keys: bool = option(
        "lookup.write.unique-keys", BOOLEAN, False,
        doc="Of writes: fail before the commit if two rows would have the same key.",
    )
    write_merge_schema: bool = option(
        "lookup.write.merge-schema", BOOLEAN, False,
        doc="Of writes: add columns that the table does not have; older rows have null there.",
    )
    write_missing_columns: enums.MissingColumns | None = option(
        "lookup.write.missing-columns", choice(enums.MissingColumns), None, default_text="such an upsert is refused",
        doc="Of upserts whose rows lack columns: an existing row keeps its values there (KEEP), or they become null "
            "(NULL).",
    )
    write_batch: tuple[str, int] | None = option(
        "lookup.write.batch", Kind("`name:number`", parse_batch), None,
        doc="Of batch writes, as in `foreachBatch`: write nothing if this batch, or a later one of the same name, has "
            "already been committed.",
    )
    write_compact_after: int = option(
        "lookup.write.compact-after", COUNT, 20,
        doc="Of writes: a commit compacts small writes once there are this many; 0: commits never do "
            "(call `LookupTable.compact`).",
    )
    write_timeout_s: float = option(
        "lookup.write.timeout", POSITIVE_DURATION, 86400.0, default_text="24 h",
        doc="Of writes: others may abort a write that has shown no sign of life for this long.",
    )
    # fmt: on


IDLE_IN_GETS = OF_AS_OF | {
    field.metadata["key"]
    for field in dataclasses.fields(ReadOptions)
    if field.metadata["key"] == "lookup.on-error" or field.metadata["key"].startswith("lookup.stream.")
}
"""Options of other uses of a `LookupTable` than its own reads."""


def refuse_in_reads(
    explicit: Iterable[str], view: enums.View = enums.View.DATA, stream: bool = False, as_of: bool = False
) -> None:
    """Raise OptionError for an option that was given for a read in which it has no effect.

    What is stored with a table is not given for a read: it is for all that is done with the table. `stream`: it is, or may be, a
    stream of changes; `as_of`: a lookup of what is valid at a time.
    """
    for key in sorted(key.lower() for key in explicit):
        if key.startswith("lookup.write."):
            raise OptionError(f"option {key} is for writes: remove it from the read")
        if key.startswith("lookup.stream.") and not stream:
            raise OptionError(f"option {key} is for streams of changes (readStream): remove it")
        if key in OF_AS_OF and not as_of:
            raise OptionError(f"option {key} is for lookup_join with as_of only: remove it")
        if key == "lookup.on-error" and view is not enums.View.TOKEN:
            raise OptionError(
                f"option {key} is for lookup_join and register_lookup: a scan or a get() always fails on an error, remove it"
            )
