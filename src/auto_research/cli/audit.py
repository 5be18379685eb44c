"""`auto-research audit`: does each adapter really run on the device it claims? Also `audit merge` for shards."""

from __future__ import annotations

import math
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer.core import TyperGroup

from auto_research.runtime.errors import EXIT_CODE, DeviceAbsent, UserError

if TYPE_CHECKING:
    from auto_research.audit.record import AuditRecord


class _RunByDefault(TyperGroup):
    """`audit [OPTIONS]` means `audit run [OPTIONS]`; only `merge` needs its name."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if not args or args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


audit_app = typer.Typer(
    cls=_RunByDefault,
    pretty_exceptions_enable=False,
    help="Run adapters one by one in isolated processes and show what really ran on the device. "
    "`audit merge` joins the files of several shards.",
)


@audit_app.command(
    "run", epilog="`auto-research audit merge A.json B.json --output X.json` joins the files of several shards."
)
def audit(
    keys: Annotated[list[str] | None, typer.Argument(help="Only these adapters.", metavar="[KEY]...")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, mps, cuda or cuda:<index>.")] = "auto",
    output: Annotated[
        Path | None,
        typer.Option(
            help="JSON file; HTML, Markdown and JUnit XML go beside it.", show_default="runs/audit/<time>.json"
        ),
    ] = None,
    dataset_dir: Annotated[Path | None, typer.Option(help="Folder whose data sets win over the cached ones.")] = None,
    timeout_seconds: Annotated[float, typer.Option(help="Hard limit for one adapter and all it started.")] = 600.0,
    only_explicit_device_packages: Annotated[
        bool, typer.Option("--only-explicit-device-packages", help="Only adapters whose own file calls device_for.")
    ] = False,
    include_concept_demos: Annotated[
        bool, typer.Option("--include-concept-demos", help="Also adapters whose card says concept_demo.")
    ] = False,
    family: Annotated[list[str] | None, typer.Option(help="Only this family; may be repeated.")] = None,
    fidelity: Annotated[
        list[str] | None,
        typer.Option(help="Only full_pipeline, core_mechanism or concept_demo; may be repeated."),
    ] = None,
    shards: Annotated[int, typer.Option(help="Into how many parts the selection is divided.")] = 1,
    shard_index: Annotated[int, typer.Option(help="Which part to run, from 0.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted audit at --output.")] = False,
    workers: Annotated[int, typer.Option(help="Adapters at a time.", min=1)] = 1,
    budget: Annotated[
        Literal["smoke", "standard", "full"], typer.Option(help="How much each adapter may spend.")
    ] = "smoke",
    seeds: Annotated[
        str | None, typer.Option(help="Comma-separated seeds.", show_default="as many as the card says")
    ] = None,
    checkpoints: Annotated[
        Literal["auto", "micro"], typer.Option(help="auto: the card's first that is here; micro: the small local one.")
    ] = "auto",
) -> None:
    """Check which adapters run on the device that is asked for. An engineering check, never a paper benchmark.

    Exit code 0: every adapter passed, or finished without ever claiming an accelerator path. 1: some did not.
    2: a wrong option, or nothing could be run.
    """
    from auto_research.audit.plan import Selection, select, shard
    from auto_research.audit.record import AuditSettings
    from auto_research.audit.run import active_overrides, run_audit
    from auto_research.cli.audit_view import LiveView
    from auto_research.papers._registry import adapters
    from auto_research.papers._reproduce import parse_seeds

    notes = []
    if not 0 < timeout_seconds < math.inf:
        raise UserError(f"--timeout-seconds must be positive and finite, got {timeout_seconds:g}.")
    if dataset_dir is not None and not dataset_dir.is_dir():
        if dataset_dir.exists():
            raise UserError(f"--dataset-dir {dataset_dir} is not a folder; name the folder that holds the data sets.")
        notes.append(f"--dataset-dir {dataset_dir} does not exist: cached and embedded data sets were used")
        dataset_dir = None
    selection = Selection(
        keys=keys or [],
        families=family or [],
        fidelities=fidelity or [],
        only_explicit=only_explicit_device_packages,
        concept_demos=include_concept_demos,
    )
    known = adapters()
    selected = select(known, selection)
    shard(selected, shards, shard_index)
    resolved = _resolve(device)
    settings = AuditSettings(
        device=device,
        resolved_device=resolved,
        budget=budget,
        seeds=list(parse_seeds(seeds)) if seeds is not None else [],
        timeout_seconds=timeout_seconds,
        checkpoints=checkpoints,
        dataset_dir=str(dataset_dir) if dataset_dir else None,
        selection=selection,
        shards=shards,
        shard_index=shard_index,
        overrides=active_overrides(known, selected),
        workers=workers,
    )
    path = output or Path("runs") / "audit" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    if path.suffix != ".json":
        raise UserError(f"--output {path} must end in .json; the other reports are named after it.")
    view = LiveView(settings)
    try:
        with view:
            record = run_audit(settings, path, known, resume=resume, notes=notes, watch=view.watch)
    except KeyboardInterrupt:
        _reports_of(path)
        print(f"interrupted; what had ended is in {path}, --resume goes on with the rest.", file=sys.stderr)
        raise typer.Exit(130) from None
    _finish(record, path)


@audit_app.command("merge")
def merge(
    files: Annotated[list[Path], typer.Argument(help="JSON files of the shards of one audit.")],
    output: Annotated[Path, typer.Option(help="JSON file; HTML, Markdown and JUnit XML go beside it.")],
) -> None:
    """Join the files of several shards; name what is missing or double.

    Exit code 0: complete and all good. 1: something is missing or did not pass. 2: the files do not fit together.
    """
    from auto_research.audit import record as records
    from auto_research.runtime.records import OutputLock, write_json_atomic

    if output.suffix != ".json":
        raise UserError(f"--output {output} must end in .json; the other reports are named after it.")
    if output.resolve() in [file.resolve() for file in files]:
        raise UserError(f"--output {output} is one of the files to merge; give another name.")
    merged = records.merge(files)
    with OutputLock(output):
        write_json_atomic(output, merged)
    _finish(merged, output)


def _reports_of(path: Path) -> None:
    """Draws the reports of an audit that was cut short."""
    from auto_research.audit.record import AuditRecord
    from auto_research.audit.report import write_reports
    from auto_research.runtime.records import read_record

    if path.exists():
        write_reports(read_record(path, AuditRecord), path)


def _finish(record: AuditRecord, path: Path) -> None:
    """Writes the reports, prints the summary and sets the exit code."""
    from auto_research.audit.report import write_reports
    from auto_research.cli.audit_view import print_summary

    reports = write_reports(record, path)
    print_summary(record, path, reports)
    if not record.good:
        raise typer.Exit(1)


def _resolve(device: str) -> str:
    """The device as it is called here; when CUDA is absent, the sentence says what to do about it."""
    from auto_research.runtime.device import resolve_device

    if device == "cpu":  # always there: an audit of the CPU path needs no torch in this process
        return device
    try:
        return str(resolve_device(device))
    except DeviceAbsent as error:
        if not device.strip().lower().startswith("cuda"):
            raise
        reason = str(error).partition(": ")[2].partition(";")[0]
        raise DeviceAbsent(f"CUDA is absent ({device}: {reason}); `--device cpu` audits the CPU path.") from error


def script() -> None:
    """`scripts/audit_gpu_paths.py`: the same program, on CUDA unless told otherwise."""
    arguments = sys.argv[1:]
    given = any(argument.partition("=")[0] == "--device" for argument in arguments)
    if not given and (not arguments or arguments[0] != "merge"):
        arguments += ["--device", "cuda"]
    try:
        audit_app(args=arguments, prog_name="audit_gpu_paths.py")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)
