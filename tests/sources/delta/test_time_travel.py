"""`lookup.timestamp`: the version that was the current one at a time, of Delta tables and of managed ones."""

import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import VersionGoneError
from tests.support.delta_tables import append_commit, set_properties
from tests.support.lake_tables import opened
from tests.support.managed_tables import Site, list_ids, rows

DAY = datetime.timedelta(days=1)
SECOND = datetime.timedelta(seconds=1)
BEGIN = datetime.datetime(2026, 3, 1, tzinfo=datetime.timezone.utc)


def write_days(table: Path, days: int) -> None:
    """A version a day; each has the number of its day, and those before it."""
    for day in range(days):
        write_deltalake(str(table), pa.table({"id": [day]}), mode="append")
    for day in range(days):
        set_time(table, day, BEGIN + day * DAY)


def set_time(table: Path, version: int, at: datetime.datetime) -> None:
    os.utime(table / "_delta_log" / f"{version:020}.json", (at.timestamp(), at.timestamp()))


def read_ids(table: Path, cache: Path, at: datetime.datetime) -> list[int]:
    rows = opened(table, cache, "none", "id", timestamp=at.isoformat()).scan()
    return sorted(rows.column("id").to_pylist())


def test_each_version_has_a_time(tmp_path: Path) -> None:
    """A version is there at the moment of its commit, and not before; later than all of them is the current version."""
    table, cache = tmp_path / "t", tmp_path / "cache"
    write_days(table, 4)
    for day in range(4):
        for after in (datetime.timedelta(0), DAY - datetime.timedelta(milliseconds=1)):
            assert read_ids(table, cache, BEGIN + day * DAY + after) == [*range(day + 1)]
    assert read_ids(table, cache, BEGIN + 10000 * DAY) == [*range(4)]
    with pytest.raises(VersionGoneError, match=r"lookup\.timestamp.* 0, dates from 2026-03-01T00:00:00\+00:00"):
        read_ids(table, cache, BEGIN - DAY)
    # Times as `versions` shows them name these versions, also where the clock went back in between.
    cache = tmp_path / "late"
    set_time(table, 2, BEGIN + DAY / 2)  # before the commit that it follows
    reader = opened(table, cache)
    for row in reader.versions():
        assert read_ids(table, cache, row["committed_at"]) == [*range(row["version"] + 1)]
    assert [row["committed_at"] - BEGIN for row in reader.versions()][2] == DAY + datetime.timedelta(milliseconds=1)


@pytest.mark.parametrize("copied", ["what they say", "all"])
def test_in_commit_timestamps(tmp_path: Path, copied: str) -> None:
    """With `delta.enableInCommitTimestamps` times are what commits say from then on, whatever a copy's files say of the earlier ones."""
    table, cache = tmp_path / "t", tmp_path / "cache"
    write_days(table, 2)
    first = [json.loads(line) for line in (table / "_delta_log" / f"{0:020}.json").open()]
    (metadata,) = (action for action in first if "metaData" in action)
    metadata["metaData"]["configuration"] = {
        "delta.enableInCommitTimestamps": "true",
        "delta.inCommitTimestampEnablementVersion": "2",
        "delta.inCommitTimestampEnablementTimestamp": str(int((BEGIN + 2 * DAY).timestamp() * 1000)),
    }
    (added,) = (action for action in first if "add" in action)
    for number, more in ((2, [metadata]), (3, list[dict[str, Any]]())):
        at_ms = int((BEGIN + number * DAY).timestamp() * 1000)
        added["add"]["path"] = f"{number}.parquet"
        (table / f"{number}.parquet").write_bytes(next(table.glob("part-*.parquet")).read_bytes())
        assert append_commit(table, [{"commitInfo": {"inCommitTimestamp": at_ms}}, *more, added]) == number
        set_time(table, number, BEGIN + 30 * DAY)  # as a copy of the table would have it
    if copied == "all":
        for number in (0, 1):
            set_time(table, number, BEGIN + 30 * DAY)
        with pytest.raises(VersionGoneError):
            read_ids(table, cache, BEGIN + DAY)
    for day in range(0 if copied != "all" else 2, 4):
        assert len(read_ids(table, cache, BEGIN + day * DAY + DAY / 2)) == day + 1
    times = [row["committed_at"] for row in opened(table, cache).versions()]
    assert times == sorted(times)
    assert times[2:] == [BEGIN + 2 * DAY, BEGIN + 3 * DAY]


def test_few_commits_are_read_for_their_times(tmp_path: Path) -> None:
    """Of many commits that state their times, a read by time reads the last, or those that a binary search asks for."""
    table, count = tmp_path / "t", 50
    write_days(table, 1)
    properties = {"delta.enableInCommitTimestamps": "true", "delta.inCommitTimestampEnablementVersion": "1"}
    for number in range(1, count):
        info = {"commitInfo": {"inCommitTimestamp": int((BEGIN + number * DAY).timestamp() * 1000)}}
        path = table / "_delta_log" / f"{set_properties(table, properties):020}.json"
        path.write_text(json.dumps(info) + "\n" + path.read_text())

    def read(cache: str, **options: str) -> tuple[int, int]:
        """(the version, the requests for bytes)."""
        reader = opened(table, tmp_path / cache, **options)
        return int(reader.describe()["position"]), int(reader.metrics()["ufsGetCount"])

    for day, most in ((count + 1, 1), (count - 1, 1), (20, 7), (0, 7)):
        expected, requests = read(f"version-{day}", version=str(min(day, count - 1)))
        version, more_requests = read(f"time-{day}", timestamp=(BEGIN + day * DAY).isoformat())
        assert (version, more_requests - requests <= most) == (expected, True)


@pytest.mark.parametrize("ahead_s", [365 * 86400.0, -365 * 86400.0], ids=["ahead", "behind"])
def test_one_host_has_a_wrong_clock(site: Site, ahead_s: float) -> None:
    """Times are the store's, whatever the writers' clocks show: of `lookup.timestamp`, of the view, now and at each commit."""
    table = site.created({"lookup.write.compact-after": "0"})
    site.clock.tick(ahead_s)
    table.write(rows(0))
    site.clock.tick(-ahead_s)
    for number in range(1, 4):
        table.write(rows(number), "overwrite")
    for path in (site.path / "_lookup/log").iterdir():  # an hour between any two events
        at_s = time.time() + 3600 * (int(path.stem) - 1000)
        os.utime(path, (at_s, at_s))
    versions = [(row["version"], row["committed_at"]) for row in table.versions()]
    assert [at for _, at in versions] == sorted(at for _, at in versions)
    ids = [list_ids(open_table(site, at).scan()) for _, at in versions]
    assert ids == [[], [0], [1], [2], [3]]
    assert [list_ids(open_table(site, at - SECOND).scan()) for _, at in versions[1:]] == ids[:-1]
    assert list_ids(open_table(site, datetime.datetime.now(datetime.timezone.utc)).scan()) == [3]
    event = site.path / f"_lookup/log/{versions[2][0]:020d}.json"
    os.utime(event, (time.time() + 7200,) * 2)  # the store's own clock was ahead
    assert list_ids(open_table(site, datetime.datetime.now(datetime.timezone.utc)).scan()) == [3]
    with pytest.raises(VersionGoneError, match=r"lookup\.timestamp"):
        open_table(site, BEGIN).scan()


def open_table(site: Site, at: datetime.datetime) -> LookupTable:
    return site.table({"lookup.timestamp": at.isoformat()})
