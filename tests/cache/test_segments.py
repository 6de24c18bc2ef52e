"""Segments and layers: every row that was given is there once, knows where it came from, and is found by its key."""

import collections
import contextlib
import dataclasses
import errno
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.cache import segments
from pyspark_lookup.cache.segments import (
    ROW_BITS,
    WITHOUT_FILES,
    Segment,
    SegmentBuilder,
    SegmentFiles,
    write_file_list,
)
from pyspark_lookup.columnar import buffers as columns
from pyspark_lookup.columnar.keys import Keys, Numbers, Order, Seed, SkewedError, order_rows
from pyspark_lookup.columnar.types import spark_type
from pyspark_lookup.core.threads import run_in_order
from pyspark_lookup.storage.disk import OpenSegment, ReservedFile, SegmentWriter
from pyspark_lookup.versions.file_columns import FileStates
from tests.support.disks import Opened, files_at_most, handles_below
from tests.support.fuzzing import by_day, fuzzed
from tests.support.key_values import KINDS, SEED, plain, scalar_values

PLENTY = 2**40
BOUND_S = 20.0  # nothing takes this long unless it hangs
ALWAYS = 0
NESTED = spark_type(pa.list_(pa.struct([("x", pa.int64()), ("y", pa.string())])))
Cut = tuple[int, Sequence[int]]


@contextlib.contextmanager
def limits(deal: int = PLENTY, partition: int = PLENTY) -> Iterator[None]:
    """Rows are dealt to partitions once there are `deal` bytes of them, of about `partition` bytes each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_DEAL_ABOVE_BYTES", deal)
        patch.setattr(segments, "_PARTITION_BYTES", partition)
        yield


def row_positions(cut: Cut) -> Numbers:
    file, rows = cut
    return np.array(rows, np.uint64) | np.uint64(file) << ROW_BITS


def describe(rows: Sequence[int]) -> SegmentFiles:
    """Files with these numbers of rows, each in one row group."""
    numbers = range(len(rows))
    urls, identities = pa.array([f"f{n}".encode() for n in numbers], pa.binary()), [f"v{n}" for n in numbers]
    states = FileStates(urls, np.arange(len(rows)) + 100, pa.array(identities, pa.string()))
    return SegmentFiles.from_units(states, [[(50, count)] for count in rows])


class Workshop:
    """A cache directory with segments made in it; counts temporary files and partitions of the latest one."""

    def __init__(self, root: Path) -> None:
        self.opened = Opened(root)
        self.disk = self.opened.disk
        self.tmp = self.opened.root / "tmp"
        self.names = map(str, itertools.count())
        self.spills = self.parts = 0

    def spill(self, size: int) -> ReservedFile:
        self.spills += 1
        return self.disk.reserve(size)

    def builder(
        self, schema: pa.Schema, keys: Sequence[str], *, seed: Seed = SEED, memory: int = PLENTY, threads: int = 0
    ) -> SegmentBuilder:
        self.spills = self.parts = 0
        return SegmentBuilder(schema, keys, seed, self.spill, memory, threads)

    def ordered(self, *args: Any) -> Order:
        self.parts += 1
        return order_rows(*args)

    def published(self, builder: SegmentBuilder, files: SegmentFiles, strict: bool = True) -> OpenSegment:
        """The segment that a builder makes of what it was given, opened; nothing else is left of it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segments, "order_rows", self.ordered)
            try:
                writer = builder.finish(self.disk.create_segment, files.rows, strict)
            finally:
                builder.close()
        name = next(self.names)
        write_file_list(writer, files)
        writer.finish(builder.meta)
        self.disk.publish_segment("t", name, writer)
        writer.close()
        assert os.listdir(self.tmp) == []
        return self.disk.open_segment("t", name)

    def build(
        self,
        files: Sequence[pa.RecordBatch],
        keys: Sequence[str],
        cuts: Sequence[Cut] | None = None,
        strict: bool = True,
        **how: Any,
    ) -> OpenSegment:
        """A segment of these files, given to the builder in cuts by some threads; without any, file by file."""
        cuts = cut_files(files, PLENTY) if cuts is None else cuts
        builder = self.builder(files[0].schema, keys, **how)
        total = sum(file.num_rows for file in files)

        def add(cut: Cut) -> None:
            batch = files[cut[0]].take(pa.array(cut[1], pa.int64()))
            builder.add([(batch, row_positions(cut), len(cut[1]) / max(total, 1))])

        collections.deque(run_in_order(add, cuts, how.get("threads", 0)), 0)
        assert builder.rows == total
        return self.published(builder, describe([file.num_rows for file in files]), strict)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("snapshots") / "cache")


def is_same(column: pa.Array, expected: pa.Array) -> bool:
    """Whether two columns hold equal values, a NaN being one. What has too much text comes as large text."""
    if column.type in (pa.large_string(), pa.large_binary()):
        column = column.cast(expected.type)
    return column.equals(expected) or (column.type == expected.type and plain(column) == plain(expected))


def check(opened: OpenSegment, files: Sequence[pa.RecordBatch], keys: Sequence[str]) -> Segment:
    """The segment, after checking that it holds exactly the rows of these files, in the order it promises."""
    segment = Segment(opened)
    rows = pa.Table.from_batches(files).combine_chunks()
    names = rows.column_names
    assert (segment.rows, segment.bytes, segment.keys) == (rows.num_rows, opened.bytes, tuple(keys))
    assert segment.schema == rows.schema
    assert segment.files.to_batch().equals(describe([file.num_rows for file in files]).to_batch())
    assert segment.file_starts.tolist() == [0, *itertools.accumulate(file.num_rows for file in files)]
    ordinals = segment.ordinals.tolist()
    assert sorted(ordinals) == list(range(rows.num_rows))
    expected = [rows[name].combine_chunks().take(pa.array(ordinals, pa.int64())) for name in names]
    for column, expected_column in zip(segment.slice(names, 0, segment.rows), expected, strict=True):
        column.validate(full=True)
        assert is_same(column, expected_column)
    start, stop = segment.rows // 3, segment.rows * 2 // 3
    for column, expected_column in zip(segment.slice(names[::-1], start, stop), expected[::-1], strict=True):
        assert is_same(column, expected_column.slice(start, stop - start))
    row_numbers = np.arange(segment.rows)[::-2]
    for column, expected_column in zip(segment.take(names, row_numbers), expected, strict=True):
        assert is_same(column, expected_column.take(pa.array(row_numbers)))
    if keys:
        check_keys(segment, [rows[name].combine_chunks() for name in keys])
    return segment


def check_keys(segment: Segment, key_columns: Sequence[pa.Array]) -> None:
    """Rows lie key by key and in each in their own order, those without a key behind; probing finds them."""
    given_keys = list(zip(*map(plain, key_columns), strict=True))
    ordered = [given_keys[ordinal] for ordinal in segment.ordinals.tolist()]
    valid = [None not in key for key in ordered]
    assert valid == sorted(valid, reverse=True)
    groups = [(key, [*rows]) for key, rows in itertools.groupby(range(sum(valid)), key=ordered.__getitem__)]
    assert len({key for key, _ in groups}) == len(groups)
    by_key = {key: segment.ordinals[rows].tolist() for key, rows in groups}
    assert all(ordinals == sorted(ordinals) for ordinals in by_key.values())
    probed_columns = [
        pa.concat_arrays([column, pa.nulls(1, column.type), column.slice(0, 3)]) for column in key_columns
    ]
    keys = Keys(probed_columns)
    matches = segment.probe(keys, keys.hashes(segment.seed))
    pairs = list(zip(matches.keys.tolist(), segment.ordinals[matches.rows].tolist(), strict=True))
    probed = enumerate(zip(*map(plain, probed_columns), strict=True))
    assert pairs == [(number, ordinal) for number, key in probed for ordinal in by_key.get(key, ())]


@st.composite
def drawn_files(draw: st.DrawFn) -> tuple[list[pa.RecordBatch], list[str], list[Cut]]:
    """Files of every kind of column, the names of the keys, and batches that come in any order."""
    kinds = draw(st.lists(st.sampled_from(KINDS), max_size=2))
    pools = [draw(st.lists(st.none() | scalar_values(kind), min_size=1, max_size=8)) for kind in kinds]
    rng = draw(st.randoms(use_true_random=False))
    schema = pa.schema([
        *((f"k{n}", kind) for n, kind in enumerate(kinds)),
        ("few", pa.string()), ("text", pa.string()), ("flag", pa.bool_()), ("nested", NESTED), ("number", pa.decimal128(20, 2)),
    ])  # fmt: skip
    files, cuts = [], list[Cut]()
    for file, count in enumerate(draw(st.lists(st.integers(0, 40) | st.just(100), min_size=1, max_size=4))):
        rows = range(count)
        filled: list[list[Any]] = [[rng.choice(pool) for _ in rows] for pool in pools]
        filled.append([rng.choice(["a", "bb", "", None]) for _ in rows])
        filled.append([None if rng.random() < 0.1 else f"{file} {row} " * rng.randrange(4) for row in rows])
        filled.append([rng.choice([True, False, None]) for _ in rows])
        lists = [[None, [], [None], [{"x": row, "y": str(row)}, {"x": None, "y": None}]] for row in rows]
        filled.append([rng.choice(options) for options in lists])
        filled.append([None if row % 7 == 3 else row for row in rows])
        arrays = [pa.array(values, field.type) for values, field in zip(filled, schema, strict=True)]
        files.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
        edges = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=3))})
        # Out of order, and overlapping, as in a fold.
        order = rng.sample(rows, count) if draw(st.booleans()) else list(rows)
        cuts += [(file, order[a:b]) for a, b in itertools.pairwise(edges)]
    if draw(st.booleans()):
        cuts = draw(st.permutations(cuts))
    return files, [f"k{n}" for n in range(len(kinds))], cuts


SIZES = st.sampled_from([ALWAYS, 10, 300, 1000, PLENTY])


@fuzzed(40)
@given(drawn=drawn_files(), deal=SIZES, partition=SIZES.filter(bool), memory=SIZES, threads=st.sampled_from([0, 1, 3]))
def test_a_segment_holds_the_rows_it_was_given(
    workshop: Workshop, drawn: Any, deal: int, partition: int, memory: int, threads: int
) -> None:
    """Of any columns, keys, batches, limits and threads a segment holds exactly the rows that came, and says where each came from."""
    files, keys, cuts = drawn
    with limits(deal, partition):
        segment = check(workshop.build(files, keys, cuts, memory=memory, threads=threads), files, keys)
    added_rows = [(file, row) for file, rows in cuts for row in rows]
    if not keys and added_rows == sorted(added_rows):
        assert segment.ordinals.tolist() == list(range(segment.rows))
    schema = files[0].schema
    empty = Segment(workshop.published(workshop.builder(schema, keys), describe([])))  # of a version without files
    assert (empty.rows, len(empty.files)) == (0, 0)
    assert [len(column) for column in empty.slice(schema.names, 0, 0)] == [0] * len(schema)


def numbered(rows: Sequence[int], **more: Sequence[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"k": pa.array(rows, pa.int64()), "row": pa.array(range(len(rows)), pa.int64()), **more}
    )


def cut_files(files: Sequence[pa.RecordBatch], rows: int) -> list[Cut]:
    return [
        (n, range(start, min(start + rows, file.num_rows)))
        for n, file in enumerate(files)
        for start in range(0, file.num_rows, rows)
    ]


# (bytes before dealing, of a partition, in memory) -> whether there are several partitions, and temporary files.
WAYS = {
    "in memory": (PLENTY, PLENTY, PLENTY, False, False), "dealt to one partition": (1000, PLENTY, PLENTY, False, False),
    "dealt to many": (1000, 2000, PLENTY, True, False), "spilled": (1000, PLENTY, 1000, True, True),
    "dealt and spilled": (1000, 2000, 4000, True, True), "spilled at every batch": (ALWAYS, 100, ALWAYS, True, True),
}  # fmt: skip
in_every_way = pytest.mark.parametrize("way", WAYS)


@pytest.mark.parametrize(
    ("way", "wide"), by_day([*((way, False) for way in WAYS), *((way, True) for way in reversed(WAYS))], 3)
)
def test_text_beyond_32_bits(monkeypatch: pytest.MonkeyPatch, workshop: Workshop, way: str, wide: bool) -> None:
    """Of more text than 32-bit offsets reach, what is read is the text that was given."""
    monkeypatch.setattr(segments, "_INT32_AT_MOST", 100)
    if wide:
        monkeypatch.setattr(columns, "_INT32_AT_MOST", 5000)
    texts = [None if n % 9 == 2 else f"text {n % 250}" for n in range(1000)]
    raw = pa.array([None if text is None else text.encode() for text in texts])
    files = [numbered(range(1000), text=pa.array(texts), raw=raw, few=["x"] * 1000)]
    deal, partition, memory, *_ = WAYS[way]
    with limits(deal, partition):
        opened = workshop.build(files, ["text"], cut_files(files, 80), memory=memory)
    columns_read = check(opened, files, ["text"]).slice(["text", "raw"], 0, 1)
    large, small = [pa.large_string(), pa.large_binary()], [pa.string(), pa.binary()]
    assert [column.type for column in columns_read] == (large if wide else small)


@pytest.mark.parametrize(
    ("keys", "name", "wrong_values"),
    [
        (["k"], "low", [1, -1, True, 2**62]),
        (["text"], "seed", [[SEED.first + 2, SEED.second], [SEED.first, SEED.second + 2], [1, 1]]),
        (["k", "text"], "seed", [[SEED.second, SEED.first]]),
    ],
)
def test_an_index_that_does_not_find_its_first_key(
    workshop: Workshop, keys: list[str], name: str, wrong_values: list[Any]
) -> None:
    """A footer with another first slot or seed would have keys lead to rows of others, or nowhere: it is none of ours."""
    opened = workshop.build([numbered(range(100), text=[f"text {n}" for n in range(100)])], keys)
    assert Segment(opened).rows == 100
    for wrong_value in wrong_values:
        with pytest.raises(ValueError, match="first row's key does not find the row"):
            Segment(dataclasses.replace(opened, meta={**opened.meta, name: wrong_value}))


def test_a_segment_without_its_files(workshop: Workshop) -> None:
    """A segment without the list of its files is refused. One that says it needs none counts its rows as those of one file."""
    opened = workshop.build([numbered(range(100))], ["k"])
    regions = {name: region for name, region in opened.regions.items() if name != "files"}
    with pytest.raises(KeyError):
        Segment(dataclasses.replace(opened, regions=regions))
    nameless = Segment(dataclasses.replace(opened, regions=regions, meta={**opened.meta, WITHOUT_FILES: True}))
    assert (len(nameless.files), nameless.files.rows.tolist()) == (1, [100])


def fill(builder: SegmentBuilder, file: pa.RecordBatch) -> None:
    for cut in cut_files([file], 50):
        rows = cut[1]
        builder.add([(file.slice(rows[0], len(rows)), row_positions(cut), len(rows) / file.num_rows)])


@pytest.mark.parametrize("way", by_day(["in memory", "dealt and spilled"], 2))
def test_a_full_disk_leaves_nothing(workshop: Workshop, way: str) -> None:
    """Wherever writing fails the error reaches the caller, and no file is left; a builder may be closed twice."""
    deal, partition, memory, *_ = WAYS[way]
    file = numbered(range(400), text=[f"text {n}" for n in range(400)], few=["a"] * 400)
    before = handles_below(workshop.opened.root)
    append = SegmentWriter.append
    for calls in itertools.count():
        calls_left = itertools.count(calls, -1)

        def fill_up(*args: Any, calls_left: Iterator[int] = calls_left) -> None:
            if next(calls_left) == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            append(*args)

        with limits(deal, partition):
            builder = workshop.builder(file.schema, ["k"], memory=memory)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SegmentWriter, "append", fill_up)
            try:
                with contextlib.nullcontext() if calls else files_at_most(100):
                    fill(builder, file)
                    writer = builder.finish(workshop.disk.create_segment, [400])
            except OSError as error:
                assert error.errno in (errno.ENOSPC, errno.EFBIG)
            else:
                writer.close()
                break
            finally:
                builder.close()
                builder.close()
        assert os.listdir(workshop.tmp) == []
    assert calls > 5
    del builder, writer
    assert os.listdir(workshop.tmp) == []
    assert handles_below(workshop.opened.root) == before


@in_every_way
def test_a_seed_that_does_not_suit(workshop: Workshop, way: str) -> None:
    """Keys that fill a bucket under a seed are SkewedError, and nothing is left; unless told to be lenient, then all is right."""
    files = [numbered([n * 5000 for n in range(400)])]
    weak = Seed(1, 1)
    deal, partition, memory, *_ = WAYS[way]
    with limits(deal, partition):
        before = handles_below(workshop.opened.root)
        with pytest.raises(SkewedError):
            workshop.build(files, ["k"], cut_files(files, 50), seed=weak, memory=memory)
        assert os.listdir(workshop.tmp) == []
        assert handles_below(workshop.opened.root) == before
        opened = workshop.build(files, ["k"], cut_files(files, 50), seed=weak, memory=memory, strict=False)
    assert check(opened, files, ["k"]).seed == weak


def test_threads_that_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several failures the first in order is raised, and no thread is left; if not all threads can be started, fewer do the work."""
    failed = threading.Event()
    workers = set()

    def do(number: int) -> int:
        workers.add(threading.current_thread())
        if number == 3:
            assert failed.wait(BOUND_S)
            raise ValueError(number)
        if number > 3:
            failed.set()
            raise KeyError(number)
        return number

    results = run_in_order(do, itertools.count(), 3)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="3"):
        next(results)
    results = run_in_order(do, itertools.count(), 3)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert all(worker.daemon and not worker.is_alive() for worker in workers)
    start = threading.Thread.start
    for start_limit in range(3):
        starts_left = [start_limit]

        def refuse(thread: threading.Thread, starts_left: list[int] = starts_left) -> None:
            if not starts_left[0]:
                raise RuntimeError("can't start new thread")
            starts_left[0] -= 1
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        assert list(run_in_order(str, range(9), 3)) == [*"012345678"]
