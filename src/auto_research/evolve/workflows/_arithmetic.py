"""What the arithmetic workflow trains: the policy, its rollouts and pairs, losses, warm-up and scores.

Letters: B problems, G completions of each, P tokens of a prompt, R of a response, V ids of the vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.evolve.space import Genome, Value
from auto_research.evolve.workflow import Progress, Scores, Sizes
from auto_research.evolve.workflows.arithmetic import PAIR_LOSSES, PASS_K, REFERENCED, REPLAY_EVERY
from auto_research.layers import preference
from auto_research.layers.transformer import BlockCache, CausalTransformer, init_transformer, reorder_cache
from auto_research.tasks.answers import parse_answer
from auto_research.tasks.arithmetic import (
    END,
    PAD,
    VOCABULARY,
    Expression,
    decode,
    encode_prompts,
    encode_responses,
)

POSITIONS = 20
REPLAY_KEEPS = 2048
WARMUP_LR = 2e-3
GIVE_UP = 4
"""Training ends after so many times the planned updates: a loss that finds no examples never spends its tokens."""


class Policy(nn.Module):
    """Causal Transformer over characters with a tied head and learned positions.

    Prompts are padded on the left to one width, so a column is a position counted from the equals sign. Padding is
    never predicted.
    """

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(len(VOCABULARY), width)
        self.position = nn.Embedding(POSITIONS, width)
        self.stack = CausalTransformer(width, heads, 4 * width, layers)
        init_transformer(self)

    def forward(
        self, tokens: Tensor, valid: Tensor, *, cache: list[BlockCache] | None = None, latest: int | None = None
    ) -> Tensor:
        """Logits (B, T or latest, V) of the token after each of tokens (B, T), the newest columns of valid (B, keys).

        With a cache, the earlier columns are in it and valid covers them too.
        """
        keys = valid.shape[1]
        columns = torch.arange(keys - tokens.shape[1], keys, device=tokens.device)
        x = self.token(tokens) + self.position(columns)
        logits = F.linear(self.stack(x, valid, cache=cache, latest=latest), self.token.weight)
        never = torch.arange(len(VOCABULARY), device=tokens.device) == PAD
        return logits.masked_fill(never, -1e4)

    def respond(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """Logits (B, R, V) of every token of responses (B, R) after prompts (B, P)."""
        tokens = torch.cat([prompts, responses[:, :-1]], dim=1)
        return self(tokens, tokens != PAD, latest=responses.shape[1])

    def log_probabilities(self, prompts: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
        """Summed log-probability and number of tokens of responses (B, R) after prompts (B, P): (B,) each."""
        responses = responses[:, : int((responses != PAD).any(0).sum())]  # columns that are padding in every row
        return preference.sequence_log_probabilities(self.respond(prompts, responses), responses, responses != PAD)


def forward_flops(sizes: Sizes, columns: float, asked: float) -> float:
    """Of one sequence: every column through all blocks but the last, which answers at the last `asked` columns only."""
    width = sizes["width"]
    inner = columns * (12 * width**2 + 2 * width * columns)
    last = columns * 2 * width**2 + asked * (10 * width**2 + 2 * width * columns)
    return 2 * ((sizes["layers"] - 1) * inner + last + asked * len(VOCABULARY) * width)


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: Tensor,
    *,
    length: int,
    samples: int = 1,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Completions of prompts (B, P), (B * samples, length), those of a prompt adjacent; padding after the end token.

    A prompt is read once and each step feeds one column (key-value cache); decoding stops when all have ended.
    Temperature 0 is greedy.
    """
    cache = policy.stack.new_cache()
    valid = prompts != PAD
    logits = policy(prompts, valid, cache=cache, latest=1)[:, 0]
    if samples > 1:
        rows = torch.arange(len(prompts), device=prompts.device).repeat_interleave(samples)
        reorder_cache(cache, rows)
        logits, valid = logits[rows], valid[rows]
    out = valid.new_full((len(valid), length), PAD, dtype=torch.long)
    ended = valid.new_zeros(len(valid))
    for column in range(length):
        if temperature > 0:
            token = torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)[:, 0]
        else:
            token = logits.argmax(-1)
        token = token.masked_fill(ended, PAD)
        out[:, column] = token
        ended = ended | (token == END)
        if column + 1 == length or bool(ended.all()):
            break
        valid = torch.cat([valid, (token != PAD)[:, None]], dim=1)
        logits = policy(token[:, None], valid, cache=cache)[:, 0]
    return out


def token_divergence(policy: Policy, reference: Policy, prompts: Tensor, responses: Tensor) -> Tensor:
    """KL(policy || reference) summed over the tokens of each response (B, R) after prompts (B, P): (B,).

    Averaged over responses sampled from the policy, this estimates the divergence of the two response distributions.
    """
    ours = policy.respond(prompts, responses).float().log_softmax(-1)
    theirs = reference.respond(prompts, responses).float().log_softmax(-1)
    return (ours.exp() * (ours - theirs)).sum(-1).where(responses != PAD, 0.0).sum(-1)


def make_pairs(rollouts: Tensor, correct: Tensor, solutions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Chosen and rejected response of each problem, and whether it gives a pair.

    Shapes: rollouts (B, G, R), correct (B, G) bool, solutions (B, R). Returns (B, R), (B, R) and (B,) bool. Chosen is
    the first correct rollout, else the solution; rejected is the first wrong one; all correct gives no pair.
    """
    row = torch.arange(len(rollouts), device=rollouts.device)
    verified = rollouts[row, correct.int().argmax(1)]
    chosen = verified.where(correct.any(1)[:, None], solutions)
    rejected = rollouts[row, (~correct).int().argmax(1)]
    return chosen, rejected, ~correct.all(1)


def pass_at_k(correct: Tensor, k: int) -> Tensor:
    """Unbiased probability that one of k samples is right, from n >= k samples a problem: (B, n) bool -> (B,)."""
    samples = correct.shape[1]
    wrong = samples - correct.sum(1)
    # C(wrong, k) / C(samples, k) as a product of k factors, none of them negative.
    i = torch.arange(k, device=correct.device)
    return 1 - ((wrong[:, None] - i).clamp(min=0) / (samples - i)).prod(1)


@dataclass(frozen=True)
class Verified:
    """What a checker says of completions: correct (N,) bool, well-formed (N,) bool; a cut-off completion is neither."""

    correct: Tensor
    formed: Tensor


def verify(responses: Tensor, answers: Sequence[str]) -> Verified:
    """Checks completions (N, R) against one answer each."""
    texts = decode(responses)
    correct = [text is not None and parse_answer(text) == a for text, a in zip(texts, answers, strict=True)]
    formed = [text is not None and text.removeprefix("-").isdigit() for text in texts]
    device = responses.device
    return Verified(torch.tensor(correct, device=device), torch.tensor(formed, device=device))


@dataclass
class Problems:
    """One part of the exercises as tensors.

    Attributes:
        prompts: (N, P); solutions: (N, R) with R the longest completion allowed; answers: as texts.
    """

    expressions: list[Expression]
    prompts: Tensor
    solutions: Tensor
    answers: list[str]

    @classmethod
    def of(cls, expressions: Sequence[Expression], length: int) -> Problems:
        answers = [str(one.answer) for one in expressions]
        solutions = encode_responses(answers)
        return cls(
            list(expressions), encode_prompts(expressions), F.pad(solutions, (0, length - solutions.shape[1])), answers
        )

    def __len__(self) -> int:
        return len(self.expressions)

    def to(self, device: str) -> Problems:
        return Problems(self.expressions, self.prompts.to(device), self.solutions.to(device), self.answers)


@dataclass(frozen=True)
class Batch:
    """Training examples: prompts (B, P), chosen (B, R) and, of pairs, rejected responses (B, R)."""

    prompts: Tensor
    chosen: Tensor
    rejected: Tensor | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            change(self.prompts), change(self.chosen), None if self.rejected is None else change(self.rejected)
        )

    def tokens(self) -> int:
        """Response tokens that an update learns from."""
        pair = 0 if self.rejected is None else int((self.rejected != PAD).sum())
        return int((self.chosen != PAD).sum()) + pair

    def parts(self, count: int) -> Iterator[Batch]:
        """At most `count` parts of equal size but the last."""
        size = -(-len(self) // count)
        return (self.slice(first, first + size) for first in range(0, len(self), size))

    def then(self, other: Batch | None) -> Batch:
        """These examples followed by others of the same kind."""
        if other is None:
            return self
        rejected = None
        if self.rejected is not None and other.rejected is not None:
            rejected = torch.cat([self.rejected, other.rejected])
        return Batch(torch.cat([self.prompts, other.prompts]), torch.cat([self.chosen, other.chosen]), rejected)

    def slice(self, first: int, last: int) -> Batch:
        """Examples first, ..., last - 1."""
        return self._each(lambda x: x[first:last])

    def draw(self, count: int, draw: torch.Generator) -> Batch:
        """`count` examples drawn with replacement; none where there are none."""
        if not len(self):
            return self
        rows = torch.randint(len(self), (count,), generator=draw).to(self.prompts.device)
        return self._each(lambda x: x[rows])


@dataclass
class Artefact:
    """A trained policy, the warm-up it started from, its seed, and what training counted."""

    policy: Policy
    start: Policy
    seed: int
    facts: dict[str, float]


@dataclass
class Trace:
    """What the effect probe looks at: losses, problems drawn and rollouts of every update."""

    losses: list[float] = field(default_factory=list)
    drawn: list[Tensor] = field(default_factory=list)
    rollouts: list[Tensor] = field(default_factory=list)


Objective = Callable[[Batch, Batch], Tensor]
"""What a part of a batch adds to the batch's loss, a scalar."""


def _sft(policy: Policy) -> Objective:
    """Negative log-likelihood of the chosen responses a token."""

    def objective(part: Batch, whole: Batch) -> Tensor:
        return -policy.log_probabilities(part.prompts, part.chosen)[0].sum() / whole.tokens()

    return objective


def _pairs(policy: Policy, reference: Policy, genome: Genome) -> Objective:
    """Mean over pairs of a genome's preference loss."""
    name = genome["post.loss"]

    def losses(pairs: Batch) -> Tensor:
        assert pairs.rejected is not None
        both = torch.cat([pairs.prompts, pairs.prompts]), torch.cat([pairs.chosen, pairs.rejected])
        total, length = policy.log_probabilities(*both)
        (win, lose), (win_length, lose_length) = total.chunk(2), length.chunk(2)
        if name in REFERENCED:
            with torch.no_grad():
                sums = (win, lose, *reference.log_probabilities(*both)[0].chunk(2))
            if name == "dpo":
                return preference.dpo_loss(*sums, beta=float(genome["dpo.beta"]))
            lengths = (win_length, lose_length) if genome["ipo.normalise"] else (None, None)
            tau = float(genome["ipo.tau"])
            return preference.ipo_loss(*sums, tau=tau, chosen_length=lengths[0], rejected_length=lengths[1])
        means = (win / win_length, lose / lose_length)
        if name == "orpo":
            return preference.orpo_loss(*means, weight=float(genome["orpo.lambda"]))
        beta = float(genome["simpo.beta"])
        return preference.simpo_loss(*means, beta=beta, gamma=beta * float(genome["simpo.gamma_ratio"]))

    def objective(part: Batch, whole: Batch) -> Tensor:
        return losses(part).sum() / len(whole)

    return objective


def fresh_policy(sizes: Sizes, seed: int) -> Policy:
    """A freshly drawn policy on the CPU; leaves the caller's random state alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy(sizes["width"], sizes["layers"], sizes["heads"])


def warm_up(problems: Problems, seed: int, sizes: Sizes, device: str, progress: Progress) -> Policy:
    """SFT from scratch on the training part: a function of data, sizes and seed."""
    policy, problems = fresh_policy(sizes, seed).to(device), problems.to(device)
    optimiser, objective, draw = _optimiser(policy, WARMUP_LR), _sft(policy), _stream(seed, "warm-up")
    for step in range(sizes["warmup_steps"]):
        optimiser.param_groups[0]["lr"] = WARMUP_LR * min(1.0, (step + 1) / 30)
        rows = torch.randint(len(problems), (sizes["warmup_batch"],), generator=draw).to(device)
        batch = Batch(problems.prompts[rows], problems.solutions[rows])
        loss = _descend(optimiser, batch, objective, sizes["accumulate"])
        if step % 10 == 0 or step + 1 == sizes["warmup_steps"]:
            progress(step + 1, float(loss))
    return policy.requires_grad_(False)


def update_tokens(sizes: Sizes, problems: Problems) -> float:
    """Response tokens of one update: as many solutions as a full update has responses, of mean length."""
    return 2 * sizes["micro_batch"] * sizes["accumulate"] * float((problems.solutions != PAD).sum()) / len(problems)


def post_train(
    genome: Genome,
    start: Policy,
    problems: Problems,
    seed: int,
    sizes: Sizes,
    device: str,
    progress: Progress,
    trace: Trace | None = None,
) -> Artefact:
    """Continues from `start` with the loss under test until the response tokens of the budget are spent."""
    problems = problems.to(device)
    policy, reference = copy.deepcopy(start).requires_grad_(True), copy.deepcopy(start)
    optimiser = _optimiser(policy, float(genome["post.lr"]))
    order, draw = _easiest_first(start, problems), _stream(seed, "problems")
    name, source = genome["post.loss"], genome.get("pairs.source", "on-policy")
    paired = name in PAIR_LOSSES
    wanted = sizes["micro_batch"] * sizes["accumulate"] * (1 if paired else 2)
    rollouts = _Rollouts(policy, problems, int(genome.get("pairs.group", 0)), sizes["length"], seed, paired)
    store: Batch | None = None
    objective = _pairs(policy, reference, genome) if paired else _sft(policy)
    per_update = update_tokens(sizes, problems)
    budget = float(genome["post.steps"]) * sizes["steps"] * per_update
    trained, updates, refreshed, refreshes = 0, 0, 0, int(genome.get("reference.refresh", 0))
    losses: list[Tensor] = []
    while trained < budget and updates < GIVE_UP * budget / per_update:
        done = trained / budget
        if refreshed < refreshes and done >= (refreshed + 1) / (refreshes + 1):
            reference.load_state_dict(policy.state_dict())
            refreshed += 1
        asked = wanted
        if source == "mixed":
            asked = wanted // 2
        elif source == "replay" and updates % REPLAY_EVERY:
            asked = 0
        rows = _draw(order, asked, genome["data.recipe"], done, draw)
        if name == "sft":
            batch = Batch(problems.prompts[rows], problems.solutions[rows])
        else:
            batch = fresh = rollouts(rows)
            if source != "on-policy":
                store = fresh.then(store).slice(0, REPLAY_KEEPS)
                batch = store.draw(wanted, draw) if source == "replay" else fresh.then(store.draw(asked, draw))
        updates += 1
        if trace is not None:
            trace.drawn.append(rows)
            trace.rollouts.append(rollouts.latest)
        if not len(batch):
            continue
        loss = _descend(optimiser, batch, objective, sizes["accumulate"])
        losses.append(loss)
        trained += batch.tokens()
        if updates % 10 == 1 or trained >= budget:
            progress(sizes["warmup_steps"] + updates, float(loss))
    values = torch.stack(losses).tolist() if losses else []
    if trace is not None:
        trace.losses += values
    facts = {"updates": float(updates), "trained_tokens": float(trained), "rollout_tokens": float(rollouts.tokens)}
    if values:
        facts |= {"first_loss": values[0], "last_loss": values[-1]}
    if name != "sft":
        facts["pair_yield" if paired else "accepted"] = rollouts.kept / max(1, rollouts.asked)
    return Artefact(policy.requires_grad_(False), start, seed, facts)


@torch.no_grad()
def score(artefact: Artefact, problems: Problems, sizes: Sizes, device: str) -> Scores:
    """Greedy accuracy, and what sampled completions and fixed pairs say beside it.

    `kl` is from the warm-up, estimated on the policy's own samples; `margin` is over pairs of solution and wrong
    completion of the warm-up, which are the same for all candidates of a seed.
    """
    policy, start, problems = artefact.policy, artefact.start, problems.to(device)
    length, samples = sizes["length"], sizes["samples"]
    greedy = generate(policy, problems.prompts, length=length, temperature=0)
    verdict = verify(greedy, problems.answers)
    sampler = _stream(artefact.seed, "evaluation", device)
    sampled = generate(policy, problems.prompts, length=length, samples=samples, generator=sampler)
    right = verify(sampled, [a for a in problems.answers for _ in range(samples)]).correct.view(-1, samples)
    prompts = problems.prompts.repeat_interleave(samples, 0)
    metrics = {
        "accuracy": float(verdict.correct.double().mean()),
        f"pass@{PASS_K}": float(pass_at_k(right, PASS_K).double().mean()),
        "sampled_accuracy": float(right.double().mean()),
        "format_rate": float(verdict.formed.double().mean()),
        "mean_length": float((greedy != PAD).sum(1).double().mean()),
        "kl": float(token_divergence(policy, start, prompts, sampled).double().mean()),
        "warmup_accuracy": greedy_accuracy(start, problems, length),
    }
    sampler = _stream(artefact.seed, "margin", device)
    wrong = generate(start, problems.prompts, length=length, samples=4, generator=sampler)
    judged = verify(wrong, [a for a in problems.answers for _ in range(4)]).correct.view(-1, 4)
    _, rejected, pair = make_pairs(wrong.view(-1, 4, length), judged, problems.solutions)
    if bool(pair.any()):
        asked = problems.prompts[pair]
        both = [(asked, problems.solutions[pair]), (asked, rejected[pair])]
        chosen_rejected = [model.log_probabilities(*one)[0] for model in (policy, start) for one in both]
        metrics["margin"] = float(preference.margin(*chosen_rejected).double().mean())
    return Scores(metrics, verdict.correct.double().tolist())


def parameter_shapes(sizes: Sizes) -> dict[str, list[int]]:
    """Name and shape of every parameter."""
    return {name: list(p.shape) for name, p in fresh_policy(sizes, 0).named_parameters()}


def _stream(seed: int, purpose: str, device: str = "cpu") -> torch.Generator:
    """A generator of its own for each purpose of a seed, so that one use never shifts another."""
    number = int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:6], "big")
    return torch.Generator(device).manual_seed(number)


def _optimiser(policy: Policy, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(policy.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)


def _descend(optimiser: torch.optim.Optimizer, batch: Batch, objective: Objective, parts: int) -> Tensor:
    """One update on a batch, a part of it in memory at a time; returns the loss of the whole, a scalar."""
    optimiser.zero_grad(set_to_none=True)
    losses = []
    for part in batch.parts(parts):
        loss = objective(part, batch)
        loss.backward()
        losses.append(loss.detach())
    optimiser.step()
    return torch.stack(losses).sum()


@torch.no_grad()
def _easiest_first(policy: Policy, problems: Problems) -> Tensor:
    """Problems (N,) by the policy's mean negative log-likelihood a token of their solutions, ascending."""
    means = [
        total / length
        for total, length in map(policy.log_probabilities, problems.prompts.split(2048), problems.solutions.split(2048))
    ]
    return torch.cat(means).argsort(descending=True, stable=True)


def _draw(order: Tensor, count: int, recipe: Value, done: float, draw: torch.Generator) -> Tensor:
    """Problems (count,) drawn evenly from those that a recipe admits when a share `done` of the tokens is spent.

    order (N,) is easiest first: `all` admits every problem, `hard-half` the second half, `curriculum` the easiest half
    at first and all from the middle on. The same numbers are drawn whatever the recipe.
    """
    size = len(order)
    first = size // 2 if recipe == "hard-half" else 0
    last = size // 2 + int(min(1.0, 2 * done) * (size - size // 2)) if recipe == "curriculum" else size
    place = first + (torch.rand(count, generator=draw, dtype=torch.float64) * (last - first)).long()
    return order[place.to(order.device)]


def greedy_accuracy(policy: Policy, problems: Problems, length: int) -> float:
    """Share of problems that greedy decoding answers correctly."""
    greedy = generate(policy, problems.prompts, length=length, temperature=0)
    return float(verify(greedy, problems.answers).correct.double().mean())


class _Rollouts:
    """Samples completions of the current policy, checks them and makes training examples of them.

    Attributes:
        asked, kept: problems asked so far, and those that gave an example; tokens: sampled so far.
        latest: (B, G, R) of the last call.
    """

    def __init__(self, policy: Policy, problems: Problems, group: int, length: int, seed: int, paired: bool) -> None:
        self.policy, self.problems, self.group, self.length, self.paired = policy, problems, group, length, paired
        self.sampler = _stream(seed, "rollouts", str(problems.prompts.device))
        self.asked = self.kept = self.tokens = 0
        self.latest = problems.solutions[:0]

    def __call__(self, rows: Tensor) -> Batch:
        """Pairs of problems (B,), or verified-correct completions alone; problems that give none are left out."""
        prompts, solutions = self.problems.prompts[rows], self.problems.solutions[rows]
        if not len(rows):
            self.latest = solutions
            return Batch(prompts, solutions, solutions if self.paired else None)
        answers = [self.problems.answers[row] for row in rows.tolist() for _ in range(self.group)]
        sampled = generate(self.policy, prompts, length=self.length, samples=self.group, generator=self.sampler)
        correct = verify(sampled, answers).correct.view(-1, self.group)
        self.latest = sampled.view(-1, self.group, self.length)
        chosen, rejected, keep = make_pairs(self.latest, correct, solutions)
        if not self.paired:
            keep = correct.any(1)
        self.asked += len(rows)
        self.kept += int(keep.sum())
        self.tokens += int((sampled != PAD).sum())
        return Batch(prompts[keep], chosen[keep], rejected[keep] if self.paired else None)
