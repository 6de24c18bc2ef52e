"""The files of large Delta and Iceberg tables as columns: what they cost, and that nothing else about a table changes."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from pyspark_lookup.sources.delta import base_files
from pyspark_lookup.sources.delta.source import DeltaSource
from pyspark_lookup.sources.iceberg import columns
from pyspark_lookup.sources.iceberg.source import IcebergSource
from tests.support.fuzzing import by_day
from tests.support.lake_tables import counting, opened
from tests.support.large_lakes import FILES, LargeDelta, LargeIceberg, LargeTable, row, scan_rows, snapshot_files
from tests.support.large_tables import Lose, check_record


@dataclasses.dataclass(frozen=True)
class Kind:
    """How kinds differ: the HEADs of a look at the version, (HEADs, LISTs, GETs) of a commit and after it, where bounds are parsed, names of columns."""

    make: Callable[[Path], LargeTable]
    heads: int
    commit: Sequence[tuple[int, int, int]]
    parser: tuple[ModuleType, str, int]
    parsed: Sequence[str]
    prefix: str
    most: int


KINDS = {
    # The last commit, and none after it. Bounds are of the files before the checkpoint, and after it.
    "delta": Kind(LargeDelta, 2, [(3, 0, 1), (2, 0, 0)], (base_files, "parse_bounds", 1), ["id", "id", "name", "name"], "base-", 3),
    # The hint; of a commit its metadata, list, manifest and file.
    "iceberg": Kind(LargeIceberg, 1, [(3, 0, 4), (1, 0, 0)], (columns, "column_stats", 2), ["int", "string"], "entries-", 6),
}  # fmt: skip


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, mapped_from: int) -> Kind:
    for source in (DeltaSource, IcebergSource):
        monkeypatch.setattr(source, "mapped_from", 5)
    return KINDS[request.param]


@pytest.fixture
def table(kind: Kind, tmp_path: Path) -> LargeTable:
    return kind.make(tmp_path)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


Restart = Callable[[], None]


def test_another_process_reads_no_log(kind: Kind, table: LargeTable, cache: Path, restart: Restart) -> None:
    """Another process looks at what is new, maps the columns, and opens the file that its key may be in."""
    first = opened(table.path, cache, keys="id")
    assert scan_rows(first) == table.rows()
    assert first.get(15) == [row(15, "ü/ %")]
    restart()
    second = opened(table.path, cache, keys="id")
    assert counting(second, lambda: second.version)[:3] == (kind.heads, 0, 0)
    assert counting(second, lambda: second.get(15))[:3] == (kind.heads, 0, 0)  # the host has the bytes of the only file
    assert scan_rows(second) == table.rows()


@pytest.mark.parametrize("options", [{}, {"partition": "region=eu"}], ids=["all", "a partition"])
def test_a_commit_costs_what_it_adds(
    kind: Kind, table: LargeTable, cache: Path, restart: Restart, options: dict[str, str]
) -> None:
    """The key whose file did not change is still cached, also in another process; the other one is looked for in one more file."""
    reader = opened(table.path, cache, "partial", "id", **options)
    assert [reader.get(key)[0]["id"] for key in (5, 100)] == [5, 100]
    table.append(row(5, name="again"))
    for cost in kind.commit:
        before = reader.metrics()["hitCount"]
        assert counting(reader, lambda reader=reader: reader.get(100))[:3] == cost  # type: ignore[misc]
        assert reader.metrics()["hitCount"] == before + 1
        assert sorted(match["name"] for match in reader.get(5)) == ["again", "n005"]
        restart()
        reader = opened(table.path, cache, "partial", "id", **options)


def test_bounds_are_parsed_once_per_host(
    kind: Kind, table: LargeTable, cache: Path, restart: Restart, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    module, name, place = kind.parser
    parse = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: (parsed.append(args[place]), parse(*args))[1])
    for _ in range(3):
        reader = opened(table.path, cache)
        assert reader.scan(predicate="id = 15").num_rows == 1
        assert reader.scan(predicate="name = 'n015' AND region = 'ü/ %'").num_rows == 1
        restart()
    assert sorted(parsed) == kind.parsed


def test_a_reload_makes_objects_of_changed_files_only(
    table: LargeTable, cache: Path, restart: Restart, made_objects: list[str]
) -> None:
    """A full cache adds the rows of one more commit without making an object for every file, in the same process and in a new one."""
    reader = opened(table.path, cache, "full", "id")
    for number in range(6):
        names = [f"again {later}" for later in range(number)]
        assert sorted(match["name"] for match in reader.get(15)) == [*names, "n015"]
        assert len({*made_objects}) <= (FILES if number == 0 else 2)  # the first file says how columns are stored
        table.append(row(15, name=f"again {number}"))
        if number % 2:
            restart()
            reader = opened(table.path, cache, "full", "id")
        made_objects.clear()


def test_a_record_has_the_whole_version(table: LargeTable, cache: Path) -> None:
    """A version that is read from its record equals the version of the table, after each change."""
    reader = opened(table.path, cache, keys="id")
    engine = reader._engine()
    for step in range(3):
        check_record(engine.reader.resolver.discover(reader._options)[1])
        table.change(step)


COLUMN_FILES = [
    ("delta", ["snapshots/*/base-*"]), ("iceberg", ["snapshots/*/entries-*"]), ("iceberg", ["snapshots/*/statistics-*"]),
    ("iceberg", ["records/manifest/*"]), ("iceberg", [f"records/{record}/*" for record in ("manifest", "manifests", "definition")]),
]  # fmt: skip
"""What is lost together, of a kind of table."""
# By day some are removed and the others damaged.
CASES = by_day(
    ((*case, harm) for n, case in enumerate(COLUMN_FILES) for harm in ("removed", "damaged")[:: (-1) ** n]), 2
)


@pytest.mark.parametrize(
    ("kind", "patterns", "lose"), [*CASES, *((*case, "full") for case in COLUMN_FILES[:2])], indirect=["kind", "lose"]
)
def test_columns_that_are_lost(
    kind: Kind, table: LargeTable, cache: Path, restart: Restart, lose: Lose, patterns: Sequence[str]
) -> None:
    """Once the columns are lost, the log, or the manifests, are read again; without room on the disk the columns are in memory."""
    for _ in range(2):
        reader = opened(table.path, cache, keys="id")
        assert reader.get(12) == [row(12, "ü/ %")]
        table.append(row(15))
        assert scan_rows(reader) == table.rows()
        lose(path for pattern in patterns for path in cache.glob(f"**/{pattern}"))
        restart()


def test_columns_follow_the_table(kind: Kind, table: LargeTable, cache: Path, restart: Restart) -> None:
    """Files come and go, a version is pinned, and the columns are made anew: the older ones go in time."""
    reader = opened(table.path, cache, keys="id")
    version, before = table.version(), scan_rows(reader)
    for step in range(4):
        table.change(step)
        expected = table.rows()
        assert scan_rows(reader) == expected
        restart()
        reader = opened(table.path, cache, keys="id")
        assert scan_rows(reader) == expected
    assert scan_rows(opened(table.path, cache, version=version)) == before
    assert len(snapshot_files(cache, kind.prefix)) <= kind.most


def test_a_table_that_was_emptied(table: LargeTable, tmp_path: Path, restart: Restart) -> None:
    """An emptied table has no rows, for a host that knew its files, and for one that reads what is left of the log."""
    assert opened(table.path, tmp_path / "cache").version
    table.empty()
    for host in ("cache", "new", "new"):
        reader = opened(table.path, tmp_path / host, keys="id")
        assert (reader.scan(predicate="id = 15").num_rows, reader.get(15)) == (0, [])
        restart()
    table.append(row(15))
    assert opened(table.path, tmp_path / "cache", keys="id").get(15) == [row(15)]


@pytest.mark.parametrize("selected", ["region=eu", "max_pt()"])
def test_partitions_are_selected(table: LargeTable, cache: Path, selected: str) -> None:
    region = "eu" if "eu" in selected else "ü/ %"
    expected = [table_row for table_row in table.rows() if table_row["region"] == region]
    assert scan_rows(opened(table.path, cache, partition=selected)) == expected
