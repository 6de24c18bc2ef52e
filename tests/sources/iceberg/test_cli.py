"""The command line on Iceberg tables, named in a catalog."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.command_line import KEYED, Run, run
from tests.support.iceberg_definition import in_catalog, sql_catalog
from tests.support.iceberg_writing import IcebergTable

__all__ = ["run"]
URL = "catalog://tests/ns.dim"


def test_a_warm_host(run: Run, tmp_path: Path) -> None:
    """`warm`, `advise`, `stats`, `report`, `serve-metrics` and `check`: the table under its URL, which names no property of its catalog."""
    catalog, properties = sql_catalog(tmp_path)
    columns, publish = {"id": "long", "name": "string"}, in_catalog(catalog, "ns.dim")
    table = IcebergTable.create(tmp_path / "dim", columns, publish=publish)
    table.commit(table.data([{"id": key, "name": f"n{key}"} for key in range(10)]))
    table.commit([table.equality([{"id": 3}, {"id": 4}], ["id"])])
    catalog_options = ["lookup.catalog=tests", *(f"lookup.catalog.{name}={text}" for name, text in properties.items())]
    names = ["ns.dim", *(text for option in catalog_options for text in ("-o", option))]
    warmed = run("warm", *names, *KEYED, "--json")
    assert (warmed.code, warmed.json["rows"]) == (0, 8)
    pq.write_table(pa.table({"id": [1, 2, 1]}), tmp_path / "trace.parquet")
    advised = run("advise", *names, "--trace", tmp_path / "trace.parquet", *KEYED, "--json").json
    assert (advised["options"], advised["distinct_keys"]) == ({"lookup.cache": "FULL"}, 2)
    (entry,) = run("stats", "--json").json["tables"]
    assert (entry["url"], entry["values"]["snapshotBuildCount"]) == (URL, 1)
    (entry,) = run("stats", URL, "--json").json["tables"]
    assert entry["url"] == URL
    assert run("report", tmp_path / "page.html").code == 0
    assert run("serve-metrics", "--textfile", tmp_path / "host.prom").code == 0
    for text in ((tmp_path / "page.html").read_text(), (tmp_path / "host.prom").read_text()):
        assert URL in text
        assert "sqlite" not in text
    assert run("check").code == 0
