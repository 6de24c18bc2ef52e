"""Files whose store tells their times in whole seconds, so that a file may be replaced without a change of its identity."""

from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.fakes import FakeClock


class CoarseFs(MemoryFileSystem):
    """Files in memory, all of them last modified at the second `modified_s`."""

    protocol = "coarse"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    modified_s: ClassVar[int] = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.removeprefix("coarse://")))

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return self._timed(super().info(path, **kwargs))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        entries = [self._timed(entry) for entry in super().ls(path, detail=True, **kwargs)]
        return entries if detail else [entry["name"] for entry in entries]

    def _timed(self, entry: dict[str, Any]) -> dict[str, Any]:
        return {**{key: value for key, value in entry.items() if key != "created"}, "mtime": float(self.modified_s)}


class CoarseFile:
    """A file in a `CoarseFs`, which is written within one second of a test's clock."""

    url = "coarse://dim/a.csv"

    def __init__(self, clock: FakeClock) -> None:
        fsspec.register_implementation("coarse", CoarseFs, clobber=True)
        clock.wall_s = float(int(clock.wall_s))
        CoarseFs.modified_s = int(clock.wall_s)

    def write(self, text: str) -> None:
        fsspec.filesystem("coarse").pipe(self.url.removeprefix("coarse:/"), text.encode())
