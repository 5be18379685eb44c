"""What the GSM8K workflow trains and measures: rows, one training with its stop and resume, held-out scores.

Letters: B rows of a batch, S tokens of a row.
"""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from auto_research.data.reasoning import Problem
from auto_research.evolve.space import Genome
from auto_research.evolve.workflow import NonFinite, Progress, Scores, Sizes, digest
from auto_research.evolve.workflows import _trl
from auto_research.evolve.workflows._checkpoints import Checkpoint
from auto_research.evolve.workflows._trl import Identity, Trained
from auto_research.tasks.answers import parse_answer

EVALUATION_BATCH = 8
SCHEDULE, WARMUP, COMPUTE = "linear", 0.0, "bfloat16"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
FILTERS = {"all": (0, 99), "short": (0, 2), "hard": (3, 99)}
"""Value of `data.filter` -> fewest and most calculations of a solution."""


class NotResumable(ArithmeticError):
    """A resumed training ended with other weights than an uninterrupted one."""


# ----------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Row:
    """A problem as tokens: the chat prompt, and the response with its end token, as the trainer builds them."""

    problem: Problem
    prompt: list[int]
    response: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def encode(problems: Sequence[Problem], tokenizer: Any) -> list[Row]:
    """Rows of the problems, through the tokenizer's chat template."""
    asked = _chat([one.messages["prompt"] for one in problems], tokenizer, answered=False)
    whole = _chat([one.messages["prompt"] + one.messages["completion"] for one in problems], tokenizer, answered=True)
    rows = []
    for problem, prompt, ids in zip(problems, asked, whole):
        if ids[: len(prompt)] != prompt:
            raise ValueError("the chat template renders a prompt differently when its answer follows")
        rows.append(Row(problem, prompt, ids[len(prompt) :]))
    return rows


def _chat(messages: list[list[dict[str, str]]], tokenizer: Any, *, answered: bool) -> list[list[int]]:
    if not messages:
        return []
    ids: list[list[int]] = tokenizer.apply_chat_template(messages, add_generation_prompt=not answered)["input_ids"]
    return ids


def chosen(rows: Sequence[Row], kind: str, count: int, longest: int) -> tuple[list[Row], int]:
    """The first `count` rows that the filter and the length let pass, and how many before them were too long."""
    least, most = FILTERS[kind]
    kept: list[Row] = []
    dropped = 0
    for row in rows:
        if len(kept) == count:
            break
        if not least <= row.problem.calculations <= most:
            continue
        if len(row) > longest:
            dropped += 1
        else:
            kept.append(row)
    return kept, dropped


# ------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Plan:
    """Everything that decides the weights beside checkpoint, rows and seed."""

    learning_rate: float
    steps: int
    rank: int
    neftune_alpha: float
    mask: str
    weights: str
    update_rows: int
    longest: int

    @property
    def stop(self) -> int:
        """The step after which the training is stopped and resumed; 0 where there is only one."""
        return self.steps // 2

    @property
    def dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.weights]


def plan_of(genome: Genome, sizes: Sizes) -> Plan:
    """The plan of a genome under a budget."""
    return Plan(
        learning_rate=float(genome["train.lr"]),
        steps=max(1, round(sizes["steps"] * float(genome["train.steps"]))),
        rank=int(genome["lora.r"]),
        neftune_alpha=float(genome["train.neftune_alpha"]),
        mask=str(genome["loss.mask"]),
        weights=str(genome["train.weights"]),
        update_rows=sizes["micro_batch"] * sizes["accumulate"],
        longest=sizes["longest"],
    )


@dataclass
class Artefact:
    """A trained model, its tokenizer, and what its training was: numbers for the record."""

    model: Any
    tokenizer: Any
    facts: dict[str, float] = field(default_factory=dict)


@dataclass
class Trace:
    """What the effect test looks at."""

    losses: list[float] = field(default_factory=list)
    order: list[str] = field(default_factory=list)


class Training:
    """One training of one seed: made anew for every session, so that a resumed one knows nothing but its checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, rows: Sequence[Row], plan: Plan, seed: int, sizes: Sizes, device: str
    ) -> None:
        if not rows:
            raise ValueError("there is no training row")
        self.checkpoint, self.plan, self.seed, self.sizes, self.device = checkpoint, plan, seed, sizes, device
        order = _trl.seeded_order(len(rows), plan.steps * plan.update_rows, seed)
        self.rows = [rows[index] for index in order]
        self.identity = Identity(
            order=_trl.order_digest([[row.prompt, row.response] for row in self.rows]),
            weights=DTYPES[plan.weights],
            compute=COMPUTE,
            configuration={
                "checkpoint": checkpoint.resolved.digest(),
                "seed": seed,
                "learning rate": plan.learning_rate,
                "schedule": SCHEDULE,
                "number of steps": plan.steps,
                "rows an update": plan.update_rows,
                "LoRA rank": plan.rank,
                "NEFTune alpha": plan.neftune_alpha,
                "loss mask": plan.mask,
                "longest row": plan.longest,
            },
        )

    def trainer(self, folder: Path, *, keep: bool = True) -> tuple[Any, Any]:
        """(TRL's trainer with a model as loaded, tokenizer); checkpoints go to `folder`, where any are to be kept."""
        from trl import SFTConfig, SFTTrainer

        plan, sizes = self.plan, self.sizes
        model, tokenizer = self.checkpoint.load(self.device, plan.dtype)
        model = _trl.with_adapter(model, plan.rank, self.seed)
        with _trl.libraries_quiet():
            made = SFTTrainer(
                model=model,
                args=SFTConfig(
                    **_trl.arguments(
                        folder,
                        device=self.device,
                        seed=self.seed,
                        steps=plan.steps,
                        batch=sizes["micro_batch"],
                        accumulate=sizes["accumulate"],
                        learning_rate=plan.learning_rate,
                        max_length=plan.longest,
                        save_every=plan.stop if keep else 0,
                        warmup=WARMUP,
                        schedule=SCHEDULE,
                        compute=COMPUTE,
                    ),
                    completion_only_loss=plan.mask == "response",
                    neftune_noise_alpha=plan.neftune_alpha or None,
                ),
                train_dataset=_trl.as_dataset([row.problem.messages for row in self.rows]),
                processing_class=tokenizer,
            )
        if len(made.train_dataset) != len(self.rows):
            raise RuntimeError(f"the trainer kept {len(made.train_dataset)} of {len(self.rows)} rows")
        return made, tokenizer

    def session(
        self, folder: Path, progress: Progress, *, stop_at: int = 0, keep: bool = True
    ) -> tuple[Trained, Any, Any]:
        """Trains in `folder` from its newest checkpoint, to the end or to `stop_at`: (what happened, model, tokenizer).

        The model and the trainer are new, so nothing but the checkpoint connects two sessions.
        """
        trainer, tokenizer = self.trainer(folder, keep=keep)
        least = _trl.LEAST_MOVED if self.plan.weights == "fp32" else 0.0
        trained = _trl.fit(trainer, self.identity, progress, stop_at=stop_at, least_moved=least)
        return trained, trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False).eval(), tokenizer


def train(
    checkpoint: Checkpoint,
    rows: Sequence[Row],
    plan: Plan,
    seed: int,
    sizes: Sizes,
    device: str,
    progress: Progress,
    *,
    interrupt: bool = True,
    trace: Trace | None = None,
) -> Artefact:
    """Trains to the planned stop, resumes from the checkpoint left there, and goes on to the end.

    A checkpoint that nothing resumes from is not known to work, so every training is stopped half-way; one that was
    killed goes on from its newest checkpoint. With the size `verify` a second, uninterrupted training says whether the
    weights are the same bit for bit; on a CPU they have to be.

    Raises:
        UserError: the checkpoint belongs to another configuration, dtype or data order.
        Unmoved, NonFinite, NotResumable: what the names say.
    """
    if plan.weights == "bf16":
        warnings.warn(
            "the weights are held in BF16: most steps of AdamW are rounded away; train.weights=fp32 keeps BF16 "
            "computation and moves them",
            stacklevel=2,
        )
    training = Training(checkpoint, rows, plan, seed, sizes, device)
    with _trl.checkpoint_folder() as folder:
        if interrupt and plan.stop and _trl.newest_checkpoint(folder) is None:
            training.session(folder, progress, stop_at=plan.stop)
            _free()
        trained, model, tokenizer = training.session(folder, progress, keep=interrupt)
    facts = {
        "resumed_from_step": float(trained.resumed_from),
        "steps_after_resume": float(len(trained.losses)),
        "first_train_loss": trained.history[1],
        "last_train_loss": trained.history[plan.steps],
        "trained_tokens": float(sum(len(row.response) for row in training.rows)),
        **trained.moved.metrics,
        **_trl.dtype_metrics(training.identity),
    }
    if trained.resumed_from and sizes["verify"]:
        facts |= _verify(training, model, trained, progress, device)
    if trace is not None:
        trace.losses += [trained.history[step] for step in sorted(trained.history)]
        trace.order += [row.problem.question for row in training.rows]
    return Artefact(model, tokenizer, facts)


def _verify(training: Training, model: Any, trained: Trained, progress: Progress, device: str) -> dict[str, float]:
    """Compares with a training that is not interrupted. Raises `NotResumable` on a CPU unless all bits agree."""
    resumed = {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors(model).items()}
    _free()
    with tempfile.TemporaryDirectory() as elsewhere:
        straight, other, _ = training.session(Path(elsewhere), progress, keep=False)
    equal, total = _trl.equal_tensors(resumed, _tensors(other)), len(resumed)
    last = training.plan.steps
    if device == "cpu" and (equal < total or straight.losses[last] != trained.history[last]):
        raise NotResumable(
            f"resumed from step {trained.resumed_from}, {total - equal} of {total} tensors and a loss of "
            f"{trained.history[last]:.6f} differ from those of an uninterrupted training ({straight.losses[last]:.6f})"
        )
    return {
        "tensors": float(total),
        "tensors_bit_equal": float(equal),
        "uninterrupted_last_loss": straight.losses[last],
    }


def _tensors(model: Any) -> dict[str, Tensor]:
    """The parameters, a tied one once."""
    return dict(model.named_parameters())


def _free() -> None:
    """Gives back the memory of a session that has ended: its model, optimiser and trainer refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def restored(checkpoint: Checkpoint, genome: Genome, sizes: Sizes, folder: Path, device: str) -> Artefact:
    """The model that was saved in `folder`: all weights, or an adapter over those of `checkpoint`."""
    plan = plan_of(genome, sizes)
    if not plan.rank:
        saved = Checkpoint(replace(checkpoint.resolved, path=folder), checkpoint.wanted)
        return Artefact(*saved.load(device, plan.dtype))
    from peft import PeftModel

    model, tokenizer = checkpoint.load(device, plan.dtype)
    with _trl.libraries_quiet():
        return Artefact(PeftModel.from_pretrained(model, folder).to(device).eval(), tokenizer)


# --------------------------------------------------------------------------------------------------------- scores


def score(artefact: Artefact, rows: Sequence[Row], sizes: Sizes, device: str) -> Scores:
    """Nats a response token over the rows, and exact answers, format and length of greedy generation for some."""
    nats, counts = response_nats(artefact.model, rows, device)
    total = float(counts.sum())
    nll = float(nats.sum()) / total
    if not torch.isfinite(nats).all():
        raise NonFinite(f"the held-out negative log-likelihood is {nll}")
    asked = list(rows[: sizes["generated"]])
    texts, lengths = generate(artefact, asked, sizes["new_tokens"], device)
    right = [parse_answer(text) == row.problem.answer for text, row in zip(texts, asked)]
    marked = ["Answer:" in text for text in texts]
    metrics = {
        "response_nll": nll,
        "exact_match": sum(right) / max(1, len(right)),
        "format_rate": sum(marked) / max(1, len(marked)),
        "generated_tokens": sum(lengths) / max(1, len(lengths)),
        "response_tokens": total,
    }
    # Their mean is the metric: a row weighs as much as it has tokens.
    return Scores(metrics, (nats * (len(rows) / total)).tolist())


@torch.no_grad()
def response_nats(model: Any, rows: Sequence[Row], device: str) -> tuple[Tensor, Tensor]:
    """(sum of -log p over each row's response tokens, their numbers), both (rows,); computed in the weights' dtype."""
    nats, counts = [], []
    for first in range(0, len(rows), EVALUATION_BATCH):
        batch = rows[first : first + EVALUATION_BATCH]
        ids, mask, labels = (part.to(device) for part in padded(batch))
        logits, next_ids = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1], labels[:, 1:]
        asked = next_ids >= 0
        loss = torch.zeros(next_ids.shape, dtype=torch.float64, device=device)
        loss[asked] = F.cross_entropy(logits[asked].float(), next_ids[asked], reduction="none").double()
        nats.append(loss.sum(1).cpu())
        counts.append(asked.sum(1).cpu())
    return torch.cat(nats), torch.cat(counts)


def padded(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, attention mask, labels), (B, S) each, padded on the right; labels are the response's ids, else -100."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row.prompt + row.response)
        mask[i, : len(row)] = 1
        labels[i, len(row.prompt) : len(row)] = torch.tensor(row.response)
    return ids, mask, labels


@torch.no_grad()
def generate(artefact: Artefact, rows: Sequence[Row], new_tokens: int, device: str) -> tuple[list[str], list[int]]:
    """Greedy responses to the rows' prompts, and their numbers of tokens with the end token."""
    tokenizer, model = artefact.tokenizer, artefact.model
    end, texts, lengths = tokenizer.eos_token_id, [], []
    for first in range(0, len(rows), EVALUATION_BATCH):
        batch = rows[first : first + EVALUATION_BATCH]
        width = max(len(row.prompt) for row in batch)
        ids = torch.full((len(batch), width), end)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(batch):  # on the left: the answer follows its prompt at once
            ids[i, width - len(row.prompt) :] = torch.tensor(row.prompt)
            mask[i, width - len(row.prompt) :] = 1
        made = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=end,
            eos_token_id=end,
        )
        for tokens in made[:, width:].tolist():
            kept = tokens[: tokens.index(end) + 1] if end in tokens else tokens
            lengths.append(len(kept))
            texts.append(tokenizer.decode(kept, skip_special_tokens=True))
    return texts, lengths


def probe(
    checkpoint: Checkpoint, problems: Mapping[str, Sequence[Problem]], genome: Genome, sizes: Sizes
) -> dict[str, str]:
    """Digests of a short training on `checkpoint`, the way `train` does it."""
    plan = plan_of(genome, sizes)
    tokenizer = checkpoint.tokenizer()
    train_rows, held = (
        chosen(sorted(encode(problems[part], tokenizer), key=len), kind, count, plan.longest)[0]
        for part, kind, count in (("train", str(genome["data.filter"]), sizes["rows"]), ("validation", "all", 2))
    )
    trace = Trace()
    artefact = train(
        checkpoint, train_rows, plan, 0, sizes, "cpu", lambda step, loss: None, interrupt=False, trace=trace
    )
    ids, mask, _ = padded(held)
    with torch.no_grad():
        logits = artefact.model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    return {"forward": digest(logits), "loss": digest(trace.losses), "data_order": digest(trace.order)}
