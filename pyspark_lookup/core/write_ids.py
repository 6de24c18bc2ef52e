"""`ValidWriteIdList`: the writes of a table that a reader may see (HIVE-21637).

A table's writes are numbered from 1. A list has the highest number that its reader knows (the high watermark), and the numbers of the writes
up to it that are open or aborted. All other writes up to the watermark are valid. No write above the watermark is valid.

Lists are values. They are compared as the sets of their valid writes, never by an order of their own (Hive's order was wrong for one history
in seven, HIVE-24975).
"""

from __future__ import annotations

import bisect
import enum
import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote, unquote

NO_OPEN_WRITE_ID = 2**63 - 1
"""If a list has no open write, its text has this number as the least open write id, as in Hive."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_UNESCAPED = re.compile(r"[^:,$]+")


class RangeResponse(enum.Enum):
    """For how many of the write ids in a range a condition is true."""

    NONE = "NONE"
    SOME = "SOME"
    ALL = "ALL"


class ValidWriteIdList:
    """The writes of `table` that a reader may see: those up to `high_watermark` that are neither open nor aborted.

    `open_ids`: the ids of writes that have not ended, ascending. `aborted_ids`: the ids of writes whose rows no reader will ever see,
    ascending. Raises ValueError for an empty name, for a watermark below 0 or above 2**63 - 2, and for ids that are below 1, above the
    watermark, or in both lists.
    """

    __slots__ = ("_exceptions", "aborted_ids", "high_watermark", "open_ids", "table")

    def __init__(self, table: str, high_watermark: int, open: Iterable[int] = (), aborted: Iterable[int] = ()) -> None:
        if not table:
            raise ValueError("a list of write ids needs the name of its table")
        if not 0 <= high_watermark < NO_OPEN_WRITE_ID:
            raise ValueError(f"high watermark {high_watermark} of {table}: give a number from 0 to 2**63 - 2")
        self.table = table
        self.high_watermark = high_watermark
        self.open_ids = tuple(sorted(set(open)))
        self.aborted_ids = tuple(sorted(set(aborted)))
        self._exceptions = tuple(sorted((*self.open_ids, *self.aborted_ids)))
        outside = [id_ for id_ in self._exceptions if not 1 <= id_ <= high_watermark]
        if outside:
            raise ValueError(f"write id {outside[0]} of {table}: ids go from 1 to the high watermark, {high_watermark}")
        contradictory_ids = set(self.open_ids) & set(self.aborted_ids)
        if contradictory_ids:
            raise ValueError(f"write id {min(contradictory_ids)} of {table} cannot be open and aborted")

    @classmethod
    def parse(cls, text: str) -> ValidWriteIdList:
        """The list in a string that `str()` wrote: `table:highWatermark:minOpen:open,…:aborted,…`, as in Hive.

        Raises ValueError for any other string. An empty string, or one that was cut off, is refused, too, because a shorter list could include
        more writes.
        """
        parts = text.split(":") if isinstance(text, str) else []
        if len(parts) != 5:
            raise _parse_error(text, "five parts, separated by ':'")
        name, watermark, least, opened, aborted = parts
        if not _UNESCAPED.fullmatch(name):
            raise _parse_error(text, "a table's id in the first part")
        write_ids = cls(unquote(name), _number(text, watermark), _numbers(text, opened), _numbers(text, aborted))
        lowest = _number(text, least)
        # Hive gets this number from its caller. It is one of the open ids, but not always the least.
        if lowest != NO_OPEN_WRITE_ID if not write_ids.open_ids else lowest not in write_ids.open_ids:
            raise _parse_error(text, f"an open id in the third part, or {NO_OPEN_WRITE_ID} if no write is open")
        return write_ids

    def __str__(self) -> str:
        """The list as text, in Hive's form: `t1:5:2:2,4:`. The characters `:`, `,`, `$` and `%` of the table's name are percent-encoded."""
        least = self.min_open if self.open_ids else NO_OPEN_WRITE_ID
        name = "".join(quote(char) if char in ":,$%" else char for char in self.table)
        ids = (",".join(map(str, group)) for group in (self.open_ids, self.aborted_ids))
        return ":".join((name, str(self.high_watermark), str(least), *ids))

    def __repr__(self) -> str:
        return f"ValidWriteIdList({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ValidWriteIdList):
            return NotImplemented
        return self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def __reduce__(self) -> tuple[type[ValidWriteIdList], tuple[str, int, tuple[int, ...], tuple[int, ...]]]:
        return ValidWriteIdList, self._parts()

    def _parts(self) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
        return self.table, self.high_watermark, self.open_ids, self.aborted_ids

    @property
    def min_open(self) -> int | None:
        """The least open write id; None if no write is open."""
        return self.open_ids[0] if self.open_ids else None

    # --- questions --------------------------------------------------------------------------------

    def is_valid(self, id_: int) -> bool:
        """Whether the rows of a write may be seen. Raises ValueError for an id below 1."""
        return self._check_number(id_) <= self.high_watermark and not _contains(self._exceptions, id_)

    def is_aborted(self, id_: int) -> bool:
        """Whether the list says that a write was aborted. Raises ValueError for an id below 1."""
        return _contains(self.aborted_ids, self._check_number(id_))

    def is_range_valid(self, low: int, high: int) -> RangeResponse:
        """How many of the ids from `low` to `high` are valid. Raises ValueError for an empty range.

        Ids above the watermark are not valid. (Here Hive differs: it says ALL if no open or aborted id lies below `high`, even above the
        watermark.)
        """
        above = max(high - max(low - 1, self.high_watermark), 0)
        return self._response(low, high, high - low + 1 - above - _count(self._exceptions, low, high))

    def is_range_aborted(self, low: int, high: int) -> RangeResponse:
        """How many of the ids from `low` to `high` are aborted. Raises ValueError for an empty range."""
        return self._response(low, high, _count(self.aborted_ids, low, high))

    def _response(self, low: int, high: int, count: int) -> RangeResponse:
        if not 1 <= low <= high:
            raise ValueError(
                f"write ids {low} to {high} of {self.table}: give a range that is not empty and begins at 1 or later"
            )
        if not count:
            return RangeResponse.NONE
        return RangeResponse.ALL if count == high - low + 1 else RangeResponse.SOME

    def covers(self, other: ValidWriteIdList) -> bool:
        """Whether every write that is valid in `other` is also valid in this list.

        Raises ValueError if `other` is a list of another table, because such lists cannot be compared.
        """
        if other.table != self.table:
            raise ValueError(
                f"lists of write ids of two tables, {self.table} and {other.table}, cannot be compared: give lists of one table"
            )
        exceptions, other_exceptions = self._exceptions, set(other._exceptions)
        beyond = max(other.high_watermark - self.high_watermark, 0)
        if beyond and _count(other._exceptions, self.high_watermark + 1, other.high_watermark) != beyond:
            return False
        return all(id_ in other_exceptions for id_ in exceptions if id_ <= other.high_watermark)

    def equivalent(self, other: ValidWriteIdList) -> bool:
        """Whether the same writes are valid in both lists, even if the lists differ otherwise (`t:12:8:8:12` and `t:11:8:8:` are
        equivalent)."""
        return self.covers(other) and other.covers(self)

    # --- new values -------------------------------------------------------------------------------

    def open(self, id_: int) -> ValidWriteIdList:
        """A new list in which `id_` is open. Ids between the watermark and `id_` become open, too.

        Raises ValueError for an id that is committed or aborted.
        """
        if id_ <= self.high_watermark and not _contains(self.open_ids, self._check_number(id_)):
            raise ValueError(f"write id {id_} of {self.table} is committed or aborted already, so it cannot be opened")
        return self._extend(id_, self.open_ids, self.aborted_ids, (id_,))

    def commit(self, id_: int) -> ValidWriteIdList:
        """A new list in which `id_` is valid. Ids between the watermark and `id_` become open. Raises ValueError for an aborted id."""
        if _contains(self.aborted_ids, self._check_number(id_)):
            raise ValueError(f"write id {id_} of {self.table} was aborted: it cannot be committed")
        return self._extend(id_, {*self.open_ids} - {id_}, self.aborted_ids)

    def abort(self, id_: int) -> ValidWriteIdList:
        """A new list in which `id_` is aborted. Ids between the watermark and `id_` become open. Raises ValueError for a committed id."""
        if id_ <= self.high_watermark and self.is_valid(id_):
            raise ValueError(f"write id {id_} of {self.table} was committed: it cannot be aborted")
        return self._extend(id_, {*self.open_ids} - {id_}, {*self.aborted_ids, self._check_number(id_)})

    def _extend(
        self, id_: int, opened: Iterable[int], aborted: Iterable[int], also: Iterable[int] = ()
    ) -> ValidWriteIdList:
        between = range(self.high_watermark + 1, id_)
        return ValidWriteIdList(self.table, max(self.high_watermark, id_), {*opened, *between, *also}, aborted)

    def _check_number(self, id_: int) -> int:
        if id_ < 1:
            raise ValueError(f"write id {id_} of {self.table}: ids begin at 1")
        return id_


def _contains(ids: Sequence[int], id_: int) -> bool:
    place = bisect.bisect_left(ids, id_)
    return place < len(ids) and ids[place] == id_


def _count(ids: Sequence[int], low: int, high: int) -> int:
    """How many of the ascending `ids` are from `low` to `high`."""
    return max(bisect.bisect_right(ids, high) - bisect.bisect_left(ids, low), 0)


def _numbers(text: str, part: str) -> list[int]:
    numbers = [_number(text, number) for number in part.split(",")] if part else []
    if len(set(numbers)) != len(numbers):
        raise _parse_error(text, "each id only once")
    return numbers


def _number(text: str, part: str) -> int:
    if not _NUMBER.fullmatch(part):
        raise _parse_error(text, "whole numbers without signs or leading zeros")
    return int(part)


def _parse_error(text: str, expected: str) -> ValueError:
    return ValueError(
        f"{text!r} is not a list of valid write ids, such as 't1:5:2:2,4:' (table id, high watermark, least open id, open ids, "
        f"aborted ids): expected {expected}"
    )
