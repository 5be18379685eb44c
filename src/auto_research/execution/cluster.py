"""Run jobs on a Ray cluster; needs the ``cluster`` extra (ray)."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import auto_research
from auto_research.runtime.errors import UserError
from auto_research.runtime.process import LOG_TAIL_BYTES, Job, Outcome, State, run_isolated
from auto_research.runtime.records import utc_now

__all__ = ["RayExecutor"]

PACKAGE_PARENT = str(Path(auto_research.__file__).resolve().parents[1])


def check_reachable(address: str, timeout_s: float = 10.0) -> None:
    """Try the port of ``host:port`` or ``ray://host:port``: Ray itself keeps trying for minutes.

    Other forms of address (``auto``, the name of a session) are left to Ray.

    Raises:
        UserError: nothing listens there.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"The Ray cluster {address} does not answer ({error}): check --address.") from None


def _run_job(job: str, path: list[str]) -> str:
    """On a worker: the job runs in an isolated process below it, in Ray's share of CPUs and GPUs."""
    sys.path.extend(entry for entry in path if entry not in sys.path)
    return run_isolated(Job.model_validate_json(job)).model_dump_json()


class RayExecutor:
    """Jobs on a Ray cluster; see :class:`auto_research.execution.Executor`.

    A job's log and result are files of the node it ran on, on a shared file system those of every node; the
    outcome carries the result and the tail of the log in any case. Nodes need this package installed, except
    on one machine. Nothing is retried: a crashed worker is an outcome.

    Args:
        address: of the cluster, such as ``auto`` or ``ray://host:10001``; None starts one on this machine,
            which ends with the executor.
        cpus: CPUs of a job.
        gpus: GPUs of a job; a fraction shares one, by its measured memory.
        resources: amounts of the cluster's custom resources.
        local: how a cluster of this machine is started: further arguments of ``ray.init``.

    Raises:
        UserError: ray is not installed, the cluster does not answer, or no node could ever hold a job.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        resources: Mapping[str, float] | None = None,
        local: Mapping[str, Any] | None = None,
    ) -> None:
        if address is not None:
            check_reachable(address)
        try:
            import ray
        except ImportError:
            raise UserError("A cluster needs ray: pip install 'auto-research[cluster]'.") from None
        self._ray = ray
        self._jobs: dict[Any, Job] = {}
        self._started = not ray.is_initialized()
        if self._started:
            self._connect(address, dict(local or {}))
        need = {"CPU": cpus, "GPU": gpus, **(resources or {})}
        try:
            self._check_room({name: amount for name, amount in need.items() if amount})
        except BaseException:
            self.close()
            raise
        self._remote = ray.remote(_run_job).options(
            num_cpus=cpus, num_gpus=gpus, resources=dict(resources or {}), max_retries=0
        )

    def _connect(self, address: str | None, local: dict[str, Any]) -> None:
        path = os.pathsep.join(filter(None, (PACKAGE_PARENT, os.environ.get("PYTHONPATH"))))
        settings: dict[str, Any] = {
            "runtime_env": {"env_vars": {"PYTHONPATH": path}},
            "log_to_driver": False,
            "logging_level": "ERROR",
        }
        if address is None:
            settings.update(include_dashboard=False, **local)
        try:
            self._ray.init(address=address or "local", **settings)
        except (ConnectionError, TimeoutError, ValueError) as error:
            said = str(error).strip().partition("\n")[0]
            raise UserError(f"The Ray cluster {address} does not answer ({said}): check --address.") from error

    def _check_room(self, need: Mapping[str, float]) -> None:
        """Ray waits for ever, in silence, for what no node has."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if not any(all(node.get(name, 0) >= amount for name, amount in need.items()) for node in nodes):
            asked = ", ".join(f"{amount:g} {name}" for name, amount in need.items())
            most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in need}
            there = ", ".join(f"{amount:g} {name}" for name, amount in most.items())
            raise UserError(f"No node of the cluster has {asked} (the most on one: {there}): ask for less.")

    def submit(self, job: Job) -> None:
        self._jobs[self._remote.remote(job.model_dump_json(), sys.path)] = job

    def as_completed(self) -> Iterator[tuple[Job, Outcome]]:
        while self._jobs:
            (ready, *_), _ = self._ray.wait(list(self._jobs), num_returns=1)
            job = self._jobs.pop(ready)
            yield job, self._outcome(job, ready)

    def _outcome(self, job: Job, reference: Any) -> Outcome:
        """What the worker reports; if it cannot report, what Ray says about it."""
        try:
            return Outcome.model_validate_json(self._ray.get(reference))
        except self._ray.exceptions.OutOfMemoryError as error:
            state: State = "out_of_memory"
            said = str(error)
        except self._ray.exceptions.WorkerCrashedError as error:
            state, said = "killed", str(error)
        except self._ray.exceptions.RayError as error:  # the package is missing there, the node is gone, ...
            state, said = "start_failed", str(error)
        return Outcome(
            state=state,
            reason=f"on the cluster: {said.strip().splitlines()[-1]}",
            started_at=utc_now(),
            log_path=str(job.log_path),
            log_tail=said[-LOG_TAIL_BYTES:],
        )

    def cancel(self) -> None:
        """See the protocol. Workers are killed; their jobs' process trees end within the jobs' grace."""
        for reference in list(self._jobs):
            with suppress(self._ray.exceptions.RayError):  # it has ended already
                self._ray.cancel(reference, force=True)
        self._jobs.clear()

    def close(self) -> None:
        """Leave the cluster, or end it if it was started here."""
        if self._started:
            self._ray.shutdown()
            self._started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        self.close()
