"""Delta tables that other projects wrote, with the rows that delta-rs reads, in every mode, by scan and by key; or refused by name."""

from __future__ import annotations

import collections
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest

from pyspark_lookup import PysparkLookupError
from tests.delta.common import MODES, by_deltalake, opened, rows_of

DATA = Path(__file__).parents[1] / "data" / "delta"
REFUSED = {
    "simple_table_features": "readers of protocol version 5",
    "spark-shredded-variant-preview-delta": "is of type 'variant'",
    "spark-variant-checkpoint": "is of type 'variant'",
    "spark-variant-stable-feature-checkpoint": "is of type 'variant'",
    "table-with-domain-metadata": "no Delta table",
    "basic_catalog_managed": "catalogManaged",
    "catalog-owned-preview": "catalogManaged",
    "deltalog-invalid-protocol-version": "readers of protocol version 99",
    "data-reader-absolute-paths-escaped-chars": "lacks the table's metadata",
    "deltalog-state-reconstruction-without-metadata": "lacks the table's metadata",
    "deltalog-state-reconstruction-without-protocol": "lacks the table's protocol",
    **dict.fromkeys(
        (
            "canonicalized-paths-normal-a",
            "canonicalized-paths-normal-b",
            "canonicalized-paths-special-a",
            "canonicalized-paths-special-b",
            "corrupted-last-checkpoint",
            "deltalog-commit-info",
            "deltalog-state-reconstruction-from-checkpoint-missing-metadata",
            "deltalog-state-reconstruction-from-checkpoint-missing-protocol",
        ),
        "has no schemaString",
    ),
    **dict.fromkeys(
        (
            "checkpoint",
            "checkpoint_with_partitions",
            "checkpoints",
            "checkpoints_vacuumed",
            "delete-re-add-same-file-different-transactions",
            "latest_not_checkpointed",
            "log-replay-special-characters-b",
            "partitioned-table-with-dv-large",
            "table-with-dv-gigantic",
            "with_checkpoint_no_last_checkpoint",
        ),
        "it is still a file of the current version",
    ),
}
"""What is not read, and what is said of it."""
ROWS = {"basic-with-vacuum-protocol-check-feature": 100, "table_with_edge_timestamps": 2}
"""What delta-rs cannot read, or reads wrongly (a year that nanoseconds do not have), and how many rows it has."""


@pytest.fixture(scope="module", params=["delta-rs", "delta"])
def tables(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("tables")
    with tarfile.open(DATA / f"{request.param}.tar.xz") as archive:
        archive.extractall(home, filter="data")
    found = sorted(path.parent for path in home.rglob("_delta_log") if path.is_dir())
    assert len(found) > 40
    return found


@pytest.mark.parametrize("mode", MODES)
def test_rows(tables: list[Path], tmp_path: Path, mode: str) -> None:
    for path in tables:
        if path.name in REFUSED:
            with pytest.raises(PysparkLookupError, match=REFUSED[path.name]):
                opened(path, tmp_path / "cache").scan()
            continue
        mine = opened(path, tmp_path / "cache").scan()
        if path.name in ROWS:
            assert mine.num_rows == ROWS[path.name]
            continue
        theirs = by_deltalake(path)
        assert rows_of(mine) == rows_of(theirs), path.name
        flat = [
            field
            for field in mine.schema
            if not pa.types.is_nested(field.type) and not pa.types.is_floating(field.type)
        ]
        if not flat:
            continue
        keys = flat[0].name
        table = opened(path, tmp_path / "cache", mode, keys)
        asked = pa.table({keys: mine.column(keys).unique().drop_null()})
        found = table.get_many(asked)
        wanted = rows_of(mine.filter(mine.column(keys).is_valid()))
        assert rows_of(found.drop_columns(["key_index"])) == wanted, (path.name, keys)
        assert collections.Counter(found.column("key_index").to_pylist()).keys() == {*range(asked.num_rows)}
        if mode != "partial":
            assert rows_of(table.scan()) == rows_of(theirs), path.name
