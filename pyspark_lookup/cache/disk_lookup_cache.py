"""`DiskCacheLookupCache`: FLIP-221's cache in a database of diskcache, which outlives its process, and which the processes of a host share.

The connection to the database is opened for each operation, and closed after it. No operation runs while this process forks. So nothing that
was opened before a fork is used after it: not even SQLite's own memory of the locks that a process has.

An entry has the rows of one key. It names the version of the table that the rows are of, when they were loaded, and which columns they have,
and it has a checksum over all of it, the key included. An entry that is not as it should be is a miss. So is every failure of the database.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import logging
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa

from pyspark_lookup.cache.lookup_cache import CachedRows, EntryRules, LookupCache
from pyspark_lookup.cache.memory.default_cache import group_rows
from pyspark_lookup.columnar.keys import KEY_INDEX, KeyColumn, Keys, Numbers, as_indices, check_key_types, one_array
from pyspark_lookup.columnar.types import spark_type
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.forks import ForkGate
from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import NotSupportedError, foreign_repr

if TYPE_CHECKING:
    from pyspark_lookup.cache.diskcache_database import Database

T = TypeVar("T")

DATABASES = "diskcache"
"""The directory below the host's cache directory that has the databases which the options ask for."""
_log = logging.getLogger("pyspark_lookup.diskcache")
_LEAST_BYTES = 2**20  # an empty database has 50 kB
_WAIT_S = 1.0
_AFTER_FAILURE_S = 10.0  # the database is then left alone for this long, so that failures do not slow down lookups
_NAME_BYTES, _CHECK_BYTES = 20, 8
_HEADER = struct.Struct(
    "<4s8s8s8sddIH"
)  # magic, checksum, digest of the boot, digest of the columns, times, rows, length of the version
_MAGIC = b"LKC1"
_CHECK = slice(4, 4 + _CHECK_BYTES)


def require_diskcache() -> None:
    """Raise NotSupportedError if diskcache is not installed."""
    if importlib.util.find_spec("diskcache") is None:
        raise NotSupportedError(
            "lookup.partial-cache.store = DISKCACHE (DiskCacheLookupCache) needs the package diskcache: pip install 'pyspark-lookup[diskcache]' on "
            "each machine"
        )


class DiskCacheLookupCache(LookupCache):
    """A cache of rows by key in a database of diskcache: for answers that are expensive, must survive restarts, and are shared by a host's processes.

    `directory`: where the database is, on a local disk; one for each table. It is made with mode 0700. `max_bytes`: the size of the database;
    when it is exceeded, the entries that were stored first are removed. `expire_after_write_s`: how long an entry is valid (None: for ever);
    after the machine has restarted, ages are those of the wall clock. `cache_missing_key`: whether to cache that a key has no rows.

    If the database fails (it is locked, damaged or removed, the disk is full, the directory may not be written), that is a miss: it is counted
    (`cacheFailureCount`) and logged once, and the database is not used for the next `after_failure_s` seconds. A damaged one is recreated.
    No operation waits longer than `wait_s` for another process's write. Entries survive `close`; `clear` removes them.

    Raises ValueError for `max_bytes` below 1 MiB or a negative time, and NotSupportedError if diskcache is not installed.
    """

    persistent = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_bytes: int,
        expire_after_write_s: float | None = None,
        cache_missing_key: bool = True,
        clock: HostClock | None = None,
        wait_s: float = _WAIT_S,
        after_failure_s: float = _AFTER_FAILURE_S,
    ) -> None:
        require_diskcache()
        if max_bytes < _LEAST_BYTES:
            raise ValueError(f"max_bytes = {max_bytes}: give {_LEAST_BYTES} or more")
        for name, seconds in (
            ("expire_after_write_s", expire_after_write_s),
            ("wait_s", wait_s),
            ("after_failure_s", after_failure_s),
        ):
            if seconds is not None and not seconds >= 0:
                raise ValueError(f"{name} = {seconds}: give 0 or more")
        self._directory = os.path.abspath(os.fspath(directory))
        self._max_bytes = max_bytes
        self._expire_s = expire_after_write_s
        self._missing = cache_missing_key
        self._clock = HostClock() if clock is None else clock
        self._boot = _digest(self._clock.boot.encode(), 8)
        self._wait_s, self._after_failure_s = wait_s, after_failure_s
        self._rules = EntryRules("")
        self._schema: pa.Schema | None = None
        self._metrics = CacheMetricGroup()
        self._database: Database | None = None
        self._closed_until_s = -math.inf
        self._logged = False
        self._gate = ForkGate(self._leave_database)

    def _leave_database(self) -> None:
        self._database = None

    # --- the operations of FLIP-221 -------------------------------------------------------------------

    def open(self, metrics: CacheMetricGroup) -> None:
        self._metrics = metrics

    def use(self, rules: EntryRules) -> None:
        self._rules, self._schema = rules, rules.columns

    def get_many(self, keys: pa.Table) -> CachedRows:
        cached_rows, valid = self._get(keys)
        hits = int(np.count_nonzero(cached_rows.present))
        self._metrics.inc("hitCount", hits)
        self._metrics.inc("missCount", valid - hits)
        return cached_rows

    def peek_many(self, keys: pa.Table) -> CachedRows:
        return self._get(keys)[0]

    def _get(self, keys: pa.Table) -> tuple[CachedRows, int]:
        """(the cached rows, the number of keys without nulls)."""
        arrays = [one_array(column) for column in keys.columns]
        names = _entry_names(keys.column_names, arrays)
        requested = list(dict.fromkeys(name for name in names if name is not None))
        rules, schema = self._rules, self._schema

        def find(database: Database) -> CachedRows:
            values = database.find(requested)
            known = schema or self._find_schema(database, values)
            return self._decode(arrays, names, values, rules, known)

        nothing = CachedRows(np.zeros(keys.num_rows, np.bool_), _no_rows(schema))
        return self._attempt(find, nothing), sum(name is not None for name in names)

    def _find_schema(self, database: Database, values: dict[bytes, bytes]) -> pa.Schema | None:
        """The columns of rows, as the first entry that has rows names them."""
        for value in values.values():
            if len(value) > _HEADER.size and _HEADER.unpack_from(value)[6]:
                name = _schema_name(_HEADER.unpack_from(value)[3])
                data = database.find([name]).get(name)
                if data is not None and _digest(data, 8) == name[-8:]:
                    self._schema = pa.ipc.read_schema(pa.py_buffer(data))
                    return self._schema
        return None

    def _decode(
        self,
        arrays: Sequence[pa.Array],
        names: Sequence[bytes | None],
        values: dict[bytes, bytes],
        rules: EntryRules,
        schema: pa.Schema | None,
    ) -> CachedRows:
        now = self._clock.steady_s(), self._clock.wall_s()
        columns = b"" if schema is None else _digest(schema.serialize().to_pybytes(), 8)
        entries = {name: _Entry.parse(name, value, self._boot, *now) for name, value in values.items()}
        self._count_unusable(sum(entry is None for entry in entries.values()))
        by_place = [None if name is None else entries.get(name) for name in names]
        live = {
            place: entry
            for place, entry in enumerate(by_place)
            if entry is not None
            and (self._expire_s is None or entry.age_s < self._expire_s)
            and (not entry.rows or entry.columns == columns)
        }
        usable = _select(rules, arrays, live)
        batches = []
        counts = np.zeros(len(names), np.int64)
        for place in usable:
            entry = live[place]
            counts[place] = entry.rows
            if entry.rows:
                batches.append(pa.ipc.read_record_batch(pa.py_buffer(entry.payload), schema))
        present = np.zeros(len(names), np.bool_)
        present[usable] = True
        if schema is None:
            return CachedRows(present, None)
        rows = pa.Table.from_batches(batches, schema).combine_chunks()
        rows.validate(full=True)
        if rows.num_rows != counts.sum():
            raise ValueError("the number of rows in an entry differs from that in its header")
        numbers = as_indices(np.repeat(np.arange(len(names)), counts))
        return CachedRows(present, rows.append_column(pa.field(KEY_INDEX, pa.int64()), numbers))

    def put_many(self, keys: pa.Table, rows: pa.Table, ages_s: Numbers | None = None) -> None:
        arrays = [one_array(column) for column in keys.columns]
        names = _entry_names(keys.column_names, arrays)
        if None in names:
            key = keys.slice(names.index(None), 1).to_pylist()[0]
            raise ValueError(f"key {key} has a null: such a key matches no rows, so nothing can be cached for it")
        fields = [pa.field(f.name, spark_type(f.type)) for f in rows.schema if f.name != KEY_INDEX]
        fields = fields if self._schema is None else list(self._schema)
        columns, counts = group_rows(rows, fields, keys.num_rows)
        schema = pa.schema(fields)
        if fields:
            self._schema = schema
        entries = self._encode(names, pa.RecordBatch.from_arrays(columns, schema=schema), counts, ages_s)
        if rows.num_rows:
            data = schema.serialize().to_pybytes()
            entries[_schema_name(_digest(data, 8))] = data
        if entries:
            self._attempt(lambda database: database.put(entries, self._expire_s), None)

    def _encode(
        self, names: Sequence[bytes | None], batch: pa.RecordBatch, counts: Numbers, ages_s: Numbers | None
    ) -> dict[bytes, bytes]:
        steady_s, wall_s = self._clock.steady_s(), self._clock.wall_s()
        version = self._rules.version.encode()
        columns = _digest(batch.schema.serialize().to_pybytes(), 8)
        ends = np.cumsum(counts).tolist()
        ages = [0.0] * len(names) if ages_s is None else np.asarray(ages_s, np.float64).tolist()
        entries: dict[bytes, bytes] = {}
        for name, count, end, age_s in zip(names, counts.tolist(), ends, ages, strict=True):
            assert name is not None
            entries.pop(name, None)
            if not count and not self._missing:
                continue
            payload = batch.slice(end - count, count).serialize().to_pybytes() if count else b""
            if len(payload) < self._max_bytes // 2:
                times = steady_s - age_s, wall_s - age_s
                entries[name] = _to_bytes(name, self._boot, columns, times, count, version, payload)
        return entries

    def invalidate_many(self, keys: pa.Table) -> None:
        names = _entry_names(keys.column_names, [one_array(column) for column in keys.columns])
        present = [name for name in names if name is not None]
        self._attempt(lambda database: database.remove(present), None)

    def size(self) -> int:
        """The number of cached keys, those included that have expired or are of other versions."""
        return self._attempt(len, 0)

    def bytes(self) -> int:
        """The size of the database."""
        return self._attempt(lambda database: int(database.volume()), 0)

    def close(self) -> None:
        """End the use of the cache. Its entries stay on disk, for whoever opens it next."""
        with self._gate:
            self._database = None
        self._schema = self._rules.columns

    def clear(self) -> None:
        """Remove all entries."""
        self._attempt(lambda database: database.clear(), None)

    # --- the database -------------------------------------------------------------------------------

    def _attempt(self, work: Callable[[Database], T], otherwise: T) -> T:
        """What `work` returns for the database; `otherwise` if that fails."""
        from pyspark_lookup.cache.diskcache_database import Database

        with self._gate:
            if self._clock.steady_s() < self._closed_until_s:
                return otherwise
            try:
                database = self._database or Database(self._directory, self._max_bytes, self._wait_s)
                self._database = database
                try:
                    result = work(database)
                finally:
                    database.close()
                self._count_unusable(database.refused)
                database.refused = 0
                return result
            except Exception as problem:  # whatever a file may lead to that others have written, or damaged
                self._fail(problem)
                return otherwise

    def _fail(self, problem: Exception) -> None:
        from pyspark_lookup.cache.diskcache_database import is_damaged, truncate

        self._database = None
        self._closed_until_s = self._clock.steady_s() + self._after_failure_s
        self._metrics.inc("cacheFailureCount")
        self._log_once(foreign_repr(problem))
        if is_damaged(problem):
            with contextlib.suppress(OSError):
                truncate(self._directory)

    def _count_unusable(self, entries: int) -> None:
        if entries:
            self._metrics.inc("cacheFailureCount", entries)
            self._log_once(f"{entries} entries are damaged, or were not written by this package")

    def _log_once(self, error: str) -> None:
        if not self._logged:
            self._logged = True
            log_event(_log, logging.WARNING, "diskcache-failed", directory=self._directory, error=error)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """An entry, decoded. `columns`: a digest of the columns of its rows. `loaded_s`: when it was loaded (steady clock; -inf: before this boot)."""

    columns: bytes
    age_s: float
    loaded_s: float
    rows: int
    version: str
    payload: memoryview

    @classmethod
    def parse(cls, name: bytes, value: bytes, boot: bytes, steady_s: float, wall_s: float) -> _Entry | None:
        """The entry of the key `name`; None if it is damaged."""
        if len(value) < _HEADER.size:
            return None
        magic, check, of_boot, columns, since_s, at_s, rows, length = _HEADER.unpack_from(value)
        body = memoryview(value)[_HEADER.size :]
        if magic != _MAGIC or check != _checksum(name, value) or length > len(body):
            return None
        age_s, loaded_s = (steady_s - since_s, since_s) if of_boot == boot else (wall_s - at_s, -math.inf)
        # A time in the future: the wall clock was set back, so nobody knows the age.
        age_s = age_s if age_s >= 0 else math.inf
        return cls(columns, age_s, loaded_s, rows, bytes(body[:length]).decode(), body[length:])


def _to_bytes(
    name: bytes, boot: bytes, columns: bytes, times: tuple[float, float], rows: int, version: bytes, payload: bytes
) -> bytes:
    value = bytearray(_HEADER.pack(_MAGIC, bytes(_CHECK_BYTES), boot, columns, *times, rows, len(version)))
    value += version + payload
    value[_CHECK] = _checksum(name, value)
    return bytes(value)


def _checksum(name: bytes, value: bytes | bytearray) -> bytes:
    """The checksum of an entry. It covers the key, too, so an entry in the place of another key does not count."""
    return _digest(name + value[_CHECK.stop :], _CHECK_BYTES)


def _select(rules: EntryRules, arrays: Sequence[pa.Array], live: Mapping[int, _Entry]) -> list[int]:
    """The places of those entries that are right for the current version, and were not invalidated since they were loaded."""
    usable: list[int] = []
    by_version: dict[str, list[int]] = {}
    for place, entry in live.items():
        by_version.setdefault(entry.version, []).append(place)
    for version, places in by_version.items():
        keys = [array.take(pa.array(places, pa.int64())) for array in arrays]
        keep = np.ones(len(places), np.bool_)
        if version != rules.version:
            differ = rules.may_differ(version, keys)
            keep = np.zeros(len(places), np.bool_) if differ is None else ~differ
        limits_s = rules.limits(keys)
        if limits_s is not None:
            keep &= ~(np.array([live[place].loaded_s for place in places]) <= limits_s)
        usable += [place for place, kept in zip(places, keep.tolist(), strict=True) if kept]
    return sorted(usable)


def _digest(data: bytes | bytearray, size: int) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()


def _schema_name(columns: bytes) -> bytes:
    """The key under which the columns with this digest are stored."""
    return b"columns:" + columns


def _entry_names(columns: Sequence[str], arrays: Sequence[pa.Array]) -> list[bytes | None]:
    """For each key, the key of its entry: a digest of its values, the same for equal keys. None for a key with a null."""
    if any(pa.types.is_null(array.type) for array in arrays):
        return [None] * len(arrays[0])
    check_key_types([pa.field(name, array.type) for name, array in zip(columns, arrays, strict=True)])
    keys = Keys(arrays)
    prefix = "\0".join([*columns, *(str(array.type) for array in arrays)]).encode()
    parts = [_value_bytes(column) for column in keys.columns]
    valid = [True] * keys.rows if keys.valid is None else keys.valid.tolist()
    return [
        _digest(b"".join([prefix, *(len(part).to_bytes(8, "little") + part for part in row)]), _NAME_BYTES)
        if whole
        else None
        for whole, row in zip(valid, zip(*parts, strict=True), strict=True)
    ]


def _value_bytes(column: KeyColumn) -> list[bytes]:
    """The bytes of each value, the same for equal values; undefined for null."""
    values = column.values
    if values is None:
        return [value or b"" for value in column.array.cast(pa.large_binary()).to_pylist()]
    if values.dtype.kind == "f":
        with np.errstate(invalid="ignore"):  # signalling NaNs
            numbers = values.astype(np.float64) + 0.0
        numbers[np.isnan(numbers)] = np.nan
    elif values.ndim == 2:
        numbers = np.ascontiguousarray(values).view("V16").ravel()
        return list(numbers.tolist())
    else:
        numbers = values.astype(np.int64)
    return list(np.ascontiguousarray(numbers).view("V8").tolist())


def _no_rows(schema: pa.Schema | None) -> pa.Table | None:
    return None if schema is None else schema.append(pa.field(KEY_INDEX, pa.int64())).empty_table()
