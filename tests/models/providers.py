"""A table of another system in a history: rows in a file that a provider reads for each lookup. `Changing` also tells which keys have changed.

The file has a version, the rows, and for each version the keys that it has changed.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from pyspark_lookup import (
    FullCachingLookupProvider,
    LookupContext,
    LookupFunction,
    LookupFunctionProvider,
    LookupProvider,
)
from tests.models.adapter import DrawnRows, Ground
from tests.models.answers import Content, Row, known_content
from tests.models.histories import Step


class Provided(DrawnRows):
    """Rows in a file, and their version."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._rows: list[Row] = []
        self._changes: list[tuple[int, list[tuple[Any, ...]]]] = []
        self.options = {
            "lookup.provider": f"{__name__}:provider",
            "lookup.provider.columns": json.dumps([(field.name, str(field.type)) for field in self.schema]),
        }

    def content(self) -> Content:
        return known_content(self.schema, self._rows)

    def take(self, step: Step, rng: random.Random) -> None:
        if step.op not in ("append", "upsert", "delete", "overwrite"):
            return
        op = step.op
        new = self.drawn_rows(op, step.args[1], rng)
        replaced_keys = {self.key_of(row) for row in new} if op in ("upsert", "delete") else set()
        rows = [] if op == "overwrite" else [row for row in self._rows if self.key_of(row) not in replaced_keys]
        before, self._rows = self._rows, rows if op == "delete" else rows + new
        path, version = self.ground.path, self.ground.new_serial()
        touched = before + new if op == "overwrite" else new
        self._changes.append((version, sorted({self.key_of(row) for row in touched}, key=repr)))
        next_file = path.with_suffix(".next")
        next_file.write_text(json.dumps([version, self._rows, self._changes]))
        next_file.replace(path)

    def cache_options(self, cache: str) -> dict[str, str]:
        return {"lookup.provider.scans": "True"} if cache == "FULL" else {}

    def scans(self, cache: str) -> bool:
        return cache == "FULL"


class Changing(Provided):
    """A table like `Provided`, whose provider tells which keys have changed, and has a scan beside its lookups in each mode."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self.options["lookup.provider.changes"] = "true"

    def cache_options(self, cache: str) -> dict[str, str]:
        return {}

    def scans(self, cache: str) -> bool:
        return True


class _Rows(LookupFunction):
    def __init__(self, path: Path, schema: pa.Schema, keys: tuple[str, ...]) -> None:
        self._path, self._schema, self._keys = path, schema, keys

    def lookup(self, keys: pa.Table) -> pa.Table:
        requested_keys = {tuple(key[name] for name in self._keys) for key in keys.to_pylist()}
        rows = [row for row in _read(self._path)[1] if tuple(row[name] for name in self._keys) in requested_keys]
        return pa.Table.from_pylist(rows, self._schema)


def _read(path: Path) -> tuple[int, list[Row], list[tuple[int, list[Any]]]]:
    version, rows, changes = json.loads(path.read_text())
    return version, rows, changes


def provider(context: LookupContext) -> LookupProvider:
    """The factory that `lookup.provider` names."""
    path = Path(context.path.removeprefix("file://"))
    types = {"int64": pa.int64(), "string": pa.string()}
    schema = pa.schema([(name, types[kind]) for name, kind in json.loads(context.options["columns"])])

    def version() -> str:
        return str(_read(path)[0])

    def scan() -> Iterator[pa.RecordBatch]:
        return iter(pa.Table.from_pylist(_read(path)[1], schema).to_batches())

    def changes(since: str) -> pa.Table | None:
        steps = _read(path)[2]
        if int(since) not in [number for number, _ in steps]:
            return None
        changed_keys = [
            dict(zip(context.keys, key, strict=True)) for number, keys in steps if number > int(since) for key in keys
        ]
        return pa.Table.from_pylist(changed_keys, pa.schema([schema.field(name) for name in context.keys]))

    if "changes" in context.options:
        function = _Rows(path, schema, context.keys)
        return LookupFunctionProvider(function, schema, version, changes=changes, scan=scan)
    if "scans" in context.options:
        return FullCachingLookupProvider(scan, schema, version=version)
    return LookupFunctionProvider(_Rows(path, schema, context.keys), schema, version)
