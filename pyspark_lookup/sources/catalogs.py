"""What all kinds of tables share that a catalog names: `CatalogOptions`, `CatalogStore`, and `Authorisations`, which let the caches respect the
catalog's grants.

How a source of a catalog's tables uses `Authorisations`: it calls `key` before it asks, `confirm` after an answer that lets the principal read a
table, `withdraw` after a refusal, and `allows` in `VersionSource.is_authorised`. In `VersionSource.authorise` it asks the catalog, unless `allows` says that a process of
this host has asked for the same principal a short time ago. How a catalog vends credentials: `storage.stores.vended`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pyspark_lookup.core.credentials import LOGIN_HEADERS
from pyspark_lookup.core.decoding import as_number, as_text
from pyspark_lookup.errors import CatalogUnavailableError, OptionError, PysparkLookupError, VersionGoneError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.lookup_options import KindOptions, LookupOptions
from pyspark_lookup.options.parsing import DURATION, Kind, option, parse_text
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.stores import CATALOG_SCHEME, CredentialHolder, Store, VendedStore
from pyspark_lookup.versions.model import Table
from pyspark_lookup.versions.version_source import OpenUrl

AUTHORISE_EVERY = "lookup.catalog.authorise-every"
_LOGIN_PROPERTIES = frozenset(f"header.{name}" for name in LOGIN_HEADERS)


@dataclasses.dataclass(frozen=True)
class CatalogOptions(KindOptions):
    """The options that name the table's catalog."""

    catalog_keys: ClassVar[frozenset[str]] = frozenset({"lookup.catalog"})

    # fmt: off
    catalog: str | None = option(
        "lookup.catalog", Kind("name", parse_text), None,
        doc="The Iceberg catalog of the table, by its name in PyIceberg's configuration; `path` is then `namespace.table`. Or `unity`: "
            "[Unity Catalog](delta.md#unity-catalog); `path` is then `catalog.schema.table`.",
    )
    properties: tuple[tuple[str, str], ...] = option(
        "lookup.catalog.*", Kind("any", str), (),
        doc="Properties of the catalog that `lookup.catalog` names, e.g. `lookup.catalog.uri`; never credentials. They override those in "
            "PyIceberg's configuration.",
        secrets="give it to PyIceberg, in .pyiceberg.yaml or in the environment of each machine that reads; for Unity Catalog set UNITY_CATALOG_TOKEN, "
        "or UNITY_CATALOG_CLIENT_ID and UNITY_CATALOG_CLIENT_SECRET, there, or name a function with lookup.credentials",
    )
    authorise_every_s: float = option(
        AUTHORISE_EVERY, DURATION, 300.0, default_text="5 min", bounded=True,
        doc="How long a host may answer from its caches before it asks a catalog with grants (Iceberg REST, Unity Catalog) again whether this principal may read "
            "the table. A read may shorten the time; only the conf file can make it longer. See [security](security.md#tables-of-a-catalog).",
    )
    # fmt: on

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.catalog, self.properties, self.authorise_every_s

    @property
    def is_unity(self) -> bool:
        """Whether the catalog is a Unity Catalog, asked by its own API: its type says so, or, without a type, its name."""
        kind = dict(self.properties).get("type")
        return self.catalog is not None and (self.catalog if kind is None else kind).lower() == "unity"

    def check(self, options: LookupOptions) -> None:
        if self.catalog is None:
            keys = [f"lookup.catalog.{name}" for name, _ in self.properties]
            keys += {AUTHORISE_EVERY} & options.explicit
            if keys:
                raise OptionError(f"option {keys[0]} is a property of a catalog: set lookup.catalog, or remove it")
            return
        login = next((name for name, _ in self.properties if name.lower() in _LOGIN_PROPERTIES), None)
        if login is not None:
            raise OptionError(
                f"option lookup.catalog.{login} holds a credential, which plans and catalogs would store: give it to PyIceberg, in .pyiceberg.yaml "
                "or in the environment of each machine that reads"
            )
        if options.system is not None:
            raise OptionError(
                f"options lookup.catalog and {options.system} both say where the table is: give only one of them"
            )
        if not _is_table_name(options.files.path):
            form = "catalog.schema.table" if self.is_unity else "namespace.table"
            raise OptionError(
                f"option path = {redact('path', options.files.path)!r}: with lookup.catalog = {self.catalog!r} give the table's name, {form}; to read "
                "files, remove lookup.catalog"
            )


def _is_table_name(path: str) -> bool:
    """Whether a path can be the name of a table in a catalog: two or more parts, with dots between them. A slash shows that it names a file."""
    parts = path.split(".")
    return len(parts) > 1 and all(parts) and "/" not in path


class CatalogStore(VendedStore):
    """The stores in which a catalog's tables lie. The table itself has the URL `catalog://<catalog>/<name>`, which no store knows.

    `scope`: distinguishes the table from others, also from those of other catalogs with the same name. The other parameters are those of `VendedStore`.
    """

    def __init__(
        self,
        catalog: str,
        scope: str,
        open_store: Callable[[str, Mapping[str, Any] | None], Store],
        holder: CredentialHolder | None,
    ) -> None:
        super().__init__(scope, open_store, holder)
        self._prefix = f"{CATALOG_SCHEME}{catalog}/"

    @classmethod
    def open(cls, options: LookupOptions, open_url: OpenUrl, holder: CredentialHolder | None) -> CatalogStore:
        """The store of the table that options name in a catalog."""
        named = options.kind(CatalogOptions)
        assert named.catalog is not None
        # Storage options are for remote stores: a catalog's tables on local disks are opened without them.
        open_files = lambda url, options: open_url(url, "://" in url and not url.startswith("file:"), options)  # noqa: E731
        parameters = json.dumps(options.storage.parameters, default=str)
        # With the table's name, because a table's owner decides which files it names: those of a table that a reader may not read must not come
        # from the cache.
        scope = "catalog" + json.dumps([named.catalog, named.properties, options.files.path, parameters])
        return cls(named.catalog, scope, open_files, holder)

    def url_of(self, path: str) -> str:
        if path.startswith(self._prefix):
            return path
        if "://" not in path and not path.startswith(("/", "file:")):
            return self._prefix + path
        return super().url_of(path)


def replaced_table_error(catalog: str, table: str) -> VersionGoneError:
    """The error of a read that was planned on a table whose name the catalog has since given to another one. `catalog`: what errors
    call the catalog."""
    return VersionGoneError(
        f"in {catalog} the name {table} now means a different table from the one that this query began to read: run the query again"
    )


@dataclasses.dataclass(frozen=True)
class _Confirmation:
    """A catalog's answer that the principal may read a table. `table_id`: the table's id (None: the answer did not state it).

    `asked_s`, `boot`: when the question was asked, on the host's steady clock. `lasting`: the catalog has no grants, so the answer stays true.
    """

    table_id: str | None
    asked_s: float
    boot: str
    lasting: bool

    @classmethod
    def from_json(cls, record: Any) -> _Confirmation:
        """The confirmation that `Authorisations.confirm` recorded. Raises TypeError, KeyError or ValueError for a malformed record."""
        table_id = record["table_id"]
        return cls(
            None if table_id is None else as_text(table_id),
            as_number(record["asked_s"]),
            as_text(record["boot"]),
            record["lasting"] is True,
        )


class Authorisations:
    """When a catalog last said that this process's principal may read a table. All processes of the host share this, by records on disk.

    `every_s`: for how long an answer holds. `principal`: returns the parts of the configuration that identify the principal, with its credentials.
    It is called each time, because the process may later ask on behalf of another principal. Records contain none of these parts, only a keyed digest
    of all of them. The key is random, and each cache directory has its own.

    The races: two processes may record at once, or one may record an older answer after a newer one, or after a refusal. Each record has the time
    at which its question was asked. So, in whatever order they are written, access ends at most `every_s` after the last question to which the
    catalog said yes.
    """

    def __init__(self, context: HostContext, every_s: float, principal: Callable[[], Sequence[Any]]) -> None:
        self._context = context
        self._every_s = every_s
        self._parts = principal
        self._principal: tuple[Sequence[Any], str] | None = None
        self._confirmations: dict[str, _Confirmation] = {}

    def key(self, table: Table) -> str:
        """The key of the records about a table and the principal as which this process asks now."""
        parts = self._parts()
        if self._principal is None or self._principal[0] != parts:
            nonce = f"{self._context.rng.getrandbits(256):064x}"
            try:
                disk = self._context.disk
                salt = nonce if disk is None else disk.create_record("principal-key", "of-host", nonce, as_text)
            except OSError:
                self._context.metrics.inc("cacheFailureCount")
                salt = nonce
            text = json.dumps(parts, default=str).encode()
            self._principal = parts, hashlib.blake2b(text, key=bytes.fromhex(salt), digest_size=16).hexdigest()
        return key_of(table.scope, table.url, self._principal[1])

    def confirm(self, table: Table, key: str, table_id: str | None, asked_s: float, lasting: bool = False) -> None:
        """Record that the catalog has answered about a table, and so lets the principal read it. `asked_s`: when it was asked (steady clock).

        `key`: what `key` returned before the question. The race: if this process asks on behalf of another principal since then, nobody knows for which
        of the two the answer is, so nothing is recorded.
        """
        if key != self.key(table):
            return
        confirmation = _Confirmation(table_id, asked_s, self._context.clock.boot, lasting)
        self._confirmations = {**self._confirmations, key: confirmation}
        recorded = self._find_recorded(key) if lasting else None
        if self._context.disk is None or (
            recorded is not None and (recorded.lasting, recorded.table_id) == (True, table_id)
        ):
            return
        try:
            self._context.disk.replace_record("authorised", key, dataclasses.asdict(confirmation))
        except OSError:
            self._context.metrics.inc("cacheFailureCount")

    def withdraw(self, table: Table) -> None:
        """Forget that the principal may read a table, after the catalog has refused it."""
        self._forget(self.key(table))

    def _forget(self, key: str) -> None:
        self._confirmations = {other: one for other, one in self._confirmations.items() if other != key}
        if self._context.disk is not None:
            self._context.disk.remove_record("authorised", key)

    @contextlib.contextmanager
    def withdrawing(self, table: Table) -> Iterator[None]:
        """If the catalog refuses the table in the block, no process of this host answers for this principal any more."""
        key = self.key(table)
        try:
            yield
        except CatalogUnavailableError:
            raise
        except PysparkLookupError:
            self._forget(key)
            self.withdraw(table)  # this process may ask on behalf of another principal by now, who was refused
            raise

    def allows(self, table: Table, table_id: str | None) -> bool:
        """Whether the catalog has let the principal read a table within `every_s`.

        `table_id`: the table must have this id. None: the table has no id, so its name is enough.
        """
        key = self.key(table)
        confirmation = self._confirmations.get(key)
        if confirmation is not None and self._holds(confirmation, table_id):
            return True
        confirmation = self._find_recorded(key)
        if confirmation is None or not self._holds(confirmation, table_id):
            return False
        self._confirmations = {**self._confirmations, key: confirmation}
        return True

    def lasts(self, table: Table) -> bool:
        """Whether the catalog has no grants, as `confirm` was told, so that `allows` stays true."""
        confirmation = self._confirmations.get(self.key(table))
        return confirmation is not None and confirmation.lasting

    def _holds(self, confirmation: _Confirmation, table_id: str | None) -> bool:
        is_same = table_id in (None, confirmation.table_id)
        if confirmation.lasting:
            return is_same
        age_s = self._context.clock.steady_s() - confirmation.asked_s
        is_recent = confirmation.boot == self._context.clock.boot and 0 <= age_s < self._every_s
        return is_recent and is_same

    def _find_recorded(self, key: str) -> _Confirmation | None:
        disk = self._context.disk
        return None if disk is None else disk.get_record("authorised", key, _Confirmation.from_json)
