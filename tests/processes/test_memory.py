"""What a process takes of memory: to build a snapshot, and while a table that it reads in every mode is upserted again and again."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pyspark_lookup.lookup.lookup_table import LookupTable
from tests.support.data_files import write_file
from tests.support.fakes import CACHES
from tests.support.workers import anonymous_bytes, in_fresh_process, measure_growth

IDS = 2000
WARM, MEASURED = 500, 250  # upserts; after the first ones all that is kept is there, also on a busy machine
# 1.5 MB were measured. It was 8 while compactions kept the footers that they had read, and about 28 while reads did, too.
MAY_GROW = 6 * 2**20


def upsert_and_read(home: Path) -> None:
    rng, shared = random.Random(7), {"lookup.keys": "id", "lookup.cache.dir": str(home / "cache")}
    cached = {**CACHES["FULL"], "lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 s"}
    retain = {"lookup.full-cache.retain": "1 s"}
    modes = [CACHES["NONE"], CACHES["PARTIAL"], {**CACHES["FULL"], **retain}, {**cached, **retain}]
    writer, *tables = (LookupTable(str(home / "t"), {**shared, **options}) for options in (CACHES["NONE"], *modes))
    writer.write([{"id": id_, "v": 0, "s": "x" * 50} for id_ in range(IDS)])
    sizes = []
    for step in range(WARM + MEASURED):
        ids = rng.sample(range(IDS), 20)
        writer.upsert([{"id": id_, "v": step, "s": "y" * 50} for id_ in ids])
        for table in tables:
            assert len(table.get(ids[0])) == 1
            assert table.get_many(rng.sample(range(IDS), 20)).num_rows == 20
        sizes.append(anonymous_bytes())
    growth = max(sizes[-20:]) - max(sizes[WARM - 20 : WARM])
    assert growth < MAY_GROW, [size >> 20 for size in sizes[::50]]
    print(f"grown by {growth / 2**20:.1f} MB over {MEASURED} upserts")


@pytest.mark.nightly
def test_upserts_leave_no_memory_behind(tmp_path: Path) -> None:
    """A process that reads in four modes what is upserted takes hardly more memory after 750 upserts than after 500."""
    in_fresh_process(upsert_and_read, tmp_path, bound_s=3600)


def build(table: Path, cache: Path, memory: int, answer: Path) -> None:
    options = {"lookup.keys": "id", "lookup.cache.dir": str(cache), "lookup.full-cache.build-memory": f"{memory}m"}
    lookup = LookupTable(str(table), {**options, **CACHES["FULL"]})
    answer.write_text(str(measure_growth(lookup.warm)))


@pytest.mark.nightly
def test_a_build_within_its_memory(tmp_path: Path) -> None:
    """A build takes no more memory than it is given, except 100 MiB for the decoding of row groups; given more, it takes more."""
    rows = 400_000
    (tmp_path / "table").mkdir()
    for file in range(4):
        ids = np.arange(file, 4 * rows, 4) * 1_000_003
        names = pc.binary_join_element_wise("name of customer", pa.array(ids).cast(pa.string()), " ")
        table = pa.table({"id": ids, "price": np.random.default_rng(file).random(rows), "name": names})
        write_file(tmp_path / "table" / f"{file}.parquet", table, 50_000)
    growths = {}
    for memory in (16, 1024):
        in_fresh_process(build, tmp_path / "table", tmp_path / f"cache-{memory}", memory, tmp_path / "answer")
        growths[memory] = int((tmp_path / "answer").read_text()) / 2**20
    assert growths[16] < 16 + 150
    assert growths[16] * 2 < growths[1024] < 1024
