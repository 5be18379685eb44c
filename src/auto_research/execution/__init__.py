"""Where a job runs: isolated processes of this machine, or a Ray cluster, behind one interface.

::

    with LocalExecutor(workers=2) as executor:        # or RayExecutor(address="auto", gpus=0.5)
        for job in jobs:
            executor.submit(job)
        for job, outcome in executor.as_completed():
            ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Protocol, Self

from auto_research.runtime.process import Job, Outcome

__all__ = ["Executor", "in_order"]


class Executor(Protocol):
    """Runs jobs, each in an isolated process with its own deadline.

    As a context manager it ends whatever still runs when the block is left, by Ctrl-C too.
    """

    def submit(self, job: Job) -> None:
        """Add a job. It starts as soon as there is room; its deadline counts from its start."""

    def as_completed(self) -> Iterator[tuple[Job, Outcome]]:
        """Each submitted job with its outcome, in the order in which they end.

        Jobs may be submitted while this runs. It ends when nothing that was submitted is left. Nothing a
        job does raises here.
        """

    def cancel(self) -> None:
        """Drop the jobs that wait and end the process trees of those that run."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def in_order(executor: Executor, jobs: Iterable[Job]) -> Iterator[tuple[Job, Outcome]]:
    """Run jobs and hand on their outcomes in the order of the jobs, each as soon as that order allows."""
    waiting = list(jobs)
    for job in waiting:
        executor.submit(job)
    ended: dict[int, Outcome] = {}
    position = 0
    for done, outcome in executor.as_completed():
        ended[id(done)] = outcome
        while position < len(waiting) and id(waiting[position]) in ended:
            yield waiting[position], ended.pop(id(waiting[position]))
            position += 1
