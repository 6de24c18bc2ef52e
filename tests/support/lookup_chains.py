"""Chains of lookups that a seed draws, done by `lookup_join` and by Spark's own joins."""

import dataclasses
import random
from collections.abc import Mapping

from pyspark.sql import DataFrame

from pyspark_lookup import lookup_join
from tests.support.spark_joins import by_spark
from tests.support.spark_tables import MODES

HOWS = ("left", "left", "inner", "left_semi", "left_anti")
KINDS = {"id": "number", "small": "number", "parent": "number", "weight": "number", "code": "text", "label": "text"}
"""The columns that find rows, or are found and find others; a number finds any number."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A lookup of a chain: which table, by which columns of the DataFrame, what of it, in which mode."""

    table: str
    on: Mapping[str, str]
    how: str
    columns: list[str]
    prefix: str
    mode: str


def drawn(rng: random.Random) -> list[Step]:
    """Two to five lookups; half of the keys are columns that an earlier one has found."""
    found = {name: [name] for name in KINDS}  # a column of a table: those of the DataFrame that may be it
    steps: list[Step] = []
    for number in range(rng.randint(2, 5)):
        on: dict[str, str] = {}
        for key in rng.sample(["id", "code", "weight", "small"], rng.choice([1, 1, 2])):
            kind = "text" if key == "code" else "number"
            others = {"weight"} if key != "weight" else {*KINDS} - {"weight", "small"}
            fits = [name for name, of in KINDS.items() if of == kind and name not in others]
            own = rng.choice([column for name in fits for column in found[name][-2:] if column not in on])
            on[own] = key
        how = rng.choice(HOWS)
        prefix = f"t{number}_"
        columns = rng.sample(list(KINDS), rng.randint(0, 3)) if how in ("left", "inner") else []
        for column in columns:
            found[column].append(prefix + column)
        table = rng.choice(["few", "many", "many", "none"] if how == "left" else ["few", "many"])
        steps.append(Step(table, on, how, columns, prefix, rng.choice(list(MODES))))
    return steps


def by_lookups(df: DataFrame, files: Mapping[str, str], steps: list[Step]) -> DataFrame:
    for step in steps:
        columns = step.columns if step.how in ("left", "inner") else None
        how = {"strategy": "cache", "options": MODES[step.mode]}
        df = lookup_join(df, files[step.table], step.on, step.how, columns, step.prefix, **how)
    return df


def by_joins(df: DataFrame, files: Mapping[str, str], steps: list[Step]) -> DataFrame:
    for step in steps:
        df = by_spark(df, files[step.table], step.on, step.how, step.columns, step.prefix)
    return df
