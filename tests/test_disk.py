"""`Disk`: what it hands out is what was put in, whatever happened to the directory in between."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import resource
import shutil
import stat
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyspark_lookup.base.errors import CacheDirectoryError
from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.io.disk import BlockKey, Disk, key_of, memory_backed
from tests.fakes import FakeClock

HEADER_BYTES = 36  # magic 8, length 8, CRC-32 4, name 16
MIB = 2**20


def handles_below(root: Path) -> list[str]:
    """The files below a directory, those removed from it included, that this process has open; one for each descriptor.

    What other tests left to the garbage collector may be closed at any moment, so all descriptors are never counted.
    """
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own, and what another thread closed since
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(name for name in found if name.startswith(f"{root}/"))


class Opened:
    """A `Disk` with its counters and a clock that tells the real time until it is moved."""

    def __init__(self, root: Path, max_bytes: int = 2**30, clock: FakeClock | None = None) -> None:
        self.root = root / "v1"
        self.clock = clock or FakeClock(time.time())
        self.metrics = CacheMetricGroup()
        self.disk = Disk(root, max_bytes, self.metrics, lambda: self.clock.wall_s, random.Random(7))

    def count(self, name: str) -> int:
        return self.metrics.snapshot()[name]

    def path(self, key: BlockKey) -> Path:
        return self.root / "blocks" / key.name

    def usage(self) -> int:
        """What the shared counter says."""
        return int((self.root / "usage").read_text())


@pytest.fixture
def opened(cache_dir: Path) -> Opened:
    return Opened(cache_dir)


def key(number: int, length: int = 1000, version: str = "v") -> BlockKey:
    """The block `number` of its own file."""
    return BlockKey(key_of("file", number), key_of(version), 0, length)


def data_of(number: int, length: int = 1000) -> bytes:
    return random.Random(number).randbytes(length)


@contextlib.contextmanager
def holding(*paths: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the locks behind these files, until the end of the block."""
    script = (
        "import fcntl, sys\n"
        "files = [open(path, 'a') for path in sys.argv[1:]]\n"
        "[fcntl.flock(file, fcntl.LOCK_EX) for file in files]\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", script, *map(str, paths)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        try:
            yield child
        finally:
            child.kill()


# --- blocks ------------------------------------------------------------------------------------------


def test_a_block_is_what_was_put(opened: Opened) -> None:
    """Blocks come back byte for byte, in this and in another opener of the directory; others are absent."""
    blocks = {key(n, n): data_of(n, n) for n in (0, 1, 1000, 70_000)}
    opened.disk.put_blocks(blocks)
    for disk in (opened.disk, Opened(opened.root.parent).disk):
        assert {k: bytes(disk.get_block(k) or b"") for k in blocks} == blocks
        assert disk.get_block(key(5)) is None
        assert disk.get_block(key(1, 1, "other version")) is None
    assert opened.disk.used_bytes() == opened.usage() == sum(map(len, blocks.values())) + 4 * HEADER_BYTES


def test_what_is_held_is_listed(opened: Opened) -> None:
    """The versions and blocks held of a path are those on disk; foreign names among them are not."""
    path_key = key_of("file", 1)
    held = [(0, 10), (10, 5)]
    opened.disk.put_blocks({BlockKey(path_key, "a", *block): data_of(1, block[1]) for block in held})
    opened.disk.put_blocks({BlockKey(path_key, "b", 0, 1): b"x"})
    for name in ("x", "1", "1-2-3", "²-³", "-", "1-"):
        (opened.root / "blocks" / path_key[:2] / path_key / "a" / name).touch()
    assert opened.disk.versions_held(path_key) == {"a", "b"}
    assert opened.disk.blocks_held(path_key, "a") == set(held)
    assert opened.disk.blocks_held(path_key, "c") == frozenset()
    assert opened.disk.versions_held(key_of("file", 2)) == frozenset()


def test_a_block_is_replaced_without_counting_twice(opened: Opened) -> None:
    """Putting a block again, as two loaders may, leaves one file and one share of the budget."""
    for _ in range(3):
        opened.disk.put_blocks({key(1): data_of(1)})
    assert opened.usage() == opened.disk.used_bytes() == 1000 + HEADER_BYTES


def test_nobody_else_may_look(opened: Opened) -> None:
    """The directory is closed to other users, under the laxest umask too, whatever lies in it."""
    before = os.umask(0)
    try:
        loose = Opened(opened.root.parent.parent / "a" / "b")
        loose.disk.put_blocks({key(1): data_of(1)})
        loose.disk.create_record("version", "k", 1)
    finally:
        os.umask(before)
    root = loose.root.parent
    for directory in (root, loose.root, *(loose.root / name for name in ("blocks", "records", "locks", "tmp"))):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in the header": lambda path: os.truncate(path, HEADER_BYTES - 1),
    "empty": lambda path: os.truncate(path, 0),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "zeroed payload": lambda path: path.write_bytes(path.read_bytes()[:HEADER_BYTES] + bytes(1000)),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "bit flipped": lambda path: path.write_bytes(flipped(path.read_bytes(), 500 * 8)),
    "noise": lambda path: path.write_bytes(data_of(9, path.stat().st_size)),
}


def flipped(blob: bytes, bit: int) -> bytes:
    changed = bytearray(blob)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_any_flipped_bit_is_noticed(opened: Opened) -> None:
    """There is no bit of a block's file whose change goes unnoticed."""
    one = BlockKey(key_of("f"), key_of("v"), 0, 4)
    opened.disk.put_blocks({one: b"data"})
    blob = opened.path(one).read_bytes()
    for bit in range(len(blob) * 8):
        opened.path(one).write_bytes(flipped(blob, bit))
        assert opened.disk.get_block(one) is None, bit
    assert opened.count("blockDamagedCount") == len(blob) * 8


@pytest.mark.parametrize(
    "other", [key(2), key(1, 1000, "w"), BlockKey(key(1).path_key, key(1).version_key, 1000, 1000)]
)
def test_a_block_in_anothers_place_is_a_miss(opened: Opened, other: BlockKey) -> None:
    """A whole block under another's name (file, version or range) is not that other, though both are sound."""
    opened.disk.put_blocks({key(1): data_of(1), other: data_of(2)})
    os.replace(opened.path(other), opened.path(key(1)))
    assert opened.disk.get_block(key(1)) is None
    assert opened.count("blockDamagedCount") == 1


def test_a_block_of_another_length_than_its_name_is_a_miss(opened: Opened) -> None:
    """Bytes put under a range that is longer or shorter than they are never come back as that range."""
    for number, length in ((1, 999), (2, 1001), (3, 0)):
        opened.disk.put_blocks({key(number): data_of(number, length)})
        assert opened.disk.get_block(key(number)) is None
    assert opened.count("blockDamagedCount") == 3


def test_a_deleted_block_is_a_miss(opened: Opened) -> None:
    """A block that is gone is absent, and no damage."""
    opened.disk.put_blocks({key(1): data_of(1)})
    opened.path(key(1)).unlink()
    assert opened.disk.get_block(key(1)) is None
    assert opened.count("blockDamagedCount") == opened.count("cacheFailureCount") == 0


def test_a_block_handed_out_outlives_its_file(opened: Opened) -> None:
    """Bytes that a reader holds stay what they were when the block is evicted, damaged or replaced."""
    opened.disk.put_blocks({key(1): data_of(1)})
    data = opened.disk.get_block(key(1))
    opened.path(key(1)).write_bytes(b"")
    opened.path(key(1)).unlink()
    assert data == data_of(1)


def test_reads_and_writes_of_blocks_do_not_raise(opened: Opened) -> None:
    """What the operating system refuses is counted and a miss: a directory in a block's place, or in its way."""
    opened.path(key(1)).mkdir(parents=True)
    (opened.root / "blocks" / key(2).path_key[:2]).mkdir(exist_ok=True)
    (opened.root / "blocks" / key(2).path_key[:2] / key(2).path_key).touch()
    assert opened.disk.get_block(key(1)) is None
    opened.disk.put_blocks({key(1): data_of(1)})
    opened.disk.put_blocks({key(2): data_of(2)})
    assert opened.disk.get_block(key(2)) is None
    assert opened.count("cacheFailureCount") >= 3
    assert list((opened.root / "tmp").iterdir()) == []
    opened.disk.put_blocks({key(3): data_of(3)})
    assert opened.disk.get_block(key(3)) == data_of(3)


def test_the_directory_removed_while_open(opened: Opened) -> None:
    """After the directory vanished blocks are misses and puts are counted; it is not made anew open to others."""
    opened.disk.put_blocks({key(1): data_of(1)})
    shutil.rmtree(opened.root.parent)
    assert opened.disk.get_block(key(1)) is None
    assert opened.disk.versions_held(key(1).path_key) == frozenset()
    opened.disk.put_blocks({key(2): data_of(2)})
    assert opened.count("cacheFailureCount") == 1
    assert opened.disk.get_record("version", "k") is None
    assert list(opened.disk.records("version", "")) == []
    with pytest.raises(OSError, match="No such file"):
        opened.disk.acquire("block", "x", 0)
    assert not opened.root.parent.exists()
    again = Opened(opened.root.parent)
    again.disk.put_blocks({key(1): data_of(1)})
    assert opened.disk.get_block(key(1)) == data_of(1)


# --- the budget --------------------------------------------------------------------------------------


def test_a_block_too_large_for_the_cache_is_not_stored(cache_dir: Path) -> None:
    """A block above an eighth of the budget is refused and counted, and what is there stays."""
    opened = Opened(cache_dir, MIB)
    opened.disk.put_blocks({key(n): data_of(n) for n in range(10)})
    opened.disk.put_blocks({key(20, MIB // 8): bytes(MIB // 8)})
    opened.disk.put_blocks({key(21, MIB // 8 + 1): bytes(MIB // 8 + 1), key(22): data_of(22)})
    assert opened.count("blockRefusedCount") == 1
    assert opened.disk.get_block(key(20, MIB // 8)) is not None
    assert opened.disk.get_block(key(21, MIB // 8 + 1)) is None
    assert all(opened.disk.get_block(key(n)) == data_of(n) for n in (*range(10), 22))
    assert opened.count("blockEvictedCount") == 0


@pytest.mark.parametrize("at_once", [1, 7, 200], ids=["one by one", "some at once", "all at once"])
def test_the_budget_holds(cache_dir: Path, at_once: int) -> None:
    """However many blocks come at once, the bytes on disk stay within the budget and the counter is right."""
    opened = Opened(cache_dir, MIB)
    size, total = 10_000, 200
    for start in range(0, total, at_once):
        numbers = range(start, min(start + at_once, total))
        opened.disk.put_blocks({key(n, size): data_of(n, size) for n in numbers})
        assert opened.disk.used_bytes() <= MIB
        assert opened.usage() == opened.disk.used_bytes()
    held = [n for n in range(total) if opened.disk.get_block(key(n, size)) is not None]
    assert len(held) * (size + HEADER_BYTES) == opened.disk.used_bytes() >= 0.8 * MIB
    assert opened.count("blockEvictedCount") == total - len(held)
    assert opened.count("cacheFailureCount") == 0
    assert list((opened.root / "tmp").iterdir()) == []


def aged(opened: Opened, number: int, size: int, age_s: float) -> None:
    """A block last used `age_s` ago."""
    opened.disk.put_blocks({key(number, size): data_of(number, size)})
    used_at = opened.clock.wall_s - age_s
    os.utime(opened.path(key(number, size)), (used_at, used_at))


def test_an_eviction_takes_old_blocks_and_few(cache_dir: Path) -> None:
    """Going over the budget removes about a tenth of it, from the older half, and leaves no empty directory."""
    opened = Opened(cache_dir, MIB)
    size, total = 10_000, 104
    for n in range(total):
        aged(opened, n, size, 10_000 - n)
    assert opened.count("blockEvictedCount") == 0
    opened.disk.put_blocks({key(1000, size): data_of(1, size)})
    gone = [n for n in range(total) if not opened.path(key(n, size)).exists()]
    assert len(gone) == opened.count("blockEvictedCount")
    assert 10 <= len(gone) <= 12
    assert max(gone) < total // 2
    assert opened.usage() == opened.disk.used_bytes()
    assert not any((opened.root / "blocks" / k.path_key[:2] / k.path_key).exists() for k in map(key, gone))


def test_a_block_in_use_survives(cache_dir: Path) -> None:
    """Reading a block once a minute is enough to keep it, while as many blocks as the budget holds pass through."""
    opened = Opened(cache_dir, MIB)
    size = 10_000
    aged(opened, 0, size, 100_000)
    assert opened.disk.get_block(key(0, size)) is not None
    for n in range(1, 90):
        aged(opened, n, size, 50_000)
    for n in range(100, 180):
        opened.disk.put_blocks({key(n, size): data_of(n, size)})
    assert opened.count("blockEvictedCount") > 50
    assert opened.disk.get_block(key(0, size)) == data_of(0, size)


def test_a_hot_block_is_touched_once_a_minute(opened: Opened) -> None:
    """A read within a minute of the last use writes nothing; after it, and after a clock that went back, it does."""
    opened.disk.put_blocks({key(1): data_of(1)})
    for age_s, touched in ((50, False), (70, True), (-50, False), (-70, True)):
        used_at = opened.clock.wall_s - age_s
        os.utime(opened.path(key(1)), (used_at, used_at))
        opened.disk.get_block(key(1))
        assert (opened.path(key(1)).stat().st_mtime != pytest.approx(used_at, abs=1)) is touched


@pytest.mark.parametrize("counter", [None, b"", b"many", b"0", b"999999999"])
def test_a_lost_counter_is_found_again(cache_dir: Path, counter: bytes | None) -> None:
    """A counter that is lost, damaged or wrong is put right by a sweep, by eviction at the latest, without losing the cache."""
    opened = Opened(cache_dir, MIB)
    opened.disk.put_blocks({key(n, 10_000): data_of(n, 10_000) for n in range(50)})
    (opened.root / "usage").unlink() if counter is None else (opened.root / "usage").write_bytes(counter)
    if counter == b"0":
        opened.disk.sweep()
    opened.disk.put_blocks({key(n, 10_000): data_of(n, 10_000) for n in range(50, 55)})
    assert opened.usage() == opened.disk.used_bytes() == 55 * (10_000 + HEADER_BYTES)
    assert opened.count("blockEvictedCount") == 0


@pytest.mark.parametrize("name", ["usage.lock", "evict.lock"])
def test_a_lock_held_for_long_costs_a_moment(cache_dir: Path, name: str) -> None:
    """While another process sits on the counter or on an eviction, blocks are read at once and not stored after a bounded wait."""
    opened = Opened(cache_dir, MIB)
    opened.disk.put_blocks({key(n, 10_000): data_of(n, 10_000) for n in range(104)})
    used = opened.usage()
    with holding(opened.root / name):
        assert opened.disk.get_block(key(0, 10_000)) == data_of(0, 10_000)
        opened.disk.put_blocks({key(200, 10_000): data_of(200, 10_000)})
        assert opened.disk.get_block(key(200, 10_000)) is None
        assert opened.count("cacheFailureCount") == 1
    assert opened.usage() == opened.disk.used_bytes() == used
    opened.disk.put_blocks({key(200, 10_000): data_of(200, 10_000)})
    assert opened.disk.get_block(key(200, 10_000)) == data_of(200, 10_000)


# --- a full disk -------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(at: Path) -> Iterator[bool]:
    """A filesystem of 256 KiB mounted at `at`, if this user may mount; says whether."""
    at.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(at)]
    try:
        mounted = os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(at)], check=True)


def fill(root: Path, limit_bytes: int | None) -> dict[str, Any]:
    """Put 40 blocks of 20 kB; what became of them. With `limit_bytes`, no file may grow beyond it."""
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    opened = Opened(root)
    for n in range(40):
        opened.disk.put_blocks({key(n, 20_000): data_of(n, 20_000)})
    found = {n: opened.disk.get_block(key(n, 20_000)) for n in range(40)}
    small = {n: opened.disk.get_block(key(n, 100)) for n in range(40)}
    return {
        "held": [n for n, data in found.items() if data is not None],
        "right": all(data is None or data == data_of(n, 20_000) for n, data in found.items()),
        "small": sum(data is not None for data in small.values()),
        "failures": opened.count("cacheFailureCount"),
        "damaged": opened.count("blockDamagedCount"),
        "leftovers": os.listdir(opened.root / "tmp"),
        "usage": opened.usage(),
        "used": opened.disk.used_bytes(),
        "check": list(opened.disk.check().damaged),
    }


def test_a_full_disk(tmp_path: Path) -> None:
    """When the disk is full (or a file may not grow) puts are counted, nothing partial stays, and the counter is right."""
    with small_disk(tmp_path / "small") as mounted:
        limit = None if mounted else 10_000
        script = f"import json, pathlib, tests.test_disk as t; print(json.dumps(t.fill(pathlib.Path({str(tmp_path / 'small')!r}), {limit})))"  # fmt: skip
        answer = subprocess.run(
            [sys.executable, "-c", script], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True
        ).stdout
    result = json.loads(answer)
    assert result["held"] == list(range(len(result["held"])))
    assert (0 < len(result["held"]) < 40) if mounted else (result["held"] == [])
    assert result["failures"] == 40 - len(result["held"])
    assert (result["right"], result["damaged"], result["check"], result["leftovers"]) == (True, 0, [], [])
    # Below a full disk the counter itself may lag by the block that failed last, never by more.
    assert 0 <= result["usage"] - result["used"] <= 20_000 + HEADER_BYTES


# --- whose directory it is ---------------------------------------------------------------------------


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    """A directory of another user is refused, whatever its mode, and nothing is put into it."""
    foreign = tmp_path / "foreign"
    if os.geteuid() == 0:
        foreign.mkdir(mode=0o700)
        os.chown(foreign, 12345, 12345)
    else:
        foreign = Path("/usr")
    before = sorted(os.listdir(foreign))
    with pytest.raises(CacheDirectoryError, match=r"belongs to user \d+, not to \d+: set lookup.cache.dir"):
        Opened(foreign)
    assert sorted(os.listdir(foreign)) == before


def test_a_link_is_refused(tmp_path: Path) -> None:
    """A symbolic link in the directory's place is refused, also to a directory that would do."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(CacheDirectoryError, match="links are refused"):
        Opened(tmp_path / "link")
    assert os.listdir(tmp_path / "real") == []


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o720, 0o755, 0o777, 0o1777])
def test_a_directory_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    """Any right of others is refused, and the message says what to do."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c").chmod(mode)
    with pytest.raises(CacheDirectoryError, match=rf"open to other users \(mode {mode:o}\): chmod 700 it"):
        Opened(tmp_path / "c")
    assert os.listdir(tmp_path / "c") == []


def test_a_place_that_holds_no_directory_is_refused(tmp_path: Path) -> None:
    """A file in the directory's place, or in the way to it, is refused as ours."""
    (tmp_path / "file").touch(mode=0o600)
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CacheDirectoryError, match=f"cache directory {path}"):
            Opened(path)


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


def test_a_planted_pickle_never_runs(opened: Opened, tmp_path: Path) -> None:
    """A pickle in a block's or record's place, bare or in a sound envelope, is data or damage; nothing unpickles it."""
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    pickle.loads(bomb)
    assert (tmp_path / "ran").exists()  # it would work
    (tmp_path / "ran").rmdir()
    enveloped = BlockKey(key_of("f"), key_of("v"), 0, len(bomb))
    opened.disk.put_blocks({enveloped: bomb, key(1): data_of(1)})
    opened.path(key(1)).write_bytes(bomb)
    for name in ("bare", "enveloped"):
        opened.disk.create_record("version", name, 1)
    (opened.root / "records" / "version" / "bare").write_bytes(bomb)
    # The envelope of a record is a block's: one made for the record's name is sound.
    plant_envelope(opened, "version/enveloped", bomb)
    for name in ("usage", "swept", "usage.lock"):
        (opened.root / name).write_bytes(bomb)
    assert opened.disk.get_block(enveloped) == bomb
    assert opened.disk.get_block(key(1)) is None
    for name in ("bare", "enveloped"):
        assert opened.disk.get_record("version", name) is None
        assert opened.disk.create_record("version", name, 2) == 2
    assert [value for _, value in opened.disk.records("version", "")] == [2, 2]
    opened.disk.sweep()
    opened.disk.check(repair=True)
    opened.disk.put_blocks({key(2): data_of(2)})
    assert not (tmp_path / "ran").exists()


def plant_envelope(opened: Opened, name: str, payload: bytes) -> None:
    """Write a record file whose header is right for `name` and whose payload is no record's."""
    kind, record = name.split("/")
    opened.disk.replace_record(kind, record, "x" * (len(payload) - 2))
    header = opened.root / "records" / kind / record
    blob = header.read_bytes()
    # The checksum is forged, too: CRC-32 of the name's key and the payload.
    bound = blob[20:36]
    forged = struct.pack("<8sQI16s", blob[:8], len(payload), zlib.crc32(payload, zlib.crc32(bound)), bound)
    header.write_bytes(forged + payload)


# --- records -----------------------------------------------------------------------------------------

VALUES = [0, False, "", [], {}, {"a": [1, None, "ü\ud800"]}, "x" * 100_000, 1.5, -(2**60)]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_record_is_what_was_recorded(opened: Opened, value: Any) -> None:
    """Any JSON value but null comes back equal, in any opener; a falsy one is a record as well."""
    assert opened.disk.create_record("version", "k", value) == value
    assert Opened(opened.root.parent).disk.get_record("version", "k") == value
    assert opened.disk.has_record("version", "k")
    assert list(opened.disk.records("version", "k")) == [("k", value)]


def test_the_first_record_stays(opened: Opened) -> None:
    """create_record keeps the first value and tells it to all; replace_record keeps the last; remove forgets."""
    assert opened.disk.create_record("execution", "k", "first") == "first"
    assert opened.disk.create_record("execution", "k", "second") == "first"
    assert opened.disk.create_record("plan", "k", "other kind") == "other kind"
    opened.disk.replace_record("execution", "k", "third")
    assert opened.disk.get_record("execution", "k") == "third"
    opened.disk.remove_record("execution", "k")
    opened.disk.remove_record("execution", "k")
    assert opened.disk.get_record("execution", "k") is None
    assert os.listdir(opened.root / "tmp") == []


def test_records_are_found_by_prefix(opened: Opened) -> None:
    """`records` gives the readable ones of a kind whose key starts so, in order."""
    for name in ("b1", "a2", "a1", "a3"):
        opened.disk.replace_record("metrics", name, name)
    (opened.root / "records" / "metrics" / "a2").write_bytes(b"noise")
    assert list(opened.disk.records("metrics", "a")) == [("a1", "a1"), ("a3", "a3")]
    assert list(opened.disk.records("nothing", "")) == []


def test_a_record_in_anothers_place_is_none(opened: Opened) -> None:
    """A sound record under another's key or kind is not that other."""
    opened.disk.create_record("version", "a", 1)
    for kind, name in (("version", "b"), ("table", "a")):
        opened.disk.create_record(kind, name, 2)
        shutil.copy(opened.root / "records" / "version" / "a", opened.root / "records" / kind / name)
        assert opened.disk.get_record(kind, name) is None


def test_a_record_that_cannot_be_written_is_an_error(opened: Opened) -> None:
    """Where the directory does not take a record the caller learns it, and nothing is left."""
    shutil.rmtree(opened.root / "tmp")
    for record in (opened.disk.create_record, opened.disk.replace_record):
        with pytest.raises(OSError, match="No such file"):
            record("version", "k", 1)
    assert not opened.disk.has_record("version", "k")


# --- locks -------------------------------------------------------------------------------------------


def test_a_lock_excludes_other_processes(opened: Opened) -> None:
    """A lock held elsewhere is not had within the time, is had when its holder dies, and again after release."""
    with holding(opened.disk.lock_path("block", "x")) as holder:
        assert opened.disk.acquire("block", "x", 0) is None
        assert opened.disk.acquire("block", "x", 0.05) is None
        assert opened.disk.acquire("block", "y", 0) is not None
        holder.kill()
        holder.wait()
        lock = opened.disk.acquire("block", "x", 0)
    assert lock is not None
    lock.release()
    assert opened.disk.acquire("block", "x", 0) is not None


def test_locks_of_two_kinds_do_not_meet(opened: Opened) -> None:
    """Locks of different kinds never exclude each other; a kind has 4096, so names may share one."""
    assert opened.disk.lock_path("block", "x") != opened.disk.lock_path("resolve", "x")
    paths = {opened.disk.lock_path("block", str(n)) for n in range(50_000)}
    assert 4000 < len(paths) <= 4096


# --- upkeep ------------------------------------------------------------------------------------------


def test_leftovers_of_killed_writers_are_swept(opened: Opened) -> None:
    """Temporary files older than an hour are removed, younger ones stay; at most every ten minutes."""
    old, young = opened.root / "tmp" / "old", opened.root / "tmp" / "young"
    for path, age_s in ((old, 3700), (young, 3500)):
        path.touch()
        os.utime(path, (opened.clock.wall_s - age_s,) * 2)
    opened.disk.sweep()
    assert os.listdir(opened.root / "tmp") == ["young"]
    os.utime(young, (1, 1))
    opened.clock.tick(500)
    opened.disk.sweep()
    assert young.exists()
    opened.clock.tick(200)
    opened.disk.sweep()
    assert not young.exists()


@pytest.mark.parametrize(
    ("kind", "kept_days"),
    [("execution", 1), ("plan", 1), ("unsettled", 1), ("files", 7), ("schema", 7), ("table", 30), ("version", 30)],
)
def test_records_past_their_time_are_swept(opened: Opened, kind: str, kept_days: int) -> None:
    """A record not used for its kind's time is forgotten; being read in between keeps it; metrics stay."""
    for name in ("old", "used", "young"):
        opened.disk.create_record(kind, name, 1)
    opened.disk.create_record("metrics", "old", 1)
    for name, days in (("old", kept_days + 0.1), ("used", kept_days + 0.1), ("young", kept_days - 0.1)):
        os.utime(opened.root / "records" / kind / name, (opened.clock.wall_s - days * 86400,) * 2)
    os.utime(opened.root / "records" / "metrics" / "old", (1, 1))
    assert opened.disk.get_record(kind, "used") == 1
    opened.disk.sweep()
    assert sorted(os.listdir(opened.root / "records" / kind)) == ["used", "young"]
    assert opened.disk.has_record("metrics", "old")


def test_a_row_of_records_never_goes_back(opened: Opened) -> None:
    """Of many who put the next record each takes the newest one into account; all but the last two are removed."""
    begin = threading.Barrier(6)

    def count() -> None:
        begin.wait()
        for _ in range(50):
            while True:
                number, value = opened.disk.newest_record("table", "t", int)
                if opened.disk.succeed_record("table", "t", number, (value or 0) + 1):
                    break

    threads = [threading.Thread(target=count) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    newest = opened.disk.newest_record("table", "t", int)
    assert newest[1] >= 300  # more where one was told to look again though others had counted on from its record
    row = opened.root / "records" / "table~t"
    assert len(os.listdir(row)) <= 2
    # One that was stopped since then: neither where a record is, nor where one was, does it put its own.
    assert not opened.disk.succeed_record("table", "t", newest[0] - 1, 0)
    assert not opened.disk.succeed_record("table", "t", newest[0] - 3, 0)
    assert opened.disk.newest_record("table", "t", int) == newest


def test_a_row_of_records_that_is_damaged_old_or_forgotten(opened: Opened) -> None:
    """A damaged newest one is no value, and what follows it counts; names of others are no records; a sweep removes all."""
    row = opened.root / "records" / "table~t"
    assert opened.disk.newest_record("table", "t") == (0, None)
    assert opened.disk.succeed_record("table", "t", 0, "first")
    (row / f"{2:016x}").write_bytes(b"noise")
    (row / "ffff").write_bytes(b"noise")
    assert opened.disk.newest_record("table", "t") == (2, None)
    assert opened.disk.succeed_record("table", "t", 2, "third")
    assert opened.disk.newest_record("table", "t") == (3, "third")
    opened.disk.forget_records("table", "t")
    assert (len(os.listdir(row)), opened.disk.newest_record("table", "t")) == (2, (4, None))
    # Who has read the third one before, and was stopped, does not put what it knows after what is learned since.
    assert opened.disk.succeed_record("table", "t", 4, "again")
    assert not opened.disk.succeed_record("table", "t", 3, "old")
    assert opened.disk.newest_record("table", "t") == (5, "again")
    (row / ("f" * 16)).write_bytes(b"noise")
    opened.disk.forget_records("table", "t")  # nothing can follow that
    assert opened.disk.newest_record("table", "t") == (0, None)
    assert opened.disk.succeed_record("table", "t", 0, "again")
    for path in row.iterdir():
        os.utime(path, (opened.clock.wall_s - 31 * 86400,) * 2)
    opened.disk.sweep()
    assert not row.exists()


def test_a_sweep_never_raises(opened: Opened) -> None:
    """Sweeping a directory that lost parts of itself, or all, is no error."""
    shutil.rmtree(opened.root / "tmp")
    opened.disk.sweep()
    shutil.rmtree(opened.root.parent)
    opened.disk.sweep()
    assert not opened.root.parent.exists()


def test_check_finds_everything(opened: Opened) -> None:
    """`check` counts what is sound, names all that is damaged or left over, and changes nothing; `repair` mends it."""
    opened.disk.put_blocks({key(n): data_of(n) for n in range(len(DAMAGE) + 3)})
    for n, damage in enumerate(DAMAGE.values()):
        damage(opened.path(key(n)))
    swapped = key(len(DAMAGE))
    os.replace(opened.path(key(len(DAMAGE) + 1)), opened.path(swapped))
    opened.disk.create_record("version", "sound", 1)
    opened.disk.create_record("version", "bad", 1)
    (opened.root / "records" / "version" / "bad").write_bytes(b"noise")
    opened.disk.create_record("table", "no json", 1)
    plant_envelope(opened, "table/no json", b"not json")
    for place in ("blocks/evil.pkl", "blocks/ab/evil.pkl", f"blocks/{key(0).path_key[:2]}/x"):
        (opened.root / place).parent.mkdir(exist_ok=True)
        (opened.root / place).write_bytes(b"planted")
    (opened.root / "tmp" / "killed").write_bytes(b"half")
    os.utime(opened.root / "tmp" / "killed", (1, 1))
    (opened.root / "tmp" / "busy").write_bytes(b"half")
    (opened.root / "usage").write_bytes(b"7")
    bad = {f"blocks/{key(n).name}" for n in range(len(DAMAGE))} | {
        f"blocks/{swapped.name}", "records/version/bad", "records/table/no json", "blocks/evil.pkl",
        "blocks/ab/evil.pkl", f"blocks/{key(0).path_key[:2]}/x",
    }  # fmt: skip
    for repair in (False, True):
        report = opened.disk.check(repair)
        assert set(report.damaged) == bad
        assert (report.blocks, report.bytes, report.leftovers) == (1, 1000 + HEADER_BYTES, ("killed",))
    report = opened.disk.check()
    assert (report.blocks, report.damaged, report.leftovers) == (1, (), ())
    assert opened.usage() == opened.disk.used_bytes() == report.bytes
    assert opened.disk.get_block(key(len(DAMAGE) + 2)) == data_of(len(DAMAGE) + 2)
    assert opened.disk.get_record("version", "sound") == 1
    assert os.listdir(opened.root / "tmp") == ["busy"]


def test_counting_into_another_group(opened: Opened) -> None:
    """`counting` is the same directory with counters of its own."""
    metrics = CacheMetricGroup()
    twin = opened.disk.counting(metrics)
    opened.disk.put_blocks({key(1): data_of(1)})
    assert twin.get_block(key(1)) == data_of(1)
    opened.path(key(1)).write_bytes(b"")
    assert twin.get_block(key(1)) is None
    assert (metrics.snapshot()["blockDamagedCount"], opened.count("blockDamagedCount")) == (1, 0)


# --- names and places --------------------------------------------------------------------------------


def test_keys_are_equal_for_equal_parts_only() -> None:
    """A key tells its parts apart, however they are cut, and takes any text a file name may be."""
    parts = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"), ("ab\0c",), ("ä",), (os.fsdecode(b"\xe4"),)]
    assert len({key_of(*p) for p in parts}) == len(parts)
    assert key_of("a", 1) == key_of("a", "1")
    assert all(len(key_of(*p)) == 32 and int(key_of(*p), 16) >= 0 for p in parts)


def test_memory_backed_directories_are_told() -> None:
    """A directory on tmpfs is told from one on a disk or another kind of mount."""
    assert not memory_backed(Path("/proc/self"))
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    for _, point, kind, *_ in mounts:
        if kind == "tmpfs" and "\\" not in point:
            assert memory_backed(Path(point) / "below") is (max(m[1] for m in mounts if m[1] == point) == point)
