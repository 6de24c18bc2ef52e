"""`IcebergSource`: the versions of Iceberg tables, which are their snapshots. `IcebergOptions`: the branch or tag to read."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

from pyspark_lookup.columnar.types import text_of_schema
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.decoding import UNREADABLE, as_name, as_text, describe_fault
from pyspark_lookup.errors import (
    DamagedFileError,
    NotSupportedError,
    OptionError,
    SourceChangedError,
    TableFormatError,
    UfsNotFoundError,
    UfsPermissionError,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.groups import Pin, Ref
from pyspark_lookup.options.lookup_options import KindOptions, LookupOptions
from pyspark_lookup.options.parsing import Kind, option, parse_text
from pyspark_lookup.sources.catalogs import (
    AUTHORISE_EVERY,
    Authorisations,
    CatalogOptions,
    CatalogStore,
    replaced_table_error,
)
from pyspark_lookup.sources.iceberg.catalog import (
    CALL_S,
    HINT,
    METADATA_DIRECTORY,
    METADATA_SUFFIX,
    Catalog,
    CatalogAnswer,
    Pointer,
    TableCredentialVendor,
    read_pointer,
)
from pyspark_lookup.sources.iceberg.columns import IcebergColumns
from pyspark_lookup.sources.iceberg.deletes import EqualityDeletes, PositionDeletes
from pyspark_lookup.sources.iceberg.entries import Entry
from pyspark_lookup.sources.iceberg.files import IcebergFiles
from pyspark_lookup.sources.iceberg.manifest_reader import ManifestReader, RecentEntries
from pyspark_lookup.sources.iceberg.metadata import (
    IcebergMetadata,
    Locations,
    Selection,
    Snapshot,
    parse_metadata,
    parse_metadata_json,
    plain_location,
)
from pyspark_lookup.sources.iceberg.snapshots import Definition, LargeSnapshots
from pyspark_lookup.storage.disk import Disk, digest_of, key_of
from pyspark_lookup.storage.stores import (
    CATALOG_SCHEME,
    IMMUTABLE,
    CredentialHolder,
    EqualityGroup,
    FileVersion,
    Listing,
    Store,
)
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.executions import read_again
from pyspark_lookup.versions.model import (
    Files,
    Rewrites,
    Table,
    TableVersion,
    VersionMetadata,
    differing_files,
    glob_reaches,
    name_of_rows,
    require_metadata,
)
from pyspark_lookup.versions.version_source import Answer, OpenUrl, Question, SourceParts, VersionSource


@dataclasses.dataclass(frozen=True)
class IcebergOptions(KindOptions):
    """The options that name the branch or tag to read."""

    # fmt: off
    branch: str | None = option(
        "lookup.branch", Kind("name", parse_text), None, default_text="`main`",
        doc="Iceberg tables: read the current snapshot of this branch.",
    )
    tag: str | None = option(
        "lookup.tag", Kind("name", parse_text), None,
        doc="Iceberg tables: read the snapshot that this tag names.",
    )
    # fmt: on

    @property
    def pins(self) -> dict[str, Pin]:
        names_by_kind = {"branch": self.branch, "tag": self.tag}
        return {f"lookup.{kind}": Ref(kind, name) for kind, name in names_by_kind.items() if name is not None}


_REPLACE = "replace"
_REWRITES_KEPT = 8  # compactions that a version's metadata lists
_VERSIONS_KEPT = 4  # versions that a process caches
_NAMES_LOOKED_AT = 1000  # names in a listing among which a metadata file must be
_POINTERS_TRIED = 5  # attempts to read metadata that keeps expiring before it is read
_HINT_WAITS_S = (0.01, 0.03, 0.1)  # pauses before a version hint is read again


@dataclasses.dataclass(frozen=True)
class _PointerRecord:
    """The host's record of a table: the pointer to its metadata that was last read, and the digest of the version to which it led."""

    pointer: Pointer
    digest: str

    @classmethod
    def from_json(cls, record: Any) -> _PointerRecord:
        """The record that `IcebergSource._remember` wrote. Raises TypeError or ValueError for a malformed record."""
        pointer, digest = record
        return cls(Pointer.from_json(pointer), as_name(digest))


@dataclasses.dataclass(frozen=True)
class _OpenCatalog:
    """The catalog of a table: the vendor and the holder of the table's credentials, and for how long an authorisation holds."""

    vendor: TableCredentialVendor
    holder: CredentialHolder
    authorise_every_s: float


def _read_settings(disk: Disk | None, key: str) -> dict[str, str] | None:
    return None if disk is None else disk.get_record("vended", key, _parse_settings)


def _parse_settings(record: Any) -> dict[str, str]:
    settings = {as_text(name): as_text(value) for name, value in record.items()}
    _ = settings["location"]
    return settings


class IcebergSource(VersionSource):
    """The versions of Iceberg tables. A catalog, a version hint or the path of a metadata file leads to a table's metadata. Files never
    change.

    PyIceberg is imported only to ask a catalog or to read manifests, not for a version of which this host has a record. `mapped_from`: see
    `LargeSnapshots`.
    """

    mapped_from: ClassVar[int] = 250

    kinds = ("ICEBERG",)
    markers = (METADATA_DIRECTORY,)
    marker_file = HINT
    url_prefixes = (CATALOG_SCHEME,)
    url_suffixes = (METADATA_SUFFIX, f"{METADATA_SUFFIX}.gz")
    label = "an Iceberg table"
    pins = ("lookup.version", "lookup.branch", "lookup.tag", "lookup.timestamp")

    def __init__(self, parts: SourceParts, opened: _OpenCatalog | None = None) -> None:
        super().__init__(parts)
        self._ufs = parts.ufs
        self._opened = opened
        self._pointers: dict[str, Pointer] = {}
        self._metadata: dict[str, tuple[Pointer, IcebergMetadata]] = {}
        self._manifests: RecentEntries = {}
        self._versions: dict[tuple[str, str], TableVersion] = {}
        self._large = LargeSnapshots(parts.context, parts.host, self.mapped_from)
        if opened is not None:
            vendor = opened.vendor
            self._authorisations = Authorisations(parts.context, opened.authorise_every_s, vendor.catalog.principal)
            parts.host.asks_catalog(vendor.name, CALL_S)
            self._settings_key = key_of(parts.ufs.scope, vendor.table)
            # The vendor outlives this source, so it refers to the disk only.
            vendor.read_settings = functools.partial(_read_settings, parts.context.disk, self._settings_key)

    @classmethod
    def bind(cls, options: LookupOptions, shared: dict[Any, Any]) -> Callable[[SourceParts], VersionSource]:
        named = options.kind(CatalogOptions)
        if named.catalog is None or named.is_unity:
            return cls
        vendor, holder = cls._share(options, shared, HostClock(), random.Random())
        return functools.partial(cls, opened=_OpenCatalog(vendor, holder, named.authorise_every_s))

    @classmethod
    def _share(
        cls, options: LookupOptions, shared: dict[Any, Any], clock: HostClock, rng: random.Random
    ) -> tuple[TableCredentialVendor, CredentialHolder]:
        """The vendor and the holder of the credentials of the table that options name; all sources and stores of this process share them."""
        named = options.kind(CatalogOptions)
        assert named.catalog is not None
        key = cls, named.catalog, named.properties
        if key not in shared:
            shared[key] = Catalog(named.catalog, named.properties)
        place = *key, options.files.path
        if place not in shared:
            vendor = TableCredentialVendor(shared[key], options.files.path)
            shared[place] = vendor, CredentialHolder(vendor, clock, rng.random)
        return cast("tuple[TableCredentialVendor, CredentialHolder]", shared[place])

    @classmethod
    def open_store(
        cls,
        options: LookupOptions,
        open_url: OpenUrl,
        shared: dict[Any, Any],
        clock: HostClock,
        rng: random.Random,
    ) -> Store | None:
        named = options.kind(CatalogOptions)
        if named.catalog is None or named.is_unity:
            return None
        return CatalogStore.open(options, open_url, cls._share(options, shared, clock, rng)[1])

    @classmethod
    def has_own_file(cls, ufs: Ufs, marker_url: str) -> bool:
        # Catalogs write 00000-….metadata.json, which comes first in a listing. Writers without a catalog write v1.metadata.json, which
        # comes after the manifests.
        names = ("", "v")
        files = [file for after in names for file in ufs.list_files(marker_url, after, _NAMES_LOOKED_AT)]
        return any(file.url.endswith(cls.url_suffixes) for file in files)

    @classmethod
    def is_shown(cls, listing: Listing) -> bool:
        return bool(listing.urls_ending(METADATA_SUFFIX))

    @classmethod
    def refuse_tables(cls, listing: Listing, directories: Sequence[str], pattern: str) -> None:
        for url in listing.urls_ending(METADATA_SUFFIX):
            table, _, parent = url.rpartition("/")[0].rpartition("/")
            if parent == METADATA_DIRECTORY and (not pattern or glob_reaches(table, pattern)):
                raise TableFormatError(
                    f"{redact('path', listing.url)} holds {url[len(listing.url) + 1 :]}, so it is an Iceberg table, but it "
                    f"has no {METADATA_DIRECTORY}/{HINT} that says which metadata file is current (the newest may be of a failed commit). Read "
                    "it by its name in its catalog (lookup.catalog), or give the path of a metadata file"
                )

    def check_options(self, options: LookupOptions, kind: str) -> None:
        super().check_options(options, kind)
        if AUTHORISE_EVERY in options.explicit and self._opened is not None and not self._opened.vendor.catalog.is_rest:
            raise OptionError(
                f"option {AUTHORISE_EVERY} is for catalogs with grants (Iceberg REST, Unity Catalog): {self._opened.vendor.name} has none: remove the option"
            )

    # --- versions ---------------------------------------------------------------------------------

    def current(self, question: Question) -> Answer:
        table = question.table
        pointer_record = self._read_record(table)
        pointer, sent_metadata = self._find_pointer(table, None if pointer_record is None else pointer_record.pointer)
        if (
            pointer_record is not None
            and pointer_record.pointer == pointer
            and question.gone_digest != pointer_record.digest
        ):
            cached_version = self._find_cached(table, pointer_record.digest)
            if cached_version is not None:
                self._keep(table, cached_version)
                # Record the settled pointer (see `Pointer.settled`), so that the next query can compare it.
                if pointer.settled and not pointer_record.pointer.settled:
                    self._remember(table, _PointerRecord(pointer, pointer_record.digest))
                self._confirm_lasting(table, self.catalog_id(cached_version))
                return Answer(cached_version, question.started_s)
        for last in (False,) * (_POINTERS_TRIED - 1) + (True,):
            try:
                metadata = self._read_metadata(table, pointer, sent_metadata)
                version = self._version(table, metadata, metadata.choose(table.pinned, self._redact_path(table)))
                break
            except DamagedFileError as problem:
                # The race: the metadata file may have expired since the pointer was read. Then the pointer now names another file.
                if last or not isinstance(problem.__cause__, (UfsNotFoundError, SourceChangedError)):
                    raise
                last_pointer, (pointer, sent_metadata) = pointer, self._find_pointer(table, None)
                if pointer == last_pointer:
                    raise
        if question.gone_digest in (version.digest, _resized_digest(version.digest)):
            version = self._keep(table, self._with_true_sizes(version))
        self._remember(table, _PointerRecord(pointer, version.digest))
        self._confirm_lasting(table, self.catalog_id(version))
        return Answer(version, question.started_s)

    def candidates(
        self, table: Table, digest: str, newest: float, ask: Callable[[], TableVersion]
    ) -> Sequence[TableVersion]:
        metadata = self._read_metadata(table, *self._find_pointer(table, self._pointers.get(table.url)))
        selection = metadata.find_selection(digest)
        return [] if selection is None else [self._version(table, metadata, selection)]

    def restore(self, table: Table, metadata: VersionMetadata) -> TableVersion | None:
        version = self._versions.get((table.id, metadata.digest))
        if version is None or not self._large.is_recorded(table, metadata):
            version = self._large.restore(table, metadata)
        return None if version is None else self._keep(table, version)

    def _with_true_sizes(self, version: TableVersion) -> TableVersion:
        """The version with the file sizes that the store reports. Called after a file could not be read.

        Tools that edit a table's metadata may leave wrong sizes in it. Raises SourceChangedError if a file does not exist.
        """
        assert version.metadata is not None
        try:
            sizes = {file.url: self._ufs.get_meta(file.url).size for file in (*version.files, *_delete_files(version))}
        except UfsNotFoundError:
            return version
        resized_deletes: dict[str, Any] = {
            deletes.name: dataclasses.replace(deletes, size=sizes[deletes.url]) for deletes in _delete_files(version)
        }
        groups = {
            id(group): EqualityGroup(tuple(resized_deletes[deletes.name] for deletes in group.files))
            for group in version.equality
        }
        files = tuple(
            dataclasses.replace(
                file,
                size=sizes[file.url],
                deletes=tuple(resized_deletes.get(deletes.name, deletes) for deletes in file.deletes),
                equality=tuple(groups[id(group)] for group in file.equality),
            )
            for file in version.files
        )
        if files == version.files and [*resized_deletes.values()] == _delete_files(version):
            return version
        digest = _resized_digest(version.metadata.digest)
        return dataclasses.replace(version, files=files, metadata=dataclasses.replace(version.metadata, digest=digest))

    def _redact_path(self, table: Table) -> str:
        return redact("path", table.url)

    def _find_cached(self, table: Table, digest: str) -> TableVersion | None:
        """The version with this digest, if this process or this host has cached it; otherwise None. Makes no store call."""
        return self._versions.get((table.id, digest)) or self._parts.host.files(table, digest)

    def _keep(self, table: Table, version: TableVersion) -> TableVersion:
        recent = list(self._versions.items())[-_VERSIONS_KEPT + 1 :]
        self._versions = {**dict(recent), (table.id, version.digest): version}
        return version

    def _version(self, table: Table, metadata: IcebergMetadata, selection: Selection) -> TableVersion:
        cached_version = self._find_cached(table, selection.digest)
        if cached_version is not None:
            return self._keep(table, cached_version)
        redacted_path = self._redact_path(table)
        place = "" if selection.snapshot is None else f"snapshot {selection.snapshot.id} of "
        try:
            return self._keep(table, self._build(table, metadata, selection))
        except NotSupportedError as problem:
            fault = str(problem).removeprefix(f"{redacted_path}: ")
            raise NotSupportedError(f"{place}the Iceberg table {redacted_path}: {fault}") from None
        except (DamagedFileError, UfsNotFoundError, SourceChangedError) as problem:
            advice = "" if isinstance(problem, DamagedFileError) else ": restore this file"
            raise_ours(
                DamagedFileError(f"{place}the Iceberg table {redacted_path} cannot be read: {problem}{advice}"), problem
            )
        except UNREADABLE as problem:
            fault = f"{describe_fault(problem)}: restore the files of its metadata"
            raise_ours(DamagedFileError(f"{place}the Iceberg table {redacted_path} cannot be read: {fault}"), problem)

    def _build(self, table: Table, metadata: IcebergMetadata, selection: Selection) -> TableVersion:
        locations = self._locations(table, metadata)
        files = IcebergFiles(table.url, metadata, selection, locations)
        snapshot = selection.snapshot
        found: IcebergColumns | list[Entry] = []
        if snapshot is not None:
            definition = Definition(metadata, selection.schema, locations)
            reader = ManifestReader(self._ufs, self._parts.blocks, locations, self._manifests)
            manifests = reader.list_manifests(snapshot)
            found = self._large.find_columns(table, selection.digest, definition, files, manifests, reader)
            in_columns = {*found.base.manifests} if isinstance(found, IcebergColumns) else set()
            current = {manifest.location for manifest in manifests}.difference(in_columns)
            self._manifests = {location: some for location, some in self._manifests.items() if location in current}
        number = None if snapshot is None or snapshot.id >= 2**63 else snapshot.id  # some writers use larger ids
        if isinstance(found, IcebergColumns):
            _ = found.index  # raises an error for deletes that contradict each other
            data_files: Files = found.version_files()
            partitions = found.partitions()
        else:
            data_files = files.files(found)
            partitions = files.partitions(frozenset(name for name, _ in file.partition or ()) for file in data_files)
        version_metadata = VersionMetadata(
            metadata.table_id, None, "", selection.digest, (), text_of_schema(files.schema), partitions, (), number
        )
        version = TableVersion(table.id, data_files, version_metadata)
        rewrites = self._rewrites(table, metadata, snapshot, version)
        return dataclasses.replace(version, metadata=dataclasses.replace(version_metadata, rewrites=rewrites))

    def _rewrites(
        self, table: Table, metadata: IcebergMetadata, snapshot: Snapshot | None, version: TableVersion
    ) -> Rewrites:
        """The compactions that led to a version: those recorded with the last version that this host knows, and those after that version."""
        record = self._parts.host.last(table)
        earlier_version = None if record is None else self._find_cached(table, record["digest"])
        if (
            earlier_version is None
            or earlier_version.metadata is None
            or earlier_version.metadata.table_id != metadata.table_id
        ):
            return ()
        rewrites, at = earlier_version.metadata.rewrites, snapshot
        while at is not None and at.id != earlier_version.number and at.operation == _REPLACE:
            at = None if at.parent is None else metadata.snapshots.get(at.parent)
        if at is not None and at is not snapshot and at.id == earlier_version.number:
            differences = differing_files(version, earlier_version)
            if differences is not None and any(differences):
                added, removed = differences
                # Equality deletes that applied to a removed file may stay, because other files need them, and be removed in a later commit. So
                # the rewrite names them on both sides: the new files equal the old ones only together with them.
                kept = _equality_names(removed.values()).difference(removed)
                new, old = (tuple(sorted(kept.union(names))) for names in (added, removed))
                rewrites = (*rewrites, (new, old))
        return rewrites[-_REWRITES_KEPT:]

    # --- files ------------------------------------------------------------------------------------

    def _find_pointer(self, table: Table, last_pointer: Pointer | None) -> tuple[Pointer, dict[str, Any] | None]:
        """(where the table's metadata lies now, the metadata itself if a catalog has sent it). One call if nothing has changed."""
        if table.url.startswith(CATALOG_SCHEME):
            answer = self._ask_catalog(table)
            pointer, sent_metadata = Pointer(answer.location, table_id=answer.table_id), answer.metadata
        elif self.kind_of_url(table.url) is not None:
            file = self._ufs.get_meta(table.url)
            pointer, sent_metadata = Pointer.from_file(file.url, file, file.size), None
        else:
            try:
                pointer, sent_metadata = (
                    self._read_pointer(table.url, last_pointer or self._pointers.get(table.url)),
                    None,
                )
            except UfsNotFoundError:
                raise UfsNotFoundError(
                    f"{self._redact_path(table)} has no {METADATA_DIRECTORY}/{HINT}: give its name in a catalog (lookup.catalog) or the path of "
                    "its metadata file"
                ) from None
        self._pointers = {**self._pointers, table.url: pointer}
        return pointer, sent_metadata

    def _ask_catalog(self, table: Table, with_history: bool = True) -> CatalogAnswer:
        """The catalog's answer about the table, with the credentials that the catalog vends. From then on, the principal counts as authorised.

        Makes one call to the catalog. If the catalog vends no credentials for the table's location, and the host has no record that the principal
        is authorised, it makes one more call, to the store.
        """
        if self._opened is None:
            raise OptionError(f"{self._redact_path(table)} is a table of a catalog: set lookup.catalog")
        opened, authorisations = self._opened, self._authorisations

        def ask() -> CatalogAnswer:
            asked_s, principal_key = self._parts.context.clock.steady_s(), authorisations.key(table)
            with authorisations.withdrawing(table):
                answer = opened.vendor.catalog.load(opened.vendor.table, with_history)
            if answer.is_rest:
                opened.holder.put(answer.credentials, asked_s)
                self._keep_settings(opened.vendor, answer.settings)
                if not answer.vends:
                    if authorisations.allows(table, answer.table_id):
                        return answer
                    self._prove_access(table, opened.vendor, answer)
                authorisations.confirm(table, principal_key, answer.table_id, asked_s)
            return answer

        try:
            return read_again(ask, SourceChangedError)
        except SourceChangedError as problem:
            raise_ours(
                DamagedFileError(
                    f"the metadata of the Iceberg table {self._redact_path(table)} cannot be read: {problem}: restore this file"
                ),
                problem,
            )

    def _confirm_lasting(self, table: Table, table_id: str | None) -> None:
        """Record that a catalog without grants names the table with this id, which only its metadata tells.

        Other programs of this host may have a catalog with grants under the same name, and what is cached of its table.
        """
        if (
            self._opened is not None
            and table.url.startswith(CATALOG_SCHEME)
            and not self._opened.vendor.catalog.is_rest
        ):
            key, asked_s = self._authorisations.key(table), self._parts.context.clock.steady_s()
            self._authorisations.confirm(table, key, table_id, asked_s, lasting=True)

    def _keep_settings(self, vendor: TableCredentialVendor, settings: Mapping[str, str]) -> None:
        if settings != vendor.settings:
            vendor.settings = settings
            self._parts.host.attempt(lambda disk: disk.replace_record("vended", self._settings_key, settings))

    def _prove_access(self, table: Table, vendor: TableCredentialVendor, answer: CatalogAnswer) -> None:
        """Raise UfsPermissionError if the store does not let this process read the table's metadata file. One call.

        Some catalogs also answer a principal who may see a table's definition but not its rows; they vend it no credentials then. This process
        uses its own.
        """
        try:
            self._ufs.get_meta(self._ufs.url_of(answer.location))
        except UfsNotFoundError as problem:
            # The race: a commit may have replaced the metadata file since the catalog named it, and a clean-up may have removed it.
            self._authorisations.withdraw(table)
            raise_ours(SourceChangedError(str(problem)), problem)
        except UfsPermissionError as problem:
            self._authorisations.withdraw(table)
            if answer.credentials:
                raise
            raise_ours(
                UfsPermissionError(
                    f"{vendor.name} vends no credentials to this principal for {vendor.table}, and the store refuses those of this process ({problem}): "
                    "have the principal granted the right to read the table's data, or give this process credentials for the store"
                ),
                problem,
            )

    def catalog_id(self, version: TableVersion) -> str | None:
        return None if self._opened is None or version.metadata is None else version.metadata.table_id

    def is_authorised(self, table: Table, version: TableVersion) -> bool:
        if self._opened is None or not table.url.startswith(CATALOG_SCHEME):
            return True
        return self._authorisations.allows(table, self.catalog_id(version))

    def authorise(self, table: Table, catalog_id: str | None) -> None:
        if self._opened is None or not table.url.startswith(CATALOG_SCHEME):
            return
        if self._authorisations.allows(table, catalog_id):
            if self._authorisations.lasts(table):
                self._opened.vendor.catalog.has_no_grants()
            return
        # One process of the host asks, the others wait for its answer. It asks for the whole table: an answer to the question for credentials
        # alone has neither the table's id nor its conditions, such as row filters.
        with self._parts.host.lock("authorise", table.id, pauses=True):
            if self._authorisations.allows(table, catalog_id):
                return
            answer = self._ask_catalog(table, with_history=False)
            self._confirm_lasting(table, catalog_id)
        if answer.is_rest and answer.table_id != catalog_id:
            raise replaced_table_error(self._opened.vendor.name, self._opened.vendor.table)

    def _read_pointer(self, url: str, last_pointer: Pointer | None) -> Pointer:
        """The pointer in the table's version hint. It is read again if a commit or a clean-up interferes.

        The race: writers replace the hint, so the hint of an existing table may be missing for an instant.
        """
        transient_errors = (
            SourceChangedError,
            DamagedFileError,
            *(() if last_pointer is None else (UfsNotFoundError,)),
        )
        for wait_s in _HINT_WAITS_S:
            with contextlib.suppress(*transient_errors):
                return read_pointer(self._ufs, url, last_pointer)
            self._parts.context.clock.sleep(wait_s)
        return read_pointer(self._ufs, url, last_pointer)

    def _locations(self, table: Table, metadata: IcebergMetadata) -> Locations:
        if table.url.startswith(CATALOG_SCHEME):
            return Locations(metadata.location, self._ufs.url_of(metadata.location))
        if self.kind_of_url(table.url) is None:
            return Locations(metadata.location, table.url)
        root, directory = table.url.rsplit("/", 2)[:2]
        elsewhere = metadata.properties.get("write.metadata.path")
        # If the metadata lies outside the table's directory, its place does not show whether the table was copied.
        if directory != METADATA_DIRECTORY or (
            elsewhere is not None and plain_location(elsewhere) == plain_location(f"{root}/{directory}")
        ):
            return Locations(metadata.location, self._ufs.url_of(metadata.location))
        return Locations(metadata.location, root)

    def _read_metadata(self, table: Table, pointer: Pointer, sent_metadata: dict[str, Any] | None) -> IcebergMetadata:
        last_pointer, metadata = self._metadata.get(table.url, (None, None))
        if metadata is None or last_pointer != pointer:
            if sent_metadata is not None:
                metadata = parse_metadata_json(pointer.location, sent_metadata, table.url)
            else:
                url = self._ufs.url_of(pointer.location)
                try:
                    size = self._ufs.get_meta(url).size if pointer.size is None else pointer.size
                    data = self._ufs.read_ranges(FileVersion(url, size, IMMUTABLE), [(0, size)])[0]
                except (UfsNotFoundError, SourceChangedError) as problem:
                    raise_ours(
                        DamagedFileError(
                            f"the metadata of the Iceberg table {self._redact_path(table)} cannot be read: {problem}: restore this file"
                        ),
                        problem,
                    )
                metadata = parse_metadata(pointer.location, data, table.url)
            self._metadata = {**self._metadata, table.url: (pointer, metadata)}
        return metadata

    # --- the host's records -----------------------------------------------------------------------

    def _key(self, table: Table) -> str:
        return key_of("iceberg", table.id)

    def _read_record(self, table: Table) -> _PointerRecord | None:
        disk = self._parts.context.disk
        return None if disk is None else disk.get_record("pointer", self._key(table), _PointerRecord.from_json)

    def _remember(self, table: Table, pointer_record: _PointerRecord) -> None:
        disk = self._parts.context.disk
        if disk is not None:
            try:
                disk.replace_record(
                    "pointer", self._key(table), [pointer_record.pointer.to_json(), pointer_record.digest]
                )
            except OSError:
                self._parts.context.metrics.inc("cacheFailureCount")

    # --- what views show --------------------------------------------------------------------------

    def history(self, table: Table) -> list[dict[str, Any]] | None:
        metadata = self._read_metadata(table, *self._find_pointer(table, self._pointers.get(table.url)))
        return [
            {
                "version": snapshot.id,
                "committed_at": snapshot.timestamp_ms / 1000,
                "operation": snapshot.operation,
                "write_id": None,
                "files_added": _count(snapshot, "added-data-files"),
                "rows_added": _count(snapshot, "added-records"),
            }
            for snapshot in sorted(metadata.snapshots.values(), key=lambda snapshot: snapshot.timestamp_ms)
        ]

    def details(self, table: Table, version: TableVersion) -> dict[str, Any]:
        metadata, version_metadata = self._latest_metadata(table), require_metadata(table, version)
        return {
            "table_id": version_metadata.table_id,
            "snapshot_id": version_metadata.number,
            "format_version": metadata.format,
            "properties": metadata.properties,
        }

    def _latest_metadata(self, table: Table) -> IcebergMetadata:
        """The table's metadata, as this host last knew it. It is read from the store unless this process has read it: a process that takes a
        version from the host's record reads none before."""
        record = self._read_record(table)
        pointer = self._pointers.get(table.url) or (None if record is None else record.pointer)
        if pointer is not None:
            with contextlib.suppress(DamagedFileError):  # it may have expired since
                return self._read_metadata(table, pointer, None)
        return self._read_metadata(table, *self._find_pointer(table, None))


def _resized_digest(digest: str) -> str:
    return digest_of("resized", digest)


def _equality_names(files: Iterable[FileVersion]) -> set[str]:
    """The names of the equality deletes that apply to some of these files."""
    oldest: dict[int, tuple[EqualityGroup, int]] = {}
    for file in files:
        for group in file.equality:
            sequence = oldest.get(id(group), (group, file.sequence))[1]
            oldest[id(group)] = group, min(sequence, file.sequence)
    return {name_of_rows(deletes.keys) for group, sequence in oldest.values() for deletes in group.after(sequence)}


def _delete_files(version: TableVersion) -> list[PositionDeletes | EqualityDeletes]:
    return [deletes for deletes in version.deletes if isinstance(deletes, (PositionDeletes, EqualityDeletes))]


def _count(snapshot: Snapshot, name: str) -> int | None:
    text = snapshot.summary.get(name, "")
    return int(text) if text.isdecimal() else None
