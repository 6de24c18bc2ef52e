"""Upserts and deletes: what others have appended meanwhile stays."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pyspark_lookup.errors import WriteConflictError
from pyspark_lookup.sources.managed.log import WriteMode
from tests.support.managed_tables import MODES, Site, ids_of, put, rows


def test_an_append_beside_an_upsert_stays(site: Site) -> None:
    """An append that an upsert overtakes adds its rows, an overwrite is refused; what a delete has hidden stays so beside an overwrite."""
    table, writer, keys = site.created(), site.writer(host="b"), pa.table({"id": [1]})
    table.write(rows(1))
    append, overwrite = (writer.begin(rows().schema, mode) for mode in (WriteMode.APPEND, WriteMode.OVERWRITE))
    table.upsert(rows(1, name="new"))
    writer.commit(append, put(writer, append, 5))
    assert {(row["id"], row["name"]) for row in table.scan().to_pylist()} == {(1, "new"), (5, "a")}
    with pytest.raises(WriteConflictError, match="by key"):
        writer.commit(overwrite, put(writer, overwrite, 6))
    delete = writer.begin(keys.schema, WriteMode.DELETE)
    overwrite = writer.begin(rows().schema, WriteMode.OVERWRITE)
    table.write(rows(1, 2))
    assert writer.commit(delete, (), effect=writer.deletion(keys)) is not None
    assert ids_of(table.scan()) == [2, 5]
    writer.commit(overwrite, put(writer, overwrite, 7))
    for mode in MODES.values():
        assert ids_of(site.table(mode, host="c").scan()) == [2, 7]
