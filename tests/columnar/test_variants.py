"""VARIANT columns, put together from their shredded parts, beside a decoder in pure Python."""

import random

import pyarrow as pa
import pytest

from pyspark_lookup.columnar.types import is_variant
from pyspark_lookup.columnar.variants import assemble
from tests.support.variants import (
    NULL,
    decode,
    encode,
    encode_metadata,
    fitting_value,
    node_type,
    random_shape,
    random_value,
    shredded,
)


def decoded(column: pa.Array) -> list[object]:
    rows = column.to_pylist()
    return [None if row is None else decode(row["metadata"], row["value"]) for row in rows]


def test_random_values_in_random_shapes() -> None:
    for seed in range(25):
        rng = random.Random(seed)
        shape = random_shape(rng)
        values = [None if rng.random() < 0.1 else fitting_value(rng, shape) for _ in range(rng.randint(0, 40))]
        stored = shredded(values, shape, rng)
        start = rng.randint(0, len(values))
        for column, expected in ((stored, values), (stored.slice(start), values[start:])):
            column = assemble(column)
            column.validate(full=True)
            assert column.cast(column.type).equals(column)
            assert is_variant(column.type)
            assert decoded(column) == expected, (seed, shape)


def test_values_that_are_not_shredded_keep_their_bytes() -> None:
    rng = random.Random(1)
    stored = shredded([None, *(random_value(rng) for _ in range(20))], None, rng)
    for fields in (["metadata", "value"], ["value", "metadata"]):
        column = pa.StructArray.from_arrays([stored.field(name) for name in fields], fields, mask=stored.is_null())
        assert assemble(column).to_pylist() == [
            None if row is None else {"value": row["value"], "metadata": row["metadata"]} for row in stored.to_pylist()
        ]


def test_missing_and_null() -> None:
    """A missing field is not there; one that is null is; a missing value or element is a null of VARIANT."""
    metadata, rng = encode_metadata(["a", "b"]), random.Random(0)
    null = encode(NULL, [], rng)
    nothing = {"value": None, "typed_value": None}
    shape = {"a": "int64", "b": ["string"]}
    rows = [
        None, {"value": null}, {},
        {"typed_value": {"a": nothing, "b": nothing}},
        {"typed_value": {"a": {"value": null}, "b": {"value": null}}},
        {"typed_value": {"a": nothing, "b": {"typed_value": [{"value": null}, nothing, {"typed_value": ""}]}}},
    ]  # fmt: skip
    column = pa.array(
        [None if row is None else {"metadata": metadata, **row} for row in rows],
        node_type(shape, pa.field("metadata", pa.binary())),
    )
    values = [None, NULL, NULL, {}, {"a": NULL, "b": NULL}, {"b": [NULL, NULL, ("string", "")]}]
    assert decoded(assemble(column)) == values


DAMAGED = {
    "no metadata": ({"metadata": None}, "has no metadata"),
    "empty metadata": ({"metadata": b""}, "metadata is empty"),
    "other version": ({"metadata": b"\x02\x00\x00"}, "version"),
    "cut metadata": ({"metadata": b"\x01\xff\x00"}, "ends within its dictionary"),
    "cut name": ({"metadata": b"\x01\x01\x00\x09a"}, "ends within a name"),
    "name missing": ({"metadata": b"\x01\x01\x00\x01b"}, "lacks the name of the field 'a'"),
    "twice": ({"value": b"\x02\x01\x00\x00\x01\x00"}, "both in value and in typed_value"),
    "no object": ({"value": b"\x00"}, "is no object"),
    "empty value": ({"value": b""}, "is no object"),
    "cut object": ({"value": b"\x02\x09\x00"}, "ends before its values"),
    "cut field": ({"value": b"\x02\x01\x00\x00\x09\x00"}, "ends within its values"),
    "unknown name": ({"value": b"\x02\x01\x07\x00\x01\x00"}, "metadata does not name"),
    "field outside": ({"value": b"\x02\x01\x00\x05\x01\x00"}, "after the object's end"),
}


@pytest.mark.parametrize(("parts", "message"), DAMAGED.values(), ids=list(DAMAGED))
def test_damaged_values(parts: dict[str, bytes | None], message: str) -> None:
    row = {"metadata": b"\x01\x01\x00\x01a", "typed_value": {"a": {"typed_value": 1}}, **parts}
    column = pa.array([None, row], node_type({"a": "int64"}, pa.field("metadata", pa.binary())))
    with pytest.raises(ValueError, match=message):
        assemble(column)


def test_types_that_no_variant_has() -> None:
    kind = pa.struct([("metadata", pa.binary()), ("typed_value", pa.uint8())])
    with pytest.raises(ValueError, match="uint8, a type that no VARIANT has"):
        assemble(pa.array([{"metadata": b"\x01\x00\x00", "typed_value": 1}], kind))
