"""Cached lookup tables for Spark: `spark.read.format("lookupcache").load(path)`.

Everything public is here; modules are private. Spark imports this package in every planner to find `DefaultSource`, together with every other
package named `pyspark_*`: so importing it is cheap, brings in neither pyarrow nor fsspec, and never
raises. Names are resolved when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark_lookup.base.errors import (
        CacheDirectoryError,
        CommitUnknownError,
        DamagedFileError,
        LookupFunctionError,
        LookupTimeoutError,
        NonUniqueKeyError,
        NotATableError,
        NotSupportedError,
        OptionError,
        OverlapError,
        PredicateError,
        PysparkLookupError,
        ReloadFailedError,
        SchemaError,
        TableBusyError,
        TableEmptyError,
        TableFormatError,
        UfsError,
        UfsNotFoundError,
        UfsPermissionError,
        UfsTimeoutError,
        UfsUnavailableError,
        VersionGoneError,
        WriteConflictError,
    )
    from pyspark_lookup.base.write_ids import RangeResponse, ValidWriteIdList
    from pyspark_lookup.cache.lookup_cache import CachedRows, LookupCache
    from pyspark_lookup.cache.memory.default_cache import DefaultLookupCache, DefaultLookupCacheBuilder
    from pyspark_lookup.columnar.key_rows import KEY_INDEX
    from pyspark_lookup.engine.lookup_table import LookupTable
    from pyspark_lookup.options.lookup_options import LookupOptions
    from pyspark_lookup.options.reload_trigger import (
        CacheReloadTrigger,
        DueTrigger,
        LastReload,
        PeriodicCacheReloadTrigger,
        ScheduleMode,
        TimedCacheReloadTrigger,
    )
    from pyspark_lookup.providers.functions import (
        AsyncKeyLookupFunction,
        AsyncLookupFunction,
        AsyncLookupFunctionProvider,
        FullCachingLookupProvider,
        KeyLookupFunction,
        LookupContext,
        LookupFunction,
        LookupFunctionProvider,
        LookupProvider,
        PartialCachingAsyncLookupProvider,
        PartialCachingLookupProvider,
    )
    from pyspark_lookup.spark.join import explain_lookup, lookup_join
    from pyspark_lookup.spark.session import configure
    from pyspark_lookup.spark.source import LookupCacheDataSource as DefaultSource
    from pyspark_lookup.spark.sql_functions import register_lookup
    from pyspark_lookup.spark.warm import warm

__all__ = [
    "KEY_INDEX",
    "AsyncKeyLookupFunction",
    "AsyncLookupFunction",
    "AsyncLookupFunctionProvider",
    "CacheDirectoryError",
    "CacheReloadTrigger",
    "CachedRows",
    "CommitUnknownError",
    "DamagedFileError",
    "DefaultLookupCache",
    "DefaultLookupCacheBuilder",
    "DefaultSource",
    "DueTrigger",
    "FullCachingLookupProvider",
    "KeyLookupFunction",
    "LastReload",
    "LookupCache",
    "LookupContext",
    "LookupFunction",
    "LookupFunctionError",
    "LookupFunctionProvider",
    "LookupOptions",
    "LookupProvider",
    "LookupTable",
    "LookupTimeoutError",
    "NonUniqueKeyError",
    "NotATableError",
    "NotSupportedError",
    "OptionError",
    "OverlapError",
    "PartialCachingAsyncLookupProvider",
    "PartialCachingLookupProvider",
    "PeriodicCacheReloadTrigger",
    "PredicateError",
    "PysparkLookupError",
    "RangeResponse",
    "ReloadFailedError",
    "ScheduleMode",
    "SchemaError",
    "TableBusyError",
    "TableEmptyError",
    "TableFormatError",
    "TimedCacheReloadTrigger",
    "UfsError",
    "UfsNotFoundError",
    "UfsPermissionError",
    "UfsTimeoutError",
    "UfsUnavailableError",
    "ValidWriteIdList",
    "VersionGoneError",
    "WriteConflictError",
    "__version__",
    "configure",
    "explain_lookup",
    "lookup_join",
    "register_lookup",
    "warm",
]

__version__ = "0.1.0"

_HOMES = {
    "base.errors": "CacheDirectoryError CommitUnknownError DamagedFileError LookupFunctionError LookupTimeoutError NonUniqueKeyError NotATableError NotSupportedError OptionError OverlapError PredicateError PysparkLookupError ReloadFailedError SchemaError TableBusyError TableEmptyError TableFormatError UfsError UfsNotFoundError UfsPermissionError UfsTimeoutError UfsUnavailableError VersionGoneError WriteConflictError",
    "base.write_ids": "RangeResponse ValidWriteIdList",
    "cache.lookup_cache": "CachedRows LookupCache",
    "cache.memory.default_cache": "DefaultLookupCache DefaultLookupCacheBuilder",
    "columnar.key_rows": "KEY_INDEX",
    "engine.lookup_table": "LookupTable",
    "options.lookup_options": "LookupOptions",
    "options.reload_trigger": "CacheReloadTrigger DueTrigger LastReload PeriodicCacheReloadTrigger ScheduleMode TimedCacheReloadTrigger",
    "providers.functions": "AsyncKeyLookupFunction AsyncLookupFunction AsyncLookupFunctionProvider FullCachingLookupProvider KeyLookupFunction LookupContext LookupFunction LookupFunctionProvider LookupProvider PartialCachingAsyncLookupProvider PartialCachingLookupProvider",
    "spark.join": "explain_lookup lookup_join",
    "spark.session": "configure",
    "spark.source": "LookupCacheDataSource",
    "spark.sql_functions": "register_lookup",
    "spark.warm": "warm",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    own = "LookupCacheDataSource" if name == "DefaultSource" else name
    if name not in __all__ or own not in _HOME_OF:
        raise AttributeError(f"module 'pyspark_lookup' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"pyspark_lookup.{_HOME_OF[own]}"), own)
    except Exception as problem:
        if name != "DefaultSource":
            raise
        # Spark asks with hasattr(): whatever is broken here must not take every Python source down.
        raise AttributeError(f"pyspark_lookup cannot offer its Spark source: {problem}") from problem
