"""`Disk`: what it hands out is what was put in, whatever happened to the directory in between."""

import errno
import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from pyspark_lookup.errors import CacheDirectoryError
from pyspark_lookup.storage.disk import BlockKey, directory, key_of, on_disk
from pyspark_lookup.storage.disk.directory import HEADER_BYTES, wrap
from pyspark_lookup.storage.disk.space import Kind
from tests.support.disks import BLOCK_DAMAGE, Opened, files_at_most, handles_below, holding, key, random_data
from tests.support.fakes import FakeClock
from tests.support.partial_cache import SPACE

MIB = 2**20
V1, V2 = "1" * 32, "2" * 32  # of a version's digest nothing is the beginning of another


def takes(size: int) -> int:
    """The bytes that a block of that size takes on disk, with the two directories that it lies in."""
    return on_disk(size + HEADER_BYTES) + 2 * on_disk(1)


ROOM = 5 * MIB // 3 + 4096  # for as many blocks of 10,000 bytes as a MiB has without directories


def test_a_block_is_what_was_put(opened: Opened) -> None:
    """Blocks come back byte for byte, in any opener, and count once; what a reader holds stays; one that is gone is absent, and no damage."""
    blocks = {key(n, n): random_data(n, n) for n in (0, 1, 1000, 70_000)}
    for _ in range(2):
        opened.disk.put_blocks(blocks)
        for disk in (opened.disk, Opened(opened.root.parent).disk):
            assert {k: bytes(disk.get_block(k) or b"") for k in blocks} == blocks
            assert disk.get_block(key(5)) is None
            assert disk.get_block(key(1, 1, "other version")) is None
        assert opened.disk.used_bytes() == opened.usage() == sum(takes(len(data)) for data in blocks.values())
    data = opened.disk.get_block(key(1000))
    opened.path(key(1000)).write_bytes(b"")
    opened.path(key(1000)).unlink()
    assert (data, opened.disk.get_block(key(1000))) == (random_data(1000), None)
    assert opened.count("blockDamagedCount") == opened.count("cacheFailureCount") == 0


@pytest.mark.parametrize(
    "other_key", [key(2), key(1, 1000, "w"), BlockKey(key(1).path_key, key(1).version_key, 1000, 1000)]
)
def test_a_block_in_anothers_place_is_a_miss(opened: Opened, other_key: BlockKey) -> None:
    """A sound block under the name of another one (file, version or range), or whose length is not that of its range, is no block of that name."""
    opened.disk.put_blocks({key(1): random_data(1), other_key: random_data(2)})
    os.replace(opened.path(other_key), opened.path(key(1)))
    for length in (999, 1001, 0):
        assert opened.disk.get_block(key(1)) is None
        opened.disk.put_blocks({key(1): random_data(1, length)})
    assert opened.disk.get_block(key(1)) is None
    assert opened.count("blockDamagedCount") == 4


@pytest.mark.parametrize("at_once", [1, 7, 200], ids=["one by one", "some at once", "all at once"])
def test_the_budget_holds(cache_dir: Path, at_once: int) -> None:
    """However many blocks come at once, the bytes on disk stay within the budget, and counted; one above an eighth of it is refused."""
    opened = Opened(cache_dir, ROOM)
    size, total = 10_000, 200
    for start in range(0, total, at_once):
        numbers = range(start, min(start + at_once, total))
        opened.disk.put_blocks({key(n, size): random_data(n, size) for n in numbers})
        assert opened.usage() <= ROOM * 15 // 16  # the rest is for records
        if start % 7 == 0:
            assert opened.usage() == opened.disk.used_bytes()
    kept_blocks = [n for n in range(total) if opened.disk.get_block(key(n, size)) is not None]
    assert len(kept_blocks) * takes(size) == opened.disk.used_bytes() >= 0.8 * ROOM
    assert opened.count("blockEvictedCount") == total - len(kept_blocks)
    large = ROOM // 8
    opened.disk.put_blocks({key(301, large + 1): bytes(large + 1), key(302): random_data(302)})
    assert (opened.count("blockRefusedCount"), opened.disk.get_block(key(301, large + 1))) == (1, None)
    assert opened.disk.get_block(key(302)) == random_data(302)
    opened.disk.put_blocks({key(300, large): bytes(large)})
    assert (opened.count("blockRefusedCount"), opened.disk.get_block(key(300, large))) == (1, bytes(large))


def test_an_eviction_takes_old_blocks_and_few(cache_dir: Path) -> None:
    """Going over the budget removes about a tenth of it, from the older half, and leaves no empty directory."""
    opened = Opened(cache_dir, ROOM)
    size, total = 10_000, 80
    for n in range(total):
        opened.disk.put_blocks({key(n, size): random_data(n, size)})
        os.utime(opened.path(key(n, size)), (opened.clock.wall_s - 10_000 + n,) * 2)
    assert opened.count("blockEvictedCount") == 0
    opened.disk.put_blocks({key(1000, size): random_data(1, size)})
    evicted = [n for n in range(total) if not opened.path(key(n, size)).exists()]
    assert 10 <= len(evicted) == opened.count("blockEvictedCount") <= 12
    assert max(evicted) < total // 2
    assert opened.usage() == opened.disk.used_bytes()
    assert not any(opened.path(key(n, size)).parents[1].exists() for n in evicted)


@pytest.mark.parametrize("counter", [None, b"many 0 0", b"0 0 0", b"999999999 0 0", b"0 -1 0"])
def test_a_lost_counter_is_found_again(cache_dir: Path, counter: bytes | None) -> None:
    """A counter that is lost, damaged or wrong is put right by a sweep, by eviction at the latest, without losing the cache."""
    opened = Opened(cache_dir, ROOM)
    opened.disk.put_blocks({key(n, 10_000): random_data(n, 10_000) for n in range(50)})
    (opened.root / "usage").unlink() if counter is None else (opened.root / "usage").write_bytes(counter)
    if counter == b"0 0 0":
        opened.disk.sweep()
    opened.disk.put_blocks({key(n, 10_000): random_data(n, 10_000) for n in range(50, 55)})
    assert opened.usage() == opened.disk.used_bytes() == 55 * takes(10_000)
    assert opened.count("blockEvictedCount") == 0


@pytest.mark.parametrize("name", ["usage.lock", "evict.lock"])
def test_a_lock_held_for_long_costs_a_moment(cache_dir: Path, name: str) -> None:
    """While another process sits on the counter or on an eviction, blocks are read at once and not stored after a bounded wait."""
    opened = Opened(cache_dir, ROOM)
    opened.disk.put_blocks({key(n, 10_000): random_data(n, 10_000) for n in range(80)})
    used_bytes = opened.usage()
    with holding(opened.root / name):
        assert opened.disk.get_block(key(0, 10_000)) == random_data(0, 10_000)
        opened.disk.put_blocks({key(200, 10_000): random_data(200, 10_000)})
        assert opened.disk.get_block(key(200, 10_000)) is None
        assert opened.count("cacheFailureCount") == 1
    assert opened.usage() == opened.disk.used_bytes() == used_bytes
    opened.disk.put_blocks({key(200, 10_000): random_data(200, 10_000)})
    assert opened.disk.get_block(key(200, 10_000)) == random_data(200, 10_000)


def test_a_full_disk(opened: Opened) -> None:
    """When a file may not grow, as on a full disk, puts are counted, nothing partial stays, and the counter is right."""
    blocks = {key(n, n * 1000): random_data(n, n * 1000) for n in range(1, 20)}
    with files_at_most(10_000):
        for block in blocks.items():
            opened.disk.put_blocks(dict([block]))
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            opened.disk.create_record("version", "k", "x" * 10_000)
    blocks_read = {block: opened.disk.get_block(block) for block in blocks}
    assert blocks_read == {block: data if len(data) < 10_000 else None for block, data in blocks.items()}
    assert (opened.count("cacheFailureCount"), opened.count("blockDamagedCount")) == (10, 0)
    assert (opened.disk.check().damaged, os.listdir(opened.root / "tmp")) == ((), [])
    # The counter may lag by the block that failed last, never by more.
    assert 0 <= opened.usage() - opened.disk.used_bytes() <= on_disk(19_000 + HEADER_BYTES)


def test_a_directory_that_is_not_ours_alone_is_refused(tmp_path: Path) -> None:
    """Another user's, one open to others (and what to do about it), a link, and a file in its place are refused; nothing is put there."""
    foreign = tmp_path / "foreign" if os.geteuid() == 0 else Path("/usr")
    if os.geteuid() == 0:
        foreign.mkdir()
        os.chown(foreign, 12345, 12345)
    before = sorted(os.listdir(foreign))
    with pytest.raises(CacheDirectoryError, match=r"belongs to user \d+, not to \d+: set lookup.cache.dir"):
        Opened(foreign)
    assert sorted(os.listdir(foreign)) == before
    real = tmp_path / "real"
    real.mkdir()
    for mode in (0o701, 0o710, 0o720, 0o755, 0o777, 0o1777):
        real.chmod(mode)
        says = rf"open to other users \(mode {mode:o}\): chmod 700 it"
        with pytest.raises(CacheDirectoryError, match=says) as caught:
            Opened(real)
        assert ("remove the files that others may have put into it" in str(caught.value)) is bool(mode & 0o22)
    real.chmod(0o700)
    (tmp_path / "link").symlink_to(real)
    with pytest.raises(CacheDirectoryError, match="links are refused"):
        Opened(tmp_path / "link")
    assert os.listdir(real) == []
    (tmp_path / "file").touch(mode=0o600)
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CacheDirectoryError, match=f"cache directory {path}"):
            Opened(path)


VALUES = [0, False, "", [], {}, {"a": [1, None, "ü\ud800"]}, "x" * 100_000, 1.5, -(2**60)]


def test_the_first_record_stays(opened: Opened) -> None:
    """create_record keeps the first value, any JSON value but null, and tells it to all; replace_record keeps the last; remove forgets."""
    for number, value in enumerate(VALUES):
        key = f"k{number}"
        for record in (value, "second"):
            assert opened.disk.create_record("version", key, record) == value
        assert Opened(opened.root.parent).disk.get_record("version", key) == value
        assert opened.disk.has_record("version", key)
    assert [value for _, value in opened.disk.records("version", "k")] == VALUES
    assert opened.disk.create_record("plan", "k0", "other kind") == "other kind"
    opened.disk.replace_record("version", "k0", "third")
    assert opened.disk.get_record("version", "k0") == "third"
    for _ in range(2):
        opened.disk.remove_record("version", "k0")
        assert opened.disk.get_record("version", "k0") is None
    assert os.listdir(opened.root / "tmp") == []


def test_a_record_that_another_process_creates_meanwhile_stays(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that saw no record before another process created it gets that one."""
    second = Opened(opened.root.parent)
    take = opened.disk.take

    def take_later(kind: Kind, amount: int) -> None:
        second.disk.create_record("version", "k", "first")
        take(kind, amount)

    monkeypatch.setattr(opened.disk, "take", take_later)
    assert opened.disk.create_record("version", "k", "second") == "first"
    assert second.disk.get_record("version", "k") == "first"


def test_a_lock_excludes_other_processes(opened: Opened) -> None:
    """A lock held elsewhere is had when its holder dies, and after release; kinds never exclude each other, and have 4096 locks each."""
    with holding(opened.disk.lock_path("block", "x")) as holder:
        for wait_s in (0, 0.05):
            assert opened.disk.acquire("block", "x", wait_s) is None
        for kind, name in (("block", "y"), ("resolve", "x")):
            assert opened.disk.acquire(kind, name, 0) is not None
        holder.kill()
        holder.wait()
        lock = opened.disk.acquire("block", "x", 0)
    lock.release()
    assert opened.disk.acquire("block", "x", 0) is not None
    assert 4000 < len({opened.disk.lock_path("block", str(n)) for n in range(20_000)}) <= 4096


KEPT_DAYS = {**dict.fromkeys(("execution", "plan", "unsettled"), 1), **dict.fromkeys(("files", "schema"), 7)}
KEPT_DAYS |= dict.fromkeys(("table", "version", "of-another-release"), 30)


def test_what_is_past_its_time_is_swept(opened: Opened) -> None:
    """Temporary files go after an hour, records when their kind's time has passed since they were read; every ten minutes at most."""

    def make(path: Path, age_s: float) -> None:
        path.touch()
        os.utime(path, (opened.clock.wall_s - age_s,) * 2)

    make(opened.root / "tmp" / "old", 3700)
    make(opened.root / "tmp" / "young", 3500)
    opened.disk.create_record("metrics", "old", 1)
    make(opened.root / "records" / "metrics" / "old", 1000 * 86400)
    for kind, kept_days in KEPT_DAYS.items():
        for name, days in (("old", kept_days + 0.1), ("used", kept_days + 0.1), ("young", kept_days - 0.1)):
            opened.disk.create_record(kind, name, 1)
            make(opened.root / "records" / kind / name, days * 86400)
        assert opened.disk.get_record(kind, "used") == 1
    running = {age_days: opened.disk.new_counters(f"{age_days}-running", {}, {"n": 1}) for age_days in (89, 91)}
    for age_days in running:
        opened.disk.new_counters(f"{age_days}-over", {}, {"n": 1}).close()
    for name in os.listdir(opened.root / "counters"):
        make(opened.root / "counters" / name, int(name[:2]) * 86400)
    opened.disk.sweep()
    assert all(sorted(os.listdir(opened.root / "records" / kind)) == ["used", "young"] for kind in KEPT_DAYS)
    assert sorted(os.listdir(opened.root / "counters")) == ["89-over", "89-running", "91-running"]
    assert opened.disk.has_record("metrics", "old")
    assert os.listdir(opened.root / "tmp") == ["young"]
    os.utime(opened.root / "tmp" / "young", (1, 1))
    for seconds, names in ((500, ["young"]), (200, [])):
        opened.clock.tick(seconds)
        opened.disk.sweep()
        assert os.listdir(opened.root / "tmp") == names


@pytest.mark.parametrize("kind", ["execution", "files", "table"])
def test_a_record_in_use_is_not_swept(opened: Opened, kind: str) -> None:
    """A record that is read now and then stays for longer than its kind's time, which counts from the last use."""
    opened.disk.create_record(kind, "used", 1)
    path = opened.root / "records" / kind / "used"
    made_s = path.stat().st_mtime
    for _ in range(2):
        # Not by the clock of the file system, which marks the record: its time goes back instead.
        os.utime(path, (opened.clock.wall_s - KEPT_DAYS[kind] * 86400 * 0.6,) * 2)
        assert opened.disk.get_record(kind, "used") == 1
        assert path.stat().st_mtime >= made_s - 1


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

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(count) for _ in range(6)]:
            future.result()
    newest = opened.disk.newest_record("table", "t", int)
    assert newest[1] >= 300  # more where one was told to look again though others had counted on from its record
    assert len(os.listdir(opened.root / "records" / "table~t")) <= 2
    # One that was stopped since then: neither where a record is, nor where one was, does it put its own.
    assert not opened.disk.succeed_record("table", "t", newest[0] - 1, 0)
    assert not opened.disk.succeed_record("table", "t", newest[0] - 3, 0)
    assert opened.disk.newest_record("table", "t", int) == newest


def test_a_row_of_records_that_is_damaged_old_or_forgotten(opened: Opened) -> None:
    """A damaged newest one is not a value, and what follows it counts; names of others are not records; a sweep removes all."""
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


def test_check_finds_everything(opened: Opened) -> None:
    """`check` counts what is sound, names all that is damaged or left over, and changes nothing; `repair` mends it."""
    count = len(BLOCK_DAMAGE)
    opened.disk.put_blocks({key(n): random_data(n) for n in range(count + 3)})
    for n, damage in enumerate(BLOCK_DAMAGE.values()):
        opened.path(key(n)).write_bytes(damage(opened.path(key(n)).read_bytes()))
    os.replace(opened.path(key(count + 1)), opened.path(key(count)))
    for name in ("sound", "bad", "no json"):
        opened.disk.create_record("version", name, 1)
    planted = {f"blocks/{place}": b"planted" for place in ("evil.pkl", "ab/evil.pkl", f"{key(0).path_key[:2]}/x")}
    planted["records/version/bad"] = b"noise"
    planted["records/version/no json"] = wrap(b"not json", "version/no json")
    for place, data in {**planted, "tmp/killed": b"half", "tmp/busy": b"half", "usage": b"7"}.items():
        (opened.root / place).parent.mkdir(exist_ok=True)
        (opened.root / place).write_bytes(data)
    os.utime(opened.root / "tmp" / "killed", (1, 1))
    for repair in (False, True):
        report = opened.disk.check(repair)
        assert set(report.damaged) == {*planted, *(f"blocks/{key(n).name}" for n in range(count + 1))}
        assert (report.blocks, report.bytes, report.leftovers) == (1, on_disk(1000 + HEADER_BYTES), ("killed",))
    report = opened.disk.check()
    assert (report.blocks, report.damaged, report.leftovers) == (1, (), ())
    assert opened.usage() == opened.disk.used_bytes()
    assert opened.disk.get_block(key(count + 2)) == random_data(count + 2)
    assert opened.disk.get_record("version", "sound") == 1
    assert os.listdir(opened.root / "tmp") == ["busy"]


def test_keys_are_equal_for_equal_parts_only() -> None:
    """A key tells its parts apart, however they are cut, and takes any text a file name may be."""
    parts = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"), ("ab\0c",), ("ä",), (os.fsdecode(b"\xe4"),)]
    assert len({key_of(*p) for p in parts}) == len(parts)
    assert key_of("a", 1) == key_of("a", "1")
    assert all(len(key_of(*p)) == 32 and int(key_of(*p), 16) >= 0 for p in parts)


def read_claims(opened: Opened, group: str = V1) -> list[bytes]:
    """The payloads of a group's claims, as another process sees them."""
    reader = Opened(opened.root.parent)
    return sorted(payload for _, payload in reader.disk.claims(SPACE, group))


def test_a_claim_is_seen_while_it_is_held(opened: Opened) -> None:
    """A claim is told to others by group and space, until it is released; then, and after a full disk, nothing is left."""
    claim = opened.disk.create_claim(SPACE, V1, b"payload")
    empty_claim = opened.disk.create_claim(SPACE, V1, b"")
    for path in (opened.root / "claims").glob("*/*"):
        os.utime(path, (1, 1))
    opened.disk.sweep()
    assert read_claims(opened) == [b"", b"payload"]
    assert read_claims(opened, V2) == []
    assert opened.disk.claims("f" * 32, V1) == []
    claim.release()
    assert read_claims(opened) == [b""]
    empty_claim.release()
    assert read_claims(opened) == []
    with files_at_most(10), pytest.raises(OSError, match="File too large"):
        opened.disk.create_claim(SPACE, V1, bytes(100))
    assert list((opened.root / "claims").glob("*/*")) == os.listdir(opened.root / "tmp") == []
    assert handles_below(opened.root) == []


def test_a_lock_that_fails(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system fails to say who holds a claim, that is an error at once: nobody waits for a claim that may be dead."""
    claim = opened.disk.create_claim(SPACE, V1, b"held")
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
        with pytest.raises(OSError, match="no locks"):
            opened.disk.claims(SPACE, V1)
        assert opened.disk.wait_for_claim(SPACE, claim.path.name, 60.0, FakeClock().host())
    claim.release()


def test_threads_of_a_process_take_turns_at_the_account(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads a process has, none finds the account locked by another of them for too long."""
    monkeypatch.setattr(directory, "_LOCK_WAIT_S", -1.0)
    ready = threading.Barrier(8)

    def take(number: int) -> None:
        ready.wait()
        for _ in range(40):
            opened.disk.counting(opened.metrics).take("records", 4096)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(take, range(8)))
    assert opened.disk.usage().records == 8 * 40 * 4096
