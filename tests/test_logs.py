"""One line per event, for people and programs."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path

import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.base.log_events import log_event
from tests.test_api import put

LOG = logging.getLogger("pyspark_lookup.tests")
FULL = {"lookup.keys": "id", "lookup.cache": "FULL"}


def events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(r.lookup_event, r.levelname) for r in caplog.records if hasattr(r, "lookup_event")]


def test_a_line_can_be_read_back(caplog: pytest.LogCaptureFixture) -> None:
    """Each field is `key=value`; what would end a value, or the line, is quoted; the record has them as they are."""
    with caplog.at_level(logging.INFO):
        log_event(LOG, logging.INFO, "reload", table="/a b", error='x="1"\ny\\z', seconds=1.23456, rows=3, none="")
    (record,) = caplog.records
    message = record.getMessage()
    assert message == 'lookupcache reload table="/a b" error="x=\\"1\\"\\ny\\\\z" seconds=1.235 rows=3 none=""'
    assert len(message.splitlines()) == 1
    assert json.loads(message.split("error=")[1].split(" seconds=")[0]) == 'x="1"\ny\\z'
    assert dict(part.split("=", 1) for part in shlex.split(message)[2:])["rows"] == "3"
    assert record.lookup_fields["seconds"] == 1.23456  # type: ignore[attr-defined]


def test_reloads_failures_and_fallbacks_have_their_line(
    tmp_path: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A load tells how long it took and what came of it, a failing one why, and the next that it is over; each in one line."""
    path = put(tmp_path / "dim" / "a.parquet", id=range(3)).parent
    with caplog.at_level(logging.INFO), LookupTable(str(path), {**FULL, "lookup.cache.dir": str(cache_dir)}) as table:
        version = table.reload()
        loaded = caplog.records[-1].lookup_fields  # type: ignore[attr-defined]
        assert (loaded["version"], loaded["rows"], loaded["failures_before"]) == (version, 3, 0)
        (path / "b.parquet").write_bytes(b"noise")
        for _ in range(2):
            with pytest.raises(Exception, match="parquet"):
                table.reload()
        put(path / "b.parquet", id=range(100_000))
        table.reload()
        assert caplog.records[-1].lookup_fields["fetched"] > 0  # type: ignore[attr-defined]
    assert events(caplog) == [
        ("reload", "INFO"),
        ("reload-failed", "WARNING"),
        ("reload-failed", "INFO"),
        ("reload", "WARNING"),
    ]
    assert all(str(path) in record.getMessage() for record in caplog.records)
