"""`LookupOptions`: strings become one frozen, checked value, and credentials never do."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_lookup.base.errors import OptionError, PysparkLookupError
from pyspark_lookup.options.conf_file import conf_file_options, conf_file_secrets, redact
from pyspark_lookup.options.enums import (
    CacheMode,
    FileFormatName,
    FilterPushdown,
    KeyedWrite,
    MetadataSource,
    MissingColumns,
    OnBusy,
    OnError,
    OnVersionGone,
    Overlap,
    RetryPredicate,
    StreamStart,
    VersionAt,
    View,
)
from pyspark_lookup.options.lookup_options import HOST_KEYS, LookupOptions, options_table
from pyspark_lookup.options.parsing import parse_bytes, parse_duration_s
from tests import test_full_cache_options
from tests.fuzzing import MORE

MIB = 2**20
SECRET = "s3cr3t-Value"


def parse(key: str, text: str, **others: str) -> Any:
    """The value of one option, beside what it needs."""
    field = next(f for f in dataclasses.fields(LookupOptions) if f.metadata and f.metadata["key"] == key)
    return getattr(LookupOptions.parse({"path": "/t", **others, key: text}), field.name)


def refusal(*layers: Mapping[str, str], conf: Mapping[str, str] | None = None) -> str:
    """What the error says when these options are refused."""
    with pytest.raises(OptionError) as caught:
        LookupOptions.parse(*layers, conf=conf)
    return str(caught.value)


# --- every option's valid forms ----------------------------------------------------------------------

VALID = [
    ("path", " s3a://b/dim ", "s3a://b/dim"),
    ("path", "/data/mein tisch/ü*.parquet", "/data/mein tisch/ü*.parquet"),
    ("lookup.keys", "id", ("id",)),
    ("lookup.keys", " id , Name ", ("id", "Name")),
    ("lookup.keys", "`a,b`,`c``d`", ("a,b", "c`d")),
    ("lookup.keys", "zwei wörter,` x `", ("zwei wörter", " x ")),
    ("lookup.format", "parquet", FileFormatName.PARQUET),
    ("lookup.format", "ARROW", FileFormatName.ARROW),
    ("lookup.format", "Csv", FileFormatName.CSV),
    ("lookup.format", "json", FileFormatName.JSON),
    ("lookup.format", " orc ", FileFormatName.ORC),
    (
        "lookup.schema",
        "id INT, `a b` ARRAY<STRING>",
        pa.schema({"id": pa.int32(), "a b": pa.list_(pa.field("element", pa.string()))}),
    ),
    ("lookup.csv.header", "false", False),
    ("lookup.csv.sep", ";", ";"),
    ("lookup.csv.sep", "\\t", "\t"),
    ("lookup.csv.quote", "'", "'"),
    ("lookup.csv.quote", "", ""),
    ("lookup.csv.escape", "\\", "\\"),
    ("lookup.csv.null-value", " NA", " NA"),
    ("lookup.csv.encoding", "ISO-8859-1", "iso8859-1"),
    ("lookup.csv.infer-schema", "FALSE", False),
    ("lookup.write.batch", "orders-by.city_1:017", ("orders-by.city_1", 17)),
    ("lookup.write.missing-columns", "keep", MissingColumns.KEEP),
    ("lookup.columns", "b,a", ("b", "a")),
    ("lookup.where", "id = 1 ", "id = 1"),
    ("lookup.partition", "max_pt()", "max_pt()"),
    ("lookup.view", "data", View.DATA),
    ("lookup.view", "FILES", View.FILES),
    ("lookup.view", "versions", View.VERSIONS),
    ("lookup.on-error", "null", OnError.NULL),
    ("lookup.view", "metrics", View.METRICS),
    ("lookup.metrics.tasks", "8", 8),
    ("lookup.success-file", "true", True),
    ("lookup.success-file", " FALSE", False),
    ("lookup.on-busy", "fail", OnBusy.FAIL),
    ("lookup.busy-wait", "0 s", 0.0),
    ("lookup.busy-timeout", "1 h", 3600.0),
    ("lookup.settle", "500 ms", 0.5),
    ("lookup.settle", "0 s", 0.0),
    ("lookup.metadata.source", "ufs", MetadataSource.UFS),
    ("lookup.version-at", "auto", VersionAt.AUTO),
    ("lookup.version-at", "PLAN", VersionAt.PLAN),
    ("lookup.version-at", "read", VersionAt.READ),
    ("lookup.version", "3", 3),
    ("lookup.valid-write-ids", " t1:5:4:2,4: ", "t1:5:2:2,4:"),
    ("lookup.floor", " 8f3a:12", "8f3a:12"),
    ("lookup.write.mode", "UPSERT", KeyedWrite.UPSERT),
    ("lookup.write.unique-keys", "true", True),
    ("lookup.write.merge-schema", "TRUE", True),
    ("lookup.create-if-not-exists", "false", False),
    ("lookup.valid-from", "`valid from`", "valid from"),
    ("lookup.stream.start", "latest", StreamStart.LATEST),
    ("lookup.stream.start", "snapshot", StreamStart.SNAPSHOT),
    ("lookup.stream.start", "12", 12),
    ("lookup.stream.max-rows-per-trigger", "1000", 1000),
    ("lookup.stream.max-files-per-trigger", "10", 10),
    ("lookup.stream.max-bytes-per-trigger", "1 MiB", 1024**2),
    ("lookup.write.compact-after", "0", 0),
    ("lookup.write.timeout", "2 h", 7200.0),
    ("lookup.on-version-gone", "newer", OnVersionGone.NEWER),
    ("lookup.on-version-gone", "FAIL", OnVersionGone.FAIL),
    ("lookup.cache", "none", CacheMode.NONE),
    ("lookup.provider", "my.module:Some.factory", "my.module:Some.factory"),
    ("lookup.cache.dir", "/ssd/cache", "/ssd/cache"),
    ("lookup.cache.max-bytes", "1 MiB", MIB),
    ("lookup.cache.max-bytes", "20g", 20 * 2**30),
    ("lookup.block.size", "65536", 65536),
    ("lookup.max-retries", "0", 0),
    ("lookup.max-retries", "12", 12),
    ("lookup.filter-pushdown", "auto", FilterPushdown.AUTO),
    ("lookup.filter-pushdown", "TRUE", FilterPushdown.TRUE),
    ("lookup.filter-pushdown", "false", FilterPushdown.FALSE),
    ("lookup.scan.split-size", "128m", 128 * MIB),
    ("lookup.storage.*", "", ()),
    ("lookup.provider.*", "", ()),
]
# Of options that need another to have a meaning.
PARTIAL = {"lookup.cache": "PARTIAL", "lookup.keys": "id", "lookup.partial-cache.max-rows": "1"}
PROVIDER = {"lookup.provider": "a:b"}
RETRY = {
    **PROVIDER,
    "lookup.retry.predicate": "lookup_miss",
    "lookup.retry.fixed-delay": "1 s",
    "lookup.retry.max-attempts": "1",
}
VALID_WITH = [
    ("lookup.valid-to", "until", "until", {"lookup.valid-from": "since"}),
    ("lookup.overlap", "newest", Overlap.NEWEST, {"lookup.valid-from": "since", "lookup.valid-to": "until"}),
    ("lookup.overlap", "ERROR", Overlap.ERROR, {"lookup.valid-from": "since", "lookup.valid-to": "until"}),
    ("lookup.partial-cache.expire-after-access", "10 min", 600.0, PARTIAL),
    ("lookup.partial-cache.expire-after-access", "0 s", 0.0, PARTIAL),
    ("lookup.partial-cache.expire-after-write", "PT1H", 3600.0, PARTIAL),
    ("lookup.partial-cache.max-rows", "0", 0, PARTIAL),
    ("lookup.partial-cache.max-rows", "15213", 15213, PARTIAL),
    ("lookup.partial-cache.max-bytes", "1g", 2**30, PARTIAL),
    ("lookup.partial-cache.cache-missing-key", "false", False, PARTIAL),
    ("lookup.async.capacity", "1", 1, PROVIDER),
    ("lookup.async.timeout", "300 s", 300.0, PROVIDER),
    ("lookup.retry.predicate", "LOOKUP_MISS", RetryPredicate.LOOKUP_MISS, RETRY),
    ("lookup.retry.fixed-delay", "10 s", 10.0, RETRY),
    ("lookup.retry.max-attempts", "3", 3, RETRY),
]


@pytest.mark.parametrize(("key", "text", "value"), [case for case in VALID if not case[0].endswith(".*")])
def test_each_valid_form_parses(key: str, text: str, value: object) -> None:
    """Each documented spelling of an option becomes its value, in any letter case and with spaces around."""
    assert parse(key, text) == value


@pytest.mark.parametrize(("key", "text", "value", "others"), VALID_WITH)
def test_each_valid_form_parses_with_others(key: str, text: str, value: object, others: dict[str, str]) -> None:
    """The same for options that need another."""
    assert parse(key, text, **{other: value for other, value in others.items() if other != key}) == value


@pytest.mark.parametrize(
    ("text", "seconds"), [("-1", -1.0), ("0", 0.0), (" 0 ", 0.0), ("0 s", 0.0), ("5 min", 300.0), ("PT1M30S", 90.0)]
)
def test_sync_interval_is_never_always_or_a_duration(text: str, seconds: float) -> None:
    """The sync interval takes -1, 0 and durations (Alluxio's three cases)."""
    assert parse("lookup.metadata.sync-interval", text, **{"lookup.metadata.source": "CACHE"}) == seconds


def test_every_option_has_a_valid_form_here() -> None:
    """No option is without a test of its valid forms, and the README's table has a row for each."""
    keys = {f.metadata["key"] for f in dataclasses.fields(LookupOptions) if f.metadata}
    full = {"lookup.full-cache." + key for _, key, _, _ in test_full_cache_options.VALID}
    assert keys == {case[0] for case in [*VALID, *VALID_WITH]} | {"lookup.metadata.sync-interval"} | full
    rows = options_table().splitlines()
    assert len(rows) == len(keys) + 2
    assert all(f"| `{key}` |" in "\n".join(rows) for key in keys)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10 s", 10), ("10s", 10), ("10 sec", 10), ("10 SECONDS", 10), ("1 second", 1), ("1 secs", 1),
        ("250 ms", 0.25), ("250 millis", 0.25), ("1 milli", 0.001), ("1 millisecond", 0.001), ("2 milliseconds", 0.002),
        ("1.5 h", 5400), ("1 hour", 3600), ("2 hours", 7200), ("5 min", 300), ("1 mins", 60), ("1 minute", 60),
        ("2 minutes", 120), ("7 d", 604800), ("1 day", 86400), ("2 days", 172800),
        ("PT10S", 10), ("pt0.5s", 0.5), ("P1DT2H3M4S", 93784), ("P7D", 604800), ("PT0S", 0), (" PT1H ", 3600),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    """Durations are Flink's and ISO-8601's forms, in seconds."""
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "10", "s", "-5 s", "10 parsecs", "1h30m", "P", "PT", "PT5", "1e3 s", "5 m", "NaN s"]
)
def test_bad_durations(text: str) -> None:
    """What is no duration is refused with an example of one."""
    message = refusal({"path": "/t", "lookup.settle": text})
    assert f"lookup.settle = {text!r}" in message
    assert "'10 s'" in message


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), ("0", 0), ("2k", 2048), ("2 KB", 2048), ("2KiB", 2048), ("4 MiB", 4 * MIB), ("4m", 4 * MIB), ("1 g", 2**30), ("1TiB", 2**40), ("7 b", 7)],
)  # fmt: skip
def test_sizes(text: str, count: int) -> None:
    """Sizes are plain or with a unit, a power of 1024 in any spelling."""
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5g", "4 XB", "4 ib", "1 MiB 2", "0x10", "9" * 5000])
def test_bad_sizes(text: str) -> None:
    """What is no size is refused with an example of one, however long it is."""
    message = refusal({"path": "/t", "lookup.block.size": text})
    assert f"lookup.block.size = {text!r}" in message
    assert "'4 MiB'" in message


@pytest.mark.parametrize(
    ("key", "text", "bound"),
    [
        ("lookup.cache.max-bytes", "1023k", str(MIB)),
        ("lookup.block.size", "1k", "65536"),
        ("lookup.block.size", "2g", str(2**30)),
        ("lookup.scan.split-size", "0", str(MIB)),
    ],
)
def test_sizes_out_of_bounds(key: str, text: str, bound: str) -> None:
    """A size outside its bounds is refused with the bounds."""
    message = refusal({"path": "/t", key: text})
    assert f"{key} = {text!r}" in message
    assert bound in message


@pytest.mark.parametrize(
    ("key", "text", "near"),
    [
        ("lookup.format", "parket", "did you mean parquet?"),
        ("lookup.metadata.source", "UFO", "did you mean UFS?"),
        ("lookup.metadata.source", "cached", "did you mean CACHE?"),
        ("lookup.version-at", "planning", "did you mean PLAN?"),
        ("lookup.on-version-gone", "newest", "did you mean NEWER?"),
        ("lookup.view", "metric", "did you mean metrics?"),
        ("lookup.metrics.tasks", "0", "1 or more"),
        ("lookup.filter-pushdown", "ture", "did you mean true?"),
        ("lookup.cache", "PARTIALLY", "did you mean PARTIAL?"),
        ("lookup.format", "xyz", "parquet, arrow, csv, json, orc"),
        ("lookup.success-file", "yes", "true or false"),
        ("lookup.success-file", "", "true or false"),
        ("lookup.max-retries", "-1", "whole number"),
        ("lookup.max-retries", "3.5", "whole number"),
        ("lookup.max-retries", "9" * 5000, "whole number"),
        ("lookup.metadata.sync-interval", "-2", "-1 (never), 0 (always)"),
        ("lookup.metadata.sync-interval", "5", "'5 min'"),
        ("lookup.where", "  ", "some text"),
        ("path", " ", "some text"),
    ],
)
def test_a_bad_value_is_refused_with_the_nearest_choice(key: str, text: str, near: str) -> None:
    """A value that does not parse is refused by key, value and nearest valid choice."""
    message = refusal({"path": "/t", "lookup.metadata.source": "CACHE", key: text})
    assert f"option {key} = {text!r} (read option)" in message
    assert near in message


@pytest.mark.parametrize("text", ["", ",", "a,", ",a", "a,,b", "a,a", "`a", "a`", "a`b", "`a` `b`", "``", "`a`b"])
def test_bad_column_lists(text: str) -> None:
    """A list of names with a hole, a lone backquote or a name twice is refused, not guessed."""
    assert "column names separated by commas" in refusal({"path": "/t", "lookup.columns": text})


@pytest.mark.parametrize("layer", ["read", "table", "conf"])
@pytest.mark.parametrize(
    ("key", "shown", "near"),
    [
        ("lookup.key", "'5'", "did you mean lookup.keys?"),
        ("lookup.max-retry", "'5'", "did you mean lookup.max-retries?"),
        ("lookup.metadata.sync_interval", "'5'", "did you mean lookup.metadata.sync-interval?"),
        ("Lookup.Formats", "'5'", "did you mean lookup.format?"),
        ("pahts", "'5'", "did you mean path?"),
        ("header", "'5'", "known are path, lookup.keys"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(layer: str, key: str, shown: str, near: str) -> None:
    """A key nobody knows is refused with its value (of a conf file without it) and the nearest known one, whatever layer it is in."""
    with pytest.raises(OptionError) as caught:
        LookupOptions.parse(**{"read": {}, layer: {key: "5"}})
    if layer == "conf" and shown == "'5'":
        shown = "'…'"
    assert f"unknown option {key.lower()} = {shown}" in str(caught.value)
    assert near in str(caught.value)


@pytest.mark.parametrize("name", ["", "*", "client_kwargs.verify", "client-kwargs"])
def test_storage_options_are_parameter_names(name: str) -> None:
    """`lookup.storage.` is followed by one parameter's name; nested ones are JSON, and the error shows how."""
    message = refusal({"path": "/t", f"lookup.storage.{name}": "1"})
    assert f"unknown option lookup.storage.{name} = '1'" in message
    assert "lookup.storage.client_kwargs = '{" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["path is missing", "load('s3://bucket/dim')"]),
        ({"path": "/t", "lookup.metadata.source": "CACHE"}, ["lookup.metadata.source = 'CACHE'", "sync-interval", "-1"]),
        ({"path": "/t", "lookup.metadata.sync-interval": "5 min"}, ["sync-interval contradicts", "= 'CACHE'"]),
        (
            {"path": "/t", "lookup.version": "3", "lookup.valid-write-ids": "t:1:9223372036854775807::"},
            ["lookup.version", "lookup.valid-write-ids", "give one"],
        ),
        (
            {"path": "/t", "lookup.cache": "partial", "lookup.keys": "id"},
            ["lookup.cache = 'PARTIAL'", "expire-after-access", "expire-after-write", "max-rows", "max-bytes"],
        ),
        (
            {"path": "/t", "lookup.cache": "PARTIAL", "lookup.keys": "id", "lookup.partial-cache.cache-missing-key": "false"},
            ["without any bound"],
        ),
        ({"path": "/t", "lookup.partial-cache.max-rows": "5"}, ["lookup.partial-cache.max-rows", "should be 'PARTIAL'"]),
        ({"path": "/t", "lookup.cache": "FULL", "lookup.partial-cache.max-rows": "5"}, ["should be 'PARTIAL'"]),
        ({"path": "/t", "lookup.async.capacity": "5"}, ["lookup.async.capacity", "set lookup.provider"]),
        ({"path": "/t", "lookup.provider.table": "x"}, ["lookup.provider.table", "set lookup.provider"]),
        ({**PROVIDER, "lookup.retry.predicate": "lookup_miss"}, ["all three or none"]),
        ({**PROVIDER, "lookup.format": "csv"}, ["lookup.format", "tables of files"]),
        ({**PROVIDER, "lookup.storage.anon": "true"}, ["lookup.storage.anon", "tables of files"]),
        ({**PROVIDER, "lookup.provider.password": "hunter2"}, ["lookup.provider.password", "looks like a credential"]),
        ({**PROVIDER, "lookup.provider.uri": "postgresql://u:hunter2@h/d"}, ["lookup.provider.uri", "credential"]),
        ({"path": "/t", "lookup.view": "files", "lookup.where": "a = 1"}, ["lookup.view = 'files'", "filter it in Spark"]),
        ({"path": "/t", "lookup.view": "metrics", "lookup.columns": "a"}, ["lookup.view = 'metrics'", "lookup.columns"]),
    ],
)  # fmt: skip
def test_contradictions(options: dict[str, str], words: list[str]) -> None:
    """A combination that contradicts itself is refused by key, value and way out."""
    message = refusal(options)
    assert all(word in message for word in words)


# --- precedence --------------------------------------------------------------------------------------


def test_precedence() -> None:
    """A read option beats a table option, which beats the conf file, which beats the default."""
    conf = {
        "lookup.max-retries": "1",
        "lookup.block.size": "1m",
        "lookup.storage.anon": "false",
        "lookup.settle": "1 s",
    }
    table = {"path": "/table", "lookup.max-retries": "2", "lookup.block.size": "2m", "lookup.storage.anon": "true"}
    read = {"lookup.max-retries": "4"}
    options = LookupOptions.parse(read, table, conf)
    assert (options.path, options.max_retries, options.block_size) == ("/table", 4, 2 * MIB)
    assert (options.settle_s, options.split_size) == (1.0, 128 * MIB)
    assert options.storage_options() == {"anon": True}
    assert LookupOptions.parse({"path": "/read"}, table).path == "/read"


def test_storage_options_merge_by_name() -> None:
    """Each parameter of the filesystem is taken from the nearest layer that names it; text becomes JSON values."""
    options = LookupOptions.parse(
        {"path": "s3://b/x", "lookup.storage.max_concurrency": "5"},
        {"LOOKUP.STORAGE.client_kwargs": '{"verify": false}', "lookup.storage.anon": "true"},
        {"lookup.storage.anon": "false", "lookup.storage.endpoint_url": "http://h:9", "lookup.storage.nothing": "null"},
    )
    assert options.storage_options() == {
        "max_concurrency": 5,
        "client_kwargs": {"verify": False},
        "anon": True,
        "endpoint_url": "http://h:9",
        "nothing": None,
    }


def test_a_bad_value_in_a_hidden_layer_is_refused_too() -> None:
    """A bad value is refused even where a nearer layer overrides it, and the message names its layer."""
    assert "(table option)" in refusal({"path": "/t", "lookup.max-retries": "1"}, {"lookup.max-retries": "x"})
    assert "(conf file)" in refusal({"path": "/t"}, conf={"lookup.max-retries": "x"})


def test_overridden_replaces_values() -> None:
    """`overridden` gives the same options with some replaced, and refuses what parse refuses."""
    options = LookupOptions.parse({"path": "/t", "lookup.columns": "a"})
    assert options.overridden({"lookup.columns": "b"}) == LookupOptions.parse({"path": "/t", "lookup.columns": "b"})
    with pytest.raises(OptionError, match=r"lookup\.columns = ','"):
        options.overridden({"lookup.columns": ","})
    with pytest.raises(OptionError, match=r"did you mean lookup\.columns"):
        options.overridden({"lookup.column": "a"})


def test_on_host_moves_what_nobody_set() -> None:
    """A session moves host options off their default or the conf file's value, never off an explicit one."""
    conf = {"lookup.cache.dir": "/conf", "lookup.max-retries": "1"}
    options = LookupOptions.parse({"path": "/t", "lookup.max-retries": "2"}, None, conf)
    moved = options.on_host({"lookup.cache.dir": "/host", "lookup.max-retries": "9", "lookup.cache.max-bytes": "2m"})
    assert (moved.cache_dir, moved.max_retries, moved.cache_max_bytes) == ("/host", 2, 2 * MIB)
    assert options.on_host({}) == options


def test_on_host_takes_host_options_only() -> None:
    """A session conf that would change what a query means is refused with the ones that may be set."""
    options = LookupOptions.parse({"path": "/t"})
    with pytest.raises(OptionError) as caught:
        options.on_host({"lookup.where": "a = 1"})
    assert "spark.lookupcache.where" in str(caught.value)
    assert all(key in str(caught.value) for key in HOST_KEYS)
    with pytest.raises(OptionError, match=r"spark\.lookupcache\.max-retries = 'many': expected a whole number"):
        options.on_host({"lookup.max-retries": "many"})
    with pytest.raises(OptionError, match=r"unknown option lookup\.nope"):
        options.on_host({"lookup.nope": "1"})


def test_cache_directory_default_is_per_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without `lookup.cache.dir` the directory is one per user below the temporary directory; nothing is created."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    default = LookupOptions.parse({"path": "/t"}).cache_directory()
    assert default.parent == tmp_path
    assert default.name.startswith("lookupcache-")
    assert not default.exists()
    monkeypatch.setenv("HOME", "/home/x")
    assert LookupOptions.parse({"path": "/t", "lookup.cache.dir": "~/c"}).cache_directory() == Path("/home/x/c")


# --- the conf file -----------------------------------------------------------------------------------


def conf_file(tmp_path: Path, text: str, name: str = "x.conf") -> dict[str, str]:
    """An environment whose $LOOKUPCACHE_CONF holds `text`."""
    (tmp_path / name).write_text(text)
    return {"LOOKUPCACHE_CONF": str(tmp_path / name)}


def test_conf_file_by_its_own_variable(tmp_path: Path) -> None:
    """$LOOKUPCACHE_CONF names a file of `key = value` lines; `#` lines, empty lines and letter case do not matter."""
    environ = conf_file(tmp_path, "# ours\n\nLookup.Cache.Dir = /ssd/a=b%s\nlookup.max-retries=7\n")
    assert conf_file_options(environ) == {"lookup.cache.dir": "/ssd/a=b%s", "lookup.max-retries": "7"}


def test_conf_file_beside_sparks(tmp_path: Path) -> None:
    """$SPARK_CONF_DIR/lookupcache.conf is read if it exists and $LOOKUPCACHE_CONF does not say otherwise."""
    (tmp_path / "spark").mkdir()
    environ = {"SPARK_CONF_DIR": str(tmp_path / "spark")}
    assert conf_file_options(environ) == {}
    (tmp_path / "spark" / "lookupcache.conf").write_text("lookup.max-retries = 1")
    assert conf_file_options(environ) == {"lookup.max-retries": "1"}
    assert conf_file_options({**environ, "LOOKUPCACHE_CONF": ""}) == {"lookup.max-retries": "1"}
    own = conf_file(tmp_path, "lookup.max-retries = 2")
    assert conf_file_options({**environ, **own}) == {"lookup.max-retries": "2"}


def test_no_conf_file() -> None:
    """Without either variable there are no defaults and no secrets."""
    assert conf_file_options({}) == {}
    assert conf_file_secrets({}) == {}


def test_an_unreadable_conf_file_is_an_error(tmp_path: Path) -> None:
    """A file that was named but is missing, a directory or not UTF-8 is an error with its path, not silence."""
    (tmp_path / "latin1.conf").write_bytes(b"lookup.cache.dir = /\xfc")
    (tmp_path / "lookupcache.conf").mkdir()
    for environ in (
        {"LOOKUPCACHE_CONF": str(tmp_path / "missing.conf")},
        {"LOOKUPCACHE_CONF": str(tmp_path)},
        {"LOOKUPCACHE_CONF": str(tmp_path / "latin1.conf")},
        {"SPARK_CONF_DIR": str(tmp_path)},
        {"SPARK_CONF_DIR": "x" * 5000},
    ):
        with pytest.raises(OptionError, match="conf file ") as caught:
            conf_file_options(environ)
        assert next(iter(environ.values())) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lookup.max-retries = 1\n\nlookup.cache.dir /ssd", "line 3: expected key = value"),
        ("lookup.storage.secret: " + SECRET, "line 1: expected key = value"),
        ("lookup.max-retries = 1\nlookup.max-retries = 2", "line 2: lookup.max-retries is there twice"),
        ("[lookup]\nlookup.max-retries = 1", "without [sections]"),
        ("[conf]\nlookup.max-retries = 1", "without [sections]"),
        ("lookup.max-retries = 1\n[DEFAULT]\nlookup.settle = 1 s", "without [sections]"),
    ],
)
def test_a_malformed_conf_file_is_an_error(tmp_path: Path, text: str, words: str) -> None:
    """A line that is no `key = value` is refused by its number; no line is ever dropped or shown."""
    environ = conf_file(tmp_path, text)
    with pytest.raises(OptionError) as caught:
        conf_file_options(environ)
    assert words in str(caught.value)
    assert environ["LOOKUPCACHE_CONF"] in str(caught.value)
    assert SECRET not in repr(caught.value)
    assert caught.value.__cause__ is None


# --- credentials -------------------------------------------------------------------------------------

SECRET_KEYS = [
    "key", "secret", "token", "password", "passwd", "account_key", "sas_token", "sas", "credential", "credentials",
    "connection_string", "access_key_id", "secret_access_key", "aws_session_token", "client_secret", "api_key",
    "private_key", "shared_key", "signature",
]  # fmt: skip
PLAIN_KEYS = [
    "endpoint_url",
    "anon",
    "region",
    "profile",
    "username",
    "keyring_backend",
    "monkey",
    "use_ssl",
    "project",
]


@pytest.mark.parametrize("name", SECRET_KEYS)
def test_a_secret_is_refused_as_a_read_or_table_option(name: str) -> None:
    """An option that would store a credential in a plan or catalog is refused, by key and never by value."""
    for layers in (
        [{"path": "/t", f"lookup.storage.{name}": SECRET}],
        [{"path": "/t"}, {f"Lookup.Storage.{name.upper()}": SECRET}],
        [{"path": "/t", "lookup.storage.client_kwargs": f'{{"deep": [{{"{name}": "{SECRET}"}}]}}'}],
        [{"path": "/t"}, {"lookup.storage.client_kwargs": f'{{"{name}": "{SECRET}"}}'}],
        [{"path": "/t", "lookup.storage.proxy": f"http://me:{SECRET}@h:9"}],
        [{"path": "/t"}, {"lookup.storage.client_kwargs": f'{{"proxy": "http://h/?token={SECRET}"}}'}],
    ):
        message = refusal(*layers)
        assert "looks like a credential" in message
        assert "conf file" in message
        assert SECRET not in message


@pytest.mark.parametrize("name", PLAIN_KEYS)
def test_a_plain_storage_option_is_taken(name: str) -> None:
    """Names that only resemble a credential's are taken, also inside JSON."""
    value = f'{{"{name}": "x"}}'
    options = LookupOptions.parse({"path": "/t", f"lookup.storage.{name}": "x", "lookup.storage.client_kwargs": value})
    assert options.storage_options() == {name: "x", "client_kwargs": {name: "x"}}


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
    options = LookupOptions.parse({"path": "s3://b/t"}, conf=conf_file_options(environ))
    assert options.storage_options() == {"endpoint_url": "http://h:9"}
    assert SECRET.encode() not in pickle.dumps(options)
    assert SECRET not in repr(options)
    assert conf_file_secrets(environ) == {
        "secret": SECRET,
        "key": "1234567890",
        "client_kwargs": {"aws_secret_access_key": SECRET, "verify": False},
        "token": {"refresh": SECRET},
        "proxy": f"http://me:{SECRET}@h:8",
    }


def test_repr_shows_what_was_set_without_credentials() -> None:
    """`repr` shows the options that differ from their defaults, URLs without user, password or signature."""
    options = LookupOptions.parse(
        {
            "path": f"https://me:{SECRET}@h/t.csv?x=1&sig={SECRET}",
            "lookup.keys": "id",
            "lookup.storage.endpoint_url": "http://h:9",
        }
    )
    shown = repr(options)
    assert SECRET not in shown
    assert "https://[redacted]@h/t.csv?x=1&sig=[redacted]" in shown
    assert "lookup.keys=('id',)" in shown
    assert "lookup.storage.endpoint_url='http://h:9'" in shown
    assert "lookup.max-retries" not in shown


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("lookup.storage.secret", SECRET, "[redacted]"),
        ("lookup.storage.client_kwargs", {"a": {"token": SECRET}}, "[redacted]"),
        ("lookup.storage.client-kwargs", f'{{"token": "{SECRET}"}}', "[redacted]"),
        ("path", f"s3://k:{SECRET}@b/x", "s3://[redacted]@b/x"),
        ("path", f"s3://k:p@{SECRET}@b/x@y", "s3://[redacted]@b/x@y"),
        ("path", f"http://h/x?X-Amz-Signature={SECRET}&y=1", "http://h/x?X-Amz-Signature=[redacted]&y=1"),
        ("path", f"http://h/x?api_key={SECRET}", "http://h/x?api_key=[redacted]"),
        ("path", "s3://b/a@b?c", "s3://b/a@b?c"),
        ("lookup.keys", "id", "id"),
    ],
)
def test_redact(key: str, value: object, shown: str) -> None:
    """What is or holds a credential is hidden, the rest of a URL or text is shown."""
    assert redact(key, value) == shown


def test_messages_are_redacted() -> None:
    """No refusal shows a credential: not an unknown option's value, nor a URL's."""
    for layers, conf in (
        ([{"path": "/t", "secretly": SECRET}], None),
        ([{"path": "/t", "lookup.format": f"http://u:{SECRET}@h"}], None),
        ([{"path": "/t"}], {"lookup.storage.client-kwargs": f'{{"secret": "{SECRET}"}}'}),
        ([{"path": "/t"}], {"lookup.storage.secret.x": SECRET}),
    ):
        assert SECRET not in refusal(*layers, conf=conf)


# --- the value ---------------------------------------------------------------------------------------


def test_the_value_is_frozen_hashable_and_picklable() -> None:
    """Equal options are equal and hash alike, also with JSON objects inside, and survive a pickle unchanged."""
    given = {"path": "/t", "lookup.keys": "a,b", "lookup.storage.client_kwargs": '{"verify": [1, 2]}'}
    options, again = LookupOptions.parse(given), LookupOptions.parse(dict(reversed(given.items())))
    assert options == again
    assert len({options, again, pickle.loads(pickle.dumps(options))}) == 1
    assert pickle.loads(pickle.dumps(options)).explicit == options.explicit == frozenset({"path", "lookup.keys"})
    assert options != LookupOptions.parse({**given, "lookup.storage.client_kwargs": '{"verify": [1]}'})
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.path = "/other"  # type: ignore[misc]


_KEYS = [f.metadata["key"] for f in dataclasses.fields(LookupOptions) if f.metadata]
_TEXT = st.one_of(
    st.text(),
    st.from_regex(r"-?[0-9]+(\.[0-9]+)? ?[a-zA-Z]*"),
    st.recursive(st.sampled_from(["1", '"a"', "null", "x"]), lambda inner: inner.map(lambda t: f'{{"secret": [{t}]}}')),
    st.sampled_from(["true", "CACHE", "[" * 100_000, '{"a":' * 50_000, "9" * 5000, "`", "P1DT", "1e999 s"]),
)
_LAYER = st.dictionaries(st.one_of(st.sampled_from([*_KEYS, "lookup.storage.x"]), st.text()), _TEXT, max_size=4)


@settings(max_examples=300 * MORE, deadline=None)
@given(read=_LAYER, table=_LAYER, conf=_LAYER)
def test_parse_raises_nothing_but_option_errors(
    read: dict[str, str], table: dict[str, str], conf: dict[str, str]
) -> None:
    """Arbitrary keys and texts become a value that can be shown and hashed, or an OptionError."""
    for layers in ((read, table, conf), ({"path": "/t", **read}, table, conf)):
        try:
            options = LookupOptions.parse(*layers)
        except PysparkLookupError as refused:
            assert type(refused) is OptionError
        else:
            assert repr(options)
            assert isinstance(hash(options), int)


def test_a_read_goes_back_to_the_store(tmp_path: Path) -> None:
    """A read's UFS drops the interval of the table's or the conf file's CACHE; its own interval contradicts it."""
    lower = {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "5 min"}
    back = {"path": "x", "lookup.metadata.source": "UFS"}
    assert LookupOptions.parse(back, conf=lower).sync_interval_s is None
    assert LookupOptions.parse(back, table=lower).metadata_source is MetadataSource.UFS
    with pytest.raises(OptionError, match="contradicts"):
        LookupOptions.parse(back | {"lookup.metadata.sync-interval": "5 min"}, conf=lower)


def test_storage_options_of_the_conf_file_are_for_remote_tables() -> None:
    """`lookup.storage.*` of a conf file reaches remote tables and leaves local ones alone; an option does not."""
    conf = {"lookup.storage.endpoint_url": "http://127.0.0.1:9"}
    assert LookupOptions.parse({"path": "s3://b/x"}, conf=conf).storage == (("endpoint_url", "http://127.0.0.1:9"),)
    assert LookupOptions.parse({"path": "/x"}, conf=conf).storage == ()
    assert LookupOptions.parse({"path": "file:/x"}, conf=conf).storage == ()
    assert LookupOptions.parse({"path": "/x", **conf}).storage != ()


def test_conf_file_lines_stand_alone(tmp_path: Path) -> None:
    """A comment may follow a value; an indented line, which would silently join the one before, is an error."""
    file = tmp_path / "lookupcache.conf"
    environ = {"LOOKUPCACHE_CONF": str(file)}
    file.write_text("lookup.cache.dir = /a  # why\n")
    assert conf_file_options(environ) == {"lookup.cache.dir": "/a"}
    file.write_text("lookup.cache.dir = /a\n lookup.cache.max-bytes = 1 GiB\n")
    with pytest.raises(OptionError, match=r"the line after lookup\.cache\.dir is indented"):
        conf_file_options(environ)
