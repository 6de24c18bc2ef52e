"""Building snapshots of large tables, with sizes made small: by several threads, of parts of files, within their memory."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.cache import segments
from pyspark_lookup.cache.full import loader
from tests.support.data_files import write_file

KEYS, FILES, ROWS = 97, 5, 3000


def make_rows(file: int) -> pa.Table:
    numbers = np.arange(file * ROWS, (file + 1) * ROWS)
    few = pa.array([f"group {n % 7}" for n in numbers])
    return pa.table({"k": numbers % KEYS, "n": numbers, "few": few, "text": [f"row {n}" for n in numbers]})


def rows_by_key(files: Iterable[int]) -> list[dict[str, Any]]:
    """The rows of each key, in the order of the files."""
    return sorted(pa.concat_tables(map(make_rows, files)).to_pylist(), key=lambda row: row["k"])


def read_all(lookup: LookupTable) -> list[dict[str, Any]]:
    return lookup.get_many(pa.table({"k": range(KEYS)})).select(["k", "n", "few", "text"]).to_pylist()


@pytest.mark.parametrize(("suffix", "threads"), [("parquet", 1), ("parquet", 3), ("arrow", 3), ("csv", 3)])
def test_parts_of_files_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, threads: int
) -> None:
    """However files are cut, and whichever thread is faster, the rows of a key are in the order of the files and of the rows in them."""
    monkeypatch.setattr(loader, "_threads", lambda: threads)
    monkeypatch.setattr(loader, "_FETCHED_AT_ONCE", 20_000)  # less than a file
    monkeypatch.setattr(loader, "_memory_bytes", lambda: 200_000)
    monkeypatch.setattr(segments, "_DEAL_ABOVE_BYTES", 30_000)
    monkeypatch.setattr(segments, "_MAPPED_ABOVE_BYTES", 1000)
    spilled: list[segments.ChunkStore] = []
    write_chunks = segments.ChunkStore._write

    def noting(store: segments.ChunkStore, chunks: list[segments.Chunk]) -> None:
        spilled.append(store)
        write_chunks(store, chunks)

    monkeypatch.setattr(segments.ChunkStore, "_write", noting)
    table, cache = tmp_path / "table", tmp_path / "cache"
    table.mkdir()
    for file in range(FILES):
        write_file(table / f"{file}.{suffix}", make_rows(file), 200)
    lookup = LookupTable(
        str(table),
        {"lookup.keys": "k", "lookup.cache": "FULL", "lookup.cache.dir": str(cache), "lookup.format": suffix},
    )
    lookup.warm()
    assert lookup.metrics()["loadCount"] == 1
    assert len(spilled) > 2
    assert list((cache / "v1" / "tmp").iterdir()) == []
    assert read_all(lookup) == rows_by_key(range(FILES))
    # A file that goes away leaves layers, and a new base copies rows from them.
    monkeypatch.setattr(loader, "_OVERLAY_SHARE", 0.0)
    write_file(table / f"1.{suffix}", make_rows(FILES), 200)
    lookup.reload()
    assert read_all(lookup) == rows_by_key(FILES if file == 1 else file for file in range(FILES))
    lookup.close()
