"""Claims: files that tell other processes what this one is about to do, until it is done or dead.

A claim is a file `claims/<space>/<group>-<name>`, on which its writer holds an exclusive lock. The kernel releases the lock when the writer
dies; the next reader then removes the claim.

The race: two processes could read the claims, find none, and both create one. So a caller reads the claims and creates its own under one
lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
from pathlib import Path

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.storage.disk.directory import (
    CONTENT_AT_MOST,
    LEFTOVER_AFTER_S,
    NEW_FILE,
    Directory,
    find_older,
    is_own_file,
    is_unlocked,
    list_entries_below,
    use_file,
)

_POLL_S = 0.002
_POLL_AT_MOST_S = 0.05


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim that this process holds. Release it when the work has ended, even with an error."""

    directory: Claims
    path: Path
    fd: int

    def release(self) -> None:
        self.directory._remove(self.path)
        os.close(self.fd)


class Claims(Directory):
    """A directory with claims. Read the claims and create a new one under one lock, so that no two processes claim the same."""

    def create_claim(self, space: str, group: str, payload: bytes) -> Claim:
        """Create a claim, which this process holds. Raises OSError if it cannot be written."""
        return self._retry(lambda: self._create_claim(space, group, payload))

    def _create_claim(self, space: str, group: str, payload: bytes) -> Claim:
        temporary = self._temporary()
        fd = self._open(temporary, NEW_FILE)
        path = self._root / "claims" / space / f"{group}-{temporary.name}"
        try:
            # Locked before it has its name: a reader would remove a claim without a lock.
            fcntl.flock(fd, fcntl.LOCK_EX)
            view = memoryview(payload)
            while view:
                view = view[os.write(fd, view) :]
            self._rename(temporary, path)
        except OSError:
            self._remove(temporary)
            os.close(fd)
            raise
        return Claim(self, path, fd)

    def claims(self, space: str, group: str) -> list[tuple[str, bytes]]:
        """(name, payload) of the claims of a group that their processes still hold. Other claims are removed."""
        directory = self._root / "claims" / space
        active_claims = []
        try:
            names = [name for name in os.listdir(directory) if name.startswith(f"{group}-")]
        except FileNotFoundError:
            return []
        for name in names:
            try:
                with use_file(directory / name) as fd:
                    status = os.fstat(fd)
                    if is_unlocked(fd):
                        self._remove(directory / name)
                    elif is_own_file(status) and status.st_size <= CONTENT_AT_MOST:
                        active_claims.append((name, os.pread(fd, status.st_size, 0)))
            except OSError as problem:
                if problem.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO):  # released; or a link, a socket
                    raise
        return active_claims

    def wait_for_claim(self, space: str, name: str, timeout_s: float, clock: HostClock) -> bool:
        """Wait until a claim is released, or its process has died. Returns False after `timeout_s`."""
        until_s = clock.steady_s() + timeout_s
        pause_s = _POLL_S
        while True:
            try:
                with use_file(self._root / "claims" / space / name) as fd:
                    if is_unlocked(fd):
                        return True
            except OSError:
                return True
            if clock.steady_s() >= until_s:
                return False
            clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_AT_MOST_S)

    def _sweep_claims(self, now_s: float) -> None:
        """Remove the old claims of dead processes."""
        for path in find_older(LEFTOVER_AFTER_S, now_s, list_entries_below(self._root / "claims")):
            with contextlib.suppress(OSError), use_file(path) as fd:
                if is_unlocked(fd):
                    self._remove(path)
