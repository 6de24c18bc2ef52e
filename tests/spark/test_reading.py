"""What a worker does when a task begins, so that the next ones begin sooner, and how it joins the batches of a lookup."""

import importlib.util
import itertools
import sys
import zipfile
import zipimport
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import SparkFiles
from pyspark.sql import SparkSession

from pyspark_lookup.lookup.lookup_join import PassSpec
from pyspark_lookup.spark import reading
from pyspark_lookup.spark.reading import JoinedBatches, prepare_worker
from tests.support.fakes import FakeClock
from tests.support.spark_tables import run_script

_FROZEN = """
import gc, sys
import pyarrow as pa
from pyspark_lookup.spark import reading
reading._freeze_modules()
modules = {*sys.modules}
pa.array([1])
print("IMPORTED", len({*sys.modules} - modules), "COLLECTABLE", len(gc.get_objects()) < 1000)
"""


def test_what_a_first_array_imports_is_exempt_from_collections(tmp_path: Path) -> None:
    """With the first array pyarrow imports pandas: a quarter of all objects of a worker, which Spark's daemon would go through after each task."""
    assert run_script(tmp_path, _FROZEN) == ["IMPORTED 0 COLLECTABLE True"]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.0, 0.04, 0.3]), st.integers(0, 40))),
    st.sampled_from([0, 100, 1000]),
)
def test_joined_batches(batches: list[tuple[int, float, int]], bytes_at_once: int) -> None:
    """All rows, in order, in batches within their limits; none is read long before it is needed, nor waits long for others."""
    numbers, clock, rows_read, rows_joined, joined_rows = itertools.count(), FakeClock(), 0, 0, []
    waits_since_s: float | None = None

    def make_batches() -> Iterator[tuple[pa.Array, pa.Array]]:
        nonlocal rows_read, waits_since_s
        for size, seconds, rows_at_once in batches:
            joined.rows_at_once = rows_at_once
            assert waits_since_s is None or clock.steady_s - waits_since_s <= 0.2
            asked_s = clock.steady_s
            clock.tick(seconds)
            waits_since_s = asked_s if waits_since_s is None else waits_since_s
            rows_read += size
            ids = list(itertools.islice(numbers, size))
            yield pa.array(ids, pa.int64()), pa.array(map(str, ids), pa.string())

    joined = JoinedBatches(make_batches(), 0, bytes_at_once, lambda: clock.steady_s)
    for (ids, texts), largest in joined:
        assert len(ids) == len(texts) and largest <= 9
        assert len(ids) <= largest or len(ids) < min(rows_joined, 40) + largest
        assert len(ids) <= largest or ids.nbytes + texts.nbytes <= bytes_at_once
        assert rows_read <= rows_joined + min(rows_joined, 40) + 2 * 9
        waits_since_s = None
        rows_joined += len(ids)
        joined_rows += zip(ids.to_pylist(), texts.to_pylist(), strict=True)
    assert joined_rows == [(number, str(number)) for number in range(rows_read)]


class _Lookups:
    """In place of a pass: answers rows with texts of `width` bytes, and notes how many rows it is asked for at once."""

    in_memory, spec = True, PassSpec((), many=True)

    def __init__(self, width: int) -> None:
        self.answer, self.asked = "x" * width, list[int]()

    def answers(self, keys: Sequence[pa.Array], *_: object) -> Iterator[pa.Array]:
        self.asked.append(len(keys[0]))
        yield pa.array([self.answer] * len(keys[0]))

    def publish(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(("width", "most"), [(10, 7_000), (100_000, 400)])
def test_wide_rows_are_looked_up_in_small_batches(monkeypatch: pytest.MonkeyPatch, width: int, most: int) -> None:
    """All answers to joined batches are in memory at once, so there are fewer of them if they are large. Spark gets batches of its own size."""
    lookups = _Lookups(width)
    monkeypatch.setattr(reading, "open_pass", lambda *_: lookups)
    batches = [(pa.array(range(100)), pa.array([b""] * 100))] * 70
    answers = list(reading.Probe("probe", "", 1)(iter(batches)))
    assert max(lookups.asked) <= most and sum(lookups.asked) == 7_000
    assert (max(lookups.asked) > 100) and {len(answer) for answer in answers} == {100}


@pytest.mark.spark
def test_archives_that_a_task_reads_again(spark: SparkSession, tmp_path: Path) -> None:
    """Of the archives on its path, a worker that has begun a lookup reads only those that a user may replace; it still imports from all."""
    with zipfile.ZipFile(tmp_path / "of_the_cluster.zip", "w") as archive:
        archive.writestr("of_the_cluster.py", "value = 1")

    def archives(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        added = Path(SparkFiles.getRootDirectory(), "of_a_user.zip")
        with zipfile.ZipFile(added, "w") as archive:
            archive.writestr("of_a_user.py", "value = 2")
        invalidated: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", [*sys.path, str(tmp_path / "of_the_cluster.zip"), str(added)])
            importlib.util.find_spec("no_such_module")  # makes a finder for each entry of the path
            patch.setattr(zipimport.zipimporter, "invalidate_caches", lambda finder: invalidated.append(finder.archive))
            importlib.invalidate_caches()
            yield pa.RecordBatch.from_pylist([{"archives": sorted(map(str, invalidated))}])
            invalidated.clear()
            prepare_worker()
            importlib.invalidate_caches()
            yield pa.RecordBatch.from_pylist([{"archives": invalidated}])
            modules = [importlib.import_module(name) for name in ("of_the_cluster", "of_a_user")]
        yield pa.RecordBatch.from_pylist([{"archives": [f"{module.__name__} {module.value}" for module in modules]}])

    rows = spark.range(0, 1, 1, 1).mapInArrow(archives, "archives array<string>").collect()
    before, after, imported = ([Path(archive).name for archive in row.archives] for row in rows)
    assert {"of_the_cluster.zip", "of_a_user.zip"} <= {*before}
    assert any(name.endswith(".jar") for name in before)
    assert after == ["of_a_user.zip"]
    assert imported == ["of_the_cluster 1", "of_a_user 2"]
