"""`check_provider` checks a provider against the rules in docs/providers.md: alone, in several threads and processes, and with the caches."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import random
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import pyarrow as pa

from pyspark_lookup.columnar.keys import (
    KEY_INDEX,
    Keys,
    key_numbers,
    match_rows,
    one_array,
    take_matches,
)
from pyspark_lookup.columnar.types import spark_schema, widens
from pyspark_lookup.core import threads
from pyspark_lookup.errors import LookupFunctionError, PysparkLookupError, SchemaError, foreign_repr, raise_ours
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.sources.providers.call_runner import CallFailedError, CallTimeoutError, iterate_in_thread
from pyspark_lookup.sources.providers.functions import (
    AsyncLookupFunction,
    AsyncLookupFunctionProvider,
    LookupContext,
    LookupFunction,
    LookupFunctionProvider,
    LookupProvider,
)
from pyspark_lookup.sources.providers.provider import ReturnedRows, show_keys
from pyspark_lookup.testing.instances import CallRaisedError, Instance, run_in_child
from pyspark_lookup.testing.rules import ProviderCheckError
from pyspark_lookup.testing.sample_keys import absent_keys, distinct, many_keys, opposite_zeros
from pyspark_lookup.testing.table_states import TableStates, find_difference, rows_of

Factory = Callable[[LookupContext], LookupProvider]

_KEYS_AT_LEAST = 3
_ATTEMPTS = 4  # of a call whose connection was lost: one more than the default of lookup.max-retries
_AT_ONCE = 100  # calls of an asynchronous function: the default of lookup.async.capacity
_WRITES = 8
_OPEN = ("open files and connections", "threads")
_TIMES = 6  # how often a call that must leave nothing open is repeated
_SETTLE_S = 10.0  # the longest time until what was closed is gone
_WRITE_WAIT_S = 1.0  # the longest wait for a write beside a scan, which may have locked the table
_ELSEWHERE = "LKC-05:45"  # a time zone, east of UTC
_module_numbers = itertools.count(1)


def check_provider(
    factory: Factory,
    rows: pa.Table,
    keys: str | Sequence[str],
    *,
    path: str | None = None,
    options: Mapping[str, str] | None = None,
    write: Callable[[pa.Table], object] | None = None,
    outage: Callable[[], contextlib.AbstractContextManager[object]] | None = None,
    survives_fork: bool = True,
    timeout_s: float = 30.0,
    largest_call: int = 10_000,
    rng: random.Random | None = None,
) -> None:
    """Raise a `ProviderCheckError` if a provider breaks one of the rules in docs/providers.md.

    `factory`: what `lookup.provider` would name. `rows`: all rows that the provider's table has now, with the columns of its schema, and with
    three keys or more. Include keys with several rows, nulls in keys and in other columns, and whatever else is special in your system.
    `keys`: the names of the key columns. `path`, `options`: for `LookupContext`; the names of options have no prefix.

    `write`: replaces all rows of the table by the rows that it is passed, in one transaction, and changes the `version`. With it, versions,
    changes and rows are also checked after writes, while another thread writes, and in a table with `largest_call` more rows, which have keys
    of the check's and other values of `rows`; then `rows` are written back. `outage`: returns a context manager; inside its block, the system
    does not answer, or refuses. `survives_fork`: False for a client that must not be used before a fork; the check then forks before
    it uses the provider.

    `timeout_s`: after so many seconds, a call of the provider counts as hanging. `largest_call`: the most keys in one
    call, if the function's `batch_size` does not allow fewer. `rng`: draws the keys; None: the same ones each time. Raises ValueError for `rows` with too few keys.
    """
    names = (keys,) if isinstance(keys, str) else tuple(keys)
    context = LookupContext(names, None, dict(options or {}), path)
    check = _Check(factory, context, rows, timeout_s, largest_call, rng or random.Random(42))
    if not survives_fork:
        check.check_fork(None)
    check.check_factory()
    with check.make_open(context) as instance:
        check.check_lookups(instance)
        check.check_contexts(instance)
        check.check_scans(instance)
        check.check_versions(instance)
        check.check_threads(instance)
        if survives_fork:
            check.check_fork(instance)
        check.check_reopening(instance)
    check.check_caches()
    if write is not None:
        try:
            check.check_writes(write)
            check.check_many_rows(write)
        finally:
            write(rows)
    if outage is not None:
        check.check_outage(outage)


class _Check:
    """The checks of one provider. Each method that begins with `check_` checks some rules, and raises ProviderCheckError."""

    def __init__(
        self,
        factory: Factory,
        context: LookupContext,
        rows: pa.Table,
        timeout_s: float,
        largest_call: int,
        rng: random.Random,
    ) -> None:
        self._factory = factory
        self._context = context
        self._timeout_s = timeout_s
        self._largest_call = largest_call
        self._rng = rng
        self._schema = self._checked_schema(self._make(context).provider, rows)
        self._returned_rows = ReturnedRows("under test", self._schema)
        columns = [one_array(rows.column(field.name)).cast(field.type) for field in self._schema]
        self._rows = pa.Table.from_arrays(columns, schema=self._schema)
        self._keys = distinct(self._rows.select(context.keys))
        if self._keys.num_rows < _KEYS_AT_LEAST:
            raise ValueError(
                f"rows have {self._keys.num_rows} different keys without nulls: pass rows with {_KEYS_AT_LEAST} keys or more"
            )
        self._absent = absent_keys(self._keys, 200, rng)

    # --- the factory ------------------------------------------------------------------------------

    def _make(self, context: LookupContext) -> Instance:
        """A new instance of the provider. Checks that it has the parts of one of the kinds of providers."""
        try:
            made = next(iterate_in_thread(lambda: [self._factory(context)], "lookupcache-check-make", self._timeout_s))
        except CallTimeoutError:
            raise ProviderCheckError("factory", f"the factory has not returned within {self._timeout_s:g} s") from None
        except CallFailedError as failed:
            problem = ProviderCheckError("factory", f"the factory raised {foreign_repr(failed.problem)} for {context}")
            raise_ours(problem, failed.problem)
        if not isinstance(made, LookupProvider):
            raise ProviderCheckError("kind", f"the factory returned {foreign_repr(made)}")
        instance = Instance(made, self._timeout_s)
        if isinstance(made, (LookupFunctionProvider, AsyncLookupFunctionProvider)):
            kind = AsyncLookupFunction if isinstance(made, AsyncLookupFunctionProvider) else LookupFunction
            if not isinstance(instance.function, kind):
                raise ProviderCheckError(
                    "kind",
                    f"the function of a {type(made).__name__} is {foreign_repr(instance.function)}: make it a {kind.__name__}",
                )
        elif instance.scan is None:
            raise ProviderCheckError("kind", f"a {type(made).__name__} has neither a function nor a scan")
        size = instance.batch_size
        if size is not None and (type(size) is not int or size < 1):
            raise ProviderCheckError("batch-size", f"batch_size is {foreign_repr(size)}")
        return instance

    def _checked_schema(self, provider: LookupProvider, rows: pa.Table) -> pa.Schema:
        """The provider's schema in Spark's types. Checks that it fits the table's rows."""
        if not isinstance(provider.schema, pa.Schema):
            raise ProviderCheckError(
                "schema", f"the schema is {foreign_repr(provider.schema)}: make it a pyarrow.Schema"
            )
        try:
            schema = spark_schema(provider.schema, "the provider's schema")
        except SchemaError as problem:
            raise ProviderCheckError("schema", str(problem)) from problem
        schema = pa.schema([pa.field(field.name, field.type) for field in schema])
        for name in self._context.keys:
            if name not in schema.names:
                raise ProviderCheckError("schema", f"the schema {schema.names} lacks the key column {name!r}")
        if sorted(schema.names) != sorted(rows.column_names):
            raise ProviderCheckError(
                "schema", f"the schema has the columns {schema.names}, but the table has {rows.column_names}"
            )
        for field in spark_schema(rows.schema, "rows"):
            if not widens(field.type, schema.field(field.name).type):
                raise ProviderCheckError(
                    "schema",
                    f"column {field.name!r} is {schema.field(field.name).type} in the schema, but {field.type} in the table",
                )
        return schema

    @contextlib.contextmanager
    def make_open(self, context: LookupContext) -> Iterator[Instance]:
        """An instance of the provider with an open function, which is closed after the block."""
        instance = self._make(context)
        try:
            instance.open()
            yield instance
            instance.close()
        finally:
            instance.end()

    def check_factory(self) -> None:
        """Call the factory as tables do: several times, for some columns, and with keys in another letter case."""
        first, second = self._make(self._context), self._make(self._context)
        if first.function is not None and first.function is second.function:
            raise ProviderCheckError(
                "factory",
                "the factory returned the same function object in two calls: create a new one in each call, so that one that hangs can be replaced",
            )
        swapped = tuple(name.swapcase() for name in self._context.keys)
        for change in ({"keys": swapped}, {"columns": ()}):
            context = dataclasses.replace(self._context, **change)
            schema = self._make(context).provider.schema
            if not schema.equals(first.provider.schema):
                shown_change = ", ".join(f"{name} = {value}" for name, value in change.items())
                raise ProviderCheckError(
                    "factory",
                    f"with {shown_change} in LookupContext, the schema is {_show_schema(schema)}, but otherwise "
                    f"{_show_schema(first.provider.schema)}: return the same schema for each context",
                )

    # --- lookups ----------------------------------------------------------------------------------

    def check_lookups(self, instance: Instance) -> None:
        """Look up all keys, single keys, absent ones, and as many at once as a call may have."""
        if instance.function is None:
            return
        size = instance.batch_size
        first_answers = [(keys, instance.lookup(keys)) for keys in _calls(self._keys, size)]
        for keys, answer in first_answers:
            self._check_answer(keys, answer)
        for keys in _calls(self._shuffled(self._keys).slice(0, 20), 1):
            self._check_answer(keys, instance.lookup(keys))
        if size is None or size > 1:
            self._look_up(instance, _in_chunks(first_answers[0][0]), "any-key", "with keys in two chunks, ")
        for keys in _calls(opposite_zeros(self._keys), size):
            self._look_up(instance, keys, "rows", "with zeros of the other sign, ")
        for keys in _calls(self._absent, size):
            self._check_absent(instance, keys)
        for keys in _calls(self._shuffled(pa.concat_tables([self._keys, self._absent])), size):
            self._check_answer(keys, instance.lookup(keys))
        self._check_largest_call(instance)
        instance.lookup(self._keys.slice(self._keys.num_rows - 1).combine_chunks())
        for keys, answer in first_answers:
            self._check_answer(keys, answer, rule="repeatable", about="after other lookups, the result of the ")
            self._check_answer(keys, instance.lookup(keys), rule="repeatable", about="repeated ")
        if instance.asynchronous:
            at_once = pa.concat_tables([self._keys.slice(0, 20), many_keys(self._keys, _AT_ONCE)]).slice(0, _AT_ONCE)
            pieces = _calls(self._shuffled(at_once), 1)
            try:
                answers = instance.lookup_at_once(pieces)
            except CallRaisedError as problem:
                _raise_as("concurrent-calls", problem)
            for keys, answer in zip(pieces, answers, strict=True):
                self._check_answer(keys, answer, rule="concurrent-calls", about="while other calls ran, ")
            self._look_up_again(instance, "concurrent-calls", "after a call was cancelled, ")

    def _check_absent(self, instance: Instance, keys: pa.Table) -> None:
        try:
            answer = instance.lookup(keys)
        except CallRaisedError:
            for key in _calls(keys, 1):  # for which key?
                try:
                    instance.lookup(key)
                except CallRaisedError as problem:
                    _raise_as("any-key", problem, key=key)
            raise
        self._check_answer(keys, answer)

    def _check_largest_call(self, instance: Instance) -> None:
        size = instance.batch_size
        count = self._largest_call if size is None else min(size, self._largest_call)
        keys = pa.concat_tables([self._keys, many_keys(self._keys, count)]).slice(0, count).combine_chunks()
        try:
            answer = instance.lookup(keys)
        except CallRaisedError as problem:
            _raise_as("batch-size", problem, f"batch_size is {size}, but with {keys.num_rows:,} keys ")
        self._check_answer(keys, answer)

    def check_contexts(self, instance: Instance) -> None:
        """Look up keys with some of the columns only, and with the key columns in another order."""
        if instance.function is None:
            return
        if len(self._context.keys) > 1:
            names = self._context.keys[::-1]
            with self.make_open(dataclasses.replace(self._context, keys=names)) as other:
                for keys in _calls(self._keys.select(names), other.batch_size)[:20]:
                    self._look_up(other, keys, "factory", f"for the keys {list(names)}, ")
        others = [name for name in self._schema.names if name not in self._context.keys]
        for columns in dict.fromkeys([(), tuple(others[:1]), tuple(others[-1:]), tuple(others[1:])]):
            with self.make_open(dataclasses.replace(self._context, columns=columns)) as narrow:
                self._look_up_again(narrow, "columns", f"for the columns {list(columns)}, ", self._projection(columns))

    def _projection(self, columns: Sequence[str]) -> pa.Schema:
        return pa.schema([field for field in self._schema if field.name in (*self._context.keys, *columns)])

    def _check_answer(
        self,
        keys: pa.Table,
        answer: Any,
        columns: pa.Schema | None = None,
        rule: str | None = None,
        about: str = "",
        rows: pa.Table | None = None,
    ) -> None:
        """Check the result of a lookup. `columns`: those to look at. `rule`: the rule that any problem breaks (None: the one that it is about).

        `rows`: all rows that the table has; None: those that the check began with.
        """
        columns = self._schema if columns is None else columns
        returned = self._rows_by_key(keys, answer, columns, rule, about)
        difference = find_difference(_matching(self._rows if rows is None else rows, keys, columns), returned)
        if difference is not None:
            number, problem = difference
            key = keys.slice(number, 1)
            raise ProviderCheckError(rule or "rows", f"{about}lookup of {show_keys(key)} {problem}", _as_key(key))

    def _rows_by_key(self, keys: pa.Table, answer: Any, columns: pa.Schema, rule: str | None, about: str) -> pa.Table:
        """The result of a lookup, with `KEY_INDEX`. Checks its columns and types, and that it has no rows of other keys."""
        operation = f"lookup of {show_keys(keys)}"
        try:
            answer = self._returned_rows.with_columns(answer, keys, columns)
            key_columns = self._returned_rows.conform(answer, keys.schema, operation)
            matches = match_rows(key_columns, keys.column_names, _as_keys(keys))
            if len(matches.rows) < answer.num_rows:
                unmatched = min({*range(answer.num_rows)} - set(matches.rows.tolist()))
                key = key_columns.slice(unmatched, 1)
                raise ProviderCheckError(
                    rule or "unrequested-key",
                    f"{about}{operation} returned a row with {show_keys(key)}, which was not requested",
                    _as_key(key),
                )
            return self._returned_rows.by_key(answer, keys, columns)
        except LookupFunctionError as problem:
            raise ProviderCheckError(rule or "result", f"{about}{problem}") from problem

    def _look_up_again(
        self, instance: Instance, rule: str, about: str, columns: pa.Schema | None = None, times: int = 1
    ) -> None:
        """Look up keys that lookups of the first instance have found. Any problem breaks `rule`."""
        if instance.function is None:
            return
        for keys in _calls(self._keys, instance.batch_size)[:20] * times:
            self._look_up(instance, keys, rule, about, columns)

    def _look_up(
        self,
        instance: Instance,
        keys: pa.Table,
        rule: str,
        about: str,
        columns: pa.Schema | None = None,
        rows: pa.Table | None = None,
    ) -> None:
        """Look up keys. Any problem breaks `rule`. `columns`, `rows`: as in `_check_answer`."""
        try:
            answer = instance.lookup(keys)
        except CallRaisedError as problem:
            _raise_as(rule, problem, about)
        self._check_answer(keys, answer, columns, rule, about, rows)

    def _shuffled(self, keys: pa.Table) -> pa.Table:
        order = self._rng.sample(range(keys.num_rows), keys.num_rows)
        return keys.take(pa.array(order, pa.int64())).combine_chunks()

    # --- threads, processes, open and close ---------------------------------------------------------

    def check_threads(self, instance: Instance) -> None:
        """Look up keys while another instance does, and while versions are read and the table is scanned; and after the other one was closed."""
        if instance.function is None:
            return
        with self.make_open(self._context) as other:

            def look_up(left: threading.Event) -> None:
                self._look_up_again(other, "thread", "while another instance was used, ", times=3)

            self._look_up_beside(instance, look_up, "while another instance was used, ")
        self._look_up_again(instance, "thread", "after another instance was closed, ")

        def read(left: threading.Event) -> None:
            for _ in range(3):
                if instance.version is not None:
                    try:
                        instance.read_version()
                    except CallRaisedError as problem:
                        _raise_as("thread", problem, "during lookups, ")
                if instance.scan is not None:
                    self._check_scan(instance, self._rows, "thread", "during lookups, ")

        if instance.version is not None or instance.scan is not None:
            self._look_up_beside(instance, read, "during version() and scan(), ")

    def _look_up_beside(self, instance: Instance, work: Callable[[threading.Event], None], about: str) -> None:
        """Look up keys until `work`, which runs in another thread, has ended."""
        with _beside(work, "lookupcache-check-beside") as finished:
            is_last = False
            while not is_last:
                is_last = finished.is_set()
                self._look_up_again(instance, "thread", about)

    def check_reopening(self, instance: Instance) -> None:
        """Close the function and open it again, some times."""
        if instance.function is None:
            return

        def reopen() -> None:
            try:
                instance.close()
                instance.open()
            except CallRaisedError as problem:
                _raise_as("open-close", problem)
            self._look_up_again(instance, "open-close", "after close() and open(), ")

        self._check_left_open("open-close", "close() and open()", reopen)

    def _check_left_open(self, rule: str, operation: str, call: Callable[[], object]) -> None:
        """Repeat a call, which must not leave more and more open."""
        call()  # makes what is made once
        gc.collect()  # what was open before must not end while calls are counted, and hide what they leave
        before = _count_open()
        for _ in range(_TIMES):
            call()
        until_s = time.monotonic() + min(_SETTLE_S, self._timeout_s)
        while left_open := _find_increase(before, _count_open()):
            if time.monotonic() > until_s:
                raise ProviderCheckError(rule, f"after {operation} {_TIMES} times, the process has {left_open}")
            time.sleep(0.01)
            gc.collect()

    def check_fork(self, instance: Instance | None) -> None:
        """Make and use the provider in a forked process; then use `instance`, which was opened before, in this process (None: nothing was)."""

        def run() -> str:
            with self.make_open(self._context) as inherited:
                self._look_up_again(inherited, "fork", "in a forked process, ")
                if inherited.scan is not None:
                    self._check_scan(inherited, self._rows, "fork", "in a forked process, ")
                return "" if inherited.version is None else inherited.read_version()

        version = run_in_child(run, 4 * self._timeout_s)
        if any(pa.types.is_temporal(kind) for kind in self._schema.types):
            run_in_child(self._check_elsewhere, 4 * self._timeout_s, "zone")
        if instance is None:
            return
        if instance.version is not None:
            _compare_versions(instance.read_version(), version, "in a forked process")
        self._look_up_again(instance, "fork", "after a forked process has looked up the same keys, ")

    def _check_elsewhere(self) -> str:
        """Make and use the provider in a process of another time zone."""
        os.environ["TZ"] = _ELSEWHERE
        time.tzset()
        about = f"with TZ = {_ELSEWHERE}, "
        with self.make_open(self._context) as instance:
            self._look_up_again(instance, "zone", about)
            if instance.scan is not None:
                self._check_scan(instance, self._rows, "zone", about)
        return ""

    # --- scans, versions and changes ----------------------------------------------------------------

    def check_scans(self, instance: Instance) -> None:
        """Scan all columns and some, twice at once, and leave a scan in the middle."""
        if instance.scan is None:
            return
        self._check_scan(instance, self._rows)
        self._check_left_open("scan", "a scan that was left at its first batch", lambda: next(instance.batches(), None))
        first, second = list[Any](), list[Any]()
        for one, other in itertools.zip_longest(instance.batches(), instance.batches()):
            first += [] if one is None else [one]
            second += [] if other is None else [other]
        for batches in (first, second):
            self._check_batches(batches, self._rows, "scan", "during another scan, ")
        columns = tuple(name for name in self._schema.names if name not in self._context.keys)[-1:]
        with self.make_open(dataclasses.replace(self._context, columns=columns)) as narrow:
            rows = self._rows.select(self._projection(columns).names)
            self._check_scan(narrow, rows, "columns", f"for the columns {list(columns)}, ")

    def _check_scan(self, instance: Instance, rows: pa.Table, rule: str = "scan", about: str = "") -> None:
        try:
            batches = list(instance.batches())
        except CallRaisedError as problem:
            _raise_as(rule, problem, about)
        self._check_batches(batches, rows, rule, about)

    def _check_batches(self, batches: Sequence[Any], rows: pa.Table, rule: str, about: str) -> None:
        difference = find_difference(rows, self._conform(batches, rows.schema, rule, about))
        if difference is not None:
            raise ProviderCheckError(rule, f"{about}scan() {difference[1]}")

    def _conform(self, batches: Sequence[Any], schema: pa.Schema, rule: str, about: str) -> pa.Table:
        """The rows of a scan as one table. Checks their columns and types."""
        for batch in batches:
            if not isinstance(batch, pa.RecordBatch):
                raise ProviderCheckError(
                    rule,
                    f"{about}scan() returned {type(batch).__name__}: return batches of the class pyarrow.RecordBatch",
                )
        try:
            tables = [self._returned_rows.conform(pa.Table.from_batches([b]), schema, "scan()") for b in batches]
        except LookupFunctionError as problem:
            raise ProviderCheckError(rule, f"{about}{problem}") from problem
        return pa.concat_tables([schema.empty_table(), *tables])

    def check_versions(self, instance: Instance) -> None:
        """Compare the versions that one instance returns, and those of two instances."""
        if instance.version is None:
            return
        version = instance.read_version()
        _compare_versions(version, instance.read_version(), "the second time")
        self._check_left_open("version", "version()", instance.read_version)
        with self.make_open(self._context) as other:
            _compare_versions(version, other.read_version(), "from another instance")
        if instance.changes is not None:
            self.read_changes(instance, version, self._keys.slice(0, 0))

    def read_changes(self, instance: Instance, since: str, changed: pa.Table, keyless: bool = False) -> pa.Table | None:
        """The keys that have changed since a version; None if the provider cannot tell.

        Checks that the keys `changed` are among them and, if `keyless`, a key with a null.
        """
        answer = instance.read_changes(since)
        if answer is None:
            return None
        if isinstance(answer, pa.RecordBatch):
            answer = pa.Table.from_batches([answer])
        if not isinstance(answer, pa.Table) or sorted(answer.column_names) != sorted(self._context.keys):
            shown = f"the columns {answer.column_names}" if isinstance(answer, pa.Table) else foreign_repr(answer)
            raise ProviderCheckError("changes", f"changes({since!r}) returned {shown}, not a table of the key columns")
        try:
            keys = self._returned_rows.conform(answer, self._keys.schema, f"changes({since!r})")
        except LookupFunctionError as problem:
            raise ProviderCheckError("changes", str(problem)) from problem
        matches = match_rows(keys, changed.column_names, _as_keys(changed))
        missing = {*range(changed.num_rows)} - set(matches.keys.tolist())
        if missing:
            key = changed.slice(min(missing), 1)
            text = f"changes({since!r}) lacks {show_keys(key)}, whose rows have changed since then"
            raise ProviderCheckError("changes", text, _as_key(key))
        if keyless and not any(column.null_count for column in keys.columns):
            text = f"changes({since!r}) has no key with a null, but a row whose key has one is gone"
            raise ProviderCheckError(
                "changes", f"{text}: return such a key, so that copies of the table are scanned again"
            )
        return keys

    # --- with the caches ----------------------------------------------------------------------------

    def check_caches(self) -> None:
        """Look up keys that repeat, nulls and absent keys through `LookupTable`, with each `lookup.cache` that the provider allows."""
        instance = self._make(self._context)
        modes = ["PARTIAL"] if instance.brings_cache else ["NONE", "PARTIAL"] if instance.function is not None else []
        modes += ["FULL"] if instance.scan is not None else []
        schema = self._keys.schema
        nulls = pa.Table.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema)
        keys = self._shuffled(pa.concat_tables([self._keys, self._keys, self._absent.slice(0, 50), nulls]))
        for mode in modes:
            with self._open_table(mode, instance) as table:
                self._check_table(table, keys, mode)
                loads = table.metrics()["loadCount"]
                self._check_table(table, keys, mode)
                if mode == "PARTIAL" and not instance.brings_cache and table.metrics()["loadCount"] > loads:
                    raise ProviderCheckError(
                        "version",
                        "with lookup.cache = PARTIAL, a second lookup of the same keys called the provider again, although no row had changed",
                    )

    def _check_table(self, table: LookupTable, keys: pa.Table, mode: str) -> None:
        try:
            answer = table.get_many(keys)
        except PysparkLookupError as problem:
            raise ProviderCheckError("cached", f"with lookup.cache = {mode}, {problem}") from problem
        expected = _matching(self._rows, keys, self._schema)
        difference = find_difference(expected, answer.select(expected.column_names))
        if difference is not None:
            number, text = difference
            key = keys.slice(number, 1)
            raise ProviderCheckError(
                "cached", f"with lookup.cache = {mode}, lookup of {show_keys(key)} {text}", _as_key(key)
            )

    @contextlib.contextmanager
    def _open_table(self, mode: str, instance: Instance) -> Iterator[LookupTable]:
        """The table with a cache and a new cache directory."""
        names = ",".join("`" + name.replace("`", "``") + "`" for name in self._context.keys)
        options = {"lookup.keys": names, "lookup.cache": mode, "lookup.max-retries": "0"}
        options["lookup.async.timeout"] = f"{round(self._timeout_s * 1000)} ms"
        options |= {f"lookup.provider.{name}": value for name, value in self._context.options.items()}
        if mode == "PARTIAL" and not instance.brings_cache:
            options["lookup.partial-cache.max-rows"] = str(10**9)
            options |= {} if instance.version is not None else {"lookup.partial-cache.expire-after-write": "1 h"}
        if mode == "FULL" and instance.version is None and getattr(instance.provider, "reload_trigger", None) is None:
            options["lookup.full-cache.periodic-reload.interval"] = "1 h"
        module = types.ModuleType(f"lookupcache_checked_{next(_module_numbers)}")
        module.provider = self._factory  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
        try:
            with tempfile.TemporaryDirectory(prefix="lookupcache-check-", ignore_cleanup_errors=True) as directory:
                options |= {"lookup.provider": f"{module.__name__}:provider", "lookup.cache.dir": directory}
                try:
                    table = LookupTable(self._context.path, options)
                except PysparkLookupError as problem:
                    raise ProviderCheckError("cached", f"with lookup.cache = {mode}, {problem}") from problem
                with table:
                    yield table
        finally:
            del sys.modules[module.__name__]

    # --- writes -------------------------------------------------------------------------------------

    def check_writes(self, write: Callable[[pa.Table], object]) -> None:
        """Delete, change and insert rows in one write after the other; then again while another thread looks them up."""
        states = TableStates(self._rows, self._keys, _WRITES)
        write(states.after(0))
        with self.make_open(self._context) as instance, self.make_open(self._context) as other:
            versions = [] if instance.version is None else [instance.read_version()]
            for number in [*range(1, len(states) + 1), 0]:
                write(states.after(number))
                if versions:
                    versions.append(_read_new_version(instance, other, versions[-1]))
                    for since_number, since in enumerate(versions[:-1]) if instance.changes is not None else ():
                        changed = states.keys.slice(min(number, since_number), abs(number - since_number))
                        self.read_changes(instance, since, changed)
                self._check_rows_after_write(instance, states.after(number))
            self._check_keyless_rows(write, instance)
            self._check_no_rows(write, instance)
        self._check_reads_beside_writes(write, states)

    def _check_keyless_rows(self, write: Callable[[pa.Table], object], instance: Instance) -> None:
        """Delete the rows whose key has a null: a copy of the table has them, too."""
        keyed = self._rows.select(self._context.keys).to_batches()
        valid = [all(value is not None for value in row.values()) for batch in keyed for row in batch.to_pylist()]
        if instance.scan is None or all(valid):
            return
        since = None if instance.changes is None else instance.read_version()
        rows = self._rows.filter(pa.array(valid))
        write(rows)
        if since is not None:
            self.read_changes(instance, since, self._keys.slice(0, 0), keyless=True)
        self._check_scan(instance, rows, "fresh-rows", "after a write, ")
        write(self._rows)

    def _check_no_rows(self, write: Callable[[pa.Table], object], instance: Instance) -> None:
        """Delete all rows."""
        since = None if instance.version is None else instance.read_version()
        write(self._rows.slice(0, 0))
        if since is not None:
            if instance.read_version() == since:
                raise ProviderCheckError(
                    "new-version", f"version() returned {since!r} before and after all rows were deleted"
                )
            if instance.changes is not None:
                self.read_changes(instance, since, self._keys)
        self._check_rows_after_write(instance, self._rows.slice(0, 0))
        write(self._rows)

    def check_many_rows(self, write: Callable[[pa.Table], object]) -> None:
        """Fill the table with many rows; look up and scan all of them, also while they are deleted."""
        with self.make_open(self._context) as instance:
            size = instance.batch_size
            count = self._largest_call
            if instance.scan is None and size is not None:
                count = min(count, 4 * size)
            rows = self._rows_of_many_keys(count)
            write(rows)
            about = f"in a table with {rows.num_rows:,} rows, "
            keys = distinct(rows.select(self._context.keys))
            if instance.function is not None:
                for piece in _calls(self._shuffled(keys), size)[:4]:
                    self._look_up(instance, piece, "rows", about, rows=rows)
            if instance.scan is None:
                return
            self._check_scan(instance, rows, "scan", about)
            batches = instance.batches()
            scanned = [batch for batch in (next(batches, None),) if batch is not None]
            with _beside(lambda left: write(self._rows), "lookupcache-check-write") as finished:
                finished.wait(_WRITE_WAIT_S)
                scanned += list(batches)
            actual = self._conform(scanned, self._schema, "one-state", "during a write, ")
            if find_difference(rows, actual) is not None and find_difference(self._rows, actual) is not None:
                text = f"during a write of {rows.num_rows:,} rows to {self._rows.num_rows:,}, scan() returned {actual.num_rows:,}"
                raise ProviderCheckError("one-state", f"{text} that the table never had together")

    def _rows_of_many_keys(self, count: int) -> pa.Table:
        """The table's rows, and up to `count` more, each with a key of its own and the other values of one of the table's rows."""
        keys = many_keys(self._keys, count)
        keyed = rows_of(self._rows, self._keys)
        places = pa.array([number % keyed.num_rows for number in range(keys.num_rows)], pa.int64())
        more = keyed.take(places)
        for name in self._context.keys:
            more = more.set_column(self._schema.get_field_index(name), self._schema.field(name), keys.column(name))
        return pa.concat_tables([self._rows, more]).combine_chunks()

    def _check_rows_after_write(self, instance: Instance, rows: pa.Table) -> None:
        for keys in _calls(self._keys, instance.batch_size) if instance.function is not None else ():
            self._check_answer(keys, instance.lookup(keys), rule="fresh-rows", about="after a write, ", rows=rows)
        if instance.scan is not None:
            self._check_scan(instance, rows, "fresh-rows", "after a write, ")

    def _check_reads_beside_writes(self, write: Callable[[pa.Table], object], states: TableStates) -> None:
        """Write in another thread, and read meanwhile, as a cache does that keeps the rows of a version until it has changed."""
        written: dict[str, int] = {}  # the number of writes that a version has, at least

        def run(left: threading.Event) -> None:
            with self.make_open(self._context) as writer:
                for number in range(len(states) + 1):
                    if left.is_set():
                        return
                    write(states.after(number))
                    if writer.version is not None:
                        written[writer.read_version()] = number

        reads: list[tuple[str, dict[int, bool]]] = []
        with self.make_open(self._context) as instance:
            reader = _CachingReader(self, instance, states)
            with _beside(run, "lookupcache-check-write") as finished:
                is_last = False
                while not is_last:
                    is_last = finished.is_set()
                    reads.append(reader.read())
            self._check_rows_after_write(instance, states.after(len(states)))
            rule = "fresh-rows" if instance.changes is None else "changes"
        for version, is_new in reads:
            stale = [number for number, new in is_new.items() if number < written.get(version, 0) and not new]
            if stale:
                key = states.keys.slice(stale[0], 1)
                text = f"during writes, after version() had returned {version!r}, {show_keys(key)} had rows of an earlier version"
                raise ProviderCheckError(rule, text, _as_key(key))

    def find_statuses(self, instance: Instance, numbers: Sequence[int], states: TableStates) -> dict[int, bool]:
        """Look up some keys of `states`, by their numbers: for each, whether it has its new rows. Checks that it has these, or the old ones."""
        is_new: dict[int, bool] = {}
        size = instance.batch_size or max(len(numbers), 1)
        for start in range(0, len(numbers), size):
            piece = numbers[start : start + size]
            keys = states.keys.take(pa.array(piece, pa.int64())).combine_chunks()
            rows = self._rows_by_key(keys, instance.lookup(keys), self._schema, "one-state", "during writes, ")
            for place, number in enumerate(piece):
                of_key = rows.filter(pa.array(key_numbers(rows) == place)).drop_columns([KEY_INDEX])
                status = states.find_status(number, of_key)
                if status is None:
                    key = keys.slice(place, 1)
                    text = f"during writes, lookup of {show_keys(key)} returned {of_key.num_rows} rows that it never had together"
                    raise ProviderCheckError("one-state", text, _as_key(key))
                is_new[number] = status
        return is_new

    def find_scanned_statuses(self, instance: Instance, states: TableStates) -> dict[int, bool]:
        """Scan the table: for each key of `states`, whether it has its new rows. Checks that all rows are of one state."""
        scanned = self._conform(list(instance.batches()), self._schema, "one-state", "during writes, ")
        writes = states.find_writes(scanned)
        if writes is not None:
            return {number: number < writes for number in range(len(states))}
        raise ProviderCheckError(
            "one-state", f"during writes, scan() returned {scanned.num_rows} rows that the table never had together"
        )

    # --- outages ------------------------------------------------------------------------------------

    def check_outage(self, outage: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        """Call everything before, during and after an outage of the system; look up keys through a `LookupTable`, too."""
        with self.make_open(self._context) as instance, contextlib.ExitStack() as stack:
            late = self._make(self._context)
            stack.callback(late.end)
            keys = _calls(self._keys, instance.batch_size)[0]
            has_table = instance.function is not None and not instance.brings_cache
            table = stack.enter_context(self._open_table("NONE", instance)) if has_table else None
            if table is not None:
                self._check_table(table, keys, "NONE")
            since = None if instance.version is None else instance.read_version()
            begun = iter(()) if instance.scan is None else instance.batches()
            scanned = [batch for batch in (next(begun, None),) if batch is not None]
            with outage():
                self._check_calls_in_outage(instance, keys, since)
                with contextlib.suppress(CallRaisedError):
                    late.open()
                if table is not None:
                    with contextlib.suppress(LookupFunctionError):
                        table.get_many(keys)
                        raise ProviderCheckError(
                            "outage", "in an outage, a lookup through a LookupTable raised no error"
                        )
                with contextlib.suppress(CallRaisedError):
                    scanned += list(begun)
                    if instance.scan is not None:
                        self._check_batches(scanned, self._rows, "outage", "interrupted by an outage, ")
            if instance.function is not None:
                _retry(late.open)
                for one in (instance, late):
                    answer = _retry(lambda one=one: one.lookup(keys))  # type: ignore[misc]
                    self._check_answer(keys, answer, rule="outage", about="after an outage, ")
                late.close()
            if instance.version is not None:
                _retry(instance.read_version)
            if instance.scan is not None:
                self._check_scan(instance, self._rows, "outage", "after an outage, ")
            if table is not None:
                self._check_table(table, keys, "NONE")

    def _check_calls_in_outage(self, instance: Instance, keys: pa.Table, since: str | None) -> None:
        """Check that each call raises an error."""
        calls: list[tuple[str, Callable[[], Any]]] = []
        if instance.function is not None:
            calls.append((f"lookup of {show_keys(keys)}", lambda: instance.lookup(keys)))
        if instance.scan is not None:
            calls.append(("scan()", lambda: sum(batch.num_rows for batch in instance.batches())))
        if since is not None:
            calls.append(("version()", instance.read_version))
        if since is not None and instance.changes is not None:
            calls.append((f"changes({since!r})", lambda: instance.read_changes(since)))
        for operation, call in calls:
            with contextlib.suppress(CallRaisedError):
                answer = call()
                if answer is None and operation.startswith("changes"):
                    continue
                is_rows = isinstance(answer, (pa.Table, pa.RecordBatch))
                shown = (
                    f"{answer.num_rows if is_rows else answer} rows"
                    if is_rows or type(answer) is int
                    else foreign_repr(answer)
                )
                raise ProviderCheckError("outage", f"in an outage, {operation} raised no error, but returned {shown}")


class _CachingReader:
    """Reads the keys of `states`, as a cache does: if there is a new version, it keeps the keys that have not changed, and looks up all others."""

    def __init__(self, check: _Check, instance: Instance, states: TableStates) -> None:
        self._check = check
        self._instance = instance
        self._states = states
        self._version = ""
        self._is_new: dict[int, bool] = {}

    def read(self) -> tuple[str, dict[int, bool]]:
        """(the version, for each key by its number whether it has its new rows). The version is empty if the provider has none."""
        if self._instance.version is None:
            self._is_new = {}
        elif (version := self._instance.read_version()) != self._version:
            self._drop_changed()
            self._version = version
        if self._instance.function is None:
            return self._version, self._check.find_scanned_statuses(self._instance, self._states)
        if self._instance.scan is not None:
            self._check.find_scanned_statuses(self._instance, self._states)
        missing = [number for number in range(len(self._states)) if number not in self._is_new]
        self._is_new |= self._check.find_statuses(self._instance, missing, self._states)
        return self._version, dict(self._is_new)

    def _drop_changed(self) -> None:
        changed = None
        if self._instance.changes is not None and self._version:
            changed = self._check.read_changes(self._instance, self._version, self._states.keys.slice(0, 0))
        if changed is None:
            self._is_new = {}
            return
        keys = self._states.keys
        for number in match_rows(changed, keys.column_names, _as_keys(keys)).keys.tolist():
            self._is_new.pop(number, None)


@contextlib.contextmanager
def _beside(work: Callable[[threading.Event], object], name: str) -> Iterator[threading.Event]:
    """Run `work` in another thread during a `with` block. Yields an event that is set when `work` has ended; its error is raised after the block.

    `work` gets another event, which is set when the block has ended: then it may stop.
    """
    finished, left, problems = threading.Event(), threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            work(left)
        except BaseException as problem:
            problems.append(problem)
        finally:
            finished.set()

    thread = threads.start(name, run, foreign=True)
    try:
        yield finished
    finally:
        left.set()
        thread.join()
    if problems:
        raise problems[0]


def _retry(call: Callable[[], Any]) -> Any:
    """What `call` returns, after as many attempts as a lookup has."""
    for attempt in range(_ATTEMPTS):
        try:
            return call()
        except CallRaisedError as problem:
            if attempt == _ATTEMPTS - 1:
                _raise_as("outage", problem, f"in {_ATTEMPTS} attempts after an outage, ")
    return None


def _count_open() -> tuple[int, int]:
    """The number of open files and of threads of this process, in the order of `_OPEN`."""
    files = 0
    with contextlib.suppress(OSError):
        files = len(os.listdir("/dev/fd"))
    return files, threading.active_count()


def _find_increase(before: tuple[int, int], now: tuple[int, int]) -> str:
    """What each of `_TIMES` calls has left one more of, such as open files, as words for an error; empty if there is nothing."""
    increases = ((later - earlier, what) for earlier, later, what in zip(before, now, _OPEN, strict=True))
    return " and ".join(f"{count} more {what}" for count, what in increases if count >= _TIMES)


def _read_new_version(instance: Instance, other: Instance, before: str) -> str:
    """The version after a write, which must differ from the one `before`, and be the same from both instances."""
    version = instance.read_version()
    if version == before:
        raise ProviderCheckError("new-version", f"version() returned {version!r} before and after a write")
    _compare_versions(version, other.read_version(), "from another instance")
    return version


def _compare_versions(version: str, other: str, when: str) -> None:
    if version != other:
        raise ProviderCheckError("version", f"version() returned {version!r}, and {other!r} {when}: no row has changed")


def _show_schema(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}{'' if field.nullable else ' not null'}" for field in schema)


def _raise_as(rule: str, problem: CallRaisedError, about: str = "", key: pa.Table | None = None) -> NoReturn:
    """Raise the error of a call as one that breaks another rule."""
    text = f"{about}{problem.problem}"
    raise_ours(ProviderCheckError(rule, text, None if key is None else _as_key(key)), problem.__cause__)


def _matching(rows: pa.Table, keys: pa.Table, columns: pa.Schema) -> pa.Table:
    """The rows of `keys`, with `columns` and `KEY_INDEX`."""
    return take_matches(rows, match_rows(rows, keys.column_names, _as_keys(keys)), columns)


def _calls(keys: pa.Table, size: int | None) -> list[pa.Table]:
    """`keys` in pieces of at most `size` keys (None: one piece)."""
    size = size or max(keys.num_rows, 1)
    return [keys.slice(start, size).combine_chunks() for start in range(0, keys.num_rows, size)]


def _in_chunks(keys: pa.Table) -> pa.Table:
    """The same keys, the first one in a chunk of its own."""
    return pa.concat_tables([keys.slice(0, 1), keys.slice(1)])


def _as_keys(keys: pa.Table) -> Keys:
    return Keys([one_array(column) for column in keys.columns])


def _as_key(keys: pa.Table) -> Mapping[str, Any]:
    """The first of some keys, as a dictionary."""
    key: Mapping[str, Any] = keys.slice(0, 1).to_pylist()[0]
    return key
