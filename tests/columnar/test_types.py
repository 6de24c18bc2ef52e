"""Arrow schemas as Spark takes them: types as PySpark has them, files merged, values kept or refused."""

import itertools
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pyspark_lookup.columnar.types import (
    cast_column,
    check_all_readable,
    merge_schemas,
    spark_schema,
    spark_type,
    widens,
)
from pyspark_lookup.errors import SchemaError
from pyspark_lookup.spark.types import arrow_schema, struct_type

US, US_UTC = pa.timestamp("us"), pa.timestamp("us", "UTC")


def listed(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind))


UNITS = ("s", "ms", "us", "ns")
BECOMES: dict[pa.DataType, list[pa.DataType]] = {
    pa.bool_(): [pa.bool_()],
    pa.int8(): [pa.int8(), pa.bool8()],
    pa.int16(): [pa.int16(), pa.uint8()],
    pa.int32(): [pa.int32(), pa.uint16(), pa.dictionary(pa.int32(), pa.uint16())],
    pa.int64(): [pa.int64(), pa.uint32()],
    pa.decimal128(20, 0): [pa.uint64()],
    pa.float32(): [pa.float16(), pa.float32()],
    pa.float64(): [pa.float64()],
    pa.string(): [pa.string(), pa.large_string(), pa.string_view(), pa.null(), pa.dictionary(pa.int8(), pa.large_string())],
    pa.binary(): [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(4), pa.uuid()],
    pa.date32(): [pa.date32(), pa.date64()],
    US: [pa.timestamp(unit) for unit in UNITS],
    US_UTC: [
        *(pa.timestamp(unit, zone) for unit in UNITS for zone in ("UTC", "+02:00", "Asia/Tokyo")),
        pa.run_end_encoded(pa.int32(), pa.timestamp("ns", "UTC")),
    ],
    pa.duration("us"): [pa.duration(unit) for unit in UNITS],
    pa.decimal128(5, 2): [pa.decimal32(5, 2)],
    pa.decimal128(12, 2): [pa.decimal64(12, 2)],
    pa.decimal128(38, 38): [pa.decimal128(38, 38)],
    pa.decimal128(38, 10): [pa.decimal256(38, 10)],
}  # fmt: skip
FLAT = [(kind, expected) for expected, kinds in BECOMES.items() for kind in kinds]
X_NULL = pa.struct([("x", pa.null())])
NESTED = [
    (pa.list_(pa.uint8()), listed(pa.int16())),
    (pa.list_(pa.field("item", pa.int8(), nullable=False)), listed(pa.int8())),
    (pa.large_list(pa.date64()), listed(pa.date32())),
    (pa.list_(pa.float16(), 3), listed(pa.float32())),
    (pa.list_view(pa.int64()), listed(pa.int64())),
    (pa.large_list_view(pa.null()), listed(pa.string())),
    (pa.map_(pa.dictionary(pa.int8(), pa.string()), pa.uint64()), pa.map_(pa.string(), pa.decimal128(20, 0))),
    (pa.map_(pa.int32(), pa.field("x", pa.list_(pa.int8()), False), keys_sorted=True), pa.map_(pa.int32(), pa.field("value", listed(pa.int8())))),
    (pa.struct([pa.field("a.b", pa.uint8(), False), ("ä", X_NULL)]), pa.struct([("a.b", pa.int16()), ("ä", pa.struct([("x", pa.string())]))])),
    (pa.struct([]), pa.struct([])),
    (pa.fixed_shape_tensor(pa.int32(), [2, 2]), listed(pa.int32())),
]  # fmt: skip


def test_spark_type() -> None:
    """Each type becomes the one Spark has for its values, at once and for good, so that PySpark takes batches as they are."""
    for kind, expected in FLAT + NESTED:
        read_kind = spark_type(kind)
        assert read_kind.equals(expected, check_metadata=True), f"{read_kind} is not {expected}"
        assert spark_type(read_kind).equals(read_kind, check_metadata=True)
        schema = pa.schema([("c", read_kind)])
        assert arrow_schema(struct_type(schema)).equals(schema, check_metadata=True)


UNSUPPORTED = [
    pa.time64("ns"), pa.month_day_nano_interval(), pa.decimal256(39, 0), pa.decimal128(5, 6), pa.dense_union([pa.field("a", pa.int8())]),
]  # fmt: skip


@pytest.mark.parametrize("kind", UNSUPPORTED, ids=str)
def test_unsupported_type_names_column_and_file(kind: pa.DataType) -> None:
    """A type Spark lacks, however deep, is an error that names the type, the column and the file."""
    for wrapped in (kind, pa.list_(kind), pa.struct([("x", pa.int8()), ("y", kind)]), pa.map_(pa.string(), kind)):
        schema = pa.schema([("ok", pa.int8()), ("bad column", wrapped)])
        with pytest.raises(SchemaError) as caught:
            spark_schema(schema, "s3://b/part-7")
        message = str(caught.value)
        assert message.startswith("s3://b/part-7: ")
        assert "'bad column'" in message
        assert str(kind) in message
        assert caught.value.__cause__ is None


def test_spark_schema_keeps_names_and_order_only() -> None:
    """Columns keep names and order, nothing else; two that Spark would not tell apart are an error naming both and the file."""
    fields = [("A.x y", pa.null()), ("ü", pa.list_(pa.null())), ("s", X_NULL)]
    first = pa.field("b", pa.uint8(), nullable=False, metadata={"k": "v"})
    kinds = [pa.int16(), pa.null(), listed(pa.null()), X_NULL]
    schema = pa.schema([first, *fields], metadata={"pandas": "{}"})
    expected = pa.schema(list(zip(schema.names, kinds, strict=True)))
    assert spark_schema(schema, "f").equals(expected, check_metadata=True)
    for name, other_name in (("id", "id"), ("id", "ID"), ("Größe", "GRÖßE")):
        with pytest.raises(
            SchemaError, match=f"dim.csv: columns '{name}' and '{other_name}' differ at most in letter case"
        ):
            spark_schema(pa.schema([(name, pa.int8()), ("x", pa.int8()), (other_name, pa.int8())]), "dim.csv")


def merged(*schemas: dict[str, pa.DataType]) -> pa.Schema:
    return merge_schemas(
        (f"file-{n}", spark_schema(pa.schema(list(s.items())), f"file-{n}")) for n, s in enumerate(schemas)
    )


def test_merge_takes_columns_in_order_of_first_appearance() -> None:
    """A column that any file has is in the table, where it appeared first; errors name the files that they come from."""
    schema = merged({"b": pa.int8()}, {"a": pa.string(), "b": pa.int8()}, {}, {"c": pa.date32(), "a": pa.string()})
    assert schema == pa.schema([("b", pa.int8()), ("a", pa.string()), ("c", pa.date32())])
    assert merged() == pa.schema([])
    with pytest.raises(SchemaError, match="is int8 in file-0 but string in file-2"):
        check_all_readable(merged({"c": pa.int8()}, {"c": pa.float64()}, {"c": pa.string()}, {"c": pa.int8()}))
    with pytest.raises(SchemaError, match="column 'id' of file-0 is spelled 'ID' in file-2"):
        check_all_readable(merged({"id": pa.int8()}, {"x": pa.int8()}, {"ID": pa.int8()}))


def x_and_y(x: pa.DataType, y: pa.DataType) -> pa.DataType:
    return pa.struct([("x", x), ("y", listed(y))])


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((pa.null(), pa.null()), pa.string()),
        ((pa.null(), pa.list_(pa.null())), listed(pa.string())),
        ((x_and_y(pa.int8(), pa.float64()), x_and_y(pa.int64(), pa.float32()), pa.null()), x_and_y(pa.int64(), pa.float64())),
        ((pa.map_(pa.int8(), pa.int64()), pa.map_(pa.int32(), pa.int8())), pa.map_(pa.int32(), pa.int64())),
        ((pa.float32(), pa.int32(), pa.float64()), pa.float64()),  # the first two have no common type
        ((pa.list_(pa.int32()), pa.list_(pa.decimal128(9, 2)), pa.list_(pa.decimal128(12, 2))), listed(pa.decimal128(12, 2))),
    ],
    ids=str,
)  # fmt: skip
def test_merge_widens(kinds: tuple[pa.DataType, ...], expected: pa.DataType) -> None:
    """Whichever file comes first, a column gets the type that holds all files' values, part by part."""
    for order in itertools.permutations(kinds):
        kind = merged(*({"c": part} for part in order)).field("c").type
        assert kind.equals(expected, check_metadata=True)
        assert all(widens(spark_type(part, pa.null()), kind) for part in kinds)


X_INT8 = pa.struct([("x", pa.int8())])
APART: dict[pa.DataType, list[pa.DataType]] = {
    pa.int64(): [pa.float64(), pa.decimal128(18, 0)], pa.int32(): [pa.float32()], pa.string(): [pa.binary(), pa.int8()],
    pa.timestamp("us"): [pa.date32(), pa.timestamp("us", "UTC")], pa.bool_(): [pa.int8()],
    pa.decimal128(5, 0): [pa.decimal128(5, 2)], pa.list_(pa.int8()): [pa.int8(), pa.list_(pa.string())],
    pa.map_(pa.int8(), pa.int8()): [pa.map_(pa.string(), pa.int8()), pa.map_(pa.int8(), pa.string())],
    X_INT8: [pa.struct([("X", pa.int8())]), pa.struct([("x", pa.int8()), ("y", pa.int8())]), pa.struct([("x", pa.string())])],
    pa.struct([("x", pa.int8()), ("y", pa.int8())]): [pa.struct([("y", pa.int8()), ("x", pa.int8())])],
}  # fmt: skip


@pytest.mark.parametrize(("left", "right"), [(left, right) for left in APART for right in APART[left]], ids=str)
def test_merge_refuses_types_that_do_not_fit(left: pa.DataType, right: pa.DataType) -> None:
    """Types without a common one are an error naming the column, both types and both files."""
    for first, second in ((left, right), (right, left)):
        with pytest.raises(SchemaError) as caught:
            check_all_readable(merged({"k": pa.int8(), "c": first}, {"c": first}, {"k": pa.int8()}, {"c": second}))
        words = f"column 'c' is {spark_type(first)} in file-0 but {spark_type(second)} in file-3"
        assert str(caught.value).startswith(words)


def test_layouts_of_other_writers() -> None:
    """Nulls that span values, views in any order, runs, codes of nulls and extensions are the values they stand for, row by row."""
    inner = pa.array([1, 2, 3, 4, 5, 6], pa.uint8())
    offsets = pa.array([0, 2, 4, 6], pa.int32()).buffers()[1]
    spans = pa.ListArray.from_buffers(pa.list_(pa.uint8()), 3, [pa.py_buffer(b"\x05"), offsets], children=[inner])
    fixed = pa.FixedSizeListArray.from_arrays(inner, 2, mask=pa.array([False, True, False]))
    pairs = pa.StructArray.from_arrays([inner], ["x"], mask=pa.array([False, True] * 3))
    views = pa.ListViewArray.from_arrays(pa.array([3, 0, 1], pa.int32()), pa.array([2, 2, 0], pa.int32()), inner)
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 2], pa.uint8()), pa.array(["a", None, "c"]))
    uuids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16, None, b"2" * 16], pa.binary(16)))
    tensor, numbers = pa.fixed_shape_tensor(pa.uint8(), [2]), pa.FixedSizeListArray.from_arrays(inner, 2)
    cases: list[tuple[pa.Array, pa.DataType, list[Any]]] = [
        (spans, listed(pa.int16()), [[1, 2], None, [5, 6]]),
        (fixed, listed(pa.int16()), [[1, 2], None, [5, 6]]),
        (pairs, pa.struct([("x", pa.int16())]), [{"x": 1}, None, {"x": 3}, None, {"x": 5}, None]),
        (views, listed(pa.int16()), [[4, 5], [1, 2], []]),
        (pc.run_end_encode(pa.array([1, 1, None, 2, 2], pa.uint32())), pa.int64(), [1, 1, None, 2, 2]),
        (codes, pa.string(), ["a", None, None, "c"]),
        (pa.DictionaryArray.from_arrays(pa.array([None] * 2, pa.int8()), pa.nulls(0)), pa.date32(), [None] * 2),
        (uuids, pa.binary(), [b"0" * 16, None, b"2" * 16]),
        (pa.ExtensionArray.from_storage(tensor, numbers), listed(pa.int16()), [[1, 2], [3, 4], [5, 6]]),
    ]
    for column, kind, values in cases:
        for part in (slice(None), slice(1, None), slice(1, 4)):
            assert cast_column(column[part], kind, "c", "f").to_pylist() == values[part]


def wrapped(column: pa.Array, kind: pa.DataType) -> list[tuple[pa.Array, pa.DataType, str]]:
    """A column and its Spark type alone and inside each nested type, with how an error names the inside."""
    rows = len(column)
    offsets = pa.array(range(rows + 1), pa.int32())
    keys = pa.array([str(n) for n in range(rows)])
    return [
        (column, kind, "'c'"),
        (pa.ListArray.from_arrays(offsets, column), listed(kind), "'c.element'"),
        (pa.StructArray.from_arrays([column], ["x"]), pa.struct([("x", kind)]), "'c.x'"),
        (pa.MapArray.from_arrays(offsets, keys, column), pa.map_(pa.string(), kind), "'c.value'"),
        (pa.MapArray.from_arrays(offsets, column, keys), pa.map_(kind, pa.string()), "'c.key'"),
    ]


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([1_000, 1_001], pa.timestamp("ns")), US), (pa.array([0, 2**62], pa.timestamp("s")), US),
        (pa.array([0, 86_400_001], pa.int64()).view(pa.date64()), pa.date32()),
        (pa.array([0, 2**40], pa.int64()), pa.int32()), (pa.array(["1", "x"]), pa.int32()),
        (pa.array([0, 3_600_000_000], US), pa.date32()), (pa.array([1, 2]), pa.bool_()), (pa.array([0.0, 0.5]), pa.bool_()),
        (pa.array([b"ok", b"\xff"]), pa.string()),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_that_would_change_is_an_error(column: pa.Array, kind: pa.DataType) -> None:
    """Digits of a nanosecond, values out of range or of another kind: the error names the column, inside too, and the file."""
    for array, into, name in wrapped(column, kind):
        with pytest.raises(SchemaError) as caught:
            cast_column(array, into, "c", "s3://b/part-1")
        assert str(caught.value).startswith(f"column {name} of s3://b/part-1 does not fit {kind}: ")
        assert isinstance(caught.value.__cause__, pa.ArrowException)
