"""Iceberg tables that other projects wrote, with the rows that the specification gives them, in every mode, by scan and by key; or refused
by name."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from pyspark_lookup import PysparkLookupError
from tests.support import iceberg_oracle as oracle
from tests.support.fuzzing import share
from tests.support.iceberg_tables import opened
from tests.support.lake_tables import MODES, rows_of
from tests.support.tables_of_others import check_rows, unpack

REFUSED = {
    "big_query_error": "not below the table's location 'gs://laura-test-test-bucket/table_name'",
    "case_sensitive_names": "columns 'user_id' and 'uSeR_Id' differ at most in letter case",
    "generated_bounds": "names s3://fake-bucket/d/0000000000/t.parquet, a file of another store",
    "add_columns_with_defaults": "column 'col_time' is of type 'time'",
    "add_columns_with_defaults_in_struct": "column 'a' is of type 'time'",
    "partition_time": "column 'partition_col' is of type 'time'",
    "timestamptz_ns": "column 'val' is of type 'timestamptz_ns'",
}
"""The tables that are refused, with words of the error."""
ROWS = {
    "lineitem_iceberg": 51_793,
    "lineitem_iceberg_no_hint": 51_793,
    "lineitem_iceberg_gz": 111_968,
    "lineitem_iceberg_gz_no_hint": 111_968,
    "legacy_v1": 3,
}
"""The number of rows in tables that the oracle cannot read, or only slowly."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory to which the tables' locations are relative."""
    return unpack("iceberg.tgz", tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="module")
def tables(home: Path) -> list[Path]:
    """The newest metadata file of each table."""
    directories = sorted(path for path in home.rglob("metadata") if path.is_dir())
    assert len(directories) == 40
    return [max([*path.glob("*.metadata.json"), *path.glob("*.metadata.json.gz")]) for path in directories]


@pytest.mark.parametrize("mode", MODES)
def test_rows(home: Path, tables: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.chdir(home)
    for metadata in share(tables, list(MODES).index(mode), len(MODES)):
        name = metadata.parents[1].name
        if name in REFUSED:
            with pytest.raises(PysparkLookupError, match=REFUSED[name]):
                opened(metadata, tmp_path / "cache").scan()
            continue
        if name in ROWS:
            assert opened(metadata, tmp_path / "cache").scan().num_rows == ROWS[name]
            continue
        check_rows(functools.partial(opened, metadata, tmp_path / "cache"), mode, rows_of(oracle.read(metadata)))
