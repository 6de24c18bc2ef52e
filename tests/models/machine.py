"""Runs a history: takes each step, asks readers of every kind, and compares what they answer with what the oracle says."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import itertools
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.models.adapter import Past, Table
from tests.models.answers import CONDITIONS, Content, Expected, Question
from tests.models.histories import History, Step
from tests.models.place import Place
from tests.models.processes import Answer, Nursery, Request, Session, key_table, reader_runtime
from tests.models.providers import Provided
from tests.models.values import plain
from tests.support.fakes import FakeClock

_CALLS = ("scandir", "listdir", "stat", "lstat", "open", "readlink", "fstat")


class _Entry:
    """An `os.DirEntry` whose calls count, too."""

    def __init__(self, entry: os.DirEntry[str], count: Callable[[], None]) -> None:
        self._entry, self._count = entry, count

    def __getattr__(self, name: str) -> Any:
        if name in ("stat", "is_dir", "is_file", "is_symlink"):
            self._count()
        return getattr(self._entry, name)

    def __fspath__(self) -> str:
        return self._entry.path


class _Entries(list[_Entry]):
    """The entries of `os.scandir`, read at once, as the system reads a small directory."""

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def at_call(number: int, root: Path, change: Callable[[], None]) -> Iterator[None]:
    """Run `change` once, before the call of this number among those for files below `root`. Calls for the hosts' caches do not count."""
    count = 0
    changing = False

    def counted() -> None:
        nonlocal count, changing
        if changing:
            return
        count += 1
        if count == number:
            changing = True
            try:
                change()
            finally:
                changing = False

    read_link = os.readlink

    def concerns(path: Any, below: Any) -> bool:
        if isinstance(path, int) or below is not None:  # a directory that was opened
            path = read_link(f"/proc/self/fd/{path if isinstance(path, int) else below}")
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        return text.startswith(str(root)) and not text.startswith(str(root / "hosts"))

    with pytest.MonkeyPatch.context() as patch:
        for name in _CALLS:
            original = getattr(os, name)

            def counted_call(
                path: Any = ".", *args: Any, _original: Any = original, _name: str = name, **more: Any
            ) -> Any:
                if not concerns(path, more.get("dir_fd")):
                    return _original(path, *args, **more)
                counted()
                result = _original(path, *args, **more)
                if _name == "scandir" and not changing:
                    return _Entries(_Entry(entry, counted) for entry in result)
                return result

            patch.setattr(os, name, counted_call)
        yield


CACHES = ("NONE", "PARTIAL", "FULL")
SOURCES = ("UFS", "CACHE")
PROCESSES = ("here", "other", "new", "once", "late")
QUESTIONS = ("all", "partition", "columns", "where")
_STEP_S = 100.0  # of the readers' clocks, more than any interval
_ASKED_PER_STEP = {True: 8, False: 3}
"""How many readers read after each step: of a history of all kinds of tables, and of the longer ones of one kind."""
_PAST_AT_END = 6
_CHARS_SHOWN = 500
_ANSWERS_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class Reader:
    """One way to read. `process`: the history's own, another, one for a few calls or for one (`once`), or on a new host (`late`)."""

    cache: str
    source: str
    process: str
    question: str

    def __str__(self) -> str:
        return f"{self.cache}/{self.source}/{self.process}/{self.question}"


EVERY_READER = tuple(Reader(*values) for values in itertools.product(CACHES, SOURCES, PROCESSES, QUESTIONS))
_OFTEN = tuple(reader for reader in EVERY_READER for _ in range({"here": 3, "late": 2}.get(reader.process, 1)))
"""Readers to draw from. Those that need no process of their own are there more often."""


@dataclasses.dataclass(frozen=True)
class Discrepancy:
    """An answer that is not what it must be."""

    step: int
    """The number of steps before it."""
    reader: str
    call: str
    expected: str
    actual: str

    def __str__(self) -> str:
        where = f"after step {self.step}, {self.reader}, {self.call}"
        return f"{where}:\n  expected {self.expected}\n  actual   {self.actual}"


class _Machine:
    def __init__(self, history: History, root: Path, nursery: Nursery, name: str) -> None:
        self._history, self._root, self._nursery, self._name = history, root, nursery, name
        self._setup = history.setup
        self.place = Place(root, self._setup)
        self._clock = FakeClock(time.time() + (0 if self._setup.near else 3600))
        self._here = Session(self._clock)
        self._late = 0
        self._before: dict[Question, list[Expected]] = collections.defaultdict(list)
        self._quiet: Content | None = None
        self._asked_types: list[pa.DataType] = []
        self.discrepancies: list[Discrepancy] = []
        self._step = 0

    def run(self, readers: Sequence[Reader] | None, at_end: int) -> None:
        with reader_runtime(self._clock), contextlib.closing(self.place):
            for number, step in enumerate(self._history.steps, 1):
                self._step = number
                if not self._take(step):
                    return
                rng = random.Random(step.salt + 1)
                last = number == len(self._history.steps)
                self._check_now(readers, rng, at_end if last else _ASKED_PER_STEP[not self._history.only], last)
                if self.place.table is not None:
                    self._check_more(self.place.table, rng, _PAST_AT_END if last else 1)

    def _check_now(self, readers: Sequence[Reader] | None, rng: random.Random, count: int, last: bool) -> None:
        content = self.place.content()
        selected = readers or (EVERY_READER if count == len(EVERY_READER) else rng.sample(_OFTEN, count))
        if readers is None and not last:
            # Each host must know each version: this determines which older ones it may answer with.
            selected = (Reader("NONE", "UFS", "here", "all"), *selected)
        for reader in selected:
            self._check(reader, content, rng)
        if not content.busy:
            self._quiet = content
        # Of a busy directory, too: if its job seems dead, a host reads it as it is, and may keep that.
        for name in QUESTIONS:
            self._note(self._question(name), content)

    def _check_more(self, table: Table, rng: random.Random, count: int) -> None:
        """Check earlier states, and what only this kind of table can answer."""
        past = table.past()
        for state in rng.sample(past, min(len(past), count)):
            self._check_past(state, rng)
        for options, verdict in table.other_checks(rng):
            reader = Reader("NONE", "UFS", rng.choice(("here", "new", "late")), "all")
            question = Question(self._setup.keys, more=tuple(options.items()))
            (answer,) = self._take_answers(reader, self._request(reader, question, (("scan",),)))
            problem = _text(answer) if answer.error else verdict(answer.value)
            if problem:
                self._report(str(reader), f"scan with {options}", "what its versions say", problem)

    def _take(self, step: Step) -> bool:
        """Take a step. Returns whether it succeeded."""
        self._clock.tick(_STEP_S)
        if self._setup.near:
            self._clock.wall_s = max(self._clock.wall_s, time.time())
        try:
            if step.op == "meanwhile":
                self._take_meanwhile(*step.args, random.Random(step.salt))
            else:
                self.place.take(step)
        except Exception as problem:
            self._report("the writer", step.op, "the step taken", f"{type(problem).__name__}: {problem}")
            return False
        return True

    def _take_meanwhile(self, call: int, step: Step, rng: random.Random) -> None:
        """Take a step during a reader's query. The answer must be that of the table before the step, or after it."""
        table = self.place.table
        if table is None or not table.may_change_meanwhile(step):
            return
        reader = Reader(rng.choice(CACHES), "UFS", "here", rng.choice(QUESTIONS))
        question = self._question(reader.question)
        before = self.place.content()
        steps = [step]
        with at_call(call, self._root, lambda: self.place.take(steps.pop())):
            (answer,) = self._here.ask(self._request(reader, question, (("scan",),)))
        if steps:
            self.place.take(step)
        after = self.place.content()
        if (before.busy or after.busy) and answer.error == "TableBusyError":
            return
        allowed = [content.answer(question) for content in (before, after)]
        if all(self._difference(expected, answer, "scan", expected.schema, expected.rows) for expected in allowed):
            self._report(str(reader), f"scan() while {step.op}", " or ".join(map(_short, allowed)), _text(answer))

    def _question(self, name: str) -> Question:
        if name == "where":
            return Question(self._setup.keys, where=CONDITIONS[self._setup.where])
        return Question(self._setup.keys, **({} if name == "all" else {name: getattr(self._setup, name)}))

    def _request(self, reader: Reader, question: Question, asks: tuple[tuple[Any, ...], ...]) -> Request:
        options = {**question.options, "lookup.cache": reader.cache, "lookup.max-retries": "0"}
        if reader.cache == "PARTIAL":
            options["lookup.partial-cache.max-rows"] = str(self._setup.max_rows)
        if reader.source == "CACHE":
            options |= {"lookup.metadata.source": "CACHE"}
            if reader.cache == "FULL":
                always = self._setup.interval == "0"
                options["lookup.full-cache.periodic-reload.interval"] = "1 min" if always else self._setup.interval
            else:
                options["lookup.metadata.sync-interval"] = self._setup.interval
        host = "here"
        if reader.process == "late":
            self._late += 1
            host = f"late{self._late}"
        table, path = self.place.table, str(self.place.ground.path)
        if table is not None:
            options, path = options | table.options | table.cache_options(reader.cache), table.name
        options["lookup.cache.dir"] = str(self._root / "hosts" / host)
        at = (self._clock.wall_s, self._clock.steady_s)
        return Request(path, tuple(sorted(options.items())), asks, at, reader.process == "once")

    def _take_answers(self, reader: Reader, request: Request) -> list[Answer]:
        if reader.process == "here":
            return self._here.ask(request)
        if reader.process == "late":
            with contextlib.closing(Session(self._clock)) as session:
                answers = session.ask(request)
            shutil.rmtree(dict(request.options)["lookup.cache.dir"], ignore_errors=True)
            return answers
        answers, at = self._nursery.ask(self._name if reader.process == "other" else "", request)
        # A process that waited has moved its clock; time is the same for all.
        self._clock.wall_s, self._clock.steady_s = max(self._clock.wall_s, at[0]), max(self._clock.steady_s, at[1])
        return answers

    def _check(self, reader: Reader, content: Content, rng: random.Random) -> None:
        question, table = self._question(reader.question), self.place.table
        if table is not None and reader.question == "where":
            question = dataclasses.replace(question, where=table.condition(rng) or question.where)
        if isinstance(table, Provided):
            reader = dataclasses.replace(reader, source="UFS")
        is_late = reader.process == "late"
        expected = content.answer(question)
        types = expected.types or next((e.types for e in reversed(self._before[question]) if e.types), {})
        requested = self._choose_keys(expected, types, rng)
        keys = key_table(pa.schema([(name, types.get(name, pa.int64())) for name in question.keys]), requested)
        self._asked_types = list(keys.schema.types)
        single = rng.choice(requested)
        key = single if len(single) > 1 else single[0]
        asks: tuple[tuple[Any, ...], ...] = (("schema",), ("scan",), ("get_many", keys), ("get", key))
        if table is not None and not table.scans(reader.cache):
            asks = tuple(ask for ask in asks if ask != ("scan",))
        if reader.process == "once":
            asks = (rng.choice(asks[1:-1]),)
        elif reader.cache == "FULL" and reader.source == "CACHE":
            asks = (("reload",), *asks)
        else:
            asks = tuple(rng.sample(asks, len(asks)))
        answers = self._take_answers(reader, self._request(reader, question, asks))
        older = [] if is_late else self._before[question]
        changed = self._quiet is None or content.files != self._quiet.files
        for ask, answer in zip(asks, answers, strict=True):
            # A host need not have the bytes of files that have changed while a job is writing. One that answers gives the last
            # version that it knows, or what is there if it takes the job for dead.
            if content.busy and answer.error == "TableBusyError" and (is_late or changed or ask[0] == "reload"):
                continue
            stale = reader.source == "CACHE" and (content.busy or expected.problem)
            allowed = [expected, *older] if stale else [expected]
            if content.busy and self._quiet is not None and not is_late:
                allowed.append(self._quiet.answer(question))
            if content.busy and expected.problem:
                # All files are gone, and a job seemed dead: the last state that was read stays valid.
                allowed += older
            self._compare(reader, ask, answer, allowed, question, [single] if ask[0] == "get" else requested)
            # A load of a version from before files were removed, or before the path became another table, may fail.
            removed = any(step.op in ("vacuum", "expire", "become") for step in self._history.steps[1 : self._step])
            if answer.failures and not (content.busy or expected.problem or removed):
                problem = f"{answer.failures} failed"
                self._report(str(reader), ask[0], "no load that fails behind a right answer", problem)

    def _check_past(self, past: Past, rng: random.Random) -> None:
        """Check that an earlier state is read again, or is known to be gone."""
        reader = Reader(rng.choice(CACHES), "UFS", rng.choice(("here", "new", "late")), "all")
        question = Question(self._setup.keys, more=tuple(past.options.items()))
        expected, names = past.content().answer(question), self._setup.keys
        keys = [tuple(row[name] for name in names) for row in expected.keyed[:3]] or [(None,) * len(names)]
        types = [(name, expected.types.get(name, pa.int64())) for name in names]
        asks = (("scan",), ("get_many", key_table(pa.schema(types), keys)))
        for ask, answer in zip(asks, self._take_answers(reader, self._request(reader, question, asks)), strict=True):
            if answer.error != "VersionGoneError" or past.kept:
                self._compare(reader, ask, answer, [expected], question, keys)

    def _choose_keys(self, expected: Expected, types: Any, rng: random.Random) -> list[tuple[Any, ...]]:
        """Keys to look up: some that exist, one that does not, and one that is null."""
        names = self._setup.keys
        present = [tuple(row[name] for name in names) for row in expected.keyed]
        missing = tuple(_missing(types.get(name, pa.int64())) for name in names)
        sample = rng.sample(present, min(len(present), rng.choice((1, 4, 30))))
        return [*sample, missing, *sample[:1], (None,) * len(names)]

    def _compare(
        self, reader: Reader, ask: Any, answer: Answer, allowed: Iterable[Expected], question: Question, requested: Any
    ) -> None:
        differences = []
        by_key = ask[0] in ("get", "get_many")
        for expected in allowed:
            types = [expected.types.get(name) for name in self._setup.keys]
            if by_key and answer.error == "SchemaError" and types != self._asked_types:
                return  # keys of a newer version are not keys of this one
            schema, rows = expected.schema, expected.rows
            if by_key and not expected.problem:
                rows = tuple(expected.rows_of(question.keys, requested))
                names = list(expected.keyed[0]) if expected.keyed else None
                schema = pa.schema([(n, expected.types[n]) for n in names]) if names else None
                if ask[0] == "get":
                    rows = tuple({n: v for n, v in row.items() if n != "key_index"} for row in rows)
            difference = self._difference(expected, answer, ask[0], schema, rows)
            if not difference:
                return
            differences.append(difference)
        call = f"{ask[0]}({_cut(requested)})" if by_key else ask[0]
        conditions = [question.where.text] if question.where else []
        conditions += [f"{name} = {text}" for name, text in question.more]
        self._report(str(reader), " with ".join([call, *conditions]), differences[0], _text(answer))

    def _difference(
        self, expected: Expected, answer: Answer, call: str, schema: pa.Schema | None, rows: Sequence[dict[str, Any]]
    ) -> str:
        """What the answer should have been. "" if it is right."""
        if expected.problem and not answer.error.startswith("internal"):
            # A reload does not need the columns that a query's options name.
            return "" if answer.error or call == "reload" else _short(expected)
        if answer.error:
            return _short(expected)
        if call == "reload":
            return ""
        if call == "schema":
            return "" if _columns(answer.value) == _columns(schema) else str(_columns(schema))
        if call != "get" and schema is not None:
            names = [*_columns(schema), ("key_index", "int64")] if call == "get_many" else _columns(schema)
            if _columns(answer.value.schema) != names:
                return f"columns {names}"
        actual = [plain(row) for row in (answer.value if call == "get" else answer.value.to_pylist())]
        right = [plain(row) for row in rows]
        is_equal = actual == right if expected.ordered and call != "scan" else sorted(actual) == sorted(right)
        return "" if is_equal else _rows_text(right, actual)

    def _note(self, question: Question, content: Content) -> None:
        expected = content.answer(question)
        if not expected.problem:
            self._before[question].append(expected)

    def _report(self, reader: str, call: str, expected: str, actual: str) -> None:
        self.discrepancies.append(Discrepancy(self._step, reader, call, _cut(expected), _cut(actual)))


def _missing(kind: pa.DataType) -> Any:
    """A value of a type that no row has."""
    if pa.types.is_string(kind):
        return "nowhere"
    if pa.types.is_binary(kind):
        return b"nowhere"
    if pa.types.is_timestamp(kind):
        return datetime.datetime(1999, 1, 1, tzinfo=datetime.timezone.utc if kind.tz else None)
    if pa.types.is_boolean(kind) or pa.types.is_nested(kind):
        return None
    return pa.scalar(10_000, pa.int32()).cast(kind).as_py()


def _columns(schema: Any) -> list[tuple[str, str]]:
    return [(field.name, str(field.type)) for field in schema]


def _short(expected: Expected) -> str:
    return f"an error ({expected.problem})" if expected.problem else f"{len(expected.rows)} rows of {expected.schema}"


def _rows_text(expected: list[str], actual: list[str]) -> str:
    lacks = collections.Counter(expected) - collections.Counter(actual)
    beyond = collections.Counter(actual) - collections.Counter(expected)
    return f"{len(expected)} rows; lacks {list(lacks)[:3]}, has beyond them {list(beyond)[:3]}"


def _text(answer: Answer) -> str:
    if answer.error:
        return f"{answer.error}: {answer.text}"
    rows = answer.value.to_pylist() if isinstance(answer.value, pa.Table) else answer.value
    return f"{len(rows)} rows {rows[:2]}" if isinstance(rows, list) else str(rows)


def _cut(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _CHARS_SHOWN else f"{text[:_CHARS_SHOWN]}…"


def run(
    history: History,
    root: Path,
    nursery: Nursery,
    readers: Sequence[Reader] | None = None,
    at_end: int = len(EVERY_READER),
) -> list[Discrepancy]:
    """Run a history. Returns what was wrong. `readers` read after each step; if None, random ones do, and `at_end` of them at the end."""
    machine = _Machine(history, root, nursery, str(root))
    machine.run(readers, at_end)
    return machine.discrepancies


def report(history: History, discrepancies: Sequence[Discrepancy]) -> str:
    """What to print of a failed history: its first wrong answers, and how to replay it."""
    replay = f"LOOKUPCACHE_SEED={history.seed} scripts/test tests/models -k {history.only or 'any'}-"
    lines = [f"{replay}: {len(discrepancies)} answers were wrong"]
    lines += [str(discrepancy) for discrepancy in discrepancies[:_ANSWERS_SHOWN]]
    return "\n".join([*lines, str(history)])
