"""The partial cache (FLIP-221): the rows of keys that were looked up, in the memory of each process and in files that the host's processes share."""

from pyspark_lookup.cache.partial.invalidations import castable_keys
from pyspark_lookup.cache.partial.registry import PartialTables

__all__ = ["PartialTables", "castable_keys"]
