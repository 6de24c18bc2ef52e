"""What a process takes of memory while a table that it reads in every mode is upserted again and again."""

import random
from pathlib import Path

import pytest

from pyspark_lookup.lookup.lookup_table import LookupTable
from tests.support.fakes import CACHES
from tests.support.workers import in_fresh_process

IDS = 2000
WARM, MEASURED = 250, 250  # upserts; after the first ones all that is kept is there
# 1.5 MB were measured. It was 8 while compactions kept the footers that they had read, and about 28 while reads did, too.
MAY_GROW = 6 * 2**20


def anonymous_bytes() -> int:
    """The memory of this process that is not a file's."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


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
    grown = max(sizes[-20:]) - max(sizes[WARM - 20 : WARM])
    assert grown < MAY_GROW, [size >> 20 for size in sizes[::50]]
    print(f"grown by {grown / 2**20:.1f} MB over {MEASURED} upserts")


@pytest.mark.nightly
def test_upserts_leave_no_memory_behind(tmp_path: Path) -> None:
    """A process that reads in four modes what is upserted takes no more after 500 upserts than after 250, but for little."""
    in_fresh_process(upsert_and_read, tmp_path, bound_s=3600)
