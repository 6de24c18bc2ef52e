"""Rows that are deleted by a predicate: which these are, whoever else writes meanwhile."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup import errors
from pyspark_lookup.lookup.lookup_table import LookupTable
from tests.support.change_feed import format_changes, list_changes
from tests.support.managed_tables import MODES, OFF, SCHEMA, Site, beside, rows, wide


def list_rows(table: LookupTable) -> str:
    return " ".join(sorted(f"{row['id']}{row['name']}" for row in table.scan().to_pylist()))


@pytest.mark.parametrize("keys", ["name", None])
def test_rows_of_which_it_is_true(site: Site, keys: str | None) -> None:
    """A row is deleted if the predicate is true of it, not if it is null. Readers of each kind, changes, older versions and compactions agree."""
    site.resize(row_group_rows=(1, 1), row_group_bytes=1)
    table = site.table(OFF if keys is None else {**OFF, "lookup.keys": keys})
    table.write(pa.table({"id": [1, 1, 2, None, 3], "name": ["a", "b", "a", "b", None]}, SCHEMA))
    before = table.write(rows(4, name="b"))
    readers = [site.table({**mode, "lookup.keys": keys or "id"}, host=name) for name, mode in MODES.items()]
    assert {list_rows(reader) for reader in readers} == {"1a 1b 2a 3None 4b Noneb"}
    position = table.delete(where="name = 'b' AND (id <> 4 OR id IS NULL)")
    assert {list_rows(reader) for reader in readers} == {"1a 2a 3None 4b"}
    assert format_changes(list_changes(site, before)) == "1b- Noneb-"
    assert [row["operation"] for row in table.versions()][-2:] == ["append", "delete"]
    assert table.delete(where="id = 99") == position == table.describe()["position"]
    assert table.compact() > position
    assert {list_rows(reader) for reader in readers} == {"1a 2a 3None 4b"}
    assert list_rows(site.table({"lookup.version": str(before)})) == "1a 1b 2a 3None 4b Noneb"
    table.delete(where="id IS NOT NULL")
    assert {list_rows(reader) for reader in readers} == {""}


WRITES: dict[str, tuple[Callable[[Site, LookupTable], Any], str]] = {
    "an append": (lambda _, table: table.write(rows(7, 8, name="b")), "1a 2a"),
    "an upsert into it": (lambda _, table: table.upsert(rows(1, name="b")), "2a"),
    "an upsert out of it": (lambda _, table: table.upsert(rows(3, name="a")), "1a 2a 3a"),
    "a delete of the same": (lambda _, table: table.delete(where="id = 3"), "1a 2a"),
    "a delete by key": (lambda _, table: table.delete([2, 3]), "1a"),
    "a compaction": (lambda _, table: table.compact(), "1a 2a"),
    "a column": (lambda _, table: table.alter("more INT"), "1a 2a"),
    "an overwrite": (lambda _, table: table.write(rows(5, name="b"), "overwrite"), ""),
}


@pytest.mark.parametrize("operation", WRITES)
def test_earlier_commits_of_others(site: Site, operation: str) -> None:
    """Matching rows of earlier commits are deleted as well; after an overwrite the delete is refused, and nothing of it is seen."""
    table = site.created(OFF)
    table.write(rows(1, 2))
    table.write(rows(3, 4, name="b"))
    write, expected = WRITES[operation]
    pending = [lambda: write(site, site.table(OFF, host="b"))]

    def meanwhile(kind: str, subject: Any) -> None:
        if kind == "put" and "/log/" in subject and list(site.path.rglob("deletes-*")) and pending:
            pending.pop()()

    site.interrupt(meanwhile)
    if expected:
        table.delete(where="name = 'b'")
        assert not pending
        assert list_rows(table) == list_rows(site.table(host="c")) == expected
    else:
        with pytest.raises(errors.WriteConflictError, match="write again"):
            table.delete(where="name = 'b'")
        assert list_rows(table) == "5b"


@pytest.mark.parametrize("keys", ["id", None])
def test_a_compaction_that_is_under_way(site: Site, keys: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compaction begins again: of two rows with one key it cannot tell which was deleted."""
    table = site.table(OFF if keys is None else {**OFF, "lookup.keys": keys})
    for name in ("a", "b"):
        table.write(rows(1, 2, name=name))
    beside(site, monkeypatch, lambda: site.table(OFF, host="b").delete(where="name = 'b' AND id = 1"))
    table.compact()
    assert list_rows(table) == "1a 2a 2b"
    assert [row["operation"] for row in table.versions()][-2:] == ["delete", "compact"]


def test_a_compaction_that_is_under_way_for_pages_of_the_log(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compaction begins again, too, if the delete is no longer in the log's state: another compaction has folded it since."""
    site.resize(log_page=7, compact_bytes=2000)
    table, second = site.created(OFF), site.table(OFF, host="b")
    for low in (10, 110):
        table.write(pa.concat_tables([wide(low, low + 100), rows(1), rows(1, name="b")]))

    def delete_and_compact() -> None:
        deleted = second.delete(where="name = 'b'")
        second.write(rows(2))
        second.write(rows(3))
        assert second.compact() > deleted
        for number in range(12):
            second.alter(properties={"page": str(number)})
        assert site.state().since > deleted + 12
        assert site.state().deleted_where_at == deleted

    beside(site, monkeypatch, delete_and_compact)
    table.compact()
    assert [row["name"] for row in table.scan().to_pylist() if row["id"] < 10] == ["a"] * 4


NO_PREDICATES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, errors.OptionError, "arguments keys and where: give either"),
    ({"where": " "}, errors.PredicateError, "argument where = ' '"),
    ({"where": "nope = 1"}, errors.PysparkLookupError, "nope"),
    ({"where": "id = 1) OR (id = 2"}, errors.PredicateError, "argument where = "),
]


def test_what_is_none(site: Site) -> None:
    """What is not a predicate is refused by name, and nothing comes into the log."""
    table = site.created(OFF)
    table.write(rows(1))
    position = site.state().position
    for arguments, kind, message in NO_PREDICATES:
        with pytest.raises(kind, match=message):
            table.delete(**arguments)
    with pytest.raises((errors.UfsNotFoundError, errors.NotATableError)):
        site.table({"path": f"{site.path}-other"}).delete(where="id = 1")
    assert (site.state().position, list_rows(table)) == (position, "1a")
