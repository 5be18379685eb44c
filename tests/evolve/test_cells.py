"""Cells: what an ended process means, heartbeats, digests; attempts on the disk."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from auto_research.evolve.attempts import Ended, await_end, next_change, raw_result, read_attempts
from auto_research.evolve.cells import (
    LOG_BYTES,
    Cell,
    Heartbeat,
    artefact_folder,
    attempt_folder,
    cell_id,
    checked_scores,
    checkpoints,
    end_of,
    folder_digest,
    measured,
    read_heartbeat,
    result_of,
    sizes_for,
)
from auto_research.evolve.records import Attempt, Candidate, RunConfig
from auto_research.evolve.workflow import NonFinite, Scores
from auto_research.evolve.workflows import workflow as find_workflow
from auto_research.runtime.errors import UserError
from auto_research.runtime.process import ChildError, Outcome
from auto_research.runtime.records import write_json_atomic

RAW: dict[str, Any] = {
    "metrics": {"closeness": 0.5},
    "units": [0.5],
    "seconds": 1.0,
    "cpu_seconds": 0.5,
    "peak_rss_bytes": 10,
    "peak_device_bytes": 0,
    "device": "cpu",
    "artefact": "abc",
}
SIZES = {"micro_batch": 8, "accumulate": 1}


def outcome(state: str, **facts: Any) -> Outcome:
    return Outcome(state=state, started_at="2026-01-01T00:00:00Z", log_path="/x", **facts)  # type: ignore[arg-type]


def error(*kinds: str, message: str = "planted") -> ChildError:
    return ChildError(type=f"builtins.{kinds[0]}", kinds=[*kinds, "Exception"], message=message, traceback="Traceback")


@pytest.mark.parametrize(
    ("ended", "state", "transient"),
    [
        (outcome("finished", result=RAW), "completed", False),
        (outcome("finished", result={"metrics": {}}), "interrupted", True),
        (outcome("timed_out", reason="not finished after 1 s"), "timed_out", False),
        (outcome("out_of_memory", reason="MemoryError"), "out_of_memory", True),
        (outcome("failed", reason="ValueError: x", error=error("ValueError")), "failed", False),
        (outcome("failed", reason="x", error=error("NonFinite", "ArithmeticError")), "non_finite", False),
        (outcome("failed", reason="x", error=error("ConnectionResetError", "OSError")), "failed", True),
        (outcome("failed", reason="x", error=error("FileNotFoundError", "OSError")), "failed", False),
        (outcome("failed", reason="x", error=error("SealedTest", "RuntimeError")), "failed", False),
        (outcome("failed", exit_code=0, reason="its result is not valid JSON (x)"), "interrupted", True),
        (outcome("failed", exit_code=0, reason="ended with exit code 0 and without a result"), "failed", False),
        (outcome("killed", signal=9, reason="ended by signal 9 (SIGKILL)"), "killed", True),
        (outcome("killed", signal=11, reason="ended by signal 11 (SIGSEGV)"), "killed", False),
        (outcome("killed", reason="on the cluster: a worker died"), "killed", True),
        (outcome("killed", reason="cancelled by the caller"), "interrupted", True),
        (outcome("start_failed", reason="cannot start a process"), "failed", True),
    ],
)
def test_what_an_end_means(ended: Outcome, state: str, transient: bool, tmp_path: Path) -> None:
    end = end_of(ended, tmp_path, SIZES, {})
    assert (end.attempt.state, end.transient, end.no_space) == (state, transient, False)


@pytest.mark.parametrize("micro", [1, 3])
def test_a_micro_batch_that_cannot_be_halved_is_not_tried_again(micro: int, tmp_path: Path) -> None:
    assert not end_of(outcome("out_of_memory"), tmp_path, {"micro_batch": micro}, {}).transient


@pytest.mark.parametrize(
    "ended",
    [
        outcome("failed", reason="x", error=error("OSError", message="[Errno 28] No space left on device: 'x'")),
        outcome("start_failed", reason="cannot write /x (No space left on device): choose another output folder"),
    ],
)
def test_a_full_disk_is_no_fault_of_the_cell(ended: Outcome, tmp_path: Path) -> None:
    assert end_of(ended, tmp_path, SIZES, {}).no_space


def test_a_failed_attempt_keeps_what_explains_it(tmp_path: Path) -> None:
    (tmp_path / "heartbeat.json").write_text(json.dumps({"step": 7, "loss": 0.25}))
    (tmp_path / "peaks.json").write_text(json.dumps({"peak_rss_bytes": 5, "peak_device_bytes": 6}))
    log = "x" * 50_000 + "é the end"
    ended = outcome("failed", reason="ValueError: planted", exit_code=1, log_tail=log, error=error("ValueError"))
    end = end_of(ended.model_copy(update={"peak_rss_bytes": 9}), tmp_path, SIZES, {"micro_batch": 4})
    attempt = end.attempt
    assert attempt.error == "builtins.ValueError: planted"
    assert attempt.traceback == "Traceback"
    assert (attempt.exit_code, attempt.last_step, attempt.last_loss) == (1, 7, 0.25)
    assert attempt.changed == {"micro_batch": 4}
    assert attempt.log_tail.endswith("the end")
    assert LOG_BYTES - 4 <= len(attempt.log_tail.encode()) <= LOG_BYTES
    result = result_of(Cell(candidate(), 3, "search"), [attempt], None, end.peaks)
    assert result.metrics is None
    assert (result.state, result.peak_rss_bytes, result.peak_device_bytes) == ("failed", 9, 6)


def candidate() -> Candidate:
    return Candidate(id="g1-1", generation=1, origin="paper-operator", genome={})


def test_a_completed_cell_knows_where_its_weights_are() -> None:
    lost, done = Attempt(state="interrupted", seconds=0), Attempt(state="completed", seconds=1)
    result = result_of(Cell(candidate(), 3, "search"), [lost, done], {**RAW, "cells": "more is fine"}, {})
    assert result.cell == cell_id(candidate(), 3, "search") == "g1-1-search-seed3"
    assert result.metrics == {"closeness": 0.5}
    assert artefact_folder(Path("run"), result) == Path("run/cells/g1-1-search-seed3/attempt-2/artefact")


@pytest.mark.parametrize("broken", [{"metrics": None}, {"units": "x"}, {"metrics": {"closeness": "high"}}])
def test_a_raw_result_is_checked(broken: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        measured({**RAW, **broken})
    (tmp_path / "result.json").write_text(json.dumps({**RAW, **broken}))
    assert raw_result(tmp_path) is None
    (tmp_path / "result.json").write_text(json.dumps(RAW)[:-5])
    assert raw_result(tmp_path) is None
    (tmp_path / "result.json").write_text(json.dumps(RAW))
    assert raw_result(tmp_path) == RAW


def test_scores_must_be_finite_and_hold_the_primary_metric() -> None:
    assert checked_scores(Scores({"a": 1, "b": 2.5}, [1, 2]), "a") == ({"a": 1.0, "b": 2.5}, [1.0, 2.0])
    for bad in (Scores({"a": math.nan}), Scores({"a": 1.0, "b": math.inf}), Scores({"a": 1.0}, [math.nan])):
        with pytest.raises(NonFinite):
            checked_scores(bad, "a")
    with pytest.raises(KeyError, match="primary"):
        checked_scores(Scores({"b": 1.0}), "a")


def test_the_heartbeat_shows_step_and_loss_and_refuses_nan(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    beat = Heartbeat(path)
    with beat.phase("train", steps=True):
        beat(3, 0.5)
    found = read_heartbeat(tmp_path)
    assert (found["phase"], found["step"], found["loss"], found["pid"]) == ("train", 3, 0.5, os.getpid())
    with pytest.raises(NonFinite, match="step 4"), beat.phase("train", steps=True):
        beat(4, math.nan)
    assert (read_heartbeat(tmp_path)["step"], read_heartbeat(tmp_path)["loss"]) == (4, None)


@pytest.mark.parametrize("works", [True, False])
def test_outside_training_processor_time_is_the_sign_of_life(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A phase without steps beats while it computes and not while it sleeps."""
    looks = threading.Semaphore(0)
    clock = iter(range(1_000))
    monkeypatch.setattr("auto_research.evolve.cells.BEAT_S", 0.01)

    def used() -> float:
        looks.release()
        return float(next(clock)) if works else 0.0

    monkeypatch.setattr("auto_research.evolve.cells._processor_seconds", used)
    beat = Heartbeat(tmp_path / "heartbeat.json")
    with beat.phase("validate"):
        before = read_heartbeat(tmp_path)["time"]
        for _ in range(4):
            assert looks.acquire(timeout=30)
        after = read_heartbeat(tmp_path)["time"]
    assert (after > before) == works


def test_the_digest_of_a_folder_sees_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    first = folder_digest(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    second = folder_digest(tmp_path)
    (tmp_path / "b").write_text("2")
    assert len({first, second, folder_digest(tmp_path)}) == 3


def test_sizes_are_overridden_by_name() -> None:
    config = RunConfig(run="r", workflow="toy:ToyWorkflow", generations=0, population=1, seeds=[0], sizes={"steps": 3})
    workflow = find_workflow("toy:ToyWorkflow")
    assert sizes_for(workflow, config)["steps"] == 3
    assert sizes_for(workflow, config)["rows"] == 96
    with pytest.raises(UserError, match=r"no size 'stepz'.*'steps'"):
        sizes_for(workflow, config.model_copy(update={"sizes": {"stepz": 3}}))
    assert sizes_for(workflow, config.model_copy(update={"sizes": {"pause_ms": 0}}))["pause_ms"] == 0
    for name, value in (("steps", 0), ("pause_ms", -1)):
        with pytest.raises(UserError, match=rf"size {name} is at least \d, not {value}"):
            sizes_for(workflow, config.model_copy(update={"sizes": {name: value}}))


def test_after_lack_of_memory_the_effective_batch_stays() -> None:
    def ended(state: str, changed: dict[str, int]) -> Ended:
        return Ended(attempt=Attempt(state=state, seconds=1, changed=changed), again=True)  # type: ignore[arg-type]

    assert next_change([], SIZES) == {}
    first = next_change([ended("out_of_memory", {})], SIZES)
    assert first == {"micro_batch": 4, "accumulate": 2}
    assert next_change([ended("interrupted", first)], SIZES) == first
    assert next_change([ended("out_of_memory", first)], SIZES) == {"micro_batch": 2, "accumulate": 4}


def test_attempts_are_read_in_order(tmp_path: Path) -> None:
    for number, state in enumerate(("killed", "completed"), start=1):
        ended = Ended(attempt=Attempt(state=state, seconds=number), again=False)  # type: ignore[arg-type]
        write_json_atomic(attempt_folder(tmp_path, "c", number) / "attempt.json", ended)
    assert [ended.attempt.state for ended in read_attempts(tmp_path, "c")] == ["killed", "completed"]
    assert read_attempts(tmp_path, "other") == []


def test_an_abandoned_process_is_waited_for_and_then_killed(tmp_path: Path) -> None:
    import psutil

    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        beat = Heartbeat(tmp_path / "heartbeat.json")
        facts = read_heartbeat(tmp_path)
        created = psutil.Process(child.pid).create_time()
        await_end({**facts, "pid": child.pid, "created": created - 100}, 0)  # another process has that number now
        await_end({**facts, "pid": child.pid, "created": created, "host": "elsewhere"}, 0)
        assert child.poll() is None
        await_end({**facts, "pid": child.pid, "created": created}, -4.9)
        assert child.wait(30) == -signal.SIGKILL
        await_end({**facts, "pid": child.pid, "created": created}, 0)
        assert beat is not None
    finally:
        child.kill()
        child.wait()


def test_checkpoints_have_a_folder_inside_cells_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert checkpoints() is None
    monkeypatch.setenv("AUTO_RESEARCH_CELL_CHECKPOINTS", str(tmp_path))
    assert checkpoints() == tmp_path
