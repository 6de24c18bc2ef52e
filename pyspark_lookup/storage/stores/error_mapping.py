"""Maps the errors of other libraries to ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from pyspark_lookup.errors import (
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
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.stores.store import Store

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
    """Decorate a store's class so that its operations on a path raise only our errors."""
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
    """Our error for one of another library; ours are returned unchanged."""
    if isinstance(error, PysparkLookupError):
        return error
    url = redact("path", url)
    chain, code, status = _chain(error), error_code(error), http_status(error)
    names = {base.__name__ for e in chain for base in type(e).__mro__}
    # fsspec's web client raises FileNotFoundError for every failure; its cause shows which.
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
    timed_out = isinstance(error, TimeoutError) or status == 408 or any("Timeout" in name for name in names)
    # 409: another conditional write of this key was under way.
    transient = status in (409, 429) or (status or 0) >= 500 or names & _LOST_CONNECTION or code in _TRANSIENT_CODES
    if status in (412, 304) or (isinstance(error, FileNotFoundError) and "FileExpired" in names):
        return SourceChangedError(f"{url} changed while it was read")
    if code == "NoSuchBucket":
        return UfsNotFoundError(
            f"{url}: there is no such bucket: check its name and the endpoint (lookup.storage.endpoint_url)"
        )
    if status in (404, 410) or (missing and not (status or timed_out or transient)):
        return UfsNotFoundError(f"{url} does not exist")
    text = f"{url}: {_reason(chain, missing)}"
    if advice := _advice(error, code, status):
        text += f" ({advice})"
    if code in _REGION_CODES or status in REDIRECTS:
        return UfsError(text)
    # s3fs raises PermissionError for 405, too, which is not about credentials.
    local = status is None and isinstance(error, PermissionError)
    if status in (401, 403) or code in _EXPIRED or local or "NoCredentialsError" in names:
        return UfsPermissionError(text if advice else f"{text} ({_CHECK})")
    if timed_out:
        return UfsTimeoutError(text)
    return UfsUnavailableError(text) if transient else UfsError(text)


def _chain(error: BaseException) -> list[BaseException]:
    """An error and a few of its causes, nearest first; the error twice if it has no cause."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and len(chain) < _CAUSES:
        chain.append(cause)
    return chain if len(chain) > 1 else [error, error]


def _reason(chain: Sequence[BaseException], missing: bool) -> str:
    """The reason that the store gives, else the error's text, in one line. The numbers of s3fs (`[Errno 22]`) help nobody."""
    answer = _answer(chain[0]).get("Error", {})
    code, message = answer.get("Code"), answer.get("Message")
    reason = message or str(chain[missing]) or type(chain[0]).__name__
    # Secrets are hidden before lines are joined: one may span several.
    line = " ".join(foreign_text(reason[:_LONGEST_REASON]).split()).rstrip(".")
    return line if not message or not code or code.isdigit() else f"{line} ({code})"


def _advice(error: BaseException, code: str | None, status: int | None) -> str | None:
    """Advice about a refusal of S3; None if the answer does not show what is wrong."""
    answer = _answer(error)
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = answer.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region")
    if code in _REGION_CODES or status in REDIRECTS:
        host = urlsplit(headers.get("location", "")).hostname or answer.get("Error", {}).get("Endpoint")
        where = f"the bucket is in region {region}" if region else "the bucket is in another region"
        to = f" (the redirect to {host} is not followed)" if host and not region else ""
        return (
            f"{where}{to}: set AWS_DEFAULT_REGION, or set lookup.storage.endpoint_url to the store that has the bucket"
        )
    if code in _EXPIRED:
        return (
            "the credentials are no longer valid: renew them, and restart this process if it takes them from the environment or the "
            "conf file"
        )
    if code in _BY_CODE:
        return _BY_CODE[code]
    if code == "InvalidRequest" and "encryption" in answer.get("Error", {}).get("Message", "").lower():
        return (
            "the object is encrypted with a key that only its writer has (SSE-C): write it again with SSE-S3 or SSE-KMS"
        )
    operation = next((name for cause in _chain(error) if (name := getattr(cause, "operation_name", None))), "")
    if status == 400 and operation == "HeadObject":  # the answer to HEAD has no body
        return "S3 does not say why: check for expired credentials, another region, or encryption with a key that only the writer has (SSE-C)"
    permission = _PERMISSIONS.get(operation) if status in (401, 403) else None
    return f"{_CHECK}: they need {permission}" if permission else None


def _answer(error: BaseException) -> dict[str, Any]:
    """S3's answer in an error; {} if there is none."""
    answers = (getattr(cause, "response", None) for cause in _chain(error))
    return next((answer for answer in answers if isinstance(answer, dict)), {})


def read_error(error: Exception, url: str) -> BaseException:
    """Like `our_error`, for reads: a file that is gone, is a directory now, or ends before the range is a SourceChangedError."""
    mapped = our_error(error, url)
    if error_code(error) == "NoSuchBucket":
        return mapped
    if isinstance(mapped, UfsNotFoundError) or isinstance(error, IsADirectoryError) or http_status(error) == 416:
        return SourceChangedError(f"{redact('path', url)} was replaced or removed")
    return mapped


_LOST_CONNECTION = {
    "ConnectionError",
    "ClientConnectionError",
    "ClientPayloadError",
    "FlexibleChecksumError",
    "HTTPClientError",
    "IncompleteReadError",
    "ResponseParserError",
}
_CAUSES = 5  # of an error, searched for the store's answer
_LONGEST_REASON = 2000  # characters
_CHECK = "check the credentials in the environment or the conf file"
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired"}
_BY_CODE = {
    "InvalidAccessKeyId": _CHECK,
    "SignatureDoesNotMatch": _CHECK,
    "RequestTimeTooSkewed": "set the clock of this host",
    "InvalidObjectState": "the object is archived: restore it first",
}
_REGION_CODES = {
    "PermanentRedirect",
    "TemporaryRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
REDIRECTS = (301, 302, 303, 307, 308)
"""The HTTP statuses by which a store names another host."""
_PERMISSIONS = {
    "ListObjectsV2": "s3:ListBucket for the bucket",
    "HeadObject": "s3:GetObject, and s3:ListBucket to learn that a file is missing",
    "GetObject": "s3:GetObject",
    "PutObject": "s3:PutObject",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
}
_TRANSIENT_CODES = {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "OperationAborted"}


def http_status(error: BaseException) -> int | None:
    """The HTTP status in an error or a cause of it: botocore's ClientError, aiohttp's ClientResponseError."""
    return next((status for cause in _chain(error) if (status := _status(cause)) is not None), None)


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return cast("int | None", response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def error_code(error: BaseException) -> str | None:
    """S3's code for an error or its cause; None without one."""
    return cast("str | None", _answer(error).get("Error", {}).get("Code"))
