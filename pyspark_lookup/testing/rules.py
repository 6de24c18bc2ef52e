"""`RULES`: the rules that a provider must keep, each with the section of docs/providers.md that states it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark_lookup.errors import foreign_text

RULES: Mapping[str, tuple[str, str]] = {
    "kind": ("kinds-of-providers", "the factory returns a provider of one of these kinds"),
    "schema": ("kinds-of-providers", "the schema has all columns, including the keys, in types that Spark has"),
    "factory": ("the-factory", "the factory is called again for other columns, for keys in another order, or for names in another letter case, and makes a new function each time"),
    "columns": ("the-factory", "the rows need only the key columns and those of LookupContext.columns"),
    "batch-size": ("lookup-functions", "batch_size is the largest number of keys in a call, or None if any number will do"),
    "result": ("lookup-functions", "a result has the requested columns, in the types of the schema or in narrower ones"),
    "unrequested-key": ("lookup-functions", "a result has no row whose key was not requested"),
    "rows": ("lookup-functions", "a result has all rows of each key, each as often as the table has it, with the table's values"),
    "any-key": ("lookup-functions", "keys are any values of the column's type; a key that no row has gets no rows, and no error"),
    "repeatable": ("lookup-functions", "a function answers any number of lookups, and a result stays as it is"),
    "open-close": ("lookup-functions", "close leaves no connection and no thread behind, and open makes the function usable again"),
    "thread": ("lookup-functions", "open, lookup and close run on one thread that is not the caller's; version(), changes(), scan() and other providers of the process run on others at the same time"),
    "concurrent-calls": ("asynchronous-functions", "several calls of an asynchronous function run at once, and any of them may be cancelled"),
    "fork": ("install-the-code", "a forked process opens a connection of its own, and leaves that of its parent alone"),
    "zone": ("lookup-functions", "values are the same wherever a process runs: its time zone changes nothing"),
    "time": ("errors-retries-timeouts", "a call that takes too long fails: set timeouts in your client, too"),
    "error": ("errors-retries-timeouts", "a call that succeeds in the system raises no error"),
    "outage": ("errors-retries-timeouts", "every call raises an error if the system does not answer; the next attempt uses the same object, so the function drops a lost connection itself"),
    "version": ("versions-and-freshness", "version() returns non-empty text, the same in all processes until a row changes; it leaves no connection behind"),
    "new-version": ("versions-and-freshness", "version() changes whenever a row may have changed"),
    "fresh-rows": ("versions-and-freshness", "a lookup or scan that begins after version() has returned sees the rows of that version, or of a later one"),
    "one-state": ("whole-tables", "rows come from one state of the table: none is of half a write"),
    "changes": ("changes", "changes(since) returns at least all keys that have changed since that version, as a table of the key columns, or None"),
    "scan": ("whole-tables", "scan() returns all rows, as batches with the columns of the schema, as often as it is called; a scan that is left leaves no connection behind"),
    "cached": ("kinds-of-providers", "with each cache that the provider allows, lookups return the table's rows"),
}  # fmt: skip
"""(section of docs/providers.md, rule) by the rule's name."""


class ProviderCheckError(AssertionError):
    """A provider breaks a rule.

    `rule`: its name in `RULES`. `problem`: what happened. `key`: the key for which it happened, if there is one. The text has all of these, and
    the section of docs/providers.md that states the rule.
    """

    def __init__(self, rule: str, problem: str, key: Mapping[str, Any] | None = None) -> None:
        section, text = RULES[rule]
        self.rule, self.problem, self.key = rule, foreign_text(problem), key
        super().__init__(f"{self.problem}\nrule {rule}: {text} (docs/providers.md#{section})")
