"""The recipes for Delta and Iceberg: their tables as lookup tables, read by delta-rs and PyIceberg."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import decimal
import importlib
import json
import os
import re
import struct
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.types import StringType
from pyroaring import BitMap64

from examples import delta_provider
from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import LookupFunctionError, OptionError, SchemaError
from pyspark_lookup.providers.functions import LookupContext
from tests.providers.common import TEXTS, ids

if TYPE_CHECKING:
    from tests.s3server import S3Server

PARTIAL = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000"}
FULL = {"lookup.cache": "FULL"}
ONCE = {"lookup.max-retries": "0"}
each_factory = pytest.mark.parametrize(("factory", "cache"), [("by_key", PARTIAL), ("whole", FULL)], ids=["by_key", "whole"])  # fmt: skip
PEOPLE = pa.table({"id": [1, 2, 2, 3], "name": ["one", "two", "zwei", None], "n": [10, 20, 21, 30]})

Row = dict[str, Any]


class Lake:
    """Tables of one format in a directory. A table is known by its name; rows are appended, overwritten and deleted."""

    module: str

    def __init__(self, directory: Path, cache_dir: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self._cache_dir = cache_dir
        self._tables: list[LookupTable] = []

    def table(self, name: str, keys: str, *options: dict[str, str], factory: str = "by_key") -> LookupTable:
        path, given = self.refer(name)
        given |= {"lookup.provider": f"{self.module}:{factory}", "lookup.cache.dir": str(self._cache_dir)}
        for more in options:
            given |= more
        self._tables.append(LookupTable(path, given | {"lookup.keys": keys}))
        return self._tables[-1]

    def close(self) -> None:
        for table in self._tables:
            table.close()

    # Of a table's name: the path and the options that say which is meant; the data files of the newest version.
    refer: Callable[[str], tuple[str | None, dict[str, str]]]
    files: Callable[[str], list[Path]]
    # The rows of a table are written, deleted or dropped.
    write: Callable[[str, pa.Table, str], None]
    delete: Callable[[str, str], None]
    drop: Callable[[str], None]

    def create(self, name: str, rows: pa.Table) -> None:
        self.write(name, rows, "create")

    def append(self, name: str, rows: pa.Table) -> None:
        self.write(name, rows, "append")

    def overwrite(self, name: str, rows: pa.Table) -> None:
        self.write(name, rows, "overwrite")


class DeltaLake(Lake):
    module = "examples.delta_provider"

    def _path(self, name: str) -> str:
        return str(self.directory / name)

    def refer(self, name: str) -> tuple[str | None, dict[str, str]]:
        return self._path(name), {}

    def write(self, name: str, rows: pa.Table, mode: Any) -> None:
        write_deltalake(self._path(name), rows, mode="error" if mode == "create" else mode)

    def delete(self, name: str, predicate: str) -> None:
        DeltaTable(self._path(name)).delete(predicate)

    def drop(self, name: str) -> None:
        os.rename(self._path(name), self._path(f"{name} dropped"))

    def files(self, name: str) -> list[Path]:
        return [Path(uri) for uri in DeltaTable(self._path(name)).file_uris()]


class IcebergLake(Lake):
    module = "examples.iceberg_provider"

    def __init__(self, directory: Path, cache_dir: Path) -> None:
        super().__init__(directory, cache_dir)
        places = {"uri": f"sqlite:///{directory / 'catalog.db'}", "warehouse": f"file://{directory / 'warehouse'}"}
        self._properties = {"type": "sql", **places}
        self.catalog: Catalog = load_catalog("lake", **self._properties)
        self.catalog.create_namespace("shop")

    def loaded(self, name: str) -> Any:
        return self.catalog.load_table(f"shop.{name}")

    def refer(self, name: str) -> tuple[str | None, dict[str, str]]:
        given = {"catalog": "lake", "table": f"shop.{name}", **self._properties}
        return None, {f"lookup.provider.{key}": value for key, value in given.items()}

    def write(self, name: str, rows: pa.Table, mode: str) -> None:
        table = self.catalog.create_table(f"shop.{name}", rows.schema) if mode == "create" else self.loaded(name)
        (table.overwrite if mode == "overwrite" else table.append)(rows)

    def delete(self, name: str, predicate: str) -> None:
        self.loaded(name).delete(predicate)

    def drop(self, name: str) -> None:
        self.catalog.drop_table(f"shop.{name}")

    def files(self, name: str) -> list[Path]:
        return [Path(urllib.parse.urlparse(task.file.file_path).path) for task in self.loaded(name).scan().plan_files()]


@pytest.fixture(params=["delta", "iceberg"])
def lake(request: pytest.FixtureRequest) -> Lake:
    made: Lake = request.getfixturevalue(request.param)
    return made


@pytest.fixture
def delta(tmp_path: Path, cache_dir: Path) -> Iterator[DeltaLake]:
    with contextlib.closing(DeltaLake(tmp_path / "lake", cache_dir)) as lake:
        yield lake


@pytest.fixture
def iceberg(tmp_path: Path, cache_dir: Path) -> Iterator[IcebergLake]:
    with contextlib.closing(IcebergLake(tmp_path / "lake", cache_dir)) as lake:
        yield lake


def people(*rows: tuple[int, str, int]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(PEOPLE.column_names, row, strict=True)) for row in rows], PEOPLE.schema)


def names(table: LookupTable, key: Any) -> list[str]:
    """Sorted, for a table format promises no order."""
    return sorted(row["name"] for row in table.get(key))


def loads(table: LookupTable) -> int:
    return table.metrics()["loadCount"]


# --- rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [{}, PARTIAL], ids=["NONE", "PARTIAL"])
def test_rows_of_keys(lake: Lake, cache: dict[str, str]) -> None:
    """Every row of a key comes, for each time that it was asked for; absent keys and null have none."""
    lake.create("people", PEOPLE)
    found = lake.table("people", "id", cache).get_many(ids(1, 2, 9, 3, 1, None)).to_pylist()
    assert sorted((row["key_index"], row["id"], str(row["name"]), row["n"]) for row in found) == [
        (0, 1, "one", 10),
        (1, 2, "two", 20),
        (1, 2, "zwei", 21),
        (3, 3, "None", 30),
        (4, 1, "one", 10),
    ]


def test_a_whole_table(lake: Lake) -> None:
    """A copy answers keys and scans, and `lookup.columns` says what is in it."""
    lake.create("people", PEOPLE)
    table = lake.table("people", "id", {**FULL, "lookup.columns": "name"}, factory="whole")
    assert names(table, 2) == ["two", "zwei"]
    assert table.get(9) == []
    assert table.scan().sort_by("name").to_pydict() == {"name": ["one", "two", "zwei", None]}
    assert loads(table) == 1


MOMENTS = [datetime.datetime(2024, 2, 29, 1, 2, 3, n, datetime.timezone.utc) for n in (1, 2)]


def test_composite_keys(lake: Lake) -> None:
    """A key of two columns finds the rows that have both, not one of each; nested columns come along."""
    rows = pa.table({"a": [1, 1, 2, 2], "b": ["x", "y", "x", "y"], "v": [[1], [2], [3], [4]]})
    lake.create("pairs", rows)
    found = lake.table("pairs", "b,a").get_many(pa.table({"b": ["x", "y", "x"], "a": [1, 2, 7]})).to_pylist()
    assert [(row["key_index"], row["v"]) for row in found] == [(0, [1]), (1, [4])]


DAY = datetime.date(2024, 2, 29)
KEYS: list[tuple[pa.DataType, Any, Any]] = [
    (pa.int32(), -(2**31), 7),
    (pa.int64(), -(2**63), 2**63 - 1),
    (pa.date32(), DAY, datetime.date(1, 1, 1)),
    (pa.float64(), 1.5, 0.1),
    (pa.decimal128(10, 2), decimal.Decimal("1.50"), decimal.Decimal("-1.50")),
    (pa.timestamp("us", "UTC"), *MOMENTS),
    (pa.binary(), b"a\0'", b""),
]


@pytest.mark.parametrize(("kind", "found", "other"), KEYS, ids=str)
def test_keys_of_every_type(lake: Lake, kind: pa.DataType, found: Any, other: Any) -> None:
    """Integers up to their limits and dates find their rows, and no others; so do keys whose literals PyIceberg knows to be exact."""
    lake.create("typed", pa.table({"K": pa.array([found, other, None], kind), "v": [1, 2, 3]}))
    if isinstance(lake, DeltaLake) and kind not in (pa.int32(), pa.int64(), pa.date32()):
        says = rf"typed: key column 'K' is {re.escape(str(kind))}; keys are integers"
        with pytest.raises(OptionError, match=says):
            lake.table("typed", "k")
        return
    table = lake.table("typed", "k")
    assert [row["v"] for key in (found, other) for row in table.get(key)] == [1, 2]
    assert table.get(None) == []


def test_text_is_never_sql(lake: Lake) -> None:
    """Keys, and names of columns, that look like SQL are what they are."""
    texts = [*TEXTS, "x" * 5000]
    lake.create("texts", pa.table({'k "1" ?': texts, "Select": range(len(texts))}))
    asked = pa.table({'k "1" ?': [*texts, *(text + "'" for text in texts)]})
    found = lake.table("texts", '`k "1" ?`').get_many(asked).to_pylist()
    assert [(row["key_index"], row["Select"]) for row in found] == [(n, n) for n in range(len(texts))]


def test_more_keys_than_one_call_takes(lake: Lake) -> None:
    """2,500 keys are three calls; each has its row."""
    lake.create("many", pa.table({"id": range(0, 6000, 2), "n": range(3000)}))
    found = lake.table("many", "id").get_many(ids(*range(2500)))
    assert found["key_index"].to_pylist() == list(range(0, 2500, 2))
    assert found["n"].to_pylist() == list(range(1250))


@pytest.mark.parametrize("keys", [[1], [1, 2], list(range(-300, 5))], ids=len)
def test_files_that_cannot_hold_a_key_are_not_read(lake: Lake, keys: list[int]) -> None:
    """A lookup reads the files whose bounds let them hold one of its keys; the others may as well be gone."""
    lake.create("sorted", pa.table({"id": [1, 2], "n": [1, 2]}))
    before = lake.files("sorted")
    lake.append("sorted", pa.table({"id": [1000, 1001], "n": [3, 4]}))
    (other,) = set(lake.files("sorted")) - set(before)
    os.unlink(other)
    table = lake.table("sorted", "id", ONCE)
    assert table.get_many(ids(*keys))["n"].to_pylist() == [n for n in (1, 2) if n in keys]
    with pytest.raises(LookupFunctionError, match="id = 1000"):
        table.get(1000)


def test_only_columns_that_are_asked_for_are_read(lake: Lake) -> None:
    """`lookup.columns` reaches the scan, in any letter case."""
    lake.create("people", PEOPLE)
    assert lake.table("people", "id", {"lookup.columns": "NAME"}).get(1) == [{"id": 1, "name": "one"}]
    path, options = lake.refer("people")
    options = {key.removeprefix("lookup.provider."): value for key, value in options.items()}
    module = importlib.import_module(lake.module)
    context = LookupContext(("id",), ("name",), options, path)
    assert module.by_key(context).function.lookup(ids(1)).column_names == ["id", "name"]
    assert [batch.schema.names for batch in module.whole(context).scan()] == [["id", "name"]]


# --- versions ----------------------------------------------------------------------------------------


@each_factory
def test_a_commit_is_seen_by_the_next_lookup(lake: Lake, factory: str, cache: dict[str, str]) -> None:
    """Rows that come, change and go are seen at once; until then what is cached answers. A table in its place is another one."""
    lake.create("people", PEOPLE)
    table = lake.table("people", "id", cache, factory=factory)
    for number, (change, one, four) in enumerate(
        [
            (lambda: None, ["one"], []),
            (lambda: lake.append("people", people((4, "four", 40))), ["one"], ["four"]),
            (lambda: lake.delete("people", "id = 1"), [], ["four"]),
            (lambda: lake.overwrite("people", people((1, "new", 1))), ["new"], []),
        ],
        1,
    ):
        change()
        before = table.version
        for _ in range(2):
            assert (names(table, 1), names(table, 4)) == (one, four)
        assert loads(table) == (2 * number if factory == "by_key" else number)
        assert table.version == before


@each_factory
def test_a_table_in_the_place_of_another(lake: Lake, factory: str, cache: dict[str, str]) -> None:
    """A table that was dropped and made anew is another one, although its commits are counted from the same number."""
    lake.create("people", PEOPLE)
    table = lake.table("people", "id", cache, factory=factory)
    assert names(table, 1) == ["one"]
    lake.drop("people")
    lake.create("people", people((1, "another", 1)))
    assert names(table, 1) == ["another"]


def test_lookups_from_many_threads(lake: Lake) -> None:
    """Versions are asked on another thread than rows: both go on while the table grows."""
    lake.create("people", PEOPLE)
    table = lake.table("people", "id", PARTIAL)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for number in range(4, 8):
            lake.append("people", people((number, f"n{number}", number)))
            found = pool.map(lambda key: names(table, key), range(1, number + 1))
            assert list(found)[3:] == [[f"n{key}"] for key in range(4, number + 1)]


def test_delta_columns_that_come_later(delta: DeltaLake) -> None:
    """A table goes on with the columns that it was made with, and one that is made later has the new one."""
    delta.create("people", PEOPLE)
    table = delta.table("people", "id", PARTIAL)
    assert names(table, 1) == ["one"]
    more = people((1, "more", 1)).append_column("city", pa.array(["Oslo"]))
    write_deltalake(delta.directory / "people", more, mode="append", schema_mode="merge")
    assert names(table, 1) == ["more", "one"]
    later = delta.table("people", "id", PARTIAL, {"lookup.max-retries": "1"})
    assert sorted(row["city"] or "" for row in later.get(1)) == ["", "Oslo"]


def test_iceberg_columns_of_another_schema(iceberg: IcebergLake) -> None:
    """A column that is dropped and made anew has lost its values, without a new snapshot: that is another version.

    One that is renamed is an error by name for tables that were made with it; later ones have the new name.
    """
    iceberg.create("people", PEOPLE)
    table = iceberg.table("people", "id", PARTIAL, ONCE)
    assert names(table, 1) == ["one"]
    made = iceberg.loaded("people")
    snapshot = made.metadata.current_snapshot_id
    with made.update_schema() as change:
        change.rename_column("name", "label")
    with pytest.raises(LookupFunctionError, match="name"):
        table.get(1)
    assert iceberg.table("people", "id", {"lookup.columns": "label"}).get(1) == [{"id": 1, "label": "one"}]
    with made.update_schema(allow_incompatible_changes=True) as change:
        change.delete_column("label")
    with made.update_schema() as change:
        change.add_column("name", StringType())
    assert iceberg.loaded("people").metadata.current_snapshot_id == snapshot
    assert table.get(1) == [{"id": 1, "name": None, "n": 10}]


def commit(table: Path, version: int, *actions: Row) -> None:
    """Write a commit into the log of a Delta table."""
    (table / "_delta_log").mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(action) + "\n" for action in actions)
    (table / "_delta_log" / f"{version:020}.json").write_text(text)


def test_an_iceberg_table_without_a_snapshot(iceberg: IcebergLake) -> None:
    """A table that nobody has written is empty, and its first rows are seen."""
    iceberg.catalog.create_table("shop.empty", PEOPLE.schema)
    table = iceberg.table("empty", "id", PARTIAL)
    assert names(table, 1) == []
    iceberg.append("empty", PEOPLE)
    assert names(table, 1) == ["one"]


# --- Delta's own --------------------------------------------------------------------------------------


def z85(data: bytes) -> str:
    """Base 85 as Delta writes deletion vectors into its log."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    words = struct.unpack(f">{-(-len(data) // 4)}I", data + b"\0" * (-len(data) % 4))
    return "".join(digits[word // 85**place % 85] for word in words for place in (4, 3, 2, 1, 0))


def with_deletion_vector(table: Path, rows: list[int]) -> None:
    """Commit, as Spark does, that these rows of the table's one file are no more."""
    first = [json.loads(line) for line in (table / "_delta_log" / f"{0:020}.json").read_text().splitlines()]
    (add,) = (action["add"] for action in first if "add" in action)
    bits = struct.pack("<i", 1681511377) + BitMap64(rows).serialize()
    vector = {"storageType": "i", "pathOrInlineDv": z85(bits), "sizeInBytes": len(bits), "cardinality": len(rows)}
    remove = {key: add[key] for key in ("path", "partitionValues", "size")}
    remove |= {"deletionTimestamp": add["modificationTime"], "dataChange": True, "extendedFileMetadata": True}
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, **features}
    commit(table, 1, {"protocol": protocol}, {"remove": remove}, {"add": {**add, "deletionVector": vector}})


@each_factory
def test_delta_deletion_vectors(delta: DeltaLake, factory: str, cache: dict[str, str]) -> None:
    """A row that a deletion vector has removed is gone, for a lookup of its key as for a copy."""
    rows = range(1000)
    delta.create("vector", pa.table({"id": rows, "n": rows}))
    table = delta.table("vector", "id", cache, factory=factory)
    assert len(table.get_many(ids(2, 3, 4))) == 3
    with_deletion_vector(delta.directory / "vector", [3, *range(500, 1000)])
    assert table.get_many(ids(*rows))["n"].to_pylist() == [n for n in range(500) if n != 3]
    assert table.get(3) == []


def test_delta_column_mapping(delta: DeltaLake) -> None:
    """Columns have the names that the table gives them, whatever they are called in its files."""
    table = delta.directory / "mapped"
    table.mkdir()
    pq.write_table(pa.table({"col-1": [1, 2], "col-2": ["one", "two"]}), table / "rows.parquet")

    def field(number: int, name: str, kind: str) -> Row:
        mapped = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{number}"}
        return {"name": name, "type": kind, "nullable": True, "metadata": mapped}

    schema = {"type": "struct", "fields": [field(1, "id", "long"), field(2, "a name", "string")]}
    metadata = {
        "id": "mapped",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps(schema),
        "partitionColumns": [],
        "configuration": {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "2"},
    }
    size = (table / "rows.parquet").stat().st_size
    add = {"path": "rows.parquet", "partitionValues": {}, "size": size, "modificationTime": 1, "dataChange": True}
    commit(table, 0, {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}, {"metaData": metadata}, {"add": add})
    assert delta.table("mapped", "id").get(2) == [{"id": 2, "a name": "two"}]
    assert delta.table("mapped", "`a name`").get("one") == [{"id": 1, "a name": "one"}]


def test_a_partitioned_delta_table(delta: DeltaLake) -> None:
    """A partition column is a column: as a key it says which files are read."""
    path = delta.directory / "parts"
    rows = pa.table({"day": [DAY, DAY.replace(day=1)], "id": [1, 1], "n": [1, 2]})
    write_deltalake(path, rows, partition_by=["day"])
    found = delta.table("parts", "day,id").get_many(pa.table({"day": [DAY], "id": [1]}))
    assert found.to_pylist() == [{"day": DAY, "id": 1, "n": 1, "key_index": 0}]
    os.unlink(next((path / "day=2024-02-01").glob("*.parquet")))
    assert len(delta.table("parts", "day").get(DAY)) == 1


def test_a_delta_table_on_s3(s3: S3Server, cache_dir: Path) -> None:
    """Storage options say where the store is, the environment who asks it."""
    where = {"aws_endpoint_url": s3.endpoint, "aws_allow_http": "true"}
    s3.client.create_bucket(Bucket="delta")
    write_deltalake("s3://delta/people", PEOPLE, storage_options=where)
    options = {
        "lookup.provider": "examples.delta_provider:by_key",
        "lookup.keys": "id",
        "lookup.cache.dir": str(cache_dir),
        **{f"lookup.provider.{key}": value for key, value in where.items()},
        **PARTIAL,
    }
    with LookupTable("s3://delta/people", options) as table:
        assert names(table, 2) == ["two", "zwei"]
        write_deltalake("s3://delta/people", people((2, "deux", 22)), mode="append", storage_options=where)
        assert names(table, 2) == ["deux", "two", "zwei"]


# --- mistakes ----------------------------------------------------------------------------------------


def test_mistakes_are_named(lake: Lake) -> None:
    """A table that is not there, or not named, is an error when the table is made."""
    with pytest.raises(OptionError, match="nope"):
        lake.table("nope", "id")
    for option in ("aws_secret_access_key", "s3.secret-access-key", "token"):
        with pytest.raises(OptionError, match="looks like a credential"):
            lake.table("nope", "id", {f"lookup.provider.{option}": "hunter2"})
    with pytest.raises(OptionError, match=r"needs a path|needs lookup\.provider\.table"):
        LookupTable(None, {"lookup.provider": f"{lake.module}:by_key", "lookup.keys": "id"})
    lake.create("people", PEOPLE)
    with pytest.raises(SchemaError, match="no column 'zip'"):
        lake.table("people", "zip").get(1)
    with pytest.raises(OptionError, match="brings a cache of the kind 'FULL'"):
        lake.table("people", "id", PARTIAL, factory="whole")
    with pytest.raises(OptionError, match="has no scan function"):
        lake.table("people", "id", FULL)


def test_a_lookup_during_a_commit_may_be_ahead(delta: DeltaLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit between the question for the version and that for rows is seen early, and never is a row older than its version."""
    delta.create("people", PEOPLE)
    table = delta.table("people", "id", PARTIAL)
    ask = delta_provider.DeltaLookup.lookup

    def late(self: Any, keys: pa.Table) -> pa.Table:
        delta.overwrite("people", people((1, "new", 1)))
        return ask(self, keys)

    monkeypatch.setattr(delta_provider.DeltaLookup, "lookup", late)
    assert names(table, 1) == ["new"]
    monkeypatch.undo()
    assert names(table, 2) == []
