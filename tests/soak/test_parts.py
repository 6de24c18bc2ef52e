"""The parts of a soak that judge, and the store's proxy: what is wrong is found, what is right passes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.s3server import S3Server
from tests.soak import chaos, proxy, tables
from tests.soak.checker import Batch, Findings, batches_of, check_batches, check_commits, check_rows, epochs_by_position
from tests.soak.watch import Pulse, growth, quarters

# --- the harm -------------------------------------------------------------------------------------------


class Idle:
    """A cluster without processes, and a disk and clocks that note what is done to them."""

    how = "noted"
    directory = Path()
    missing = ""

    def __init__(self) -> None:
        self.workers = [SimpleNamespace(pid=-1)] * 2
        self.noted: list[str] = []

    def executor(self, number: int) -> int:
        raise LookupError

    def fill(self) -> None:
        self.noted.append("filled")

    def free(self) -> None:
        self.noted.append("freed")

    def close(self) -> None:
        pass

    def step(self, number: int, seconds: int) -> None:
        self.noted.append("stepped" if seconds else "right again")


def test_harm_waits_for_calm_and_all_of_it_is_done() -> None:
    """One at a time, a few micro-batches apart; all kinds in turn but those that there is nobody to do to; taken back in the end."""
    idle: Any = Idle()
    harm = chaos.Chaos(
        random.Random(1),
        idle,
        idle,
        idle,
        idle.noted.append,
        lambda rages: idle.noted.append("storm" if rages else "calm"),
        lambda: idle.noted.append("writer"),
    )
    assert len(harm.left) == 7
    harm.tick(0.0, chaos.CALM_BATCHES - 1)
    assert not harm.counts
    for number in range(8):
        before = harm.counts.total()
        for now in (100.0 * number, 100.0 * number + 99):
            harm.tick(now, chaos.CALM_BATCHES * (number + 1))
        assert harm.counts.total() <= before + 1
    assert harm.left == {"kill_executor", "kill_worker"}
    done = ["calm", "filled", "freed", "restart", "right again", "stepped", "storm", "writer"]
    assert sorted(idle.noted) == done
    harm.fill_disk()
    harm.end()
    assert idle.noted[-2:] == ["filled", "freed"]


# --- the checker ----------------------------------------------------------------------------------------

EPOCHS = {4: 70, 9: 80}
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


def batch(number: int, publish: int, parts: int, epoch: int, told: tuple[str, str] | None) -> Batch:
    """A micro-batch of four rows, two of them with later keys."""
    late = publish if parts == 2 else None
    rows = {
        "value": [4 * number + n for n in range(4)],
        "id": [1, LATE, 2, LATE + 1],
        "publish": [publish, late, publish, late],
        "epoch": [epoch] * 4,
    }
    versions = None if told is None else {tables.PUBLISHED: told[0], tables.MANAGED: told[1]}
    return Batch(number, pa.table(rows), versions)


RIGHT = [
    batch(0, 1, 1, 70, ("p1", "m4")),
    batch(1, 1, 2, 70, ("p1m", "m4")),
    batch(2, 1, 2, 80, None),
    batch(3, 2, 1, 80, ("p2", "m12")),
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
        rows = rows.set_column(rows.column_names.index(name), name, pa.array(values, pa.int64()))
    found[number] = Batch(number, rows, found[number].told)
    return found


@pytest.mark.parametrize(
    "batches",
    [
        altered(1, publish=[1, 1, 2, 1]),  # two publishes
        altered(1, publish=[1, None, 1, 1]),  # half of what came later
        altered(0, publish=[1, None, None, None]),  # a key without its row
        altered(1, epoch=[70, 70, 70, 80]),
        altered(1, epoch=[70, 70, 70, None]),
        altered(1, epoch=[75] * 4),  # never committed
        altered(3, epoch=[70] * 4),  # another than the one that it was told, and back again
        altered(3, publish=[1, 1, 1, 1]),
        altered(0, publish=[1, 1, 1, 1]),  # more than there was in the version that it was told
        [*RIGHT[:2], batch(2, 1, 1, 80, None), RIGHT[3]],  # back again
        [RIGHT[0], batch(1, 1, 2, 70, ("p1m", "unknown")), *RIGHT[2:]],
        altered(1, value=[4, 5, 6, 6]),  # a row twice, another not at all
        altered(3, value=[12, 13, 14, 16]),
        RIGHT[1:],
    ],
)
def test_a_wrong_output_is_found(batches: list[Batch]) -> None:
    """What cannot be is complained about."""
    assert judged(batches) != []


def event(position: int, kind: str, **body: Any) -> bytes:
    return json.dumps({"position": position, "kind": kind, **body}).encode()


LOG = [
    event(1, "create"),
    event(2, "allocate", write_id=1, mode="upsert"),
    event(3, "write", write_id=1, files=[["a", 1, 1], ["b", 1, 1]]),
    event(4, "commit", write_id=1),
    event(5, "allocate", write_id=2, mode="compact"),
    event(6, "write", write_id=2, files=[["c", 1, 1]]),
    event(7, "commit", write_id=2),
    event(8, "allocate", write_id=3, mode="overwrite"),
    event(9, "write", write_id=3, files=[["gone", 1, 1]]),
    event(10, "abort", write_id=3),
]
FILES = [{"kind": "file", "path": path, "epochs": [70]} for path in "abc"]


def test_epochs_of_a_log() -> None:
    """A commit has its files' epoch; a compaction and what was aborted give none; two epochs in one commit are an error."""
    assert epochs_by_position(LOG, FILES) == {4: 70}
    with pytest.raises(AssertionError, match="70, 71"):
        epochs_by_position(LOG, [*FILES, {"kind": "file", "path": "b", "epochs": [71]}])


@pytest.mark.parametrize(
    ("note", "wrong"),
    [
        ({"kind": "committed", "epoch": 70, "position": 4}, False),
        ({"kind": "committed", "epoch": 70, "position": 5}, True),
        ({"kind": "committed", "epoch": 71, "position": 4}, True),
        ({"kind": "failed", "epoch": 71, "error": ""}, False),
        ({"kind": "failed", "epoch": 70, "error": ""}, True),
        ({"kind": "unknown", "epoch": 70}, False),
        ({"kind": "failed", "how": "compact", "error": ""}, False),
    ],
)
def test_what_writers_were_told(note: dict[str, Any], wrong: bool) -> None:
    """An acknowledged commit is in the log, a failed one is not."""
    findings = Findings()
    check_commits([note], {4: 70}, findings)
    assert bool(findings.wrong) is wrong


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


@pytest.fixture
def endpoint(s3: S3Server) -> Iterator[str]:
    """A proxy before the S3 server that does nothing yet."""
    given = {"store": s3.endpoint, "seed": 1, "faults": dict.fromkeys(proxy.FAULTS, 0.0)}
    command = [sys.executable, "-m", "tests.soak.proxy", json.dumps(given)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("fault", ["refused", "lost", "unanswered", "truncated"])
def test_faults(s3: S3Server, endpoint: str, fault: str) -> None:
    """Each fault is an error of one attempt; whether the store has done what was asked is as its name says."""
    once = tables.client(endpoint, attempts=1)
    s3.client.create_bucket(Bucket="proxied")
    proxy.set_faults(endpoint, {fault: 1.0})
    s3.log.clear()
    with pytest.raises((ClientError, BotoCoreError)):
        once.put_object(Bucket="proxied", Key=fault, Body=b"x" * 1000)
        once.get_object(Bucket="proxied", Key=fault)["Body"].read()
    assert bool(s3.log) is (fault in ("unanswered", "truncated"))
    proxy.set_faults(endpoint, {fault: 0.0})
    once.put_object(Bucket="proxied", Key=fault, Body=b"x" * 1000)
    assert once.get_object(Bucket="proxied", Key=fault)["Body"].read() == b"x" * 1000
    assert proxy.counts(endpoint)[fault] >= 1
