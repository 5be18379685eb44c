"""A scaling law of micro language models: fixed points of model size and data, and three fits to their losses.

Nothing is selected. Each point is a Llama of its own size trained with its own complete schedule; architecture family,
tokenizer, optimiser recipe, batch and context are the same for all. Recorded are N (all parameters, and those outside
the embeddings), D (tokens seen, beside unique tokens and repetitions) and C = 6 N D with all parameters.

Fits, by least squares in log space unless said otherwise:

    (i)   ln L = a + s ln C                        from 3 different C on
    (ii)  ln L = a + s_N ln N + s_D ln D           from 4 points of rank 3 on
    (iii) L = E + A N^-alpha + B D^-beta           from 9 points on a crossed grid on; Huber loss on ln L (2203.15556)

What does not suffice is reported as `not identifiable`. A fit is a local description of these points: no advice on the
best size for a budget follows from it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from auto_research.evolve.space import Axis, Genome, Space
from auto_research.evolve.workflow import (
    Cost,
    Data,
    Described,
    Evidence,
    NonFinite,
    Progress,
    Scores,
    Sizes,
    Workflow,
    digest,
)
from auto_research.runtime.budget import Budget

if TYPE_CHECKING:
    from auto_research.evolve.records import Trial
    from auto_research.evolve.workflows._corpus import Corpus, TestPart
    from auto_research.tasks.micro_language_model import Shape

Array = NDArray[np.float64]

RATE, RATE_WIDTH = 2e-3, 128
HEADS = 4
HUBER = 1e-3
RESAMPLES, SEARCHED_RESAMPLES = 2000, 100
"""Of the bootstrap over seeds: by least squares, and where each one is a search."""
SEED_NOISE = (0.01, 0.02)
"""Nats by which another seed moved one point when this was measured; used in words where a run has one seed."""
CLAIM = "local descriptive fit of these points; no compute-optimal advice follows from it"

MEASURED_SMOKE = ((64, 2, 100), (64, 2, 300), (96, 2, 300), (128, 3, 400))
GRID = ((64, 2), (96, 2), (128, 3)), (100, 300, 900)


class ScalingLaw(Workflow):
    """Workflow `scaling-law`; see the module."""

    key = "scaling-law"
    title = "Scaling law of micro language models"
    model = "micro-llm"
    dataset = "wikitext-2-devsplit"
    metric = "loss"
    direction = "min"
    select = False
    level = "L1 small public"
    schedule = ()
    language_model = True
    space = Space(
        (
            Axis("point.width", "int", (64, 96, 128), changes="compute", source="design of the points"),
            Axis("point.layers", "int", (2, 3), changes="compute", source="design of the points"),
            Axis(
                "point.steps", "int", (100, 300, 400, 900), stage="train", changes="data", source="design of the points"
            ),
        )
    )
    evidence = (
        Evidence(
            "Replication of the Chinchilla fit",
            "2404.10102",
            "its refitted constants are for models of another size, tokenizer and text",
            "a grid that reaches the regime of those constants",
            ("chinchilla", "scaling"),
        ),
    )

    def sizes(self, budget: Budget) -> Sizes:
        """The same tokenizer, batch and context for all points; `percent` scales the steps of all points."""
        return Sizes(budget, {"vocabulary": 2048, "batch": 8, "context": 128, "percent": 100})

    def points(self, budget: Budget) -> list[Genome]:
        """Four measured points at the smoke budget, else three sizes by three lengths."""
        sizes, lengths = GRID
        chosen = (
            MEASURED_SMOKE
            if budget == "smoke"
            else [(w, layers, n) for (w, layers), n in itertools.product(sizes, lengths)]
        )
        return [self.space.resolve({"point.width": w, "point.layers": n, "point.steps": s}) for w, n, s in chosen]

    def smoke_plan(self) -> list[Genome]:
        """All points of the smoke budget but the first."""
        return self.points("smoke")[1:]

    # -------------------------------------------------------------------------------------------------- data

    def load(self, sizes: Sizes, dataset_dir: Path | None) -> Data:
        """The dev split of WikiText-2 at every budget, so that points of different budgets can be compared."""
        from auto_research.evolve.workflows._corpus import read_corpus

        corpus = read_corpus(sizes["vocabulary"], sizes["context"], dataset_dir)
        return Data(
            parts=corpus,
            digests={name: corpus.digests[name] for name in (corpus.name, "tokenizer")},
            hygiene={name: value for name, value in corpus.hygiene.items() if "instruction" not in name},
            examples=math.ceil(len(corpus.validation) / sizes["context"]),
        )

    def load_test(self, sizes: Sizes, dataset_dir: Path | None) -> TestPart:
        """The official test text; its first tenth in a smoke run."""
        from auto_research.evolve.workflows._corpus import SMOKE_LINES, read_test

        lines = SMOKE_LINES if sizes.budget == "smoke" else 1.0
        return read_test(sizes["vocabulary"], sizes["context"], dataset_dir, lines=lines)

    # ------------------------------------------------------------------------------------------------- a cell

    def shape(self, genome: Genome, sizes: Sizes, data: Data) -> Shape:
        """The Llama of a point: 4 heads, SwiGLU of 8/3 width, tied embeddings."""
        from auto_research.tasks.micro_language_model import Shape, feed_forward_width

        width = int(genome["point.width"])
        return Shape(
            family="llama",
            vocabulary=data.parts.vocabulary,
            width=width,
            layers=int(genome["point.layers"]),
            heads=HEADS,
            kv_heads=HEADS,
            hidden=feed_forward_width(width),
            tied=True,
            positions=sizes["context"],
            end=data.parts.end,
        )

    def steps(self, genome: Genome, sizes: Sizes) -> int:
        """Updates of a point."""
        return max(1, round(int(genome["point.steps"]) * sizes["percent"] / 100))

    def rate(self, genome: Genome) -> float:
        """Peak learning rate: 2e-3 up to width 128, then falling as 1 / width; it decays to the end of each run."""
        return RATE * min(1.0, RATE_WIDTH / int(genome["point.width"]))

    def train(self, genome: Genome, data: Data, seed: int, sizes: Sizes, device: str, progress: Progress) -> Point:
        """Windows depend on `seed` alone: a longer run reads what a shorter one reads first."""
        import torch

        from auto_research.tasks import micro_language_model as micro
        from auto_research.tasks.base import Recipe
        from auto_research.tasks.language_model import random_windows

        corpus: Corpus = data.parts
        steps, shape = self.steps(genome, sizes), self.shape(genome, sizes, data)
        model = micro.build(shape, seed, device)
        generator = torch.Generator().manual_seed(seed)
        windows = (random_windows(corpus.train, sizes["batch"], sizes["context"] + 1, generator) for _ in range(steps))

        def guarded(step: int, loss: float) -> None:
            if not math.isfinite(loss):
                raise NonFinite(f"the loss is {loss} at step {step}")
            progress(step, loss)

        recipe = Recipe(learning_rate=self.rate(genome), warmup=micro.warmup_share(steps), schedule="cosine")
        losses = micro.train(model, ((w[:, :-1], w[:, 1:]) for w in windows), steps, recipe, progress=guarded)
        return Point(model, shape, steps * sizes["batch"] * sizes["context"], losses)

    def save(self, artefact: Point, folder: Path) -> None:
        """As Transformers stores a checkpoint."""
        from auto_research.checkpoints.store import quiet

        with quiet():
            artefact.model.save_pretrained(folder)

    def restore(self, genome: Genome, data: Data, folder: Path, sizes: Sizes, device: str) -> Point:
        """The model of `genome` with the stored weights."""
        from auto_research.tasks import micro_language_model as micro

        shape = self.shape(genome, sizes, data)
        seen = self.steps(genome, sizes) * sizes["batch"] * sizes["context"]
        return Point(micro.load(shape, folder, device).eval(), shape, seen, [])

    def validate(self, artefact: Point, data: Data, sizes: Sizes, device: str) -> Scores:
        """Loss of the whole validation text, with everything the fits need."""
        corpus: Corpus = data.parts
        scores = _evaluate(artefact, corpus.validation, corpus.validation_bytes, corpus.end, sizes["context"])
        shape, seen, unique = artefact.shape, artefact.tokens, len(corpus.train)
        scores.metrics |= {
            "parameters": float(shape.count),
            "non_embedding_parameters": float(shape.non_embedding),
            "tokens_seen": float(seen),
            "unique_tokens": float(unique),
            "repetitions": seen / unique,
            "compute": 6.0 * shape.count * seen,
            "uniform_loss": math.log(corpus.vocabulary),
            "unigram_loss": _unigram_loss(corpus),
        }
        return scores

    def test(self, artefact: Point, test: TestPart, data: Data, sizes: Sizes, device: str) -> Scores:
        """The loss of the official test text."""
        return _evaluate(artefact, test.tokens, test.bytes, data.parts.end, sizes["context"])

    def floors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """Losses of the training text's token frequencies, and of equal chances."""
        return {"unigram": _unigram_loss(data.parts), "uniform": math.log(data.parts.vocabulary)}

    def anchors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """Loss of an interpolated bigram model of the training text."""
        from auto_research.tasks.language_model import bigram_nats

        corpus: Corpus = data.parts
        return {"bigram": float(bigram_nats(corpus.train, corpus.validation, corpus.vocabulary).mean())}

    # ----------------------------------------------------------------------------------------------- identity

    def cost(self, genome: Genome, sizes: Sizes, data: Data) -> Cost:
        """FLOPs of a step as they are; `compute` is C = 6 N D of the fits."""
        shape, steps, tokens = (
            self.shape(genome, sizes, data),
            self.steps(genome, sizes),
            sizes["batch"] * sizes["context"],
        )
        return Cost(
            parameters=shape.count,
            flops=3 * shape.flops_per_token(sizes["context"]) * tokens,
            memory_bytes=shape.training_bytes(tokens),
            extra={
                "non_embedding_parameters": float(shape.non_embedding),
                "training_steps": float(steps),
                "tokens_seen": float(steps * tokens),
                "compute": 6.0 * shape.count * steps * tokens,
            },
        )

    def match(self, genome: Genome, baseline: Cost, sizes: Sizes, data: Data) -> str:
        """Points differ in size on purpose: how much more compute than the first."""
        ratio = self.cost(genome, sizes, data).extra["compute"] / baseline.extra["compute"]
        return "" if ratio == 1 else f"{ratio:.1f} times the compute"

    def describe(self, genome: Genome, sizes: Sizes, data: Data) -> Described:
        """The shape, and how it is trained."""
        shape = self.shape(genome, sizes, data)
        return Described(
            configuration={
                "shape": asdict(shape),
                "steps": self.steps(genome, sizes),
                "batch": sizes["batch"],
                "context": sizes["context"],
                "rate": self.rate(genome),
            },
            parameters=shape.parameters(),
            loss={"name": "next-token cross entropy"},
        )

    def effect_probe(self, genome: Genome, sizes: Sizes, data: Data) -> dict[str, str]:
        """A training of a hundredth of the steps, its losses and what it leaves."""
        import torch

        small = replace(sizes, values=sizes.values | {"percent": max(1, sizes["percent"] // 100), "batch": 2})
        point = self.train(genome, data, 0, small, "cpu", lambda step, loss: None)
        with torch.no_grad():
            ids = data.parts.validation[None, : sizes["context"]]
            logits = point.model(input_ids=ids, use_cache=False).logits
        cost = self.cost(genome, sizes, data)
        return {
            "forward": digest(logits),
            "loss": digest(point.losses),
            "cost": digest(cost.parameters, cost.flops, cost.memory_bytes, cost.extra),
        }

    def summarise(self, trials: Sequence[Trial]) -> dict[str, Any]:
        """The points and all fits of them; see `report`."""
        found, missing = [], []
        for trial in trials:
            cells = [c.metrics for c in trial.cells if c.state == "completed" and c.metrics and "loss" in c.metrics]
            if not cells:
                missing.append(trial.candidate.id)
                continue
            fixed = cells[0]
            found.append(
                Observed(
                    trial.candidate.id,
                    fixed["parameters"],
                    fixed["non_embedding_parameters"],
                    fixed["tokens_seen"],
                    fixed["unique_tokens"],
                    tuple(metrics["loss"] for metrics in cells),
                    fixed["unigram_loss"],
                    fixed["uniform_loss"],
                )
            )
        return report(found) | {"missing": missing}


@dataclass
class Point:
    """The artefact: a trained model and the tokens it saw."""

    model: Any
    shape: Shape
    tokens: int
    losses: list[float]


def _unigram_loss(corpus: Corpus) -> float:
    from auto_research.tasks.language_model import unigram

    return -float(unigram(corpus.train, corpus.vocabulary)[corpus.validation].mean())


def _evaluate(point: Point, tokens: Any, size: int, end: int, context: int) -> Scores:
    from auto_research.tasks import micro_language_model as micro

    nats = micro.text_nats(point.model, tokens, end, context)
    loss = float(nats.mean())
    if not math.isfinite(loss):
        raise NonFinite(f"the validation loss is {loss}")
    blocks = nats.split(context)
    units = [float(block.sum()) * len(blocks) / len(nats) for block in blocks]
    return Scores(
        {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": micro.bits_per_byte(float(nats.sum()), size),
        },
        units,
    )


# -------------------------------------------------------------------------------------------------------- fits


@dataclass(frozen=True)
class Observed:
    """A point as it was measured: `losses` of its seeds, in nats a token."""

    name: str
    parameters: float
    non_embedding: float
    tokens: float
    unique: float
    losses: tuple[float, ...]
    unigram: float = math.nan
    uniform: float = math.nan

    @property
    def loss(self) -> float:
        """Mean over seeds."""
        return sum(self.losses) / len(self.losses)

    @property
    def compute(self) -> float:
        """C = 6 N D, with all parameters."""
        return 6 * self.parameters * self.tokens


@dataclass(frozen=True)
class Form:
    """One of the three laws.

    Attributes:
        names: of the coefficients; `slopes` are the exponents among them.
        design: points -> columns of a linear fit of ln L; None for the law that is not linear.
        fails: points -> why they do not identify it, or "".
    """

    name: str
    text: str
    names: tuple[str, ...]
    slopes: tuple[str, ...]
    design: Callable[[Sequence[Observed]], Array] | None
    fails: Callable[[Sequence[Observed]], str]


def _compute_design(points: Sequence[Observed]) -> Array:
    return np.array([[1.0, math.log(p.compute)] for p in points])


def _two_design(points: Sequence[Observed]) -> Array:
    return np.array([[1.0, math.log(p.parameters), math.log(p.tokens)] for p in points])


def rank(design: Array) -> int:
    """Rank of a design whose columns, but the constant one, are centred and scaled first: units do not matter."""
    columns = design[:, 1:] - design[:, 1:].mean(0)
    spread = np.abs(columns).max(0, initial=0)
    if not len(design):
        return 0
    return 1 + int(np.linalg.matrix_rank(columns[:, spread > 1e-9] / spread[spread > 1e-9], tol=1e-6))


def _compute_fails(points: Sequence[Observed]) -> str:
    different = len({round(math.log(p.compute), 9) for p in points})
    return "" if different >= 3 else f"{different} different C; 3 are needed"


def _two_fails(points: Sequence[Observed]) -> str:
    if len(points) < 4:
        return f"{len(points)} points; 4 are needed"
    found = rank(_two_design(points))
    return "" if found == 3 else f"the points have rank {found} in (1, ln N, ln D); 3 is needed"


def _chinchilla_fails(points: Sequence[Observed]) -> str:
    pairs = {(p.parameters, p.tokens) for p in points}
    sizes, lengths = {n for n, _ in pairs}, {d for _, d in pairs}
    if len(pairs) < 9:
        return f"{len(pairs)} different points; 9 on a crossed grid are needed"
    if len(sizes) < 3 or len(lengths) < 3 or len(pairs) < len(sizes) * len(lengths):
        return "the points are no crossed grid of at least 3 sizes by 3 lengths"
    return ""


FORMS = (
    Form("compute", "ln L = a + s ln C", ("a", "s"), ("s",), _compute_design, _compute_fails),
    Form(
        "size and data", "ln L = a + s_N ln N + s_D ln D", ("a", "s_N", "s_D"), ("s_N", "s_D"), _two_design, _two_fails
    ),
    Form(
        "chinchilla",
        "L = E + A N^-alpha + B D^-beta",
        ("E", "A", "B", "alpha", "beta"),
        ("alpha", "beta"),
        None,
        _chinchilla_fails,
    ),
)


def predict(form: Form, coefficients: Array, points: Sequence[Observed]) -> Array:
    """ln L (P,) of the points."""
    if form.design is not None:
        return np.asarray(form.design(points) @ coefficients)
    e, a, b, alpha, beta = coefficients
    n, d = (np.array([getattr(p, name) for p in points]) for name in ("parameters", "tokens"))
    return np.asarray(np.log(e + a * n**-alpha + b * d**-beta))


def solve(form: Form, points: Sequence[Observed], log_loss: Array, near: Array | None = None) -> Array:
    """Coefficients that fit ln L (P,): least squares, or Huber loss by L-BFGS from a grid of starts or from `near`."""
    if form.design is not None:
        return np.asarray(np.linalg.lstsq(form.design(points), log_loss, rcond=None)[0])
    return chinchilla(np.log([p.parameters for p in points]), np.log([p.tokens for p in points]), log_loss, near)


def chinchilla(log_n: Array, log_d: Array, log_loss: Array, near: Array | None = None) -> Array:
    """(E, A, B, alpha, beta) of L = E + A N^-alpha + B D^-beta (Hoffmann et al. 2022, approach 3).

    Minimises the mean Huber loss (delta 1e-3) of ln L - logsumexp(ln E, ln A - alpha ln N, ln B - beta ln D) by
    L-BFGS from a grid of starts, or from the coefficients `near` alone; the best end counts. The published optimiser
    stopped early because of the scale of its loss, says a replication (2404.10102): here errors are in units of delta.
    """
    from scipy.optimize import minimize
    from scipy.special import logsumexp

    mean_n, mean_d = log_n.mean(), log_d.mean()  # centred, so that scales and exponents are nearly independent

    def objective(theta: Array) -> tuple[float, Array]:
        e, a, b, alpha, beta = theta
        terms = np.stack([np.full_like(log_n, e), a - alpha * (log_n - mean_n), b - beta * (log_d - mean_d)])
        predicted = logsumexp(terms, axis=0)
        error = (predicted - log_loss) / HUBER
        inside = np.abs(error) <= 1
        value = np.where(inside, 0.5 * error**2, np.abs(error) - 0.5).mean()
        weight = np.exp(terms - predicted)
        slope = np.where(inside, error, np.sign(error)) / HUBER / len(error)
        gradient = np.array(
            [
                (slope * weight[0]).sum(),
                (slope * weight[1]).sum(),
                (slope * weight[2]).sum(),
                (slope * weight[1] * -(log_n - mean_n)).sum(),
                (slope * weight[2] * -(log_d - mean_d)).sum(),
            ]
        )
        return float(value), gradient

    level = float(log_loss.min())
    grid = [(level - 2, level - 0.5), *[(level - 3, level - 1)] * 2, *[(0.2, 0.6)] * 2]
    starts = [np.array(start) for start in itertools.product(*grid)]
    if near is not None:
        e, a, b, alpha, beta = near
        log_e, log_a, log_b = np.log(np.maximum([e, a, b], 1e-300))
        starts = [np.array([log_e, log_a - alpha * mean_n, log_b - beta * mean_d, alpha, beta])]
    bounds = [(None, None)] * 3 + [(0.0, 3.0)] * 2
    ends = [
        minimize(
            objective,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxiter": 1000 if near is None else 200, "ftol": 1e-10, "gtol": 1e-8},
        )
        for start in starts
    ]
    e, a, b, alpha, beta = min(ends, key=lambda end: float(end.fun)).x
    return np.array([math.exp(e), math.exp(a + alpha * mean_n), math.exp(b + beta * mean_d), alpha, beta])


def _rmse(errors: Array) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))


def fit(form: Form, points: Sequence[Observed]) -> dict[str, Any]:
    """Everything about one law: status, coefficients, errors, leave-one-out, bootstrap; JSON-like."""
    about: dict[str, Any] = {"form": form.text, "points": len(points)}
    if why := form.fails(points):
        return about | {"status": "not identifiable", "reason": why}
    loss = np.array([p.loss for p in points])
    log_loss = np.log(loss)
    coefficients = solve(form, points, log_loss)
    predicted = predict(form, coefficients, points)
    residual = log_loss - predicted
    constant = _rmse(log_loss - log_loss.mean())
    spread = float(np.square(log_loss - log_loss.mean()).sum())
    return about | {
        "status": "fitted",
        "coefficients": dict(zip(form.names, map(float, coefficients))),
        "log_rmse": _rmse(residual),
        "constant_log_rmse": constant,
        "loss_rmse": _rmse(loss - np.exp(predicted)),
        "r2": 1 - float(np.square(residual).sum()) / spread if spread else None,
        "worst_relative_residual": float(np.abs(np.expm1(residual)).max()),
        "residuals": {p.name: float(r) for p, r in zip(points, residual)},
        "degrees_of_freedom": len(points) - len(form.names),
        "leave_one_out": _leave_one_out(form, points, log_loss, coefficients),
        "bootstrap": _bootstrap(form, points, coefficients),
    }


def _leave_one_out(form: Form, points: Sequence[Observed], log_loss: Array, near: Array) -> dict[str, Any]:
    """Error of each point under the fit of the others, and how far the slopes move."""
    errors: dict[str, float] = {}
    slopes: dict[str, list[float]] = {name: [] for name in form.slopes}
    skipped = []
    for i, left in enumerate(points):
        rest = [p for j, p in enumerate(points) if j != i]
        # A crossed grid without one point still determines the law; the linear ones may lose their rank.
        if form.design is not None and form.fails(rest):
            skipped.append(left.name)
            continue
        found = solve(form, rest, np.delete(log_loss, i), near)
        errors[left.name] = float(log_loss[i] - predict(form, found, [left])[0])
        for name, value in zip(form.names, found):
            if name in slopes:
                slopes[name].append(float(value))
    return {
        "errors": errors,
        "log_rmse": _rmse(np.array(list(errors.values()))) if errors else None,
        "slopes": {name: [min(found), max(found)] for name, found in slopes.items() if found},
        "not identifiable without": skipped,
    }


def _bootstrap(form: Form, points: Sequence[Observed], near: Array, seed: int = 0) -> dict[str, Any]:
    """95 % intervals of the slopes when the seeds of every point are drawn anew, with replacement."""
    if min(len(p.losses) for p in points) < 2:
        return {"resamples": 0, "reason": "a point has one seed, and seeds are what is drawn"}
    rng = np.random.default_rng(seed)
    resamples = RESAMPLES if form.design is not None else SEARCHED_RESAMPLES
    drawn = np.stack(
        [np.array(p.losses)[rng.integers(len(p.losses), size=(resamples, len(p.losses)))].mean(1) for p in points],
        axis=1,
    )
    if form.design is not None:
        fits = np.log(drawn) @ np.linalg.pinv(form.design(points)).T
    else:
        fits = np.stack([solve(form, points, row, near) for row in np.log(drawn)])
    low, high = np.quantile(fits, [0.025, 0.975], axis=0)
    return {
        "resamples": resamples,
        "slopes": {n: [float(low[i]), float(high[i])] for i, n in enumerate(form.names) if n in form.slopes},
    }


def report(points: Sequence[Observed]) -> dict[str, Any]:
    """Points, fits, the target (log-RMSE of the compute law under half of the constant model's) and sentences."""
    ordered = sorted(points, key=lambda p: (p.compute, p.name))
    fits = {form.name: fit(form, ordered) for form in FORMS}
    rows = [
        {
            "candidate": p.name,
            "parameters": p.parameters,
            "non_embedding_parameters": p.non_embedding,
            "tokens_seen": p.tokens,
            "unique_tokens": p.unique,
            "repetitions": p.tokens / p.unique,
            "compute": p.compute,
            "loss": p.loss,
            "perplexity": math.exp(p.loss),
            "seeds": len(p.losses),
            "deviation": float(np.std(p.losses, ddof=1)) if len(p.losses) > 1 else None,
        }
        for p in ordered
    ]
    main = fits["compute"]
    holds = main["status"] == "fitted" and main["log_rmse"] < main["constant_log_rmse"] / 2
    return {
        "claim": CLAIM,
        "points": rows,
        "fits": fits,
        "target": {"text": "log-RMSE below half of the constant model's", "holds": holds},
        "sentence": _sentence(main, holds),
        "warnings": _warnings(ordered, main),
    }


def _sentence(main: dict[str, Any], holds: bool) -> str:
    if main["status"] != "fitted":
        return f"{main['form']}: not identifiable ({main['reason']}); {CLAIM}"
    better = "below" if holds else "not below"
    return (
        f"loss falls as C^{main['coefficients']['s']:.3f}: log-RMSE {main['log_rmse']:.4f}, {better} half of the "
        f"constant model's {main['constant_log_rmse']:.4f}; {CLAIM}"
    )


def _warnings(points: Sequence[Observed], main: dict[str, Any]) -> list[str]:
    """What makes the numbers mean less than they seem to."""
    found = [
        f"{p.name}: the loss {p.loss:.3f} is within 5 % of equal chances ({p.uniform:.3f}): nothing was learned yet"
        for p in points
        if p.loss > 0.95 * p.uniform
    ]
    found += [
        f"{p.name}: the loss {p.loss:.3f} is not below the unigram model's {p.unigram:.3f}"
        for p in points
        if p.loss >= p.unigram
    ]
    found += [
        f"{p.name}: {p.tokens / p.unique:.1f} passes over {p.unique:,.0f} unique tokens: repeated data count as D"
        for p in points
        if p.tokens > p.unique
    ]
    if len({p.tokens for p in points}) == 1 and len(points) > 1:
        found.append("all points saw the same number of tokens: nothing is known about D")
    if main["status"] != "fitted":
        return found
    residual = max(abs(math.expm1(r)) * p.loss for p, r in zip(points, main["residuals"].values()))
    deviations = [float(np.std(p.losses, ddof=1)) for p in points if len(p.losses) > 1]
    noise = max(deviations) if deviations else SEED_NOISE[1]
    origin = (
        "of this run"
        if deviations
        else f"measured before, {SEED_NOISE[0]}-{SEED_NOISE[1]}; this run has one seed a point"
    )
    kind = "real curvature, not noise" if residual > 2 * noise else "within seed noise"
    found.append(
        f"the largest residual is {residual:.3f} nats, the seed noise of a point {noise:.3f} ({origin}): {kind}"
    )
    return found
