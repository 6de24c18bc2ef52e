"""Children of a process whose threads use tables: whatever a thread held at that moment, the child answers."""

import concurrent.futures
import functools
import gc
import importlib
import os
import queue
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema

from pyspark_lookup.cache.full import full_cache
from pyspark_lookup.cache.memory import DefaultLookupCache
from pyspark_lookup.core.forks import ForkSafeLock
from pyspark_lookup.lookup.lookup_table import LookupTable, Transaction
from pyspark_lookup.sources.providers.functions import KeyLookupFunction, LookupContext, PartialCachingLookupProvider
from pyspark_lookup.spark.join import _explained_lock
from pyspark_lookup.spark.lookup_pass import _versions_lock
from tests.support.fakes import CACHES
from tests.support.workers import in_fresh_process

ANSWER_S = 30  # a child that has not answered by then hangs
LOCKS = type(threading.Lock()), type(threading.RLock())
SHARED = DefaultLookupCache(max_rows=100)  # as a module of a user's may have one


class Squares(KeyLookupFunction):
    schema = pa.schema([("id", pa.int64()), ("v", pa.int64())])

    def lookup_key(self, key: Any) -> list[dict[str, Any]]:
        return [{"id": key["id"], "v": key["id"] ** 2}]


def squares(context: LookupContext) -> PartialCachingLookupProvider:
    return PartialCachingLookupProvider(Squares(), SHARED, Squares.schema, version=lambda: "1")


def open_tables(home: Path, endpoint: str | None = None) -> dict[str, LookupTable]:
    home.mkdir(exist_ok=True)
    shared = {"lookup.keys": "id", "lookup.cache.dir": str(home / "cache")}
    with LookupTable(str(home / "t"), shared) as table:
        if not (home / "t").exists():
            table.write([{"id": id_, "v": id_**2} for id_ in range(100)])
    tables = {name: LookupTable(str(home / "t"), {**shared, **options}) for name, options in CACHES.items()}
    cached = {"lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 h"}
    tables["CACHE"] = LookupTable(str(home / "t"), {**shared, **CACHES["FULL"], **cached})
    provided = {**shared, "lookup.provider": f"{__name__}:squares", "lookup.cache": "PARTIAL"}
    tables["provider"] = LookupTable(None, provided)
    if endpoint:
        tables["S3"] = LookupTable("s3://forked/t.csv", {**shared, "lookup.storage.endpoint_url": endpoint})
    return tables


def use(tables: dict[str, LookupTable]) -> None:
    for name, table in tables.items():
        assert table.get(7) == [{"id": 7, "v": 49}], name
    assert tables["NONE"].scan(predicate="id < 9").num_rows == 9
    tables["FULL"].upsert([{"id": 7, "v": 49}])


def in_child(run: Callable[[], object]) -> int:
    """Run a function in a forked child; returns how that ended: 0, or the signal that ends one which hangs."""
    child = os.fork()
    if not child:
        signal.alarm(ANSWER_S)
        try:
            run()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def find_locks(value: object) -> Iterator[Any]:
    """The locks that an object waits for."""
    if isinstance(value, LOCKS):
        yield value
    elif isinstance(
        value, (threading.Event, threading.Condition, queue.Queue, concurrent.futures.Future, ForkSafeLock)
    ):
        for part in vars(value).values():
            yield from find_locks(part)
    elif isinstance(value, functools.cached_property) and hasattr(value, "lock"):
        yield value.lock


def every_lock() -> list[Any]:
    """All locks that our objects, classes and modules have, and those of cached properties of other packages that we call."""
    locks: dict[int, Any] = {}
    for item in gc.get_objects():
        kind = item if isinstance(item, type) else type(item)
        if str(kind.__module__).startswith(("pyspark_lookup.", "fsspec.", "pyiceberg.")) and hasattr(item, "__dict__"):
            locks |= {id(lock): lock for value in vars(item).values() for lock in find_locks(value)}
    for name, module in list(sys.modules.items()):
        if name.startswith("pyspark_lookup."):
            locks |= {id(lock): lock for value in vars(module).values() for lock in find_locks(value)}
    return list(locks.values())


def fork_under_all_locks(home: Path, endpoint: str) -> None:
    """A child that is forked while another thread holds every lock there is answers from the tables that it inherited, and from its own."""
    tables = open_tables(home, endpoint)
    use(tables)
    ready, finished = threading.Event(), threading.Event()

    def hold() -> None:
        locks = [*every_lock(), full_cache._Bar.get_lock()]
        acquired = [lock for lock in locks if lock.acquire(timeout=0.1)]  # an event loop's thread may have one
        assert len(acquired) > len(locks) - 5, (len(acquired), len(locks))
        ready.set()
        finished.wait()
        for lock in acquired:
            lock.release()

    threading.Thread(target=hold).start()
    assert ready.wait(ANSWER_S)

    def answer() -> None:
        use(tables)  # which were in use
        use(open_tables(home, endpoint))
        with _explained_lock, _versions_lock:
            pass
        assert Schema(schema_id=1).highest_field_id == 0
        with full_cache.draw_progress(lambda: "a build", time.monotonic, interactive=True) as report:
            report(1, 2)
        for table in tables.values():
            table.close()

    assert in_child(answer) == 0
    finished.set()
    use(tables)  # the child has closed nothing of its parent's


def fork_in_a_transaction(home: Path, endpoint: str) -> None:
    """A child that leaves the block of its parent's transaction neither commits nor aborts it."""
    table = open_tables(home)["NONE"]
    table.scan()
    with table.transaction() as transaction:
        transaction.write([{"id": 100, "v": 0}])

        def leave(with_error: bool) -> None:
            with pytest.raises(ValueError, match="belongs to the parent process"):
                transaction.write([{"id": 101, "v": 0}])
            with pytest.raises(ValueError, match="belongs to"):
                transaction.commit()
            Transaction.__exit__(transaction, SystemExit if with_error else None, None, None)

        assert in_child(lambda: leave(True)) == in_child(lambda: leave(False)) == 0
        assert table.get(100) == []
    assert table.get(100) == [{"id": 100, "v": 0}]


def fork_while_a_thread_imports(home: Path, endpoint: str) -> None:
    """A child imports anew what another thread of its parent was importing; without that it would wait for ever."""
    gate: Any = types.ModuleType("gate")
    gate.begun, gate.go_on, gate.first = threading.Event(), threading.Event(), [True]
    sys.modules["gate"] = gate
    sys.path.insert(0, str(home))
    (home / "outer.py").write_text("import inner\nvalue = inner.value + 1\n")
    (home / "inner.py").write_text(
        "from gate import *\nif first and first.pop():\n    begun.set()\n    go_on.wait()\nvalue = 7\n"
    )
    importing = threading.Thread(target=importlib.import_module, args=("outer",))
    importing.start()
    assert gate.begun.wait(ANSWER_S)

    def check_imports() -> None:
        assert [importlib.import_module(name).value for name in ("inner", "outer")] == [7, 8]

    assert in_child(check_imports) == 0
    gate.go_on.set()
    importing.join()
    check_imports()


def fork_while_busy(home: Path, endpoint: str) -> None:
    for fork in (fork_under_all_locks, fork_in_a_transaction, fork_while_a_thread_imports):
        (home / fork.__name__).mkdir()
        fork(home / fork.__name__, endpoint)


def test_children_of_a_busy_process(tmp_path: Path, s3: Any) -> None:
    """Children of a busy process answer as their parent does, and touch nothing that is the parent's."""
    s3.client.create_bucket(Bucket="forked")
    s3.client.put_object(Bucket="forked", Key="t.csv", Body=b"id,v\n6,36\n7,49\n")
    in_fresh_process(fork_while_busy, tmp_path, s3.endpoint)
