"""The cache in memory answers as an ordered dictionary would that knows the same bounds, and as FLIP-221 says: rows of all types."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.cache.memory import KEY_INDEX, growing
from tests.caching.common import cache_of, keys_of, small
from tests.test_columns import kinds, pieces_of
from tests.test_keys import US, examples


def check_types(kind: pa.DataType, pieces: list[pa.Array], draw: random.Random) -> None:
    """Rows put in pieces come back by whatever keys are asked for, while others are replaced and forgotten."""
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


@examples(60)
@given(data=st.data())
def test_rows_of_every_type(data: st.DataObject) -> None:
    """Values of all types, nested ones and nulls at any level come back equal and in the type that was put."""
    kind = data.draw(kinds(2), label="kind")
    pieces = pieces_of(data.draw, kind)
    check_types(kind, pieces, random.Random(len(pieces)))


EXAMPLES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.bool_(), [True, None, False, True, False, None, True, True, None, False, True]),
    (pa.string(), ["", None, "a", "é" * 50, ""]),
    (pa.binary(), [b"", b"\0", None, b"x" * 99]),
    (pa.decimal128(38, 10), [None, 0, -1, 10**27]),
    (US, [0, None, -1, 2**60]),
    (pa.list_(pa.field("element", pa.string())), [[], None, ["", None], ["a", "b"]]),
    (pa.map_(pa.string(), pa.int32()), [[], None, [("a", 1), ("b", None)]]),
    (
        pa.struct([("x", pa.bool_()), ("y", pa.list_(pa.field("element", pa.int64())))]),
        [None, {"x": True, "y": [1]}, {"x": None, "y": None}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values"), EXAMPLES, ids=[str(kind) for kind, _ in EXAMPLES])
def test_rows_of_some_types(kind: pa.DataType, values: list[Any]) -> None:
    """Nulls first or last, empty texts and empty lists come back, however the pieces are cut."""
    array = pa.array(values, kind)
    for cut in range(len(values) + 1):
        check_types(kind, [array.slice(0, cut), array.slice(cut), array], random.Random(cut))


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.binary(),
        pa.list_(pa.field("element", pa.string())),
        pa.struct([("s", pa.string()), ("n", pa.int64())]),
        pa.map_(pa.string(), pa.binary()),
    ],
    ids=str,
)
def test_text_past_32_bits(kind: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text whose offsets need 64 bits comes back in the type that was put, from then on and after dead rows went."""
    monkeypatch.setattr(growing, "_INT32_AT_MOST", 100)
    text = "text of some length"
    value: Any = text.encode() if pa.types.is_binary(kind) else text
    if pa.types.is_list(kind):
        value = [text]
    elif pa.types.is_struct(kind):
        value = {"s": text, "n": 1}
    elif pa.types.is_map(kind):
        value = [(text, text.encode())]
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


@pytest.mark.parametrize("large", [pa.large_string(), pa.large_binary()], ids=str)
def test_offsets_take_64_bits_only_where_they_have_to(large: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column is of its large type from the byte on that is one too many, and of its own again with fewer rows."""
    monkeypatch.setattr(growing, "_INT32_AT_MOST", 10)
    kind = pa.string() if pa.types.is_large_string(large) else pa.binary()
    column = growing.GrowingColumn(kind)
    column.append(pa.array(["12345", None, "67890"], kind))
    before = column.view()
    column.append(pa.array(["x", "", "12345"], kind).slice(1, 1))
    assert column.view().type == before.type == kind
    column.append(pa.array(["12345", "x", None], kind).slice(1))
    whole = pa.array(["12345", None, "67890", "", "x", None], large)
    assert column.view().equals(whole)
    assert before.equals(whole.slice(0, 3).cast(kind))
    assert column.kept(np.array([0, 2, 3])).view().equals(pa.array(["12345", "67890", ""], kind))
    assert column.kept(np.array([1, 2, 3, 4])).view().equals(whole.slice(1, 4).cast(kind))
