"""Segments on disk: what is opened is what was published, whole, and stays on disk while anybody uses it."""

import contextlib
import fcntl
import gc
import itertools
import json
import multiprocessing
import os
import shutil
import stat
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.storage.disk import OpenSegment, directory, on_disk
from pyspark_lookup.storage.disk.space import Usage
from tests.support import disks
from tests.support.disks import META, REGIONS, Opened, flipped, key, published, random_data, segment_path, writing
from tests.support.fuzzing import fuzzed
from tests.support.workers import in_fresh_process, must_end

TAIL = struct.Struct("<QI8s")  # the footer's length, its CRC-32, magic
MAGIC = b"LKUPSEG1"


def record_path(opened: Opened, name: str = "s", table: str = "t") -> Path:
    return opened.root / "records" / "segment" / f"{table}-{name}"


def content(opened: Opened, name: str = "s", table: str = "t") -> dict[str, bytes] | None:
    """The regions of a segment; None if it cannot be had."""
    opened_segment = opened.disk.open_segment(table, name)
    return None if opened_segment is None else {key: bytes(region) for key, region in opened_segment.regions.items()}


def rewrite(path: Path, edit: Callable[[bytes], bytes] = bytes, is_visible: bool = True) -> None:
    """Change a file's bytes in place, as a failing disk does; its time of change tells it, or not."""
    status, blob = path.stat(), edit(path.read_bytes())
    with open(path, "r+b") as file:
        file.write(blob)
        file.truncate(len(blob))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 12_345 * is_visible))


def layout(path: Path) -> dict[str, tuple[int, int]]:
    """(offset, length) of each region, read as the format is documented."""
    blob = path.read_bytes()
    length, crc, magic = TAIL.unpack(blob[-TAIL.size :])
    text = blob[-TAIL.size - length : -TAIL.size]
    assert (magic, blob[:8], zlib.crc32(text)) == (MAGIC, MAGIC, crc)
    footer = json.loads(text)
    assert set(footer) == {"meta", "regions"}
    for offset, size, of in footer["regions"].values():
        assert zlib.crc32(blob[offset : offset + size]) == of
    return {name: (offset, size) for name, (offset, size, _) in footer["regions"].items()}


def test_a_segment_is_what_was_published(opened: Opened) -> None:
    """Regions and meta come back as they were, in any opener, by table and name; the file is as documented, and private to its user."""
    path = published(opened)
    regions = layout(path)
    assert {name: size for name, (_, size) in regions.items()} == {name: len(data) for name, data in REGIONS.items()}
    assert all(offset % 64 == 0 for offset, _ in regions.values())
    assert [stat.S_IMODE(place.stat().st_mode) for place in (path, path.parent)] == [0o600, 0o700]
    for disk in (opened.disk, Opened(opened.root.parent).disk):
        opened_segment = disk.open_segment("t", "s")
        assert {key: bytes(region) for key, region in opened_segment.regions.items()} == REGIONS
        assert opened_segment.meta == META
        assert opened_segment.bytes == path.stat().st_size
        assert all(region.readonly for region in opened_segment.regions.values())
        assert disk.open_segment("t", "other") is disk.open_segment("other", "s") is None
    assert opened.disk.usage() == Usage(0, on_disk(path.stat().st_size), on_disk(record_path(opened).stat().st_size))
    assert opened.disk.usage().total == opened.disk.used_bytes()


@fuzzed(24)
@given(data=st.data())
def test_regions_written_in_any_pieces(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Regions may be written in any pieces, in turns, and more of them added at the end."""
    opened = Opened(tmp_path_factory.mktemp("segments") / "cache")
    names = st.text(st.characters(codec="utf-8"), max_size=5)
    regions = data.draw(st.dictionaries(names, st.binary(max_size=200), max_size=5))
    added = data.draw(st.dictionaries(names.map("+".__add__), st.binary(max_size=100), max_size=3))
    added = {name: blob for name, blob in added.items() if name not in regions}
    unwritten = dict(regions)
    with writing(opened, {name: len(blob) for name, blob in regions.items()}) as writer:
        while any(unwritten.values()):
            name = data.draw(st.sampled_from(sorted(name for name, blob in unwritten.items() if blob)))
            size = data.draw(st.integers(1, len(unwritten[name])))
            writer.append(name, b"")
            writer.append(name, unwritten[name][:size])
            unwritten[name] = unwritten[name][size:]
        for name, blob in added.items():
            writer.add(name, blob)
    assert content(opened) == {**regions, **added}
    rewrite(segment_path(opened))  # what is read through
    assert content(opened) == {**regions, **added}


USES: dict[str, Callable[[OpenSegment], Any]] = {
    "the segment": lambda found: found,
    "a region": lambda found: found.regions["two"],
    "an empty region": lambda found: found.regions["none"],
    "a numpy array": lambda found: np.frombuffer(found.regions["one"], np.uint8),
    "a slice of an Arrow buffer": lambda found: pa.py_buffer(found.regions["one"]).slice(5, 2),
}


def test_a_segment_in_use_is_not_removed(opened: Opened) -> None:
    """Whatever part of a segment somebody holds pins it until it is dropped; a table's segments are listed by name, and go with their records."""
    paths = {use: published(opened, str(number)) for number, use in enumerate(USES)}
    published(opened, "other", "u")
    assert opened.disk.segments("t") == [path.name for path in paths.values()]
    uses: list[Any] = []
    for path, use in zip(paths.values(), USES.values(), strict=True):
        opened_segment = opened.disk.open_segment("t", path.name)
        uses.append(use(opened_segment))
        del opened_segment
    gc.collect()
    for use, path in paths.items():
        for disk in (opened.disk, Opened(opened.root.parent).disk):
            assert not disk.remove_segment("t", path.name), use
        assert path.exists()
        assert record_path(opened, path.name).exists()
        assert content(opened, path.name) == REGIONS
    uses.clear()
    gc.collect()
    for use, path in paths.items():
        for _ in range(2):
            assert opened.disk.remove_segment("t", path.name), use
            assert not (path.exists() or record_path(opened, path.name).exists())
    assert (opened.disk.segments("t"), opened.disk.segments("u")) == ([], ["other"])
    segment_path(opened, "directory").mkdir()
    assert not opened.disk.remove_segment("t", "directory")  # it is not ours


def test_a_table_in_use_is_marked_once_a_minute(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any of the host's processes marks it. Between marks, a use costs no system call. A clock that was set back does not stop the marks."""
    table = segment_path(opened).parent
    table.mkdir()
    peer, at_s = Opened(opened.root.parent, clock=opened.clock), opened.clock.wall_s
    marks: list[float] = []
    utime, lstat = os.utime, os.lstat
    looks: list[str] = []
    monkeypatch.setattr(os, "utime", lambda path, times: (marks.append(times[0] - at_s), utime(path, times)))
    monkeypatch.setattr(os, "lstat", lambda path, **more: (looks.append(str(path)), lstat(path, **more))[1])
    for disk, later_s in ((opened, 61), (opened, 60), (peer, 0), (opened, 2), (peer, 0), (opened, -500), (peer, 0)):
        opened.clock.wall_s += later_s
        disk.disk.use_table("t")
    assert marks == pytest.approx([61, 123, -377], abs=1)
    assert looks.count(str(table)) == 6
    shutil.rmtree(table)
    opened.disk.use_table("t")
    opened.clock.wall_s += 100
    opened.disk.use_table("t")


def fill(opened: Opened) -> None:
    """Ask for more space than there is, so that everything goes that can be evicted."""
    with contextlib.suppress(OSError):
        opened.disk.take("segments", 2**40)


def test_a_derived_segment_goes_before_the_table(opened: Opened) -> None:
    """A derived segment is removed for other segments, but not while it is mapped, and not for blocks."""
    names = "derived-a-s", "derived-b-s", "s"
    for name in names:
        published(opened, name)
    mapped = opened.disk.open_segment("t", "derived-b-s")
    with contextlib.suppress(OSError):
        opened.disk.take("blocks", 2**40)
    assert opened.disk.segments("t") == list(names)
    opened.disk.check_room(opened.disk.budget() - opened.disk.budget() // 16 - 2 * 4096 - opened.disk.usage().records)
    fill(opened)
    assert opened.disk.segments("t") == ["derived-b-s", "s"]
    assert {key: bytes(region) for key, region in mapped.regions.items()} == REGIONS


UPKEEP: dict[str, Callable[[Opened], object]] = {
    "clear": lambda opened: opened.disk.clear(), "check": lambda opened: opened.disk.check(repair=True),
    "sweep": lambda opened: opened.disk.sweep(), "supersede": lambda opened: opened.disk.supersede_segments("t", ["s"]),
    "discard": lambda opened: opened.disk.discard_segment("t", "s"),
    "unlink": lambda opened: opened.disk.unlink_segment("t", "s"), "publish again": published, "no room": fill,
    "another's opening, which finds it damaged": lambda opened: Opened(opened.root.parent).disk.open_segment("t", "s"),
    "the directory's removal": lambda opened: shutil.rmtree(opened.root.parent),
}  # fmt: skip


@pytest.mark.parametrize("damaged", [False, True])
def test_upkeep_shortens_no_file_in_place(opened: Opened, damaged: bool) -> None:
    """Whatever removes or replaces files of the cache directory, a process that has one mapped reads its old content and is not killed."""
    for name, act in UPKEEP.items():
        segment = published(opened)
        opened.disk.open_numbers("t", "s", 7, create=True)
        opened.disk.put_blocks({key(1, 5000): bytes(5000)})
        mapped = opened.disk.open_segment("t", "s")
        if damaged:
            rewrite(segment, in_footer)
        files = [path for kind in ("blocks", "snapshots") for path in (opened.root / kind).rglob("*") if path.is_file()]
        with contextlib.ExitStack() as stack:
            handles = [stack.enter_context(path.open("rb")) for path in files]
            before = [file.read() for file in handles]
            opened.clock.tick(100 * 86400)
            act(opened)
            assert [os.pread(file.fileno(), 2**20, 0) for file in handles] == before, name
        assert {key: bytes(region) for key, region in mapped.regions.items()} == REGIONS
        del mapped


def in_footer(blob: bytes) -> bytes:
    return flipped(blob, (len(blob) - TAIL.size - 20) * 8 + 3)


def in_region(blob: bytes) -> bytes:
    return flipped(blob, blob.index(REGIONS["two"]) * 8 + 8 * 76)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    **disks.BLOCK_DAMAGE, "noise": lambda blob: random_data(9, len(blob)), "footer flipped": in_footer,
    "footer's length flipped": lambda blob: flipped(blob, (len(blob) - TAIL.size + 7) * 8),
    "footer's checksum flipped": lambda blob: flipped(blob, (len(blob) - TAIL.size + 8) * 8),
    "region flipped": in_region, "another's regions": lambda blob: blob.replace(REGIONS["one"], random_data(4, 1000)),
}  # fmt: skip


def test_a_damaged_segment_is_absent(opened: Opened) -> None:
    """A segment whose file was changed in any way is counted, removed and absent; others are not touched, and its place is free."""
    published(opened, "sound")
    for number, (damage, edit) in enumerate(DAMAGE.items(), 1):
        path = published(opened)
        rewrite(path, edit)
        for _ in range(2):
            assert opened.disk.open_segment("t", "s") is None, damage
            assert opened.count("snapshotDamagedCount") == number
        assert not path.exists()
        assert not record_path(opened).exists()
        assert content(opened, "sound") == REGIONS
        published(opened)
        assert content(opened) == REGIONS
    assert opened.count("cacheFailureCount") == 0


def reads_regions(opened: Opened) -> bool:
    """Whether opening reads the regions through: only then is a change noticed that leaves the file's time as it was."""
    path = segment_path(opened)
    blob = path.read_bytes()
    rewrite(path, in_region, is_visible=False)
    regions = content(opened)
    assert regions is None or regions["two"] == flipped(REGIONS["two"], 8 * 76)
    if regions is not None:
        rewrite(path, lambda _: blob, is_visible=False)
    return regions is None


def test_regions_are_verified_once(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that did not change since it was written or read through is not read through again, nor by whoever waits for its removal."""
    path = published(opened)
    monkeypatch.setattr(directory, "_LOCK_WAIT_S", 0.0)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert content(opened) == REGIONS
    assert not reads_regions(opened)
    rewrite(path)
    assert content(opened) == REGIONS  # read through, and recorded
    assert not reads_regions(opened)
    assert content(opened) == REGIONS
    rewrite(path, in_footer, is_visible=False)  # which is read at every opening
    assert content(opened) is None
    assert opened.count("snapshotDamagedCount") == 1


RECORD_LOSSES: dict[str, Callable[[Opened], object]] = {
    "gone": lambda opened: record_path(opened).unlink(),
    "damaged": lambda opened: record_path(opened).write_bytes(b"noise"),
    "of another file": lambda opened: opened.disk.replace_record("segment", "t-s", [1, 2, 3]),
    "of another time": lambda opened: rewrite(segment_path(opened)),
    "of another inode": lambda opened: os.replace(
        shutil.copy2(segment_path(opened), opened.root / "tmp" / "copy"), segment_path(opened)
    ),
}


def test_without_its_record_a_segment_is_read_through(opened: Opened) -> None:
    """Without a record of this very file a segment is read through, and recorded or found damaged; each time, if it cannot be recorded."""
    for number, lose in enumerate(RECORD_LOSSES.values()):
        published(opened)
        lose(opened)
        assert content(opened) == REGIONS
        assert opened.count("snapshotDamagedCount") == number
        assert not reads_regions(opened)
        lose(opened)
        assert reads_regions(opened)
        assert opened.count("snapshotDamagedCount") == number + 1
        assert not segment_path(opened).exists()
    published(opened)
    record_path(opened).unlink()
    shutil.rmtree(opened.root / "tmp")
    (opened.root / "tmp").symlink_to(opened.root.parent)
    for _ in range(2):
        assert content(opened) == REGIONS
    assert not record_path(opened).exists()
    assert opened.count("snapshotDamagedCount") == len(RECORD_LOSSES)


def test_check_reads_every_region(opened: Opened) -> None:
    """`check` finds damaged segments whatever their records say, changes nothing, and with `repair` removes them."""
    sound = published(opened, "sound", "u")
    for n, damage in enumerate(DAMAGE.values()):
        rewrite(published(opened, f"s{n:02}"), damage, is_visible=False)
    (opened.root / "snapshots" / "t" / "foreign").write_bytes(b"planted")
    bad = (*(f"snapshots/t/{name}" for name in ["foreign", *(f"s{n:02}" for n in range(len(DAMAGE)))]),)
    for repair in (False, True):
        assert opened.disk.check(repair).damaged == bad
    assert opened.disk.check().damaged == ()
    assert opened.disk.segments("t") == []
    assert sound.exists()
    assert content(opened, "sound", "u") == REGIONS
    assert opened.count("snapshotDamagedCount") == 0


def mappings() -> list[list[str]]:
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/snapshots/" in line]
    return [[words[1], words[4]] for words in lines]


def holder(root: Path, held_segment: OpenSegment | None, pipe: Any) -> None:
    """Holds a segment (inherited, or opened here) until told otherwise; tells what it sees."""
    if held_segment is None:
        held_segment = Opened(root).disk.open_segment("t", "s")
    assert {key: bytes(region) for key, region in held_segment.regions.items()} == REGIONS
    pipe.send(mappings())
    pipe.recv()


def share_and_pin(root: Path) -> None:
    context = multiprocessing.get_context("fork")
    opened = Opened(root)
    path = published(opened)
    for inherited, killed in itertools.product((False, True), repeat=2):
        held_segment = opened.disk.open_segment("t", "s") if inherited else None
        parent_end, child_end = context.Pipe()
        child = context.Process(target=holder, args=(root, held_segment, child_end))
        child.start()
        # Read-only and shared: the same pages of memory in every process.
        assert parent_end.recv() == [["r--s", str(path.stat().st_ino)]]
        held_segment = None
        gc.collect()
        assert mappings() == []
        assert not opened.disk.remove_segment("t", "s")
        assert content(opened) == REGIONS
        if killed:
            child.kill()
            child.join()
        else:
            parent_end.send(None)
            must_end([child])
        assert opened.disk.remove_segment("t", "s")
        published(opened)
    # A child that drops what it inherited does not unpin it for its parent.
    held_segment = opened.disk.open_segment("t", "s")
    child = context.Process(target=gc.collect)
    child.start()
    must_end([child])
    assert not opened.disk.remove_segment("t", "s")
    assert bytes(held_segment.regions["one"]) == REGIONS["one"]


def test_processes_share_and_pin(cache_dir: Path) -> None:
    """Processes map the same pages; whoever opened or inherited a segment pins it for all until it ends or is killed."""
    in_fresh_process(share_and_pin, cache_dir)
