"""`auto-research evolve`: plan, run, continue, read and fork experiments. Parses, calls, prints.

Exit codes: 0 finished, also when nothing improved; 2 bad input; 3 interrupted, can be resumed; 4 nothing completed.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from auto_research.runtime.errors import UserError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from auto_research.evolve.records import RunConfig, RunRecord, Trial
    from auto_research.evolve.workflow import Workflow

INTERRUPTED, NOTHING_COMPLETED = 3, 4
ROOT = Path("runs/evolve")
FRESH_SEEDS = "1001,1002,1003,1004,1005"

evolve_app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Controlled experiments in several rounds: fair ablations, paired promotion, a confirmation on fresh seeds, "
    "a sealed test. Exit codes: 0 finished (also when nothing improved), 2 bad input, 3 interrupted and resumable, "
    "4 nothing completed.",
)

Budget = Literal["smoke", "standard", "full"]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or its folder.")]
Root = Annotated[Path, typer.Option("--output", help="Folder that holds one folder a run.")]
Key = Annotated[str | None, typer.Option("--workflow", help="Key, as `evolve workflows` lists it.")]
Model = Annotated[str | None, typer.Option(help="Selects the workflow by its model.")]
Dataset = Annotated[str | None, typer.Option(help="Selects the workflow by its data.")]
BudgetOption = Annotated[
    Budget, typer.Option(help="smoke: minutes, no conclusion; standard: the verdict; full: for a GPU.")
]
Direction = Annotated[str, typer.Option(help="What to look for, in words: orders and filters the operators.")]
Generations = Annotated[int | None, typer.Option(min=0, help="Rounds after the baseline.", show_default="by budget")]
Population = Annotated[int | None, typer.Option(min=1, help="Candidates a round.", show_default="by budget")]
Sampler = Annotated[
    Literal["planned", "tpe", "nsga2", "random"], typer.Option(help="Who proposes generation 2 and later.")
]
Seeds = Annotated[str | None, typer.Option(help="Comma separated.", show_default="42 in smoke, else 42,43,44")]
ConfirmSeeds = Annotated[
    str | None,
    typer.Option(help="Fresh seeds of the confirmation, or 'none'.", show_default=f"none in smoke, else {FRESH_SEEDS}"),
]
RunSeed = Annotated[int, typer.Option(help="Seed of all proposals.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="axis=value of the baseline; may be repeated.")]
SizesOption = Annotated[list[str] | None, typer.Option("--size", help="name=number; may be repeated.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Short for --size steps=N.")]
RandomSearch = Annotated[
    bool | None,
    typer.Option(
        "--random-search/--no-random-search", help="Random search at equal budget.", show_default="on, off in smoke"
    ),
]
Screening = Annotated[
    bool,
    typer.Option("--screening", help="One seed for every child, the others for the better half and what is near it."),
]
DatasetDir = Annotated[Path | None, typer.Option(help="Folder whose data sets win over cached ones.")]
Checkpoints = Annotated[
    Literal["auto", "micro"],
    typer.Option(help="auto: real ones where they are on this machine; micro: those that are built here."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, mps, cuda or cuda:<i>.")]
MinSeeds = Annotated[int, typer.Option(min=2, help="Finished seeds that a promotion needs.")]
ConfidenceZ = Annotated[float, typer.Option(min=0, help="Standard errors that a promotion needs.")]
MinimumGain = Annotated[float, typer.Option(help="What the lower bound of a gain must exceed.")]
ConfirmZ = Annotated[float, typer.Option(min=0, help="Standard errors that a claim needs, on fresh seeds.")]
Name = Annotated[str | None, typer.Option("--run", help="Name of the run.", show_default="<time>-<workflow>")]
Workers = Annotated[int | None, typer.Option(min=1, help="Cells at a time.", show_default="a core each, or a GPU each")]
CpuThreads = Annotated[int | None, typer.Option(min=1, help="Threads of a cell.", show_default="cores / workers")]
GpuSlots = Annotated[int | None, typer.Option(min=1, help="Cells that share a GPU.", show_default="1")]
GpuMemory = Annotated[
    int | None, typer.Option("--gpu-memory-per-trial-mb", min=1, help="GPU memory that a cell is expected to need.")
]
MemoryLimit = Annotated[int | None, typer.Option("--memory-limit-mb", min=1, help="A cell above it is ended.")]
Retries = Annotated[int | None, typer.Option(min=0, help="Further attempts after a transient end.", show_default="1")]
TrialTimeout = Annotated[
    float | None,
    typer.Option("--trial-timeout-seconds", help="Hard limit of a cell and all it started.", show_default="by budget"),
]
Stall = Annotated[
    float | None,
    typer.Option("--stall-seconds", help="Longest time without progress of a cell.", show_default="120, or more"),
]
Executor = Annotated[Literal["local", "ray"] | None, typer.Option(help="Where cells run.", show_default="local")]
Address = Annotated[str | None, typer.Option(help="Of the Ray cluster, such as auto or ray://host:10001.")]
Storage = Annotated[
    str | None,
    typer.Option(help="URL of the trial database, or 'none'.", show_default="an SQLite file in the run's folder"),
]
Offline = Annotated[
    bool | None, typer.Option("--offline/--online", help="Keep cells off the network.", show_default="offline")
]
QuarantineFolder = Annotated[
    Path | None,
    typer.Option("--quarantine", help="Folder of external candidates, shown and never run.", show_default="quarantine"),
]
KeepSealed = Annotated[bool, typer.Option("--keep-test-sealed", help="Leave the sealed test to `evolve test RUN`.")]


# ------------------------------------------------------------------------------------------------------ commands


@evolve_app.command("workflows")
def workflows(
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """What can be searched: workflows with their models, data, metrics and operators."""
    from auto_research.evolve.workflows import WORKFLOWS, workflow

    found: list[dict[str, Any]] = []
    for key in WORKFLOWS:
        try:
            found.append(_facts(workflow(key)))
        except UserError as error:  # torch is absent: the others can still be listed
            found.append({"key": key, "unusable": str(error)})
    if json_:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("key", "model", "data", "metric", "operators", "highest level"):
        table.add_column(column, overflow="fold")
    for w in found:
        if "unusable" in w:
            table.add_row(w["key"], w["unusable"])
            continue
        operators = ", ".join(operator["id"] for operator in w["operators"]) or "fixed points"
        better = "↑" if w["direction"] == "max" else "↓"
        table.add_row(w["key"], w["model"], w["dataset"], f"{w['metric']} {better}", operators, w["level"])
    console = _console()
    console.print(table)
    console.print("One run: auto-research evolve run --workflow KEY")


@evolve_app.command("plan")
def plan(
    workflow: Key = None,
    model: Model = None,
    dataset: Dataset = None,
    budget: BudgetOption = "smoke",
    direction: Direction = "",
    generations: Generations = None,
    population: Population = None,
    sampler: Sampler = "planned",
    seeds: Seeds = None,
    confirm_seeds: ConfirmSeeds = None,
    run_seed: RunSeed = 0,
    set_: Sets = None,
    size: SizesOption = None,
    steps: Steps = None,
    random_search: RandomSearch = None,
    screening: Screening = False,
    dataset_dir: DatasetDir = None,
    checkpoints: Checkpoints = "auto",
    device: Device = "auto",
    promotion_min_seeds: MinSeeds = 3,
    confidence_z: ConfidenceZ = 1.0,
    minimum_gain: MinimumGain = 0.0,
    confirm_z: ConfirmZ = 2.0,
    run: Name = None,
    output: Root = ROOT,
    workers: Workers = None,
    cpu_threads: CpuThreads = None,
    gpu_slots: GpuSlots = None,
    gpu_memory_per_trial_mb: GpuMemory = None,
    memory_limit_mb: MemoryLimit = None,
    retries: Retries = None,
    trial_timeout_seconds: TrialTimeout = None,
    stall_seconds: Stall = None,
    executor: Executor = None,
    address: Address = None,
    storage: Storage = None,
    offline: Offline = None,
    keep_test_sealed: KeepSealed = False,
    quarantine: QuarantineFolder = None,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show every candidate with its provenance and what the run would cost. Runs nothing and leaves no file."""
    given = {name: value for name, value in locals().items() if name != "json_"}
    _show_plan(configure(given), output, as_json=json_)


@evolve_app.command("run")
def run_(
    workflow: Key = None,
    model: Model = None,
    dataset: Dataset = None,
    budget: BudgetOption = "smoke",
    direction: Direction = "",
    generations: Generations = None,
    population: Population = None,
    sampler: Sampler = "planned",
    seeds: Seeds = None,
    confirm_seeds: ConfirmSeeds = None,
    run_seed: RunSeed = 0,
    set_: Sets = None,
    size: SizesOption = None,
    steps: Steps = None,
    random_search: RandomSearch = None,
    screening: Screening = False,
    dataset_dir: DatasetDir = None,
    checkpoints: Checkpoints = "auto",
    device: Device = "auto",
    promotion_min_seeds: MinSeeds = 3,
    confidence_z: ConfidenceZ = 1.0,
    minimum_gain: MinimumGain = 0.0,
    confirm_z: ConfirmZ = 2.0,
    run: Name = None,
    output: Root = ROOT,
    workers: Workers = None,
    cpu_threads: CpuThreads = None,
    gpu_slots: GpuSlots = None,
    gpu_memory_per_trial_mb: GpuMemory = None,
    memory_limit_mb: MemoryLimit = None,
    retries: Retries = None,
    trial_timeout_seconds: TrialTimeout = None,
    stall_seconds: Stall = None,
    executor: Executor = None,
    address: Address = None,
    storage: Storage = None,
    offline: Offline = None,
    keep_test_sealed: KeepSealed = False,
    quarantine: QuarantineFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run of that name if there is one.")] = False,
) -> None:
    """Run an experiment to its end; a table and the board's path close it."""
    given = {name: value for name, value in locals().items() if name != "resume"}
    if resume and run is None:
        raise UserError("--resume continues a run by its name: give --run NAME, or use `evolve resume RUN`.")
    config = configure(given)
    folder = output / config.run
    if resume and (folder / "config.json").is_file():
        from auto_research.evolve import controller

        _drive(config.workflow, folder, lambda watch: controller.resume(folder, config, watch))
        return
    _start(config, output)


@evolve_app.command("resume")
def resume(
    run: Run,
    output: Root = ROOT,
    workers: Workers = None,
    cpu_threads: CpuThreads = None,
    gpu_slots: GpuSlots = None,
    gpu_memory_per_trial_mb: GpuMemory = None,
    memory_limit_mb: MemoryLimit = None,
    retries: Retries = None,
    trial_timeout_seconds: TrialTimeout = None,
    stall_seconds: Stall = None,
    executor: Executor = None,
    address: Address = None,
    storage: Storage = None,
    offline: Offline = None,
) -> None:
    """Continue an interrupted, stopped or killed run; nothing that completed is run again.

    Limits and places may change; whatever decides results may not, `evolve fork` is for that.
    """
    given = dict(locals())
    from auto_research.evolve import controller
    from auto_research.evolve.records import RunConfig
    from auto_research.runtime.records import read_record

    folder = find_run(run, output)
    stored = read_record(folder / "config.json", RunConfig)
    limits = _limits(given)
    changed = stored.model_copy(update={**limits, "where": {**stored.where, **_where(given)}})
    _drive(stored.workflow, folder, lambda watch: controller.resume(folder, changed, watch))


@evolve_app.command("status")
def status(
    run: Run,
    output: Root = ROOT,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """What the board shows, in the terminal or as JSON. Works while the run goes on."""
    from auto_research.evolve.board import status_facts, status_text
    from auto_research.evolve.reading import read_run

    record = read_run(find_run(run, output))
    if json_:
        print(json.dumps(status_facts(record), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print(status_text(record), end="")


@evolve_app.command("board")
def board(run: Run, output: Root = ROOT) -> None:
    """Draw the board of a run anew and print its path. Works while the run goes on."""
    from auto_research.evolve.board import write_board

    print(write_board(find_run(run, output)))


@evolve_app.command("test")
def open_test(run: Run, output: Root = ROOT) -> None:
    """Open the sealed test of a finished run that kept it sealed. It opens once."""
    from auto_research.evolve import controller
    from auto_research.evolve.reading import read_run

    folder = find_run(run, output)
    workflow = read_run(folder).config.workflow
    _drive(workflow, folder, lambda watch: controller.open_test(folder, watch))


@evolve_app.command("fork")
def fork(
    run: Run,
    set_: Sets = None,
    name: Annotated[str | None, typer.Option("--run", help="Name of the new run.")] = None,
    direction: Annotated[str | None, typer.Option(help="Another direction.")] = None,
    generations: Generations = None,
    population: Population = None,
    seeds: Annotated[str | None, typer.Option(help="Other seeds.")] = None,
    run_seed: Annotated[int | None, typer.Option(help="Another seed of the proposals.")] = None,
    output: Root = ROOT,
    plan_only: Annotated[bool, typer.Option("--plan", help="Show the plan of the fork; run nothing.")] = False,
) -> None:
    """Start a new run from the configuration of another one, with `--set axis=value` and other settings changed."""
    from auto_research.evolve import controller
    from auto_research.evolve.records import RunConfig
    from auto_research.evolve.workflows import workflow
    from auto_research.runtime.records import read_record

    folder = find_run(run, output)
    origin = read_record(folder / "config.json", RunConfig)
    settings: dict[str, Any] = {
        "direction": direction,
        "generations": generations,
        "population": population,
        "seeds": None if seeds is None else _seeds(seeds, "--seeds"),
        "run_seed": run_seed,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    changes = _changes(workflow(origin.workflow), set_)
    made = controller.fork(folder, changes, None if name is None else _safe(name), **settings)
    if plan_only:
        _show_plan(made, folder.parent, as_json=False)
    else:
        _start(made, folder.parent)


@evolve_app.command("stop")
def stop(run: Run, output: Root = ROOT) -> None:
    """End the controller of a running experiment and its cells; `evolve resume` goes on from there."""
    from auto_research.evolve import controller

    folder = find_run(run, output)
    controller.stop(folder)
    print(f"stopped; `auto-research evolve resume {folder}` goes on")


@evolve_app.command(
    "quarantine", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def quarantine_(context: typer.Context) -> None:
    """Look at, check, approve or refuse candidates that an external generator wrote; they never run unapproved."""
    from auto_research.evolve.quarantine import main

    raise typer.Exit(main(context.args))


# ------------------------------------------------------------------------------------------------- configuration


def configure(given: dict[str, Any]) -> RunConfig:
    """The configuration that the options of `plan` and `run` ask for; what is not given comes from budget and workflow.

    Raises `UserError` naming the option.
    """
    from pydantic import ValidationError

    from auto_research.evolve.records import RunConfig

    chosen = choose(given["workflow"], given["model"], given["dataset"])
    key = given["workflow"] or chosen.key
    smoke = given["budget"] == "smoke"
    generations, population = rounds(chosen, given["budget"])
    sizes = dict(_pair(text, "--size", int) for text in given["size"] or [])
    if given["steps"] is not None:
        sizes["steps"] = given["steps"]
    if given["checkpoints"] == "micro":
        if "micro" not in chosen.sizes(given["budget"]).values:
            raise UserError(f"{key} uses no checkpoint, so --checkpoints micro means nothing to it: leave it out")
        sizes["micro"] = 1
    fresh = given["confirm_seeds"]
    if fresh is None:
        fresh = "none" if smoke or not chosen.select or not chosen.stochastic else FRESH_SEEDS
    wanted, device = given["random_search"], _device(given["device"])
    stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', key)}"
    values: dict[str, Any] = {
        "run": stamp if given["run"] is None else _safe(given["run"]),
        "workflow": key,
        "direction": given["direction"],
        "budget": given["budget"],
        "generations": generations if given["generations"] is None else given["generations"],
        "population": population if given["population"] is None else given["population"],
        "seeds": _seeds(("42" if smoke else "42,43,44") if given["seeds"] is None else given["seeds"], "--seeds"),
        "confirm_seeds": [] if fresh == "none" else _seeds(fresh, "--confirm-seeds"),
        "run_seed": given["run_seed"],
        "sampler": given["sampler"],
        "random_search": chosen.select and not smoke if wanted is None else wanted,
        "screening": given["screening"],
        "changes": _changes(chosen, given["set_"]),
        "sizes": sizes,
        "dataset_dir": _folder(given["dataset_dir"]),
        "device": device,
        "n_min": given["promotion_min_seeds"],
        "z": given["confidence_z"],
        "delta_min": given["minimum_gain"],
        "confirm_z": given["confirm_z"],
        "trial_timeout_s": chosen.cell_seconds[given["budget"]],
        "stall_s": chosen.stall_seconds,
        "where": {
            **_side_by_side(chosen, given, device),
            **_where(given),
            **({"test": "manual"} if given["keep_test_sealed"] else {}),
            **({"quarantine": str(given["quarantine"])} if given["quarantine"] is not None else {}),
        },
        **_limits(given),
    }
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        option = {"z": "confidence-z", "delta_min": "minimum-gain", "n_min": "promotion-min-seeds"}.get(field, field)
        raise UserError(f"--{option.replace('_', '-')}: {first['msg']}, got {first['input']}") from error


def choose(key: str | None, model: str | None, dataset: str | None) -> Workflow:
    """The workflow that `--workflow`, or `--model` and `--dataset`, name.

    Raises `UserError` when none or several fit.
    """
    from auto_research.evolve.workflows import WORKFLOWS, workflow

    if key is not None:
        found = workflow(key)
        for option, asked, names in (("--model", model, _models), ("--dataset", dataset, _datasets)):
            if asked is not None and not _fits(asked, names(found)):
                raise UserError(f"{option} {asked} is not that of --workflow {key}, which has {names(found)[0]}.")
        return found
    if model is None and dataset is None:
        raise UserError(f"name a workflow: --workflow {' | '.join(WORKFLOWS)}, or its --model and --dataset.")
    known = [workflow(key) for key in WORKFLOWS]
    left = known
    for option, asked, names in (("--model", model, _models), ("--dataset", dataset, _datasets)):
        if asked is None:
            continue
        kept = [w for w in left if _fits(asked, names(w))]
        if not kept:
            offered = list(dict.fromkeys(names(w)[0] for w in left))
            words = [name for w in left for name in names(w)]
            raise UserError(f"no workflow has {option} {asked}.{nearest(asked, words)} Known: {'; '.join(offered)}.")
        left = kept
    if len(left) > 1:
        raise UserError(f"several workflows fit: {', '.join(w.key for w in left)}; name one with --workflow.")
    return left[0]


def _models(workflow: Workflow) -> list[str]:
    return [workflow.model, workflow.key.partition("-")[0], workflow.title]


def _datasets(workflow: Workflow) -> list[str]:
    return [workflow.dataset, workflow.key.rpartition("-")[2], workflow.title]


def _fits(asked: str, names: list[str]) -> bool:
    """Whether a name holds what is asked for, whatever the case and the dashes."""
    plain = re.sub(r"[^a-z0-9]+", "", asked.casefold())
    return bool(plain) and any(plain in re.sub(r"[^a-z0-9]+", "", name.casefold()) for name in names)


def rounds(workflow: Workflow, budget: Budget) -> tuple[int, int]:
    """(generations, population) of a budget: the workflow's own plan, or one place for each operator, 2 to 4."""
    if not workflow.select:
        return 1, max(1, len(workflow.points(budget)) - 1)
    if budget in workflow.rounds:
        return workflow.rounds[budget]
    own = workflow.smoke_plan() if budget == "smoke" else None
    if own:
        return 1, len(own)
    return {"smoke": 1, "standard": 2, "full": 3}[budget], min(4, max(2, len(workflow.operators)))


def _changes(workflow: Workflow, texts: list[str] | None) -> dict[str, Any]:
    """axis -> value from `axis=value` texts, checked against the space."""
    pairs = [_pair(text, "--set", str) for text in texts or []]
    return {name: workflow.space[name].parse(value) for name, value in pairs}


def _pair(text: str, option: str, kind: Callable[[str], Any]) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UserError(f"{option} takes name=value, not '{text}'.")
    try:
        return name.strip(), kind(value.strip())
    except ValueError:
        raise UserError(f"{option} {name.strip()} takes a whole number, not '{value.strip()}'.") from None


def _seeds(text: str, option: str) -> list[int]:
    if not re.fullmatch(r"[0-9]{1,10}(,[0-9]{1,10})*", text) or any(int(s) >= 2**32 for s in text.split(",")):
        raise UserError(f"{option} '{text}' is not a list of whole numbers below {2**32} such as 42,43,44.")
    found = [int(part) for part in text.split(",")]
    if len(set(found)) < len(found):
        raise UserError(f"{option} {text} repeat a seed: each is one observation.")
    return found


def _safe(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise UserError(f"--run '{name}' is no name for a folder: use letters, digits, dots, dashes and underscores.")
    return name


def _folder(path: Path | None) -> str | None:
    if path is not None and not path.is_dir():
        raise UserError(f"--dataset-dir {path} is not a folder; name the folder that holds the data sets.")
    return None if path is None else str(path.absolute())  # `resume` may be called from elsewhere


def _device(device: str) -> str:
    """The device as the configuration holds it; `auto` and bare `cuda` take every GPU of the machine."""
    if device == "cpu":
        return device
    from auto_research.runtime.device import resolve_device

    resolved = resolve_device(device)
    return str(resolved) if ":" in device else resolved.type


def _limits(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of the configuration that limit cells and decide no result, as far as they are given."""
    names = {
        "retries": "retries",
        "trial_timeout_s": "trial_timeout_seconds",
        "stall_s": "stall_seconds",
        "memory_limit_mb": "memory_limit_mb",
    }
    for field in ("trial_timeout_seconds", "stall_seconds"):
        if given[field] is not None and not 0 < given[field] < math.inf:
            raise UserError(f"--{field.replace('_', '-')} must be positive and finite, got {given[field]:g}.")
    return {field: given[option] for field, option in names.items() if given[option] is not None}


def _where(given: dict[str, Any]) -> dict[str, Any]:
    """Places that decide no result, as far as they are given."""
    names = (
        "workers", "cpu_threads", "gpu_slots", "gpu_memory_per_trial_mb", "executor", "address", "storage", "offline",
    )  # fmt: skip
    if given["address"] is not None and given["executor"] != "ray":
        raise UserError("--address is that of a Ray cluster: add --executor ray.")
    return {name: given[name] for name in names if given[name] is not None}


def _side_by_side(workflow: Workflow, given: dict[str, Any], device: str) -> dict[str, Any]:
    """As many cells as there are cores for: small models gain little from a second thread, and all from a neighbour."""
    from auto_research.runtime.versions import cores

    if device != "cpu" or given["workers"] or given["executor"] == "ray" or not workflow.side_by_side:
        return {}
    return {"workers": max(1, cores() // (given["cpu_threads"] or 1))}


def find_run(run: str, root: Path) -> Path:
    """The folder of a run, by its path or by its name below `root`. Raises `UserError` naming the nearest."""
    for folder in (Path(run), root / run):
        if (folder / "config.json").is_file():
            return folder
    known = sorted(path.parent.name for path in root.glob("*/config.json"))
    listed = f" Known: {', '.join(known[-8:])}." if known else ""
    raise UserError(f"there is no run '{run}', neither as a folder nor in {root}.{nearest(run, known)}{listed}")


# ------------------------------------------------------------------------------------------------------- running


def _start(config: RunConfig, root: Path) -> None:
    from auto_research.evolve import controller

    _drive(config.workflow, root / config.run, lambda watch: controller.run(config, root, watch))


def _drive(workflow: str, folder: Path, call: Callable[[Callable[[dict[str, Any]], None]], RunRecord]) -> None:
    """Runs `call` under a live view, then prints the result and sets the exit code."""
    from auto_research.cli.evolve_view import LiveView, print_result
    from auto_research.evolve.controller import RunStopped
    from auto_research.evolve.workflows import workflow as find_workflow

    view = LiveView(folder, find_workflow(workflow).metric)
    try:
        with view:
            record = call(view.watch)
    except RunStopped as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except KeyboardInterrupt:  # once more, while the first one was being dealt with
        print(f"interrupted; `auto-research evolve resume {folder}` goes on", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    console = _console()
    print_result(record, console)
    console.print(f"Board: {folder / 'board.html'}", soft_wrap=True)
    if record.status in ("interrupted", "stopped"):
        print(f"{record.status}; `auto-research evolve resume {folder}` goes on", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    if record.status == "nothing completed":
        raise typer.Exit(NOTHING_COMPLETED)


def _show_plan(config: RunConfig, root: Path, *, as_json: bool) -> None:
    from auto_research.cli.evolve_view import plan_facts, print_plan
    from auto_research.evolve import controller
    from auto_research.evolve.plan import cost_estimate
    from auto_research.evolve.workflows import workflow

    preview, found = controller.plan_only(config), workflow(config.workflow)
    cost = cost_estimate(config, found, preview.plans, _measured(config, root))
    if as_json:
        print(json.dumps(plan_facts(config, found, preview, cost), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_plan(config, found, preview, cost, _console())


def _measured(config: RunConfig, root: Path) -> list[Trial]:
    """Trials of the latest run below `root` whose cells cost the same: same workflow, budget, sizes and device."""
    from auto_research.evolve.records import RunRecord
    from auto_research.runtime.records import read_record

    for path in sorted(root.glob("*/record.json"), key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            record = read_record(path, RunRecord)
        except UserError:  # of another version: it only would have made the estimate better
            continue
        other = record.config
        if (other.workflow, other.budget, other.sizes, other.device, other.changes) == (
            config.workflow, config.budget, config.sizes, config.device, config.changes,
        ):  # fmt: skip
            return record.trials
    return []


def _facts(workflow: Workflow) -> dict[str, Any]:
    return {
        "key": workflow.key,
        "title": workflow.title,
        "model": workflow.model,
        "dataset": workflow.dataset,
        "metric": workflow.metric,
        "direction": workflow.direction,
        "level": workflow.level,
        "selects": workflow.select,
        "axes": [axis.name for axis in workflow.space.axes],
        "operators": [{"id": o.id, "title": o.title, "paper": o.paper} for o in workflow.operators],
    }


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)
