"""The command line, run in the process of the test."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyspark_lookup.cli import main

KEYED = ("-o", "lookup.keys=id")


@dataclasses.dataclass(frozen=True)
class Ran:
    """A command that has ended: its exit code, what it printed, and said beside that."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, on a cache directory of its own."""

    def go(*arguments: object) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments), "--cache-dir", str(cache_dir)])
        output = capsys.readouterr()
        return Ran(ended.value.code if isinstance(ended.value.code, int) else 0, output.out, output.err)

    return go
