"""Reasoning budget: sampling, stopping, deciding, counting; on written samples, and on a model built here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.checkpoints.resolve import available
from auto_research.evolve import genome as genomes
from auto_research.evolve.promotion import summarise as as_trial
from auto_research.evolve.records import Candidate, CellResult, Trial
from auto_research.evolve.space import Genome, Infeasible
from auto_research.evolve.workflow import Data, SealedTest, Sizes
from auto_research.evolve.workflows import workflow
from auto_research.evolve.workflows._checkpoints import LANGUAGE_MODELS
from auto_research.evolve.workflows._checkpoints import choose as choose_checkpoint
from auto_research.evolve.workflows._reasoning import (
    PROMPTS,
    Draw,
    LanguageModel,
    Prices,
    Recipe,
    Reply,
    Row,
    Sample,
    Solution,
    asking,
    chat_prompt,
    choose,
    completion_length,
    next_token,
    score,
    scripted,
    settled,
    solve,
    standings,
    summarise,
    uniforms,
)
from auto_research.evolve.workflows.reasoning_budget import Item, Problems, ReasoningBudget, Solver, in_words, is_sum
from auto_research.runtime.errors import UserError
from auto_research.tasks.arithmetic import expression

QUESTIONS = ["What is 7 plus 5?", "What is 3 plus 4?", "What is 12 plus 19 and then some more of it?"]


def recipe(**changes: Any) -> Recipe:
    whole = Recipe(samples=4, max_new_tokens=24, threshold=None, temperature=0.7, prompt="direct", verifier="vote")
    return replace(whole, **changes)


def said(text: str, per_token: float = -1.0, *, tokens: int = 10, ended: bool = True) -> Sample:
    return Sample(text, tokens, ended, per_token * tokens)


class Script:
    """Written samples in place of a model; remembers every call."""

    def __init__(self, *questions: Sequence[Sample]) -> None:
        self.questions = questions
        self.asked: list[list[Row]] = []

    def __call__(self, rows: Sequence[Row]) -> list[Reply]:
        self.asked.append(list(rows))
        return [Reply(self.questions[number][j], 50 + number, 1.0 + j) for number, j in rows]

    def solve(self, how: Recipe) -> list[Solution]:
        return solve(len(self.questions), how, self)


# ------------------------------------------------------------------------------------------------------- deciding


def test_two_samples_that_agree_win_and_a_tie_goes_to_the_likelier_one_by_token() -> None:
    assert choose([said("12", -2.0), said("It is 12.", -3.0)], "vote") == "12"
    short, long = said("11", -1.0, tokens=2), said("It is 12.", -0.5, tokens=20)
    assert short.log_probability > long.log_probability, "the sum prefers the short one"
    assert choose([short, long], "vote") == choose([long, short], "vote") == "12"
    assert choose([said("11", -0.4), said("12", -0.5)], "vote") == "11"


def test_the_vote_counts_equal_numbers_however_they_are_written() -> None:
    samples = [said("12.0 apples", -5), said("Answer: 12", -5), said("1,200", -0.1)]
    assert choose(samples, "vote") == "12"


def test_verifiers_disagree() -> None:
    samples = [said("3 + 4 = 8", -0.5), said("3 + 4 = 7", -1.0), said("3 + 4 = 8", -0.6), said("It is 9", -0.1)]
    assert [choose(samples, name) for name in ("vote", "log-likelihood", "checker")] == ["8", "9", "7"]
    assert standings(samples, "checker") == {"8": (0, 0, -0.5), "7": (1, 0, -1.0), "9": (0, 1, -0.1)}
    wrong = [said("3 + 4 = 8", -0.1), said("3 + 4 = 8", -0.1), said("It is 9", -5.0)]
    assert choose(wrong, "checker") == "9", "one without arithmetic before two with a wrong one"
    assert choose([said("3 + 4 = 8", -0.9), said("3 + 5 = 9", -0.3)], "checker") == "9", "none holds: the likelier one"


def test_samples_without_an_answer_do_not_vote() -> None:
    assert choose([said("no idea", -0.1), said("12", -9.0)], "vote") == "12"
    assert choose([said("no idea")], "vote") is None
    assert choose([said("12", ended=False), said("13", -9.0)], "vote") == "13", "cut off before it came to its answer"


def test_log_likelihood_of_two_is_the_vote_with_its_tie_break() -> None:
    space = ReasoningBudget.space
    start = space.feasible({"samples": 2})[0]
    assert Recipe.of({**start, "verifier": "log-likelihood"}) == Recipe.of(start)
    assert Recipe.of({**start, "verifier": "checker"}) != Recipe.of(start)
    four = space.feasible({"samples": 4})[0]
    assert Recipe.of({**four, "verifier": "log-likelihood"}) != Recipe.of(four)


# ------------------------------------------------------------------------------------------------------- stopping


def test_stopping_early_really_stops_and_counts_what_it_asked_for() -> None:
    agree = [said("12")] * 8
    split = [said(text) for text in ("1", "2", "3", "4", "5", "6", "7", "8")]
    two_of_three = [said(text) for text in ("1", "2", "1", "9", "9", "9", "9", "9")]
    script = Script(agree, split, two_of_three)
    found = script.solve(recipe(samples=8, threshold=0.67))
    assert [len(s.samples) for s in found] == [2, 8, 3]
    assert [s.calls for s in found] == [1, 7, 2], "a pair, then one at a time"
    assert [s.prompt_tokens for s in found] == [50, 7 * 51, 2 * 52], "every call reads the prompt"
    assert script.asked[0] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert script.asked[1] == [(1, 2), (2, 2)]
    assert script.asked[2:] == [[(1, j)] for j in range(3, 8)]
    assert [s.seconds for s in found] == [2.0, sum(range(2, 9)), 5.0], "the slowest sample of each call"
    assert [s.answer for s in found] == ["12", "1", "1"]


def test_without_stopping_all_samples_are_one_call() -> None:
    script = Script([said("12")] * 4)
    (found,) = script.solve(recipe())
    assert script.asked == [[(0, 0), (0, 1), (0, 2), (0, 3)]]
    assert (found.calls, len(found.samples), found.prompt_tokens, found.seconds) == (1, 4, 50, 4.0)


@pytest.mark.parametrize(
    ("answers", "samples", "threshold", "stops"),
    [
        ("1", 4, 0.5, False),  # two samples at least
        ("12", 4, 0.5, True),
        ("12", 4, 0.67, False),
        ("121", 4, 0.67, True),  # two of three
        ("121", 4, 0.75, False),
        ("1211", 8, 0.75, True),
        ("123", 4, 0.5, False),
        ("11123", 8, 0.75, False),  # 3 against 1, and 3 to come: a tie is possible
        ("1111223", 8, 0.75, True),  # 4 against 2, and 1 to come: not even a tie
        ("111223", 8, 0.75, False),
        ("11", 8, 0.75, True),
        ("1234", 4, None, True),  # all taken
        ("111", 4, None, False),  # not asked to stop
    ],
)
def test_when_a_vote_is_settled(answers: str, samples: int, threshold: float | None, stops: bool) -> None:
    assert settled([said(a) for a in answers], recipe(samples=samples, threshold=threshold)) is stops


def test_no_answer_settles_nothing() -> None:
    assert not settled([said("no idea")] * 3, recipe(samples=4, threshold=0.5))
    assert not settled([said("no idea"), said("1"), said("no idea")], recipe(samples=8, threshold=0.5))


def test_a_single_sample_can_always_be_likelier_but_not_outvote() -> None:
    lead = [said("1", -0.1)] * 3 + [said("2", -0.2), said("3", -0.2)]
    assert not settled(lead, recipe(samples=6, threshold=0.75, verifier="log-likelihood"))
    assert settled(lead, recipe(samples=6, threshold=0.75))


@given(
    st.lists(st.sampled_from(["1", "2", "3", "no idea"]), min_size=8, max_size=8),
    st.sampled_from([4, 8]),
    st.sampled_from([0.75, 2.0]),
    st.lists(st.floats(-5, -0.01), min_size=8, max_size=8),
)
@settings(deadline=None, max_examples=60)
def test_what_cannot_be_overtaken_is_what_all_samples_would_have_chosen(
    texts: list[str], samples: int, threshold: float, likelihoods: list[float]
) -> None:
    """At a threshold that no share meets, only a lead that cannot be overtaken stops early."""
    drawn = [said(text, p) for text, p in zip(texts, likelihoods, strict=True)]
    early = Script(drawn).solve(recipe(samples=samples, threshold=threshold))[0]
    late = Script(drawn).solve(recipe(samples=samples))[0]
    if threshold > 1 or len(early.samples) == samples:
        assert early.answer == late.answer
    assert early.samples == late.samples[: len(early.samples)], "the same samples, fewer of them"


def test_recipes_are_made_of_genomes() -> None:
    space = ReasoningBudget.space
    assert Recipe.of(space.baseline()) == Recipe(1, 48, None, 0.0, "direct", "vote")
    several, repairs = space.feasible({"samples": 4, "stop.threshold": 0.67})
    assert repairs == ["samples differ"]
    assert Recipe.of(several) == Recipe(4, 48, 0.67, 0.7, "direct", "vote")
    assert "stop.threshold" not in space.feasible({"samples": 2})[0], "of two samples nothing can be saved"
    with pytest.raises(UserError):
        space.resolve({"samples": 3})


# ------------------------------------------------------------------------------------------------------- counting


def test_tokens_calls_and_cost_add_up() -> None:
    one = Solution([said("12", tokens=3), said("13", tokens=5)], calls=2, prompt_tokens=10, seconds=4.0, answer="12")
    two = Solution([said("4", tokens=7)], calls=1, prompt_tokens=5, seconds=1.0, answer="5")
    found = score([one, two], ["12", "4"], ["sums", "gsm8k"], Prices(10, 40)).metrics
    assert found["prompt_tokens"] == (2 * 5 + 5) / 2
    assert found["generated_tokens"] == (3 + 5 + 7) / 2
    assert found["samples_used"] == found["calls"] == 1.5
    assert found["cost_microdollars"] == pytest.approx((15 * 0.10 + 15 * 0.40) / 2)
    assert found["tokens_per_correct_answer"] == 15
    assert (found["latency_p50_s"], found["latency_p95_s"]) == (2.5, pytest.approx(1 + 0.95 * 3))
    assert (found["accuracy"], found["accuracy_sums"], found["accuracy_gsm8k"]) == (0.5, 1.0, 0.0)
    assert found["any_sample_right"] == 1.0


def test_no_correct_answer_has_no_tokens_per_correct_answer() -> None:
    found = score([Solution([said("1")], 1, 5, 1.0, "1")], ["2"], ["sums"], Prices(1, 1))
    assert "tokens_per_correct_answer" not in found.metrics
    assert all(math.isfinite(value) for value in found.metrics.values())
    assert found.units == [0.0]


def test_the_end_token_counts_and_the_padding_behind_it_does_not() -> None:
    end = 2  # and padding
    assert completion_length([5, 6, end, end, end], {end}) == 3
    assert completion_length([end, end], {end}) == 1
    assert completion_length([5, 6, 7], {end}) == 3
    assert completion_length([5, 9, end], {end, 9}) == 2


# ------------------------------------------------------------------------------------------------------ the model


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """The micro language model: its words are Shakespeare's, its mechanics those of any causal model."""
    made, tokenizer = choose_checkpoint(LANGUAGE_MODELS, {"micro": 1}).load("cpu")
    return LanguageModel(made.requires_grad_(False), tokenizer, "cpu", 64)


def prompts_of(model: LanguageModel, questions: Sequence[str] = QUESTIONS) -> list[list[int]]:
    return [chat_prompt(model.tokenizer, question, "direct") for question in questions]


def test_prompts_are_in_the_chat_template(model: LanguageModel) -> None:
    text = model.tokenizer.decode(chat_prompt(model.tokenizer, "What is 7 plus 5?", "step-by-step"))
    assert text == (
        "<|im_start|>user\n" + PROMPTS["step-by-step"].format(question="What is 7 plus 5?") + "<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert len({style.format(question="q") for style in PROMPTS.values()}) == len(PROMPTS)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    class Plain:
        chat_template = None

    with pytest.raises(UserError, match="no chat template"):
        chat_prompt(Plain(), "What is 7 plus 5?", "direct")


def test_greedy_completions_are_those_of_a_loop_without_cache_and_padding(model: LanguageModel) -> None:
    prompts = prompts_of(model)
    assert len({len(prompt) for prompt in prompts}) > 1, "so that some rows are padded"
    for prompt, reply in zip(prompts, model.complete(prompts, None, tokens=12, temperature=0.0), strict=True):
        tokens, total = list(prompt), 0.0
        with torch.no_grad():
            while len(tokens) < len(prompt) + 12 and (tokens == prompt or tokens[-1] not in model.ends):
                log_probability = model.model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1)
                tokens.append(int(log_probability.argmax()))
                total += float(log_probability.max())
        assert reply.sample.tokens == len(tokens) - len(prompt)
        assert reply.sample.text == model.tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True)
        assert reply.sample.log_probability == pytest.approx(total, abs=1e-3)
        assert reply.prompt_tokens == len(prompt)
        assert reply.seconds > 0


def test_rows_that_end_early_are_counted_to_their_end(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is the end token here, as in SmolLM2: a row's count must not take the padding behind its end."""
    assert model.tokenizer.pad_token_id in model.ends
    counts = (1, 3, 6)
    end = next(iter(model.ends))

    def plan(logits: torch.Tensor, uniform: Any, at: int, temperature: float) -> torch.Tensor:
        return torch.tensor([[end if at + 1 == count else 100 + at] for count in counts])

    monkeypatch.setattr("auto_research.evolve.workflows._reasoning.next_token", plan)
    replies = model.complete(prompts_of(model), None, tokens=10, temperature=0.0)
    order = sorted(range(3), key=lambda row: (len(prompts_of(model)[row]), prompts_of(model)[row]))
    assert [replies[row].sample.tokens for row in order] == list(counts)
    assert all(reply.sample.ended for reply in replies)
    short, _, long = (replies[row].seconds for row in order)
    assert short < long, "a row's time ends with its last token"


def test_a_completion_is_cut_off_at_its_limit(model: LanguageModel) -> None:
    (reply,) = model.complete(prompts_of(model)[:1], None, tokens=3, temperature=0.0)
    if not reply.sample.ended:
        assert reply.sample.tokens == 3
        assert reply.sample.answer is None
    longer = model.complete(prompts_of(model)[:1], None, tokens=6, temperature=0.0)[0]
    assert longer.sample.text.startswith(reply.sample.text.rstrip("\ufffd"))


def test_samples_depend_on_seed_question_and_number_alone(model: LanguageModel) -> None:
    """Whatever else is in the batch, however large it is, and however many samples there are."""
    how = recipe(samples=3, max_new_tokens=8)
    together = asking(model, QUESTIONS, how, seed=1)([(i, j) for i in range(3) for j in range(3)])
    alone = asking(replace(model, batch=1), QUESTIONS, how, seed=1)([(2, 1), (0, 2)])
    assert [reply.sample.text for reply in alone] == [together[7].sample.text, together[2].sample.text]
    assert alone[0].sample.log_probability == pytest.approx(together[7].sample.log_probability, abs=1e-3)
    other = asking(model, QUESTIONS, how, seed=2)([(0, 0), (1, 0), (2, 0)])
    assert [r.sample.text for r in other] != [together[row].sample.text for row in (0, 3, 6)]
    assert len({reply.sample.text for reply in together}) > 3, "samples differ"


def test_stopping_saves_tokens_and_calls_of_the_model(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that the model really generated are the samples that were counted."""
    generated: list[int] = []
    inner = model.model.generate

    def generate(**given: Any) -> Any:
        generated.append(len(given["input_ids"]))
        return inner(**given)

    monkeypatch.setattr(model.model, "generate", generate)
    monkeypatch.setattr(Sample, "answer", property(lambda sample: "12"))  # all agree
    late = solve(2, recipe(max_new_tokens=4), asking(model, QUESTIONS[:2], recipe(max_new_tokens=4), 0))
    assert generated == [8]
    generated.clear()
    stopping = recipe(max_new_tokens=4, threshold=0.67)
    early = solve(2, stopping, asking(model, QUESTIONS[:2], stopping, 0))
    assert generated == [4]
    assert sum(len(s.samples) for s in early) == sum(generated)
    tokens = [sum(sample.tokens for s in found for sample in s.samples) for found in (early, late)]
    assert tokens[0] < tokens[1]
    assert [s.samples for s in early] == [s.samples[:2] for s in late]


def test_drawn_tokens_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, float("-inf")])
    drawn, temperature = 4_000, 0.7
    uniform = torch.from_numpy(np.stack([uniforms(0, "q", j, 1) for j in range(drawn)]))
    tokens = next_token(logits.expand(drawn, -1), uniform, 0, temperature)[:, 0]
    expected = (logits / temperature).softmax(-1)
    found = tokens.bincount(minlength=5) / drawn
    assert ((found - expected).abs() <= 4 * (expected * (1 - expected) / drawn).sqrt()).all()
    assert found[4] == 0
    extremes = torch.tensor([[1.0], [float(np.finfo(np.float32).tiny)]])
    assert next_token(torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]] * 2), extremes, 0, 1.0).tolist() == [
        [2],
        [1],
    ]


def test_uniform_numbers_are_a_function_of_seed_question_and_sample() -> None:
    row = uniforms(1, "q", 0, 5)
    assert row.dtype == np.float32
    assert ((row > 0) & (row <= 1)).all()
    assert np.array_equal(uniforms(1, "q", 0, 9)[:5], row), "a longer completion begins like a shorter one"
    others = [uniforms(2, "q", 0, 5), uniforms(1, "r", 0, 5), uniforms(1, "q", 1, 5)]
    assert not any(np.array_equal(row, other) for other in others)


def test_log_probabilities_are_the_models_own_not_those_of_the_temperature() -> None:
    scores = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 0.0]])
    draw = Draw(torch.tensor([[0.5], [0.5]]), temperature=0.1)
    left = draw(torch.zeros(2, 1, dtype=torch.long), scores)
    assert left.argmax(-1).tolist() == [1, 0]
    assert left.isinf().sum(-1).tolist() == [2, 2]
    assert draw.log_probabilities[0].tolist() == pytest.approx(scores.log_softmax(-1).max(-1).values.tolist())


# --------------------------------------------------------------------------------------------------- the workflow

MICRO = {"sums": 5, "arithmetic": 3, "gsm8k": 2, "batch": 8, "micro": 1}


@pytest.fixture(scope="module")
def budget() -> ReasoningBudget:
    made = workflow("reasoning-budget")
    assert isinstance(made, ReasoningBudget)
    return made


@pytest.fixture(scope="module")
def sizes(budget: ReasoningBudget) -> Sizes:
    return Sizes("smoke", {**budget.sizes("smoke").values, **MICRO})


@pytest.fixture(scope="module")
def data(budget: ReasoningBudget, sizes: Sizes) -> Data:
    return budget.load(sizes, None)


def unwatched(step: int, loss: float) -> None:
    """A `Progress` that no cell watches."""


def solver(budget: ReasoningBudget, data: Data, sizes: Sizes, changes: Genome, seed: int = 0) -> Solver:
    genome = budget.space.feasible({"max_new_tokens": 24, **changes})[0]
    return budget.train(genome, data, seed, sizes, "cpu", unwatched)


def test_questions_are_in_words() -> None:
    assert in_words(expression((7, 5), "+")) == "What is 7 plus 5?"
    assert in_words(expression((7, 5, 2), "-*")) == "What is 7 minus 5 times 2?"
    assert is_sum(expression((2, 20), "+"))
    for other in ((1, 5), "+"), ((2, 21), "+"), ((5, 6), "-"), ((5, 6, 7), "++"):
        assert not is_sum(expression(*other))


def test_smoke_problems_are_one_step_sums_of_two_numbers_from_2_to_20(budget: ReasoningBudget) -> None:
    sizes = Sizes("smoke", {**budget.sizes("smoke").values, "micro": 1})
    data = budget.load(sizes, None)
    held = data.parts.validation
    assert len(held) == data.examples == 16
    for question, answer in zip(held.questions, held.answers, strict=True):
        one, two = map(int, question.removeprefix("What is ").removesuffix("?").split(" plus "))
        assert 2 <= one <= 20
        assert 2 <= two <= 20
        assert answer == str(one + two)


def test_parts_share_nothing_and_validation_of_gsm8k_is_carved_from_its_training_file(
    budget: ReasoningBudget, sizes: Sizes, data: Data
) -> None:
    from auto_research.data import catalogue

    shared = {name: count for name, count in data.hygiene.items() if "share" in name}
    assert len(shared) == 6
    assert set(shared.values()) == {0}
    held = data.parts.validation
    assert held.sources == ["sums"] * 5 + ["arithmetic"] * 3 + ["gsm8k"] * 2
    published = catalogue.load("gsm8k")
    carved = {problem.question: problem.answer for problem in published["train"][-500:]}
    for question, answer in list(zip(held.questions, held.answers, strict=True))[-2:]:
        assert carved[question] == answer


def test_a_standard_run_is_large_enough(budget: ReasoningBudget) -> None:
    sizes = Sizes("standard", {**budget.sizes("standard").values, "micro": 1})
    data = budget.load(sizes, None)
    counts = [data.parts.validation.sources.count(source) for source in ("sums", "arithmetic", "gsm8k")]
    assert counts == [28, 122, 100]
    assert data.examples == 250
    test = budget._split(sizes, None)["test"]
    assert [sum(item.source == s for item in test) for s in ("sums", "arithmetic", "gsm8k")] == counts
    assert all(n == 0 for name, n in data.hygiene.items() if "share" in name)


def test_test_part_is_sealed_and_a_solver_sees_no_answer(budget: ReasoningBudget, sizes: Sizes, data: Data) -> None:
    with pytest.raises(SealedTest):
        budget.load_test(sizes, None)
    asked: list[Any] = []

    class Watched(Solver):
        def __call__(self, questions: Sequence[str]) -> list[Solution]:
            asked.extend(questions)
            return [Solution([said(answer)], 1, 5, 1.0, answer) for answer in data.parts.validation.answers]

    made = solver(budget, data, sizes, {})
    found = budget.validate(Watched(made.recipe, 0, made.model, {}), data, sizes, "cpu")
    assert asked == data.parts.validation.questions
    assert found.metrics["accuracy"] == 1.0


def test_subsets_are_taken_in_the_order_of_hashes_whatever_their_size(budget: ReasoningBudget, sizes: Sizes) -> None:
    few = budget._split(sizes, None)["validation"]
    more = budget._split(Sizes("smoke", {**sizes.values, "sums": 9}), None)["validation"]
    assert [i for i in more if i.source == "sums"][:5] == [i for i in few if i.source == "sums"]
    assert sorted(few[:5], key=Item.place) == few[:5]


def test_floors(budget: ReasoningBudget, sizes: Sizes, data: Data) -> None:
    floors = budget.floors(data, sizes)
    held = data.parts.validation
    assert floors["no answer"] == 0.0
    usual = [data.parts.usual[source] for source in held.sources]
    assert floors["most frequent training answer"] == np.mean([a == b for a, b in zip(usual, held.answers)])


def test_the_same_seed_gives_the_same_answers_and_batches_change_nothing(
    budget: ReasoningBudget, sizes: Sizes, data: Data
) -> None:
    held = data.parts.validation
    few = replace(data, parts=replace(data.parts, validation=Problems(*(part[:3] for part in vars(held).values()))))

    def figures(changes: Genome, seed: int = 0, **override: int) -> dict[str, float]:
        some = Sizes("smoke", {**sizes.values, **override})
        found = budget.validate(solver(budget, few, some, changes, seed), few, some, "cpu").metrics
        return {name: value for name, value in found.items() if "latency" not in name}

    first = figures({"samples": 2})
    assert figures({"samples": 2}) == first
    assert figures({"samples": 2}, batch=4) == first
    assert figures({"samples": 2}, seed=1) != first
    greedy = figures({})
    assert figures({}, seed=1) == greedy, "greedy decoding does not depend on the seed"


def test_what_was_stored_is_what_is_tested(budget: ReasoningBudget, sizes: Sizes, data: Data, tmp_path: Path) -> None:
    genome = budget.space.feasible({"samples": 4, "stop.threshold": 0.67, "max_new_tokens": 24})[0]
    made = budget.train(genome, data, 7, sizes, "cpu", unwatched)
    budget.save(made, tmp_path)
    again = budget.restore(genome, data, tmp_path, sizes, "cpu")
    assert (again.recipe, again.seed) == (made.recipe, 7)
    one, two = (found(QUESTIONS[:2]) for found in (made, again))
    assert [s.samples for s in one] == [s.samples for s in two]
    with pytest.raises(UserError, match="not that of its candidate"):
        budget.restore(budget.space.baseline(), data, tmp_path, sizes, "cpu")
    (tmp_path / "recipe.json").write_text((tmp_path / "recipe.json").read_text().replace("checkpoint micro", "other"))
    with pytest.raises(UserError, match="checkpoint changed"):
        budget.restore(genome, data, tmp_path, sizes, "cpu")


def test_every_axis_value_has_an_effect(budget: ReasoningBudget, sizes: Sizes, data: Data) -> None:
    found = genomes.effects(budget, sizes, data)
    assert {effect.axis for effect in found} == {axis.name for axis in budget.space.axes}
    assert not [effect.text for effect in found if not effect.holds]


def test_the_script_settles_differently_by_threshold() -> None:
    used = {
        threshold: [len(s.samples) for s in solve(*scripted(recipe(threshold=threshold)))]
        for threshold in (None, 0.5, 0.67, 0.75)
    }
    assert {threshold: counts[0] for threshold, counts in used.items()} == {None: 4, 0.5: 2, 0.67: 3, 0.75: 4}


def test_cost_grows_with_samples_and_tokens(budget: ReasoningBudget, sizes: Sizes, data: Data) -> None:
    def cost(changes: Genome) -> Any:
        return budget.cost(budget.space.feasible(changes)[0], sizes, data)

    base = cost({})
    assert base.flops < cost({"samples": 4}).flops < 4 * base.flops, "the prompt is read once"
    assert cost({"samples": 4, "stop.threshold": 0.5}).flops > cost({"samples": 4}).flops, "or once a call"
    assert cost({"max_new_tokens": 160}).flops > base.flops
    assert base.parameters == sum(p.numel() for p in solver(budget, data, sizes, {}).model.model.parameters())
    assert base.memory_bytes > 4 * base.parameters
    several = budget.space.feasible({"samples": 4})[0]
    times = cost({"samples": 4}).flops / base.flops
    assert budget.match(several, base, sizes, data) == f"up to {times:.3g} times the operations"
    assert budget.match(budget.space.baseline(), base, sizes, data) == ""


def test_limits_are_those_of_the_sizes_and_prices_decide_the_cost(
    budget: ReasoningBudget, sizes: Sizes, data: Data
) -> None:
    assert budget.limits(sizes) == {"cost_microdollars": 200.0, "latency_p95_s": 600.0}
    dear = Sizes("smoke", {**sizes.values, "output_price_cents": 400})
    made = solver(budget, data, sizes, {})
    cheap, costly = (budget.validate(made, data, some, "cpu").metrics for some in (sizes, dear))
    more = cheap["generated_tokens"] * 3.6
    assert costly["cost_microdollars"] - cheap["cost_microdollars"] == pytest.approx(more)


def test_the_smoke_plan_spends_more_and_stops_early(budget: ReasoningBudget) -> None:
    plan = budget.smoke_plan()
    assert budget.start("smoke")["samples"] == 1
    assert [genome["samples"] for genome in plan] == [2, 4, 4]
    assert [genome.get("stop.threshold") for genome in plan] == [None, "off", 0.67]
    assert [budget.space.feasible(genome)[1] for genome in plan] == [["samples differ"]] * 3
    with pytest.raises(Infeasible):
        replace_repairs(budget.space).feasible({**plan[0], "temperature": 0.0})


def replace_repairs(space: Any) -> Any:
    """The same space whose constraints have no repair."""
    return replace(space, constraints=tuple(replace(c, repair=None) for c in space.constraints))


def a_trial(id: str, genome: Genome, units: list[list[float]], tokens: float, parent: Trial | None = None) -> Trial:
    cells = [
        CellResult(
            cell=f"{id}-{seed}", candidate=id, seed=seed, role="search", state="completed", units=values,
            metrics={"accuracy": float(np.mean(values)), "generated_tokens": tokens, "samples_used": 2.5},
        )
        for seed, values in enumerate(units)
    ]  # fmt: skip
    parents = [parent.candidate.id] if parent else []
    candidate = Candidate(id=id, generation=0, origin="baseline", genome=genome, parents=parents)
    return as_trial(candidate, cells, range(len(units)), ReasoningBudget(), z=1.0, parent=parent)


def test_the_summary_says_when_more_budget_made_it_worse() -> None:
    space = ReasoningBudget.space
    two, four, stop = (
        space.feasible(changes)[0]
        for changes in ({"samples": 2}, {"samples": 4}, {"samples": 4, "stop.threshold": 0.67})
    )
    base = a_trial("baseline", space.baseline(), [[1, 1, 0, 0]], 10.0)
    worse = a_trial("g1-1", two, [[1, 0, 0, 0]], 20.0, base)
    found = summarise([base, worse], "accuracy")
    assert found["sentence"] == (
        "The baseline has accuracy 0.500 at 10.0 tokens a question; more budget made it worse in g1-1 0.250 at 20.0 "
        "(one seed, which cannot tell it from noise)."
    )
    rows = {row["candidate"]: row for row in found["recipes"]}
    assert rows["g1-1"]["gain"] == -0.25
    assert rows["g1-1"]["se_examples"] == pytest.approx(np.std([0, -1, 0, 0]) / 2, rel=0.05)
    assert rows["g1-1"]["recipe"] == "2 at temperature 0.7, vote, 48 tokens"
    full, early = a_trial("g1-2", four, [[1, 1, 1, 0]], 40.0, base), a_trial("g1-3", stop, [[1, 1, 0, 0]], 25.0, base)
    sentence = summarise([base, worse, full, early], "accuracy")["sentence"]
    assert "made it worse in g1-1 0.250 at 20.0" in sentence
    assert "more budget helped in g1-2 0.750 at 40.0" in sentence
    assert sentence.endswith(
        "Stopping early, g1-3 took 2.50 of 4 samples and 25.0 tokens where g1-2 took 40.0, "
        "accuracy 0.500 against 0.750."
    )


def test_the_summary_names_what_seeds_tell_from_noise() -> None:
    space = ReasoningBudget.space
    base = a_trial("baseline", space.baseline(), [[1, 1, 0, 0]] * 3, 10.0)
    two = space.feasible({"samples": 2})[0]
    sure = a_trial("g1-1", two, [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]], 20.0, base)
    assert "(beyond noise: g1-1)" in summarise([base, sure], "accuracy")["sentence"]
    unsure = a_trial("g1-1", two, [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], 20.0, base)
    assert "(none of it beyond noise)" in summarise([base, unsure], "accuracy")["sentence"]
    same = a_trial("g1-1", two, [[1, 1, 0, 0]] * 3, 20.0, base)
    assert "more budget changed nothing in g1-1" in summarise([base, same], "accuracy")["sentence"]


def test_a_run_on_the_virtual_card_has_no_finding(budget: ReasoningBudget, sizes: Sizes) -> None:
    """The whole life of a cell and of the finaliser on `cuda`: load, sample with early stopping, store, restore."""
    from auto_research.rehearsal import rehearse

    fresh = ReasoningBudget()
    few = Sizes("smoke", {**sizes.values, "sums": 1, "arithmetic": 0, "gsm8k": 0})
    data = fresh.load(few, None)
    genome = fresh.space.feasible({"samples": 4, "stop.threshold": 0.67, "max_new_tokens": 24})[0]
    on_cpu = fresh.validate(fresh.train(genome, data, 0, few, "cpu", unwatched), data, few, "cpu")
    with rehearse(card="a30", keep_going=True) as report:
        made = fresh.train(genome, data, 0, few, "cuda", unwatched)
        on_card = fresh.validate(made, data, few, "cuda")
        assert next(made.model.model.parameters()).device.type == "cuda"
    assert [finding.text() for finding in report.findings] == []
    assert on_card.metrics["generated_tokens"] == on_cpu.metrics["generated_tokens"]


@pytest.mark.slow
@pytest.mark.skipif(not available("smollm2-135m"), reason="SmolLM2-135M-Instruct is not on this machine")
def test_the_real_checkpoint_answers_some_one_step_sums() -> None:
    """Greedy, in its chat template: above zero and above the floor; prompts begin with its system message."""
    budget = ReasoningBudget()
    sizes = budget.sizes("smoke")
    data = budget.load(sizes, None)
    assert data.stand_in == ""
    assert list(data.checkpoints) in (["smollm2-135m (Q4_1 dequantised)"], ["smollm2-135m"])
    made = budget.train(budget.start("smoke"), data, 0, sizes, "cpu", unwatched)
    prompt = made.model.tokenizer.decode(chat_prompt(made.model.tokenizer, "What is 7 plus 5?", "direct"))
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("<|im_start|>assistant\n")
    found = budget.validate(made, data, sizes, "cpu").metrics
    assert found["accuracy"] > max(budget.floors(data, sizes).values())
    assert found["answered"] > 0.9
    assert 2 < found["generated_tokens"] < 24
