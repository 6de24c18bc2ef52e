"""Hostile and odd sizes cost an error, or time in proportion to them, but never the process."""

import bz2
import gzip
import json
import re
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyarrow import orc

from pyspark_lookup import LookupTable
from pyspark_lookup.columnar.roaring import read_roaring
from pyspark_lookup.core import memory
from pyspark_lookup.errors import DamagedFileError, NotSupportedError, PysparkLookupError
from pyspark_lookup.scan import table_scan
from pyspark_lookup.scan.formats import model as file_names
from pyspark_lookup.scan.formats import parquet
from pyspark_lookup.sources.delta import log
from pyspark_lookup.sources.iceberg.manifests import read_manifest_list
from pyspark_lookup.sources.iceberg.metadata import parse_metadata
from pyspark_lookup.storage.stores import PART_OF_FILE, FileVersion
from tests.support.data_files import write_file
from tests.support.fakes import make_host
from tests.support.fuzzing import by_day


@pytest.mark.parametrize("form", by_day(["parquet", "arrow", "orc", "csv", "json", "delta"], 6))
def test_time_by_the_number_of_columns(tmp_path: Path, form: str) -> None:
    """Four times the columns take about four times the time, to find one row of a cold host."""
    seconds = {}
    for count in (10, 750, 3000):
        path = tmp_path / f"{count}"
        path.mkdir()
        rows = pa.table({"id": [1, 2], **{f"c{number}": [number, 0] for number in range(count)}})
        write_deltalake(str(path), rows) if form == "delta" else write_file(path / f"a.{form}", rows)
        start = time.process_time()
        table = LookupTable(str(path), {"lookup.cache.dir": str(tmp_path / f"cache-{count}"), "lookup.keys": "id"})
        assert table.get(1)[0][f"c{count - 1}"] == count - 1
        seconds[count] = time.process_time() - start
    assert seconds[3000] < 8 * seconds[750] + 1
    assert seconds[3000] < 10


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "t").mkdir()
    return tmp_path / "t"


def _read(path: Path) -> pa.Table:
    return LookupTable(str(path), {"lookup.cache.dir": str(path.parent / "cache")}).scan()


def _refuse(path: Path, says: str) -> None:
    with pytest.raises(NotSupportedError, match=says):
        _read(path)


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
@pytest.mark.parametrize("form", ["csv", "json"])
def test_text_that_is_larger_than_can_be_read(
    tmp_path: Path, form: str, suffix: str, compress: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error names it before it is in memory. A well compressed file that is not too large is read, also one of several members."""
    monkeypatch.setattr(file_names, "TEXT_AT_MOST", 8 * 2**20)
    monkeypatch.setattr(file_names, "_DOUBTFUL_BYTES", 2**20)
    row = b"1,2\n" if form == "csv" else b'{"v": 1}\n'
    path = tmp_path / "t" / f"a.{form}{suffix}"
    path.parent.mkdir()
    head = b"id,v\n" if form == "csv" else b""
    member = compress(row * 2**17)
    path.write_bytes(compress(head) + member * 4)
    assert _read(path.parent).num_rows == 2**19
    path.write_bytes(compress(head) + member * 20)
    _refuse(path.parent, rf"a\.{form}\{suffix}: the file has more than 8388608 bytes of text")


@pytest.mark.parametrize("form", ["csv", "json"])
def test_text_for_which_there_is_no_memory(table: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_LARGE", 10)
    monkeypatch.setattr(memory, "free_bytes", lambda: 200)
    (table / f"a.{form}").write_bytes(b"v\n" * 50 if form == "csv" else b'{"v": 1}\n' * 12)
    _refuse(table, rf"a\.{form} has .* bytes of memory, but only 200 are free")


CONSTANTS = pa.DictionaryArray.from_arrays(pa.array(np.zeros(3000, np.int32)), ["x" * 100_000])


@pytest.mark.parametrize("as_stored", [True, False], ids=["dictionary", "text"])
def test_few_bytes_that_are_many_long_values(table: Path, as_stored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of a Parquet dictionary in each row takes few bytes: batches have fewer rows, so that they stay small."""
    monkeypatch.setattr(parquet, "_BOUND_BYTES", 2**22)
    monkeypatch.setattr(table_scan, "_UNCHECKED_BYTES", 2**22)
    rows = pa.table({"id": np.arange(3000), "v": CONSTANTS})
    pq.write_table(rows, table / "a.parquet", store_schema=as_stored, write_statistics=False)
    assert (table / "a.parquet").stat().st_size < 200_000
    values = _read(table).column("v")
    assert len(values) == 3000
    assert max(chunk.nbytes for chunk in values.chunks) < 2**24
    monkeypatch.setattr(table_scan, "free_bytes", lambda: 2**21)
    _refuse(table, r"/t: its rows do not fit into memory: \d+ bytes are read, and only 2097152 are still free")


def test_lists_for_which_there_is_no_memory(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Parquet row that is as long as many is refused before it is decoded."""
    monkeypatch.setattr(parquet, "_BOUND_BYTES", 2**20)
    monkeypatch.setattr(parquet, "free_bytes", lambda: 2**20)
    pq.write_table(pa.table({"id": [1], "v": [[0] * 2**18]}), table / "a.parquet")
    _refuse(table, r"a\.parquet .*there is not enough memory .*262144 list elements in 1 rows")


def test_lists_that_are_long_in_the_file_too(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings in a row group larger than free memory are read batch by batch, because they are many rows."""
    monkeypatch.setattr(parquet, "_BOUND_BYTES", 2**20)
    monkeypatch.setattr(parquet, "free_bytes", lambda: 2**20)
    values = pa.array(np.random.default_rng(0).random(2**19, np.float32))
    rows = pa.table({"id": np.arange(2**10), "v": pa.FixedSizeListArray.from_arrays(values, 2**9)})
    pq.write_table(rows.cast(pa.schema([("id", pa.int64()), ("v", pa.list_(pa.float32()))])), table / "a.parquet")
    assert _read(table).num_rows == 2**10


def test_what_was_read_from_files_leaves_room_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page cache, active or not, counts in a container's sum, but the kernel drops it when memory runs short."""
    files = {"memory.max": "8000000", "memory.current": "7500000"}
    files["memory.stat"] = "anon 500000\nfile 7000000\ninactive_file 1000000\nactive_file 6000000\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    assert memory.free_bytes() == 7_500_000


def test_a_stripe_for_which_there_is_no_memory(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orc.write_table(pa.table({"id": np.zeros(2**17, np.int64)}), table / "a.orc", compression="zstd")
    assert (table / "a.orc").stat().st_size < 2000
    assert _read(table).num_rows == 2**17
    monkeypatch.setattr(memory, "_LARGE", 2**16)
    monkeypatch.setattr(memory, "free_bytes", lambda: 2**19)
    _refuse(
        table,
        r"a\.orc .*there is not enough memory .*131072 rows in one stripe take at least 1048576 bytes, but only 524288 are free",
    )


@pytest.mark.parametrize("rows", [1, 65_536, 2**28, 2**28 + 1, 2**40])
def test_a_bomb_of_deleted_rows(rows: int) -> None:
    """14 bytes stand for 65,536 rows. More rows than announced, or than a file has, are refused before memory is taken for them."""
    containers = 2**16
    heads = np.full((containers, 2), 65_535, "<u2")
    heads[:, 0] = np.arange(containers)
    parts = (
        b"\xff" * (containers // 8), heads.tobytes(), bytes(4 * containers),
        struct.pack("<HHH", 1, 0, 65_535) * containers,
    )  # fmt: skip
    bitmap = struct.pack("<I", 12_347 | (containers - 1) << 16) + b"".join(parts)
    start = time.process_time()
    with pytest.raises(ValueError, match=r"rows instead of|deleted rows of one file"):
        read_roaring(struct.pack("<iqI", 1_681_511_377, 1, 0) + bitmap, rows)
    assert time.process_time() - start < 1


def _avro(schema: dict[str, object], count: int, data: bytes, codec: str = "null") -> bytes:
    """An Avro file of one block, which claims to have `count` records."""

    def number(value: int) -> bytes:
        value, parts = value << 1, b""
        while value > 127:
            value, parts = value >> 7, parts + bytes([value & 127 | 128])
        return parts + bytes([value])

    def text(value: bytes) -> bytes:
        return number(len(value)) + value

    meta = {"avro.schema": json.dumps(schema), "avro.codec": codec}
    head = b"".join(text(key.encode()) + text(value.encode()) for key, value in meta.items())
    return b"Obj\1" + number(len(meta)) + head + number(0) + bytes(16) + number(count) + text(data) + bytes(16)


def _record(*fields: dict[str, object]) -> dict[str, object]:
    return {"type": "record", "name": "manifest_file", "fields": list(fields)}


LENGTH = {"name": "manifest_length", "type": ["null", "long"], "default": None, "field-id": 501}


@pytest.mark.parametrize(
    ("file", "error", "says"),
    [
        (_avro(_record(), 2**60, b""), DamagedFileError, rf"a block claims to have {2**60} records in 0 bytes"),
        (_avro(_record(LENGTH), 2**60, bytes(9)), DamagedFileError, rf"a block claims to have {2**60} records in 9 bytes"),
        (_avro(_record(LENGTH), 2**26, zlib.compress(bytes(2**26))[2:-4], "deflate"), NotSupportedError, r"67108864 records need about"),
        (_avro(_record(LENGTH), 1, zlib.compress(bytes(2**26))[2:-4], "deflate"), DamagedFileError, "bytes after its records"),
    ],
    ids=["empty records", "few bytes", "a bomb", "more bytes"],
)  # fmt: skip
def test_a_bomb_of_manifests(file: bytes, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of records that a block claims is checked against its bytes and against free memory."""
    monkeypatch.setattr(memory, "free_bytes", lambda: 2**30)
    start = time.process_time()
    with pytest.raises(error, match=rf"snap\.avro.*{says}"):
        read_manifest_list("file:///t/metadata/snap.avro", file)
    assert time.process_time() - start < 2


def test_a_bomb_of_delta_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint whose few bytes stand for many rows, and a commit that does not fit in memory, are errors that name the file."""
    write_deltalake(str(tmp_path / "t"), pa.table({"id": [1]}))
    DeltaTable(str(tmp_path / "t")).create_checkpoint()
    monkeypatch.setattr(memory, "_LARGE", 2**20)
    monkeypatch.setattr(log, "_CHECKED_BYTES", 2**20)
    monkeypatch.setattr(memory, "free_bytes", lambda: 2**23)
    commit = tmp_path / "t" / "_delta_log" / f"{1:020}.json"
    with commit.open("wb") as file:
        file.truncate(2**23)
    _refuse(tmp_path / "t", r"/t: \d+ bytes of its Delta log need about")
    commit.unlink()
    (checkpoint,) = (tmp_path / "t" / "_delta_log").glob("*.parquet")
    rows = pq.read_table(checkpoint)
    added = rows.filter(pc.is_valid(rows["add"])).slice(0, 1)
    with pq.ParquetWriter(checkpoint, rows.schema, compression="zstd") as writer:
        writer.write_table(rows)
        for _ in range(2):
            writer.write_table(pa.concat_tables([added] * 2**13).combine_chunks())
    assert checkpoint.stat().st_size < 100_000
    _refuse(tmp_path / "t", r"checkpoint\.parquet: \d+ rows of a Delta checkpoint need about")


def test_more_bytes_than_there_is_memory_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that does not fit in memory, because another file claims such a size, does not reach the store."""
    monkeypatch.setattr(memory, "free_bytes", lambda: 2**26)
    (tmp_path / "vector.puffin").write_bytes(bytes(10))
    ufs = make_host(str(tmp_path), None).ufs
    file = FileVersion(f"file://{tmp_path}/vector.puffin", 0, PART_OF_FILE)
    with pytest.raises(
        NotSupportedError, match=rf"vector\.puffin: the ranges to read need about {2**60 + 4} bytes of mem"
    ):
        ufs.read_ranges(file, [(0, 4), (4, 2**60)])
    assert ufs.read_ranges(file, [(0, 4)]) == [bytes(4)]


@pytest.mark.parametrize("size", [2**40, 2**62])
def test_a_file_that_is_said_to_be_large(tmp_path: Path, size: int) -> None:
    """A read has a bounded number of tasks, whatever size a log claims for a file."""
    write_deltalake(str(tmp_path / "t"), pa.table({"id": [1]}))
    (commit,) = (tmp_path / "t" / "_delta_log").glob("*.json")
    commit.write_text(re.sub(r'"size":\d+', f'"size":{size}', commit.read_text()))
    start = time.process_time()
    with pytest.raises(PysparkLookupError, match="parquet"):
        _read(tmp_path / "t")
    assert time.process_time() - start < 5


def test_a_bomb_of_iceberg_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata is parsed only if there is memory for the result."""
    monkeypatch.setattr(memory, "free_bytes", lambda: 2**26)
    with pytest.raises(NotSupportedError, match=r"v1\.gz\.metadata\.json: 16777216 bytes of Iceberg metadata"):
        parse_metadata("file:///t/metadata/v1.gz.metadata.json", gzip.compress(b" " * 2**24), "file:///t")


@pytest.mark.parametrize("value", by_day(['""', "x", "x\n", "1", "\\", " \n", ",", "'"], 4), ids=ascii)
def test_a_long_line(table: Path, value: str) -> None:
    """16 MiB take no longer in one value than in many."""
    text = value * (2**24 // len(value))
    (table / "a.csv").write_text(f'id,"v\nw"\n1,"{text}"\n', newline="")
    start = time.process_time()
    (actual,) = _read(table).column("v\nw").to_pylist()
    assert actual == text.replace('""', '"')
    assert time.process_time() - start < 6
