"""Options of writes of managed tables."""

from __future__ import annotations

import dataclasses

from pyspark_lookup.options.declaring import BOOLEAN, COUNT, POSITIVE_DURATION, Kind, choice, option
from pyspark_lookup.options.enums import KeyedWrite, MissingColumns
from pyspark_lookup.options.parsing import parse_batch


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """See `LookupOptions`, of which these are a part."""

    # fmt: off
    create_if_not_exists: bool = option(
        "lookup.create-if-not-exists", BOOLEAN, False,
        doc="Of CREATE TABLE: if nothing is at the path, make a managed table there, with the columns of "
            "lookup.schema and the keys of lookup.keys.",
    )
    write_mode: KeyedWrite | None = option(
        "lookup.write.mode", choice(KeyedWrite), None,
        doc="Of writes in Spark's append mode: upsert, in place of the rows that have the same keys.",
    )
    write_unique_keys: bool = option(
        "lookup.write.unique-keys", BOOLEAN, False,
        doc="Of writes: fail before the commit if two rows would have one key.",
    )
    write_merge_schema: bool = option(
        "lookup.write.merge-schema", BOOLEAN, False,
        doc="Of writes: add columns that the table does not have; older rows have null there.",
    )
    write_missing_columns: MissingColumns | None = option(
        "lookup.write.missing-columns", choice(MissingColumns), None, shown="such an upsert is refused",
        doc="Of upserts whose rows lack columns: a row that is there keeps its values (KEEP), or they become null "
            "(NULL).",
    )
    write_batch: tuple[str, int] | None = option(
        "lookup.write.batch", Kind("`name:number`", parse_batch), None,
        doc="Of batch writes, as in `foreachBatch`: write nothing if this batch of that name, or a later one, is "
            "committed.",
    )
    write_compact_after: int = option(
        "lookup.write.compact-after", COUNT, 20,
        doc="Of writes: a commit compacts small writes once there are so many; 0: only you do "
            "(`LookupTable.compact`).",
    )
    write_timeout_s: float = option(
        "lookup.write.timeout", POSITIVE_DURATION, 86400.0, shown="24 h",
        doc="Of writes: others may abort a write that has shown no sign of life for so long.",
    )
    # fmt: on
