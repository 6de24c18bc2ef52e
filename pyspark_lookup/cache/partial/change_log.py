"""`ChangeLog`: a log of the keys that have changed from version to version of a table that can name them, kept for all processes of a host.

Each new version is one step of the log. Its keys are those that may have changed between the version of the step before and the moment at which the
table was asked for them. A load that begins after a process has read step n of the log returns rows that are at least as new as the version of
step n. So it is right for every later step, unless one of the steps after n names its key.

The race: a process may be slow, and bring a version that another process has found and left behind long ago. So the versions of neighbouring
steps need not be neighbours in the table's history. This does no harm. A process asks which keys have changed since the version of the last step
only after its own version has been found. The answer covers the time up to now, whichever of the two versions is the older one. Each step begins
before the one before it ends, so no change is between two steps.

If a version that the log already has comes back as the table's current version, the table was set back (to a backup, for instance). Then
a row may be older than the rows of both versions, and all keys count as changed.
"""

from __future__ import annotations

import base64
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pyspark_lookup.cache.partial.host_cache import Freshness
from pyspark_lookup.columnar.keys import SEED, Keys, Numbers, one_array
from pyspark_lookup.core.decoding import UNREADABLE, as_count, as_name, as_text, as_texts
from pyspark_lookup.scan.table_scan import ChangedKeys
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.versions.model import TableVersion

FindChanges = Callable[[TableVersion, TableVersion, pa.Schema], "ChangedKeys | None"]
"""A function with the contract of `TableScan.changed_keys`."""

_STEPS_AT_MOST = 256
# A key is worth its place in the log as long as it costs less than the loads that it saves. It takes some 30 bytes and less than a microsecond,
# a load of a cached key takes at least ten microseconds of the other system. So only memory bounds the log: this is about a million numbers.
_BYTES_AT_MOST = 16 * 1024 * 1024
_RACES = 1000  # how often a process tries to add its version, while other processes are faster
_LOCK_WAIT_S = (
    1.0  # then a process asks for the changes, although another process does so at the moment: its call may hang
)


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step: `name` is the record of its keys, of which there are `rows` with `size` bytes."""

    number: int
    name: str
    rows: int
    size: int


@dataclasses.dataclass(frozen=True)
class _State:
    """The log. `number`: the number of the latest step, `version` the version of this step, as JSON, and `digest` its digest.

    `row`: the name of the log: if the cache directory is removed, a log with another name begins. `steps`: the latest steps without a gap, the
    latest one last. All keys count as changed in the steps before. `known`: the digests of the versions of the steps in the log, and of some
    earlier ones.
    """

    row: str
    number: int
    version: Any
    digest: str
    known: tuple[str, ...]
    steps: tuple[_Step, ...] = ()

    @property
    def base(self) -> int:
        """The earliest step after which all changes are known."""
        return self.number - len(self.steps)

    def to_json(self) -> dict[str, Any]:
        steps = [(step.number, step.name, step.rows, step.size) for step in self.steps]
        parts = {"row": self.row, "number": self.number, "version": self.version, "digest": self.digest}
        return {**parts, "known": self.known, "steps": steps}

    @classmethod
    def from_json(cls, record: Any) -> _State:
        """The state that `to_json` returned. Raises one of `decoding.UNREADABLE` for any other value."""
        steps = tuple(
            _Step(as_count(number), as_name(name), as_count(rows), as_count(size))
            for number, name, rows, size in record["steps"]
        )
        number = as_count(record["number"])
        if [step.number for step in steps] != list(range(number - len(steps) + 1, number + 1)):
            raise ValueError("the steps have a gap")
        known = as_texts(record["known"])
        return cls(as_name(record["row"]), number, record["version"], as_name(record["digest"]), known, steps)


class ChangeLog:
    """The log of one table by the key columns `keys`. `place`: the key of its record. Without a cache directory, it is this process's own.

    `steps_at_most`, `bytes_at_most`: how many steps, and how many bytes of keys, the log has. When it has more, it forgets the earliest steps.
    """

    def __init__(
        self,
        context: HostContext,
        place: str,
        keys: pa.Schema,
        steps_at_most: int = _STEPS_AT_MOST,
        bytes_at_most: int = _BYTES_AT_MOST,
    ) -> None:
        self._context = context
        self._place = place
        self._keys = keys
        self._steps_at_most = steps_at_most
        self._bytes_at_most = bytes_at_most
        self._nonce = f"{context.rng.getrandbits(64):016x}"
        self._lock = threading.RLock()
        self._tables: dict[str, pa.Table] = {}
        self._lost = 0  # the latest step whose record was found to be lost
        # (the log's name, the latest step in the next two, hashes of changed keys, ascending, for each the latest step that changed it)
        self._changed: tuple[str, int, Numbers, Numbers] = "", 0, np.zeros(0, np.uint64), np.zeros(0, np.int64)
        disk = context.disk
        self._own: _State | None = None
        self._held = None if disk is None else disk.hold_newest("changes", place, _State.from_json)

    # --- the log ----------------------------------------------------------------------------------

    def fresh(
        self,
        version: TableVersion,
        columns: pa.Schema,
        newest: Callable[[], str | None],
        find_changes: FindChanges,
    ) -> Freshness:
        """The `Freshness` with which to look up the columns `columns` in `version`. First adds the version to the log, unless the log covers it.

        `newest`: returns the digest of the version that this host has found last; None if it does not know.
        """
        state = self._state()
        if not _covers(state, version, newest):
            try:
                state = self._advance(version, newest, find_changes)
            except OSError:
                self._context.metrics.inc("cacheFailureCount")
                state = None
        if state is None or not _covers(state, version, newest):
            # The log cannot be written: rows that are loaded now are for this process and version alone.
            return Freshness(f"{version.digest}-{self._nonce}", columns, lambda old, keys: None)
        number, row = state.number, state.row
        return Freshness(
            _name(row, number),
            columns,
            lambda old, keys: self._may_differ(row, old, keys),
            lambda: (latest := self._state()) is not None and (latest.row, latest.number) == (row, number),
            lambda old: self._later_keys(row, old),
            self._fades,
        )

    def _advance(
        self, version: TableVersion, newest: Callable[[], str | None], find_changes: FindChanges
    ) -> _State | None:
        """Add a step for `version`, unless another process has done so meanwhile. Returns the log."""
        disk = self._context.disk
        if disk is None:
            with self._lock:
                if not _covers(self._own, version, newest):
                    number = 0 if self._own is None else self._own.number
                    self._own, _ = self._with_step(self._own, number, version, find_changes)
                return self._own
        with disk.hold("changes", self._place, _LOCK_WAIT_S):
            for _ in range(_RACES):
                number, state = disk.newest_record("changes", self._place, _State.from_json)
                if _covers(state, version, newest):
                    return state
                after, keys = self._with_step(state, number, version, find_changes)
                # The keys are on record before the step is, so that whoever reads the step can read its keys.
                if keys is not None:
                    disk.replace_record("changed", self._beside(after.steps[-1].name), _to_text(keys))
                if disk.succeed_record("changes", self._place, number, after.to_json()):
                    for step in () if state is None else state.steps:
                        if step.number <= after.base:
                            disk.remove_record("changed", self._beside(step.name))
                    return after
                if keys is not None:
                    disk.remove_record("changed", self._beside(after.steps[-1].name))
        return None

    def _with_step(
        self, before: _State | None, number: int, version: TableVersion, find_changes: FindChanges
    ) -> tuple[_State, pa.Table | None]:
        """(the log with one more step after the step `number`, for `version`; the keys of the new step, or None if there are none to record)."""
        row = f"{self._context.rng.getrandbits(64):016x}" if before is None else before.row
        known = () if before is None else tuple(digest for digest in before.known if digest != version.digest)
        known = (*known, version.digest)[-_STEPS_AT_MOST:]
        after = _State(row, number + 1, version.to_json(statistics=False), version.digest, known)
        keys = self._ask(before, version, find_changes)
        if before is None or keys is None:
            return after, None
        name = f"{self._context.rng.getrandbits(64):016x}"
        steps = [*before.steps, _Step(number + 1, name, keys.num_rows, keys.nbytes)]
        while len(steps) > self._steps_at_most or sum(step.size for step in steps) > self._bytes_at_most:
            del steps[0]
        with self._lock:
            self._tables[name] = keys
        return dataclasses.replace(after, steps=tuple(steps)), keys if keys.num_rows else None

    def _ask(self, before: _State | None, version: TableVersion, find_changes: FindChanges) -> pa.Table | None:
        """The keys that have changed since the last step; None if any key may have."""
        if before is None or version.digest in before.known:
            return None
        try:
            since = TableVersion.from_json(version.table_id, before.version)
        except UNREADABLE:
            return None
        changed = find_changes(since, version, self._keys)
        return None if changed is None or changed.keys.nbytes > self._bytes_at_most else changed.keys

    def _state(self) -> _State | None:
        return self._own if self._held is None else self._held.get()[1]

    def _beside(self, name: str) -> str:
        return f"{self._place}-{name}"

    # --- what has changed since a step --------------------------------------------------------------

    def _number(self, row: str, old: str) -> int | None:
        """The number of the step that `_name` has named `old`; None if it is of another log, or if not all changes since then are known."""
        state, prefix = self._state(), f"{row}."
        if state is None or state.row != row or not old.startswith(prefix) or not old.removeprefix(prefix).isdecimal():
            return None
        number = int(old.removeprefix(prefix))
        return number if number >= max(state.base, self._lost) else None

    def _may_differ(self, row: str, old: str, keys: Sequence[pa.Array]) -> Numbers | None:
        """For each key, whether it has changed since the step `old`; None if any key may have."""
        hashes, numbers = self._hashes()
        number = self._number(row, old)
        if number is None:
            return None
        if not len(hashes):
            return np.zeros(len(keys[0]), np.bool_)
        key_hashes = Keys(keys).hashes(SEED)
        places = np.minimum(np.searchsorted(hashes, key_hashes), len(hashes) - 1)
        return np.asarray((hashes[places] == key_hashes) & (numbers[places] > number))

    def _later_keys(self, row: str, old: str) -> pa.Table | None:
        """The keys that have changed since the step `old`; None if any key may have."""
        state = self._state()
        with self._lock:
            tables = [self._keys_of(step) for step in (() if state is None else state.steps)]
        number = self._number(row, old)
        if state is None or number is None:
            return None
        later = [t for step, t in zip(state.steps, tables, strict=True) if t is not None and step.number > number]
        return pa.concat_tables([self._keys.empty_table(), *later])

    def _fades(self, old: str) -> bool:
        """Whether the log will soon forget the steps after `old`, because they are half of all steps, or have half of the bytes."""
        state = self._state()
        number = None if state is None else self._number(state.row, old)
        if state is None or number is None:
            return False
        later = [step.size for step in state.steps if step.number > number]
        return len(later) > self._steps_at_most // 2 or sum(later) > self._bytes_at_most // 2

    def _hashes(self) -> tuple[Numbers, Numbers]:
        """(the hashes of all keys in the log, ascending; for each the latest step that names it)."""
        state = self._state()
        with self._lock:
            row, latest, hashes, numbers = self._changed
            if state is None or (state.row, state.number) == (row, latest):
                return hashes, numbers
            if state.row != row:
                latest, hashes, numbers = 0, np.zeros(0, np.uint64), np.zeros(0, np.int64)
            parts, part_numbers = [hashes], [numbers]
            for step in state.steps:
                if step.number > latest and (keys := self._keys_of(step)) is not None:
                    parts.append(Keys([one_array(column) for column in keys.columns]).hashes(SEED))
                    part_numbers.append(np.full(keys.num_rows, step.number))
            hashes, numbers = np.concatenate(parts), np.concatenate(part_numbers)
            order = np.lexsort((-numbers, hashes))
            order = order[numbers[order] > state.base]
            hashes, first = np.unique(hashes[order], return_index=True)
            numbers = numbers[order][first]
            self._changed = state.row, state.number, hashes, numbers
            names = {step.name for step in state.steps}
            self._tables = {name: table for name, table in self._tables.items() if name in names}
            return hashes, numbers

    def _keys_of(self, step: _Step) -> pa.Table | None:
        """The keys of a step; None if their record is lost."""
        table = self._tables.get(step.name)
        if table is None and not step.rows:
            table = self._keys.empty_table()
        if table is None and self._context.disk is not None:
            table = self._context.disk.get_record("changed", self._beside(step.name), self._parse)
        if table is None:
            self._lost = max(self._lost, step.number)
        else:
            self._tables[step.name] = table
        return table

    def _parse(self, record: Any) -> pa.Table:
        """The keys that `_to_text` returned as text. Raises ValueError if they are damaged, or are other columns."""
        try:
            table = pa.ipc.open_stream(pa.py_buffer(base64.b64decode(as_text(record), validate=True))).read_all()
            table.validate(full=True)
        except (OSError, pa.ArrowException) as problem:
            raise ValueError(str(problem)) from None
        if table.schema != self._keys or any(column.null_count for column in table.columns):
            raise ValueError("the columns of the keys differ from those expected")
        return table


def _covers(state: _State | None, version: TableVersion, newest: Callable[[], str | None]) -> bool:
    """Whether rows that are right for the log's last step are at least as new as `version`, which some process has found.

    They are if the step is of this version. They also are if this host has found another version since, and the log has that one already, or
    this one in an earlier step.
    """
    if state is None or state.digest == version.digest:
        return state is not None
    last = newest()
    return last is not None and last != version.digest and (state.digest == last or version.digest in state.known)


def _name(row: str, number: int) -> str:
    return f"{row}.{number}"


def _to_text(keys: pa.Table) -> str:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, keys.schema) as writer:
        writer.write_table(keys)
    return base64.b64encode(sink.getvalue()).decode()
