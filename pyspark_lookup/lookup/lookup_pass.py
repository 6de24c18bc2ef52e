"""A chain of lookups in one pass: batches of columns in, for each row the list of its results out.

A task gets its `PassSpec` as text, and the versions as columns beside the keys. Lookups are carried out in order; between
them only row numbers change; the looked-up columns are taken once, at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Numbers, as_bools, as_indices
from pyspark_lookup.errors import NonUniqueKeyError, NotSupportedError
from pyspark_lookup.lookup.lookup_join import Lookup, LookupRows, LookupSpec, open_lookup, split_tokens
from pyspark_lookup.versions.executions import Build, Execution

FOUND_COLUMN = "_lookup_found"
"""True in each row of a list; null in the row that Spark makes of an empty list."""

# Limits for the results of a batch: keys with several rows in several tables multiply them.
_RESULTS_AT_ONCE = 1_000_000
_BYTES_AT_ONCE = 128 * 2**20
Place = int | tuple[int, int]
"""Where a key comes from: an argument, or a column of an earlier lookup, as (number of the lookup, number of the column)."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A lookup of a pass. `places`: where its keys (and the time) come from. `version`: which it reads, as (column of versions, place in it).

    `how`: `left`, `inner`, `left_semi` or `left_anti`. `build`: if it was built in a `foreachBatch` function.
    """

    lookup: LookupSpec
    places: tuple[Place, ...]
    version: tuple[int, int]
    how: str
    build: Build | None = None


@dataclasses.dataclass(frozen=True)
class PassSpec:
    """The lookups of a pass, and the form of its answer: with `many` a list of rows for each row, else one row or null."""

    stages: tuple[Stage, ...]
    many: bool

    @property
    def drops(self) -> bool:
        """Whether a row may have no results, and be dropped."""
        return any(stage.how != "left" for stage in self.stages)

    def to_text(self) -> str:
        """The spec as text, for tasks; equal specs give equal texts."""
        stages = [
            [s.lookup.to_json(), s.places, s.version, s.how, s.build and dataclasses.astuple(s.build)]
            for s in self.stages
        ]
        return json.dumps([stages, self.many], sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> PassSpec:
        """The spec that `to_text` wrote."""
        stages, many = json.loads(text)
        return cls(tuple(_parse_stage(*fields) for fields in stages), many)


def _parse_stage(
    lookup: Sequence[Any], places: Sequence[Any], version: Sequence[int], how: str, build: Sequence[Any] | None
) -> Stage:
    key_places = tuple(place if isinstance(place, int) else (place[0], place[1]) for place in places)
    return Stage(
        LookupSpec.from_json(lookup), key_places, (version[0], version[1]), how, Build(*build) if build else None
    )


@dataclasses.dataclass(frozen=True)
class _Results:
    """The results so far of the rows from `first` up to `last` of a batch, in their order.

    `rows`: the row of each result. `matches`: for each lookup its columns, and the place of each result in them (-1: the
    result has no row there). None in place of numbers: consecutive ones. `bytes`: about the size of each result's columns.
    """

    first: int
    last: int
    rows: Numbers | None
    matches: tuple[tuple[list[pa.Array], Numbers | None], ...]
    bytes: Numbers

    @property
    def count(self) -> int:
        return self.last - self.first if self.rows is None else len(self.rows)

    def argument(self, column: pa.Array) -> pa.Array:
        """A column of the batch, for each result."""
        return column.slice(self.first, self.count) if self.rows is None else column.take(as_indices(self.rows))

    def column(self, lookup: int, number: int) -> pa.Array:
        """A column of a lookup, for each result."""
        columns, places = self.matches[lookup]
        return columns[number] if places is None else _take(columns[number], places)

    def extend(self, selection: Numbers | None, columns: list[pa.Array], places: Numbers | None) -> _Results:
        """The results of `selection`, in its order, with the match that a lookup has for each."""
        count = self.count if selection is None else len(selection)
        sizes = np.zeros(count, np.int64)
        if columns and len(columns[0]):
            sizes = _row_sizes(columns) if places is None else np.where(places < 0, 0, _row_sizes(columns)[places])
        if selection is None:
            return dataclasses.replace(self, matches=(*self.matches, (columns, places)), bytes=self.bytes + sizes)
        rows = selection + self.first if self.rows is None else self.rows[selection]
        matches = [
            (old_columns, selection if old_places is None else old_places[selection])
            for old_columns, old_places in self.matches
        ]
        return _Results(self.first, self.last, rows, (*matches, (columns, places)), self.bytes[selection] + sizes)

    def parts(self, count: int, size: int) -> Iterator[_Results]:
        """The results in parts of about so many results and bytes. The results of one row stay together."""
        if (self.count <= count and self.bytes.sum() <= size) or self.last - self.first == 1:
            yield self
            return
        rows = np.arange(self.first, self.last) if self.rows is None else self.rows
        # The share of a part that each result takes; `count` is a whole part.
        ends = np.cumsum(np.maximum(self.bytes * count // size, 1))
        start, first = 0, self.first
        while first < self.last:
            stop = int(np.searchsorted(ends, (ends[start - 1] if start else 0) + count, "right"))
            last = max(int(rows[stop]) if stop < len(rows) else self.last, first + 1)
            stop = int(np.searchsorted(rows, last))
            span = slice(start, stop)
            matches = [
                (columns, np.arange(start, stop) if old_places is None else old_places[span])
                for columns, old_places in self.matches
            ]
            yield _Results(first, last, rows[span], tuple(matches), self.bytes[span])
            start, first = stop, last


class LookupPass:
    """Answers batches of one spec in this process."""

    def __init__(self, spec: PassSpec, session: Mapping[str, str]) -> None:
        self.spec = spec
        self._lookups: list[Lookup] = [open_lookup(stage.lookup, session) for stage in spec.stages]
        fields = [field for lookup in self._lookups for field in lookup.fields]
        self._fields = [*fields, pa.field(FOUND_COLUMN, pa.bool_())] if spec.drops or not fields else fields

    @property
    def type(self) -> pa.DataType:
        """The type of the answers."""
        row = pa.struct(self._fields)
        return pa.list_(pa.field("element", row)) if self.spec.many else row

    def answers(
        self,
        columns: Sequence[pa.Array],
        versions: Sequence[pa.Array],
        executions: Sequence[Execution | None],
        row_bytes: int = 2**31 - 1,
    ) -> Iterator[pa.Array]:
        """For each row of a batch the list of its results (or its result, or null), as structs; in several arrays if they are many.

        `versions`: columns of joined tokens (`join_tokens`), which say the version that answers each row. `executions`: that of each
        lookup. `row_bytes`: the bytes that the results of one row may take in Spark. Raises NonUniqueKeyError for a second row where there may be one, NotSupportedError for
        more bytes, and what the lookups raise.
        """
        for start, stop in _runs(versions):
            tokens = [split_tokens(column[start].as_py()) for column in versions]
            whole = _Results(start, stop, None, (), np.zeros(stop - start, np.int64))
            for results in self._extend(columns, tokens, executions, whole, min(_BYTES_AT_ONCE, row_bytes)):
                self._check_size(columns, results, row_bytes)
                yield self._shape(columns, results)

    def publish(self) -> None:
        """Put this process's counters where other processes of the host find them."""
        for lookup in self._lookups:
            lookup.publish()

    def _extend(
        self,
        columns: Sequence[pa.Array],
        tokens: Sequence[Sequence[bytes]],
        executions: Sequence[Execution | None],
        results: _Results,
        size: int,
    ) -> Iterator[_Results]:
        """The results after the remaining lookups, in parts of about that size."""
        number = len(results.matches)
        if number == len(self._lookups):
            yield results
            return
        stage = self.spec.stages[number]
        arguments = [
            results.argument(columns[place]) if isinstance(place, int) else results.column(*place)
            for place in stage.places
        ]
        column, place = stage.version
        lookup_rows = self._lookups[number].find(
            stage.lookup.cast_arguments(arguments), tokens[column][place], executions[number]
        )
        # A single left lookup may leave out rows without a match: Spark adds them.
        how = "inner" if len(self._lookups) == 1 and stage.how == "left" else stage.how
        selection, places = _JOINS[how](results.count, lookup_rows)
        for part in results.extend(selection, lookup_rows.columns, places).parts(_RESULTS_AT_ONCE, size):
            yield from self._extend(columns, tokens, executions, part, size)

    def _shape(self, arguments: Sequence[pa.Array], results: _Results) -> pa.Array:
        fields, count, rows = self._fields, results.count, results.last - results.first
        columns = [
            results.column(n, m)
            for n, (lookup_columns, _) in enumerate(results.matches)
            for m in range(len(lookup_columns))
        ]
        if len(columns) < len(fields):
            columns.append(pc.fill_null(pa.nulls(count, pa.bool_()), True))
        structs = pa.StructArray.from_arrays(columns, fields=fields)
        if results.rows is None:
            counts = np.ones(rows, np.int64)
        else:
            counts = np.bincount(results.rows - results.first, minlength=rows)
        if self.spec.many:
            offsets = np.zeros(rows + 1, np.int32)
            np.cumsum(counts, out=offsets[1:])
            return pa.ListArray.from_arrays(pa.array(offsets), structs, type=self.type)
        if rows and counts.max() > 1:
            raise self._not_unique(arguments, int(np.argmax(counts > 1)) + results.first, int(counts.max()))
        if count == rows:
            return structs
        return structs.take(pa.array(np.cumsum(counts) - 1, mask=counts == 0))

    def _check_size(self, arguments: Sequence[pa.Array], results: _Results, row_bytes: int) -> None:
        """Raise NotSupportedError if the results of one row, which Spark takes as one value, are more than it can hold."""
        if results.last - results.first > 1:  # `parts` puts only a row larger than a part by itself
            return
        # In Spark a struct has 8 bytes for its place, 8 for its nulls, and 8 for each field beside its text.
        size = int(results.bytes.sum()) + results.count * (16 + 8 * len(self._fields))
        if size > row_bytes:
            raise NotSupportedError(
                f"{results.count:,} rows of the table have one key, here {self._key(arguments, results.first)}: Spark would need {size:,} "
                f"bytes for one row, of at most {row_bytes:,} (an eighth of spark.executor.memory, or of spark.driver.memory with a "
                "local master). Look up fewer columns, filter the key out before, join it by Spark's own join with "
                "spark.read.format('lookupcache').load(…), or give Spark more memory"
            )

    def _key(self, arguments: Sequence[pa.Array], row: int) -> str:
        """The keys of a row that are arguments of the pass, as text for messages."""
        names_by_place = {
            place: name
            for stage in reversed(self.spec.stages)
            for name, place in zip(stage.lookup.keys.names, stage.places, strict=False)
            if isinstance(place, int)
        }
        return ", ".join(
            f"{name} = {arguments[place][row].as_py()!r}" for place, name in sorted(names_by_place.items())
        )

    def _not_unique(self, arguments: Sequence[pa.Array], row: int, most: int) -> NonUniqueKeyError:
        return NonUniqueKeyError(
            f"the table has several rows (up to {most}) for one key, here {self._key(arguments, row)}: register the function with multi=True, "
            "which returns an array, or use lookup_join"
        )


def _row_sizes(columns: Sequence[pa.Array]) -> Numbers:
    """About how many bytes each row of some columns takes: exactly of text and binary, on average of others."""
    sizes = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            sizes += np.diff(np.frombuffer(column.buffers()[1], np.int32)[column.offset :][: len(column) + 1])
        else:
            sizes += column.nbytes // len(column)
    return sizes


def _runs(versions: Sequence[pa.Array]) -> Iterator[tuple[int, int]]:
    """Parts of a batch whose rows have the same versions: (first row, the row after the last)."""
    cuts = {0, len(versions[0])}
    for column in versions:
        changes = pc.not_equal(column.slice(1), column.slice(0, max(len(column) - 1, 0)))
        cuts.update((np.flatnonzero(as_bools(changes)) + 1).tolist())
    return itertools.pairwise(sorted(cuts))


_Joined = tuple[Numbers | None, Numbers | None]
"""The results that a join keeps (None: all, once each), and for each the place of its match (None: in their order)."""


def _counts(count: int, lookup_rows: LookupRows) -> Numbers:
    return np.bincount(lookup_rows.keys, minlength=count)


def _join_inner(count: int, lookup_rows: LookupRows) -> _Joined:
    if len(lookup_rows.keys) == count and _counts(count, lookup_rows).max(initial=1) == 1:
        return None, None
    return lookup_rows.keys, None


def _join_left(count: int, lookup_rows: LookupRows) -> _Joined:
    counts = _counts(count, lookup_rows)
    if counts.max(initial=0) <= 1:
        if len(lookup_rows.keys) == count:
            return None, None
        places = np.full(count, -1)
        places[lookup_rows.keys] = np.arange(len(lookup_rows.keys))
        return None, places
    repeats = np.maximum(counts, 1)
    places = np.full(int(repeats.sum()), -1)
    places[np.repeat(counts > 0, repeats)] = np.arange(len(lookup_rows.keys))
    return np.repeat(np.arange(count), repeats), places


def _join_semi(count: int, lookup_rows: LookupRows) -> _Joined:
    selection, first = np.unique(lookup_rows.keys, return_index=True)
    return selection, first


def _join_anti(count: int, lookup_rows: LookupRows) -> _Joined:
    """The results without a match, and those whose lookup failed."""
    places = np.full(count, -1)
    absent = _counts(count, lookup_rows) == 0
    if lookup_rows.columns:  # there is a column of errors, the last
        failed_rows = np.flatnonzero(as_bools(lookup_rows.columns[-1].is_valid()))
        places[lookup_rows.keys[failed_rows]] = failed_rows
    selection = np.flatnonzero(absent | (places >= 0))
    return selection, places[selection]


_JOINS: Mapping[str, Callable[[int, LookupRows], _Joined]] = {
    "left": _join_left,
    "inner": _join_inner,
    "left_semi": _join_semi,
    "left_anti": _join_anti,
}


def _take(column: pa.Array, places: Numbers) -> pa.Array:
    absent = places < 0
    return column.take(pa.array(places, mask=absent) if absent.any() else as_indices(places))


@functools.lru_cache(maxsize=64)
def _pass(text: str, session: tuple[tuple[str, str], ...], pid: int) -> LookupPass:
    return LookupPass(PassSpec.from_text(text), dict(session))


def open_pass(text: str, session: Mapping[str, str]) -> LookupPass:
    """This process's pass of a spec, under what the session sets of a host's options."""
    return _pass(text, tuple(sorted(session.items())), os.getpid())
