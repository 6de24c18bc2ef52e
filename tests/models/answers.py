"""What readers are asked, and what they must answer. Nothing of the package is used here."""

import dataclasses
import datetime
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from tests.models.values import ImpossibleError, converted, plain

Row = dict[str, Any]
_NONE = pa.schema([])


@dataclasses.dataclass(frozen=True)
class Condition:
    """A `lookup.where`: its text, the columns that it compares, and a function that says whether a row meets it."""

    text: str
    columns: frozenset[str]
    holds: Callable[[Row], bool] = dataclasses.field(compare=False)


CONDITIONS = {
    text: Condition(text, frozenset(columns.split()), holds)
    for text, columns, holds in (
        ("v >= 3 AND v <> 5", "v", lambda row: row["v"] is not None and row["v"] >= 3 and row["v"] != 5),
        ("v IS NULL OR v < 4", "v", lambda row: row["v"] is None or row["v"] < 4),
        ("c IS NOT NULL", "c", lambda row: row["c"] is not None),
        ("v IN (1, 2, 3) AND NOT c IS NULL", "v c", lambda row: row["v"] in (1, 2, 3) and row["c"] is not None),
        ("s > 0", "s", lambda row: row["s"] is not None and row["s"] > 0),
    )
}
"""The conditions that a history draws from, by their texts."""


@dataclasses.dataclass(frozen=True)
class Question:
    """The options of a reader. `more`: those that have no field here."""

    keys: tuple[str, ...]
    partition: str = ""
    columns: tuple[str, ...] = ()
    where: Condition | None = None
    more: tuple[tuple[str, str], ...] = ()

    @property
    def options(self) -> dict[str, str]:
        """The question as options."""
        where = self.where.text if self.where else ""
        texts = {
            "keys": ",".join(self.keys),
            "columns": ",".join(self.columns),
            "partition": self.partition,
            "where": where,
        }
        return {f"lookup.{name}": text for name, text in texts.items() if text} | dict(self.more)


@dataclasses.dataclass(frozen=True)
class Expected:
    """An answer: its columns in order, and its rows, in the order of the files if it is `ordered`. Or why there is none."""

    schema: pa.Schema
    rows: tuple[Row, ...] = ()
    keyed: tuple[Row, ...] = ()
    """The same rows, with the key columns, which lookups return."""
    types: Mapping[str, pa.DataType] = dataclasses.field(default_factory=dict)
    problem: str = ""
    ordered: bool = True

    def rows_of(self, keys: tuple[str, ...], requested: list[tuple[Any, ...]]) -> list[Row]:
        """The rows of each requested key, with its number. A key with a null has no rows."""
        by_key: dict[str, list[Row]] = {}
        for row in self.keyed:
            by_key.setdefault(plain([row[name] for name in keys]), []).append(row)
        pairs = ((number, by_key.get(plain(list(key)), [])) for number, key in enumerate(requested) if None not in key)
        return [{**row, "key_index": number} for number, rows in pairs for row in rows]


@dataclasses.dataclass(frozen=True)
class Content:
    """What is at a path: rows with all columns; `lookup.partition` chooses among the files."""

    data: pa.Schema = _NONE
    partitions: pa.Schema = _NONE
    files: tuple[tuple[Row, tuple[Row, ...]], ...] = ()
    """(values of its partition, rows with these values) of each file."""
    conflicts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Columns for which no type holds the values of all files. They are null here: only a reader that leaves them out gets an answer."""
    problem: str = ""
    busy: bool = False
    ordered: bool = False
    """Whether rows have the order of their files."""

    @functools.cached_property
    def everything(self) -> pa.Schema:
        """All columns: those of the files, then those of the directories that the files do not have."""
        return pa.schema([*self.data, *(field for field in self.partitions if field.name not in self.data.names)])

    @functools.cached_property
    def rows(self) -> list[Row]:
        return [row for _, rows in self.files for row in rows]

    def answer(self, question: Question) -> Expected:
        """What a reader with these options must answer."""
        try:
            return self._answer(question)
        except ImpossibleError as problem:
            return Expected(_NONE, problem=str(problem))

    def _answer(self, question: Question) -> Expected:
        if self.problem:
            raise ImpossibleError(self.problem)
        schema, where = self.everything, question.where
        compared = where.columns if where else frozenset[str]()
        for name in (*question.keys, *question.columns, *compared):
            if name not in schema.names:
                raise ImpossibleError(f"no column {name}")
        for name in (*question.keys, *(question.columns or schema.names), *compared):
            if name in self.conflicts:
                raise ImpossibleError(self.conflicts[name])
        if "v" in compared and pa.types.is_string(schema.field("v").type):
            raise ImpossibleError("text is not compared with numbers")
        rows = [row for row in self._chosen(question) if where is None or where.holds(row)]
        names = list(question.columns or schema.names)
        with_keys = [*question.keys, *(name for name in names if name not in question.keys)]
        return Expected(
            pa.schema([schema.field(name) for name in names]),
            tuple({name: row[name] for name in names} for row in rows),
            tuple({name: row[name] for name in with_keys} for row in rows),
            {field.name: field.type for field in schema},
            ordered=self.ordered,
        )

    def _chosen(self, question: Question) -> list[Row]:
        """The rows of `lookup.partition`."""
        files = list(self.files)
        if question.partition and not self.partitions.names:
            raise ImpossibleError("no partitions")
        if question.partition == "max_pt()":
            for name in self.partitions.names:
                partition_values = [values[name] for values, _ in files if values[name] is not None]
                latest = max(partition_values) if partition_values else None
                files = [file for file in files if file[0][name] == latest]
        elif question.partition:
            for pair in question.partition.split(","):
                name, raw = pair.split("=", 1)
                if name not in self.partitions.names:
                    raise ImpossibleError(f"no partition column {name}")
                value = partition_value(unquoted(raw), self.partitions.field(name).type)
                files = [file for file in files if file[0][name] == value]
        return [row for _, rows in files for row in rows]


def known_content(schema: pa.Schema, rows: Iterable[Row], partitions: Iterable[str] = ()) -> Content:
    """The content of a table that has these rows, and is partitioned by some of its columns."""
    names = tuple(partitions)
    files: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        files.setdefault(tuple(row[name] for name in names), []).append(row)
    parts = tuple((dict(zip(names, values, strict=True)), tuple(part)) for values, part in files.items())
    return Content(schema, pa.schema([schema.field(name) for name in names]), parts)


def unquoted(raw: str) -> str | None:
    """A directory's value, as text."""
    return None if raw == "__HIVE_DEFAULT_PARTITION__" else unquote(raw)


def partition_value(text: str | None, kind: pa.DataType) -> Any:
    """A directory's value in the type of its column."""
    if text is None or pa.types.is_string(kind):
        return text
    whole = pa.types.is_integer(kind) or pa.types.is_decimal(kind)
    fits = is_whole(text) if whole else is_date(text) if pa.types.is_date(kind) else is_number(text)
    if pa.types.is_integer(kind) and fits:
        fits = -(2 ** (kind.bit_width - 1)) <= int(text) < 2 ** (kind.bit_width - 1)
    if not fits:
        raise ImpossibleError(f"{text} is not a valid {kind}")
    if pa.types.is_date(kind):
        return datetime.date.fromisoformat(text)
    return int(text) if pa.types.is_integer(kind) else converted(int(text) if whole else text, kind)


def is_whole(text: str) -> bool:
    return re.fullmatch(r"[+-]?[0-9]{1,38}", text) is not None


def is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text) is not None


def is_date(text: str) -> bool:
    try:
        return len(text) == 10 and datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
