"""`ProvidedTable`: this process's instance of the provider that `lookup.provider` names, and the calls of its functions.

`MadeProvider` calls the provider's factory, and calls it again if a call of the first instance hangs.

`Bisection` finds out which keys make a lookup fail, with calls for fewer and fewer keys. `ReturnedRows` checks the rows that functions return
against the schema and the requested keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pyarrow as pa
import tenacity

from pyspark_lookup.cache.memory import LookupCache
from pyspark_lookup.columnar.keys import (
    SEED,
    Keys,
    Numbers,
    as_indices,
    distinct_keys,
    key_numbers,
    match_rows,
    no_rows,
    one_array,
    renumber,
    take_matches,
)
from pyspark_lookup.columnar.predicate import Predicate, referenced_columns
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.columnar.types import cast_column, lenient_schema, resolve_names, spark_type, unreadable, widens
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.credentials import names_shown
from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import (
    LookupFunctionError,
    LookupTimeoutError,
    OptionError,
    PysparkLookupError,
    SchemaError,
    foreign_repr,
    raise_ours,
    reason_of,
)
from pyspark_lookup.options.conf_file import STORAGE
from pyspark_lookup.options.enums import OnError, PartialCacheStore, RetryPredicate
from pyspark_lookup.options.lookup_options import KindOptions, LookupOptions
from pyspark_lookup.options.parsing import (
    POSITIVE_COUNT,
    POSITIVE_DURATION,
    Kind,
    choice,
    make,
    option,
    parse_factory,
)
from pyspark_lookup.options.reload_trigger import CacheReloadTrigger
from pyspark_lookup.scan.table_scan import ChangedKeys
from pyspark_lookup.sources.catalogs import CatalogOptions
from pyspark_lookup.sources.credentials import CREDENTIALS
from pyspark_lookup.sources.providers.call_runner import (
    CallFailedError,
    Calls,
    CallTimeoutError,
    call_and_await,
    iterate_in_thread,
)
from pyspark_lookup.sources.providers.functions import (
    AsyncLookupFunction,
    AsyncLookupFunctionProvider,
    Changes,
    DatedRows,
    FinalLookupError,
    FullCachingLookupProvider,
    LookupContext,
    LookupFunction,
    LookupFunctionProvider,
    LookupProvider,
    PartialCachingAsyncLookupProvider,
    PartialCachingLookupProvider,
)
from pyspark_lookup.sources.providers.limits import CallGate, Rate, parse_rate
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import key_of


def _parse_provider(text: str) -> str:
    return text.strip() if text.strip().isidentifier() else parse_factory(text)


@dataclasses.dataclass(frozen=True)
class ProviderOptions(KindOptions):
    """The options that name a table's provider, and say how it is called."""

    system_keys: ClassVar[frozenset[str]] = frozenset({"lookup.provider"})
    suggestions: ClassVar[dict[str, str]] = {"lookupasync": "lookup.provider"}
    retry_delay: ClassVar[str] = "lookup.retry.fixed-delay"
    checked_with: ClassVar[frozenset[str]] = frozenset({CREDENTIALS, "lookup.on-error", "lookup.partial-cache.store"})

    # fmt: off
    provider: str | None = option(
        "lookup.provider", Kind("`http`, `redis` or `module:factory`", _parse_provider), None,
        doc="The table is in another system: in an [HTTP API or Redis](services.md), or in any system for which you name a factory that takes a "
            "`LookupContext` and returns a `LookupProvider`. In this list, providers include databases (`lookup.table`, `lookup.query`).",
    )
    parameters: tuple[tuple[str, str], ...] = option(
        "lookup.provider.*", Kind("any", str), (),
        doc="Passed to the provider, e.g. `lookup.provider.table`; never credentials.",
        secrets="let the provider read it from the environment or from a file of its own",
    )
    async_capacity: int = option(
        "lookup.async.capacity", POSITIVE_COUNT, 100,
        doc="Asynchronous providers: the maximum number of concurrent calls in each process, for all lookups in one table with equal options. "
            "`lookup.max-connections` limits a whole host.",
    )
    async_timeout_s: float = option(
        "lookup.async.timeout", POSITIVE_DURATION, 180.0, default_text="3 min",
        doc="Providers: how long a call may take, with all its retries. The limit also holds for each batch of scan(), and for the factory.",
    )
    rate_limit: Rate | None = option(
        "lookup.rate-limit", Kind("`100/s`, `100/min`, `100/h`; `100` is per second", parse_rate), None,
        doc="Providers: the most calls that a host may begin in any second (or minute, or hour). All its processes share the limit, for all tables "
            "with the same provider, system and limit. A system is a `path`, or with `http` a server. Retries count, and so do calls to version(), changes() and scan(). Further calls wait.",
    )
    max_connections: int | None = option(
        "lookup.max-connections", POSITIVE_COUNT, None,
        doc="Providers: the most connections that a host may have open at once. Each open lookup function counts as one; if functions are "
            "asynchronous, each call does. A scan counts as one, and so does each call to version() or changes(). All processes share the limit, for all tables "
            "with the same provider and system (a `path`, or with `http` a server). Further calls wait.",
    )
    circuit_breaker_wait_s: float | None = option(
        "lookup.circuit-breaker.wait-duration", POSITIVE_DURATION, None,
        doc="Providers: after five lookups, scans or calls to version() in a row that have failed as a whole, with all their retries, all calls fail "
            "immediately for this long. Then one lookup or scan is let through: if it fails, calls fail immediately for as long again. All processes of a host count "
            "failures together, for all tables with the same provider and system (a `path`, or with `http` a server).",
    )
    retry_predicate: RetryPredicate | None = option(
        "lookup.retry.predicate", choice(RetryPredicate), None,
        doc="Providers: look up keys without rows again before they are cached as missing (FLIP-234). Needs "
            "`lookup.retry.fixed-delay` and `lookup.retry.max-attempts`.",
    )
    retry_fixed_delay_s: float | None = option(
        "lookup.retry.fixed-delay", POSITIVE_DURATION, None,
        doc="Providers: the pause before keys without rows are looked up again. For `lookup_join(…, wait=…)`: if the provider has no "
            "`version()`, set this option alone, without `lookup.retry.predicate` and `lookup.retry.max-attempts`. If it has one, leave this option out: "
            "waiting rows are looked up again in each new version. For a database, `lookup.version-query` takes the place of `version()`.",
    )
    retry_max_attempts: int | None = option(
        "lookup.retry.max-attempts", POSITIVE_COUNT, None,
        doc="Providers: how often keys without rows are looked up again, at most.",
    )
    # fmt: on

    @property
    def system(self) -> str | None:
        return None if self.provider is None else "lookup.provider"

    @property
    def place(self) -> str:
        return f"provider {self.provider}"

    def check(self, options: LookupOptions) -> None:
        if (self.retry_predicate, self.retry_fixed_delay_s, self.retry_max_attempts).count(None) not in (0, 3):
            raise OptionError(
                "options lookup.retry.predicate, lookup.retry.fixed-delay and lookup.retry.max-attempts: give all three or none"
            )
        names = sorted(kind.provider_name for kind in options.kinds if isinstance(kind, NamedProviderOptions))
        if self.provider is not None and ":" not in self.provider and self.provider not in names:
            raise OptionError(
                f"option lookup.provider = {self.provider!r}: expected {', '.join(names)} or module:factory, e.g. 'my_company.lookups:customers'"
            )
        is_described = isinstance(system_options(options), BuiltInOptions) or options.kind(CatalogOptions).is_unity
        if CREDENTIALS in options.explicit and not is_described:
            raise OptionError(
                f"option {CREDENTIALS} is for tables of databases, for lookup.catalog = 'unity' and for lookup.provider = {' or '.join(map(repr, names))}: set "
                "lookup.table, lookup.catalog or lookup.provider, or remove it"
            )
        if self.provider is None:
            is_built_in = system_options(options) is not None
            if options.read.on_error is OnError.STALE and not is_built_in:
                raise OptionError(
                    "option lookup.on-error = 'STALE' is for tables of a provider or database: remove it, or set lookup.provider or lookup.table"
                )
            of_providers = (
                "lookup.async.",
                "lookup.retry.",
                "lookup.rate-limit",
                "lookup.max-connections",
                "lookup.circuit-breaker.",
            )
            misplaced = [key for key in options.explicit if key.startswith(of_providers) and not is_built_in]
            misplaced += [f"lookup.provider.{key}" for key, _ in self.parameters]
            if options.partial_cache.store is PartialCacheStore.DISKCACHE and not is_built_in:
                misplaced.append("lookup.partial-cache.store")
            if misplaced:
                key = min(misplaced)
                fits = "a provider: set lookup.provider"
                if not key.startswith("lookup.provider."):
                    fits = "a provider or database: set lookup.provider or lookup.table"
                raise OptionError(f"option {key} is for tables of {fits}, or remove {key}")
            return
        if options.kinds and (
            other := next((k.system for k in options.kinds if k.system not in (None, "lookup.provider")), None)
        ):
            raise OptionError(f"options lookup.provider and {other} both say where the table is: give one of them")
        is_named = self.provider in names
        refuse_options_of_files(options, "lookup.provider", *(() if is_named else ("lookup.schema",)))
        if is_named and self.parameters:
            raise OptionError(
                f"option lookup.provider.{self.parameters[0][0]} is for a provider of your own and has no meaning with lookup.provider = "
                f"{self.provider!r}: remove it"
            )

    def check_waiting(self, shows_changes: bool, retry_s: float | None) -> None:
        is_named = self.provider is not None  # otherwise the table consists of files, or is a database's
        if self.retry_predicate is not None:
            raise OptionError(
                "options lookup.retry.predicate and lookup.retry.max-attempts have no meaning with the argument wait, which looks up keys without rows "
                "again by itself: remove them"
            )
        if retry_s is None and not shows_changes:
            raise OptionError(
                f"argument wait: {f'{self.place} has no version()' if is_named else 'this table has no lookup.version-query'} that shows when to look up "
                f"waiting rows again: set {self.retry_delay}, alone, to the time after which they are looked up again"
            )
        if retry_s is not None and shows_changes:
            raise OptionError(
                f"option {self.retry_delay} has no meaning with the argument wait, because waiting rows are looked up again in each new version of {self.place if is_named else 'this table'}: remove the option"
            )


def refuse_options_of_files(options: LookupOptions, system: str, *more: str) -> None:
    """Raise OptionError if an option is set that is only for tables of files, or one of `more`. `system`: the option that names the system."""
    of_files = {"lookup.format", "lookup.partition", "lookup.success-file", "lookup.settle"}
    of_files |= {"lookup.on-busy", "lookup.busy-wait", "lookup.busy-timeout", *more}
    of_files |= {key for key in options.explicit if key.startswith(("lookup.csv.", STORAGE))}
    file_options = sorted(of_files & options.explicit)
    if file_options:
        raise OptionError(
            f"option {file_options[0]} is for tables of files and has no meaning with {system}: remove it"
        )


PROVIDER_OPTION = "lookup.provider"
_log = logging.getLogger("pyspark_lookup.lookup")


class BuiltInProvider(LookupFunctionProvider):
    """A provider of this package for a system that can both look up keys and return all rows.

    `select`: takes names of columns and a predicate (None: all rows). Returns the rows for which the predicate holds, and maybe others.
    `has_changed`: whether the system's columns have changed since the provider was made.
    """

    def __init__(
        self,
        function: LookupFunction,
        select: Callable[[Sequence[str], Predicate | None], Iterator[pa.RecordBatch]],
        schema: pa.Schema,
        version: Callable[[], str] | None = None,
        changes: Changes | None = None,
        has_changed: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(function, schema, version, changes=changes, scan=lambda: select(schema.names, None))
        self.select = select
        self.has_changed = has_changed


class BuiltInOptions(KindOptions):
    """The options of a system for which this package has a provider itself, so that users need no factory.

    `dates_rows`: whether its functions return `DatedRows`.
    """

    dates_rows: ClassVar[bool] = False

    def provide(self, options: LookupOptions, clock: HostClock) -> Callable[[LookupContext], LookupProvider]:
        """The factory of the provider for a read with these options."""
        raise NotImplementedError

    def find_limit_scope(self, options: LookupOptions) -> str:
        """What the limits of a host are for: tables with the same provider and this same text share them."""
        return options.files.path


class NamedProviderOptions(BuiltInOptions):
    """The options of a system that `lookup.provider` = `provider_name` chooses. Their keys begin with `prefix`."""

    provider_name: ClassVar[str]
    prefix: ClassVar[str]
    checked_with: ClassVar[frozenset[str]] = frozenset({"lookup.provider"})

    def provides(self, options: LookupOptions) -> bool:
        """Whether `options`, which have this group, name a table of this system."""
        return options.kind(ProviderOptions).provider == self.provider_name

    def check(self, options: LookupOptions) -> None:
        if self.provides(options):
            self.check_system(options)
            return
        misplaced = [key for key in options.explicit if key.startswith(self.prefix)]
        if misplaced:
            raise OptionError(
                f"option {min(misplaced)} is for lookup.provider = {self.provider_name!r}: set that, too, or remove {min(misplaced)}"
            )

    def check_system(self, options: LookupOptions) -> None:
        """Raise OptionError if the options do not describe a table of this system."""
        raise NotImplementedError


def system_options(options: LookupOptions) -> KindOptions | None:
    """The group of options that says which provider or system the table belongs to; None for a table of files."""
    groups = [kind for kind in options.kinds if isinstance(kind, (ProviderOptions, BuiltInOptions))]
    named = (group for group in groups if isinstance(group, NamedProviderOptions) and group.provides(options))
    return next(named, None) or next((group for group in groups if group.system is not None), None)


def dates_rows(options: LookupOptions) -> bool:
    """Whether the system of these options gives the rows of keys lifetimes of their own, see `DatedRows`."""
    system = system_options(options)
    return isinstance(system, BuiltInOptions) and system.dates_rows


def get_attribute(name: str, part: object, attribute: str) -> Any:
    """The value of an attribute of a provider or of its function. Raises LookupFunctionError if the attribute is a property that raises."""
    try:
        return getattr(part, attribute)
    except PysparkLookupError:
        raise
    except Exception as problem:
        raise_ours(
            LookupFunctionError(f"provider {name}: its attribute {attribute} cannot be read: {reason_of(problem)}"),
            problem,
        )


class MadeProvider:
    """The provider that the options name. The constructor calls the provider's factory.

    `schema`: the provider's columns in Spark's types. `latest`: the newest instance, even if it hangs and could not be replaced. Raises
    OptionError if the factory cannot be imported or called, or does not return a provider, and LookupTimeoutError if the factory hangs.
    """

    def __init__(self, options: LookupOptions, clock: HostClock) -> None:
        calls, system = options.kind(ProviderOptions), system_options(options)
        self._factory: Callable[[LookupContext], LookupProvider] | None = None
        if isinstance(system, BuiltInOptions):
            self.name = calls.provider or options.place
            self._factory = system.provide(options, clock)
        else:
            assert calls.provider is not None
            self.name = calls.provider
        self._context = LookupContext(
            options.files.keys or (), None, dict(calls.parameters), options.files.path.removeprefix("file:") or None
        )
        self._timeout_s = calls.async_timeout_s
        self.latest = self._make()
        self._provider: LookupProvider | None = self.latest
        schema = get_attribute(self.name, self.latest, "schema")
        if not isinstance(schema, pa.Schema):
            raise OptionError(
                f"option {PROVIDER_OPTION} = {self.name!r}: the provider's schema is {foreign_repr(schema)}: make it a pyarrow.Schema"
            )
        spark_columns = lenient_schema(schema, f"provider {self.name}")
        # In the columns of a provider, Arrow's null type is text.
        self.schema = pa.schema(
            [field if unreadable(field.type) else (field.name, spark_type(field.type)) for field in spark_columns]
        )
        if options.files.keys:
            self._narrow(options, options.files.keys)

    def _narrow(self, options: LookupOptions, keys: tuple[str, ...]) -> None:
        """Make the provider again for the keys and columns that will be read, spelled as in the schema. Does nothing if it was already made
        for them."""
        context = dataclasses.replace(self._context, keys=tuple(resolve_names(keys, self.schema, "lookup.keys")))
        if options.read.columns is not None:
            column_names = set(resolve_names(options.read.columns, self.schema, "lookup.columns"))
            column_names |= (
                referenced_columns(parse_where(options.read.where, self.schema)) if options.read.where else set()
            )
            names = tuple(name for name in self.schema.names if name in column_names and name not in context.keys)
            context = dataclasses.replace(context, columns=names)
        if context != self._context:
            self._context = context
            self._provider = self.latest = self._make()

    def _make(self) -> LookupProvider:
        def call_factory() -> list[LookupProvider]:
            if self._factory is not None:
                return [self._factory(self._context)]
            return [make(PROVIDER_OPTION, self.name, self._context, LookupProvider)]

        try:
            return next(iterate_in_thread(call_factory, f"lookupcache-make-{self.name}", self._timeout_s))
        except CallTimeoutError:
            raise LookupTimeoutError(
                f"the factory of provider {self.name} has not returned within lookup.async.timeout = {self._timeout_s:g} s: make it "
                "faster, or raise the option"
            ) from None
        except CallFailedError as failed:
            if isinstance(failed.problem, PysparkLookupError):
                raise_ours(failed.problem, failed.problem.__cause__)
            raise_ours(LookupFunctionError(f"{self.name} cannot be read: {reason_of(failed.problem)}"), failed.problem)

    def current(self) -> LookupProvider:
        """The provider; a new instance if a call of the last instance timed out."""
        provider = self._provider
        if provider is None:
            provider = self._provider = self.latest = self._make()
        return provider

    def replace(self) -> None:
        """Replace a provider that hangs. If the factory fails now, the next use of the provider calls the factory again."""
        self._provider = None
        with contextlib.suppress(OptionError, LookupTimeoutError):
            self.current()


_PATIENCE = 3  # a round ends after this many failed calls in a row; the first round after one
_PROBES = 3  # keys that are tried alone if no call has succeeded
_FEW = 8  # if no more keys than this are left, all of them are tried alone
_UNANSWERED_CALLS = 32  # after this many failed calls in a row, all remaining keys fail
_SPLIT_CALLS = 256  # calls for halves, in one lookup

Outcome: TypeAlias = "pa.Table | LookupFunctionError | None"
"""The outcome of a call: its rows, in which `KEY_INDEX` is the position of a row's key among the call's keys; or an error. None: the call was
not made."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call for the keys at the positions `keys`.

    `problem`: the error of an earlier call that included these keys. After such an error, a call that fails is not repeated
    (`lookup.max-retries`).
    """

    keys: Numbers
    problem: LookupFunctionError | None = None


MakeCalls = Callable[[Sequence[Call], int], Sequence[Outcome]]
"""Makes the calls and returns their outcomes. The number limits the failures: once this many calls in a row have failed, no more are started."""


class Bisection:
    """Looks up `count` keys, `size` of them in a call. If a call fails, its keys are looked up in two halves, and so on down to single keys.

    A system that is down gets few calls. If no call of the first round succeeds, a few single keys are tried, or all if there are few keys;
    if these fail, too, all keys have failed. All remaining keys fail when many calls in a row fail, or when one call times out. The number of
    calls for halves is limited; the keys that are then left fail together.

    `rows`: the keys and rows of each successful call. `failures`: the errors of the keys that failed, by position. `problem`: the first error
    of any call.
    """

    def __init__(self, count: int, size: int) -> None:
        self.rows: list[tuple[Numbers, pa.Table]] = []
        self.failures: dict[int, LookupFunctionError] = {}
        self._pending = [Call(np.arange(start, min(start + size, count))) for start in range(0, count, size)]
        self.problem: LookupFunctionError | None = None
        self._split_calls = 0

    def run(self, make_calls: MakeCalls) -> None:
        """Make calls until each key has been looked up or has failed."""
        patience, unanswered = 1, 0
        while self._pending:
            calls, self._pending = self._halves(), []
            outcomes = make_calls(calls, patience)
            answered = self._settle(calls, outcomes)
            unanswered = 0 if answered else unanswered + sum(outcome is not None for outcome in outcomes)
            up = unanswered < _UNANSWERED_CALLS if self.rows else not self._pending or self._probe(make_calls)
            if not up:
                self._give_up()
            patience = _PATIENCE
        reasons = {repr(problem.__cause__) for problem in self.failures.values()}
        # If all keys failed for the same reason, the system has failed, not the keys.
        if not self.rows and len(reasons) == 1 and self.problem is not None:
            self.failures = dict.fromkeys(self.failures, self.problem)

    def _halves(self) -> list[Call]:
        """The calls of the next round: failed calls are split into halves."""
        calls: list[Call] = []
        for call in self._pending:
            if call.problem is None:
                calls.append(call)
            elif self._split_calls >= _SPLIT_CALLS:
                self._fail(call.keys, call.problem)
            else:
                halves = [Call(half, call.problem) for half in np.array_split(call.keys, 2) if len(half)]
                self._split_calls += len(halves)
                calls += halves
        return calls

    def _settle(self, calls: Sequence[Call], outcomes: Sequence[Outcome]) -> bool:
        """Record the outcomes of a round. Returns whether one of its calls succeeded."""
        answered = timed_out = False
        for call, outcome in zip(calls, outcomes, strict=True):
            if outcome is None:
                self._pending.append(call)
            elif not isinstance(outcome, LookupFunctionError):
                self.rows.append((call.keys, outcome))
                answered = True
            elif isinstance(outcome, LookupTimeoutError):  # calls for halves would time out, too
                self._fail(call.keys, outcome)
                timed_out = True
            elif len(call.keys) == 1:
                self._fail(call.keys, outcome)
            else:
                self._pending.append(Call(call.keys, outcome))
                self._note(outcome)
        if timed_out and not answered:
            self._give_up()
        return answered

    def _probe(self, make_calls: MakeCalls) -> bool:
        """Look up a few single keys, spread over all pending keys, and record the outcomes. Returns whether one of these calls succeeded."""
        pending = np.concatenate([call.keys for call in self._pending])
        tried = {int(key) for call in self._pending if call.problem is not None for key in call.keys}
        number = _PROBES if len(pending) > _FEW else len(pending)
        probed_keys = pending[np.unique(np.linspace(0, len(pending) - 1, number).astype(np.int64))]
        calls = [Call(probed_keys[place : place + 1], self.problem) for place in range(len(probed_keys))]
        answered, decided = False, list[int]()
        for call, outcome in zip(calls, make_calls(calls, number), strict=True):
            (key,) = call.keys.tolist()
            if outcome is None:
                continue
            if not isinstance(outcome, LookupFunctionError):
                self.rows.append((call.keys, outcome))
                answered = True
            elif key in tried:
                self._fail(call.keys, outcome)
            else:
                continue
            decided.append(key)
        remaining = [Call(call.keys[~np.isin(call.keys, decided)], call.problem) for call in self._pending]
        self._pending = [call for call in remaining if len(call.keys)]
        return answered

    def _fail(self, keys: Numbers, problem: LookupFunctionError) -> None:
        self._note(problem)
        self.failures.update(dict.fromkeys(keys.tolist(), problem))

    def _note(self, problem: LookupFunctionError) -> None:
        if self.problem is None:
            self.problem = problem

    def _give_up(self) -> None:
        for call in self._pending:
            problem = call.problem or self.problem
            assert problem is not None
            self._fail(call.keys, problem)
        self._pending = []


class ReturnedRows:
    """Checks rows of the provider `name`, whose columns are `schema`.

    The methods raise LookupFunctionError, which names the provider and a key, for rows that are wrong.
    """

    def __init__(self, name: str, schema: pa.Schema) -> None:
        self._name = name
        self._schema = schema

    def with_columns(self, rows: Any, keys: pa.Table, columns: pa.Schema) -> pa.Table:
        """A function's result as a table. Checks that it has the key columns and `columns`, and no columns outside the schema."""
        if isinstance(rows, pa.RecordBatch):
            rows = pa.Table.from_batches([rows])
        if not isinstance(rows, pa.Table):
            raise LookupFunctionError(
                f"provider {self._name} returned {type(rows).__name__} for {show_keys(keys)}: return a pyarrow.Table"
            )
        self._check_columns(rows, self._fields(keys, columns), f"lookup of {show_keys(keys)}")
        return rows

    def by_key(self, rows: pa.Table, keys: pa.Table, columns: pa.Schema) -> pa.Table:
        """The rows that `with_columns` returned, as `columns` and `KEY_INDEX`.

        Raises LookupFunctionError for a row whose key was not requested.
        """
        rows = self._cast(rows, self._fields(keys, columns), f"lookup of {show_keys(keys)}")
        matches = match_rows(rows, keys.column_names, Keys([one_array(column) for column in keys.columns]))
        if len(matches.rows) < rows.num_rows:
            unrequested_row = np.setdiff1d(np.arange(rows.num_rows), matches.rows)[0]
            key = rows.select(keys.column_names).slice(int(unrequested_row), 1)
            raise LookupFunctionError(
                f"provider {self._name} returned a row with {show_keys(key)}, which is not among the requested keys ({show_keys(keys)}): return rows of these keys only"
            )
        return take_matches(rows, matches, columns)

    def distinct_keys(self, keys: Any, columns: pa.Schema) -> ChangedKeys:
        """The keys that `changes` returned, as `columns`."""
        if isinstance(keys, pa.RecordBatch):
            keys = pa.Table.from_batches([keys])
        if not isinstance(keys, pa.Table):
            raise LookupFunctionError(
                f"changes() of provider {self._name} returned {foreign_repr(keys)}: return a pyarrow.Table of keys, or None"
            )
        table = self.conform(keys, columns, "changes()")
        hashed = Keys([one_array(column) for column in table.columns])
        keyless = any(column.null_count for column in table.columns)
        return ChangedKeys(table.take(as_indices(np.sort(distinct_keys(hashed, hashed.hashes(SEED))[0]))), keyless)

    def conform(self, rows: pa.Table, columns: pa.Schema, operation: str) -> pa.Table:
        """The rows with exactly these columns; other columns of the schema are dropped."""
        self._check_columns(rows, columns, operation)
        return self._cast(rows, columns, operation)

    def _fields(self, keys: pa.Table, columns: pa.Schema) -> pa.Schema:
        fields = [self._schema.field(name) for name in keys.column_names]
        return pa.schema([*fields, *(field for field in columns if field.name not in keys.column_names)])

    def _check_columns(self, rows: pa.Table, columns: pa.Schema, operation: str) -> None:
        missing = [name for name in columns.names if name not in rows.column_names]
        unknown = [name for name in rows.column_names if name not in self._schema.names]
        repeated = [name for name in rows.column_names if rows.column_names.count(name) > 1]
        if missing or unknown or repeated:
            says = "is missing" if missing else "is not in the schema" if unknown else "appears twice"
            column_problem = f"column {(missing or unknown or repeated)[0]!r} {says}"
            raise LookupFunctionError(
                f"provider {self._name}, {operation}: {column_problem}; the rows have {names_shown(rows.column_names)}, the schema has {names_shown(self._schema.names)}"
            )
        for field in columns:
            column = rows.column(field.name)
            column_text = f"provider {self._name}, {operation}: column {field.name!r}"
            try:
                fits = widens(spark_type(column.type), field.type) or column.null_count == len(column)
            except SchemaError as problem:
                raise_ours(LookupFunctionError(f"{column_text}: {problem}"), problem)
            if not fits:
                raise LookupFunctionError(
                    f"{column_text} is {column.type}, but {field.type} in the schema: return that type"
                )

    def _cast(self, rows: pa.Table, columns: pa.Schema, operation: str) -> pa.Table:
        arrays = []
        for field in columns:
            try:
                column = rows.column(field.name).combine_chunks()
                arrays.append(cast_column(column, field.type, field.name, f"provider {self._name}"))
                arrays[-1].validate(full=True)  # Arrow accepts any bytes as text
            except SchemaError as problem:
                raise_ours(
                    LookupFunctionError(f"provider {self._name}, {operation}: column {field.name!r}: {problem}"),
                    problem,
                )
            except pa.ArrowInvalid as problem:
                says = "holds text that is not UTF-8: decode it, or declare the column as binary"
                says = says if "UTF8" in str(problem) else f"is not a valid {field.type}: {problem}"
                raise_ours(
                    LookupFunctionError(f"provider {self._name}, {operation}: column {field.name!r} {says}"), problem
                )
        return pa.Table.from_arrays(arrays, schema=columns)


def show_keys(keys: pa.Table) -> str:
    """The text for some keys in a message: the first key, and how many more there are."""
    first = keys.slice(0, 1)
    try:
        (values,) = first.to_pylist()
    except (ValueError, OverflowError):  # a time that Python does not have
        kinds = [pa.string() if pa.types.is_temporal(kind) else kind for kind in keys.schema.types]
        (values,) = first.cast(pa.schema(list(zip(keys.column_names, kinds, strict=True)))).to_pylist()
    shown = ", ".join(f"{name} = {value!r}" for name, value in values.items())
    return f"key {shown}" + (f" and {keys.num_rows - 1} more" if keys.num_rows > 1 else "")


_FINAL = (FinalLookupError, OptionError, SchemaError)  # what another attempt would raise again
_GRACE_S = 1.0  # added to the limit of asynchronous calls, each of which has a timeout of its own
_Function = LookupFunction | AsyncLookupFunction


class ProvidedTable:
    """This process's instance of the provider that `lookup.provider` names.

    `name`: the option's value. `number`: that of this instance. Raises OptionError if the factory cannot be imported or called, or does not
    return a provider, and LookupTimeoutError if the factory hangs.
    """

    def __init__(self, options: LookupOptions, clock: HostClock, number: int = 0) -> None:
        self.number = number
        self._call_options = options.kind(ProviderOptions)
        self._options = options
        self._clock = clock
        self._provider = MadeProvider(options, clock)
        self.name = self._provider.name
        self._calls = Calls(f"lookupcache-provider-{self.name}")
        # Calls of version() have an event loop of their own: every query makes one, and must not wait behind lookups.
        self._version_calls = Calls(f"lookupcache-version-{self.name}")
        self._lock = threading.RLock()
        self._open_function: object = None  # the function that is open
        self.schema = self._provider.schema
        self._checked_s = clock.steady_s()
        self._row_checks = ReturnedRows(self.name, self.schema)
        self._gate = CallGate(self.name, clock, self._call_options.async_timeout_s, self._offer_connection)

    def limit(self, context: HostContext) -> None:
        """Limit the load that this host puts on the system, as the options say. `context`: has the cache directory with the host's state."""
        options, group = self._call_options, system_options(self._options)
        scope = group.find_limit_scope(self._options) if isinstance(group, BuiltInOptions) else self._options.files.path
        name = key_of(options.provider or "", scope)
        rate, connections, wait_s = options.rate_limit, options.max_connections, options.circuit_breaker_wait_s
        self._gate.limit(context, name, rate, connections, wait_s)
        self._gate.version_record = key_of(name, *options.parameters)

    def _replace(self) -> None:
        self._open_function = None
        self._gate.abandon()
        self._provider.replace()

    def has_changed(self, checked_s: float) -> bool:
        """Whether the system's columns have changed since this instance was made. False if that was checked less than `checked_s` ago, or cannot
        be checked now."""
        now_s = self._clock.steady_s()
        provider = self._provider.latest
        if now_s < self._checked_s + checked_s or not isinstance(provider, BuiltInProvider):
            return False
        self._checked_s = now_s
        try:
            (has_changed,) = iterate_in_thread(
                lambda: [provider.has_changed()], f"lookupcache-columns-{self.name}", self._call_options.async_timeout_s
            )
        except (CallTimeoutError, CallFailedError):  # the next call of the system says why
            return False
        return has_changed

    @property
    def versioned(self) -> bool:
        """Whether the provider has versions."""
        return get_attribute(self.name, self._provider.latest, "version") is not None

    @property
    def cache(self) -> LookupCache | None:
        """The cache that the provider supplies; None if it supplies none."""
        provider = self._provider.latest
        if isinstance(provider, (PartialCachingLookupProvider, PartialCachingAsyncLookupProvider)):
            cache: LookupCache | None = get_attribute(self.name, provider, "cache")
            return cache
        return None

    @property
    def trigger(self) -> CacheReloadTrigger | None:
        """The reload trigger that the provider supplies; None if it supplies none."""
        provider = self._provider.latest
        has_trigger = isinstance(provider, FullCachingLookupProvider)
        return get_attribute(self.name, provider, "reload_trigger") if has_trigger else None

    @property
    def asynchronous(self) -> bool:
        """Whether the provider's function can run several calls at once."""
        return isinstance(self._provider.latest, AsyncLookupFunctionProvider)

    @property
    def scans(self) -> bool:
        """Whether the provider can return all rows."""
        return get_attribute(self.name, self._provider.latest, "scan") is not None

    @property
    def dates_rows(self) -> bool:
        """Whether the rows of keys have lifetimes of their own, see `DatedRows`."""
        return dates_rows(self._options)

    @property
    def looks_up(self) -> bool:
        """Whether the provider can return the rows of keys."""
        return isinstance(self._provider.latest, (LookupFunctionProvider, AsyncLookupFunctionProvider))

    @property
    def tells_changes(self) -> bool:
        """Whether the provider can tell which keys have changed between versions."""
        return get_attribute(self.name, self._provider.latest, "changes") is not None

    def version(self) -> str | None:
        """The current version; None if the provider has no versions. Raises LookupFunctionError if the provider fails.

        With `lookup.on-error=STALE`, returns the last version that this host has found if the provider fails.
        """
        if self._options.read.on_error is not OnError.STALE:
            return self._find_version()
        try:
            version = self._find_version()
        except LookupFunctionError as problem:
            last_version = self._gate.last_version()
            if last_version is None:
                raise
            log_event(
                _log, logging.WARNING, "fallback", table=self.name, reason=str(problem), instead="the last version"
            )
            return last_version
        if version is not None:
            self._gate.keep_version(version)
        return version

    def _find_version(self) -> str | None:
        provider = self._provider.current()
        version: Callable[[], str] | None = get_attribute(self.name, provider, "version")
        if version is None:
            return None

        async def ask() -> str:
            retry = self._retrying(isinstance(provider, BuiltInProvider))
            answer: str = await self._call_on_connection("version()", retry, version)
            return answer

        # An answer of version() does not show that lookups work again, so it does not close the circuit.
        self._gate.check("version()", probes=False)
        try:
            current_version = self._version_calls.run(ask, self._call_options.async_timeout_s, self._gate.waited_s)
        except CallTimeoutError:
            self._replace()
            self._gate.failed(late := self._too_slow("version()"))
            raise late from None
        except CallFailedError as failed:
            is_late = isinstance(failed.problem, LookupTimeoutError)
            self._gate.failed(problem := failed.problem if is_late else self._fail("version()", failed.problem))
            raise_ours(problem, None if is_late else failed.problem)
        if not isinstance(current_version, str) or not current_version:
            raise LookupFunctionError(
                f"version() of provider {self.name} returned {foreign_repr(current_version)}: return a str that is not empty"
            )
        return current_version

    def changed_keys(self, since: str, now: str, keys: pa.Schema, metrics: CacheMetricGroup) -> ChangedKeys | None:
        """The keys whose rows have changed between the version `since` and this call, with the columns `keys`.

        None if the provider cannot tell, or if its answer is invalid; the reason is logged. `now`: the current version. A call that fails is
        repeated `lookup.max-retries` times. If both versions are whole numbers and the current one is lower, the table was set back. Then the
        provider is not asked: a log of changes that was set back, too, would have none after `since`.
        """
        changes: Changes = get_attribute(self.name, self._provider.current(), "changes")
        if since.isdecimal() and now.isdecimal() and int(now) < int(since):
            return None

        async def ask() -> Any:
            return await self._call_on_connection("changes()", self._retrying(True), changes, since)

        metrics.inc("changesCallCount")
        try:
            answer = self._version_calls.run(ask, self._call_options.async_timeout_s, self._gate.waited_s)
            changed = None if answer is None else self._row_checks.distinct_keys(answer, keys)
            metrics.inc("changedKeyCount", 0 if changed is None else changed.keys.num_rows)
            return changed
        except CallTimeoutError:
            self._replace()
            problem: Exception = self._too_slow("changes()")
        except CallFailedError as failed:
            problem = self._fail("changes()", failed.problem)
        except LookupFunctionError as wrong:
            problem = wrong
        metrics.inc("changesFailureCount")
        log_event(_log, logging.WARNING, "changes-failed", table=self.name, since=since, error=str(problem))
        return None

    async def _call_on_connection(
        self, operation: str, retry: tenacity.AsyncRetrying, call: Callable[..., Any], *args: Any
    ) -> Any:
        """The result of a call on a connection that counts for the limits, each attempt in its turn."""

        async def attempt() -> Any:
            await self._gate.take_turn()
            return await call_and_await(call, *args)

        connection = await self._gate.connect(operation)
        try:
            return await retry(attempt)
        finally:
            if connection is not None:
                connection.release()

    def scan(self, columns: pa.Schema, predicate: Predicate | None = None) -> Iterator[pa.RecordBatch]:
        """All rows for which `predicate` holds, and maybe others, with `columns`, which are columns of `schema`.

        Raises LookupFunctionError if the provider fails, and LookupTimeoutError for a batch that takes longer than `lookup.async.timeout`.
        Without this limit, a reload could hold its lock for ever, and the host's other processes wait for that lock.
        """
        provider = self._provider.current()
        if isinstance(provider, BuiltInProvider):
            scan: Callable[[], Iterator[pa.RecordBatch]] = functools.partial(provider.select, columns.names, predicate)
        else:
            scan = get_attribute(self.name, provider, "scan")
        self._gate.check("scan()")
        connection = self._gate.connect_and_take_turn("scan()")

        # A scan that hangs, or whose rows nobody reads to the end, keeps its connection until its own thread has ended.
        def release() -> None:
            if connection is not None:
                connection.release()

        timeout_s = self._call_options.async_timeout_s
        try:
            for batch in iterate_in_thread(scan, f"lookupcache-scan-{self.name}", timeout_s, release):
                yield from self._row_checks.conform(pa.Table.from_batches([batch]), columns, "scan()").to_batches()
            self._gate.succeeded()
        except CallTimeoutError:
            self._replace()
            self._gate.failed(late := self._too_slow("a batch of scan()"))
            raise late from None
        except CallFailedError as failed:
            is_ours = isinstance(failed.problem, PysparkLookupError)
            self._gate.failed(problem := failed.problem if is_ours else self._fail("scan()", failed.problem))
            raise_ours(problem, failed.problem.__cause__ if is_ours else failed.problem)
        except (TypeError, AttributeError, pa.ArrowException) as problem:  # the item is not a batch
            raise_ours(self._fail("scan()", problem), problem)

    # --- lookups ----------------------------------------------------------------------------------

    def lookup(
        self, keys: pa.Table, columns: pa.Schema, metrics: CacheMetricGroup, ages_s: Numbers | None = None
    ) -> pa.Table:
        """The rows of `keys` (all different, none null), with `columns` and the column `KEY_INDEX`.

        Repeats failed calls, and lookups of keys without rows, as the options say. `ages_s`: as in `TableScan.rows_by_key`. Raises LookupFunctionError, which names the provider and
        the first key that failed. The error carries the rows of the keys that did not fail.
        """
        ages_s = np.zeros(keys.num_rows) if ages_s is None else ages_s
        rows, failures, problem = self._ask(keys, columns, metrics, ages_s)
        options = self._call_options
        if options.retry_predicate is not None:
            assert options.retry_fixed_delay_s is not None and options.retry_max_attempts is not None
            for _ in range(options.retry_max_attempts):
                has_outcome = np.zeros(keys.num_rows, np.bool_)
                has_outcome[key_numbers(rows)] = True
                has_outcome[list(failures)] = True
                missing = np.flatnonzero(~has_outcome)
                if not len(missing):
                    break
                self._clock.sleep(options.retry_fixed_delay_s)
                metrics.inc("lookupRetryCount", len(missing))
                retried_ages_s = np.zeros(len(missing))
                retried_rows, retried_failures, retry_problem = self._ask(
                    keys.take(as_indices(missing)), columns, metrics, retried_ages_s
                )
                ages_s[missing] = retried_ages_s
                rows = pa.concat_tables([rows, renumber(retried_rows, missing[key_numbers(retried_rows)])])
                failures |= {int(missing[place]): reason for place, reason in retried_failures.items()}
                problem = problem or retry_problem
            rows = _in_order(rows)
        if problem is not None and failures:
            raise _lookup_error(keys.num_rows, rows, failures, problem)
        return rows

    def _ask(
        self, keys: pa.Table, columns: pa.Schema, metrics: CacheMetricGroup, ages_s: Numbers
    ) -> tuple[pa.Table, dict[int, LookupFunctionError], LookupFunctionError | None]:
        """(the rows of the keys, the errors of the failed keys by position, the first error of any call). Sets `ages_s`."""
        with self._lock:  # a function is used by one thread; other callers wait for their turn
            self._gate.check(f"lookup of {show_keys(keys)}")
            function = self._function()
            try:
                self._open(function, keys, metrics)
                bisection = Bisection(keys.num_rows, function.batch_size or max(keys.num_rows, 1))
                bisection.run(
                    lambda calls, patience: self._make_calls(function, keys, columns, metrics, ages_s, calls, patience)
                )
            except LookupFunctionError as problem:
                self._gate.failed(problem)
                raise
            if bisection.rows:
                self._gate.succeeded()
            else:
                self._gate.failed(bisection.problem)
            if self._gate.is_awaited:
                self._disconnect()
                self._gate.give_way()
            else:
                self._gate.watch()
        parts = [renumber(rows, places[key_numbers(rows)]) for places, rows in bisection.rows]
        rows = pa.concat_tables(parts) if parts else no_rows(columns)
        return (_in_order(rows) if len(parts) > 1 else rows), bisection.failures, bisection.problem

    def _open(self, function: _Function, keys: pa.Table, metrics: CacheMetricGroup) -> None:
        if self._open_function is not function:
            limit_s = self._limit_s(function, 2)  # opening and one call may take this long together
            one_connection = isinstance(function, LookupFunction)

            async def connect_and_open() -> None:
                connection = await self._gate.connect(show_keys(keys)) if one_connection else None
                try:
                    await self._call_with_retries(function.open, (), keys, metrics)
                except BaseException:
                    if connection is not None:
                        connection.release()
                    raise
                self._gate.keep(connection, function)

            self._run(connect_and_open, limit_s, show_keys(keys))
            self._open_function = function

    def _limit_s(self, function: _Function, rounds: int) -> float:
        # Asynchronous calls time out one by one; a synchronous call can only be abandoned.
        grace_s = _GRACE_S if isinstance(function, AsyncLookupFunction) else 0.0
        return rounds * self._call_options.async_timeout_s + grace_s

    def _make_calls(
        self,
        function: _Function,
        keys: pa.Table,
        columns: pa.Schema,
        metrics: CacheMetricGroup,
        ages_s: Numbers,
        calls: Sequence[Call],
        patience: int,
    ) -> list[Outcome]:
        """Call the provider's function, see `MakeCalls`.

        Raises LookupFunctionError for a result that cannot be right for any key, e.g. because it lacks a column.
        """
        pieces = [keys.take(as_indices(call.keys)) for call in calls]
        outcomes: dict[int, Outcome] = {}

        async def make(number: int) -> bool:
            piece, retried = pieces[number], calls[number].problem is None
            connection = None
            try:
                if isinstance(function, AsyncLookupFunction):
                    connection = await self._gate.connect(show_keys(piece))
                await self._gate.take_turn()
                answer = await self._call_with_retries(function.lookup, (piece,), piece, metrics, retried)
            except LookupFunctionError as problem:
                outcomes[number] = problem
                return False
            finally:
                if connection is not None:
                    self._gate.disconnect_call(connection)
            if isinstance(answer, DatedRows):
                ages_s[calls[number].keys] = self._cache_age_s(answer)
                answer = answer.rows
            answer = self._row_checks.with_columns(answer, piece, columns)
            try:
                outcomes[number] = self._row_checks.by_key(answer, piece, columns)
            except LookupFunctionError as problem:
                outcomes[number] = problem
                return False
            return True

        options = self._call_options
        # No more calls at once than connections: otherwise the calls of one lookup would wait for each other.
        at_once = min(options.async_capacity, options.max_connections or options.async_capacity)
        at_once = at_once if isinstance(function, AsyncLookupFunction) else 1
        limit_s = self._limit_s(function, -(-len(pieces) // at_once))
        try:
            self._run(lambda: _run_calls(len(pieces), make, at_once, patience), limit_s, show_keys(keys))
        except LookupTimeoutError as late:
            # The function that hangs is replaced, so this lookup can make no more calls of it.
            answers = {number: rows for number, rows in outcomes.copy().items() if isinstance(rows, pa.Table)}
            return [answers.get(number, late) for number in range(len(pieces))]
        return [outcomes.get(number) for number in range(len(pieces))]

    def _cache_age_s(self, dated: DatedRows) -> float:
        """The age with which rows enter the cache, so that they expire at the end of their lifetime; infinite for rows that must not enter it.

        It is right only under this table's own expire-after-write, so tables with another one do not share the rows (`dates_rows`).
        """
        expire_s = self._options.partial_cache.expire_after_write_s
        if dated.lifetime_s <= 0:
            return math.inf
        return dated.age_s if expire_s is None else max(dated.age_s, expire_s - dated.lifetime_s)

    async def _call_with_retries(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        keys: pa.Table,
        metrics: CacheMetricGroup,
        retried: bool = True,
    ) -> Any:
        """The result of a call's first successful attempt. If `retried` is false, there is only one attempt."""

        attempts_made = 0

        async def attempt() -> Any:
            nonlocal attempts_made
            attempts_made += 1
            if attempts_made > 1:  # the caller has waited for the first turn
                await self._gate.take_turn()
            return await call_and_await(call, *args)

        retry = self._retrying(retried, lambda state: metrics.inc("lookupRetryCount", keys.num_rows))
        started_s = asyncio.get_running_loop().time()

        async def run_attempts() -> tuple[Any, BaseException | None]:
            try:
                return await retry(attempt), None
            except BaseException as problem:  # also SystemExit, which would end the loop
                took_s = asyncio.get_running_loop().time() - started_s
                if isinstance(problem, asyncio.CancelledError) and took_s > 0.9 * self._call_options.async_timeout_s:
                    raise  # cancelled by the timeout below
                return None, problem

        try:
            # The timeout includes the retries, as in Flink.
            rows, problem = await asyncio.wait_for(run_attempts(), self._call_options.async_timeout_s)
        except (asyncio.TimeoutError, TimeoutError):
            raise self._too_slow(show_keys(keys)) from None
        if problem is not None:
            attempts = f" in {attempts_made} attempts" if attempts_made > 1 else ""
            raise_ours(
                LookupFunctionError(
                    f"provider {self.name} failed to look up {show_keys(keys)}{attempts}: {reason_of(problem)}"
                ),
                problem,
            )
        return rows

    def _retrying(
        self, retried: bool, before_sleep: Callable[[tenacity.RetryCallState], None] | None = None
    ) -> tenacity.AsyncRetrying:
        """Repeats a call that fails, `lookup.max-retries` times if `retried`, after longer and longer pauses."""
        return tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._options.storage.max_retries + 1 if retried else 1),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=5),
            retry=tenacity.retry_if_not_exception_type(_FINAL),
            before_sleep=before_sleep,
            sleep=self._gate.sleep,
            reraise=True,
        )

    def _function(self) -> _Function:
        provider = self._provider.current()
        if not isinstance(provider, (LookupFunctionProvider, AsyncLookupFunctionProvider)):
            raise OptionError(
                f"the provider of option {PROVIDER_OPTION} = {self.name!r} has no lookup function, only a scan: set lookup.cache = 'FULL'"
            )
        function: _Function = get_attribute(self.name, provider, "function")
        size = get_attribute(self.name, function, "batch_size")
        if size is not None and (type(size) is not int or size < 1):
            raise LookupFunctionError(
                f"provider {self.name} has batch_size = {foreign_repr(size)}: give a whole number, 1 or more, or None"
            )
        return function

    def close(self) -> None:
        """Close the provider's function. A later lookup opens it again."""
        with self._lock:
            self._disconnect()
            self._calls.end()
            self._version_calls.end()

    def _disconnect(self) -> None:
        """Close the provider's function. The caller holds the lock."""
        function = self._function() if self._open_function is not None else None
        if function is not None and self._open_function is function:
            self._open_function = None
            with contextlib.suppress(PysparkLookupError):
                self._run(lambda: call_and_await(function.close), self._call_options.async_timeout_s, "close()")
            self._gate.disconnect()

    def _offer_connection(self) -> None:
        """Close the provider's function if another process waits for its connection, and no lookup is running."""
        if self._lock.acquire(blocking=False):
            try:
                if self._gate.is_awaited:
                    self._disconnect()
            finally:
                self._lock.release()

    def _run(self, call: Callable[[], Coroutine[Any, Any, Any]], limit_s: float, operation: str) -> Any:
        try:
            return self._calls.run(call, limit_s, self._gate.waited_s)
        except CallTimeoutError:
            # The call that hangs goes on using its function, so the next call gets a new function.
            self._replace()
            raise self._too_slow(operation) from None
        except CallFailedError as failed:
            if isinstance(failed.problem, PysparkLookupError):
                raise_ours(failed.problem, failed.problem.__cause__)
            raise_ours(self._fail(operation, failed.problem), failed.problem)
        except BaseException:
            self._replace()
            raise

    def _fail(self, operation: str, problem: BaseException) -> LookupFunctionError:
        return LookupFunctionError(f"provider {self.name} failed ({operation}): {reason_of(problem)}")

    def _too_slow(self, operation: str) -> LookupTimeoutError:
        return LookupTimeoutError(
            f"provider {self.name} did not answer within lookup.async.timeout = {self._call_options.async_timeout_s:g} s ({operation}): "
            "raise the option if the system needs longer"
        )


async def _run_calls(count: int, call: Callable[[int], Coroutine[Any, Any, bool]], at_once: int, patience: int) -> None:
    """Make `count` calls, up to `at_once` at a time. `call` makes one of them, and returns whether it succeeded.

    After `patience` failures in a row no more calls are made. If `call` raises an exception, the other calls are cancelled and the exception
    is raised.
    """
    waiting, in_a_row = iter(range(count)), 0

    async def work() -> None:
        nonlocal in_a_row
        for number in waiting:
            in_a_row = 0 if await call(number) else in_a_row + 1
            if in_a_row >= patience:
                return

    workers = [asyncio.ensure_future(work()) for _ in range(min(at_once, count))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)  # wait until they have ended


def _in_order(rows: pa.Table) -> pa.Table:
    return rows.take(as_indices(np.argsort(key_numbers(rows), kind="stable")))


def _lookup_error(
    count: int, rows: pa.Table, failures: Mapping[int, LookupFunctionError], problem: LookupFunctionError
) -> LookupFunctionError:
    """The error of a lookup of `count` keys: `problem` if all keys have failed, otherwise the error of the first key that failed.

    The error carries the rows of the keys that did not fail, and the errors of the keys that did.
    """
    first = problem if len(failures) == count else failures[min(failures)]
    other_failures = 0 if len(failures) == count else sum(reason is not first for reason in failures.values())
    error = type(first)(f"{first}" + (f"; {other_failures} more of {count} keys failed, too" if other_failures else ""))
    error.rows, error.failures, error.__cause__ = rows, failures, first.__cause__
    return error
