"""Checks the place of a new managed table: it must be empty, and not inside another table."""

from __future__ import annotations

from pyspark_lookup.errors import NotATableError, TableFormatError, UfsNotFoundError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.stores import FileVersion, Listing
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.enclosing import EnclosingTables


def check_place(ufs: Ufs, url: str, enclosing: EnclosingTables) -> None:
    """Raise NotATableError for a place with other files, TableFormatError for one inside another table."""
    url_text = redact("path", url)
    try:
        status = ufs.get_status(url)
    except UfsNotFoundError:
        status = None
    if isinstance(status, Listing) and (label := enclosing.label_of(status)) is not None:
        raise NotATableError(
            f"{url_text} is {label}: lookupcache reads it, and writes managed tables only; write it by its own means"
        )
    if status is not None and (isinstance(status, FileVersion) or status.files or status.directories):
        raise NotATableError(
            f"{url_text} holds files that format('lookupcache') did not write, so it cannot become a managed table: "
            "write to an empty place, or write plain files with df.write.parquet and read them with lookupcache"
        )
    # A drop, vacuum or copy of the enclosing table would hit this table's files.
    above = enclosing.find(url)
    if above is not None:
        directory, kind = above
        raise TableFormatError(f"{url_text} lies inside {redact('path', directory)}, {kind}: write to another place")
