"""The files of a large Delta table as columns: what they cost, and that nothing else about the table changes."""

import dataclasses
import datetime
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_lookup import LookupTable
from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.errors import DamagedFileError
from pyspark_lookup.sources.delta import base_files, source
from pyspark_lookup.sources.delta.actions import Add, Statistics
from pyspark_lookup.sources.delta.base_files import BaseBuilder, parse_bounds, sum_keys
from pyspark_lookup.sources.delta.source import DeltaSource
from tests.support.delta_tables import append_commit, by_deltalake
from tests.support.fuzzing import MORE
from tests.support.lake_tables import counting, opened
from tests.support.large_tables import Lose

FILES = 40


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch, mapped_from: int) -> None:
    monkeypatch.setattr(DeltaSource, "mapped_from", 10)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Files of ten rows, in two regions, with a checkpoint after half of them."""
    path = tmp_path / "t"
    for number in range(FILES):
        ids = [*range(number * 10, number * 10 + 10)]
        rows = pa.table({"id": ids, "name": [f"n{id:03}" for id in ids], "region": [("eu", "ü/ %")[number % 2]] * 10})
        write_deltalake(str(path), rows, mode="append", partition_by=["region"])
        if number == FILES // 2:
            DeltaTable(str(path)).create_checkpoint()
    return path


def rows_of(reader: LookupTable) -> list[dict[str, Any]]:
    return sorted(reader.scan().select(["id", "name", "region"]).to_pylist(), key=lambda row: row["id"])


def expected(table: Path) -> list[dict[str, Any]]:
    return sorted(by_deltalake(table).select(["id", "name", "region"]).to_pylist(), key=lambda row: row["id"])


def snapshots(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("**/snapshots/*/*")}


def test_another_process_reads_no_log(table: Path, tmp_path: Path, restart: Callable[[], None]) -> None:
    """It lists what is new, maps the columns, and opens the file that its key may be in."""
    first = opened(table, tmp_path / "cache", keys="id")
    assert rows_of(first) == expected(table)
    assert first.get(15)[0]["name"] == "n015"
    restart()
    second = opened(table, tmp_path / "cache", keys="id")
    assert counting(second, lambda: second.version)[:3] == (2, 0, 0)  # the last commit, and none after it
    assert counting(second, lambda: second.get(15))[:3] == (2, 0, 0)  # the host has the bytes of the only file
    assert rows_of(second) == expected(table)


def test_a_commit_costs_what_it_adds(table: Path, tmp_path: Path, restart: Callable[[], None]) -> None:
    reader = opened(table, tmp_path / "cache", mode="partial", keys="id")
    assert [reader.get(key)[0]["id"] for key in (15, 200)] == [15, 200]
    write_deltalake(str(table), pa.table({"id": [15], "name": ["again"], "region": ["eu"]}), mode="append")
    for heads, gets in ((3, 1), (2, 0)):  # the first process finds and reads a commit
        # The key whose file did not change is still cached, the other one is looked for in one more file.
        assert counting(reader, lambda reader=reader: reader.get(200))[:3] == (heads, 0, gets)  # type: ignore[misc]
        assert sorted(row["name"] for row in reader.get(15)) == ["again", "n015"]
        restart()
        reader = opened(table, tmp_path / "cache", mode="partial", keys="id")


def test_rows_of_a_partition_are_carried_over(table: Path, tmp_path: Path, restart: Callable[[], None]) -> None:
    """Also if lookup.partition selects some of the files; another process knows which versions they are of."""
    reader = opened(table, tmp_path / "cache", mode="partial", keys="id", partition="region=eu")
    assert [reader.get(key)[0]["id"] for key in (5, 205)] == [5, 205]
    for number in range(2):
        write_deltalake(str(table), pa.table({"id": [5], "name": ["again"], "region": ["eu"]}), mode="append")
        before = reader.metrics()["hitCount"]
        assert reader.get(205)[0]["id"] == 205
        assert reader.metrics()["hitCount"] == before + 1
        assert len(reader.get(5)) == 2 + number
        restart()
        reader = opened(table, tmp_path / "cache", mode="partial", keys="id", partition="region=eu")


def test_bounds_are_parsed_once_per_host(
    table: Path, tmp_path: Path, restart: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    parse = base_files.parse_bounds
    monkeypatch.setattr(base_files, "parse_bounds", lambda *args: (parsed.append(args[1]), parse(*args))[1])
    for process in range(3):
        if process == 2:
            assert sorted(parsed) == ["id", "id", "name", "name"]  # of the files before the checkpoint, and after it
        reader = opened(table, tmp_path / "cache")
        assert reader.scan(predicate="id = 15").num_rows == 1
        assert reader.scan(predicate="name = 'n015' AND region = 'ü/ %'").num_rows == 1
        restart()
    assert len(parsed) == 4


def test_columns_that_are_lost(table: Path, tmp_path: Path, restart: Callable[[], None], lose: Lose) -> None:
    """Then the log is read again; without room on the disk the columns are in memory."""
    for _ in range(2):
        reader = opened(table, tmp_path / "cache", keys="id")
        assert reader.get(15)[0]["name"] == "n015"
        assert rows_of(reader) == expected(table)
        lose((tmp_path / "cache").glob("**/snapshots/*/base-*"))
        restart()


def test_columns_follow_the_log(table: Path, tmp_path: Path, restart: Callable[[], None]) -> None:
    """Files come and go, a version is pinned, and the columns are made anew: the older ones go in time."""
    reader = opened(table, tmp_path / "cache", keys="id")
    before = reader.scan().num_rows
    for step in range(5):
        DeltaTable(str(table)).delete(f"id % {FILES} = {step}")
        new = range(1000 + step * 100, 1020 + step * 100)
        rows = pa.table({"id": [*new], "name": ["new"] * 20, "region": ["eu"] * 20})
        write_deltalake(str(table), rows, mode="append")
        assert rows_of(reader) == expected(table)
        restart()
        reader = opened(table, tmp_path / "cache", keys="id")
        assert rows_of(reader) == expected(table)
    assert opened(table, tmp_path / "cache", version=FILES - 1).scan().num_rows == before
    assert len([name for name in snapshots(tmp_path / "cache") if name.startswith("base-")]) <= 3


def test_a_table_that_was_emptied(table: Path, tmp_path: Path, restart: Callable[[], None]) -> None:
    """It has no columns any more, for a host that knew its files, and for one that reads the log's checkpoint of them."""
    assert opened(table, tmp_path / "cache").version
    DeltaTable(str(table)).delete()
    for host in ("cache", "new", "new"):
        reader = opened(table, tmp_path / host, keys="id")
        assert (reader.scan(predicate="id = 15").num_rows, reader.get(15)) == (0, [])
        restart()
    rows = pa.table({"id": [15], "name": ["new"], "region": ["eu"]})
    write_deltalake(str(table), rows, mode="append")
    assert opened(table, tmp_path / "cache", keys="id").get(15) == rows.to_pylist()


def test_an_earlier_version_leaves_nothing_on_the_disk(
    table: Path, tmp_path: Path, restart: Callable[[], None]
) -> None:
    """Its columns stay in memory, because no record would name them."""
    assert opened(table, tmp_path / "cache").version
    before = snapshots(tmp_path / "cache")
    for _ in range(2):
        assert opened(table, tmp_path / "cache", version=FILES // 2 + 1).scan().num_rows == (FILES // 2 + 2) * 10
        restart()
    assert snapshots(tmp_path / "cache") == before


def test_statistics_in_many_parts_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of files that are gone are dropped, those of small parts are written again, and each file keeps its own."""
    monkeypatch.setattr(base_files, "_PARTS_AT_MOST", 4)
    builder = BaseBuilder(None, "t")
    rng, serial = random.Random(0), itertools.count()

    def some(count: int) -> list[Add]:
        numbers = [next(serial) for _ in range(count)]
        return [
            Add(f"{rng.random()}-{n}", (("p", str(n % 3)),), n + 1, n, f'{{"numRecords": {n}}}', None) for n in numbers
        ]

    files = {add.path: add for add in some(1000)}
    for add in files.values():
        builder.add_file(add)
    base = builder.finish()
    for step in range(12):
        gone = sorted(rng.sample(range(base.rows), base.rows // 3))
        for row in gone:
            del files[base.key(row)[0]]
        added = some(600 if step == 6 else 40)
        files |= {add.path: add for add in added}
        base = base.next_base(np.array(gone), added)
        assert len(base.parts) <= 4
        assert [base.add(row) for row in range(base.rows)] == [files[path] for path in sorted(files)]
        assert base.sums == sum_keys(add.key for add in files.values())


@pytest.mark.parametrize("selected", ["region=eu", "max_pt()"])
def test_partitions_are_selected(table: Path, tmp_path: Path, selected: str) -> None:
    region = "eu" if "eu" in selected else "ü/ %"
    wanted = [row for row in expected(table) if row["region"] == region]
    assert rows_of(opened(table, tmp_path / "cache", partition=selected)) == wanted


def test_a_file_with_two_vectors(table: Path, tmp_path: Path) -> None:
    """A log that lists a path twice contradicts itself, whether the first one is in the columns or not."""
    lines = map(json.loads, (table / "_delta_log" / f"{1:020}.json").read_text().splitlines())
    add = next(line["add"] for line in lines if "add" in line)
    vector = {"storageType": "i", "pathOrInlineDv": "abc", "sizeInBytes": 3, "cardinality": 1}
    assert opened(table, tmp_path / "cache").version
    append_commit(table, [{"add": add | {"deletionVector": vector}}])
    with pytest.raises(DamagedFileError, match="lists a data file twice"):
        assert opened(table, tmp_path / "cache").version


KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "long": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "byte": (pa.int8(), st.integers(-128, 127)),
    "double": (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    "float": (pa.float32(), st.floats(allow_nan=False, allow_infinity=False, width=32)),
    "text": (pa.string(), st.text(max_size=4)),
    "day": (pa.date32(), st.dates().map(str)),
    "at": (pa.timestamp("us", "UTC"), st.datetimes().map(lambda at: at.isoformat(timespec="milliseconds") + "Z")),
    "clock": (pa.timestamp("us"), st.datetimes().map(lambda at: at.isoformat())),
    "money": (pa.decimal128(9, 2), st.decimals(-1000, 1000, places=2).map(float)),
    "total": (pa.decimal128(18, 0), st.decimals(-(10**18) + 1, 10**18 - 1, places=0).map(float)),
    "exact": (pa.decimal128(9, 2), st.decimals(-(10**8), 10**8, places=3).map(float)),
    "flag": (pa.bool_(), st.booleans()),
}
ODD = [
    "", "{", "[]", "null", '{"numRecords": 1} {}', '{"numRecords": -1}', '{\n"numRecords": 3}', '{"numRecords": "3"}',
]  # fmt: skip


def texts_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[str | None]:
    """The statistics of a file as writers have them, or as none has them."""
    part = st.dictionaries(st.sampled_from(["c", "d"]), values | st.none(), max_size=2)
    nulls = st.dictionaries(st.sampled_from(["c", "d"]), st.integers(-1, 5), max_size=2)
    usual = st.fixed_dictionaries(
        {"numRecords": st.integers(0, 5), "minValues": part, "maxValues": part, "nullCount": nulls},
        optional={"tightBounds": st.booleans()},
    )
    return usual.map(json.dumps) | st.none() | usual.map(lambda stats: json.dumps(stats, ensure_ascii=False))


def _fitting(stats: ColumnStats | None, kind: pa.DataType) -> ColumnStats | None:
    """The statistics without the bounds that are beyond a decimal type, because columns cannot have them."""
    if stats is None or stats.low is None or not pa.types.is_decimal(kind):
        return stats

    def fits(bound: Any) -> bool:
        try:
            return pa.scalar(bound, kind).is_valid
        except pa.ArrowInvalid:
            return False

    low, high = (bound if fits(bound) else None for bound in (stats.low, stats.high))
    return None if low is None and stats.null_count is None else dataclasses.replace(stats, low=low, high=high)


@pytest.mark.parametrize("name", KINDS)
def test_bounds_are_parsed_together_as_alone(name: str) -> None:
    """Of many files at once, bounds are those of each file alone, whatever the texts are."""
    kind, values = KINDS[name]
    usual = texts_of(values)

    @settings(max_examples=60 * MORE, deadline=None, derandomize=True)
    @given(st.lists(usual, max_size=6) | st.lists(usual | st.sampled_from(ODD), max_size=6))
    def check(texts: list[str | None]) -> None:
        def parse(text: str | None) -> Any:
            return source._to_column_stats(Statistics.parse(text or None), "c", kind)

        columns = parse_bounds(pa.array(texts, pa.large_string()), "c", kind, parse)
        alone = [_fitting(parse(text), kind) for text in texts]
        assert [columns.row(place) for place in range(len(texts))] == alone

    check()


def test_a_bound_beyond_its_type_is_not_known() -> None:
    """delta-rs writes the largest decimal as a double that is above it; the other bound still counts."""
    text = '{"numRecords":3,"minValues":{"c":5},"maxValues":{"c":1e18},"nullCount":{"c":0}}'
    kind = pa.decimal128(18, 0)
    alone = source._to_column_stats(Statistics.parse(text), "c", kind)
    columns = parse_bounds(pa.array([text, None], pa.large_string()), "c", kind, lambda text: alone if text else None)
    assert alone is not None and alone.high > 10**18
    assert columns.row(0) == dataclasses.replace(alone, high=None)


PARSED = {
    "long": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "short": (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    "double": (pa.float64(), st.floats(allow_nan=True)),
    "float": (pa.float32(), st.floats(allow_nan=True, width=32)),
    "text": (pa.string(), st.text(st.characters(codec="utf-8", max_codepoint=0x300), max_size=5)),
    "day": (pa.date32(), st.dates()),
    "at": (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(datetime.timezone.utc))),
    "clock": (pa.timestamp("us"), st.datetimes()),
    "money": (pa.decimal128(9, 2), st.decimals(-(10**6), 10**6, places=2)),
    "total": (pa.decimal128(38, 4), st.decimals(-(10**30), 10**30, places=4)),
    "bytes": (pa.binary(), st.binary(max_size=3)),
    "flag": (pa.bool_(), st.booleans()),
    "nested": (pa.struct([("x", pa.int64())]), st.fixed_dictionaries({"x": st.integers(0, 9)})),
}


@pytest.mark.parametrize("name", PARSED)
def test_statistics_that_are_only_columns(name: str) -> None:
    """Their texts have the same bounds: as they are, or wider where those of a text are; a bound that no text has is not known."""
    kind, values = PARSED[name]
    column = pa.struct([('a "b"\n', kind)])
    counts = pa.struct([('a "b"\n', pa.int64())])
    parsed = pa.struct(
        [("numRecords", pa.int64()), ("minValues", column), ("maxValues", column), ("nullCount", counts)]
    )

    @settings(max_examples=40 * MORE, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(values | st.none(), values | st.none()) | st.none(), min_size=1, max_size=5))
    def check(bounds: list[tuple[Any, Any] | None]) -> None:
        rows = []
        for pair in bounds:
            parts = [{'a "b"\n': value} for value in (pair or ())]
            rows.append(
                None
                if pair is None
                else {"numRecords": 5, "minValues": parts[0], "maxValues": parts[1], "nullCount": {'a "b"\n': 2}}
            )
        texts = base_files.statistics_texts(
            pa.StructArray.from_arrays([pa.array(rows, parsed)], names=["stats_parsed"])
        )
        for pair, text in zip(bounds, texts.to_pylist(), strict=True):
            stats = source._to_column_stats(Statistics.parse(text), 'a "b"\n', kind)
            if pair is None:
                assert stats is None
                continue
            low, high = pair
            assert stats is not None
            assert (stats.rows, stats.null_count) == (5, 2)
            if name in ("long", "short", "text", "money") and None not in pair and low <= high:
                assert (stats.low, stats.high) == pair
            if stats.low is not None:
                assert stats.low <= low
                assert stats.high >= high

    check()


def test_usual_texts_are_parsed_by_arrow() -> None:
    """The texts of the writers that there are do not need the slow way."""
    texts = {
        "long": (pa.int64(), "-7", "2"),
        "double": (pa.float64(), "0.1", "1e9"),
        "text": (pa.string(), '"a"', '"ü"'),
        "money": (pa.decimal128(9, 2), "-0.25", "12.5"),
        "total": (pa.decimal128(18, 2), "-0.25", "1234567890123.45"),
        "day": (pa.date32(), '"2024-02-29"', '"2026-01-01"'),
        "at": (pa.timestamp("us", "UTC"), '"2024-02-29T00:00:00.000Z"', '"2026-01-01T23:59:59.999Z"'),
        "clock": (pa.timestamp("us"), '"2024-02-29T00:00:00.000"', '"2026-01-01T23:59:59.999999"'),
    }
    for name, (kind, low, high) in texts.items():
        text = f'{{"numRecords":5,"minValues":{{"c":{low}}},"maxValues":{{"c":{high}}},"nullCount":{{"c":1}}}}'
        assert base_files._parse_together(pa.array([text, None], pa.large_string()), "c", kind) is not None, name
