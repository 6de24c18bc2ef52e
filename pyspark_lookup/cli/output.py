"""Options and printing that several commands share."""

from __future__ import annotations

import datetime
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pyarrow as pa

from pyspark_lookup.columnar.types import resolve_names
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.credentials import printable
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.storage.disk import Disk, DiskSpace, empty_space, is_cache_directory
from pyspark_lookup.storage.stores import CATALOG_SCHEME

ABSENT = 3
"""The exit code if a requested key or table was not found, or if a check has found damage."""

CLOCK = HostClock()

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
CACHE_DIR = click.option(
    "--cache-dir",
    metavar="DIR",
    help="This host's cache directory (default: lookup.cache.dir of the conf file, or Spark's default).",
)
OPTION = click.option(
    "-o",
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of the table, such as lookup.keys=id; may be repeated.",
)


def given_options(options: Sequence[str], cache_dir: str | None) -> dict[str, str]:
    """The options of a table by name, from texts KEY=VALUE and the option `--cache-dir`.

    Raises click.BadParameter for a text of another form, or a repeated key.
    """
    option_texts: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key.strip():
            raise click.BadParameter(f"{option!r}: expected KEY=VALUE, such as lookup.keys=id", param_hint="--option")
        if key.strip() in option_texts:
            raise click.BadParameter(f"{key.strip()} is given twice: give it once", param_hint="--option")
        option_texts[key.strip()] = value.strip()
    if cache_dir is not None:
        option_texts["lookup.cache.dir"] = cache_dir
    return option_texts


def open_disk(cache_dir: str | None) -> Disk:
    """This host's cache directory, opened without creating anything.

    Raises click.UsageError if the directory does not exist, CacheDirectoryError if it is not a cache directory of this package.
    """
    directory, max_bytes = _cache_directory(cache_dir)
    if not directory.exists():
        raise click.UsageError(f"there is no directory {directory}: give the cache directory with --cache-dir")
    return Disk(directory, max_bytes, CacheMetricGroup(), CLOCK.wall_s, random.Random(), creates=False)


def disk_space(cache_dir: str | None) -> DiskSpace:
    """The space that this host's cache directory takes, and the free space on its disk. The directory need not exist yet."""
    directory, max_bytes = _cache_directory(cache_dir)
    if is_cache_directory(directory):
        return open_disk(cache_dir).space()
    return empty_space(next(above for above in (directory, *directory.parents) if above.exists()), max_bytes)


def _cache_directory(cache_dir: str | None) -> tuple[Path, int | None]:
    """(the path of this host's cache directory, the limit of its bytes, or None if no limit is set)."""
    options = parse_options({"path": "/", **given_options((), cache_dir)})
    return options.cache.directory(), options.cache.max_bytes


def typed_keys(keys: Sequence[str], names: Sequence[str], schema: pa.Schema, origin: str) -> pa.Table:
    """Keys given as text, converted to the types of the key columns.

    Raises click.BadParameter for a text that is not a value of its column's type.
    """
    parts = [[key] if len(names) == 1 else key.split(",") for key in keys]
    for key, values in zip(keys, parts, strict=True):
        if len(values) != len(names):
            raise click.BadParameter(
                f"{key!r}: {len(names)} values are needed, for {', '.join(names)}: give {','.join(['VALUE'] * len(names))}",
                param_hint=origin,
            )
    columns = []
    for place, name in enumerate(names):
        type_ = schema.field(resolve_names([name], schema, "lookup.keys")[0]).type
        try:
            columns.append(pa.array([values[place] for values in parts], pa.string()).cast(type_))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as problem:
            raise click.BadParameter(f"column {name} is {type_}: {problem}", param_hint=origin) from None
    return pa.Table.from_arrays(columns, names=list(names))


def show(facts: Mapping[str, Any], as_json: bool) -> None:
    """Print facts, as JSON or one per line."""
    if as_json:
        click.echo(_json_text(facts))
        return
    facts = {printable(name): value for name, value in facts.items()}
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {inner}" for key, inner in value.items())
        elif isinstance(value, (list, tuple)):
            value = ", ".join(map(str, value))
        click.echo(f"{name:<{width}}  {_text(value)}".rstrip())


def show_rows(rows: Sequence[Mapping[str, Any]], as_json: bool, columns: Iterable[str] | None = None) -> None:
    """Print rows, as a JSON list or as a table with these columns (None: the columns of the first row)."""
    if as_json:
        click.echo(_json_text(list(rows)))
        return
    names = list(columns) if columns is not None else list(rows[0]) if rows else []
    cells = [list(map(printable, names)), *([_text(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(names))]
    for line in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def bytes_text(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def count_text(name: str, value: int) -> str:
    """A counter or gauge as text for people, with its unit."""
    if name.endswith("Bytes"):
        return bytes_text(value)
    if name.endswith("Micros"):
        return f"{value / 1e6:,.3f} s"
    if name in ("latestLoadTime", "reloadLag"):
        return f"{value:,} ms"
    if name == "versionAsOf":
        return _text(datetime.datetime.fromtimestamp(value / 1000, datetime.timezone.utc))
    return f"{value:,}"


def shown_url(path: str, cache_dir: str | None) -> str:
    """A table's URL in the form in which messages show it. It is the same for all spellings of the table's path."""
    if path.startswith(CATALOG_SCHEME):
        return redact("path", path)
    options = parse_options({"path": path, **given_options((), cache_dir)})
    return redact("path", runtime().engine(options).url_of(options.files.path))


def _text(value: Any) -> str:
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    return "-" if value is None else printable(str(value))


def _json_text(value: Any) -> str:
    """A JSON document. Floats that JSON lacks are the strings "NaN", "Infinity" and "-Infinity", as in Spark's to_json."""
    try:
        return json.dumps(value, default=_plain, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), default=_plain, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {_finite(name): _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """The text for a value of a type that JSON lacks: times as ISO 8601, bytes in hexadecimal, other values by `str`."""
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)
