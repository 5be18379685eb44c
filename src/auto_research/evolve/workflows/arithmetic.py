"""Post-training of a small arithmetic policy that answers in free text: SFT, IPO, DPO, ORPO and SimPO.

A causal Transformer over characters is warmed up on reference solutions until it solves a part of the held-out
problems; this warm-up depends on the seed alone, so all candidates of a seed start from the same weights. Then the loss
under test continues on problems of the training part. Pairs come from the policy itself: G completions a problem are
sampled, the chosen one is a verified-correct completion or else the reference solution, the rejected one a
verified-wrong completion; a problem whose completions are all correct gives no pair. Every loss trains on the same
number of response tokens, which makes continued SFT the control.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
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
from auto_research.evolve.workflows._pair_losses import (
    ORPO_LAMBDA,
    SIMPO_BETA,
    SIMPO_GAMMA_RATIO,
    dpo_beta,
    ipo_tau,
    pair_operator,
)
from auto_research.runtime.budget import Budget
from auto_research.runtime.records import write_json_atomic

if TYPE_CHECKING:
    from auto_research.evolve.records import Trial
    from auto_research.evolve.workflows._arithmetic import Artefact, Policy, Problems
    from auto_research.tasks.arithmetic import Expression

PAIR_LOSSES: tuple[Value, ...] = ("ipo", "dpo", "orpo", "simpo")
SAMPLING: tuple[Value, ...] = (*PAIR_LOSSES, "rejection-sft")
REFERENCED: tuple[Value, ...] = ("ipo", "dpo")
REPLAY_EVERY = 4
PASS_K = 4
PROCESS_BYTES = 500 * 2**20
"""Of a process that has imported torch."""


class Arithmetic(Workflow):
    """See the module."""

    key: ClassVar[str] = "arithmetic"
    title: ClassVar[str] = "Post-training / arithmetic"
    model: ClassVar[str] = "post-training"
    dataset: ClassVar[str] = "arithmetic"
    metric: ClassVar[str] = "accuracy"
    level: ClassVar[Level] = "L0 mechanism"
    space: ClassVar[Space] = Space(
        (
            Axis(
                "post.loss",
                values=("sft", *PAIR_LOSSES, "rejection-sft"),
                stage="post",
                changes="loss",
                source="continued SFT is the control; the others by their papers",
            ),
            ipo_tau(0.05),
            Axis(
                "ipo.normalise",
                values=(False, True),
                condition={"post.loss": ("ipo",)},
                stage="post",
                changes="loss",
                source="sums as printed in arXiv:2310.12036, or means over tokens as its authors ran it",
                group="post-training",
            ),
            dpo_beta(0.02),
            ORPO_LAMBDA,
            SIMPO_BETA,
            SIMPO_GAMMA_RATIO,
            Axis(
                "post.lr",
                "log-float",
                low=1e-5,
                high=1e-3,
                default=3e-4,
                stage="post",
                changes="loss",
                source="measured; used as given, neither clipped nor scheduled",
                group="post-training",
            ),
            Axis(
                "post.steps",
                values=(1.0, 0.5, 2.0),
                stage="post",
                changes="compute",
                source="multiples of the response tokens that the budget's updates hold",
                group="post-training",
            ),
            Axis(
                "reference.refresh",
                "int",
                values=(0, 1, 3),
                condition={"post.loss": REFERENCED},
                stage="post",
                changes="loss",
                source="how often the policy replaces its reference, evenly spread",
                group="post-training",
            ),
            Axis(
                "pairs.group",
                "int",
                values=(4, 2),
                condition={"post.loss": SAMPLING},
                stage="post",
                changes="data",
                source="completions sampled a problem",
                group="data",
            ),
            Axis(
                "pairs.source",
                values=("on-policy", "replay", "mixed"),
                condition={"post.loss": SAMPLING},
                stage="post",
                changes="data",
                source=f"rollouts at every update; at every {REPLAY_EVERY}th, drawing from all so far; or half each",
                group="data",
            ),
            Axis(
                "data.recipe",
                values=("all", "hard-half", "curriculum"),
                stage="data",
                changes="data",
                source="difficulty is the solution's negative log-likelihood a token under the warm-up",
                group="data",
            ),
        )
    )
    operators: ClassVar[tuple[Operator, ...]] = (
        pair_operator("ipo", "auto_research.layers.preference.ipo_loss", "auto_research.layers.preference.margin"),
        pair_operator(
            "orpo",
            "auto_research.layers.preference.orpo_loss",
            "auto_research.layers.preference.log_odds_ratio",
            "auto_research.layers.preference.log1m_exp",
        ),
        pair_operator("dpo", "auto_research.layers.preference.dpo_loss", "auto_research.layers.preference.margin"),
        pair_operator("simpo", "auto_research.layers.preference.simpo_loss"),
        Operator(
            "rejection-sft",
            "Rejection-sampling fine-tuning",
            {"post.loss": ("rejection-sft",)},
            "arXiv:2308.01825",
            "simplified",
            omitted=("several distinct correct paths a problem", "samples of several models"),
            keywords=("rejection", "sampling", "rft", "sft", "拒绝采样"),
            code=("auto_research.evolve.workflows._arithmetic.make_pairs",),
        ),
    )
    evidence: ClassVar[tuple[Evidence, ...]] = (
        Evidence(
            "Group relative policy optimisation",
            "arXiv:2402.03300",
            "there is no operator with a policy-gradient loss over groups of rollouts",
            "a value of post.loss that weighs rollouts by their group's normalised reward, with its clip and KL terms",
            ("grpo", "reinforcement", "policy gradient", "强化学习"),
        ),
        Evidence(
            "Kahneman-Tversky optimisation",
            "arXiv:2402.01306",
            "there is no operator that learns from unpaired labels",
            "a value of post.loss over single responses labelled right or wrong",
            ("kto", "unpaired", "prospect"),
        ),
    )

    def __init__(self) -> None:
        self._warm: dict[str, Policy] = {}

    def sizes(self, budget: Budget) -> Sizes:
        """`steps` updates after the warm-up, each of micro_batch * accumulate pairs, or twice as many solutions.

        `two_step` 1 adds products and expressions of three digits; `floor_seeds` warm-ups make the floor.
        """
        smoke = {
            "width": 64,
            "layers": 2,
            "heads": 4,
            "two_step": 0,
            "warmup_steps": 450,
            "warmup_batch": 96,
            "steps": 150,
            "micro_batch": 32,
            "accumulate": 1,
            "length": 6,
            "samples": 8,
            "floor_seeds": 1,
        }
        standard = {**smoke, "two_step": 1, "warmup_steps": 1000, "steps": 1000, "floor_seeds": 3}
        full = {**standard, "width": 128, "layers": 4, "warmup_steps": 4000, "steps": 4000, "micro_batch": 64}
        return Sizes(budget, {"smoke": smoke, "standard": standard, "full": full}[budget])

    def smoke_plan(self) -> list[Genome]:
        return [self.space.resolve({"post.loss": loss}) for loss in ("ipo", "orpo")]

    def _split(self, sizes: Sizes) -> dict[str, list[Expression]]:
        from auto_research.tasks.arithmetic import one_step, split, two_step

        return split([*one_step("+-*"), *two_step()] if sizes["two_step"] else one_step())

    def load(self, sizes: Sizes, dataset_dir: Path | None) -> Data:
        from auto_research.evolve.workflows._arithmetic import Problems
        from auto_research.tasks.arithmetic import VOCABULARY

        parts = self._split(sizes)
        texts = {name: [one.text for one in part] for name, part in parts.items()}
        reordered = disjoint({name: [one.key for one in part] for name, part in parts.items()})
        hygiene = disjoint(texts) | {f"{k} after reordering": v for k, v in reordered.items() if k.endswith("share")}
        kept = {name: Problems.of(parts[name], sizes["length"]) for name in ("train", "validation")}
        digests = {"problems": digest(texts["train"], texts["validation"]), "tokenizer": digest(list(VOCABULARY))}
        return Data(kept, digests, hygiene, len(kept["validation"]))

    def load_test(self, sizes: Sizes, dataset_dir: Path | None) -> Problems:
        from auto_research.evolve.workflows._arithmetic import Problems

        return Problems.of(self._split(sizes)["test"], sizes["length"])

    def train(self, genome: Genome, data: Data, seed: int, sizes: Sizes, device: str, progress: Progress) -> Artefact:
        from auto_research.evolve.workflows import _arithmetic as policies

        start = self.warm_up(data, seed, sizes, device, progress)
        return policies.post_train(genome, start, data.parts["train"], seed, sizes, device, progress)

    def warm_up(self, data: Data, seed: int, sizes: Sizes, device: str, progress: Progress) -> Policy:
        """The weights that all candidates of a seed start from; kept for this object's life."""
        from auto_research.evolve.workflows import _arithmetic as policies

        names = ("width", "layers", "heads", "warmup_steps", "warmup_batch", "accumulate")
        known = digest(data.digests, [sizes[name] for name in names], seed, device)
        if known not in self._warm:
            self._warm[known] = policies.warm_up(data.parts["train"], seed, sizes, device, progress)
        return copy.deepcopy(self._warm[known])

    def save(self, artefact: Artefact, folder: Path) -> None:
        from safetensors.torch import save_file

        weights = {
            f"{name}.{key}": value.cpu().contiguous()
            for name, policy in (("policy", artefact.policy), ("start", artefact.start))
            for key, value in policy.state_dict().items()
        }
        save_file(weights, folder / "weights.safetensors")
        write_json_atomic(folder / "facts.json", {"seed": artefact.seed, "facts": artefact.facts})

    def restore(self, genome: Genome, data: Data, folder: Path, sizes: Sizes, device: str) -> Artefact:
        from safetensors.torch import load_file

        from auto_research.evolve.workflows import _arithmetic as policies

        weights = load_file(folder / "weights.safetensors")
        stored = json.loads((folder / "facts.json").read_text(encoding="utf-8"))

        def policy(name: str) -> Policy:
            made = policies.fresh_policy(sizes, 0)
            made.load_state_dict({k.removeprefix(name): v for k, v in weights.items() if k.startswith(name)})
            return made.requires_grad_(False).to(device)

        return policies.Artefact(policy("policy."), policy("start."), stored["seed"], stored["facts"])

    def validate(self, artefact: Artefact, data: Data, sizes: Sizes, device: str) -> Scores:
        from auto_research.evolve.workflows import _arithmetic as policies

        scores = policies.score(artefact, data.parts["validation"], sizes, device)
        scores.metrics |= artefact.facts
        return scores

    def test(self, artefact: Artefact, test: Problems, data: Data, sizes: Sizes, device: str) -> Scores:
        from auto_research.evolve.workflows import _arithmetic as policies

        return policies.score(artefact, test, sizes, device)

    def floors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """The most frequent training answer, and the warm-up before any candidate's own updates."""
        from auto_research.evolve.workflows._arithmetic import greedy_accuracy

        answers = data.parts["train"].answers
        frequent = max(sorted(set(answers)), key=answers.count)
        held_out: Problems = data.parts["validation"]
        warm = [
            greedy_accuracy(self.warm_up(data, seed, sizes, "cpu", _unwatched), held_out, sizes["length"])
            for seed in range(sizes["floor_seeds"])
        ]
        usual = held_out.answers.count(frequent) / len(held_out)
        return {"most frequent answer": usual, "warm-up": sum(warm) / len(warm)}

    def anchors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """What the checker says of the solutions themselves: the ceiling."""
        from auto_research.evolve.workflows._arithmetic import verify

        problems: Problems = data.parts["validation"]
        return {"solutions": float(verify(problems.solutions, problems.answers).correct.double().mean())}

    def cost(self, genome: Genome, sizes: Sizes, data: Data) -> Cost:
        """FLOPs of one update: rollouts, reference, and forward and backward (twice the forward) of the responses."""
        from auto_research.evolve.workflows._arithmetic import forward_flops, parameter_shapes, update_tokens

        parameters = sum(math.prod(shape) for shape in parameter_shapes(sizes).values())
        problems: Problems = data.parts["train"]
        pairs = sizes["micro_batch"] * sizes["accumulate"]
        prompt, answer = problems.prompts.shape[1], update_tokens(sizes, problems) / (2 * pairs)
        name = genome["post.loss"]
        asked = tokens = 0.0
        if name in SAMPLING:
            share = {"on-policy": 1.0, "mixed": 0.5, "replay": 1 / REPLAY_EVERY}[str(genome["pairs.source"])]
            asked = share * pairs * (1 if name in PAIR_LOSSES else 2)
            tokens = int(genome["pairs.group"]) * answer
        passes = 3 + (name in REFERENCED)
        flops = passes * 2 * pairs * forward_flops(sizes, prompt + answer - 1, answer)
        flops += asked * (forward_flops(sizes, prompt, 1) + tokens * forward_flops(sizes, 1, 1))
        # Weights, gradients and two moments, two frozen copies, and the activations that the gradient needs.
        columns = 2 * sizes["micro_batch"] * (prompt + sizes["length"])
        activations = columns * sizes["width"] * (1 + 20 * sizes["layers"])
        memory = 4 * (6 * parameters + activations) + PROCESS_BYTES
        updates = float(genome["post.steps"]) * sizes["steps"]
        trained = updates * update_tokens(sizes, problems)
        extra = {"updates": updates, "trained_tokens": trained, "rollout_tokens": updates * asked * tokens}
        return Cost(parameters, flops, memory, extra)

    def describe(self, genome: Genome, sizes: Sizes, data: Data) -> Described:
        from auto_research.evolve.workflows import _arithmetic as policies

        rest = {name: value for name, value in genome.items() if name.split(".")[0] in ("post", "pairs", "data")}
        rest |= {"reference.refresh": genome["reference.refresh"]} if "reference.refresh" in genome else {}
        fixed = {
            "warmup_lr": policies.WARMUP_LR,
            "replay_every": REPLAY_EVERY,
            "replay_keeps": policies.REPLAY_KEEPS,
        }
        return Described(rest | fixed | dict(sizes.values), policies.parameter_shapes(sizes), _constants(genome))

    def summarise(self, trials: Sequence[Trial]) -> dict[str, Any]:
        """The losses beside their control."""
        return compare_with_control(trials, self.metric)

    def effect_probe(self, genome: Genome, sizes: Sizes, data: Data) -> dict[str, str]:
        """Trains for a few updates after a short warm-up, the way `train` does, and digests what happened."""
        import torch

        from auto_research.evolve.workflows import _arithmetic as policies

        few = {"warmup_steps": 12, "warmup_batch": 32, "steps": 6, "micro_batch": 8, "accumulate": 1}
        small = Sizes(sizes.budget, {**sizes.values, **few})
        trace = policies.Trace()
        start = self.warm_up(data, 0, small, "cpu", _unwatched)
        made = policies.post_train(genome, start, data.parts["train"], 0, small, "cpu", _unwatched, trace)
        problems: Problems = data.parts["validation"]
        prompts, solutions = problems.prompts[:8], problems.solutions[:8]
        cost = self.cost(genome, sizes, data)
        with torch.no_grad():
            forward = made.policy.respond(prompts, solutions)
        greedy = policies.generate(made.policy, prompts, length=sizes["length"], temperature=0)
        return {
            "forward": digest(forward),
            "loss": digest(trace.losses),
            "data_order": digest(*trace.drawn),
            "generated": digest(*trace.rollouts, greedy),
            "cost": digest([cost.flops, cost.extra]),
        }


SHOWN = (f"pass@{PASS_K}", "format_rate", "kl", "margin", "pair_yield", "accepted", "trained_tokens", "rollout_tokens")


def compare_with_control(trials: Sequence[Trial], metric: str) -> dict[str, Any]:
    """Every candidate beside continued SFT and the warm-up, and a sentence on whether a loss beats that control."""
    from auto_research.evolve.promotion import mean_metrics

    found = {t.candidate.id: (t, mean_metrics(t)) for t in trials}
    found = {id: (trial, metrics) for id, (trial, metrics) in found.items() if metric in metrics}
    rows = [
        {"candidate": id, "loss": t.candidate.genome["post.loss"], metric: metrics[metric]}
        | {name: metrics[name] for name in SHOWN if name in metrics}
        for id, (t, metrics) in found.items()
    ]
    controls = [id for id, (t, _) in found.items() if t.candidate.genome["post.loss"] == "sft"]
    others = [id for id in found if id not in controls]
    if not controls or not others:
        return {"sentence": "No other loss can be compared with continued SFT.", "candidates": rows}
    control = max(controls, key=lambda id: found[id][1][metric])
    score, start = found[control][1][metric], found[control][1]["warmup_accuracy"]
    above = [id for id in others if found[id][1][metric] > score]
    sure = [id for id in above if (gain := found[id][0].gain) and gain.lower is not None and gain.lower > 0]
    seeds = min(len(t.cells) for t, _ in found.values())
    said = f"above it {'is' if len(above) == 1 else 'are'} {', '.join(above)}" if above else "no other loss is above it"
    if above and sure:
        said += f", beyond noise {', '.join(sure)}"
    elif above:
        said += ", but not beyond noise" if seeds > 1 else ", which one seed cannot tell from noise"
    return {
        "sentence": f"The control, SFT continued for as many response tokens, has {metric} {score:.3f} after a warm-up "
        f"of {start:.3f}; {said}.",
        "candidates": rows,
    }


def _constants(genome: Genome) -> dict[str, Value]:
    """Name and constants of a loss."""
    name = genome["post.loss"]
    return {"name": name, **{axis: value for axis, value in genome.items() if axis.startswith(f"{name}.")}}


def _unwatched(step: int, loss: float) -> None:
    """A `Progress` for training that no cell watches."""
