"""Foreign errors become ours here, at the door: which of them means what."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from pyspark_lookup.base.errors import (
    PysparkLookupError,
    SourceChangedError,
    UfsError,
    UfsNotFoundError,
    UfsPermissionError,
    UfsTimeoutError,
    UfsUnavailableError,
    foreign_text,
    raise_ours,
)
from pyspark_lookup.io.stores.store import Store
from pyspark_lookup.options.conf_file import redact

S = TypeVar("S", bound=Store)

_OPERATIONS = (
    "get_meta",
    "list_status",
    "get_status",
    "list_files",
    "has_directory",
    "list_tree",
    "last_change_s",
    "delete",
    "delete_many",
    "put_if_absent",
)


def translate_errors(store: type[S]) -> type[S]:
    """A class of stores whose operations on a path let only our errors out."""
    for name in _OPERATIONS:
        setattr(store, name, _translate(getattr(store, name)))
    return store


def _translate(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def call(self: Store, path: str, *args: Any) -> Any:
        try:
            return operation(self, path, *args)
        except PysparkLookupError:
            raise
        except Exception as error:
            raise_ours(our_error(error, path), error)

    return call


def our_error(error: BaseException, url: str) -> BaseException:
    """The error of ours that says what a foreign one means; ours pass unchanged."""
    if isinstance(error, PysparkLookupError):
        return error
    url = redact("path", url)
    chain = [error, error.__cause__ or error]
    status = http_status(error)
    names = {base.__name__ for e in chain for base in type(e).__mro__}
    # fsspec's web client says FileNotFoundError for every failure; its cause says which.
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
    text = f"{url}: {foreign_text(str(chain[missing]))}"
    timed_out = isinstance(error, TimeoutError) or status == 408 or any("Timeout" in name for name in names)
    # 409: another conditional write of this key was under way.
    transient = status in (409, 429) or (status or 0) >= 500 or names & _LOST or error_code(error) in _TRANSIENT_CODES
    if status in (412, 304) or (isinstance(error, FileNotFoundError) and "FileExpired" in names):
        return SourceChangedError(f"{url} changed while it was read")
    if status in (404, 410) or (missing and not (status or timed_out or transient)):
        return UfsNotFoundError(f"{url} does not exist")
    if status in (401, 403) or isinstance(error, PermissionError) or "NoCredentialsError" in names:
        return UfsPermissionError(f"{text} (check the credentials in the environment or the conf file)")
    if timed_out:
        return UfsTimeoutError(text)
    return UfsUnavailableError(text) if transient else UfsError(text)


def read_error(error: Exception, url: str) -> BaseException:
    """As `our_error`, of a read: a file that is gone, that is a directory now, or ends before the range, is another version."""
    ours = our_error(error, url)
    if isinstance(ours, UfsNotFoundError) or isinstance(error, IsADirectoryError) or http_status(error) == 416:
        return SourceChangedError(f"{redact('path', url)} was replaced or removed")
    return ours


_LOST = {
    "ConnectionError",
    "ClientConnectionError",
    "ClientPayloadError",
    "FlexibleChecksumError",
    "HTTPClientError",
    "IncompleteReadError",
    "ResponseParserError",
}
_TRANSIENT_CODES = {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "OperationAborted"}


def http_status(error: BaseException) -> int | None:
    """The HTTP status that an error, or its cause, is about: botocore's ClientError, aiohttp's ClientResponseError."""
    chain = (error, error.__cause__ or error)
    return next((status for one in chain if (status := _status(one)) is not None), None)


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return cast("int | None", response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def error_code(error: BaseException) -> str | None:
    """What S3 calls an error, or its cause."""
    response = getattr(error.__cause__ or error, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None
