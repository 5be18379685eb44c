"""One seed of one candidate: what the isolated process does, and what its end means.

A cell's folder holds one folder an attempt (`attempt-1`, ...), each with the log, the heartbeat, the raw result and
the stored artefact, and the immutable `result.json` once the cell has ended.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auto_research.evolve.genome import ensure_runnable
from auto_research.evolve.records import Attempt, Candidate, CellResult, CellState, Role, RunConfig
from auto_research.evolve.workflow import NonFinite, Scores, Sizes, Workflow, enter_search
from auto_research.evolve.workflows import workflow as find_workflow
from auto_research.runtime.errors import UserError, nearest
from auto_research.runtime.process import Outcome

LOG_BYTES = 20_480
"""How much of a failed attempt's output a record keeps."""

BEAT_S = 1.0
"""Seconds between two heartbeats."""

HEARTBEAT = "heartbeat.json"
ARTEFACT = "artefact"
CHECKPOINTS = "AUTO_RESEARCH_CELL_CHECKPOINTS"


@dataclass(frozen=True)
class Cell:
    """What is to run: one seed of one candidate in one role. Raises `UserError` for a candidate that never runs."""

    candidate: Candidate
    seed: int
    role: Role

    def __post_init__(self) -> None:
        ensure_runnable(self.candidate)

    @property
    def id(self) -> str:
        return cell_id(self.candidate, self.seed, self.role)


def cell_id(candidate: Candidate, seed: int, role: Role) -> str:
    """Name of a cell and of its folder."""
    return f"{candidate.id}-{role}-seed{seed}"


def attempt_folder(folder: Path, cell: str, attempt: int) -> Path:
    """Where attempt 1, 2, ... of a cell keeps its files."""
    return folder / "cells" / cell / f"attempt-{attempt}"


def artefact_folder(folder: Path, result: CellResult) -> Path:
    """Where the stored weights of a completed cell are: with the attempt that completed it."""
    return attempt_folder(folder, result.cell, len(result.attempts)) / ARTEFACT


def sizes_for(workflow: Workflow, config: RunConfig) -> Sizes:
    """The sizes of this budget with the overrides of the configuration.

    Raises `UserError` for an unknown one, and for one that is negative, or 0 where the budget has more.
    """
    sizes = workflow.sizes(config.budget)
    for name, value in config.sizes.items():
        if name not in sizes.values:
            known = ", ".join(sizes.values)
            raise UserError(f"{workflow.key} has no size '{name}'.{nearest(name, sizes.values)} Known: {known}.")
        if value < (least := min(1, sizes.values[name])):
            raise UserError(f"size {name} is at least {least}, not {value}")
    return Sizes(sizes.budget, {**sizes.values, **config.sizes})


def checkpoints() -> Path | None:
    """Inside a cell: a folder that outlives the attempt, for a workflow that can go on from its own checkpoint."""
    return Path(os.environ[CHECKPOINTS]) if CHECKPOINTS in os.environ else None


# ------------------------------------------------------------------------------------- in the isolated process


class Heartbeat:
    """The `Progress` of a cell: a file with the latest step and loss that changes only while the cell gets on.

    The training loop's steps are its sign of life. In the other phases (loading, saving, evaluating) there is no step
    to report; there a thread watches that processor time goes on being used.
    """

    def __init__(self, path: Path) -> None:
        import psutil

        self._path = path
        self._facts: dict[str, Any] = {
            "pid": os.getpid(),
            "created": psutil.Process().create_time(),
            "host": socket.gethostname(),
            "phase": "start",
            "step": None,
            "loss": None,
        }
        self._written = -math.inf
        self._lock = threading.Lock()
        self._write()

    def __call__(self, step: int, loss: float) -> None:
        loss = float(loss)
        finite = math.isfinite(loss)
        self._facts.update(step=int(step), loss=loss if finite else None)
        if not finite:
            raise NonFinite(f"the loss is {loss} at step {step}")
        if time.monotonic() - self._written >= BEAT_S:
            self._write()

    @contextmanager
    def phase(self, name: str, *, steps: bool = False) -> Iterator[None]:
        """A part of the cell's life; `steps` when it reports its own."""
        self._facts["phase"] = name
        self._write()
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(done,), daemon=True)
        if not steps:
            watcher.start()
        try:
            yield
        finally:
            done.set()
            if not steps:
                watcher.join()
            self._write()

    def _watch(self, done: threading.Event) -> None:
        used = _processor_seconds()
        while not done.wait(BEAT_S):
            if (now := _processor_seconds()) - used > 0.02 * BEAT_S:
                self._write()
            used = now

    def _write(self) -> None:
        with self._lock:
            self._written = time.monotonic()
            temporary = self._path.with_name(f".{self._path.name}.new")
            temporary.write_text(json.dumps({**self._facts, "time": self._written}), encoding="utf-8")
            os.replace(temporary, self._path)


def _processor_seconds() -> float:
    """Of this process and its living children, which data loaders are."""
    import psutil

    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        total += times.user + times.system
    return total


def read_heartbeat(folder: Path) -> dict[str, Any]:
    """The last heartbeat of an attempt; empty when it made none."""
    try:
        found = json.loads((folder / HEARTBEAT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def folder_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of all files below a folder."""
    sha = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        sha.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                sha.update(block)
    return sha.hexdigest()


def checked_scores(scores: Scores, metric: str) -> tuple[dict[str, float], list[float]]:
    """Metrics and units as finite floats. Raises `NonFinite`, or `KeyError` without the primary metric."""
    plain = {name: float(value) for name, value in scores.metrics.items()}
    bad = [name for name, value in plain.items() if not math.isfinite(value)]
    if bad:
        raise NonFinite(f"not finite: {', '.join(bad)}")
    if metric not in plain:
        raise KeyError(f"the evaluation has no '{metric}', the primary metric")
    values = [float(value) for value in scores.units]
    if not all(map(math.isfinite, values)):
        raise NonFinite("a per-example value is not finite")
    return plain, values


def use_device(name: str, seed: int) -> str:
    """The device of this process, with every random generator seeded."""
    import random

    import numpy as np

    if name == "cpu" and "torch" not in sys.modules:  # a workflow without torch does not pay for it
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - libraries below us draw from the global state
        return "cpu"
    from auto_research.runtime.device import resolve_device, seed_everything

    seed_everything(seed)
    return str(resolve_device(name))


def load_data(workflow: Workflow, payload: Mapping[str, Any], sizes: Sizes) -> Any:
    """Train and validation data, which must be those the run was prepared with."""
    data = workflow.load(sizes, Path(payload["dataset_dir"]) if payload["dataset_dir"] else None)
    expected = payload.get("digests")
    if expected is not None and data.digests != expected:
        raise UserError("the data changed since the run began: restore them, or start a new run")
    return data


def peaks() -> dict[str, int]:
    """Largest resident memory of this process, and largest memory allocated on its accelerator, in bytes."""
    import resource

    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)
    torch = sys.modules.get("torch")
    used = torch is not None and torch.cuda.is_initialized()
    return {
        "peak_rss_bytes": int(rss),
        "peak_device_bytes": int(torch.cuda.max_memory_reserved()) if torch is not None and used else 0,
    }


def run_cell(payload: dict[str, Any]) -> dict[str, Any]:
    """Trains, stores and validates one seed of one candidate; called inside an isolated process.

    Payload: `workflow`, `genome`, `seed`, `budget`, `sizes` (resolved), `dataset_dir`, `device`, `digests` (of the
    prepared data), `folder` (of the attempt). Returns metrics, units, seconds, peaks, device and artefact digest.
    """
    enter_search()
    folder = Path(payload["folder"])
    heartbeat = Heartbeat(folder / HEARTBEAT)
    clock, processor = time.perf_counter(), time.process_time()
    workflow = find_workflow(payload["workflow"])
    sizes = Sizes(payload["budget"], payload["sizes"])
    genome = workflow.space.resolve(payload["genome"])
    try:
        with heartbeat.phase("load"):
            device = use_device(payload["device"], payload["seed"])
            data = load_data(workflow, payload, sizes)
        with heartbeat.phase("train", steps=True):
            artefact = workflow.train(genome, data, payload["seed"], sizes, device, heartbeat)
        stored = folder / ARTEFACT
        stored.mkdir()
        with heartbeat.phase("save"):
            workflow.save(artefact, stored)
            digest = folder_digest(stored)
        with heartbeat.phase("validate"):
            scores = workflow.validate(artefact, data, sizes, device)
    finally:
        (folder / "peaks.json").write_text(json.dumps(peaks()))
    metrics, units = checked_scores(scores, workflow.metric)
    return {
        "metrics": metrics,
        "units": units,
        "seconds": time.perf_counter() - clock,
        "cpu_seconds": time.process_time() - processor,
        **peaks(),
        "device": device,
        "artefact": digest,
    }


# ------------------------------------------------------------------------------------------ what an end means

CRASHES = {"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS"}
"""Signals that a program brings on itself: the same input does it again."""

NOT_TRANSIENT = {"FileNotFoundError", "PermissionError", "IsADirectoryError", "NotADirectoryError", "FileExistsError"}
"""Errors of the operating system that waiting does not cure."""

NO_SPACE = "No space left"


@dataclass
class End:
    """How one attempt ended.

    Attributes:
        transient: another attempt may end otherwise.
        no_space: the disk is full: no fault of the cell, the run has to stop.
    """

    attempt: Attempt
    transient: bool
    no_space: bool
    peaks: dict[str, int]


def end_of(outcome: Outcome, folder: Path, sizes: Mapping[str, int], changed: dict[str, int]) -> End:
    """What the end of a cell's process means; `sizes` and `changed` are those of this attempt."""
    state, reason = _state(outcome)
    if state == "completed":
        try:
            measured(outcome.result or {})
        except ValueError as problem:
            state, reason = "interrupted", f"its result is corrupt ({str(problem).splitlines()[0]})"
    beat = read_heartbeat(folder)
    error = outcome.error
    attempt = Attempt(
        state=state,
        seconds=outcome.seconds,
        reason=reason,
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        error=f"{error.type}: {error.message}" if error else "",
        traceback=error.traceback if error else "",
        log_tail=_last_bytes(outcome.log_tail) if state != "completed" else "",
        last_step=beat.get("step"),
        last_loss=beat.get("loss"),
        changed=changed,
    )
    no_space = state != "completed" and NO_SPACE in (error.message if error else outcome.reason)
    return End(attempt, _transient(state, outcome, sizes), no_space, _peaks(outcome, folder))


def measured(result: Mapping[str, Any]) -> dict[str, Any]:
    """The measured fields of what `run_cell` returned. Raises `ValueError` when one is missing or of the wrong kind."""
    names = ("metrics", "units", "seconds", "cpu_seconds", "peak_rss_bytes", "peak_device_bytes", "device", "artefact")
    found = {name: result[name] for name in names if result.get(name) is not None}
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{', '.join(missing)} missing")
    CellResult(cell="", candidate="", seed=0, role="search", state="completed", **found)
    return found


def _state(outcome: Outcome) -> tuple[CellState, str]:
    match outcome.state:
        case "finished":
            return "completed", ""
        case "timed_out" | "out_of_memory":
            return outcome.state, outcome.reason
        case "killed":
            ours = outcome.reason == "cancelled by the caller"
            return ("interrupted" if ours else "killed"), outcome.reason
        case "failed" if outcome.error is not None and "NonFinite" in outcome.error.kinds:
            return "non_finite", outcome.error.message
        case "failed" if outcome.error is None and outcome.reason.startswith("its result is"):
            return "interrupted", outcome.reason
    return "failed", outcome.reason


def _transient(state: CellState, outcome: Outcome, sizes: Mapping[str, int]) -> bool:
    """Whether the same would not simply happen again: a lost worker, input and output, memory, an interruption."""
    import signal as signals

    if state == "out_of_memory":  # half the micro-batch may fit
        micro = sizes.get("micro_batch", 0)
        return micro >= 2 and micro % 2 == 0
    if state == "interrupted" or outcome.state == "start_failed":
        return True
    if state == "killed":
        return outcome.signal is None or outcome.signal not in {getattr(signals, name) for name in CRASHES}
    if state == "failed" and outcome.error is not None:
        kinds = set(outcome.error.kinds)
        return "OSError" in kinds and not kinds & NOT_TRANSIENT
    return False


def _peaks(outcome: Outcome, folder: Path) -> dict[str, int]:
    """Measured by the cell itself where it could, else by its guardian."""
    try:
        found = json.loads((folder / "peaks.json").read_text())
    except (OSError, ValueError):
        found = {"peak_rss_bytes": 0, "peak_device_bytes": 0}
    found["peak_rss_bytes"] = max(found["peak_rss_bytes"], outcome.peak_rss_bytes or 0)
    return {name: int(value) for name, value in found.items()}


def _last_bytes(text: str) -> str:
    return text.encode()[-LOG_BYTES:].decode(errors="ignore")


def result_of(cell: Cell, attempts: list[Attempt], raw: Mapping[str, Any] | None, peaks: dict[str, int]) -> CellResult:
    """The record of a cell that has ended; `raw` is what the completing attempt returned, None when none completed."""
    lost: dict[str, Any] = {"metrics": None, "seconds": attempts[-1].seconds, **peaks}
    return CellResult(
        cell=cell.id,
        candidate=cell.candidate.id,
        seed=cell.seed,
        role=cell.role,
        state=attempts[-1].state,
        attempts=attempts,
        **(lost if raw is None else measured(raw)),
    )
