"""Small files, merged: one process reads them for all of a host, no row is lost, doubled or changed, and damage is only a miss."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.columnar.predicate import Among, And, Compare
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.scan.open_file import Projection
from pyspark_lookup.scan.table_scan import Scan, to_slices
from pyspark_lookup.storage.stores import IMMUTABLE, FileVersion, StoredColumn
from pyspark_lookup.versions.model import Table
from tests.support.disks import flipped
from tests.support.fakes import Host, make_host
from tests.support.fuzzing import by_day

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
FROM = 4  # so many small files are merged


@dataclasses.dataclass
class Process:
    """A process of a host, which has imported and opened nothing yet."""

    host: Host
    scan: Scan

    @classmethod
    def start(cls, home: Path, cache: Path, **options: Any) -> "Process":
        host = make_host(str(home), cache, **options)
        return cls(host, Scan(host.blocks, host.metrics, 64 * 1024, merged_from=FROM))

    def find(self, files: Sequence[FileVersion], ids: Sequence[int], least: str = "") -> list[tuple[int, str]]:
        """The rows with these ids and names above `least`, in the order in which they come."""
        table = Table("file:///t", self.host.ufs.scope, "directory", FileFormatName.PARQUET)
        among = Among("id", pa.array(sorted({*ids}), pa.int64()))
        predicate = And((among, Compare("name", ">", least))) if least else among
        projection = Projection(SCHEMA, SCHEMA, pa.schema([]), predicate)
        batches = self.scan.prepare(table, to_slices(tuple(files)), projection).batches()
        return [(row["id"], row["name"]) for batch in batches for row in batch.to_pylist()]

    def gets(self) -> list[str]:
        """The names of the files that were read since the last call."""
        urls = [
            str(subject[0]) for kind, subject in self.host.store.calls if kind == "get" and isinstance(subject, tuple)
        ]
        self.host.store.calls.clear()
        return sorted(url.rsplit("/", 1)[-1] for url in urls)


class Files:
    """Files that are written once, and their rows."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()
        self.rows: dict[str, list[tuple[int, str]]] = {}

    def write(
        self, rows: list[tuple[int, str]], columns: tuple[str, str] = ("id", "name"), **more: pa.Array
    ) -> FileVersion:
        ids, names = zip(*rows, strict=True)
        path = self.home / f"{len(self.rows):04}.parquet"
        pq.write_table(pa.table({columns[0]: pa.array(ids, pa.int64()), columns[1]: names, **more}), path)
        file = FileVersion(
            path.as_uri(),
            path.stat().st_size,
            f"{IMMUTABLE}table",
            columns=tuple(StoredColumn(*pair, None) for pair in zip(SCHEMA.names, columns, strict=True)),
        )
        self.rows[file.url] = rows
        return file

    def expected(self, files: Sequence[FileVersion], ids: Sequence[int], least: str = "") -> list[tuple[int, str]]:
        return [row for file in files for row in self.rows[file.url] if row[0] in ids and row[1] > least]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "table")


def parts(cache: Path) -> list[Path]:
    return sorted(cache.rglob("derived-merged-*"))


def test_one_process_reads_small_files_for_all(files: Files, tmp_path: Path) -> None:
    """Each file is read once on a host. Later small files are read one by one until they are many, and are then merged, too."""
    cache = tmp_path / "cache"
    version = [files.write([(number, f"a{number}"), (100, f"b{number}")]) for number in range(6)]
    first = Process.start(files.home, cache)
    assert first.find(version, [3]) == [(3, "a3")]
    assert first.gets() == [f"{number:04}.parquet" for number in range(6)]
    assert first.find(version, [100, 2]) == files.expected(version, [100, 2])
    second = Process.start(files.home, cache)
    assert second.find(version, [100]) == files.expected(version, [100])
    assert second.find(version, [100, 2], "b3") == [(100, "b4"), (100, "b5")]
    assert second.find(version, [7]) == []
    assert (second.gets(), [*cache.rglob("blocks/*/*")]) == ([], [])
    version += [files.write([(number, f"a{number}")]) for number in range(6, 6 + FROM - 1)]
    assert second.find(version, [8]) == [(8, "a8")]
    assert (len(second.gets()), len(parts(cache))) == (FROM - 1, 1)
    version.append(files.write([(8, "again")]))
    assert second.find(version, [8, 0]) == [(0, "a0"), (8, "a8"), (8, "again")]
    third = Process.start(files.home, cache)
    assert third.find(version, [8, 0]) == [(0, "a0"), (8, "a8"), (8, "again")]
    assert third.gets() == []


@pytest.mark.parametrize("seed", by_day(range(4), 2))
def test_random_versions(files: Files, tmp_path: Path, seed: int) -> None:
    """Files come and go, some with other columns, or read under another name; every process finds what their rows say."""
    rng, cache = random.Random(seed), tmp_path / "cache"
    version: list[FileVersion] = []
    versions, processes = [version], [Process.start(files.home, cache) for _ in range(2)]
    for _ in range(25):
        kind = rng.random()
        if kind < 0.15 and len(version) > 10:  # a compaction
            removed = rng.sample(version, rng.randrange(1, len(version)))
            rows = [row for file in removed for row in files.rows[file.url]]
            version = [file for file in version if file not in removed] + [files.write(rows)]
        else:
            columns = ("id", "name") if kind < 0.8 else ("key", "name")
            more = {"more": pa.array([1.5])} if kind > 0.9 else {}
            count = 1 if more else rng.randrange(1, 30)
            rows = [(rng.randrange(40), f"v{rng.randrange(99)}") for _ in range(count)]
            version = [*version, files.write(rows, columns, **more)]
        versions.append(version)
        if rng.random() < 0.2:
            processes[rng.randrange(2)] = Process.start(files.home, cache)
        read = version if rng.random() < 0.8 else rng.choice(versions)  # an older version, too
        read = sorted(read, key=lambda file: file.url)
        ids, least = rng.sample(range(45), rng.choice([1, 3, 30])), rng.choice(["", "v5"])
        for process in processes:
            assert process.find(read, ids, least) == files.expected(read, ids, least)
    assert parts(cache)


def test_damage_is_a_miss(files: Files, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    version = [files.write([(number, f"a{number}")]) for number in range(FROM)]
    assert Process.start(files.home, cache).find(version, [1]) == [(1, "a1")]
    (part,) = parts(cache)
    part.write_bytes(flipped(part.read_bytes(), 8 * 700))
    process = Process.start(files.home, cache)
    assert process.find(version, [1, 2]) == [(1, "a1"), (2, "a2")]
    assert (len(process.gets()), process.host.metrics.snapshot()["snapshotDamagedCount"]) == (FROM, 1)
    assert Process.start(files.home, cache).find(version, [1]) == [(1, "a1")]


def test_without_room_each_file_is_read_by_itself(files: Files, tmp_path: Path) -> None:
    version = [files.write([(number, f"a{number}")]) for number in range(FROM)]
    process = Process.start(files.home, tmp_path / "cache", max_bytes=1)
    # First they are read in order to be merged, and then one by one. The next lookup reads those that have the keys, and merges nothing.
    for gets in (2 * FROM, 2):
        assert process.find(version, [1, 2]) == [(1, "a1"), (2, "a2")]
        assert len(process.gets()) == gets
    assert parts(tmp_path / "cache") == []
    assert process.host.metrics.snapshot()["cacheFailureCount"] > 0


def test_what_is_not_merged(files: Files, tmp_path: Path) -> None:
    """Files with many columns, or one that nobody can read, stay as they are; other small files beside them are merged."""
    times = {"at": pa.array([1], pa.time64("us"))}
    many = {f"c{number}": pa.array([number]) for number in range(70)}
    version = [files.write([(number, "plain")]) for number in range(FROM)]
    version += [files.write([(number, "time")], **times) for number in range(2)]
    version += [files.write([(number, "wide")], **many) for number in range(2)]
    for gets in (len(version) + 4, 0):
        process = Process.start(files.home, tmp_path / "cache")
        assert process.find(version, [1]) == [(1, "plain"), (1, "time"), (1, "wide")]
        assert len(process.gets()) == gets


def test_a_slow_process_delays_no_other(files: Files, tmp_path: Path) -> None:
    """A process that was suspended while it merges keeps its lock: another one waits for a while, and then merges the files itself."""
    version = [files.write([(number, f"a{number}")]) for number in range(FROM)]
    slow = Process.start(files.home, tmp_path / "cache")
    assert slow.scan._blocks.disk is not None
    process = Process.start(files.home, tmp_path / "cache", wait_s=0.0)
    process.find(version[:1], [1])
    first_scan = process.scan  # finds the lock of the table's merged files, which it has not needed yet
    process.find(version, [0])
    assert first_scan._small_files is not None
    lock = slow.scan._blocks.disk.acquire("derive", first_scan._small_files._key, 0)
    assert lock is not None
    version += [files.write([(number, f"b{number}")]) for number in range(FROM)]
    assert process.find(version, [1]) == [(1, "a1"), (1, "b1")]
    lock.release()
    assert Process.start(files.home, tmp_path / "cache").find(version, [1]) == [(1, "a1"), (1, "b1")]
