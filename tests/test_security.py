"""What docs/security.md claims: planted files, names that lead elsewhere, secrets. Its tables name the tests of this file."""

import contextlib
import logging
import os
import random
import re
import socket
import stat
import traceback
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable, errors, explain_lookup, lookup_join, register_lookup
from pyspark_lookup.lookup import runtime as runtime_module
from pyspark_lookup.lookup.metadata_tables import ViewTask, view_batches
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.options.conf_file import conf_file_options
from pyspark_lookup.options.enums import View
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.storage.disk.directory import INNER
from pyspark_lookup.storage.stores import open_store
from tests.support.data_files import write_parquet
from tests.support.disks import Opened, key, published, random_data
from tests.support.fakes import FakeClock, make_host
from tests.support.fuzzing import memory_at_most
from tests.support.sparks import DATA_SOURCES, needs
from tests.support.web_server import WebServer, web

__all__ = ["web"]
# A test that waits for a pipe, or reads a disk's worth of zeros, ends here, and not by the timeout of the run.
pytestmark = pytest.mark.timeout(60)
HUGE = 2**43  # bytes of a sparse file
TABLE = "0" * 32


def elsewhere(path: Path) -> Path:
    """A place beside the cache directory that a file lies in."""
    return next(above.parent for above in path.parents if above.name == "cache") / f"elsewhere-{path.name}"


def a_socket(path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{directory}/{path.name}")  # a socket cannot have a long path
    finally:
        os.close(directory)


def a_link(path: Path) -> None:
    """Replace a file by a link to it: right bytes, in a place that is not ours."""
    moved = elsewhere(path)
    moved.write_bytes(path.read_bytes() if path.exists() else b"")
    path.unlink(missing_ok=True)
    path.symlink_to(moved)


def a_huge_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


def a_huge_file_with_a_header(path: Path) -> None:
    head = path.read_bytes()[:36] if path.exists() else bytes(36)
    path.write_bytes(head[:8] + (HUGE - 36).to_bytes(8, "little") + head[16:])
    os.truncate(path, HUGE)


def anothers(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(path, 12345, 12345)


PLANTED: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo, "a socket": a_socket, "a directory": os.mkdir, "a link": a_link,
    "a dead link": lambda path: path.symlink_to("nowhere"),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"), "a huge file": a_huge_file,
    "a huge file with a header": a_huge_file_with_a_header, "another user's": anothers,
}  # fmt: skip
MADE_FROM_FILE = ("a link", "a huge file with a header", "another user's")  # these need the file that is there


def plant(path: Path, kind: str) -> None:
    if kind not in MADE_FROM_FILE:
        path.unlink(missing_ok=True)
    PLANTED[kind](path)


def planted(opened: Opened, kind: str) -> list[Path]:
    """Plant it in place of an existing block, record and segment. Returns their paths."""
    opened.disk.put_blocks({key(1): random_data(1)})
    opened.disk.create_record("version", "k", "right")
    places = [opened.path(key(1)), opened.root / "records" / "version" / "k", published(opened, "s", TABLE)]
    for path in places:
        plant(path, kind)
    return places


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_file_is_a_miss(opened: Opened, what: str) -> None:
    """Whatever lies in place of a block, record or segment is not waited for, followed or read. It is a counted miss, and is replaced."""
    disk, is_directory, is_link = opened.disk, what == "a directory", what == "a link"
    segment = planted(opened, what)[-1]
    with memory_at_most(2**30):
        assert disk.get_block(key(1)) is None
        assert disk.get_record("version", "k") is None
        assert not disk.has_record("version", "k")
        assert list(disk.records("version", "k")) == []
        assert opened.count("cacheFailureCount") == 2
        assert disk.open_segment(TABLE, "s") is None
    damaged = 0 if what == "a socket" else 1
    counts = [opened.count(name) for name in ("blockDamagedCount", "snapshotDamagedCount", "cacheFailureCount")]
    assert counts == [1, damaged, 3 - damaged]
    disk.put_blocks({key(1): random_data(1)})
    assert disk.get_block(key(1)) == (None if is_directory else random_data(1))
    with pytest.raises(OSError, match="cannot be created") if is_directory else contextlib.nullcontext():
        assert disk.create_record("version", "k", "other") == "other"
    assert disk.remove_segment(TABLE, "s") is (not segment.exists())
    assert elsewhere(segment).exists() is is_link


@pytest.mark.parametrize("what", PLANTED)
def test_planted_numbers_claims_totals_and_locks(opened: Opened, what: str) -> None:
    """The total is counted anew, numbers are ignored, and a claim belongs to nobody. What lies in place of a lock is locked, or cannot be."""
    disk = opened.disk
    disk.put_blocks({key(1): random_data(1)})
    plant(opened.root / "usage", what)
    disk.put_blocks({key(2): random_data(2)})
    assert opened.usage() == disk.used_bytes()
    assert disk.get_block(key(2)) == random_data(2)
    path = published(opened, "s", TABLE).with_suffix(".used")
    assert disk.open_numbers(TABLE, "s", 4, create=True) is not None
    plant(path, what)
    numbers = disk.open_numbers(TABLE, "s", 4)
    # A huge file's need not be right.
    assert (None if numbers is None else numbers.nbytes) == (32 if "huge" in what else None)
    path = opened.root / "claims" / TABLE / "v-planted"
    path.parent.mkdir()
    path.write_bytes(bytes(8))
    plant(path, what)
    assert disk.claims(TABLE, "v") == []
    assert disk.wait_for_claim(TABLE, "v-planted", 0.0, opened.clock.host())
    path = disk.lock_path("block", "x")
    path.write_bytes(bytes(40))
    plant(path, what)
    try:
        lock = disk.acquire("block", "x", 0.0)
    except OSError:
        assert what in ("a socket", "a directory", "a link", "a dead link", "a link to a device")
    else:
        lock.release()
    assert what != "a link" or elsewhere(path).read_bytes() == bytes(40)


@pytest.mark.parametrize("name", INNER)
def test_inner_directories_are_held_to_the_rules(opened: Opened, tmp_path: Path, name: str) -> None:
    """A cache directory is refused if a link or another user's directory lies in place of a directory inside it."""
    (opened.root / name).rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (opened.root / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.CacheDirectoryError, match=rf"{name} is not a directory \(links are refused\)"):
        Opened(opened.root.parent)
    (opened.root / name).unlink()
    (opened.root / name).mkdir()
    if os.geteuid() == 0:
        os.chown(opened.root / name, 12345, 12345)
        with pytest.raises(errors.CacheDirectoryError, match=rf"{name} belongs to user 12345"):
            Opened(opened.root.parent)


ELSEWHERE = ["../precious", "../../precious", "a/../../../precious", "/precious", "", ".", "..", "x\0y", "\ud800"]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_of_records_and_segments_lead_nowhere_else(opened: Opened, name: str) -> None:
    """A name from another file means a file in its directory, or none. Nothing else is read, touched or removed."""
    precious = [opened.root / "precious", opened.root.parent / "precious"]  # one inside, one beside the cache directory
    for path in precious:
        path.write_text("dear")
        os.utime(path, (1, 1))
    name = name.replace("/precious", f"{precious[0]}") if name.startswith("/") else name
    disk = opened.disk
    disk.create_record("version", "there", 1)
    published(opened, "s", TABLE)
    assert disk.get_record("version", name) is None
    assert not disk.has_record("version", name)
    assert disk.open_segment(TABLE, name) is None
    assert disk.open_numbers(TABLE, name, 1) is None
    assert not disk.remove_segment(TABLE, name)
    disk.discard_segment(TABLE, name)
    disk.unlink_segment(TABLE, name)
    disk.remove_record("version", name)
    for put_record in (disk.replace_record, disk.create_record):
        with pytest.raises(OSError, match="is not a file name"):
            put_record("version", name, 1)
    assert [(path.read_text(), path.stat().st_mtime) for path in precious] == [("dear", 1)] * 2
    assert disk.get_record("version", "there") == 1
    assert disk.open_segment(TABLE, "s") is not None


def test_a_pipe_in_a_tables_place_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe is not waited for if a path names it, nor if it takes a file's place after the version was resolved."""
    path = write_parquet(tmp_path / "dim.parquet", id=[1, 2])
    host = make_host(str(path), None)
    table, version = host.resolver.discover(parse_options({"path": str(path)}))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(errors.UfsNotFoundError, match="is a pipe, socket or device"):
        host.resolver.current_versions.ask(table)
    os.mkfifo(tmp_path / "two\nlines")
    with pytest.raises(errors.UfsNotFoundError, match=r"two\\nlines is a pipe"):
        host.ufs.get_meta(f"{tmp_path}/two\nlines")
    for file in (version.files[0], version.files[0].as_immutable()):
        with pytest.raises(errors.SourceChangedError):
            host.ufs.read_ranges(file, [(0, 4)])


@pytest.mark.parametrize("what", ["a pipe", "a socket", "a link to a device"])
def test_what_is_no_file_in_a_log_is_not_read(tmp_path: Path, what: str) -> None:
    """Whatever else is in place of an event of a managed table's log, or behind the last one, counts as a missing event."""
    path = tmp_path / "dim"
    LookupTable(str(path), {"lookup.cache.dir": str(tmp_path / "w"), "lookup.keys": "id"}).write(pa.table({"id": [1]}))

    def newest(host: str) -> int:
        options = parse_options({"path": str(path)})
        return make_host(str(path), tmp_path / host).resolver.discover(options)[1].newest

    log = path / "_lookup" / "log"
    PLANTED[what](log / f"{5:020d}.json")
    assert newest("other") == 4
    os.replace(log / f"{5:020d}.json", log / f"{4:020d}.json")
    assert newest("third") == 1


def signed(web: WebServer) -> str:
    """A URL, with a password and a signature, of a file with one row."""
    web.put(f"/t.csv?sig={SECRET}", b"id,city\n1,a\n", '"a"', formatdate(1_000_000, usegmt=True))
    return web.url.replace("://", f"://me:{SECRET}@") + f"/t.csv?sig={SECRET}"


SECRET = "SESAME42"


def test_a_signed_url_is_told_to_nobody(web: WebServer, cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A URL with a password and a signature is used, and never shown. On disk it is only in lists of a version's files."""
    caplog.set_level(logging.DEBUG, "pyspark_lookup")
    url = signed(web)
    options = {"lookup.cache.dir": str(cache_dir), "lookup.keys": "id", "lookup.max-retries": 0}
    texts: list[object] = []
    for cache in ({}, {"lookup.cache": "FULL"}, {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 9}):
        with LookupTable(url, {**options, **cache}) as table:
            assert table.scan().num_rows == 1
            assert table.get(1)[0]["city"] == "a"
            texts += [table.describe(), repr(table), table.metrics(), table.metrics_by_worker(), table.version]
    parsed = parse_options({"path": url, "lookup.keys": "id"})
    host = make_host(url, cache_dir)
    resolved, plan = host.plan(parsed)
    texts += map(
        repr, [*host.resolver.discover(parsed), parsed, resolved, plan, host.resolver.host.known_versions(parsed)]
    )
    for view in (View.FILES, View.METRICS):
        texts += [batch.to_pylist() for batch in view_batches(runtime().engine(parsed), ViewTask(view), parsed, bytes)]
    for status in (404, 403, 500, 400, 0):
        web.before = lambda method, path, status=status: status
        for act in (lambda: LookupTable(url, options).scan(), lambda: LookupTable(url, options).describe()):
            with pytest.raises(errors.UfsError) as caught:
                act()
            texts += ["".join(traceback.format_exception(caught.value)), repr(caught.value)]
    for bad in (url.replace("://", "s://"), url + ".unknown"):
        with pytest.raises(errors.PysparkLookupError) as refused:
            LookupTable(bad, options).scan()
        texts.append("".join(traceback.format_exception(refused.value)))
    texts += [record.getMessage() + str(record.exc_info) for record in caplog.records]
    assert [text for text in texts if SECRET in str(text)] == []
    files = [path for path in cache_dir.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    holding = [path.relative_to(cache_dir / "v1").parts for path in files]
    assert {parts[0] for parts in holding} <= {"records", "snapshots"}
    assert {parts[1] for parts in holding if parts[0] == "records"} <= {"files", "snapshot", "unsettled"}


@needs(DATA_SOURCES)
@pytest.mark.timeout(600)
@pytest.mark.spark
@pytest.mark.slow
def test_secrets_and_spark(spark: Any, web: WebServer, cache_dir: Path) -> None:
    """Spark's plans, functions and failures do not show a URL's secrets, and the catalog does not get them."""
    url = signed(web)
    options = {"lookup.cache.dir": str(cache_dir), "lookup.max-retries": "0"}
    table = spark.read.format("lookupcache").options(**options).load(url)
    joined = lookup_join(spark.range(3), url, on={"id": "id"}, options=options)
    register_lookup(spark, "secret_city", url, key="id", options=options)
    called = spark.sql("SELECT secret_city(id) FROM range(2)")
    mode = spark._jvm.org.apache.spark.sql.execution.ExplainMode
    for frame, rows in ((table, 1), (joined, 3), (called, 2)):
        for name in ("extended", "formatted"):
            assert SECRET not in frame._jdf.queryExecution().explainString(mode.fromString(name))
        assert frame.count() == rows
        assert SECRET not in frame._jdf.queryExecution().toString()
    assert SECRET not in explain_lookup(joined)
    assert SECRET not in str(spark.sql("DESCRIBE FUNCTION EXTENDED secret_city").collect())
    for statement in (
        f"CREATE TABLE secret_dim USING lookupcache OPTIONS (path '{url}')",
        f"CREATE TABLE secret_dim USING lookupcache OPTIONS (path 's3://b/x', 'lookup.storage.secret' '{SECRET}')",
        f"CREATE TABLE secret_dim USING lookupcache OPTIONS (path 's3://b/x', 'lookup.storage.endpoint_url' 'http://u:{SECRET}@h')",
        f"CREATE TABLE secret_dim USING lookupcache OPTIONS ('lookup.provider' 'a:b', 'lookup.provider.url' 'x://u:{SECRET}@h')",
    ):
        with pytest.raises(Exception, match="credential") as refused:
            spark.sql(statement)
        assert SECRET not in str(refused.value)
        assert not spark.catalog.tableExists("secret_dim")
    web.before = lambda method, path: 500
    for frame in (table, joined, called):
        with pytest.raises(Exception, match="500") as failed:
            frame.collect()
        assert SECRET not in str(failed.value)


def test_a_refused_directory_costs_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the cache directory is refused, rows are read from the store. This is logged once, and nothing is put into the directory."""
    path = write_parquet(tmp_path / "dim.parquet", id=[1, 2])
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    for options in ({}, {"lookup.cache": "FULL"}, {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 5}):
        all_options = {"lookup.cache.dir": str(tmp_path / "open"), "lookup.keys": "id", **options}
        with LookupTable(str(path), all_options) as table:
            assert table.get(2) == [{"id": 2}]
            assert table.metrics()["cacheFailureCount"] > 0
    assert "working without a cache" in caplog.text
    assert "chmod 700" in caplog.text
    events = [record for record in caplog.records if hasattr(record, "lookup_event")]
    assert [(record.lookup_event, record.levelname) for record in events] == [("fallback", "WARNING")]
    assert list((tmp_path / "open").iterdir()) == []


def test_files_of_a_table_have_the_umasks_modes(tmp_path: Path) -> None:
    """On a local disk a table is as private as its directory and the umask make it; the cache directory always is."""
    before = os.umask(0o022)
    try:
        LookupTable(str(tmp_path / "dim"), {"lookup.cache.dir": str(tmp_path / "w")}).write(pa.table({"id": [1]}))
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "dim").rglob("*") if file.is_file()}
    assert modes == {0o644}
    assert stat.S_IMODE((tmp_path / "w").stat().st_mode) == 0o700


def test_credentials_of_the_conf_file_go_to_every_remote_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any server that a path names gets them, from a conf file of any mode. A local table does not."""
    conf = tmp_path / "x.conf"
    conf.write_text(f"lookup.storage.token = {SECRET}\nlookup.cache.dir = {tmp_path / 'cache'}\n")
    conf.chmod(0o666)
    monkeypatch.setenv("LOOKUPCACHE_CONF", str(conf))
    storages: dict[str, Any] = {}

    def opened(path: str, storage: Any, now_s: Any) -> Any:
        storages[path] = dict(storage)
        return open_store(str(tmp_path), {})

    monkeypatch.setattr(runtime_module, "open_store", opened)
    process = runtime_module.Runtime(FakeClock().host(), random.Random(7))
    for path in ("http://anywhere.example/x", "s3://any/x", str(tmp_path / "x")):
        process.engine(parse_options({"path": path}, conf=conf_file_options()))
    assert list(storages.values()) == [{"token": SECRET}, {"token": SECRET}, {}]


def test_the_document_names_tests_that_exist() -> None:
    """Every test that docs/security.md names is there, and each of this file and of `test_fuzz` is named."""
    tests = Path(__file__).parent
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (tests.parent / "docs" / "security.md").read_text(encoding="utf-8"))
    assert len(named) > 30
    for file, name in set(named):
        assert re.search(rf"^def {name}\(", (tests / file).read_text(encoding="utf-8"), re.MULTILINE), (file, name)
    for file in ("test_security.py", "test_fuzz.py"):
        defined = set(re.findall(r"^def (test_\w+)\(", (tests / file).read_text(encoding="utf-8"), re.MULTILINE))
        assert defined - {name for of, name in named if of == file} <= {"test_the_document_names_tests_that_exist"}
