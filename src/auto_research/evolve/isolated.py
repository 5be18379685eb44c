"""What the controller asks of other processes beside cells: facts about the data, proposals, a summary.

The controller itself loads no data and builds no model, so nothing a workflow does can hang it, fill its memory or
touch an accelerator in it. Each function here takes a JSON payload and returns a JSON object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from auto_research.evolve.cells import HEARTBEAT, Heartbeat, load_data, sizes_for, use_device
from auto_research.evolve.records import Candidate, Prepared, RunConfig, Trial
from auto_research.evolve.workflow import Data, Sizes, Workflow, enter_search
from auto_research.evolve.workflows import workflow as find_workflow


def _opened(payload: dict[str, Any], config: RunConfig) -> tuple[Workflow, Sizes, Data]:
    enter_search()
    workflow = find_workflow(config.workflow)
    sizes = sizes_for(workflow, config)
    use_device("cpu", config.run_seed)
    return workflow, sizes, load_data(workflow, {**payload, "dataset_dir": config.dataset_dir}, sizes)


def prepare(payload: dict[str, Any]) -> dict[str, Any]:
    """`Prepared`, from `config` and `folder`; with `digests` only checks that the data are still those."""
    config = RunConfig.model_validate(payload["config"])
    heartbeat = Heartbeat(Path(payload["folder"]) / HEARTBEAT)
    with heartbeat.phase("load"):
        workflow, sizes, data = _opened(payload, config)
    if payload.get("digests") is not None:
        return {}
    with heartbeat.phase("floors"):
        floors, anchors = workflow.floors(data, sizes), workflow.anchors(data, sizes)
    prepared = Prepared(
        digests=data.digests,
        hygiene=data.hygiene,
        examples=data.examples,
        stand_in=data.stand_in,
        floors=floors,
        anchors=anchors,
        sizes=sizes.values,
        checkpoints=data.checkpoints,
        subset=data.subset,
        limits=workflow.limits(sizes),
    )
    return prepared.model_dump(mode="json")


def propose(payload: dict[str, Any]) -> dict[str, Any]:
    """A `Plan`: of `generation` from `champion` (an id) and `trials`, or of `random` candidates for random search."""
    from auto_research.evolve.plan import plan_generation, random_plan
    from auto_research.evolve.records import Plan

    config = RunConfig.model_validate(payload["config"])
    heartbeat = Heartbeat(Path(payload["folder"]) / HEARTBEAT)
    with heartbeat.phase("plan"):
        workflow, sizes, data = _opened(payload, config)
        if (count := payload.get("random")) is not None:
            candidates: list[Candidate] = random_plan(config, workflow, sizes, data, count)
            return Plan(generation=0, parent="baseline", candidates=candidates).model_dump(mode="json")
        trials = [Trial.model_validate(trial) for trial in payload["trials"]]
        champion = next((t.candidate for t in trials if t.candidate.id == payload["champion"]), None)
        plan = plan_generation(config, workflow, payload["generation"], champion, trials, sizes, data)
    return plan.model_dump(mode="json")


def summarise(payload: dict[str, Any]) -> dict[str, Any]:
    """The workflow's figures over all `trials`."""
    config = RunConfig.model_validate(payload["config"])
    heartbeat = Heartbeat(Path(payload["folder"]) / HEARTBEAT)
    with heartbeat.phase("summarise"):
        use_device("cpu", config.run_seed)
        trials = [Trial.model_validate(trial) for trial in payload["trials"]]
        return {"summary": find_workflow(config.workflow).summarise(trials)}


def mirror_trials(payload: dict[str, Any]) -> dict[str, Any]:
    """Makes the trial database at `url` (None: a file in `run_folder`) hold `trials`."""
    from auto_research.evolve.storage import mirror, open_storage, open_study

    config = RunConfig.model_validate(payload["config"])
    workflow = find_workflow(config.workflow)
    study = open_study(config, workflow, open_storage(payload["url"], Path(payload["run_folder"])))
    mirror(study, config, workflow, [Trial.model_validate(trial) for trial in payload["trials"]])
    return {}
