"""A system that workers look keys up in. In its directory is what it was asked (`asked`: a line for each call), and `down` makes it fail.
`founded` has more cities by their ids, as JSON; their number is its version, for those that ask for it."""

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
        requested_keys = keys["id"].to_pylist()
        with (self._home / "asked").open("a") as log:
            log.write(json.dumps(sorted(requested_keys)) + "\n")
        if (self._home / "down").exists():
            raise ConnectionError("the service is down")
        cities = {**CITIES, **founded(self._home)}
        present_keys = [key for key in requested_keys if key in cities]
        return pa.table({"id": present_keys, "city": [cities[key] for key in present_keys]}, schema=SCHEMA)


def founded(home: Path) -> dict[int, str]:
    file = home / "founded"
    return {int(key): city for key, city in json.loads(file.read_text()).items()} if file.exists() else {}


class AsyncCities(AsyncLookupFunction):
    def __init__(self, context: LookupContext) -> None:
        self._cities = Cities(context)

    async def lookup(self, keys: pa.Table) -> pa.Table:
        return self._cities.lookup(keys)


def cities(context: LookupContext) -> LookupFunctionProvider:
    return LookupFunctionProvider(Cities(context), SCHEMA)


def versioned_cities(context: LookupContext) -> LookupFunctionProvider:
    home = Path(context.options["home"])
    return LookupFunctionProvider(Cities(context), SCHEMA, version=lambda: str(len(founded(home))))


def async_cities(context: LookupContext) -> AsyncLookupFunctionProvider:
    return AsyncLookupFunctionProvider(AsyncCities(context), SCHEMA)


def service_options(home: Path, kind: str = "cities", **more: str) -> dict[str, Any]:
    options = {"lookup.provider": f"{__name__}:{kind}", "lookup.provider.home": str(home)}
    return {**options, **CACHED, **more}
