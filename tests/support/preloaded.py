"""The process that PySpark's daemons of the tests are forks of: it has imported what Spark's workers import.

Spark starts a daemon for each kind of worker, and has it fork a worker for each plan: the tests make many of both. The tests' own
sessions and those over Connect run on these daemons. Other programs that tests start run on PySpark's: applications, clusters, the
pages of the documentation.
"""

import contextlib
import functools
import gc
import importlib
import os
import runpy
import select
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

USED = (
    "numpy", "pandas", "pyarrow.compute", "pyarrow.dataset", "pyspark.worker", "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.plan_data_source_read", "pyspark_lookup.spark.change_stream", "pyspark_lookup.spark.planning",
    "pyspark_lookup.spark.reading", "pyspark_lookup.spark.writer", "pyiceberg.catalog.rest", "pyiceberg.catalog.sql",
    "pyiceberg.avro.file", "pyiceberg.manifest", "pyiceberg.utils.schema_conversion",
)  # fmt: skip


@functools.cache
def start_preloading() -> tuple[Path, "subprocess.Popen[bytes]"]:
    """Start this test process's preloaded process, which ends with it. Returns the socket where it forks daemons."""
    path = Path(tempfile.mkdtemp(dir=os.environ["LOOKUPCACHE_TESTS_HOME"])) / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        command = [sys.executable, "-u", "-m", "tests.support.preloaded", str(path), str(listener.fileno())]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": "0"}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    return path, process


def python_variables(home: Path) -> dict[str, str]:
    """The environment variables by which a Spark that is started now runs its Python on such daemons, by a script in `home`."""
    # Spark runs it by an unquoted shell command, and the checkout's path may have a space.
    script = home / "python"
    script.symlink_to(Path(__file__).with_name("python"))
    return {
        "LOOKUPCACHE_TESTS_DAEMONS": str(start_preloading()[0]),
        "LOOKUPCACHE_TESTS_PYTHON": sys.executable,
        "PYSPARK_PYTHON": str(script),
        "PYSPARK_DRIVER_PYTHON": str(script),
    }


def become_daemon(connection: socket.socket) -> None:
    """Run PySpark's daemon in this process, with the directory, arguments, environment and streams of `daemon.py`'s process at the other end of
    `connection`. That process waits until the connection closes."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    directory, arguments, *variables = b"".join(iter(lambda: connection.recv(2**16), b"")).split(b"\0")
    os.chdir(directory)
    os.environb.clear()
    os.environb.update(variable.split(b"=", 1) for variable in variables)
    time.tzset()
    tempfile.tempdir = None
    path = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    sys.argv = sys.orig_argv = ["pyspark.daemon", *os.fsdecode(arguments).split()]
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    # Workers call `invalidate_caches`, at which from Python 3.13 on an importer of a zip file forgets what is in it. `pkgutil` then
    # fails on it, and Spark finds no sources; on a new one it does not.
    sys.path_importer_cache.clear()
    runpy.run_module("pyspark.daemon", run_name="__main__")


def fork_daemons(path: Path, listener: socket.socket) -> None:
    """Fork a daemon for each connection, until the standard input ends."""
    for name in USED:
        with contextlib.suppress(ImportError):  # not every Spark has all of them
            importlib.import_module(name)
    # After each task PySpark collects garbage: not in what is imported here.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            shutil.rmtree(path.parent)
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            become_daemon(connection)
            return
        connection.close()


if __name__ == "__main__":
    fork_daemons(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
