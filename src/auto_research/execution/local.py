"""Run jobs on this machine, a fixed number at a time."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from auto_research.runtime.errors import UserError
from auto_research.runtime.process import Job, Outcome, Running, default_threads, start
from auto_research.runtime.versions import cores

__all__ = ["LocalExecutor"]


class LocalExecutor:
    """Isolated processes of this machine; see :class:`auto_research.execution.Executor`.

    A job that does not say how many threads it wants gets an equal share of the cores, so that workers times
    threads does not exceed them: threads beyond the cores slow torch down by a factor, not by a fraction.

    Args:
        workers: jobs that run at the same time.
        on_line: receives every line of output, with its job; called from the workers' threads.

    Raises:
        UserError: ``workers`` is not positive.
    """

    def __init__(self, workers: int = 1, on_line: Callable[[Job, str], None] | None = None) -> None:
        if workers < 1:
            raise UserError(f"{workers} workers cannot run anything: give at least 1.")
        self.workers = workers
        self._on_line = on_line
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._running: set[Running] = set()
        self._watchers: set[threading.Thread] = set()
        self._unclaimed = 0  # jobs submitted whose outcome as_completed has not handed on
        self._ended: queue.SimpleQueue[tuple[Job, Outcome | BaseException] | None] = queue.SimpleQueue()
        self._cancelled = False

    def submit(self, job: Job) -> None:
        with self._lock:
            if self._cancelled:
                raise RuntimeError("the executor was cancelled")
            self._unclaimed += 1
            self._waiting.append(job)
            if len(self._watchers) < self.workers:
                watcher = threading.Thread(target=self._watch, name="job watcher", daemon=True)
                self._watchers.add(watcher)
                watcher.start()

    def as_completed(self) -> Iterator[tuple[Job, Outcome]]:
        while True:
            with self._lock:
                if not self._unclaimed:
                    return
            message = self._ended.get()
            if message is None:  # cancelled; what had ended before was handed on
                self._ended.put(None)
                return
            job, outcome = message
            with self._lock:
                self._unclaimed -= 1
            if isinstance(outcome, BaseException):
                raise outcome
            yield job, outcome

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            self._waiting.clear()
            for running in self._running:
                running.cancel()
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher.join()
        self._ended.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _watch(self) -> None:
        """One worker: take jobs until there is none."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._watchers.discard(threading.current_thread())
                    return
                job = self._waiting.popleft()
            self._ended.put((job, self._run(job)))

    def _share(self, job: Job) -> int:
        return max(1, min(default_threads({**os.environ, **job.environment}), cores() // self.workers))

    def _run(self, job: Job) -> Outcome | BaseException:
        """The outcome, or an exception of ours or of ``on_line``, to be raised where it can be seen."""
        on_line = self._on_line
        share = job if job.threads else job.model_copy(update={"threads": self._share(job)})
        try:
            running = start(share)
            with self._lock:
                self._running.add(running)
                if self._cancelled:
                    running.cancel()
            try:
                return running.wait(on_line and (lambda line: on_line(job, line)))
            finally:
                with self._lock:
                    self._running.discard(running)
        except BaseException as error:
            return error
