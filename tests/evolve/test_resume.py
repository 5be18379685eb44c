"""A controller that is killed, stopped, out of disk, or on a cluster: nothing is lost and the outcome is the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from controlled import children_of, names, outcome, small

from auto_research.evolve.board import board_html, without_times
from auto_research.evolve.controller import RunStopped, read_run, resume, run, stop
from auto_research.evolve.events import controller_alive, rebuild
from auto_research.evolve.records import RunConfig, RunRecord
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import read_jsonl, write_json_atomic

HERE = Path(__file__).parent


def config(**fields: Any) -> RunConfig:
    return small(
        **{"generations": 2, "population": 2, "confirm_seeds": [10, 11], "random_search": True, **fields},
        sizes={"pause_ms": 5},
    )


def drive(how: str, root: Path, *moment: str) -> subprocess.Popen[bytes]:
    """A controller in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, str(HERE / "drive.py"), how, str(root), *moment]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)


def kill_at(root: Path, how: str, *moment: str) -> None:
    process = drive(how, root, *moment)
    assert process.wait(300) == -signal.SIGKILL, process.stderr and process.stderr.read().decode()


def wait_until(true: Any, timeout_s: float = 120.0) -> None:
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def until_events(log: Path, more: int, process: subprocess.Popen[bytes]) -> None:
    """Wait for so many more events, or the end of the process."""
    target = len(read_jsonl(log)) + more
    wait_until(lambda: len(read_jsonl(log)) >= target or process.poll() is not None)


def assert_equal(record: RunRecord, whole: RunRecord) -> None:
    assert outcome(record) == outcome(whole)
    pages = [without_times(board_html(one.model_copy(update={"environment": {}}))) for one in (record, whole)]
    assert pages[0] == pages[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """The uninterrupted run."""
    return run(config(), tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "moments",
    [
        [("planned", "1"), ("write", "1"), ("decided", "1"), ("cell_started", "3"), ("test_opened", "1")],
        [("created", "1"), ("prepared", "1"), ("write", "4"), ("planned", "2"), ("confirmed", "1"), ("tested", "1")],
    ],
    ids=["proposal-write-promotion-training-test", "first-and-last"],
)
def test_killed_again_and_again_a_run_ends_as_if_never_interrupted(
    whole: RunRecord, moments: list[tuple[str, str]], tmp_path: Path
) -> None:
    write_json_atomic(tmp_path / "wanted.json", config())
    acknowledged: dict[str, Any] = {}
    for number, moment in enumerate(moments):
        kill_at(tmp_path, "resume" if number else "run", *moment)
        state = rebuild(tmp_path / "r")
        for cell, result in acknowledged.items():
            assert state.cells[cell] == result  # what was acknowledged stays, byte for byte
        acknowledged = dict(state.cells)
    record = resume(tmp_path / "r")
    assert_equal(record, whole)
    assert children_of(tmp_path) == []
    events = read_jsonl(tmp_path / "r/events.jsonl")
    assert names(events).count("test_opened") == 1
    completed: set[str] = set()
    for event in events:
        if event["event"] == "cell_started":
            assert event["cell"] not in completed
        if event["event"] == "cell_ended":
            completed.add(event["cell"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_any_time(whole: RunRecord, seed: int, tmp_path: Path) -> None:
    """Five kills, each some random number of events after the controller is up."""
    draw = random.Random(seed)
    write_json_atomic(tmp_path / "wanted.json", config())
    for number in range(5):
        process = drive("resume" if number else "run", tmp_path)
        until_events(tmp_path / "r/events.jsonl", draw.randrange(1, 14), process)
        time.sleep(draw.random() * 0.2)
        process.kill()
        process.wait()
    assert_equal(resume(tmp_path / "r"), whole)


@pytest.mark.slow
def test_cells_die_with_a_killed_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hanging cells, and their grandchildren, that ignore SIGTERM."""
    monkeypatch.setenv("TOY_FAULT", "hang")
    monkeypatch.setenv("TOY_NOTES", str(tmp_path))
    write_json_atomic(tmp_path / "wanted.json", small(generations=0))
    process = drive("run", tmp_path)
    wait_until(lambda: (tmp_path / "hang.json").exists() and len(children_of(tmp_path)) >= 4)
    process.kill()
    process.wait()
    wait_until(lambda: children_of(tmp_path) == [])
    assert read_run(tmp_path / "r").status == "interrupted"
    monkeypatch.delenv("TOY_FAULT")
    record = resume(tmp_path / "r")
    assert [[a.state for a in cell.attempts] for cell in record.trials[0].cells] == [["interrupted", "completed"]] * 2


@pytest.mark.slow
def test_a_second_controller_is_told_and_stop_ends_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_FAULT", "once-hang")
    monkeypatch.setenv("TOY_NOTES", str(tmp_path))
    write_json_atomic(tmp_path / "wanted.json", small(generations=0))
    first = drive("run", tmp_path)
    wait_until(lambda: (tmp_path / "hang.json").exists())
    second = drive("resume", tmp_path)
    said = second.communicate(timeout=120)[1].decode()
    assert second.returncode == 2
    assert f"driven by process {first.pid}" in said
    assert len(said.strip().splitlines()) == 1
    assert read_run(tmp_path / "r").status == "running"
    assert controller_alive(tmp_path / "r") == first.pid
    stop(tmp_path / "r")
    assert first.wait(60) == 0
    assert children_of(tmp_path) == []
    assert read_run(tmp_path / "r").status == "stopped"
    record = resume(tmp_path / "r")
    assert record.status == "finished"


# ---------------------------------------------------------------------------------------------------- full disk


def test_a_full_disk_met_by_a_cell_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_FAULT", "1=once-disk")
    monkeypatch.setenv("TOY_NOTES", str(tmp_path))
    with pytest.raises(RunStopped, match=r"No space left .* resume") as raised:
        run(small(generations=0), tmp_path)
    assert "\n" not in str(raised.value)
    record = resume(tmp_path / "r")
    assert [cell.state for cell in record.trials[0].cells] == ["completed"] * 2


@pytest.mark.slow
def test_a_full_disk_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """On a disk of 1 MB that another file fills more and more, until the run no longer fits."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        filler = disk / "filler"
        filler.write_bytes(b"x" * 600_000)
        acknowledged: list[dict[str, Any]] = []
        told: list[dict[str, Any]] = []

        def fill(event: dict[str, Any]) -> None:
            told.append(event)
            if event["event"] == "cell_ended":
                free = os.statvfs(disk)
                with open(filler, "ab") as file:
                    file.write(b"x" * max(0, free.f_bavail * free.f_bsize - 60_000))

        with pytest.raises(UserError, match="No space left") as raised:
            run(small(generations=1), disk, fill)
        assert isinstance(raised.value, RunStopped)
        assert "\n" not in str(raised.value)
        acknowledged = [event for event in told if event["event"] == "cell_ended"]
        assert acknowledged
        filler.unlink()
        state = rebuild(disk / "r")
        assert {event["cell"] for event in acknowledged} <= set(state.cells)
        assert state.events[: len(told)] == told
        record = resume(disk / "r")
        assert record.status == "finished"
        assert outcome(record) == outcome(run(small(generations=1), tmp_path))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# ------------------------------------------------------------------------------------------------------ cluster


@pytest.mark.slow
def test_on_a_cluster_a_killed_worker_is_replaced_and_the_outcome_is_the_same(tmp_path: Path) -> None:
    """A Ray worker is killed in mid-trial: its cell is tried again on another one."""
    ray = pytest.importorskip("ray")
    import psutil

    plain = small(generations=1, population=1, sizes={"pause_ms": 50})
    local = run(plain, tmp_path / "local")
    killed: list[int] = []

    def kill() -> None:
        beat = tmp_path / "ray/r/cells/baseline-search-seed1/attempt-1/heartbeat.json"
        wait_until(lambda: beat.exists() and '"phase": "train"' in beat.read_text())
        cell = psutil.Process(json.loads(beat.read_text())["pid"])
        worker = next(parent for parent in cell.parents() if "ray::" in " ".join(parent.cmdline()))
        worker.kill()
        killed.append(worker.pid)

    killer = threading.Thread(target=kill)
    killer.start()
    where = {"executor": "ray", "workers": 2, "storage": "none", "grace_s": 0.5}
    try:
        remote = run(plain.model_copy(update={"where": where}), tmp_path / "ray")
    finally:
        ray.shutdown()
        killer.join()
    assert killed
    assert outcome(remote) == outcome(local)
    tried = [[a.state for a in cell.attempts] for trial in remote.trials for cell in trial.cells]
    assert ["killed", "completed"] in tried
