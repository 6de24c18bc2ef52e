"""`ProvidedTables`: the providers' tables of one process, each made once."""

from __future__ import annotations

import concurrent.futures
import functools

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.forks import ForkSafeLock
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.opening import Opening
from pyspark_lookup.sources.providers.as_files import ProvidedScan, ProvidedStore, ProviderSource
from pyspark_lookup.sources.providers.effective_options import with_provider
from pyspark_lookup.sources.providers.provider import ProvidedTable
from pyspark_lookup.storage.disk import key_of


class ProvidedTables:
    """Opens the tables that `lookup.provider` names. The first caller makes a table, others wait for it."""

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._lock = ForkSafeLock()
        self.futures: dict[str, concurrent.futures.Future[ProvidedTable]] = {}

    def open(self, options: LookupOptions) -> Opening | None:
        if options.provider is None:
            return None
        key = _key(options)
        table = self._table(key, options)
        return Opening(
            key,
            functools.partial(with_provider, provided_table=table),
            functools.partial(ProvidedStore, table, options),
            functools.partial(ProviderSource, table),
            functools.partial(ProvidedScan, table),
            table.cache,
            table.trigger,
        )

    def _table(self, key: str, options: LookupOptions) -> ProvidedTable:
        """Made outside the lock, because a factory may hang, or open a table."""
        with self._lock:
            existing = self.futures.get(key)
            future = existing or self.futures.setdefault(key, concurrent.futures.Future())
        if existing is None:
            try:
                future.set_result(ProvidedTable(options, self._clock))
            except BaseException as problem:
                with self._lock:
                    del self.futures[key]
                future.set_exception(problem)
        return future.result()


def _key(options: LookupOptions) -> str:
    made_with = options.provider, options.provider_options, options.path, options.keys, options.columns, options.where
    calls = options.max_retries, options.async_capacity, options.async_timeout_s
    retries = options.retry_predicate, options.retry_fixed_delay_s, options.retry_max_attempts
    return key_of(*made_with, *calls, *retries, options.cache_directory())
