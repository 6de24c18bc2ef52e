"""Cached lookup tables for Spark: `spark.read.format("lookupcache").load(path)`.

Spark imports this package in every planner to find `DefaultSource`, together with every other
package named `pyspark_*`: so importing it is cheap, brings in neither pyarrow nor fsspec, and never
raises. Names are resolved when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark_lookup.api import LookupTable
    from pyspark_lookup.spark.functions import register_lookup
    from pyspark_lookup.spark.join import explain_lookup, lookup_join
    from pyspark_lookup.spark.session import configure
    from pyspark_lookup.spark.source import LookupCacheDataSource as DefaultSource
    from pyspark_lookup.spark.warming import warm

__all__ = [
    "DefaultSource",
    "LookupTable",
    "__version__",
    "configure",
    "explain_lookup",
    "lookup_join",
    "register_lookup",
    "warm",
]

__version__ = "0.1.0"

_HOMES = {
    "DefaultSource": ("pyspark_lookup.spark.source", "LookupCacheDataSource"),
    "LookupTable": ("pyspark_lookup.api", "LookupTable"),
    "configure": ("pyspark_lookup.spark.session", "configure"),
    "explain_lookup": ("pyspark_lookup.spark.join", "explain_lookup"),
    "register_lookup": ("pyspark_lookup.spark.functions", "register_lookup"),
    "lookup_join": ("pyspark_lookup.spark.join", "lookup_join"),
    "warm": ("pyspark_lookup.spark.warming", "warm"),
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pyspark_lookup' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as problem:
        if name != "DefaultSource":
            raise
        # Spark asks with hasattr(): whatever is broken here must not take every Python source down.
        raise AttributeError(f"pyspark_lookup cannot offer its Spark source: {problem}") from problem
