"""Credentials that a catalog vends for the files of one table, for an hour or so, and the store that reads with them.

How a catalog gives credentials:

1. It has an object with the method `vend` (`CredentialVendor`), which asks for the credentials of one table and returns `VendedCredentials`: for each
   prefix of URLs the options with which fsspec opens its files, and the seconds that are left. It translates the catalog's own names.
2. It makes one `CredentialHolder` for the table in this process. The answer to another question may contain credentials, too: `put` them.
3. It returns a `VendedStore` as the table's store (`VersionSource.open_store`). The store takes the credentials from the holder for each call.
4. It answers `VersionSource.is_authorised` and `VersionSource.authorise`, so that the caches respect its grants (`sources.catalogs`).

Credentials are in the memory of this process only. They are never written or pickled, and no repr shows them.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.errors import (
    CatalogUnavailableError,
    NotSupportedError,
    OptionError,
    UfsError,
    UfsPermissionError,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.stores.store import Count, FileVersion, Listing, Store

T = TypeVar("T")

_RENEWED_BEFORE_S = 300.0
_PAUSE_S = (
    30.0  # between two renewals that only a clock asks for: the catalog may be down, or state times that have passed
)
_SUSPECT_AFTER_S = (
    60.0  # a store that refuses younger credentials does not refuse them for their age, unless it says so
)


SILENT_FROM_S = 5.0  # a catalog that has given no answer for so long is silent: it is not asked again at once
_SILENT_FOR_S = 60.0  # for so long a process does not ask again


def renewed_after_s(lives_s: float, before_s: float, drawn: float) -> float:
    """When to renew what lives for `lives_s`, in seconds after it was asked for: between twice `before_s` and `before_s` before its end.

    So processes that asked at the same moment do not ask again at the same moment. `drawn`: a random number, 0 <= drawn < 1. What has a short life is
    renewed when a quarter to a half of its life has passed.
    """
    earliest_s, latest_s = lives_s - min(2 * before_s, lives_s * 3 / 4), lives_s - min(before_s, lives_s / 2)
    return latest_s - drawn * (latest_s - earliest_s) if lives_s < float("inf") else lives_s


class VendedCredentials:
    """Credentials for the files below one prefix. Compared by identity.

    `prefix`: the URLs that it covers begin with it, e.g. `s3://bucket/warehouse/t`. `options`: with which fsspec opens the files, as
    `lookup.storage.*` has them, e.g. `key`, `secret`, `token`, `endpoint_url` (s3), `token` (gs), `account_name`, `sas_token` (abfs).
    `expires_in_s`: the seconds from the beginning of the request to the end of the credentials (None: not stated). To be right whatever the
    clock of this host says, it is the difference of two times on the catalog's clock.
    """

    __slots__ = ("_account", "expires_in_s", "options", "prefix")

    def __init__(self, prefix: str, options: Mapping[str, Any], expires_in_s: float | None = None) -> None:
        self.prefix = canonical_url(prefix)
        self._account = _account_of(prefix)
        self.options = options
        self.expires_in_s = expires_in_s

    def covers(self, url: str) -> bool:
        """Whether a URL lies at or below the prefix. A prefix may also be a scheme, such as `s3`."""
        if self._account is not None and _account_of(url) not in (None, self._account):
            return False
        url = canonical_url(url)
        is_whole = self.prefix.endswith("/") or "://" not in self.prefix
        return url == self.prefix or url.startswith(self.prefix if is_whole else f"{self.prefix}/")

    def __repr__(self) -> str:
        return f"VendedCredentials({redact('path', self.prefix)!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("vended credentials must not leave the process that received them")


class CredentialVendor(Protocol):
    """A catalog, as the vendor of the credentials of one table.

    `name`: what errors call the catalog, e.g. "the Iceberg catalog 'prod'".
    """

    name: str

    def vend(self) -> Sequence[VendedCredentials]:
        """The credentials of the table (one call); empty if the catalog vends none: then this process uses its own.

        Raises UfsPermissionError if the principal may not read the table, UfsNotFoundError if there is no such table, CatalogUnavailableError
        if the catalog does not answer.
        """


class _CredentialSet:
    """What a catalog has vended in one answer. `asked_s`: when the request began (steady clock). `drawn`: as of `renewed_after_s`."""

    __slots__ = ("asked_s", "credentials", "ends_s", "renew_s")

    def __init__(self, credentials: Sequence[VendedCredentials], asked_s: float, drawn: float) -> None:
        self.credentials = sorted(credentials, key=lambda one: -len(one.prefix))  # the longest prefix first
        self.asked_s = asked_s
        lives_s = min((c.expires_in_s for c in credentials if c.expires_in_s is not None), default=float("inf"))
        self.ends_s = asked_s + lives_s
        self.renew_s = asked_s + max(renewed_after_s(lives_s, _RENEWED_BEFORE_S, drawn), _PAUSE_S)
        """When other credentials are better than these (steady clock)."""

    def select(self, url: str) -> VendedCredentials | None:
        """The credentials with the longest prefix of a URL; None if there are none."""
        return next((one for one in self.credentials if one.covers(url)), None)


class CredentialHolder:
    """The credentials of one table in this process. One thread at a time renews them. Must not be used after a fork.

    `draw`: returns random numbers, 0 <= number < 1, which spread renewals.
    """

    def __init__(self, vendor: CredentialVendor, clock: HostClock, draw: Callable[[], float]) -> None:
        self.name = vendor.name
        self._draw = draw
        self._vendor = vendor
        self._clock = clock
        self._lock = threading.Lock()
        self._credential_set: _CredentialSet | None = None
        self._tried_s = self._silent_until_s = float("-inf")

    def __reduce__(self) -> NoReturn:
        raise TypeError("vended credentials must not leave the process that received them")

    def put(self, credentials: Sequence[VendedCredentials], asked_s: float) -> None:
        """Keep credentials that came with another answer of the catalog. `asked_s`: when that request began (steady clock).

        If the holder has credentials for the same prefixes that need not be renewed yet, it keeps those, so that connections stay open.
        """
        new, credential_set = _CredentialSet(credentials, asked_s, self._draw()), self._credential_set
        same = credential_set is not None and [one.prefix for one in credential_set.credentials] == [
            one.prefix for one in new.credentials
        ]
        if credential_set is None or not same or asked_s >= credential_set.renew_s:
            self._credential_set = new

    def ask(self) -> float:
        """Ask the catalog now. Returns when the request began (steady clock). Raises the errors of `CredentialVendor.vend`."""
        asked_s = self._clock.steady_s()
        self.put(self._vendor.vend(), asked_s)
        return asked_s

    def select(self, url: str) -> VendedCredentials | None:
        """The credentials for a URL, renewed if it is time; None if the catalog vends none.

        Raises UfsPermissionError if it vends some, but not for this URL, and the errors of `CredentialVendor.vend`.
        """
        if _is_local(url):
            return None
        credential_set = self._credential_set
        if credential_set is None:
            credential_set = self._renew(None)
        elif self._clock.steady_s() >= max(credential_set.renew_s, self._tried_s + _PAUSE_S) and self._lock.acquire(
            blocking=False
        ):
            # Other threads go on with the old credentials meanwhile, and so does this one if the catalog does not answer: the store decides
            # how long they are good.
            try:
                with contextlib.suppress(CatalogUnavailableError):
                    credential_set = self._replace(credential_set)
            finally:
                self._lock.release()
        return self._covering(credential_set, url)

    def renew(self, url: str, refused: VendedCredentials, expired: bool) -> VendedCredentials | None:
        """Other credentials for a URL, after the store has refused some; None if they are too young to be at fault.

        `expired`: the store said that they have expired. Raises the errors of `select`.
        """
        credential_set, now_s = self._credential_set, self._clock.steady_s()
        if credential_set is None or refused in credential_set.credentials:
            if (
                credential_set is not None
                and not expired
                and now_s < min(credential_set.ends_s, credential_set.asked_s + _SUSPECT_AFTER_S)
            ):
                return None
            credential_set = self._renew(credential_set)
        return self._covering(credential_set, url)

    def _renew(self, last: _CredentialSet | None) -> _CredentialSet:
        with self._lock:
            return self._replace(last)

    def _replace(self, last: _CredentialSet | None) -> _CredentialSet:
        """The credentials of a new answer instead of `last`; the current ones if another thread has replaced `last` meanwhile. Called under the lock."""
        if self._credential_set is not None and self._credential_set is not last:
            return self._credential_set
        asked_s = self._clock.steady_s()
        if asked_s < self._silent_until_s:
            raise CatalogUnavailableError(
                f"{self.name} gave no answer a moment ago: try again in {_SILENT_FOR_S:g} s, or check its uri, in the table's options or this machine's configuration"
            )
        self._tried_s = asked_s
        try:
            credentials = self._vendor.vend()
        except CatalogUnavailableError:
            # Otherwise each thread and each query would wait for the silent catalog, one after the other.
            ended_s = self._clock.steady_s()
            if ended_s - asked_s >= SILENT_FROM_S:
                self._silent_until_s = ended_s + _SILENT_FOR_S
            raise
        self._credential_set = credential_set = _CredentialSet(credentials, asked_s, self._draw())
        return credential_set

    def _covering(self, credential_set: _CredentialSet, url: str) -> VendedCredentials | None:
        credentials = credential_set.select(url)
        if credentials is None and credential_set.credentials:
            prefixes = ", ".join(redact("path", one.prefix) for one in credential_set.credentials)
            raise UfsPermissionError(
                f"{redact('path', url)}: the credentials that {self.name} has vended do not cover the location, only {prefixes}: "
                "have the table's locations corrected in the catalog"
            )
        return credentials


def _is_local(url: str) -> bool:
    return url.startswith(("file:", "/"))


_AZURE = re.compile(r"(?:abfss?|wasbs?)://(?:([^/@]*)@([^/]*)|([^/@]*))")
_SAME_STORE = {"s3a://": "s3://", "s3n://": "s3://", "gcs://": "gs://"}


def canonical_url(url: str) -> str:
    """A URL in the spelling in which prefixes are compared: `s3://…` for `s3a://…`, `abfs://container/…` for `abfss://container@account/…`."""
    for spelling, scheme in _SAME_STORE.items():
        if url.startswith(spelling):
            return scheme + url.removeprefix(spelling)
    return _AZURE.sub(lambda match: f"abfs://{match[1] or match[3]}", url, count=1)


def _account_of(url: str) -> str | None:
    """The Azure account that a URL names (`abfss://container@account…/…`, `wasbs://…`); None: it names none."""
    match = _AZURE.match(url)
    return match[2].partition(".")[0].lower() if match and match[2] else None


def azure_account(host: str) -> dict[str, str]:
    """The options with which fsspec finds the store of an Azure account, by the host in its URLs, e.g. `account.dfs.core.windows.net`."""
    options = {"account_name": host.partition(".")[0]}
    if not host.endswith(".core.windows.net"):
        options["account_host"] = host.replace(".dfs.", ".blob.", 1)
    return options


_OWN = ("anon", "profile")  # options by which a process chooses credentials of its own
_HARMLESS_WITH_TOKENS = frozenset(
    {
        "assume_container_exists", "block_size", "blocksize", "connection_timeout", "consistency", "default_block_size", "default_cache_type",
        "default_fill_cache", "default_location", "location_mode", "max_concurrency", "project", "read_timeout", "requester_pays",
        "requests_timeout", "socket_timeout", "timeout", "use_listings_cache", "version_aware",
    }
)  # fmt: skip


def with_vended(parameters: Iterable[tuple[str, Any]], credential_options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which fsspec opens a store: those of vended credentials, and the `lookup.storage.*` parameters of the read.

    The user's endpoint of S3, for instance, replaces the one that the catalog states: S3 gets a signature, which is good at one server only.
    No credential of the process is among them. Raises OptionError for a parameter that could send the tokens for Google or Azure elsewhere.
    """
    options, has_token = dict(credential_options), "key" not in credential_options
    for name, value in parameters:
        if has_token and name not in (*_HARMLESS_WITH_TOKENS, *_OWN):
            raise OptionError(
                f"option lookup.storage.{name}: the catalog vends a token for the table's store, and this option could send it to another server: "
                "remove it from the options and from the conf file; the catalog says where the store is"
            )
        if isinstance(value, dict) and isinstance(options.get(name), dict):
            options[name] = {**options[name], **value}
        elif name not in _OWN:
            options[name] = value
    return options


class VendedStore:
    """The stores of a catalog's table, opened with the credentials that the catalog vends, or with this process's own if it vends none.

    `open_store(url, options)`: opens the store of a URL; `options`: None, or those of `VendedCredentials`. `scope`: as of `Store`. If a store says
    that credentials have expired, or refuses old ones, they are renewed and the call is made once more.
    """

    def __init__(
        self, scope: str, open_store: Callable[[str, Mapping[str, Any] | None], Store], holder: CredentialHolder | None
    ) -> None:
        self.scope = scope
        self._open = open_store
        self._holder = holder
        self._stores: dict[str, tuple[VendedCredentials | None, Store]] = {}
        self._places: set[str] = set()

    @property
    def pins(self) -> bool:
        return self._is_on_s3

    @property
    def lists_after(self) -> bool:
        return self._is_on_s3

    @property
    def _is_on_s3(self) -> bool:
        """Whether all URLs so far are of S3, whose store pins reads and lists the names after a given one. The first URL is that of the table."""
        return self._places == {"s3"}

    def url_of(self, path: str) -> str:
        self._places.add(_place(path))
        if _AZURE.match(path):
            return path  # the name of a container alone does not tell the account
        url = canonical_url(path).rstrip("/")
        # Without a store: one that is opened without vended credentials would look for those of the process.
        return url if url.startswith(("s3://", "gs://")) else self._store(path, None).url_of(path)

    def _store(self, url: str, credentials: VendedCredentials | None) -> Store:
        place = _place(url) if credentials is None else f"{_place(url)} {credentials.prefix}"
        self._places.add(_place(url))
        last_credentials, store = self._stores.get(place, (None, None))
        if store is None or last_credentials is not credentials:
            store = self._open(url, None if credentials is None else _opening(url, credentials.options))
            self._stores = {**self._stores, place: (credentials, store)}
        return store

    def _call(self, url: str, call: Callable[[Store], T]) -> T:
        """The result of a call of the store of a URL. It is made again with other credentials, if renewed ones may help."""
        credentials = None if self._holder is None else self._holder.select(url)
        try:
            return call(self._store(url, credentials))
        except UfsError as problem:
            if self._holder is None or credentials is None or problem.expired is False:
                raise
            renewed = self._holder.renew(url, credentials, problem.expired is True)
            if renewed is None:
                self._explain(url, problem)
        try:
            return call(self._store(url, renewed))
        except UfsPermissionError as problem:
            self._explain(url, problem)

    def _explain(self, url: str, refusal: UfsError) -> NoReturn:
        """Raise the store's refusal of vended credentials, with what it means."""
        if not isinstance(refusal, UfsPermissionError) or self._holder is None:
            raise refusal
        what, advice = (
            ("says that they have expired", "compare the store's clock with the catalog's")
            if refusal.expired
            else ("refuses them: they do not cover the location", "have the catalog vend credentials that cover it")
        )
        raise_ours(
            UfsPermissionError(
                f"{redact('path', url)} is read with credentials that {self._holder.name} has vended, but the store {what} ({refusal.reason or refusal}): {advice}"
            ),
            refusal,
        )

    def get_meta(self, path: str, count: Count) -> FileVersion | None:
        return self._call(path, lambda store: store.get_meta(path, count))

    def list_status(self, path: str, count: Count) -> Listing:
        return self._call(path, lambda store: store.list_status(path, count))

    def get_status(self, path: str, count: Count) -> FileVersion | Listing:
        return self._call(path, lambda store: store.get_status(path, count))

    @contextlib.contextmanager
    def pin(self, file: FileVersion) -> Iterator[Callable[[int, int], bytes]]:
        if self._holder is None or self._holder.select(file.url) is None:
            with self._store(file.url, None).pin(file) as read_file:
                yield read_file
            return

        def read(offset: int, length: int) -> bytes:
            def read_from(store: Store) -> bytes:
                with store.pin(file) as read_part:
                    return read_part(offset, length)

            return self._call(file.url, read_from)

        yield read

    def list_files(self, path: str, after: str, at_most: int | None, count: Count) -> tuple[FileVersion, ...]:
        return self._call(path, lambda store: store.list_files(path, after, at_most, count))

    def has_directory(self, path: str, count: Count) -> bool:
        return self._call(path, lambda store: store.has_directory(path, count))

    def last_change_s(self, path: str, count: Count) -> tuple[float | None, float]:
        return self._call(path, lambda store: store.last_change_s(path, count))

    def _refuse(self, path: str, *_: object) -> NoReturn:
        raise NotSupportedError(
            f"{redact('path', path)}: lookupcache does not write to tables of a catalog: write with the catalog's own tools"
        )

    list_tree = delete = delete_many = put_if_absent = _refuse


def _opening(url: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options with which fsspec opens the store of a URL. gcsfs would send a token that is a text to Google, as a part of a URL, to ask when it
    expires."""
    if not url.startswith(("gs:", "gcs:")) or not isinstance(options.get("token"), str):
        return options
    from google.oauth2.credentials import Credentials  # comes with gcsfs

    return {**options, "token": Credentials(token=options["token"])}


def _place(url: str) -> str:
    """The part of a URL that decides which store opens it."""
    protocol, separator, location = url.partition("://")
    if not separator:
        return "file"
    if protocol in ("s3", "s3a", "s3n"):
        return "s3"
    return protocol if protocol == "file" else f"{protocol}://{location.partition('/')[0]}"
