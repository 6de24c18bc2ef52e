"""Faults put into the package one at a time, and which tests catch each: see `faults.py`.

Run as `python -m tests.mutations.run [--list] [--only NAME …] [-j N]`. The checkout is never edited: tests run in copies of it.
The exit code says whether a fault was missed, or its place in the package was not found.
"""

import argparse
import ast
import concurrent.futures
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.edits import find_definition
from tests.mutations.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
PACKAGE = "pyspark_lookup"
_LIMIT_S = 600  # of all tests of a fault
_TEST_LIMIT_S = 120  # of one of them, several times what it takes: a fault that makes a test hang is caught
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".venvs", "site", "*_cache", "tmp*")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
_PYTEST = [
    *("-m", "pytest", "-x", "-q", "-n0", "-m", "not nightly", "-p", "no:cacheprovider"),
    *("-o", f"timeout={_TEST_LIMIT_S}"),
    "--hypothesis-profile=mutations",  # the first failing example will do
]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How tests went. `failed`: the first that failed; "" if all passed; None if they could not be run."""

    failed: str | None
    took_s: float
    said: str


def run_tests(checkout: Path, tests: Sequence[str], limit_s: float | None) -> Outcome:
    """Run tests in a copy of the checkout, the first failure being the last test. What they write is beside the copy, and goes with it."""
    start_s = time.monotonic()
    command = [sys.executable, *_PYTEST, f"--basetemp={checkout.parent / 'tests'}", *tests]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    environment.pop("LOOKUPCACHE_FUZZ", None)  # the cases of the day
    run = functools.partial(subprocess.run, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    try:
        completed = run(command, cwd=checkout, env=environment, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Outcome("no end", time.monotonic() - start_s, "")
    output, took_s = completed.stdout + completed.stderr, time.monotonic() - start_s
    failure = _FAILED.search(completed.stdout)
    if completed.returncode == 1 and failure:
        return Outcome(failure[1], took_s, output)
    return Outcome("" if completed.returncode == 0 else None, took_s, output)


def find_place(fault: Fault, checkout: Path) -> str | None:
    """What is wrong with the place of a fault in the package; None if it is there once."""
    module = checkout / PACKAGE / fault.module
    definition = find_definition(parse(module), fault.definition) if module.exists() else None
    count = 0 if definition is None else len(fault.edit.places(definition))
    return None if count == 1 else f"{fault.name}: {fault.edit.old!r} is {count} times in {fault.place}, not once"


@functools.cache
def parse(module: Path) -> ast.Module:
    return ast.parse(module.read_text(encoding="utf-8"))


def apply_fault(fault: Fault, checkout: Path) -> None:
    """Edit a copy of the checkout. Only comments and the layout of the module are lost beside what the fault says."""
    module = checkout / PACKAGE / fault.module
    tree = ast.parse(module.read_text(encoding="utf-8"))
    definition = find_definition(tree, fault.definition)
    assert definition is not None
    (place,) = fault.edit.places(definition)
    fault.edit.apply(place)
    module.write_text(ast.unparse(tree), encoding="utf-8")


def tried(fault: Fault, clean: Path) -> Outcome:
    """Run the tests of a fault in a copy that has it."""
    with tempfile.TemporaryDirectory(prefix="lookupcache-mutation-") as work:
        checkout = Path(work) / "checkout"
        shutil.copytree(clean, checkout, symlinks=True)
        apply_fault(fault, checkout)
        return run_tests(checkout, fault.tests, _LIMIT_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="show the faults, and run nothing")
    parser.add_argument(
        "--only", nargs="+", choices=[fault.name for fault in FAULTS], metavar="NAME", help="these faults only"
    )
    parser.add_argument("-j", type=int, default=1, metavar="N", help="so many at a time (default: 1)")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if arguments.only is None or fault.name in arguments.only]
    if arguments.list:
        print(*(f"{fault.name}: {fault.place}" for fault in faults), sep="\n")
        return 0
    problems = [problem for fault in faults if (problem := find_place(fault, ROOT)) is not None]
    if problems:
        sys.exit("\n".join(problems))
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lookupcache-mutations-") as work:
        clean = Path(work) / "checkout"
        shutil.copytree(ROOT, clean, symlinks=True, ignore=_NOT_COPIED)
        tests = sorted({test for fault in faults for test in fault.tests})
        outcome = run_tests(clean, tests, None)
        if outcome.failed != "":
            sys.exit(f"without a fault these tests do not pass: {outcome.failed or 'see below'}\n{outcome.said}")
        print(f"without a fault {len(tests)} tests pass, {outcome.took_s:.0f} s", flush=True)
        with concurrent.futures.ThreadPoolExecutor(arguments.j) as pool:
            outcomes = pool.map(lambda fault: tried(fault, clean), faults)
            missed = sum(not _reported(fault, outcome) for fault, outcome in zip(faults, outcomes, strict=True))
    print(f"{len(faults)} faults, {missed} missed, {time.monotonic() - start_s:.0f} s")
    return 1 if missed else 0


def _reported(fault: Fault, outcome: Outcome) -> bool:
    """Print how it went; whether the fault was caught."""
    how = f"caught in {outcome.took_s:.0f} s by {outcome.failed}" if outcome.failed else "MISSED"
    if outcome.failed and f"Timeout (>{_TEST_LIMIT_S}" in outcome.said:
        how += f", which did not end in {_TEST_LIMIT_S} s: by itself, or on a slow machine?"
    print(f"{fault.name}: {how}", flush=True)
    if outcome.failed is None:
        print("its tests could not be run:", outcome.said, sep="\n", flush=True)
    return bool(outcome.failed)


if __name__ == "__main__":
    sys.exit(main())
