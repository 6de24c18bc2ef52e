"""A table that changes while a host warms it (HIVE-30052): no change is lost, none is undone, and nobody waits for the warming."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.full_cache import CACHE, FULL, Table
from tests.support.managed_hosts import Dim, rows

IDS = (5, 6, 200)
Answers = dict[int, object]
BEFORE: Answers = {5: 1, 6: 1, 200: None}
LANDING: dict[str, tuple[Callable[[Dim], object], Answers]] = {
    "a commit": (lambda dim: dim.writer.upsert(rows([5, 200], 2)), {5: 2, 6: 1, 200: 2}),
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
    """Have `act` run ahead of the call of that number to the store, which waits for it; the numbers of the calls made since."""
    made: list[int] = []
    lock = threading.Lock()  # calls may come from several threads

    def before(kind: str, subject: object) -> None:
        with lock:
            made.append(len(made))
            here = made[-1] == number
        if here:
            thread = threading.Thread(target=act, daemon=True)
            thread.start()
            thread.join(BOUND_S)

    table.host.store.before = before
    return made


@pytest.mark.parametrize("kind", LANDING)
@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_a_change_that_lands_while_it_is_warmed(tmp_path: Path, kind: str, again: bool) -> None:
    """Ahead of whichever call it lands: what is warmed is one state, the next has the change, and meanwhile lookups are answered."""
    change, after = LANDING[kind]
    warmed: list[Answers] = []
    for number in itertools.count():
        dim = made(tmp_path / str(number))
        cache_dir = tmp_path / str(number) / "own"
        table = Table(dim.path, cache_dir, CACHE)
        if again:
            table.warm()
            dim.writer.upsert(rows([7], 2))
        meanwhile: list[Answers] = []

        def act(
            dim: Dim = dim, cache_dir: Path = cache_dir, table: Table = table, meanwhile: list[Answers] = meanwhile
        ) -> None:
            change(dim)
            asked = [Table(dim.path, cache_dir, UNWAITING)]
            asked += [Table(dim.path, cache_dir, CACHE), table] if again else []
            meanwhile.extend(map(answers, asked))

        calls = before_call(table, number, act)
        table.warm()
        if number not in calls:
            break
        assert meanwhile == [after, BEFORE, BEFORE][: 3 if again else 1]
        warmed.append(answers(table))  # of the snapshot: CACHE asks nobody
        assert warmed[-1] in (BEFORE, after)
        assert answers(Table(dim.path, cache_dir, UNWAITING)) == after
        for _ in range(2):
            table.warm()
            assert answers(table) == after
    assert warmed.count(BEFORE) >= 1
    assert warmed.count(after) >= 1
