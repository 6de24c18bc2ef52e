"""The partial cache (FLIP-221): rows of the requested keys, in this process and shared by its host."""

from pyspark_lookup.cache.partial.invalidations import castable_keys
from pyspark_lookup.cache.partial.registry import PartialTables

__all__ = ["PartialTables", "castable_keys"]
