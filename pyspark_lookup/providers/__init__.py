"""Tables of other systems: a provider made from the options, and its calls bounded, tried again and checked."""

from pyspark_lookup.providers.as_files import ProvidedScan, ProvidedStore, ProviderSource
from pyspark_lookup.providers.effective_options import with_provider
from pyspark_lookup.providers.provider import ProvidedTable

__all__ = ["ProvidedScan", "ProvidedStore", "ProvidedTable", "ProviderSource", "with_provider"]
