"""`ProvidedTable`: this process's instance of the provider that `lookup.provider` names, and the calls of its functions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import tenacity

from pyspark_lookup.cache.memory import LookupCache
from pyspark_lookup.columnar.hash_index import key_numbers, no_rows, renumber
from pyspark_lookup.columnar.keys import as_indices
from pyspark_lookup.core import threads
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import (
    LookupFunctionError,
    LookupTimeoutError,
    OptionError,
    PysparkLookupError,
    foreign_repr,
    raise_ours,
)
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.reload_trigger import CacheReloadTrigger
from pyspark_lookup.sources.providers.bisection import Bisection, Call, Outcome
from pyspark_lookup.sources.providers.call_runner import CallFailedError, Calls, CallTimeoutError, iterate_in_thread
from pyspark_lookup.sources.providers.functions import (
    AsyncLookupFunction,
    AsyncLookupFunctionProvider,
    FullCachingLookupProvider,
    LookupFunction,
    LookupFunctionProvider,
    PartialCachingAsyncLookupProvider,
    PartialCachingLookupProvider,
)
from pyspark_lookup.sources.providers.made_provider import PROVIDER_OPTION, MadeProvider, get_attribute
from pyspark_lookup.sources.providers.options import ProviderOptions
from pyspark_lookup.sources.providers.returned_rows import ReturnedRows, show_keys

_GRACE_S = 1.0
_Function = LookupFunction | AsyncLookupFunction


class ProvidedTable:
    """This process's instance of the provider that `lookup.provider` names.

    `name`: the option's value. Raises OptionError if the factory cannot be imported or called, or returns no provider, and
    LookupTimeoutError if it hangs.
    """

    def __init__(self, options: LookupOptions, clock: HostClock) -> None:
        self._call_options = options.kind(ProviderOptions)
        assert self._call_options.provider is not None
        self.name = self._call_options.provider
        self._options = options
        self._clock = clock
        self._calls = Calls(f"lookupcache-provider-{self.name}")
        # A loop of its own: every query asks for the version, and must not wait behind lookups.
        self._version_calls = Calls(f"lookupcache-version-{self.name}")
        self._lock = threading.RLock()
        self._open_function: object = None  # the function that is open
        self._provider = MadeProvider(options)
        self.schema = self._provider.schema
        self._row_checks = ReturnedRows(self.name, self.schema)

    def _replace(self) -> None:
        self._open_function = None
        self._provider.replace()

    @property
    def versioned(self) -> bool:
        """Whether the provider has versions."""
        return get_attribute(self.name, self._provider.latest, "version") is not None

    @property
    def cache(self) -> LookupCache | None:
        """The cache that the provider brings with it."""
        provider = self._provider.latest
        if isinstance(provider, (PartialCachingLookupProvider, PartialCachingAsyncLookupProvider)):
            cache: LookupCache | None = get_attribute(self.name, provider, "cache")
            return cache
        return None

    @property
    def trigger(self) -> CacheReloadTrigger | None:
        """The reload trigger that the provider brings with it."""
        provider = self._provider.latest
        has_trigger = isinstance(provider, FullCachingLookupProvider)
        return get_attribute(self.name, provider, "reload_trigger") if has_trigger else None

    @property
    def asynchronous(self) -> bool:
        """Whether several calls run at once."""
        return isinstance(self._provider.latest, AsyncLookupFunctionProvider)

    @property
    def scans(self) -> bool:
        """Whether all rows can be read."""
        return isinstance(self._provider.latest, FullCachingLookupProvider)

    def version(self) -> str | None:
        """The current version; None if the provider has no versions. Raises LookupFunctionError."""
        version: Callable[[], str] | None = get_attribute(self.name, self._provider.current(), "version")
        if version is None:
            return None

        async def ask() -> str:
            return version()

        try:
            current_version = self._version_calls.run(ask, self._call_options.async_timeout_s)
        except CallTimeoutError:
            self._replace()
            raise self._too_slow("version()") from None
        except CallFailedError as failed:
            raise_ours(self._fail("version()", failed.problem), failed.problem)
        if not isinstance(current_version, str) or not current_version:
            raise LookupFunctionError(
                f"version() of provider {self.name} returned {foreign_repr(current_version)}: return a str"
            )
        return current_version

    def scan(self, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows, with these columns of `schema`. Raises LookupFunctionError, and LookupTimeoutError for a batch that takes longer than
        `lookup.async.timeout`: a reload must not hold its lock, for which the host's other processes wait, without end."""
        provider = self._provider.current()
        assert isinstance(provider, FullCachingLookupProvider)
        try:
            scan = get_attribute(self.name, provider, "scan")
            for batch in iterate_in_thread(scan, f"lookupcache-scan-{self.name}", self._call_options.async_timeout_s):
                yield from self._row_checks.conform(pa.Table.from_batches([batch]), columns, "scan()").to_batches()
        except CallTimeoutError:
            self._replace()
            raise self._too_slow("a batch of scan()") from None
        except CallFailedError as failed:
            if isinstance(failed.problem, PysparkLookupError):
                raise_ours(failed.problem, failed.problem.__cause__)
            raise_ours(self._fail("scan()", failed.problem), failed.problem)
        except (TypeError, AttributeError, pa.ArrowException) as problem:  # the item is not a batch
            raise_ours(self._fail("scan()", problem), problem)

    # --- lookups ----------------------------------------------------------------------------------

    def lookup(self, keys: pa.Table, columns: pa.Schema, metrics: CacheMetricGroup) -> pa.Table:
        """The rows of `keys` (all different, none null) with `columns`, and the column `KEY_INDEX`.

        Repeats failed calls, and lookups of keys without rows, as the options say. Raises LookupFunctionError, which names the provider and
        the first key that failed, and carries the rows of the others.
        """
        rows, failures, problem = self._ask(keys, columns, metrics)
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
                retried_rows, retried_failures, retry_problem = self._ask(
                    keys.take(as_indices(missing)), columns, metrics
                )
                rows = pa.concat_tables([rows, renumber(retried_rows, missing[key_numbers(retried_rows)])])
                failures |= {int(missing[place]): reason for place, reason in retried_failures.items()}
                problem = problem or retry_problem
            rows = _in_order(rows)
        if problem is not None and failures:
            raise _lookup_error(keys.num_rows, rows, failures, problem)
        return rows

    def _ask(
        self, keys: pa.Table, columns: pa.Schema, metrics: CacheMetricGroup
    ) -> tuple[pa.Table, dict[int, LookupFunctionError], LookupFunctionError | None]:
        """(the rows of the keys, which keys have no answer, the first error of any call)."""
        with self._lock:  # a function is used by one thread; other callers wait for their turn
            function = self._function()
            self._open(function, keys, metrics)
            bisection = Bisection(keys.num_rows, function.batch_size or max(keys.num_rows, 1))
            bisection.run(lambda calls, patience: self._make_calls(function, keys, columns, metrics, calls, patience))
        parts = [renumber(rows, places[key_numbers(rows)]) for places, rows in bisection.rows]
        rows = pa.concat_tables(parts) if parts else no_rows(columns)
        return (_in_order(rows) if len(parts) > 1 else rows), bisection.failures, bisection.problem

    def _open(self, function: _Function, keys: pa.Table, metrics: CacheMetricGroup) -> None:
        if self._open_function is not function:
            limit_s = self._limit_s(function, 2)  # as long as opening and a call may take together
            self._run(lambda: self._call_with_retries(function.open, (), keys, metrics), limit_s, show_keys(keys))
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
        calls: Sequence[Call],
        patience: int,
    ) -> list[Outcome]:
        """Make calls of the provider's function, see `MakeCalls`. Raises LookupFunctionError for an answer that would be wrong for any key."""
        pieces = [keys.take(as_indices(call.keys)) for call in calls]
        outcomes: dict[int, Outcome] = {}

        async def make(number: int) -> bool:
            piece, retried = pieces[number], calls[number].problem is None
            try:
                answer = await self._call_with_retries(function.lookup, (piece,), piece, metrics, retried)
            except LookupFunctionError as problem:
                outcomes[number] = problem
                return False
            answer = self._row_checks.with_columns(answer, piece, columns)
            try:
                outcomes[number] = self._row_checks.by_key(answer, piece, columns)
            except LookupFunctionError as problem:
                outcomes[number] = problem
                return False
            return True

        at_once = self._call_options.async_capacity if isinstance(function, AsyncLookupFunction) else 1
        limit_s = self._limit_s(function, -(-len(pieces) // at_once))
        try:
            self._run(lambda: _run_calls(len(pieces), make, at_once, patience), limit_s, show_keys(keys))
        except LookupTimeoutError as late:
            # The next caller gets a new function, so this was the last call of this one.
            answers = {number: rows for number, rows in outcomes.copy().items() if isinstance(rows, pa.Table)}
            return [answers.get(number, late) for number in range(len(pieces))]
        return [outcomes.get(number) for number in range(len(pieces))]

    async def _call_with_retries(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        keys: pa.Table,
        metrics: CacheMetricGroup,
        retried: bool = True,
    ) -> Any:
        """The result of a call's first successful attempt. There is more than one attempt only if `retried` is true."""

        async def attempt() -> Any:
            return await _call_and_await(call, *args)

        async def sleep(seconds: float) -> None:
            slept: concurrent.futures.Future[None] = concurrent.futures.Future()
            slept.set_running_or_notify_cancel()  # so that cancelling the call does not cancel it

            def wait() -> None:  # on its own thread, so that failed calls wait at the same time
                try:
                    self._clock.sleep(seconds)
                finally:
                    slept.set_result(None)

            threads.start(f"lookupcache-retry-{self.name}", wait, foreign=True)
            await asyncio.wrap_future(slept)

        retry = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._options.storage.max_retries + 1 if retried else 1),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=5),
            before_sleep=lambda state: metrics.inc("lookupRetryCount", keys.num_rows),
            sleep=sleep,
            reraise=True,
        )

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
            tried_again = self._options.storage.max_retries and isinstance(problem, Exception)
            attempts = f" in {self._options.storage.max_retries + 1} attempts" if tried_again else ""
            raise_ours(
                LookupFunctionError(
                    f"provider {self.name} failed to look up {show_keys(keys)}{attempts}: {foreign_repr(problem)}"
                ),
                problem,
            )
        return rows

    def _function(self) -> _Function:
        provider = self._provider.current()
        if not isinstance(provider, (LookupFunctionProvider, AsyncLookupFunctionProvider)):
            raise OptionError(
                f"option {PROVIDER_OPTION} = {self.name!r} has no lookup function: set lookup.cache = 'FULL'"
            )
        function: _Function = get_attribute(self.name, provider, "function")
        size = get_attribute(self.name, function, "batch_size")
        if size is not None and (type(size) is not int or size < 1):
            raise LookupFunctionError(
                f"provider {self.name} has batch_size = {foreign_repr(size)}: give a whole number, 1 or more, or None"
            )
        return function

    def close(self) -> None:
        """Close the function; a later lookup opens it again."""
        with self._lock:
            function = self._function() if self._open_function is not None else None
            if function is not None and self._open_function is function:
                self._open_function = None
                with contextlib.suppress(PysparkLookupError):
                    self._run(lambda: _call_and_await(function.close), self._call_options.async_timeout_s, "close()")
            self._calls.end()
            self._version_calls.end()

    def _run(self, call: Callable[[], Coroutine[Any, Any, Any]], limit_s: float, operation: str) -> Any:
        try:
            return self._calls.run(call, limit_s)
        except CallTimeoutError:
            # The call that hangs goes on using its function, so the next call gets another one.
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
        return LookupFunctionError(f"provider {self.name} failed, {operation}: {foreign_repr(problem)}")

    def _too_slow(self, operation: str) -> LookupTimeoutError:
        return LookupTimeoutError(
            f"provider {self.name} did not answer within lookup.async.timeout = {self._call_options.async_timeout_s:g} s, {operation}"
        )


async def _call_and_await(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, asynchronous or not, and return its result. The call happens when this coroutine is awaited."""
    loop = asyncio.get_running_loop()
    if not inspect.iscoroutinefunction(function):
        asyncio._set_running_loop(None)  # the function may run an event loop of its own
    try:
        result = function(*args)
    finally:
        asyncio._set_running_loop(loop)
    return await result if inspect.isawaitable(result) else result


async def _run_calls(count: int, call: Callable[[int], Coroutine[Any, Any, bool]], at_once: int, patience: int) -> None:
    """Make `count` calls, up to `at_once` at a time. `call` returns whether its call succeeded.

    After `patience` failures in a row no more calls are made. If `call` raises an exception, the others are cancelled and it is raised.
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
    """The error of a lookup of `count` keys: `problem` if all have failed, else that of the first key that failed.

    It carries the rows of the keys that did not fail, and the failures of the others.
    """
    first = problem if len(failures) == count else failures[min(failures)]
    other_failures = 0 if len(failures) == count else sum(reason is not first for reason in failures.values())
    error = type(first)(f"{first}" + (f"; {other_failures} more of {count} keys failed, too" if other_failures else ""))
    error.rows, error.failures, error.__cause__ = rows, failures, first.__cause__
    return error
