"""Jobs and waiting for the executor tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from auto_research.runtime.process import Job


@pytest.fixture
def make_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """``make_job("function", payload, **fields)``: a job of job_targets.py."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    count = 0

    def make(function: str, payload: dict[str, Any] | None = None, **fields: Any) -> Job:
        nonlocal count
        count += 1
        settings: dict[str, Any] = {
            "target": f"job_targets:{function}",
            "payload": {"number": count, **(payload or {})},
            "timeout_s": 300,
            "grace_s": 0.5,
            "log_path": tmp_path / f"{count}.log",
            "result_path": tmp_path / f"{count}.json",
        }
        return Job(**{**settings, **fields})

    return make


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Wait until something another process does can be seen."""

    def wait(condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < give_up, "it did not happen within two minutes"
            time.sleep(0.01)

    return wait


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Whether a process runs; a zombie that waits for its parent does not."""

    def check(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return check
