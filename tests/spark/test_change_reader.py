"""The reader of a stream of changes, called as Spark calls it: with limits, and without arguments, as by older versions of Spark."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import NotSupportedError, VersionGoneError
from pyspark_lookup.spark import change_stream
from pyspark_lookup.spark.change_stream import ChangeReader, stream_reader
from tests.support.sparks import DATA_SOURCES, STREAM_LIMITS, needs

pytestmark = needs(DATA_SOURCES)
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


@pytest.fixture
def table(tmp_path: Path) -> LookupTable:
    options = {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "cache"), "lookup.write.compact-after": "0"}
    managed_table = LookupTable(str(tmp_path / "t"), options)
    managed_table.write(pa.table({"id": [], "name": []}, SCHEMA))
    return managed_table


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": ids, "name": ["a"] * len(ids)}, SCHEMA)


def open_reader(table: LookupTable, **options: str) -> ChangeReader:
    read_options = {
        "path": table.given["path"],
        **{f"lookup.stream.{key.replace('_', '-')}": v for key, v in options.items()},
    }
    read_options["lookup.cache.dir"] = table.given["lookup.cache.dir"]
    return stream_reader(read_options, StructType([StructField("id", LongType()), StructField("name", StringType())]))


def consumed(reader: ChangeReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    """The ids of a micro-batch."""
    batches = [batch for partition in reader.partitions(start, end) for batch in reader.read(partition)]
    return sorted(id_ for batch in batches for id_ in batch.column("id").to_pylist())


@needs(STREAM_LIMITS)
def test_limits_of_a_micro_batch(table: LookupTable) -> None:
    """A micro-batch takes whole commits up to its limit, and at least one."""
    for number in range(4):
        table.write(rows(number, 100 + number))
    for limit, most, sizes in (
        ("rows", "4", [4, 4]),
        ("rows", "5", [4, 4]),
        ("files", "3", [6, 2]),
        ("bytes", "1 GiB", [8]),
        ("bytes", "1", [2, 2, 2, 2]),
    ):
        reader = open_reader(table, start="1", **{f"max_{limit}_per_trigger": most})
        batches, start = [], reader.initialOffset()
        while (end := reader.latestOffset(start, reader.getDefaultReadLimit())) != start:
            batches.append(consumed(reader, start, end))
            start = end
        assert [len(ids) for ids in batches] == sizes, (limit, most)
        assert sorted(itertools.chain(*batches)) == [0, 1, 2, 3, 100, 101, 102, 103]


def test_where_a_stream_begins(table: LookupTable) -> None:
    """A stream begins with the current rows, with the next commit, or after a position of the log."""
    first = table.write(rows(1))
    table.write(rows(2))
    for start, ids in (("snapshot", [1, 2]), ("LATEST", []), (str(first), [2])):
        reader = open_reader(table, start=start)
        assert consumed(reader, reader.initialOffset(), reader.latestOffset()) == ids


def test_limits_of_a_micro_batch_need_a_spark_that_has_them(
    table: LookupTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other versions of Spark, a stream with a limit fails when it begins, and names the option and both versions."""
    monkeypatch.setattr(change_stream, "STREAM_LIMITS", dataclasses.replace(STREAM_LIMITS, present=False))
    for limit in ("rows", "files", "bytes"):
        words = f"max-{limit}-per-trigger needs read limits of streaming sources in Python .Spark 4.2.*{pyspark.__version__}.*: remove the option"
        with pytest.raises(NotSupportedError, match=words):
            open_reader(table, **{f"max_{limit}_per_trigger": "5"})
    open_reader(table)


def test_offsets_without_arguments(table: LookupTable) -> None:
    """A Spark that does not say where a micro-batch starts gets each commit's rows once. Without new rows the latest offset stays."""
    reader = open_reader(table)
    start = reader.initialOffset()
    assert reader.latestOffset() == start
    table.write(rows(1))
    end = reader.latestOffset()
    assert consumed(reader, start, end) == [1]
    table.compact()
    assert reader.latestOffset() == end
    table.write(rows(2))
    table.write(rows(3))
    later = reader.latestOffset()
    assert consumed(reader, end, later) == [2, 3]
    assert reader.latestOffset() == later
    # A restarted query first goes to the end of the log; one with an unfinished micro-batch runs that again.
    table.write(rows(4))
    committed, unfinished = open_reader(table), open_reader(table)
    latest = committed.latestOffset()
    assert consumed(committed, later, latest) == [4]
    assert committed.latestOffset() == latest
    assert consumed(unfinished, start, end) == [1]
    assert consumed(unfinished, end, unfinished.latestOffset()) == [2, 3, 4]


def test_a_table_made_anew_without_arguments(table: LookupTable, tmp_path: Path) -> None:
    """A stream without arguments also notices that its table was dropped and recreated."""
    table.write(rows(1))
    reader = open_reader(table)
    reader.initialOffset()
    end = reader.latestOffset()
    for file in sorted((tmp_path / "t").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    LookupTable(str(tmp_path / "t"), {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "other")}).write(rows(5))
    with pytest.raises(VersionGoneError, match="dropped and recreated"):
        reader.latestOffset()
    with pytest.raises(VersionGoneError, match="dropped and recreated"):
        open_reader(table).partitions(end, end)
