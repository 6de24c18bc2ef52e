"""Delta and Iceberg tables that other projects wrote: archives beside the checkout, not in it."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

ARCHIVES = Path(os.environ.get("LOOKUPCACHE_TABLES") or Path(__file__).parents[3] / "shared" / "tables")
"""`delta.tgz` and `iceberg.tgz`: test data of delta-io/delta-rs, delta-io/delta and duckdb/duckdb-iceberg."""


def unpack(archive: str, home: Path) -> Path:
    """`home`, with what the archive holds in it. Skips the test if the archive is not there."""
    path = ARCHIVES / archive
    if not path.is_file():
        pytest.skip(f"{path} is not there: LOOKUPCACHE_TABLES names the directory of the tables that others wrote")
    with tarfile.open(path) as tar:
        tar.extractall(home, filter="data")
    return home
