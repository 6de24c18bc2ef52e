"""`IcebergMetadata`: what a table's metadata.json says (the specification's "Table Metadata"), formats 1 to 3."""

from __future__ import annotations

import dataclasses
import datetime
import gzip
import io
import itertools
import json
from collections.abc import Mapping
from typing import Any

from pyspark_lookup.base.decoding import UNREADABLE, count_of, show, text_of, texts_of
from pyspark_lookup.base.errors import DamagedFileError, NotSupportedError, OptionError, VersionGoneError, raise_ours
from pyspark_lookup.base.forks import cached_property
from pyspark_lookup.base.memory import check_room
from pyspark_lookup.io.disk import key_of
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.iceberg_options import Ref
from pyspark_lookup.options.read_write_options import Pin

_FORMATS = (1, 2, 3)
_MAIN = "main"
_GZIP = b"\x1f\x8b"
_NAME_MAPPING = "schema.name-mapping.default"
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_MILLISECOND = datetime.timedelta(milliseconds=1)
_SHOWN = 5
_COPIES = 5  # of metadata in memory: its bytes, its text, and what is parsed
_TEXT_AT_MOST = 2**29  # bytes of JSON, decompressed
_FIRST_PARTITION_ID = 1000


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A snapshot: its manifests are in the file `manifest_list`, or (format 1) are `manifests`."""

    id: int
    parent: int | None
    timestamp_ms: int
    manifest_list: str | None
    manifests: tuple[str, ...]
    schema_id: int | None
    operation: str
    summary: Mapping[str, str]

    @classmethod
    def of(cls, found: Any) -> Snapshot:
        """Raises one of `decoding.UNREADABLE` for what is none."""
        summary = found.get("summary") or {}
        listed, parent, schema_id = found.get("manifest-list"), found.get("parent-snapshot-id"), found.get("schema-id")
        manifests = texts_of(found["manifests"]) if not listed else ()
        return cls(
            int(found["snapshot-id"]),
            None if parent is None else int(parent),
            count_of(found["timestamp-ms"]),
            text_of(listed) if listed else None,
            manifests,
            None if schema_id is None else int(schema_id),
            str(summary.get("operation", "unknown")),
            {str(key): str(value) for key, value in summary.items()},
        )


@dataclasses.dataclass(frozen=True)
class PartitionField:
    """A field of a partition spec: `transform` of the column with field id `source`; None: of several, which is not known here."""

    field_id: int
    source: int | None
    transform: str


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What a reference to a table means: a snapshot (None: the table has none) and the schema it is read with."""

    snapshot: Snapshot | None
    schema: Mapping[str, Any]
    digest: str


class IcebergMetadata:
    """A table as a metadata file describes it. `place`: the URL by which it is read, for a copy has the same ids.

    Raises one of `decoding.UNREADABLE`, NotSupportedError.
    """

    def __init__(self, found: Mapping[str, Any], place: str) -> None:
        self._place = place
        self.format = count_of(found["format-version"])
        if self.format not in _FORMATS:
            raise NotSupportedError(f"it is of format version {self.format}; {', '.join(map(str, _FORMATS))} are known")
        if found.get("encryption-keys"):
            raise NotSupportedError("it is encrypted")
        self.location = text_of(found["location"]).rstrip("/")
        self.table_id = text_of(found.get("table-uuid") or self.location)
        schemas = found.get("schemas") or [found["schema"]]
        self.schemas: dict[int, Mapping[str, Any]] = {int(one.get("schema-id", 0)): one for one in schemas}
        self.schema_id = int(found.get("current-schema-id", min(self.schemas)))
        specs = found.get("partition-specs") or [{"spec-id": 0, "fields": found["partition-spec"]}]
        self.specs = {
            int(spec["spec-id"]): tuple(map(_partition_field, spec["fields"], itertools.count(_FIRST_PARTITION_ID)))
            for spec in specs
        }
        self.properties = {text_of(key): text_of(value) for key, value in (found.get("properties") or {}).items()}
        self.snapshots = {one.id: one for one in map(Snapshot.of, found.get("snapshots") or ())}
        self._log = [
            (count_of(one["timestamp-ms"]), int(one["snapshot-id"])) for one in found.get("snapshot-log") or ()
        ]
        refs = found.get("refs") or {}
        self.refs = {text_of(name): (text_of(ref["type"]), int(ref["snapshot-id"])) for name, ref in refs.items()}
        current = found.get("current-snapshot-id")
        self._current = None if current is None or int(current) == -1 else int(current)
        _ = self.schema(self.schema_id), self.name_mapping

    def schema(self, schema_id: int | None) -> Mapping[str, Any]:
        """A schema by its id (None: the current one). Raises ValueError if there is none."""
        wanted = self.schema_id if schema_id is None else schema_id
        if wanted not in self.schemas:
            raise ValueError(f"there is no schema {wanted}")
        return self.schemas[wanted]

    @cached_property
    def name_mapping(self) -> list[Any] | None:
        """By which names files without field ids have the columns; None: nothing is said of it."""
        text = self.properties.get(_NAME_MAPPING)
        found = None if text is None else json.loads(text)
        if found is not None and not isinstance(found, list):
            raise ValueError(f"{_NAME_MAPPING} = {show(text)}")
        return found

    def choose(self, pin: Pin | None, shown: str) -> Chosen:
        """What a reference means: the current snapshot and schema; those of a branch; of a tag, a time, or a snapshot id, with its own schema.

        Raises VersionGoneError, OptionError for a branch or tag that there is not. `shown`: the table in errors.
        """
        if pin is None:
            return self._chosen(None if self._current is None else self._snapshot(self._current, shown), None)
        if isinstance(pin, Ref):
            return self._by_ref(pin, shown)
        if isinstance(pin, datetime.datetime):
            return self._own(self._at(pin, shown))
        if isinstance(pin, int):
            return self._own(self._snapshot(pin, shown))
        raise OptionError(f"option lookup.valid-write-ids is for managed tables, not for {shown}")

    def named(self, digest: str) -> Chosen | None:
        """The snapshot and schema with that digest; None if there are none."""
        every = [*self.snapshots.values(), None]
        chosen = (self._chosen(one, id_) for one in every for id_ in {None, None if one is None else one.schema_id})
        return next((one for one in chosen if one.digest == digest), None)

    def _own(self, snapshot: Snapshot) -> Chosen:
        return self._chosen(snapshot, snapshot.schema_id)

    def _chosen(self, snapshot: Snapshot | None, schema_id: int | None) -> Chosen:
        schema = self.schema(schema_id if schema_id in self.schemas else None)
        said = json.dumps([schema["fields"], self.name_mapping], sort_keys=True)
        digest = key_of("iceberg", self._place, self.table_id, "" if snapshot is None else str(snapshot.id), said)
        return Chosen(snapshot, schema, digest)

    def _by_ref(self, ref: Ref, shown: str) -> Chosen:
        refs = self.refs
        if _MAIN not in refs and self._current is not None:
            refs = {**refs, _MAIN: ("branch", self._current)}
        if (ref.kind, ref.name) == ("branch", _MAIN) and _MAIN not in refs:
            return self.choose(None, shown)  # nothing was committed yet
        kind, snapshot_id = refs.get(ref.name, ("", 0))
        if kind != ref.kind:
            there = ", ".join(sorted(name for name, (kind, _) in refs.items() if kind == ref.kind))
            raise OptionError(
                f"option lookup.{ref.kind} = {ref.name!r}: {shown} has no such {ref.kind}; it has {there or 'none'}"
            )
        snapshot = self._snapshot(snapshot_id, shown)
        return self._own(snapshot) if ref.kind == "tag" else self._chosen(snapshot, None)

    def _snapshot(self, snapshot_id: int, shown: str) -> Snapshot:
        if snapshot_id not in self.snapshots:
            newest = sorted(self.snapshots.values(), key=lambda one: one.timestamp_ms)[-_SHOWN:]
            there = ", ".join(str(one.id) for one in newest) or "none"
            raise VersionGoneError(
                f"{shown} has no snapshot {snapshot_id}: it was expired, or never was one of this table; the newest are {there}"
            )
        return self.snapshots[snapshot_id]

    def _at(self, at: datetime.datetime, shown: str) -> Snapshot:
        at_ms = (at - _EPOCH) // _MILLISECOND
        # In the order in which they became the current one, also by a rollback; clocks may have been set back.
        found = [snapshot_id for time_ms, snapshot_id in self._log if time_ms <= at_ms]
        if not found:
            since = (_EPOCH + self._log[0][0] * _MILLISECOND).isoformat() if self._log else "never"
            raise VersionGoneError(
                f"{shown} has no snapshot of {at.isoformat()} (lookup.timestamp): the first that it tells of is of {since}"
            )
        return self._snapshot(found[-1], shown)


def _partition_field(found: Any, number: int) -> PartitionField:
    """`number`: its id, if format 1 does not say it."""
    sources = found.get("source-ids") or [found.get("source-id")]
    source = sources[0] if len(sources) == 1 else None
    id_ = int(found.get("field-id", number))
    return PartitionField(id_, None if source is None else int(source), text_of(found["transform"]))


def _decompressed(data: bytes) -> bytes:
    """What is in a gzip file. Raises ValueError for more than metadata can be, before it is in memory."""
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        text = file.read(_TEXT_AT_MOST + 1)
    if len(text) > _TEXT_AT_MOST:
        raise ValueError(f"it decompresses to more than {_TEXT_AT_MOST} bytes")
    return text


def parse_metadata(location: str, data: bytes, place: str) -> IcebergMetadata:
    """The metadata in a file. Raises DamagedFileError that names it, NotSupportedError for what is not known here."""
    try:
        text = _decompressed(data) if data[:2] == _GZIP else data
        shown = redact("path", location)
        check_room(len(text) * _COPIES, f"{shown}: {len(text)} bytes of Iceberg metadata")
        return metadata_of_json(location, json.loads(text), place)
    except (*UNREADABLE, EOFError, OSError) as problem:
        raise_ours(DamagedFileError(f"{redact('path', location)} is no Iceberg metadata: {problem}"), problem)


def metadata_of_json(location: str, found: Any, place: str) -> IcebergMetadata:
    """The metadata that a catalog sent, or a file holds. Raises as `parse_metadata`."""
    try:
        return IcebergMetadata(found, place)
    except NotSupportedError as problem:
        raise NotSupportedError(f"{redact('path', place)}, an Iceberg table: {problem}") from None
    except UNREADABLE as problem:
        raise_ours(DamagedFileError(f"{redact('path', location)} is no Iceberg metadata: {problem}"), problem)
