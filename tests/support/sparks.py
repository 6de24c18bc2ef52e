"""What not every Spark has, and how tests say that they need it. README.md shows the table."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import pytest

from pyspark_lookup.spark import features
from pyspark_lookup.spark.features import (
    ARROW_UDFS,
    ARROW_WRITERS,
    DATA_SOURCES,
    SQL_FUNCTIONS,
    STATEFUL_PROCESSORS,
    STREAM_LIMITS,
    VARIANTS,
    Feature,
    find,
)

REAL_TIME = Feature("real-time mode", "4.1", bool(ARROW_UDFS))
PIPELINES = Feature("Declarative Pipelines", "4.1", find("pyspark.pipelines", "table") is not None)
PARTIAL_INSERTS = Feature("INSERT of some of a table's columns", "4.1", bool(ARROW_UDFS))
FEATURES = (
    ARROW_UDFS, ARROW_WRITERS, DATA_SOURCES, PARTIAL_INSERTS, PIPELINES, REAL_TIME, SQL_FUNCTIONS, STATEFUL_PROCESSORS,
    STREAM_LIMITS, VARIANTS,
)  # fmt: skip


def needs(feature: Feature) -> pytest.MarkDecorator:
    """A mark for tests that only a Spark with the feature can run."""
    return pytest.mark.skipif(not feature, reason=f"needs {feature.title} (Spark {feature.since})")


@contextlib.contextmanager
def without(*absent: Feature) -> Iterator[None]:
    """Lookups and reads are built as on a Spark that lacks these features."""
    with pytest.MonkeyPatch.context() as patch:
        for name, feature in list(vars(features).items()):
            if feature in absent:
                patch.setattr(features, name, dataclasses.replace(feature, present=False))
        yield


UDFS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "Arrow": contextlib.nullcontext,
    "pandas": lambda: without(ARROW_UDFS),
}
"""The kinds of UDFs with which a lookup reaches Python. On a Spark without Arrow UDFs both are pandas UDFs."""
