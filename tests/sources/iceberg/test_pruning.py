"""Files that partitions and manifests rule out are not opened, whatever the columns are called by now."""

import datetime
import decimal
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes import wait_until_settled
from tests.support.fuzzing import BY_NIGHT
from tests.support.iceberg_values import to_bytes
from tests.support.iceberg_writing import IcebergTable
from tests.support.lake_tables import MODES, counting, opened

UTC = datetime.timezone.utc
COLUMNS = {
    "id": "int", "long": "long", "name": "string", "day": "date", "at": "timestamp", "utc": "timestamptz", "price": "decimal(9, 2)",
    "real": "double", "raw": "binary", "code": "uuid",
}  # fmt: skip


def make_row(number: int) -> dict[str, Any]:
    """A row of a day, the first of which are before 1970."""
    at = datetime.datetime(1969, 12, 30, 22, 30) + datetime.timedelta(days=number)
    return {
        "id": number, "long": number * 2**33, "name": f"n{number:02}", "day": at.date(), "at": at, "utc": at.replace(tzinfo=UTC),
        "price": decimal.Decimal(number) / 4, "real": number / 2, "raw": bytes([number % 256]), "code": None,
    }  # fmt: skip


ROWS = [make_row(number) for number in range(20)]


def count_gets(
    table: Path, cache: Path, keys: tuple[str, Sequence[Any]] | None = None, **options: Any
) -> tuple[list[int], int]:
    """(the ids of the rows, how many GETs the data files cost: one or two each)."""
    wait_until_settled(table / "metadata/version-hint.text")  # until then each query reads it
    reader = opened(table, cache, "none", None if keys is None else keys[0], **options)
    assert reader.version
    ids: list[int] = []

    def read() -> None:
        rows = reader.scan() if keys is None else reader.get_many([*keys[1]])
        ids.extend(rows.column("id").to_pylist())

    _, _, gets, _ = counting(reader, read)
    return sorted(ids), gets


def expect(table: IcebergTable, home: Path, where: str, ids: Sequence[int], files: int) -> None:
    """`where` finds these rows in at most so many files; on the host that has just learned of them, and on one that has them on record."""
    for cache in (home / f"new{abs(hash(where))}", home / f"new{abs(hash(where))}"):
        actual, gets = count_gets(table.home, cache, where=where)
        assert actual == [*ids], where
        assert gets <= 2 * files, where


def literal(value: Any) -> str:
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    kind = {datetime.datetime: "TIMESTAMP ", datetime.date: "DATE ", str: ""}.get(type(value))
    return str(value) if kind is None else f"{kind}'{value}'"


SPECS: dict[str, list[tuple[str, str]]] = {
    "identity": [(name, "identity") for name in ("id", "name", "at", "utc", "price")],
    "bucket[16]": [(name, "bucket[16]") for name in ("id", "long", "name", "day", "at", "raw")],
    "truncate": [
        (name, f"truncate[{width}]") for name, width in (("id", 1), ("long", 2**33), ("name", 3), ("price", 25))
    ],
    "times": [("day", "day"), ("at", "hour"), ("utc", "day")],
}


@pytest.mark.parametrize(("column", "transform"), [field for spec in SPECS.values() for field in spec])
def test_transforms(tmp_path: Path, column: str, transform: str) -> None:
    """A value, several, and a range of a column are looked for in their partitions only, as predicates and as keys."""
    table = IcebergTable.create(tmp_path / "t", COLUMNS, spec=[(column, transform)])
    table.commit(table.data(ROWS, bounds=False))  # so that only the partitions tell
    values, hashed = [row[column] for row in ROWS], transform.startswith("bucket")
    # By day a time before 1970, and other values after it.
    for number in (0, 1, 2, 13) if BY_NIGHT else (1,) if (column, transform) in SPECS["times"] else (13,):
        # Partitions of times are as wide as those that were rounded the wrong way before 1970.
        files = (2 if hashed else 1) + (number < 2)
        expect(table, tmp_path, f"{column} = {literal(values[number])}", [number], files)
        keys, gets = count_gets(table.home, tmp_path / f"k{number}", (column, [values[number]]))
        assert (keys, gets <= 2 * files) == ([number], True)
    condition = f"{column} IN ({literal(values[4])}, {literal(values[9])})"
    expect(table, tmp_path, condition, [4, 9], 4 if hashed else 2)
    if not hashed:
        between = f"{column} >= {literal(values[7])} AND {column} < {literal(values[9])}"
        expect(table, tmp_path, between, [7, 8], 3 if transform == "truncate[3]" else 2 + (column in ("at", "utc")))
        expect(table, tmp_path, f"{column} IS NULL", [], 0)


def test_dates_before_1970_that_were_rounded_towards_it(tmp_path: Path) -> None:
    """Old writers put the last hours of 1969 into the partition of the first of 1970: they are found all the same."""
    table = IcebergTable.create(tmp_path / "t", COLUMNS, spec=[("at", "day")])
    (file,) = table.data([make_row(1)])
    assert [*file["partition"].values()] == [-1]
    file["partition"] = dict.fromkeys(file["partition"], 0)
    table.commit([{**file, "lower_bounds": {}, "upper_bounds": {}}])
    expect(table, tmp_path, f"at = {literal(ROWS[1]['at'])}", [1], 1)


@pytest.mark.parametrize("form", [1, 2])
def test_specs_that_evolved(tmp_path: Path, form: int) -> None:
    """Each file is ruled out by the spec that it was written with."""
    table = IcebergTable.create(tmp_path / "t", COLUMNS, form, [("name", "identity")])
    table.commit(table.data(ROWS[:10], bounds=False))
    table.set_spec([("id", "bucket[8]")])
    table.commit(table.data(ROWS[10:15], bounds=False))
    table.set_spec([])
    table.commit(table.data(ROWS[15:], bounds=False))
    buckets = len({repr(table.make_partition(row, 1)) for row in ROWS[10:15]})
    expect(table, tmp_path, "name = 'n03'", [3], 1 + buckets + 1)
    expect(table, tmp_path, "id = 12", [12], 10 + 1 + 1)
    expect(table, tmp_path, "id = 12 AND name = 'n12'", [12], 2)
    expect(table, tmp_path, "name IS NULL", [], buckets + 1)


def test_bounds(tmp_path: Path) -> None:
    """Bounds rule out those of four files that cannot have a value."""
    table = IcebergTable.create(tmp_path / "t", COLUMNS)
    for start in range(0, 20, 5):
        table.commit(table.data(ROWS[start : start + 5]))
    expect(table, tmp_path, "code IS NOT NULL", [], 0)
    for column in ("id", "long", "name", "day", "at", "utc", "price", "real", "raw"):
        value = literal(ROWS[7][column])
        expect(table, tmp_path, f"{column} = {value}", [7], 1)
        expect(table, tmp_path, f"{column} < {value} AND {column} IS NOT NULL", [*range(7)], 2)
        expect(table, tmp_path, f"{column} IS NULL", [], 0)
        actual, gets = count_gets(table.home, tmp_path / f"keys{column}", (column, [ROWS[7][column], ROWS[8][column]]))
        files = 4 if column == "real" else 1  # floats that are equal may have several forms
        assert (actual, gets <= 2 * files) == ([7, 8], True), column


def test_what_bounds_do_not_say(tmp_path: Path) -> None:
    """Cut texts, no upper bound, bounds the wrong way round, no counts, counts of another number of rows, NaN, empty text, damaged bytes."""
    table = IcebergTable.create(tmp_path / "t", COLUMNS)
    name, real = table.field("name")["id"], table.field("real")["id"]
    long = "y" * 15 + "\U0010ffff" * 3 + "z"
    number = 0
    files = []

    def add(rows: Sequence[dict[str, Any]], **changes: Any) -> None:
        nonlocal number
        (file,) = table.data([{**make_row(place), **row, "id": number + place} for place, row in enumerate(rows)])
        number += len(rows)
        files.append(file | changes)

    add([{"name": "x" * 40}, {"name": long}])
    add([{"name": "a"}, {"name": "zz"}], upper_bounds={})
    add([{"name": "a"}, {"name": "m"}], lower_bounds={name: b"m"}, upper_bounds={name: b"a"})
    add([{"name": None}, {"name": "m"}], null_value_counts={}, value_counts={})
    add([{"name": None}, {"name": "m"}], value_counts={name: 1}, null_value_counts={name: 1})
    add([{"real": float("nan")}, {"real": 1.0}], nan_value_counts={})
    add([{"real": float("nan")}, {"real": float("nan")}])
    add([{"name": "m"}], lower_bounds={name: b"\xff\xfe", real: b"\0"}, upper_bounds={name: b"\xff\xff", real: b"\0\0"})
    nan = {real: to_bytes("double", float("nan"))}
    add([{"name": "m"}, {"real": float("inf")}], lower_bounds=nan, upper_bounds=nan)
    table.commit(files)
    every = [row for entry in table.live() for _, row in table.live_rows(entry)]

    def check(where: str, holds: Any) -> None:
        expected = sorted(row["id"] for row in every if holds(row))
        for _ in range(2):
            assert count_gets(table.home, tmp_path / "cache", where=where)[0] == expected, where

    check("name = 'm'", lambda row: row["name"] == "m")
    check(f"name = '{long}'", lambda row: row["name"] == long)
    check("name >= 'z'", lambda row: row["name"] is not None and row["name"] >= "z")
    check("name IS NULL", lambda row: row["name"] is None)
    check("name IS NOT NULL", lambda row: row["name"] is not None)
    check("real > 1000", lambda row: row["real"] is not None and not row["real"] <= 1000)
    check("real = CAST('NaN' AS DOUBLE)", lambda row: row["real"] is not None and row["real"] != row["real"])
    for value in ("m", long, "x" * 40):
        ids = count_gets(table.home, tmp_path / "keys", ("name", [value]))[0]
        assert ids == sorted(row["id"] for row in every if row["name"] == value), value


def test_columns_that_swap_names(tmp_path: Path) -> None:
    """Bounds are of field ids, and narrower than the column by now; rows from before a column was added have its default."""
    table = IcebergTable.create(tmp_path / "t", {"id": "int", "a": "int", "b": "int", "f": "float"}, 3)
    for number in range(4):
        table.commit(table.data([{"id": number, "a": number, "b": 10 * number, "f": number / 2}]))
    assert opened(table.home, tmp_path / "cache", where="a = 3").scan().num_rows == 1
    id_, a, b, f = table.fields
    table.evolve([{**id_, "type": "long"}, {**a, "name": "b"}, {**b, "name": "a"}, {**f, "type": "double"}])
    for where in ("b = 3", "a = 30", "f = 1.5D", "id = 3"):
        expect(table, tmp_path, where, [3], 1)
    for where in ("a = 3", f"id = {2**40}"):
        expect(table, tmp_path, where, [], 0)
    table.add_column("late", "int", 7)
    expect(table, tmp_path, "late = 7", [0, 1, 2, 3], 4)
    assert count_gets(table.home, tmp_path / "late", ("late", [7]))[0] == [0, 1, 2, 3]


def test_another_process_prunes_by_the_record(tmp_path: Path) -> None:
    """Statistics, buckets and partitions come from the host's record: no PyIceberg, no file that they rule out, and one look at the hint."""
    table = IcebergTable.create(tmp_path / "t", COLUMNS, spec=[("name", "bucket[16]")])
    for start in range(0, 20, 5):
        table.commit(table.data(ROWS[start : start + 5]))
    options = {"lookup.cache.dir": str(tmp_path / "cache"), "lookup.keys": "name", **MODES["none"]}
    wait_until_settled(table.home / "metadata" / "version-hint.text")
    assert opened(table.home, tmp_path / "cache", "none", "name").version
    script = f"""
import json, sys
from pyspark_lookup import LookupTable
def gets(**more):
    table = LookupTable({str(table.home)!r}, {options!r} | {{f"lookup.{{name}}": value for name, value in more.items()}})
    before = table.metrics()
    rows = table.get_many(["n07"]) if not more else table.scan()
    after = table.metrics()
    return rows.num_rows, *(after[name] - before[name] for name in ("ufsGetCount", "ufsHeadCount", "ufsListCount"))
found = [gets(), gets(where="id = 13"), gets(where="at >= TIMESTAMP '1970-01-17 22:30:00'")]
print(json.dumps([*found, "pyiceberg" in sys.modules]))
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    *counts, imported = json.loads(process.stdout)
    assert [rows for rows, *_ in counts] == [1, 1, 2]
    assert [gets <= 2 * files for (_, gets, *_), files in zip(counts, (1, 1, 2), strict=True)] == [True] * 3, counts
    assert [heads + lists for *_, heads, lists in counts] == [1] * 3
    assert not imported
