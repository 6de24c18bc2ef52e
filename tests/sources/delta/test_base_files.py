"""The files of a large Delta table as columns, beside what `test_large_tables` says: their parts, and statistics that are parsed together."""

import dataclasses
import datetime
import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.errors import DamagedFileError
from pyspark_lookup.sources.delta import base_files, source
from pyspark_lookup.sources.delta.actions import Add, Statistics
from pyspark_lookup.sources.delta.base_files import BaseBuilder, parse_bounds, sum_keys
from pyspark_lookup.sources.delta.source import DeltaColumns, DeltaSource
from pyspark_lookup.sources.delta.state import DataFiles
from pyspark_lookup.versions.file_columns import ColumnFiles
from pyspark_lookup.versions.model import TableVersion, key_files
from tests.support.delta_tables import append_commit, give_vectors, log_of_files, make_add, write_vector
from tests.support.fuzzing import fuzzed
from tests.support.lake_tables import opened
from tests.support.large_lakes import FILES, LargeDelta, snapshot_files
from tests.support.large_tables import check_record


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped_from: int) -> Path:
    monkeypatch.setattr(DeltaSource, "mapped_from", 5)
    return LargeDelta(tmp_path).path


def test_an_earlier_version_leaves_nothing_on_the_disk(
    table: Path, tmp_path: Path, restart: Callable[[], None]
) -> None:
    """The columns of an earlier version stay in memory, because no record would name them."""
    assert opened(table, tmp_path / "cache").version
    before = snapshot_files(tmp_path / "cache")
    for _ in range(2):
        assert opened(table, tmp_path / "cache", version=FILES // 2 + 1).scan().num_rows == (FILES // 2 + 2) * 10
        restart()
    assert snapshot_files(tmp_path / "cache") == before


@pytest.mark.parametrize(
    ("names", "storages", "objects"),
    [("abcdef", "uiuiui", 0), ("abcdef", "uipiui", 6), (["a", 'b"', "c", "d", "e", "f"], "uiuiui", 6)],
    ids=["columns", "absolute", "quote"],
)
def test_a_record_has_the_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: Sequence[str], storages: str, objects: int
) -> None:
    """The record of a version has the deletion vector of each file, and no vector becomes an object to be written or compared, unless its path
    cannot be copied."""
    monkeypatch.setattr(DeltaSource, "mapped_from", 5)
    path = tmp_path / "t"
    path.mkdir()
    for name in names:
        pq.write_table(pa.table({"id": [1, 2, 3]}), path / f"{name} ü.parquet")
    field = {"name": "id", "type": "long", "nullable": True, "metadata": {}}
    log_of_files(path, {"type": "struct", "fields": [field]}, "deletionVectors")
    vectors = [write_vector(path, [number % 3], storage) for number, storage in enumerate(storages)]
    adds = [make_add(path / f"{name} ü.parquet") for name in names]
    give_vectors(path, adds, vectors)
    reader = opened(path, tmp_path / "cache")
    version = reader._engine().reader.resolver.discover(reader._options)[1]
    make_deletes = mock.create_autospec(DeltaColumns.deletes_of, side_effect=DeltaColumns.deletes_of)
    monkeypatch.setattr(DeltaColumns, "deletes_of", make_deletes)
    recorded = TableVersion.from_json(version.table_id, version.to_json(statistics=False))
    assert isinstance(version.files, ColumnFiles)
    assert isinstance(recorded.files, ColumnFiles)
    assert len(version.files.difference(recorded.files)) == 0
    assert pc.all(pc.is_in(version.files.delete_names, value_set=recorded.files.delete_names)).as_py()
    assert key_files(version) == key_files(recorded) == []
    assert make_deletes.call_count == objects
    check_record(version)
    assert sorted(reader.scan().column("id").to_pylist()) == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]


def test_a_table_without_vectors_keeps_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record is written, and its deletes are named, without a second copy of the URLs."""
    monkeypatch.setattr(DeltaSource, "mapped_from", 5)
    write_deltalake(str(tmp_path / "t"), pa.table({"id": [1, 2, 3, 4, 5, 6], "p": list("abcdef")}), partition_by=["p"])
    reader = opened(tmp_path / "t", tmp_path / "cache")
    version = reader._engine().reader.resolver.discover(reader._options)[1]
    assert isinstance(version.files, ColumnFiles)
    columns = version.files.columns
    assert isinstance(columns, DeltaColumns)
    check_record(version)
    assert len(version.files.delete_names) == 0
    assert columns._paths is columns.urls


def test_statistics_in_many_parts_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of files that are gone are dropped, those of small parts are written again, and each file keeps its own."""
    monkeypatch.setattr(base_files, "_PARTS_AT_MOST", 4)
    monkeypatch.setattr(base_files, "_GROUP_ROWS", 16)
    builder = BaseBuilder(None, "t")
    rng, serial = random.Random(0), itertools.count()

    def make_files(count: int) -> list[Add]:
        numbers = [next(serial) for _ in range(count)]
        return [
            Add(f"{rng.random()}-{n}", (("p", str(n % 3)),), n + 1, n, f'{{"numRecords": {n}}}', None) for n in numbers
        ]

    files = {add.path: add for add in make_files(100)}
    for add in files.values():
        builder.add_file(add)
    base = builder.finish()
    for step in range(12):
        removed_rows = sorted(rng.sample(range(base.rows), base.rows // 3))
        for row in removed_rows:
            del files[base.key(row)[0]]
        added = make_files(60 if step == 6 else 8)
        files |= {add.path: add for add in added}
        sums = DataFiles({add.key: add for add in added}, base, frozenset(removed_rows)).sums
        base = base.next_base(np.array(removed_rows), added)
        assert len(base.parts) <= 4
        assert [base.add(row) for row in range(base.rows)] == [files[path] for path in sorted(files)]
        rows = base.statistics("c", pa.int64(), lambda text: None).rows.tolist()
        assert rows == [files[path].modified_ms for path in sorted(files)]
        assert base.sums == sums == sum_keys(add.key for add in files.values())


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
UNUSUAL_TEXTS = [
    "", "{", "[]", "null", '{"numRecords": 1} {}', '{"numRecords": -1}', '{\n"numRecords": 3}', '{"numRecords": "3"}',
]  # fmt: skip


def generate_texts(values: st.SearchStrategy[Any]) -> st.SearchStrategy[str | None]:
    """The statistics of a file as writers have them, or as none has them."""
    part = st.dictionaries(st.sampled_from(["c", "d"]), values | st.none(), max_size=2)
    nulls = st.dictionaries(st.sampled_from(["c", "d"]), st.integers(-1, 5), max_size=2)
    usual = st.fixed_dictionaries(
        {"numRecords": st.integers(0, 5), "minValues": part, "maxValues": part, "nullCount": nulls},
        optional={"tightBounds": st.booleans()},
    )
    return usual.map(json.dumps) | st.none() | usual.map(lambda stats: json.dumps(stats, ensure_ascii=False))


def drop_unfitting_bounds(stats: ColumnStats | None, kind: pa.DataType) -> ColumnStats | None:
    """The statistics without the bounds that are beyond a decimal type, because columns cannot have them."""
    if stats is None or stats.low is None or not pa.types.is_decimal(kind):
        return stats

    def fits(value: Any) -> bool:
        try:
            return pa.scalar(value, kind).is_valid
        except pa.ArrowInvalid:
            return False

    low, high = (value if fits(value) else None for value in (stats.low, stats.high))
    return None if low is None and stats.null_count is None else dataclasses.replace(stats, low=low, high=high)


@pytest.mark.parametrize("name", KINDS)
def test_bounds_are_parsed_together_as_alone(name: str) -> None:
    """Of many files at once, bounds are those of each file alone, whatever the texts are."""
    kind, values = KINDS[name]
    usual = generate_texts(values)

    @fuzzed(60)
    @given(st.lists(usual, max_size=6) | st.lists(usual | st.sampled_from(UNUSUAL_TEXTS), max_size=6))
    def check(texts: list[str | None]) -> None:
        def parse(text: str | None) -> Any:
            return source._to_column_stats(Statistics.parse(text or None), "c", kind)

        columns = parse_bounds(pa.array(texts, pa.large_string()), "c", kind, parse)
        alone = [drop_unfitting_bounds(parse(text), kind) for text in texts]
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


QUOTED = 'a "b"\n'


@pytest.mark.parametrize("name", PARSED)
def test_statistics_that_are_only_columns(name: str) -> None:
    """Statistics that are only columns become texts of the same bounds, or wider ones where a text's are; a bound that no text has is not known."""
    kind, values = PARSED[name]
    column, counts = pa.struct([(QUOTED, kind)]), pa.struct([(QUOTED, pa.int64())])
    parsed = pa.struct({"numRecords": pa.int64(), "minValues": column, "maxValues": column, "nullCount": counts})

    @fuzzed(40)
    @given(st.lists(st.tuples(values | st.none(), values | st.none()) | st.none(), min_size=1, max_size=5))
    def check(bounds: list[tuple[Any, Any] | None]) -> None:
        rows = []
        for pair in bounds:
            low, high = ({QUOTED: value} for value in pair or (None, None))
            stats = {"numRecords": 5, "minValues": low, "maxValues": high, "nullCount": {QUOTED: 2}}
            rows.append(None if pair is None else stats)
        texts = base_files.statistics_texts(pa.StructArray.from_arrays([pa.array(rows, parsed)], ["stats_parsed"]))
        for pair, text in zip(bounds, texts.to_pylist(), strict=True):
            stats = source._to_column_stats(Statistics.parse(text), QUOTED, kind)
            if pair is None:
                assert stats is None
                continue
            low, high = pair
            assert stats is not None
            assert (stats.rows, stats.null_count) == (5, 2)
            if name in ("long", "short", "text", "money") and None not in pair and low <= high:
                assert (stats.low, stats.high) == pair
            if stats.low is not None:
                assert stats.low <= low and stats.high >= high

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
