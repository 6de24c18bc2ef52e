"""`LookupOptions`: the typed and checked options of one read of a table, merged from all places where options may be set.

The places are, in this order of precedence: the read, the table in the catalog, the session (`spark.lookupcache.*`), the conf file, and the
defaults. An unknown key, a value that does not parse and options that contradict each other raise an `OptionError`, which names the key, the
value and the nearest valid choice.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Collection, Mapping, Sequence
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

# These options say how a host works, and do not change what a query returns. So a session may set them (spark.lookupcache.*) even after a
# query was planned.
HOST_KEYS = frozenset({"lookup.cache.dir", "lookup.cache.max-bytes", "lookup.max-retries"})

K = TypeVar("K", bound="KindOptions")


class KindOptions:
    """The options of one kind of table. The package of that kind declares a subclass: a frozen dataclass of `option` fields.

    `system_keys`: options which say that the table is in another system; a `path` is then no path of files. `catalog_keys`: options with which the
    path is the table's name in a catalog. `suggestions`: names of options in other projects, without punctuation, and for each the option here that
    means the same.
    `retry_delay`: the option that says how often keys without rows are looked up again while facts wait for them; None: there is none.

    `check` is called if an option of the group is set, or one of `checked_with`, or if the path is a URL with one of the `schemes`.
    """

    system_keys: ClassVar[frozenset[str]] = frozenset()
    catalog_keys: ClassVar[frozenset[str]] = frozenset()
    suggestions: ClassVar[Mapping[str, str]] = {}
    retry_delay: ClassVar[str | None] = None
    checked_with: ClassVar[frozenset[str]] = frozenset()
    schemes: ClassVar[frozenset[str]] = frozenset()

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
        """The values of the options that distinguish the table from other tables with the same path."""
        return ()

    @property
    def pins(self) -> Mapping[str, Pin]:
        """The values of the options that name a version to read, by key."""
        return {}

    @property
    def implied(self) -> Mapping[str, Any]:
        """Values that these options imply for options of other groups, by key. An option that is set keeps its value."""
        return {}

    def check(self, options: LookupOptions) -> None:
        """Raise OptionError if these options contradict each other, or one of the `options` of the same read."""

    def check_waiting(self, shows_changes: bool, retry_s: float | None) -> None:
        """Raise OptionError if a lookup with these options cannot let facts wait for their rows.

        `shows_changes`: see `VersionSource`. `retry_s`: the seconds that `retry_delay` states; None: it is not set.
        """


@dataclasses.dataclass(frozen=True)
class LookupOptions:
    """The options of one read of a table, typed and checked, in groups. Durations are in seconds, sizes in bytes.

    `kinds`: the groups of options that are for one kind of table (see `kind`). `explicit`: the keys of the options that the read or the
    table has set.
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
        """The options of a read. A value comes from `read`, else from those stored with the table (`table`), else from the conf file (`conf`).

        `origin`: what errors call an option in `read`. `kinds`: the groups of options that are for one kind of table.

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
        most_values: dict[str, float] = {}
        everything = {key.lower(): text for layer, _ in layers for key, text in layer.items()}
        in_catalog = any(kind.catalog_keys & everything.keys() for kind in kinds)
        local = not in_catalog and is_local(everything.get("path", ""))
        for layer, layer_name in layers:
            for key in _retract(layer):
                values.pop(key, None)
                explicit.discard(key)
            for raw_key, text in layer.items():
                key = raw_key.lower()
                is_wild = key not in fields
                prefix = next((p for p in wildcards if is_wild and key.startswith(p) and key != p), None)
                _refuse_secret(key, text, "" if prefix is None else fields[f"{prefix}*"].secrets, layer is conf)
                if layer is not conf:
                    explicit.add(key)
                if prefix == STORAGE and key.removeprefix(STORAGE).isidentifier():
                    # Credentials of the conf file stay on this host: see `conf_file_secrets`. Its other storage options are for
                    # remote tables; a local table takes none.
                    if not tells_secret(key, text) and not (layer is conf and local):
                        entries[prefix][key.removeprefix(prefix)] = storage_value(text)
                    continue
                if prefix is not None and prefix != STORAGE:
                    entries[prefix][key.removeprefix(prefix)] = str(text)
                    continue
                # A conf file may have credentials, even under a misspelled key.
                field = _get_field(fields, kinds, key, "…" if layer is conf else text)
                value = field.parse(text, f"option {key}", f" ({layer_name})")
                if field.metadata["bounded"] and layer is not conf:
                    most = most_values.setdefault(key, values.get(key, field.default))
                    if value > most:
                        raise OptionError(
                            f"option {key} = {text!r} ({layer_name}): this host allows at most {most:g} s: lower it, or have the operator set more in the "
                            "conf file of each host"
                        )
                values[key] = value
        values |= {f"{prefix}*": tuple(sorted(named.items())) for prefix, named in entries.items() if named}
        options = cls(kinds=_defaults(kinds), explicit=frozenset(explicit)).with_values(values)
        for kind in options.set_kinds:
            options = options.with_values({key: value for key, value in kind.implied.items() if key not in values})
        options._check(values)
        return options

    def _check(self, keys: Collection[str]) -> None:
        """Raise OptionError if options contradict each other, or one that others need is missing. `keys`: those of the options that are set."""
        fields = _fields(tuple(map(type, self.kinds)))
        groups = {fields[key].group for key in keys}
        scheme = self.files.path.partition("://")[0].partition("+")[0].lower()
        for kind in self.kinds:
            if type(kind) in groups or scheme in kind.schemes or not kind.checked_with.isdisjoint(keys):
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
        """The options of the class `group`, which are for one kind of table; their defaults if `parse` was called without this class."""
        return next((kind for kind in self.kinds if isinstance(kind, group)), None) or group()

    @cached_property
    def set_kinds(self) -> tuple[KindOptions, ...]:
        """Those of `kinds` in which an option is set. The others say nothing about the table."""
        defaults = _defaults(tuple(map(type, self.kinds)))
        return tuple(
            kind for kind, default in zip(self.kinds, defaults, strict=True) if kind is not default and kind != default
        )

    @property
    def system(self) -> str | None:
        """The option that names another system as the place of the table; None if the table consists of files."""
        return next((kind.system for kind in self.set_kinds if kind.system is not None), None)

    @property
    def place(self) -> str:
        """The table's path, or its name in another system, without credentials, for errors and plans."""
        if self.files.path:
            return redact("path", self.files.path)
        return next((kind.place for kind in self.set_kinds if kind.system is not None), "")

    @cached_property
    def pins(self) -> dict[str, Pin]:
        """The values of the options that name the version to read, by key. `parse` raises an error if there is more than one."""
        return self.version.pins | {key: pin for kind in self.set_kinds for key, pin in kind.pins.items()}

    @cached_property
    def pinned(self) -> Pin | None:
        """The version to read that an option names; None: the current version is read."""
        return next(iter(self.pins.values()), None)

    @property
    def unpinned(self) -> LookupOptions:
        """These options without those that name a version to read."""
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
        """These options with the values in `overrides` (key -> text). Raises OptionError for an unknown key or a bad value."""
        return self.with_values(
            {key: self._get_field(key, text).parse(text, f"option {key}") for key, text in overrides.items()}
        )

    def on_host(self, overrides: Mapping[str, str]) -> LookupOptions:
        """These options with the values that a session sets (`overrides`: key -> text), except for options that the read or the table has set.

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
    """An option: the group that declares it, its attribute there (`name`), and what its call of `option` says."""

    group: type
    name: str
    default: Any
    metadata: Mapping[str, Any]

    @property
    def secrets(self) -> str:
        return str(self.metadata["secrets"])

    def parse(self, text: object, name: str, origin: str = "") -> Any:
        """The value of the option's text. Raises OptionError for a text that does not parse.

        `name`, `origin`: what the error calls the option and the place where it was set.
        """
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
    """The prefixes of options whose names end with a name of the user's choice, such as `lookup.storage.`."""
    return tuple(key.removesuffix("*") for key in _fields(kinds) if key.endswith("*"))


@functools.cache
def _defaults(kinds: tuple[type[KindOptions], ...]) -> tuple[KindOptions, ...]:
    return tuple(kind() for kind in kinds)


def _refuse_secret(key: str, text: object, advice: str, in_conf_file: bool) -> None:
    """Raise OptionError if an option has a credential that it must not have.

    `advice`: for an option that never takes a credential, where to put it instead; otherwise empty.
    """
    if key == "path" and not is_local(str(text)) and names_bucket_with_credentials(str(text)):
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
            f'filesystem, and JSON for a nested one, e.g. {STORAGE}client_kwargs = \'{{"region_name": "eu-central-1"}}\''
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
    """The options that an unknown key may mean: the one that means the same as another project's option, or some whose names are similar."""
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
    # Compared without the prefix `lookup.`, which would make any two names similar.
    names_by_rest = {name.removeprefix("lookup."): name for name in fields}
    close_names = difflib.get_close_matches(key.removeprefix("lookup."), names_by_rest, 1, 0.66)
    return [names_by_rest[name] for name in close_names] or ending_alike[:3]


def is_local(path: str) -> bool:
    """Whether a path or URL names a file of this machine."""
    return "://" not in path or path.lower().startswith(("file:", "local:"))


def _retract(layer: Mapping[str, str]) -> set[str]:
    """The options that have no meaning beside the options in `layer`: their values in layers of lower precedence are dropped.

    For instance, `lookup.metadata.sync-interval` has no meaning with `lookup.metadata.source` = UFS.
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
    """The options of a table, overridden by those of a read. A table's option that has no meaning beside the read's options is dropped."""
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
