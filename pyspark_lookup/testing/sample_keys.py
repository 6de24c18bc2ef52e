"""Keys for tests of lookups: those that a table has, and many that it has not but that a careless comparison finds or cannot take."""

from __future__ import annotations

import datetime
import decimal
import itertools
import math
import random
import struct
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pyspark_lookup.columnar.keys import SEED, Keys, as_bools, as_indices, distinct_keys, one_array
from pyspark_lookup.columnar.types import is_binary, is_text

_TEXTS = (
    "", " ", "'", '"', "`", "\\", "%", "_", "?", "NULL", "null", "O'Brien", "'; DROP TABLE t; --", "' OR '1'='1", "{a,b}", "[a]", "$1", ":a",
    "?1", "\0", "a\0", "a\n\t\r", "ä€𝄞", "x" * 5000,
)  # fmt: skip
_DAY = datetime.timedelta(days=1)


def distinct(keys: pa.Table) -> pa.Table:
    """Each of `keys` once, without those that have a null."""
    valid = as_bools(one_array(keys.column(0)).is_valid())
    for column in keys.columns[1:]:
        valid = valid & as_bools(one_array(column).is_valid())
    keys = keys.filter(pa.array(valid)).combine_chunks()
    if not keys.num_rows:
        return keys
    columns = Keys([one_array(column) for column in keys.columns])
    places, _ = distinct_keys(columns, columns.hashes(SEED))
    return keys.take(as_indices(np.sort(places)))


def absent_keys(present: pa.Table, at_most: int, rng: random.Random) -> pa.Table:
    """Keys that are not among `present`, all different: limits of the types, neighbours of present values, and other pairs of them.

    `present`: the keys of the table, all different, without nulls. `at_most`: about how many to return.
    """
    columns = []
    for column in present.columns:
        values = rng.sample(column.to_pylist(), min(present.num_rows, 50))
        candidates = _array(itertools.chain(special_values(column.type, values), values), column.type)
        columns.append(distinct(pa.table({"key": candidates})).column("key").to_pylist())
    if len(columns) == 1:
        keys = [(value,) for value in columns[0]]
    else:  # each special value beside values that are there, and values that are there in other pairs
        beside = [column.to_pylist() for column in present.columns]
        keys = [
            tuple(value if place == number else rng.choice(beside[place]) for place in range(len(columns)))
            for number, values in enumerate(columns)
            for value in values
        ]
    rng.shuffle(keys)
    return without(_table(keys, present.schema), present).slice(0, at_most)


def many_keys(present: pa.Table, count: int) -> pa.Table:
    """Up to `count` keys that are not among `present`, all different: as many as the types have values for."""
    columns = [list(itertools.islice(_enumerate(field.type), count)) for field in present.schema]
    sizes = [max(1, len(values)) for values in columns]
    first = columns[0]
    rows = (
        tuple(values[(number // math.prod(sizes[:place])) % len(values)] for place, values in enumerate(columns))
        for number in range(min(count, math.prod(sizes)))
    )
    return without(_table(list(rows), present.schema), present) if first else present.slice(0, 0)


def opposite_zeros(present: pa.Table) -> pa.Table:
    """`present`, in which each zero of a float has the other sign; no keys if there is none. They are the same keys."""
    columns, swapped = [], False
    for column in present.columns:
        if pa.types.is_floating(column.type):
            numbers = one_array(column).to_numpy(zero_copy_only=False)
            swapped |= bool((numbers == 0).any())
            column = pa.chunked_array([pa.array(np.where(numbers == 0, -numbers, numbers), column.type)])
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=present.schema) if swapped else present.slice(0, 0)


def without(keys: pa.Table, others: pa.Table) -> pa.Table:
    """`keys`, each once, that are not among `others`, which are all different."""
    both = distinct(pa.concat_tables([others, keys]))
    return both.slice(others.num_rows).combine_chunks()


def special_values(kind: pa.DataType, values: Sequence[Any]) -> Iterator[Any]:
    """Values of a type that are easily taken for one of `values`, or that are hard to pass on, as Python has them."""
    if pa.types.is_boolean(kind):
        yield from (False, True)
    elif pa.types.is_integer(kind):
        low, high = -(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1
        yield from (0, -1, 1, low, high, low + 1, high - 1)
        yield from (v for value in values for v in (value - 1, value + 1, -value) if low <= v <= high)
    elif pa.types.is_floating(kind):
        largest, smallest = (3.4028234663852886e38, 1e-45) if kind.bit_width == 32 else (1.7976931348623157e308, 5e-324)
        yield from (0.0, math.nan, math.inf, -math.inf, largest, -largest, smallest, 0.1)
        yield from (neighbour for value in values if math.isfinite(value) for neighbour in _next_floats(value, kind))
    elif is_text(kind):
        yield from _TEXTS
        for value in values:
            yield from (
                value.upper(),
                value.lower(),
                value.swapcase(),
                f"{value} ",
                f" {value}",
                f"{value}%",
                f"{value}\0",
            )
            yield from (
                value.strip(),
                value[:-1],
                unicodedata.normalize("NFD", value),
                unicodedata.normalize("NFC", value),
            )
    elif is_binary(kind):
        yield from (b"", b"\0", b"\0\0", b"\xff", b"'", b"\\x00")
        yield from (v for value in values for v in (value + b"\0", b"\0" + value, value[:-1]))
    elif pa.types.is_decimal(kind):
        context = decimal.Context(prec=80)  # Python's own rounds to 28 digits, also the unary minus
        quantum = context.scaleb(decimal.Decimal(1), -kind.scale)
        most = context.scaleb(decimal.Decimal(10**kind.precision - 1), -kind.scale)
        yield from (decimal.Decimal(0), quantum, quantum.copy_negate(), most, most.copy_negate())
        for value in values:
            near = context.add(value, quantum)
            yield from (v for v in (near, value.copy_negate()) if v.copy_abs() <= most)
    else:
        yield from _special_times(kind, values)


def _special_times(kind: pa.DataType, values: Sequence[Any]) -> Iterator[Any]:
    low: Any
    high: Any
    zone = datetime.timezone.utc if pa.types.is_timestamp(kind) and kind.tz is not None else None
    if pa.types.is_date(kind):
        low, high, step = datetime.date.min, datetime.date.max, _DAY
        yield from (low, high, datetime.date(1970, 1, 1), datetime.date(2024, 2, 29), datetime.date(1582, 10, 4))
    elif pa.types.is_timestamp(kind):
        # A day from Python's limits, so that no time zone moves them beyond.
        low, high = datetime.datetime(1, 1, 2, tzinfo=zone), datetime.datetime(9999, 12, 30, 23, 59, 59, 999999, zone)
        step = datetime.timedelta(microseconds=1)
        yield from (
            low,
            high,
            datetime.datetime(1970, 1, 1, tzinfo=zone),
            datetime.datetime(1969, 12, 31, 23, 59, 59, 999999, zone),
        )
        yield datetime.datetime(2024, 3, 31, 2, 30, tzinfo=zone)
    elif pa.types.is_duration(kind):
        low, high, step = (
            datetime.timedelta(days=-100_000),
            datetime.timedelta(days=100_000),
            datetime.timedelta(microseconds=1),
        )
        yield from (low, high, datetime.timedelta())
    else:
        return
    yield from (v for value in values if low < value < high for v in (value + step, value - step))


def _next_floats(value: float, kind: pa.DataType) -> Iterator[float]:
    """The floats just above and below a value, in the type's width."""
    code, number = ("<f", "<i") if kind.bit_width == 32 else ("<d", "<q")
    (bits,) = struct.unpack(number, struct.pack(code, value))
    for near in (bits + 1, bits - 1) if bits not in (0, -(2 ** (kind.bit_width - 1))) else ():
        with_bits = struct.unpack(code, struct.pack(number, near))[0]
        if math.isfinite(with_bits):
            yield with_bits


def _enumerate(kind: pa.DataType) -> Iterator[Any]:
    """Different values of a type, until it has no more."""
    number_of = itertools.count(1)
    if pa.types.is_boolean(kind):
        return iter((False, True))
    if pa.types.is_integer(kind):
        high = 2 ** (kind.bit_width - 1)
        return itertools.chain(range(high // 2, high), range(high // 2))
    if pa.types.is_floating(kind):
        return (float(n) + 0.5 for n in number_of)
    if is_text(kind):
        return (f"key {n}" for n in number_of)
    if is_binary(kind):
        return (b"key %d" % n for n in number_of)
    if pa.types.is_decimal(kind):
        return (decimal.Decimal(n).scaleb(-kind.scale) for n in range(10 ** min(kind.precision, 18)))
    if pa.types.is_date(kind):
        return (datetime.date(1900, 1, 1) + n * _DAY for n in range(200_000))
    if pa.types.is_timestamp(kind):
        zone = datetime.timezone.utc if kind.tz is not None else None
        return (datetime.datetime(1900, 1, 1, tzinfo=zone) + datetime.timedelta(seconds=n) for n in number_of)
    if pa.types.is_duration(kind):
        return (datetime.timedelta(seconds=n) for n in number_of)
    return iter(())


def _array(values: Iterable[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(list(values), kind)


def _table(keys: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = [_array((key[place] for key in keys), field.type) for place, field in enumerate(schema)]
    return pa.Table.from_arrays(columns, schema=schema)
