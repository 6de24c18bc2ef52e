"""Cached lookup tables for Spark: `spark.read.format("lookupcache").load(path)`.

All public names are here; the modules are private. To find data sources, every Spark planner imports all packages named `pyspark_*` and asks
for their `DefaultSource`. So importing this package is cheap, loads neither pyarrow nor fsspec, and never raises. The module of a public
name is imported when the name is first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark_lookup.cache.disk_lookup_cache import DiskCacheLookupCache as DiskCacheLookupCache
    from pyspark_lookup.cache.lookup_cache import CachedRows as CachedRows
    from pyspark_lookup.cache.lookup_cache import EntryRules as EntryRules
    from pyspark_lookup.cache.lookup_cache import KeyLookupCache as KeyLookupCache
    from pyspark_lookup.cache.lookup_cache import LookupCache as LookupCache
    from pyspark_lookup.cache.memory.default_cache import DefaultLookupCache as DefaultLookupCache
    from pyspark_lookup.cache.memory.default_cache import DefaultLookupCacheBuilder as DefaultLookupCacheBuilder
    from pyspark_lookup.columnar.keys import KEY_INDEX as KEY_INDEX
    from pyspark_lookup.core.write_ids import RangeResponse as RangeResponse
    from pyspark_lookup.core.write_ids import ValidWriteIdList as ValidWriteIdList
    from pyspark_lookup.errors import CacheDirectoryError as CacheDirectoryError
    from pyspark_lookup.errors import CacheFullError as CacheFullError
    from pyspark_lookup.errors import CatalogUnavailableError as CatalogUnavailableError
    from pyspark_lookup.errors import CommitUnknownError as CommitUnknownError
    from pyspark_lookup.errors import DamagedFileError as DamagedFileError
    from pyspark_lookup.errors import LookupFunctionError as LookupFunctionError
    from pyspark_lookup.errors import LookupTimeoutError as LookupTimeoutError
    from pyspark_lookup.errors import NonUniqueKeyError as NonUniqueKeyError
    from pyspark_lookup.errors import NotATableError as NotATableError
    from pyspark_lookup.errors import NotSupportedError as NotSupportedError
    from pyspark_lookup.errors import OptionError as OptionError
    from pyspark_lookup.errors import OverlapError as OverlapError
    from pyspark_lookup.errors import PredicateError as PredicateError
    from pyspark_lookup.errors import PysparkLookupError as PysparkLookupError
    from pyspark_lookup.errors import ReloadFailedError as ReloadFailedError
    from pyspark_lookup.errors import SchemaError as SchemaError
    from pyspark_lookup.errors import TableBusyError as TableBusyError
    from pyspark_lookup.errors import TableEmptyError as TableEmptyError
    from pyspark_lookup.errors import TableFormatError as TableFormatError
    from pyspark_lookup.errors import UfsError as UfsError
    from pyspark_lookup.errors import UfsNotFoundError as UfsNotFoundError
    from pyspark_lookup.errors import UfsPermissionError as UfsPermissionError
    from pyspark_lookup.errors import UfsTimeoutError as UfsTimeoutError
    from pyspark_lookup.errors import UfsUnavailableError as UfsUnavailableError
    from pyspark_lookup.errors import UnreadableColumnError as UnreadableColumnError
    from pyspark_lookup.errors import VersionGoneError as VersionGoneError
    from pyspark_lookup.errors import WriteConflictError as WriteConflictError
    from pyspark_lookup.lookup.lookup_table import LookupTable as LookupTable
    from pyspark_lookup.options.lookup_options import LookupOptions as LookupOptions
    from pyspark_lookup.options.reload_trigger import CacheReloadTrigger as CacheReloadTrigger
    from pyspark_lookup.options.reload_trigger import DueTrigger as DueTrigger
    from pyspark_lookup.options.reload_trigger import LastReload as LastReload
    from pyspark_lookup.options.reload_trigger import PeriodicCacheReloadTrigger as PeriodicCacheReloadTrigger
    from pyspark_lookup.options.reload_trigger import ScheduleMode as ScheduleMode
    from pyspark_lookup.options.reload_trigger import TimedCacheReloadTrigger as TimedCacheReloadTrigger
    from pyspark_lookup.sources.providers.functions import AsyncKeyLookupFunction as AsyncKeyLookupFunction
    from pyspark_lookup.sources.providers.functions import AsyncLookupFunction as AsyncLookupFunction
    from pyspark_lookup.sources.providers.functions import AsyncLookupFunctionProvider as AsyncLookupFunctionProvider
    from pyspark_lookup.sources.providers.functions import FullCachingLookupProvider as FullCachingLookupProvider
    from pyspark_lookup.sources.providers.functions import KeyLookupFunction as KeyLookupFunction
    from pyspark_lookup.sources.providers.functions import LookupContext as LookupContext
    from pyspark_lookup.sources.providers.functions import LookupFunction as LookupFunction
    from pyspark_lookup.sources.providers.functions import LookupFunctionProvider as LookupFunctionProvider
    from pyspark_lookup.sources.providers.functions import LookupProvider as LookupProvider
    from pyspark_lookup.sources.providers.functions import (
        PartialCachingAsyncLookupProvider as PartialCachingAsyncLookupProvider,
    )
    from pyspark_lookup.sources.providers.functions import PartialCachingLookupProvider as PartialCachingLookupProvider
    from pyspark_lookup.spark.join import explain_lookup as explain_lookup
    from pyspark_lookup.spark.join import lookup_join as lookup_join
    from pyspark_lookup.spark.load import read_table as read_table
    from pyspark_lookup.spark.session import configure as configure
    from pyspark_lookup.spark.source import DefaultSource as DefaultSource
    from pyspark_lookup.spark.sql_functions import register_lookup as register_lookup
    from pyspark_lookup.spark.warm import warm as warm

__version__ = "0.1.0"

_HOMES = {
    "errors": "CacheDirectoryError CacheFullError CatalogUnavailableError CommitUnknownError DamagedFileError LookupFunctionError LookupTimeoutError NonUniqueKeyError NotATableError NotSupportedError OptionError OverlapError PredicateError PysparkLookupError ReloadFailedError SchemaError TableBusyError TableEmptyError TableFormatError UfsError UfsNotFoundError UfsPermissionError UfsTimeoutError UfsUnavailableError UnreadableColumnError VersionGoneError WriteConflictError",
    "core.write_ids": "RangeResponse ValidWriteIdList",
    "cache.disk_lookup_cache": "DiskCacheLookupCache",
    "cache.lookup_cache": "CachedRows EntryRules KeyLookupCache LookupCache",
    "cache.memory.default_cache": "DefaultLookupCache DefaultLookupCacheBuilder",
    "columnar.keys": "KEY_INDEX",
    "lookup.lookup_table": "LookupTable",
    "options.lookup_options": "LookupOptions",
    "options.reload_trigger": "CacheReloadTrigger DueTrigger LastReload PeriodicCacheReloadTrigger ScheduleMode TimedCacheReloadTrigger",
    "sources.providers.functions": "AsyncKeyLookupFunction AsyncLookupFunction AsyncLookupFunctionProvider FullCachingLookupProvider KeyLookupFunction LookupContext LookupFunction LookupFunctionProvider LookupProvider PartialCachingAsyncLookupProvider PartialCachingLookupProvider",
    "spark.join": "explain_lookup lookup_join",
    "spark.load": "read_table",
    "spark.session": "configure",
    "spark.source": "DefaultSource",
    "spark.sql_functions": "register_lookup",
    "spark.warm": "warm",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __dir__() -> list[str]:
    return sorted((*_HOME_OF, "__version__"))


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pyspark_lookup' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"pyspark_lookup.{_HOME_OF[name]}"), name)
    except Exception as problem:
        if name != "DefaultSource":
            if "NumPy" in str(problem):  # this pyarrow needs a newer NumPy, but PySpark 3.5 keeps NumPy below 2
                raise ImportError(f"pyspark_lookup: {problem}; pip install 'pyarrow<26', or a newer NumPy") from None
            missing = str(getattr(problem, "name", None) or "pyspark_lookup").partition(".")[0]
            if isinstance(problem, ModuleNotFoundError) and missing != "pyspark_lookup":
                extra = "[spark]" if missing == "pyspark" else ""
                raise ModuleNotFoundError(
                    f"pyspark_lookup.{name}: {problem} in {sys.executable}; pip install 'pyspark-lookup{extra}' there, or run another Python",
                    name=problem.name,
                ) from None
            raise
        # Spark asks with hasattr(). An error here must not break all other Python sources.
        raise AttributeError(
            f"pyspark_lookup cannot provide its Spark data source, lookupcache: {problem}"
        ) from problem


if not TYPE_CHECKING:  # type checkers take the imports above
    __all__ = list(__dir__())
