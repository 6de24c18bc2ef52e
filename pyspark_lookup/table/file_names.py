"""What a file's name tells: its format and compression."""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Callable, Mapping, Sequence

from pyspark_lookup.base.errors import OptionError
from pyspark_lookup.options.enums import FileFormatName

_EXTENSIONS = {
    ".parquet": FileFormatName.PARQUET, ".parq": FileFormatName.PARQUET, ".pq": FileFormatName.PARQUET,
    ".arrow": FileFormatName.ARROW, ".feather": FileFormatName.ARROW, ".ipc": FileFormatName.ARROW,
    ".csv": FileFormatName.CSV, ".json": FileFormatName.JSON, ".jsonl": FileFormatName.JSON,
    ".ndjson": FileFormatName.JSON, ".orc": FileFormatName.ORC,
}  # fmt: skip
DECOMPRESS: Mapping[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".bz2": bz2.decompress}


def format_of(urls: Sequence[str]) -> FileFormatName:
    """The one format that file names tell. Raises OptionError if they tell none, or several."""
    found: dict[FileFormatName, str] = {}
    for url in urls:
        name = base_name(url)
        for suffix in DECOMPRESS:
            name = name.removesuffix(suffix)
        kind = _EXTENSIONS.get("." + name.rsplit(".", 1)[-1]) if "." in name else None
        if kind is None:
            raise OptionError(
                f"the name of {url} does not show its format: set lookup.format (parquet, arrow, csv, json, orc)"
            )
        found.setdefault(kind, url)
    if len(found) > 1:
        raise OptionError(
            f"files of several formats: {', '.join(found.values())}: give a glob of one, or lookup.format"
        )
    return next(iter(found))


def base_name(url: str) -> str:
    """The last part of a URL, in lower case; of a web URL without its query, which elsewhere is part of the name."""
    path = url.partition("?")[0] if url.startswith(("http://", "https://")) else url
    return path.rsplit("/", 1)[-1].lower()
