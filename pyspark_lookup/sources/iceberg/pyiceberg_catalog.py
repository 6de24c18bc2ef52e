"""Asks a catalog, through PyIceberg, for the location of a table's metadata file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pydantic
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchIdentifierError, NoSuchNamespaceError, NoSuchTableError, NotInstalledError
from pyiceberg.io import FileIO, InputFile, OutputFile

from pyspark_lookup.core.decoding import UNREADABLE
from pyspark_lookup.errors import CatalogUnavailableError, NotSupportedError, OptionError, UfsNotFoundError, raise_ours

_OK = 200
_NOT_THERE = (NoSuchTableError, NoSuchNamespaceError, NoSuchIdentifierError)


class _PointerError(BaseException):
    """Carries the location of the metadata file out of PyIceberg's `load_table`, before that function reads the file.

    Also carries the metadata itself, if the catalog sent it. It is a BaseException, so that no handler in PyIceberg catches it.
    """

    def __init__(self, location: str, metadata: dict[str, Any] | None = None) -> None:
        self.location = location
        self.metadata = metadata


class PointerFileIO(FileIO):
    """A FileIO that reads nothing: it raises `_PointerError` for the file that PyIceberg is about to read."""

    def new_input(self, location: str) -> InputFile:
        raise _PointerError(location)

    def new_output(self, location: str) -> OutputFile:
        raise NotSupportedError(f"{location}: lookupcache does not write to Iceberg tables")

    def delete(self, location: str | InputFile | OutputFile) -> None:
        raise NotSupportedError(f"{location}: lookupcache does not delete files of Iceberg tables")


_CATALOG_PROPERTIES = {
    "py-io-impl": f"{__name__}.{PointerFileIO.__name__}",
    "init_catalog_tables": "false",  # an SQL catalog must not create its tables, because it is only read here
}


def open_catalog(name: str, properties: Mapping[str, str]) -> Catalog:
    """The catalog with this name.

    Raises OptionError if the catalog is not configured, or PyIceberg was installed without a part that the catalog needs, and
    CatalogUnavailableError if the catalog does not answer.
    """
    try:
        catalog = load_catalog(name, **properties, **_CATALOG_PROPERTIES)
    except (ValueError, NotInstalledError, ImportError) as problem:
        if isinstance(problem, pydantic.ValidationError):
            raise_ours(_unavailable_error(name, problem), problem)
        raise_ours(
            OptionError(
                f"option lookup.catalog = {name!r}: {problem}. Configure it in .pyiceberg.yaml, in the environment, or by "
                "lookup.catalog.… (e.g. lookup.catalog.uri)"
            ),
            problem,
        )
    except Exception as problem:
        raise_ours(_unavailable_error(name, problem), problem)
    session = getattr(catalog, "_session", None)
    if session is not None:  # a REST catalog has a session
        session.hooks["response"].append(_take_table)
    # A table's properties may name another FileIO, which would then be used instead of `PointerFileIO`.
    catalog._load_file_io = lambda *_: PointerFileIO()  # type: ignore[method-assign]
    return catalog


def _take_table(response: Any, *_: object, **__: object) -> None:
    """Take the table out of a REST catalog's raw answer, and raise it as a `_PointerError`.

    PyIceberg would parse the whole answer, and refuse parts that it does not know yet.
    """
    try:
        answer = json.loads(response.content)
        location, metadata, _ = answer["metadata-location"], answer["metadata"], answer["metadata"]["format-version"]
    except UNREADABLE:
        return
    if response.status_code == _OK and isinstance(location, str):
        raise _PointerError(location, metadata)


def load_table(catalog: Catalog, name: str, table: str) -> tuple[str, dict[str, Any] | None]:
    """(location of the metadata file of `table`, the metadata itself if the catalog sends it), see `sources.iceberg.catalog.Catalog.load`."""
    try:
        catalog.load_table(table)
    except _PointerError as pointer:
        return pointer.location, pointer.metadata
    except _NOT_THERE as problem:
        raise_ours(UfsNotFoundError(f"the Iceberg catalog {name!r} has no table {table}: {problem}"), problem)
    except NotInstalledError as problem:
        raise_ours(OptionError(f"option lookup.catalog = {name!r}: {problem}"), problem)
    except Exception as problem:
        raise_ours(_unavailable_error(name, problem), problem)
    raise _unavailable_error(name, ValueError("the answer has no metadata"))


def _unavailable_error(name: str, problem: Exception) -> CatalogUnavailableError:
    return CatalogUnavailableError(
        f"the Iceberg catalog {name!r} gave no answer: {type(problem).__name__}: {problem}; try again later, or check "
        "its properties (PyIceberg's configuration, lookup.catalog.…)"
    )
