"""Delta tables whose log names files of another table, as shallow clones do."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.delta.common import MODES, append_commit, opened, vector_of
from tests.delta.test_histories import files_of


@pytest.mark.parametrize("mode", MODES)
def test_files_of_another_table(tmp_path: Path, mode: str) -> None:
    """Absolute paths lead to them and their vectors, whatever characters they have; the clone goes on by itself."""
    of, clone = tmp_path / "a b%ü", tmp_path / "clone"
    write_deltalake(str(of), pa.table({"id": [1, 2]}))
    (add,) = files_of(of, 0).values()
    write_deltalake(str(clone), pa.table({"id": [3]}))
    vector = vector_of(of, [1], "p")
    append_commit(clone, [{"add": {**add, "path": (of / add["path"]).as_uri(), "deletionVector": vector}}])
    table = opened(clone, tmp_path / "cache", mode, "id")
    assert table.get_many([1, 2, 3]).column("id").to_pylist() == [1, 3]
    write_deltalake(str(of), pa.table({"id": [4]}), mode="overwrite")
    assert table.get_many([1, 2, 3, 4]).column("id").to_pylist() == [1, 3]
