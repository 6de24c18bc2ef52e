"""What the tests' writer of Iceberg tables computes, against PyIceberg."""

from __future__ import annotations

from typing import Any

import pytest
from pyiceberg.conversions import to_bytes as their_bytes
from pyiceberg.schema import Schema
from pyiceberg.transforms import parse_transform
from pyiceberg.types import NestedField

from tests.models.iceberg import VALUES
from tests.support.iceberg_values import raw, to_bytes, transformed

TRANSFORMS = {
    "bucket[7]": ["int", "long", "decimal(9, 2)", "date", "timestamp", "timestamptz", "string", "uuid", "fixed[4]"],
    "truncate[3]": ["int", "long", "decimal(9, 2)", "string"],
    "year": ["date", "timestamp", "timestamptz"],
    "month": ["date", "timestamp", "timestamptz"],
    "day": ["date", "timestamp", "timestamptz"],
    "hour": ["timestamp", "timestamptz"],
}


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
