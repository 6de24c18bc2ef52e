"""NONE, PARTIAL and FULL answer alike whatever happens in between: generated histories against a plain model."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyspark_lookup.cache.partial import host_cache
from pyspark_lookup.engine import planner
from pyspark_lookup.engine.lookup import get_many, read_rows
from pyspark_lookup.engine.plan import ReadTask
from pyspark_lookup.options.lookup_options import LookupOptions
from tests.fakes import FakeClock, Host, Later, make_host
from tests.fuzzing import MORE

FILES = 4
IDS = st.integers(-2, 30)
KEY = st.tuples(IDS, st.sampled_from(["a", "b", ""]))
ROW = st.tuples(IDS | st.none(), st.sampled_from(["a", "b", "", None]), st.sampled_from(["x", "yy", None]))
MODES = {
    "NONE": {"lookup.cache": "NONE"},
    "FULL": {"lookup.cache": "FULL", "lookup.full-cache.build-wait": "0 s"},
    "small": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "12"},
    "bytes": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-bytes": "2000"},
    "access": {"lookup.cache": "PARTIAL", "lookup.partial-cache.expire-after-access": "10 s"},
    "write": {"lookup.cache": "PARTIAL", "lookup.partial-cache.expire-after-write": "10 s"},
    "no missing": {
        "lookup.cache": "PARTIAL",
        "lookup.partial-cache.max-rows": "40",
        "lookup.partial-cache.cache-missing-key": "false",
    },
}
SCHEMA = pa.schema([("id", pa.int64()), ("part", pa.string()), ("text", pa.string()), ("number", pa.int64())])


class Modes(RuleBasedStateMachine):
    """One table of files; every mode on two processes of one host; a model that is a list of rows per file."""

    names: tuple[str, ...] = ("id",)

    @initialize()
    def begin(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(host_cache, "_SEGMENTS_AT_MOST", 2)  # merged all the time
        self.root = Path(tempfile.mkdtemp(prefix="lookup-model-"))
        self.path = self.root / "dim"
        self.path.mkdir()
        self.files: dict[int, list[tuple[Any, ...]]] = {}
        self.serial = 0
        self.clock = FakeClock()
        self.hosts: dict[tuple[str, int], tuple[Host, LookupOptions, Later]] = {}
        for mode, options in MODES.items():
            for process in range(2):
                later = Later()
                # Of other bounds and expiries there is another cache directory: they share what lies in it.
                host = make_host(str(self.path), self.root / mode.replace(" ", "-"), self.clock, start=later)
                keys = {"lookup.keys": ",".join(self.names)}
                self.hosts[mode, process] = (
                    host,
                    LookupOptions.parse({"path": str(self.path), **keys, **options}),
                    later,
                )
        self.write(0, [(1, "a", "x"), (1, "b", None), (2, "a", "yy")])

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)
            self.patch.undo()

    # --- the table --------------------------------------------------------------------------------

    @rule(number=st.integers(0, FILES - 1), rows=st.lists(ROW, max_size=12))
    def write(self, number: int, rows: Sequence[tuple[Any, ...]]) -> None:
        """Put a file, in place of one of that name if there is one."""
        self.serial += 1
        self.files[number] = [(*row, self.serial * 100 + n) for n, row in enumerate(rows)]
        columns = list(zip(*self.files[number], strict=True)) or [(), (), (), ()]
        arrays = [pa.array(list(c), f.type) for c, f in zip(columns, SCHEMA, strict=True)]
        temporary = self.path / f".{number}"
        pq.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA), temporary, row_group_size=4)
        os.replace(temporary, self.path / f"{number}.parquet")

    @precondition(lambda self: len(getattr(self, "files", ())) > 1)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.files)))
        del self.files[number]
        os.unlink(self.path / f"{number}.parquet")

    # --- time and what runs beside ----------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 3.0, 9.5, 10.0, 11.0]))
    def tick(self, seconds: float) -> None:
        self.clock.tick(seconds)

    @rule(mode=st.sampled_from(sorted(MODES)), process=st.integers(0, 1))
    def work_beside(self, mode: str, process: int) -> None:
        """Loads of snapshots and merges of what is shared."""
        later = self.hosts[mode, process][2]
        for entry in [entry for entry in later.waiting if "-schedule-" not in entry[0]]:
            later.waiting.remove(entry)
            entry[1]()

    @rule(mode=st.sampled_from(sorted(MODES)), process=st.integers(0, 1))
    def worker_dies(self, mode: str, process: int) -> None:
        """Its memory is gone; what the host shares is not."""
        later = Later()
        host = make_host(str(self.path), self.root / mode.replace(" ", "-"), self.clock, start=later)
        self.hosts[mode, process] = host, self.hosts[mode, process][1], later

    # --- questions --------------------------------------------------------------------------------

    def rows_of(self, key: tuple[Any, ...]) -> list[dict[str, Any]]:
        """The rows of a key, in file order."""
        rows = [dict(zip(SCHEMA.names, row, strict=True)) for n in sorted(self.files) for row in self.files[n]]
        return [row for row in rows if tuple(row[name] for name in self.names) == key and None not in key]

    @rule(mode=st.sampled_from(sorted(MODES)), process=st.integers(0, 1), keys=st.lists(KEY, min_size=1, max_size=10))
    def get(self, mode: str, process: int, keys: Sequence[tuple[Any, ...]]) -> None:
        host, options, _ = self.hosts[mode, process]
        asked = [key[: len(self.names)] for key in keys]
        table = pa.Table.from_pylist([dict(zip(self.names, key, strict=True)) for key in asked])
        found = planner.find(host.reader, options)
        plan = planner.plan_read(found, options, planner.table_columns(found, options), self.clock.host())
        before = host.metrics.snapshot()
        rows = get_many(host.reader, plan, table, list(self.names), None, found.version).to_pylist()
        expected = [{**row, "key_index": n} for n, key in enumerate(asked) for row in self.rows_of(key)]
        assert rows == expected
        after = host.metrics.snapshot()
        grown = {name: after[name] - before[name] for name in after}
        if options.cache.value == "PARTIAL":
            assert grown["hitCount"] + grown["missCount"] == len(asked)
            assert grown["missCount"] == grown["loadCount"] + grown["numLoadFailures"] <= len(set(asked))

    @rule(mode=st.sampled_from(sorted(MODES)), process=st.integers(0, 1), ids=st.sets(IDS, min_size=1, max_size=4))
    def scan_by_key(self, mode: str, process: int, ids: set[int]) -> None:
        """A scan whose predicate says which keys it wants."""
        host, options, _ = self.hosts[mode, process]
        where = f"id IN ({', '.join(map(str, sorted(ids)))}) AND part = 'a' AND text IS NOT NULL"
        narrowed = options.override({"lookup.where": where})
        found = planner.find(host.reader, narrowed)
        plan = planner.plan_read(found, narrowed, planner.table_columns(found, narrowed), self.clock.host())
        rows = [row for b in read_rows(host.reader, plan, ReadTask(0, 1), None) for row in b.to_pylist()]
        everything = [dict(zip(SCHEMA.names, row, strict=True)) for n in self.files for row in self.files[n]]
        expected = [r for r in everything if r["id"] in ids and r["part"] == "a" and r["text"] is not None]
        assert sorted(rows, key=lambda r: r["number"]) == sorted(expected, key=lambda r: r["number"])

    @invariant()
    def within_bounds(self) -> None:
        """What a process says it holds is within its bounds once nothing waits to be merged."""
        for (mode, _), (host, options, later) in getattr(self, "hosts", {}).items():
            if mode == "small" and not later.waiting:
                held = host.metrics.snapshot()["numCachedRecords"]
                assert held <= (options.partial_max_rows or 0) * host_cache.REFUSE_ABOVE + 10


class CompositeModes(Modes):
    """The same with a key of two columns."""

    names = ("id", "part")


MANY = settings(max_examples=12 * MORE, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestModes = Modes.TestCase
TestModes.settings = MANY
TestCompositeModes = CompositeModes.TestCase
TestCompositeModes.settings = MANY

pytestmark = pytest.mark.slow
