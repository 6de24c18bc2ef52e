"""A table with a full cache on a host of its own, whose loads run when the test says."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_lookup.cache.full.full_cache import FullCache
from pyspark_lookup.errors import UfsUnavailableError
from pyspark_lookup.lookup.lookup import get_many
from pyspark_lookup.lookup.read import ReadTask
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.versions.executions import Execution
from tests.support.fakes import FakeClock, Host, Later, make_host

EACH = 500
FULL = {"lookup.keys": "id", "lookup.cache": "FULL"}
# What runs beside a query runs when the test says: no use to wait for it.
WAIT = "lookup.full-cache.build-wait"
HOST = {**FULL, "lookup.metadata.source": "CACHE", WAIT: "0 s"}
CACHE = {**HOST, "lookup.full-cache.periodic-reload.interval": "1 min"}
TIMED = {**HOST, "lookup.full-cache.reload-strategy": "TIMED", "lookup.full-cache.timed-reload.iso-time": "10:15Z"}


def publish(
    path: Path, number: int, version: int, rows: int = EACH, columns: Mapping[str, object] | None = None
) -> Path:
    """File `number` of a table in place by rename: ids from number * EACH, every row says its version."""
    path.mkdir(parents=True, exist_ok=True)
    first = number * EACH
    data = {
        "id": range(first, first + rows),
        "version": pa.array([version] * rows, pa.int32()),
        "text": [f"{version}-{'x' * (i % 7)}" for i in range(rows)],
    }
    table = pa.table({**data, **(columns or {})})
    temporary = path / f".{number}.new"
    pq.write_table(table, temporary, row_group_size=100)
    os.replace(temporary, path / f"{number}.parquet")
    return path


class Table:
    """One reference to a table on a host of its own, whose loads run when the test says."""

    def __init__(
        self,
        path: Path,
        cache_dir: Path | None,
        options: Mapping[str, str],
        clock: FakeClock | None = None,
        **more: object,
    ) -> None:
        self.later = Later()
        self.host: Host = make_host(str(path), cache_dir, clock, start=self.later, **more)  # type: ignore[arg-type]
        self.options = parse_options({"path": str(path), **options})
        self.table, _ = self.host.resolver.discover(self.options)

    @property
    def full(self) -> FullCache:
        return self.host.reader.fulls.get_cache(self.table, self.options)

    def get(self, *ids: int | None, execution: Execution | None = None) -> list[dict[str, object]]:
        """The rows of these keys, through the reader as a worker does it."""
        _, plan = self.host.plan(self.options, self.table)
        keys = pa.table({"id": pa.array(ids, pa.int64())})
        return get_many(self.host.reader, plan, keys, ["id"], execution).to_pylist()

    def versions(self, *ids: int) -> list[object]:
        return [row["version"] for row in self.get(*ids)]

    def scan(self, execution: Execution | None = None) -> pa.Table:
        _, plan = self.host.plan(self.options, self.table)
        batches = list(self.host.reader.read(plan, ReadTask(0, 1), execution))
        return pa.Table.from_batches(batches, plan.projection.columns).sort_by("id").combine_chunks()

    def warm(self) -> None:
        self.full.reload()
        self.later.loads()

    def calls(self, run: Callable[[], object]) -> list[str]:
        """The store calls that `run` makes."""
        before = len(self.host.store.calls)
        run()
        return self.host.store.kinds()[before:]

    def end(self) -> None:
        """End a worker, as the others see it: its schedule is free."""
        self.full.close()
        for name, run in self.later.waiting:
            if "-schedule-" in name:
                run()
        self.later.waiting.clear()

    def fetched(self) -> set[str]:
        """Names of the files of which data was read so far; forgotten by asking."""
        names = {str(s[0]).rsplit("/", 1)[-1] for kind, s in self.host.store.calls if kind == "get"}  # type: ignore[index]
        self.host.store.calls.clear()
        return names

    def segments(self) -> list[str]:
        return self.host.disk.segments(self.full.key)

    def metric(self, name: str) -> int:
        return self.host.metrics.snapshot()[name]

    def metrics(self, *names: str) -> list[int]:
        return [self.metric(name) for name in names]

    def down(self, what: str = "") -> None:
        """From now on the store does not answer, or not for files of this name."""

        def fail(kind: str, subject: object) -> None:
            if what in str(subject):
                raise UfsUnavailableError("no answer")

        self.host.store.before = fail

    def up(self) -> None:
        self.host.store.before = lambda kind, subject: None

    def run_due_loads(self, seconds: float = 61) -> int:
        """Let time pass and what is due then happen; how many loads that were."""
        self.host.clock.tick(seconds)
        self.full.schedule.run_due()
        return self.later.loads()
