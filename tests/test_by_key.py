"""Upserts and deletes: what a table holds is what a model holds, in every cache mode, and the last commit of a key counts."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import strategies as st

from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import NonUniqueKeyError, OptionError, SchemaError, WriteConflictError
from pyspark_lookup.engine.runtime import runtime
from pyspark_lookup.managed import Job, WriteSizes
from pyspark_lookup.managed.rows_by_key import KeyedRows
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.table.log import DataFile, WriteMode
from tests.test_writing import Site, ids_of, put, rows, site

__all__ = ["site"]

SCHEMA = pa.schema([("id", pa.int64()), ("part", pa.string()), ("v", pa.int64())])
MODES: dict[str, dict[str, str]] = {
    "none": {},
    "partial": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000"},
    "full": {"lookup.cache": "FULL"},
}
Row = tuple[int | None, str | None, int]
ALL_KEYS = [(id_, part) for id_ in range(7) for part in ("a", "b")]

keys = st.tuples(st.none() | st.integers(0, 6), st.sampled_from(["a", "b"]))
MODES_OF_WRITES = ["append", "append", "upsert", "upsert", "delete", "overwrite"]
writes = st.sampled_from(MODES_OF_WRITES).flatmap(
    lambda mode: st.tuples(st.just(mode), st.lists(keys, min_size=1, max_size=8, unique=mode == "upsert"))
)
steps = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "begin", "commit", "compact", "compact", "vacuum"]),
        writes,
        st.booleans(),
        st.booleans(),
    ),
    min_size=4,
    max_size=14,
)


def table_of(found: list[Row]) -> pa.Table:
    columns = list(zip(*found, strict=True)) if found else [(), (), ()]
    return pa.table(dict(zip(SCHEMA.names, columns, strict=True)), SCHEMA)


def rows_of(table: pa.Table) -> list[Row]:
    return sorted(zip(*(table.column(name).to_pylist() for name in SCHEMA.names), strict=True), key=repr)


@dataclasses.dataclass
class Open:
    """A write that was begun: its files, and what it will do."""

    job: Job
    files: list[DataFile]
    step: str
    asked: list[tuple[int | None, str]]
    rows: list[Row]


def shrunk(compact_bytes: int) -> WriteSizes:
    """Sizes that a test's tables cross."""
    merged = {"merge_bytes": 3000, "compact_bytes": compact_bytes, "unasked_compact_bytes": compact_bytes}
    return WriteSizes(file_bytes=4000, row_group_rows=(2, 4), row_group_bytes=1, small_file_bytes=2000, **merged)


class Model:
    """A table beside a list of rows with their write ids, which is what it should hold.

    Its sizes are such that a write may have several files, a file several row groups, and that a fold of writes of less than
    `small` bytes leaves the first one outside.
    """

    def __init__(self, home: Path, mode: dict[str, str], small: int) -> None:
        self.path, self.mode = str(home / "t"), mode
        self.own = {"lookup.cache.dir": str(home / "cache"), "lookup.write.compact-after": "0"}
        self.table = LookupTable(self.path, {**self.own, "lookup.keys": "id,part"})
        options = LookupOptions.parse({**self.own, "path": self.path})
        self.engine = runtime().engine(options)
        self.engine.sizes = shrunk(small)
        # Some rows that nobody touches, so that the first write is much larger than the others.
        filler = random.Random(0)
        large = [(100 + n, f"{filler.getrandbits(2048):x}", 0) for n in range(40)]
        first: list[Row] = [*((id_, part, 0) for id_, part in ALL_KEYS), *large]
        self.table.write(table_of(first))
        self.reader = LookupTable(self.path, {**self.own, **mode})
        self.writer = self.engine.writer(options)
        self.compactor = self.engine.compactor(options)
        self.state: list[tuple[Row, int]] = [(row, 1) for row in first]
        self.opened: list[Open] = []
        self.versions: dict[int, list[Row]] = {}
        self.oldest = 0
        self.count = 0
        self.done = set[str]()

    def begin(self, step: str, asked: list[tuple[int | None, str]]) -> Open:
        self.count += 1
        new = [(*key, self.count) for key in asked]
        mode = WriteMode(step)
        names = SCHEMA if mode is not WriteMode.DELETE else pa.schema([SCHEMA.field(0), SCHEMA.field(1)])
        job = self.writer.begin(names, mode)
        files = [] if mode is WriteMode.DELETE else self.writer.write(job, table_of(new).to_batches(), "part")
        return Open(job, files, step, asked, new)

    def commit(self, write: Open) -> None:
        """Commit it; or it is refused, for an overwrite that came too late."""
        asked = table_of([(*key, 0) for key in write.asked]).select(["id", "part"])
        effect = self.writer.deletion(asked) if write.step == "delete" else None
        try:
            self.writer.commit(write.job, write.files, effect=effect)
        except WriteConflictError:
            assert write.step == "overwrite" or "overwrite" in self.done
            return
        id_ = write.job.write_id
        assert id_ is not None
        # A row with a null in its key has none: nothing replaces or removes it.
        named = {key for key in write.asked if None not in key} if write.step in ("upsert", "delete") else set()
        base = id_ if write.step == "overwrite" else 0
        kept = [(row, of) for row, of in self.state if row[:2] not in named and of >= base]
        self.state = kept + ([] if write.step == "delete" else [(row, id_) for row in write.rows])
        self.done.add(write.step)
        self.note()

    def note(self) -> None:
        self.versions[self.table.describe()["position"]] = self.expected

    @property
    def expected(self) -> list[Row]:
        return sorted((row for row, _ in self.state), key=repr)

    def compact(self, meanwhile: Any) -> None:
        """Compact, while somebody else writes: once it has read what it folds."""
        count = KeyedRows.count
        pending = [] if meanwhile is None else [meanwhile]

        def counted(rows: KeyedRows, files: Any) -> int:
            found = count(rows, files)
            if pending:
                self.commit(self.begin(*pending.pop()))
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KeyedRows, "count", counted)
            self.compactor.compact()
        if pending:
            self.commit(self.begin(*pending.pop()))
        self.note()

    def vacuum(self) -> None:
        """Remove at once what the current version does not need."""
        oldest = self.table.vacuum("0 s", force=True)["oldest"]
        self.oldest = oldest or self.oldest

    def take(self, step: str, write: Any, beside: bool) -> None:
        """One step; `beside`: of a compaction, the write is committed while it is under way."""
        match step:
            case "write":
                self.commit(self.begin(*write))
            case "begin":
                self.opened.append(self.begin(*write))
            case "commit" if self.opened:
                self.commit(self.opened.pop(-1 if beside else 0))
            case "compact":
                self.compact(write if beside else None)
            case "vacuum":
                self.vacuum()

    def check(self) -> None:
        """What is read now is what should be there."""
        assert rows_of(self.reader.scan()) == self.expected
        for key in ALL_KEYS:
            rows = (tuple(row[name] for name in SCHEMA.names) for row in self.reader.get(key))
            found = sorted(rows, key=repr)
            assert found == [row for row in self.expected if row[:2] == key]

    def close(self) -> None:
        self.table.close()
        self.reader.close()


def last_event(site: Site) -> str:
    log = site.path / "_lookup" / "log"
    return str(json.loads(max(log.iterdir()).read_text())["kind"])


def test_what_an_upsert_may_not_be(site: Site, tmp_path: Path) -> None:
    """Two rows of one key, rows without the key columns' types, tables without keys: refused, and nothing is left of it."""
    table = site.created()
    table.write(rows(1, 2))
    with pytest.raises(NonUniqueKeyError, match="id = 3"):
        table.upsert(rows(3, 4, 3))
    assert (ids_of(table.scan()), last_event(site)) == ([1, 2], "abort")
    assert site.files() == site.committed()
    with pytest.raises(SchemaError):
        table.delete(pa.table({"id": ["one"]}))
    keyless = LookupTable(str(tmp_path / "keyless"), {"lookup.cache.dir": str(tmp_path / "c")})
    keyless.write(rows(1))
    for refused in (lambda: keyless.upsert(rows(1)), lambda: keyless.delete(pa.table({"id": [1]}))):
        with pytest.raises(OptionError, match="no key columns"):
            refused()


def test_a_delete_of_nothing_is_no_commit(site: Site) -> None:
    """Keys that no row has, and no keys, change nothing."""
    table = site.created()
    position = table.write(rows(1, 2))
    version = table.version
    for asked in ([9], []):
        table.delete(pa.table({"id": pa.array(asked, pa.int64())}))
    assert (table.version, ids_of(table.scan())) == (version, [1, 2])
    assert table.describe()["position"] == position


def test_the_commit_that_is_last_counts(site: Site) -> None:
    """Of two upserts of a key that began one way and end the other, the one that commits last counts; both are committed."""
    table = site.created()
    table.write(rows(1, 2))
    first, second = site.writer(host="b"), site.writer(host="c")
    one, two = first.begin(rows().schema, WriteMode.UPSERT), second.begin(rows().schema, WriteMode.UPSERT)
    ones = first.write(one, rows(1, name="one").to_batches(), "part")
    twos = second.write(two, rows(1, 3, name="two").to_batches(), "part")
    second.commit(two, twos)
    first.commit(one, ones)
    assert {(row["id"], row["name"]) for row in table.scan().to_pylist()} == {(1, "one"), (2, "a"), (3, "two")}


def test_an_append_beside_an_upsert_stays(site: Site) -> None:
    """An append that began before an upsert and is committed after it adds its rows; an overwrite that did is refused."""
    table = site.created()
    table.write(rows(1))
    writer = site.writer(host="b")
    append = writer.begin(rows().schema, WriteMode.APPEND)
    overwrite = writer.begin(rows().schema, WriteMode.OVERWRITE)
    table.upsert(rows(1, name="new"))
    writer.commit(append, put(writer, append, 5))
    assert {(row["id"], row["name"]) for row in table.scan().to_pylist()} == {(1, "new"), (5, "a")}
    with pytest.raises(WriteConflictError, match="by key"):
        writer.commit(overwrite, put(writer, overwrite, 6))
    assert ids_of(table.scan()) == [1, 5]


def test_a_delete_outlives_an_overwrite_beside_it(site: Site) -> None:
    """What a delete hides of an append with a higher write id stays hidden when an overwrite between the two is committed."""
    table = site.created()
    writer = site.writer(host="b")
    keys = pa.table({"id": [1]})
    delete = writer.begin(keys.schema, WriteMode.DELETE)
    overwrite = writer.begin(rows().schema, WriteMode.OVERWRITE)
    table.write(rows(1, 2))
    assert writer.commit(delete, (), effect=writer.deletion(keys)) is not None
    assert ids_of(table.scan()) == [2]
    writer.commit(overwrite, put(writer, overwrite, 7))
    for mode in MODES.values():
        assert ids_of(site.table(mode, host="c").scan()) == [2, 7]


def test_a_past_version_is_not_written(site: Site) -> None:
    """A table that is read at a version of its past takes no writes: they are made of what there is now."""
    site.created().write(rows(1))
    past = site.table({"lookup.version": "1"})
    for refused in (lambda: past.upsert(rows(2)), lambda: past.delete(pa.table({"id": [1]})), past.compact):
        with pytest.raises(OptionError, match="is for reads"):
            refused()
