"""The cache in memory: its contract beyond what an ordered dictionary does, as Flink's own tests have it (FLIP-221), and what once was wrong."""

import concurrent.futures
import contextlib
import copy
import math
import pickle
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.cache.lookup_cache import LookupCache
from pyspark_lookup.cache.memory import KEY_INDEX, DefaultLookupCache, DefaultLookupCacheBuilder, default_cache
from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.core.metrics import UNSET
from pyspark_lookup.errors import OptionError, SchemaError
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.registry import parse_options
from tests.support.column_values import draw_pieces, kinds
from tests.support.fakes import FakeClock
from tests.support.fuzzing import fuzzed
from tests.support.memory_cache import (
    UNBOUNDED,
    Row,
    counts,
    list_present,
    list_values,
    make_cache,
    make_disk_cache,
    make_keys,
    make_rows,
    opened,
    small,
)


def wrap_buffer(numbers: Numbers) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])


MEMORY_OR_DISK = pytest.mark.parametrize("place", ["memory", "disk"])


@MEMORY_OR_DISK
def test_what_was_passed_in_may_change(place: str, tmp_path: Path) -> None:
    """Keys, rows, ages and answers are the caller's: changing them changes nothing in the cache, whose rows expire by the ages that were put."""
    clock = FakeClock()
    cache: LookupCache = make_cache(clock, expire_after_write_s=10, max_rows=100)
    if place == "disk":
        cache = make_disk_cache(tmp_path / "c", clock, expire_after_write_s=10)
    for count in (1, 5):
        keys, values, ages = np.arange(count), np.arange(count) + 100, np.zeros(count)
        places = np.arange(count)
        cache.put_many(
            pa.table({"k": wrap_buffer(keys)}),
            pa.table({"v": wrap_buffer(values), KEY_INDEX: wrap_buffer(places)}),
            ages,
        )
        for passed in (keys, values, places, ages):
            passed.fill(-7)
        probes = np.arange(count)
        answer = cache.get_many(pa.table({"k": wrap_buffer(probes)}))
        probes.fill(-7)
        answer.present.fill(False)
        assert list_values(cache.get_many(make_keys(*range(count)))) == [[100 + n] for n in range(count)]
    clock.tick(9)
    assert list_present(cache, list(range(5))) == list(range(5))
    clock.tick(1)
    assert list_present(cache, list(range(5))) == []


@pytest.fixture
def switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    "bounds", [{"max_rows": 30}, {"max_rows": UNBOUNDED}, {"max_bytes": 2000, "expire_after_access_s": 60}, None]
)
def test_many_threads(bounds: dict[str, int] | None, switching: None, tmp_path: Path) -> None:
    """From any number of threads no key gets rows of another, and hits and misses add up. `bounds` is None for a cache on disk."""
    cache: LookupCache = make_disk_cache(tmp_path / "c") if bounds is None else make_cache(**bounds)
    cache, metrics = opened(cache)
    turns, workers = (8, 3) if bounds is None else (80, 6)
    reads = [0] * workers

    def number_rows(keys: list[int]) -> list[Row]:
        return [
            {"v": 100 * key + n, "t": "x" * key, KEY_INDEX: at} for at, key in enumerate(keys) for n in range(key % 4)
        ]

    schema = pa.schema([("v", pa.int64()), ("t", pa.string()), (KEY_INDEX, pa.int64())])

    def work(thread: int) -> None:
        draw = random.Random(thread)
        for turn in range(turns):
            keys = [draw.randrange(25) for _ in range(draw.randrange(1, 8))]
            if turn % 3 == 0:
                cache.put_many(make_keys(*keys), pa.Table.from_pylist(number_rows(keys), schema))
            elif turn % 20 == 7:
                cache.invalidate_many(make_keys(*keys))
                cache.open(metrics)
            else:
                answer = cache.get_many(make_keys(*keys))
                reads[thread] += len(keys)
                if answer.rows is None:
                    assert not answer.present.any()
                    continue
                expected = [row for row in number_rows(keys) if answer.present[row[KEY_INDEX]]]
                assert answer.rows.to_pylist() == expected
                assert cache.size() >= 0 <= cache.bytes()

    with small(), concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    assert sum(counts(metrics)) == sum(reads)
    assert counts(metrics)[0] > 0
    assert cache.size() <= (bounds or {}).get("max_rows", UNBOUNDED)
    assert cache.bytes() <= (bounds or {}).get("max_bytes", UNBOUNDED)


def test_keys_in_another_form() -> None:
    """Keys mean the same in another order and spelling of columns, narrower, as codes and in chunks, to all operations."""
    cache, second = make_cache(), make_cache()
    a, b = pa.array([1, 2, -3], pa.int64()), pa.array(["x", "y", ""])
    table = pa.table({"a": a, "b": b})
    keys = pa.table({"more": a, "B": pa.chunked_array([b[:2], b[2:]]).dictionary_encode(), "a": a.cast(pa.int8())})
    cache.put_many(table, make_rows(1, [2, 3], []))
    assert list_values(cache.get_many(keys)) == [[1], [2, 3], []]
    cache.put_many(keys, make_rows([4, 5], 6, 7))
    assert list_values(cache.get_many(table)) == [[4, 5], [6], [7]]
    assert cache.size() == 4
    cache.invalidate_many(keys.slice(1, 1))
    assert list_values(cache.peek_many(keys)) == [[4, 5], None, [7]]
    second.put_many(keys.select(["B", "a"]), make_rows(1, [2, 3], []))
    assert list_values(second.get_many(keys.select(["B", "a"]))) == [[1], [2, 3], []]


@MEMORY_OR_DISK
def test_rows_in_other_forms(place: str, tmp_path: Path) -> None:
    """Rows may have columns in another order, as codes, narrower, in chunks, and an index of any integer type."""
    cache: LookupCache = make_cache() if place == "memory" else make_disk_cache(tmp_path / "c")
    cache.put_many(make_keys(0), pa.table({"v": pa.array([0], pa.int64()), "t": ["z"], KEY_INDEX: [0]}))
    texts, places = pa.array(["b", "a", "b", None]).dictionary_encode(), pa.array([1, 0, 1, 1], pa.uint8())
    index = pa.chunked_array([places[:2], places[2:]])
    cache.put_many(make_keys(1, 2), pa.table({KEY_INDEX: index, "t": texts, "v": pa.array([1, 2, 3, 4], pa.int16())}))
    answer = cache.get_many(make_keys(2, 1, 2))
    assert answer.rows.schema == pa.schema([("v", pa.int64()), ("t", pa.string()), (KEY_INDEX, pa.int64())])
    twice = [(1, "b"), (3, "b"), (4, None)]
    expected = [(*row, 0) for row in twice] + [(2, "a", 1)] + [(*row, 2) for row in twice]
    assert list(zip(*(column.to_pylist() for column in answer.rows.columns), strict=True)) == expected


def test_reading_takes_no_memory_for_ever() -> None:
    """However often a cache is read, the moments of it are not kept where nothing expires by them."""
    clock = FakeClock()
    with small():
        cache = make_cache(clock, max_rows=10)
        cache.put({"k": 1}, [{"v": 1}])
        keys = make_keys(1)
        tracemalloc.start()
        try:
            for _ in range(500):
                clock.tick(1)
                cache.get_many(keys)
            snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, default_cache.__file__)])
            assert sum(trace.size for trace in snapshot.traces) < 15_000  # a time for each read would be 40,000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("bounds", [{"max_bytes": 2**20}, {"max_rows": 10}])
def test_the_dead_take_little_more_than_the_living(bounds: dict[str, int]) -> None:
    """Memory in use is a small multiple of what is held, also where entries are few and large."""
    cache = make_cache(**bounds)
    text = "x" * 100_000
    tracemalloc.start()
    try:
        for number in range(100):  # of which nothing but the latest ten may stay
            cache.put_many(make_keys(number), pa.table({"t": [text], KEY_INDEX: [0]}))
        assert cache.bytes() <= 11 * 100_000
        assert tracemalloc.get_traced_memory()[0] < 8 * 2**20
    finally:
        tracemalloc.stop()


ONE_KEY, TWO_COLUMNS = make_keys(2), {"v": [1], "w": [1]}
REFUSED: dict[str, tuple[pa.Table, pa.Table, type[Exception]]] = {
    "a fraction as a number": (pa.table({"k": [1.0]}), make_rows(1), SchemaError),
    "another number of key columns": (pa.table({"x": [1], "y": [2]}), make_rows(1), SchemaError),
    "a number too large for the key": (make_keys(2**32 + 1), make_rows(1), ValueError),
    "a null among keys": (pa.table({"k": pa.array([2, None], pa.int32())}), make_rows(1), ValueError),
    "a list as a key": (pa.table({"k": [[1]]}), make_rows(1), SchemaError),
    "rows without a column": (ONE_KEY, pa.table({"v": [1], KEY_INDEX: [0]}), SchemaError),
    "rows without an index": (ONE_KEY, pa.table(TWO_COLUMNS), SchemaError),
    "a column more": (ONE_KEY, pa.table({**TWO_COLUMNS, "x": [1], KEY_INDEX: [0]}), SchemaError),
    "a fraction": (ONE_KEY, pa.table({"v": [1.5], "w": [1], KEY_INDEX: [0]}), SchemaError),
    **{
        f"rows of {places}": (make_keys(2, 3), pa.table({"v": [1, 2], "w": [1, 2], KEY_INDEX: places}), ValueError)
        for places in ([0, 2], [-1, 0], [0, None])
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_leaves_no_trace(name: str) -> None:
    """Keys and rows that are none of the cache's are an error; it holds what it held, and if that is nothing, the next put decides."""
    keys, rows, error = REFUSED[name]
    cache, metrics = opened(make_cache())
    cache.put_many(pa.table({"k": pa.array([1], pa.int32())}), pa.table({**TWO_COLUMNS, KEY_INDEX: [0]}))
    operations: list[Callable[[], object]] = [lambda: cache.put_many(keys, rows)]
    if error is SchemaError and keys is not ONE_KEY:
        operations += [lambda: cache.get_many(keys), lambda: cache.peek_many(keys), lambda: cache.invalidate_many(keys)]
    for operation in operations:
        with pytest.raises(error):
            operation()
    assert counts(metrics) == (0, 0)
    assert cache.get_if_present({"k": 1}) == [{"v": 1, "w": 1}]
    assert list_present(cache, [1, 2, 3, 2**32 + 1]) == [1]
    assert cache.size() == 1
    empty = make_cache()
    with contextlib.suppress(SchemaError, ValueError):  # some of it would do for the first put
        empty.put_many(keys, rows)
        return
    empty.put_many(make_keys(1), make_rows(1))
    assert list_values(empty.get_many(make_keys(1))) == [[1]]


@MEMORY_OR_DISK
def test_one_key_at_a_time(place: str, tmp_path: Path) -> None:
    """`put` returns the rows that it replaces; columns are those of the first row until the cache is closed, which is safe at any time."""
    cache: LookupCache = make_cache() if place == "memory" else make_disk_cache(tmp_path / "c")
    cache.close()
    cache, metrics = opened(cache)
    assert cache.put({"k": 1}, []) is None
    assert cache.get_many(make_keys(1, 2)).rows is None
    assert cache.put({"k": 1}, [{"v": 1}, {"v": 1}]) == []
    assert cache.put({"k": 1}, [{"v": 3}]) == [{"v": 1}, {"v": 1}]
    with pytest.raises(ValueError, match="null value"):
        cache.put({"k": 1}, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has a null: such a key matches no rows"):
        cache.put({"k": None}, [])
    assert cache.get_if_present({"k": 1}) == [{"v": 3}]
    assert metrics.snapshot()["latestLoadTime"] == UNSET  # what only a load knows
    for _ in range(2):
        cache.close()
    if place == "disk":
        assert cache.get_if_present({"k": 1}) == [{"v": 3}]
        return
    assert (cache.size(), cache.bytes()) == (0, 0)
    assert [metrics.snapshot()[name] for name in ("numCachedRecords", "numCachedBytes")] == [0, 0]
    cache.put({"name": "one"}, [{"w": None}])


@fuzzed(100)
@given(data=st.data())
def test_rows_of_every_type(data: st.DataObject) -> None:
    """Rows of all types, put in pieces, come back equal and in their type, while others are replaced and forgotten."""
    kind = data.draw(kinds(2), label="kind")
    pieces = draw_pieces(data.draw, kind)
    draw = random.Random(len(pieces))
    whole = pa.concat_arrays(pieces) if pieces else pa.array([], kind)
    numbers = list(range(len(whole)))
    with small():
        cache = make_cache()
        row = 0
        for piece in pieces:
            # Each row is first put for a key that is replaced by the next piece.
            keys = [-1, *range(row, row + len(piece))]
            places = pa.array([*range(1, len(piece) + 1), *([0] if len(piece) else [])], pa.int64())
            rows = pa.concat_arrays([piece, piece.slice(0, 1)])
            cache.put_many(make_keys(*keys), pa.table({"c": rows, KEY_INDEX: places}))
            row += len(piece)
        earlier = cache.peek_many(make_keys(*numbers))
        invalidated = draw.sample(numbers, len(numbers) // 2)
        cache.invalidate_many(make_keys(-1, *invalidated))
        probes = draw.choices(numbers, k=len(numbers))
        present = [number for number in probes if number not in invalidated]
        answer = cache.get_many(make_keys(*probes))
        assert answer.present.tolist() == [number not in invalidated for number in probes]
        if not pieces:
            assert answer.rows is None
            return
        for result, expected in ((answer, present), (earlier, numbers)):
            assert result.rows.schema == pa.schema([("c", kind), (KEY_INDEX, pa.int64())])
            result.rows.validate(full=True)
            column = result.rows["c"].combine_chunks()
            assert column.equals(pc.take(whole, pa.array(expected, pa.int64())))


TEXT = "text of some length"


@pytest.mark.parametrize(
    ("kind", "value"), [(pa.string(), TEXT), (pa.map_(pa.string(), pa.binary()), [(TEXT, TEXT.encode())])], ids=str
)
def test_text_past_32_bits(kind: pa.DataType, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text whose offsets need 64 bits comes back in the type that was put, from then on and after dead rows went."""
    monkeypatch.setattr(default_cache, "_INT32_AT_MOST", 100)
    with small():
        cache = make_cache(max_rows=30)
        for number in range(50):
            keys = pa.table({"k": [f"key number {number}"]})
            cache.put_many(keys, pa.table({"c": pa.array([value], kind), KEY_INDEX: [0]}))
            answer = cache.get_many(pa.table({"k": [f"key number {n}" for n in (number, max(0, number - 5))]}))
            assert answer.present.all()
            assert answer.rows.schema.field("c").type == kind
            assert answer.rows["c"].to_pylist() == [value] * 2
        assert cache.size() == 30


BOUNDS = ["expire_after_access", "expire_after_write", "max_rows", "max_bytes"]
SETTINGS = {
    "expire_after_access_s": 15.513, "expire_after_write_s": 18.213, "max_rows": 15213, "max_bytes": 2**20,
    "cache_missing_key": False,
}  # fmt: skip


def test_a_copy_has_the_same_bounds() -> None:
    """Pickling keeps the configuration, drops what is held, and caches are equal by their configuration."""
    cache, _ = opened(DefaultLookupCache(**SETTINGS))
    cache.put({"k": 1}, [{"v": n} for n in range(4)])
    for copied in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        assert copied == cache
        assert hash(copied) == hash(cache)
        assert all(f"{name}={value!r}" in repr(copied) for name, value in SETTINGS.items())
        assert copied.size() == copied.bytes() == 0
        copied.put({"name": "a"}, [{"other": "b"}])  # nothing is left of the old columns
        assert cache.size() == 4
    for name, value in SETTINGS.items():
        changed = not value if isinstance(value, bool) else value + 1
        assert DefaultLookupCache(**{**SETTINGS, name: changed}) != cache
    assert cache != SETTINGS


def options(**more: str) -> LookupOptions:
    required = {"path": "/t", "lookup.keys": "k", "lookup.cache": "PARTIAL"}
    return parse_options({**required, **{f"lookup.partial-cache.{name}": text for name, text in more.items()}})


def test_options_are_honoured() -> None:
    """`lookup.partial-cache.*` say what the builder says, and a cache of them is on the clock that it is given."""
    cache = DefaultLookupCache.from_options(
        options(**{
            "expire-after-access": "15513 ms", "expire-after-write": "18213 ms", "max-rows": "15213",
            "max-bytes": "1 MiB", "cache-missing-key": "false",
        })
    )  # fmt: skip
    builder = DefaultLookupCache.new_builder().expire_after_access(15.513).expire_after_write(18.213)
    builder.max_rows(15213).max_bytes(2**20).cache_missing_key(False)
    assert cache == DefaultLookupCache(**SETTINGS) == builder.build()
    clock = FakeClock()
    timed = DefaultLookupCache.from_options(options(**{"expire-after-write": "5 s"}), lambda: clock.steady_s)
    assert timed == DefaultLookupCacheBuilder().expire_after_write(5).build()
    timed.put({"k": 1}, [{"v": 1}])
    clock.tick(5)
    assert timed.get_if_present({"k": 1}) is None
    with pytest.raises(OptionError, match=r"lookup\.cache .*needs 'PARTIAL'"):
        DefaultLookupCache.from_options(parse_options({"path": "/t"}))


def test_a_cache_needs_a_bound() -> None:
    """Without any bound a cache would grow for ever: the error names all four. A bound is 0 or more."""
    unbounded = options(**{"max-rows": "1"}).with_values({"lookup.partial-cache.max-rows": None})
    for make, arguments in (
        (options, ()),
        (DefaultLookupCache.from_options, (unbounded,)),
        (DefaultLookupCache, ()),
        (DefaultLookupCacheBuilder().cache_missing_key(True).build, ()),
    ):
        with pytest.raises(OptionError, match=r"grow (for ever|without bound)") as caught:
            make(*arguments)
        assert all(f"lookup.partial-cache.{name.replace('_', '-')}" in str(caught.value) for name in BOUNDS)
    for name in BOUNDS:
        for wrong in (-1, math.nan):
            with pytest.raises(ValueError, match=name):
                getattr(DefaultLookupCacheBuilder(), name)(wrong)
        getattr(DefaultLookupCacheBuilder(), name)(0).build()
