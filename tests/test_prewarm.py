"""A table that changes while a host warms it (HIVE-30052): no change is lost, none is undone, and nobody waits for the warming."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.test_full_cache import CACHE, FULL, Table
from tests.test_managed import Dim, rows

IDS = (5, 6, 200)
Answers = dict[int, object]
BEFORE: Answers = {5: 1, 6: 1, 200: None}
LANDING: dict[str, tuple[Callable[[Dim], object], Answers]] = {
    "a commit": (lambda dim: dim.writer.upsert(rows([5, 200], 2)), {5: 2, 6: 1, 200: 2}),
    "a delete": (lambda dim: dim.writer.delete(pa.table({"id": [5, 6]})), {5: None, 6: None, 200: None}),
    "an overwrite": (lambda dim: dim.writer.write(rows([6, 200], 3), "overwrite"), {5: None, 6: 3, 200: 3}),
}
BOUND_S = 60.0  # far above what any of this takes
UNWAITING = {**FULL, "lookup.full-cache.build-wait": "0 s"}


def made(home: Path) -> Dim:
    dim = Dim(home)
    dim.writer.write(rows(range(100)))
    return dim


def answers(table: Table) -> Answers:
    """The versions that some keys' rows say; None of a key without one."""
    found = {row["id"]: row["version"] for row in table.get(*IDS)}
    return {id_: found.get(id_) for id_ in IDS}


def before_call(table: Table, number: int, act: Callable[[], object]) -> list[int]:
    """Have `act` run ahead of the call of that number to the table's store; the numbers of the calls that were made since."""
    made: list[int] = []
    lock = threading.Lock()  # calls may come from several threads

    def before(kind: str, subject: object) -> None:
        with lock:
            made.append(len(made))
            if made[-1] == number:
                act()

    table.host.store.before = before
    return made


@pytest.mark.parametrize("kind", LANDING)
def test_a_change_that_lands_while_it_is_warmed(tmp_path: Path, kind: str) -> None:
    """Ahead of whichever call to the store it lands: what was warmed is one state, and the next look has the change for good."""
    change, after = LANDING[kind]
    warmed: list[Answers] = []
    for number in itertools.count():
        dim = made(tmp_path / str(number))
        cache_dir = tmp_path / str(number) / "own"
        table = Table(dim.path, cache_dir, CACHE)
        calls = before_call(table, number, lambda dim=dim: change(dim))  # type: ignore[misc]
        table.warm()
        if number not in calls:
            break
        warmed.append(answers(table))  # of the snapshot: CACHE asks nobody
        assert warmed[-1] in (BEFORE, after)
        assert answers(Table(dim.path, cache_dir, UNWAITING)) == after
        for _ in range(2):
            table.warm()
            assert answers(table) == after
    assert warmed.count(BEFORE) >= 1
    assert warmed.count(after) >= 1


@contextlib.contextmanager
def stood_still(warming: Table) -> Iterator[None]:
    """A load that stands still in the midst of its data for as long as the block runs, and is done behind it."""
    stands, go_on = threading.Event(), threading.Event()

    def stand(kind: str, subject: object) -> None:
        if kind == "get" and str(subject[0]).endswith(".parquet"):  # type: ignore[index]
            stands.set()
            assert go_on.wait(BOUND_S)

    warming.host.store.before = stand
    thread = threading.Thread(target=warming.full.reload)
    thread.start()
    try:
        assert stands.wait(BOUND_S)
        yield
        assert thread.is_alive()
    finally:
        go_on.set()
        thread.join()


@pytest.mark.parametrize("kind", LANDING)
@pytest.mark.parametrize("who", ["the process that warms", "another"])
def test_nobody_waits_for_a_warming(tmp_path: Path, kind: str, who: str) -> None:
    """While one stands still in the midst of a load, lookups are answered: in CACHE mode from the snapshot there was, in UFS mode
    from the version that is current; after it from what it has loaded."""
    change, after = LANDING[kind]
    dim = made(tmp_path)
    cache_dir = tmp_path / "own"
    warming = Table(dim.path, cache_dir, CACHE)
    warming.warm()
    change(dim)
    with stood_still(warming):
        asked = warming if who == "the process that warms" else Table(dim.path, cache_dir, CACHE)
        assert answers(asked) == BEFORE
        current = Table(dim.path, cache_dir, UNWAITING)
        assert answers(current) == after
    assert answers(warming) == answers(asked) == answers(current) == after


def test_a_first_warming_holds_up_no_query_in_ufs_mode(tmp_path: Path) -> None:
    """Where there is no snapshot yet and one is being built, lookups read the files."""
    dim = made(tmp_path)
    cache_dir = tmp_path / "own"
    warming = Table(dim.path, cache_dir, FULL)
    with stood_still(warming):
        current = Table(dim.path, cache_dir, UNWAITING)
        assert answers(current) == BEFORE
    assert answers(warming) == BEFORE
