"""Internet addresses and networks as numbers of 128 bits, read from columns of text, binary and integers without a Python loop over rows.

An IPv4 address becomes the IPv6 address that stands for it (`::ffff:192.0.2.1`, RFC 4291), so that a column may have both.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Numbers, as_bools, offsets_and_data
from pyspark_lookup.columnar.ranges import join_words
from pyspark_lookup.columnar.types import is_text

_IPV4 = np.uint64(0xFFFF_0000_0000)  # the lower half of the IPv6 address that stands for 0.0.0.0
_IPV4_LENGTH, _LENGTH = 32, 128  # bits of an address
_LONGEST = 45  # characters of an address: six groups of four digits, and an IPv4 address
_GROUPS = 8
_NOT_HEX = 255
_DIGITS = np.full(256, _NOT_HEX, np.uint8)
for _first, _last, _value in (("0", "9", 0), ("a", "f", 10), ("A", "F", 10)):
    _DIGITS[ord(_first) : ord(_last) + 1] = np.arange(ord(_last) - ord(_first) + 1) + _value


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Addresses, each as the two halves (uint64) of a number of 128 bits. `valid`: whether a row has an address; if not, its halves are undefined."""

    upper: Numbers
    lower: Numbers
    valid: Numbers

    @property
    def is_ipv4(self) -> Numbers:
        return np.asarray((self.upper == 0) & (self.lower >> np.uint64(32) == 0xFFFF))

    def to_array(self) -> pa.Array:
        """The addresses as binary of 16 bytes; null where there is none."""
        return pc.if_else(pa.array(self.valid), join_words([self.upper, self.lower]), None)


def parse_addresses(column: pa.Array) -> Addresses:
    """The addresses in a column of text, of binary values of 4 or 16 bytes, or of integers (IPv4). A value that is not an address is not valid."""
    kind = column.type
    if pa.types.is_integer(kind):
        values, valid = parse_integers(column)
        return Addresses(np.zeros(len(values), np.uint64), values.astype(np.uint64) | _IPV4, valid)
    has_value = as_bools(column.is_valid())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        characters = _Characters(column)
        addresses = _parse(characters, characters.lengths)
    else:
        addresses = _from_bytes(column.cast(pa.binary()))
    return dataclasses.replace(addresses, valid=addresses.valid & has_value)


def parse_integers(column: pa.Array) -> tuple[Numbers, Numbers]:
    """(a column of integers as int64, whether each is an IPv4 address)."""
    values = np.asarray(column.cast(pa.int64(), safe=False).fill_null(-1))
    return values, (values >= 0) & (values < 2**32)


@dataclasses.dataclass(frozen=True)
class Networks:
    """Networks as their first and last address. `valid`: whether a row has a network; `has_host_bits`: whether its address is not the first one,
    as in `10.1.2.3/8`."""

    first: Addresses
    last: Addresses
    valid: Numbers
    has_host_bits: Numbers


def parse_networks(column: pa.Array, lengths: pa.Array | None = None) -> Networks:
    """The networks in a column of text (`10.0.0.0/8`, `2001:db8::/32`, or a single address).

    With `lengths`, the column has addresses, and `lengths` has the number of leading bits that all addresses of the network share. The length
    counts the bits of the address as it is written: `::ffff:10.0.0.0/104` is the network `10.0.0.0/8`.
    """
    most = np.where(_is_written_as_ipv4(column), _IPV4_LENGTH, _LENGTH)
    if lengths is not None:
        addresses = parse_addresses(column)
        bits = np.asarray(lengths.cast(pa.int64(), safe=False).fill_null(-1))
    else:
        characters = _Characters(column if is_text(column.type) else column.cast(pa.string()))
        slash = characters.find_last(ord("/"))
        addresses = _parse(characters, np.where(slash >= 0, slash, characters.lengths))
        bits = characters.parse_number(slash + 1)
        bits = np.where(slash >= 0, bits, most)
        valid = addresses.valid & as_bools(column.is_valid())
        addresses = dataclasses.replace(addresses, valid=valid)
    return _to_networks(addresses, bits, most)


def _is_written_as_ipv4(column: pa.Array) -> Numbers:
    """Which addresses of a column, with or without a length after them, are written in the form of IPv4: with 32 bits."""
    if pa.types.is_integer(column.type):
        return np.ones(len(column), np.bool_)
    if is_text(column.type):
        return ~as_bools(pc.match_substring(column, ":").fill_null(False))
    return as_bools(pc.equal(pc.binary_length(column), _IPV4_LENGTH // 8).fill_null(False))


def _to_networks(addresses: Addresses, bits: Numbers, most: Numbers) -> Networks:
    """The network of each address whose prefix is the first `bits` of the address's `most` bits."""
    valid = addresses.valid & (bits >= 0) & (bits <= most)
    upper, lower = _host_bits(np.where(valid, most - bits, 0))
    has_host_bits = valid & (((addresses.upper & upper) | (addresses.lower & lower)) != 0)
    first = Addresses(addresses.upper & ~upper, addresses.lower & ~lower, valid)
    last = Addresses(addresses.upper | upper, addresses.lower | lower, valid)
    return Networks(first, last, valid, has_host_bits)


def _host_bits(count: Numbers) -> tuple[Numbers, Numbers]:
    """The halves of numbers whose lowest `count` bits (0 to 128) are set."""
    return _ones(np.clip(count - 64, 0, 64)), _ones(np.clip(count, 0, 64))


def _ones(count: Numbers) -> Numbers:
    shift = np.minimum(64 - count, 63).astype(np.uint64)
    return np.asarray(np.where(count > 0, np.uint64(2**64 - 1) >> shift, np.uint64(0)))


class _Characters:
    """A column of texts, of which one place is read at a time, in all texts at once."""

    def __init__(self, column: pa.Array) -> None:
        offsets, data = offsets_and_data(column)
        self._starts, self.lengths = offsets[:-1], np.diff(offsets)
        self._data = np.concatenate([data, np.zeros(1, np.uint8)])

    def __len__(self) -> int:
        return len(self.lengths)

    def at(self, place: int | Numbers, rows: Numbers | slice = slice(None)) -> Numbers:
        """The byte at a place of each text; 0 after the text's end."""
        inside = place < self.lengths[rows]
        return np.asarray(np.where(inside, self._data[np.where(inside, self._starts[rows] + place, 0)], 0))

    def find_last(self, byte: int, before: int = _LONGEST + 4) -> Numbers:
        """For each text, the last place of `byte` among its first `before` bytes; -1 if it is not among them."""
        places = np.full(len(self), -1)
        for place in range(min(int(self.lengths.max(initial=0)), before)):
            places[self.at(place) == byte] = place
        return places

    def parse_number(self, start: Numbers) -> Numbers:
        """The number in one to three decimal digits from `start` to the end of each text; -1 if there is none."""
        number, count = np.zeros(len(self), np.int64), self.lengths - start
        is_number = (count >= 1) & (count <= 3)
        for place in range(3):
            digit = _DIGITS[self.at(start + place)]
            is_digit = digit < 10
            is_number &= is_digit | (place >= count)
            number = np.where(is_digit & (place < count), number * 10 + digit, number)
        return np.asarray(np.where(is_number, number, -1))


def _parse(characters: _Characters, stops: Numbers) -> Addresses:
    """For each text, the address in its first characters. `stops`: for each text, how many characters."""
    count = len(characters)
    upper, lower, valid = np.zeros(count, np.uint64), np.zeros(count, np.uint64), np.zeros(count, np.bool_)
    colon = np.minimum(characters.find_last(ord(":"), _LONGEST), stops - 1)
    rows = np.flatnonzero((colon < 0) & (stops <= 15))
    lower[rows], valid[rows] = _parse_ipv4(characters, rows, np.zeros(len(rows), np.int64), stops[rows])
    lower |= _IPV4
    rows = np.flatnonzero((colon >= 0) & (stops <= _LONGEST))
    if len(rows):
        upper[rows], lower[rows], valid[rows] = _parse_ipv6(characters, rows, colon[rows], stops[rows])
    return Addresses(upper, lower, valid)


def _parse_ipv4(characters: _Characters, rows: Numbers, starts: Numbers, stops: Numbers) -> tuple[Numbers, Numbers]:
    """The IPv4 addresses in the texts of `rows`, from the characters `starts` up to `stops`: (their numbers, whether each text is an address)."""
    address, part = np.zeros(len(rows), np.uint64), np.zeros(len(rows), np.int64)
    parts, digits = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    lengths = stops - starts
    valid = (lengths > 0) & (lengths <= 15)
    for place in range(int(min(lengths.max(initial=0), 15)) + 1):
        byte = np.where(place < lengths, characters.at(starts + place, rows), ord("."))
        inside = place <= lengths
        digit = _DIGITS[byte]
        is_digit, is_end = inside & (digit < 10), inside & (byte == ord("."))
        valid &= ~inside | is_digit | is_end
        # Zeros in front are not valid, because some programs read such a number as octal.
        valid &= ~is_digit | (digits == 0) | (part > 0)
        part = np.where(is_digit, part * 10 + digit, part)
        digits += is_digit
        valid &= ~is_end | ((digits >= 1) & (digits <= 3) & (part <= 255))
        address = np.where(is_end, address << np.uint64(8) | part.astype(np.uint64), address)
        parts += is_end
        part, digits = np.where(is_end, 0, part), np.where(is_end, 0, digits)
    return address & np.uint64(2**32 - 1), valid & (parts == 4)


def _parse_ipv6(
    characters: _Characters, rows: Numbers, colons: Numbers, stops: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    """The IPv6 addresses in the first `stops` characters of the texts of `rows`: (upper halves, lower halves, whether each text is an address).

    `colons`: the place of the last colon in each text.
    """
    count = len(rows)
    is_mapped = np.zeros(count, np.bool_)
    for place in range(int(stops.max(initial=0))):
        is_mapped |= (place < stops) & (characters.at(place, rows) == ord("."))
    tail, is_ipv4 = _parse_ipv4(characters, rows, colons + 1, np.where(is_mapped, stops, colons + 1))
    valid = ~is_mapped | is_ipv4
    stops = np.where(is_mapped, colons + 1, stops)
    groups = np.zeros((count, _GROUPS + 3), np.uint64)
    every = np.arange(count)
    number, group, digits = np.zeros(count, np.int64), np.zeros(count, np.uint64), np.zeros(count, np.int64)
    gap, before = np.full(count, -1), np.zeros(count, np.uint8)
    for place in range(int(stops.max(initial=0))):
        inside = place < stops
        byte = characters.at(place, rows)
        digit = _DIGITS[byte]
        is_digit, is_colon = inside & (digit != _NOT_HEX), inside & (byte == ord(":"))
        valid &= ~inside | is_digit | is_colon
        group = np.where(is_digit, group << np.uint64(4) | digit, group)
        digits += is_digit
        valid &= digits <= 4
        is_double = is_colon & (before == ord(":"))
        valid &= ~is_double | (gap < 0)
        gap = np.where(is_double, number, gap)
        # A single colon ends a group. At the beginning of the text a colon must be the first of two.
        ends = is_colon & (digits > 0)
        valid &= ~is_colon | ends | is_double | (place == 0)
        valid &= ~(inside & (place == 1) & (before == ord(":"))) | is_double
        groups[every, np.minimum(number, _GROUPS)] = np.where(ends, group, groups[every, np.minimum(number, _GROUPS)])
        number += ends
        group, digits = np.where(is_colon, np.uint64(0), group), np.where(is_colon, 0, digits)
        before = np.where(inside, byte, before).astype(np.uint8)
    ends = digits > 0
    # A colon at the end of the groups must be the second of two, or be followed by an IPv4 address.
    valid &= ends | is_mapped | (gap == number)
    for has_group, value in ((ends, group), (is_mapped, tail >> np.uint64(16)), (is_mapped, tail & np.uint64(0xFFFF))):
        at = np.minimum(number, _GROUPS + 1)
        groups[every, at] = np.where(has_group, value, groups[every, at])
        number = number + has_group
    valid &= np.where(gap < 0, number == _GROUPS, number < _GROUPS)
    # The groups after the gap move to the end.
    missing = np.where(gap < 0, 0, _GROUPS - number)
    start = np.where(gap < 0, _GROUPS, gap)
    halves = [np.zeros(count, np.uint64), np.zeros(count, np.uint64)]
    for place in range(_GROUPS):
        source = np.where(place < start, place, place - missing)
        is_filled = (place < start) | (place >= start + missing)
        value = np.where(is_filled, groups[every, np.clip(source, 0, _GROUPS + 2)], np.uint64(0))
        halves[place // 4] = halves[place // 4] << np.uint64(16) | value
    return halves[0], halves[1], valid


def _from_bytes(column: pa.Array) -> Addresses:
    offsets, data = offsets_and_data(column)
    lengths = np.diff(offsets)
    padded = np.concatenate([data, np.zeros(16, np.uint8)])
    words = np.ndarray((len(padded) - 7,), ">u8", padded, 0, (1,))
    starts = np.minimum(offsets[:-1], len(padded) - 16)
    first, second = words[starts].astype(np.uint64), words[starts + 8].astype(np.uint64)
    is_ipv4 = lengths == 4
    upper = np.where(is_ipv4, np.uint64(0), first)
    lower = np.where(is_ipv4, first >> np.uint64(32) | _IPV4, second)
    return Addresses(upper, lower, is_ipv4 | (lengths == 16))
