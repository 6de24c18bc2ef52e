"""`DeltaSource`: the versions of Delta tables, as their log lists them.

The module also knows a table's columns: their Arrow types, and the names that they have in the table's files. And it reads the deletion
vectors of data files, which are 64-bit roaring bitmaps.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import decimal
import functools
import json
import math
import random
import re
import struct
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.calendars import widened
from pyspark_lookup.columnar.keys import Numbers, as_bools, as_indices, as_int64
from pyspark_lookup.columnar.predicate import ColumnStats, StatsColumns
from pyspark_lookup.columnar.roaring import checked_blob, read_roaring
from pyspark_lookup.columnar.types import (
    EXACT,
    MOST_NESTED,
    VARIANT,
    lenient_schema,
    text_of_schema,
    type_of_column,
    with_collations,
)
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.decoding import UNREADABLE, as_count, as_decimal, as_text, describe_fault, is_utf8, show
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.errors import (
    DamagedFileError,
    NotSupportedError,
    SourceChangedError,
    TableFormatError,
    UfsNotFoundError,
    VersionGoneError,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.catalogs import Authorisations, CatalogOptions, CatalogStore, replaced_table_error
from pyspark_lookup.sources.credentials import CredentialOptions
from pyspark_lookup.sources.delta.actions import Add, Key, Statistics, Vector, decode_path, is_absolute
from pyspark_lookup.sources.delta.base_files import EXACT_DIGITS, ROUNDED_BITS, BaseFiles
from pyspark_lookup.sources.delta.log import LOG_DIRECTORY, RESTORE_LOG, DeltaLog, RatifiedCommits
from pyspark_lookup.sources.delta.state import DeltaState
from pyspark_lookup.sources.delta.unity import CALL_S, UnityCatalog, UnityCredentialVendor, UnityTable
from pyspark_lookup.storage.disk import digest_of, key_of
from pyspark_lookup.storage.stores import (
    CATALOG_SCHEME,
    IMMUTABLE,
    PART_OF_FILE,
    CredentialHolder,
    FileStatistics,
    FileVersion,
    Listing,
    PartitionValues,
    Range,
    Store,
    StoredColumn,
)
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.executions import read_again
from pyspark_lookup.versions.file_columns import ColumnFiles, FileColumns, encode_rows
from pyspark_lookup.versions.model import DELETES, Table, TableVersion, VersionMetadata, require_metadata
from pyspark_lookup.versions.version_source import Answer, OpenUrl, Question, SourceParts, TimeTravel, VersionSource

_PHYSICAL, _ID = "delta.columnMapping.physicalName", "delta.columnMapping.id"
_TYPES = {
    "string": pa.string(),
    "long": pa.int64(),
    "integer": pa.int32(),
    "short": pa.int16(),
    "byte": pa.int8(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "void": pa.string(),
    "variant": VARIANT,
}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")


def arrow_schema(schema: Any) -> pa.Schema:
    """The columns of a schema in the log, with Arrow types. A column whose type is not supported gets an `unreadable_type`.

    Raises TypeError or ValueError for a malformed schema.
    """
    columns = [
        with_collations(
            pa.field(as_text(field["name"]), type_of_column(_parse_type, field["type"], field["name"])), field
        )
        for field in schema["fields"]
    ]
    return lenient_schema(pa.schema(columns))


def _parse_type(definition: Any, depth: int = 0) -> pa.DataType:
    if depth > MOST_NESTED:
        raise NotSupportedError(f"it has a type nested more than {MOST_NESTED} deep, which is not supported")
    depth += 1
    if isinstance(definition, str):
        if definition in _TYPES:
            return _TYPES[definition]
        decimal = _DECIMAL.fullmatch(definition)
        if decimal is not None and len(decimal[1]) <= 2 and 0 < int(decimal[1]) <= 38 and len(decimal[2]) <= 2:
            return pa.decimal128(int(decimal[1]), int(decimal[2]))
    elif isinstance(definition, dict):
        kind = definition.get("type")
        if kind == "struct":
            fields = definition["fields"]
            return pa.struct([pa.field(as_text(f["name"]), _parse_type(f["type"], depth)) for f in fields])
        if kind == "array":
            return pa.list_(pa.field("element", _parse_type(definition["elementType"], depth)))
        if kind == "map":
            return pa.map_(
                _parse_type(definition["keyType"], depth),
                pa.field("value", _parse_type(definition["valueType"], depth)),
            )
    raise NotSupportedError(f"type {show(definition)} is not supported")


def stored_columns(schema: Any, mode: str) -> tuple[StoredColumn, ...]:
    """The names or ids that the columns have in the files. `mode`: how the table maps columns: `name`, `id` or `none`."""
    return tuple(_to_stored_column(field, mode) for field in schema["fields"])


def _to_stored_column(field: Any, mode: str) -> StoredColumn:
    metadata = field.get("metadata") or {}
    number = metadata.get(_ID)
    if mode == "id" and not isinstance(number, int):
        raise ValueError(f"column {show(field['name'])} has no {_ID}")
    stored_name = as_text(field["name"] if mode == "none" else metadata[_PHYSICAL])
    return StoredColumn(
        as_text(field["name"]), stored_name, number if mode == "id" else None, _parts(field["type"], mode)
    )


def _parts(definition: Any, mode: str) -> tuple[StoredColumn, ...]:
    """The fields of a struct, or the parts of a list or map under Arrow's names (`element`, `key`, `value`)."""
    kind = definition.get("type") if isinstance(definition, dict) else None
    if kind == "struct":
        return tuple(_to_stored_column(field, mode) for field in definition["fields"])
    if kind == "array":
        return (StoredColumn("element", "element", None, _parts(definition["elementType"], mode)),)
    if kind == "map":
        pairs = (("key", definition["keyType"]), ("value", definition["valueType"]))
        return tuple(StoredColumn(name, name, None, _parts(part_definition, mode)) for name, part_definition in pairs)
    return ()


# Z85 (ZeroMQ RFC 32) is base 85, but its digits differ from those of Python's base64.b85decode.
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_B85_OF_Z85 = {ord(z85_digit): ord(b85_digit) for z85_digit, b85_digit in zip(_Z85, _B85, strict=True)}
_UUID_DIGITS = 20


def decode_z85(text: str) -> bytes:
    """The bytes that a Z85 text encodes. Raises ValueError for text that is not Z85.

    If the number of bytes is not a multiple of four, writers in Rust pad the text: its last five digits begin with one `#` for each missing
    byte.
    """
    if len(text) % 5 or not set(text) <= set(_Z85):
        raise ValueError(f"{text[:40]!r} is not valid Z85 (the encoding in base 85 that Delta uses)")
    last_digits = text[-5:].lstrip("#")
    missing = len(text[-5:]) - len(last_digits)
    if not 1 <= missing <= 3:
        return base64.b85decode(text.translate(_B85_OF_Z85))
    digits = text[:-5] + _Z85[0] * missing + last_digits
    content = base64.b85decode(digits.translate(_B85_OF_Z85))
    if any(content[-4 : missing - 4]):
        raise ValueError(
            f"it ends with {text[-5:]!r}, which is not valid Z85 (the encoding in base 85 that Delta uses)"
        )
    return content[:-4] + content[missing - 4 :]


@dataclasses.dataclass(frozen=True)
class DeletionVector:
    """A deletion vector of one data file. `storage` and `data`: `storageType` (`i`, `u` or `p`) and `pathOrInlineDv` in the log.

    `path`: the data file's path below the table, or its URL if it lies elsewhere. `url`: the file that contains the vector; None if the log
    itself contains it.
    """

    path: str
    storage: str
    data: str
    offset: int
    size: int
    cardinality: int
    url: str | None

    @property
    def name(self) -> str:
        """The protocol's unique id of the vector, followed by the data file's path."""
        return f"{self.storage}{self.data}@{self.offset}#{self.path}"

    @property
    def place(self) -> tuple[FileVersion, Range] | None:
        return None if self.url is None else (FileVersion(self.url, 0, PART_OF_FILE), (self.offset, self.size + 8))

    keys = None

    def positions(self, data: bytes | memoryview) -> Mapping[str, Numbers]:
        try:
            blob = decode_z85(self.data)[: self.size] if self.url is None else checked_blob(data, self.size)
            rows = read_roaring(blob, self.cardinality)
        except (*UNREADABLE, struct.error) as problem:
            place, file = (
                (f"of {redact('path', self.path)}", "the commit or checkpoint that has it")
                if self.url is None
                else (f"at byte {self.offset} of {redact('path', self.url)}", "this file")
            )
            raise DamagedFileError(
                f"the deletion vector {place} is damaged: {describe_fault(problem)}: restore {file}"
            ) from None
        return {self.path: rows}

    def to_json(self) -> list[Any]:
        return ["vector", self.path, self.storage, self.data, self.offset, self.size, self.cardinality, self.url]

    @classmethod
    def from_json(cls, record: Any) -> DeletionVector:
        """The deletion vector that `to_json` wrote; `record` lacks the kind, its first item. Raises TypeError or ValueError for a malformed
        record."""
        path, storage, data, offset, size, cardinality, url = record
        place = None if url is None else as_text(url)
        counts = (as_count(offset), as_count(size), as_count(cardinality))
        return cls(as_text(path), as_text(storage), as_text(data), *counts, place)

    @classmethod
    def from_descriptor(cls, record: Any) -> DeletionVector:
        """The deletion vector that `DeltaColumns.encode_vectors` wrote; `record` lacks the kind. Raises TypeError or ValueError for a malformed
        record."""
        table, path, (storage, data, *counts) = record
        url = vector_url(as_text(table), as_text(storage), as_text(data))
        return cls.from_json([path, storage, data, *counts, url])


def vector_url(table: str, storage: str, data: str) -> str | None:
    """The URL of the file that contains a vector; None if the log contains it. Raises ValueError for an unknown storage type."""
    if storage == "i":
        return None
    if storage == "p" and is_absolute(data):
        return data
    if storage != "u" or len(data) < _UUID_DIGITS:
        raise ValueError(f"a deletion vector has the unknown or malformed storageType {storage!r}")
    return _vector_file_url(table, data)


@functools.lru_cache(maxsize=1024)  # one file has the vectors of many data files, and each of these names it
def _vector_file_url(table: str, data: str) -> str:
    """The URL of the file that contains a vector with the storage type `u`. `data`: its `pathOrInlineDv`, which ends with a UUID in Z85."""
    prefix, name = data[:-_UUID_DIGITS], uuid.UUID(bytes=decode_z85(data[-_UUID_DIGITS:]))
    return "/".join([table, *([prefix] if prefix else []), f"deletion_vector_{name}.bin"])


_OF_LOG = re.compile(r"\d{20}\.(?:json|checkpoint\..+)")
_NAMES_LOOKED_AT = 1000
_ZONE = re.compile(r"(Z|[+-]\d\d:?\d\d)$")
_MILLISECOND = datetime.timedelta(milliseconds=1)
_MINUTE = datetime.timedelta(minutes=1)
_CUT, _LAST = "\ufffd", "\U0010ffff"
_ROUNDED = decimal.Decimal(2) ** -ROUNDED_BITS
_FLOATS_AS_TEXTS = ("Infinity", "-Infinity")
_ENDS = (
    decimal.Decimal(2**63 - 1),
    decimal.Decimal(-(2**63)),
)  # delta-rs writes these in place of greater or smaller bounds


class DeltaSource(VersionSource):
    """The versions of Delta tables. Data files never change, so they can be read as soon as a commit names them (`lookup.settle` has no
    effect).

    `mapped_from`: see `DeltaLog`.
    """

    mapped_from: ClassVar[int] = 1000

    kinds = ("DELTA",)
    markers = (LOG_DIRECTORY,)
    label = "a Delta table"

    def __init__(self, parts: SourceParts, in_catalog: InCatalog | None = None) -> None:
        super().__init__(parts)
        self._in_catalog = in_catalog
        if in_catalog is not None:
            self.url_prefixes = (CATALOG_SCHEME,)
            parts.host.asks_catalog(in_catalog.vendor.name, CALL_S)
            principal = in_catalog.vendor.catalog.principal
            self._authorisations = Authorisations(parts.context, in_catalog.authorise_every_s, principal)
        self._logs: dict[Place, DeltaLog] = {}
        self._newest: dict[str, Newest] = {}
        self._files: dict[str, DeltaFiles] = {}
        self._times = TimeTravel()

    @classmethod
    def bind(cls, options: LookupOptions, shared: dict[Any, Any]) -> Callable[[SourceParts], VersionSource]:
        if not options.kind(CatalogOptions).is_unity:
            return cls
        return functools.partial(cls, in_catalog=cls._share(options, shared, HostClock(), random.Random()))

    @classmethod
    def _share(cls, options: LookupOptions, shared: dict[Any, Any], clock: HostClock, rng: random.Random) -> InCatalog:
        """What all sources and stores of this process share for the table that options name in a catalog."""
        named, login = options.kind(CatalogOptions), options.kind(CredentialOptions).identity
        key = cls, named.catalog, named.properties, login
        if key not in shared:
            shared[key] = UnityCatalog.of_options(options, clock, rng.random)
        place = *key, options.files.path, named.authorise_every_s
        if place not in shared:
            vendor = UnityCredentialVendor(shared[key], options.files.path)
            shared[place] = InCatalog(vendor, CredentialHolder(vendor, clock, rng.random), named.authorise_every_s)
        return cast("InCatalog", shared[place])

    @classmethod
    def open_store(
        cls, options: LookupOptions, open_url: OpenUrl, shared: dict[Any, Any], clock: HostClock, rng: random.Random
    ) -> Store | None:
        if not options.kind(CatalogOptions).is_unity:
            return None
        return CatalogStore.open(options, open_url, cls._share(options, shared, clock, rng).holder)

    @classmethod
    def has_own_file(cls, ufs: Ufs, marker_url: str) -> bool:
        files = ufs.list_files(
            marker_url, "/", _NAMES_LOOKED_AT
        )  # listed after "/", so without names that begin with a dot
        return any(_OF_LOG.fullmatch(file.url.rpartition("/")[2]) for file in files)

    @classmethod
    def refuse_tables(cls, listing: Listing, directories: Sequence[str], pattern: str) -> None:
        inside = next((path for path in directories if path.rsplit("/", 1)[-1] == LOG_DIRECTORY), None)
        if inside is not None:
            raise TableFormatError(
                f"{redact('path', listing.url)} holds {inside}, so {redact('path', f'{listing.url}/{inside}'.rpartition('/')[0])} is a Delta table, "
                "whose log alone says which files are current: read it by that path"
            )

    def _log(self, place: Place) -> DeltaLog:
        if place not in self._logs:
            parts = self._parts
            self._logs[place] = DeltaLog(
                parts.ufs, parts.blocks, parts.context, place.url, self.mapped_from, place.catalog_id
            )
        return self._logs[place]

    def current(self, question: Question) -> Answer:
        table, newest = question.table, self._read_newest(question.table)
        place, log, state = newest.place, newest.log, newest.state
        if isinstance(table.pinned, datetime.datetime):

            def list_times(at_ms: int) -> list[tuple[int, int]]:
                def read() -> list[tuple[int, int]]:
                    return log.commit_times(newest.state, log.select_commits(newest.state, newest.commits(), at_ms))

                return read_again(read, SourceChangedError)

            number = self._times.find(table.url, state.table_id, table.pinned, list_times)
            state = log.read_state(number, state, newest.ratified)
        elif table.pinned is not None:
            try:
                state = log.read_state(cast(int, table.pinned), state, newest.ratified)
            except VersionGoneError as problem:
                raise VersionGoneError(f"option lookup.version = {table.pinned}: {problem}") from problem.__cause__
        return Answer(self._version(table, place, state), question.started_s)

    def candidates(
        self, table: Table, digest: str, newest: float, ask: Callable[[], TableVersion]
    ) -> Sequence[TableVersion]:
        versions = [ask()]
        last = self._newest.get(table.url) or self._read_newest(table)
        with contextlib.suppress(VersionGoneError, ValueError, OverflowError):
            state = last.log.read_state(int(newest), last.state, last.ratified)
            versions.append(self._version(table, last.place, state))
        return versions

    def restore(self, table: Table, metadata: VersionMetadata) -> TableVersion | None:
        if metadata.position is None:
            return None
        try:
            place = Place(table.url) if not metadata.state else Place.parse(metadata.state)
        except UNREADABLE:
            return None
        if self._in_catalog is not None and place.catalog_id is not None:
            self._in_catalog.vendor.remember(place.catalog_id, place.location)
        state = self._log(place).find_cached_state(metadata.table_id, metadata.position)
        return None if state is None else self._version(table, place, state)

    # --- where a table is -------------------------------------------------------------------------

    def _read_newest(self, table: Table) -> Newest:
        """The table's newest state. Asks the catalog first, if the table is named by one.

        The race: a staged commit may be published, and its file removed, after the catalog has named it.
        """
        newest = read_again(lambda: self._ask_newest(table), SourceChangedError)
        self._newest = {**self._newest, table.url: newest}
        return newest

    def _ask_newest(self, table: Table) -> Newest:
        if not table.url.startswith(CATALOG_SCHEME):
            place = Place(table.url)
            log = self._log(place)
            return Newest(place, log, log.latest())
        unity_table, ratified = self._ask_catalog(table)
        place = Place(self._parts.ufs.url_of(unity_table.location), unity_table.id, unity_table.location)
        log = self._log(place)
        if ratified is None:
            cached_state = log.cached_state()
            was_managed = cached_state is not None and cached_state.is_catalog_managed
            ratified = self._ratified(place) if unity_table.is_catalog_managed or was_managed else None
        state = log.latest(ratified)
        # The log decides, not the catalog: the table may have become a managed one since.
        if ratified is None and state.is_catalog_managed:
            ratified = self._ratified(place)
            state = log.latest(ratified)
        return Newest(place, log, state, ratified)

    def _ask_catalog(self, table: Table) -> tuple[UnityTable, RatifiedCommits | None]:
        """(the catalog's answer about a table, the table's ratified commits if the answer has them). One call.

        One or two more if it is time to have the catalog confirm that the principal may read the table: a catalog tells many who may not read a
        table where it is, but does not vend them credentials.
        """
        assert self._in_catalog is not None
        vendor, last = self._in_catalog.vendor, self._newest.get(table.url)
        with self._authorisations.withdrawing(table):
            is_managed = last is not None and last.ratified is not None
            if last is not None and is_managed and self._authorisations.allows(table, last.place.catalog_id):
                managed = vendor.catalog.load_managed(vendor.table)
                if managed is not None and managed[0].id == last.place.catalog_id:
                    return managed
            unity_table = vendor.catalog.load(vendor.table)
            # Also if the table was created again, and credentials of the old one are at hand.
            if vendor.vended_id not in (None, unity_table.id) or not self._authorisations.allows(table, unity_table.id):
                self._confirm(table, unity_table.id)
        return unity_table, None

    def _confirm(self, table: Table, catalog_id: str) -> None:
        """Have the catalog vend credentials for the table with this id, and record that it did."""
        assert self._in_catalog is not None
        principal_key = self._authorisations.key(table)
        asked_s = self._in_catalog.holder.ask()
        self._authorisations.confirm(table, principal_key, catalog_id, asked_s)

    def catalog_id(self, version: TableVersion) -> str | None:
        if self._in_catalog is None or version.metadata is None or not version.metadata.state:
            return None
        return Place.parse(version.metadata.state).catalog_id

    def is_authorised(self, table: Table, version: TableVersion) -> bool:
        if self._in_catalog is None or not table.url.startswith(CATALOG_SCHEME):
            return True
        catalog_id = self.catalog_id(version)
        return catalog_id is not None and self._authorisations.allows(table, catalog_id)

    def authorise(self, table: Table, catalog_id: str | None) -> None:
        if self._in_catalog is None or not table.url.startswith(CATALOG_SCHEME):
            return
        if self._authorisations.allows(table, catalog_id):
            return
        # One process of the host asks, the others wait for its answer. It asks for the whole table: the answer to the question for credentials
        # does not have its row filters and column masks.
        vendor = self._in_catalog.vendor
        with self._parts.host.lock("authorise", table.id, pauses=True):
            if self._authorisations.allows(table, catalog_id):
                return
            with self._authorisations.withdrawing(table):
                unity_table = vendor.catalog.load(vendor.table)
                if unity_table.id != catalog_id:
                    raise replaced_table_error(vendor.name, vendor.table)
                self._confirm(table, unity_table.id)

    def _ratified(self, place: Place) -> RatifiedCommits:
        assert self._in_catalog is not None
        assert place.catalog_id is not None
        try:
            vendor = self._in_catalog.vendor
            return vendor.catalog.ratified_commits(vendor.table, place.catalog_id, place.location)
        except UfsNotFoundError as problem:
            # The race: the table was dropped after the catalog had told its id. Another table may have its name now.
            raise SourceChangedError(str(problem)) from problem

    # --- versions ---------------------------------------------------------------------------------

    def _version(self, table: Table, place: Place, state: DeltaState) -> TableVersion:
        version = state.memo.get((table, self._parts.ufs.scope))
        if version is None:
            try:
                version = self._get_files(table, place, state).version(state)
            except UNREADABLE as problem:
                redacted_path = redact("path", table.url)
                raise_ours(
                    DamagedFileError(
                        f"{redacted_path}: version {state.version} of the Delta table cannot be read: {describe_fault(problem)}: {RESTORE_LOG}"
                    ),
                    problem,
                )
            state.memo[table, self._parts.ufs.scope] = version
        assert isinstance(version, TableVersion)
        return version

    def _get_files(self, table: Table, place: Place, state: DeltaState) -> DeltaFiles:
        """The object that builds the table's versions. It is reused as long as the columns stay the same."""
        files = self._files.get(table.url)
        if files is None or not files.fits(table, place, state):
            files = DeltaFiles(table, place, state, self._parts.ufs.url_of)
            self._files = {**self._files, table.url: files}
        return files

    # --- what views show --------------------------------------------------------------------------

    def history(self, table: Table) -> list[dict[str, Any]] | None:
        return read_again(lambda: self._history(self._read_newest(table)), SourceChangedError)

    def _history(self, newest: Newest) -> list[dict[str, Any]]:
        rows, log, commits = [], newest.log, newest.commits()
        for (version, file), (_, at_ms) in zip(commits, log.commit_times(newest.state, commits), strict=True):
            actions = log.read_commit(file)
            info: Mapping[str, Any] = next((action["commitInfo"] for action in actions if action.get("commitInfo")), {})
            added = [Add.from_action(action["add"]) for action in actions if action.get("add")]
            counts = [None if add.parsed is None else add.parsed.rows for add in added]
            known_counts = [count for count in counts if count is not None]
            rows.append(
                {
                    "version": version,
                    "committed_at": at_ms / 1000,
                    "operation": str(info.get("operation", "unknown")).lower(),
                    "write_id": None,
                    "files_added": len(added),
                    "rows_added": sum(known_counts) if len(known_counts) == len(counts) else None,
                }
            )
        return rows

    def details(self, table: Table, version: TableVersion) -> dict[str, Any]:
        metadata = require_metadata(table, version)
        position = cast(int, metadata.position)
        log = self._log(Place.parse(metadata.state) if metadata.state else Place(table.url))
        # A log without the version, which was cleaned up since, still says what the table is now.
        state = log.find_cached_state(metadata.table_id, position) or log.cached_state() or log.read_state(position)
        protocol = {name: state.protocol.get(name) for name in ("minReaderVersion", "readerFeatures")}
        return {
            "table_id": metadata.table_id,
            "position": metadata.position,
            "properties": state.configuration,
            **protocol,
        }


@dataclasses.dataclass(frozen=True)
class InCatalog:
    """A table as a Unity catalog has it: the vendor and the holder of its credentials, and for how long an authorisation holds."""

    vendor: UnityCredentialVendor
    holder: CredentialHolder
    authorise_every_s: float


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a table is: the URL of its directory. For a table that is named by a catalog also its id there, and its `location` as the catalog
    spells it."""

    url: str
    catalog_id: str | None = None
    location: str = ""

    @property
    def identity(self) -> tuple[str, ...]:
        """What distinguishes the table from others that have the same log: nothing if it is named by its path."""
        return () if self.catalog_id is None else (self.catalog_id, self.url)

    @property
    def text(self) -> str:
        """The place of a table that a catalog names, as a text that `parse` reads; empty for a table that is named by its path."""
        return "" if self.catalog_id is None else json.dumps([self.url, self.catalog_id, self.location])

    @classmethod
    def parse(cls, text: str) -> Place:
        """The place that `text` returned. Raises one of `decoding.UNREADABLE` for any other text."""
        url, catalog_id, location = map(as_text, json.loads(text))
        return cls(url, catalog_id, location)


@dataclasses.dataclass(frozen=True)
class Newest:
    """A table's newest state, its log, and what the catalog says about commits that may not be in the log yet."""

    place: Place
    log: DeltaLog
    state: DeltaState
    ratified: RatifiedCommits | None = None

    def commits(self) -> list[tuple[int, FileVersion]]:
        """(version, file) of the commits that the log and the catalog still have, oldest first. One LIST.

        For a table that its catalog manages, only those up to this state: the catalog may not have ratified later ones.
        """
        commits = self.log.commits(self.ratified)
        return commits if self.ratified is None else [commit for commit in commits if commit[0] <= self.state.version]


class DeltaFiles:
    """Builds the versions of a table as long as its columns stay the same. Each file that it has built is reused for later versions.

    Raises one of `decoding.UNREADABLE` for malformed metadata.
    """

    def __init__(self, table: Table, place: Place, state: DeltaState, url_of: Callable[[str], str]) -> None:
        self._table = table
        self._place = place
        self.root = place.url
        # The paths in deletion vectors begin below it. Those of a table in a catalog are whole URLs.
        self.table_url = table.url
        self._url_of = url_of
        self._definitions = _column_definitions(state)
        self._schema = arrow_schema(state.schema)
        self._columns = stored_columns(state.schema, state.mapping)
        self._stored = {column.name: column.stored for column in self._columns}
        self._partitions = {self._stored[name]: name for name in state.partition_columns}
        self._data = [self._schema.field(name) for name in self._schema.names if name not in state.partition_columns]
        # Another table may later be at this path and have files of the same names.
        self.identity = f"{IMMUTABLE}{key_of(state.table_id)}"
        self._built_files: dict[Key, tuple[Add, FileVersion]] = {}
        self._columns_of_base: tuple[BaseFiles, DeltaColumns] | None = None

    def fits(self, table: Table, place: Place, state: DeltaState) -> bool:
        return (table, place, _column_definitions(state)) == (self._table, self._place, self._definitions)

    def version(self, state: DeltaState) -> TableVersion:
        """The version of the table for a state of the log."""
        statistics_by_text = {add.statistics: file.statistics for add, file in self._built_files.values()}
        built_files = {}
        for key, add in state.files.added.items():
            built_file = self._built_files.get(key)
            built_files[key] = (
                built_file
                if built_file is not None and built_file[0] == add
                else (add, self._file(add, statistics_by_text))
            )
        self._built_files = built_files
        # Readers compare versions by digest. The version number is left out, so that two versions with the same files count as one.
        parts = state.metadata["schemaString"], len(state.files), *state.files.sums, *self._place.identity
        digest = digest_of(state.table_id, *parts)
        metadata = VersionMetadata(
            state.table_id,
            state.version,
            self._place.text,
            digest,
            (),
            text_of_schema(self._schema),
            state.partition_columns,
            tuple((self._row_names(new), self._row_names(old)) for new, old in state.rewrites),
            state.version,
        )
        added_files = [file for _, file in built_files.values()]
        if state.files.base is None:
            return TableVersion(self._table.id, tuple(sorted(added_files, key=lambda file: file.url)), metadata)
        if self._columns_of_base is None or self._columns_of_base[0] is not state.files.base:
            self._columns_of_base = state.files.base, DeltaColumns(self, state.files.base)
        columns = self._columns_of_base[1]
        files = ColumnFiles.merge(columns, columns.find_rows(state.files.rows), added_files)
        return TableVersion(self._table.id, files, metadata)

    @property
    def partition_columns(self) -> Collection[str]:
        """The names of the partition columns."""
        return self._partitions.values()

    def urls(self, base: BaseFiles) -> pa.Array:
        """The URLs of the files of a base, in the order of its rows."""
        urls = pc.binary_join_element_wise(pa.scalar(self.root), base.paths, "/")
        # Only encoded and absolute paths need work: any other path is the end of its file's URL.
        special = as_bools(pc.match_substring_regex(base.paths, r"%|^([A-Za-z][A-Za-z0-9+.-]*:|/)"))
        if not special.any():
            return urls
        paths = base.paths.filter(pa.array(special))
        parts = pc.extract_regex(paths, r"(?s)^(?P<directory>(?:.*/)?)(?P<name>[^/]*)$")
        directories = pc.dictionary_encode(pc.struct_field(parts, "directory"))
        names = pc.struct_field(parts, "name")
        if (
            pc.any(pc.match_substring(names, "%")).as_py()
            or pc.any(pc.match_substring_regex(directories.dictionary, r"^([A-Za-z][A-Za-z0-9+.-]*:|/)")).as_py()
        ):
            decoded = pa.array([self.url(path) for path in paths.to_pylist()], pa.string())
        else:
            decoded_directories = pa.array([self.url(path) for path in directories.dictionary.to_pylist()], pa.string())
            decoded = pc.binary_join_element_wise(decoded_directories.take(directories.indices), names, "")
        return pc.replace_with_mask(urls, pa.array(special), decoded)

    def partition_texts(self, base: BaseFiles, name: str) -> pa.Array:
        """The values of a partition column in the files of a base, as text."""
        texts = base.partition_values(self._stored[name])
        kind = self._schema.field(name).type
        if not pa.types.is_timestamp(kind) or kind.tz is None:
            return texts
        distinct = pc.dictionary_encode(texts)
        return pa.array([_add_zone(text, kind) for text in distinct.dictionary.to_pylist()], pa.string()).take(
            distinct.indices
        )

    def statistics(self, base: BaseFiles, name: str) -> StatsColumns | None:
        """The statistics of a column in the files of a base; None for a column that the files do not store, or that is nested."""
        field = next((field for field in self._data if field.name == name), None)
        if field is None or pa.types.is_nested(field.type):
            return None
        stored_name = self._stored[name]
        return base.statistics(
            stored_name, field.type, lambda text: _to_column_stats(Statistics.parse(text), stored_name, field.type)
        )

    def file(self, add: Add) -> FileVersion:
        """The file that an `add` action names. Raises DamagedFileError if its deletion vector is malformed."""
        with self._reporting_damage():
            return self._file(add, {})

    def deletes_of(self, url: str, vector: Vector | None) -> tuple[DeletionVector, ...]:
        """`FileVersion.deletes` of the file at `url`. `vector`: its deletion vector, if it has one. Raises DamagedFileError if that is malformed."""
        with self._reporting_damage():
            return _to_deletes(self.table_url, self.root, vector, url, self._url_of)

    @contextlib.contextmanager
    def _reporting_damage(self) -> Iterator[None]:
        """Turn an error that a malformed action causes into DamagedFileError."""
        try:
            yield
        except UNREADABLE as problem:
            redacted_path = redact("path", self._table.url)
            raise_ours(
                DamagedFileError(
                    f"{redacted_path}: the Delta table's log cannot be read: {describe_fault(problem)}: {RESTORE_LOG}"
                ),
                problem,
            )

    def _file(self, add: Add, statistics_by_text: Mapping[str | None, FileStatistics | None]) -> FileVersion:
        url = self.url(add.path)
        values = dict(add.partition)
        statistics = (
            statistics_by_text[add.statistics]
            if add.statistics in statistics_by_text
            else _to_statistics(add, self._data, self._stored)
        )
        return FileVersion(
            url,
            add.size,
            self.identity,
            modified_at_s=add.modified_ms / 1000,
            partition=tuple(
                (name, _add_zone(values.get(stored_name), self._schema.field(name).type))
                for stored_name, name in self._partitions.items()
            ),
            deletes=_to_deletes(self.table_url, self.root, add.vector, url, self._url_of),
            statistics=statistics,
            columns=self._columns,
        )

    def url(self, spelled: str) -> str:
        path = decode_path(spelled)
        return _url_elsewhere(self.root, path, self._url_of) if is_absolute(spelled) else f"{self.root}/{path}"

    def _row_names(self, keys: Sequence[Key]) -> tuple[str, ...]:
        urls = ((self.url(path), vector) for path, vector in keys)
        return tuple(
            key_of(name, f"{vector}#{url.removeprefix(self.table_url + '/')}") if vector else name
            for url, vector in urls
            for name in (key_of(url, self.identity),)
        )


class DeltaColumns(FileColumns):
    """The files of a base as the columns of a version, ascending by URL."""

    def __init__(self, files: DeltaFiles, base: BaseFiles) -> None:
        self._files = files
        self._base = base
        urls = files.urls(base)
        in_order = len(urls) < 2 or pc.all(pc.less_equal(urls.slice(0, len(urls) - 1), urls.slice(1))).as_py()
        # The base is sorted by encoded paths, whose order may differ from that of the URLs.
        self._rows = None if in_order else as_int64(pc.sort_indices(urls).cast(pa.int64()))
        self.urls = urls if self._rows is None else urls.take(as_indices(self._rows))
        self.sizes = self._base.sizes if self._rows is None else self._base.sizes[self._rows]
        self._statistics: dict[str, StatsColumns | None] = {}

    def find_rows(self, base_rows: Numbers) -> Numbers:
        """The row numbers in these columns, ascending, of the files in the rows `base_rows` of the base."""
        if self._rows is None:
            return base_rows
        is_live = np.zeros(self._base.rows, np.bool_)
        is_live[base_rows] = True
        return np.flatnonzero(is_live[self._rows])

    def file(self, row: int) -> FileVersion:
        return self._files.file(self._base.add(self._base_row(row)))

    def deletes_of(self, row: int) -> tuple[DeletionVector, ...]:
        return self._files.deletes_of(self.urls[row].as_py(), self._base.vector(self._base_row(row)))

    def _base_row(self, row: int) -> int:
        return row if self._rows is None else int(self._rows[row])

    def identities(self, rows: Numbers) -> pa.Array:
        return pa.repeat(self._files.identity, len(rows))

    def row_names(self, rows: Numbers) -> pa.Array:
        urls, vectors = (values.take(as_indices(rows)) for values in (self.urls, self._vectors))
        has_vector = pc.not_equal(vectors, "")
        if not pc.any(has_vector).as_py():
            return urls
        with_vectors = pc.binary_join_element_wise(urls, self._name_vectors(rows), "\0")
        return pc.if_else(has_vector, with_vectors, urls)

    def _name_vectors(self, rows: Numbers) -> pa.Array:
        """`DeletionVector.name` for each of the files at `rows`; for a file without a vector, the name means nothing."""
        vector_ids, paths = (values.take(as_indices(rows)) for values in (self._vectors, self._paths))
        return pc.binary_join_element_wise(vector_ids, paths, "#")

    @cached_property
    def _paths(self) -> pa.Array:
        """The files' paths below the table; the URLs of files elsewhere, and of all files if none has a deletion vector, whose name needs a path."""
        if not self.has_deletes.any():
            return self.urls
        prefix = f"{self._files.table_url}/"
        return pc.if_else(pc.starts_with(self.urls, prefix), pc.utf8_slice_codeunits(self.urls, len(prefix)), self.urls)

    def encode_vectors(self, rows: Numbers) -> tuple[pa.Array, pa.Array] | None:
        paths, descriptors = (
            values.take(as_indices(rows)) for values in (self._paths, self._in_order(self._base.descriptors))
        )
        # Arrow does not write JSON, so such paths become objects. So do vectors at absolute paths, which only objects resolve.
        if (
            not pc.all(pc.match_substring_regex(descriptors, r'^\["[iu]",')).as_py()
            or pc.any(pc.match_substring_regex(paths, r'["\\\x00-\x1f]')).as_py()
        ):
            return None
        start = pa.scalar(f'["vector-below", {json.dumps(self._files.root)}, "')
        return self._name_vectors(rows), pc.binary_join_element_wise(start, paths, '", ', descriptors, "]", "")

    def delete_names(self, rows: Numbers) -> pa.Array:
        return self._name_vectors(rows[self.has_deletes[rows]])

    @cached_property
    def has_deletes(self) -> Numbers:
        return as_bools(pc.not_equal(self._vectors, ""))

    @cached_property
    def _vectors(self) -> pa.Array:
        return self._in_order(self._base.vectors)

    @cached_property
    def modified_at_s(self) -> Numbers:
        modified_ms = self._base.modified_ms if self._rows is None else self._base.modified_ms[self._rows]
        return np.asarray(modified_ms / 1000)

    def partition_codes(self) -> tuple[Numbers, Sequence[PartitionValues | None]]:
        codes = encode_rows(map(self.partition_values, self._files.partition_columns), len(self.sizes))
        first_rows = np.unique(codes, return_index=True)[1].tolist()
        return codes, [self.file(row).partition for row in first_rows]

    def partition_values(self, name: str) -> pa.Array:
        return self._in_order(self._files.partition_texts(self._base, name))

    def statistics(self, name: str) -> StatsColumns | None:
        if name not in self._statistics:
            columns = self._files.statistics(self._base, name)
            if columns is not None and self._rows is not None:
                columns = columns.take(as_indices(self._rows))
            self._statistics[name] = columns
        return self._statistics[name]

    def _in_order(self, values: pa.Array) -> pa.Array:
        return values if self._rows is None else values.take(as_indices(self._rows))


def _column_definitions(state: DeltaState) -> tuple[object, ...]:
    return state.table_id, state.metadata["schemaString"], state.partition_columns, state.mapping


def _url_elsewhere(root: str, path: str, url_of: Callable[[str], str]) -> str:
    """The URL of a file with an absolute path. Raises NotSupportedError if the file is in a different kind of store from the table."""
    scheme, colon, location = path.partition(":") if not path.startswith("/") else ("file", ":", path)
    path_scheme, table_scheme = scheme.lower(), root.partition("://")[0].lower()
    # A file's URL is complete if it names this machine: after two slashes comes the name of a host.
    is_complete = re.match(r"/(?!/)|///|//localhost/", location) if path_scheme == "file" else location.startswith("//")
    if not (colon and is_complete) or (
        path_scheme != table_scheme and not {path_scheme, table_scheme} <= {"s3", "s3a", "s3n"}
    ):
        raise NotSupportedError(
            f"{redact('path', root)}: its Delta log names {redact('path', path)}, a file in a different store from the table's, which is "
            "not supported: read the table with format('delta')"
        )
    return url_of("file:///" + location.removeprefix("//localhost").lstrip("/") if path_scheme == "file" else path)


def _add_zone(value: str | None, kind: pa.DataType) -> str | None:
    """A partition value as in the log, but with a Z after a timestamp without a zone, because such a timestamp is in UTC."""
    instant = value is not None and pa.types.is_timestamp(kind) and kind.tz is not None
    return f"{value}Z" if value is not None and instant and not _ZONE.search(value) else value


def _to_deletes(
    table_url: str, root: str, vector: Vector | None, url: str, url_of: Callable[[str], str]
) -> tuple[DeletionVector, ...]:
    if vector is None:
        return ()
    place = vector_url(root, vector.storage, vector.data)
    if vector.storage == "p" and place is not None:
        place = _url_elsewhere(root, decode_path(place), url_of)
    path = url.removeprefix(table_url + "/")
    return (DeletionVector(path, vector.storage, vector.data, vector.offset, vector.size, vector.cardinality, place),)


# --- statistics -----------------------------------------------------------------------------------


def _to_statistics(add: Add, data: Sequence[pa.Field], stored: Mapping[str, str]) -> FileStatistics | None:
    statistics = add.parsed
    if statistics is None:
        return None
    bounds = {field.name: _to_column_stats(statistics, stored[field.name], field.type) for field in data}
    return FileStatistics(statistics.rows, {name: stats for name, stats in bounds.items() if stats is not None})


def _to_column_stats(statistics: Statistics | None, stored_name: str, kind: pa.DataType) -> ColumnStats | None:
    """The statistics of the column that the files call `stored_name`; None if the log states none."""
    if statistics is None or statistics.rows is None:
        return None
    nulls = statistics.nulls.get(stored_name)
    if (
        type(nulls) is not int
        or not 0 <= nulls <= statistics.rows
        or (not statistics.tight and 0 < nulls < statistics.rows)
    ):
        nulls = None
    low = _parse_bound(statistics.low.get(stored_name), kind, False)
    high = _parse_bound(statistics.high.get(stored_name), kind, True)
    if low is None or high is None or low > high:
        low = high = None
    elif pa.types.is_temporal(kind):
        low, high = widened(low, high)  # dates in the files of a converted table may be of the calendar before 1582
    return ColumnStats(low, high, nulls, statistics.rows) if nulls is not None or low is not None else None


def _parse_bound(value: Any, kind: pa.DataType, high: bool) -> Any:
    """A bound in statistics as a value of its column's type; None if it is missing or has another type, which Spark ignores, too."""
    is_number = isinstance(value, (int, decimal.Decimal)) and not isinstance(value, bool)
    if not is_number and not isinstance(value, str):
        return None
    with contextlib.suppress(*UNREADABLE, decimal.InvalidOperation):
        if pa.types.is_string(kind):
            return _text_bound(value, high) if isinstance(value, str) and is_utf8(value) else None
        if pa.types.is_integer(kind):
            if not is_number:
                return None
            return whole if -(2**63) <= (whole := int(value)) < 2**63 else None
        if pa.types.is_decimal(kind):
            exact = as_decimal(str(value)) if is_number else None
            if exact is None or exact.adjusted() > kind.precision - kind.scale:
                return None
            if kind.precision <= EXACT_DIGITS:
                return exact
            if exact in _ENDS:
                return None
            margin = abs(exact) * _ROUNDED if high else -abs(exact) * _ROUNDED  # delta-rs writes decimals as doubles
            rounding = decimal.ROUND_CEILING if high else decimal.ROUND_FLOOR
            return EXACT.add(exact, margin).quantize(decimal.Decimal(1).scaleb(-kind.scale), rounding, EXACT)
        if pa.types.is_floating(kind):
            if not is_number and value not in _FLOATS_AS_TEXTS:
                return None
            number = float(value)
            if math.isnan(number):
                return None
            float32 = number
            # A 32-bit value may be written by the shortest text that identifies it among 32-bit floats. Parsed as a double, that text may be
            # another number, so the nearest 32-bit float is a bound, too. Without `<` a number above all of them would be infinite.
            with contextlib.suppress(OverflowError):
                (float32,) = struct.unpack("<f", struct.pack("<f", number))
            return max(number, float32) if high else min(number, float32)
        if pa.types.is_date(kind):
            return datetime.date.fromisoformat(value[:10])
        if pa.types.is_timestamp(kind):
            text = value[:-1] + "+00:00" if value.endswith("Z") else value
            at = datetime.datetime.fromisoformat(text)
            # Offsets of old local times have seconds (+00:19:32), which writers leave out.
            inexact = _MINUTE if at.tzinfo is not None and text is value else datetime.timedelta(0)
            at = at.astimezone(datetime.timezone.utc) if at.tzinfo else at.replace(tzinfo=datetime.timezone.utc)
            at = at if kind.tz is not None else at.replace(tzinfo=None)
            return at + _MILLISECOND + inexact if high else at - inexact  # writers round down to milliseconds
    return None


def _text_bound(text: str, high: bool) -> str:
    """A bound of a text column, raised if a writer has truncated it.

    Older versions of Delta truncate high bounds and append U+FFFD. They also cut UTF-16 pairs in two, and write `?` for the remaining half.
    """
    if not high or not text.endswith(_CUT):
        return text
    return text.removesuffix(_CUT).removesuffix("?") + _LAST


DELETES["vector"] = DeletionVector.from_json
DELETES["vector-below"] = DeletionVector.from_descriptor
