"""A log or metadata that somebody cleans up while a host that knows nothing of the table reads it: its rows, and no error."""

import dataclasses
import datetime
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.table import Table

from pyspark_lookup import LookupTable
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.lookup import lookup_table as api
from pyspark_lookup.lookup import runtime
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.storage.stores import open_store
from tests.support.fakes import FaultyStore
from tests.support.fuzzing import BY_NIGHT
from tests.support.iceberg_definition import sql_catalog


def write_delta(root: Path) -> Callable[[], None]:
    """A table with a checkpoint of its last commit but one; its log is cleaned up, of that too, after one more and a checkpoint."""
    for number in range(5):
        write_deltalake(str(root), pa.table({"id": [number]}), mode="append")
        if number == 3:
            DeltaTable(str(root)).create_checkpoint()
    log = root / "_delta_log"

    def clean_up() -> None:
        old_files = [*log.glob("*.json"), *log.glob("*.checkpoint.parquet")]
        write_deltalake(str(root), pa.table({"id": [10]}), mode="append")
        DeltaTable(str(root)).create_checkpoint()
        for file in old_files:
            file.unlink()

    return clean_up


def write_iceberg(root: Path) -> Callable[[], None]:
    """A directory with a version hint; each commit removes the metadata of the one before, and then its manifests are expired."""
    root.parent.mkdir(exist_ok=True)
    catalog, _ = sql_catalog(root.parent)
    properties = {"write.metadata.delete-after-commit.enabled": "true", "write.metadata.previous-versions-max": "1"}
    table = catalog.create_table("ns.t", pa.schema({"id": pa.int64()}), location=root.as_uri(), properties=properties)

    def hint(table: Table) -> None:
        name = table.metadata_location.rpartition("/")[2].removesuffix(".metadata.json")
        (root / "metadata" / "version-hint.text").write_text(name)

    table.append(pa.table({"id": [0]}))
    hint(table)

    def clean_up() -> None:
        before = {path.name for path in (root / "metadata").iterdir()}
        table = sql_catalog(root.parent)[0].load_table("ns.t")
        table.overwrite(pa.table({"id": [0, 1]}))
        table.append(pa.table({"id": [2]}))
        hint(table)
        for name in before - {"version-hint.text"}:
            (root / "metadata" / name).unlink(missing_ok=True)

    return clean_up


def write_managed(root: Path) -> Callable[[], None]:
    """A log with pages of four events; more of them are put, and those before are trimmed."""
    host = Runtime(HostClock(), random.Random(1))
    host._sizes = dataclasses.replace(host._sizes, log_page=4)

    def upsert(numbers: Iterable[int], clean_up: bool) -> None:
        options = {"lookup.keys": "id", "lookup.cache.dir": str(root.parent / "writer")}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(api, "runtime", lambda: host)
            with LookupTable(str(root), options) as table:
                for number in numbers:
                    table.upsert([{"id": number}])
                if clean_up:
                    table.alter(properties={"lookup.log.retention": "0 s"})
                    table.vacuum(datetime.timedelta(0), force=True)

    upsert(range(2), False)
    return lambda: upsert(range(2, 6), True)


STRIDE = 1 if BY_NIGHT else 2


@pytest.mark.parametrize(
    ("write", "pinned"),
    [
        (write_delta, True),
        (write_iceberg, False),
        (write_managed, False),
        pytest.param(write_managed, True, marks=pytest.mark.nightly),
    ],
)
def test_a_cold_read_survives_clean_up_at_any_moment(
    write: Callable[[Path], Callable[[], None]], pinned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clean-up before each call of a first read in turn: the rows of before or after, whichever, as one version."""
    home = tmp_path / "home"
    clean_up = write(home / "t")
    before = ids(home / "t", tmp_path / "before", {})
    shutil.copytree(home, tmp_path / "saved")
    options = {"lookup.timestamp": "2200-01-01T00:00:00Z"} if pinned else {}
    call = 0
    while True:
        calls = iter(range(call, -1, -1))

        def inject_clean_up(kind: str, subject: object, calls: Iterator[int] = calls) -> None:
            if next(calls, None) == 0:
                clean_up()

        host = Runtime(HostClock(), random.Random(call))
        with monkeypatch.context() as patch:
            patch.setattr(api, "runtime", lambda host=host: host)
            patch.setattr(runtime, "open_store", lambda *args: FaultyStore(open_store(*args), inject_clean_up))
            answer = ids(home / "t", tmp_path / f"cache-{call}", options)
        if next(calls, None) is not None:
            break  # there were fewer calls
        after = ids(home / "t", tmp_path / f"after-{call}", options)
        assert answer in (before, after) and before < after
        shutil.rmtree(home)
        shutil.copytree(tmp_path / "saved", home)
        call += STRIDE
    assert call >= 4


def ids(path: Path, cache: Path, options: dict[str, str]) -> set[int]:
    with LookupTable(str(path), {"lookup.cache.dir": str(cache), **options}) as table:
        return set(table.scan().column("id").to_pylist())
