"""`auto-research rehearse`: papers, or any script written for CUDA, on the virtual card. Calls, then prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from auto_research.runtime.errors import UserError

CLEAN, FINDINGS, NOT_REHEARSABLE = 0, 1, 2


def rehearse(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="KEY... | -- SCRIPT ARGS...", help="Papers, or a script.")
    ] = None,
    card: Annotated[str, typer.Option(help="Card whose memory and compute capability count.")] = "a30",
    memory: Annotated[str | None, typer.Option(help="Another amount of memory, such as 24GiB.")] = None,
    devices: Annotated[int, typer.Option(help="How many cards the program sees.")] = 1,
    stop: Annotated[
        bool, typer.Option("--stop/--keep-going", help="Raise what CUDA raises at the first fault, or list them all.")
    ] = False,
    fail_on: Annotated[str, typer.Option(help="fault, warning, never, or rules: DEV-1,DTY-1.")] = "fault",
    ignore: Annotated[list[str] | None, typer.Option(help="Leave findings out: RULE or RULE:path.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Report of a script as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Report of a script as one HTML page.")] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="The first word is a module, not a script.")] = False,
    dtype: Annotated[
        Literal["checkpoint", "fp32", "bf16"], typer.Option(help="Papers: dtype of the checkpoints they load.")
    ] = "checkpoint",
    checkpoints: Annotated[Literal["auto", "micro"], typer.Option(help="Papers: as in `reproduce`.")] = "auto",
    dataset_dir: Annotated[Path | None, typer.Option(help="Papers: folder whose data sets win.")] = None,
    output: Annotated[
        Path, typer.Option(help="Papers: folder that receives <key>.json, <key>.html and <key>.log.")
    ] = Path("runs/rehearse"),
) -> None:
    """Find the faults a GPU would show, on a machine without one.

    KEY...: the smoke runs of these papers. After `--`: any script written for CUDA, with its arguments.
    Exit code 0: clean, 1: findings, 2: could not be rehearsed.
    """
    if not words:
        raise UserError("name papers to rehearse, or a script after '--': auto-research rehearse -- train.py ARGS...")
    options = ["--card", card, "--devices", str(devices), "--fail-on", fail_on, "--stop" if stop else "--keep-going"]
    options += ["--memory", memory] if memory else []
    options += [part for entry in ignore or [] for part in ("--ignore", entry)]
    if module or _is_script(words):
        from auto_research.rehearsal.__main__ import main

        options += ["--json", str(json_file)] if json_file else []
        options += ["--html", str(html_file)] if html_file else []
        raise typer.Exit(main([*options, *(["-m"] if module else []), *words]))
    if json_file or html_file:
        raise UserError("--json and --html are for a script; papers write both to the folder --output")
    chosen = ["--dtype", dtype, "--checkpoints", checkpoints]
    chosen += ["--dataset-dir", str(dataset_dir.resolve())] if dataset_dir else []
    raise typer.Exit(_papers(list(dict.fromkeys(words)), options, chosen, output))


def _is_script(words: list[str]) -> bool:
    """A script follows '--' or is a file; a key has no dot and no slash."""
    return "--" in sys.argv or words[0].endswith(".py") or os.sep in words[0]


def _papers(keys: list[str], options: list[str], chosen: list[str], output: Path) -> int:
    """Rehearses each paper in a process of its own; returns the exit code of the whole."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from auto_research.papers._registry import adapter

    for key in keys:
        adapter(key)  # an unknown one is an error before anything runs
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create {output} ({error.strerror}); choose another --output") from error
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    table = Table(box=box.SIMPLE_HEAD)
    for column in (
        "paper",
        "state",
        "findings",
        "waits a step",
        "FLOPs on the device",
        "peak memory",
        "nondeterministic",
    ):
        table.add_column(column)
    codes: list[int] = []
    for key in keys:
        with console.status(f"{key} ({len(codes) + 1} of {len(keys)})"):
            code, summary = _one(key, options, chosen, output)
        codes.append(code)
        table.add_row(key, *_row(code, summary))
        for entry in summary["findings"] if summary else []:
            console.print(f"{key}  {entry['rule']} {entry['file']}:{entry['line']}  {entry['message']}", soft_wrap=True)
        if summary is None or code == NOT_REHEARSABLE:
            console.print(f"{key}  not rehearsable: {_last_line(output / f'{key}.log')}", soft_wrap=True)
    console.print(table)
    console.print(f"Reports: {output}/<paper>.html, .json and .log")
    return NOT_REHEARSABLE if NOT_REHEARSABLE in codes else max(codes)


def _one(key: str, options: list[str], chosen: list[str], output: Path) -> tuple[int, dict[str, Any] | None]:
    """(exit code, summary or None) of one paper's rehearsal; its output goes to `<key>.log`."""
    report = output / f"{key}.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "auto_research.rehearsal", *options, "--json", str(report)]
    command += ["--html", str(output / f"{key}.html"), "-m", "auto_research.papers._rehearse", key, *chosen]
    with (output / f"{key}.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    summary = json.loads(report.read_text()) if report.is_file() else None
    return (code if code in (CLEAN, FINDINGS) and summary is not None else NOT_REHEARSABLE), summary


def _row(code: int, summary: dict[str, Any] | None) -> list[str]:
    """Cells of the table after the paper's key."""
    state = {CLEAN: "[green]clean[/]", FINDINGS: "[red]findings[/]"}.get(code, "[red]not rehearsable[/]")
    if summary is None:
        return [state, *["-"] * 5]
    memory = summary["memory"]
    return [
        state,
        ", ".join(f"{rule} {count}" for rule, count in summary["by_rule"].items()) or "none",
        f"{summary['synchronisations']['mean_per_step']:.1f}",
        f"{summary['share']['flops_on_device']:.1%}",
        f"{memory['peak'] / 2**20:.0f} MiB" + ("" if memory["fits"] else ", does not fit"),
        ", ".join(sorted({entry["operator"] for entry in summary["nondeterministic"]})) or "none met",
    ]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["no output"])[-1]
