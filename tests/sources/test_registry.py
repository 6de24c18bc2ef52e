"""A kind of table is its package and its lines in the registry."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pyspark_lookup
from tests.support.fuzzing import by_day

READ = """
import sys
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark_lookup
from pyspark_lookup import LookupTable

home = sys.argv[1]
assert pyspark_lookup.__file__.startswith(home)
options = {"lookup.keys": "id", "lookup.cache.dir": home + "/cache", "lookup.cache": "FULL"}
pq.write_table(pa.table({"id": [1, 2]}), home + "/a.parquet")
assert LookupTable(home + "/a.parquet", options).get(2) == [{"id": 2}]
table = LookupTable(home + "/managed", options)
table.upsert([{"id": 1, "v": 1}])
assert table.get(1) == [{"id": 1, "v": 1}]
import pyspark_lookup.cli.main, pyspark_lookup.spark.planning, pyspark_lookup.spark.change_stream
"""


@pytest.mark.parametrize("kind", by_day(["delta", "iceberg", "providers"], 3))
def test_a_package_without_a_kind(tmp_path: Path, kind: str) -> None:
    """It imports, and reads and writes the others."""
    package = tmp_path / "pyspark_lookup"
    shutil.copytree(Path(pyspark_lookup.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(package / "sources" / kind)
    registry = package / "sources" / "registry.py"
    lines = registry.read_text().splitlines(keepends=True)
    of_kind = [line for line in lines if f"sources.{kind}." in line]
    text = "".join(line for line in lines if line not in of_kind)
    for line in of_kind:
        for name in line.partition(" import ")[2].split(","):
            text = re.sub(rf"\b{name.strip()}(, )?", "", text)
    registry.write_text(text)
    ran = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
