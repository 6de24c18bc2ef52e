"""The format and compression of a file, from its name."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
from collections.abc import Callable, Mapping, Sequence

from pyspark_lookup.errors import NotSupportedError, OptionError
from pyspark_lookup.options.enums import FileFormatName

_EXTENSIONS = {
    ".parquet": FileFormatName.PARQUET, ".parq": FileFormatName.PARQUET, ".pq": FileFormatName.PARQUET,
    ".arrow": FileFormatName.ARROW, ".feather": FileFormatName.ARROW, ".ipc": FileFormatName.ARROW,
    ".csv": FileFormatName.CSV, ".json": FileFormatName.JSON, ".jsonl": FileFormatName.JSON,
    ".ndjson": FileFormatName.JSON, ".orc": FileFormatName.ORC,
}  # fmt: skip
TEXT_AT_MOST = 2**31 - 2  # bytes of a text file, decompressed
_PART = 1024 * 1024
_DOUBTFUL_BYTES, _DOUBTFUL_RATIO = 64 * _PART, 50  # a possible decompression bomb is first measured


def _decompress(open_file: Callable[[io.BytesIO], gzip.GzipFile | bz2.BZ2File], content: bytes) -> bytes:
    """The decompressed content. Raises NotSupportedError before content that is too large to be read is in memory."""
    if not content:  # a file without rows
        return b""
    doubtful = max(_DOUBTFUL_BYTES, _DOUBTFUL_RATIO * len(content))
    parts: list[bytes] = []
    size = 0
    with open_file(io.BytesIO(content)) as file:
        while part := file.read(_PART):
            size += len(part)
            if size > TEXT_AT_MOST:
                raise NotSupportedError(
                    f"it holds more than {TEXT_AT_MOST} bytes of text, and text is read as a whole: split the file, or write parquet"
                )
            if size <= doubtful:
                parts.append(part)
            else:
                parts.clear()
    if size <= doubtful:
        return b"".join(parts)
    with open_file(io.BytesIO(content)) as file:
        return file.read()


DECOMPRESS: Mapping[str, Callable[[bytes], bytes]] = {
    ".gz": functools.partial(_decompress, lambda file: gzip.GzipFile(fileobj=file)),
    ".bz2": functools.partial(_decompress, bz2.BZ2File),
}


def detect_format(urls: Sequence[str]) -> FileFormatName:
    """The one format that the names of files show. Raises OptionError if a name shows none, or if they show several."""
    urls_by_format: dict[FileFormatName, str] = {}
    for url in urls:
        name = base_name(url)
        for suffix in DECOMPRESS:
            name = name.removesuffix(suffix)
        kind = _EXTENSIONS.get("." + name.rsplit(".", 1)[-1]) if "." in name else None
        if kind is None:
            raise OptionError(
                f"the name of {url} does not show its format: set lookup.format (parquet, arrow, csv, json, orc)"
            )
        urls_by_format.setdefault(kind, url)
    if len(urls_by_format) > 1:
        raise OptionError(
            f"files of several formats: {', '.join(urls_by_format.values())}: give a glob that matches one format, or set lookup.format"
        )
    return next(iter(urls_by_format))


def base_name(url: str) -> str:
    """The last part of a URL, in lower case. A web URL's query is left out; in other URLs a `?` is part of the name."""
    path = url.partition("?")[0] if url.startswith(("http://", "https://")) else url
    return path.rsplit("/", 1)[-1].lower()
