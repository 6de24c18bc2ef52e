"""Table histories: a setup and a list of steps, drawn from a seed. Both are values that are printed and replayed.

A step does not depend on the state of the table: one that makes no sense there does nothing. So any part of a history
is a history, too, and a failing one can be shortened.
"""

import dataclasses
import random
from typing import Any, NamedTuple

from tests.models.answers import CONDITIONS
from tests.models.shapes import FAMILIES, KEYS, SHAPES

Args = tuple[Any, ...]
PARTITIONS: tuple[tuple[str, ...], ...] = (
    ("01234", "98765", "00007", "SW1A"), ("1", "2", "3000000000", "x"), ("1", "2", "1.50", "1e3"),
    ("+5", "5", "6", "1.50"), ("01", "02", "eu", "__HIVE_DEFAULT_PARTITION__"),
    ("1", "__HIVE_DEFAULT_PARTITION__", "2", "-1"), ("2024-01-01", "2024-02-29", "2024-02-30", "now"),
    ("a%2Fb", "a b", "A", "ä"), ("1.50", "2.0", "3000000000", ".5"), ("100000000000000000000", "7", "1e3", "007"),
)  # fmt: skip
"""The values of a partition column. The types of later values differ from those of the first ones."""
WHERES = tuple(CONDITIONS)
WRITERS = ("pyarrow", "pyarrow", "duckdb", "polars")
WRITES = ("append", "append", "upsert", "upsert", "delete", "overwrite")
FILES = ("put", "put", "put", "put", "remove", "roll_back", "touch", "swap", "junk", "begin_job", "end_job", "clear")
MANAGED = (*WRITES, "delete_where", "transaction", "alter", *["compact"] * 2, "vacuum", *["begin"] * 3, *["commit"] * 2)
DELTA = (*WRITES, "update", *["delete_places"] * 3, "compact", "checkpoint", "clean", "vacuum", "alter", "restore")
ICEBERG = (
    *["append", "rewrite_rows"] * 2, "remove_file", *["compact"] * 2, "rewrite_manifests", *["delete_equal"] * 5, "upsert_often",
    *["delete_places"] * 4, *["evolve"] * 2, "evolve_spec", "map_names", "upgrade", *["refer"] * 2, "write_branch", "roll_back", "expire",
)  # fmt: skip
"""The steps of each kind of table."""
KINDS = ("file", "directory", "directory", "linked", "managed", "provider", "delta", "iceberg")
OPS = {"managed": MANAGED, "provider": WRITES, "changing": WRITES, "delta": DELTA, "iceberg": ICEBERG}


@dataclasses.dataclass(frozen=True)
class Step:
    """One change of a table. `salt` is the seed of everything random in it."""

    op: str
    args: Args = ()
    salt: int = 0


@dataclasses.dataclass(frozen=True)
class Setup:
    """What does not change during a history: the table's format and partitions, and the options of its readers."""

    format: str = "parquet"
    keys: tuple[str, ...] = ("id",)
    partitions: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(column, values) of the directories."""
    partition: str = "max_pt()"
    columns: tuple[str, ...] = ("id", "v")
    where: str = WHERES[0]
    max_rows: int = 1000
    near: bool = False
    """Whether the readers' clock goes with the files' times, so that a fresh file is too new to be cached."""
    interval: str = "1 min"


@dataclasses.dataclass(frozen=True)
class History:
    """A history, and its seed. `only`: the one kind of table in it, if it was drawn for one."""

    setup: Setup
    steps: tuple[Step, ...]
    seed: int | None = None
    only: str = ""

    def __str__(self) -> str:
        lines = [f"    {step}," for step in self.steps]
        return "\n".join([f"History(\n  {self.setup},\n  (", *lines, f"  ),\n  {self.seed},\n  {self.only!r},\n)"])


class _Families(NamedTuple):
    """The shapes from which the columns of one history are drawn."""

    key: tuple[str, ...]
    changing: tuple[str, ...]


def draw(seed: int, only_kind: str = "") -> History:
    """The history of a seed. `only_kind`: the only kind of table in it."""
    rng = random.Random(f"history {only_kind} {seed}")
    changing = rng.choice(list(FAMILIES.values()))
    families = _Families(rng.choice(list(KEYS.values())), tuple(SHAPES) if rng.random() < 0.05 else changing)
    setup = _setup(rng, rng.choices(("parquet", "arrow"), (6, 2))[0])
    kind = only_kind or rng.choice(KINDS)
    steps = [Step("become", (kind, *_file(rng, setup, families)), rng.getrandbits(32))]
    for _ in range(rng.randint(14, 18) if only_kind else rng.randint(4, 10)):
        if not only_kind and rng.random() < 0.12:
            step = Step("become", (rng.choice(KINDS), *_file(rng, setup, families)), rng.getrandbits(32))
        else:
            step = _step(rng, setup, families, kind)
        kind = step.args[0] if step.op == "become" else kind
        steps.append(step)
    return History(setup, tuple(steps), seed, only_kind)


def _setup(rng: random.Random, form: str) -> Setup:
    names = rng.choice(((), (), ("r",), ("zip",), ("r", "zip")))
    partitions = tuple((name, rng.choice(PARTITIONS)) for name in names)
    keys: tuple[str, ...] = ("id",)
    if partitions and rng.random() < 0.5:
        keys = rng.choice((("zip",), ("id", "zip"), ("zip", "id")) if "zip" in names else (("r",), ("id", "r")))
    partition = "max_pt()"
    if partitions and rng.random() < 0.7:
        partition = ",".join(f"{name}={rng.choice(values)}" for name, values in partitions[: rng.randint(1, 2)])
    return Setup(
        form,
        keys,
        partitions,
        partition,
        rng.choice((("id", "v"), ("v",), ("c", "id"), ("s", "c", "v"), (*names, "s"))),
        rng.choice(WHERES),
        rng.choice((1000, 1000, 12)),
        rng.random() < 0.2,
        rng.choice(("1 min", "1 min", "0")),
    )


def _file(rng: random.Random, setup: Setup, families: _Families) -> Args:
    """The arguments of a new file: (slot, places of its partition values, shapes of id and c, rows, how, writer)."""
    places: tuple[int, ...] | None = tuple(
        min(rng.randrange(len(values)), rng.randrange(len(values))) for _, values in setup.partitions
    )
    if setup.partitions and rng.random() < 0.02:
        places = None  # beside the directories of the others
    changing = rng.choice((*families.changing, *families.changing, "null", "absent"))
    rows = rng.choice((0, 1, 3, 8, 8, 12, 60))
    how = rng.choice(("rename", "in place"))
    return (rng.randrange(4), places, rng.choice(families.key), changing, rows, how, rng.choice(WRITERS))


def _step(rng: random.Random, setup: Setup, families: _Families, kind: str) -> Step:
    salt = rng.getrandbits(32)
    if kind in OPS:
        op = rng.choice(OPS[kind])
        more: Args = ()
        if op == "transaction":
            more = (tuple(rng.choice(WRITES) for _ in range(rng.randint(1, 3))),)
        elif op == "begin":
            more = (rng.choice((*WRITES, "delete_where")),)
        return Step(op, (rng.choice(("here", "elsewhere")), rng.randint(1, 9), *more), salt)
    op = "swap" if kind == "linked" and rng.random() < 0.3 else rng.choice(FILES)
    args = _file(rng, setup, families) if op in ("put", "swap") else (rng.randrange(8),)
    step = Step(op, args, salt)
    if op in ("put", "swap", "remove") and rng.random() < (0.5 if op == "swap" else 0.2):  # while somebody reads
        return Step("meanwhile", (rng.randint(1, 12), step), salt)
    return step
