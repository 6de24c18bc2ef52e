"""Lookup functions and providers, as FLIP-221 defines them: with them, users read a system of their own through this package's caches.

The option `lookup.provider=module:factory` names a factory. It takes a `LookupContext` and returns a provider: an instance of one of the
classes below whose names end in `Provider`. A lookup function gets a batch of keys, all different and none null. It returns the rows that
have these keys, in any order, each with its key columns.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import pyarrow as pa

from pyspark_lookup.cache.memory import LookupCache
from pyspark_lookup.columnar.python_values import as_python, table_of_rows
from pyspark_lookup.errors import LookupFunctionError
from pyspark_lookup.options.reload_trigger import CacheReloadTrigger


@dataclasses.dataclass(frozen=True)
class DatedRows:
    """Rows of some keys, from a system that says how old they are, and how long they may be cached.

    `age_s`: the seconds since the system has read them. `lifetime_s`: for how many seconds from now a cache may answer with them (infinite: as
    long as its bounds allow; 0: they must not be cached).
    """

    rows: pa.Table
    age_s: float = 0.0
    lifetime_s: float = math.inf


class FinalLookupError(LookupFunctionError):
    """The system refuses a call, and would refuse it again: it is not repeated."""


class LookupFunction(abc.ABC):
    """Looks up rows by key, in batches. All calls come one after the other, from one thread.

    `batch_size`: the most keys in one call (None: no limit).
    """

    batch_size: int | None = None

    def open(self) -> None:  # noqa: B027 # most need none
        """Connect to the system. Called once in each process, before the first lookup, and again before a lookup that follows `close`."""

    @abc.abstractmethod
    def lookup(self, keys: pa.Table) -> pa.Table:
        """The rows that have any of `keys`. `keys`: the key columns, with the names and types that the table has.

        The rows must have the key columns and the requested columns, see `LookupContext`. If the call raises an exception, it is repeated up
        to `lookup.max-retries` times; then the query gets the error.
        """

    def close(self) -> None:  # noqa: B027 # most need none
        """Disconnect from the system. Called when a process closes its last `LookupTable` that uses this function."""


_USE_LOOKUP = "leave the key out, or override lookup(), which gets the keys as Arrow"


class KeyLookupFunction(LookupFunction):
    """Looks up one key at a time, for systems that cannot look up a batch. `schema`: the columns of the rows, including the key columns."""

    schema: pa.Schema

    @abc.abstractmethod
    def lookup_key(self, key: Mapping[str, Any]) -> Iterable[Mapping[str, Any]] | None:
        """The rows that have this key, as dictionaries that include the key columns. None, or an empty collection, if no row has the key."""

    def lookup(self, keys: pa.Table) -> pa.Table:
        rows = [row for key in as_python(keys, _USE_LOOKUP) for row in self.lookup_key(key) or ()]
        return table_of_rows(rows, self.schema)


class AsyncLookupFunction(abc.ABC):
    """Looks up rows by key, in several batches at the same time, on one event loop.

    `batch_size`: the most keys in one call. Up to `lookup.async.capacity` calls run at once. A call that takes longer than
    `lookup.async.timeout`, retries included, fails.
    """

    batch_size: int = 128

    async def open(self) -> None:  # noqa: B027 # most need none
        """Connect to the system. Called once in each process, before the first lookup, on the event loop that runs the lookups."""

    @abc.abstractmethod
    async def lookup(self, keys: pa.Table) -> pa.Table:
        """Like `LookupFunction.lookup`."""

    async def close(self) -> None:  # noqa: B027 # most need none
        """Disconnect from the system."""


class AsyncKeyLookupFunction(AsyncLookupFunction):
    """Looks up one key per call, up to `lookup.async.capacity` calls at once. `schema`: the columns of the rows, including the key
    columns."""

    batch_size = 1
    schema: pa.Schema

    @abc.abstractmethod
    async def lookup_key(self, key: Mapping[str, Any]) -> Iterable[Mapping[str, Any]] | None:
        """Like `KeyLookupFunction.lookup_key`."""

    async def lookup(self, keys: pa.Table) -> pa.Table:
        rows = [row for key in as_python(keys, _USE_LOOKUP) for row in await self.lookup_key(key) or ()]
        return table_of_rows(rows, self.schema)


_Function = TypeVar("_Function", bound=LookupFunction | AsyncLookupFunction)


@dataclasses.dataclass(frozen=True)
class LookupContext:
    """What a provider's factory learns about the table that it must provide.

    `keys`: the key columns (`lookup.keys`). `columns`: the other columns that will be read (None: all, or not known yet); rows need no
    columns besides `keys` and `columns`. `options`: the values of the options `lookup.provider.*`, by their names without that prefix.
    `path`: the option `path`, if it is set.

    A factory may be called twice: first for the schema, and then, if not all columns are read, with the columns.
    """

    keys: tuple[str, ...]
    columns: tuple[str, ...] | None
    options: Mapping[str, str]
    path: str | None


Scan = Callable[[], Iterable[pa.RecordBatch]]
Changes = Callable[[str], "pa.Table | None"]


class LookupProvider:
    """A table of another system.

    `schema`: the table's columns, including the keys, in types that Spark has. `version`: a function that returns a string, which changes
    whenever the table's content may have changed. None if the system has no versions: rows may then be as old as
    `lookup.partial-cache.expire-after-write`, or as the last reload.
    """

    changes: Changes | None = None
    scan: Scan | None = None

    def __init__(self, schema: pa.Schema, version: Callable[[], str] | None = None) -> None:
        self.schema = schema
        self.version = version


class _FunctionProvider(LookupProvider, Generic[_Function]):
    def __init__(
        self,
        function: _Function,
        schema: pa.Schema,
        version: Callable[[], str] | None = None,
        *,
        changes: Changes | None = None,
        scan: Scan | None = None,
    ) -> None:
        super().__init__(schema, version)
        self.function = function
        self.changes = changes
        self.scan = scan


class LookupFunctionProvider(_FunctionProvider[LookupFunction]):
    """Looks up rows with a function. `lookup.cache` says whether this package caches them.

    `changes`: a function that takes a version that some process has seen, and returns a table with the keys whose rows have changed since then,
    including the keys of deleted rows; or None if it cannot tell. It may return too many keys, but never too few: when there is a new
    `version`, caches keep the rows of all other keys. `scan`: a function that returns all rows, as batches with the columns of `schema`. With
    it, the table can also be scanned, and copied as a whole (lookup.cache=FULL).
    """


class AsyncLookupFunctionProvider(_FunctionProvider[AsyncLookupFunction]):
    """Looks up rows with an asynchronous function. `lookup.cache` says whether this package caches them. `changes`, `scan`: as in
    `LookupFunctionProvider`."""


class _CachingProvider(_FunctionProvider[_Function]):
    def __init__(
        self,
        function: _Function,
        cache: LookupCache,
        schema: pa.Schema,
        version: Callable[[], str] | None = None,
        *,
        changes: Changes | None = None,
    ) -> None:
        super().__init__(function, schema, version, changes=changes)
        self.cache = cache


class PartialCachingLookupProvider(_CachingProvider[LookupFunction], LookupFunctionProvider):
    """Looks up rows with a function, and caches them in a cache that the provider supplies (lookup.cache=PARTIAL). `changes`: as in
    `LookupFunctionProvider`."""


class PartialCachingAsyncLookupProvider(_CachingProvider[AsyncLookupFunction], AsyncLookupFunctionProvider):
    """Looks up rows with an asynchronous function, and caches them in a cache that the provider supplies (lookup.cache=PARTIAL). `changes`: as
    in `LookupFunctionProvider`."""


class FullCachingLookupProvider(LookupProvider):
    """Provides a copy of the whole table, for lookups and scans (lookup.cache=FULL).

    `scan`: a function that returns all rows, as batches with the columns of `schema`. `reload_trigger`: says when to copy the table again.
    Without it, the table is copied as `lookup.full-cache.reload-strategy` says, or, if there is a `version`, when the version changes.
    """

    def __init__(
        self,
        scan: Scan,
        schema: pa.Schema,
        reload_trigger: CacheReloadTrigger | None = None,
        version: Callable[[], str] | None = None,
    ) -> None:
        super().__init__(schema, version)
        self.scan = scan
        self.reload_trigger = reload_trigger
