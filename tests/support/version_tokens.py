"""Processes that announce versions to one another, and the options and executions they do so with."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa

from pyspark_lookup.lookup import planner
from pyspark_lookup.lookup.read import ResolvedTable
from pyspark_lookup.lookup.version_token import VersionToken, resolve_and_secure, version_of_token
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.versions.executions import Execution
from pyspark_lookup.versions.model import Table, TableVersion
from tests.support.fakes import FakeClock, make_host

NOTHING: Mapping[str, str] = MappingProxyType({})
ONE, TWO = Execution("app", "1"), Execution("app", "2")
PARTIAL = {"lookup.keys": "id", "lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000"}
FULL = {"lookup.keys": "id", "lookup.cache": "FULL"}
FAIL = {"lookup.on-version-gone": "FAIL"}


class Process:
    """A process over one table and one cache directory. Processes that share a directory are of one host."""

    def __init__(
        self,
        path: Path,
        cache_dir: Path | None,
        options: Mapping[str, str] = NOTHING,
        clock: FakeClock | None = None,
        **more: object,
    ) -> None:
        self.host = make_host(str(path), cache_dir, clock, **more)  # type: ignore[arg-type]
        self.options = parse_options({"path": str(path), **options})
        self.known: Table | None = None

    def announce(self, execution: Execution | None = ONE) -> VersionToken:
        """Announce, knowing what the path was the last time, as an engine does."""
        self.known, version = resolve_and_secure(self.host.reader, self.options, execution, self.known)
        return VersionToken.from_version(self.host.reader.kinds, self.known, version)

    def receive(self, announcement: VersionToken, execution: Execution | None = ONE) -> tuple[Table, TableVersion]:
        """The announced version as a task of this process takes it, from the bytes it was told."""
        token = VersionToken.from_bytes(announcement.to_bytes())
        return version_of_token(self.host.reader, self.options, token, execution)

    def states(self, announcement: VersionToken) -> set[int]:
        """The versions that the rows of an announced version say they are of."""
        reader = self.host.reader
        table, version = self.receive(announcement)
        resolved = ResolvedTable(table, version, *reader.versions.schema(table, version))
        columns = planner.table_columns(resolved, self.options)
        plan = planner.plan_read(resolved, self.options, columns, self.host.clock.host())
        rows = pa.Table.from_batches(reader.versions.read_files(plan, version), columns)
        return set(rows.column("version").to_pylist())

    def has_snapshot(self, announcement: VersionToken) -> bool:
        """Whether the version is in this host's full cache, by what lies there."""
        table, version = self.receive(announcement)
        full = self.host.reader.fulls.get_cache(table, self.options)
        return full is not None and full.find(version) is not None

    def replace_during_read(self, replace: Callable[[], None]) -> None:
        """Have something happen ahead of the first read of a file."""

        def replace_before_get(kind: str, subject: object) -> None:
            if kind == "get":
                self.host.store.before = lambda kind, subject: None
                replace()

        self.host.store.before = replace_before_get

    def calls(self) -> list[str]:
        """The kinds of the store calls since the last time."""
        kinds = self.host.store.kinds()
        self.host.store.calls.clear()
        return kinds

    def count_gone(self) -> int:
        return self.host.metrics.snapshot()["versionGoneCount"]
