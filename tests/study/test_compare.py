"""Paired bootstrap, unit metrics and fairness of `Study.compare`."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from auto_research.runtime.errors import UserError
from auto_research.study.card import Card
from auto_research.study.compare import Trained, Variant, paired_difference
from auto_research.study.context import Study
from auto_research.study.verdict import beats
from auto_research.tasks.base import Evaluation, Mean, NonFiniteLoss, PooledAUC, Ratio, Recipe, learning_rate_at

CARD = Card(
    key="toy",
    title="Toy",
    organisation="none",
    published="2026-01-01",
    family="toy",
    fidelity="core_mechanism",
    datasets=["ml-latest-small"],
    overrides={"FIT_STEPS": "steps", "USERS": "users"},
    claim="a line fits a line",
)


def weights_of(draws, units):
    return torch.tensor(np.stack([np.bincount(d, minlength=units) for d in draws]), dtype=torch.float64)


def test_mean_leaves_out_units_without_a_value():
    metric = Mean(torch.tensor([1.0, float("nan"), 4.0]))
    assert metric.resample(torch.tensor([[1.0, 1.0, 1.0], [3.0, 5.0, 0.0]])).tolist() == [2.5, 1.0]


def test_ratio_is_a_ratio_of_sums():
    metric = Ratio(torch.tensor([2.0, 9.0]), torch.tensor([1.0, 3.0]))
    assert metric.resample(torch.tensor([[1.0, 1.0], [0.0, 2.0]])).tolist() == [11 / 4, 3.0]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_pooled_auc_equals_mann_whitney_under_resampling(seed):
    rng = np.random.default_rng(seed)
    n, units = 40, 7
    score = rng.integers(0, 6, n).astype(np.float32)  # many ties
    label = rng.integers(0, 2, n)
    label[:2] = [0, 1]
    unit = np.concatenate([np.zeros(2, int), rng.integers(0, units, n - 2)])
    drawn = np.concatenate([[0], rng.integers(0, units, units - 1)])
    found = PooledAUC(torch.tensor(score), torch.tensor(label), torch.tensor(unit)).resample(weights_of([drawn], units))
    rows = np.concatenate([np.flatnonzero(unit == u) for u in drawn])
    positive, negative = score[rows][label[rows] == 1], score[rows][label[rows] == 0]
    expected = stats.mannwhitneyu(positive, negative).statistic / (len(positive) * len(negative))
    assert found[0].item() == pytest.approx(expected, abs=1e-12)


def evaluation(values):
    return Evaluation(len(values), {"m": Mean(torch.as_tensor(values))})


def test_paired_difference_recovers_a_shift_that_unpaired_noise_would_hide():
    generator = torch.Generator().manual_seed(0)
    users = torch.randn(400, generator=generator) * 10
    base = [evaluation(users + 0.01 * torch.randn(400, generator=generator)) for _ in range(3)]
    better = [evaluation(users + 0.1 + 0.01 * torch.randn(400, generator=generator)) for _ in range(3)]
    d = paired_difference(better, base, "m")
    assert 0.09 < d.low < d.mean < d.high < 0.11
    assert (d.wins, d.seeds, d.units) == (3, 3, 400)
    flipped = paired_difference(better, base, "m", lower_is_better=True)
    assert flipped.high < 0
    assert flipped.wins == 0


def test_interval_holds_the_luck_of_seeds():
    users = torch.zeros(1000)
    base = [evaluation(users) for _ in range(3)]
    lucky = [evaluation(users + shift) for shift in (-1.0, 0.0, 2.0)]
    d = paired_difference(lucky, base, "m")
    assert d.low < 0 < d.high


def test_interval_covers_the_truth_about_as_often_as_it_says():
    generator = torch.Generator().manual_seed(1)
    covered = 0
    for trial in range(100):
        base, method = torch.randn(60, generator=generator), torch.randn(60, generator=generator) + 0.3
        d = paired_difference([evaluation(method)], [evaluation(base)], "m", seed=trial)
        covered += d.low <= 0.3 <= d.high
    assert 88 <= covered <= 99


def test_different_units_are_refused():
    with pytest.raises(ValueError, match="different units"):
        paired_difference([evaluation([1.0])], [evaluation([1.0, 2.0])], "m")


class Line(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.slope = nn.Parameter(torch.randn(1))
        self.bias = nn.Parameter(torch.zeros(1)) if bias else None

    def scores(self, batch):
        return batch["x"] * self.slope + (self.bias if self.bias is not None else 0.0)

    def loss(self, batch):
        return (self.scores(batch) - batch["y"]).square().mean()


class LineTask:
    name, primary, lower_is_better = "line", "error", frozenset({"error"})

    def __init__(self):
        self.read = []
        self.seen = {}

    def batches(self, seed, batch_size, device):
        generator = torch.Generator().manual_seed(seed)
        while True:
            x = torch.randn(batch_size, generator=generator)
            self.seen.setdefault(seed, []).append(x)
            yield {"x": x, "y": 2 * x + 1}

    def evaluate(self, model, split, device):
        self.read.append(split)
        x = torch.linspace(-1, 1, 50)
        with torch.no_grad():
            return Evaluation(50, {"error": Mean((model.scores({"x": x}) - 2 * x - 1).square())})


def compare(study, task, **kwargs):
    return study.compare(
        task,
        baseline=Variant("through zero", lambda: Line(False)),
        candidates=[Variant("with bias", lambda: Line(True), kind="method")],
        device=torch.device("cpu"),
        recipe=Recipe(learning_rate=0.1, batch_size=16, validations=2),
        clauses=[beats("with bias", "through zero", "error")],
        **kwargs,
    )


def test_compare_is_fair_and_reads_test_once_a_trial():
    task = LineTask()
    study = Study(CARD, budget="standard", seeds=(1, 2, 3), quiet=True)
    record = compare(study, task, steps=60).record()
    assert task.read.count("test") == 6
    for batches in task.seen.values():  # both variants saw the same data in the same order
        first, second = batches[: len(batches) // 2], batches[len(batches) // 2 :]
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert record.verdict == "reproduced"
    assert [v.parameters for v in record.variants] == [1, 2]
    assert {s.name: s.optimiser_steps for s in study.stages} == {"through zero": 180, "with bias": 180}
    assert all(t.steps == 60 for v in record.variants for t in v.trials)


def test_smoke_concludes_nothing_and_one_seed_is_inconclusive():
    smoke = compare(Study(CARD, budget="smoke", quiet=True), LineTask(), steps=40).record()
    assert smoke.verdict == "smoke: no conclusion"
    assert smoke.clauses[0].state == "holds"
    single = compare(Study(CARD, budget="standard", seeds=(1,), quiet=True), LineTask(), steps=40).record()
    assert single.verdict == "inconclusive"


def test_grid_is_tuned_on_validation_at_the_first_seed_only():
    task = LineTask()
    study = Study(CARD, budget="standard", seeds=(1, 2), quiet=True)
    comparison = compare(study, task, steps=30, learning_rates=(1e-5, 0.1))
    assert all(t.learning_rate == 0.1 for trials in comparison.trials.values() for t in trials)
    assert len(task.seen[1]) == 2 * len(task.seen[2])
    assert task.read.count("test") == 4


def test_own_training_loops_are_seeded_and_measured():
    drawn = []

    def train(seed, rate):
        model = Line(True)
        drawn.append(model.slope.item())
        return Trained(model, steps=7, logged={"lambda": 0.5})

    study = Study(CARD, budget="standard", seeds=(5, 6), quiet=True)
    comparison = study.compare(
        LineTask(),
        baseline=Variant("a", train=train),
        candidates=[Variant("b", train=train)],
        steps=7,
        device=torch.device("cpu"),
    )
    assert drawn[0] == drawn[2]
    assert drawn[1] == drawn[3]
    assert drawn[0] != drawn[1]
    record = comparison.record()
    assert record.verdict == "no claim"
    assert record.variants[0].trials[0].diagnostics == {"lambda": 0.5}


def test_best_state_on_validation_is_kept():
    class Diverging(LineTask):
        def evaluate(self, model, split, device):
            self.calls = getattr(self, "calls", 0) + 1
            self.slopes = [*getattr(self, "slopes", []), model.slope.item()]
            error = [5.0, 1.0, 9.0][min(self.calls, 3) - 1]
            return Evaluation(2, {"error": Mean(torch.full((2,), error))})

    task = Diverging()
    study = Study(CARD, budget="standard", seeds=(1,), quiet=True)
    comparison = study.compare(
        task,
        baseline=Variant("a", lambda: Line(True)),
        candidates=[],
        steps=9,
        device=torch.device("cpu"),
        recipe=Recipe(validations=3, learning_rate=0.1),
    )
    assert comparison.trials["a"][0].best_step == 6
    assert task.slopes[3] == task.slopes[1]  # test sees the state of the second look


def test_non_finite_loss_ends_the_training():
    class Bad(Line):
        def loss(self, batch):
            return super().loss(batch) * float("nan")

    study = Study(CARD, budget="smoke", quiet=True)
    with pytest.raises(NonFiniteLoss, match="not finite at step 1"):
        study.compare(
            LineTask(), baseline=Variant("a", lambda: Bad(True)), candidates=[], steps=3, device=torch.device("cpu")
        )


def test_repeated_seeds_are_refused():
    with pytest.raises(UserError, match="repeat"):
        Study(CARD, seeds=(1, 1))


def test_learning_rate_schedule_by_hand():
    recipe = Recipe(learning_rate=1.0, warmup=0.2, schedule="cosine")
    rates = [learning_rate_at(s, 10, recipe) for s in range(10)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[2] == pytest.approx(1.0)
    assert rates[6] == pytest.approx(0.1 + 0.45)
    assert all(a >= b for a, b in itertools.pairwise(rates[2:]))
    assert learning_rate_at(9, 10, Recipe(learning_rate=0.3)) == 0.3
