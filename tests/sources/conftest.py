"""What tests of several kinds of tables take: a managed table's place, and a REST catalog of Iceberg tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.managed_tables import site
from tests.support.rest_catalog import RestCatalog

__all__ = ["site"]


@pytest.fixture
def rest() -> Iterator[RestCatalog]:
    with RestCatalog() as server:
        yield server
