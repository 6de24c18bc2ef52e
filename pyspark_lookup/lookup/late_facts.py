"""The facts of a stream that wait for their row in a table: where they wait, what wakes them, and when their time is over.

A fact belongs to one of `PARTS` parts, by the hash of its key. So the same task sees a fact whatever its lookup returned, even if Spark runs
the lookup again. A part keeps its facts in chunks of a few thousand: one Arrow batch with the facts, and another with their keys and times. A small
index says which facts of a chunk still wait, when the first of them is due, and in which version all of them were looked up. So a micro-batch
with the same version reads only the index. A new version costs one lookup of the keys, a chunk at a time. When facts leave a chunk, the
others are not written again, but small chunks are merged.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from pyspark_lookup.columnar.keys import SEED, Keys, Numbers, as_array, as_indices, as_int64, distinct_keys
from pyspark_lookup.columnar.types import schema_of_text, text_of_schema
from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.errors import SchemaError
from pyspark_lookup.lookup.lookup_join import LOOKUP_ERRORS, message_of, row_sizes
from pyspark_lookup.lookup.version_token import VersionToken
from pyspark_lookup.options.conf_file import redact

_log = logging.getLogger("pyspark_lookup.join")

PARTS = 16
_PART_BITS = 4
_CHUNK_ROWS = 4096
_CHUNK_BYTES = 4 * 2**20
_SMALL_CHUNKS = 16  # this many chunks are merged if they are less than half full
_ARRIVED, _EVENT = "arrived", "event"  # the columns beside the keys: when a fact came, and the time in the fact
_RESULT_BYTES = 16 * 2**20
# What identifies the columns, and the lookup; the version of the last lookup, and its time; the number of the next chunk.
_HEADER = struct.Struct(">16s16sqqqq")

Version = tuple[int, int]
"""A version token as two numbers."""

Answer = tuple[int, Numbers, pa.StructArray]
"""What a lookup returns for a run of its keys: the first key's position, for each key its number of rows, and all these rows."""

LookUp = Callable[[Sequence[pa.Array], Version], Iterator[Answer]]
"""Looks up keys in a version."""


@dataclasses.dataclass(frozen=True)
class WaitRules:
    """How the facts of a lookup wait. `facts`: the columns of the facts. `keys`: those of the keys to look up. `added`: the looked-up columns.

    `wait_us`: how long a fact waits, in microseconds. `event`: the number of the column with the time from which a fact waits, by the
    watermark; None: it waits from its arrival on. `outer`: whether a fact passes without a row when its time is over. `part_rows`: how many
    facts may wait in one part. `waited`: the name of the column that says how long a fact has waited; None: there is no such column.

    `lookup`: 32 hex digits that differ if keys may have other rows in the same version: of another table, by other columns or options.
    `table`: the URL of the table, for errors and log events. `by_key`: the table is asked for the rows of keys, which costs a call, so each key is looked up once for all facts that wait for it. `retry_us`: after
    how many microseconds keys are looked up again in the same version; None: never, because only another version can have their rows.
    `outlasts_errors`: facts go on waiting if their keys cannot be looked up (`lookup.on-error` = STALE); only with `by_key`.
    """

    facts: pa.Schema
    keys: pa.Schema
    added: pa.Schema
    wait_us: int
    event: int | None
    outer: bool
    part_rows: int
    waited: str | None
    lookup: str
    table: str
    by_key: bool = False
    retry_us: int | None = None
    outlasts_errors: bool = False

    def to_text(self) -> str:
        """The rules as text, for tasks."""
        schemas = [text_of_schema(schema) for schema in (self.facts, self.keys, self.added)]
        times = self.wait_us, self.event, self.outer, self.part_rows, self.waited
        of_table = self.lookup, self.table, self.by_key, self.retry_us, self.outlasts_errors
        return json.dumps([*schemas, *times, *of_table])

    @classmethod
    def from_text(cls, text: str) -> WaitRules:
        """The rules that `to_text` wrote."""
        facts, keys, added, *rest = json.loads(text)
        return cls(schema_of_text(facts), schema_of_text(keys), schema_of_text(added), *rest)

    @property
    def results(self) -> pa.Schema:
        """The columns of the result."""
        fields = [*self.facts, *self.added]
        return pa.schema([*fields, pa.field(self.waited, pa.duration("us"))] if self.waited else fields)

    @property
    def keys_and_times(self) -> pa.Schema:
        """The columns beside a waiting fact, which decide when it leaves: its keys and its times."""
        times = [_ARRIVED] if self.event is None else [_ARRIVED, _EVENT]
        return pa.schema([*self.keys, *(pa.field(name, pa.int64()) for name in times)])

    @property
    def layout(self) -> bytes:
        """A digest of the columns in which facts and keys wait, and of the column with their times."""
        # As texts: the bytes of a schema depend on what may be null, and on the version of Arrow.
        columns = [[field.name, str(field.type)] for field in (*self.facts, *self.keys_and_times)]
        text = json.dumps([columns, None if self.event is None else self.facts.field(self.event).name])
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def join(
        self, facts: pa.RecordBatch, rows: Numbers, matches: pa.StructArray | None, waited_us: Numbers | int
    ) -> pa.RecordBatch:
        """Results: for each of `rows` the fact with that number, and beside it the looked-up columns (`matches` None: nulls)."""
        columns = [column.take(as_indices(rows)) for column in facts.columns]
        if matches is None:
            columns += [pa.nulls(len(rows), field.type) for field in self.added]
        else:
            columns += matches.flatten()[: len(self.added)]
        if self.waited:
            waited = np.broadcast_to(np.asarray(waited_us, np.int64), (len(rows),))
            columns.append(as_array(waited).view(pa.duration("us")))
        return pa.RecordBatch.from_arrays(columns, schema=self.results)


def _pieces(facts: pa.RecordBatch, rows: Numbers) -> list[tuple[int, int]]:
    """Runs of `rows`, which are numbers of facts and may repeat: each run's facts take about `_RESULT_BYTES` at most, or it has one row."""
    if not len(rows) or int(np.bincount(rows).max()) * facts.nbytes <= _RESULT_BYTES:
        return [(0, len(rows))]
    ends = np.cumsum(row_sizes(facts.columns)[rows])
    cuts = np.flatnonzero(np.diff(ends // _RESULT_BYTES)) + 1
    return list(itertools.pairwise([0, *cuts.tolist(), len(rows)]))


def to_bytes(batch: pa.RecordBatch) -> bytes:
    return bytes(batch.serialize().to_pybytes())


def from_bytes(data: bytes, schema: pa.Schema) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(pa.py_buffer(data), schema)


# --- where the facts of a batch go ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Parcel:
    """What a batch of facts sends to one part: results, facts without a row in the table, and the keys of these facts. All are bytes; None: none."""

    part: int
    results: bytes | None
    facts: bytes | None
    keys: bytes | None


def divide(
    rules: WaitRules,
    facts: pa.RecordBatch,
    keys: Sequence[pa.Array],
    cast_keys: Sequence[pa.Array],
    answers: Iterable[Answer],
) -> Iterator[Parcel]:
    """The parcels of a batch of facts. `cast_keys`: the keys in the types in which they are looked up. `answers`: what `LookUp` yields for them.

    A fact whose key has a null never gets a row, so it does not wait.
    """
    hashed = Keys(cast_keys)
    parts = (hashed.hashes(SEED) >> np.uint64(64 - _PART_BITS)).astype(np.int64)
    valid = np.ones(facts.num_rows, np.bool_) if hashed.valid is None else hashed.valid
    parts[~valid] = 0
    key_batch = pa.RecordBatch.from_arrays(list(keys), schema=rules.keys)
    for start, counts, structs in answers:
        rows = np.arange(start, start + len(counts))
        row_parts = parts[rows]
        hits = np.repeat(np.arange(len(counts)), counts)
        order = np.argsort(row_parts[hits], kind="stable")
        results: dict[int, pa.RecordBatch] = {}
        for first, last in _pieces(facts, rows[hits[order]]):
            yield from (Parcel(part, to_bytes(piece), None, None) for part, piece in results.items())
            some = order[first:last]
            joined = rules.join(facts, rows[hits[some]], structs.take(as_indices(some)), 0)
            results = _by_part(joined, row_parts[hits[some]])
        absent = counts == 0
        if rules.outer and not valid[rows].all():
            without_key = rules.join(facts, rows[absent & ~valid[rows]], None, 0)
            yield Parcel(0, to_bytes(without_key), None, None)
        late = np.flatnonzero(absent & valid[rows])
        late = late[np.argsort(row_parts[late], kind="stable")]
        late_facts, late_keys = (
            _by_part(batch.take(as_indices(rows[late])), row_parts[late]) for batch in (facts, key_batch)
        )
        for part in range(PARTS):
            data = [
                to_bytes(batches[part]) if part in batches else None for batches in (results, late_facts, late_keys)
            ]
            # Each part hears of each batch: its facts may wait for this version.
            if any(data) or start == 0:
                yield Parcel(part, *data)


def _by_part(rows: pa.RecordBatch, parts: Numbers) -> dict[int, pa.RecordBatch]:
    """The rows of each part that has some. `parts`: the part of each row, ascending."""
    ends = np.searchsorted(parts, np.arange(PARTS + 1)).tolist()
    spans = enumerate(itertools.pairwise(ends))
    return {part: rows.slice(first, last - first) for part, (first, last) in spans if last > first}


# --- the facts of a part --------------------------------------------------------------------------


class PartState(Protocol):
    """The store in which a part keeps its index and its chunks from one micro-batch to the next. `kind`: "facts" or "keys"."""

    def read_index(self) -> bytes | None: ...

    def write_index(self, data: bytes | None) -> None: ...

    def read(self, kind: str, chunk: int) -> bytes: ...

    def write(self, kind: str, chunk: int, data: bytes) -> None: ...

    def remove(self, kind: str, chunk: int) -> None: ...


@dataclasses.dataclass
class _Chunk:
    """A chunk in the index. `size`: the bytes of its facts. `gone`: which facts have left (None: none).

    Of the facts that still wait, `since` is the earliest arrival, and `due` the earliest time from which one waits, in microseconds.
    """

    number: int
    rows: int
    size: int
    since: int
    due: int
    gone: Numbers | None = None

    @property
    def waiting(self) -> int:
        return self.rows if self.gone is None else self.rows - int(np.count_nonzero(self.gone))

    @property
    def live(self) -> Numbers:
        return np.arange(self.rows) if self.gone is None else np.flatnonzero(~self.gone)


@dataclasses.dataclass
class WaitCounts:
    """How many facts of a part wait after a micro-batch, how many began to wait in it, and how many stopped, by reason.

    `woken`: they now have a row. `expired`: their time was up. `crowded`: too many waited. `oldest_us`: when the fact that has waited
    longest arrived; None if none waits.
    """

    waiting: int = 0
    held: int = 0
    woken: int = 0
    expired: int = 0
    crowded: int = 0
    oldest_us: int | None = None

    def __add__(self, other: WaitCounts) -> WaitCounts:
        """The counts of two parts."""
        oldest = [oldest_us for oldest_us in (self.oldest_us, other.oldest_us) if oldest_us is not None]
        return WaitCounts(
            self.waiting + other.waiting,
            self.held + other.held,
            self.woken + other.woken,
            self.expired + other.expired,
            self.crowded + other.crowded,
            min(oldest, default=None),
        )


_INDEX = pa.schema(
    [
        ("number", pa.int64()),
        ("rows", pa.int64()),
        ("size", pa.int64()),
        ("since", pa.int64()),
        ("due", pa.int64()),
        ("gone", pa.binary()),
    ]
)


class LatePart:
    """The waiting facts of one part, in one micro-batch. `now_us`: the time of the micro-batch. `watermark_us`: its watermark.

    Call `wake` and `arrive` for each parcel, then `finish`. All of them yield results. `chunk_rows`: the most facts of a chunk.
    `small_chunks`: how many chunks are merged if they are less than half full.
    """

    def __init__(
        self,
        state: PartState,
        rules: WaitRules,
        look_up: LookUp,
        now_us: int,
        watermark_us: int,
        chunk_rows: int = _CHUNK_ROWS,
        small_chunks: int = _SMALL_CHUNKS,
    ) -> None:
        self.counts = WaitCounts()
        self._state = state
        self._rules = rules
        self._look_up = look_up
        self._chunk_rows = chunk_rows
        self._small_chunks = small_chunks
        self._now_us = now_us
        # Facts have waited long enough if their time is not after this one.
        self._over_us = (now_us if rules.event is None else watermark_us) - rules.wait_us
        self._changed = False
        self._version: Version | None = None
        self._has_failed = False
        self._looked_up_us = 0  # when all keys were last looked up in this version
        self._next = 0
        self._chunks: list[_Chunk] = []
        data = state.read_index()
        self._was_empty = data is None
        if data is not None:
            self._read_index(data)

    def wake(self, version: Version) -> Iterator[pa.RecordBatch]:
        """Results of the waiting facts that have a row in this version. Nothing is looked up if the version is the one of the last lookup, unless
        keys are to be looked up again (`WaitRules.retry_us`). If the lookup fails and `WaitRules.outlasts_errors`, they are looked up again after
        `retry_us`, or else in the next micro-batch."""
        retry_us = self._rules.retry_us
        is_over = retry_us is not None and not 0 <= self._now_us - self._looked_up_us < retry_us
        if version == self._version and not is_over:
            return
        for chunk, keys, answers in self._answers(version):
            live, leaving = chunk.live, np.zeros(chunk.rows, np.bool_)
            facts = None
            for start, counts, structs in answers:
                if len(structs):
                    facts = self._facts(chunk) if facts is None else facts
                    rows = live[start : start + len(counts)]
                    leaving[rows[counts > 0]] = True
                    repeated = np.repeat(rows, counts)
                    for first, last in _pieces(facts, repeated):
                        some, matches = repeated[first:last], structs.slice(first, last - first)
                        yield self._rules.join(facts, some, matches, self._waited_us(keys, some))
            self.counts.woken += self._leave(chunk, keys, leaving)
        if self._has_failed and retry_us is None:
            version = self._version or (0, 0)  # that of no table, so the next micro-batch looks the keys up again
        self._version, self._looked_up_us, self._changed = version, self._now_us, True

    def _answers(self, version: Version) -> Iterator[tuple[_Chunk, pa.RecordBatch, Iterable[Answer]]]:
        """For each chunk its keys, and the answers for the facts that wait in it."""

        def arguments(chunk: _Chunk, keys: pa.RecordBatch) -> list[pa.Array]:
            return [column.take(as_indices(chunk.live)) for column in keys.columns[: len(self._rules.keys)]]

        if not self._rules.by_key:
            for chunk in list(self._chunks):
                keys = self._keys(chunk)
                yield chunk, keys, self._look_up(arguments(chunk, keys), version)
            return
        chunks = [(chunk, self._keys(chunk)) for chunk in self._chunks]
        if not chunks:
            return
        columns = [pa.concat_arrays(arrays) for arrays in zip(*(arguments(*chunk) for chunk in chunks), strict=True)]
        asked = Keys(columns)
        distinct, places = distinct_keys(asked, asked.hashes(SEED))
        try:
            answers = list(self._look_up([column.take(as_indices(distinct)) for column in columns], version))
        except LOOKUP_ERRORS as problem:
            if not self._rules.outlasts_errors:
                raise
            self._has_failed = True
            where = redact("path", self._rules.table)
            log_event(
                _log, logging.WARNING, "lookup-failed", table=where, keys=len(distinct), error=message_of(problem)
            )
            return
        counts = np.concatenate([counts for _, counts, _ in answers])
        structs = pa.concat_arrays([structs for _, _, structs in answers])
        starts = np.cumsum(counts) - counts
        for chunk, keys in chunks:
            some, places = places[: chunk.waiting], places[chunk.waiting :]
            repeats = counts[some]
            numbers = np.arange(repeats.sum()) + np.repeat(starts[some] - np.cumsum(repeats) + repeats, repeats)
            yield chunk, keys, [(0, repeats, structs.take(as_indices(numbers)))]

    def arrive(self, facts: pa.RecordBatch, keys: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Keep facts that have no row in the version of the last `wake`. Yields results without a row for those whose time is over already."""
        times = self._now_us if self._rules.event is None else self._event_times(facts)
        over = np.broadcast_to(np.asarray(times) <= self._over_us, (facts.num_rows,))
        if over.any():
            self.counts.expired += int(np.count_nonzero(over))
            if self._rules.outer:
                yield self._rules.join(facts, np.flatnonzero(over), None, 0)
        staying = np.flatnonzero(~over)
        self.counts.held += len(staying)
        columns = [column.take(as_indices(staying)) for column in keys.columns]
        columns.append(as_array(np.full(len(staying), self._now_us)))
        if self._rules.event is not None:
            columns.append(as_array(np.broadcast_to(times, (facts.num_rows,))[staying]))
        self._add(
            facts.take(as_indices(staying)), pa.RecordBatch.from_arrays(columns, schema=self._rules.keys_and_times)
        )

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Results of the facts whose time is over, and of the oldest ones if too many wait. Writes the index for the next micro-batch."""
        for chunk in [chunk for chunk in self._chunks if chunk.due <= self._over_us]:
            keys = self._keys(chunk)
            self.counts.expired += yield from self._pass(chunk, keys, self._times(keys) <= self._over_us)
        excess = sum(chunk.waiting for chunk in self._chunks) - self._rules.part_rows
        while excess > 0:
            chunk, *others = sorted(self._chunks, key=lambda chunk: chunk.since)
            keys = self._keys(chunk)
            arrivals = as_int64(keys.column(_ARRIVED))[chunk.live]
            first = np.argsort(arrivals, kind="stable")[:excess]
            # Chunks that were merged may have facts that came after those of another chunk.
            oldest = chunk.live[first[arrivals[first] <= others[0].since] if others else first]
            leaving = np.zeros(chunk.rows, np.bool_)
            leaving[oldest] = True
            self.counts.crowded += yield from self._pass(chunk, keys, leaving)
            excess -= len(oldest)
        self._merge()
        self.counts.waiting = sum(chunk.waiting for chunk in self._chunks)
        self.counts.oldest_us = min((chunk.since for chunk in self._chunks), default=None)
        if self._changed and (self._chunks or not self._was_empty):
            self._state.write_index(self._write_index())

    def _pass(self, chunk: _Chunk, keys: pa.RecordBatch, leaving: Numbers) -> Generator[pa.RecordBatch, None, int]:
        """Let facts of a chunk leave: yields results without a row for them if the lookup is `outer`, and returns how many they are."""
        if chunk.gone is not None:
            leaving = leaving & ~chunk.gone
        rows = np.flatnonzero(leaving)
        if self._rules.outer and len(rows):
            yield self._rules.join(self._facts(chunk), rows, None, self._waited_us(keys, rows))
        return self._leave(chunk, keys, leaving)

    def _leave(self, chunk: _Chunk, keys: pa.RecordBatch, leaving: Numbers) -> int:
        """Mark the facts that leave a chunk, and return how many they are. A chunk in which none waits any more is removed."""
        count = int(np.count_nonzero(leaving))
        if count:
            self._changed = True
            chunk.gone = leaving if chunk.gone is None else chunk.gone | leaving
            if chunk.waiting:
                chunk.since = int(as_int64(keys.column(_ARRIVED))[chunk.live].min())
                chunk.due = int(self._times(keys)[chunk.live].min())
            else:
                self._remove(chunk)
        return count

    def _add(self, facts: pa.RecordBatch, keys: pa.RecordBatch) -> None:
        if not facts.num_rows:
            return
        rows = max(min(self._chunk_rows, facts.num_rows * _CHUNK_BYTES // max(facts.nbytes, 1)), 1)
        for start in range(0, facts.num_rows, rows):
            some_facts, some_keys = facts.slice(start, rows), keys.slice(start, rows)
            data = to_bytes(some_facts)
            since, due = int(as_int64(some_keys.column(_ARRIVED)).min()), int(self._times(some_keys).min())
            self._chunks.append(_Chunk(self._next, some_facts.num_rows, len(data), since, due))
            self._state.write("facts", self._next, data)
            self._state.write("keys", self._next, to_bytes(some_keys))
            self._next += 1
        self._changed = True

    def _remove(self, chunk: _Chunk) -> None:
        self._chunks.remove(chunk)
        self._state.remove("facts", chunk.number)
        self._state.remove("keys", chunk.number)

    def _merge(self) -> None:
        """Merge the chunks that are less than half full, if there are many of them."""
        small = [
            c
            for c in self._chunks
            if 2 * c.waiting < self._chunk_rows and 2 * c.size * c.waiting < _CHUNK_BYTES * c.rows
        ]
        if len(small) < self._small_chunks:
            return
        while small:
            merged: list[_Chunk] = []
            while (
                small
                and sum(c.waiting for c in (*merged, small[0])) <= self._chunk_rows
                and sum(c.size for c in merged) <= _CHUNK_BYTES
            ):
                merged.append(small.pop(0))
            facts = [self._facts(chunk).take(as_indices(chunk.live)) for chunk in merged]
            keys = [self._keys(chunk).take(as_indices(chunk.live)) for chunk in merged]
            for chunk in merged:
                self._remove(chunk)
            self._add(_concatenate(facts), _concatenate(keys))

    def _keys(self, chunk: _Chunk) -> pa.RecordBatch:
        return from_bytes(self._state.read("keys", chunk.number), self._rules.keys_and_times)

    def _facts(self, chunk: _Chunk) -> pa.RecordBatch:
        return from_bytes(self._state.read("facts", chunk.number), self._rules.facts)

    def _times(self, keys: pa.RecordBatch) -> Numbers:
        """When each fact of a chunk began to wait (microseconds): on its arrival, or at the time in the fact. `keys`: the keys and times of the chunk."""
        return as_int64(keys.column(_ARRIVED if self._rules.event is None else _EVENT))

    def _waited_us(self, keys: pa.RecordBatch, rows: Numbers) -> Numbers:
        return self._now_us - as_int64(keys.column(_ARRIVED))[rows]

    def _event_times(self, facts: pa.RecordBatch) -> Numbers:
        """The times of new facts. A null is over at once, because no watermark would pass it."""
        assert self._rules.event is not None
        column = facts.column(self._rules.event)
        times = column.cast(pa.timestamp("us", getattr(column.type, "tz", None))).view(pa.int64())
        return as_int64(times.fill_null(-(2**62)))

    def _read_index(self, data: bytes) -> None:
        layout, lookup, first, second, self._looked_up_us, self._next = _HEADER.unpack_from(data)
        if layout != self._rules.layout:
            raise SchemaError(
                f"{self._rules.table}: rows wait for this table in the stream's checkpoint, but with other columns or keys than the stream has "
                "now: undo the change until no row waits, or start with a new checkpoint, which loses the waiting rows"
            )
        # Keys may have other rows in another lookup, even in the same version. A file that was too new may have been replaced since.
        is_same = lookup == bytes.fromhex(self._rules.lookup) and VersionToken.from_numbers(first, second).cacheable
        self._version = (first, second) if is_same else None
        index = from_bytes(data[_HEADER.size :], _INDEX).to_pylist()
        for entry in index:
            gone = entry.pop("gone")
            if gone is not None:
                bits = np.unpackbits(np.frombuffer(gone, np.uint8), count=entry["rows"])
                gone = bits.view(np.bool_)
            self._chunks.append(_Chunk(**entry, gone=gone))

    def _write_index(self) -> bytes | None:
        if not self._chunks or self._version is None:
            return None
        entries = [
            {**dataclasses.asdict(c), "gone": None if c.gone is None else np.packbits(c.gone).tobytes()}
            for c in self._chunks
        ]
        lookup = bytes.fromhex(self._rules.lookup)
        header = _HEADER.pack(self._rules.layout, lookup, *self._version, self._looked_up_us, self._next)
        return header + to_bytes(pa.RecordBatch.from_pylist(entries, schema=_INDEX))


def _concatenate(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches() or [batches[0]]
    return batch
