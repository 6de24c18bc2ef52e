"""Columns that grow from snapshot to snapshot: they have what the manifests list, wherever the statistics are."""

import random
from pathlib import Path
from typing import Any

import pytest

from pyspark_lookup.sources.iceberg import entry_columns
from pyspark_lookup.sources.iceberg.entries import DATA, EQUALITY_DELETES, POSITION_DELETES, Entry
from pyspark_lookup.sources.iceberg.entry_columns import EntryBuilder, EntryColumns, open_entries
from tests.support.disks import Opened
from tests.support.fuzzing import seeds

SIDES = ("lower", "upper", "nulls", "values")
SPECS: list[tuple[int, tuple[int, ...]]] = [(0, ()), (1, (1000,)), (2, (1000, 1001))]
FIELD_IDS = range(1, 5)


def make_entry(rng: random.Random, location: str, content: int) -> Entry:
    """An entry with statistics of some columns."""
    spec_id, ids = rng.choice(SPECS)
    partition = tuple(rng.choice([None, 1, "x"]) for _ in ids)
    bounds = ({id_: rng.randbytes(4) for id_ in FIELD_IDS if rng.random() < 0.7} for _ in range(2))
    counts = ({id_: rng.randrange(99) for id_ in FIELD_IDS if rng.random() < 0.7} for _ in range(2))
    numbers = (rng.randrange(1, 9) for _ in range(3))
    equality_ids = (1,) if content == EQUALITY_DELETES else ()
    statistics = *bounds, *counts
    return Entry(location, content, "parquet", spec_id, ids, partition, *numbers, *statistics, equality_ids, None, None, None)  # fmt: skip


def make_manifest(rng: random.Random, location: str, files: int) -> list[Entry]:
    """The entries of a manifest with up to so many files, of data or of deletes."""
    contents = rng.choice([[DATA], [DATA], [POSITION_DELETES, EQUALITY_DELETES]])
    count = rng.randint(0, files)
    return [make_entry(rng, f"{rng.random()}-{location}-{n}", rng.choice(contents)) for n in range(count)]


def to_values(entry: Entry) -> tuple[Any, ...]:
    """All that is known of a file."""
    names = (name for name in Entry.__slots__ if name not in SIDES)
    return (*(getattr(entry, name) for name in names), *(dict(getattr(entry, side)) for side in SIDES))


def check_same(columns: EntryColumns, manifests: dict[str, list[Entry]], rng: random.Random) -> None:
    """Check that the columns have what these manifests list, and that they know which files some of the manifests list."""
    sample = rng.sample([*manifests], len(manifests) // 2)
    listed = [(location, entry) for location, entries in manifests.items() for entry in entries]
    data = sorted(((location, e) for location, e in listed if e.content == DATA), key=lambda pair: pair[1].location)
    assert columns.urls.to_pylist() == [entry.location for _, entry in data]
    for row in rng.sample(range(columns.rows), min(columns.rows, 8)):
        assert to_values(columns.entry(row)) == to_values(data[row][1])
    for id_ in FIELD_IDS:
        rows = [tuple(row.values()) for row in columns.statistics(id_).to_pylist()]
        assert rows == [tuple(getattr(entry, side).get(id_) for side in SIDES) for _, entry in data]
    assert columns.live_rows(sample).tolist() == [row for row, (location, _) in enumerate(data) if location in sample]
    deletes = [to_values(entry) for location, entry in listed if entry.content != DATA and location in sample]
    assert sorted(map(repr, map(to_values, columns.live_deletes(sample)))) == sorted(map(repr, deletes))


@pytest.mark.parametrize("seed", seeds(2))
def test_columns_that_take_over_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Manifests come and go. The statistics of many files stay in their part, and small parts are written together."""
    rng = random.Random(seed)
    parts_at_most = rng.choice([2, 4, 6])
    monkeypatch.setattr(entry_columns, "_PARTS_AT_MOST", parts_at_most)
    monkeypatch.setattr(entry_columns, "_CHUNK_ROWS", rng.choice([1, 5, 1000]))
    monkeypatch.setattr(entry_columns, "_GROUP_ROWS", rng.choice([1, 3, 1000]))
    monkeypatch.setattr(entry_columns, "_BUFFERED_ENTRIES", rng.choice([1, 4, 1000]))
    disk = Opened(tmp_path).disk if seed % 2 else None
    manifests: dict[str, list[Entry]] = {}
    columns, counts = None, set()
    for step in range(10):
        removed = rng.sample([*manifests], len(manifests) // 4)
        remaining = {location: entries for location, entries in manifests.items() if location not in removed}
        added = {f"{step}-{n}": make_manifest(rng, f"{step}-{n}", 6) for n in range(rng.randint(1, 4))}
        manifests = remaining | added
        builder = EntryBuilder(disk, "table", lambda location: location, lambda entry: None)
        if columns is not None:
            builder.take_over(columns, rng.sample([*manifests], len(manifests)))
        for location, entries in added.items():
            builder.add(location, entries)
        columns = builder.finish(())
        check_same(columns, manifests, rng)
        counts.add(len(columns.parts))
        if disk is not None and rng.random() < 0.5:
            columns = open_entries(disk, "table", columns.to_json())
            assert columns is not None
    assert 1 < max(counts) <= parts_at_most
