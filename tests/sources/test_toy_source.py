"""A kind of table that the engine has never heard of: every way to read it works, with a source of one small module."""

from pathlib import Path

import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import VersionGoneError
from pyspark_lookup.lookup import runtime as composition
from tests.support.toy_source import commit, people

MODES = {
    "NONE": {},
    "FULL": {"lookup.cache": "FULL"},
    "FULL, CACHE": {
        "lookup.cache": "FULL",
        "lookup.metadata.source": "CACHE",
        "lookup.full-cache.periodic-reload.interval": "1 h",
    },
    "PARTIAL": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "100"},
}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two files in two regions, in version 0."""
    commit(tmp_path / "dim", {("a.parquet", "eu"): people(0, 500, 0), ("b.parquet", "us"): people(500, 500, 0)}, {})
    return tmp_path / "dim"


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own for each test, as far as the engine knows."""
    monkeypatch.setattr(composition, "_current", None)


def opened(table: Path, cache_dir: Path, mode: str, **options: str) -> LookupTable:
    return LookupTable(str(table), {"lookup.cache.dir": str(cache_dir), **MODES[mode], **options})


def rows_of(table: LookupTable, *ids: int) -> list[tuple[int, str, str]]:
    """(id, name, region) of those ids, or of all."""
    found = table.get_many(list(ids)).select(["id", "name", "region"]) if ids else table.scan()
    return sorted((row["id"], row["name"], row["region"]) for row in found.to_pylist())


def expected(*deleted: int, more: int = 0) -> list[tuple[int, str, str]]:
    """All rows but the deleted ones, with those of version 1."""
    rows = [(i, f"{i} of 0", "eu" if i < 500 else "us") for i in range(1000) if i not in deleted]
    return rows + [(i, f"{i} of 1", "eu") for i in range(1000, 1000 + more)]


@pytest.mark.parametrize("mode", MODES)
def test_reads_follow_its_versions(table: Path, cache_dir: Path, mode: str) -> None:
    """Rows, by scan and by key, are those of the current version without deleted ones; in CACHE mode after a reload."""
    with opened(table, cache_dir, mode) as dim:
        assert rows_of(dim) == expected()
        assert dim.keys == ("id",)
        rows_of(dim, 1, 3, 600, 601)
        loads = dim.metrics()["loadCount"]
        commit(table, {("c.parquet", "eu"): people(1000, 20, 1)}, {"a.parquet": [3, 4]})
        if "CACHE" in mode:
            assert rows_of(dim, 3) == [(3, "3 of 0", "eu")]
            dim.reload()
        found = rows_of(dim, 1, 3, 600, 601)
        assert found == [(1, "1 of 0", "eu"), (600, "600 of 0", "us"), (601, "601 of 0", "us")]
        if mode == "PARTIAL":  # keys within the bounds of a file whose deletes changed are loaded again, others are not
            assert dim.metrics()["loadCount"] - loads == 2
        assert rows_of(dim) == expected(3, 4, more=20)
        assert rows_of(dim, 3, 5, 1001) == [(5, "5 of 0", "eu"), (1001, "1001 of 1", "eu")]
        commit(table, {}, {"a.parquet": [5], "b.parquet": [0]})
        if "CACHE" in mode:
            dim.reload()
        assert rows_of(dim, 3, 5, 500, 501) == [(501, "501 of 0", "us")]
        assert dim.scan(predicate="region = 'us'").num_rows == 499
    with opened(table, cache_dir, mode, **{"lookup.partition": "region=us"}) as partition:
        assert rows_of(partition, 1, 500, 501) == [(501, "501 of 0", "us")]
    if mode == "NONE":
        assert rows_of(opened(table, cache_dir, mode, **{"lookup.version": "1"})) == expected(3, 4, more=20)
        with pytest.raises(VersionGoneError, match="no version 7"):
            opened(table, cache_dir, mode, **{"lookup.version": "7"}).scan()
