"""A vision-language checkpoint answers ScienceQA: five or more ways of asking it, without training.

A candidate is a recipe of inference: how the question is put, whether its context is shown, how a picture is cut into
crops, and whether the answer is written and read or taken from the likelihood of the letters. The checkpoint is frozen
and everything is deterministic, so candidates are compared over examples, and seeds change nothing.

SmolVLM2-256M answers ScienceQA where both are on this machine. A smoke run, and a machine without them, asks a model of
the same architecture that is built here about visual shapes, in the same format.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from auto_research.data import scienceqa, shapes
from auto_research.data.scienceqa import LETTERS, Question
from auto_research.evolve.space import CONTROL, Axis, Constraint, Genome, Space
from auto_research.evolve.workflow import (
    Cost,
    Data,
    Described,
    Evidence,
    Level,
    Operator,
    Progress,
    Scores,
    Sizes,
    Workflow,
    digest,
    disjoint,
)
from auto_research.evolve.workflows._checkpoints import MICRO, RUNTIME_BYTES, Checkpoint, choose
from auto_research.runtime.budget import Budget
from auto_research.runtime.cache import cache_folder
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import write_json_atomic

if TYPE_CHECKING:
    from auto_research.evolve.records import Trial
    from auto_research.evolve.workflows._scienceqa import Reader, Recipe

CHECKPOINTS = ("smolvlm2-256m", "micro-scienceqa")
"""What answers, in order of preference."""
PUBLISHED = {"SmolVLM2-256M on the complete test split": 0.5492}
PROBES = 6
"""Questions of an effect probe."""
SHOWN = (
    "accuracy_with_picture",
    "accuracy_text_only",
    "parse_rate",
    "visual_tokens",
    "generated_tokens",
    "order_agreement",
    "seconds_per_example",
)
"""Metrics of the summary beside accuracy."""


@dataclass(frozen=True)
class Parts:
    """What a cell sees: the validation questions and the checkpoint."""

    validation: list[Question]
    checkpoint: Checkpoint


class ScienceQA(Workflow):
    """See the module."""

    key: ClassVar[str] = "vlm-scienceqa"
    title: ClassVar[str] = "Real VLM checkpoint / ScienceQA"
    model: ClassVar[str] = "smolvlm2-256m"
    dataset: ClassVar[str] = "scienceqa"
    metric: ClassVar[str] = "accuracy"
    stochastic: ClassVar[bool] = False
    level: ClassVar[Level] = "L1 small public"
    language_model: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...] | None] = (
        "torch",
        "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
        "transformers.models.smolvlm.modeling_smolvlm",
        "transformers.models.idefics3.processing_idefics3",
    )
    rounds: ClassVar[dict[Budget, tuple[int, int]]] = {"smoke": (2, 2), "standard": (2, 3), "full": (3, 4)}
    settings: ClassVar[tuple[str, ...]] = ("micro_batch", "accumulate")
    schedule: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("image", "decoding"),
        ("structure",),
        ("structure", "image", "decoding"),
    )
    space: ClassVar[Space] = Space(
        (
            Axis(
                "prompt.style",
                values=("direct", "context-first", "elimination"),
                stage="inference",
                changes="inference",
                source="arXiv:2209.09513 orders question, context and choices; arXiv:2310.15575 eliminates choices",
            ),
            Axis(
                "prompt.hint",
                values=("on", "off"),
                stage="inference",
                changes="inference",
                source="whether the question's context is shown; lecture and solution never are",
            ),
            Axis(
                "answer.mode",
                values=("generate", "letter-likelihood"),
                stage="inference",
                changes="inference",
                source="arXiv:2210.12353: written and parsed, or the likeliest of the letters",
            ),
            Axis(
                "decode.max_new_tokens",
                "int",
                (16, 8, 4),
                condition={"answer.mode": ("generate",)},
                stage="inference",
                changes="compute",
                source="an answer is cut off there",
                group="decoding",
            ),
            Axis(
                "image.split",
                values=("on", "off"),
                stage="inference",
                changes="compute",
                source="arXiv:2504.05299: a picture in crops and as a whole, or as a whole alone",
                group="image",
            ),
            Axis(
                "image.longest_edge",
                "int",
                (2048, 1024, 512),
                condition={"image.split": ("on",)},
                stage="inference",
                changes="compute",
                source="pixels a picture is enlarged to before it is cut into crops of 512 (smaller crops scale it)",
                group="image",
            ),
            Axis(
                "prompt.choice_order",
                values=("given", "reversed", "shuffled"),
                stage="inference",
                changes="inference",
                source="robustness: a model that reads the choices answers alike whatever their letters",
                group=CONTROL,
            ),
        ),
        (
            Constraint(
                "context to put first",
                lambda genome: genome["prompt.style"] != "context-first" or genome["prompt.hint"] == "on",
                "without its context a question has none to put first",
            ),
        ),
    )
    operators: ClassVar[tuple[Operator, ...]] = (
        Operator(
            "context-first",
            "Context before the question",
            {"prompt.style": ("context-first",)},
            "arXiv:2209.09513",
            "core_mechanism",
            omitted=("lectures and explanations in the prompt: they give the answer away",),
            keywords=("prompt", "context", "hint", "order", "提示", "上下文"),
            code=("auto_research.data.scienceqa.ask",),
        ),
        Operator(
            "elimination",
            "Process of elimination",
            {"prompt.style": ("elimination",)},
            "arXiv:2310.15575",
            "simplified",
            omitted=("the second pass over the choices that were left: one prompt asks for both",),
            keywords=("prompt", "elimination", "choices", "reasoning", "排除", "提示"),
            code=("auto_research.data.scienceqa.ask",),
        ),
        Operator(
            "letter-likelihood",
            "The likeliest letter",
            {"answer.mode": ("letter-likelihood",)},
            "arXiv:2210.12353",
            "core_mechanism",
            keywords=("likelihood", "letter", "symbol", "answer", "decoding", "似然"),
            code=("auto_research.evolve.workflows._scienceqa.Reader.letter_scores",),
        ),
        Operator(
            "whole-picture",
            "A picture as one crop",
            {"image.split": ("off",), "image.longest_edge": (512,)},
            "arXiv:2504.05299",
            "core_mechanism",
            keywords=("image", "picture", "crops", "splitting", "tokens", "resolution", "图像", "分辨率"),
            code=("auto_research.evolve.workflows._scienceqa.Recipe.of",),
        ),
    )
    evidence: ClassVar[tuple[Evidence, ...]] = (
        Evidence(
            "Multimodal chain of thought",
            "arXiv:2302.00923",
            "its rationales come from a model that was trained on the solutions, and nothing is trained here",
            "a checkpoint that writes rationales, and an axis that feeds them back",
            ("chain of thought", "rationale", "reasoning", "思维链"),
        ),
        Evidence(
            "Chameleon: tools chosen by a planner",
            "arXiv:2304.09842",
            "there is no planner and no tool that reads text in pictures or looks up knowledge",
            "installed tools with their outputs as context",
            ("tools", "planner", "retrieval", "工具"),
        ),
    )

    def __init__(self) -> None:
        self._loaded: dict[tuple[str, str], tuple[Any, Any]] = {}

    def sizes(self, budget: Budget) -> Sizes:
        """Questions of each part at most, of which `reordered` are asked again with their choices reversed.

        `micro_batch` questions are decoded at once. A smoke run always asks the model that is built here: the real one
        takes minutes a question on a processor.
        """
        smoke = {"validation": 24, "test": 24, "reordered": 24, "micro_batch": 8, "accumulate": 1, MICRO: 1}
        standard = {"validation": 500, "test": 500, "reordered": 200, "micro_batch": 16, "accumulate": 1, MICRO: 0}
        full = {**standard, "validation": 2097, "test": 4241, "reordered": 500}
        return Sizes(budget, {"smoke": smoke, "standard": standard, "full": full}[budget])

    # -------------------------------------------------------------------------------------------------------- data

    def load(self, sizes: Sizes, dataset_dir: Path | None) -> Data:
        """Validation questions in the order of their digests, without those that the test part asks too.

        Of the test part only its contents' digests are looked at. A smoke run leaves the cache alone: it reads what
        `dataset_dir` holds, or shapes.
        """
        checkpoint = choose(CHECKPOINTS, sizes.values)
        folder, count = _folder(sizes, dataset_dir), sizes["validation"]
        reasons = [checkpoint.stand_in] if checkpoint.stand_in else []
        left_out = 0
        if folder is None:
            kept = scienceqa.shape_questions("validation", count)
            asked = {"validation": kept, "test": scienceqa.shape_questions("test", sizes["test"])}
            reasons.append(
                "visual shapes asked as multiple choice stand in for ScienceQA: lay its files in "
                f"{scienceqa.FOLDER} under --dataset-dir"
            )
        else:
            splits = scienceqa.read_scienceqa(folder)
            test = scienceqa.subset(splits["test"], sizes["test"])
            scienceqa.require_pictures(test)
            taken = {question.content for question in test}
            kept = []
            for question in scienceqa.subset(splits["val"], len(splits["val"])):
                if len(kept) == count:
                    break
                scienceqa.require_pictures([question])
                if question.content in taken:
                    left_out += 1
                    continue
                taken.add(question.content)
                kept.append(question)
            asked = {"validation": kept, "test": test}
        if not kept:
            raise UserError(f"{folder} has no validation question that its test part does not ask too")
        hygiene = disjoint({part: [question.content for question in found] for part, found in asked.items()})
        hygiene["validation questions left out as repeated"] = left_out
        if folder is None:
            layouts = {"training": scienceqa.TRAINED, "validation": count, "test": sizes["test"]}
            parts: dict[str, shapes.Part] = {"training": "train", "validation": "validation", "test": "test"}
            hygiene |= disjoint({f"{name} pictures": shapes.keys(parts[name], n) for name, n in layouts.items()})
        contents = [(question.content, question.choices, question.answer) for question in kept]
        return Data(
            Parts(kept, checkpoint),
            {"validation": digest(contents), **checkpoint.digests},
            hygiene,
            len({content for content, *_ in contents}),
            "; ".join(reasons),
            checkpoint.served,
            {} if folder is None else {"validation": [question.id for question in kept]},
        )

    def load_test(self, sizes: Sizes, dataset_dir: Path | None) -> Any:
        folder = _folder(sizes, dataset_dir)
        if folder is None:
            return scienceqa.shape_questions("test", sizes["test"])
        questions = scienceqa.subset(scienceqa.read_scienceqa(folder)["test"], sizes["test"])
        scienceqa.require_pictures(questions)
        return questions

    def floors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """A guess among the choices of each question, and the letter that is right most often, known in hindsight."""
        questions = data.parts.validation
        letters = np.bincount([question.answer for question in questions])
        return {
            "uniform guess": float(np.mean([1 / len(question.choices) for question in questions])),
            f"always {LETTERS[letters.argmax()]}": float(letters.max() / len(questions)),
        }

    def anchors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """What was published of the checkpoint, where it answers the real questions."""
        return {} if data.stand_in else dict(PUBLISHED)

    # ------------------------------------------------------------------------------------------------------- model

    def _reader(self, genome: Genome, data: Data, device: str) -> Reader:
        """The checkpoint with FP32 weights, which this object loads once for a device, and a recipe."""
        import torch

        from auto_research.checkpoints.resolve import load_vision_language
        from auto_research.evolve.workflows._scienceqa import Reader

        resolved = data.parts.checkpoint.resolved
        known = (str(resolved.path), device)
        if known not in self._loaded:
            self._loaded[known] = load_vision_language(resolved, device, torch.float32, frozen=True)
        model, processor = self._loaded[known]
        return Reader(model, processor, self._recipe(genome, processor))

    def _recipe(self, genome: Genome, processor: Any) -> Recipe:
        from auto_research.evolve.workflows._scienceqa import Recipe

        return Recipe.of(genome, int(processor.image_processor.max_image_size["longest_edge"]))

    def train(self, genome: Genome, data: Data, seed: int, sizes: Sizes, device: str, progress: Progress) -> Reader:
        """Nothing is trained: the frozen checkpoint with its recipe."""
        return self._reader(genome, data, device)

    def save(self, artefact: Reader, folder: Path) -> None:
        """The recipe alone; the weights stay with the checkpoint, whose digest the data carry."""
        write_json_atomic(folder / "recipe.json", asdict(artefact.recipe))

    def restore(self, genome: Genome, data: Data, folder: Path, sizes: Sizes, device: str) -> Reader:
        """Raises `UserError` when the stored recipe is not that of the genome."""
        reader = self._reader(genome, data, device)
        if asdict(reader.recipe) != json.loads((folder / "recipe.json").read_text(encoding="utf-8")):
            raise UserError("the stored recipe is not that of its candidate: start a new run")
        return reader

    def validate(self, artefact: Reader, data: Data, sizes: Sizes, device: str) -> Scores:
        return self._score(artefact, data.parts.validation, sizes)

    def test(self, artefact: Reader, test: Any, data: Data, sizes: Sizes, device: str) -> Scores:
        return self._score(artefact, test, sizes)

    def _score(self, reader: Reader, questions: list[Question], sizes: Sizes) -> Scores:
        from auto_research.evolve.workflows._scienceqa import evaluate

        return evaluate(reader, questions, sizes["micro_batch"], sizes["reordered"])

    # ---------------------------------------------------------------------------------------------- before it runs

    def cost(self, genome: Genome, sizes: Sizes, data: Data) -> Cost:
        """FLOPs of one question with a picture, and memory of a batch, from the tokens that the processor makes of it.

        Multiply-adds count two. Counted are the vision tower over every patch of every crop, the language model over
        prompt and new tokens with their attention, and the head where it is read.
        """
        shape = _shape(data.parts.checkpoint.resolved.path)
        recipe, visual, prompt = self._tokens(genome, data)
        crops = visual / shape.tokens_a_crop
        tokens = prompt + recipe.tokens
        attention = 2 * shape.vision_layers * shape.patches * shape.vision_width
        flops = crops * shape.patches * 2 * (shape.vision + attention)
        flops += tokens * 2 * (shape.text + shape.layers * tokens * shape.width)
        flops += 2 * max(1, recipe.tokens) * shape.width * shape.vocabulary
        batch = sizes["micro_batch"]
        cache = batch * tokens * 2 * shape.layers * shape.kv_width
        # Pixels and their mask, and of one layer at a time: its input, the widened hidden state and the attention.
        seen = batch * crops * (4 * shape.pixels + shape.patches * 8 * shape.vision_width)
        read = batch * (prompt * 8 * shape.width + shape.vocabulary)
        memory = 4 * (shape.parameters + cache + max(seen, read)) + RUNTIME_BYTES
        extra = {"visual_tokens": float(visual), "prompt_tokens": float(prompt)}
        return Cost(shape.parameters, float(flops), int(memory), extra)

    def _tokens(self, genome: Genome, data: Data) -> tuple[Recipe, int, int]:
        """The recipe, and visual and all tokens of the prompt of the first question with a picture, or the first."""
        from auto_research.evolve.workflows._scienceqa import Reader

        processor, image_token = _processor(data.parts.checkpoint)
        recipe = self._recipe(genome, processor)
        questions = data.parts.validation
        one = next((question for question in questions if question.image is not None), questions[0])
        inputs, _ = Reader(None, processor, recipe).batch([one], "cpu")
        visual = int((inputs["input_ids"] == image_token).sum())
        return recipe, visual, inputs["input_ids"].shape[1]

    def describe(self, genome: Genome, sizes: Sizes, data: Data) -> Described:
        """The recipe as it is read: without splitting and with an edge of one crop are the same."""
        shape = _shape(data.parts.checkpoint.resolved.path)
        recipe, _, _ = self._tokens(genome, data)
        fixed = {"weights": "float32", "decoding": "greedy", "instruction": scienceqa.INSTRUCTIONS[recipe.style]}
        return Described(
            {**asdict(recipe), **fixed, "reordered": sizes["reordered"]},
            {name: list(size) for name, size in shape.weights.items()},
            {"name": "none: the checkpoint is frozen"},
        )

    def effect_probe(self, genome: Genome, sizes: Sizes, data: Data) -> dict[str, str]:
        """The first questions, with and without pictures: letters' likelihoods, answers, and their tokens."""
        import torch

        some = data.parts.validation[:PROBES]
        reader = self._reader(genome, data, "cpu")
        with torch.inference_mode():
            inputs, asked = reader.batch(some, "cpu")
            scores = reader.letter_scores(inputs)[:, : max(len(question.choices) for question in some)]
        given = list(reader.answer(some, PROBES))
        cost = self.cost(genome, sizes, data)
        return {
            "forward": digest(scores),
            "data_order": digest([one.order for one in asked]),
            "generated": digest([(one.text, one.choice, one.new, one.visual) for one in given]),
            "cost": digest(cost.flops, cost.memory_bytes, cost.extra),
        }

    def summarise(self, trials: Sequence[Trial]) -> dict[str, Any]:
        """Every recipe's answers, and what the order of the choices and the crops of a picture change."""
        from auto_research.evolve.promotion import mean_metrics

        found = {t.candidate.id: (t.candidate, mean_metrics(t)) for t in trials if t.mean is not None}
        if not found:
            return {}
        rows = [
            {"candidate": id, "accuracy": m["accuracy"]} | {name: m[name] for name in SHOWN if name in m}
            for id, (_, m) in found.items()
        ]
        first, (_, metrics) = next(iter(found.items()))
        said = f"Of {first}'s answers {metrics['parse_rate']:.0%} name a choice"
        if "order_agreement" in metrics:
            said += f", and {metrics['order_agreement']:.0%} the same one when the order of the choices is reversed"
        least, most = (pick(found.items(), key=lambda item: item[1][1]["visual_tokens"]) for pick in (min, max))
        if most[1][1]["visual_tokens"] > least[1][1]["visual_tokens"]:
            said += ". A picture is " + " and ".join(
                f"{m['visual_tokens']:.0f} visual tokens in {id} (accuracy with pictures "
                f"{m.get('accuracy_with_picture', m['accuracy']):.3f})"
                for id, (_, m) in (most, least)
            )
        return {"sentence": f"{said}.", "candidates": rows}


def _folder(sizes: Sizes, dataset_dir: Path | None) -> Path | None:
    """Where ScienceQA lies: under `dataset_dir`, or beyond a smoke run in the cache; None where it is not."""
    given = [Path(dataset_dir).expanduser()] if dataset_dir else []
    places = [place for root in given for place in (root / scienceqa.FOLDER, root)]
    if sizes.budget != "smoke":
        places.append(cache_folder("data", scienceqa.FOLDER))
    return next((place for place in places if (place / scienceqa.PROBLEMS).is_file()), None)


@dataclass(frozen=True)
class _Shape:
    """Sizes of a vision-language model of SmolVLM's family.

    Attributes:
        weights: name -> shape of every parameter; a tied head is in it once.
        vision, text: parameters of the vision tower with its connector, and of the decoder without embeddings.
        pixels: numbers of a crop.
        kv_width: numbers that one token adds to the keys of one layer, and to its values.
    """

    weights: dict[str, tuple[int, ...]]
    vision: int
    text: int
    vision_layers: int
    vision_width: int
    patches: int
    pixels: int
    tokens_a_crop: int
    layers: int
    width: int
    kv_width: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        return sum(math.prod(size) for size in self.weights.values())


@functools.lru_cache(maxsize=4)
def _shape(path: Path) -> _Shape:
    """From the configuration alone."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from auto_research.checkpoints.store import quiet

    with quiet(), torch.device("meta"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        model = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
    weights = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    text, vision = config.text_config, config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    own = {name: math.prod(size) for name, size in weights.items()}
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return _Shape(
        weights=weights,
        vision=sum(n for name, n in own.items() if "vision_model" in name or "connector" in name),
        text=sum(n for name, n in own.items() if "text_model" in name and "embed_tokens" not in name),
        vision_layers=vision.num_hidden_layers,
        vision_width=vision.hidden_size,
        patches=patches,
        pixels=3 * vision.image_size**2,
        tokens_a_crop=patches // config.scale_factor**2,
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        kv_width=heads * head,
        vocabulary=text.vocab_size,
    )


@functools.lru_cache(maxsize=4)
def _processor(checkpoint: Checkpoint) -> tuple[Any, int]:
    """The processor without the weights, and the id of the token that stands for a piece of a picture."""
    from auto_research.checkpoints.resolve import load_processor

    processor = load_processor(checkpoint.resolved)
    return processor, int(processor.image_token_id)
