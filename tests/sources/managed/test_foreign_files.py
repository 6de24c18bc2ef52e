"""Files of others in a managed table's directory: no operation removes or overwrites one, nor writes through a link."""

import contextlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import UfsError
from pyspark_lookup.sources.managed.log import WriteMode
from tests.support.managed_tables import OFF, SCHEMA, Site, aged, list_ids, rows, write_ids
from tests.support.s3server import S3Server

FOREIGN_NAMES = ("notes.txt", "data.parquet", "part-00000-0123456789abcdef.parquet", ".hidden", "deletes-0123456789abcdef.parquet")  # fmt: skip


def add_directory(place: Path, private: Path) -> None:
    """A directory of somebody's, with hard links to their files."""
    place.mkdir(parents=True)
    for name in FOREIGN_NAMES:
        os.link(private / name, place / name)


FOREIGN: dict[str, Callable[[Path, Path], None]] = {"a link": Path.symlink_to, "a directory": add_directory}


def aborted(site: Site) -> None:
    writer = site.writer(OFF)
    job = writer.begin(SCHEMA, WriteMode.APPEND)
    try:
        write_ids(writer, job, 7)
    finally:
        writer.abort(job, ())


def died(site: Site) -> None:
    """A write that another one finds dead, and aborts."""
    writer = site.writer({**OFF, "lookup.write.timeout": "10 min"})
    job = writer.begin(SCHEMA, WriteMode.APPEND)
    for _ in range(4):
        site.clock.tick(6 * 60)
        writer.abort(writer.begin(SCHEMA, WriteMode.APPEND), ())
    assert job.write_id not in [write.id for write in site.state().open_writes()]


OPERATIONS: dict[str, Callable[[Site], object]] = {
    "append": lambda site: site.table(OFF).write(rows(7)),
    "upsert": lambda site: site.table(OFF).upsert(rows(1, 7, name="b")),
    "overwrite": lambda site: site.table(OFF).write(rows(7), "overwrite"),
    "delete": lambda site: site.table(OFF).delete(pa.table({"id": [1]})),
    "compact": lambda site: site.table(OFF).compact(),
    "a batch": lambda site: site.table({**OFF, "lookup.write.batch": "q:1"}).write(rows(7)),
    "abort": aborted,
    "a dead write": died,
    "vacuum": lambda site: site.table(OFF).vacuum(older_than="0 s", force=True),
}


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def make_private(directory: Path) -> dict[str, bytes]:
    """A directory of somebody's files; its contents."""
    directory.mkdir()
    for name in FOREIGN_NAMES:
        (directory / name).write_bytes(b"precious")
    return contents(directory)


PLACES: dict[str, tuple[Callable[[Path, int], list[Path]], tuple[str, ...]]] = {
    "a write's directory": (
        lambda path, next_: [path / f"write-{number:020d}" for number in range(next_, next_ + 5)],
        ("append", "upsert", "overwrite", "delete", "compact", "abort", "a dead write", "vacuum"),
    ),
    "a stream's directory": (lambda path, next_: [path / "stream-q"], ("a batch", "vacuum")),
}
"""Where others may put something: the paths, given the next write id, and what may meet it there."""


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize(
    ("place", "operation"),
    [(place, operation) for place, (_, operations) in PLACES.items() for operation in operations],
)
def test_foreign_files_stay(site: Site, tmp_path: Path, place: str, kind: str, operation: str) -> None:
    """Whatever lies where a write will put its files is not changed; the write succeeds beside it, or its error names the place."""
    before = make_private(tmp_path / "private")
    site.created(OFF).write(rows(1, 2))
    site.table(OFF).write(rows(3))
    foreign = PLACES[place][0](site.path, site.state().high_watermark + 1)
    for path in foreign:
        FOREIGN[kind](path, tmp_path / "private")
    planted = {path: os.lstat(path).st_ino for path in (*foreign, *site.path.rglob("notes.txt"))}
    if operation == "vacuum":
        aged(site, 8)
    try:
        OPERATIONS[operation](site)
    except UfsError as problem:
        assert kind != "a directory"
        message = "(write-[0-9]{20}|stream-q)( is a link or a file where a directory should be)"
        assert re.search(message, str(problem))
    assert contents(tmp_path / "private") == before
    assert {path: os.lstat(path).st_ino for path in planted} == planted
    ids = list_ids(site.table(host="look").scan())
    assert ids in ([1, 2, 3], [2, 3], [1, 2, 3, 7], [7])
    for path in foreign:
        if kind == "a directory":
            # Vacuum, when they are old enough, knows files of earlier releases by their names alone.
            stay = FOREIGN_NAMES if operation != "vacuum" else [name for name in FOREIGN_NAMES if "0123" not in name]
            assert set(stay) <= {path.name for path in path.iterdir()}


def test_objects_of_others_below_a_write_stay(s3: S3Server) -> None:
    """What others have put below the prefix of a write stays as it commits, and as it is aborted, as on a disk."""
    s3.client.create_bucket(Bucket="others")
    keys = [f"t/write-{number:020d}/{name}" for number in range(1, 4) for name in FOREIGN_NAMES]
    table = LookupTable("s3://others/t", {"lookup.keys": "id", "lookup.storage.endpoint_url": s3.endpoint})
    table.write(rows())
    for key in keys:
        s3.client.put_object(Bucket="others", Key=key, Body=b"precious")
    table.write(rows(1))
    with pytest.raises(ZeroDivisionError), table.transaction() as transaction:
        transaction.write(rows(2))
        raise ZeroDivisionError
    remaining_keys = [
        entry["Key"] for entry in s3.client.list_objects_v2(Bucket="others", Prefix="t/write")["Contents"]
    ]
    assert set(keys) <= set(remaining_keys)
    assert len(remaining_keys) == len(keys) + 1  # what was aborted is gone


STEPS = {"open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "os.listdir"}
_attack: list[Callable[[], None]] = []
_hooked: list[bool] = []


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _attack and event in STEPS:
        _attack[-1]()


@contextlib.contextmanager
def at_step(number: int, attack: Callable[[], None]) -> Iterator[list[int]]:
    """Run `attack` ahead of the step with that number in the block; [how many steps are left until then]."""
    if not _hooked:  # a hook stays for good
        sys.addaudithook(_audit)
        _hooked.append(True)
    countdown, me = [number], threading.get_ident()

    def step() -> None:
        if threading.get_ident() == me:
            countdown[0] -= 1
            if countdown[0] == 0:
                _attack.clear()
                attack()

    _attack[:] = [step]
    try:
        yield countdown
    finally:
        _attack.clear()


BY_NIGHT = [
    pytest.param(operation, 1, marks=pytest.mark.nightly) for operation in ("append", "abort", "delete", "overwrite")
]


@pytest.mark.parametrize(("operation", "stride"), [("append", 11), *BY_NIGHT])
def test_a_link_that_comes_at_any_step(site: Site, tmp_path: Path, operation: str, stride: int) -> None:
    """A link to a private directory takes the place of a write's between any two steps of it: nothing gets there, nor goes from there."""
    private = tmp_path / "private"
    before = make_private(private)
    site.created(OFF).write(rows(1, 2))
    step = 1
    while True:
        directory = site.path / f"write-{site.state().high_watermark + 1:020d}"

        def attack(directory: Path = directory) -> None:
            for file in directory.glob("*") if directory.exists() else ():
                (private / file.name).write_bytes(b"precious")  # the names that the write has given, too
                before[file.name] = b"precious"
            with contextlib.suppress(FileNotFoundError):
                directory.rename(f"{directory}.moved")
            directory.symlink_to(private)

        with at_step(step, attack) as countdown, contextlib.suppress(UfsError):
            OPERATIONS[operation](site)
        assert contents(private) == before, step
        if countdown[0] > 0:
            break
        shutil.rmtree(f"{directory}.moved", ignore_errors=True)
        step += stride
        site.restart()
        site.table(OFF).write(rows(1, 2), "overwrite")
    assert step > 20
