"""Tables of other systems: a provider made from the options, and its calls bounded, tried again and checked."""

from pyspark_lookup.provided.scan import ProvidedScan
from pyspark_lookup.provided.store import ProvidedStore
from pyspark_lookup.provided.table import ProvidedTable, with_provider

__all__ = ["ProvidedScan", "ProvidedStore", "ProvidedTable", "with_provider"]
