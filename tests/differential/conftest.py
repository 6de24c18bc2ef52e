"""The process that forks readers, one for all histories of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.differential.processes import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with contextlib.closing(Nursery()) as found:
        yield found
