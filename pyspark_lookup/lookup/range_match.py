"""`Match`: how a lookup finds rows by a value that lies in their range, in their network, or begins with their prefix; `RangeMatcher` finds them.

The validity of a row in time (`as_of`) is such a range, too.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from pyspark_lookup.columnar.keys import (
    KEY_INDEX,
    Numbers,
    accepts,
    as_bools,
    as_indices,
    as_int64,
    one_array,
    renumber,
)
from pyspark_lookup.columnar.networks import Addresses, Networks, parse_addresses, parse_integers, parse_networks
from pyspark_lookup.columnar.ranges import NONE, Pick, RangeIndex, Ranges, SortedBytes, Stabbing, positions_of
from pyspark_lookup.columnar.types import widens
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.errors import DamagedFileError, OverlapError, SchemaError
from pyspark_lookup.options.enums import OnBadNetwork, Overlap
from pyspark_lookup.options.groups import OF_MATCHES, ReadOptions

_IPV4_BITS = np.uint64(2**32 - 1)


class MatchKind(enum.Enum):
    """How a value is compared with the columns of a row: by the argument of `lookup_join` that names the columns."""

    AS_OF = "as_of"
    BETWEEN = "between"
    CIDR = "cidr"
    STARTS_WITH = "starts_with"

    @property
    def option(self) -> str:
        """The option that names the table's columns."""
        return _OPTIONS[self]

    @property
    def is_nested(self) -> bool:
        """Whether the ranges that match one value usually lie inside one another, so that the narrowest is the default."""
        return self in (MatchKind.CIDR, MatchKind.STARTS_WITH)


_OPTIONS = {
    MatchKind.AS_OF: "lookup.valid-from",
    MatchKind.BETWEEN: "lookup.range",
    MatchKind.CIDR: "lookup.cidr",
    MatchKind.STARTS_WITH: "lookup.starts-with",
}


def named_columns(kind: MatchKind, options: ReadOptions) -> tuple[str, ...]:
    """The table's columns for a kind of match that the options of a read name; () if they name none."""
    if kind is MatchKind.AS_OF:
        return tuple(name for name in (options.valid_from, options.valid_to) if name is not None)
    if kind is MatchKind.STARTS_WITH:
        return () if options.starts_with is None else (options.starts_with,)
    return (options.between if kind is MatchKind.BETWEEN else options.cidr) or ()


def stored_options(properties: Mapping[str, str]) -> dict[str, str]:
    """Those of a table's properties that are options of matches."""
    return {key: text for key, text in properties.items() if key in OF_MATCHES}


def check_match_types(kind: MatchKind, columns: pa.Schema, subject: str) -> None:
    """Raise SchemaError, which begins with `subject`, if the types of these columns do not fit a kind of match."""
    names, types = columns.names, columns.types
    if kind in (MatchKind.AS_OF, MatchKind.BETWEEN) and types[0] != types[-1]:
        raise SchemaError(
            f"{subject}: {names[0]!r} is {types[0]}, {names[1]!r} is {types[1]}; both must have the same type"
        )
    is_bytes = [pa.types.is_string(type_) or pa.types.is_binary(type_) for type_ in types]
    if kind is MatchKind.STARTS_WITH and not is_bytes[0]:
        raise SchemaError(f"{subject}: {names[0]!r} is {types[0]}; prefixes must be text or binary")
    if kind is MatchKind.CIDR and not (
        is_bytes[0]
        and (
            (len(names) == 1 and pa.types.is_string(types[0]))
            or (len(names) == 2 and (types[1] == types[0] or pa.types.is_integer(types[1])))
        )
    ):
        kinds = " and ".join(f"{name!r} is {type_}" for name, type_ in zip(names, types, strict=True))
        raise SchemaError(
            f"{subject}: {kinds}; a network is one column of text, or two columns: its first and last address, or its address and the "
            "length of its prefix as an integer"
        )


@dataclasses.dataclass(frozen=True)
class Match:
    """A kind of match, and the table's columns that it needs.

    AS_OF: the time from which a row is valid and, optionally, the time before which it is; without the second column, a row ends where the next
    row of its key begins. BETWEEN: the lowest and the highest value. CIDR: the network, or its first and last address, or its address and the
    length of its prefix. STARTS_WITH: the prefix.
    """

    kind: MatchKind
    columns: tuple[str, ...]
    closed: tuple[bool, bool] = (True, True)
    overlap: Overlap = Overlap.ERROR
    on_bad_network: OnBadNetwork = OnBadNetwork.ERROR

    @classmethod
    def from_options(cls, kind: MatchKind, columns: Sequence[str], options: ReadOptions) -> Match:
        """A match whose bounds, and whose choice if several rows match, are those of the read's options."""
        closed = (True, kind is not MatchKind.AS_OF) if options.bounds is None else options.bounds.closed
        overlap = options.overlap or (Overlap.NARROWEST if kind.is_nested else Overlap.ERROR)
        if kind is MatchKind.AS_OF and len(columns) == 1:
            overlap = Overlap.NEWEST  # a row ends where the next one begins
        return cls(kind, tuple(columns), closed, overlap, options.on_bad_network)

    def cast_values(self, field: pa.Field, values: pa.Array) -> pa.Array:
        """The values, cast to a type that compares with the first column, `field`. Raises SchemaError if there is none."""
        kind = values.type
        if self.kind is MatchKind.CIDR:
            if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_integer(kind):
                return values
            raise SchemaError(
                f"argument cidr has the type {kind}; addresses must be text, binary of 4 or 16 bytes, or integers"
            )
        if self.kind is MatchKind.AS_OF and (
            pa.types.is_timestamp(kind) and kind.tz is not None and pa.types.is_timestamp(field.type) and field.type.tz
        ):
            kind = pa.timestamp(kind.unit, field.type.tz)  # Spark sends instants in the session's time zone
        # A time must not be compared with a date.
        is_time = self.kind is MatchKind.AS_OF and any(map(pa.types.is_temporal, (kind, field.type)))
        if widens(kind, field.type) if is_time else accepts(field.type, kind):
            return values.cast(field.type) if widens(kind, field.type) else values
        raise SchemaError(
            f"argument {self.kind.value} has the type {values.type}, but the table's column {field.name!r} has {field.type}: cast the values "
            f"to {field.type} if the cast changes no value"
        )


@dataclasses.dataclass(frozen=True)
class MatchedValues:
    """Computes the positions of values among the ranges of a match.

    `decimal`: the type to which values are cast before they are compared with the bounds (None: no cast). `is_ipv4`: whether all networks are IPv4.
    `bounds`: see `Ranges`.
    """

    kind: MatchKind
    decimal: pa.DataType | None
    is_ipv4: bool
    bounds: SortedBytes | None

    def positions(self, values: pa.Array) -> tuple[Numbers, Numbers]:
        """(the positions of values, whether each value is one that can match)."""
        if self.kind is not MatchKind.CIDR:
            valid = as_bools(values.is_valid()) if values.null_count else np.ones(len(values), np.bool_)
            return positions_of(values if self.decimal is None else values.cast(self.decimal), self.bounds), valid
        if self.is_ipv4 and pa.types.is_integer(values.type):
            return parse_integers(values)
        addresses = parse_addresses(values)
        if self.is_ipv4:
            return _ipv4_numbers(addresses), addresses.valid & addresses.is_ipv4
        return positions_of(addresses.to_array(), self.bounds), addresses.valid


class MatchedRanges:
    """The ranges of some rows, as a match defines them, and the positions of looked-up values among them.

    `skipped`: the number of rows whose network cannot be read (`lookup.on-bad-network` = SKIP). `empty`: the number of other rows whose range
    holds no value, because its lowest value is above its highest.

    `columns`: the columns of `match`. `kind`: the type of the values. `name_row`: returns the words by which errors name a row. `group`: see `Ranges`.
    `is_bad`, `is_empty`: which rows these are.
    """

    def __init__(
        self,
        match: Match,
        columns: Sequence[pa.Array],
        kind: pa.DataType,
        name_row: Callable[[int], str],
        group: Numbers | None = None,
    ) -> None:
        self._match, self._columns, self._name_row = match, columns, name_row
        self._decimal = decimal_of_both(columns[0].type, kind)
        self._is_ipv4 = False
        self.skipped = 0
        self.is_bad = np.zeros(len(columns[0]), np.bool_)
        self.pick = Pick.NARROWEST if match.overlap is Overlap.NARROWEST else Pick.NEWEST
        if match.kind is MatchKind.CIDR:
            self.ranges = self._networks(group)
        elif match.kind is MatchKind.STARTS_WITH:
            self.ranges = Ranges.from_prefixes(columns[0], group)
        else:
            low, *high = map(self._comparable, columns)
            self.ranges = Ranges.from_bounds(low, high[0] if high else None, match.closed, group)
        # Rows with a null have no network or prefix.
        has_range = ~_any_null(columns) if match.kind.is_nested else np.True_
        self.is_empty = self.ranges.is_empty & has_range & ~self.is_bad
        self.empty = int(np.count_nonzero(self.is_empty))

    @property
    def values(self) -> MatchedValues:
        """Where values stand among these ranges."""
        return MatchedValues(self._match.kind, self._decimal, self._is_ipv4, self.ranges.bounds)

    def _comparable(self, column: pa.Array) -> pa.Array:
        return column if self._decimal is None else column.cast(self._decimal)

    def _networks(self, group: Numbers | None) -> Ranges:
        networks = _parse(self._columns)
        is_null = ~networks.valid & _any_null(self._columns)
        self.is_bad = is_bad = (~networks.valid & ~is_null) | networks.has_host_bits
        if is_bad.any() and self._match.on_bad_network is OnBadNetwork.ERROR:
            raise self._bad_network(int(np.argmax(is_bad)), networks, int(is_bad.sum()))
        self.skipped = int(is_bad.sum())
        valid = networks.valid & ~is_bad
        self._is_ipv4 = bool((networks.first.is_ipv4 & networks.last.is_ipv4)[valid].all())
        bounds = [
            pa.array(_ipv4_numbers(side)) if self._is_ipv4 else dataclasses.replace(side, valid=valid).to_array()
            for side in (networks.first, networks.last)
        ]
        ranges = Ranges.from_bounds(bounds[0], bounds[1], (True, True), group)
        return dataclasses.replace(ranges, is_empty=ranges.is_empty | ~valid)

    def _text(self, row: int) -> str:
        values = (
            f"{name} = {show(column[row])}" for name, column in zip(self._match.columns, self._columns, strict=True)
        )
        return ", ".join(values)

    def _bad_network(self, row: int, networks: Networks, count: int) -> DamagedFileError:
        problem = "has host bits set" if networks.has_host_bits[row] else "is not a network"
        return DamagedFileError(
            f"{self._name_row(row)}: {self._text(row)} {problem} (rows with this problem: {count:,}): correct the table, or set "
            "lookup.on-bad-network = SKIP, with which these rows match nothing"
        )

    def overlap(self, value: pa.Scalar, key: str, rows: Numbers) -> OverlapError:
        """The error for several `rows` that match a value."""
        first, second = (self._text(int(row)) for row in rows[:2])
        of_key = f" of the key {key}" if key else ""
        advice = (
            f"NEWEST to take the row with the latest {self._match.columns[0]}"
            if self._match.kind is MatchKind.AS_OF
            else "NARROWEST to take the smallest range, NEWEST for the one that begins last, or ALL for all of them"
        )
        verb = "are valid at" if self._match.kind is MatchKind.AS_OF else "match the value"
        return OverlapError(
            f"{len(rows):,} rows{of_key} {verb} {show(value)}, e.g. ({first}) and ({second}): correct the table, or set lookup.overlap = {advice}"
        )


def decimal_of_both(kind: pa.DataType, other_kind: pa.DataType) -> pa.DataType | None:
    """The decimal type in which numbers of two types compare exactly; None for types whose values compare as they are."""
    if not (pa.types.is_decimal(kind) or pa.types.is_decimal(other_kind)):
        return None
    digits = [(k.precision - k.scale, k.scale) if pa.types.is_decimal(k) else (19, 0) for k in (kind, other_kind)]
    whole, scale = max(whole for whole, _ in digits), max(scale for _, scale in digits)
    return pa.decimal128(whole + scale, scale) if whole + scale <= 38 else pa.decimal256(whole + scale, scale)


def _ipv4_numbers(addresses: Addresses) -> Numbers:
    return np.asarray(addresses.lower & _IPV4_BITS, np.int64)


def _any_null(columns: Sequence[pa.Array]) -> Numbers:
    is_null = np.zeros(len(columns[0]), np.bool_)
    for column in columns:
        is_null |= as_bools(column.is_null())
    return is_null


def _parse(columns: Sequence[pa.Array]) -> Networks:
    if len(columns) == 1 or pa.types.is_integer(columns[1].type):
        return parse_networks(*columns)
    first, last = map(parse_addresses, columns)
    return Networks(first, last, first.valid & last.valid, np.zeros(len(first.valid), np.bool_))


class RangeMatcher:
    """Finds the rows that match values by an index of their ranges. `groups`: the number of keys whose rows are in groups (1: there are no keys)."""

    def __init__(self, match: Match, matched: MatchedRanges, groups: int = 1) -> None:
        self._match, self._matched, self._groups = match, matched, groups
        self._index = RangeIndex.build(matched.ranges, matched.pick, groups)

    @cached_property
    def _stabbing(self) -> Stabbing:
        return Stabbing.from_ranges(self._matched.ranges, self._groups)

    def find(
        self, values: pa.Array, groups: Numbers | None = None, name_group: Callable[[int], str] | None = None
    ) -> tuple[Numbers, Numbers]:
        """The rows that match values, as (indices of values, row numbers), ordered by both. At most one row for each value, unless
        `lookup.overlap` is ALL.

        `groups`: for each value the number of its key; -1 for none. `name_group`: the key with a number, for errors. Raises OverlapError for two
        rows that match a value, if `lookup.overlap` is ERROR.
        """
        positions, valid = self._matched.values.positions(values)
        finds_all = self._match.overlap is Overlap.ALL
        known = None if valid.all() else np.flatnonzero(valid)
        if known is not None:
            positions, groups = positions[known], None if groups is None else groups[known]
        numbers, rows, shared = find_rows(
            self._index, positions, groups, (lambda: self._stabbing) if finds_all else None
        )
        if self._match.overlap is Overlap.ERROR and len(shared):
            place = shared[:1]
            _, shared_rows = self._stabbing.find(positions[place], None if groups is None else groups[place])
            key = "" if groups is None or name_group is None else name_group(int(groups[place[0]]))
            value = int(place[0] if known is None else known[place[0]])
            raise self._matched.overlap(values[value], key, shared_rows)
        return numbers if known is None else known[numbers], rows


def find_rows(
    index: RangeIndex, positions: Numbers, groups: Numbers | None, tree: Callable[[], Stabbing] | None = None
) -> tuple[Numbers, Numbers, Numbers]:
    """(indices of positions, the rows that win there, the indices of positions that several ranges hold), all ascending.

    `groups`: as for `RangeIndex.find_segments`. `tree`: returns the tree of the same rows; then a position that several ranges hold comes with
    all of them, and not only with the one that wins.
    """
    segments = index.find_segments(positions, groups)
    winners = index.winners[segments]
    is_held = winners != NONE
    numbers = np.arange(len(winners)) if is_held.all() else np.flatnonzero(is_held)
    rows = (winners if len(numbers) == len(winners) else winners[numbers]).astype(np.int64)
    if index.is_shared is None:
        return numbers, rows, numbers[:0]
    is_shared = index.is_shared[segments[numbers]]
    shared = numbers[is_shared]
    if tree is None or not len(shared):
        return numbers, rows, shared
    shared_numbers, shared_rows = tree().find(positions[shared], None if groups is None else groups[shared])
    numbers = np.concatenate([numbers[~is_shared], shared[shared_numbers]])
    rows = np.concatenate([rows[~is_shared], shared_rows])
    order = np.argsort(numbers, kind="stable")
    return numbers[order], rows[order], shared


def matching_rows(
    rows: pa.Table,
    keys: pa.Table,
    values: pa.Array,
    match: Match,
    places: Numbers | None = None,
    locate: Callable[[Sequence[pa.Scalar]], str | None] | None = None,
    count: Callable[[MatchedRanges], None] | None = None,
) -> pa.Table:
    """The `rows` that match the value of their key, in the order of `KEY_INDEX`.

    `values`: a value for each of the `keys`, as `Match.cast_values` returns them. If it is null, no row matches. `places`: for each value the
    number of its key, if keys have several values; `KEY_INDEX` then becomes the number of the value. `locate`: for errors, returns where in
    the table the row with some values in the columns of the match is. `count`: called with the ranges of the rows. Raises OverlapError for
    two rows that match a value, if `lookup.overlap` is ERROR.
    """
    columns = [one_array(rows.column(name)) for name in match.columns]
    group = as_int64(one_array(rows.column(KEY_INDEX)))

    def name_row(row: int) -> str:
        place = None if locate is None else locate([column[row] for column in columns])
        key = name_key(keys, int(group[row]))
        return key if place is None else f"{place}, {key}"

    matched = MatchedRanges(match, columns, values.type, name_row, None if places is None else group)
    if count is not None:
        count(matched)
    if places is not None:
        # An index, because each value beside each row of its key would be too many.
        matcher = RangeMatcher(match, matched, keys.num_rows)
        numbers, found = matcher.find(values, places, lambda key: name_key(keys, key))
        return renumber(rows.take(as_indices(found)), numbers)
    positions, valid = matched.values.positions(values)
    places = np.flatnonzero(matched.ranges.hold(positions[group]) & valid[group])
    groups = group[places]
    counts = np.bincount(groups, minlength=1)
    if match.overlap is Overlap.ALL or counts.max() <= 1:
        return rows.take(as_indices(places))
    if match.overlap is Overlap.ERROR:
        key = int(np.argmax(counts > 1))
        raise matched.overlap(values[key], name_key(keys, key), places[groups == key])
    order = matched.ranges.best_first(matched.pick, places)
    order = order[np.argsort(groups[order], kind="stable")]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = groups[order[1:]] != groups[order[:-1]]
    return rows.take(as_indices(places[order[is_first]]))


def name_key(keys: pa.Table, row: int) -> str:
    """The key of a row, as text for messages."""
    return ", ".join(f"{name} = {show(keys.column(name)[row])}" for name in keys.column_names)


def show(value: pa.Scalar) -> str:
    """A value as text for messages. A time that Python cannot express becomes a number, text that is not UTF-8 becomes bytes."""
    try:
        return repr(value.as_py())
    except (OverflowError, ValueError):
        return repr(value.as_buffer().to_pybytes() if isinstance(value, pa.StringScalar) else value.value)
