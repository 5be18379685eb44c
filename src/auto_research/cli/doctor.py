"""`auto-research doctor`: what this environment can and cannot do, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

STYLES = {"ok": "green", "limited": "yellow", "missing": "dim", "broken": "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    dataset_dir: Annotated[Path | None, typer.Option(help="Folder of data sets to look in first.")] = None,
) -> None:
    """Say what this environment can and cannot do; exit code 1 if something is broken."""
    from auto_research.runtime.versions import environment
    from auto_research.study.environment import inspect_environment

    findings = inspect_environment(dataset_dir)
    if as_json:
        report = {"environment": environment(), "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(report, indent=2))
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title="This environment", title_justify="left")
        for column in ("area", "what", "state", "found", "what to do"):
            table.add_column(column, overflow="fold")
        area = ""
        for finding in findings:
            if area and finding.area != area:
                table.add_section()
            table.add_row(
                Text("" if finding.area == area else finding.area),
                Text(finding.subject),
                Text(finding.state, style=STYLES[finding.state]),
                Text(finding.found),
                Text(finding.advice),
            )
            area = finding.area
        Console().print(table)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)
