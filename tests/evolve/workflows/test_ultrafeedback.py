"""Preference optimisation on UltraFeedback: the subset, TRL's losses beside ours, held-out scores, training."""

from __future__ import annotations

import functools
import gc
import json
import math
import random
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from torch import Tensor
from torch.nn import functional as F

from auto_research.data.preferences import Message, Pair, own_pairs
from auto_research.evolve import genome as genomes
from auto_research.evolve.cells import CHECKPOINTS
from auto_research.evolve.records import Candidate, CellResult, Trial
from auto_research.evolve.workflow import Data, SealedTest, Sizes
from auto_research.evolve.workflows import _preferences as preferences
from auto_research.evolve.workflows import _trl
from auto_research.evolve.workflows._preferences import (
    Artefact,
    Example,
    Likelihoods,
    Source,
    Trace,
    encode,
    fit_prompt,
    gather,
    interval,
    measure,
    own_score,
    part_digest,
    plan_of,
    preferred,
    scores_of,
    select,
    train,
    trainer_of,
)
from auto_research.evolve.workflows.ultrafeedback import REFERENCED, UltraFeedback
from auto_research.layers import preference
from auto_research.runtime.errors import UserError

LOSSES = ("dpo", "ipo", "orpo", "simpo", "sft")
SMALL = {"steps": 2, "micro_batch": 1, "accumulate": 2, "prompt_tokens": 64, "answer_tokens": 64, "micro": 1}


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> Any:
    """Every training collects garbage; what the imports made need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_reports_between_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many there are depends on how busy the machine is."""
    monkeypatch.setattr(preferences, "BEAT_S", math.inf)


@pytest.fixture(scope="module")
def workflow() -> UltraFeedback:
    return UltraFeedback()


@pytest.fixture(scope="module")
def sizes(workflow: UltraFeedback) -> Sizes:
    return Sizes("smoke", {**workflow.sizes("smoke").values, **SMALL})


@pytest.fixture(scope="module")
def data(workflow: UltraFeedback, sizes: Sizes, nowhere: None) -> Data:
    return workflow.load(sizes, None)


@pytest.fixture(scope="module")
def nowhere() -> Any:
    """No preference pairs in this machine's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preferences.catalogue, "cached_path", lambda entry: Path("/nowhere"))
        yield


@pytest.fixture(scope="module")
def micro(data: Data) -> Any:
    """The tokenizer of the micro checkpoint, with SmolLM2's chat form."""
    return data.parts.checkpoint.tokenizer()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return preferences._byte_tokenizer()


def example(tokenizer: Any, prompt: str, chosen: str, rejected: str) -> Example:
    texts = ("<s>" + prompt, chosen + "</s>", rejected + "</s>")
    ids = [tuple(tokenizer(text)["input_ids"]) for text in texts]
    return Example(prompt + chosen, prompt, *texts, *ids, cut=False)


@pytest.fixture(scope="module")
def examples(tokenizer: Any) -> list[Example]:
    return [
        example(tokenizer, "why?", "because of it", "no"),
        example(tokenizer, "and where to", "up", "down the long road"),
        example(tokenizer, "sum", "four", "five"),
        example(tokenizer, "x", "a longer answer here", "an answer"),
    ]


@pytest.fixture
def load(tokenizer: Any) -> preferences.Load:
    return functools.partial(preferences._tiny, tokenizer)


def genome(workflow: UltraFeedback, loss: str, **changes: Any) -> dict[str, Any]:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return workflow.space.resolve({"post.loss": loss, **named})


def shaken(model: Any, seed: int = 3) -> Any:
    """The model with other weights."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return model


def unwatched(step: int, loss: float) -> None:
    """A `Progress` for training that no cell watches."""


# ---------------------------------------------------------------------------------------------------------- subset


def pair(question: str, good: str = "Yes.", bad: str = "No.", scores: tuple[float, float] | None = None) -> Pair:
    return Pair((Message("user", question),), good, bad, scores)


def many(count: int = 300) -> list[Pair]:
    """Pairs of which each ninth has the prompt of the one before it, written differently."""
    return [
        pair(f"QUESTION {i - 1}" if i % 9 == 8 else f"Question  {i}", f"Good {i}.", f"Bad {i}.") for i in range(count)
    ]


def bounded(sizes: Sizes, **changes: int) -> Sizes:
    return Sizes("smoke", {**sizes.values, **changes})


def test_three_hundred_pairs_are_divided_by_prompt(micro: Any, sizes: Sizes) -> None:
    wide = bounded(sizes, pairs=5000, held_out=500, test_pairs=1000)
    found = select(Source("many", many(), None, ""), micro, wide)
    assert len(found.parts["validation"]) == len(found.parts["test"]) == 50
    assert 198 <= len(found.parts["train"]) <= 200, "a second pair of a held-out prompt trains nobody"
    keys = {name: {one.key for one in part} for name, part in found.parts.items()}
    assert not keys["train"] & keys["validation"]
    assert not keys["train"] & keys["test"]
    assert not keys["validation"] & keys["test"]
    assert len({one.key for part in found.parts.values() for one in part}) < 290, "some prompts have two pairs"


@pytest.mark.parametrize("seed", [0, 1])
def test_the_subset_depends_on_the_pairs_alone(seed: int, micro: Any, sizes: Sizes) -> None:
    wanted = select(Source("many", many(), None, ""), micro, sizes).ids
    assert {name: len(ids) for name, ids in wanted.items()} == {"train": 16, "validation": 16, "test": 8}
    pairs = many()
    random.Random(seed).shuffle(pairs)
    assert select(Source("other", pairs, None, ""), micro, sizes).ids == wanted
    assert part_digest(wanted["train"]) != part_digest(list(reversed(wanted["train"])))


def test_what_says_nothing_or_does_not_fit_is_left_out_and_counted(micro: Any, sizes: Sizes) -> None:
    bad = [
        pair("tie", scores=(3.0, 3.0)),
        pair("turned", scores=(1.0, 3.0)),
        pair("same", "Yes. ", " Yes."),
        pair("same spaces", "Yes  it is", "Yes it is"),
        pair("nothing", ""),
        pair("long", "word " * 200),
        pair("long too", bad="word " * 200),
        pair("alike at first", "word " * 200 + "a", "word " * 200 + "b"),
        *many(2),
    ]
    found = select(Source("some", [*many(60), *bad], None, ""), micro, bounded(sizes, pairs=500))
    reasons = {"tie": 1, "reversed scores": 1, "identical": 2, "empty": 1, "answer too long": 3}
    assert found.left_out == reasons | {"equal to another pair": 2}
    assert found.looked_at == 70
    assert not {one.id for one in bad[:-2]} & {id for ids in found.ids.values() for id in ids}


def test_the_published_test_part_gives_the_test_pairs(micro: Any, sizes: Sizes) -> None:
    test = [pair(f"Test {i}") for i in range(40)]
    again = [pair(f"test  {i}", "Other.", "Answers.") for i in range(0, 40, 2)]
    found = select(Source("both", [*many(100), *again], test, ""), micro, sizes)
    assert {one.id for one in found.parts["test"]} <= {one.id for one in test}
    assert found.left_out["prompt of the test part"] > 0
    wide = bounded(sizes, pairs=5000, held_out=20, test_pairs=2000)
    everything = select(Source("both", [*many(100), *again], test, ""), micro, wide)
    assert len(everything.parts["test"]) == 40
    assert everything.left_out == {"prompt of the test part": 20}
    assert len(everything.parts["validation"]) == 16, "a sixth of what is usable"
    assert len(everything.parts["train"]) > 80
    prompts = {one.key for one in test}
    assert not prompts & {one.key for name in ("train", "validation") for one in everything.parts[name]}


def test_prompts_that_are_alike_once_cut_are_one(micro: Any, sizes: Sizes) -> None:
    ends = [pair(f"Number {i}: {'very ' * 60} long question", f"Good {i}.", f"Bad {i}.") for i in range(12)]
    found = select(Source("some", [*many(60), *ends], None, ""), micro, bounded(sizes, pairs=500))
    assert found.left_out == {"prompt like another once cut": 11}


def test_too_few_pairs_are_one_sentence(micro: Any, sizes: Sizes) -> None:
    long = [pair(f"{i}", "word " * 300) for i in range(9)]
    with pytest.raises(UserError, match=r"no usable pair for train and validation and test \(9 looked at: 9 answer"):
        select(Source("long", long, None, ""), micro, sizes)


def test_a_prompt_loses_its_oldest_words(micro: Any) -> None:
    chat = [
        Message("system", "Speak like a pirate of old."),
        Message("user", "one two three four five"),
        Message("assistant", "six seven eight"),
        Message("user", "nine ten eleven twelve"),
    ]
    whole, cut = fit_prompt(chat, micro, 500) or ("", True)
    assert not cut
    assert whole == micro.apply_chat_template([m._asdict() for m in chat], add_generation_prompt=True, tokenize=False)
    full = len(micro(whole)["input_ids"])
    seen = []
    for limit in range(full - 1, 20, -1):
        fitted = fit_prompt(chat, micro, limit)
        if fitted is None:
            break
        text, cut = fitted
        assert cut
        assert len(micro(text)["input_ids"]) <= limit
        assert text.startswith("<|im_start|>system\n")
        said = text.rpartition("user\n")[2].removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        assert said
        assert chat[-1].content.endswith(said)
        assert said == chat[-1].content or "eight" not in text, "the oldest go first"
        assert "eight" in text or "one" not in text
        seen.append(text)
    assert "Speak" not in seen[0]
    assert "old." in seen[0]
    assert "one two three four five" in seen[0]
    assert seen[-1].startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\n")
    assert fit_prompt(chat, micro, 12) is None


@settings(deadline=None, max_examples=40)
@given(text=st.text(min_size=1, max_size=120), limit=st.integers(1, 90))
def test_any_prompt_fits_or_is_refused(micro: Any, text: str, limit: int) -> None:
    fitted = fit_prompt([Message("user", text)], micro, limit)
    if fitted is None:
        frame = fit_prompt([Message("user", "")], micro, 1000) or ("", False)
        assert limit <= len(micro(frame[0])["input_ids"]) + 4  # no room for even one character
    else:
        assert len(micro(fitted[0])["input_ids"]) <= limit
        left = fitted[0].partition("user\n")[2].rpartition("<|im_end|>\n<|im_start|>assistant")[0]
        assert fitted[1] or left == text
        assert text.endswith(left)


def test_answers_are_never_cut(micro: Any) -> None:
    answer = "a b c d e f g h i j k l m n o p"
    made = encode(pair("What is the alphabet? " * 30, answer, "No."), micro, 64, 64)
    assert isinstance(made, Example)
    assert made.cut
    assert made.chosen == answer + "<|im_end|>"
    assert micro.decode(made.chosen_ids) == made.chosen
    assert len(made.prompt_ids) <= 64
    assert encode(pair("What?", answer, "No."), micro, 64, len(made.chosen_ids) - 1) == "answer too long"


def demo_rows(count: int) -> str:
    return json.dumps(
        [
            {
                "conversations": [{"from": "human", "value": f"What is {i}?"}],
                "chosen": {"from": "gpt", "value": f"A number, {i}."},
                "rejected": {"from": "gpt", "value": "No idea."},
            }
            for i in range(count)
        ]
    )


def official_rows(count: int, word: str) -> str:
    def messages(i: int, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{word} {i}?"}, {"role": "assistant", "content": answer}]

    rows = [
        {
            "prompt": f"{word} {i}?",
            "chosen": messages(i, "Yes."),
            "rejected": messages(i, "No."),
            "score_chosen": 7.0,
            "score_rejected": 7.0 if i % 10 == 0 else 3.0,
        }
        for i in range(count)
    ]
    return "\n".join(json.dumps(row) for row in rows)


def test_which_pairs_serve(workflow: UltraFeedback, sizes: Sizes, nowhere: None, tmp_path: Path) -> None:
    assert gather(None).train == own_pairs()
    assert "made by rule stand in for UltraFeedback" in gather(tmp_path).stand_in
    (tmp_path / "preferences").mkdir()
    (tmp_path / "preferences" / "dpo_en_demo.json").write_text(demo_rows(60))
    assert gather(tmp_path).stand_in.startswith("60 demo pairs stand in for UltraFeedback")
    (tmp_path / "ultrafeedback" / "data").mkdir(parents=True)
    for split, count in (("train", 100), ("test", 30)):
        path = tmp_path / "ultrafeedback" / "data" / f"{split}_prefs.jsonl"
        path.write_text(official_rows(count, split))
    data = workflow.load(sizes, tmp_path)
    assert data.stand_in.startswith("100 of 61,135 training pairs of UltraFeedback; micro-lm")
    assert data.hygiene["left out: tie"] > 0
    assert data.subset["train"] == [one.id for one in data.parts.train]
    assert data.digests["train pairs"] == part_digest(data.subset["train"])
    assert len(data.digests["train pairs"]) == 64
    assert [len(ids) for ids in data.subset.values()] == [16, 16, 8]
    assert data.examples == 16
    assert all(count == 0 for name, count in data.hygiene.items() if "share" in name)
    with pytest.raises(SealedTest):
        workflow.load_test(sizes, tmp_path)


# ------------------------------------------------------------------------------------------- TRL's losses and tokens


def built(loss: str, workflow: UltraFeedback, load: preferences.Load, rows: list[Example], **changes: Any) -> Any:
    """TRL's trainer of a loss, its policy with other weights than its reference."""
    plan = plan_of(genome(workflow, loss, **changes))
    model, tokenizer = load("cpu")
    shared = _trl.arguments(
        Path("/tmp/unused"),
        device="cpu",
        seed=0,
        steps=1,
        batch=4,
        learning_rate=1e-3,
        max_length=128,
        compute="float32",
    )
    with _trl.libraries_quiet():
        return plan, trainer_of(plan, shared, shaken(model), load("cpu")[0], tokenizer, rows)


def sums(model: Any, rows: list[Example]) -> tuple[Tensor, Tensor]:
    """Summed log-probabilities of chosen and rejected answers, one sequence at a time by cross-entropy in float64."""
    found = []
    for one in rows:
        for ids in (one.chosen_ids, one.rejected_ids):
            tokens = torch.tensor([[*one.prompt_ids, *ids]])
            with torch.no_grad():
                logits = model(input_ids=tokens).logits.double()
            start = len(one.prompt_ids)
            found.append(-F.cross_entropy(logits[0, start - 1 : -1], tokens[0, start:], reduction="sum"))
    chosen, rejected = torch.stack(found).view(-1, 2).unbind(1)
    return chosen, rejected


def lengths(rows: list[Example]) -> tuple[Tensor, Tensor]:
    counts = torch.tensor([[len(one.chosen_ids), len(one.rejected_ids)] for one in rows], dtype=torch.float64)
    return counts[:, 0], counts[:, 1]


def trl_loss(trainer: Any) -> float:
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(len(trainer.train_dataset))])
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model, trainer._prepare_inputs(inputs)))


@pytest.mark.parametrize(
    ("loss", "changes"),
    [
        ("dpo", {}),
        ("dpo", {"dpo__beta": 0.7}),
        ("dpo", {"dpo__normalise": True, "dpo__beta": 0.7}),
        ("ipo", {}),
        ("ipo", {"ipo__tau": 0.6}),
    ],
)
def test_dpo_and_ipo_equal_those_of_trl(
    loss: str, changes: Any, workflow: UltraFeedback, load: preferences.Load, examples: list[Example]
) -> None:
    plan, trainer = built(loss, workflow, load, examples, **changes)
    scores = (*sums(trainer.model, examples), *sums(trainer.ref_model, examples))
    counts = lengths(examples)
    if loss == "ipo":
        ours = preference.ipo_loss(*scores, tau=plan.scale, chosen_length=counts[0], rejected_length=counts[1])
    elif plan.normalise:
        means = [value / count for value, count in zip(scores, (*counts, *counts))]
        ours = preference.dpo_loss(*means, beta=plan.scale)
    else:
        ours = preference.dpo_loss(*scores, beta=plan.scale)
    assert trl_loss(trainer) == pytest.approx(float(ours.mean()), rel=1e-5)
    assert abs(float(ours.mean()) - math.log(2)) > 1e-3, "an untrained policy would prove nothing"


@pytest.mark.parametrize("weight", [0.1, 0.9])
def test_orpo_equals_that_of_trl(weight: float, workflow: UltraFeedback, load: preferences.Load, examples: Any) -> None:
    """The term of the odds ratio on any means; the whole loss where there is no prompt: TRL's likelihood has it in."""
    plan, trainer = built("orpo", workflow, load, examples, orpo__lambda=weight)
    chosen, rejected = (value / count for value, count in zip(sums(trainer.model, examples), lengths(examples)))
    ours = preference.orpo_loss(chosen, rejected, weight=plan.constants["lambda"])
    assert torch.allclose(ours, -chosen - trainer.odds_ratio_loss(chosen, rejected)[0], rtol=1e-6)
    inputs = trainer.data_collator(list(trainer.train_dataset))
    with torch.no_grad():
        loss, logged = trainer.get_batch_loss_metrics(trainer.model, trainer._prepare_inputs(inputs))
    assert float(loss) - logged["nll_loss"] == pytest.approx(float((ours + chosen).mean()), rel=1e-5)
    tokenizer = load("cpu")[1]
    alone = [example(tokenizer, "", "because", "not so")]
    _, trainer = built("orpo", workflow, load, alone, orpo__lambda=weight)
    means = (value / count for value, count in zip(sums(trainer.model, alone), lengths(alone)))
    assert trl_loss(trainer) == pytest.approx(float(preference.orpo_loss(*means, weight=weight)), rel=1e-5)


@pytest.mark.parametrize(("beta", "ratio"), [(2.0, 0.5), (5.0, 0.0)])
def test_simpo_equals_that_of_trl(
    beta: float, ratio: float, workflow: UltraFeedback, load: preferences.Load, examples: list[Example]
) -> None:
    _, trainer = built("simpo", workflow, load, examples, simpo__beta=beta, simpo__gamma_ratio=ratio)
    means = [value / count for value, count in zip(sums(trainer.model, examples), lengths(examples))]
    ours = preference.simpo_loss(*means, beta=beta, gamma=beta * ratio)
    assert torch.allclose(trainer.cpo_loss(*means)[0], ours, rtol=1e-6)
    assert trl_loss(trainer) == pytest.approx(float(ours.mean()), rel=1e-5)


def test_the_control_is_the_likelihood_of_the_chosen_answers(
    workflow: UltraFeedback, load: preferences.Load, examples: list[Example]
) -> None:
    _, trainer = built("sft", workflow, load, examples)
    chosen, _ = sums(trainer.model, examples)
    assert trl_loss(trainer) == pytest.approx(float(-chosen.sum() / lengths(examples)[0].sum()), rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_trainer_makes_the_tokens_that_we_score(
    loss: str, workflow: UltraFeedback, data: Data, micro: Any
) -> None:
    """With the chat form of the real checkpoint."""
    rows = data.parts.train[:3]
    _, trainer = built(loss, workflow, functools.partial(preferences._tiny, micro), rows)
    for row, made in zip(rows, trainer.train_dataset, strict=True):
        prompt, chosen, rejected = (list(ids) for ids in (row.prompt_ids, row.chosen_ids, row.rejected_ids))
        if loss in REFERENCED:
            assert (made["prompt_ids"], made["chosen_ids"], made["rejected_ids"]) == (prompt, chosen, rejected)
        elif loss == "sft":
            assert made["input_ids"] == prompt + chosen
            assert made["labels"] == [-100] * len(prompt) + chosen
        else:
            assert made["prompt_input_ids"] == prompt
            for name, answer in (("chosen", chosen), ("rejected", rejected)):
                assert made[f"{name}_input_ids"] == prompt + answer
                assert made[f"{name}_labels"] == [-100] * len(prompt) + answer


def test_experimental_trainers_are_those_of_a_tested_release(monkeypatch: pytest.MonkeyPatch) -> None:
    import trl

    assert [preferences.experimental(loss)[0].__name__ for loss in ("orpo", "simpo")] == ["ORPOTrainer", "CPOTrainer"]
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (pinned,) = (SpecifierSet(need.removeprefix("trl")) for need in project["dependencies"] if need.startswith("trl"))
    assert all(f"{release}.{patch}" in pinned for release in preferences.TRL_RELEASES for patch in (0, 9))
    assert "1.15.9" not in pinned
    assert "1.17.0" not in pinned
    monkeypatch.setattr(trl, "__version__", "9.9.1")
    with pytest.raises(UserError, match=r"orpo needs TRL's experimental ORPO trainer.*9\.9\.1 is installed"):
        preferences.experimental("orpo")


# ---------------------------------------------------------------------------------------------------------- scores


def untrained(workflow: UltraFeedback, load: preferences.Load, loss: str = "dpo") -> Artefact:
    return Artefact(load("cpu")[0], load("cpu")[0], load("cpu")[1], plan_of(genome(workflow, loss)), {})


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_likelihoods_equal_those_of_single_sequences(
    batch: int, workflow: UltraFeedback, load: preferences.Load, examples: list[Example]
) -> None:
    artefact = untrained(workflow, load)
    shaken(artefact.policy)
    found = measure(artefact, examples, batch, "cpu")
    assert torch.allclose(found.policy, torch.stack(sums(artefact.policy, examples), 1), rtol=1e-5)
    assert torch.allclose(found.reference, torch.stack(sums(artefact.reference, examples), 1), rtol=1e-5)
    assert torch.equal(found.tokens, torch.stack(lengths(examples), 1))


def test_divergence_is_that_of_the_answers_tokens(
    workflow: UltraFeedback, load: preferences.Load, examples: list[Example]
) -> None:
    artefact = untrained(workflow, load)
    shaken(artefact.policy)
    found = measure(artefact, examples, 8, "cpu")
    one = examples[1]
    tokens = torch.tensor([[*one.prompt_ids, *one.rejected_ids]])
    with torch.no_grad():
        ours, theirs = (m(input_ids=tokens).logits[0].log_softmax(-1) for m in (artefact.policy, artefact.reference))
    start = len(one.prompt_ids) - 1
    expected = F.kl_div(theirs[start:-1], ours[start:-1], log_target=True, reduction="sum")
    assert float(found.divergence[1, 1]) == pytest.approx(float(expected), rel=1e-4)


def test_an_untrained_policy_counts_one_half(
    workflow: UltraFeedback, load: preferences.Load, examples: list[Example]
) -> None:
    for loss in REFERENCED:
        artefact = untrained(workflow, load, str(loss))
        scores = scores_of(artefact.plan, measure(artefact, examples, 3, "cpu"))
        assert scores.units == [0.5] * 4
        assert scores.metrics["accuracy"] == scores.metrics["accuracy_untrained"] == 0.5
        assert scores.metrics["margin"] == scores.metrics["kl_per_token"] == scores.metrics["chosen_drift"] == 0
        start = math.log(2) if loss == "dpo" else 25.0
        assert scores.metrics["held_out_loss"] == pytest.approx(start)
    for loss in ("orpo", "simpo", "sft"):
        artefact = untrained(workflow, load, loss)
        scores = scores_of(artefact.plan, measure(artefact, examples, 3, "cpu"))
        assert scores.metrics["accuracy"] == scores.metrics["accuracy_untrained"] == scores.metrics["mean_accuracy"]


FOUND = Likelihoods(
    policy=torch.tensor([[-10.0, -4.0], [-6.0, -9.0], [-8.0, -8.0]], dtype=torch.float64),
    reference=torch.tensor([[-12.0, -4.0], [-7.0, -12.0], [-8.0, -8.0]], dtype=torch.float64),
    tokens=torch.tensor([[10.0, 2.0], [3.0, 9.0], [4.0, 4.0]], dtype=torch.float64),
    divergence=torch.full((3, 2), 0.5, dtype=torch.float64),
)


def test_each_method_is_asked_by_its_own_score(workflow: UltraFeedback) -> None:
    """Implicit rewards prefer pairs 1 and not 2 and tie on 3; means prefer 1 and not 2; sums 2 and not 1."""
    dpo = scores_of(plan_of(genome(workflow, "dpo", dpo__beta=0.5)), FOUND)
    assert dpo.units == [1.0, 0.0, 0.5]
    assert dpo.metrics["accuracy"] == dpo.metrics["reward_accuracy"] == 0.5
    assert dpo.metrics["margin"] == pytest.approx(0.5 * (2 - 2 + 0) / 3)
    assert dpo.metrics["sum_accuracy"] == pytest.approx((0 + 1 + 0.5) / 3)
    assert dpo.metrics["mean_accuracy"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert dpo.metrics["chosen_drift"] == pytest.approx((2 + 1 + 0) / 3)
    assert dpo.metrics["rejected_drift"] == pytest.approx((0 + 3 + 0) / 3)
    assert dpo.metrics["kl_per_token"] == pytest.approx(3 / 32)
    assert dpo.metrics["longer_chosen"] == 0.5
    assert dpo.metrics["longer_preferred"] == pytest.approx((1 + 1 + 0.5) / 3)
    for loss in ("orpo", "simpo", "sft"):
        found = scores_of(plan_of(genome(workflow, loss)), FOUND)
        assert found.units == [1.0, 0.0, 0.5]
        assert found.metrics["margin"] == pytest.approx((1 + (-2 + 1) + 0) / 3)
    by_means = own_score(plan_of(genome(workflow, "dpo", dpo__normalise=True)), FOUND)
    assert by_means[1].tolist() == pytest.approx([0.1 / 3, 0.1 * 3 / 9])
    assert preferred(by_means).tolist() == [1.0, 0.5, 0.5]


def test_held_out_losses_are_those_of_the_layers(workflow: UltraFeedback) -> None:
    def value(loss: str, **changes: Any) -> float:
        return float(preferences.held_out_loss(plan_of(genome(workflow, loss, **changes)), FOUND))

    margins = [2.0, -2.0, 0.0]
    assert value("dpo") == pytest.approx(sum(math.log1p(math.exp(-0.1 * m)) for m in margins) / 3)
    by_means = [0.2 - 0, 1 / 3 - 1 / 3, 0.0]
    assert value("ipo") == pytest.approx(sum((m - 5) ** 2 for m in by_means) / 3)
    assert value("dpo", dpo__normalise=True) == pytest.approx(sum(math.log1p(math.exp(-0.1 * m)) for m in by_means) / 3)
    means = [(-1.0, -2.0), (-2.0, -1.0), (-2.0, -2.0)]
    assert value("sft") == pytest.approx(5 / 3)
    assert value("simpo") == pytest.approx(sum(math.log1p(math.exp(-2 * (win - lose) + 1)) for win, lose in means) / 3)
    odds = [math.log(math.expm1(-lose) / math.expm1(-win)) for win, lose in means]
    assert value("orpo") == pytest.approx(5 / 3 + sum(0.1 * math.log1p(math.exp(-o)) for o in odds) / 3)


@pytest.mark.parametrize(("right", "count"), [(0, 16), (6, 16), (16, 16), (257, 500)])
def test_the_interval_is_wilsons(right: int, count: int) -> None:
    from scipy.stats import binomtest

    expected = binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert interval(right / count, count) == pytest.approx((expected.low, expected.high), abs=1e-6)


# -------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("loss", LOSSES)
def test_two_updates_move_the_weights_and_the_loss(
    loss: str, workflow: UltraFeedback, sizes: Sizes, load: preferences.Load, examples: list[Example]
) -> None:
    seen: list[tuple[int, float]] = []
    trace = Trace()
    artefact = train(
        load, {}, genome(workflow, loss, train__lr=1e-3), examples, 0, sizes, "cpu", lambda *a: seen.append(a), trace
    )
    assert sorted(trace.order) == sorted(one.id for one in examples), "every pair once"
    assert [step for step, _ in seen] == [1, 2]
    facts = artefact.facts
    assert facts["changed_share"] > 0.5
    assert facts["changed_parameters"] > 0.5 * facts["trainable_parameters"]
    assert (facts["weight_bits"], facts["compute_bits"]) == (32, 16)
    assert facts["loss_after_a_step"] == facts["last_loss"] != facts["first_loss"]
    if loss == "dpo":
        assert facts["first_loss"] == pytest.approx(math.log(2), abs=1e-4), "before any step it is ln 2"
        assert abs(facts["loss_after_a_step"] - math.log(2)) > 1e-4
    found = measure(artefact, examples, 8, "cpu")
    assert torch.allclose(found.policy, torch.stack(sums(artefact.policy, examples), 1), rtol=1e-5), (
        "no wrapper is left"
    )
    assert torch.allclose(found.reference, torch.stack(sums(load("cpu")[0], examples), 1), rtol=1e-5)
    scores = scores_of(artefact.plan, found)
    assert scores.metrics["margin"] != 0
    assert scores.metrics["kl_per_token"] > 0
    assert all(map(math.isfinite, scores.metrics.values()))


def test_the_batches_of_an_update_are_signs_of_life(
    workflow: UltraFeedback,
    sizes: Sizes,
    load: preferences.Load,
    examples: list[Example],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preferences, "BEAT_S", -1.0)
    seen: list[tuple[int, float]] = []
    train(load, {}, genome(workflow, "sft"), examples, 0, sizes, "cpu", lambda *a: seen.append(a))
    assert [step for step, _ in seen] == [0, 0, 1, 1, 1, 2]
    assert (seen[0][1] + seen[1][1]) / 2 == pytest.approx(seen[2][1], rel=1e-3), "losses of batches, not parts of one"


def test_the_seed_decides_the_order_and_nothing_else_does(
    workflow: UltraFeedback, sizes: Sizes, load: preferences.Load, examples: list[Example]
) -> None:
    traces = []
    for seed in (0, 0, 1):
        traces.append(Trace())
        train(load, {}, genome(workflow, "dpo"), examples, seed, sizes, "cpu", unwatched, traces[-1])
    assert traces[0] == traces[1]
    assert traces[0].order != traces[2].order


def test_precomputed_and_frozen_references_are_the_same_loss(
    workflow: UltraFeedback, sizes: Sizes, load: preferences.Load, examples: list[Example]
) -> None:
    found = []
    for mode in ("frozen", "precomputed"):
        chosen = genome(workflow, "dpo", reference__mode=mode, train__lr=1e-3)
        found.append(train(load, {}, chosen, examples, 0, sizes, "cpu", unwatched).facts)
    assert found[0]["last_loss"] == pytest.approx(found[1]["last_loss"], rel=1e-5)


def test_a_killed_training_goes_on_from_its_checkpoint(
    workflow: UltraFeedback,
    sizes: Sizes,
    load: preferences.Load,
    examples: list[Example],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen, often = genome(workflow, "dpo", train__lr=1e-3), bounded(sizes, steps=3, save_every=1)
    straight = train(load, {"data": "a"}, chosen, examples, 0, often, "cpu", unwatched)
    monkeypatch.setenv(CHECKPOINTS, str(tmp_path))

    def dies(step: int, loss: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(load, {"data": "a"}, chosen, examples, 0, often, "cpu", dies)
    steps: list[int] = []
    resumed = train(load, {"data": "a"}, chosen, examples, 0, often, "cpu", lambda step, loss: steps.append(step))
    assert 1 not in steps
    assert resumed.facts["resumed_from_step"] == 2
    for (name, one), (_, other) in zip(straight.policy.named_parameters(), resumed.policy.named_parameters()):
        assert torch.equal(one, other), name
    assert resumed.facts["first_loss"] == straight.facts["first_loss"]
    with pytest.raises(UserError, match="cannot be resumed"):
        train(load, {"data": "b"}, chosen, examples, 0, often, "cpu", unwatched)


@pytest.mark.parametrize("changes", [{"post.loss": "orpo"}, {"lora.r": 8, "train.lr": 1e-3}])
def test_what_is_stored_is_what_was_validated(
    changes: Any, workflow: UltraFeedback, sizes: Sizes, data: Data, tmp_path: Path
) -> None:
    """On the micro checkpoint: train, save, restore; scores of both are the same, and test scores leave out counts."""
    chosen = workflow.space.resolve(changes)
    few = bounded(sizes, accumulate=1)
    artefact = workflow.train(chosen, data, 0, few, "cpu", unwatched)
    scores = workflow.validate(artefact, data, few, "cpu")
    assert len(scores.units) == 16
    assert sum(scores.units) / 16 == scores.metrics["accuracy"]
    assert scores.metrics["accuracy_lower"] < scores.metrics["accuracy"] < scores.metrics["accuracy_upper"]
    assert scores.metrics["changed_share"] > 0.5
    rank = int(chosen["lora.r"])
    assert scores.metrics["trainable_parameters"] == data.parts.checkpoint.shape.trainable(rank), "no second adapter"
    workflow.save(artefact, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file() == ("lora.r" in changes)
    assert not (tmp_path / "ref").exists()
    restored = UltraFeedback().restore(chosen, data, tmp_path, few, "cpu")
    assert workflow.validate(restored, data, few, "cpu") == scores
    held = workflow.test(restored, data.parts.validation, data, few, "cpu")
    assert held.units == scores.units
    assert set(scores.metrics) - set(held.metrics) == set(artefact.facts)


# ---------------------------------------------------------------------------------------------- workflow and reports


def test_cost_follows_the_genome(workflow: UltraFeedback, sizes: Sizes, data: Data) -> None:
    def cost(loss: str, **changes: Any) -> Any:
        return workflow.cost(genome(workflow, loss, **changes), sizes, data)

    assert cost("sft").flops < cost("orpo").flops < cost("dpo").flops
    assert cost("simpo").flops == cost("orpo").flops
    frozen, precomputed = cost("dpo"), cost("dpo", reference__mode="precomputed")
    weights = 4 * data.parts.checkpoint.shape.parameters
    assert frozen.memory_bytes - precomputed.memory_bytes == weights, "the second model"
    assert cost("dpo", lora__r=8).parameters < cost("dpo").parameters / 5
    assert cost("dpo", lora__r=8).memory_bytes < precomputed.memory_bytes
    assert frozen.extra["updates"] == 2


def test_floor_and_lengths_alone(workflow: UltraFeedback, sizes: Sizes, data: Data) -> None:
    assert list(workflow.floors(data, sizes).values()) == [0.5]
    anchors = workflow.anchors(data, sizes)
    longer = [len(one.chosen_ids) > len(one.rejected_ids) for one in data.parts.validation]
    ties = [len(one.chosen_ids) == len(one.rejected_ids) for one in data.parts.validation]
    assert anchors["the longer answer"] == (sum(longer) + sum(ties) / 2) / 16
    assert sum(anchors.values()) == 1


def test_the_plan_and_its_operators(workflow: UltraFeedback) -> None:
    assert workflow.space.baseline()["post.loss"] == "dpo"
    assert [one["post.loss"] for one in workflow.smoke_plan()] == ["orpo"]
    assert {operator.id for operator in workflow.operators} == set(LOSSES) - {"sft"}
    assert workflow.start("standard")["lora.r"] == 16
    smoke = workflow.sizes("smoke")
    assert (smoke["pairs"], smoke["held_out"], smoke["steps"]) == (16, 16, 2)
    assert smoke["micro_batch"] * smoke["accumulate"] * smoke["steps"] == smoke["pairs"], "every pair once"


@pytest.mark.parametrize("axis", ["reference.mode"])
def test_a_reference_that_is_held_has_an_effect(axis: str, workflow: UltraFeedback, sizes: Sizes, data: Data) -> None:
    """What moves least; the other axes are in the slow test."""
    found = genomes.effects(workflow, sizes, data, [axis])
    assert len(found) == len(workflow.space[axis].values) - 1
    assert not [effect.text for effect in found if not effect.holds]


@pytest.mark.slow
def test_every_axis_value_has_an_effect(workflow: UltraFeedback, sizes: Sizes, data: Data) -> None:
    found = genomes.effects(workflow, sizes, data)
    assert {effect.axis for effect in found} == {axis.name for axis in workflow.space.axes}
    assert not [effect.text for effect in found if not effect.holds]


def a_trial(name: str, loss: str, accuracy: float, pairs: int) -> Trial:
    low, high = interval(accuracy, pairs)
    cell = CellResult(
        cell=name, candidate=name, seed=0, role="search", state="completed", units=[accuracy] * pairs,
        metrics={"accuracy": accuracy, "accuracy_lower": low, "accuracy_upper": high, "changed_share": 0.997,
                 "accuracy_untrained": 0.5},
    )  # fmt: skip
    candidate = Candidate(id=name, generation=0, origin="baseline", genome={"post.loss": loss})
    return Trial(candidate=candidate, state="completed", cells=[cell])


def test_the_summary_says_what_so_many_pairs_can_tell(workflow: UltraFeedback) -> None:
    found = workflow.summarise([a_trial("baseline", "dpo", 0.375, 16), a_trial("a", "orpo", 0.625, 16)])
    assert "dpo 0.38 [0.18, 0.61], untrained 0.50; orpo 0.62 [0.39, 0.82], untrained 0.50." in found["sentence"]
    assert "With 16 pairs an accuracy is known to about ± 0.25, so this is no comparison." in found["sentence"]
    assert "did not run" in found["sentence"]
    assert [row["loss"] for row in found["held-out pairs"]] == ["dpo", "orpo"]
    assert [row["changed_share"] for row in found["training"]] == [0.997, 0.997]
    large = workflow.summarise([a_trial("baseline", "dpo", 0.6, 500), a_trial("c", "sft", 0.58, 500)])["sentence"]
    assert "no comparison" not in large
    assert "The control, SFT on the chosen answers, has 0.58." in large
    assert large.endswith("The first update moved at the least 99.7% of the weights (FP32, computed in BF16).")
    nothing = Trial(candidate=Candidate(id="x", generation=0, origin="baseline", genome={}), state="failed")
    assert workflow.summarise([nothing])["sentence"].startswith("No candidate")


REHEARSED = """
import sys
import tomllib
from pathlib import Path
from auto_research.evolve.workflow import Sizes
from auto_research.evolve.workflows.ultrafeedback import UltraFeedback

workflow = UltraFeedback()
sizes = Sizes("smoke", {**workflow.sizes("smoke").values, "micro": 1, "accumulate": 2})
data = workflow.load(sizes, None)
for number, changes in enumerate(({}, {"post.loss": "orpo"}, {"post.loss": "ipo", "lora.r": 8})):
    genome = workflow.space.resolve(changes)
    artefact = workflow.train(genome, data, 0, sizes, "cuda", lambda step, loss: None)
    folder = Path(sys.argv[1]) / str(number)
    folder.mkdir()
    workflow.save(artefact, folder)
    scores = workflow.validate(artefact, data, sizes, "cuda")
    again = workflow.validate(workflow.restore(genome, data, folder, sizes, "cuda"), data, sizes, "cuda")
    assert again.units == scores.units and scores.metrics["compute_bits"] == 16, scores
"""


@pytest.mark.slow
def test_the_rehearsal_on_a_virtual_card_has_no_finding(tmp_path: Path) -> None:
    script, report = tmp_path / "cell.py", tmp_path / "report.json"
    script.write_text(REHEARSED)
    call = [sys.executable, "-m", "auto_research.rehearsal", "--card", "a30", "--json", str(report), str(script)]
    done = subprocess.run([*call, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    summary = json.loads(report.read_text())
    assert summary["findings"] == []
    assert summary["share"]["flops_on_device"] > 0.9
