"""Reads of a table as they are planned from its path and options."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa

from pyspark_lookup.lookup import planner
from pyspark_lookup.lookup.read import ReadPlan, ReadTask
from pyspark_lookup.sources.registry import parse_options
from tests.support.fakes import Host

NONE: Mapping[str, str] = MappingProxyType({})


def planned(
    host: Host, path: Path, more: Mapping[str, str] = NONE, columns: pa.Schema | None = None
) -> tuple[ReadPlan, list[ReadTask]]:
    """The plan of a read with these options, of the columns they leave or of given ones."""
    options = parse_options({"path": str(path), **{f"lookup.{key}": value for key, value in more.items()}})
    found = planner.find(host.reader, options)
    wanted = planner.table_columns(found, options) if columns is None else columns
    made = planner.plan_read(found, options, wanted, host.clock.host())
    return made, planner.plan_tasks(host.reader, found, made)
