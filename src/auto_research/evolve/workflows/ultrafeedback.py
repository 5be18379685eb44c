"""Preference optimisation of a real causal language model on UltraFeedback: DPO, IPO, ORPO and SimPO, by TRL.

A fixed subset of pairs is chosen in the order of a hash and divided by prompt. Every loss trains on the same pairs in
the same order; the control, SFT on the chosen answers, sees no rejected one. Held-out accuracy asks each method by its
own score: DPO and IPO by the implicit reward, relative to the untrained checkpoint, ORPO, SimPO and SFT by the mean
log-probability a token. An untrained policy ties on every implicit reward, which counts one half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from auto_research.evolve.space import Axis, Genome, Space, Value
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
from auto_research.evolve.workflows._pair_losses import (
    ORPO_LAMBDA,
    SIMPO_BETA,
    SIMPO_GAMMA_RATIO,
    dpo_beta,
    ipo_tau,
    pair_operator,
)
from auto_research.runtime.budget import Budget

if TYPE_CHECKING:
    from auto_research.evolve.records import Trial
    from auto_research.evolve.workflows._preferences import Artefact, Example

PARTS = {"train": "pairs", "validation": "held_out", "test": "test_pairs"}
"""Part of the data -> the size that says how many pairs it has."""
REFERENCED: tuple[Value, ...] = ("dpo", "ipo")
"""Losses with a frozen reference."""
TABLES = {
    "held-out pairs": (
        "accuracy",
        "accuracy_lower",
        "accuracy_upper",
        "accuracy_untrained",
        "reward_accuracy",
        "sum_accuracy",
        "mean_accuracy",
        "longer_preferred",
        "longer_chosen",
    ),
    "training": (
        "first_loss",
        "loss_after_a_step",
        "last_loss",
        "held_out_loss",
        "margin",
        "chosen_drift",
        "rejected_drift",
        "kl_per_token",
        "changed_share",
    ),
}
"""What a summary shows of every candidate, by table."""


@dataclass(frozen=True)
class Parts:
    """What a cell trains and validates on."""

    checkpoint: Checkpoint
    train: list[Example]
    validation: list[Example]


class UltraFeedback(Workflow):
    """See the module."""

    key: ClassVar[str] = "ultrafeedback"
    title: ClassVar[str] = "Real causal LM / UltraFeedback preferences"
    model: ClassVar[str] = "causal-lm-preferences"
    dataset: ClassVar[str] = "ultrafeedback"
    metric: ClassVar[str] = "accuracy"
    level: ClassVar[Level] = "L1 small public"
    stall_seconds: ClassVar[float] = 600  # a batch of a real checkpoint, on a processor that others use too
    side_by_side: ClassVar[bool] = False
    language_model: ClassVar[bool] = True
    space: ClassVar[Space] = Space(
        (
            Axis(
                "post.loss",
                values=("dpo", "ipo", "orpo", "simpo", "sft"),
                stage="post",
                changes="loss",
                source="by their papers, as TRL trains them; sft on the chosen answers is the control",
            ),
            dpo_beta(0.01),
            Axis(
                "dpo.normalise",
                values=(False, True),
                condition={"post.loss": ("dpo",)},
                stage="post",
                changes="loss",
                source="means over tokens in place of sums; IPO, ORPO and SimPO have means in TRL",
                group="post-training",
            ),
            ipo_tau(0.01),
            ORPO_LAMBDA,
            SIMPO_BETA,
            SIMPO_GAMMA_RATIO,
            Axis(
                "reference.mode",
                values=("frozen", "precomputed"),
                condition={"post.loss": REFERENCED},
                stage="train",
                changes="memory",
                source="a second model beside the policy, or its log-probabilities from before the training",
                group="post-training",
            ),
            Axis(
                "lora.r",
                "int",
                values=(0, 8, 16, 32),
                stage="model",
                changes="memory",
                source="arXiv:2106.09685; 0 trains all weights",
                group="post-training",
            ),
            Axis(
                "train.lr",
                "log-float",
                low=1e-6,
                high=1e-3,
                default=1e-5,
                stage="train",
                changes="loss",
                source="measured; used as given, with linear decay to the last update",
                group="post-training",
            ),
        )
    )
    operators: ClassVar[tuple[Operator, ...]] = (
        pair_operator("dpo", "trl.trainer.dpo_trainer.DPOTrainer._compute_loss"),
        pair_operator("orpo", "trl.experimental.orpo.orpo_trainer.ORPOTrainer.get_batch_loss_metrics"),
        pair_operator("ipo", "trl.trainer.dpo_trainer.DPOTrainer._compute_loss"),
        pair_operator("simpo", "trl.experimental.cpo.cpo_trainer.CPOTrainer.cpo_loss"),
    )
    evidence: ClassVar[tuple[Evidence, ...]] = (
        Evidence(
            "Kahneman-Tversky optimisation",
            "arXiv:2402.01306",
            "there is no operator that learns from single answers labelled good or bad",
            "a value of post.loss that unpairs the data and trains with TRL's KTO trainer",
            ("kto", "unpaired", "prospect"),
        ),
    )

    def sizes(self, budget: Budget) -> Sizes:
        """`steps` updates of micro_batch * accumulate pairs each.

        `pairs`, `held_out`, `test_pairs` are for training, validation and test; a prompt keeps its last
        `prompt_tokens`, and answers have at most `answer_tokens`. `eval_batch` answers are scored at a time;
        `save_every` updates a checkpoint is kept from which a killed cell goes on.
        """
        smoke = {
            "pairs": 16,
            "held_out": 16,
            "test_pairs": 8,
            "steps": 2,
            "micro_batch": 4,
            "accumulate": 2,
            "prompt_tokens": 64,
            "answer_tokens": 144,
            "eval_batch": 4,
            "save_every": 100,
            MICRO: 0,
        }
        standard = {
            **smoke,
            "pairs": 5000,
            "held_out": 500,
            "test_pairs": 1000,
            "steps": 312,
            "micro_batch": 2,
            "accumulate": 8,
            "prompt_tokens": 1024,
            "answer_tokens": 1024,
            "eval_batch": 8,
        }
        full = {**standard, "pairs": 60_000, "held_out": 1000, "test_pairs": 2000, "steps": 3750, "save_every": 500}
        return Sizes(budget, {"smoke": smoke, "standard": standard, "full": full}[budget])

    def start(self, budget: Budget) -> Genome:
        """All weights in a smoke run; adapters, with the larger rate that they need, beyond it."""
        return self.space.baseline() if budget == "smoke" else self.space.resolve({"lora.r": 16, "train.lr": 5e-5})

    def smoke_plan(self) -> list[Genome]:
        return [self.space.resolve({"post.loss": "orpo"})]

    # ------------------------------------------------------------------------------------------------------ data

    def load(self, sizes: Sizes, dataset_dir: Path | None) -> Data:
        """The training and validation pairs; the split check sees the test prompts too."""
        from auto_research.evolve.workflows import _preferences as preferences

        checkpoint = choose(LANGUAGE_MODELS, sizes.values)
        source = preferences.gather(dataset_dir)
        subset = preferences.select(source, checkpoint.tokenizer(), sizes)
        hygiene = disjoint({name: [one.prompt for one in part] for name, part in subset.parts.items()})
        hygiene |= {f"pairs of {name}": len(part) for name, part in subset.parts.items()}
        hygiene["pairs looked at"] = subset.looked_at
        hygiene |= {f"left out: {reason}": number for reason, number in sorted(subset.left_out.items())}
        hygiene["prompts without their beginning"] = sum(one.cut for part in subset.parts.values() for one in part)
        return Data(
            Parts(checkpoint, subset.parts["train"], subset.parts["validation"]),
            {f"{name} pairs": preferences.part_digest(ids) for name, ids in subset.ids.items()} | checkpoint.digests,
            hygiene,
            len(subset.parts["validation"]),
            "; ".join(filter(None, [source.stand_in, checkpoint.stand_in])),
            checkpoint.served,
            subset.ids,
        )

    def load_test(self, sizes: Sizes, dataset_dir: Path | None) -> list[Example]:
        from auto_research.evolve.workflows import _preferences as preferences

        tokenizer = choose(LANGUAGE_MODELS, sizes.values).tokenizer()
        return preferences.select(preferences.gather(dataset_dir), tokenizer, sizes).parts["test"]

    # -------------------------------------------------------------------------------------------------- training

    def train(self, genome: Genome, data: Data, seed: int, sizes: Sizes, device: str, progress: Progress) -> Artefact:
        from auto_research.evolve.workflows import _preferences as preferences

        parts: Parts = data.parts
        return preferences.train(
            parts.checkpoint.load, data.digests, genome, parts.train, seed, sizes, device, progress
        )

    def save(self, artefact: Artefact, folder: Path) -> None:
        from auto_research.evolve.workflows._preferences import save

        save(artefact, folder)

    def restore(self, genome: Genome, data: Data, folder: Path, sizes: Sizes, device: str) -> Artefact:
        from auto_research.evolve.workflows._preferences import restore

        return restore(data.parts.checkpoint, genome, folder, device)

    def validate(self, artefact: Artefact, data: Data, sizes: Sizes, device: str) -> Scores:
        scores = self.test(artefact, data.parts.validation, data, sizes, device)
        scores.metrics |= artefact.facts
        return scores

    def test(self, artefact: Artefact, test: list[Example], data: Data, sizes: Sizes, device: str) -> Scores:
        from auto_research.evolve.workflows._preferences import measure, scores_of

        return scores_of(artefact.plan, measure(artefact, test, sizes["eval_batch"], device))

    # ------------------------------------------------------------------------------------------------ yardsticks

    def floors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """An untrained policy's implicit rewards are all ties, and a tie counts one half, as chance does."""
        return {"untrained policy (ties) or chance": 0.5}

    def anchors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """What length alone would say: no method that only prefers one length is better than these."""
        lengths = [(len(one.chosen_ids), len(one.rejected_ids)) for one in data.parts.validation]
        longer = sum((a > b) + 0.5 * (a == b) for a, b in lengths) / len(lengths)
        return {"the longer answer": longer, "the shorter answer": 1 - longer}

    def cost(self, genome: Genome, sizes: Sizes, data: Data) -> Cost:
        """FLOPs of one update on pairs of mean length; memory of one micro-batch of the longest pairs.

        A frozen reference reads every pair once more, and is held beside the policy unless the policy has adapters to
        leave out; a precomputed one reads the training pairs once, spread here over all updates.
        """
        from auto_research.evolve.workflows._preferences import plan_of, update_pairs

        plan, shape, train = plan_of(genome), data.parts.checkpoint.shape, data.parts.train
        answers = 2 * update_pairs(sizes)
        mean = sum(map(len, train)) / (2 * len(train))
        flops = shape.training_flops(answers, mean, frozen=plan.rank > 0)
        held = plan.loss in REFERENCED and not plan.precomputed and not plan.rank
        if plan.loss == "sft":
            flops /= 2
        elif plan.loss in REFERENCED:
            read = 2 * len(train) / sizes["steps"] if plan.precomputed else answers
            flops += shape.forward_flops(1, mean) * read
        micro = sizes["micro_batch"] * (1 if plan.loss == "sft" else 2)
        memory = shape.training_bytes(
            micro,
            sizes["prompt_tokens"] + sizes["answer_tokens"],
            r=plan.rank,
            references=int(held),
            logits=plan.loss in ("orpo", "simpo"),
        )
        extra = {"updates": float(sizes["steps"]), "trained_tokens": sizes["steps"] * answers * mean}
        return Cost(shape.trainable(plan.rank), flops, memory, extra)

    # -------------------------------------------------------------------------------------------------- identity

    def describe(self, genome: Genome, sizes: Sizes, data: Data) -> Described:
        from auto_research.evolve.workflows import _preferences as preferences

        plan, shape = preferences.plan_of(genome), data.parts.checkpoint.shape
        work = {name: value for name, value in sizes.values.items() if name not in ("micro_batch", "accumulate")}
        fixed = {"schedule": preferences.SCHEDULE, "warmup": preferences.WARMUP}
        fixed |= {"pairs an update": preferences.update_pairs(sizes)}
        parameters = shape.weights | shape.adapter(plan.rank)
        loss = {"name": plan.loss, "normalise": plan.normalise, **plan.constants}
        return Described(work | fixed | asdict(plan), {name: list(size) for name, size in parameters.items()}, loss)

    def effect_probe(self, genome: Genome, sizes: Sizes, data: Data) -> dict[str, str]:
        """Trains a model of a few thousand weights with TRL, the way `train` does, and digests what happened."""
        from auto_research.evolve.workflows._preferences import probe

        cost = self.cost(genome, sizes, data)
        return probe(genome, data.parts.train) | {"cost": digest([cost.flops, cost.memory_bytes, cost.extra])}

    def summarise(self, trials: Sequence[Trial]) -> dict[str, Any]:
        """Every candidate with its interval, and a sentence on what so many held-out pairs can tell apart."""
        return compare_losses(trials, self.metric)


def compare_losses(trials: Sequence[Trial], metric: str) -> dict[str, Any]:
    """Figures of the candidates, how wide an accuracy's interval is, and the control where it ran."""
    from auto_research.evolve.promotion import MINIMUM_EXAMPLES, mean_metrics

    found = {t.candidate.id: (t, mean_metrics(t)) for t in trials}
    found = {id: (trial, metrics) for id, (trial, metrics) in found.items() if metric in metrics}
    tables = {
        title: [
            {"candidate": id, "loss": t.candidate.genome["post.loss"]} | {n: metrics[n] for n in names if n in metrics}
            for id, (t, metrics) in found.items()
        ]
        for title, names in TABLES.items()
    }
    if not found:
        return {"sentence": "No candidate was scored on held-out pairs."}
    pairs = min(len(cell.units) for t, _ in found.values() for cell in t.cells if cell.units)
    said = [
        f"{row['loss']} {row[metric]:.2f} [{row['accuracy_lower']:.2f}, {row['accuracy_upper']:.2f}], "
        f"untrained {row['accuracy_untrained']:.2f}"
        for row in tables["held-out pairs"]
    ]
    width = math.ceil(196 * math.sqrt(0.25 / pairs)) / 100  # at an accuracy of one half, where it is widest
    sentence = f"Held-out accuracy by each method's own score, with its 95 % interval: {'; '.join(said)}. "
    if pairs < MINIMUM_EXAMPLES:
        sentence += f"With {pairs} pairs an accuracy is known to about ± {width:.2f}, so this is no comparison."
    else:
        sentence += f"With {pairs} pairs an accuracy is known to about ± {width:.2f}."
    controls = [metrics[metric] for t, metrics in found.values() if t.candidate.genome["post.loss"] == "sft"]
    if controls:
        sentence += f" The control, SFT on the chosen answers, has {max(controls):.2f}."
    else:
        sentence += " The control, SFT on the chosen answers, did not run; a standard run has it."
    if moved := [metrics["changed_share"] for _, metrics in found.values() if "changed_share" in metrics]:
        least = "" if len(moved) == 1 else "at the least "
        sentence += f" The first update moved {least}{min(moved):.1%} of the weights (FP32, computed in BF16)."
    return {"sentence": sentence, **tables}
