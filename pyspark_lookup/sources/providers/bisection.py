"""Finds out which keys of a failed lookup are at fault, by calls for fewer and fewer keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.errors import LookupFunctionError, LookupTimeoutError

_PATIENCE = 3
_PROBES = 3
_FEW = 8  # up to this many keys, each is probed
_UNANSWERED_CALLS = 32
_SPLIT_CALLS = 256

Outcome: TypeAlias = "pa.Table | LookupFunctionError | None"
"""The outcome of a call: its rows, with `KEY_INDEX` as the position among its keys; or the error. None: the call was not made."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call for some keys, given by position. `problem`: the error of an earlier call with these keys, which was retried; this call is not."""

    keys: Numbers
    problem: LookupFunctionError | None = None


MakeCalls = Callable[[Sequence[Call], int], Sequence[Outcome]]
"""Makes calls, and starts no more once this many in a row have failed."""


class Bisection:
    """Asks for `count` keys, `size` of them in a call, and halves the keys of a failed call, down to single keys.

    A system that is down is spared. If no call of the first round succeeds, a few single keys are tried, or all if there are few; if these
    fail, too, all keys have failed. All remaining keys fail when many calls in a row fail, or when one times out. The number of calls for
    halves is limited: the keys that are left then fail together.

    `rows`: the keys and rows of each successful call. `failures`: the errors of the other keys, by position. `problem`: the first error of
    any call.
    """

    def __init__(self, count: int, size: int) -> None:
        self.rows: list[tuple[Numbers, pa.Table]] = []
        self.failures: dict[int, LookupFunctionError] = {}
        self._pending = [Call(np.arange(start, min(start + size, count))) for start in range(0, count, size)]
        self.problem: LookupFunctionError | None = None
        self._split_calls = 0

    def run(self, make_calls: MakeCalls) -> None:
        """Make calls until each key has an answer or has failed."""
        patience, unanswered = 1, 0
        while self._pending:
            calls, self._pending = self._halves(), []
            outcomes = make_calls(calls, patience)
            answered = self._settle(calls, outcomes)
            unanswered = 0 if answered else unanswered + sum(outcome is not None for outcome in outcomes)
            up = unanswered < _UNANSWERED_CALLS if self.rows else not self._pending or self._probe(make_calls)
            if not up:
                self._give_up()
            patience = _PATIENCE
        reasons = {repr(problem.__cause__) for problem in self.failures.values()}
        # All keys have the same reason: the system has failed, not the keys.
        if not self.rows and len(reasons) == 1 and self.problem is not None:
            self.failures = dict.fromkeys(self.failures, self.problem)

    def _halves(self) -> list[Call]:
        """The calls of the next round."""
        calls: list[Call] = []
        for call in self._pending:
            if call.problem is None:
                calls.append(call)
            elif self._split_calls >= _SPLIT_CALLS:
                self._fail(call.keys, call.problem)
            else:
                halves = [Call(half, call.problem) for half in np.array_split(call.keys, 2) if len(half)]
                self._split_calls += len(halves)
                calls += halves
        return calls

    def _settle(self, calls: Sequence[Call], outcomes: Sequence[Outcome]) -> bool:
        """Record the outcomes of a round. True if one of its calls succeeded."""
        answered = timed_out = False
        for call, outcome in zip(calls, outcomes, strict=True):
            if outcome is None:
                self._pending.append(call)
            elif not isinstance(outcome, LookupFunctionError):
                self.rows.append((call.keys, outcome))
                answered = True
            elif isinstance(outcome, LookupTimeoutError):  # calls for halves would time out, too
                self._fail(call.keys, outcome)
                timed_out = True
            elif len(call.keys) == 1:
                self._fail(call.keys, outcome)
            else:
                self._pending.append(Call(call.keys, outcome))
                self._note(outcome)
        if timed_out and not answered:
            self._give_up()
        return answered

    def _probe(self, make_calls: MakeCalls) -> bool:
        """Ask for a few keys, spread over all of them, and record the outcomes. True if one of these calls succeeded."""
        pending = np.concatenate([call.keys for call in self._pending])
        tried = {int(key) for call in self._pending if call.problem is not None for key in call.keys}
        number = _PROBES if len(pending) > _FEW else len(pending)
        probed_keys = pending[np.unique(np.linspace(0, len(pending) - 1, number).astype(np.int64))]
        calls = [Call(probed_keys[place : place + 1], self.problem) for place in range(len(probed_keys))]
        answered, decided = False, list[int]()
        for call, outcome in zip(calls, make_calls(calls, number), strict=True):
            (key,) = call.keys.tolist()
            if outcome is None:
                continue
            if not isinstance(outcome, LookupFunctionError):
                self.rows.append((call.keys, outcome))
                answered = True
            elif key in tried:
                self._fail(call.keys, outcome)
            else:
                continue
            decided.append(key)
        remaining = [Call(call.keys[~np.isin(call.keys, decided)], call.problem) for call in self._pending]
        self._pending = [call for call in remaining if len(call.keys)]
        return answered

    def _fail(self, keys: Numbers, problem: LookupFunctionError) -> None:
        self._note(problem)
        self.failures.update(dict.fromkeys(keys.tolist(), problem))

    def _note(self, problem: LookupFunctionError) -> None:
        if self.problem is None:
            self.problem = problem

    def _give_up(self) -> None:
        for call in self._pending:
            problem = call.problem or self.problem
            assert problem is not None
            self._fail(call.keys, problem)
        self._pending = []
