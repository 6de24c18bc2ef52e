"""Random histories of Iceberg tables: every snapshot in every mode, on a host that follows along and on one that arrives late."""

from __future__ import annotations

import contextlib
import datetime
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from tests.support.fuzzing import seeds
from tests.support.iceberg_definition import in_catalog
from tests.support.iceberg_history import KEYS, History
from tests.support.iceberg_oracle import read
from tests.support.iceberg_tables import opened, sql_catalog
from tests.support.lake_tables import MODES, rows_of
from tests.support.rest_catalog import RestCatalog

CONDITIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("< 1", lambda value: value < 1),
    "long": (">= 1", lambda value: value >= 1),
    "string": ("= 'x'", lambda value: value == "x"),
    "date": ("> DATE '1970-01-01'", lambda value: value > datetime.date(1970, 1, 1)),
    "timestamp": ("< TIMESTAMP '1970-01-01 00:00:00'", lambda value: value < datetime.datetime(1970, 1, 1)),
    "boolean": ("= true", lambda value: value is True),
    "decimal(9, 2)": ("> 1.25", lambda value: value > 1),
    "decimal(18, 2)": ("< 1.25", lambda value: value < 1),
    "double": ("< 1.25", lambda value: value < 1.25),
}
"""A condition on a column of each type, and what it means for a value."""


class World:
    """A table with a history, as its users name it: by its directory, or in a catalog."""

    def __init__(self, home: Path, rng: random.Random, kind: str) -> None:
        self.home, self.rng = home, rng
        self._closing = contextlib.ExitStack()
        self._name: Path | str = home / "table"
        self._catalog: dict[str, str] | None = None
        publish = load = None
        if kind == "sql":
            catalog, self._catalog = sql_catalog(home)
            self._closing.callback(catalog.close)
            publish, load = in_catalog(catalog, "ns.table"), lambda: catalog.load_table("ns.table")
        elif kind == "rest":
            server = self._closing.enter_context(RestCatalog())
            self._catalog, publish = {"type": "rest", "uri": server.uri}, server.publisher("ns.table")
        if kind != "directory":
            self._name = "ns.table"
        self.history = History(home / "table", rng, publish, load)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def open(self, cache: str, mode: str, **options: Any) -> LookupTable:
        return opened(self._name, self.home / cache, mode, "id", self._catalog, **options)

    def asked(self) -> list[int]:
        return [key for key in range(KEYS + 1) if self.rng.random() < 0.7]

    def condition(self) -> tuple[str, Callable[[dict[str, Any]], bool]]:
        """A `lookup.where`, and what it means."""
        fields = self.history.table.fields
        field = self.rng.choice([one for one in fields if str(one["type"]) in CONDITIONS])
        text, means = CONDITIONS[field["type"]]
        name = field["name"]
        if self.rng.random() < 0.3:
            return f"`{name}` IS NULL", lambda row: row[name] is None
        return f"`{name}` {text}", lambda row: row[name] is not None and means(row[name])

    def travels(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """What `lookup.*` options name, and what the oracle calls it: branches, tags, times."""
        meta = self.history.table.meta
        for name, ref in meta["refs"].items():
            yield {ref["type"]: name}, {ref["type"]: name}
        for entry in self.rng.sample(meta["snapshot-log"], min(len(meta["snapshot-log"]), 2)):
            at_ms = entry["timestamp-ms"]
            at = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.timezone.utc)
            yield {"timestamp": at.isoformat(timespec="milliseconds")}, {"at_ms": at_ms}


def check(table: LookupTable, truth: pa.Table, asked: list[int], mode: str, of: Any) -> None:
    """The table has the oracle's rows, for some keys and, if the mode has all, in a scan; no load fails behind an answer from the store."""
    found = table.get_many(asked).drop_columns(["key_index"])
    wanted = [row for row in truth.to_pylist() if row["id"] in asked]
    assert rows_of(found) == rows_of(pa.Table.from_pylist(wanted, truth.schema)), of
    assert found.schema.remove_metadata().equals(truth.select(found.column_names).schema), of
    if mode != "partial":
        assert rows_of(table.scan()) == rows_of(truth), of
    assert table.metrics()["numLoadFailures"] == 0, of


@pytest.mark.parametrize("seed", seeds(2))
def test_every_snapshot(tmp_path: Path, seed: int) -> None:
    """Scans and lookups of the current version after operations, and of each version that is left at the end."""
    rng = random.Random(seed)
    with World(tmp_path, rng, ["directory", "sql", "rest"][seed % 3]) as world:
        history = world.history
        for number in range(9):
            truth = read(history.table.metadata)
            for mode in MODES:
                for cache in ("follows", f"late{number}"):
                    of = (seed, history.steps, mode, cache, str(history.table.metadata))
                    check(world.open(cache, mode), truth, world.asked(), mode, of)
            text, means = world.condition()
            wanted = pa.Table.from_pylist([row for row in truth.to_pylist() if means(row)], truth.schema)
            mode = rng.choice([*MODES])
            of = (seed, history.steps, mode, text, str(history.table.metadata))
            check(world.open("follows", mode, where=text), wanted, world.asked(), mode, of)
            for _ in range(rng.choice([1, 1, 2, 3])):
                history.step()
        travels = [({"version": one}, {"snapshot": one}) for one in map(_id, history.table.meta["snapshots"])]
        travels += world.travels()
        for options, named in rng.sample(travels, len(travels)):
            truth = read(history.table.metadata, **named)
            for mode in ("none", "full"):
                of = (seed, history.steps, mode, str(options), str(history.table.metadata))
                check(world.open("follows", mode, **options), truth, world.asked(), mode, of)


def _id(snapshot: dict[str, Any]) -> int:
    return int(snapshot["snapshot-id"])
