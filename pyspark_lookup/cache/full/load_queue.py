"""`Jobs`: one table's queue of background loads. A thread runs them one by one, and ends when the queue is empty."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable

from pyspark_lookup.core.threads import ProcessEndsError, is_ending
from pyspark_lookup.errors import VersionGoneError
from pyspark_lookup.storage.context import Start
from pyspark_lookup.versions.model import TableVersion


@dataclasses.dataclass(frozen=True)
class Job:
    """A load of `version` (None: the store's current one), or upkeep for which nobody waits: compacting layers (`compact`), removing expired
    ones (`tidy`).

    `due`: a load for the schedule, queued when the latest load had ended at `seen_s`. It is skipped if another process has loaded the table
    since then.
    """

    version: TableVersion | None
    future: concurrent.futures.Future[None]
    compact: bool = False
    tidy: bool = False
    due: bool = False
    seen_s: float | None = None


class Jobs:
    """Runs `do` for each queued job."""

    def __init__(self, name: str, start: Start, do: Callable[[Job], None]) -> None:
        self._name = name
        self._start = start
        self._do = do
        self._mutex = threading.Lock()
        self._jobs: list[Job] = []  # the first one runs
        self._running: Job | None = None
        self._working = self._closed = False

    def ask(
        self,
        version: TableVersion | None,
        compact: bool = False,
        tidy: bool = False,
        due: bool = False,
        seen_s: float | None = None,
    ) -> concurrent.futures.Future[None]:
        """Queue a job and return its future. If an equal job is waiting, that one's future is returned.

        The same holds for an equal job that is running, unless it loads the current version and is not due: it may have asked the store too
        early.
        """
        with self._mutex:
            for job in self._jobs:
                may_be_stale = job is self._running and version is None and not tidy and not due
                if (job.version, job.compact, job.tidy, job.due) == (version, compact, tidy, due) and not may_be_stale:
                    return job.future
            if version is not None:  # only the latest is worth building
                for job in [job for job in self._jobs if job.version is not None and job is not self._running]:
                    self._jobs.remove(job)
                    job.future.set_exception(
                        VersionGoneError("a newer version appeared before the snapshot of this one was built")
                    )
            job = Job(version, concurrent.futures.Future(), compact, tidy, due, seen_s)
            job.future.set_running_or_notify_cancel()  # several callers wait for it, so none of them may cancel it
            self._jobs.append(job)
            begin = not self._working
            self._working = True
        if begin:
            try:
                self._start(self._name, self._work)
            except RuntimeError as problem:  # there are too many threads
                self._stop(problem)
        return job.future

    def _stop(self, problem: BaseException) -> None:
        """End the thread; waiting jobs fail with `problem`."""
        with self._mutex:
            self._working = False
            waiting, self._jobs = self._jobs, []
        for job in waiting:
            job.future.set_exception(problem)

    def _work(self) -> None:
        while True:
            with self._mutex:
                closed = self._closed or is_ending()
                if not self._jobs and not closed:
                    self._working = False
                    return
                job = self._running = self._jobs[0] if not closed else None
            if job is None:
                self._stop(concurrent.futures.CancelledError())
                return
            problem: BaseException | None = None
            try:
                self._do(job)
            except ProcessEndsError:
                problem = concurrent.futures.CancelledError()
            except BaseException as raised:
                problem = raised
            with self._mutex:
                self._jobs.remove(job)
                self._running = None
            if problem is None:
                job.future.set_result(None)
            else:
                job.future.set_exception(problem)

    def close(self) -> None:
        """Start no more jobs: waiting ones are cancelled, the running one ends by itself."""
        self._closed = True
