"""Times of ORC files, computed from stored seconds and fractions: of any year, and of writers in any time zone."""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.calendars import (
    LOCAL_MEAN_TIME_END,
    ZoneHistory,
    build_array,
    fixed_offset,
    unknown_zone,
    view_numbers,
)
from pyspark_lookup.errors import SchemaError
from pyspark_lookup.scan.formats.orc_numbers import Numbers
from pyspark_lookup.scan.formats.orc_tail import OrcTail, Stripe

UTC_NAMES = {
    "",
    "UTC",
    "GMT",
    "Z",
    "UCT",
    "Zulu",
    "Universal",
    "Greenwich",
    "Etc/UTC",
    "Etc/GMT",
    "Etc/UCT",
    "Etc/Zulu",
}
_BASE = 1420070400  # "seconds since 2015-01-01 00:00:00 in the writer's time zone"
_MICROS = 10**6
_LONGEST = 2**63 // _MICROS


class StoredTimes:
    """The times of one stripe. `column_label`: the column, as errors name it."""

    def __init__(self, tail: OrcTail, stripe: Stripe, column_label: str) -> None:
        self._tail, self._stripe, self._column_label = tail, stripe, column_label

    def zoned(self, column: pa.Array, number: int) -> pa.Array:
        """Instants, which are in UTC in every writer's time zone."""
        seconds, fractions = self._seconds(column, number, _BASE)
        return self._array(column, _gregorian(seconds, "UTC", self._tail.hybrid), fractions, "UTC")

    def instants(self, column: pa.Array, number: int) -> pa.Array:
        """Times without a zone as instants, which they are in the writer's time zone."""
        zone = self._zone
        seconds, fractions = self._seconds(column, number, _base(zone))
        return self._array(column, _gregorian(seconds, zone, self._tail.hybrid), fractions, "UTC")

    def local(self, column: pa.Array, number: int) -> pa.Array:
        """Times without a zone as the writer's clock showed them."""
        zone = self._zone
        seconds, fractions = self._seconds(column, number, _base(zone))
        old = seconds < LOCAL_MEAN_TIME_END
        local = _to_local(seconds, zone)
        if old.any():
            local[old] = ZoneHistory.from_zone(zone).local_seconds(seconds[old], self._tail.hybrid)
        return self._array(column, local, fractions, None)

    @property
    def _zone(self) -> str:
        return "UTC" if self._stripe.time_zone in UTC_NAMES else self._stripe.time_zone

    def _seconds(self, column: pa.Array, number: int, base: int) -> tuple[Numbers, Numbers]:
        """(seconds since 1970, nanoseconds) of each row; 0 for null."""
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        fractions = np.zeros(len(column), np.int64)
        fractions[valid] = self._tail.fractions(self._stripe, number, int(valid.sum()))
        seconds = np.where(valid, view_numbers(column, np.int64), 0)
        if (np.abs(seconds) > _LONGEST - _BASE).any():
            raise SchemaError(f"{self._column_label} has a time beyond what microseconds in 64 bits can express")
        seconds += np.where(valid, base, 0)
        # Java's writers round seconds before 1970 towards 1970.
        seconds -= (seconds < 0) & (fractions > 999_999)
        return seconds, fractions

    def _array(self, column: pa.Array, seconds: Numbers, fractions: Numbers, zone: str | None) -> pa.Array:
        if (fractions % 1000).any():
            raise SchemaError(f"{self._column_label} has nanoseconds and cannot be read as {pa.timestamp('us', zone)}")
        return build_array(column, seconds * _MICROS + fractions // 1000, pa.timestamp("us", zone))


def _gregorian(seconds: Numbers, zone: str, hybrid: bool) -> Numbers:
    old = seconds < LOCAL_MEAN_TIME_END
    if old.any():
        seconds[old] = ZoneHistory.from_zone(zone).gregorian_seconds(seconds[old], hybrid)
    return seconds


@functools.lru_cache(maxsize=64)
def _base(zone: str) -> int:
    """The Unix second at which 2015 began in a time zone."""
    at = _BASE
    for _ in range(2):  # the first guess may have another offset
        at += _BASE - int(_to_local(np.array([at], np.int64), zone)[0])
    return at


def _to_local(seconds: Numbers, zone: str) -> Numbers:
    """What a clock in a time zone shows at these instants, in seconds as if it were UTC."""
    fixed = fixed_offset(zone)
    if fixed is not None:
        return seconds + fixed
    try:
        instants = pa.array(seconds).cast(pa.timestamp("s", tz=zone))
        return np.array(pc.local_timestamp(instants).cast(pa.int64()))
    except pa.ArrowInvalid:
        raise unknown_zone(zone) from None
