"""`RedisOptions`: the options of a table in Redis. `RedisFunction`: looks keys up there, in pipelines."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import one_array
from pyspark_lookup.columnar.types import resolve_names
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.credentials import redact_server_text
from pyspark_lookup.core.decoding import show
from pyspark_lookup.errors import LookupFunctionError, OptionError, SchemaError, raise_ours
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.parsing import Kind, choice, option, parse_text
from pyspark_lookup.scan.formats.inference import convert
from pyspark_lookup.scan.formats.text import json_column
from pyspark_lookup.sources.credentials import CREDENTIALS, CredentialOptions, Credentials
from pyspark_lookup.sources.providers.functions import (
    FinalLookupError,
    LookupContext,
    LookupFunction,
    LookupFunctionProvider,
    LookupProvider,
)
from pyspark_lookup.sources.providers.provider import NamedProviderOptions, ProviderOptions
from pyspark_lookup.sources.providers.services.answers import decode_json
from pyspark_lookup.sources.providers.services.templates import KeyTemplate, check_key_type, texts_of_keys

KEY = "lookup.redis.key-pattern"
_KEYS_AT_ONCE = 1000
_TIMEOUT_S = 30.0
_CONNECT_S = 10.0


class RedisValue(enum.Enum):
    """What a Redis key holds."""

    HASH = "HASH"
    JSON = "JSON"


@dataclasses.dataclass(frozen=True)
class RedisOptions(NamedProviderOptions):
    """The options of a table in Redis, with `lookup.provider` = `redis`. The path is the server's URL."""

    provider_name: ClassVar[str] = "redis"
    prefix: ClassVar[str] = "lookup.redis."

    # fmt: off
    key_pattern: str | None = option(
        KEY, Kind("string", parse_text), None,
        doc="The name of a row's Redis key, with the key columns in braces: `customer:{id}`. The path is the server's URL, "
            "`redis://cache.example.com:6379/0`. See [services](services.md#redis).",
    )
    value: RedisValue = option(
        "lookup.redis.value", choice(RedisValue), RedisValue.HASH,
        doc="What a Redis key holds: a hash with a field for each column (HASH), or a string with a JSON object (JSON).",
    )
    # fmt: on

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.key_pattern, self.value.value

    def check_system(self, options: LookupOptions) -> None:
        parse_address(options.files.path)
        if self.key_pattern is None:
            raise OptionError(
                f"option {KEY} is missing: set it to the name of a row's Redis key, e.g. 'customer:{{id}}'"
            )
        if options.files.schema is None:
            raise OptionError(
                "option lookup.schema is missing: declare the columns that rows have, e.g. 'id BIGINT, name STRING'"
            )
        KeyTemplate(KEY, self.key_pattern).check(options.files.keys or ())

    def provide(self, options: LookupOptions, clock: HostClock) -> Callable[[LookupContext], LookupProvider]:
        def provide(context: LookupContext) -> LookupProvider:
            schema = options.files.schema
            assert schema is not None
            assert self.key_pattern is not None
            keys = tuple(resolve_names(context.keys, schema, "lookup.keys"))
            for key in keys:
                check_key_type("lookup.keys", schema.field(key))
            columns = [f for f in schema if context.columns is None or f.name in (*keys, *context.columns)]
            calls = options.kind(ProviderOptions)
            function = RedisFunction(
                options.files.path,
                KeyTemplate(KEY, self.key_pattern),
                ValueReader(pa.schema(columns), keys, self.value),
                self.value,
                min(_TIMEOUT_S, calls.async_timeout_s),
                options.kind(CredentialOptions).function,
            )
            return LookupFunctionProvider(function, schema)

        return provide


def parse_address(path: str) -> urllib.parse.SplitResult:
    """The parts of a server's URL. Raises OptionError for a URL with a password, whose message does not show the URL, and for one that is malformed."""
    expected = "the URL of a Redis server, redis://host:port/database or rediss://… for TLS"
    try:
        parts = urllib.parse.urlsplit(path)
        port = parts.port
    except ValueError:
        parts, port = urllib.parse.urlsplit(""), -1
    if parts.password is not None:
        raise OptionError(
            f"option path is a URL that holds a password; make it {parts.scheme}://host:port/database, and set REDISCLI_AUTH on the machines that connect, "
            f"or let {CREDENTIALS} return the password"
        )
    if parts.query:
        raise OptionError(
            f"option path is a URL that has parameters, which are not accepted: make it {parts.scheme}://host:port/database (rediss:// for TLS); a "
            f"password belongs in REDISCLI_AUTH on the machines that connect, or in what {CREDENTIALS} returns"
        )
    database = parts.path.removeprefix("/")
    is_server = port != -1 and parts.scheme in ("redis", "rediss") and parts.hostname
    if not is_server or parts.fragment or not (database or "0").isdecimal():
        shown = "" if "@" in path else f" = {path!r}"  # maybe the end of a password
        raise OptionError(f"option path{shown}: expected {expected}")
    return parts


class ValueReader:
    """Makes rows of the values of Redis keys. `schema`: the columns; `keys`: those of the key, which a value need not repeat."""

    def __init__(self, schema: pa.Schema, keys: tuple[str, ...], value: RedisValue) -> None:
        self.schema = schema
        self._keys = keys
        self._is_hash = value is RedisValue.HASH

    def read(self, keys: pa.Table, names: Sequence[str], values: Sequence[Any]) -> pa.Table:
        """The rows of `keys`. `names`: the Redis key of each; `values`: what it has, None or an empty hash if it does not exist.

        Raises LookupFunctionError for a value that is not a row.
        """
        numbers = [number for number, value in enumerate(values) if value or (value is not None and not self._is_hash)]
        rows = [values[number] for number in numbers]
        if not self._is_hash:
            rows = [_decode_object(names[number], values[number]) for number in numbers]
        columns = []
        for field in self.schema:
            try:
                column = (
                    self._hash_column(rows, field)
                    if self._is_hash
                    else json_column([row.get(field.name) for row in rows], field.type)
                )
            except (SchemaError, ValueError, pa.ArrowException) as problem:
                raise LookupFunctionError(
                    f"column {field.name!r} of Redis key {_shown(names, numbers)}: {problem}"
                ) from None
            if field.name in self._keys:
                column = pc.coalesce(column, one_array(keys.column(field.name)).take(pa.array(numbers, pa.int64())))
            columns.append(column)
        return pa.Table.from_arrays(columns, schema=self.schema)

    def _hash_column(self, rows: Sequence[Mapping[bytes, bytes]], field: pa.Field) -> pa.Array:
        name = field.name.encode()
        column = pa.array([row.get(name) for row in rows], pa.binary())
        if pa.types.is_binary(field.type):
            return column
        texts = column.cast(pa.string())  # raises ArrowInvalid for bytes that are not UTF-8
        if not pa.types.is_nested(field.type):
            return convert(texts, field.type)
        return json_column(
            [None if text is None else decode_json(text.encode()) for text in texts.to_pylist()], field.type
        )


def _shown(names: Sequence[str], numbers: Sequence[int]) -> str:
    return repr(names[numbers[0]]) + (f" or of {len(numbers) - 1} others" if len(numbers) > 1 else "")


_ADVICE = "correct the value, or option lookup.redis.value"


def _decode_object(name: str, content: bytes) -> dict[str, Any]:
    try:
        value = decode_json(content)
    except ValueError as problem:
        raise LookupFunctionError(f"Redis key {name!r} does not hold a JSON object: {problem}: {_ADVICE}") from None
    if not isinstance(value, dict):
        raise LookupFunctionError(f"Redis key {name!r} does not hold a JSON object: {show(value)}: {_ADVICE}")
    return value


class RedisFunction(LookupFunction):
    """Looks up keys in a Redis server, or in the cluster that it belongs to. `login`: returns `user` and `password` for the server's URL."""

    batch_size = _KEYS_AT_ONCE

    def __init__(
        self,
        url: str,
        template: KeyTemplate,
        reader: ValueReader,
        value: RedisValue,
        timeout_s: float,
        login: Credentials | None,
    ) -> None:
        self._url = url
        self._template = template
        self._reader = reader
        self._command = "HGETALL" if value is RedisValue.HASH else "GET"
        self._timeout_s = timeout_s
        self._login = login
        self._client: Any = None
        self._password: str | None = None

    def open(self) -> None:
        self._client = self._connect(cluster=False)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                client.close()

    def lookup(self, keys: pa.Table) -> pa.Table:
        import redis

        names = [self._template.fill(texts) for texts in texts_of_keys(keys, self._template.names)]
        if self._client is None:
            self.open()
        try:
            values = self._ask(names)
            if any(isinstance(value, redis.exceptions.MovedError) for value in values):
                self.close()
                self._client = self._connect(cluster=True)
                values = self._ask(names)
            problem = next(
                ((name, value) for name, value in zip(names, values, strict=True) if isinstance(value, Exception)), None
            )
            if problem is not None:
                raise self._refused(*problem)
        except redis.exceptions.RedisError as error:
            self.close()  # the next attempt asks the function of lookup.credentials again, and may find another server
            raise_ours(LookupFunctionError(f"{self._url}: {type(error).__name__}: {self._redact(error)}"), None)
        return self._reader.read(keys, names, values)

    def _ask(self, names: Sequence[str]) -> list[Any]:
        """The value of each Redis key, or the error that the server returns for it."""
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.execute_command(self._command, name)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        return answers

    def _refused(self, name: str, problem: Exception) -> LookupFunctionError:
        if not str(problem).startswith("WRONGTYPE"):
            return LookupFunctionError(
                f"{self._url}: Redis key {name!r}: {type(problem).__name__}: {self._redact(problem)}"
            )
        kind = self._client.type(name).decode(errors="replace")
        option = "'HASH' needs a hash" if self._command == "HGETALL" else "'JSON' needs a string with JSON"
        return FinalLookupError(
            f"{self._url}: Redis key {name!r} holds a {kind}, but lookup.redis.value = {option}: correct that option, or {KEY}"
        )

    def _redact(self, problem: Exception) -> str:
        """What the server says. One without the command AUTH repeats its arguments."""
        return redact_server_text(str(problem), (self._password or "",))

    def _connect(self, cluster: bool) -> Any:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as problem:
            raise_ours(
                OptionError(
                    "option lookup.provider = 'redis' needs the package redis: pip install 'pyspark-lookup[redis]' on each machine"
                ),
                problem,
            )
        parts = parse_address(self._url)
        login = {} if self._login is None else dict(self._login(self._url))
        if login.keys() - {"user", "password"}:
            raise OptionError(
                f"the function of option {CREDENTIALS} must return, for Redis, 'user', 'password' or both, and nothing else"
            )
        self._password = login.get("password") or (os.environ.get("REDISCLI_AUTH") if self._login is None else None)
        options: dict[str, Any] = {
            "host": parts.hostname,
            "port": parts.port or 6379,
            "username": login.get("user") or urllib.parse.unquote(parts.username or "") or None,
            "password": self._password,
            "ssl": parts.scheme == "rediss",
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": min(_CONNECT_S, self._timeout_s),
            "protocol": 2,
        }
        if cluster:
            return redis.RedisCluster(**options)
        # A connection that was idle may be closed by now: it is made again once, at once.
        return redis.Redis(db=int(parts.path.removeprefix("/") or 0), retry=Retry(NoBackoff(), 1), **options)
