"""Iceberg tables as users name them, where their files lie, and as what others wrote them."""

import itertools
import json
import math
import random
import shutil
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from pyspark_lookup import LookupTable, NotSupportedError
from pyspark_lookup.sources.iceberg.metadata import Locations
from pyspark_lookup.storage.stores import FileVersion
from pyspark_lookup.storage.ufs import Ufs
from tests.support.fuzzing import BY_NIGHT, by_day
from tests.support.iceberg_definition import in_catalog, sql_catalog
from tests.support.iceberg_manifests import File
from tests.support.iceberg_oracle import PATH_ID, read
from tests.support.iceberg_values import Kind
from tests.support.iceberg_writing import IcebergTable
from tests.support.lake_tables import MODES, as_multiset, opened
from tests.support.rest_catalog import RestCatalog

COLUMNS = {"id": "int", "name": "string"}
STRUCT = {"type": "struct", "fields": [
    {"id": 11, "name": "x", "required": False, "type": "int"}, {"id": 12, "name": "y", "required": False, "type": "string"},
]}  # fmt: skip


def ids(table: Path | str, cache: Path, mode: str = "none", **options: Any) -> list[int]:
    return sorted(opened(table, cache, mode, "id", **options).scan().column("id").to_pylist())


def make(home: Path, count: int = 3, form: int = 2, **options: Any) -> IcebergTable:
    table = IcebergTable.create(home, COLUMNS, form, **options)
    table.commit(table.data([{"id": number, "name": f"n{number}"} for number in range(count)]))
    return table


def check(reader: LookupTable, table: IcebergTable, count: int = 40) -> None:
    """Check that a reader finds the rows that the oracle reads, by their ids below `count`."""
    assert as_multiset(reader.get_many([*range(count)]).drop_columns(["key_index"])) == as_multiset(
        read(table.metadata)
    )


class Named:
    """A way to name a table: by its directory (`hint`), by its metadata file, or in a catalog."""

    def __init__(
        self, kind: str, home: Path, catalog: SqlCatalog, properties: dict[str, str], rest_catalog: RestCatalog
    ) -> None:
        self.kind, self.home, self.catalog = kind, home, catalog
        self.publish = {"sql": in_catalog(catalog, "ns.table"), "rest": rest_catalog.publisher("ns.table")}.get(kind)
        self.properties = {"sql": properties, "rest": {"type": "rest", "uri": rest_catalog.uri}}.get(kind)

    def open(self, table: IcebergTable, mode: str) -> LookupTable:
        name = {"hint": str(table.home), "file": str(table.metadata)}.get(self.kind, "ns.table")
        return opened(name, self.home / "cache", mode, "id", self.properties)


WAYS = by_day(itertools.product(["hint", "file", "sql", "rest"], MODES), 2)


@pytest.fixture
def named(request: pytest.FixtureRequest, rest_catalog: RestCatalog, tmp_path: Path) -> Iterator[Named]:
    catalog, properties = sql_catalog(tmp_path)
    yield Named(request.param, tmp_path, catalog, properties, rest_catalog)
    catalog.close()


@pytest.mark.parametrize(("named", "mode"), WAYS, indirect=["named"])
def test_every_way_to_name_a_table(named: Named, mode: str) -> None:
    table = make(named.home / "t", publish=named.publish)
    reader = named.open(table, mode)
    assert reader.get_many([0, 2, 5]).num_rows == 2
    assert reader.describe()["kind"] == "ICEBERG"
    table.commit(table.data([{"id": 5, "name": "new"}]))
    assert reader.get_many([0, 2, 5]).num_rows == (2 if named.kind == "file" else 3)
    assert named.open(table, mode).get_many([0, 2, 5]).num_rows == 3


def test_two_catalogs_of_one_name(tmp_path: Path) -> None:
    """Tables of one name in catalogs that differ in their properties are two tables, on one host."""
    catalogs = []
    for number in range(2):
        home = tmp_path / str(number)
        home.mkdir()
        catalog, properties = sql_catalog(home)
        make(home / "t", 2 + number, publish=in_catalog(catalog, "ns.table"))
        catalogs.append(properties)
        catalog.close()
    for _ in range(2):
        for number, properties in enumerate(catalogs):
            assert len(ids("ns.table", tmp_path / "cache", "full", catalog=properties)) == 2 + number


@pytest.mark.parametrize(("named", "mode"), WAYS, indirect=["named"])
def test_a_table_that_was_made_anew(named: Named, mode: str) -> None:
    """A table under the same name, in the same directory, with metadata of the same name: the rows are those of the new one."""
    table = make(named.home / "t", publish=named.publish)
    reader, metadata = named.open(table, mode), table.metadata.name
    assert reader.get_many([0, 1, 7]).num_rows == 2
    if named.kind == "sql":
        named.catalog.drop_table("ns.table")
    shutil.rmtree(table.home)
    table = IcebergTable.create(named.home / "t", COLUMNS, publish=named.publish)
    table.commit(table.data([{"id": 7, "name": "another"}]))
    assert table.metadata.name == metadata
    if named.kind == "sql":  # such a catalog tells nothing but the name, which is a new one
        table.save()
    for opened_table in (reader, named.open(table, mode)):
        assert opened_table.get_many([0, 1, 7]).column("id").to_pylist() == [7]


def test_files_in_several_places(tmp_path: Path) -> None:
    """`write.data.path` may lead anywhere, also to names that a URL would escape."""
    table = IcebergTable.create(tmp_path / "t", COLUMNS)
    files = []
    for number, place in enumerate(("elsewhere", "a b", "a%20b", "k=v#1", "ü", "a+b", "100%")):
        (file,) = table.data([{"id": number, "name": place}])
        path = tmp_path / "data" / place / "x.parquet"
        path.parent.mkdir(parents=True)
        table.local(file["file_path"]).rename(path)
        files.append(file | {"file_path": f"file:{path}" if number % 2 else f"file://{path}"})
    table.commit(files)
    for mode in ("none", "full"):
        assert ids(table.home, tmp_path / "cache", mode) == [*range(len(files))]


@pytest.mark.parametrize(
    "location", ["data/persistent/t", "./t", "hdfs://localhost:20500/test-warehouse/t", "file:/somewhere/t"]
)
def test_a_table_that_was_moved(tmp_path: Path, location: str) -> None:
    """In a table that was moved, or written relative to the writer's directory, what is below the location is below the directory that is opened."""
    table = IcebergTable.create(tmp_path / "t", COLUMNS, location=location)
    (file,) = table.data([{"id": number, "name": "x"} for number in range(5)])
    table.commit([file])
    table.commit([table.positions([(file, 2)])])
    table.commit([table.equality([{"id": 4}], ["id"])])
    assert ids(table.home, tmp_path / "cache") == [0, 1, 3]
    assert ids(table.metadata, tmp_path / "cache", "full") == [0, 1, 3]
    table.home.rename(tmp_path / "copy")
    assert ids(tmp_path / "copy", tmp_path / "cache") == [0, 1, 3]


def respell(table: IcebergTable, delete_file: File, change: Callable[[str], str], bounds: str) -> File:
    """A position delete file whose rows call their data files otherwise."""
    path = table.local(delete_file["file_path"])
    rows = pq.read_table(path)
    names = [change(name) for name in rows.column("file_path").to_pylist()]
    pq.write_table(rows.set_column(0, rows.schema.field(0), pa.array(names)), path)
    delete_file = delete_file | {"file_size_in_bytes": path.stat().st_size}
    if bounds == "none":
        return delete_file
    low, high = min(names), max(names)
    if bounds == "cut":
        low, high = low[:16], high[:15] + chr(ord(high[15]) + 1)
    return delete_file | {"lower_bounds": {PATH_ID: low.encode()}, "upper_bounds": {PATH_ID: high.encode()}}


SPELLINGS: list[tuple[str, Callable[[str], str]]] = [
    ("hdfs://localhost:20500", lambda name: name.removeprefix("hdfs://localhost:20500")),
    ("file:", lambda name: name.replace("file:", "file://")),
    ("s3://bucket", lambda name: name.replace("s3:", "s3a:") if name[-9:] < "8" else name),
]
BOUNDS = ["none", "whole", "cut"]


# By day each spelling with other bounds.
@pytest.mark.parametrize(
    ("location", "change", "bounds"),
    by_day(((*spelling, BOUNDS[(n + m) % 3]) for n, spelling in enumerate(SPELLINGS) for m in range(3)), 3),
)
def test_positions_that_spell_paths_otherwise(
    tmp_path: Path, location: str, change: Callable[[str], str], bounds: str
) -> None:
    """Positions with another scheme, with or without a host, are of the same files; those of files that nobody knows are of none."""
    table = IcebergTable.create(tmp_path / "t", COLUMNS, location=f"{location}/warehouse/t")
    files = [table.data([{"id": number, "name": "x"}, {"id": number + 10, "name": "x"}])[0] for number in range(3)]
    table.commit(files)
    files.sort(key=lambda file: file["file_path"])
    deletes = table.positions([(file, 0) for file in files[:2]], bounds=False)
    table.commit([respell(table, deletes, change, bounds)])
    assert len(ids(table.home, tmp_path / "cache")) == 4
    stray_deletes = table.positions([(file, 0) for file in files[:2]], bounds=False)
    table.commit([respell(table, stray_deletes, lambda name: f"{name}.gone", bounds)])
    assert len(ids(table.home, tmp_path / "cache", "full")) == 4


@pytest.mark.parametrize("form", ["parquet", "orc"])
def test_files_without_field_ids(tmp_path: Path, form: str) -> None:
    """Files without field ids are read by a name mapping; without one by their places (Parquet) or names (ORC); an empty mapping maps nothing."""
    table = IcebergTable.create(tmp_path / "t", {"id": "int", "name": "string", "place": STRUCT})
    table.commit(table.data([{"id": 1, "name": "a", "place": {"x": 5, "y": "q"}}], form, ids=False))

    def row(cache: str = "cache", **more: Any) -> dict[str, Any]:
        (record,) = opened(table.home, tmp_path / cache, **more).scan().to_pylist()
        return dict(record)

    if form == "orc":
        assert row() == {"id": 1, "name": "a", "place": {"x": 5, "y": "q"}}
    else:
        # Ordinals count from 1; the fields of the struct follow those of the table there.
        assert (row()["id"], row()["name"]) == (1, "a")
    table.map_names()
    assert row() == {"id": 1, "name": "a", "place": {"x": 5, "y": "q"}}
    table.change_column("name", name="title")
    assert row() == {"id": 1, "title": "a", "place": {"x": 5, "y": "q"}}
    assert row(where="title = 'a'")["id"] == 1
    table.meta["properties"]["schema.name-mapping.default"] = "[]"
    table.save()
    assert row() == {"id": None, "title": None, "place": None}


@pytest.mark.parametrize("kind", ["hint", "rest"])
def test_defaults(rest_catalog: RestCatalog, tmp_path: Path, kind: str) -> None:
    """Rows that were written before have the default, of each type, of columns and of fields in structs."""
    publish, properties = (
        (rest_catalog.publisher("ns.table"), {"type": "rest", "uri": rest_catalog.uri})
        if kind == "rest"
        else (None, None)
    )
    table = IcebergTable.create(tmp_path / "t", {"id": "int", "place": STRUCT}, 3, publish=publish)
    table.commit(table.data([{"id": 1, "place": {"x": 1, "y": "a"}}, {"id": 2, "place": None}]))
    for name, (type_, default) in {
        "b": ("binary", "00ff"), "f": ("fixed[2]", "ff01"), "u": ("uuid", str(uuid.UUID(int=255))), "d": ("date", "2020-02-29"),
        "t": ("timestamp", "2020-02-29T01:02:03.000004"), "z": ("timestamptz", "2020-02-29T01:02:03.000004+00:00"),
        "n": ("decimal(9, 2)", "1.50"), "t2": ("boolean", True), "l": ("long", 2**40), "e": ("string", ""), "w": ("float", 0.1),
    }.items():  # fmt: skip
        table.add_column(name, type_, default)
    place = table.field("place")
    nine = dict.fromkeys(("initial-default", "write-default"), 9)
    more = {"id": table.next_id, "name": "z", "required": False, "type": "long", **nine}
    table.change_column("place", type={"type": "struct", "fields": [*place["type"]["fields"], more]})
    table.commit(table.data([{"id": 3, "place": None}]))
    name = "ns.table" if properties else table.home
    for mode in ("none", "full"):
        reader = opened(name, tmp_path / "cache", mode, "id", properties)
        assert as_multiset(reader.scan()) == as_multiset(read(table.metadata))
        check(reader, table)
    where = "l = 1099511627776 AND t2 AND d = DATE '2020-02-29'"
    assert ids(name, tmp_path / "cache", catalog=properties, where=where) == [1, 2]


@pytest.mark.parametrize("mode", MODES)
def test_columns_change_with_a_delete_by_them(tmp_path: Path, mode: str) -> None:
    """The column that a delete compares is not the one that a cache holds: it is of another type, or not there."""
    table = IcebergTable.create(tmp_path / "t", {"id": "int", "a": "int", "b": "int"})
    table.commit(table.data([{"id": number, "a": number, "b": number} for number in range(10)]))
    reader = opened(table.home, tmp_path / "cache", mode, "id")
    check(reader, table)
    table.change_column("a", type="long")
    table.commit([table.equality([{"a": 3}, {"a": 2**32 + 4}], ["a"])])
    check(reader, table)
    table.commit([table.equality([{"b": 5}], ["b"])])
    by_b = table.equality([{"b": 7}], ["b"])
    table.drop_column("b")
    check(reader, table)
    table.commit([by_b])
    check(reader, table)
    table.commit(table.data([{"id": 3, "a": 3}]))
    check(reader, table)
    table.add_column("c", "int")
    table.commit([table.equality([{"c": None, "id": 3}], ["c", "id"])])
    check(reader, table)
    assert reader.metrics()["numLoadFailures"] == 0  # which an answer from the store would hide


def test_files_that_lack_a_new_column_are_fetched_without_deleted_rows(tmp_path: Path) -> None:
    """A full cache takes their rows anew, for the column's default."""
    table = make(tmp_path / "t", 10, 3)
    table.commit([table.equality([{"id": 3}], ["id"])])
    reader = opened(table.home, tmp_path / "cache", "full", "id")
    assert reader.scan().num_rows == 9
    table.add_column("kind", "string", "new")
    check(reader, table)


# By day each seed in other modes.
@pytest.mark.parametrize(("seed", "mode"), by_day([*itertools.product(range(2), MODES)], 2))
def test_many_upserts(tmp_path: Path, mode: str, seed: int) -> None:
    """Rows are deleted by one column, by two and by null, in a partition and in all, and by their position in the same snapshot, again
    and again: a process that goes on knows them, a new one, and one that goes back to an older snapshot and returns."""
    rng = random.Random(seed)
    columns: dict[str, Kind] = {"id": "int", "name": "string", "x": "double", "p": "string"}
    table = IcebergTable.create(tmp_path / "t", columns, spec=[("p", "identity")] if seed else [])
    reader, snapshots = opened(table.home, tmp_path / "cache", mode, "id"), []
    check(reader, table)
    count = 24 if BY_NIGHT or mode == "full" else 12  # fewer leave a full cache no layer whose deleted rows change
    for number in range(count):
        rows: list[dict[str, Any]] = [
            {"id": rng.randrange(8), "name": rng.choice([None, "", "n"]), "x": rng.choice([None, 0.0, -0.0, math.nan]), "p": rng.choice("ab")}
            for _ in range(rng.randint(1, 3))
        ]  # fmt: skip
        if number in (count // 2, count * 3 // 4):  # from now on, deletes concern all partitions
            table.set_spec([] if number == count // 2 else [("p", "void")])
        by = rng.choice([["id"], ["id"], ["name", "id"], ["name"], ["x"]])
        deletes = [table.equality([row], by, partition=table.make_partition(row)) for row in rows]
        files = table.data([*rows, {**rows[0], "id": 8 + number}])
        snapshots.append(table.commit([*deletes, *files, table.positions([(files[0], 0)])]))
        if number % 6 == 5:
            check(reader, table)
            table.commit(table.data(rows), sequence=1)  # a compaction may write files with older numbers
            check(reader, table)
    for snapshot in (snapshots[count // 2 - 2], snapshots[-1]):
        table.set_current(snapshot)
        check(reader, table)
    check(opened(table.home, tmp_path / "new", mode, "id"), table)
    table.commit([], [entry for entry in table.live() if entry.file["content"]], "delete")  # what they deleted is back
    check(reader, table)


@pytest.mark.parametrize(("spec", "mode"), by_day(itertools.product([(), [("k", "truncate[10]")]], MODES), 2))
def test_decimals_of_more_than_28_digits(tmp_path: Path, mode: str, spec: Any) -> None:
    """Bounds of long decimals are exact, although Python's own arithmetic rounds to 28 digits."""
    table = IcebergTable.create(tmp_path / "t", {"k": "decimal(38, 10)", "v": "int"}, spec=spec)
    texts = ("5000000001", "9999999999", "4999999995")
    values = [Decimal(f"1234567890123456789012345678.{text}") for text in texts]
    for number, value in enumerate(values):
        table.commit(table.data([{"k": value, "v": number}], bounds=not spec))
    reader = opened(table.home, tmp_path / "cache", mode, "k")
    assert [reader.get(value)[0]["v"] for value in values] == [0, 1, 2]
    assert opened(table.home, tmp_path / "cache", where=f"k = {values[1]}BD").scan().num_rows == 1
    row = {"k": values[0]}
    table.commit([table.equality([row], ["k"], partition=table.make_partition(row))])
    assert [len(reader.get(value)) for value in values] == [0, 1, 1]


@pytest.mark.parametrize(
    ("mode", "kind", "read_between"),
    by_day(itertools.product(MODES, ["equality", "positions", "vectors"], [True, False]), 4),
)
def test_a_file_that_is_added_again(tmp_path: Path, mode: str, kind: str, read_between: bool) -> None:
    """Rows that were deleted from the file are back, whether or not this host saw it gone: it now has a later sequence number than the deletes."""
    table = IcebergTable.create(tmp_path / "t", COLUMNS, 3)
    first = table.data([{"id": 1, "name": "a"}, {"id": 2, "name": "a"}])
    second = table.data([{"id": 1, "name": "b"}, {"id": 3, "name": "b"}])
    table.commit([*first, *second])
    places = sorted([(first[0], 0), (second[0], 0)], key=lambda place: str(place[0]["file_path"]))
    deletes = {
        "equality": lambda: [table.equality([{"id": 1}], ["id"])],
        "positions": lambda: [table.positions(places)],
        "vectors": lambda: table.vectors([(file, [place]) for file, place in places]),
    }[kind]
    table.commit(deletes())
    reader = opened(table.home, tmp_path / "cache", mode, "id")
    assert [len(reader.get(key)) for key in (1, 2, 3)] == [0, 1, 1]
    table.commit(remove=[entry for entry in table.live() if entry.file["file_path"] == first[0]["file_path"]])
    assert not read_between or [len(reader.get(key)) for key in (1, 2, 3)] == [0, 0, 1]
    table.commit(first)
    for opened_table in (reader, opened(table.home, tmp_path / "cache", mode, "id")):
        assert [len(opened_table.get(key)) for key in (1, 2, 3)] == [1, 1, 1]


@pytest.mark.parametrize("change", ["order", "one more"])
def test_values_of_partitions_are_told_by_field_ids(tmp_path: Path, change: str) -> None:
    """The metadata may list the fields of a spec in a different order from a manifest, or have an additional field."""
    columns = {"id": "int", "p": "int", "q": "int"}
    table = IcebergTable.create(tmp_path / "t", columns, spec=[("p", "identity"), ("q", "identity")])
    table.commit(table.data([{"id": 1, "p": 1, "q": 2}]))
    fields = table.meta["partition-specs"][0]["fields"]
    if change == "order":
        fields.reverse()
    else:
        fields.insert(0, {"name": "r", "transform": "void", "source-id": 1, "field-id": 1009})
    table.metadata.write_text(json.dumps(table.meta))
    assert opened(table.home, tmp_path / "cache").scan().to_pylist() == [{"id": 1, "p": 1, "q": 2}]
    assert opened(table.home, tmp_path / "cache", where="p = 1").scan().num_rows == 1


@pytest.mark.parametrize(
    ("between", "has_version"), [("commit", True), ("commit", False), ("empty", True), ("missing", True)]
)
def test_a_hint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str, has_version: bool
) -> None:
    """The hint changes between the look at it and its read; or is empty, or away, for the moment that its writer takes."""
    table = make(tmp_path / "t")
    hint = table.home / "metadata" / "version-hint.text"
    reader = opened(table.home, tmp_path / "cache", "none", "id")
    if has_version:
        assert reader.get_many([0, 8, 9]).num_rows == 1
    table.commit(table.data([{"id": 8, "name": "new"}]))
    text, looks, get_meta = hint.read_text(), 0, Ufs.get_meta

    def get_changing_meta(self: Ufs, path: str) -> FileVersion:
        nonlocal looks
        if not path.endswith(hint.name):
            return get_meta(self, path)
        looks += 1
        if between != "commit":
            hint.write_text("" if looks == 1 else text)
            if looks == 1 and between == "missing":
                hint.unlink()
        meta = get_meta(self, path)
        if looks == 1 and between == "commit":
            table.commit(table.data([{"id": 9, "name": "newer"}]))
        return meta

    monkeypatch.setattr(Ufs, "get_meta", get_changing_meta)
    assert reader.get_many([0, 8, 9]).num_rows == (3 if between == "commit" else 2)
    assert looks > 1


OTHER_STORES = {
    "s3://bucket/t": ["file:///etc/m.avro", "file:/etc/m.avro", "/etc/m.avro", "hdfs://name/m.avro"],
    "file:///data/t": ["s3://bucket/m.avro"],
    "gs://bucket/t": ["s3a://bucket/m.avro"],
}


def test_a_file_of_another_store() -> None:
    """A file of another store is refused by name before any store is asked."""
    for root, files in OTHER_STORES.items():
        for file in files:
            message = rf"^{root}: its metadata names {file}, a file in a different store from the table's, which is not supported: read the table with"
            with pytest.raises(NotSupportedError, match=message):
                Locations(root, root).resolve_url(file)
    for file in ("s3a://bucket/t/m.avro", "s3n://other/m.avro", "s3://bucket/x"):
        assert Locations("s3://bucket/t", "s3://bucket/t").resolve_url(file).startswith("s3://")
