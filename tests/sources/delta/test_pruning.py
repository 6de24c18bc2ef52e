"""Files that the log rules out are not opened; files that VACUUM has removed are missed by name."""

import datetime
import decimal
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pyspark_lookup.errors import VersionGoneError
from tests.support.fuzzing import share
from tests.support.lake_tables import counting, opened
from tests.support.large_tables import both_ways

DAYS = [datetime.date(2026, 3, day) for day in range(1, 5)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Four days, a file of ten rows each, one of them with a null; beside the days a column of regions with odd names."""
    path = tmp_path / "t"
    for number, day in enumerate(DAYS):
        ids = [*range(number * 10, number * 10 + 10)]
        names = [None, *(f"n{id:03}" for id in ids[1:])]
        rows = pa.table({"id": ids, "name": names, "day": [day] * 10, "region": ["a b/%=ü"] * 10})
        write_deltalake(str(path), rows, mode="append", partition_by=["day", "region"])
    return path


def rewrite_adds(table: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what the log says of each file."""
    for commit in (table / "_delta_log").glob("*.json"):
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        for add in (action["add"] for action in actions if "add" in action):
            change(add)
        commit.write_text("".join(json.dumps(action) + "\n" for action in actions))


def set_bounds(table: Path, column: str, low: Any, high: Any) -> None:
    """Have the log say that a column lies between these in each file."""

    def change(add: dict[str, Any]) -> None:
        add["stats"] = json.dumps(json.loads(add["stats"]) | {"minValues": {column: low}, "maxValues": {column: high}})

    rewrite_adds(table, change)


def count_gets(table: Path, cache: Path, **options: Any) -> tuple[int, int]:
    """(rows, how many GETs they cost) on a new host, but for those of the log."""
    reader = opened(table, cache, **options)
    assert reader.version
    row_counts: list[int] = []
    _, _, gets, _ = counting(reader, lambda: row_counts.append(reader.scan().num_rows))
    return row_counts[0], gets


@pytest.mark.parametrize(
    ("options", "rows", "files"),
    [
        ({"partition": "max_pt()"}, 10, 1),
        ({"partition": "day=2026-03-02,region=a b%2F%25%3Dü"}, 10, 1),
        ({"where": "day >= DATE '2026-03-03' AND region = 'a b/%=ü'"}, 20, 2),
        ({"where": "id > 18 AND id < 21"}, 2, 2),
        ({"where": "name = 'n031'"}, 1, 1),
        ({"where": "name IS NULL"}, 4, 4),
        ({"where": "id IS NULL"}, 0, 0),
    ],
)
def test_the_log_rules_files_out(table: Path, tmp_path: Path, options: dict[str, str], rows: int, files: int) -> None:
    actual, gets = count_gets(table, tmp_path / "cache", **options)
    assert actual == rows
    assert (gets > 0, gets <= 2 * files) == (files > 0, True)  # a footer and what it names, for each


@pytest.mark.parametrize("says", ["nothing", "truncated", "wide"])
def test_what_statistics_do_not_say(table: Path, tmp_path: Path, says: str) -> None:
    """Missing, cut and wide bounds rule out nothing that is there."""

    def change(add: dict[str, Any]) -> None:
        stats = json.loads(add["stats"])
        if says == "truncated":  # as Delta does: what is above ends with a character above all that was cut
            stats["minValues"]["name"] = stats["minValues"]["name"][:2]
            stats["maxValues"]["name"] = stats["maxValues"]["name"][:2] + "\ufffd"
        elif says == "wide":
            stats |= {"tightBounds": False, "nullCount": {"id": 0, "name": 3}}
            stats["minValues"]["id"] -= 100
        add["stats"] = None if says == "nothing" else json.dumps(stats)

    rewrite_adds(table, change)
    reader = opened(table, tmp_path / "cache", keys="name")
    counts = {"name = 'n031'": 1, "name IS NULL": 4, "name IS NOT NULL": 36, "id = 15": 1, "id < 0": 0}
    assert {where: reader.scan(predicate=where).num_rows for where in counts} == counts
    assert reader.get("n031")[0]["id"] == 31


@both_ways
def test_instants_between_milliseconds(tmp_path: Path) -> None:
    """The log rounds bounds of instants down to milliseconds, the highest as well."""
    table = tmp_path / "t"
    at = datetime.datetime(2026, 3, 1, 12, 0, 0, 123456, datetime.timezone.utc)
    write_deltalake(str(table), pa.table({"at": [at]}))
    set_bounds(table, "at", *["2026-03-01T12:00:00.123Z"] * 2)
    for where in ("at = TIMESTAMP '2026-03-01 12:00:00.123456Z'", "at > TIMESTAMP '2026-03-01 12:00:00.1234Z'"):
        assert opened(table, tmp_path / "cache", where=where).scan().num_rows == 1


@pytest.mark.parametrize("offset", ["+00:19:32", "-00:00:01", "-11:30:00"])
def test_instants_with_an_offset_that_was_cut(tmp_path: Path, offset: str) -> None:
    """Writers give bounds in the session's zone, whose old offsets have seconds that they leave out."""
    table, local = tmp_path / "t", datetime.datetime(1930, 1, 5, 12)
    at = datetime.datetime.fromisoformat(f"{local}{offset}").astimezone(datetime.timezone.utc)
    write_deltalake(str(table), pa.table({"at": [at], "id": [1]}))
    set_bounds(table, "at", *[f"{local.isoformat()}.000{offset[:6]}"] * 2)
    reader = opened(table, tmp_path / "cache", "partial", "at", where=f"at = TIMESTAMP '{at:%Y-%m-%d %H:%M:%S}Z'")
    assert reader.scan().num_rows == len(reader.get(at)) == 1


def test_a_partition_value_that_is_an_empty_text(table: Path, tmp_path: Path) -> None:
    """An empty partition value is null, by the protocol."""
    commit = table / "_delta_log" / f"{1:020}.json"
    commit.write_text(commit.read_text().replace('"region":"a b/%=ü"', '"region":""'))
    assert opened(table, tmp_path / "cache", where="region IS NULL").scan().num_rows == 10
    assert opened(table, tmp_path / "cache", where="region = ''").scan().num_rows == 0


CACHED = {"metadata.source": "CACHE", "metadata.sync-interval": "-1"}


@pytest.mark.parametrize("mode", ["none", "partial"])
@pytest.mark.parametrize("on_version_gone", ["FAIL", "NEWER"])
def test_vacuum_under_a_query(table: Path, tmp_path: Path, mode: str, on_version_gone: str) -> None:
    """A version that has lost files is an error that names it, unless the newer one may be read instead."""
    reader = opened(table, tmp_path / "cache", mode, "id", **CACHED, **{"on-version-gone": on_version_gone})
    assert reader.version
    delta = DeltaTable(str(table))
    delta.optimize.compact()
    delta.delete("id = 15")
    delta.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    if on_version_gone == "NEWER":
        assert (reader.get(15), len(reader.get(14))) == ([], 1)
    else:
        with pytest.raises(VersionGoneError, match=r"version 3\b"):
            reader.get(15)


def test_statistics_that_are_rounded(tmp_path: Path) -> None:
    """A decimal in delta-rs's statistics is a double; a float in Delta's has its shortest text, which is that of another double."""
    numbers = [decimal.Decimal(text) for text in ("12345678901234567890.123456789", "-12345678901234567.1", "0.1", "7")]
    for number in numbers:
        rows = pa.table({"d": pa.array([number], pa.decimal128(38, 9)), "f": pa.array([-0.1], pa.float32())})
        write_deltalake(str(tmp_path / "t"), rows, mode="append")
    for commit in (tmp_path / "t" / "_delta_log").glob("*.json"):
        commit.write_text(commit.read_text().replace("-0.10000000149011612", "-0.1"))
    table = opened(tmp_path / "t", tmp_path / "cache", keys="d")
    assert [table.get(number)[0]["d"] for number in numbers] == numbers
    for number in numbers:
        assert count_gets(tmp_path / "t", tmp_path / "cache", where=f"d = {number}")[0] == 1
    for where in ("f < -0.1", "f = -0.10000000149011612D", "f = CAST(-0.1 AS FLOAT)"):
        assert count_gets(tmp_path / "t", tmp_path / "cache", where=where)[0] == len(numbers), where


@pytest.mark.parametrize("high", ["a" * 32 + "\ufffd", "a" * 31 + "?\ufffd", "a" * 31 + "\ud83d\ufffd"])
def test_texts_that_were_cut(tmp_path: Path, high: str) -> None:
    """The part that was cut off may be above U+FFFD, or begin with half a pair of UTF-16; half a pair rules out nothing."""
    path, name = tmp_path / "t", high[:32].rstrip("?\ud83d") + "\U0001f600" * 9
    write_deltalake(str(path), pa.table({"name": [name]}))
    set_bounds(path, "name", "a", high)
    for _ in range(2):
        assert opened(path, tmp_path / "cache", "partial", "name").get(name) == [{"name": name}]
    assert count_gets(path, tmp_path / "cache", where=f"name = '{name}'")[0] == 1


NO_BOUNDS = ['"5"', "true", '{"a": 1}', "-3", "NaN", "1e300000000", "-1e300000000", f"1e{10**20}", "9" * 4000]
PLACES = ["minValues.", "maxValues.", "nullCount.", "minValues", "numRecords", "tightBounds", ""]


@pytest.mark.parametrize("place", PLACES)
def test_statistics_that_are_none(tmp_path: Path, place: str) -> None:
    """Statistics of the wrong JSON type, and numbers that no column holds, bound nothing and cost nothing: no query loses a row."""
    money = [decimal.Decimal("2.50"), decimal.Decimal("3.50")]
    columns: dict[str, tuple[Any, str]] = {
        "k": ([2, 3], "k = 3"),
        "small": (pa.array(money, pa.decimal128(10, 2)), "small = 3.50"),
        "large": (pa.array(money, pa.decimal128(38, 2)), "large = 3.50"),
        "double": ([2.5, 3.5], "double >= 3"),
        "text": (["b", "c"], "text = 'c'"),
        "flag": ([True, False], "flag = false"),
        "day": (DAYS[:2], f"day = DATE '{DAYS[1]}'"),
    }
    write_deltalake(str(tmp_path / "t"), pa.table({name: values for name, (values, _) in columns.items()}))
    (commit,) = (tmp_path / "t" / "_delta_log").glob("*.json")
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    (add,) = (action["add"] for action in actions if "add" in action)
    true, (outer, dot, _) = json.loads(add["stats"]), place.partition(".")
    for form in share(NO_BOUNDS, PLACES.index(place) % 3, 3):
        mark = dict.fromkeys(columns, "HERE") if dot else "HERE"
        add["stats"] = json.dumps({**true, outer: mark}).replace('"HERE"', form) if outer else "HERE"
        text = "\n".join(map(json.dumps, actions))
        commit.write_text(text if outer else text.replace('"HERE"', form))
        reader = opened(tmp_path / "t", tmp_path / "cache", keys="k")
        for _, where in columns.values():
            assert reader.scan(predicate=where).column("k").to_pylist() == [3], (form, where)
        every = " AND ".join(f"{column} IS NOT NULL" for column in columns)
        assert reader.scan(predicate=every).num_rows == reader.scan().num_rows == 2, form
        assert len(reader.get(3)) == 1, form
