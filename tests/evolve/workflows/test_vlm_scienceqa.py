"""ScienceQA by a vision-language model: answers read, prompts, crops, batches, the pinned checkpoint, the workflow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from auto_research.checkpoints import micro
from auto_research.checkpoints.resolve import CATALOGUE, load_processor, resolve
from auto_research.data import scienceqa
from auto_research.data.scienceqa import INSTRUCTIONS, LETTERS, Question, shape_questions
from auto_research.evolve.genome import effects, make_candidate
from auto_research.evolve.plan import plan_generation, random_plan
from auto_research.evolve.records import Candidate, CellResult, RunConfig, Trial
from auto_research.evolve.space import Genome, Infeasible
from auto_research.evolve.workflow import Data, SealedTest, Sizes
from auto_research.evolve.workflows import workflow
from auto_research.evolve.workflows._scienceqa import Given, Reader, Recipe, evaluate, parse
from auto_research.evolve.workflows.vlm_scienceqa import PUBLISHED, ScienceQA
from auto_research.runtime.errors import UserError

# ------------------------------------------------------------------------------------------------ reading answers

CHOICES = ("red", "a magnet", "gravity", "friction")


@pytest.mark.parametrize(
    ("said", "named"),
    [
        # a letter inside a word, or an article, is no letter
        ("The answer is because of gravity", None),
        ("because", None),
        ("about", None),
        ("Cats Are Big Dogs", None),
        ("A magnet attracts iron", None),
        ("There is no answer", None),
        ("Vitamin C prevents scurvy", None),
        ("A-type", None),
        ("B's friend", None),
        # a letter that stands alone
        ("B", 1),
        ("b", 1),
        ("(B)", 1),
        ("B.", 1),
        ("**B**", 1),
        ("Ｂ", 1),
        ("Answer: B", 1),
        ("Assistant: B", 1),
        ("\\boxed{D}", 3),
        ("C) gravity", 2),
        ("D: friction", 3),
        ("B in the end", None),
        ("B because A and C are wrong", 1),
        ("The answer is B.", 1),
        ("The answer is A", 0),
        ("The answer is A because it is red", 0),
        ("The correct answer is option C.", 2),
        ("the answer is (c).", 2),
        ("Option B is correct", 1),
        ("I think it's B", 1),
        # the full text of a choice
        ("gravity", 2),
        ("Gravity.", 2),
        ("A magnet", 1),
        ("The answer is gravity.", 2),
        ("answer: gravity", 2),
        ("The answer is A magnet", 1),
        ("It is caused by friction", None),
        # a letter with its text, whole or cut off, and a contradiction, which the letter decides
        ("B. a magnet", 1),
        ("B a magnet", 1),
        ("The answer is B, a magnet.", 1),
        ("C. grav", 2),
        ("B. gravity", 1),
        # several, none of the choices, or ruled out
        ("A or B", None),
        ("A, B", None),
        ("Both A and B", None),
        ("Answer: A, B", None),
        ("Answer: A/B", None),
        ("None of A, B, C", None),
        ("A. red\nB. a magnet\nC. gravity\nD. friction", None),
        ("E", None),
        ("The answer is E.", None),
        ("not B", None),
        ("It is not B", None),
        ("Option B is wrong", None),
        ("A is wrong. C is wrong. B", 1),
        ("Eliminate A and C. B", 1),
        ("Not A, not C, so B", 1),
        ("The answer is not A. It is D.", 3),
        ("The answer is A. Wait, the answer is C.", 2),
        ("", None),
        (" \n", None),
    ],
)
def test_what_an_answer_names(said: str, named: int | None) -> None:
    assert parse(said, CHOICES) == named


@pytest.mark.parametrize(
    ("said", "choices", "named"),
    [
        ("Solution A", ("neither is stronger", "Solution B", "Solution A"), 2),
        ("The answer is Solution A.", ("neither is stronger", "Solution B", "Solution A"), 2),
        ("A", ("neither is stronger", "Solution B", "Solution A"), 0),
        ("B. Solution A", ("neither is stronger", "Solution B", "Solution A"), 1),
        ("ff", ("FF", "Ff", "ff"), 2),
        ("The genotype is Ff.", ("FF", "Ff", "ff"), 1),
        ("fF", ("FF", "Ff", "ff"), None),
        ("The answer is 12.", ("2", "12", "-2", "2.5"), 1),
        ("The answer is 2.", ("2", "12", "-2", "2.5"), 0),
        ("The answer is -2", ("2", "12", "-2", "2.5"), 2),
        ("The answer is 2.7", ("2", "12", "-2", "2.5"), None),
        ("There are 2 reasons", ("2", "12"), None),
        ("There is no evidence", ("yes", "no"), None),
        ("No.", ("yes", "no"), 1),
        ("C", ("yes", "no"), None),
        ("dark red", ("red", "dark red"), 1),
    ],
)
def test_choices_that_look_alike_or_like_letters(said: str, choices: tuple[str, ...], named: int | None) -> None:
    assert parse(said, choices) == named


def test_every_letter_and_every_text_is_read_back() -> None:
    choices = tuple(f"thing number {number}" for number in range(5))
    for index, choice in enumerate(choices):
        for form in ("{0}", "{0}.", "({0})", "Answer: {0}", "The answer is {0}.", "{0}. {1}", "{1}", "It is {1}."):
            assert parse(form.format(LETTERS[index], choice), choices) == index


# --------------------------------------------------------------------------------------------------- a checkpoint

TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""Written the way SmolVLM2 writes a conversation: the answer begins right after a colon."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Hugging Face cache that holds a small untrained model as the pinned SmolVLM2-256M, file for file."""
    root = tmp_path_factory.mktemp("hub")
    entry = CATALOGUE["smolvlm2-256m"]
    assert entry.repository is not None
    assert entry.revision == "067788b187b95ebe7b2e040b3e4299e342e5b8fd"
    folder = root / f"models--{entry.repository.replace('/', '--')}" / "snapshots" / entry.revision
    with torch.random.fork_rng():
        torch.manual_seed(5)
        recipe = replace(micro.RECIPES["micro-scienceqa"][0], width=32, layers=1, heads=4, vocabulary=500)
        places = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
        tokenizer = micro._chat_tokenizer(micro._question_texts(), recipe, [*micro.IMAGE_TOKENS, *places], 1024)
        model, processor = micro._vision_language(tokenizer, recipe, 64, patch=8, fold=4, deviation=0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    for name in ("processor_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    pictures = {
        "do_convert_rgb": True,
        "do_image_splitting": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "SmolVLMImageProcessor",
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": 64},
        "processor_class": "SmolVLMProcessor",
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": 256},
        "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 64}},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    (folder / "processor_config.json").write_text(
        json.dumps({"image_seq_len": 4, "processor_class": "SmolVLMProcessor"})
    )
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    yield root
    shutil.rmtree(root)


@pytest.fixture
def cached(hub: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has the checkpoint in its Hugging Face cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    return hub


SIZES = Sizes(
    "standard",
    {"validation": 12, "test": 12, "reordered": 6, "micro_batch": 4, "accumulate": 1, "micro": 0},
)


@pytest.fixture(scope="module")
def science() -> ScienceQA:
    found = workflow("vlm-scienceqa")
    assert isinstance(found, ScienceQA)
    return found


@pytest.fixture
def data(science: ScienceQA, cached: Path) -> Data:
    return science.load(SIZES, None)


def genome(**changes: Any) -> Genome:
    return ScienceQA.space.feasible({name.replace("_", ".", 1): value for name, value in changes.items()})[0]


def unwatched(step: int, loss: float) -> None:
    raise AssertionError("nothing is trained")


def reader(science: ScienceQA, data: Data, **changes: Any) -> Reader:
    return science.train(genome(**changes), data, 0, SIZES, "cpu", unwatched)


def tokens(answers: Reader, size: tuple[int, int]) -> int:
    """Visual tokens of a picture of this size."""
    stream = Question("1", "What?", ("x", "y"), 0, image=png(size))
    inputs, _ = answers.batch([stream], "cpu")
    return int((inputs["input_ids"] == answers.model.config.image_token_id).sum())


def png(size: tuple[int, int]) -> bytes:
    import io

    stream = io.BytesIO()
    Image.new("RGB", size, (200, 30, 90)).save(stream, "PNG")
    return stream.getvalue()


def test_the_pinned_snapshot_serves_by_id_and_revision(cached: Path, data: Data) -> None:
    found = data.parts.checkpoint.resolved
    assert (found.name, found.source) == ("smolvlm2-256m", "hub cache")
    assert found.revision == "HuggingFaceTB/SmolVLM2-256M-Video-Instruct@067788b187b95ebe7b2e040b3e4299e342e5b8fd"
    assert "smolvlm2-256m" in data.checkpoints
    assert "SmolVLM2" not in data.stand_in, "the checkpoint is no stand-in"
    assert "visual shapes" in data.stand_in


def test_its_processor_needs_no_torchvision_and_speaks_its_own_template(data: Data) -> None:
    processor = load_processor(data.parts.checkpoint.resolved)
    assert type(processor).__name__ == "Idefics3Processor"
    assert type(processor.image_processor).__name__ == "SmolVLMImageProcessorPil"
    assert processor.image_seq_len == 4
    text, _ = Reader(None, processor, Recipe("direct", True, "given", 64, "generate", 4)).prompt(
        Question("1", "Which?", ("x", "y"), 0, image=png((8, 8)))
    )
    assert text.startswith("<|im_start|>User:<image>Question: Which?")
    assert text.endswith("<end_of_utterance>\nAssistant:")


# ----------------------------------------------------------------------------------------------------- the picture


def test_the_image_axes_change_the_number_of_visual_tokens(science: ScienceQA, data: Data) -> None:
    """Four tokens a crop. The processor enlarges: what counts is its longest edge, not the size of the picture."""

    def seen(size: tuple[int, int], **changes: Any) -> int:
        return tokens(reader(science, data, **changes), size)

    assert [seen((100, 75), image_longest_edge=edge) for edge in (2048, 1024, 512)] == [13 * 4, 5 * 4, 4]
    assert [seen((80, 80), image_longest_edge=edge) for edge in (2048, 1024, 512)] == [17 * 4, 5 * 4, 4]
    assert seen((100, 75), image_split="off") == seen((80, 80), image_split="off") == 4
    assert seen((30, 30)) == seen((900, 900)) == 17 * 4, "shrinking the picture alone changes nothing"


def test_one_crop_is_one_recipe_however_it_is_asked_for(science: ScienceQA, data: Data) -> None:
    off, small = genome(image_split="off"), genome(image_longest_edge=512)
    described = [science.describe(made, SIZES, data).configuration for made in (off, small, genome())]
    assert described[0] == described[1] != described[2]
    one, other = (reader(science, data, **change) for change in ({"image_split": "off"}, {"image_longest_edge": 512}))
    picture = [Question("1", "What?", ("x", "y"), 0, image=png((31, 17)))]
    for name, value in one.batch(picture, "cpu")[0].items():
        assert torch.equal(value, other.batch(picture, "cpu")[0][name])
    baseline = make_candidate(science, "baseline", 0, genome(), [], "planned", SIZES, data, [0], None)
    trials = [Trial(candidate=baseline, state="completed")]
    candidates = [
        make_candidate(science, f"g1-{i}", 1, made, [baseline], "planned", SIZES, data, [0], None)
        for i, made in enumerate((off, small))
    ]
    assert candidates[0].fingerprint == candidates[1].fingerprint != trials[0].candidate.fingerprint


def test_costs_count_the_tokens_that_are_read(science: ScienceQA, data: Data) -> None:
    costs = [science.cost(genome(image_longest_edge=edge), SIZES, data) for edge in (2048, 1024, 512)]
    assert [cost.extra["visual_tokens"] for cost in costs] == [68, 20, 4]
    assert costs[0].flops > costs[1].flops > costs[2].flops
    assert costs[0].memory_bytes > costs[2].memory_bytes
    model = reader(science, data).model
    assert {cost.parameters for cost in costs} == {sum(p.numel() for p in model.parameters())}
    described = science.describe(genome(), SIZES, data)
    assert described.parameters == {name: list(p.shape) for name, p in model.named_parameters()}
    few = science.cost(ScienceQA.space.resolve({"decode.max_new_tokens": 4}), SIZES, data)
    assert few.flops < costs[0].flops
    assert science.match(genome(image_split="off"), costs[0], SIZES, data) == ""


# -------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("mode", ["generate", "letter-likelihood"])
def test_batch_size_and_order_change_no_answer(science: ScienceQA, data: Data, mode: str) -> None:
    """Prompts of all lengths, with one crop, with seventeen and without a picture, padded on the left."""
    answers = reader(science, data, answer_mode=mode)
    questions = data.parts.validation
    assert len({question.image is None for question in questions[:4]}) == 2
    alone = list(answers.answer(questions, 1))
    assert list(answers.answer(questions, 5)) == list(answers.answer(questions, 12)) == alone
    assert list(answers.answer(questions[::-1], 4))[::-1] == alone
    texts = [question for question in questions if question.image is None]
    assert list(answers.answer(texts, 4)) == [one for one, q in zip(alone, questions) if q.image is None]


def test_prompts_are_padded_on_the_left(science: ScienceQA, data: Data) -> None:
    inputs, _ = reader(science, data).batch(data.parts.validation[:6], "cpu")
    mask = inputs["attention_mask"]
    assert mask[:, -1].all(), "every answer begins right after its prompt"
    assert (mask.diff(dim=1) >= 0).all()
    assert mask.sum(1).unique().numel() > 1


def test_letters_are_compared_as_the_model_spells_them(science: ScienceQA, data: Data) -> None:
    """Against a plain forward pass without padding: log p of `A` and of ` A` together."""
    answers = reader(science, data, answer_mode="letter-likelihood")
    questions = data.parts.validation[:5]
    with torch.inference_mode():
        scores = answers.letter_scores(answers.batch(questions, "cpu")[0])
        for row, question in enumerate(questions):
            inputs, asked = answers.batch([question], "cpu")
            logged = answers.model(**inputs).logits[0, -1].log_softmax(-1)
            for index in range(len(question.choices)):
                forms = (answers._ids(form) for form in (LETTERS[index], f" {LETTERS[index]}"))
                wanted = torch.stack([logged[ids[0]] for ids in forms if len(ids) == 1]).logsumexp(0)
                assert scores[row, index] == pytest.approx(wanted.item(), abs=1e-4)
            given = next(answers.answer([question], 1))
            best = int(scores[row, : len(question.choices)].argmax())
            assert (given.text, given.choice, given.new) == (LETTERS[best], asked[0].order[best], 0)


def test_generation_is_greedy_and_its_end_is_counted_once(
    science: ScienceQA, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = reader(science, data)
    question = data.parts.validation[0]
    with torch.inference_mode():
        inputs, _ = answers.batch([question], "cpu")
        ids, wanted = inputs["input_ids"], []
        for _ in range(16):
            step = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
            wanted.append(int(answers.model(**step).logits[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor([wanted[-1:]])], 1)
    stop = answers.model.generation_config.eos_token_id
    wanted = wanted[: wanted.index(stop) + 1] if stop in wanted else wanted
    given = next(answers.answer([question], 1))
    assert given.new == len(wanted)
    assert given.text == answers.tokenizer.decode(wanted, skip_special_tokens=True)
    end, word = answers.tokenizer.eos_token_id, answers._ids("B")[0]
    assert end == answers.tokenizer.pad_token_id, "padding cannot be told from the end by its number"
    made = torch.tensor([[word, end, end, end], [word, word, word, word], [end, end, end, end]])
    monkeypatch.setattr(answers.model, "generate", lambda **kw: torch.cat([kw["input_ids"], made], 1))
    texts, new = answers._generate({"input_ids": torch.ones(3, 7, dtype=torch.long)})
    assert (texts, new) == (["B", "BBBB", ""], [2, 4, 1])


def test_nothing_of_an_answer_or_a_solution_is_in_a_prompt(science: ScienceQA, data: Data) -> None:
    for style in INSTRUCTIONS:
        answers = reader(science, data, prompt_style=style)
        for question in data.parts.validation:
            other = replace(question, answer=(question.answer + 1) % len(question.choices))
            assert answers.prompt(question) == answers.prompt(other)


# ----------------------------------------------------------------------------------------------------- evaluation


class Scripted:
    """Answers by a rule instead of a model."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule

    def answer(self, questions: list[Question], batch: int) -> Iterator[Given]:
        for question in questions:
            yield Given(self.rule(question), "", 4 if question.image else 0, 50, 3)


def test_scores_of_answers_by_rule() -> None:
    questions = shape_questions("validation", 36)
    perfect = evaluate(Scripted(lambda q: q.answer), questions, 8, 36)  # type: ignore[arg-type]
    assert perfect.units == [1.0] * 36
    assert perfect.metrics["accuracy"] == perfect.metrics["parse_rate"] == perfect.metrics["order_agreement"] == 1
    assert perfect.metrics["fitness"] == pytest.approx(1.001)
    assert perfect.metrics["visual_tokens"] == 4, "of questions with a picture"
    blind = evaluate(Scripted(lambda q: 0), questions, 8, 36).metrics  # type: ignore[arg-type]
    assert blind["accuracy"] == pytest.approx(np.mean([q.answer == 0 for q in questions]))
    assert blind["order_agreement"] == 0, "always A is another choice when the order is reversed"
    silent = evaluate(Scripted(lambda q: None), questions, 8, 36).metrics  # type: ignore[arg-type]
    assert silent["accuracy"] == silent["parse_rate"] == silent["order_agreement"] == silent["fitness"] == 0
    halves = evaluate(Scripted(lambda q: q.answer if q.image else None), questions, 8, 0).metrics  # type: ignore[arg-type]
    assert (halves["accuracy_with_picture"], halves["accuracy_text_only"]) == (1, 0)
    assert halves["parse_rate"] == pytest.approx(24 / 36)
    assert "order_agreement" not in halves


def test_floors_are_a_guess_and_the_usual_letter(science: ScienceQA, data: Data) -> None:
    questions = data.parts.validation
    floors = science.floors(data, SIZES)
    assert floors["uniform guess"] == pytest.approx(sum(1 / len(q.choices) for q in questions) / len(questions))
    letters = [LETTERS[q.answer] for q in questions]
    usual = max(sorted(set(letters)), key=letters.count)
    assert floors[f"always {usual}"] == pytest.approx(letters.count(usual) / len(letters))
    assert science.anchors(data, SIZES) == {}


# ----------------------------------------------------------------------------------------------- data of both kinds


def test_a_split_of_shapes_is_clean_and_its_test_part_sealed(science: ScienceQA, data: Data) -> None:
    assert data.examples == len(data.parts.validation) == 12
    assert data.hygiene["distinct validation"] == data.hygiene["distinct test"] == 12
    assert {n for name, n in data.hygiene.items() if "share" in name} == {0}
    assert data.hygiene["distinct training pictures"] == scienceqa.TRAINED
    with pytest.raises(SealedTest):
        science.load_test(SIZES, None)


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """ScienceQA's format: 20 problems a split; the first validation problem is a test problem too."""
    problems: dict[str, Any] = {}
    for number, split in enumerate(["train"] * 20 + ["val"] * 20 + ["test"] * 20):
        one = shape_questions("validation", 60)[number]
        problems[str(number)] = {
            "question": one.text,
            "choices": list(one.choices),
            "answer": one.answer,
            "hint": one.hint,
            "image": "image.png" if one.image else None,
            "lecture": "LECTURE",
            "solution": "SOLUTION",
            "split": split,
        }
        if isinstance(one.image, bytes):
            path = tmp_path / "scienceqa" / split / str(number) / "image.png"
            path.parent.mkdir(parents=True)
            path.write_bytes(one.image)
    first = problems["40"] | {"split": "val"}
    problems["20"] = {**first, "choices": first["choices"][::-1], "answer": len(first["choices"]) - 1 - first["answer"]}
    if first["image"]:
        source = tmp_path / "scienceqa" / "test" / "40" / "image.png"
        target = tmp_path / "scienceqa" / "val" / "20" / "image.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    splits = {part: [id for id, one in problems.items() if one["split"] == part] for part in ("train", "val", "test")}
    (tmp_path / "scienceqa" / "problems.json").write_text(json.dumps(problems))
    (tmp_path / "scienceqa" / "pid_splits.json").write_text(json.dumps(splits))
    return tmp_path


def test_official_files_win_and_repeated_questions_are_left_out(
    science: ScienceQA, cached: Path, official: Path
) -> None:
    many = Sizes("standard", {**SIZES.values, "validation": 50, "test": 50})
    for folder in (official, official / "scienceqa"):
        found = science.load(many, folder)
        assert sorted(question.id for question in found.parts.validation) == sorted(str(n) for n in range(21, 40))
        assert found.hygiene["validation questions left out as repeated"] == 1
        assert found.hygiene["validation and test share"] == 0
        assert found.stand_in == ""
        assert found.subset["validation"] == [question.id for question in found.parts.validation]
    assert science.anchors(found, many) == PUBLISHED
    fewer = science.load(SIZES, official)
    assert [q.id for q in fewer.parts.validation] == [q.id for q in found.parts.validation][:12]
    assert fewer.digests["validation"] != found.digests["validation"]
    answers = reader(science, fewer)
    scores = science.validate(answers, fewer, SIZES, "cpu")
    assert len(scores.units) == 12
    for question in fewer.parts.validation:
        text, _ = answers.prompt(question)
        assert "LECTURE" not in text
        assert "SOLUTION" not in text


def test_a_smoke_run_takes_the_model_and_the_questions_that_travel_with_it(
    science: ScienceQA, official: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is cached; what is given by `--dataset-dir` is asked all the same."""
    from auto_research.evolve.workflows import vlm_scienceqa

    monkeypatch.setattr(vlm_scienceqa, "cache_folder", lambda *parts: official / "scienceqa")
    assert vlm_scienceqa._folder(science.sizes("smoke"), None) is None
    assert vlm_scienceqa._folder(science.sizes("standard"), None) == official / "scienceqa"
    assert vlm_scienceqa._folder(science.sizes("smoke"), official) == official / "scienceqa"
    assert science.sizes("smoke")["micro"] == 1
    assert science.sizes("standard")["micro"] == science.sizes("full")["micro"] == 0
    assert min(science.sizes("standard")["validation"], science.sizes("full")["validation"]) >= 200
    assert science.sizes("full")["test"] == 4241


# --------------------------------------------------------------------------------------------------- the controller


def test_five_trials_by_default(science: ScienceQA, data: Data) -> None:
    """1 + 2 x 2: a fair ablation of the prompt, then pictures and length around the champion."""
    from auto_research.cli.evolve import rounds

    assert rounds(science, "smoke") == (2, 2)
    config = RunConfig(run="r", workflow=science.key, generations=2, population=2, seeds=[0])
    baseline = plan_generation(config, science, 0, None, [], SIZES, data).candidates[0]
    assert baseline.genome == {
        "prompt.style": "direct",
        "prompt.hint": "on",
        "answer.mode": "generate",
        "decode.max_new_tokens": 16,
        "image.split": "on",
        "image.longest_edge": 2048,
        "prompt.choice_order": "given",
    }
    trials = [Trial(candidate=baseline, state="completed")]
    first = plan_generation(config, science, 1, baseline, trials, SIZES, data).candidates
    assert [candidate.operators for candidate in first] == [["context-first"], ["elimination"]]
    trials += [Trial(candidate=candidate, state="completed") for candidate in first]
    second = plan_generation(config, science, 2, baseline, trials, SIZES, data).candidates
    runs = [candidate for candidate in second if not candidate.reason and not candidate.duplicate_of]
    assert len(runs) == 2
    for candidate in runs:
        (axis,) = [name for name, (old, new) in candidate.difference.items() if old is not None and new is not None]
        assert axis.split(".")[0] in ("image", "decode")


def test_no_sampler_changes_the_order_of_the_choices(science: ScienceQA, data: Data) -> None:
    config = RunConfig(run="r", workflow=science.key, generations=1, population=2, seeds=[0])
    drawn = random_plan(config, science, SIZES, data, 5)
    assert {candidate.genome["prompt.choice_order"] for candidate in drawn} == {"given"}


def test_a_context_that_is_not_shown_cannot_come_first() -> None:
    with pytest.raises(Infeasible, match="none to put first"):
        ScienceQA.space.feasible({"prompt.style": "context-first", "prompt.hint": "off"})


def test_every_axis_value_has_an_effect(science: ScienceQA, data: Data) -> None:
    found = effects(science, SIZES, data)
    wanted = {(axis.name, value) for axis in science.space.axes for value in axis.probes()}
    assert {(effect.axis, effect.value) for effect in found} == wanted
    assert all(effect.holds for effect in found), [effect.text for effect in found if not effect.holds]
    moved = {(effect.axis, effect.value): set(effect.moved) for effect in found}
    assert {"forward", "cost"} <= moved["image.longest_edge", 512]
    assert {"forward", "cost"} <= moved["image.split", "off"]
    assert "data_order" in moved["prompt.choice_order", "reversed"]
    assert {"generated", "cost"} <= moved["decode.max_new_tokens", 4]
    assert {"generated"} <= moved["answer.mode", "letter-likelihood"]
    assert "forward" in moved["prompt.hint", "off"]
    assert "forward" in moved["prompt.style", "context-first"]


def test_a_stored_recipe_answers_alike_and_only_for_its_candidate(
    science: ScienceQA, data: Data, tmp_path: Path
) -> None:
    made = genome(image_split="off", prompt_style="elimination")
    first = science.train(made, data, 0, SIZES, "cpu", unwatched)
    science.save(first, tmp_path)
    again = ScienceQA().restore(made, data, tmp_path, SIZES, "cpu")
    clock = "seconds_per_example"
    one, two = (science.validate(answers, data, SIZES, "cpu") for answers in (first, again))
    assert one.units == two.units
    assert one.metrics.pop(clock) > 0 < two.metrics.pop(clock)
    assert one.metrics == two.metrics
    with pytest.raises(UserError, match="not that of its candidate"):
        science.restore(genome(), data, tmp_path, SIZES, "cpu")
    assert not any(parameter.requires_grad for parameter in first.model.parameters())
    assert {parameter.dtype for parameter in first.model.parameters()} == {torch.float32}


def test_the_summary_says_what_order_and_crops_change(science: ScienceQA) -> None:
    def a_trial(id: str, tokens: float, accuracy: float) -> Trial:
        metrics = {
            "accuracy": accuracy,
            "accuracy_with_picture": accuracy,
            "parse_rate": 1.0,
            "visual_tokens": tokens,
            "order_agreement": 0.75,
        }
        cell = CellResult(cell=id, candidate=id, seed=0, role="search", state="completed", metrics=metrics)
        candidate = Candidate(id=id, generation=0, origin="baseline", genome={})
        return Trial(candidate=candidate, state="completed", mean=accuracy, cells=[cell])

    found = science.summarise([a_trial("baseline", 68, 0.9), a_trial("g2-1", 4, 0.8)])
    assert found["sentence"] == (
        "Of baseline's answers 100% name a choice, and 75% the same one when the order of the choices is reversed. "
        "A picture is 68 visual tokens in baseline (accuracy with pictures 0.900) "
        "and 4 visual tokens in g2-1 (accuracy with pictures 0.800)."
    )
    assert [row["candidate"] for row in found["candidates"]] == ["baseline", "g2-1"]
    assert science.summarise([]) == {}


def test_a_run_on_the_virtual_card_has_no_finding(science: ScienceQA, data: Data, tmp_path: Path) -> None:
    """The whole life of a cell and of the finaliser on `cuda`, both ways of answering."""
    from auto_research.rehearsal import rehearse

    few = Sizes("standard", {**SIZES.values, "validation": 4, "reordered": 2})
    small = replace(data, parts=replace(data.parts, validation=data.parts.validation[:4]))
    on_cpu = science.validate(reader(science, small), small, few, "cpu").units
    fresh = ScienceQA()
    with rehearse(card="a30", keep_going=True) as report:
        for mode in ("generate", "letter-likelihood"):
            made = fresh.train(genome(answer_mode=mode), small, 0, few, "cuda", unwatched)
            assert made.model.device.type == "cuda"
            found = fresh.validate(made, small, few, "cuda").units
            fresh.save(made, tmp_path)
            restored = fresh.restore(genome(answer_mode=mode), small, tmp_path, few, "cuda")
            assert fresh.test(restored, small.parts.validation, small, few, "cuda").units == found
            assert mode != "generate" or found == on_cpu
    assert [finding.text() for finding in report.findings] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_model_that_is_built_here_beats_the_floors_and_always_names_a_choice(science: ScienceQA) -> None:
    """On enough questions to tell; every recipe of the smoke run stays readable."""
    sizes = Sizes("smoke", {**science.sizes("smoke").values, "validation": 150, "reordered": 60})
    data = science.load(sizes, None)
    assert resolve("micro-scienceqa").source == "built here"
    floor = max(science.floors(data, sizes).values())
    for change in ({}, {"prompt_style": "context-first"}, {"prompt_style": "elimination"}, {"image_split": "off"}):
        made = science.train(genome(**change), data, 0, sizes, "cpu", unwatched)
        found = science.validate(made, data, sizes, "cpu").metrics
        assert found["parse_rate"] == 1, change
        assert found["accuracy"] > floor + 0.1, change
        assert found["accuracy_with_picture"] > floor, change
    short = ScienceQA.space.resolve({"decode.max_new_tokens": 4})
    cut = science.validate(science.train(short, data, 0, sizes, "cpu", unwatched), data, sizes, "cpu").metrics
    assert cut["parse_rate"] == 1
    assert cut["generated_tokens"] == 4
