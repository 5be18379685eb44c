"""What more sampling buys: a language model answers word problems under a budget of tokens, cost and latency.

Nothing is trained. A candidate is a recipe of inference: the prompt, how many samples, how long, how answers are chosen
from them (majority vote, likelihood, or a checker of the arithmetic they write), and when sampling stops early. The
baseline is one greedy completion. Tokens, calls and samples are counted as they are generated, and cost and latency are
limits: a recipe beyond one of them is not feasible and is not promoted, whatever its accuracy. More samples are no gain
by themselves, and a run in which they made the answers worse says so.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from auto_research.data.reasoning import HELD_OUT, with_validation
from auto_research.evolve.space import Axis, Constraint, Genome, Space, Value
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
from auto_research.evolve.workflows._checkpoints import LANGUAGE_MODELS, MICRO, Checkpoint, choose
from auto_research.runtime.budget import Budget
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import write_json_atomic

if TYPE_CHECKING:
    from auto_research.evolve.records import Trial
    from auto_research.evolve.workflows._reasoning import LanguageModel, Prices, Recipe, Solution
    from auto_research.tasks.arithmetic import Expression

SEVERAL: tuple[Value, ...] = (4, 8, 2)
"""Numbers of samples among which something is to be chosen."""

SAMPLING = 0.7
"""Temperature at which several samples are drawn unless an axis says otherwise."""

WORDS = {"+": "plus", "-": "minus", "*": "times"}

SOURCES = ("sums", "arithmetic", "gsm8k")


@dataclass(frozen=True)
class Item:
    """A question with its answer; `key` is equal for problems that ask the same in another order."""

    source: str
    question: str
    answer: str
    key: str

    def place(self) -> bytes:
        """By which items are put in order and chosen, the same on every machine."""
        return hashlib.sha256(self.question.encode()).digest()


@dataclass(frozen=True)
class Problems:
    """One part: questions in words, where each comes from, and the right answers, which no solver is given."""

    questions: list[str]
    sources: list[str]
    answers: list[str]

    @classmethod
    def of(cls, items: Sequence[Item]) -> Problems:
        return cls([i.question for i in items], [i.source for i in items], [i.answer for i in items])

    def __len__(self) -> int:
        return len(self.questions)


@dataclass(frozen=True)
class Parts:
    """What a cell sees: the checkpoint, the validation problems, and the training answers by source, for the floor."""

    checkpoint: Checkpoint
    validation: Problems
    usual: dict[str, str]


@dataclass(frozen=True)
class Solver:
    """A recipe with the model it runs on, and the seed that its samples depend on."""

    recipe: Recipe
    seed: int
    model: LanguageModel
    checkpoint: dict[str, str]

    def __call__(self, questions: Sequence[str]) -> list[Solution]:
        from auto_research.evolve.workflows._reasoning import asking, solve

        return solve(len(questions), self.recipe, asking(self.model, questions, self.recipe, self.seed))


def in_words(one: Expression) -> str:
    """`7+5` -> `What is 7 plus 5?`"""
    text = one.text
    for sign, word in WORDS.items():
        text = text.replace(sign, f" {word} ")
    return f"What is {text}?"


def is_sum(one: Expression) -> bool:
    """Whether it is a sum of two numbers from 2 to 20."""
    numbers = one.text.split("+")
    return len(numbers) == 2 and all(number.isdigit() and 2 <= int(number) <= 20 for number in numbers)


class ReasoningBudget(Workflow):
    """See the module."""

    key: ClassVar[str] = "reasoning-budget"
    title: ClassVar[str] = "Causal LM / reasoning budget"
    model: ClassVar[str] = "causal-lm"
    dataset: ClassVar[str] = "reasoning-budget"
    metric: ClassVar[str] = "accuracy"
    level: ClassVar[Level] = "L1 small public"
    language_model: ClassVar[bool] = True
    stall_seconds: ClassVar[float] = 600  # a batch of a real checkpoint, on a processor that others use too
    settings: ClassVar[tuple[str, ...]] = (
        "input_price_cents",
        "output_price_cents",
        "cost_limit_microdollars",
        "latency_limit_ms",
        "batch",
    )
    schedule: ClassVar[tuple[tuple[str, ...], ...]] = (("structure",), ("joint",), ("structure", "joint"))
    space: ClassVar[Space] = Space(
        (
            Axis(
                "samples",
                "int",
                (1, 2, 4, 8),
                stage="inference",
                changes="compute",
                source="completions of a question at most; one at temperature 0 is greedy decoding",
            ),
            Axis(
                "temperature",
                values=(0.0, 0.4, SAMPLING, 1.0),
                stage="inference",
                changes="inference",
                source="0 is greedy; 0.7 is what self-consistency samples with",
                group="joint",
            ),
            Axis(
                "prompt",
                values=("direct", "step-by-step"),
                stage="inference",
                changes="inference",
                source="the question alone, or with a request for steps; both in the checkpoint's chat template",
            ),
            Axis(
                "max_new_tokens",
                "int",
                (48, 24, 96, 160),
                stage="inference",
                changes="compute",
                source="a completion is cut off there; 24 is the smoke run's",
                group="joint",
            ),
            Axis(
                "verifier",
                values=("vote", "log-likelihood", "checker"),
                condition={"samples": SEVERAL},
                stage="inference",
                changes="inference",
                source="chooses among answers; ties go to the length-averaged log-probability",
                group="joint",
            ),
            Axis(
                "stop.threshold",
                values=("off", 0.5, 0.67, 0.75),
                condition={"samples": (4, 8)},
                stage="inference",
                changes="compute",
                source="share of the samples so far that ends sampling; of two samples nothing can be saved",
                group="joint",
            ),
        ),
        (
            Constraint(
                "samples differ",
                lambda genome: genome["samples"] == 1 or genome["temperature"] != 0.0,
                "several samples at temperature 0 are one sample at several times the cost",
                lambda genome: {**genome, "temperature": SAMPLING},
            ),
        ),
    )
    operators: ClassVar[tuple[Operator, ...]] = (
        Operator(
            "self-consistency",
            "Self-consistency: a majority vote over sampled completions",
            {"samples": (2, 4, 8)},
            "arXiv:2203.11171",
            "core_mechanism",
            omitted=("top-k sampling", "up to 40 samples"),
            keywords=("self-consistency", "vote", "samples", "sampling", "budget", "投票", "采样", "预算"),
            code=(
                "auto_research.evolve.workflows._reasoning.solve",
                "auto_research.evolve.workflows._reasoning.choose",
                "auto_research.evolve.workflows._reasoning.standings",
            ),
        ),
        Operator(
            "step-by-step",
            "Zero-shot chain of thought",
            {"prompt": ("step-by-step",)},
            "arXiv:2205.11916",
            "simplified",
            omitted=("the second prompt that extracts the answer: the first one asks for a form that can be read",),
            keywords=("chain of thought", "step by step", "reasoning", "prompt", "cot", "思维链", "推理"),
            code=("auto_research.evolve.workflows._reasoning.chat_prompt",),
        ),
        Operator(
            "early-stopping",
            "Adaptive consistency: sampling stops when the vote is clear",
            {"stop.threshold": (0.5, 0.67, 0.75)},
            "arXiv:2305.11860",
            "simplified",
            omitted=("the Beta posterior of the majority: a share of the samples so far decides",),
            keywords=("early", "stopping", "adaptive", "cost", "latency", "budget", "提前", "成本"),
            code=("auto_research.evolve.workflows._reasoning.settled",),
        ),
    )
    evidence: ClassVar[tuple[Evidence, ...]] = (
        Evidence(
            "Let's verify step by step: process reward models",
            "arXiv:2305.20050",
            "there is no operator with a trained verifier, and no step labels to train one on",
            "a verifier that scores each step of a completion with a model of its own",
            ("verifier", "reward", "process", "best-of-n", "验证"),
        ),
        Evidence(
            "s1: budget forcing",
            "arXiv:2501.19393",
            "the checkpoint does not mark the end of its thinking, so thinking can be neither cut nor prolonged",
            "a reasoning checkpoint whose end of thinking is a token of its own",
            ("budget", "thinking", "test-time", "scaling", "预算"),
        ),
    )

    def __init__(self) -> None:
        self._models: dict[tuple[str, str, int], LanguageModel] = {}
        self._lengths: dict[str, int] = {}

    # -------------------------------------------------------------------------------------------------- sizes, data

    def sizes(self, budget: Budget) -> Sizes:
        """Problems of each source and part, rows decoded at once, prices and limits.

        `sums` are one-step sums of two numbers from 2 to 20, `arithmetic` other expressions of one and two steps, in
        words. Prices are cents for a million tokens; the limits are on the mean cost of a question and on the 95th
        percentile of its seconds in the model.
        """
        smoke = {
            "sums": 16,
            "arithmetic": 0,
            "gsm8k": 0,
            "batch": 64,
            "input_price_cents": 10,
            "output_price_cents": 40,
            "cost_limit_microdollars": 200,
            "latency_limit_ms": 600_000,
            MICRO: 0,
        }
        standard = {**smoke, "sums": 28, "arithmetic": 122, "gsm8k": 100, "latency_limit_ms": 60_000}
        full = {**standard, "arithmetic": 472, "gsm8k": 500, "batch": 256}
        return Sizes(budget, {"smoke": smoke, "standard": standard, "full": full}[budget])

    def start(self, budget: Budget) -> Genome:
        start = self.space.baseline()
        return {**start, "max_new_tokens": 24} if budget == "smoke" else start

    def smoke_plan(self) -> list[Genome]:
        changes: tuple[Genome, ...] = ({"samples": 2}, {"samples": 4}, {"samples": 4, "stop.threshold": 0.67})
        return [self.space.resolve({**self.space.baseline(), **change}) for change in changes]

    def limits(self, sizes: Sizes) -> dict[str, float]:
        return {
            "cost_microdollars": float(sizes["cost_limit_microdollars"]),
            "latency_p95_s": sizes["latency_limit_ms"] / 1000,
        }

    def _split(self, sizes: Sizes, dataset_dir: Path | None) -> dict[str, list[Item]]:
        """The three parts; of a held-out one as many of each source as the sizes say, in the order of hashes."""
        from auto_research.tasks import arithmetic

        written = arithmetic.split([*arithmetic.one_step("+-*"), *arithmetic.two_step()])
        found = {
            part: [
                Item("sums" if is_sum(one) else "arithmetic", in_words(one), str(one.answer), one.key)
                for one in expressions
            ]
            for part, expressions in written.items()
        }
        if sizes["gsm8k"]:
            from auto_research.data import catalogue

            for part, problems in with_validation(catalogue.load("gsm8k", dataset_dir)).items():
                found[part] += [Item("gsm8k", p.question, p.answer, p.question) for p in problems]
        for part in ("validation", "test"):
            found[part] = [
                item
                for source in SOURCES
                for item in sorted((i for i in found[part] if i.source == source), key=Item.place)[: sizes[source]]
            ]
        return found

    def load(self, sizes: Sizes, dataset_dir: Path | None) -> Data:
        parts = self._split(sizes, dataset_dir)
        checkpoint = choose(LANGUAGE_MODELS, sizes.values)
        asked = {name: [item.question for item in items] for name, items in parts.items()}
        reordered = disjoint({name: [item.key for item in items] for name, items in parts.items()})
        hygiene = disjoint(asked) | {f"{k} after reordering": v for k, v in reordered.items() if k.endswith("share")}
        validation = Problems.of(parts["validation"])
        usual: dict[str, str] = {}
        for source in dict.fromkeys(validation.sources):
            answers = Counter(item.answer for item in parts["train"] if item.source == source)
            usual[source] = max(sorted(answers), key=answers.__getitem__)
        return Data(
            Parts(checkpoint, validation, usual),
            {"problems": digest(vars(validation), usual), **checkpoint.digests},
            hygiene,
            len(set(validation.questions)),
            "; ".join(filter(None, [self._reduced(parts), checkpoint.stand_in])),
            checkpoint.served,
        )

    def _reduced(self, parts: dict[str, list[Item]]) -> str:
        """Whether GSM8K is the slice that the package holds rather than the published files."""
        from auto_research.data import catalogue

        read = sum(item.source == "gsm8k" for item in parts["train"])
        whole = catalogue.entry("gsm8k").counts["train"] - HELD_OUT
        said = f"GSM8K is the first {read + HELD_OUT} of its {whole + HELD_OUT} training problems"
        return said if 0 < read < whole else ""

    def load_test(self, sizes: Sizes, dataset_dir: Path | None) -> Problems:
        return Problems.of(self._split(sizes, dataset_dir)["test"])

    # ------------------------------------------------------------------------------------------------------ running

    def _language_model(self, checkpoint: Checkpoint, batch: int, device: str) -> LanguageModel:
        """The checkpoint in FP32, loaded once by this object and warmed up: a first call takes longer than others."""
        from auto_research.evolve.workflows._reasoning import LanguageModel, chat_prompt

        known = (str(checkpoint.resolved.path), device, batch)
        if known not in self._models:
            model, tokenizer = checkpoint.load(device)
            made = LanguageModel(model.requires_grad_(False), tokenizer, device, batch)
            made.complete([chat_prompt(tokenizer, "What is 1 plus 1?", "direct")], None, tokens=2, temperature=0.0)
            self._models[known] = made
        return self._models[known]

    def _solver(self, genome: Genome, data: Data, seed: int, sizes: Sizes, device: str) -> Solver:
        from auto_research.evolve.workflows._reasoning import Recipe

        checkpoint = data.parts.checkpoint
        return Solver(
            Recipe.of(genome), seed, self._language_model(checkpoint, sizes["batch"], device), checkpoint.digests
        )

    def train(self, genome: Genome, data: Data, seed: int, sizes: Sizes, device: str, progress: Progress) -> Solver:
        """Nothing is trained: the recipe, with the checkpoint loaded."""
        return self._solver(genome, data, seed, sizes, device)

    def save(self, artefact: Solver, folder: Path) -> None:
        stored = {"recipe": asdict(artefact.recipe), "seed": artefact.seed, "checkpoint": artefact.checkpoint}
        write_json_atomic(folder / "recipe.json", stored)

    def restore(self, genome: Genome, data: Data, folder: Path, sizes: Sizes, device: str) -> Solver:
        """Raises `UserError` when the checkpoint on this machine is not the one that was used."""
        stored = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
        if stored["checkpoint"] != data.parts.checkpoint.digests:
            raise UserError("the checkpoint changed since the recipe was measured: restore it, or start a new run")
        solver = self._solver(genome, data, stored["seed"], sizes, device)
        if asdict(solver.recipe) != stored["recipe"]:
            raise UserError("the stored recipe is not that of its candidate: start a new run")
        return solver

    def validate(self, artefact: Solver, data: Data, sizes: Sizes, device: str) -> Scores:
        return self._score(artefact, data.parts.validation, sizes)

    def test(self, artefact: Solver, test: Problems, data: Data, sizes: Sizes, device: str) -> Scores:
        return self._score(artefact, test, sizes)

    def _score(self, solver: Solver, problems: Problems, sizes: Sizes) -> Scores:
        from auto_research.evolve.workflows._reasoning import score

        return score(solver(problems.questions), problems.answers, problems.sources, _prices(sizes))

    # ------------------------------------------------------------------------------------------------ before it runs

    def floors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """No answer at all, and the most frequent training answer of each source."""
        problems: Problems = data.parts.validation
        usual = [data.parts.usual[source] == a for source, a in zip(problems.sources, problems.answers, strict=True)]
        return {"no answer": 0.0, "most frequent training answer": sum(usual) / len(usual)}

    def cost(self, genome: Genome, sizes: Sizes, data: Data) -> Cost:
        """FLOPs of a question whose samples are all drawn to their full length; memory of a full batch of rows."""
        from auto_research.evolve.workflows._reasoning import Recipe

        shape, recipe = data.parts.checkpoint.shape, Recipe.of(genome)
        prompt = self._prompt_length(recipe.prompt, data)
        tokens = prompt + recipe.max_new_tokens
        rows = min(sizes["batch"], recipe.samples * len(data.parts.validation))
        read = shape.forward_flops(1, prompt)
        calls = 1 if recipe.threshold is None else recipe.samples - 1  # a pair and singles
        flops = calls * read + recipe.samples * (shape.forward_flops(1, tokens) - read)
        return Cost(shape.parameters, flops, shape.inference_bytes(rows, tokens))

    def match(self, genome: Genome, baseline: Cost, sizes: Sizes, data: Data) -> str:
        """The weights are the same in all candidates; what differs is how much may be generated with them."""
        ratio = self.cost(genome, sizes, data).flops / max(1.0, baseline.flops)
        return "" if abs(ratio - 1) <= 0.02 else f"up to {ratio:.3g} times the operations"

    def _prompt_length(self, style: str, data: Data) -> int:
        """Tokens of the longest validation prompt."""
        from auto_research.evolve.workflows._reasoning import chat_prompt

        known = digest(style, data.digests)
        if known not in self._lengths:
            tokenizer = data.parts.checkpoint.tokenizer()
            questions = data.parts.validation.questions
            self._lengths[known] = max(len(chat_prompt(tokenizer, question, style)) for question in questions)
        return self._lengths[known]

    def describe(self, genome: Genome, sizes: Sizes, data: Data) -> Described:
        from auto_research.evolve.workflows._reasoning import PROMPTS, Recipe

        recipe, shape = Recipe.of(genome), data.parts.checkpoint.shape
        counted = {name: sizes[name] for name in (*SOURCES, "input_price_cents", "output_price_cents")}
        return Described(
            {**asdict(recipe), "message": PROMPTS[recipe.prompt], "dtype": "float32", **counted},
            {name: list(size) for name, size in shape.weights.items()},
            {"name": "none: the weights stay as they are"},
        )

    def effect_probe(self, genome: Genome, sizes: Sizes, data: Data) -> dict[str, str]:
        """The checkpoint's next-token distribution after one prompt, and what the recipe makes of written samples.

        `forward` is the distribution that a token is drawn from. `generated` are answers, tokens and calls of the real
        loop over a fixed script in place of the model, whose samples disagree in ways that every verifier, threshold
        and number of samples settles differently.
        """
        import torch

        from auto_research.evolve.workflows._reasoning import Recipe, chat_prompt, scripted, solve

        recipe = Recipe.of(genome)
        model = self._language_model(data.parts.checkpoint, sizes["batch"], "cpu")
        prompt = chat_prompt(model.tokenizer, data.parts.validation.questions[0], recipe.prompt)
        with torch.no_grad():
            logits = model.model(torch.tensor([prompt])).logits[0, -1].float()
        drawn_from = logits.argmax() if recipe.temperature == 0 else (logits / recipe.temperature).softmax(-1)
        solutions = solve(*scripted(recipe))
        made = [[s.answer, s.calls, [sample.tokens for sample in s.samples]] for s in solutions]
        cost = self.cost(genome, sizes, data)
        return {"forward": digest(prompt, drawn_from), "generated": digest(made), "cost": digest(cost.flops)}

    def summarise(self, trials: Sequence[Trial]) -> dict[str, Any]:
        """What more budget bought, what stopping early saved, and every recipe's figures."""
        from auto_research.evolve.workflows._reasoning import summarise

        return summarise(trials, self.metric)


def _prices(sizes: Sizes) -> Prices:
    from auto_research.evolve.workflows._reasoning import Prices

    return Prices(sizes["input_price_cents"], sizes["output_price_cents"])
