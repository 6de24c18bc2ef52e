"""The partial cache: which keys a change of files can have touched."""

import dataclasses
import datetime
import decimal
import itertools
import math
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.cache.partial.registry import Changes
from pyspark_lookup.columnar.predicate import ColumnStats, join_stats
from pyspark_lookup.columnar.types import cast_column, spark_type
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.stores import FileVersion
from pyspark_lookup.versions.file_columns import ColumnFiles, EmptyColumns
from pyspark_lookup.versions.model import TableVersion
from tests.support.disks import Opened, files_at_most
from tests.support.fakes import FakeClock, make_host
from tests.support.fuzzing import fuzzed
from tests.support.partial_cache import GROUP_ROWS, SPACE, is_nan, may_hold, new_directory, stats

CLOCK, RNG = FakeClock().host(), random.Random(7)
NUMBER_KEYS = pa.schema([("k", pa.int64())])
Bounded = list[ColumnStats | None]


class Process:
    """What a process of a host knows of a table's versions. `bounds`: those of each file."""

    def __init__(self, cache_dir: Path | None, bounds: Mapping[str, Bounded], keys: pa.Schema = NUMBER_KEYS) -> None:
        opened = None if cache_dir is None else Opened(cache_dir)
        disk, self.metrics = (None, CacheMetricGroup()) if opened is None else (opened.disk, opened.metrics)
        self.changes = Changes(HostContext(disk, self.metrics, CLOCK, RNG), SPACE, keys)
        self.keys, self.bounds, self.requests = keys, bounds, 0
        self.versions: dict[str, TableVersion] = {}

    @staticmethod
    def version(*names: str) -> TableVersion:
        """The version of these files; `a.1` and `a.2` are two states of one."""
        files = (FileVersion(f"file:///dim/{name.split('.')[0]}", 100, name) for name in names)
        return TableVersion("t", tuple(files))

    def remember(self, *names: str) -> TableVersion:
        def read_bounds(files: Sequence[FileVersion]) -> list[Bounded]:
            self.requests += 1
            return [self.bounds[file.identity] for file in files]

        version = self.version(*names)
        self.changes.remember(version, read_bounds, self.versions.get)
        self.versions[version.digest] = version
        return version

    def differ(self, old: TableVersion, new: TableVersion, *columns: Sequence[Any]) -> list[bool] | None:
        arrays = [pa.array(values, field.type) for values, field in zip(columns, self.keys, strict=True)]
        answer = self.changes.may_differ(new.digest, old.digest, arrays)
        return None if answer is None else answer.tolist()


RANGES: dict[str, Bounded] = {"a.1": [stats(0, 9)], "a.2": [stats(5, 12)], "b.1": [stats(10, 19)]}


def test_versions_are_recorded_once(cache_dir: Path) -> None:
    """A version's files are asked for their bounds by one process, once, for each set of keys; the host knows which one came last."""
    first, second = Process(cache_dir, RANGES), Process(cache_dir, {"a.2": RANGES["a.2"]})
    assert first.changes.is_latest("anything")
    old = first.remember("a.1")
    assert first.changes.is_latest(old.digest)
    new = second.remember("a.2")
    for process in (first, second, first):
        assert not process.changes.is_latest(old.digest)
        assert process.changes.is_latest(new.digest)
        assert process.remember("a.1") == old  # known already, so it is no news
        assert process.changes.is_latest(new.digest)
    assert (first.requests, second.requests) == (1, 1)
    two_columns = Process(cache_dir, {"a.1": [stats(0, 1), stats(0, 1)]}, pa.schema([*NUMBER_KEYS, ("l", pa.int64())]))
    for _ in range(2):
        two_columns.remember("a.1")
    assert two_columns.requests == 1
    assert Process(None, RANGES).changes.is_latest(old.digest)


def test_a_table_that_was_large(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of a large version has only what changed. A file that it lost and that came back has changed for it."""
    host = Process(cache_dir, RANGES | {"c.1": [stats(30, 39)]})
    with monkeypatch.context() as patch:
        version = Process.version

        def as_columns(*names: str) -> TableVersion:
            files = ColumnFiles.merge(EmptyColumns(), np.zeros(0, np.int64), version(*names).files)
            return dataclasses.replace(version(*names), files=files)

        patch.setattr(host, "version", as_columns)
        old, new = host.remember("a.1", "b.1"), host.remember("b.1")
    assert host.differ(old, new, [5, 15]) == [True, False]
    latest = host.remember("a.1", "b.1", "c.1")
    assert host.differ(new, latest, [5]) in (None, [True])


def test_many_versions(cache_dir: Path) -> None:
    """However many versions there were, each is known, though not all in memory."""
    process = Process(cache_dir, {f"{n}.1": [stats(n, n)] for n in range(60)})
    versions = [process.remember(f"{n}.1", "59.1") for n in range(58)]
    for n in (0, 30, 57, 0):
        assert process.differ(versions[n], versions[56], [n, 56, 58, 59]) == [True, True, False, False]
    assert len(process.changes._tables) <= 16


def test_a_disk_that_takes_no_record(cache_dir: Path) -> None:
    """Without a place to record them bounds are this process's only; without a directory, or of an unknown version, nothing is known."""
    process = Process(cache_dir, RANGES)
    with files_at_most(0):
        old, new = process.remember("a.1"), process.remember("b.1")
    assert process.metrics.snapshot()["cacheFailureCount"] == 2
    assert process.differ(old, new, [1, 15, 30]) == [True, True, False]
    without = Process(None, RANGES)
    for process in (Process(cache_dir, RANGES), without):
        process.remember("b.1")
        assert process.differ(old, new, [1]) is process.differ(new, old, [1]) is None
    assert without.requests == 0


DAY = datetime.date(2024, 1, 10)
NOON = datetime.datetime(2024, 1, 10, 12)
UTC = datetime.timezone.utc


@pytest.mark.parametrize(
    ("kind", "low", "high", "key"),
    [
        (pa.float64(), math.nan, 1.0, 5.0),
        (pa.float64(), 1.0, math.nan, 5.0),
        (pa.float64(), None, None, math.nan),  # nothing but NaNs
        (pa.string(), b"\xff", b"\xff", "a"),
        (pa.int8(), 0, 300, 5),
        (pa.int8(), "a", "b", 5),
        (pa.decimal128(3, 1), decimal.Decimal("0.123"), decimal.Decimal(5), decimal.Decimal("9.9")),
    ],
)
def test_bounds_that_are_none(cache_dir: Path, kind: pa.DataType, low: Any, high: Any, key: Any) -> None:
    """A bound that is not a value of the key's type bounds nothing, nor do those that are joined with a NaN."""
    for nan in (stats(math.nan, math.nan, None), stats(0.0, math.nan, None)):
        for parts in ([nan, stats(1.0, 2.0)], [stats(1.0, 2.0), nan]):
            assert join_stats(parts) == ColumnStats(None, None, None, 20)
    process = Process(cache_dir, {"a.1": [stats(low, high)]}, pa.schema([("k", kind)]))
    assert process.differ(process.remember("a.1"), process.remember(), [key]) == [True]


# The values of generated key columns, by type.
DOMAIN: dict[pa.DataType, list[Any]] = {
    pa.int32(): [*range(-3, 9), 2**31 - 1], pa.int64(): [*range(-3, 9), 2**62],
    pa.string(): ["", "a", "aa", "b", "ba", "é", "z", "a\0"],
    pa.float32(): [-0.5, -0.0, 0.0, 2.25, 2.5, math.inf, -math.inf, math.nan],
    pa.float64(): [-1.5, -0.0, 0.0, 5e-324, 1.0, 2.0, math.inf, -math.inf, math.nan],
    pa.decimal128(7, 2): [decimal.Decimal(n) / 4 for n in range(-3, 9)],
    pa.decimal128(38, 0): [decimal.Decimal(10**37 + n) for n in range(4)],
    pa.date32(): [DAY + datetime.timedelta(n) for n in range(8)],
    pa.timestamp("us"): [NOON + datetime.timedelta(microseconds=n) for n in range(8)],
    pa.timestamp("us", "UTC"): [NOON.replace(tzinfo=UTC) + datetime.timedelta(hours=n) for n in range(8)],
    pa.binary(): [b"", b"a", b"a\0", b"b", b"\xff", b"\x80"], pa.bool_(): [False, True],
}  # fmt: skip
# So of types that files have no bounds of, or may have and keys may not.
STORED: dict[pa.DataType, list[Any]] = {
    pa.duration("us"): [datetime.timedelta(n) for n in range(4)], pa.uint8(): [0, 1, 127, 128, 255],
    pa.uint32(): [0, 1, 2**31 - 1, 2**31, 2**32 - 1], pa.uint64(): [0, 1, 2**63 - 1, 2**63, 2**64 - 1],
    pa.float16(): [np.float16(value) for value in (-2.0, -0.0, 0.5, 1.0, math.inf)],
    pa.large_string(): ["", "a", "b", "é"], pa.dictionary(pa.int32(), pa.string()): ["", "a", "b", "é"],
    pa.binary(2): [b"\0\0", b"aa", b"ab", b"\xff\xff"],
    pa.timestamp("ms"): [NOON + datetime.timedelta(milliseconds=n) for n in range(5)],
    pa.timestamp("s", "Europe/Berlin"): [NOON.replace(tzinfo=UTC) + datetime.timedelta(hours=n) for n in range(5)],
    pa.timestamp("ns"): [NOON + datetime.timedelta(microseconds=n) for n in range(5)],
    pa.date64(): [DAY + datetime.timedelta(n) for n in range(5)],
    pa.decimal128(20, 5): [decimal.Decimal(n) / 8 for n in (-9, -1, 0, 1, 100_000)],
}  # fmt: skip
VALUES = {**DOMAIN, **STORED}
UNBOUNDED = "d"  # the file whose bounds nobody wrote down


@st.composite
def two_versions(draw: st.DrawFn, kind: pa.DataType) -> Any:
    """(types of the keys, files of one version, files of the next): lists of keys by file name."""
    kinds = [kind, *draw(st.lists(st.sampled_from([*DOMAIN]), max_size=1))]
    file = st.lists(st.tuples(*(st.none() | st.sampled_from(VALUES[kind]) for kind in kinds)), max_size=6)
    names = ["a", "b", "c", "d"]
    before = {name: draw(file) for name in names[: draw(st.integers(1, 4))]}
    after = dict(before)
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        change = draw(st.none() | file)
        if change is not None:
            after[name] = change
        elif len(after) > 1:
            after.pop(name, None)
    return kinds, before, after


def write_files(path: Path, types: Sequence[pa.DataType], files: Mapping[str, Sequence[Any]], number: int) -> None:
    """The files of a version, each in small row groups; those that are as they were are left alone."""
    for old in path.glob("*.parquet"):
        if old.stem not in files:
            old.unlink()
    for name, keys in files.items():
        state = path / f".{name}"
        if state.exists() and state.read_text() == repr(keys):
            continue
        state.write_text(repr(keys))
        columns = {f"k{n}": pa.array([key[n] for key in keys], kind) for n, kind in enumerate(types)}
        rows = pa.table({**columns, "v": pa.array([f"{name} {number} {n}" for n in range(len(keys))], pa.string())})
        pq.write_table(rows, path / ".new", row_group_size=GROUP_ROWS, write_statistics=name != UNBOUNDED)
        os.replace(path / ".new", path / f"{name}.parquet")


def comparable(key: Sequence[Any]) -> tuple[Any, ...]:
    return tuple("NaN" if is_nan(part) else part for part in key)


def rows_by_key(files: Mapping[str, Sequence[Any]], numbers: Mapping[str, int]) -> dict[Any, list[str]]:
    """The rows of each key in file order, by brute force."""
    rows: dict[Any, list[str]] = {}
    for name in sorted(files):
        for n, key in enumerate(files[name]):
            rows.setdefault(comparable(key), []).append(f"{name} {numbers[name]} {n}")
    return rows


@pytest.mark.parametrize("kind", VALUES, ids=str)
@fuzzed(12)
@given(data=st.data())
def test_what_cannot_differ_does_not(kind: pa.DataType, data: st.DataObject) -> None:
    """A key that cannot differ has the same rows in both versions; one can if a file that only one of them has may hold it."""
    types, before, after = data.draw(two_versions(kind))
    with new_directory() as root:
        path = root / "dim"
        path.mkdir()
        names = [f"k{n}" for n in range(len(types))]
        options = parse_options({"path": str(path), "lookup.keys": ",".join(names)})
        host = make_host(str(path), root / "cache")
        schema = pa.schema([(name, spark_type(kind)) for name, kind in zip(names, types, strict=True)])
        first, second = (Changes(HostContext(host.disk, host.metrics, CLOCK, RNG), SPACE, schema) for _ in range(2))
        versions = []
        for number, files in enumerate((before, after)):
            write_files(path, types, files, number)
            table, version = host.resolver.discover(options)
            layout = host.reader.versions.layout(table, options, version)
            assert [layout.columns.field(name) for name in names] == list(schema)
            first.remember(
                version, lambda files, t=table, at=layout: host.reader.versions.key_bounds(t, at, files), lambda _: None
            )
            versions.append(version.digest)
        numbers = [dict.fromkeys(before, 0), {name: int(before.get(name) != after[name]) for name in after}]
        rows = [rows_by_key(files, at) for files, at in zip((before, after), numbers, strict=True)]
        keys = list(itertools.product(*(VALUES[kind] for kind in types)))
        arrays = [pa.array([key[n] for key in keys], kind) for n, kind in enumerate(types)]
        arrays = [cast_column(array, field.type, "", "") for array, field in zip(arrays, schema, strict=True)]
        (touched, *answers) = (c.may_differ(*v, arrays) for c in (first, second) for v in (versions[::-1], versions))
        assert all(answer is not None and answer.tolist() == touched.tolist() for answer in answers)
        changed = [item for item in before.items() if after.get(item[0]) != item[1]]
        changed += [item for item in after.items() if before.get(item[0]) != item[1]]
        for key, is_touched in zip(keys, touched.tolist(), strict=True):
            assert is_touched or rows[0].get(comparable(key), []) == rows[1].get(comparable(key), []), key
            if kind in DOMAIN:
                assert is_touched == any(name == UNBOUNDED or may_hold(file, key) for name, file in changed), key
