"""`Invalidations`: the keys of a table that were invalidated on this host, for all of its processes.

A process drops these keys from its own cache at its next lookup. The host's shared files are never changed: rows in them do not count if
their load began before their key was invalidated. The log of keys is bounded. For the keys that no longer fit, it keeps only the latest
time at which one was invalidated: everything that was loaded before is loaded again.
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
_EARLIER_BOOT_S = -1.0  # on the steady clock, whose times are 0 or more
_RACES = 1000  # attempts of one call to be recorded, while other calls are faster
_NO_ROW = ""
_CALL, _AT = "invalidated:call", "invalidated:at_s"  # for each key: its latest call, and the time of that

Call = tuple[str, int]
"""A call of `invalidate`: (the name of the log in which it is recorded, its number there)."""
NO_CALL: Call = (_NO_ROW, 0)


@dataclasses.dataclass(frozen=True)
class _CallLog:
    """The log of calls of `invalidate`: their `number`, and the `recent` calls with their keys.

    The first `folded` calls are no longer listed; all of them came before `until_s`. `row`: the name of this log; a new one begins if the
    cache directory was removed.
    """

    number: int
    boot: str
    row: str = _NO_ROW
    folded: int = 0
    until_s: float | None = None
    recent: pa.Table | None = None


class Invalidations:
    """The invalidated keys (columns `names`) of one table. `place`: the key of their record. Without a cache directory, only this process's."""

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
        """Read the calls that other processes have recorded. Returns the latest call so far."""
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
        """For each key, by its hash, the time before which a load of the key does not count. NaN: no limit; None: no limit for any key.

        `fields`: the key columns, whose values were hashed with `seed`. Rows that were loaded before this boot count as older than every
        limit.
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
        """(hashes of the recorded keys, ascending; for each the time of its last invalidation)."""
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
            # The log was removed or is damaged. It may have had any key, so everything that was loaded until now is loaded again.
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
        """Record the invalidation of these keys, which have no nulls. Raises OSError if the host's cache directory cannot be written."""
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
            f"the invalidation of {keys.num_rows:,} keys ({', '.join(self._names)}) cannot be recorded: run `pyspark-lookup check` on the cache directory"
        )


def castable_keys(keys: pa.Table, fields: Sequence[pa.Field]) -> list[pa.Array]:
    """The keys without nulls that can be cast to these types, as columns. Raises SchemaError if the types do not go together."""
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
    except SchemaError:  # the columns now have other types, so no entry has such keys
        arrays = []
    if recent is None or not arrays:
        return np.zeros(0, np.uint64), np.zeros(0, np.float64)
    valid = _valid(arrays, recent.num_rows)
    hashes, times = Keys(arrays).hashes(seed)[valid], np.asarray(one_array(recent.column(_AT)))[valid]
    order = np.lexsort((-times, hashes))
    hashes, first = np.unique(hashes[order], return_index=True)
    return hashes, times[order][first]


def _add_call(call_log: _CallLog, at_s: float, keys: pa.Table) -> _CallLog:
    """The log after one more call for `keys` at a time. If there are too many keys, those of the earliest calls are folded."""
    number, until_s, folded = call_log.number + 1, call_log.until_s, call_log.folded
    # The race: a caller may stall after it has read the clock, while later calls are recorded. So a call's time is never before that
    # of an earlier call.
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
        except pa.ArrowException:  # the keys now have other types
            until_s, folded = at_s, call_log.number
    while recent.nbytes > _BYTES_AT_MOST:
        calls, times = (np.asarray(one_array(recent.column(name))) for name in (_CALL, _AT))
        folded = int(calls[(len(calls) - 1) // 2])
        until_s = float(times[calls <= folded].max())
        recent = recent.filter(pa.array(calls > folded)).combine_chunks()
    return _CallLog(number, call_log.boot, call_log.row, folded, until_s, recent)


def _times(call_log: _CallLog) -> Iterator[float]:
    """The latest time of the folded calls, and the latest of the others."""
    if call_log.until_s is not None:
        yield call_log.until_s
    if call_log.recent is not None and call_log.recent.num_rows:
        yield float(np.asarray(one_array(call_log.recent.column(_AT))).max())


def _latest(keys: pa.Table, names: Sequence[str]) -> pa.Table:
    """Each key once, with its latest call, in the order of the calls."""
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
    """The log in a record, without its number, which its file has. Raises ValueError if it is malformed."""
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
