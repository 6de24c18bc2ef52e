"""A change in the middle of a query: at the n-th time that it asks the operating system about the table."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_CALLS = ("scandir", "listdir", "stat", "lstat", "open", "readlink", "fstat")


class _Entry:
    """An `os.DirEntry` whose questions count, too."""

    def __init__(self, entry: os.DirEntry[str], count: Callable[[], None]) -> None:
        self._entry, self._count = entry, count

    def __getattr__(self, name: str) -> Any:
        if name in ("stat", "is_dir", "is_file", "is_symlink"):
            self._count()
        return getattr(self._entry, name)

    def __fspath__(self) -> str:
        return self._entry.path


class _Entries(list[_Entry]):
    """What `os.scandir` gives, read at once, as the system does for a small directory."""

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def at_call(number: int, root: Path, change: Callable[[], None]) -> Iterator[None]:
    """Run `change` once, before the call of that number that concerns files below `root`, but not the hosts' caches."""
    count = 0
    changing = False

    def counted() -> None:
        nonlocal count, changing
        if changing:
            return
        count += 1
        if count == number:
            changing = True
            try:
                change()
            finally:
                changing = False

    read_link = os.readlink

    def concerns(path: Any, below: Any) -> bool:
        if isinstance(path, int) or below is not None:  # a directory that was opened
            path = read_link(f"/proc/self/fd/{path if isinstance(path, int) else below}")
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        return text.startswith(str(root)) and not text.startswith(str(root / "hosts"))

    with pytest.MonkeyPatch.context() as patch:
        for name in _CALLS:
            original = getattr(os, name)

            def asked(path: Any = ".", *args: Any, _original: Any = original, _name: str = name, **more: Any) -> Any:
                if not concerns(path, more.get("dir_fd")):
                    return _original(path, *args, **more)
                counted()
                found = _original(path, *args, **more)
                if _name == "scandir" and not changing:
                    return _Entries(_Entry(entry, counted) for entry in found)
                return found

            patch.setattr(os, name, asked)
        yield
