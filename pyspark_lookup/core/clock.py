"""`HostClock`: a host's clocks, passed as one argument.

`wall_s` is Unix time, for comparing with the times of files. `steady_s` counts from the host's start
and is never stepped; its values compare between processes of the same `boot`, and only there.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from pyspark_lookup.core.threads import sleep


def _steady_s() -> float:
    # CLOCK_BOOTTIME goes on while the machine is suspended, and an age must include that time.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclasses.dataclass(frozen=True)
class HostClock:
    """The seconds of two clocks, the boot to which the steady one belongs, and a way to wait."""

    wall_s: Callable[[], float] = time.time
    steady_s: Callable[[], float] = _steady_s
    sleep: Callable[[float], None] = sleep
    boot: str = dataclasses.field(default_factory=_boot_id)
