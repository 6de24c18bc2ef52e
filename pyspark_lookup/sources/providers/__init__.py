"""Tables of other systems: makes a provider from the options, limits the time of its calls, repeats failed ones and checks their rows."""

from pyspark_lookup.sources.providers.as_files import ProvidedScan, ProvidedStore, ProviderSource
from pyspark_lookup.sources.providers.effective_options import with_provider
from pyspark_lookup.sources.providers.provider import ProvidedTable

__all__ = ["ProvidedScan", "ProvidedStore", "ProvidedTable", "ProviderSource", "with_provider"]
