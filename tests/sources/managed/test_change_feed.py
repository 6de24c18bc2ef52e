"""The changes of a managed table. That they are its versions, played back, is checked by `tests/models`."""

import itertools
import time
import types
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.columnar.types import text_of_schema
from pyspark_lookup.errors import NotSupportedError, OptionError, VersionGoneError
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.sources.managed import change_feed
from pyspark_lookup.sources.managed.change_feed import CHANGE_TYPE, COMMIT_TIMESTAMP, LOG_POSITION, ChangeTask, cost
from pyspark_lookup.sources.managed.conflicts import KeyedRows
from pyspark_lookup.storage.stores import IMMUTABLE, FileVersion
from pyspark_lookup.versions.model import PATH, ROW, Table
from tests.support.change_feed import format_changes, list_changes, open_feed
from tests.support.managed_tables import OFF, Site, rows


def test_the_rows_there_are_have_the_positions_of_their_commits(site: Site) -> None:
    """A stream begins with the rows there are: each at the commit that added it; what was folded is at the compaction."""
    table = site.created(OFF)
    first, second = table.write(rows(1, 2)), table.upsert(rows(2, 3, name="b"))
    table.alter(properties={"a": "b"})

    def list_positions() -> dict[int, int]:
        feed = open_feed(site)
        rows = feed.snapshot(feed.state.position)
        assert {row[CHANGE_TYPE] for row in rows} == {"insert"}
        return {row["id"]: row[LOG_POSITION] for row in rows}

    assert list_positions() == {1: first, 2: second, 3: second}
    folded = table.compact()
    last = table.write(rows(4))
    assert list_positions() == {1: folded, 2: folded, 3: folded, 4: last}


def test_kinds_of_changes(site: Site) -> None:
    """Each kind of write, by the keys of its time; none of a compaction, one of a transaction; a reader of added rows meets no others."""
    table = site.created(OFF)

    def transaction() -> int | None:
        with table.transaction() as t:
            t.write(rows(1, 4))
            t.upsert(rows(1, 7, name="b"))
            t.upsert(rows(7, name="c"))
            t.delete(pa.table({"id": [4, 8]}))
        return t.position

    for write, changes in (
        (lambda: table.write(rows(1, 2)), "1a+ 2a+"),
        (lambda: table.upsert(rows(2, 3, name="b")), "2a< 2b> 3b+"),
        (lambda: table.delete(pa.table({"id": [1]})), "1a-"),
        (table.compact, ""),
        (lambda: table.write(rows(7, 8), "overwrite"), "2b- 3b- 7a+ 8a+"),
        (transaction, "1b+ 7a< 7c> 8a-"),
        (lambda: table.alter(keys=["name"]), ""),
        (lambda: table.upsert(pa.table({"id": [9], "name": ["b"]})), "1b< 9b>"),
    ):
        before = site.state().position
        position = write()
        events = list_changes(site, before)
        assert format_changes(events) == changes
        assert {row[LOG_POSITION] for row in events} <= {position}
        if "-" not in changes and "<" not in changes:
            assert list_changes(site, before, only=True) == events
        else:
            with pytest.raises(NotSupportedError, match=r"removes rows.*lookup.view = changes"):
                list_changes(site, before, only=True)
    assert format_changes(list_changes(site, where="id = 3 AND _change_type = 'delete'")) == "3b-"


def read_changes(site: Site, **more: str) -> list[dict[str, Any]]:
    """The changes between two versions, read at once."""
    options = {f"lookup.{name.replace('_', '-')}": text for name, text in more.items()}
    return site.table(options, host="batch").scan().to_pylist()


def test_changes_between_two_versions(site: Site) -> None:
    """The changes, of both versions too, are what a stream gives, with the time at which the store has their commit, whatever the writer's clock."""
    site.resize(log_page=7)
    table = site.created(OFF)
    positions = [table.write(rows(1, 2))]
    site.clock.tick(10**7)
    positions += [table.upsert(rows(2, 3, name="b")), table.delete([1]), table.delete(where="id = 3"), table.compact()]
    positions += [table.write(rows(7), "overwrite"), table.alter("more INT"), table.write(rows(8))]
    times = {row["version"]: row["committed_at"] for row in table.versions()}
    feed = open_feed(site)
    for first, last in [*itertools.pairwise([1, *positions]), *((at, positions[-1]) for at in positions[::3])]:
        events = read_changes(site, changes_from=str(first), changes_to=str(last))
        expected = feed.between(first - 1, last)
        assert sorted(events, key=repr) == sorted(expected, key=repr)
        assert all(first <= row[LOG_POSITION] <= last for row in events)
        assert all(row[COMMIT_TIMESTAMP] == times[row[LOG_POSITION]] for row in events)
    for part, change in feed.changes():
        assert len(feed.between(change.position - 1, change.position)) <= cost(part, change)[0]
    assert read_changes(site, changes_from=str(positions[-1] + 1)) == []
    assert {row[COMMIT_TIMESTAMP] for row in feed.snapshot(feed.last)} == {times[positions[5]], times[positions[7]]}
    options = {"changes-from": "2", "columns": "name", "where": "id = 2", "view": "changes"}
    reader = site.table({f"lookup.{name}": text for name, text in options.items()})
    assert reader.schema.names == ["name", CHANGE_TYPE, LOG_POSITION, COMMIT_TIMESTAMP]
    events = reader.scan(["_change_type", "name"], "_change_type <> 'insert'").to_pylist()
    expected = [("delete", "b"), ("update_postimage", "b"), ("update_preimage", "a")]
    assert sorted(map(tuple, map(dict.values, events))) == expected


def test_a_commit_that_deletes_rows_of_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding the rows of each file among all deleted ones takes no longer for many files than for one."""
    count, of_each = 2000, 200
    ids = np.random.default_rng(7).permutation(count * of_each)
    paths = pa.array([f"{number:05}.parquet" for number in range(count)])
    marks = pa.table({"id": ids, PATH: paths.take(pa.array(ids // of_each)), ROW: ids % of_each})
    reads: list[str] = []

    def count_rows(_: KeyedRows, __: Any, ___: Any, file: FileVersion, keys: pa.Table) -> Any:
        first = int(file.url[-13:-8]) * of_each
        assert sorted(keys.column("id").to_pylist()) == [
            *range(first + (of_each - 1 if first == of_each else 0), first + of_each)
        ]
        reads.append(file.url)
        yield np.arange(of_each), pa.record_batch({"id": np.arange(first, first + of_each)})

    monkeypatch.setattr(KeyedRows, "read_delete_files", lambda *_: marks)
    monkeypatch.setattr(KeyedRows, "count_rows", count_rows)
    scan = types.SimpleNamespace(read_deleted=lambda *_: {"file:///t/00001.parquet": np.arange(of_each - 1)})
    schema = pa.schema([("id", pa.int64())])
    files = tuple(FileVersion(f"file:///t/{path}", 1, IMMUTABLE) for path in paths.to_pylist())
    table = Table("file:///t", "", "MANAGED", FileFormatName.PARQUET)
    task = ChangeTask(table, 2, False, files, ("id",), text_of_schema(schema), files[:1])
    started_s = time.process_time()
    batches = list(change_feed.read_changes(lambda _: scan, [task], schema, None))  # type: ignore[arg-type, return-value]
    assert time.process_time() - started_s < 3
    assert reads == [file.url for file in files]
    assert sorted(pa.Table.from_batches(batches).column("id").to_pylist()) == [
        *range(200),
        *range(399, count * of_each),
    ]


NO_CHANGES: list[tuple[dict[str, str], type[Exception], str]] = [
    ({"changes_from": "0"}, OptionError, r"lookup.changes-from = '0'"),
    (
        {"changes_from": "99"},
        VersionGoneError,
        r"lookup.changes-from = 99: the log of .* ends at position \d+: give \d+ \(the next commit\) or less",
    ),
    ({"changes_from": "4", "changes_to": "3"}, OptionError, r"lookup.changes-to = 3 is before lookup.changes-from = 4"),
    ({"changes_to": "3"}, OptionError, r"lookup.changes-to = 3 needs lookup.changes-from"),
    ({"changes_from": "1", "version": "1"}, OptionError, r"lookup.version reads one version and lookup.changes-from"),
]


def test_changes_that_there_are_not(site: Site) -> None:
    """Changes that do not exist are refused by name, as are other uses of a table that reads changes, and changes of a table that has none."""
    site.created(OFF).write(rows(1))
    for options, kind, message in NO_CHANGES:
        with pytest.raises(kind, match=message):
            read_changes(site, **options)
    pq.write_table(rows(1), f"{site.path}.parquet")
    with pytest.raises(NotSupportedError, match=r"not \(or no longer\) a managed table"):
        site.table({"path": f"{site.path}.parquet", "lookup.changes-from": "1"}).scan()
    reader = site.table({"lookup.changes-from": "1", "lookup.keys": "id"})
    for use in (lambda: reader.get(1), lambda: reader.get_many([1]), lambda: reader.write(rows(2))):
        with pytest.raises(OptionError, match=r"option lookup.changes-from"):
            use()
