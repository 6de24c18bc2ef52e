"""Jobs that write a table of files: what is read meanwhile, for how long is waited, and which of them are dead."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.errors import TableBusyError, TableEmptyError, UfsNotFoundError
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.storage.stores import open_store
from tests.support.fakes import CACHES, FakeClock, make_host
from tests.support.managed_tables import Site
from tests.support.s3server import S3Server

JOBS = ["__magic_job-1/tasks", "_temporary/0/_temporary/attempt_1", ".spark-staging-8c1f/p=1", ".staging_1754500000000"]
MODES = {**CACHES, "cached": {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "0"}}
KEYED = {"lookup.keys": "id"}


class Dim:
    """A directory of files, in the test's time, and the jobs that write it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.write_file("a", 1)

    def write_file(self, name: str, *ids: int, large: int = 0) -> Path:
        path = self.site.path / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = pa.table({"id": list(ids), "name": [name] * len(ids), "filler": [os.urandom(large)] * len(ids)})
        pq.write_table(rows, path, compression="none")
        self.touch(path, -10)
        return path

    def touch(self, path: Path, seconds: float = 0) -> None:
        at_s = self.site.clock.wall_s + seconds
        os.utime(path, (at_s, at_s))

    def begin(self, name: str = "_temporary") -> None:
        """Begin a job, which has changed something just now."""
        (self.site.path / name).mkdir(parents=True)
        for path in [self.site.path / name, *(self.site.path / name).parents]:
            if path.is_relative_to(self.site.path):
                self.touch(path)

    def end(self, name: str = "_temporary") -> None:
        shutil.rmtree(self.site.path / name.split("/", 1)[0])

    def beside(self, action: Callable[[], None], listings: int = 2) -> None:
        """Have something happen once the directory was listed so many times from now."""
        countdown = [listings]

        def count_listings(kind: str, subject: object) -> None:
            if kind in ("list", "status"):
                countdown[0] -= 1
                if countdown[0] == 0:
                    action()

        for store in self.site.stores:
            store.before = count_listings


@pytest.fixture
def dim(site: Site) -> Dim:
    return Dim(site)


def ids(rows: pa.Table) -> list[int]:
    return sorted(rows.column("id").to_pylist())


@pytest.mark.parametrize(("mode", "job"), [*zip(MODES, JOBS, strict=True)])
def test_while_a_job_writes_the_last_version_is_current(
    dim: Dim, mode: str, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Every mode goes on with the version it knows, and says so once; with lookup.on-busy=FAIL it fails at once, but in CACHE mode."""
    table = dim.site.table({**KEYED, **MODES[mode]})
    failing = dim.site.table({**KEYED, **MODES[mode], "lookup.on-busy": "FAIL"}, host="failing")
    assert ids(table.scan()) == ids(failing.scan()) == [1]
    version = table.version
    dim.begin(job)
    dim.write_file("b", 2)  # by a task of a committer that puts files before the job has ended
    for _ in range(3):
        assert (ids(table.scan()), table.get(2), table.version) == ([1], [], version)
    assert [row["name"] for row in table.get(1)] == ["a"]
    assert table.metrics()["busyServedCount"] >= 7
    directory = job.split("/", maxsplit=1)[0]
    assert sum(f"holds {directory}" in record.getMessage() for record in caplog.records) == 1
    with contextlib.nullcontext() if mode == "cached" else pytest.raises(TableBusyError, match=directory):
        assert ids(failing.scan()) == [1]
    assert dim.site.clock.slept == []
    dim.end(job)
    assert (ids(table.scan()), len(table.get(2))) == ([1, 2], 1)


def test_a_host_that_knows_no_version_waits(dim: Dim) -> None:
    """A host that knows no version answers as soon as the job has ended; after lookup.busy-wait it fails, and names the job's directory."""
    dim.begin("_temporary/0")
    with pytest.raises(TableBusyError, match="_temporary"):
        dim.site.table({"lookup.busy-wait": "2 s"}, host="new").scan()
    assert sum(dim.site.clock.slept) == pytest.approx(2)
    dim.site.clock.slept.clear()
    dim.write_file("b", 2)
    dim.beside(dim.end, listings=4)
    assert ids(dim.site.table(host="new").scan()) == [1, 2]
    assert 0 < sum(dim.site.clock.slept) < 5


def test_a_dead_job_is_ignored(dim: Dim, caplog: pytest.LogCaptureFixture) -> None:
    """A job is dead if nothing in its directory has changed for lookup.busy-timeout, by the store's clock; a warning names it, once."""
    table = dim.site.table()
    table.scan()
    dim.begin("_temporary/0")
    dim.write_file("b", 2)
    dim.site.clock.tick(599)
    assert ids(table.scan()) == [1]
    dim.touch(dim.site.path / "_temporary/0")  # it lives
    dim.site.clock.tick(599)
    assert ids(table.scan()) == [1]
    dim.site.clock.tick(1)
    for reader in (table, table, dim.site.table(host="new")):
        assert ids(reader.scan()) == [1, 2]
    dead = [record.getMessage() for record in caplog.records if "its job counts as dead" in record.getMessage()]
    assert len(dead) == 2  # one of each host's engine
    assert all(f"{dim.site.path}/_temporary" in message for message in dead)
    dim.begin(".spark-staging-2")
    dim.write_file("c", 3)
    assert ids(table.scan()) == [1, 2]  # another job is alive
    assert ids(dim.site.table({"lookup.busy-timeout": "0 s"}, host="b").scan()) == [1, 2, 3]


@pytest.mark.parametrize("mode", ["NONE", "PARTIAL", "FULL"])
@pytest.mark.parametrize("remains", ["nothing", "an empty directory"])
def test_a_table_that_has_gone_is_waited_for_once(dim: Dim, mode: str, remains: str) -> None:
    """Queries wait until `lookup.busy-wait` after the first one found the table gone, no longer; and again for one that came back."""
    dim.site.table({**KEYED, **MODES[mode]}).scan()

    def waited_s() -> float:
        dim.site.restart()  # each attempt is in another process
        dim.site.clock.slept.clear()
        with pytest.raises((UfsNotFoundError, TableEmptyError), match="table"):
            dim.site.table({**KEYED, **MODES[mode]}).get(1)
        return sum(dim.site.clock.slept)

    def remove() -> None:
        shutil.rmtree(dim.site.path)
        if remains != "nothing":
            dim.site.path.mkdir()

    remove()
    assert [waited_s() for _ in range(4)] == [pytest.approx(30), 0, 0, 0]
    dim.write_file("b", 2)
    table = dim.site.table({**KEYED, **MODES[mode]})
    assert ids(table.scan()) == [2]
    dim.site.clock.tick(5)
    remove()
    dim.beside(dim.begin, listings=3)
    assert ids(table.scan()) == [2]  # a job has begun, and the bytes are here
    dim.end()
    assert waited_s() == pytest.approx(30)


def test_the_clock_of_an_object_store(s3: S3Server) -> None:
    """On S3 a job's last change, and the time that it is compared with, are what the store says."""
    s3.client.create_bucket(Bucket="busy")
    s3.client.put_object(Bucket="busy", Key="t/_temporary/0/x", Body=b"x")
    store = open_store("s3://busy/t", {"endpoint_url": s3.endpoint}, lambda: 0.0)
    changed_s, now_s = store.last_change_s("s3://busy/t/_temporary", lambda kind: None)
    assert 0 <= now_s - changed_s < 60
    with pytest.raises(UfsNotFoundError):
        store.last_change_s("s3://busy/t/none", lambda kind: None)
    s3.client.put_object(Bucket="busy", Key="u/a.parquet", Body=b"x")
    options = parse_options({"path": "s3://busy/u", "lookup.settle": "1 h", "lookup.on-busy": "FAIL"})
    clock = FakeClock()  # decades ahead
    host = make_host("s3://busy/u", None, clock, storage={"endpoint_url": s3.endpoint})
    with pytest.raises(TableBusyError, match=r"lookup\.settle"):
        host.resolver.discover(options)
    assert 3540 < clock.slept[0] <= 3600
