"""What every reader must answer: each file is read by itself, by pyarrow, and the documented rules are applied row by row.

Nothing of the package is used here.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from tests.models.modelled import Modelled
from tests.models.tables import Place
from tests.models.values import ImpossibleError, converted, finished, plain, shown, united

Row = dict[str, Any]
_NONE = pa.schema([])
_PREDICATES: dict[str, tuple[set[str], Callable[[Row], bool]]] = {
    "v >= 3 AND v <> 5": ({"v"}, lambda row: row["v"] is not None and row["v"] >= 3 and row["v"] != 5),
    "v IS NULL OR v < 4": ({"v"}, lambda row: row["v"] is None or row["v"] < 4),
    "c IS NOT NULL": ({"c"}, lambda row: row["c"] is not None),
    "v IN (1, 2, 3) AND NOT c IS NULL": ({"v", "c"}, lambda row: row["v"] in (1, 2, 3) and row["c"] is not None),
    "s > 0": ({"s"}, lambda row: row["s"] is not None and row["s"] > 0),
}


@dataclasses.dataclass(frozen=True)
class Question:
    """What a reader is told beside the path; "" and () for nothing."""

    keys: tuple[str, ...]
    partition: str = ""
    columns: tuple[str, ...] = ()
    where: str = ""
    version: str = ""

    @property
    def options(self) -> dict[str, str]:
        """The question as options."""
        given = {**vars(self), "keys": ",".join(self.keys), "columns": ",".join(self.columns)}
        return {f"lookup.{name}": value for name, value in given.items() if value}


@dataclasses.dataclass(frozen=True)
class Expected:
    """An answer: columns in their order, and rows in the order of the files (`ordered`) or in any. Or why there is none."""

    schema: pa.Schema
    rows: tuple[Row, ...] = ()
    keyed: tuple[Row, ...] = ()
    """The rows with the key columns as well, which lookups show."""
    types: Mapping[str, pa.DataType] = dataclasses.field(default_factory=dict)
    problem: str = ""
    ordered: bool = True


@dataclasses.dataclass(frozen=True)
class Content:
    """What is at a path: rows with all columns; `chosen` says which rows `lookup.partition` leaves."""

    data: pa.Schema = _NONE
    partitions: pa.Schema = _NONE
    files: tuple[tuple[Row, tuple[Row, ...]], ...] = ()
    """For each file the values of its directories, and its rows with these."""
    conflicts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Columns of which no type holds the values of all files, which are null here: only a reader that leaves them out has an answer."""
    problem: str = ""
    busy: bool = False
    modelled: bool = False
    """A table of rows, which come in no order."""

    @functools.cached_property
    def everything(self) -> pa.Schema:
        """All columns: those of the files, then those of the directories that the files do not have."""
        return pa.schema([*self.data, *(field for field in self.partitions if field.name not in self.data.names)])

    def answer(self, question: Question) -> Expected:
        """What a reader with these options must answer."""
        try:
            return self._answer(question)
        except ImpossibleError as problem:
            return Expected(_NONE, problem=str(problem))

    def _answer(self, question: Question) -> Expected:
        if self.problem:
            raise ImpossibleError(self.problem)
        schema = self.everything
        tested, holds = _PREDICATES.get(question.where, (set(), lambda row: True))
        for name in (*question.keys, *question.columns, *tested):
            if name not in schema.names:
                raise ImpossibleError(f"no column {name}")
        for name in (*question.keys, *(question.columns or schema.names), *tested):
            if name in self.conflicts:
                raise ImpossibleError(self.conflicts[name])
        if "v" in tested and pa.types.is_string(schema.field("v").type):
            raise ImpossibleError("text is not compared with numbers")
        rows = [row for row in self._chosen(question) if holds(row)]
        names = list(question.columns or schema.names)
        shown_keys = [*question.keys, *(name for name in names if name not in question.keys)]
        return Expected(
            pa.schema([schema.field(name) for name in names]),
            tuple({name: row[name] for name in names} for row in rows),
            tuple({name: row[name] for name in shown_keys} for row in rows),
            {field.name: field.type for field in schema},
            ordered=not self.modelled,
        )

    def _chosen(self, question: Question) -> list[Row]:
        """The rows of `lookup.partition`."""
        files = list(self.files)
        if question.partition:
            if not self.partitions.names:
                raise ImpossibleError("no partitions")
            if question.partition == "max_pt()":
                for name in self.partitions.names:
                    known = [values[name] for values, _ in files if values[name] is not None]
                    latest = max(known) if known else None
                    files = [file for file in files if file[0][name] == latest]
            else:
                for pair in question.partition.split(","):
                    name, raw = pair.split("=", 1)
                    value = _partition_value(unquoted(raw), self.partitions.field(name).type)
                    files = [file for file in files if file[0][name] == value]
        return [row for _, rows in files for row in rows]


def unquoted(raw: str) -> str | None:
    """A directory's value, as text."""
    return None if raw == "__HIVE_DEFAULT_PARTITION__" else unquote(raw)


def content_of(place: Place) -> Content:
    """What is there now."""
    if place.modelled is not None:
        return modelled_content(place.modelled, place.modelled.schema, place.modelled.rows)
    try:
        return _plain_content(place)
    except ImpossibleError as problem:
        return Content(problem=str(problem), busy=place.busy)


def modelled_content(table: Modelled, schema: pa.Schema, rows: tuple[Row, ...]) -> Content:
    """What is in such a table if it has these rows."""
    names = table.texts if table.partitioned else []
    files: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        files.setdefault(tuple(row[name] for name in names), []).append(row)
    parts = tuple((dict(zip(names, values, strict=True)), tuple(part)) for values, part in files.items())
    return Content(schema, pa.schema([(name, pa.string()) for name in names]), parts, modelled=True)


def _plain_content(place: Place) -> Content:
    found = list(place.walk())
    if not found:
        raise ImpossibleError("no files")
    names = {tuple(name for name, _ in values) for _, values in found}
    if len(names) > 1:
        raise ImpossibleError("files in different partition columns")
    files = [_read(path) for path, _ in found]
    types: dict[str, pa.DataType] = {}
    conflicts: dict[str, str] = {}
    for schema, _, _ in files:
        for field in schema:
            kind = shown(field.type)
            try:
                types[field.name] = united(types[field.name], kind) if field.name in types else kind
            except ImpossibleError as problem:
                conflicts[field.name] = str(problem)
    types |= dict.fromkeys(conflicts, pa.null())
    data = pa.schema([(name, finished(kind)) for name, kind in types.items()])
    partitions = _partition_schema([dict(values) for _, values in found])
    content = []
    for (_, values), (_, rows, instants) in zip(found, files, strict=True):
        own = {name: _partition_value(value, partitions.field(name).type) for name, value in values}
        columns = [(field.name, field.type, field.name in instants) for field in data if field.name not in conflicts]
        content.append(
            (
                own,
                tuple(
                    {
                        **dict.fromkeys(conflicts),
                        **{n: converted(row.get(n), kind, utc) for n, kind, utc in columns},
                        **own,
                    }
                    for row in rows
                ),
            )
        )
    return Content(data, partitions, tuple(content), conflicts, busy=place.busy)


# --- files ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _read_version(path: Path, identity: tuple[int, ...]) -> tuple[pa.Schema, list[Row], set[str]]:
    if path.suffix == ".json":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        names = dict.fromkeys(name for row in rows for name in row)
        return pa.schema([(name, _json_type([row.get(name) for row in rows])) for name in names]), rows, set()
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            leaves = [file.metadata.schema.column(number) for number in range(file.metadata.num_columns)]
            instants = {leaf.path.split(".")[0] for leaf in leaves if leaf.physical_type == "INT96"}
            table = file.read()
    else:
        with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as reader:
            table, instants = reader.read_all(), set()
    fields = [
        pa.field(f.name, pa.timestamp("us", "UTC")) if f.name in instants and pa.types.is_timestamp(f.type) else f
        for f in table.schema
    ]
    columns = [column.to_pylist() for column in table.columns]
    rows = [dict(zip(table.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]
    return pa.schema(fields), rows, instants


def _read(path: Path) -> tuple[pa.Schema, list[Row], set[str]]:
    """(its columns, its rows, columns whose times are instants without saying so)."""
    status = path.stat()
    return _read_version(path, (status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size))


def _json_type(values: list[Any]) -> pa.DataType:
    """The type of JSON values, of which only plain ones are written: no dates, no numbers of two kinds in one file."""
    known = [value for value in values if value is not None]
    if not known:
        return pa.null()
    first = known[0]
    if isinstance(first, dict):
        return pa.struct([(name, _json_type([value[name] for value in known])) for name in first])
    if isinstance(first, list):
        return pa.list_(pa.field("element", _json_type([item for value in known for item in value])))
    return {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}[type(first)]


# --- directories ----------------------------------------------------------------------------------


def _partition_schema(values: list[dict[str, str | None]]) -> pa.Schema:
    names = list(values[0])
    return pa.schema([(name, _partition_type({row[name] for row in values} - {None})) for name in names])


def _partition_type(values: set[Any]) -> pa.DataType:
    """Whole numbers are int, bigint or a decimal, ISO dates dates, other numbers doubles, and all else is text."""
    if not values:
        return pa.string()
    whole = [int(value) for value in values if _is_whole(value)]
    small = all(-(2**31) <= number < 2**31 for number in whole)
    if len(whole) == len(values):
        if small:
            return pa.int32()
        if all(-(2**63) <= number < 2**63 for number in whole):
            return pa.int64()
        return pa.decimal128(max(len(str(abs(number))) for number in whole), 0)
    if all(_is_date(value) for value in values):
        return pa.date32()
    return pa.float64() if small and all(_is_number(value) for value in values) else pa.string()


def _is_whole(text: str) -> bool:
    return re.fullmatch(r"[+-]?[0-9]{1,38}", text) is not None


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text) is not None


def _is_date(text: str) -> bool:
    try:
        return len(text) == 10 and datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _partition_value(text: str | None, kind: pa.DataType) -> Any:
    if text is None or pa.types.is_string(kind):
        return text
    whole = pa.types.is_integer(kind) or pa.types.is_decimal(kind)
    fits = _is_whole(text) if whole else _is_date(text) if pa.types.is_date(kind) else _is_number(text)
    if pa.types.is_integer(kind) and fits:
        fits = -(2 ** (kind.bit_width - 1)) <= int(text) < 2 ** (kind.bit_width - 1)
    if not fits:
        raise ImpossibleError(f"{text} is not a valid {kind}")
    if pa.types.is_date(kind):
        return datetime.date.fromisoformat(text)
    return int(text) if pa.types.is_integer(kind) else converted(int(text) if whole else text, kind)


def found_by(expected: Expected, keys: tuple[str, ...], wanted: list[tuple[Any, ...]]) -> list[Row]:
    """The rows of each wanted key, with its number; a key with a null has none."""
    by_key: dict[str, list[Row]] = {}
    for row in expected.keyed:
        by_key.setdefault(plain([row[name] for name in keys]), []).append(row)
    found = ((number, by_key.get(plain(list(key)), [])) for number, key in enumerate(wanted) if None not in key)
    return [{**row, "key_index": number} for number, rows in found for row in rows]
