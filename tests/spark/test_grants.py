"""Tables whose catalog vends credentials, in Spark: scans, joins and functions read with them, and never show them."""

import itertools
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pyspark_lookup import explain_lookup, lookup_join, register_lookup
from tests.support.governed_catalog import GovernedCatalog, GovernedTable
from tests.support.s3server import Mirror, S3Server
from tests.support.short_credentials import ShortCredentials
from tests.support.sparks import DATA_SOURCES, needs
from tests.support.unity_catalog import UnityServer

IDS = 12


@needs(DATA_SOURCES)
@pytest.mark.timeout(600)
@pytest.mark.nightly
@pytest.mark.spark
def test_vended_credentials_and_spark(spark: Any, s3: S3Server, tmp_path: Path) -> None:
    """Each worker gets credentials of its own, and a task goes on when its credentials expire. Planned scans and running queries end with the grant."""
    store = ShortCredentials(s3)
    with GovernedCatalog(store, s3.endpoint) as catalog:
        catalog.everybody = "alice"
        catalog.grants.add(("alice", "ns.table"))
        table = GovernedTable(catalog, s3, tmp_path, "table", {"id": "int", "name": "string"})
        # Larger than one task reads, so that scans are planned by files.
        names = [random.Random(number).randbytes(150_000).hex() for number in range(IDS)]
        table.write(*([{"id": number, "name": name}] for number, name in enumerate(names)))
        store.open_keys.clear()  # from now on nobody reads without vended credentials
        caches = itertools.count()

        def options(**more: str) -> dict[str, str]:
            named = {"catalog": "tests", "catalog.type": "rest", "catalog.uri": catalog.uri, **more}
            cache = {"lookup.cache.dir": str(tmp_path / f"cache{next(caches)}"), "lookup.keys": "id"}
            return cache | {f"lookup.{name}": value for name, value in named.items()}

        always = options(**{"catalog.authorise-every": "0 s"})
        small = always | {"lookup.scan.split-size": "1 MiB"}
        frames = [
            spark.read.format("lookupcache").options(**options()).load("ns.table"),
            lookup_join(spark.range(IDS), "ns.table", on={"id": "id"}, options=always),
            spark.read.format("lookupcache").options(**small).load("ns.table"),
        ]
        register_lookup(spark, "governed_name", "ns.table", key="id", options=options())
        frames.append(spark.sql(f"SELECT governed_name(id) FROM range({IDS})"))
        ended: set[str] = set()

        def expire_credentials(method: str, path: str) -> None:
            if method == "GET" and path.endswith(".parquet") and path not in ended:
                ended.add(path)
                store.expire()

        s3.before = expire_credentials
        mode = spark._jvm.org.apache.spark.sql.execution.ExplainMode
        texts = []
        for frame in frames:
            texts += [
                frame._jdf.queryExecution().explainString(mode.fromString(name)) for name in ("extended", "formatted")
            ]
            assert frame.count() == IDS
            texts += [frame._jdf.queryExecution().toString(), str(frame.schema)]
        texts.append(explain_lookup(frames[1]))
        assert len(ended) == IDS
        assert "ExpiredToken" in store.refused
        catalog.grants.clear()
        for frame in frames[1:3]:
            with pytest.raises(Exception, match="does not let this principal read") as refused:
                frame.collect()
            texts.append(str(refused.value))
    secrets = [secret for vended in store.issued for secret in vended.values()]
    assert [text for text in texts if any(secret in text for secret in secrets)] == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if any(secret.encode() in path.read_bytes() for secret in secrets)] == []


def of_ann(url: str) -> dict[str, str]:
    """The function that `lookup.credentials` names, on each machine."""
    return {"token": "token-of-ann"}


@needs(DATA_SOURCES)
@pytest.mark.timeout(600)
@pytest.mark.nightly
@pytest.mark.spark
def test_a_delta_table_of_unity_catalog(spark: Any, s3: S3Server, tmp_path: Path) -> None:
    """Scans, SQL and joins read the table by its name, until the right to read it is withdrawn."""
    store = ShortCredentials(s3)
    mirror = Mirror(tmp_path / "airports", tmp_path.name, s3)
    write_deltalake(str(mirror.local), pa.table({"id": [*range(IDS)], "name": [f"n{id}" for id in range(IDS)]}))
    mirror.send()
    store.open_keys.clear()
    with UnityServer(store.vend) as catalog:
        catalog.tokens["token-of-ann"] = "ann"
        name = "main.travel.airports"
        catalog.create(name, mirror.url, "ann")
        options = {
            "lookup.catalog": "unity", "lookup.catalog.uri": catalog.uri, "lookup.credentials": f"{__name__}:{of_ann.__name__}", "lookup.keys": "id",
            "lookup.storage.endpoint_url": s3.endpoint, "lookup.cache.dir": str(tmp_path / "cache"), "lookup.catalog.authorise-every": "0 s",
        }  # fmt: skip
        listed = ", ".join(f"'{key}' '{value}'" for key, value in options.items())
        spark.sql(f"CREATE TABLE of_unity USING lookupcache OPTIONS (path '{name}', {listed})")
        try:
            rows = [spark.table("of_unity"), lookup_join(spark.range(IDS), name, on={"id": "id"}, options=options)]
            for frame in rows:
                assert sorted(row.name for row in frame.collect()) == sorted(f"n{id}" for id in range(IDS))
            catalog.readers[name].clear()
            for frame in rows:
                with pytest.raises(Exception, match=r"does not let this principal read main\.travel\.airports"):
                    frame.collect()
        finally:
            spark.sql("DROP TABLE of_unity")
