"""Deploying as docs/deploying.md says: the wheel in a packed environment, on a cluster whose own Python has no package of ours."""

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.cluster import HOME, Cluster
from tests.support.spark_tables import publish_version, run_command
from tests.support.sparks import DATA_SOURCES

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(560)]
ROOT = Path(__file__).parents[2]
HOSTS_PYTHON = str(Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}"))
INSTALLED = f"environment/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/pyspark_lookup"


def install(python: Path, wheel: Path) -> None:
    """Install a wheel and its requirements. These are copied from the environment of the tests: the same versions, without an index."""
    pip = [sys.executable, "-m", "pip", "--python", python]
    run_command(*pip, "install", "--no-index", "--no-deps", wheel)
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    (package,) = metadata.distributions(path=[str(site)])
    requirements = list(package.requires or [])
    copied = set()
    while requirements:
        requirement = Requirement(requirements.pop())
        if requirement.name in copied or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        copied.add(requirement.name)
        distribution = metadata.distribution(requirement.name)
        for file in distribution.files or []:
            if ".." not in file.parts and Path(str(file.locate())).exists():
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(file.locate()), site / file)
        requirements += distribution.requires or []
    run_command(*pip, "check")


def packed_environment(home: Path) -> Path:
    """A packed environment with the wheel of this checkout."""
    sources = home / "sources"  # a build writes beside its sources
    sources.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.cfg"):
        shutil.copy(ROOT / name, sources)
    shutil.copytree(ROOT / "pyspark_lookup", sources / "pyspark_lookup", ignore=shutil.ignore_patterns("__pycache__"))
    run_command(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", home, sources)
    run_command(sys.executable, "-m", "venv", "--without-pip", home / "environment")
    install(home / "environment" / "bin" / "python", *home.glob("*.whl"))
    packed = home / "environment.tar.gz"
    run_command(sys.executable, "-m", "venv_pack", "--compress-level", 1, "-p", home / "environment", "-o", packed)
    return packed


_JOB = """
import os, subprocess, sys
from pathlib import Path
import pyarrow as pa
from pyspark.sql import SparkSession, functions as sf
import pyspark_lookup
from pyspark_lookup import LookupTable, lookup_join, read_table
dim, home, formats = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
spark.sparkContext.setLogLevel("ERROR")

@sf.udf("array<string>")
def origin(key):
    "Where a task runs, the package that answers there, and what the host's Python says without the environment."
    import pyspark_lookup
    hosts = subprocess.run([sys._base_executable, "-c", "import pyspark_lookup"], capture_output=True, text=True)
    return [os.getcwd(), os.path.relpath(pyspark_lookup.__file__), (hosts.stderr.splitlines() or ["it has it"])[-1]]

print("DRIVER", os.path.relpath(pyspark_lookup.__file__))
facts = spark.range(0, 400, 1, 8)
rows = lookup_join(facts, dim, "id", strategy="cache").select("id", "version", origin("id").alias("origin")).collect()
print("JOINED", len(rows), all(row.version == (None if row.id % 2 else 1) for row in rows))
directories, packages, answers = ({row.origin[number] for row in rows} for number in range(3))
print("EXECUTORS", *sorted(directory.removeprefix(home) for directory in directories))
print("PACKAGES", *packages)
print("HOSTS", *answers)
print("READ", sorted(row.id for row in read_table(spark, dim).collect()) == list(range(0, 400, 2)))
table = os.path.join(home, "table")
written = facts.withColumn("name", sf.concat(sf.lit("n"), "id"))
if formats == "True":
    written.write.format("lookupcache").mode("append").option("lookup.keys", "id").save(table)
    spark.sql(f"CREATE TABLE managed USING lookupcache OPTIONS (path '{table}')")
    spark.sql("INSERT INTO managed VALUES (400, 'n400')")
else:
    LookupTable(table, {"lookup.keys": "id"}).write(pa.Table.from_pylist([row.asDict() for row in written.collect()]))
    LookupTable(table).write([{"id": 400, "name": "n400"}])
print("MANAGED", read_table(spark, table).filter("name = 'n' || id").count())
spark.stop()
"""


def test_a_packed_environment(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Joins, reads and writes use the package of the archive; the hosts' Python, of the system, has none."""
    archive = packed_environment(tmp_path_factory.mktemp("packed"))
    dim = publish_version(tmp_path / "dim.parquet", 1, range(0, 400, 2))
    (tmp_path / "environment").mkdir()
    run_command("tar", "-xzf", archive, "-C", tmp_path / "environment")  # for the driver, which is a client
    (tmp_path / "job.py").write_text(_JOB)
    conf = tmp_path / "lookupcache.conf"
    conf.write_text(f"lookup.cache.dir = {tmp_path / 'cache'}\n")
    prefixes = ("PYTHONPATH", "PYSPARK_", "LOOKUPCACHE_", "VIRTUAL_ENV")
    variables = {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}
    variables |= {"SPARK_HOME": str(HOME), "SPARK_LOCAL_IP": "127.0.0.1", "LOOKUPCACHE_CONF": str(conf)}
    variables["PYSPARK_PYTHON"] = "./environment/bin/python"
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    }
    options = [part for key, text in settings.items() for part in ("--conf", f"{key}={text}")]
    hosts = {"PYTHONPATH": "", "PYSPARK_PYTHON": HOSTS_PYTHON, "PYSPARK_DRIVER_PYTHON": HOSTS_PYTHON}
    cluster = Cluster(tmp_path, [tmp_path / "cache"] * 2, variables=[hosts] * 2)
    try:
        command = [HOME / "bin" / "spark-submit", "--master", cluster.master, *options]
        command += ["--archives", f"{archive}#environment", "job.py", dim, f"{tmp_path}/", bool(DATA_SOURCES)]
        printed = run_command(*command, cwd=tmp_path, env=variables)
    finally:
        cluster.close()
    results = dict(line.split(" ", 1) for line in printed.splitlines() if line.split(" ")[0].isupper())
    executors = results.pop("EXECUTORS").split()
    assert len(executors) == 2, executors
    assert results == {
        "DRIVER": f"{INSTALLED}/__init__.py", "JOINED": "400 True", "PACKAGES": f"{INSTALLED}/__init__.py",
        "HOSTS": "ModuleNotFoundError: No module named 'pyspark_lookup'", "READ": "True", "MANAGED": "401",
    }  # fmt: skip
