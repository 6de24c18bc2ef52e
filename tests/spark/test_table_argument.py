"""The options with which the driver asks about a lookup's table, and with which hosts answer, whatever their conf files say."""

import json
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest

from pyspark_lookup.errors import OptionError
from pyspark_lookup.lookup.metadata_tables import view_schema
from pyspark_lookup.options.enums import CacheMode, View
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.spark import table_argument, warm
from pyspark_lookup.spark.planning import Planning, plan_schema

pytestmark = pytest.mark.spark

FULL = {
    "lookup.cache": "FULL",
    "lookup.metadata.source": "CACHE",
    "lookup.full-cache.periodic-reload.interval": "5 min",
}
INTERVAL = {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "5 min"}


def set_conf(path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]) -> None:
    path.write_text("".join(f"{key} = {text}\n" for key, text in options.items()))
    monkeypatch.setenv("LOOKUPCACHE_CONF", str(path))


@pytest.mark.parametrize(
    ("here", "there", "options", "interval_s"),
    [
        ({}, {}, {}, None),
        (FULL, FULL, {}, -1.0),
        ({}, {}, FULL, -1.0),
        ({}, FULL, {}, None),
        (INTERVAL, INTERVAL, {}, 300.0),
        (FULL, FULL, {**INTERVAL, "lookup.cache": "NONE"}, 300.0),
        (INTERVAL, INTERVAL, {"lookup.metadata.source": "UFS"}, None),
    ],
)
def test_a_table_is_planned_without_a_cache(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    here: dict[str, str],
    there: dict[str, str],
    options: dict[str, str],
    interval_s: float | None,
) -> None:
    """`here`: the conf file of the process that builds the lookup. `there`: that of the host that plans, which over Connect is another one."""
    set_conf(tmp_path / "here", monkeypatch, here)
    without = table_argument._without_cache({"path": "/dim", **options})
    set_conf(tmp_path / "there", monkeypatch, there)
    parsed = parse_options(without)
    assert (parsed.cache.mode, parsed.version.sync_interval_s) == (CacheMode.NONE, interval_s)


@pytest.mark.parametrize("view", [View.TOKEN, View.SUMMARY])
def test_a_view_is_about_the_cache_of_the_lookup(monkeypatch: pytest.MonkeyPatch, view: View) -> None:
    """A full cache has only the columns that the options select, so a token of another one would name a version that the lookup lacks."""
    loads = mock.Mock()
    monkeypatch.setattr(table_argument, "load", loads)
    options = {"path": "/dim", "lookup.columns": "id,name", "lookup.where": "id > 1"}
    table_argument.load_view(mock.Mock(), options, view)
    loaded = loads.call_args.args[1]
    schema, resolved = plan_schema(loaded)
    assert schema.names == view_schema(view).names
    read = Planning.from_options(loaded, schema, resolved).options.read
    assert (read.columns, read.where) == (("id", "name"), "id > 1")


def test_what_a_session_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`warm` loads the table into the directory that a query of the session uses: the table's own, or else the session's. It refuses what a session
    cannot set."""
    session = {"lookup.cache.dir": str(tmp_path / "session")}
    monkeypatch.setattr(warm, "session_options", lambda: session)
    path = {"path": str(tmp_path / "none"), "lookup.cache": "FULL"}

    def run(options: dict[str, str]) -> list[str]:
        batches = warm._Warm(json.dumps(options), "warm")(iter([pa.record_batch({"id": [0]})]))
        return [directory for batch in batches for directory in batch.column("cache_dir").to_pylist()]

    own = str(tmp_path / "own")
    assert [Path(text).is_relative_to(own) for text in run({**path, "lookup.cache.dir": own})] == [True]
    assert not (tmp_path / "session").exists()
    assert [Path(text).is_relative_to(tmp_path / "session") for text in run(path)] == [True]
    session["lookup.keys"] = "id"
    with pytest.raises(OptionError, match=r"conf spark\.lookupcache\.keys: only .* can be set for a session"):
        run(path)
