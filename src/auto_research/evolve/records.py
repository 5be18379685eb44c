"""What a run writes down. Files are the facts; everything shown is drawn from a `RunRecord`.

A run's folder: `config.json`, `data.json` (digests, hygiene, floors), `events.jsonl` (append-only), `plans/g<N>.json`
(written before the first cell of that generation starts), `cells/<cell>/result.json`, `test/result.json`, and the
caches `record.json` and `board.html`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from auto_research.runtime.budget import Budget
from auto_research.runtime.records import Record

Origin = Literal[
    "baseline",
    "paper-operator",
    "combination",
    "hyperparameter-mutation",
    "replicate",
    "random-search",
    "fixed",
    "evidence-only",
    "quarantined",
]
CellState = Literal[
    "planned",
    "queued",
    "running",
    "completed",
    "failed",
    "timed_out",
    "out_of_memory",
    "non_finite",
    "killed",
    "interrupted",
]
TrialState = Literal[
    "planned", "running", "completed", "screened_out", "partial", "failed", "duplicate", "infeasible"
]  # fmt: skip
Role = Literal["search", "confirm", "random", "test"]
Verdict = Literal["improved", "not improved", "no signal", "smoke: no conclusion", "measured"]


class Part(BaseModel):
    """A piece of a record; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class RunConfig(Record):
    """Everything that decides what a run does; two runs with one fingerprint propose the same candidates.

    Attributes:
        changes: axis -> value set on the baseline.
        sizes: overrides of the workflow's sizes.
        seeds: of the search; confirm_seeds are fresh ones for the confirmation rung, empty without it.
        sampler: how generations after the first are proposed.
        screening: one seed for every child; the others for the better half and what is within noise of it.
        where: what does not change results (workers, devices' names, storage, executor); not in the fingerprint.
    """

    schema_version: int = 1
    run: str
    workflow: str
    direction: str = ""
    budget: Budget = "smoke"
    generations: int = Field(ge=0)
    population: int = Field(ge=1)
    seeds: list[int] = Field(min_length=1)
    confirm_seeds: list[int] = []
    run_seed: int = 0
    sampler: Literal["planned", "tpe", "nsga2", "random"] = "planned"
    random_search: bool = True
    screening: bool = False
    changes: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    dataset_dir: str | None = None
    device: str = "cpu"
    n_min: int = Field(default=3, ge=2)
    z: float = Field(default=1.0, ge=0)
    delta_min: float = 0.0
    confirm_z: float = Field(default=2.0, ge=0)
    retries: int = Field(default=1, ge=0)
    trial_timeout_s: float = Field(default=900.0, gt=0)
    stall_s: float = Field(default=120.0, gt=0)
    memory_limit_mb: int | None = None
    forked_from: str | None = None
    where: dict[str, Any] = {}

    def fingerprint(self) -> str:
        """SHA-256 (16 hex digits) of all that decides results; limits and places do not."""
        decides = self.model_dump(
            mode="json",
            exclude={"run", "where", "trial_timeout_s", "stall_s", "memory_limit_mb", "retries", "forked_from"},
        )
        if not self.screening:  # runs from before there was one stay what they are
            del decides["screening"]
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


class Candidate(Part):
    """A genome with where it came from.

    Attributes:
        id: `g<generation>-<index>`, `baseline`, `random-<index>`.
        parents: ids; the first is the one it is compared with.
        difference: axis -> [value in the first parent, value here].
        operators: ids of installed operators that the difference brings; papers, omitted parts and code (operator ->
            digest of its source) of those.
        axis_from: of a combination: axis -> id of the parent it came from, `operator:<id>` that brought it, or
            `sampler:<name>` that changed it.
        match: how its size compares with the baseline's ("" = within 2 %).
        fingerprint: effective fingerprint; duplicate_of names the candidate that has the same.
        reason: why it is infeasible or evidence only.
    """

    id: str
    generation: int
    origin: Origin
    genome: dict[str, Any]
    parents: list[str] = []
    difference: dict[str, list[Any]] = {}
    operators: list[str] = []
    papers: list[str] = []
    fidelity: str = ""
    omitted: list[str] = []
    code: dict[str, str] = {}
    axis_from: dict[str, str] = {}
    sampler: str = "planned"
    repairs: list[str] = []
    match: str = ""
    fingerprint: str = ""
    duplicate_of: str = ""
    reason: str = ""
    parameters: int = 0
    flops: float = 0.0
    memory_bytes: int = 0
    cost: dict[str, float] = {}


class Plan(Record):
    """The candidates of one generation, fixed before any of its cells starts.

    Attributes:
        candidates: every proposal in order; those with `duplicate_of` or `reason` are shown and never run.
        notes: in words: how the direction chose the operators, what the plan falls short of and why.
    """

    schema_version: int = 1
    generation: int
    parent: str
    candidates: list[Candidate]
    notes: list[str] = []


class Attempt(Part):
    """One process that tried a cell."""

    state: CellState
    seconds: float
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    error: str = ""
    traceback: str = ""
    log_tail: str = ""
    last_step: int | None = None
    last_loss: float | None = None
    changed: dict[str, int] = {}


class CellResult(Record):
    """What one seed of one candidate gave; metrics are None unless it completed.

    Attributes:
        units: per-example values of the primary metric.
        peak_rss_bytes, peak_device_bytes: measured.
        artefact: SHA-256 of the stored artefact's files.
    """

    schema_version: int = 1
    cell: str
    candidate: str
    seed: int
    role: Role
    state: CellState
    metrics: dict[str, float] | None = None
    units: list[float] = []
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_rss_bytes: int = 0
    peak_device_bytes: int = 0
    device: str = "cpu"
    artefact: str = ""
    attempts: list[Attempt] = []


class Prepared(Record):
    """Facts about the data, fixed before generation 0."""

    schema_version: int = 1
    digests: dict[str, str]
    hygiene: dict[str, int]
    examples: int
    stand_in: str
    floors: dict[str, float]
    anchors: dict[str, float]
    sizes: dict[str, int]
    checkpoints: dict[str, str] = {}
    subset: dict[str, list[str]] = {}
    limits: dict[str, float] = {}


class Paired(Part):
    """A paired comparison of two candidates on the primary metric, in the direction of improvement (gain > 0).

    Attributes:
        n: pairs; 1 uses the noise floor as deviation and is provisional.
        by: seeds, or examples (bootstrap).
        gain: mean difference; se its standard error; lower, upper: gain -+ z se. All three are None when one pair
            is all there is and no noise floor was measured.
        missing: seeds that either side lacks or failed; they are in no mean.
    """

    child: str
    parent: str
    n: int
    by: Literal["seeds", "examples"] = "seeds"
    gain: float
    se: float | None
    z: float
    lower: float | None
    upper: float | None
    provisional: bool = False
    missing: list[int] = []


class Decision(Part):
    """Who parents the next generation, and why."""

    generation: int
    parent: str
    champion: str
    comparisons: list[Paired]
    reason: str


class TestResult(Record):
    """The sealed test, opened once for baseline and champion."""

    schema_version: int = 1
    opened: str
    openings: int
    metrics: dict[str, dict[str, float]]
    gain: Paired | None = None


class Trial(Part):
    """A candidate with its cells; `violations` are the hard constraints that its measured metrics break, in words."""

    candidate: Candidate
    state: TrialState
    mean: float | None = None
    deviation: float | None = None
    score: float | None = None
    gain: Paired | None = None
    violations: list[str] = []
    cells: list[CellResult] = []


class RunRecord(Record):
    """A whole run, rebuilt from its files; the board and `status` show nothing else.

    Attributes:
        test_cell: the finaliser's process, completed or not; its metrics are the primary one by set of weights.
        notes: plan (`g<generation>`) -> what it says in words: how the direction chose, what it falls short of.
        evidence: papers without an operator; quarantined: external code as it stood when the run began. None of
            them runs.
    """

    schema_version: int = 1
    config: RunConfig
    title: str
    metric: str
    direction: Literal["max", "min"]
    prepared: Prepared | None
    trials: list[Trial]
    decisions: list[Decision]
    confirmation: list[Trial] = []
    confirmed: Paired | None = None
    random_search: list[Trial] = []
    test: TestResult | None = None
    test_cell: CellResult | None = None
    noise: float | None = None
    champion: str = "baseline"
    status: Literal["planned", "running", "interrupted", "finished", "stopped", "nothing completed"]
    verdict: Verdict
    level: str
    sentence: str
    notes: dict[str, list[str]] = {}
    evidence: list[dict[str, str]] = []
    quarantined: list[Candidate] = []
    summary: dict[str, Any] = {}
    used: dict[str, float] = {}
    environment: dict[str, str] = {}
    started: str = ""
    ended: str = ""
