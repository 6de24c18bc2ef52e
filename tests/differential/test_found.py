"""Histories that were read wrongly once, each as short as it can be."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.differential.histories import History, Setup, Step
from tests.differential.machine import CACHES, Reader, run
from tests.differential.processes import Nursery
from tests.differential.shorten import report
from tests.fuzzing import by_day

DRIFTS = (("01234", "98765", "SW1A"), ("1", "1.50", "x"), ("1e3", "2", "x"), ("+5", "6", "x"))
ONE_FILE = 2  # the salt of a directory that has one file
REGIONS = (("r", ("01", "02", "eu")),)


def file(slot: int, places: tuple[int, ...] = (), shape: str = "absent", rows: int = 8) -> tuple[Any, ...]:
    """The arguments of a step that puts a file."""
    return slot, places, "int64", shape, rows, "rename", "pyarrow"


def become(kind: str, first: tuple[Any, ...], salt: int) -> Step:
    return Step("become", (kind, *first), salt)


def check(history: History, root: Path, nursery: Nursery, *readers: Reader) -> None:
    """All of these readers are right after each step."""
    found = run(history, root, nursery, readers)
    if found:
        pytest.fail(report(history, found), pytrace=False)


def readers_of(cache: str, process: str, question: str = "all") -> list[Reader]:
    """Those with either source of versions."""
    return [Reader(cache, source, process, question) for source in ("UFS", "CACHE")]


@pytest.mark.parametrize("values", DRIFTS, ids=" ".join)
def test_directories_that_become_text(tmp_path: Path, nursery: Nursery, values: tuple[str, ...]) -> None:
    """W1: of a column that directories made numbers, and then text, each value is what its directory says."""
    setup = Setup(keys=("zip",), partitions=(("zip", values),))
    steps = (become("directory", file(0, (0,)), 1), Step("put", file(1, (1,)), 2), Step("put", file(2, (2,)), 3))
    check(History(setup, steps), tmp_path, nursery, *readers_of("FULL", "here"), *readers_of("NONE", "here"))


@pytest.mark.parametrize("cache", CACHES)
def test_types_of_all_partitions(tmp_path: Path, nursery: Nursery, cache: str) -> None:
    """W2: with `lookup.partition`, types are those of all directories and files, also of those that are not read."""
    setup = Setup(partitions=REGIONS, partition="r=01")
    steps = (become("directory", file(0, (0,), "null"), 1), Step("put", file(1, (2,), "date32"), 2))
    check(History(setup, steps), tmp_path, nursery, *readers_of(cache, "here", "partition"))


@pytest.mark.parametrize(
    "kinds", [("directory", "managed"), ("directory", "file"), ("managed", "directory")], ids="-".join
)
def test_a_path_changes_its_kind(tmp_path: Path, nursery: Nursery, kinds: tuple[str, str]) -> None:
    """W4: a reload of the full cache finds what the path is now, in a process that knew it otherwise and in a new one."""
    steps = tuple(become(kind, file(0), number) for number, kind in enumerate(kinds))
    check(History(Setup(), steps), tmp_path, nursery, *readers_of("FULL", "here"), *readers_of("FULL", "new"))


@pytest.mark.parametrize(("form", "shape"), [("parquet", "uuid"), ("arrow", "list32"), ("arrow", "list64")])
def test_nulls_in_fixed_size_values_and_lists(tmp_path: Path, nursery: Nursery, form: str, shape: str) -> None:
    """S2: a full cache is built of fixed-size binaries with nulls, and of lists below whose nulls there are items."""
    steps = tuple(become("directory", file(0, shape=shape), salt) for salt in range(4))
    check(History(Setup(form), steps), tmp_path, nursery, *readers_of("FULL", "here"))


@pytest.mark.parametrize("shape", ["struct32", "list32", "map", "duration"])
def test_nulls_become_something(tmp_path: Path, nursery: Nursery, shape: str) -> None:
    """S3: a full cache goes on when a column that was null in all rows has nested values, or durations."""
    steps = (become("directory", file(0, shape="null"), 1), Step("put", file(1, shape=shape), 2))
    check(History(Setup(), steps), tmp_path, nursery, *readers_of("FULL", "here"))


@pytest.mark.parametrize("shape", ["struct32", "list64", "map", "duration", "dec12"])
def test_something_becomes_nulls(tmp_path: Path, nursery: Nursery, shape: str) -> None:
    """A full cache goes on when a column has become null in all rows, and text in the schema."""
    steps = (
        become("directory", file(0, shape=shape), ONE_FILE),
        Step("put", file(1, shape="null"), 1),
        Step("put", file(0, shape="null"), 2),
    )
    check(History(Setup(), steps), tmp_path, nursery, *readers_of("FULL", "here"))


@pytest.mark.parametrize("cache", CACHES)
def test_a_partition_without_files(tmp_path: Path, nursery: Nursery, cache: str) -> None:
    """With `lookup.partition` of which there is no directory there are no rows, and all columns."""
    setup = Setup(partitions=REGIONS, partition="r=7")
    steps = (become("directory", file(0, (0,)), 1),)
    check(History(setup, steps), tmp_path, nursery, *readers_of(cache, "here", "partition"))


@pytest.mark.parametrize(
    ("cache", "source", "process"), by_day(itertools.product(CACHES, ["UFS", "CACHE"], ["here", "new", "other"]), 4)
)
def test_a_managed_table_becomes_partitions(
    tmp_path: Path, nursery: Nursery, cache: str, source: str, process: str
) -> None:
    """`lookup.partition`, which a managed table cannot have, is taken by a host that knew the path as one, once it is none."""
    setup = Setup(partitions=REGIONS, partition="r=01")
    steps = (become("managed", file(0), 1), become("directory", file(0, (0,)), 2))
    check(History(setup, steps), tmp_path, nursery, Reader(cache, source, process, "partition"))


def test_empty_json_lists_become_structs(tmp_path: Path, nursery: Nursery) -> None:
    """S3: a full cache goes on when JSON lists that were all empty have items in another file."""
    steps = (become("directory", file(0, shape="list_null"), 1), Step("put", file(1, shape="list64"), 2))
    check(History(Setup("json"), steps), tmp_path, nursery, *readers_of("FULL", "here"))


@pytest.mark.parametrize("call", by_day(range(1, 12), 3))
def test_a_link_is_swapped_while_it_is_read(tmp_path: Path, nursery: Nursery, call: int) -> None:
    """W11: a query during which a link to a directory is swapped gives the rows of one of the two directories."""
    setup = Setup(partitions=REGIONS)
    steps = [become("linked", file(0, (0,)), 3)]
    steps += [Step("meanwhile", (call, Step("swap", file(0, (0,)), salt)), salt) for salt in range(10, 16)]
    check(History(setup, tuple(steps)), tmp_path, nursery, Reader("NONE", "UFS", "here", "all"))


def test_a_process_that_lives_for_one_query(tmp_path: Path, nursery: Nursery) -> None:
    """W3: processes that live for one query see a version that is older than the reload interval."""
    steps = (become("directory", file(0), 1), Step("put", file(1), 2), Step("put", file(0), 3))
    check(History(Setup(), steps), tmp_path, nursery, Reader("FULL", "CACHE", "once", "all"))


COPIED: dict[str, tuple[Step, ...]] = {
    "restored": (Step("upsert", ("here", 3), 2), Step("restore", ("here", 1), 3), Step("upsert", ("here", 3), 4)),
    "swapped": (Step("upsert", ("here", 3), 2), Step("swap_copies", ("here", 1), 3), Step("upsert", ("here", 3), 4)),
}


@pytest.mark.parametrize(("cache", "copied"), by_day(itertools.product(CACHES, COPIED), 2))
def test_copies_of_a_managed_table(tmp_path: Path, nursery: Nursery, cache: str, copied: str) -> None:
    """M2: a table that was restored from a copy, or is one of two copies that change places, gives its own rows."""
    first = (become("managed", file(0), 0), Step("copy_aside", ("here", 1), 1))
    readers = (*readers_of(cache, "here"), *readers_of(cache, "new"))
    check(History(Setup(), (*first, *COPIED[copied])), tmp_path, nursery, *readers)
