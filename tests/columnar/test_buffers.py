"""Columns as streams: what was written in pieces is read as one column, in exactly as many bytes as announced."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.columnar import buffers as columns
from pyspark_lookup.columnar.buffers import ColumnSizes, ColumnWriter, read_column
from pyspark_lookup.columnar.types import spark_type
from pyspark_lookup.errors import NotSupportedError
from tests.support.column_values import SCALARS, draw_pieces, kinds
from tests.support.fuzzing import fuzzed
from tests.support.key_values import LARGE, QUIET, SIGNALLING, bits


def write_column(kind: pa.DataType, pieces: Iterable[pa.Array]) -> tuple[ColumnSizes, dict[str, pa.Buffer]]:
    """The streams of a column written in pieces; none is a byte longer or shorter than was announced."""
    pieces = list(pieces)
    sizes = ColumnSizes("c", kind)
    for piece in pieces:
        sizes.add(piece)
    announced = sizes.streams()
    buffers = {name: bytearray() for name in announced}

    def append(name: str, data: Any) -> None:
        buffers[name] += bytes(data)
        assert len(buffers[name]) <= announced[name], name

    writer = ColumnWriter(sizes, append)
    for piece in pieces:
        writer.add(piece)
    writer.finish()
    assert {name: len(data) for name, data in buffers.items()} == announced
    return sizes, {name: pa.py_buffer(bytes(data)) for name, data in buffers.items()}


def check(kind: pa.DataType, pieces: Sequence[pa.Array]) -> pa.Array:
    """The column read back, which is the pieces one after the other."""
    sizes, streams = write_column(kind, pieces)
    assert sizes.rows == sum(map(len, pieces))
    column = read_column("c", kind, sizes.rows, streams)
    column.validate(full=True)
    assert column.type == kind
    assert column.equals(pa.concat_arrays(pieces) if pieces else pa.array([], kind))
    assert column.null_count == sum(piece.null_count for piece in pieces)
    return column


@fuzzed(160)
@given(kind=SCALARS | kinds(3), data=st.data())
def test_any_column(kind: pa.DataType, data: st.DataObject) -> None:
    """A column of any type, with nulls at every level, comes back equal, whatever its pieces, and parts of it can be written again."""
    column = check(kind, draw_pieces(data.draw, kind))
    start = data.draw(st.integers(0, len(column)))
    part = column.slice(start, data.draw(st.integers(0, len(column) - start)))
    part.validate(full=True)
    check(kind, [part, column])
    check(kind, [pa.nulls(9, kind), pa.nulls(3, kind).slice(1)])


def spanning(kind: pa.DataType, offsets: list[int], values: pa.Array, nulls: set[int]) -> pa.Array:
    """Lists or maps of which those that are null span elements all the same."""
    marks = pa.array([row not in nulls for row in range(len(offsets) - 1)]).buffers()[1]
    raw = pa.py_buffer(np.array(offsets, np.int32))
    return pa.Array.from_buffers(kind, len(offsets) - 1, [marks, raw], children=[values])


def test_nulls_may_span_values() -> None:
    """Values behind a null list, map or struct, before the first and after the last, change nothing of the rows."""
    numbers = pa.array([9, 9, 1, 2, None, 3, 4, 5, 9])
    lists = pa.list_(pa.field("element", pa.int64()))
    array = spanning(lists, [2, 4, 5, 5, 7, 8], numbers, {1, 3})
    assert array.to_pylist() == [[1, 2], None, [], None, [5]]
    entries = pa.StructArray.from_arrays([pa.array(list("abcdefghi")), numbers], ["key", "value"])
    of_maps = spanning(pa.map_(pa.string(), pa.int64()), [2, 4, 5, 5, 7, 8], entries, {0, 3})
    assert of_maps.to_pylist() == [None, [("e", None)], [], None, [("h", 5)]]
    # Lists of lists that begin and end in the middle.
    outer = spanning(pa.list_(pa.field("element", lists)), [1, 3, 4], array, {0})
    fields = [pa.array([1, None, 3, 4, 5]), pa.array(["a", "b", None, "d", "e"]), array]
    kinds = [(f"f{n}", field.type) for n, field in enumerate(fields)]
    structs = pa.StructArray.from_arrays(
        fields, fields=list(pa.struct(kinds)), mask=pa.array([False, True] * 2 + [True])
    )
    of_structs = spanning(pa.list_(pa.field("element", structs.type)), [0, 2, 3, 5], structs, {1})
    empty = pa.array([{}, None], pa.struct([]))  # which Arrow files may hold, and Spark takes
    for column in (array, of_maps, outer, structs, of_structs, empty):
        check(column.type, [column, column.slice(1, 3), column.slice(1), column.slice(4, 1)])


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
def test_nans_keep_their_bits(kind: pa.DataType) -> None:
    """Floats are kept bit by bit: every NaN stays the one it was, and -0.0 stays below 0.0."""
    raw = [0, 1 << (kind.bit_width - 1), 1, *QUIET[kind], *SIGNALLING[kind]]
    array = bits(raw, kind)
    sizes, streams = write_column(kind, [array.slice(2), array])
    column = read_column("c", kind, sizes.rows, streams)
    unsigned = pa.uint32() if kind.bit_width == 32 else pa.uint64()
    assert column.view(unsigned).to_pylist() == raw[2:] + raw


def large(kind: pa.DataType) -> pa.DataType:
    """The same type of text and bytes with 64-bit offsets."""
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, large(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(large(kind.key_type), large(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", large(kind.value_type)))
    return LARGE.get(kind, kind)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.string(), ["a", None, "bcd", "", "efgh"]),
        (pa.struct([("x", pa.string()), ("y", pa.int8())]), [{"x": "abcd", "y": 1}, None, {"x": "efgh", "y": None}]),
        (spark_type(pa.list_(pa.string())), [["abcd", None], None, [], ["efgh", ""]]),
        (pa.map_(pa.string(), pa.binary()), [[("abcd", b"12345678")], None, [("efgh", None)]]),
    ],
    ids=str,
)
def test_much_text_has_wide_offsets(monkeypatch: pytest.MonkeyPatch, kind: pa.DataType, values: list[Any]) -> None:
    """Text beyond 32-bit offsets has 64-bit ones and is read as large text, at any depth, also where pieces were; at the limit it is not."""
    array = pa.array(values, kind)  # eight bytes of each text
    pieces = [array.slice(0, 2), array.slice(2), pa.array([], kind)]
    if kind in LARGE:
        pieces = [array.slice(0, 2), array.cast(large(kind)).slice(2), pa.array([], large(kind))]
    for limit, expected in ((7, large(kind)), (8, kind)):
        monkeypatch.setattr(columns, "_INT32_AT_MOST", limit)
        sizes, streams = write_column(kind, pieces)
        column = read_column("c", kind, sizes.rows, streams)
        column.validate(full=True)
        assert column.type == expected
        assert column.to_pylist() == values
        assert column.slice(1).to_pylist() == values[1:]


def test_more_elements_than_a_list_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists and maps of more elements than 32 bits count are refused with the type, the count and what to do."""
    monkeypatch.setattr(columns, "_INT32_AT_MOST", 3)
    for kind, value in ((spark_type(pa.list_(pa.int8())), [1, 2]), (pa.map_(pa.int8(), pa.int8()), [(1, 1), (2, 2)])):
        check(kind, [pa.array([value, value[:1]], kind)])
        sizes = ColumnSizes("c", kind)
        sizes.add(pa.array([value, value], kind))
        with pytest.raises(NotSupportedError) as caught:
            sizes.streams()
        for part in (str(kind), "4 elements", "lookup.columns", "lookup.cache = NONE"):
            assert part in str(caught.value)
