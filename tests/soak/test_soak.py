"""A soak of five minutes. Longer: `scripts/soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import tables
from tests.soak.run import soak

pytestmark = [pytest.mark.nightly, pytest.mark.spark, pytest.mark.timeout(1800)]

SECONDS = 300.0
SEED = 20261121
HANG_S = 150.0  # other tests run beside it; alone it is a minute


def test_a_stream_is_right_through_all_that_happens(tmp_path: Path) -> None:
    """Tables that change, a store that fails, executors and workers that die, a full disk, a stepped clock, restarts: each
    micro-batch has one version of each table, the one it says, none older than before, and each row came out once."""
    told = soak(tmp_path, SECONDS, SEED, HANG_S)
    assert told["wrong"] == []
    # Half of what they are beside other tests, which take as much of the machine as they get. It goes on until each kind of
    # harm was done, so it cannot be so slow that these are about the machine.
    assert told["batches"] >= 10
    assert all(told[f"versions of {table}"] >= 5 for table in (tables.PUBLISHED, tables.MANAGED))
    assert told["harm not done"] == []
    assert all(told["requests"][fault] > 0 for fault in ("refused", "lost", "unanswered", "truncated"))
    assert sum(directory["counted"]["blockEvictedCount"] for directory in told["directories"].values()) > 0
