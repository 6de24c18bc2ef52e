"""Every kind of write, what it does to the rows of a small table, and how its caller sees what became of it."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import PysparkLookupError
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.sources.managed.log import Batch, WriteMode
from pyspark_lookup.sources.registry import parse_options
from tests.history.checker import Rows

SCHEMA = pa.schema([("id", pa.int64()), ("tag", pa.string()), ("n", pa.int64())])
QUERY = "1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed"


@dataclasses.dataclass
class Caller:
    """Who writes: the table on its host, and what it takes to write as a stream does."""

    runtime: Runtime
    options: Mapping[str, str]

    def table(self, more: Mapping[str, str] | None = None) -> LookupTable:
        return LookupTable(None, {**self.options, **(more or {})})


def rows(ids: Iterable[int], tag: str) -> pa.Table:
    ids = list(ids)
    return pa.table({"id": ids, "tag": [tag] * len(ids), "n": range(len(ids))}, SCHEMA)


def counted(*parts: pa.Table) -> Rows:
    columns = [part.select(SCHEMA.names).to_pydict() for part in parts]
    return Rows(row for part in columns for row in zip(part["id"], part["tag"], part["n"], strict=True))


def remove_rows(before: Rows, removed_ids: Iterable[int]) -> Rows:
    keys = set(removed_ids)
    return Rows({row: n for row, n in before.items() if row[0] not in keys})


def small(table: LookupTable) -> None:
    """Four writes, of which two have hidden rows of others."""
    table.write(rows(range(1, 7), "b1"))
    table.upsert(rows([2, 3, 7], "b2"))
    table.write(rows([8, 9], "b3"))
    table.delete(pa.table({"id": [9]}))


def folded(table: LookupTable) -> None:
    small(table)
    table.compact()
    table.upsert(rows([4], "b4"))


def nearly_fifty(table: LookupTable) -> None:
    """The same with so many events that the next commit's is the one after which a checkpoint is put."""
    small(table)
    while (position := table.describe()["position"]) < 47:
        table.alter(properties={"turn": str(position)})


def beyond_fifty(table: LookupTable) -> None:
    nearly_fifty(table)
    table.write(rows([10], "b5"))


Step = tuple[str, pa.Table]
Write = Callable[[Caller], "int | None"]


def apply_steps(before: Rows, steps: Sequence[Step]) -> Rows:
    for mode, step_rows in steps:
        before = Rows() if mode == "overwrite" else before
        before = remove_rows(before, step_rows.column("id").to_pylist()) if mode in ("upsert", "delete") else before
        before = before if mode == "delete" else before + counted(step_rows)
    return before


def wrote(mode: str, *ids: int) -> Step:
    return mode, rows(ids, "new")


def take(table: Any, step: Step) -> int | None:
    mode, step_rows = step
    return table.delete(step_rows.select(["id"])) if mode == "delete" else table.write(step_rows, mode)


def writing(step: Step, options: Mapping[str, str]) -> Write:
    return lambda caller: take(caller.table(options), step)


def transacting(steps: Sequence[Step], before: Rows) -> Write:
    """Several writes in one commit; the transaction sees its own writes."""

    def write(caller: Caller) -> int | None:
        with caller.table({"lookup.keys": "id"}).transaction() as t:
            for step in steps:
                take(t, step)
            assert counted(t.scan()) == apply_steps(before, steps)
        return t.position

    return write


def insisting(steps: Sequence[Step]) -> Write:
    """A transaction whose caller tries again what fails within it."""

    def write(caller: Caller) -> int | None:
        with caller.table().transaction() as t:
            for step in steps:
                try:
                    take(t, step)
                except PysparkLookupError:
                    take(t, step)
        return t.position

    return write


def vacuum(caller: Caller) -> None:
    caller.table().vacuum("0 s", force=True)


def stream(caller: Caller) -> int | None:
    """A micro-batch as a stream commits it; its retry is the same batch of the same query."""
    options = parse_options(dict(caller.options))
    engine = caller.runtime.engine(options)
    writer = engine.managed.writer(options)
    job = writer.begin(SCHEMA, WriteMode.APPEND, caller.runtime.nonce())
    job = dataclasses.replace(job, directory=f"stream-{QUERY}/{7:012d}-{job.directory}")
    files = writer.write(job, rows([1, 20, 21], "new").to_batches(), "part")
    try:
        state = writer.commit(job, files, Batch(QUERY, 7))
    except PysparkLookupError as problem:
        # Spark has a batch aborted whose commit has failed.
        try:
            writer.abort(job, files, batch=Batch(QUERY, 7))
        except PysparkLookupError:
            raise problem from None
        raise
    return None if state is None else state.position


Events = list[dict[str, Any]]
SMALL = remove_rows(counted(rows(range(1, 7), "b1")), [2, 3]) + counted(rows([2, 3, 7], "b2")) + Rows([(8, "b3", 0)])
FOLDED = remove_rows(SMALL, [4]) + Rows([(4, "b4", 0)])


def list_events(objects: Mapping[str, bytes], below: str) -> list[bytes]:
    return [data for name, data in sorted(objects.items()) if name.startswith(f"{below}_lookup/log/")]


def has_event(kind: str, mode: str | None = None) -> Callable[[Events], bool]:
    """Whether there is an event of that kind, which the table did not begin with; of a commit: of a write of that mode."""

    def has(events: Events) -> bool:
        modes = {event["write_id"]: event["mode"] for event in events if event["kind"] == "allocate"}
        return any(event["kind"] == kind and mode in (None, modes.get(event.get("write_id"))) for event in events)

    return has


@dataclasses.dataclass(frozen=True)
class Kind:
    """A write, its table, the rows after it or what its events have. `warm`: its host knows the table. `repeats`: it needs no look first."""

    name: str
    write: Write
    table: Callable[[LookupTable], None] | None
    before: Rows
    after: Rows
    there: Callable[[Events], bool] | None = None
    warm: bool = False
    repeats: bool = False


def alone(
    name: str,
    step: Step,
    table: Callable[[LookupTable], None] | None = small,
    options: Mapping[str, str] | None = None,
    warm: bool = False,
) -> Kind:
    before = {None: Rows(), beyond_fifty: SMALL + Rows([(10, "b5", 0)])}.get(table, SMALL)
    return Kind(name, writing(step, options or {}), table, before, apply_steps(before, [step]), warm=warm)


_STEPS = wrote("append", 1, 20), ("upsert", rows([2, 20, 21], "new.2")), wrote("delete", 21, 8)
_REPLACING = wrote("append", 30, 31), ("overwrite", rows([1, 20], "new.2")), ("upsert", rows([20, 21], "new.3"))
_CREATING = wrote("append", 1, 2, 3), ("upsert", rows([3, 4], "new.2"))
_APPEND, _UPSERT = wrote("append", 1, 20, 21), wrote("upsert", 2, 4, 20)
_KEEPING = "upsert", _UPSERT[1].drop_columns(["n"])
_UPDATED = remove_rows(SMALL, [2, 4]) + Rows(
    [(20, "new", None), *((key, "new", n) for key, _, n in SMALL if key in (2, 4))]
)
_REMAINING, _CHANGE = remove_rows(SMALL, [1, 2, 3]), (pa.schema([("more", pa.string())]), None, {"owner": "me"})
KINDS = (
    alone("create", wrote("append", 1, 2, 3), None, {"lookup.keys": "id"}),
    alone("append", _APPEND),
    alone("unique append", wrote("append", 20, 21), options={"lookup.write.unique-keys": "true"}, warm=True),
    alone("folding append", _APPEND, options={"lookup.write.compact-after": "2"}, warm=True),
    alone("fiftieth", _APPEND, nearly_fifty, warm=True),
    alone("after a checkpoint", _APPEND, beyond_fifty),
    alone("overwrite", wrote("overwrite", 1, 20), warm=True),
    alone("upsert", _UPSERT),
    alone("warm upsert", _UPSERT, warm=True),
    Kind(
        "keeping upsert", writing(_KEEPING, {"lookup.write.missing-columns": "KEEP"}), small, SMALL, _UPDATED, warm=True
    ),
    alone("delete", wrote("delete", 2, 8)),
    Kind("transaction", transacting(_STEPS, SMALL), small, SMALL, apply_steps(SMALL, _STEPS)),
    Kind("tolerant", insisting(_STEPS), small, SMALL, apply_steps(SMALL, _STEPS), warm=True),
    Kind("replacing", insisting(_REPLACING), small, SMALL, apply_steps(SMALL, _REPLACING), warm=True),
    Kind("creating transaction", transacting(_CREATING, Rows()), None, Rows(), apply_steps(Rows(), _CREATING)),
    Kind("delete by predicate", lambda caller: caller.table().delete(where="id < 4"), small, SMALL, _REMAINING),
    Kind("alter", lambda caller: caller.table().alter(*_CHANGE), small, SMALL, SMALL, has_event("commit", "alter")),
    Kind("compact", lambda caller: caller.table().compact(), small, SMALL, SMALL, has_event("commit", "compact")),
    Kind("vacuum", vacuum, folded, FOLDED, FOLDED, has_event("vacuum"), repeats=True),
    Kind("stream", stream, small, SMALL, apply_steps(SMALL, [_APPEND]), warm=True, repeats=True),
)


def parsed(texts: Iterable[bytes]) -> Events:
    return [json.loads(text) for text in texts]


def named(events: Events) -> set[str]:
    """The files of writes that are committed or open, and were not vacuumed."""
    aborted_ids = {event["write_id"] for event in events if event["kind"] == "abort"}
    aborted_ids |= {id_ for event in events if event["kind"] == "vacuum" for id_ in event["write_ids"]}
    writes = [event for event in events if event["kind"] == "write" and event["write_id"] not in aborted_ids]
    return {path for event in writes for path, _, _ in (*event["files"], *event.get("deletes", []))}
