"""What tests share: a private cache directory, an S3 server, one Spark session per test process."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.s3server import S3Server

# Before anything starts a JVM: its workers inherit these.
os.environ.update(
    AWS_ACCESS_KEY_ID="test",
    AWS_SECRET_ACCESS_KEY="test",
    AWS_DEFAULT_REGION="us-east-1",
    PYSPARK_PYTHON=sys.executable,
    PYSPARK_DRIVER_PYTHON=sys.executable,
)
_HOST = Path(tempfile.mkdtemp(prefix="lookupcache-tests-"))
(_HOST / "lookupcache.conf").write_text(f"lookup.cache.dir = {_HOST / 'cache'}\n")
os.environ["LOOKUPCACHE_CONF"] = str(_HOST / "lookupcache.conf")


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    """A cache directory nobody has used."""
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """An S3 server for the whole run."""
    from tests.s3server import S3Server

    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: S3Server) -> Iterator[S3Server]:
    """The S3 server, with its log and hook cleared."""
    s3_server.log.clear()
    s3_server.before = s3_server.after = None
    yield s3_server
    s3_server.before = s3_server.after = None


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session on Spark's default configuration (but for what keeps tests small)."""
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2,4]")  # 4: a failed task is tried again
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(_HOST / "warehouse"))
        .config("spark.driver.memory", "2g")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
