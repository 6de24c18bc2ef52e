"""The whole matrix, for a night: every answer to every request of every kind of write, in every mode.

Run as `python -m tests.faults.run [--kind NAME] [--share 1/2] [--case "KIND,NUMBER,MODE,ANSWER,SEED"]`. What goes wrong is
printed with what repeats it; the exit code says whether something did.
"""

from __future__ import annotations

import argparse
import collections
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator

os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}

import pytest

from tests.faults.cases import Bench, Case, check_ended, home, named_case
from tests.faults.writes import KINDS, Kind
from tests.support.proxy import Fault, Mode, faults_of
from tests.support.s3server import S3Server

SEED = 1


def cases(bench: Bench, kinds: list[Kind], share: tuple[int, int]) -> Iterator[tuple[Kind, Fault, int, int]]:
    """(kind, fault, seed, requests of the write without a fault) of each case of a share."""
    number = 0
    for kind in kinds:
        requests = Case(bench, kind, None).run().requests
        for fault in faults_of(requests):
            number += 1
            if number % share[1] == share[0] - 1:
                yield kind, fault, SEED + number, len(requests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", action="append", default=[])
    parser.add_argument("--share", default="1/1")
    parser.add_argument("--case", default=None)
    given = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    logging.getLogger("pyspark_lookup").setLevel(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch, home() as hosts:
        server = S3Server()
        try:
            bench = Bench(server, hosts, patch)
            if given.case is not None:
                name, number, mode, answer, seed = given.case.split(",")
                (kind,) = (kind for kind in KINDS if kind.name == name)
                print(Case(bench, kind, Fault(int(number), answer, Mode[mode]), int(seed)).run())
                return 0
            kinds = [kind for kind in KINDS if not given.kind or kind.name in given.kind]
            one, of = map(int, given.share.split("/"))
            return _all(bench, kinds, (one, of))
        finally:
            server.close()


def _all(bench: Bench, kinds: list[Kind], share: tuple[int, int]) -> int:
    began = time.monotonic()
    told = collections.Counter[str]()
    most = collections.Counter[str]()
    wrong = 0
    for kind, fault, seed, least in cases(bench, kinds, share):
        told["cases"] += 1
        try:
            done = Case(bench, kind, fault, seed).run()
            told[done.how] += 1
            most[kind.name] = max(most[kind.name], len(done.requests) - least)
            check_ended(fault, done, least)
        except Exception:
            wrong += 1
            print(f"--case {named_case(kind, fault, seed)!r}", traceback.format_exc(limit=-2), sep="\n", flush=True)
        if told["cases"] % 1000 == 0:
            print(f"{time.monotonic() - began:.0f} s: {dict(told)}, {wrong} wrong", flush=True)
    took = f"{time.monotonic() - began:.0f} s"
    print(f"{took}: {dict(told)}, {wrong} wrong; requests more at most: {dict(most)}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
