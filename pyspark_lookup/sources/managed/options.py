"""Options of managed tables: how they are written, and which of their changes are read."""

from __future__ import annotations

import dataclasses
from typing import Any

from pyspark_lookup.errors import OptionError
from pyspark_lookup.options import enums
from pyspark_lookup.options.enums import View
from pyspark_lookup.options.lookup_options import KindOptions, LookupOptions
from pyspark_lookup.options.parsing import (
    BOOLEAN,
    COUNT,
    MOST,
    POSITIVE_COUNT,
    POSITIVE_DURATION,
    Kind,
    choice,
    option,
    parse_batch,
    parse_stream_start,
    size,
    whole_number,
)

_CHANGES = whole_number(1, 2**63 - 1, "the number of a version that LookupTable.versions() lists, 1 or more")


@dataclasses.dataclass(frozen=True)
class ChangeOptions(KindOptions):
    """The changes to read, in a batch (`first`, `last`) or a stream."""

    # fmt: off
    first: int | None = option(
        "lookup.changes-from", Kind("version number", _CHANGES), None,
        doc="Managed tables: read the changes of the commits from this version on (inclusive). Implies `lookup.view=changes`.",
    )
    last: int | None = option(
        "lookup.changes-to", Kind("version number", _CHANGES), None, default_text="the current version",
        doc="With `lookup.changes-from`: read the changes up to this version (inclusive).",
    )
    start: enums.StreamStart | int = option(
        "lookup.stream.start", Kind("SNAPSHOT, LATEST or log position", parse_stream_start), enums.StreamStart.SNAPSHOT,
        doc="Streams of changes: start with all current rows (SNAPSHOT), with the commits from now on (LATEST), or with "
            "the commits after this log position: the number of a version, which `lookup.view=versions` lists and `LookupTable.write` returns.",
    )
    max_rows: int | None = option(
        "lookup.stream.max-rows-per-trigger", POSITIVE_COUNT, None,
        doc="Streams of changes: a micro-batch takes commits with about this many rows in total, but at least one "
            "commit. With SNAPSHOT, the first micro-batch takes all current rows.",
    )
    max_files: int | None = option(
        "lookup.stream.max-files-per-trigger", POSITIVE_COUNT, None,
        doc="Streams of changes: a micro-batch takes commits with about this many files in total, but at least one "
            "commit. With SNAPSHOT, the first micro-batch takes all current rows.",
    )
    max_bytes: int | None = option(
        "lookup.stream.max-bytes-per-trigger", size(1, MOST), None,
        doc="Streams of changes: a micro-batch takes commits with about this many bytes in total, but at least one "
            "commit. With SNAPSHOT, the first micro-batch takes all current rows.",
    )
    # fmt: on

    @property
    def limits(self) -> tuple[int | None, int | None, int | None]:
        """The most rows, files and bytes that a micro-batch takes (None: no limit)."""
        return self.max_rows, self.max_files, self.max_bytes

    @property
    def implied(self) -> dict[str, Any]:
        return {} if self.first is None else {"lookup.view": View.CHANGES}

    def check(self, options: LookupOptions) -> None:
        self._check_range(options)
        if sum(limit is not None for limit in self.limits) > 1:
            raise OptionError(
                "options lookup.stream.max-rows-per-trigger, lookup.stream.max-files-per-trigger and "
                "lookup.stream.max-bytes-per-trigger all limit a micro-batch: give only one of them"
            )

    def _check_range(self, options: LookupOptions) -> None:
        if self.first is None:
            if self.last is not None:
                raise OptionError(
                    f"option lookup.changes-to = {self.last} needs lookup.changes-from, the version of the first changes: add it"
                )
            return
        if options.read.view is not View.CHANGES:
            raise OptionError(
                f"option lookup.changes-from = {self.first} reads changes, and lookup.view = {options.read.view.value!r} shows "
                "other rows: leave one of them out"
            )
        if options.pins:
            raise OptionError(
                f"option {next(iter(options.pins))} reads one version and lookup.changes-from reads changes: leave one of them out"
            )
        if self.last is not None and self.last < self.first:
            raise OptionError(
                f"option lookup.changes-to = {self.last} is before lookup.changes-from = {self.first}: give {self.first} or a later version"
            )


@dataclasses.dataclass(frozen=True)
class WriteOptions(KindOptions):
    """How rows are written."""

    # fmt: off
    create_if_not_exists: bool = option(
        "lookup.create-if-not-exists", BOOLEAN, False,
        doc="CREATE TABLE: if nothing is at the path, create a managed table there, with the columns of lookup.schema "
            "and the keys of lookup.keys.",
    )
    mode: enums.KeyedWrite | None = option(
        "lookup.write.mode", choice(enums.KeyedWrite), None,
        doc="Appends: `upsert` replaces the rows that have the same keys. Without this option, rows are added.",
    )
    unique_keys: bool = option(
        "lookup.write.unique-keys", BOOLEAN, False,
        doc="Writes: fail before the commit if two rows of the table would have the same key.",
    )
    merge_schema: bool = option(
        "lookup.write.merge-schema", BOOLEAN, False,
        doc="Writes: add columns that the table does not have; older rows have null there.",
    )
    missing_columns: enums.MissingColumns | None = option(
        "lookup.write.missing-columns", choice(enums.MissingColumns), None, default_text="the upsert is refused",
        doc="Upserts whose rows lack some of the table's columns: in the columns that they lack, an existing row keeps its values (KEEP), "
            "or gets null (NULL).",
    )
    batch: tuple[str, int] | None = option(
        "lookup.write.batch", Kind("`name:number`", parse_batch), None,
        doc="Batch writes, as in `foreachBatch`: write nothing if this batch, or a later one of the same name, has "
            "already been committed.",
    )
    compact_after: int = option(
        "lookup.write.compact-after", COUNT, 20,
        doc="Writes: when this many of the table's writes are small enough to be compacted (each 256 MiB at most), a commit also compacts them. 0: commits never "
            "compact (call `LookupTable.compact`).",
    )
    timeout_s: float = option(
        "lookup.write.timeout", POSITIVE_DURATION, 86400.0, default_text="24 h",
        doc="Writes: other writers may abort a write that has shown no sign of life for this long.",
    )
    # fmt: on

    def is_upsert(self, overwrite: bool) -> bool:
        """Whether a write with Spark's mode append (or, if `overwrite`, overwrite) is an upsert. Raises OptionError for an overwrite with the option."""
        if overwrite and self.mode is not None:
            raise OptionError(
                f"option lookup.write.mode = {self.mode.value!r} is for the mode append, and an overwrite replaces all rows: remove the option, or append"
            )
        return self.mode is enums.KeyedWrite.UPSERT

    def check(self, options: LookupOptions) -> None:
        if self.create_if_not_exists:
            raise OptionError("option lookup.create-if-not-exists is for CREATE TABLE … USING lookupcache: remove it")
