"""What tests of the controller share: small configurations, and records without what differs between two equal runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from auto_research.evolve.records import RunConfig, RunRecord


def small(run: str = "r", workflow: str = "toy:ToyWorkflow", **fields: Any) -> RunConfig:
    """One generation of two children, two seeds; no confirmation and no random search unless asked."""
    where = {"workers": 2, "storage": "none", "grace_s": 0.5, **fields.pop("where", {})}
    plain: dict[str, Any] = {"generations": 1, "population": 2, "seeds": [0, 1], "n_min": 2, "random_search": False}
    return RunConfig(run=run, workflow=workflow, where=where, **{**plain, **fields})


def outcome(record: RunRecord) -> dict[str, Any]:
    """All that two runs of one configuration must agree in: everything but times, memory and interrupted attempts."""
    found = record.model_dump(mode="json", exclude={"used", "environment", "started", "ended"})
    found["config"].pop("where")
    if found["test"]:
        found["test"].pop("opened")
    for group in ("trials", "confirmation", "random_search"):
        for trial in found[group]:
            trial["cells"] = [_plain(cell) for cell in trial["cells"]]
    found["test_cell"] = found["test_cell"] and _plain(found["test_cell"])
    return found


def _plain(cell: dict[str, Any]) -> dict[str, Any]:
    for measured in ("seconds", "cpu_seconds", "peak_rss_bytes", "peak_device_bytes"):
        cell.pop(measured)
    cell["attempts"] = [  # the exit code of an attempt that outlived its controller is not known
        {name: value for name, value in attempt.items() if name not in ("seconds", "exit_code")}
        for attempt in cell["attempts"]
        if attempt["state"] not in ("interrupted", "killed")
    ]
    return cell


def names(events: list[dict[str, Any]]) -> list[str]:
    """Names of events, in order."""
    return [event["event"] for event in events]


def position(events: list[dict[str, Any]], name: str, **facts: Any) -> int:
    """Index of the first event with this name and these facts."""
    return next(
        i for i, e in enumerate(events) if e["event"] == name and all(e.get(key) == v for key, v in facts.items())
    )


def children_of(folder: Path) -> list[int]:
    """Living processes that write to a log below a run's cells: cells, and what they started."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            logs = [file.path for file in process.open_files() if file.path.startswith(f"{folder}/")]
        except psutil.Error:  # it has just ended, or is another user's
            continue
        if any("/cells/" in log for log in logs):
            found.append(process.pid)
    return found
