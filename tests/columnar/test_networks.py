"""Addresses and networks beside Python's `ipaddress`."""

from __future__ import annotations

import ipaddress

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pyspark_lookup.columnar.networks import Addresses, parse_addresses, parse_networks
from tests.support.fuzzing import fuzzed

_MAPPED = 0xFFFF << 32
_ipv4, _ipv6 = (st.integers(0, 2**bits - 1) for bits in (32, 128))
_TEXTS = st.one_of(
    st.ip_addresses().map(str),
    _ipv6.map(lambda number: ipaddress.IPv6Address(number & (0xFFFF << 112 | 0xFFFF)).compressed),
    _ipv6.map(lambda number: ipaddress.IPv6Address(number).exploded.upper()),
    _ipv4.map(lambda number: f"::ffff:{ipaddress.IPv4Address(number)}"),
    st.lists(st.sampled_from(["", "0", "1", "ffff", "12345", "g", "1.2.3.4"]), max_size=10).map(":".join),
    st.lists(st.sampled_from(["", "0", "1", "255", "256", "01"]), max_size=6).map(".".join),
    st.text("0123456789abcdefF:./%é ", max_size=20),
)


def by_python(text: str) -> int | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return None if "%" in text else int(address) | (_MAPPED if address.version == 4 else 0)


def numbers(addresses: Addresses) -> list[int | None]:
    pairs = zip(addresses.upper.tolist(), addresses.lower.tolist(), addresses.valid.tolist(), strict=True)
    return [upper << 64 | lower if valid else None for upper, lower, valid in pairs]


@given(st.lists(st.none() | _TEXTS, max_size=8))
@example(
    [
        "1.2.3.04",
        "1.2.3.0",
        "1.2.3.4.5",
        "::ffff:115.2.46.119.171",
        "::",
        ":::",
        "1::2::3",
        "1:2:3:4:5:6:7:8",
        "1:2:3:4:5:6:7::",
    ]
)
def test_addresses_of_text(texts: list[str | None]) -> None:
    column = pa.array(["x", *texts], pa.string())[1:]
    expected = [None if text is None else by_python(text) for text in texts]
    addresses = parse_addresses(column)
    assert numbers(addresses) == expected
    as_bytes = [None if number is None else number.to_bytes(16, "big") for number in expected]
    assert addresses.to_array().to_pylist() == as_bytes
    assert numbers(parse_addresses(pa.array([b"x", *as_bytes], pa.binary())[1:])) == expected


def test_addresses_of_numbers_and_bytes() -> None:
    assert numbers(parse_addresses(pa.array([0, 2**32 - 1, 2**32, -1, None]))) == [
        _MAPPED,
        _MAPPED | 2**32 - 1,
        *[None] * 3,
    ]
    assert numbers(parse_addresses(pa.array([b"\1\2\3\4", b"\1\2\3", b"", None]))) == [
        _MAPPED | 0x01020304,
        *[None] * 3,
    ]


_SUFFIXES = ["", "/0", "/8", "/32", "/96", "/104", "/33", "/128", "/129", "/", "/x", "/0008", "/-1", "/ 8"]


@fuzzed(160)
@given(st.lists(st.none() | st.tuples(_TEXTS, st.sampled_from(_SUFFIXES)).map("".join), max_size=8))
@example(["::ffff:0:0/96", "::ffff:10.0.0.0/104", "::ffff:10.0.0.0/8"])
def test_networks_of_text(texts: list[str | None]) -> None:
    networks = parse_networks(pa.array(["x", *texts], pa.string())[1:])
    firsts, lasts = numbers(networks.first), numbers(networks.last)
    for number, text in enumerate(texts):
        address, slash, bits = (text or "x").partition("/")
        start = by_python(address)
        is_number = bits.isascii() and bits.isdigit() and len(bits) <= 3
        length = int(bits) if is_number else -1 if slash else None
        most = 128 if ":" in address else 32
        expected = start is not None and (length is None or 0 <= length <= most)
        assert bool(networks.valid[number]) == expected
        if start is not None and expected:
            span = 1 << (most - (most if length is None else length))
            assert (firsts[number], lasts[number]) == (start - start % span, start - start % span + span - 1)
            assert bool(networks.has_host_bits[number]) == (start % span > 0)


_NUMBER = _MAPPED | 0x0A010200


@pytest.mark.parametrize(
    ("address", "length"),
    [("10.1.2.0", 32), (b"\x0a\1\2\0", 32), (0x0A010200, 32), ("::ffff:10.1.2.0", 128), (_NUMBER.to_bytes(16, "big"), 128)],
    ids=["IPv4 text", "4 bytes", "number", "IPv6 text", "16 bytes"],
)  # fmt: skip
def test_networks_of_addresses_with_lengths(address: object, length: int) -> None:
    """The length counts the bits of the address as it is written."""
    networks = parse_networks(pa.array([address] * 3), pa.array([length - 8, length + 1, None], pa.int32()))
    assert networks.valid.tolist() == [True, False, False]
    assert not networks.has_host_bits[0]
    assert (numbers(networks.first)[0], numbers(networks.last)[0]) == (_NUMBER, _NUMBER | 0xFF)
