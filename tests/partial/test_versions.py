"""The partial cache: versions."""

from __future__ import annotations

import decimal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pyspark_lookup.columnar.keys import Numbers
from tests.partial.common import ROWS, Process, differing, rows_of


def test_only_keys_that_are_not_found_yet_are_asked_about(process: Process) -> None:
    """What a version differs in is asked for the keys that later segments do not have."""
    process.put({1: [1], 2: [2], 3: [3]}, "v1")
    process.put({2: [20]}, "v2")
    asked: list[tuple[str, list[int]]] = []

    def may_differ(version: str, keys: Sequence[pa.Array]) -> Numbers:
        asked.append((version, keys[0].to_pylist()))
        return np.zeros(len(keys[0]), np.bool_)

    assert process.get(3, 2, 4, version="v2", may_differ=may_differ) == {3: [3], 2: [20], 4: None}
    assert asked == [("v1", [3, 4])]


OTHER_SCHEMAS = {
    "a column of another type": pa.schema([("v", pa.int32()), ("t", pa.string())]),
    "a column that was not there": pa.schema([*ROWS, ("more", pa.int64())]),
    "a column under another name": pa.schema([("V", pa.int64()), ("t", pa.string())]),
}


@pytest.mark.parametrize("schema", OTHER_SCHEMAS.values(), ids=OTHER_SCHEMAS)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_rows_of_other_columns_are_a_miss(process: Process, schema: pa.Schema, version: str) -> None:
    """A load that lacks a wanted column, or has it in another type, does not answer; fewer columns are no matter."""
    keys = [pa.array([1, 2], pa.int64())]
    process.put({1: [1], 2: []})
    assert process.get_rows(keys, schema, version, differing()) is None
    found = process.get_rows(keys, pa.schema([("t", pa.string())]), version, differing())
    assert found is not None
    assert found.rows.column("t").to_pylist() == ["t1"]
    found = process.get_rows(keys, pa.schema([]), version, differing())
    assert found is not None
    assert found.present.all()
    assert found.rows.num_rows == 1
    process.touch(1)


@pytest.mark.usefixtures("often")
def test_a_merge_drops_what_lacks_a_column(process: Process) -> None:
    """Once the table has another column, what was loaded before is given up with the next merge."""
    wider = pa.schema([*ROWS, ("more", pa.int64())])
    process.put({1: [1], 2: [2]})
    process.put({3: [3]})
    rows = rows_of([[5]])
    rows = rows.add_column(2, "more", pa.array([6], pa.int64()))
    process.put_rows([pa.array([5], pa.int64())], rows, "v2", differing())
    assert process.merge() == 1
    assert len(process.names()) == 1
    keys = [pa.array([1, 5], pa.int64())]
    found = process.get_rows(keys, wider, "v2", differing())
    assert found is not None
    assert found.present.tolist() == [False, True]
    assert found.rows.column("more").to_pylist() == [6]


D = decimal.Decimal

KEY_TYPES: dict[str, tuple[pa.Array, pa.Array, pa.Array]] = {  # (put, asked for in another type, those of them that are new)
    "wider": (pa.array([1, 2], pa.int32()), pa.array([1, 2**40], pa.int64()), pa.array([2**40], pa.int64())),
    "narrower": (pa.array([1, 2**40], pa.int64()), pa.array([1, 2], pa.int32()), pa.array([2], pa.int32())),
    "text": (pa.array([1, 2], pa.int64()), pa.array(["1", "b"]), pa.array(["b"])),
    "number": (pa.array(["1", "b"]), pa.array([1, 2], pa.int64()), pa.array([2], pa.int64())),
    "decimal": (pa.array([1, 2], pa.int32()), pa.array([D(1), D(2)], pa.decimal128(12, 0)), pa.array([D(2)], pa.decimal128(12, 0))),
    "scale": (pa.array([D("1.00")], pa.decimal128(5, 2)), pa.array([D("0.100")], pa.decimal128(7, 3)), pa.array([D("0.100")], pa.decimal128(7, 3))),
}  # fmt: skip


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("change", KEY_TYPES)
def test_keys_of_another_type(cache_dir: Path, change: str) -> None:
    """Where the type of a key changed, nothing that was put before answers, nor does it fail a touch; it goes with the next merge."""
    before, keys, new = KEY_TYPES[change]
    old = Process(cache_dir, keys=pa.schema([("k", before.type)]))
    old.put_rows([before], rows_of([[100 + n] for n in range(len(before))]))
    process = Process(cache_dir, old.clock, keys=pa.schema([("k", keys.type)]))
    assert process.get_rows([keys], ROWS, "v2") is None
    # Of one version, too: with lookup.partition, files that were left out may have changed the type.
    found = process.get_rows([keys], ROWS)
    assert found is None or not found.present[pc.is_in(keys, new).to_numpy(zero_copy_only=False)].any()
    process.shared.touch([keys], process.hashes([keys]))
    for _ in range(2):
        process.put_rows([keys], rows_of([[5]] * len(keys)), "v2")
    assert process.merge() == 1
    assert len(process.names()) == 1
    found = process.get_rows([keys], ROWS, "v2")
    assert found is not None
    assert found.present.all()
    assert found.rows.column("v").to_pylist() == [5] * len(keys)
