"""The events of a managed table's log: each is one immutable file, named after its position in the log (like Hive's notification log).

An event is JSON with its position, its table's id, a random nonce of its writer, and a format version. A file that cannot be parsed, or that
belongs to another table, is an error that names the file. `EventFiles` reads and removes the files in the store.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import unquote

import pyarrow as pa

from pyspark_lookup.columnar.types import schema_of_text, spark_schema, text_of_schema
from pyspark_lookup.core.decoding import (
    UNREADABLE,
    as_count,
    as_counts,
    as_number,
    as_positive,
    as_text,
    as_texts,
    describe_fault,
    is_encodable,
    show,
)
from pyspark_lookup.errors import DamagedFileError, NotSupportedError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.stores import LOG_DIRECTORY, FileVersion
from pyspark_lookup.storage.ufs import Ufs

FORMAT = 1
"""The format version of events and checkpoints. Files with a later version are refused."""
PAGE = 250
"""The number of events in a page of a log. A state can tell the versions of the last two pages, see `TableState`."""
_SEAL_BYTES = len(',"crc":"01234567"}')


class LaterReleaseError(DamagedFileError, NotSupportedError):
    """A file of the log has what only a later release knows. What handles damaged files handles it, too: the host's own records are read anew, an
    answer that is at hand is kept, and the outcome of a commit stays unknown."""


class _UnknownError(ValueError):
    """An event has something that this release does not know. The text names it."""


class WriteMode(enum.Enum):
    """The effect of a committed write on the rows of the table.

    APPEND keeps all rows. OVERWRITE replaces all rows of lower write ids. UPSERT replaces the rows that have the keys of its rows. DELETE
    deletes the rows with given keys, DELETE_WHERE the rows for which a predicate is true. COMPACT has the same rows as the writes that it
    replaces, in other files. ALTER changes only the table's definition. It takes a write id (HIVE-21637), so that a list of write ids also
    says which definition is valid.
    """

    APPEND = "append"
    OVERWRITE = "overwrite"
    UPSERT = "upsert"
    DELETE = "delete"
    DELETE_WHERE = "delete_where"
    COMPACT = "compact"
    ALTER = "alter"

    @property
    def by_key(self) -> bool:
        """Whether a write of this mode replaces or deletes the rows that have its keys."""
        return self in (WriteMode.UPSERT, WriteMode.DELETE)


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file of a write: its path below the table's directory, its size in bytes and its number of rows. The file never changes."""

    path: str
    size: int
    rows: int

    @property
    def name(self) -> str:
        """The file's name, which is unique in the table."""
        return self.path.rpartition("/")[2]


@dataclasses.dataclass(frozen=True)
class Definition:
    """A table's columns (Arrow), key columns and properties."""

    schema: pa.Schema
    keys: tuple[str, ...]
    properties: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Identifies a micro-batch: the id of the stream's query, and the number of the micro-batch in this query.

    With it, a micro-batch is committed only once, even if it is written again.
    """

    query: str
    id: int


@dataclasses.dataclass(frozen=True)
class Event:
    """One event. `at_s`: Unix time on its writer's clock, only for people to read, because the clocks of writers differ."""

    kind: ClassVar[str] = ""
    position: int
    table_id: str
    nonce: str
    at_s: float


@dataclasses.dataclass(frozen=True)
class Create(Event):
    """The first event: the table exists, without rows. `page`: the number of events in a page of its log, see `TableState`."""

    kind = "create"
    definition: Definition
    page: int = PAGE


@dataclasses.dataclass(frozen=True)
class Allocate(Event):
    """The event that begins a write and gives it its id."""

    kind = "allocate"
    write_id: int
    mode: WriteMode


@dataclasses.dataclass(frozen=True)
class Write(Event):
    """Files of a write, which nobody reads before its commit.

    `deletes`: delete files, which name rows of other writes. `replaces`: for a compaction, the ids of the writes whose rows it has
    rewritten.
    """

    kind = "write"
    write_id: int
    files: tuple[DataFile, ...]
    deletes: tuple[DataFile, ...] = ()
    replaces: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Commit(Event):
    """The commit of a write: from the event's position on, the write's rows are part of the table.

    `definition`: the table's new definition; None if the write does not change it. `batch`: the micro-batch that the write has written, if
    any.
    """

    kind = "commit"
    write_id: int
    definition: Definition | None = None
    batch: Batch | None = None


@dataclasses.dataclass(frozen=True)
class Abort(Event):
    """The end of a write whose rows will never be visible."""

    kind = "abort"
    write_id: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Vacuum(Event):
    """A vacuum: the files of the writes `write_ids` are being removed, and no version from position `oldest` on needs them."""

    kind = "vacuum"
    write_ids: tuple[int, ...] = ()
    oldest: int = 1


_KINDS: dict[str, type[Event]] = {event.kind: event for event in (Create, Allocate, Write, Commit, Abort, Vacuum)}


def event_bytes(event: Event) -> bytes:
    """The content of an event's file."""
    body = {
        field.name: _plain(getattr(event, field.name))
        for field in dataclasses.fields(event)
        if field.name not in ("position", "table_id", "nonce", "at_s")
    }
    head = {"format": FORMAT, "table": event.table_id, "position": event.position, "kind": event.kind}
    fields = {name: value for name, value in body.items() if value is not None and (value != [] or name == "files")}
    document = {**head, "nonce": event.nonce, "at": event.at_s, **fields}
    return seal(document)


def parse_event(data: bytes, position: int, origin: str) -> Event:
    """The event in a file's content. `origin` names the file in errors.

    Raises LaterReleaseError for an event that only a later release can have written, DamagedFileError for content that is not an event of this
    position.
    """
    document = parse(data, origin)
    try:
        kind = _KINDS.get(as_text(document["kind"]))
        if kind is None:
            raise _UnknownError(f"the kind {show(document['kind'])}")
        head = (
            as_count(document["position"]),
            parse_table_id(document["table"]),
            as_text(document["nonce"]),
            as_number(document["at"]),
        )
        if head[0] != position:
            raise ValueError(f"its position is {head[0]}, but its name says {position}")
        body = {name: read(document[name]) for name, read in _BODIES[kind].items() if name in document}
        unknown = document.keys() - body.keys() - _HEAD
        if unknown:  # a later release may have added a field that changes the meaning of the event
            raise _UnknownError(f"the field {min(unknown)!r}")
        return kind(*head, **body)
    except _UnknownError as problem:
        raise LaterReleaseError(
            f"{origin} has {problem}, which this release does not know: use a newer pyspark_lookup"
        ) from None
    except UNREADABLE as problem:
        raise DamagedFileError(f"{origin} is not an event of a table's log: {describe_fault(problem)}") from None


RESTORE = "restore this file, or remove the table's directory, which loses its rows"


def seal(document: Mapping[str, Any]) -> bytes:
    """The bytes of a JSON object with one more field at its end: the CRC-32 of all bytes before this field."""
    text = json.dumps(document, separators=(",", ":")).encode()[:-1]
    return text + _seal(text)


def _seal(text: bytes | memoryview) -> bytes:
    return b',"crc":"%08x"}' % zlib.crc32(text)


def parse(data: bytes, origin: str) -> dict[str, Any]:
    """The JSON object in one of the log's files. Raises the errors of `parse_event`."""
    try:
        document = json.loads(data)
        if not isinstance(document, dict) or not isinstance(document.get("format"), int):
            raise ValueError("it is not an object with a format version")
    except (ValueError, RecursionError) as problem:
        raise DamagedFileError(f"{origin} is not a file of a table's log: {problem}") from None
    if document["format"] <= FORMAT and not data.endswith(_seal(memoryview(data)[:-_SEAL_BYTES])):
        raise DamagedFileError(f"{origin} is damaged: the checksum at its end is not that of its content")
    if document["format"] > FORMAT:
        raise LaterReleaseError(
            f"{origin} has format version {document['format']}, and this release reads {FORMAT} at most: use a newer pyspark_lookup"
        )
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Definition):
        return definition_json(value)
    if isinstance(value, Batch):
        return [value.query, value.id]
    if isinstance(value, tuple):
        return [[item.path, item.size, item.rows] if isinstance(item, DataFile) else item for item in value]
    return value


def definition_json(definition: Definition) -> dict[str, Any]:
    """A definition as a JSON object, which `parse_definition` reads."""
    keys, properties = list(definition.keys), dict(definition.properties)
    return {"schema": text_of_schema(definition.schema), "keys": keys, "properties": properties}


def parse_definition(record: Any) -> Definition:
    """The definition that `definition_json` wrote. Raises one of the errors in `UNREADABLE` for a malformed record."""
    keys, schema = as_texts(record["keys"]), schema_of_text(as_text(record["schema"]))
    properties = {as_text(key): as_text(value) for key, value in record["properties"].items()}
    lower_names = {name.lower() for name in schema.names}
    if len(lower_names) < len(schema.names) or not set(keys) <= set(schema.names):
        raise ValueError("column names are not unique, or a key is not among them")
    spark_schema(schema, "")
    return Definition(schema, keys, properties)


def parse_files(records: Any) -> tuple[DataFile, ...]:
    """The files that an event or a checkpoint lists. Raises TypeError or ValueError for malformed records."""
    return tuple(DataFile(_parse_path(path), as_count(size), as_count(rows)) for path, size, rows in records)


def _parse_mode(value: Any) -> WriteMode:
    try:
        return WriteMode(as_text(value))
    except ValueError:
        raise _UnknownError(f"the write mode {show(value)}") from None


def _parse_path(value: Any) -> str:
    """A path below the table's directory.

    Raises ValueError for a path that leads out of that directory: it might name a file that the reader may read but the table's writer may
    not.
    """
    path = as_text(value)
    # Some stores decode a URL's percent signs, and the decoded path may contain `..`.
    for spelling in (path, unquote(path)):
        leaves_table = any(part in ("", ".", "..") for part in spelling.split("/"))
        if leaves_table or "\\" in spelling or any(ord(char) < 32 for char in spelling) or not is_encodable(spelling):
            raise ValueError(f"{show(path)} is not a path below the table")
    return path


def parse_table_id(value: Any) -> str:
    """A table's id. Raises TypeError or ValueError if it is malformed."""
    if not as_text(value):
        raise ValueError("the table id is empty")
    return str(value)


def _write_id(value: Any) -> int:
    if as_count(value) < 1:
        raise ValueError(f"{value} is not a write id: write ids begin at 1")
    return int(value)


def _write_ids(value: Any) -> tuple[int, ...]:
    return tuple(map(_write_id, as_counts(value)))


def _batch(value: Any) -> Batch:
    query, number = value
    return Batch(as_text(query), as_count(number))


_HEAD = {"format", "table", "position", "kind", "nonce", "at", "crc"}
_BODIES: dict[type[Event], dict[str, Any]] = {
    Create: {"definition": parse_definition, "page": as_positive},
    Allocate: {"write_id": _write_id, "mode": _parse_mode},
    Write: {"write_id": _write_id, "files": parse_files, "deletes": parse_files, "replaces": _write_ids},
    Commit: {"write_id": _write_id, "definition": parse_definition, "batch": _batch},
    Abort: {"write_id": _write_id, "reason": as_text},
    Vacuum: {"write_ids": _write_ids, "oldest": as_count},
}


DIGITS = 20


class EventFiles:
    """The events of the table at `url`, as files in the store."""

    def __init__(self, ufs: Ufs, url: str) -> None:
        self._ufs = ufs
        self.url = url
        self._directory = f"{url}/{LOG_DIRECTORY}/log"

    @staticmethod
    def event_path(url: str, position: int) -> str:
        """The URL of the event at a position of the log of the table at `url`."""
        return f"{url}/{LOG_DIRECTORY}/log/{position:0{DIGITS}d}.json"

    def path(self, position: int) -> str:
        return self.event_path(self.url, position)

    def find_meta(self, position: int) -> FileVersion | None:
        """The file of the event at a position, from the store; None if there is no such event."""
        return self._ufs.find_meta(self.path(position))

    def list_following(self, position: int, at_most: int | None = None) -> list[tuple[int, FileVersion]]:
        """(position, file) of each event after a position, in order. One LIST."""
        files = self._ufs.list_files(self._directory, after=f"{position:0{DIGITS}d}.json", at_most=at_most)
        named_files = ((file.url.rsplit("/", 1)[-1], file) for file in files)
        return [(self._parse_position(name, file), file) for name, file in named_files if name.endswith(".json")]

    def _parse_position(self, name: str, file: FileVersion) -> int:
        stem = name.removesuffix(".json")
        if not stem.isdecimal():
            raise DamagedFileError(f"{redact('path', file.url)} is not an event of a table's log: move it elsewhere")
        return int(stem)

    def read_following(self, position: int, table_id: str | None) -> list[tuple[FileVersion, Event]]:
        """(file, event) of all events after a position. One LIST, and one read per event.

        `table_id`: the id of the table; None: the id in the first of these events. Raises DamagedFileError if the log lacks an event of this
        table but has a later one.
        """
        files = dict(self.list_following(position))
        following: list[FileVersion] = []
        while files:
            next_position = position + len(following) + 1
            # The race: a listing of a local directory in which somebody puts two files may show only the later one.
            file = files.pop(next_position, None) or self.find_meta(next_position)
            if file is None:
                break
            following.append(file)
        events = self.read(following)
        if files:
            own_id = table_id or (events[0][1].table_id if events else None)
            # The race: a slow writer of a dropped table may put an event into the log of the next table at this path, until it notices and
            # removes the event. So an event after a gap is damage only if it belongs to this table.
            if own_id is None or any(event.table_id == own_id for _, event in self.read(list(files.values()))):
                raise DamagedFileError(
                    f"{redact('path', self.url)}: the log lacks event {position + len(events) + 1} but has event {min(files)}: "
                    "restore the missing file, or remove the table's directory, which loses its rows"
                )
        return events

    def delete(self, positions: Sequence[int]) -> None:
        """Remove events, in the order of their positions.

        The race: a reader may be reading these events. It asks for the next event first, and then again for the last event that it knows, so
        it notices the removal. S3 removes a thousand files at once, in no order; see `TRUSTED_S`.
        """
        self._ufs.delete_many(self._directory, [f"{position:0{DIGITS}d}.json" for position in positions])

    def read(self, files: Sequence[FileVersion]) -> list[tuple[FileVersion, Event]]:
        """(file, event) for each of these files. Raises DamagedFileError for a file that is not an event, NotSupportedError for an event of a
        later format."""
        texts = self._ufs.read_many([(file.as_immutable(), [(0, file.size)]) for file in files])
        return [(file, self._event(file, text)) for file, (text,) in zip(files, texts, strict=True)]

    def _event(self, file: FileVersion, text: bytes) -> Event:
        position = self._parse_position(file.url.rsplit("/", 1)[-1], file)
        try:
            return parse_event(text, position, redact("path", file.url))
        except DamagedFileError:  # the bytes may have been damaged in transfer: read them once more
            (reread_text,) = self._ufs.read_ranges(file.as_immutable(), [(0, file.size)])
        try:
            return parse_event(reread_text, position, redact("path", file.url))
        except LaterReleaseError:
            raise
        except DamagedFileError as problem:
            raise DamagedFileError(f"{problem}: {RESTORE}") from None

    def is_listed(self, position: int, nonce: str) -> bool:
        """Whether a LIST of the log shows the event with this nonce at a position. For a check of stores that say that the event's file is
        missing."""
        files = [file for _, file in self.list_following(position - 1, at_most=1)]
        return any((event.position, event.nonce) == (position, nonce) for _, event in self.read(files))
