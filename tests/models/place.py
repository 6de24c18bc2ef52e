"""What is at the path of a history: nothing, or a table of one kind after the other."""

import random
import shutil
from pathlib import Path

from tests.models.adapter import DrawnRows, Ground, Table
from tests.models.answers import Content
from tests.models.delta import Delta
from tests.models.files import Files
from tests.models.histories import Setup, Step
from tests.models.iceberg import Iceberg
from tests.models.managed import Managed
from tests.models.providers import Changing, Provided

_WITH_ROWS: dict[str, type[DrawnRows]] = {
    "managed": Managed,
    "delta": Delta,
    "provider": Provided,
    "changing": Changing,
}


class Place:
    """The table that is there now, if any."""

    def __init__(self, root: Path, setup: Setup) -> None:
        self.ground = Ground(root, setup)
        self.table: Table | None = None

    def take(self, step: Step) -> None:
        """Take a step. One that makes no sense now does nothing. Raises what the table's writer raises."""
        self.ground.wait_for_a_tick()
        rng = random.Random(step.salt)
        if step.op == "become":
            self._remove()
            self.table = self._make_table(step.args[0], step, rng)
        elif self.table is not None:
            self.table.take(step, rng)

    def content(self) -> Content:
        return Content(problem="no files") if self.table is None else self.table.content()

    def close(self) -> None:
        """Close the table, and forget it."""
        if self.table is not None:
            self.table.close()
        self.table = None

    def _make_table(self, kind: str, step: Step, rng: random.Random) -> Table:
        if kind == "iceberg":
            return Iceberg(self.ground, rng)
        if kind not in _WITH_ROWS:
            return Files(self.ground, kind, step.args[1:], rng)
        table = _WITH_ROWS[kind](self.ground)
        table.take(Step("append", ("here", 8)), rng)
        return table

    def _remove(self) -> None:
        self.close()
        path = self.ground.path
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
