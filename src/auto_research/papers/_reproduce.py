"""Reproducing papers: each in a process of its own, each with a run folder that holds record, pages and log."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from auto_research.execution.local import LocalExecutor
from auto_research.papers._registry import Adapter, adapters
from auto_research.runtime.budget import Budget, Overrides
from auto_research.runtime.device import resolve_device
from auto_research.runtime.errors import UserError
from auto_research.runtime.process import LANGUAGE_PRELOAD, TORCH_PRELOAD, Job, Outcome
from auto_research.runtime.records import write_json_atomic, write_text_atomic
from auto_research.study.context import CheckpointChoice
from auto_research.study.execute import StudyRecord
from auto_research.study.report import html, markdown

ENTRY = "auto_research.study.execute:run_adapter"


@dataclass(frozen=True)
class Request:
    """What to reproduce and how; the same for every paper of one call."""

    budget: Budget = "smoke"
    seeds: tuple[int, ...] = ()
    device: str = "auto"
    dataset_dir: Path | None = None
    checkpoints: CheckpointChoice = "auto"
    timeout_s: float = 24 * 3600.0
    workers: int = 1

    def check(self, chosen: Sequence[Adapter]) -> None:
        """Raises `UserError` for what would otherwise fail inside every process."""
        resolve_device(self.device)
        if self.workers < 1:
            raise UserError(f"--workers {self.workers} is not a positive number of processes")
        if len(set(self.seeds)) != len(self.seeds):
            raise UserError(f"--seeds {','.join(map(str, self.seeds))} repeats a seed; a seed counts only once")
        if self.dataset_dir is not None and not self.dataset_dir.is_dir():
            raise UserError(f"--dataset-dir {self.dataset_dir} is not a folder; name the one that holds the data sets")
        known = list(adapters())
        for adapter in chosen:
            Overrides(adapter.key, adapter.card.overrides, other_keys=known)


@dataclass(frozen=True)
class Result:
    """How one paper's run ended; `record` is None unless it finished."""

    key: str
    folder: Path
    outcome: Outcome
    record: StudyRecord | None


def payload(adapter: Adapter, request: Request, **more: Any) -> dict[str, Any]:
    """What `study.execute.run_adapter` is told about one paper."""
    return {
        "card": str(adapter.card_path),
        "entry": adapter.entry,
        "budget": request.budget,
        "seeds": list(request.seeds),
        "device": request.device,
        "dataset_dir": str(request.dataset_dir.resolve()) if request.dataset_dir else None,
        "checkpoints": request.checkpoints,
        "other_keys": list(adapters()),
        **more,
    }


def _folder(root: Path, key: str, budget: str) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        folder = root / f"{key}-{budget}-{stamp}{f'-{attempt}' if attempt else ''}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"cannot create {folder} ({error.strerror}); choose another --output") from error
        return folder
    raise UserError(f"{root} holds a thousand runs of this second; choose another --output")


def _job(adapter: Adapter, request: Request, root: Path) -> Job:
    folder = _folder(root, adapter.key, request.budget)
    return Job(
        target=ENTRY,
        payload=payload(adapter, request, evidence=None),
        timeout_s=request.timeout_s,
        log_path=folder / "log.txt",
        result_path=folder / "outcome.json",
        preload=LANGUAGE_PRELOAD if adapter.card.checkpoints else TORCH_PRELOAD,
        name=adapter.key,
    )


def _write(key: str, folder: Path, outcome: Outcome) -> Result:
    record = None
    if outcome.state == "finished":
        record = StudyRecord.model_validate(outcome.result)
        write_json_atomic(folder / "result.json", record)
        write_text_atomic(folder / "report.md", markdown(record))
        write_text_atomic(folder / "report.html", html(record))
        (folder / "outcome.json").unlink(missing_ok=True)
    return Result(key, folder, outcome, record)


def reproduce(
    chosen: Sequence[Adapter], request: Request, root: Path, on_line: Callable[[str], None] | None = None
) -> Iterator[Result]:
    """Runs the papers, `request.workers` at a time, and yields each result as it ends.

    A paper that fails does not stop the others. `on_line` receives what the papers print. Raises `UserError`
    before anything starts when the request cannot work.
    """
    request.check(chosen)
    say = (lambda job, line: on_line(line)) if on_line else None
    with LocalExecutor(request.workers, say) as executor:
        for adapter in chosen:
            executor.submit(_job(adapter, request, root))
        for job, outcome in executor.as_completed():
            yield _write(job.name, job.log_path.parent, outcome)


def results_folder(folder: Path) -> Path:
    """Makes the folder that receives records; a run of hours must not end at a folder that cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create {folder} ({error.strerror}); choose another --results-dir") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"cannot write to {folder}; choose another --results-dir or correct its permissions")
    return folder


def keep(result: Result, folder: Path) -> Path:
    """Copies a finished run's record to `<folder>/<key>.json`, the form in which results are committed."""
    assert result.record is not None
    target = folder / f"{result.key}.json"
    write_json_atomic(target, result.record)
    return target


def parse_seeds(text: str) -> tuple[int, ...]:
    """`42,43,44` as numbers; raises `UserError`."""
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise UserError(f"--seeds '{text}' is not a list of whole numbers such as 42,43,44")
    if too_large := [part for part in text.split(",") if len(part.lstrip("0")) > 10 or int(part) >= 2**32]:
        raise UserError(f"--seeds {','.join(too_large)} is out of range; a seed lies in 0..{2**32 - 1}")
    return tuple(int(part) for part in text.split(","))
