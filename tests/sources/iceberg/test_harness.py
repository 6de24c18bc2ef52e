"""The writer and the oracle of these tests against PyIceberg, wherever it can read or write what they do."""

from __future__ import annotations

import contextlib
import random
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.conversions import to_bytes as their_bytes
from pyiceberg.schema import Schema
from pyiceberg.table import StaticTable
from pyiceberg.transforms import parse_transform
from pyiceberg.types import NestedField

from tests.support.fuzzing import seeds
from tests.support.iceberg_definition import in_catalog
from tests.support.iceberg_history import VALUES, History
from tests.support.iceberg_oracle import read
from tests.support.iceberg_tables import sql_catalog
from tests.support.iceberg_values import raw, to_bytes, transformed
from tests.support.lake_tables import Rows, rows_of

TRANSFORMS = {
    "bucket[7]": ["int", "long", "decimal(9, 2)", "date", "timestamp", "timestamptz", "string", "uuid", "fixed[4]"],
    "truncate[3]": ["int", "long", "decimal(9, 2)", "string"],
    "year": ["date", "timestamp", "timestamptz"],
    "month": ["date", "timestamp", "timestamptz"],
    "day": ["date", "timestamp", "timestamptz"],
    "hour": ["timestamp", "timestamptz"],
}


def by_pyiceberg(metadata: Path, schema: pa.Schema) -> Rows:
    """All rows, as PyIceberg reads them, in the types of Spark."""
    rows = StaticTable.from_metadata(str(metadata)).scan().to_arrow().to_pylist()
    return rows_of(pa.Table.from_pylist([{name: _spark(value) for name, value in row.items()} for row in rows], schema))


def _spark(value: Any) -> Any:
    return str(value) if isinstance(value, uuid.UUID) else value


@pytest.mark.parametrize("seed", seeds(2))
def test_what_both_write(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyIceberg reads the same rows after each step of a history without equality deletes, which it does not know."""
    monkeypatch.setenv("PYICEBERG_DOWNCAST_NS_TIMESTAMP_TO_US_ON_WRITE", "true")  # ORC has nanoseconds
    catalog, _ = sql_catalog(tmp_path)
    with contextlib.closing(catalog):
        publish, rng = in_catalog(catalog, "ns.table"), random.Random(seed)
        history = History(tmp_path / "table", rng, publish, lambda: catalog.load_table("ns.table"), peer=True)
        for _ in range(15):
            found = read(history.table.metadata)
            assert rows_of(found) == by_pyiceberg(history.table.metadata, found.schema), (seed, history.steps)
            history.step()


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform: str) -> None:
    for kind in TRANSFORMS[transform]:
        theirs = parse_transform(transform).transform(_type(kind))
        for value in VALUES[kind]:
            own = None if value is None else raw(kind, value)
            assert transformed(transform, kind, value) == theirs(own), (kind, value)


@pytest.mark.parametrize("kind", VALUES)
def test_bounds(kind: str) -> None:
    for value in VALUES[kind]:
        if value is not None:
            assert to_bytes(kind, value) == their_bytes(_type(kind), value), value


def _type(kind: str) -> Any:
    field = {"id": 1, "name": "x", "required": False, "type": kind}
    found: NestedField = Schema.model_validate({"type": "struct", "fields": [field]}).fields[0]
    return found.field_type
