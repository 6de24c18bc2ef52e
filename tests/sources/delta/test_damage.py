"""Delta tables that are damaged, dropped, not understood, or of another table's files: a named error, or the rows as they are."""

import json
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from pyspark_lookup import errors
from tests.support.delta_tables import append_commit, give_vectors, replay_files, write_vector
from tests.support.lake_tables import MODES, opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table of four versions, a checkpoint of the third, and a vector in the last."""
    path = tmp_path / "table"
    for number in range(3):
        configuration = {} if number else {"configuration": {"delta.enableDeletionVectors": "true"}}
        write_deltalake(str(path), pa.table({"id": [number]}), mode="append", **configuration)
    DeltaTable(str(path)).create_checkpoint()
    write_deltalake(str(path), pa.table({"id": [7, 8, 9]}), mode="append")
    add = next(add for add in replay_files(path, 3).values() if json.loads(add["stats"])["numRecords"] == 3)
    give_vectors(path, [add], [write_vector(path, [1], "u")])
    return path


def commit(path: Path, version: int) -> Path:
    return path / "_delta_log" / f"{version:020}.json"


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-6] ^= 1
    path.write_bytes(bytes(data))


def first(path: Path, name: str) -> Path:
    return next(path.rglob(name))


DAMAGED, VERSION_GONE = errors.DamagedFileError, (errors.VersionGoneError, "deletion_vector_.*current version 4")
VECTORS, CHECKPOINTS = "deletion_vector_*", "*.checkpoint.parquet"
HARM: dict[str, tuple[Callable[[Path], Any], type[errors.PysparkLookupError], str]] = {
    "a commit is cut": (lambda path: cut(commit(path, 4)), DAMAGED, f"{4:020}.json is not a Delta commit"),
    "a commit is missing": (lambda path: commit(path, 3).unlink(), DAMAGED, f"a gap: {3:020}.json"),
    "the commit of a checkpoint is missing": (
        lambda path: [commit(path, n).unlink() for n in (2, 3, 4)], DAMAGED, f"lacks {2:020}.json, the commit of its newest checkpoint",
    ),
    "no commit is there": (
        lambda path: [commit(path, n).unlink() for n in range(5)], errors.UfsNotFoundError,
        f"holds no commit, but a checkpoint of version 2, which may not be the newest: restore {2:020}.json",
    ),
    "a vector is flipped": (lambda path: flip(first(path, VECTORS)), DAMAGED, "deletion_vector_.*checksum"),
    "a vector is missing": (lambda path: first(path, VECTORS).unlink(), *VERSION_GONE),
    "a vector is a directory": (lambda path: (file := first(path, VECTORS)).unlink() or file.mkdir(), *VERSION_GONE),
    "a file is missing": (lambda path: first(path, "part-*").unlink(), errors.VersionGoneError, "part-.*current version 4"),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARM)
def test_harm_is_told(path: Path, tmp_path: Path, harm: str) -> None:
    damage, error, words = HARM[harm]
    damage(path)
    with pytest.raises(error, match=words):
        opened(path, tmp_path / "cache").scan()


@pytest.mark.parametrize("harm", [cut, flip])
def test_a_damaged_checkpoint_is_skipped(path: Path, tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """A damaged checkpoint is skipped while the commits before it are there; else the error names it. So is a hint that leads nowhere."""
    harm(first(path, CHECKPOINTS))
    (path / "_delta_log" / "_last_checkpoint").write_text('{"version": 17}')
    assert sorted(opened(path, tmp_path / "cache").scan().column("id").to_pylist()) == [0, 1, 2, 7, 9]
    commit(path, 0).unlink()
    with pytest.raises(errors.DamagedFileError, match=r"checkpoint.parquet is not a Delta checkpoint"):
        opened(path, tmp_path / "late").scan()


def test_a_checkpoint_of_several_files(path: Path, tmp_path: Path) -> None:
    """A checkpoint of several files is used if all of them are there."""
    rows = opened(path, tmp_path / "known").scan().num_rows
    older = first(path, CHECKPOINTS)
    DeltaTable(str(path)).create_checkpoint()
    older.unlink()
    whole, log = first(path, CHECKPOINTS), path / "_delta_log"
    actions = pq.read_table(whole)
    whole.unlink()
    added = actions.column("add").is_valid().to_numpy()
    added[added.argmax()] = False  # so that the first part would do for a table of one file
    for number, part in enumerate((actions.filter(pa.array(~added)), actions.filter(pa.array(added))), 1):
        assert opened(path, tmp_path / f"host{number}").scan().num_rows == rows
        pq.write_table(part, log / f"{whole.name[:20]}.checkpoint.{number:010}.{2:010}.parquet")
    for commit in log.glob("*.json"):
        if commit.name[:20] != whole.name[:20]:
            commit.unlink()
    assert opened(path, tmp_path / "late").scan().num_rows == rows


@pytest.mark.parametrize("mode", ["partial", "full"])
def test_a_checkpoint_is_no_compaction(tmp_path: Path, mode: str) -> None:
    """A checkpoint's actions say that they change no data, though the commits that they sum up did: cached rows are replaced all the same."""
    path = tmp_path / "t"
    write_deltalake(str(path), pa.table({"id": [1], "value": [10]}))
    table = opened(path, tmp_path / "cache", mode, "id")
    assert table.get(1)[0]["value"] == 10
    actions = list(map(json.loads, commit(path, 0).read_text().splitlines()))
    begin = [action for action in actions if "protocol" in action or "metaData" in action]
    (old,) = replay_files(path, 0).values()
    write_deltalake(str(path), pa.table({"id": [1], "value": [11]}), mode="overwrite")
    new = next(add for add in replay_files(path, 1).values() if add["path"] != old["path"])
    first_line = {"checkpointMetadata": {"version": 1}}
    files = [{"add": {**new, "dataChange": False}}, {"remove": {"path": old["path"], "dataChange": False}}]
    checkpoint = path / "_delta_log" / f"{1:020}.checkpoint.{uuid.uuid4()}.json"  # of form V2
    checkpoint.write_text("".join(json.dumps(action) + "\n" for action in [first_line, *begin, *files]))
    commit(path, 0).unlink()
    commit(path, 1).write_text('{"commitInfo": {}}\n')
    assert table.get(1)[0]["value"] == 11
    assert opened(path, tmp_path / "cache", mode, "id").get(1)[0]["value"] == 11


def test_what_a_host_knows_outlives_damage(path: Path, tmp_path: Path) -> None:
    """In CACHE mode queries go on with the last version; an old log that was cleaned up is not missed."""
    options = {"metadata.source": "CACHE", "metadata.sync-interval": "0"}
    table = opened(path, tmp_path / "cache", **options)
    assert table.scan().num_rows == 5
    for number in range(3):
        commit(path, number).unlink()
    write_deltalake(str(path), pa.table({"id": [10]}), mode="append")
    assert table.scan().num_rows == 6
    cut(commit(path, 5))
    append_commit(path, [{"commitInfo": {}}])
    commit(path, 6).write_text("{")
    assert opened(path, tmp_path / "cache", **options).scan().num_rows == 6
    assert table.metrics()["keptVersionCount"] >= 1


def test_a_table_that_was_made_anew(path: Path, tmp_path: Path) -> None:
    """Another table at the same path is another table, whatever its version."""
    table = opened(path, tmp_path / "cache", "full", "id")
    assert table.scan().num_rows == 5
    shutil.rmtree(path)
    for number in range(5):
        write_deltalake(str(path), pa.table({"id": [number + 100]}), mode="append")
    assert sorted(table.scan().column("id").to_pylist()) == [100, 101, 102, 103, 104]
    shutil.rmtree(path)
    with pytest.raises(errors.UfsNotFoundError):
        table.scan()


@pytest.mark.parametrize(("mode", "form"), [*zip(MODES, ["file://{}", "{}", "FILE://localhost{}"], strict=True)])
def test_files_of_another_table(tmp_path: Path, mode: str, form: str) -> None:
    """Absolute paths, as in shallow clones, lead to such files and their vectors, whatever characters they have; the clone goes on by itself."""
    original, clone = tmp_path / "a b%ü", tmp_path / "clone"
    write_deltalake(str(original), pa.table({"id": [1, 2]}))
    (add,) = replay_files(original, 0).values()
    write_deltalake(str(clone), pa.table({"id": [3]}))
    place = form.format((original / add["path"]).as_uri().removeprefix("file://"))
    append_commit(clone, [{"add": {**add, "path": place, "deletionVector": write_vector(original, [1], "p")}}])
    table = opened(clone, tmp_path / "cache", mode, "id")
    assert table.get_many([1, 2, 3]).column("id").to_pylist() == [1, 3]
    write_deltalake(str(original), pa.table({"id": [4]}), mode="overwrite")
    assert table.get_many([1, 2, 3, 4]).column("id").to_pylist() == [1, 3]


@pytest.mark.parametrize("path", ["file://host{}", "file:../of/a.parquet", "s3:/b/a.parquet", "x:{}", "//host{}"])
def test_files_of_nobody_knows_where(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths that begin with the name of a host, of another store, or nowhere, are none below the working directory."""
    clone = tmp_path / "clone"
    write_deltalake(str(clone), pa.table({"id": [3]}))
    monkeypatch.chdir(clone)
    named = path.format(tmp_path / "of" / "a.parquet")
    add = {"path": named, "partitionValues": {}, "size": 9, "modificationTime": 1, "dataChange": True}
    append_commit(clone, [{"add": add}])
    message = f"its Delta log names {re.escape(named)}, a file in a different store from the table's"
    with pytest.raises(errors.NotSupportedError, match=message):
        opened(clone, tmp_path / "cache").scan()


def test_what_is_not_understood(path: Path, tmp_path: Path) -> None:
    """A reader feature, a mode of column mapping, a type and a version that is not there are refused by name."""
    message = r"option lookup\.version = 9: .* has no version 9: the log has the versions 0 to 4"
    with pytest.raises(errors.VersionGoneError, match=message):
        opened(path, tmp_path / "cache", version=9).scan()
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["deletionVectors", "timeTravel"]}
    append_commit(path, [{"protocol": protocol | {"writerFeatures": ["deletionVectors", "timeTravel"]}}])
    with pytest.raises(errors.NotSupportedError, match=r"version 5 of a Delta table: .* reader feature timeTravel"):
        opened(path, tmp_path / "cache").scan()
