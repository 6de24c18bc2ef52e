"""The errors for users who misspell something or pass another type: they repeat what the user wrote, and say what to write instead."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup import PeriodicCacheReloadTrigger, TimedCacheReloadTrigger, lookup_join
from pyspark_lookup.core.credentials import names_shown
from pyspark_lookup.errors import LookupFunctionError, OptionError, PysparkLookupError, SchemaError
from pyspark_lookup.lookup.catalog_tables import absolute_path
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.sources.registry import parse_options
from tests.support.lookup_functions import ONCE, Desk, SyncFunction

SUGGESTIONS = {
    "keys": "lookup.keys", "cache": "lookup.cache", "header": "lookup.csv.header", "sep": "lookup.csv.sep",
    "versionAsOf": "lookup.version", "timestampAsOf": "lookup.timestamp", "snapshot-id": "lookup.version", "branch": "lookup.branch",
    "as-of-timestamp": "lookup.timestamp", "delimiter": "lookup.csv.sep", "nullValue": "lookup.csv.null-value", "format": "lookup.format",
    "inferSchema": "lookup.csv.infer-schema", "mergeSchema": "lookup.write.merge-schema", "where": "lookup.where",
    "maxFilesPerTrigger": "lookup.stream.max-files-per-trigger", "startingVersion": "lookup.stream.start", "max-retries": "lookup.max-retries",
    "lookup.cache.ttl": "lookup.partial-cache.expire-after-write", "lookup.cache.max-rows": "lookup.partial-cache.max-rows",
    "lookup.partial-cache.cache-missing-keys": "lookup.partial-cache.cache-missing-key", "lookup.keyz": "lookup.keys", "provider": "lookup.provider",
    "lookup_keys": "lookup.keys", "lookup.cacheDir": "lookup.cache.dir", "cache-dir": "lookup.cache.dir", "version": "lookup.version",
    "expire-after-write": "lookup.partial-cache.expire-after-write", "timestamp": "lookup.timestamp", "columns": "lookup.columns",
}  # fmt: skip


@pytest.mark.parametrize("given", SUGGESTIONS)
def test_the_option_that_is_meant(given: str) -> None:
    """A misspelled option is recognised by its last part, by its name in Delta, Iceberg, Spark and Flink, or by its spelling."""
    with pytest.raises(OptionError) as caught:
        parse_options({"path": "/t", given: "1"})
    assert str(caught.value) == f"unknown option {given.lower()} = '1': did you mean {SUGGESTIONS[given]}?"


PLACES = {
    "s3:/b/x": "'s3://b/x'", "s3a:b/x": "'s3a://b/x'", "hdfs:/x": "'hdfs://<namenode>/x'", "gs:/b/x": "'gs://b/x'",
    "abfss:/c@a/x": "'abfss://c@a/x'", "dbfs:/x": "'/dbfs/x'", "DBFS://x": "'/dbfs/x'", "delta.`/p`": "'/p'", "parquet.`s3://b/x`": "'s3://b/x'",
    "S3:///b/x": "'s3://b/x'", "https:/h/x": "'https://h/x'",
    "file://localhost/x": "'file:///x'", "FILE://host/x": "'file:///…'", "C:\\x": "Windows drives are not", "c:/x": "Windows drives are not", r"\\srv\x": "Windows drives are not",
    "$HOME/x": "variable $HOME is not", "${HOME}/x": "variable ${HOME} is not", "file://$HOME/x": "$HOME is not", "%TEMP%/x": "%TEMP% is not",
}  # fmt: skip


@pytest.mark.parametrize("path", PLACES)
def test_paths_of_other_programs(path: str) -> None:
    """A path that would mean a strange local file is an error with the right spelling, in reads, writes and Spark."""
    for use in (LookupTable, absolute_path):
        with pytest.raises(OptionError, match=r"^option path = ") as caught:
            use(path)
        assert PLACES[path] in str(caught.value)


def test_arguments_of_a_join_that_are_swapped() -> None:
    with pytest.raises(OptionError, match=r"^argument df is a str: give a Spark DataFrame as the first argument"):
        lookup_join("./cities", None, "id")  # type: ignore[arg-type]


def test_a_store_without_its_library() -> None:
    """The error says what to install, and to check the spelling."""
    with pytest.raises(OptionError, match=r"reads s4://. Install the fsspec library .* check the spelling$"):
        LookupTable("s4://bucket/cities").scan()


def _unchecked(texts: list[bytes]) -> pa.Array:
    """Text of unchecked bytes, as drivers in C make it."""
    return pa.StringArray.from_buffers(len(texts), *pa.array(texts, pa.binary()).buffers()[1:])


def test_text_that_is_no_utf8(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the provider, the key and the column, also for text in lists. Other keys get an answer."""
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("tags", pa.list_(pa.string()))])

    def answer(keys: pa.Table) -> pa.Table:
        ids = keys.column("id").to_pylist()
        names, tags = (
            _unchecked([b"\xff" if key == 13 else b"x" for key in ids]),
            [b"\xc3" if key == 15 else b"t" for key in ids],
        )
        lists = pa.ListArray.from_arrays(pa.array(range(len(ids) + 1), pa.int32()), _unchecked(tags))
        return pa.table([keys.column("id"), names, lists], schema=schema)

    table = Desk(cache_dir, monkeypatch).serve(SyncFunction(answer), ONCE, schema)
    for key, column in ((13, "name"), (15, "tags")):
        says = rf"^provider provider_1:make, lookup of key id = {key}: column '{column}' holds text that is not UTF-8"
        with pytest.raises(LookupFunctionError, match=says):
            table.get_many(pa.table({"id": [1, key, 2]}))
    assert table.get(1) == [{"id": 1, "name": "x", "tags": ["t"]}]


def test_the_column_that_is_meant(tmp_path: Path) -> None:
    """The error suggests the column with the closest spelling, wherever a column is named. Of many columns it lists the first ones."""
    options = {"lookup.cache.dir": str(tmp_path / "c"), "lookup.keys": "id"}
    table = LookupTable(tmp_path / "t", options)
    table.write([{"id": 1, "name": "a"}])
    for act in (
        lambda: LookupTable(tmp_path / "t", {**options, "lookup.columns": "nmae"}).scan(),
        lambda: table.scan(columns=["Nmae"]), lambda: table.write([{"id": 1, "nmae": "a"}]),
        lambda: table.delete(where="nmae = 'a'"),
    ):  # fmt: skip
        with pytest.raises(PysparkLookupError, match=r"(?i)no column 'nmae'; .*id, name: did you mean 'name'[?]"):
            act()
    wide = names_shown([f"c{number}" for number in range(5000)], "nothing of these")
    assert wide.startswith("c0, c1, ")
    assert wide.endswith(", c29, … (5000 in all)")


NOON, ODD_VALUES = datetime.time(12), (0, 7, 1.5, None, True, b"7 d", ["7 d"], datetime.date(2026, 1, 1), object)
CALLS: dict[str, tuple[type[Exception], Callable[[LookupTable, Any], object]]] = {
    "older_than": (OptionError, lambda table, odd: table.vacuum(odd)),
    "force": (OptionError, lambda table, odd: None if odd is True else table.vacuum("7 d", odd)),
    "mode": (OptionError, lambda table, odd: table.write([{"id": 2}], odd)),
    "mode of a write in a transaction": (OptionError, lambda table, odd: table.transaction().write([{"id": 2}], odd)),
    "mode of a trigger": (OptionError, lambda _, odd: PeriodicCacheReloadTrigger(5, odd)),
    "reload_time": (OptionError, lambda _, odd: TimedCacheReloadTrigger(odd)),
    "zone": (OptionError, lambda _, odd: None if odd is None else TimedCacheReloadTrigger(NOON, 1, odd)),
    "columns": (SchemaError, lambda table, odd: None if odd is None else table.scan([odd])),
    "columns that are not a list": (SchemaError, lambda table, odd: None if odd in (None, ["7 d"]) else table.scan(odd)),
    "keys": (OptionError, lambda table, odd: table.alter(keys=[odd])),
    "keys that are not a list": (OptionError, lambda table, odd: None if odd in (None, ["7 d"]) else table.alter(keys=odd)),
    "properties": (OptionError, lambda table, odd: table.alter(properties={"lookup.log.retention": odd})),
    "properties by name": (OptionError, lambda table, odd: table.alter(properties={odd: "7 d"} if odd != ["7 d"] else 5)),  # type: ignore[arg-type]
    "options": (OptionError, lambda _, odd: None if odd is None else LookupTable("x", odd)),
    "options by name": (OptionError, lambda _, odd: LookupTable("x", {odd: "x"} if odd != ["7 d"] else 5)),  # type: ignore[arg-type]
    "options that are parsed": (OptionError, lambda _, odd: parse_options(odd)),
}  # fmt: skip


@pytest.mark.parametrize("argument", CALLS)
def test_another_type(tmp_path: Path, argument: str) -> None:
    """The error names the argument, and nothing was done."""
    kind, call = CALLS[argument]
    table = LookupTable(str(tmp_path / "t"), {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "cache")})
    table.write([{"id": 1}])
    position = table.describe()["position"]
    for value in ODD_VALUES:
        try:
            call(table, value)
        except kind as problem:
            assert str(problem).startswith(f"argument {argument.split(maxsplit=1)[0]} = ")
            assert "\n" not in str(problem)
            continue
        assert value in (None, True, ["7 d"])
    assert table.describe()["position"] == position
