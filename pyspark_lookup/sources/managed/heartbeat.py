"""Heartbeats of writers, and which writers have shown none for `lookup.write.timeout`.

A writer that takes long puts a file now and then. Each host counts these files, and measures on its own steady clock how long the count has
not changed. So no two clocks are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark_lookup.core.decoding import as_count, as_number, as_text
from pyspark_lookup.errors import UfsNotFoundError
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.stores import LOG_DIRECTORY
from pyspark_lookup.storage.stores.own_files import is_own
from pyspark_lookup.storage.ufs import Ufs

_BEATS = 8  # heartbeats per timeout


class Heartbeats:
    """The heartbeats of one table's writers. `timeout_s`: a writer that shows none for this long is dead."""

    def __init__(self, ufs: Ufs, context: HostContext, url: str, timeout_s: float) -> None:
        self._ufs = ufs
        self._context = context
        self._directory = f"{url}/{LOG_DIRECTORY}/heartbeats"
        self._key = key_of("heartbeats", ufs.scope, url)
        self._timeout_s = timeout_s
        self._next_s = context.clock.steady_s() + self.interval_s

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats of a writer."""
        return self._timeout_s / _BEATS

    def beat(self, write_id: int) -> None:
        """Put a heartbeat of the write if one is due. Call it often."""
        if self._context.clock.steady_s() < self._next_s:
            return
        self._next_s = self._context.clock.steady_s() + self.interval_s
        self._ufs.put_if_absent(self._path(write_id, f"{self._context.rng.getrandbits(64):016x}"), b"alive")

    def dead(self, table_id: str, open_ids: Sequence[int]) -> list[int]:
        """The open writes that have shown this host no heartbeat for `timeout_s`.

        Asks the store with one LIST, a few times within the timeout at most.
        """
        if self._context.disk is None or not open_ids:
            return []
        now_s = self._context.clock.steady_s()
        record = self._context.disk.get_record("heartbeat", self._key, _check_record)
        if record is None or (record["boot"], record["table"]) != (self._context.clock.boot, table_id):
            record = {"boot": self._context.clock.boot, "table": table_id, "looked_s": now_s, "ids": {}}
        recorded_ids: dict[int, list[Any]] = record["ids"]
        # A write that this host sees for the first time counts as one without heartbeats. If it has some, the next check sees a
        # change.
        ids = {id_: recorded_ids.get(id_, [0, now_s]) for id_ in open_ids}
        dead = []
        if now_s - record["looked_s"] >= self.interval_s:
            names = self._names()
            for id_, (count, since_s) in ids.items():
                signs = sum(name.startswith(f"{id_:020d}-") for name in names)
                ids[id_] = [signs, now_s if signs != count else since_s]
            dead = [id_ for id_, (_, since_s) in ids.items() if now_s - since_s >= self._timeout_s]
            record["looked_s"] = now_s
        try:
            if ids != recorded_ids or record["looked_s"] == now_s:
                self._context.disk.replace_record("heartbeat", self._key, {**record, "ids": ids})
        except OSError:
            return []
        return dead

    def forget(self, write_id: int) -> None:
        """Remove the heartbeats of a write that has ended."""
        for name in self._names():
            if name.startswith(f"{write_id:020d}-"):
                self._ufs.delete(f"{self._directory}/{name}")

    def _names(self) -> list[str]:
        try:
            return [file.url.rsplit("/", 1)[-1] for file in self._ufs.list_files(self._directory) if is_own(file.url)]
        except UfsNotFoundError:
            return []

    def _path(self, write_id: int, nonce: str) -> str:
        return f"{self._directory}/{write_id:020d}-{nonce}"


def _check_record(record: Any) -> dict[str, Any]:
    """The record if it is valid. For each write it has the number of heartbeats, and since when this number has not changed."""
    ids = {int(id_): [as_count(signs), as_number(since_s)] for id_, (signs, since_s) in record["ids"].items()}
    return {
        "boot": as_text(record["boot"]),
        "table": as_text(record["table"]),
        "looked_s": as_number(record["looked_s"]),
        "ids": ids,
    }
