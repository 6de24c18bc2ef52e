"""A store that fails, hesitates and loses its answers, as a seed says."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pyspark_lookup.base.errors import UfsNotFoundError, UfsUnavailableError
from pyspark_lookup.io.stores import Count, FileVersion, Listing, Store

T = TypeVar("T")


class ChaoticStore:
    """`inner`, of whose calls some fail before they arrive, some after, and some take up to `slow_s` longer.

    Data files that are removed are kept in `graves`, by their names, for the checker.
    """

    def __init__(
        self, inner: Store, rng: random.Random, graves: Path, failing: float = 0.08, slow_s: float = 0.02
    ) -> None:
        self._graves = graves
        self._inner = inner
        self._rng = rng
        self._failing = failing
        self._slow_s = slow_s
        self.scope, self.pins = inner.scope, inner.pins

    def _call(self, call: Callable[..., T], *arguments: Any) -> T:
        chance = self._rng.random
        if chance() < 0.2:
            time.sleep(chance() * self._slow_s)
        if chance() < self._failing:
            raise UfsUnavailableError("injected: the request was lost")
        answer = call(*arguments)
        if chance() < self._failing:
            raise UfsUnavailableError("injected: the answer was lost")
        return answer

    def url_of(self, path: str) -> str:
        return self._inner.url_of(path)

    def get_meta(self, path: str, count: Count) -> FileVersion:
        return self._call(self._inner.get_meta, path, count)

    def list_status(self, path: str, count: Count) -> Listing:
        return self._call(self._inner.list_status, path, count)

    def get_status(self, path: str, count: Count) -> FileVersion | Listing:
        return self._call(self._inner.get_status, path, count)

    def list_files(self, path: str, after: str, at_most: int | None, count: Count) -> tuple[FileVersion, ...]:
        return self._call(self._inner.list_files, path, after, at_most, count)

    def list_tree(self, path: str, count: Count) -> tuple[FileVersion, ...]:
        return self._call(self._inner.list_tree, path, count)

    def last_change_s(self, path: str, count: Count) -> tuple[float | None, float]:
        return self._call(self._inner.last_change_s, path, count)

    def put_if_absent(self, path: str, data: bytes, count: Count) -> FileVersion | None:
        return self._call(self._inner.put_if_absent, path, data, count)

    def delete(self, path: str, count: Count) -> None:
        name = path.rpartition("/")[2]
        if name.endswith(".parquet") and not (self._graves / name).exists():
            with contextlib.suppress(UfsNotFoundError):
                file = self._inner.get_meta(path, count)
                with self._inner.pinned(file) as read:
                    held = self._graves / f".{name}.{os.getpid()}"
                    held.write_bytes(read(0, file.size))
                held.rename(self._graves / name)
        self._call(self._inner.delete, path, count)

    @contextlib.contextmanager
    def pinned(self, file: FileVersion) -> Iterator[Callable[[int, int], bytes]]:
        with self._inner.pinned(file) as read:
            yield lambda offset, length: self._call(read, offset, length)
