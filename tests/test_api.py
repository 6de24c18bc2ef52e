"""`LookupTable`: what it answers, which calls that costs, and that processes share their counters."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.base.errors import (
    OptionError,
    PredicateError,
    SchemaError,
    TableBusyError,
    TableEmptyError,
    UfsNotFoundError,
    UfsUnavailableError,
)
from pyspark_lookup.base.metrics import COUNTERS, GAUGES, HOST_GAUGES
from pyspark_lookup.engine import runtime as runtime_module
from pyspark_lookup.engine.lookup_table import LookupTable
from tests.test_writing import Site, site

__all__ = ["site"]


def put(path: Path, **columns: Any) -> Path:
    """A parquet file in place of what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    pq.write_table(pa.table(columns), new)
    os.replace(new, path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of four rows."""
    return put(tmp_path / "dim.parquet", id=[1, 2, 3, 4], name=["a", "b", None, "b"], x=[0.5, 1.5, 2.5, 3.5])


def calls(site: Site) -> list[str]:
    """The kinds of store calls since the last question."""
    kinds = [kind for store in site.stores for kind in store.kinds()]
    for store in site.stores:
        store.calls.clear()
    return kinds


@pytest.fixture
def table(site: Site, path: Path, cache_dir: Path) -> Callable[..., LookupTable]:
    """Opens the four rows' table with options."""

    def opened(more: dict[str, Any] | None = None, at: Path = path) -> LookupTable:
        return LookupTable(str(at), {"lookup.cache.dir": str(cache_dir), **(more or {})})

    return opened


Opens = Callable[..., LookupTable]


# --- scan -----------------------------------------------------------------------------------------


def test_a_scan_is_the_whole_table(table: Opens) -> None:
    """Without arguments all columns and rows come as one Arrow table; no row is a table of none, with the columns asked for."""
    found = table().scan()
    assert isinstance(found, pa.Table)
    assert found.schema == pa.schema([("id", pa.int64()), ("name", pa.string()), ("x", pa.float64())])
    assert found.to_pydict() == {"id": [1, 2, 3, 4], "name": ["a", "b", None, "b"], "x": [0.5, 1.5, 2.5, 3.5]}
    none = table().scan(["x", "id"], "id > 100")
    assert (none.num_rows, none.schema) == (0, pa.schema([("x", pa.float64()), ("id", pa.int64())]))


BAD_PREDICATES = ["", "nope = 1", "id = ", "length(name) = 1", "id = 1; id = 2", "WHERE id = 1", "id = 1) OR (id = 2", "true) OR (true"]  # fmt: skip


def test_columns_come_in_the_order_asked_for(table: Opens) -> None:
    """Names are found in any letter case, spelled as in the table, and replace lookup.columns for one scan."""
    assert table().scan(["x", "id"]).column_names == ["x", "id"]
    assert table().scan(("NAME",)).column_names == ["name"]
    narrow = table({"lookup.columns": "name, x"})
    assert narrow.scan().column_names == ["name", "x"]
    assert narrow.scan(["id", "x"]).column_names == ["id", "x"]
    assert narrow.scan().column_names == ["name", "x"]


def test_any_column_name_can_be_asked_for(table: Opens, tmp_path: Path) -> None:
    """Commas, backticks, quotes, dots and spaces are part of a name, not of the list."""
    names = ["a,b", "c`d", "e f", "g.h", '"i"', "`", "ä"]
    odd = put(tmp_path / "odd.parquet", **{name: [number] for number, name in enumerate(names)})
    assert table(at=odd).scan(names[::-1]).to_pylist() == [{name: number for number, name in enumerate(names)}]
    assert table(at=odd).scan(names[::-1]).column_names == names[::-1]


def test_unknown_or_repeated_columns_are_errors(table: Opens) -> None:
    """An unknown column is named with those there are; none, and one twice, are refused."""
    with pytest.raises(SchemaError, match=r"no column 'nope'; it has id, name, x"):
        table().scan(["id", "nope"])
    with pytest.raises(OptionError, match=r"lookup\.columns"):
        table().scan(["id", "id"])
    with pytest.raises(SchemaError, match=r"argument columns = \[\]"):
        table().scan([])


@pytest.mark.parametrize(
    ("where", "predicate", "ids"),
    [
        (None, None, [1, 2, 3, 4]),
        ("id > 1", None, [2, 3, 4]),
        (None, "name = 'b'", [2, 4]),
        ("id > 2", "name = 'b'", [4]),
        ("id = 1 OR id = 2", "x > 1 OR name IS NULL", [2]),
        ("id > 1 -- not the first", "id < 4 -- nor the last", [2, 3]),
        ("name = 'b'", "name <> 'b'", []),
        ("name = 'b'", "NULL", []),
        ("NOT name = 'b'", "true", [1]),
    ],
)
def test_a_predicate_is_in_addition_to_lookup_where(
    table: Opens, where: str | None, predicate: str | None, ids: list[int]
) -> None:
    """Both must hold, each as a whole; rows for which either is unknown are left out; the option stays as it was."""
    opened = table({} if where is None else {"lookup.where": where})
    before = opened.scan(["id"])["id"].to_pylist()
    assert opened.scan(["id"], predicate)["id"].to_pylist() == ids
    assert opened.scan(["x"], predicate).num_rows == len(ids)
    assert opened.scan(["id"])["id"].to_pylist() == before


@pytest.mark.parametrize("predicate", BAD_PREDICATES)
def test_a_predicate_that_is_none_is_an_error(table: Opens, predicate: str) -> None:
    """What is not understood or not about this table is refused; so are parentheses that would see rows lookup.where hides."""
    for more in ({}, {"lookup.where": "id > 0"}):
        with pytest.raises(PredicateError if predicate else OptionError, match=r"lookup\.where"):
            table(more).scan(predicate=predicate)


def test_a_scan_follows_the_table(table: Opens, path: Path) -> None:
    """The same instance answers from each new version, with its rows and its columns."""
    opened = table()
    opened.scan()
    put(path, id=[9], more=[True])
    assert opened.scan().to_pylist() == [{"id": 9, "more": True}]
    path.unlink()
    put(path / "dt=1" / "part.parquet", id=[7])  # a directory in place of the file
    assert opened.scan().to_pylist() == [{"id": 7, "dt": 1}]
    assert opened.describe()["kind"] == "DIRECTORY"


# --- version and description ----------------------------------------------------------------------


def test_versions_are_equal_if_and_only_if_nothing_changed(table: Opens, tmp_path: Path) -> None:
    """Added, replaced, touched or removed files are another version each; asking, reading or another spelling is not."""
    root = tmp_path / "t"
    put(root / "a.parquet", id=[1])
    opened = table(at=root)
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: put(root / "b.parquet", id=[2]),
        lambda: put(root / "b.parquet", id=[2]),  # the same rows in a new file
        lambda: os.utime(root / "b.parquet", (1, 1)),
        lambda: os.replace(root / "b.parquet", root / "c.parquet"),
        (root / "c.parquet").unlink,
    ]
    seen = []
    for change in changes:
        change()
        seen.append(opened.version)
        opened.scan()
        elsewhere = root / "." / "x" / ".."
        same = (opened.version, table(at=root).version, table({"lookup.where": "id = 1"}, at=elsewhere).version)
        assert same == (seen[-1],) * 3
    assert [len(version) for version in seen] == [32] * len(changes)
    assert len(set(seen[:-1])) == len(seen) - 1
    assert seen[-1] == seen[0]  # a.parquet alone, untouched


def test_describe_tells_what_a_scan_would_read(table: Opens, tmp_path: Path) -> None:
    """Path, kind, format, the columns a scan returns, version, files, bytes and the options given."""
    root = tmp_path / "t"
    files = [put(root / f"dt={dt}" / "a.parquet", id=[1], name=["n"]) for dt in (1, 2)]
    opened = table({"lookup.columns": "DT,id", "lookup.where": "id = 1"}, at=root)
    found = opened.describe()
    options = found.pop("options")
    assert found == {
        "path": f"file://{root}",
        "kind": "DIRECTORY",
        "format": "parquet",
        "columns": {"dt": "int32", "id": "int64"},
        "version": opened.version,
        "files": 2,
        "bytes": sum(file.stat().st_size for file in files),
    }
    assert opened.scan().column_names == list(found["columns"])
    assert "lookup.where='id = 1'" in options
    assert "lookup.partition" not in options
    json.dumps(found)


# --- options, closing, errors ---------------------------------------------------------------------


def test_option_values_may_be_python_values(table: Opens, tmp_path: Path) -> None:
    """True and False are Spark's true and false, numbers their digits."""
    root = tmp_path / "t"
    put(root / "a.parquet", id=[1])
    assert table({"lookup.success-file": False, "lookup.max-retries": 0}, at=root).scan().num_rows == 1
    with pytest.raises(TableBusyError, match="_SUCCESS"):
        table({"lookup.success-file": True}, at=root).scan()
    (root / "_SUCCESS").touch()
    assert table({"lookup.success-file": True}, at=root).scan().num_rows == 1
    cached = table({"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": -1}, at=root)
    cached.scan()
    put(root / "b.parquet", id=[2])
    assert cached.scan().num_rows == 1


def test_storage_options_keep_their_types(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    """Python values in `lookup.storage.*` reach the store as the values they were."""
    seen: list[object] = []

    def refuse(path: str, storage: dict[str, object], now_s: object) -> None:
        seen.append(storage)
        raise UfsUnavailableError("seen")

    monkeypatch.setattr(runtime_module, "open_store", refuse)
    with pytest.raises(UfsUnavailableError, match="seen"):
        LookupTable("s3://bucket/dim", {"lookup.storage.anon": True, "lookup.storage.use_ssl": False}).scan()
    assert seen == [{"anon": True, "use_ssl": False}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookup.wher": "id = 1"}, r"lookup\.where"),
        ({"lookup.success-file": 2}, r"lookup\.success-file = '2'"),
        ({"lookup.metadata.source": "CACHE"}, "sync-interval"),
        ({"lookup.storage.secret": "x"}, r"lookup\.storage\.secret"),
        ({"lookup.view": "files"}, r"describe\(\) or metrics\(\)"),  # views are Spark's
    ],
)
def test_options_that_cannot_be_are_refused_at_once(path: Path, options: dict[str, Any], message: str) -> None:
    """Creation checks options without asking the store, and names the key."""
    with pytest.raises(OptionError, match=message):
        LookupTable(str(path.with_name("absent")), options)


def test_a_closed_table_refuses_every_use(table: Opens, site: Site) -> None:
    """After close(), or a with block that ends or fails, nothing is answered or asked; closing again is fine."""
    with table() as opened:
        assert opened.scan().num_rows == 4
    failed = table()
    with pytest.raises(SchemaError), failed:
        failed.scan(["nope"])
    calls(site)
    for use in (opened.scan, opened.metrics, opened.describe, lambda: opened.version, failed.scan):
        with pytest.raises(ValueError, match="closed"):
            use()
    opened.close()
    assert calls(site) == []
    assert table().scan().num_rows == 4  # the table is not closed for others


def test_processes_publish_their_counters(table: Opens, site: Site) -> None:
    """What a process counted is seen by others of the host when a scan returns or fails, and when the table is closed."""
    table().scan()
    site.restart()
    assert table().metrics()["rowsReadCount"] == 4
    with pytest.raises(SchemaError):
        table().scan(["nope"])
    site.restart()
    opened = table()
    assert opened.metrics()["ufsHeadCount"] == 2
    assert opened.version
    opened.close()
    site.restart()
    assert table().metrics()["ufsHeadCount"] == 3


def test_a_path_without_a_table_is_a_named_error(table: Opens, tmp_path: Path) -> None:
    """Missing, empty, emptied later, or of no known format: the error says which, when asked and not before."""
    missing = table(at=tmp_path / "missing.parquet")
    for use in (missing.scan, missing.describe, lambda: missing.version):
        with pytest.raises(UfsNotFoundError, match=r"missing\.parquet does not exist"):
            use()
        with pytest.raises(FileNotFoundError):
            use()
    (tmp_path / "t").mkdir()
    opened = table(at=tmp_path / "t")
    for use in (opened.scan, opened.describe, lambda: opened.version):
        with pytest.raises(TableEmptyError, match="no data file"):
            use()
    (tmp_path / "t" / "data.bin").write_bytes(b"x")
    with pytest.raises(OptionError, match=r"set lookup\.format"):
        opened.scan()
    (tmp_path / "t" / "data.bin").unlink()
    put(tmp_path / "t" / "a.parquet", id=[1])
    assert opened.scan().num_rows == 1
    (tmp_path / "t" / "a.parquet").unlink()
    with pytest.raises(TableEmptyError):
        opened.scan()


# --- what it costs --------------------------------------------------------------------------------


def test_a_file_costs_one_status_call_then_one_head_per_question(table: Opens, site: Site, path: Path) -> None:
    """The first question learns what the path is; after it a scan of an unchanged file is one HEAD and no data."""
    opened = table()
    opened.scan()
    assert calls(site) == ["status", "get"]
    opened.scan()
    assert calls(site) == ["head"]
    opened.scan(["id"], "id = 2")
    assert calls(site) == ["head"]
    assert len(opened.version) == 32
    assert calls(site) == ["head"]
    opened.describe()
    assert calls(site) == ["head"]
    assert opened.metrics()["ufsHeadCount"] == 5
    assert calls(site) == []
    put(path, id=[1])
    opened.scan()
    assert calls(site) == ["head", "get"]


# --- counters of several processes ----------------------------------------------------------------


def counted(metrics: dict[str, int]) -> dict[str, int]:
    """What processes have counted, without what the host says when it is asked."""
    return {name: value for name, value in metrics.items() if name not in HOST_GAUGES}


def test_metrics_have_every_name(table: Opens) -> None:
    """Counters start at 0 and gauges nobody set at -1; the names are those of pyspark_lookup.base.metrics."""
    opened = table()
    found = opened.metrics()
    assert set(found) == {*COUNTERS, *GAUGES, *HOST_GAUGES}
    assert counted(found) == {**dict.fromkeys(COUNTERS, 0), **dict.fromkeys(GAUGES, -1)}
    opened.scan()
    assert opened.metrics()["rowsReadCount"] == 4


def test_references_to_one_table_count_together(table: Opens, tmp_path: Path) -> None:
    """Two instances with other options share counters, counted once; another table has its own."""
    one, other = table(), table({"lookup.where": "id = 1", "lookup.max-retries": 0})
    one.scan()
    other.scan()
    assert one.metrics()["rowsReadCount"] == other.metrics()["rowsReadCount"] == 5
    assert other.version
    assert one.metrics()["ufsHeadCount"] == 3  # at once, in one process
    beside = table(at=put(tmp_path / "beside.parquet", id=[1]))
    beside.scan()
    assert beside.metrics()["rowsReadCount"] == 1
    assert one.metrics()["rowsReadCount"] == 5


_CACHED = {"lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 h"}
_PARTIAL = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 10}


@pytest.mark.parametrize(
    "options",
    [{}, {"lookup.cache": "FULL"}, {"lookup.cache": "FULL", **_CACHED}, _PARTIAL],
    ids=["NONE", "FULL", "FULL, CACHE", "PARTIAL"],
)
def test_each_question_counts_the_table_once(path: Path, cache_dir: Path, options: dict[str, Any]) -> None:
    """resolvedBytes: what reading the table anew for each call would have cost, first calls and later ones alike."""
    opened = LookupTable(str(path), {"lookup.keys": "id", "lookup.cache.dir": str(cache_dir), **options})
    calls = (lambda: opened.get(1), opened.scan, lambda: opened.get_many(pa.table({"id": [2]})))
    for number, call in enumerate(calls * 2, start=1):
        call()
        assert opened.metrics()["resolvedBytes"] == number * path.stat().st_size
