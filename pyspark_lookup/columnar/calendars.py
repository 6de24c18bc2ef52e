"""Converts days and instants from the hybrid calendar (Julian before 1582-10-15) to the proleptic Gregorian one of Spark and Arrow.

Spark 2.4, Hive, and Spark's ORC and LEGACY writers count days in the hybrid calendar, like `java.util`. The conversion keeps the date and
the time of day that the writer saw in its own time zone: a date written as 0001-01-01 is read as 0001-01-01. The writer's offset from UTC is
the one of `java.util`: before 1900 a zone's standard time of today, although the zone had local mean time then.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import re
import zoneinfo
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pyspark_lookup.columnar.types import flatten_offsets, list_of_entries, split_type
from pyspark_lookup.errors import SchemaError

Numbers = npt.NDArray[np.int64]
Convert = Callable[[pa.Array], pa.Array]
"""Converts a flat column to another calendar, time zone or type."""

GREGORIAN_DAY = -141427  # 1582-10-15, in days since 1970: from this day on both calendars agree
LOCAL_MEAN_TIME_END = (
    -2208988800
)  # 1900-01-01 in UTC, in seconds: from then on `java.util` has the same offsets as other libraries
_DAY = 86400
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_LAST_MOVED_YEAR = 1900  # in some zones, the first hours of 1900 in UTC are local times of 1899
_FURTHEST = datetime.timedelta(days=12)  # no conversion moves a date or time further, see `widened`
_FIRST_ZONES = -5364662400  # 1800-01-01: before this day no zone changed its offset
_STEP = 10 * _DAY  # before 1900 no zone changed its offset twice within 10 days
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
# 2021-01-01: Spark made its tables of these differences in that year. A zone's standard time is its smallest offset in that year.
_STANDARD_SINCE = 1609459200
_OFFSET = re.compile(r"GMT([+-])(\d{1,2})(?::?(\d{2}))?")
_UTC = re.compile(r"Z|GMT|(?:UTC|UT)?(?:[+-].*)?")  # `java.util` ignores an offset that has no GMT in front
_SAME_BEFORE_1970 = {
    "Africa/Abidjan": "Africa/Accra Africa/Bamako Africa/Banjul Africa/Conakry Africa/Dakar Africa/Freetown Africa/Lome Africa/Nouakchott "
    "Africa/Ouagadougou Atlantic/Reykjavik Atlantic/St_Helena",
    "Africa/Johannesburg": "Africa/Maseru Africa/Mbabane",
    "Africa/Lagos": "Africa/Bangui Africa/Brazzaville Africa/Douala Africa/Kinshasa Africa/Libreville Africa/Luanda Africa/Malabo "
    "Africa/Niamey Africa/Porto-Novo",
    "Africa/Maputo": "Africa/Blantyre Africa/Bujumbura Africa/Gaborone Africa/Harare Africa/Kigali Africa/Lubumbashi Africa/Lusaka",
    "Africa/Nairobi": "Africa/Addis_Ababa Africa/Asmara Africa/Dar_es_Salaam Africa/Djibouti Africa/Kampala Africa/Mogadishu "
    "Indian/Antananarivo Indian/Comoro Indian/Mayotte",
    "America/Panama": "America/Atikokan America/Cayman",
    "America/Phoenix": "America/Creston",
    "America/Puerto_Rico": "America/Anguilla America/Antigua America/Aruba America/Blanc-Sablon America/Curacao America/Dominica "
    "America/Grenada America/Guadeloupe America/Montserrat America/Port_of_Spain America/St_Kitts America/St_Lucia America/St_Thomas "
    "America/St_Vincent America/Tortola",
    "America/Toronto": "America/Nassau",
    "Asia/Bangkok": "Asia/Phnom_Penh Asia/Vientiane Indian/Christmas",
    "Asia/Dubai": "Asia/Muscat Indian/Mahe Indian/Reunion",
    "Asia/Kuching": "Asia/Brunei",
    "Asia/Qatar": "Asia/Bahrain",
    "Asia/Rangoon": "Indian/Cocos",
    "Asia/Riyadh": "Antarctica/Syowa Asia/Aden Asia/Kuwait",
    "Asia/Singapore": "Asia/Kuala_Lumpur",
    "Europe/Belgrade": "Europe/Ljubljana Europe/Sarajevo Europe/Skopje Europe/Zagreb",
    "Europe/Berlin": "Europe/Copenhagen Europe/Oslo Europe/Stockholm",
    "Europe/Brussels": "Europe/Amsterdam Europe/Luxembourg",
    "Europe/London": "Europe/Guernsey Europe/Isle_of_Man Europe/Jersey",
    "Europe/Paris": "Europe/Monaco",
    "Europe/Zurich": "Europe/Vaduz",
    "Indian/Maldives": "Indian/Kerguelen",
    "Pacific/Auckland": "Antarctica/McMurdo",
    "Pacific/Guadalcanal": "Pacific/Pohnpei",
    "Pacific/Guam": "Pacific/Saipan",
    "Pacific/Pago_Pago": "Pacific/Midway",
    "Pacific/Port_Moresby": "Antarctica/DumontDUrville Pacific/Chuuk",
    "Pacific/Tarawa": "Pacific/Funafuti Pacific/Majuro Pacific/Wake Pacific/Wallis",
    "GMT+00:00": "WET",
    "GMT+01:00": "CET MET",
    "GMT+02:00": "EET",
}
"""Zones (the values) for which Spark's tables have the history of another zone (the key). Some machines' time zone data differ from this."""
_ZONES = {name: zone for zone, names in _SAME_BEFORE_1970.items() for name in names.split()}


def gregorian_days(days: Numbers) -> Numbers:
    """The days that have, in the proleptic Gregorian calendar, the same year, month and day as `days` have in the hybrid calendar.

    All are counted from 1970-01-01. February 29 of a year that is not a Gregorian leap year becomes March 1.
    """
    shifted = days + 2472670  # days since -4800-03-01 of the Julian calendar
    year = (4 * shifted + 3) // 1461
    of_year = shifted - 1461 * year // 4
    month = (5 * of_year + 2) // 153
    of_month = of_year - (153 * month + 2) // 5
    # `year` begins in March and counts from -4800. This is a multiple of 400, so `year` is a leap year exactly if the calendar's year is.
    gregorian = 365 * year + year // 4 - year // 100 + year // 400 + (153 * month + 2) // 5 + of_month - 2472632
    return np.where(days < GREGORIAN_DAY, gregorian, days)


class ZoneHistory:
    """A time zone's offsets from UTC before 1900, in seconds.

    `standard`: the only offset that `java.util` uses then. `offsets`: the historical offsets, in order. `starts`: the local time at which
    each of them begins to apply, except the first.
    """

    def __init__(self, standard: int, starts: Sequence[int], offsets: Sequence[int]) -> None:
        self._standard = standard
        self._starts = np.array(starts, np.int64)
        self._offsets = np.array(offsets, np.int64)

    @classmethod
    @functools.lru_cache(maxsize=64)
    def from_zone(cls, name: str) -> ZoneHistory:
        """The history of the time zone `name`. Raises SchemaError for a zone that this machine does not know."""
        fixed = fixed_offset(_ZONES.get(name, name))
        if fixed is not None:
            return cls(fixed, [], [fixed])
        try:
            zone, merged = zoneinfo.ZoneInfo(name), zoneinfo.ZoneInfo(_ZONES.get(name, name))
        except (OSError, ValueError):  # ZoneInfoNotFoundError is a KeyError
            raise UnknownZoneError(name) from None
        except zoneinfo.ZoneInfoNotFoundError:
            raise UnknownZoneError(name) from None
        # Not the offset outside of daylight saving time: Morocco's clocks are at +01:00, and during Ramadan at its standard time +00:00.
        standard = min(_utc_offset(zone, _STANDARD_SINCE + step * 15 * _DAY) for step in range(24))
        return cls(standard, *_history(merged))

    def gregorian_seconds(self, seconds: Numbers, hybrid: bool = True) -> Numbers:
        """For each of `seconds`, the instant at which the zone really had the local date and time that `java.util` shows for it.

        `seconds`: instants before 1900, in seconds since 1970. `hybrid`: whether `java.util` shows dates in the hybrid calendar.
        """
        local = self.local_seconds(seconds, hybrid)
        return local - self._offsets[np.searchsorted(self._starts, local, side="right")]

    def local_seconds(self, seconds: Numbers, hybrid: bool = True) -> Numbers:
        """The local date and time that `java.util` shows for each of `seconds`, in seconds. The arguments are as in `gregorian_seconds`."""
        local = seconds + self._standard
        if hybrid:
            days = local // _DAY
            local += (gregorian_days(days) - days) * _DAY
        return local


def fixed_offset(name: str) -> int | None:
    """The offset in seconds that a time zone's name states, such as 3600 for `GMT+1`; None for a zone with a history."""
    if _UTC.fullmatch(name):
        return 0
    fixed = _OFFSET.fullmatch(name)
    if fixed is None:
        return None
    sign, hours, minutes = fixed.groups(default="0")
    return (int(hours) * 3600 + int(minutes) * 60) * (-1 if sign == "-" else 1)


class UnknownZoneError(SchemaError):
    """A file has times in a time zone that this machine does not know. The text does not name the file."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"times in the time zone {name!r}, which this machine does not know: install tzdata in the system and for Python"
        )


def _utc_offset(zone: zoneinfo.ZoneInfo, second: int) -> int:
    offset = (_EPOCH + datetime.timedelta(seconds=second)).astimezone(zone).utcoffset()
    assert offset is not None
    return offset.days * _DAY + offset.seconds


def _history(zone: zoneinfo.ZoneInfo) -> tuple[list[int], list[int]]:
    """(`starts`, `offsets`) of a zone's `ZoneHistory`. A local time that occurred twice gets the later offset, as in Spark."""
    starts: list[int] = []
    offsets = [_utc_offset(zone, _FIRST_ZONES)]
    for at in range(_FIRST_ZONES, LOCAL_MEAN_TIME_END, _STEP):
        low, high = at, min(at + _STEP, LOCAL_MEAN_TIME_END)
        if _utc_offset(zone, high) == offsets[-1]:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _utc_offset(zone, middle) == offsets[-1] else (low, middle)
        offsets.append(_utc_offset(zone, high))
        starts.append(high + offsets[-1])
    return starts, offsets


def gregorian_dates(column: pa.Array) -> pa.Array:
    """A column of dates (date32) in the hybrid calendar, converted to the Gregorian one."""
    days = view_numbers(column, np.int32)
    if not (days < GREGORIAN_DAY).any():
        return column
    return build_array(column, gregorian_days(days.astype(np.int64)).astype(np.int32), column.type)


def gregorian_instants(column: pa.Array, zone: str) -> pa.Array:
    """A column of timestamps, written with the hybrid calendar in the time zone `zone`, converted to the Gregorian calendar."""
    per_second = _PER_SECOND[column.type.unit]
    times = view_numbers(column, np.int64)
    old = times < LOCAL_MEAN_TIME_END * per_second
    if not old.any():
        return column
    seconds, fractions = np.divmod(times[old], per_second)
    times = times.copy()
    times[old] = ZoneHistory.from_zone(zone).gregorian_seconds(seconds) * per_second + fractions
    return build_array(column, times, column.type)


def view_numbers(column: pa.Array, kind: Any) -> npt.NDArray[Any]:
    """The values of a column of fixed width as numbers of type `kind`, without a copy; undefined where the column is null."""
    if not len(column):
        return np.zeros(0, kind)
    return np.frombuffer(column.buffers()[1], kind, len(column), column.offset * np.dtype(kind).itemsize)


def build_array(column: pa.Array, numbers: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """`numbers` as a column of type `kind`, null where `column` is null."""
    validity = column.is_valid().buffers()[1] if column.null_count else None
    return pa.Array.from_buffers(kind, len(column), [validity, pa.py_buffer(numbers)])


def convert_bounds(column: pa.Array) -> tuple[Any, Any]:
    """(lowest, highest) value that a converted column can have; (None, None) if Python has no such date or time.

    `column`: the lowest and the highest value of the column, both converted. Timestamps get bounds that are wider (`widened`).
    """
    with contextlib.suppress(OverflowError, ValueError):
        low, high = column.to_pylist()
        return widened(low, high) if pa.types.is_timestamp(column.type) else (low, high)
    return None, None


def widened(low: Any, high: Any) -> tuple[Any, Any]:
    """Bounds that are right for the dates or times between `low` and `high`, whether these are converted or not, in any time zone.

    From the year 1 on, a conversion moves a date by at most 11 days. It may swap the order of two instants, at a leap day that the Gregorian
    calendar lacks.
    """
    return _shift(low, -_FURTHEST), _shift(high, _FURTHEST)


def _shift(end: Any, by: datetime.timedelta) -> Any:
    if end is None or end.year > _LAST_MOVED_YEAR:
        return end
    try:
        return end + by
    except OverflowError:  # before the year 1; the conversion moves the first days of year 1 only to later days
        return end.replace(month=1, day=1)


def convert_columns(batch: pa.RecordBatch, converts: Mapping[str, Sequence[Convert | None]]) -> pa.RecordBatch:
    """A batch with some columns converted. `converts`: for each of these columns, by name, the functions that `convert_leaves` takes."""
    if not converts or converts.keys().isdisjoint(batch.schema.names):
        return batch
    arrays, fields = [], []
    for field, array in zip(batch.schema, batch.columns, strict=True):
        column_converts = converts.get(field.name)
        arrays.append(array if column_converts is None else convert_leaves(array, iter(column_converts)))
        fields.append(field.with_type(arrays[-1].type))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def convert_leaves(column: pa.Array, converts: Iterator[Convert | None]) -> pa.Array:
    """A column, perhaps nested, with its leaves (its flat parts) converted. Fields keep their metadata.

    `converts`: a function for each leaf (None: no conversion), in the order of the leaves in the type.
    """
    kind = column.type
    shape, _ = split_type(kind)
    if shape is None:
        return _convert_flat(column, next(converts))
    if pa.types.is_struct(kind):
        children = [convert_leaves(child, converts) for child in column.flatten()]
        fields = [field.with_type(child.type) for field, child in zip(kind, children, strict=True)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=column.is_null() if column.null_count else None)
    if pa.types.is_map(kind):
        as_list = list_of_entries(column)
        entries = as_list.flatten()
        keys, items = (convert_leaves(entries.field(place), converts) for place in (0, 1))
        typed = pa.map_(kind.key_field.with_type(keys.type), kind.item_field.with_type(items.type))
        return pa.MapArray.from_arrays(flatten_offsets(as_list), keys, items, type=typed)
    values = convert_leaves(column.flatten(), converts)
    return pa.ListArray.from_arrays(
        flatten_offsets(column), values, type=pa.list_(kind.value_field.with_type(values.type))
    )


def _convert_flat(column: pa.Array, convert: Convert | None) -> pa.Array:
    if convert is None:
        return column
    if pa.types.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(column.indices, convert(column.dictionary))
    return convert(column)
