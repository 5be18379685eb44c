"""The audit's records: settings, one result an adapter, the whole; and how shards of one audit are joined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from auto_research.audit.diagnose import Diagnosis
from auto_research.audit.plan import Selection, shard
from auto_research.audit.scan import Site
from auto_research.runtime.budget import Budget
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import Record, read_record
from auto_research.study.card import Fidelity

DISCLAIMER = (
    "This is an engineering check: it shows which code ran on which device. It is never a paper benchmark, and its "
    "durations are not a throughput benchmark."
)

Status = Literal[
    "gpu_pass",
    "mps_pass",
    "cpu_pass",
    "completed_without_device_call",
    "resolved_without_device_work",
    "failed",
    "timeout",
    "blocked",
]
STATUSES: tuple[Status, ...] = get_args(Status)
PASSES: frozenset[Status] = frozenset(("gpu_pass", "mps_pass", "cpu_pass"))
PASS_ON: dict[str, Status] = {"cuda": "gpu_pass", "mps": "mps_pass", "cpu": "cpu_pass"}

MEANING: dict[Status, str] = {
    "gpu_pass": "finished; resolved CUDA and did its work there",
    "mps_pass": "finished; resolved MPS and did its work there",
    "cpu_pass": "finished; resolved the CPU and did its work there",
    "completed_without_device_call": "finished without a device_for call that resolved to the requested device",
    "resolved_without_device_work": "finished and resolved the device, but its work was done elsewhere",
    "failed": "ended with an error",
    "timeout": "its whole process tree was ended at the deadline",
    "blocked": "a data set or checkpoint that it needs is missing",
}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class AuditSettings(_Part):
    """Everything that decides what an audit runs and how.

    Attributes:
        device: as requested; `resolved_device` is what it meant on this machine.
        seeds: in the order in which every variant is trained; empty: as many as each card says.
        dataset_dir: as given.
        overrides: the documented variables that were set, with their values.
        workers: adapters at a time; the only setting that a resumed audit may change.
    """

    device: str
    resolved_device: str
    budget: Budget
    seeds: list[int]
    timeout_seconds: float = Field(gt=0)
    checkpoints: Literal["auto", "micro"] = "auto"
    dataset_dir: str | None = None
    selection: Selection = Selection()
    shards: int = Field(default=1, ge=1)
    shard_index: int = Field(default=0, ge=0)
    overrides: dict[str, str] = {}
    workers: int = Field(default=1, ge=1)

    def differences(self, other: AuditSettings, *, ignoring: Sequence[str] = ("workers",)) -> list[str]:
        """Fields in which two settings differ, as `name (mine, theirs)`."""
        mine, theirs = self.model_dump(), other.model_dump()
        return [
            f"{name.replace('_', ' ')} ({mine[name]!r}, {theirs[name]!r})"
            for name in mine
            if name not in ignoring and mine[name] != theirs[name]
        ]


class DeviceCall(_Part):
    """One place that called `device_for`, how often, and when first."""

    requested: str
    resolved: str
    file: str
    line: int
    function: str
    time: float
    pid: int
    count: int = 1


class DeviceCounts(_Part):
    """Work dispatched to one kind of device."""

    operations: int = 0
    elements: int = 0
    flops: int = 0
    bytes: int = 0


class StageResult(_Part):
    """One stage; `seconds` is None when it did not end."""

    name: str
    trains: bool
    seconds: float | None
    optimiser_steps: int


class AdapterResult(_Part):
    """How one adapter fared.

    Attributes:
        explicit: whether its own file has a reachable call of `device_for`, found at `sites`.
        fidelity: what the run showed, at most what the card declares; None when it did not finish.
        share: the requested device's share of all compute, in `measure`.
        calls, work, peak_bytes: the evidence.
        seeds: in the order in which they were trained; empty when it did not finish.
        log, evidence: files on this machine, beside the output.
        log_tail: the end of the log, for a run that did not pass.
        commit: of the code that ran.
    """

    key: str
    title: str
    family: str
    status: Status
    reason: str
    declared_fidelity: Fidelity
    fidelity: Fidelity | None
    explicit: bool
    sites: list[Site]
    started: str
    seconds: float
    attempt: int
    calls: list[DeviceCall]
    share: float | None
    measure: Literal["flops", "elements"] | None
    work: dict[str, DeviceCounts]
    peak_bytes: dict[str, int]
    peak_rss_bytes: int | None
    stages: list[StageResult]
    seeds: list[int]
    settings: dict[str, int]
    overrides: dict[str, int]
    data: dict[str, str]
    checkpoints: dict[str, str]
    notes: list[str]
    diagnosis: Diagnosis | None
    exit_code: int | None
    signal: int | None
    log: str
    evidence: str
    log_tail: str = ""
    commit: str | None = None

    @property
    def passed(self) -> bool:
        """Ran on the requested device, with evidence."""
        return self.status in PASSES

    @property
    def acceptable(self) -> bool:
        """Passed, or is one that never claimed an accelerator path and finished."""
        return self.passed or (self.status == "completed_without_device_call" and not self.explicit)


class AuditRecord(Record):
    """An audit, as far as it has come; written anew each time an adapter ends.

    Attributes:
        selected: the whole selection; `planned` is this file's shard of it, in the order of running.
        finished: whether every planned adapter has a result.
        merged_from: names of the shard files, for a merged record.
    """

    schema_version: int = 1
    kind: Literal["audit"] = "audit"
    disclaimer: str = DISCLAIMER
    settings: AuditSettings
    environment: dict[str, str]
    started: str
    updated: str
    selected: list[str]
    planned: list[str]
    results: list[AdapterResult] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    finished: bool = False
    merged_from: list[str] = Field(default_factory=list)
    status_counts: dict[str, int] = Field(default_factory=dict)
    passed_seconds: float = 0.0
    passed_seconds_label: str = "sum of the durations of passed runs; not a throughput benchmark"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        shards, index = self.settings.shards, self.settings.shard_index
        if index >= shards:
            raise ValueError(f"there is no shard {index} of {shards}")
        if sorted(self.planned) != shard(self.selected, shards, index):
            raise ValueError(f"the planned adapters are not shard {index} of {shards} of the selected ones")
        for key, count in Counter(result.key for result in self.results).items():
            if count > 1 or key not in self.planned:
                raise ValueError(f"{count} results of '{key}', which is planned {self.planned.count(key)} times")
        return self

    @property
    def missing(self) -> list[str]:
        """Planned adapters without a result."""
        done = {result.key for result in self.results}
        return [key for key in self.planned if key not in done]

    @property
    def good(self) -> bool:
        """Whether every planned adapter passed or never claimed an accelerator path."""
        return not self.missing and all(result.acceptable for result in self.results)

    def with_results(self, results: Sequence[AdapterResult], updated: str) -> AuditRecord:
        """This record with other results, in planned order, and the totals that follow from them."""
        order = {key: i for i, key in enumerate(self.planned)}
        ordered = sorted(results, key=lambda result: order[result.key])
        counts = Counter(result.status for result in ordered)
        record = self.model_copy(
            update={
                "results": ordered,
                "updated": updated,
                "status_counts": {status: counts[status] for status in STATUSES if counts[status]},
                "passed_seconds": round(sum(result.seconds for result in ordered if result.passed), 3),
            }
        )
        return record.model_copy(update={"finished": not record.missing})


def merge(paths: Sequence[Path]) -> AuditRecord:
    """Joins the shard files of one audit.

    What is missing (a shard, or an adapter of an unfinished shard) stays missing in the result and is named in its
    notes. Raises `UserError` for files of different audits and for an adapter that occurs in two files.
    """
    if not paths:
        raise UserError("name at least one shard file to merge.")
    records = [read_record(path, AuditRecord) for path in paths]
    first, path0 = records[0], paths[0]
    for record, path in zip(records[1:], paths[1:]):
        different = first.settings.differences(record.settings, ignoring=("workers", "shard_index"))
        if first.selected != record.selected:
            different.append("selected adapters")
        if different:
            raise UserError(f"{path0} and {path} are not shards of one audit: they differ in {', '.join(different)}.")
    where: dict[str, list[str]] = {}
    for record, path in zip(records, paths):
        for result in record.results:
            where.setdefault(result.key, []).append(str(path))
    double = {key: files for key, files in where.items() if len(files) > 1}
    if double:
        named = "; ".join(f"{key} in {' and '.join(files)}" for key, files in sorted(double.items()))
        raise UserError(f"results occur twice, give each shard once: {named}.")
    notes = list(dict.fromkeys(note for record in records for note in record.notes))
    notes += _absent(first, records, paths)
    commits = {record.environment.get("commit", "unknown") for record in records}
    if len(commits) > 1:
        notes.append(f"the shards ran different code: commits {', '.join(sorted(commits))}")
    merged = AuditRecord(
        settings=first.settings.model_copy(update={"shards": 1, "shard_index": 0}),
        environment=first.environment,
        started=min(record.started for record in records),
        updated=max(record.updated for record in records),
        selected=first.selected,
        planned=first.selected,
        notes=notes,
        merged_from=[str(path) for path in paths],
    )
    return merged.with_results([r for record in records for r in record.results], merged.updated)


def _absent(first: AuditRecord, records: Sequence[AuditRecord], paths: Sequence[Path]) -> list[str]:
    """One note for each shard that was not given, and for each that is not finished."""
    total = first.settings.shards
    if first.merged_from:  # merging merged files: shards are no longer told apart
        return []
    given: Mapping[int, Path] = {record.settings.shard_index: path for record, path in zip(records, paths)}
    notes = [
        f"shard {index} of {total} is missing: {', '.join(keys)}"
        for index in range(total)
        if index not in given and (keys := shard(first.selected, total, index))
    ]
    notes += [
        f"{path} is not finished: {', '.join(record.missing)}" for record, path in zip(records, paths) if record.missing
    ]
    return notes
