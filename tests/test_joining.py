"""Batches of keys and the version they are to be answered from: rows in order, null keys, failures, versions that change.

A test is a host (`Host`) whose clock stands still, and whose stores and providers fail when the test says so.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import select
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyspark_lookup.runtime
from pyspark_lookup.announcing import Announcement
from pyspark_lookup.errors import (
    LookupFunctionError,
    NonUniqueKeyError,
    PysparkLookupError,
    SchemaError,
    TableBusyError,
    UfsNotFoundError,
    UfsUnavailableError,
    VersionGoneError,
)
from pyspark_lookup.functions import LookupContext, LookupFunction, LookupFunctionProvider, LookupProvider
from pyspark_lookup.joining import ERROR_COLUMN, FOUND_COLUMN, Lookup, LookupSpec, announced, lookup_of, parsed_options
from pyspark_lookup.metadata import Execution
from pyspark_lookup.reader import TableReader
from pyspark_lookup.runtime import Runtime, runtime
from pyspark_lookup.stores import Store, open_store
from tests.fakes import FakeClock, FaultyStore, Later

NOTHING: Mapping[str, str] = MappingProxyType({})
PARTIAL = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000"}
FULL = {"lookup.cache": "FULL"}
NULL = {"lookup.on-error": "NULL"}
FAIL = {"lookup.on-version-gone": "FAIL"}
MODES = {"NONE": NOTHING, "PARTIAL": PARTIAL, "FULL": FULL}
ONE, TWO, THREE = (Execution("app", str(number)) for number in (1, 2, 3))
KEY = pa.field("id", pa.int64())
COLUMNS = pa.schema([("name", pa.string()), ("size", pa.int32())])
BOUND_S = 30.0  # far above what any of this takes

# Key 2 has rows in both files; nobody has 9.
FILES = [
    {"id": [2, 1, None, 2], "name": ["a", "b", "null", "c"], "size": [1, 2, 3, None]},
    {"id": [4, 2], "name": ["d", None], "size": [5, 6]},
]
TWOS = [{"name": "a", "size": 1}, {"name": "c", "size": None}, {"name": None, "size": 6}]


def ids(*values: int | None) -> list[pa.Array]:
    return [pa.array(values, pa.int64())]


def write(path: Path, columns: Mapping[str, Any]) -> None:
    """Put a file in place by rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = [KEY, *COLUMNS, pa.field("noise", pa.binary())]
    schema = pa.schema([field for field in fields if field.name in columns])
    temporary = path.with_name(f".{path.name}.new")
    pq.write_table(pa.table(dict(columns), schema=schema), temporary)
    os.replace(temporary, path)


def named(path: Path, name: str) -> None:
    """A table of one file, in which every row has this name; so large that its columns are not read with its footer."""
    noise = [os.urandom(1000) for _ in range(300)]
    write(path / "0.parquet", {"id": range(300), "name": [name] * 300, "size": [0] * 300, "noise": noise})


class Function(LookupFunction):
    """Answers from FILES, or raises what it is told."""

    def __init__(self, host: Host, columns: tuple[str, ...] | None) -> None:
        self.host, self.columns = host, columns

    def lookup(self, keys: pa.Table) -> pa.Table:
        self.host.asked.append(sorted(keys.column("id").to_pylist()))
        self.host.before("lookup", keys)
        wanted = set(keys.column("id").to_pylist())
        rows = [dict(zip(file, row, strict=True)) for file in FILES for row in zip(*file.values(), strict=True)]
        found = pa.Table.from_pylist([row for row in rows if row["id"] in wanted], COLUMNS.insert(0, KEY))
        return found if self.columns is None else found.select(["id", *self.columns])


class Host:
    """A host: its cache directory, and a process at a time, whose stores do what `before` says ahead of each call."""

    def __init__(self, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # Later than any file's time, and not so late that what the host keeps would be swept.
        self.clock = FakeClock(time.time() + 1000)
        self.session = {"lookup.cache.dir": str(cache_dir), "lookup.max-retries": "0"}
        self.calls: list[str] = []
        self.asked: list[list[int]] = []
        self.before: Callable[[str, object], None] = lambda kind, subject: None
        self._monkeypatch = monkeypatch
        self._serial = itertools.count()
        self._lookups: dict[tuple[int, str], Lookup] = {}
        self.processes: list[Runtime] = []
        self.restart()

    def restart(self) -> None:
        """Go on as another process of this host."""
        self.processes.append(Runtime(self.clock.host(), random.Random(1)))
        self.be()

    def be(self) -> None:
        """Go on as this host's latest process."""
        self._monkeypatch.setattr(pyspark_lookup.runtime, "_current", self.processes[-1])
        self._monkeypatch.setattr(pyspark_lookup.runtime, "open_store", self._store)

    def _store(self, path: str, storage: dict[str, object], now_s: Callable[[], float]) -> Store:
        store = FaultyStore(open_store(path, storage, now_s))

        def noted(kind: str, subject: object) -> None:
            self.calls.append(kind)
            self.before(kind, subject)

        store.before = noted
        return store

    def spec(self, table: Path | str, more: Mapping[str, str] = NOTHING, **changes: Any) -> LookupSpec:
        """A lookup of names and sizes by id, in lists without marks; `changes` to that."""
        place = {"path": str(table)} if isinstance(table, Path) else {"lookup.provider": table}
        options = {**place, "lookup.keys": "id", **more}
        fields = {"keys": ("id",), "columns": COLUMNS, "many": True, "marked": False, **changes}
        return LookupSpec(options, **{"names": tuple(fields["columns"].names), **fields})

    def lookup(self, spec: LookupSpec) -> Lookup:
        """The spec as a task of the current process takes it; the same one for the same spec."""
        text = spec.to_text()
        place = (len(self.processes), text)
        if place not in self._lookups:
            self._lookups[place] = Lookup(LookupSpec.of_text(text), self.session)
        return self._lookups[place]

    def announce(self, spec: LookupSpec, execution: Execution | None = ONE) -> bytes:
        """What a task of the current process tells the others."""
        options = parsed_options(json.dumps(dict(spec.options))).on_host(self.session)
        return announced(runtime().effective(options), execution)

    def told(self, spec: LookupSpec) -> bytes:
        """The current version, of which this host has its files and columns on record, and none of its bytes."""
        reader, options = self.engine(spec)
        table, version = reader.metadata.discover(options)
        reader.schema(table, version)
        return Announcement.of(table, version).to_bytes()

    def engine(self, spec: LookupSpec) -> tuple[TableReader, Any]:
        options = runtime().effective(parsed_options(json.dumps(dict(spec.options))).on_host(self.session))
        return runtime().engine(options).reader, options

    def get(
        self, spec: LookupSpec, keys: list[pa.Array], told: bytes | None = None, execution: Execution | None = ONE
    ) -> list[Any]:
        """The answers to a batch, all from one version (None: the one announced now)."""
        version = self.announce(spec, execution) if told is None else told
        lookup = self.lookup(spec)
        answers = lookup.answers(keys, pa.array([version] * len(keys[0]), pa.binary()), execution)
        answers.validate(full=True)
        assert answers.type == lookup.type
        rows: list[Any] = answers.to_pylist()
        return rows

    def fails(self, *kinds: str, problem: Exception | None = None) -> None:
        """From now on calls of these kinds (none: all) fail."""

        def before(kind: str, subject: object) -> None:
            if not kinds or kind in kinds:
                raise problem or UfsUnavailableError("the store is down")

        self.before = before

    def works(self) -> None:
        self.before = lambda kind, subject: None

    def provider(self) -> str:
        """The name of a provider that answers from FILES."""

        def make(context: LookupContext) -> LookupProvider:
            return LookupFunctionProvider(Function(self, context.columns), COLUMNS.insert(0, KEY), lambda: "v1")

        module = types.ModuleType(f"joining_{next(self._serial)}_{id(self)}")
        module.make = make  # type: ignore[attr-defined]
        self._monkeypatch.setitem(sys.modules, module.__name__, module)
        return f"{module.__name__}:make"

    def close(self) -> None:
        for process in self.processes:
            for provided in process._provided.values():
                provided.close()


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


@pytest.fixture(params=[*MODES, "provider", "provider PARTIAL"])
def source(request: pytest.FixtureRequest, host: Host, dim: Path) -> tuple[Path | str, Mapping[str, str]]:
    """FILES in every mode, and behind a provider: (table, options)."""
    if request.param in MODES:
        return dim, MODES[request.param]
    return host.provider(), PARTIAL if request.param.endswith("PARTIAL") else NOTHING


# --- the text that travels ----------------------------------------------------------------------------

types_ = st.sampled_from(
    [pa.int8(), pa.string(), pa.timestamp("us", "UTC"), pa.decimal128(38, 2), pa.list_(pa.struct([("é", pa.binary())]))]
)
columns_ = st.dictionaries(st.text(min_size=1), types_, max_size=4)


@given(
    st.dictionaries(st.text(), st.text(), max_size=4), st.lists(st.text(), max_size=3), columns_, st.booleans(), st.booleans()
)
def test_a_spec_comes_back_as_it_went(
    options: dict[str, str], keys: list[str], columns: dict[str, pa.DataType], many: bool, marked: bool
) -> None:
    """Whatever names there are; and specs that are equal have one text, in whatever order their options were given."""
    names = tuple(f"new {name}" for name in columns)
    spec = LookupSpec(options, tuple(keys), pa.schema(columns.items()), names, many, marked)
    again = LookupSpec.of_text(spec.to_text())
    assert again == spec
    other = LookupSpec(dict(reversed(options.items())), tuple(keys), pa.schema(columns.items()), names, many, marked)
    assert other.to_text() == spec.to_text() == again.to_text()


def test_other_specs_have_other_texts(host: Host, dim: Path) -> None:
    """Each field of a spec counts."""
    one = host.spec(dim)
    others = [host.spec(dim, NULL), host.spec(dim, many=False), host.spec(dim, marked=True), host.spec(dim, names=("n", "s"))]
    others += [host.spec(dim, columns=COLUMNS.set(1, pa.field("size", pa.int64()))), host.spec(dim, keys=("name",))]
    assert len({spec.to_text() for spec in (one, *others)}) == len(others) + 1


# --- answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marked", [False, True], ids=["", "marked"])
def test_lists_in_the_order_of_the_keys(
    marked: bool, host: Host, source: tuple[Path | str, Mapping[str, str]]
) -> None:
    """Each key's rows, in the order of the files; none for a key that is null or that nobody has; keys may repeat."""
    table, options = source
    spec = host.spec(table, options, marked=marked)
    marks = {FOUND_COLUMN: True} if marked else {}
    twos = [{**row, **marks} for row in TWOS]
    fours = [{"name": "d", "size": 5, **marks}]
    for _ in range(2):  # from where it is, then from what is kept of it
        assert host.get(spec, ids(2, None, 9, 4, 2)) == [twos, [], [], fours, twos]
        assert host.get(spec, ids(None, None)) == [[], []]


@pytest.mark.parametrize("marked", [False, True], ids=["", "marked"])
def test_one_row_for_each_key(marked: bool, host: Host, source: tuple[Path | str, Mapping[str, str]]) -> None:
    """Not many: the key's row, null where there is none."""
    table, options = source
    spec = host.spec(table, options, many=False, marked=marked)
    marks = {FOUND_COLUMN: True} if marked else {}
    one, four = {"name": "b", "size": 2, **marks}, {"name": "d", "size": 5, **marks}
    for _ in range(2):
        assert host.get(spec, ids(None, 4, 9, 1, 4, None)) == [None, four, None, one, four, None]
        assert host.get(spec, ids(9, None)) == [None, None]
        assert host.get(spec, ids(1)) == [one]


@pytest.mark.parametrize("many", [True, False], ids=["many", "one"])
def test_an_empty_batch_asks_nobody(many: bool, host: Host, source: tuple[Path | str, Mapping[str, str]]) -> None:
    """No keys: an empty array of the answers' type, without any call."""
    table, options = source
    assert host.get(host.spec(table, options, many=many), ids(), b"") == []
    assert host.calls == host.asked == []


@pytest.mark.parametrize("many", [True, False], ids=["many", "one"])
def test_without_columns_only_marks_are_told(
    many: bool, host: Host, source: tuple[Path | str, Mapping[str, str]]
) -> None:
    """A lookup that asks for no column still says how many rows there are."""
    table, options = source
    spec = host.spec(table, {**options, **NULL}, columns=pa.schema([]), marked=True, many=many)
    found = {ERROR_COLUMN: None, FOUND_COLUMN: True}
    if many:
        assert host.get(spec, ids(9, 2, None, 1)) == [[], [found] * 3, [], [found]]
    else:
        assert host.get(spec, ids(9, None, 1)) == [None, None, found]


def test_columns_are_called_as_the_spec_says(host: Host, source: tuple[Path | str, Mapping[str, str]]) -> None:
    """Under other names, in another order, with the key among them and a wider type: what the query planned."""
    table, options = source
    columns = pa.schema([("size", pa.int64() if isinstance(table, Path) else pa.int32()), KEY, ("name", pa.string())])
    spec = host.spec(table, options, columns=columns, names=("name", "k.1", "é"))
    assert host.get(spec, ids(4, 9)) == [[{"name": 5, "k.1": 4, "é": "d"}], []]


@pytest.mark.parametrize("mode", MODES)
def test_keys_of_several_columns(mode: str, host: Host, dim: Path) -> None:
    """Keys come in the order of the spec's, which need not be that of the table's option; one null is enough for no row."""
    spec = host.spec(dim, {**MODES[mode], "lookup.keys": "name,ID"}, keys=("id", "name"), columns=pa.schema([COLUMNS.field(1)]))
    keys = [pa.array([2, 2, 1, None, 2], pa.int32()), pa.array(["c", "a", "a", "b", None])]
    assert host.get(spec, keys) == [[{"size": None}], [{"size": 1}], [], [], []]


def test_only_rows_of_the_predicate(host: Host, dim: Path) -> None:
    """lookup.where leaves the others out, in every mode."""
    for options in MODES.values():
        spec = host.spec(dim, {**options, "lookup.where": "size <> 1"}, many=False)
        assert host.get(spec, ids(2, 1)) == [TWOS[2], {"name": "b", "size": 2}]


def test_a_second_row_is_an_error_that_names_the_key(host: Host, source: tuple[Path | str, Mapping[str, str]]) -> None:
    """Where there may be one row: the key, and what to do about it. lookup.on-error is not about this."""
    table, options = source
    for more in (NOTHING, NULL):
        with pytest.raises(NonUniqueKeyError, match=r"\(up to 3\).* here id = 2: .*multi=True"):
            host.get(host.spec(table, {**options, **more}, many=False), ids(1, None, 2, 4))


# --- versions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_each_row_is_answered_from_its_version(mode: str, host: Host, table: Path) -> None:
    """Versions may take turns within a batch: each row's answer is of the one told beside it, at its own place."""
    for many in (False, True):
        spec = host.spec(table, {**MODES[mode], **NULL}, many=many, columns=pa.schema([COLUMNS.field(0)]))
        told = []
        for number in range(3):
            named(table, f"v{number}")
            told.append(host.announce(spec, Execution("app", f"{many} {number}")))
        order = [1, 0, 0, 2, 1, 0, 2]
        versions = pa.array([*(told[number] for number in order), b"!no luck"], pa.binary())
        found = host.lookup(spec).answers(ids(0, 1, None, 2, 999, 2, 0, 1), versions, THREE).to_pylist()
        row = [{"name": f"v{number}", ERROR_COLUMN: None} for number in range(3)]
        lost = {"name": None, ERROR_COLUMN: "no luck"}
        expected = [row[1], row[0], None, row[2], None, row[0], row[2], lost]
        assert found == ([[answer] if answer else [] for answer in expected] if many else expected)


@pytest.mark.parametrize("mode", MODES)
def test_what_was_announced_is_answered_whatever_happens(mode: str, host: Host, table: Path) -> None:
    """A small table's files are here when it is announced: no task asks the store, and a replaced file changes nothing."""
    spec = host.spec(table, {**MODES[mode], **FAIL}, many=False)
    told = host.announce(spec)
    named(table, "v2")
    host.restart()
    host.calls.clear()
    for _ in range(2):
        assert host.get(spec, ids(1), told) == [{"name": "v1", "size": 0}]
    assert host.calls == []
    assert host.get(spec, ids(1), execution=TWO) == [{"name": "v2", "size": 0}]


def test_newer_rows_in_place_of_gone_ones(host: Host, table: Path) -> None:
    """NEWER: where bytes are lacking that are no longer in the store, the current version answers, for the whole execution."""
    spec = host.spec(table, many=False)
    told = host.told(spec)
    named(table, "v2")
    assert host.get(spec, ids(1, None), told) == [{"name": "v2", "size": 0}, None]
    named(table, "v3")
    assert host.get(spec, ids(2), told) == [{"name": "v2", "size": 0}]
    reader, _ = host.engine(spec)
    assert reader.metrics.snapshot()["versionGoneCount"] == 2


def test_no_rows_in_place_of_gone_ones(host: Host, table: Path) -> None:
    """FAIL: then it is an error that names the table, or the reason in each row's place."""
    spec = host.spec(table, FAIL, many=False)
    told = host.told(spec)
    named(table, "v2")
    with pytest.raises(VersionGoneError, match=r"/dim .*resolved is gone"):
        host.get(spec, ids(1), told)
    row, nothing = host.get(host.spec(table, {**FAIL, **NULL}, many=False), ids(1, None), told)
    assert row["name"] is nothing is None
    assert row[ERROR_COLUMN].startswith("VersionGoneError: the version of ")


@pytest.mark.xfail(strict=True, reason="Lookup reads the columns of a version that may be gone: SourceChangedError")
@pytest.mark.parametrize("more", [NOTHING, FAIL], ids=["NEWER", "FAIL"])
def test_a_version_that_goes_before_its_columns_were_read(more: Mapping[str, str], host: Host, table: Path) -> None:
    """lookup.on-version-gone also counts for a version of which a host has seen the list of files only."""
    spec = host.spec(table, {**more, "lookup.scan.split-size": "1 MiB"}, many=False)
    reader, options = host.engine(spec)
    told = Announcement.of(*reader.metadata.discover(options)).to_bytes()
    named(table, "v2")
    if more:
        with pytest.raises(VersionGoneError, match="dim"):
            host.get(spec, ids(1), told)
    else:
        assert host.get(spec, ids(1), told) == [{"name": "v2", "size": 0}]


@pytest.mark.parametrize("mode", MODES)
def test_a_host_that_was_only_told(
    mode: str, host: Host, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host lists once and answers from the same version; files that came since are not in it."""
    spec = host.spec(table, MODES[mode])
    os.utime(table / "0.parquet", (0, 1e9))
    told = host.announce(spec)
    write(table / "1.parquet", {"id": [1], "name": ["added"], "size": [1]})
    other = Host(tmp_path / "other", monkeypatch)
    for _ in range(2):
        assert other.get(spec, ids(1), told) == [[{"name": "v1", "size": 0}]]
    assert [kind for kind in other.calls if kind != "get"] == ["list"]


def test_announcements_are_on_record(host: Host, table: Path) -> None:
    """A version's last announcement is counted, and shown with the versions that this host knows."""
    spec = host.spec(table)
    host.announce(spec)
    named(table, "v2")
    host.clock.tick(1)
    host.told(spec)
    reader, options = host.engine(spec)
    rows = reader.metadata.known_versions(options)
    assert [row["announced_at"] for row in rows] == [host.clock.wall_s - 1, None]
    assert reader.metrics.snapshot()["announcedCount"] == 1


def test_a_snapshot_that_appears_answers_the_next_batch(
    host: Host, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FULL: what is not built in time is read from the files, and from the snapshot as soon as there is one."""
    later = Later()

    def make(*parts: Any, **more: Any) -> TableReader:
        return TableReader(*parts, **more, start=later)

    monkeypatch.setattr(pyspark_lookup.runtime, "TableReader", make)
    spec = host.spec(table, {**FULL, "lookup.full-cache.build-wait": "0 s"}, many=False)
    told = host.announce(spec)
    reader, _ = host.engine(spec)

    def hits() -> tuple[int, int]:
        assert host.get(spec, ids(1), told) == [{"name": "v1", "size": 0}]
        counters = reader.metrics.snapshot()
        return counters["hitCount"], counters["missCount"]

    assert [hits(), hits()] == [(0, 1), (0, 2)]
    assert later.loads() == 1
    assert [hits(), hits()] == [(1, 2), (2, 2)]


# --- failures -----------------------------------------------------------------------------------------

DOWN = "UfsUnavailableError: the store is down"


@pytest.mark.parametrize("many", [True, False], ids=["many", "one"])
def test_a_store_that_fails(many: bool, host: Host, table: Path) -> None:
    """NULL: keys that were asked for say what failed, null ones are null; the next batch is answered when the store is back."""
    spec = host.spec(table, NULL, many=many, marked=True)
    told = host.told(spec)
    failed = {"name": None, "size": None, ERROR_COLUMN: DOWN, FOUND_COLUMN: None}
    found = {"name": "v1", "size": 0, ERROR_COLUMN: None, FOUND_COLUMN: True}

    def expected(row: Mapping[str, object]) -> list[Any]:
        return [[row], [], [row]] if many else [row, None, row]

    host.fails("get")
    assert host.get(spec, ids(1, None, 2), told) == expected(failed)
    assert host.get(spec, ids(None), told) == ([[]] if many else [None])
    with pytest.raises(UfsUnavailableError, match="the store is down"):
        host.get(host.spec(table, many=many), ids(1), told)
    host.works()
    assert host.get(spec, ids(1, None, 2), told) == expected(found)


def test_a_store_that_fails_for_keys_of_several_columns(host: Host, dim: Path) -> None:
    """A key with a null in any of its columns was not asked for."""
    options = {**NULL, "lookup.keys": "id,name"}
    spec = host.spec(dim, options, keys=("id", "name"), columns=pa.schema([]), marked=True, many=False)
    host.fails()
    told = Announcement.of_bytes(b"D" + b"\1" * 24).to_bytes()
    keys = [pa.array([1, None, 1], pa.int64()), pa.array(["b", "b", None])]
    assert host.get(spec, keys, told) == [{ERROR_COLUMN: DOWN, FOUND_COLUMN: None}, None, None]


def test_a_host_that_was_told_and_has_no_store(host: Host, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NULL: a host that cannot find out which files a version has says so, until it can."""
    spec = host.spec(table, NULL, many=False)
    told = host.announce(spec)
    other = Host(tmp_path / "other", monkeypatch)
    other.fails("list")
    assert other.get(spec, ids(None, 1), told) == [None, {"name": None, "size": None, ERROR_COLUMN: DOWN}]
    other.works()
    assert other.get(spec, ids(None, 1), told) == [None, {"name": "v1", "size": 0, ERROR_COLUMN: None}]


@pytest.mark.parametrize("process", ["the same", "another"])
def test_cached_keys_are_answered_without_the_store(process: str, host: Host, table: Path) -> None:
    """NULL with PARTIAL: what this process or its host holds is answered, also that a key has no rows; the rest is not."""
    spec = host.spec(table, {**NULL, **PARTIAL}, marked=True)
    told = host.told(spec)
    found = [{"name": "v1", "size": 0, ERROR_COLUMN: None, FOUND_COLUMN: True}]
    assert host.get(spec, ids(1, 999), told) == [found, []]
    if process == "another":
        host.restart()
    host.fails()
    failed = [{"name": None, "size": None, ERROR_COLUMN: DOWN, FOUND_COLUMN: None}]
    for _ in range(2):
        assert host.get(spec, ids(2, 1, None, 999, 1, 2), told) == [failed, found, [], [], found, failed]
    host.works()
    assert host.get(spec, ids(2), told) == [found]


@pytest.mark.xfail(strict=True, reason="held_many_at reads footers for the bounds of files; its failure is not caught")
def test_cached_keys_of_a_version_whose_bounds_are_unknown(host: Host, dim: Path) -> None:
    """NULL with PARTIAL: a store that fails while a version's first batch is answered fails its keys, not the query."""
    spec = host.spec(dim, {**NULL, **PARTIAL}, many=False)
    told = host.told(spec)
    reader, _ = host.engine(spec)
    assert reader.partials is not None
    for blocks in (Path(host.session["lookup.cache.dir"]) / "v1" / "blocks").rglob("*"):
        if blocks.is_file():
            blocks.unlink()  # given up for space
    host.fails()
    assert host.get(spec, ids(1, None), told) == [{"name": None, "size": None, ERROR_COLUMN: DOWN}, None]


@pytest.mark.xfail(strict=True, reason="held_many_at reads the schema again where no disk keeps it; its failure is not caught")
def test_cached_keys_without_a_cache_directory(tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NULL with PARTIAL: where nothing can be kept on disk, what the process holds is answered without the store."""
    (tmp_path / "file").touch()
    host = Host(tmp_path / "file", monkeypatch)
    spec = host.spec(table, {**NULL, **PARTIAL}, many=False)
    told = host.told(spec)
    found = {"name": "v1", "size": 0, ERROR_COLUMN: None}
    assert host.get(spec, ids(1), told) == [found]
    host.fails()
    failed = {"name": None, "size": None, ERROR_COLUMN: DOWN}
    assert host.get(spec, ids(1, 2, None), told) == [found, failed, None]


@pytest.mark.parametrize("options", [NOTHING, PARTIAL], ids=["NONE", "PARTIAL"])
def test_a_provider_that_fails(options: Mapping[str, str], host: Host) -> None:
    """NULL: keys say what failed, but for those that are cached; FAIL: the query fails."""
    name = host.provider()
    spec = host.spec(name, {**options, **NULL}, many=False)
    told = host.announce(spec)
    found = {"name": "b", "size": 2, ERROR_COLUMN: None}
    assert host.get(spec, ids(1, 9), told) == [found, None]
    host.fails("lookup", problem=ValueError("no route"))
    first, fourth, nothing, ninth = host.get(spec, ids(1, 4, None, 9), told)
    assert (fourth["name"], nothing) == (None, None)
    assert "LookupFunctionError: " in fourth[ERROR_COLUMN]
    assert "no route" in fourth[ERROR_COLUMN]
    assert [first, ninth] == ([found, None] if options else [fourth, fourth])
    with pytest.raises(LookupFunctionError, match="no route"):
        host.get(host.spec(name, options, many=False), ids(4), told)
    host.works()
    assert host.get(spec, ids(4), told) == [{"name": "d", "size": 5, ERROR_COLUMN: None}]


def busy(path: Path) -> None:
    (path / "_temporary").mkdir()


def missing(path: Path) -> None:
    os.rename(path, path.with_name("gone"))


@pytest.mark.parametrize(
    ("problem", "error"),
    [(busy, TableBusyError), (missing, UfsNotFoundError), (None, UfsUnavailableError)],
    ids=["busy", "missing", "down"],
)
def test_a_version_that_cannot_be_resolved(
    problem: Callable[[Path], None] | None, error: type[PysparkLookupError], host: Host, table: Path
) -> None:
    """NULL: tasks are told what failed and say it for each of their keys; FAIL: the announcement fails."""
    host.fails() if problem is None else problem(table)
    with pytest.raises(error):
        host.announce(host.spec(table))
    spec = host.spec(table, NULL)
    told = host.announce(spec)
    assert len(told) < 1100
    (row,), nothing = host.get(spec, ids(1, None), told)
    assert nothing == []
    assert row["name"] is row["size"] is None
    assert row[ERROR_COLUMN].startswith(f"{error.__name__}: ")
    assert host.lookup(spec).answers(ids(), pa.array([], pa.binary()), ONE).type == host.lookup(spec).type


def test_a_long_message_is_cut(host: Host, table: Path) -> None:
    """What tasks are told of a failure stays short, wherever in a character it is cut."""
    spec = host.spec(table, NULL, many=False)
    host.fails(problem=UfsUnavailableError("é" * 5000))
    (row,) = host.get(spec, ids(1))
    assert 400 < len(row[ERROR_COLUMN]) <= 1000


@pytest.mark.parametrize("mode", MODES)
def test_a_column_that_is_gone_is_no_failure_to_bear(mode: str, host: Host, dim: Path) -> None:
    """A table without a planned column is an error of the query, whatever lookup.on-error says."""
    spec = host.spec(dim, {**MODES[mode], **NULL})
    for number, columns in enumerate(FILES):
        write(dim / f"{number}.parquet", {"id": columns["id"], "name": columns["name"]})
    with pytest.raises(SchemaError, match="size"):
        host.get(spec, ids(1))


# --- processes ----------------------------------------------------------------------------------------


def test_a_spec_has_one_lookup_in_a_process(host: Host, table: Path) -> None:
    """What is open stays open for the next task; under another session's options it is another lookup."""
    text = host.spec(table).to_text()
    assert lookup_of(text, host.session) is lookup_of(text, dict(reversed(host.session.items())))
    assert lookup_of(text, host.session) is not lookup_of(text, {**host.session, "lookup.max-retries": "1"})
    lookup_of(text, host.session).publish()


def look_up_and_fork(text: str, session: dict[str, str], told: bytes, answer: Path) -> None:
    """Look up, fork, look up in both; write down what was found, and whether the child had a lookup of its own."""

    def names() -> list[Any]:
        return [row["name"] for row in lookup_of(text, session).answers(ids(1), pa.array([told]), ONE).to_pylist()]

    ours = names()
    before, engines = lookup_of(text, session), runtime()
    report, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = [names(), lookup_of(text, session) is not before, runtime() is not engines]
            os.write(tell, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(tell)
    ready, _, _ = select.select([report], [], [], BOUND_S)
    if not ready:
        os.kill(child, 9)
        raise TimeoutError("the forked child hangs")
    theirs = json.loads(os.read(report, 10_000) or b"null")
    os.waitpid(child, 0)
    answer.write_text(json.dumps([ours, theirs, names(), lookup_of(text, session) is before]))


def test_a_forked_child_has_a_lookup_of_its_own(host: Host, table: Path, tmp_path: Path) -> None:
    """After a fork the child opens everything anew, and its parent goes on with what it has."""
    spec = host.spec(table, PARTIAL, many=False)
    told = host.announce(spec)
    # In a spawned process: this one has threads and must not fork.
    process = multiprocessing.get_context("spawn").Process(
        target=look_up_and_fork, args=(spec.to_text(), host.session, told, tmp_path / "answer")
    )
    process.start()
    process.join(BOUND_S + 30)
    if process.is_alive():
        process.kill()
        pytest.fail("the process hangs")
    assert process.exitcode == 0
    assert json.loads((tmp_path / "answer").read_text()) == [["v1"], [["v1"], True, True], ["v1"], True]
