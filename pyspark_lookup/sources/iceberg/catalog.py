"""`Catalog`: asks an Iceberg catalog, by PyIceberg, where a table's metadata lies now."""

from __future__ import annotations

import concurrent.futures
import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from pyspark_lookup.core import threads
from pyspark_lookup.errors import CatalogUnavailableError, OptionError, raise_ours

T = TypeVar("T")

_CALL_S = 60.0  # PyIceberg's client of REST catalogs waits for ever
_READER = "pyspark_lookup.sources.iceberg.pyiceberg_catalog"


class Catalog:
    """A catalog by its name in PyIceberg's configuration, or by the `properties` that take its place. Belongs to one process.

    PyIceberg is imported when the catalog is first asked. `call_s`: after so long a call is given up.
    """

    def __init__(self, name: str, properties: Sequence[tuple[str, str]], call_s: float = _CALL_S) -> None:
        self.name = name
        self._properties = dict(properties)
        self._call_s = call_s
        self._lock = threading.Lock()
        self._client: Any = None

    def load(self, table: str) -> tuple[str, dict[str, Any] | None]:
        """(where the metadata of a table lies, the metadata itself if the catalog sends it). One call.

        Raises UfsNotFoundError if it knows no such table, CatalogUnavailableError, OptionError for one that is not configured.
        """
        reader = _import(self.name)
        with self._lock:
            client = self._client
        if client is None:
            client = self._within(lambda: reader.open_catalog(self.name, self._properties))
            with self._lock:
                self._client = client
        return cast(
            "tuple[str, dict[str, Any] | None]", self._within(lambda: reader.load_table(client, self.name, table))
        )

    def _within(self, call: Callable[[], T]) -> T:
        """What a call returns. Raises CatalogUnavailableError if it takes longer than `call_s`."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as problem:
                future.set_exception(problem)

        threads.start("lookupcache-catalog", run, foreign=True)
        try:
            return future.result(self._call_s)
        except concurrent.futures.TimeoutError:
            with self._lock:
                self._client = None
            raise CatalogUnavailableError(
                f"the Iceberg catalog {self.name!r} has not answered within {self._call_s:g} s"
            ) from None


def _import(name: str) -> Any:
    try:
        return importlib.import_module(_READER)
    except ImportError as problem:
        raise_ours(
            OptionError(
                f"option lookup.catalog = {name!r} needs PyIceberg, which this machine does not have: pip install "
                f"'pyspark-lookup[iceberg]' ({problem})"
            ),
            problem,
        )
