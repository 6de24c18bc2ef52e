"""What tests of several kinds of tables take: a managed table's place, a REST catalog of Iceberg tables, a host that looks things up."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyspark_lookup.sources.providers import provider as provided_table
from tests.support.large_tables import lose, made_objects, mapped_from, restart
from tests.support.lookup_functions import Desk
from tests.support.managed_tables import site
from tests.support.rest_catalog import RestCatalog

__all__ = ["lose", "made_objects", "mapped_from", "restart", "site"]


@pytest.fixture
def rest_catalog() -> Iterator[RestCatalog]:
    with RestCatalog() as server:
        yield server


@pytest.fixture
def desk(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """A host on which nobody has looked anything up."""
    desk = Desk(cache_dir, monkeypatch)
    yield desk
    desk.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hanging calls wait for: set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def prompt(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are given up soon after their timeout, and what that leaves behind is gone when the test is over."""
    monkeypatch.setattr(provided_table, "_GRACE_S", 0.1)
    desk.gives_up = True
