"""Arguments of public methods that are of another type: the error names the argument, the value, and what it may be."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyspark_lookup import LookupTable, PeriodicCacheReloadTrigger, TimedCacheReloadTrigger
from pyspark_lookup.errors import OptionError, SchemaError
from pyspark_lookup.sources.registry import parse_options

NOON, ODD = datetime.time(12), (0, 7, 1.5, None, True, b"7 d", ["7 d"], datetime.date(2026, 1, 1), object)
CALLS: dict[str, tuple[type[Exception], Callable[[LookupTable, Any], object]]] = {
    "older_than": (OptionError, lambda table, odd: table.vacuum(odd)),
    "force": (OptionError, lambda table, odd: None if odd is True else table.vacuum("7 d", odd)),
    "mode": (OptionError, lambda table, odd: table.write([{"id": 2}], odd)),
    "mode of a write in a transaction": (OptionError, lambda table, odd: table.transaction().write([{"id": 2}], odd)),
    "mode of a trigger": (OptionError, lambda _, odd: PeriodicCacheReloadTrigger(5, odd)),
    "reload_time": (OptionError, lambda _, odd: TimedCacheReloadTrigger(odd)),
    "zone": (OptionError, lambda _, odd: None if odd is None else TimedCacheReloadTrigger(NOON, 1, odd)),
    "columns": (SchemaError, lambda table, odd: None if odd is None else table.scan([odd])),
    "columns that are not a list": (SchemaError, lambda table, odd: None if odd in (None, ["7 d"]) else table.scan(odd)),
    "keys": (OptionError, lambda table, odd: table.alter(keys=[odd])),
    "keys that are not a list": (OptionError, lambda table, odd: None if odd in (None, ["7 d"]) else table.alter(keys=odd)),
    "properties": (OptionError, lambda table, odd: table.alter(properties={"lookup.log.retention": odd})),
    "properties by name": (OptionError, lambda table, odd: table.alter(properties={odd: "7 d"} if odd != ["7 d"] else 5)),  # type: ignore[arg-type]
    "options": (OptionError, lambda _, odd: None if odd is None else LookupTable("x", odd)),
    "options by name": (OptionError, lambda _, odd: LookupTable("x", {odd: "x"} if odd != ["7 d"] else 5)),  # type: ignore[arg-type]
    "options that are parsed": (OptionError, lambda _, odd: parse_options(odd)),
}  # fmt: skip


@pytest.mark.parametrize("argument", CALLS)
def test_another_type(tmp_path: Path, argument: str) -> None:
    """It is refused by name, before anything is done."""
    kind, call = CALLS[argument]
    table = LookupTable(str(tmp_path / "t"), {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "cache")})
    table.write([{"id": 1}])
    position = table.describe()["position"]
    for odd in ODD:
        try:
            call(table, odd)
        except kind as problem:
            assert str(problem).startswith(f"argument {argument.split(maxsplit=1)[0]} = ")
            assert "\n" not in str(problem)
            continue
        assert odd in (None, True, ["7 d"])
    assert table.describe()["position"] == position
