"""Short-lived credentials of S3, as a catalog vends them, and a store that checks them: the signature, the session token, the end, the prefix."""

import hashlib
import hmac
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from tests.support.s3server import Application, S3Server

_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{0}</Code><Message>{1}</Message></Error>'


class ShortCredentials:
    """Credentials for the objects of a server. Every request must be signed with some, except those of `server.client`, which tests use.

    `open_keys`: those that are not checked. `ahead_s`: how far the store's clock is ahead of the host's. `issued`: all that were vended, to be searched for where none belongs.
    """

    def __init__(self, server: S3Server) -> None:
        self.ahead_s = 0.0
        self.issued: list[dict[str, str]] = []
        self.refused: list[str] = []
        self._vended: dict[str, tuple[dict[str, str], str, float]] = {}
        self.open_keys = {server.client._request_signer._credentials.access_key}
        server.between = self._check

    def vend(self, url: str, lives_s: float) -> dict[str, str]:
        """As `AwsCredentials` of Unity Catalog spells them."""
        key = f"ASIA{uuid.uuid4().hex[:16].upper()}"
        credentials = {
            "access_key_id": key,
            "secret_access_key": f"secret-{uuid.uuid4().hex}",
            "session_token": f"session-{uuid.uuid4().hex}",
        }
        self.issued.append(credentials)
        self._vended[key] = credentials, f"{url.split('://', 1)[1].rstrip('/')}/", time.time() + self.ahead_s + lives_s
        return credentials

    def expire(self) -> None:
        """End all that were vended so far."""
        self._vended = {key: (credentials, prefix, 0.0) for key, (credentials, prefix, _) in self._vended.items()}

    def withdraw(self) -> None:
        """Make the store know none of those that were vended so far."""
        self._vended.clear()

    def _check(self, environ: dict[str, Any], start_response: Callable[..., Any], app: Application) -> Iterable[bytes]:
        refusal = self._refusal(environ)
        if refusal is None:
            return app(environ, start_response)
        status, code, message = refusal
        self.refused.append(code)
        body = b"" if environ["REQUEST_METHOD"] == "HEAD" else _ERROR.format(code, message).encode()
        start_response(f"{status} refused", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    def _refusal(self, environ: dict[str, Any]) -> tuple[int, str, str] | None:
        """What is wrong with a request's credentials; None if nothing is."""
        signed = environ.get("HTTP_AUTHORIZATION", "").removeprefix("AWS4-HMAC-SHA256 ")
        parts = dict(part.strip().split("=", 1) for part in signed.split(",") if "=" in part)
        key, _, scope = parts.get("Credential", "").partition("/")
        if key in self.open_keys:
            return None
        if key not in self._vended:
            return 403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records."
        credentials, prefix, ends_s = self._vended[key]
        if environ.get("HTTP_X_AMZ_SECURITY_TOKEN") != credentials["session_token"]:
            return 400, "InvalidToken", "The provided token is malformed or otherwise invalid."
        if _signature(environ, parts, scope, credentials["secret_access_key"]) != parts["Signature"]:
            return 403, "SignatureDoesNotMatch", "The request signature we calculated does not match."
        if time.time() + self.ahead_s >= ends_s:
            return 400, "ExpiredToken", "The provided token has expired."
        listed = urllib.parse.parse_qs(environ["QUERY_STRING"]).get("prefix", [""])[0]
        path = environ["PATH_INFO"].lstrip("/") if "list-type" not in environ["QUERY_STRING"] else ""
        requested_path = path or f"{environ['PATH_INFO'].strip('/')}/{listed}"
        return None if requested_path.startswith(prefix) else (403, "AccessDenied", "Access Denied")


def _signature(environ: dict[str, Any], parts: dict[str, str], scope: str, secret: str) -> str:
    """The signature of a request (AWS Signature Version 4)."""
    names = parts["SignedHeaders"].split(";")
    values = {
        name: environ.get("CONTENT_TYPE" if name == "content-type" else f"HTTP_{name.upper().replace('-', '_')}", "") for name in names
    }  # fmt: skip
    raw = urllib.parse.urlsplit(environ["RAW_URI"])
    query = "&".join(sorted(item if "=" in item else f"{item}=" for item in raw.query.split("&") if item))
    headers = "".join(f"{name}:{' '.join(values[name].split())}\n" for name in names)
    content = environ.get("HTTP_X_AMZ_CONTENT_SHA256", "")
    canonical = "\n".join([environ["REQUEST_METHOD"], raw.path, query, headers, parts["SignedHeaders"], content])
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", environ["HTTP_X_AMZ_DATE"], scope, digest])
    signing = f"AWS4{secret}".encode()
    for step in scope.split("/"):
        signing = hmac.new(signing, step.encode(), hashlib.sha256).digest()
    return hmac.new(signing, text.encode(), hashlib.sha256).hexdigest()
