"""Reads the columns of CSV and JSON files, in inferred types or in types that the caller names.

A JSON file consists of objects, or is one array of objects. pyarrow reads each file that it can read without a loss. Python's standard library,
which is much slower, reads all other files: arrays, numbers beyond pyarrow's types, and columns with values of several types.
"""

from __future__ import annotations

import codecs
import dataclasses
import decimal
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

from pyspark_lookup.columnar.types import MOST_NESTED, cast_exactly, spark_schema, split_type, with_parts
from pyspark_lookup.errors import OptionError, SchemaError
from pyspark_lookup.options.groups import CsvOptions
from pyspark_lookup.scan.formats.inference import (
    BOOLEAN,
    EXACT_INTEGER,
    MANY_DIGITS,
    NOTHING,
    TEXT,
    Inferred,
    Number,
    convert,
    infer_texts,
    infer_times,
    is_exact,
)

_BOM = b"\xef\xbb\xbf"
_BLANKS = bytes(range(33))


class CsvFile:
    """The columns of a CSV file. `infer` returns what a column's values show of its type, `column` returns the values in a given type.

    `declared`: the names of the columns that the user declares, for files without a header; None: none are declared. Raises ArrowInvalid or
    ValueError for a file that cannot be parsed.
    """

    def __init__(self, content: bytes, options: CsvOptions, url: str, declared: list[str] | None) -> None:
        self._options = options
        self._texts = _texts(content, options, url, declared)
        self.names: list[str] = self._texts.schema.names

    def infer(self, name: str, by_value: bool = False) -> Inferred:
        """The inferred type of a column. If `lookup.csv.infer-schema` is false: text, or `NOTHING` if all values are null. `by_value`: as in
        `infer_texts`."""
        if not self._options.infer_schema:
            return NOTHING if self._column(name).null_count == self.rows else TEXT
        return infer_texts(self._column(name), by_value)

    def column(self, name: str, kind: pa.DataType) -> pa.Array:
        """A column's values in the type `kind`. Raises a SchemaError that quotes a value that is not of this type."""
        return convert(self._column(name), kind)

    @property
    def rows(self) -> int:
        return int(self._texts.num_rows)

    def _column(self, name: str) -> pa.Array:
        return self._texts.column(name).combine_chunks()


def _texts(content: bytes, options: CsvOptions, url: str, declared: list[str] | None) -> pa.Table:
    if options.encoding != "utf-8":
        content = content.decode(options.encoding).encode()
    content = content.removeprefix(_BOM)
    if options.quote:
        if options.escape is None:
            _check_doubled(content, options, url)
        content = _double(content, options)
    if not content.endswith((b"\n", b"\r")):
        content += b"\n"  # pyarrow refuses a header line that has no line break
    content = _without_blank_lines(content, options)
    if not content:
        return pa.table({})  # when Spark writes no rows, it writes an empty file
    one_block = max(len(content) + 1, 1024)
    parse = pa.csv.ParseOptions(
        delimiter=options.sep, quote_char=options.quote or False, double_quote=True, newlines_in_values=True
    )
    head = pa.csv.ReadOptions(block_size=one_block, autogenerate_column_names=not options.header)
    raw_names = pa.csv.open_csv(pa.BufferReader(_first_row(content, options)), head, parse).schema.names
    names = _name(raw_names, options.header, url, declared)
    # Raises an error for a name that occurs twice, before columns are requested by name.
    spark_schema(pa.schema([pa.field(name, pa.string()) for name in names]), url)
    read = pa.csv.ReadOptions(
        block_size=one_block, column_names=names, skip_rows_after_names=1 if options.header else 0
    )
    convert = pa.csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()),
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    try:
        table = pa.csv.read_csv(pa.BufferReader(content), read, parse, convert)
    except pa.ArrowInvalid as problem:
        if "invalid UTF8" not in str(problem):
            raise
        raise ValueError(
            f"it has bytes that are not valid {options.encoding} (if it is in another encoding, set lookup.csv.encoding)"
        ) from None
    if not options.null_value:
        return table
    nothing = pa.scalar(None, pa.string())
    columns = [pc.if_else(pc.equal(column, options.null_value), nothing, column) for column in table.columns]
    return pa.table(columns, names=names)


def _check_doubled(content: bytes, options: CsvOptions, url: str) -> None:
    """Raise OptionError if quoted text has a quote with a backslash in front, although without `lookup.csv.escape` quotes must be doubled."""
    quote, sep = (re.escape(text.encode()) for text in (options.quote, options.sep))
    # A quote after a backslash that is neither doubled nor at the end of the quoted text.
    escaped = re.compile(rb"\\" + quote + rb"(?!" + quote + rb"|[\r\n" + sep + rb"]|\Z)")
    if escaped.search(content) is None:
        return
    try:  # by the escapes that Spark writes: otherwise a text may seem to end before such a quote
        texts = _Quoting(dataclasses.replace(options, escape="\\")).texts(content)
        is_inside = any(escaped.search(content, begin, end) for begin, _, end in texts)
    except ValueError:  # the last one has no end
        is_inside = True
    if is_inside:
        raise OptionError(
            f"{url} has \\{options.quote} inside quoted text, as Spark writes it: set lookup.csv.escape = '\\' (or "
            f"'{options.quote}', if the file doubles quotes, and the backslash is part of the text)"
        )


class _Quoting:
    """Finds where quoted text begins and ends. Long text is matched in pieces of bounded length, so that matching takes bounded memory."""

    def __init__(self, options: CsvOptions) -> None:
        self.quote = options.quote.encode()
        self.escape = (options.escape or options.quote).encode()
        quote, escape, sep = (rb"\x%02x" % ord(mark) for mark in (self.quote, self.escape, options.sep.encode()))
        doubled = quote == escape
        self._begin = re.compile(rb"(?:(?<=[\r\n" + sep + rb"])|\A)" + quote)
        escaped = escape + (quote if doubled else rb"(?s:.)")
        ordinary = rb"[^" + quote + escape + rb"]*"
        self._piece = re.compile(ordinary + rb"(?:" + escaped + ordinary + rb"){0,1000}")
        self._escaped = re.compile(escape + rb"([" + quote + escape + rb"])")
        self._tail = re.compile(rb"[^\r\n" + sep + rb"]*")
        inner = rb"[^" + quote + escape + rb"]*" + (rb"(?:" + escaped + ordinary + rb")*" if doubled else rb"")
        field = rb"(?:[^\r\n" + quote + sep + rb"][^\r\n" + sep + rb"]*|" + quote + inner + quote + rb")?"
        self._plain = (rb"\A(?:" + field + rb"[\r\n" + sep + rb"])*" + field + rb"\z").decode()

    def is_plain(self, content: bytes) -> bool:
        """Whether each quoted text is a whole value, in which quotes are doubled. Most files are like that, and this check is fast."""
        if self.quote not in content:
            return True
        buffers = [None, pa.array([0, len(content)], pa.int64()).buffers()[1], pa.py_buffer(content)]
        text = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, buffers)
        return bool(pc.match_substring_regex(text, self._plain)[0].as_py())

    def texts(self, content: bytes) -> Iterator[tuple[int, int, int]]:
        """For each value that begins with a quote: the positions of that quote, of the closing quote and of the value's end."""
        end = 0
        while (begin := self._begin.search(content, end)) is not None:
            close = begin.end()
            while True:
                close = self._piece.match(content, close).end()  # type: ignore[union-attr]
                if content[close : close + 1] != self.quote:
                    if close >= len(content) - 1:
                        raise _problem(content, begin.start(), "has no end")
                elif self.quote != self.escape or content[close + 1 : close + 2] != self.quote:
                    break
            end = self._tail.match(content, close + 1).end()  # type: ignore[union-attr]
            yield begin.start(), close, end

    def unescape(self, text: bytes) -> bytes:
        """Quoted text without its escape characters. An escape character before an ordinary character stays, as in Spark."""
        return self._escaped.sub(rb"\1", text) if self.escape in text else text


def _double(content: bytes, options: CsvOptions) -> bytes:
    """The file's content, rewritten so that each quoted text is a whole value, in which quotes are doubled. The values are those that Spark reads.

    Blanks after a closing quote are dropped. If other text follows a closing quote, all quotes of the value are ordinary characters. Raises
    ValueError if such a value spans several lines, because these may be several rows, or if its quotes can be read in several ways.
    """
    quoting = _Quoting(options)
    if quoting.is_plain(content):
        return content
    quote = quoting.quote
    parts, last_end = [], 0
    for begin, close, end in quoting.texts(content):
        text, tail = quoting.unescape(content[begin + 1 : close]), content[close + 1 : end]
        if tail.strip(_BLANKS):
            if re.search(rb"[\r\n]", text) or (
                quoting.escape != quote and (tail[:1] == quote or quoting.escape in tail)
            ):
                raise _problem(content, begin, f"is followed by {_show_text(tail)} instead of the next value")
            text = quote + text + quote + tail
        elif quoting.escape == quote and not tail:
            continue
        parts += [content[last_end:begin], quote, text.replace(quote, quote * 2), quote]
        last_end = end
    return b"".join([*parts, content[last_end:]])


def _problem(content: bytes, begin: int, problem: str) -> ValueError:
    """An error about the quoted text at position `begin`. `problem`: what is wrong with it."""
    line = content.count(b"\n" if b"\n" in content else b"\r", 0, begin) + 1
    return ValueError(
        f"line {line}: quoted text {problem}: {_show_text(content[begin:])} (set lookup.csv.quote = '' if quotes are ordinary "
        "characters there, or lookup.csv.escape if another character escapes them)"
    )


def _show_text(text: bytes) -> str:
    return repr(text[:40].decode(errors="replace"))


def _first_row(content: bytes, options: CsvOptions) -> bytes:
    """The file's first row, which may have the names of the columns; the whole content if it is not clear where the row ends."""
    quote = re.escape(options.quote.encode())
    row = rb"(?:[^\r\n" + quote + rb"]+|" + quote + rb"[^" + quote + rb"]*" + quote + rb")*" if quote else rb"[^\r\n]*"
    match = re.match(row + rb"\r?\n?", content)
    assert match is not None
    return match[0] if match[0].endswith((b"\r", b"\n")) else content


def _without_blank_lines(content: bytes, options: CsvOptions) -> bytes:
    """The file's content without the lines that Spark skips. Empty lines after the first row stay: pyarrow skips them itself.

    Spark skips empty lines, and lines that consist of blanks. A line that contains the separator is a row, even if the separator is a tab or
    a space. Lines inside quoted text stay.
    """
    blank = b"[" + b"".join(b"\\x%02x" % code for code in _BLANKS if code not in b"\r\n" + options.sep.encode()) + b"]"
    content = content[re.match(rb"(?:" + blank + rb"*[\r\n])*", content).end() :]  # type: ignore[union-attr]
    if not any(re.search(line_end + blank, content) for line_end in (b"\n", b"\r")):
        return content  # most files end here: these two searches are ten times as fast as the substitution below
    of_blanks = re.compile(rb"(?<=[\r\n])" + blank + rb"+(?=[\r\n])")
    if of_blanks.search(content) is None or not options.quote:
        return of_blanks.sub(b"", content)
    parts, last_end = [], 0
    for begin, _, end in _Quoting(dataclasses.replace(options, escape=None)).texts(content):
        parts += [of_blanks.sub(b"", content[last_end:begin]), content[begin:end]]
        last_end = end
    return b"".join([*parts, of_blanks.sub(b"", content[last_end:])])


def _name(raw_names: list[str], header: bool, url: str, declared: list[str] | None) -> list[str]:
    """The names of the columns. As in Spark, a column without a name gets the name `_c` with its position, such as `_c0`."""
    if header:
        return [name or f"_c{number}" for number, name in enumerate(raw_names)]
    if declared is None:
        return [f"_c{number}" for number in range(len(raw_names))]
    if len(declared) != len(raw_names):
        raise SchemaError(
            f"{url} has {len(raw_names)} columns and no header, but lookup.schema or .schema(…) has {len(declared)}: {', '.join(declared)}: "
            "declare all of them, in their order"
        )
    return declared


# A number that a double may not keep: it has 16 digits or an exponent.
_LONG_NUMBER = re.compile(rb"\d(?:\.?\d){15}|[0-9][eE]")
_LONGEST_INTEGER = 19
_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL)
_OPENING, _CLOSING, _QUOTE = b"[{", b"]}", b'"'
_STEPS = np.zeros(256, np.int8)  # for each byte, by how much it changes the depth of nesting
_STEPS[list(_OPENING)], _STEPS[list(_CLOSING)] = 1, -1
_UNNESTED = bytes(set(range(256)) - {*_OPENING, *_CLOSING, *_QUOTE})
_PART = 1024 * 1024  # bytes


class JsonFile:
    """The columns of a JSON file. `infer` returns what a column's values show of its type, `column` returns the values in a given type.

    Raises ValueError for a file that is not JSON.
    """

    def __init__(self, content: bytes) -> None:
        check_depth(content)
        content = content.removeprefix(codecs.BOM_UTF8)
        if _SURROGATE.search(content) is not None:
            # Half of a UTF-16 surrogate pair is no character: Spark reads a question mark instead.
            content = _ESCAPE.sub(lambda escape: b"?" if escape[1] else escape[0], content)
        self._content = content
        # Arrow's parser refuses an array, and ends the process if a null comes before the first object.
        self._table = _read_by_arrow(content) if content.lstrip()[:1] in (b"{", b"") else None
        self._objects: list[dict[str, Any]] | None = None
        self._columns: dict[str, list[Any]] = {}
        self.names: list[str] = self._table.schema.names if self._table is not None else list(self._all())

    @property
    def rows(self) -> int:
        return int(self._table.num_rows) if self._table is not None else len(self._objects or ())

    def infer(self, name: str, by_value: bool = False) -> Inferred:
        """The inferred type of a column. `by_value` has no effect: numbers in JSON always count by their values, however they are written."""
        if self._table is not None:
            return _infer_array(self._table.column(name).combine_chunks())
        return _infer(self._all()[name])

    def column(self, name: str, kind: pa.DataType) -> pa.Array:
        """A column's values in the type `kind`. Raises a SchemaError that quotes a value that is not of this type."""
        if self._table is not None:
            stored = self._table.column(name).combine_chunks()
            if stored.type == kind or pa.types.is_null(stored.type):
                return stored.cast(kind)
            if pa.types.is_string(stored.type) and not pa.types.is_nested(kind):
                return convert(stored, kind)
            numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
            if pa.types.is_integer(stored.type) and numbers:
                try:
                    return cast_exactly(stored, kind)
                except pa.ArrowInvalid as problem:
                    raise SchemaError(str(problem)) from None
        return json_column(self._all()[name], kind)

    def _all(self) -> dict[str, list[Any]]:
        """All values by column, as the standard library reads them. Numbers are kept as texts (`_Number`)."""
        if self._objects is None:
            self._objects = _objects(self._content)
            names = dict.fromkeys(name for row in self._objects for name in row)
            self._columns = {name: [row.get(name) for row in self._objects] for name in names}
        return self._columns


class _Number(str):
    """The text of a number in JSON, which differs in type from a string in JSON."""

    __slots__ = ()


def check_depth(content: bytes) -> None:
    """Raise ValueError if values are nested deeper than a column may be. Arrow's parser would end the process for a very deep value."""
    if sum(map(content.count, (b"[", b"{"))) <= MOST_NESTED:
        return
    if b"\\" in content:
        content = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(content.translate(None, _UNNESTED), np.uint8)
    depth, quotes = 0, np.uint8(0)
    for start in range(0, len(marks), _PART):
        part = marks[start : start + _PART]
        # May overflow: only the last bit counts, which is 1 inside a string.
        quoted = np.cumsum(part == _QUOTE[0], dtype=np.uint8)
        quoted += quotes
        steps = _STEPS[part]
        steps[(quoted & 1).view(np.bool_)] = 0
        depths = np.cumsum(steps, dtype=np.int32)
        if depth + int(depths.max()) > MOST_NESTED + 1:  # the row itself adds one level, or the array of all rows
            raise ValueError(f"its values are nested more than {MOST_NESTED} deep")
        depth, quotes = depth + int(depths[-1]), quoted[-1] & 1


def _read_by_arrow(content: bytes) -> pa.Table | None:
    """The columns of a file as pyarrow reads them, except that texts that look like times stay texts.

    None if pyarrow cannot read the file without a loss.
    """
    read = pa.json.ReadOptions(block_size=max(len(content) + 1, 1024))
    try:
        table = pa.json.read_json(pa.BufferReader(content), read, _parse(None))
        if any(_has(field.type, pa.types.is_timestamp) for field in table.schema):
            schema = pa.schema([field.with_type(_texts_for_times(field.type)) for field in table.schema])
            table = pa.json.read_json(pa.BufferReader(content), read, _parse(schema))
        table.validate(full=True)  # the reader lets texts through that are not UTF-8
    except pa.ArrowInvalid:
        return None  # the standard library reads it, or says what is wrong
    floats = any(_has(field.type, pa.types.is_floating) for field in table.schema)
    return None if floats and _LONG_NUMBER.search(content) else table


def _parse(schema: pa.Schema | None) -> pa.json.ParseOptions:
    return pa.json.ParseOptions(explicit_schema=schema, newlines_in_values=True, unexpected_field_behavior="infer")


def _has(kind: pa.DataType, test: Any) -> bool:
    return bool(test(kind)) or any(_has(kind.field(number).type, test) for number in range(kind.num_fields))


def _texts_for_times(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.string()
    shape, parts = split_type(kind)
    return kind if shape is None else with_parts(kind, list(map(_texts_for_times, parts)))


def _infer_array(array: pa.Array) -> Inferred:
    """What values that pyarrow has read show of their type. Values that are all null show only how the column is nested."""
    kind = array.type
    if array.null_count == len(array):
        return NOTHING if not pa.types.is_struct(kind) and not pa.types.is_list(kind) else _shape(kind)
    if pa.types.is_integer(kind):
        bounds = pc.min_max(array).as_py()
        largest = max(abs(bounds["min"]), abs(bounds["max"]))
        return Inferred("number", Number(len(str(largest)), (0, 0), True, False, True, largest <= EXACT_INTEGER))
    if pa.types.is_floating(kind):
        return Inferred("number", Number(0, (0, MANY_DIGITS), True, True, True, True))
    if pa.types.is_boolean(kind):
        return BOOLEAN
    if pa.types.is_list(kind):
        return Inferred("list", element=_infer_array(array.flatten()))
    if pa.types.is_struct(kind):
        parts = zip([field.name for field in kind], array.flatten(), strict=True)
        return Inferred("struct", fields=tuple((name, _infer_array(part)) for name, part in parts))
    return _times(array)


def _shape(kind: pa.DataType) -> Inferred:
    if pa.types.is_list(kind):
        return Inferred("list", element=_shape(kind.value_type))
    if pa.types.is_struct(kind):
        return Inferred("struct", fields=tuple((field.name, _shape(field.type)) for field in kind))
    return NOTHING


def _times(texts: pa.Array) -> Inferred:
    """The inferred type of JSON strings: instants if all are times with an offset, otherwise text.

    Numbers and booleans are not inferred from strings, because JSON has its own spelling for them.
    """
    texts = texts.drop_null()
    inferred = infer_times(texts) if len(texts) else NOTHING
    return TEXT if inferred.kind == "local" else inferred


# --- by the standard library ----------------------------------------------------------------------------


def _objects(content: bytes) -> list[dict[str, Any]]:
    text = content.decode()
    decode = json.JSONDecoder(parse_float=_Number, parse_int=_Number, parse_constant=_Number).raw_decode
    rows: list[Any] = []
    at = _next(text, 0)
    while at < len(text):
        value, at = decode(text, at)
        rows += value if isinstance(value, list) and not rows else [value]
        at = _next(text, at)
    for row in rows:
        if not isinstance(row, dict) and row is not None:
            raise ValueError(f"{_text(row)[:80]} is not a JSON object")
    return [{} if row is None else row for row in rows]  # as Arrow's parser and Spark take them


def _next(text: str, at: int) -> int:
    """The position of the next character that is not white space, or the end of the text."""
    space = _SPACE.match(text, at)
    return space.end() if space is not None else at


def _infer(values: list[Any]) -> Inferred:
    """What values that the standard library has read show of their type."""
    non_nulls = [value for value in values if value is not None]
    kinds = set(map(type, non_nulls))
    if len(kinds) != 1:
        return TEXT if kinds else NOTHING
    (kind,) = kinds
    if kind is bool:
        return BOOLEAN
    if kind is _Number:
        return Inferred("number", _number(non_nulls))
    if kind is list:
        return Inferred("list", element=_infer([value for part in non_nulls for value in part]))
    if kind is dict:
        names = dict.fromkeys(name for value in non_nulls for name in value)
        return Inferred("struct", fields=tuple((n, _infer([value.get(n) for value in non_nulls])) for n in names))
    return _times(pa.array(non_nulls, pa.string()))


def _number(texts: Iterable[str]) -> Number:
    joined: Number | None = None
    for text in texts:
        integer = text.lstrip("-").isdecimal()
        digits = len(text.lstrip("-")) if integer else 0
        value = int(text) if integer and digits <= _LONGEST_INTEGER else 2**64
        special = text.lstrip("-") in ("NaN", "Infinity")  # Spark accepts these, too
        exact = abs(value) <= EXACT_INTEGER if integer else special or is_exact(text)
        number = Number(
            digits,
            (0, 0) if integer else (0, MANY_DIGITS),
            integer,
            not integer,
            not integer or -(2**63) <= value < 2**63,
            exact,
        )
        joined = number if joined is None or joined == number else joined.join(number)
    assert joined is not None
    return joined


def json_column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Values that were decoded from JSON as an array of type `kind`. Raises a SchemaError that quotes a value that is not of this type.

    A number is a `_Number`, an int or a Decimal, which keep all its digits.
    """
    non_nulls = [value for value in values if value is not None]
    if pa.types.is_struct(kind):
        _check(non_nulls, dict, kind)
        names = {name.lower(): name for value in non_nulls for name in value}
        stored_names = [names.get(field.name.lower(), field.name) for field in kind]
        children = [
            json_column([None if v is None else v.get(f.name, v.get(name)) for v in values], f.type)
            for f, name in zip(kind, stored_names, strict=True)
        ]
        mask = pa.array([value is None for value in values], pa.bool_())
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    if pa.types.is_list(kind):
        _check(non_nulls, list, kind)
        inner = json_column([item for value in non_nulls for item in value], kind.value_type)
        return pa.ListArray.from_arrays(_offsets(values), inner, type=kind)
    if pa.types.is_map(kind):
        _check(non_nulls, dict, kind)
        keys = json_column([key for value in non_nulls for key in value], kind.key_type)
        items = json_column([item for value in non_nulls for item in value.values()], kind.item_type)
        return pa.MapArray.from_arrays(_offsets(values), keys, items, type=kind)
    if not pa.types.is_string(kind):
        _check(non_nulls, (str, bool, int, decimal.Decimal), kind)
    return convert(pa.array([None if value is None else _text(value) for value in values], pa.string()), kind)


def _check(values: list[Any], python_type: type | tuple[type, ...], kind: pa.DataType) -> None:
    for value in values:
        if not isinstance(value, python_type):
            raise SchemaError(f"{_text(value)[:80]} is not a valid {kind}")


def _offsets(values: list[Any]) -> pa.Array:
    """The position at which the items of each value begin (null for a null value), and as the last one the position at which they end."""
    at, offsets = 0, []
    for value in values:
        offsets.append(None if value is None else at)
        at += len(value or ())
    return pa.array([*offsets, at], pa.int32())


def _text(value: Any) -> str:
    """The text of a value: a string as it is, any other value as JSON without spaces."""
    if isinstance(value, (str, decimal.Decimal)):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{_quote(key)}:{_inner(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_inner, value)) + "]"
    return json.dumps(value)


def _inner(value: Any) -> str:
    return _quote(value) if isinstance(value, str) and not isinstance(value, _Number) else _text(value)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
