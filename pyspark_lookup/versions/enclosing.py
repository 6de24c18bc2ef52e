"""`EnclosingTables`: refuses a path inside a table whose own log or metadata says which of its rows are current."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from pyspark_lookup.core.parallel import run_in_order
from pyspark_lookup.errors import TableFormatError, UfsNotFoundError, UfsPermissionError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.glob import glob_root
from pyspark_lookup.storage.stores import Listing
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.version_source import VersionSource

_CONCURRENT_LISTS = 16


class EnclosingTables:
    """Looks for tables above a path, once for each host and path. `sources`: the kinds of tables, each with its `VersionSource.markers`."""

    def __init__(self, ufs: Ufs, context: HostContext, sources: Sequence[VersionSource]) -> None:
        self._ufs = ufs
        self._context = context
        self._sources = sources
        self._markers = {marker: source for source in sources for marker in source.markers}
        self._checked_urls: set[str] = set()

    def check(self, url: str, glob: bool = False) -> None:
        """Raise TableFormatError if a directory above `url`, of a file, a directory or a glob, is a table."""
        enclosing = self.find(url, glob)
        if enclosing is not None:
            directory, kind = enclosing
            raise TableFormatError(
                f"{redact('path', url)} lies inside {redact('path', directory)}, {kind}: its files may be outdated, or hold deleted "
                f"rows. Read {redact('path', directory)} instead, and limit its rows with lookup.where"
            )

    def find(self, url: str, glob: bool = False) -> tuple[str, str] | None:
        """(the nearest directory above `url` that is a table, its kind); None if there is none.

        The first time that this host sees the path, this costs a call for each directory above it and each marker. A directory that may not
        be listed counts as no table.
        """
        if url in self._checked_urls:
            return None
        key = key_of("place", self._ufs.scope, url)
        disk = self._context.disk
        if disk is None or disk.get_record("place", key) is None:
            places = [(directory, marker) for directory in _directories_above(url, glob) for marker in self._markers]
            answers = run_in_order(lambda place: self._is_table(*place), places, min(_CONCURRENT_LISTS, len(places)))
            enclosing = [place for place, is_table in zip(places, answers, strict=True) if is_table]
            for directory, marker in enclosing:
                return directory, self._markers[marker].label
            if disk is not None:
                with contextlib.suppress(OSError):
                    disk.create_record("place", key, 1)  # the key shows the table: a URL might contain a signature
        self._checked_urls.add(url)
        return None

    def label_of(self, listing: Listing) -> str | None:
        """The kind of table that the files of a directory show; None if they show none."""
        return next((source.label for source in self._sources if source.is_shown(listing)), None)

    def _is_table(self, directory: str, marker: str) -> bool:
        with contextlib.suppress(UfsNotFoundError, UfsPermissionError):
            return self._markers[marker].marks_table(self._ufs, f"{directory}/{marker}")
        return False


def _directories_above(url: str, glob: bool) -> Iterator[str]:
    """The directories that a path lies in, nearest first; for a local path also those that its symbolic links lead to."""
    place = glob_root(url) if glob else url  # a glob's listing shows tables from its root on
    scheme, _, path = place.partition("://")
    paths = [path]
    if scheme == "file":
        parent, _, name = path.rpartition("/")
        paths += [os.path.realpath(path), f"{os.path.realpath(parent)}/{name}"]
    seen_directories: set[str] = set()
    for directory in paths:
        while "/" in directory:
            directory = directory.rpartition("/")[0]
            if directory not in seen_directories:
                seen_directories.add(directory)
                yield f"{scheme}://{directory}"
