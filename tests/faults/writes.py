"""Every kind of write, what it does to the rows of a small table, and how its caller sees what became of it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa

from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import PysparkLookupError
from pyspark_lookup.engine.runtime import Runtime
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.table.log import Batch, WriteMode
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
    """The rows of tables, as the checker counts them."""
    columns = [part.select(SCHEMA.names).to_pydict() for part in parts]
    return Rows(row for part in columns for row in zip(part["id"], part["tag"], part["n"], strict=True))


def left_of(before: Rows, gone: Iterable[int]) -> Rows:
    """The rows without those of some keys."""
    keys = set(gone)
    return Rows({row: n for row, n in before.items() if row[0] not in keys})


# --- tables -------------------------------------------------------------------------------------------


def small(table: LookupTable) -> None:
    """Four writes, of which two have hidden rows of others."""
    table.write(rows(range(1, 7), "b1"))
    table.upsert(rows([2, 3, 7], "b2"))
    table.write(rows([8, 9], "b3"))
    table.delete(pa.table({"id": [9]}))


def folded(table: LookupTable) -> None:
    """The same, compacted, with an upsert after it: there is something to vacuum."""
    small(table)
    table.compact()
    table.upsert(rows([4], "b4"))


def nearly_fifty(table: LookupTable) -> None:
    """The same with so many events that the next commit's is the one after which a checkpoint is put."""
    small(table)
    while position_of(table) < 47:
        table.alter(properties={"turn": str(position_of(table))})


def beyond_fifty(table: LookupTable) -> None:
    """The same with a checkpoint."""
    nearly_fifty(table)
    table.write(rows([10], "b5"))


def position_of(table: LookupTable) -> int:
    found: int = table.describe()["position"]
    return found


# --- writes -------------------------------------------------------------------------------------------


def create(caller: Caller) -> int | None:
    return caller.table({"lookup.keys": "id"}).write(rows([1, 2, 3], "new"))


def append(caller: Caller) -> int | None:
    return caller.table().write(rows([1, 20, 21], "new"))


def append_unique(caller: Caller) -> int | None:
    return caller.table({"lookup.write.unique-keys": "true"}).write(rows([20, 21], "new"))


def append_and_fold(caller: Caller) -> int | None:
    return caller.table({"lookup.write.compact-after": "2"}).write(rows([1, 20, 21], "new"))


def overwrite(caller: Caller) -> int | None:
    return caller.table().write(rows([1, 20], "new"), "overwrite")


def upsert(caller: Caller) -> int | None:
    return caller.table().upsert(rows([2, 4, 20], "new"))


def keeping(caller: Caller) -> int | None:
    return caller.table({"lookup.write.missing-columns": "KEEP"}).upsert(rows([2, 4, 20], "new").drop_columns(["n"]))


def delete(caller: Caller) -> int | None:
    return caller.table().delete(pa.table({"id": [2, 8]}))


def transaction(caller: Caller) -> int | None:
    with caller.table().transaction() as t:
        t.write(rows([1, 20], "new.1"))
        t.upsert(rows([2, 20, 21], "new.2"))
        t.delete(pa.table({"id": [21, 8]}))
        assert counted(t.scan()) == left_of(SMALL, [2, 8, 20, 21]) + transaction_rows()
    return t.position


def transaction_rows() -> Rows:
    return Rows([(1, "new.1", 0), (2, "new.2", 0), (20, "new.2", 1)])


def insisting(caller: Caller, *steps: tuple[pa.Table, str]) -> int | None:
    """A transaction whose caller tries again what fails within it."""
    with caller.table().transaction() as t:
        for given, mode in steps:
            call = (
                functools.partial(t.delete, given.select(["id"]))
                if mode == "delete"
                else functools.partial(t.write, given, mode)
            )
            try:
                call()
            except PysparkLookupError:
                call()
    return t.position


def tolerant(caller: Caller) -> int | None:
    steps = (rows([1, 20], "new.1"), "append"), (rows([2, 20, 21], "new.2"), "upsert"), (rows([21, 8], ""), "delete")
    return insisting(caller, *steps)


def creating_transaction(caller: Caller) -> int | None:
    with caller.table({"lookup.keys": "id"}).transaction() as t:
        t.write(rows([1, 2, 3], "new.1"))
        t.upsert(rows([3, 4], "new.2"))
    return t.position


def replacing(caller: Caller) -> int | None:
    """It overwrites what it has written itself."""
    steps = (
        (rows([30, 31], "new.1"), "append"),
        (rows([1, 20], "new.2"), "overwrite"),
        (rows([20, 21], "new.3"), "upsert"),
    )
    return insisting(caller, *steps)


def alter(caller: Caller) -> int | None:
    return caller.table().alter(pa.schema([("more", pa.string())]), properties={"owner": "me"})


def compact(caller: Caller) -> int | None:
    return caller.table().compact()


def vacuum(caller: Caller) -> int | None:
    caller.table().vacuum("0 s", force=True)
    return None


def stream(caller: Caller) -> int | None:
    """A micro-batch as a stream commits it; its retry is the same batch of the same query."""
    options = LookupOptions.parse(dict(caller.options))
    engine = caller.runtime.engine(options)
    writer = engine.writer(options)
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


# --- what they do -------------------------------------------------------------------------------------

Events = list[dict[str, Any]]

SMALL = left_of(counted(rows(range(1, 7), "b1")), [2, 3]) + counted(rows([2, 3, 7], "b2")) + Rows([(8, "b3", 0)])
FOLDED = left_of(SMALL, [4]) + Rows([(4, "b4", 0)])


def events_of(objects: Mapping[str, bytes], below: str) -> list[bytes]:
    """The events of the log, in their order."""
    return [data for name, data in sorted(objects.items()) if name.startswith(f"{below}_lookup/log/")]


def has_event(kind: str, mode: str | None = None) -> Callable[[Events], bool]:
    """Whether there is an event of that kind, which the table did not begin with; of a commit: of a write of that mode."""

    def has(events: Events) -> bool:
        modes = {event["write_id"]: event["mode"] for event in events if event["kind"] == "allocate"}
        return any(event["kind"] == kind and mode in (None, modes.get(event.get("write_id"))) for event in events)

    return has


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of write: to what table, with what rows after it, and what its events have where it changes no row.

    `warm`: its host has read the table before. `repeats`: the caller need not look before it tries again.
    """

    name: str
    write: Callable[[Caller], int | None]
    table: Callable[[LookupTable], None] | None
    before: Rows
    after: Rows
    there: Callable[[Events], bool] | None = None
    warm: bool = False
    repeats: bool = False


_APPENDED = counted(rows([1, 20, 21], "new"))
_TRANSACTED = left_of(SMALL, [2, 8, 20, 21]) + transaction_rows()
_UPSERTED = left_of(SMALL, [2, 4]) + counted(rows([2, 4, 20], "new"))
_KEPT = left_of(SMALL, [2, 4]) + Rows(
    (key, "new", n) for key, n in [*((key, n) for key, _, n in SMALL if key in (2, 4)), (20, None)]
)
KINDS = (
    Kind("create", create, None, Rows(), counted(rows([1, 2, 3], "new"))),
    Kind("append", append, small, SMALL, SMALL + _APPENDED),
    Kind("unique append", append_unique, small, SMALL, SMALL + counted(rows([20, 21], "new")), warm=True),
    Kind("folding append", append_and_fold, small, SMALL, SMALL + _APPENDED, warm=True),
    Kind("fiftieth", append, nearly_fifty, SMALL, SMALL + _APPENDED, warm=True),
    Kind(
        "after a checkpoint",
        append,
        beyond_fifty,
        SMALL + Rows([(10, "b5", 0)]),
        SMALL + Rows([(10, "b5", 0)]) + _APPENDED,
    ),
    Kind("overwrite", overwrite, small, SMALL, counted(rows([1, 20], "new")), warm=True),
    Kind("upsert", upsert, small, SMALL, _UPSERTED),
    Kind("warm upsert", upsert, small, SMALL, _UPSERTED, warm=True),
    Kind("keeping upsert", keeping, small, SMALL, _KEPT, warm=True),
    Kind("delete", delete, small, SMALL, left_of(SMALL, [2, 8])),
    Kind("transaction", transaction, small, SMALL, _TRANSACTED),
    Kind("tolerant", tolerant, small, SMALL, _TRANSACTED, warm=True),
    Kind("replacing", replacing, small, SMALL, Rows([(1, "new.2", 0), (20, "new.3", 0), (21, "new.3", 1)]), warm=True),
    Kind(
        "creating transaction",
        creating_transaction,
        None,
        Rows(),
        Rows([(1, "new.1", 0), (2, "new.1", 1), (3, "new.2", 0), (4, "new.2", 1)]),
    ),
    Kind("alter", alter, small, SMALL, SMALL, has_event("commit", "alter")),
    Kind("compact", compact, small, SMALL, SMALL, has_event("commit", "compact")),
    Kind("vacuum", vacuum, folded, FOLDED, FOLDED, has_event("vacuum"), repeats=True),
    Kind("stream", stream, small, SMALL, SMALL + _APPENDED, warm=True, repeats=True),
)


def parsed(texts: Iterable[bytes]) -> Events:
    return [json.loads(text) for text in texts]


def named(events: Events) -> set[str]:
    """The files of writes that are committed or open, and were not vacuumed."""
    gone = {event["write_id"] for event in events if event["kind"] == "abort"}
    gone |= {id_ for event in events if event["kind"] == "vacuum" for id_ in event["write_ids"]}
    writes = [event for event in events if event["kind"] == "write" and event["write_id"] not in gone]
    return {path for event in writes for path, _, _ in (*event["files"], *event.get("deletes", []))}
