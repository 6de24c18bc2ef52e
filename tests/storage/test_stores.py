"""Stores: one identity per state of a file, listings that hide nothing new, reads of one version only."""

import errno
import functools
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from email.utils import formatdate
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import aiohttp
import botocore.exceptions
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from pyspark_lookup import LookupTable, errors
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.storage.stores import LOCAL_GRANULE_S, FileVersion, Listing, Store, open_store
from pyspark_lookup.storage.ufs import Ufs
from tests.support.fakes import FakeClock, FaultyStore, Host, make_host, wait_until_settled
from tests.support.s3server import S3Server
from tests.support.web_server import WebServer, web

__all__ = ["web"]

OLD, NEW = b"old" * 100, b"new" * 100
LATER = FakeClock().host().wall_s  # a clock long after every file of these tests


def ignore(kind: str) -> None:
    """A `Count` that counts nothing."""


def make_store(path: str | Path, now_s: Callable[[], float] = LATER, **options: Any) -> Store:
    return open_store(str(path), options, now_s)


def make_ufs(store: Any) -> Ufs:
    return Ufs(store, CacheMetricGroup(), 0, FakeClock().sleep)


def read_whole(store: Any, file: FileVersion) -> bytes:
    return make_ufs(store).read_ranges(file, [(0, file.size)])[0]


class Place(NamedTuple):
    """Somewhere a file lies: its URL, and how to write and remove it behind the store's back."""

    url: str
    write: Callable[[bytes], object]
    remove: Callable[[], object]


@pytest.fixture(params=["local", "memory", "http", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place of each kind that holds OLD."""
    states = itertools.count(1)
    if request.param == "http":
        web: WebServer = request.getfixturevalue("web")

        def publish(data: bytes) -> None:
            web.put("/dim/a.parquet", data, f'"{next(states)}"', formatdate(next(states), usegmt=True))

        new_place = Place(f"{web.url}/dim/a.parquet", publish, web.files.clear)
    elif request.param == "s3":
        url, client = f"{request.getfixturevalue('root')}/a.parquet", request.getfixturevalue("s3").client
        object_ = dict(zip(("Bucket", "Key"), url.removeprefix("s3://").split("/", 1), strict=True))
        new_place = Place(
            url, lambda data: client.put_object(**object_, Body=data), lambda: client.delete_object(**object_)
        )
    elif request.param == "memory":
        url, fs = "memory://dim/a.parquet", fsspec.filesystem("memory", skip_instance_cache=True)
        new_place = Place(url, functools.partial(fs.pipe_file, url), functools.partial(fs.rm_file, url))
    else:
        path = tmp_path / "dim" / "a.parquet"
        path.parent.mkdir()

        def write(data: bytes) -> None:
            if path.exists():
                wait_until_settled(path)
            path.write_bytes(data)

        new_place = Place(str(path), write, path.unlink)
    new_place.write(OLD)
    yield new_place
    MemoryFileSystem.store.clear()


def test_a_file_and_its_versions(place: Place) -> None:
    """Equal versions while a file is unchanged, another one for each write, an error once it was removed; `count` hears each call once."""
    first = make_store(place.url).get_meta(place.url, ignore)
    store, counted = make_store(place.url, lambda: LATER() + 1000), list[str]()
    assert first == store.get_meta(place.url, counted.append) == store.get_status(place.url, counted.append)
    assert (first.size, first.url, first.cacheable) == (len(OLD), store.url_of(place.url), True)
    assert counted == ["head", "list" if place.url.startswith("s3") else "head"]
    tokens = []
    for data in (OLD, NEW, OLD):
        if tokens:
            place.write(data)
        tokens.append(store.get_meta(place.url, ignore))
        assert (tokens[-1].size, read_whole(store, tokens[-1])) == (len(OLD), data)
        if not place.url.startswith("http"):  # where there are no listings
            counted.clear()
            for ask in (store.list_status, store.get_status):
                listing = ask(place.url.rpartition("/")[0], counted.append)
                assert isinstance(listing, Listing)
                assert (listing.files, listing.directories) == ((tokens[-1],), frozenset())
            assert counted == ["list", "list"]
    assert len({first, *tokens}) == (2 if place.url.startswith("s3") else 3)
    place.remove()
    with pytest.raises(errors.SourceChangedError, match="replaced or removed"):
        read_whole(store, tokens[-1])
    ufs = make_ufs(store)
    assert ufs.find_meta(place.url) is None
    for ask in (ufs.get_meta, ufs.get_status):
        with pytest.raises(errors.UfsNotFoundError, match=r"a\.parquet does not exist"):
            ask(place.url)
    place.write(NEW)
    assert read_whole(store, store.get_meta(place.url, ignore)) == NEW


@pytest.mark.parametrize("data", [NEW, NEW[:150], b""], ids=["equal size", "shorter", "empty"])
def test_overwritten_between_two_ranges(place: Place, data: bytes) -> None:
    """A file rewritten between two reads of one request is noticed, whatever its new size: no bytes are handed out."""
    store = FaultyStore(make_store(place.url))
    version = store.get_meta(place.url, ignore)

    def overwrite(kind: str, subject: object) -> None:
        if store.kinds().count("get") == 2:
            store.before = lambda kind, subject: None
            place.write(data)

    store.before = overwrite
    with pytest.raises(errors.SourceChangedError):
        make_ufs(store).read_ranges(version, [(0, 100), (200, 100)])
    assert store.kinds()[:3] == ["head", "get", "get"]
    with pytest.raises(errors.SourceChangedError):
        make_ufs(store).read_ranges(version, [(0, 100)])
    current = store.get_meta(place.url, ignore)
    assert current != version
    assert read_whole(store, current) == data


def settled(path: Path) -> Path:
    path.write_bytes(OLD)
    wait_until_settled(path)
    return path


@pytest.mark.parametrize("change", ["replace by older", "copy older", "rewrite", "replace by equal", "touch"])
def test_a_change_that_hides_from_mtime_is_seen(tmp_path: Path, change: str) -> None:
    """A file whose mtime went back or stayed, at equal size, is another version; reads of the old one are refused."""
    other_path = tmp_path / "other"
    other_path.write_bytes(NEW)
    path = settled(tmp_path / "file")
    status = path.stat()
    times = (status.st_atime_ns, status.st_mtime_ns)
    os.utime(other_path, ns=times if change == "replace by equal" else (10**15, 10**15))
    store = make_store(path)
    before = store.get_meta(str(path), ignore)
    match change:
        case "replace by older" | "replace by equal":
            os.replace(other_path, path)
        case "copy older":  # cp -p
            shutil.copy2(other_path, path)
        case "rewrite":  # in place, with the modification time put back to the nanosecond
            path.write_bytes(NEW)
            os.utime(path, ns=times)
        case "touch":
            os.utime(path)
    after = store.get_meta(str(path), ignore)
    assert after != before
    assert (after.size, after.cacheable, before.cacheable) == (before.size, True, True)
    with pytest.raises(errors.SourceChangedError):
        read_whole(store, before)
    assert read_whole(store, after) == path.read_bytes()


@pytest.mark.parametrize(
    ("age_s", "cacheable"), [(LOCAL_GRANULE_S * 1.5, True), (LOCAL_GRANULE_S, False), (-3600.0, False)]
)
def test_a_racy_time_is_not_kept(tmp_path: Path, age_s: float, cacheable: bool) -> None:
    """A file whose ctime is at most LOCAL_GRANULE_S before now, or later than now, has a version that is not `cacheable`, however old its mtime
    is."""
    path = tmp_path / "file"
    path.write_bytes(OLD)
    os.utime(path, (1_000_000, 1_000_000))
    changed_s = path.stat().st_ctime
    version = make_store(path, lambda: changed_s + age_s).get_meta(str(path), ignore)
    assert (version.cacheable, version.modified_at_s) == (cacheable, 1_000_000)


@pytest.mark.parametrize("name", ["größe 1", "a%20b", "a#b?c", "a::b"])
def test_spellings_of_a_local_path_are_one(tmp_path: Path, name: str) -> None:
    """`/x`, `file:/x`, `file:///x`, `local://x` and a relative path are one file under one URL; a slash at its end says nothing."""
    path = settled(tmp_path / name)
    spellings = [
        str(path), f"file:{path}", f"file://{path}", f"local://{path}", f"{tmp_path}/./x/../{name}",
        os.path.relpath(path),
    ]  # fmt: skip
    (version,) = {make_store(spelling).get_meta(spelling, ignore) for spelling in spellings}
    assert version.url == f"file://{path}"
    store = make_store(path)
    assert read_whole(store, version) == OLD
    assert store.url_of(f"{tmp_path}/") == store.url_of(str(tmp_path)) == f"file://{tmp_path}"
    assert store.list_status(f"{tmp_path}/", ignore) == store.list_status(str(tmp_path), ignore)


TREE = [
    "part-0.csv", "_SUCCESS", ".crc", "d=1/part-0.csv", "_d=2/part-0.csv", "plain/deep/part-1.csv",
    "_temporary/0/part-9.csv", ".git/config", "_hidden/0.json", "_spark_metadata/0", "d=1/_started",
    "d=1/_temporary/x", "d=1/.hidden=1/x",
]  # fmt: skip
LISTED = [
    ".crc", "_SUCCESS", "_d=2/part-0.csv", "_spark_metadata/0", "d=1/_started", "d=1/part-0.csv", "part-0.csv",
    "plain/deep/part-1.csv",
]  # fmt: skip
REQUESTS = {
    "d=1", "_d=2", "plain", "plain/deep", "_temporary", ".git", "_hidden", "_spark_metadata", "d=1/_temporary",
    "d=1/.hidden=1",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["local", "memory", "s3"])
def test_hidden_directories_are_not_entered(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    """`_x` and `.x` are named in a listing without their files, `_k=v` and `_spark_metadata` are entered; one call each, or one on S3."""
    root = {"local": str(tmp_path), "memory": "memory://tree", "s3": ""}[kind] or request.getfixturevalue("root")
    fs, _ = fsspec.url_to_fs(root)
    for name in TREE:
        fs.makedirs(os.path.dirname(f"{root}/{name}"), exist_ok=True)
        fs.pipe_file(f"{root}/{name}", b"x")
    counted: list[str] = []
    store = make_store(root)
    listing = store.list_status(root, counted.append)
    MemoryFileSystem.store.clear()
    assert [file.url.removeprefix(store.url_of(root) + "/") for file in listing.files] == LISTED
    assert listing.directories == (REQUESTS | {"_temporary/0"} if kind == "s3" else REQUESTS)
    entered = REQUESTS - {"_temporary", ".git", "_hidden", "d=1/_temporary", "d=1/.hidden=1"}
    assert counted == ["list"] * (1 if kind == "s3" else 1 + len(entered))


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    """A linked file or directory is listed under its own name; a link to a directory above ends, a dead one is not a file."""
    (tmp_path / "t" / "d").mkdir(parents=True)
    (tmp_path / "t" / "d" / "a").write_bytes(OLD)
    (tmp_path / "t" / "d" / "up").symlink_to("..")
    (tmp_path / "t" / "d" / "self").symlink_to(".")
    (tmp_path / "t" / "again").symlink_to("d")
    (tmp_path / "t" / "file").symlink_to("d/a")
    (tmp_path / "t" / "dead").symlink_to("nowhere")
    (tmp_path / "t" / "ouroboros").symlink_to("ouroboros")
    listing = make_store(tmp_path).list_status(str(tmp_path / "t"), ignore)
    root = f"file://{tmp_path}/t/"
    assert [file.url.removeprefix(root) for file in listing.files] == ["again/a", "d/a", "file"]
    assert len({file.identity for file in listing.files}) == 1
    assert {"d", "d/up", "d/self", "again"} <= listing.directories


def test_what_is_no_file_is_not_listed(tmp_path: Path) -> None:
    """A pipe or socket among the files is left out: opening it could wait for ever. A name that is not UTF-8 is one like another."""
    os.mkfifo(tmp_path / "pipe")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.csv")).write_bytes(OLD)
    store = make_store(tmp_path)
    (version,) = store.list_status(str(tmp_path), ignore).files
    assert version == store.get_meta(version.url, ignore)
    assert read_whole(store, version) == OLD


def test_a_disk_error_is_ours(tmp_path: Path) -> None:
    """An error of the operating system in a local read leaves as UfsError, with its text; so does a path that the system refuses."""
    path = "/proc/self/mem"  # reading at 0 is EIO
    store = make_store(path)
    version = store.get_meta(path, ignore)
    with pytest.raises(errors.UfsError, match="Input/output error") as caught, store.pin(version) as read:
        read(0, 10)
    assert isinstance(caught.value.__cause__, OSError)
    (tmp_path / "loop").symlink_to("loop")
    for name in ("x" * 5000, "loop", "a\0b"):
        for call in (store.get_meta, store.list_status, store.get_status):
            with pytest.raises(errors.UfsError):
                call(str(tmp_path / name), ignore)


class ScriptedFs(AbstractFileSystem):
    """One file `/f`; `info` and `error` are set by the test."""

    protocol = "scripted"
    info_of: ClassVar[dict[str, Any]] = {}
    error: ClassVar[BaseException | None] = None

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


@pytest.mark.parametrize(
    ("path", "options", "says"),
    [
        ("nosuch://u:pw@h/x", {}, r"path = 'nosuch://\[redacted\]@h/x'"),
        ("/x", {"anon": True}, r"lookup\.storage\.anon: local paths take no storage options"),
        ("scripted://x", {"nonsense": 1}, "nonsense"),
    ],
)
def test_stores_there_are_not(scripted: type[ScriptedFs], path: str, options: dict[str, Any], says: str) -> None:
    """A protocol fsspec does not know, and options that a store does not take, are refused, without credentials."""
    with pytest.raises(errors.OptionError, match=says):
        make_store(path, **options)


def test_scopes_tell_stores_apart(scripted: type[ScriptedFs], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stores where one path may mean two files differ in scope: by protocol, endpoint and host; others are equal."""
    places: list[tuple[str, dict[str, Any]]] = [
        ("/x", {}), ("memory://x", {}), ("s3://b/x", {}), *(("s3://b/x", {"endpoint_url": f"http://h:{n}"}) for n in (1, 2)),
        ("scripted://x", {}), *(("scripted://x", {"host": host}) for host in "ab"),
    ]  # fmt: skip
    scopes = [make_store(path, **options).scope for path, options in places]
    assert make_store("file:/x").scope == scopes[0]
    for protocol in ("s3", "s3a", "s3n"):
        store = make_store(f"{protocol}://c/y")
        assert store.scope == scopes[2]
        assert store.url_of(f"{protocol}://b/größe 1/x/") == "s3://b/größe 1/x"
    nested, flat = {"client_kwargs": {"endpoint_url": "http://h:1"}}, {"endpoint_url": "http://h:1", "anon": True}
    assert make_store("s3://b/x", **nested).scope == make_store("s3://b/x", **flat).scope == scopes[3]
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):  # which botocore takes
        monkeypatch.setenv(name, f"http://{name}:1")
        scopes.append(make_store("s3://b/x").scope)
    assert len(set(scopes)) == len(scopes)


MODIFIED = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("info", "other_info"),
    [
        ({"generation": "17"}, {"generation": "18"}), ({"etag": "0x1"}, {"etag": "0x2"}),
        ({"md5": "aa"}, {"md5": "bb"}), ({"mtime": 1000.25}, {"mtime": 1000.5}),
        ({"last_modified": MODIFIED.replace(tzinfo=None)}, {"last_modified": MODIFIED.replace(tzinfo=None, microsecond=0)}),
        ({"created": MODIFIED, "mtime": 5}, {"created": MODIFIED, "mtime": 6}), ({"ETag": "a"}, {"ETag": "a", "size": 299}),
        ({"etag": '"0x1"'}, {"etag": '"0x2"'}),
    ],
)  # fmt: skip
def test_the_strongest_token_is_the_identity(scripted: type[ScriptedFs], info: dict[str, Any], other_info: dict[str, Any]) -> None:  # fmt: skip
    """A filesystem's generation, ETag or hash, else its times, with the size, tell two states apart. HEAD and LIST agree, even if one quotes ETags."""
    store = make_store("scripted://f")
    versions = []
    for details in (info, other_info):
        scripted.info_of = details
        versions.append(store.get_meta("scripted://f", ignore))
        scripted.info_of = {**details, **({"etag": details["etag"].strip('"')} if "etag" in details else {})}
        assert store.list_status("scripted://d", ignore).files[0].identity == versions[-1].identity
    assert versions[0] != versions[1]
    assert all(version.cacheable for version in versions)


def test_a_time_within_the_remote_granule_is_racy(scripted: type[ScriptedFs]) -> None:
    """Where the time is the identity, a file must be two seconds old to be kept; without any identity it is never kept."""
    details = {"mtime": MODIFIED, "generation": "9"}
    times = {"mtime": MODIFIED}
    for info, age_s, cacheable in (({}, 9, False), (times, 2, False), (times, 2.5, True), (details, 0, True)):
        scripted.info_of = info
        store = make_store("scripted://f", lambda age_s=age_s: MODIFIED.timestamp() + age_s)
        version = store.get_meta("scripted://f", ignore)
        assert (version.cacheable, bool(version.identity)) == (cacheable, bool(info))
        assert version.modified_at_s == (MODIFIED.timestamp() if info else None)
        assert read_whole(store, version) == OLD


def client_error(status: int, code: str = "") -> botocore.exceptions.ClientError:
    answer: Any = {"Error": {"Code": code or str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.exceptions.ClientError(answer, "GetObject")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


STATUSES = {
    404: errors.UfsNotFoundError, 410: errors.UfsNotFoundError, 401: errors.UfsPermissionError, 403: errors.UfsPermissionError,
    408: errors.UfsTimeoutError, 429: errors.UfsThrottledError, 412: errors.SourceChangedError, 400: errors.UfsError,
    **dict.fromkeys((409, 500, 502, 503), errors.UfsUnavailableError),
}  # fmt: skip
"""What answers of these statuses become."""
CONNECTION_ERRORS = (ConnectionResetError, BrokenPipeError, aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)
TIMES = (botocore.exceptions.ReadTimeoutError, botocore.exceptions.ConnectTimeoutError)
ENDS = (botocore.exceptions.EndpointConnectionError, botocore.exceptions.ConnectionClosedError)
FOREIGN: list[tuple[type[BaseException], Sequence[BaseException]]] = [
    (errors.UfsNotFoundError, [NotADirectoryError("f"), caused(FileNotFoundError("f"), KeyError("f"))]),
    (errors.UfsPermissionError, [PermissionError("no"), botocore.exceptions.NoCredentialsError()]),
    (errors.UfsTimeoutError, [TimeoutError("slow"), fsspec.exceptions.FSTimeoutError(), *(kind(endpoint_url="h") for kind in TIMES)]),
    (errors.UfsUnavailableError, [*(kind(endpoint_url="h") for kind in ENDS), *(kind("f") for kind in CONNECTION_ERRORS)]),
    (errors.UfsUnavailableError, [caused(FileNotFoundError("f"), aiohttp.ServerDisconnectedError())]),
    (errors.UfsUnavailableError, [botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2)]),
    (errors.UfsThrottledError, [caused(OSError(errno.EBUSY, "slow down"), client_error(503, "SlowDown"))]),
    (errors.UfsError, [OSError(errno.EIO, "disk"), RuntimeError("odd")]),
    (KeyboardInterrupt, [KeyboardInterrupt("f")]),
    # S3 answers HEAD without a body that says more than the status.
    *((errors.UfsThrottledError if status == 503 else error_type, [client_error(status)]) for status, error_type in STATUSES.items()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error_type", "foreign"), [(error_type, error) for error_type, errors in FOREIGN for error in errors]
)
def test_foreign_errors_are_ours(
    scripted: type[ScriptedFs], error_type: type[BaseException], foreign: BaseException
) -> None:
    """Each error of a filesystem becomes the one of ours that says what it means, with the cause kept; Ctrl-C stays what it is."""
    store = make_store("scripted://f")
    version = store.get_meta("scripted://f", ignore)
    scripted.error = foreign
    for call in (store.get_meta, store.list_status, store.get_status):
        with pytest.raises(BaseException, match="f") as caught:
            call("scripted://f", ignore)
        assert type(caught.value) is error_type
        assert foreign in (caught.value, caught.value.__cause__)
    with pytest.raises(BaseException, match="f") as caught, store.pin(version) as read:
        read(0, 10)
    assert type(caught.value) is (errors.SourceChangedError if error_type is errors.UfsNotFoundError else error_type)
    assert foreign in (caught.value, caught.value.__cause__)


def test_a_web_identity_has_etag_and_time(web: WebServer) -> None:
    """Another ETag or another time is another version; a file without either, or changed in the last two seconds, is not kept."""
    versions = set()
    for etag, at_s in (('"a"', 1000), ('"b"', 1000), ('"a"', 1001), ("", 1000), ('"a"', 0)):
        url = web.put("/f.csv", OLD, etag, formatdate(at_s, usegmt=True) if at_s else "")
        versions.add(make_store(url).get_meta(url, ignore))
        for age_s in (2, 3) if at_s else ():
            assert make_store(url, lambda now_s=at_s + age_s: now_s).get_meta(url, ignore).cacheable is (age_s == 3)
    assert len(versions) == 5
    assert all(version.cacheable and version.url == url for version in versions)
    web.put("/f.csv", OLD)
    version = make_store(url).get_meta(url, ignore)
    assert (version.cacheable, read_whole(make_store(url), version)) == (False, OLD)
    web.files["/f.csv"] = (OLD, {"Content-Length": "", "Connection": "close"})
    with pytest.raises(errors.UfsError, match="does not say how large the file is"):
        make_store(url).get_meta(url, ignore)


def test_a_server_without_ranges_and_head(web: WebServer) -> None:
    """A server that answers a range with the whole file gives the same bytes; where HEAD is not allowed, a GET tells the version."""
    web.ranges = False
    web.before = lambda method, path: 405 if method == "HEAD" else None
    url = web.put("/f.csv", bytes(range(256)), '"a"')
    version = make_store(url).get_meta(url, ignore)
    parts = [(0, 256), (0, 10), (100, 50), (250, 6)]
    expected = [bytes(range(offset, offset + length)) for offset, length in parts]
    assert make_ufs(make_store(url)).read_ranges(version, parts) == expected


@pytest.mark.parametrize(("status", "error_type"), [*STATUSES.items(), (0, errors.UfsUnavailableError)])
def test_a_failing_web_server_is_not_a_missing_file(
    web: WebServer, status: int, error_type: type[errors.UfsError]
) -> None:
    """Answers of a web server are told apart, although fsspec says FileNotFoundError for all; URLs are redacted."""
    url = web.url + "/f.csv?sig=abc"
    store = make_store(url)
    web.before = lambda method, path: status
    redacted = r"sig=\[redacted\]"
    with pytest.raises(errors.UfsError, match=redacted) as caught, store.pin(FileVersion(url, 300, "")) as read:
        read(0, 10)
    assert type(caught.value) is (errors.SourceChangedError if error_type is errors.UfsNotFoundError else error_type)
    with pytest.raises(errors.UfsError, match=redacted) as caught:
        store.get_meta(url, ignore)
    assert type(caught.value) is error_type
    assert str(status or "reset") in str(caught.value) or error_type in (
        errors.UfsNotFoundError,
        errors.SourceChangedError,
    )
    assert "abc" not in str(caught.value)


def test_a_name_of_unknown_kind_costs_two_calls_at_most() -> None:
    """get_status tries a name with an extension as a file first and another as a directory; two calls at most."""
    fs = fsspec.filesystem("memory")
    for name in ("t/a.csv", "t/plain", "d.csv/x"):
        fs.pipe_file(f"memory://{name}", b"x")
    calls = {
        "t": ["list"], "t/a.csv": ["head"], "t/plain": ["list", "head"], "d.csv": ["head", "list"], "d.csv/": ["list"],
    }  # fmt: skip
    for name, expected_calls in calls.items():
        heard: list[str] = []
        status = make_store("memory://t").get_status(f"memory://{name}", heard.append)
        assert (heard, isinstance(status, FileVersion)) == (expected_calls, expected_calls[-1] == "head")
        with pytest.raises(errors.UfsNotFoundError):
            make_store("memory://t").get_status(f"memory://{name}-none", ignore)
    MemoryFileSystem.store.clear()


@pytest.fixture
def root(s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    return f"s3://{bucket}/t"


def below(ufs: Ufs, path: str) -> list[str] | None:
    """The names of what lies below a path; None of a file."""
    status = ufs.get_status(path)
    return [file.url for file in status.files] if isinstance(status, Listing) else None


def make_s3_host(s3: S3Server, path: str, **options: Any) -> Host:
    return make_host(path, None, storage={"endpoint_url": s3.endpoint}, **options)


def put_objects(s3: S3Server, bucket: str, *keys: str, data: bytes = OLD) -> None:
    """Write objects, and forget the requests that took."""
    for key in keys:
        s3.client.put_object(Bucket=bucket, Key=key, Body=data)
    s3.log.clear()


def requests(s3: S3Server) -> list[str]:
    """The kinds of requests since the last write."""
    return [request.kind for request in s3.log]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "4")


def test_an_empty_object_of_a_directorys_name(s3: S3Server, bucket: str, root: str, pages: None) -> None:
    """An empty object `mark` beside `mark/…`, as many tools put it, is not a file, whatever lies between; alone it is. One request is a page."""
    crowd = [f"t/mark-{number}" for number in range(5)]
    put_objects(s3, bucket, "t/mark", data=b"")
    ufs = make_s3_host(s3, root).ufs
    assert below(ufs, f"{root}/mark") is None
    put_objects(s3, bucket, *crowd)
    assert below(ufs, f"{root}/mark") is None
    put_objects(s3, bucket, "t/mark.x", "t/mark/a", "t/mark/d/b")
    put_objects(s3, bucket, "t/mark/d", "t/mark/e/", data=b"")
    inner = [f"{root}/mark/a", f"{root}/mark/d/b"]
    assert below(ufs, f"{root}/mark") == [file.url for file in ufs.list_status(f"{root}/mark").files] == inner


def test_a_slash_names_the_directory(s3: S3Server, bucket: str, cache_dir: Path) -> None:
    """Where an object and a directory have one name, the path with a slash is the directory, and without the object."""
    for key, value in (("t/both", 1), ("t/both/a", 2)):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"n": [value]}), sink)
        put_objects(s3, bucket, key, data=sink.getvalue().to_pybytes())
    options = {"lookup.storage.endpoint_url": s3.endpoint, "lookup.cache.dir": str(cache_dir)}
    for _ in range(2):
        for path, value in (("t/both", 1), ("t/both/", 2)):
            for more in ({}, {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "1 h"}):
                table = LookupTable(f"s3://{bucket}/{path}", {**options, "lookup.format": "parquet", **more})
                assert table.scan().to_pylist() == [{"n": value}]


@pytest.mark.parametrize("kind", ["plain", "versioned", "multipart"])
@pytest.mark.parametrize("key", ["dim/a.parquet", "dim/größe 1/a+b&c=d%20.csv"])
def test_head_and_list_give_one_token(s3: S3Server, bucket: str, kind: str, key: str) -> None:
    """An object's version is equal by HEAD, LIST and status, also versioned and uploaded in parts; each range asks for its ETag, and no more."""
    if kind == "versioned":
        s3.client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    put_objects(s3, bucket, key, data=NEW)
    put_objects(s3, bucket, key)
    if kind == "multipart":
        upload = {"UploadId": s3.client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]}
        upload |= {"Bucket": bucket, "Key": key}
        etag = s3.client.upload_part(**upload, PartNumber=1, Body=OLD)["ETag"]
        s3.client.complete_multipart_upload(**upload, MultipartUpload={"Parts": [{"ETag": etag, "PartNumber": 1}]})
        s3.log.clear()
    path, calls = f"s3://{bucket}/{key}", list[tuple[str, str]]()
    ufs = make_s3_host(s3, path).ufs
    by_head = ufs.get_meta(path)
    (by_list,) = ufs.list_status(path.rpartition("/")[0]).files
    assert by_head == by_list == ufs.get_status(path)
    assert requests(s3) == ["head", "list", "list"]
    assert (by_head.url, by_head.size, by_head.cacheable) == (path, len(OLD), True)
    assert by_head.identity.endswith("-1") is (kind == "multipart")
    assert by_head.modified_at_s is not None

    def noted(environ: Any, start_response: Any, answer: Any) -> Any:
        calls.append((environ["HTTP_IF_MATCH"], environ["HTTP_RANGE"]))
        return answer(environ, start_response)

    s3.between = noted
    assert ufs.read_ranges(by_list, [(0, 100), (200, 100)]) == [OLD[:100], OLD[200:]]
    etag = by_list.identity.removeprefix("etag:")
    assert sorted(calls) == [(f'"{etag}"', "bytes=0-99"), (f'"{etag}"', "bytes=200-299")]
    assert requests(s3)[3:] == ["get", "get"]


def test_what_a_name_is_costs_one_request(s3: S3Server, bucket: str) -> None:
    """A file, a directory among siblings that share its name's beginning, or nothing: told by exactly one LIST."""
    keys = ["dim-old/a", "dim.parquet", "dim/a", "dim/b=1/c", "dim0", "dim0x/y", "dimension/z"]
    put_objects(s3, bucket, *keys)
    root = f"s3://{bucket}/"
    ufs = make_s3_host(s3, root).ufs
    directories = {"dim": keys[2:4], "dim/": keys[2:4], "dim-old": keys[:1], "": keys}
    for path in (*directories, "dim.parquet", "dim0", "di", "dim/a/b", "nothing"):
        s3.log.clear()
        if path not in directories and path not in keys:
            with pytest.raises(errors.UfsNotFoundError, match=f"{path} does not exist"):
                ufs.get_status(root + path)
            assert requests(s3) == ["list"]
            continue
        status = ufs.get_status(root + path)
        assert requests(s3) == ["list"]
        if isinstance(status, Listing):
            assert [file.url for file in status.files] == [root + key for key in directories[path]]
            assert status.files == ufs.list_status(root + path).files
        else:
            assert (status.url, status) == (root + path, ufs.get_meta(root + path))
    with pytest.raises(errors.UfsNotFoundError, match="is a bucket"):
        ufs.get_meta(root)


@pytest.mark.parametrize(("crowd", "asked_for"), [("dim-{:02}", 2), ("dim.{:02}", 2), ("dim{:02}", 1)])
def test_a_crowd_costs_one_request_more(s3: S3Server, bucket: str, pages: None, crowd: str, asked_for: int) -> None:
    """However many keys sort before what lies below a name, a directory costs two requests, a file one; keys after it cost nothing."""
    put_objects(s3, bucket, *(crowd.format(n) for n in range(10)), "dim/a")
    root = f"s3://{bucket}"
    ufs = make_s3_host(s3, root).ufs
    assert below(ufs, f"{root}/dim") == [f"{root}/dim/a"]
    assert requests(s3) == ["list"] * asked_for
    assert below(ufs, f"{root}/{crowd.format(8)}") is None
    assert requests(s3) == ["list"] * (asked_for + 1)


CALLS: dict[str, Callable[[Host, str], object]] = {
    "head": lambda host, path: host.ufs.get_meta(path),
    "list": lambda host, path: host.ufs.list_status(path.rpartition("/")[0]),
    "status": lambda host, path: host.ufs.get_status(path),
    "get": lambda host, path: host.ufs.read_ranges(FileVersion(path, 300, ""), [(0, 300)]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_busy_server_is_asked_again(s3: S3Server, bucket: str, call: Callable[[Host, str], object]) -> None:
    """503, 500 and 429 are tried again by us alone: each request at the server is a counted attempt. A refusal is raised at once."""
    path = f"s3://{bucket}/d/a"
    put_objects(s3, bucket, "d/a")
    host = make_s3_host(s3, path, max_retries=3)
    answers = iter([503, 500, 429])
    s3.before = lambda method, path: next(answers, None)
    call(host, path)
    counts = host.metrics.snapshot()
    assert len(s3.log) == 4 == counts["ufsHeadCount"] + counts["ufsListCount"] + counts["ufsGetCount"]
    assert counts["ufsRetryCount"] == 3 == len(host.clock.slept)
    for status, error, attempts in ((500, errors.UfsUnavailableError, 4), (403, errors.UfsPermissionError, 1)):
        s3.log.clear()
        s3.before = lambda method, path, status=status: status
        with pytest.raises(error):
            call(host, path)
        assert len(s3.log) == attempts
