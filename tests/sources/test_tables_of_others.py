"""Delta and Iceberg tables that other projects wrote, with the rows that delta-rs or an oracle reads, in every mode, by scan and by key;
or refused by name. They are in archives beside the checkout, not in it."""

import functools
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable, PysparkLookupError
from pyspark_lookup.sources.delta.source import DeltaSource
from tests.support.delta_tables import by_deltalake
from tests.support.fuzzing import BY_NIGHT, share
from tests.support.iceberg_oracle import read
from tests.support.lake_tables import MODES, Rows, as_multiset, opened

ARCHIVES = Path(os.environ.get("LOOKUPCACHE_TABLES") or Path(__file__).parents[3] / "shared" / "tables")
"""`delta.tgz` and `iceberg.tgz`: test data of delta-io/delta-rs, delta-io/delta and duckdb/duckdb-iceberg."""
NO_SCHEMA = [
    "canonicalized-paths-normal-a", "canonicalized-paths-normal-b", "canonicalized-paths-special-a",
    "canonicalized-paths-special-b", "corrupted-last-checkpoint", "deltalog-commit-info", "update-deleted-directory",
    *(f"deltalog-state-reconstruction-from-checkpoint-missing-{action}" for action in ("metadata", "protocol")),
]  # fmt: skip
NO_FILES = [
    "checkpoint", "checkpoint_with_partitions", "checkpoints", "checkpoints_vacuumed", "latest_not_checkpointed",
    "delete-re-add-same-file-different-transactions", "log-replay-special-characters-b", "parquet-decimal-dictionaries-v1",
    "partitioned-table-with-dv-large", "table-with-dv-gigantic", "table-with-dv-large", "delta_spark/table-with-dv-small",
    "with_checkpoint_no_last_checkpoint", "spark-variant-stable-feature-checkpoint",
]  # fmt: skip
REFUSED = {
    "simple_table_features": "requires reader version 5",
    "table-with-domain-metadata": "_delta_log holds no commit, but a checkpoint of version 108",
    "basic_catalog_managed": "catalogManaged",
    "catalog-owned-preview": "catalogManaged",
    "deltalog-invalid-protocol-version": "requires reader version 99",
    "data-reader-absolute-paths-escaped-chars": "lacks the table's metadata",
    "deltalog-state-reconstruction-without-metadata": "lacks the table's metadata",
    "deltalog-state-reconstruction-without-protocol": "lacks the table's protocol",
    "versions-not-contiguous": "00000000000000000001.json is missing before version 2",
    "table-with-dv-special-char": "a file in a different store from the table's",
    **dict.fromkeys(NO_SCHEMA, "has no schemaString"),
    **dict.fromkeys(NO_FILES, r"but the current version.* needs this file"),
    "big_query_error": "not below the table's location 'gs://laura-test-test-bucket/table_name'",
    "case_sensitive_names": "columns 'user_id' and 'uSeR_Id' differ at most in letter case",
    "generated_bounds": "names s3://fake-bucket/d/0000000000/t.parquet, a file in a different store from the table's",
    "add_columns_with_defaults": "column 'col_time' cannot be read: type 'time'",
    "add_columns_with_defaults_in_struct": "column 'a' cannot be read: type 'time'",
    "partition_time": "column 'partition_col' cannot be read: type 'time'",
    "timestamptz_ns": "column 'val' cannot be read: type 'timestamptz_ns'",
}
"""The tables that are refused, with words of the error."""
ROWS = {
    "basic-with-vacuum-protocol-check-feature": 100, "table_with_edge_timestamps": 2, "type-widening": 2,
    "type-widening-nested": 2, "lineitem_iceberg": 51_793, "lineitem_iceberg_no_hint": 51_793,
    "spark-variant-checkpoint": 102, "spark-shredded-variant-preview-delta": 102,
    "variant-stats-nested-no-checkpoint": 10, "variant-stats-no-checkpoint": 10, "variant-stats-state-reconstruction": 1,
    "variant-stats-with-struct-no-checkpoint": 10, "lineitem_iceberg_gz": 111_968, "lineitem_iceberg_gz_no_hint": 111_968, "legacy_v1": 3,
}  # fmt: skip
"""The number of rows in tables that the other reader cannot read, or only slowly, or reads wrongly (a year that nanoseconds do not have)."""
LARGE = {"COVID-19_NYT", "parquet-decimal-dictionaries", "parquet-decimal-dictionaries-v2"}
"""A million rows each, which are read by night."""
SPECIAL = {
    "parquet-decimal-type": "none", "data-reader-partition-values": "none", "checkpoint-v2-table": "none", "table_with_deletion_logs": "full",
    "http_requests": "partial",
}  # fmt: skip
"""Tables that go through code that no other table goes through, and the mode in which they do: these are always read by day."""


def unpack(archive: str, home: Path) -> Path:
    """`home`, with what the archive holds in it. Skips the test if the archive is not there."""
    path = ARCHIVES / archive
    if not path.is_file():
        pytest.skip(f"{path} is not there: LOOKUPCACHE_TABLES names the directory of the tables that others wrote")
    with tarfile.open(path) as tar:
        tar.extractall(home, filter="data")
    return home


@pytest.fixture(scope="module")
def delta_tables(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = unpack("delta.tgz", tmp_path_factory.mktemp("tables"))
    paths = sorted(path.parent for path in home.rglob("_delta_log") if path.is_dir())
    assert len(paths) > 150
    return paths


@pytest.fixture(scope="module")
def iceberg_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory to which the tables' locations are relative."""
    return unpack("iceberg.tgz", tmp_path_factory.mktemp("tables"))


def check(table: Path, names: set[str], cache: Path, mode: str, expected: Callable[[Path], pa.Table]) -> None:
    """A table is refused as it should be, or has the rows that are expected."""
    refusal, count = (next((cases[name] for name in names & cases.keys()), None) for cases in (REFUSED, ROWS))
    if refusal is not None:
        with pytest.raises(PysparkLookupError, match=refusal):
            opened(table, cache).scan()
    elif count is not None:
        assert opened(table, cache).scan().num_rows == count
    else:
        check_rows(functools.partial(opened, table, cache), mode, as_multiset(expected(table)))


def check_rows(opened: Callable[..., LookupTable], mode: str, expected: Rows) -> None:
    """A table has these rows: by a scan without a cache, and in a mode by a scan and by the values of its first flat column as keys."""
    rows, types = opened("none").scan(), pa.types
    assert as_multiset(rows) == expected
    flat = [f.name for f in rows.schema if not types.is_nested(f.type) and not types.is_floating(f.type)]
    if not flat or not rows.num_rows:
        return
    key = flat[0]
    keys = pa.table({key: rows.column(key).unique().drop_null()})
    table = opened(mode, key)
    answer = table.get_many(keys)
    assert as_multiset(answer.drop_columns(["key_index"])) == as_multiset(rows.filter(rows.column(key).is_valid())), key
    assert {*answer.column("key_index").to_pylist()} == {*range(keys.num_rows)}
    if mode != "partial":
        assert as_multiset(table.scan()) == expected


@pytest.mark.parametrize("mode", MODES)
def test_delta(delta_tables: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """In one mode tables of one file are read as those of thousands. By day every other table is read, and the special ones."""
    if mode == "partial":
        monkeypatch.setattr(DeltaSource, "mapped_from", 1)
    tables = [path for path in delta_tables if BY_NIGHT or path.name not in LARGE]
    special = [path for path in tables if SPECIAL.get(path.name) == mode]
    for path in dict.fromkeys([*share(tables, 2 * list(MODES).index(mode), 2 * len(MODES)), *special]):
        check(path, {path.name, f"{path.parent.name}/{path.name}"}, tmp_path / "cache", mode, by_deltalake)


@pytest.mark.parametrize("mode", MODES)
def test_iceberg(iceberg_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.chdir(iceberg_home)
    directories = sorted(path for path in iceberg_home.rglob("metadata") if path.is_dir())
    assert len(directories) == 40
    for path in share(directories, list(MODES).index(mode), len(MODES)):
        newest = max([*path.glob("*.metadata.json"), *path.glob("*.metadata.json.gz")])
        check(newest, {path.parent.name}, tmp_path / "cache", mode, read)
