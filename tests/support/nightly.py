"""What the long runs of a night share: their arguments, and a directory that stays where something was wrong."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def arguments(doc: str | None) -> tuple[float, int]:
    """(minutes, seed) of the command line; the seed is drawn where none was given, and printed. S3 may be used from here on."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    seed: int = given.seed if given.seed is not None else int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}", flush=True)
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    return given.minutes, seed


@contextlib.contextmanager
def directory(name: str) -> Iterator[Path]:
    """A directory for one run. If the run fails, it stays, and where it is is printed."""
    work = Path(tempfile.mkdtemp(prefix=f"lookupcache-{name}-"))
    try:
        yield work
    except BaseException:
        print(f"what was seen is in {work}", flush=True)
        raise
    shutil.rmtree(work)
