"""Records: small JSON values of the host, created exclusively or replaced whole."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark_lookup.disk.files import LEFTOVER_AFTER_S, Directory, unwrap, wrap

__all__ = ["Records", "record_value"]

_DAY_S = 86400.0
# Counted from the last use (touched once a day), so what is in use is never swept.
_RECORDS_KEPT_S = {
    "execution": _DAY_S,
    "plan": _DAY_S,
    "unsettled": _DAY_S,
    "bounds": 7 * _DAY_S,
    "files": 7 * _DAY_S,
    "floor": 30 * _DAY_S,
    "heartbeat": 30 * _DAY_S,
    "log": 30 * _DAY_S,
    "log-tail": 30 * _DAY_S,
    "schema": 7 * _DAY_S,
    "segment": 60 * _DAY_S,  # without it a segment is read through, no more
    "snapshot": 30 * _DAY_S,
    "table": 30 * _DAY_S,
    "version": 30 * _DAY_S,
    "announced": 30 * _DAY_S,
}


class Records(Directory):
    """A directory with records, each of a kind and with a key."""

    def get_record(self, kind: str, key: str) -> Any | None:
        """A record's value; None if there is none or it is damaged."""
        return self._load_record(kind, key)

    def has_record(self, kind: str, key: str) -> bool:
        """Whether an undamaged record is there."""
        try:
            data = (self._root / "records" / kind / key).read_bytes()
        except OSError:
            return False
        return unwrap(data, f"{kind}/{key}") is not None

    def create_record(self, kind: str, key: str, value: Any) -> Any:
        """Record `value` unless the key has one already; the recorded value either way.

        Exclusive across processes: of many callers, all return the same value. OSError if the
        directory cannot be written.
        """
        path = self._record_path(kind, key)
        for _ in range(3):
            temporary = self._write_temporary(wrap(_json(value), f"{kind}/{key}"))
            try:
                os.link(temporary, path)  # fails if it exists, unlike rename
                return value
            except FileExistsError:
                winner = self._load_record(kind, key)
                if winner is not None:
                    return winner
                with self._locked("repair.lock"):  # or one might remove the record that another has just made
                    if path.exists() and self._load_record(kind, key) is None:
                        self._remove(path)  # damaged: clear the place and race for it again
            finally:
                os.unlink(temporary)
        raise OSError(f"record {path} cannot be created")

    def replace_record(self, kind: str, key: str, value: Any) -> None:
        """Record `value`, whatever was there. OSError if the directory cannot be written."""
        self._publish(self._record_path(kind, key), wrap(_json(value), f"{kind}/{key}"))

    def records(self, kind: str, prefix: str) -> Iterator[tuple[str, Any]]:
        """(key, value) of the readable records of a kind whose key starts with `prefix`."""
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(self._root / "records" / kind)):
                if name.startswith(prefix) and (value := self._load_record(kind, name)) is not None:
                    yield name, value

    def fold_records(self, kind: str, prefix: str, above: int, fold: Callable[[list[Any]], Any]) -> None:
        """Replace the idle ones of more than `above` records of a prefix by one that `fold` makes of them."""
        directory = self._root / "records" / kind
        names = [name for name in os.listdir(directory) if name.startswith(prefix)]
        if len(names) <= above:
            return
        with self._locked("fold.lock"):
            now = self._now_s()
            total = f"{prefix}-folded"
            idle: dict[str, Any] = {}
            for name in names:
                with contextlib.suppress(OSError):
                    if name == total or now - (directory / name).stat().st_mtime > LEFTOVER_AFTER_S:
                        value = self._load_record(kind, name)
                        if value is not None:
                            idle[name] = value
            if len(idle) > 1:
                self.replace_record(kind, total, fold(list(idle.values())))
                for name in idle.keys() - {total}:
                    self.remove_record(kind, name)

    def remove_record(self, kind: str, key: str) -> None:
        """Forget a record, if it is there."""
        self._remove(self._root / "records" / kind / key)

    def _record_path(self, kind: str, key: str) -> Path:
        path = self._root / "records" / kind / key
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def _load_record(self, kind: str, key: str) -> Any | None:
        path = self._root / "records" / kind / key
        try:
            with open(path, "rb") as file:
                value = record_value(file.read(), f"{kind}/{key}")
                used_at = os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        if value is None:
            self._metrics.inc("cacheFailureCount")
        elif abs(self._now_s() - used_at) > _DAY_S:
            with contextlib.suppress(OSError):
                os.utime(path)
        return value

    def _sweep_records(self, now_s: float) -> None:
        """Remove records past their time."""
        for kind, kept_s in _RECORDS_KEPT_S.items():
            directory = self._root / "records" / kind
            for path in directory.iterdir() if directory.exists() else []:
                with contextlib.suppress(OSError):
                    if now_s - path.stat().st_mtime > kept_s:
                        self._remove(path)

    def _damaged_records(self) -> Iterator[Path]:
        for path in (self._root / "records").glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                if record_value(path.read_bytes(), f"{path.parent.name}/{path.name}") is None:
                    yield path


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def record_value(blob: bytes, name: str) -> Any | None:
    """The value of a record's file; None if anything about it is wrong."""
    data = unwrap(blob, name)
    try:
        return None if data is None else json.loads(bytes(data))
    except (ValueError, RecursionError):
        return None
