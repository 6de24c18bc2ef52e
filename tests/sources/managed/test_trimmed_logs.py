"""Tables whose log has many short pages, and is trimmed: what queries, transactions, streams, copies and hosts see of it."""

import shutil
from collections.abc import Callable

import pyarrow as pa
import pytest

from pyspark_lookup.errors import VersionGoneError
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.sources.managed.log import WriteMode
from pyspark_lookup.sources.managed.log import state as properties
from tests.support.change_feed import open_feed
from tests.support.managed_tables import DAY_S, OFF, SCHEMA, Site, aged, list_ids, rows

PAGE = 4


@pytest.fixture
def table(site: Site) -> LookupTable:
    """A table with pages of four events, of which nothing is kept that vacuum does not keep."""
    site.resize(log_page=PAGE)
    table = site.created(OFF)
    table.alter(properties={"lookup.log.retention": "0 s"})
    return table


def append(table: LookupTable, *ids: int) -> list[int]:
    """Append each id in a commit of its own; returns the positions of the commits."""
    return [table.write(rows(id_)) or 0 for id_ in ids]


def trim(table: LookupTable) -> None:
    table.vacuum("0 s", force=True)


def read(site: Site, host: str, **options: str) -> list[int]:
    named = {f"lookup.{name.replace('_', '-')}": text for name, text in options.items()}
    return list_ids(site.table({**OFF, **named}, host).scan())


def test_transactions_and_compactions_that_last_for_pages(site: Site, table: LookupTable) -> None:
    """A transaction goes on seeing what it began with, and its own; a compaction is committed however much was appended meanwhile."""
    append(table, 1, 2)
    second = site.table(OFF, "b")
    with table.transaction() as reading, site.table(OFF).transaction() as writing:
        writing.upsert(rows(5))
        append(second, *range(100, 104))
        writing.upsert(rows(6))
        append(table, *range(104, 108))
        writing.delete(pa.table({"id": [5]}))
        assert (list_ids(writing.scan()), list_ids(reading.scan())) == ([1, 2, 6], [1, 2])
    busy: list[int] = []

    def meanwhile(kind: str, subject: object) -> None:
        if kind == "put" and "compacted" in str(subject) and not busy:
            busy.append(1)
            append(second, *range(200, 204))

    site.interrupt(meanwhile)
    before = site.state().position
    table.compact()
    assert busy
    assert (site.state().find_visible()[0].mode, site.state().position > before + 12) == (WriteMode.COMPACT, True)
    assert list_ids(table.scan()) == [1, 2, 6, *range(100, 108), *range(200, 204)]


def test_the_oldest_version_stays_readable(site: Site, table: LookupTable) -> None:
    """The oldest version is read also if it is at the end of a page; a gentler vacuum of a log that has nothing as old does nothing."""
    last = append(table, 1)[-1]
    while last % PAGE:
        (last,) = append(table, 2)
    expected = list_ids(table.scan())
    trim(table)
    for _ in range(PAGE):
        site.writer().abort(site.writer().begin(SCHEMA, WriteMode.APPEND), ())
    site.restart()
    trim(site.table(OFF))
    assert read(site, "new", version=str(last)) == expected
    aged(site, 8, but=site.state().position)
    append(table, *range(10, 20))
    aged(site, 8)
    assert site.table(OFF).vacuum("30 d")["files"] == 0
    table.alter(properties={"lookup.write.vacuum-after": "30 d"})
    site.clock.tick(4 * DAY_S)
    site.calls()
    append(table, 20, 21)  # the first looks for what is old, and says in the log that it did
    assert [kind for kind, _ in site.calls()].count("tree") == 1


@pytest.mark.parametrize("replace", [LookupTable.compact, lambda table: table.write(rows(4), "overwrite")])
def test_a_stream_that_needs_what_was_vacuumed(site: Site, replace: Callable[[LookupTable], int]) -> None:
    """A stream that needs them is told so, also if the page that it asks has the vacuum itself; a stream that needs only the new files goes on."""
    site.resize(log_page=5 * PAGE)
    table = site.created(OFF)
    first, *_ = append(table, 1, 2, 3)
    last = replace(table)
    trim(table)
    for count, id_ in enumerate(range(10, 20)):
        with pytest.raises(VersionGoneError, match="vacuumed before they were read"):
            open_feed(site).between(first, site.state().position)
        assert len(open_feed(site).between(last, site.state().position)) == count
        append(table, id_)


def test_a_commit_that_cannot_trim(site: Site, table: LookupTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that cannot trim the log succeeds: a caller who was told of an error would write its rows again."""
    table.alter(properties={"lookup.log.retention": "30 d"})
    append(table, 1, 2, 3)
    trim(table)
    table.alter(properties={"lookup.log.retention": "0 s"})
    monkeypatch.setattr(properties, "KEPT_S", -DAY_S)
    (site.path / "_lookup/log/00000000000000000002a.json").write_text("nobody's")
    append(table, *range(10, 10 + PAGE))
    assert list_ids(table.scan()) == [1, 2, 3, *range(10, 10 + PAGE)]


def test_hosts_that_know_what_is_gone(site: Site, table: LookupTable) -> None:
    """A host that knows the first event only finds the others; one whose table was restored from a copy reads no page of before."""
    far = site.path.with_name("far")
    options = {**OFF, "path": str(far)}
    site.writer({"path": str(far), "lookup.keys": "id"}, "far").create(SCHEMA)
    assert site.table(options, "far").scan().num_rows == 0
    near_host = site.table(options, "near")
    near_host.alter(properties={"lookup.log.retention": "0 s"})
    append(near_host, *range(10))
    trim(near_host)
    assert list_ids(site.table(options, "far").scan()) == list(range(10))
    append(table, 1, 2)
    copy = site.path.with_name("copy")
    shutil.copytree(site.path, copy)
    positions = append(table, *range(100, 108))
    for position in positions:
        site.table({**OFF, "lookup.version": str(position)}).scan()
    shutil.rmtree(site.path)
    copy.rename(site.path)
    restored = site.table(OFF, "other")
    assert append(restored, *range(200, 208)) == positions
    for number, position in reversed(list(enumerate(positions))):  # the pages that were read last
        assert read(site, "a", version=str(position)) == [1, 2, *range(200, 201 + number)]


def test_a_checkpoint_that_comes_late(site: Site, table: LookupTable) -> None:
    """A new host passes over one that does not fit the log."""
    append(table, *range(10))
    checkpoint = min((site.path / "_lookup/checkpoints").iterdir()).read_bytes()
    trim(table)
    shutil.copytree(site.path, copy := site.path.with_name("copy"))
    (copy / "_lookup/checkpoints" / f"{10**20 - 90:020d}.json").write_bytes(checkpoint)
    beyond = site.table({**OFF, "path": str(copy)}, "late")
    assert list_ids(beyond.scan()) == list(range(10))
    assert append(beyond, 10)[0] > site.state().position


def test_a_position_that_is_no_version(site: Site, table: LookupTable) -> None:
    """`lookup.version` of an event that made none is refused; those that are listed, and that writes return, are read."""
    returned = [table.write(rows(number)) for number in range(4)]
    job = site.writer().begin(SCHEMA, WriteMode.APPEND)
    returned += [table.write(rows()), table.delete([99]), table.delete([])]
    returned += [table.compact(), table.compact(), table.alter()]
    listed = [row["version"] for row in table.versions()]
    assert set(returned) < set(listed)
    for host in ("a", "b"):
        for version in range(1, site.state().position + 1):
            if version in listed:
                site.table({"lookup.version": str(version)}, host).scan()
            else:
                with pytest.raises(VersionGoneError, match=rf"there is no version {version}: .* before it is \d+"):
                    site.table({"lookup.version": str(version)}, host).scan()
        with pytest.raises(VersionGoneError, match=r"there is no version 0 \(the newest is \d+\)"):
            site.table({"lookup.version": "0"}, host).scan()
    site.writer().abort(job, ())
