"""Data files of manifests as columns, decoded many at a time.

The records of a table with 100 columns have hundreds of counts and bounds each; as Python objects they would take most of the time. So a record
is only measured: a loop finds the place of each of its fields in the bytes. Then numpy and Arrow decode a field in all records at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from pyiceberg.avro.reader import Reader
from pyiceberg.avro.resolver import construct_reader
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)
from pyiceberg.utils.decimal import decimal_required_bytes

from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.sources.iceberg.avro import AvroFile, Decoder, parse_schema
from pyspark_lookup.sources.iceberg.entries import DATA, Entry, Manifest, text_of_partition
from pyspark_lookup.sources.iceberg.entry_columns import STATISTICS, EntryBatch
from pyspark_lookup.sources.iceberg.manifests import ADDED, DELETED, PARTITION_ID, partition_type, spec_id_of

_BATCH_RECORDS = 1024
_BATCH_BYTES = 8 * 1024 * 1024  # of records; a batch may have one block more
_NUMBER_BYTES = 10  # of a number at most
_HEAD_BYTES = 4  # of the id and the length of a bound that are compared with those of another file
_LATER = 128  # in a byte of a number: more bytes of it follow

_NUMBER, _TEXT, _FIXED, _NUMBERS, _PAIRS, _MARK = range(6)
_STATUS, _SEQUENCE, _CONTENT, _PATH, _FORMAT = "status", "sequence", "content", "path", "format"
_SIZE, _ROWS, _KEY_METADATA, _PARTITION, _PARTITION_END = "size", "rows", "key metadata", "partition", "partition end"
_NUMBER_FIELDS = {0: _STATUS, 3: _SEQUENCE, 134: _CONTENT, 103: _ROWS, 104: _SIZE}
_TEXT_FIELDS = {100: _PATH, 101: _FORMAT, 131: _KEY_METADATA}
_COUNTS, _BOUNDS = {110: "nulls", 109: "values"}, {125: "lower", 128: "upper"}
_DECODED = {_NUMBER: _NUMBER_FIELDS, _TEXT: _TEXT_FIELDS, _NUMBERS: _COUNTS, _PAIRS: _BOUNDS}
"""The fields that are decoded, by their kinds and ids."""
_NO_ID = -1
_PLACES = (*_NUMBER_FIELDS.values(), *_TEXT_FIELDS.values(), _PARTITION, _PARTITION_END)
_REQUIRED = (_STATUS, _PATH, _FORMAT, _ROWS, _SIZE, _PARTITION)

_WHOLE_NUMBERS = (IntegerType, LongType, DateType, TimeType, TimestampType, TimestamptzType)
_WIDTHS: dict[type, int] = {BooleanType: 1, FloatType: 4, DoubleType: 8, UUIDType: 16}


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """How one field is stored in a record.

    `kind`: `_NUMBER`; `_TEXT` (text or bytes); `_FIXED` (`width` bytes); `_NUMBERS` (a list or map whose items are `width` numbers each);
    `_PAIRS` (a map of numbers to bytes); `_MARK` (no bytes: the beginning or end of the partition). `name`: one of those in `_DECODED`, or of
    the marks; None: the field is not decoded.
    """

    kind: int
    is_optional: bool
    name: str | None
    width: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class _Layout:
    """How the records of a manifest are stored, field after field."""

    steps: tuple[_Step, ...]
    partition: Reader
    partition_ids: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def _layout(schema: str) -> _Layout:
    """The layout of manifests with this schema. Raises ValueError if they cannot be decoded as columns."""
    fields: Schema = parse_schema(schema)
    partition = partition_type(fields)
    steps = tuple(_steps(fields.as_struct()))
    names = [step.name for step in steps if step.name is not None]
    if len({*names}) < len(names) or not {*_REQUIRED} <= {*names}:
        raise ValueError("it lacks a field, or has one twice")
    return _Layout(steps, construct_reader(partition), tuple(field.field_id for field in partition.fields))


def _steps(struct: StructType) -> Iterator[_Step]:
    for field in struct.fields:
        if not isinstance(field.field_type, StructType):
            yield _step(field, field.field_id)
        elif not field.required:
            raise ValueError(f"the record {field.name} is optional, and should be required")
        elif field.field_id == PARTITION_ID:
            yield _Step(_MARK, False, _PARTITION)
            yield from (_step(part, _NO_ID) for part in field.field_type.fields)
            yield _Step(_MARK, False, _PARTITION_END)
        else:
            yield from _steps(field.field_type)


def _step(field: NestedField, field_id: int) -> _Step:
    """How a field is stored. `field_id`: the id by which it is decoded; `_NO_ID`: it is not decoded. Raises ValueError for an unexpected type."""
    kind, width = _kind(field.field_type)
    if any(field_id in fields for other, fields in _DECODED.items() if other != kind):
        raise ValueError(f"the field {field.name} has the unexpected type {field.field_type}")
    return _Step(kind, not field.required, _DECODED.get(kind, {}).get(field_id), width)


def _kind(kind: IcebergType) -> tuple[int, int]:
    """(`_Step.kind`, `_Step.width`) of a field of this type. Raises ValueError for an unexpected type."""
    if isinstance(kind, _WHOLE_NUMBERS):
        return _NUMBER, 0
    if isinstance(kind, (StringType, BinaryType)):
        return _TEXT, 0
    if isinstance(kind, ListType) and kind.element_required and isinstance(kind.element_type, _WHOLE_NUMBERS):
        return _NUMBERS, 1
    if isinstance(kind, MapType) and kind.value_required and isinstance(kind.key_type, _WHOLE_NUMBERS):
        if isinstance(kind.value_type, _WHOLE_NUMBERS):
            return _NUMBERS, 2
        if isinstance(kind.value_type, (StringType, BinaryType)):
            return _PAIRS, 2
    if isinstance(kind, DecimalType):
        return _FIXED, decimal_required_bytes(kind.precision)
    if isinstance(kind, FixedType):
        return _FIXED, len(kind)
    if type(kind) in _WIDTHS:
        return _FIXED, _WIDTHS[type(kind)]
    raise ValueError(f"the type {kind} is not expected")


def decode_manifests(manifests: Sequence[tuple[Manifest, bytes]]) -> Iterator[EntryBatch]:
    """The live files of some manifests, which have data files only. `EntryBatch.manifests` are positions in `manifests`.

    Raises an error, of any kind, for everything unusual: then `read_manifest` decodes the files, or says what is wrong with a manifest.
    """
    records = _Records(manifests)
    for number, (manifest, data) in enumerate(manifests):
        file = AvroFile(manifest.location, data)
        layout = _layout(file.metadata["avro.schema"])
        spec_id = spec_id_of(manifest, file)
        for count, block in file.blocks():
            records.add_block(block)
            at = 0
            for start in range(0, count, _BATCH_RECORDS):
                at = records.measure(at, min(count - start, _BATCH_RECORDS), layout, number, spec_id)
                if records.is_full:
                    yield records.take()
                    if at < len(block):
                        records.add_block(block)
            if at != len(block):
                raise ValueError("a block has bytes after its records")
    if records.count:
        yield records.take()


class _Records:
    """Records that are measured, and wait to be decoded."""

    def __init__(self, manifests: Sequence[tuple[Manifest, bytes]]) -> None:
        self._manifests = [manifest for manifest, _ in manifests]
        self._clear()

    def _clear(self) -> None:
        self.count = 0
        self._blocks: list[bytes] = []
        self._start = self._size = 0
        self._places: dict[str, list[int]] = {name: [] for name in _PLACES}  # -1: the record does not have the field
        self._sides: dict[str, _Counts | _Bounds] = {name: _Counts() for name in _COUNTS.values()}
        self._sides |= {name: _Bounds() for name in _BOUNDS.values()}
        self._runs: list[
            tuple[int, int, int, _Layout]
        ] = []  # (records, manifest, spec id, layout), one after the other

    @property
    def is_full(self) -> bool:
        return self.count >= _BATCH_RECORDS or (self._size >= _BATCH_BYTES and self.count > 0)

    def add_block(self, block: bytes) -> None:
        """Go on with the records of another block."""
        self._blocks.append(block)
        self._view = np.frombuffer(block, np.uint8)
        self._start, self._size = self._size, self._size + len(block)

    def measure(self, at: int, count: int, layout: _Layout, manifest: int, spec_id: int) -> int:
        """Find the fields of `count` records that begin at `at` in the last block. Returns the position after them. Raises IndexError or ValueError
        for records that do not follow the layout."""
        data, view, start = self._blocks[-1], self._view, self._start
        steps = []
        for step in layout.steps:
            side = self._sides.get(step.name or "") or (_Counts(False) if step.kind == _NUMBERS else _Bounds(False))
            steps.append((step.kind, step.is_optional, self._places.get(step.name or ""), side, step.width))
        for record in range(self.count, self.count + count):
            for kind, is_optional, places, side, width in steps:
                if is_optional:
                    branch = data[at]
                    at += 1
                    if branch != 2:  # the second type of a union, the first of which is null
                        if branch:
                            raise ValueError("a field has an unknown type")
                        if places is not None:
                            places.append(-1)
                        continue
                if places is not None:
                    places.append(start + at)
                if kind == _NUMBER:
                    while data[at] >= _LATER:
                        at += 1
                    at += 1
                elif kind == _TEXT:
                    size, at = _read_number(data, at)
                    if size < 0:
                        raise ValueError(f"a negative length, {size}")
                    at += size
                elif kind in (_NUMBERS, _PAIRS):
                    number, at = _read_number(data, at)
                    while number:
                        if number < 0:  # then the number of bytes follows
                            number, (_, at) = -number, _read_number(data, at)
                        at = side.measure(data, view, at, number, width, record, start)
                        number, at = _read_number(data, at)
                elif kind == _FIXED:
                    at += width
        self.count += count
        for places in self._places.values():
            places += [-1] * (self.count - len(places))  # a layout may not have the field
        self._runs.append((count, manifest, spec_id, layout))
        return at

    def take(self) -> EntryBatch:
        """Decode the records, and forget them. Raises ValueError or an Arrow error."""
        data = self._blocks[0] if len(self._blocks) == 1 else b"".join(self._blocks)
        view = np.frombuffer(data, np.uint8)
        places = {name: np.array(some, np.int64) for name, some in self._places.items()}
        if any((places[name] < 0).any() for name in _REQUIRED):
            raise ValueError("a field is missing")
        counts = [count for count, _, _, _ in self._runs]
        manifests = np.repeat([manifest for _, manifest, _, _ in self._runs], counts)
        status = _numbers_at(view, places[_STATUS], -1)
        if (_numbers_at(view, places[_CONTENT], DATA) != DATA).any() or not np.isin(status, (0, ADDED, DELETED)).all():
            raise ValueError("it lists files that are not data files, or that have an unknown status")
        encryption = places[_KEY_METADATA]
        if _numbers_at(view, encryption[encryption >= 0], 0).any():
            raise ValueError("it has encrypted files")
        inherited = np.array([manifest.sequence for manifest in self._manifests], np.int64)[manifests]
        is_inherited = places[_SEQUENCE] < 0
        if (is_inherited & (status != ADDED) & (inherited != 0)).any():
            raise ValueError("it has existing files without a sequence number")
        sequences = np.where(is_inherited, inherited, _numbers_at(view, places[_SEQUENCE], 0))
        live = np.flatnonzero(status != DELETED)
        locations, formats = (
            _texts_at(data, view, places[name]).take(slice(None)).cast(pa.string()).take(live)  # checks all texts
            for name in (_PATH, _FORMAT)
        )
        distinct = formats.dictionary_encode()
        formats = pa.array([name.upper() for name in distinct.dictionary.to_pylist()], pa.string()).take(
            distinct.indices
        )
        codes, partitions = self._partitions(data, places, live)
        batch = EntryBatch(
            manifests[live],
            locations,
            formats,
            codes,
            [text_of_partition(entry) for entry in partitions],
            sequences[live],
            _numbers_at(view, places[_SIZE], 0)[live],
            _numbers_at(view, places[_ROWS], 0)[live],
            _samples(locations, formats, codes, partitions),
            self._statistics(data, view, live),
        )
        self._clear()
        return batch

    def _partitions(self, data: bytes, places: Mapping[str, Numbers], live: Numbers) -> tuple[Numbers, list[Entry]]:
        """(the number of each live file's partition, an entry for each partition)."""
        kinds = np.repeat(np.arange(len(self._runs)), [count for count, _, _, _ in self._runs])[live].tolist()
        starts, ends = (places[name][live].tolist() for name in (_PARTITION, _PARTITION_END))
        keys = [(spec_id, layout.partition_ids) for _, _, spec_id, layout in self._runs]
        numbers: dict[tuple[tuple[int, tuple[int, ...]], bytes], int] = {}
        codes: list[int] = []
        entries: list[Entry] = []
        for kind, start, end in zip(kinds, starts, ends, strict=True):
            key = keys[kind], data[start:end]
            code = numbers.setdefault(key, len(numbers))
            codes.append(code)
            if code == len(entries):
                _, _, spec_id, layout = self._runs[kind]
                values = tuple(layout.partition.read(Decoder(key[1]))._data)
                entries.append(_entry("", "", spec_id, layout.partition_ids, values))
        return np.array(codes, np.int64), entries

    def _statistics(self, data: bytes, view: Numbers, live: Numbers) -> dict[int, pa.Table]:
        """The statistics of each column in the live files, by field id."""
        columns: dict[int, dict[str, pa.Array]] = {}
        for name, side in self._sides.items():
            if not side.records:
                continue
            records, keys, values = side.decode(data, view)
            for key, places in _places_by_key(keys, records, self.count, live):
                columns.setdefault(key, {})[name] = values.take(places)
        return {
            key: pa.Table.from_arrays(
                [sides[field.name] if field.name in sides else pa.nulls(len(live), field.type) for field in STATISTICS],
                schema=STATISTICS,
            )
            for key, sides in columns.items()
        }


def _entry(location: str, form: str, spec_id: int, ids: tuple[int, ...], values: tuple[object, ...]) -> Entry:
    """An entry without statistics."""
    return Entry(location, DATA, form, spec_id, ids, values, 0, 0, 0, {}, {}, {}, {}, (), None, None, None)


def _samples(locations: pa.Array, formats: pa.Array, codes: Numbers, partitions: Sequence[Entry]) -> list[Entry]:
    """One entry for each combination of partition and format."""
    encoded = formats.dictionary_encode()
    kinds = codes * max(len(encoded.dictionary), 1) + np.asarray(encoded.indices)
    _, first = np.unique(kinds, return_index=True)
    return [
        dataclasses.replace(partitions[codes[row]], location=locations[row].as_py(), format=formats[row].as_py())
        for row in first.tolist()
    ]


class _Counts:
    """The pairs of a field id and a count in the maps of some records."""

    def __init__(self, keeps: bool = True) -> None:
        self.records: list[int] = []
        self._keeps = keeps
        self._starts: list[int] = []
        self._ends: list[Numbers] = []  # the last bytes of the numbers of each map

    def measure(self, data: bytes, view: Numbers, at: int, count: int, width: int, record: int, start: int) -> int:
        """The position in `data` after a map or list that begins at `at` and has `count` items of `width` numbers each.

        Records where the numbers end. `view`: `data` as an array of bytes. `start`: the position of `data` among all blocks.
        """
        count *= width
        ends = (view[at : at + 3 * count + 16] < _LATER).nonzero()[0]
        if len(ends) < count:
            ends = (view[at : at + _NUMBER_BYTES * count] < _LATER).nonzero()[0]
            if len(ends) < count:
                raise ValueError("a block is cut off")
        if self._keeps:
            self.records.append(record)
            self._starts.append(start + at)
            self._ends.append(ends[:count] + (start + at))
        return at + int(ends[count - 1]) + 1

    def decode(self, data: bytes, view: Numbers) -> tuple[Numbers, Numbers, _Numbers]:
        """(record, field id, count) of each pair."""
        lengths = np.array([len(ends) for ends in self._ends])
        ends = np.concatenate(self._ends)
        starts = np.empty_like(ends)
        starts[1:] = ends[:-1] + 1
        starts[np.cumsum(lengths) - lengths] = self._starts
        numbers = _read_numbers(view, starts, ends)
        return np.repeat(self.records, lengths // 2), numbers[::2], _Numbers(numbers[1::2])


class _Bounds:
    """The pairs of a field id and bytes in the maps of some records.

    Usually, a map has the ids and lengths of the map before it. Then it is compared with that as a whole.
    """

    def __init__(self, keeps: bool = True) -> None:
        self.records: list[int] = []
        self._keeps = keeps
        self._starts: list[Numbers] = []  # of the pairs of each map
        self._bodies: list[Numbers] = []  # of the bytes in each pair
        self._ends: list[int] = []
        self._keys: list[Numbers] = []
        # Of the last map that was measured:
        self._count = self._size = -1
        self._offsets = self._body_offsets = self._ids = self._heads = np.zeros(0, np.int64)
        self._head_bytes = b""

    def measure(self, data: bytes, view: Numbers, at: int, count: int, width: int, record: int, start: int) -> int:
        """The position in `data` after a map that begins at `at` and has `count` pairs. Records where they are. `view`, `start`: as in `_Counts.measure`."""
        if count != self._count or at + self._size > len(data) or view[self._heads + at].tobytes() != self._head_bytes:
            self._measure_pairs(data, view, at, count)
        if self._keeps:
            self.records.append(record)
            self._keys.append(self._ids)
            self._starts.append(self._offsets + (start + at))
            self._bodies.append(self._body_offsets + (start + at))
            self._ends.append(start + at + self._size)
        return at + self._size

    def _measure_pairs(self, data: bytes, view: Numbers, first: int, count: int) -> None:
        self._count = -1
        at, starts, bodies, ids = first, [], [], []
        for _ in range(count):
            starts.append(at)
            id_, size = data[at] >> 1, data[at + 1]
            if data[at] & 129 or size & 129:
                id_, at = _read_number(data, at)
                size, at = _read_number(data, at)
                if size < 0:
                    raise ValueError(f"a negative length, {size}")
            else:
                size >>= 1
                at += 2
            ids.append(id_)
            bodies.append(at)
            at += size
        if at > len(data):
            raise ValueError("a block is cut off")
        self._size = at - first
        self._offsets, self._body_offsets = (np.array(places, np.int64) - first for places in (starts, bodies))
        self._ids = np.array(ids, np.int64)
        widths = self._body_offsets - self._offsets
        if widths.max() <= _HEAD_BYTES:
            last = self._body_offsets - 1
            self._heads = np.concatenate([np.minimum(self._offsets + byte, last) for byte in range(widths.max())])
            self._head_bytes, self._count = view[self._heads + first].tobytes(), count

    def decode(self, data: bytes, view: Numbers) -> tuple[Numbers, Numbers, _Spans]:
        """(record, field id, bytes) of each pair."""
        lengths = [len(starts) for starts in self._starts]
        starts, bodies = np.concatenate(self._starts), np.concatenate(self._bodies)
        stops = np.append(starts[1:], 0)
        stops[np.cumsum(lengths) - 1] = self._ends
        return np.repeat(self.records, lengths), np.concatenate(self._keys), _Spans(data, view, bodies, stops)


def _read_number(data: bytes, at: int) -> tuple[int, int]:
    """(a number, the position after it)."""
    byte = data[at]
    at += 1
    number, shift = byte & 127, 7
    while byte >= _LATER:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        shift += 7
    if shift > 7 * _NUMBER_BYTES:
        raise ValueError("a number of more than 64 bits")
    return (number >> 1) ^ -(number & 1), at


def _numbers_at(view: Numbers, starts: Numbers, default: int) -> Numbers:
    """The numbers that begin at these places; `default` for a negative place."""
    if len(starts) and starts.min() < 0:
        numbers = np.full(len(starts), default, np.int64)
        numbers[starts >= 0] = _numbers_at(view, starts[starts >= 0], default)
        return numbers
    return _read_numbers(view, starts, _ends_of(view, starts))


def _ends_of(view: Numbers, starts: Numbers) -> Numbers:
    """The last bytes of the numbers that begin at these places."""
    ends: Numbers = starts.copy()
    for _ in range(_NUMBER_BYTES):
        is_before = view[ends] >= _LATER
        if not is_before.any():
            return ends
        ends += is_before
    raise ValueError("a number of more than 64 bits")


def _read_numbers(view: Numbers, starts: Numbers, ends: Numbers) -> Numbers:
    """The numbers between their first and last bytes, as int64: seven bits a byte, the lowest first, and the sign in the lowest bit."""
    numbers = view[ends].astype(np.uint64)
    more: Numbers = ends - starts
    most = int(more.max(initial=0))
    if most >= _NUMBER_BYTES or (most == _NUMBER_BYTES - 1 and (numbers[more == most] > 1).any()):
        raise ValueError("a number of more than 64 bits")
    some = np.arange(0)
    for byte in range(1, most + 1):
        some = (more > 0).nonzero()[0] if byte == 1 else some[more[some] >= byte]
        numbers[some] = numbers[some] << np.uint64(7) | (view[ends[some] - byte] & 127)
    signed: Numbers = (numbers >> np.uint64(1) ^ -(numbers & np.uint64(1))).view(np.int64)
    return signed


def _texts_at(data: bytes, view: Numbers, starts: Numbers) -> _Spans:
    """The texts, as bytes, that begin with their lengths at these places."""
    ends = _ends_of(view, starts)
    return _Spans(data, view, ends + 1, ends + 1 + _read_numbers(view, starts, ends))


class _Numbers:
    """int64 numbers; `take` returns those at some places as an Arrow array."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers

    def take(self, places: Numbers | slice) -> pa.Array:
        """The numbers at some places, and null for a negative place."""
        return _with_nulls(pa.int64(), places, [np.ascontiguousarray(self._numbers[places])])


class _Spans:
    """Spans of some bytes, in ascending order; `take` returns those at some places as an Arrow array."""

    def __init__(self, data: bytes, view: Numbers, starts: Numbers, stops: Numbers) -> None:
        self._view = view
        self._starts = starts
        self._sizes = stops - starts
        # The bytes between the spans are values of this array, too: every second value is a span.
        offsets = pa.py_buffer(np.stack([starts, stops], axis=1).ravel())
        self._values = pa.Array.from_buffers(
            pa.large_binary(), 2 * len(starts) - 1, [None, offsets, pa.py_buffer(data)]
        )

    def take(self, places: Numbers | slice) -> pa.Array:
        """The bytes at some places, and null for a negative place."""
        starts, sizes = self._starts[places], self._sizes[places]
        size = int(sizes[0]) if len(sizes) else 0
        if size and (sizes == size).all() and (isinstance(places, slice) or places.min() >= 0):
            windows = np.ndarray((len(self._view) - size + 1,), f"V{size}", self._view, strides=(1,))
            return _with_nulls(pa.large_binary(), places, [np.arange(len(starts) + 1) * size, windows[starts]])
        chosen = np.arange(len(self._starts))[places] if isinstance(places, slice) else places
        return self._values.take(_with_nulls(pa.int64(), chosen, [2 * chosen]))


def _with_nulls(kind: pa.DataType, places: Numbers | slice, buffers: Sequence[Numbers]) -> pa.Array:
    """An Arrow array of values at some places, with these buffers; null for a negative place."""
    valid = None
    if not isinstance(places, slice) and len(places) and places.min() < 0:
        valid = pa.py_buffer(np.packbits(places >= 0, bitorder="little"))
    return pa.Array.from_buffers(
        kind, len(buffers[0]) - (kind == pa.large_binary()), [valid, *map(pa.py_buffer, buffers)]
    )


def _places_by_key(keys: Numbers, records: Numbers, count: int, live: Numbers) -> Iterator[tuple[int, Numbers | slice]]:
    """Pairs (key, for each live record the position of its pair with this key; -1 if it has none), for pairs in the maps of `count` records.

    `keys`: the key of each pair. `records`: the number of each pair's record, ascending. `live`: the numbers of the live records. If a record
    has several pairs with a key, the last one counts.
    """
    width, rest = divmod(len(keys), count)
    table = keys.reshape(count, width) if not rest else keys[:0]
    if len(table) and (table == table[0]).all() and len({*table[0].tolist()}) == width and _is_even(records, width):
        for number, key in enumerate(table[0].tolist()):
            yield key, slice(number, None, width) if len(live) == count else live * width + number
        return
    order = np.argsort(keys, kind="stable")
    cuts = np.flatnonzero(np.diff(keys[order])) + 1
    for places in np.split(order, cuts):
        some = records[places]
        is_last = np.append(some[1:] != some[:-1], True)
        by_record = np.full(count, -1)
        by_record[some[is_last]] = places[is_last]
        yield int(keys[places[0]]), by_record[live]


def _is_even(records: Numbers, width: int) -> bool:
    """Whether each record has `width` pairs. `records`: the number of each pair's record."""
    return bool((records == np.repeat(np.arange(len(records) // width), width)).all())
