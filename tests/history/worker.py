"""A writer or a reader of a history (`python -m tests.history.worker <JSON>`), which notes what it does before it begins, and what came of it."""

import contextlib
import functools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from pyspark_lookup import LookupTable
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.errors import CommitUnknownError, PysparkLookupError, VersionGoneError
from pyspark_lookup.lookup import runtime as runtime_module
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.sources.managed import WriteSizes
from pyspark_lookup.sources.managed.change_feed import CHANGE_TYPE
from pyspark_lookup.sources.managed.log import state as properties
from pyspark_lookup.sources.registry import parse_options
from tests.history.checker import Rows, own_rows
from tests.support.change_feed import Feed
from tests.support.workers import Notes, fail_at_random

KEYS = 200
SLOW_S = 0.02
SCHEMA = pa.schema([("id", pa.int64()), ("tag", pa.string()), ("n", pa.int32())])


def write(table: LookupTable, notes: Notes, rng: random.Random, arguments: Mapping[str, Any]) -> None:
    """Appends, upserts, deletes, transactions, some overwrites, some that are given up, each read back at once; and upkeep."""
    number = 0
    with contextlib.suppress(PysparkLookupError):
        table.alter(properties=arguments["properties"])
    while not Path(arguments["stop"]).exists():
        number += 1
        tag = f"{arguments['name']}/{os.getpid()}/{number}"
        mode = rng.choices(["append", "upsert", "delete", "overwrite", "transaction", "upkeep"], [8, 6, 3, 1, 4, 2])[0]
        if mode == "upkeep":
            upkeep(table, notes, rng, arguments["vacuumed_after"])
        elif mode == "transaction":
            transact(table, notes, rng, tag)
        else:
            write_once(table, notes, rng, tag, mode, large=mode == "overwrite" or number == 1)
        time.sleep(rng.random() * arguments["pause_s"])


def write_once(table: LookupTable, notes: Notes, rng: random.Random, tag: str, mode: str, large: bool) -> None:
    """Make one write; a `large` one is so large that compactions of later writes leave it where it is."""
    count = rng.randrange(1, 40)
    if large:
        count, tag = rng.randrange(KEYS // 2, KEYS), f"{tag}/{'large' * 40}"
    keys = [rng.randrange(KEYS) for _ in range(count)] if mode == "append" else rng.sample(range(KEYS), count)
    rows = pa.table({"id": keys, "tag": [tag] * count, "n": range(count)}, SCHEMA)
    give_up = rng.random() < 0.1 and mode != "delete"
    notes.add("begin", tag=tag, mode=mode, keys=keys, give_up=give_up)

    def run_write() -> int | None:
        if mode == "delete":
            return table.delete(rows.select(["id"]))
        return table.write(_broken(rows) if give_up else rows, mode)

    _note_end(table, notes, run_write, tag=tag, mode=mode, keys=keys)


def upkeep(table: LookupTable, notes: Notes, rng: random.Random, after: str) -> None:
    try:
        if rng.random() < 0.5:
            table.compact()
        else:
            table.vacuum(after, force=True)
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

    def run_transaction() -> int | None:
        with table.transaction() as t:
            for number, (mode, step_tag, keys) in enumerate(steps):
                rows = pa.table({"id": keys, "tag": [step_tag] * len(keys), "n": range(len(keys))}, SCHEMA)
                t.delete(rows.select(["id"])) if mode == "delete" else t.write(rows, mode)
                rows_read = {(id_, row_tag) for id_, row_tag, _ in _plain(t.scan()) if row_tag.startswith(f"{tag}.")}
                assert rows_read == set(own_rows(steps[: number + 1])), (
                    f"{tag} sees {rows_read} of {steps[: number + 1]}"
                )
            if give_up:
                raise GivenUpError
        return t.position

    _note_end(table, notes, run_transaction, tag=tag, mode="transaction", steps=steps)


def _note_end(table: LookupTable, notes: Notes, run_write: Callable[[], int | None], **fields: Any) -> None:
    """Note how a write ends, and read it back where it is acknowledged and committed something."""
    try:
        position = run_write()
    except GivenUpError:
        notes.add("failed", error="given up", **fields)
    except CommitUnknownError as problem:
        notes.add("unknown", error=str(problem), **fields)
    except PysparkLookupError as problem:
        notes.add("failed", error=f"{type(problem).__name__} {problem}", **fields)
    else:
        if position is not None:
            notes.add("acknowledged", position=position, **fields)
            _read(notes, "own", table.scan, position=position)


class GivenUpError(Exception):
    """A writer changes its mind."""


def _broken(rows: pa.Table) -> pa.RecordBatchReader:
    def batches() -> Any:
        yield from rows.to_batches()
        raise GivenUpError

    return pa.RecordBatchReader.from_batches(SCHEMA, batches())


def read(table: LookupTable, notes: Notes, rng: random.Random, stop: Path) -> None:
    while not stop.exists():
        if rng.random() < 0.5:
            _read(notes, "scan", table.scan)
        else:
            requested_keys = sorted(rng.sample(range(KEYS), 20))
            keys = pa.table({"id": pa.array(requested_keys, pa.int64())})
            _read(notes, "get", functools.partial(table.get_many, keys), keys=requested_keys)


def follow(notes: Notes, options: Mapping[str, str], stop: Path) -> None:
    """The change stream, played: all rows once, then what has changed since; all rows again where that is gone."""
    rows, position = Rows(), 0
    parsed = parse_options(options)
    while not stop.exists():
        start_s = time.monotonic()
        try:
            feed = Feed(runtime_module.runtime().engine(parsed), parsed)
            kind = "follow" if position else "scan"
            changes = feed.between(position, feed.last) if position else feed.snapshot(feed.last)
        except VersionGoneError as problem:
            rows.clear()
            position = 0
            notes.add("gone", error=str(problem))
        except PysparkLookupError as problem:
            notes.add("error", error=f"{type(problem).__name__} {problem}")
        else:
            position = feed.last
            for row in changes:
                rows[row["id"], row["tag"], row["n"]] += 1 if row[CHANGE_TYPE] in ("insert", "update_postimage") else -1
            rows = +rows
            notes.add(kind, began=start_s, rows=sorted(map(list, rows.elements())), told=position)


def _read(notes: Notes, kind: str, call: Callable[[], pa.Table], **more: Any) -> None:
    start_s = time.monotonic()
    try:
        rows = call()
    except PysparkLookupError as problem:
        notes.add("error", error=f"{type(problem).__name__} {problem}")
        return
    notes.add(kind, began=start_s, rows=_plain(rows), **more)


def _plain(rows: pa.Table) -> list[list[Any]]:
    columns = (rows.column(name).to_pylist() for name in SCHEMA.names)
    return sorted(map(list, zip(*columns, strict=True)))


def main() -> None:
    arguments = json.loads(sys.argv[1])
    rng = random.Random(f"{arguments['seed']} {os.getpid()}")
    if arguments["failing"]:
        fail_at_random(rng, arguments["failing"], SLOW_S, Path(arguments["graves"]))
    properties.KEPT_S = arguments["kept_s"] or properties.KEPT_S
    runtime_module._current = Runtime(HostClock(), rng, WriteSizes(**arguments["sizes"]))
    notes = Notes(Path(arguments["notes"]), arguments["name"])
    table = LookupTable(arguments["path"], arguments["options"])
    if arguments["role"] == "writer":
        write(table, notes, rng, arguments)
    elif arguments["role"] == "follower":
        follow(notes, {"path": arguments["path"], **arguments["options"]}, Path(arguments["stop"]))
    else:
        read(table, notes, rng, Path(arguments["stop"]))
    table.close()


if __name__ == "__main__":
    main()
