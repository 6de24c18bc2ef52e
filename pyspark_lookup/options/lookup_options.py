"""Every `lookup.*` key: its type, default and one-line meaning. This module alone turns the texts of options into values.

`LookupOptions.parse` takes the layers in order of precedence and returns one frozen value:
read option > table option > `spark.lookupcache.*` > conf file > default.
An unknown key, a value that does not parse and a combination that contradicts itself raise an `OptionError`, which names the key, the value
and the nearest valid choice.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from pyspark_lookup.core.credentials import names_bucket_with_credentials
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.errors import OptionError
from pyspark_lookup.options.conf_file import STORAGE, redact, storage_value, tells_secret
from pyspark_lookup.options.enums import CacheMode, MetadataSource
from pyspark_lookup.options.groups import (
    FULL,
    PARTIAL,
    CacheOptions,
    CsvOptions,
    FileOptions,
    FullCacheOptions,
    PartialCacheOptions,
    Pin,
    ReadOptions,
    StorageOptions,
    VersionOptions,
)
from pyspark_lookup.options.parsing import check_argument

SPARK_CONF_PREFIX = "spark.lookupcache."

# Options of a host, which do not change the meaning of a query: a session may override them (spark.lookupcache.*) after the plan
# was made.
HOST_KEYS = frozenset({"lookup.cache.dir", "lookup.cache.max-bytes", "lookup.max-retries"})

K = TypeVar("K", bound="KindOptions")


class KindOptions:
    """The options of one kind of table, which the kind's own package declares: a subclass is a frozen dataclass of `option` fields.

    `system_keys`: options that name a table of another system instead of a path. `catalog_keys`: options with which the path is a name that
    a catalog knows. `suggestions`: options of other projects, without punctuation, and the option that means the same here.
    """

    system_keys: ClassVar[frozenset[str]] = frozenset()
    catalog_keys: ClassVar[frozenset[str]] = frozenset()
    suggestions: ClassVar[Mapping[str, str]] = {}

    @property
    def system(self) -> str | None:
        """The option that names another system as the place of the table; None if the table consists of files."""
        return None

    @property
    def place(self) -> str:
        """The table's name in the other system, for errors; empty for a table of files."""
        return ""

    @property
    def identity(self) -> tuple[Any, ...]:
        """The values of options that distinguish the table from others with the same path."""
        return ()

    @property
    def pins(self) -> Mapping[str, Pin]:
        """The options that name a version to read, by key."""
        return {}

    @property
    def implied(self) -> Mapping[str, Any]:
        """Values, by key, that these options imply for other options, unless those are set."""
        return {}

    def check(self, options: LookupOptions) -> None:
        """Raise OptionError if these options contradict each other or the rest of a reference's options."""


@dataclasses.dataclass(frozen=True)
class LookupOptions:
    """The options of one table reference, typed and checked, a group for each concern. Durations in seconds, sizes in bytes.

    `kinds`: the groups of the kinds of tables, see `kind`. `explicit`: the keys that the read or the table has set.
    """

    files: FileOptions = FileOptions()
    csv: CsvOptions = CsvOptions()
    read: ReadOptions = ReadOptions()
    version: VersionOptions = VersionOptions()
    cache: CacheOptions = CacheOptions()
    storage: StorageOptions = StorageOptions()
    partial_cache: PartialCacheOptions = PartialCacheOptions()
    full_cache: FullCacheOptions = FullCacheOptions()
    kinds: tuple[KindOptions, ...] = ()
    explicit: frozenset[str] = dataclasses.field(default=frozenset(), repr=False, compare=False)

    @classmethod
    def parse(
        cls,
        read: Mapping[str, str],
        table: Mapping[str, str] | None = None,
        conf: Mapping[str, str] | None = None,
        origin: str = "read option",
        kinds: Sequence[type[KindOptions]] = (),
    ) -> LookupOptions:
        """The options of a read: those in `read`, else those stored with the table (`table`), else those of the conf file (`conf`).

        `origin`: what errors call an option in `read`.

        Raises OptionError for an unknown key, a bad value, a contradiction, a credential outside the conf file, or a missing path.
        """
        check_argument("options", read, Mapping, "a dictionary, such as {'path': 's3://bucket/dim'}")
        for key in read:
            check_argument("options", key, str, "names of options, such as 'lookup.keys'")
        read = {key: os.fspath(text) if isinstance(text, os.PathLike) else text for key, text in read.items()}
        layers = [(conf or {}, "conf file"), (table or {}, "table option"), (read, origin)]
        kinds = tuple(kinds)
        fields = _fields(kinds)
        wildcards = _wildcards(kinds)
        values: dict[str, Any] = {}
        entries: dict[str, dict[str, Any]] = {prefix: {} for prefix in wildcards}
        explicit: set[str] = set()
        everything = {key.lower(): text for layer, _ in layers for key, text in layer.items()}
        in_catalog = any(kind.catalog_keys & everything.keys() for kind in kinds)
        local = not in_catalog and is_local(everything.get("path", ""))
        for layer, layer_name in layers:
            for key in _retract(layer):
                values.pop(key, None)
                explicit.discard(key)
            for raw_key, text in layer.items():
                key = raw_key.lower()
                prefix = next((prefix for prefix in wildcards if key.startswith(prefix) and key != prefix), None)
                _refuse_secret(key, text, "" if prefix is None else fields[f"{prefix}*"].secrets, layer is conf)
                if prefix == STORAGE and key.removeprefix(STORAGE).isidentifier():
                    # A conf file's credentials stay on their host: see `conf_file_secrets`. Its other storage options are for
                    # remote tables; local ones take none.
                    if not tells_secret(key, text) and not (layer is conf and local):
                        entries[prefix][key.removeprefix(prefix)] = storage_value(text)
                    continue
                if prefix is not None and prefix != STORAGE:
                    entries[prefix][key.removeprefix(prefix)] = str(text)
                    continue
                # A conf file may have credentials, even under a misspelled key.
                field = _get_field(fields, kinds, key, "…" if layer is conf else text)
                values[key] = field.parse(text, f"option {key}", f" ({layer_name})")
                if layer is not conf:
                    explicit.add(key)
        values |= {f"{prefix}*": tuple(sorted(named.items())) for prefix, named in entries.items() if named}
        options = cls(kinds=_defaults(kinds), explicit=frozenset(explicit)).with_values(values)
        for kind in options.kinds:
            options = options.with_values({key: value for key, value in kind.implied.items() if key not in values})
        options._check()
        return options

    def _check(self) -> None:
        """Raise OptionError for a combination that contradicts itself."""
        for kind in self.kinds:
            kind.check(self)
        if not self.files.path and self.system is None:
            raise OptionError(
                "option path is missing: give the table's file, directory or glob, e.g. load('s3://bucket/dim')"
            )
        mode, is_of_files = self.cache.mode, self.system is None
        self.partial_cache.check(self.explicit, mode, needs_bound=is_of_files)
        cached = self.version.source is MetadataSource.CACHE
        # Another system may bring a trigger of its own.
        self.full_cache.check(self.explicit, mode, cached, needs_trigger=is_of_files)
        if len(self.pins) > 1:
            raise OptionError(f"options {' and '.join(self.pins)} each name a version to read: give one of them")
        self.version.check(caches_version=mode is not CacheMode.FULL and is_of_files)
        self.read.check(self.explicit)

    def kind(self, group: type[K]) -> K:
        """The options of one kind of table; their defaults if `parse` was called without this group."""
        return next((kind for kind in self.kinds if isinstance(kind, group)), None) or group()

    @property
    def system(self) -> str | None:
        """The option that names another system as the place of the table; None if the table consists of files."""
        return next((kind.system for kind in self.kinds if kind.system is not None), None)

    @property
    def place(self) -> str:
        """The table's path or name, without secrets, for errors and plans."""
        if self.files.path:
            return redact("path", self.files.path)
        return next((kind.place for kind in self.kinds if kind.system is not None), "")

    @cached_property
    def pins(self) -> dict[str, Pin]:
        """The options that name the version to read, by key; at most one, once they are checked."""
        return self.version.pins | {key: pin for kind in self.kinds for key, pin in kind.pins.items()}

    @cached_property
    def pinned(self) -> Pin | None:
        """The version that an option names to be read; None: the current version is read."""
        return next(iter(self.pins.values()), None)

    @property
    def unpinned(self) -> LookupOptions:
        """The options without the ones that name a version."""
        return self.with_values(dict.fromkeys(self.pins))

    def with_values(self, values: Mapping[str, Any]) -> LookupOptions:
        """These options with some values replaced. `values`: by key, already parsed."""
        if not values:
            return self
        fields = _fields(tuple(map(type, self.kinds)))
        changes: dict[type, dict[str, Any]] = collections.defaultdict(dict)
        for key, value in values.items():
            changes[fields[key].group][fields[key].name] = value
        groups: dict[str, Any] = {
            name: dataclasses.replace(getattr(self, name), **changes[group])
            for name, group in _GROUPS.items()
            if group in changes
        }
        kinds = tuple(
            dataclasses.replace(kind, **changes[type(kind)]) if type(kind) in changes else kind  # type: ignore[type-var]
            for kind in self.kinds
        )
        return dataclasses.replace(self, **groups, kinds=kinds)

    def override(self, overrides: Mapping[str, str]) -> LookupOptions:
        """These options, with `overrides` (key -> text) instead of their own values. Raises OptionError for an unknown key or a bad value."""
        return self.with_values(
            {key: self._get_field(key, text).parse(text, f"option {key}") for key, text in overrides.items()}
        )

    def on_host(self, overrides: Mapping[str, str]) -> LookupOptions:
        """These options, with the values of a session (key -> text) for options of the host that neither the read nor the table has set.

        Raises OptionError for a key that is not in `HOST_KEYS`, or for a bad value.
        """
        values: dict[str, Any] = {}
        for key, text in overrides.items():
            field = self._get_field(key, text)
            name = f"conf {SPARK_CONF_PREFIX}{key.removeprefix('lookup.')}"
            if key not in HOST_KEYS:
                raise OptionError(
                    f"{name}: only {', '.join(sorted(HOST_KEYS))} can be set for a session; give {key} as an option of the read or table"
                )
            if key not in self.explicit:
                values[key] = field.parse(text, name)
        return self.with_values(values)

    def _get_field(self, key: str, text: object) -> _Field:
        kinds = tuple(map(type, self.kinds))
        return _get_field(_fields(kinds), kinds, key, text)

    def __repr__(self) -> str:
        groups = {type(group): group for group in (*(getattr(self, name) for name in _GROUPS), *self.kinds)}
        shown: dict[str, str] = {}
        for key, field in _fields(tuple(map(type, self.kinds))).items():
            value = getattr(groups[field.group], field.name)
            if key.endswith("*"):
                prefix = key.removesuffix("*")
                shown |= {prefix + name: redact(prefix + name, text) for name, text in value}
            elif value != field.default:
                shown[key] = redact(key, value) if isinstance(value, str) else value
        return f"LookupOptions({', '.join(f'{key}={value!r}' for key, value in shown.items())})"


_GROUPS: dict[str, type] = {
    field.name: type(field.default)
    for field in dataclasses.fields(LookupOptions)
    if dataclasses.is_dataclass(field.default)
}


class _Field(NamedTuple):
    """An option: the group that declares it, and the arguments of its `option` call."""

    group: type
    name: str
    default: Any
    metadata: Mapping[str, Any]

    @property
    def secrets(self) -> str:
        return str(self.metadata["secrets"])

    def parse(self, text: object, name: str, origin: str = "") -> Any:
        """The value of an option's text. Raises OptionError. `name`, `origin`: the option, and where the text comes from, for the error."""
        try:
            return self.metadata["parse"](str(text))
        except ValueError as problem:
            redacted = redact(self.metadata["key"], text)
            raise OptionError(f"{name} = {redacted!r}{origin}: expected {problem}") from None


@functools.cache
def _fields(kinds: tuple[type[KindOptions], ...]) -> dict[str, _Field]:
    """The options of all groups, by key."""
    groups: tuple[Any, ...] = (*_GROUPS.values(), *kinds)
    return {
        field.metadata["key"]: _Field(group, field.name, field.default, field.metadata)
        for group in groups
        for field in dataclasses.fields(group)
    }


@functools.cache
def _wildcards(kinds: tuple[type[KindOptions], ...]) -> tuple[str, ...]:
    """The prefixes of options whose names users complete, such as `lookup.storage.`."""
    return tuple(key.removesuffix("*") for key in _fields(kinds) if key.endswith("*"))


@functools.cache
def _defaults(kinds: tuple[type[KindOptions], ...]) -> tuple[KindOptions, ...]:
    return tuple(kind() for kind in kinds)


def _refuse_secret(key: str, text: object, advice: str, in_conf_file: bool) -> None:
    """Raise OptionError for a credential that an option must not have. `advice`: where to put a credential that the option never takes."""
    if key == "path" and names_bucket_with_credentials(str(text)):
        raise OptionError(
            f"option path = {redact(key, text)!r} holds a credential before the bucket's name, which no store takes there: "
            "leave it out, and set it in the environment or in the conf file ($LOOKUPCACHE_CONF), or use the store's own credential chain (e.g. an instance role)"
        )
    if not (advice or key.startswith(STORAGE)) or not tells_secret(key, text):
        return
    if advice:
        raise OptionError(f"option {key} looks like a credential and would be stored in plans and catalogs: {advice}")
    if key.startswith(STORAGE) and not in_conf_file:
        raise OptionError(
            f"option {key} looks like a credential and would be stored in plans and catalogs: "
            "leave it out, and set it in the environment or in the conf file ($LOOKUPCACHE_CONF), or use the store's own credential chain (e.g. an instance role)"
        )


def _get_field(fields: Mapping[str, _Field], kinds: Sequence[type[KindOptions]], key: str, text: object) -> _Field:
    field = fields.get(key)
    if key.startswith(STORAGE):
        raise OptionError(
            f"unknown option {key} = {redact(key, text)!r}: {STORAGE}… takes the name of one parameter of the fsspec "
            f"filesystem, and JSON for a nested one, e.g. {STORAGE}client_kwargs = '{{\"verify\": false}}'"
        )
    if field is None:
        candidates = _suggest_options(fields, kinds, key)
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
    "lookupcachecachingmissingkey": "lookup.partial-cache.cache-missing-key",
    "ttl": "lookup.partial-cache.expire-after-write", "maxretries": "lookup.max-retries",
}  # fmt: skip


def _suggest_options(fields: Mapping[str, _Field], kinds: Sequence[type[KindOptions]], key: str) -> list[str]:
    """The options that an unknown key may mean: the counterpart of another project's option, or options that end alike or are spelled similarly."""
    plain = re.sub(r"[^a-z0-9]", "", key)
    names_by_plain = {re.sub(r"[^a-z0-9]", "", name): name for name in fields if not name.endswith("*")}
    if (match := names_by_plain.get(plain) or names_by_plain.get("lookup" + plain)) is not None:
        return [match]
    peers = collections.ChainMap(_OF_PEERS, *(dict(kind.suggestions) for kind in kinds))
    if (peer := peers.get(plain) or peers.get(plain.removeprefix("lookup"))) is not None:
        return [peer]
    ends = re.sub(r"[^a-z0-9]", "", key.removeprefix("lookup."))
    ending_alike = [name for folded, name in names_by_plain.items() if len(ends) > 2 and folded.endswith(ends)]
    if 0 < len(ending_alike) <= 3:
        return ending_alike
    # Without the prefix of all names, which would make any two of them similar.
    names_by_rest = {name.removeprefix("lookup."): name for name in fields}
    close_names = difflib.get_close_matches(key.removeprefix("lookup."), names_by_rest, 1, 0.66)
    return [names_by_rest[name] for name in close_names] or ending_alike[:3]


def is_local(path: str) -> bool:
    """Whether a path or URL names a file of this machine."""
    return "://" not in path or path.lower().startswith(("file:", "local:"))


def _retract(layer: Mapping[str, str]) -> set[str]:
    """The options that have no meaning with those of this layer, so that values from layers of lower precedence are dropped.

    For instance, with `lookup.metadata.source` = UFS there is no `lookup.metadata.sync-interval`.
    """
    values = {key.lower(): str(text).strip().upper() for key, text in layer.items()}
    cache, source = values.get("lookup.cache"), values.get("lookup.metadata.source")
    meaningless: set[str] = set()
    fields = _fields(())
    if cache in ("NONE", "PARTIAL"):
        meaningless |= {key for key in fields if key.startswith(FULL)}
    if cache in ("NONE", "FULL"):
        meaningless |= {key for key in fields if key.startswith(PARTIAL)}
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


def options_table(kinds: Sequence[type[KindOptions]]) -> str:
    """The options as a Markdown table, for docs/options.md."""
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for key, field in _fields(tuple(kinds)).items():
        meta = field.metadata
        rows.append(f"| `{key}` | {meta['kind']} | {meta['default_text'] or '–'} | {meta['doc']} |")
    return "\n".join(rows)
