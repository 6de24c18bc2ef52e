"""Whether rows about to be committed have keys of their own (`lookup.write.unique-keys`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.errors import NonUniqueKeyError
from pyspark_lookup.keys import Keys, one_array
from pyspark_lookup.notifications import DataFile, Definition
from pyspark_lookup.partial.rows import SEED, distinct_keys, match_rows
from pyspark_lookup.predicate import Among, And
from pyspark_lookup.reader import TableReader
from pyspark_lookup.stores import IMMUTABLE
from pyspark_lookup.table import Table
from pyspark_lookup.ufs import FileVersion

__all__ = ["check_unique"]


def check_unique(
    reader: TableReader, table: Table, definition: Definition, files: Sequence[DataFile], others: Sequence[DataFile]
) -> None:
    """Raise NonUniqueKeyError if two rows of `files` have one key, or one of them has the key of a row in `others`.

    Rows with a null in their key have none. Of `others` what can hold such keys is read, and its key columns only.
    """
    names = list(definition.keys)
    rows = reader.columns_of(table, _versions(table, files), definition.schema, names, None)
    arrays = [one_array(rows.column(name)) for name in names]
    keys = Keys(arrays)
    chosen, places = distinct_keys(keys, keys.hashes(SEED))
    counts = np.bincount(places[places >= 0], minlength=len(chosen))
    if len(counts) and counts.max() > 1:
        raise _twice(table, rows, int(chosen[np.argmax(counts > 1)]), "the new rows have it more than once")
    if not others or not len(chosen):
        return
    parts = tuple(Among(name, pc.unique(array).drop_null()) for name, array in zip(names, arrays, strict=True))
    wanted = parts[0] if len(parts) == 1 else And(parts)
    held = reader.columns_of(table, _versions(table, others), definition.schema, names, wanted)
    matches = match_rows(held, names, keys) if held.num_rows else None
    if matches is not None and len(matches.keys):
        raise _twice(table, rows, int(matches.keys[0]), "the table has it")


def _versions(table: Table, files: Sequence[DataFile]) -> list[FileVersion]:
    return [FileVersion(f"{table.url}/{file.path}", file.size, IMMUTABLE) for file in files]


def _twice(table: Table, rows: pa.Table, row: int, why: str) -> NonUniqueKeyError:
    key = ", ".join(f"{name} = {rows.column(name)[row].as_py()!r}" for name in rows.column_names)
    return NonUniqueKeyError(
        f"lookup.write.unique-keys: {key} and {why}, so nothing was written to {table.url}: write each key once"
    )
