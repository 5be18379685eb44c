"""The board of a run: one static HTML file drawn from a `RunRecord`, and the same facts as text and as JSON.

The page needs no network and no script, every text in it is escaped, and a record always gives the same bytes. What a
clock or a memory gauge measured stands in `<span class="t">`, so that two runs can be compared apart from it
(`without_times`).
"""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auto_research.evolve import board_plots as plots
from auto_research.evolve.board_plots import number, short, signed
from auto_research.evolve.lineage import attribution
from auto_research.evolve.promotion import Direction, paired
from auto_research.evolve.records import Attempt, Candidate, CellResult, Paired, RunConfig, RunRecord, Trial
from auto_research.evolve.slots import CARD_BYTES, MARGIN
from auto_research.evolve.workflow import must_be_zero
from auto_research.runtime.records import write_text_atomic

if TYPE_CHECKING:
    from jinja2 import Environment

# What HTML can hold, without the marks that turn the direction of writing; everything else is dropped.
_NOT_HTML = re.compile("[^\t\n\r\x20-\x7e\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]")
_MEASURED = re.compile(r'<span class="t">[^<]*</span>')
_COST = re.compile(r"token|latency|cost|calls|seconds|_ms$")

WORDS = {
    "improved": "Improved",
    "not improved": "No improvement found",
    "no signal": "No signal",
    "smoke: no conclusion": "Smoke run, no conclusion",
    "measured": "Measured",
}
STATUS_WORDS = {
    "planned": "Planned, nothing has run yet",
    "running": "Running",
    "interrupted": "Interrupted, can be resumed",
    "stopped": "Stopped, can be resumed",
    "nothing completed": "Nothing completed",
}
MEANING = {
    "improved": "The champion beats the baseline on fresh seeds that played no part in the search.",
    "not improved": "No candidate beats the baseline beyond noise, or the lead did not survive fresh seeds.",
    "no signal": "The runs stay below a trivial predictor, so their order says nothing.",
    "smoke: no conclusion": "Too few seeds, steps or examples, or stand-in data: a check of the machinery.",
    "measured": "Fixed candidates were measured; nothing was selected.",
}


def headline(record: RunRecord) -> tuple[str, str]:
    """(the verdict in words, the sentence that explains it without repeating the words)."""
    if record.status in STATUS_WORDS and record.status != "nothing completed":
        return STATUS_WORDS[record.status], progress(record)
    words = STATUS_WORDS.get(record.status) or WORDS[record.verdict]
    sentence = record.sentence.strip()
    for start in (words, WORDS[record.verdict], record.verdict):
        if sentence.casefold().startswith(start.casefold()):
            sentence = sentence[len(start) :].lstrip(" .:;,—–-")
            break
    sentence = re.sub(r"^\(([^()]*)\)\.?\s*", r"\1. ", sentence)
    if record.status == "finished" and record.decisions and record.champion == "baseline":
        more = "no improvement found"
        if more not in words.casefold():
            words += f"; {more}"
        sentence = re.sub(r"(?i)\bno improvement found[:.] (\w)", lambda m: m[1].upper(), sentence)
    if record.verdict != "improved":
        sentence = sentence.replace("Improved: ", "")  # a smoke run's lead, which its verdict does not claim
    first = sentence.partition(" ")[0].rstrip(",.:;")
    return words, sentence[:1].upper() + sentence[1:] if first.isalpha() else sentence


def progress(record: RunRecord) -> str:
    """How far a run is that has not ended."""
    trials = [*record.trials, *record.random_search, *record.confirmation]
    cells = [cell for t in trials for cell in t.cells]
    if not cells:
        return "No cell has run."
    ended = sum(cell.state not in ("planned", "queued", "running") for cell in cells)
    generation = max((t.candidate.generation for t in record.trials), default=0)
    stage = "Confirmation" if record.confirmation else "Random search" if record.random_search else ""
    if not stage:
        stage = f"Generation {generation} of {record.config.generations}"
    leader = "" if record.champion == "baseline" else f" So far {record.champion} leads, which proves nothing yet."
    return f"{stage}: {ended} of {len(cells)} cells have ended.{leader}"


# ------------------------------------------------------------------------------------------------------- candidates


@dataclass(frozen=True)
class Row:
    """A candidate as the board lists it. `outcome` says how its gain over its parent stands to noise."""

    trial: Trial
    strip: plots.Strip
    mean: str
    half: str
    gain: str
    outcome: str
    seeds: str
    champion: bool
    parent: bool
    rank: int | None


@dataclass(frozen=True)
class Generation:
    """The candidates of a generation on the page's common scale, after the parent that they are compared with."""

    name: str
    rows: list[Row]
    lines: list[plots.Line]
    reason: str
    champion: str
    notes: list[str]


def outcome(gain: Paired | None, least: float = 0.0) -> str:
    """A paired gain in one or two words."""
    if gain is None:
        return ""
    if gain.lower is None or gain.upper is None:
        return "no deviation"
    word = "ahead" if gain.lower > least else "behind" if gain.upper < 0 else "within noise"
    return f"{word}, provisional" if gain.provisional and word != "within noise" else word


def _row(record: RunRecord, trial: Trial, axis: plots.Scale, *, parent: bool = False, rank: int | None = None) -> Row:
    config = record.config
    half = plots.interval(trial, record.metric, config.z, record.noise)
    done = sum(cell.state == "completed" for cell in trial.cells)
    gain = None if parent else trial.gain
    return Row(
        trial=trial,
        strip=plots.strip(trial, axis, record.metric, config.z, record.noise),
        mean=number(trial.mean),
        half="" if half is None or trial.mean is None else f"± {number(half)}",
        gain=signed(gain.gain) if gain else "",
        outcome=outcome(gain, config.delta_min),
        seeds=f"{done} of {len(trial.cells)} seeds" if trial.cells else "",
        champion=trial.candidate.id == record.champion,
        parent=parent,
        rank=rank,
    )


def _reference(record: RunRecord) -> list[tuple[str, str, float]]:
    """(kind, name, value) of floors and anchors."""
    if record.prepared is None:
        return []
    floors = [("floor", name, value) for name, value in record.prepared.floors.items()]
    return floors + [("anchor", name, value) for name, value in record.prepared.anchors.items()]


def common_scale(record: RunRecord) -> plots.Scale:
    """One scale for all candidates of the page: whatever was measured, with floors and anchors that lie near enough."""
    trials = [*record.trials, *record.random_search]
    values = [v for t in trials for _, v in plots.measured(t.cells, record.metric)]
    for t in trials:
        half = plots.interval(t, record.metric, record.config.z, record.noise)
        if t.mean is not None:
            values += [t.mean - (half or 0.0), t.mean + (half or 0.0)]
    return plots.scale(plots.widen(values, [value for _, _, value in _reference(record)]), room=0.05)


def generations(record: RunRecord, axis: plots.Scale, ranks: Mapping[str, int]) -> list[Generation]:
    """The plans of the search in order, each with the decision that ended it."""
    by_id = {t.candidate.id: t for t in record.trials}
    decisions = {d.generation: d for d in record.decisions}
    found: list[Generation] = []
    for g in sorted({t.candidate.generation for t in record.trials}):
        members = [t for t in record.trials if t.candidate.generation == g]
        decision = decisions.get(g)
        parent_id = decision.parent if decision else next((p for t in members for p in t.candidate.parents[:1]), "")
        parent = by_id.get(parent_id)
        reference = _reference(record)
        rows = []
        if parent is not None and parent not in members:
            rows.append(_row(record, parent, axis, parent=True))
            if parent.mean is not None:
                reference.append(("parent", parent.candidate.id, parent.mean))
        rows += [_row(record, t, axis, rank=ranks.get(t.candidate.id)) for t in members]
        name = "Generation 0: the baseline" if g == 0 else f"Generation {g}"
        found.append(
            Generation(
                name,
                rows,
                plots.lines(reference, axis),
                decision.reason if decision else "",
                decision.champion if decision else "",
                [note for note in record.notes.get(f"g{g}", []) if not any(note in other.notes for other in found)],
            )
        )
    return found


# ------------------------------------------------------------------------------------------- gains, effects, outcome


@dataclass(frozen=True)
class Interval:
    """A gain on a scale of gains, in percent; low and high are missing without a standard error."""

    x: float
    low: float | None
    high: float | None
    kind: str


def _interval(gain: Paired, axis: plots.Scale, least: float) -> Interval:
    low, high = (None if end is None else axis(end) for end in (gain.lower, gain.upper))
    return Interval(axis(gain.gain), low, high, outcome(gain, least).split(",")[0].replace(" ", "-"))


def gain_scale(gains: Iterable[Paired]) -> plots.Scale:
    """A scale of gains with 0 on it."""
    values = [v for g in gains for v in (g.gain, g.lower, g.upper) if v is not None]
    return plots.scale([0.0, *values], room=0.08)


@dataclass(frozen=True)
class Step:
    """One comparison of champion and baseline: search, confirmation or test."""

    name: str
    what: str
    baseline: str
    champion: str
    gain: Paired | None
    interval: Interval | None
    between: str
    basis: str


@dataclass(frozen=True)
class Outcome:
    """Search, confirmation and test side by side on one scale."""

    steps: list[Step]
    zero: float
    ticks: list[tuple[float, str]]


def champion_gain(record: RunRecord) -> Paired | None:
    """The champion against the baseline on the search's own seeds."""
    by_id = {t.candidate.id: t for t in record.trials}
    best, base = by_id.get(record.champion), by_id.get("baseline")
    if best is None or base is None or best is base:
        return None
    return against(record, best, base)


def against(record: RunRecord, child: Trial, parent: Trial) -> Paired | None:
    """The paired gain of one trial over another, or None where they share no seed."""
    if child.gain is not None and child.gain.parent == parent.candidate.id:
        return child.gain
    if not (plots.measured(child.cells, record.metric) and plots.measured(parent.cells, record.metric)):
        return None
    by_examples = any(t.gain is not None and t.gain.by == "examples" for t in record.trials)
    return paired(
        child, parent, direction=record.direction, metric=record.metric, z=record.config.z, noise=record.noise,
        stochastic=not by_examples, n_min=record.config.n_min,
    )  # fmt: skip


def compared(record: RunRecord) -> Outcome | None:
    """What search, fresh seeds and the sealed test say about the champion; None when the baseline stayed it."""
    by_id = {t.candidate.id: t for t in record.trials}
    best, base = by_id.get(record.champion), by_id.get("baseline")
    if best is None or base is None or best is base:
        return None
    seeds = ", ".join(map(str, record.config.seeds))
    found: list[tuple[str, str, str, str, Paired | None]] = [
        ("Search", f"validation, seeds {seeds}", _mean(base), _mean(best), champion_gain(record))
    ]
    fresh = {t.candidate.id: t for t in record.confirmation}
    if record.confirmed is not None or fresh:
        seeds = ", ".join(map(str, record.config.confirm_seeds))
        found.append(
            ("Confirmation", f"validation, fresh seeds {seeds}", _mean(fresh.get("baseline")),
             _mean(fresh.get(record.champion)), record.confirmed)
        )  # fmt: skip
    if record.test is not None:
        metrics = {id: values.get(record.metric) for id, values in record.test.metrics.items()}
        found.append(
            ("Sealed test", "stored weights, opened after the search", number(metrics.get("baseline")),
             number(metrics.get(record.champion)), record.test.gain)
        )  # fmt: skip
    axis = gain_scale(gain for *_, gain in found if gain)
    least = record.config.delta_min
    steps = [
        Step(name, what, b, c, gain, _interval(gain, axis, least) if gain else None, between(gain), basis(gain))
        for name, what, b, c, gain in found
    ]
    return Outcome(steps, axis(0.0), axis.ticks)


def between(gain: Paired | None) -> str:
    """The interval of a gain in words."""
    if gain is None:
        return "no comparison"
    if gain.lower is None or gain.upper is None:
        return "no standard error"
    return f"{signed(gain.lower)} to {signed(gain.upper)}"


def basis(gain: Paired | None) -> str:
    """What an interval rests on."""
    if gain is None:
        return ""
    pairs = f"{gain.n} {gain.by if gain.n != 1 else gain.by[:-1]}"
    missing = f", without seeds {', '.join(map(str, gain.missing))}" if gain.missing else ""
    return f"z = {gain.z:g}, {pairs}{missing}"


def _mean(trial: Trial | None) -> str:
    if trial is None or trial.mean is None:
        return "–"
    return number(trial.mean) + ("" if trial.deviation is None else f" ± {number(trial.deviation)}")


@dataclass
class Effect:
    """What a change of one axis value did, over all candidates that made it."""

    axis: str
    old: str
    new: str
    alone: list[Paired] = field(default_factory=list)
    joint: list[Paired] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def gains(self) -> list[Paired]:
        """Gains of the candidates that changed only this axis, or, without any, of the others."""
        return self.alone or self.joint

    @property
    def mean(self) -> float | None:
        return sum(g.gain for g in self.gains) / len(self.gains) if self.gains else None

    @property
    def se(self) -> float | None:
        """Standard error of the mean gain, from the errors of its parts."""
        errors = [g.se for g in self.gains]
        known = [e for e in errors if e is not None]
        return math.sqrt(sum(e * e for e in known)) / len(known) if known and len(known) == len(errors) else None


@dataclass(frozen=True)
class Effects:
    """The axis-effect table; dots are single gains."""

    rows: list[tuple[Effect, list[tuple[float, str]], Interval | None, str]]
    zero: float
    ticks: list[tuple[float, str]]


def effects(record: RunRecord) -> Effects:
    """Gains over the parent by axis value, of the candidates of the search."""
    found: dict[tuple[str, str, str], Effect] = {}
    for t in record.trials:
        c = t.candidate
        for name, values in moved(c).items():
            key = (name, value_text(values[0]), value_text(values[-1]))
            effect = found.setdefault(key, Effect(*key))
            effect.ids.append(c.id)
            if t.gain is not None:
                (effect.alone if len(moved(c)) == 1 else effect.joint).append(t.gain)
            elif c.duplicate_of:
                effect.notes.append(f"{c.id} is the same as {c.duplicate_of}: no effect")
            elif t.state not in ("completed", "screened_out", "planned", "running"):
                effect.notes.append(f"{c.id} {t.state}")
    z = record.config.z
    gains = [g for e in found.values() for g in e.gains]
    axis = gain_scale(gains)
    rows = []
    for key in sorted(found):
        effect = found[key]
        bar, word = None, ""
        if effect.mean is not None:
            half = None if effect.se is None else z * effect.se
            pooled = Paired(
                child="", parent="", n=len(effect.gains), gain=effect.mean, se=effect.se, z=z,
                lower=None if half is None else effect.mean - half, upper=None if half is None else effect.mean + half,
                provisional=any(g.provisional for g in effect.gains),
            )  # fmt: skip
            bar, word = _interval(pooled, axis, record.config.delta_min), outcome(pooled, record.config.delta_min)
        dots = [(axis(g.gain), f"{g.child} over {g.parent}: {signed(g.gain)}") for g in effect.gains]
        rows.append((effect, dots, bar, word))
    return Effects(rows, axis(0.0), axis.ticks)


def moved(c: Candidate) -> dict[str, list[Any]]:
    """The difference to the parent without the axes that only began or ceased to count with another change.

    An axis that began to count with a value that an operator of a combination brought has moved.
    """
    brought = {axis for axis, giver in c.axis_from.items() if giver.startswith("operator:")}
    return {
        a: v for a, v in c.difference.items() if v[-1] is not None and (v[0] is not None or a in brought)
    } or c.difference


def change_text(c: Candidate) -> str:
    """What differs from the parent, in one line."""
    parts = [f"{axis}: {value_text(v[0])} → {value_text(v[-1])}" for axis, v in moved(c).items()]
    following = len(c.difference) - len(parts)
    return ", ".join(parts) + (f" and {following} that go with it" if following else "") or "–"


def value_text(value: Any) -> str:
    """An axis value; None is an axis that does not count there."""
    return "inactive" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------------------------------------------- random search


@dataclass(frozen=True)
class Race:
    """The search against random search at equal budget."""

    curves: plots.Curves
    sentence: str
    rows: list[Row]
    lines: list[plots.Line]


def race(record: RunRecord, axis: plots.Scale) -> Race | None:
    """None unless random search ran and something of it completed."""
    larger = record.direction == "max"
    searched = [t for t in record.trials if t.candidate.id != "baseline" and not t.candidate.duplicate_of]
    means = {
        "search": [(t.candidate.id, t.mean) for t in searched if t.mean is not None],
        "random search": [(t.candidate.id, t.mean) for t in record.random_search if t.mean is not None],
    }
    if not means["random search"]:
        return None
    base = next((t.mean for t in record.trials if t.candidate.id == "baseline"), None)
    curves = plots.best_so_far(means, base, larger=larger)

    def best(trials: Iterable[Trial]) -> Trial | None:
        done = [(t.mean, t) for t in trials if t.mean is not None]
        return (max if larger else min)(done, key=lambda pair: pair[0])[1] if done else None

    ours, theirs = best(searched), best(record.random_search)
    sentence = "The search completed no candidate of its own."
    if ours is not None and theirs is not None:
        gain = against(record, ours, theirs)
        word = outcome(gain)
        says = {"ahead": "the search was worth it", "behind": "random search did better"}.get(
            word.split(",")[0], "random search would have done as well"
        )
        sentence = (
            f"Best of {len(means['search'])} searched candidates: {ours.candidate.id} at {number(ours.mean)}; best of "
            f"{len(means['random search'])} random ones: {theirs.candidate.id} at {number(theirs.mean)}. "
            + (f"Paired difference {signed(gain.gain)}, {between(gain)} ({basis(gain)}): {says}." if gain else "")
        )
    return Race(
        curves, sentence, [_row(record, t, axis) for t in record.random_search], plots.lines(_reference(record), axis)
    )


def versus_random(record: RunRecord) -> str:
    """How the search compares with random search of equal budget, or why that cannot be said."""
    found = race(record, common_scale(record))
    return found.sentence if found else random_absent(record)


def random_absent(record: RunRecord) -> str:
    """Why there is no random search to compare with, in words."""
    if record.random_search:
        return f"{len(record.random_search)} random candidates were proposed and none of them has completed."
    if record.verdict == "measured":
        return "Fixed candidates were measured: there was no search to compare with random search."
    if not record.config.random_search:
        return (
            "Random search was not part of this run, so it cannot say whether a search was needed: "
            "--random-search adds one of equal budget, and it is on by default above the smoke budget."
        )
    if record.status != "finished":
        return "Random search runs after the generations."
    return "The search ran no candidate beside the baseline, so random search of equal budget has none either."


# ----------------------------------------------------------------------------------------------------------- Pareto


@dataclass(frozen=True)
class Pareto:
    """Scatter plots of what differs between candidates, and the joint front."""

    plots: list[plots.Scatter]
    equal: list[str]
    front: list[str]
    ranks: dict[str, int]


def pareto(record: RunRecord) -> Pareto:
    """Fitness against parameters, operations, memory, and every cost that candidates declare or cells measure."""
    trials = [t for t in (*record.trials, *record.random_search) if t.mean is not None]
    costs: dict[str, dict[str, float]] = {}
    for t in trials:
        c = t.candidate
        declared = {"parameters": c.parameters, "FLOPs": c.flops, "expected memory (bytes)": c.memory_bytes, **c.cost}
        for name, value in declared.items():
            if value > 0:
                costs.setdefault(name, {})[c.id] = float(value)
        for name in sorted({n for cell in t.cells for n in cell.metrics or {} if n != record.metric}):
            if _COST.search(name):
                found = [v for _, v in plots.measured(t.cells, name)]
                costs.setdefault(name, {})[c.id] = sum(found) / len(found)
    fitness = {t.candidate.id: t.mean or 0.0 for t in trials}
    kinds = {t.candidate.id: "random" if t.candidate.origin == "random-search" else "" for t in trials}
    kinds |= {"baseline": "baseline", record.champion: "champion"}
    barred = {t.candidate.id for t in trials if t.violations}
    limits = record.prepared.limits if record.prepared else {}
    y = plots.scale(fitness.values(), room=0.1)
    larger = record.direction == "max"
    drawn, equal, full = [], [], []
    for name, values in costs.items():
        if len(values) < 2:
            continue
        if min(values.values()) == max(values.values()):
            equal.append(name.replace("_", " "))
            continue
        items = [(id, cost, fitness[id], kinds[id]) for id, cost in values.items()]
        words = name.replace("_", " ")
        drawn.append(plots.scatter(words, items, y, larger=larger, limit=limits.get(name), barred=barred))
        if len(values) == len(trials):
            full.append(values)
    if not full:
        return Pareto(drawn, equal, [], {})
    objectives = {id: [fitness[id], *(cost[id] for cost in full)] for id in fitness}
    directions: list[Direction] = [record.direction]
    ranks = plots.feasible_ranks(objectives, directions + ["min"] * len(full), barred)
    return Pareto(drawn, equal, [id for id, rank in ranks.items() if rank == 0], ranks)


def card_memory(record: RunRecord) -> str:
    """The expected memory of a cell on a card of 24 GB, in words; "" where no candidate declares any."""
    trials = [*record.trials, *record.random_search]
    needs = {t.candidate.id: t.candidate.memory_bytes for t in trials if t.candidate.memory_bytes and t.cells}
    if not needs:
        return ""
    least, most = min(needs, key=needs.__getitem__), max(needs, key=needs.__getitem__)
    said = f"{short(needs[most])}B"
    if needs[least] != needs[most]:
        said = f"{short(needs[least])}B ({least}) to {said} ({most})"
    wide = [name for name, need in needs.items() if need * MARGIN > CARD_BYTES]
    at_once = int(CARD_BYTES // (needs[most] * MARGIN))
    fits = f"it has no room for {', '.join(wide)}" if wide else f"{at_once} fit{'s' * (at_once == 1)} at a time"
    return f"On a card of {CARD_BYTES / 1e9:.0f} GB a cell is expected to take {said}; with a margin of 15 %, {fits}."


# --------------------------------------------------------------------------------------------------------- failures


@dataclass(frozen=True)
class Failure:
    """A cell that did not complete, or a candidate that never ran; `attempts` are those worth reading."""

    candidate: str
    state: str
    where: str
    reason: str
    cell: CellResult | None = None
    attempts: list[Attempt] = field(default_factory=list)


def failures(record: RunRecord) -> list[Failure]:
    """Everything that did not go as planned, in plan order; cells that a retry saved are `recovered`."""
    found = []
    for t in (*record.trials, *record.random_search, *record.confirmation):
        c = t.candidate
        if c.duplicate_of:
            reason = f"same effective fingerprint as {c.duplicate_of}"
            found.append(Failure(c.id, "duplicate", c.fingerprint, f"{reason}. {c.reason}".removesuffix(". ")))
        elif t.state == "infeasible" or (c.reason and not t.cells):
            found.append(Failure(c.id, "infeasible", "never ran", c.reason))
        for cell in t.cells:
            where = f"seed {cell.seed}, {cell.role}"
            # An interruption of the controller is no failure of the cell that was then run again.
            tries = [a for a in cell.attempts if a.state not in ("completed", "interrupted")]
            if cell.state == "completed":
                if tries:
                    changed = [f"{name} {value}" for name, value in tries[-1].changed.items()]
                    again = f"; ran again with {', '.join(changed)}" if changed else "; ran again"
                    found.append(Failure(c.id, "recovered", where, _why(tries[-1]) + again, cell, tries))
            elif cell.state not in ("planned", "queued", "running"):
                every = cell.attempts
                reason = _why(every[-1]) if every else "no attempt was recorded"
                found.append(Failure(c.id, cell.state, where, reason, cell, every))
    test = record.test_cell
    if test is not None and test.state != "completed":
        reason = _why(test.attempts[-1]) if test.attempts else "no attempt was recorded"
        found.append(Failure(test.candidate, test.state, "sealed test", reason, test, test.attempts))
    return found


def _why(attempt: Attempt) -> str:
    return attempt.reason or attempt.error or attempt.state.replace("_", " ")


# --------------------------------------------------------------------------------------------------------- the rest


def hygiene(record: RunRecord) -> list[tuple[str, int, str]]:
    """(finding, number, good | bad | plain); whatever parts share must be 0."""
    if record.prepared is None:
        return []
    return [
        (name, value, ("bad" if value else "good") if must_be_zero(name) else "plain")
        for name, value in record.prepared.hygiene.items()
    ]


def command(config: RunConfig) -> str:
    """The command line that starts this run again, under another name."""
    words = ["auto-research", "evolve", "run", "--workflow", config.workflow, "--budget", config.budget]

    def option(name: str, value: object) -> None:
        words.extend((f"--{name}", str(value)))

    if config.direction:
        option("direction", config.direction)
    option("generations", config.generations)
    option("population", config.population)
    option("seeds", ",".join(map(str, config.seeds)))
    option("confirm-seeds", ",".join(map(str, config.confirm_seeds)) or "none")
    option("sampler", config.sampler)
    option("run-seed", config.run_seed)
    words.append("--random-search" if config.random_search else "--no-random-search")
    if config.screening:
        words.append("--screening")
    for axis, value in sorted(config.changes.items()):
        option("set", f"{axis}={value}")
    for name, size in sorted(config.sizes.items()):
        option("size", f"{name}={size}")
    if config.dataset_dir is not None:
        option("dataset-dir", config.dataset_dir)
    option("device", config.device)
    option("promotion-min-seeds", config.n_min)
    option("confidence-z", f"{config.z:g}")
    option("minimum-gain", f"{config.delta_min:g}")
    option("confirm-z", f"{config.confirm_z:g}")
    option("retries", config.retries)
    option("trial-timeout-seconds", f"{config.trial_timeout_s:g}")
    option("stall-seconds", f"{config.stall_s:g}")
    if config.memory_limit_mb is not None:
        option("memory-limit-mb", config.memory_limit_mb)
    return shlex.join(words)


def budget(record: RunRecord) -> list[tuple[str, str, str, bool]]:
    """(name, figure, remark, whether a clock or gauge measured it) of what the run has used."""
    config = record.config
    trials = [*record.trials, *record.random_search, *record.confirmation]
    cells = [cell for t in trials for cell in t.cells]
    done = sum(cell.state == "completed" for cell in cells)
    children = [t for t in record.trials if t.candidate.generation > 0]
    idle = sum(t.state in ("duplicate", "infeasible") for t in children)
    planned = config.generations * config.population
    beside = f"; {idle} more could not differ or not run" if idle else ""
    found = [
        ("trials of the search", str(len(children) - idle), f"of {planned} planned, and the baseline{beside}", False),
        ("cells completed", str(done), f"of {len(cells)} begun or planned; one is one seed in one process", False),
    ]
    if record.random_search:
        found.append(("random trials", str(len(record.random_search)), "equal budget, same seeds", False))
    noise = "deviation of the baseline between seeds" if record.noise is not None else "not measured"
    found.append(("noise floor σ₀", number(record.noise), noise, False))
    for name, value in record.used.items():
        if name not in ("trials", "cells") and value:
            found.append((*_used(name, value), "", True))
    return found


def _used(name: str, value: float) -> tuple[str, str]:
    """A used quantity's name and figure, in the unit that its name ends in."""
    words = name.replace("_", " ")
    words = {"cell seconds": "all cells seconds"}.get(words, words)
    for suffix, text in (("seconds", duration), ("bytes", lambda v: short(v) + "B")):
        if words.endswith(suffix):
            return words.removesuffix(suffix).strip() + (" time" if suffix == "seconds" else ""), text(value)
    return words, number(value)


def duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class Figures:
    """A part of a workflow's summary: named facts, or a table."""

    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


def figures(summary: Mapping[str, Any]) -> list[Figures]:
    """A workflow's summary in parts: single facts first, a table for each list of mappings, a part for each mapping.

    A mapping of mappings gives a part for each of those; what is nested deeper is named by its path. The `sentence`
    stands in the head of the board.
    """
    alone: list[tuple[str, str]] = []
    parts: list[Figures] = []
    for name, value in summary.items():
        label = name.replace("_", " ")
        if isinstance(value, list | tuple) and value and all(isinstance(v, Mapping) for v in value):
            columns = union(value)
            rows = [[_plain(v[c]) if v.get(c) is not None else "–" for c in columns] for v in value]
            parts.append(Figures(label, columns=[c.replace("_", " ") for c in columns], rows=rows))
        elif isinstance(value, Mapping) and value and all(isinstance(v, Mapping) for v in value.values()):
            parts += [Figures(f"{label}: {inner}", flat(v)) for inner, v in value.items()]
        elif isinstance(value, Mapping):
            parts.append(Figures(label, flat(value)))
        elif name != "sentence" and value not in ("", []):
            alone += flat({name: value})
    return [*([Figures("", alone)] if alone else []), *parts]


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as (name, text), names joined by a dot."""
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        full = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping) and any(isinstance(v, Mapping | list | tuple) for v in value.values()):
            found += flat(value, f"{full} · ")
        elif isinstance(value, list | tuple):
            words = any(isinstance(v, str) for v in value)
            found.append((full, ("; " if words else ", ").join(_plain(v) for v in value) or "none"))
        else:
            found.append((full, _plain(value)))
    return found


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{str(k).replace('_', ' ')} {_plain(v)}" for k, v in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return " to ".join(_plain(v) for v in value)
    return "–" if value is None else number(value) if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------------------------- page


def board_html(record: RunRecord) -> str:
    """The board: one page that needs nothing else, the same bytes for the same record."""
    words, sentence = headline(record)
    axis = common_scale(record)
    front = pareto(record)
    page = _environment().get_template("board.html.j2").render(
        record=record,
        config=record.config,
        words=words,
        sentence=sentence,
        meaning="" if record.status in STATUS_WORDS else MEANING[record.verdict],
        kind=_kind(record),
        budget=budget(record),
        card_memory=card_memory(record),
        compared=compared(record),
        lineage=plots.lineage(record.trials, record.champion),
        path=plots.ancestors({t.candidate.id: t for t in record.trials}, record.champion),
        generations=generations(record, axis, front.ranks),
        axis=axis,
        race=race(record, axis),
        pareto=front,
        effects=effects(record),
        attribution=attribution(record),
        failures=failures(record),
        random_absent=random_absent(record),
        hygiene=hygiene(record),
        summary=figures(record.summary),
        test_metrics=union(record.test.metrics.values()) if record.test else [],
        command=command(record.config),
        metric=validation_metric(record),
        better="larger is better" if record.direction == "max" else "smaller is better",
    )  # fmt: skip
    return _NOT_HTML.sub("", page)


def validation_metric(record: RunRecord) -> str:
    """The primary metric with the part it is read on."""
    return record.metric if record.metric.startswith("validation") else f"validation {record.metric}"


def _kind(record: RunRecord) -> str:
    """The colour of the verdict."""
    if record.status == "nothing completed":
        return "bad"
    if record.status != "finished":
        return "plain"
    return {"improved": "good", "no signal": "bad", "smoke: no conclusion": "warn"}.get(record.verdict, "plain")


def union(names: Iterable[Iterable[str]]) -> list[str]:
    """Every name once, in the order of first sight."""
    return list(dict.fromkeys(name for part in names for name in part))


def without_times(page: str) -> str:
    """A board without what clocks and memory gauges measured."""
    return _MEASURED.sub("", page)


def write_board(folder: Path, record: RunRecord | None = None) -> Path:
    """Draws `folder/board.html` from `record`, or from the run's files, and returns its path.

    Raises `UserError` when the folder holds no run or cannot be written.
    """
    if record is None:
        from auto_research.evolve.reading import read_run

        record = read_run(folder)
    path = Path(folder) / "board.html"
    write_text_atomic(path, board_html(record))
    return path


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    folder = files("auto_research.evolve") / "templates"

    def load(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    environment = Environment(
        loader=FunctionLoader(load), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters.update(
        number=number, signed=signed, short=short, duration=duration, value=value_text, clip=plots.clip,
        outcome=outcome, moved=moved, words=lambda text: str(text).replace("_", " "),
        capitalise=lambda text: text[:1].upper() + text[1:],
        metric_names=lambda cells: union(cell.metrics or {} for cell in cells),
    )  # fmt: skip
    return environment


# ----------------------------------------------------------------------------------------------------------- status


def status_facts(record: RunRecord) -> dict[str, Any]:
    """What the board shows, as JSON-like values."""
    words, sentence = headline(record)
    trials = [*record.trials, *record.random_search]
    return {
        "run": record.config.run,
        "workflow": record.config.workflow,
        "title": record.title,
        "verdict": record.verdict,
        "headline": f"{words}. {sentence}",
        "level": record.level,
        "status": record.status,
        "metric": record.metric,
        "direction": record.direction,
        "champion": record.champion,
        "lineage": plots.ancestors({t.candidate.id: t for t in record.trials}, record.champion),
        "noise": record.noise,
        "floors": record.prepared.floors if record.prepared else {},
        "anchors": record.prepared.anchors if record.prepared else {},
        "hygiene": record.prepared.hygiene if record.prepared else {},
        "stand_in": record.prepared.stand_in if record.prepared else "",
        "checkpoints": record.prepared.checkpoints if record.prepared else {},
        "card_memory": card_memory(record),
        "candidates": [_candidate_facts(record, t) for t in trials],
        "decisions": [d.model_dump(mode="json") for d in record.decisions],
        "search": _dump(champion_gain(record)),
        "confirmation": _dump(record.confirmed),
        "test": record.test.model_dump(mode="json") if record.test else None,
        "failures": [
            {"candidate": f.candidate, "state": f.state, "where": f.where, "reason": f.reason}
            for f in failures(record)
        ],
        "notes": record.notes,
        "random_search": versus_random(record),
        "evidence": record.evidence,
        "quarantined": [{"id": c.id, "reason": c.reason} for c in record.quarantined],
        "summary": record.summary,
        "used": record.used,
        "fingerprint": record.config.fingerprint(),
        "command": command(record.config),
        "started": record.started,
        "ended": record.ended,
    }  # fmt: skip


def _candidate_facts(record: RunRecord, trial: Trial) -> dict[str, Any]:
    c = trial.candidate
    return {
        "id": c.id,
        "generation": c.generation,
        "origin": c.origin,
        "parents": c.parents,
        "difference": c.difference,
        "operators": c.operators,
        "papers": c.papers,
        "state": trial.state,
        "duplicate_of": c.duplicate_of,
        "seeds": {str(cell.seed): value for cell, value in plots.measured(trial.cells, record.metric)},
        "mean": trial.mean,
        "deviation": trial.deviation,
        "score": trial.score,
        "gain": _dump(trial.gain),
        "violations": trial.violations,
        "parameters": c.parameters,
        "flops": c.flops,
    }


def _dump(part: Paired | None) -> dict[str, Any] | None:
    return part.model_dump(mode="json") if part else None


def status_table(record: RunRecord) -> list[list[str]]:
    """Header and one row a candidate: id, origin, what differs, seeds, mean, gain, how it stands."""
    rows = [["candidate", "origin", "what differs", "seeds", record.metric, "gain", "state"]]
    for t in (*record.trials, *record.random_search):
        c = t.candidate
        done = sum(cell.state == "completed" for cell in t.cells)
        state = f"= {c.duplicate_of}" if c.duplicate_of else t.state
        word = outcome(t.gain, record.config.delta_min) if t.state in ("completed", "screened_out", "partial") else ""
        half = plots.interval(t, record.metric, record.config.z, record.noise)
        mean = number(t.mean) + (f" ± {number(half)}" if t.mean is not None and half is not None else "")
        rows.append(
            [
                c.id + (" *" if c.id == record.champion and c.id != "baseline" else ""),
                c.origin,
                change_text(c),
                f"{done}/{len(t.cells)}" if t.cells else "–",
                mean,
                signed(t.gain.gain) if t.gain else "–",
                ", ".join(filter(None, (state if state != "completed" or not word else "", word))),
            ]
        )
    return rows


def status_lines(record: RunRecord) -> tuple[list[str], list[str]]:
    """Lines above and below the table of candidates in a terminal."""
    words, sentence = headline(record)
    better = "larger" if record.direction == "max" else "smaller"
    above = [
        f"{words}. {sentence}".strip(),
        f"{record.title} · {record.config.budget} · {record.status} · level {record.level}",
        f"{validation_metric(record)}, {better} is better"
        + "".join(f"; {kind} {name} {number(value)}" for kind, name, value in _reference(record)),
    ]
    if record.summary.get("sentence"):
        above.insert(1, str(record.summary["sentence"]))
    if record.prepared and record.prepared.stand_in:
        above.append(f"stand-in data: {record.prepared.stand_in}")
    if record.prepared:
        above += [f"checkpoint: {name}, {source}" for name, source in record.prepared.checkpoints.items()]
    below = [f"champion: {' → '.join(plots.ancestors({t.candidate.id: t for t in record.trials}, record.champion))}"]
    if (found := compared(record)) is not None:
        for step in found.steps:
            gain = f"gain {signed(step.gain.gain)}, {step.between} ({step.basis})" if step.gain else step.between
            below.append(f"{step.name.lower()}: baseline {step.baseline}, champion {step.champion}, {gain}")
    if record.test is None:
        below.append("sealed test: not opened")
    elif found is None:
        value = number(record.test.metrics.get("baseline", {}).get(record.metric))
        below.append(f"sealed test, opened {_times(record.test.openings)}: baseline {value}")
    below.append(f"random search: {versus_random(record)}")
    if memory := card_memory(record):
        below.append(memory)
    counts: dict[str, int] = {}
    for failure in failures(record):
        counts[failure.state] = counts.get(failure.state, 0) + 1
    if counts:
        below.append("not as planned: " + ", ".join(f"{n} {state.replace('_', ' ')}" for state, n in counts.items()))
    if record.evidence:
        below.append(f"evidence only, never run: {'; '.join(e.get('title', '') for e in record.evidence)}")
    below += [f"quarantined, never run: {c.id}: {c.reason}" for c in record.quarantined]
    below += [f"split hygiene: {name} {n}; it must be 0" for name, n, kind in hygiene(record) if kind == "bad"]
    return [one_line(line) for line in above], [one_line(line) for line in below]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def status_text(record: RunRecord) -> str:
    """The board's facts as plain text."""
    above, below = status_lines(record)
    return "\n".join([*above, "", *aligned(status_table(record)), "", *below]) + "\n"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as lines with aligned columns."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [min(48, max(map(len, column))) for column in zip(*cells)]
    return ["  ".join(plots.clip(c, w).ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells]


def one_line(text: str) -> str:
    """Text without line breaks and without what steers a terminal."""
    return " ".join(_NOT_HTML.sub("", text).split())
