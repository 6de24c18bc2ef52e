"""The data files in a listing, and what makes it no table of plain files."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pyspark_lookup.errors import TableBusyError, TableEmptyError, TableFormatError, UfsNotFoundError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.glob import glob_matches, glob_reaches
from pyspark_lookup.storage.stores import DELTA_LOG_DIRECTORY, LOG_DIRECTORY, FileVersion, Listing
from pyspark_lookup.versions.model import Kind


def job_directories(table_url: str, kind: str, listing: Listing) -> list[str]:
    """The directories of jobs that write the table, or died doing so, relative to the listing's."""
    directories = _reach(listing, table_url if kind == Kind.GLOB else "")
    return sorted(directory for directory in directories if _is_job_directory(directory.rsplit("/", 1)[-1]))


def data_files(
    table_url: str, kind: str, listing: Listing, success_file: bool = False, dead: Sequence[str] = ()
) -> tuple[FileVersion, ...]:
    """The data files in a listing, by URL, without empty ones and those whose name or directory begins with `_` or `.`. `dead`: directories of
    dead jobs.

    Raises TableFormatError, TableBusyError or TableEmptyError if the listing is not a version.
    """
    if LOG_DIRECTORY in listing.directories and kind == Kind.DIRECTORY:
        raise UfsNotFoundError(f"{listing.url} became a managed table since this query was planned: plan it again")
    pattern = table_url if kind == Kind.GLOB else ""
    _refuse_table_formats(listing, pattern)
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
    for file in files:
        refuse_inside(file.url)
    if not files:
        reason = (
            "no file matches the glob" if kind == Kind.GLOB else "it holds no data file (names with _ or . are skipped)"
        )
        raise TableEmptyError(f"{table_url} is no table now: {reason}")
    return files


_MANAGED_FILE = re.compile(r"^(.*?)/(?:write-\d{20}|stream-[^/]+/\d{12}-[0-9a-f]{16})/")


def refuse_inside(url: str) -> None:
    """Raise TableFormatError for a file of a managed table: only the table's log tells which rows of it are valid."""
    if "/write-" not in url and "/stream-" not in url:  # each file of a table of many comes here
        return
    match = _MANAGED_FILE.match(url)
    if match is not None:
        raise TableFormatError(
            f"{redact('path', url)} is a file of a managed table, whose log alone says which of its rows are valid: read "
            f"{redact('path', match[1])}"
        )


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _is_job_directory(name: str) -> bool:
    return name in ("_temporary", "__magic") or name.startswith((".spark-staging-", ".hive-staging", "_spark_staging"))


def _reach(listing: Listing, pattern: str) -> list[str]:
    """The listed directories in which a glob's files may lie; without a pattern all of them."""
    if not pattern:
        return list(listing.directories)
    return [d for d in listing.directories if glob_reaches(f"{listing.url}/{d}".rpartition("/")[0], pattern)]


def _refuse_table_formats(listing: Listing, pattern: str) -> None:
    paths_by_name = {d.rsplit("/", 1)[-1]: d for d in _reach(listing, pattern)}
    if LOG_DIRECTORY in paths_by_name:
        table = f"{listing.url}/{paths_by_name[LOG_DIRECTORY]}".rpartition("/")[0]
        raise TableFormatError(
            f"{redact('path', listing.url)} holds the managed table {redact('path', table)}, whose log alone says which of its rows "
            "are valid: read it by its own path"
        )
    if DELTA_LOG_DIRECTORY in paths_by_name:
        table = f"{listing.url}/{paths_by_name[DELTA_LOG_DIRECTORY]}".rpartition("/")[0]
        raise TableFormatError(
            f"{redact('path', listing.url)} holds {paths_by_name[DELTA_LOG_DIRECTORY]}, so {redact('path', table)} is a Delta table, whose log alone "
            "says which files are current: read it by that path"
        )
    if ".hoodie" in paths_by_name:
        raise TableFormatError(
            f"{listing.url} holds {paths_by_name['.hoodie']}, so it is a Hudi table: its files alone are not a version of it. Read it "
            "through a lookup.provider of yours, with format('hudi'), or export the current version as plain files"
        )
    for file in listing.files:
        directory, _, name = file.url.rpartition("/")
        table, _, parent = directory.rpartition("/")
        if parent == "metadata" and name.endswith(".metadata.json") and (not pattern or glob_reaches(table, pattern)):
            raise TableFormatError(
                f"{redact('path', listing.url)} holds {file.url[len(listing.url) + 1 :]}, so it is an Iceberg table, without a "
                "metadata/version-hint.text that says which metadata file is current; the newest may be of a commit that failed. Read it "
                "by its name in its catalog (lookup.catalog), or name a metadata file"
            )
