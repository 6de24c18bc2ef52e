"""Unsigned numbers in ORC's runs, for which pyarrow has no type ("Run Length Encoding" in ORC's specification)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pyspark_lookup.errors import raise_ours

Numbers = npt.NDArray[np.int64]

_WIDTHS = [*range(1, 25), 26, 28, 30, 32, 40, 48, 56, 64]
"""The number of bits of a value, by its code of five bits."""


def unsigned_numbers(data: bytes | memoryview, count: int, version: int) -> Numbers:
    """The first `count` numbers of a stream, of the first or second version of the encoding. Raises ValueError if it ends before."""
    numbers = np.zeros(count, np.int64)
    at = place = 0
    decode = _run_of_version_1 if version == 1 else _run_of_version_2
    try:
        while place < count:
            run, at = decode(data, at)
            run = run[: count - place]
            numbers[place : place + len(run)] = run
            place += len(run)
    except (IndexError, OverflowError) as problem:
        raise_ours(ValueError(f"a stream of numbers ends after {place} of {count}"), problem)
    return numbers


def _varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return _to_signed(value), at
        if shift >= 70:
            raise ValueError("a number that does not end")


def _to_signed(value: int) -> int:
    """A 64-bit number as a signed one: Arrow's writer stores negative fractions before 1970."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _run_of_version_1(data: bytes | memoryview, at: int) -> tuple[Numbers, int]:
    """(the numbers of a run, the position after it): "a control byte of 0 to 127: length - 3, a delta of one byte, the first value"; after a
    higher control byte come 256 - control values."""
    control = data[at]
    if control < 128:
        delta = data[at + 1]
        first, end = _varint(data, at + 2)
        return first + np.arange(control + 3, dtype=np.int64) * (delta - 256 if delta > 127 else delta), end
    values = []
    at += 1
    for _ in range(256 - control):
        value, at = _varint(data, at)
        values.append(value)
    return np.array(values, np.int64), at


def _run_of_version_2(data: bytes | memoryview, at: int) -> tuple[Numbers, int]:
    first = data[at]
    kind, code = first >> 6, (first >> 1) & 31
    if kind == 0:  # short repeat: "3 bits: bytes of the value - 1, 3 bits: count - 3"
        size = ((first >> 3) & 7) + 1
        return np.full((first & 7) + 3, _to_signed(_read_big_endian(data, at + 1, size)), np.int64), at + 1 + size
    length = ((first & 1) << 8 | data[at + 1]) + 1
    at += 2
    if kind == 1:
        return _unpack(data, at, length, _WIDTHS[code])
    if kind == 2:
        return _unpack_patched(data, at, length, _WIDTHS[code])
    base, at = _varint(data, at)
    zigzag, at = _varint(data, at)
    delta = (zigzag >> 1) ^ -(zigzag & 1)
    if code == 0:  # all deltas are equal
        return base + np.arange(length, dtype=np.int64) * delta, at
    steps, at = _unpack(data, at, max(length - 2, 0), _WIDTHS[code])
    signed = -steps if delta < 0 else steps
    return np.cumsum(np.concatenate([np.array([base, delta], np.int64), signed]))[:length], at


def _unpack_patched(data: bytes | memoryview, at: int, length: int, width: int) -> tuple[Numbers, int]:
    """Values above a base, some of which have more bits: "a list of gaps from the one before, and patches"."""
    size, patch_width = (data[at] >> 5) + 1, _WIDTHS[data[at] & 31]
    gap_width, patches = (data[at + 1] >> 5) + 1, data[at + 1] & 31
    base = _read_big_endian(data, at + 2, size)
    sign = 1 << (size * 8 - 1)
    base = -(base & (sign - 1)) if base & sign else base
    values, at = _unpack(data, at + 2 + size, length, width)
    entry_width = next((bits for bits in _WIDTHS if bits >= gap_width + patch_width), 64)
    entries, at = _unpack(data, at, patches, entry_width)
    place = 0
    for entry in entries.tolist():
        place += (entry & ((1 << entry_width) - 1)) >> patch_width
        values[place] |= _to_signed((entry & ((1 << patch_width) - 1)) << width)
    return base + values, at


def _read_big_endian(data: bytes | memoryview, at: int, size: int) -> int:
    if at + size > len(data):
        raise IndexError(at)
    return int.from_bytes(data[at : at + size], "big")


def _unpack(data: bytes | memoryview, at: int, count: int, width: int) -> tuple[Numbers, int]:
    """Numbers of `width` bits each, the highest bit first, and the position of the next byte."""
    end = at + (count * width + 7) // 8
    if end > len(data):
        raise IndexError(at)
    bits = np.unpackbits(np.frombuffer(data[at:end], np.uint8), count=count * width).reshape(count, width)
    whole = np.zeros((count, 64), np.uint8)
    whole[:, 64 - width :] = bits
    return np.packbits(whole, axis=1).view(">u8").reshape(count).astype(np.int64), end
