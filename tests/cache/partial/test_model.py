"""The partial cache over tables of files: whatever happens in between, its answers are the files', and what it must hold it holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.cache.partial import host_cache
from pyspark_lookup.errors import UfsUnavailableError
from tests.support.fakes import FakeClock
from tests.support.fuzzing import fuzzed
from tests.support.partial_cache import GROUP_ROWS, Dim, may_hold, new_directory, run_waiting

pytestmark = pytest.mark.slow

PREFIX = "lookup.partial-cache."
BOUNDS = {
    "none": {},
    "rows": {PREFIX + "max-rows": "8"},
    "bytes": {PREFIX + "max-bytes": "2000"},
    "access": {PREFIX + "expire-after-access": "10 s"},
    "write": {PREFIX + "expire-after-write": "10 s"},
    "no missing": {PREFIX + "max-rows": "20", PREFIX + "cache-missing-key": "false"},
}
SCHEMA = pa.schema([("id", pa.int64()), ("part", pa.string()), ("text", pa.string()), ("number", pa.int64())])
Row = tuple[Any, ...]

IDS, PARTS, PROCESS = st.integers(0, 9), st.sampled_from(["a", "b"]), st.integers(0, 2)
ROWS = st.lists(st.tuples(IDS | st.none(), PARTS | st.none(), st.sampled_from(["x", "yy", None])), max_size=4)
KEYS = st.lists(st.tuples(IDS, PARTS), min_size=1, max_size=6)
GET = st.tuples(st.just("get"), PROCESS, KEYS, st.sampled_from([True, True, True, False]))
STEPS = st.one_of(
    *[GET] * 5,
    st.tuples(st.just("write"), st.integers(0, 3), ROWS | st.none()),
    st.tuples(st.just("tick"), st.sampled_from([0.5, 9.5, 10.0])),
    st.tuples(st.just("merge"), PROCESS),
    st.tuples(st.just("die"), PROCESS),
    st.tuples(st.just("scan"), PROCESS, st.sets(IDS, min_size=1, max_size=4)),
)


class History:
    """One table of files that is looked up by `names`: by two processes of a host, and one that has no cache directory."""

    def __init__(self, root: Path, names: tuple[str, ...], options: dict[str, str]) -> None:
        self.path, self.names, self.options, self.root = root / "dim", names, options, root
        self.path.mkdir()
        self.files: dict[int, list[Row]] = {}
        self.serial = 0
        self.held: set[Row] = set()  # keys that were loaded, and that no change since can have touched
        self.write(0, [(1, "a", "x"), (1, "b", None), (2, "a", "yy")])
        self.clock = FakeClock()
        self.processes = [self.process(number) for number in range(3)]

    def process(self, number: int) -> Dim:
        cache_dir = self.root / "cache" if number < 2 else None
        return Dim(self.path, cache_dir, self.options, self.clock, keys=",".join(self.names))

    def key(self, row: Row) -> Row:
        return row[: len(self.names)]

    def write(self, number: int, rows: Sequence[Row] | None) -> None:
        """Put a file, in place of one of that name if there is one, or remove it."""
        self.serial += 1
        changed = [self.files.pop(number, None)]
        if rows is not None or not self.files:
            self.files[number] = [(*row, self.serial * 100 + n) for n, row in enumerate(rows or [])]
            changed.append(self.files[number])
            found = [dict(zip(SCHEMA.names, row, strict=True)) for row in self.files[number]]
            pq.write_table(pa.Table.from_pylist(found, SCHEMA), self.path / ".new", row_group_size=GROUP_ROWS)
            os.replace(self.path / ".new", self.path / f"{number}.parquet")
        elif changed[0] is not None:
            (self.path / f"{number}.parquet").unlink()
        self.held = {key for key in self.held if not any(may_hold(rows, key) for rows in changed if rows is not None)}

    def get(self, process: int, keys: list[Row], up: bool) -> None:
        """Right rows, or an error if the store is down; hits + misses = keys, loads + failures = misses, and no key that is held."""
        dim = self.processes[process]
        asked = [self.key(key) for key in keys]
        columns = dict(zip(self.names, map(list, zip(*asked, strict=True)), strict=True))
        everything = [row for number in sorted(self.files) for row in self.files[number]]
        expected = [
            {**dict(zip(SCHEMA.names, row, strict=True)), "key_index": n}
            for n, key in enumerate(asked)
            for row in everything
            if self.key(row) == key
        ]
        before = dim.host.metrics.snapshot()
        if not up:
            dim.down(".parquet")
        try:
            assert dim.rows(columns) == expected
            answered = True
        except UfsUnavailableError:
            assert not up
            answered = False
        dim.up()
        after = dim.host.metrics.snapshot()
        names = ("hitCount", "missCount", "loadCount", "numLoadFailures")
        hits, misses, loads, failures = (after[name] - before[name] for name in names)
        assert hits + misses == len(asked) or not (answered or hits or misses)
        assert misses == loads + failures <= len(set(asked))
        if answered and process < 2:
            if not self.options:
                assert misses <= len(set(asked) - self.held)
            self.held |= set(asked)

    def scan(self, process: int, ids: set[int]) -> None:
        """A scan whose predicate says which keys it wants."""
        where = f"id IN ({', '.join(map(str, sorted(ids)))}) AND part = 'a' AND text IS NOT NULL"
        rows = self.processes[process].matching(where)
        wanted = [row for rows in self.files.values() for row in rows if row[0] in ids and row[1] == "a" and row[2]]
        assert sorted(rows) == sorted(wanted)

    def step(self, kind: str, *args: Any) -> None:
        if kind == "tick":
            self.clock.tick(*args)
        elif kind == "merge":
            run_waiting(self.processes[args[0]].later)
        elif kind == "die":  # its memory is gone, what the host shares is not
            self.processes[args[0]] = self.process(args[0])
        else:
            getattr(self, kind)(*args)
        bound = float(self.options.get(PREFIX + "max-rows", "inf"))
        for dim in self.processes:
            if not dim.later.waiting:  # a load of each, not knowing of the other's
                assert dim.metric("numCachedRecords") <= bound * host_cache.REFUSE_ABOVE + 12


@pytest.mark.parametrize("names", [("id",), ("id", "part")], ids=",".join)
@pytest.mark.parametrize("bounds", BOUNDS)
@fuzzed(5)
@given(steps=st.lists(STEPS, min_size=10, max_size=40))
def test_any_history_of_files(names: tuple[str, ...], bounds: str, steps: list[Any]) -> None:
    """Of files that come, change and go, by processes that die, over a store that fails: rows are the files', counted rightly."""
    with new_directory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_cache, "_SEGMENTS_AT_MOST", 2)  # merged all the time
        history = History(root, names, BOUNDS[bounds])
        for step in steps:
            history.step(*step)
