"""A system that workers look keys up in. In its directory is what it was asked (`asked`: a line for each call), and `down` makes it fail."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from pyspark_lookup.sources.providers.functions import (
    AsyncLookupFunction,
    AsyncLookupFunctionProvider,
    LookupContext,
    LookupFunction,
    LookupFunctionProvider,
)

SCHEMA = pa.schema([("id", pa.int64()), ("city", pa.string())])
CITIES = {1: "Oslo", 2: "Bergen"}
CACHED = {"lookup.cache": "PARTIAL", "lookup.partial-cache.expire-after-write": "1 h", "lookup.max-retries": "0"}


class Cities(LookupFunction):
    def __init__(self, context: LookupContext) -> None:
        self._home = Path(context.options["home"])

    def lookup(self, keys: pa.Table) -> pa.Table:
        asked = keys["id"].to_pylist()
        with (self._home / "asked").open("a") as log:
            log.write(json.dumps(sorted(asked)) + "\n")
        if (self._home / "down").exists():
            raise ConnectionError("the service is down")
        found = [key for key in asked if key in CITIES]
        return pa.table({"id": found, "city": [CITIES[key] for key in found]}, schema=SCHEMA)


class AsyncCities(AsyncLookupFunction):
    def __init__(self, context: LookupContext) -> None:
        self._cities = Cities(context)

    async def lookup(self, keys: pa.Table) -> pa.Table:
        return self._cities.lookup(keys)


def cities(context: LookupContext) -> LookupFunctionProvider:
    return LookupFunctionProvider(Cities(context), SCHEMA)


def async_cities(context: LookupContext) -> AsyncLookupFunctionProvider:
    return AsyncLookupFunctionProvider(AsyncCities(context), SCHEMA)


def options_of(home: Path, kind: str = "cities", **others: str) -> dict[str, Any]:
    own = {"lookup.provider": f"{__name__}:{kind}", "lookup.provider.home": str(home)}
    return {**own, **CACHED, **others}
