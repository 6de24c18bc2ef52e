"""Tables of other systems: a provider made from the options, and its calls bounded, tried again and checked."""

from pyspark_lookup.providers.effective_options import with_provider
from pyspark_lookup.providers.provider import ProvidedTable
from pyspark_lookup.providers.scan import ProvidedScan
from pyspark_lookup.providers.source import ProviderSource
from pyspark_lookup.providers.store import ProvidedStore

__all__ = ["ProvidedScan", "ProvidedStore", "ProvidedTable", "ProviderSource", "with_provider"]
