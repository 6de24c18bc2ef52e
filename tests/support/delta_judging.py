"""What tests of damaged Delta tables share: tables, copies of them, their readers, and what an answer may be."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pyspark_lookup.errors import PysparkLookupError
from pyspark_lookup.lookup import planner
from pyspark_lookup.lookup.lookup import get_many
from pyspark_lookup.lookup.read import ReadPlan, ReadTask
from pyspark_lookup.sources.registry import parse_options
from tests.support.delta_evaluation import Rows, State, commits_of, evaluated, shown
from tests.support.delta_worlds import SHAPES, copy_world, write_world
from tests.support.fakes import FakeClock, make_host
from tests.support.fuzzing import memory_at_most
from tests.support.lake_tables import MODES

NAME = "dim-of-the-fuzz"
LAST = 6
CASE_AT_MOST_S = 20.0


@functools.cache
def world(shape: str) -> tuple[Path, Rows]:
    path = Path(tempfile.mkdtemp(prefix="lookupcache-fuzz-")) / NAME
    write_world(path, shape)
    with copied(shape, path) as copy:
        state, *_ = evaluated(copy)
    return path, state.rows


@contextlib.contextmanager
def copied(shape: str, made: Path | None = None) -> Iterator[Path]:
    """A copy of one's own to be damaged; beside it there is room for a cache directory."""
    with tempfile.TemporaryDirectory() as home:
        yield copy_world(made or world(shape)[0], Path(home) / NAME)


def commit(path: Path, version: int) -> Path:
    return path / "_delta_log" / f"{version:020}.json"


def at_once(name: str, run: Callable[[], None]) -> None:
    """Loads are made by who asks for them; nobody runs a schedule."""
    if "-schedule-" not in name:
        run()


@contextlib.contextmanager
def in_bounds() -> Iterator[None]:
    """Neither time nor memory without end."""
    began = time.process_time()
    with memory_at_most():
        yield
    assert time.process_time() - began < CASE_AT_MOST_S


class Reader:
    """A new process of a host: what it starts beside a read has ended when the read has."""

    def __init__(self, path: Path, cache: Path, mode: str = "none", **options: Any) -> None:
        self.given = {
            "path": str(path),
            **MODES[mode],
            **{f"lookup.{key}": str(value) for key, value in options.items()},
        }
        self.host = make_host(str(path), cache, FakeClock(5_000_000_000.0), start=at_once)

    def plan(self, **more: str) -> tuple[ReadPlan, pa.Schema]:
        options = parse_options({**self.given, **more})
        found = planner.find(self.host.reader, options)
        columns = planner.table_columns(found, options)
        plan = planner.plan_read(found, planner.with_table_keys(options, found), columns, self.host.clock.host())
        return plan, columns

    def scan(self) -> Rows:
        plan, columns = self.plan()
        return shown(
            pa.Table.from_batches(list(self.host.reader.read(plan, ReadTask(0, 1), None)), columns).to_pylist()
        )

    def get_many(self) -> Rows:
        """The rows of all keys."""
        plan, columns = self.plan(**{"lookup.keys": "id"})
        keys = pa.table({"id": pa.array([*range(62), -5, None], pa.int64())})
        return shown(get_many(self.host.reader, plan, keys, ["id"], None).select(columns.names).to_pylist())

    def history(self) -> Any:
        return self.host.resolver.kinds.history(parse_options(self.given))


def judge(
    path: Path, cache: Path, mode: str, states: Sequence[State], more: Sequence[Rows] = (), **options: Any
) -> None:
    """A scan, and a lookup of all keys, are one of the states, or `more`; or an error that names the table."""
    accepted = [state.rows for state in states] + [*more]
    reader = Reader(path, cache, mode, **options)
    try:
        assert mode == "partial" or reader.scan() in accepted
    except PysparkLookupError as problem:
        assert re.search(rf"{NAME}|deletion vector of \S+\.parquet|column '.*' is of type", str(problem)), problem
    try:
        found = reader.get_many()
    except PysparkLookupError:
        return
    assert any(found <= rows for rows in accepted)
    statistics = [add.get("stats") for state in states for add in state.files.values()]
    if all(isinstance(one, str) and one in known_statistics() for one in statistics):
        assert found in map(_found_by_id, accepted)


def _found_by_id(rows: Rows) -> Rows:
    """Those of the rows that have an id."""
    return collections.Counter({row: count for row, count in rows.items() if "('id', None)" not in row})


@functools.cache
def known_statistics() -> set[str]:
    """What the tables' own commits say: files that statistics rule out are not opened."""
    lines = [line for shape in SHAPES for file in commits_of(world(shape)[0]).values() for line in file.open()]
    return {add["stats"] for line in lines if (add := json.loads(line).get("add"))}
