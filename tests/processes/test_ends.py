"""Processes that end while threads of ours work beside them: with the exit code of their work, in time, and with nothing half done."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.lookup.lookup_table import LookupTable
from tests.support.fuzzing import by_day
from tests.support.workers import BOUND_S

OPTIONS = {
    "PARTIAL": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "50"},
    "FULL": {"lookup.cache": "FULL"},
}
OPTIONS["CACHE"] = {
    **OPTIONS["FULL"],
    "lookup.metadata.source": "CACHE",
    "lookup.full-cache.periodic-reload.interval": "1 h",
}
START = """
    import os, sys, threading, time
    import pyarrow as pa
    from pyspark_lookup.core import threads
    from pyspark_lookup.cache.full.loader import SnapshotLoader
    from pyspark_lookup.cache.partial.host_cache import SharedCache
    from pyspark_lookup.lookup.lookup_table import LookupTable
    from pyspark_lookup.sources.providers.functions import *

    begun = threading.Event()

    def again_and_again(kind, name, after=0):
        # The thread that calls it does so until it is ended.
        method, calls = getattr(kind, name), []

        def call(*args, **kwargs):
            calls.append(1)
            while len(calls) > after and isinstance(threading.current_thread(), threads._Thread):
                begun.set()
                method(*args, **kwargs)
            return method(*args, **kwargs)

        setattr(kind, name, call)

    def open_table(mode):
        return LookupTable(sys.argv[1] + "/t", {"lookup.keys": "id", "lookup.cache.dir": sys.argv[1] + "/cache", **OPTIONS[mode]})
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "t").mkdir()
    pq.write_table(
        pa.table({"id": range(10_000), "v": range(10_000)}), tmp_path / "t" / "0.parquet", row_group_size=500
    )
    return tmp_path


def run(script: str, *arguments: object) -> tuple[int, str]:
    text = f"OPTIONS = {OPTIONS!r}\n{textwrap.dedent(START)}\n{textwrap.dedent(script)}"
    command = [sys.executable, "-c", text, *map(str, arguments)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    return completed.returncode, completed.stdout + completed.stderr


MERGING = """
    again_and_again(SharedCache, "_merge")
    table = open_table("PARTIAL")
    for start in range(0, 400, 40):
        table.get_many([*range(start, start + 40)])
"""
LOADING = """
    again_and_again(SnapshotLoader, "load")
    table = open_table("FULL")
    table._full().ask_reload()
"""
ENDS = {"returns": "", "closes": "table.close()", "exits": "sys.exit(3)"}


@pytest.mark.parametrize(
    ("work", "end"), by_day([(MERGING, "returns"), (MERGING, "exits"), (LOADING, "exits"), (LOADING, "closes")], 2)
)
def test_a_process_ends_while_a_thread_works(home: Path, work: str, end: str) -> None:
    """The process ends with its own exit code and prints nothing; what was half done is neither there nor on record as a failure."""
    code, output = run(f"{work}\n    assert begun.wait(60)\n    {ENDS[end]}", home)
    assert (code, output) == (3 if end == "exits" else 0, "")
    assert os.listdir(home / "cache" / "v1" / "tmp") == []
    for mode in ("FULL", "CACHE", "PARTIAL"):
        options = {"lookup.keys": "id", "lookup.cache.dir": home / "cache", **OPTIONS[mode]}
        with LookupTable(str(home / "t"), options) as table:
            assert table.get(7) == [{"id": 7, "v": 7}]
            assert table.metrics()["numLoadFailures"] == 0


def test_what_hangs_keeps_no_process_from_ending(home: Path) -> None:
    """A lookup and a scan that hang, with callers in threads beside: the process ends after a limit, and says who is late."""
    code, output = run(
        """
        import contextlib, logging
        logging.basicConfig(level="INFO", format="%(message)s")
        threads._FOREIGN_END_S, scanning = 1.5, threading.Event()

        class Hanging(LookupFunction):
            def lookup(self, keys):
                begun.set()
                time.sleep(1000)

        def scan():
            scanning.set()
            yield time.sleep(1000)

        SCHEMA = pa.schema([("id", pa.int64())])

        def make(context):
            return LookupFunctionProvider(Hanging(), SCHEMA)

        def make_full(context):
            return FullCachingLookupProvider(scan, SCHEMA)

        sys.modules["hanging"] = sys.modules["__main__"]
        table = LookupTable(None, {"lookup.provider": "hanging:make", "lookup.keys": "id"})
        full = {"lookup.provider": "hanging:make_full", "lookup.keys": "id", "lookup.cache.dir": sys.argv[1] + "/cache", **OPTIONS["CACHE"]}

        def warm():
            with contextlib.suppress(BaseException):
                LookupTable(None, full).warm()

        threading.Thread(target=warm, daemon=True).start()
        threading.Thread(target=table.get, args=(7,), daemon=True).start()
        assert begun.wait(60) and scanning.wait(60)
        """,
        home,
    )
    assert code == 0
    warning = "the process ends although these threads did not stop in time: "
    assert (
        output.splitlines()[-1] == f"{warning}lookupcache-provider-hanging:make, lookupcache-scan-hanging:make_full"
    ), output


def test_tables_are_used_until_the_end(home: Path) -> None:
    """Tables are used by a thread that goes on after the main one, and by what a user has registered for the end, before and after our threads have ended."""
    code, output = run(
        """
        import atexit

        def use():
            for mode in OPTIONS:
                with open_table(mode) as table:
                    assert table.get_many([*range(0, 10_000, 500)]).num_rows == 20
            print("used")

        def work():
            threading.main_thread().join()
            use()
            with LookupTable(sys.argv[1] + "/t", {"lookup.cache.dir": sys.argv[1] + "/other"}) as table:
                assert table.scan().num_rows == 10_000

            class Flaky(KeyLookupFunction):
                schema, failed = pa.schema([("id", pa.int64())]), []

                def lookup_key(self, key):
                    if not self.failed:
                        self.failed.append(key)
                        raise OSError("once")
                    return [key]

            sys.modules["flaky"] = sys.modules["__main__"]
            globals()["make"] = lambda context: LookupFunctionProvider(Flaky(), Flaky.schema)
            with LookupTable(None, {"lookup.provider": "flaky:make", "lookup.keys": "id"}) as table:
                assert table.get(7) == [{"id": 7}]

        for call in (use, threads.end_all, use):
            atexit.register(call)
        threading.Thread(target=work).start()
        """,
        home,
    )
    assert (code, output) == (0, "used\nused\nused\n")
