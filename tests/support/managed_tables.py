"""A managed table and the hosts that use it, in one process whose clock a test moves; rows for it."""

import dataclasses
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.lookup import lookup_table as api
from pyspark_lookup.lookup import runtime as runtime_module
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.sources.managed import Job, TableWriter
from pyspark_lookup.sources.managed.conflicts import KeyedRows
from pyspark_lookup.sources.managed.log import DataFile, TableState
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.storage.stores import open_store
from tests.support.fakes import CACHES, FakeClock, FaultyStore

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
MODES = {name.lower(): options for name, options in CACHES.items()}
OFF = {"lookup.write.compact-after": "0"}
DAY_S = 86400.0


def rows(*ids: int | None, name: str = "a") -> pa.Table:
    return pa.table({"id": ids, "name": [name] * len(ids)}, SCHEMA)


def of_ids(low: int, high: int, name: str = "a") -> pa.Table:
    return pa.table({"id": range(low, high), "name": [name] * (high - low)}, SCHEMA)


def wide(low: int, high: int) -> pa.Table:
    """Rows that take many bytes in a file."""
    draw = random.Random(low)
    return pa.table({"id": range(low, high), "name": [f"{draw.getrandbits(1024):x}" for _ in range(low, high)]}, SCHEMA)


def list_ids(table: pa.Table) -> list[int | None]:
    return sorted(table.column("id").to_pylist(), key=lambda id_: (id_ is not None, id_))


class Site:
    """A table's place and the hosts that use it, which differ in their cache directories."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = tmp_path / "table"
        self.clock = FakeClock(time.time() + 60)
        self.stores: list[FaultyStore] = []
        self._cache = tmp_path / "cache"

        def opened(*args: Any) -> FaultyStore:
            self.stores.append(FaultyStore(open_store(*args)))
            return self.stores[-1]

        monkeypatch.setattr(runtime_module, "open_store", opened)
        self.runtime = Runtime(self.clock.host(), random.Random())
        monkeypatch.setattr(api, "runtime", lambda: self.runtime)

    def resize(self, **sizes: Any) -> None:
        """Have all that is opened here, now and later, write and compact by these `WriteSizes`."""
        self.runtime._sizes = dataclasses.replace(self.runtime._sizes, **sizes)
        for engine in self.runtime._engines.values():
            engine.managed.sizes = self.runtime._sizes

    def options(self, host: str, more: dict[str, str]) -> dict[str, str]:
        base = {"path": str(self.path), "lookup.cache.dir": str(self._cache / host), "lookup.max-retries": "0"}
        return {**base, **more}

    def table(self, more: dict[str, str] | None = None, host: str = "a") -> LookupTable:
        return LookupTable(None, self.options(host, more or {}))

    def created(self, more: dict[str, str] | None = None) -> LookupTable:
        """The table, just created without rows, with the key `id`."""
        self.table({"lookup.keys": "id"}).write(rows())
        return self.table(more)

    def restart(self) -> None:
        """Have what is opened from now on be of another process."""
        self.runtime = Runtime(self.clock.host(), random.Random())

    def writer(self, more: dict[str, str] | None = None, host: str = "a", boot: str = "boot-1") -> TableWriter:
        options = parse_options(self.options(host, more or {}))
        runtime = self.runtime if boot == "boot-1" else Runtime(self.clock.host(boot), random.Random())
        return runtime.engine(options).managed.writer(options)

    def interrupt(
        self, before: Callable[[str, object], None] = lambda *_: None, after: Callable[[], None] = lambda: None
    ) -> None:
        """Run something before each call to a store that was opened here, and after each put; by default nothing."""
        for store in self.stores:
            store.before, store.after = before, after

    def calls(self) -> list[tuple[str, object]]:
        """The calls to stores since this was asked last."""
        calls = [call for store in self.stores for call in store.calls]
        for store in self.stores:
            store.calls.clear()
        return calls

    def state(self) -> TableState:
        engine = self.runtime.engine(parse_options(self.options("look", {})))
        return engine.managed.log(str(self.path)).latest()

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.path)) for path in self.path.rglob("*.parquet"))

    def committed(self) -> list[str]:
        state = self.state()
        return sorted(file[0].path for file in state.files(state.valid_write_ids()))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def write_ids(writer: TableWriter, job: Job, *ids: int | None) -> list[DataFile]:
    return writer.write(job, rows(*ids).to_batches(), "part")


def aged(site: Site, days: float, but: int = 0) -> None:
    """Let all that lies in the table have been put so long ago, but for the events of the log after position `but` (0: none)."""
    for path in site.path.rglob("*"):
        if path.is_file() and not (but and path.parent.name == "log" and int(path.stem) > but):
            at = path.stat().st_mtime - days * DAY_S
            os.utime(path, (at, at))


def beside(site: Site, monkeypatch: pytest.MonkeyPatch, action: Callable[[], Any]) -> None:
    """Let `action` run while a compaction is under way: it has read and written, and not committed."""
    count, pending = KeyedRows.count, [action]

    def counted(self: KeyedRows, files: Any) -> int:
        row_count = count(self, files)
        if pending:
            pending.pop()()
        return row_count

    monkeypatch.setattr(KeyedRows, "count", counted)
