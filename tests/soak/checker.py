"""What is true of a soak's micro-batches: each reads one version of each table, which never goes back, and each row came out once, or waits."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from tests.history.checker import Rows, State, check
from tests.soak import tables

Note = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Batch:
    """A committed micro-batch: its rows, and the digests of the versions it says it used (None: it was stopped before it said so)."""

    number: int
    rows: pa.Table
    told: Mapping[str, str] | None


def collect_batches(home: Path, notes: Iterable[Note], stream: str = "joined") -> list[Batch]:
    kind = "progress" if stream == "joined" else f"{stream} progress"
    versions = {note["batch"]: note["versions"] for note in notes if note["kind"] == kind and note["rows"]}
    # Spark keeps the last hundred commits; all before them were committed, too.
    commits = home / tables.CHECKPOINTS[stream] / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
    batches = []
    for directory in sorted((home / tables.OUTPUTS[stream]).iterdir()):
        rows = ds.dataset(directory, format="parquet").to_table()
        if rows.num_rows and int(directory.name) <= last:
            batches.append(Batch(int(directory.name), rows, versions.get(int(directory.name))))
    return batches


def check_batches(batches: Sequence[Batch], notes: Sequence[Note], managed: list[State]) -> dict[str, int]:
    """Check all batches; returns how much of everything there was. AssertionError for an output that cannot be. `managed`: the states of that table."""
    published: dict[str, State] = {}
    for note in notes:
        if note["kind"] == "published":
            number, ids = note["number"], range(tables.BASE_KEYS if note["parts"] == 1 else tables.KEYS)
            state = State(2 * number + note["parts"], Rows((id_, "", number) for id_ in ids))
            assert published.setdefault(note["digest"], state) == state, f"{note['digest']} is two publishes"
    versions = {note["digest"]: note["position"] for note in notes if note["kind"] == "version"}
    publishes = {digest: state.position for digest, state in published.items()}
    served = {}
    for table, column, positions, states in (
        (tables.PUBLISHED, "publish", publishes, sorted(published.values(), key=lambda state: state.position)),
        (tables.MANAGED, "n", versions, managed),
    ):
        reads = [_read(batch, table, column, positions) for batch in batches]
        check(reads, states, {}, lambda worker: False, lambda worker: False)
        served[f"versions of {table}"] = len({read.get("told") for read in reads})
    return {"batches": len(batches), "rows": _check_rows(batches), **served}


def _read(batch: Batch, table: str, column: str, positions: Mapping[str, int]) -> dict[str, Any]:
    """What a micro-batch saw of a table, as a lookup that the checker of histories can judge."""
    tag = batch.rows.column("tag") if column == "n" else pa.repeat("", batch.rows.num_rows)
    columns = (batch.rows.column("id"), tag, batch.rows.column(column))
    values_read = set(zip(*(values.to_pylist() for values in columns), strict=True))
    present_ids = {id_ for id_, _, number in values_read if number is not None}
    # A key may have no row, but not in one place only.
    rows = [row for row in values_read if row[2] is not None or row[0] in present_ids]
    read = {"kind": "get", "who": table, "at": batch.number, "rows": rows, "keys": {id_ for id_, _, _ in values_read}}
    return read if batch.told is None else {**read, "told": positions.get(batch.told[table], -1)}


def _check_rows(batches: Sequence[Batch]) -> int:
    """How many rows of the source, 0, 1, 2 …, came out: each once beside each row of its key."""
    rows = pa.concat_tables(batch.rows.select(["value", "tag", "n"]) for batch in batches)
    values = rows.column("value")
    count, most = len(values.unique()), pc.max(values).as_py() + 1
    assert count == most, f"{most - count} of {most} rows did not come out"
    repeated = rows.num_rows - rows.group_by(["value", "tag", "n"]).aggregate([]).num_rows
    assert not repeated, f"{repeated} rows came out more than once"
    return count


def check_late(batches: Sequence[Batch]) -> dict[str, int]:
    """How much there was of events that wait for their row; AssertionError if one came out twice or never, or if a micro-batch has two versions.

    In the last micro-batch all events of earlier ones came out.
    """
    for batch in batches:
        publishes = pc.unique(pc.drop_null(batch.rows.column("publish")))
        assert len(publishes) <= 1, f"micro-batch {batch.number} has the publishes {publishes.to_pylist()}"
    rows = pa.concat_tables(batch.rows for batch in batches)
    values = rows.column("value")
    repeated = rows.num_rows - len(values.unique())
    assert not repeated, f"{repeated} events came out more than once"
    most = max(pc.max(batch.rows.column("value")).as_py() for batch in batches[:-1])
    lost_count = most + 1 - pc.sum(pc.less_equal(values, most)).as_py()
    assert not lost_count, f"{lost_count} of {most + 1} events did not come out"
    is_late = pc.and_(pc.greater(rows.column("waited"), 0), pc.is_valid(rows.column("publish")))
    return {"rows": rows.num_rows, "late": pc.sum(is_late).as_py()}
