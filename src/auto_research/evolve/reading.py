"""The record of a run, rebuilt from its files: trials from plans and cells, the verdict from what ran."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from auto_research.evolve.attempts import read_attempts
from auto_research.evolve.cells import cell_id, sizes_for
from auto_research.evolve.events import State, controller_alive, rebuild
from auto_research.evolve.genome import find_evidence
from auto_research.evolve.promotion import noise_floor, summarise
from auto_research.evolve.records import Candidate, CellResult, Plan, Role, RunConfig, RunRecord, Trial
from auto_research.evolve.verdict import judge
from auto_research.evolve.workflow import Workflow
from auto_research.evolve.workflows import workflow as find_workflow


def read_run(folder: Path) -> RunRecord:
    """The record of a run in any state, rebuilt from its files; takes no lock.

    Raises `UserError` when there is no run.
    """
    return _record(rebuild(Path(folder)))


def search_seeds(config: RunConfig, workflow: Workflow) -> list[int]:
    """Seeds of the search; one where seeds change nothing."""
    return config.seeds if workflow.stochastic else config.seeds[:1]


def _trials(
    candidates: Sequence[Candidate],
    role: Role,
    seeds: Sequence[int],
    cells: Mapping[str, CellResult],
    config: RunConfig,
    workflow: Workflow,
    known: dict[str, Trial],
    noise: float | None,
) -> list[Trial]:
    """Candidates with the cells they have in one role, each compared with its first parent in `known`."""
    found, limits = [], workflow.limits(sizes_for(workflow, config))
    for candidate in candidates:
        ids = [cell_id(candidate, seed, role) for seed in seeds]
        parent = known.get(candidate.parents[0]) if candidate.parents else None
        trial = summarise(
            candidate,
            [cells[id] for id in ids if id in cells],
            seeds,
            workflow,
            z=config.z,
            noise=noise,
            parent=parent,
            n_min=config.n_min,
            limits=limits,
        )
        found.append(trial)
    return found


def search_trials(
    config: RunConfig,
    workflow: Workflow,
    plans: Mapping[str, Plan],
    cells: Mapping[str, CellResult],
    screened_out: Collection[str],
) -> list[Trial]:
    """The trials of all generations in their order, duplicates and infeasible candidates among them."""
    seeds = search_seeds(config, workflow)
    known: dict[str, Trial] = {}
    noise: float | None = None
    for name, plan in plans.items():
        if not name.startswith("g"):
            continue
        for candidate in plan.candidates:
            left = candidate.id in screened_out
            wanted = seeds[:1] if left else seeds
            (trial,) = _trials([candidate], "search", wanted, cells, config, workflow, known, noise)
            if left and trial.state == "completed":
                trial.state = "screened_out"
            known[candidate.id] = trial
        if "baseline" in known:
            noise = noise_floor(known["baseline"], workflow.metric)
    return list(known.values())


def confirmation_trials(
    config: RunConfig, workflow: Workflow, candidates: Sequence[Candidate], cells: Mapping[str, CellResult]
) -> list[Trial]:
    """Baseline and champion on the fresh seeds; the champion is compared with the baseline there."""
    known: dict[str, Trial] = {}
    for candidate in candidates:
        against = candidate.model_copy(update={"parents": [candidates[0].id]}) if known else candidate
        (trial,) = _trials([against], "confirm", config.confirm_seeds, cells, config, workflow, known, None)
        known[candidate.id] = trial.model_copy(update={"candidate": candidate})
    return list(known.values())


def _unfinished(state: State) -> dict[str, CellResult]:
    """Cells without a result as far as they are: running or queued, with the attempts that have ended.

    None of a finished run: what it left in the queue was never started.
    """
    found: dict[str, CellResult] = {}
    if state.last("finished") is not None:
        return found
    for event in state.events:
        if event["event"] != "queued":
            continue
        for cell in event["cells"]:
            if cell["cell"] in state.cells:
                continue
            running = cell["cell"] in state.running
            found[cell["cell"]] = CellResult(
                **cell,
                state="running" if running else "queued",
                attempts=[ended.attempt for ended in read_attempts(state.folder, cell["cell"])],
            )
    return found


def _record(state: State) -> RunRecord:
    """Everything a run's files say, with the verdict they allow."""
    config, workflow = state.config, find_workflow(state.config.workflow)
    cells = {**_unfinished(state), **state.cells}
    trials = search_trials(config, workflow, state.plans, cells, state.screened_out)
    if state.last("finished") is not None:
        for trial in trials:
            trial.state = "partial" if trial.state == "running" else trial.state
    by_id = {trial.candidate.id: trial for trial in trials}
    noise = noise_floor(by_id["baseline"], workflow.metric) if "baseline" in by_id else None
    confirmation = confirmation_trials(config, workflow, _candidates(state, "confirm"), cells)
    seeds = search_seeds(config, workflow)
    random = _trials(_candidates(state, "random"), "random", seeds, cells, config, workflow, by_id, noise)
    champion = state.decisions[-1].champion if state.decisions else "baseline"
    test_cell = next((cell for cell in state.cells.values() if cell.role == "test"), None)
    created, ended = state.events[0] if state.events else {}, state.last("finished", "stopped", "interrupted")
    record = RunRecord(
        config=config,
        title=workflow.title,
        metric=workflow.metric,
        direction=workflow.direction,
        prepared=state.prepared,
        trials=trials,
        decisions=state.decisions,
        confirmation=confirmation,
        confirmed=state.confirmed,
        random_search=random,
        test=state.test,
        test_cell=test_cell,
        noise=noise,
        champion=champion,
        status=_status(state),
        verdict="smoke: no conclusion",
        level="",
        sentence="",
        notes={name: plan.notes for name, plan in state.plans.items() if plan.notes},
        evidence=[
            {k: v for k, v in asdict(e).items() if k != "keywords"} for e in find_evidence(workflow, config.direction)
        ],
        quarantined=created.get("quarantined", []),
        summary=state.summary or {},
        used=_used(state),
        environment=created.get("environment", {}),
        started=created.get("time", ""),
        ended=ended["time"] if ended else "",
    )
    verdict, level, sentence = judge(
        config=config,
        workflow=workflow,
        prepared=state.prepared,
        trials=trials,
        decisions=state.decisions,
        champion=champion,
        confirmed=state.confirmed,
    )
    return record.model_copy(update={"verdict": verdict, "level": level, "sentence": sentence})


def _candidates(state: State, plan: str) -> list[Candidate]:
    return state.plans[plan].candidates if plan in state.plans else []


def _status(state: State) -> Any:
    """Of the run: what its last event of that kind says, or that its controller is gone."""
    if finished := state.last("finished"):
        return finished["status"]
    if not state.events:
        return "planned"
    if state.last("leak"):  # resuming it cannot help
        return "nothing completed"
    last = state.last("created", "resumed", "stopped", "interrupted")
    if last is not None and last["event"] in ("stopped", "interrupted"):
        return last["event"]
    return "running" if controller_alive(state.folder) is not None else "interrupted"


def _used(state: State) -> dict[str, float]:
    """What the run has spent: cells, their seconds and processor seconds, and the largest memory of one."""
    cells = list(state.cells.values())
    return {
        "cells": float(len(cells)),
        "cell_seconds": sum(attempt.seconds for cell in cells for attempt in cell.attempts),
        "processor_seconds": sum(cell.cpu_seconds for cell in cells),
        "peak_memory_bytes": float(max((cell.peak_rss_bytes for cell in cells), default=0)),
        "peak_device_bytes": float(max((cell.peak_device_bytes for cell in cells), default=0)),
    }
