"""Upserts, deletes, compactions and vacuums through lookup joins: what a model holds, in every cache mode."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pyspark_lookup import lookup_join
from tests.fuzzing import by_day
from tests.test_by_key import ALL_KEYS, MODES, Model

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

STEPS = ["write", "write", "write", "begin", "commit", "compact", "vacuum"]
KINDS = ["append", "append", "upsert", "upsert", "delete", "overwrite"]


@pytest.mark.parametrize("mode", by_day(MODES, 3))
def test_joins_are_as_the_model(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    """A random history of all kinds of writes and upkeep: after each step a left join finds for every key what the model has."""
    draw = random.Random(f"joins {mode}")
    model = Model(tmp_path, MODES[mode], draw.choice([0, 4000, 2**26]))
    asked = spark.createDataFrame([*ALL_KEYS, (None, "a"), (99, "b")], "id long, part string")
    options = {**model.own, **MODES[mode]}
    for _ in range(14):
        kind = draw.choice(KINDS)
        chosen = draw.sample(ALL_KEYS, draw.randrange(1, 8))
        model.take(draw.choice(STEPS), (kind, chosen), draw.random() < 0.5)
        joined = lookup_join(asked, model.path, ["id", "part"], columns=["v"], strategy="cache", options=options)
        found = sorted(map(tuple, joined.collect()), key=repr)
        expected = [row for row in model.expected if row[:2] in set(ALL_KEYS)]
        without = [
            (*key, None) for key in [*ALL_KEYS, (None, "a"), (99, "b")] if key not in {row[:2] for row in expected}
        ]
        assert found == sorted([*expected, *without], key=repr)
    model.check()
    model.close()
