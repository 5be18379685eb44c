"""Post-training on arithmetic: generation, pairs, the shared warm-up, token-matched losses, metrics and floors."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from auto_research.evolve import genome as genomes
from auto_research.evolve.records import Candidate, CellResult, Paired, Trial
from auto_research.evolve.space import Genome
from auto_research.evolve.workflow import Data, NonFinite, SealedTest, Sizes
from auto_research.evolve.workflows import workflow
from auto_research.evolve.workflows._arithmetic import (
    Batch,
    Policy,
    Problems,
    Trace,
    _draw,
    forward_flops,
    fresh_policy,
    generate,
    make_pairs,
    pass_at_k,
    post_train,
    token_divergence,
    verify,
)
from auto_research.evolve.workflows.arithmetic import PAIR_LOSSES, Arithmetic, _unwatched
from auto_research.tasks.arithmetic import END, PAD, encode_prompts, encode_responses, expression

LOSSES = ("sft", *PAIR_LOSSES, "rejection-sft")
# Small enough for seconds; one digit sums are learned a little.
SMALL = {
    "width": 32,
    "layers": 1,
    "heads": 2,
    "warmup_steps": 80,
    "warmup_batch": 64,
    "steps": 8,
    "micro_batch": 8,
    "samples": 4,
}


@pytest.fixture(scope="module")
def arithmetic() -> Arithmetic:
    return Arithmetic()


@pytest.fixture(scope="module")
def sizes(arithmetic: Arithmetic) -> Sizes:
    return Sizes("smoke", {**arithmetic.sizes("smoke").values, **SMALL})


@pytest.fixture(scope="module")
def data(arithmetic: Arithmetic, sizes: Sizes) -> Data:
    return arithmetic.load(sizes, None)


@pytest.fixture(scope="module")
def trained(arithmetic: Arithmetic, sizes: Sizes, data: Data) -> dict[str, Any]:
    """An artefact of every loss, at the values the space starts from."""
    return {loss: train(arithmetic, sizes, data, {"post.loss": loss}) for loss in LOSSES}


def train(arithmetic: Arithmetic, sizes: Sizes, data: Data, changes: Genome, seed: int = 0, **override: int) -> Any:
    sizes = Sizes("smoke", {**sizes.values, **override})
    return arithmetic.train(arithmetic.space.resolve(changes), data, seed, sizes, "cpu", _unwatched)


def traced(arithmetic: Arithmetic, sizes: Sizes, data: Data, changes: Genome, **override: int) -> Trace:
    """What happened at every update after the warm-up of seed 0; `override` concerns those updates alone."""
    trace = Trace()
    start = arithmetic.warm_up(data, 0, sizes, "cpu", _unwatched)
    sizes = Sizes("smoke", {**sizes.values, **override})
    post_train(arithmetic.space.resolve(changes), start, data.parts["train"], 0, sizes, "cpu", _unwatched, trace)
    return trace


def lively(seed: int = 0) -> Policy:
    """An untrained policy whose outputs are far from even."""
    torch.manual_seed(seed)
    policy = Policy(16, 2, 2)
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return policy.requires_grad_(False)


def prompts() -> Tensor:
    return encode_prompts([expression((7, 3), "-"), expression((29, 19), "+"), expression((12, 8), "+")])


def test_cached_decoding_equals_uncached() -> None:
    policy, asked = lively(), prompts()
    greedy = generate(policy, asked, length=6, temperature=0)
    so_far = asked
    ended = torch.zeros(len(asked), dtype=torch.bool)
    for column in range(6):
        token = policy(so_far, so_far != PAD)[:, -1].argmax(-1).masked_fill(ended, PAD)
        assert torch.equal(token, greedy[:, column])
        ended |= token == END
        so_far = torch.cat([so_far, token[:, None]], dim=1)


def test_samples_follow_the_policy_they_are_scored_with() -> None:
    """Frequencies of sampled completions against their probabilities by teacher forcing; one prompt, two tokens."""
    policy, asked, drawn = lively(), prompts()[:1], 4000
    sampled = generate(policy, asked, length=2, samples=drawn, generator=torch.Generator().manual_seed(1))
    found, count = sampled.unique(dim=0, return_counts=True)
    common = count.argsort(descending=True)[:6]
    log_probability, _ = policy.log_probabilities(asked.expand(6, -1), found[common])
    expected = log_probability.double().exp()
    error = (expected * (1 - expected) / drawn).sqrt()
    assert ((count[common] / drawn - expected).abs() < 4 * error).all()


def test_nothing_follows_the_end_and_padding_is_never_sampled() -> None:
    sampled = generate(lively(3), prompts(), length=6, samples=200, generator=torch.Generator().manual_seed(0))
    behind = (sampled == END).int().cumsum(1) - (sampled == END).int() > 0
    assert torch.equal(sampled == PAD, behind)
    assert behind.any()


def test_what_stands_at_padding_changes_nothing() -> None:
    policy, asked = lively(), prompts()
    answers = encode_responses(["4", "48", "-20"])
    before = policy.log_probabilities(asked, answers)[0]
    with torch.no_grad():
        policy.token.weight[PAD] += 5.0
    assert torch.allclose(policy.log_probabilities(asked, answers)[0], before, atol=1e-5)


def test_log_probabilities_of_a_response_do_not_depend_on_its_neighbours() -> None:
    policy, asked = lively(), prompts()
    answers = F.pad(encode_responses(["4", "48", "-20"]), (0, 2))
    together = policy.log_probabilities(asked, answers)
    alone = [policy.log_probabilities(asked[i : i + 1], answers[i : i + 1]) for i in range(3)]
    assert torch.allclose(together[0], torch.cat([total for total, _ in alone]), atol=1e-5)
    assert together[1].tolist() == [2, 3, 4]


def test_divergence_is_zero_to_itself_and_sums_the_tokens_of_the_response() -> None:
    policy, other, asked = lively(0), lively(1), prompts()[1:2]
    answer = F.pad(encode_responses(["48"]), (0, 3))
    assert token_divergence(policy, policy, asked, answer).item() == 0
    expected = sum(
        F.kl_div(
            other(torch.cat([asked, answer[:, :t]], 1), torch.ones(1, 6 + t).bool())[0, -1].log_softmax(-1),
            policy(torch.cat([asked, answer[:, :t]], 1), torch.ones(1, 6 + t).bool())[0, -1].softmax(-1),
            reduction="sum",
        ).item()
        for t in range(3)
    )
    assert token_divergence(policy, other, asked, answer).item() == pytest.approx(expected, rel=1e-4)


def test_pairs() -> None:
    """No rollout right; the second right; all right."""
    rollouts = torch.arange(3 * 2 * 1).view(3, 2, 1) + 10
    correct = torch.tensor([[False, False], [False, True], [True, True]])
    solutions = torch.tensor([[1], [2], [3]])
    chosen, rejected, keep = make_pairs(rollouts, correct, solutions)
    assert keep.tolist() == [True, True, False]
    assert chosen[keep].flatten().tolist() == [1, 13]
    assert rejected[keep].flatten().tolist() == [10, 12]


def test_pass_at_k_counts_subsets() -> None:
    correct = torch.tensor([[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    for k in (1, 2, 4):
        subsets = list(combinations(range(5), k))
        expected = [sum(bool(row[list(s)].any()) for s in subsets) / len(subsets) for row in correct]
        assert pass_at_k(correct, k).tolist() == pytest.approx(expected)


def test_a_cut_off_completion_is_neither_correct_nor_well_formed() -> None:
    responses = encode_responses(["12", "1-12", "", "012", "-3"])
    verdict = verify(responses, ["12", "12", "0", "12", "-3"])
    assert verdict.correct.tolist() == [True, True, False, True, True]
    assert verdict.formed.tolist() == [True, False, False, True, True]
    assert not verify(responses[:, :2], ["12", "1", "0", "1", "-3"]).correct.any()


def test_recipes_admit_what_they_say() -> None:
    order = torch.randperm(101, generator=torch.Generator().manual_seed(0))
    place = order.argsort()

    def reach(recipe: str, done: float) -> tuple[int, int]:
        rows = place[_draw(order, 5000, recipe, done, torch.Generator().manual_seed(1))]
        return int(rows.min()), int(rows.max())

    assert reach("all", 0.0) == reach("all", 0.9) == (0, 100)
    assert reach("hard-half", 0.3) == (50, 100)
    assert reach("curriculum", 0.0) == (0, 49)
    assert reach("curriculum", 0.25) == (0, 74)
    assert reach("curriculum", 0.5) == reach("curriculum", 1.0) == (0, 100)


def test_key_and_parameters() -> None:
    """The policy of the smoke run has 102,400 parameters."""
    made = workflow("arithmetic")
    assert isinstance(made, Arithmetic)
    sizes = made.sizes("smoke")
    shapes = made.describe(made.space.baseline(), sizes, made.load(sizes, None)).parameters
    assert sum(math.prod(shape) for shape in shapes.values()) == 102_400


@pytest.mark.parametrize("budget", ["smoke", "standard"])
def test_parts_are_disjoint_and_large_enough(arithmetic: Arithmetic, budget: Any) -> None:
    data = arithmetic.load(arithmetic.sizes(budget), None)
    shared = {name: count for name, count in data.hygiene.items() if "share" in name}
    assert len(shared) == 6
    assert set(shared.values()) == {0}
    assert data.examples == data.hygiene["distinct validation"] == {"smoke": 120, "standard": 1080}[budget]


def test_test_part_is_sealed(arithmetic: Arithmetic, sizes: Sizes, data: Data) -> None:
    with pytest.raises(SealedTest):
        arithmetic.load_test(sizes, None)
    assert set(data.parts) == {"train", "validation"}


def test_all_candidates_of_a_seed_share_their_warm_up(sizes: Sizes, data: Data, trained: dict[str, Any]) -> None:
    """In other processes too: a fresh workflow, another loss, the same bits; and another seed starts elsewhere."""
    first = trained["sft"].start.state_dict()
    again = train(Arithmetic(), sizes, data, {"post.loss": "simpo"}, steps=1).start.state_dict()
    other = train(Arithmetic(), sizes, data, {}, seed=1, steps=1).start.state_dict()
    for key, value in first.items():
        assert all(torch.equal(artefact.start.state_dict()[key], value) for artefact in trained.values())
        assert torch.equal(again[key], value)
    assert any(not torch.equal(other[key], value) for key, value in first.items())


def test_the_same_seed_gives_the_same_bits(
    arithmetic: Arithmetic, sizes: Sizes, data: Data, trained: dict[str, Any]
) -> None:
    torch.manual_seed(123)  # nothing may depend on the global state
    again = train(arithmetic, sizes, data, {"post.loss": "dpo"})
    assert again.facts == trained["dpo"].facts
    for key, value in trained["dpo"].policy.state_dict().items():
        assert torch.equal(again.policy.state_dict()[key], value)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_moves_the_policy_and_leaves_the_warm_up(trained: dict[str, Any], loss: str) -> None:
    artefact = trained[loss]
    pairs = zip(artefact.policy.parameters(), artefact.start.parameters(), strict=True)
    moved = sum(int((ours != theirs).sum()) for ours, theirs in pairs)
    assert moved > 0.5 * sum(p.numel() for p in artefact.policy.parameters())


def test_first_losses(arithmetic: Arithmetic, sizes: Sizes, data: Data, trained: dict[str, Any]) -> None:
    assert trained["dpo"].facts["first_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert trained["ipo"].facts["first_loss"] == pytest.approx(25, abs=1e-4)
    normalised = train(arithmetic, sizes, data, {"post.loss": "ipo", "ipo.normalise": True}, steps=1)
    assert normalised.facts["first_loss"] == pytest.approx(25, abs=1e-4)


def test_all_losses_train_on_the_same_number_of_tokens(trained: dict[str, Any]) -> None:
    """Up to one update, although problems without a pair or a correct rollout give nothing."""
    tokens = {loss: artefact.facts["trained_tokens"] for loss, artefact in trained.items()}
    one_update = 1.6 * tokens["sft"] / trained["sft"].facts["updates"]
    for loss in PAIR_LOSSES:
        assert abs(tokens[loss] - tokens["sft"]) < one_update
        assert 0 < trained[loss].facts["pair_yield"] <= 1
    assert "pair_yield" not in trained["sft"].facts


def test_a_loss_without_examples_ends(arithmetic: Arithmetic, sizes: Sizes, data: Data) -> None:
    """Where no answer is ever correct, rejection sampling finds nothing to learn from."""
    hopeless = replace(data.parts["train"], answers=["none"] * len(data.parts["train"]))
    data = replace(data, parts={**data.parts, "train": hopeless})
    artefact = train(arithmetic, sizes, data, {"post.loss": "rejection-sft"}, steps=3)
    assert artefact.facts["updates"] == 12
    assert artefact.facts["accepted"] == artefact.facts["trained_tokens"] == 0


def test_replay_asks_a_quarter_of_the_rollouts_and_mixed_half(arithmetic: Arithmetic, sizes: Sizes, data: Data) -> None:
    def asked(source: str) -> list[int]:
        trace = traced(arithmetic, sizes, data, {"post.loss": "dpo", "pairs.source": source})
        return [len(rollouts) for rollouts in trace.rollouts][:8]

    assert asked("on-policy") == [8] * 8
    assert asked("mixed") == [4] * 8
    assert asked("replay") == [8, 0, 0, 0] * 2


def test_a_refreshed_reference_starts_from_a_margin_of_zero(arithmetic: Arithmetic, sizes: Sizes, data: Data) -> None:
    def restarts(times: int) -> int:
        losses = traced(arithmetic, sizes, data, {"post.loss": "dpo", "reference.refresh": times}).losses
        return sum(abs(loss - math.log(2)) < 1e-6 for loss in losses)

    assert [restarts(times) for times in (0, 1, 3)] == [1, 2, 4]


@pytest.mark.parametrize("changes", [{}, {"post.loss": "ipo"}, {"post.loss": "orpo"}])
def test_a_batch_in_parts_learns_the_same(arithmetic: Arithmetic, sizes: Sizes, data: Data, changes: Genome) -> None:
    """Half the rows in memory, twice as many parts: the loss of the second update agrees as well."""
    whole = traced(arithmetic, sizes, data, changes)
    parts = traced(arithmetic, sizes, data, changes, micro_batch=4, accumulate=2)
    assert all(torch.equal(a, b) for a, b in zip(whole.drawn[:2], parts.drawn[:2], strict=True))
    assert parts.losses[:2] == pytest.approx(whole.losses[:2], rel=1e-4)


def test_objective_in_parts_sums_to_the_whole() -> None:
    problems = Problems.of([expression((a, b), "+") for a in range(5) for b in range(3)], 6)
    batch = Batch(problems.prompts, problems.solutions, problems.solutions.flip(0))
    assert [len(part) for part in batch.parts(4)] == [4, 4, 4, 3]
    assert sum(part.tokens() for part in batch.parts(4)) == batch.tokens()
    assert torch.equal(torch.cat([part.prompts for part in batch.parts(4)]), problems.prompts)


def test_scores_and_what_is_stored(
    arithmetic: Arithmetic, sizes: Sizes, data: Data, trained: dict[str, Any], tmp_path: Any
) -> None:
    artefact = trained["ipo"]
    scores = arithmetic.validate(artefact, data, sizes, "cpu")
    assert sum(scores.units) / 120 == pytest.approx(scores.metrics["accuracy"])
    assert set(scores.units) <= {0.0, 1.0}
    assert 0 < scores.metrics["kl"] < 10
    assert scores.metrics["sampled_accuracy"] <= scores.metrics["pass@4"] <= 1
    assert {"format_rate", "mean_length", "margin", "pair_yield", "warmup_accuracy"} <= set(scores.metrics)
    held = arithmetic.test(artefact, data.parts["validation"], data, sizes, "cpu")
    assert held.units == scores.units
    assert set(scores.metrics) - set(held.metrics) == set(artefact.facts), "counts of training are no test metrics"
    arithmetic.save(artefact, tmp_path)
    genome = arithmetic.space.resolve({"post.loss": "ipo"})
    restored = Arithmetic().restore(genome, data, tmp_path, sizes, "cpu")
    assert arithmetic.validate(restored, data, sizes, "cpu") == scores
    (tmp_path / "again").mkdir()
    arithmetic.save(artefact, tmp_path / "again")
    names = [path.name for path in tmp_path.iterdir() if path.is_file()]
    assert len(names) == 2
    assert all((tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


def test_an_untouched_policy_has_no_divergence_and_no_margin(
    arithmetic: Arithmetic, sizes: Sizes, data: Data, trained: dict[str, Any]
) -> None:
    start = trained["sft"].start
    scores = arithmetic.validate(type(trained["sft"])(start, start, 0, {}), data, sizes, "cpu")
    assert scores.metrics["kl"] == scores.metrics["margin"] == 0
    assert scores.metrics["accuracy"] == scores.metrics["warmup_accuracy"]


def test_floors_and_ceiling(arithmetic: Arithmetic, sizes: Sizes, data: Data, trained: dict[str, Any]) -> None:
    floors = arithmetic.floors(data, sizes)
    scores = arithmetic.validate(trained["sft"], data, sizes, "cpu")
    assert floors["warm-up"] == scores.metrics["warmup_accuracy"]
    assert 0 < floors["most frequent answer"] < 0.06
    assert arithmetic.anchors(data, sizes) == {"solutions": 1.0}


def test_progress_sees_both_phases_and_may_refuse_a_loss(arithmetic: Arithmetic, sizes: Sizes, data: Data) -> None:
    seen: list[tuple[int, float]] = []
    genome = arithmetic.space.resolve({"post.loss": "simpo"})
    Arithmetic().train(genome, data, 0, sizes, "cpu", lambda step, loss: seen.append((step, loss)))
    steps = [step for step, _ in seen]
    assert steps == sorted(set(steps))
    assert steps[0] == 1
    assert steps[-1] > SMALL["warmup_steps"]
    assert all(math.isfinite(loss) for _, loss in seen)

    def refuse(step: int, loss: float) -> None:
        raise NonFinite("a planted refusal")

    with pytest.raises(NonFinite):
        Arithmetic().train(genome, data, 0, sizes, "cpu", refuse)


def test_cost_follows_the_genome(arithmetic: Arithmetic, sizes: Sizes, data: Data) -> None:
    def flops(**changes: Any) -> float:
        genome = arithmetic.space.resolve({name.replace("__", "."): value for name, value in changes.items()})
        return arithmetic.cost(genome, sizes, data).flops

    assert flops() < flops(post__loss="orpo") < flops(post__loss="dpo")
    replay, mixed = (flops(post__loss="dpo", pairs__source=source) for source in ("replay", "mixed"))
    assert replay < mixed < flops(post__loss="dpo")
    assert flops(post__loss="dpo", pairs__group=2) < flops(post__loss="dpo")


def test_cost_counts_the_matrix_products(arithmetic: Arithmetic) -> None:
    """Against what torch counts, which leaves attention's own products out on the CPU: a few per cent."""
    from torch.utils.flop_counter import FlopCounterMode

    sizes = arithmetic.sizes("smoke")
    policy = fresh_policy(sizes, 0)
    with FlopCounterMode(display=False) as counter:
        policy.respond(prompts(), encode_responses(["4", "48", "-20"]))
    assert counter.get_total_flops() == pytest.approx(3 * forward_flops(sizes, 9, 4), rel=0.05)


def test_every_axis_value_has_an_effect(arithmetic: Arithmetic, sizes: Sizes, data: Data) -> None:
    found = genomes.effects(arithmetic, sizes, data)
    assert {effect.axis for effect in found} == {axis.name for axis in arithmetic.space.axes}
    assert not [effect.text for effect in found if not effect.holds]


def test_direction_finds_operators(arithmetic: Arithmetic) -> None:
    ids = {operator.id for operator in arithmetic.operators}
    assert ids == set(LOSSES) - {"sft"}
    plan = [genome["post.loss"] for genome in arithmetic.smoke_plan()]
    assert plan[0] == "ipo"
    assert set(plan[1:]) <= {"dpo", "orpo", "simpo"}
    assert arithmetic.space.baseline()["post.loss"] == "sft"


def a_trial(name: str, loss: str, accuracy: list[float], gain: tuple[float, float | None] | None = None) -> Trial:
    cells = [
        CellResult(
            cell=f"{name}-{i}", candidate=name, seed=i, role="search", state="completed",
            metrics={"accuracy": value, "warmup_accuracy": 0.25, "kl": 0.1},
        )
        for i, value in enumerate(accuracy)
    ]  # fmt: skip
    paired = gain and Paired(
        child=name, parent="baseline", n=len(accuracy), gain=gain[0], se=0.01, z=1.0, lower=gain[1], upper=None
    )
    candidate = Candidate(id=name, generation=0, origin="baseline", genome={"post.loss": loss})
    return Trial(candidate=candidate, state="completed", cells=cells, gain=paired or None)


def test_the_summary_holds_every_loss_against_continued_sft(arithmetic: Arithmetic) -> None:
    control = a_trial("baseline", "sft", [0.5, 0.6])
    found = arithmetic.summarise([control, a_trial("a", "ipo", [0.4, 0.5], (-0.1, -0.2))])
    assert "accuracy 0.550 after a warm-up of 0.250; no other loss is above it." in found["sentence"]
    assert [row["loss"] for row in found["candidates"]] == ["sft", "ipo"]
    within = arithmetic.summarise([control, a_trial("a", "ipo", [0.6, 0.6], (0.05, -0.01))])["sentence"]
    assert within.endswith("above it is a, but not beyond noise.")
    beyond = arithmetic.summarise(
        [control, a_trial("a", "ipo", [0.6, 0.6], (0.05, -0.01)), a_trial("b", "dpo", [0.9, 0.9], (0.3, 0.2))]
    )["sentence"]
    assert beyond.endswith("above it are a, b, beyond noise b.")
    single = arithmetic.summarise([a_trial("baseline", "sft", [0.5]), a_trial("a", "orpo", [0.9], (0.4, None))])
    assert single["sentence"].endswith("above it is a, which one seed cannot tell from noise.")
    assert "No other loss" in arithmetic.summarise([control])["sentence"]


@pytest.mark.slow
def test_smoke_run_learns_beyond_its_warm_up(arithmetic: Arithmetic) -> None:
    """The smoke run at its own size: warm-up off the floor, every candidate above 0.15, pairs found, control beside."""
    sizes = arithmetic.sizes("smoke")
    data = arithmetic.load(sizes, None)
    floors = arithmetic.floors(data, sizes)
    assert 0.2 <= floors["warm-up"] <= 0.4
    for genome in [arithmetic.space.baseline(), *arithmetic.smoke_plan()]:
        artefact = arithmetic.train(genome, data, 0, sizes, "cpu", _unwatched)
        metrics = arithmetic.validate(artefact, data, sizes, "cpu").metrics
        assert metrics["accuracy"] > max(0.15, floors["warm-up"])
        assert metrics["format_rate"] > 0.95
        assert genome["post.loss"] == "sft" or metrics["pair_yield"] > 0.5
