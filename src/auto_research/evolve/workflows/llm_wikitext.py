"""Micro language models on WikiText-2: attention, feed-forward, positions, data recipes, instruction tuning.

A candidate is a causal language model built from a Transformers configuration with random weights, trained on windows
of the text and perhaps tuned on instructions. Fitness is -(LM loss + 0.15 instruction loss), both in nats a token: the
first over the whole validation text, the second over the response tokens of held-out instructions.

At micro size the attention variants differ by less than two seeds of one of them. `summarise` says so.

Sizes are relative: `model.width` 1.5 is one and a half times the width of the budget. A batch or a context that is
twice as large takes half the steps: every candidate reads the same number of tokens before instruction tuning.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from auto_research.evolve.space import Axis, Constraint, Genome, Infeasible, Space
from auto_research.evolve.workflow import (
    Cost,
    Data,
    Described,
    Evidence,
    NonFinite,
    Operator,
    Progress,
    Scores,
    Sizes,
    Workflow,
    digest,
)
from auto_research.runtime.budget import Budget

if TYPE_CHECKING:
    from torch import Tensor

    from auto_research.evolve.records import Trial
    from auto_research.evolve.workflows._corpus import Corpus, Row, TestPart
    from auto_research.tasks.base import Recipe
    from auto_research.tasks.micro_language_model import Shape

INSTRUCTION_WEIGHT = 0.15
SFT_RATE = {"sft": 0.2, "neftune": 0.2, "sft-low-lr": 0.05}
"""Learning rate of tuning as a share of the language model's; at a half, forty steps undo much of what was learned."""
TUNED = tuple(SFT_RATE)

_MODULE = "auto_research.evolve.workflows.llm_wikitext"
_MODELS = "auto_research.tasks.micro_language_model"


def _positions_fit(genome: Genome) -> bool:
    attention = {"learned": ("mha",), "alibi": ("mha", "mqa")}.get(str(genome["model.position"]))
    return attention is None or (genome["model.ffn"] == "gelu" and genome["model.attention"] in attention)


def _mend_positions(genome: Genome) -> Genome:
    keep = genome["model.position"] == "alibi" and genome["model.attention"] == "mqa"
    return genome | {"model.ffn": "gelu", "model.attention": "mqa" if keep else "mha"}


SPACE = Space(
    (
        Axis("model.attention", values=("mha", "gqa", "mqa", "mla", "sliding"), source="2305.13245, 2405.04434"),
        Axis(
            "model.kv_heads",
            "int",
            (2, 4, 1),
            condition={"model.attention": ("gqa",)},
            changes="memory",
            source="2305.13245; 1 is MQA, as many as heads is MHA",
        ),
        Axis("model.window", "int", (32, 8, 64), condition={"model.attention": ("sliding",)}, source="2310.06825"),
        Axis("model.ffn", values=("swiglu", "gelu"), source="2002.05202, at equal parameters"),
        Axis("model.position", values=("rope", "learned", "alibi"), source="2104.09864, 1706.03762, 2108.12409"),
        Axis("model.tied", values=(True, False), source="1608.05859"),
        Axis("model.width", values=(1.0, 0.75, 1.5), changes="compute", source="times the budget's width"),
        Axis("model.layers", values=(1.0, 0.5, 2.0), changes="compute", source="times the budget's layers"),
        Axis(
            "match",
            values=("none", "parameters", "flops"),
            condition={"model.attention": ("mla", "gqa", "mqa", "sliding")},
            changes="compute",
            source="the feed-forward width gives or takes what attention saves; `none` as in the measured table",
        ),
        Axis(
            "match.untied",
            values=("none", "parameters"),
            condition={"model.tied": (False,)},
            changes="compute",
            source="narrower, so that the second matrix costs nothing",
        ),
        Axis("data.recipe", values=("wiki", "mix", "curriculum"), stage="data", changes="data", group="data"),
        Axis(
            "data.ratio",
            "float",
            low=0.1,
            high=0.35,
            default=0.2,
            condition={"data.recipe": ("mix", "curriculum")},
            stage="data",
            changes="data",
            group="data",
            source="share of narrative windows; a curriculum starts there and falls to 0",
        ),
        Axis(
            "post.method",
            values=("none", "sft", "sft-low-lr", "neftune"),
            stage="post",
            changes="loss",
            group="post-training",
            source="2109.01652, 2310.05914",
        ),
        Axis(
            "post.steps",
            values=(1.0, 0.5, 2.0),
            condition={"post.method": TUNED},
            stage="post",
            changes="compute",
            group="post-training",
            source="times the budget's steps of instruction tuning",
        ),
        Axis(
            "post.neftune_alpha",
            "int",
            (5, 10, 15),
            condition={"post.method": ("neftune",)},
            stage="post",
            changes="loss",
            group="post-training",
            source="2310.05914",
        ),
        Axis("train.lr", "log-float", low=3e-4, high=1e-2, default=2e-3, stage="train", changes="loss", group="joint"),
        Axis("train.optimizer", values=("adamw", "muon"), stage="train", changes="loss", group="joint"),
        Axis("train.batch", values=(1.0, 0.5, 2.0), stage="train", changes="data", group="joint"),
        Axis("train.context", values=(1.0, 0.5, 2.0), stage="train", changes="data", group="joint"),
    ),
    (
        Constraint(
            "positions",
            _positions_fit,
            "Transformers has learned positions (OPT) with GELU and MHA, and ALiBi (Falcon) with GELU and MHA or MQA",
            _mend_positions,
        ),
        Constraint(
            "gelu",
            lambda g: g["model.ffn"] == "swiglu" or g["model.attention"] in ("mha", "gqa", "mqa"),
            "Transformers has MLA (DeepSeek) and the sliding window (Mistral) with SwiGLU only",
        ),
    ),
)

OPERATORS = (
    Operator(
        "gqa",
        "Grouped-query attention",
        {"model.attention": ("gqa",)},
        "2305.13245",
        "core_mechanism",
        omitted=("conversion of an MHA checkpoint by mean-pooling its heads, and the 5 % of further training",),
        keywords=("gqa", "grouped", "grouped-query", "kv cache", "attention", "memory", "分组查询", "注意力", "缓存"),
        code=(f"{_MODELS}.Shape", "transformers.LlamaForCausalLM"),
    ),
    Operator(
        "mqa",
        "Multi-query attention",
        {"model.attention": ("mqa",)},
        "1911.02150",
        "core_mechanism",
        keywords=("mqa", "multi-query", "kv cache", "attention", "memory", "多查询", "注意力", "缓存"),
        code=(f"{_MODELS}.Shape", "transformers.LlamaForCausalLM"),
    ),
    Operator(
        "gelu",
        "A plain GELU feed-forward network in place of the gated one, at equal parameters",
        {"model.ffn": ("gelu",)},
        "1606.08415",
        "core_mechanism",
        keywords=("gelu", "swiglu", "ffn", "feed-forward", "activation", "gated", "前馈", "激活"),
        code=(f"{_MODELS}.Shape", "transformers.ArceeForCausalLM"),
    ),
    Operator(
        "sft",
        "Instruction tuning on responses",
        {"post.method": ("sft", "sft-low-lr")},
        "2109.01652",
        "simplified",
        omitted=("many tasks and templates", "a pretrained model of useful size"),
        keywords=("sft", "instruction", "fine-tuning", "post-training", "指令", "微调"),
        code=(f"{_MODULE}.instruction_batches",),
    ),
    Operator(
        "mla",
        "Multi-head latent attention",
        {"model.attention": ("mla",)},
        "2405.04434",
        "core_mechanism",
        omitted=("low-rank queries", "absorbing the up-projections into neighbours at inference"),
        keywords=("mla", "latent", "deepseek", "kv cache", "attention", "memory", "潜在注意力", "注意力"),
        code=(f"{_MODELS}.Shape", "transformers.DeepseekV2ForCausalLM"),
    ),
    Operator(
        "sliding-window",
        "Attention within a sliding window",
        {"model.attention": ("sliding",)},
        "2310.06825",
        "core_mechanism",
        omitted=("pre-filling in chunks",),
        keywords=("sliding", "window", "local", "attention", "mistral", "滑动窗口", "注意力"),
        code=(f"{_MODELS}.Shape", "transformers.MistralForCausalLM"),
    ),
    Operator(
        "learned-positions",
        "Learned absolute positions",
        {"model.position": ("learned",)},
        "1706.03762",
        "core_mechanism",
        omitted=("everything equal but the positions: OPT's block brings LayerNorm for RMSNorm",),
        keywords=("position", "positions", "learned", "位置"),
        code=(f"{_MODELS}.Shape", "transformers.OPTForCausalLM"),
    ),
    Operator(
        "alibi",
        "Linear attention biases for positions",
        {"model.position": ("alibi",)},
        "2108.12409",
        "core_mechanism",
        omitted=(
            "everything equal but the positions: Falcon's block brings LayerNorm, and scales the bias by 1/sqrt(d_h)",
        ),
        keywords=("alibi", "position", "positions", "length", "extrapolation", "位置"),
        code=(f"{_MODELS}.Shape", "transformers.FalconForCausalLM"),
    ),
    Operator(
        "untied",
        "An output matrix of its own",
        {"model.tied": (False,)},
        "1608.05859",
        "core_mechanism",
        keywords=("tied", "untied", "embedding", "output", "词嵌入"),
        code=(f"{_MODELS}.Shape",),
    ),
    Operator(
        "curriculum",
        "A narrative text first, fading out",
        {"data.recipe": ("curriculum",)},
        "Bengio et al., Curriculum learning, ICML 2009",
        "simplified",
        omitted=("an order by difficulty: the share of the other text falls linearly",),
        keywords=("curriculum", "data", "order", "课程", "数据"),
        code=(f"{_MODULE}.narrative_share", f"{_MODULE}.text_batches"),
    ),
    Operator(
        "narrative-mix",
        "A fixed share of a narrative text",
        {"data.recipe": ("mix",)},
        "2101.00027",
        "simplified",
        omitted=("22 sources: one is mixed in",),
        keywords=("mix", "mixture", "data", "narrative", "数据", "混合"),
        code=(f"{_MODULE}.narrative_share", f"{_MODULE}.text_batches"),
    ),
    Operator(
        "neftune",
        "Noise on the embeddings during instruction tuning",
        {"post.method": ("neftune",)},
        "2310.05914",
        "core_mechanism",
        keywords=("neftune", "noise", "instruction", "embedding", "fine-tuning", "噪声", "微调"),
        code=(f"{_MODULE}.instruction_batches", f"{_MODULE}.noisy_embeddings"),
    ),
    Operator(
        "muon",
        "Orthogonalised momentum for the matrices of the layers",
        {"train.optimizer": ("muon",)},
        "2502.16982",
        "core_mechanism",
        omitted=("the distributed update",),
        keywords=("muon", "optimizer", "optimiser", "orthogonal", "优化器"),
        code=(f"{_MODELS}.optimisers", "torch.optim.Muon"),
    ),
)

EVIDENCE = (
    Evidence(
        "Weights of a data mixture by excess loss over a reference model",
        "2305.10429",
        "two sources leave nothing to weight, and no reference model is trained",
        "several sources and a reference run",
        ("doremi", "data", "mixture", "weights", "数据", "混合"),
    ),
    Evidence(
        "Grouping the heads of a trained MHA checkpoint",
        "2305.13245",
        "every candidate starts from random weights",
        "an axis that starts from the baseline's stored weights",
        ("uptraining", "conversion", "checkpoint"),
    ),
)


@dataclass(frozen=True)
class Plan:
    """How a genome is trained: everything beside the shape, resolved against the sizes."""

    steps: int
    batch: int
    context: int
    rate: float
    optimiser: str
    ratio: float
    fading: bool
    post_steps: int
    post_batch: int
    post_rate: float
    alpha: float

    @property
    def tokens(self) -> int:
        """Tokens of text that are seen."""
        return self.steps * self.batch * self.context


@dataclass
class Trained:
    """The artefact: a model, and how it got there (empty after `restore`)."""

    model: Any
    shape: Shape
    plan: Plan
    losses: list[float]


class MicroLanguageModel(Workflow):
    """Workflow `llm-wikitext`; see the module."""

    key = "llm-wikitext"
    title = "Micro language models on WikiText-2"
    model = "micro-llm"
    dataset = "wikitext-2-devsplit"
    metric = "fitness"
    direction = "max"
    level = "L1 small public"
    space = SPACE
    operators = OPERATORS
    evidence = EVIDENCE
    cell_seconds: ClassVar[dict[Budget, float]] = {"smoke": 900, "standard": 4 * 3600, "full": 7 * 86_400}
    language_model = True

    SIZES: ClassVar[dict[Budget, dict[str, int]]] = {
        "smoke": {"steps": 150, "post_steps": 40, "width": 128, "layers": 2, "heads": 4, "vocabulary": 2048},
        "standard": {"steps": 2000, "post_steps": 200, "width": 256, "layers": 4, "heads": 8, "vocabulary": 8192},
        "full": {"steps": 20_000, "post_steps": 500, "width": 384, "layers": 6, "heads": 12, "vocabulary": 8192},
    }

    def sizes(self, budget: Budget) -> Sizes:
        """Full is 13.8 M parameters; a step reads `batch` windows of `context` tokens."""
        reading = {"batch": 32, "context": 256} if budget == "full" else {"batch": 8, "context": 128}
        return Sizes(budget, self.SIZES[budget] | reading)

    def smoke_plan(self) -> list[Genome]:
        """GQA with two groups, MQA, GELU for SwiGLU, and instruction tuning, each alone."""
        changes: tuple[Genome, ...] = (
            {"model.attention": "gqa"},
            {"model.attention": "mqa"},
            {"model.ffn": "gelu"},
            {"post.method": "sft"},
        )
        return [self.space.resolve(change) for change in changes]

    # -------------------------------------------------------------------------------------------------- data

    def load(self, sizes: Sizes, dataset_dir: Path | None) -> Data:
        """The dev split at the smoke budget; above it the official training text where it is on this machine."""
        from auto_research.evolve.workflows._corpus import DEVSPLIT, read_corpus

        corpus = read_corpus(sizes["vocabulary"], sizes["context"], dataset_dir, official=sizes.budget != "smoke")
        stand_in = [corpus.stand_in] if corpus.stand_in else []
        if sizes.budget == "full" and corpus.name == DEVSPLIT:
            stand_in.append("the text is the dev split of WikiText-2: its training part is not on this machine")
        return Data(
            parts=corpus,
            digests=corpus.digests,
            hygiene=corpus.hygiene,
            examples=math.ceil(len(corpus.validation) / sizes["context"]),
            stand_in="; ".join(stand_in),
        )

    def load_test(self, sizes: Sizes, dataset_dir: Path | None) -> TestPart:
        """The official test text and the held-out instructions; the first tenth of the text in a smoke run."""
        from auto_research.evolve.workflows._corpus import SMOKE_LINES, read_test

        smoke = sizes.budget == "smoke"
        lines = SMOKE_LINES if smoke else 1.0
        return read_test(sizes["vocabulary"], sizes["context"], dataset_dir, official=not smoke, lines=lines)

    # ----------------------------------------------------------------------------------------- from a genome

    def shape(self, genome: Genome, sizes: Sizes, data: Data) -> Shape:
        """The model of a genome. Raises `Infeasible` when the sizes leave no such model."""
        return _shape(tuple(sorted(genome.items())), tuple(sorted(sizes.values.items())), *_ids(data))

    def plan(self, genome: Genome, sizes: Sizes) -> Plan:
        """How a genome is trained."""
        batch = max(1, round(sizes["batch"] * float(genome["train.batch"])))
        context = max(2, round(sizes["context"] * float(genome["train.context"])))
        tokens = sizes["steps"] * sizes["batch"] * sizes["context"]
        rate, method = float(genome["train.lr"]), str(genome["post.method"])
        tuned = method in TUNED
        return Plan(
            steps=max(1, round(tokens / (batch * context))),
            batch=batch,
            context=context,
            rate=rate,
            optimiser=str(genome["train.optimizer"]),
            ratio=float(genome.get("data.ratio", 0.0)),
            fading=genome["data.recipe"] == "curriculum",
            post_steps=max(1, round(sizes["post_steps"] * float(genome["post.steps"]))) if tuned else 0,
            post_batch=sizes["batch"] if tuned else 0,
            post_rate=rate * SFT_RATE[method] if tuned else 0.0,
            alpha=float(genome.get("post.neftune_alpha", 0)),
        )

    # ------------------------------------------------------------------------------------------------- a cell

    def train(self, genome: Genome, data: Data, seed: int, sizes: Sizes, device: str, progress: Progress) -> Trained:
        """Initialisation, windows and instruction rows depend on `seed` alone and are the same for all candidates."""
        import torch

        from auto_research.tasks import micro_language_model as micro

        corpus: Corpus = data.parts
        shape, plan = self.shape(genome, sizes, data), self.plan(genome, sizes)
        model = micro.build(shape, seed, device)
        devices = [torch.device(device)] if torch.device(device).type == "cuda" else []

        def guarded(step: int, loss: float) -> None:
            if not math.isfinite(loss):
                raise NonFinite(f"the loss is {loss} at step {step}")
            progress(step, loss)

        losses = micro.train(
            model,
            text_batches(corpus, plan, seed),
            plan.steps,
            _recipe(plan.rate, plan.steps),
            optimiser=plan.optimiser,
            progress=guarded,
        )
        if plan.post_steps:
            with torch.random.fork_rng(devices=devices), noisy_embeddings(model, plan.alpha):
                torch.manual_seed(seed)
                losses += micro.train(
                    model,
                    instruction_batches(corpus.instructions["train"], plan.post_batch, corpus.end, seed),
                    plan.post_steps,
                    _recipe(plan.post_rate, plan.post_steps),
                    optimiser=plan.optimiser,
                    progress=guarded,
                    first_step=plan.steps,
                )
        return Trained(model, shape, plan, losses)

    def save(self, artefact: Trained, folder: Path) -> None:
        """As Transformers stores a checkpoint, in safetensors."""
        from auto_research.checkpoints.store import quiet

        with quiet():
            artefact.model.save_pretrained(folder)

    def restore(self, genome: Genome, data: Data, folder: Path, sizes: Sizes, device: str) -> Trained:
        """The model of `genome` with the stored weights."""
        from auto_research.tasks import micro_language_model as micro

        shape = self.shape(genome, sizes, data)
        return Trained(micro.load(shape, folder, device).eval(), shape, self.plan(genome, sizes), [])

    def validate(self, artefact: Trained, data: Data, sizes: Sizes, device: str) -> Scores:
        """Perplexity and bits per byte of the whole validation text, instruction loss, fitness, cache bytes."""
        corpus: Corpus = data.parts
        scores = self._evaluate(
            artefact, corpus.validation, corpus.validation_bytes, corpus.instructions["validation"], corpus.end, sizes
        )
        shape, plan = artefact.shape, artefact.plan
        scores.metrics |= {
            "parameters": float(shape.count),
            "kv_bytes_per_token": float(shape.kv_bytes_per_token),
            "tokens_seen": float(plan.tokens),
            "repetitions": plan.tokens / len(corpus.train),
        }
        if artefact.losses:
            last = artefact.losses[max(0, plan.steps - 10) : plan.steps]
            scores.metrics["train_loss"] = sum(last) / len(last)
        return scores

    def test(self, artefact: Trained, test: TestPart, data: Data, sizes: Sizes, device: str) -> Scores:
        """The same on the official test text."""
        return self._evaluate(artefact, test.tokens, test.bytes, test.instructions, data.parts.end, sizes)

    def _evaluate(
        self, artefact: Trained, tokens: Tensor, size: int, rows: Sequence[Row], end: int, sizes: Sizes
    ) -> Scores:
        from auto_research.tasks import micro_language_model as micro

        nats = micro.text_nats(artefact.model, tokens, end, artefact.plan.context)
        batches = [_response_batch(rows[i : i + 32], end) for i in range(0, len(rows), 32)]
        total, count = micro.rows_nats(artefact.model, batches)
        loss, instruction = float(nats.mean()), total / count
        if not (math.isfinite(loss) and math.isfinite(instruction)):
            raise NonFinite(f"language-model loss {loss}, instruction loss {instruction}")
        # Blocks of one length for every candidate, weighted so that their mean is the fitness.
        blocks = nats.split(sizes["context"])
        units = [-(float(block.sum()) * len(blocks) / len(nats) + INSTRUCTION_WEIGHT * instruction) for block in blocks]
        metrics = {
            "fitness": -(loss + INSTRUCTION_WEIGHT * instruction),
            "lm_loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": micro.bits_per_byte(float(nats.sum()), size),
            "instruction_loss": instruction,
        }
        return Scores(metrics, units)

    # ---------------------------------------------------------------------------------------------- yardsticks

    def floors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """Fitness of the training text's token frequencies, and of equal chances."""
        from auto_research.tasks.language_model import unigram

        corpus: Corpus = data.parts
        frequencies = -unigram(corpus.train, corpus.vocabulary)
        equal = math.log(corpus.vocabulary)
        return {
            "unigram": -(
                float(frequencies[corpus.validation].mean())
                + INSTRUCTION_WEIGHT * float(frequencies[_responses(corpus)].mean())
            ),
            "uniform": -(equal + INSTRUCTION_WEIGHT * equal),
        }

    def anchors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """Fitness of an interpolated bigram model of the training text."""
        import torch

        from auto_research.tasks.language_model import bigram_nats

        corpus: Corpus = data.parts
        text = bigram_nats(corpus.train, torch.cat([torch.tensor([corpus.end]), corpus.validation]), corpus.vocabulary)
        rows = [torch.tensor([r.prompt[-1], *r.response]) for r in corpus.instructions["validation"]]
        answers = torch.cat([bigram_nats(corpus.train, row, corpus.vocabulary) for row in rows])
        return {"bigram": -float(text.mean() + INSTRUCTION_WEIGHT * answers.mean())}

    def cost(self, genome: Genome, sizes: Sizes, data: Data) -> Cost:
        """FLOPs of a training step (three forward passes); `extra` has the cache and the whole training."""
        shape, plan = self.shape(genome, sizes, data), self.plan(genome, sizes)
        step = 3 * shape.flops_per_token(plan.context) * plan.batch * plan.context
        tuning = 3 * shape.flops_per_token(sizes["context"]) * plan.post_batch * sizes["context"] * plan.post_steps
        return Cost(
            parameters=shape.count,
            flops=step,
            memory_bytes=shape.training_bytes(plan.batch * plan.context),
            extra={
                "non_embedding_parameters": float(shape.non_embedding),
                "kv_bytes_per_token": float(shape.kv_bytes_per_token),
                "kv_bytes_at_context": float(shape.kv_bytes(plan.context)),
                "training_steps": float(plan.steps + plan.post_steps),
                "training_flops": step * plan.steps + tuning,
            },
        )

    def match(self, genome: Genome, baseline: Cost, sizes: Sizes, data: Data) -> str:
        """Differences above 2 % in parameters, and above 5 % in the whole training's operations."""
        cost = self.cost(genome, sizes, data)
        work = cost.extra["training_flops"] / baseline.extra["training_flops"] - 1
        parameters = super().match(genome, baseline, sizes, data)
        return ", ".join(filter(None, (parameters, f"{work:+.1%} training operations" if abs(work) > 0.05 else "")))

    # ----------------------------------------------------------------------------------------------- identity

    def describe(self, genome: Genome, sizes: Sizes, data: Data) -> Described:
        """Shape and plan as they are built and run; axes as such do not appear."""
        shape, plan = self.shape(genome, sizes, data), self.plan(genome, sizes)
        return Described(
            configuration={"shape": asdict(shape), "plan": asdict(plan)},
            parameters=shape.parameters(),
            loss={"name": "next-token cross entropy", "instruction weight": INSTRUCTION_WEIGHT},
        )

    def effect_probe(self, genome: Genome, sizes: Sizes, data: Data) -> dict[str, str]:
        """A training of three steps and two of tuning on small batches, and the order of the data at full schedule."""
        import itertools

        small = replace(sizes, values=sizes.values | {"steps": 3, "post_steps": 2, "batch": min(sizes["batch"], 4)})
        trained = self.train(genome, data, 0, small, "cpu", lambda step, loss: None)
        corpus, plan = data.parts, self.plan(genome, sizes)
        plan = replace(plan, steps=min(plan.steps, 64))
        order = [ids for ids, _ in itertools.islice(text_batches(corpus, plan, 0), plan.steps)]
        if plan.post_steps:
            rows = instruction_batches(corpus.instructions["train"], plan.post_batch, corpus.end, 0)
            order += [ids for ids, _ in itertools.islice(rows, min(8, plan.post_steps))]
        import torch

        with torch.no_grad():
            logits = trained.model(input_ids=corpus.validation[None, : sizes["context"]], use_cache=False).logits
        cost = self.cost(genome, sizes, data)
        return {
            "forward": digest(logits),
            "loss": digest(trained.losses),
            "data_order": digest(*order),
            "cost": digest(cost.parameters, cost.flops, cost.memory_bytes, cost.extra),
        }

    # ------------------------------------------------------------------------------------------------- summary

    def summarise(self, trials: Sequence[Trial]) -> dict[str, Any]:
        """Every candidate beside the baseline, and whether the difference exceeds the noise of seeds."""
        return compare_with_noise(trials, self.metric)


def compare_with_noise(trials: Sequence[Trial], metric: str) -> dict[str, Any]:
    """Rows of (candidate, perplexity, cache, difference) and a sentence.

    The noise is the sample deviation s of the baseline's seeds; the difference of two means of n and m seeds counts
    as beyond noise when it exceeds 2 s sqrt(1/n + 1/m). With one seed noise was not measured, and no difference counts.
    """
    import statistics

    from auto_research.evolve.promotion import mean_metrics, noise_floor, values

    found = [(trial, values(trial, metric)) for trial in trials]
    start = next((seeds for trial, seeds in found if trial.candidate.id == "baseline" and seeds), None)
    if start is None:
        return {"sentence": "The baseline gave no result: nothing to compare with.", "candidates": []}
    noise = next(noise_floor(trial, metric) for trial, _ in found if trial.candidate.id == "baseline")
    rows: list[dict[str, Any]] = []
    for trial, seeds in found:
        if not seeds:
            continue
        gap = statistics.fmean(seeds) - statistics.fmean(start)
        limit = None if noise is None else 2 * noise * math.sqrt(1 / len(seeds) + 1 / len(start))
        shown = {k: v for k, v in mean_metrics(trial).items() if k in SHOWN}
        rows.append(
            {"candidate": trial.candidate.id, "seeds": len(seeds), **shown, "difference": gap, "noise limit": limit}
        )
    others = [row for row in rows if row["candidate"] != "baseline"]
    if not others:
        return {"sentence": "Only the baseline gave a result.", "candidates": rows}
    if noise is None:
        widest = max(abs(row["difference"]) for row in others)
        return {
            "sentence": f"No difference beyond noise can be shown: the baseline has one seed, so its noise was not "
            f"measured. The widest gap in {metric} is {widest:.3f}; two seeds of one model differed by {SEED_GAP} nats "
            f"in the language-model loss when that was measured.",
            "candidates": rows,
        }
    beyond = [row["candidate"] for row in others if abs(row["difference"]) > row["noise limit"]]
    within = [row["candidate"] for row in others if row["candidate"] not in beyond]
    parts = [f"No difference beyond noise: {', '.join(within)}"] if within else []
    if beyond:
        parts.append(f"{'d' if parts else 'D'}ifferent from the baseline beyond noise: {', '.join(beyond)}")
    return {"sentence": f"{'; '.join(parts)} (one seed of the baseline deviates by {noise:.4f}).", "candidates": rows}


SEED_GAP = 0.03
"""Nats between two seeds of GQA with two groups after 300 steps (perplexities 120.7 and 124.4); of MHA 0.003."""
SHOWN = ("perplexity", "bits_per_byte", "instruction_loss", "kv_bytes_per_token", "parameters")


# ------------------------------------------------------------------------------------------------------- pieces


def _ids(data: Data) -> tuple[int, int]:
    return data.parts.vocabulary, data.parts.end


@functools.lru_cache(maxsize=512)
def _shape(genome: tuple[tuple[str, Any], ...], sizes: tuple[tuple[str, int], ...], vocabulary: int, end: int) -> Shape:
    values, size = dict(genome), dict(sizes)
    width, hidden = _untied_width(values, size, vocabulary, end)
    shape = _raw(values, size, vocabulary, end, width, hidden)
    kind = values.get("match", "none")
    if kind == "none":
        return shape
    context = round(size["context"] * float(values["train.context"]))
    measure = _measures(context)[str(kind)]
    reference = _raw({**values, "model.attention": "mha"}, size, vocabulary, end, width, hidden)
    matched = shape.matched(measure(reference), measure)
    if matched is None:
        raise Infeasible(f"no feed-forward width matches the {kind} of multi-head attention")
    return matched


def _measures(context: int) -> dict[str, Any]:
    return {"parameters": lambda s: float(s.count), "flops": lambda s: s.flops_per_token(context)}


def _untied_width(values: Mapping[str, Any], size: Mapping[str, int], vocabulary: int, end: int) -> tuple[int, int]:
    """(width, feed-forward width); for a matched untied model the widest that has the parameters of the tied one."""
    from auto_research.tasks.micro_language_model import feed_forward_width

    unit = 2 * size["heads"]
    width = unit * max(1, round(size["width"] * float(values["model.width"]) / unit))
    hidden = feed_forward_width(width)
    if values.get("match.untied", "none") == "none":
        return width, hidden
    target = _raw({**values, "model.tied": True}, size, vocabulary, end, width, hidden).count
    for narrower in range(width, 0, -unit):
        start = _raw(values, size, vocabulary, end, narrower, hidden)
        found = start.matched(float(target), lambda s: float(s.count))
        if found is not None and found.hidden >= narrower:
            return narrower, found.hidden
    raise Infeasible("no untied model has the parameters of the tied one")


def _raw(
    values: Mapping[str, Any], size: Mapping[str, int], vocabulary: int, end: int, width: int, hidden: int
) -> Shape:
    from auto_research.tasks.micro_language_model import Family, Shape

    attention, heads = values["model.attention"], size["heads"]
    families: dict[str, Family] = {"learned": "opt", "alibi": "falcon", "mla": "deepseek_v2", "sliding": "mistral"}
    plain: Family = "arcee" if values["model.ffn"] == "gelu" else "llama"
    groups = {"gqa": int(values.get("model.kv_heads", heads)), "mqa": 1}.get(attention, heads)
    if heads % groups:
        raise Infeasible(f"{heads} heads do not divide into {groups} groups of key and value heads")
    latent = attention == "mla"
    head_width = width // heads
    return Shape(
        family=families.get(values["model.position"]) or families.get(attention) or plain,
        vocabulary=vocabulary,
        width=width,
        layers=max(1, round(size["layers"] * float(values["model.layers"]))),
        heads=heads,
        kv_heads=groups,
        hidden=hidden,
        tied=bool(values["model.tied"]),
        # Instructions keep the budget's context whatever the text's is.
        positions=max(size["context"], round(size["context"] * float(values["train.context"]))),
        end=end,
        window=int(values["model.window"]) if attention == "sliding" else 0,
        # A quarter of the width; as wide as a head at four heads. The paper's 4 d_h is for 128 heads.
        latent=max(2, width // 4) if latent else 0,
        rotary=max(2, 2 * round(head_width / 4)) if latent else 0,
    )


def _recipe(rate: float, steps: int) -> Recipe:
    from auto_research.tasks.base import Recipe
    from auto_research.tasks.micro_language_model import warmup_share

    return Recipe(learning_rate=rate, warmup=warmup_share(steps), schedule="cosine")


def narrative_share(plan: Plan, step: int) -> float:
    """Share of narrative windows in batch `step`: constant, or falling linearly from the ratio to 0."""
    return plan.ratio * (1 - step / max(1, plan.steps - 1)) if plan.fading else plan.ratio


def text_batches(corpus: Corpus, plan: Plan, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of (ids, labels), (B, C) each. A recipe exchanges windows for narrative ones; the others stay equal."""
    import torch

    from auto_research.tasks.language_model import random_windows

    wiki, mixed = (torch.Generator().manual_seed(2 * seed + i) for i in range(2))
    for step in range(plan.steps):
        windows = random_windows(corpus.train, plan.batch, plan.context + 1, wiki)
        if plan.ratio:
            narrative = torch.rand(plan.batch, 1, generator=mixed) < narrative_share(plan, step)
            others = random_windows(corpus.narrative, plan.batch, plan.context + 1, mixed)
            windows = torch.where(narrative, others, windows)
        yield windows[:, :-1], windows[:, 1:]


def instruction_batches(rows: Sequence[Row], batch: int, end: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of (ids, labels) over shuffled rows, each once an epoch; only response tokens are labels."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while True:
        while len(order) < batch:
            order += torch.randperm(len(rows), generator=generator).tolist()
        chosen, order = order[:batch], order[batch:]
        yield _response_batch([rows[i] for i in chosen], end)


def _response_batch(rows: Sequence[Row], end: int) -> tuple[Tensor, Tensor]:
    from auto_research.tasks.micro_language_model import response_batch

    return response_batch([row.prompt for row in rows], [row.response for row in rows], end)


def _responses(corpus: Corpus) -> Tensor:
    import torch

    return torch.tensor([token for row in corpus.instructions["validation"] for token in row.response])


class noisy_embeddings:
    """Within it, training adds uniform(-1, 1) alpha / sqrt(L d) to the embeddings (L, d); evaluation has no noise.

    alpha 0 changes nothing. The noise is drawn from the global generator.
    """

    def __init__(self, model: Any, alpha: float) -> None:
        self.model, self.alpha = model, alpha
        self.handle: Any = None

    def __enter__(self) -> None:
        if self.alpha:
            from transformers.integrations.neftune import activate_neftune

            self.handle = activate_neftune(self.model, self.alpha)

    def __exit__(self, *error: object) -> None:
        if self.handle is not None:
            self.handle.remove()
            del self.model.get_input_embeddings().neftune_noise_alpha
