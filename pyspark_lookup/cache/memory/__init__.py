"""Caches of rows by key in memory: the interface `LookupCache`, and its default implementation (FLIP-221)."""

from pyspark_lookup.cache.lookup_cache import CachedRows, LookupCache
from pyspark_lookup.cache.memory.default_cache import DefaultLookupCache, DefaultLookupCacheBuilder
from pyspark_lookup.columnar.keys import KEY_INDEX

__all__ = ["KEY_INDEX", "CachedRows", "DefaultLookupCache", "DefaultLookupCacheBuilder", "LookupCache"]
