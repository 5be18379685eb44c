"""The sampler's view of a run as an Optuna study: rebuilt from trials, mirrored to SQLite or PostgreSQL.

The event log of a run is the truth. `history` builds a study from trials alone, so what a sampler proposes is a pure
function of them; Optuna stores no sampler state, and a restarted sampler would repeat its first proposals. `mirror`
writes the same trials to a database, where dashboards and other programs can read them; a lost database is rebuilt.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from auto_research.evolve.cells import sizes_for
from auto_research.evolve.promotion import violations
from auto_research.evolve.records import Candidate, RunConfig, Trial
from auto_research.evolve.space import CONTROL, Axis, Genome, Space
from auto_research.evolve.workflow import Workflow
from auto_research.runtime.errors import UserError

if TYPE_CHECKING:
    import optuna

SQLITE_TIMEOUT_S = 60
"""How long a writer waits for another one's lock on a SQLite file."""
POSTGRES_TIMEOUT_S = 10
"""How long a connection may take to be made."""
VIOLATIONS = "violations"
"""Name of the constraint: the number of hard limits that a trial's metrics break; feasible at 0."""
OUTSIDE_SEARCH = ("random-search", "evidence-only", "quarantined")
"""Origins that no planner sees."""
UNFINISHED = ("planned", "running")


def optuna_module() -> Any:
    """Optuna, silent about every trial it makes."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def seed_of(*key: int | str) -> int:
    """A 32-bit seed that depends on `key` alone, alike in every process."""
    return int.from_bytes(hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()[:4], "big")


def ordered(trials: Sequence[Trial]) -> list[Trial]:
    """The trials of the search by generation and index, whatever order they finished in."""
    search = [t for t in trials if t.candidate.origin not in OUTSIDE_SEARCH]
    return sorted(search, key=lambda t: (t.candidate.generation, _index(t.candidate.id), t.candidate.id))


def _index(id: str) -> int:
    number = re.search(r"(\d+)$", id)
    return int(number[1]) if number else 0


# --------------------------------------------------------------------------------------------------- trials


def distribution(axis: Axis) -> optuna.distributions.BaseDistribution:
    """An axis as Optuna's distribution."""
    d = optuna_module().distributions
    if axis.kind in ("float", "log-float"):
        return d.FloatDistribution(axis.low, axis.high, log=axis.kind == "log-float")
    return d.CategoricalDistribution(axis.values)


def distributions(space: Space, genome: Genome) -> dict[str, optuna.distributions.BaseDistribution]:
    """Distributions of the axes that count in `genome`."""
    return {axis.name: distribution(axis) for axis in space.axes if axis.name in genome}


def rounded(axis: Axis, value: float) -> float:
    """A value of a range to six significant digits, so that equal settings are equal numbers; never outside it."""
    return min(axis.high, max(axis.low, float(f"{value:.6g}")))


def suggest(trial: optuna.Trial, space: Space, fixed: Genome | None = None) -> Genome:
    """A genome from a trial that was asked: axes in their order, those alone whose conditions hold (define by run).

    `fixed` axes are not asked for.
    """
    genome: Genome = dict(fixed or {})
    for axis in space.axes:
        if axis.name in genome or not space.active(genome, axis):
            continue
        if axis.kind in ("float", "log-float"):
            value = trial.suggest_float(axis.name, axis.low, axis.high, log=axis.kind == "log-float")
            genome[axis.name] = rounded(axis, value)
        else:
            genome[axis.name] = axis.check(cast(Any, trial.suggest_categorical(axis.name, axis.values)))
    return genome


def directions(config: RunConfig, workflow: Workflow) -> list[str]:
    """What the study optimises: the primary metric, and for NSGA-II the FLOPs as well."""
    primary = "maximize" if workflow.direction == "max" else "minimize"
    return [primary, "minimize"] if config.sampler == "nsga2" else [primary]


def outcome(config: RunConfig, workflow: Workflow, trial: Trial) -> tuple[list[float], dict[str, float]] | None:
    """(objective values, constraints) of a trial whose cells completed; None for one that failed or lacks a seed."""
    if trial.state not in ("completed", "screened_out") or trial.mean is None:
        return None
    values = [trial.mean, trial.candidate.flops] if config.sampler == "nsga2" else [trial.mean]
    return values, {VIOLATIONS: float(len(violations(trial, workflow, workflow.limits(sizes_for(workflow, config)))))}


def attributes(candidate: Candidate) -> dict[str, Any]:
    """What a stored trial says about its candidate."""
    keys = ("id", "generation", "origin", "fingerprint", "parents", "duplicate_of", "reason")
    made = candidate.model_dump(mode="json", include=set(keys))
    return {"candidate": made.pop("id"), **{key: value for key, value in made.items() if value or key == "generation"}}


def frozen(config: RunConfig, workflow: Workflow, trial: Trial) -> optuna.trial.FrozenTrial:
    """A finished trial in Optuna's form: COMPLETE with values and constraints, or FAIL."""
    o = optuna_module()
    found = outcome(config, workflow, trial)
    genome = trial.candidate.genome
    return o.trial.create_trial(
        state=o.trial.TrialState.FAIL if found is None else o.trial.TrialState.COMPLETE,
        values=None if found is None else found[0],
        constraints=None if found is None else found[1],
        params=dict(genome),
        distributions=distributions(workflow.space, genome),
        user_attrs=attributes(trial.candidate),
    )


def history(config: RunConfig, workflow: Workflow, trials: Sequence[Trial]) -> optuna.Study:
    """A study in memory that holds the trials of the search, in their order."""
    study = optuna_module().create_study(directions=directions(config, workflow))
    study.add_trials([frozen(config, workflow, trial) for trial in ordered(trials)])
    return study


# -------------------------------------------------------------------------------------------------- samplers


def sampler(config: RunConfig, generation: int, number: int, completed: int) -> optuna.samplers.BaseSampler:
    """The sampler that proposes trial `number`, seeded from (run seed, trial number) alone.

    Args:
        completed: trials with values in the study; NSGA-II needs two for a crossover, and mutates one otherwise.
    """
    samplers = optuna_module().samplers
    seed = seed_of(config.run_seed, number)
    if config.sampler == "tpe":
        return samplers.TPESampler(seed=seed, n_startup_trials=min(10, config.population))
    if config.sampler == "nsga2":
        return _nsga2(config.population, generation, seed, crossover=completed > 1)
    return samplers.RandomSampler(seed=seed)


def _nsga2(population: int, generation: int, seed: int, *, crossover: bool) -> optuna.samplers.BaseSampler:
    """NSGA-II whose generations and population are those of the run.

    Optuna's own counts completed trials only, so one failed trial would shift every later generation.
    """
    o = optuna_module()

    class RunGenerations(o.samplers.NSGAIISampler):  # type: ignore[name-defined]
        def get_trial_generation(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> int:
            return trial.user_attrs.get("generation", generation)

        def get_population(self, study: optuna.Study, generation: int) -> list[optuna.trial.FrozenTrial]:
            complete = study.get_trials(deepcopy=False, states=[o.trial.TrialState.COMPLETE])
            return [trial for trial in complete if trial.user_attrs.get("generation") == generation]

    return RunGenerations(population_size=max(2, population), seed=seed, crossover_prob=0.9 if crossover else 0.0)


def ask(config: RunConfig, workflow: Workflow, study: optuna.Study, generation: int) -> tuple[optuna.Trial, Genome]:
    """The next proposal of the configured sampler; the trial stays open in `study` until it is told."""
    states = optuna_module().trial.TrialState
    trials = study.get_trials(deepcopy=False)
    completed = sum(trial.state == states.COMPLETE for trial in trials)
    study.sampler = sampler(config, generation, len(trials), completed)
    axes = workflow.space.axes
    # A negative control would only make the search worse: it keeps the baseline's value.
    start = {**workflow.start(config.budget), **config.changes}
    controls = {axis.name: start.get(axis.name, axis.start) for axis in axes if axis.group == CONTROL}
    always = {axis.name: distribution(axis) for axis in axes if not axis.condition and axis.name not in controls}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samplers about conditional axes, which they draw independently
        trial = study.ask(fixed_distributions=always)
        return trial, workflow.space.resolve(suggest(trial, workflow.space, controls))


# -------------------------------------------------------------------------------------------------- databases


def open_storage(url: str | None, folder: Path) -> optuna.storages.RDBStorage:
    """The database of a URL (`sqlite:///FILE`, `postgresql://USER@HOST/NAME`); `optuna.db` in `folder` without one.

    Raises `UserError` when it cannot be opened; passwords are never shown.
    """
    import sqlalchemy.exc

    try:
        made = sqlalchemy.make_url(url) if url else sqlalchemy.URL.create("sqlite", database=str(folder / "optuna.db"))
    except sqlalchemy.exc.ArgumentError:
        raise UserError("the storage is no database URL; write sqlite:///FILE or postgresql://USER@HOST/NAME") from None
    backend = made.get_backend_name()
    shown = made.render_as_string(hide_password=True)
    if made.drivername in ("postgres", "postgresql"):  # releases of SQLAlchemy differ in the driver they take
        older = importlib.util.find_spec("psycopg") is None
        made = made.set(drivername="postgresql+psycopg2" if older else "postgresql+psycopg")
    if made.get_backend_name() not in ("sqlite", "postgresql"):
        raise UserError(
            f"storage of kind '{backend}' is not known; write sqlite:///FILE or postgresql://USER@HOST/NAME"
        )
    local = made.get_backend_name() == "sqlite"
    options: dict[str, Any] = {"timeout": SQLITE_TIMEOUT_S} if local else {"connect_timeout": POSTGRES_TIMEOUT_S}
    if local and made.database:
        Path(made.database).parent.mkdir(parents=True, exist_ok=True)
    with database_errors(shown):
        try:
            return optuna_module().storages.RDBStorage(
                made.render_as_string(hide_password=False),
                engine_kwargs={"connect_args": options, "pool_pre_ping": not local},
            )
        except RuntimeError as error:  # tables of another release of Optuna
            raise UserError(f"storage {shown} cannot be used: {error}") from error


@contextmanager
def database_errors(shown: str) -> Iterator[None]:
    """Turns what a database refuses into one sentence."""
    import sqlalchemy.exc
    from optuna.exceptions import StorageInternalError

    try:
        yield
    except ImportError as error:
        raise UserError(
            f"storage {shown} needs a driver that is missing ({error}); run: pip install 'auto-research[postgres]'"
        ) from error
    except (sqlalchemy.exc.SQLAlchemyError, StorageInternalError) as error:
        cause = error.__cause__ or error
        line = (str(getattr(cause, "orig", None) or cause).strip().splitlines() or ["no reason was given"])[0]
        raise UserError(f"storage {shown} cannot be used ({line}); check the URL and that the server runs") from error


def open_study(config: RunConfig, workflow: Workflow, storage: optuna.storages.BaseStorage) -> optuna.Study:
    """The study of a run in a database, made when it is not there; its name holds the run and its fingerprint."""
    o = optuna_module()
    with database_errors("of the run"):
        return o.create_study(
            storage=storage,
            study_name=f"{config.run}-{config.fingerprint()}",
            directions=directions(config, workflow),
            sampler=o.samplers.RandomSampler(seed=config.run_seed),  # never draws: every trial is enqueued whole
            load_if_exists=True,
        )


def mirror(study: optuna.Study, config: RunConfig, workflow: Workflow, trials: Sequence[Trial]) -> None:
    """Makes a study hold exactly the trials of the search; calling it again changes nothing.

    Candidates that are planned or running are enqueued and asked, and told when they finish. Finished ones that the
    study lacks (a new or a lost database) are added. Open trials that the run does not know (left by a process that
    died between asking and writing its plan) are told FAIL.
    """
    with database_errors("of the run"):
        _mirror(study, config, workflow, ordered(trials))


def _mirror(study: optuna.Study, config: RunConfig, workflow: Workflow, trials: list[Trial]) -> None:
    states = optuna_module().trial.TrialState
    ours = {trial.candidate.id: trial for trial in trials}
    while any(t.state == states.WAITING for t in study.get_trials(deepcopy=False)):
        study.ask()  # left by a process that died in between; now RUNNING, with the parameters that were enqueued
    stored: dict[str, optuna.trial.FrozenTrial] = {}
    for known in study.get_trials(deepcopy=False):
        trial = ours.get(known.user_attrs.get("candidate", ""))
        id = "" if trial is None else trial.candidate.id
        if trial is not None and id not in stored and _agrees(known, trial, frozen(config, workflow, trial)):
            stored[id] = known
        elif not known.state.is_finished():
            study.tell(known.number, state=states.FAIL)
    for id, trial in ours.items():
        if id not in stored:
            if trial.state not in UNFINISHED:
                study.add_trial(frozen(config, workflow, trial))
                continue
            study.enqueue_trial(dict(trial.candidate.genome), user_attrs=attributes(trial.candidate))
            study.ask(fixed_distributions=distributions(workflow.space, trial.candidate.genome))
        elif trial.state not in UNFINISHED and not stored[id].state.is_finished():
            tell(study, config, workflow, stored[id].number, trial)


def _agrees(known: optuna.trial.FrozenTrial, trial: Trial, wanted: optuna.trial.FrozenTrial) -> bool:
    """Whether a stored trial is this one: same experiment, and either still open or with the same outcome."""
    if known.params != wanted.params or known.user_attrs.get("fingerprint") != wanted.user_attrs.get("fingerprint"):
        return False
    if not known.state.is_finished():
        return True
    return trial.state not in UNFINISHED and (known.state, known.values) == (wanted.state, wanted.values)


def tell(study: optuna.Study, config: RunConfig, workflow: Workflow, number: int, trial: Trial) -> None:
    """Finishes an open trial of a study: its constraints and values, or FAIL."""
    o = optuna_module()
    found = outcome(config, workflow, trial)
    if found is None:
        study.tell(number, state=o.trial.TrialState.FAIL)
        return
    open_trial = o.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)
    for name, value in found[1].items():
        open_trial.set_constraint(name, value)
    study.tell(open_trial, found[0])
