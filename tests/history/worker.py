"""One process of a history: a writer or a reader that notes what it does, when, and what came of it.

Run as `python -m tests.history.worker <JSON>`. Notes are JSON lines; times are of the machine's monotonic clock, which
all processes share. A note of an attempt is on disk before the attempt begins, so that a kill leaves it there.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from pyspark_lookup import LookupTable
from pyspark_lookup.base.clock import HostClock
from pyspark_lookup.base.errors import CommitUnknownError, PysparkLookupError
from pyspark_lookup.engine import runtime as runtime_module
from pyspark_lookup.engine.runtime import Runtime
from pyspark_lookup.io.stores import Store
from pyspark_lookup.managed import WriteSizes
from pyspark_lookup.options.lookup_options import LookupOptions
from tests.history.chaos import ChaoticStore
from tests.history.checker import own_rows

KEYS = 200
VACUUMED_AFTER_S = 5
SCHEMA = pa.schema([("id", pa.int64()), ("tag", pa.string()), ("n", pa.int32())])


class Notes:
    """A process's notes."""

    def __init__(self, path: Path, name: str) -> None:
        self._file = path.open("a", buffering=1)
        self._name = name

    def add(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"who": self._name, "kind": kind, "at": time.monotonic_ns(), **values}) + "\n")


def inject(rng: random.Random, graves: Path) -> None:
    """Have all stores of this process be chaotic."""
    opened: dict[str, Store] = {}
    plain = Runtime._store

    def store(self: Runtime, options: LookupOptions) -> Store:
        inner = plain(self, options)
        return opened.setdefault(inner.scope, ChaoticStore(inner, rng, graves))

    Runtime._store = store  # type: ignore[method-assign]


def write(table: LookupTable, notes: Notes, rng: random.Random, name: str, stop: Path) -> None:
    """Appends, upserts, deletes, transactions, some overwrites, some that are given up, each read back at once; and upkeep."""
    number = 0
    while not stop.exists():
        number += 1
        tag = f"{name}/{os.getpid()}/{number}"
        mode = rng.choices(["append", "upsert", "delete", "overwrite", "transaction", "upkeep"], [8, 6, 3, 1, 4, 2])[0]
        if mode == "upkeep":
            upkeep(table, notes, rng)
            continue
        if mode == "transaction":
            transact(table, notes, rng, tag)
            continue
        count = rng.randrange(1, 40)
        if mode == "overwrite" or number == 1:  # so much that compactions of what follows leave it where it is
            count, tag = rng.randrange(KEYS // 2, KEYS), f"{tag}/{'large' * 40}"
        keys = [rng.randrange(KEYS) for _ in range(count)] if mode == "append" else rng.sample(range(KEYS), count)
        rows = pa.table({"id": keys, "tag": [tag] * count, "n": range(count)}, SCHEMA)
        give_up = rng.random() < 0.1 and mode != "delete"
        notes.add("begin", tag=tag, mode=mode, rows=rows.select(["id", "n"]).to_pylist(), give_up=give_up)
        try:
            if give_up:
                table.write(_broken(rows), mode)
            position = table.write(rows, mode) if mode != "delete" else table.delete(rows.select(["id"]))
        except GivenUpError:
            notes.add("failed", tag=tag, error="given up")
        except CommitUnknownError as problem:
            notes.add("unknown", tag=tag, error=str(problem))
        except PysparkLookupError as problem:
            notes.add("failed", tag=tag, error=f"{type(problem).__name__} {problem}")
        else:
            notes.add("acknowledged", tag=tag, mode=mode, keys=keys, position=position)
            _read_all(table, notes, "own", position=position)


def upkeep(table: LookupTable, notes: Notes, rng: random.Random) -> None:
    """A compaction, or a vacuum of what was not needed for some seconds."""
    try:
        if rng.random() < 0.5:
            table.compact()
        else:
            table.vacuum(f"{VACUUMED_AFTER_S} s", force=True)
    except PysparkLookupError as problem:
        notes.add("error", error=f"{type(problem).__name__} {problem}")
    else:
        notes.add("upkeep")


def transact(table: LookupTable, notes: Notes, rng: random.Random, tag: str) -> None:
    """Several writes as one commit; what it sees of its own is what it wrote."""
    steps = []
    for number in range(rng.randrange(1, 5)):
        mode = rng.choices(["append", "upsert", "delete", "overwrite"], [4, 4, 3, 1])[0]
        steps.append((mode, f"{tag}.{number}", rng.sample(range(KEYS), rng.randrange(1, 20))))
    give_up = rng.random() < 0.15
    notes.add("begin", tag=tag, mode="transaction", steps=steps, give_up=give_up)
    try:
        with table.transaction() as t:
            for number, (mode, own, keys) in enumerate(steps):
                rows = pa.table({"id": keys, "tag": [own] * len(keys), "n": range(len(keys))}, SCHEMA)
                t.delete(rows.select(["id"])) if mode == "delete" else t.write(rows, mode)
                seen = {(id_, of) for id_, of, _ in _plain(t.scan()) if of.startswith(f"{tag}.")}
                assert seen == set(own_rows(steps[: number + 1])), f"{tag} sees {seen} of {steps[: number + 1]}"
            if give_up:
                raise GivenUpError
    except GivenUpError:
        notes.add("failed", tag=tag, error="given up", steps=steps)
    except CommitUnknownError as problem:
        notes.add("unknown", tag=tag, error=str(problem))
    except PysparkLookupError as problem:
        notes.add("failed", tag=tag, error=f"{type(problem).__name__} {problem}", steps=steps)
    else:
        if t.position is not None:
            notes.add("acknowledged", tag=tag, mode="transaction", steps=steps, position=t.position)
            _read_all(table, notes, "own", position=t.position)


class GivenUpError(Exception):
    """A writer changes its mind."""


def _broken(rows: pa.Table) -> pa.RecordBatchReader:
    def batches() -> Any:
        yield from rows.to_batches()
        raise GivenUpError

    return pa.RecordBatchReader.from_batches(SCHEMA, batches())


def read(table: LookupTable, notes: Notes, rng: random.Random, stop: Path) -> None:
    """Scans and lookups, one after the other."""
    while not stop.exists():
        if rng.random() < 0.5:
            _read_all(table, notes, "scan")
        else:
            wanted = sorted(rng.sample(range(KEYS), 20))
            began = time.monotonic_ns()
            try:
                rows = table.get_many(pa.table({"id": pa.array(wanted, pa.int64())}))
            except PysparkLookupError as problem:
                notes.add("error", error=f"{type(problem).__name__} {problem}")
                continue
            notes.add("get", began=began, keys=wanted, rows=_plain(rows))


def _read_all(table: LookupTable, notes: Notes, kind: str, **more: Any) -> None:
    began = time.monotonic_ns()
    try:
        rows = table.scan()
    except PysparkLookupError as problem:
        notes.add("error", error=f"{type(problem).__name__} {problem}")
        return
    notes.add(kind, began=began, rows=_plain(rows), **more)


def _plain(rows: pa.Table) -> list[list[Any]]:
    columns = (rows.column(name).to_pylist() for name in SCHEMA.names)
    return sorted(map(list, zip(*columns, strict=True)))


def main() -> None:
    given = json.loads(sys.argv[1])
    rng = random.Random(f"{given['seed']} {os.getpid()}")
    inject(rng, Path(given["graves"]))
    runtime_module._current = Runtime(HostClock(), rng, WriteSizes(**given["sizes"]))
    notes = Notes(Path(given["notes"]), given["name"])
    table, stop = LookupTable(given["path"], given["options"]), Path(given["stop"])
    if given["role"] == "writer":
        write(table, notes, rng, given["name"], stop)
    else:
        read(table, notes, rng, stop)
    table.close()


if __name__ == "__main__":
    main()
