"""What an Iceberg REST catalog says about access to a table's files, in the terms of the REST catalog specification: the credentials that it vends,
and the conditions that this package does not meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pyspark_lookup.core.decoding import as_text
from pyspark_lookup.errors import NotSupportedError
from pyspark_lookup.storage.stores import VendedCredentials, azure_account

REFRESH_ENDPOINTS = (
    "client.refresh-credentials-endpoint",
    "gcs.oauth2.refresh-credentials-endpoint",
    "adls.refresh-credentials-endpoint",
)
"""The names under which a catalog says where credentials are renewed."""
_SETTINGS = (
    *REFRESH_ENDPOINTS, "s3.endpoint", "s3.region", "client.region", "s3.path-style-access", "gcs.project-id", "gcs.service.host"
)  # fmt: skip
_EXPIRES_AT_MS = (
    "s3.session-token-expires-at-ms", "gcs.oauth2.token-expires-at", "adls.sas-token-expires-at-ms.", "expiration-time"
)  # fmt: skip
_SAS = "adls.sas-token."
_REMOTE_SIGNING = "s3.remote-signing-enabled"

Config = Mapping[str, str]
"""Properties by name, as the `config` of a catalog's answer has them."""


def parse_config(answer: Any) -> dict[str, str]:
    """The `config` of an answer, without its nulls; empty if it has none. Raises one of `decoding.UNREADABLE` if it is not an object of texts."""
    config = answer.get("config") or {}
    return {as_text(name): as_text(value) for name, value in config.items() if value is not None}


def settings_of(config: Config) -> dict[str, str]:
    """The part of a table's `config` that says how its store is reached. It has no credentials."""
    return {name: config[name] for name in _SETTINGS if name in config and not {"@", "?"}.intersection(config[name])}


def parse_credentials(answer: Any, config: Config, location: str, now_s: float) -> list[VendedCredentials]:
    """The credentials in an answer: those of `storage-credentials`, then those in `config`; empty if there are none.

    `config`: the answer's own, or what `settings_of` returned of an earlier one. `location`: the table's, for credentials without a prefix.
    `now_s`: the time of the answer on the catalog's clock (Unix time). Raises TypeError, KeyError or ValueError for a malformed answer.
    """
    credentials = []
    for credential in answer.get("storage-credentials") or ():
        own_config = {**settings_of(config), **parse_config(credential)}
        credentials.append(_credentials(as_text(credential["prefix"]), own_config, location, now_s))
    # They have no prefix, so that the longer prefixes above are preferred.
    credentials.append(_credentials("", config, location, now_s))
    return [one for one in credentials if one is not None]


def _credentials(prefix: str, config: Config, location: str, now_s: float) -> VendedCredentials | None:
    options = _options(prefix or location, config)
    if options is None:
        return None
    times_ms = [value for name, value in config.items() if name.startswith(_EXPIRES_AT_MS)]
    expires_in_s = min((float(as_text(value)) / 1000 - now_s for value in times_ms), default=None)
    return VendedCredentials(prefix or f"{urlsplit(location).scheme}://", options, expires_in_s)


def _options(url: str, config: Config) -> dict[str, Any] | None:
    """The options with which fsspec opens the store of a URL; None if `config` has no credentials for it."""
    scheme = urlsplit(url).scheme or url  # a prefix may be just "s3"
    if scheme.startswith("s3"):
        return _s3_options(config)
    if scheme in ("gs", "gcs"):
        token = config.get("gcs.oauth2.token")
        named = {
            "token": token,
            "project": config.get("gcs.project-id"),
            "endpoint_url": config.get("gcs.service.host"),
        }
        return None if token is None else {name: value for name, value in named.items() if value is not None}
    if scheme.startswith(("abfs", "wasb")):
        return _azure_options(urlsplit(url).hostname or "", config)
    return None


def _s3_options(config: Config) -> dict[str, Any] | None:
    key, secret = config.get("s3.access-key-id"), config.get("s3.secret-access-key")
    if key is None or secret is None:
        return None
    options: dict[str, Any] = {"key": key, "secret": secret, "token": config.get("s3.session-token"), "anon": False}
    if endpoint := config.get("s3.endpoint"):
        options["endpoint_url"] = endpoint
    if region := config.get("s3.region") or config.get("client.region"):
        options["client_kwargs"] = {"region_name": region}
    if config.get("s3.path-style-access", "").lower() == "true":
        options["config_kwargs"] = {"s3": {"addressing_style": "path"}}
    return options


def _azure_options(host: str, config: Config) -> dict[str, Any] | None:
    """The options with which fsspec opens the store of an Azure account; None if `config` has no credentials for it.

    `host`: the account's, `<account>.dfs.core.windows.net`. Properties name the account by its host or by its name alone.
    """
    account = host.partition(".")[0]
    token = config.get(f"{_SAS}{host}") or config.get(f"{_SAS}{account}")
    return None if token is None else {**azure_account(host), "sas_token": token}


def refuse_conditions(answer: Any, config: Config, has_credentials: bool, table: str) -> None:
    """Raise NotSupportedError if the catalog states a condition of access that this package does not meet.

    `has_credentials`: the catalog has vended credentials. `table`: what errors call the table.
    """
    restrictions = answer.get("read-restrictions") or {}
    if not isinstance(restrictions, Mapping) or any(
        value not in (None, [], {}, True) for value in restrictions.values()
    ):
        stated = ", ".join(sorted(restrictions)) if isinstance(restrictions, Mapping) else type(restrictions).__name__
        raise NotSupportedError(
            f"{table} has row filters or column masks for this principal (read-restrictions: {stated}), which lookupcache does not apply: "
            "read it with an engine that does, or have a principal without restrictions read it"
        )
    if config.get("scan-planning-mode", "").lower() == "server":
        raise NotSupportedError(
            f"{table}: only its catalog may plan scans (scan-planning-mode = server), which lookupcache does not support: "
            "have the catalog allow planning by clients"
        )
    configs: Sequence[Config] = [config, *(parse_config(one) for one in answer.get("storage-credentials") or ())]
    if not has_credentials and any(one.get(_REMOTE_SIGNING, "").lower() == "true" for one in configs):
        raise NotSupportedError(
            f"{table}: its catalog wants to sign each request to the store ({_REMOTE_SIGNING} = true), which lookupcache does not do: "
            "have the catalog vend credentials instead (credential vending)"
        )
