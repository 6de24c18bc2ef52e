"""Upserts and deletes: what a table holds is what a model holds, in every cache mode, and the last commit of a key counts."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import strategies as st

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import WriteConflictError
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.managed import WriteSizes
from pyspark_lookup.sources.managed.log import WriteMode
from tests.models.histories import Step
from tests.models.managed import Managed
from tests.sources.managed.test_writer import Site, ids_of, put, rows, site

__all__ = ["site"]

SCHEMA = pa.schema([("id", pa.int64()), ("part", pa.string()), ("v", pa.int64())])
MODES: dict[str, dict[str, str]] = {
    "none": {},
    "partial": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000"},
    "full": {"lookup.cache": "FULL"},
}
Key = tuple[int | None, str | None]
Row = tuple[int | None, str | None, int]
_RNG = random.Random(0)
ALL_KEYS = [(id_, part) for id_ in range(7) for part in ("a", "b")]

keys = st.tuples(st.none() | st.integers(0, 6), st.sampled_from(["a", "b"]))
MODES_OF_WRITES = ["append", "append", "upsert", "upsert", "delete", "overwrite"]
writes = st.sampled_from(MODES_OF_WRITES).flatmap(
    lambda mode: st.tuples(st.just(mode), st.lists(keys, min_size=1, max_size=8, unique=mode == "upsert"))
)
_where = st.tuples(st.just("delete_where"), st.lists(keys, min_size=1, max_size=1))
_steps = st.sampled_from(["write", "write", "begin", "commit", "compact", "compact"])
steps = st.lists(
    st.tuples(_steps, st.one_of(writes, writes, writes, _where), st.booleans()),
    min_size=4,
    max_size=14,
)


def table_of(found: list[Row]) -> pa.Table:
    columns = list(zip(*found, strict=True)) if found else [(), (), ()]
    return pa.table(dict(zip(SCHEMA.names, columns, strict=True)), SCHEMA)


def rows_of(table: pa.Table) -> list[Row]:
    return sorted(zip(*(table.column(name).to_pylist() for name in SCHEMA.names), strict=True), key=repr)


class Model(Managed):
    """A table and the rows that it should hold, whose keys are said by a test.

    Its sizes are such that a write may have several files, a file several row groups, and that a fold of writes of less than
    `small` bytes leaves the first one outside.
    """

    def __init__(self, home: Path, mode: dict[str, str], small: int) -> None:
        super().__init__(home / "t", home, ("id", "part"), ["part"], itertools.count().__next__)
        self.path, self.own = str(home / "t"), {"lookup.cache.dir": str(home / "cache")}
        self.reader = LookupTable(self.path, {**self.own, **mode})
        self.engine = runtime().engine(LookupOptions.parse({**self.own, "path": self.path}))
        self.engine.managed.sizes = WriteSizes(
            file_bytes=4000,
            row_group_rows=(2, 4),
            row_group_bytes=1,
            small_file_bytes=2000,
            merge_bytes=3000,
            compact_bytes=small,
            unasked_compact_bytes=0,
            log_page=7,
        )
        self._asked: list[Key] = []
        self._number = 0
        # Some rows that nobody touches, so that the first write is much larger than the others.
        filler = random.Random(0)
        self.take("write", ("append", [*ALL_KEYS, *((100 + n, f"{filler.getrandbits(2048):x}") for n in range(40))]))

    def drawn_rows(self, op: str, count: int, rng: random.Random) -> list[dict[str, Any]]:
        self._number += 1
        asked = dict.fromkeys(self._asked) if op in ("upsert", "delete") else self._asked
        empty = dict.fromkeys(self.schema.names)
        return [{**empty, "id": id_, "part": part, "v": self._number} for id_, part in asked]

    def take(  # type: ignore[override]
        self, what: str, write: tuple[str, list[Key]], beside: bool = False
    ) -> None:
        """One step; `beside`: of a compaction, the write is committed while it is under way."""
        op, self._asked = write
        begun = Step("begin", ("cache", 1, op))
        if what == "compact" and beside:
            super().take(begun, _RNG)
            self._opened.insert(0, self._opened.pop())
        steps = {"write": Step(op, ("cache", 1)), "begin": begun, "commit": Step("commit", ("cache", -int(beside)))}
        super().take(steps.get(what, Step(what, ("cache", 1))), _RNG)

    @property
    def expected(self) -> list[Row]:
        return sorted(((row["id"], row["part"], row["v"]) for row in self.rows), key=repr)

    def check(self) -> None:
        """What is read now is what should be there."""
        assert rows_of(self.reader.scan()) == self.expected
        for key in ALL_KEYS:
            found = sorted((tuple(row[name] for name in SCHEMA.names) for row in self.reader.get(key)), key=repr)
            assert found == [row for row in self.expected if row[:2] == key]

    def close(self) -> None:
        self.reader.close()


def test_a_delete_of_nothing_is_no_commit(site: Site) -> None:
    """Keys that no row has, and no keys, change nothing."""
    table = site.created()
    position = table.write(rows(1, 2))
    version = table.version
    for asked in ([9], []):
        table.delete(pa.table({"id": pa.array(asked, pa.int64())}))
    assert (table.version, ids_of(table.scan())) == (version, [1, 2])
    assert table.describe()["position"] == position


def test_an_append_beside_an_upsert_stays(site: Site) -> None:
    """An append that an upsert overtakes adds its rows, an overwrite is refused; what a delete has hidden stays so beside an overwrite."""
    table, writer, keys = site.created(), site.writer(host="b"), pa.table({"id": [1]})
    table.write(rows(1))
    append, overwrite = (writer.begin(rows().schema, mode) for mode in (WriteMode.APPEND, WriteMode.OVERWRITE))
    table.upsert(rows(1, name="new"))
    writer.commit(append, put(writer, append, 5))
    assert {(row["id"], row["name"]) for row in table.scan().to_pylist()} == {(1, "new"), (5, "a")}
    with pytest.raises(WriteConflictError, match="by key"):
        writer.commit(overwrite, put(writer, overwrite, 6))
    delete = writer.begin(keys.schema, WriteMode.DELETE)
    overwrite = writer.begin(rows().schema, WriteMode.OVERWRITE)
    table.write(rows(1, 2))
    assert writer.commit(delete, (), effect=writer.deletion(keys)) is not None
    assert ids_of(table.scan()) == [2, 5]
    writer.commit(overwrite, put(writer, overwrite, 7))
    for mode in MODES.values():
        assert ids_of(site.table(mode, host="c").scan()) == [2, 7]
