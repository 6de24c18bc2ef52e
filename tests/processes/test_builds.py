"""Building snapshots of large tables, with sizes made small: by several threads, of parts of files, within their memory."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.cache import segments
from pyspark_lookup.cache.full import loader

MIB = 1024 * 1024
KEYS, FILES, ROWS = 97, 5, 3000


def rows_of(file: int) -> pa.Table:
    """The rows of a file; their keys are in others, too."""
    numbers = np.arange(file * ROWS, (file + 1) * ROWS)
    few = pa.array([f"group {n % 7}" for n in numbers])
    return pa.table({"k": numbers % KEYS, "n": numbers, "few": few, "text": [f"row {n}" for n in numbers]})


def write(path: Path, table: pa.Table) -> None:
    """A file of several row groups or record batches, if its format has them."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=200)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    else:
        pyarrow.csv.write_csv(table, path)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv"])
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

    def noting(store: segments.ChunkStore, some: list[segments.Chunk]) -> None:
        spilled.append(store)
        write_chunks(store, some)

    monkeypatch.setattr(segments.ChunkStore, "_write", noting)
    table, cache = tmp_path / "table", tmp_path / "cache"
    table.mkdir()
    for file in range(FILES):
        write(table / f"{file}.{suffix}", rows_of(file))
    lookup = LookupTable(
        str(table),
        {"lookup.keys": "k", "lookup.cache": "FULL", "lookup.cache.dir": str(cache), "lookup.format": suffix},
    )
    lookup.warm()
    assert lookup.metrics()["loadCount"] == 1
    assert len(spilled) > 2
    assert list((cache / "v1" / "tmp").iterdir()) == []
    everything = pa.concat_tables(map(rows_of, range(FILES))).to_pylist()
    for key in range(KEYS):
        assert lookup.get(key) == [row for row in everything if row["k"] == key]
    # A file that goes away leaves layers, and a new base copies rows from them.
    monkeypatch.setattr(loader, "_OVERLAY_SHARE", 0.0)
    write(table / f"1.{suffix}", rows_of(FILES))
    lookup.reload()
    order = [rows_of(FILES if file == 1 else file) for file in range(FILES)]
    everything = pa.concat_tables(order).to_pylist()
    for key in range(KEYS):
        assert lookup.get(key) == [row for row in everything if row["k"] == key]
    lookup.close()


GROWN = """
import json, sys, threading, time
from pyspark_lookup import LookupTable

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

table = LookupTable(sys.argv[1], json.loads(sys.argv[2]))
before, most, ended = anonymous(), [0], threading.Event()

def watch():
    while not ended.wait(0.005):
        most[0] = max(most[0], anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
table.warm()
ended.set()
watcher.join()
print(json.dumps(most[0] - before))
"""


def test_a_build_within_its_memory(tmp_path: Path) -> None:
    """A build takes no more memory than it is given, but for the decoding of row groups, which takes 100 MiB; with more it takes more."""
    rows = 400_000
    (tmp_path / "table").mkdir()
    for file in range(4):
        ids = np.arange(file, 4 * rows, 4) * 1_000_003
        names = pa.array(np.char.add("name of customer ", ids.astype(str)))
        table = pa.table({"id": ids, "price": np.random.default_rng(file).random(rows), "name": names})
        pq.write_table(table, tmp_path / "table" / f"{file}.parquet", row_group_size=50_000)
    grown = {}
    for memory in (16, 1024):
        options = {"lookup.keys": "id", "lookup.cache": "FULL", "lookup.cache.dir": str(tmp_path / f"cache-{memory}")}
        options["lookup.full-cache.build-memory"] = f"{memory}m"
        command = [sys.executable, "-c", GROWN, str(tmp_path / "table"), json.dumps(options)]
        grown[memory] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert grown[16] < (16 + 150) * MIB
    assert grown[16] * 2 < grown[1024] < 1024 * MIB
