"""How a question is put to a language model, sampled, stopped and decided, and what that costs.

Samples are independent of how they are asked for: sample j of a question is a function of seed, question and j,
whatever else is in its batch and however many samples there are. So two candidates that differ in when they stop
compare the same samples. What is right is read only in `score`, after every answer has been chosen.

Letters: R rows of one call to the model (a question's sample each), P tokens of a prompt, T new tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from auto_research.evolve.space import Value
from auto_research.evolve.workflow import Scores
from auto_research.runtime.errors import UserError
from auto_research.tasks.answers import check_arithmetic, parse_answer

if TYPE_CHECKING:
    from torch import Tensor

    from auto_research.evolve.records import Trial

PROMPTS = {
    "direct": "{question} Answer in one short sentence.",
    "step-by-step": "{question} Think step by step. End with 'Answer:' and the number.",
}
"""The user's message of each prompt style; the checkpoint's chat template goes around it."""

FIRST, NEXT = 2, 1
"""Samples asked for at a time when the vote may end early: a pair, as two are needed for any decision, then singles."""

NO_STOPPING = "off"


@dataclass(frozen=True)
class Recipe:
    """How much is spent on a question.

    Attributes:
        samples: at most; 1 at temperature 0 is greedy decoding.
        threshold: share of the samples so far at which the leading answer wins early; None asks for all at once.
        verifier: vote, log-likelihood or checker, see `standings`.
    """

    samples: int
    max_new_tokens: int
    threshold: float | None
    temperature: float
    prompt: str
    verifier: str

    @classmethod
    def of(cls, genome: Mapping[str, Value]) -> Recipe:
        """The recipe of a genome; axes that decide nothing in it have one value, so equal recipes are equal."""
        samples, threshold = int(genome["samples"]), genome.get("stop.threshold", NO_STOPPING)
        verifier = str(genome.get("verifier", "vote"))
        if samples == 2 and verifier == "log-likelihood":  # it is what breaks the tie of two votes
            verifier = "vote"
        return cls(
            samples=samples,
            max_new_tokens=int(genome["max_new_tokens"]),
            threshold=None if threshold == NO_STOPPING else float(threshold),
            temperature=float(genome["temperature"]),
            prompt=str(genome["prompt"]),
            verifier=verifier,
        )

    def reach(self, taken: int) -> int:
        """How many samples there are after the next call for a question that has `taken`."""
        if self.threshold is None:
            return self.samples
        return min(self.samples, taken + NEXT if taken else FIRST)


# ---------------------------------------------------------------------------------------------- deciding and stopping


@dataclass(frozen=True)
class Sample:
    """One completion.

    Attributes:
        tokens: generated; the end token is one of them, the padding behind it is not.
        ended: whether it has its end token, rather than having been cut off.
        log_probability: of all generated tokens under the model itself (temperature 1), natural logarithm.
    """

    text: str
    tokens: int
    ended: bool
    log_probability: float

    @property
    def answer(self) -> str | None:
        """The number it gives; None without one. What was cut off has not come to its answer."""
        return parse_answer(self.text) if self.ended else None

    @property
    def per_token(self) -> float:
        """Length-averaged log-probability."""
        return self.log_probability / max(1, self.tokens)


@dataclass(frozen=True)
class Reply:
    """A sample, the tokens of the prompt that its call read, and the seconds from the call's start to its last one."""

    sample: Sample
    prompt_tokens: int
    seconds: float


@dataclass
class Solution:
    """What was spent on a question, and the answer chosen; None without any number.

    Attributes:
        calls: times the question was sent to the model, each for one or more samples.
        prompt_tokens: read in all calls; a call reads its prompt once, whatever the number of its samples.
        seconds: of all its calls; waiting between them is not counted.
    """

    samples: list[Sample] = field(default_factory=list)
    calls: int = 0
    prompt_tokens: int = 0
    seconds: float = 0.0
    answer: str | None = None

    @property
    def tokens(self) -> int:
        """Generated in all samples."""
        return sum(sample.tokens for sample in self.samples)


Row = tuple[int, int]
"""Number of a question, and number of its sample."""

Ask = Callable[[Sequence[Row]], Sequence[Reply]]
"""Samples of these rows, in their order."""


def standings(samples: Sequence[Sample], verifier: str) -> dict[str, tuple[float, ...]]:
    """Answer -> how it stands, to be compared in order; the length-averaged log-probability of its best sample last.

    * `vote`: the number of samples that give it;
    * `log-likelihood`: nothing but that log-probability;
    * `checker`: the number of its samples whose written arithmetic holds, then that of those that write none. Samples
      with wrong arithmetic count for nothing.
    """
    givers: dict[str, list[Sample]] = {}
    for sample in samples:
        if (answer := sample.answer) is not None:
            givers.setdefault(answer, []).append(sample)
    found: dict[str, tuple[float, ...]] = {}
    for answer, group in givers.items():
        best = max(sample.per_token for sample in group)
        if verifier == "vote":
            found[answer] = (len(group), best)
        elif verifier == "checker":
            held = [check_arithmetic(sample.text) for sample in group]
            found[answer] = (held.count(True), held.count(None), best)
        else:
            found[answer] = (best,)
    return found


def choose(samples: Sequence[Sample], verifier: str) -> str | None:
    """The answer that stands best; of equal ones that of the earlier sample. None when no sample gives a number."""
    found = standings(samples, verifier)
    return max(found, key=lambda answer: found[answer]) if found else None


def settled(samples: Sequence[Sample], recipe: Recipe) -> bool:
    """Whether no further sample is asked for.

    So when there are as many as the recipe allows; or, where it stops early, after two samples or more: when the
    leader's share of all samples reaches the threshold (to two digits: two of three meet 0.67), or when every sample
    still to come could go to the next answer and not change the leader.
    """
    taken = len(samples)
    if taken >= recipe.samples:
        return True
    if recipe.threshold is None or taken < 2:
        return False
    found = standings(samples, recipe.verifier)
    leader = choose(samples, recipe.verifier)
    if leader is None:
        return False
    share = sum(sample.answer == leader for sample in samples) / taken
    if round(share, 2) >= recipe.threshold:
        return True
    if recipe.verifier == "log-likelihood":  # a single sample can always be likelier
        return False
    behind = max((standing[0] for answer, standing in found.items() if answer != leader), default=0)
    return found[leader][0] - behind > recipe.samples - taken


def solve(questions: int, recipe: Recipe, ask: Ask) -> list[Solution]:
    """Asks for samples of all questions that are open, call by call, until each is settled; then chooses answers.

    Nothing that is not asked for is generated, and everything that is asked for counts.
    """
    solutions = [Solution() for _ in range(questions)]
    waiting = list(range(questions))
    while waiting:
        rows = [
            (number, j)
            for number in waiting
            for j in range(len(solutions[number].samples), recipe.reach(len(solutions[number].samples)))
        ]
        replies: dict[int, list[Reply]] = {}
        for (number, _), reply in zip(rows, ask(rows), strict=True):
            replies.setdefault(number, []).append(reply)
        for number, call in replies.items():
            solution = solutions[number]
            solution.samples += [reply.sample for reply in call]
            solution.calls += 1
            solution.prompt_tokens += call[0].prompt_tokens
            solution.seconds += max(reply.seconds for reply in call)
        waiting = [number for number in waiting if not settled(solutions[number].samples, recipe)]
    for solution in solutions:
        solution.answer = choose(solution.samples, recipe.verifier)
    return solutions


# --------------------------------------------------------------------------------------------------------- the model


def chat_prompt(tokenizer: Any, question: str, style: str) -> list[int]:
    """Tokens of a question in a style, in the checkpoint's chat template, up to where the assistant begins.

    Raises `UserError` for a checkpoint without a chat template: an instruct model that is asked without it answers
    something else.
    """
    if not tokenizer.chat_template:
        raise UserError("the checkpoint's tokenizer has no chat template; use an instruct checkpoint that brings one")
    message = {"role": "user", "content": PROMPTS[style].format(question=question)}
    return list(tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False))


def uniforms(seed: int, question: str, sample: int, count: int) -> np.ndarray:
    """(count,) float32 in (0, 1], a function of seed, question and sample; a longer row begins with a shorter one."""
    number = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big")
    drawn = np.random.default_rng([seed, number, sample]).random(count)
    return (1.0 - drawn).astype(np.float32)


class Draw:
    """Chooses every next token of R rows and keeps its log-probability: a logits processor for greedy `generate`.

    Temperature 0 takes the likeliest token; otherwise the inverse of the cumulative distribution at the row's own
    uniform number, which is a sample of softmax(logits / temperature).

    Attributes:
        log_probabilities: (R,) a step, under the model's own distribution.
        begun: clock at the beginning of every step, when the tokens before it are there.
    """

    def __init__(self, uniform: Tensor | None, temperature: float) -> None:
        self.uniform, self.temperature = uniform, temperature
        self.log_probabilities: list[Tensor] = []
        self.begun: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (R, V) under which the chosen token alone is possible."""
        self.begun.append(time.perf_counter())
        log_probability = scores.float().log_softmax(-1)
        token = next_token(log_probability, self.uniform, len(self.log_probabilities), self.temperature)
        self.log_probabilities.append(log_probability.gather(-1, token)[:, 0])
        return scores.new_full(scores.shape, float("-inf")).scatter(-1, token, 0.0)


def next_token(logits: Tensor, uniform: Tensor | None, step: int, temperature: float) -> Tensor:
    """Token (R, 1) of logits (R, V): the likeliest, or one drawn with column `step` of uniform (R, T)."""
    import torch

    if uniform is None or temperature == 0:
        return logits.argmax(-1, keepdim=True)
    cumulative = (logits / temperature).softmax(-1).cumsum(-1)
    point = uniform[:, step, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point).clamp(max=logits.shape[-1] - 1)


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model that completes prompts in batches of at most `batch` rows."""

    model: Any
    tokenizer: Any
    device: str
    batch: int

    @property
    def ends(self) -> set[int]:
        """Tokens that end a completion."""
        declared = self.model.generation_config.eos_token_id
        declared = declared if isinstance(declared, list | tuple) else [declared]
        return {int(token) for token in (*declared, self.tokenizer.eos_token_id) if token is not None}

    def complete(
        self, prompts: Sequence[Sequence[int]], uniform: np.ndarray | None, *, tokens: int, temperature: float
    ) -> list[Reply]:
        """A completion of each prompt, of at most `tokens` tokens; uniform (R, tokens) unless temperature is 0.

        Rows of similar length share a batch, padded on the left, equal prompts stand together and are read once. What a
        row gets does not depend on the others.
        """
        order = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), prompts[row]))
        found: dict[int, Reply] = {}
        for first in range(0, len(order), self.batch):
            rows = order[first : first + self.batch]
            some = None if uniform is None else uniform[rows]
            replies = self._generate([prompts[row] for row in rows], some, tokens, temperature)
            found |= dict(zip(rows, replies, strict=True))
        return [found[row] for row in range(len(prompts))]

    def _generate(
        self, prompts: Sequence[Sequence[int]], uniform: np.ndarray | None, tokens: int, temperature: float
    ) -> list[Reply]:
        import torch
        from transformers import GenerationConfig

        pad, width = self.tokenizer.pad_token_id, max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=self.device)
        first = [row for row, prompt in enumerate(prompts) if row == 0 or prompt != prompts[row - 1]]
        place = torch.tensor([sum(row >= start for start in first) - 1 for row in range(len(prompts))])
        draw = Draw(None if uniform is None else torch.from_numpy(uniform).to(self.device), temperature)
        greedy = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=sorted(self.ends), pad_token_id=pad, use_cache=True
        )
        store = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        began = time.perf_counter()
        with torch.no_grad():  # every prompt once, but for its last token, from which the first new one is drawn
            read = self.model(
                input_ids=ids[first, :-1],
                attention_mask=mask[first, :-1],
                position_ids=(mask[first, :-1].cumsum(-1) - 1).clamp(min=0),
                use_cache=True,
                logits_to_keep=1,
            )[store]
        read.batch_select_indices(place.to(self.device))
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=greedy,
            logits_processor=[draw],
            **{store: read},
        )[:, width:].tolist()
        clock = [*draw.begun, time.perf_counter()]
        log_probability = torch.stack(draw.log_probabilities, dim=1).double().cpu()
        replies = []
        for row, prompt in enumerate(prompts):
            length = completion_length(out[row], self.ends)
            sample = Sample(
                text=self.tokenizer.decode(out[row][:length], skip_special_tokens=True),
                tokens=length,
                ended=out[row][length - 1] in self.ends,
                log_probability=float(log_probability[row, :length].sum()),
            )
            replies.append(Reply(sample, len(prompt), clock[length] - began))
        return replies


def completion_length(tokens: Sequence[int], ends: set[int]) -> int:
    """Tokens up to and with the first end token; all of them where there is none.

    The padding of a batch cannot be told from the end token where they are the same token, so it is not looked for.
    """
    return next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))


def asking(model: LanguageModel, questions: Sequence[str], recipe: Recipe, seed: int) -> Ask:
    """How `solve` gets samples of these questions from a model."""
    prompts = [chat_prompt(model.tokenizer, question, recipe.prompt) for question in questions]

    def ask(rows: Sequence[Row]) -> list[Reply]:
        uniform = None
        if recipe.temperature:
            uniform = np.stack([uniforms(seed, questions[i], j, recipe.max_new_tokens) for i, j in rows])
        asked = [prompts[number] for number, _ in rows]
        return model.complete(asked, uniform, tokens=recipe.max_new_tokens, temperature=recipe.temperature)

    return ask


# ------------------------------------------------------------------------------------------------------------ scores


@dataclass(frozen=True)
class Prices:
    """In cents for a million tokens."""

    read: int
    generated: int

    def cost(self, solution: Solution) -> float:
        """Of a solution, in millionths of a dollar."""
        return (solution.prompt_tokens * self.read + solution.tokens * self.generated) / 100


def score(solutions: Sequence[Solution], answers: Sequence[str], sources: Sequence[str], prices: Prices) -> Scores:
    """Accuracy of the answers chosen, and what they took; the only place that reads what is right.

    All figures are means over questions but the latencies, which are quantiles. `any_sample_right` is what a perfect
    verifier would make of the same samples. `tokens_per_correct_answer` is missing where no answer is correct.
    """
    right = np.array([s.answer == answer for s, answer in zip(solutions, answers, strict=True)], float)
    taken = [len(s.samples) for s in solutions]
    drawn = [sample for s in solutions for sample in s.samples]
    made = np.array([s.tokens for s in solutions], float)
    seconds = np.array([s.seconds for s in solutions])
    possible = [
        any(sample.answer == answer for sample in s.samples) for s, answer in zip(solutions, answers, strict=True)
    ]
    metrics = {
        "accuracy": float(right.mean()),
        "any_sample_right": float(np.mean(possible)),
        "answered": float(np.mean([s.answer is not None for s in solutions])),
        "samples_used": float(np.mean(taken)),
        "calls": float(np.mean([s.calls for s in solutions])),
        "prompt_tokens": float(np.mean([s.prompt_tokens for s in solutions])),
        "generated_tokens": float(made.mean()),
        "cut_off": float(np.mean([not sample.ended for sample in drawn])),
        "cost_microdollars": float(np.mean([prices.cost(s) for s in solutions])),
        "latency_p50_s": float(np.quantile(seconds, 0.5)),
        "latency_p95_s": float(np.quantile(seconds, 0.95)),
    }
    if right.any():
        metrics["tokens_per_correct_answer"] = float(made.sum() / right.sum())
    for source in dict.fromkeys(sources):
        chosen = [s == source for s in sources]
        if not all(chosen):
            metrics[f"accuracy_{source}"] = float(right[chosen].mean())
    return Scores(metrics, right.tolist())


# ------------------------------------------------------------------------------------------------- probe and summary

DISAGREEING = (
    ("3 + 4 = 8.", -0.5), ("3 + 4 = 7.", -1.0), ("3 + 4 = 8.", -0.6), ("It is 9.", -0.1),
    ("It is 9.", -0.3), ("It is 9.", -0.4), ("3 + 4 = 8.", -0.7), ("3 + 4 = 8.", -0.7),
)  # fmt: skip
"""Samples with their log-probability a token: of the first four, the vote is 8, the likeliest 9, and 7 is right."""

LENGTHS = (20, 40, 80, 120)
"""Tokens of samples that agree; each question begins with another one."""


def scripted(recipe: Recipe) -> tuple[int, Recipe, Ask]:
    """Arguments of `solve` with written samples in place of a model: one question of short ones that disagree, and
    four of samples that agree and are of different lengths."""

    def reply(number: int, j: int) -> Reply:
        text, per_token = DISAGREEING[j] if number == 0 else ("It is 5.", -0.2)
        length = LENGTHS[0 if number == 0 else (number + j) % len(LENGTHS)]
        kept = min(length, recipe.max_new_tokens)
        return Reply(Sample(text, kept, kept == length, kept * per_token), 10, 0.0)

    return 1 + len(LENGTHS), recipe, lambda rows: [reply(number, j) for number, j in rows]


SHOWN = (
    "accuracy",
    "any_sample_right",
    "answered",
    "samples_used",
    "calls",
    "prompt_tokens",
    "generated_tokens",
    "tokens_per_correct_answer",
    "cost_microdollars",
    "latency_p50_s",
    "latency_p95_s",
)
"""Metrics of the summary's table."""


def summarise(trials: Sequence[Trial], metric: str) -> dict[str, Any]:
    """Every recipe beside the baseline, and two sentences: what more tokens bought, what stopping early saved.

    `se_examples` is the standard error of the gain over questions (paired bootstrap, samples averaged over seeds);
    that over seeds is the trial's own.
    """
    from auto_research.evolve.promotion import mean_metrics

    done = {t.candidate.id: (t, mean_metrics(t)) for t in trials if t.mean is not None}
    rows = []
    for id, (trial, found) in done.items():
        row: dict[str, Any] = {"candidate": id, "recipe": _recipe_text(trial.candidate.genome)}
        row |= {name: found[name] for name in SHOWN if name in found}
        if "baseline" in done and id != "baseline":
            row |= _over_examples(trial, done["baseline"][0])
        rows.append(row)
    sentences = [_spending(done, metric), _stopping(done, metric)]
    return {"sentence": " ".join(filter(None, sentences)), "recipes": rows}


Done = Mapping[str, "tuple[Trial, dict[str, float]]"]
"""Completed trials and their mean metrics, by candidate."""


def _recipe_text(genome: Mapping[str, Value]) -> str:
    """A genome in a few words."""
    recipe = Recipe.of(genome)
    how = "greedy" if recipe.temperature == 0 else f"{recipe.samples} at temperature {recipe.temperature:g}"
    more = [recipe.verifier] if recipe.samples > 1 else []
    more += [f"stop at {recipe.threshold:g}"] if recipe.threshold is not None else []
    more += [recipe.prompt] if recipe.prompt != "direct" else []
    return ", ".join([how, *more, f"{recipe.max_new_tokens} tokens"])


def _over_examples(trial: Trial, baseline: Trial) -> dict[str, float]:
    """Gain over the baseline and its standard error over questions, each question's value a mean over the seeds."""
    from auto_research.evolve.promotion import bootstrap_error

    ours, theirs = ([c.units for c in t.cells if c.state == "completed" and c.units] for t in (trial, baseline))
    if not ours or not theirs or len({len(units) for units in (*ours, *theirs)}) > 1:
        return {}
    difference = np.mean(ours, axis=0) - np.mean(theirs, axis=0)
    return {"gain": float(difference.mean()), "se_examples": bootstrap_error(difference)}


def _spending(done: Done, metric: str) -> str:
    """Whether candidates that generated more tokens than the baseline answered better."""
    if "baseline" not in done:
        return ""
    base = done["baseline"][1]
    more = {
        id: (trial, found)
        for id, (trial, found) in done.items()
        if id != "baseline" and found["generated_tokens"] > base["generated_tokens"]
    }
    if not more:
        return "No recipe generated more tokens than the baseline."
    start = f"The baseline has {metric} {base[metric]:.3f} at {base['generated_tokens']:.1f} tokens a question"
    worse = {id: pair for id, pair in more.items() if pair[1][metric] < base[metric]}
    better = {id: pair for id, pair in more.items() if pair[1][metric] > base[metric]}
    parts = []
    for said, group in (("more budget made it worse", worse), ("more budget helped", better)):
        if group:
            listed = ", ".join(
                f"{id} {found[metric]:.3f} at {found['generated_tokens']:.1f}" for id, (_, found) in group.items()
            )
            parts.append(f"{said} in {listed} ({_certainty([trial for trial, _ in group.values()])})")
    if not parts:
        return f"{start}; more budget changed nothing in {', '.join(more)}."
    return f"{start}; {'; '.join(parts)}."


def _certainty(trials: Sequence[Trial]) -> str:
    """How much the seeds say about the differences of these trials to their parents."""
    if min(sum(cell.state == "completed" for cell in trial.cells) for trial in trials) < 2:
        return "one seed, which cannot tell it from noise"
    gains = [trial.gain for trial in trials]
    sure = [g.child for g in gains if g and g.lower is not None and g.upper is not None and g.lower * g.upper > 0]
    return f"beyond noise: {', '.join(sure)}" if sure else "none of it beyond noise"


def _stopping(done: Done, metric: str) -> str:
    """What stopping early saved against the same recipe without it."""
    said = []
    for id, (trial, found) in done.items():
        genome = trial.candidate.genome
        if genome.get("stop.threshold", NO_STOPPING) == NO_STOPPING:
            continue
        whole = {**genome, "stop.threshold": NO_STOPPING}
        for other, (against, all_of_it) in done.items():
            if against.candidate.genome == whole:
                said.append(
                    f"Stopping early, {id} took {found['samples_used']:.2f} of {genome['samples']} samples and "
                    f"{found['generated_tokens']:.1f} tokens where {other} took {all_of_it['generated_tokens']:.1f}, "
                    f"{metric} {found[metric]:.3f} against {all_of_it[metric]:.3f}."
                )
    return " ".join(said)
