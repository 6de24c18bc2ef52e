"""The plan of a lookup whose facts wait for their row (`lookup_join(…, wait=…)`), and the functions that the plan's tasks run.

`FactDispatcher` looks up each fact once, and sends it to one of a few parts, as bytes. A result passes through its part. A fact without a row stays
there, in Spark's state (see `late_facts`). If results did not pass through the state, but were united with what leaves it, Spark would evaluate
the lookup twice. One of Spark's built-in sources has one row in each micro-batch, so there are micro-batches without facts, too. This row
visits all parts and brings the version of the micro-batch, which is the same on all hosts. A timer would bring no version.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    BinaryType,
    DayTimeIntervalType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.lookup.late_facts import (
    PARTS,
    LatePart,
    Version,
    WaitCounts,
    WaitRules,
    divide,
    from_bytes,
    to_bytes,
)
from pyspark_lookup.lookup.lookup_join import LookupSpec, PassSpec, Stage, open_pass
from pyspark_lookup.options.enums import OnError
from pyspark_lookup.spark.features import StatefulProcessor
from pyspark_lookup.spark.lookup_pass import Chain, ChainedLookup, relate_versions
from pyspark_lookup.spark.reading import (
    count_for_application,
    largest_row,
    lookup_execution,
    prepare_worker,
    session_options,
)
from pyspark_lookup.spark.types import arrow_schema, arrow_type, checked_arrow_schema
from pyspark_lookup.spark.worker_errors import without_traceback
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.host_metrics import Waiting

WAITED_COLUMN = "_lookup_waited"
"""The column, on request, with the time for which a fact has waited."""

_log = logging.getLogger("pyspark_lookup.join")
_WATERMARK = "spark.watermarkDelayMs"  # in the metadata of a column that has a watermark
_BYTES = StructType([StructField("value", BinaryType())])
_NUMBER = StructType([StructField("number", LongType())])
_PARCELS = StructType(
    [
        StructField("part", IntegerType(), False),
        *(StructField(name, BinaryType()) for name in ("results", "facts", "keys")),
        *(StructField(name, LongType(), False) for name in ("digest", "place")),
    ]
)
# The time of the micro-batch, in microseconds. Spark writes it as a number into the code that it generates, and would compile the code of each
# micro-batch again. It generates no code for `array_sort`, but that is slow, so each parcel gets the time, not each fact.
_NOW = "element_at(array_sort(array(unix_micros(current_timestamp()))), 1)"
_FRAME_BYTES = 16 * 2**20
_NONE = "-"
_COUNTS = ("waiting", "woken", "expired", "crowded")
# Few columns, because PySpark spends half a millisecond on each of them, for each part. `counts`: numbers as text, with spaces between them.
_OUTCOMES = StructType([StructField("results", BinaryType()), StructField("counts", StringType())])


@dataclasses.dataclass(frozen=True)
class Wait:
    """How long the facts of a lookup wait. `column`: the column with the time from which a fact waits; None: it waits from its arrival on.
    `max_rows`: how many facts may wait. `shown`: whether the result has a column that says how long each fact has waited. `retry_s`: after how
    many seconds a provider without versions is asked again for keys without rows; None: the table has versions."""

    seconds: float
    column: str | None
    max_rows: int
    shown: bool
    retry_s: float | None = None

    def __str__(self) -> str:
        text = "from the arrival" if self.column is None else f"of {self.column}, by the watermark"
        again = "" if self.retry_s is None else f"; keys without rows are looked up again every {self.retry_s:g} s"
        return f"{self.seconds:g} s {text}{again}"


def has_watermark(field: StructField) -> bool:
    return _WATERMARK in field.metadata


def join_late(chain: Chain, lookup: ChainedLookup, wait: Wait) -> DataFrame:
    """The stream with the lookup's columns, in which facts wait for their row."""
    base, spark = chain.base, chain.base.sparkSession
    relations = relate_versions(base, {lookup.version: lookup})
    (version,) = (relation.tokens[lookup.version][:2] for relation in relations if lookup.version in relation.tokens)
    # Of Spark's built-in sources, only this one has a row in each micro-batch and leaves `availableNow` its limits.
    ticks = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).option("numPartitions", 1).load()
    facts = base
    for relation in relations:
        facts, ticks = (rows.crossJoin(sf.broadcast(relation.versions)) for rows in (facts, ticks))
    visit = [sf.col(column).alias(f"_lookup_{name}") for column, name in zip(version, ("digest", "place"), strict=True)]
    hidden = [column for relation in relations for column in relation.columns]
    keys = [sf.expr(key.sql).alias(f"_lookup_key_{number}") for number, key in enumerate(lookup.keys)]
    rules = _rules(base, lookup, wait)
    spec, waiting_spec = _pass_text(lookup, lookup.spec), _pass_text(lookup, _without_cached_misses(lookup, wait))
    passed = facts.select("*", *keys, *visit).drop(*hidden)
    parcels = (
        # `mapInArrow` selects the columns by their names, which may have dots or be the same.
        passed.toDF(*map("_lookup_{}".format, range(len(passed.columns)))).mapInArrow(
            FactDispatcher(chain.name, rules.to_text(), spec), _PARCELS
        )
    )
    empty = [sf.lit(None).cast("binary").alias(name) for name in ("results", "facts", "keys")]
    parcels = parcels.unionAll(ticks.select(sf.expr(f"explode(sequence(0, {PARTS - 1})) AS part"), *empty, *visit))
    outcomes = (
        parcels.withColumn("now", sf.expr(_NOW))
        .groupBy("part")
        .transformWithStateInPandas(
            WaitingFacts(rules.to_text(), waiting_spec, lookup.name),
            _OUTCOMES,
            "Append",
            "None" if wait.column is None else "EventTime",
        )
    )
    counts = sf.split("counts", " ")
    oldest = sf.timestamp_micros(sf.nullif(counts[len(_COUNTS)], sf.lit(_NONE)).cast("long"))
    outcomes = outcomes.observe(
        lookup.name.replace("lookup", "late", 1),
        *(sf.sum(counts[place].cast("long")).alias(name) for place, name in enumerate(_COUNTS)),
        sf.min(oldest).alias("oldest"),
    )
    fields = [_without_watermark(field) for field in base.schema.fields] + lookup.fields
    if wait.shown:
        fields.append(StructField(WAITED_COLUMN, DayTimeIntervalType()))
    return outcomes.mapInArrow(ResultReader(rules.to_text()), StructType(fields))


def _pass_text(lookup: ChainedLookup, spec: LookupSpec) -> str:
    """The pass of one lookup, as text for tasks."""
    places = tuple(range(len(lookup.keys)))
    return PassSpec((Stage(spec, places, (0, 1), "left", lookup.build),), many=True).to_text()


def _without_cached_misses(lookup: ChainedLookup, wait: Wait) -> LookupSpec:
    """The lookup of keys for which facts wait. If keys are looked up again after a time, it uses no partial cache, which may say they have no rows."""
    return lookup.spec if wait.retry_s is None else dataclasses.replace(lookup.spec, caches_keys=False)


def _without_watermark(field: StructField) -> StructField:
    """A copy of a column without its watermark. With it, Spark would drop facts that have waited as late."""
    metadata = {key: value for key, value in field.metadata.items() if key != _WATERMARK}
    return StructField(field.name, field.dataType, field.nullable, metadata)


def _rules(base: DataFrame, lookup: ChainedLookup, wait: Wait) -> WaitRules:
    names = [name.lower() for name in base.columns]
    return WaitRules(
        checked_arrow_schema(base.schema, "argument wait: the DataFrame's"),
        pa.schema([(f"{number} {key.column}", arrow_type(key.type)) for number, key in enumerate(lookup.keys)]),
        arrow_schema(StructType(lookup.fields)),
        round(wait.seconds * 1_000_000),
        None if wait.column is None else names.index(wait.column.lower()),
        lookup.how == "left",
        -(-wait.max_rows // PARTS),
        WAITED_COLUMN if wait.shown else None,
        key_of(lookup.options_text, *lookup.table.keys, lookup.match),
        lookup.table.url,
        lookup.table.parsed.system is not None,
        None if wait.retry_s is None else round(wait.retry_s * 1_000_000),
        lookup.table.parsed.read.on_error is OnError.STALE,
    )


class _Lookups:
    """Implements `LookUp` by the one lookup of a pass, in a task. `spec`: the pass, as text."""

    def __init__(self, spec: str) -> None:
        prepare_worker()
        count_for_application()
        self._pass = open_pass(spec, session_options())
        self._stage = self._pass.spec.stages[0]
        self._execution = lookup_execution(self._stage.build)
        self._row_bytes = largest_row()

    def __call__(self, keys: Sequence[pa.Array], version: Version) -> Iterator[tuple[int, Any, pa.StructArray]]:
        versions = [pa.repeat(pa.scalar(number, pa.int64()), len(keys[0])) for number in version]
        start = 0
        for answers in self._pass.answers(keys, versions, [self._execution], self._row_bytes):
            yield start, answers.value_lengths().to_numpy(zero_copy_only=False), answers.flatten()
            start += len(answers)

    def cast(self, keys: Sequence[pa.Array]) -> list[pa.Array]:
        """The keys in the types in which they are looked up."""
        return self._stage.lookup.cast_arguments(keys)

    def publish(self) -> None:
        self._pass.publish()

    def publish_counts(self, name: str, counts: WaitCounts, now_us: int) -> None:
        """Publish what the metrics and the report of this host say of the facts that wait in this task's parts. `name`: the lookup's."""
        (engine,) = self._pass.engines
        for counter in ("held", "woken", "expired", "crowded"):
            engine.reader.metrics.inc(f"late{counter.title()}Count", getattr(counts, counter))
        context = TaskContext.get()
        if context is not None:
            lookup = key_of(context.getLocalProperty("sql.streaming.queryId"), name)[:16]
            waiting = Waiting(now_us, counts.waiting, counts.oldest_us)
            engine.remember_waiting(lookup, context.partitionId(), waiting)
        self._pass.publish()


class FactDispatcher:
    """A function for `mapInArrow` that looks up facts and returns parcels.

    Its input has the columns of the facts, the keys, and the two columns of the version.
    """

    def __init__(self, name: str, rules: str, spec: str) -> None:
        self.__name__ = name  # the name that plans show
        self._rules = rules
        self._spec = spec

    @without_traceback
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rules, look_up = WaitRules.from_text(self._rules), _Lookups(self._spec)
        count = len(rules.facts)
        try:
            for batch in batches:
                if not batch.num_rows:
                    continue
                facts = pa.RecordBatch.from_arrays(_cast(batch.columns[:count], rules.facts), schema=rules.facts)
                keys = _cast(batch.columns[count:-2], rules.keys)
                digest, place = (column[0].as_py() for column in batch.columns[-2:])
                answers = look_up(keys, (digest, place))
                parcels, size = list[tuple[Any, ...]](), 0
                for parcel in divide(rules, facts, keys, look_up.cast(keys), answers):
                    parcels.append((*dataclasses.astuple(parcel), digest, place))
                    size += sum(map(len, filter(None, (parcel.results, parcel.facts, parcel.keys))))
                    if size >= _FRAME_BYTES:
                        yield _parcel_batch(parcels)
                        parcels, size = [], 0
                look_up.publish()
                if parcels:
                    yield _parcel_batch(parcels)
        finally:
            look_up.publish()


class ResultReader:
    """A function for `mapInArrow` that turns the outcomes of the parts, which are bytes, into rows."""

    __name__ = "lookup_results"

    def __init__(self, rules: str) -> None:
        self._rules = rules

    @without_traceback
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        prepare_worker()
        schema = WaitRules.from_text(self._rules).results
        for batch in batches:
            for value in batch.column(0):
                if value.is_valid:
                    yield from_bytes(value.as_buffer(), schema)


class _State:
    """Implements `PartState` by the state of a stateful processor, for the group that Spark has set."""

    def __init__(self, handle: Any) -> None:
        self._index = handle.getValueState("index", _BYTES)
        self._chunks = {kind: handle.getMapState(kind, _NUMBER, _BYTES) for kind in ("facts", "keys")}

    def read_index(self) -> bytes | None:
        value = self._index.get()
        return None if value is None else bytes(value[0])

    def write_index(self, data: bytes | None) -> None:
        if data is None:
            self._index.clear()
        else:
            self._index.update((data,))

    def read(self, kind: str, chunk: int) -> bytes:
        return bytes(self._chunks[kind].getValue((chunk,))[0])

    def write(self, kind: str, chunk: int, data: bytes) -> None:
        self._chunks[kind].updateValue((chunk,), (data,))

    def remove(self, kind: str, chunk: int) -> None:
        self._chunks[kind].removeKey((chunk,))


class WaitingFacts(StatefulProcessor):  # type: ignore[misc]
    """The stateful processor that keeps the facts of each part (`LatePart`) in Spark's state. `name`: the lookup's name."""

    def __init__(self, rules: str, spec: str, name: str) -> None:
        self._rules_text = rules
        self._spec = spec
        self._name = name
        self._look_up: _Lookups | None = None
        self._counts: WaitCounts | None = None
        self._total, self._now_us = WaitCounts(), 0  # of all parts of the task

    def init(self, handle: Any) -> None:
        self._state = _State(handle)

    @without_traceback
    def handleInputRows(self, key: Any, rows: Iterator[Any], timers: Any) -> Iterator[Any]:
        if self._look_up is None:
            self._rules, self._look_up = WaitRules.from_text(self._rules_text), _Lookups(self._spec)
        results, size = list[bytes](), 0
        for result in self._visit(rows, timers.getCurrentWatermarkInMs() * 1000):
            results.append(result)
            size += len(result)
            if size >= _FRAME_BYTES:
                yield _outcomes(results, WaitCounts())
                results, size = [], 0
        assert self._counts is not None
        self._total += self._counts
        if self._counts.crowded:
            log_event(_log, logging.WARNING, "late-rows-crowded", table=self._rules.table, rows=self._counts.crowded)
        yield _outcomes(results, self._counts)

    def _visit(self, rows: Iterator[Any], watermark_us: int) -> Iterator[bytes]:
        """The results of a part's parcels, as bytes."""
        assert self._look_up is not None
        part, schemas = None, (self._rules.facts, self._rules.keys)
        for frame in rows:
            for *_, result, facts, keys, digest, place, now in frame.to_numpy(object).tolist():
                if part is None:
                    self._now_us = int(now)
                    part = LatePart(self._state, self._rules, self._look_up, self._now_us, watermark_us)
                yield from map(to_bytes, part.wake((int(digest), int(place))))
                if result is not None:
                    yield result
                if facts is not None:
                    yield from map(to_bytes, part.arrive(*map(from_bytes, (facts, keys), schemas)))
        assert part is not None
        yield from map(to_bytes, part.finish())
        self._counts = part.counts

    def close(self) -> None:
        if self._look_up is not None:
            self._look_up.publish_counts(self._name, self._total, self._now_us)


def _outcomes(results: Sequence[bytes], counts: WaitCounts) -> Any:
    """Rows that a part returns, as a pandas DataFrame. The first row also has the counts."""
    numbers = [*(getattr(counts, name) for name in _COUNTS), _NONE if counts.oldest_us is None else counts.oldest_us]
    counted = [" ".join(map(str, numbers)), *[None] * (len(results) - 1)]
    columns: dict[str, Any] = {"results": results or [None], "counts": counted}
    return importlib.import_module("pandas").DataFrame(columns)


def _cast(columns: Sequence[pa.Array], schema: pa.Schema) -> list[pa.Array]:
    """Columns as Spark gives them, in the types of a schema: they may differ in the time zone, and in the width of texts."""
    return [c if c.type == field.type else c.cast(field.type) for c, field in zip(columns, schema, strict=True)]


def _parcel_batch(parcels: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    schema = arrow_schema(_PARCELS)
    arrays = [pa.array(column, field.type) for column, field in zip(zip(*parcels, strict=True), schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
