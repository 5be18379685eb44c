"""Supervised fine-tuning of a real causal language model on GSM8K: the response after the question, by TRL.

Weights are FP32 and computation is BF16. Rows are chat messages, the response is the worked solution without its
calculator annotations and "Answer: N" on the last line; the loss counts the response only. Every training is stopped
half-way and resumed from its checkpoint, and a smoke run compares the weights with those of an uninterrupted training,
bit for bit. Validation is the last part of the published training rows; what counts is the negative log-likelihood of
its responses, which moves within a few steps, while a small model answers hardly anything right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from auto_research.data.reasoning import HELD_OUT, with_validation
from auto_research.evolve.space import CONTROL, Axis, Genome, Infeasible, Space
from auto_research.evolve.workflow import (
    Cost,
    Data,
    Described,
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

if TYPE_CHECKING:
    from auto_research.data.reasoning import Problem
    from auto_research.evolve.records import Trial
    from auto_research.evolve.workflows._gsm8k_sft import Artefact, Row

DATASET = "gsm8k"


@dataclass(frozen=True)
class Parts:
    """What a cell trains and validates on.

    Attributes:
        problems: `train` and `validation`, as published.
        rows: the same as tokens of the checkpoint; of validation those that the budget reads, without overlong ones.
    """

    checkpoint: Checkpoint
    problems: Mapping[str, Sequence[Problem]]
    rows: Mapping[str, Sequence[Row]]


class Gsm8kTuning(Workflow):
    """See the module."""

    key: ClassVar[str] = "gsm8k-sft"
    title: ClassVar[str] = "Real causal LM / GSM8K SFT"
    model: ClassVar[str] = "causal-lm-sft"
    dataset: ClassVar[str] = "gsm8k"
    metric: ClassVar[str] = "response_nll"
    direction = "min"
    level: ClassVar[Level] = "L1 small public"
    language_model: ClassVar[bool] = True
    stall_seconds: ClassVar[float] = 600  # a batch of a real checkpoint, on a processor that others use too
    schedule: ClassVar[tuple[tuple[str, ...], ...]] = (("data",), ("post-training",), ("structure", "data", "joint"))
    space: ClassVar[Space] = Space(
        (
            Axis(
                "lora.r",
                "int",
                (0, 8, 16, 32),
                stage="model",
                changes="memory",
                source="arXiv:2106.09685; 0 trains all weights",
            ),
            Axis(
                "train.lr",
                "log-float",
                low=1e-6,
                high=1e-3,
                default=2e-5,
                stage="train",
                changes="loss",
                source="TRL's default; used as given, with linear decay to the last step",
                group="post-training",
            ),
            Axis(
                "train.steps",
                values=(1.0, 0.5, 2.0),
                stage="train",
                changes="compute",
                source="multiples of the budget's steps",
                group="post-training",
            ),
            Axis(
                "train.neftune_alpha",
                "int",
                (0, 5, 10, 15),
                stage="train",
                changes="loss",
                source="arXiv:2310.05914",
                group="post-training",
            ),
            Axis(
                "data.filter",
                values=("all", "short", "hard"),
                stage="data",
                changes="data",
                source="at most 2, or at least 3 calculations in the solution; 64 % of the problems have 3 or more",
                group="data",
            ),
            Axis(
                "loss.mask",
                values=("response", "sequence"),
                stage="train",
                changes="loss",
                source="TRL's completion_only_loss",
                group="post-training",
            ),
            Axis(
                "train.weights",
                values=("fp32", "bf16"),
                stage="train",
                changes="memory",
                source="a control: weights held in BF16 round most steps away",
                group=CONTROL,
            ),
        )
    )
    operators: ClassVar[tuple[Operator, ...]] = (
        Operator(
            "lora",
            "Low-rank adaptation",
            {"lora.r": (8, 16, 32)},
            "arXiv:2106.09685",
            "core_mechanism",
            keywords=("lora", "adapter", "low-rank", "peft", "memory", "低秩"),
            code=("auto_research.checkpoints.adapters.lora",),
        ),
        Operator(
            "neftune",
            "Noisy embeddings",
            {"train.neftune_alpha": (5, 10, 15)},
            "arXiv:2310.05914",
            "core_mechanism",
            keywords=("neftune", "noise", "noisy", "embeddings", "regularisation", "噪声"),
            code=("transformers.integrations.neftune.neftune_post_forward_hook",),
        ),
    )

    def sizes(self, budget: Budget) -> Sizes:
        """`steps` updates of micro_batch * accumulate rows each; `rows` training problems, drawn anew every epoch.

        `longest` tokens of a row; `validation` and `test` rows for the likelihood, `generated` of them are answered
        with up to `new_tokens` tokens. `verify` 1 repeats every training without its interruption.
        """
        smoke = {
            "rows": 8,
            "steps": 2,
            "micro_batch": 2,
            "accumulate": 1,
            "longest": 144,
            "validation": 16,
            "test": 8,
            "generated": 4,
            "new_tokens": 24,
            "verify": 1,
            MICRO: 0,
        }
        standard = {
            **smoke,
            "rows": 1000,
            "steps": 200,
            "micro_batch": 8,
            "longest": 512,
            "validation": HELD_OUT,
            "test": 1319,
            "generated": 200,
            "new_tokens": 256,
            "verify": 0,
        }
        full = {**standard, "rows": 6973, "steps": 1300, "micro_batch": 16, "generated": HELD_OUT}
        return Sizes(budget, {"smoke": smoke, "standard": standard, "full": full}[budget])

    def start(self, budget: Budget) -> Genome:
        """All weights in a smoke run; adapters, with the larger rate that they need, beyond it."""
        return self.space.baseline() if budget == "smoke" else self.space.resolve({"lora.r": 16, "train.lr": 2e-4})

    def smoke_plan(self) -> list[Genome]:
        """Adapters beside the training of all weights."""
        return [self.space.resolve({"lora.r": 8})]

    # ------------------------------------------------------------------------------------------------------ data

    def load(self, sizes: Sizes, dataset_dir: Path | None) -> Data:
        """Training and validation problems as tokens; the split check sees the test questions too."""
        from auto_research.data import catalogue
        from auto_research.evolve.workflows._gsm8k_sft import chosen, encode

        checkpoint = choose(LANGUAGE_MODELS, sizes.values)
        published = with_validation(catalogue.load(DATASET, dataset_dir))
        problems = {name: published[name] for name in ("train", "validation")}
        tokenizer = checkpoint.tokenizer()
        rows = {name: encode(part, tokenizer) for name, part in problems.items()}
        rows["validation"], overlong = chosen(rows["validation"], "all", sizes["validation"], sizes["longest"])
        if not rows["validation"]:
            raise UserError(f"no validation row has at most {sizes['longest']} tokens; raise --size longest=...")
        hygiene = disjoint(
            {name: [one.question for one in part] for name, part in (problems | {"test": published["test"]}).items()}
        )
        hygiene["rows of validation left out for length"] = overlong
        counts = catalogue.entry(DATASET).counts
        known = sum(map(len, problems.values()))
        reduced = known < counts["train"]
        stand_in = [f"the first {known} of {counts['train']} training problems"] if reduced else []
        return Data(
            Parts(checkpoint, problems, rows),
            {DATASET: catalogue.fingerprint(problems)[:16], **checkpoint.digests},
            hygiene,
            len(rows["validation"]),
            "; ".join(filter(None, [*stand_in, checkpoint.stand_in])),
            checkpoint.served,
        )

    def load_test(self, sizes: Sizes, dataset_dir: Path | None) -> Sequence[Row]:
        """The first rows of the published test part that are not too long."""
        from auto_research.data import catalogue
        from auto_research.evolve.workflows._gsm8k_sft import chosen, encode

        tokenizer = choose(LANGUAGE_MODELS, sizes.values).tokenizer()
        rows = encode(catalogue.load(DATASET, dataset_dir)["test"], tokenizer)
        return chosen(rows, "all", sizes["test"], sizes["longest"])[0]

    def _rows(self, genome: Genome, data: Data, sizes: Sizes) -> tuple[list[Row], int]:
        """The training rows of a genome, and how many were passed over because they are too long.

        Raises `Infeasible` when the filter and the length leave none.
        """
        from auto_research.evolve.workflows._gsm8k_sft import chosen

        kept, dropped = chosen(data.parts.rows["train"], str(genome["data.filter"]), sizes["rows"], sizes["longest"])
        if not kept:
            raise Infeasible(
                f"no training row that is {genome['data.filter']} has at most {sizes['longest']} tokens; raise "
                "--size longest=..."
            )
        return kept, dropped

    # -------------------------------------------------------------------------------------------------- training

    def train(self, genome: Genome, data: Data, seed: int, sizes: Sizes, device: str, progress: Progress) -> Artefact:
        from auto_research.evolve.workflows import _gsm8k_sft as tuning

        rows, dropped = self._rows(genome, data, sizes)
        plan = tuning.plan_of(genome, sizes)
        artefact = tuning.train(data.parts.checkpoint, rows, plan, seed, sizes, device, progress)
        artefact.facts |= {"training_rows": float(len(rows)), "overlong_rows": float(dropped)}
        return artefact

    def save(self, artefact: Artefact, folder: Path) -> None:
        """As Transformers and PEFT store a model: all weights, or the adapter alone. Checkpoints are done with."""
        import shutil

        from auto_research.checkpoints.store import quiet
        from auto_research.evolve.cells import checkpoints

        with quiet():
            artefact.model.save_pretrained(folder)
            artefact.tokenizer.save_pretrained(folder)
        if (kept := checkpoints()) is not None:
            shutil.rmtree(kept, ignore_errors=True)

    def restore(self, genome: Genome, data: Data, folder: Path, sizes: Sizes, device: str) -> Artefact:
        from auto_research.evolve.workflows._gsm8k_sft import restored

        return restored(data.parts.checkpoint, genome, sizes, folder, device)

    def validate(self, artefact: Artefact, data: Data, sizes: Sizes, device: str) -> Scores:
        from auto_research.evolve.workflows._gsm8k_sft import score

        scores = score(artefact, data.parts.rows["validation"], sizes, device)
        scores.metrics |= artefact.facts
        return scores

    def test(self, artefact: Artefact, test: Sequence[Row], data: Data, sizes: Sizes, device: str) -> Scores:
        from auto_research.evolve.workflows._gsm8k_sft import score

        return score(artefact, test, sizes, device)

    # ------------------------------------------------------------------------------------------------ yardsticks

    def floors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """The checkpoint before any training, and equal chances for all tokens."""
        import math

        from auto_research.evolve.workflows._gsm8k_sft import response_nats

        model, _ = data.parts.checkpoint.load("cpu")
        nats, counts = response_nats(model, data.parts.rows["validation"], "cpu")
        equal = math.log(data.parts.checkpoint.shape.vocabulary)
        return {"untrained checkpoint": float(nats.sum()) / float(counts.sum()), "uniform": equal}

    def cost(self, genome: Genome, sizes: Sizes, data: Data) -> Cost:
        """FLOPs of one update on rows of mean length; memory of one micro-batch of the longest rows."""
        from auto_research.evolve.workflows._gsm8k_sft import plan_of

        plan, shape = plan_of(genome, sizes), data.parts.checkpoint.shape
        rows, _ = self._rows(genome, data, sizes)
        mean = sum(map(len, rows)) / len(rows)
        responses = sum(len(row.response) for row in rows) / len(rows)
        return Cost(
            parameters=shape.trainable(plan.rank),
            flops=shape.training_flops(plan.update_rows, mean, frozen=plan.rank > 0),
            memory_bytes=shape.training_bytes(
                sizes["micro_batch"],
                sizes["longest"],
                r=plan.rank,
                weight_bytes=4 if plan.weights == "fp32" else 2,
                logits=False,
            ),
            extra={
                "training_steps": float(plan.steps),
                "trained_tokens": plan.steps * plan.update_rows * (responses if plan.mask == "response" else mean),
            },
        )

    # -------------------------------------------------------------------------------------------------- identity

    def describe(self, genome: Genome, sizes: Sizes, data: Data) -> Described:
        """The plan as it is run, and the rows that the filter lets pass."""
        from auto_research.evolve.workflows import _gsm8k_sft as tuning

        plan, shape = tuning.plan_of(genome, sizes), data.parts.checkpoint.shape
        rows, _ = self._rows(genome, data, sizes)
        fixed = {"schedule": tuning.SCHEDULE, "warmup": tuning.WARMUP, "compute": tuning.COMPUTE}
        return Described(
            asdict(plan) | fixed | {"rows": digest([row.problem.question for row in rows])},
            {name: list(size) for name, size in (shape.weights | shape.adapter(plan.rank)).items()},
            {"name": "next-token cross entropy", "tokens": plan.mask, "neftune_alpha": plan.neftune_alpha},
        )

    def effect_probe(self, genome: Genome, sizes: Sizes, data: Data) -> dict[str, str]:
        """A training of the micro checkpoint on a few rows, the way `train` does it, and the cost as it stands."""
        from auto_research.evolve.workflows import _gsm8k_sft as tuning

        few = {"rows": 4, "steps": 2, "micro_batch": 2, "accumulate": 1, "longest": 400, "verify": 0}
        small = Sizes(sizes.budget, {**sizes.values, **few})
        micro = choose(LANGUAGE_MODELS[-1:], {MICRO: 1})
        problems = {"train": data.parts.problems["train"][:60], "validation": data.parts.problems["validation"][:12]}
        cost = self.cost(genome, sizes, data)
        found = tuning.probe(micro, problems, genome, small)
        return found | {"cost": digest([cost.parameters, cost.flops, cost.memory_bytes, cost.extra])}

    # --------------------------------------------------------------------------------------------------- summary

    def violations(self, metrics: Mapping[str, float]) -> list[str]:
        """A first step that moved fewer than half of the weights, which only weights held in BF16 may show."""
        share = metrics.get("changed_share", 1.0)
        return [f"only {share:.1%} of the weights moved in the first step"] if share < 0.5 else []

    def summarise(self, trials: Sequence[Trial]) -> dict[str, Any]:
        """What each training moved and whether it could be resumed."""
        return account(trials)


SHOWN = (
    "response_nll",
    "exact_match",
    "first_train_loss",
    "last_train_loss",
    "changed_share",
    "changed_parameters",
    "trainable_parameters",
    "resumed_from_step",
    "steps_after_resume",
    "tensors_bit_equal",
    "tensors",
    "overlong_rows",
)


def account(trials: Sequence[Trial]) -> dict[str, Any]:
    """A row a candidate, with dtypes, moved weights and the resume, and a sentence on the baseline."""
    from auto_research.evolve.promotion import mean_metrics

    dtypes = {16.0: "bfloat16", 32.0: "float32"}
    found = {trial.candidate.id: mean_metrics(trial) for trial in trials}
    rows = [
        {"candidate": id, "weights": dtypes[m["weight_bits"]], "compute": dtypes[m["compute_bits"]]}
        | {name: m[name] for name in SHOWN if name in m}
        for id, m in found.items()
        if "changed_share" in m
    ]
    if not rows:
        return {"sentence": "No training was completed.", "candidates": rows}
    first = rows[0]
    sentence = (
        f"{first['candidate']}: {first['weights']} weights, {first['compute']} computation; the first step moved "
        f"{first['changed_share']:.1%} of {first['trainable_parameters']:,.0f} trainable weights"
    )
    if first["resumed_from_step"]:
        sentence += f"; it was resumed from step {first['resumed_from_step']:.0f}"
        if "tensors" in first:
            equal, total = first["tensors_bit_equal"], first["tensors"]
            sentence += f", and {equal:.0f} of {total:.0f} tensors equal those of an uninterrupted training bit for bit"
    return {"sentence": f"{sentence}.", "candidates": rows}
