"""What must be true of a soak's output, judged from the notes of all processes and the states of the managed table.

Every micro-batch answers from one publish of the plain table and one epoch of the managed one: those of the versions
that its progress names. Neither ever goes back. Each row that went in came out once.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from tests.history.checker import State
from tests.soak import tables

Note = Mapping[str, Any]


@dataclasses.dataclass
class Findings:
    """What is wrong, in words, and how much there was of everything."""

    wrong: list[str] = dataclasses.field(default_factory=list)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Batch:
    """A micro-batch that is committed: its rows, and the digest of each table's version that it says it used (None: it was
    stopped between its commit and its report)."""

    number: int
    rows: pa.Table
    told: Mapping[str, str] | None


def batches_of(home: Path, notes: Iterable[Note]) -> list[Batch]:
    """The committed micro-batches of an application, in order."""
    told = {note["batch"]: note["versions"] for note in notes if note["kind"] == "progress" and note["rows"]}
    # Spark keeps the last hundred commits; all before them were committed, too.
    last = max(int(path.name) for path in (home / "checkpoint" / "commits").iterdir() if path.name.isdigit())
    found = []
    for directory in sorted((home / "out").iterdir()):
        rows = ds.dataset(directory, format="parquet").to_table()
        if rows.num_rows and int(directory.name) <= last:
            found.append(Batch(int(directory.name), rows, told.get(int(directory.name))))
    return found


def epochs_by_position(found: Iterable[State], findings: Findings) -> dict[int, str]:
    """The epoch that each commit of the managed table gave to all keys, by its log position; compactions give none."""
    epochs: dict[int, str] = {}
    for state in found:
        if state.mode not in ("", "compact"):
            some = {_epoch(tag) for _, tag, _ in state.rows}
            if len(some) != 1 or sorted(id_ for id_, _, _ in state.rows.elements()) != list(range(tables.KEYS)):
                findings.wrong.append(
                    f"at {state.position} there are {state.rows.total()} rows of the epochs {sorted(some)}"
                )
            epochs[state.position] = max(some, default="")
    return epochs


def _epoch(tag: str) -> str:
    return tag.split(".", maxsplit=1)[0]


def check_batches(
    batches: Sequence[Batch], notes: Sequence[Note], epochs: Mapping[int, str], findings: Findings
) -> None:
    """One version of each table in each micro-batch, the one it says, none older than before."""
    published = _published(notes, findings)
    positions = {note["digest"]: note["position"] for note in notes if note["kind"] == "version"}
    position_of = {epoch: position for position, epoch in epochs.items()}
    last_publish, last_position = (0, 0), 0
    versions: dict[str, set[Any]] = collections.defaultdict(set)
    for batch in batches:
        where = f"batch {batch.number}"
        publish = _publish_in(batch, findings)
        found = {tag and _epoch(tag) for tag in batch.rows.column("tag").unique().to_pylist()}
        (epoch,) = found if len(found) == 1 else (None,)
        if publish is None or epoch not in position_of:
            findings.wrong.append(f"{where}: epochs {list(found)[:5]}, of which none or several were committed")
            continue
        if publish < last_publish or position_of[epoch] < last_position:
            findings.wrong.append(f"{where} went back: {last_publish, last_position} {publish, position_of[epoch]}")
        last_publish, last_position = max(last_publish, publish), max(last_position, position_of[epoch])
        versions["publishes served"].add(publish)
        versions["epochs served"].add(epoch)
        if batch.told is None:
            findings.counts["batches without a report"] = findings.counts.get("batches without a report", 0) + 1
            continue
        told = batch.told[tables.PUBLISHED], batch.told[tables.MANAGED]
        if published.get(told[0]) != publish:
            findings.wrong.append(f"{where} was told publish {published.get(told[0])} ({told[0]}), and has {publish}")
        at = positions.get(told[1])
        of_at = None if at is None else epochs[max(position for position in epochs if position <= at)]
        if of_at != epoch:
            findings.wrong.append(f"{where} was told epoch {of_at} (position {at}, {told[1]}), and has {epoch}")
    findings.counts |= {"batches": len(batches), **{name: len(found) for name, found in versions.items()}}


def _published(notes: Iterable[Note], findings: Findings) -> dict[str, tuple[int, int]]:
    """(number, parts) by digest."""
    found: dict[str, tuple[int, int]] = {}
    for note in notes:
        if note["kind"] == "published":
            state = note["number"], len(note["parts"])
            if found.setdefault(note["digest"], state) != state:
                findings.wrong.append(f"digest {note['digest']} is both {found[note['digest']]} and {state}")
    return found


def _publish_in(batch: Batch, findings: Findings) -> tuple[int, int] | None:
    """(number, parts) that all rows of a batch are of; None if they are not of one."""
    publish = batch.rows.column("publish")
    numbers = publish.drop_null().unique().to_pylist()
    late = pc.greater_equal(batch.rows.column("id"), tables.BASE_KEYS)
    missing = batch.rows.filter(pc.is_null(publish))
    later = batch.rows.filter(late).num_rows
    fits = pc.min(missing.column("id")).as_py() is None or pc.min(missing.column("id")).as_py() >= tables.BASE_KEYS
    if len(numbers) != 1 or not fits or missing.num_rows not in (0, later):
        findings.wrong.append(
            f"batch {batch.number}: publishes {sorted(numbers)[:5]}, {missing.num_rows} of {later} later keys without a row"
        )
        return None
    return numbers[0], 1 if missing.num_rows else 2


def check_rows(batches: Sequence[Batch], findings: Findings) -> None:
    """Each row of the source came out once: its values are 0, 1, 2 …"""
    values = pa.chunked_array([batch.rows.column("value").combine_chunks() for batch in batches], pa.int64())
    count, most = len(values), pc.max(values).as_py()
    different = len(values.unique())
    if different != count:
        findings.wrong.append(f"{count - different} rows came out more than once")
    if most is None or most + 1 != different:
        findings.wrong.append(f"{(most or 0) + 1 - different} of {(most or 0) + 1} rows did not come out")
    findings.counts["rows"] = count
