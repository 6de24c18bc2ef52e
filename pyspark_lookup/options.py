"""Every `lookup.*` key: its type, default and one-line meaning. The only place strings become values.

`LookupOptions.parse` takes the layers in order of precedence and returns one frozen value:
read option > table option > `spark.lookupcache.*` > conf file > default.
A key no layer may hold, a value that does not parse and a combination that contradicts itself are
`OptionError`s that name the key, the value and the nearest valid choice.
"""

from __future__ import annotations

import configparser
import dataclasses
import difflib
import enum
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pyspark_lookup.errors import OptionError

__all__ = [
    "HOST_KEYS",
    "SPARK_CONF_PREFIX",
    "CacheMode",
    "FileFormatName",
    "FilterPushdown",
    "LookupOptions",
    "MetadataSource",
    "OnVersionGone",
    "VersionAt",
    "View",
    "conf_file_options",
    "conf_file_secrets",
    "is_local",
    "looks_secret",
    "options_table",
    "parse_bytes",
    "parse_duration_s",
    "redact",
]

T = TypeVar("T")


class CacheMode(enum.Enum):
    """`lookup.cache`: what a host keeps of a table (FLIP-221)."""

    NONE = "NONE"
    PARTIAL = "PARTIAL"
    FULL = "FULL"


class MetadataSource(enum.Enum):
    """`lookup.metadata.source`: who answers get_meta (Alluxio's feature switch)."""

    UFS = "UFS"
    CACHE = "CACHE"


class VersionAt(enum.Enum):
    """`lookup.version-at`: when a scan's version is resolved."""

    AUTO = "AUTO"
    PLAN = "PLAN"
    READ = "READ"


class OnVersionGone(enum.Enum):
    """`lookup.on-version-gone`: what a larger scan does when its version vanished."""

    NEWER = "NEWER"
    FAIL = "FAIL"


class FilterPushdown(enum.Enum):
    """`lookup.filter-pushdown`: whether Spark's pushed filters prune."""

    AUTO = "AUTO"
    TRUE = "true"
    FALSE = "false"


class View(enum.Enum):
    """`lookup.view`: what a read returns."""

    DATA = "data"
    FILES = "files"
    VERSIONS = "versions"
    METRICS = "metrics"


class FileFormatName(enum.Enum):
    """`lookup.format`: how the files are encoded."""

    PARQUET = "parquet"
    ARROW = "arrow"
    CSV = "csv"
    JSON = "json"
    ORC = "orc"


# --- parsers: text -> value, or ValueError with what was expected -----------------------------

_DURATION_UNIT_S = {
    "ms": 1e-3, "milli": 1e-3, "millis": 1e-3, "millisecond": 1e-3, "milliseconds": 1e-3,
    "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0,
    "min": 60.0, "mins": 60.0, "minute": 60.0, "minutes": 60.0,
    "h": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "d": 86400.0, "day": 86400.0, "days": 86400.0,
}  # fmt: skip
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_ISO_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?", re.IGNORECASE)
_NAME = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([^,`\s](?:[^,`]*[^,`\s])?))\s*(?=,|\Z)")
_BYTES = re.compile(r"(\d{1,18})\s*(?:([kmgt])i?)?b?")


def parse_duration_s(text: str) -> float:
    """Seconds (>= 0) of `10 s`, `500 ms`, `5 min`, `1 h`, `7 d` or ISO-8601 `PT10S`."""
    plain = _DURATION.fullmatch(text.strip().lower())
    if plain and plain[2] in _DURATION_UNIT_S:
        return float(plain[1]) * _DURATION_UNIT_S[plain[2]]
    iso = _ISO_DURATION.fullmatch(text.strip())
    if iso and any(iso.groups()):
        days, hours, minutes, seconds = (float(part or 0) for part in iso.groups())
        return days * 86400 + hours * 3600 + minutes * 60 + seconds
    raise ValueError("a duration such as '10 s', '5 min', '1 h' or 'PT10S'")


def parse_bytes(text: str) -> int:
    """Bytes (>= 0) of `4 MiB`, `128m`, `1g` or a plain number; units are powers of 1024."""
    match = _BYTES.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError("a size such as '4 MiB', '128m' or '1073741824'")
    exponent = "kmgt".index(match[2]) + 1 if match[2] else 0
    return int(match[1]) << (10 * exponent)


def _sync_interval(text: str) -> float:
    if text.strip() in ("-1", "0"):
        return float(text)
    try:
        return parse_duration_s(text)
    except ValueError:
        raise ValueError("-1 (never), 0 (always) or a duration such as '5 min'") from None


def _bounded_bytes(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = parse_bytes(text)
        if not low <= value <= high:
            raise ValueError(f"a size between {low} and {high} bytes")
        return value

    return parse


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text.strip()):
        raise ValueError("a whole number, 0 or more")
    return int(text)


def _boolean(text: str) -> bool:
    choices = {"true": True, "false": False}
    if text.strip().lower() not in choices:
        raise ValueError("true or false")
    return choices[text.strip().lower()]


def _names(text: str) -> tuple[str, ...]:
    """Comma-separated column names; a name with a comma goes in backquotes, as in Spark SQL."""
    names: list[str] = []
    end = -1  # of the name before, where its comma stands
    while end < len(text):
        match = _NAME.match(text, end + 1)
        if match is None:
            break
        names.append(match[1].replace("``", "`") if match[1] else match[2])
        end = match.end()
    if end != len(text) or len(set(names)) != len(names):
        raise ValueError("column names separated by commas, none twice")
    return tuple(names)


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("some text")
    return text.strip()


def _choice(kind: type[enum.Enum]) -> Callable[[str], Any]:
    """One of an enum's values, in any letter case (as Flink parses them)."""

    def parse(text: str) -> enum.Enum:
        for member in kind:
            if member.value.lower() == text.strip().lower():
                return member
        choices = [str(member.value) for member in kind]
        near = difflib.get_close_matches(text.strip(), choices, 1, 0.4) or difflib.get_close_matches(
            text.strip().upper(), choices, 1, 0.4
        )
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"one of {', '.join(choices)}{hint}")

    return parse


def _option(
    key: str, kind: str, parse: Callable[[str], Any], default: Any, doc: str, shown: str = "", hashed: bool = True
) -> Any:
    """A field of `LookupOptions` with the key, type label and meaning that users see."""
    if not shown:
        shown = "" if default is None else str(getattr(default, "value", default))
    metadata = {"key": key, "kind": kind, "parse": parse, "doc": doc, "shown": shown}
    return dataclasses.field(default=default, hash=None if hashed else False, metadata=metadata)


_MIB = 1024 * 1024
_GIB = 1024 * _MIB
_STORAGE = "lookup.storage."
SPARK_CONF_PREFIX = "spark.lookupcache."

# Options that say how a *host* works, not what a query means: a session may override these at
# run time (spark.lookupcache.*), after the plan was made.
HOST_KEYS = frozenset({"lookup.cache.dir", "lookup.cache.max-bytes", "lookup.max-retries"})


@dataclasses.dataclass(frozen=True)
class LookupOptions:
    """The options of one table reference, typed and checked. Durations in seconds, sizes in bytes."""

    path: str = _option("path", "string", _text, "", "File, directory (read recursively) or glob; any fsspec URL. `s3a://` means `s3://`.")  # fmt: skip
    keys: tuple[str, ...] | None = _option("lookup.keys", "names", _names, None, "Key columns of the table.")
    format: FileFormatName | None = _option("lookup.format", "parquet, arrow, csv, json, orc", _choice(FileFormatName), None, "File format.", "from the file names")  # fmt: skip
    columns: tuple[str, ...] | None = _option("lookup.columns", "names", _names, None, "Columns to read, in this order.", "all")  # fmt: skip
    where: str | None = _option("lookup.where", "SQL predicate", _text, None, "Rows to read: `=`, `<>`, `<`, `<=`, `>`, `>=`, `<=>`, `IN`, `BETWEEN`, `LIKE 'prefix%'`, `IS [NOT] NULL`, `AND`, `OR`, `NOT` over this table's columns; prunes files and row groups.", "all rows")  # fmt: skip
    partition: str | None = _option("lookup.partition", "`max_pt()` or `k=v,…`", _text, None, "Partition directories to read; `max_pt()` is the latest.", "all")  # fmt: skip
    view: View = _option("lookup.view", "data, files, versions, metrics", _choice(View), View.DATA, "What a read returns: the rows, the files of the current version, the versions this host knows, or its counters.")  # fmt: skip
    success_file: bool = _option("lookup.success-file", "boolean", _boolean, False, "Refuse a directory without `_SUCCESS`.", "false")  # fmt: skip
    settle_s: float | None = _option("lookup.settle", "duration", parse_duration_s, None, "Wait until the newest file is at least this old.")  # fmt: skip
    metadata_source: MetadataSource = _option("lookup.metadata.source", "UFS, CACHE", _choice(MetadataSource), MetadataSource.UFS, "Who says which version is current: the store, once per query, or this host.")  # fmt: skip
    sync_interval_s: float | None = _option("lookup.metadata.sync-interval", "-1, 0 or duration", _sync_interval, None, "With CACHE: ask the store again when the known version is older than this (-1 never, 0 always).", "required with CACHE")  # fmt: skip
    version_at: VersionAt = _option("lookup.version-at", "AUTO, PLAN, READ", _choice(VersionAt), VersionAt.AUTO, "When a scan resolves its version. AUTO: at reading if the table fits one task, else at planning.")  # fmt: skip
    on_version_gone: OnVersionGone = _option("lookup.on-version-gone", "NEWER, FAIL", _choice(OnVersionGone), OnVersionGone.NEWER, "When a file was replaced after the version was resolved: read the newer one, or fail.")  # fmt: skip
    cache: CacheMode = _option("lookup.cache", "NONE, PARTIAL, FULL", _choice(CacheMode), CacheMode.NONE, "What a host keeps (FLIP-221). This release has NONE: the blocks of the files.")  # fmt: skip
    cache_dir: str | None = _option("lookup.cache.dir", "path", _text, None, "Directory of this host's cache, mode 0700, on a local disk.", "`lookupcache-<uid>` in the system's temporary directory")  # fmt: skip
    cache_max_bytes: int = _option("lookup.cache.max-bytes", "size", _bounded_bytes(_MIB, 2**60), 10 * _GIB, "Disk budget of this host's blocks.", "10 GiB")  # fmt: skip
    block_size: int = _option("lookup.block.size", "size", _bounded_bytes(64 * 1024, _GIB), 4 * _MIB, "Block of a format without natural blocks (CSV, JSON, ORC).", "4 MiB")  # fmt: skip
    max_retries: int = _option("lookup.max-retries", "integer", _count, 3, "Further attempts after a transient store error (n + 1 in all), with backoff (FLIP-221).")  # fmt: skip
    filter_pushdown: FilterPushdown = _option("lookup.filter-pushdown", "AUTO, true, false", _choice(FilterPushdown), FilterPushdown.AUTO, "Prune by filters Spark pushes. AUTO: only on a Spark that scopes them to their scan (5.0).")  # fmt: skip
    split_size: int = _option("lookup.scan.split-size", "size", _bounded_bytes(_MIB, 2**60), 128 * _MIB, "A scan above this many file bytes is split into several tasks.", "128 MiB")  # fmt: skip
    storage: tuple[tuple[str, Any], ...] = _option("lookup.storage.*", "any", str, (), "Passed to the fsspec filesystem, e.g. `lookup.storage.endpoint_url`, `lookup.storage.anon`; never credentials.", hashed=False)  # fmt: skip # values may be JSON objects
    explicit: frozenset[str] = dataclasses.field(default=frozenset(), repr=False, compare=False)

    @classmethod
    def parse(
        cls,
        read: Mapping[str, str],
        table: Mapping[str, str] | None = None,
        conf: Mapping[str, str] | None = None,
    ) -> LookupOptions:
        """The options of a read of `table` (its stored options) under `conf` (a conf file's).

        Raises OptionError for an unknown key, a bad value, a contradiction, a credential outside
        the conf file, or a missing path.
        """
        layers = [(conf or {}, "conf file"), (table or {}, "table option"), (read, "read option")]
        values: dict[str, Any] = {}
        storage: dict[str, Any] = {}
        explicit: set[str] = set()
        path = {key.lower(): text for layer, _ in layers for key, text in layer.items()}.get("path", "")
        for layer, origin in layers:
            if _says(layer, "lookup.metadata.source", "UFS") and "lookup.metadata.sync-interval" not in layer:
                # Going back to the store at every query takes an interval of a lower layer with it.
                values.pop("sync_interval_s", None)
            for raw_key, text in layer.items():
                key = raw_key.lower()
                _refuse_secret(key, text, allowed=layer is conf)
                if key.startswith(_STORAGE) and key.removeprefix(_STORAGE).isidentifier():
                    # A conf file's credentials stay on their host: see `conf_file_secrets`. Its other
                    # storage options are for remote tables; local ones take none.
                    if not _holds_secret(key, text) and not (layer is conf and is_local(path)):
                        storage[key.removeprefix(_STORAGE)] = _storage_value(text)
                    continue
                field = _field_of(key, text)
                try:
                    values[field.name] = field.metadata["parse"](str(text))
                except ValueError as problem:
                    raise OptionError(f"option {key} = {redact(key, text)!r} ({origin}): expected {problem}") from None
                if layer is not conf:
                    explicit.add(key)
        values["storage"] = tuple(sorted(storage.items()))
        options = cls(**values, explicit=frozenset(explicit))
        options._check()
        return options

    def _check(self) -> None:
        """Raise OptionError for a combination that contradicts itself."""
        if not self.path:
            raise OptionError(
                "option path is missing: give the table's file, directory or glob, e.g. load('s3://bucket/dim')"
            )
        if self.cache is not CacheMode.NONE:
            raise OptionError(
                f"option lookup.cache = {self.cache.value!r}: this release has NONE only "
                "(blocks of the files are kept on every host in that mode too)"
            )
        cached = self.metadata_source is MetadataSource.CACHE
        if cached and self.sync_interval_s is None:
            raise OptionError(
                "option lookup.metadata.source = 'CACHE' needs lookup.metadata.sync-interval: a duration such as '5 min', "
                "0 (ask the store at every query) or -1 (never ask again)"
            )
        if not cached and self.sync_interval_s is not None:
            raise OptionError(
                "option lookup.metadata.sync-interval contradicts lookup.metadata.source = 'UFS', which asks the store at "
                "every query: remove it, or set lookup.metadata.source = 'CACHE'"
            )
        if self.view is not View.DATA and (self.where or self.columns):
            raise OptionError(
                f"option lookup.view = {self.view.value!r} has columns of its own: "
                "filter it in Spark instead of by lookup.where or lookup.columns"
            )

    def overridden(self, overrides: Mapping[str, str]) -> LookupOptions:
        """These options with `overrides` (key -> text) in place of their own values. Raises OptionError."""
        values = {}
        for key, text in overrides.items():
            field = _field_of(key, text)
            try:
                values[field.name] = field.metadata["parse"](text)
            except ValueError as problem:
                raise OptionError(f"option {key} = {redact(key, text)!r}: expected {problem}") from None
        return dataclasses.replace(self, **values)

    def on_host(self, overrides: Mapping[str, str]) -> LookupOptions:
        """These options with `overrides` (key -> text) applied to host options nobody set explicitly.

        Only keys of `HOST_KEYS` have an effect; others are an OptionError.
        """
        values: dict[str, Any] = {}
        for key, text in overrides.items():
            field = _field_of(key, text)
            if key not in HOST_KEYS:
                raise OptionError(
                    f"conf {SPARK_CONF_PREFIX}{key.removeprefix('lookup.')}: only "
                    f"{', '.join(sorted(HOST_KEYS))} can be set for a session; give {key} as an option of the read or table"
                )
            if key in self.explicit:
                continue
            try:
                values[field.name] = field.metadata["parse"](text)
            except ValueError as problem:
                raise OptionError(
                    f"conf {SPARK_CONF_PREFIX}{key.removeprefix('lookup.')} = {text!r}: expected {problem}"
                ) from None
        return dataclasses.replace(self, **values)

    def cache_directory(self) -> Path:
        """Where this host keeps its cache. Nothing is created here."""
        if self.cache_dir is not None:
            return Path(self.cache_dir).expanduser().absolute()
        return Path(tempfile.gettempdir()) / f"lookupcache-{os.getuid()}"

    def storage_options(self) -> dict[str, Any]:
        """Keyword arguments for the fsspec filesystem."""
        return dict(self.storage)

    def __repr__(self) -> str:
        set_here = {
            field.metadata["key"]: getattr(self, field.name)
            for field in _FIELDS.values()
            if field.name != "storage" and getattr(self, field.name) != field.default
        }
        shown = {key: redact(key, value) if isinstance(value, str) else value for key, value in set_here.items()}
        shown |= {_STORAGE + key: redact(key, value) for key, value in self.storage}
        return f"LookupOptions({', '.join(f'{key}={value!r}' for key, value in shown.items())})"


_FIELDS: dict[str, dataclasses.Field[Any]] = {
    field.metadata["key"]: field for field in dataclasses.fields(LookupOptions) if field.metadata
}

_SECRET = re.compile(
    r"secret|passw|token|credential|signature|(^|[._-])(key|sas)$|(access|account|private|api|shared)[._-]?key|connection_string"
)


def looks_secret(key: str) -> bool:
    """Whether an option's name says that its value is a credential."""
    return key != "lookup.keys" and _SECRET.search(key.lower()) is not None


def redact(key: str, value: object) -> str:
    """`value` as text fit for a message: hidden if it is or holds a credential, without those in URLs."""
    if _holds_secret(key, value):
        return "[redacted]"
    text = re.sub(r"(\w+://)[^/?#\s]+@", r"\1[redacted]@", str(value))
    return re.sub(
        r"(?i)([?&][^=&\s]*(?:signature|token|secret|sig|credential|passw|key)[^=&\s]*=)[^&\s]+", r"\1[redacted]", text
    )


def _refuse_secret(key: str, text: object, allowed: bool) -> None:
    if not allowed and key.startswith(_STORAGE) and _holds_secret(key, text):
        raise OptionError(
            f"option {key} looks like a credential and would be stored in plans and catalogs: take it from the "
            "environment, from the store's own chain (e.g. an instance role), or from the conf file ($LOOKUPCACHE_CONF)"
        )


def _holds_secret(key: str, value: object) -> bool:
    """Whether an option is a credential, or a JSON value (or its text) with one somewhere inside."""
    if looks_secret(key):
        return True
    stack = [value if isinstance(value, (dict, list)) else _storage_value(value)]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            if any(map(looks_secret, item)):
                return True
            stack += item.values()
        elif isinstance(item, list):
            stack += item
    return False


def _storage_value(text: object) -> Any:
    """`true`, `5` and JSON become values, as fsspec expects; anything else stays text."""
    try:
        return json.loads(str(text))
    except (ValueError, RecursionError):
        return str(text)


def _field_of(key: str, text: object) -> dataclasses.Field[Any]:
    field = _FIELDS.get(key)
    if key.startswith(_STORAGE):
        raise OptionError(
            f"unknown option {key} = {redact(key, text)!r}: {_STORAGE}… takes the name of one parameter of the fsspec "
            f"filesystem, and JSON for a nested one, e.g. {_STORAGE}client_kwargs = '{{\"verify\": false}}'"
        )
    if field is None:
        near = difflib.get_close_matches(key, _FIELDS, 1, 0.6)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_FIELDS)}"
        raise OptionError(f"unknown option {key} = {redact(key, text)!r}: {hint}")
    return field


def is_local(path: str) -> bool:
    """Whether a path or URL names a file of this machine."""
    return "://" not in path or path.startswith(("file:", "local:"))


def _says(layer: Mapping[str, str], key: str, value: str) -> bool:
    return any(k.lower() == key and str(text).strip().upper() == value for k, text in layer.items())


def conf_file_options(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Defaults of `$LOOKUPCACHE_CONF`, else of `$SPARK_CONF_DIR/lookupcache.conf`; {} without either.

    Lines are `key = value`; a `#` at their start or after a space begins a comment. Raises OptionError for a file that was named but cannot
    be read or parsed; the message shows no line, for it may hold a credential.
    """
    named = environ.get("LOOKUPCACHE_CONF")
    spark_conf = environ.get("SPARK_CONF_DIR")
    if not named and not spark_conf:
        return {}
    path = Path(named) if named else Path(spark_conf or "") / "lookupcache.conf"
    parser = configparser.ConfigParser(
        delimiters=("=",), comment_prefixes=("#",), inline_comment_prefixes=("#",), interpolation=None
    )
    try:
        lines = path.read_text(encoding="utf-8")
    except FileNotFoundError as problem:
        if not named:
            return {}
        raise OptionError(f"conf file {path} ($LOOKUPCACHE_CONF) does not exist") from problem
    except (OSError, UnicodeDecodeError) as problem:
        raise OptionError(f"conf file {path} cannot be read: {problem}") from problem
    try:
        parser.read_string("[conf]\n" + lines)
    except configparser.DuplicateOptionError as problem:
        raise OptionError(
            f"conf file {path}, line {(problem.lineno or 1) - 1}: {problem.option} is there twice"
        ) from None
    except configparser.ParsingError as problem:
        raise OptionError(f"conf file {path}, line {problem.errors[0][0] - 1}: expected key = value") from None
    except configparser.Error:
        raise OptionError(f"conf file {path}: expected lines of key = value without [sections]") from None
    if parser.sections() != ["conf"] or parser.defaults():
        raise OptionError(f"conf file {path}: expected lines of key = value without [sections]")
    options = dict(parser["conf"])
    for key, text in options.items():
        if "\n" in text:  # an indented line goes on with the one before
            raise OptionError(f"conf file {path}: the line after {key} is indented: start every line with its key")
    return options


def conf_file_secrets(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The credentials among a conf file's `lookup.storage.*`: used on this host, never put into a plan."""
    found: dict[str, Any] = {}
    for key, text in conf_file_options(environ).items():
        if key.startswith(_STORAGE) and _holds_secret(key, text):
            value = _storage_value(text)
            # A password of digits is no number.
            found[key.removeprefix(_STORAGE)] = value if isinstance(value, (dict, list)) else text
    return found


def options_table() -> str:
    """The options as a Markdown table, for the README."""
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for key, field in _FIELDS.items():
        meta = field.metadata
        rows.append(f"| `{key}` | {meta['kind']} | {meta['shown'] or '–'} | {meta['doc']} |")
    return "\n".join(rows)
