"""The log of changed keys: which rows of earlier steps are right, how far it reaches back, and what is lost with its files."""

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from pyspark_lookup.cache.partial.change_log import ChangeLog
from pyspark_lookup.cache.partial.host_cache import Freshness
from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.scan.table_scan import ChangedKeys
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk
from pyspark_lookup.storage.stores import FileVersion
from pyspark_lookup.versions.model import TableVersion
from tests.support.fakes import FakeClock
from tests.support.partial_cache import KEYS, ROWS, Process, unknown

WHERE = pytest.mark.parametrize("shared", [True, False], ids=["host", "process"])


class Table:
    """A table by its versions 1, 2, …, and the keys that each has changed. `since`: the versions since which it was asked for changes."""

    def __init__(self) -> None:
        self.changed: list[list[int]] = [[]]
        self.since: list[int] = []
        self.knows = True

    def version(self, number: int | None = None) -> TableVersion:
        return TableVersion("t", (FileVersion("provider:t", 1, str(number or len(self.changed))),))

    def find_changes(self, since: TableVersion, until: TableVersion, keys: pa.Schema) -> ChangedKeys | None:
        number = int(since.files[0].identity)
        self.since.append(number)
        changed = sorted({key for step in self.changed[number:] for key in step})
        return ChangedKeys(pa.table({"k": changed}, schema=keys), False) if self.knows else None


class Reader:
    """A process that looks up. `newest`: the version that the host has found last."""

    def __init__(self, root: Path | None, table: Table, **sizes: int) -> None:
        clock, self.metrics = FakeClock(), CacheMetricGroup()
        disk = None if root is None else Disk(root, 2**30, self.metrics, clock.host().wall_s, random.Random(7))
        context = HostContext(disk, self.metrics, clock.host(), random.Random())
        self.log, self.table = ChangeLog(context, "0" * 32, KEYS, **sizes), table
        self.newest: Callable[[], str | None] = lambda: None

    def read(self, number: int | None = None) -> Freshness:
        return self.log.fresh(self.table.version(number), ROWS, self.newest, self.table.find_changes)


def differing(fresh: Freshness, old: Freshness, keys: Sequence[int] = range(8)) -> list[int] | None:
    """The keys whose rows of an earlier lookup may not answer any more; None: no key's rows may."""
    answer = fresh.may_differ(old.version, [pa.array(keys, pa.int64())])
    later = fresh.later_keys(old.version)
    if answer is None:
        assert later is None
        return None
    changed = [key for key, differs in zip(keys, answer.tolist(), strict=True) if differs]
    assert later is not None
    assert set(changed) == set(later["k"].to_pylist())
    return changed


@WHERE
def test_rows_are_right_until_their_key_changes(cache_dir: Path, shared: bool) -> None:
    """The table is asked for changes once for each new version, by whichever process has it first, and not while the version stays."""
    table = Table()
    root = cache_dir if shared else None
    readers = [Reader(root, table) for _ in range(2 if shared else 1)]
    first = readers[0].read()
    assert differing(readers[0].read(), first) == []
    table.changed += [[1, 2], []]
    second = readers[-1].read()
    assert differing(second, first) == [1, 2]
    table.changed.append([2, 3])
    third = readers[0].read()
    assert (differing(third, second), differing(third, first)) == ([2, 3], [1, 2, 3])
    assert table.since == [1, 3]
    assert [reader.read().latest() for reader in readers] == [True] * len(readers)
    assert not first.latest()
    table.knows = False
    table.changed.append([4])
    fourth = readers[0].read()
    assert differing(fourth, third) is None
    assert differing(fourth, fourth) == []


@WHERE
@pytest.mark.parametrize("sizes", [{"steps_at_most": 3}, {"bytes_at_most": 3 * 8}], ids=str)
def test_how_far_it_reaches_back(cache_dir: Path, shared: bool, sizes: dict[str, int]) -> None:
    """The log forgets its earliest steps; shortly before, `fades` is true for the versions that need them. If one step has more keys than the
    log may hold, all keys count as changed."""
    table = Table()
    reader = Reader(cache_dir if shared else None, table, **sizes)
    read = [reader.read()]
    for key in range(6):
        table.changed.append([key])
        read.append(reader.read())
    latest = read[-1]
    assert [differing(latest, old) for old in read] == [None, None, None, [3, 4, 5], [4, 5], [5], []]
    assert [latest.fades(old.version) for old in read] == [False, False, False, True, True, False, False]
    if "bytes_at_most" in sizes:
        table.changed.append([*range(4)])
        assert differing(reader.read(), latest) is None
    if shared:
        assert len(list((cache_dir / "v1" / "records" / "changed").iterdir())) <= 3


def test_a_slow_process_harms_nobody(cache_dir: Path) -> None:
    """A slow process brings a version that the host has left behind. The table is only asked for changes that the log lacks."""
    table = Table()
    reader, slow = Reader(cache_dir, table), Reader(cache_dir, table)
    first = reader.read()
    table.changed += [[1], [2]]
    slow.newest = reader.newest = lambda: table.version(3).digest
    third = reader.read()
    assert slow.read(2).version == slow.read(1).version == third.version
    assert table.since == [1]
    table.changed.append([3])
    slow.newest = reader.newest = lambda: table.version(5).digest
    stale = slow.read(4)  # the host has found version 5, and nobody has asked for its changes
    table.changed.append([4])
    latest = reader.read()
    assert (differing(latest, first), differing(latest, third), differing(latest, stale)) == ([1, 2, 3, 4], [3, 4], [4])


def test_a_version_that_comes_back(cache_dir: Path) -> None:
    """The table was set back: all keys count as changed, and it is not asked for changes."""
    table = Table()
    reader = Reader(cache_dir, table)
    first = reader.read()
    table.changed.append([1])
    second = reader.read()
    reader.newest = lambda: table.version(1).digest
    third = reader.read(1)
    assert (differing(third, second), differing(third, first), table.since) == (None, None, [1])


def test_what_is_lost(cache_dir: Path) -> None:
    """Without the keys of a step, all have changed in it; without the directory, a new log begins. A full disk makes no wrong answer."""
    table = Table()
    reader = Reader(cache_dir, table)
    first = reader.read()
    table.changed.append([1])
    second = reader.read()
    for path in (cache_dir / "v1" / "records" / "changed").iterdir():
        path.write_bytes(b"damaged")
    later_reader = Reader(cache_dir, table)
    table.changed.append([2])
    third = later_reader.read()
    assert (differing(third, first), differing(third, second)) == (None, [2])
    shutil.rmtree(cache_dir / "v1" / "records")
    assert differing(reader.read(), third) is None
    table.changed.append([3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Disk, "succeed_record", _fail)
        unrecorded = reader.read()
        assert differing(unrecorded, third) is None
        assert unrecorded.version == reader.read().version
    assert reader.metrics.snapshot()["cacheFailureCount"] >= 2


def _fail(*args: object) -> bool:
    raise OSError("the disk is full")


def test_rows_that_fade_are_merged(process: Process) -> None:
    """A single file is merged if the log will forget its version. Its rows then count as the latest version's, except those that have changed."""
    process.put({1: [1], 2: [2]}, "v1")

    def may_differ(version: str, keys: Sequence[pa.Array]) -> Numbers:
        return keys[0].to_numpy() == 2

    fresh = Freshness("v2", ROWS, may_differ, fades=lambda version: version == "v1")
    process.shared.tidy(fresh)
    assert process.merge() == 1
    assert process.get(1, 2, version="v2", may_differ=unknown) == {1: [1], 2: None}
    process.shared.tidy(fresh)
    assert process.merge() == 0
