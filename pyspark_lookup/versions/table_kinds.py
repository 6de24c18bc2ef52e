"""`TableKinds` tells what is at a path: the kind of table, and whether it lies inside another one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pyspark_lookup.core.threads import run_in_order
from pyspark_lookup.errors import OptionError, TableFormatError, UfsError, UfsNotFoundError, UfsPermissionError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import FileFormatName, MetadataSource, OnBusy
from pyspark_lookup.options.file_options import CsvOptions
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.glob import glob_root
from pyspark_lookup.storage.stores import Listing
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.host_versions import HostVersions
from pyspark_lookup.versions.model import Busy, Kind, Table, TableVersion, VersionMetadata
from pyspark_lookup.versions.version_source import SourceParts, VersionSource

_CONCURRENT_LISTS = 16


class TableKinds:
    """The kinds of tables at a store, by `sources`, and what this host remembers of a path's kind in `host`."""

    def __init__(
        self,
        ufs: Ufs,
        blocks: BlockCache,
        context: HostContext,
        sources: Sequence[Callable[[SourceParts], VersionSource]],
    ) -> None:
        self._ufs = ufs
        self._context = context
        self._literal: dict[str, bool] = {}
        self.host = HostVersions(ufs, context, self._restore, self._has_commit)
        self.sources: list[VersionSource] = []
        parts = SourceParts(ufs, blocks, self.host, context, self.sources)
        self.sources += [make(parts) for make in sources]
        self.detect_kind = parts.detect_kind
        self._by_kind = {kind: source for source in self.sources for kind in source.kinds}
        self.enclosing = EnclosingTables(ufs, context, self.sources)

    def source(self, table: Table) -> VersionSource:
        """The source of the table's versions."""
        return self._by_kind[table.kind]

    def kind_of_url(self, url: str) -> str | None:
        """The kind of table that a canonical path itself shows; None if only the store can tell."""
        kind = next((kind for source in self.sources if (kind := source.kind_of_url(url)) is not None), None)
        return None if kind == Kind.GLOB and self.is_literal(url) else kind

    def is_literal(self, url: str) -> bool:
        """Whether a path with wildcards is the literal name of a file or directory, and so not a pattern. One call, once in a process."""
        if url not in self._literal:
            try:
                self._ufs.get_status(url)
                self._literal[url] = True
            except (UfsNotFoundError, UfsPermissionError):
                self._literal[url] = False
        return self._literal[url]

    def forget_literal(self, url: str) -> bool:
        """Treat a path with wildcards as a pattern from now on, because the file with that literal name is gone. Returns whether it was literal."""
        was_literal = self._literal.get(url, False)
        if was_literal:
            self._literal[url] = False
        return was_literal

    def to_table(self, options: LookupOptions, kind: str, version: TableVersion | None = None) -> Table:
        """The table at `options.files.path`, which is known to be of this kind; with its format if a version is given. No store call.

        Raises OptionError for an option that has no meaning for such a table.
        """
        if kind not in self._by_kind:
            raise OptionError(
                f"{redact('path', options.files.path)}: tables of the kind {kind!r} are unknown to this process: does "
                "another release of pyspark_lookup run on the driver or another host?"
            )
        self._by_kind[kind].check_options(options, kind)
        return self._table(options, kind, version)

    def _table(self, options: LookupOptions, kind: str, version: TableVersion | None) -> Table:
        source = self._by_kind[kind]
        form = None if source.described else options.files.format
        if form is None and (source.described or version is not None):
            form = source.detect_format(version.files if version is not None else ())
        csv_options = sorted(key for key in options.explicit if key.startswith("lookup.csv."))
        if csv_options and form not in (None, FileFormatName.CSV) and not source.described:
            raise OptionError(
                f"option {csv_options[0]} is for CSV files: {redact('path', options.files.path)} holds {form.value} files: remove the option"
            )
        url = self._ufs.url_of(options.files.path)
        busy = Busy(options.files.on_busy is OnBusy.KEEP, options.files.busy_wait_s, options.files.busy_timeout_s)
        csv, declared = (CsvOptions(), None) if source.described else (options.csv, options.files.schema)
        parts = (url, self._ufs.scope, kind, form, options.files.success_file, options.files.settle_s, options.pinned)
        return Table(*parts, busy=busy, csv=csv, declared=declared, retained=source.retained)

    def vanished_kind(self, url: str, options: LookupOptions) -> str | None:
        """The kind of table that was at a path a while ago: an overwrite may have removed it and not begun to write. None if there was none."""
        if self.kind_of_url(url) is not None or options.pinned is not None:
            return None
        probes = (self._table(options, kind, None) for kind in self._by_kind if kind != Kind.GLOB)
        return next((probe.kind for probe in probes if self.source(probe).was_here_lately(probe)), None)

    def known_kind(self, url: str, options: LookupOptions) -> str | None:
        """The kind that the path had when this host last resolved it, in CACHE mode or for a table that keeps versions; else None."""
        last = self._last_kind(url, options)
        retained = last is not None and self._by_kind[last].retained
        return last if options.version.source is MetadataSource.CACHE or retained else None

    def _last_kind(self, url: str, options: LookupOptions) -> str | None:
        kind_by_time: dict[tuple[bool, float], str] = {}
        for kind, source in self._by_kind.items():
            if kind == Kind.GLOB or (kind == Kind.FILE and options.files.names_directory):
                continue
            probe = self._table(options if source.retained else options.unpinned, kind, None)
            record = self.host.last(probe) or self.host.last(self._table(options.unpinned, kind, None))
            if record is not None:
                # The wall clock may have been set back in between.
                is_same_boot = record["boot"] == self._context.clock.boot
                kind_by_time[is_same_boot, record["started_s" if is_same_boot else "wall_s"]] = kind
        if {Kind.DIRECTORY, Kind.FILE} <= set(kind_by_time.values()) and not url.startswith("file://"):
            return None  # an object store can have both, and the other spelling of the path, with a slash, may name one of them
        return kind_by_time[max(kind_by_time)] if kind_by_time else None

    def forget_kind(self, table: Table) -> bool:
        """Forget the table if its path has become another kind of table. Returns whether it has."""
        try:
            if not self.is_another_kind(table):
                return False
        except UfsError:
            return False
        self.host.forget(table)
        return True

    def is_another_kind(self, table: Table) -> bool:
        """Whether the path of a table that is gone is now of another kind: a file, a directory or another kind of table."""
        with contextlib.suppress(UfsNotFoundError):
            by_url = self.kind_of_url(table.url) is not None
            return not by_url and self.detect_kind(self._ufs.get_status(table.url)) != table.kind
        return False

    def is_known_as_another(self, options: LookupOptions, source: VersionSource) -> bool:
        """Whether this host has known a table of another kind than the source's at `options.files.path`."""
        others = (kind for kind, other in self._by_kind.items() if other is not source and kind != Kind.GLOB)
        return any(self.host.last(self._table(options.unpinned, kind, None)) is not None for kind in others)

    def history(self, options: LookupOptions) -> list[dict[str, Any]] | None:
        """The versions that the table at `options.files.path` lists itself (see `VersionSource.history`); None if it has no list."""
        url = self._ufs.url_of(options.files.path)
        kind = self.kind_of_url(url) or self._last_kind(url, options)
        with contextlib.suppress(UfsNotFoundError):
            kind = kind or self.detect_kind(self._ufs.get_status(url))
        return None if kind is None else self._by_kind[kind].history(self._table(options, kind, None))

    def lacks_files(self, version: TableVersion) -> bool:
        """Whether a version that was kept while a job writes has files that the job has removed."""
        return any(source.lacks_files(version) for source in self.sources)

    def _restore(self, table: Table, metadata: VersionMetadata) -> TableVersion | None:
        return self.source(table).restore(table, metadata)

    def _has_commit(self, url: str, table_id: str, position: int) -> bool:
        return all(source.has_commit(url, table_id, position) for source in self.sources)


class EnclosingTables:
    """Looks for tables above a path, once for each host and path. `sources`: the kinds of tables, each with its `VersionSource.markers`."""

    def __init__(self, ufs: Ufs, context: HostContext, sources: Sequence[VersionSource]) -> None:
        self._ufs = ufs
        self._context = context
        self._sources = sources
        self._markers = {marker: source for source in sources for marker in source.markers}
        self._checked_urls: set[str] = set()

    def check(self, url: str, glob: bool = False) -> None:
        """Raise TableFormatError if a directory above `url` (of a file, a directory or a glob) is a table."""
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
