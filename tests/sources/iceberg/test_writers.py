"""What other writers of Iceberg tables do within the specification, and the tests' own writer does not."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.iceberg_tables import opened
from tests.support.iceberg_writing import IcebergTable
from tests.support.lake_tables import MODES

COLUMNS = {"id": "int", "name": "string"}


def with_schema(path: Path, change: Callable[[Any], None]) -> None:
    """Change what the header of an Avro file says of its schema; its blocks stay."""
    data = path.read_bytes()
    with path.open("rb") as stream:
        metadata: dict[str, str] = dict(fastavro.reader(stream).metadata)
    schema = json.loads(metadata["avro.schema"])
    change(schema)
    metadata["avro.schema"] = json.dumps(schema)

    def number(value: int) -> bytes:
        value, found = value * 2, b""
        while value > 127:
            value, found = value >> 7, found + bytes([value & 127 | 128])
        return found + bytes([value])

    texts = [text.encode() for pair in metadata.items() for text in pair]
    header = b"Obj\1" + number(len(metadata)) + b"".join(number(len(text)) + text for text in texts) + number(0)
    sync = data[-16:]
    path.write_bytes(header + data[data.index(sync) :])


def manifests(table: IcebergTable) -> list[Path]:
    lists = {one["manifest-list"].rpartition("/")[2] for one in table.meta["snapshots"]}
    return [path for path in (table.home / "metadata").glob("*.avro") if path.name not in lists]


def partition_in(schema: Any) -> list[dict[str, Any]]:
    """The fields of the partition in a manifest's schema."""
    file = next(field for field in schema["fields"] if field["name"] == "data_file")
    partition = next(field for field in file["type"]["fields"] if field["name"] == "partition")
    fields: list[dict[str, Any]] = partition["type"]["fields"]
    return fields


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spec", [(), [("k", "truncate[10]")]])
def test_decimals_of_more_than_28_digits(tmp_path: Path, mode: str, spec: Any) -> None:
    """Their bounds are exact, although Python's own arithmetic rounds to 28 digits."""
    table = IcebergTable.create(tmp_path / "t", {"k": "decimal(38, 10)", "v": "int"}, spec=spec)
    texts = ("5000000001", "9999999999", "4999999995")
    values = [Decimal(f"1234567890123456789012345678.{text}") for text in texts]
    for number, value in enumerate(values):
        table.commit(table.data([{"k": value, "v": number}], bounds=not spec))
    reader = opened(table.home, tmp_path / "cache", mode, "k")
    assert [reader.get(value)[0]["v"] for value in values] == [0, 1, 2]
    assert opened(table.home, tmp_path / "cache", where=f"k = {values[1]}BD").scan().num_rows == 1
    row = {"k": values[0]}
    table.commit([table.equality([row], ["k"], partition=table.partition_of(row))])
    assert [len(reader.get(value)) for value in values] == [0, 1, 1]


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("kind", ["equality", "positions", "vectors"])
@pytest.mark.parametrize("mode", MODES)
def test_a_file_that_is_added_again(tmp_path: Path, mode: str, kind: str, seen: bool) -> None:
    """What was deleted of it before is back, whether or not this host saw it gone: it has a later sequence number than the deletes."""
    table = IcebergTable.create(tmp_path / "t", COLUMNS, 3)
    one = table.data([{"id": 1, "name": "a"}, {"id": 2, "name": "a"}])
    other = table.data([{"id": 1, "name": "b"}, {"id": 3, "name": "b"}])
    table.commit([*one, *other])
    places = sorted([(one[0], 0), (other[0], 0)], key=lambda place: str(place[0]["file_path"]))
    deletes = {
        "equality": lambda: [table.equality([{"id": 1}], ["id"])],
        "positions": lambda: [table.positions(places)],
        "vectors": lambda: table.vectors([(file, [place]) for file, place in places]),
    }[kind]
    table.commit(deletes())
    reader = opened(table.home, tmp_path / "cache", mode, "id")
    assert [len(reader.get(key)) for key in (1, 2, 3)] == [0, 1, 1]
    table.commit(remove=[entry for entry in table.live() if entry.file["file_path"] == one[0]["file_path"]])
    assert not seen or [len(reader.get(key)) for key in (1, 2, 3)] == [0, 0, 1]
    table.commit(one)
    for again in (reader, opened(table.home, tmp_path / "cache", mode, "id")):
        assert [len(again.get(key)) for key in (1, 2, 3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        ("uuid", "uuid_fixed", [uuid.UUID(int=1), uuid.UUID(int=2)]),
        ("decimal(9, 2)", "decimal_9_2", [Decimal("1.00"), Decimal("2.00")]),
        ("fixed[4]", "fixed_4", [b"abcd", b"efgh"]),
    ],
)
def test_types_of_avro_by_their_names(tmp_path: Path, kind: str, name: str, values: list[Any]) -> None:
    """Java's Avro defines a type once, and names it after that."""
    spec = [("a", "identity"), ("b", "identity")]
    table = IcebergTable.create(tmp_path / "t", {"id": "int", "a": kind, "b": kind}, spec=spec)
    table.commit(table.data([{"id": 1, "a": values[0], "b": values[1]}]))

    def refer(schema: Any) -> None:
        first, second = partition_in(schema)
        first["type"][1]["name"], second["type"][1] = name, name

    for path in manifests(table):
        with_schema(path, refer)
    shown = [str(value) if kind == "uuid" else value for value in values]
    assert opened(table.home, tmp_path / "cache").scan().to_pylist() == [{"id": 1, "a": shown[0], "b": shown[1]}]


def test_logical_types_of_avro_that_are_not_known(tmp_path: Path) -> None:
    """They are what they lie in, as Avro says."""
    table = IcebergTable.create(tmp_path / "t", {"id": "int", "a": "long"}, spec=[("a", "identity")])
    table.commit(table.data([{"id": 1, "a": 5}]))

    def change(schema: Any) -> None:
        partition_in(schema)[0]["type"][1] = {"type": "long", "logicalType": "timestamp-nanos"}

    for path in manifests(table):
        with_schema(path, change)
    assert opened(table.home, tmp_path / "cache").scan().to_pylist() == [{"id": 1, "a": 5}]


@pytest.mark.parametrize("without", [(512, 513, 514), (503,), (503, 504, 505, 506, 512, 513, 514)])
def test_lists_of_format_1_without_what_is_optional(tmp_path: Path, without: tuple[int, ...]) -> None:
    table = IcebergTable.create(tmp_path / "t", COLUMNS, 1)
    table.commit(table.data([{"id": 1, "name": "a"}]))
    path = table.local(table.meta["snapshots"][-1]["manifest-list"])
    with path.open("rb") as stream:
        reader = fastavro.reader(stream)
        rows, schema = list(reader), json.loads(reader.metadata["avro.schema"])
    schema["fields"] = [field for field in schema["fields"] if field["field-id"] not in without]
    with path.open("wb") as stream:
        fastavro.writer(stream, fastavro.parse_schema(schema), rows)
    assert opened(table.home, tmp_path / "cache").scan().to_pylist() == [{"id": 1, "name": "a"}]


@pytest.mark.parametrize("directory", ["meta/t", "meta/t/metadata", "wh/meta", "meta"])
def test_metadata_that_lies_elsewhere(tmp_path: Path, directory: str) -> None:
    """`write.metadata.path` may be anywhere; what it names is where it says."""
    table = IcebergTable.create(tmp_path / "wh" / "t", COLUMNS)
    table.commit(table.data([{"id": 1, "name": "a"}]))
    file = tmp_path / directory / "00001-abc.metadata.json"
    file.parent.mkdir(parents=True)
    table.meta["properties"]["write.metadata.path"] = str(file.parent)
    file.write_text(json.dumps(table.meta))
    assert opened(file, tmp_path / "cache").scan().num_rows == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", ["order", "one more"])
def test_values_of_partitions_are_told_by_field_ids(tmp_path: Path, mode: str, change: str) -> None:
    """The metadata may list the fields of a spec in another order than a manifest does, or have one more."""
    columns = {"id": "int", "p": "int", "q": "int"}
    table = IcebergTable.create(tmp_path / "t", columns, spec=[("p", "identity"), ("q", "identity")])
    table.commit(table.data([{"id": 1, "p": 1, "q": 2}]))
    fields = table.meta["partition-specs"][0]["fields"]
    if change == "order":
        fields.reverse()
    else:
        fields.insert(0, {"name": "r", "transform": "void", "source-id": 1, "field-id": 1009})
    table.metadata.write_text(json.dumps(table.meta))
    reader = opened(table.home, tmp_path / "cache", mode, "id")
    assert reader.get(1) == [{"id": 1, "p": 1, "q": 2}]
    assert opened(table.home, tmp_path / "cache", where="p = 1").scan().num_rows == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_column_with_the_name_of_a_number(tmp_path: Path, mode: str) -> None:
    """It is not the dropped column with this field id, by which rows are deleted."""
    table = IcebergTable.create(tmp_path / "t", {"id": "int", "old": "string", "#2": "string", "2": "string"})
    table.commit(table.data([{"id": 1, "old": "x", "#2": "y", "2": "y"}, {"id": 2, "old": "y", "#2": "x", "2": "x"}]))
    by_old = table.equality([{"old": "x"}], ["old"])
    table.drop_column("old")
    reader = opened(table.home, tmp_path / "cache", mode, "id")
    assert [len(reader.get(key)) for key in (1, 2)] == [1, 1]
    table.commit([by_old])
    assert [len(reader.get(key)) for key in (1, 2)] == [0, 1]


def test_paths_of_position_deletes_as_views(tmp_path: Path) -> None:
    """The Arrow schema that some writers put into Parquet may call a text a string view."""
    table = IcebergTable.create(tmp_path / "t", COLUMNS)
    (file,) = table.data([{"id": 0}, {"id": 1}])
    table.commit([file])
    made = table.positions([(file, 1)])
    place = table.local(made["file_path"])
    rows = pq.read_table(place)
    views = rows.set_column(0, rows.schema.field(0).with_type(pa.string_view()), rows.column(0).cast(pa.string_view()))
    pq.write_table(views, place)
    table.commit([{**made, "file_size_in_bytes": place.stat().st_size}])
    assert opened(table.home, tmp_path / "cache").scan().column("id").to_pylist() == [0]


def test_the_main_branch_before_the_first_commit(tmp_path: Path) -> None:
    table = IcebergTable.create(tmp_path / "t", COLUMNS)
    assert opened(table.home, tmp_path / "cache", branch="main").scan().num_rows == 0
