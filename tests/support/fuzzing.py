"""Generated cases: how many, and of which seeds; and damage for `test_fuzz`: bytes and values of our own with something changed."""

import contextlib
import copy
import os
import resource
import struct
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

MORE = int(os.environ.get("LOOKUPCACHE_FUZZ", "1"))
"""So many times as many examples: 1 by day, 10 of `scripts/test --all`. Where it is set, each run draws other ones."""
BY_NIGHT = not {"LOOKUPCACHE_FUZZ", "LOOKUPCACHE_SEED"}.isdisjoint(os.environ)
"""Whether the cases differ from those by day, or one of these is replayed: they may take longer."""
ALLOWED = 2 * 2**30  # bytes beyond what a process has: a length that was believed would ask for more


def fuzzed(examples: int) -> settings:
    """Settings for so many examples by night, times `MORE`; for a quarter of them by day."""
    return settings(
        max_examples=examples * MORE if BY_NIGHT else (examples + 3) // 4,
        deadline=None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )


def seeds(count: int) -> list[int]:
    """As many seeds, the same in each run by day; `MORE` times as many others by night; or the one of `LOOKUPCACHE_SEED`."""
    if text := os.environ.get("LOOKUPCACHE_SEED"):
        return [int(text)]
    # The processes of a run have to agree on its tests.
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(time.time_ns())
    first = zlib.crc32(run.encode()) if "LOOKUPCACHE_FUZZ" in os.environ else 0
    return list(range(first, first + count * MORE))


def make_home() -> Path:
    """A new directory, which is removed when this process of the tests ends."""
    return Path(tempfile.mkdtemp(dir=os.environ["LOOKUPCACHE_TESTS_HOME"]))


def by_day(cases: Iterable[Any], every: int) -> list[Any]:
    """Cases of a test, of which each `every`-th is tried by day and the others by night."""
    nightly = pytest.mark.nightly
    return [
        case if number % every == 0 else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=nightly)
        for number, case in enumerate(cases)
    ]


def share(cases: Sequence[Any], number: int, shares: int) -> Sequence[Any]:
    """By day one of so many shares of the cases, for a test that goes through them once for each share; by night all."""
    return cases if BY_NIGHT else cases[number::shares]


@contextlib.contextmanager
def memory_at_most(size: int = ALLOWED) -> Iterator[None]:
    """This process may map so many bytes more than it has: what asks for more gets a MemoryError."""
    address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space + size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


_SIZES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


@st.composite
def damaged(draw: st.DrawFn, blob: bytes, blobs: Sequence[bytes] = ()) -> bytes:
    """`blob` as a disk, a crash or a bad copy may leave it; another blob at any rate. `blobs`: what parts may come from."""
    changed = bytearray(blob)
    for _ in range(draw(st.integers(1, 3))):
        at = _place(draw, len(changed))
        end = min(at + draw(st.sampled_from([1, 4, 8, 64, 4096])), len(changed))
        ways = ["flip", "flip", "cut", "behead", "extend", "repeat", "splice", "number", "zero", "swap"]
        match draw(st.sampled_from(ways)):
            case "flip" if changed:
                changed[min(at, len(changed) - 1)] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del changed[at:]
            case "behead":
                del changed[:at]
            case "extend":
                changed += draw(st.binary(max_size=20)) * draw(st.sampled_from([1, 1, 100]))
            case "repeat":
                changed[at:at] = changed[at:end]
            case "splice" if blobs:
                second_blob = draw(st.sampled_from(list(blobs)))
                start = _place(draw, len(second_blob))
                changed[at:end] = second_blob[start : start + draw(st.sampled_from([1, 8, 64, len(second_blob)]))]
            case "number":
                form = draw(st.sampled_from(["<I", "<Q", ">I", ">Q"]))
                size = struct.calcsize(form)
                changed[at : at + size] = struct.pack(form, draw(st.sampled_from(_SIZES)) % 2 ** (8 * size))
            case "zero":
                changed[at:end] = bytes(end - at)
            case "swap":
                changed[at:end] = changed[at:end][::-1]
    if bytes(changed) == blob:
        changed[:] = blob[:-1] if blob else b"x"
    return bytes(changed)


def _place(draw: st.DrawFn, size: int) -> int:
    """Anywhere, and more often where headers and footers are."""
    margin = min(size, 100)
    return draw(st.one_of(st.integers(0, margin), st.integers(max(size - margin, 0), size), st.integers(0, size)))


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


_EXTREMES = [
    None, True, False, 0, -1, 1, 2, 1.5, 2**31, 2**53, 2**60, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 1e308, -0.0,
    float("nan"), float("inf"), -float("inf"), "", "x", "0", "-1", "9" * 400, "../../../precious", "/etc/passwd", "a\0b",
    "\ud800", "x" * 5000, [], {}, [[]], [None], {"": None}, {"x": 1}, nested(100),
]  # fmt: skip


@st.composite
def altered(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value in which something, somewhere, is something else: gone, twice, of another type, huge, negative, deep."""
    holder = [copy.deepcopy(value)]
    for _ in range(draw(st.integers(1, 2))):
        within: Any = holder
        key: Any = 0
        # Down to a leaf, mostly.
        while isinstance(within[key], (dict, list)) and within[key] and draw(st.integers(0, 9)):
            within = within[key]
            key = draw(st.sampled_from(list(within) if isinstance(within, dict) else range(len(within))))
        old = within[key]
        match draw(st.sampled_from(["replace", "replace", "remove", "repeat", "near", "wrap", "text", "exchange"])):
            case "remove" if within is not holder:
                del within[key]
            case "repeat" if isinstance(within, list) and within is not holder:
                within.insert(key, copy.deepcopy(old))
            case "near" if isinstance(old, int):
                within[key] = old + draw(st.integers(-3, 3))
            case "near" if isinstance(old, str) and old:
                at = draw(st.integers(0, len(old) - 1))
                within[key] = old[:at] + draw(st.sampled_from(["", "/", "0", "a", ":", "\0"])) + old[at + 1 :]
            case "wrap":
                within[key] = [old]
            case "text":
                within[key] = str(old)[:5000]
            case "exchange" if isinstance(within, list):
                second_place = draw(st.integers(0, len(within) - 1))
                within[key], within[second_place] = within[second_place], old
            case _:
                within[key] = copy.deepcopy(draw(st.sampled_from(_EXTREMES)))
    return holder[0]


@st.composite
def misspelled(draw: st.DrawFn, text: str, pieces: Sequence[str]) -> str:
    """A text with some of its characters gone, twice or others, or with one of the `pieces` in it."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        end = min(at + draw(st.sampled_from([0, 1, 1, 5, 1000])), len(text))
        into = draw(st.one_of(st.sampled_from([*pieces, ""]), st.just(text[at:end] * 2), st.text(max_size=3)))
        text = text[:at] + into + text[end:]
    return text
