"""`LargeSnapshots`: the files of large tables' snapshots as columns, and this host's records of these snapshots.

A host has the files of one snapshot of a table in columns (`EntryColumns`), the base. For each version it records the difference from the
base: the manifests of the base that the version lacks, and the manifests that it has in addition, the tail. Manifests never change, so the
entries of each manifest in a tail are a record that several versions share.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pyspark_lookup.core.decoding import as_name, as_texts
from pyspark_lookup.errors import UfsError
from pyspark_lookup.sources.iceberg.columns import IcebergColumns
from pyspark_lookup.sources.iceberg.entries import DATA, Entry, Manifest, entry_from_json, entry_to_json
from pyspark_lookup.sources.iceberg.entry_columns import EntryBuilder, EntryColumns, open_entries
from pyspark_lookup.sources.iceberg.files import IcebergFiles
from pyspark_lookup.sources.iceberg.manifest_reader import ManifestReader
from pyspark_lookup.sources.iceberg.metadata import IcebergMetadata, Locations, Selection
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk, key_of
from pyspark_lookup.versions.column_segments import remove_unneeded
from pyspark_lookup.versions.host_versions import HostVersions
from pyspark_lookup.versions.model import Table, TableVersion, VersionMetadata

_TAIL_AT_MOST = 128  # manifests in a tail
_TAIL_FILES = 500  # files in the manifests of a tail
_UNCOUNTED_BYTES = 300  # bytes of a manifest per file, to estimate the number of its files if the list does not say it
_READ_AT_ONCE = 64 * 1024 * 1024  # bytes of manifests that are read together
_KEPT = 4  # bases that a process keeps open
_NOTED_AT_MOST = 64  # records of versions that a process remembers to have seen


@dataclasses.dataclass(frozen=True)
class Definition:
    """All that is needed to make data files from the entries of a snapshot's manifests.

    These are the table's metadata without its snapshots, the schema, and the places of the table's files.
    """

    metadata: IcebergMetadata
    schema: Mapping[str, Any]
    locations: Locations

    @property
    def places(self) -> tuple[str, ...]:
        return self.locations.location, self.locations.root

    def files(self, table: Table) -> IcebergFiles:
        """An `IcebergFiles` that makes data files from the entries of manifests."""
        return IcebergFiles(table.url, self.metadata, Selection(None, self.schema, ""), self.locations)

    def to_json(self) -> list[Any]:
        return [self.metadata.definition, self.schema, self.places]

    @classmethod
    def from_json(cls, record: Any, table: Table) -> Definition:
        """The definition that `to_json` wrote. Raises one of `decoding.UNREADABLE` for a malformed record."""
        document, schema, places = record
        location, root = as_texts(places)
        return cls(IcebergMetadata(document, table.url), schema, Locations(location, root))


class LargeSnapshots:
    """The files of snapshots, in columns if they are many. `mapped_from`: from this number of files on they are in columns."""

    def __init__(self, context: HostContext, host: HostVersions, mapped_from: int) -> None:
        self._context = context
        self._host = host
        self._mapped_from = mapped_from
        self._bases: dict[str, EntryColumns] = {}
        self._files: dict[tuple[str, str], IcebergFiles] = {}
        self._recorded: set[str] = set()  # names of the records of the last tail's manifests
        self._recorded_versions: dict[
            str, None
        ] = {}  # names of records of versions that were written or read, the latest last

    def find_columns(
        self,
        table: Table,
        digest: str,
        definition: Definition,
        files: IcebergFiles,
        manifests: Sequence[Manifest],
        reader: ManifestReader,
    ) -> IcebergColumns | list[Entry]:
        """The files of the snapshot with these manifests: as entries if they are few, otherwise as columns, which are recorded on the host.

        `digest`: the version's digest. Raises the errors of `reader`, and NotSupportedError for files that are not supported.
        """
        key = self._key(table, definition.metadata.table_id)
        base = self._find_base(key, definition.places)
        if table.pinned is not None and not self._fits(base, manifests):
            # The existing base stays the one of the current version. An earlier version that it does not fit gets another base.
            key = key_of(key, table.id)
            base = self._find_base(key, definition.places)
        if not self._fits(base, manifests):
            with self._host.lock("columns", key):
                base = self._find_base(key, definition.places)  # the last holder of the lock may have made this base
                if not self._fits(base, manifests):
                    made = self._make_base(key, base, manifests, files, definition.places, reader)
                    if not isinstance(made, EntryColumns):
                        return made
                    base = made
                    self._keep_base(key, base)
        assert base is not None
        tail = _lacking(base, manifests)
        read_entries = [*reader.read(tail, False)]
        columns = _to_columns(files, base, manifests, read_entries)
        count = len(columns.version_files())
        if count < self._mapped_from:
            return columns.entries()
        record_name = self._record_name(table, definition.metadata.table_id, digest)
        self._remember(key, record_name, definition, base, manifests, tail, read_entries)
        return columns

    def _fits(self, base: EntryColumns | None, manifests: Sequence[Manifest]) -> bool:
        """Whether the base lacks so few of these manifests that the snapshot needs no new base."""
        tail = _lacking(base, manifests)
        at_most = max(self._mapped_from, min(0 if base is None else base.rows // 100, _TAIL_FILES))
        return base is not None and len(tail) <= _TAIL_AT_MOST and _count(tail) <= at_most

    def is_recorded(self, table: Table, metadata: VersionMetadata) -> bool:
        """Whether this process has written or read the record of the version with this metadata."""
        return self._record_name(table, metadata.table_id, metadata.digest) in self._recorded_versions

    def _note_record(self, name: str) -> None:
        self._recorded_versions = dict.fromkeys([*list(self._recorded_versions)[-_NOTED_AT_MOST:], name])

    def restore(self, table: Table, metadata: VersionMetadata) -> TableVersion | None:
        """The version with this metadata, from the host's records; None if there is no complete record."""
        disk = self._context.disk
        if disk is None:
            return None

        def parse(record: Any) -> IcebergColumns | None:
            key = as_name(record["columns"])
            files = self._find_files(disk, table, as_name(record["definition"]))
            base = self._open_base(disk, key, record["base"])
            if files is None or base is None:
                return None
            tail: list[list[Entry]] = []
            for name in as_texts(record["tail"]):
                entries = disk.get_record("manifest", name, _parse_entries)
                if entries is None:
                    return None
                tail.append(entries)
            gone = {*as_texts(record["gone"])}
            live = [location for location in base.manifests if location not in gone]
            return _make_columns(files, base, live, tail)

        name = self._record_name(table, metadata.table_id, metadata.digest)
        columns = disk.get_record("manifests", name, parse)
        if columns is None:
            return None
        self._note_record(name)
        return TableVersion(table.id, columns.version_files(), metadata)

    def _key(self, table: Table, table_id: str) -> str:
        return key_of("iceberg", table.scope, table.url, table_id)

    def _record_name(self, table: Table, table_id: str, digest: str) -> str:
        return key_of(self._key(table, table_id), digest)

    # --- columns ----------------------------------------------------------------------------------

    def _find_base(self, key: str, places: tuple[str, ...]) -> EntryColumns | None:
        """The base in the host's record, or, without a readable record, the base that this process has made.

        None if there is neither, or if the base's URLs were computed for other `places` (see `EntryColumns`).
        """
        disk = self._context.disk
        base: EntryColumns | None = None
        if disk is not None:
            base = disk.get_record("log", key, lambda record: self._open_base(disk, key, record))
        base = base or self._bases.get(key)
        return base if base is not None and base.places == places else None

    def _open_base(self, disk: Disk, key: str, record: Any) -> EntryColumns | None:
        name = as_name(record["files"])
        base = self._bases.get(key)
        if base is None or base.name != name:
            base = open_entries(disk, key, record)
            if base is not None:
                self._put_base(key, base)
        if base is not None:
            disk.use_table(key)
        return base

    def _put_base(self, key: str, base: EntryColumns) -> None:
        self._bases = {**dict(list(self._bases.items())[-_KEPT + 1 :]), key: base}

    def _make_base(
        self,
        key: str,
        base: EntryColumns | None,
        manifests: Sequence[Manifest],
        files: IcebergFiles,
        places: tuple[str, ...],
        reader: ManifestReader,
    ) -> EntryColumns | list[Entry]:
        disk = self._context.disk
        if disk is not None:
            try:
                return self._build(disk, key, base, manifests, files, places, reader)
            except UfsError:
                raise
            except OSError:  # the cache directory has no room for the files
                self._context.metrics.inc("cacheFailureCount")
        return self._build(None, key, base, manifests, files, places, reader)

    def _build(
        self,
        disk: Disk | None,
        key: str,
        base: EntryColumns | None,
        manifests: Sequence[Manifest],
        files: IcebergFiles,
        places: tuple[str, ...],
        reader: ManifestReader,
    ) -> EntryColumns | list[Entry]:
        waiting: list[tuple[Manifest, list[Entry]]] = []
        is_large = _count(manifest for manifest in manifests if manifest.has_data) >= self._mapped_from
        builder: EntryBuilder | None = None
        make_builder = functools.partial(EntryBuilder, disk, key, files.resolve_url, files.check)
        try:
            if base is not None or is_large:
                builder = make_builder()
            if builder is not None and base is not None:
                builder.take_over(base, [manifest.location for manifest in manifests])
            for some in _rounds(_lacking(base, manifests)):
                if builder is not None:
                    reader.fill(builder, some, disk is None)
                    continue
                waiting += zip(some, reader.read(some, True), strict=True)
                for _, entries in waiting[-len(some) :]:
                    for entry in entries:
                        files.check(entry)
                if sum(entry.content == DATA for _, entries in waiting for entry in entries) >= self._mapped_from:
                    builder = make_builder()  # the list has not told how many files there are
                    for manifest, entries in waiting:
                        builder.add(manifest.location, entries)
            if builder is None:
                return [entry for _, entries in waiting for entry in entries]
            return builder.finish(places)
        finally:
            if builder is not None:
                builder.close()

    # --- records ----------------------------------------------------------------------------------

    def _keep_base(self, key: str, base: EntryColumns) -> None:
        self._put_base(key, base)
        disk, record = self._context.disk, base.to_json()
        if disk is not None and record is not None:
            try:
                disk.replace_record("log", key, record)
                remove_unneeded(disk, key, base.segment_prefixes)
            except OSError:
                self._context.metrics.inc("cacheFailureCount")

    def _remember(
        self,
        key: str,
        record_name: str,
        definition: Definition,
        base: EntryColumns,
        manifests: Sequence[Manifest],
        tail: Sequence[Manifest],
        entries: Sequence[Sequence[Entry]],
    ) -> None:
        disk, record = self._context.disk, base.to_json()
        if disk is None or record is None:
            return
        current = {manifest.location for manifest in manifests}
        document = definition.to_json()
        definition_name = key_of(key, json.dumps(document, sort_keys=True))
        names = [key_of(key, manifest.location) for manifest in tail]
        value = {
            "definition": definition_name,
            "columns": key,
            "base": record,
            "gone": [location for location in base.manifests if location not in current],
            "tail": names,
        }
        try:
            if not disk.has_record("definition", definition_name):
                disk.replace_record("definition", definition_name, document)
            for name, some in zip(names, entries, strict=True):
                if name not in self._recorded and disk.get_record("manifest", name, _parse_entries) is None:
                    disk.replace_record("manifest", name, [entry_to_json(entry) for entry in some])
            self._recorded = {*names}
            disk.replace_record("manifests", record_name, value)
            self._note_record(record_name)
        except OSError:
            self._context.metrics.inc("cacheFailureCount")

    def _find_files(self, disk: Disk, table: Table, name: str) -> IcebergFiles | None:
        if (table.url, name) not in self._files:
            definition = disk.get_record("definition", name, lambda record: Definition.from_json(record, table))
            if definition is None:
                return None
            recent = list(self._files.items())[-_KEPT + 1 :]
            self._files = {**dict(recent), (table.url, name): definition.files(table)}
        return self._files[table.url, name]


def _to_columns(
    files: IcebergFiles, base: EntryColumns, manifests: Sequence[Manifest], tail: Sequence[Sequence[Entry]]
) -> IcebergColumns:
    return _make_columns(files, base, [manifest.location for manifest in manifests], tail)


def _make_columns(
    files: IcebergFiles, base: EntryColumns, live: Sequence[str], tail: Iterable[Sequence[Entry]]
) -> IcebergColumns:
    """The files of a snapshot: those that the manifests `live` list, from the base, and the entries `tail` of the snapshot's other
    manifests."""
    entries = [entry for some in tail for entry in some]
    added = [entry for entry in entries if entry.content == DATA]

    def list_deletes() -> list[Entry]:
        return [*base.live_deletes(live), *(entry for entry in entries if entry.content != DATA)]

    return IcebergColumns(files, base, base.live_rows(live), added, list_deletes)


def _lacking(base: EntryColumns | None, manifests: Sequence[Manifest]) -> list[Manifest]:
    """The manifests that the base does not have."""
    known = set() if base is None else {*base.manifests}
    return [manifest for manifest in manifests if manifest.location not in known]


def _count(manifests: Iterable[Manifest]) -> int:
    """About how many files the manifests list."""
    return sum(
        (manifest.length or 0) // _UNCOUNTED_BYTES if manifest.files is None else manifest.files
        for manifest in manifests
    )


def _rounds(manifests: Sequence[Manifest]) -> Iterator[list[Manifest]]:
    """The manifests in groups that are read together."""
    some: list[Manifest] = []
    size = 0
    for manifest in manifests:
        if some and size + (manifest.length or 0) > _READ_AT_ONCE:
            yield some
            some, size = [], 0
        some.append(manifest)
        size += manifest.length or 0
    if some:
        yield some


def _parse_entries(records: Any) -> list[Entry]:
    return [entry_from_json(record) for record in records]
