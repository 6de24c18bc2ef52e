"""Every `lookup.*` key: its type, default and one-line meaning. The only place strings become values.

`LookupOptions.parse` takes the layers in order of precedence and returns one frozen value:
read option > table option > `spark.lookupcache.*` > conf file > default.
A key no layer may hold, a value that does not parse and a combination that contradicts itself are
`OptionError`s that name the key, the value and the nearest valid choice.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from typing import Any

from pyspark_lookup.core.credentials import names_bucket_with_credentials
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.errors import OptionError
from pyspark_lookup.options.cache_options import (
    FULL,
    PARTIAL,
    FullCacheOptions,
    PartialCacheOptions,
    check_full_cache,
    check_partial_cache,
)
from pyspark_lookup.options.conf_file import STORAGE, redact, storage_value, tells_secret
from pyspark_lookup.options.enums import CacheMode, MetadataSource, View
from pyspark_lookup.options.file_options import FileOptions
from pyspark_lookup.options.host_options import HostOptions
from pyspark_lookup.options.iceberg_options import CATALOG, IcebergOptions, check_catalog
from pyspark_lookup.options.parsing import check_argument
from pyspark_lookup.options.provider_options import PROVIDER, ProviderOptions, check_provider
from pyspark_lookup.options.read_write_options import Pin, ReadOptions, WriteOptions

SPARK_CONF_PREFIX = "spark.lookupcache."

# Options of a host, not of what a query means: a session may override these (spark.lookupcache.*) after the plan was made.
HOST_KEYS = frozenset({"lookup.cache.dir", "lookup.cache.max-bytes", "lookup.max-retries"})


@dataclasses.dataclass(frozen=True)
class LookupOptions(
    # The last one's fields come first.
    WriteOptions,
    ProviderOptions,
    FullCacheOptions,
    PartialCacheOptions,
    HostOptions,
    ReadOptions,
    IcebergOptions,
    FileOptions,
):
    """The options of one table reference, typed and checked. Durations in seconds, sizes in bytes."""

    explicit: frozenset[str] = dataclasses.field(default=frozenset(), repr=False, compare=False)

    @classmethod
    def parse(
        cls,
        read: Mapping[str, str],
        table: Mapping[str, str] | None = None,
        conf: Mapping[str, str] | None = None,
        origin: str = "read option",
    ) -> LookupOptions:
        """The options of a read of `table` (its stored options) under `conf` (a conf file's). `origin`: what errors call `read`.

        Raises OptionError for an unknown key, a bad value, a contradiction, a credential outside
        the conf file, or a missing path.
        """
        check_argument("options", read, Mapping, "a dictionary, such as {'path': 's3://bucket/dim'}")
        for key in read:
            check_argument("options", key, str, "names of options, such as 'lookup.keys'")
        read = {key: os.fspath(text) if isinstance(text, os.PathLike) else text for key, text in read.items()}
        layers = [(conf or {}, "conf file"), (table or {}, "table option"), (read, origin)]
        values: dict[str, Any] = {}
        storage: dict[str, Any] = {}
        named: dict[str, dict[str, str]] = {PROVIDER: {}, CATALOG: {}}
        explicit: set[str] = set()
        everything = {key.lower(): text for layer, _ in layers for key, text in layer.items()}
        local = "lookup.catalog" not in everything and is_local(everything.get("path", ""))
        for layer, layer_name in layers:
            for key in _retract(layer):
                values.pop(_FIELDS[key].name, None)
                explicit.discard(key)
            for raw_key, text in layer.items():
                key = raw_key.lower()
                _refuse_secret(key, text, allowed=layer is conf)
                if key.startswith(STORAGE) and key.removeprefix(STORAGE).isidentifier():
                    # A conf file's credentials stay on their host: see `conf_file_secrets`. Its other
                    # storage options are for remote tables; local ones take none.
                    if not tells_secret(key, text) and not (layer is conf and local):
                        storage[key.removeprefix(STORAGE)] = storage_value(text)
                    continue
                prefix = next((prefix for prefix in named if key.startswith(prefix) and key != prefix), None)
                if prefix is not None:
                    named[prefix][key.removeprefix(prefix)] = str(text)
                    continue
                # A conf file may hold credentials, also under a key that is misspelled.
                field = _get_field(key, "…" if layer is conf else text)
                values[field.name] = _parse(field, text, f"option {key}", f" ({layer_name})")
                if layer is not conf:
                    explicit.add(key)
        if values.get("changes_from") is not None:
            values.setdefault("view", View.CHANGES)
        values["storage"] = tuple(sorted(storage.items()))
        values["provider_options"] = tuple(sorted(named[PROVIDER].items()))
        values["catalog_properties"] = tuple(sorted(named[CATALOG].items()))
        options = cls(**values, explicit=frozenset(explicit))
        options._check()
        return options

    def _check(self) -> None:
        """Raise OptionError for a combination that contradicts itself."""
        check_provider(self)
        check_catalog(self)
        if not self.path and self.provider is None:
            raise OptionError(
                "option path is missing: give the table's file, directory or glob, e.g. load('s3://bucket/dim')"
            )
        if self.create_if_not_exists:
            raise OptionError("option lookup.create-if-not-exists is for CREATE TABLE … USING lookupcache: remove it")
        check_partial_cache(self)
        check_full_cache(self)
        if len(self.pins) > 1:
            raise OptionError(f"options {' and '.join(self.pins)} each name a version to read: give one of them")
        self._check_changes()
        cached = self.metadata_source is MetadataSource.CACHE
        if cached and self.sync_interval_s is None and self.cache is not CacheMode.FULL and self.provider is None:
            raise OptionError(
                "option lookup.metadata.source = 'CACHE' needs lookup.metadata.sync-interval: a duration such as '5 min', "
                "0 (ask the store at every query) or -1 (never ask again)"
            )
        if not cached and self.sync_interval_s is not None:
            raise OptionError(
                "option lookup.metadata.sync-interval contradicts lookup.metadata.source = 'UFS', which asks the store at "
                "every query: remove it, or set lookup.metadata.source = 'CACHE'"
            )
        validity_options = {"lookup.valid-to", "lookup.overlap"} & self.explicit
        if validity_options and (
            self.valid_from is None or (self.valid_to is None and "lookup.overlap" in validity_options)
        ):
            raise OptionError(
                f"option {min(validity_options)} has no meaning without lookup.valid-from and lookup.valid-to"
            )
        if sum(limit is not None for limit in self.stream_limits) > 1:
            raise OptionError(
                "options lookup.stream.max-rows-per-trigger, lookup.stream.max-files-per-trigger and "
                "lookup.stream.max-bytes-per-trigger all limit a micro-batch: give one"
            )
        if self.view not in (View.DATA, View.TOKEN, View.CHANGES) and (self.where or self.columns):
            raise OptionError(
                f"option lookup.view = {self.view.value!r} has columns of its own: "
                "filter it in Spark instead of by lookup.where or lookup.columns"
            )

    def _check_changes(self) -> None:
        if self.changes_from is None:
            if self.changes_to is not None:
                raise OptionError(
                    f"option lookup.changes-to = {self.changes_to} needs lookup.changes-from, where changes begin"
                )
            return
        if self.view is not View.CHANGES:
            raise OptionError(
                f"option lookup.changes-from = {self.changes_from} reads changes, and lookup.view = {self.view.value!r} something "
                "else: leave one of them out"
            )
        if self.pins:
            raise OptionError(
                f"options {next(iter(self.pins))} and lookup.changes-from contradict each other: give one"
            )
        if self.changes_to is not None and self.changes_to < self.changes_from:
            raise OptionError(
                f"option lookup.changes-to = {self.changes_to} is before lookup.changes-from = {self.changes_from}: both are included"
            )

    @cached_property
    def pins(self) -> dict[str, Pin]:
        """The options that say which version is read, by name; one at most, once they are checked."""
        return {**self.version_pins, **self.ref}

    @cached_property
    def pinned(self) -> Pin | None:
        """Which version of a table is read, if not the current one."""
        return next(iter(self.pins.values()), None)

    @property
    def unpinned(self) -> LookupOptions:
        """The options of the table as it is now."""
        pins = dict.fromkeys(("version", "timestamp", "valid_write_ids", "branch", "tag"))
        return dataclasses.replace(self, **pins) if self.pins else self  # type: ignore[arg-type]

    @property
    def names_directory(self) -> bool:
        """Whether the path itself says that it is a directory; a web URL's last slash says nothing."""
        return self.path.endswith("/") and not self.path.startswith(("http://", "https://"))

    def override(self, overrides: Mapping[str, str]) -> LookupOptions:
        """These options with `overrides` (key -> text) in place of their own values. Raises OptionError."""
        values = {}
        for key, text in overrides.items():
            field = _get_field(key, text)
            values[field.name] = _parse(field, text, f"option {key}")
        return dataclasses.replace(self, **values)

    def on_host(self, overrides: Mapping[str, str]) -> LookupOptions:
        """These options with `overrides` (key -> text) applied to host options nobody set explicitly.

        Only keys of `HOST_KEYS` have an effect; others are an OptionError.
        """
        values: dict[str, Any] = {}
        for key, text in overrides.items():
            field = _get_field(key, text)
            name = f"conf {SPARK_CONF_PREFIX}{key.removeprefix('lookup.')}"
            if key not in HOST_KEYS:
                raise OptionError(
                    f"{name}: only {', '.join(sorted(HOST_KEYS))} can be set for a session; give {key} as an option of the read or table"
                )
            if key not in self.explicit:
                values[field.name] = _parse(field, text, name)
        return dataclasses.replace(self, **values)

    def __repr__(self) -> str:
        set_here = {
            field.metadata["key"]: getattr(self, field.name)
            for field in _FIELDS.values()
            if field.name not in ("storage", "provider_options", "catalog_properties")
            and getattr(self, field.name) != field.default
        }
        redacted = {key: redact(key, value) if isinstance(value, str) else value for key, value in set_here.items()}
        redacted |= {STORAGE + key: redact(key, value) for key, value in self.storage}
        redacted |= {PROVIDER + key: redact(key, value) for key, value in self.provider_options}
        redacted |= {CATALOG + key: redact(key, value) for key, value in self.catalog_properties}
        return f"LookupOptions({', '.join(f'{key}={value!r}' for key, value in redacted.items())})"


_FIELDS: dict[str, dataclasses.Field[Any]] = {
    field.metadata["key"]: field for field in dataclasses.fields(LookupOptions) if field.metadata
}


def _parse(field: dataclasses.Field[Any], text: object, name: str, origin: str = "") -> Any:
    try:
        return field.metadata["parse"](str(text))
    except ValueError as problem:
        redacted = redact(field.metadata["key"], text)
        raise OptionError(f"{name} = {redacted!r}{origin}: expected {problem}") from None


def _refuse_secret(key: str, text: object, allowed: bool) -> None:
    if key == "path" and names_bucket_with_credentials(str(text)):
        raise OptionError(
            f"option path = {redact(key, text)!r} holds a credential before the bucket's name, which no store takes there: take it "
            "from the environment, from the store's own chain (e.g. an instance role), or from the conf file ($LOOKUPCACHE_CONF)"
        )
    if key.startswith(PROVIDER) and tells_secret(key, text):
        raise OptionError(
            f"option {key} looks like a credential and would be stored in plans and catalogs: let the provider take it from "
            "the environment or from a file of its own"
        )
    if key.startswith(CATALOG) and tells_secret(key, text):
        raise OptionError(
            f"option {key} looks like a credential and would be stored in plans and catalogs: give it to PyIceberg, in "
            ".pyiceberg.yaml or in the environment of each machine that reads"
        )
    if not allowed and key.startswith(STORAGE) and tells_secret(key, text):
        raise OptionError(
            f"option {key} looks like a credential and would be stored in plans and catalogs: take it from the "
            "environment, from the store's own chain (e.g. an instance role), or from the conf file ($LOOKUPCACHE_CONF)"
        )


def _get_field(key: str, text: object) -> dataclasses.Field[Any]:
    field = _FIELDS.get(key)
    if key.startswith(STORAGE):
        raise OptionError(
            f"unknown option {key} = {redact(key, text)!r}: {STORAGE}… takes the name of one parameter of the fsspec "
            f"filesystem, and JSON for a nested one, e.g. {STORAGE}client_kwargs = '{{\"verify\": false}}'"
        )
    if field is None:
        candidates = _suggest_options(key)
        hint = f"did you mean {' or '.join(candidates)}?" if candidates else "docs/options.md lists the options"
        raise OptionError(f"unknown option {key} = {redact(key, text)!r}: {hint}")
    return field


_OF_PEERS = {
    # Delta
    "versionasof": "lookup.version", "timestampasof": "lookup.timestamp", "startingversion": "lookup.stream.start",
    "startingtimestamp": "lookup.stream.start", "mergeschema": "lookup.write.merge-schema", "readchangefeed": "lookup.view",
    "readchangedata": "lookup.view", "maxfilespertrigger": "lookup.stream.max-files-per-trigger",
    "maxbytespertrigger": "lookup.stream.max-bytes-per-trigger", "maxrowspertrigger": "lookup.stream.max-rows-per-trigger",
    "txnversion": "lookup.write.batch", "replacewhere": "lookup.write.mode",
    # Iceberg
    "snapshotid": "lookup.version", "asoftimestamp": "lookup.timestamp", "splitsize": "lookup.scan.split-size",
    "streamfromtimestamp": "lookup.stream.start", "writeformat": "lookup.format",
    # Spark
    "delimiter": "lookup.csv.sep", "separator": "lookup.csv.sep", "charset": "lookup.csv.encoding", "nullvalue": "lookup.csv.null-value",
    "inferschema": "lookup.csv.infer-schema", "basepath": "path", "pathglobfilter": "path", "recursivefilelookup": "path",
    "location": "path", "mode": "lookup.write.mode", "condition": "lookup.where", "filter": "lookup.where", "predicate": "lookup.where",
    "key": "lookup.keys", "primarykey": "lookup.keys", "primarykeys": "lookup.keys", "upsertkeys": "lookup.keys", "recordkeyfield": "lookup.keys",
    # FLIP-221, and what Flink's connectors called it before
    "cachemaxrows": "lookup.partial-cache.max-rows", "cachettl": "lookup.partial-cache.expire-after-write",
    "lookupcachemaxrows": "lookup.partial-cache.max-rows", "lookupcachettl": "lookup.partial-cache.expire-after-write",
    "lookupcachecachingmissingkey": "lookup.partial-cache.cache-missing-key", "lookupasync": "lookup.provider",
    "ttl": "lookup.partial-cache.expire-after-write", "maxretries": "lookup.max-retries",
}  # fmt: skip


def _suggest_options(key: str) -> list[str]:
    """The options that an unknown key may mean: those that end with it, its counterpart from other projects, or those spelled similarly."""
    plain = re.sub(r"[^a-z0-9]", "", key)
    names_by_plain = {re.sub(r"[^a-z0-9]", "", name): name for name in _FIELDS if not name.endswith("*")}
    if (match := names_by_plain.get(plain) or names_by_plain.get("lookup" + plain)) is not None:
        return [match]
    if (peer := _OF_PEERS.get(plain) or _OF_PEERS.get(plain.removeprefix("lookup"))) is not None:
        return [peer]
    ends = re.sub(r"[^a-z0-9]", "", key.removeprefix("lookup."))
    ending_alike = [name for folded, name in names_by_plain.items() if len(ends) > 2 and folded.endswith(ends)]
    if 0 < len(ending_alike) <= 3:
        return ending_alike
    close_names = difflib.get_close_matches(key, _FIELDS, 1, 0.6) or difflib.get_close_matches(
        f"lookup.{key}", _FIELDS, 1, 0.75
    )
    return close_names or ending_alike[:3]


def is_local(path: str) -> bool:
    """Whether a path or URL names a file of this machine."""
    return "://" not in path or path.lower().startswith(("file:", "local:"))


def _retract(layer: Mapping[str, str]) -> set[str]:
    """Options of lower layers that this layer's choices make meaningless, such as an interval by UFS."""
    values = {key.lower(): str(text).strip().upper() for key, text in layer.items()}
    cache, source = values.get("lookup.cache"), values.get("lookup.metadata.source")
    meaningless: set[str] = set()
    if cache in ("NONE", "PARTIAL"):
        meaningless |= {key for key in _FIELDS if key.startswith(FULL)}
    if cache in ("NONE", "FULL"):
        meaningless |= {key for key in _FIELDS if key.startswith(PARTIAL)}
    if cache == "FULL":
        meaningless.add("lookup.metadata.sync-interval")
    if source == "UFS":
        meaningless |= {"lookup.metadata.sync-interval", FULL + "on-reload-failure", FULL + "max-staleness"}
    return meaningless - values.keys()


def merge_options(table: Mapping[str, str], read: Mapping[str, str]) -> dict[str, str]:
    """The options of a table, overridden by those of a read. Options of the table that the read makes meaningless are dropped."""
    overridden = _retract(read) | {key.lower() for key in read}
    table_options = {key.lower(): text for key, text in table.items() if key.lower() not in overridden}
    return {**table_options, **{key.lower(): text for key, text in read.items()}}


def options_table() -> str:
    """The options as a Markdown table, for docs/options.md."""
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for key, field in _FIELDS.items():
        meta = field.metadata
        rows.append(f"| `{key}` | {meta['kind']} | {meta['default_text'] or '–'} | {meta['doc']} |")
    return "\n".join(rows)
