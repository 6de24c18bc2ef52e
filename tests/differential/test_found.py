"""Histories that were read wrongly once, each as short as it can be."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.differential.histories import History, Setup, Step
from tests.differential.machine import CACHES, SOURCES, Reader, report, run
from tests.differential.processes import Nursery
from tests.fuzzing import by_day

ONE_FILE = 2  # the salt of a directory that has one file
REGIONS = (("r", ("01", "02", "eu")),)
IN_PARTITION = Setup(partitions=REGIONS, partition="r=01")


def file(slot: int, places: tuple[int, ...] = (), shape: str = "absent", rows: int = 8) -> tuple[Any, ...]:
    """The arguments of a step that puts a file."""
    return slot, places, "int64", shape, rows, "rename", "pyarrow"


def become(kind: str, first: tuple[Any, ...], salt: int) -> Step:
    return Step("become", (kind, *first), salt)


def check(root: Path, nursery: Nursery, setup: Setup, steps: Iterable[Step], *readers: Reader) -> None:
    """All of these readers are right after each step."""
    history = History(setup, tuple(steps))
    found = run(history, root, nursery, readers)
    if found:
        pytest.fail(report(history, found), pytrace=False)


def readers_of(cache: str, *processes: str, question: str = "all") -> list[Reader]:
    """Those with either source of versions."""
    return [Reader(cache, source, process, question) for source in SOURCES for process in processes]


@pytest.mark.parametrize(
    "values", [("01234", "98765", "SW1A"), ("1", "1.50", "x"), ("1e3", "2", "x"), ("+5", "6", "x")], ids=" ".join
)
def test_directories_that_become_text(tmp_path: Path, nursery: Nursery, values: tuple[str, ...]) -> None:
    """W1: of a column that directories made numbers, and then text, each value is what its directory says."""
    setup = Setup(keys=("zip",), partitions=(("zip", values),))
    steps = become("directory", file(0, (0,)), 1), Step("put", file(1, (1,)), 2), Step("put", file(2, (2,)), 3)
    check(tmp_path, nursery, setup, steps, *readers_of("FULL", "here"), *readers_of("NONE", "here"))


@pytest.mark.parametrize("cache", CACHES)
def test_types_of_all_partitions(tmp_path: Path, nursery: Nursery, cache: str) -> None:
    """W2: with `lookup.partition`, types are those of all directories and files, also of those that are not read."""
    steps = become("directory", file(0, (0,), "null"), 1), Step("put", file(1, (2,), "date32"), 2)
    check(tmp_path, nursery, IN_PARTITION, steps, *readers_of(cache, "here", question="partition"))


@pytest.mark.parametrize(
    "kinds", [("directory", "managed"), ("directory", "file"), ("managed", "directory")], ids="-".join
)
def test_a_path_changes_its_kind(tmp_path: Path, nursery: Nursery, kinds: tuple[str, str]) -> None:
    """W4: a reload of the full cache finds what the path is now, in a process that knew it otherwise and in a new one."""
    steps = [become(kind, file(0), number) for number, kind in enumerate(kinds)]
    check(tmp_path, nursery, Setup(), steps, *readers_of("FULL", "here", "new"))


@pytest.mark.parametrize(("form", "shape"), [("parquet", "uuid"), ("arrow", "list32"), ("arrow", "list64")])
def test_nulls_in_fixed_size_values_and_lists(tmp_path: Path, nursery: Nursery, form: str, shape: str) -> None:
    """S2: a full cache is built of fixed-size binaries with nulls, and of lists below whose nulls there are items."""
    steps = [become("directory", file(0, shape=shape), salt) for salt in range(4)]
    check(tmp_path, nursery, Setup(form), steps, *readers_of("FULL", "here"))


NULLS = [("null", shape) for shape in ("struct32", "list32", "map", "duration")]
NULLS += [(shape, "null") for shape in ("struct32", "list64", "map", "duration", "dec12")]


@pytest.mark.parametrize(
    ("form", "shapes"), [*(("parquet", shapes) for shapes in NULLS), ("json", ("list_null", "list64"))]
)
def test_nulls_and_something(tmp_path: Path, nursery: Nursery, form: str, shapes: tuple[str, str]) -> None:
    """S3: a full cache goes on when a column that was null in all rows, or empty lists, has values, and the other way."""
    before, after = shapes
    steps = [become("directory", file(0, shape=before), ONE_FILE), Step("put", file(1, shape=after), 1)]
    steps += [Step("put", file(0, shape=after), 2)] if after == "null" else []
    check(tmp_path, nursery, Setup(form), steps, *readers_of("FULL", "here"))


@pytest.mark.parametrize("cache", CACHES)
def test_a_partition_without_files(tmp_path: Path, nursery: Nursery, cache: str) -> None:
    """With `lookup.partition` of which there is no directory there are no rows, and all columns."""
    setup = Setup(partitions=REGIONS, partition="r=7")
    steps = [become("directory", file(0, (0,)), 1)]
    check(tmp_path, nursery, setup, steps, *readers_of(cache, "here", question="partition"))


@pytest.mark.parametrize(
    ("cache", "source", "process"), by_day(itertools.product(CACHES, SOURCES, ["here", "new", "other"]), 4)
)
def test_a_managed_table_becomes_partitions(
    tmp_path: Path, nursery: Nursery, cache: str, source: str, process: str
) -> None:
    """`lookup.partition`, which a managed table cannot have, is taken by a host that knew the path as one, once it is none."""
    steps = become("managed", file(0), 1), become("directory", file(0, (0,)), 2)
    check(tmp_path, nursery, IN_PARTITION, steps, Reader(cache, source, process, "partition"))


@pytest.mark.parametrize("call", by_day(range(1, 12), 3))
def test_a_link_is_swapped_while_it_is_read(tmp_path: Path, nursery: Nursery, call: int) -> None:
    """W11: a query during which a link to a directory is swapped gives the rows of one of the two directories."""
    steps = [become("linked", file(0, (0,)), 3)]
    steps += [Step("meanwhile", (call, Step("swap", file(0, (0,)), salt)), salt) for salt in range(10, 16)]
    check(tmp_path, nursery, Setup(partitions=REGIONS), steps, Reader("NONE", "UFS", "here", "all"))


def test_a_process_that_lives_for_one_query(tmp_path: Path, nursery: Nursery) -> None:
    """W3: processes that live for one query see a version that is older than the reload interval."""
    steps = become("directory", file(0), 1), Step("put", file(1), 2), Step("put", file(0), 3)
    check(tmp_path, nursery, Setup(), steps, Reader("FULL", "CACHE", "once", "all"))


@pytest.mark.parametrize(("cache", "how"), by_day(itertools.product(CACHES, ["restore", "swap_copies"]), 2))
def test_copies_of_a_managed_table(tmp_path: Path, nursery: Nursery, cache: str, how: str) -> None:
    """M2: a table that was restored from a copy, or is one of two copies that change places, gives its own rows."""
    steps = [become("managed", file(0), 0), Step("copy_aside", ("here", 1), 1), Step("upsert", ("here", 3), 2)]
    steps += [Step(how, ("here", 1), 3), Step("upsert", ("here", 3), 4)]
    check(tmp_path, nursery, Setup(), steps, *readers_of(cache, "here", "new"))
