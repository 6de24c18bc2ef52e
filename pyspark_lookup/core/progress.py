"""Progress of a long build: a bar in a terminal or notebook, log lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator

from tqdm.auto import tqdm

from pyspark_lookup.core.forks import resets_in_child

_log = logging.getLogger("pyspark_lookup.progress")
_BAR_AFTER_S = 1.0
_LINE_EVERY_S = 10.0


class _Bar(tqdm):  # type: ignore[misc]
    """A bar with a lock of its own, and without tqdm's thread: a child may not inherit either from a parent that draws one."""

    monitor_interval = 0

    @classmethod
    def reset_in_child(cls) -> None:
        cls.set_lock(threading.RLock())


_Bar.reset_in_child()
resets_in_child(_Bar)


@contextlib.contextmanager
def show(
    label: str, now_s: Callable[[], float], interactive: bool | None = None
) -> Iterator[Callable[[int, int], None]]:
    """Show the reported (bytes done, bytes in total) while the block runs.

    A build of less than a second shows nothing; log lines come every ten seconds, and one at the end of a build that had any. `interactive`
    None: a bar if somebody watches the output.
    """
    if _is_interactive() if interactive is None else interactive:
        with _Bar(desc=label, unit="B", unit_scale=True, delay=_BAR_AFTER_S, mininterval=0, leave=False) as bar:

            def draw(done_bytes: int, total_bytes: int) -> None:
                bar.total = total_bytes
                bar.update(done_bytes - bar.n)

            yield draw
        return
    started = logged_s = now_s()
    has_logged = False

    def log(done_bytes: int, total_bytes: int) -> None:
        nonlocal logged_s, has_logged
        if now_s() - logged_s >= _LINE_EVERY_S or (has_logged and done_bytes >= total_bytes):
            logged_s, has_logged = now_s(), True
            _log.info(
                "%s: %d %% of %d bytes after %.0f s",
                label,
                100 * done_bytes // max(total_bytes, 1),
                total_bytes,
                logged_s - started,
            )

    yield log


def _is_interactive() -> bool:
    """Whether somebody watches the output: it goes to a terminal or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
