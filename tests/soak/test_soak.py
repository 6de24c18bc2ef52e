"""A soak of five minutes; by day its parts that judge, and the store's proxy. Longer: `scripts/soak`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.history.checker import Rows, State
from tests.soak import tables
from tests.soak.checker import Batch, batches_of, check_batches
from tests.soak.run import soak
from tests.soak.watch import Pulse, growth, quarters
from tests.support.proxy import AT_RANDOM, GRAVES, Proxy, objects_in
from tests.support.s3server import S3Server

SECONDS = 300.0
SEED = 20261121
HANG_S = 450.0  # other tests run beside it


@pytest.mark.nightly
@pytest.mark.spark
@pytest.mark.timeout(1800)
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
    assert sum(directory["counted"].get("blockEvictedCount", 0) for directory in told["directories"].values()) > 0


MANAGED = [
    State(1, Rows()),
    State(4, Rows([(1, "a", 0), (2, "a", 1), (2, "b", 0)]), "append"),
    State(9, Rows([(1, "c", 0), (2, "c", 1)]), "overwrite"),
    State(12, Rows([(1, "c", 0), (2, "c", 1)]), "compact"),
]
"""A table that has two rows of the key 2, and none of others."""
NOTES: list[dict[str, Any]] = [
    {"kind": "published", "number": 1, "parts": 1, "digest": "p1"},
    {"kind": "published", "number": 1, "parts": 2, "digest": "p1m"},
    {"kind": "published", "number": 2, "parts": 1, "digest": "p2"},
    *({"kind": "version", "position": position, "digest": f"m{position}"} for position in (4, 9, 12)),
]
LATE = tables.BASE_KEYS + 1
OLD, NEW = ["a0", "a1", "b0"], ["c0", "c1", "c1"]


def batch(
    number: int, values: list[int], ids: list[int], publish: list[int | None], rows: Sequence[str | None], *told: str
) -> Batch:
    """A micro-batch; `rows`: tags and numbers of the managed table's rows."""
    columns = {"value": values, "id": ids, "publish": pa.array(publish, pa.int64())}
    columns["tag"] = [row and row[0] for row in rows]
    columns["n"] = [row and int(row[1]) for row in rows]
    return Batch(number, pa.table(columns), dict(zip((tables.PUBLISHED, tables.MANAGED), told, strict=False)) or None)


RIGHT = [
    batch(0, [0, 1, 1, 2], [1, 2, 2, LATE], [1, 1, 1, None], [*OLD, None], "p1", "m4"),
    batch(1, [3, 4, 4, 5], [1, 2, 2, LATE], [1, 1, 1, 1], [*OLD, None], "p1m", "m4"),
    batch(2, [6, 7, 8], [1, 2, 2], [1, 1, 1], NEW),
    batch(3, [9, 10, 11, 12], [1, 2, 2, LATE], [2, 2, 2, None], [*NEW, None], "p2", "m12"),
]


def test_a_right_output_passes() -> None:
    """What can be is not complained about, and counted."""
    served = {f"versions of {tables.PUBLISHED}": 4, f"versions of {tables.MANAGED}": 3}  # that of no report, too
    assert check_batches(RIGHT, NOTES, MANAGED) == {"batches": 4, "rows": 13, **served}


def altered(number: int, **columns: list[Any]) -> list[Batch]:
    """The right output, with other columns in one batch."""
    found = list(RIGHT)
    rows = found[number].rows
    for name, values in columns.items():
        rows = rows.set_column(rows.column_names.index(name), name, pa.array(values, rows.schema.field(name).type))
    found[number] = Batch(number, rows, found[number].told)
    return found


@pytest.mark.parametrize(
    "batches",
    [
        altered(1, publish=[1, 1, 2, 1]),  # two publishes
        altered(1, id=[1, 2, LATE, LATE], publish=[1, 1, None, 1]),  # a later key with and without its row
        altered(0, publish=[1, None, None, None]),  # a key without its row
        altered(1, tag=["a", "a", "c", None]),
        altered(1, tag=["a", None, None, None], n=[0, None, None, None]),
        altered(3, tag=["a", "a", "b", None], n=[0, 1, 0, None]),  # another than it was told, and back again
        altered(3, publish=[1, 1, 1, 1]),
        altered(0, publish=[1, 1, 1, 1]),  # more than there was in the version that it was told
        [RIGHT[0], Batch(1, RIGHT[1].rows, {tables.PUBLISHED: "p1m", tables.MANAGED: "unknown"}), *RIGHT[2:]],
        [*RIGHT[:3], Batch(3, pa.concat_tables([RIGHT[3].rows] * 2), RIGHT[3].told)],  # rows twice
        altered(3, value=[9, 10, 11, 13]),  # one not at all
        RIGHT[1:],
    ],
)
def test_a_wrong_output_is_found(batches: list[Batch]) -> None:
    """What cannot be is complained about."""
    with pytest.raises(AssertionError):
        check_batches(batches, NOTES, MANAGED)


def test_batches_of_a_long_run(tmp_path: Path) -> None:
    """Spark keeps its last commits only: what was put out before them counts; what was put out and not committed does not."""
    (tmp_path / "checkpoint" / "commits").mkdir(parents=True)
    for number in (120, 121):
        (tmp_path / "checkpoint" / "commits" / str(number)).touch()
    for number in (0, 1, 119, 121, 122):
        (tmp_path / "out" / f"{number:06}").mkdir(parents=True)
        rows = pa.table({"value": pa.array([] if number == 1 else [number], pa.int64())})
        pq.write_table(rows, tmp_path / "out" / f"{number:06}" / "part.parquet")
    notes = [{"kind": "progress", "batch": 119, "rows": 1, "versions": {"t": "digest"}}]
    found = batches_of(tmp_path, notes)
    assert [(batch.number, batch.told) for batch in found] == [(0, None), (119, {"t": "digest"}), (121, None)]
    assert [batch.rows.column("value").to_pylist() for batch in found] == [[0], [119], [121]]


@pytest.mark.parametrize(
    ("notes", "hangs_at"),
    [
        ("", 61),
        ("written@50", 111),
        ("batch@50 ended@50 started@50", 61),
        ("stopping@50 stopped@55 started@300", 361),
        ("stopping@50", None),
    ],
)
def test_a_pulse(notes: str, hangs_at: int | None) -> None:
    """A stream of which nothing is written for a minute hangs, also one that fails all the time; not one that is stopped."""
    pulse = Pulse(60, 0)
    coming = [(kind, int(at)) for kind, _, at in (note.partition("@") for note in notes.split())]
    for now in range(1000):
        for kind, at in coming:
            if at == now:
                pulse.heard(kind, now)
        if now == hangs_at:
            with pytest.raises(AssertionError, match="written for 61 s"):
                pulse.check(now)
            return
        pulse.check(now)
    assert hangs_at is None


def test_growth() -> None:
    """The last quarter may be a little above the second; more is told, and so is what only the first had before."""
    mib = 1024 * 1024
    flat = [(float(at), 200.0 * mib + at * mib / 10) for at in range(80)]
    assert growth("workers, resident", flat) is None
    assert growth("workers, resident", [(at, value + at * 4 * mib) for at, value in flat]) is not None
    assert growth("workers, handles", [(float(at), 20.0 + at) for at in range(80)]) is not None
    assert growth("workers, handles", [(float(at), 20.0 + at % 3) for at in range(80)]) is None
    assert quarters([(float(at), float(at // 20)) for at in range(80)]) == [0, 1, 2, 3]


@pytest.mark.parametrize("fault", AT_RANDOM)
def test_faults_at_random(s3: S3Server, fault: str) -> None:
    """Each is an error of one attempt; the store has done what was asked or not, as its name says; removed data is kept."""
    once = tables.client(s3.endpoint, attempts=1)
    proxy = Proxy(s3)
    proxy.begin_at_random({fault: 1.0}, 1)
    with pytest.raises((ClientError, BotoCoreError)):
        once.put_object(Bucket=GRAVES, Key=fault, Body=b"x" * 1000)
        once.get_object(Bucket=GRAVES, Key=fault)["Body"].read()
    assert bool(objects_in(GRAVES, fault)) is (fault in ("unanswered", "truncated"))
    assert proxy.counts[fault] >= 1
    proxy.begin_at_random({}, 1)
    s3.client.create_bucket(Bucket=f"removed-{fault}")
    s3.client.put_object(Bucket=f"removed-{fault}", Key=f"{fault}.parquet", Body=b"rows")
    s3.client.delete_object(Bucket=f"removed-{fault}", Key=f"{fault}.parquet")
    buried = f"removed-{fault}/{fault}.parquet"
    assert objects_in(GRAVES, buried) == {buried: b"rows"}
