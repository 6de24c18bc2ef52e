"""`Invalidations`: a log of the keys of a table that were invalidated on this host, by any of its processes.

At its next lookup, each process drops these keys from its own cache. The files that the host's processes share are not changed: a row in them
does not count if its load began before its key was invalidated. The log is bounded. When it has too many keys, it forgets the earliest ones, and
keeps only the latest time at which one of them was invalidated: all rows that were loaded before this time are loaded again.
"""

from __future__ import annotations

import base64
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import (
    SEED,
    Keys,
    Numbers,
    Seed,
    as_bools,
    as_indices,
    cast_keys,
    distinct_keys,
    one_array,
)
from pyspark_lookup.core.decoding import as_count, as_number, as_text
from pyspark_lookup.errors import SchemaError
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk

_BYTES_AT_MOST = 1024 * 1024
_EARLIER_BOOT_S = -1.0  # stands for any time before the machine last started: times on the steady clock are 0 or more
_RACES = 1000  # how often a call tries to record itself, while other processes are faster
_NO_ROW = ""
_CALL, _AT = (
    "invalidated:call",
    "invalidated:at_s",
)  # columns: for each key the number and the time of the latest call that named it

Call = tuple[str, int]
"""A call of `invalidate`: (the name of the log that has the call, the call's number in this log)."""
NO_CALL: Call = (_NO_ROW, 0)


@dataclasses.dataclass(frozen=True)
class _CallLog:
    """The log of the calls of `invalidate`. `number`: how many calls there were. `recent`: the keys that the log has not forgotten, with their calls.

    `folded`: how many calls the log has forgotten, always the earliest ones; the last of them was made at `until_s` (steady clock). `row`:
    the name of this log. If the cache directory is removed, a log with another name begins.
    """

    number: int
    boot: str
    row: str = _NO_ROW
    folded: int = 0
    until_s: float | None = None
    recent: pa.Table | None = None


class Invalidations:
    """The invalidated keys (columns `names`) of one table. `place`: the key of the record with the log.

    Without a cache directory, these are only the keys that this process has invalidated.
    """

    def __init__(self, context: HostContext, place: str, names: Sequence[str]) -> None:
        self._context = context
        self._place = place
        self._names = sorted(names)
        self._call_log = _CallLog(0, context.clock.boot)
        self._lock = threading.Lock()
        self._signs: object = None
        self._hashes: dict[object, tuple[_CallLog, Numbers, Numbers]] = {}

    # --- asking -----------------------------------------------------------------------------------

    def refresh(self) -> Call:
        """Read the calls that other processes have recorded. Returns the latest call of all."""
        disk = self._context.disk
        if disk is not None and (signs := disk.newest_signs("invalidated", self._place)) != self._signs:
            with self._lock:
                self._call_log, self._signs = self._read(disk), signs
        return self._call_log.row, self._call_log.number

    def find_later_keys(self, call: Call) -> pa.Table | None:
        """The keys that were invalidated after `call`; None if the log no longer has all of them."""
        call_log, (row, number) = self._call_log, call
        if (
            row not in (call_log.row, _NO_ROW)
            or not call_log.folded <= number <= call_log.number
            or call_log.recent is None
        ):
            return None
        return call_log.recent.filter(pc.greater(call_log.recent.column(_CALL), number)).select(self._names)

    def limits(self, hashes: Numbers, fields: Sequence[pa.Field], seed: Seed) -> Numbers | None:
        """For each key, by its hash, the time (steady clock) until which a load of the key does not count; NaN if each load counts.

        None if each load of each key counts. `fields`: the key columns. `seed`: the seed with which the keys were hashed. Rows that were
        loaded before the machine last started count as older than any limit.
        """
        call_log = self._call_log
        if call_log.recent is None and call_log.until_s is None:
            return None
        limits = np.full(len(hashes), np.nan if call_log.until_s is None else call_log.until_s)
        forgotten, times = self._hashed(call_log, fields, seed)
        if len(forgotten):
            places = np.minimum(np.searchsorted(forgotten, hashes), len(forgotten) - 1)
            is_invalidated = forgotten[places] == hashes
            limits[is_invalidated] = np.fmax(limits[is_invalidated], times[places[is_invalidated]])
        return limits

    def _hashed(self, call_log: _CallLog, fields: Sequence[pa.Field], seed: Seed) -> tuple[Numbers, Numbers]:
        """(hashes of the keys in the log, ascending; for each the time at which it was last invalidated)."""
        place = tuple(map(str, fields)), seed
        hashed = self._hashes.get(place)
        if hashed is None or hashed[0] is not call_log:
            hashed = self._hashes[place] = call_log, *_hash_recent(call_log.recent, fields, seed)
        return hashed[1:]

    def _read(self, disk: Disk) -> _CallLog:
        boot = self._context.clock.boot
        stored_log: _CallLog | None
        number, stored_log = disk.newest_record("invalidated", self._place, _parse_call_log)
        if stored_log is None:
            # The log was removed or is damaged. Any key may have been in it, so all rows that were loaded until now are loaded again.
            return _CallLog(number, boot, _NO_ROW, number, self._context.clock.steady_s() if number else None)
        call_log: _CallLog = dataclasses.replace(stored_log, number=number, boot=boot)
        if stored_log.boot != boot and call_log.recent is not None:
            times = pa.array(np.full(call_log.recent.num_rows, _EARLIER_BOOT_S))
            recent = call_log.recent.set_column(call_log.recent.schema.get_field_index(_AT), _AT, times)
            call_log = dataclasses.replace(call_log, recent=recent)
        if stored_log.boot != boot and call_log.until_s is not None:
            call_log = dataclasses.replace(call_log, until_s=_EARLIER_BOOT_S)
        return call_log

    # --- recording --------------------------------------------------------------------------------

    def add(self, keys: pa.Table) -> None:
        """Record that `keys`, which have no nulls, are invalidated now. Raises OSError if the host's cache directory cannot be written."""
        keys = keys.select(self._names).combine_chunks()
        disk, at_s = self._context.disk, self._context.clock.steady_s()
        if not keys.num_rows:
            return
        if disk is None:
            with self._lock:
                self._call_log = _add_call(self._call_log, at_s, keys)
            return
        for _ in range(_RACES):
            with self._lock:
                before = self._call_log = self._read(disk)
            row = before.row or f"{self._context.rng.getrandbits(64):016x}"
            after = _add_call(dataclasses.replace(before, row=row), at_s, keys)
            if disk.succeed_record("invalidated", self._place, before.number, _to_json(after)):
                return
        raise OSError(
            f"the invalidation of {keys.num_rows:,} keys ({', '.join(self._names)}) cannot be recorded: try again; if it fails again, run `pyspark-lookup check --repair` on the cache directory"
        )


def castable_keys(keys: pa.Table, fields: Sequence[pa.Field]) -> list[pa.Array]:
    """The key columns of `keys`, cast to the types of `fields`, without keys that have a null or cannot be cast.

    Raises SchemaError if the types of a column in `keys` and in `fields` do not compare without a loss.
    """
    arrays = cast_keys(keys, fields)
    valid = _valid(arrays, keys.num_rows)
    return arrays if valid.all() else [array.filter(pa.array(valid)) for array in arrays]


def _valid(arrays: Sequence[pa.Array], rows: int) -> Numbers:
    valid = np.ones(rows, np.bool_)
    for array in arrays:
        valid &= as_bools(array.is_valid())
    return valid


def _hash_recent(recent: pa.Table | None, fields: Sequence[pa.Field], seed: Seed) -> tuple[Numbers, Numbers]:
    try:
        arrays = [] if recent is None else cast_keys(recent, fields)
    except SchemaError:  # the key columns have other types now, so no cached key can be one of these
        arrays = []
    if recent is None or not arrays:
        return np.zeros(0, np.uint64), np.zeros(0, np.float64)
    valid = _valid(arrays, recent.num_rows)
    hashes, times = Keys(arrays).hashes(seed)[valid], np.asarray(one_array(recent.column(_AT)))[valid]
    order = np.lexsort((-times, hashes))
    hashes, first = np.unique(hashes[order], return_index=True)
    return hashes, times[order][first]


def _add_call(call_log: _CallLog, at_s: float, keys: pa.Table) -> _CallLog:
    """The log after one more call, which invalidates `keys` at `at_s`. If there are too many keys, the log forgets those of the earliest calls."""
    number, until_s, folded = call_log.number + 1, call_log.until_s, call_log.folded
    # The race: a process may stall after it has read the clock, while others record calls. So the time of a call is at least that of the
    # latest call before it.
    at_s = max([at_s, *_times(call_log)])
    beside = {_CALL: np.full(keys.num_rows, number), _AT: np.full(keys.num_rows, at_s)}
    recent = keys
    for name, values in beside.items():
        recent = recent.append_column(name, pa.array(values))
    if call_log.recent is not None:
        try:
            recent = _latest(
                pa.concat_tables([call_log.recent, recent], promote_options="permissive"), keys.column_names
            )
        except pa.ArrowException:  # the key columns have other types now
            until_s, folded = at_s, call_log.number
    while recent.nbytes > _BYTES_AT_MOST:
        calls, times = (np.asarray(one_array(recent.column(name))) for name in (_CALL, _AT))
        folded = int(calls[(len(calls) - 1) // 2])
        until_s = float(times[calls <= folded].max())
        recent = recent.filter(pa.array(calls > folded)).combine_chunks()
    return _CallLog(number, call_log.boot, call_log.row, folded, until_s, recent)


def _times(call_log: _CallLog) -> Iterator[float]:
    """The time of the latest call that the log has forgotten, if it has forgotten any; then the time of the latest call that it still has, if it has
    any."""
    if call_log.until_s is not None:
        yield call_log.until_s
    if call_log.recent is not None and call_log.recent.num_rows:
        yield float(np.asarray(one_array(call_log.recent.column(_AT))).max())


def _latest(keys: pa.Table, names: Sequence[str]) -> pa.Table:
    """Each of `keys` once, with the last call that names it, in the order of the calls."""
    keys = keys.take(as_indices(np.arange(keys.num_rows)[::-1]))
    repeated_keys = Keys([one_array(keys.column(name)) for name in names])
    first_places, _ = distinct_keys(repeated_keys, repeated_keys.hashes(SEED))
    return keys.take(as_indices(np.sort(first_places)[::-1])).combine_chunks()


def _to_json(call_log: _CallLog) -> dict[str, Any]:
    assert call_log.recent is not None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, call_log.recent.schema) as writer:
        writer.write_table(call_log.recent)
    text = base64.b64encode(sink.getvalue()).decode()
    return {
        "row": call_log.row,
        "folded": call_log.folded,
        "until_s": call_log.until_s,
        "recent": text,
        "boot": call_log.boot,
    }


def _parse_call_log(record: Any) -> _CallLog:
    """The log that `_to_json` returned, with the number 0. Raises ValueError for any other value."""
    try:
        recent = pa.ipc.open_stream(pa.py_buffer(base64.b64decode(as_text(record["recent"]), validate=True))).read_all()
        recent.validate(full=True)
    except (OSError, pa.ArrowException) as problem:
        raise ValueError(str(problem)) from None
    if recent.schema.field(_CALL).type != pa.int64() or recent.schema.field(_AT).type != pa.float64():
        raise ValueError("the number or time of a key's latest invalidation has the wrong type")
    until_s = record["until_s"]
    return _CallLog(
        0,
        as_text(record["boot"]),
        as_text(record["row"]),
        as_count(record["folded"]),
        None if until_s is None else as_number(until_s),
        recent,
    )
