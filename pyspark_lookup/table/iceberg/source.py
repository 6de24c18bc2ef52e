"""`IcebergSource`: the versions of Iceberg tables, which are their snapshots."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from pyspark_lookup.base.decoding import UNREADABLE, name_of
from pyspark_lookup.base.errors import (
    DamagedFileError,
    NotSupportedError,
    OptionError,
    SourceChangedError,
    UfsNotFoundError,
    raise_ours,
)
from pyspark_lookup.columnar.types import text_of_schema
from pyspark_lookup.io.disk import key_of
from pyspark_lookup.io.stores import CATALOG_SCHEME, IMMUTABLE, FileVersion, Listing
from pyspark_lookup.io.ufs import Ufs
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.table.iceberg.deletes import EqualityDeletes, PositionDeletes
from pyspark_lookup.table.iceberg.entries import Entry, Manifest
from pyspark_lookup.table.iceberg.files import IcebergFiles
from pyspark_lookup.table.iceberg.locations import Locations, plain_location
from pyspark_lookup.table.iceberg.metadata import (
    Chosen,
    IcebergMetadata,
    Snapshot,
    metadata_of_json,
    parse_metadata,
)
from pyspark_lookup.table.iceberg.pointer import (
    HINT,
    METADATA_DIRECTORY,
    METADATA_SUFFIX,
    Pointer,
    read_pointer,
)
from pyspark_lookup.table.model import Rewrites, Table, TableVersion, VersionMetadata, metadata_of, names_of_rows
from pyspark_lookup.table.source import Answer, Question, SourceParts, VersionSource

_READER = "pyspark_lookup.table.iceberg.manifests"
_REPLACE = "replace"
_REWRITES_KEPT = 8
_MANIFESTS_KEPT = 1000
_VERSIONS_KEPT = 4
_NAMES_LOOKED_AT = 1000
_POINTERS_TRIED = 5  # while each leads to what is expired before it is read
_HINT_WAITS_S = (0.01, 0.03, 0.1)


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What a pointer led to: the digest of the version that a table's reference means."""

    pointer: Pointer
    digest: str

    @classmethod
    def from_json(cls, found: Any) -> _Seen:
        """Raises TypeError or ValueError for what is none."""
        pointer, digest = found
        return cls(Pointer.from_json(pointer), name_of(digest))


class IcebergSource(VersionSource):
    """An Iceberg table, as a catalog, a version hint or a metadata file points to it. Its files are never written anew.

    PyIceberg is imported where a catalog is asked and where manifests are read: not where a version is on record.
    """

    kinds = ("ICEBERG",)
    markers = (METADATA_DIRECTORY,)
    label = "an Iceberg table"
    pins = ("lookup.version", "lookup.branch", "lookup.tag", "lookup.timestamp")

    def __init__(self, parts: SourceParts) -> None:
        super().__init__(parts)
        self._ufs = parts.ufs
        self._pointers: dict[str, Pointer] = {}
        self._metadata: dict[str, tuple[Pointer, IcebergMetadata]] = {}
        self._manifests: dict[str, list[Entry]] = {}
        self._versions: dict[tuple[str, str], TableVersion] = {}

    @classmethod
    def kind_of_url(cls, url: str) -> str | None:
        named = url.startswith(CATALOG_SCHEME) or url.endswith((METADATA_SUFFIX, f"{METADATA_SUFFIX}.gz"))
        return cls.kinds[0] if named else None

    @classmethod
    def has_own_file(cls, ufs: Ufs, marker_url: str) -> bool:
        # Catalogs write 00000-….metadata.json, which comes first; others v1.metadata.json and the hint, which come after the manifests.
        names = ("", "v")
        files = [file for after in names for file in ufs.list_files(marker_url, after, _NAMES_LOOKED_AT)]
        return any(file.url.endswith((METADATA_SUFFIX, f"{METADATA_SUFFIX}.gz")) for file in files)

    @classmethod
    def kind_of(cls, status: FileVersion | Listing) -> str | None:
        if not isinstance(status, Listing) or METADATA_DIRECTORY not in status.directories:
            return None
        names = {file.url for file in status.files}
        return cls.kinds[0] if f"{status.url}/{METADATA_DIRECTORY}/{HINT}" in names else None

    def check_options(self, options: LookupOptions, kind: str) -> None:
        super().check_options(options, kind)
        key = "lookup.block.size"
        self._refuse(options, [key] if key in options.explicit else [], kind)

    # --- versions ---------------------------------------------------------------------------------

    def current(self, question: Question) -> Answer:
        table = question.table
        seen = self._seen(table)
        pointer, sent = self._point(table, None if seen is None else seen.pointer)
        if seen is not None and seen.pointer == pointer and question.gone != seen.digest:
            known = self._known(table, seen.digest)
            if known is not None:
                if pointer.settled and not seen.pointer.settled:  # so that the next look will do
                    self._remember(table, _Seen(pointer, seen.digest))
                return Answer(known, question.started_s)
        for last in (False,) * (_POINTERS_TRIED - 1) + (True,):
            try:
                metadata = self._read_metadata(table, pointer, sent)
                version = self._version(table, metadata, metadata.choose(table.pinned, self._shown(table)))
                break
            except DamagedFileError as problem:
                # It may have been expired since the pointer was read; then another one is the current one.
                if last or not isinstance(problem.__cause__, (UfsNotFoundError, SourceChangedError)):
                    raise
                before, (pointer, sent) = pointer, self._point(table, None)
                if pointer == before:
                    raise
        if question.gone in (version.digest, _resized(version.digest)):
            version = self._keep(table, self._with_true_sizes(version))
        self._remember(table, _Seen(pointer, version.digest))
        return Answer(version, question.started_s)

    def candidates(
        self, table: Table, digest: str, newest: float, ask: Callable[[], TableVersion]
    ) -> Sequence[TableVersion]:
        metadata = self._read_metadata(table, *self._point(table, self._pointers.get(table.url)))
        chosen = metadata.named(digest)
        return [] if chosen is None else [self._version(table, metadata, chosen)]

    def _with_true_sizes(self, version: TableVersion) -> TableVersion:
        """A version of which a file could not be read, with the files' sizes as the store has them: those of edited tables are others.

        Raises SourceChangedError for a file that is not there.
        """
        assert version.metadata is not None
        try:
            sizes = {one.url: self._ufs.get_meta(one.url).size for one in (*version.files, *_delete_files(version))}
        except UfsNotFoundError:
            return version
        deletes = {one.name: dataclasses.replace(one, size=sizes[one.url]) for one in _delete_files(version)}
        files = tuple(
            dataclasses.replace(
                file, size=sizes[file.url], deletes=tuple(deletes.get(one.name, one) for one in file.deletes)
            )
            for file in version.files
        )
        if files == version.files and [*deletes.values()] == _delete_files(version):
            return version
        digest = _resized(version.metadata.digest)
        return dataclasses.replace(version, files=files, metadata=dataclasses.replace(version.metadata, digest=digest))

    def _shown(self, table: Table) -> str:
        return redact("path", table.url)

    def _known(self, table: Table, digest: str) -> TableVersion | None:
        """A version that this process or host knows. No store call."""
        return self._versions.get((table.id, digest)) or self._parts.host.files(table, digest)

    def _keep(self, table: Table, version: TableVersion) -> TableVersion:
        kept = list(self._versions.items())[-_VERSIONS_KEPT + 1 :]
        self._versions = {**dict(kept), (table.id, version.digest): version}
        return version

    def _version(self, table: Table, metadata: IcebergMetadata, chosen: Chosen) -> TableVersion:
        known = self._known(table, chosen.digest)
        if known is not None:
            return self._keep(table, known)
        shown = self._shown(table)
        place = "" if chosen.snapshot is None else f", snapshot {chosen.snapshot.id}"
        try:
            return self._keep(table, self._build(table, metadata, chosen))
        except NotSupportedError as problem:
            raise NotSupportedError(f"{shown}{place} of an Iceberg table: {problem}") from None
        except (DamagedFileError, UfsNotFoundError, SourceChangedError) as problem:
            raise_ours(DamagedFileError(f"{problem}: {shown}{place} of an Iceberg table"), problem)
        except UNREADABLE as problem:
            raise_ours(DamagedFileError(f"{shown}{place} of an Iceberg table: {problem}"), problem)

    def _build(self, table: Table, metadata: IcebergMetadata, chosen: Chosen) -> TableVersion:
        locations = self._locations(table, metadata)
        files = IcebergFiles(table.url, metadata, chosen, locations)
        snapshot = chosen.snapshot
        found = files.files([] if snapshot is None else self._entries(snapshot, locations))
        number = None if snapshot is None or snapshot.id >= 2**63 else snapshot.id  # which some writers have
        schema, partitions = text_of_schema(files.schema), files.partitions(found)
        described = VersionMetadata(metadata.table_id, None, "", chosen.digest, (), schema, partitions, (), number)
        version = TableVersion(table.id, found, described)
        rewrites = self._rewrites(table, metadata, snapshot, version)
        return dataclasses.replace(version, metadata=dataclasses.replace(described, rewrites=rewrites))

    def _rewrites(
        self, table: Table, metadata: IcebergMetadata, snapshot: Snapshot | None, version: TableVersion
    ) -> Rewrites:
        """The compactions in a version: of those before it as the last version known here has them, and its own."""
        record = self._parts.host.last(table)
        before = None if record is None else self._known(table, record["digest"])
        if before is None or before.metadata is None or before.metadata.table_id != metadata.table_id:
            return ()
        rewrites, at = before.metadata.rewrites, snapshot
        while at is not None and at.id != before.number and at.operation == _REPLACE:
            at = None if at.parent is None else metadata.snapshots.get(at.parent)
        if at is not None and at is not snapshot and at.id == before.number:
            now, then = names_of_rows(version), names_of_rows(before)
            rewrites = (*rewrites, (tuple(sorted(now - then)), tuple(sorted(then - now)))) if now != then else rewrites
        return rewrites[-_REWRITES_KEPT:]

    # --- files ------------------------------------------------------------------------------------

    def _point(self, table: Table, known: Pointer | None) -> tuple[Pointer, dict[str, Any] | None]:
        """Where the table's metadata lies now, and the metadata, if a catalog has sent it. One call."""
        if table.url.startswith(CATALOG_SCHEME):
            if self._parts.catalog is None:
                raise OptionError(f"{self._shown(table)} is a table of a catalog: set lookup.catalog")
            location, sent = self._parts.catalog.load(table.url.removeprefix(CATALOG_SCHEME).partition("/")[2])
            pointer = Pointer(location, table_id=None if sent is None else sent.get("table-uuid"))
        elif self.kind_of_url(table.url) is not None:
            file = self._ufs.get_meta(table.url)
            pointer, sent = Pointer.of(file.url, file, file.size), None
        else:
            try:
                pointer, sent = self._read_pointer(table.url, known or self._pointers.get(table.url)), None
            except UfsNotFoundError:
                raise UfsNotFoundError(
                    f"{self._shown(table)} has no {METADATA_DIRECTORY}/{HINT}: name the table of a catalog (lookup.catalog) or its "
                    "metadata file"
                ) from None
        self._pointers = {**self._pointers, table.url: pointer}
        return pointer, sent

    def _read_pointer(self, url: str, known: Pointer | None) -> Pointer:
        """As `read_pointer`, once no commit or clean-up comes in between. Of a table that is known the hint may be missing for an instant."""
        passing = (SourceChangedError, DamagedFileError, *(() if known is None else (UfsNotFoundError,)))
        for wait_s in _HINT_WAITS_S:
            with contextlib.suppress(*passing):
                return read_pointer(self._ufs, url, known)
            self._parts.context.clock.sleep(wait_s)
        return read_pointer(self._ufs, url, known)

    def _locations(self, table: Table, metadata: IcebergMetadata) -> Locations:
        if table.url.startswith(CATALOG_SCHEME):
            return Locations(metadata.location, self._ufs.url_of(metadata.location))
        if self.kind_of_url(table.url) is None:
            return Locations(metadata.location, table.url)
        root, directory = table.url.rsplit("/", 2)[:2]
        elsewhere = metadata.properties.get("write.metadata.path")
        # Metadata that was written apart from the table says nothing of where the table may have been copied to.
        if directory != METADATA_DIRECTORY or (
            elsewhere is not None and plain_location(elsewhere) == plain_location(f"{root}/{directory}")
        ):
            return Locations(metadata.location, self._ufs.url_of(metadata.location))
        return Locations(metadata.location, root)

    def _read_metadata(self, table: Table, pointer: Pointer, sent: dict[str, Any] | None) -> IcebergMetadata:
        said_by, known = self._metadata.get(table.url, (None, None))
        if known is None or said_by != pointer:
            if sent is not None:
                known = metadata_of_json(pointer.location, sent, table.url)
            else:
                url = self._ufs.url_of(pointer.location)
                try:
                    size = self._ufs.get_meta(url).size if pointer.size is None else pointer.size
                    data = self._ufs.read_ranges(FileVersion(url, size, IMMUTABLE), [(0, size)])[0]
                except (UfsNotFoundError, SourceChangedError) as problem:
                    raise_ours(DamagedFileError(f"{problem}: {self._shown(table)}, an Iceberg table"), problem)
                known = parse_metadata(pointer.location, data, table.url)
            self._metadata = {**self._metadata, table.url: (pointer, known)}
        return known

    def _entries(self, snapshot: Snapshot, locations: Locations) -> list[Entry]:
        """The live files of a snapshot: what is new costs the manifest list and the manifests that nobody here has read."""
        reader = _import()
        if snapshot.manifest_list is None:
            manifests = [Manifest(location, None, None, 0) for location in snapshot.manifests]
        else:
            url = locations.url_of(snapshot.manifest_list)
            manifests = reader.read_manifest_list(url, self._read_whole([(url, None)])[0])
        new = [manifest for manifest in manifests if manifest.location not in self._manifests]
        try:
            data = self._read_whole([(locations.url_of(one.location), one.length) for one in new])
            found = {one.location: reader.read_manifest(one, content) for one, content in zip(new, data, strict=True)}
        except (
            SourceChangedError,
            DamagedFileError,
        ):  # of tables whose metadata was edited, lists do not say true lengths
            data = self._read_whole([(locations.url_of(one.location), None) for one in new])
            found = {one.location: reader.read_manifest(one, content) for one, content in zip(new, data, strict=True)}
        kept = {one.location: self._manifests[one.location] for one in manifests if one.location in self._manifests}
        self._manifests = dict(list({**kept, **found}.items())[-_MANIFESTS_KEPT:])
        return [entry for one in manifests for entry in (found.get(one.location) or kept.get(one.location) or ())]

    def _read_whole(self, wanted: Sequence[tuple[str, int | None]]) -> list[bytes]:
        """Files that never change, by URL and size (None: to be asked), through the block cache."""
        blocks = self._parts.blocks
        files = [
            FileVersion(url, self._ufs.get_meta(url).size if size is None else size, IMMUTABLE) for url, size in wanted
        ]
        located = [blocks.get_blocks_and_locations(file.url, file) for file in files]
        return [bytes(parts[0]) for parts in blocks.read([(one, [(0, one.file.size)]) for one in located])]

    # --- what this host has seen ------------------------------------------------------------------

    def _key(self, table: Table) -> str:
        return key_of("iceberg", table.id)

    def _seen(self, table: Table) -> _Seen | None:
        disk = self._parts.context.disk
        return None if disk is None else disk.get_record("iceberg", self._key(table), _Seen.from_json)

    def _remember(self, table: Table, seen: _Seen) -> None:
        disk = self._parts.context.disk
        if disk is not None:
            try:
                disk.replace_record("iceberg", self._key(table), [seen.pointer.to_json(), seen.digest])
            except OSError:
                self._parts.context.metrics.inc("cacheFailureCount")

    # --- what views show --------------------------------------------------------------------------

    def history(self, table: Table) -> list[dict[str, Any]] | None:
        metadata = self._read_metadata(table, *self._point(table, self._pointers.get(table.url)))
        return [
            {
                "version": snapshot.id,
                "committed_at": snapshot.timestamp_ms / 1000,
                "operation": snapshot.operation,
                "write_id": None,
                "files_added": _count(snapshot, "added-data-files"),
                "rows_added": _count(snapshot, "added-records"),
            }
            for snapshot in sorted(metadata.snapshots.values(), key=lambda one: one.timestamp_ms)
        ]

    def details(self, table: Table, version: TableVersion) -> dict[str, Any]:
        _, metadata = self._metadata.get(table.url, (None, None))
        own = metadata_of(table, version)
        shown: dict[str, Any] = {"table_id": own.table_id, "snapshot_id": own.number}
        if metadata is not None:
            shown |= {"format_version": metadata.format, "properties": metadata.properties}
        return shown


def _resized(digest: str) -> str:
    return key_of("resized", digest)


def _delete_files(version: TableVersion) -> list[PositionDeletes | EqualityDeletes]:
    return [one for one in version.deletes if isinstance(one, (PositionDeletes, EqualityDeletes))]


def _count(snapshot: Snapshot, name: str) -> int | None:
    text = snapshot.summary.get(name, "")
    return int(text) if text.isdecimal() else None


def _import() -> Any:
    try:
        return importlib.import_module(_READER)
    except ImportError as problem:
        raise_ours(
            OptionError(
                "an Iceberg table needs PyIceberg, which reads its manifests and which this machine does not have: pip install "
                f"'pyspark-lookup[iceberg]' ({problem})"
            ),
            problem,
        )
