"""`Pointer`: where a table's current metadata lies, according to a version hint, a catalog, or the user, who may give the path of a metadata
file.

`Catalog` asks an Iceberg catalog, through PyIceberg.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pyspark_lookup.core import threads
from pyspark_lookup.core.decoding import UNREADABLE, as_text
from pyspark_lookup.errors import (
    CatalogUnavailableError,
    DamagedFileError,
    OptionError,
    UfsNotFoundError,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.iceberg import vending
from pyspark_lookup.sources.iceberg.metadata import find_table_id
from pyspark_lookup.storage.stores import (
    FileVersion,
    VendedCredentials,
)
from pyspark_lookup.storage.ufs import Ufs

METADATA_DIRECTORY, METADATA_SUFFIX = "metadata", ".metadata.json"
HINT = "version-hint.text"
_HINT_BYTES = 1000  # no version hint is longer
_INSTEAD = "give the table's name in its catalog (lookup.catalog) or the path of a metadata file"


@dataclasses.dataclass(frozen=True)
class Pointer:
    """Where a table's metadata lies. `source_file`: the file that says so: a hint, or the metadata file itself (None: a catalog says so).

    `modified_at_s`: when that file was written. It is compared as well, because a table that was recreated may have a hint with the same
    content, and so with the same ETag. `size`: the size of the metadata file, if known. `table_id`: the table's id, if the catalog has sent
    it.
    """

    location: str
    source_file: FileVersion | None = None
    modified_at_s: float | None = None
    size: int | None = dataclasses.field(default=None, compare=False)
    table_id: str | None = None

    @classmethod
    def from_file(cls, location: str, source_file: FileVersion, size: int | None = None) -> Pointer:
        """The pointer to the metadata file at `location`. `source_file`: the version hint that names this file, or the metadata file
        itself."""
        return cls(location, source_file, source_file.modified_at_s, size)

    @property
    def settled(self) -> bool:
        """Whether `source_file` is so old that any later change would show in its identity; True if a catalog gave the pointer."""
        return self.source_file is None or self.source_file.cacheable

    def matches_hint(self, hint: FileVersion) -> bool:
        """Whether the pointer was read from this state of the hint, as far as the store's identities show."""
        return (self.source_file, self.modified_at_s) == (hint, hint.modified_at_s) and self.settled and hint.cacheable

    def to_json(self) -> list[Any]:
        return [self.location, None if self.source_file is None else self.source_file.to_json(), self.table_id]

    @classmethod
    def from_json(cls, record: Any) -> Pointer:
        """The pointer that `to_json` wrote. Raises TypeError or ValueError for a malformed record."""
        location, source_file, table_id = record
        if source_file is not None:
            return cls.from_file(as_text(location), FileVersion.from_json(source_file))
        return cls(as_text(location), table_id=None if table_id is None else as_text(table_id))


def read_pointer(ufs: Ufs, table: str, last_pointer: Pointer | None) -> Pointer:
    """The pointer in the version hint of the table at a URL. One call if the hint is still the one of `last_pointer`.

    Raises UfsNotFoundError if there is no hint, DamagedFileError for a hint that names no existing file.
    """
    directory = f"{table}/{METADATA_DIRECTORY}"
    hint = ufs.get_meta(f"{directory}/{HINT}")
    if last_pointer is not None and last_pointer.matches_hint(hint):
        return last_pointer
    redacted_path = redact("path", hint.url)
    if hint.size > _HINT_BYTES:
        raise DamagedFileError(f"{redacted_path} is not a version hint: it has {hint.size} bytes; {_INSTEAD}")
    try:
        hint_text = ufs.read_ranges(hint, [(0, hint.size)])[0].decode().strip()
    except UnicodeDecodeError as problem:
        raise DamagedFileError(f"{redacted_path} is not a version hint: {problem}; {_INSTEAD}") from None
    for name in _names(hint_text):
        try:
            file = ufs.get_meta(f"{directory}/{name}")
            return Pointer.from_file(file.url, hint, file.size)
        except UfsNotFoundError:
            continue
    raise DamagedFileError(
        f"{redacted_path} names version {hint_text!r}, but there is no file {' or '.join(_names(hint_text))}; {_INSTEAD}"
    )


def _names(hint_text: str) -> list[str]:
    """The names of the metadata files that the hint may mean."""
    if not hint_text or "/" in hint_text:
        return []
    if hint_text.endswith((METADATA_SUFFIX, f"{METADATA_SUFFIX}.gz")):
        return [hint_text]
    starts = [f"v{hint_text}", hint_text] if hint_text.isdecimal() else [hint_text]
    return [
        start + end for start in starts for end in (METADATA_SUFFIX, f".gz{METADATA_SUFFIX}", f"{METADATA_SUFFIX}.gz")
    ]


T = TypeVar("T")

CALL_S = 60.0  # because PyIceberg's client of REST catalogs waits without a limit
_READER = "pyspark_lookup.sources.iceberg.pyiceberg_catalog"


@dataclasses.dataclass(frozen=True, repr=False)
class CatalogAnswer:
    """A catalog's answer about a table: where its metadata lies.

    From a REST catalog (`is_rest`) also the metadata itself, the table's id, the credentials that it vends for the table's files (`credentials`), and
    the `settings` with which these are renewed (see `vending.settings_of`).
    """

    location: str
    metadata: dict[str, Any] | None = None
    table_id: str | None = None
    credentials: Sequence[VendedCredentials] = ()
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_rest: bool = False

    @property
    def vends(self) -> bool:
        """Whether the credentials are for the table's location, and have not expired."""
        if self.metadata is None:
            return False
        directory = f"{self.metadata['location'].rstrip('/')}/"  # prefixes may end with a slash or not
        return any(
            one.covers(directory) and (one.expires_in_s is None or one.expires_in_s > 0) for one in self.credentials
        )


class Catalog:
    """The catalog with this name in PyIceberg's configuration, which `properties` override. An object must not be used after a fork.

    PyIceberg is imported when the catalog is first asked. `call_s`: the timeout of each call. `now_s`: the time (Unix time), for answers that
    do not state it.
    """

    def __init__(
        self,
        name: str,
        properties: Sequence[tuple[str, str]],
        call_s: float = CALL_S,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self._properties = dict(properties)
        self._call_s = call_s
        self._now_s = now_s
        self._lock = threading.Lock()
        self._client: Any = None
        self._is_rest: bool | None = None
        # Found once, because PyIceberg reads its configuration once, too.
        self.principal = functools.cache(self.find_principal)

    @property
    def is_rest(self) -> bool:
        """Whether this is a REST catalog, which may vend credentials. Makes no call."""
        if self._is_rest is None:
            kind, uri = self._properties.get("type", "").lower(), self._properties.get("uri", "")
            if kind or uri:  # so that most processes need not import PyIceberg to find out
                self._is_rest = kind == "rest" if kind else uri.startswith("http")
            else:
                self._is_rest = _import(self.name).is_rest(self.name, self._properties)
        return self._is_rest

    def has_no_grants(self) -> None:
        """Remember that this is no REST catalog, as another process of this host has found out."""
        self._is_rest = False

    def find_principal(self) -> list[Any]:
        """What identifies the principal as which this process asks, including its credentials: the properties, the variables of the environment and
        the files from which PyIceberg and the clients of clouds take their configuration.

        If credentials may come from elsewhere, as from the metadata service of a cloud, it is different in each process.
        """
        variables = sorted(item for item in os.environ.items() if item[0].upper().startswith(_VARIABLES))
        paths = [path for name, path in variables if name.upper().endswith(_FILE_VARIABLES)]
        home, directories = os.path.expanduser("~"), [os.environ.get("PYICEBERG_HOME"), os.path.expanduser("~")]
        with contextlib.suppress(OSError):  # the working directory was removed
            directories.append(os.getcwd())
        paths += [os.path.join(directory, ".pyiceberg.yaml") for directory in directories if directory]
        paths += [os.environ.get("NETRC", os.path.join(home, ".netrc")), *(os.path.join(home, path) for path in _FILES)]
        texts = []
        for path in paths:
            with contextlib.suppress(OSError):
                texts.append(Path(path).read_text(errors="replace"))
        parts = [self.name, sorted(self._properties.items()), variables, texts]
        settings = [
            *self._properties.items(),
            *(item for item in variables if item[0].upper().startswith("PYICEBERG_")),
        ]
        logins = {*_OTHER_LOGINS.findall("\n".join([*texts, *(f"{name} {text}" for name, text in settings)]).lower())}
        if "AWS_ACCESS_KEY_ID" in os.environ:
            logins.discard("sigv4")
        return [*parts, uuid.uuid4().hex] if logins else parts

    def load(self, table: str, with_history: bool = True) -> CatalogAnswer:
        """The answer about a table. One call. `with_history`: False if a REST catalog may leave snapshots out that no branch or tag names.

        Raises UfsNotFoundError if the catalog has no such table, UfsPermissionError if the principal may not read it, OptionError if the catalog
        is not configured, CatalogUnavailableError if it does not answer, and NotSupportedError if the catalog states a condition that this
        package does not meet.
        """
        reader, client = self._open()
        if not self.is_rest:
            return CatalogAnswer(self._within(lambda: reader.find_location(client, self.name, table)))
        asked_s = self._now_s()
        answer = self._within(lambda: reader.ask_for_table(client, self.name, table, self._call_s, with_history))
        content, words = answer.content, f"table {table} of the Iceberg catalog {self.name!r}"
        try:
            location, metadata = as_text(content["metadata-location"]), content["metadata"]
            _, place = metadata["format-version"], as_text(metadata["location"])
            config = vending.parse_config(content)
            credentials = vending.parse_credentials(
                content, config, place, asked_s if answer.at_s is None else answer.at_s
            )
            vending.refuse_conditions(content, config, bool(credentials), words)
            table_id = find_table_id(metadata)
        except UNREADABLE:
            raise_ours(self._malformed_error(words), None)  # without its cause, whose text may have credentials
        return CatalogAnswer(
            location,
            metadata,
            table_id,
            credentials,
            {**vending.settings_of(config), _LOCATION: place},
            is_rest=True,
        )

    def vend(
        self, table: str, settings: Mapping[str, str] | None
    ) -> tuple[Sequence[VendedCredentials], CatalogAnswer | None]:
        """(the credentials of a table's files, the answer about the table if the catalog had to be asked for all of it). One call.

        `settings`: those of the last answer; None: there was none. Raises the errors of `load`.
        """
        endpoints = (settings or {}).get
        endpoint = next((url for url in map(endpoints, vending.REFRESH_ENDPOINTS) if url is not None), None)
        if settings is not None:
            reader, client = self._open()
            asked_s = self._now_s()
            answer = self._within(lambda: reader.ask_for_credentials(client, self.name, table, self._call_s, endpoint))
            if answer is not None:
                try:
                    at_s = asked_s if answer.at_s is None else answer.at_s
                    return vending.parse_credentials(answer.content, settings, settings[_LOCATION], at_s), None
                except UNREADABLE:
                    raise_ours(self._malformed_error(f"the credentials of {table}"), None)
        whole = self.load(table)
        return whole.credentials, whole

    def _malformed_error(self, words: str) -> CatalogUnavailableError:
        return CatalogUnavailableError(
            f"the Iceberg catalog {self.name!r} gave an answer about {words} that cannot be read: check its endpoint (lookup.catalog.uri)"
        )

    def _open(self) -> tuple[Any, Any]:
        reader = _import(self.name)
        with self._lock:
            client = self._client
        if client is None:
            client = self._within(lambda: reader.open_catalog(self.name, self._properties))
            with self._lock:
                self._client = client
        return reader, client

    def _within(self, call: Callable[[], T]) -> T:
        """The result of a call. Raises CatalogUnavailableError if the call takes longer than `call_s`."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as problem:
                future.set_exception(problem)

        threads.start("lookupcache-catalog", run, foreign=True)
        try:
            return future.result(self._call_s)
        except concurrent.futures.TimeoutError:
            with self._lock:
                self._client = None
            raise CatalogUnavailableError(
                f"the Iceberg catalog {self.name!r} has not answered within {self._call_s:g} s: try again later, or check its uri (lookup.catalog.uri, or PyIceberg's configuration)"
            ) from None


def _import(name: str) -> Any:
    try:
        return importlib.import_module(_READER)
    except ImportError as problem:
        raise_ours(
            OptionError(
                f"option lookup.catalog = {name!r} needs PyIceberg, which this machine does not have: pip install "
                f"'pyspark-lookup[iceberg]' ({problem})"
            ),
            problem,
        )


_LOCATION = "location"
_VARIABLES = ("PYICEBERG_", "AWS_", "AZURE_", "GOOGLE_")
_FILE_VARIABLES = ("_FILE", "_APPLICATION_CREDENTIALS")
_FILES = (".aws/credentials", ".aws/config", ".config/gcloud/application_default_credentials.json")
_OTHER_LOGINS = re.compile(r"sigv4|google|entra|custom|credential_process|credential_source")
"""Words of configurations whose credentials may come from a service of the machine or of a cloud."""


class TableCredentialVendor:
    """Vends the credentials of one table of a catalog. `settings`: what the last answer said of the table's store; None: not known yet.

    `read_settings`: returns the settings that another process of this host has recorded; None if there are none.
    """

    def __init__(self, catalog: Catalog, table: str) -> None:
        self.catalog = catalog
        self.table = table
        self.name = f"the Iceberg catalog {catalog.name!r}"
        self.settings: Mapping[str, str] | None = None
        self.read_settings: Callable[[], Mapping[str, str] | None] = lambda: None

    def vend(self) -> Sequence[VendedCredentials]:
        if not self.catalog.is_rest:
            return ()
        credentials, answer = self.catalog.vend(self.table, self.settings or self.read_settings())
        if answer is not None:
            self.settings = answer.settings
        return credentials
