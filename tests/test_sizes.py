"""Hostile and odd sizes cost an error, or time by their length: never the process."""

from __future__ import annotations

import bz2
import gzip
import json
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pyarrow import feather, orc

from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import NotSupportedError, without_credentials
from pyspark_lookup.scan.formats import whole_file
from pyspark_lookup.table import file_names
from pyspark_lookup.table.roaring import read_roaring


@pytest.mark.parametrize(
    "text", ["1", "?", "key", "?key", "&key", "://@", "a://", "password=", "x?", "=@", "pwd=x;", "@", "'key': ", "key="]
)
def test_messages_of_any_length(text: str) -> None:
    """What is looked for in a message takes time by its length, whatever is in it."""
    start = time.process_time()
    without_credentials(f"a://{text * 100_000}")
    without_credentials(f"?{text * 100_000}")
    assert time.process_time() - start < 5


# --- columns --------------------------------------------------------------------------------------------


def _write_csv(table: pa.Table, path: Path) -> None:
    lines = [table.column_names, *(map(str, row.values()) for row in table.to_pylist())]
    path.write_text("".join(",".join(line) + "\n" for line in lines))


WRITERS: dict[str, Callable[[pa.Table, Path], object]] = {
    "parquet": pq.write_table,
    "arrow": lambda table, path: feather.write_feather(table, path, compression="uncompressed"),
    "orc": orc.write_table,
    "csv": _write_csv,
    "json": lambda table, path: path.write_text("\n".join(map(json.dumps, table.to_pylist()))),
    "delta": lambda table, path: write_deltalake(str(path.parent), table),
}


@pytest.mark.parametrize(
    "form", [form if form == "parquet" else pytest.param(form, marks=pytest.mark.nightly) for form in WRITERS]
)
def test_time_by_the_number_of_columns(tmp_path: Path, form: str) -> None:
    """Four times the columns take about four times the time, to find one row of a cold host."""
    seconds = {}
    for count in (10, 1500, 6000):
        path = tmp_path / f"{count}"
        path.mkdir()
        WRITERS[form](
            pa.table({"id": [1, 2], **{f"c{number}": [number, 0] for number in range(count)}}), path / f"a.{form}"
        )
        start = time.process_time()
        table = LookupTable(str(path), {"lookup.cache.dir": str(tmp_path / f"cache-{count}"), "lookup.keys": "id"})
        assert table.get(1)[0][f"c{count - 1}"] == count - 1
        seconds[count] = time.process_time() - start
    assert seconds[6000] < 8 * seconds[1500] + 1
    assert seconds[6000] < 20


# --- bombs ----------------------------------------------------------------------------------------------


def _read(path: Path) -> pa.Table:
    return LookupTable(str(path), {"lookup.cache.dir": str(path.parent / "cache")}).scan()


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
@pytest.mark.parametrize("form", ["csv", "json"])
def test_text_that_is_larger_than_can_be_read(
    tmp_path: Path, form: str, suffix: str, compress: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused by name, before it is in memory; what is well compressed but no larger is read, in several members, too."""
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
    with pytest.raises(NotSupportedError, match=rf"a\.{form}\{suffix}: it holds more than 8388608 bytes of text"):
        _read(path.parent)


@pytest.mark.parametrize("form", ["csv", "json"])
def test_text_for_which_there_is_no_memory(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_file, "_LARGE", 10)
    monkeypatch.setattr(whole_file, "_free_bytes", lambda: 100)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / f"a.{form}").write_bytes(b"v\n" * 50 if form == "csv" else b'{"v": 1}\n' * 12)
    with pytest.raises(NotSupportedError, match=rf"a\.{form} holds .* and 100 bytes of memory are free"):
        _read(tmp_path / "t")


@pytest.mark.nightly
def test_a_bomb(tmp_path: Path) -> None:
    """Two GiB in less than 10 MB."""
    (tmp_path / "t").mkdir()
    with (tmp_path / "t" / "a.csv.gz").open("wb") as file:
        file.write(gzip.compress(b"id,v\n"))
        member = gzip.compress(b"1,2\n" * 2**24)
        for _ in range(33):
            file.write(member)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(NotSupportedError, match=r"a\.csv\.gz: it holds more than"):
        _read(tmp_path / "t")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


@pytest.mark.parametrize("rows", [1, 65_536, 2**28, 2**28 + 1, 2**40])
def test_a_bomb_of_deleted_rows(rows: int) -> None:
    """14 bytes stand for 65,536 rows: what is not announced, or more than a file has, is refused before there is room for it."""
    containers = 2**16
    heads = np.full((containers, 2), 65_535, "<u2")
    heads[:, 0] = np.arange(containers)
    parts = (
        b"\xff" * (containers // 8),
        heads.tobytes(),
        bytes(4 * containers),
        struct.pack("<HHH", 1, 0, 65_535) * containers,
    )
    bitmap = struct.pack("<I", 12_347 | (containers - 1) << 16) + b"".join(parts)
    start = time.process_time()
    with pytest.raises(ValueError, match=r"more rows than are announced|deleted rows of one file"):
        read_roaring(struct.pack("<iqI", 1_681_511_377, 1, 0) + bitmap, rows)
    assert time.process_time() - start < 1


# --- lines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["x", '""', "1", "x\n", " \n", "\\", ",", "'"], ids=ascii)
def test_a_long_line(tmp_path: Path, value: str) -> None:
    """16 MiB in one value take no longer than in many."""
    (tmp_path / "t").mkdir()
    text = value * (2**24 // len(value))
    (tmp_path / "t" / "a.csv").write_text(f'id,"v\nw"\n1,"{text}"\n', newline="")
    start = time.process_time()
    (found,) = _read(tmp_path / "t").column("v\nw").to_pylist()
    assert found == text.replace('""', '"')
    assert time.process_time() - start < 6
