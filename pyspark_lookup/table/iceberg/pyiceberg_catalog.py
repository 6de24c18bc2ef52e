"""What PyIceberg is asked of catalogs: where a table's metadata lies."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import pydantic
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchIdentifierError, NoSuchNamespaceError, NoSuchTableError, NotInstalledError
from pyiceberg.io import FileIO, InputFile, OutputFile

from pyspark_lookup.base.decoding import UNREADABLE
from pyspark_lookup.base.errors import (
    CatalogUnavailableError,
    NotSupportedError,
    OptionError,
    UfsNotFoundError,
    cause_of,
)

_NOT_THERE = (NoSuchTableError, NoSuchNamespaceError, NoSuchIdentifierError)


class _PointerError(BaseException):
    """Carries where the metadata lies out of `load_table`, which would read it. Nothing in between catches it."""

    def __init__(self, location: str) -> None:
        self.location = location


class PointerFileIO(FileIO):
    """Reads nothing: says which file a catalog would read."""

    def new_input(self, location: str) -> InputFile:
        raise _PointerError(location)

    def new_output(self, location: str) -> OutputFile:
        raise NotSupportedError(f"{location} is not written here")

    def delete(self, location: str | InputFile | OutputFile) -> None:
        raise NotSupportedError(f"{location} is not written here")


_answers = threading.local()
_OURS = {
    "py-io-impl": f"{__name__}.{PointerFileIO.__name__}",
    "init_catalog_tables": "false",  # of an SQL catalog, which is read only here
}


def open_catalog(name: str, properties: Mapping[str, str]) -> Catalog:
    """The catalog of that name. Raises OptionError if it is not configured or PyIceberg lacks a part, CatalogUnavailableError."""
    try:
        catalog = load_catalog(name, **properties, **_OURS)
    except (ValueError, NotInstalledError, ImportError) as problem:
        if isinstance(problem, pydantic.ValidationError):
            raise _unavailable(name, problem) from cause_of(problem)
        raise OptionError(
            f"option lookup.catalog = {name!r}: {problem}. Configure it in .pyiceberg.yaml, in the environment, or by "
            "lookup.catalog.… (e.g. lookup.catalog.uri)"
        ) from cause_of(problem)
    except Exception as problem:
        raise _unavailable(name, problem) from cause_of(problem)
    session = getattr(catalog, "_session", None)
    if session is not None:  # of a REST catalog
        session.hooks["response"].append(_keep_answer)
    # A table's own properties may name another class to read it with.
    catalog._load_file_io = lambda *_: PointerFileIO()  # type: ignore[method-assign]
    return catalog


def _keep_answer(response: Any, *_: object, **__: object) -> None:
    _answers.last = response.content


def load_table(catalog: Catalog, name: str, table: str) -> tuple[str, dict[str, Any] | None]:
    """See `table.catalog.Catalog.load`."""
    _answers.last = None
    try:
        catalog.load_table(table)
    except _PointerError as found:
        return found.location, None
    except _NOT_THERE as problem:
        raise UfsNotFoundError(f"the Iceberg catalog {name!r} has no table {table}: {problem}") from cause_of(problem)
    except NotInstalledError as problem:
        raise OptionError(f"option lookup.catalog = {name!r}: {problem}") from cause_of(problem)
    except Exception as problem:  # of metadata that PyIceberg does not understand, too
        return _sent(name, problem)
    return _sent(name, None)


def _sent(name: str, problem: Exception | None) -> tuple[str, dict[str, Any]]:
    """The table that a REST catalog has sent in this thread. Raises CatalogUnavailableError if it is none."""
    try:
        found = json.loads(_answers.last or b"")
        _ = found["metadata"]["format-version"]
        return str(found["metadata-location"]), found["metadata"]
    except UNREADABLE as other:
        raise _unavailable(name, problem or other) from cause_of(problem or other)


def _unavailable(name: str, problem: Exception) -> CatalogUnavailableError:
    return CatalogUnavailableError(f"the Iceberg catalog {name!r} gave no answer: {type(problem).__name__}: {problem}")
