"""`LookupTable`: what it takes and answers, which calls that costs, and that processes share their counters."""

import datetime
import decimal
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable, errors
from pyspark_lookup.cache.full.snapshot import Answer, Snapshot
from pyspark_lookup.columnar.keys import Keys
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.lookup import runtime as runtime_module
from pyspark_lookup.storage.disk import Disk
from pyspark_lookup.storage.disk import records as records_module
from pyspark_lookup.storage.disk.directory import Directory
from pyspark_lookup.storage.host_metrics import read_table_counts
from tests.support.coarse_files import CoarseFile
from tests.support.data_files import write_parquet
from tests.support.fakes import CACHES, FakeClock, Later, wait_until_settled
from tests.support.managed_tables import Site, site

__all__ = ["site"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of four rows."""
    return write_parquet(tmp_path / "dim.parquet", id=[1, 2, 3, 4], name=["a", "b", None, "b"], x=[0.5, 1.5, 2.5, 3.5])


@pytest.fixture
def table(site: Site, path: Path, cache_dir: Path) -> Callable[..., LookupTable]:
    """Opens the four rows' table with options."""

    def opened(more: dict[str, Any] | None = None, at: Path = path) -> LookupTable:
        return LookupTable(str(at), {"lookup.cache.dir": str(cache_dir), **(more or {})})

    return opened


Opens = Callable[..., LookupTable]


@pytest.fixture
def counted(tmp_path: Path) -> Callable[[], int]:
    """Returns the number of lookups that are published in the cache directory `cache`."""

    def count() -> int:
        disk = Disk(tmp_path / "cache", None, CacheMetricGroup(), time.time, random.Random(1))
        return sum(counts.values["lookupTimeCount"] for counts in read_table_counts(disk, HostClock()))

    return count


def test_when_counts_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: Callable[[], int]) -> None:
    """The first call in a tenth of a second publishes counts, and a timer after the last call; each call does while no thread can be started."""
    clock, threads = FakeClock(), Later()
    process = runtime_module.Runtime(clock.host(), random.Random(7), start=threads, publish_every_s=0.1)
    monkeypatch.setattr(runtime_module, "_current", process)
    options = {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "cache")}
    table = LookupTable(str(tmp_path / "dim"), options)

    def get(times: int) -> int:
        assert [table.get(1) for _ in range(times)] == [[{"id": 1}]] * times
        return counted()

    table.write([{"id": 1}])
    clock.tick(0.11)
    assert [get(1), get(3), len(threads.waiting)] == [1, 1, 1]
    clock.tick(0.11)
    threads.waiting.pop()[1]()  # it ends, because no task is left
    assert [counted(), get(1), len(threads.waiting)] == [4, 4, 1]
    clock.tick(0.11)
    assert [get(1), get(2)] == [6, 6]
    assert table.metrics()["lookupTimeCount"] == counted() == 8
    with monkeypatch.context() as patch:
        process.publish()
        patch.setattr(process._timer, "run_soon", mock.Mock(side_effect=RuntimeError("can't start new thread")))
        other = LookupTable(str(tmp_path / "dim"), {**options, **CACHES["PARTIAL"]})
        assert [other.get(1) for _ in range(3)] == [[{"id": 1}]] * 3
        assert counted() == 11


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_child_process_publishes_its_counts(tmp_path: Path, method: str, counted: Callable[[], int]) -> None:
    """Children of multiprocessing end without what `atexit` has registered."""
    options = {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "cache")}
    LookupTable(str(tmp_path / "dim"), options).write([{"id": 1}])
    child = multiprocessing.get_context(method).Process(target=get_often, args=(str(tmp_path / "dim"), options))
    child.start()
    child.join()
    assert (child.exitcode, counted()) == (0, 100)


def get_often(path: str, options: dict[str, str]) -> None:
    table = LookupTable(path, options)
    for _ in range(100):
        table.get(1)


def test_what_a_scan_returns(table: Opens, tmp_path: Path) -> None:
    """All columns and rows as one Arrow table, or the columns asked for, in that order; any character may be part of a name."""
    rows = table().scan()
    assert isinstance(rows, pa.Table)
    assert rows.schema == pa.schema([("id", pa.int64()), ("name", pa.string()), ("x", pa.float64())])
    assert rows.to_pydict() == {"id": [1, 2, 3, 4], "name": ["a", "b", None, "b"], "x": [0.5, 1.5, 2.5, 3.5]}
    none = table().scan(["x", "ID"], "id > 100")
    assert (none.num_rows, none.schema) == (0, pa.schema([("x", pa.float64()), ("id", pa.int64())]))
    narrow = table({"lookup.columns": "name, x"})
    assert narrow.scan(("id", "x")).column_names == ["id", "x"]
    assert narrow.scan().column_names == ["name", "x"]
    names = ["a,b", "c`d", "e f", "g.h", '"i"', "`", "ä"]
    file = write_parquet(tmp_path / "odd.parquet", **{name: [number] for number, name in enumerate(names)})
    rows = table(at=file).scan(names[::-1])
    assert rows.column_names == names[::-1]
    assert rows.to_pylist() == [{name: number for number, name in enumerate(names)}]
    with pytest.raises(errors.SchemaError, match=r"no column 'nope'; it has id, name, x"):
        table().scan(["id", "nope"])
    with pytest.raises(errors.OptionError, match=r"lookup\.columns"):
        table().scan(["id", "id"])
    with pytest.raises(errors.SchemaError, match=r"argument columns = \[\]"):
        table().scan([])


@pytest.mark.parametrize(
    ("where", "predicate", "ids"),
    [
        ("id > 1", None, [2, 3, 4]),
        ("id = 1 OR id = 2", "x > 1 OR name IS NULL", [2]),
        ("id > 1 -- not the first", "id < 4 -- nor the last", [2, 3]),
        ("id > 0", "nope = 1", None),
        ("id > 2", "true) OR (true", None),
        (None, "", None),
    ],
)
def test_a_predicate_is_in_addition_to_lookup_where(
    table: Opens, where: str | None, predicate: str | None, ids: list[int] | None
) -> None:
    """The predicate and lookup.where must both hold, each as a whole; rows for which either is unknown are left out; what is not a predicate is refused."""
    opened = table({} if where is None else {"lookup.where": where})
    before = opened.scan(["id"])
    if ids is None:
        with pytest.raises(
            errors.PredicateError if predicate else errors.OptionError, match=r"lookup\.where|argument predicate"
        ):
            opened.scan(predicate=predicate)
    else:
        assert opened.scan(["id"], predicate)["id"].to_pylist() == ids
        assert opened.scan(["x"], predicate).num_rows == len(ids)
    assert opened.scan(["id"]) == before


def test_a_table_that_changes(table: Opens, tmp_path: Path) -> None:
    """The same files are one version, whoever asks, in whatever spelling. A table is described as a scan would read it."""
    root = tmp_path / "t"
    write_parquet(root / "a.parquet", id=[1])
    opened, elsewhere = table(at=root), table({"lookup.where": "id = 1"}, at=root / "." / "x" / "..")
    first = opened.version
    write_parquet(root / "b.parquet", id=[1])
    assert opened.version == elsewhere.version != first
    (root / "b.parquet").unlink()
    assert opened.version == elsewhere.version == first
    (root / "a.parquet").unlink()
    files = [write_parquet(root / f"dt={dt}" / "a.parquet", id=[1], name=["n"]) for dt in (1, 2)]
    narrow = table({"lookup.columns": "DT,id", "lookup.where": "id = 1"}, at=root)
    description = narrow.describe()
    options = description.pop("options")
    assert description == {
        "path": f"file://{root}", "kind": "DIRECTORY", "format": "parquet", "columns": {"dt": "int32", "id": "int64"},
        "version": opened.version, "files": 2, "bytes": sum(file.stat().st_size for file in files),
    }  # fmt: skip
    assert narrow.scan().column_names == list(description["columns"])
    assert "lookup.where='id = 1'" in options
    assert "lookup.partition" not in options
    json.dumps(description)


@pytest.fixture(params=["NONE", "FULL"])
def opens(request: pytest.FixtureRequest, tmp_path: Path) -> Opens:
    """Opens a table of these rows, with these options."""

    def opened(rows: pa.Table, **options: str) -> LookupTable:
        pq.write_table(rows, tmp_path / "t.parquet", row_group_size=7)
        wait_until_settled(tmp_path / "t.parquet")
        common = {"cache": request.param, "cache.dir": str(tmp_path / "cache"), **options}
        return LookupTable(str(tmp_path / "t.parquet"), {f"lookup.{key}": value for key, value in common.items()})

    return opened


@pytest.mark.parametrize(
    "declared", [{}, {"lookup.schema": "low BIGINT, high BIGINT, v STRING"}], ids=["found", "declared"]
)
def test_a_file_that_was_too_new(site: Site, declared: dict[str, str]) -> None:
    """Rows and columns that were read when a change might not show in the file's identity are read again."""
    file, columns = CoarseFile(site.clock), ("low,high,v", "low,high,v" if declared else "low,high,w")
    table = site.table({"path": file.url, "lookup.range": "low..high", **declared})
    answers, digests = [], set()
    for text in (f"{columns[0]}\n1,9,a\n", f"{columns[1]}\n1,9,b\n"):
        file.write(text)
        answers.append(table.get(between=5))
        digests.add(table.version)
        site.clock.tick(3600)
    assert [list(row.values()) for (row,) in answers] == [[1, 9, "a"], [1, 9, "b"]]
    assert (list(answers[1][0]), len(digests)) == (columns[1].split(","), 1)
    calls = len(site.calls())
    assert calls and table.get(between=5) == answers[1]
    assert [kind for kind, _ in site.calls()] == ["head"]


def test_another_process_warms_the_table(site: Site, path: Path) -> None:
    """A child has an engine of its own, and does not use its parent's, whose locks another thread may have held at the fork."""
    served = {
        "lookup.cache": "FULL",
        "lookup.metadata.source": "CACHE",
        "lookup.full-cache.periodic-reload.interval": "1 h",
    }
    table = site.table({"path": str(path), "lookup.keys": "id", **served})
    wait_until_settled(path)
    digest = table.warm()
    assert table._open_table is not None
    with mock.patch.object(table._open_table.engine.reader.kinds, "source", side_effect=AssertionError):
        site.restart()
        assert table.warm() == digest


def test_many_keys_are_answered_in_batches(opens: Opens) -> None:
    """With more keys than a batch holds, key_index goes on counting."""
    keys = [n % 2000 for n in range(150_000)]
    answer = opens(pa.table({"id": range(1000), "v": range(1000)}), keys="id").get_many(keys)
    matching = [(place, key) for place, key in enumerate(keys) if key < 1000]
    assert answer.column("key_index").to_pylist() == [place for place, _ in matching]
    assert answer.column("id").to_pylist() == answer.column("v").to_pylist() == [key for _, key in matching]


def test_what_get_takes(opens: Opens) -> None:
    """A value, a tuple or a dictionary; its rows are dictionaries, [] where there is none. What cannot be a key is an error."""
    table = opens(pa.table({"a": [1, 1, 2], "b": ["x", "x", "y"], "v": [10, 20, 30]}), keys="a,b")
    assert table.get((1, "x")) == [{"a": 1, "b": "x", "v": 10}, {"a": 1, "b": "x", "v": 20}]
    assert table.get({"b": "y", "a": 2}) == [{"a": 2, "b": "y", "v": 30}]
    assert table.get((1, "y")) == table.get((None, "x")) == []
    with pytest.raises(TypeError, match="tuple of 2 values"):
        table.get((1, "x", 3))
    narrow = opens(pa.table({"id": pa.array([1, 2], pa.int8()), "key_index": [1, 2]}), keys="id", columns="id")
    with pytest.raises(errors.SchemaError, match=r"'id'.*string.*int8"):
        narrow.get("1")
    assert (narrow.get(1000), narrow.get(2)) == ([], [{"id": 2}])


def test_a_table_without_keys_or_with_the_answers_own_column(opens: Opens) -> None:
    """A lookup says what to set; a scan works."""
    rows = pa.table({"id": [1], "key_index": [5]})
    assert opens(rows).scan().to_pylist() == rows.to_pylist()
    with pytest.raises(errors.OptionError, match=r"lookup\.keys is missing"):
        opens(rows).get(1)
    with pytest.raises(errors.SchemaError, match=r"key_index.*leave it out with lookup\.columns"):
        opens(rows, keys="id").get(1)


def test_columns_that_a_snapshot_leaves_out_are_read_from_the_files(opens: Opens) -> None:
    """With lookup.columns the snapshot holds those; a scan or predicate over others is right all the same."""
    rows = pa.table({"id": [1, 2, 3], "a": ["x", "y", "z"], "b": [10, 20, 30]})
    table = opens(rows, keys="id", columns="id,a")
    assert table.scan(["b", "id"]).to_pylist() == [{"b": 10, "id": 1}, {"b": 20, "id": 2}, {"b": 30, "id": 3}]
    assert table.scan(predicate="b = 20").to_pylist() == [{"id": 2, "a": "y"}]
    assert table.scan(["a"], "id = 3").to_pylist() == [{"a": "z"}]
    assert table.get(2) == [{"id": 2, "a": "y"}]
    metrics = table.metrics()
    assert (metrics["loadCount"], metrics["snapshotReadThroughCount"]) in ((0, 0), (1, 2))  # NONE, FULL


def test_option_values_may_be_python_values(table: Opens, tmp_path: Path) -> None:
    """True and False are Spark's true and false, numbers their digits. All are checked before."""
    root = tmp_path / "t"
    write_parquet(root / "a.parquet", id=[1])
    python_values = {"lookup.success-file": False, "lookup.max-retries": 0, "lookup.settle": datetime.timedelta(0)}
    assert table(python_values, at=root).scan().num_rows == 1
    with pytest.raises(errors.TableBusyError, match="_SUCCESS"):
        table({"lookup.success-file": True}, at=root).scan()

    for options, says in (
        ({"lookup.success-file": 2}, r"lookup\.success-file = '2'"),
        ({"lookup.view": "files"}, r"describe\(\), metrics\(\)"),  # views are Spark's
    ):
        with pytest.raises(errors.OptionError, match=says):
            table(options, at=tmp_path / "absent")
    # What does nothing in a read is refused when it is read.
    for option, value, says in (
        ("lookup.on-error", "NULL", "= NULL is for lookup_join and register_lookup"),
        ("lookup.stream.start", "LATEST", "is for streams of changes"),
    ):
        with pytest.raises(errors.OptionError, match=f"{option} {says}"):
            table({option: value, "lookup.keys": "id"}, at=root / "a.parquet").get(1)


def test_a_closed_table_refuses_every_use(table: Opens, site: Site, path: Path) -> None:
    """After close(), or a with block that ends or fails, nothing is answered or asked; its text shows what it knows, and no secret of a URL."""
    with table() as opened:
        assert repr(opened) == f"LookupTable('{path}', NONE, not read yet)"
        assert opened.scan().num_rows == 4
        version = opened.version
        site.calls()
        assert repr(opened) == f"LookupTable('{path}', NONE, version {version})"
    failed = table()
    with pytest.raises(errors.SchemaError), failed:
        failed.scan(["nope"])
    site.calls()
    for use in (opened.scan, opened.metrics, opened.describe, lambda: opened.version, failed.scan):
        with pytest.raises(ValueError, match="closed"):
            use()
    opened.close()
    assert repr(opened) == f"LookupTable('{path}', NONE, closed)"
    assert site.calls() == []
    assert table().scan().num_rows == 4  # the table is not closed for others
    assert "secret" not in repr(LookupTable("s3://bucket/t?X-Amz-Signature=secret"))


def test_a_path_without_a_table_is_a_named_error(table: Opens, tmp_path: Path) -> None:
    """Missing, empty, of no known format, or broken (which is not a damage of the cache): the error says which, when asked and not before."""
    root = tmp_path / "t"
    opened = table(at=root)
    for problem, says in ((FileNotFoundError, "t does not exist"), (errors.TableEmptyError, "no data file")):
        for use in (opened.scan, opened.describe, lambda: opened.version):
            with pytest.raises(problem, match=says):
                use()
        root.mkdir(exist_ok=True)
    (root / "data.bin").write_bytes(b"x")
    with pytest.raises(errors.OptionError, match=r"set lookup\.format"):
        opened.scan()
    (root / "data.bin").unlink()
    (root / "a.csv").write_bytes("id,name\n1,Köln\n".encode("latin-1"))
    with pytest.raises(errors.DamagedFileError):
        opened.scan()
    assert opened.metrics()["blockDamagedCount"] == 0
    (root / "a.csv").unlink()
    write_parquet(root / "a.parquet", id=[1])
    assert opened.scan().num_rows == 1


def test_a_file_costs_one_status_call_then_one_head_per_question(table: Opens, site: Site, path: Path) -> None:
    """The first question learns what the path is; after it a scan of an unchanged file is one HEAD and no data."""
    opened = table()
    costs: list[tuple[Callable[[], object], list[str]]] = [
        (opened.scan, ["status", "get"]),
        (opened.scan, ["head"]),
        (lambda: opened.scan(["id"], "id = 2"), ["head"]),
        (lambda: opened.version, ["head"]),
        (opened.describe, ["head"]),
        (opened.metrics, []),
        (lambda: write_parquet(path, id=[1]), []),
        (opened.scan, ["head", "get"]),
    ]
    for act, cost in costs:
        act()
        assert [kind for kind, _ in site.calls()] == cost
    assert opened.metrics()["ufsHeadCount"] == 6


_CACHED = {"lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 h"}


@pytest.mark.parametrize("source", [{}, _CACHED], ids=["UFS", "CACHE"])
@pytest.mark.parametrize("managed", [False, True])
def test_a_warm_get_reads_and_writes_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, managed: bool, source: dict[str, str]
) -> None:
    """A warm `get` or `get_many` reads and writes no record; what another process has loaded or written is seen all the same, at once."""
    options = {"lookup.keys": "id", "lookup.cache": "FULL", "lookup.cache.dir": str(tmp_path / "cache"), **source}
    path, touched = tmp_path / "dim", list[object]()
    opened = LookupTable(str(path), options)

    def change(x: int) -> None:
        """Change the table, as another process."""
        with monkeypatch.context() as patch:
            patch.setattr(runtime_module, "_current", runtime_module.Runtime(HostClock(), random.Random(x)))
            second = LookupTable(str(path), options)
            if managed:
                second.upsert([{"id": 1, "x": x}])
            else:
                wait_until_settled(write_parquet(path / "a.parquet", id=[1], x=[x]))
            second.reload()

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (touched.append(given), function(*given))[1]

    for x in (1, 2):
        change(x)
        assert opened.get(1) == [{"id": 1, "x": x}]
        records = [file for file in (tmp_path / "cache").rglob("records/*/*") if file.is_file()]
        for file in (*records, *(file.parent for file in records)):
            wait_until_settled(file)
        opened.get(1)
        opened.get_many([1])
        before = opened.metrics()["hitCount"]
        with monkeypatch.context() as patch:
            patch.setattr(records_module, "read_content", noted(records_module.read_content))
            patch.setattr(Directory, "_temporary_file", noted(Directory._temporary_file))
            for _ in range(3):
                assert opened.get(1) == opened.get_many([1]).drop_columns(["key_index"]).to_pylist()
        assert touched == []
        assert opened.metrics()["hitCount"] == before + 6  # each is counted


def test_more_text_than_an_array_can_have(table: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the rows of many keys do not fit into arrays, the rows of fewer keys are fetched at a time; the answer is the same."""
    full, keys, get = table({"lookup.keys": "id", "lookup.cache": "FULL"}), [4, 9, 2, 1, 2, None, 3], Snapshot.get
    answer = full.get_many(keys)

    def get_few(snapshot: Snapshot, names: Sequence[str], request: Keys) -> Answer:
        if request.rows > 2:
            raise pa.ArrowInvalid("Take operation overflowed binary array capacity")
        return get(snapshot, names, request)

    monkeypatch.setattr(Snapshot, "get", get_few)
    assert full.get_many(keys) == answer


@pytest.mark.parametrize("key", ["id", "text"])
def test_get_is_get_many_of_one_key(tmp_path: Path, key: str) -> None:
    """`get` and `get_many` agree for rows of one key in several layers, some of them deleted; for few and for many; for nulls and repeated texts."""
    table = LookupTable(str(tmp_path / "dim"), {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "cache")})
    ids = [n % 90 for n in range(400)] + [7] * 20
    rows = {"id": ids, "text": [None if n % 11 == 0 else f"t{n % 90}" for n in ids], "x": [n / 3 for n in range(420)]}
    table.write(pa.table({**rows, "few": ["a", None, "b"] * 140}))
    options = {"lookup.keys": key, "lookup.cache": "FULL", "lookup.cache.dir": str(tmp_path / "cache")}
    full = LookupTable(str(tmp_path / "dim"), options)
    more = pa.table({"id": [7, 5], "text": ["t7", "t5"], "x": [0.5, 1.5], "few": ["c", "c"]})
    for change in (lambda: None, lambda: table.delete([3, 4]), lambda: table.write(more)):
        change()
        full.warm()
        for number in (-1, 0, 3, 4, 5, 7, 11, 50, 89, 90):
            key_value = number if key == "id" else f"t{number}"
            assert full.get(key_value) == full.get_many([key_value]).drop_columns(["key_index"]).to_pylist()
    assert full.get(None) == []
    for unfit in (b"7", 2**70, *((7,) if key == "text" else ("7", "\ud800"))):
        with pytest.raises((errors.SchemaError, TypeError)) as many:
            full.get_many([unfit])
        with pytest.raises(many.type):
            full.get(unfit)


ROWS = [{"id": 1, "name": "a"}, {"id": 2, "name": None}]
# What rows, and tables of keys, may come in.
FORMS: dict[str, Callable[[pa.Table], Any]] = {
    "table": lambda rows: rows,
    "reader": pa.Table.to_reader,
    "a tuple of dictionaries": lambda rows: tuple(rows.to_pylist()),
    "pandas": pa.Table.to_pandas,
    "pandas by key": lambda rows: rows.to_pandas().set_index("id"),  # as after a groupby
    "polars": pl.DataFrame,
    "polars with categories": lambda rows: pl.DataFrame(rows, schema_overrides={"name": pl.Categorical}),
    "duckdb": duckdb.from_arrow,
}
# What values of one key column may come in.
VALUE_FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list, "range": lambda values: range(2, -1, -1), "numpy": np.array, "array": pa.array,
    "chunks": lambda values: pa.chunked_array([values[:2], values[2:]]), "pandas series": pd.Series,
    "polars series": pl.Series,
}  # fmt: skip
# A bound that is none: Flink says so by the largest long.
UNBOUNDED = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 2**63 - 1}


@pytest.mark.parametrize("how", FORMS)
def test_rows_of_every_kind(site: Site, how: str) -> None:
    """Rows of each kind create a table, are added to it, replace rows, and are written in a transaction."""
    table, rows = site.table({"lookup.keys": "id"}), pa.Table.from_pylist(ROWS)
    table.write(FORMS[how](rows))
    table.upsert(FORMS[how](rows))
    with table.transaction() as t:
        t.upsert(FORMS[how](rows))
    assert table.scan().select(["id", "name"]).to_pylist() == ROWS
    assert dict(zip(table.schema.names, table.schema.types, strict=True)) == {"id": pa.int64(), "name": pa.string()}
    table.write(FORMS[how](rows), "overwrite")
    assert table.scan().num_rows == 2


@pytest.mark.parametrize("how", [*FORMS, *VALUE_FORMS])
def test_keys_of_every_kind(site: Site, how: str) -> None:
    """Keys of each kind look rows up, and remove them."""

    def keys() -> Any:
        values = [2, 1, 0]
        return (
            VALUE_FORMS[how](values) if how in VALUE_FORMS else FORMS[how](pa.table({"id": values, "name": [*"xxx"]}))
        )

    site.table({"lookup.keys": "id"}).write(ROWS)
    table = site.table(UNBOUNDED)
    for _ in range(2):
        rows = table.get_many(keys())
        assert list(zip(rows["id"].to_pylist(), rows["key_index"].to_pylist(), strict=True)) == [(2, 0), (1, 1)]
    with table.transaction() as t:
        assert t.get_many(keys()).num_rows == 2
    table.delete(keys())
    assert table.scan().num_rows == 0


def test_keys_of_several_columns(site: Site) -> None:
    """Keys of several columns are tuples in the order of the keys that the log has, or dictionaries; lists of strings are texts, not names."""
    site.table({"lookup.keys": ["a", "b"]}).write([{"a": "x", "b": 1, "v": 1}, {"a": "y", "b": 2, "v": 2}])
    site.restart()
    table = site.table(host="fresh")
    frame = pl.DataFrame({"b": [2], "a": ["y"]})
    coded = frame.with_columns(pl.col("a").cast(pl.Categorical))
    for keys in ([("y", 2), ("x", 2)], [["y", 2]], [{"b": 2, "a": "y"}], frame, coded):
        assert table.get_many(keys)["v"].to_pylist() == [2]
    assert table.get_many([("y", decimal.Decimal(1)), ("y", 2), ("y", decimal.Decimal("2.00"))])[
        "key_index"
    ].to_pylist() == [1, 2]
    for ask in (table.get_many, table.delete, site.table(UNBOUNDED).invalidate):
        for wrong, error, words in (
            ([("x", 2**64)], errors.SchemaError, "column 'b' of keys: a number does not fit into 64 bits"),
            (
                [("x", 1), (2, 3)],
                TypeError,
                r"column 'a' of keys of type list cannot be read \(.*: give keys as a list",
            ),
            ([("\ud800", 1)], TypeError, "column 'a' of keys of type list cannot be read .*surrogates"),
        ):
            with pytest.raises(error, match=words):
                ask(wrong)
    for keys in (["xy"], [("x",)], [("x", 1, 2)], [1]):
        with pytest.raises(TypeError, match=r"not a tuple of 2 values, one for each column of lookup\.keys \(a, b\)"):
            table.get_many(keys)
    site.restart()
    assert site.table(host="another").delete([("x", 1)]) == site.state().position
    assert table.scan()["v"].to_pylist() == [2]


def test_what_are_no_rows_and_no_keys(site: Site) -> None:
    """The error says what rows or keys are, and nothing is written. Tables of keys count by the names of their columns."""
    table = site.created()
    before = site.state().position
    for write in (table.write, table.upsert):
        for wrong in (7, "x", {"id": 1}, [1, 2], pl.Series([1])):
            with pytest.raises(TypeError, match=r"give rows as a pyarrow Table, .* or a list of dictionaries"):
                write(wrong)
    unknown_column = {"amount": [1]}
    for ask in (table.get_many, table.delete):
        for no_keys in (7, "x", {"id": 1}, [object()]):
            with pytest.raises(TypeError, match="give keys as a list of values"):
                ask(no_keys)
        mixed = pa.table({"b": [1], "a": [2]}), [{"amount": 1}], [{"id": 1}, {"b": 1}]
        for keys in (pa.table(unknown_column), pd.DataFrame(unknown_column), pl.DataFrame(unknown_column), *mixed):
            with pytest.raises(
                errors.SchemaError, match=r"keys have the columns .*, but lookup\.keys names id|have no"
            ):
                ask(keys)
    with pytest.raises(TypeError, match="give column names as str"):
        table.write([{1: 2}])  # type: ignore[dict-item]
    with pytest.raises(errors.SchemaError, match="the pandas DataFrame"):
        table.write(pd.DataFrame({"id": [3, "x"]}))
    with pytest.raises(errors.SchemaError, match="no key column 'id'"):
        site.table({"lookup.keys": "id"}).write([{"name": "q"}])
    assert table.write([]) == before
    assert site.state().position == before


def test_dictionaries_that_lack_different_columns(site: Site) -> None:
    """Dictionaries of an upsert that lack different columns are an error: a missing value is not null, and nothing is lost."""
    rows = [{"id": 1, "a": "x", "b": 10}, {"id": 2, "a": "y", "b": 20}]
    site.table({"lookup.keys": "id"}).write(rows)
    for options in ({}, {"lookup.write.missing-columns": "KEEP"}, {"lookup.write.missing-columns": "NULL"}):
        with site.table(options).transaction() as t:
            for upsert in (site.table(options).upsert, t.upsert):
                with pytest.raises(errors.SchemaError, match="some of the dictionaries have no 'a'"):
                    upsert([{"id": 1, "a": "z"}, {"id": 2, "b": 5}])
    assert site.table().scan().to_pylist() == rows


MOMENT = datetime.datetime(2024, 1, 2, 5)
VALUES: list[tuple[pa.DataType, Any, Any]] = [
    (pa.float64(), 1, 1.0), (pa.float64(), object(), None), (pa.float32(), 0.5, 0.5), (pa.float32(), 1e300, None),
    (pa.date32(), MOMENT.date(), MOMENT.date()), (pa.date32(), MOMENT, None), (pa.timestamp("us"), MOMENT, MOMENT),
    (pa.timestamp("us"), MOMENT.replace(tzinfo=datetime.timezone.utc), None),
    (pa.timestamp("us", "UTC"), MOMENT, None),
    (pa.decimal128(10, 2), 5, decimal.Decimal("5.00")), (pa.decimal128(10, 2), decimal.Decimal("0.125"), None),
    (pa.int16(), 40000, None), (pa.int32(), "x", None), (pa.string(), 5, None), (pa.bool_(), 1, None),
    (pa.struct([("a", pa.int32())]), {"a": 1.5}, None),
    (pa.list_(pa.decimal128(10, 2)), [decimal.Decimal("1e-300000000")], None),
]  # fmt: skip


def test_values_of_dictionaries_do_not_change(site: Site) -> None:
    """A dictionary's value is the table's, or an error. Rows may lack columns, and spell them in another letter case."""
    table = site.table({"lookup.keys": "id"})
    kinds = [("id", pa.int32()), *((f"v{n}", kind) for n, (kind, _, _) in enumerate(VALUES))]
    table.write(pa.schema(kinds).empty_table())
    for n, (_, value, expected) in enumerate(VALUES):
        if expected is None:
            with pytest.raises(errors.SchemaError, match=f"column 'v{n}' of the rows"):
                table.write([{"id": n, f"v{n}": value}])
        else:
            table.write([{"ID": n, f"v{n}": value}])
            assert table.get(n)[0][f"v{n}"] == expected
            assert [v for v in table.get(n)[0].values() if v is not None] == [n, expected]
    with pytest.raises(errors.SchemaError, match=r"column .id. of the rows"):
        table.write([{"id": 2**40}])


BEYOND: dict[str, pa.Array] = {
    "date": pa.array([2**31 - 1, 0], pa.int32()).cast(pa.date32()),
    "time": pa.array([-(2**62), 0], pa.int64()).cast(pa.timestamp("us")),
    "list": pa.array([[2**31 - 1], None], pa.list_(pa.int32())).cast(pa.list_(pa.date32())),
}


@pytest.mark.parametrize("kind", BEYOND)
def test_values_that_no_type_of_python_holds(tmp_path: Path, kind: str) -> None:
    """A value that no Python type holds is an error that names its column where Python's types are asked for; in Arrow it is read."""
    path = write_parquet(tmp_path / "a.parquet", id=[1, 2], v=BEYOND[kind])
    for cache in ("NONE", "FULL"):
        options = {"lookup.cache.dir": str(tmp_path / "c"), "lookup.keys": "id", "lookup.cache": cache}
        reader = LookupTable(str(path), options)
        for _ in range(2):
            with pytest.raises(
                errors.SchemaError, match=r"column 'v' of type .* no Python type can hold .* get_many\(\)"
            ):
                reader.get(1)
        assert reader.get(2)[0]["id"] == 2
        assert reader.get_many([1]).column("v").combine_chunks().equals(BEYOND[kind][:1])
        assert LookupTable(str(path), {**options, "lookup.columns": "id"}).get(1) == [{"id": 1}]


ROWS_OF_STREAM = pa.table({"id": [1, 2**40], "name": ["a", None], "parts": [[1], [2, 3]]})


def test_what_takes_a_stream(tmp_path: Path) -> None:
    """Read as an Arrow C stream, a table has its current rows each time; another table can be written from it."""
    cache = {"lookup.cache.dir": str(tmp_path / "cache")}
    table = LookupTable(str(tmp_path / "t"), {"lookup.keys": "id", **cache})
    table.write(ROWS_OF_STREAM)
    for _ in range(2):
        expected = table.scan()
        assert pa.table(table) == expected
        assert pl.DataFrame(table).to_dicts() == pl.from_arrow(table).to_list() == expected.to_pylist()
        with duckdb.connect() as connection:
            connection.register("dim", table)
            rows = connection.execute("SELECT * FROM dim WHERE id > 0").fetchall()
        assert rows == [tuple(row.values()) for row in expected.to_pylist()]
        table.write(ROWS_OF_STREAM.slice(0, 1))
    copied = LookupTable(str(tmp_path / "other"), cache)
    copied.write(table)
    assert copied.scan() == table.scan()
    changes = LookupTable(table.given["path"], {"lookup.changes-from": 1, **cache})
    assert pl.DataFrame(changes).height == 4


def test_keys_with_huge_exponents(table: Opens) -> None:
    """Keys with huge exponents are refused or have no row, and take no time."""
    reader = table({"lookup.keys": "id"})
    start = time.process_time()
    for key in map(decimal.Decimal, ("1e-300000000", "1e300000000", "-1e999999999999", "0e-300000000", "NaN", "sNaN")):
        for ask in (reader.get, lambda one: reader.get_many([one]), lambda one: reader.get_many([{"id": one}])):
            try:
                assert not len(ask(key))
            except (TypeError, errors.SchemaError) as problem:
                assert "key" in str(problem) or "column 'id'" in str(problem)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "mode",
    [{"lookup.cache": "FULL"}, {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 9}],
    ids=["full", "partial"],
)
def test_files_that_were_read_as_another_format(tmp_path: Path, cache_dir: Path, mode: dict[str, Any]) -> None:
    """A read with the wrong format leaves nothing in the caches that answers a read with the right one."""
    (tmp_path / "dim").mkdir()
    (tmp_path / "dim" / "a.json").write_text('{"id": 1, "v": "a"}\n')
    wait_until_settled(tmp_path / "dim" / "a.json")
    options = {**mode, "lookup.keys": "id", "lookup.schema": "id BIGINT, v STRING", "lookup.cache.dir": str(cache_dir)}
    for form, rows in (("csv", []), ("json", [{"id": 1, "v": "a"}])):
        with LookupTable(tmp_path / "dim", {**options, "lookup.format": form}) as table:
            assert table.get(1) == rows
