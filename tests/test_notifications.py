"""A managed table's log: events as bytes, the state they add up to, and a log in a store under many writers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pyspark_lookup import errors
from pyspark_lookup import notifications as log
from pyspark_lookup.disk import Disk
from pyspark_lookup.metrics import CacheMetricGroup
from pyspark_lookup.notifications import Allocate, DataFile, Event, LogVersion, TableState, WriteMode
from pyspark_lookup.notifications.events import event_bytes, event_of
from pyspark_lookup.stores import Count, FileVersion, Store, open_store
from pyspark_lookup.ufs import Ufs
from pyspark_lookup.writeids import ValidWriteIdList
from tests.fakes import FakeClock, FaultyStore

APPEND, OVERWRITE = WriteMode.APPEND, WriteMode.OVERWRITE
DEFINITION = log.Definition(pa.schema([("id", pa.int64()), ("name", pa.string())]), ("id",), {"a": "b"})
WIDER = log.Definition(pa.schema([*DEFINITION.schema, pa.field("x", pa.list_(pa.float64()))]), ("id",))
OURS = (errors.DamagedFileError, errors.NotSupportedError)
_buckets = itertools.count()


def at(position: int, table_id: str = "t") -> tuple[int, str, str, float]:
    """What an event begins with."""
    return position, table_id, f"{table_id}-{position}", float(position)


def history(table_id: str, commits: int) -> list[Event]:
    """The events of a table and so many appends of a file each: 1 + 3 per commit."""
    events: list[Event] = [log.Create(*at(1, table_id), DEFINITION)]
    for id_ in range(1, commits + 1):
        events.append(Allocate(*at(len(events) + 1, table_id), id_, APPEND))
        events.append(log.Write(*at(len(events) + 1, table_id), id_, (DataFile(f"w/{id_}.parquet", 10, 2),)))
        events.append(log.Commit(*at(len(events) + 1, table_id), id_))
    return events


def state_of(events: Iterable[Event]) -> TableState:
    first, *more = events
    return TableState.begun(first, "a test").advanced(more)


def paths(state: TableState, write_ids: ValidWriteIdList | str) -> list[str]:
    ids = ValidWriteIdList.parse(write_ids) if isinstance(write_ids, str) else write_ids
    return sorted(found[0].path for found in state.files(ids))


# --- events as bytes ------------------------------------------------------------------------------

texts = st.text(max_size=8)
ids = st.integers(1, 2**40)
names = texts.filter(lambda text: text not in ("", ".", "..") and "/" not in text)
data_files = st.builds(DataFile, st.lists(names, min_size=1, max_size=3).map("/".join), st.integers(0, 2**50), ids)
definitions = st.builds(
    lambda given, properties: dataclasses.replace(given, properties=properties),
    st.sampled_from([DEFINITION, WIDER, log.Definition(pa.schema([("ä\n", pa.decimal128(9, 2))]), ())]),
    st.dictionaries(texts, texts, max_size=2),
)
head = (ids, texts, texts, st.floats(allow_nan=False, allow_infinity=False))
modes = st.sampled_from(WriteMode)
events_ = st.one_of(
    st.builds(log.Create, *head, definitions),
    st.builds(Allocate, *head, ids, modes),
    st.builds(log.Write, *head, ids, st.lists(data_files, max_size=3).map(tuple)),
    st.builds(
        log.Commit, *head, ids, st.none() | definitions, st.none() | st.builds(log.Batch, texts, st.integers(0, 2**40))
    ),
    st.builds(log.Abort, *head, ids, texts),
    st.builds(log.Alter, *head, definitions),
)
scalars = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=4)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2))


@st.composite
def mutations(draw: st.DrawFn, texts: st.SearchStrategy[bytes]) -> bytes:
    """A valid file in which one value, somewhere, is another, or is gone."""
    found = json.loads(draw(texts))
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            walk(value[key])

    walk(found)
    within, key = draw(st.sampled_from(places))
    if draw(st.booleans()):
        within[key] = draw(values)
    else:
        del within[key]
    return json.dumps(found).encode()


@given(events_)
@settings(max_examples=300, deadline=None)
def test_events_round_trip(event: Event) -> None:
    """Each kind of event is read back as it was written, and at its own position only."""
    assert event_of(event_bytes(event), event.position, "x") == event
    with pytest.raises(errors.DamagedFileError, match="the-file"):
        event_of(event_bytes(event), event.position + 1, "the-file")


checkpoints = st.integers(0, 3).map(lambda commits: json.dumps(state_of(history("t", commits)).plain()).encode())
damaged = st.one_of(
    st.binary(max_size=60),
    st.tuples(events_.map(event_bytes) | checkpoints, st.integers(0, 400)).map(lambda cut: cut[0][: cut[1]]),
    mutations(events_.map(event_bytes)),
    mutations(checkpoints),
    values.map(lambda value: json.dumps(value).encode()),
)


@given(damaged, st.integers(1, 3))
@example(b"[" * 100_000, 1)
@example(b'{"format":' + b"9" * 5000, 1)
@example(b"\xff\xfe{}", 1)
@settings(max_examples=600, deadline=None)
def test_damage_is_told(data: bytes, position: int) -> None:
    """Random, truncated and altered bytes are an event or a checkpoint, or one of two errors that name the file."""
    for read in (lambda: event_of(data, position, "the-file"), lambda: TableState.of_bytes(data, "the-file")):
        try:
            read()
        except OURS as problem:
            assert "the-file" in str(problem)


@given(mutations(checkpoints))
@settings(max_examples=600, deadline=None)
def test_a_checkpoint_that_is_read_can_be_used(data: bytes) -> None:
    """Questions to a state that came from damaged bytes raise our errors, if any: the damage was found when it was read."""
    try:
        state = TableState.of_bytes(data, "x")
    except OURS:
        return
    for ask in (state.version, state.open_writes, state.plain, lambda: paths(state, state.valid_write_ids())):
        with contextlib.suppress(errors.PysparkLookupError):
            ask()


def test_later_formats() -> None:
    """An event or a checkpoint of a later format is refused by its number, with what to do."""
    for plain in (json.loads(event_bytes(history("t", 0)[0])), state_of(history("t", 1)).plain()):
        data = json.dumps({**plain, "format": 2}).encode()
        for read in (lambda data=data: event_of(data, 1, "x"), lambda data=data: TableState.of_bytes(data, "x")):
            with pytest.raises(errors.NotSupportedError, match=r"version 2.*newer pyspark_lookup"):
                read()


@pytest.mark.parametrize("path", ["../other/x", "a/../../x", "..", ".", "/etc/x", "", "a//x", "a/", "a/./x"])
def test_paths_that_leave_the_table(path: str) -> None:
    """No event and no checkpoint names a file outside its table."""
    event = log.Write(3, "t", "n", 0.0, 1, (DataFile(path, 1, 1),))
    with pytest.raises(errors.DamagedFileError, match="no path below"):
        event_of(event_bytes(event), 3, "x")
    state = state_of(history("t", 0)).advanced([Allocate(2, "t", "n", 0.0, 1, APPEND), event])
    with pytest.raises(errors.DamagedFileError, match="no path below"):
        TableState.of_bytes(json.dumps(state.plain()).encode(), "x")


# --- the state, against a model -------------------------------------------------------------------


class Model:
    """A table as a dict of what is visible: a commit adds its files, that of an overwrite first removes lower writes."""

    def __init__(self) -> None:
        self.high = 0
        self.open: dict[int, tuple[WriteMode, list[str]]] = {}
        self.aborted: set[int] = set()
        self.visible: dict[int, list[str]] = {}
        self.base = self.defined = 0

    def commit(self, id_: int) -> bool:
        mode, files = self.open[id_]
        if self.base > id_:
            return False
        del self.open[id_]
        if mode is OVERWRITE:
            self.visible = {other: kept for other, kept in self.visible.items() if other > id_}
            self.base = id_
        self.visible[id_] = files
        return True

    def seen(self) -> tuple[Any, ...]:
        """What two states have in common if, and only if, they are the same version."""
        return self.defined, self.base, tuple(self.files())

    def files(self) -> list[str]:
        return sorted(path for files in self.visible.values() for path in files)

    def ids(self) -> ValidWriteIdList:
        return ValidWriteIdList("t", self.high, self.open, self.aborted)


Made = tuple[TableState, list[tuple[LogVersion, tuple[Any, ...], list[str], ValidWriteIdList]]]


@st.composite
def models(draw: st.DrawFn) -> Made:
    """A state after some valid events, and for each position what was true when it was the last: version and model."""
    state, model = state_of(history("t", 0)), Model()
    found = [(state.version(), model.seen(), model.files(), model.ids())]
    for number in range(draw(st.integers(0, 14))):
        position, body = state.position + 1, (state.position + 1, "t", f"n{number}", float(number))
        chosen = draw(st.sampled_from(("allocate", "write", "commit", "commit", "abort", "alter")))
        id_ = draw(st.sampled_from(sorted(model.open))) if model.open else 0
        event: Event
        if chosen == "allocate" or (not id_ and chosen != "alter"):
            model.high += 1
            mode = draw(modes)
            model.open[model.high] = mode, []
            event = Allocate(*body, model.high, mode)
        elif chosen == "write":
            files = tuple(DataFile(f"{id_}/{position}-{n}", 1, 1) for n in range(draw(st.integers(0, 2))))
            model.open[id_][1].extend(file.path for file in files)
            event = log.Write(*body, id_, files)
        elif chosen == "commit":
            if not model.commit(id_):
                with pytest.raises(errors.WriteConflictError, match="replaced"):
                    state.check_open(id_)
                continue
            assert state.check_open(id_).id == id_
            event = log.Commit(*body, id_, None, log.Batch("q", id_) if draw(st.booleans()) else None)
        elif chosen == "abort":
            del model.open[id_]
            model.aborted.add(id_)
            event = log.Abort(*body, id_)
        else:
            model.defined = position
            event = log.Alter(*body, draw(st.sampled_from([DEFINITION, WIDER])))
        state = state.advanced([event_of(event_bytes(event), position, "x")])
        found.append((state.version(), model.seen(), model.files(), model.ids()))
    return state, found


@given(models())
@settings(max_examples=300, deadline=None)
def test_states_follow_the_model(made: Made) -> None:
    """At every past position a later state, also one from a checkpoint, says what was true when it was current.

    Two positions have one digest exactly if they have one definition and the same writes are seen.
    """
    last, found = made
    kept = TableState.of_bytes(json.dumps(last.plain()).encode(), "x")
    for state in (last, kept):
        assert (state.position, state.nonce, state.high_watermark) == (last.position, last.nonce, last.high_watermark)
        assert (state.open_writes(), state.batches, state.definition) == (last.open_writes(), last.batches, last.definition)  # fmt: skip
        for position, (version, _, files, valid) in enumerate(found, 1):
            assert state.valid_write_ids(position) == valid
            assert state.version(position) == version == LogVersion.of_plain(json.loads(json.dumps(version.plain())))
            assert paths(state, version.write_ids) == files
        for beyond in (0, last.position + 1):
            with pytest.raises(ValueError, match="log goes from 1"):
                state.version(beyond)
    event = Allocate(last.position + 1, "t", "n", 0.0, last.high_watermark + 1, OVERWRITE)
    assert kept.advanced([event]).plain() == last.advanced([event]).plain()
    assert kept.plain() == last.plain()  # advanced() makes another state
    for (one, seen, _, _), (other, also, _, _) in itertools.combinations(found, 2):
        assert (one.digest == other.digest) == (seen == also)


def test_commits_that_cannot_be() -> None:
    """A write that an overwrite has passed, or that has ended, is refused by name; a batch is committed once."""
    state = state_of(history("t", 1)).advanced(
        [Allocate(*at(5), 2, APPEND), Allocate(*at(6), 3, OVERWRITE), Allocate(*at(7), 4, APPEND)]
    )
    assert state.check_open(2).id == 2
    state = state.advanced([log.Commit(*at(8), 3, None, log.Batch("q", 7)), log.Abort(*at(9), 4)])
    for id_, says in ((2, "write 2 .*write 3"), (3, "committed already"), (4, "aborted"), (5, "write 5")):
        with pytest.raises(errors.WriteConflictError, match=says):
            state.check_open(id_)
    assert [state.is_committed(log.Batch(*batch)) for batch in (("q", 6), ("q", 7), ("q", 8), ("r", 0))] == [True, True, False, False]  # fmt: skip


def test_versions_by_lists() -> None:
    """A list says which version is read: of this table, not ahead of its log, without aborted writes."""
    state = state_of(history("t", 3)).advanced([Allocate(*at(11), 4, APPEND), log.Abort(*at(12), 4)])
    assert state.version_of(state.valid_write_ids()).digest == state.version().digest
    equivalent = ("t:2:9223372036854775807::", "t:3:3:3:", "t:4:3:3,4:", "t:4:9223372036854775807::3,4")
    versions = [state.version_of(ValidWriteIdList.parse(text)) for text in equivalent]
    assert {version.digest for version in versions} == {state.version(7).digest}
    assert [version.write_ids for version in versions] == list(equivalent)
    gap = ValidWriteIdList("t", 3, open=(2,))
    assert paths(state, gap) == ["w/1.parquet", "w/3.parquet"]
    assert state.version_of(gap).digest not in {state.version(at).digest for at in range(1, 13)}
    with pytest.raises(ValueError, match="not of this table"):
        state.version_of(ValidWriteIdList("u", 2))
    with pytest.raises(ValueError, match="ahead of the log"):
        state.version_of(ValidWriteIdList("t", 5))
    with pytest.raises(errors.VersionGoneError, match="write 4"):
        state.version_of(ValidWriteIdList("t", 4))


def test_events_that_contradict_the_log() -> None:
    """What cannot follow is damage: another table's, another position's, a second creation, ids that are not open."""
    state = state_of(history("t", 1))
    impossible: list[Event] = [
        Allocate(5, "u", "n", 0.0, 2, APPEND),
        Allocate(*at(6), 2, APPEND),
        Allocate(*at(4), 2, APPEND),
        Allocate(*at(5), 3, APPEND),
        Allocate(*at(5), 1, APPEND),
        log.Create(*at(5), DEFINITION),
        *(log.Write(*at(5), id_, ()) for id_ in (1, 2)),
        *(log.Commit(*at(5), id_) for id_ in (1, 2)),
        *(log.Abort(*at(5), id_) for id_ in (1, 2)),
    ]
    for event in impossible:
        with pytest.raises(errors.DamagedFileError):
            state.advanced([event])
    for first in (log.Alter(*at(1), DEFINITION), log.Create(*at(2), DEFINITION)):
        with pytest.raises(errors.DamagedFileError, match="the-file"):
            TableState.begun(first, "the-file")


# --- the log in a store ---------------------------------------------------------------------------


class Watched(FaultyStore):
    """A `FaultyStore` with the calls that managed tables make. `after` is run when a put has arrived."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.after: Callable[[], None] = lambda: None

    def list_files(self, path: str, after: str, at_most: int | None, count: Count) -> tuple[FileVersion, ...]:
        self._note("files", path)
        return self._inner.list_files(path, after, at_most, count)

    def delete(self, path: str, count: Count) -> None:
        self._note("delete", path)
        self._inner.delete(path, count)

    def put_if_absent(self, path: str, data: bytes, count: Count) -> bool:
        found = super().put_if_absent(path, data, count)
        self.after()
        return found


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a table may lie, and a way to it that is not ours."""

    path: str
    options: dict[str, Any]
    files: Any

    def name(self, position: int) -> str:
        return f"{self.path}/_lookup/log/{position:020d}.json"

    def names(self, under: str) -> list[str]:
        return sorted(f"{self.path}/_lookup/{under}/{name.rsplit('/')[-1]}" for name in self.files.find(f"{self.path}/_lookup/{under}"))  # fmt: skip

    def put(self, events: Iterable[Event]) -> None:
        """Put events as their writers would, at less cost."""
        for event in events:
            self.files.pipe_file(self.name(event.position), event_bytes(event))

    def drop(self) -> None:
        self.files.rm(self.path, recursive=True)

    def become(self, events: Iterable[Event]) -> None:
        self.drop()
        self.put(events)


@pytest.fixture
def disk_place(tmp_path: Path) -> Place:
    """A place without a table on this machine's disk."""
    return Place(str(tmp_path / "table"), {}, fsspec.filesystem("file", auto_mkdir=True))


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, disk_place: Place) -> Place:
    """A place without a table, in a store that has an exclusive create."""
    if request.param == "local":
        return disk_place
    server, bucket = request.getfixturevalue("s3"), f"logs-{next(_buckets)}"
    server.client.create_bucket(Bucket=bucket)
    options = {"endpoint_url": server.endpoint}
    return Place(f"s3://{bucket}/table", options, fsspec.filesystem("s3", use_listings_cache=False, **options))


class Process:
    """A process's log, over a store that fails when told and a host's cache directory."""

    def __init__(self, place: Place, cache_dir: Path, disk: type[Disk] = Disk, retries: int = 2) -> None:
        self.store = Watched(open_store(place.path, place.options, time.time))
        self.metrics = CacheMetricGroup()
        ufs = Ufs(self.store, self.metrics, retries, lambda seconds: None)
        self.disk = disk(cache_dir, 2**30, self.metrics, time.time, random.Random())
        rng = random.Random()
        self.log = log.NotificationLog(ufs, self.disk, self.metrics, FakeClock().host(), rng, ufs.url_of(place.path))

    def latest(self) -> TableState:
        state = self.log.latest()
        assert state is not None
        return state

    def allocate(self) -> TableState:
        return self.log.append(lambda s, nonce, at: Allocate(s.position + 1, s.table_id, nonce, at, s.high_watermark + 1, APPEND))  # fmt: skip

    def cost(self) -> dict[str, int]:
        """The store calls of `latest()`, by kind."""
        before = self.metrics.snapshot()
        self.latest()
        kinds = {kind: f"ufs{kind.title()}Count" for kind in ("head", "list", "get", "put", "delete")}
        after = self.metrics.snapshot()
        return {kind: after[name] - before[name] for kind, name in kinds.items() if after[name] != before[name]}


def failing(times: int, error: type[Exception]) -> Callable[..., None]:
    left = itertools.count()

    def fail(kind: str = "put", subject: object = None) -> None:
        if kind == "put" and next(left) < times:
            raise error("lost")

    return fail


def test_no_log(place: Place, cache_dir: Path) -> None:
    """Where nothing is there is no state, and nothing to append to; the first creation wins."""
    one, two = Process(place, cache_dir / "a"), Process(place, cache_dir / "b")
    assert one.log.latest() is None
    with pytest.raises(errors.UfsNotFoundError, match="no managed table"):
        one.allocate()
    made = one.log.create(lambda nonce, at: log.Create(1, "t", nonce, at, DEFINITION))
    assert made is not None
    assert two.log.create(lambda nonce, at: log.Create(1, "u", nonce, at, DEFINITION)) is None
    assert two.latest().plain() == made.plain() == one.latest().plain()


def test_racing_hosts(place: Place, cache_dir: Path) -> None:
    """Of two hosts' threads that append at once each position has one winner, and none is left out."""
    place.put(history("t", 0))
    hosts = [Process(place, cache_dir / name) for name in ("a", "a", "b", "b")]
    begin = threading.Barrier(len(hosts))

    def appends(host: Process) -> list[tuple[int, int]]:
        begin.wait(30)
        return [(state.position, state.high_watermark) for state in (host.allocate() for _ in range(10))]

    with concurrent.futures.ThreadPoolExecutor(len(hosts)) as pool:
        won = sorted(itertools.chain(*pool.map(appends, hosts)))
    assert won == [(position, position - 1) for position in range(2, 42)]
    states = [host.latest().plain() for host in (*hosts, Process(place, cache_dir / "c"))]
    assert all(state == states[0] for state in states)
    assert place.names("log") == [place.name(position) for position in range(1, 42)]


def test_lost_requests_and_answers_count_once(place: Place, cache_dir: Path) -> None:
    """A put that failed before or after it arrived is one event, whether an attempt or a look finds that out."""
    place.put(history("t", 0))
    host, other = Process(place, cache_dir / "a"), Process(place, cache_dir / "b")
    for times, error in ((1, errors.UfsTimeoutError), (2, errors.UfsUnavailableError)):
        host.store.before = failing(times, error)
        host.allocate()
    host.store.before = lambda kind, subject: None
    for times in (1, 2, 9):
        host.store.after = failing(times, errors.UfsTimeoutError)
        assert host.allocate().position == other.latest().position
    assert other.latest().high_watermark == 5


def test_commits_of_which_nothing_is_known(place: Place, cache_dir: Path) -> None:
    """A store that never answers is an error of its own that names the nonce; the event is there, or is not."""
    place.put(history("t", 0))
    host, other = Process(place, cache_dir / "a"), Process(place, cache_dir / "b")
    host.store.before = failing(9, errors.UfsUnavailableError)
    with pytest.raises(errors.CommitUnknownError, match="event 2"):
        host.allocate()
    assert other.latest().position == 1

    def silent(*call: object) -> None:
        raise errors.UfsTimeoutError("no answer")

    def arrived() -> None:
        host.store.before = silent
        silent()

    host.store.before, host.store.after = lambda kind, subject: None, arrived
    with pytest.raises(errors.CommitUnknownError, match="nonce") as problem:
        host.allocate()
    assert other.latest().position == 2
    assert other.latest().nonce in str(problem.value)
    host.store.before, host.store.after = lambda kind, subject: None, lambda: None
    assert host.allocate().position == 3


@pytest.mark.parametrize("commits", [10, 100])
def test_an_unchanged_log_costs_two_heads(place: Place, cache_dir: Path, commits: int) -> None:
    """However long it is, in the process that read it and in the next ones of its host."""
    place.put(history("t", commits))
    host = Process(place, cache_dir)
    host.latest()
    assert [host.cost(), host.cost()] == [{"head": 2}] * 2
    again = Process(place, cache_dir)
    assert again.log.known() is not None
    assert again.store.calls == []
    assert [again.cost(), again.cost()] == [{"head": 2}] * 2
    assert again.latest().plain() == state_of(history("t", commits)).plain()
    host.allocate()
    assert host.cost() == {"head": 2, "get": 1}  # what it put it has not seen lying there yet
    assert [host.cost(), Process(place, cache_dir).cost()] == [{"head": 2}] * 2


def long_log(place: Place, cache_dir: Path) -> TableState:
    """A log of 330 events with a checkpoint of the first 300."""
    events = history("t", 110)[:330]
    place.put(events[:299])
    Process(place, cache_dir / "writer").log.append(lambda state, nonce, at: events[state.position])
    place.put(events[300:])
    return state_of(events)


def test_reading_for_the_first_time(place: Place, cache_dir: Path) -> None:
    """A host that knows nothing reads a checkpoint and the events after it, not the whole log."""
    state = long_log(place, cache_dir)
    cold = Process(place, cache_dir / "cold")
    cost = cold.cost()
    assert cost["get"] <= 32
    assert sum(cost.values()) - cost["get"] <= 4
    assert cold.latest().plain() == state.plain()


def test_checkpoints_are_only_a_help(disk_place: Place, cache_dir: Path) -> None:
    """Without a checkpoint, or with a damaged one, the log is read from its beginning; not if it is of a later format."""
    state = long_log(disk_place, cache_dir)
    (name,) = disk_place.names("checkpoints")
    for damage in (b"{", b"[]", json.dumps(state.plain()).encode()[:-300]):
        disk_place.files.pipe_file(name, damage)
        assert Process(disk_place, cache_dir / f"{len(damage)}").latest().plain() == state.plain()
    disk_place.files.pipe_file(name, b'{"format": 2}')
    with pytest.raises(errors.NotSupportedError, match="format version 2"):
        Process(disk_place, cache_dir / "other").latest()
    disk_place.files.rm(name)
    assert Process(disk_place, cache_dir / "other").latest().plain() == state.plain()


def test_a_gap_is_damage(place: Place, cache_dir: Path) -> None:
    """A log that lacks an event is no log: the missing one is named."""
    place.put(history("t", 3))
    place.files.rm(place.name(7))
    with pytest.raises(errors.DamagedFileError, match="no event 7"):
        Process(place, cache_dir).latest()


@pytest.mark.parametrize("knows", ["process", "host"])
@pytest.mark.parametrize("commits", [1, 3, 6])
def test_a_table_that_was_recreated(place: Place, cache_dir: Path, commits: int, knows: str) -> None:
    """A table in the place of a dropped one is seen at once, with fewer, as many and more events."""
    place.put(history("t", 3))
    host = Process(place, cache_dir)
    assert host.latest().table_id == "t"
    place.become(history("u", commits))
    if knows == "host":
        host = Process(place, cache_dir)
        assert host.log.known() is not None
    assert host.latest().plain() == state_of(history("u", commits)).plain()
    assert host.cost() == {"head": 2}
    place.drop()
    assert host.log.latest() is None


@pytest.mark.parametrize("more", [0, 2])  # events that the host does not know yet
@pytest.mark.parametrize("commits", [1, 3, 6])
def test_a_table_recreated_between_two_questions(place: Place, cache_dir: Path, commits: int, more: int) -> None:
    """Whichever question it is recreated before, the answer is the new table."""
    old, new = history("t", 3), history("u", commits)
    for number in range(3 if more else 2):
        if number:
            place.drop()
        place.put(old[: 10 - more])
        host = Process(place, cache_dir / f"{number}")
        assert host.latest().position == 10 - more
        place.put(old[10 - more :])
        left = itertools.count()
        host.store.before = lambda kind, subject, left=left, number=number: place.become(new) if next(left) == number else None  # type: ignore[misc]  # fmt: skip
        assert host.latest().plain() == state_of(new).plain()
        assert Process(place, cache_dir / f"{number}").latest().plain() == state_of(new).plain()


class Paused(Disk):
    """A host's directory that runs `between` once, before it records how far the log is known."""

    between: Callable[[], object] | None = None

    def replace_record(self, kind: str, key: str, value: Any) -> None:
        between, self.between = (self.between, None) if kind == "log" else (None, self.between)
        if between is not None:
            between()
        super().replace_record(kind, key, value)


def test_a_writer_that_was_slow_to_remember(place: Place, cache_dir: Path) -> None:
    """What a process remembers of a dropped table, after others know the new one, is not taken for the new one."""
    place.put(history("t", 3))
    slow, other = Process(place, cache_dir, Paused), Process(place, cache_dir)
    slow.latest()
    new = history("u", 4)[:11]
    assert isinstance(slow.disk, Paused)
    slow.disk.between = lambda: (place.become(new), other.latest())
    assert slow.allocate().position == 11  # of the table that is dropped now
    assert other.latest().table_id == "u"
    assert Process(place, cache_dir).latest().plain() == state_of(new).plain()


def test_a_checkpoint_of_a_dropped_table(place: Place, cache_dir: Path) -> None:
    """A checkpoint that comes late, when its table has been dropped and created anew, says nothing of the new one."""
    events, new = history("t", 20), history("u", 5)
    place.put(events[:49])
    writer = Process(place, cache_dir / "a")
    writer.store.before = lambda kind, subject: place.become(new) if kind == "put" and "checkpoints" in str(subject) else None  # type: ignore[func-returns-value]  # fmt: skip
    writer.log.append(lambda state, nonce, at: events[state.position])
    assert place.names("checkpoints") != []
    assert Process(place, cache_dir / "b").latest().plain() == state_of(new).plain()


def test_a_table_that_was_moved(disk_place: Place, cache_dir: Path, tmp_path: Path) -> None:
    """Copies are read, with other file identities, where the table was and where it was not; they are told by what they say."""
    disk_place.put(history("t", 5))
    state = state_of(history("t", 5))
    assert Process(disk_place, cache_dir).latest().plain() == state.plain()
    shutil.copytree(disk_place.path, tmp_path / "copy")
    copy = dataclasses.replace(disk_place, path=str(tmp_path / "copy"))
    assert Process(copy, cache_dir).latest().plain() == state.plain()
    disk_place.drop()
    shutil.copytree(copy.path, disk_place.path)
    host = Process(disk_place, cache_dir)
    assert [host.cost(), host.cost()] == [{"head": 2, "get": 1}, {"head": 2}]
    assert host.latest().plain() == state.plain()
