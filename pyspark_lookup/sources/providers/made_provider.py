"""Makes the provider of a table with its factory, and another instance if the first one hangs."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.predicate import referenced_columns
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.columnar.types import resolve_names, spark_schema, spark_type
from pyspark_lookup.errors import (
    LookupFunctionError,
    LookupTimeoutError,
    OptionError,
    PysparkLookupError,
    foreign_repr,
    raise_ours,
)
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.parsing import make
from pyspark_lookup.sources.providers.call_runner import CallFailedError, CallTimeoutError, iterate_in_thread
from pyspark_lookup.sources.providers.functions import LookupContext, LookupProvider
from pyspark_lookup.sources.providers.options import ProviderOptions

PROVIDER_OPTION = "lookup.provider"


def get_attribute(name: str, part: object, attribute: str) -> Any:
    """An attribute of a provider or of its function. Raises LookupFunctionError if it is a property that raises."""
    try:
        return getattr(part, attribute)
    except PysparkLookupError:
        raise
    except Exception as problem:
        raise_ours(LookupFunctionError(f"provider {name} failed in its {attribute}: {foreign_repr(problem)}"), problem)


class MadeProvider:
    """The provider that the options name. The constructor calls its factory.

    `schema`: its columns in Spark's types. `latest`: the newest instance, even if it hung and was replaced. Raises OptionError, and
    LookupTimeoutError if the factory hangs.
    """

    def __init__(self, options: LookupOptions) -> None:
        calls = options.kind(ProviderOptions)
        assert calls.provider is not None
        self.name = calls.provider
        self._context = LookupContext(
            options.files.keys or (), None, dict(calls.parameters), options.files.path.removeprefix("file:") or None
        )
        self._timeout_s = calls.async_timeout_s
        self.latest = self._make()
        self._provider: LookupProvider | None = self.latest
        schema = get_attribute(self.name, self.latest, "schema")
        if not isinstance(schema, pa.Schema):
            raise OptionError(
                f"option {PROVIDER_OPTION} = {self.name!r} has the schema {foreign_repr(schema)}: give a pyarrow.Schema"
            )
        spark_columns = spark_schema(schema, f"provider {self.name}")
        self.schema = pa.schema([(field.name, spark_type(field.type)) for field in spark_columns])
        if options.files.keys:
            self._narrow(options, options.files.keys)

    def _narrow(self, options: LookupOptions, keys: tuple[str, ...]) -> None:
        """Make the provider again, for the requested keys and columns as its schema spells them, if not all columns are read."""
        context = dataclasses.replace(self._context, keys=tuple(resolve_names(keys, self.schema, "lookup.keys")))
        if options.read.columns is not None:
            column_names = set(resolve_names(options.read.columns, self.schema, "lookup.columns"))
            column_names |= (
                referenced_columns(parse_where(options.read.where, self.schema)) if options.read.where else set()
            )
            names = tuple(name for name in self.schema.names if name in column_names and name not in context.keys)
            context = dataclasses.replace(context, columns=names)
        if context != self._context:
            self._context = context
            self._provider = self.latest = self._make()

    def _make(self) -> LookupProvider:
        def call_factory() -> list[LookupProvider]:
            return [make(PROVIDER_OPTION, self.name, self._context, LookupProvider)]

        try:
            return next(iterate_in_thread(call_factory, f"lookupcache-make-{self.name}", self._timeout_s))
        except CallTimeoutError:
            raise LookupTimeoutError(
                f"provider {self.name} was not made within lookup.async.timeout = {self._timeout_s:g} s"
            ) from None
        except CallFailedError as failed:
            raise_ours(failed.problem, failed.problem.__cause__)

    def current(self) -> LookupProvider:
        """The provider; a new instance if a call of the last one timed out."""
        provider = self._provider
        if provider is None:
            provider = self._provider = self.latest = self._make()
        return provider

    def replace(self) -> None:
        """Replace a provider that hangs. If no new instance can be made now, the next use makes one."""
        self._provider = None
        with contextlib.suppress(OptionError, LookupTimeoutError):
            self.current()
