"""What tests of large tables share, whose files are columns: from how many files on, another process, and columns that are lost."""

import dataclasses
import json
import random
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.errors import CacheFullError
from pyspark_lookup.lookup import lookup_table as api
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.sources.delta.source import DeltaColumns, DeltaSource
from pyspark_lookup.sources.iceberg.columns import IcebergColumns
from pyspark_lookup.sources.iceberg.source import IcebergSource
from pyspark_lookup.storage.disk import Disk
from pyspark_lookup.storage.stores import EqualityGroup, FileVersion
from pyspark_lookup.versions.file_columns import ColumnFiles, FileColumns
from pyspark_lookup.versions.listed_columns import ListedColumns
from pyspark_lookup.versions.model import TableVersion
from pyspark_lookup.versions.recorded_columns import RecordedColumns
from tests.support.disks import flipped
from tests.support.fuzzing import BY_NIGHT

Lose = Callable[[Iterable[Path]], None]


@pytest.fixture(autouse=True)
def mapped_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """From how many files on these become columns: half of the tests read a table of one as they read one of thousands, the others do by night.
    A test that has to do both by day takes `both_ways`."""
    count: int = getattr(request, "param", None) or (1, 1000)[(zlib.crc32(request.node.nodeid.encode()) + BY_NIGHT) % 2]
    for source in (DeltaSource, IcebergSource):
        monkeypatch.setattr(source, "mapped_from", count)
    return count


both_ways = pytest.mark.parametrize("mapped_from", [1, 1000], ids=["columns", "objects"], indirect=True)


@pytest.fixture
def made_objects(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that become objects, in their order."""
    names: list[str] = []

    def note(columns: type[FileColumns]) -> None:
        make = columns.file

        def make_and_note(self: FileColumns, row: int) -> FileVersion:
            file = make(self, row)
            names.append(file.url.rpartition("/")[2])
            return file

        monkeypatch.setattr(columns, "file", make_and_note)

    for columns in (DeltaColumns, IcebergColumns, ListedColumns, RecordedColumns):
        note(columns)
    return names


def check_record(version: TableVersion) -> None:
    """Check that the record of a version beside its snapshot says all that the version says, except for statistics and bounds of deletes."""
    record = json.loads(json.dumps(version.to_json(statistics=False)))
    recorded = TableVersion.from_json(version.table_id, record)
    assert (recorded.metadata, recorded.digest) == (version.metadata, version.digest)
    assert [*map(_describe, recorded.files)] == [*map(_describe, version.files)]
    assert {*map(_names, recorded.equality)} == {*map(_names, version.equality)}
    assert {deletes.name for deletes in recorded.deletes} == {deletes.name for deletes in version.deletes}
    if isinstance(version.files, ColumnFiles):
        assert isinstance(recorded.files, ColumnFiles)
        deletes = [deletes for file in recorded.files for deletes in file.deletes]
        assert len({*map(id, deletes)}) == len({delete.name for delete in deletes})  # each is one object
        places = [place if file.cacheable else -1 for place, file in enumerate(version.files)]
        assert recorded.files.states.find(version.files.states).tolist() == places


def _names(group: EqualityGroup) -> tuple[str, ...]:
    return group.names


def _describe(file: FileVersion) -> dict[str, Any]:
    fields = {field.name: getattr(file, field.name) for field in dataclasses.fields(file) if field.name != "statistics"}
    equality = [
        (group.names, [deletes.without_bounds().to_json() for deletes in group.files]) for group in file.equality
    ]
    return {**fields, "deletes": [deletes.to_json() for deletes in file.deletes], "equality": equality}


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Begins another process, to which all that is opened from then on belongs."""

    def begin() -> None:
        runtime = Runtime(HostClock(), random.Random())
        monkeypatch.setattr(api, "runtime", lambda: runtime)

    begin()
    return begin


@pytest.fixture(params=["removed", "damaged", "full"])
def lose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Lose:
    """Makes what lies there unreadable; or nothing can be put there, as there is no room."""
    if request.param == "full":
        monkeypatch.setattr(Disk, "create_segment", mock.Mock(side_effect=CacheFullError("no room")))

    def remove(paths: Iterable[Path]) -> None:
        for path in paths:
            if request.param == "damaged":
                path.write_bytes(flipped(content := path.read_bytes(), len(content) * 4))
            else:
                path.unlink()

    return remove
