"""What an audit shows on the terminal: a live table while it runs, a summary at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from auto_research.audit.record import DISCLAIMER, MEANING, AdapterResult, AuditRecord, AuditSettings
from auto_research.audit.run import Progress

COLOURS = {
    "gpu_pass": "green",
    "mps_pass": "green",
    "cpu_pass": "green",
    "completed_without_device_call": "cyan",
    "resolved_without_device_work": "yellow",
    "failed": "red",
    "timeout": "magenta",
    "blocked": "yellow",
}


class LiveView:
    """A table that grows while adapters run; on something that is no terminal, one line an adapter."""

    def __init__(self, settings: AuditSettings, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.settings = settings
        self.progress: Progress | None = None
        self._live: Live | None = None

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

    def watch(self, progress: Progress, result: AdapterResult | None) -> None:
        """Receives what happened; see `auto_research.audit.run.Watch`."""
        first = self.progress is None
        self.progress = progress
        if self._live is not None:
            return
        if first and progress.kept:
            self.console.print(
                Text(f"{len(progress.kept)} kept from the earlier run: {', '.join(sorted(progress.kept))}")
            )
        if result is not None:
            self.console.print(self._line(progress, result), soft_wrap=True)

    def _line(self, progress: Progress, result: AdapterResult) -> Text:
        line = Text(f"[{len(progress.results)}/{len(progress.planned)}] {result.key:<24} {result.seconds:7.1f} s  ")
        line.append(result.status, style=COLOURS[result.status])
        if not result.passed:
            line.append(f"  {result.reason}")
        return line

    def _table(self) -> RenderableType:
        progress = self.progress
        if progress is None:
            return Text(f"Starting the audit on {self.settings.resolved_device} ...")
        table = Table(box=box.SIMPLE_HEAD, expand=True)
        table.add_column("adapter", no_wrap=True)
        table.add_column("status", no_wrap=True)
        table.add_column("seconds", justify="right", no_wrap=True)
        table.add_column("what", no_wrap=True, overflow="ellipsis", ratio=1)
        room = max(3, self.console.height - 7 - len(progress.running))
        for result in list(progress.results.values())[-room:]:
            colour = COLOURS[result.status]
            kept = " (kept)" if result.key in progress.kept else ""
            table.add_row(
                result.key, Text(result.status + kept, style=colour), f"{result.seconds:.1f}", Text(result.reason)
            )
        for key, started in list(progress.running.items()):
            elapsed = f"{time.monotonic() - started:.1f}"
            table.add_row(key, Text("running", style="bold"), elapsed, Text(progress.said.get(key, "")))
        done, total = len(progress.results), len(progress.planned)
        shard = f", shard {self.settings.shard_index} of {self.settings.shards}" if self.settings.shards > 1 else ""
        line = Text(f"{done} of {total} adapters on {self.settings.resolved_device}{shard}", style="bold")
        return Group(table, line)


def print_summary(record: AuditRecord, path: Path, reports: Sequence[Path], console: Console | None = None) -> None:
    """Table of all results, counts, diagnoses and where the reports are."""
    console = console or Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    for column, justify in (("adapter", "left"), ("status", "left"), ("seconds", "right"), ("device work", "left")):
        table.add_column(column, justify=justify, no_wrap=column != "device work")  # type: ignore[arg-type]
    for result in record.results:
        said = result.reason
        if not result.explicit and result.status == "completed_without_device_call":
            said = "no accelerator path in its own file"
        table.add_row(
            result.key, Text(result.status, style=COLOURS[result.status]), f"{result.seconds:.1f}", Text(said)
        )
    console.print(table)
    for result in record.results:
        if result.diagnosis is not None:
            text = Text(f"{result.key}: ", style="bold")
            text.append(f"{result.diagnosis.summary} ", style="default")
            text.append(f"Next: {result.diagnosis.next_step}", style="not bold")
            console.print(text)
    console.print(Rule(style="dim"))
    for status, count in record.status_counts.items():
        line = Text(f"{count:4d} ")
        line.append(status, style=COLOURS[status])
        line.append(f": {MEANING[status]}")  # type: ignore[index]
        console.print(line)
    if not record.planned:
        console.print("This shard is empty: there are more shards than selected adapters.")
    if record.missing:
        console.print(Text(f"{len(record.missing):4d} without a result: {', '.join(record.missing)}", style="red"))
    for note in record.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    device = record.settings.resolved_device
    console.print(
        Text(f"Device {device}; passed runs took {record.passed_seconds:.1f} s in all (not a throughput benchmark).")
    )
    console.print(Text(DISCLAIMER, style="dim"))
    for report in (path, *reports):
        console.print(Text(str(report)), soft_wrap=True)
