"""A managed table's log: events as bytes, the state they add up to, and a log in a store under many writers."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import time
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup import errors
from pyspark_lookup.core.write_ids import ValidWriteIdList
from pyspark_lookup.sources.managed import log
from pyspark_lookup.sources.managed.log import Allocate, DataFile, Event, NotificationLog, TableState, WriteMode
from pyspark_lookup.sources.managed.log import state as properties
from pyspark_lookup.sources.managed.log.events import PAGE, event_bytes, parse_event, seal
from pyspark_lookup.sources.managed.log.log import parse_state, state_to_json
from pyspark_lookup.sources.managed.log.state import EarlierStateError
from pyspark_lookup.storage.stores import Store, open_store
from pyspark_lookup.versions.model import VersionMetadata
from tests.support.fakes import make_host
from tests.support.fuzzing import by_day, fuzzed

APPEND, OVERWRITE = WriteMode.APPEND, WriteMode.OVERWRITE
DEFINITION = log.Definition(pa.schema([("id", pa.int64()), ("name", pa.string())]), ("id",), {"a": "b"})
WIDER = log.Definition(pa.schema([*DEFINITION.schema, pa.field("x", pa.list_(pa.float64()))]), ("id",))
HEADS = {"ufsHeadCount": 2}  # what it costs to find nothing new
EXPECTED_ERRORS = (errors.DamagedFileError, errors.NotSupportedError)
_buckets = itertools.count()


def make_head(position: int, table_id: str = "t") -> tuple[int, str, str, float]:
    """The fields that each event begins with."""
    return position, table_id, f"{table_id}-{position}", float(position)


def history(table_id: str, commits: int) -> list[Event]:
    """The events of a table and so many appends of a file each: 1 + 3 per commit."""
    events: list[Event] = [log.Create(*make_head(1, table_id), DEFINITION)]
    for id_ in range(1, commits + 1):
        events.append(Allocate(*make_head(len(events) + 1, table_id), id_, APPEND))
        events.append(log.Write(*make_head(len(events) + 1, table_id), id_, (DataFile(f"w/{id_}.parquet", 10, 2),)))
        events.append(log.Commit(*make_head(len(events) + 1, table_id), id_))
    return events


def later_bytes(event: Event, more: Mapping[str, Any] = types.MappingProxyType({"hidden": []})) -> bytes:
    """An event as a later release may write it."""
    fields = json.loads(event_bytes(event))
    del fields["crc"]
    return seal({**fields, **more})


def build_state(events: Iterable[Event], page: int = PAGE) -> TableState:
    first, *more = events
    assert isinstance(first, log.Create)
    return TableState.begin(dataclasses.replace(first, page=page), "a test").advance(more)


def paths(state: TableState, write_ids: ValidWriteIdList | str) -> list[str]:
    return sorted(entry[0].path for entry in state.files(ValidWriteIdList.parse(str(write_ids))))


texts = st.text(max_size=8)
ids = st.integers(1, 2**40)
letters = st.characters(min_codepoint=32, exclude_characters="/\\%", exclude_categories=["Cs"])
names = st.text(letters, min_size=1, max_size=8).filter(lambda text: text not in (".", ".."))
data_files = st.builds(DataFile, st.lists(names, min_size=1, max_size=3).map("/".join), st.integers(0, 2**50), ids)
kinds = st.sampled_from([DEFINITION, WIDER, log.Definition(pa.schema([("ä\n", pa.decimal128(9, 2))]), ())])
definitions = st.builds(dataclasses.replace, kinds, properties=st.dictionaries(texts, texts, max_size=2))
batches = st.builds(log.Batch, texts, st.integers(0, 2**40))
head = (ids, texts.filter(bool), texts, st.floats(allow_nan=False, allow_infinity=False))
modes = st.sampled_from(WriteMode)
events_ = st.one_of(
    st.builds(log.Create, *head, definitions),
    st.builds(Allocate, *head, ids, modes),
    st.builds(log.Write, *head, ids, st.lists(data_files, max_size=3).map(tuple)),
    st.builds(log.Commit, *head, ids, st.none() | definitions, st.none() | batches),
    st.builds(log.Abort, *head, ids, texts),
)


@given(events_, st.data())
@fuzzed(150)
def test_events_round_trip(event: Event, data: st.DataObject) -> None:
    """Each kind of event is read back as it was written, at its own position only; a later format and any flipped bit are told."""
    assert parse_event(event_bytes(event), event.position, "x") == event
    with pytest.raises(errors.NotSupportedError, match=r"the-file .*version 2.*newer pyspark_lookup"):
        parse_event(event_bytes(event).replace(b'"format":1', b'"format":2', 1), event.position, "the-file")
    with pytest.raises(errors.DamagedFileError, match="the-file"):
        parse_event(event_bytes(event), event.position + 1, "the-file")
    modes = [{"mode": "hidden"}] if isinstance(event, Allocate) else []
    for more in ({"hidden": []}, {"kind": "hidden"}, *modes):  # of a later release: what it says would be ignored
        with pytest.raises(errors.NotSupportedError, match=r"the-file .*'hidden'.*newer pyspark_lookup"):
            parse_event(later_bytes(event, more), event.position, "the-file")
    blob = bytearray(event_bytes(event))
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    # Also where what is left is an event: of another write, with other files.
    with pytest.raises(EXPECTED_ERRORS, match="the-file"):
        parse_event(bytes(blob), event.position, "the-file")


LEAVING = ["../x", "..", ".", "/etc/x", "", "a//x", "a/./x", "%2e%2e/x", "a%2F..%2fx", "a\\..\\x", "a\0b", "\ud800"]


def test_paths_that_leave_the_table() -> None:
    """No event and no checkpoint names a file outside its table."""
    for path in LEAVING:
        event = log.Write(3, "t", "n", 0.0, 1, (DataFile(path, 1, 1),))
        state = build_state(history("t", 0)).advance([Allocate(2, "t", "n", 0.0, 1, APPEND), event])
        with pytest.raises(errors.DamagedFileError, match="not a path below"):
            parse_event(event_bytes(event), 3, "x")
        with pytest.raises(errors.DamagedFileError, match="not a path below"):
            parse_state(seal(state_to_json(state)), "x")


def model(commits: list[tuple[int, WriteMode, list[str]]]) -> tuple[int, list[str]]:
    """The last overwrite and the visible files after commits in this order, each of which may remove what lower ids wrote."""
    base, visible = 0, dict[int, list[str]]()
    for id_, mode, files in commits:
        if mode is OVERWRITE:
            base, visible = id_, {number: names for number, names in visible.items() if number > id_}
        visible[id_] = files
    return base, sorted(itertools.chain(*visible.values()))


Truth = tuple[TableState, VersionMetadata, Any, ValidWriteIdList]


@st.composite
def models(draw: st.DrawFn) -> list[Truth]:
    """The states after each of some valid events, with what was true then: the version, and the model's."""
    page = draw(st.sampled_from((2, 3, 5, 1000)))
    state = build_state(history("t", 0), page)
    opened: dict[int, tuple[WriteMode, list[str]]] = {}
    aborted: dict[int, int] = {}
    commits: list[tuple[int, WriteMode, list[str]]] = []
    high, defined = 0, 1
    truths: list[Truth] = [(state, state.version(), (defined, *model(commits)), ValidWriteIdList("t", 0))]
    for _ in range(draw(st.integers(0, 20))):
        position = state.position + 1
        kind = draw(st.sampled_from(("allocate", "write", "commit", "commit", "abort", "foreign")))
        id_ = draw(st.sampled_from(sorted(opened))) if opened else 0
        event: Event
        if kind == "foreign":  # of a slow writer of a dropped table: it takes up a position, no more
            event = Allocate(*make_head(position, "u"), high + 5, APPEND)
        elif kind == "allocate" or not id_:
            high += 1
            opened[high] = draw(modes), []
            event = Allocate(*make_head(position), high, opened[high][0])
        elif kind == "write" and opened[id_][0] is not WriteMode.ALTER:  # which has no files
            files = tuple(DataFile(f"{id_}/{position}-{n}", 1, 1) for n in range(draw(st.integers(0, 2))))
            opened[id_][1].extend(file.path for file in files)
            event = log.Write(*make_head(position), id_, files)
        elif kind == "abort":
            del opened[id_]
            aborted[id_] = position
            event = log.Abort(*make_head(position), id_)
        elif opened[id_][0] is OVERWRITE and any(mode.by_key and later > id_ for later, mode, _ in commits):
            with pytest.raises(errors.WriteConflictError, match="by key"):
                state.check_open(id_)
            continue
        elif model(commits)[0] > id_ and opened[id_][0] is not WriteMode.ALTER:
            with pytest.raises(errors.WriteConflictError, match="replaced"):
                state.check_open(id_)
            continue
        else:
            assert state.check_open(id_).id == id_
            definition = draw(st.sampled_from((None, DEFINITION, WIDER)))
            defined = defined if definition is None else position
            commits.append((id_, *opened.pop(id_)))
            event = log.Commit(
                *make_head(position), id_, definition, log.Batch("q", id_) if draw(st.booleans()) else None
            )
        state = state.advance([parse_event(event_bytes(event), position, "x")])
        recent = [id_ for id_, ended in aborted.items() if ended > position // page * page]
        valid = ValidWriteIdList("t", high, opened, recent)
        truths.append((state, state.version(), (defined, *model(commits)), valid))
    return truths


@given(models())
@fuzzed(150)
def test_states_follow_the_model(truths: list[Truth]) -> None:
    """Each state that answers for a position says what was true then, and holds no more than two pages and what its versions need."""
    last = truths[-1][0]
    decoded = parse_state(seal(state_to_json(last)), "x")
    assert (decoded.position, decoded.nonce, decoded.high_watermark) == (last.position, last.nonce, last.high_watermark)
    assert (decoded.open_writes(), decoded.batches, decoded.definition) == (
        last.open_writes(),
        last.batches,
        last.definition,
    )
    event = Allocate(last.position + 1, "t", "n", 0.0, last.high_watermark + 1, OVERWRITE)
    assert state_to_json(decoded.advance([event])) == state_to_json(last.advance([event]))
    assert state_to_json(decoded) == state_to_json(last)  # advance() makes another state
    for state in (decoded, *(state for state, *_ in truths)):
        for position, (_, version, (*_, files), valid) in enumerate(truths[: state.position], 1):
            if position < state.since:
                with pytest.raises(EarlierStateError):
                    state.version(position)
                continue
            assert state.valid_write_ids(position) == valid
            assert state.version(position) == version
            assert VersionMetadata.from_json(json.loads(json.dumps(version.to_json()))) == version
            assert paths(state, version.state) == files
            if version.state == str(valid):
                assert state.resolve_version(valid).digest == version.digest
        with pytest.raises(ValueError, match="there is no version"):
            state.version(state.position + 1)
        assert state.since == max(state.position // state.page - 1, 0) * state.page
    for (_, first, truth, _), (_, second, second_truth, _) in itertools.combinations(truths, 2):
        assert (first.digest == second.digest) == (truth == second_truth)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a table may lie, and a way to it that is not ours."""

    path: str
    store: Store
    files: Any

    def name(self, position: int) -> str:
        return f"{self.path}/_lookup/log/{position:020d}.json"

    def names(self, under: str) -> list[str]:
        return sorted(f"{self.path}/_lookup/{under}/{name.rsplit('/')[-1]}" for name in self.files.find(f"{self.path}/_lookup/{under}"))  # fmt: skip

    def write_events(self, events: Iterable[Event]) -> None:
        """Put events as their writers would, at less cost."""
        self.files.pipe({self.name(event.position): event_bytes(event) for event in events})

    def drop(self) -> None:
        self.files.rm(self.path, recursive=True)

    def become(self, events: Iterable[Event]) -> None:
        self.drop()
        self.write_events(events)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.nightly)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place without a table, in a store that has an exclusive create."""
    if request.param == "local":
        path = str(tmp_path / "table")
        return Place(path, open_store(path, {}, time.time), fsspec.filesystem("file", auto_mkdir=True))
    server, path = request.getfixturevalue("s3"), f"s3://logs-{next(_buckets)}/table"
    server.client.create_bucket(Bucket=path.split("/")[2])
    options = {"endpoint_url": server.endpoint}
    files = fsspec.filesystem("s3", use_listings_cache=False, **options)
    return Place(path, open_store(path, options, time.time), files)


class Process:
    """A process's log, over a store that fails when told and a host's cache directory."""

    def __init__(self, place: Place, cache_dir: Path) -> None:
        host = make_host(place.path, cache_dir, max_retries=2, opened=place.store)
        self.store, self.disk, self.metrics = host.store, host.disk, host.metrics
        self.log = host.managed.log(host.ufs.url_of(place.path))

    def latest(self) -> TableState:
        return self.log.latest()

    def allocate(self) -> TableState:
        return self.log.append(lambda s, nonce, at: Allocate(s.position + 1, s.table_id, nonce, at, s.high_watermark + 1, APPEND))  # fmt: skip

    def cost(self) -> dict[str, int]:
        """The store calls of `latest()`, by their counters' names."""
        before = collections.Counter(self.metrics.snapshot())
        self.latest()
        spent = collections.Counter(self.metrics.snapshot()) - before
        return {name: spent[name] for name in spent if name.startswith("ufs") and name.endswith("Count")}


def test_pages_and_their_trimming(place: Place, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every position and list of write ids means to a new host what it meant then, until a commit trims what no kept version needs."""
    events = [log.Create(*make_head(1), DEFINITION, page=8), *history("t", 20)[1:]]
    events += [
        Allocate(*make_head(62), 21, OVERWRITE),
        log.Vacuum(*make_head(63), (), 35),
        log.Commit(*make_head(64), 21),
    ]
    places: list[Process] = []

    def opened(name: str) -> tuple[NotificationLog, TableState]:
        places.append(Process(place, cache_dir / name))
        return places[-1].log, places[-1].latest()

    def check(name: str, first: int) -> None:
        log_, state = opened(name)
        # Each answer takes a few requests: on S3 only every seventh position is checked.
        for position in range(1, state.position + 1, 7 if place.path.startswith("s3:") else 1):
            if position < first:
                with pytest.raises(errors.VersionGoneError, match="was trimmed"):
                    log_.pages.find_state(state, position)
                continue
            expected = build_state(events[:position])
            earlier = log_.pages.find_state(state, position)
            assert earlier.version(position).digest == expected.version().digest
            valid = earlier.valid_write_ids(position)
            resolved = log_.pages.find_state_by_write_ids(state, valid).resolve_version(valid)
            assert resolved.digest == expected.version().digest
        changes = [change.position for _, change in log_.pages.changes(state, max(first - 1, 0), state.position)]
        latest = build_state(events[: state.position])
        assert changes == [change.position for change in latest.changes if change.position >= first]

    place.write_events(events[:1])
    writer, state = opened("writer")
    while state.position < len(events) - 1:
        state = writer.append(lambda state, nonce, at: events[state.position])
    assert (state.since, len(state.writes)) == (48, 21)
    check("all", 1)
    place.files.rm(place.names("checkpoints")[-2])
    check("without one", 1)
    assert writer.pages.trim(state, 0.0) == 0
    monkeypatch.setattr(properties, "KEPT_S", -86400.0)
    writer.append(lambda state, nonce, at: events[state.position])
    assert place.names("log") == [place.name(at) for at in (1, *range(33, 65))]
    check("trimmed", 33)
    assert writer.append(lambda state, nonce, at: Allocate(65, "t", "n", 0.0, 22, APPEND)).high_watermark == 22


def test_an_append_that_an_overwrite_has_passed() -> None:
    """Nobody would see its rows, so it may not be committed."""
    events = history("t", 0)
    events.append(Allocate(*make_head(2), 1, APPEND))
    events.append(Allocate(*make_head(3), 2, WriteMode.OVERWRITE))
    assert build_state(events).check_open(1).mode is APPEND
    events.append(log.Write(*make_head(4), 2, ()))
    events.append(log.Commit(*make_head(5), 2))
    with pytest.raises(
        errors.WriteConflictError, match=r"write 1 began before write 2, which has replaced the table's rows"
    ):
        build_state(events).check_open(1)


@pytest.mark.parametrize("place", ["local", "s3"], indirect=True)
def test_racing_hosts(place: Place, cache_dir: Path) -> None:
    """Of hosts that create a log one does; of two hosts' threads that append at once each position has one winner, none is left out."""
    hosts = [Process(place, cache_dir / name) for name in ("a", "a", "b", "b")]
    assert hosts[0].log.latest() is None
    with pytest.raises(errors.UfsNotFoundError, match=r"not \(or no longer\) a managed table"):
        hosts[0].allocate()
    with concurrent.futures.ThreadPoolExecutor(len(hosts)) as pool:
        created = pool.map(lambda h: h.log.create(lambda nonce, at: log.Create(1, "t", nonce, at, DEFINITION)), hosts)
        assert sum(state is not None for state in created) == 1
        states = list(itertools.chain(*pool.map(lambda host: [host.allocate() for _ in range(2)], hosts)))
    assert sorted((s.position, s.high_watermark) for s in states) == [(at, at - 1) for at in range(2, 10)]
    assert place.names("log") == [place.name(at) for at in range(1, 10)]
    assert len({json.dumps(state_to_json(host.latest())) for host in [*hosts, Process(place, cache_dir / "c")]}) == 1


def test_commits_of_which_nothing_is_known(place: Place, cache_dir: Path) -> None:
    """A store that never answers is an error of its own that names the nonce; the event is there, or is not."""
    place.write_events(history("t", 0))
    host, observer = Process(place, cache_dir / "a"), Process(place, cache_dir / "b")

    def refuse(kind: str, subject: object) -> None:
        if kind == "put":
            raise errors.UfsUnavailableError("lost")

    def silent(*_: object) -> None:
        host.store.before = silent
        raise errors.UfsTimeoutError("no answer")

    host.store.before = refuse
    with pytest.raises(errors.CommitUnknownError, match="event 2"):
        host.allocate()
    assert observer.latest().position == 1
    host.store.before, host.store.after = lambda kind, subject: None, silent
    with pytest.raises(errors.CommitUnknownError, match="look there before you write again") as problem:
        host.allocate()
    assert (observer.latest().position, observer.latest().nonce in str(problem.value)) == (2, True)


def test_a_long_log(place: Place, cache_dir: Path) -> None:
    """A host that knows nothing reads a checkpoint and the events after it; the whole log if that is gone (damage: `test_fuzz`)."""
    events = history("t", 110)[:330]
    place.write_events(events[:299])
    Process(place, cache_dir / "writer").log.append(lambda state, nonce, at: events[state.position])
    place.write_events(events[300:])
    cold, plain = Process(place, cache_dir / "cold"), state_to_json(build_state(events))
    cost = cold.cost()
    assert (cost["ufsGetCount"] <= 32, sum(cost.values()) <= 36) == (True, True)
    assert state_to_json(cold.latest()) == plain
    warm = Process(place, cache_dir / "cold")
    assert (warm.log.cached_state() is not None, warm.store.calls) == (True, [])
    assert [host.cost() for host in (cold, warm, warm)] == [HEADS] * 3  # however long it is
    assert state_to_json(warm.latest()) == plain
    (name,) = place.names("checkpoints")
    place.files.rm(name)
    assert state_to_json(Process(place, cache_dir / "without").latest()) == plain
    place.files.rm(place.name(7))
    with pytest.raises(errors.DamagedFileError, match="lacks event 7"):
        Process(place, cache_dir / "gap").latest()


@pytest.mark.parametrize(
    ("commits", "knows"), by_day([(n, knows) for n in (1, 2, 3) for knows in ("process", "host")], 3)
)
def test_a_table_that_was_recreated(place: Place, cache_dir: Path, commits: int, knows: str) -> None:
    """Whichever question the table is recreated before, with fewer, as many or more events, the answer is the new table."""
    old, new = history("t", 2), history("u", commits)
    for count, question in ((7, 0), (7, 1), (5, 0), (5, 1), (5, 2)):
        place.write_events(old[:count])
        reader, host = (Process(place, cache_dir / f"{count}-{question}") for _ in range(2))
        assert reader.latest().position == count
        host = host if knows == "host" else reader
        place.write_events(old[count:])
        questions = itertools.count()
        host.store.before = lambda kind, subject, questions=questions, question=question: place.become(new) if next(questions) == question else None  # type: ignore[misc]  # fmt: skip
        assert state_to_json(host.latest()) == state_to_json(build_state(new))
        assert [host.cost(), Process(place, cache_dir / f"{count}-{question}").cost()] == [HEADS, HEADS]
        place.drop()
        assert host.log.latest() is None


def test_a_later_release_beside_this_one(place: Place, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the host's record of the log has what this release does not know, the store is asked. If the log has it, the error advises no loss."""
    events = history("t", 2)
    place.write_events(events[:5])
    other = Process(place, cache_dir)
    assert other.latest().position == 5
    place.write_events(events[5:])
    with monkeypatch.context() as later:
        later.setattr("pyspark_lookup.sources.managed.log.log.event_bytes", later_bytes)
        assert other.latest().position == 7
    assert state_to_json(Process(place, cache_dir).latest()) == state_to_json(build_state(events))
    place.files.pipe({place.name(7): later_bytes(events[6])})
    with pytest.raises(
        errors.DamagedFileError, match=r"0007\.json has the field 'hidden'.*: use a newer pyspark_lookup$"
    ):
        Process(place, cache_dir / "other").latest()
    place.files.pipe({f"{place.path}/_lookup/checkpoints/{10**20 - 7:020d}.json": b'{"format":2}'})
    with pytest.raises(errors.NotSupportedError, match="format version 2, and this release reads 1 at most"):
        Process(place, cache_dir / "third").latest()


def test_a_writer_that_was_slow_to_remember(place: Place, cache_dir: Path) -> None:
    """A state of a dropped table that a process records after others know the new one is not taken for the new one."""
    place.write_events(history("t", 3))
    slow, observer, new = Process(place, cache_dir), Process(place, cache_dir), history("u", 4)[:11]
    slow.latest()
    plain = slow.disk.replace_record

    def replace_late(kind: str, key: str, value: Any) -> None:
        slow.disk.replace_record = plain  # type: ignore[method-assign]
        place.become(new)
        assert observer.latest().table_id == "u"
        plain(kind, key, value)

    slow.disk.replace_record = replace_late  # type: ignore[method-assign]
    assert slow.allocate().position == 11  # of the table that is dropped now
    for host in (Process(place, cache_dir), observer, slow):
        assert state_to_json(host.latest()) == state_to_json(build_state(new))


@pytest.mark.parametrize("name", ["log", "checkpoints"])
def test_a_table_recreated_under_an_append(place: Place, cache_dir: Path, name: str) -> None:
    """An append, or a checkpoint, that was slow does the table in the place of its own no harm, and nobody goes on with the old one."""
    events, new = history("t", 20), history("u", 5)
    place.write_events(events[:49])
    writer = Process(place, cache_dir / "a")
    writer.store.before = lambda kind, subject: place.become(new) if kind == "put" and name in str(subject) else None
    with contextlib.suppress(errors.PysparkLookupError):
        writer.log.append(lambda state, nonce, at: events[state.position])
    state = Process(place, cache_dir / "b").latest()
    if name == "log":
        assert [state.table_id, writer.latest().table_id] == ["u", "u"]
    else:
        assert state_to_json(state) == state_to_json(build_state(new))
