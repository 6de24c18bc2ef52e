"""`advise`: cache mode and sizes for a table."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_lookup.base.errors import OptionError
from pyspark_lookup.cli.output import CACHE_DIR, JSON, OPTION, disk_space, given_options, show, typed_keys
from pyspark_lookup.cli.sizing import Advice, TableFacts, advice
from pyspark_lookup.engine.lookup_table import LookupTable

_READ_AT_MOST = 64 * 1024 * 1024  # of files: a table that is read whole to know what its rows take
_DECODED_SHARE = 4  # bytes of decoded rows per byte of file, as a guess


@click.command()
@click.argument("path")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Keys in the order in which they were asked for: a text file with one per line (VALUE,VALUE for several columns), or "
    "a parquet file with the key columns.",
)
@OPTION
@CACHE_DIR
@JSON
def advise(path: str, trace: Path | None, options: tuple[str, ...], cache_dir: str | None, as_json: bool) -> None:
    """Which lookup.cache and sizes suit a table: from its statistics, and from a trace of keys where there is one."""
    with LookupTable(path, given_options(options, cache_dir)) as table:
        asked = None if trace is None else _keys_of(trace, table)
        found = advice(_facts(table), disk_space(cache_dir), _memory_bytes(), asked)
    show(_shown(found), as_json)
    if not as_json:
        for size in found.sizes:
            click.echo(f"  {size.max_rows:>12,} rows: {size.hit_rate:>6.1%} of {size.requests:,} keys from the cache")


def _facts(table: LookupTable) -> TableFacts:
    described = table.describe()
    size = described["bytes"]
    if size <= _READ_AT_MOST:
        rows = table.scan()
        return TableFacts(rows.num_rows, size, rows.nbytes)
    return TableFacts(None, size, size * _DECODED_SHARE, estimated=True)


def _keys_of(trace: Path, table: LookupTable) -> pa.Table:
    """A trace's keys, in the types of the key columns. Raises OptionError for a file that has none."""
    names = table.keys
    if trace.suffix == ".parquet":
        found = pq.read_table(trace)
        missing = [name for name in names if name not in found.column_names]
        if missing:
            raise OptionError(f"--trace {trace}: it has no column {missing[0]!r}, only {', '.join(found.column_names)}")
        columns = [found.column(name).cast(table.schema.field(name).type) for name in names]
        return pa.table(columns, names=list(names))
    lines = [line for line in trace.read_text(encoding="utf-8").splitlines() if line]
    return typed_keys(lines, names, table.schema, "--trace")


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _shown(found: Advice) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "options": found.options,
        "because": list(found.reasons),
        "distinct_keys": found.distinct_keys,
    }
    sizes = [{**dataclasses.asdict(size), "hit_rate": round(size.hit_rate, 4)} for size in found.sizes]
    return {**shown, "sizes": sizes}


COMMANDS = (advise,)
