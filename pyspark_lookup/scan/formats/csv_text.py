"""CSV files as columns of text, and as columns with inferred or given types."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from pyspark_lookup.columnar.types import spark_schema
from pyspark_lookup.errors import OptionError, SchemaError
from pyspark_lookup.options.file_options import CsvOptions
from pyspark_lookup.scan.formats.inference import NOTHING, TEXT, Inferred, convert, infer_texts

_BOM = b"\xef\xbb\xbf"
_BLANKS = bytes(range(33))


class CsvFile:
    """A CSV file's columns: the types inferred from their values, and their values in a given type. Raises ArrowInvalid for a file that is not
    CSV.

    `declared`: the names of the columns of a file without a header, if they are declared.
    """

    def __init__(self, content: bytes, options: CsvOptions, url: str, declared: list[str] | None) -> None:
        self._options = options
        self._texts = _texts(content, options, url, declared)
        self.names: list[str] = self._texts.schema.names

    def infer(self, name: str, by_value: bool = False) -> Inferred:
        """The type of a column; without `lookup.csv.infer-schema` it is text. `by_value`: see `infer_texts`."""
        if not self._options.infer_schema:
            return NOTHING if self._column(name).null_count == self.rows else TEXT
        return infer_texts(self._column(name), by_value)

    def column(self, name: str, kind: pa.DataType) -> pa.Array:
        """A column's values. Raises SchemaError that names a value which is not of that type."""
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
        content += b"\n"  # pyarrow does not take a header line alone for CSV without it
    content = _without_blank_lines(content, options)
    if not content:
        return pa.table({})  # Spark writes empty files for no rows
    one_block = max(len(content) + 1, 1024)
    parse = pa.csv.ParseOptions(
        delimiter=options.sep, quote_char=options.quote or False, double_quote=True, newlines_in_values=True
    )
    head = pa.csv.ReadOptions(block_size=one_block, autogenerate_column_names=not options.header)
    raw_names = pa.csv.open_csv(pa.BufferReader(_first_row(content, options)), head, parse).schema.names
    names = _name(raw_names, options.header, url, declared)
    # A name that comes twice must be an error before columns are requested by name.
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
        raise ValueError(f"it has bytes that are not valid {options.encoding}: set lookup.csv.encoding") from None
    if not options.null_value:
        return table
    nothing = pa.scalar(None, pa.string())
    columns = [pc.if_else(pc.equal(column, options.null_value), nothing, column) for column in table.columns]
    return pa.table(columns, names=names)


def _check_doubled(content: bytes, options: CsvOptions, url: str) -> None:
    """Raise OptionError if quotes in quoted text are escaped by a backslash instead of doubled."""
    quote, sep = (re.escape(text.encode()) for text in (options.quote, options.sep))
    # A quote that is neither doubled nor at the end of the text.
    if re.search(rb"\\" + quote + rb"(?!" + quote + rb"|[\r\n" + sep + rb"]|\Z)", content):
        raise OptionError(
            f"{url} has \\{options.quote} inside quoted text, as Spark writes it: set lookup.csv.escape = '\\' (or "
            f"'{options.quote}', if a quote in it is doubled)"
        )


class _Quoting:
    """Finds where quoted text begins and ends. Each regular expression matches a bounded piece, and so needs bounded memory."""

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
        """Whether each quoted text is a whole value with doubled quotes in it. Most files are like that, and this check is fast."""
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
        """Quoted text without its escape characters. An escape character before an ordinary character stands for itself, as in Spark."""
        return self._escaped.sub(rb"\1", text) if self.escape in text else text


def _double(content: bytes, options: CsvOptions) -> bytes:
    """The file rewritten so that each quoted text is a whole value with doubled quotes in it. The values are those that Spark reads.

    Blanks behind a closing quote are dropped; any other text there makes the quotes ordinary characters. Raises ValueError if such a value
    spans several lines, which may be as many rows, or if its quotes can be read in several ways.
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
    """The error about the quoted text at `begin`, with what to do."""
    line = content.count(b"\n" if b"\n" in content else b"\r", 0, begin) + 1
    return ValueError(
        f"line {line}: quoted text {problem}: {_show_text(content[begin:])}: set lookup.csv.quote = '' if quotes are ordinary "
        "characters there, or set lookup.csv.escape if another character escapes them"
    )


def _show_text(text: bytes) -> str:
    return repr(text[:40].decode(errors="replace"))


def _first_row(content: bytes, options: CsvOptions) -> bytes:
    """The first row, which has the names of the columns; the whole file if it is unclear where that row ends."""
    quote = re.escape(options.quote.encode())
    row = rb"(?:[^\r\n" + quote + rb"]+|" + quote + rb"[^" + quote + rb"]*" + quote + rb")*" if quote else rb"[^\r\n]*"
    match = re.match(row + rb"\r?\n?", content)
    assert match is not None
    return match[0] if match[0].endswith((b"\r", b"\n")) else content


def _without_blank_lines(content: bytes, options: CsvOptions) -> bytes:
    """The file without the lines that Spark skips; empty lines after the first row stay, because pyarrow skips them.

    A line of blanks counts as blank, as in Spark, unless the blank is the separator: then it is a row. Lines inside quoted text stay.
    """
    blank = b"[" + b"".join(b"\\x%02x" % code for code in _BLANKS if code not in b"\r\n" + options.sep.encode()) + b"]"
    content = content[re.match(rb"(?:" + blank + rb"*[\r\n])*", content).end() :]  # type: ignore[union-attr]
    if not any(re.search(line_end + blank, content) for line_end in (b"\n", b"\r")):
        return content  # these two searches are ten times as fast as the substitution
    of_blanks = re.compile(rb"(?<=[\r\n])" + blank + rb"+(?=[\r\n])")
    if of_blanks.search(content) is None or not options.quote:
        return of_blanks.sub(b"", content)
    parts, last_end = [], 0
    for begin, _, end in _Quoting(dataclasses.replace(options, escape=None)).texts(content):
        parts += [of_blanks.sub(b"", content[last_end:begin]), content[begin:end]]
        last_end = end
    return b"".join([*parts, of_blanks.sub(b"", content[last_end:])])


def _name(raw_names: list[str], header: bool, url: str, declared: list[str] | None) -> list[str]:
    """The names of the columns. As in Spark, a column without a name is called `_c` and its position."""
    if header:
        return [name or f"_c{number}" for number, name in enumerate(raw_names)]
    if declared is None:
        return [f"_c{number}" for number in range(len(raw_names))]
    if len(declared) != len(raw_names):
        raise SchemaError(
            f"{url} has {len(raw_names)} columns and no header, but lookup.schema has {len(declared)}: {', '.join(declared)}"
        )
    return declared
