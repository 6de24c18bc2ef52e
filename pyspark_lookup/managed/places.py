"""Where a managed table may be made: at a place that is empty, and not in another table."""

from __future__ import annotations

from pyspark_lookup.base.errors import NotATableError, TableFormatError, UfsNotFoundError
from pyspark_lookup.io.stores import DELTA_LOG_DIRECTORY, FileVersion, Listing
from pyspark_lookup.io.ufs import Ufs
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.table.enclosing import EnclosingTables


def check_place(ufs: Ufs, url: str, enclosing: EnclosingTables) -> None:
    """Raise NotATableError for a place where somebody else's files are, or that lies in another table."""
    shown = redact("path", url)
    try:
        found = ufs.get_status(url)
    except UfsNotFoundError:
        found = None
    if isinstance(found, Listing) and (kind := _kind_of_others(found)) is not None:
        raise NotATableError(
            f"{shown} is {kind}: lookupcache reads it, and writes managed tables only; write it by its own means"
        )
    if found is not None and (isinstance(found, FileVersion) or found.files or found.directories):
        raise NotATableError(
            f"{shown} holds files that format('lookupcache') did not write, so it cannot become a managed table: "
            "write to an empty place, or write plain files with df.write.parquet and read them with lookupcache"
        )
    # Who drops the table above, vacuums or copies it, means its own files.
    above = enclosing.find(url)
    if above is not None:
        directory, kind = above
        raise TableFormatError(f"{shown} lies inside {redact('path', directory)}, {kind}: write to another place")


def _kind_of_others(found: Listing) -> str | None:
    """What others have made of a directory, as far as its files show."""
    if DELTA_LOG_DIRECTORY in found.directories:
        return "a Delta table"
    return "an Iceberg table" if any(file.url.endswith(".metadata.json") for file in found.files) else None
