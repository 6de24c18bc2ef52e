"""The options of a table, completed and checked by its provider."""

from __future__ import annotations

import dataclasses

from pyspark_lookup.cache.memory import DefaultLookupCache
from pyspark_lookup.errors import OptionError
from pyspark_lookup.options.cache_options import FULL
from pyspark_lookup.options.enums import CacheMode, MetadataSource
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.providers.provider import ProvidedTable


def with_provider(options: LookupOptions, provided_table: ProvidedTable) -> LookupOptions:
    """The options, completed by the provider: a provider that brings a cache decides its kind. Raises OptionError if they contradict it."""
    explicit_cache = options.cache if "lookup.cache" in options.explicit else None
    brings = CacheMode.PARTIAL if provided_table.cache is not None else CacheMode.FULL if provided_table.scans else None
    if brings is not None and explicit_cache not in (None, brings):
        raise OptionError(
            f"option lookup.cache = {options.cache.value!r}: provider {provided_table.name} brings a cache of the kind {brings.value!r}"
        )
    cache = brings or options.cache
    if cache is CacheMode.FULL and not provided_table.scans:
        raise OptionError(
            f"option lookup.cache = 'FULL': provider {provided_table.name} has no scan function; return a FullCachingLookupProvider"
        )
    idle = [key for key in options.explicit if key == "lookup.async.capacity" and not provided_table.asynchronous]
    idle += [key for key in options.explicit if key.startswith("lookup.retry.") and provided_table.scans]
    if idle:
        kind = "is read as a whole" if provided_table.scans else "is synchronous: its calls come one after the other"
        raise OptionError(f"option {min(idle)} has no meaning: provider {provided_table.name} {kind}; remove it")
    if not options.keys:
        raise OptionError(
            f"option lookup.keys is missing: name the columns by which provider {provided_table.name} is asked, of {', '.join(provided_table.schema.names)}"
        )
    if cache is CacheMode.PARTIAL:
        _check_partial(options, provided_table)
    source = options.metadata_source
    if cache is CacheMode.FULL:
        _check_full(options, provided_table)
    elif source is MetadataSource.CACHE and options.sync_interval_s is None:
        raise OptionError("option lookup.metadata.source = 'CACHE' needs lookup.metadata.sync-interval")
    if cache is CacheMode.FULL and not provided_table.versioned:
        if "lookup.metadata.source" in options.explicit and source is MetadataSource.UFS:
            raise OptionError(
                f"option lookup.metadata.source = 'UFS': provider {provided_table.name} has no version() to ask at every query; set CACHE"
            )
        if provided_table.trigger is None and not options.reloads:
            raise OptionError(
                f"provider {provided_table.name} has neither a reload trigger nor a version(): set lookup.full-cache.reload-strategy"
            )
        source = MetadataSource.CACHE
    return dataclasses.replace(options, cache=cache, metadata_source=source)


def _check_full(options: LookupOptions, provided_table: ProvidedTable) -> None:
    prefixes = tuple(FULL + name for name in ("reload-strategy", "periodic-reload.", "timed-reload."))
    reload_options = [key for key in options.explicit if key.startswith(prefixes)]
    if provided_table.trigger is not None and reload_options:
        raise OptionError(
            f"option {min(reload_options)}: provider {provided_table.name} brings a reload trigger of its own"
        )
    if options.metadata_source is MetadataSource.CACHE and provided_table.trigger is None and not options.reloads:
        raise OptionError(
            f"Missing '{FULL}periodic-reload.interval': provider {provided_table.name} brings no reload trigger"
        )


def _check_partial(options: LookupOptions, provided_table: ProvidedTable) -> None:
    cache = provided_table.cache
    cache_options = [key for key in options.explicit if key.startswith("lookup.partial-cache.")]
    if cache is not None and cache_options:
        raise OptionError(f"option {min(cache_options)}: provider {provided_table.name} brings a cache of its own")
    expires = options.partial_expire_after_write_s is not None
    if isinstance(cache, DefaultLookupCache):
        expires = cache.config["expire_after_write_s"] is not None
    if not provided_table.versioned and not expires and (cache is None or isinstance(cache, DefaultLookupCache)):
        raise OptionError(
            f"provider {provided_table.name} has no version(), so nothing tells when a row has changed: set "
            "lookup.partial-cache.expire-after-write to how old an answer may be"
        )
    if cache is None and not options.bounded:
        raise OptionError(
            "option lookup.cache = 'PARTIAL' without any bound would grow for ever: set lookup.partial-cache.max-rows"
        )
