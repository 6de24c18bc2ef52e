"""A soak of five minutes; by day its part that judges. Longer: `scripts/soak`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.history.checker import Rows, State
from tests.soak import tables
from tests.soak.checker import Batch, check_batches, check_late
from tests.soak.run import soak

SECONDS = 60 * float(os.environ.get("LOOKUPCACHE_MINUTES", "5"))
SEED = int(os.environ.get("LOOKUPCACHE_SEED", "20261121"))
HANG_S = 180 if "LOOKUPCACHE_MINUTES" in os.environ else 450  # other tests run beside it


@pytest.mark.nightly
@pytest.mark.spark
@pytest.mark.timeout(1200 + 2 * SECONDS)
def test_a_stream_is_right_through_all_that_happens(tmp_path: Path) -> None:
    """Whatever is done to tables, store, processes, disks and clocks, a micro-batch has one version of each table, and each row came out once."""
    report = soak(tmp_path, SECONDS, SEED, HANG_S)
    assert report["wrong"] == []
    # Half of what they are beside other tests, which take as much of the machine as they get. It goes on until each kind of
    # harm was done, so it cannot be so slow that these are about the machine.
    assert report["batches"] >= 10
    assert all(report[f"versions of {table}"] >= 5 for table in (tables.PUBLISHED, tables.MANAGED))
    assert report["late"]["late"] > 0
    assert report["harm not done"] == []
    assert all(report["requests"][fault] > 0 for fault in ("refused", "lost", "unanswered", "truncated"))
    assert sum(directory["counted"].get("blockEvictedCount", 0) for directory in report["directories"].values()) > 0


MANAGED = [
    State(1, Rows()), State(4, Rows([(1, "a", 0), (2, "a", 1), (2, "b", 0)]), "append"),
    State(9, Rows([(1, "c", 0), (2, "c", 1)]), "overwrite"), State(12, Rows([(1, "c", 0), (2, "c", 1)]), "compact"),
]  # fmt: skip
"""A table that has two rows of the key 2, and none of others."""
NOTES: list[dict[str, Any]] = [
    {"kind": "published", "number": 1, "parts": 1, "digest": "p1"},
    {"kind": "published", "number": 1, "parts": 2, "digest": "p1m"},
    {"kind": "published", "number": 2, "parts": 1, "digest": "p2"},
    *({"kind": "version", "position": position, "digest": f"m{position}"} for position in (4, 9, 12)),
]
LATE_KEY = tables.BASE_KEYS + 1
OLD, NEW = ["a0", "a1", "b0"], ["c0", "c1", "c1"]


def batch(
    number: int, values: list[int], ids: list[int], publish: list[int | None], rows: Sequence[str | None], *told: str
) -> Batch:
    """A micro-batch; `rows`: tags and numbers of the managed table's rows."""
    columns = {"value": values, "id": ids, "publish": pa.array(publish, pa.int64())}
    columns["tag"] = [row and row[0] for row in rows]
    columns["n"] = [row and int(row[1]) for row in rows]
    return Batch(number, pa.table(columns), dict(zip((tables.PUBLISHED, tables.MANAGED), told, strict=False)) or None)


RIGHT = [
    batch(0, [0, 1, 1, 2], [1, 2, 2, LATE_KEY], [1, 1, 1, None], [*OLD, None], "p1", "m4"),
    batch(1, [3, 4, 4, 5], [1, 2, 2, LATE_KEY], [1, 1, 1, 1], [*OLD, None], "p1m", "m4"),
    batch(2, [6, 7, 8], [1, 2, 2], [1, 1, 1], NEW),
    batch(3, [9, 10, 11, 12], [1, 2, 2, LATE_KEY], [2, 2, 2, None], [*NEW, None], "p2", "m12"),
]


def test_a_right_output_passes() -> None:
    """The checker accepts an output that is possible, and counts it."""
    served = {f"versions of {tables.PUBLISHED}": 4, f"versions of {tables.MANAGED}": 3}  # that of no report, too
    assert check_batches(RIGHT, NOTES, MANAGED) == {"batches": 4, "rows": 13, **served}


def altered(number: int, **columns: list[Any]) -> list[Batch]:
    """The right output, with other columns in one batch."""
    batches = list(RIGHT)
    rows = batches[number].rows
    for name, values in columns.items():
        rows = rows.set_column(rows.column_names.index(name), name, pa.array(values, rows.schema.field(name).type))
    batches[number] = Batch(number, rows, batches[number].told)
    return batches


@pytest.mark.parametrize(
    "batches",
    [
        altered(1, publish=[1, 1, 2, 1]),  # two publishes
        altered(0, publish=[1, None, None, None]),  # a key without its row
        altered(3, tag=["a", "a", "b", None], n=[0, 1, 0, None]),  # another than it was told, and back again
        altered(0, publish=[1, 1, 1, 1]),  # more than there was in the version that it was told
        [RIGHT[0], Batch(1, RIGHT[1].rows, {tables.PUBLISHED: "p1m", tables.MANAGED: "unknown"}), *RIGHT[2:]],
        [*RIGHT[:3], Batch(3, pa.concat_tables([RIGHT[3].rows] * 2), RIGHT[3].told)],  # rows twice
        altered(3, value=[9, 10, 11, 13]),  # one not at all
        RIGHT[1:],
    ],
)
def test_a_wrong_output_is_found(batches: list[Batch]) -> None:
    """The checker rejects an output that is impossible."""
    with pytest.raises(AssertionError):
        check_batches(batches, NOTES, MANAGED)


def late_batch(number: int, values: list[int], publish: list[int | None], waited: list[int]) -> Batch:
    columns = {"value": values, "publish": pa.array(publish, pa.int64()), "waited": pa.array(waited, pa.int64())}
    return Batch(number, pa.table(columns), None)


LATE_RIGHT = [
    late_batch(0, [0, 2], [1, 1], [0, 0]), late_batch(1, [1, 5, 6], [2, 2, 2], [9, 0, 0]),
    late_batch(2, [3, 4, 8], [None, None, 3], [9, 9, 0]),
]  # fmt: skip


def test_a_right_output_of_late_rows_passes() -> None:
    """Events of the last micro-batch may wait."""
    assert check_late(LATE_RIGHT) == {"rows": 8, "late": 1}


@pytest.mark.parametrize(
    "batches",
    [
        [*LATE_RIGHT, late_batch(3, [5], [3], [0])],  # twice
        [*LATE_RIGHT, late_batch(3, [9], [3], [0])],  # one did not come out
        [*LATE_RIGHT, late_batch(3, [7, 9], [2, 3], [5, 5])],  # two versions
    ],
)
def test_a_wrong_output_of_late_rows_is_found(batches: list[Batch]) -> None:
    """An event that came out twice or never, and two versions in a micro-batch, are found."""
    with pytest.raises(AssertionError):
        check_late(batches)
