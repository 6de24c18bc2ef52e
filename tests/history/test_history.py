"""Histories of a minute on each store, and that the checker finds what is wrong in one. Longer: `scripts/history`."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.history.checker import check, states
from tests.history.run import ENOUGH, Place, S3Place, run
from tests.support.s3server import S3Server

SECONDS = 30 * float(os.environ.get("LOOKUPCACHE_MINUTES", "2"))  # on each of two stores
SEED = int(os.environ.get("LOOKUPCACHE_SEED", "20261121"))


@pytest.mark.nightly
@pytest.mark.timeout(600 + 4 * SECONDS)
@pytest.mark.parametrize("store", ["local", "s3"])
def test_every_read_is_of_some_prefix_of_the_log(store: str, s3: S3Server, tmp_path: Path) -> None:
    """Six writers and as many kinds of readers, killed and failing, in all cache modes: no row is lost, doubled, early or back again."""
    place = Place(tmp_path) if store == "local" else S3Place(tmp_path, s3, "history")
    note_counts = run(place, tmp_path, SECONDS, SEED)
    assert note_counts["kills"] >= 5
    assert all(note_counts[kind] >= least for kind, least in ENOUGH.items())


ROWS = {1: [(1, "a", 0)], 2: [(2, "b", 0)], 3: [(3, "c", 0)]}


def event(position: int, kind: str, **body: Any) -> bytes:
    return json.dumps({"position": position, "kind": kind, **body}).encode()


def a_log() -> tuple[list[bytes], dict[str, bytes]]:
    """Append 1, append 2, then an overwrite 3; and an append 4 that is aborted."""
    events = [event(1, "create")]
    files = {}
    for write_id, rows in ROWS.items():
        sink = io.BytesIO()
        columns = dict(zip(["id", "tag", "n"], map(list, zip(*rows, strict=True)), strict=True))
        pq.write_table(pa.table(columns), sink)
        files[f"f{write_id}"] = sink.getvalue()
        mode = "overwrite" if write_id == 3 else "append"
        at = len(events)
        events += [event(at + 1, "allocate", write_id=write_id, mode=mode)]
        events += [event(at + 2, "write", write_id=write_id, files=[[f"f{write_id}", 1, 1]])]
        events += [event(at + 3, "commit", write_id=write_id)]
    events += [event(11, "allocate", write_id=4, mode="append"), event(12, "write", write_id=4, files=[["gone", 1, 1]])]
    return [*events, event(13, "abort", write_id=4)], files


def note(
    kind: str, at: int, rows: list[tuple[int, str, int]] | None = None, who: str = "r-UFS-own", **more: Any
) -> dict[str, Any]:
    fields = {"kind": kind, "at": at, "who": who, "began": at - 1, **more}
    return fields if rows is None else {**fields, "rows": [list(row) for row in rows]}


def judge(*notes: dict[str, Any], current: bool = False) -> dict[str, int]:
    events, files = a_log()
    history, tags = states(events, files.__getitem__)
    return check(notes, history, tags, lambda worker: current, lambda worker: False)


@pytest.mark.parametrize(
    "notes",
    [
        [note("scan", 1, ROWS[1]), note("scan", 2, ROWS[1] + ROWS[2]), note("scan", 3, ROWS[3])],
        [note("get", 1, [], keys=[9]), note("get", 2, ROWS[2], keys=[2, 9]), note("scan", 3, ROWS[3])],
        [note("acknowledged", 1, tag="b", position=7), note("unknown", 2, tag="x"), note("failed", 3, tag="y")],
        [note("own", 5, ROWS[1] + ROWS[2], position=7)],
    ],
)
def test_a_right_history_passes(notes: list[dict[str, Any]]) -> None:
    """The checker accepts histories that are possible."""
    assert sum(judge(*notes).values()) == len(notes)


@pytest.mark.parametrize(
    ("notes", "current"),
    [
        ([note("scan", 1, ROWS[2])], False),  # no prefix of commits
        ([note("scan", 1, ROWS[1] + ROWS[1])], False),  # a row twice
        ([note("scan", 1, ROWS[1] + ROWS[3])], False),  # half an overwrite
        ([note("scan", 1, ROWS[3]), note("scan", 2, ROWS[1])], False),  # back again
        ([note("acknowledged", 1, tag="c", position=10), note("scan", 5, ROWS[1])], True),  # not current
        ([note("acknowledged", 1, tag="lost", position=14)], False),
        ([note("failed", 1, tag="b")], False),
        ([note("own", 5, ROWS[1], position=7)], False),  # its own write unseen
    ],
)
def test_a_wrong_history_is_found(notes: list[dict[str, Any]], current: bool) -> None:
    """The checker rejects histories that are impossible."""
    with pytest.raises(AssertionError):
        judge(*notes, current=current)
