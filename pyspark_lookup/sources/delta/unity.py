"""`UnityCatalog`: a Unity Catalog server, asked by its open REST API where a Delta table is, which commits it has ratified, and for credentials.

The API is that of the OpenAPI descriptions of unitycatalog/unitycatalog: `api/all.yaml`, and for tables that the catalog manages also `api/delta.yaml`
(from release 0.5 on), whose one answer about a table has its ratified commits.
"""

from __future__ import annotations

import base64
import dataclasses
import email.utils
import json
import math
import os
import re
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.credentials import find_origin, redact_server_text
from pyspark_lookup.core.decoding import UNREADABLE, as_count, as_text, describe_fault
from pyspark_lookup.errors import (
    CatalogUnavailableError,
    NotSupportedError,
    OptionError,
    UfsNotFoundError,
    UfsPermissionError,
    foreign_text,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.lookup_options import KindOptions, LookupOptions
from pyspark_lookup.sources.catalogs import CatalogOptions
from pyspark_lookup.sources.credentials import CREDENTIALS, CredentialOptions, Credentials
from pyspark_lookup.sources.delta.log import RatifiedCommits
from pyspark_lookup.storage.stores import VendedCredentials, azure_account, renewed_after_s

PROPERTIES = ("oauth2-server-uri", "scope", "type", "uri")
"""The properties of such a catalog."""
URI_VARIABLE, TOKEN_VARIABLE = "UNITY_CATALOG_URI", "UNITY_CATALOG_TOKEN"
CLIENT_VARIABLES = ("UNITY_CATALOG_CLIENT_ID", "UNITY_CATALOG_CLIENT_SECRET")
_API = "/api/2.1/unity-catalog"
_TOKEN_PATH, _SCOPE = "/oidc/v1/token", "all-apis"
"""Where a Databricks workspace gives tokens for the credentials of a client, and for what."""
CALL_S, _CONNECT_S = 60.0, 10.0
_ANSWER_BYTES = 64 * 1024**2
_RENEWED_BEFORE_S = 30.0
_SHOWN_CHARACTERS = 300
_FULL_NAME = re.compile(r"[^./\s]+\.[^./\s]+\.[^./\s]+")
_STAGED_NAME = re.compile(r"(\d{20})\.[0-9A-Za-z-]{1,64}\.json")
_READ_TYPES = frozenset({"MANAGED", "EXTERNAL", "MANAGED_SHALLOW_CLONE", "EXTERNAL_SHALLOW_CLONE"})
_ICEBERG_PATH = f"{_API}/iceberg-rest"
_UNKNOWN_QUESTION = (400, 404, 405, 501)
_CODES_OF_UNKNOWN_QUESTIONS = frozenset(
    {None, "ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED", "NotImplementedException", "UnsupportedTableFormatException"}
)
_MANAGED_PROPERTIES = ("delta.feature.catalogManaged", "delta.feature.catalogOwned-preview")


@dataclasses.dataclass(frozen=True)
class UnityOptions(KindOptions):
    """Checks the options of a table that a Unity catalog names. It has no option of its own: see `CatalogOptions`."""

    checked_with: ClassVar[frozenset[str]] = frozenset({"lookup.catalog"})

    def check(self, options: LookupOptions) -> None:
        named = options.kind(CatalogOptions)
        if not named.is_unity:
            return
        unknown = [name for name, _ in named.properties if name not in PROPERTIES]
        if unknown:
            raise OptionError(
                f"option lookup.catalog.{unknown[0]} is not a property of a Unity catalog, which has {', '.join(PROPERTIES)}: remove it"
            )
        for name in ("uri", "oauth2-server-uri"):
            uri = dict(named.properties).get(name)
            if uri is not None and find_origin(uri) is None:
                raise OptionError(
                    f"option lookup.catalog.{name} = {redact('path', uri)!r}: expected the URL of a server, e.g. 'https://unity.example.com'"
                )
        path = options.files.path
        if not _FULL_NAME.fullmatch(path):
            raise OptionError(
                f"option path = {redact('path', path)!r}: with lookup.catalog = {named.catalog!r} give the table's full name, catalog.schema.table"
            )


@dataclasses.dataclass(frozen=True)
class UnityTable:
    """A Delta table as the catalog knows it: its id, which changes if the table is dropped and created again, and the URL of its directory.

    `is_catalog_managed`: the catalog says that only it knows the table's newest commits.
    """

    id: str
    location: str
    is_catalog_managed: bool


class UnityCredentialVendor:
    """Vends the credentials of one table. `vended_id`: the id of the table for which it last vended some; None: it has vended none yet."""

    def __init__(self, catalog: UnityCatalog, table: str) -> None:
        self.catalog = catalog
        self.table = table
        self.name = catalog.name
        self.vended_id: str | None = None

    def vend(self) -> Sequence[VendedCredentials]:
        unity_table = self.catalog.find(self.table)
        credentials = self.catalog.vend(self.table, unity_table)
        self.vended_id = unity_table.id
        return credentials

    def remember(self, table_id: str, location: str) -> None:
        """Ask for credentials by this id, which another process of the host has learnt, unless this process knows the table's id itself."""
        self.catalog.remember(self.table, UnityTable(table_id, location, False))


class UnityCatalog:
    """The Unity Catalog server with the address `uri`; None: the one that the environment names. An object must not be used after a fork.

    `name`: the name of the catalog in errors. `login`: returns a `token`, or `client_id` and `client_secret`; None: the environment has them.
    `token_uri`: where a token is given for the credentials of a client; None: where Databricks gives it. `clock`: for the lives of tokens. `draw`: as of
    `CredentialHolder`.
    """

    def __init__(
        self,
        name: str,
        uri: str | None,
        *,
        clock: HostClock,
        draw: Callable[[], float],
        login: Credentials | None = None,
        token_uri: str | None = None,
        scope: str | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        uri = uri or environ.get(URI_VARIABLE)
        if not uri:
            raise OptionError(
                f"option lookup.catalog = {name!r}: set lookup.catalog.uri, or {URI_VARIABLE} in the environment of each machine that reads, to the "
                "server's address, e.g. 'https://unity.example.com'"
            )
        self.name = f"the Unity catalog {name!r}"
        self._uri = uri.rstrip("/").removesuffix(_API)
        self._clock = clock
        self._draw = draw
        self._login = login
        self._token_uri = token_uri or f"{self._uri}{_TOKEN_PATH}"
        self._scope = scope or _SCOPE
        self._environ = environ
        self._lock = threading.Lock()
        self._last_credentials: Mapping[str, str] | None = None
        self._token: tuple[str, float] | None = None  # the token, and when it is to be replaced (steady clock)
        self._tables: dict[str, UnityTable] = {}
        self._client: Any = None
        self._has_delta_api = True

    @classmethod
    def of_options(cls, options: LookupOptions, clock: HostClock, draw: Callable[[], float]) -> UnityCatalog:
        """The catalog that options name. Raises OptionError if neither they nor the environment have its address."""
        named = options.kind(CatalogOptions)
        assert named.catalog is not None
        properties, login = dict(named.properties), options.kind(CredentialOptions).function
        uri, token_uri, scope = map(properties.get, ("uri", "oauth2-server-uri", "scope"))
        return cls(named.catalog, uri, clock=clock, draw=draw, login=login, token_uri=token_uri, scope=scope)

    # --- what the catalog says ----------------------------------------------------------------------

    def load(self, table: str) -> UnityTable:
        """What the catalog says about a table, by its full name. One call.

        Raises UfsNotFoundError if there is no such table, UfsPermissionError if the principal may not see it, NotSupportedError if it is not
        a Delta table, or has row filters or column masks, CatalogUnavailableError if the catalog does not answer.
        """
        # By default, the answer calls streaming tables and materialized views managed tables.
        query = "read_streaming_table_as_managed=false&read_materialized_view_as_managed=false"
        answer = self._ask("GET", f"/tables/{urllib.parse.quote(table, safe='')}?{query}", table)
        try:
            self._check_kind(table, answer)
            table_id, location = as_text(answer["table_id"]), as_text(answer["storage_location"]).rstrip("/")
            properties = answer.get("properties") or {}
            is_managed = any(properties.get(name) == "supported" for name in _MANAGED_PROPERTIES)
        except UNREADABLE as problem:
            raise_ours(self._unreadable(table, problem), problem)
        self._tables = {**self._tables, table: UnityTable(table_id, location, is_managed)}
        return self._tables[table]

    def _check_kind(self, table: str, answer: Mapping[str, Any]) -> None:
        kind, form = as_text(answer["table_type"]), answer.get("data_source_format")
        if kind not in _READ_TYPES:
            label = "foreign table" if kind == "FOREIGN" else kind.lower().replace("_", " ")
            raise NotSupportedError(
                f"{table} in {self.name} is a {label}, whose rows only the catalog's own engines can return: write its rows to a table, and read that"
            )
        if form == "ICEBERG":
            catalog = table.partition(".")[0]
            raise NotSupportedError(
                f"{table} in {self.name} is an Iceberg table: read it by the catalog's Iceberg REST API, with lookup.catalog.type = rest, "
                f"lookup.catalog.uri = {self._uri}{_ICEBERG_PATH}, lookup.catalog.warehouse = {catalog} and path = {table.partition('.')[2]}"
            )
        if form != "DELTA":
            raise NotSupportedError(
                f"{table} in {self.name} is not a Delta table, but {form}: give the path of its files"
            )
        masked = [column.get("name") for column in answer.get("columns") or () if column.get("mask")]
        if answer.get("row_filter") or masked:
            what = f"a column mask ({', '.join(map(str, masked))})" if masked else "a row filter"
            raise NotSupportedError(
                f"{table} in {self.name} has {what}, which only the catalog's own engines apply: read a table or a copy without it"
            )

    def load_managed(self, table: str) -> tuple[UnityTable, RatifiedCommits] | None:
        """What the catalog says about a table that it manages; None if the catalog lacks this API. One call, or none if it is known to lack it.

        The answer does not tell of row filters and column masks: `load` refuses tables that have them. Raises the errors of `load`.
        """
        if not self._has_delta_api:
            return None
        catalog, schema, name = (urllib.parse.quote(part, safe="") for part in table.split("."))
        answer = self._ask_if("GET", f"/delta/v1/catalogs/{catalog}/schemas/{schema}/tables/{name}", table)
        if answer is None:
            self._has_delta_api = False
            return None
        try:
            metadata, newest = answer["metadata"], as_count(answer["latest-table-version"])
            staged = dict(map(_parse_commit, answer.get("commits") or ()))
            location = as_text(metadata["location"]).rstrip("/")
            return UnityTable(as_text(metadata["table-uuid"]), location, True), RatifiedCommits(newest, staged)
        except UNREADABLE as problem:
            raise_ours(self._unreadable(table, problem), problem)

    def ratified_commits(self, table: str, table_id: str, location: str) -> RatifiedCommits:
        """The newest version of a table that the catalog manages, and the commits that may not be published yet.

        One call if the catalog has the newer API, otherwise one for each page. Raises the errors of `load`.
        """
        managed = self.load_managed(table)
        if managed is not None and managed[0].id == table_id:
            return managed[1]
        staged: dict[int, tuple[str, int, float]] = {}
        start = 0
        while True:
            question = {"table_id": table_id, "table_uri": location, "start_version": start}
            answer = self._ask("GET", "/delta/preview/commits", table, question)
            try:
                page = dict(map(_parse_commit, answer.get("commits") or ()))
                newest = max(0, int(answer["latest_table_version"]))  # before the first commit, some releases say -1
            except UNREADABLE as problem:
                raise_ours(self._unreadable(table, problem), problem)
            staged |= page
            last = max(page, default=newest)
            if not start <= last < newest:
                return RatifiedCommits(newest, staged)
            start = last + 1

    def find(self, table: str) -> UnityTable:
        """What this process knows about a table; the catalog is asked if it knows nothing."""
        return self._tables.get(table) or self.load(table)

    def vend(self, table: str, unity_table: UnityTable) -> Sequence[VendedCredentials]:
        """Credentials for the files of a table, see `CredentialVendor.vend`. One call."""
        question = {"table_id": unity_table.id, "operation": "READ"}
        answer, answered_s = self._ask_at("POST", "/temporary-table-credentials", table, question)
        try:
            options = _storage_options(answer, unity_table.location)
            ends_ms = answer.get("expiration_time")
            expires_in_s = None if not ends_ms else max(0.0, as_count(ends_ms) / 1000 - answered_s)
            prefix = f"{as_text(answer.get('url') or unity_table.location).rstrip('/')}/"
        except UNREADABLE:  # its text may have a credential
            raise_ours(self._unreadable(table, None), None)
        return [VendedCredentials(prefix, options, expires_in_s)] if options else []

    def remember(self, table: str, unity_table: UnityTable) -> None:
        """Keep what another process knows about a table, see `UnityCredentialVendor.remember`."""
        self._tables = {table: unity_table, **self._tables}

    # --- requests -----------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, table: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        return self._ask_at(method, path, table, body)[0]

    def _ask_if(self, method: str, path: str, table: str) -> Mapping[str, Any] | None:
        """The answer to a request about a table; None if the catalog does not have this part of the API."""
        status, data, _, token = self._exchange(method, path)
        if status in _UNKNOWN_QUESTION and _parse_error(data)[0] in _CODES_OF_UNKNOWN_QUESTIONS:
            return None
        return self._parse(status, data, table, token)

    def _ask_at(
        self, method: str, path: str, table: str, body: Mapping[str, Any] | None = None
    ) -> tuple[Mapping[str, Any], float]:
        """(the answer to a request about a table, when the catalog sent it by its own clock, in Unix seconds)."""
        status, data, date, token = self._exchange(method, path, body)
        answer = self._parse(status, data, table, token)
        at = None if date is None else email.utils.parsedate_tz(date)
        return answer, self._clock.wall_s() if at is None else float(email.utils.mktime_tz(at))

    def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes, str | None, str | None]:
        """(status, body, date) of an answer, and the token that was sent. If the catalog refuses a token, and there is another one by now, that is
        sent once."""
        content = None if body is None else json.dumps(body).encode()
        headers = {"Accept": "application/json", **({} if body is None else {"Content-Type": "application/json"})}

        def send(token: str | None) -> tuple[int, bytes, str | None]:
            login = {} if token is None else {"Authorization": f"Bearer {token}"}
            return self._send(method, f"{self._uri}{_API}{path}", {**headers, **login}, content)

        token = self._access_token()
        status, data, date = send(token)
        if status == 401 and (another := self._access_token(refused=token)) != token:
            token = another
            status, data, date = send(token)
        return status, data, date, token

    def _parse(self, status: int, data: bytes, table: str, token: str | None) -> Mapping[str, Any]:
        if status != 200:
            self._refuse(status, data, table, token)
        try:
            answer = json.loads(data)
            if not isinstance(answer, dict):
                raise ValueError("it is not a JSON object")
        except UNREADABLE as problem:  # which has the whole answer, perhaps with credentials
            raise_ours(self._wrong_endpoint(f"its answer is not that of a Unity Catalog ({problem})"), None)
        return answer

    def _send(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes | None
    ) -> tuple[int, bytes, str | None]:
        """(status, body, date) of an answer. Redirects are not followed, because they would take the token elsewhere."""
        import urllib3

        try:
            answer = self._pool(url).request(
                method, url, body=content, headers={"User-Agent": "lookupcache", **headers}, redirect=False,
                retries=False, timeout=urllib3.Timeout(connect=_CONNECT_S, read=CALL_S), preload_content=False,
            )  # fmt: skip
            try:
                data = answer.read(_ANSWER_BYTES + 1)
            finally:
                answer.release_conn()
        except (urllib3.exceptions.HTTPError, OSError) as problem:
            option = "uri" if find_origin(url) == find_origin(self._uri) else "oauth2-server-uri"
            raise_ours(
                CatalogUnavailableError(
                    f"{self.name} gave no answer at {redact('path', url.partition('?')[0])}: {type(problem).__name__}: {problem}; try again later, or check "
                    f"lookup.catalog.{option}"
                ),
                problem,
            )
        if len(data) > _ANSWER_BYTES:
            raise self._wrong_endpoint(f"its answer has more than {_ANSWER_BYTES} bytes")
        return answer.status, data, answer.headers.get("Date")

    def _pool(self, url: str) -> Any:
        """The client, which keeps its connections. Made when the catalog is first asked."""
        import urllib3

        with self._lock:
            if self._client is None:
                parts = urllib.parse.urlsplit(url)
                proxy = (
                    None if urllib.request.proxy_bypass(parts.netloc) else urllib.request.getproxies().get(parts.scheme)
                )
                self._client = urllib3.PoolManager() if proxy is None else urllib3.ProxyManager(proxy)
            return self._client

    def _refuse(self, status: int, data: bytes, table: str, token: str | None) -> NoReturn:
        """Raise the error for an answer whose status is not 200."""
        code, message = _parse_error(data)
        with self._lock:
            login = self._last_credentials or {}
        shown_message = redact_server_text(message, (token or "", login.get("client_secret", "")))
        says = "" if not message else f" ({foreign_text(shown_message[:_SHOWN_CHARACTERS])})"
        if status == 401:
            what = "without a token" if token is None else "with this token, which is wrong or has expired"
            raise UfsPermissionError(f"{self.name} denies access {what}{says}: {self._advice}")
        if status == 403:
            raise UfsPermissionError(
                f"{self.name} does not let this principal read {table}{says}: it needs SELECT on the table, USE SCHEMA and USE CATALOG, and on "
                "Databricks EXTERNAL USE SCHEMA"
            )
        if status == 404 and code is not None and code != "ENDPOINT_NOT_FOUND":
            raise UfsNotFoundError(f"{self.name} has no table {table}{says}")
        if status in (408, 429) or status >= 500:
            raise CatalogUnavailableError(f"{self.name} answers with status {status}{says}: try again later")
        if code is None or status == 404 or 300 <= status < 400:
            raise self._wrong_endpoint(f"it answers with status {status}, not as a Unity Catalog does{says}")
        raise CatalogUnavailableError(
            f"{self.name} refuses a request about {table} with status {status}{says}: check the table's name and the options lookup.catalog.…"
        )

    def _unreadable(self, table: str, problem: BaseException | None) -> CatalogUnavailableError:
        why = "" if problem is None else f": {describe_fault(problem)}"
        return CatalogUnavailableError(
            f"the answer of {self.name} about {table} cannot be read{why}: check lookup.catalog.uri"
        )

    def _wrong_endpoint(self, why: str) -> CatalogUnavailableError:
        return CatalogUnavailableError(
            f"{self.name} at {redact('path', self._uri)}: {why}: check lookup.catalog.uri, which is the server's address without {_API}"
        )

    # --- tokens -------------------------------------------------------------------------------------

    @property
    def _advice(self) -> str:
        if self._login is not None:
            return f"correct what the function of option {CREDENTIALS} returns"
        return (
            f"set {TOKEN_VARIABLE}, or {' and '.join(CLIENT_VARIABLES)}, in the environment of each machine that reads, or name a function with "
            f"{CREDENTIALS}"
        )

    def principal(self) -> tuple[object, ...]:
        """What identifies the principal: the server, and the credentials of this process."""
        with self._lock:
            credentials = self._last_credentials
        return self._uri, *sorted((self._credentials() if credentials is None else credentials).items())

    def _credentials(self) -> Mapping[str, str]:
        credentials = self._from_environment() if self._login is None else self._login(self._uri)
        with self._lock:
            self._last_credentials = credentials
        return credentials

    def _access_token(self, refused: str | None = None) -> str | None:
        """The token that a request carries; None: none is configured. `refused`: a token that the catalog has just refused."""
        with self._lock:
            token = self._token
        if token is not None and token[0] != refused and self._clock.steady_s() < token[1]:
            return token[0]
        login = self._credentials()
        if not login:
            return None
        if "token" in login:
            token = _as_one_line(login["token"]), math.inf
        elif {"client_id", "client_secret"} <= login.keys():
            token = self._get_token(login["client_id"], login["client_secret"])
        else:
            raise OptionError(
                f"the function of option {CREDENTIALS} returns no login for {self.name}: it must return a dictionary that has a token, or both "
                "client_id and client_secret"
            )
        with self._lock:
            self._token = token
        return token[0]

    def _from_environment(self) -> Mapping[str, str]:
        """The credentials in the environment. They are for the server that the environment names, if it names one."""
        uri = self._environ.get(URI_VARIABLE)
        token, (client_id, client_secret) = self._environ.get(TOKEN_VARIABLE), map(self._environ.get, CLIENT_VARIABLES)
        login = {"token": token} if token else {"client_id": client_id, "client_secret": client_secret}
        if not all(login.values()):
            return {}
        servers = [("uri", self._uri), *([] if token else [("oauth2-server-uri", self._token_uri)])]
        for name, server in servers:
            if uri and find_origin(server) != find_origin(uri):
                raise OptionError(
                    f"option lookup.catalog.{name} = {redact('path', server)!r} is a different server from {redact('path', uri)} ({URI_VARIABLE}), and the "
                    f"credentials in the environment are for that one only: correct one of the two, or name a function with {CREDENTIALS}"
                )
        return {name: text for name, text in login.items() if text}

    def _get_token(self, client_id: str, client_secret: str) -> tuple[str, float]:
        """(a token for the credentials of a client, when it is to be replaced on the steady clock). One call (OAuth 2.0, section 4.4)."""
        began_s = self._clock.steady_s()
        pair = base64.b64encode(f"{client_id}:{client_secret}".encode()).decode()
        headers = {
            "Authorization": f"Basic {pair}",
            "Content-Type": "application/x-www-form-urlencoded",
            "Accept": "application/json",
        }
        content = urllib.parse.urlencode({"grant_type": "client_credentials", "scope": self._scope}).encode()
        status, data, _ = self._send("POST", self._token_uri, headers, content)
        place = redact("path", self._token_uri)
        if status in (400, 401, 403):
            source = (
                " and ".join(CLIENT_VARIABLES)
                if self._login is None
                else f"what the function of option {CREDENTIALS} returns"
            )
            raise UfsPermissionError(
                f"{place} issues no token for {self.name} (status {status}): it refuses the client's id, secret or scope ({self._scope}): correct "
                f"{source}, or lookup.catalog.scope"
            )
        try:
            if status != 200:
                raise ValueError(f"status {status}")
            answer = json.loads(data)
            token, lives_s = _as_one_line(as_text(answer["access_token"])), float(answer.get("expires_in") or math.inf)
        except UNREADABLE as problem:  # its text may have the token
            fault = f"status {status}" if status != 200 else f"{type(problem).__name__}, status {status}"
            is_busy = status in (408, 429) or status >= 500
            advice = "try again later" if is_busy else "check lookup.catalog.oauth2-server-uri"
            raise_ours(
                CatalogUnavailableError(f"{place} issues no token for {self.name} ({fault}): {advice}"),
                None,
            )
        return token, began_s + renewed_after_s(lives_s, _RENEWED_BEFORE_S, self._draw())


def _as_one_line(token: str) -> str:
    if re.search(r"[^\x21-\x7e]", token):
        raise OptionError(
            f"the token for a Unity catalog, from {TOKEN_VARIABLE} or the function of option {CREDENTIALS}, has white space, a control character "
            "or a character outside ASCII: correct it"
        )
    return token


def _parse_error(data: bytes) -> tuple[str | None, str]:
    """(the code, the message) of an answer that says what is wrong; (None, "") if it does not say so as the API does."""
    try:
        answer = json.loads(data)
        error = answer.get("error") or answer
        code = error["type"] if "error" in answer else error["error_code"]
        return as_text(code), as_text(error.get("message") or "")
    except UNREADABLE:
        return None, ""


def _parse_commit(commit: Any) -> tuple[int, tuple[str, int, float]]:
    """(version, (name, size, time)) of a staged commit. Raises one of `decoding.UNREADABLE` for a malformed one."""
    commit = {name.replace("-", "_"): value for name, value in commit.items()}  # the two APIs spell names in two ways
    version, name = as_count(commit["version"]), as_text(commit["file_name"])
    match = _STAGED_NAME.fullmatch(name)
    if match is None or int(match[1]) != version:
        raise ValueError(f"the staged commit of version {version} has the name {name!r}")
    at_ms = as_count(commit["file_modification_timestamp"])
    return version, (name, as_count(commit["file_size"]), at_ms / 1000)


def _storage_options(answer: Mapping[str, Any], location: str) -> dict[str, Any]:
    """The options with which fsspec opens files at a location, of an answer with credentials; {} if it has none, as for files on a local disk.

    Raises one of `decoding.UNREADABLE` for malformed ones.
    """
    for name, parts in _CREDENTIALS.items():
        if credentials := answer.get(name):
            options: dict[str, Any] = {option: as_text(credentials[part]) for part, option in parts.items()}
            if name == "aws_temp_credentials":
                options["anon"] = False
            if name == "azure_user_delegation_sas":
                options |= azure_account(urllib.parse.urlsplit(location).hostname or "")
            return options
    return {}


_CREDENTIALS = {
    "aws_temp_credentials": {"access_key_id": "key", "secret_access_key": "secret", "session_token": "token"},
    "azure_user_delegation_sas": {"sas_token": "sas_token"},
    "gcp_oauth_token": {"oauth_token": "token"},
}
"""By the name of each kind of credentials: the option of fsspec's file system that each part is."""
