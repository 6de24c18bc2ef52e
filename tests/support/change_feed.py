"""The changes of a managed table, as a reader reads them and as tests write them down."""

from collections.abc import Iterable
from typing import Any

from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.lookup.runtime import Engine
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.managed.change_feed import (
    CHANGE_TYPE,
    change_columns,
    changes_between,
    plan_snapshot,
    read_changes,
)
from pyspark_lookup.sources.managed.log import Change, TableState
from pyspark_lookup.sources.managed.source import MANAGED
from pyspark_lookup.sources.registry import parse_options


class Feed:
    """The changes of a table, as a reader with its options reads them."""

    def __init__(self, engine: Engine, options: LookupOptions) -> None:
        self._files = engine.reader.versions.files
        self._table = engine.reader.kinds.to_table(options, MANAGED)
        self.state, self._log = engine.managed.read_log(options), engine.managed.log(self._table.url)
        self.last = self.state.changes[-1].position

    def changes(self) -> Iterable[tuple[TableState, Change]]:
        """All that the log tells of, each with a state that holds its write."""
        return self._log.pages.changes(self.state, self._log.pages.begin(self.state), self.state.position)

    def _rows(self, tasks: Iterable[Any], where: str | None = None) -> list[dict[str, Any]]:
        columns = change_columns(self.state.definition.schema)
        predicate = None if where is None else parse_where(where, columns)
        batches = read_changes(self._files, list(tasks), columns, predicate)
        return [row for batch in batches for row in batch.to_pylist()]

    def between(self, after: int, until: int, only: bool = False, where: str | None = None) -> list[dict[str, Any]]:
        """The changes after a position, up to another. `only`: they are to be rows that are added."""
        return self._rows(changes_between(self._table, self._log, self.state, after, until, only), where)

    def snapshot(self, position: int) -> list[dict[str, Any]]:
        return self._rows(plan_snapshot(self._table, self._log, self.state, position))


def open_feed(site: Any) -> Feed:
    options = parse_options(site.options("stream", {}))
    return Feed(site.runtime.engine(options), options)


def list_changes(site: Any, after: int = 1, only: bool = False, where: str | None = None) -> list[dict[str, Any]]:
    feed = open_feed(site)
    return feed.between(after, feed.state.position, only, where)


def format_changes(changes: list[dict[str, Any]]) -> str:
    """What became of each row: inserted (+), deleted (-), updated from (<) or to (>)."""
    marks = {"insert": "+", "delete": "-", "update_preimage": "<", "update_postimage": ">"}
    return " ".join(sorted(f"{row['id']}{row['name']}{marks[row[CHANGE_TYPE]]}" for row in changes))
