"""Stores: one identity per state of a file, listings that hide nothing new, reads of one version only."""

from __future__ import annotations

import errno
import http.server
import os
import shutil
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import formatdate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import aiohttp
import botocore.exceptions
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from pyspark_lookup.base.errors import (
    OptionError,
    SourceChangedError,
    UfsError,
    UfsNotFoundError,
    UfsPermissionError,
    UfsTimeoutError,
    UfsUnavailableError,
)
from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.io.stores import LOCAL_GRANULE_S, FileVersion, Listing, Store, open_store
from pyspark_lookup.io.ufs import Ufs
from tests.fakes import FakeClock, FaultyStore, wait_until_settled

if TYPE_CHECKING:
    from tests.s3server import S3Server

OLD, NEW = b"old" * 100, b"new" * 100
LATER = FakeClock().host().wall_s  # a clock long after every file of these tests


def ignore(kind: str) -> None:
    """A `Count` that counts nothing."""


def store_of(path: str | Path, now_s: Callable[[], float] = LATER, **options: Any) -> Store:
    return open_store(str(path), options, now_s)


def ufs_of(store: Any) -> Ufs:
    return Ufs(store, CacheMetricGroup(), 0, FakeClock().sleep)


def read_whole(store: Any, file: FileVersion) -> bytes:
    return ufs_of(store).read_ranges(file, [(0, file.size)])[0]


# --- four unlike stores with one file, behind one face -----------------------------------------------


class WebServer:
    """Files on loopback HTTP. `before(method, path)` runs ahead of each request and may return a status."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.log: list[str] = []
        self.before: Callable[[str, str], int | None] = lambda method, path: None
        self.ranges = True
        self.cut = 0  # bytes missing at the end of each body
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None: ...

            def do_HEAD(self) -> None:
                self.answer()

            def do_GET(self) -> None:
                self.answer()

            def answer(self) -> None:
                outer.log.append(self.command)
                status = outer.before(self.command, self.path)
                if status == 0:  # break the connection without an answer
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                    self.close_connection = True
                    return
                if status is None and self.path not in outer.files:
                    status = 404
                data, headers = outer.files.get(self.path, (b"", {}))
                size, asked = len(data), self.headers.get("Range")
                if status is None and asked and outer.ranges:
                    first, last = (int(part) for part in asked.removeprefix("bytes=").split("-"))
                    data, status = data[first : last + 1], 206 if first < size else 416
                self.send_response(status or 200)
                headers = {"Content-Length": str(len(data) if status in (None, 206) else 0), **headers}
                for name, value in headers.items():
                    if value:
                        self.send_header(name, value)
                self.end_headers()
                if self.command == "GET" and status in (None, 206):
                    self.wfile.write(data[: len(data) - outer.cut])
                    self.close_connection = outer.cut > 0

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def put(self, path: str, data: bytes, etag: str = "", modified: str = "") -> None:
        self.files[path] = (data, {"ETag": etag, "Last-Modified": modified})

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def web() -> Iterator[WebServer]:
    server = WebServer()
    yield server
    server.close()


class Place:
    """Somewhere a file lies: its URL, and how to write and remove it behind the store's back."""

    url: str

    def write(self, data: bytes) -> None:
        raise NotImplementedError

    def remove(self) -> None:
        raise NotImplementedError


class LocalPlace(Place):
    def __init__(self, path: Path) -> None:
        self.url = str(path)

    def write(self, data: bytes) -> None:
        if Path(self.url).exists():
            wait_until_settled(Path(self.url))
        Path(self.url).write_bytes(data)

    def remove(self) -> None:
        Path(self.url).unlink()


class MemoryPlace(Place):
    def __init__(self) -> None:
        self.url = "memory://dim/a.parquet"
        self._fs = fsspec.filesystem("memory", skip_instance_cache=True)

    def write(self, data: bytes) -> None:
        self._fs.pipe_file(self.url, data)

    def remove(self) -> None:
        self._fs.rm_file(self.url)


class WebPlace(Place):
    def __init__(self, server: WebServer) -> None:
        self._server, self._states = server, 0
        self.url = server.url + "/dim/a.parquet"

    def write(self, data: bytes) -> None:
        self._states += 1
        self._server.put("/dim/a.parquet", data, f'"{self._states}"', formatdate(self._states, usegmt=True))

    def remove(self) -> None:
        self._server.files.clear()


class S3Place(Place):
    def __init__(self, server: S3Server) -> None:
        self._client, self._object = server.client, {"Bucket": f"b-{uuid.uuid4().hex[:12]}", "Key": "dim/a.parquet"}
        self._client.create_bucket(Bucket=self._object["Bucket"])
        self.url = f"s3://{self._object['Bucket']}/dim/a.parquet"

    def write(self, data: bytes) -> None:
        self._client.put_object(**self._object, Body=data)

    def remove(self) -> None:
        self._client.delete_object(**self._object)


@pytest.fixture(params=["local", "memory", "http", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A place of each kind that holds OLD."""
    if request.param == "http":
        found: Place = WebPlace(request.getfixturevalue("web"))
    elif request.param == "s3":
        server: S3Server = request.getfixturevalue("s3")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        found = S3Place(server)
    elif request.param == "memory":
        found = MemoryPlace()
    else:
        (tmp_path / "dim").mkdir()
        found = LocalPlace(tmp_path / "dim" / "a.parquet")
    found.write(OLD)
    yield found
    MemoryFileSystem.store.clear()


def test_an_unchanged_file_keeps_its_version(place: Place) -> None:
    """Two stores that look at one unchanged file at different times give equal, cacheable versions."""
    first = store_of(place.url).get_meta(place.url, ignore)
    again = store_of(place.url, lambda: LATER() + 1000).get_meta(place.url, ignore)
    assert first == again
    assert (first.size, first.url, first.cacheable) == (len(OLD), store_of(place.url).url_of(place.url), True)
    assert read_whole(store_of(place.url), first) == OLD


def test_a_rewrite_of_equal_size_is_another_version(place: Place) -> None:
    """New bytes of the same length give an unequal version, and the old content put back a third (on S3 the first again)."""
    store = store_of(place.url)
    seen = [store.get_meta(place.url, ignore)]
    for data in (NEW, OLD):
        place.write(data)
        seen.append(store.get_meta(place.url, ignore))
        assert read_whole(store, seen[-1]) == data
    assert len(set(seen)) == (2 if place.url.startswith("s3") else 3)
    assert {version.size for version in seen} == {len(OLD)}


def test_a_file_deleted_after_its_version_was_taken(place: Place) -> None:
    """Between token and read: the read says the version is gone, the next question that the file is."""
    store = store_of(place.url)
    version = store.get_meta(place.url, ignore)
    place.remove()
    with pytest.raises(SourceChangedError, match="replaced or removed"):
        read_whole(store, version)
    with pytest.raises(UfsNotFoundError, match=r"a\.parquet does not exist"):
        store.get_meta(place.url, ignore)
    with pytest.raises(UfsNotFoundError):
        store.get_status(place.url, ignore)


@pytest.mark.parametrize("data", [NEW, NEW[:150], NEW * 2, b""], ids=["equal size", "shorter", "longer", "empty"])
def test_overwritten_between_two_ranges(place: Place, data: bytes) -> None:
    """A file rewritten between two reads of one request is noticed, whatever its new size: no bytes are handed out."""
    store = FaultyStore(store_of(place.url))
    version = store.get_meta(place.url, ignore)

    def overwrite(kind: str, subject: object) -> None:
        if store.kinds().count("get") == 2:
            store.before = lambda kind, subject: None
            place.write(data)

    store.before = overwrite
    with pytest.raises(SourceChangedError):
        ufs_of(store).read_ranges(version, [(0, 100), (200, 100)])
    assert store.kinds()[:3] == ["head", "get", "get"]
    with pytest.raises(SourceChangedError):
        ufs_of(store).read_ranges(version, [(0, 100)])
    current = store.get_meta(place.url, ignore)
    assert current != version
    assert read_whole(store, current) == data


def test_removed_after_the_last_range(place: Place) -> None:
    """A file that vanishes after its bytes were read, where the store cannot pin, is another version too."""
    store = FaultyStore(store_of(place.url))
    version = store.get_meta(place.url, ignore)

    def remove(kind: str, subject: object) -> None:
        if kind == "head":
            place.remove()

    store.before = remove
    if store.pins:
        assert read_whole(store, version) == OLD
        assert store.kinds() == ["head", "get"]
    else:
        with pytest.raises(SourceChangedError, match="replaced or removed"):
            read_whole(store, version)
        assert store.kinds() == ["head", "get", "head"]


def test_one_version_by_every_call(place: Place) -> None:
    """get_meta, get_status and list_status say the same version of a file, so an entry is found by any."""
    store = store_of(place.url)
    version = store.get_meta(place.url, ignore)
    assert store.get_status(place.url, ignore) == version
    if not place.url.startswith("http"):
        listing = store.list_status(place.url.rsplit("/", 1)[0], ignore)
        assert listing.files == (version,)
        assert listing == store.get_status(place.url.rsplit("/", 1)[0], ignore)


def test_a_listing_is_never_remembered(place: Place) -> None:
    """After a listing, what another client rewrites, creates or deletes is seen by the next call."""
    directory = None if place.url.startswith("http") else place.url.rsplit("/", 1)[0]
    store = store_of(place.url)
    before = store.list_status(directory, ignore).files if directory else (store.get_meta(place.url, ignore),)
    place.write(NEW + b"!")
    after = store.list_status(directory, ignore).files if directory else (store.get_meta(place.url, ignore),)
    assert [file.size for file in before + after] == [300, 301]
    assert read_whole(store, after[0]) == NEW + b"!"
    place.remove()
    with pytest.raises(UfsNotFoundError):
        store.get_meta(place.url, ignore)
    place.write(OLD)
    assert read_whole(store, store.get_meta(place.url, ignore)) == OLD


def test_calls_are_told_before_they_are_made(place: Place) -> None:
    """`count` hears each call by its kind once: one head for a file (S3: one list of its name), one list for each directory."""
    store, told = store_of(place.url), list[str]()
    store.get_meta(place.url, told.append)
    store.get_status(place.url, told.append)
    assert told == ["head", "list" if place.url.startswith("s3") else "head"]
    if not place.url.startswith("http"):
        told.clear()
        store.list_status(place.url.rsplit("/", 1)[0], told.append)
        store.get_status(place.url.rsplit("/", 1)[0], told.append)
        assert told == ["list", "list"]


# --- local files -------------------------------------------------------------------------------------


def settled(path: Path, data: bytes) -> Path:
    """A file that is older than the clock's granule."""
    path.write_bytes(data)
    wait_until_settled(path)
    return path


def replace_by_older(path: Path) -> None:
    """A rollback: a file written, and last changed, before."""
    os.utime(path.with_name("older"), (1_000_000, 1_000_000))
    os.replace(path.with_name("older"), path)


def copy_older(path: Path) -> None:
    """`cp -p` of an older file over it."""
    os.utime(path.with_name("older"), (1_000_000, 1_000_000))
    shutil.copy2(path.with_name("older"), path)


def rewrite_and_restore_times(path: Path) -> None:
    """In place, with the modification time put back to the nanosecond."""
    status = path.stat()
    path.write_bytes(NEW)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace_with_equal_times(path: Path) -> None:
    """By rename, with the very modification time of the file before."""
    status = path.stat()
    os.utime(path.with_name("older"), ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(path.with_name("older"), path)


def touch(path: Path) -> None:
    """Only the times change."""
    os.utime(path)


@pytest.mark.parametrize(
    "change", [replace_by_older, copy_older, rewrite_and_restore_times, replace_with_equal_times, touch]
)
def test_a_change_that_hides_from_mtime_is_seen(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """A file whose mtime went back or stayed, at equal size, is another version; reads of the old one are refused."""
    (tmp_path / "older").write_bytes(NEW)
    path = settled(tmp_path / "file", OLD)
    store = store_of(path)
    before = store.get_meta(str(path), ignore)
    change(path)
    after = store.get_meta(str(path), ignore)
    assert after != before
    assert after.size == before.size
    assert after.cacheable
    assert before.cacheable
    with pytest.raises(SourceChangedError):
        read_whole(store, before)
    assert read_whole(store, after) == path.read_bytes()


def test_rewritten_within_a_tick_is_another_version_or_not_kept(tmp_path: Path) -> None:
    """Of two same-size states a moment apart, either the versions differ or the first was never cacheable."""
    path = tmp_path / "file"
    store = store_of(path, time.time)
    for _ in range(200):
        path.write_bytes(OLD)
        before = store.get_meta(str(path), ignore)
        path.write_bytes(NEW)
        after = store.get_meta(str(path), ignore)
        assert before != after or not before.cacheable
        assert not before.cacheable


@pytest.mark.parametrize(
    ("age_s", "cacheable"),
    [(LOCAL_GRANULE_S * 1.5, True), (LOCAL_GRANULE_S, False), (0.0, False), (-3600.0, False)],
)
def test_a_racy_time_is_not_kept(tmp_path: Path, age_s: float, cacheable: bool) -> None:
    """A file changed within the clock's granule of now, or after now, has a version that is not kept."""
    path = tmp_path / "file"
    path.write_bytes(OLD)
    changed_s = path.stat().st_ctime
    version = store_of(path, lambda: changed_s + age_s).get_meta(str(path), ignore)
    assert version.cacheable is cacheable
    assert version.modified_at_s == path.stat().st_mtime


def test_an_old_mtime_with_a_new_ctime_is_racy(tmp_path: Path) -> None:
    """An old file that was just restored is as new as its last change."""
    path = tmp_path / "file"
    path.write_bytes(OLD)
    os.utime(path, (1_000_000, 1_000_000))
    now_s = path.stat().st_ctime
    assert not store_of(path, lambda: now_s).get_meta(str(path), ignore).cacheable


@pytest.mark.parametrize("name", ["a.parquet", "mein tisch.csv", "größe=1", "a%20b", "a#b?c", "a::b"])
def test_spellings_of_a_local_path_are_one(tmp_path: Path, name: str) -> None:
    """`/x`, `file:/x`, `file:///x`, `local://x` and a relative path are one file under one URL."""
    path = settled(tmp_path / name, OLD)
    spellings = [
        str(path), f"file:{path}", f"file://{path}", f"local://{path}", f"{tmp_path}/./x/../{name}",
        os.path.relpath(path),
    ]  # fmt: skip
    versions = {store_of(spelling).get_meta(spelling, ignore) for spelling in spellings}
    assert {version.url for version in versions} == {f"file://{path}"}
    assert len(versions) == 1
    assert read_whole(store_of(path), versions.pop()) == OLD


def test_a_trailing_slash_names_the_same_directory(tmp_path: Path) -> None:
    """A directory has one URL with and without a slash, and its files lie below it."""
    settled(tmp_path / "a", OLD)
    store = store_of(tmp_path)
    assert store.url_of(f"{tmp_path}/") == store.url_of(str(tmp_path)) == f"file://{tmp_path}"
    assert store.list_status(f"{tmp_path}/", ignore) == store.list_status(str(tmp_path), ignore)


def test_a_path_of_undecodable_bytes(tmp_path: Path) -> None:
    """A file whose name is not UTF-8 is listed, versioned and read like another."""
    name = os.fsencode(tmp_path) + b"/caf\xe9.csv"
    Path(os.fsdecode(name)).write_bytes(OLD)
    store = store_of(tmp_path)
    (version,) = store.list_status(str(tmp_path), ignore).files
    assert version == store.get_meta(version.url, ignore)
    assert read_whole(store, version) == OLD


TREE = [
    "part-0.csv", "_SUCCESS", ".crc", "d=1/part-0.csv", "_d=2/part-0.csv", "plain/deep/part-1.csv",
    "_temporary/0/part-9.csv", ".git/config", "_delta_log/0.json", "_spark_metadata/0", "d=1/_started",
    "d=1/_temporary/x", "d=1/.hidden=1/x",
]  # fmt: skip
LISTED = [
    ".crc", "_SUCCESS", "_d=2/part-0.csv", "_spark_metadata/0", "d=1/_started", "d=1/part-0.csv", "part-0.csv",
    "plain/deep/part-1.csv",
]  # fmt: skip
SEEN = {
    "d=1", "_d=2", "plain", "plain/deep", "_temporary", ".git", "_delta_log", "_spark_metadata", "d=1/_temporary",
    "d=1/.hidden=1",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_hidden_directories_are_reported_but_not_entered(tmp_path: Path, kind: str) -> None:
    """`_x` and `.x` are named in a listing without their files, `_k=v` and `_spark_metadata` are entered; one call each."""
    root = str(tmp_path) if kind == "local" else "memory://tree"
    fs = fsspec.filesystem(kind)
    for name in TREE:
        fs.makedirs(os.path.dirname(f"{root}/{name}"), exist_ok=True)
        fs.pipe_file(f"{root}/{name}", b"x")
    told: list[str] = []
    store = store_of(root)
    listing = store.list_status(root, told.append)
    MemoryFileSystem.store.clear()
    assert [file.url.removeprefix(store.url_of(root) + "/") for file in listing.files] == LISTED
    assert listing.directories == SEEN
    assert told == ["list"] * (1 + len(SEEN - {"_temporary", ".git", "_delta_log", "d=1/_temporary", "d=1/.hidden=1"}))


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    """A linked file or directory is listed under its own name; a link to a directory above ends, a dead one is no file."""
    (tmp_path / "t" / "d").mkdir(parents=True)
    (tmp_path / "t" / "d" / "a").write_bytes(OLD)
    (tmp_path / "t" / "d" / "up").symlink_to("..")
    (tmp_path / "t" / "d" / "self").symlink_to(".")
    (tmp_path / "t" / "again").symlink_to("d")
    (tmp_path / "t" / "file").symlink_to("d/a")
    (tmp_path / "t" / "dead").symlink_to("nowhere")
    (tmp_path / "t" / "ouroboros").symlink_to("ouroboros")
    listing = store_of(tmp_path).list_status(str(tmp_path / "t"), ignore)
    root = f"file://{tmp_path}/t/"
    assert [file.url.removeprefix(root) for file in listing.files] == ["again/a", "d/a", "file"]
    assert len({file.identity for file in listing.files}) == 1
    assert {"d", "d/up", "d/self", "again"} <= listing.directories


def test_what_is_no_file_is_not_listed(tmp_path: Path) -> None:
    """A pipe or socket among the files is left out: opening it could wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a").write_bytes(OLD)
    listing = store_of(tmp_path).list_status(str(tmp_path), ignore)
    assert [file.url for file in listing.files] == [f"file://{tmp_path}/a"]


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_subdirectory_removed_while_listing(tmp_path: Path, kind: str) -> None:
    """A partition that is dropped during a listing is left out; a root that is dropped is not found."""
    root = str(tmp_path / "t") if kind == "local" else "memory://t"
    fs = fsspec.filesystem(kind)
    for name in ("d=1/a", "d=2/a"):
        fs.makedirs(os.path.dirname(f"{root}/{name}"), exist_ok=True)
        fs.pipe_file(f"{root}/{name}", b"x")
    told: list[str] = []

    def drop(what: str, at: int) -> Callable[[str], None]:
        def count(call: str) -> None:
            told.append(call)
            if len(told) == at:
                fs.rm(what, recursive=True)

        return count

    store = store_of(root)
    listing = store.list_status(root, drop(f"{root}/d=1", 2))
    assert [file.url for file in listing.files] == [store.url_of(f"{root}/d=2/a")]
    told.clear()
    with pytest.raises(UfsNotFoundError, match="t does not exist"):
        store.list_status(root, drop(root, 1))
    MemoryFileSystem.store.clear()


def test_a_file_is_no_directory_nor_the_other_way(tmp_path: Path) -> None:
    """get_meta of a directory and list_status of a file are not found, get_status tells which it is."""
    path = settled(tmp_path / "a", OLD)
    store = store_of(tmp_path)
    with pytest.raises(UfsNotFoundError, match="is a directory"):
        store.get_meta(str(tmp_path), ignore)
    with pytest.raises(UfsNotFoundError):
        store.list_status(str(path), ignore)
    with pytest.raises(UfsNotFoundError):
        store.get_meta(f"{path}/below", ignore)
    assert isinstance(store.get_status(str(path), ignore), FileVersion)
    assert isinstance(store.get_status(str(tmp_path), ignore), Listing)


def test_a_file_replaced_by_a_directory(tmp_path: Path) -> None:
    """A version whose path is a directory now is gone."""
    path = settled(tmp_path / "a", OLD)
    store = store_of(path)
    version = store.get_meta(str(path), ignore)
    path.unlink()
    path.mkdir()
    with pytest.raises(SourceChangedError):
        read_whole(store, version)


def test_a_disk_error_is_ours() -> None:
    """What the operating system fails a local read with leaves as UfsError, with its text."""
    path = "/proc/self/mem"  # reading at 0 is EIO
    store = store_of(path)
    version = store.get_meta(path, ignore)
    with pytest.raises(UfsError, match="Input/output error") as caught, store.pinned(version) as read:
        read(0, 10)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_name_no_system_call_takes_is_ours(tmp_path: Path) -> None:
    """A path the system refuses (too long, a link in circles) is a UfsError or not found, never foreign."""
    (tmp_path / "loop").symlink_to("loop")
    for path in (str(tmp_path / ("x" * 5000)), str(tmp_path / "loop"), str(tmp_path / "a\0b")):
        for call in (store_of(path).get_meta, store_of(path).list_status, store_of(path).get_status):
            with pytest.raises(UfsError):
                call(path, ignore)


# --- choosing a store --------------------------------------------------------------------------------


def test_an_unknown_protocol_is_an_option_error() -> None:
    """A protocol fsspec does not know is refused by the path, without its credentials."""
    with pytest.raises(OptionError, match=r"path = 'nosuch://\[redacted\]@h/x'"):
        store_of("nosuch://u:pw@h/x")


def test_local_paths_take_no_storage_options() -> None:
    """A storage option beside a local path is refused by its key."""
    with pytest.raises(OptionError, match=r"lookup\.storage\.anon: local paths take no storage options"):
        store_of("/x", anon=True)


def test_a_parameter_the_filesystem_does_not_have() -> None:
    """A storage option its filesystem refuses is an option error."""
    fsspec.register_implementation("scripted", ScriptedFs, clobber=True)
    with pytest.raises(OptionError, match="nonsense"):
        store_of("scripted://x", nonsense=1)


def test_scopes_tell_stores_apart(tmp_path: Path) -> None:
    """Two stores where one path may mean two files differ in scope: by protocol, endpoint and host; others are equal."""
    scopes = [
        store_of(tmp_path).scope,
        store_of("memory://x").scope,
        store_of("s3://b/x").scope,
        store_of("s3://b/x", endpoint_url="http://h:1").scope,
        store_of("s3://b/x", endpoint_url="http://h:2").scope,
        store_of("scripted://x").scope,
        store_of("scripted://x", host="a").scope,
        store_of("scripted://x", host="b").scope,
    ]
    assert len(set(scopes)) == len(scopes)
    assert store_of("s3a://c/y").scope == store_of("s3://b/x").scope
    one, two = {"client_kwargs": {"endpoint_url": "http://h:1"}}, {"endpoint_url": "http://h:1", "anon": True}
    assert store_of("s3://b/x", **one).scope == store_of("s3://b/x", **two).scope == scopes[3]
    assert store_of("file:/x").scope == scopes[0]


def test_an_endpoint_from_the_environment_is_part_of_the_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint botocore takes from the environment tells stores apart as well."""
    default = store_of("s3://b/x").scope
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://h:1")
    general = store_of("s3://b/x").scope
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://h:2")
    assert len({default, general, store_of("s3://b/x").scope}) == 3


@pytest.mark.parametrize("protocol", ["s3", "s3a", "s3n"])
def test_s3_spellings_are_one(protocol: str) -> None:
    """`s3a://` and `s3n://` mean `s3://`, and a trailing slash nothing."""
    store = store_of(f"{protocol}://b/x")
    assert store.url_of(f"{protocol}://b/größe 1/x/") == "s3://b/größe 1/x"
    assert store.url_of(f"{protocol}://b") == "s3://b"


# --- a filesystem that says what a test tells it -----------------------------------------------------


class ScriptedFs(AbstractFileSystem):
    """One file `/f`; `info` and `error` are set by the test."""

    protocol = "scripted"
    info_of: ClassVar[dict[str, Any]] = {}
    error: ClassVar[Exception | None] = None

    def __init__(self, host: str = "", use_listings_cache: bool = False) -> None:
        super().__init__(use_listings_cache=use_listings_cache)

    def _answer(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"name": "f", "type": "file", "size": 300, **self.info_of}

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return self._answer()

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        return [{**self._answer(), "name": "d/f"}]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self._answer()
        return OLD[start:end]


@pytest.fixture
def scripted() -> Iterator[type[ScriptedFs]]:
    fsspec.register_implementation("scripted", ScriptedFs, clobber=True)
    yield ScriptedFs
    ScriptedFs.info_of, ScriptedFs.error = {}, None


NOW = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("info", "other"),
    [
        ({"generation": "17"}, {"generation": "18"}),
        ({"ETag": '"a"'}, {"ETag": '"b"'}),
        ({"etag": "0x1"}, {"etag": "0x2"}),
        ({"md5": "aa"}, {"md5": "bb"}),
        ({"mtime": 1000.25}, {"mtime": 1000.5}),
        ({"mtime": NOW}, {"mtime": NOW - timedelta(days=3)}),
        ({"last_modified": NOW.replace(tzinfo=None)}, {"last_modified": NOW.replace(tzinfo=None, microsecond=0)}),
        ({"modified": "2024-05-06T07:08:09+00:00"}, {"modified": "2024-05-06T07:08:08+00:00"}),
        ({"created": NOW, "mtime": 5}, {"created": NOW, "mtime": 6}),
        ({"ETag": "a"}, {"ETag": "a", "size": 299}),
    ],
)
def test_the_strongest_token_is_the_identity(scripted: type[ScriptedFs], info: dict[str, Any], other: dict[str, Any]) -> None:  # fmt: skip
    """A filesystem's generation, ETag or hash, else its times, with the size, tell two states apart; HEAD and LIST agree."""
    store = store_of("scripted://f")
    versions = []
    for said in (info, other):
        scripted.info_of = said
        versions.append(store.get_meta("scripted://f", ignore))
        assert store.list_status("scripted://d", ignore).files[0].identity == versions[-1].identity
    assert versions[0] != versions[1]
    assert all(version.cacheable for version in versions)


def test_without_a_token_nothing_is_kept(scripted: type[ScriptedFs]) -> None:
    """A file that has only a name and a size is read, never cached."""
    version = store_of("scripted://f").get_meta("scripted://f", ignore)
    assert (version.identity, version.cacheable) == ("", False)
    assert read_whole(store_of("scripted://f"), version) == OLD


@pytest.mark.parametrize(("token", "age_s", "cacheable"), [("", 2.0, False), ("", 2.5, True), ("9", 0.0, True), ("", -60.0, False)])  # fmt: skip
def test_a_time_within_the_remote_granule_is_racy(scripted: type[ScriptedFs], token: str, age_s: float, cacheable: bool) -> None:  # fmt: skip
    """Where the time is the identity, a file must be two seconds old to be kept; a true token is enough at once."""
    scripted.info_of = {"mtime": NOW, **({"generation": token} if token else {})}
    version = store_of("scripted://f", lambda: NOW.timestamp() + age_s).get_meta("scripted://f", ignore)
    assert version.cacheable is cacheable
    assert version.modified_at_s == NOW.timestamp()


def client_error(status: int, code: str = "") -> botocore.exceptions.ClientError:
    """What botocore raises for an answer of this status."""
    return botocore.exceptions.ClientError(
        {"Error": {"Code": code or str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}},  # type: ignore[typeddict-item]
        "GetObject",
    )


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


REQUEST: Any = type("Request", (), {"real_url": "http://h/x"})()
FOREIGN = [
    (FileNotFoundError("f"), UfsNotFoundError),
    (NotADirectoryError("f"), UfsNotFoundError),
    (caused(FileNotFoundError("f"), KeyError("f")), UfsNotFoundError),
    (client_error(404, "NoSuchKey"), UfsNotFoundError),
    (aiohttp.ClientResponseError(REQUEST, (), status=410), UfsNotFoundError),
    (PermissionError("no"), UfsPermissionError),
    (client_error(403, "AccessDenied"), UfsPermissionError),
    (aiohttp.ClientResponseError(REQUEST, (), status=401), UfsPermissionError),
    (caused(FileNotFoundError("f"), aiohttp.ClientResponseError(REQUEST, (), status=403)), UfsPermissionError),
    (botocore.exceptions.NoCredentialsError(), UfsPermissionError),
    (TimeoutError("slow"), UfsTimeoutError),
    (fsspec.exceptions.FSTimeoutError(), UfsTimeoutError),
    (botocore.exceptions.ReadTimeoutError(endpoint_url="http://h"), UfsTimeoutError),
    (botocore.exceptions.ConnectTimeoutError(endpoint_url="http://h"), UfsTimeoutError),
    (client_error(408), UfsTimeoutError),
    (ConnectionResetError("reset"), UfsUnavailableError),
    (ConnectionRefusedError("refused"), UfsUnavailableError),
    (BrokenPipeError("broken"), UfsUnavailableError),
    (botocore.exceptions.EndpointConnectionError(endpoint_url="http://h"), UfsUnavailableError),
    (botocore.exceptions.ConnectionClosedError(endpoint_url="http://h"), UfsUnavailableError),
    (botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2), UfsUnavailableError),
    (aiohttp.ClientPayloadError("cut"), UfsUnavailableError),
    (aiohttp.ServerDisconnectedError(), UfsUnavailableError),
    (caused(FileNotFoundError("f"), aiohttp.ServerDisconnectedError()), UfsUnavailableError),
    (caused(FileNotFoundError("f"), aiohttp.ClientResponseError(REQUEST, (), status=502)), UfsUnavailableError),
    (client_error(500, "InternalError"), UfsUnavailableError),
    (caused(OSError(errno.EBUSY, "slow down"), client_error(503, "SlowDown")), UfsUnavailableError),
    (client_error(429), UfsUnavailableError),
    (client_error(409, "OperationAborted"), UfsUnavailableError),
    (client_error(412, "PreconditionFailed"), SourceChangedError),
    (client_error(400, "InvalidRequest"), UfsError),
    (OSError(errno.EIO, "disk"), UfsError),
    (RuntimeError("odd"), UfsError),
]


@pytest.mark.parametrize(("foreign", "ours"), FOREIGN, ids=[f"{type(f).__name__}-{o.__name__}-{i}" for i, (f, o) in enumerate(FOREIGN)])  # fmt: skip
def test_foreign_errors_leave_as_ours(scripted: type[ScriptedFs], foreign: Exception, ours: type[UfsError]) -> None:
    """Each error of a filesystem becomes the one of ours that says what it means, with the cause kept."""
    store = store_of("scripted://f")
    version = store.get_meta("scripted://f", ignore)
    scripted.error = foreign
    for call in (store.get_meta, store.list_status, store.get_status):
        with pytest.raises(UfsError) as caught:
            call("scripted://f", ignore)
        assert type(caught.value) is ours
        assert "f" in str(caught.value)
    with pytest.raises(UfsError) as caught, store.pinned(version) as read:
        read(0, 10)
    assert type(caught.value) is (SourceChangedError if ours is UfsNotFoundError else ours)
    assert caught.value.__cause__ is foreign


def test_a_range_past_the_end_is_another_version(scripted: type[ScriptedFs]) -> None:
    """A store that answers a read with 416 holds a shorter file than the version."""
    store = store_of("scripted://f")
    version = store.get_meta("scripted://f", ignore)
    scripted.error = aiohttp.ClientResponseError(REQUEST, (), status=416)
    with pytest.raises(SourceChangedError), store.pinned(version) as read:
        read(0, 10)


def test_an_interrupt_is_not_translated(scripted: type[ScriptedFs]) -> None:
    """Ctrl-C inside a store stays Ctrl-C."""
    scripted.error = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        store_of("scripted://f").get_meta("scripted://f", ignore)


# --- the web -----------------------------------------------------------------------------------------


def test_a_web_identity_has_etag_and_time(web: WebServer) -> None:
    """ETags of web servers are often built from whole seconds, so either of ETag and time makes another version."""
    url, stamps = web.url + "/f.csv", [formatdate(1000 + n, usegmt=True) for n in range(2)]
    versions = set()
    for etag, modified in (('"a"', stamps[0]), ('"b"', stamps[0]), ('"a"', stamps[1]), ("", stamps[0]), ('"a"', "")):
        web.put("/f.csv", OLD, etag, modified)
        versions.add(store_of(url).get_meta(url, ignore))
    assert len(versions) == 5
    assert all(version.cacheable for version in versions)
    assert {version.url for version in versions} == {url}


@pytest.mark.parametrize(("etag", "age_s", "cacheable"), [("", 2, False), ("", 3, True), ('"a"', 2, False), ('"a"', 3, True)])  # fmt: skip
def test_a_web_file_must_be_older_than_its_clocks_seconds(web: WebServer, etag: str, age_s: float, cacheable: bool) -> None:  # fmt: skip
    """A web file changed in the last two seconds is not kept, ETag or not."""
    web.put("/f.csv", OLD, etag, formatdate(1_000_000, usegmt=True))
    url = web.url + "/f.csv"
    assert store_of(url, lambda: 1_000_000 + age_s).get_meta(url, ignore).cacheable is cacheable


def test_a_web_file_without_token_or_size(web: WebServer) -> None:
    """Without ETag and time a web file is read but not kept; without a size it is refused."""
    url = web.url + "/f.csv"
    web.put("/f.csv", OLD)
    version = store_of(url).get_meta(url, ignore)
    assert not version.cacheable
    assert read_whole(store_of(url), version) == OLD
    web.files["/f.csv"] = (OLD, {"Content-Length": "", "Connection": "close"})
    with pytest.raises(UfsError, match="does not say its size"):
        store_of(url).get_meta(url, ignore)


def test_a_server_without_ranges(web: WebServer) -> None:
    """A server that answers a range with the whole file gives the same bytes."""
    web.ranges = False
    web.put("/f.csv", bytes(range(256)), '"a"')
    url = web.url + "/f.csv"
    store = store_of(url)
    version = store.get_meta(url, ignore)
    assert ufs_of(store).read_ranges(version, [(0, 256), (0, 10), (100, 50), (250, 6)]) == [
        bytes(range(256)), bytes(range(10)), bytes(range(100, 150)), bytes(range(250, 256)),
    ]  # fmt: skip


def test_a_server_that_refuses_head(web: WebServer) -> None:
    """Where HEAD is not allowed, a GET without reading it tells the version."""
    web.put("/f.csv", OLD, '"a"')
    web.before = lambda method, path: 405 if method == "HEAD" else None
    url = web.url + "/f.csv"
    assert store_of(url).get_meta(url, ignore).size == len(OLD)


@pytest.mark.parametrize(
    ("status", "ours"),
    [(404, UfsNotFoundError), (410, UfsNotFoundError), (401, UfsPermissionError), (403, UfsPermissionError),
     (500, UfsUnavailableError), (503, UfsUnavailableError), (429, UfsUnavailableError), (0, UfsUnavailableError),
     (400, UfsError)],
)  # fmt: skip
def test_a_failing_web_server_is_not_a_missing_file(web: WebServer, status: int, ours: type[UfsError]) -> None:
    """What a web server answers is told apart, although fsspec says FileNotFoundError for all; URLs are redacted."""
    web.put("/f.csv", OLD, '"a"')
    url = web.url + "/f.csv?sig=abc"
    web.before = lambda method, path: status
    with pytest.raises(UfsError) as caught:
        store_of(url).get_meta(url, ignore)
    assert type(caught.value) is ours
    assert "sig=[redacted]" in str(caught.value)
    assert str(status or "reset") in str(caught.value) or ours is UfsNotFoundError
    assert "abc" not in str(caught.value)


def test_a_web_body_cut_short(web: WebServer) -> None:
    """A body that ends early is a transient failure, never short bytes."""
    web.put("/f.csv", OLD, '"a"')
    web.cut = 10
    url = web.url + "/f.csv"
    store = store_of(url)
    version = store.get_meta(url, ignore)
    with pytest.raises(UfsUnavailableError):
        read_whole(store, version)


def test_nobody_listens() -> None:
    """A web address nobody serves is unavailable, not absent."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/f.csv"
    with pytest.raises(UfsUnavailableError):
        store_of(url).get_meta(url, ignore)


# --- names of unknown kind ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "told"),
    [("memory://t", ["list"]), ("memory://t/a.csv", ["head"]), ("memory://t/plain", ["list", "head"]),
     ("memory://d.csv", ["head", "list"]), ("memory://d.csv/", ["list"])],
)  # fmt: skip
def test_a_name_of_unknown_kind_costs_two_calls_at_most(path: str, told: list[str]) -> None:
    """get_status tries a name with an extension as a file first and another as a directory; two calls at most."""
    fs = fsspec.filesystem("memory")
    for name in ("t/a.csv", "t/plain", "d.csv/x"):
        fs.pipe_file(f"memory://{name}", b"x")
    heard: list[str] = []
    found = store_of(path).get_status(path, heard.append)
    with pytest.raises(UfsNotFoundError):
        store_of(path).get_status(path + "-none", ignore)
    MemoryFileSystem.store.clear()
    assert heard == told
    assert isinstance(found, FileVersion) is (told[-1] == "head")
