"""What the machine asks of a table of any kind."""

import abc
import dataclasses
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.models.answers import Condition, Content, Row
from tests.models.histories import Setup, Step


class Ground:
    """Where the tables of a history lie, one after the other: `path` in the directory `root`, beside the caches of hosts."""

    def __init__(self, root: Path, setup: Setup) -> None:
        self.root, self.setup = root, setup
        self.path, self.hosts = root / f"dim.{setup.format}", root / "hosts"
        self.serial = 0
        """How many numbers `new_serial` has returned so far."""

    def new_serial(self) -> int:
        self.serial += 1
        return self.serial

    def wait_for_a_tick(self) -> None:
        """Return once a new file gets a later time than all files before it: some clocks tick only every few ms."""
        probe = self.root / "probe"
        probe.touch()
        before = probe.stat().st_ctime_ns
        while probe.stat().st_ctime_ns == before:
            os.utime(probe)


@dataclasses.dataclass(frozen=True)
class Past:
    """What readers get if they name an earlier state by these options. `kept`: whether it must still be there."""

    options: Mapping[str, str]
    content: Callable[[], Content]
    kept: bool = True


class Table(abc.ABC):
    """A table of one kind, which takes steps, and knows what every reader must answer."""

    def __init__(self, ground: Ground) -> None:
        self.ground, self.name = ground, str(ground.path)
        self.options: dict[str, str] = {}
        """Further options of its readers."""

    @abc.abstractmethod
    def take(self, step: Step, rng: random.Random) -> None:
        """Take a step; one that makes no sense now does nothing. Raises what its writer raises."""

    @abc.abstractmethod
    def content(self) -> Content:
        """The current content, by an independent answer."""

    def cache_options(self, cache: str) -> dict[str, str]:
        """Further options that a cache of this mode needs."""
        return {}

    def scans(self, cache: str) -> bool:
        """Whether it can be read without keys."""
        return True

    def may_change_meanwhile(self, step: Step) -> bool:
        """Whether a read during this step must give the table before it or after it."""
        return False

    def past(self) -> list[Past]:
        """Earlier states that readers may name."""
        return []

    def condition(self, rng: random.Random) -> Condition | None:
        """A condition on the columns of now. None: the condition of the setup."""
        return None

    def other_checks(self, rng: random.Random) -> Iterator[tuple[dict[str, str], Callable[[pa.Table], str]]]:
        """Further options of a scan, each with a function that says what is wrong with the answer: "" if nothing is."""
        return iter(())

    def close(self) -> None:
        """Release what only this table needs: here nothing."""
        return


class DrawnRows(Table):
    """A table of random rows, with the columns of `schema`. `texts` are its columns of text, by which some kinds are partitioned."""

    values: tuple[str | None, ...] = ("01", "1", "eu")
    """Values of columns of text."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self.keys = ground.setup.keys
        self.texts = [name for name, _ in ground.setup.partitions]
        fixed = [("id", pa.int64()), ("v", pa.int64()), ("s", pa.int64()), ("c", pa.string())]
        self.schema = pa.schema([*fixed, *((name, pa.string()) for name in self.texts)])

    def drawn_rows(self, op: str, count: int, rng: random.Random) -> list[Row]:
        """New rows. For an upsert or a delete, each key has one."""
        rows = [self._row(rng) for _ in range(count)]
        return list({self.key_of(row): row for row in rows}.values()) if op in ("upsert", "delete") else rows

    def _row(self, rng: random.Random) -> Row:
        drawn: Row = {
            "id": None if rng.random() < 0.05 else rng.randrange(12),
            "v": None if rng.random() < 0.1 else rng.randrange(8),
            "s": self.ground.new_serial(),
            "c": rng.choice((None, "x", "some text that is longer")),
            **{name: rng.choice(self.values) for name in self.texts},
        }
        return {name: drawn.get(name) for name in self.schema.names}

    def key_of(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.keys)
