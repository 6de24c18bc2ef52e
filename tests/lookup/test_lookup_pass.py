"""Chains of lookups in one pass have the rows of joins that are done one after the other, whatever repeats, is lacking or fails."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_lookup.errors import NotSupportedError
from pyspark_lookup.lookup import lookup_join as lookup_pass
from pyspark_lookup.lookup.lookup_join import (
    ERROR_COLUMN,
    FOUND_COLUMN,
    LookupPass,
    LookupRows,
    LookupSpec,
    PassSpec,
    Place,
    Stage,
    join_tokens,
    split_tokens,
)

_HOWS = ("left", "inner", "left_semi", "left_anti")
Key = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows by key, and the keys that fail (None: it has no column of errors)."""

    keys: int
    rows: Mapping[Key, list[Key]]
    failing: frozenset[Key] | None


class FakeLookup:
    """Finds the rows of a table that is in memory."""

    def __init__(self, table: Table, spec: LookupSpec, token: bytes) -> None:
        self._table, self._spec, self._token = table, spec, token
        self.asked = 0

    @property
    def fields(self) -> list[pa.Field]:
        fields = [pa.field(name, pa.int64()) for name in self._spec.names]
        return [*fields, *([] if self._table.failing is None else [pa.field(ERROR_COLUMN, pa.string())])]

    def find(self, keys: Sequence[pa.Array], token: bytes, execution: object) -> LookupRows:
        assert token == self._token
        self.asked += len(keys[0])
        found = [
            (place, row)
            for place, key in enumerate(zip(*(column.to_pylist() for column in keys), strict=True))
            for row in answers(self._table, key, len(self._spec.names))
        ]
        columns = [pa.array([row[n] for _, row in found], field.type) for n, field in enumerate(self.fields)]
        return LookupRows(np.array([place for place, _ in found], np.int64), columns)


def answers(table: Table, key: Key, names: int) -> list[tuple[Any, ...]]:
    """The rows of a key, its error after them if the table has such a column."""
    if None in key:
        return []
    said: tuple[str | None, ...] = () if table.failing is None else (None,)
    if table.failing is not None and key in table.failing:
        return [(*(None,) * names, "failed")]
    return [(*row[:names], *said) for row in table.rows.get(key, [])]


def joined(batch: Sequence[Key], tables: Sequence[Table], stages: Sequence[Stage]) -> list[list[tuple[Any, ...]]]:
    """What a row's results are: one join after the other, a row at a time."""
    every = []
    for row in batch:
        results: list[tuple[Any, ...]] = [()]
        for number, (table, stage) in enumerate(zip(tables, stages, strict=True)):
            names = len(stage.lookup.names)
            width = names + (table.failing is not None)
            after = []
            for result in results:
                key = tuple(
                    row[at] if isinstance(at, int) else result[starts(tables, stages)[at[0]] + at[1]]
                    for at in stage.places
                )
                found = answers(table, key, names)
                failed = [one for one in found if table.failing is not None and one[-1] is not None]
                if stage.how == "left_semi":
                    after += [result + found[0]] if found else []
                elif stage.how == "left_anti":
                    after += [result + (failed[0] if failed else (None,) * width)] if failed or not found else []
                else:
                    after += [result + one for one in found]
                    after += [result + (None,) * width] if not found and stage.how == "left" else []
            results = after
            assert number < len(stages)
        every.append(results)
    return every


def starts(tables: Sequence[Table], stages: Sequence[Stage]) -> list[int]:
    """Where each lookup's columns begin."""
    widths = [len(s.lookup.names) + (t.failing is not None) for t, s in zip(tables, stages, strict=True)]
    return [sum(widths[:n]) for n in range(len(widths))]


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[Key], list[Table], list[Stage]]:
    """(a batch of two columns, tables, a lookup in each); keys are of the batch, or what an earlier lookup found."""
    values = st.integers(0, 5)
    nullable = st.one_of(st.none(), values)
    batch = draw(st.lists(st.tuples(nullable, nullable), max_size=8))
    tables: list[Table] = []
    stages: list[Stage] = []
    count = draw(st.integers(1, 4))
    fails = draw(st.integers(-1, count - 1))  # one at most: its column has one name
    for number in range(count):
        width = draw(st.integers(1, 2))
        key = st.tuples(*[values] * width)
        rows = draw(st.dictionaries(key, st.lists(st.tuples(nullable, nullable), max_size=3), max_size=8))
        failing = draw(st.frozensets(key, max_size=3)) if number == fails else None
        how = draw(st.sampled_from(_HOWS))
        names = tuple(f"c{number}_{n}" for n in range(draw(st.integers(0, 2)) if how in ("left", "inner") else 0))
        places: list[Place] = [0, 1]
        places += [(n, m) for n, stage in enumerate(stages) for m in range(len(stage.lookup.names))]
        own = tuple(draw(st.sampled_from(places)) for _ in range(width))
        types = pa.schema([(f"k{n}", pa.int64()) for n in range(width)])
        spec = LookupSpec({}, types, pa.schema([(name, pa.int64()) for name in names]), names)
        tables.append(Table(width, rows, failing))
        stages.append(Stage(spec, own, (draw(st.integers(0, 1)), draw(st.integers(0, 1))), how))
    return batch, tables, stages


@settings(max_examples=300, deadline=None)
@given(chains(), st.integers(1, 6), st.integers(1, 200))
def test_a_pass_is_its_joins(chain: tuple[list[Key], list[Table], list[Stage]], at_once: int, size: int) -> None:
    """Each row has the results of the joins in their order, however many are done at once; no row is looked up twice."""
    batch, tables, stages = chain
    lookups = [FakeLookup(t, s.lookup, b"version %d %d" % s.version) for t, s in zip(tables, stages, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        given = iter(lookups)
        patch.setattr(lookup_pass, "open_lookup", lambda spec, session: next(given))
        patch.setattr(lookup_pass, "_RESULTS_AT_ONCE", at_once)
        patch.setattr(lookup_pass, "_BYTES_AT_ONCE", size)
        whole = LookupPass(PassSpec(tuple(stages), many=True), {})
        tokens = [join_tokens([b"version %d %d" % (n, m) for m in range(2)]) for n in range(2)]
        versions = [pa.array([token] * len(batch), pa.binary()) for token in tokens]
        columns = [pa.array([row[n] for row in batch], pa.int64()) for n in range(2)]
        parts = list(whole.answers(columns, versions, [None] * len(stages)))
    for part in parts:
        part.validate(full=True)
        assert part.type == whole.type
        assert len(part.values) <= at_once or len(part) == 1
    names = [field.name for lookup in lookups for field in lookup.fields]
    found = [answer for part in parts for answer in part]
    marked = not names or any(stage.how != "left" for stage in stages)
    alone = len(stages) == 1 and stages[0].how == "left"
    for mine, theirs in zip(found, joined(batch, tables, stages), strict=True):
        rows = [tuple(value.as_py() for value in row.values()) for row in mine] if mine.as_py() else []
        if alone and not rows:
            assert theirs == [(None,) * len(names)]
        else:
            assert rows == [(*row, *([True] if marked else [])) for row in theirs]
    assert [field.name for field in whole.type.value_type] == [*names, *([FOUND_COLUMN] if marked else [])]
    assert lookups[0].asked == len(batch)


def test_versions_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of rows with the same versions is looked up in them."""
    asked: list[tuple[bytes, list[int]]] = []

    class Lookup(FakeLookup):
        def find(self, keys: Sequence[pa.Array], token: bytes, execution: object) -> LookupRows:
            asked.append((token, keys[0].to_pylist()))
            return LookupRows(np.arange(len(keys[0])), [keys[0]])

    spec = LookupSpec({}, pa.schema([("k", pa.int64())]), pa.schema([("c", pa.int64())]), ("c",))
    monkeypatch.setattr(lookup_pass, "open_lookup", lambda spec, session: Lookup(Table(1, {}, None), spec, b""))
    whole = LookupPass(PassSpec((Stage(spec, (0,), (1, 0), "left"),), many=True), {})
    versions = [pa.array([b"a", b"a", b"b", b"b", b"b"]), pa.array([b"x", b"x", b"x", b"y", b"y"])]
    parts = list(whole.answers([pa.array([1, 2, 3, 4, 5])], versions, [None]))
    assert asked == [(b"x", [1, 2]), (b"x", [3]), (b"y", [4, 5])]
    assert [answer for part in parts for answer in part.to_pylist()] == [[{"c": n}] for n in range(1, 6)]


def test_results_with_much_text_are_given_out_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that one lookup finds, and another repeats, is bounded by its bytes, not only by how often it is repeated."""

    class Lookup(FakeLookup):
        def find(self, keys: Sequence[pa.Array], token: bytes, execution: object) -> LookupRows:
            places = np.repeat(np.arange(len(keys[0])), 1 if self.fields[0].name == "text" else 10)
            texts = pa.array(["x" * (1000 if key == 7 else 10) for key in keys[0].to_pylist()])
            return LookupRows(places, [texts if self.fields[0].name == "text" else pa.array(places)])

    specs = [LookupSpec({}, pa.schema([("k", pa.int64())]), pa.schema([(c, pa.int64())]), (c,)) for c in ("text", "n")]
    monkeypatch.setattr(lookup_pass, "open_lookup", lambda spec, session: Lookup(Table(1, {}, None), spec, b""))
    monkeypatch.setattr(lookup_pass, "_BYTES_AT_ONCE", 3000)
    monkeypatch.setattr(LookupPass, "_shape", lambda self, arguments, results: results)
    whole = LookupPass(PassSpec(tuple(Stage(spec, (0,), (0, 0), "left") for spec in specs), many=True), {})
    keys = [*range(40)]
    parts: list[Any] = list(whole.answers([pa.array(keys)], [pa.array([b"a"] * 40)], [None, None]))
    assert [row for part in parts for row in part.rows.tolist()] == [key for key in keys for _ in range(10)]
    sizes = {tuple(range(part.first, part.last)): int(part.bytes.sum()) for part in parts}
    assert sizes.pop((7,)) > 10_000  # a row stays together
    assert max(sizes.values()) <= 3000
    assert len(parts) <= 6


def test_a_row_that_spark_could_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one row has found, or several lookups of it have multiplied, is an error that names its keys; what is before it is given out."""

    class Lookup(FakeLookup):
        @property
        def fields(self) -> list[pa.Field]:
            return [pa.field(name, pa.string()) for name in self._spec.names]

        def find(self, keys: Sequence[pa.Array], token: bytes, execution: object) -> LookupRows:
            places = np.repeat(np.arange(len(keys[0])), [20 if key == 7 else 1 for key in keys[0].to_pylist()])
            return LookupRows(places, [pa.array(["x" * 100] * len(places))])

    def given_out(names: Sequence[str], row_bytes: int = 2**31) -> list[int]:
        specs = [LookupSpec({}, pa.schema([("k", pa.int64())]), pa.schema([(c, pa.string())]), (c,)) for c in names]
        monkeypatch.setattr(lookup_pass, "open_lookup", lambda spec, session: Lookup(Table(1, {}, None), spec, b""))
        whole = LookupPass(PassSpec(tuple(Stage(spec, (0,), (0, 0), "left") for spec in specs), many=True), {})
        counts: list[int] = []
        with (
            pytest.raises(NotSupportedError, match=r"400 rows|20 rows")
            if row_bytes < 2**31
            else nullcontext() as raised
        ):
            for part in whole.answers([pa.array([1, 2, 7, 3])], [pa.array([b"a"] * 4)], [None] * len(specs), row_bytes):
                counts += [len(row) for row in part.to_pylist()]
        assert raised is None or re.search(r"have one key, here k = 7: .* at most [0-9,]+ .*memory", str(raised.value))
        return counts

    assert given_out(["a"]) == [1, 1, 20, 1]
    assert given_out(["a"], row_bytes=1500) == [1, 1]
    assert given_out(["a", "b"]) == [1, 1, 400, 1]
    assert given_out(["a", "b"], row_bytes=50_000) == [1, 1]


@given(st.lists(st.binary(max_size=1000).map(lambda rest: b"V" + rest), min_size=1, max_size=5))
def test_tokens_come_back_as_they_were_joined(tokens: list[bytes]) -> None:
    assert split_tokens(join_tokens(tokens)) == tokens
