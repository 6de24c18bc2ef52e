"""Every way to read gives what a plain reader gives, after each step of any history."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pyspark_lookup import LookupTable
from tests.differential.histories import History, Setup, Step, draw
from tests.differential.machine import EVERY_READER, Reader, report, run
from tests.differential.processes import Nursery
from tests.fuzzing import seeds

_HISTORIES = 4
_AT_END = 30
FILES = ((0, (), "int64", "int64", 8, "rename", "pyarrow"), (1, (), "int32", "int32", 8, "rename", "pyarrow"))
PLAIN = History(Setup(), (Step("become", ("directory", *FILES[0]), 1), Step("put", FILES[1], 2)))


@pytest.mark.slow
def test_any_history_is_read_alike(tmp_path: Path, nursery: Nursery) -> None:
    """Some histories, which are others by night; `LOOKUPCACHE_SEED` replays one, whose seed a failure has printed."""
    replayed = "LOOKUPCACHE_SEED" in os.environ
    for seed in seeds(_HISTORIES):
        history = draw(seed)
        root = tmp_path / str(seed)
        root.mkdir()
        found = run(history, root, nursery, at_end=len(EVERY_READER) if replayed else _AT_END)
        if found:
            pytest.fail(report(history, found), pytrace=False)


def test_a_seed_is_a_history() -> None:
    """A seed gives the same history each time, and a history that was printed is one again."""
    drawn = [draw(seed) for seed in range(50)]
    assert drawn == [draw(seed) for seed in range(50)]
    assert all(eval(str(history)) == history for history in drawn)


def test_a_lost_row_is_found(tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan that loses a row, and a lookup that gives one twice, are told from right answers."""
    scan, get_many = LookupTable.scan, LookupTable.get_many

    def fewer(table: LookupTable) -> Any:
        return scan(table).slice(1)

    def more(table: LookupTable, keys: Any) -> Any:
        rows = get_many(table, keys)
        return rows.take([0, *range(rows.num_rows)]) if rows.num_rows else rows

    monkeypatch.setattr(LookupTable, "scan", fewer)
    monkeypatch.setattr(LookupTable, "get_many", more)
    found = run(PLAIN, tmp_path, nursery, [Reader("NONE", "UFS", "here", "all")])
    assert {(one.step, one.call.split("(")[0]) for one in found} == {
        (step, call) for step in (1, 2) for call in ("scan", "get_many")
    }
