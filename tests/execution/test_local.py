"""The executor of this machine: how many at a time, in which order, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from auto_research.execution import Executor, in_order
from auto_research.execution.local import LocalExecutor
from auto_research.runtime.errors import UserError
from auto_research.runtime.process import Job
from auto_research.runtime.versions import cores

MakeJob = Callable[..., Job]
SOURCE = Path(__file__).parents[2] / "src"


def test_every_job_ends_once_whatever_happens_to_it(make_job: MakeJob) -> None:
    jobs = [make_job(function) for function in ("echo", "fail", "die", "echo", "absent")]
    with LocalExecutor(workers=2) as executor:
        for job in jobs:
            executor.submit(job)
        ended = list(executor.as_completed())
        assert list(executor.as_completed()) == []
    assert sorted(id(job) for job, _ in ended) == sorted(map(id, jobs))
    states = {id(job): outcome.state for job, outcome in ended}
    assert [states[id(job)] for job in jobs] == ["finished", "failed", "killed", "finished", "start_failed"]


@pytest.mark.parametrize("workers", [1, 3])
def test_outcomes_in_the_order_of_the_jobs(make_job: MakeJob, workers: int) -> None:
    jobs = [make_job("echo") for _ in range(5)]
    with LocalExecutor(workers) as executor:
        results = [(job, outcome.result) for job, outcome in in_order(executor, jobs)]
    assert [job for job, _ in results] == jobs
    assert [result and result["number"] for _, result in results] == [1, 2, 3, 4, 5]


def test_as_completed_is_in_the_order_of_the_ends(make_job: MakeJob, tmp_path: Path) -> None:
    """The first job waits for a file that is written when the second has been handed on."""
    gate = tmp_path / "gate"
    first, second = make_job("after", {"file": str(gate)}), make_job("echo")
    order = []
    with LocalExecutor(workers=2) as executor:
        executor.submit(first)
        executor.submit(second)
        for job, outcome in executor.as_completed():
            assert outcome.state == "finished"
            order.append(job)
            gate.touch()
    assert order == [second, first]


def test_as_many_as_there_are_workers_run_together(make_job: MakeJob, tmp_path: Path) -> None:
    folder = tmp_path / "meeting"
    folder.mkdir()
    with LocalExecutor(workers=3) as executor:
        for _ in range(3):
            executor.submit(make_job("meet", {"folder": str(folder), "together": 3}))
        assert [outcome.state for _, outcome in executor.as_completed()] == ["finished"] * 3


def test_one_worker_runs_one_job_at_a_time(make_job: MakeJob, tmp_path: Path) -> None:
    folder = tmp_path / "meeting"
    folder.mkdir()
    with LocalExecutor(workers=1) as executor:
        executor.submit(make_job("meet", {"folder": str(folder), "together": 2}, timeout_s=2))
        executor.submit(make_job("echo"))
        states = [outcome.state for _, outcome in executor.as_completed()]
    assert states == ["timed_out", "finished"]


def test_jobs_may_be_added_while_others_end(make_job: MakeJob) -> None:
    numbers = []
    with LocalExecutor() as executor:
        executor.submit(make_job("echo"))
        for _, outcome in executor.as_completed():
            assert outcome.result is not None
            numbers.append(outcome.result["number"])
            if len(numbers) < 3:
                executor.submit(make_job("echo"))
    assert numbers == [1, 2, 3]


def test_cores_are_shared_among_workers(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(workers: int, **fields: int) -> object:
        with LocalExecutor(workers) as executor:
            executor.submit(make_job("echo", **fields))
            ((_, outcome),) = executor.as_completed()
        assert outcome.result is not None, outcome
        return outcome.result["threads"]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads(1) == cores()
    assert threads(cores()) == threads(10 * cores()) == 1
    assert threads(1, threads=3) == 3  # what a job says counts
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads(1) == 1


def test_lines_arrive_with_their_job(make_job: MakeJob) -> None:
    lines: list[tuple[Job, str]] = []
    jobs = [make_job("echo") for _ in range(3)]
    with LocalExecutor(2, on_line=lambda job, line: lines.append((job, line))) as executor:
        list(in_order(executor, jobs))
    assert sorted(line for _, line in lines) == ["job 1", "job 2", "job 3"]
    assert all(line == f"job {job.payload['number']}" for job, line in lines)


def test_an_error_of_the_listener_is_raised_where_it_is_seen(make_job: MakeJob) -> None:
    def listen(job: Job, line: str) -> None:
        raise RuntimeError("listener")

    with LocalExecutor(on_line=listen) as executor:
        executor.submit(make_job("echo"))
        with pytest.raises(RuntimeError, match="listener"):
            list(executor.as_completed())


def test_leaving_the_block_ends_what_runs(
    make_job: MakeJob, tmp_path: Path, until: Callable[..., None], alive: Callable[[int], bool]
) -> None:
    note = tmp_path / "note"
    with LocalExecutor() as executor:
        executor.submit(make_job("wait_for_ever", {"note": str(note)}))
        waiting = make_job("echo")
        executor.submit(waiting)
        until(lambda: note.exists() and note.read_text().endswith("\n"))
    assert not alive(int(note.read_text()))
    assert not waiting.result_path.exists()
    with pytest.raises(RuntimeError, match="cancelled"):
        executor.submit(waiting)


CTRL_C = """
import sys
from auto_research.execution.local import LocalExecutor
from auto_research.runtime.process import Job
with LocalExecutor(2) as executor:
    for number in (1, 2):
        executor.submit(
            Job(
                target="job_targets:wait_for_ever",
                payload={"note": f"{sys.argv[1]}/note-{number}"},
                timeout_s=300,
                preload=(),
                log_path=f"{sys.argv[1]}/log-{number}",
                result_path=f"{sys.argv[1]}/result-{number}",
            )
        )
    for job, outcome in executor.as_completed():
        print(outcome.state)
"""


def test_ctrl_c_ends_every_running_job(
    tmp_path: Path, until: Callable[..., None], alive: Callable[[int], bool]
) -> None:
    path = os.pathsep.join([str(SOURCE), str(Path(__file__).parent)])
    caller = subprocess.Popen(
        [sys.executable, "-c", CTRL_C, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    notes = [tmp_path / "note-1", tmp_path / "note-2"]
    until(lambda: all(note.exists() and note.read_text().endswith("\n") for note in notes) or caller.poll() is not None)
    caller.send_signal(signal.SIGINT)
    output, errors = caller.communicate(timeout=240)
    assert output == ""
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert not any(alive(int(note.read_text())) for note in notes)


def test_no_workers_is_an_error() -> None:
    with pytest.raises(UserError, match="at least 1"):
        LocalExecutor(0)


def test_it_is_an_executor() -> None:
    executor: Executor = LocalExecutor()
    executor.cancel()
    assert list(executor.as_completed()) == []
