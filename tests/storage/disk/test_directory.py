"""A cache directory that goes away, in part or as a whole, while it is in use; and directories that are not ours."""

import contextlib
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.cli import main
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.errors import OptionError
from pyspark_lookup.lookup import lookup_table
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.storage.disk.directory import INNER, MARKER
from tests.support.data_files import write_parquet
from tests.support.disks import Opened, key, random_data
from tests.support.fakes import CACHES


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(root: Path) -> set[int]:
    return {stat.S_IMODE(os.lstat(directory).st_mode) for directory, _, _ in os.walk(root)}


def replaced_by_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"x")


LOSSES: dict[str, Callable[[Path], object]] = {
    "all": shutil.rmtree,
    "with those above": lambda root: shutil.rmtree(root.parent),
    "the layout": lambda root: shutil.rmtree(root / "v1"),
    **{f"{name}/": lambda root, name=name: shutil.rmtree(root / "v1" / name) for name in INNER},  # type: ignore[misc]
    **{f"a file for {name}/": lambda root, name=name: replaced_by_a_file(root / "v1" / name) for name in INNER},  # type: ignore[misc]
    "a file for a kind of records": lambda root: replaced_by_a_file(root / "v1/records/version"),
    "the marker": lambda root: (root / "v1" / MARKER).unlink(),
    "all files": lambda root: [path.unlink() for path in root.rglob("*") if path.is_file()],
    "what is empty": lambda root: [shutil.rmtree(root / "v1" / name) for name in ("locks", "tmp", "claims")],
    "a layout open to readers": lambda root: (root / "v1").chmod(0o755),
    "a kind open to all": lambda root: (root / "v1/records").chmod(0o777),
    "a root open to all": lambda root: root.chmod(0o777),
}


def use(opened: Opened, number: int) -> None:
    """Use a cache directory in all the ways of a process, each of which must do what it says."""
    disk = opened.disk
    steps: list[Callable[[], object]] = [
        lambda: (
            disk.put_blocks({key(number): random_data(number)}) or disk.get_block(key(number)) == random_data(number)
        ),
        lambda: disk.create_record("version", f"k{number}", number) == number,
        lambda: disk.replace_record("version", "r", number) or disk.get_record("version", "r") == number,
        lambda: disk.succeed_record("table", "t", disk.newest_record("table", "t")[0], number),
        lambda: released(disk.create_claim("space", "group", b"x")) and disk.claims("space", "group") == [],
        lambda: released(disk.acquire("block", f"{number}", 0)),
        lambda: segment(opened, f"s{number}"),
        lambda: disk.open_numbers("0" * 32, f"n{number}", 4, create=True) is not None,
        lambda: disk.new_counters(f"t{number}-", {"url": "/t"}, {"a": 1}) and len(disk.counters(f"t{number}-")) == 1,
        lambda: opened.clock.tick(700) or disk.sweep() or True,
        lambda: disk.usage().total >= 0,
        lambda: disk.check().damaged == (),
    ]
    for step in steps[number % len(steps) :] + steps[: number % len(steps)]:
        assert step()


def released(lock: object) -> bool:
    lock.release()  # type: ignore[attr-defined]
    return True


def segment(opened: Opened, name: str) -> bool:
    table = "0" * 32
    writer = opened.disk.create_segment({"r": 1})
    writer.append("r", b"x")
    writer.finish({})
    opened.disk.publish_segment(table, name, writer)
    writer.close()
    return opened.disk.open_segment(table, name) is not None


@pytest.mark.parametrize(
    ("loss", "mask"), [*((loss, 0) for loss in LOSSES), *((loss, 0o027) for loss in ("all", "the layout", "tmp/"))]
)
def test_what_is_lost_is_made_again(tmp_path: Path, loss: str, mask: int) -> None:
    """Whatever went away, and whoever comes first, whatever for: everything goes on, and each directory has the mode 0700."""
    root = tmp_path / "above" / "cache"
    with umask(mask):
        living = Opened(root, 2**30 if mask else None)
        use(living, 0)
        for number in range(1, 13, 4 if loss.endswith("/") or mask else 2):
            LOSSES[loss](root)
            use(living, number)
            # What is open is closed by who makes or opens something.
            assert modes(root) == {0o700} or (loss.endswith(("all", "readers")) and loss != "all")
            use(Opened(root), 100 + number)
            assert modes(root) == {0o700}
            assert {path.name for path in (root / "v1").iterdir()} >= {*INNER, MARKER}
    assert living.count("cacheFailureCount") == 0


PLACES = {
    "blocks": ("blocks", f"blocks/{key(5).path_key[:2]}", f"blocks/{key(5).path_key[:2]}/{key(5).path_key}"),
    "records": ("records/version", "records/table~t", "records/segment"),
    "others": ("locks", "tmp", "counters", "claims/space", f"snapshots/{'0' * 32}"),
    "files": ("usage", "usage.lock", "swept", "evict.lock", "locks/block-000", f"snapshots/{'0' * 32}/n5.used"),
}


@pytest.mark.parametrize("kind", ["a link", "a directory", "a pipe", "a hard link"])
@pytest.mark.parametrize("places", PLACES)
def test_what_lies_in_the_place_of_ours(tmp_path: Path, places: str, kind: str) -> None:
    """Links, directories, pipes and hard links at any level of the cache directory: nothing is put, changed or removed behind them."""
    private, root = tmp_path / "private", tmp_path / "cache"
    private.mkdir()
    for place in PLACES[places]:
        for name in ("letter", "0000000000000001", "k5", "r", "0-1000"):
            (private / name).write_bytes(b"dear")
            os.utime(private / name, (1, 1))
        before = read_tree(private)
        opened = Opened(root)
        planted = root / "v1" / place
        if planted.is_dir():
            planted.rmdir()
        planted.parent.mkdir(mode=0o700, exist_ok=True)
        planted.unlink(missing_ok=True)
        if kind == "a link":
            planted.symlink_to(private)
        elif kind == "a directory":
            planted.mkdir()
            os.link(private / "letter", planted / "letter")
        elif kind == "a pipe":
            os.mkfifo(planted)
        else:
            os.link(private / "letter", planted)
        with contextlib.suppress(OSError, AssertionError):  # what cannot be had; it is counted, or told
            use(opened, 5)
        for act in (opened.disk.sweep, lambda disk=opened.disk: disk.check(repair=True), opened.disk.clear):
            opened.clock.tick(100 * 86400)
            with contextlib.suppress(OSError):
                act()
        assert read_tree(private) == before, place
        assert {path.stat().st_mtime for path in private.iterdir()} == {1}, place
        shutil.rmtree(root)


RACE = """
import os, random, sys, time
from pathlib import Path
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.storage.disk import BlockKey, Disk, key_of
os.umask(0)
disk = Disk(Path(sys.argv[1]), 10**9, CacheMetricGroup(), time.time, random.Random(1))
print("ready", flush=True)
for number in range(100):
    disk.create_record("version", f"{os.getpid()}-{number}", 1)
    disk.put_blocks({BlockKey(key_of(number), key_of("v"), 0, 4): b"abcd"})
    disk.acquire("block", str(number), 10).release()
    disk.create_claim("space", "group", b"x").release()
    disk.new_counters(f"t-{os.getpid()}-{number}", {"url": "/t"}, {"a": 1}).close()
"""


def test_processes_go_on_while_it_is_removed_again_and_again(tmp_path: Path) -> None:
    """Whenever the directory goes, no process has an error, nor leaves anything that others may look into."""
    root = tmp_path / "cache"
    command = [sys.executable, "-c", RACE, str(root)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    for process in processes:
        process.stdout.readline()
    while any(process.poll() is None for process in processes):
        shutil.rmtree(root, ignore_errors=True)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
    assert [process.communicate()[1].decode() for process in processes] == ["", ""]
    Opened(root)
    assert modes(root) == {0o700}


def make_foreign(kind: str, root: Path) -> None:
    """A directory that is no cache of ours, or not only."""
    match kind:
        case "files with names of ours":
            for name in (
                "blocks/ab/x",
                "snapshots/t/part.parquet",
                "records/kind/x",
                "counters/x",
                "claims/a/b",
                "tmp/0123",
                "mine.txt",
            ):
                path = write_parquet(root / "v1" / name, id=[1, 2])  # among them what `check` would call damaged
                os.utime(path, (1, 1))
            (root / "v1/locks").mkdir()
        case "one file in what an earlier release has made":
            Opened(root)
            (root / "v1" / MARKER).unlink()
            (root / "v1/records/version").mkdir()
            (root / "v1/records/version/mine").write_bytes(b"mine")
        case "another program's cache":
            (root / "v1/blocks").mkdir(parents=True)
            (root / "v1" / MARKER).write_bytes(b"Signature: 8a477f597d28d172789f06886806bc55\n")
        case "a link to a cache of ours":
            Opened(root.parent / "other")
            (root / "v1").symlink_to(root.parent / "other" / "v1")


FOREIGN = [
    "files with names of ours", "one file in what an earlier release has made", "another program's cache",
    "a link to a cache of ours",
]  # fmt: skip


def main_code(*command: object) -> object:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, command[:-1]), "--cache-dir", str(command[-1])])
    return ended.value.code


COMMANDS = (["stats"], ["check", "--repair"], ["check"], ["clear"], ["report", "{}/report.html"], ["serve-metrics", "--textfile", "{}/metrics"])  # fmt: skip


def read_tree(root: Path) -> dict[str, tuple[int, int, bytes]]:
    paths = {str(path.relative_to(root)): path for path in root.rglob("*")}
    return {
        name: (path.lstat().st_ino, path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for name, path in paths.items()
    }


@pytest.mark.parametrize("kind", [*FOREIGN, "nothing"])
def test_a_directory_that_is_not_ours(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands about the host's cache make nothing in it, nor remove anything; queries go without a cache, or use what is empty."""
    root, out = tmp_path / "mine", tmp_path / "out"
    for path in (root, out):
        path.mkdir(mode=0o700)
    make_foreign(kind, root)
    monkeypatch.setenv("HOME", str(root))
    before = read_tree(tmp_path)
    for directory in (str(root), f"{root}/../mine", "~"):
        for command in COMMANDS:
            assert main_code(*(part.format(out) for part in command), directory) == 1
            assert "is not a cache directory of lookupcache" in capsys.readouterr().err
            assert read_tree(tmp_path) == before
    pq.write_table(pa.table({"id": [1, 2]}), out / "t.parquet")
    options = {"lookup.keys": "id", "lookup.cache.dir": str(root), **CACHES["FULL"]}
    runtime = Runtime(HostClock(), random.Random(1))
    monkeypatch.setattr(lookup_table, "runtime", lambda: runtime)
    table = LookupTable(str(out / "t.parquet"), options)
    assert table.get(1) == [{"id": 1}]
    if kind == "nothing":
        assert table.warm()
        assert main_code("check", root) == 0
    else:
        with pytest.raises(OptionError, match=r"lookup.cache = 'FULL' keeps its snapshots on disk: .*v1"):
            table.warm()
        assert [entry for entry in read_tree(tmp_path).items() ^ before.items() if not entry[0].startswith("out")] == []


def test_a_cache_of_an_earlier_release_is_adopted(tmp_path: Path) -> None:
    """A process that uses the cache adopts it, if nothing lies in it but what such a release has put there; commands leave that to queries."""
    root = tmp_path / "cache"
    use(Opened(root), 1)
    (root / "v1" / MARKER).unlink()
    before = read_tree(root)
    assert main_code("clear", root) == 1
    assert read_tree(root) == before
    assert Opened(root).disk.get_block(key(1)) == random_data(1)
    assert main_code("clear", root) == 0
    assert [path for path in root.rglob("*") if path.is_file() and path.parent.name in ("version", "blocks")] == []


APART = {
    "the table itself": ("t", "t"), "in the table": ("t", "t/cache"), "the table in it": ("c/t", "c"),
    "a file in it": ("c/v1/t.parquet", "c"), "by a link to the table": ("t", "link/cache"),
    "the table by a link": ("link", "t/cache"), "by dots": ("t", "other/../t/./cache"),
    "a URL": ("file:{}/t", "t/cache"), "a glob below it": ("t/{a,cache}/*/*", "t/cache"),
    "a glob in it": ("c/*/x.parquet", "c"),
}  # fmt: skip
"""The paths of a table and of a cache directory that do not go together, in a directory with `link` to its `t`."""


@pytest.mark.parametrize("how", APART)
def test_a_table_and_the_cache_lie_apart(tmp_path: Path, how: str) -> None:
    """A cache directory in a table, and a table in one, are refused, and nothing is made."""
    (tmp_path / "t").mkdir(mode=0o700)
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("t")
    pq.write_table(pa.table({"id": [1]}), tmp_path / "t" / "a.parquet")
    path, cache = (f"{{}}/{place}" if "{}" not in place else place for place in APART[how])
    before = read_tree(tmp_path)
    options = {"lookup.keys": "id", "lookup.cache.dir": cache.replace("{}", str(tmp_path))}
    table = LookupTable(path.replace("{}", str(tmp_path)), options)
    for ask in (table.scan, lambda: table.get(1), lambda: table.write([{"id": 2}])):
        with pytest.raises(OptionError, match=r"lies in the (table|cache directory) .*lookup\.cache\.dir"):
            ask()
    assert read_tree(tmp_path) == before


def test_a_cache_beside_the_table(tmp_path: Path) -> None:
    """Names that begin alike, and the parents of a file or of a glob's files, keep them apart."""
    write_parquet(tmp_path / "t" / "a.parquet", id=[1])
    for path, cache in (("t", "t2"), ("t", "u/t"), ("t/a.parquet", "t/c"), ("t/*.parquet", "t/cache")):
        beside = LookupTable(str(tmp_path / path), {"lookup.cache.dir": str(tmp_path / cache)})
        assert beside.scan().num_rows == beside.scan().num_rows == 1
