"""Asks a catalog, through PyIceberg: for the location of a table's metadata file, and a REST catalog for the whole answer about a table."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn
from urllib.parse import parse_qsl, urljoin

import pydantic
from pyiceberg.catalog import _ENV_CONFIG, Catalog, load_catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import NoSuchIdentifierError, NoSuchNamespaceError, NoSuchTableError, NotInstalledError
from pyiceberg.io import FileIO, InputFile, OutputFile

from pyspark_lookup.core.credentials import (
    LOGIN_HEADERS,
    find_origin,
    list_header_secrets,
    names_secret,
    redact_server_text,
)
from pyspark_lookup.core.decoding import UNREADABLE
from pyspark_lookup.errors import (
    CatalogUnavailableError,
    NotSupportedError,
    OptionError,
    UfsNotFoundError,
    UfsPermissionError,
    foreign_text,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact, tells_secret

_SERVERS = ("uri", "oauth2-server-uri")
"""The properties that name the servers to which a REST catalog's credentials are sent."""
_NOT_THERE = (NoSuchTableError, NoSuchNamespaceError, NoSuchIdentifierError)
_CREDENTIALS = "GET /v1/{prefix}/namespaces/{namespace}/tables/{table}/credentials"
_LONGEST_REASON = 500  # characters of a catalog's message that are shown


class _PointerError(BaseException):
    """Carries the location of the metadata file out of PyIceberg's `load_table`, before that function reads the file.

    It is a BaseException, so that no handler in PyIceberg catches it.
    """

    def __init__(self, location: str) -> None:
        self.location = location


class PointerFileIO(FileIO):
    """A FileIO that reads nothing: it raises `_PointerError` for the file that PyIceberg is about to read."""

    def new_input(self, location: str) -> InputFile:
        raise _PointerError(location)

    def new_output(self, location: str) -> OutputFile:
        raise NotSupportedError(f"{location}: lookupcache does not write to Iceberg tables")

    def delete(self, location: str | InputFile | OutputFile) -> None:
        raise NotSupportedError(f"{location}: lookupcache does not delete files of Iceberg tables")


class DirectRestCatalog(RestCatalog):
    """PyIceberg's client of a REST catalog, which follows no redirects: another host would get the configured headers and the client's secret."""

    def _config_headers(self, session: Any) -> None:
        super()._config_headers(session)  # called before a session's first request
        session.max_redirects = 0


_CATALOG_PROPERTIES = {
    "py-io-impl": f"{__name__}.{PointerFileIO.__name__}",
    "init_catalog_tables": "false",  # an SQL catalog must not create its tables, because it is only read here
}


def open_catalog(name: str, properties: Mapping[str, str]) -> Catalog:
    """The catalog with this name.

    Raises OptionError if the catalog is not configured, or PyIceberg was installed without a part that the catalog needs, and
    CatalogUnavailableError if the catalog does not answer.
    """
    _check_servers(name, properties)
    if is_rest(name, properties) and not _configuration(name, properties).get("uri"):
        raise OptionError(
            f"option lookup.catalog = {name!r}: the REST catalog has no uri: set lookup.catalog.uri, or its uri in PyIceberg's configuration"
        )
    try:
        if is_rest(name, properties):
            catalog: Catalog = DirectRestCatalog(name, **_configuration(name, properties), **_CATALOG_PROPERTIES)
        else:
            catalog = load_catalog(name, **properties, **_CATALOG_PROPERTIES)
    except (ValueError, NotInstalledError, ImportError) as problem:
        if isinstance(problem, pydantic.ValidationError):
            raise_ours(_unavailable_error(name, problem), problem)
        raise_ours(
            OptionError(
                f"option lookup.catalog = {name!r}: {problem}. Configure it in .pyiceberg.yaml, in the environment, or by "
                "lookup.catalog.… (e.g. lookup.catalog.uri)"
            ),
            problem,
        )
    except Exception as problem:
        response = _get_response(problem)
        if getattr(response, "status_code", None) in (*_UNAUTHORISED, _FORBIDDEN):
            raise_ours(
                UfsPermissionError(
                    f"the Iceberg catalog {name!r} refuses this principal's credentials ({_describe_problem(problem)}): check the token or "
                    "credential in PyIceberg's configuration"
                ),
                _get_cause(problem),
            )
        if response is None:
            raise_ours(_unavailable_error(name, problem), problem)
        raise_ours(_status_error(name, response), _get_cause(problem))
    # A table's properties may name another FileIO, which would then be used instead of `PointerFileIO`.
    catalog._load_file_io = lambda *_: PointerFileIO()  # type: ignore[method-assign]
    return catalog


def _check_servers(name: str, properties: Mapping[str, str]) -> None:
    """Raise OptionError if `properties`, which options give, name a different server from PyIceberg's configuration, which has credentials for that one.

    Whoever writes the options, such as those of a table in Spark's catalog, would get the credentials of each reader.
    """
    config = {key: str(text) for key, text in _configuration(name, {}).items()}
    if "uri" not in config or not any(tells_secret(key, text) for key, text in config.items() if key not in _SERVERS):
        return
    known = {find_origin(config[key]) for key in _SERVERS if key in config}
    for key in _SERVERS:
        if key in properties and find_origin(properties[key]) not in known:
            raise OptionError(
                f"option lookup.catalog.{key} = {redact('path', properties[key])!r} is a different server from {redact('path', config['uri'])}, for which "
                f"PyIceberg's configuration has the credentials of catalog {name!r}: remove the option, or configure a catalog with another name"
            )


def _configuration(name: str, properties: Mapping[str, str]) -> dict[str, Any]:
    """PyIceberg's configuration of a catalog, in which `properties` come first."""
    return {**(_ENV_CONFIG.get_catalog_config(name) or {}), **properties}


def is_rest(name: str, properties: Mapping[str, str]) -> bool:
    """Whether a catalog is a REST catalog, by its configuration. Makes no call. False for a catalog that is not configured."""
    config = _configuration(name, properties)
    kind = str(config.get("type") or "").lower()
    return kind == "rest" or (not kind and str(config.get("uri") or "").startswith("http"))


def find_location(catalog: Catalog, name: str, table: str) -> str:
    """The location of the metadata file of `table`, from a catalog that is no REST catalog. Raises the errors of `Catalog.load`."""
    try:
        catalog.load_table(table)
    except _PointerError as pointer:
        return pointer.location
    except _NOT_THERE as problem:
        raise_ours(UfsNotFoundError(f"the Iceberg catalog {name!r} has no table {table}: {problem}"), problem)
    except NotInstalledError as problem:
        raise_ours(OptionError(f"option lookup.catalog = {name!r}: {problem}"), problem)
    except Exception as problem:
        raise_ours(_unavailable_error(name, problem), problem)
    raise _unavailable_error(name, "gave an answer without metadata")


@dataclasses.dataclass(frozen=True, repr=False)
class RestAnswer:
    """A REST catalog's answer about a table: a JSON object, which may contain credentials. `at_s`: the time on the catalog's clock (Unix time),
    None if the answer does not state it."""

    content: Mapping[str, Any]
    at_s: float | None


def ask_for_table(catalog: Any, name: str, table: str, timeout_s: float, with_history: bool = True) -> RestAnswer:
    """A REST catalog's answer to the request for a table. PyIceberg would refuse parts of it that it does not know yet.

    PyIceberg's session sends `X-Iceberg-Access-Delegation: vended-credentials` with each request, also while credentials are at hand. With it, a
    catalog checks whether the principal may read the table's rows; without it perhaps only whether it may see the table's definition.
    `with_history`: see `Catalog.load`. Raises the errors of `Catalog.load`.
    """
    mode = catalog.properties.get("snapshot-loading-mode") if with_history else "refs"
    return _ask(catalog, name, table, _url(catalog, table), timeout_s, {} if mode is None else {"snapshots": mode})


def ask_for_credentials(
    catalog: Any, name: str, table: str, timeout_s: float, endpoint: str | None
) -> RestAnswer | None:
    """A REST catalog's answer to the request for a table's credentials; None if the catalog does not say that it answers such requests.

    `endpoint`: the URL at which the catalog said that credentials are renewed. If it is a URL of another host, it is not asked, because that
    host would get the token of this process. Raises the errors of `Catalog.load`.
    """
    base = catalog.uri.rstrip("/") + "/"
    url = ""
    if endpoint is not None:
        with contextlib.suppress(ValueError):  # it is no URL
            url = urljoin(base, endpoint if "://" in endpoint else endpoint.lstrip("/"))
    origin = find_origin(url)
    if origin is None or origin != find_origin(base):
        if _CREDENTIALS not in {str(known) for known in getattr(catalog, "_supported_endpoints", ())}:
            return None
        url = f"{_url(catalog, table)}/credentials"
    return _ask(catalog, name, table, url, timeout_s, {})


def _url(catalog: Any, table: str) -> str:
    parts = catalog._split_identifier_for_path(table)
    return str(catalog.url("namespaces/{namespace}/tables/{table}", prefixed=True, **parts))


def _ask(catalog: Any, name: str, table: str, url: str, timeout_s: float, parameters: Mapping[str, str]) -> RestAnswer:
    question = functools.partial(catalog._session.get, url, params=parameters, timeout=timeout_s)
    try:
        response = question()
        if response.status_code in _UNAUTHORISED:
            catalog._refresh_token()
            response = question()
    except Exception as problem:
        redirect = getattr(problem, "response", None)
        if redirect is not None:
            _refuse(name, table, redirect)
        raise_ours(_unavailable_error(name, problem), _get_cause(problem))
    if response.status_code != _OK:
        _refuse(name, table, response)
    date = response.headers.get("Date")
    at_s = None
    with contextlib.suppress(TypeError, ValueError):
        at_s = parsedate_to_datetime(date).timestamp()
    try:
        content = json.loads(response.content)
    except UNREADABLE:
        content = None
    if not isinstance(content, dict):
        raise _wrong_endpoint_error(name, response)
    return RestAnswer(content, at_s)


_OK, _FORBIDDEN, _NOT_FOUND = 200, 403, 404
_UNAUTHORISED = (401, 419)


def _refuse(name: str, table: str, response: Any) -> NoReturn:
    """Raise the error for an answer whose status is not 200."""
    status, message, reason = response.status_code, _message(response), _reason(response)
    if status in _UNAUTHORISED:
        refusal = UfsPermissionError(
            f"the Iceberg catalog {name!r} could not authenticate the request for {table} ({reason}): the token has expired or is wrong: renew it in "
            "PyIceberg's configuration, and restart this process"
        )
        refusal.expired = True
        raise refusal
    if status == _FORBIDDEN:
        raise UfsPermissionError(
            f"the Iceberg catalog {name!r} does not let this principal read {table} ({reason}): ask for a grant to read the table"
        )
    if status == _NOT_FOUND and message:
        raise UfsNotFoundError(f"the Iceberg catalog {name!r} has no table {table}: {message}")
    raise _status_error(name, response)


_SERVER_ERRORS = 500


def _message(response: Any) -> str:
    """The message in the body of a REST catalog's error; "" if the body is not an error in the form of the REST catalog specification."""
    try:
        error = json.loads(response.content)["error"]
        text = error if isinstance(error, str) else f"{error.get('type')}: {error.get('message')}"
    except (*UNREADABLE, AttributeError):
        return ""
    return foreign_text(redact_server_text(text, _find_sent_secrets(response))[:_LONGEST_REASON])


def _find_sent_secrets(response: Any) -> list[str]:
    """The credentials in the request that got this response: those in its headers, and those in a form that asks for a token."""
    request = getattr(response, "request", None)
    headers, body = getattr(request, "headers", None) or {}, getattr(request, "body", None) or ""
    form = dict(parse_qsl(body.decode(errors="replace") if isinstance(body, bytes) else str(body)))
    secrets = [text for name, text in form.items() if names_secret(name)]
    for name, value in headers.items():
        if name.lower() in LOGIN_HEADERS or names_secret(name):
            secrets += list_header_secrets(value.decode(errors="replace") if isinstance(value, bytes) else str(value))
    return secrets


def _get_response(problem: Exception) -> Any:
    """The response that made PyIceberg raise an error; None if there is none."""
    return getattr(problem.__cause__ or problem, "response", None)


def _describe_problem(problem: Exception) -> str:
    """The text of an error, which may be a server's, without what was sent to it."""
    return redact_server_text(str(problem), _find_sent_secrets(_get_response(problem)))


def _get_cause(problem: Exception) -> Exception | None:
    """The error, if it may be shown as the cause of ours."""
    texts = f"{problem!r} {problem.__cause__!r}"
    return problem if redact_server_text(texts, _find_sent_secrets(_get_response(problem))) == texts else None


def _reason(response: Any) -> str:
    message = _message(response)
    return f"{response.status_code}: {message}" if message else str(response.status_code)


def _status_error(name: str, response: Any) -> CatalogUnavailableError:
    if response.status_code < _SERVER_ERRORS and not _message(response):
        return _wrong_endpoint_error(name, response)
    return _unavailable_error(name, f"answered with HTTP status {_reason(response)}")


def _wrong_endpoint_error(name: str, response: Any) -> CatalogUnavailableError:
    kind = "an HTML page" if b"<html" in response.content[:1000].lower() else f"{len(response.content)} bytes"
    return CatalogUnavailableError(
        f"the Iceberg catalog {name!r} answered with {kind} (HTTP status {response.status_code}), and not as a REST catalog does: check its endpoint "
        "(uri and warehouse in PyIceberg's configuration, lookup.catalog.uri)"
    )


def _unavailable_error(name: str, problem: Exception | str) -> CatalogUnavailableError:
    fault = (
        problem
        if isinstance(problem, str)
        else f"gave no answer: {type(problem).__name__}: {' '.join(_describe_problem(problem).split())}"
    )
    return CatalogUnavailableError(
        f"the Iceberg catalog {name!r} {fault}; try again later, or check its properties (PyIceberg's configuration, lookup.catalog.…)"
    )
