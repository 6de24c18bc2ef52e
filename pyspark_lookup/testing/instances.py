"""`Instance`: a provider that a factory has made, with the threads that call it. `run_in_child`: runs a function in a forked process."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.errors import foreign_repr, raise_ours
from pyspark_lookup.sources.providers.call_runner import (
    CallFailedError,
    Calls,
    CallTimeoutError,
    call_and_await,
    iterate_in_thread,
)
from pyspark_lookup.sources.providers.functions import (
    AsyncLookupFunction,
    DatedRows,
    LookupFunction,
    LookupProvider,
    PartialCachingAsyncLookupProvider,
    PartialCachingLookupProvider,
)
from pyspark_lookup.sources.providers.provider import show_keys
from pyspark_lookup.testing.rules import ProviderCheckError

_TEXT_AT_MOST = 10_000  # characters of a problem that a forked process reports


class CallRaisedError(ProviderCheckError):
    """A call of the provider raised an error. `reason`: the error as text."""

    def __init__(self, operation: str, problem: BaseException) -> None:
        self.reason = foreign_repr(problem)
        super().__init__("error", f"{operation} raised {self.reason}")


class Instance:
    """A provider, and the threads that call it. The methods raise ProviderCheckError if a call fails, or takes longer than `timeout_s`."""

    def __init__(self, provider: LookupProvider, timeout_s: float) -> None:
        self.provider = provider
        self.function: LookupFunction | AsyncLookupFunction | None = getattr(provider, "function", None)
        self.scan: Callable[[], Any] | None = getattr(provider, "scan", None)
        self.version: Callable[[], Any] | None = provider.version
        self.changes: Callable[[str], Any] | None = getattr(provider, "changes", None)
        self._timeout_s = timeout_s
        self._calls = Calls("lookupcache-check-lookup")
        self._version_calls = Calls("lookupcache-check-version")

    @property
    def asynchronous(self) -> bool:
        return isinstance(self.function, AsyncLookupFunction)

    @property
    def batch_size(self) -> int | None:
        return None if self.function is None else self.function.batch_size

    @property
    def brings_cache(self) -> bool:
        return isinstance(self.provider, (PartialCachingLookupProvider, PartialCachingAsyncLookupProvider))

    def open(self) -> None:
        if self.function is not None:
            self._run(self._calls, "open()", self.function.open)

    def close(self) -> None:
        if self.function is not None:
            self._run(self._calls, "close()", self.function.close)

    def end(self) -> None:
        """End the threads."""
        self._calls.end()
        self._version_calls.end()

    def lookup(self, keys: pa.Table) -> Any:
        assert self.function is not None
        operation = f"lookup of {show_keys(keys)}"
        return _rows_in(self._run(self._calls, operation, self.function.lookup, keys), operation)

    def lookup_at_once(self, pieces: Sequence[pa.Table]) -> list[Any]:
        """The results of calls of an asynchronous function that run at the same time. One more call begins with them, and is cancelled."""
        assert isinstance(self.function, AsyncLookupFunction)
        lookup = self.function.lookup

        async def run() -> list[Any]:
            cancelled = asyncio.ensure_future(lookup(pieces[0]))
            calls = [asyncio.ensure_future(lookup(piece)) for piece in pieces]
            await asyncio.sleep(0)  # let all of them begin
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            return list(await asyncio.gather(*calls))

        operation = f"{len(pieces)} lookups at once"
        return [_rows_in(answer, operation) for answer in self._run(self._calls, operation, run)]

    def read_version(self) -> str:
        current_version = self._run(self._version_calls, "version()", self.version)
        if not isinstance(current_version, str) or not current_version:
            raise ProviderCheckError("version", f"version() returned {foreign_repr(current_version)}")
        return current_version

    def read_changes(self, since: str) -> Any:
        return self._run(self._version_calls, f"changes({since!r})", self.changes, since)

    def batches(self) -> Iterator[Any]:
        assert self.scan is not None
        try:
            yield from iterate_in_thread(self.scan, "lookupcache-check-scan", self._timeout_s)
        except CallTimeoutError:
            raise self._too_slow("a batch of scan()") from None
        except CallFailedError as failed:
            raise_ours(CallRaisedError("scan()", failed.problem), failed.problem)

    def _run(self, calls: Calls, operation: str, call: Any, *args: Any) -> Any:
        try:
            return calls.run(lambda: call_and_await(call, *args), self._timeout_s)
        except CallTimeoutError:
            raise self._too_slow(operation) from None
        except CallFailedError as failed:
            raise_ours(CallRaisedError(operation, failed.problem), failed.problem)

    def _too_slow(self, operation: str) -> ProviderCheckError:
        return ProviderCheckError("time", f"{operation} has not returned within {self._timeout_s:g} s")


def _rows_in(answer: Any, operation: str) -> Any:
    """The rows of a lookup's result. Checks the times of `DatedRows`."""
    if not isinstance(answer, DatedRows):
        return answer
    for name in ("age_s", "lifetime_s"):
        seconds = getattr(answer, name)
        if not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise ProviderCheckError("result", f"{operation} returned DatedRows with {name} = {foreign_repr(seconds)}")
    return answer.rows


def run_in_child(run: Callable[[], str], timeout_s: float, rule: str = "fork") -> str:
    """What `run` returns in a forked process. Raises ProviderCheckError, for `rule`, if it raises there, takes longer than `timeout_s`, or the
    process dies."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # from Python 3.12 on, about the threads that this process has
        child = os.fork()
    if not child:
        _report(run, writer)
    os.close(writer)
    try:
        text = _read_all(reader, timeout_s)
        if text is None:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(reader)
        os.waitpid(child, 0)
    if text is None:
        raise ProviderCheckError(rule, f"a forked process that used the provider had not ended after {timeout_s:g} s")
    if not text:
        raise ProviderCheckError(rule, "a forked process died while it used the provider")
    result, problem, key = json.loads(text)
    if problem:
        raise ProviderCheckError(rule, problem, key)
    return str(result)


def _report(run: Callable[[], str], writer: int) -> None:
    """Write the result of `run` as JSON, and end this process."""
    try:
        report: tuple[str, str, Mapping[str, Any] | None]
        try:
            report = run(), "", None
        except ProviderCheckError as problem:
            report = "", problem.problem[:_TEXT_AT_MOST], problem.key
        except BaseException as problem:
            report = "", f"in a forked process: {foreign_repr(problem)[:_TEXT_AT_MOST]}", None
        os.write(writer, json.dumps(report, default=str).encode())
    finally:
        os._exit(0)


def _read_all(reader: int, timeout_s: float) -> str | None:
    """All that is written to a pipe until its end; None if that takes longer than `timeout_s`."""
    data, until_s = b"", time.monotonic() + timeout_s
    while select.select([reader], [], [], max(until_s - time.monotonic(), 0))[0]:
        chunk = os.read(reader, 65536)
        if not chunk:
            return data.decode()
        data += chunk
    return None
