"""`Study`: what a paper's `run(study)` receives, and the only way it speaks to the rest of the house."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from auto_research.runtime.budget import Budget, Overrides
from auto_research.runtime.errors import MissingData, UserError, nearest
from auto_research.runtime.evidence import current_log
from auto_research.study.card import Card, Role

if TYPE_CHECKING:
    import torch

    from auto_research.checkpoints.resolve import Resolved
    from auto_research.study.compare import Comparison, Trial, Variant
    from auto_research.study.verdict import Clause
    from auto_research.tasks.base import Recipe, Task

FIRST_SEED = 42

CheckpointChoice = Literal["auto", "micro"]


@dataclass
class Stage:
    """One stage of a run: how long it took and how many optimiser updates it made."""

    name: str
    trains: bool
    seconds: float = 0.0
    optimiser_steps: int = 0


@dataclass
class Study:
    """One run of one paper.

    Attributes:
        device: the device as requested; the paper resolves it with `device_for(study.device)`.
        seeds: one training run a variant each.
        dataset_dir: folder that wins over the cache and the embedded data.
        checkpoints: `auto` takes the first of the card's checkpoints that is on this machine, `micro` the last.
        settings: every step count and size that was asked for, as resolved.
    """

    card: Card
    budget: Budget = "smoke"
    seeds: tuple[int, ...] = ()
    device: str = "auto"
    dataset_dir: Path | None = None
    checkpoints: CheckpointChoice = "auto"
    overrides: Overrides | None = None
    quiet: bool = False
    settings: dict[str, int] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data_used: dict[str, str] = field(default_factory=dict)
    checkpoints_used: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.overrides is None:
            self.overrides = Overrides(self.card.key, self.card.overrides, {})
        if not self.seeds:
            count = self.card.smoke_seeds if self.budget == "smoke" else self.card.standard_seeds
            self.seeds = tuple(range(FIRST_SEED, FIRST_SEED + count))
        if len(set(self.seeds)) != len(self.seeds):
            raise UserError(f"seeds {list(self.seeds)} repeat; a seed counts only once")

    # -- what the budget allows ---------------------------------------------------------------------------------

    def _setting(self, name: str, suffix: str, values: dict[str, int | None]) -> int:
        value = values[self.budget] if values[self.budget] is not None else values["standard"]
        documented = suffix in self.card.overrides
        override = self.overrides.get(suffix) if documented and self.overrides else None
        chosen = override if override is not None else value
        assert chosen is not None
        if chosen < 1:
            raise ValueError(f"{name} must be at least 1, got {chosen}")
        self.settings[name] = chosen
        return chosen

    def steps(self, name: str, *, smoke: int, standard: int, full: int | None = None) -> int:
        """Optimiser updates of a stage under this budget; `AUTO_RESEARCH_<KEY>_<NAME>_STEPS` wins if documented."""
        suffix = f"{name.upper().replace(' ', '_').replace('-', '_')}_STEPS"
        return self._setting(f"{name} steps", suffix, {"smoke": smoke, "standard": standard, "full": full})

    def size(self, name: str, *, smoke: int, standard: int, full: int | None = None) -> int:
        """A number of users, examples or units of width under this budget; `AUTO_RESEARCH_<KEY>_<NAME>` wins."""
        suffix = name.upper().replace(" ", "_").replace("-", "_")
        return self._setting(name, suffix, {"smoke": smoke, "standard": standard, "full": full})

    # -- what the paper runs on ---------------------------------------------------------------------------------

    def dataset(self, name: str | None = None) -> Any:
        """The parsed data set `name`, or the first of the card's data sets that is on this machine.

        Raises `MissingData` with the command that fetches it.
        """
        from auto_research.data import catalogue

        names = [name] if name else self.card.datasets
        if name and name not in self.card.datasets:
            raise UserError(f"{self.card.key} does not use data set '{name}'.{nearest(name, self.card.datasets)}")
        missing: MissingData | None = None
        for candidate in names:
            try:
                loaded = catalogue.load(candidate, self.dataset_dir)
            except MissingData as error:
                missing = missing or error
                continue
            self.data_used[candidate] = catalogue.fingerprint(loaded)
            return loaded
        assert missing is not None
        raise missing

    def checkpoint(self, role: Role, name: str | None = None) -> Resolved:
        """The checkpoint that serves `role`, recorded with its source. Raises `MissingCheckpoint`.

        `name` asks for one of the card's checkpoints of that role, instead of the first that is on this machine; under
        `checkpoints="micro"` the last serves all the same.
        """
        from auto_research.checkpoints import resolve as resolving

        names = self.card.checkpoints.get(role)
        if not names:
            raise UserError(f"the card of {self.card.key} names no checkpoint for '{role}'")
        chosen = names[-1]
        if name is not None and name not in names:
            raise UserError(f"{self.card.key} uses no checkpoint '{name}' for '{role}'.{nearest(name, names)}")
        if self.checkpoints == "auto":
            chosen = name or next((n for n in names if resolving.available(n)), names[-1])
        resolved = resolving.resolve(chosen)
        self.checkpoints_used[role] = {
            "name": resolved.name,
            "source": resolved.source,
            "revision": resolved.revision,
            "note": resolved.note,
        }
        if chosen != names[0]:
            self.note(f"{role} is served by {chosen}; {names[0]} is the card's first choice")
        return resolved

    # -- what the paper says while it runs ----------------------------------------------------------------------

    def say(self, text: str) -> None:
        """One line for the person who watches, on standard error."""
        if not self.quiet:
            print(f"[{self.card.key}] {text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A remark that belongs into the record (a fall-back, a reduced part)."""
        if text not in self.notes:
            self.notes.append(text)
            self.say(text)

    @contextmanager
    def stage(self, name: str, *, trains: bool = True) -> Iterator[Stage]:
        """Times a stage and counts the optimiser updates made inside it, whoever makes them.

        `trains=False` says that the stage is not meant to train (reading, encoding, decoding).
        """
        from torch.optim.optimizer import register_optimizer_step_post_hook

        stage = Stage(name, trains)
        self.stages.append(stage)

        def count(*_: Any) -> None:
            stage.optimiser_steps += 1

        self.say(f"{name} ...")
        log = current_log()
        if log is not None:
            log.append("stage_start", stage=name, trains=trains)
        handle = register_optimizer_step_post_hook(count)
        started = time.perf_counter()
        try:
            yield stage
        finally:
            handle.remove()
            stage.seconds = time.perf_counter() - started
            if log is not None:
                log.append(
                    "stage_end",
                    stage=name,
                    trains=stage.trains,
                    seconds=round(stage.seconds, 3),
                    optimiser_steps=stage.optimiser_steps,
                )
        self.say(f"{name}: {stage.seconds:.1f} s, {stage.optimiser_steps} updates")

    # -- the comparison -----------------------------------------------------------------------------------------

    def compare(
        self,
        task: Task,
        *,
        baseline: Variant,
        candidates: Sequence[Variant],
        steps: int,
        device: torch.device,
        recipe: Recipe | None = None,
        learning_rates: Sequence[float] = (),
        clauses: Sequence[Clause] = (),
    ) -> Comparison:
        """Trains and evaluates every variant at every seed, all under one recipe.

        `learning_rates` is a grid that every variant tunes over at the first seed, on validation; the remaining
        seeds use its choice. Test is read once a trial, after the choice. `clauses` is the decision rule, applied
        when the record is made.
        """
        from auto_research.study.compare import Comparison
        from auto_research.tasks.base import Recipe

        recipe = recipe or Recipe()
        variants = [replace(baseline, kind="baseline"), *candidates]
        names = [v.name for v in variants]
        if len(set(names)) != len(names):
            raise ValueError(f"two variants share a name: {names}")
        trials: dict[str, list[Trial]] = {}
        grid = tuple(learning_rates) or (recipe.learning_rate,)
        for variant in variants:
            with self.stage(variant.name, trains=variant.trains and variant.kind != "floor") as stage:
                chosen = grid
                for seed in self.seeds:
                    tried = [self._trial(task, variant, seed, rate, steps, device, recipe) for rate in chosen]
                    sign = -1.0 if task.primary in task.lower_is_better else 1.0
                    trial = max(tried, key=lambda t: sign * t.validation[task.primary])
                    chosen = (trial.learning_rate,)
                    trial.test = trial.read_test()
                    trials.setdefault(variant.name, []).append(trial)
                    stage.trains &= trial.parameters > 0  # a closed form has nothing to train
                    self.say(
                        f"{variant.name}, seed {seed}: validation {task.primary} {trial.validation[task.primary]:.4f}"
                    )
        return Comparison(
            task=task.name,
            primary=task.primary,
            lower_is_better=task.lower_is_better,
            baseline=baseline.name,
            variants=variants,
            trials=trials,
            seeds=self.seeds,
            budget=self.budget,
            steps=steps,
            recipe={**asdict(recipe), "learning_rates": list(grid)},
            clauses=clauses,
        )

    def _trial(
        self,
        task: Task,
        variant: Variant,
        seed: int,
        learning_rate: float,
        steps: int,
        device: torch.device,
        recipe: Recipe,
    ) -> Trial:
        from auto_research.runtime.device import seed_everything
        from auto_research.study.compare import Trial
        from auto_research.tasks.base import count_parameters, fit

        seed_everything(seed)
        started = time.perf_counter()
        if variant.build is not None:
            with self._bar(f"{variant.name}, seed {seed}", steps) as advance:
                fitted = fit(
                    variant.build(),
                    task,
                    steps=steps,
                    seed=seed,
                    device=device,
                    recipe=replace(recipe, learning_rate=learning_rate),
                    on_progress=advance,
                )
            model, validation = fitted.model, fitted.validation
            trial = Trial(
                variant=variant.name,
                seed=seed,
                learning_rate=learning_rate,
                parameters=count_parameters(model),
                steps=fitted.steps,
                best_step=fitted.best_step,
                seconds=0.0,
                validation=validation,
                history=fitted.history,
                losses=fitted.losses,
                logged=_logged(model),
            )
        else:
            assert variant.train is not None
            trained = variant.train(seed, learning_rate)
            model = trained.model.to(device).eval()
            trial = Trial(
                variant=variant.name,
                seed=seed,
                learning_rate=learning_rate,
                parameters=trained.parameters if trained.parameters is not None else count_parameters(model),
                steps=trained.steps,
                best_step=trained.steps,
                seconds=0.0,
                validation=task.evaluate(model, "validation", device),
                logged={**_logged(model), **trained.logged},
            )
        trial.seconds = time.perf_counter() - started
        trial.read_test = lambda: task.evaluate(model, "test", device)
        return trial

    @contextmanager
    def _bar(self, title: str, steps: int) -> Iterator[Callable[[int, float | None], None]]:
        """A progress bar on a terminal; silence elsewhere (stages and seeds are still said)."""
        if self.quiet or not sys.stderr.isatty():
            yield lambda step, value: None
            return
        from rich.console import Console
        from rich.progress import Progress, TimeRemainingColumn

        with Progress(*Progress.get_default_columns()[:-1], TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            job = bar.add_task(title, total=steps)

            def advance(step: int, value: float | None) -> None:
                bar.update(job, completed=step, description=title if value is None else f"{title} ({value:.4f})")

            yield advance


def _logged(model: Any) -> dict[str, float]:
    """Numbers a model kept about itself in its `logged` dict (gate activity, multipliers, code usage)."""
    return {name: float(value) for name, value in getattr(model, "logged", {}).items()}
