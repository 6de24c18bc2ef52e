"""The example scripts, as they are."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from examples.postgres_stream import orders_with_customers
from tests.support.postgres import PostgresServer
from tests.support.sparks import DATA_SOURCES, needs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_sqlite_lookup(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "sqlite_lookup.py"))
    first, second = capsys.readouterr().out.splitlines()
    assert first == "[{'id': 2, 'name': 'Bob', 'city': 'Bergen'}] []"
    assert second == "[{'id': 2, 'name': 'Bob', 'city': 'Hamar'}]"


@needs(DATA_SOURCES)
@pytest.mark.spark
def test_postgres_stream(spark: SparkSession, postgres_server: PostgresServer, tmp_path: Path) -> None:
    """Every order has its customer."""
    postgres_server.execute("DROP TABLE IF EXISTS customers")
    postgres_server.execute(
        "CREATE TABLE customers AS SELECT id, 'name ' || id AS name, 'Oslo' AS city FROM generate_series(0, 99) AS id"
    )
    stream = orders_with_customers(spark, postgres_server.uri).writeStream.format("parquet")
    query = stream.option("checkpointLocation", str(tmp_path / "state")).start(str(tmp_path / "out"))
    try:
        # A slow machine never has processed all that is available: new orders come every second.
        while not any(progress["numInputRows"] for progress in query.recentProgress):
            assert not query.awaitTermination(1)
    finally:
        query.stop()
    rows = spark.read.parquet(str(tmp_path / "out")).collect()
    assert rows
    assert {(row["name"], row["city"]) for row in rows} <= {(f"name {row['customer_id']}", "Oslo") for row in rows}
