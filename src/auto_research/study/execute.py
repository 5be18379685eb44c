"""Runs one adapter and returns its record; the function that an isolated process is told to call."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from auto_research.runtime.budget import Budget, Overrides
from auto_research.runtime.errors import UserError
from auto_research.runtime.evidence import DeviceWork, use_log
from auto_research.runtime.records import Record
from auto_research.runtime.versions import environment
from auto_research.study.card import Card, Fidelity, read_card
from auto_research.study.compare import ComparisonRecord
from auto_research.study.context import CheckpointChoice, Study


class StageRecord(BaseModel):
    """One stage of a run."""

    model_config = ConfigDict(extra="forbid")

    name: str
    trains: bool
    seconds: float
    optimiser_steps: int


class StudyRecord(Record):
    """Everything that one run of one adapter found, and what is needed to repeat it.

    Attributes:
        fidelity: the declared one, or `concept_demo` when a stage that should train made no update.
        settings: step counts and sizes as resolved from budget and overrides.
        overrides: documented environment variables that were set, with their values.
        data: name of each data set used -> SHA-256 of its content.
        checkpoints: role -> name, source, revision and note.
        seconds: wall time of the run; cpu_seconds: processor time of its process, which neighbours on a shared machine
            do not change much.
    """

    schema_version: int = 1
    key: str
    title: str
    claim: str
    budget: Budget
    device: str
    seeds: list[int]
    fidelity: Fidelity
    declared_fidelity: Fidelity
    settings: dict[str, int]
    overrides: dict[str, int]
    data: dict[str, str]
    checkpoints: dict[str, dict[str, Any]]
    stages: list[StageRecord]
    notes: list[str]
    comparison: ComparisonRecord
    started: str
    seconds: float
    cpu_seconds: float | None = None
    environment: dict[str, str]


def run_study(study: Study, entry: Any) -> StudyRecord:
    """Calls an adapter's entry function with `study` and draws up the record."""
    started = datetime.now(UTC)
    clock, processor = time.perf_counter(), time.process_time()
    comparison = entry(study)
    stages = [
        StageRecord(name=s.name, trains=s.trains, seconds=round(s.seconds, 3), optimiser_steps=s.optimiser_steps)
        for s in study.stages
    ]
    idle = [s.name for s in stages if s.trains and s.optimiser_steps == 0]
    if idle:
        study.note(f"no optimiser update in stage {', '.join(idle)}: fidelity lowered to concept_demo")
    assert study.overrides is not None
    return StudyRecord(
        key=study.card.key,
        title=study.card.title,
        claim=study.card.claim,
        budget=study.budget,
        device=study.device,
        seeds=list(study.seeds),
        fidelity="concept_demo" if idle else study.card.fidelity,
        declared_fidelity=study.card.fidelity,
        settings=study.settings,
        overrides=study.overrides.used(),
        data=study.data_used,
        checkpoints=study.checkpoints_used,
        stages=stages,
        notes=study.notes,
        comparison=comparison.record(),
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - clock, 3),
        cpu_seconds=round(time.process_time() - processor, 3),
        environment=environment(),
    )


def make_study(
    card: Card,
    *,
    budget: Budget,
    seeds: tuple[int, ...] = (),
    device: str = "auto",
    dataset_dir: Path | None = None,
    checkpoints: CheckpointChoice = "auto",
    environ: Mapping[str, str] | None = None,
    other_keys: Sequence[str] = (),
    quiet: bool = False,
) -> Study:
    """A study of `card`; documented overrides are read from the environment and undocumented ones refused.

    `other_keys` are the keys of the other papers, whose overrides are not this paper's business.
    """
    if dataset_dir is not None and not dataset_dir.is_dir():
        raise UserError(f"--dataset-dir {dataset_dir} is not a folder; name one that holds the data sets' folders")
    return Study(
        card=card,
        budget=budget,
        seeds=seeds,
        device=device,
        dataset_dir=dataset_dir,
        checkpoints=checkpoints,
        overrides=Overrides(card.key, card.overrides, environ, other_keys=other_keys),
        quiet=quiet,
    )


def run_adapter(payload: dict[str, Any]) -> dict[str, Any]:
    """Runs the adapter that `payload` names; called inside an isolated process.

    Payload fields: `card` (path), `entry` ("module:function"), `budget`, and optionally `seeds`, `device`,
    `dataset_dir`, `checkpoints`, `other_keys`, `evidence` (path of the log to append to), `quiet`. Returns the
    `StudyRecord` as JSON values. The device-work record is written to the evidence log even when the adapter fails.
    """
    import importlib

    card, _ = read_card(Path(payload["card"]))
    module, function = payload["entry"].split(":")
    study = make_study(
        card,
        budget=payload["budget"],
        seeds=tuple(payload.get("seeds") or ()),
        device=payload.get("device", "auto"),
        dataset_dir=Path(payload["dataset_dir"]) if payload.get("dataset_dir") else None,
        checkpoints=payload.get("checkpoints", "auto"),
        other_keys=payload.get("other_keys", ()),
        quiet=payload.get("quiet", False),
    )
    with use_log(Path(payload["evidence"]) if payload.get("evidence") else None):
        entry = getattr(importlib.import_module(module), function)
        if payload.get("evidence"):
            with DeviceWork():
                record = run_study(study, entry)
        else:
            record = run_study(study, entry)
    return record.model_dump(mode="json")
