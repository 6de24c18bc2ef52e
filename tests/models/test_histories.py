"""Every way to read gives what a plain reader gives, after each step of random histories, and of those that were once read wrongly."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyspark_lookup import LookupTable
from tests.models.histories import History, Setup, Step, draw
from tests.models.machine import CACHES, EVERY_READER, SOURCES, Reader, report, run
from tests.models.processes import Nursery
from tests.support.fuzzing import BY_NIGHT, by_day, seeds

_HISTORIES = {"": 2 if BY_NIGHT else 1, "delta": 1, "iceberg": 1, "changing": 1}
"""How many histories: of all kinds of tables (""), of the kinds with the longest ones, and of providers that report changes."""
_NIGHTLY = {"iceberg"}
"""Kinds whose histories take half a minute, and are left to the night."""
_STEPS_BY_DAY = 9
"""Of the histories of one kind, which have up to 19."""
_AT_END = 10
FILES = ((0, (), "int64", "int64", 8, "rename", "pyarrow"), (1, (), "int32", "int32", 8, "rename", "pyarrow"))
PLAIN = History(Setup(), (Step("become", ("directory", *FILES[0]), 1), Step("put", FILES[1], 2)))


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """The process that forks readers, one for all histories."""
    with contextlib.closing(Nursery()) as forker:
        yield forker


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param(kind, n, id=f"{kind or 'any'}-{n}", marks=[pytest.mark.nightly] * (kind in _NIGHTLY))
        for kind, count in _HISTORIES.items()
        for n in seeds(count)
    ],
)
def test_any_history_is_read_alike(tmp_path: Path, nursery: Nursery, kind: str, seed: int) -> None:
    """Random histories, and others by night. `LOOKUPCACHE_SEED` replays one: a failure prints its seed."""
    history = draw(seed, kind)
    if kind and not BY_NIGHT:
        history = dataclasses.replace(history, steps=history.steps[:_STEPS_BY_DAY])
    if wrong := run(history, tmp_path, nursery, at_end=len(EVERY_READER) if BY_NIGHT else _AT_END):
        pytest.fail(report(history, wrong), pytrace=False)


def test_a_lost_row_is_found(tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan that loses a row, and a lookup that returns a row twice, are reported."""
    scan, get_many = LookupTable.scan, LookupTable.get_many

    def fewer(table: LookupTable) -> Any:
        return scan(table).slice(1)

    def more(table: LookupTable, keys: Any) -> Any:
        rows = get_many(table, keys)
        return rows.take([0, *range(rows.num_rows)]) if rows.num_rows else rows

    monkeypatch.setattr(LookupTable, "scan", fewer)
    monkeypatch.setattr(LookupTable, "get_many", more)
    discrepancies = run(PLAIN, tmp_path, nursery, [Reader("NONE", "UFS", "here", "all")])
    calls = {(step, call) for step in (1, 2) for call in ("scan", "get_many")}
    assert {(discrepancy.step, discrepancy.call.split("(")[0]) for discrepancy in discrepancies} == calls


KINDS = ["directory", "managed", "delta", "directory", "iceberg", "file"]
ONE_FILE = 2  # the salt of a directory that has one file
REGIONS = (("r", ("01", "02", "eu")),)
IN_PARTITION = Setup(partitions=REGIONS, partition="r=01")


def file(slot: int, places: tuple[int, ...] = (), shape: str = "absent") -> tuple[Any, ...]:
    return slot, places, "int64", shape, 8, "rename", "pyarrow"


def become(kind: str, first: tuple[Any, ...], salt: int) -> Step:
    return Step("become", (kind, *first), salt)


def make_readers(cache: str, *processes: str, question: str = "all") -> list[Reader]:
    """Readers with either source of versions."""
    return [Reader(cache, source, process, question) for source in SOURCES for process in processes]


@dataclasses.dataclass(frozen=True)
class Found:
    """A history that was once read wrongly, and its readers: all of them read after each step."""

    name: str
    setup: Setup
    steps: list[Step]
    readers: list[Reader]


def list_cases() -> Iterator[Found]:
    """The cases that run every day."""
    # Of a column that directories made numbers, and then text, each value is what its directory says.
    setup = Setup(keys=("zip",), partitions=(("zip", ("01234", "98765", "SW1A")),))
    steps = [become("directory", file(0, (0,)), 1), Step("put", file(1, (1,)), 2), Step("put", file(2, (2,)), 3)]
    yield Found("W1", setup, steps, [*make_readers("FULL", "here"), *make_readers("NONE", "here")])
    for cache in CACHES:
        # With lookup.partition types are those of all directories and files, also of those that are not read.
        steps = [become("directory", file(0, (0,), "null"), 1), Step("put", file(1, (2,), "date32"), 2)]
        yield Found(f"W2 {cache}", IN_PARTITION, steps, make_readers(cache, "here", question="partition"))
    for cache in CACHES:
        # What the path is now is found, also by a reload of the full cache, in a process that knew it otherwise and in a new one.
        steps = [become(kind, file(0), number) for number, kind in enumerate(KINDS)]
        yield Found(f"W4 {cache}", Setup(), steps, make_readers(cache, "here", *["new"] * (cache == "FULL")))
    # Processes that live for one query see a version that is older than the reload interval.
    steps = [become("directory", file(0), 1), Step("put", file(1), 2), Step("put", file(0), 3)]
    yield Found("W3", Setup(), steps, [Reader("FULL", "CACHE", "once", "all")])
    for before, after in (("null", "list32"), ("struct32", "null"), ("dec12", "null"), ("list_null", "list64")):
        # A full cache goes on when a column that was null in all rows, or empty lists, has values, and the other way.
        steps = [become("directory", file(0, shape=before), ONE_FILE), Step("put", file(1, shape=after), 1)]
        steps += [Step("put", file(0, shape=after), 2)] if after == "null" else []
        yield Found(f"S3 {before} {after}", Setup("arrow"), steps, make_readers("FULL", "here"))


def list_more_cases() -> Iterator[Found]:
    """Further cases, of which only some run by day."""
    for cache, source, process in itertools.product(CACHES, SOURCES, ("here", "new", "other")):
        # lookup.partition, which a managed table cannot have, is taken by a host that knew the path as one, once it is none.
        steps = [become("managed", file(0), 1), become("directory", file(0, (0,)), 2)]
        readers = [Reader(cache, source, process, "partition")]
        yield Found(f"no longer managed {cache} {source} {process}", IN_PARTITION, steps, readers)
    for call in range(1, 12):
        # A query during which a link to a directory is swapped gives the rows of one of the two directories.
        steps = [become("linked", file(0, (0,)), 3)]
        steps += [Step("meanwhile", (call, Step("swap", file(0, (0,)), salt)), salt) for salt in range(10, 16)]
        yield Found(f"W11 {call}", Setup(partitions=REGIONS), steps, [Reader("NONE", "UFS", "here", "all")])


@pytest.mark.parametrize("case", [*list_cases(), *by_day(list_more_cases(), 5)], ids=lambda case: case.name)
def test_what_was_found(tmp_path: Path, nursery: Nursery, case: Found) -> None:
    """All readers are right after each step."""
    history = History(case.setup, tuple(case.steps))
    if wrong := run(history, tmp_path, nursery, case.readers):
        pytest.fail(report(history, wrong), pytrace=False)
