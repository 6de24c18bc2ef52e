"""`Invalidations`: which keys of a table this host is to forget, for all of its processes.

What a process holds of them it forgets at its next lookup. What the host shares lies in files that nobody changes: there an
entry that was loaded before its key was invalidated does not count, and neither does a load that had begun before.
Only so many keys are on record; of earlier ones it is known until when: what was loaded before that is loaded again.
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

from pyspark_lookup.base.decoding import count_of, number_of, text_of
from pyspark_lookup.base.errors import SchemaError
from pyspark_lookup.columnar.key_rows import SEED, distinct_keys
from pyspark_lookup.columnar.keys import Keys, Numbers, Seed, as_indices, bits_of, cast_keys, one_array
from pyspark_lookup.io.context import HostContext
from pyspark_lookup.io.disk import Disk

_BYTES_AT_MOST = 1024 * 1024
_EARLIER_BOOT_S = -1.0  # on the steady clock, whose times are no less than zero
_RACES = 1000  # that one call may lose: others go on faster
_NO_ROW = ""
_CALL, _AT = "invalidated:call", "invalidated:at_s"  # beside each key: which call was the latest for it, and when

Call = tuple[str, int]
"""A call by its row and its number there."""
NO_CALL: Call = (_NO_ROW, 0)


@dataclasses.dataclass(frozen=True)
class _Known:
    """What is known after `number` calls. `recent`: the keys of those after the first `folded`; all of these came before `until_s`.

    `row`: which row of calls they are counted in; another one begins where the directory was removed.
    """

    number: int
    boot: str
    row: str = _NO_ROW
    folded: int = 0
    until_s: float | None = None
    recent: pa.Table | None = None


class Invalidations:
    """Keys by the columns `names` of the table that `place` names. Without a cache directory those of this process."""

    def __init__(self, context: HostContext, place: str, names: Sequence[str]) -> None:
        self._context = context
        self._place = place
        self._names = sorted(names)
        self._known = _Known(0, context.clock.boot)
        self._lock = threading.Lock()
        self._signs: object = None
        self._hashes: dict[object, tuple[_Known, Numbers, Numbers]] = {}

    # --- asking -----------------------------------------------------------------------------------

    def refresh(self) -> Call:
        """Learn what others have put on record; the latest call so far."""
        disk = self._context.disk
        if disk is not None and (signs := disk.newest_signs("invalidated", self._place)) != self._signs:
            with self._lock:
                self._known, self._signs = self._read(disk), signs
        return self._known.row, self._known.number

    def since(self, call: Call) -> pa.Table | None:
        """The keys of the calls after this one; None if it is not known which these were."""
        known, (row, number) = self._known, call
        if row not in (known.row, _NO_ROW) or not known.folded <= number <= known.number or known.recent is None:
            return None
        return known.recent.filter(pc.greater(known.recent.column(_CALL), number)).select(self._names)

    def limits(self, hashes: Numbers, fields: Sequence[pa.Field], seed: Seed) -> Numbers | None:
        """For each key, by its hash, the time before which its rows must not have been loaded (NaN: any); None: any of all.

        `fields`: of the key columns, as they were hashed with `seed`. Rows of another boot were loaded before every time.
        """
        known = self._known
        if known.recent is None and known.until_s is None:
            return None
        limits = np.full(len(hashes), np.nan if known.until_s is None else known.until_s)
        forgotten, times = self._hashed(known, fields, seed)
        if len(forgotten):
            at = np.minimum(np.searchsorted(forgotten, hashes), len(forgotten) - 1)
            found = forgotten[at] == hashes
            limits[found] = np.fmax(limits[found], times[at[found]])
        return limits

    def _hashed(self, known: _Known, fields: Sequence[pa.Field], seed: Seed) -> tuple[Numbers, Numbers]:
        """(hashes of the keys on record, ascending; for each when it was invalidated last)."""
        place = tuple(map(str, fields)), seed
        held = self._hashes.get(place)
        if held is None or held[0] is not known:
            held = self._hashes[place] = known, *_hashes_of(known.recent, fields, seed)
        return held[1:]

    def _read(self, disk: Disk) -> _Known:
        boot = self._context.clock.boot
        found: _Known | None
        number, found = disk.newest_record("invalidated", self._place, _known_of)
        if found is None:
            # None are on record any more, or they cannot be read: then all that was loaded until now may be among them.
            return _Known(number, boot, _NO_ROW, number, self._context.clock.steady_s() if number else None)
        known: _Known = dataclasses.replace(found, number=number, boot=boot)
        if found.boot != boot and known.recent is not None:
            early = pa.array(np.full(known.recent.num_rows, _EARLIER_BOOT_S))
            recent = known.recent.set_column(known.recent.schema.get_field_index(_AT), _AT, early)
            known = dataclasses.replace(known, recent=recent)
        if found.boot != boot and known.until_s is not None:
            known = dataclasses.replace(known, until_s=_EARLIER_BOOT_S)
        return known

    # --- saying -----------------------------------------------------------------------------------

    def add(self, keys: pa.Table) -> None:
        """Have these keys forgotten, which have no nulls. OSError if the host's cache directory cannot be written."""
        keys = keys.select(self._names).combine_chunks()
        disk, at_s = self._context.disk, self._context.clock.steady_s()
        if not keys.num_rows:
            return
        if disk is None:
            with self._lock:
                self._known = _with(self._known, at_s, keys)
            return
        for _ in range(_RACES):
            with self._lock:
                before = self._known = self._read(disk)
            row = before.row or f"{self._context.rng.getrandbits(64):016x}"
            after = _with(dataclasses.replace(before, row=row), at_s, keys)
            if disk.succeed_record("invalidated", self._place, before.number, _to_json(after)):
                return
        raise OSError("the keys to be forgotten cannot be put on record: is the cache directory whole?")


def castable_keys(keys: pa.Table, fields: Sequence[pa.Field]) -> list[pa.Array]:
    """Those of the keys that may be keys of these types, as columns; none with a null. Raises SchemaError for another family of types."""
    arrays = cast_keys(keys, fields)
    valid = _valid(arrays, keys.num_rows)
    return arrays if valid.all() else [array.filter(pa.array(valid)) for array in arrays]


def _valid(arrays: Sequence[pa.Array], rows: int) -> Numbers:
    valid = np.ones(rows, np.bool_)
    for array in arrays:
        valid &= bits_of(array.is_valid())
    return valid


def _hashes_of(recent: pa.Table | None, fields: Sequence[pa.Field], seed: Seed) -> tuple[Numbers, Numbers]:
    try:
        arrays = [] if recent is None else cast_keys(recent, fields)
    except SchemaError:  # the columns are of other types by now, and no entry has such keys
        arrays = []
    if recent is None or not arrays:
        return np.zeros(0, np.uint64), np.zeros(0, np.float64)
    valid = _valid(arrays, recent.num_rows)
    hashes, times = Keys(arrays).hashes(seed)[valid], np.asarray(one_array(recent.column(_AT)))[valid]
    order = np.lexsort((-times, hashes))
    hashes, first = np.unique(hashes[order], return_index=True)
    return hashes, times[order][first]


def _with(known: _Known, at_s: float, keys: pa.Table) -> _Known:
    """What is known after a call for `keys` at a time; the earliest keys go where there are too many."""
    number, until_s, folded = known.number + 1, known.until_s, known.folded
    # A caller may stall between its look at the clock and this, while others come and go: no limit may go back.
    at_s = max([at_s, *_times(known)])
    beside = {_CALL: np.full(keys.num_rows, number), _AT: np.full(keys.num_rows, at_s)}
    recent = keys
    for name, values in beside.items():
        recent = recent.append_column(name, pa.array(values))
    if known.recent is not None:
        try:
            recent = _latest(pa.concat_tables([known.recent, recent], promote_options="permissive"), keys.column_names)
        except pa.ArrowException:  # they are of other types by now
            until_s, folded = at_s, known.number
    while recent.nbytes > _BYTES_AT_MOST:
        calls, times = (np.asarray(one_array(recent.column(name))) for name in (_CALL, _AT))
        folded = int(calls[(len(calls) - 1) // 2])
        until_s = float(times[calls <= folded].max())
        recent = recent.filter(pa.array(calls > folded)).combine_chunks()
    return _Known(number, known.boot, known.row, folded, until_s, recent)


def _times(known: _Known) -> Iterator[float]:
    """The latest times that are known: of the calls that are folded, and of the others."""
    if known.until_s is not None:
        yield known.until_s
    if known.recent is not None and known.recent.num_rows:
        yield float(np.asarray(one_array(known.recent.column(_AT))).max())


def _latest(keys: pa.Table, names: Sequence[str]) -> pa.Table:
    """Each key with its latest call only, in the order of the calls."""
    keys = keys.take(as_indices(np.arange(keys.num_rows)[::-1]))
    asked = Keys([one_array(keys.column(name)) for name in names])
    chosen, _ = distinct_keys(asked, asked.hashes(SEED))
    return keys.take(as_indices(np.sort(chosen)[::-1])).combine_chunks()


def _to_json(known: _Known) -> dict[str, Any]:
    assert known.recent is not None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, known.recent.schema) as writer:
        writer.write_table(known.recent)
    text = base64.b64encode(sink.getvalue()).decode()
    return {"row": known.row, "folded": known.folded, "until_s": known.until_s, "recent": text, "boot": known.boot}


def _known_of(found: Any) -> _Known:
    """What a record has to be; its number is that of its file."""
    try:
        recent = pa.ipc.open_stream(pa.py_buffer(base64.b64decode(text_of(found["recent"]), validate=True))).read_all()
        recent.validate(full=True)
    except (OSError, pa.ArrowException) as problem:
        raise ValueError(str(problem)) from None
    if recent.schema.field(_CALL).type != pa.int64() or recent.schema.field(_AT).type != pa.float64():
        raise ValueError("a key has the number and the time of its latest call")
    until_s = found["until_s"]
    return _Known(
        0,
        text_of(found["boot"]),
        text_of(found["row"]),
        count_of(found["folded"]),
        None if until_s is None else number_of(until_s),
        recent,
    )
