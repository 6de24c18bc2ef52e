"""Delta tables that other projects wrote, with the rows that delta-rs reads, in every mode, by scan and by key; or refused by name."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from pyspark_lookup import PysparkLookupError
from tests.support.delta_tables import by_deltalake, opened
from tests.support.fuzzing import share
from tests.support.lake_tables import MODES, rows_of
from tests.support.tables_of_others import check_rows, unpack

NO_SCHEMA = [
    "canonicalized-paths-normal-a", "canonicalized-paths-normal-b", "canonicalized-paths-special-a",
    "canonicalized-paths-special-b", "corrupted-last-checkpoint", "deltalog-commit-info", "update-deleted-directory",
    *(f"deltalog-state-reconstruction-from-checkpoint-missing-{what}" for what in ("metadata", "protocol")),
]  # fmt: skip
NO_FILES = [
    "checkpoint", "checkpoint_with_partitions", "checkpoints", "checkpoints_vacuumed", "latest_not_checkpointed",
    "delete-re-add-same-file-different-transactions", "log-replay-special-characters-b", "parquet-decimal-dictionaries-v1",
    "partitioned-table-with-dv-large", "table-with-dv-gigantic", "table-with-dv-large", "delta_spark/table-with-dv-small",
    "with_checkpoint_no_last_checkpoint",
]  # fmt: skip
VARIANTS = [
    "spark-shredded-variant-preview-delta", "spark-variant-checkpoint", "spark-variant-stable-feature-checkpoint",
    "variant-stats-nested-no-checkpoint", "variant-stats-no-checkpoint", "variant-stats-state-reconstruction",
    "variant-stats-with-struct-no-checkpoint",
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
    "table-with-dv-special-char": "a file of another store",
    **dict.fromkeys(VARIANTS, "is of type 'variant'"),
    **dict.fromkeys(NO_SCHEMA, "has no schemaString"),
    **dict.fromkeys(NO_FILES, "it belongs to the current version"),
}
"""The tables that are refused, with words of the error."""
ROWS = {
    "basic-with-vacuum-protocol-check-feature": 100,
    "table_with_edge_timestamps": 2,
    "type-widening": 2,
    "type-widening-nested": 2,
}
"""The number of rows in tables that delta-rs cannot read, or reads wrongly (a year that nanoseconds do not have)."""


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = unpack("delta.tgz", tmp_path_factory.mktemp("tables"))
    paths = sorted(path.parent for path in home.rglob("_delta_log") if path.is_dir())
    assert len(paths) > 150
    return paths


@pytest.mark.parametrize("mode", MODES)
def test_rows(tables: list[Path], tmp_path: Path, mode: str) -> None:
    for path in share(tables, list(MODES).index(mode), len(MODES)):
        refusal = REFUSED.get(path.name) or REFUSED.get(f"{path.parent.name}/{path.name}")
        if refusal is not None:
            with pytest.raises(PysparkLookupError, match=refusal):
                opened(path, tmp_path / "cache").scan()
            continue
        if path.name in ROWS:
            assert opened(path, tmp_path / "cache").scan().num_rows == ROWS[path.name]
            continue
        check_rows(functools.partial(opened, path, tmp_path / "cache"), mode, rows_of(by_deltalake(path)))
