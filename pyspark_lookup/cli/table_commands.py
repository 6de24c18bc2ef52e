"""Commands that work on one table: they describe it, read its rows, or maintain it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import click

from pyspark_lookup.cli.output import (
    ABSENT,
    CACHE_DIR,
    JSON,
    OPTION,
    bytes_text,
    given_options,
    show,
    show_rows,
    typed_keys,
)
from pyspark_lookup.columnar.python_values import as_python
from pyspark_lookup.core.credentials import printable
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.options.conf_file import redact


def _of_table(command: Callable[..., Any], more: Mapping[str, str] = MappingProxyType({})) -> Callable[..., Any]:
    """Make a command that takes a table's path and options, from a function that takes the open table. `more`: options that the command
    always sets."""

    @functools.wraps(command)
    def run(path: str, options: tuple[str, ...], cache_dir: str | None, **arguments: Any) -> None:
        with LookupTable(path, {**more, **given_options(options, cache_dir)}) as table:
            command(table, **arguments)

    return click.argument("path")(OPTION(CACHE_DIR(JSON(run))))


@click.command()
@_of_table
def describe(table: LookupTable, as_json: bool) -> None:
    """Describe the table: columns, version, files, bytes, and, for a managed table, its log."""
    facts = table.describe()
    if not as_json:
        names = [key for key, value in facts.items() if value not in (None, {}, [], ())]
        if facts["kind"] == "PROVIDER":  # a provider's table counts as one file, whose size has no meaning
            names = [key for key in names if key not in ("files", "bytes")]
        facts = {key: bytes_text(facts[key]) if key == "bytes" else facts[key] for key in names}
        option_texts = {key: redact(key, value) for key, value in table.given.items() if key != "path"}
        facts.pop("options")
        facts |= (
            {"options": ", ".join(f"{key} = {value}" for key, value in option_texts.items())} if option_texts else {}
        )
    show(facts, as_json)


@click.command()
@_of_table
def versions(table: LookupTable, as_json: bool) -> None:
    """List the versions that this host knows; for a managed table, all versions in its log."""
    rows = table.versions()
    short = ("version", "committed_at", "operation", "write_id", "files_added", "rows_added")
    plain = ("digest", "resolved_at", "files", "bytes")
    show_rows(rows, as_json, short if rows and rows[0]["operation"] else plain)


@click.command()
@_of_table
def files(table: LookupTable, as_json: bool) -> None:
    """List the files of the current version."""
    show_rows(table.files(), as_json, ("url", "size", "modified_at", "write_id", "rows"))


@click.command(context_settings={"ignore_unknown_options": True})  # a key may be -1
@_of_table
@click.argument("keys", nargs=-1, required=True)
def get(table: LookupTable, keys: tuple[str, ...], as_json: bool) -> None:
    """Print the rows of the KEYS (with several key columns: VALUE,VALUE). Exit code 3 if a key has no row."""
    rows = table.get_many(functools.partial(typed_keys, keys, origin="KEYS"))
    answered = set(rows.column("key_index").to_pylist())
    show_rows(as_python(rows.drop_columns(["key_index"])), as_json)
    missing = [key for place, key in enumerate(keys) if place not in answered]
    if missing:
        click.echo(f"no row for {printable(', '.join(missing))}", err=True)
        sys.exit(ABSENT)


@click.command(context_settings={"ignore_unknown_options": True})
@_of_table
@click.argument("keys", nargs=-1, required=True)
def invalidate(table: LookupTable, keys: tuple[str, ...], as_json: bool) -> None:
    """Drop this host's cached rows of the KEYS with lookup.cache=PARTIAL: their next lookup asks the table again."""
    table.invalidate(functools.partial(typed_keys, keys, origin="KEYS"))
    show({"keys": len(keys)}, as_json)


@click.command()
@functools.partial(_of_table, more={"lookup.cache": "FULL"})
def warm(table: LookupTable, as_json: bool) -> None:
    """Load the table's current version into this host's full cache now, with a progress bar."""
    version = table.warm()
    metrics = table.metrics()
    rows, size = metrics["numCachedRecords"], metrics["numCachedBytes"]
    if as_json:
        show({"version": version, "rows": rows, "bytes": size}, as_json)
    else:
        click.echo(f"version {version} is here: {rows:,} rows, {bytes_text(size)}")


@click.command()
@_of_table
def compact(table: LookupTable, as_json: bool) -> None:
    """Compact a managed table's small writes into files sorted by key."""
    before = len(table.files())
    position = table.compact()
    show({"position": position, "files_before": before, "files": len(table.files())}, as_json)


@click.command()
@_of_table
@click.option(
    "--older-than", default="7 d", show_default=True, help="Keep the files that versions of this last period need."
)
@click.option("--force", is_flag=True, help="Allow less than 7 days. Only if nothing reads or writes the table now.")
def vacuum(table: LookupTable, as_json: bool, older_than: str, force: bool) -> None:
    """Remove the files of a managed table that no version needs any more."""
    show(table.vacuum(older_than, force), as_json)


COMMANDS = (describe, versions, files, get, invalidate, warm, compact, vacuum)
