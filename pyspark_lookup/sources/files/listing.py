"""Finds the data files in a listing, and refuses listings that are not a table of plain files."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark_lookup.errors import TableBusyError, TableEmptyError, TableFormatError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.glob import glob_matches, glob_reaches
from pyspark_lookup.storage.stores import FileVersion, Listing
from pyspark_lookup.versions.model import Kind
from pyspark_lookup.versions.version_source import VersionSource


def refuse_tables(table_url: str, kind: str, listing: Listing, sources: Sequence[VersionSource]) -> None:
    """Raise TableFormatError if a listing of plain files shows a table of one of the kinds, or of Hudi."""
    pattern = table_url if kind == Kind.GLOB else ""
    directories = _reach(listing, pattern)
    for source in sources:
        source.refuse_tables(listing, directories, pattern)
    hudi = next((directory for directory in directories if directory.rsplit("/", 1)[-1] == ".hoodie"), None)
    if hudi is not None:
        raise TableFormatError(
            f"{redact('path', listing.url)} holds {hudi}, so it is a Hudi table: a listing does not say which of its files are "
            "current. Read it with format('hudi') or through a lookup.provider of your own, or export the current version as plain files"
        )


def job_directories(table_url: str, kind: str, listing: Listing) -> list[str]:
    """The directories of jobs that write the table, or died doing so, relative to the listing's."""
    directories = _reach(listing, table_url if kind == Kind.GLOB else "")
    return sorted(directory for directory in directories if _is_job_directory(directory.rsplit("/", 1)[-1]))


def data_files(
    table_url: str, kind: str, listing: Listing, success_file: bool = False, dead: Sequence[str] = ()
) -> tuple[FileVersion, ...]:
    """The data files in a listing, by URL, without empty ones and those whose name or directory begins with `_` or `.`. `dead`: directories of
    dead jobs.

    Raises TableBusyError or TableEmptyError if the listing is not a version.
    """
    pattern = table_url if kind == Kind.GLOB else ""
    busy = [directory for directory in job_directories(table_url, kind, listing) if directory not in dead]
    if busy:
        raise TableBusyError(
            f"{listing.url} holds {busy[0]}: a job is writing it, or died less than lookup.busy-timeout ago. Wait for the job, or "
            "remove the directory if you know that no job runs"
        )
    names = {file.url: file.url[len(listing.url) :].lstrip("/") for file in listing.files}
    if success_file and "_SUCCESS" not in names.values():
        raise TableBusyError(f"{listing.url} has no _SUCCESS file, which lookup.success-file=true requires")
    files = tuple(
        file
        for file in listing.files
        if file.size > 0
        and not any(_is_skipped(part) for part in names[file.url].split("/"))
        and (not pattern or glob_matches(file.url, pattern))
    )
    if not files:
        reason = (
            "no file matches the glob" if kind == Kind.GLOB else "it holds no data file (names with _ or . are skipped)"
        )
        raise TableEmptyError(f"there is no table at {table_url}: {reason}")
    return files


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _is_job_directory(name: str) -> bool:
    return name in ("_temporary", "__magic") or name.startswith((".spark-staging-", ".hive-staging", "_spark_staging"))


def _reach(listing: Listing, pattern: str) -> list[str]:
    """The listed directories in which a glob's files may lie; without a pattern all of them."""
    if not pattern:
        return list(listing.directories)
    return [d for d in listing.directories if glob_reaches(f"{listing.url}/{d}".rpartition("/")[0], pattern)]
