"""Claims and flights: of several that lack a key one loads it, and nobody waits for who is dead or does not answer."""

import errno
import fcntl
import gc
import os
import random
from unittest import mock

import numpy as np
import pytest

from pyspark_lookup.cache.partial import read_through
from pyspark_lookup.cache.partial.read_through import Flights
from pyspark_lookup.columnar.keys import Numbers, Seed
from pyspark_lookup.storage.context import HostContext
from tests.support.disks import Opened, files_at_most, handles_below
from tests.support.fakes import FakeClock

SEED = Seed(0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
SPACE = "0" * 32
V1, V2 = "1" * 32, "2" * 32  # of a version's digest nothing is the beginning of another
WAIT_S = 60.0


def held(opened: Opened, group: str = V1) -> list[bytes]:
    """The payloads of a group's claims, as another process sees them."""
    other = Opened(opened.root.parent)
    return sorted(payload for _, payload in other.disk.claims(SPACE, group))


def files_of(opened: Opened) -> list[str]:
    return sorted(path.name for path in (opened.root / "claims").glob("*/*"))


def test_a_claim_is_seen_while_it_is_held(opened: Opened) -> None:
    """What was claimed is told to others by group and space, until it is released; then, and after a full disk, nothing is left."""
    claim = opened.disk.create_claim(SPACE, V1, b"payload")
    other = opened.disk.create_claim(SPACE, V1, b"")
    for path in (opened.root / "claims").glob("*/*"):
        os.utime(path, (1, 1))
    opened.disk.sweep()
    assert held(opened) == [b"", b"payload"]
    assert held(opened, V2) == []
    assert opened.disk.claims("f" * 32, V1) == []
    claim.release()
    assert held(opened) == [b""]
    other.release()
    assert held(opened) == []
    with files_at_most(10), pytest.raises(OSError, match="File too large"):
        opened.disk.create_claim(SPACE, V1, bytes(100))
    assert files_of(opened) == os.listdir(opened.root / "tmp") == []
    assert handles_below(opened.root) == []


def test_a_lock_that_cannot_be_asked_for(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system fails to say who holds a claim, that is an error at once: nobody waits for a claim that may be dead."""
    claim = opened.disk.create_claim(SPACE, V1, b"held")
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
        with pytest.raises(OSError, match="no locks"):
            opened.disk.claims(SPACE, V1)
        assert opened.disk.wait_for_claim(SPACE, claim.path.name, WAIT_S, FakeClock().host())
    claim.release()


def numbers(*hashes: int) -> Numbers:
    return np.array(hashes, np.uint64)


def flights_of(opened: Opened) -> Flights:
    context = HostContext(opened.disk, opened.metrics, FakeClock().host(), random.Random())
    return Flights(context, SPACE, SEED, WAIT_S)


def test_nothing_is_claimed_by_who_loads_nothing(opened: Opened) -> None:
    """A call that leaves all its keys to others stands in nobody's way; after any number of flights nothing is open or locked."""
    flights = [flights_of(opened) for _ in range(4)]
    with flights[0].claim(numbers(1, 2), V1), flights[1].claim(numbers(1, 2), V1) as other:
        assert not other.to_load.any()
        with flights[2].claim(numbers(3), V1) as more:
            assert more.to_load.all()
            more.wait()
        with flights[0].claim(numbers(), V1) as none:
            assert len(none.to_load) == 0
    for number in range(20):
        with flights[number % 4].claim(numbers(number, 100), V1), flights[(number + 1) % 4].claim(numbers(100), V1):
            pass
    gc.collect()
    assert handles_below(opened.root) == []
    for path in (opened.root / "locks").iterdir():
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_that_is_not_had_costs_single_flight_only(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another holds the lock for too long, one loads without saying so."""
    monkeypatch.setattr(read_through, "_LOCK_WAIT_S", 0.0)
    lock = Opened(opened.root.parent).disk.acquire("claim", SPACE, 0)
    with flights_of(opened).claim(numbers(1), V1) as one, flights_of(opened).claim(numbers(1), V1) as other:
        assert one.to_load.all()
        assert other.to_load.all()
    lock.release()
    assert files_of(opened) == []
