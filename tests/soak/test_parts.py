"""The parts of a soak that judge, and the store's proxy: what is wrong is found, what is right passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.history.checker import Rows, State
from tests.proxy import AT_RANDOM, GRAVES, Proxy, objects_in
from tests.s3server import S3Server
from tests.soak import tables
from tests.soak.checker import Batch, Findings, batches_of, check_batches, check_rows, epochs_by_position
from tests.soak.watch import Pulse, growth, quarters

# --- the checker ----------------------------------------------------------------------------------------

EPOCHS = {4: "70", 9: "80"}
"""At 12 there is a compaction."""
NOTES = [
    {"kind": "published", "number": 1, "parts": ["base"], "digest": "p1"},
    {"kind": "published", "number": 1, "parts": ["base", "more"], "digest": "p1m"},
    {"kind": "published", "number": 2, "parts": ["base"], "digest": "p2"},
    {"kind": "version", "position": 4, "digest": "m4"},
    {"kind": "version", "position": 9, "digest": "m9"},
    {"kind": "version", "position": 12, "digest": "m12"},
]
LATE = tables.BASE_KEYS + 1


def batch(number: int, publish: int, parts: int, epoch: str, told: tuple[str, str] | None) -> Batch:
    """A micro-batch of four rows, two of them with later keys."""
    late = publish if parts == 2 else None
    rows = {
        "value": [4 * number + n for n in range(4)],
        "id": [1, LATE, 2, LATE + 1],
        "publish": [publish, late, publish, late],
        "tag": [epoch, f"{epoch}.1", f"{epoch}.2", epoch],
    }
    versions = None if told is None else {tables.PUBLISHED: told[0], tables.MANAGED: told[1]}
    return Batch(number, pa.table(rows), versions)


RIGHT = [
    batch(0, 1, 1, "70", ("p1", "m4")),
    batch(1, 1, 2, "70", ("p1m", "m4")),
    batch(2, 1, 2, "80", None),
    batch(3, 2, 1, "80", ("p2", "m12")),
]


def judged(batches: list[Batch]) -> list[str]:
    findings = Findings()
    check_batches(batches, NOTES, EPOCHS, findings)
    check_rows(batches, findings)
    return findings.wrong


def test_a_right_output_passes() -> None:
    """What can be is not complained about, and counted."""
    findings = Findings()
    check_batches(RIGHT, NOTES, EPOCHS, findings)
    check_rows(RIGHT, findings)
    assert findings.wrong == []
    counted = {"batches": 4, "rows": 16, "publishes served": 3, "epochs served": 2, "batches without a report": 1}
    assert findings.counts == counted


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
        altered(1, publish=[1, None, 1, 1]),  # half of what came later
        altered(0, publish=[1, None, None, None]),  # a key without its row
        altered(1, tag=["70", "70.1", "70", "80"]),
        altered(1, tag=["70", "70", "70", None]),
        altered(1, tag=["75"] * 4),  # never committed
        altered(3, tag=["70"] * 4),  # another than the one that it was told, and back again
        altered(3, publish=[1, 1, 1, 1]),
        altered(0, publish=[1, 1, 1, 1]),  # more than there was in the version that it was told
        [*RIGHT[:2], batch(2, 1, 1, "80", None), RIGHT[3]],  # back again
        [RIGHT[0], batch(1, 1, 2, "70", ("p1m", "unknown")), *RIGHT[2:]],
        altered(1, value=[4, 5, 6, 6]),  # a row twice, another not at all
        altered(3, value=[12, 13, 14, 16]),
        RIGHT[1:],
    ],
)
def test_a_wrong_output_is_found(batches: list[Batch]) -> None:
    """What cannot be is complained about."""
    assert judged(batches) != []


def test_epochs_of_a_log() -> None:
    """A commit gives all keys its epoch, a compaction none; two epochs, a key twice or one that is missing are wrong."""
    whole = Rows((id_, "70.1" if id_ % 2 else "70.2", 0) for id_ in range(tables.KEYS))
    right = [State(1, Rows()), State(4, whole, "upsert"), State(7, whole, "compact")]
    findings = Findings()
    assert epochs_by_position(right, findings) == {4: "70"}
    assert findings.wrong == []
    row, again, another = Rows([(0, "70.2", 0)]), Rows([(0, "70.3", 0)]), Rows([(0, "71", 0)])
    for number, rows in enumerate([whole - row, whole + row, whole + again, whole - row + another], 1):
        epochs_by_position([State(9, rows, "overwrite")], findings)
        assert len(findings.wrong) == number


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


# --- what grows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("notes", "hangs_at"),
    [
        ("", 61),
        ("written@50", 111),
        ("batch@50", 61),
        ("ended@50 started@50", 111),
        ("ended@50 started@50 ended@100 started@100 ended@150 started@150", 181),
        ("ended@50 started@50 ended@100 started@100 written@140 ended@190", 251),
        ("stopping@50 stopped@55 started@300", 361),
        ("stopping@50", None),
    ],
)
def test_a_pulse(notes: str, hangs_at: int | None) -> None:
    """A stream that is neither written nor ends hangs after a minute, one that fails all the time after three; not while it is stopped."""
    pulse = Pulse(60, 0)
    coming = [(kind, int(at)) for kind, _, at in (note.partition("@") for note in notes.split())]
    for now in range(1000):
        for kind, at in coming:
            if at == now:
                pulse.heard(kind, now)
        if now == hangs_at:
            with pytest.raises(AssertionError, match=r"the stream for 61 s|written for 181 s"):
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


# --- the proxy ------------------------------------------------------------------------------------------


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
    assert objects_in(GRAVES, f"{fault}.parquet") == {f"{fault}.parquet": b"rows"}
