"""The language-model workflow on a text of known entropy, and (slow) its smoke run on the embedded text."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import markov
import pytest
import torch

from auto_research.evolve import genome as genomes
from auto_research.evolve import workflow as contract
from auto_research.evolve.records import Candidate, CellResult, Trial
from auto_research.evolve.space import Infeasible
from auto_research.evolve.workflow import NonFinite, SealedTest, Sizes
from auto_research.evolve.workflows import _corpus, llm_wikitext, workflow
from auto_research.evolve.workflows._corpus import Row, generated_instructions
from auto_research.runtime.errors import UserError
from auto_research.tasks import micro_language_model as micro
from auto_research.tasks.language_model import bigram_nats, unigram

WORKFLOW = workflow("llm-wikitext")
TINY = Sizes(
    "smoke",
    {"steps": 8, "post_steps": 4, "width": 32, "layers": 2, "heads": 4, "vocabulary": 256, "batch": 4, "context": 64},
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTO_RESEARCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return markov.lay(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def data(folder):
    return WORKFLOW.load(TINY, folder)


def genome(**changes):
    return WORKFLOW.space.feasible({name.replace("__", "."): value for name, value in changes.items()})[0]


def silent(step: int, loss: float) -> None:
    assert math.isfinite(loss)


def train(data, seed=0, sizes=TINY, **changes):
    return WORKFLOW.train(genome(**changes), data, seed, sizes, "cpu", silent)


# --------------------------------------------------------------------------------------------------- data


def test_data_are_the_devsplit_without_test(folder, data):
    corpus = data.parts
    text = (folder / "wikitext-2" / "valid.txt").read_text()
    rebuilt = corpus.tokenizer.decode(corpus.train.tolist()) + corpus.tokenizer.decode(corpus.validation.tolist())
    assert rebuilt == text
    assert len(corpus.train) / len(text) == pytest.approx(0.9, abs=0.01)
    assert corpus.validation_bytes == len(text) - len(corpus.tokenizer.decode(corpus.train.tolist()))
    assert corpus.name == "wikitext-2-devsplit" == WORKFLOW.dataset
    assert set(data.digests) == {"wikitext-2-devsplit", "tiny-shakespeare", "instructions", "tokenizer"}
    assert not any(isinstance(value, str) and markov.LETTERS[0] in value and len(value) > 100 for value in vars(corpus))
    assert data.examples == math.ceil(len(corpus.validation) / 64)
    assert "generated" in data.stand_in
    assert {name for name, count in data.hygiene.items() if "share" in name and count} == set()
    with pytest.raises(SealedTest):
        WORKFLOW.load_test(TINY, folder)


def test_the_tokenizer_learns_from_the_training_part_only(tmp_path, folder):
    first = WORKFLOW.load(replace(TINY, values=TINY.values | {"vocabulary": 300}), folder)
    other = markov.lay(tmp_path / "data")
    path = other / "wikitext-2" / "valid.txt"
    text = path.read_text()
    path.write_text(text[: int(0.95 * len(text))] + "zzzz yyyy xxxx\n" * 300)
    cut = _corpus.devsplit(path.read_text())[0]
    path.write_text(text[: len(cut)] + "\n" + "zzzz yyyy xxxx\n" * 100)
    (other / "wikitext-2" / "test.txt").write_text("qqqq wwww\n" * 100)
    changed = _corpus.read_corpus(300, 64, other)
    assert not any("zz" in piece or "qq" in piece for piece in changed.tokenizer.get_vocab())
    assert first.parts.tokenizer.get_vocab_size() == changed.vocabulary == 300
    assert "zzzz" in changed.tokenizer.decode(changed.validation.tolist())


def test_paragraphs_of_held_out_parts_are_left_out_of_training(tmp_path):
    other = markov.lay(tmp_path / "data", 20_000)
    leak, second = "this paragraph of nine words stands in the test", "and this one of nine words stands in both"
    valid = other / "wikitext-2" / "valid.txt"
    text = valid.read_text()
    valid.write_text(f"{leak}\n{second}\n{text}\n{leak.upper()}\n  {second}\n")
    test = other / "wikitext-2" / "test.txt"
    test.write_text(f"{test.read_text()}\n{leak}  \n")
    data = WORKFLOW.load(TINY, other)
    assert data.hygiene["paragraphs left out of training"] == 2
    assert data.hygiene["paragraphs left out of validation"] == 1
    assert data.hygiene["distinct text validation"] == 1
    assert data.hygiene["text train and text validation share"] == data.hygiene["text train and text test share"] == 0
    assert "nine words" not in data.parts.tokenizer.decode(data.parts.train.tolist())


def test_public_instructions_are_used_where_they_lie(tmp_path):
    other = markov.lay(tmp_path / "data", 20_000)
    rows = [{"instruction": f"Say {i}.", "input": "", "output": f"{i}" * (i % 80 + 1)} for i in range(400)]
    rows[0] = rows[390] | {"output": "another answer"}  # its prompt is in test
    (other / "alpaca").mkdir()
    (other / "alpaca" / "alpaca_en_demo.json").write_text(json.dumps(rows))
    data = WORKFLOW.load(TINY, other)
    assert data.stand_in == ""
    assert {part: len(found) for part, found in data.parts.instructions.items()} == {"train": 200, "validation": 100}
    assert data.hygiene["distinct instructions test"] == 99
    end = data.parts.end
    cut = sum(row.response[-1] != end for found in data.parts.instructions.values() for row in found)
    assert data.hygiene["instruction responses cut to the context"] == cut > 0
    for row in itertools.chain(*data.parts.instructions.values()):
        assert len(row.prompt) + len(row.response) <= 65
        assert data.parts.tokenizer.decode(list(row.prompt)).endswith("### Response:\n")
    (other / "alpaca" / "alpaca_en_demo.json").write_text(json.dumps(rows[:150]))
    with pytest.raises(UserError, match="more than 199 are needed"):
        WORKFLOW.load(TINY, other)


def test_generated_instructions_are_distinct_and_right():
    rows = generated_instructions()
    assert len(rows) == len({(row.instruction, row.input) for row in rows}) == 999
    assert rows == generated_instructions()
    checked = 0
    for row in rows:
        words = row.input.split()
        if row.output.startswith("The sum"):
            assert row.output == f"The sum is {sum(map(int, words))}."
        elif "alphabet" in row.instruction:
            position = 0 if "first" in row.instruction else -1
            assert sorted(words)[position] in row.output
        elif "reverse" in row.instruction or "round" in row.instruction:
            assert row.output.split() == words[::-1]
        else:
            continue
        checked += 1
    assert checked > 300


# ---------------------------------------------------------------------------------------------- yardsticks


def test_floors_are_the_unigram_and_equal_chances(data):
    corpus = data.parts
    counts = torch.bincount(corpus.train, minlength=256).double() + 1
    frequency = counts / counts.sum()
    text = float(-frequency[corpus.validation].log().mean())
    answers = [token for row in corpus.instructions["validation"] for token in row.response]
    floors = WORKFLOW.floors(data, TINY)
    assert floors["unigram"] == pytest.approx(-(text + 0.15 * float(-frequency[answers].log().mean())))
    assert floors["uniform"] == pytest.approx(-1.15 * math.log(256))
    assert text / math.log(2) == pytest.approx(markov.entropy(markov.chain(), 0), abs=0.06)
    pairs = bigram_nats(corpus.train, corpus.validation, 256)
    assert float(pairs.mean()) / math.log(2) == pytest.approx(markov.entropy(markov.chain(), 1), abs=0.06)
    answered = sum(float(bigram_nats(corpus.train, torch.tensor([r.prompt[-1], *r.response]), 256).sum())
                   for r in corpus.instructions["validation"])  # fmt: skip
    start = float(-frequency[corpus.validation[0]].log())  # nothing follows the byte 0 in training
    anchor = (float(pairs.sum()) + start) / len(corpus.validation) + 0.15 * answered / len(answers)
    assert WORKFLOW.anchors(data, TINY) == {"bigram": pytest.approx(-anchor)}


def test_a_model_comes_near_the_known_entropy_and_not_below_it(data):
    sizes = replace(TINY, values=TINY.values | {"steps": 150, "batch": 8})
    scores = WORKFLOW.validate(train(data, sizes=sizes, train__lr=1e-2), data, sizes, "cpu")
    bits = scores.metrics["bits_per_byte"]
    assert markov.BITS * 0.98 < bits < markov.BITS * 1.15
    assert bits < markov.entropy(markov.chain(), 1) - 0.3  # one letter of context does not suffice for this
    assert scores.metrics["fitness"] == pytest.approx(
        -(scores.metrics["lm_loss"] + 0.15 * scores.metrics["instruction_loss"])
    )
    assert scores.metrics["perplexity"] == pytest.approx(math.exp(scores.metrics["lm_loss"]))
    assert bits * math.log(2) * data.parts.validation_bytes == pytest.approx(
        scores.metrics["lm_loss"] * len(data.parts.validation)
    )
    assert sum(scores.units) / len(scores.units) == pytest.approx(scores.metrics["fitness"])


# ----------------------------------------------------------------------------------------------- mechanisms


def test_every_axis_value_has_an_effect(data):
    found = genomes.effects(WORKFLOW, TINY, data)
    assert [effect.text for effect in found if not effect.holds] == []
    assert {effect.axis for effect in found} == {axis.name for axis in WORKFLOW.space.axes}


def test_gqa_with_all_heads_is_mha_and_with_one_is_mqa(data):
    mark = lambda **changes: genomes.fingerprint(WORKFLOW, genome(**changes), TINY, data, [0])  # noqa: E731
    shape = lambda **changes: WORKFLOW.shape(genome(**changes), TINY, data)  # noqa: E731
    assert shape(model__attention="gqa", model__kv_heads=4) == shape()
    assert shape(model__attention="gqa", model__kv_heads=1) == shape(model__attention="mqa")
    assert mark(model__attention="gqa", model__kv_heads=4) == mark()
    assert mark(model__attention="gqa") != mark()
    kv = [shape(model__attention=a).kv_bytes_per_token for a in ("mha", "gqa", "mqa", "mla")]
    assert kv == [2 * 2 * g * 8 * 4 for g in (4, 2, 1)] + [2 * (8 + 4) * 4]
    assert [shape(model__attention=a).count for a in ("gqa", "mqa")] != [shape().count] * 2


def test_smoke_plan_changes_one_operator_each(data):
    baseline = genomes.make_candidate(WORKFLOW, "baseline", 0, {}, [], "planned", TINY, data, [0], None)
    cost = WORKFLOW.cost(baseline.genome, TINY, data)
    made = [
        genomes.make_candidate(WORKFLOW, f"g1-{i}", 1, g, [baseline], "planned", TINY, data, [0], cost)
        for i, g in enumerate(WORKFLOW.smoke_plan())
    ]
    assert [(c.origin, c.operators) for c in made] == [("paper-operator", [n]) for n in ("gqa", "mqa", "gelu", "sft")]
    genomes.mark_duplicates(made, [baseline])
    assert not any(c.duplicate_of for c in made)
    assert made[2].match == ""  # SwiGLU and GELU have equal parameters
    assert "parameters" in made[1].match
    assert "training operations" in made[3].match
    twin = genomes.make_candidate(
        WORKFLOW,
        "twin",
        1,
        {"model.attention": "gqa", "model.kv_heads": 4},
        [baseline],
        "planned",
        TINY,
        data,
        [0],
        cost,
    )
    assert twin.duplicate_of == "baseline"


def test_positions_bring_what_they_need_or_are_refused():
    for position in ("learned", "alibi"):
        repaired, names = WORKFLOW.space.feasible({"model.position": position})
        assert (repaired["model.ffn"], repaired["model.attention"], names) == ("gelu", "mha", ["positions"])
    kept, _ = WORKFLOW.space.feasible({"model.position": "alibi", "model.attention": "mqa"})
    assert kept["model.attention"] == "mqa"
    for attention in ("mla", "sliding"):
        with pytest.raises(Infeasible, match="SwiGLU only"):
            WORKFLOW.space.feasible({"model.attention": attention, "model.ffn": "gelu"})


def test_matching_spends_what_attention_saves(data):
    sizes = WORKFLOW.sizes("smoke")
    corpus = replace(data.parts, vocabulary=2048)
    wide = replace(data, parts=corpus)
    baseline = WORKFLOW.cost(genome(), sizes, wide)
    assert baseline.parameters == 651_904
    for attention in ("gqa", "mqa", "mla"):
        plain = WORKFLOW.cost(genome(model__attention=attention), sizes, wide)
        assert abs(plain.parameters / baseline.parameters - 1) > 0.02
        same = WORKFLOW.cost(genome(model__attention=attention, match="parameters"), sizes, wide)
        assert same.parameters == pytest.approx(baseline.parameters, rel=2e-3)
        assert WORKFLOW.match(genome(model__attention=attention, match="parameters"), baseline, sizes, wide) == ""
        work = WORKFLOW.cost(genome(model__attention=attention, match="flops"), sizes, wide)
        assert work.flops == pytest.approx(baseline.flops, rel=2e-3)
    untied = WORKFLOW.cost(genome(model__tied=False), sizes, wide)
    assert untied.parameters == baseline.parameters + 2048 * 128
    narrow = WORKFLOW.shape(genome(model__tied=False, match__untied="parameters"), sizes, wide)
    assert narrow.count == pytest.approx(baseline.parameters, rel=0.02)
    assert narrow.width < 128
    odd = replace(sizes, values=sizes.values | {"heads": 6, "width": 96})
    with pytest.raises(Infeasible, match="6 heads do not divide into 4"):
        WORKFLOW.shape(genome(model__attention="gqa", model__kv_heads=4), odd, wide)


def test_sizes_of_the_budgets(data):
    for budget, low, high in (("smoke", 0.65e6, 0.66e6), ("standard", 4e6, 7e6), ("full", 12e6, 16e6)):
        sizes = WORKFLOW.sizes(budget)
        wide = replace(data, parts=replace(data.parts, vocabulary=sizes["vocabulary"]))
        assert low < WORKFLOW.cost(genome(), sizes, wide).parameters < high


def test_batch_and_context_read_the_same_number_of_tokens():
    plans = [WORKFLOW.plan(genome(**{axis: value}), WORKFLOW.sizes("smoke"))
             for axis in ("train__batch", "train__context") for value in (1.0, 0.5, 2.0)]  # fmt: skip
    assert {plan.tokens for plan in plans} == {150 * 8 * 128}
    assert [(p.steps, p.batch, p.context) for p in plans] == [
        (150, 8, 128), (300, 4, 128), (75, 16, 128), (150, 8, 128), (300, 8, 64), (75, 8, 256),
    ]  # fmt: skip


def test_recipes_exchange_windows_and_a_curriculum_fades(data):
    corpus = replace(data.parts, narrative=torch.full((500,), 7))
    batches = {}
    for recipe in ("wiki", "mix", "curriculum"):
        extra = {} if recipe == "wiki" else {"data__ratio": 0.35}
        plan = replace(WORKFLOW.plan(genome(data__recipe=recipe, **extra), TINY), steps=400)
        batches[recipe] = torch.stack([ids for ids, _ in llm_wikitext.text_batches(corpus, plan, 0)])
        shares = [llm_wikitext.narrative_share(plan, step) for step in (0, 399)]
        assert shares == pytest.approx({"wiki": [0, 0], "mix": [0.35, 0.35], "curriculum": [0.35, 0]}[recipe])
    narrative = {name: (b == 7).all(-1).float() for name, b in batches.items()}  # (steps, batch)
    assert narrative["wiki"].sum() == 0
    assert narrative["mix"].mean() == pytest.approx(0.35, abs=0.03)
    first, last = narrative["curriculum"][:100].mean(), narrative["curriculum"][-100:].mean()
    assert first == pytest.approx(0.35 * 7 / 8, abs=0.05)
    assert last == pytest.approx(0.35 / 8, abs=0.04)
    for name in ("mix", "curriculum"):
        kept = narrative[name] == 0
        assert torch.equal(batches[name][kept], batches["wiki"][kept])  # paired: the other windows are the same
    ids, labels = next(llm_wikitext.text_batches(corpus, WORKFLOW.plan(genome(), TINY), 0))
    assert torch.equal(ids[:, 1:], labels[:, :-1])


def test_tuning_learns_responses_and_visits_each_row_once_an_epoch(data):
    rows = [Row((1, 2), (10 + i, 3)) for i in range(10)]
    seen = [labels.max(1).values.tolist() for _, labels in
            itertools.islice(llm_wikitext.instruction_batches(rows, 5, 3, seed=1), 4)]  # fmt: skip
    assert sorted(seen[0] + seen[1]) == sorted(seen[2] + seen[3]) == list(range(10, 20))
    sizes = replace(TINY, values=TINY.values | {"steps": 40, "post_steps": 30})
    losses = {}
    for method in ("none", "sft", "sft-low-lr"):
        found = WORKFLOW.validate(train(data, sizes=sizes, post__method=method), data, sizes, "cpu").metrics
        losses[method] = found["instruction_loss"]
    assert losses["sft"] < losses["sft-low-lr"] - 0.1 < losses["none"] - 0.15


def test_noise_has_its_size_in_training_and_is_absent_elsewhere():
    shape = micro.Shape("llama", 50, 32, 1, 4, 4, 32, True, 64, 3)
    model = micro.build(shape, 0)
    embedding, ids = model.get_input_embeddings(), torch.randint(50, (4, 16))
    clean = embedding(ids).detach()
    with llm_wikitext.noisy_embeddings(model, 10.0):
        model.train()
        noise = embedding(ids).detach() - clean
        bound = 10 / math.sqrt(16 * 32)
        assert noise.abs().max() <= bound + 1e-6
        assert noise.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
        model.eval()
        assert torch.equal(embedding(ids), clean)
    model.train()
    assert torch.equal(embedding(ids), clean)
    assert not hasattr(embedding, "neftune_noise_alpha")
    with llm_wikitext.noisy_embeddings(model, 0.0):
        assert torch.equal(embedding(ids), clean)


# ------------------------------------------------------------------------------------------------- a cell


def test_seeds_decide_and_candidates_are_paired(data):
    one, same, other = (train(data, seed=seed) for seed in (0, 0, 1))
    assert one.losses == same.losses != other.losses
    plans = [WORKFLOW.plan(genome(**c), TINY) for c in ({}, {"model__attention": "mqa"}, {"post__method": "sft"})]
    orders = [[ids for ids, _ in llm_wikitext.text_batches(data.parts, plan, 0)] for plan in plans]
    assert all(torch.equal(a, b) for order in orders[1:] for a, b in zip(orders[0], order, strict=True))
    tuned = train(data, post__method="neftune")
    assert tuned.losses[: len(one.losses)] == one.losses  # the language model before tuning is the baseline's
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    train(data, post__method="neftune")
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("changes", [{"model__attention": "mla"}, {"model__position": "alibi"}, {"model__tied": False}])
def test_a_stored_model_scores_as_before(tmp_path, data, changes):
    made = train(data, **changes)
    scores = WORKFLOW.validate(made, data, TINY, "cpu")
    WORKFLOW.save(made, tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    back = WORKFLOW.restore(genome(**changes), data, tmp_path, TINY, "cpu")
    again = WORKFLOW.validate(back, data, TINY, "cpu")
    assert again.units == scores.units
    assert again.metrics["fitness"] == scores.metrics["fitness"]


def test_the_finaliser_scores_the_official_test_text(monkeypatch, folder, data):
    monkeypatch.setattr(contract, "_finalising", True)
    text = (folder / "wikitext-2" / "test.txt").read_text()
    lines = text.splitlines(keepends=True)
    whole = WORKFLOW.load_test(replace(TINY, budget="standard"), folder)
    test = WORKFLOW.load_test(TINY, folder)  # a smoke run reads the beginning
    for part, words in ((whole, text), (test, "".join(lines[: math.ceil(0.1 * len(lines))]))):
        assert data.parts.tokenizer.decode(part.tokens.tolist()) == words
        assert part.bytes == len(words)
    scores = WORKFLOW.test(train(data), test, data, TINY, "cpu")
    assert len(scores.units) == math.ceil(len(test.tokens) / 64)
    assert scores.metrics["lm_loss"] < math.log(256)


def test_a_loss_that_is_not_finite_ends_the_cell(monkeypatch, data):
    whole = micro.token_loss

    def broken(*args, **kwargs):
        return whole(*args, **kwargs) * torch.nan

    monkeypatch.setattr(micro, "token_loss", broken)
    with pytest.raises(NonFinite, match="nan at step 1"):
        WORKFLOW.train(genome(), data, 0, TINY, "cpu", lambda step, loss: None)


# ---------------------------------------------------------------------------------------------- no difference


def trial(name: str, fitness: list[float]) -> Trial:
    cells = [
        CellResult(
            cell=f"{name}-{i}", candidate=name, seed=i, role="search", state="completed",
            metrics={"fitness": value, "perplexity": 100.0, "kv_bytes_per_token": 8.0},
        )
        for i, value in enumerate(fitness)
    ]  # fmt: skip
    return Trial(
        candidate=Candidate(id=name, generation=0, origin="baseline", genome={}), state="completed", cells=cells
    )


def test_the_summary_tells_differences_from_noise():
    baseline = trial("baseline", [-6.28, -6.30, -6.26])
    found = WORKFLOW.summarise([baseline, trial("gqa", [-6.27, -6.29]), trial("sft", [-6.0, -6.05])])
    assert found["sentence"].startswith(
        "No difference beyond noise: gqa; different from the baseline beyond noise: sft ("
    )
    assert found["candidates"][1]["noise limit"] == pytest.approx(2 * 0.02 * math.sqrt(1 / 2 + 1 / 3))
    assert found["candidates"][2]["difference"] == pytest.approx(-6.025 + 6.28)
    assert WORKFLOW.summarise([trial("baseline", []), trial("gqa", [-5.0])])["candidates"] == []
    json.dumps(found, allow_nan=False)


def test_with_one_seed_no_difference_counts():
    single = WORKFLOW.summarise([trial("baseline", [-6.0]), trial("gqa", [-6.02]), trial("sft", [-1.0])])
    assert single["sentence"].startswith("No difference beyond noise can be shown: the baseline has one seed")
    assert "widest gap in fitness is 5.000" in single["sentence"]
    assert all(row["noise limit"] is None for row in single["candidates"])
    json.dumps(single, allow_nan=False)


# ------------------------------------------------------------------------------------------------ smoke run


@pytest.mark.slow
def test_the_smoke_run_beats_its_floor_in_every_candidate():
    sizes = WORKFLOW.sizes("smoke")
    data = WORKFLOW.load(sizes, None)
    assert data.hygiene["distinct text train"] == 1568
    perplexity = float((-unigram(data.parts.train, 2048)[data.parts.validation].mean()).exp())
    assert perplexity == pytest.approx(460, abs=5)
    floor = max(WORKFLOW.floors(data, sizes).values())
    found = {}
    for candidate in [genome(), *WORKFLOW.smoke_plan()]:
        made = WORKFLOW.train(candidate, data, 0, sizes, "cpu", silent)
        metrics = WORKFLOW.validate(made, data, sizes, "cpu").metrics
        found[json.dumps(candidate)] = metrics
        assert metrics["perplexity"] < 300
        assert metrics["fitness"] > floor
    assert [m["kv_bytes_per_token"] for m in found.values()] == [2048, 1024, 512, 2048, 2048]
    assert [m["parameters"] for m in found.values()] == [651_904, 619_136, 602_752, 651_904, 651_904]
    losses = [m["instruction_loss"] for m in found.values()]
    assert losses[4] < min(losses[:4]) - 0.5  # instruction tuning works
