"""`lookup.version`, `lookup.branch`, `lookup.tag` and `lookup.timestamp` of Iceberg tables; what was expired; what views show."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from pyspark_lookup import OptionError, VersionGoneError
from tests.support.iceberg_writing import IcebergTable
from tests.support.lake_tables import opened

DAY_MS = 86_400_000
BEGIN = datetime.datetime(2026, 3, 1, tzinfo=datetime.timezone.utc)
HALF = datetime.timedelta(hours=12)


class Clocked(IcebergTable):
    """A table of which each change is a day later than the one before it."""

    at_ms = int(BEGIN.timestamp() * 1000)

    def _now_ms(self) -> int:
        self.at_ms += DAY_MS
        return self.at_ms


@pytest.fixture
def table(tmp_path: Path) -> Clocked:
    """A table of four snapshots, each with the rows of those before it."""
    clocked = Clocked.create(tmp_path / "t", {"id": "int", "name": "string"})
    for number in range(4):
        clocked.commit(clocked.data([{"id": number, "name": f"n{number}"}]))
    return clocked


def snapshots(table: Clocked) -> list[int]:
    return [snapshot["snapshot-id"] for snapshot in table.meta["snapshots"]]


def find_time(table: Clocked, place: int) -> datetime.datetime:
    """When an entry of the log was made."""
    at_ms: int = table.meta["snapshot-log"][place]["timestamp-ms"]
    return datetime.datetime.fromtimestamp(at_ms / 1000, datetime.timezone.utc)


def ids(table: Clocked, mode: str = "none", **pin: Any) -> list[int]:
    reader = opened(table.home, table.home.parent / "cache", mode, "id", **pin)
    by_key, scanned = (sorted(rows.column("id").to_pylist()) for rows in (reader.get_many([*range(20)]), reader.scan()))
    assert by_key == scanned
    return scanned


def test_names_that_are_none(table: Clocked) -> None:
    """The error says which names there are."""
    table.add_tag("release")
    table.add_branch("dev")
    for pin, names in (
        ({"branch": "prod"}, "dev, main"),
        ({"tag": "prod"}, "release"),
        ({"branch": "release"}, "dev, main"),
        ({"tag": "dev"}, "release"),
    ):
        ((kind, name),) = pin.items()
        with pytest.raises(OptionError, match=rf"lookup\.{kind} = '{name}': .* no such {kind}; it has {names}$"):
            ids(table, **pin)
    empty = Clocked.create(table.home.parent / "empty", {"id": "int"})
    with pytest.raises(OptionError, match=r"lookup\.tag = 'x': .* it has none"):
        ids(empty, tag="x")


def test_each_version_has_a_time(table: Clocked) -> None:
    """A version is there from the moment that it became the current one, by the snapshot log, whose order counts: also by a rollback."""
    table.set_current(snapshots(table)[1])
    table.commit(table.data([{"id": 10, "name": "after"}]))
    rows = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1], [0, 1, 10]]
    for place, expected in enumerate(rows):
        at = find_time(table, place)
        assert ids(table, timestamp=(at + HALF).isoformat()) == expected
        if place:
            before = (at - datetime.timedelta(milliseconds=1)).isoformat(timespec="milliseconds")
            assert ids(table, timestamp=before) == rows[place - 1]
    message = r"no snapshot as old as 2026-03-02T.*lookup\.timestamp.* dates from 2026-03-03T"
    with pytest.raises(VersionGoneError, match=message):
        ids(table, timestamp=(find_time(table, 0) - HALF - HALF).isoformat())
    log = table.meta["snapshot-log"]  # of a writer whose clock was set back
    log[2]["timestamp-ms"] = log[1]["timestamp-ms"] - 1000
    table.save()
    assert ids(table, timestamp=find_time(table, 1).isoformat()) == [0, 1, 2]
    assert ids(table, timestamp=find_time(table, 2).isoformat()) == [0, 1, 2]


def test_what_was_expired(table: Clocked) -> None:
    """An expired snapshot is an error that names it and the newest that there are; a snapshot that a tag names stays."""
    table.add_tag("kept")
    table.meta["refs"]["kept"]["snapshot-id"] = snapshots(table)[1]
    table.save()
    expired, tagged, _, last = snapshots(table)
    first = find_time(table, 0)
    assert ids(table, version=expired) == [0]
    table.expire(1)
    for cache in ("cache", "late"):
        with pytest.raises(
            VersionGoneError, match=rf"no snapshot {expired} \(lookup\.version\): .*expired.* {tagged}, {last}$"
        ):
            opened(table.home, table.home.parent / cache, version=expired).scan()
    assert ids(table, tag="kept") == [0, 1]
    with pytest.raises(VersionGoneError, match=r"lookup\.timestamp"):
        ids(table, timestamp=first.isoformat())
    with pytest.raises(VersionGoneError, match=r"no snapshot 17 \(lookup\.version\): "):
        ids(table, version=17)


def test_a_table_without_refs_or_log(table: Clocked) -> None:
    """Formats 1 and 2 allow a table without refs, and without a log of snapshots."""
    for name in ("refs", "snapshot-log"):
        table.meta.pop(name)
    table.save()
    assert ids(table) == ids(table, branch="main") == [0, 1, 2, 3]
    with pytest.raises(VersionGoneError, match="lists no snapshots"):
        ids(table, timestamp=(BEGIN + 99 * HALF).isoformat())


def test_no_snapshot_at_all(tmp_path: Path) -> None:
    """The table has its columns, and no rows; also after all were expired."""
    for form in (1, 2, 3):
        table = Clocked.create(tmp_path / f"t{form}", {"id": "int", "name": "string"}, form)
        for pin in ({}, {"branch": "main"}):
            reader = opened(table.home, tmp_path / f"cache{form}", "full", "id", **pin)
            assert (reader.get(1), reader.scan().column_names, reader.scan().num_rows) == ([], ["id", "name"], 0)
        table.meta["current-snapshot-id"] = -1
        table.save()
        assert ids(table) == []
        table.commit(table.data([{"id": 1, "name": "x"}]))
        assert ids(table) == [1]
