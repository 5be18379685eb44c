"""What an experiment shows on the terminal: a live view while it runs, tables of plans and results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from auto_research.evolve.board import change_text, duration, one_line, status_lines, status_table, write_board
from auto_research.evolve.board_plots import number, short
from auto_research.evolve.cells import attempt_folder, read_heartbeat
from auto_research.evolve.events import result_file
from auto_research.evolve.genome import find_evidence
from auto_research.evolve.records import Candidate, CellResult, RunConfig, RunRecord
from auto_research.evolve.workflow import Workflow
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import read_record

if TYPE_CHECKING:
    from auto_research.evolve.controller import Preview
    from auto_research.evolve.plan import CostEstimate

COLOURS = {"completed": "green", "interrupted": "yellow", "duplicate": "yellow", "infeasible": "yellow"}
REDRAW_S = 2.0
"""The board is not drawn more often than this while a run goes on."""


class LiveView:
    """A table that follows the events of a run and keeps its board fresh; without a terminal, a line an event."""

    def __init__(self, folder: Path, metric: str, console: Console | None = None) -> None:
        self.folder = folder
        self.metric = metric
        self.console = console or Console(stderr=True, highlight=False)
        self.known: dict[str, dict[str, Any]] = {}
        self.running: dict[str, tuple[float, int]] = {}
        self.done: list[tuple[str, str, str, str]] = []
        self.stage = "preparing data"
        self._live: Live | None = None
        self._began = time.monotonic()
        self._drawn = float("-inf")

    def __enter__(self) -> LiveView:
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._table, console=self.console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def watch(self, event: Mapping[str, Any]) -> None:
        """Receives every event of the controller."""
        line: Text | None = None
        match event["event"]:
            case "prepared":
                line = Text("data prepared and checked")
            case "planned":
                self.stage = {"confirm": "confirmation on fresh seeds", "random": "random search"}.get(
                    event.get("plan", ""), f"generation {str(event.get('plan', ''))[1:]}"
                )
                line = Text(f"{self.stage}: {', '.join(event.get('candidates', []))}", style="bold")
            case "queued":
                self.known.update({cell["cell"]: cell for cell in event["cells"]})
            case "cell_started":
                self.running[event["cell"]] = (time.monotonic(), event["attempt"])
            case "attempt_ended":
                self.running.pop(event["cell"], None)
                line = Text(f"{event['cell']}: {event['state']} ({event['reason']}), once more", style="yellow")
            case "cell_ended":
                line = self._ended(event)
            case "screened" if event["left"]:
                line = Text(f"screened out after one seed: {', '.join(event['left'])}")
            case "decided":
                decision = event["decision"]
                line = Text(f"decision: {decision['champion']} parents what follows ({decision['reason']})")
            case "test_opened":
                self.stage = "sealed test"
                line = Text("the sealed test is opened, for the stored weights of baseline and champion")
            case "plan_failed":
                line = Text(f"generation 1 could not be planned ahead: {event['reason']}", style="yellow")
            case "storage_failed":
                line = Text(f"the trial database was not brought up to date: {event['reason']}", style="yellow")
            case "waiting":
                line = Text(f"waiting: {event['reason']}", style="yellow")
        if line is not None and self._live is None:
            self.console.print(line, soft_wrap=True)
        if event["event"] in ("planned", "cell_ended", "decided") and time.monotonic() - self._drawn > REDRAW_S:
            self._drawn = time.monotonic()
            write_board(self.folder)

    def _ended(self, event: Mapping[str, Any]) -> Text:
        cell = event["cell"]
        began, _ = self.running.pop(cell, (time.monotonic(), 1))
        state = event.get("state", "completed")
        what = event.get("reason", "")
        with suppress(UserError):  # what the file should hold is told by the record, not here
            result = read_record(self.folder / result_file(cell), CellResult)
            if result.metrics and self.metric in result.metrics:
                what = f"{self.metric} {number(result.metrics[self.metric])}"
        seconds = duration(time.monotonic() - began)
        self.done.append((cell, state, seconds, one_line(what)))
        line = Text(f"[{len(self.done)}/{max(len(self.known), len(self.done))}] {cell:<24} {seconds:>8}  ")
        line.append(state.replace("_", " "), style=COLOURS.get(state, "red"))
        line.append(f"  {one_line(what)}")
        return line

    def _table(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, expand=True)
        table.add_column("cell", no_wrap=True)
        table.add_column("state", no_wrap=True)
        table.add_column("time", justify="right", no_wrap=True)
        table.add_column("what", no_wrap=True, overflow="ellipsis", ratio=1)
        room = max(3, self.console.height - 7 - len(self.running))
        for cell, state, seconds, what in self.done[-room:]:
            table.add_row(cell, Text(state.replace("_", " "), style=COLOURS.get(state, "red")), seconds, Text(what))
        for cell, (began, attempt) in list(self.running.items()):
            beat = read_heartbeat(attempt_folder(self.folder, cell, attempt))
            said = f"step {beat['step']}" if "step" in beat else ""
            if beat.get("loss") is not None:
                said += f", loss {number(float(beat['loss']))}"
            table.add_row(cell, Text("running", style="bold"), duration(time.monotonic() - began), said)
        total = max(len(self.known), len(self.done))
        line = Text(
            f"{self.stage}: {len(self.done)} of {total} cells, {duration(time.monotonic() - self._began)}", style="bold"
        )
        return Group(table, line, Text(f"board: {self.folder / 'board.html'}", style="dim"))


def _grid(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in rows[0]:
        table.add_column(one_line(column), overflow="fold")
    for row in rows[1:]:
        table.add_row(*(Text(one_line(cell)) for cell in row), style="bold" if row[0].endswith(" *") else None)
    return table


def print_result(record: RunRecord, console: Console) -> None:
    """The table of candidates and what follows from it, the verdict first."""
    above, below = status_lines(record)
    console.print(Text(above[0], style="bold"), soft_wrap=True)
    for line in above[1:]:
        console.print(Text(line, style="dim"), soft_wrap=True)
    console.print(_grid(status_table(record)))
    for line in below:
        console.print(Text(line), soft_wrap=True)


def plan_facts(config: RunConfig, workflow: Workflow, preview: Preview, cost: CostEstimate) -> dict[str, Any]:
    """A plan as JSON-like values."""
    return {
        "config": config.model_dump(mode="json"),
        "fingerprint": config.fingerprint(),
        "prepared": preview.prepared.model_dump(mode="json"),
        "plans": [plan.model_dump(mode="json") for plan in preview.plans],
        "evidence": [
            {"title": e.title, "citation": e.citation, "why_not": e.why_not}
            for e in find_evidence(workflow, config.direction)
        ],
        "quarantined": [candidate.model_dump(mode="json") for candidate in preview.quarantined],
        "cost": cost.model_dump(mode="json"),
    }


def print_plan(config: RunConfig, workflow: Workflow, preview: Preview, cost: CostEstimate, console: Console) -> None:
    """Every candidate with its provenance, and what the run will cost."""
    prepared = preview.prepared
    console.print(Text(f"{workflow.title}: the plan; nothing was run", style="bold"))
    facts = ", ".join(f"{name} {number(value)}" for name, value in {**prepared.floors, **prepared.anchors}.items())
    console.print(Text(f"{config.budget} budget on {config.device}; {workflow.metric}: {facts}", style="dim"))
    if prepared.stand_in:
        console.print(Text(f"stand-in data: {prepared.stand_in}", style="yellow"))
    base = preview.plans[0].candidates[0]
    for plan in preview.plans:
        console.print(Text(f"Generation {plan.generation}", style="bold"))
        for note in plan.notes:
            console.print(Text(f"  {one_line(note)}", style="dim"), soft_wrap=True)
        rows = [["candidate", "origin", "what differs", "from", "parameters", "FLOPs", "memory", "state"]]
        console.print(_grid(rows + [_planned(c, base) for c in plan.candidates]))
    if config.generations > 1 and workflow.select:
        how = "the schedule of axis groups" if config.sampler == "planned" else f"the sampler {config.sampler}"
        console.print(f"Generations 2 to {config.generations} are planned from the results, by {how}.")
    for item in find_evidence(workflow, config.direction):
        console.print(
            Text(f"evidence only, never run: {item.title} ({item.citation}): {item.why_not}", style="dim"),
            soft_wrap=True,
        )
    for candidate in preview.quarantined:
        text = f"quarantined, never run: {candidate.id}: {candidate.reason}"
        console.print(Text(one_line(text), style="dim"), soft_wrap=True)
    if workflow.select and not config.random_search:
        console.print(Text("No random search is part of it; --random-search adds one of equal budget.", style="dim"))
    parts = [f"{cost.trials} candidates, {cost.cells} cells ({len(config.seeds)} a candidate of the search"]
    parts[0] += f", {cost.confirm_cells} to confirm" if cost.confirm_cells else ""
    parts[0] += f", {cost.random_cells} of random search" if cost.random_cells else ""
    parts[0] += f") and {cost.test_evaluations} readings of the sealed test"
    parts.append(f"about {cost.baseline_runs:.1f} times a run of the baseline")
    if cost.seconds is not None:
        parts.append(f"about {duration(cost.seconds)} of processor time, by an earlier run")
    parts.append(f"at most {duration(config.trial_timeout_s)} a cell")
    parts.append(f"the largest candidate expects {short(cost.peak_memory_bytes)}B")
    console.print(Text("Cost: " + "; ".join(parts) + "."), soft_wrap=True)


def _planned(c: Candidate, base: Candidate) -> list[str]:
    source = ", ".join(c.papers)
    source += f", {c.fidelity.replace('_', ' ')}" if c.fidelity else ""
    source += f"; without {', '.join(c.omitted)}" if c.omitted else ""
    if not source and c.id != base.id:
        source = c.sampler
    ratio = f" ({c.flops / base.flops - 1:+.0%})" if base.flops and c.id != base.id else ""
    state = f"duplicate of {c.duplicate_of}" if c.duplicate_of else c.reason or "runs"
    size = short(c.parameters) + (f" ({c.match.replace(' parameters', '')})" if c.match else "")
    return [
        c.id,
        c.origin,
        change_text(c),
        source or "–",
        size,
        short(c.flops) + ratio,
        f"{short(c.memory_bytes)}B",
        state,
    ]
