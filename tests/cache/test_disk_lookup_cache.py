"""The cache in a database of diskcache: what it keeps, for whom, and that whatever happens to its file is a miss."""

import contextlib
import logging
import os
import pickle
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pyspark_lookup.cache import diskcache_database
from pyspark_lookup.cache.disk_lookup_cache import DiskCacheLookupCache
from pyspark_lookup.cache.lookup_cache import EntryRules
from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.core.metrics import CacheMetricGroup
from tests.support.fakes import FakeClock
from tests.support.memory_cache import list_values, make_disk_cache, make_keys, make_rows

ALL = [[10], [20, 21], []]
BLANK: list[Any] = [None, None, None]


def filled(
    directory: Path, clock: FakeClock | None = None, **more: Any
) -> tuple[DiskCacheLookupCache, CacheMetricGroup]:
    """A cache that has keys 1, 2 and 3, the last without rows."""
    cache, metrics = make_disk_cache(directory, clock, **more), CacheMetricGroup()
    cache.open(metrics)
    cache.put_many(make_keys(1, 2, 3), make_rows(10, [20, 21], []))
    return cache, metrics


def read_all(cache: DiskCacheLookupCache) -> list[Any]:
    return list_values(cache.get_many(make_keys(1, 2, 3)))


@contextlib.contextmanager
def database(directory: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(directory / "cache.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = 0")
        yield connection


def test_entries_outlive_the_cache(tmp_path: Path) -> None:
    """Whoever opens it next has them, until somebody clears it; a key is replaced as a whole, and what is invalidated is gone."""
    cache, metrics = filled(tmp_path / "c")
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700
    cache.close()
    second = make_disk_cache(tmp_path / "c")
    assert read_all(second) == read_all(cache) == ALL
    assert (metrics.snapshot()["hitCount"], metrics.snapshot()["missCount"]) == (3, 0)
    assert second.size() == 4  # keys, and one entry with the columns
    assert second.bytes() > 0
    second.put_many(make_keys(2), make_rows([22]))
    second.invalidate_many(make_keys(3))
    assert read_all(cache) == [[10], [22], None]
    second.clear()
    assert read_all(cache) == BLANK
    assert metrics.snapshot()["cacheFailureCount"] == 0


def test_entries_of_other_versions(tmp_path: Path) -> None:
    """Entries of other versions are no answers, unless the rules say that a key has not changed; nor are invalidated ones, nor other columns."""
    clock = FakeClock()
    cache, _ = filled(tmp_path / "c", clock)
    columns = pa.schema([("v", pa.int64())])

    def unchanged(version: str, keys: Sequence[pa.Array]) -> Numbers:
        return np.zeros(len(keys[0]), np.bool_)

    cache.use(EntryRules("b", columns))
    assert read_all(cache) == BLANK
    cache.put_many(make_keys(2), make_rows([22]))
    cache.use(EntryRules("", columns))
    assert read_all(cache) == [[10], None, []]
    cache.use(
        EntryRules("c", columns, lambda version, keys: np.array(keys[0].to_numpy() == 1) if version == "b" else None)
    )
    assert read_all(cache) == [None, [22], None]
    cache.use(EntryRules("c", columns, unchanged))
    assert read_all(cache) == [[10], [22], []]
    limits = {1: clock.steady_s, 2: clock.steady_s - 1, 3: float("nan")}
    cache.use(EntryRules("", columns, unchanged, lambda keys: np.array([limits[k] for k in keys[0].to_pylist()])))
    assert read_all(cache) == [None, [22], []]
    cache.use(EntryRules("", pa.schema([("w", pa.int64())])))
    assert cache.get_many(make_keys(1, 2, 3)).present.tolist() == [False, False, True]


def test_expiry(tmp_path: Path) -> None:
    """Rows expire by the time since their load. After a restart of the machine, the wall clock measures this time; if that clock was set back, all
    rows have expired."""
    clock = FakeClock()
    cache = make_disk_cache(tmp_path / "c", clock, expire_after_write_s=10)
    cache.put_many(make_keys(1, 2, 3), make_rows(10, [20, 21], []), np.array([0.0, 5.0, 9.5]))
    clock.tick(0.25)
    assert read_all(cache) == ALL
    clock.tick(0.25)
    assert read_all(cache) == [[10], [20, 21], None]
    clock.steady_s = 3.0
    restarted = make_disk_cache(tmp_path / "c", clock, "boot-2", expire_after_write_s=10)
    assert read_all(restarted) == [[10], [20, 21], None]
    clock.tick(4.5)
    assert read_all(restarted) == [[10], None, None]
    clock.wall_s -= 100
    assert read_all(restarted) == BLANK


def test_a_bound_of_bytes(tmp_path: Path) -> None:
    """The entries that were stored first make room; an entry that is too large is not kept."""
    cache = make_disk_cache(tmp_path / "c", max_bytes=2**20)
    for start in range(0, 400, 20):
        numbers = range(start, start + 20)
        rows = pa.table({"t": [os.urandom(4000) for _ in numbers], "key_index": list(range(20))})
        cache.put_many(make_keys(*numbers), rows)
        assert cache.bytes() <= 2**20
    present = cache.peek_many(make_keys(*range(400))).present
    assert present[-100:].all()
    assert not present[:100].any()
    cache.put_many(make_keys(1000), pa.table({"t": [bytes(2**20)], "key_index": [0]}))
    assert not cache.peek_many(make_keys(1000)).present.any()
    with pytest.raises(ValueError, match="max_bytes = 1000: give 1048576 or more"):
        DiskCacheLookupCache(tmp_path, max_bytes=1000)


class Exploit:
    """Leaves a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


PLANTED = {
    "a pickle as a value": "UPDATE Cache SET mode = 4, value = :pickle",
    "a pickle in a file": "UPDATE Cache SET mode = 4, value = NULL, filename = :file",
    "the name of a file": "UPDATE Cache SET mode = 2, value = NULL, filename = :file",
    "a text": "UPDATE Cache SET mode = 3, filename = :file",
    "a pickle as a key": "UPDATE Cache SET raw = 0, key = :pickle || key",
    "a setting that is an attribute": "INSERT INTO Settings VALUES ('_disk', :pickle), ('find', 1), ('close', 2)",
    "a pragma": "INSERT INTO Settings VALUES ('sqlite_journal_mode; CREATE TABLE planted (x); --', 1)",
    "no count": "UPDATE Settings SET value = :pickle WHERE key = 'count'",
}


@pytest.mark.parametrize("statement", PLANTED.values(), ids=PLANTED)
def test_what_others_put_into_the_file(tmp_path: Path, statement: str) -> None:
    """Foreign values in the file run no code, and open and remove no file (CVE-2025-69872): they are misses, and the next put replaces them."""
    clock, mark, pickled = FakeClock(), tmp_path / "mark", tmp_path / "kept"
    exploit = pickle.dumps(Exploit(mark))
    pickled.write_bytes(exploit)
    filled(tmp_path / "c", clock)
    with database(tmp_path / "c") as connection:
        connection.execute(statement, {"pickle": exploit, "file": "../kept"})
    for _ in range(2):
        cache, _ = filled(tmp_path / "c", clock)
        assert read_all(cache) in (ALL, BLANK)
        clock.tick(100)
    with database(tmp_path / "c") as connection:
        assert not connection.execute("SELECT name FROM sqlite_master WHERE name = 'planted'").fetchall()
    assert not mark.exists()
    assert pickled.exists()
    assert pickle.loads(exploit) is None  # it would have
    assert mark.exists()


def test_a_damaged_entry_is_a_miss(tmp_path: Path) -> None:
    """An entry is a miss whichever byte has changed, and if it is in the place of another key."""
    cache, _ = filled(tmp_path / "c")
    with database(tmp_path / "c") as connection:
        ((name, value),) = connection.execute(
            "SELECT key, value FROM Cache ORDER BY length(value) DESC, key LIMIT 1"
        ).fetchall()
        entries = connection.execute("SELECT key, value FROM Cache").fetchall()
        statement = "UPDATE Cache SET value = ? WHERE key = ?"
        for place in range(0, len(value), 7):
            damaged = bytearray(value)
            damaged[place] ^= 1 << place % 8
            connection.execute(statement, (bytes(damaged), name))
            answer = read_all(cache)
            assert answer in (BLANK, [None, None, []], [None, [20, 21], []], [[10], None, []]), place
        for (key, _), (_, other_value) in zip(entries, entries[1:] + entries[:1], strict=True):
            connection.execute(statement, (other_value, key))
        assert read_all(cache) == BLANK


def lock(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    connection = sqlite3.connect(directory / "cache.db", isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    return connection.close


def overwrite(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    (directory / "cache.db").write_bytes(b"no database" * 1000)
    return lambda: None


def cut(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    os.truncate(directory / "cache.db", 5000)
    return lambda: None


def replace(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    directory.rename(directory.parent / "moved")
    directory.touch()
    return directory.unlink


def open_up(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    directory.rename(directory.parent / "moved")
    directory.mkdir()
    directory.chmod(0o755)
    return lambda: directory.chmod(0o700)


def fill_disk(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def full(*_: object) -> Any:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(diskcache_database.Database, "put", full)
    return monkeypatch.undo


@pytest.mark.parametrize("harm", [lock, overwrite, cut, replace, open_up, fill_disk])
def test_failures_of_the_database(
    harm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Failures of the database are misses, which are counted and logged once; the database is left alone for a while, and serves again when it can."""
    clock = FakeClock()
    cache, metrics = filled(tmp_path / "c", clock, wait_s=0.05)
    mend = harm(tmp_path / "c", monkeypatch)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            cache.put_many(make_keys(1, 2, 3), make_rows(10, [20, 21], []))
            assert read_all(cache) in (ALL, BLANK)
            assert cache.size() >= 0 <= cache.bytes()
            cache.invalidate_many(make_keys(1))
            clock.tick(11)
    failures = metrics.snapshot()["cacheFailureCount"]
    assert 1 <= failures <= 3
    (record,) = [record for record in caplog.records if "diskcache-failed" in record.getMessage()]
    assert str(tmp_path / "c") in record.getMessage()
    mend()
    cache.put_many(make_keys(1, 2, 3), make_rows(10, [20, 21], []))
    assert read_all(cache) == ALL
    assert metrics.snapshot()["cacheFailureCount"] == failures


def test_a_removed_directory_is_made_again(tmp_path: Path) -> None:
    """The next put makes a removed directory again."""
    clock = FakeClock()
    cache, _ = filled(tmp_path / "c", clock)
    (tmp_path / "c").rename(tmp_path / "moved")
    assert read_all(cache) == BLANK
    clock.tick(11)
    cache.put_many(make_keys(1, 2, 3), make_rows(10, [20, 21], []))
    assert read_all(cache) == ALL


def in_child(run: Callable[[], None]) -> int:
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(600)
            run()
            status = 0
        finally:
            os._exit(status)
    return child


def test_forks_while_threads_write(tmp_path: Path) -> None:
    """Children of a busy process read and write at once: nothing of their parent's is open in them, nor known to SQLite."""
    cache, metrics = filled(tmp_path / "c", wait_s=600)
    busy = True

    def write(first: int) -> None:
        while busy:
            cache.put_many(make_keys(*range(first, first + 20)), make_rows(*range(first, first + 20)))

    def check() -> None:
        number = os.getpid()
        cache.put_many(make_keys(number), make_rows([number]))
        assert list_values(cache.get_many(make_keys(1, 2, 3, number))) == [*ALL, [number]]
        assert cache._metrics.snapshot()["cacheFailureCount"] == 0

    writers = [threading.Thread(target=write, args=(first,)) for first in (1000, 2000)]
    for thread in writers:
        thread.start()
    try:
        children = [in_child(check) for _ in range(3)]
        statuses = [os.waitpid(child, 0)[1] for child in children]
    finally:
        busy = False
        for thread in writers:
            thread.join()
    assert statuses == [0] * 3
    assert list_values(cache.get_many(make_keys(*children))) == [[child] for child in children]
    assert metrics.snapshot()["cacheFailureCount"] == 0


def test_writers_that_are_killed(tmp_path: Path) -> None:
    """Killed writers leave whole entries, and a database that others go on with."""
    cache, metrics = filled(tmp_path / "c")
    for turn in range(3):
        reader, writer = os.pipe()

        def write(turn: int = turn, writer: int = writer) -> None:
            for number in range(10_000):
                cache.put_many(make_keys(*range(50)), make_rows(*([turn * 10_000 + number] * 50)))
                os.write(writer, b".")

        child = in_child(write)
        os.close(writer)
        os.read(reader, 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        values = list_values(cache.get_many(make_keys(*range(50))))
        assert len({value[0] for value in values if value is not None}) == 1
        assert all(value is not None for value in values)
        assert metrics.snapshot()["cacheFailureCount"] == 0
