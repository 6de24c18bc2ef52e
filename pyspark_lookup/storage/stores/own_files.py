"""Names of the files of managed tables. Files with other names are never written or removed in a table's directory."""

from __future__ import annotations

import re

from pyspark_lookup.storage.stores.store import LOG_DIRECTORY

_HEX = "[0-9a-f]"
_DATA = rf"(?:(?:part|kept|compacted)(?:-[0-9]{{5,}})*|deletes)(?:-{_HEX}{{16}}){{1,2}}\.parquet"
_OF_LOG = rf"(?:log|checkpoints)/[0-9]{{20}}\.json|heartbeats/[0-9]{{20}}-{_HEX}+|vacuum-{_HEX}+"
_DIRECTORY = r"write-[0-9]{20}|stream-[^/]+/[0-9]{12}-[^/]+"
_DATA_FILE = re.compile(rf"(?:{_DIRECTORY})/{_DATA}")
_FILE = re.compile(rf"(.*/|)({LOG_DIRECTORY}/(?:{_OF_LOG})|(?:{_DIRECTORY})/{_DATA})", re.DOTALL)
_TEMPORARY = re.compile(rf"(.*/)\.([^/]+)\.{_HEX}+", re.DOTALL)


def split_path(path: str) -> tuple[str, list[str]]:
    """(the table's directory, the names below it) for the path of a managed table's file; (its directory, [its name]) for any other path."""
    named = _FILE.fullmatch(path)
    if named is None or not named[1].strip("/"):
        directory, _, name = path.rpartition("/")
        return directory, [name]
    return named[1].rstrip("/"), named[2].split("/")


def is_own(path: str) -> bool:
    """Whether a path is one that a managed table's file can have."""
    return _FILE.fullmatch(path) is not None


def is_data_file(name: str) -> bool:
    """Whether a name below a table's directory is one that we give to data files."""
    return _DATA_FILE.fullmatch(name) is not None


def whole_name(name: str) -> str:
    """The final name of a temporary file; any other name is returned unchanged."""
    temporary = _TEMPORARY.fullmatch("/" + name)
    return name if temporary is None else (temporary[1] + temporary[2])[1:]
