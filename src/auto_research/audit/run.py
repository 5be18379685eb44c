"""Runs adapters one by one in isolated processes and records each the moment it ends."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from auto_research.audit.diagnose import Diagnosis, Failure, diagnose
from auto_research.audit.plan import check_overrides, scans, select, shard
from auto_research.audit.record import (
    PASS_ON,
    AdapterResult,
    AuditRecord,
    AuditSettings,
    DeviceCall,
    DeviceCounts,
    StageResult,
    Status,
)
from auto_research.audit.scan import Scan
from auto_research.papers._registry import Adapter
from auto_research.runtime.budget import variable_name
from auto_research.runtime.errors import UserError
from auto_research.runtime.evidence import WorkVerdict, device_work_verdict
from auto_research.runtime.process import LANGUAGE_PRELOAD, TORCH_PRELOAD, Job, Outcome, Running, start
from auto_research.runtime.records import OutputLock, read_jsonl, read_record, write_json_atomic
from auto_research.runtime.versions import cores, environment

TARGET = "auto_research.study.execute:run_adapter"
TAIL_LINES = 60
TAIL_CHARACTERS = 8_000
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclass
class Progress:
    """What is going on, for whoever watches."""

    planned: list[str]
    running: dict[str, float] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    results: dict[str, AdapterResult] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()


Watch = Callable[[Progress, AdapterResult | None], None]
"""Called when an adapter starts (None) and when one ends."""


def run_folder(output: Path) -> Path:
    """Where raw logs, evidence and results of the single runs go: below `runs/`, which stays out of version control.

    Beside the output when that lies below a folder `runs`, else `runs/audit/<name>` of the current folder.
    """
    absolute = Path(os.path.abspath(output))
    if "runs" in absolute.parent.parts:
        return absolute.with_suffix("")
    return Path.cwd() / "runs" / "audit" / absolute.stem


def active_overrides(
    adapters: Mapping[str, Adapter], keys: Iterable[str], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Documented override variables of these adapters that are set."""
    return {
        name: environ[name]
        for key in keys
        for suffix in adapters[key].card.overrides
        if (name := variable_name(key, suffix)) in environ
    }


def run_audit(
    settings: AuditSettings,
    output: Path,
    adapters: Mapping[str, Adapter],
    *,
    resume: bool = False,
    notes: Sequence[str] = (),
    watch: Watch | None = None,
) -> AuditRecord:
    """Audits one shard of a selection; `output` holds a complete record after every adapter.

    With `resume`, results of an earlier, interrupted audit with the same settings at `output` are kept: whatever
    passed, or finished without ever claiming an accelerator path, is not run again. Without it, an earlier record is
    moved aside to `<name>.previous.json`.

    Raises `UserError` for bad settings, another writer of `output`, a full disk, or a record of other settings.
    An interrupt ends what runs and leaves the record of what had ended.
    """
    if len(set(settings.seeds)) != len(settings.seeds):
        raise UserError(f"seeds {settings.seeds} repeat; a seed counts only once.")
    selected = select(adapters, settings.selection)
    planned = shard(selected, settings.shards, settings.shard_index)
    check_overrides(adapters, planned)
    with OutputLock(output):
        record = _begin(settings, output, selected, planned, notes, resume=resume)
        kept = {r.key: r for r in record.results if r.acceptable}
        record = record.with_results(list(kept.values()), _now())
        write_json_atomic(output, record)
        progress = Progress(planned, results=dict(kept), kept=frozenset(kept))
        waiting = [key for key in planned if key not in kept]
        runner = _Runner(settings, run_folder(output), adapters, scans(adapters, waiting), progress, watch)
        for result in runner.results(waiting):
            progress.results[result.key] = result
            record = record.with_results(list(progress.results.values()), _now())
            write_json_atomic(output, record)
            if watch is not None:
                watch(progress, result)
    return record


def _begin(
    settings: AuditSettings,
    output: Path,
    selected: list[str],
    planned: list[str],
    notes: Sequence[str],
    *,
    resume: bool,
) -> AuditRecord:
    fresh = AuditRecord(
        settings=settings,
        environment=environment(),
        started=_now(),
        updated=_now(),
        selected=selected,
        planned=planned,
        notes=list(notes),
    )
    if not output.exists():
        return fresh
    if not resume:
        previous = output.with_name(f"{output.stem}.previous{output.suffix}")
        try:
            output.replace(previous)
        except OSError as error:
            raise UserError(
                f"cannot move the earlier {output} aside ({error.strerror}); give another --output."
            ) from error
        return fresh
    earlier = read_record(output, AuditRecord)
    different = settings.differences(earlier.settings)
    if earlier.planned != planned or earlier.selected != selected:
        different.append("selected adapters")
    if different:
        raise UserError(
            f"{output} cannot be resumed with other settings: {', '.join(different)}; give the same ones, another "
            "--output, or leave out --resume."
        )
    merged_notes = list(dict.fromkeys([*earlier.notes, *notes]))
    if earlier.environment.get("commit") != fresh.environment.get("commit"):
        merged_notes.append("resumed with other code than it was begun with; each result names its commit")
    return earlier.model_copy(update={"notes": list(dict.fromkeys(merged_notes)), "settings": settings})


@dataclass
class _Runner:
    settings: AuditSettings
    folder: Path
    adapters: Mapping[str, Adapter]
    scans: Mapping[str, Scan]
    progress: Progress
    watch: Watch | None
    jobs: dict[str, Running] = field(default_factory=dict)
    stopping: bool = False

    def results(self, keys: Sequence[str]) -> Iterable[AdapterResult]:
        """Runs the adapters, `workers` at a time, and yields each result as it comes."""
        # What every adapter imports sooner or later is imported once, by the server that all processes are forked from.
        speaks = any(self.adapters[key].card.checkpoints for key in keys)
        preload = LANGUAGE_PRELOAD if speaks else TORCH_PRELOAD
        pool = ThreadPoolExecutor(self.settings.workers, thread_name_prefix="audit")
        try:
            pending: set[Future[AdapterResult | None]] = {pool.submit(self._run, key, preload) for key in keys}
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    result = future.result()
                    if result is not None:
                        yield result
        finally:
            # Reached early by an interrupt, a full disk, or a fault: nothing may go on running.
            self.stopping = True
            pool.shutdown(wait=False, cancel_futures=True)
            for job in list(self.jobs.values()):
                job.cancel()
            pool.shutdown(wait=True)

    def _run(self, key: str, preload: tuple[str, ...]) -> AdapterResult | None:
        if self.stopping:
            return None
        adapter = self.adapters[key]
        attempt, stem = self._attempt(key)
        evidence = self.folder / f"{stem}.evidence.jsonl"
        settings = self.settings
        job = Job(
            name=key,
            target=TARGET,
            payload={
                "card": str(adapter.card_path.absolute()),
                "entry": adapter.entry,
                "budget": settings.budget,
                "seeds": list(settings.seeds),
                "device": settings.resolved_device,
                "dataset_dir": str(Path(settings.dataset_dir).absolute()) if settings.dataset_dir else None,
                "checkpoints": settings.checkpoints,
                "other_keys": [other for other in self.adapters if other != key],
                "evidence": str(evidence),
            },
            timeout_s=settings.timeout_seconds,
            log_path=self.folder / f"{stem}.log",
            result_path=self.folder / f"{stem}.result.json",
            heartbeat_path=evidence,
            threads=max(1, cores() // settings.workers),
            preload=preload,
        )
        self.progress.running[key] = time.monotonic()
        if self.watch is not None:
            self.watch(self.progress, None)
        running = self.jobs[key] = start(job)
        if self.stopping:
            running.cancel()
        outcome = running.wait(on_line=lambda line: self.progress.said.__setitem__(key, line))
        ended = time.time()
        del self.jobs[key]
        self.progress.running.pop(key, None)
        if self.stopping:
            return None
        return judge(adapter, self.scans[key], settings, outcome, evidence, attempt=attempt, ended=ended)

    def _attempt(self, key: str) -> tuple[int, str]:
        """Number and file stem of this attempt; files of earlier ones, also of killed ones, are kept."""
        attempt = 1
        while (self.folder / f"{_stem(key, attempt)}.log").exists():
            attempt += 1
        return attempt, _stem(key, attempt)


def _stem(key: str, attempt: int) -> str:
    return key if attempt == 1 else f"{key}.attempt-{attempt}"


# From what a process left behind to a result.


def judge(
    adapter: Adapter,
    scan: Scan,
    settings: AuditSettings,
    outcome: Outcome,
    evidence: Path,
    *,
    attempt: int = 1,
    ended: float | None = None,
) -> AdapterResult:
    """Status, evidence and diagnosis of one adapter from its outcome and its evidence log."""
    notes: list[str] = []
    try:
        stages, verdict, calls, (work, peaks) = _read_evidence(read_jsonl(evidence), settings)
    except UserError as error:
        stages, verdict, calls, (work, peaks) = _read_evidence([], settings)
        notes.append(f"its evidence cannot be read: {error}")
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # lines that the adapter itself wrote
        stages, verdict, calls, (work, peaks) = _read_evidence([], settings)
        notes.append(f"its evidence holds records of another form ({type(error).__name__}: {error}) and proves nothing")
    study: dict[str, Any] = outcome.result or {}
    diagnosis: Diagnosis | None = None
    status: Status
    if outcome.state == "finished":
        status = PASS_ON[settings.resolved_device.partition(":")[0]] if verdict.status == "pass" else verdict.status
        reason = verdict.reason
    else:
        diagnosis = diagnose(_failure(adapter, settings, outcome, stages, evidence, ended or time.time()))
        if outcome.state == "timed_out":
            status = "timeout"
        elif diagnosis.kind in ("missing_data", "missing_checkpoint"):
            status = "blocked"
        else:
            status = "failed"
        reason = diagnosis.summary
    if outcome.strays:
        notes.append(f"{outcome.strays} processes that it left running were ended")
    if outcome.left_behind:
        notes.append(f"processes {outcome.left_behind} are stuck in the kernel and could not be ended")
    if scan.note:
        notes.append(scan.note)
    result = AdapterResult(
        key=adapter.key,
        title=adapter.card.title,
        family=adapter.card.family,
        status=status,
        reason=reason,
        declared_fidelity=adapter.card.fidelity,
        fidelity=_fidelity(adapter, study, stages) if outcome.state == "finished" else None,
        explicit=scan.explicit,
        sites=[site.model_copy(update={"file": shown_path(site.file)}) for site in scan.sites],
        started=outcome.started_at,
        seconds=round(outcome.seconds, 3),
        attempt=attempt,
        calls=calls,
        share=verdict.share,
        measure=verdict.measure,
        work=work,
        peak_bytes=peaks,
        peak_rss_bytes=outcome.peak_rss_bytes,
        stages=stages,
        seeds=study.get("seeds", []),
        settings=study.get("settings", {}),
        overrides=study.get("overrides", {}),
        data=study.get("data", {}),
        checkpoints={
            role: f"{c.get('name')} from {c.get('source')}" for role, c in study.get("checkpoints", {}).items()
        },
        notes=[*study.get("notes", []), *notes],
        diagnosis=diagnosis,
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        log=shown_path(outcome.log_path),
        evidence=shown_path(evidence),
        commit=environment().get("commit"),
    )
    return result if result.passed else result.model_copy(update={"log_tail": clean_tail(outcome.log_tail)})


def _read_evidence(
    records: Sequence[Mapping[str, Any]], settings: AuditSettings
) -> tuple[list[StageResult], WorkVerdict, list[DeviceCall], tuple[dict[str, DeviceCounts], dict[str, int]]]:
    """Stages, verdict, `device_for` calls and device work of one evidence log."""
    verdict = device_work_verdict(records, settings.resolved_device)
    return _stages(records), verdict, _calls(records), _work(records)


def _failure(
    adapter: Adapter,
    settings: AuditSettings,
    outcome: Outcome,
    stages: Sequence[StageResult],
    evidence: Path,
    ended: float,
) -> Failure:
    error = outcome.error
    deadline = ended
    signs = [p.stat().st_mtime for p in (Path(outcome.log_path), evidence) if p.exists()]
    under_way = [stage.name for stage in stages if stage.seconds is None]
    card = adapter.card
    return Failure(
        key=adapter.key,
        exception=error.type if error else "",
        message=error.message if error else outcome.reason,
        ancestors=error.kinds if error else (),
        log_tail=outcome.log_tail + (error.traceback if error else ""),
        timed_out_after=settings.timeout_seconds if outcome.state == "timed_out" else None,
        silent_seconds=max(0.0, deadline - max(signs)) if signs else 0.0,
        out_of_memory=outcome.state == "out_of_memory",
        signal=outcome.signal if outcome.state in ("killed", "out_of_memory") else None,
        exit_code=outcome.exit_code,
        stage=under_way[-1] if under_way else (stages[-1].name if stages else None),
        budget=settings.budget,
        overrides=[card.variable(suffix) for suffix in card.overrides],
        datasets=card.datasets,
        checkpoints=[name for names in card.checkpoints.values() for name in names],
    )


def _stages(records: Sequence[Mapping[str, Any]]) -> list[StageResult]:
    """Stages from their start and end records, in the order of starting; a stage without an end has no seconds."""
    stages: list[StageResult] = []
    open_: dict[str, list[int]] = {}
    for record in records:
        if record.get("event") == "stage_start":
            open_.setdefault(record["stage"], []).append(len(stages))
            stages.append(StageResult(name=record["stage"], trains=record["trains"], seconds=None, optimiser_steps=0))
        elif record.get("event") == "stage_end" and open_.get(record["stage"]):
            place = open_[record["stage"]].pop()
            stages[place] = StageResult(
                name=record["stage"],
                trains=record["trains"],
                seconds=record["seconds"],
                optimiser_steps=record["optimiser_steps"],
            )
    return stages


def _fidelity(adapter: Adapter, study: Mapping[str, Any], stages: Sequence[StageResult]) -> Any:
    """What the run showed: the declared fidelity, lowered when a stage that should train took no step."""
    idle = any(stage.trains and stage.optimiser_steps == 0 for stage in stages)
    return "concept_demo" if idle else study.get("fidelity", adapter.card.fidelity)


def _calls(records: Sequence[Mapping[str, Any]]) -> list[DeviceCall]:
    """The `device_for` calls, those from one place as one."""
    calls: dict[tuple[Any, ...], DeviceCall] = {}
    for record in records:
        if record.get("event") != "device_for":
            continue
        place = tuple(record[name] for name in ("requested", "resolved", "file", "line", "function"))
        if place in calls:
            calls[place].count += 1
            continue
        calls[place] = DeviceCall(
            requested=record["requested"],
            resolved=record["resolved"],
            file=shown_path(record["file"]),
            line=record["line"],
            function=record["function"],
            time=record["time"],
            pid=record["pid"],
        )
    return list(calls.values())


def _work(records: Sequence[Mapping[str, Any]]) -> tuple[dict[str, DeviceCounts], dict[str, int]]:
    """Work per kind of device and peak memory per device, over the outermost measurements."""
    work: dict[str, DeviceCounts] = {}
    peaks: dict[str, int] = {}
    for record in records:
        if record.get("event") != "device_work" or record.get("depth", 0) != 0:
            continue
        for device, counts in record["devices"].items():
            total = work.setdefault(device, DeviceCounts())
            for name in DeviceCounts.model_fields:
                setattr(total, name, getattr(total, name) + counts.get(name, 0))
        for device, peak in record.get("peak_bytes", {}).items():
            peaks[device] = max(peaks.get(device, 0), peak)
    return work, peaks


def shown_path(path: str | Path) -> str:
    """A path for a record: relative to the current folder or to the import folder that holds it, when it can be."""
    absolute = Path(os.path.abspath(path))
    roots = [Path.cwd(), *(Path(entry) for entry in sys.path if entry and Path(entry).is_absolute())]
    inside = [absolute.relative_to(root) for root in roots if absolute.is_relative_to(root)]
    if not inside:
        return str(absolute)
    return str(inside[0] if absolute.is_relative_to(roots[0]) else min(inside, key=lambda p: len(p.parts)))


def clean_tail(text: str) -> str:
    """The end of a log as plain text: no terminal codes, progress bars as their last state, bounded."""
    text = _ANSI.sub("", text).replace("\r\n", "\n")
    lines = [_CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n")]
    return "\n".join(lines[-TAIL_LINES:])[-TAIL_CHARACTERS:].strip("\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
