"""`TableProperties`: the properties of a managed table that control its upkeep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pyspark_lookup.errors import OptionError
from pyspark_lookup.options.parsing import DURATION

KEPT_S = 7 * 86400.0
"""The shortest time that vacuum keeps, unless it is forced: longer than a query or a stream's micro-batch runs."""
LOG_RETENTION, VACUUM_AFTER = "lookup.log.retention", "lookup.write.vacuum-after"


@dataclasses.dataclass(frozen=True)
class TableProperties:
    """A table's upkeep. `log_retention_s`: how much longer than its versions the log is kept. `vacuum_after_s`: commits vacuum files that no
    version has needed for this long (None: only people run vacuum)."""

    log_retention_s: float = KEPT_S
    vacuum_after_s: float | None = None


def parse_properties(properties: Mapping[str, str]) -> TableProperties:
    """The upkeep that a table's properties ask for. Properties that do not begin with `lookup.` are the user's own.

    Raises OptionError for one that is unknown, or whose value is invalid.
    """
    durations_s: dict[str, float] = {}
    for key, text in properties.items():
        if not key.startswith("lookup."):
            continue
        if key not in (LOG_RETENTION, VACUUM_AFTER):
            raise OptionError(f"table property {key} is unknown: there are {LOG_RETENTION} and {VACUUM_AFTER}")
        try:
            durations_s[key] = DURATION.parse(text)
        except ValueError as problem:
            raise OptionError(f"table property {key} = {text!r}: expected {problem}") from None
    vacuum_after_s = durations_s.get(VACUUM_AFTER)
    if vacuum_after_s is not None and vacuum_after_s < KEPT_S:
        raise OptionError(
            f"table property {VACUUM_AFTER} = {properties[VACUUM_AFTER]!r}: expected 7 d or more, for queries and writes that "
            "are under way"
        )
    return TableProperties(durations_s.get(LOG_RETENTION, KEPT_S), vacuum_after_s)
