"""A system that workers look keys up in: a directory with what it has, what it is asked, and whether it is down."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from pyspark_lookup.providers.functions import (
    AsyncLookupFunction,
    AsyncLookupFunctionProvider,
    LookupContext,
    LookupFunction,
    LookupFunctionProvider,
)

SCHEMA = pa.schema([("id", pa.int64()), ("city", pa.string())])


class Service:
    """`rows` (JSON, id to city), `down` (fails while it is there) and `asked` (a line for each call) in a directory."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def put(self, rows: dict[int, str]) -> None:
        (self._home / "rows").write_text(json.dumps(rows))

    def asked(self) -> list[list[int]]:
        """The keys of each call."""
        log = self._home / "asked"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def break_down(self, down: bool = True) -> None:
        (self._home / "down").touch() if down else (self._home / "down").unlink()

    def answer(self, keys: pa.Table) -> pa.Table:
        asked = keys["id"].to_pylist()
        with (self._home / "asked").open("a") as log:
            log.write(json.dumps(sorted(asked)) + "\n")
        if (self._home / "down").exists():
            raise ConnectionError("the service is down")
        held = json.loads((self._home / "rows").read_text())
        found = [(key, held[str(key)]) for key in asked if str(key) in held]
        return pa.table({"id": [key for key, _ in found], "city": [city for _, city in found]}, schema=SCHEMA)


class Cities(LookupFunction):
    def __init__(self, service: Service) -> None:
        self._service = service

    def lookup(self, keys: pa.Table) -> pa.Table:
        return self._service.answer(keys)


class AsyncCities(AsyncLookupFunction):
    def __init__(self, service: Service) -> None:
        self._service = service

    async def lookup(self, keys: pa.Table) -> pa.Table:
        return self._service.answer(keys)


def cities(context: LookupContext) -> LookupFunctionProvider:
    return LookupFunctionProvider(Cities(Service(Path(context.options["home"]))), SCHEMA)


def async_cities(context: LookupContext) -> AsyncLookupFunctionProvider:
    return AsyncLookupFunctionProvider(AsyncCities(Service(Path(context.options["home"]))), SCHEMA)
