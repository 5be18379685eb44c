"""The event log of a run and the state that is rebuilt from it.

`events.jsonl` is append-only; an event is acknowledged once it is on the disk. Files that events speak of (plans,
results) are written before their event, which carries their digest: a file without its event was written by a
controller that died between the two and is taken as it is; a file that differs from its event is corrupt.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from auto_research.evolve.records import CellResult, Decision, Paired, Plan, Prepared, RunConfig, TestResult
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import Record, append_jsonl, read_jsonl, read_record, utc_now, write_json_atomic

RecordT = TypeVar("RecordT", bound=Record)

EVENTS = "events.jsonl"
CONFIG = "config.json"
PREPARED = "data.json"
TEST = "test/result.json"
RECORD = "record.json"


def plan_file(name: str) -> str:
    """Path of a plan inside a run's folder; plans are `g<N>`, `confirm` and `random`."""
    return f"plans/{name}.json"


def result_file(cell: str) -> str:
    """Path of a cell's result inside a run's folder."""
    return f"cells/{cell}/result.json"


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class EventLog:
    """Appends to the log of a run whose lock the caller holds, and hands every event on."""

    def __init__(self, folder: Path, on_event: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.folder = folder
        self.path = folder / EVENTS
        self._on_event = on_event
        self._count = len(read_jsonl(self.path))

    def append(self, event: str, **facts: Any) -> None:
        """Write one event to the disk. Raises `UserError` when there is no room; then nothing was written."""
        line = {"n": self._count, "time": utc_now(), "event": event, **facts}
        append_jsonl(self.path, line, sync=True)
        self._count += 1
        if self._on_event is not None:
            self._on_event(line)

    def keep(self, event: str, file: str, record: Any, **facts: Any) -> None:
        """Write a file, then the event that vouches for it."""
        write_json_atomic(self.folder / file, record)
        self.vouch(event, file, **facts)

    def vouch(self, event: str, file: str, **facts: Any) -> None:
        """The event alone, for a file that is there already."""
        self.append(event, file=file, sha256=file_digest(self.folder / file), **facts)


@dataclass
class State:
    """What the files of a run say.

    Attributes:
        events: the log.
        plans: by name, in the order in which they were made.
        cells: results by cell id: valid and equal to what their event vouches for.
        unacknowledged: files that are valid and have no event.
        corrupt: files that are not what they should be, with the reason.
        running: cell id -> number of its attempt that started and has not ended.
        queued: cells of the latest plans in their order that have not started.
        screened_out: candidates that keep the one seed they were screened with.
        openings: times the finaliser was told to open the test part; unfinished if it left no result.
    """

    folder: Path
    config: RunConfig
    events: list[dict[str, Any]] = field(default_factory=list)
    prepared: Prepared | None = None
    plans: dict[str, Plan] = field(default_factory=dict)
    cells: dict[str, CellResult] = field(default_factory=dict)
    unacknowledged: list[str] = field(default_factory=list)
    corrupt: dict[str, str] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    queued: dict[str, dict[str, Any]] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    screened_out: set[str] = field(default_factory=set)
    confirmed: Paired | None = None
    test: TestResult | None = None
    openings: int = 0
    summary: dict[str, Any] | None = None

    def last(self, *names: str) -> dict[str, Any] | None:
        """The latest event with one of these names."""
        return next((event for event in reversed(self.events) if event["event"] in names), None)


def rebuild(folder: Path) -> State:
    """The state of the run in `folder`, from its files alone; takes no lock and changes nothing.

    Raises `UserError` when there is no run, or a file that cannot be made again (configuration, plan) is damaged.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise UserError(f"There is no run in {folder}: name the folder that `evolve run` printed.")
    state = State(folder, read_record(folder / CONFIG, RunConfig), read_jsonl(folder / EVENTS))
    vouched: dict[str, str] = {}
    for event in state.events:
        if event["event"] == "discarded":
            vouched.pop(event["file"], None)
        elif "sha256" in event:
            vouched[event["file"]] = event["sha256"]
    state.prepared = _optional(state, PREPARED, Prepared, vouched)
    for name in _plan_names(folder):
        plan = _optional(state, plan_file(name), Plan, vouched)
        if plan is not None:
            state.plans[name] = plan
    state.test = _optional(state, TEST, TestResult, vouched)
    for event in state.events:
        _follow(state, event)
    written = {path.parent.name for path in folder.glob("cells/*/result.json")}
    for cell in sorted(written | {Path(file).parts[1] for file in vouched if file.startswith("cells/")}):
        result = _optional(state, result_file(cell), CellResult, vouched)
        if result is not None:
            state.cells[cell] = result
            state.queued.pop(cell, None)
            state.running.pop(cell, None)
    return state


def _plan_names(folder: Path) -> list[str]:
    """Names of the plans: generations by number, then the others."""
    names = {path.stem for path in folder.glob("plans/*.json")}
    generations = sorted((name for name in names if name[1:].isdecimal()), key=lambda name: int(name[1:]))
    return [*generations, *sorted(names.difference(generations))]


def _optional(state: State, file: str, model: type[RecordT], vouched: dict[str, str]) -> RecordT | None:
    """A record if its file is there and whole; a damaged one is noted, and counts as absent."""
    path = state.folder / file
    if not path.exists():
        if file in vouched:
            state.corrupt[file] = "the file is missing"
        return None
    if file in vouched and file_digest(path) != vouched[file]:
        state.corrupt[file] = "its content is not what was written"
        return None
    try:
        record = read_record(path, model)
    except UserError as error:
        state.corrupt[file] = str(error)
        return None
    if file not in vouched:
        state.unacknowledged.append(file)
    return record


def _follow(state: State, event: dict[str, Any]) -> None:
    """Take one event into the state."""
    match event["event"]:
        case "queued":
            state.queued.update({cell["cell"]: cell for cell in event["cells"]})
        case "cell_started":
            state.running[event["cell"]] = event["attempt"]
            state.queued.pop(event["cell"], None)
        case "attempt_ended" | "cell_ended" | "cell_interrupted":
            state.running.pop(event["cell"], None)
        case "decided":
            state.decisions.append(Decision.model_validate(event["decision"]))
        case "screened":
            state.screened_out.update(event["left"])
        case "confirmed":
            state.confirmed = Paired.model_validate(event["paired"]) if event["paired"] else None
        case "test_opened":
            state.openings += 1
        case "summarised":
            state.summary = event["summary"]


def controller_alive(folder: Path) -> int | None:
    """Process id of the controller that holds the run's lock; None when there is none. Takes no lock."""
    import json

    import psutil

    try:
        holder = json.loads((folder / f"{EVENTS}.lock.holder").read_text(encoding="utf-8"))
        pid = int(holder["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        inode = os.stat(folder / f"{EVENTS}.lock").st_ino
        return pid if any(os.stat(f.path).st_ino == inode for f in process.open_files()) else None
    except (psutil.NoSuchProcess, FileNotFoundError):
        return None
    except (psutil.Error, OSError):  # another user's process, not ours to look into: believe what it wrote
        return pid
