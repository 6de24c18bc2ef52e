"""Hostile and odd sizes cost an error, or time by their length: never the process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pyarrow import feather, orc

from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import without_credentials


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
