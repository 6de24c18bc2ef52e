"""`HttpOptions`: the options of a table behind an HTTP API that answers in JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import urllib.parse
from collections.abc import Callable
from typing import Any, ClassVar

import pyarrow as pa

from pyspark_lookup.columnar.types import resolve_names
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.credentials import LOGIN_HEADERS, find_origin, names_secret, without_credentials
from pyspark_lookup.errors import OptionError
from pyspark_lookup.options.conf_file import tells_secret
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.parsing import POSITIVE_COUNT, POSITIVE_DURATION, Kind, option
from pyspark_lookup.sources.credentials import CredentialOptions
from pyspark_lookup.sources.providers.functions import AsyncLookupFunctionProvider, LookupContext, LookupProvider
from pyspark_lookup.sources.providers.provider import NamedProviderOptions, ProviderOptions
from pyspark_lookup.sources.providers.services.answers import AnswerReader, compile_path
from pyspark_lookup.sources.providers.services.http_function import HEADER, VARIABLE, HttpFunction
from pyspark_lookup.sources.providers.services.http_request import BODY, URL, RequestTemplate
from pyspark_lookup.sources.providers.services.templates import check_key_type

_LOGIN_SCHEME = re.compile(r"[A-Za-z-]{0,20}")  # such as Bearer
_HEADERS_OF_CLIENT = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "if-none-match", "if-modified-since"}
)


def _parse_url(text: str) -> str:
    text = text.strip()
    try:
        parts = urllib.parse.urlsplit(text)
        port = parts.port
    except ValueError:
        port = -1
    if (
        port == -1
        or parts.scheme.lower() not in ("http", "https")
        or not parts.hostname
        or re.search(r"[\s{}]", parts.netloc)
    ):
        raise ValueError(
            "the URL of an API, with key columns in braces in its path or query, e.g. 'https://api.example.com/customers/{id}'"
        )
    if parts.fragment or re.search(r"\s", text):
        raise ValueError("a URL without white space and without a fragment (#…)")
    return text


def _parse_body(text: str) -> str:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(
            """JSON in which the string "{keys}" stands for a list of keys, e.g. '{"ids": "{keys}"}'"""
        ) from None
    return text


def _parse_rows(text: str) -> str:
    compile_path(text)
    return text


@dataclasses.dataclass(frozen=True)
class HttpOptions(NamedProviderOptions):
    """The options of a table behind an HTTP API, with `lookup.provider` = `http`."""

    provider_name: ClassVar[str] = "http"
    dates_rows: ClassVar[bool] = True
    prefix: ClassVar[str] = "lookup.http."

    # fmt: off
    url: str | None = option(
        URL, Kind("URL", _parse_url), None,
        doc="The URL of one row, with the key columns in braces: `https://api.example.com/customers/{id}`. Or the URL of many rows, with `{keys}` for "
            "a comma-separated list of keys: `https://api.example.com/customers?ids={keys}`. See [services](services.md).",
    )
    body: str | None = option(
        BODY, Kind("JSON", _parse_body), None,
        doc="The body of a POST request: JSON in which the string `\"{keys}\"` stands for a list of keys, or `\"{id}\"` for the value of a key column.",
    )
    rows: str | None = option(
        "lookup.http.rows", Kind("JMESPath", _parse_rows), None, default_text="the whole answer",
        doc="Where the rows are in an answer, as a JMESPath expression: `data.items`, `docs[]._source`, `[].{id: user.id, city: address.city}`.",
    )
    batch_size: int = option(
        "lookup.http.batch-size", POSITIVE_COUNT, 100,
        doc="With `{keys}`: the most keys in a request.",
    )
    timeout_s: float = option(
        "lookup.http.timeout", POSITIVE_DURATION, 30.0, default_text="30 s",
        doc="How long a request may take. `lookup.async.timeout` limits a lookup with all its retries.",
    )
    headers: tuple[tuple[str, str], ...] = option(
        f"{HEADER}*", Kind("string", str), (),
        doc="A header that each request has. `${NAME}` stands for an environment variable on the machine that sends the request: "
            "`lookup.http.header.Authorization` = `Bearer ${SHOP_TOKEN}`.",
    )
    # fmt: on

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.url, self.body, self.rows, self.headers

    def check_system(self, options: LookupOptions) -> None:
        if options.files.path:
            raise OptionError(
                f"option path has no meaning with lookup.provider = 'http', whose URL is in {URL}: remove the option path"
            )
        if self.url is None:
            raise OptionError(
                f"option {URL} is missing: set it to the URL of a row, e.g. 'https://api.example.com/customers/{{id}}'"
            )
        if options.files.schema is None:
            raise OptionError(
                "option lookup.schema is missing: declare the columns that rows have, e.g. 'id BIGINT, name STRING'"
            )
        for key, text in ((URL, self.url), (BODY, self.body or "")):
            if tells_secret(key, text):
                raise OptionError(
                    f"option {key} holds a credential, which plans and catalogs would store: send it in a header, {HEADER}… = '${{NAME}}', or let "
                    "lookup.credentials return it"
                )
        for name, value in self.headers:
            _check_header(name, value)
        RequestTemplate(self.url, self.body).check(options.files.keys or ())

    def find_limit_scope(self, options: LookupOptions) -> str:
        assert self.url is not None
        return str(find_origin(self.url.partition("{")[0]))

    def provide(self, options: LookupOptions, clock: HostClock) -> Callable[[LookupContext], LookupProvider]:
        def provide(context: LookupContext) -> LookupProvider:
            schema = options.files.schema
            assert schema is not None
            assert self.url is not None
            keys = tuple(resolve_names(context.keys, schema, "lookup.keys"))
            for key in keys:
                check_key_type("lookup.keys", schema.field(key))
            columns = [f for f in schema if context.columns is None or f.name in (*keys, *context.columns)]
            requests = RequestTemplate(self.url, self.body)
            calls = options.kind(ProviderOptions)
            function = HttpFunction(
                requests,
                AnswerReader(pa.schema(columns), self.rows, keys),
                origin=self.url.partition("{")[0],
                batch_size=self.batch_size if requests.batch else 1,
                timeout_s=min(self.timeout_s, calls.async_timeout_s),
                timeout_option="lookup.http.timeout"
                if self.timeout_s <= calls.async_timeout_s
                else "lookup.async.timeout",
                pause_at_most_s=calls.async_timeout_s,
                headers=dict(self.headers),
                login=options.kind(CredentialOptions).function,
            )
            return AsyncLookupFunctionProvider(function, schema)

        return provide


def _check_header(name: str, value: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
        raise OptionError(f"option {HEADER}{name}: {name!r} is not a valid name of an HTTP header: correct it")
    if re.search(r"[\r\n\0]", value):
        raise OptionError(f"option {HEADER}{name}: the value has a line break or a NUL: write it on one line")
    if name in _HEADERS_OF_CLIENT:
        raise OptionError(f"option {HEADER}{name}: lookupcache sets this header itself: remove the option")
    literal = VARIABLE.sub("", value)
    names_one = names_secret(name) or name in LOGIN_HEADERS
    is_secret = names_one and not (literal != value and _LOGIN_SCHEME.fullmatch(literal.strip()))
    if is_secret or (not names_one and without_credentials(f"{name}: {literal}") != f"{name}: {literal}"):
        raise OptionError(
            f"option {HEADER}{name} holds a credential, which plans and catalogs would store: put it into an environment variable on the machines "
            f"that send requests, and write '${{NAME}}', or let lookup.credentials return it"
        )
