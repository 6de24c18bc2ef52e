"""Whatever the store answers, a write is acknowledged and there, failed and not there, or unknown. `scripts/faults` tries all cases."""

import contextlib
import functools
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import PysparkLookupError, UfsUnavailableError, VersionGoneError
from tests.faults.cases import BUCKET, Bench, Case, check_ended, home
from tests.faults.writes import KINDS, SMALL, Kind, counted, rows
from tests.history.checker import Rows
from tests.support.fuzzing import BY_NIGHT, MORE, by_day, seeds
from tests.support.proxy import Fault, Mode, Sent, list_faults
from tests.support.s3server import S3Server

TRIED = 2 if BY_NIGHT else 1  # cases of each kind, times `MORE`
(APPEND,) = (kind for kind in KINDS if kind.name == "append")


@pytest.fixture(scope="module")
def bench(s3_server: S3Server) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch, home() as hosts:
        yield Bench(s3_server, hosts, patch)
    s3_server.between = None


def choose_faults(kind: Kind, requests: Sequence[Sent], seed: int) -> Sequence[Fault]:
    """Some faults of a write of these requests. With `LOOKUPCACHE_FAULTS` a share of all, as `1/2`, or one: number, mode, answer."""
    which, matrix = os.environ.get("LOOKUPCACHE_FAULTS", ""), list_faults(requests)
    if "," in which:
        number, mode, answer = which.split(",")
        return [Fault(int(number), answer, Mode[mode])]
    if which:
        share, shares = map(int, which.split("/"))
        return matrix[share - 1 :: shares]
    return random.Random(f"{seed} {kind.name}").sample(matrix, min(TRIED * MORE, len(matrix)))


@pytest.mark.parametrize("kind", by_day(KINDS, 2), ids=lambda kind: kind.name.replace(" ", "-"))
def test_every_write_ends_in_one_of_three_ways(bench: Bench, kind: Kind) -> None:
    """Of every kind of write some of all cases are tried: how it ended is what the log says, and what every host reads."""
    whole = Case(bench, kind, None).run()
    assert whole.how == "acknowledged"
    seed, wrong = seeds(1)[0], list[str]()
    for fault in choose_faults(kind, whole.requests, seed):
        try:
            check_ended(fault, Case(bench, kind, fault, seed).run(), len(whole.requests))
        except Exception as problem:
            repeat = f"LOOKUPCACHE_SEED={seed} LOOKUPCACHE_FAULTS={fault.number},{fault.mode.name},{fault.answer}"
            wrong.append(f"{repeat} scripts/test tests/faults -k 'every_write and {kind.name}': {problem!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("answer", ["400", "403", "404"])
def test_an_answer_is_lost_once(bench: Bench, answer: str) -> None:
    """A request whose answer is lost is not sent again by the HTTP client: a refusal that follows is no proof of anything."""
    commit = find_event(bench, "16.json")
    assert Case(bench, APPEND, Fault(commit, answer, Mode.RETRIED)).run().how == "acknowledged"
    assert Case(bench, APPEND, Fault(commit, answer, Mode.LASTING)).run().how == "unknown"


@functools.cache
def find_event(bench: Bench, ends: str) -> int:
    """The number of the first request by which an append puts an event whose name ends so."""
    requests = Case(bench, APPEND, None).run().requests
    events = [n for n, request in enumerate(requests, 1) if request.kind == "put" and "/log/" in request.key]
    return next(n for n in events if requests[n - 1].key.endswith(ends))


@pytest.mark.parametrize("answer", ["412", "409", "lost", "page"])
def test_a_store_that_never_takes_an_event(bench: Bench, answer: str) -> None:
    """A store that says for ever that an event is there which it does not show, or nothing: few requests, pauses, an error."""
    commit = find_event(bench, ".json")
    end = Case(bench, APPEND, Fault(commit, answer, Mode.OUTAGE)).run()
    assert end.how == "failed"
    assert len(end.requests) - commit < 20
    bench.slept.clear()
    with reading(bench, "put", answer) as requests, pytest.raises(UfsUnavailableError):
        LookupTable(None, bench.options("reader")).write(rows([20], "new"))
    assert len(requests) < 200
    assert len(bench.slept) >= 2
    assert sum(bench.slept) < 120
    assert scanned(bench) == SMALL


@contextlib.contextmanager
def reading(bench: Bench, kind: str, answer: str, times: int | None = None, first: int = 0) -> Iterator[list[Sent]]:
    """A new host whose requests of a kind get this answer; yields the requests so far."""
    bench.fill(bench.prepared(APPEND))
    bench.clear()
    with bench.host("reader", 2), bench.answering(kind, answer, times, first) as requests:
        yield requests


def scanned(bench: Bench) -> Rows:
    """The rows that the reader's host scans in its next process."""
    with bench.host("reader", 3):
        return counted(LookupTable(None, bench.options("reader")).scan())


DAMAGES = [("get", answer) for answer in ("damaged", "damaged bare", "cut", "short", "empty", "page")]
DAMAGES += [("list", answer) for answer in ("empty", "page", "blank", "cut", "short", "404")]


@pytest.mark.parametrize(("kind", "answer"), DAMAGES)
def test_bytes_that_are_damaged_on_their_way(bench: Bench, kind: str, answer: str) -> None:
    """A damaged GET or listing is asked for again, and nothing of it is kept; the table is never said to be missing."""
    options = bench.options("reader")
    with reading(bench, kind, "lost", times=0) as requests:
        LookupTable(None, options).scan()
    count = sum(request.kind == kind for request in requests)
    first, every = (0, 1 if answer == "damaged" else 5) if BY_NIGHT else (DAMAGES.index((kind, answer)) % count, 12)
    for number in range(first, count, every):
        with reading(bench, kind, answer, times=1, first=number):
            assert counted(LookupTable(None, options).scan()) == SMALL
        assert scanned(bench) == SMALL
    with reading(bench, kind, answer) as requests:
        with pytest.raises(PysparkLookupError if kind == "get" else UfsUnavailableError):
            LookupTable(None, options).scan()
        if kind == "list":
            assert 3 <= len(requests) < 20
            with pytest.raises(UfsUnavailableError):
                LookupTable(None, {**options, "lookup.keys": "id"}).write(rows([1], "new"))
    assert scanned(bench) == SMALL


def test_a_store_that_ignores_if_match(bench: Bench, tmp_path: Path) -> None:
    """A file that is replaced while it is read, in a store that does not know If-Match: never rows of both, in any order."""
    versions = []
    for version in range(2):
        path = tmp_path / f"{version}.parquet"
        values = pa.array([(n * 2654435761 + version * 7919) % 2**31 for n in range(50_000)])
        pq.write_table(pa.table({"version": pa.repeat(version, len(values)), "n": values}), path)
        versions.append({"plain/x.parquet": path.read_bytes()})
    options = {**bench.options("reader"), "path": f"s3://{BUCKET}/plain"}
    for number in range(2):  # the footer, and then the rows
        bench.fill(versions[0])
        bench.clear()
        version_gone = contextlib.suppress(VersionGoneError)
        with bench.host("reader", 2), bench.without_if_match(number, versions[1]), version_gone:
            assert set(LookupTable(None, options).scan().column("version").to_pylist()) == {1}
        with bench.host("reader", 3):
            assert set(LookupTable(None, options).scan().column("version").to_pylist()) == {1}
