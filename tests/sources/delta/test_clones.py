"""Delta tables whose log names files of another table, as shallow clones do."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pyspark_lookup import NotSupportedError
from tests.support.delta_tables import append_commit, files_of, opened, vector_of
from tests.support.lake_tables import MODES


@pytest.mark.parametrize(("mode", "form"), [*zip(MODES, ["file://{}", "{}", "FILE://localhost{}"], strict=True)])
def test_files_of_another_table(tmp_path: Path, mode: str, form: str) -> None:
    """Absolute paths lead to them and their vectors, whatever characters they have; the clone goes on by itself."""
    of, clone = tmp_path / "a b%ü", tmp_path / "clone"
    write_deltalake(str(of), pa.table({"id": [1, 2]}))
    (add,) = files_of(of, 0).values()
    write_deltalake(str(clone), pa.table({"id": [3]}))
    vector = vector_of(of, [1], "p")
    place = form.format((of / add["path"]).as_uri().removeprefix("file://"))
    append_commit(clone, [{"add": {**add, "path": place, "deletionVector": vector}}])
    table = opened(clone, tmp_path / "cache", mode, "id")
    assert table.get_many([1, 2, 3]).column("id").to_pylist() == [1, 3]
    write_deltalake(str(of), pa.table({"id": [4]}), mode="overwrite")
    assert table.get_many([1, 2, 3, 4]).column("id").to_pylist() == [1, 3]


@pytest.mark.parametrize("path", ["file://host{}", "file:../of/a.parquet", "s3:/b/a.parquet", "x:{}", "//host{}"])
def test_files_of_nobody_knows_where(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths that begin with the name of a host, of another store, or nowhere, are none below the working directory."""
    of, clone = tmp_path / "of", tmp_path / "clone"
    write_deltalake(str(clone), pa.table({"id": [3]}))
    monkeypatch.chdir(clone)
    named = path.format(of / "a.parquet")
    add = {"path": named, "partitionValues": {}, "size": 9, "modificationTime": 1, "dataChange": True}
    append_commit(clone, [{"add": add}])
    with pytest.raises(NotSupportedError, match=f"its Delta log names {re.escape(named)}, a file of another store"):
        opened(clone, tmp_path / "cache").scan()
