"""RecGPT-Mobile: prompts under a budget, the training mixture, adapters and quantisation, scorer and decision rule."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.layers.quantised_linear import quantise_linears
from auto_research.papers.llm import recgpt_mobile as m
from auto_research.tasks.base import Evaluation, Mean, Recipe
from auto_research.tasks.behaviour_prompts import COMPONENTS, TEMPLATES, PromptWriter
from auto_research.tasks.generation import IGNORED, scratch_causal_lm, sequence_log_probability
from auto_research.tasks.intent_queries import ACTIONS, PURCHASE, Case, IntentData, QueryCatalogue, complements

CPU = torch.device("cpu")
PHRASES = ["gel pens", "ink cartridge", "ring binder", "desk lamp", "paper"]
ITEMS = 20


def catalogue():
    phrase = [PHRASES[i % 5] if i % 7 else "" for i in range(ITEMS)]
    short = [f"thing number {i} for the desk" for i in range(ITEMS)]
    return QueryCatalogue(
        documents=[f"{s} {p}" for s, p in zip(short, phrase, strict=True)],
        short=short,
        brand=[["acme", "bolt", ""][i % 3] for i in range(ITEMS)],
        phrase=phrase,
        paraphrase={p: f"other {p}" for p in PHRASES},
    )


@pytest.fixture(scope="module")
def language():
    torch.manual_seed(0)
    texts = [f"{a} {p}\nnext need?\nuser: types: 1 2 3" for a in ACTIONS for p in PHRASES] * 3
    model, tokenizer = scratch_causal_lm(texts, vocabulary=320, width=32, layers=1, heads=2, phrases=PHRASES)
    return model.eval(), PromptWriter(catalogue(), tokenizer)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    train = [rng.integers(0, ITEMS, rng.integers(2, 7)) for _ in range(12)]
    held = [
        Case(100 + u, tuple(rng.integers(0, ITEMS, 1 + u % 10).tolist()), int(rng.integers(ITEMS))) for u in range(9)
    ]
    return IntentData(catalogue(), list(range(12)), train, held[:3], held[3:], history=10)


def plan(**changes):
    base = m.Plan(
        m.RecGPTConfig(rank=4), CPU, Recipe(learning_rate=1e-2, batch_size=8), 12, (48, 96), (48,), 4, 16, 32, 20
    )
    return replace(base, **changes)


histories = st.lists(st.integers(0, ITEMS - 1), min_size=1, max_size=10).map(tuple)


@settings(deadline=None, max_examples=60)
@given(histories, st.integers(0, 3), st.lists(st.booleans(), min_size=6, max_size=6), st.integers(20, 200))
def test_prompts_keep_the_budget_and_end_with_the_latest_behaviour(language, history, k, wanted, budget):
    _, writer = language
    case = Case(0, history, 0)
    chosen = writer.fitting(case, k, wanted, budget)
    ids = writer.write(case, k, chosen, budget)
    base = writer.base_cost(case, k)
    assert len(ids) <= max(budget, base)
    lines = writer.behaviours(case, k)
    ending = [*lines[-1], *writer.question, *writer.after]
    assert ids[-len(ending) :] == ending
    alone = writer.write(case, k, chosen, 0)  # no room for earlier behaviours
    assert len(alone) == base + sum(len(writer.component(case, c)) for c, taken in enumerate(chosen) if taken)
    whole = writer.write(case, k, chosen, 10_000)
    assert len(whole) == len(alone) + sum(map(len, lines[:-1]))


def test_a_prompt_of_each_kind_in_words(language):
    _, writer = language
    case = Case(0, (1, 6, 1, 2), 0)
    text = writer.tokenizer.decode(writer.fixed(case, "long", 500))
    for part in ("user: 4 events, 2 types", "types:", "brands:", "wanted:", "repeated:", "next need?"):
        assert part in text
    assert writer.view(case.history).actions[-1] == PURCHASE
    short = writer.tokenizer.decode(writer.fixed(case, "short", 500))
    assert short.count("\n") < writer.tokenizer.decode(writer.fixed(case, "recent", 500)).count("\n")
    timeline = writer.tokenizer.decode(writer.write(case, TEMPLATES.index("timeline"), [False] * 6, 500))
    assert "-1" in timeline
    assert "-4" in timeline
    assert "number 6" in writer.tokenizer.decode(writer.write(case, TEMPLATES.index("titles"), [False] * 6, 500))


def test_no_prompt_depends_on_the_target_or_on_later_events(language, data):
    _, writer = language
    scorer = m.PromptScorer(4, 6, m.FEATURES, m.SCENES)
    for kind in m.PROMPT_KINDS:
        lm = SimpleNamespace(write=lambda prompts: prompts)
        model = m.LanguageQueries(lm, writer, kind, 96, scorer, m.RecGPTConfig())
        one = model.prompts(data.test)
        other = model.prompts([replace(case, target=(case.target + 3) % ITEMS, user=7) for case in data.test])
        assert one == other


def test_features_by_hand(language):
    _, writer = language
    view = writer.view((1, 6, 1))
    assert view.types == ["ink cartridge"] * 3
    # click, then brand (acme/"") or type repeated, then the closing purchase
    found = view.features()
    assert sum(found[:4]) == pytest.approx(1)
    assert found[4] == pytest.approx(0.5 + 0.25 + 0.125)
    assert found[5:] == pytest.approx([0.3, 1 / 3, 0.0, 2 / 3])
    described = writer.describe([Case(0, (1, 6, 1), 0)], 48)
    assert described["features"].shape == (1, m.FEATURES)
    assert described["scene"][0, :4].sum() == 1
    assert float(described["scene"][0, 4]) == -1.0
    assert described["template_cost"].shape == (1, len(TEMPLATES))
    assert described["component_cost"].shape == (1, len(COMPONENTS))


def test_an_empty_component_is_never_chosen(language):
    """A scorer that loves every component still leaves out those that have nothing to say."""
    _, writer = language

    class Eager(m.PromptScorer):
        def forward(self, template, chosen, features, scene):
            return chosen.float().sum(-1) + 0 * template.sum(-1)

    case = Case(0, (5,), 0)  # one event: no repeats, no gap
    prompts = m.adaptive_prompts(writer, Eager(4, 6, m.FEATURES, m.SCENES), [case], 200, m.RecGPTConfig())
    text = writer.tokenizer.decode(prompts[0])
    assert "user:" in text
    assert "wanted:" in text
    assert len(prompts[0]) <= 200


def test_mixture_shares_sources_and_completions(language, data):
    _, writer = language
    mixture = m.Mixture(data, writer, m.MIXTURE)
    assert mixture.sources == list(m.SOURCES)
    generator = torch.Generator().manual_seed(0)
    wanted = {"complement": "goes with?", "rewrite": "same as", "behaviour": "next need?", "human": "next need?"}
    for source, question in wanted.items():
        prompt, completion = mixture.row(source, 48, generator)
        assert question in writer.tokenizer.decode(prompt)
        assert completion[-1] == writer.end
        assert writer.tokenizer.decode(completion[:-1]) in PHRASES
    drawn = Counter(torch.multinomial(mixture.shares, 20_000, replacement=True, generator=generator).tolist())
    for i, source in enumerate(m.SOURCES):
        assert drawn[i] / 20_000 == pytest.approx(m.MIXTURE[source], abs=0.02)
    without = m.Mixture(data, writer, {k: v for k, v in m.MIXTURE.items() if k != "rewrite"})
    assert "rewrite" not in without.pools
    with pytest.raises(ValueError, match="unknown training source"):
        m.Mixture(data, writer, {"gossip": 1.0})
    assert dict(mixture.pools["complement"]) == complements(data)


def test_batches_depend_on_the_seed_alone_and_learn_only_completions(language, data):
    _, writer = language
    mixture = m.Mixture(data, writer, m.MIXTURE)
    one, two = (next(mixture.batches(5, 6, CPU, (48,))) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["input_ids"], next(mixture.batches(6, 6, CPU, (48,)))["input_ids"][:, :])
    assert ((one["labels"] != IGNORED).sum(1) >= 2).all()
    assert one["labels"][:, -1].eq(writer.end).all()


def test_tuning_moves_adapters_only_and_merging_keeps_the_function(language, data):
    base, writer = language
    before = {name: value.clone() for name, value in base.state_dict().items()}
    model = m.adapted(base, m.RecGPTConfig(rank=4))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    merged, count = m.tune(base, m.Mixture(data, writer, m.MIXTURE), plan(), seed=1)
    assert count == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert all(torch.equal(before[name], value) for name, value in base.state_dict().items())
    assert merged.state_dict().keys() == base.state_dict().keys()
    moved = [name for name, value in merged.state_dict().items() if not torch.equal(value, before[name])]
    assert moved
    assert all("proj" in name for name in moved)
    again, _ = m.tune(base, m.Mixture(data, writer, m.MIXTURE), plan(), seed=1)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in merged.state_dict().items())
    ids = torch.tensor([writer.fixed(data.test[0], "recent", 48)])
    with torch.no_grad():
        exact, small = merged(ids).logits, quantise_linears(merged, 8)(ids).logits
    assert float((exact - small).abs().max()) < 0.1 * float(exact.abs().max())


def test_scorer_rows_are_log_probabilities_of_the_target_against_their_cases_mean(language, data):
    base, writer = language
    served = m.serve(base, writer, plan())
    rows = m.scorer_rows(served, writer, data, plan(), torch.Generator().manual_seed(3))
    assert rows["target"].shape == (32,)
    torch.testing.assert_close(rows["target"].view(-1, 4).mean(1), torch.zeros(8), atol=1e-4, rtol=0)
    # The same draws again, scored one by one.
    generator = torch.Generator().manual_seed(3)
    cases = [case for pool in data.training_cases for case in pool]
    first = cases[torch.randperm(len(cases), generator=generator).tolist()[0]]
    values = []
    for n in range(4):
        budget = (48, 96)[int(torch.randint(2, (1,), generator=generator))]
        template, wanted = m.random_make_up(generator)
        chosen = writer.fitting(first, template, wanted, budget)
        assert rows["template"][n].argmax() == template
        assert rows["chosen"][n].tolist() == [float(c) for c in chosen]
        prompt = writer.write(first, template, chosen, budget)
        completion = [*writer.pieces(catalogue().phrase[first.target]), writer.end]
        values.append(float(sequence_log_probability(base, [prompt], [completion], writer.pad, CPU)))
    expected = torch.tensor(values) - sum(values) / 4
    torch.testing.assert_close(rows["target"][:4], expected, atol=1e-4, rtol=1e-3)
    every = m.scorer_rows(served, writer, data, plan(configurations=10_000), generator)
    assert len(every["target"]) == 4 * len(cases)  # no case twice, so that the last ones are unseen by the fit


def test_fitting_the_scorer_takes_steps_and_reports_an_honest_correlation(language, data):
    base, writer = language
    scorer, fit = m.fit_scorer(m.serve(base, writer, plan()), writer, data, plan(configurations=128), seed=0)
    assert -1 <= fit <= 1
    assert float(scorer.deviation) > 0
    assert not scorer.training


def chains(gain, users=30, seeds=3):
    """Results in which drift is better than its rivals by `gain` for every user."""
    out = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        base = torch.rand(users, generator=generator)
        noise = 0.01 * torch.randn(users, generator=generator)
        values = {"drift 0.8": base + gain + noise, "random at 0.8": base, "every-k at 0.8": base}
        quality = {name: Evaluation(users, {"token f1": Mean(value)}) for name, value in values.items()}
        out.append(SimpleNamespace(streams=SimpleNamespace(quality=quality, calls={"drift 0.8": 0.05})))
    return out


@pytest.mark.parametrize("gain, state", [(0.1, "holds"), (-0.1, "reversed"), (0.0, "undecided")])
def test_clause_d_needs_both_rivals_beaten(gain, state):
    clause = m.beats_at_its_rate(chains(gain), 0.8, required=True)
    found, detail = clause.decide(lambda *_: None)
    assert found == state
    assert "0.050 calls per event" in detail


def trial(value, size=0):
    return SimpleNamespace(validation={"recall@20": value}, logged={"bytes on disk": float(size)})


def test_clause_c_compares_with_the_fixed_prompt_that_is_best_on_validation():
    trials = {"LoRA": [trial(0.1)], "short 48": [trial(0.3)], "long 48": [trial(0.2)], "adaptive 48": [trial(0.9)]}
    clause = m.as_good_as_fixed(SimpleNamespace(trials=trials), 48)
    asked = []

    def compare(method, baseline, metric):
        asked.append((method, baseline, metric))
        return SimpleNamespace(mean=0.0, low=-0.1, high=0.1)

    assert clause.decide(compare)[0] == "holds"
    assert asked == [("adaptive 48", "short 48", "recall@20")]
    worse = SimpleNamespace(mean=-0.1, low=-0.2, high=-0.01)
    assert clause.decide(lambda *_: worse)[0] == "reversed"
    unclear = SimpleNamespace(mean=-0.1, low=-0.2, high=0.01)
    assert clause.decide(lambda *_: unclear)[0] == "undecided"


@pytest.mark.parametrize("size, state", [(55, "holds"), (56, "reversed")])
def test_clause_b_counts_bytes(size, state):
    comparison = SimpleNamespace(trials={"int8": [trial(0, size)], "LoRA": [trial(0, 100)]})
    assert m.fewer_bytes(comparison).decide(lambda *_: None)[0] == state


def test_bigger_query_budgets_never_shorten_a_prompt(language, data):
    _, writer = language
    for kind in ("short", "recent"):
        for case in data.test:
            lengths = [len(writer.fixed(case, kind, budget)) for budget in m.BUDGETS]
            assert lengths == sorted(lengths)
