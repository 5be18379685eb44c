"""A cluster that the executor starts for itself ends with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from auto_research.execution.cluster import RayExecutor
from auto_research.runtime.process import Job

ray = pytest.importorskip("ray")


@pytest.mark.slow
def test_a_cluster_of_its_own(make_job: Callable[..., Job]) -> None:
    with RayExecutor(local={"num_cpus": 1, "object_store_memory": 100 * 2**20}) as executor:
        executor.submit(make_job("echo", preload=()))
        ((_, outcome),) = executor.as_completed()
    assert outcome.state == "finished", outcome
    assert not ray.is_initialized()
