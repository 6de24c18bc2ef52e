"""`IcebergMetadata`: the content of a metadata.json (the specification's "Table Metadata"), format versions 1 to 3.

`Locations`: the URLs of the files that the metadata names.
"""

from __future__ import annotations

import dataclasses
import datetime
import gzip
import io
import itertools
import json
import posixpath
import re
from collections.abc import Mapping
from typing import Any

from pyspark_lookup.core.decoding import UNREADABLE, as_count, as_text, as_texts, describe_fault, show
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.core.memory import check_room
from pyspark_lookup.errors import DamagedFileError, NotSupportedError, OptionError, VersionGoneError, raise_ours
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.groups import Pin, Ref
from pyspark_lookup.storage.disk import digest_of

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?://([^/]*))?")
_PATHS = ("", "file", "hdfs", "viewfs")  # schemes for which the path alone identifies a file
_S3 = ("s3a", "s3n")


def plain_location(location: str) -> str:
    """A location in its canonical spelling: `s3://` instead of `s3a://`; only the path for local disks and HDFS."""
    match = _SCHEME.match(location)
    scheme, path = (match[1].lower(), location[match.end() :]) if match else ("", location)
    if scheme in _PATHS:
        return posixpath.normpath("/" + path.lstrip("/") if match or path.startswith("/") else path)
    authority = match[2] or "" if match else ""
    return f"{'s3' if scheme in _S3 else scheme}://{authority}{path}"


def parse_authority(location: str) -> str:
    """The part of a location before its path: scheme and authority; empty if there is none."""
    match = _SCHEME.match(location)
    return match[0] if match else ""


def _parse_scheme(url: str) -> str:
    scheme = url.partition("://")[0].lower() if "://" in url else "file"
    return "s3" if scheme in _S3 else scheme


class Locations:
    """Maps locations in a table's metadata to URLs. `location`: the table's location as its metadata states it. `root`: the URL at which the
    table lies.

    The two differ if the table was written under another name, or relative to the writer's directory, or was copied.
    """

    def __init__(self, location: str, root: str) -> None:
        self.location, self.root = location, root
        self._plain_location = plain_location(location)
        root_parts, location_parts = plain_location(root).split("/"), self._plain_location.split("/")
        common = 0
        while (
            common < min(len(root_parts), len(location_parts))
            and root_parts[-common - 1] == location_parts[-common - 1]
        ):
            common += 1
        # Location and root may end with the same directories. The directories above this common end are where the writer's files lay, and
        # where they are now if all of them were copied together.
        self._location_above = "/".join(location_parts[: len(location_parts) - common])
        self._root_above = root.rsplit("/", common)[0]
        self._moved = common > 0 and (self._location_above, self._plain_location) != (
            "/".join(root_parts[: len(root_parts) - common]),
            plain_location(root),
        )

    def resolve_url(self, file_location: str) -> str:
        """The URL of a file. Raises ValueError for a relative path that is not below the table's location.

        Raises NotSupportedError for a file in a different store from the table's.
        """
        url = self._resolve(file_location)
        file_scheme, table_scheme = (_parse_scheme(address) for address in (url, self.root))
        if file_scheme != table_scheme and not {file_scheme, table_scheme} <= {"hdfs", "viewfs"}:
            raise NotSupportedError(
                f"{redact('path', self.root)}: its metadata names {redact('path', file_location)}, a file in a different store from the table's, "
                "which is not supported: read the table with format('iceberg')"
            )
        return url

    def _resolve(self, file_location: str) -> str:
        plain = plain_location(file_location)
        if plain == self._plain_location or plain.startswith(self._plain_location + "/"):
            return self.root + plain[len(self._plain_location) :]
        if self._moved and (
            plain.startswith(self._location_above + "/") or (not self._location_above and "://" not in plain)
        ):
            return self._root_above + "/" + plain[len(self._location_above) :].lstrip("/")
        if plain.startswith("/"):
            scheme = _SCHEME.match(file_location)
            if scheme is None or scheme[1].lower() == "file":
                home = _SCHEME.match(self.root)
                # A location that is only a path lies in the table's own store.
                if scheme is None and home is not None and home[1] not in ("file", "s3"):
                    return f"{home[1]}://{home[2] or ''}{plain}"
                return "file://" + plain
            return f"{scheme[1].lower()}://{scheme[2] or ''}{plain}"
        if "://" in plain:
            return plain
        raise ValueError(f"the relative path {file_location!r} is not below the table's location {self.location!r}")


_FORMATS = (1, 2, 3)
_MAIN = "main"
_GZIP = b"\x1f\x8b"
_NAME_MAPPING = "schema.name-mapping.default"
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_MILLISECOND = datetime.timedelta(milliseconds=1)
_SNAPSHOTS_NAMED = 5
_COPIES = 5  # metadata takes about this many times its size in memory: as bytes, as text and as parsed values
_TEXT_AT_MOST = 2**29  # the most bytes of a decompressed metadata file
_FIRST_PARTITION_ID = 1000


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A snapshot. The file `manifest_list` lists its manifests; in some tables of format version 1, `manifests` lists them."""

    id: int
    parent: int | None
    timestamp_ms: int
    manifest_list: str | None
    manifests: tuple[str, ...]
    schema_id: int | None
    operation: str
    summary: Mapping[str, str]

    @classmethod
    def parse(cls, document: Any) -> Snapshot:
        """The snapshot that an object of a metadata file describes. Raises one of `decoding.UNREADABLE` for a malformed object."""
        summary = document.get("summary") or {}
        manifest_list, parent, schema_id = (
            document.get("manifest-list"),
            document.get("parent-snapshot-id"),
            document.get("schema-id"),
        )
        manifests = as_texts(document["manifests"]) if not manifest_list else ()
        return cls(
            int(document["snapshot-id"]),
            None if parent is None else int(parent),
            as_count(document["timestamp-ms"]),
            as_text(manifest_list) if manifest_list else None,
            manifests,
            None if schema_id is None else int(schema_id),
            str(summary.get("operation", "unknown")),
            {str(key): str(value) for key, value in summary.items()},
        )


@dataclasses.dataclass(frozen=True)
class PartitionField:
    """A field of a partition spec: `transform`, applied to the column with the field id `source`.

    `source` is None if the transform takes several columns; such a field is ignored.
    """

    field_id: int
    source: int | None
    transform: str


@dataclasses.dataclass(frozen=True)
class Selection:
    """The snapshot to read (None: the table has no snapshot), the schema to read it with, and a digest of both."""

    snapshot: Snapshot | None
    schema: Mapping[str, Any]
    digest: str


def find_table_id(document: Mapping[str, Any]) -> str:
    """The id of the table that metadata describes: its location if it has no `table-uuid`, which format version 1 does not require."""
    return as_text(document.get("table-uuid") or as_text(document["location"]).rstrip("/"))


class IcebergMetadata:
    """A table, as its metadata file describes it. `place`: the URL by which it is read, which distinguishes it from its copies with the same
    ids.

    Raises one of `decoding.UNREADABLE` for malformed metadata, NotSupportedError for a later format version or encryption.
    """

    def __init__(self, document: Mapping[str, Any], place: str) -> None:
        self._place = place
        self.format = as_count(document["format-version"])
        if self.format not in _FORMATS:
            raise NotSupportedError(
                f"it has format version {self.format}, which is not supported (supported are {', '.join(map(str, _FORMATS))}): read it with "
                "format('iceberg')"
            )
        if document.get("encryption-keys"):
            raise NotSupportedError("it is encrypted, which is not supported: read it with format('iceberg')")
        self.location = as_text(document["location"]).rstrip("/")
        self.table_id = find_table_id(document)
        schemas = document.get("schemas") or [document["schema"]]
        self.schemas: dict[int, Mapping[str, Any]] = {int(schema.get("schema-id", 0)): schema for schema in schemas}
        self.schema_id = int(document.get("current-schema-id", min(self.schemas)))
        specs = document.get("partition-specs") or [{"spec-id": 0, "fields": document["partition-spec"]}]
        self.specs = {
            int(spec["spec-id"]): tuple(map(_partition_field, spec["fields"], itertools.count(_FIRST_PARTITION_ID)))
            for spec in specs
        }
        self.properties = {as_text(key): as_text(value) for key, value in (document.get("properties") or {}).items()}
        self.snapshots = {snapshot.id: snapshot for snapshot in map(Snapshot.parse, document.get("snapshots") or ())}
        self._log = [
            (as_count(entry["timestamp-ms"]), int(entry["snapshot-id"])) for entry in document.get("snapshot-log") or ()
        ]
        refs = document.get("refs") or {}
        self.refs = {as_text(name): (as_text(ref["type"]), int(ref["snapshot-id"])) for name, ref in refs.items()}
        current = document.get("current-snapshot-id")
        self._current = None if current is None or int(current) == -1 else int(current)
        _ = self.schema(self.schema_id), self.name_mapping

    @property
    def definition(self) -> dict[str, Any]:
        """A metadata document without snapshots, with all that is needed to interpret the files of a snapshot."""
        fields = {
            spec_id: [
                {"field-id": field.field_id, "source-id": field.source, "transform": field.transform} for field in spec
            ]
            for spec_id, spec in self.specs.items()
        }
        mapping = self.properties.get(_NAME_MAPPING)
        return {
            "format-version": self.format,
            "location": self.location,
            "table-uuid": self.table_id,
            "schemas": [{**schema, "schema-id": schema_id} for schema_id, schema in self.schemas.items()],
            "current-schema-id": self.schema_id,
            "partition-specs": [{"spec-id": spec_id, "fields": some} for spec_id, some in fields.items()],
            "properties": {} if mapping is None else {_NAME_MAPPING: mapping},
        }

    def schema(self, schema_id: int | None) -> Mapping[str, Any]:
        """The schema with an id (None: the current schema). Raises ValueError if there is no such schema."""
        id_ = self.schema_id if schema_id is None else schema_id
        if id_ not in self.schemas:
            raise ValueError(f"there is no schema {id_}")
        return self.schemas[id_]

    @cached_property
    def name_mapping(self) -> list[Any] | None:
        """The names that the columns have in files without field ids; None if the table has no such mapping."""
        text = self.properties.get(_NAME_MAPPING)
        mapping = None if text is None else json.loads(text)
        if mapping is not None and not isinstance(mapping, list):
            raise ValueError(f"table property {_NAME_MAPPING} = {show(text)} is not a list")
        return mapping

    def choose(self, pin: Pin | None, redacted_path: str) -> Selection:
        """The snapshot and the schema to read for a pin. `redacted_path` names the table in errors.

        Without a pin, or for a branch, this is the latest snapshot with the current schema. For a tag, a time or a snapshot id, it is that
        snapshot with its own schema. Raises VersionGoneError for a time or snapshot id that the table does not have (any more), OptionError
        for a branch or tag that does not exist.
        """
        if pin is None:
            return self._select(None if self._current is None else self._snapshot(self._current, redacted_path), None)
        if isinstance(pin, Ref):
            return self._by_ref(pin, redacted_path)
        if isinstance(pin, datetime.datetime):
            return self._with_own_schema(self._find_by_time(pin, redacted_path))
        if isinstance(pin, int):
            return self._with_own_schema(self._snapshot(pin, redacted_path, " (lookup.version)"))
        raise OptionError(f"option lookup.valid-write-ids is for managed tables, not for {redacted_path}: remove it")

    def find_selection(self, digest: str) -> Selection | None:
        """The snapshot and the schema with this digest; None if no snapshot has it."""
        snapshots = [*self.snapshots.values(), None]
        selections = (
            self._select(snapshot, schema_id)
            for snapshot in snapshots
            for schema_id in {None, None if snapshot is None else snapshot.schema_id}
        )
        return next((selection for selection in selections if selection.digest == digest), None)

    def _with_own_schema(self, snapshot: Snapshot) -> Selection:
        return self._select(snapshot, snapshot.schema_id)

    def _select(self, snapshot: Snapshot | None, schema_id: int | None) -> Selection:
        schema = self.schema(schema_id if schema_id in self.schemas else None)
        content = json.dumps([schema["fields"], self.name_mapping], sort_keys=True)
        digest = digest_of("iceberg", self._place, self.table_id, "" if snapshot is None else str(snapshot.id), content)
        return Selection(snapshot, schema, digest)

    def _by_ref(self, ref: Ref, redacted_path: str) -> Selection:
        refs = self.refs
        if _MAIN not in refs and self._current is not None:
            refs = {**refs, _MAIN: ("branch", self._current)}
        if (ref.kind, ref.name) == ("branch", _MAIN) and _MAIN not in refs:
            return self.choose(None, redacted_path)  # nothing has been committed yet
        kind, snapshot_id = refs.get(ref.name, ("", 0))
        if kind != ref.kind:
            existing_names = ", ".join(sorted(name for name, (kind, _) in refs.items() if kind == ref.kind))
            raise OptionError(
                f"option lookup.{ref.kind} = {ref.name!r}: {redacted_path} has no such {ref.kind}; it has {existing_names or 'none'}"
            )
        snapshot = self._snapshot(snapshot_id, redacted_path)
        return self._with_own_schema(snapshot) if ref.kind == "tag" else self._select(snapshot, None)

    def _snapshot(self, snapshot_id: int, redacted_path: str, named_by: str = "") -> Snapshot:
        if snapshot_id not in self.snapshots:
            newest = sorted(self.snapshots.values(), key=lambda snapshot: snapshot.timestamp_ms)[-_SNAPSHOTS_NAMED:]
            existing_ids = ", ".join(str(snapshot.id) for snapshot in newest) or "none"
            raise VersionGoneError(
                f"{redacted_path} has no snapshot {snapshot_id}{named_by}: it has expired, or was never one of this table's; the newest are {existing_ids}"
            )
        return self.snapshots[snapshot_id]

    def _find_by_time(self, at: datetime.datetime, redacted_path: str) -> Snapshot:
        at_ms = (at - _EPOCH) // _MILLISECOND
        # The log lists snapshots in the order in which they became current, rollbacks included. Times may decrease, because clocks may have
        # been set back.
        snapshot_ids = [snapshot_id for time_ms, snapshot_id in self._log if time_ms <= at_ms]
        if not snapshot_ids:
            first = (_EPOCH + self._log[0][0] * _MILLISECOND).isoformat() if self._log else None
            reason = "its metadata lists no snapshots" if first is None else f"its first snapshot dates from {first}"
            raise VersionGoneError(
                f"{redacted_path} has no snapshot as old as {at.isoformat()} (lookup.timestamp): {reason}"
            )
        return self._snapshot(snapshot_ids[-1], redacted_path)


def _partition_field(document: Any, number: int) -> PartitionField:
    """A field of a partition spec. `number`: its id, for format version 1, which may leave it out."""
    sources = document.get("source-ids") or [document.get("source-id")]
    source = sources[0] if len(sources) == 1 else None
    id_ = int(document.get("field-id", number))
    return PartitionField(id_, None if source is None else int(source), as_text(document["transform"]))


def _decompress(data: bytes) -> bytes:
    """The content of a gzip file. Raises ValueError if it is larger than `_TEXT_AT_MOST`, before they are all in memory."""
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        text = file.read(_TEXT_AT_MOST + 1)
    if len(text) > _TEXT_AT_MOST:
        raise ValueError(f"it decompresses to more than {_TEXT_AT_MOST} bytes")
    return text


def parse_metadata(location: str, data: bytes, place: str) -> IcebergMetadata:
    """The metadata in a file's content. Raises DamagedFileError that names the file, NotSupportedError for a later format."""
    try:
        text = _decompress(data) if data[:2] == _GZIP else data
        redacted_path = redact("path", location)
        check_room(len(text) * _COPIES, f"{redacted_path}: {len(text)} bytes of Iceberg metadata")
        document = json.loads(text)
    except (*UNREADABLE, EOFError, OSError) as problem:
        fault = describe_fault(problem)
        raise_ours(
            DamagedFileError(f"{redact('path', location)} is not Iceberg metadata: {fault}: restore this file"), problem
        )
    return parse_metadata_json(location, document, place)


def parse_metadata_json(location: str, document: Any, place: str) -> IcebergMetadata:
    """The metadata in a JSON document, which a catalog sent or a file has. Raises the errors of `parse_metadata`."""
    try:
        return IcebergMetadata(document, place)
    except NotSupportedError as problem:
        raise NotSupportedError(f"Iceberg table {redact('path', place)}: {problem}") from None
    except UNREADABLE as problem:
        fault = describe_fault(problem)
        raise_ours(
            DamagedFileError(f"{redact('path', location)} is not Iceberg metadata: {fault}: restore this file"), problem
        )
