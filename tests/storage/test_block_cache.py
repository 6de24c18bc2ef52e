"""`BlockCache`: the bytes of exactly the version asked for, from this host if it can, from the store if not."""

import dataclasses
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pyspark_lookup.errors import SourceChangedError, UfsPermissionError, UfsUnavailableError
from tests.support.block_source import Range, Source
from tests.support.disks import holding, random_data
from tests.support.fakes import Host

MIB = 2**20


def counts(host: Host, *names: str) -> tuple[int, ...]:
    snapshot = host.metrics.snapshot()
    return tuple(snapshot[name] for name in names)


HITS_AND_MISSES = ("blockHitCount", "blockMissCount")


@pytest.fixture
def source(tmp_path: Path, cache_dir: Path) -> Source:
    (tmp_path / "t").mkdir()
    return Source(tmp_path / "t" / "file", cache_dir)


def test_the_three_cases(source: Source) -> None:
    """A path is unknown, known in another version, or known in this one: none asks the store."""
    blocks = {(0, 10), (50_000, 10)}
    old = source.version()
    assert source.locate(version=old).cached_blocks == set()
    source.read(*blocks, version=old)
    source.write(2)
    new = source.version()
    source.read((0, 10), version=new)
    assert [source.locate(version=version).cached_blocks for version in (new, old)] == [{(0, 10)}, blocks]
    assert source.gets() == [(0, 10)]
    for changed in (dataclasses.replace(new, size=1), dataclasses.replace(new, identity="x")):
        assert source.locate(version=changed).cached_blocks == frozenset()
    # Another path of this version, and this path in another store, are entries of their own.
    other_path = source.host.blocks.get_blocks_and_locations("file:///elsewhere/file", new)
    assert other_path.cached_blocks == frozenset()
    assert other_path.path_key != source.locate(version=new).path_key
    away = source.another()
    away.store.scope = "s3://elsewhere"
    assert source.locate(away, new).cached_blocks == frozenset()


THOUSAND = [(n * 100, 100) for n in range(1000)]


@pytest.mark.parametrize(
    ("before", "ranges", "gets", "hits", "misses"),
    [
        ([(0, 1000), (5000, 1), (99_999, 1)], [(0, 1000), (5000, 1), (99_999, 1)], [], 3, 0),
        # In any order and repeated; those inside or across others are blocks of their own.
        ([(1000, 10)], [(2000, 10), (1000, 10), (0, 10), (2000, 10), (1000, 10)], [(0, 2010)], 1, 2),
        ([(0, 1000)], [(0, 500), (0, 1000), (500, 600)], [(0, 1100)], 1, 2),
        ([], [], [], 0, 0),
        ([], THOUSAND, [(0, 25_600), (25_600, 25_600), (51_200, 25_600), (76_800, 23_200)], 0, 1000),
    ],
    ids=["all held", "some held", "overlapping", "none", "a thousand"],
)
def test_a_block_is_fetched_once(
    source: Source, before: list[Range], ranges: list[Range], gets: list[Range], hits: int, misses: int
) -> None:
    """Blocks that were read are answered from disk, to this process and the next; the missing blocks are fetched, in few requests."""
    source.read(*before)
    host = source.another()
    assert source.read(*ranges, host=host) == source.right(*ranges)
    assert source.gets(host) == gets
    assert counts(host, *HITS_AND_MISSES) == (hits, misses)
    for process in (host, source.another()):
        assert source.read(*ranges, host=process) == source.right(*ranges)
        assert source.gets(process) == []


def test_neighbours_share_a_request(tmp_path: Path, cache_dir: Path) -> None:
    """Blocks up to 64 KiB apart are one request, those further apart two, and no request exceeds 16 MiB."""
    source = Source(tmp_path / "file", cache_dir, size=40 * MIB)
    gap = 64 * 1024
    blocks = [(0, 100), (100 + gap, 100), (200 + 2 * gap + 1, 100)]
    location = source.locate()
    assert source.read(*blocks) == source.right(*blocks)
    assert source.gets() == [(0, 200 + gap), (200 + 2 * gap + 1, 100)]
    source.host.store.calls.clear()
    (cache_dir / "v1" / "blocks" / location.key(blocks[0]).name).unlink()  # after it was located
    assert [bytes(data) for data in source.host.blocks.read([(location, blocks[:1])])[0]] == source.right(blocks[0])
    assert source.gets() == [(0, 100)]
    long = [(n * 7 * MIB, 7 * MIB) for n in range(5)]
    assert source.read(*long) == source.right(*long)
    assert source.gets() == [(0, 14 * MIB), (14 * MIB, 14 * MIB), (28 * MIB, 7 * MIB)]
    assert counts(source.host, *HITS_AND_MISSES) == (0, 9)


def test_a_version_not_settled_is_read_and_not_kept(source: Source) -> None:
    """Bytes of a file that may still change under its identity, or has none, come from the store and stay there."""
    settled = source.version()
    source.read((0, 10), version=settled)
    racy = dataclasses.replace(settled, settled=False)
    nameless = dataclasses.replace(settled, identity="", settled=True)
    host = source.another()
    for _ in range(2):
        assert source.read((0, 10), (99_000, 10), host=host, version=racy) == source.right((0, 10), (99_000, 10))
        assert source.gets(host) == [(0, 10), (99_000, 10)]
        host.store.calls.clear()
    with pytest.raises(SourceChangedError):
        source.read((0, 10), host=host, version=nameless)
    assert counts(host, *HITS_AND_MISSES) == (0, 5)
    assert source.locate(version=settled).cached_blocks == {(0, 10)}
    assert source.locate(version=nameless).cached_blocks == frozenset()


@pytest.mark.parametrize(
    "error", [None, UfsUnavailableError("503"), UfsPermissionError("no"), SourceChangedError("f")], ids=str
)
def test_one_loader_at_a_time(source: Source, error: Exception | None) -> None:
    """While one process fetches blocks another waits for these only, then takes them from disk, or fetches them if the first failed."""
    source.write(1, MIB)
    first, second, third = source.another(), source.another(wait_s=60), source.another()
    version = source.version()
    a, b, c, d = source.apart(4, version)
    reached, go_on = threading.Event(), threading.Event()

    def pause(kind: str, subject: object) -> None:
        if not reached.is_set():
            reached.set()
            assert go_on.wait(60)
            if error is not None:
                raise error

    first.store.before = pause
    with ThreadPoolExecutor() as pool:
        loader = pool.submit(source.read, a, b, host=first, version=version)
        assert reached.wait(60)
        waiter = pool.submit(source.read, b, a, c, host=second, version=version)
        assert source.read(d, host=third, version=version) == source.right(d)
        go_on.set()
        assert loader.exception(60) is error
        assert waiter.result(60) == source.right(b, a, c)
    if error is None:
        assert loader.result() == source.right(a, b)
        assert (source.gets(first), source.gets(second)) == ([a, b], [c])
        assert counts(second, *HITS_AND_MISSES) == (2, 1)
    else:
        assert source.gets(second)[-1] == c
        assert len(source.gets(second)) > 1
    assert counts(third, "blockWaitCount") == (0,)


def test_files_that_are_opened(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """For many small files that are kept: some for each, and a few for all of them together; one for each that is cached."""
    host, opened = source.host, list[Any]()
    paths = [source.path.with_name(f"small{number}") for number in range(50)]
    for number, path in enumerate(paths):
        path.write_bytes(random_data(number, 100))
    versions = [host.ufs.get_meta(str(path)) for path in paths]
    open_file = os.open

    def noted(path: Any, *args: Any, **options: Any) -> int:
        opened.append(path)
        return open_file(path, *args, **options)

    monkeypatch.setattr(os, "open", noted)
    for at_most in (12 * len(paths) + 50, len(paths)):
        opened.clear()
        locations = [host.blocks.get_blocks_and_locations(version.url, version) for version in versions]
        answers = host.blocks.read([(location, [(0, 100)]) for location in locations])
        assert [bytes(data) for (data,) in answers] == [random_data(number, 100) for number in range(len(paths))]
        assert len(opened) <= at_most


def test_a_lock_held_for_long_holds_up_one_wait(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a stuck process holds the locks of many blocks, all are read from the store within one wait, and kept."""
    source.write(1, MIB)
    version = source.version()
    *blocks, free = source.apart(11, version)
    host, waits = source.another(wait_s=0.1), list[float]()
    location, acquire = source.locate(host, version), host.disk.acquire

    def noted(kind: str, name: str, wait_s: float) -> Any:
        waits.append(wait_s)
        return acquire(kind, name, wait_s)

    monkeypatch.setattr(host.disk, "acquire", noted)
    with holding(*(host.disk.lock_path("block", location.key(block).name) for block in blocks)):
        assert source.read(free, *blocks, host=host, version=version) == source.right(free, *blocks)
        assert waits == [0.1] + [0] * 9
        assert source.gets(host) == [*blocks, free]
        assert counts(host, "blockWaitCount", "blockMissCount") == (10, 11)
        host.store.calls.clear()
        assert source.read(*blocks, host=host, version=version) == source.right(*blocks)
        assert source.gets(host) == []
