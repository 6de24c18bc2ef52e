"""Iceberg tables that are damaged, gone or not understood, and catalogs that do not answer: an error that names the file and the snapshot."""

import contextlib
import gzip
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.avro.decoder import StreamingBinaryDecoder

from pyspark_lookup import LookupTable, errors
from pyspark_lookup.sources.iceberg import avro, metadata
from pyspark_lookup.sources.iceberg.catalog import Catalog
from tests.support.fuzzing import altered, damaged, fuzzed
from tests.support.iceberg_definition import in_catalog, sql_catalog
from tests.support.iceberg_manifests import File
from tests.support.iceberg_oracle import DATA, EQUALITY, POSITION, is_vector
from tests.support.iceberg_writing import IcebergTable
from tests.support.lake_tables import MODES, opened
from tests.support.orc_files import varint
from tests.support.rest_catalog import RestCatalog, error_body

COLUMNS = {"id": "int", "name": "string"}
CACHED = {"metadata.source": "CACHE", "metadata.sync-interval": "0"}
ROWS = [0, 2, 5, 6, 8, 9]


def write(home: Path, publish: Callable[[str], None] | None = None) -> IcebergTable:
    """A table with deletes of each kind: rows 0 to 9 without 1, 3, 4, 7."""
    table = IcebergTable.create(home, COLUMNS, 2, publish=publish)
    files = [table.data([{"id": number, "name": "x"} for number in range(start, start + 5)])[0] for start in (0, 5)]
    table.commit(files)
    table.commit([table.equality([{"id": 1}], ["id"])])
    table.commit([table.positions([(files[0], 3), (files[0], 4)])])
    table.upgrade(3)
    table.commit(table.vectors([(files[1], [2])]))
    return table


@pytest.fixture
def table(tmp_path: Path) -> IcebergTable:
    return write(tmp_path / "table")


def ids(table: Path | str, cache: Path, mode: str = "none", **options: Any) -> list[int]:
    numbers = opened(table, cache, mode, "id", **options).scan().column("id").to_pylist()
    return sorted(numbers, key=lambda number: (number is None, number))  # damage may also make nulls


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def newest_manifest(table: IcebergTable) -> Path:
    lists = {table.local(snapshot["manifest-list"]) for snapshot in table.meta["snapshots"]}
    manifests = [path for path in table.home.glob("metadata/*.avro") if path not in lists]
    return max(manifests, key=lambda path: path.stat().st_mtime_ns)


def first(which: Callable[[File], bool]) -> Callable[[IcebergTable], Path]:
    """The first live file of a kind."""
    return lambda table: table.local(next(entry.file for entry in table.live() if which(entry.file))["file_path"])


FILES: dict[str, Callable[[IcebergTable], Path]] = {
    "metadata": lambda table: table.metadata,
    "list": lambda table: table.local(table.meta["snapshots"][-1]["manifest-list"]),
    "manifest": newest_manifest,
    "equality": first(lambda file: file["content"] == EQUALITY),
    "positions": first(lambda file: file["content"] == POSITION and not is_vector(file)),
    "vector": first(is_vector),
    "data": first(lambda file: file["content"] == DATA),
}
MISSING = (errors.VersionGoneError, errors.UfsNotFoundError)


@pytest.mark.parametrize("harm", [cut, Path.unlink], ids=["cut", "missing"])
@pytest.mark.parametrize("which", FILES)
def test_harm_is_told(table: IcebergTable, tmp_path: Path, which: str, harm: Callable[[Path], None]) -> None:
    """Damage is told by the name of the file, and of the snapshot that needs it."""
    path, mode = FILES[which](table), ("none", "full")[[*FILES].index(which) % 2]
    path.write_bytes(path.read_bytes()[:20]) if which == "vector" and harm is cut else harm(path)
    with pytest.raises((errors.DamagedFileError, *MISSING)) as caught:
        ids(table.home, tmp_path / "cache", mode)
    assert path.name in str(caught.value)
    if which in ("list", "manifest"):
        assert str(table.meta["current-snapshot-id"]) in str(caught.value), str(caught.value)


@pytest.mark.parametrize("change", ["checksum", "cardinality", "no place", "two"])
def test_a_vector_that_is_damaged(tmp_path: Path, change: str) -> None:
    """A vector's bytes are damaged, or what the manifest says of it; or there are two vectors of one file."""
    table = IcebergTable.create(tmp_path / "t", COLUMNS, 3)
    (file,) = table.data([{"id": number, "name": "x"} for number in range(5)])
    table.commit([file])
    vector, second = (table.vectors([(file, [place])])[0] for place in (2, 3))
    path = table.local(vector["file_path"])
    data, start = bytearray(path.read_bytes()), vector["content_offset"]
    match change:
        case "checksum":
            data[start + vector["content_size_in_bytes"] - 1] ^= 1
        case "cardinality":
            vector["record_count"] = 2
        case "no place":
            vector["content_offset"] = None
    path.write_bytes(bytes(data))
    table.commit([vector, second] if change == "two" else [vector])
    message = {"no place": "deletion vector", "two": "two deletion vectors"}.get(change, path.name)
    with pytest.raises(errors.DamagedFileError, match=message):
        ids(table.home, tmp_path / "cache")


def test_hints(table: IcebergTable, tmp_path: Path) -> None:
    """A directory without a hint is refused with advice; a hint that names nothing, or is none, is named."""
    hint = table.home / "metadata" / "version-hint.text"
    for text in (b"99", b"../v1", b"\xff\xfe", b""):
        hint.write_bytes(text)
        with pytest.raises(errors.DamagedFileError, match=r"version-hint\.text"):
            ids(table.home, tmp_path / f"cache{text[:3]!r}")
    hint.unlink()
    for mode in MODES:
        with pytest.raises(errors.PysparkLookupError, match=r"version-hint\.text.*lookup\.catalog.* metadata file"):
            ids(table.home, tmp_path / "cache", mode)
    assert ids(table.metadata, tmp_path / "cache") == ROWS
    hint.write_text(table.metadata.name.removeprefix("v").removesuffix(".metadata.json"))
    assert ids(table.home, tmp_path / "cache") == ROWS


def _hang_up() -> Any:
    """Ends the connection, which would be answered on for as long as it is open."""
    raise ConnectionAbortedError


# What a catalog answers, and words of the error.
CATALOG_FAULTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: (503, error_body(503, "Unavailable", "later")), "later"),
    (lambda: (200, b"<html>"), ""),
    (lambda: (200, {"metadata-location": "x"}), ""),
    (_hang_up, ""),
]


@pytest.mark.parametrize(("fault", "message"), CATALOG_FAULTS)
def test_a_catalog_that_fails(
    rest_catalog: RestCatalog, tmp_path: Path, fault: Callable[[], Any], message: str
) -> None:
    """A failing catalog is an error that names it; in CACHE mode the last version answers, counted, also for a table that is opened anew."""
    table = write(tmp_path / "t", rest_catalog.publisher("ns.table"))

    def readers(host: str) -> list[LookupTable]:
        catalog, cache = {"type": "rest", "uri": rest_catalog.uri}, tmp_path / host
        return [opened("ns.table", cache, "partial", "id", catalog, **more) for more in ({}, CACHED)]

    warm, cold = readers("cache"), readers("late")
    assert [reader.get_many(ROWS).num_rows for reader in warm] == [len(ROWS)] * 2
    rest_catalog.fault = lambda method, path: fault() if "tables" in path else None
    for current, cached in (warm, readers("cache")):
        with pytest.raises(errors.CatalogUnavailableError, match=f"catalog 'tests'.*{message}"):
            current.get_many(ROWS)
        before = cached.metrics()["staleServedCount"]
        assert cached.get_many(ROWS).num_rows == len(ROWS)
        assert cached.metrics()["staleServedCount"] > before
    with pytest.raises(errors.CatalogUnavailableError, match="catalog 'tests'"):
        cold[1].scan()
    rest_catalog.fault = None
    table.commit(table.data([{"id": 10, "name": "new"}]))
    assert [reader.scan().num_rows for reader in warm] == [len(ROWS) + 1] * 2


def test_a_catalog_that_says_nothing() -> None:
    """A server that takes a connection and does not answer is given up, and asked anew the next time."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        catalog = Catalog("silent", [("type", "rest"), ("uri", uri)], call_s=0.2)
        for _ in range(2):
            with pytest.raises(errors.CatalogUnavailableError, match=r"'silent' has not answered within 0\.2 s"):
                catalog.load("ns.table")


def test_what_a_catalog_does_not_know(rest_catalog: RestCatalog, tmp_path: Path) -> None:
    """A table, a namespace, a catalog that nobody has configured; a table that was dropped; and a catalog that is damaged."""
    catalog, properties = sql_catalog(tmp_path)
    for catalog_properties in (properties, {"type": "rest", "uri": rest_catalog.uri}):
        for name in ("ns.nothing", "nowhere.at.all"):
            with pytest.raises(errors.UfsNotFoundError, match=rf"'tests' has no table {name}"):
                ids(name, tmp_path / "cache", catalog=catalog_properties)
    with pytest.raises(errors.OptionError, match=r"lookup\.catalog = 'nobody'"):
        LookupTable("ns.table", {"lookup.catalog": "nobody", "lookup.cache.dir": str(tmp_path / "cache")}).scan()
    with pytest.raises(errors.OptionError, match=r"lookup\.catalog = 'tests'"):
        ids("ns.table", tmp_path / "cache", catalog={"type": "no such type", "uri": "x"})
    with pytest.raises(errors.OptionError, match=r"namespace\.table"):
        ids("table", tmp_path / "cache", catalog=properties)
    write(tmp_path / "t", in_catalog(catalog, "ns.table"))
    reader = opened("ns.table", tmp_path / "cache", "partial", "id", properties)
    assert reader.get_many([0, 1]).num_rows == 1
    catalog.drop_table("ns.table")
    with pytest.raises(errors.UfsNotFoundError, match=r"no table ns\.table"):
        reader.get_many([0, 1])
    catalog.close()
    (tmp_path / "catalog.db").write_bytes(b"\x93not this" * 50)
    with pytest.raises(errors.CatalogUnavailableError, match="'tests'"):
        reader.get_many([0, 1])


def test_credentials_are_refused_and_not_shown(tmp_path: Path) -> None:
    """Credentials of a catalog, or of its store, are refused as options; neither they nor a password in the catalog's address is shown."""
    for name in ("token", "s3.secret-access-key", "adls.account-key", "password"):
        with pytest.raises(errors.OptionError, match=rf"lookup\.catalog\.{name} looks like a credential") as caught:
            ids("ns.table", tmp_path / "cache", catalog={"uri": "http://127.0.0.1:9", name: "hidden-treasure"})
        assert "hidden-treasure" not in str(caught.value)
    with pytest.raises(errors.PysparkLookupError) as error:
        ids("ns.table", tmp_path / "cache", catalog={"type": "rest", "uri": "http://me:hidden-treasure@127.0.0.1:9"})
    assert "hidden-treasure" not in str(error.value)


def test_formats_that_are_not_known(table: IcebergTable, tmp_path: Path) -> None:
    """Format 4, encryption, AVRO files, names that differ in case only."""
    whole = dict(table.meta)
    for change, message in (
        ({"encryption-keys": [{"key-id": "1"}]}, "encrypted"),
        ({"format-version": 4}, "version 4"),
    ):
        table.meta = whole | change
        table.save()
        with pytest.raises(errors.NotSupportedError, match=message):
            ids(table.home, tmp_path / "cache")
    table.meta = whole
    snapshot = table.meta["current-snapshot-id"]
    (file,) = table.data([{"id": 20, "name": "x"}])
    new_snapshot = table.commit([file | {"file_format": "AVRO"}])
    message = rf"snapshot {new_snapshot} .*{Path(file['file_path']).name} is a file of format AVRO"
    with pytest.raises(errors.NotSupportedError, match=message):
        ids(table.home, tmp_path / "cache")
    assert ids(table.home, tmp_path / "cache", version=snapshot) == ROWS
    table.set_current(snapshot)
    table.add_column("NAME", "string")
    with pytest.raises(errors.NotSupportedError, match="letter case"):
        ids(table.home, tmp_path / "cache")
    assert ids(table.home, tmp_path / "cache", columns="id") == ROWS


def rewrite(path: Path, codec: str) -> list[Any]:
    """Write a manifest, or a list of them, anew with this codec; its entries."""
    with path.open("rb") as source:
        reader: Any = fastavro.reader(source)
        rows, schema = list(reader), reader.writer_schema
        meta = {name: value for name, value in reader.metadata.items() if not name.startswith("avro.")}
    with path.open("wb") as out:
        fastavro.writer(out, schema, rows, codec=codec, metadata=meta)
    return rows


def _varint(number: int) -> bytes:
    """As Avro writes a long."""
    return varint((number << 1 ^ number >> 63) & (1 << 64) - 1)


@pytest.mark.parametrize("which", ["list", "manifest"])
@pytest.mark.parametrize("packed", [False, True])
def test_lengths_that_lie(table: IcebergTable, tmp_path: Path, which: str, packed: bool) -> None:
    """If the length of a block, or of a text in one, is wrong, nothing beyond the end is read."""
    path = FILES[which](table)
    rows = rewrite(path, "deflate" if packed else "null")
    data = path.read_bytes()
    start = data.index(data[-16:]) + 16  # behind the first mark between blocks
    name = rows[0]["manifest_path"] if which == "list" else rows[0]["data_file"]["file_path"]
    text = _varint(len(name)) + name.encode()
    for number, length in enumerate((2**31, 2**63 - 1, -1)):
        block = _varint(len(rows)) + _varint(length) + data[start + 3 :]
        variants = [data[:start] + block, data[:start] + _varint(length) + data[start + 1 :]]
        if not packed:
            variants.append(data.replace(text, _varint(length) + name.encode()))
        for place, content in enumerate(variants):
            path.write_bytes(content)
            with contextlib.suppress(errors.PysparkLookupError):  # a count of rows may be believed, if it is less
                assert ids(table.home, tmp_path / f"cache{number}-{place}") == ROWS


def test_what_decompresses_to_more_than_is_read(
    table: IcebergTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that decompresses to more is refused by name, before it is in memory; manifests of either codec are read if there is room for them."""
    path = FILES["list"](table)
    for codec in ("deflate", "bzip2"):
        rewrite(path, codec)
        assert ids(table.home, tmp_path / codec) == ROWS
    monkeypatch.setattr(avro, "_BYTES_AT_MOST", 100)
    with pytest.raises(errors.DamagedFileError, match=rf"{path.name} is not an .*list: .*more than 100 bytes"):
        ids(table.home, tmp_path / "other")
    monkeypatch.setattr(metadata, "_TEXT_AT_MOST", 100)
    with pytest.raises(errors.DamagedFileError, match=r"x\.json is not Iceberg metadata: .*more than 100 bytes"):
        metadata.parse_metadata("x.json", gzip.compress(b" " * 101), "x")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", FILES)
def test_bytes_that_are_others(table: IcebergTable, tmp_path: Path, which: str) -> None:
    """The rows are right, or an error of the package names the file: for a host that has never seen the table."""
    path = FILES[which](table)
    whole = path.read_bytes()
    count = iter(range(10**9))

    @fuzzed(12 if which != "metadata" else 20)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        if which == "metadata" and data.draw(st.booleans()):
            content = json.dumps(data.draw(altered(json.loads(whole)))).encode()
        else:
            # Not the footer of Parquet: pyarrow ends the process at some.
            body = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little") if whole[:4] == b"PAR1" else len(whole)
            content = data.draw(damaged(whole[:body])) + whole[body:]
        path.write_bytes(content)
        try:
            judge(table, tmp_path / f"cache-{next(count)}", path, content)
        finally:
            path.write_bytes(whole)

    check()


def judge(table: IcebergTable, cache: Path, path: Path, content: bytes) -> None:
    try:
        rows = ids(table.home, cache)
    except errors.UnreadableColumnError as problem:
        assert "name the other columns in lookup.columns" in str(problem)  # the column is named, not the file
    except errors.PysparkLookupError as problem:
        assert path.name in str(problem) or str(table.home) in str(problem), (str(problem), content)
    else:
        # Metadata has no checksum: what says another thing that makes sense is believed.
        assert rows == ROWS or path.suffix in (".json", ".avro", ".parquet"), (rows, content)


def test_numbers_and_bytes_are_decoded_as_by_pyiceberg() -> None:
    """Any bytes give what PyIceberg's decoder, which is slower, makes of them, or an error at the same place."""

    def decode(decoder: Any, operations: list[tuple[str, int]]) -> list[Any]:
        values: list[Any] = []
        try:
            for name, count in operations:
                pairs: dict[int, bytes] = {}
                arguments = {"read_int_bytes_dict": (count, pairs), "read_ints": (count,)}.get(name, ())
                values += [getattr(decoder, name)(*arguments), pairs, decoder.tell()]
        except (EOFError, TypeError, ValueError):
            values.append("error")
        return values

    names = st.sampled_from(["read_int", "read_ints", "read_int_bytes_dict", "read_bytes", "read_boolean", "skip_int"])
    byte = st.integers(0, 255) | st.integers(0, 8).map(lambda number: number * 2) | st.integers(128, 255)

    @fuzzed(600)
    @given(st.lists(byte, max_size=40).map(bytes), st.lists(st.tuples(names, st.integers(0, 5)), max_size=5))
    def check(data: bytes, operations: list[tuple[str, int]]) -> None:
        assert decode(avro.Decoder(data), operations) == decode(StreamingBinaryDecoder(data), operations)

    check()
