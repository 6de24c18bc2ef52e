"""CSV files as columns of texts, and these as columns of types."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from pyspark_lookup.base.errors import OptionError, SchemaError
from pyspark_lookup.columnar.types import spark_schema
from pyspark_lookup.options.enums import CsvOptions
from pyspark_lookup.scan.formats.inference import NOTHING, TEXT, Inferred, convert, infer_texts

_BOM = b"\xef\xbb\xbf"


class CsvFile:
    """A CSV file's columns: what their values are inferred to be, and the values by type. Raises ArrowInvalid for one that is none.

    `declared`: the names of the columns of a file without a header, if somebody has said them.
    """

    def __init__(self, content: bytes, options: CsvOptions, url: str, declared: list[str] | None) -> None:
        self._options = options
        self._texts = _texts(content, options, url, declared)
        self.names: list[str] = self._texts.schema.names

    def infer(self, name: str, by_value: bool = False) -> Inferred:
        """The type of a column; text for all of them without `lookup.csv.infer-schema`. `by_value`: see `infer_texts`."""
        if not self._options.infer_schema:
            return NOTHING if self._column(name).null_count == self.rows else TEXT
        return infer_texts(self._column(name), by_value)

    def column(self, name: str, kind: pa.DataType) -> pa.Array:
        """A column's values. Raises SchemaError with one that is not of that type."""
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
    if options.quote and options.escape is None:
        _check_doubled(content, options, url)
    elif options.quote and options.escape != options.quote:
        content = _double(content, options)
    if not content.endswith((b"\n", b"\r")):
        content += b"\n"  # a header line alone is no CSV to pyarrow without it
    content = _without_blank_lines(content, options)
    if not content:
        return pa.table({})  # Spark writes empty files where there was no row
    one_block = max(len(content) + 1, 1024)
    parse = pa.csv.ParseOptions(
        delimiter=options.sep, quote_char=options.quote or False, double_quote=True, newlines_in_values=True
    )
    head = pa.csv.ReadOptions(block_size=one_block, autogenerate_column_names=not options.header)
    found = pa.csv.open_csv(pa.BufferReader(_first_row(content, options)), head, parse).schema.names
    names = _name(found, options.header, url, declared)
    # A name that is given twice is an error, and found before columns are asked for by name.
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
        raise ValueError(f"it has bytes that are no {options.encoding}: set lookup.csv.encoding") from None
    last = (table.columns[-1][-1].as_py() if table.num_rows else None) or ""
    if options.quote and _is_open(content, last, options.quote):
        raise ValueError(
            f"text in quotes has no end: {last[:40]!r}; if quotes are ordinary characters there, set lookup.csv.quote = ''"
        )
    if not options.null_value:
        return table
    nothing = pa.scalar(None, pa.string())
    columns = [pc.if_else(pc.equal(column, options.null_value), nothing, column) for column in table.columns]
    return pa.table(columns, names=names)


def _is_open(content: bytes, last: str, quote: str) -> bool:
    """Whether the file ends inside of quoted text, which then is its `last` value, with the line end of the file's end."""
    if not last.endswith(("\n", "\r")):
        return False
    rest = content.rstrip(b"\r\n")
    return not rest.endswith((b"\n" + quote.encode(), b"\r" + quote.encode()))


def _check_doubled(content: bytes, options: CsvOptions, url: str) -> None:
    """Raise OptionError for a file that cannot double the quotes in its quoted text: there is one behind a backslash."""
    quote, sep = (re.escape(text.encode()) for text in (options.quote, options.sep))
    # One that is neither doubled nor the end of the text.
    if re.search(rb"\\" + quote + rb"(?!" + quote + rb"|[\r\n" + sep + rb"]|\Z)", content):
        raise OptionError(
            f"{url} has \\{options.quote} inside of quoted text, as Spark writes it: set lookup.csv.escape = '\\' (or "
            f"'{options.quote}', if a quote in it is doubled)"
        )


def _double(content: bytes, options: CsvOptions) -> bytes:
    """The file with its quotes in quoted text doubled, where it has them behind an escape character, as Spark does.

    There that character stands for itself before any other one.
    """
    assert options.escape
    mark, character = options.quote.encode(), options.escape.encode()
    quote, escape, sep = map(re.escape, (mark, character, options.sep.encode()))
    begin = rb"(?:(?<=[\r\n" + sep + rb"])|\A)"
    field = re.compile(begin + quote + rb"(?:[^" + quote + escape + rb"]|" + escape + rb".)*" + quote, re.DOTALL)
    escaped = re.compile(escape + rb"([" + quote + escape + rb"])")

    def unescaped(found: re.Match[bytes]) -> bytes:
        text = found.group()
        if character not in text:
            return text
        inner = escaped.sub(lambda one: mark * 2 if one.group(1) == mark else character, text[1:-1])
        return mark + inner + mark

    return field.sub(unescaped, content)


def _first_row(content: bytes, options: CsvOptions) -> bytes:
    """The first row, for nobody looks into the rest for names; all of the file where it is not clear where it ends."""
    quote = re.escape(options.quote.encode())
    row = rb"(?:[^\r\n" + quote + rb"]+|" + quote + rb"[^" + quote + rb"]*" + quote + rb")*" if quote else rb"[^\r\n]*"
    found = re.match(row + rb"\r?\n?", content)
    assert found is not None
    return found[0] if found[0].endswith((b"\r", b"\n")) else content


def _without_blank_lines(content: bytes, options: CsvOptions) -> bytes:
    """The file without the lines that Spark skips; empty lines behind the first row stay, as pyarrow skips those.

    To Spark a line of blanks is blank. One that separates values makes a row here, though. Lines inside of quoted text stay.
    """
    sep, quote = options.sep.encode(), re.escape(options.quote.encode())
    blank = b"[" + b"".join(b"\\x%02x" % code for code in range(33) if code not in b"\r\n" + sep) + b"]"
    content = content[re.match(rb"(?:" + blank + rb"*[\r\n])*", content).end() :]  # type: ignore[union-attr]
    if not any(re.search(line_end + blank, content) for line_end in (b"\n", b"\r")):
        return content  # by two searches that are ten times as fast
    of_blanks = rb"(?<=[\r\n])" + blank + rb"+(?=[\r\n])"
    if re.search(of_blanks, content) is None or not quote:
        return re.sub(of_blanks, b"", content)
    begin = rb"(?:(?<=[\r\n" + re.escape(sep) + rb"])|\A)"
    quoted = begin + quote + rb"[^" + quote + rb"]*(?:" + quote * 2 + rb"[^" + quote + rb"]*)*" + quote
    return re.sub(rb"(" + quoted + rb")|" + of_blanks, lambda match: match[1] or b"", content)


def _name(found: list[str], header: bool, url: str, declared: list[str] | None) -> list[str]:
    """The names of the columns; as in Spark one that has none is called `_c` and its place."""
    if header:
        return [name or f"_c{number}" for number, name in enumerate(found)]
    if declared is None:
        return [f"_c{number}" for number in range(len(found))]
    if len(declared) != len(found):
        raise SchemaError(
            f"{url} has {len(found)} columns and no header, but lookup.schema has {len(declared)}: {', '.join(declared)}"
        )
    return declared
