"""What a query reads, as values that the planning process sends to the reading ones."""

from __future__ import annotations

import dataclasses

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.open_file import Projection, Slice
from pyspark_lookup.versions.model import Table


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """What a query reads of a table. `id` tells plans apart. `planned_s`: when it was made, on the steady clock of `boot`. `number`: the number of the
    planned version.
    """

    id: str
    options: LookupOptions
    table: Table
    projection: Projection
    planned_s: float
    boot: str
    number: int | None = None

    @property
    def needed_columns(self) -> list[str]:
        """The columns of the answer, and those that the predicate tests."""
        return self.projection.needed_columns

    def age_s(self, clock: HostClock) -> float | None:
        """How long ago it was made, in seconds; None on another host, whose clock may differ."""
        return clock.steady_s() - self.planned_s if clock.boot == self.boot else None


@dataclasses.dataclass(frozen=True)
class ReadTask:
    """One task of a plan: share `number` of `count` of the version.

    `pieces` of the version `digest` are fixed at planning; None: the version is resolved when the task reads.
    """

    number: int
    count: int
    pieces: tuple[Slice, ...] | None = None
    digest: str | None = None
