"""The Ray executor, on a cluster of this machine: the same interface, the same outcomes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from auto_research.execution import Executor, in_order
from auto_research.execution.cluster import RayExecutor
from auto_research.runtime.errors import UserError
from auto_research.runtime.process import Job

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray")

MakeJob = Callable[..., Job]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster for the module, with two CPUs and one stand-in accelerator."""
    source = str(Path(__file__).parents[2] / "src")
    ray.init(
        num_cpus=2,
        resources={"accel": 1.0},
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": source}},
    )
    yield
    ray.shutdown()


def test_outcomes_are_those_of_this_machine(make_job: MakeJob) -> None:
    jobs = [make_job(function) for function in ("echo", "fail", "die", "absent")]
    with RayExecutor() as executor:
        outcomes = [outcome for _, outcome in in_order(executor, jobs)]
    assert [outcome.state for outcome in outcomes] == ["finished", "failed", "killed", "start_failed"]
    assert outcomes[0].result is not None
    assert outcomes[0].result["number"] == 1
    assert outcomes[1].reason == "ValueError: on purpose"
    assert ray.is_initialized()  # a cluster the executor did not start is not its to end


def test_a_fraction_shares_an_accelerator(make_job: MakeJob, tmp_path: Path) -> None:
    folder = tmp_path / "meeting"
    folder.mkdir()
    with RayExecutor(cpus=0.5, resources={"accel": 0.5}) as executor:
        for _ in range(2):
            executor.submit(make_job("meet", {"folder": str(folder), "together": 2}))
        assert [outcome.state for _, outcome in executor.as_completed()] == ["finished"] * 2


def test_a_crashed_worker_is_an_outcome(make_job: MakeJob, tmp_path: Path, until: Callable[..., None]) -> None:
    note = tmp_path / "note"
    with RayExecutor() as executor:
        executor.submit(make_job("wait_for_ever", {"note": str(note)}))
        until(lambda: note.exists() and note.read_text().endswith("\n"))
        job = psutil.Process(int(note.read_text()))
        guardian = job.parent()
        assert guardian is not None
        server = guardian.parent()
        assert server is not None
        worker = server.parent()
        assert worker is not None
        os.kill(worker.pid, 9)
        ((_, outcome),) = executor.as_completed()
    assert outcome.state == "killed"
    assert outcome.reason.startswith("on the cluster:")
    until(lambda: not job.is_running() or job.status() == psutil.STATUS_ZOMBIE)


def test_cancelling_ends_the_process_trees(
    make_job: MakeJob, tmp_path: Path, until: Callable[..., None], alive: Callable[[int], bool]
) -> None:
    note = tmp_path / "note"
    with RayExecutor() as executor:
        executor.submit(make_job("wait_for_ever", {"note": str(note)}))
        until(lambda: note.exists() and note.read_text().endswith("\n"))
    pid = int(note.read_text())
    until(lambda: not alive(pid))
    assert list(executor.as_completed()) == []


@pytest.mark.parametrize("need", [{"gpus": 0.5}, {"cpus": 1000.0}, {"resources": {"tpu": 1.0}}])
def test_what_no_node_has_is_an_error_and_no_endless_wait(need: dict[str, object]) -> None:
    if need == {"gpus": 0.5} and ray.cluster_resources().get("GPU"):
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match="No node of the cluster has"):
        RayExecutor(**need)  # type: ignore[arg-type]


def test_it_is_an_executor() -> None:
    executor: Executor = RayExecutor()
    assert list(executor.as_completed()) == []
