"""What tests share: a private cache directory, an S3 server, one Spark session per test process."""

from __future__ import annotations

import collections
import gc
import itertools
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import certifi
import pytest
from hypothesis import Phase, settings

pytest.register_assert_rewrite("tests.support")  # before the import, so that its failed assertions show values, too

from tests.support.fuzzing import MORE  # noqa: E402
from tests.support.preloaded import python_variables  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.disks import Opened
    from tests.support.s3server import S3Server

_names = itertools.count()
_SLOW_COUNTS = 25  # tests that take as long as one that is marked slow and does not say how many it counts for
# Before anything starts a JVM: its workers inherit these.
os.environ.update(
    AWS_ACCESS_KEY_ID="test",
    AWS_SECRET_ACCESS_KEY="test",
    AWS_DEFAULT_REGION="us-east-1",
    PYSPARK_PYTHON=sys.executable,
    PYSPARK_DRIVER_PYTHON=sys.executable,
)
# Tests are too short to gain from a JVM's thorough compilation, from garbage collection by several threads or when classes have
# taken some room, or from a check of the bytecode of Spark's 20,000 classes. What is compiled has more room than 48 MB.
_JVM_OPTIONS = (
    "TieredStopAtLevel=1", "ReservedCodeCacheSize=240m", "+UseSerialGC", "MetaspaceSize=512m", "+UnlockDiagnosticVMOptions",
    "-BytecodeVerificationRemote",
)  # fmt: skip
os.environ.setdefault("JDK_JAVA_OPTIONS", " ".join(f"-XX:{option}" for option in _JVM_OPTIONS))
_HOST = Path(tempfile.mkdtemp(prefix="lookupcache-tests-"))
# Each client of S3 reads the certificates that it trusts, which takes 40 ms for all that there are. Here S3 has no TLS: one will do.
_FIRST, _END, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
(_HOST / "certificate.pem").write_text(_FIRST + _END)
os.environ["AWS_CA_BUNDLE"] = str(_HOST / "certificate.pem")
(_HOST / "lookupcache.conf").write_text(f"lookup.cache.dir = {_HOST / 'cache'}\n")
os.environ["LOOKUPCACHE_CONF"] = str(_HOST / "lookupcache.conf")
os.environ["LOOKUPCACHE_TESTS_HOME"] = str(_HOST)
# Processes are killed here, but no machine loses power: nothing has to reach the disk, which takes milliseconds each time.
os.fsync = os.fstat
# What CI says is about the change: each run draws the same examples. A night (see `fuzzing`) draws more, and others every time.
settings.register_profile("day", derandomize=True, deadline=None)
settings.register_profile("mutations", derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate])
settings.register_profile("night", max_examples=100 * MORE, print_blob=True, deadline=None)
settings.load_profile("night" if "LOOKUPCACHE_FUZZ" in os.environ else "day")


def pytest_unconfigure() -> None:
    shutil.rmtree(_HOST, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that no process is left with one of them at the end. Spark starts only in tests marked so."""
    unmarked = [
        item.nodeid
        for item in items
        if "spark" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("spark")
    ]
    assert not unmarked, f"these tests start Spark without its mark: {unmarked}"
    weights = collections.Counter[Path]()
    for item in items:
        slow = item.get_closest_marker("slow")
        weights[item.path] += 1 if slow is None else slow.args[0] if slow.args else _SLOW_COUNTS
    items.sort(key=lambda item: -weights[item.path])


def pytest_collection_finish() -> None:
    """The objects of the test modules stay until the end: garbage collection need not look at them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    """A cache directory nobody has used."""
    return tmp_path / "cache"


@pytest.fixture
def opened(cache_dir: Path) -> Opened:
    """The cache directory, as a process has it open."""
    from tests.support.disks import Opened

    return Opened(cache_dir)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """An S3 server for the whole run."""
    from tests.support.s3server import S3Server

    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: S3Server) -> Iterator[S3Server]:
    """The S3 server, with its log and hook cleared."""
    s3_server.log.clear()
    s3_server.before = s3_server.after = s3_server.between = None
    yield s3_server
    s3_server.before = s3_server.after = s3_server.between = None


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """A bucket of this test's own."""
    name = f"b-{uuid.uuid4().hex[:12]}"
    s3.client.create_bucket(Bucket=name)
    s3.log.clear()
    return name


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session with Spark's default configuration, except for settings that keep tests small. Its workers have preloaded imports."""
    from pyspark.sql import SparkSession

    with pytest.MonkeyPatch.context() as patch:
        # The session and its JVM keep these; programs that tests start get the Python itself.
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        for name, value in python_variables(_HOST).items():
            patch.setenv(name, value)
        session = (
            SparkSession.builder.master("local[2,2]")  # a failed task is tried again, once
            .config("spark.ui.enabled", "false")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.warehouse.dir", str(_HOST / "warehouse"))
            .config("spark.driver.memory", "2g")
            .config("spark.driver.extraJavaOptions", "-Xms1g -Xmn400m")
            .config("spark.sql.session.timeZone", "UTC")
            # The defaults from Spark 4.0 on.
            .config("spark.sql.parquet.datetimeRebaseModeInRead", "CORRECTED")
            .config("spark.sql.parquet.int96RebaseModeInRead", "CORRECTED")
            .getOrCreate()
        )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def name(spark: SparkSession) -> Iterator[str]:
    """A name that no other test uses in Spark's catalog. A table of this name is dropped afterwards."""
    table_name = f"name_{next(_names)}"
    yield table_name
    spark.sql(f"DROP TABLE IF EXISTS {table_name}")
