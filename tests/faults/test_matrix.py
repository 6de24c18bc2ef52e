"""Whatever the store answers, a write is acknowledged and there, failed and not there, or unknown; and no file is ever missed.

By day some cases of the matrix are tried, by night (`fuzzing.MORE`) more of them; `scripts/faults` tries all.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import PysparkLookupError, UfsUnavailableError, VersionGoneError
from tests.faults.cases import BELOW, BUCKET, Bench, Case, check_ended, home, named_case
from tests.faults.server import ANSWERS, Fault, Mode, Sent, faults_of
from tests.faults.writes import KINDS, SMALL, Kind, counted, rows
from tests.fuzzing import MORE, seeds
from tests.s3server import S3Server

TRIED = 2  # cases of each kind, times `MORE`
by_name = {kind.name: kind for kind in KINDS}


@pytest.fixture(scope="module")
def bench(s3_server: S3Server) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch, home() as hosts:
        yield Bench(s3_server, hosts, patch)
    s3_server.between = None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.replace(" ", "-"))
def test_every_write_ends_in_one_of_three_ways(bench: Bench, kind: Kind) -> None:
    """Of every kind of write some of all cases are tried: how it ended is what the log says, and what every host reads."""
    whole = Case(bench, kind, None).run()
    assert whole.how == "acknowledged"
    seed = seeds(1)[0]
    rng = random.Random(f"{seed} {kind.name}")
    matrix = faults_of(whole.requests)
    for fault in rng.sample(matrix, min(TRIED * MORE, len(matrix))):
        try:
            done = Case(bench, kind, fault, seed).run()
            check_ended(kind, fault, done, len(whole.requests))
        except Exception as problem:
            repeat = f"python -m tests.faults.run --case '{named_case(kind, fault, seed)}'"
            raise AssertionError(f"{kind.name}, {fault}; to repeat: {repeat}") from problem


def test_the_matrix_has_every_answer_to_every_request() -> None:
    """Each kind of request is answered in every way that makes a difference to it, in each mode."""
    requests = [Sent(kind, "key") for kind in ("head", "get", "list", "put", "delete")]
    found = faults_of(requests)
    assert len(found) == len(set(found))
    tried = {(fault.number, fault.answer) for fault in found}
    without_body = {"damaged", "damaged bare", "cut", "short", "empty"}
    for (number, sent), answer in itertools.product(enumerate(requests, 1), ANSWERS):
        assert ((number, answer) in tried) == (sent.kind in ("get", "list") or answer not in without_body)
    assert {(fault.mode, fault.number) for fault in found} >= set(
        itertools.product((Mode.DONE, Mode.RETRIED), range(1, 6))
    )


def test_an_answer_is_lost_once(bench: Bench) -> None:
    """A request whose answer is lost is not sent again by the HTTP client: a refusal that follows is no proof of anything."""
    kind = by_name["append"]
    requests = Case(bench, kind, None).run().requests
    (commit,) = [n for n, sent in enumerate(requests, 1) if sent.kind == "put" and sent.key.endswith("16.json")]
    for answer in ("400", "403", "404"):
        assert Case(bench, kind, Fault(commit, answer, Mode.RETRIED)).run().how == "acknowledged"
        assert Case(bench, kind, Fault(commit, answer, Mode.LASTING)).run().how == "unknown"


@pytest.mark.parametrize("answer", ["412", "409", "lost", "page"])
def test_a_store_that_never_takes_an_event(bench: Bench, answer: str) -> None:
    """A store that says for ever that an event is there which it does not show, or nothing: few requests, pauses, an error."""
    kind = by_name["append"]
    requests = Case(bench, kind, None).run().requests
    commit = next(n for n, sent in enumerate(requests, 1) if sent.kind == "put" and "/log/" in sent.key)
    done = Case(bench, kind, Fault(commit, answer, Mode.OUTAGE)).run()
    assert done.how == "failed"
    assert len(done.requests) - commit < 20
    bench.fill(bench.prepared(kind))
    bench.clear()
    bench.slept.clear()
    with bench.host("writer", 2), bench.answering("put", answer) as asked:
        with pytest.raises(PysparkLookupError) as caught:
            LookupTable(None, bench.options("writer")).write(rows([20], "new"))
        assert isinstance(caught.value, UfsUnavailableError)
    assert len(asked) < 200
    assert len(bench.slept) >= 2
    assert sum(bench.slept) < 120
    assert LookupTable(None, bench.options("late")).scan().num_rows == SMALL.total()


@pytest.mark.parametrize("answer", ["empty", "page", "blank", "cut", "short", "404"])
def test_a_listing_that_is_none(bench: Bench, answer: str) -> None:
    """A listing that is empty, cut, "not found" or a gateway's page is asked for again; the table is never said to be missing."""
    bench.fill(bench.prepared(by_name["append"]))
    bench.clear()
    options = bench.options("reader")
    with bench.host("reader", 2), bench.answering("list", answer, times=1) as asked:
        assert counted(LookupTable(None, options).scan()) == SMALL
        assert sum(sent.kind == "list" for sent in asked) >= 2
    bench.clear()
    with bench.host("reader", 3), bench.answering("list", answer) as asked:
        with pytest.raises(UfsUnavailableError):
            LookupTable(None, options).scan()
        assert 3 <= len(asked) < 20
        with pytest.raises(UfsUnavailableError):
            LookupTable(None, {**options, "lookup.keys": "id"}).write(rows([1], "new"))


@pytest.mark.parametrize("answer", ["damaged", "damaged bare", "cut", "short", "empty", "page"])
def test_bytes_that_are_damaged_on_their_way(bench: Bench, answer: str) -> None:
    """A GET of a first read arrives damaged once: it is asked for again, and nothing of it is kept on the host."""
    bench.fill(bench.prepared(by_name["append"]))
    options = bench.options("reader")
    bench.clear()
    with bench.host("reader", 2), bench.answering("get", "lost", times=0) as asked:
        LookupTable(None, options).scan()
    gets = sum(sent.kind == "get" for sent in asked)
    for number in range(0, gets, 1 if answer == "damaged" else 5):
        bench.clear()
        with bench.host("reader", 2), bench.answering("get", answer, times=1, first=number):
            assert counted(LookupTable(None, options).scan()) == SMALL
        with bench.host("reader", 3):
            assert counted(LookupTable(None, options).scan()) == SMALL


def test_bytes_that_stay_damaged(bench: Bench) -> None:
    """A store that gives damaged bytes for a while: an error, and once it is well nothing of that is left on the host."""
    bench.fill(bench.prepared(by_name["append"]))
    bench.clear()
    options = bench.options("reader")
    with bench.host("reader", 2), bench.answering("get", "damaged"), pytest.raises(PysparkLookupError):
        LookupTable(None, options).scan()
    with bench.host("reader", 3):
        assert counted(LookupTable(None, options).scan()) == SMALL


def test_a_store_that_ignores_if_match(bench: Bench, tmp_path: Path) -> None:
    """A file that is replaced while it is read, in a store that does not know If-Match: never rows of both, in any order."""
    versions = []
    for version in range(2):
        path = tmp_path / f"{version}.parquet"
        values = pa.array([(n * 2654435761 + version * 7919) % 2**31 for n in range(50_000)])
        pq.write_table(pa.table({"version": pa.repeat(version, len(values)), "n": values}), path)
        versions.append(path.read_bytes())
    for number in range(2):  # the footer, and then the rows
        bench.fill({"plain/x.parquet": versions[0]})
        bench.clear()
        options = {**bench.options("reader"), "path": f"s3://{BUCKET}/plain"}
        later = {"plain/x.parquet": versions[1]}
        gone = contextlib.suppress(VersionGoneError)
        with bench.host("reader", 2), bench.without_if_match(number, later), gone:
            assert set(LookupTable(None, options).scan().column("version").to_pylist()) == {1}
        with bench.host("reader", 3):
            assert set(LookupTable(None, options).scan().column("version").to_pylist()) == {1}


def test_a_file_that_is_named_is_never_removed(bench: Bench) -> None:
    """What the checks stand on: a log that names a file which is not there is told, whoever reads it."""
    bench.fill(bench.prepared(by_name["append"]))
    case = Case(bench, by_name["append"], None)
    case._state()
    name = next(name for name in bench.objects() if name.startswith(f"{BELOW}write-"))
    bench.remove(name)
    with pytest.raises(AssertionError, match="names files that are not there"):
        case._state()
