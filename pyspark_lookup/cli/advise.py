"""`advise`: recommends a cache mode and sizes for a table, from the table's statistics and, if there is one, from a trace of keys.

The trace is replayed through the real partial cache, once for each of several sizes. So the hit rate for a size is the one that a cache of
this size would have had. Keys come in batches, as in lookups. A key that a batch has twice, and the cache does not have, is loaded once.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_lookup.cache.memory import KEY_INDEX, DefaultLookupCache
from pyspark_lookup.cli.output import CACHE_DIR, CLOCK, JSON, OPTION, disk_space, given_options, show, typed_keys
from pyspark_lookup.columnar.keys import Keys
from pyspark_lookup.errors import OptionError, raise_ours
from pyspark_lookup.lookup.lookup import scan_batches
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.options.enums import CacheMode
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.storage.disk import DiskSpace

# Bytes of files, or of the rows that a provider or database returns: a smaller table is read to measure its decoded rows.
_READ_AT_MOST = 64 * 1024 * 1024
_DECODED_SHARE = 4  # an estimate: decoded rows take this many bytes for each byte of the files
_BATCH = 10_000  # keys that are replayed at a time
_SIZES = 8  # cache sizes for which the trace is replayed
_NEARLY_AS_GOOD = 0.98  # a size is good enough if it has this share of the hits of the best size
_SMALL = 256 * 1024 * 1024  # a table of up to this many decoded bytes can be cached on every host
_RELOAD = 2  # a reload needs room for the old and the new snapshot on disk


@click.command()
@click.argument("path")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Keys in the order in which they were looked up: a text file with one per line (VALUE,VALUE for several columns), or "
    "a parquet file with the key columns.",
)
@OPTION
@CACHE_DIR
@JSON
def advise(path: str, trace: Path | None, options: tuple[str, ...], cache_dir: str | None, as_json: bool) -> None:
    """Recommend lookup.cache and sizes for a table: from its statistics, and from a trace of keys if there is one."""
    with LookupTable(path, given_options(options, cache_dir)) as table:
        trace_keys = None if trace is None else _read_trace(trace, table)
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        description = table.describe()
        is_provided = description["kind"] == "PROVIDER"
        estimated = not is_provided and description["bytes"] > _READ_AT_MOST
        decoded_bytes: int | None
        if is_provided:
            decoded_bytes = _provided_bytes({"path": path, **given_options(options, cache_dir)})
        else:
            decoded_bytes = description["bytes"] * _DECODED_SHARE if estimated else table.scan().nbytes
        refused = table.metrics()["snapshotOverBudgetCount"]
        table_advice = advice(decoded_bytes, disk_space(cache_dir), memory_bytes, trace_keys, estimated, refused)
    facts = {
        "options": table_advice.options,
        "because": list(table_advice.reasons),
        "distinct_keys": table_advice.distinct_keys,
        "sizes": [{**dataclasses.asdict(size), "hit_rate": round(size.hit_rate, 4)} for size in table_advice.sizes],
    }
    show(facts, as_json)
    if not as_json:
        for size in table_advice.sizes:
            click.echo(f"  {size.max_rows:>12,} rows: {size.hit_rate:>6.1%} of {size.requests:,} keys from the cache")


def _provided_bytes(option_texts: Mapping[str, str]) -> int | None:
    """The bytes that the rows of a provider or database take decoded; None if they are not read as a whole.

    They are not if it returns rows by key only, or if there are more than `_READ_AT_MOST` bytes that can also be looked up by key.
    """
    options = runtime().effective(parse_options(option_texts))
    engine = runtime().engine(options)
    versions, size = engine.reader.versions, 0
    if not versions.reads_all_rows:
        return None
    _, batches = scan_batches(engine, engine.reader.find(options), options, None, None, CLOCK)
    for batch in batches:
        size += batch.nbytes
        if size > _READ_AT_MOST and versions.looks_up_keys:
            return None
    return size


def _read_trace(trace: Path, table: LookupTable) -> pa.Table:
    """The keys of a trace, in the types of the key columns. Raises OptionError for a file that lacks one of these columns, or cannot be read."""
    names = table.keys
    try:
        return _parse_trace(trace, names, table)
    except (pa.ArrowException, UnicodeDecodeError) as problem:
        raise_ours(
            OptionError(
                f"--trace {trace}: it cannot be read ({problem}): give text in UTF-8 with one key on each line, or a parquet file with the key columns "
                f"{', '.join(names)} in the table's types"
            ),
            problem,
        )


def _parse_trace(trace: Path, names: Sequence[str], table: LookupTable) -> pa.Table:
    if trace.suffix == ".parquet":
        trace_table = pq.read_table(trace)
        missing = [name for name in names if name not in trace_table.column_names]
        if missing:
            raise OptionError(
                f"--trace {trace}: the file has no key column {missing[0]!r}, only {', '.join(trace_table.column_names)}: name its columns as the table does"
            )
        columns = [trace_table.column(name).cast(table.schema.field(name).type) for name in names]
        return pa.table(columns, names=list(names))
    lines = [line for line in trace.read_text(encoding="utf-8").splitlines() if line]
    return typed_keys(lines, names, table.schema, "--trace")


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The number of hits that a partial cache of `max_rows` keys would have had with a trace, and the number of requests in the trace."""

    max_rows: int
    requests: int
    hits: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.requests if self.requests else 0.0


@dataclasses.dataclass(frozen=True)
class Advice:
    """The recommended options for a table, and the reasons."""

    options: dict[str, str]
    reasons: tuple[str, ...]
    distinct_keys: int | None
    sizes: tuple[Replayed, ...]


def advice(
    decoded_bytes: int | None,
    space: DiskSpace,
    memory_bytes: int,
    trace: pa.Table | None,
    estimated: bool = False,
    refused: int = 0,
) -> Advice:
    """The recommended options for a table of `decoded_bytes` (None: too many to be read, or unknown), on a host with this disk and memory (-1:
    unknown).

    `estimated`: whether `decoded_bytes` is estimated from the size of the files. `trace`: the key columns of lookups, in order. `refused`:
    how often this host had no disk space for the table's snapshot.
    """
    sizes: tuple[Replayed, ...] = ()
    distinct = None
    if trace is not None and trace.num_rows:
        distinct = trace.group_by(trace.column_names).aggregate([]).num_rows
        sizes = tuple(replay(trace, size) for size in _sizes(distinct))
    if decoded_bytes is None:
        reasons = [
            f"it has more than {_READ_AT_MOST / 2**20:,.0f} MiB of rows, or returns them by key only, so it was not read as a whole"
        ]
        return Advice(_by_key(sizes, reasons), tuple(reasons), distinct, sizes)
    size_text = f"its rows take {'about ' if estimated else ''}{decoded_bytes / 1e6:,.1f} MB decoded"
    options = {"lookup.cache": CacheMode.FULL.value}
    if space.budget < decoded_bytes * _RELOAD or 0 <= space.free + space.used_bytes < decoded_bytes * _RELOAD:
        room = min(space.budget, max(space.free, 0) + space.used_bytes)
        reasons = [
            f"{size_text}; a full cache needs twice that on disk, and the cache directory may take {room / 1e6:,.0f} MB "
            "(lookup.cache.max-bytes)"
        ]
        options = _by_key(sizes, reasons)
    elif decoded_bytes <= _SMALL:
        reasons = [f"{size_text}: small enough for every host to cache all of it"]
    elif memory_bytes >= 0 and decoded_bytes > memory_bytes // 2 and sizes and _choose_size(sizes).hit_rate > 0.9:
        reasons = [f"{size_text}, more than half of the memory, and some keys are looked up again and again"]
        options = _by_key(sizes, reasons)
    else:
        reasons = [f"{size_text}, and the disk has space for them"]
    if refused:
        full = f"{refused:,} times this host had no disk space for the table's snapshot, so the table was read from its files"
        reasons.append(
            f"{full}: {space.used_bytes / 1e6:,.0f} MB of {space.budget / 1e6:,.0f} MB are in use; raise lookup.cache.max-bytes"
        )
    return Advice(options, tuple(reasons), distinct, sizes)


def _by_key(sizes: tuple[Replayed, ...], reasons: list[str]) -> dict[str, str]:
    """The options for a partial cache. The reasons for them are appended to `reasons`."""
    rows = 1_000_000
    if sizes:
        best = _choose_size(sizes)
        rows, rate = best.max_rows, best.hit_rate
        reasons.append(f"with {rows:,} rows {rate:.1%} of the trace's keys would have been answered from the cache")
        if rate < 0.5:
            reasons.append("most keys are looked up only once: more rows would not help")
    else:
        reasons.append("only a trace of keys (--trace) shows how many rows to cache; 1,000,000 is a start")
    return {"lookup.cache": CacheMode.PARTIAL.value, "lookup.partial-cache.max-rows": str(rows)}


def _choose_size(sizes: Sequence[Replayed]) -> Replayed:
    """The smallest size that has nearly as many hits as the best size."""
    most = max(size.hits for size in sizes)
    return next(size for size in sizes if size.hits >= _NEARLY_AS_GOOD * most)


def _sizes(distinct: int) -> list[int]:
    """Sizes up to the number of distinct keys, each about 2.7 times as large as the one before."""
    shares = np.geomspace(0.001, 1.0, _SIZES)
    return sorted({max(int(np.ceil(distinct * share)), 1) for share in shares})


def replay(trace: pa.Table, max_rows: int) -> Replayed:
    """The hits of a partial cache of `max_rows` rows. `trace`: the key columns, one request per row; rows with a null are ignored."""
    cache = DefaultLookupCache(max_rows=max_rows)
    empty = pa.table({KEY_INDEX: pa.array([], pa.int64())})
    requests = hits = 0
    for start in range(0, trace.num_rows, _BATCH):
        batch = trace.slice(start, _BATCH).combine_chunks()
        valid = Keys([column.combine_chunks() for column in batch.columns]).valid
        valid_keys = batch if valid is None else batch.filter(pa.array(valid))
        present = cache.get_many(valid_keys).present
        missed_keys = valid_keys.filter(pa.array(~present)).group_by(valid_keys.column_names).aggregate([])
        requests += valid_keys.num_rows
        hits += valid_keys.num_rows - missed_keys.num_rows
        if missed_keys.num_rows:
            cache.put_many(missed_keys, empty)
    cache.close()
    return Replayed(max_rows, requests, hits)


COMMANDS = (advise,)
