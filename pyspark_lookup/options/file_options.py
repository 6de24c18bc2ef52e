"""Options of a table of files: its path, how its files are read, and how jobs that write them are handled."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pyspark_lookup.columnar.ddl import parse_columns
from pyspark_lookup.options.enums import FileFormatName, OnBusy
from pyspark_lookup.options.parsing import (
    BOOLEAN,
    DURATION,
    NAMES,
    Kind,
    choice,
    option,
    parse_character,
    parse_encoding,
    parse_path,
    parse_quote,
    parse_text,
)

if TYPE_CHECKING:
    import pyarrow as pa


@dataclasses.dataclass(frozen=True)
class FileOptions:
    """The table's path, how its files are read, and how jobs that write them are handled."""

    # fmt: off
    path: str = option(
        "path", Kind("string", parse_path), "",
        doc="File, directory (read recursively) or glob; any fsspec URL. `s3a://` means `s3://`. If an object and "
            "a directory share a name, `s3://bucket/name/` is the directory.",
    )
    keys: tuple[str, ...] | None = option(
        "lookup.keys", NAMES, None,
        doc="Key columns of the table.",
    )
    format: FileFormatName | None = option(
        "lookup.format", choice(FileFormatName), None, default_text="from the file names",
        doc="File format.",
    )
    schema: pa.Schema | None = option(
        "lookup.schema", Kind("DDL", parse_columns), None, default_text="from the files",
        doc="The columns and their types, as in CREATE TABLE: `id INT, name STRING`. Text (CSV, JSON) is parsed as "
            "these types. Other files are cast to them, and a value that would change is an error. A column that no "
            "file has is null.",
    )
    partition: str | None = option(
        "lookup.partition", Kind("`max_pt()` or `k=v,…`", parse_text), None, default_text="all",
        doc="Partition directories to read; `max_pt()` is the latest.",
    )
    success_file: bool = option(
        "lookup.success-file", BOOLEAN, False,
        doc="Refuse a directory without `_SUCCESS`.",
    )
    settle_s: float | None = option(
        "lookup.settle", DURATION, None,
        doc="Wait until the newest file is at least this old.",
    )
    on_busy: OnBusy = option(
        "lookup.on-busy", choice(OnBusy), OnBusy.KEEP,
        doc="While a job writes the files (`_temporary`): use the last version that this host knows, or fail.",
    )
    busy_wait_s: float = option(
        "lookup.busy-wait", DURATION, 30.0, default_text="30 s",
        doc="How long a query waits for a job that writes the files, if this host knows no version, or the job has removed "
            "files that this host has not cached.",
    )
    busy_timeout_s: float = option(
        "lookup.busy-timeout", DURATION, 600.0, default_text="10 min",
        doc="A job whose directory has not changed for this long counts as dead: its directory is ignored, and a "
            "warning names it.",
    )
    # fmt: on

    @property
    def names_directory(self) -> bool:
        """Whether the path itself shows that it is a directory. The last slash of a web URL does not."""
        return self.path.endswith("/") and not self.path.startswith(("http://", "https://"))


@dataclasses.dataclass(frozen=True)
class CsvOptions:
    """How CSV files are written. `escape` None: a quote inside quoted text is doubled; a file that shows otherwise is an error."""

    # fmt: off
    header: bool = option(
        "lookup.csv.header", BOOLEAN, True,
        doc="CSV files: the first line has the column names. Otherwise the columns are called `_c0`, `_c1`, …, or as in "
            "lookup.schema.",
    )
    sep: str = option(
        "lookup.csv.sep", Kind("character", parse_character), ",",
        doc="CSV files: the separator between values; `\\t` is a tab.",
    )
    quote: str = option(
        "lookup.csv.quote", Kind("character or nothing", parse_quote), '"',
        doc="CSV files: the quote character. Quoted text may contain separators and line breaks. "
            "If the option is empty, quotes are ordinary characters.",
    )
    escape: str | None = option(
        "lookup.csv.escape", Kind("character", parse_character), None, default_text="the quote itself",
        doc="CSV files: the character that escapes a quote inside quoted text: `\\` in files that Spark wrote.",
    )
    null_value: str = option(
        "lookup.csv.null-value", Kind("text", str), "",
        doc="CSV files: a text that means null. An unquoted empty value is always null.",
    )
    encoding: str = option(
        "lookup.csv.encoding", Kind("name", parse_encoding), "utf-8",
        doc="CSV files: their encoding.",
    )
    infer_schema: bool = option(
        "lookup.csv.infer-schema", BOOLEAN, True,
        doc="CSV files: infer column types from all values; false: every column is text.",
    )
    # fmt: on
