"""What other writers of Iceberg tables do within the specification, and the tests' own writer does not."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.support.iceberg_tables import opened
from tests.support.iceberg_writing import IcebergTable
from tests.support.lake_tables import MODES

COLUMNS = {"id": "int", "name": "string"}


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
