"""`LookupOptions`: strings become one frozen, checked value, and credentials never do."""

import dataclasses
import datetime
import enum
import functools
import itertools
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.errors import OptionError
from pyspark_lookup.options import enums
from pyspark_lookup.options.conf_file import conf_file_options, conf_file_secrets, redact
from pyspark_lookup.options.lookup_options import HOST_KEYS, LookupOptions
from pyspark_lookup.options.parsing import parse_bytes, parse_duration_s
from pyspark_lookup.options.reload_trigger import parse_blackout
from pyspark_lookup.sources.registry import OPTIONS, take_retry_delay

MIB = 2**20
AT = datetime.datetime(2026, 3, 1, 11, tzinfo=datetime.timezone.utc)
SECRET = "s3cr3t-Value"
parse = functools.partial(LookupOptions.parse, kinds=OPTIONS)


def refusal(*layers: Mapping[str, str], conf: Mapping[str, str] | None = None) -> str:
    with pytest.raises(OptionError) as caught:
        parse(*layers, conf=conf)
    return str(caught.value)


PROVIDED = {
    "lookup.provider": "m:f",
    "lookup.keys": "id",
    "lookup.cache": "PARTIAL",
    "lookup.partial-cache.max-rows": "1",
}
# Options with a fixed set of values, which may come in any letter case and with spaces around; and the options that each needs.
CHOICES: list[tuple[str, type[enum.Enum], dict[str, str]]] = [
    ("lookup.format", enums.FileFormatName, {}), ("lookup.view", enums.View, {}),
    ("lookup.on-error", enums.OnError, PROVIDED), ("lookup.on-busy", enums.OnBusy, {}),
    ("lookup.version-at", enums.VersionAt, {}), ("lookup.on-version-gone", enums.OnVersionGone, {}),
    ("lookup.write.mode", enums.KeyedWrite, {}), ("lookup.write.missing-columns", enums.MissingColumns, {}),
    ("lookup.stream.start", enums.StreamStart, {}), ("lookup.overlap", enums.Overlap, {}), ("lookup.range.bounds", enums.Bounds, {}),
    ("lookup.on-bad-network", enums.OnBadNetwork, {}),
]  # fmt: skip
PARTIAL = {"lookup.cache": "PARTIAL", "lookup.keys": "id", "lookup.partial-cache.max-rows": "1"}
PROVIDER = {"lookup.provider": "a:b"}
DATABASE = {"path": "sqlite:///shop.db", "lookup.table": "t"}
RETRY = {**PROVIDER, "lookup.retry.predicate": "lookup_miss", "lookup.retry.fixed-delay": "1 s", "lookup.retry.max-attempts": "1"}  # fmt: skip
CACHED = {"lookup.metadata.source": "CACHE"}
FULL = {"lookup.cache": "FULL"}
RELOADED = {**FULL, **CACHED}
PERIODIC = {**RELOADED, "lookup.full-cache.periodic-reload.interval": "1 min"}
TIMED = {**RELOADED, "lookup.full-cache.reload-strategy": "TIMED", "lookup.full-cache.timed-reload.iso-time": "10:15"}
FULL_CACHE = "lookup.full-cache."
Forms = dict[str, dict[str, Any]]  # for each option, texts and their values
VALID: list[tuple[dict[str, str], Forms]] = [
    ({}, {
        "path": {" s3a://b/dim ": "s3a://b/dim", "/data/mein tisch/ü*.parquet": "/data/mein tisch/ü*.parquet"},
        "lookup.keys": {"id": ("id",), " id , Name ": ("id", "Name"), "`a,b`,`c``d`": ("a,b", "c`d"), "zwei wörter,` x `": ("zwei wörter", " x ")},
        "lookup.schema": {"id INT, `a b` ARRAY<STRING>": pa.schema({"id": pa.int32(), "a b": pa.list_(pa.field("element", pa.string()))})},
        "lookup.csv.sep": {";": ";", "\\t": "\t"},
        "lookup.csv.quote": {"'": "'", "": ""},
        "lookup.csv.null-value": {" NA": " NA"},
        "lookup.csv.encoding": {"ISO-8859-1": "iso8859-1"},
        "lookup.write.batch": {"orders-by.city_1:017": ("orders-by.city_1", 17)},
        "lookup.success-file": {"true": True, " FALSE": False},
        "lookup.settle": {"500 ms": 0.5, "0 s": 0.0},
        "lookup.branch": {" audit ": "audit"},
        "lookup.timestamp": {" 2026-03-01T12:00:00+01:00": AT, "2026-03-01 11:00:00": AT, "2026-03-01T11:00:00Z": AT},
        "lookup.valid-write-ids": {" t1:5:4:2,4: ": "t1:5:2:2,4:"},
        "lookup.floor": {" 8f3a:12": "8f3a:12"},
        "lookup.valid-from": {"`valid from`": "valid from"},
        "lookup.range": {" low .. high": ("low", "high"), "`a..b`..c.d": ("a..b", "c.d")},
        "lookup.cidr": {"network": ("network",), "`a..b`": ("a..b",), "first..last": ("first", "last")},
        "lookup.stream.start": {"12": 12},
        "lookup.cache.max-bytes": {"1 MiB": MIB, "20g": 20 * 2**30},
        "lookup.max-retries": {"0": 0, "12": 12},
    }),
    (CACHED, {"lookup.metadata.sync-interval": {"-1": -1.0, " 0 ": 0.0, "0 s": 0.0, "PT1M30S": 90.0}}),
    (RELOADED, {"lookup.full-cache.reload-strategy": {" my_company.triggers:Nightly ": "my_company.triggers:Nightly"}}),
    (PERIODIC, {"lookup.full-cache.reload-jitter": {"0 s": 0.0, "1 min": 60.0}}),
    (PERIODIC, {"lookup.full-cache.blackout": {"22:00-06:00": parse_blackout("22:00-06:00")}}),
    (TIMED, {"lookup.full-cache.timed-reload.iso-time": {"10:15Z": datetime.time(10, 15, tzinfo=datetime.timezone.utc)}}),
    ({"path": "shop.customers"}, {"lookup.catalog": {" prod ": "prod"}}),
]  # fmt: skip
VALID_FORMS = [
    *((key, text, value, prerequisites) for prerequisites, keys in VALID for key, forms in keys.items() for text, value in forms.items()),
    *((key, f" {spell(member.value)} ", member, prerequisites) for key, kind, prerequisites in CHOICES for member in kind for spell in (str.lower, str.upper)),
]  # fmt: skip


@pytest.mark.parametrize(("key", "text", "value", "others"), VALID_FORMS)
def test_each_valid_form_parses(key: str, text: str, value: object, others: dict[str, str]) -> None:
    """Each documented spelling of an option becomes its value, in any letter case and with spaces around."""
    options = parse({"path": "/t", **others, key: text})
    groups = (getattr(options, field.name) for field in dataclasses.fields(options))
    fields = {
        field.metadata["key"]: (group, field)
        for group in (*groups, *options.kinds)
        if dataclasses.is_dataclass(group)
        for field in dataclasses.fields(group)
    }
    group, field = fields[key]
    assert getattr(group, field.name) == value


DURATIONS = {
    "10 s": 10, "10s": 10, "10 sec": 10, "10 SECONDS": 10, "1 second": 1, "1 secs": 1,
    "250 ms": 0.25, "250 millis": 0.25, "1 milli": 0.001, "1 millisecond": 0.001, "2 milliseconds": 0.002,
    "1.5 h": 5400, "1 hour": 3600, "2 hours": 7200, "5 min": 300, "1 mins": 60, "1 minute": 60,
    "2 minutes": 120, "7 d": 604800, "1 day": 86400, "2 days": 172800,
    "PT10S": 10, "pt0.5s": 0.5, "P1DT2H3M4S": 93784, "P7D": 604800, "PT0S": 0, " PT1H ": 3600,
}  # fmt: skip
SIZES = {"1": 1, "0": 0, "2k": 2048, "2 KB": 2048, "2KiB": 2048, "4 MiB": 4 * MIB, "4m": 4 * MIB, "1 g": 2**30, "1TiB": 2**40, "7 b": 7}  # fmt: skip


def test_durations_and_sizes() -> None:
    """Durations are Flink's and ISO-8601's forms, in seconds; sizes are plain or with a unit, a power of 1024 in any spelling."""
    assert {text: parse_duration_s(text) for text in DURATIONS} == pytest.approx(DURATIONS)
    assert {text: parse_bytes(text) for text in SIZES} == SIZES


BAD_DURATIONS = ["10", "-5 s", "10 parsecs", "P", "PT5", "1e3 s", "5 m"]
BAD_SIZES = ["MiB", "-1", "1.5g", "4 ib", "9" * 5000]
BAD_NAMES = ["", "a,", "a,a", "`a", "a`b", "``", "`a`b"]
# Values that do not parse, the hint that the error gives, and the options that each needs.
BAD_VALUES = [
    *(("lookup.settle", text, "'10 s'", {}) for text in BAD_DURATIONS),
    *(("lookup.scan.split-size", text, "'4 MiB'", {}) for text in BAD_SIZES),
    *(("lookup.columns", text, "column names separated by commas", {}) for text in BAD_NAMES),
    ("lookup.cache.max-bytes", "1023k", "from 1 MiB", {}), ("lookup.scan.split-size", "0", "from 1 MiB", {}),
    ("lookup.format", "parket", "did you mean parquet?", {}),
    ("lookup.format", "xyz", "parquet, arrow, csv, json, orc", {}),
    ("lookup.metadata.source", "UFO", "did you mean UFS?", {}), ("lookup.success-file", "yes", "true or false", {}),
    ("lookup.max-retries", "-1", "whole number", {}), ("lookup.max-retries", "9" * 5000, "whole number", {}),
    ("lookup.metadata.sync-interval", "-2", "-1 (never), 0 (always)", CACHED),
    ("lookup.metadata.sync-interval", "5", "'5 min'", CACHED), ("lookup.where", "  ", "non-empty text", {}),
    ("path", " ", "non-empty text", {}), ("path", "/a\0b", "without NUL", {}),
    ("path", "s3://b/a\ud800b", "unpaired surrogates", {}), ("path", "file://host/share", "the name of a host", {}),
    ("lookup.retry.predicate", "lookup-miss", "did you mean lookup_miss", RETRY),
    ("lookup.retry.fixed-delay", "0 s", "greater than zero", RETRY),
    ("lookup.async.capacity", "0", "1 to 999999999", PROVIDER),
    ("lookup.partial-cache.max-rows", "9" * 20, "a whole number, 0 to 9223372036854775807", PARTIAL),
]  # fmt: skip


@pytest.mark.parametrize("layer", ["read", "table", "conf"])
@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("lookup.key", "did you mean lookup.keys?"), ("lookup.max-retry", "did you mean lookup.max-retries?"),
        ("lookup.metadata.sync_interval", "did you mean lookup.metadata.sync-interval?"),
        ("lookup.async.time-out", "did you mean lookup.async.timeout?"),
        ("Lookup.Formats", "did you mean lookup.format?"), ("pahts", "did you mean path?"),
        ("header", "did you mean lookup.csv.header?"),
        *((f"lookup.storage.{name}", "lookup.storage.client_kwargs = '{") for name in ("", "a.verify", "a-b", "*")),
    ],
)  # fmt: skip
def test_an_unknown_key_is_refused_with_the_nearest(layer: str, key: str, near: str) -> None:
    """An unknown key is refused in every layer, with the nearest known key and with its value, which is hidden if it is from a conf file."""
    with pytest.raises(OptionError) as caught:
        parse(**{"read": {}, layer: {key: "5"}})
    shown_value = "'…'" if layer == "conf" else "'5'"
    assert f"unknown option {key.lower()} = {shown_value}" in str(caught.value)
    assert near in str(caught.value)


CONTRADICTIONS: list[tuple[dict[str, str], list[str]]] = [
    (CACHED, ["lookup.metadata.source = 'CACHE'", "sync-interval", "-1"]),
    ({"lookup.metadata.sync-interval": "5 min"}, ["sync-interval contradicts", "= 'CACHE'"]),
    ({"lookup.version": "3", "lookup.valid-write-ids": "t:1:9223372036854775807::"}, ["lookup.version", "lookup.valid-write-ids", "give one"]),
    ({"lookup.timestamp": "2026-03-01", "lookup.version": "3"}, ["lookup.version", "lookup.timestamp", "give one"]),
    ({"lookup.branch": "main", "lookup.tag": "a"}, ["lookup.branch", "lookup.tag", "give one"]),
    ({"lookup.catalog.uri": "http://h"}, ["lookup.catalog.uri is a property of a catalog", "set lookup.catalog"]),
    *(({"lookup.catalog": "prod", "path": path}, [f"path = {path!r}", "lookup.catalog = 'prod'", "namespace.table"]) for path in [
        "customers", "/x/f.parquet", "./f.parquet", "x/f.parquet", "file:///x.y", "s3://b/t.x", "a..b", ".a", "a.", "~/x.y"]),
    ({"lookup.catalog": "unity", "path": "/x/f.parquet"}, ["path = '/x/f.parquet'", "lookup.catalog = 'unity'", "catalog.schema.table"]),
    ({"lookup.catalog.authorise-every": "5 min"}, ["lookup.catalog.authorise-every is a property of a catalog"]),  # its default
    ({"path": "postgresql://h/shop"}, ["lookup.table is missing"]),
    ({"lookup.provider": "redis", "path": "redis://h"}, ["lookup.redis.key-pattern is missing"]),
    ({"lookup.catalog": "prod", "path": "a.b", **PROVIDER}, ["lookup.catalog and lookup.provider"]),
    ({"lookup.catalog": "prod", "path": "a.b", "lookup.catalog.header.Authorization": "Bearer t"}, ["lookup.catalog.header.authorization holds a credential", ".pyiceberg.yaml"]),
    ({"lookup.catalog": "prod", "path": "a.b", "lookup.catalog.token": "t"}, ["lookup.catalog.token looks like a credential", ".pyiceberg.yaml"]),
    ({"lookup.cache": "partial", "lookup.keys": "id"}, ["lookup.cache = 'PARTIAL'", "expire-after-access", "expire-after-write", "max-rows", "max-bytes"]),
    ({"lookup.cache": "PARTIAL", "lookup.keys": "id", "lookup.partial-cache.cache-missing-key": "false"}, ["without a bound"]),
    ({"lookup.partial-cache.max-rows": "5"}, ["lookup.partial-cache.max-rows", "set lookup.cache = 'PARTIAL'"]),
    ({"lookup.async.capacity": "5"}, ["lookup.async.capacity is for tables of a provider", "set lookup.provider"]),
    *(({**PROVIDER, **{key: RETRY[key] for key in subset}}, ["lookup.retry.predicate, lookup.retry.fixed-delay and lookup.retry.max-attempts: give all three or none"])
      for count in (1, 2) for subset in itertools.combinations([key for key in RETRY if key not in PROVIDER], count)),
    ({**PROVIDER, "lookup.format": "csv"}, ["lookup.format is for tables of files"]),
    ({"lookup.view": "files", "lookup.where": "a = 1"}, ["lookup.view = 'files'", "filter the result in Spark"]),
    ({"lookup.range": "low"}, ["lookup.range = 'low'", "expected two columns of the table, such as low..high"]),
    ({"lookup.range": "a..b..c"}, ["expected two columns"]),
    ({"lookup.cidr": "a..b..c"}, ["expected a column of the table, such as network, or two, such as first..last"]),
    ({"lookup.valid-to": "until"}, ["lookup.valid-to has no effect without lookup.valid-from"]),
    # Bad values, with the FLIP's words.
    ({**RELOADED, FULL_CACHE + "periodic-reload.interval": "0 s"}, [FULL_CACHE + "periodic-reload.interval", "greater than zero"]),
    ({**TIMED, FULL_CACHE + "timed-reload.interval-in-days": "0"}, ["interval-in-days = '0'", "at least 1 day"]),
    ({**TIMED, FULL_CACHE + "timed-reload.iso-time": "10"}, ["iso-time = '10'", "ISO time"]),
    ({**RELOADED, FULL_CACHE + "reload-strategy": "a b:c"}, ["module:factory"]),
    ({**PERIODIC, FULL_CACHE + "max-staleness": "0 s"}, ["greater than zero"]),
    ({**PERIODIC, FULL_CACHE + "blackout": "6-8"}, [FULL_CACHE + "blackout"]),
    ({FULL_CACHE + "retain": "1 h"}, ["'NONE'", "set lookup.cache = 'FULL'"]),
    (RELOADED, [f"option {FULL_CACHE}periodic-reload.interval is missing"]),
    ({**RELOADED, FULL_CACHE + "reload-strategy": "TIMED"}, [f"option {FULL_CACHE}timed-reload.iso-time is missing"]),
    ({**TIMED, FULL_CACHE + "periodic-reload.interval": "1 min"}, ["periodic-reload.interval", "set reload-strategy = 'PERIODIC'"]),
    ({**PERIODIC, FULL_CACHE + "timed-reload.iso-time": "10:15"}, ["timed-reload.iso-time", "set reload-strategy = 'TIMED'"]),
    ({**PERIODIC, "lookup.metadata.sync-interval": "1 min"}, ["lookup.metadata.sync-interval", "reload strategy"]),
    ({**FULL, FULL_CACHE + "on-reload-failure": "FAIL"}, ["on-reload-failure", "'UFS'"]),
    ({**FULL, FULL_CACHE + "blackout": "22:00-06:00"}, ["blackout", "periodic-reload.interval"]),
    ({**FULL, FULL_CACHE + "reload-jitter": "1 min"}, ["reload-jitter", "periodic-reload.interval"]),
    ({**PERIODIC, FULL_CACHE + "reload-jitter": "61 s"}, ["reload-jitter = 61 s", "interval = 60 s", "set 60 s or less"]),
    ({**RELOADED, FULL_CACHE + "reload-strategy": "a:b", FULL_CACHE + "reload-jitter": "1 s"}, ["reload-jitter", "'a:b'"]),
    ({**PERIODIC, FULL_CACHE + "max-staleness": "30 s"}, ["max-staleness = 30 s", "less than"]),
]  # fmt: skip
REFUSED = [
    ({**prerequisites, key: text}, [f"option {key} = {text!r} (read option)", hint])
    for key, text, hint, prerequisites in BAD_VALUES
]


@pytest.mark.parametrize(("options", "words"), [*REFUSED, *CONTRADICTIONS])
def test_what_is_refused(options: dict[str, str], words: list[str]) -> None:
    """A value that does not parse or is out of bounds, or a combination that contradicts itself, by key, value and way out."""
    message = refusal({"path": "/t", **options})
    assert all(word in message for word in words)


def test_kinds_of_which_nothing_is_set_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that are not set cost nothing: there may be many kinds of tables, and each read parses its options."""

    def refuse(kind: object) -> None:
        raise AssertionError(f"{kind} is asked")

    for kind in OPTIONS:
        for name in ("check", "identity", "implied", "pins", "place", "system"):
            monkeypatch.setattr(kind, name, property(refuse))
    options = parse({"path": "/t", "lookup.keys": "id", "lookup.cache": "FULL"})
    assert (options.set_kinds, options.system, options.place, options.pins) == ((), None, "/t", {})


def test_precedence() -> None:
    """Read options override table options, those the conf file, and that the defaults; storage options do so one by one. Equal options are equal values."""
    conf = {
        "lookup.max-retries": "1", "lookup.scan.split-size": "1m", "lookup.settle": "1 s", "lookup.storage.anon": "false",
        "lookup.storage.endpoint_url": "http://h:9", "lookup.storage.nothing": "null",
    }  # fmt: skip
    storage = {"LOOKUP.STORAGE.client_kwargs": '{"verify": false}', "lookup.storage.anon": "true"}
    table = {"path": "s3://b/x", "lookup.max-retries": "2", "lookup.scan.split-size": "2m", **storage}
    read = {"lookup.max-retries": "4", "lookup.storage.max_concurrency": "5"}
    options = parse(read, table, conf)
    assert (options.files.path, options.storage.max_retries, options.read.split_size) == ("s3://b/x", 4, 2 * MIB)
    assert (options.files.settle_s, options.files.busy_wait_s) == (1.0, 30.0)
    nested = {"max_concurrency": 5, "client_kwargs": {"verify": False}}
    assert dict(options.storage.parameters) == {**nested, "anon": True, "endpoint_url": "http://h:9", "nothing": None}
    assert len({options, parse(read, dict(reversed(table.items())), conf), pickle.loads(pickle.dumps(options))}) == 1
    assert parse({"path": "/read"}, table).files.path == "/read"
    # Storage options of a conf file are for remote tables; those of a read always count.
    assert [parse({"path": path}, conf=conf).storage.parameters for path in ("/x", "file:/x")] == [(), ()]
    assert parse({"path": "/x", "lookup.storage.anon": "true"}).storage.parameters != ()
    # A bad value is refused where a nearer layer overrides it, too, and the message names its layer.
    assert "(table option)" in refusal({"path": "/t", "lookup.max-retries": "1"}, {"lookup.max-retries": "x"})
    assert "(conf file)" in refusal({"path": "/t"}, conf={"lookup.max-retries": "x"})
    # A read's UFS drops the interval of the table's or the conf file's CACHE; its own interval contradicts it.
    lower = {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "5 min"}
    back = {"path": "x", "lookup.metadata.source": "UFS"}
    assert parse(back, conf=lower).version.sync_interval_s is None
    assert parse(back, table=lower).version.source is enums.MetadataSource.UFS
    assert "contradicts" in refusal({**back, "lookup.metadata.sync-interval": "5 min"}, conf=lower)


def test_one_read_may_go_without_the_full_cache() -> None:
    """A read with NONE or UFS, of a table that was created with FULL in CACHE mode, also drops the options that depend on these."""
    table = PERIODIC | {"path": "/t", FULL_CACHE + "max-staleness": "1 h"}
    plain = parse({"lookup.cache": "NONE", "lookup.metadata.source": "UFS"}, table)
    assert not plain.full_cache.reloads
    fresh = parse({"lookup.metadata.source": "UFS"}, table)
    assert fresh.full_cache.max_staleness_s is None
    cached = parse({"lookup.cache": "NONE", "lookup.metadata.sync-interval": "5 s"}, table)
    assert cached.version.sync_interval_s == 5


def test_options_that_replace_others() -> None:
    """`override` refuses what `parse` refuses; a session changes only host options, and never an explicit value."""
    columns = {"path": "/t", "lookup.columns": "a"}
    assert parse(columns).override({"lookup.columns": "b"}) == parse({**columns, "lookup.columns": "b"})  # fmt: skip
    conf = {"lookup.cache.dir": "/conf", "lookup.max-retries": "1"}
    options = parse({"path": "/t", "lookup.max-retries": "2"}, None, conf)
    moved = options.on_host({"lookup.cache.dir": "/host", "lookup.max-retries": "9", "lookup.cache.max-bytes": "2m"})
    assert (moved.cache.path, moved.storage.max_retries, moved.cache.max_bytes) == ("/host", 2, 2 * MIB)
    assert options.on_host({}) == options
    unset, host_keys = parse({"path": "/t"}), ", ".join(sorted(HOST_KEYS))
    for replaces, overrides, says in (
        (unset.override, {"lookup.columns": ","}, r"lookup\.columns = ','"),
        (unset.override, {"lookup.column": "a"}, r"did you mean lookup\.columns"),
        (unset.on_host, {"lookup.where": "a = 1"}, rf"spark\.lookupcache\.where: only {host_keys} can"),
        (unset.on_host, {"lookup.max-retries": "many"}, r"spark\.lookupcache\.max-retries = 'many': expected a whole"),
        (unset.on_host, {"lookup.nope": "1"}, r"unknown option lookup\.nope"),
    ):
        with pytest.raises(OptionError, match=says):
            replaces(overrides)


def test_cache_directory_default_is_per_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without `lookup.cache.dir` the directory is one per user below the temporary directory; nothing is created."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    default = parse({"path": "/t"}).cache.directory()
    assert default.parent == tmp_path
    assert default.name.startswith("lookupcache-")
    assert not default.exists()
    monkeypatch.setenv("HOME", "/home/x")
    assert parse({"path": "/t", "lookup.cache.dir": "~/c"}).cache.directory() == Path("/home/x/c")


def conf_file(tmp_path: Path, text: str | bytes, name: str = "x.conf") -> dict[str, str]:
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return {"LOOKUPCACHE_CONF": str(tmp_path / name)}


def test_where_a_conf_file_is(tmp_path: Path) -> None:
    """$LOOKUPCACHE_CONF names a file of `key = value` lines; without it $SPARK_CONF_DIR/lookupcache.conf is read if it exists."""
    text = "# ours\n\nLookup.Cache.Dir = /ssd/a=b%s  # why\nlookup.max-retries=7\n"
    conf_variables, options = conf_file(tmp_path, text), {"lookup.cache.dir": "/ssd/a=b%s", "lookup.max-retries": "7"}
    assert conf_file_options(conf_variables) == options
    assert conf_file_options({}) == conf_file_secrets({}) == {}
    (tmp_path / "spark").mkdir()
    environ = {"SPARK_CONF_DIR": str(tmp_path / "spark")}
    assert conf_file_options(environ) == {}
    (tmp_path / "spark" / "lookupcache.conf").write_text("lookup.max-retries = 1")
    assert conf_file_options(environ) == conf_file_options({**environ, "LOOKUPCACHE_CONF": ""})
    assert conf_file_options(environ) == {"lookup.max-retries": "1"}
    assert conf_file_options({**environ, **conf_variables}) == options


NO_CONF = [
    (f"lookup.storage.secret = {SECRET}\nlookup.cache.dir = /".encode() + b"\xfc", "cannot be read"),
    (b"lookup.max-retries = 1\n\nlookup.cache.dir /ssd", "line 3: expected key = value"),
    (f"lookup.storage.secret: {SECRET}".encode(), "line 1: expected key = value"),
    (b"lookup.max-retries = 1\nlookup.max-retries = 2", "line 2: lookup.max-retries is set twice"),
    (b"[lookup]\nlookup.max-retries = 1", "without [sections]"),
    (b"lookup.cache.dir = /a\n lookup.cache.max-bytes = 1 GiB\n", "the line after lookup.cache.dir is indented"),
]


def test_what_is_no_conf_file(tmp_path: Path) -> None:
    """A named file that cannot be read, or a line that is no `key = value`, is an error with the path and the line's number; the line is not shown."""
    (tmp_path / "lookupcache.conf").mkdir()
    named = [(str(tmp_path / "missing.conf"), "does not exist"), (str(tmp_path), "cannot be read")]
    cases = [({"LOOKUPCACHE_CONF": path}, says) for path, says in named]
    cases += [({"SPARK_CONF_DIR": str(tmp_path)}, "cannot be read")]
    cases += [(conf_file(tmp_path, text, f"{number}.conf"), says) for number, (text, says) in enumerate(NO_CONF)]
    for environ, says in cases:
        with pytest.raises(OptionError, match="conf file ") as caught:
            conf_file_options(environ)
        assert says in str(caught.value)
        assert next(iter(environ.values())) in str(caught.value)
        chain = (caught.value, caught.value.__cause__, caught.value.__context__)
        assert SECRET not in repr((chain, [vars(error) for error in chain if error is not None]))


SECRET_KEYS = [
    "key", "secret", "token", "password", "passwd", "account_key", "sas_token", "sas", "credential", "credentials",
    "connection_string", "access_key_id", "secret_access_key", "aws_session_token", "client_secret", "api_key",
    "private_key", "shared_key", "signature",
]  # fmt: skip
PLAIN_KEYS = ["endpoint_url", "anon", "region", "profile", "username", "keyring_backend", "monkey", "use_ssl", "project"]  # fmt: skip


@pytest.mark.parametrize("prefix", ["lookup.storage.", "lookup.provider."])
def test_a_secret_is_refused_as_a_read_or_table_option(prefix: str) -> None:
    """The error hides the value, also in URLs and JSON. Names that only resemble a credential's are accepted."""
    base_options = {"path": "/t", **(PROVIDER if prefix == "lookup.provider." else {})}
    for key, value in (
        *((spell(name), SECRET) for name in SECRET_KEYS for spell in (str.lower, str.upper)),
        *(("client_kwargs", f'{{"{name}": "{SECRET}"}}') for name in SECRET_KEYS),
        ("client_kwargs", f'{{"deep": [{{"token": "{SECRET}"}}]}}'),
        ("proxy", f"http://me:{SECRET}@h:9"),
        ("url", f"jdbc:sqlserver://h;user=u;password={SECRET}"),
        ("url", f"host=h user=u password = {SECRET}"),
        ("url", f"PASSWD='{SECRET}'"),
        ("endpoint", f"https://db/?user=x&api_key={SECRET}"),
        ("client_kwargs", f'{{"proxy": "http://h/?token={SECRET}"}}'),
    ):
        for layers in ([{**base_options, prefix + key: value}], [base_options, {prefix.title() + key: value}]):
            message = refusal(*layers)
            assert "looks like a credential" in message
            assert "conf file" in message or prefix == "lookup.provider."
            assert SECRET not in message
    for plain in PLAIN_KEYS if prefix == "lookup.storage." else []:
        more = {prefix + plain: "x", prefix + "client_kwargs": f'{{"{plain}": "x"}}'}
        options = parse({**base_options, **more})
        assert dict(options.storage.parameters) == {plain: "x", "client_kwargs": {plain: "x"}}


@pytest.mark.parametrize("url", ["mariadb://h/shop?ssl_ca=a&user=tester&ssl_key=b", "mariadb://tester@h/shop"])
def test_the_user_of_a_database_is_not_shown(url: str) -> None:
    """The name of a database's table in errors and plans does not have the user, nor do options that are shown."""
    options = parse({"path": url, "lookup.table": "customers", "lookup.keys": "id"})
    assert options.place.startswith("mariadb://")
    assert "tester" not in options.place + repr(options)


def test_the_conf_files_secrets_stay_on_the_host(tmp_path: Path) -> None:
    """A conf file may hold credentials, also nested; none enters the options that travel with a plan."""
    environ = conf_file(
        tmp_path,
        f"lookup.storage.secret = {SECRET}\n"
        f"lookup.storage.key = 1234567890\n"
        f'lookup.storage.client_kwargs = {{"aws_secret_access_key": "{SECRET}", "verify": false}}\n'
        f'lookup.storage.token = {{"refresh": "{SECRET}"}}\n'
        f"lookup.storage.proxy = http://me:{SECRET}@h:8\n"
        "lookup.storage.endpoint_url = http://h:9\n",
    )
    options = parse({"path": "s3://b/t"}, conf=conf_file_options(environ))
    assert dict(options.storage.parameters) == {"endpoint_url": "http://h:9"}
    assert SECRET.encode() not in pickle.dumps(options)
    assert SECRET not in repr(options)
    assert conf_file_secrets(environ) == {
        "secret": SECRET,
        "key": "1234567890",
        "client_kwargs": {"aws_secret_access_key": SECRET, "verify": False},
        "token": {"refresh": SECRET},
        "proxy": f"http://me:{SECRET}@h:8",
    }


def test_messages_are_redacted() -> None:
    """A value that is or holds a credential is hidden, the rest of a URL or text is shown: by `redact`, in a `repr`, and in every refusal."""
    redacted_values = {
        ("lookup.storage.secret", SECRET): "[redacted]",
        ("lookup.storage.client-kwargs", f'{{"token": "{SECRET}"}}'): "[redacted]",
        ("path", f"s3://k:{SECRET}@b/x"): "s3://[redacted]@b/x",
        ("path", f"s3://k:p@{SECRET}@b/x@y"): "s3://[redacted]@b/x@y",
        ("path", f"http://h/x?X-Amz-Signature={SECRET}&y=1"): "http://h/x?X-Amz-Signature=[redacted]&y=1",
        ("path", f"http://h/x?api_key={SECRET}"): "http://h/x?api_key=[redacted]",
        ("path", "s3://b/a@b?c"): "s3://b/a@b?c",
        ("lookup.keys", "id"): "id",
    }
    assert {option: redact(*option) for option in redacted_values} == redacted_values
    assert redact("lookup.storage.client_kwargs", {"a": {"token": SECRET}}) == "[redacted]"
    path_options = {"path": f"https://me:{SECRET}@h/t.csv?x=1&sig={SECRET}", "lookup.keys": "id"}
    assert repr(parse({**path_options, "lookup.storage.endpoint_url": "http://h:9"})) == (
        "LookupOptions(path='https://[redacted]@h/t.csv?x=1&sig=[redacted]', lookup.keys=('id',), "
        "lookup.storage.endpoint_url='http://h:9')"
    )
    for layers, conf in (
        ([{"path": "/t", "secretly": SECRET}], None),
        ([{"path": "/t", "lookup.format": f"http://u:{SECRET}@h"}], None),
        ([{"path": "/t"}], {"lookup.storage.client-kwargs": f'{{"secret": "{SECRET}"}}'}),
        ([{"path": "/t"}], {"lookup.storage.secret.x": SECRET}),
    ):
        assert SECRET not in refusal(*layers, conf=conf)


WITH_VERSIONS, WITHOUT = True, False


@pytest.mark.parametrize(
    ("options", "shows_changes", "says"),
    [
        ({}, WITH_VERSIONS, None),
        (PROVIDER, WITH_VERSIONS, None),
        ({**PROVIDER, "Lookup.Retry.Fixed-Delay": "2 s"}, WITHOUT, None),
        (PROVIDER, WITHOUT, "argument wait: provider a:b has no version() that shows when to look up waiting rows again: set lookup.retry.fixed-delay, alone"),
        ({**PROVIDER, "lookup.retry.fixed-delay": "2 s"}, WITH_VERSIONS, "lookup.retry.fixed-delay has no meaning with the argument wait"),
        (RETRY, WITHOUT, "lookup.retry.predicate and lookup.retry.max-attempts have no meaning with the argument wait"),
        ({"lookup.retry.fixed-delay": "2 s"}, WITH_VERSIONS, "waiting rows are looked up again in each new version of this table: remove the option"),
        (DATABASE, WITH_VERSIONS, None),
        (DATABASE, WITHOUT, "argument wait: this table has no lookup.version-query that shows when to look up waiting rows again: set lookup.retry.fixed-delay, alone"),
        ({**DATABASE, "lookup.retry.fixed-delay": "2 s"}, WITHOUT, None),
        ({**DATABASE, "lookup.retry.fixed-delay": "2 s"}, WITH_VERSIONS, "in each new version of this table: remove the option"),
        ({**PROVIDER, "lookup.retry.fixed-delay": "soon"}, WITHOUT, "option lookup.retry.fixed-delay = 'soon': expected a duration"),
        ({**PROVIDER, "lookup.retry.fixed-delay": "0 s"}, WITHOUT, "greater than zero"),
    ],
)  # fmt: skip
def test_what_wakes_facts_that_wait(options: dict[str, str], shows_changes: bool, says: str | None) -> None:
    """If facts wait, a provider or database without versions needs the delay of retries, and takes it alone; no other table takes it."""

    def check() -> float | None:
        remaining, delay_s = take_retry_delay(options)
        for group in parse({"path": "t", **remaining}).kinds:
            group.check_waiting(shows_changes, delay_s)
        return delay_s

    if says is None:
        assert check() == (2.0 if "fixed-delay" in "".join(options).lower() else None)
    else:
        with pytest.raises(OptionError) as caught:
            check()
        assert says in str(caught.value)
