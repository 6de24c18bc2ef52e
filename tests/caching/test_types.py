"""The cache in memory: rows of all types."""

from __future__ import annotations

import random

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.cache.memory import KEY_INDEX, growing
from tests.caching.common import cache_of, keys_of, small
from tests.test_columns import kinds, pieces_of
from tests.test_keys import examples


@examples(100)
@given(data=st.data())
def test_rows_of_every_type(data: st.DataObject) -> None:
    """Rows put in pieces, of all types, nested ones and nulls at any level, come back by whatever keys are asked for, equal and
    in the type that was put, while others are replaced and forgotten."""
    kind = data.draw(kinds(2), label="kind")
    pieces = pieces_of(data.draw, kind)
    draw = random.Random(len(pieces))
    whole = pa.concat_arrays(pieces) if pieces else pa.array([], kind)
    numbers = list(range(len(whole)))
    with small():
        cache = cache_of()
        row = 0
        for piece in pieces:
            # Each row is first put for a key that is replaced by the next piece.
            keys = [-1, *range(row, row + len(piece))]
            places = pa.array([*range(1, len(piece) + 1), *([0] if len(piece) else [])], pa.int64())
            rows = pa.concat_arrays([piece, piece.slice(0, 1)])
            cache.put_many(keys_of(*keys), pa.table({"c": rows, KEY_INDEX: places}))
            row += len(piece)
        early = cache.peek_many(keys_of(*numbers))
        gone = draw.sample(numbers, len(numbers) // 2)
        cache.invalidate_many(keys_of(-1, *gone))
        asked = draw.choices(numbers, k=len(numbers))
        left = [number for number in asked if number not in gone]
        found = cache.get_many(keys_of(*asked))
        assert found.present.tolist() == [number not in gone for number in asked]
        if not pieces:
            assert found.rows is None
            return
        for result, expected in ((found, left), (early, numbers)):
            assert result.rows is not None
            assert result.rows.schema == pa.schema([("c", kind), (KEY_INDEX, pa.int64())])
            result.rows.validate(full=True)
            column = result.rows["c"].combine_chunks()
            assert column.equals(pc.take(whole, pa.array(expected, pa.int64())))


TEXT = "text of some length"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.string(), TEXT),
        (pa.binary(), TEXT.encode()),
        (pa.list_(pa.field("element", pa.string())), [TEXT]),
        (pa.struct([("s", pa.string()), ("n", pa.int64())]), {"s": TEXT, "n": 1}),
        (pa.map_(pa.string(), pa.binary()), [(TEXT, TEXT.encode())]),
    ],
    ids=str,
)
def test_text_past_32_bits(kind: pa.DataType, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text whose offsets need 64 bits comes back in the type that was put, from then on and after dead rows went."""
    monkeypatch.setattr(growing, "_INT32_AT_MOST", 100)
    with small():
        cache = cache_of(max_rows=30)
        for number in range(50):
            keys = pa.table({"k": [f"key number {number}"]})
            cache.put_many(keys, pa.table({"c": pa.array([value], kind), KEY_INDEX: [0]}))
            found = cache.get_many(pa.table({"k": [f"key number {n}" for n in (number, max(0, number - 5))]}))
            assert found.present.all()
            assert found.rows is not None
            assert found.rows.schema.field("c").type == kind
            assert found.rows["c"].to_pylist() == [value] * 2
        assert cache.size() == 30
