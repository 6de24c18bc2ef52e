"""`Invalidations`: which keys of a table this host is to forget, for all of its processes.

What a process holds of them it forgets at its next lookup. What the host shares lies in files that nobody changes: there an
entry that was loaded before its key was invalidated does not count, and neither does a load that had begun before.
Only so many keys are on record; of earlier ones it is known until when: what was loaded before that is loaded again.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pyspark_lookup.base.decoding import number_of, text_of
from pyspark_lookup.base.errors import SchemaError
from pyspark_lookup.columnar.keys import Keys, Numbers, Seed, bits_of, cast_keys
from pyspark_lookup.io.context import HostContext
from pyspark_lookup.io.disk import Disk

_BYTES_AT_MOST = 4 * 1024 * 1024
_EARLIER_BOOT_S = -1.0  # on the steady clock, whose times are no less than zero
_RACES = 1000  # that one call may lose: others go on faster


@dataclasses.dataclass(frozen=True)
class _Known:
    """The record with this number. `recent`: the latest calls, each with its time on the clock of `boot`; all before `until_s`."""

    number: int = 0
    until_s: float | None = None
    recent: tuple[tuple[float, pa.Table], ...] = ()
    boot: str = ""


class Invalidations:
    """Keys by the columns `names` of the table that `place` names. Without a cache directory those of this process."""

    def __init__(self, context: HostContext, place: str, names: Sequence[str]) -> None:
        self._context = context
        self._place = place
        self._names = sorted(names)
        self._known = _Known(boot=context.clock.boot)
        self._lock = threading.Lock()
        self._limits: tuple[object, Numbers, Numbers] | None = None

    # --- asking -----------------------------------------------------------------------------------

    def refresh(self) -> int:
        """Learn what others have put on record; the number of calls so far."""
        disk = self._context.disk
        if disk is None:
            return self._known.number
        if disk.newest_number("invalidated", self._place) != self._known.number:
            with self._lock:
                self._known = self._read(disk)
        return self._known.number

    def since(self, number: int) -> list[pa.Table] | None:
        """The keys of the calls after the one of that number; None if it is not known which these were."""
        known = self._known
        news = known.number - number
        if not 0 <= news <= len(known.recent):
            return None
        return [keys for _, keys in known.recent[len(known.recent) - news :]]

    def limits(self, hashes: Numbers, fields: Sequence[pa.Field], seed: Seed) -> Numbers | None:
        """For each key, by its hash, the time before which its rows must not have been loaded (NaN: any); None: any of all.

        `fields`: of the key columns, as they were hashed with `seed`. Rows of another boot were loaded before every time.
        """
        known = self._known
        if not known.recent and known.until_s is None:
            return None
        limits = np.full(len(hashes), np.nan if known.until_s is None else known.until_s)
        forgotten, times = self._hashed(known, fields, seed)
        if len(forgotten):
            at = np.minimum(np.searchsorted(forgotten, hashes), len(forgotten) - 1)
            found = forgotten[at] == hashes
            limits[found] = times[at[found]]
        return limits

    def _hashed(self, known: _Known, fields: Sequence[pa.Field], seed: Seed) -> tuple[Numbers, Numbers]:
        """(hashes of the keys on record, ascending; for each when it was invalidated last)."""
        wanted = known.number, [str(field) for field in fields], seed
        with self._lock:
            if self._limits is not None and self._limits[0] == wanted:
                return self._limits[1:]
        hashes, times = [np.zeros(0, np.uint64)], [np.zeros(0, np.float64)]
        for at_s, keys in known.recent:
            with contextlib.suppress(SchemaError):  # the columns are of other types by now, and no entry has such keys
                found = Keys(castable_keys(keys, fields))
                hashes.append(found.hashes(seed))
                times.append(np.full(found.rows, at_s))
        every, when = np.concatenate(hashes), np.concatenate(times)
        order = np.lexsort((-when, every))
        every, first = np.unique(every[order], return_index=True)
        with self._lock:
            self._limits = wanted, every, when[order][first]
        return every, when[order][first]

    def _read(self, disk: Disk) -> _Known:
        number, found = disk.newest_record("invalidated", self._place, _recent_of)
        if found is None:
            # None are on record any more, or they cannot be read: then all that was loaded until now may be among them.
            return _Known(number, self._context.clock.steady_s() if number else None, (), self._context.clock.boot)
        until_s, recent, boot = found
        if boot != self._context.clock.boot:
            until_s = None if until_s is None else _EARLIER_BOOT_S
            recent = tuple((_EARLIER_BOOT_S, keys) for _, keys in recent)
        return _Known(number, until_s, recent, self._context.clock.boot)

    # --- saying -----------------------------------------------------------------------------------

    def add(self, keys: pa.Table) -> None:
        """Have these keys forgotten, which have no nulls. OSError if the host's cache directory cannot be written."""
        keys = keys.select(self._names).combine_chunks()
        disk = self._context.disk
        at_s = self._context.clock.steady_s()
        if disk is None:
            with self._lock:
                self._known = _with(self._known, at_s, keys)
            return
        for _ in range(_RACES):
            with self._lock:
                before = self._known = self._read(disk)
            if disk.succeed_record("invalidated", self._place, before.number, _to_json(_with(before, at_s, keys))):
                return
        raise OSError("the keys to be forgotten cannot be put on record: is the cache directory whole?")


def castable_keys(keys: pa.Table, fields: Sequence[pa.Field]) -> list[pa.Array]:
    """Those of the keys that may be keys of these types, as columns; none with a null. Raises SchemaError for another family of types."""
    arrays = cast_keys(keys, fields)
    valid = np.ones(keys.num_rows, np.bool_)
    for array in arrays:
        valid &= bits_of(array.is_valid())
    return arrays if valid.all() else [array.filter(pa.array(valid)) for array in arrays]


def _with(known: _Known, at_s: float, keys: pa.Table) -> _Known:
    """What is known after a call for `keys` at a time; the earliest keys go where there are too many."""
    recent, until_s = [*known.recent, (at_s, keys)], known.until_s
    while sum(some.nbytes for _, some in recent) > _BYTES_AT_MOST:
        until_s = recent.pop(0)[0]
    return _Known(known.number + 1, until_s, tuple(recent), known.boot)


def _to_json(known: _Known) -> dict[str, Any]:
    recent = []
    for at_s, keys in known.recent:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, keys.schema) as writer:
            writer.write_table(keys)
        recent.append([at_s, base64.b64encode(sink.getvalue()).decode()])
    return {"until_s": known.until_s, "recent": recent, "boot": known.boot}


def _recent_of(found: Any) -> tuple[float | None, tuple[tuple[float, pa.Table], ...], str]:
    """What a record has to be."""
    recent = []
    for at_s, text in found["recent"]:
        try:
            keys = pa.ipc.open_stream(pa.py_buffer(base64.b64decode(text_of(text), validate=True))).read_all()
            keys.validate(full=True)
        except (OSError, pa.ArrowException) as problem:
            raise ValueError(str(problem)) from None
        recent.append((number_of(at_s), keys))
    until_s = found["until_s"]
    return None if until_s is None else number_of(until_s), tuple(recent), text_of(found["boot"])
