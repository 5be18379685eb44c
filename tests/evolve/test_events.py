"""The event log: acknowledged means on the disk; state comes from files alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from auto_research.evolve.events import EventLog, controller_alive, plan_file, rebuild, result_file
from auto_research.evolve.records import CellResult, Plan, RunConfig
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import OutputLock, read_jsonl, write_json_atomic


def start(folder: Path) -> EventLog:
    config = RunConfig(run="r", workflow="toy:ToyWorkflow", generations=0, population=1, seeds=[0])
    write_json_atomic(folder / "config.json", config)
    return EventLog(folder)


def result(cell: str = "c", **facts: Any) -> CellResult:
    made: dict[str, Any] = {"metrics": {"closeness": 1.0}, "state": "completed", **facts}
    return CellResult(cell=cell, candidate="baseline", seed=0, role="search", **made)


def test_every_event_is_synced_before_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        done.append("sync")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    log = EventLog(tmp_path, lambda event: done.append(event["event"]))
    log.append("one")
    log.append("two", fact=1)
    assert done == ["sync", "sync", "one", "sync", "two"]  # the first also syncs the folder of the new file
    assert [(e["n"], e["event"]) for e in read_jsonl(log.path)] == [(0, "one"), (1, "two")]


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    start(tmp_path).append("one")
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"n": 1, "event": "tw')
    EventLog(tmp_path).append("two")
    assert [e["event"] for e in rebuild(tmp_path).events] == ["one", "two"]


def test_results_count_with_and_without_their_event(tmp_path: Path) -> None:
    log = start(tmp_path)
    log.append("queued", cells=[{"cell": c, "candidate": "baseline", "seed": 0, "role": "search"} for c in "abcd"])
    log.keep("cell_ended", result_file("a"), result("a"), cell="a")
    log.append("cell_started", cell="b", attempt=1)
    write_json_atomic(tmp_path / result_file("b"), result("b"))  # the controller died before the event
    log.append("cell_started", cell="c", attempt=2)
    state = rebuild(tmp_path)
    assert set(state.cells) == {"a", "b"}
    assert state.unacknowledged == [result_file("b")]
    assert state.running == {"c": 2}
    assert set(state.queued) == {"d"}


@pytest.mark.parametrize("damage", ["truncate", "change", "remove"])
def test_a_damaged_result_is_corrupt_and_no_result(damage: str, tmp_path: Path) -> None:
    log = start(tmp_path)
    log.keep("cell_ended", result_file("a"), result("a"), cell="a")
    path = tmp_path / result_file("a")
    text = path.read_text()
    if damage == "remove":
        path.unlink()
    else:
        path.write_text(text[:50] if damage == "truncate" else text.replace("1.0", "9.0"))
    state = rebuild(tmp_path)
    assert not state.cells
    assert list(state.corrupt) == [result_file("a")]
    log.append("discarded", file=result_file("a"))
    write_json_atomic(path, result("a", seconds=3.0))
    again = rebuild(tmp_path)
    assert set(again.cells) == {"a"}
    assert not again.corrupt


def test_an_unacknowledged_result_that_is_torn_is_corrupt(tmp_path: Path) -> None:
    start(tmp_path)
    (tmp_path / "cells/a").mkdir(parents=True)
    (tmp_path / result_file("a")).write_text('{"cell": "a"')
    assert list(rebuild(tmp_path).corrupt) == [result_file("a")]


def test_plans_come_in_the_order_of_generations(tmp_path: Path) -> None:
    log = start(tmp_path)
    for name in ("g10", "random", "g2", "confirm", "g0"):
        log.keep("planned", plan_file(name), Plan(generation=0, parent="", candidates=[]))
    assert list(rebuild(tmp_path).plans) == ["g0", "g2", "g10", "confirm", "random"]


def test_without_a_run_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run in"):
        rebuild(tmp_path)


def test_a_controller_is_alive_while_it_holds_the_lock(tmp_path: Path) -> None:
    start(tmp_path)
    assert controller_alive(tmp_path) is None
    with OutputLock(tmp_path / "events.jsonl"):
        assert controller_alive(tmp_path) == os.getpid()
    assert controller_alive(tmp_path) is None
    write_json_atomic(tmp_path / "events.jsonl.lock.holder", {"pid": os.getpid(), "since": "before a crash"})
    assert controller_alive(tmp_path) is None  # this process lives and does not hold the lock
