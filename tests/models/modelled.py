"""A table of a history that has rows of its own: what a step makes of them, beside the writer that makes it of the table."""

from __future__ import annotations

import abc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from tests.models.histories import Step

Row = dict[str, Any]


class Modelled(abc.ABC):
    """A table whose rows are known: those of `schema`, keyed by `keys`; `texts` are its columns of text, which partition some kinds."""

    versioned: ClassVar[bool] = True
    """Whether `lookup.version` names one of `versions`."""
    partitioned: ClassVar[bool] = False

    def __init__(
        self, path: Path, hosts: Path, keys: tuple[str, ...], texts: list[str], new_serial: Callable[[], int]
    ) -> None:
        self._path, self._hosts, self._keys, self._new_serial = path, hosts, keys, new_serial
        fixed = [("id", pa.int64()), ("v", pa.int64()), ("s", pa.int64()), ("c", pa.string())]
        self.texts = texts
        self.schema = pa.schema([*fixed, *((name, pa.string()) for name in texts)])
        self.versions: dict[int, tuple[pa.Schema, tuple[Row, ...]]] = {}
        """What the table was at versions of it."""
        self.options: dict[str, str] = {}
        """What its readers say besides."""

    @property
    @abc.abstractmethod
    def rows(self) -> tuple[Row, ...]:
        """What should be there now."""

    @abc.abstractmethod
    def take(self, step: Step, rng: random.Random) -> None:
        """Take a step. Raises what its writer raises."""

    def keeps(self, version: int) -> bool:
        """Whether a version must be there still."""
        return True

    def drawn_rows(self, op: str, count: int, rng: random.Random) -> list[Row]:
        new = [self._row(rng) for _ in range(count)]
        return list({self.key_of(row): row for row in new}.values()) if op in ("upsert", "delete") else new

    def _row(self, rng: random.Random) -> Row:
        drawn: Row = {
            "id": None if rng.random() < 0.05 else rng.randrange(12),
            "v": None if rng.random() < 0.1 else rng.randrange(8),
            "s": self._new_serial(),
            "c": rng.choice((None, "x", "some text that is longer")),
            **{name: rng.choice(("01", "1", "eu")) for name in self.texts},
        }
        return {name: drawn.get(name) for name in self.schema.names}

    def key_of(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self._keys)
