"""Where everything in the board's drawings goes. Horizontal positions are percent, vertical ones pixels.

So a drawing fills whatever width it gets and its text keeps its size. Templates turn these into SVG.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from auto_research.evolve.promotion import Direction, pareto_ranks
from auto_research.evolve.records import CellResult, Trial

MARGIN = 2.0
"""Percent kept free at both sides of a scale."""


def number(value: float | None) -> str:
    """Four significant digits, or a dash for a value that does not exist."""
    if value is None:
        return "–"
    if value == int(value) and abs(value) < 1e7:
        return f"{value:.0f}"
    text = f"{value:.4g}" if abs(value) >= 0.1 else f"{value:.4f}" if abs(value) >= 5e-4 else f"{value:.2e}"
    return text.replace("-", "−")


def signed(value: float | None) -> str:
    """`number` with its sign."""
    return "–" if value is None else ("+" if value > 0 else "") + number(value)


def short(value: float) -> str:
    """A count with a decimal prefix: 1234567 -> `1.23M`."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5 or unit == "P":
            return f"{value:.3g}{unit}"
        value /= 1000
    raise AssertionError


# --------------------------------------------------------------------------------------------------------- scales


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic axis from `low` to `high`; ticks are (percent, label)."""

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Percent of the width at which `value` lies; outside 0 to 100 where it is off the scale."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        share = ((math.log(value) if self.log else value) - low) / (high - low)
        return round(MARGIN + (100 - 2 * MARGIN) * share, 2)

    def up(self, value: float, height: float) -> float:
        """Pixels from the top at which `value` lies on a vertical axis of that height."""
        return round(height * (1 - self(value) / 100), 1)

    def rising(self, height: float) -> list[tuple[float, str]]:
        """(pixels, label) of the round numbers on a vertical axis of that height."""
        return [(self.up(v, height), label) for v, (_, label) in zip(self.values, self.ticks)]

    @property
    def values(self) -> list[float]:
        """Round numbers on the axis, three to six of them where it is linear."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for bases in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
                found = [b * 10.0**p for p in powers for b in bases if self.low <= b * 10.0**p <= self.high]
                if len(found) >= 3:
                    break
            return found
        step = _step(self.high - self.low)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """(percent, label) of the round numbers; labels share their digits."""
        if self.log:
            return [(self(v), short(v)) for v in self.values]
        if max(abs(self.low), abs(self.high)) >= 1e4:
            return [(self(v), short(v)) for v in self.values]
        step = _step(self.high - self.low)
        if step < 1e-5:
            return [(self(v), f"{v:.3g}".replace("-", "−")) for v in self.values]
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        return [(self(v), f"{v + 0.0:.{digits}f}".replace("-", "−")) for v in self.values]


def _step(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that three to six steps make `span`."""
    raw = span / 5
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.99)


def scale(values: Iterable[float], *, log: bool = False, room: float = 0.06) -> Scale:
    """An axis that holds `values` with some room at both ends; around a single value, 5 % of it."""
    found = sorted(v for v in values if math.isfinite(v) and (v > 0 or not log))
    if not found:
        return Scale(0.0, 1.0)
    low, high = found[0], found[-1]
    if log:
        factor = max((high / low) ** room, 1.05)
        return Scale(low / factor, high * factor, log=True)
    pad = (high - low) * room or max(abs(high) * 0.05, 1e-9)
    return Scale(low - pad, high + pad)


def widen(values: Sequence[float], lines: Iterable[float], most: float = 1.2) -> list[float]:
    """`values` and those `lines` that lie near enough: within `most` times the values' own range."""
    if not values:
        return list(lines)
    low, high = min(values), max(values)
    span = (high - low) or abs(high) * 0.05 or 1.0
    return [*values, *(line for line in lines if low - most * span <= line <= high + most * span)]


# --------------------------------------------------------------------------------------------- candidates in strips


@dataclass(frozen=True)
class Line:
    """A reference line across strips: floor, anchor or parent. `side` says where it is off the scale."""

    kind: str
    name: str
    value: float
    x: float
    side: str
    lane: int
    end: bool


@dataclass(frozen=True)
class Strip:
    """One candidate on a scale: seed dots (percent, title), mean, interval; `assumed` when it is the noise floor's."""

    dots: list[tuple[float, str]] = field(default_factory=list)
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    assumed: bool = False


def lines(values: Iterable[tuple[str, str, float]], axis: Scale) -> list[Line]:
    """Lines of (kind, name, value), their labels stacked so that they do not cover one another on a phone."""
    placed: list[Line] = []
    ends: list[list[tuple[float, float]]] = []
    for kind, name, value in sorted(values, key=lambda v: (v[2], v[1])):
        x = axis(value)
        side = "left" if x < 0 else "right" if x > 100 else ""
        x = min(max(x, 0.6), 99.4)
        end = x > 55
        width = 2.0 * min(len(name) + 12, 46)
        span = (x - width, x) if end else (x, x + width)
        lane = next((i for i, row in enumerate(ends) if all(span[0] > b or span[1] < a for a, b in row)), len(ends))
        if lane == len(ends):
            ends.append([])
        ends[lane].append(span)
        placed.append(Line(kind, name, value, x, side, lane, end))
    return placed


def strip(trial: Trial, axis: Scale, metric: str, z: float, noise: float | None) -> Strip:
    """Seed dots, the mean, and mean -+ z s / sqrt(n); with one seed s is the noise floor."""
    found = measured(trial.cells, metric)
    dots = [(axis(value), f"seed {cell.seed}: {number(value)}") for cell, value in found]
    if trial.mean is None:
        return Strip(dots)
    mean, half = trial.mean, interval(trial, metric, z, noise)
    if half is None:
        return Strip(dots, axis(mean))
    return Strip(dots, axis(mean), axis(mean - half), axis(mean + half), assumed=trial.deviation is None)


def interval(trial: Trial, metric: str, z: float, noise: float | None) -> float | None:
    """z s / sqrt(n) of a trial, or None where nothing gives a deviation."""
    n = len(measured(trial.cells, metric))
    spread = trial.deviation if trial.deviation is not None else noise if n == 1 else None
    return None if spread is None or not n else z * spread / math.sqrt(n)


def measured(cells: Iterable[CellResult], metric: str) -> list[tuple[CellResult, float]]:
    """Completed cells with their primary metric."""
    return [(c, c.metrics[metric]) for c in cells if c.metrics is not None and metric in c.metrics]


# ---------------------------------------------------------------------------------------------------------- lineage


@dataclass(frozen=True)
class Node:
    """A candidate in the lineage graph; its label stands above it where edges leave to the right."""

    trial: Trial
    x: float
    y: float
    kind: str
    champion: bool
    path: bool
    note: str
    above: bool


@dataclass(frozen=True)
class Edge:
    """From a parent to a child; `d` is an SVG path in a box of 1000 by the graph's height."""

    d: str
    kind: str
    title: str


@dataclass(frozen=True)
class Lineage:
    """Columns are (percent, generation)."""

    nodes: list[Node]
    edges: list[Edge]
    columns: list[tuple[float, int]]
    height: int
    dense: bool


def ancestors(trials: Mapping[str, Trial], champion: str) -> list[str]:
    """The champion and its ancestors along first parents, the oldest first."""
    found: list[str] = []
    here: str | None = champion
    while here is not None and here in trials and here not in found:
        found.append(here)
        parents = trials[here].candidate.parents
        here = parents[0] if parents else None
    return found[::-1]


def lineage(trials: Sequence[Trial], champion: str) -> Lineage:
    """A layered graph, one column a generation; within a column children stay near their parents."""
    by_id = {t.candidate.id: t for t in trials}
    generations = sorted({t.candidate.generation for t in trials})
    path = set(ancestors(by_id, champion))
    parents = {p for t in trials for p in t.candidate.parents}
    most = max((sum(t.candidate.generation == g for t in trials) for g in generations), default=1)
    dense = most > 14
    gap, top = (17, 20) if dense else (32, 30)
    height = top + gap * most + 6
    middle = (height + top) / 2 - 2
    columns, nodes, place = [], [], dict[str, tuple[float, float]]()
    for column, generation in enumerate(generations):
        x = round((column + 0.5 * (len(generations) == 1) + 0.04) / len(generations) * 100, 2)
        columns.append((x, generation))
        members = [t for t in trials if t.candidate.generation == generation]

        def height_of_parents(t: Trial) -> float:
            ys = [place[p][1] for p in t.candidate.parents if p in place]
            return sum(ys) / len(ys) if ys else middle

        members.sort(key=height_of_parents)  # stable: plan order among siblings
        for row, t in enumerate(members):
            c = t.candidate
            y = round(middle + gap * (row - (len(members) - 1) / 2), 1)
            place[c.id] = (x, y)
            note = f"= {c.duplicate_of}" if c.duplicate_of else t.state if t.state != "completed" else ""
            if not note and t.gain is not None:
                note = signed(t.gain.gain)
            above = c.id in parents and not dense
            nodes.append(Node(t, x, y, t.state, c.id == champion, c.id in path, note, above))
    edges = []
    for node in nodes:
        c = node.trial.candidate
        for order, parent in enumerate(p for p in c.parents if p in place and p != c.id):
            (x0, y0), (x1, y1) = place[parent], (node.x, node.y)
            x0, x1 = 10 * x0, 10 * x1
            bend = max(30.0, (x1 - x0) * 0.55)
            d = f"M{x0:g} {y0:g}C{x0 + bend:g} {y0:g} {x1 - bend:g} {y1:g} {x1:g} {y1:g}"
            kind = "second" if order else "path" if node.path and parent in path else "first"
            edges.append(Edge(d, kind, f"{parent} → {c.id}"))
    edges.sort(key=lambda e: e.kind == "path")  # the champion's path is drawn last, on top
    return Lineage(nodes, edges, columns, height, dense)


# ----------------------------------------------------------------------------------------------------------- Pareto


@dataclass(frozen=True)
class Point:
    """A candidate in a scatter plot; the label is empty where it would cover another."""

    id: str
    x: float
    y: float
    title: str
    front: bool
    kind: str
    label: str
    anchor: str


@dataclass(frozen=True)
class Scatter:
    """Fitness against one cost; `path` is the front as steps in a box of 100 by the height.

    `limit` is (percent, value) of the largest feasible cost; its place is off the scale where it is far away.
    """

    name: str
    points: list[Point]
    path: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    height: int
    limit: tuple[float, float] | None = None


def scatter(
    name: str,
    items: Sequence[tuple[str, float, float, str]],
    y: Scale,
    *,
    larger: bool,
    height: int = 220,
    limit: float | None = None,
    barred: Collection[str] = (),
) -> Scatter:
    """Items are (id, cost, fitness, kind). The axis is logarithmic when the costs span a factor of 20.

    Candidates in `barred` break a hard constraint: they are drawn and are never on the front.
    """
    costs = [cost for _, cost, _, _ in items]
    log = min(costs) > 0 and max(costs) / min(costs) > 20
    x = scale(costs if limit is None else widen(costs, [limit]), log=log, room=0.08)
    rank = feasible_ranks({id: (f, c) for id, c, f, _ in items}, ("max" if larger else "min", "min"), barred)
    front = sorted((c, f) for id, c, f, _ in items if rank.get(id) == 0)
    path = ""
    for cost, fitness in front:
        px, py = x(cost), y.up(fitness, height)
        path += f"H{px:g}V{py:g}" if path else f"M{px:g} {py:g}"
    path += "H100" if path else ""
    taken: list[tuple[float, float, float]] = []
    points = []
    last = len(items)
    for id, cost, fitness, kind in sorted(
        items, key=lambda item: (item[3] not in ("baseline", "champion"), rank.get(item[0], last), item[1])
    ):
        px, py = x(cost), y.up(fitness, height)
        anchor = "end" if px > 70 else "start"
        width = 2.4 * min(len(id), 14)
        span = (px - width, px, py) if anchor == "end" else (px, px + width, py)
        free = all(span[1] < a or span[0] > b or abs(py - other) > 13 for a, b, other in taken)
        label = clip(id, 14) if (rank.get(id) == 0 or kind in ("baseline", "champion")) and free else ""
        if label:
            taken.append(span)
        title = f"{id}: {name} {short(cost)}, {number(fitness)}" + (", beyond a hard limit" if id in barred else "")
        shown = f"{kind} barred".strip() if id in barred else kind
        points.append(Point(id, px, py, title, rank.get(id) == 0, shown, label, anchor))
    at = None if limit is None else (x(limit), limit)
    return Scatter(name, points[::-1], path, x.ticks, y.rising(height), height, at)


def feasible_ranks(
    objectives: Mapping[str, Sequence[float]], directions: Sequence[Direction], barred: Collection[str]
) -> dict[str, int]:
    """Non-domination rank by candidate, of those that are not `barred`; 0 is the front."""
    values = {id: found for id, found in objectives.items() if id not in barred}
    if not values:
        return {}
    return dict(zip(values, map(int, pareto_ranks(np.array(list(values.values())), directions))))


def clip(text: str, most: int) -> str:
    """At most that many characters, the middle of a longer text left out."""
    return text if len(text) <= most else text[: most // 2] + "…" + text[len(text) - (most - most // 2 - 1) :]


# ------------------------------------------------------------------------------------------------------ best so far


@dataclass(frozen=True)
class Curve:
    """Best mean after each trial of a strategy; `path` is in a box of 100 by the height."""

    name: str
    kind: str
    path: str
    dots: list[tuple[float, float, str]]
    end: float
    label_y: float
    best: float


@dataclass(frozen=True)
class Curves:
    """Best so far, strategy against strategy; `y_ticks` are (pixels, label)."""

    curves: list[Curve]
    y_ticks: list[tuple[float, str]]
    steps: list[tuple[float, str]]
    height: int


def best_so_far(
    strategies: Mapping[str, Sequence[tuple[str, float]]], start: float | None, *, larger: bool, height: int = 190
) -> Curves:
    """Strategies are name -> (candidate, mean) in the order in which the trials were proposed; all begin at `start`."""
    longest = max(len(items) for items in strategies.values())
    x = Scale(0.0, float(longest))
    everything = [v for items in strategies.values() for _, v in items] + ([] if start is None else [start])
    y = scale(everything, room=0.16)
    curves: list[Curve] = []
    for kind, (name, items) in zip(("search", "random"), strategies.items()):
        best, path, dots, here = start, "", [], x(0)
        if best is not None:
            path = f"M{x(0):g} {y.up(best, height):g}"
        for i, (id, value) in enumerate(items, start=1):
            here = x(i)
            dots.append((here, y.up(value, height), f"{id}: {number(value)}"))
            if best is None or (value > best if larger else value < best):
                best = value
            path += f"H{here:g}V{y.up(best, height):g}" if path else f"M{here:g} {y.up(best, height):g}"
        if best is None:
            continue
        curves.append(Curve(name, kind, path, dots, here, y.up(best, height), best))
    if len(curves) == 2:  # the upper line has its label above it, the other one below
        upper = min((0, 1), key=lambda i: (curves[i].label_y, i))
        curves[1 - upper] = replace(curves[1 - upper], label_y=curves[1 - upper].label_y + 24)
    curves = [replace(c, label_y=round(c.label_y - 8, 1)) for c in curves]
    step = max(1, math.ceil(longest / 8))
    steps = [(x(i), str(i)) for i in range(0, longest + 1, step)]
    return Curves(curves, y.rising(height), steps, height)
