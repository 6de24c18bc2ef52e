"""Batches of keys and the versions they are answered from, on one host (`Host`) at a time; chains of lookups in one pass; as-of lookups."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import pyspark_lookup.lookup.runtime
from pyspark_lookup import errors
from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.lookup import lookup_join as joining
from pyspark_lookup.lookup.lookup_join import (
    ERROR_COLUMN,
    FOUND_COLUMN,
    LookupPass,
    LookupRows,
    LookupSpec,
    PassSpec,
    Place,
    Stage,
    columns_of_token,
    issue_token,
    open_pass,
    options_from_json,
)
from pyspark_lookup.lookup.range_match import Match, MatchKind, matching_rows
from pyspark_lookup.lookup.read import TableReader
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.lookup.version_token import VersionToken
from pyspark_lookup.options.enums import Overlap
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.providers.functions import LookupFunctionProvider
from pyspark_lookup.storage.stores import Store, open_store
from pyspark_lookup.versions.executions import Execution
from tests.support.coarse_files import CoarseFile
from tests.support.fakes import FaultyStore
from tests.support.fuzzing import fuzzed
from tests.support.lookup_functions import Desk, SyncFunction, provider
from tests.support.version_tokens import FAIL, FULL, NOTHING, ONE, PARTIAL, TWO
from tests.support.workers import in_fresh_process

NULL = {"lookup.on-error": "NULL"}
ALL = ["status", "list", "head", "get"]
MODES = {"NONE": NOTHING, "PARTIAL": PARTIAL, "FULL": FULL}
Source = tuple[Path | str, Mapping[str, str]]
KEY = pa.field("id", pa.int64())
COLUMNS = pa.schema([("name", pa.string()), ("size", pa.int32())])
# Key 2 has rows in both files; nobody has 9.
FILES = [
    {"id": [2, 1, None, 2], "name": ["a", "b", "null", "c"], "size": [1, 2, 3, None]},
    {"id": [4, 2], "name": ["d", None], "size": [5, 6]},
]
ROWS = pa.concat_tables([pa.table(columns, COLUMNS.insert(0, KEY)) for columns in FILES])
TWOS = [{"name": "a", "size": 1}, {"name": "c", "size": None}, {"name": None, "size": 6}]
V1, V2 = ({"name": name, "size": 0} for name in ("v1", "v2"))
FAILED = {"name": None, "size": None, ERROR_COLUMN: "UfsUnavailableError: the store is down"}
FAILURES: dict[str, Callable[[Host, Path], object]] = {
    "TableFormatError": lambda host, path: (path / ".hoodie").mkdir(),
    "UfsNotFoundError": lambda host, path: path.rename(path.with_name("gone")),
    "UfsUnavailableError": lambda host, path: setattr(host, "down", ALL),
}


def ids(*values: int | None) -> list[pa.Array]:
    return [pa.array(values, pa.int64())]


def write(path: Path, columns: Mapping[str, Any]) -> None:
    """Put a file in place by rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([f for f in (KEY, *COLUMNS, pa.field("noise", pa.binary())) if f.name in columns])
    pq.write_table(pa.table(dict(columns), schema=schema), path.with_name("_new"))
    os.replace(path.with_name("_new"), path)


def named(path: Path, name: str, number: int = 0) -> None:
    """A file of ids from 1000 * number, whose rows have this name; so large that its columns are not read with its footer."""
    noise, first = [os.urandom(1000) for _ in range(300)], 1000 * number
    columns = {"id": range(first, first + 300), "name": [name] * 300, "size": [0] * 300, "noise": noise}
    write(path / f"{number}.parquet", columns)


class Host(Desk):
    """A host: its cache directory, and a process at a time, whose stores and providers refuse the calls named by `down`."""

    def __init__(self, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.session = {"lookup.cache.dir": str(cache_dir), "lookup.max-retries": "0"}
        self.calls: list[str] = []
        self.down: Sequence[str] = ()
        self.bad: set[int] = set()
        monkeypatch.setattr(pyspark_lookup.lookup.runtime, "open_store", self._store)
        super().__init__(cache_dir, monkeypatch)
        self.clock.tick(1000)  # later than any file's time, and not so late that what the host keeps would be swept

    def restart(self) -> None:
        joining._lookup.cache_clear()
        joining._pass.cache_clear()
        super().restart()

    def _store(self, path: str, storage: dict[str, object], now_s: Callable[[], float]) -> Store:
        return FaultyStore(open_store(path, storage, now_s), self._call)

    def _call(self, kind: str, subject: object) -> None:
        self.calls.append(kind)
        if kind in self.down:
            raise errors.UfsUnavailableError("the store is down")

    def spec(
        self,
        table: Path | str,
        more: Mapping[str, str] = NOTHING,
        columns: pa.Schema = COLUMNS,
        names: Sequence[str] | None = None,
        many: bool = True,
        how: str = "left",
    ) -> PassSpec:
        """One lookup, of names and sizes by id."""
        options = {"path" if isinstance(table, Path) else "lookup.provider": str(table), "lookup.keys": "id", **more}
        lookup = LookupSpec(options, pa.schema([KEY]), columns, tuple(columns.names if names is None else names))
        return PassSpec((Stage(lookup, (0,), (0,), how),), many)

    def announce(self, spec: PassSpec, execution: Execution | None = ONE) -> bytes:
        return issue_token(self.options(spec), execution)

    def options(self, spec: PassSpec) -> LookupOptions:
        stated = json.dumps(dict(spec.stages[0].lookup.options))
        return runtime().effective(options_from_json(stated).on_host(self.session))

    def reader(self, spec: PassSpec) -> TableReader:
        return runtime().engine(self.options(spec)).reader

    def read_token(self, spec: PassSpec, is_known: bool = True) -> bytes:
        """A token of the current version, of whose bytes this host has none or, if `is_known`, only those that tell its columns."""
        reader = self.reader(spec)
        table, version = reader.resolver.discover(self.options(spec))
        if is_known:
            reader.versions.schema(table, version)
        return VersionToken.from_version(reader.kinds, table, version).to_bytes()

    def get(
        self, spec: PassSpec, keys: list[Any], token: bytes | None = None, execution: Execution | None = ONE
    ) -> list[Any]:
        """The answers to a batch, all from one version (None: the one announced now)."""
        version = self.announce(spec, execution) if token is None else token
        lookups = open_pass(spec.to_text(), self.session)
        parts = list(lookups.answers(keys, [pa.array([version] * len(keys[0]), pa.binary())], [execution]))
        for part in parts:
            part.validate(full=True)
            assert part.type == lookups.type
        return [answer for part in parts for answer in part.to_pylist()]

    def provider(self) -> str:
        """The name of a provider that answers from ROWS, any keys but those in `bad`."""

        def answer(keys: pa.Table) -> pa.Table:
            self._call("lookup", keys)
            if bad_ids := self.bad.intersection(keys.column("id").to_pylist()):
                raise ValueError(f"no {bad_ids}")
            return ROWS.filter(pc.is_in(ROWS.column("id"), keys.column("id").combine_chunks()))

        return self.name(lambda context: provider(SyncFunction(answer), ROWS.schema, lambda: "v1"))


@pytest.fixture
def host(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host on which nobody has looked anything up."""
    host = Host(cache_dir, monkeypatch)
    yield host
    host.close()


@pytest.fixture
def dim(tmp_path: Path) -> Path:
    """The table of FILES."""
    for number, columns in enumerate(FILES):
        write(tmp_path / "dim" / f"{number}.parquet", columns)
    return tmp_path / "dim"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table whose rows say which version they are of."""
    named(tmp_path / "dim", "v1")
    return tmp_path / "dim"


@pytest.fixture(params=[*MODES, "provider NONE", "provider PARTIAL"])
def source(request: pytest.FixtureRequest, host: Host, dim: Path) -> Source:
    """FILES in every mode, and behind a provider: (table, options)."""
    return host.provider() if "provider" in request.param else dim, MODES[request.param.split()[-1]]


def test_answers_in_the_order_of_the_keys(host: Host, source: Source) -> None:
    """Each key's rows, in the order of the files, or its row; none where it is null or nobody's; keys may repeat."""
    for many in (True, False):  # nobody is asked for nothing
        assert host.get(host.spec(*source, many=many), ids(), b"") == host.calls == []
    for how in ("left", "inner", "left", "inner"):  # from where it is, then from what is kept of it
        marks = {FOUND_COLUMN: True} if how == "inner" else {}
        first, four = {"name": "b", "size": 2, **marks}, {"name": "d", "size": 5, **marks}
        twos = [{**row, **marks} for row in TWOS]
        spec = host.spec(*source, how=how)
        assert host.get(spec, ids(2, None, 9, 4, 2)) == [twos, [], [], [four], twos]
        assert host.get(spec, ids(None, None)) == [[], []]
        spec = host.spec(*source, how=how, many=False)
        assert host.get(spec, ids(None, 4, 9, 1, 4, None)) == [None, four, None, first, four, None]
        assert host.get(spec, ids(9, None)) == [None, None]
        assert host.get(spec, ids(1)) == [first]


def test_columns_that_a_lookup_needs(host: Host, source: Source) -> None:
    """Columns come as the query planned them, or marks in their place; a second row where there may be one is an error that names the key."""
    wide = pa.int64() if isinstance(source[0], Path) else pa.int32()
    columns = pa.schema([("size", wide), KEY, COLUMNS.field(0)])
    spec = host.spec(*source, columns=columns, names=("name", "k.1", "é"))
    assert host.get(spec, ids(4, 9)) == [[{"name": 5, "k.1": 4, "é": "d"}], []]
    null = {**source[1], **NULL}
    for options, mark in ((source[1], {FOUND_COLUMN: True}), (null, {ERROR_COLUMN: None})):
        many, single = (host.spec(source[0], options, columns=pa.schema([]), many=n) for n in (True, False))
        assert host.get(many, ids(9, 2, None, 1)) == [[], [mark] * 3, [], [mark]]
        assert host.get(single, ids(9, None, 1)) == [None, None, mark]
    for options in (source[1], null):
        with pytest.raises(errors.NonUniqueKeyError, match=r"\(up to 3\).* here id = 2: .*multi=True"):
            host.get(host.spec(source[0], options, many=False), ids(1, None, 2, 4))


@pytest.mark.parametrize("mode", MODES)
def test_each_row_is_answered_from_its_version(mode: str, host: Host, table: Path) -> None:
    """Versions may take turns within a batch: each row's answer is of the one told beside it, at its own place."""
    for many in (False, True):
        spec = host.spec(table, {**MODES[mode], **NULL}, many=many, columns=pa.schema([COLUMNS.field(0)]))
        tokens = []
        for number in range(3):
            named(table, f"v{number}")
            tokens.append(host.announce(spec, Execution("app", f"{many} {number}")))
        versions = pa.array([*(tokens[number] for number in (1, 0, 0, 2, 1, 0, 2)), b"!no luck"], pa.binary())
        parts = open_pass(spec.to_text(), host.session).answers(ids(0, 1, None, 2, 999, 2, 0, 1), [versions], [ONE])
        actual = [answer for part in parts for answer in part.to_pylist()]
        row = [{"name": f"v{number}", ERROR_COLUMN: None} for number in range(3)]
        expected = [row[1], row[0], None, row[2], None, row[0], row[2], {"name": None, ERROR_COLUMN: "no luck"}]
        assert actual == ([[answer] if answer else [] for answer in expected] if many else expected)


@pytest.mark.parametrize("mode", MODES)
def test_what_was_announced_is_answered_whatever_happens(mode: str, host: Host, table: Path) -> None:
    """When a small table's version is announced, its files are here: no task asks the store, and a replaced file changes nothing."""
    spec = host.spec(table, {**MODES[mode], **FAIL}, many=False)
    token = host.announce(spec)
    named(table, "v2")
    host.restart()
    host.calls.clear()
    for _ in range(2):
        assert host.get(spec, ids(1), token) == [V1]
    assert host.calls == []
    assert host.get(spec, ids(1), execution=TWO) == [V2]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("mode", [None, NOTHING, {"lookup.cache": "FULL"}], ids=["by key", "by range", "by range FULL"])
def test_rows_in_place_of_gone_ones(mode: Mapping[str, str] | None, is_known: bool, host: Host, table: Path) -> None:
    """FAIL: an error that names the table, or each row's reason. NEWER: the current version answers, for the whole execution."""

    def make_spec(options: Mapping[str, str] = NOTHING) -> PassSpec:
        return host.spec(table, options, many=False) if mode is None else by_range(host, table, {**mode, **options})

    token = host.read_token(make_spec(FAIL), is_known)
    named(table, "v2")
    with pytest.raises(errors.VersionGoneError, match="/dim"):
        host.get(make_spec(FAIL), ids(1), token)
    row, nothing = host.get(make_spec({**FAIL, **NULL}), ids(1, None), token)
    assert row["name"] is nothing is None
    assert row[ERROR_COLUMN].startswith("VersionGoneError: ")
    assert host.get(make_spec(), ids(1, None), token) == [V2, None]
    named(table, "v3")
    assert host.get(make_spec(), ids(2), token) == [V2]
    assert host.get(make_spec(), ids(2), execution=TWO) == [{**V1, "name": "v3"}]


def test_a_table_that_went_back(host: Host, tmp_path: Path) -> None:
    """A version answers in the place of a gone one for one execution; the next one reads the table as it is, here gone back."""
    dim, aside = tmp_path / "dim", tmp_path / "aside"
    aside.mkdir()
    named(dim / "one", "v1")
    named(aside / "two", "v2")
    spec = host.spec(dim, many=False)
    token = host.read_token(spec)
    (dim / "one").rename(aside / "one")  # which leaves the files' times as they are
    (aside / "two").rename(dim / "two")
    assert host.get(spec, ids(1), token) == [V2]
    (dim / "two").rename(aside / "two")
    (aside / "one").rename(dim / "one")
    assert host.get(spec, ids(1), token) == [V2]
    assert host.get(spec, ids(1), token, TWO) == [V1]


@pytest.mark.parametrize("cached", ["by the process", "by the host", "without a directory", "nothing"])
def test_a_store_that_fails(cached: str, host: Host, table: Path, cache_dir: Path) -> None:
    """NULL: cached keys are answered, absences too, and others say what failed, until the store is back. FAIL: an error."""
    options = NOTHING if cached == "nothing" else PARTIAL
    if cached == "without a directory":
        (table.parent / "file").touch()
        host.session["lookup.cache.dir"] = str(table.parent / "file")
    spec = host.spec(table, {**NULL, **options}, how="inner")
    named(table, "v1", 1)
    token = host.read_token(spec)
    rows, failed = [{**V1, ERROR_COLUMN: None, FOUND_COLUMN: True}], [{**FAILED, FOUND_COLUMN: True}]
    if options:
        assert host.get(spec, ids(1, 999), token) == [rows, []]
    if cached == "by the host":
        host.restart()
    host.down = ALL if options else ["get"]
    hit, absent = (rows, []) if options else (failed, failed)
    for _ in range(2):
        assert host.get(spec, ids(1002, 1, None, 999, 1, 1002), token) == [failed, hit, [], absent, hit, failed]
    assert host.get(spec, ids(None), token) == [[]]
    with pytest.raises(errors.UfsUnavailableError, match="the store is down"):
        host.get(host.spec(table, options), ids(1002), token)
    host.down = []
    assert host.get(spec, ids(1002), token) == [rows]
    if not options:  # PARTIAL, for the bounds of files: so it is when a version's first batch is answered
        for block in filter(Path.is_file, (cache_dir / "v1" / "blocks").rglob("*")):
            block.unlink()  # given up for space
        host.down = ALL
        assert host.get(host.spec(table, {**NULL, **PARTIAL}, many=False), ids(1, None), token) == [FAILED, None]


@pytest.mark.parametrize("options", [NOTHING, PARTIAL], ids=["NONE", "PARTIAL"])
def test_a_provider_that_fails(options: Mapping[str, str], host: Host) -> None:
    """NULL: keys that fail, which are not cached, say what failed, each its own; others are answered. FAIL: the query fails."""
    name = host.provider()
    spec = host.spec(name, {**options, **NULL}, many=False)
    token = host.announce(spec)
    first = {"name": "b", "size": 2, ERROR_COLUMN: None}
    assert host.get(spec, ids(1, 9), token) == [first, None]
    host.bad = {1, 4, 5}
    answers = host.get(spec, ids(1, 4, None, 9, 5, 4), token)
    text = "LookupFunctionError: provider {} failed to look up key id = {}: ValueError('no {}')"
    failures = {key: {"name": None, "size": None, ERROR_COLUMN: text.format(name, key, {key})} for key in host.bad}
    assert answers == [first if options else failures[1], failures[4], None, None, failures[5], failures[4]]
    with pytest.raises(errors.LookupFunctionError, match=r"no \{4\}"):
        host.get(host.spec(name, options, many=False), ids(4), token)


@pytest.mark.parametrize("error", FAILURES)
def test_a_version_that_cannot_be_resolved(error: str, host: Host, table: Path) -> None:
    """NULL: tasks are told what failed and say it for each of their keys; FAIL: the announcement fails."""
    FAILURES[error](host, table)
    with pytest.raises(getattr(errors, error)):
        host.announce(host.spec(table))
    (row,), nothing = host.get(host.spec(table, NULL), ids(1, None))
    assert (nothing, row["name"], row["size"]) == ([], None, None)
    assert row[ERROR_COLUMN].startswith(f"{error}: ")
    # A SQL function gets the error in place of the version, and raises it.
    with pytest.raises(getattr(errors, error)) as caught:
        host.get(host.spec(table), ids(1), host.announce(host.spec(table, NULL)))
    assert str(caught.value) == row[ERROR_COLUMN].removeprefix(f"{error}: ")


@pytest.mark.parametrize("mode", MODES)
def test_a_column_that_is_gone_is_no_failure_to_bear(mode: str, host: Host, dim: Path) -> None:
    """A table without a planned column is an error of the query, whatever lookup.on-error says."""
    spec = host.spec(dim, {**MODES[mode], **NULL})
    shutil.rmtree(dim)
    write(dim / "0.parquet", {"id": [1], "name": ["b"]})
    with pytest.raises(errors.SchemaError, match="size"):
        host.get(spec, ids(1))


def look_up_and_fork(text: str, session: dict[str, str], token: bytes) -> None:
    """Look up, fork, look up in both."""

    def look_up() -> LookupPass:
        lookups = open_pass(text, session)
        assert [part.to_pylist() for part in lookups.answers(ids(1), [pa.array([token])], [ONE])] == [[V1]]
        return lookups

    before, parent_runtime = look_up(), runtime()
    child = os.fork()
    if not child:
        try:
            assert look_up() is not before
            assert runtime() is not parent_runtime
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert look_up() is before


def test_a_forked_child_has_a_lookup_of_its_own(host: Host, table: Path) -> None:
    """A lookup stays open for the next task of a process and session; after a fork the child opens it anew."""
    spec = host.spec(table, PARTIAL, many=False)
    in_fresh_process(look_up_and_fork, spec.to_text(), host.session, host.announce(spec))


def test_a_driver_whose_clock_is_ahead(host: Host, table: Path) -> None:
    """Lookups built in `foreachBatch` keep their version, though this host's clock never reaches the time at which they were built."""
    spec = host.spec(table)
    built = [Execution("app", "batch 1", host.clock.host().wall_s() + ahead) for ahead in (3600, 3600, 7200)]
    tokens = []
    for number, execution in enumerate(built):
        tokens.append(host.announce(spec, execution))
        named(table, f"v{number + 2}")
    assert tokens[0] == tokens[1] != tokens[2]


TOKEN = VersionToken(3, "0123456789abcde", 7, 7.0)
TOKEN_COLUMNS = TOKEN.to_numbers()
_HOWS = ("left", "inner", "left_semi", "left_anti")
Key = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows by key, and the keys that fail (None: it has no column of errors)."""

    keys: int
    rows: Mapping[Key, list[Key]]
    failing: frozenset[Key] | None


class FakeLookup:
    """Finds the rows of a table that is in memory."""

    def __init__(self, table: Table, spec: LookupSpec, token: bytes) -> None:
        self._table, self._spec, self._token = table, spec, token
        self.probed = 0

    @property
    def fields(self) -> list[pa.Field]:
        fields = [pa.field(name, pa.int64()) for name in self._spec.names]
        return [*fields, *([] if self._table.failing is None else [pa.field(ERROR_COLUMN, pa.string())])]

    def find(self, keys: Sequence[pa.Array], token: bytes, execution: object) -> LookupRows:
        assert token == self._token
        self.probed += len(keys[0])
        matches = [
            (place, row)
            for place, key in enumerate(zip(*(column.to_pylist() for column in keys), strict=True))
            for row in answers(self._table, key, len(self._spec.names))
        ]
        columns = [pa.array([row[n] for _, row in matches], field.type) for n, field in enumerate(self.fields)]
        return LookupRows(np.array([place for place, _ in matches], np.int64), columns)


def answers(table: Table, key: Key, names: int) -> list[tuple[Any, ...]]:
    """The rows of a key, its error after them if the table has such a column."""
    if None in key:
        return []
    no_error: tuple[str | None, ...] = () if table.failing is None else (None,)
    if table.failing is not None and key in table.failing:
        return [(*(None,) * names, "failed")]
    return [(*row[:names], *no_error) for row in table.rows.get(key, [])]


def joined(batch: Sequence[Key], tables: Sequence[Table], stages: Sequence[Stage]) -> list[list[tuple[Any, ...]]]:
    """The results of each row: one join after the other, a row at a time."""
    every = []
    for row in batch:
        results: list[tuple[Any, ...]] = [()]
        for number, (table, stage) in enumerate(zip(tables, stages, strict=True)):
            names = len(stage.lookup.names)
            width = names + (table.failing is not None)
            after = []
            for result in results:
                key = tuple(
                    row[at] if isinstance(at, int) else result[starts(tables, stages)[at[0]] + at[1]]
                    for at in stage.places
                )
                matches = answers(table, key, names)
                failed = [match for match in matches if table.failing is not None and match[-1] is not None]
                if stage.how == "left_semi":
                    after += [result + matches[0]] if matches else []
                elif stage.how == "left_anti":
                    after += [result + (failed[0] if failed else (None,) * width)] if failed or not matches else []
                else:
                    after += [result + match for match in matches]
                    after += [result + (None,) * width] if not matches and stage.how == "left" else []
            results = after
            assert number < len(stages)
        every.append(results)
    return every


def starts(tables: Sequence[Table], stages: Sequence[Stage]) -> list[int]:
    """Where each lookup's columns begin."""
    widths = [len(s.lookup.names) + (t.failing is not None) for t, s in zip(tables, stages, strict=True)]
    return [sum(widths[:n]) for n in range(len(widths))]


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[Key], list[Table], list[Stage]]:
    """(a batch of two columns, tables, a lookup in each); keys are of the batch, or what an earlier lookup found."""
    values = st.integers(0, 5)
    nullable = st.one_of(st.none(), values)
    batch = draw(st.lists(st.tuples(nullable, nullable), max_size=8))
    tables: list[Table] = []
    stages: list[Stage] = []
    count = draw(st.integers(1, 4))
    fails = draw(st.integers(-1, count - 1))  # one at most: its column has one name
    for number in range(count):
        width = draw(st.integers(1, 2))
        key = st.tuples(*[values] * width)
        rows = draw(st.dictionaries(key, st.lists(st.tuples(nullable, nullable), max_size=3), max_size=8))
        failing = draw(st.frozensets(key, max_size=3)) if number == fails else None
        how = draw(st.sampled_from(_HOWS))
        names = tuple(f"c{number}_{n}" for n in range(draw(st.integers(0, 2)) if how in ("left", "inner") else 0))
        places: list[Place] = [0, 1]
        places += [(n, m) for n, stage in enumerate(stages) for m in range(len(stage.lookup.names))]
        stage_places = tuple(draw(st.sampled_from(places)) for _ in range(width))
        types = pa.schema([(f"k{n}", pa.int64()) for n in range(width)])
        spec = LookupSpec({}, types, pa.schema([(name, pa.int64()) for name in names]), names)
        tables.append(Table(width, rows, failing))
        stages.append(Stage(spec, stage_places, draw(st.sampled_from([(0,), (1,), (2, 3)])), how))
    return batch, tables, stages


SEMI_JOIN = Stage(LookupSpec({}, pa.schema([("k0", pa.int64())]), pa.schema([]), ()), (0,), (0,), "left_semi")


@example(([(1, 2)], [Table(1, {(1,): [(3, 4), (5, 6)]}, None)], [SEMI_JOIN]), 6, 200)
@fuzzed(600)
@given(chains(), st.integers(1, 6), st.integers(1, 200))
def test_a_pass_is_its_joins(chain: tuple[list[Key], list[Table], list[Stage]], at_once: int, size: int) -> None:
    """Each row has the results of the joins in their order, however many are done at once; no row is looked up twice."""
    batch, tables, stages = chain
    tokens = [b"version %d" % stage.version if len(stage.version) == 1 else TOKEN.to_bytes() for stage in stages]
    lookups = [FakeLookup(t, s.lookup, token) for t, s, token in zip(tables, stages, tokens, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        remaining = iter(lookups)
        patch.setattr(joining, "open_lookup", lambda spec, session: next(remaining))
        patch.setattr(joining, "_RESULTS_AT_ONCE", at_once)
        patch.setattr(joining, "_BYTES_AT_ONCE", size)
        whole = LookupPass(PassSpec(tuple(stages), many=True), {})
        versions = [
            pa.array([token] * len(batch), pa.scalar(token).type)
            for token in (*(b"version %d" % n for n in range(2)), *TOKEN_COLUMNS)
        ]
        columns = [pa.array([row[n] for row in batch], pa.int64()) for n in range(2)]
        parts = list(whole.answers(columns, versions, [None] * len(stages)))
    for part in parts:
        part.validate(full=True)
        assert part.type == whole.type
        assert len(part.values) <= at_once or len(part) == 1
    names = [field.name for lookup in lookups for field in lookup.fields]
    actual = [answer for part in parts for answer in part]
    marked = not names or any(stage.how != "left" for stage in stages)
    alone = len(stages) == 1 and stages[0].how == "left"
    for part, expected_rows in zip(actual, joined(batch, tables, stages), strict=True):
        actual_rows = [tuple(value.as_py() for value in row.values()) for row in part] if part.as_py() else []
        if alone and not actual_rows:
            assert expected_rows == [(None,) * len(names)]
        else:
            assert actual_rows == [(*row, *([True] if marked else [])) for row in expected_rows]
    assert [field.name for field in whole.type.value_type] == [*names, *([FOUND_COLUMN] if marked else [])]
    assert lookups[0].probed == len(batch)


def test_nulls_take_memory() -> None:
    """The limit of the memory for results counts the nulls of keys without a row, too."""
    columns = [pa.array([0.5]) for _ in range(100)]
    results = joining._Results(0, 1000, None, ((columns, np.array([0] + [-1] * 999)),))
    actual = sum(column.nbytes for column in results.all_columns())
    assert not results.fits(actual // 2) and results.fits(2 * actual)
    assert actual / 2 < results.bytes.sum() < 2 * actual


def test_a_row_that_spark_could_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that has found too much, in one lookup or in several that multiply, is an error that names its keys; rows before it are given out."""

    class Lookup(FakeLookup):
        place = "t"

        @property
        def fields(self) -> list[pa.Field]:
            return [pa.field(name, pa.string()) for name in self._spec.names]

        def find(self, keys: Sequence[pa.Array], token: bytes, execution: object) -> LookupRows:
            places = np.repeat(np.arange(len(keys[0])), [20 if key == 7 else 1 for key in keys[0].to_pylist()])
            return LookupRows(places, [pa.array(["x" * 100] * len(places))])

    def given_out(names: Sequence[str], row_bytes: int = 2**31) -> list[int]:
        specs = [LookupSpec({}, pa.schema([("k", pa.int64())]), pa.schema([(c, pa.string())]), (c,)) for c in names]
        monkeypatch.setattr(joining, "open_lookup", lambda spec, session: Lookup(Table(1, {}, None), spec, b""))
        whole = LookupPass(PassSpec(tuple(Stage(spec, (0,), (0,), "left") for spec in specs), many=True), {})
        counts: list[int] = []
        refusal = pytest.raises(errors.NotSupportedError, match=r"400 rows|20 rows")
        with refusal if row_bytes < 2**31 else nullcontext() as raised:
            for part in whole.answers([pa.array([1, 2, 7, 3])], [pa.array([b"a"] * 4)], [None] * len(specs), row_bytes):
                counts += [len(row) for row in part.to_pylist()]
        assert raised is None or re.search(r"have the same key, k = 7: .* [0-9,]+ at most .*memory", str(raised.value))
        return counts

    assert given_out(["a"]) == [1, 1, 20, 1]
    assert given_out(["a"], row_bytes=1500) == [1, 1]
    assert given_out(["a", "b"]) == [1, 1, 400, 1]
    assert given_out(["a", "b"], row_bytes=50_000) == [1, 1]


@example(7, 2**60 - 1, 0, False)
@given(
    st.integers(0, 7),
    st.integers(0, 2**60 - 1),
    st.one_of(st.integers(0, 2**63 - 1), st.floats(0, 1e300)),
    st.booleans(),
)
def test_tokens_come_back_from_their_numbers(kind: int, digest: int, place: float, cacheable: bool) -> None:
    number = place if isinstance(place, int) else None
    token = VersionToken(kind, f"{digest:015x}", number, float(place), cacheable)
    first, second, failure = columns_of_token(token.to_bytes())
    assert all(-(2**63) <= value < 2**63 for value in (first, second))
    assert failure is None
    assert VersionToken.from_numbers(first, second) == VersionToken.from_bytes(token.to_bytes()) == token


def by_range(host: Host, table: Path | str, options: Mapping[str, str], keyed: bool = False) -> PassSpec:
    """One lookup of the row whose id equals a value, as a range; with `keyed` also by the size."""
    options = {"path" if isinstance(table, Path) else "lookup.provider": str(table), "lookup.keys": "size", **options}
    keys, match = pa.schema([COLUMNS.field("size")] if keyed else []), (MatchKind.BETWEEN, ("id", "id"))
    lookup = LookupSpec(options, keys, pa.schema([*COLUMNS, KEY]), ("name", "size"), match)
    return PassSpec((Stage(lookup, (0, 1) if keyed else (0,), (0,), "left"),), many=False)


def test_ranges_of_a_full_cache_that_has_reloaded(host: Host, table: Path) -> None:
    """A version that was announced answers, although the host has a newer one by now."""
    options = {"lookup.cache": "FULL", "lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 h"}  # fmt: skip
    spec = by_range(host, table, options)
    token = host.announce(spec)
    assert host.get(spec, ids(1), token) == [V1]
    named(table, "v2")
    host.restart()
    host.clock.tick(7200)
    newer = host.announce(spec, TWO)
    assert newer != token
    assert host.get(spec, ids(1), token) == [V1]


def test_rows_that_may_change_are_not_kept(host: Host) -> None:
    """Rows are kept only for their execution, if their file was too new for its identity to show a change, or if a provider has no versions."""
    file, name = CoarseFile(host.clock), "a"

    def read_all() -> list[pa.RecordBatch]:
        return pa.table({"id": [1], "name": [name], "size": [1]}, ROWS.schema).to_batches()

    function = SyncFunction(lambda keys: ROWS.slice(0, 0))
    provided = host.name(lambda context: LookupFunctionProvider(function, ROWS.schema, None, scan=read_all))
    columns, match = pa.schema([COLUMNS.field("name"), KEY]), (MatchKind.BETWEEN, ("id", "id"))
    table = host.table(provided, {"lookup.range": "id..id"})
    places = {"lookup.provider": provided, "lookup.keys": "id"}, {"path": file.url}
    tokens = []
    for place in places:
        lookup = LookupSpec(place, pa.schema([]), columns, ("name",), match)
        spec = PassSpec((Stage(lookup, (0,), (0,), "left"),), many=False)
        for execution in (ONE, TWO, None, None):
            name = chr(ord(name) + 1)
            file.write(f"id,name\n1,{name}\n")
            tokens.append(host.announce(spec, execution))
            assert host.get(spec, ids(1), tokens[-1], execution) == [{"name": name}]
            assert [row["name"] for row in table.get(between=1)] == [name]
    assert len(set(tokens)) == len(places)
    host.clock.tick(3600)
    host.calls.clear()
    for number in range(3):
        execution = Execution("app", f"later {number}")
        assert host.announce(spec, execution) not in tokens
        assert host.get(spec, ids(1), execution=execution) == [{"name": name}]
    assert host.calls.count("get") == 1


def test_a_cache_of_the_conf_file(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup for facts that wait uses no partial cache, whoever sets it: the cache may know that a key has no rows."""
    conf = host.cache_dir / "conf"
    conf.parent.mkdir(exist_ok=True)
    conf.write_text("lookup.cache = PARTIAL\nlookup.partial-cache.expire-after-write = 1 h\nlookup.on-error = STALE\n")
    monkeypatch.setenv("LOOKUPCACHE_CONF", str(conf))
    function = SyncFunction(lambda keys: ROWS.slice(0, 0))
    name = host.name(lambda context: provider(function, ROWS.schema))
    for options in (NOTHING, {"lookup.cache": "PARTIAL", "lookup.partial-cache.expire-after-write": "1 h"}):
        for caches_keys in (True, False):
            stage = host.spec(name, options).stages[0]
            lookup = dataclasses.replace(stage.lookup, caches_keys=caches_keys)
            spec = PassSpec((dataclasses.replace(stage, lookup=lookup),), many=True)
            token = host.announce(spec)
            function.log.tables.clear()
            assert [host.get(spec, ids(77), token) for _ in range(2)] == [[[]]] * 2
            assert len(function.log.tables) == (0 if caches_keys and options else 1 if caches_keys else 2)


@pytest.mark.parametrize("mode", MODES)
def test_ranges_of_keys_that_repeat(mode: str, host: Host, dim: Path) -> None:
    """Rows are fetched once for each key. Nulls, keys that nobody has and repeated keys have the answers that they have alone."""
    options = {**MODES[mode], "lookup.keys": "size", "lookup.overlap": "ALL"}
    spec = by_range(host, dim, options, keyed=True)
    spec = dataclasses.replace(spec, many=True)
    sizes, values = [1, 1, 3, None, 1, 9, 3, 1, 5] * 3, [2, 1, None, 2, 2, 2, 7, None, 4] * 3
    rows = ROWS.to_pylist()
    expected = [
        [
            {"name": row["name"], "size": row["size"]}
            for row in rows
            if row["size"] == size and row["id"] in (None, value)
        ]
        if size is not None and value is not None
        else []
        for size, value in zip(sizes, values, strict=True)
    ]
    probes = [pa.array(sizes, pa.int32()), pa.array(values, pa.int64())]
    counts = host.reader(spec).metrics
    before = counts.snapshot()
    assert host.get(spec, probes) == expected
    key_count = sum(size is not None for size in sizes)
    after = counts.snapshot()
    if mode != "NONE":
        assert sum(after.get(name, 0) - before.get(name, 0) for name in ("hitCount", "missCount")) == key_count
    single_probes = [
        [pa.array([size], pa.int32()), pa.array([value], pa.int64())] for size, value in zip(sizes, values, strict=True)
    ]
    assert [host.get(spec, arguments)[0] for arguments in single_probes[:9]] == expected[:9]


def test_ranges_whose_lookup_fails(host: Host, table: Path) -> None:
    """Every row with a key and a value has the error; a null matches nothing, whatever fails."""
    for sizes in ([0, 5, None, 2], [0, 0, None, 0, 0, 0]):
        values = [2, None, 4, *[2] * (len(sizes) - 3)]
        spec = by_range(host, table, NULL, keyed=True)
        token = host.read_token(spec)
        host.down = ["get"]
        answers = host.get(spec, [pa.array(sizes, pa.int32()), pa.array(values, pa.int64())], token)
        host.down = []
        assert answers == [FAILED, None, None, *[FAILED] * (len(sizes) - 3)]


@pytest.mark.parametrize("mode", [*MODES, "provider NONE", "provider PARTIAL"])
def test_networks_that_cannot_be_read_of_some_keys(mode: str, host: Host, dim: Path) -> None:
    """Beside keys, too, an unreadable network is the error of the lookup: its rows have the reason, if the table says so; also when other keys fail."""
    is_file = mode in MODES
    options = {
        "path" if is_file else "lookup.provider": str(dim) if is_file else host.provider(), "lookup.keys": "id", **MODES[mode.removeprefix("provider ")], **NULL
    }  # fmt: skip
    lookup = LookupSpec(options, pa.schema([KEY]), COLUMNS, ("size",), (MatchKind.CIDR, ("name",)))
    spec = PassSpec((Stage(lookup, (0, 1), (0,), "left"),), many=False)
    for count in (2, 9):
        row, *_ = host.get(spec, [*ids(*[4] * count), pa.array(["10.0.0.1"] * count)])
        assert row[ERROR_COLUMN].startswith("DamagedFileError: ")
        assert (
            f"{'/1.parquet, row 1, ' if is_file else ''}id = 4: name = 'd' is not a network (rows with this problem: 1)"
            in row[ERROR_COLUMN]
        )
    host.bad = {9}
    *failed, of_null = host.get(spec, [*ids(4, 9, 4), pa.array(["10.0.0.1"] * 2 + [None])])
    assert all("is not a network" in row[ERROR_COLUMN] for row in failed)
    assert of_null is None


def test_ranges_of_a_provider(host: Host) -> None:
    """In lookups by keys, those that fail have the error in each of their rows; a provider that answers by key has no rows without keys."""
    columns, match = pa.schema([*COLUMNS, KEY]), (MatchKind.BETWEEN, ("size", "size"))
    lookup = LookupSpec({"lookup.provider": host.provider(), "lookup.keys": "id", **NULL}, pa.schema([KEY]), columns, ("name", "size"), match)  # fmt: skip
    spec = PassSpec((Stage(lookup, (0, 1), (0,), "left"),), many=False)
    host.bad = {2}
    answers = host.get(spec, [*ids(2, 2, 2, 1, 1, 9), pa.array([1, None, 3, 2, 3, 1], pa.int32())])
    assert [answer and (answer["name"], answer[ERROR_COLUMN] is not None) for answer in answers] == [
        (None, True), None, (None, True), ("b", False), None, None
    ]  # fmt: skip
    with pytest.raises(errors.OptionError, match="returns rows by key only: give keys as well"):
        host.get(by_range(host, host.provider(), NOTHING), ids(1))


INSTANT = pa.timestamp("us", "UTC")
moments = st.none() | st.integers(0, 8)
found_rows = st.lists(st.tuples(st.integers(0, 4), moments, moments), max_size=20)


def expected(rows: list[Any], times: list[int | None], by_end: bool, newest: bool) -> list[int] | None:
    """The numbers of the rows that are valid, by key; None where two are, and one must be."""
    numbers = []
    for key, moment in enumerate(times):
        valid = []
        for number, (of, start, end) in enumerate(rows):
            has_begun = start is None or (moment is not None and start <= moment)
            has_ended = by_end and end is not None and moment is not None and end <= moment
            if of == key and moment is not None and has_begun and not has_ended:
                valid.append((-1 if start is None else start, number))
        if len(valid) > 1 and by_end and not newest:
            return None
        if valid:
            numbers.append(max(valid)[1])
    return numbers


@given(found_rows, st.lists(moments, min_size=5, max_size=5), st.booleans(), st.booleans(), st.sampled_from(["int", "instant", "zoned", "date"]))  # fmt: skip
def test_a_row_that_was_valid(rows: list[Any], times: list[int | None], by_end: bool, newest: bool, kind: str) -> None:
    """Each key has at most one row, the one that a loop finds, or an error that names the key; times of the session's zone are the same instants."""
    rows = sorted(rows, key=lambda row: row[0])
    form = {"int": pa.int64(), "instant": INSTANT, "zoned": INSTANT, "date": pa.date32()}[kind]
    asked_form = pa.timestamp("us", "America/New_York") if kind == "zoned" else form

    def column(values: list[int | None]) -> pa.Array:
        return pa.array(values, pa.int32() if kind == "date" else pa.int64()).cast(form)

    since, until = (column([row[n] for row in rows]) for n in (1, 2))
    number, key_index = (pa.array(numbers, pa.int64()) for numbers in (range(len(rows)), [row[0] for row in rows]))
    table = pa.table({"number": number, "since": since, "until": until, KEY_INDEX: key_index})
    keys = pa.table({"id": range(5)})
    overlap = Overlap.NEWEST if newest or not by_end else Overlap.ERROR
    match = Match(MatchKind.AS_OF, ("since", "until") if by_end else ("since",), (True, False), overlap)
    at = match.cast_values(table.schema.field("since"), column(times).cast(asked_form))
    valid_rows = expected(rows, times, by_end, newest)
    if valid_rows is None:
        with pytest.raises(
            errors.OverlapError,
            match=r"\d rows of the key id = \d are valid at .*since = .*until = .*NEWEST",
        ):
            matching_rows(table, keys, at, match)
        return
    answer = matching_rows(table, keys, at, match)
    assert answer.column("number").to_pylist() == valid_rows
    assert answer.column(KEY_INDEX).to_pylist() == sorted(answer.column(KEY_INDEX).to_pylist())
