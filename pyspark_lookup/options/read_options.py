"""Options of a read: its columns, rows and version."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from pyspark_lookup.errors import OptionError
from pyspark_lookup.options import enums
from pyspark_lookup.options.parsing import (
    MIB,
    MOST,
    NAME,
    NAMES,
    Kind,
    choice,
    option,
    parse_commit,
    parse_instant,
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


@dataclasses.dataclass(frozen=True)
class Ref:
    """A named reference to a version: `kind` is `branch` or `tag`."""

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name


Pin = int | datetime.datetime | str | Ref
"""A version of a table: its number, the one that was current at a time, a list of valid write ids, or a branch or tag."""
_NUMBER = whole_number(
    0, 2**63 - 1, "a version of the table, as LookupTable.versions() lists them (of a managed table 1 or more)"
)
_CHANGES = whole_number(1, 2**63 - 1, "a version of the table, as LookupTable.versions() lists them, 1 or more")


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """The columns and rows of the table to read, and the view."""

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
        doc="For `lookup_join(…, as_of=…)`: the column with the time from which a row is valid; null: it always was.",
    )
    valid_to: str | None = option(
        "lookup.valid-to", NAME, None,
        doc="For `lookup_join(…, as_of=…)`: the column with the time before which a row is valid; null: it still is. "
            "Default: it is valid until the key's next row.",
    )
    overlap: enums.Overlap = option(
        "lookup.overlap", choice(enums.Overlap), enums.Overlap.ERROR,
        doc="If two rows of a key are valid at the same time: fail, or take the row whose validity started last.",
    )
    view: enums.View = option(
        "lookup.view", choice(enums.View), enums.View.DATA,
        doc="What a read returns. `data`: rows; `files`: the files of the current version; `versions`: the versions "
            "that this host knows; `metrics`: this host's counters; `summary`: one row about the current version; `token`: "
            "the current version as bytes, for the SQL functions of `register_lookup`; `changes`: the changes that the commits of a managed table "
            "made (`readStream`, or with `lookup.changes-from`).",
    )
    on_error: enums.OnError = option(
        "lookup.on-error", choice(enums.OnError), enums.OnError.FAIL,
        doc="Joins and SQL functions: if a lookup fails in every attempt, fail the query, or return null in its columns "
            "and the reason in the column `lookup_error`.",
    )
    split_size: int = option(
        "lookup.scan.split-size", size(MIB, MOST), 128 * MIB, default_text="128 MiB",
        doc="A scan of more bytes than this, in all its files together, is split into tasks of about this size.",
    )
    # fmt: on

    def check(self, explicit: AbstractSet[str]) -> None:
        """Raise OptionError for explicit options that have no effect."""
        validity_options = {"lookup.valid-to", "lookup.overlap"} & explicit
        if validity_options and (
            self.valid_from is None or (self.valid_to is None and "lookup.overlap" in validity_options)
        ):
            raise OptionError(
                f"option {min(validity_options)} has no effect without lookup.valid-from and lookup.valid-to: set them, or remove it"
            )
        if self.view not in (enums.View.DATA, enums.View.TOKEN, enums.View.CHANGES) and (self.where or self.columns):
            raise OptionError(
                f"option lookup.view = {self.view.value!r} has columns of its own: "
                "filter it in Spark instead of by lookup.where or lookup.columns"
            )


@dataclasses.dataclass(frozen=True)
class VersionOptions:
    """The version of the table to read, and where the current one is found."""

    # fmt: off
    source: enums.MetadataSource = option(
        "lookup.metadata.source", choice(enums.MetadataSource), enums.MetadataSource.UFS,
        doc="Where a query gets the current version: from the store, asked once per query (UFS), or from this host "
            "(CACHE).",
    )
    sync_interval_s: float | None = option(
        "lookup.metadata.sync-interval", Kind("-1, 0 or duration", parse_sync_interval_s), None, default_text="none; CACHE needs it, unless lookup.cache=FULL",
        doc="With CACHE: ask the store again when the known version is older than this (-1: never, 0: always).",
    )
    number: int | None = option(
        "lookup.version", Kind("version number", _NUMBER), None, default_text="the current version",
        doc="Tables that keep their versions: read this version (time travel). `lookup.view=versions` lists them.",
    )
    timestamp: datetime.datetime | None = option(
        "lookup.timestamp", Kind("ISO 8601 time", parse_instant), None,
        doc="Tables that keep their versions: read the version that was current at this time, such as "
            "`2026-03-01T12:00:00+01:00`. A time without a zone is in UTC.",
    )
    valid_write_ids: str | None = option(
        "lookup.valid-write-ids", Kind("`table:5:2:2:4`", parse_write_ids), None,
        doc="Managed tables: read only the writes that are valid in this list. It has Hive's format: table id, high "
            "watermark, least open id, open ids, aborted ids.",
    )
    floor: str | None = option(
        "lookup.floor", Kind("`table id:log position`", parse_commit), None,
        doc="Managed tables, with CACHE: read a version that includes at least this commit, which its writer gets from "
            "`LookupTable.floor`. Commits of the reading host are always included.",
    )
    at: enums.VersionAt = option(
        "lookup.version-at", choice(enums.VersionAt), enums.VersionAt.AUTO,
        doc="When a scan resolves its version. PLAN: when it is planned; READ: when its task reads; AUTO: READ if the "
            "table fits into one task, else PLAN.",
    )
    on_gone: enums.OnVersionGone | None = option(
        "lookup.on-version-gone", choice(enums.OnVersionGone), None, default_text="NEWER; FAIL for tables that keep versions",
        doc="If a file is replaced after the version was resolved: read the newer version, or fail.",
    )
    # fmt: on

    @property
    def pins(self) -> dict[str, Pin]:
        """The options that name a version to read, by key."""
        pins = {
            "lookup.version": self.number,
            "lookup.timestamp": self.timestamp,
            "lookup.valid-write-ids": self.valid_write_ids,
        }
        return {key: value for key, value in pins.items() if value is not None}

    def check(self, caches_version: bool) -> None:
        """Raise OptionError if no option says how long a host uses the version that it knows.

        `caches_version`: only `lookup.metadata.sync-interval` can say it, because there is neither a full cache nor a provider to ask.
        """
        cached = self.source is enums.MetadataSource.CACHE
        if cached and self.sync_interval_s is None and caches_version:
            raise OptionError(
                "option lookup.metadata.source = 'CACHE' needs lookup.metadata.sync-interval: a duration such as '5 min', "
                "0 (ask the store at every query) or -1 (never ask again)"
            )
        if not cached and self.sync_interval_s is not None:
            raise OptionError(
                "option lookup.metadata.sync-interval contradicts lookup.metadata.source = 'UFS', which asks the store at "
                "every query: remove it, or set lookup.metadata.source = 'CACHE'"
            )


def is_idle_in_gets(key: str) -> bool:
    """Whether an option has no effect in a `LookupTable`'s own reads, but has in its other uses."""
    return key in OF_AS_OF or key == "lookup.on-error" or key.startswith("lookup.stream.")


def refuse_in_reads(
    explicit: Iterable[str], view: enums.View = enums.View.DATA, stream: bool = False, as_of: bool = False
) -> None:
    """Raise OptionError for an option of a read in which it has no effect.

    Options that are stored with a table are not checked, because they apply to all uses of the table. `stream`: the read is, or may be, a
    stream of changes; `as_of`: it is a lookup of rows that are valid at a time.
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
                f"option {key} is for lookup_join and register_lookup: a scan or a get() always fails on an error; remove it"
            )
