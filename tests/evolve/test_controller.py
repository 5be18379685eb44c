"""The controller on the toy workflow: one whole run looked at from all sides, and every planted fault."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from controlled import children_of, names, outcome, position, small
from toy import ToyWorkflow

from auto_research.evolve import controller
from auto_research.evolve.attempts import LOST
from auto_research.evolve.board import command
from auto_research.evolve.cells import artefact_folder, folder_digest
from auto_research.evolve.controller import fork, open_test, plan_only, read_run, resume, run, stop
from auto_research.evolve.events import rebuild
from auto_research.evolve.plan import runs
from auto_research.evolve.quarantine import stage
from auto_research.evolve.records import RunConfig, RunRecord
from auto_research.evolve.storage import open_storage, open_study
from auto_research.evolve.workflow import SealedTest, become_finaliser
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import OutputLock, read_jsonl


class Whole:
    """A finished run."""

    def __init__(self, folder: Path, record: RunRecord, told: list[dict[str, Any]]) -> None:
        self.folder, self.record, self.told = folder, record, told
        self.events = read_jsonl(folder / "events.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    root = tmp_path_factory.mktemp("whole")
    told: list[dict[str, Any]] = []
    config = small(population=3, confirm_seeds=[10, 11], random_search=True, direction="bias, exchange and decor")
    return Whole(root / "r", run(config, root, told.append), told)


# ------------------------------------------------------------------------------------------------- a whole run


def test_the_run_finds_what_helps(whole: Whole) -> None:
    record = whole.record
    champion = next(trial for trial in record.trials if trial.candidate.id == record.champion)
    assert champion.candidate.operators == ["bias"]
    assert record.status == "finished"
    assert record.confirmed is not None
    assert record.confirmed.gain > 0.05
    assert record.sentence
    hurt = next(trial for trial in record.trials if trial.candidate.operators == ["exchange"])
    assert hurt.gain is not None
    assert hurt.gain.gain < -0.1


def test_the_planted_no_op_is_a_duplicate_and_never_runs(whole: Whole) -> None:
    trial = next(trial for trial in whole.record.trials if trial.candidate.operators == ["decor"])
    assert trial.state == "duplicate"
    assert trial.candidate.duplicate_of == "baseline"
    assert not trial.cells
    assert not list((whole.folder / "cells").glob(f"{trial.candidate.id}-*"))


def test_every_event_is_told_and_on_the_disk(whole: Whole) -> None:
    assert whole.told == whole.events
    assert [event["n"] for event in whole.events] == list(range(len(whole.events)))


def test_data_are_recorded_before_generation_0(whole: Whole) -> None:
    assert position(whole.events, "prepared") < position(whole.events, "planned", plan="g0")
    assert whole.record.prepared is not None
    assert whole.record.prepared.hygiene["distinct validation"] == 96
    assert whole.record.prepared.floors["mean"] < whole.record.prepared.anchors["least squares"]


def test_a_plan_is_written_before_its_first_cell_starts(whole: Whole) -> None:
    for name in ("g0", "g1", "confirm", "random"):
        ids = rebuild(whole.folder).plans[name].candidates
        role = {"confirm": "confirm", "random": "random"}.get(name, "search")
        first = min(
            i
            for i, event in enumerate(whole.events)
            if event["event"] == "cell_started" and any(event["cell"].startswith(f"{c.id}-{role}-") for c in ids)
        )
        assert position(whole.events, "planned", plan=name) < first


def test_random_search_has_the_budget_of_the_search(whole: Whole) -> None:
    search = sum(len(trial.cells) for trial in whole.record.trials if trial.candidate.id != "baseline")
    assert search == sum(len(trial.cells) for trial in whole.record.random_search) > 0
    assert all(trial.gain is not None for trial in whole.record.random_search if runs(trial.candidate))


def test_the_test_is_opened_once_after_everything_and_announced(whole: Whole) -> None:
    events = whole.events
    assert names(events).count("test_opened") == 1
    opened = position(events, "test_opened")
    assert max(position(events, "confirmed"), position(events, "planned", plan="random")) < opened
    assert all(e["cell"].endswith("-test-seed0") for e in events[opened:] if e["event"] == "cell_started")
    test = whole.record.test
    assert test is not None
    assert test.openings == 1
    assert test.opened == events[opened]["time"]
    assert set(test.metrics) == {"baseline", whole.record.champion}
    assert test.gain is not None
    assert test.gain.gain > 0.05


def test_the_finaliser_evaluates_the_stored_weights(whole: Whole) -> None:
    """Its numbers are those of the weights on the disk, evaluated here by other means."""
    import numpy as np

    cells = [c for c in rebuild(whole.folder).cells.values() if c.role == "confirm" and c.candidate == "baseline"]
    workflow = ToyWorkflow()
    sizes = workflow.sizes("smoke")
    x, y = workflow._rows("test", sizes)
    found = []
    for cell in cells:
        folder = artefact_folder(whole.folder, cell)
        assert folder_digest(folder) == cell.artefact
        found.append(np.mean(1 / (1 + (x * np.load(folder / "weights.npy")[0] - y) ** 2)))
    assert whole.record.test is not None
    assert whole.record.test.metrics["baseline"]["closeness"] == pytest.approx(np.mean(found), rel=1e-12)


def test_metrics_are_those_of_a_run_in_this_process(whole: Whole) -> None:
    workflow = ToyWorkflow()
    sizes = workflow.sizes("smoke")
    data = workflow.load(sizes, None)
    for trial in whole.record.trials:
        for cell in trial.cells:
            made = workflow.train(trial.candidate.genome, data, cell.seed, sizes, "cpu", lambda step, loss: None)
            scores = workflow.validate(made, data, sizes, "cpu")
            assert cell.metrics == scores.metrics
            assert cell.units == scores.units


def test_cells_say_what_they_took(whole: Whole) -> None:
    for cell in rebuild(whole.folder).cells.values():
        assert cell.state == "completed"
        assert cell.seconds > 0
        assert cell.peak_rss_bytes > 1_000_000
        assert [attempt.state for attempt in cell.attempts] == ["completed"]
    assert whole.record.used["cells"] == len(rebuild(whole.folder).cells)


def test_a_record_is_rebuilt_from_files_alone(whole: Whole) -> None:
    (whole.folder / "record.json").unlink(missing_ok=True)
    assert read_run(whole.folder) == whole.record


def test_resuming_a_finished_run_changes_nothing(whole: Whole) -> None:
    before = (whole.folder / "events.jsonl").read_bytes()
    assert resume(whole.folder) == whole.record
    assert (whole.folder / "events.jsonl").read_bytes() == before


def test_a_second_opening_needs_a_new_run(whole: Whole) -> None:
    with pytest.raises(UserError, match=r"opened on .*once a run"):
        open_test(whole.folder)


def test_a_run_is_not_overwritten(whole: Whole) -> None:
    with pytest.raises(UserError, match=r"exists .* resume"):
        run(whole.record.config, whole.folder.parent)


def test_a_changed_configuration_is_refused_and_fork_offered(whole: Whole) -> None:
    for change in ({"seeds": [0, 1, 2]}, {"z": 2.0}, {"sizes": {"steps": 3}}, {"changes": {"train.lr": 0.2}}):
        changed = whole.record.config.model_copy(update=change)
        with pytest.raises(UserError, match=rf"\({next(iter(change))}\).*evolve fork"):
            resume(whole.folder, changed)


def test_an_edited_configuration_file_is_refused(whole: Whole, tmp_path: Path) -> None:
    copy = tmp_path / "r"
    shutil.copytree(whole.folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "run_seed": 5}))
    with pytest.raises(UserError, match=r"was edited.*evolve fork"):
        resume(copy)


def test_limits_and_places_may_change_on_resume(whole: Whole) -> None:
    other = whole.record.config.model_copy(update={"retries": 3, "where": {"workers": 1, "storage": "none"}})
    assert resume(whole.folder, other).champion == whole.record.champion
    assert rebuild(whole.folder).config.retries == 3
    assert resume(whole.folder, whole.record.config) == whole.record


def test_a_fork_is_the_same_run_with_a_change(whole: Whole) -> None:
    made = fork(whole.folder, {"train.lr": 0.2}, run_seed=4)
    assert (made.run, made.forked_from) == ("r-fork1", "r")
    assert (made.changes, made.run_seed) == ({"train.lr": 0.2}, 4)
    assert made.fingerprint() != whole.record.config.fingerprint()
    assert fork(whole.folder, {"train.lr": 0.2}, run="mine").run == "mine"
    bad: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"train.lrr": 0.2}, {}, "train.lr"),
        ({"model.bias": "yes"}, {}, "no value 'yes'"),
        ({}, {"seedz": [1]}, "seeds"),
        ({}, {"population": 0}, "population"),
        ({}, {}, "repeat"),
    ]
    for changes, settings, words in bad:
        with pytest.raises(UserError, match=words):
            fork(whole.folder, changes, **settings)


def test_a_second_controller_gets_one_sentence(whole: Whole) -> None:
    with OutputLock(whole.folder / "events.jsonl"):
        seconds: list[Callable[[], object]] = [
            lambda: resume(whole.folder),
            lambda: run(whole.record.config, whole.folder.parent),
        ]
        for second in seconds:
            with pytest.raises(UserError, match=rf"driven by process {os.getpid()}.*evolve stop") as raised:
                second()
            assert "\n" not in str(raised.value)
        assert read_run(whole.folder).status == "finished"  # readers need no lock


def test_no_controller_to_stop(whole: Whole) -> None:
    with pytest.raises(UserError, match="nothing to stop"):
        stop(whole.folder)


def test_without_an_announcement_nobody_becomes_the_finaliser(whole: Whole, tmp_path: Path) -> None:
    for events, opening in ((whole.folder / "events.jsonl", 2), (tmp_path / "none.jsonl", 1)):
        with pytest.raises(SealedTest, match="does not say"):
            become_finaliser(events, opening)


def test_the_test_stays_sealed_in_the_controller() -> None:
    with pytest.raises(SealedTest):
        ToyWorkflow().load_test(ToyWorkflow().sizes("smoke"), None)


def test_external_code_is_shown_as_it_stood_and_never_runs(tmp_path: Path) -> None:
    """What is staged after the run began is not in it, nor after `resume`."""
    folder = tmp_path / "quarantine"
    stage({"code.py": "raise SystemExit('it ran')\n"}, folder, "first", "a generator")
    config = small(generations=0, seeds=[0], where={"quarantine": str(folder)})
    assert [c.id for c in plan_only(config).quarantined] == ["quarantined-first"]
    record = run(config, tmp_path)
    stage({"code.py": "x = 1\n"}, folder, "second", "a generator")
    for seen in (record, resume(tmp_path / "r"), read_run(tmp_path / "r")):
        assert [(c.id, c.origin) for c in seen.quarantined] == [("quarantined-first", "quarantined")]
        assert "a generator (not checked yet), waits for a person's approval" in seen.quarantined[0].reason
    assert "quarantined-first" in (tmp_path / "r/board.html").read_text()
    assert not list((tmp_path / "r/cells").glob("quarantined*"))


# ----------------------------------------------------------------------------------------------- planted faults

FAULTS = {
    1: "nan", 2: "memory", 3: "always-memory", 4: "segfault", 5: "kill", 6: "once-kill", 7: "exception",
    8: "once-io", 9: "output", 10: "once-corrupt", 11: "hang", 12: "stall", 13: "peek",
    14: "peek-finaliser", 15: "peek-reload",
}  # fmt: skip


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A baseline of sixteen seeds, each with its own fault."""
    root = tmp_path_factory.mktemp("faulty")
    config = small(
        generations=0,
        seeds=list(range(16)),
        trial_timeout_s=8,
        stall_s=4,
        memory_limit_mb=1200,
        where={"test": "manual"},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOY_FAULT", ",".join(f"{seed}={fault}" for seed, fault in FAULTS.items()))
        patch.setenv("TOY_NOTES", str(root))
        return Whole(root / "r", run(config, root), [])


def cell_of(faulty: Whole, fault: str) -> Any:
    seed = next((seed for seed, name in FAULTS.items() if name == fault), 0)
    return next(cell for cell in faulty.record.trials[0].cells if cell.seed == seed)


@pytest.mark.parametrize(
    ("fault", "state", "attempts"),
    [
        ("none", "completed", ["completed"]),
        ("nan", "non_finite", ["non_finite"]),
        ("memory", "completed", ["out_of_memory", "completed"]),
        ("always-memory", "out_of_memory", ["out_of_memory", "out_of_memory"]),
        ("segfault", "killed", ["killed"]),
        ("kill", "killed", ["killed", "killed"]),
        ("once-kill", "completed", ["killed", "completed"]),
        ("exception", "failed", ["failed"]),
        ("once-io", "completed", ["failed", "completed"]),
        ("output", "failed", ["failed"]),
        ("once-corrupt", "completed", ["interrupted", "completed"]),
        ("hang", "timed_out", ["timed_out"]),
        ("stall", "timed_out", ["timed_out"]),
        ("peek", "failed", ["failed"]),
        ("peek-finaliser", "failed", ["failed"]),
        ("peek-reload", "failed", ["failed"]),
    ],
)
def test_every_fault_ends_in_its_state(faulty: Whole, fault: str, state: str, attempts: list[str]) -> None:
    cell = cell_of(faulty, fault)
    assert cell.state == state
    assert [attempt.state for attempt in cell.attempts] == attempts
    assert (cell.metrics is not None) == (state == "completed")


def test_failures_keep_their_reasons(faulty: Whole) -> None:
    def last(fault: str) -> Any:
        return cell_of(faulty, fault).attempts[-1]

    assert (last("segfault").signal, last("kill").signal) == (11, 9)
    assert last("exception").error == "builtins.ValueError: planted: shapes do not match"
    assert "in plant" in last("exception").traceback
    assert (last("exception").exit_code, last("exception").last_step) == (1, 3)
    assert "not finished after 8 s" in last("hang").reason
    assert last("hang").last_step > 3  # it went on giving signs of life: the deadline ended it
    assert "4 s" in last("stall").reason
    for way in ("peek", "peek-finaliser", "peek-reload"):
        assert "SealedTest" in last(way).error
    assert last("nan").last_step == 4
    assert last("nan").last_loss is None
    log = last("output").log_tail
    assert "planted after much output" in log
    assert 10_000 < len(log.encode()) <= 20_480
    assert cell_of(faulty, "exception").peak_rss_bytes > 1_000_000


def test_after_lack_of_memory_half_the_micro_batch_gives_the_same_result(faulty: Whole) -> None:
    cell = cell_of(faulty, "memory")
    assert cell.attempts[-1].changed == {"micro_batch": 4, "accumulate": 2}
    workflow = ToyWorkflow()
    sizes = workflow.sizes("smoke")
    data = workflow.load(sizes, None)
    made = workflow.train(workflow.space.baseline(), data, cell.seed, sizes, "cpu", lambda step, loss: None)
    expected = workflow.validate(made, data, sizes, "cpu").metrics["closeness"]
    assert cell.metrics["closeness"] == pytest.approx(expected, rel=1e-9)
    events = [e for e in faulty.events if e.get("cell") == cell.cell and e["event"] == "cell_started"]
    assert [event.get("changed") for event in events] == [None, {"micro_batch": 4, "accumulate": 2}]


def test_nothing_is_alive_after_a_timeout(faulty: Whole) -> None:
    for pid in json.loads((faulty.folder.parent / "hang.json").read_text()):
        assert not psutil.pid_exists(pid)
    assert children_of(faulty.folder) == []


def test_a_trial_with_failed_seeds_is_partial(faulty: Whole) -> None:
    trial = faulty.record.trials[0]
    assert trial.state == "partial"
    assert faulty.record.status == "finished"
    done = [cell for cell in trial.cells if cell.state == "completed"]
    assert trial.mean == pytest.approx(sum(cell.metrics["closeness"] for cell in done if cell.metrics) / len(done))


def test_the_test_waits_when_told_and_opens_once(faulty: Whole) -> None:
    assert "test_opened" not in names(faulty.events)
    record = open_test(faulty.folder)
    assert record.test is not None
    assert list(record.test.metrics) == ["baseline"]
    assert record.test.gain is None
    with pytest.raises(UserError, match="once a run"):
        open_test(faulty.folder)


# -------------------------------------------------------------------------------------------- starts and stops


def test_parts_that_share_an_example_stop_the_run_before_any_cell(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train and validation share: 1"):
        run(small(workflow="toy:LeakyToy"), tmp_path)
    assert names(read_jsonl(tmp_path / "r/events.jsonl")) == ["created", "prepared", "leak"]
    assert not (tmp_path / "r/cells").exists()
    record = read_run(tmp_path / "r")
    assert record.prepared is not None
    assert record.prepared.hygiene["train and validation share"] == 1
    assert record.status == "nothing completed"


def test_when_nothing_completes_the_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_FAULT", "exception")
    record = run(small(), tmp_path)
    assert record.status == "nothing completed"
    assert record.test is None
    assert len(record.trials) == 1


def test_a_baseline_that_fails_ends_the_run_although_generation_1_began_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_FAULT", "nan")  # in a cell alone: planning goes well
    monkeypatch.setenv("TOY_FAULT_WHERE", "model.bias=off")
    record = run(small(population=2, generations=2, sizes={"pause_ms": 20}), tmp_path)
    started = {
        e["cell"].rpartition("-search")[0] for e in rebuild(tmp_path / "r").events if e["event"] == "cell_started"
    }
    assert "baseline" in started
    assert started - {"baseline"}, "generation 1 ran beside it"
    assert record.status == "nothing completed"
    assert record.test is None
    assert max(trial.candidate.generation for trial in record.trials) == 1
    assert record.trials[0].state == "failed"
    assert {trial.state for trial in record.trials} <= {"failed", "completed", "partial", "planned", "duplicate"}
    again = resume(tmp_path / "r")
    assert (again.status, again.test) == ("nothing completed", None)


def test_no_cell_is_started_once_the_baseline_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_FAULT", "nan")
    monkeypatch.setenv("TOY_FAULT_WHERE", "model.bias=off")
    record = run(small(population=2, generations=1, seeds=[0, 1, 2, 3, 4, 5]), tmp_path)
    events = rebuild(tmp_path / "r").events
    ends = [i for i, e in enumerate(events) if e["event"] == "cell_ended" and e["candidate"] == "baseline"]
    assert len(ends) == 6
    assert not any(e["event"] == "cell_started" for e in events[ends[-1] :])
    queued = {cell["cell"] for e in events if e["event"] == "queued" for cell in e["cells"]}
    assert {e["cell"] for e in events if e["event"] == "cell_started"} < queued
    assert record.status == "nothing completed"


def test_a_generation_that_cannot_be_planned_ahead_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_FAULT", "exception")  # in a probe as well
    record = run(small(), tmp_path)
    (told,) = [e for e in rebuild(tmp_path / "r").events if e["event"] == "plan_failed"]
    assert "shapes do not match" in told["reason"]
    assert record.status == "nothing completed"


def test_a_plan_runs_nothing_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    preview = plan_only(small(population=3))
    assert [plan.generation for plan in preview.plans] == [0, 1]
    assert preview.prepared.examples == 96
    assert "bias" in [operator for c in preview.plans[1].candidates for operator in c.operators]
    assert list(tmp_path.iterdir()) == []


def test_bad_input_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for config, words in (
        (small(workflow="toy"), "no workflow"),
        (small(sizes={"stepz": 1}), "steps"),
        (small(changes={"train.lr": 5}), "train.lr"),
        (small(confirm_seeds=[1, 2]), "fresh"),
        (small(seeds=[0, 0]), "repeat"),
        (small(where={"workers": 0}), "workers"),
    ):
        with pytest.raises(UserError, match=words):
            run(config, tmp_path)
    assert not (tmp_path / "r/config.json").exists()


def test_fixed_candidates_are_measured_and_not_selected(tmp_path: Path) -> None:
    record = run(small(workflow="toy:FixedToy", population=3, seeds=[0], random_search=True), tmp_path)
    assert [trial.state for trial in record.trials] == ["completed"] * 4
    assert record.decisions == []
    assert record.random_search == []
    assert (record.verdict, record.champion) == ("measured", "baseline")


class Crash(Exception):
    """Ends a controller from within."""


def crash_at(name: str, number: int = 1) -> Any:
    left = [number]

    def on_event(event: dict[str, Any]) -> None:
        left[0] -= event["event"] == name
        if event["event"] == name and left[0] == 0:
            raise Crash

    return on_event


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return run(small(generations=1, population=1), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("cell_started", 2),
        ("test_opened", 1),
        *(pytest.param(*at, marks=pytest.mark.slow) for at in (("created", 1), ("cell_ended", 3), ("decided", 1))),
    ],
)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    plain: RunRecord, moment: str, number: int, tmp_path: Path
) -> None:
    with pytest.raises(Crash):
        run(small(generations=1, population=1), tmp_path, crash_at(moment, number))
    before = rebuild(tmp_path / "r")
    assert read_run(tmp_path / "r").status == "interrupted"
    record = resume(tmp_path / "r")
    assert outcome(record) == outcome(plain)
    events = read_jsonl(tmp_path / "r/events.jsonl")
    again = [e["cell"] for e in events[len(before.events) :] if e["event"] == "cell_started"]
    assert not set(again) & set(before.cells)
    assert names(events).count("test_opened") == 1
    lost = [e["cell"] for e in events if e["event"] == "cell_interrupted"]
    assert set(lost) <= set(before.running)  # one that had written its result is taken as it is
    for cell in lost:
        attempts = rebuild(tmp_path / "r").cells[cell].attempts
        assert [(a.state, a.reason) for a in attempts] == [("interrupted", LOST), ("completed", "")]


@pytest.mark.parametrize("damage", ["{", pytest.param("changed", marks=pytest.mark.slow)])
def test_a_corrupt_result_is_run_again(plain: RunRecord, damage: str, tmp_path: Path) -> None:
    with pytest.raises(Crash):
        run(small(generations=1, population=1), tmp_path, crash_at("decided"))
    path = tmp_path / "r/cells/baseline-search-seed1/result.json"
    path.write_text("{" if damage == "{" else path.read_text().replace("0.8", "0.9"))
    record = resume(tmp_path / "r")
    assert outcome(record)["trials"] == outcome(plain)["trials"]
    events = read_jsonl(tmp_path / "r/events.jsonl")
    assert position(events, "discarded", file="cells/baseline-search-seed1/result.json")
    assert position(events, "cell_interrupted", cell="baseline-search-seed1")
    started = [e["cell"] for e in events[position(events, "resumed") :] if e["event"] == "cell_started"]
    assert [cell for cell in started if "test" not in cell] == ["baseline-search-seed1"]
    assert path.with_name("result.corrupt-1.json").exists()


def test_changed_data_are_refused_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Crash):
        run(small(generations=0), tmp_path, crash_at("planned"))
    monkeypatch.setenv("TOY_DATA", "other")
    with pytest.raises(UserError, match="data changed since"):
        resume(tmp_path / "r")


def test_a_damaged_plan_is_said(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        run(small(generations=0), tmp_path, crash_at("planned"))
    path = tmp_path / "r/plans/g0.json"
    path.write_text(path.read_text().replace("baseline", "basement"))
    with pytest.raises(UserError, match=r"g0\.json is damaged"):
        resume(tmp_path / "r")


def test_ctrl_c_ends_the_cells_and_leaves_a_resumable_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_FAULT", "once-hang")
    monkeypatch.setenv("TOY_NOTES", str(tmp_path))

    def interrupt(event: dict[str, Any]) -> None:
        if event["event"] == "cell_started":
            raise KeyboardInterrupt

    record = run(small(generations=0), tmp_path, interrupt)
    assert record.status == "interrupted"
    assert children_of(tmp_path) == []
    assert names(read_jsonl(tmp_path / "r/events.jsonl"))[-1] == "interrupted"
    monkeypatch.delenv("TOY_FAULT")
    assert resume(tmp_path / "r").status == "finished"


def test_cells_wait_while_others_hold_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fits at first; then it does. A cell that could never fit fails without being started."""
    looks = iter([False, True])
    real = controller._Controller._fill

    def fill(self: Any, *arguments: Any) -> None:
        if next(looks, True):
            real(self, *arguments)

    monkeypatch.setattr(controller._Controller, "_fill", fill)
    monkeypatch.setattr(controller, "WAIT_FOR_MEMORY_S", 0)
    record = run(small(generations=0, seeds=[0]), tmp_path)
    assert record.status == "finished"
    assert "waiting" in names(read_jsonl(tmp_path / "r/events.jsonl"))
    huge = run(small("huge", generations=0, seeds=[0], where={"gpu_memory_per_trial_mb": 10**9}), tmp_path)
    assert huge.status == "nothing completed"
    cell = huge.trials[0].cells[0]
    assert (cell.state, len(cell.attempts)) == ("out_of_memory", 1)
    assert "largest device has" in cell.attempts[0].reason


def test_screening_gives_further_seeds_to_the_better_half(tmp_path: Path) -> None:
    """Of two children, the one that hurts keeps one seed; killed in between, the run ends as if it had not been."""
    config = small(screening=True, seeds=[0, 1, 2], n_min=3, random_search=True)
    record = run(config, tmp_path)
    found = {trial.candidate.id: trial for trial in record.trials}
    helps, hurts = (next(t for t in found.values() if t.candidate.operators == [id]) for id in ("bias", "exchange"))
    assert (helps.state, [cell.seed for cell in helps.cells]) == ("completed", [0, 1, 2])
    assert (hurts.state, [cell.seed for cell in hurts.cells]) == ("screened_out", [0])
    assert record.champion == helps.candidate.id
    assert f"{hurts.candidate.id}: not promotable (screened_out)" in record.decisions[0].reason
    events = read_jsonl(tmp_path / "r/events.jsonl")
    screened = events[position(events, "screened")]
    assert (screened["kept"], screened["left"]) == ([helps.candidate.id], [hurts.candidate.id])
    assert sum(len(trial.cells) for trial in record.random_search) in (3, 6)
    assert "screened out" in (tmp_path / "r/board.html").read_text()
    assert "--screening" in command(config)
    for moment in ("cell_ended", "screened"):
        folder = tmp_path / moment
        number = 4 if moment == "cell_ended" else 1
        with pytest.raises(Crash):
            run(config, folder, crash_at(moment, number))
        assert outcome(resume(folder / "r")) == outcome(record)


def test_resume_makes_a_lost_trial_database_again(tmp_path: Path) -> None:
    config = small(generations=0, seeds=[0], where={"storage": None})
    run(config, tmp_path)
    database = tmp_path / "r/optuna.db"
    database.unlink()
    events = (tmp_path / "r/events.jsonl").read_bytes()
    resume(tmp_path / "r")
    trials = open_study(config, ToyWorkflow(), open_storage(None, tmp_path / "r")).trials
    assert [trial.user_attrs["candidate"] for trial in trials] == ["baseline"]
    assert (tmp_path / "r/events.jsonl").read_bytes() == events


def test_the_controller_works_outside_the_main_thread(tmp_path: Path) -> None:
    found: list[RunRecord] = []
    config: RunConfig = small(generations=0, seeds=[0])
    thread = threading.Thread(target=lambda: found.append(run(config, tmp_path)))
    thread.start()
    thread.join()
    assert found[0].status == "finished"
