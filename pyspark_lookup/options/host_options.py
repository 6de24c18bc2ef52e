"""Options of a host: what it keeps, and how it speaks with stores."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

from pyspark_lookup.options.enums import CacheMode
from pyspark_lookup.options.parsing import COUNT, MIB, MOST, Kind, choice, option, parse_text, size


@dataclasses.dataclass(frozen=True)
class HostOptions:
    # fmt: off
    cache: CacheMode = option(
        "lookup.cache", choice(CacheMode), CacheMode.NONE,
        doc="What a host keeps (FLIP-221). NONE: blocks of the files. PARTIAL: also the rows of the keys that were"
            " looked up. FULL: all rows, decoded and indexed, on local disk.",
    )
    cache_dir: str | None = option(
        "lookup.cache.dir", Kind("path", parse_text), None, default_text="`lookupcache-<uid>` in the system's temporary directory",
        doc="Directory of this host's cache, mode 0700, on a local disk.",
    )
    cache_max_bytes: int | None = option(
        "lookup.cache.max-bytes", size(MIB, MOST), None, default_text="a quarter of its disk, or half of what is free there if that is less",
        doc="Budget for everything in the cache directory: blocks, snapshots, rows by key, records.",
    )
    max_retries: int = option(
        "lookup.max-retries", COUNT, 3,
        doc="Further attempts after a transient store error (n + 1 in all), with backoff (FLIP-221).",
    )
    storage: tuple[tuple[str, Any], ...] = option(
        "lookup.storage.*", Kind("any", str), (), hashed=False,
        doc="Passed to the fsspec filesystem, e.g. `lookup.storage.endpoint_url`, `lookup.storage.anon`; never "
            "credentials.",
    )
    # fmt: on

    def cache_directory(self) -> Path:
        """Where this host keeps its cache. Nothing is created here."""
        if self.cache_dir is not None:
            return Path(self.cache_dir).expanduser().absolute()
        return Path(tempfile.gettempdir()) / f"lookupcache-{os.getuid()}"

    def storage_options(self) -> dict[str, Any]:
        """Keyword arguments for the fsspec filesystem."""
        return dict(self.storage)
