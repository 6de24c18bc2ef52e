"""The version token, by which all tasks of an execution read the same version, on any host.

One task finds the version, and copies its bytes to its host's cache, where they stay the same if files are replaced. The token, two BIGINTs,
travels with the rows as data, and each task reads exactly the version that it names. The host that found the version has its list of files on
record. Another host lists the table once; if it finds another version, it does what `lookup.on-version-gone` says.

A token is two numbers because these cost each row least: as a binary value, the same token makes a bulk join an eighth slower
(docs/decisions/version-token.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import struct

from pyspark_lookup.core.decoding import show
from pyspark_lookup.errors import CHANGED_KIND, NotATableError, OptionError, UfsNotFoundError, VersionGoneError
from pyspark_lookup.lookup.read import ResolvedTable, TableReader
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import CacheMode, MetadataSource
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.versions.executions import Execution, read_with_restarts
from pyspark_lookup.versions.model import Table, TableVersion
from pyspark_lookup.versions.resolver import TableKinds

_DOUBLE = struct.Struct(">d")
_BYTES = struct.Struct(">cqq")  # a mark and the two numbers
_MARK = b"V"  # the first byte of each token; an error that stands in the place of a token begins with another byte
_KIND_BITS = 3
_CHANGEABLE = 1 << _KIND_BITS  # the bit beside those of the kind: `cacheable` is False
_LOW_BITS = _KIND_BITS + 1
_DIGEST_DIGITS = 15


@dataclasses.dataclass(frozen=True)
class VersionToken:
    """The name of a version for tasks: its digest. `kind`: the position of the table's kind in `TableKinds.names`.

    By `number`, or by `newest` if versions have no numbers, a host finds the version if it has no list of the version's files.
    """

    kind: int
    digest: str
    number: int | None
    """The version's number, in the form that `lookup.version` takes; None for kinds of tables whose versions have no numbers."""
    newest: float
    """The version's `TableVersion.newest`."""
    cacheable: bool = True
    """The version's `TableVersion.cacheable`. False: its rows may have changed when the next token names the same digest."""

    @classmethod
    def from_version(cls, kinds: TableKinds, table: Table, version: TableVersion) -> VersionToken:
        newest = max(version.newest, 0.0) if version.number is None else float(version.number)
        return cls(kinds.names.index(table.kind), version.digest, version.number, newest, version.cacheable)

    def to_numbers(self) -> tuple[int, int]:
        """The token as two BIGINTs: (the digest, `cacheable` and the kind; -1 - `number`, or without a number the bits of `newest`)."""
        first = int(self.digest, 16) << _LOW_BITS | (0 if self.cacheable else _CHANGEABLE) | self.kind
        second = int.from_bytes(_DOUBLE.pack(self.newest), "big") if self.number is None else -1 - self.number
        return (first - 2**64 if first >= 2**63 else first), second

    @classmethod
    def from_numbers(cls, first: int, second: int) -> VersionToken:
        """The token that `to_numbers` returned as two numbers."""
        digest, low = divmod(first % 2**64, 2**_LOW_BITS)
        kind, cacheable = low % _CHANGEABLE, low < _CHANGEABLE
        digits = f"{digest:0{_DIGEST_DIGITS}x}"
        if second < 0:
            return cls(kind, digits, -1 - second, float(-1 - second), cacheable)
        (newest,) = _DOUBLE.unpack(second.to_bytes(_DOUBLE.size, "big"))
        return cls(kind, digits, None, newest, cacheable)

    def to_bytes(self) -> bytes:
        """The token as bytes, for SQL functions and single values."""
        return _BYTES.pack(_MARK, *self.to_numbers())

    @classmethod
    def from_bytes(cls, data: bytes) -> VersionToken:
        """The token that `to_bytes` returned. Raises OptionError for any other bytes."""
        try:
            mark, first, second = _BYTES.unpack(data)
            if mark != _MARK:
                raise ValueError(mark)
            return cls.from_numbers(first, second)
        except (struct.error, TypeError, ValueError):
            raise OptionError(
                f"argument version = {show(data)} names no version: call the functions of register_lookup, which pass one"
            ) from None


def resolve_and_secure(
    reader: TableReader, options: LookupOptions, execution: Execution | None, last_table: Table | None = None
) -> tuple[Table, TableVersion]:
    """(the table, the version of it that `execution` reads). The version is cached on this host, so that it can be read after later changes.

    Makes at most one metadata call. With lookup.cache=FULL, builds the version's snapshot, or waits for it. Otherwise caches all bytes of a
    table of up to `lookup.scan.split-size`, and nothing of a larger table. `last_table`: the table that was last at the path. Raises UfsError or
    NotATableError if there is no table that can be read, VersionGoneError if the table keeps changing.
    """
    table, version = _resolve(reader, options, execution, last_table)
    by_query = _is_built_by_queries(options)
    _, version = read_with_restarts(
        table,
        version,
        functools.partial(_secure, reader, table, options),
        lambda gone, _: reader.resolver.resolve_again(table, options, execution, gone.digest, by_query),
    )
    reader.host.remember(table, version)
    return table, version


def _resolve(
    reader: TableReader, options: LookupOptions, execution: Execution | None, last_table: Table | None
) -> tuple[Table, TableVersion]:
    discovered_version: TableVersion | None = None
    try:
        if last_table is None:
            table, discovered_version = reader.resolver.discover(options)
        else:
            form = options.files.format or last_table.format
            table = dataclasses.replace(reader.kinds.to_table(options, last_table.kind), format=form)
        served_version = _serve(reader, table, options)
        current = functools.partial(_current, reader, table, options, served_version or discovered_version)
        resolution = reader.resolver.resolve(table, options, execution, current)
    except (*CHANGED_KIND, OptionError):
        if last_table is None:
            raise
        return _resolve(reader, options, execution, None)
    version = resolution.version
    if resolution.decided_here:
        reader.resolver.count_asked(version)
    return reader.kinds.to_table(options, table.kind, version), version


def _serve(reader: TableReader, table: Table, options: LookupOptions) -> TableVersion | None:
    """The version from which a full cache answers in CACHE mode; None if no full cache answers. Waits for the first load."""
    latest = reader.snapshots.current(table, options)
    return None if latest is None else latest[0]


def _current(reader: TableReader, table: Table, options: LookupOptions, version: TableVersion | None) -> TableVersion:
    if version is None:
        version = reader.resolver.resolve(table, options, None).version
    return reader.current_versions.settle(table, version) if _is_built_by_queries(options) else version


def _is_built_by_queries(options: LookupOptions) -> bool:
    """Whether queries build the snapshots of versions. A version is then read only once its files are so old that each change shows."""
    return options.cache.mode is CacheMode.FULL and options.version.source is MetadataSource.UFS


def _secure(reader: TableReader, table: Table, options: LookupOptions, version: TableVersion) -> None:
    if reader.snapshots.get(table, options, version) is None and version.bytes <= options.read.split_size:
        reader.versions.secure(table, options, version)


def version_of_token(
    reader: TableReader, options: LookupOptions, token: VersionToken, execution: Execution | None
) -> tuple[Table, TableVersion]:
    """(the table, the version that a token names). Makes no call to the store if this host has the version's list of files on record.

    A full cache of a provider's table in CACHE mode may lack the named version: then this returns the version of this host's own copy, unless
    `lookup.on-version-gone` is FAIL. If the version cannot be found any more, this returns the version that this execution reads instead on this
    host, or raises VersionGoneError if `lookup.on-version-gone` is FAIL.
    """
    resolver = reader.resolver
    kind = resolver.kinds.name_of_number(token.kind)
    table = resolver.kinds.to_table(options, kind)
    version = resolver.current_versions.find_recorded(table, token.digest)
    if resolver.kinds.source(table).fleeting and not table.fails_when_gone(options):
        # In CACHE mode each host copies a provider's table at times of its own, and cannot read another host's version. Its own copy is as
        # new as the options promise.
        latest = reader.snapshots.current(table, options)
        if latest is not None and (version is None or reader.snapshots.get(table, options, version) is None):
            version = latest[0]
    if version is None:
        with contextlib.suppress(UfsNotFoundError, NotATableError):
            version = resolver.current_versions.find(table, token.digest, token.newest)
    if version is None:
        version = _replacement(reader, table, options, token.digest, token.number, execution)
    source = resolver.kinds.source(table)
    source.authorise(table, source.catalog_id(version))
    return resolver.kinds.to_table(options, kind, version), version


def table_of_token(
    reader: TableReader, options: LookupOptions, token: VersionToken, execution: Execution | None
) -> ResolvedTable:
    """The table in the version that a token names, with its columns. Raises the errors of `version_of_token` and of `VersionReader.schema`."""
    table, version = version_of_token(reader, options, token, execution)
    (data, partitions), version = read_with_restarts(
        table,
        version,
        functools.partial(reader.versions.schema, table),
        lambda gone, _: _replacement(reader, table, options, gone.digest, gone.number, execution),
    )
    return ResolvedTable(table, version, data, partitions)


def _replacement(
    reader: TableReader,
    table: Table,
    options: LookupOptions,
    lost_digest: str,
    number: int | None,
    execution: Execution | None,
) -> TableVersion:
    if table.fails_when_gone(options):
        reader.metrics.inc("versionGoneCount")
        raise VersionGoneError(
            f"version {lost_digest if number is None else number} of {redact('path', table.url)}, which this query had chosen, was replaced before this process "
            f"read it: run the query again; {table.how_to_keep_versions}"
        )
    return reader.resolver.resolve_again(table, options, execution, lost_digest)
