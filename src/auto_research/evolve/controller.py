"""Drives a run: data checked, generations planned, cells run in processes of their own, champion confirmed and tested.

The controller is a loop over steps that are each done once. What was done is in the run's folder (see `records`), so a
killed controller is continued by calling `resume`: every step looks first whether its result is there. The controller
itself trains nothing, loads no data and touches no accelerator.

`RunConfig.where` holds what changes no result::

    workers, cpu_threads, gpu_slots     slots and threads (see `slots`)
    gpu_memory_per_trial_mb             declared peak of a cell, beside what the workflow declares
    executor, address                   "local" (default) or "ray", and the address of the cluster
    storage                             URL of the trial database; SQLite in the folder by default, "none" for none
    offline                             False lets cells reach a network (default True)
    grace_s                             seconds from SIGTERM to SIGKILL of a cell (default 10)
    test                                "manual" leaves the sealed test to `open_test`
    quarantine                          folder of external candidates, which are shown and never run
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from pydantic import ValidationError

from auto_research.evolve import events as files
from auto_research.evolve.attempts import LOST, Ended, await_end, next_change, raw_result, read_attempts
from auto_research.evolve.board import write_board
from auto_research.evolve.cells import (
    CHECKPOINTS,
    HEARTBEAT,
    NO_SPACE,
    Cell,
    End,
    artefact_folder,
    attempt_folder,
    end_of,
    read_heartbeat,
    result_of,
    sizes_for,
)
from auto_research.evolve.events import EventLog, State, controller_alive, plan_file, rebuild, result_file
from auto_research.evolve.plan import runs
from auto_research.evolve.promotion import confirm, decide, noise_floor, survivors
from auto_research.evolve.quarantine import FOLDER, list_all
from auto_research.evolve.reading import confirmation_trials, read_run, search_seeds, search_trials
from auto_research.evolve.records import (
    Attempt,
    Candidate,
    CellResult,
    Plan,
    Prepared,
    Role,
    RunConfig,
    RunRecord,
    Trial,
)
from auto_research.evolve.slots import MIB, Slot, slots_for
from auto_research.evolve.space import Value
from auto_research.evolve.workflow import Workflow, must_be_zero
from auto_research.evolve.workflows import workflow as find_workflow
from auto_research.execution import Executor
from auto_research.runtime.errors import UserError, nearest
from auto_research.runtime.process import LANGUAGE_PRELOAD, TORCH_PRELOAD, Job, Outcome, run_isolated
from auto_research.runtime.records import OutputLock, read_record, write_json_atomic
from auto_research.runtime.versions import environment

__all__ = [
    "Preview",
    "RunStopped",
    "fork",
    "open_test",
    "plan_only",
    "read_run",
    "resume",
    "run",
    "stop",
]

OnEvent = Callable[[dict[str, Any]], None]

WAIT_FOR_MEMORY_S = 2.0
"""How often to look for room when other programs hold the memory and no cell of ours runs."""

GRACE_S = 10.0


class RunStopped(UserError):
    """The run stopped and can be resumed: exit code 3 rather than 2."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which `stop` sends."""


class Preview(NamedTuple):
    """What a run would begin with."""

    prepared: Prepared
    plans: list[Plan]
    quarantined: list[Candidate]


# ------------------------------------------------------------------------------------------------- the commands


def run(config: RunConfig, root: Path, on_event: OnEvent | None = None) -> RunRecord:
    """Runs a new experiment in `root / config.run` to its end, or until Ctrl-C, SIGTERM or a full disk.

    Args:
        on_event: receives every event once it is on the disk.

    Raises `UserError` for bad input (a run of this name exists, another controller drives it, data overlap), and
    `RunStopped` for a full disk. An interruption raises nothing: the record's status says so.
    """
    folder = Path(root) / config.run
    with _only_controller(folder):
        if (folder / files.CONFIG).exists():
            raise UserError(
                f"Run {config.run} exists in {root}: continue it with `auto-research evolve resume {folder}`, "
                "or give another name."
            )
        _check(config)
        write_json_atomic(folder / files.CONFIG, config)
        return _drive(folder, config, on_event)


def resume(folder: Path, config: RunConfig | None = None, on_event: OnEvent | None = None) -> RunRecord:
    """Continues a run that was interrupted, stopped or killed; nothing that completed is run again.

    Args:
        config: what the user asks for now. It may differ in limits and places, which replace the stored ones; any
            other difference is refused.

    Raises as `run`.
    """
    folder = Path(folder)
    rebuild(folder)  # a clear sentence when there is no run
    with _only_controller(folder):
        stored = read_record(folder / files.CONFIG, RunConfig)
        asked = config or stored
        _refuse_other(folder, stored, asked)
        if asked != stored:
            stored = asked.model_copy(update={"run": stored.run, "forked_from": stored.forked_from})
            write_json_atomic(folder / files.CONFIG, stored)
        return _drive(folder, stored, on_event)


def open_test(folder: Path, on_event: OnEvent | None = None) -> RunRecord:
    """Opens the sealed test of a run whose search is over and that was told to leave it (`where.test: manual`).

    Raises `UserError` when it was opened before: a second opening needs a new run.
    """
    folder = Path(folder)
    state = rebuild(folder)
    if state.test is not None:
        raise UserError(
            f"the test of run {state.config.run} was opened on {state.test.opened}; it opens once a run, "
            "so start a new run (or `evolve fork`) to test again"
        )
    if failed := state.last("test_failed"):
        raise UserError(f"the test of run {state.config.run} was opened and failed ({failed['reason']})")
    if state.last("finished") is None:
        raise UserError(f"run {state.config.run} is not finished: resume it first, its test opens at the end")
    with _only_controller(folder):
        config = state.config.model_copy(update={"where": {**state.config.where, "test": "auto"}})
        write_json_atomic(folder / files.CONFIG, config)
        return _drive(folder, config, on_event)


def stop(folder: Path, timeout_s: float = 60.0) -> None:
    """Ends the controller of a run and its cells, and returns when it has ended; the run can be resumed.

    Raises `UserError` when no controller drives it, or it does not end in time.
    """
    import psutil

    folder = Path(folder)
    name = rebuild(folder).config.run
    pid = controller_alive(folder)
    if pid is None:
        raise UserError(f"no controller drives run {name}: there is nothing to stop")
    try:
        process = psutil.Process(pid)
        process.terminate()
        process.wait(timeout_s)
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied:
        raise UserError(f"run {name} belongs to another user's process {pid}: ask its owner to stop it") from None
    except psutil.TimeoutExpired:
        raise UserError(f"process {pid}, which drives run {name}, did not end within {timeout_s:g} s") from None


def fork(folder: Path, changes: Mapping[str, Value], run: str | None = None, **settings: Any) -> RunConfig:
    """The configuration of a new run that differs from this one in `changes` (axis -> value) and `settings`.

    Raises `UserError` for an unknown axis, value or field. Nothing is run or written.
    """
    folder = Path(folder)
    origin = rebuild(folder).config
    space = find_workflow(origin.workflow).space
    for field in settings:
        if field not in RunConfig.model_fields:
            raise UserError(f"a run has no setting '{field}'.{nearest(field, RunConfig.model_fields)}")
    asked = {**origin.changes, **{axis: space[axis].check(value) for axis, value in changes.items()}}
    number = 1
    while (folder.parent / f"{origin.run}-fork{number}").exists():
        number += 1
    made = {
        **origin.model_dump(),
        "changes": asked,
        **settings,
        "run": run or f"{origin.run}-fork{number}",
        "forked_from": origin.run,
    }
    try:
        forked = RunConfig.model_validate(made)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if forked.fingerprint() == origin.fingerprint():
        raise UserError(f"the fork would repeat run {origin.run}: change an axis or a setting")
    return forked


def plan_only(config: RunConfig) -> Preview:
    """What a run would begin with: facts about the data, generation 0 and generation 1 as planned from the baseline.

    Later generations depend on results. Runs no cell and leaves no file. Raises `UserError` as `run`.
    """
    _check(config)
    config = config.model_copy(update={"where": {**config.where, "storage": "none"}})
    with tempfile.TemporaryDirectory(prefix="evolve-plan-") as folder:
        controller = _Controller(Path(folder), config, lambda event: None)
        prepared = controller.prepare()
        plans = [controller.plan(0)]
        if config.generations:
            plans.append(controller.plan(1))
        return Preview(prepared, plans, controller.quarantined())


# ------------------------------------------------------------------------------------------------------ around


@contextlib.contextmanager
def _only_controller(folder: Path) -> Iterator[None]:
    """The right to drive the run, for one controller at a time."""
    lock = OutputLock(folder / files.EVENTS)
    try:
        lock.__enter__()
    except UserError as error:
        if "is being written by" not in str(error):
            raise
        pid = controller_alive(folder)
        raise UserError(
            f"Run {folder.name} is being driven by {f'process {pid}' if pid else 'another process'}: wait until it "
            f"ends, or end it with `auto-research evolve stop {folder}`."
        ) from None
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def _check(config: RunConfig) -> None:
    """What can be known to be wrong before anything starts."""
    workflow = find_workflow(config.workflow)
    sizes_for(workflow, config)
    workflow.space.resolve({**workflow.space.baseline(), **config.changes})
    shared = sorted(set(config.seeds) & set(config.confirm_seeds))
    if shared:
        raise UserError(f"seeds {shared} are in the search and in the confirmation, which needs fresh ones")
    for name, seeds in (("seeds", config.seeds), ("confirmation seeds", config.confirm_seeds)):
        if len(set(seeds)) < len(seeds):
            raise UserError(f"the {name} {seeds} repeat a seed: each is one observation")
    slots_for(config)


def _refuse_other(folder: Path, stored: RunConfig, asked: RunConfig) -> None:
    """Refuses a configuration that would give other results than the run began with."""
    created = next((e for e in rebuild(folder).events if e["event"] == "created"), None)
    began = created["fingerprint"] if created else stored.fingerprint()
    if asked.fingerprint() == began:
        return
    ours, theirs = stored.model_dump(), asked.model_dump()
    skipped = ("run", "where", "forked_from")
    changed = [name for name in ours if ours[name] != theirs[name] and name not in skipped]
    what = ", ".join(changed) if changed else "its configuration file was edited"
    raise UserError(
        f"Run {stored.run} began with another configuration ({what}): resume it as it was, "
        f"or start a changed copy with `auto-research evolve fork {folder}`."
    )


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the run as Ctrl-C does: cells first, then the record."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, terminate) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _drive(folder: Path, config: RunConfig, on_event: OnEvent | None) -> RunRecord:
    """From whatever state to the end."""
    controller = _Controller(folder, config, on_event)
    try:
        with _signals():
            try:
                with controller:
                    controller.go()
            except KeyboardInterrupt as stopped:
                controller.take_stock()
                how = "stopped" if isinstance(stopped, _Terminated) else "interrupted"
                controller.log.append(how)
        record = read_run(folder)
        write_json_atomic(folder / files.RECORD, record)
        write_board(folder, record)
    except UserError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(folder) from error
        raise
    return record


# --------------------------------------------------------------------------------------------------- the driver


class _Controller:
    """One run, driven by one process that holds its lock."""

    def __init__(self, folder: Path, config: RunConfig, on_event: OnEvent | None) -> None:
        self.folder = folder
        self.config = config
        self.workflow: Workflow = find_workflow(config.workflow)
        self.sizes = sizes_for(self.workflow, config)
        self.log = EventLog(folder, on_event)
        self.slots = slots_for(config)
        self.results: dict[str, CellResult] = {}
        self.plans: dict[str, Plan] = {}
        self._state = State(folder, config)
        self._executor: Executor | None = None
        self._open = contextlib.ExitStack()
        self._started: dict[str, tuple[Cell, Slot, dict[str, int]]] = {}
        self._peaks: dict[str, int] = {}
        workflow_preload = self.workflow.preload
        base = LANGUAGE_PRELOAD if self.workflow.language_model else TORCH_PRELOAD
        self._preload = (*(base if workflow_preload is None else workflow_preload), "auto_research.evolve.cells")

    def __enter__(self) -> _Controller:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()  # ends whatever still runs

    # -- steps

    def go(self) -> None:
        """Every step of the run that has not been done."""
        self._begin()
        self.prepare()
        champion, kept = "baseline", {d.generation: d for d in self._state.decisions}
        for generation in range(self.config.generations + 1):
            plan = self.plan(generation, champion)
            if generation == 0:
                self._run_first(plan)
            else:
                self.run_cells(self._cells(self._screened(generation, plan), "search", self.seeds))
            trials = self.search()
            if generation == 0 and not _completed(trials[0]):
                break
            if self.workflow.select and generation > 0:
                if generation not in kept:
                    by_id = {trial.candidate.id: trial for trial in trials}
                    children = [by_id[candidate.id] for candidate in plan.candidates]
                    noise = noise_floor(by_id["baseline"], self.workflow.metric)
                    kept[generation] = decide(
                        generation, by_id[champion], children, self.config, self.workflow, noise=noise
                    )
                    self.log.append("decided", decision=kept[generation].model_dump(mode="json"))
                champion = kept[generation].champion
        self._conclude(champion)

    def _run_first(self, plan: Plan) -> None:
        """The baseline's cells, and where slots would idle beside them those of generation 1, which asks no result.

        A baseline that fails on every seed ends the run, so nothing more is started then.
        """
        cells = self._cells(plan.candidates, "search", self.seeds)
        names = {cell.id for cell in cells}
        if self.config.generations and len(self.slots.slots) > 1:
            seeds = self.seeds[:1] if self._screens(1) else self.seeds
            try:
                cells = [*cells, *self._cells(self.plan(1).candidates, "search", seeds)]
            except RunStopped:
                raise
            except UserError as error:
                # A baseline that cannot be built fails the planning too, and its own cell tells how; what else
                # stands in the way ends the run when generation 1 is planned in its turn.
                self.log.append("plan_failed", plan="g1", reason=str(error))

        def failed() -> bool:
            ended = [self.results[name] for name in names if name in self.results]
            return len(ended) == len(names) and all(result.state != "completed" for result in ended)

        self.run_cells(cells, until=failed)

    def _screens(self, generation: int) -> bool:
        """Whether one seed decides which candidates of a generation get the others."""
        return self.config.screening and self.workflow.select and generation > 0 and len(self.seeds) > 1

    def _screened(self, generation: int, plan: Plan) -> list[Candidate]:
        """The candidates that get every seed: all, or those that one seed did not leave behind."""
        if not self._screens(generation):
            return plan.candidates
        self.run_cells(self._cells(plan.candidates, "search", self.seeds[:1]))
        if not any(e["event"] == "screened" and e["generation"] == generation for e in self._state.events):
            trials = {trial.candidate.id: trial for trial in self.search()}
            noise = noise_floor(trials["baseline"], self.workflow.metric)
            ran = [candidate.id for candidate in plan.candidates if runs(candidate)]
            kept = survivors([trials[id] for id in ran], self.workflow, noise)
            left = [id for id in ran if id not in kept]
            self.log.append("screened", generation=generation, kept=kept, left=left)
            self._state.screened_out.update(left)
        return [candidate for candidate in plan.candidates if candidate.id not in self._state.screened_out]

    def _conclude(self, champion: str) -> None:
        """What follows the last generation: confirmation, random search, the test, the summary."""
        trials = {trial.candidate.id: trial for trial in self.search()}
        completed = _completed(trials["baseline"])  # without it nothing that ran beside it has a parent
        if completed and self.workflow.select:
            self._confirm(trials, champion)
            if self.config.random_search:
                self._random_search(list(trials.values()))
        if completed and self.config.where.get("test", "auto") != "manual":
            self._test(trials, champion)
        if self._state.last("finished") is not None:  # only the test had been left, or the database was lost
            self._mirror()
            return
        if self._state.summary is None and type(self.workflow).summarise is not Workflow.summarise:
            payload = {"trials": [trial.model_dump(mode="json") for trial in trials.values()]}
            summary = self._isolated("summarise", "auto_research.evolve.isolated:summarise", payload)["summary"]
            self.log.append("summarised", summary=summary)
        self._mirror()
        self.log.append("finished", status="finished" if completed else "nothing completed", champion=champion)

    def _begin(self) -> None:
        """Take up what is there, and say what was lost."""
        self._state = state = rebuild(self.folder)
        if not state.events:
            staged = [candidate.model_dump(mode="json") for candidate in self.quarantined()]
            self.log.append(
                "created", fingerprint=self.config.fingerprint(), environment=environment(), quarantined=staged
            )
        elif state.last("finished") is None:
            self.log.append("resumed", environment=environment())
        for file, reason in state.corrupt.items():
            if file.startswith("plans/"):
                raise UserError(f"{self.folder / file} is damaged ({reason}): restore it, or start a new run")
            self._discard(file, reason)
        for file in state.unacknowledged:
            event = {"plans": "planned", "cells": "cell_ended", "test": "tested"}.get(file.split("/")[0], "prepared")
            facts = {"cell": file.split("/")[1]} if event == "cell_ended" else {}
            self.log.vouch(event, file, adopted=True, **facts)
        self.results = dict(state.cells)
        self.plans = dict(state.plans)
        self.take_stock()
        if state.prepared is not None and state.last("finished") is None:
            self._isolated("check-data", "auto_research.evolve.isolated:prepare", {"digests": state.prepared.digests})

    def quarantined(self) -> list[Candidate]:
        """The external candidates as they stand now."""
        return [found.candidate() for found in list_all(Path(self.config.where.get("quarantine", FOLDER)))]

    def _discard(self, file: str, reason: str) -> None:
        """Set a corrupt file aside, so that what it held is made again."""
        path = self.folder / file
        if path.exists():
            number = 1
            while (aside := path.with_name(f"{path.stem}.corrupt-{number}{path.suffix}")).exists():
                number += 1
            os.replace(path, aside)
        self.log.append("discarded", file=file, reason=reason)
        parts = Path(file).parts
        if parts[0] == "cells":
            last = len(read_attempts(self.folder, parts[1]))
            if last:
                folder = attempt_folder(self.folder, parts[1], last)
                ended = Ended(attempt=Attempt(state="interrupted", seconds=0.0, reason=f"{file}: {reason}"), again=True)
                write_json_atomic(folder / "attempt.json", ended)
            self.log.append("cell_interrupted", cell=parts[1], attempt=last, reason=f"{file}: {reason}")

    def take_stock(self) -> None:
        """Close the attempts that no process works on any more: finished ones count, the others were interrupted."""
        for cell in sorted(path.name for path in self.folder.glob("cells/*")):
            if cell in self.results:
                continue
            number = 0
            while (folder := attempt_folder(self.folder, cell, number := number + 1)).is_dir():
                if (folder / "attempt.json").exists():
                    continue
                await_end(read_heartbeat(folder), self._grace)
                beat, raw = read_heartbeat(folder), raw_result(folder)
                attempt = Attempt(
                    state="completed" if raw is not None else "interrupted",
                    seconds=raw["seconds"] if raw is not None else 0.0,
                    reason="" if raw is not None else LOST,
                    last_step=beat.get("step"),
                    last_loss=beat.get("loss"),
                )
                if raw is None:
                    self.log.append("cell_interrupted", cell=cell, attempt=number, reason=LOST)
                ended = Ended(attempt=attempt, again=raw is None)
                write_json_atomic(folder / "attempt.json", ended)
                shutil.rmtree(folder / "tmp", ignore_errors=True)

    def prepare(self) -> Prepared:
        """Facts about the data, recorded before generation 0; parts that share an example stop the run."""
        prepared = self._state.prepared
        if prepared is None:
            found = self._isolated("prepare", "auto_research.evolve.isolated:prepare", {})
            prepared = self._state.prepared = Prepared.model_validate(found)
            self.log.keep("prepared", files.PREPARED, prepared, hygiene=prepared.hygiene)
        leaks = [f"{name}: {n}" for name, n in prepared.hygiene.items() if n and must_be_zero(name)]
        if leaks:
            self.log.append("leak", overlaps=leaks)
            raise UserError(
                f"the data of {self.config.workflow} are not separate ({', '.join(leaks)} examples): "
                "nothing was run; mend the split first"
            )
        return prepared

    def plan(self, generation: int, champion: str = "baseline") -> Plan:
        """The plan of a generation, on the disk before any of its cells starts."""
        return self._planned(f"g{generation}", {"generation": generation, "champion": champion})

    def _planned(self, name: str, request: dict[str, Any]) -> Plan:
        if name not in self.plans:
            trials = [trial.model_dump(mode="json") for trial in self.search()]
            payload = {**request, "trials": trials, **self._digests()}
            made = self._isolated(f"plan-{name}", "auto_research.evolve.isolated:propose", payload)
            self._keep_plan(name, Plan.model_validate(made))
            self._mirror()
        return self.plans[name]

    def _keep_plan(self, name: str, plan: Plan) -> None:
        ids = [candidate.id for candidate in plan.candidates]
        self.log.keep("planned", plan_file(name), plan, plan=name, candidates=ids)
        self.plans[name] = plan

    def _confirm(self, trials: Mapping[str, Trial], champion: str) -> None:
        """Champion and baseline on fresh seeds; for a deterministic workflow over examples, without new runs."""
        if champion == "baseline" or self._state.last("confirmed") is not None:
            return
        baseline, best = trials["baseline"], trials[champion]
        if self.workflow.stochastic:
            if not self.config.confirm_seeds:
                return
            if "confirm" not in self.plans:
                again = [_replicate(baseline.candidate), _replicate(best.candidate)]
                self._keep_plan("confirm", Plan(generation=self.config.generations, parent=champion, candidates=again))
            candidates = self.plans["confirm"].candidates
            self.run_cells(self._cells(candidates, "confirm", self.config.confirm_seeds))
            baseline, best = confirmation_trials(self.config, self.workflow, candidates, self.results)
        noise = noise_floor(trials["baseline"], self.workflow.metric)
        paired = confirm(best, baseline, self.config, self.workflow, noise=noise)
        self.log.append("confirmed", paired=paired.model_dump(mode="json") if paired else None)

    def _random_search(self, trials: Sequence[Trial]) -> None:
        """Random candidates on the same seeds, as many as give the cells that the search ran beside the baseline."""
        count = round(sum(len(trial.cells) for trial in trials[1:]) / len(self.seeds))
        if count < 1:
            return
        plan = self._planned("random", {"random": count})
        self.run_cells(self._cells(plan.candidates, "random", self.seeds))

    def _test(self, trials: Mapping[str, Trial], champion: str) -> None:
        """Open the test part once, for the stored weights of baseline and champion. The opening is an event first."""
        if self._state.test is not None or self._state.last("test_failed") is not None:
            return
        from auto_research.evolve.finalise import test_result

        cell = Cell(trials[champion].candidate, 0, "test")
        chosen = list(dict.fromkeys(("baseline", champion)))
        opened = next((e for e in self._state.events if e["event"] == "test_opened"), None)
        if cell.id not in self.results:
            weights = [
                {
                    "candidate": id,
                    "genome": trials[id].candidate.genome,
                    "seed": result.seed,
                    "artefact": str(artefact_folder(self.folder, result).resolve()),
                    "digest": result.artefact,
                }
                for id in chosen
                for result in self._finished(trials[id])
            ]
            if opened is None:
                self.log.append("test_opened", opening=1, candidates=chosen)
            else:  # interrupted before it left a result: the same opening goes on
                self.log.append("test_continued", opening=1)
            extra = {"events": str(self.log.path.resolve()), "opening": 1, "weights": weights}
            self.run_cells([cell], target="auto_research.evolve.finalise:run_test", extra=extra)
        result = self.results[cell.id]
        if result.state != "completed":
            self.log.append("test_failed", reason=result.attempts[-1].reason)
            return
        raw = raw_result(artefact_folder(self.folder, result).parent)
        if raw is None:
            raise UserError(f"the finaliser's output in {self.folder / 'cells' / cell.id} is gone: restore it")
        announced = next(e for e in rebuild(self.folder).events if e["event"] == "test_opened")
        tested = test_result(
            raw,
            [trials[id].candidate for id in chosen],
            self.config,
            self.workflow,
            opened=announced["time"],
            openings=1,
            noise=noise_floor(trials["baseline"], self.workflow.metric),
        )
        self.log.keep("tested", files.TEST, tested)

    def _finished(self, trial: Trial) -> list[CellResult]:
        """The runs of a candidate whose stored weights are tested: of the confirmation where there was one."""
        confirmed = [
            result
            for result in self.results.values()
            if result.role == "confirm" and result.candidate == trial.candidate.id
        ]
        return [result for result in sorted(confirmed or trial.cells, key=lambda r: r.seed) if result.metrics]

    # -- cells

    @property
    def seeds(self) -> list[int]:
        """Seeds of the search; one where seeds change nothing."""
        return search_seeds(self.config, self.workflow)

    def search(self) -> list[Trial]:
        """The trials of the search so far."""
        return search_trials(self.config, self.workflow, self.plans, self.results, self._state.screened_out)

    def _cells(self, candidates: Sequence[Candidate], role: Role, seeds: Sequence[int]) -> list[Cell]:
        return [Cell(candidate, seed, role) for candidate in candidates if runs(candidate) for seed in seeds]

    def run_cells(
        self,
        cells: Sequence[Cell],
        target: str = "auto_research.evolve.cells:run_cell",
        extra: Mapping[str, Any] | None = None,
        until: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run the cells that have no result, as many at a time as there are slots and memory.

        The baseline starts first, since nothing goes on without it, then the largest, so that none runs on alone at
        the end. Once `until` holds nothing more is started.
        """
        waiting = deque(cell for cell in cells if cell.id not in self.results)
        if not waiting or until():
            return
        if len(self.slots.slots) > 1:
            waiting = deque(sorted(waiting, key=lambda c: (c.candidate.id != "baseline", -_work(c.candidate))))
        self.log.append(
            "queued",
            cells=[{"cell": c.id, "candidate": c.candidate.id, "seed": c.seed, "role": c.role} for c in waiting],
        )
        told = False
        self._fill(waiting, target, extra or {})
        while waiting or self._started:
            if not self._started:  # others hold the memory: never oversubscribe, look again
                if not told:
                    self.log.append("waiting", cell=waiting[0].id, reason="not enough free memory")
                    told = True
                time.sleep(WAIT_FOR_MEMORY_S)
                self._fill(waiting, target, extra or {})
                continue
            for job, outcome in self._executor_open().as_completed():
                retry = self._ended(job, outcome)
                if retry is not None:
                    waiting.appendleft(retry)
                if until():
                    waiting.clear()
                self._fill(waiting, target, extra or {})

    def _fill(self, waiting: deque[Cell], target: str, extra: Mapping[str, Any]) -> None:
        """Start cells in their order while there is room."""
        while waiting:
            cell = waiting[0]
            before = read_attempts(self.folder, cell.id)
            if before and not before[-1].again:  # it had ended; only its record was not written
                self._finish(waiting.popleft(), before)
                continue
            need = self._need(cell)
            if why := self.slots.too_large(need):
                attempt = Attempt(state="out_of_memory", seconds=0.0, reason=f"not started: it {why}")
                self._finish(waiting.popleft(), [*before, Ended(attempt=attempt, again=False)])
                continue
            slot = self.slots.take(need)
            if slot is None:
                return
            self._start(waiting.popleft(), slot, before, target, extra)

    def _need(self, cell: Cell) -> int:
        """Bytes of its device that a cell is expected to hold at its peak: measured before, else declared."""
        declared = int(self.config.where.get("gpu_memory_per_trial_mb") or 0) * MIB
        return self._peaks.get(cell.candidate.id) or max(declared, cell.candidate.memory_bytes)

    def _start(self, cell: Cell, slot: Slot, before: list[Ended], target: str, extra: Mapping[str, Any]) -> None:
        number = len(before) + 1
        changed = next_change(before, self.sizes.values)
        folder = attempt_folder(self.folder, cell.id, number).resolve()
        with _disk(self.folder):
            shutil.rmtree(folder, ignore_errors=True)  # a folder without a record: nothing ran in it
            (folder / "tmp").mkdir(parents=True)
            (folder.parent / "checkpoints").mkdir(exist_ok=True)
        self.log.append(
            "cell_started",
            cell=cell.id,
            attempt=number,
            slot=slot.index,
            device=slot.device,
            **({"changed": changed} if changed else {}),
        )
        payload = {
            "workflow": self.config.workflow,
            "budget": self.config.budget,
            "sizes": {**self.sizes.values, **changed},
            "genome": cell.candidate.genome,
            "seed": cell.seed,
            "dataset_dir": self._dataset_dir,
            "device": "cuda" if self.config.device.startswith("cuda") else self.config.device,
            **self._digests(),
            **extra,
        }
        checkpoints = {CHECKPOINTS: str(folder.parent / "checkpoints")}
        # The finaliser runs alone: the processors of the other slots are its own too.
        place = replace(slot, threads=self.slots.all_threads) if cell.role == "test" else slot
        job = self._job(
            f"{cell.id}#{number}", target, folder, payload, {**place.environment, **checkpoints}, place.threads
        )
        self._started[job.name] = (cell, slot, changed)
        self._executor_open().submit(job)

    def _ended(self, job: Job, outcome: Outcome) -> Cell | None:
        """Record the end of an attempt; returns the cell if it gets another one."""
        cell, slot, changed = self._started.pop(job.name)
        self.slots.give(slot)
        number = int(job.name.rpartition("#")[2])
        folder = attempt_folder(self.folder, cell.id, number)
        end = end_of(outcome, folder, {**self.sizes.values, **changed}, changed)
        shutil.rmtree(folder / "tmp", ignore_errors=True)
        if end.no_space:
            raise _no_space(self.folder)
        before = read_attempts(self.folder, cell.id)[: number - 1]
        end.attempt, again = self._retry(end, before)
        ended = Ended(attempt=end.attempt, again=again, peaks=end.peaks)
        write_json_atomic(folder / "attempt.json", ended)
        if again:
            self.log.append(
                "attempt_ended", cell=cell.id, attempt=number, state=end.attempt.state, reason=end.attempt.reason
            )
            return cell
        self._finish(cell, [*before, ended])
        return None

    def _retry(self, end: End, before: list[Ended]) -> tuple[Attempt, bool]:
        """Whether another attempt follows: for ends that may pass, as often as the configuration allows.

        A corrupt result is no fault of the cell, so it gets one more attempt even where there are no retries.
        """
        attempt = end.attempt
        used = sum(not (e.attempt.state == "interrupted" and e.attempt.reason == LOST) for e in before)
        allowed = max(1, self.config.retries) if attempt.state == "interrupted" else self.config.retries
        again = end.transient and used < allowed
        if attempt.state == "interrupted" and not again:
            attempt = attempt.model_copy(update={"state": "failed"})
        return attempt, again

    def _finish(self, cell: Cell, ended: Sequence[Ended]) -> None:
        """Write the immutable result of a cell, then the event that acknowledges it."""
        last = ended[-1]
        raw = None
        if last.attempt.state == "completed":
            raw = raw_result(attempt_folder(self.folder, cell.id, len(ended)))
        result = result_of(cell, [e.attempt for e in ended], raw, last.peaks)
        facts: dict[str, Any] = {"state": result.state, "candidate": result.candidate, "role": result.role}
        if result.state != "completed":
            facts["reason"] = result.attempts[-1].reason
        self.log.keep("cell_ended", result_file(cell.id), result, cell=cell.id, seed=cell.seed, **facts)
        self.results[cell.id] = result
        peak = result.peak_device_bytes if result.device.startswith("cuda") else result.peak_rss_bytes
        known = self._peaks.get(cell.candidate.id, 0)
        if result.state == "completed" and cell.role != "test":
            self._peaks[cell.candidate.id] = max(known, peak)

    # -- processes

    @property
    def _grace(self) -> float:
        return float(self.config.where.get("grace_s", GRACE_S))

    @property
    def _dataset_dir(self) -> str | None:
        return str(Path(self.config.dataset_dir).resolve()) if self.config.dataset_dir else None

    def _digests(self) -> dict[str, Any]:
        return {"digests": self._state.prepared.digests if self._state.prepared else None}

    def _executor_open(self) -> Executor:
        """The executor, opened when the first cell starts."""
        if self._executor is None:
            kind = self.config.where.get("executor", "local")
            if kind == "ray":
                from auto_research.execution.cluster import RayExecutor

                per_gpu = int(self.config.where.get("gpu_slots") or 1)
                gpus = 1 / per_gpu if self.config.device.startswith("cuda") else 0.0
                made: Executor = RayExecutor(
                    self.config.where.get("address"), cpus=self.slots.slots[0].threads, gpus=gpus
                )
            elif kind == "local":
                from auto_research.execution.local import LocalExecutor

                made = LocalExecutor(workers=len(self.slots.slots))
            else:
                raise UserError(f"executor '{kind}' is not known: use local or ray")
            self._executor = self._open.enter_context(made)
        return self._executor

    def _job(
        self,
        name: str,
        target: str,
        folder: Path,
        payload: Mapping[str, Any],
        variables: Mapping[str, str],
        threads: int | None,
    ) -> Job:
        """A call in a process of its own with the deadline, heartbeat, memory limit and environment of this run."""
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        limit = self.config.memory_limit_mb
        return Job(
            name=name,
            target=target,
            payload=json.loads(json.dumps({**payload, "folder": str(folder)})),
            timeout_s=self.config.trial_timeout_s,
            stall_s=self.config.stall_s,
            heartbeat_path=folder / HEARTBEAT,
            log_path=folder / "log.txt",
            result_path=folder / "result.json",
            memory_limit_bytes=limit * MIB if limit else None,
            grace_s=self._grace,
            preload=self._preload,
            threads=threads,
            environment={
                **(offline if self.config.where.get("offline", True) else {}),
                "PYTHONHASHSEED": "0",
                "TOKENIZERS_PARALLELISM": "false",
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
                "TMPDIR": str(folder / "tmp"),
                **variables,
            },
        )

    def _isolated(self, name: str, target: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Call a function of `isolated` in a process of its own. Raises `UserError` with its reason if it fails."""
        folder = (self.folder / "steps" / name).resolve()
        with _disk(self.folder):
            (folder / "tmp").mkdir(parents=True, exist_ok=True)
        config = self.config.model_dump(mode="json")
        job = self._job(
            name,
            target,
            folder,
            {**payload, "config": config},
            {"CUDA_VISIBLE_DEVICES": ""},
            self.slots.slots[0].threads,
        )
        outcome = run_isolated(job)
        if outcome.state in ("killed", "start_failed"):  # lost, not failed: once more
            outcome = run_isolated(job)
        shutil.rmtree(folder / "tmp", ignore_errors=True)
        if outcome.state == "finished":
            return dict(outcome.result or {})
        if outcome.error is not None and "UserError" in outcome.error.kinds:
            raise UserError(outcome.error.message)
        if NO_SPACE in outcome.reason:
            raise _no_space(self.folder)
        raise UserError(f"{name} of {self.config.workflow} failed ({outcome.reason}): see {job.log_path}")

    def _mirror(self) -> None:
        """Bring the trial database up to date; it is a copy, so only a bad URL at the beginning stops a run."""
        url = self.config.where.get("storage")
        if url == "none":
            return
        payload = {
            "trials": [trial.model_dump(mode="json") for trial in self.search()],
            "url": url,
            "run_folder": str(self.folder.resolve()),
        }
        try:
            self._isolated("mirror", "auto_research.evolve.isolated:mirror_trials", payload)
        except RunStopped:
            raise
        except UserError as error:
            if len(self.plans) <= 1:
                raise
            self.log.append("storage_failed", reason=str(error))


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """A full disk stops the run with one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(folder) from error
        raise


def _no_space(folder: Path) -> RunStopped:
    return RunStopped(
        f"No space left on the disk of {folder}: nothing that was recorded is lost; free some space, then "
        f"`auto-research evolve resume {folder}`."
    )


def _work(candidate: Candidate) -> float:
    """Operations of a candidate's training; of a step where its workflow does not count steps (all take as many)."""
    return candidate.flops * candidate.cost.get("training_steps", 1.0)


def _completed(trial: Trial) -> bool:
    """Whether any seed of a trial completed."""
    return any(cell.state == "completed" for cell in trial.cells)


def _replicate(candidate: Candidate) -> Candidate:
    """The same genome on new seeds."""
    again = candidate.model_dump(include={"id", "generation", "genome", "fingerprint", "parameters", "flops",
                                          "memory_bytes", "cost", "match"})  # fmt: skip
    return Candidate(**again, origin="replicate", parents=[candidate.id])
