"""The finaliser: the only process that may open the test part, once a run, for baseline and champion.

It evaluates the stored weights of the search; it trains nothing. It refuses to start unless the event log says that
the test part is being opened.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from auto_research.evolve.cells import (
    HEARTBEAT,
    Heartbeat,
    checked_scores,
    folder_digest,
    load_data,
    peaks,
    use_device,
)
from auto_research.evolve.promotion import compare, mean_metrics
from auto_research.evolve.records import Candidate, CellResult, RunConfig, TestResult, Trial
from auto_research.evolve.workflow import Sizes, Workflow, become_finaliser
from auto_research.evolve.workflows import workflow as find_workflow
from auto_research.runtime.errors import UserError


def run_test(payload: dict[str, Any]) -> dict[str, Any]:
    """Evaluates stored weights on the test part; called inside an isolated process.

    Payload: as of a cell, and `events` (path of the log), `opening` (number of the event that announces this), and
    `weights`: list of {candidate, genome, seed, artefact (folder), digest}. Returns what a cell returns, and `cells`:
    metrics and per-example values of each set of weights.
    """
    heartbeat = Heartbeat(Path(payload["folder"]) / HEARTBEAT)
    clock, processor = time.perf_counter(), time.process_time()
    workflow = find_workflow(payload["workflow"])
    sizes = Sizes(payload["budget"], payload["sizes"])
    with heartbeat.phase("load"):
        device = use_device(payload["device"], 0)
        for weights in payload["weights"]:
            if folder_digest(Path(weights["artefact"])) != weights["digest"]:
                raise UserError(f"the stored weights in {weights['artefact']} are not those that were validated")
        data = load_data(workflow, payload, sizes)
        become_finaliser(Path(payload["events"]), payload["opening"])
        test = workflow.load_test(sizes, Path(payload["dataset_dir"]) if payload["dataset_dir"] else None)
    cells: list[dict[str, Any]] = []
    for number, weights in enumerate(payload["weights"]):
        with heartbeat.phase(f"test {number + 1} of {len(payload['weights'])}"):
            use_device(payload["device"], weights["seed"])
            genome = workflow.space.resolve(weights["genome"])
            artefact = workflow.restore(genome, data, Path(weights["artefact"]), sizes, device)
            scores = workflow.test(artefact, test, data, sizes, device)
        metrics, units = checked_scores(scores, workflow.metric)
        cells.append({"candidate": weights["candidate"], "seed": weights["seed"], "metrics": metrics, "units": units})
    return {
        "cells": cells,
        "metrics": {f"{cell['candidate']} seed {cell['seed']}": cell["metrics"][workflow.metric] for cell in cells},
        "units": [],
        "artefact": "",
        "seconds": time.perf_counter() - clock,
        "cpu_seconds": time.process_time() - processor,
        **peaks(),
        "device": device,
    }


def test_result(
    output: dict[str, Any],
    candidates: list[Candidate],
    config: RunConfig,
    workflow: Workflow,
    *,
    opened: str,
    openings: int,
    noise: float | None,
) -> TestResult:
    """Means over seeds a candidate, and the paired gain of the second candidate over the first where there are two.

    Raises `ValueError` for an output that is not the finaliser's.
    """
    trials = []
    for candidate in candidates:
        cells = [
            CellResult(
                cell=f"{candidate.id}-test-seed{cell['seed']}",
                role="test",
                state="completed",
                **cell,
            )
            for cell in output["cells"]
            if cell["candidate"] == candidate.id
        ]
        trials.append(Trial(candidate=candidate, state="completed", cells=cells))
    metrics = {trial.candidate.id: mean_metrics(trial) for trial in trials}
    gain = None
    if len(trials) == 2:
        gain = compare(trials[1], trials[0], workflow, z=config.confirm_z, noise=noise, n_min=config.n_min)
    return TestResult(opened=opened, openings=openings, metrics=metrics, gain=gain)
