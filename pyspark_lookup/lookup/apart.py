"""Refuses a table inside the cache directory, or a cache directory inside the table: each would take the other's files for its own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pyspark_lookup.errors import OptionError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.disk import LAYOUT
from pyspark_lookup.storage.glob import glob_reaches, glob_root, is_glob

_FILE = "file://"


def check_apart(url: str, cache: Path) -> None:
    """Raise OptionError if a table of this machine lies in the cache directory, or the cache directory in the table, also through links."""
    if not url.startswith(_FILE):
        return
    path = url.removeprefix(_FILE)
    glob = is_glob(path) and not os.path.lexists(path)
    table = Path(glob_root(path) if glob else path)
    if _is_descendant(table, cache):
        raise OptionError(
            f"option path = {redact('path', url)!r} lies in the cache directory {cache}, where files are removed: "
            "keep tables elsewhere, or set lookup.cache.dir to another place"
        )
    # A glob that does not match the cache's directories reads none of its files.
    pattern = os.path.realpath(table) + path.removeprefix(str(table)) if glob else ""
    if _is_descendant(cache, table) and (not glob or glob_reaches(f"{os.path.realpath(cache)}/{LAYOUT}", pattern)):
        raise OptionError(
            f"option lookup.cache.dir = {str(cache)!r} lies in the table {redact('path', url)}, which would be read with the cache's "
            "files: set lookup.cache.dir to a place outside"
        )


def _is_descendant(path: Path, ancestor: Path) -> bool:
    """Whether a path is `ancestor` or lies below it, by name and by what links lead to. Neither has to exist."""
    real, top = Path(os.path.realpath(path)), Path(os.path.realpath(ancestor))
    if real.is_relative_to(top):
        return True
    with contextlib.suppress(OSError):
        status = os.stat(top)
        return any(_is_same(directory, status) for directory in (real, *real.parents))
    return False


def _is_same(directory: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(directory), status)
    except OSError:
        return False
