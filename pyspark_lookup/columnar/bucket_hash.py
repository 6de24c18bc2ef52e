"""The hash by which Iceberg's transform `bucket` divides values (32-bit Murmur3, x86, seed 0), of many at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from pyspark_lookup.columnar.keys import Numbers

_C1, _C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)


def bucket_numbers(values: pa.Array, count: int) -> Numbers | None:
    """The bucket of each value (none may be null) among `count` buckets; None for a type without bucket hashes."""
    hashes = bucket_hashes(values)
    if hashes is None:
        return None
    numbers: Numbers = (hashes & np.uint32(0x7FFFFFFF)).astype(np.int64) % count
    return numbers


def bucket_hashes(values: pa.Array) -> Numbers | None:
    """The hash (uint32) of each value; None for a type that has none."""
    kind = values.type
    if pa.types.is_integer(kind):
        return _hash_longs(values.cast(pa.int64()).to_numpy(zero_copy_only=False))
    if pa.types.is_date32(kind):
        return _hash_longs(values.cast(pa.int32()).cast(pa.int64()).to_numpy(zero_copy_only=False))
    if pa.types.is_timestamp(kind):
        return _hash_longs(values.cast(pa.timestamp("us", kind.tz)).cast(pa.int64()).to_numpy(zero_copy_only=False))
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _hash_bytes(values.cast(pa.binary()).to_pylist())
    return None


def _hash_longs(numbers: Numbers) -> Numbers:
    """The hashes of 64-bit integers, hashed as 8 bytes, the lowest first."""
    words = np.ascontiguousarray(numbers, "<i8").view("<u4").reshape(-1, 2)
    return _hash_words(words, np.full(len(words), 8, np.uint32), np.zeros(len(words), np.uint32))


def _hash_bytes(texts: list[bytes]) -> Numbers:
    """The hashes of byte strings of any lengths, computed together for those with the same number of words."""
    lengths = np.fromiter(map(len, texts), np.uint32, len(texts))
    hashes = np.zeros(len(texts), np.uint32)
    for words in np.unique(lengths >> 2).tolist():
        places = np.flatnonzero(lengths >> 2 == words)
        padded = b"".join(texts[place].ljust(4 * words + 4, b"\0") for place in places.tolist())
        padded_words = np.frombuffer(padded, "<u4").reshape(len(places), words + 1)
        hashes[places] = _hash_words(padded_words[:, :words], lengths[places], padded_words[:, words])
    return hashes


def _hash_words(words: Numbers, lengths: Numbers, tail: Numbers) -> Numbers:
    """The hashes of rows of whole words, with up to three bytes after them in `tail`."""
    hashes = np.zeros(len(words), np.uint32)
    for column in range(words.shape[1]):
        hashes ^= _mix_word(words[:, column])
        hashes = _rotate_left(hashes, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    hashes ^= _mix_word(tail)  # zero without one
    hashes ^= lengths.astype(np.uint32)
    hashes ^= hashes >> np.uint32(16)
    hashes *= np.uint32(0x85EBCA6B)
    hashes ^= hashes >> np.uint32(13)
    hashes *= np.uint32(0xC2B2AE35)
    return np.asarray(hashes ^ (hashes >> np.uint32(16)))


def _mix_word(word: Numbers) -> Numbers:
    mixed: Numbers = _rotate_left(word.astype(np.uint32) * _C1, 15) * _C2
    return mixed


def _rotate_left(numbers: Numbers, bits: int) -> Numbers:
    return np.asarray((numbers << np.uint32(bits)) | (numbers >> np.uint32(32 - bits)))


def bucket_number(value: Any, kind: pa.DataType, count: int) -> int | None:
    """The bucket of one value among `count` buckets; None if it has none."""
    try:
        numbers = bucket_numbers(pa.array([value], kind), count)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return None
    return None if numbers is None else int(numbers[0])
