"""What a write by key needs to know of the rows there are: which have its keys, and whether keys are unique."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.conf import redact
from pyspark_lookup.errors import NonUniqueKeyError
from pyspark_lookup.hidden import place_fields
from pyspark_lookup.keys import Keys, one_array
from pyspark_lookup.notifications import DataFile, Definition
from pyspark_lookup.partial.rows import SEED, distinct_keys, match_rows
from pyspark_lookup.predicate import Among, And, Predicate
from pyspark_lookup.reader import TableReader
from pyspark_lookup.scan import Prepared
from pyspark_lookup.stores import IMMUTABLE
from pyspark_lookup.table import Table
from pyspark_lookup.ufs import FileVersion

__all__ = ["KeyedRows"]

_AT_ONCE = 1_000_000  # rows that are compared with the keys in one go


class KeyedRows:
    """Rows of one managed table by their keys, wherever they are."""

    def __init__(self, reader: TableReader, table: Table) -> None:
        self._reader = reader
        self._table = table

    def keys_of(self, definition: Definition, files: Sequence[DataFile]) -> pa.Table:
        """The key columns of all rows of new files."""
        versions = [FileVersion(f"{self._table.url}/{file.path}", file.size, IMMUTABLE) for file in files]
        prepared = self._reader.prepared(self._table, versions, definition.schema, definition.keys, None)
        columns = pa.schema([definition.schema.field(name) for name in definition.keys])
        return pa.Table.from_batches(list(prepared.batches()), columns)

    def check_different(self, keys: pa.Table) -> None:
        """Raise NonUniqueKeyError if two rows have one key. Rows with a null in it have none."""
        held = Keys([one_array(column) for column in keys.columns])
        chosen, places = distinct_keys(held, held.hashes(SEED))
        counts = np.bincount(places[places >= 0], minlength=len(chosen))
        if len(counts) and counts.max() > 1:
            raise self._twice(keys, int(chosen[np.argmax(counts > 1)]), "the new rows have it more than once")

    def check_new(self, definition: Definition, keys: pa.Table, others: Sequence[FileVersion]) -> None:
        """Raise NonUniqueKeyError if a row that counts in the others has one of the keys."""
        found = self.find(definition, keys, others)
        if found.num_rows:
            held = Keys([one_array(keys.column(name)) for name in definition.keys])
            at = match_rows(found, definition.keys, held).keys[0]
            raise self._twice(keys, int(at), "the table has it")

    def find(self, definition: Definition, keys: pa.Table, files: Sequence[FileVersion]) -> pa.Table:
        """The rows that count in those files and have one of the keys: these, `hidden.PATH` and `hidden.ROW`.

        Of the files what can hold such keys is read, and its key columns only.
        """
        names = list(definition.keys)
        arrays = [one_array(keys.column(name)) for name in names]
        wanted = _among(names, arrays)
        known = pa.Table.from_arrays(arrays, names=names)
        parts = []
        for rows in self._placed(definition, files, names, wanted):
            matches = match_rows(known, names, Keys([one_array(rows.column(name)) for name in names]))
            if len(matches.keys):
                parts.append(rows.take(pa.array(np.unique(matches.keys))))
        fields = [definition.schema.field(name) for name in names]
        return pa.concat_tables(parts) if parts else pa.schema([*fields, *place_fields()]).empty_table()

    def _placed(
        self, definition: Definition, files: Sequence[FileVersion], names: Sequence[str], wanted: Predicate
    ) -> Iterator[pa.Table]:
        """The rows that count, of row groups where `wanted` may be true, with where they are; some at a time."""
        schema = pa.schema([*(definition.schema.field(name) for name in names), *place_fields()])
        prepared = self._reader.prepared(self._table, files, definition.schema, names, wanted)
        assert isinstance(prepared, Prepared)
        parts: list[pa.Table] = []
        for file, places, batch in prepared.placed():
            path = pa.repeat(file.url.removeprefix(self._table.url + "/"), len(places))
            parts.append(pa.Table.from_arrays([*batch.columns, path, pa.array(places, pa.int64())], schema=schema))
            if sum(part.num_rows for part in parts) >= _AT_ONCE:
                yield pa.concat_tables(parts)
                parts = []
        if parts:
            yield pa.concat_tables(parts)

    def _twice(self, keys: pa.Table, row: int, why: str) -> NonUniqueKeyError:
        key = ", ".join(f"{name} = {keys.column(name)[row].as_py()!r}" for name in keys.column_names)
        return NonUniqueKeyError(
            f"{key} and {why}, so nothing was written to {redact('path', self._table.url)}: write each key once "
            "(lookup.write.unique-keys, or a write by key)"
        )


def _among(names: Sequence[str], keys: Sequence[pa.Array]) -> Predicate:
    parts = tuple(Among(name, pc.unique(array).drop_null()) for name, array in zip(names, keys, strict=True))
    return parts[0] if len(parts) == 1 else And(parts)
