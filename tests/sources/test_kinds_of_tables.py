"""What holds for every kind of table: what its path is, what lies inside it, which options name its versions."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from pyspark_lookup import LookupTable, errors
from tests.support.delta_tables import log_of_files
from tests.support.fuzzing import BY_NIGHT, share
from tests.support.iceberg_definition import sql_catalog
from tests.support.s3server import S3Server
from tests.support.version_tokens import TWO, Process

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment  # from Python 3.11 on

    from tests.support.s3server import Application

ROWS = pa.table({"p": ["a", "b"], "id": [1, 2]})


def write_delta(home: Path) -> Path:
    write_deltalake(str(home / "t"), ROWS, partition_by=["p"], mode="append")
    DeltaTable(str(home / "t")).delete("id = 2")
    return home / "t"


def write_iceberg(home: Path) -> Path:
    """A directory whose hint names the newest metadata file."""
    catalog, _ = sql_catalog(home)
    table = catalog.create_table_if_not_exists("ns.t", ROWS.schema)
    table.append(ROWS)
    root = Path(table.location().removeprefix("file://"))
    newest = table.metadata_location.rpartition("/")[2].removesuffix(".metadata.json")
    (root / "metadata" / "version-hint.text").write_text(newest)
    return root


def write_managed(home: Path) -> Path:
    with LookupTable(str(home / "t"), {"lookup.keys": "id", "lookup.cache.dir": str(home / "cache")}) as table:
        table.write(ROWS)
        table.delete([2])
    return home / "t"


def write_hudi(home: Path) -> Path:
    (home / "t" / ".hoodie").mkdir(parents=True)
    (home / "t" / ".hoodie" / "hoodie.properties").write_text("hoodie.table.name=t")
    (home / "t" / "2026" / "01").mkdir(parents=True)
    pq.write_table(ROWS, home / "t" / "2026" / "01" / "x.parquet")
    return home / "t"


@pytest.mark.parametrize("write", [write_delta, write_iceberg, write_managed, write_hudi])
def test_every_place_inside_a_table_is_refused(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """Each directory, a file of each (by night all) and globs, also through links, and what is above: no rows, but the table's path."""
    options = {"lookup.cache.dir": str(tmp_path / "c")}
    (tmp_path / "lake").mkdir()
    root = write(tmp_path / "lake")
    places = [*root.rglob("*")]
    directories, files = [p for p in places if p.is_dir()], [p for p in places if p.is_file()]
    files = files if BY_NIGHT else list({(path.parent, path.suffix): path for path in files}.values())
    assert directories and files
    globs = [Path(f"{directory}/*") for directory in directories] + [file.with_suffix(".*") for file in files]
    link, chain = tmp_path / "link", tmp_path / "chain"
    link.symlink_to(directories[-1])
    chain.symlink_to(link)
    beside = tmp_path / "x.parquet"
    beside.symlink_to(files[-1])
    for place in [*directories, *files, *globs, link, chain, beside]:
        if place.name.endswith((".metadata.json", ".metadata.*")):
            continue  # by which an Iceberg table is named
        for _ in range(
            2 if place in (*directories, chain) else 1
        ):  # nothing about the first look lets the second one through
            with pytest.raises(errors.NotATableError, match=f"{root}") as refusal:
                LookupTable(str(place), options).scan()
        assert isinstance(refusal.value, errors.TableFormatError), place
    for above in (root.parent, root.parent / "*"):
        with pytest.raises(errors.TableFormatError, match=f"{root.parent}"):
            LookupTable(str(above), options).scan()
    with pytest.raises((errors.TableFormatError, errors.NotSupportedError), match=f"{root}"):
        LookupTable(f"{directories[0]}/new", {**options, "lookup.keys": "id"}).write(ROWS)
    assert not (directories[0] / "new").exists()


@pytest.mark.parametrize(
    ("marker", "says"),
    [
        ("_delta_log/_commits", r"_delta_log holds no commit.*move _delta_log away"),
        ("_lookup", r"log is empty or gone.*move _lookup away"), ("metadata", None),
    ],
)  # fmt: skip
def test_a_directory_of_a_tables_name(tmp_path: Path, marker: str, says: str | None) -> None:
    """Without a table's file in it, nothing beside it is refused; its parent is read, or refused with what to move away."""
    place = tmp_path / "t" / marker
    place.mkdir(parents=True)
    (tmp_path / "t" / "k=1").mkdir()
    pq.write_table(ROWS.select(["id"]), tmp_path / "t" / "k=1" / "x.parquet")
    options = {"lookup.cache.dir": str(tmp_path / "c")}
    assert LookupTable(tmp_path / "t" / "k=1", options).scan().num_rows == 2
    if says is None:
        assert LookupTable(tmp_path / "t", options).scan().num_rows == 2
    else:
        with pytest.raises(errors.PysparkLookupError, match=says):
            LookupTable(tmp_path / "t", options).scan()


def test_an_s3_path_is_looked_at_once(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look of a host lists one entry for each directory above; later ones nothing. A forbidden listing refuses no table."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    bucket, options = f"b-{uuid.uuid4().hex[:12]}", {"lookup.cache.dir": str(tmp_path / "c")}
    s3.client.create_bucket(Bucket=bucket)
    s3.client.put_object(Bucket=bucket, Key="t/_delta_log/00000000000000000000.json", Body=b"{}")
    sink = pa.BufferOutputStream()
    pq.write_table(ROWS.select(["id"]), sink)
    for key in ("t/p=b/x.parquet", "plain/k=1/x.parquet"):
        s3.client.put_object(Bucket=bucket, Key=key, Body=sink.getvalue().to_pybytes())
    for place in ("t/p=b", "t/p=b/x.parquet", "t/p=b/x*/*.parquet", "t/p=b/*.parquet", "t/_delta_log"):
        message = rf"lies inside s3://{bucket}/t, a Delta table.*Read s3://{bucket}/t "
        with pytest.raises(errors.TableFormatError, match=message):
            LookupTable(f"s3://{bucket}/{place}", options).scan()

    def forbid(environ: WSGIEnvironment, start_response: StartResponse, store: Application) -> Iterable[bytes]:
        query = parse_qs(environ["QUERY_STRING"])
        if "prefix" in query and not query["prefix"][0].startswith("plain/k=1"):
            start_response("403 Forbidden", [("Content-Length", "0")])
            return [b""]
        return store(environ, start_response)

    s3.between = forbid
    s3.log.clear()
    counts = []
    for _ in range(2):
        with LookupTable(f"s3://{bucket}/plain/k=1", options) as table:
            assert table.scan().num_rows == 2
        counts.append(s3.count()["list"])
        s3.log.clear()
    assert counts[0] == counts[1] + 2 * 4  # two directories above, and four kinds of tables


def write_files(home: Path) -> Path:
    (home / "t").mkdir()
    pq.write_table(ROWS, home / "t" / "x.parquet")
    return home / "t"


PINS = [
    *(("lookup.version", position) for position in ("0", "1", "99")),
    *(("lookup.timestamp", f"{year}-01-01T00:00:00Z") for year in (2020, 2200)),
    *(("lookup.branch", "main"), ("lookup.branch", "x"), ("lookup.tag", "x"), ("lookup.valid-write-ids", "1:1:1:")),
]


@pytest.mark.parametrize("write", [write_delta, write_iceberg, write_managed, write_files])
def test_a_host_that_knows_a_table_judges_pins_as_another_does(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """Each option that names a version gives the rows or the error that it gives on a host that has never seen the table."""
    root = write(tmp_path)
    for turn, mode in enumerate(({}, {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "0"})):
        used_host = {"lookup.cache.dir": str(tmp_path / f"used{turn}"), **mode}
        LookupTable(str(root), used_host).scan()
        for number, (key, value) in share([*enumerate(PINS)], turn, 2):
            new_host = {"lookup.cache.dir": str(tmp_path / f"new-{turn}-{number}"), **mode}
            answers = [read(str(root), {**host, key: value}) for host in (new_host, used_host)]
            assert answers[0] == answers[1], (key, value)


@pytest.mark.parametrize("write", [write_delta, write_iceberg, write_managed])
def test_another_host_finds_the_version_that_it_is_told(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """A task on a host that has never seen the table gets the version that the query has announced, though the table has changed since."""
    root = write(tmp_path)
    announced = Process(root, tmp_path / "driver").announce()
    write(tmp_path)
    assert Process(root, tmp_path / "driver").announce(TWO).digest != announced.digest
    assert Process(root, tmp_path / "other").receive(announced)[1].digest == announced.digest


def give_wrong_checksum(file: Path) -> None:
    """Change the checksum in the header of each page of a Parquet file."""
    # "struct PageHeader { 1: PageType type; 2: i32 uncompressed_page_size; 3: i32 compressed_page_size; 4: i32 crc; … }"
    number = rb"\x15[\x80-\xff]*[\x00-\x7f]"
    content, count = re.subn(
        rb"(\x15[\x00\x04]" + number * 2 + rb"\x15)([\x80-\xff])(?=[\x80-\xff]*[\x00-\x7f][\x1c\x3c])",
        lambda match: match[1] + bytes([match[2][0] ^ 1]),
        file.read_bytes(),
    )
    assert count
    file.write_bytes(content)


def test_checksums_of_pages(tmp_path: Path) -> None:
    """A wrong checksum of a page is damage in the files of a managed table, and says nothing in those of other writers."""
    part = tmp_path / "part.parquet"
    pq.write_table(ROWS, part, write_page_checksum=True)
    give_wrong_checksum(part)
    (tmp_path / "delta").mkdir()
    shutil.copy(part, tmp_path / "delta")
    fields = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in (("p", "string"), ("id", "long"))]
    log_of_files(tmp_path / "delta", {"type": "struct", "fields": fields})
    table = sql_catalog(tmp_path)[0].create_table("ns.checked", ROWS.schema)
    table.add_files([part.as_uri()])
    options = {"lookup.cache.dir": str(tmp_path / "new")}  # that of the writer has the bytes
    for path in (tmp_path / "delta", table.metadata_location):
        assert LookupTable(str(path), options).scan().sort_by("id") == ROWS
    managed = write_managed(tmp_path)
    give_wrong_checksum(next(managed.rglob("part-*.parquet")))
    with pytest.raises(errors.DamagedFileError, match="checksum"):
        LookupTable(str(managed), options).scan()


def read(path: str, options: dict[str, str]) -> tuple[str, object]:
    """A table's rows, or the error of ours that there is instead."""
    try:
        return "rows", LookupTable(path, options).scan().sort_by("id").to_pylist()
    except errors.PysparkLookupError as error:
        return type(error).__name__, str(error)
