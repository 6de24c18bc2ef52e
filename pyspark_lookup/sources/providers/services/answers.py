"""`AnswerReader`: the rows in the JSON of an answer."""

from __future__ import annotations

import decimal
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.core.decoding import UNREADABLE, show
from pyspark_lookup.scan.formats.text import check_depth, json_column


def decode_json(content: bytes) -> Any:
    """The value of a JSON text. Numbers are ints and Decimals. Raises ValueError for a text that is not JSON, that has a name twice in one
    object, or whose values are nested deeper than columns may be."""
    check_depth(content)
    try:
        return json.loads(
            content, parse_float=decimal.Decimal, parse_constant=_refuse, object_pairs_hook=_object_of_pairs
        )
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        name = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the name {show(name)} twice")
    return values


class AnswerReader:
    """Reads the rows of answers. `schema`: the columns. `rows`: a JMESPath expression that selects the rows; None: the answer is a row or a list of
    rows. `keys`: the key columns."""

    def __init__(self, schema: pa.Schema, rows: str | None, keys: tuple[str, ...]) -> None:
        self.schema = schema
        self._keys = keys
        self._rows = rows
        self._search = None if rows is None else compile_path(rows)

    def read(self, content: bytes, key: Mapping[str, pa.Scalar] | None) -> pa.Table:
        """The rows in an answer. `key`: the only key that was requested, which a row need not repeat; None: each row has its key.

        Raises ValueError for an answer that has no such rows, SchemaError for a value that is not of its column's type.
        """
        value = decode_json(content)
        if self._search is not None:
            try:
                value = self._search(value)
            except Exception as problem:  # an error of the expression, such as a function of a value of another type
                raise ValueError(f"lookup.http.rows = {self._rows!r} fails: {problem}") from None
        rows = [row for row in (value if isinstance(value, list) else [value]) if row is not None]
        for row in rows:
            if not isinstance(row, dict):
                raise ValueError(f'{show(row)} is not a JSON object: each row must be one, such as {{"id": 1}}')
        columns = []
        for field in self.schema:
            values = [_get(row, field.name) for row in rows]
            column = json_column(values, field.type)
            if field.name in self._keys:
                column = pc.coalesce(column, key[field.name]) if key is not None else column
                if column.null_count:
                    raise ValueError(f"a row has no {field.name}, a column of the key")
            columns.append(column)
        return pa.Table.from_arrays(columns, schema=self.schema)


def _get(row: dict[str, Any], name: str) -> Any:
    """The value with this name in a row; if there is none, the one whose name differs only in letter case."""
    if name in row:
        return row[name]
    return next((value for other, value in row.items() if other.lower() == name.lower()), None)


def compile_path(text: str) -> Any:
    """A function that evaluates a JMESPath expression. Raises ValueError for any other text."""
    import jmespath
    from jmespath.exceptions import JMESPathError

    try:
        return jmespath.compile(text).search
    except (JMESPathError, *UNREADABLE) as problem:
        place = getattr(problem, "lex_position", getattr(problem, "lexer_position", None))
        raise ValueError(
            "a JMESPath expression"
            if place is None
            else f"a JMESPath expression; this one has an error at character {place + 1}"
        ) from None
