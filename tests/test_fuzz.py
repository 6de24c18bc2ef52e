"""Everything that is read from a disk or a store, damaged: the right answer, an error of ours, or a counted miss. LOOKUPCACHE_FUZZ=100: more."""

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import pickle
import random
import re
import shutil
import struct
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import StringType, StructField, StructType

from pyspark_lookup import LookupTable
from pyspark_lookup.cache.full.schedule import make_trigger
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.core.write_ids import ValidWriteIdList
from pyspark_lookup.errors import DamagedFileError, OptionError, PredicateError, PysparkLookupError
from pyspark_lookup.lookup.catalog_tables import OPTIONS_METADATA, table_options
from pyspark_lookup.lookup.lookup import get_many
from pyspark_lookup.lookup.read import ReadTask
from pyspark_lookup.lookup.version_token import VersionToken, version_of_token
from pyspark_lookup.options.conf_file import conf_file_options, conf_file_secrets
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.table_scan import matching_rows
from pyspark_lookup.sources.managed.change_feed import change_columns, changes_between, cost, plan_snapshot
from pyspark_lookup.sources.managed.log.events import seal
from pyspark_lookup.sources.managed.log.log import parse_state, state_to_json
from pyspark_lookup.sources.managed.source import managed_version, read_version
from pyspark_lookup.sources.managed.writer import Heartbeats
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.spark.change_stream import ChangeReader
from pyspark_lookup.spark.source import DefaultSource
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.disk.directory import HEADER_BYTES, wrap
from pyspark_lookup.storage.host_metrics import Publisher
from pyspark_lookup.versions.host_versions import HostVersions
from pyspark_lookup.versions.model import PATH, ROW, DeleteFile, delete_file_bytes, distinct_places
from tests.support.disks import Opened, key, random_data
from tests.support.fakes import FakeClock, Host, make_host
from tests.support.full_cache import publish
from tests.support.fuzzing import altered, by_day, damaged, fuzzed, make_home, memory_at_most, misspelled
from tests.support.sparks import DATA_SOURCES

pytestmark = pytest.mark.timeout(600 * int(os.environ.get("LOOKUPCACHE_FUZZ", "1")))  # a hang ends here


@given(st.data())
@fuzzed(60)
def test_a_damaged_block_or_record_is_a_miss(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever became of its file, a read gives what was put, or nothing, which is counted; a block's file is gone, a record can be made anew."""
    opened = Opened(tmp_path_factory.mktemp("cache"))
    opened.disk.put_blocks({key(1): random_data(1), key(2): random_data(2)})
    for name in ("one", "two"):
        opened.disk.create_record("table", name, {"digest": name, "n": [1, 2.5, None]})
    for path, other in (
        (opened.path(key(1)), opened.path(key(2))),
        (opened.root / "records/table/one", opened.root / "records/table/two"),
    ):
        path.write_bytes(data.draw(damaged(path.read_bytes(), [other.read_bytes()])))
    with memory_at_most():
        assert opened.disk.get_block(key(1)) is opened.disk.get_record("table", "one") is None
    assert (opened.count("blockDamagedCount"), opened.count("cacheFailureCount")) == (1, 1)
    assert not opened.path(key(1)).exists()
    assert opened.disk.get_block(key(2)) == random_data(2)
    assert opened.disk.create_record("table", "one", 7) == opened.disk.get_record("table", "one") == 7


def at_once(name: str, run: Callable[[], None]) -> None:
    """Loads run in the caller. Schedules do not run."""
    if "-schedule-" not in name:
        run()


@dataclasses.dataclass(frozen=True)
class World:
    """A table, the options of a read, and the cache directory of a host that has read it several times."""

    path: Path
    options: Mapping[str, str]
    cache: Path
    rows: pa.Table

    def host(self, cache: Path, at_s: float = 5_000_000_000.0) -> Host:
        return make_host(str(self.path), cache, FakeClock(at_s), start=at_once)

    def parsed(self) -> LookupOptions:
        return parse_options({"path": str(self.path), "lookup.keys": "id", **self.options})

    def read(self, cache: Path, at_s: float = 5_000_000_000.0) -> pa.Table:
        """The rows that a new process of that host reads, by a scan and by their keys."""
        host, options = self.host(cache, at_s), self.parsed()
        for _ in range(2):  # the second read uses what the first has repaired
            resolved, plan = host.plan(options)
            columns = plan.projection.columns
            scanned = pa.Table.from_batches(list(host.reader.read(plan, ReadTask(0, 1), None)), columns).sort_by("id")
            keys = pa.table({"id": pa.array([*self.rows["id"].to_pylist(), -5, None], pa.int64())})
            by_key = get_many(host.reader, plan, keys, ["id"], None).select(columns.names)
            asked_for = scanned.filter(pc.is_in(scanned["id"], keys["id"].drop_null()))
            assert in_order(by_key).equals(in_order(asked_for))
        table = resolved.table
        host.resolver.host.known_versions(options)
        host.resolver.host.floor(table.url)
        publisher = Publisher(host.metrics, host.disk, key_of(table.scope, table.url), table.url, host.clock.host())
        publisher.publish()
        publisher.host_total()
        Heartbeats(
            host.ufs, HostContext(host.disk, host.metrics, host.clock.host(), random.Random(7)), table.url, 1000.0
        ).dead("t", [1])
        host.disk.sweep()
        return scanned


def in_order(rows: pa.Table) -> pa.Table:
    return rows.sort_by([(name, "ascending") for name in rows.column_names]).combine_chunks()


CACHED = {"lookup.metadata.source": "CACHE"}
FULL = {"lookup.cache": "FULL"}
RELOADED = {**FULL, **CACHED, "lookup.full-cache.periodic-reload.interval": "1 h"}
PARTIAL = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000"}
READS: dict[str, dict[str, str]] = {
    "none": {}, "cached": {**CACHED, "lookup.metadata.sync-interval": "-1"}, "full": FULL, "reloaded": RELOADED,
    "partial": PARTIAL, "partial cached": {**PARTIAL, **CACHED, "lookup.metadata.sync-interval": "-1"},
}  # fmt: skip


@functools.cache
def _home() -> Path:
    return make_home()


@functools.cache
def world(kind: str, name: str) -> World:
    """A table, and the cache of a host that has read two states of it several times."""
    home = _home() / f"{kind}-{name}".replace(" ", "-")
    current = World(home / "dim", READS[name], home / "cache", pa.table({"id": pa.array([], pa.int64())}))
    changes = files_changed(current.path) if kind == "files" else log_changed(current.path, home / "writer")
    for number, rows in enumerate(changes):
        current = dataclasses.replace(current, rows=rows)
        # With CACHE a host is to learn of the state now.
        learning = dataclasses.replace(current, options={k: v for k, v in current.options.items() if k not in CACHED and "sync" not in k and "reload" not in k})  # fmt: skip
        for reader in (learning, current):
            for attempt in range(2):
                at_s = 4_500_000_000.0 + 10_000 * number + attempt
                if "reloaded" in name and reader is current:
                    reload(current, at_s)
                reader.read(current.cache, at_s)
    assert current.read(current.cache).equals(current.rows)
    return current


def reload(current: World, at_s: float) -> None:
    host = current.host(current.cache, at_s)
    table, _ = host.resolver.discover(current.parsed())
    full = host.reader.fulls.get_cache(table, current.parsed())
    full.reload()


def files_changed(path: Path) -> Iterator[pa.Table]:
    """Two states of a table of files. One file differs."""
    for version in (1, 2):
        for number in range(3) if version == 1 else (2,):
            publish(path, number, version, 20)
            os.utime(path / f"{number}.parquet", (version * 1e9, version * 1e9))
        yield pa.concat_tables([pq.read_table(path / f"{n}.parquet") for n in range(3)]).sort_by("id").combine_chunks()


def log_changed(path: Path, cache: Path) -> Iterator[pa.Table]:
    """Two states of a managed table: many writes, and some by key and a fold after them."""
    options = {"lookup.cache.dir": str(cache), "lookup.keys": "id", "lookup.write.compact-after": "0"}
    table = LookupTable(str(path), options)
    for number in range(18):
        table.write(pa.table({"id": range(number * 5, number * 5 + 5), "text": [f"t{number}"] * 5}))
    yield table.scan().sort_by("id").combine_chunks()
    table.compact()
    table.upsert(pa.table({"id": [3, 500], "text": ["new", "newer"]}))
    table.delete(pa.table({"id": pa.array([7, 8], pa.int64())}))
    yield table.scan().sort_by("id").combine_chunks()


@contextlib.contextmanager
def copied(directory: Path) -> Iterator[Path]:
    """A private copy to damage, with room for a cache directory beside it."""
    with tempfile.TemporaryDirectory() as home:
        yield Path(shutil.copytree(directory, Path(home) / "copy"))


def damage_one(data: st.DataObject, paths: list[Path]) -> Path:
    """Damage one of the files. Parts of it, or all, may come from another file. Returns its path."""
    path, other_path = (data.draw(st.sampled_from(paths)) for _ in range(2))
    path.write_bytes(
        data.draw(damaged(path.read_bytes(), [other_path.read_bytes()]) | st.just(other_path.read_bytes()))
    )
    return path


each_world = pytest.mark.parametrize(
    ("kind", "name"), by_day(((k, name) for name in READS for k in ("files", "log")), 3)
)


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and path.parent.name not in ("locks", "tmp"))


def restated(path: Path, alter: Callable[[Any], Any]) -> None:
    """Alter a record, the head of counters or the foot of a segment, with a checksum that fits."""
    blob = path.read_bytes()
    if path.parts[-3] == "records" or path.parts[-2] == "counters":
        end = HEADER_BYTES + int.from_bytes(blob[8:16], "little")
        payload = json.dumps(alter(json.loads(blob[HEADER_BYTES:end]))).encode()
        path.write_bytes(wrap(payload, f"{path.parent.name}/{path.name}") + blob[end:])
    else:
        (length,) = struct.unpack_from("<Q", blob, len(blob) - 20)
        payload = json.dumps(alter(json.loads(blob[-20 - length : -20]))).encode()
        foot = struct.pack("<QI8s", len(payload), zlib.crc32(payload), b"LKUPSEG1")
        path.write_bytes(blob[: -20 - length] + payload + foot)


@each_world
@given(data=st.data(), sound=st.booleans())
@fuzzed(12)
def test_a_damaged_cache_costs_no_row(kind: str, name: str, data: st.DataObject, sound: bool) -> None:
    """Whatever became of a file of a host's cache, the rows are right; a sound file that says what it could not may also be an error of ours."""
    made = world(kind, name)
    with copied(made.cache) as cache:
        if sound:
            places = [path for path in files_of(cache) if {"records", "snapshots", "counters"} & set(path.parts)]
            path = data.draw(st.sampled_from([path for path in places if path.suffix != ".used"]))
            restated(path, lambda value: data.draw(altered(value)))
        else:
            damage_one(data, files_of(cache))
        with memory_at_most(), contextlib.suppress(*[PysparkLookupError] * sound):
            assert made.read(cache).equals(made.rows)


def log_files(path: Path) -> list[Path]:
    """The files that a new host reads: the checkpoint, the events from there on, and the files that name hidden rows."""
    return [
        *sorted((path / "_lookup" / "checkpoints").iterdir()),
        *sorted((path / "_lookup" / "log").iterdir())[49:],
        *sorted(path.rglob("deletes-*.parquet")),
    ]


@given(data=st.data(), known=st.booleans(), sound=st.booleans())
@fuzzed(32)
def test_a_damaged_log_is_told(data: st.DataObject, known: bool, sound: bool) -> None:
    """Whatever became of a file of a table's log, or of hidden rows, a read gives the right rows or an error of ours; sound files may say something else."""
    with copied(world("log", "none").path) as path:
        made = dataclasses.replace(world("log", "none"), path=path)
        cache = path.with_name("cache")
        if known and not sound:
            made.read(cache, 4_900_000_000.0)
        if sound:
            hurt = data.draw(st.sampled_from([path for path in log_files(path) if path.suffix == ".json"]))
            found = json.loads(hurt.read_bytes())
            del found["crc"]
            said = data.draw(altered(found))
            hurt.write_bytes(seal(said) if isinstance(said, dict) else json.dumps(said).encode())
        else:
            hurt = damage_one(data, log_files(path))
        with memory_at_most():
            try:
                assert made.read(cache).equals(made.rows) or sound
            except PysparkLookupError as problem:
                assert sound or hurt.name in str(problem) or path.name in str(problem)
            with contextlib.suppress(PysparkLookupError):
                asked_all(made, cache)


def asked_all(copy: World, cache: Path) -> None:
    host, options = copy.host(cache), parse_options({"path": str(copy.path)})
    table, _ = host.resolver.discover(options)
    state, log = host.managed.read_log(options), host.managed.log(table.url)
    for position in {1, 2, state.position // 2, state.position}:
        with contextlib.suppress(PysparkLookupError):
            version = read_version(log, table, state, position)
            list(plan_snapshot(table, log, state, position))
            host.reader.versions.schema(table, version)
    for part, change in log.pages.changes(state, 0, state.position):
        cost(part, change)
        managed_version(table, part, change.position)
    list(changes_between(table, log, state, 0, state.position, False))
    state.open_writes()
    state.find_definition(state.position)
    assert state_to_json(parse_state(seal(state_to_json(state)), "x")) == state_to_json(state)


DELETED_ROWS = pa.table(
    {
        "id": pa.array(range(40), pa.int64()),
        PATH: [f"w/{n % 4}.parquet" for n in range(40)],
        ROW: pa.array([n * 3 for n in range(40)], pa.int64()),
    }
)
LISTS = ["t1:5:2:2,4:", "t1:5:9223372036854775807::3", "a%3Ab:12:8:8:12,11", "t:9223372036854775806:1:1:", f"{'0' * 32}:0:9223372036854775807::"]  # fmt: skip
PIECES = [":", ",", "0", "-1", "9" * 19, "9" * 5000, "%3A", "%", "$", "\0", " ", "٣", "²", "\ud800"]
OPTIONS: list[dict[str, str]] = [
    {"lookup.floor": "0123456789abcdef:17"},
    {"lookup.stream.start": "12"},
    {"lookup.version": "12"},
    {"lookup.keys": "`a b`,c", "lookup.columns": "c,`d``e`"},
    {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "5", "lookup.partial-cache.expire-after-write": "5 min"},
    {"lookup.cache": "FULL", "lookup.full-cache.reload-strategy": "TIMED", "lookup.full-cache.timed-reload.iso-time": "10:15+07:00", "lookup.full-cache.timed-reload.interval-in-days": "3", "lookup.full-cache.blackout": "22:00-06:00, 12:00-13:00"},
    {**FULL, **CACHED, "lookup.full-cache.periodic-reload.interval": "PT10S", "lookup.full-cache.max-staleness": "1 d", "lookup.full-cache.retain": "1 h"},
    {**CACHED, "lookup.metadata.sync-interval": "10 s"},
    {"lookup.settle": "1.5 s", "lookup.scan.split-size": "128 MiB", "lookup.cache.max-bytes": "1g"},
    {"lookup.provider": "a.b:c", "lookup.retry.predicate": "lookup_miss", "lookup.retry.fixed-delay": "5 s", "lookup.retry.max-attempts": "3", "lookup.async.timeout": "3 min", "lookup.async.capacity": "7"},
    {"lookup.storage.client_kwargs": '{"verify": false, "a": [1, {"b": null}]}', "lookup.storage.anon": "true"},
    {"lookup.partition": "a=1,b=%20", "lookup.write.timeout": "24 h", "lookup.success-file": "true"},
]  # fmt: skip
OPTION_PIECES = [
    " ", ",", ":", "`", "=", "9" * 400, "9" * 5000, "-", "P", "T", "e", "\0", "\n", "²", "٣", "\ud800", "1e999", "nan", "inf", "[" * 500, "{",
    "[" * 100_000, '{"a":' * 50_000,
]  # fmt: skip
WHERE = [
    "id = 5 AND text LIKE 'ab%' OR NOT (x >= 1.5 AND x < 2e3)",
    "id IN (1, 2, NULL) AND text IS NOT NULL",
    "day BETWEEN DATE '2024-01-31' AND CAST('2024-02-01' AS DATE) AND at <> TIMESTAMP '2024-01-01 10:00:00'",
    "flag <=> true AND raw = X'00ff' AND `id` <= -9223372036854775808",
    "x = CAST('NaN' AS DOUBLE) OR amount = 12.50BD OR id = 5L",
]
WHERE_SCHEMA = pa.schema(
    {"id": pa.int64(), "text": pa.string(), "x": pa.float64(), "day": pa.date32(), "at": pa.timestamp("us", "UTC")}
    | {"flag": pa.bool_(), "raw": pa.binary(), "amount": pa.decimal128(9, 2)}
)
WHERE_PIECES = [
    "'", '"', "`", "(", ")", "((((((((((", "))))", ",", ";", "--", "/*", "*/", "\\", "\\'", "%", "_", "NOT ", "AND ", "NULL", "-", "+", "9" * 50,
    "9" * 5000, "1e400", "0x", "X'f'", "::", ":", "?", "{", "}", "[", "CAST(", "CASE WHEN ", "SELECT ", "$", "@", "#", "\0", "\n", "٣", "\ud800",
    "-" * 100, "NOT " * 200, "DATE '9999999-01-01'", "e", ".", "..", "=>", "||", "|", "&", "IN ()", "BETWEEN", "LIKE", "INTERVAL 1 DAY",
]  # fmt: skip


def deleted_rows(data: st.DataObject, home: Path) -> None:
    """A damaged delete file that can be read names the same rows; pages have checksums, the footer has none."""
    blob, other_blob = (delete_file_bytes(distinct_places(DELETED_ROWS.slice(0, count))) for count in (40, 7))
    damage = data.draw(damaged(blob, [other_blob]))
    whole = other_blob if damage.endswith(other_blob[-100:]) else blob  # a file is what its footer says
    actual, expected = (DeleteFile("file:///t/deletes", 1).positions(content) for content in (damage, whole))
    assert {path: rows.tolist() for path, rows in actual.items()} == {
        path: rows.tolist() for path, rows in expected.items()
    }


def sink_log(data: st.DataObject, home: Path) -> None:
    """A damaged `_spark_metadata` gives the files that it commits, and no others."""
    path = publish(publish(home / "dim", 0, 1, 5), 1, 1, 5)
    lines = [{"path": f"file:///x/{n}.parquet", "size": 1, "action": "add"} for n in range(2)]
    sound = data.draw(st.booleans())
    if sound:
        lines = [data.draw(altered(line)) for line in lines]
    blob = "\n".join(["v1", *map(json.dumps, lines)]).encode()
    (path / "_spark_metadata").mkdir()
    name = data.draw(st.sampled_from(["0", "7.compact", "²", "٣", "9" * 200]))
    (path / "_spark_metadata" / name).write_bytes(blob if sound else data.draw(damaged(blob)))
    host = make_host(str(path), None, FakeClock(5_000_000_000.0))
    _, version = host.resolver.discover(parse_options({"path": str(path)}))
    assert {file.url.rsplit("/", 1)[-1] for file in version.files} <= {"0.parquet", "1.parquet"}


def write_ids(data: st.DataObject, home: Path) -> None:
    """A text is the list that it is written as; as an option, too."""
    text = data.draw(misspelled(data.draw(st.sampled_from(LISTS)), PIECES))
    with contextlib.suppress(OptionError):
        parsed = parse_options({"path": "x", "lookup.valid-write-ids": text})
        assert ValidWriteIdList.parse(parsed.version.valid_write_ids or "") is not None
    ids = ValidWriteIdList.parse(text)
    assert ValidWriteIdList.parse(str(ids)) == ids
    assert ids.equivalent(ids)


def options_of_any_layer(data: st.DataObject, home: Path) -> None:
    """An option is understood, and then all that follows from it can be asked."""
    options = dict(data.draw(st.sampled_from(OPTIONS)))
    key_ = data.draw(st.sampled_from(list(options)))
    if data.draw(st.integers(0, 4)):
        options[key_] = data.draw(misspelled(options[key_], OPTION_PIECES))
    else:
        options[data.draw(misspelled(key_, [".", "-", "lookup", "\0", "storage", "provider."]))] = options.pop(key_)
    layers: dict[str, dict[str, str]] = {
        "read": {},
        data.draw(st.sampled_from(["read", "read", "table", "conf"])): options,
    }
    parsed = parse_options(**{**layers, "read": {"path": "s3://b/t", **layers["read"]}})
    assert pickle.loads(pickle.dumps(parsed)) == parsed
    assert hash(parsed) == hash(parsed)
    assert repr(parsed)
    groups = [getattr(parsed, field.name) for field in dataclasses.fields(parsed)]
    for group in (parsed, *filter(dataclasses.is_dataclass, groups), *parsed.kinds):
        for name, attribute in inspect.getmembers(type(group)):
            if isinstance(attribute, property):
                getattr(group, name)
        for value in dataclasses.astuple(group):
            assert not isinstance(value, float) or 0 <= abs(value) < threading.TIMEOUT_MAX
    assert parsed.pinned in (None, *parsed.pins.values())
    with contextlib.suppress(OptionError, ImportError):
        make_trigger(parsed)
    context = HostContext(None, CacheMetricGroup(), FakeClock().host(), random.Random())
    HostVersions(None, context, None, None).floors("x", parsed)  # type: ignore[arg-type]


def predicates(data: st.DataObject, home: Path) -> None:
    """A predicate is understood, and can be asked of rows."""
    predicate = parse_where(data.draw(misspelled(data.draw(st.sampled_from(WHERE)), WHERE_PIECES)), WHERE_SCHEMA)
    matching_rows(pa.RecordBatch.from_pylist([{}, {"id": 5, "text": "abc"}], WHERE_SCHEMA), predicate)


def conf_files(data: st.DataObject, home: Path) -> None:
    """The file that is shipped, with its lines in use and something changed, is read or refused without showing a line."""
    shipped = (Path(__file__).parents[1] / "conf" / "lookupcache.conf").read_text()
    text = re.sub(r"(?m)^#(lookup)", r"\1", shipped) + "lookup.storage.token = SESAME\n"
    (home / "x.conf").write_bytes(data.draw(damaged(text.encode())))
    environ = {"LOOKUPCACHE_CONF": str(home / "x.conf")}
    conf = conf_file_options(environ)
    conf_file_secrets(environ)
    parse_options({"path": "s3://b/t"}, conf=conf)


def stream_offsets(data: st.DataObject, home: Path) -> None:
    """A stream continues at the position in its checkpoint."""
    origin = world("log", "none")
    options = {"path": str(origin.path), "lookup.view": "changes", "lookup.cache.dir": str(_home() / "streams")}
    reader = ChangeReader(parse_options(options), change_columns(origin.rows.schema))
    first = {**reader.initialOffset(), "position": 5}
    last = reader.reportLatestOffset()
    # Without a start it is a Spark that gives none.
    offsets = [data.draw(st.just(offset) | altered(offset).filter(bool)) for offset in (first, last)]
    try:
        latest = reader.latestOffset(offsets[0], reader.getDefaultReadLimit())
        assert latest["position"] >= offsets[0]["position"]
        reader.partitions(*offsets)
    except PysparkLookupError:
        assert offsets != [first, last]


def table_options_of_a_catalog(data: st.DataObject, home: Path) -> None:
    """The options that a catalog keeps in a column's metadata are texts, or refused; so are the paths of a load()."""
    options = json.dumps({"path": "s3://b/t", "lookup.keys": "id"})
    text: Any = data.draw(
        st.one_of(misspelled(options, PIECES), altered(json.loads(options)).map(json.dumps), altered(options))
    )
    field = StructField("id", StringType(), True, {OPTIONS_METADATA: text})
    with contextlib.suppress(OptionError):
        parsed = table_options(StructType([field]))
        assert all(isinstance(part, str) for pair in parsed.items() for part in pair)
    DefaultSource({"paths": data.draw(misspelled('["/nowhere/t"]', PIECES))}).reader(StructType([field]))


def version_tokens(data: st.DataObject, home: Path) -> None:
    """The version in a task's token can be read, or a newer one is."""
    origin = world("log", "none")
    on_gone = data.draw(st.sampled_from(["NEWER", "FAIL"]))
    options = parse_options({"path": str(origin.path), "lookup.on-version-gone": on_gone})
    reader = origin.host(origin.cache).reader
    token = VersionToken.from_version(reader.kinds, *reader.resolver.discover(options)).to_bytes()
    damage = data.draw(damaged(token, [struct.pack(">d", float("nan")), struct.pack(">d", 1e300)]))
    version_of_token(reader, options, VersionToken.from_bytes(damage), None)


SMALL: list[tuple[Callable[[st.DataObject, Path], None], int, type[Exception], str]] = [
    (deleted_rows, 80, DamagedFileError, "file:///t/deletes"), (sink_log, 24, PysparkLookupError, ""),
    (write_ids, 120, ValueError, "list of valid write ids|write id|watermark"),
    (options_of_any_layer, 160, OptionError, "option"), (predicates, 100, PredicateError, r"lookup\.where"),
    (conf_files, 24, OptionError, "^((?!SESAME)(.|\n))*$"), (version_tokens, 40, PysparkLookupError, ""),
]  # fmt: skip
if DATA_SOURCES:
    SMALL += [(stream_offsets, 24, PysparkLookupError, ""), (table_options_of_a_catalog, 80, OptionError, "")]
"""(what damages and reads something, how often by day, the error that may come instead of an answer, the words in it)."""


@pytest.mark.parametrize(("read", "often", "error", "says"), SMALL, ids=[read.__name__ for read, *_ in SMALL])
def test_what_is_damaged_is_understood_or_refused(
    read: Callable[[st.DataObject, Path], None], often: int, error: type[Exception], says: str
) -> None:
    """Each input is treated as the function for it, above, says; anything else is an error that says what was expected."""

    @given(data=st.data())
    @fuzzed(often)
    def check(data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as home, memory_at_most():
            try:
                read(data, Path(home))
            except error as problem:
                assert re.search(says, str(problem))

    check()


NO_DELETED_ROWS: list[dict[str, Any]] = [
    *({PATH: ["a", "a"], ROW: rows} for rows in ([1.0, 2.0], [1, None], [2, 1], [-1, 1])),
    *({PATH: paths, ROW: [1, 2, 3]} for paths in (["a", None, "b"], [1, 2, 3], ["a", "b", "a"])),
    {PATH: ["a"], "other": [1]}, {"other": [1]}, {PATH: [["a"]], ROW: [1]},
]  # fmt: skip


@pytest.mark.parametrize("rows", NO_DELETED_ROWS, ids=str)
def test_deleted_rows_that_cannot_be(rows: dict[str, Any]) -> None:
    """A delete file is damaged unless each row has a path and a place, and rows are sorted by these."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(rows), sink)
    with pytest.raises(DamagedFileError, match="is not a readable delete file"):
        DeleteFile("x", 1).positions(sink.getvalue().to_pybytes())
