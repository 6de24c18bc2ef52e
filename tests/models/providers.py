"""A table of another system in a history: rows in a file that a provider reads for each lookup, and `invalidate` where it has no versions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from pyspark_lookup import (
    FullCachingLookupProvider,
    LookupContext,
    LookupFunction,
    LookupFunctionProvider,
    LookupProvider,
    LookupTable,
)
from tests.models.adapter import DrawnRows, Ground
from tests.models.answers import Content, Row, known_content
from tests.models.histories import Step

_EXPIRES_S = 1000.0  # so long that only `invalidate` makes a change seen at the next step


class Provided(DrawnRows):
    """Rows in a file. Without versions, each change is followed by `invalidate` on the readers' host."""

    hides_files = False

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._rows: list[Row] = []
        self.has_versions = ground.new_serial() % 2 == 0
        self.options = {
            "lookup.provider": f"{__name__}:provider",
            "lookup.provider.versions": str(self.has_versions),
            "lookup.provider.columns": json.dumps([(field.name, str(field.type)) for field in self.schema]),
        }

    def content(self) -> Content:
        return known_content(self.schema, self._rows)

    def take(self, step: Step, rng: random.Random) -> None:
        if step.op in ("append", "upsert", "delete", "overwrite", "transaction"):
            self.change("upsert" if step.op == "transaction" else step.op, step.args[1], rng)
            self.invalidate()

    def change(self, op: str, count: int, rng: random.Random) -> None:
        """Change the rows, and tell nobody."""
        new = self.drawn_rows(op, count, rng)
        gone = {self.key_of(row) for row in new} if op in ("upsert", "delete") else set()
        rows = [] if op == "overwrite" else [row for row in self._rows if self.key_of(row) not in gone]
        self._rows = rows if op == "delete" else rows + new
        path = self.ground.path
        next_file = path.with_suffix(".next")
        next_file.write_text(json.dumps([self.ground.new_serial(), self._rows]))
        next_file.replace(path)

    def invalidate(self) -> None:
        """Have the host forget all keys that there may be."""
        if not self.has_versions:
            self._reader().invalidate(self.every_key())

    def _reader(self) -> LookupTable:
        """The table as the readers' host has it."""
        cached = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000", **self.cache_options("PARTIAL")}
        host = {"lookup.cache.dir": str(self.ground.hosts / "here"), "lookup.keys": ",".join(self.keys)}
        return LookupTable(self.name, {**self.options, **cached, **host})

    def cache_options(self, cache: str) -> dict[str, str]:
        if cache == "PARTIAL" and not self.has_versions:
            return {"lookup.partial-cache.expire-after-write": f"{_EXPIRES_S:g} s"}
        return {"lookup.provider.scans": "True"} if cache == "FULL" else {}

    def scans(self, cache: str) -> bool:
        return cache == "FULL"


class _Rows(LookupFunction):
    def __init__(self, path: Path, schema: pa.Schema, keys: tuple[str, ...]) -> None:
        self._path, self._schema, self._keys = path, schema, keys

    def lookup(self, keys: pa.Table) -> pa.Table:
        wanted = {tuple(key[name] for name in self._keys) for key in keys.to_pylist()}
        rows = [row for row in _read(self._path)[1] if tuple(row[name] for name in self._keys) in wanted]
        return pa.Table.from_pylist(rows, self._schema)


def _read(path: Path) -> tuple[int, list[Row]]:
    version, rows = json.loads(path.read_text())
    return version, rows


def provider(context: LookupContext) -> LookupProvider:
    """The factory that `lookup.provider` names."""
    assert context.path is not None
    path = Path(context.path.removeprefix("file://"))
    types = {"int64": pa.int64(), "string": pa.string()}
    schema = pa.schema([(name, types[kind]) for name, kind in json.loads(context.options["columns"])])
    version = (lambda: str(_read(path)[0])) if context.options["versions"] == "True" else None

    def scan() -> Iterator[pa.RecordBatch]:
        return iter(pa.Table.from_pylist(_read(path)[1], schema).to_batches())

    if "scans" in context.options:
        return FullCachingLookupProvider(scan, schema, version=version)
    return LookupFunctionProvider(_Rows(path, schema, context.keys), schema, version)
