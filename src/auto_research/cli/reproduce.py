"""`auto-research reproduce`: run papers and say what came out."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from auto_research.runtime.errors import UserError

if TYPE_CHECKING:
    from auto_research.papers._reproduce import Result


def reproduce(
    keys: Annotated[list[str], typer.Argument(help="Keys of the papers, as `list` prints them.")],
    budget: Annotated[
        Literal["smoke", "standard", "full"],
        typer.Option(help="smoke: seconds, no conclusion; standard: the verdict; full: for a GPU."),
    ] = "smoke",
    seeds: Annotated[str | None, typer.Option(help="Comma separated, for example 42,43,44.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, mps, cuda or cuda:<i>.")] = "auto",
    dataset_dir: Annotated[Path | None, typer.Option(help="Folder whose data sets win over cached ones.")] = None,
    workers: Annotated[int, typer.Option(help="Papers that run at a time; they share the cores.")] = 1,
    checkpoints: Annotated[
        Literal["auto", "micro"],
        typer.Option(help="auto: real checkpoints where they are present; micro: the ones built locally."),
    ] = "auto",
    timeout_seconds: Annotated[float, typer.Option(help="Hard limit of one paper.")] = 86400,
    output: Annotated[Path, typer.Option(help="Folder that receives one run folder a paper.")] = Path("runs/reproduce"),
    results_dir: Annotated[
        Path | None, typer.Option(help="Also copy each record to this folder as <key>.json.")
    ] = None,
) -> None:
    """Reproduce papers: method, fair baseline, verdict."""
    from auto_research.papers import _reproduce
    from auto_research.papers._registry import adapter

    chosen = [adapter(key) for key in dict.fromkeys(keys)]
    request = _reproduce.Request(
        budget=budget,
        seeds=_reproduce.parse_seeds(seeds) if seeds is not None else (),
        device=device,
        dataset_dir=dataset_dir,
        checkpoints=checkpoints,
        timeout_s=timeout_seconds,
        workers=workers,
    )
    if not 0 < timeout_seconds < math.inf:
        raise UserError(f"--timeout-seconds {timeout_seconds:g} must be positive and finite")
    request.check(chosen)
    if results_dir is not None:
        _reproduce.results_folder(results_dir)
    failed = 0
    for result in _reproduce.reproduce(chosen, request, output, lambda line: print(line, file=sys.stderr)):
        _print(result)
        if result.record is None:
            failed += 1
        elif results_dir is not None:
            print(f"record copied to {_reproduce.keep(result, results_dir)}")
    if failed:
        raise typer.Exit(1)


def _print(result: Result) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if result.record is None:
        error = result.outcome.error
        console.print(f"[red]{result.key} {result.outcome.state}[/]: {escape(result.outcome.reason)}")
        if error is None or "UserError" not in error.kinds:
            console.print(f"log: {result.outcome.log_path}")
        return
    from auto_research.study.report import results_table, shown_metrics, verdict_sentence

    rows = results_table(result.record, shown_metrics(result.record, most=4))
    table = Table(box=box.SIMPLE_HEAD, title=result.record.title, title_justify="left")
    for column in rows[0]:
        table.add_column(column)
    for row in rows[1:]:
        table.add_row(*map(escape, row), style="bold" if row[1] == "method" else None)
    console.print(table)
    for clause in result.record.comparison.clauses:
        console.print(f"  {clause.state}: {escape(clause.clause)} ({escape(clause.detail)})")
    console.print(f"[bold]{escape(verdict_sentence(result.record))}[/]")
    console.print(f"{result.record.seconds:.1f} s; {result.folder / 'report.html'}")
