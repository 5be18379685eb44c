"""What the UltraFeedback workflow does with preference pairs: it chooses a subset, trains with TRL, and scores.

Letters: N pairs, B answers of a batch, P tokens of a prompt, A of an answer, V of the vocabulary. Log-probabilities of
an answer are in nats, of the policy (log pi) and of its frozen reference (log rho), end token included.
"""

from __future__ import annotations

import copy
import functools
import gc
import hashlib
import itertools
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auto_research.data import catalogue
from auto_research.data.preferences import Message, Pair, by_hash, own_pairs
from auto_research.evolve import cells
from auto_research.evolve.space import Genome, Value
from auto_research.evolve.workflow import NonFinite, Progress, Scores, Sizes, digest
from auto_research.evolve.workflows import _trl
from auto_research.evolve.workflows._checkpoints import Checkpoint
from auto_research.evolve.workflows.ultrafeedback import PARTS, REFERENCED
from auto_research.layers import preference
from auto_research.runtime.bf16 import fast_bf16
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import write_json_atomic

SCHEDULE, WARMUP, COMPUTE = "linear", 0.0, "bfloat16"
FACTS = "facts.json"
Z95 = 1.959964
"""Two-sided 95 % of a normal distribution."""
BEAT_S = 2.0
"""Seconds between two reports of the batches that an update accumulates."""
TRL_RELEASES = ("1.16",)
"""Releases of TRL whose experimental ORPO and CPO trainers the wrapper below was tested with."""


# ---------------------------------------------------------------------------------------------------------- subset


@dataclass(frozen=True)
class Source:
    """Pairs that were found.

    Attributes:
        test: the published test pairs; None where the data set has one part, which is then divided here.
        stand_in: as in `Data`.
    """

    name: str
    train: list[Pair]
    test: list[Pair] | None
    stand_in: str


def gather(dataset_dir: Path | None) -> Source:
    """UltraFeedback, else the demo pairs, else the pairs made by rule; a given folder goes before the cache."""
    found = {name: catalogue.find(name, dataset_dir) for name in ("ultrafeedback", "dpo-en-demo")}
    given = [name for name, place in found.items() if place is not None and place.origin == "dataset-dir"]
    here = given or [name for name, place in found.items() if place is not None]
    bring = "`auto-research prepare ultrafeedback` brings it"
    if not here:
        pairs = own_pairs()
        return Source("own pairs", pairs, None, f"{len(pairs)} pairs made by rule stand in for UltraFeedback: {bring}")
    loaded = catalogue.load(here[0], dataset_dir)
    if here[0] == "dpo-en-demo":
        return Source(here[0], loaded, None, f"{len(loaded)} demo pairs stand in for UltraFeedback: {bring}")
    whole = catalogue.entry(here[0]).counts["train"]
    part = (
        f"{len(loaded['train']):,} of {whole:,} training pairs of UltraFeedback" if len(loaded["train"]) < whole else ""
    )
    return Source(here[0], loaded["train"], loaded["test"], part)


@dataclass(frozen=True)
class Example:
    """A pair as the trainers get it, and as tokens.

    Attributes:
        id: of the pair, whatever the tokenizer; key: of its prompt.
        prompt: the chat as far as the assistant's turn; chosen, rejected: answers with the end token.
        cut: whether the beginning of the prompt was left out.
    """

    id: str
    key: str
    prompt: str
    chosen: str
    rejected: str
    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    cut: bool

    def __len__(self) -> int:
        """Tokens that a trainer reads of it: both answers, padded to one length, each after the prompt."""
        return 2 * (len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids)))


@dataclass(frozen=True)
class Subset:
    """The pairs of a run, in hash order. `left_out`: reason -> number, of those looked at."""

    parts: dict[str, list[Example]]
    left_out: dict[str, int]
    looked_at: int

    @property
    def ids(self) -> dict[str, list[str]]:
        return {name: [example.id for example in part] for name, part in self.parts.items()}


def select(source: Source, tokenizer: Any, sizes: Sizes) -> Subset:
    """A fixed subset: usable pairs in the order of their prompts' SHA-256, as many a part as `sizes` say.

    No prompt is in two parts. A published test part gives the test pairs; what is divided here keeps at least two
    thirds for training where it has to serve three parts, 200 of 300.
    """
    reader = _Reader(tokenizer, sizes["prompt_tokens"], sizes["answer_tokens"])
    wanted = {name: sizes[size] for name, size in PARTS.items()}
    parts: dict[str, list[Example]] = {}
    if source.test is not None:
        parts = _fill(reader.read(source.test), {"test": wanted.pop("test")})
        reader.refused |= {pair.key for pair in source.test}
    sixth = max(1, len(source.train) // 6)
    wanted = {name: count if name == "train" else min(count, sixth) for name, count in wanted.items()}
    parts |= _fill(reader.read(source.train), wanted)
    if empty := [name for name in PARTS if not parts[name]]:
        reasons = ", ".join(f"{number} {reason}" for reason, number in reader.left_out.items()) or "none left out"
        raise UserError(
            f"{source.name} has no usable pair for {' and '.join(empty)} ({reader.looked_at} looked at: {reasons}); "
            "raise --size answer_tokens=..., or lay more pairs there"
        )
    return Subset({name: parts[name] for name in PARTS}, dict(reader.left_out), reader.looked_at)


def _fill(examples: Iterator[Example], wanted: Mapping[str, int]) -> dict[str, list[Example]]:
    """Parts of `wanted` sizes, `train` last; a second pair of a prompt whose part is full is left out.

    Where usable pairs are scarce, a held-out part beside `train` gets its share of them, or a sixth if that is more.
    """
    total = sum(wanted.values())
    some = list(itertools.islice(examples, total + total // 10 + 8))
    parts: dict[str, list[Example]] = {}
    taken: set[str] = set()
    rest = iter(some)
    for name in sorted(wanted, key=list(PARTS).index, reverse=True):
        count = wanted[name]
        part: list[Example] = []
        if "train" in wanted and name != "train" and len(some) < total:
            count = min(count, max(1, len(some) // 6, count * len(some) // total))
        while len(part) < count and (example := next(rest, None)) is not None:
            if example.key not in taken:
                part.append(example)
        taken |= {example.key for example in part}
        parts[name] = part
    return parts


@dataclass
class _Reader:
    """Turns pairs into examples and counts what it leaves out."""

    tokenizer: Any
    prompt_tokens: int
    answer_tokens: int
    refused: set[str] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)
    looked_at: int = 0
    _seen: dict[str, str] = field(default_factory=dict)

    def read(self, pairs: Sequence[Pair]) -> Iterator[Example]:
        """Examples in hash order, made as they are asked for; of equal pairs the first."""
        ordered = by_hash(pairs)
        if equal := len(pairs) - len(ordered):
            self.looked_at += equal
            self.left_out["equal to another pair"] += equal
        for pair in ordered:
            self.looked_at += 1
            made = encode(pair, self.tokenizer, self.prompt_tokens, self.answer_tokens)
            if isinstance(made, Example):
                words = " ".join(made.prompt.lower().split())
                if pair.key in self.refused:
                    made = "prompt of the test part"
                elif self._seen.setdefault(words, pair.key) != pair.key:
                    made = "prompt like another once cut"
            if isinstance(made, str):
                self.left_out[made] += 1
            else:
                yield made


def encode(pair: Pair, tokenizer: Any, prompt_tokens: int, answer_tokens: int) -> Example | str:
    """The pair as text and tokens, or why it is left out.

    A prompt longer than `prompt_tokens` loses its oldest words. Answers are never cut: a pair with one of more than
    `answer_tokens`, end included, is left out.
    """
    if pair.fault:
        return pair.fault
    fitted = fit_prompt(pair.prompt, tokenizer, prompt_tokens)
    if fitted is None:
        return "prompt too long"
    prompt, cut = fitted
    prompt_ids = _ids(tokenizer, prompt)
    texts = [answer.strip() + tokenizer.eos_token for answer in (pair.chosen, pair.rejected)]
    tokens = [_ids(tokenizer, prompt + text) for text in texts]
    if any(ids[: len(prompt_ids)] != prompt_ids for ids in tokens):
        return "answer that merges with its prompt"
    chosen, rejected = (tuple(ids[len(prompt_ids) :]) for ids in tokens)
    if chosen == rejected:
        return "identical"
    if max(len(chosen), len(rejected)) > answer_tokens:
        return "answer too long"
    return Example(pair.id, pair.key, prompt, texts[0], texts[1], tuple(prompt_ids), chosen, rejected, cut)


def fit_prompt(messages: Sequence[Message], tokenizer: Any, limit: int) -> tuple[str, bool] | None:
    """(the chat as text, up to where the assistant answers, and whether it was cut) in at most `limit` tokens.

    What is cut is the beginning: of the oldest message first, then of the next, never of the frame around them. A
    system message stays as an empty one, or the template would put its own in its place. None when nothing of the last
    message would be left.
    """
    left = list(messages)
    while True:
        chat = [message._asdict() for message in left]
        text: str = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        excess = len(_ids(tokenizer, text)) - limit
        if excess <= 0:
            return text, left != list(messages)
        oldest = next(i for i, message in enumerate(left) if message.content or i == len(left) - 1)
        content = _ids(tokenizer, left[oldest].content)
        if len(content) > excess:
            kept = tokenizer.decode(content[excess:]).lstrip("\ufffd")  # what is left of a cut character
            left[oldest] = left[oldest]._replace(content=kept)
        elif oldest == len(left) - 1:
            return None
        elif left[oldest].role == "system":
            left[oldest] = left[oldest]._replace(content="")
        else:
            del left[oldest]


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def part_digest(ids: Sequence[str]) -> str:
    """SHA-256 (hex) of a list of ids, one a line."""
    return hashlib.sha256("\n".join(ids).encode()).hexdigest()


# -------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Plan:
    """A genome as settings of a trainer.

    Attributes:
        loss: dpo, ipo, orpo, simpo or sft; constants: of that loss, such as `beta`.
        normalise: means over tokens in place of sums (of DPO; IPO, ORPO and SimPO have means as TRL trains them).
        precomputed: reference log-probabilities are computed before training, and no reference is held.
        rank: of adapters; 0 trains all weights.
    """

    loss: str
    constants: Mapping[str, float]
    normalise: bool
    precomputed: bool
    rank: int
    learning_rate: float

    @property
    def scale(self) -> float:
        """What the loss multiplies a difference of log-probabilities with: beta, IPO's tau; 1 where nothing does."""
        return float(self.constants.get("beta", self.constants.get("tau", 1.0)))


def plan_of(genome: Mapping[str, Value]) -> Plan:
    loss = str(genome["post.loss"])
    constants = {
        axis.partition(".")[2]: float(value)
        for axis, value in genome.items()
        if axis.startswith(f"{loss}.") and not isinstance(value, bool)
    }
    return Plan(
        loss,
        constants,
        bool(genome.get("dpo.normalise", False)),
        genome.get("reference.mode") == "precomputed",
        int(genome["lora.r"]),
        float(genome["train.lr"]),
    )


@dataclass
class Artefact:
    """A trained policy and what training counted.

    Attributes:
        reference: the checkpoint it started from; None for a policy with adapters, which gives it by leaving them out.
    """

    policy: Any
    reference: Any
    tokenizer: Any
    plan: Plan
    facts: dict[str, float]


@dataclass
class Trace:
    """What the effect probe looks at: losses of the updates, ids of the pairs in the order of their use."""

    losses: list[float] = field(default_factory=list)
    order: list[str] = field(default_factory=list)


Load = Callable[[str], tuple[Any, Any]]
"""Device -> a fresh (model, tokenizer) of the checkpoint, in FP32."""


def train(
    load: Load,
    identity: Mapping[str, str],
    genome: Mapping[str, Value],
    examples: Sequence[Example],
    seed: int,
    sizes: Sizes,
    device: str,
    progress: Progress,
    trace: Trace | None = None,
) -> Artefact:
    """Trains a fresh copy of the checkpoint with the genome's loss, by TRL; goes on from its newest checkpoint if any.

    Weights are FP32 and computation is BF16. What takes long writes to the log: a cell without a sign of life is ended.

    Args:
        identity: digests of data and checkpoint: what a checkpoint to go on from must have in common.

    Raises `Unmoved` when the first update moves less than half of the weights, `NonFinite` for a loss that is none.
    """
    plan = plan_of(genome)
    rows = [examples[i] for i in _trl.seeded_order(len(examples), update_pairs(sizes) * sizes["steps"], seed)]
    model, tokenizer = load(device)
    print(f"{plan.loss}: loaded the checkpoint", flush=True)
    reference = None
    if plan.loss in REFERENCED and not plan.precomputed and not plan.rank:
        reference = copy.deepcopy(model).eval().requires_grad_(False)
    model = _trl.with_adapter(model, plan.rank, seed)
    known = _trl.Identity(
        _trl.order_digest([row.id for row in rows]),
        "float32",
        COMPUTE,
        {**identity, "genome": dict(genome), "updates": sizes["steps"], "pairs an update": update_pairs(sizes)},
    )
    with _trl.checkpoint_folder() as folder, _trl.libraries_quiet(), fast_bf16(device):
        shared = _trl.arguments(
            folder,
            device=device,
            seed=seed,
            steps=sizes["steps"],
            batch=sizes["micro_batch"],
            accumulate=sizes["accumulate"],
            learning_rate=plan.learning_rate,
            max_length=sizes["prompt_tokens"] + sizes["answer_tokens"],
            save_every=sizes["save_every"] if sizes["save_every"] < sizes["steps"] else 0,
            warmup=WARMUP,
            schedule=SCHEDULE,
            compute=COMPUTE,
        )
        trainer = trainer_of(plan, shared, model, reference, tokenizer, rows)
        if len(trainer.train_dataset) != len(rows):
            raise RuntimeError(f"the trainer kept {len(trainer.train_dataset)} of {len(rows)} pairs")
        print(f"{plan.loss}: made the trainer, {len(rows)} pairs", flush=True)
        _report_batches(trainer, progress)
        trained = _trl.fit(trainer, known, progress)
        policy = _plain(trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False))
        del trainer, model
        gc.collect()
    if plan.rank:
        if "ref" in policy.peft_config:  # TRL's copy of the fresh adapter, which is the checkpoint itself
            policy.delete_adapter("ref")
    else:
        reference = _plain(reference) if reference is not None else load(device)[0].requires_grad_(False)
    losses = [trained.history[step] for step in sorted(trained.history)]
    facts = {"first_loss": losses[0], "last_loss": losses[-1], "updates": float(len(losses))}
    if len(losses) > 1:
        facts["loss_after_a_step"] = losses[1]
    if trained.resumed_from:
        facts["resumed_from_step"] = float(trained.resumed_from)
    facts |= trained.moved.metrics | _trl.dtype_metrics(known)
    if trace is not None:
        trace.losses += losses
        trace.order += [row.id for row in rows]
    return Artefact(policy, reference, tokenizer, plan, facts)


def update_pairs(sizes: Sizes) -> int:
    """Pairs of one update."""
    return sizes["micro_batch"] * sizes["accumulate"]


def trainer_of(
    plan: Plan, shared: Mapping[str, Any], model: Any, reference: Any, tokenizer: Any, rows: Sequence[Example]
) -> Any:
    """The trainer of TRL that has this loss, over these pairs in this order.

    Pairs go in as text with the end token, so that all trainers make the same tokens of them.
    """
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    pairs = [{"prompt": row.prompt, "chosen": row.chosen, "rejected": row.rejected} for row in rows]
    common: dict[str, Any] = {"model": model, "processing_class": tokenizer}
    if plan.loss == "sft":
        answers = [{"prompt": row.prompt, "completion": row.chosen} for row in rows]
        arguments = SFTConfig(**shared, completion_only_loss=True)
        return SFTTrainer(args=arguments, train_dataset=_trl.as_dataset(answers), **common)
    common["train_dataset"] = _trl.as_dataset(pairs)
    if plan.loss in REFERENCED:
        kind = "ipo" if plan.loss == "ipo" else "sigmoid_norm" if plan.normalise else "sigmoid"
        arguments = DPOConfig(**shared, loss_type=[kind], beta=plan.scale, precompute_ref_log_probs=plan.precomputed)
        return DPOTrainer(args=arguments, ref_model=reference, **common)
    trainer, config = experimental(plan.loss)
    if plan.loss == "orpo":
        return trainer(args=config(**shared, beta=plan.constants["lambda"]), **common)
    beta = plan.constants["beta"]
    gamma = beta * plan.constants["gamma_ratio"]
    return trainer(args=config(**shared, loss_type="simpo", cpo_alpha=0.0, beta=beta, simpo_gamma=gamma), **common)


def experimental(loss: str) -> tuple[Any, Any]:
    """(trainer, configuration) of a loss that TRL keeps outside its stable interface: ORPO, and SimPO as CPO's.

    Raises `UserError` for a release of TRL that this was not tested with.
    """
    import importlib
    import os

    import trl

    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    name = {"orpo": "ORPO", "simpo": "CPO"}[loss]
    release = ".".join(str(trl.__version__).split(".")[:2])
    if release not in TRL_RELEASES:
        wanted = ", ".join(TRL_RELEASES)
        raise UserError(
            f"{loss} needs TRL's experimental {name} trainer, which may change in any release: this is tested with trl "
            f"{wanted} and {trl.__version__} is installed (pip install 'trl=={TRL_RELEASES[-1]}.*')"
        )
    module = importlib.import_module(f"trl.experimental.{name.lower()}")
    return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")


def _report_batches(trainer: Any, progress: Progress) -> None:
    """Lets the batches that an update accumulates report too: one update of a real checkpoint can take minutes."""
    step, latest = trainer.training_step, [time.monotonic()]

    def training_step(*args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = step(*args, **kwargs)
        if time.monotonic() - latest[0] > BEAT_S:
            progress(trainer.state.global_step, float(loss) * trainer.args.gradient_accumulation_steps)
            latest[0] = time.monotonic()
        return loss

    trainer.training_step = training_step


def _plain(model: Any) -> Any:
    """The model as Transformers made it: without the autocast and the fused head that trainers put around `forward`."""
    for module in model.modules():
        module.__dict__.pop("forward", None)
    return model.eval().requires_grad_(False)


def save(artefact: Artefact, folder: Path) -> None:
    """As Transformers and PEFT store a model: all weights, or the adapter alone. Checkpoints are done with."""
    from auto_research.checkpoints.store import quiet

    with quiet():
        artefact.policy.save_pretrained(folder)
        artefact.tokenizer.save_pretrained(folder)
    write_json_atomic(folder / FACTS, artefact.facts)
    if (kept := cells.checkpoints()) is not None:
        shutil.rmtree(kept, ignore_errors=True)


def restore(checkpoint: Checkpoint, genome: Genome, folder: Path, device: str) -> Artefact:
    """What `save` stored, with its reference."""
    plan, facts = plan_of(genome), json.loads((folder / FACTS).read_text(encoding="utf-8"))
    base, tokenizer = checkpoint.load(device)
    base.requires_grad_(False)
    if not plan.rank:
        policy, _ = replace(checkpoint, resolved=replace(checkpoint.resolved, path=folder)).load(device)
        return Artefact(policy.requires_grad_(False), base, tokenizer, plan, facts)
    from peft import PeftModel

    with _trl.libraries_quiet():
        policy = PeftModel.from_pretrained(base, folder).to(device).eval()
    return Artefact(policy, None, tokenizer, plan, facts)


# ---------------------------------------------------------------------------------------------------------- scores


@dataclass(frozen=True)
class Likelihoods:
    """Of N pairs, float64 on the CPU; the first column is the chosen answer, the second the rejected one.

    Attributes:
        policy, reference: summed log-probabilities (N, 2).
        tokens: of the answers (N, 2).
        divergence: KL(policy || reference) summed over an answer's tokens (N, 2).
    """

    policy: Tensor
    reference: Tensor
    tokens: Tensor
    divergence: Tensor

    @property
    def ratio(self) -> Tensor:
        """log pi - log rho (N, 2)."""
        return self.policy - self.reference


@torch.no_grad()
def measure(artefact: Artefact, examples: Sequence[Example], batch: int, device: str) -> Likelihoods:
    """Likelihoods of both answers of every pair under the policy and its reference, computed in FP32 alike.

    Answers are batched by length, prompts padded on the left, so that the head is applied to answers alone.
    """
    answers = [(e.prompt_ids, ids) for e in examples for ids in (e.chosen_ids, e.rejected_ids)]
    order = sorted(range(len(answers)), key=lambda i: (sum(map(len, answers[i])), i))
    found = torch.zeros(len(answers), 4, dtype=torch.float64)
    for first in range(0, len(order), batch):
        rows = order[first : first + batch]
        ids, attention, kept = (part.to(device) for part in _padded([answers[i] for i in rows]))
        asked = kept.shape[1]
        targets = ids[:, -asked:]
        inputs = {
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "use_cache": False,
            "logits_to_keep": asked + 1,
        }
        ours = artefact.policy(**inputs).logits[:, :-1].float()
        with artefact.policy.disable_adapter() if artefact.reference is None else nullcontext():
            theirs = (artefact.reference or artefact.policy)(**inputs).logits[:, :-1].float()
        policy, tokens = preference.sequence_log_probabilities(ours, targets, kept)
        reference, _ = preference.sequence_log_probabilities(theirs, targets, kept)
        ours, theirs = ours.log_softmax(-1), theirs.log_softmax(-1)
        divergence = (ours.exp() * (ours - theirs)).sum(-1).where(kept, 0.0).sum(-1)
        found[rows] = torch.stack([policy, reference, tokens, divergence], 1).cpu().double()
    if not bool(found.isfinite().all()):
        raise NonFinite("a held-out log-probability is not finite")
    return Likelihoods(*found.view(len(examples), 2, 4).unbind(-1))


def _padded(answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """(ids (B, T), attention mask (B, T), which of the last columns are answer (B, A)): padded on the left."""
    length = max(len(prompt) + len(answer) for prompt, answer in answers)
    longest = max(len(answer) for _, answer in answers)
    ids, attention = (
        torch.zeros(len(answers), length, dtype=torch.long),
        torch.zeros(len(answers), length, dtype=torch.long),
    )
    kept = torch.zeros(len(answers), longest, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(answers):
        tokens = [*prompt, *answer]
        ids[i, length - len(tokens) :] = torch.tensor(tokens)
        attention[i, length - len(tokens) :] = 1
        kept[i, longest - len(answer) :] = True
    return ids, attention, kept


def own_score(plan: Plan, found: Likelihoods) -> Tensor:
    """What a method itself ranks answers by (N, 2).

    DPO and IPO: the implicit reward, beta (IPO: tau) times log pi - log rho; of its means where DPO trains with means.
    ORPO, SimPO and SFT: the mean log-probability a token.
    """
    if plan.loss not in REFERENCED:
        return found.policy / found.tokens
    return plan.scale * (found.ratio / found.tokens if plan.normalise else found.ratio)


def held_out_loss(plan: Plan, found: Likelihoods) -> Tensor:
    """Our own losses over held-out pairs, a scalar: ln 2 for an untrained policy under DPO."""
    means = (found.policy / found.tokens).unbind(1)
    if plan.loss == "orpo":
        return preference.orpo_loss(*means, weight=plan.constants["lambda"]).mean()
    if plan.loss == "simpo":
        beta = plan.constants["beta"]
        return preference.simpo_loss(*means, beta=beta, gamma=beta * plan.constants["gamma_ratio"]).mean()
    if plan.loss == "sft":
        return -means[0].mean()
    sums = (*found.policy.unbind(1), *found.reference.unbind(1))
    lengths = found.tokens.unbind(1)
    if plan.loss == "ipo":
        losses = preference.ipo_loss(*sums, tau=plan.scale, chosen_length=lengths[0], rejected_length=lengths[1])
        return losses.mean()
    if plan.normalise:
        sums = tuple(value / length for value, length in zip(sums, (*lengths, *lengths)))
    return preference.dpo_loss(*sums, beta=plan.scale).mean()


def preferred(scores: Tensor) -> Tensor:
    """1 where the first of two scores (N, 2) is the higher one, 0 where the second is, one half for a tie: (N,)."""
    return (scores[:, 0] > scores[:, 1]).double() + 0.5 * (scores[:, 0] == scores[:, 1]).double()


def interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share among `count` independent examples: sound at 0 and 1 too."""
    centre = share + Z95**2 / (2 * count)
    spread = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    scale = 1 + Z95**2 / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def scores_of(plan: Plan, found: Likelihoods) -> Scores:
    """All held-out metrics of a method; accuracies count a tie as one half."""
    own = own_score(plan, found)
    untrained = own_score(plan, replace(found, policy=found.reference))
    units = preferred(own)
    accuracy = float(units.mean())
    lower, upper = interval(accuracy, len(units))
    drift = found.ratio.mean(0)
    longer = preferred(found.tokens)  # 1 where the chosen answer is the longer one
    metrics = {
        "accuracy": accuracy,
        "accuracy_lower": lower,
        "accuracy_upper": upper,
        "accuracy_untrained": float(preferred(untrained).mean()),
        "reward_accuracy": float(preferred(found.ratio).mean()),
        "sum_accuracy": float(preferred(found.policy).mean()),
        "mean_accuracy": float(preferred(found.policy / found.tokens).mean()),
        "margin": float((own[:, 0] - own[:, 1]).mean()),
        "reward_margin": float((found.ratio[:, 0] - found.ratio[:, 1]).mean()),
        "chosen_drift": float(drift[0]),
        "rejected_drift": float(drift[1]),
        "kl_per_token": float(found.divergence.sum() / found.tokens.sum()),
        "held_out_loss": float(held_out_loss(plan, found)),
        "longer_chosen": float(longer.mean()),
        "longer_preferred": float((units * longer + (1 - units) * (1 - longer)).mean()),
    }
    return Scores(metrics, units.tolist())


# ----------------------------------------------------------------------------------------------------------- probe

WORDS = 32
"""Tokens that the probe's prompts and answers have at most."""


def probe(genome: Genome, examples: Sequence[Example]) -> dict[str, str]:
    """Digests of two updates of a model of a few thousand weights, made by `train` on four short pairs.

    Its tokenizer knows bytes only, so that TRL's trainers take well below a second.
    """
    sizes = Sizes(
        "smoke",
        {"steps": 2, "micro_batch": 1, "accumulate": 2, "prompt_tokens": WORDS, "answer_tokens": WORDS}
        | {"save_every": 100},
    )
    tokenizer = _byte_tokenizer()
    short = [_shortened(example, i, tokenizer) for i, example in enumerate(examples[:4])]
    trace = Trace()
    load = functools.partial(_tiny, tokenizer)
    artefact = train(load, {}, genome, short, 0, sizes, "cpu", lambda step, loss: None, trace)
    found = measure(artefact, short[:2], 4, "cpu")
    own = own_score(artefact.plan, found)
    return {
        "forward": digest(found.policy, own),
        "loss": digest(trace.losses, float(held_out_loss(artefact.plan, found))),
        "data_order": digest(trace.order),
    }


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def _shortened(example: Example, number: int, tokenizer: Any) -> Example:
    """A pair of the same name with a few letters of the same texts, and different ones in each answer."""
    prompt = tokenizer.bos_token + example.prompt.encode("ascii", "ignore").decode()[-WORDS // 2 :]
    answers = [
        f"{mark}{number}{text.encode('ascii', 'ignore').decode()[: WORDS // 2]}".split("<")[0] + tokenizer.eos_token
        for mark, text in (("+", example.chosen), ("-", example.rejected))
    ]
    ids = [tuple(_ids(tokenizer, text)) for text in (prompt, *answers)]
    return replace(
        example,
        prompt=prompt,
        chosen=answers[0],
        rejected=answers[1],
        prompt_ids=ids[0],
        chosen_ids=ids[1],
        rejected_ids=ids[2],
    )


def _tiny(tokenizer: Any, device: str) -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4 * WORDS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(device).eval(), tokenizer
