"""Möbius RoPE: anti-periodic rotary tables for a quarter of the heads (arXiv:2607.21405). Official code: none.

Idea. Small language models that differ in their seed alone differ wildly in in-context retrieval. Give one head in
four a rotary ladder whose planes all turn by odd multiples of pi over the training window N, so that R(N) = -I: the
two ends of the window are coupled, at no parameter and no operation. The claim is about the *variance over seeds*.

Implemented: the anti-periodic ladder, whole-group allocation, the band, periodic and NoPE controls, all heads, and
the frozen swap of the tables of a trained model. Deviates: a small model on WikiText-2 mixed with a weak in-context
recall objective and, in every arm, a short causal convolution on the embeddings, because a model of this size does not
learn retrieval from so little text alone.

Letters: B batch, T positions, H heads, D head width, P = D/2 planes, N design length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.attention import RotaryEmbedding
from auto_research.layers.transformer import CausalTransformer, init_transformer
from auto_research.runtime.device import device_for
from auto_research.study.compare import Comparison, Kind, Variant
from auto_research.study.context import Study
from auto_research.study.specimen import Specimen
from auto_research.study.verdict import Clause, fact, not_below
from auto_research.tasks.base import Batch, Evaluation, Mean, Ratio, Recipe, Split, UnitMetric
from auto_research.tasks.language_model import TokenisedText, consecutive_windows, random_windows, tokenise
from auto_research.tasks.recall import RecallVocabulary, most_distractors, recall_sequences

Ladder = Literal["mobius", "band", "periodic"]
BASE = 10_000.0
DEPTHS = 10
DISTRACTORS = (2, 3, 4)
"""Other pairs beside the needle, as many as fit."""
RECALL_PER_WINDOW = 4
"""Recall sequences of a batch for each of its windows of text."""
MIXING_STD = 0.7
"""Initial spread of the weights that mix the two tokens before into an embedding."""


# -- Tables ------------------------------------------------------------------------------------------------------


def standard_ladder(planes: int) -> Tensor:
    """theta_i = 10000^(-i/P), (P,) float32."""
    return BASE ** (-torch.arange(planes, dtype=torch.float32) / planes)


def special_ladder(kind: Ladder, planes: int, length: int, periodic_offset: int = 1) -> Tensor:
    """Frequencies (P,) of the special heads for the design length N.

    mobius    theta_i = pi (2i + 1) / N: R(N) = -I and R(2N) = +I (equations of section 3)
    band      the same lowest and highest frequency, geometric in between: no common period
    periodic  theta_i = 2 pi (i + offset) / N: R(N) = +I

    Raises `ValueError` when D > N, where the highest plane would alias.
    """
    if 2 * planes > length:
        raise ValueError(f"head width {2 * planes} exceeds the design length {length}; the ladder would alias")
    index = torch.arange(planes, dtype=torch.float64)
    odd = math.pi * (2 * index + 1) / length
    if kind == "mobius":
        ladder = odd
    elif kind == "band":
        ladder = odd[0] * (odd[-1] / odd[0]) ** (index / max(planes - 1, 1))
    elif kind == "periodic":
        ladder = 2 * math.pi * (index + periodic_offset) / length
    else:
        raise ValueError(f"ladder '{kind}' is none of mobius, band, periodic")
    return ladder.float()


def positional_kernel(ladder: Tensor, distance: Tensor) -> Tensor:
    """c(m) = mean over planes of cos(m theta_i): the score of equal queries and keys at distance m (M,)."""
    return torch.cos(distance.double()[:, None] * ladder.double()).mean(-1)


def head_ladders(config: MobiusConfig) -> Tensor:
    """Frequencies of all heads (H, P): special heads first, in whole key-value groups."""
    planes = config.dim // config.heads // 2
    ladders = standard_ladder(planes).repeat(config.heads, 1)
    special = config.share * config.heads
    group = config.heads // config.kv_heads
    if special != int(special) or int(special) % group:
        raise ValueError(
            f"{config.share:.0%} of {config.heads} heads does not fill whole key-value groups of {group} heads"
        )
    ladders[: int(special)] = special_ladder(config.ladder, planes, config.length, config.periodic_offset)
    return ladders


# -- Model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MobiusConfig:
    """One model. N = `length` belongs to the checkpoint: it is never rescaled to the input at hand.

    Attributes:
        share: share of the heads with the special ladder; 0 is the standard model, 1 gives it to all.
        ladder: what the special heads get; `band` and `periodic` are the controls.
        periodic_offset: first multiple of the periodic ladder (open in the paper).
        positions: False removes the rotation altogether (NoPE).
        recall_weight: weight of the recall loss beside the language-model loss.
    """

    vocabulary: int
    length: int = 64
    dim: int = 64
    heads: int = 4
    kv_heads: int = 4
    layers: int = 2
    share: float = 0.25
    ladder: Ladder = "mobius"
    periodic_offset: int = 1
    positions: bool = True
    recall_weight: float = 0.2


class MobiusLM(nn.Module):
    """Causal language model whose heads carry rotary ladders of their own; the tables are constant buffers."""

    def __init__(self, config: MobiusConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)  # tied with the output
        self.stack = CausalTransformer(
            config.dim,
            config.heads,
            2 * config.dim,
            config.layers,
            activation="swiglu",
            norm="rms",
            bias=False,
            kv_heads=config.kv_heads,
        )
        init_transformer(self, std=config.dim**-0.5)  # with 0.02 attention starts out nearly uniform at these widths
        self.taps = nn.Parameter(MIXING_STD * torch.randn(2, config.dim))
        self.rotary = RotaryEmbedding(config.dim // config.heads, frequencies=head_ladders(config))

    def mixed(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> embeddings (B, T, dim) to which the two before are added, scaled by coordinate.

        A depth-wise causal convolution, the same in all arms and no part of the paper: it hands a value the key two
        places before it. Two layers of attention alone did not learn that step within a small run.
        """
        x = self.embedding(tokens)
        one, two = (F.pad(x, (0, 0, back, 0))[:, : x.shape[1]] for back in (1, 2))
        return x + self.taps[0] * one + self.taps[1] * two

    def hidden(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> last hidden states (B, T, dim)."""
        return self.stack(self.mixed(tokens), rotary=self.rotary if self.config.positions else None)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., dim) -> logits over the vocabulary (..., V), float32 or wider."""
        return F.linear(hidden, self.embedding.weight).float()

    def scores(self, batch: Batch) -> Tensor:
        """Logits (B, V) of the answer to each recall sequence."""
        hidden = self.hidden(batch["recall"])
        rows = torch.arange(len(hidden), device=hidden.device)
        return self.logits(hidden[rows, batch["asked_at"]])

    def loss(self, batch: Batch) -> Tensor:
        """Next-token cross-entropy of the text plus the weighted cross-entropy of the recall answers."""
        text = batch["text"]
        language = F.cross_entropy(self.logits(self.hidden(text[:, :-1])).flatten(0, 1), text[:, 1:].flatten())
        recall = F.cross_entropy(self.scores(batch), batch["answer"])
        return language + self.config.recall_weight * recall

    def get_extra_state(self) -> Tensor:
        """N travels with the weights, whose tables are no part of a checkpoint."""
        return torch.tensor(self.config.length)

    def set_extra_state(self, state: Tensor) -> None:
        """Refuses weights of another N, which would load and silently be another model."""
        if int(state) != self.config.length:
            raise ValueError(
                f"these weights belong to the design length {int(state)}, not {self.config.length}; "
                f"build the model with length={int(state)}"
            )

    def swap_tables(self, ladders: Tensor) -> None:
        """Replaces the tables (H, P) and keeps the weights: the causal test on a trained model."""
        if ladders.shape != self.rotary.frequencies.shape:
            raise ValueError(f"tables {tuple(ladders.shape)} do not fit {tuple(self.rotary.frequencies.shape)}")
        self.rotary.frequencies.copy_(ladders)


# -- Task --------------------------------------------------------------------------------------------------------


@dataclass
class TextWithRecall:
    """Next-token prediction mixed with in-context recall; perplexity and needle accuracy on held-out text.

    Recall is evaluated at `DEPTHS` depths times the lengths N/4, N/2 and N, with fixed examples. Units are the
    recall examples; the windows of the text are dealt to them in turn.
    """

    text: TokenisedText
    symbols: int
    length: int
    examples: int
    windows: int
    name: str = "text-with-recall"
    primary: str = "recall"
    lower_is_better: frozenset[str] = frozenset({"perplexity"})
    fixed: dict[str, Batch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if most_distractors(self.lengths[0]) < DISTRACTORS[0]:
            raise ValueError(f"a quarter of {self.length} tokens does not hold {DISTRACTORS[0]} distractors")

    @property
    def vocabulary(self) -> RecallVocabulary:
        return RecallVocabulary(self.text.vocabulary, self.symbols)

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.length // 4, self.length // 2, self.length)

    def _recall(
        self, depth: Tensor, length: int, distractors: int, tokens: Tensor, generator: torch.Generator
    ) -> Batch:
        sequence, answer, needle = recall_sequences(
            depth, length, min(distractors, most_distractors(length)), tokens, self.vocabulary, generator
        )
        return {
            "recall": sequence,
            "asked_at": torch.full((len(depth),), length - 1),
            "answer": answer,
            "needle": needle,
        }

    def batches(self, seed: int, batch_size: int, device: torch.device) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            length = self.lengths[int(torch.randint(len(self.lengths), (1,), generator=generator))]
            distractors = DISTRACTORS[int(torch.randint(len(DISTRACTORS), (1,), generator=generator))]
            depth = torch.rand(batch_size, generator=generator)
            batch = self._recall(depth, length, distractors, self.text.train, generator)
            windows = max(1, batch_size // RECALL_PER_WINDOW)
            batch["text"] = random_windows(self.text.train, windows, self.length + 1, generator)
            yield {name: value.to(device) for name, value in batch.items()}

    def held_out(self, split: Split) -> Batch:
        """The fixed recall examples of a split, with the index of their depth and their length."""
        if split not in self.fixed:
            tokens = self.text.validation if split == "validation" else self.text.test
            generator = torch.Generator().manual_seed(20260723)
            parts = []
            each = max(1, self.examples // (DEPTHS * len(self.lengths)))
            for length in self.lengths:
                bins = torch.arange(DEPTHS).repeat_interleave(each)
                for first, distractors in enumerate(DISTRACTORS):
                    chosen = bins[first :: len(DISTRACTORS)]
                    part = self._recall(chosen / (DEPTHS - 1), length, distractors, tokens, generator)
                    # Padded on the right: causal attention never sees it.
                    part["recall"] = F.pad(part["recall"], (0, self.length - length))
                    part["depth"], part["length"] = chosen, torch.full_like(chosen, length)
                    parts.append(part)
            self.fixed[split] = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
        return self.fixed[split]

    @torch.no_grad()
    def evaluate(self, model: MobiusLM, split: Split, device: torch.device) -> Evaluation:  # type: ignore[override]
        batch = self.held_out(split)
        hit = self._hits(model, batch, device)
        tokens = self.text.validation if split == "validation" else self.text.test
        windows = consecutive_windows(tokens, self.length)[: self.windows]
        losses = []
        for chunk in windows.split(128):
            chunk = chunk.to(device)
            logits = model.logits(model.hidden(chunk[:, :-1]))
            loss = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten(), reduction="none")
            losses.append(loss.view(len(chunk), -1).sum(1).cpu())
        units = len(hit)
        unit = torch.arange(len(windows)) % units
        total = torch.zeros(units).index_add(0, unit, torch.cat(losses))
        count = torch.zeros(units).index_add(0, unit, torch.full((len(windows),), float(self.length)))
        nan = torch.tensor(float("nan"))
        far = batch["depth"] < DEPTHS // 3
        metrics: dict[str, UnitMetric] = {
            "recall": Mean(hit),
            "perplexity": Ratio(total, count, torch.exp),
            "far recall": Mean(hit.where(far, nan)),
            **{f"recall@{n}": Mean(hit.where(batch["length"] == n, nan)) for n in self.lengths},
        }
        seen = {f"recall at depth {d}/9": float(hit[batch["depth"] == d].mean()) for d in range(DEPTHS)}
        if model.config.share > 0:
            lost = hit - self.swapped_hits(model, batch, device)
            seen["recall lost by the table swap"] = float(lost.mean())
            seen["far recall lost by the table swap"] = float(lost[far].mean())
        return Evaluation(units, metrics, seen)

    @staticmethod
    def _hits(model: MobiusLM, batch: Batch, device: torch.device) -> Tensor:
        """1 where the answer is the most likely token (n,)."""
        hits = []
        for start in range(0, len(batch["answer"]), 256):
            chunk = {name: value[start : start + 256].to(device) for name, value in batch.items()}
            hits.append((model.scores(chunk).argmax(-1) == chunk["answer"]).float().cpu())
        return torch.cat(hits)

    def swapped_hits(self, model: MobiusLM, batch: Batch, device: torch.device) -> Tensor:
        """Hits (n,) of the same weights with standard tables in all heads; the model is left as it was."""
        own = model.rotary.frequencies.clone()
        model.swap_tables(standard_ladder(own.shape[1]).to(own).expand_as(own))
        try:
            return self._hits(model, batch, device)
        finally:
            model.swap_tables(own)


# -- Decision ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Accuracy over seeds of two arms: deviations, worst seeds and the Brown-Forsythe test of equal variance."""

    deviation: float
    standard_deviation: float
    worst: float
    standard_worst: float
    p_value: float

    @property
    def text(self) -> str:
        return (
            f"deviation {self.deviation:.3f} against {self.standard_deviation:.3f}, worst seed {self.worst:.3f} "
            f"against {self.standard_worst:.3f}, Brown-Forsythe p = {self.p_value:.3f}"
        )


def spread(arm: Sequence[float] | Tensor, standard: Sequence[float] | Tensor) -> Spread:
    """Compares the spread of two samples (S,) of accuracies.

    One seed has no spread; of two the deviations from the median are equal, so that the test is about three or more.
    """
    from scipy import stats

    one, two = (torch.as_tensor(x, dtype=torch.float64) for x in (arm, standard))
    p = float(stats.levene(one.numpy(), two.numpy(), center="median").pvalue) if min(len(one), len(two)) > 2 else 1.0
    of_arm, of_standard = (float(x.std()) if len(x) > 1 else 0.0 for x in (one, two))
    return Spread(of_arm, of_standard, float(one.min()), float(two.min()), 1.0 if math.isnan(p) else p)


def decide(comparison: Comparison) -> list[Clause]:
    """The sheet's rule: the worst seed rises and the variance falls (p < 0.05), band does not show it, perplexity
    stays within 0.5 %, and the design can tell (standard between 40 % and 90 %)."""
    standard = comparison.per_seed("standard", "recall")
    mobius = spread(comparison.per_seed("mobius 25%", "recall"), standard)
    smaller = mobius.deviation < mobius.standard_deviation
    clauses = [
        fact(
            "the worst seed of Möbius 25% is above the worst seed of standard",
            "holds" if mobius.worst > mobius.standard_worst else "reversed",
            mobius.text,
        ),
        fact(
            "recall varies less over seeds with Möbius 25% than with standard (p < 0.05)",
            "holds" if smaller and mobius.p_value < 0.05 else "undecided" if smaller else "reversed",
            mobius.text,
        ),
        not_below("mobius 25%", "standard", "perplexity", tolerance=0.005),
        fact(
            "standard recall lies between 40 % and 90 %, so that a difference can show",
            "holds" if 0.4 <= float(standard.mean()) <= 0.9 else "undecided",
            f"mean {float(standard.mean()):.3f}",
        ),
    ]
    if "band control" in comparison.trials:
        band = spread(comparison.per_seed("band control", "recall"), standard)
        shows = band.deviation < band.standard_deviation and band.p_value < 0.05
        clauses.insert(2, fact("the band control does not show it", "reversed" if shows else "holds", band.text))
    swaps = [t.test.diagnostics["recall lost by the table swap"] for t in comparison.trials["mobius 25%"]]
    clauses.append(
        fact(
            "swapping the trained tables for standard ones lowers recall",
            "holds" if min(swaps) > 0 else "undecided" if max(swaps) > 0 else "reversed",
            f"recall lost per seed {', '.join(f'{s:.3f}' for s in swaps)}",
            required=False,
        )
    )
    return clauses


def run(study: Study) -> Comparison:
    """Trains every arm at every seed on the same batches and compares the spread of recall over seeds."""
    device = device_for(study.device)
    parts = study.dataset("wikitext-2")
    if "train" not in parts:
        study.note("WikiText-2's training text is absent: nine tenths of its validation text are trained on instead")
    if study.budget == "smoke":
        most = study.size("characters", smoke=150_000, standard=150_000)
        parts = {name: part[:most] for name, part in parts.items()}
    text = tokenise(parts, study.size("vocabulary", smoke=512, standard=512, full=2048))
    length = study.size("length", smoke=64, standard=64, full=128)
    task = TextWithRecall(
        text,
        symbols=32,
        length=length,
        examples=study.size("examples", smoke=90, standard=1800, full=6000),
        windows=study.size("windows", smoke=50, standard=1000, full=8000),
    )
    hybrid = MobiusConfig(
        vocabulary=task.vocabulary.size,
        length=length,
        dim=study.size("width", smoke=32, standard=64, full=256),
        layers=study.size("layers", smoke=2, standard=2, full=4),
    )
    arms = {
        "standard": replace(hybrid, share=0.0),
        "mobius 25%": hybrid,
        "band control": replace(hybrid, ladder="band"),
        "periodic control": replace(hybrid, ladder="periodic"),
        "no positions": replace(hybrid, share=0.0, positions=False),
        "mobius 100%": replace(hybrid, share=1.0),
    }
    if study.budget == "smoke":
        arms = {name: arms[name] for name in ("standard", "mobius 25%")}
    kinds: dict[str, Kind] = {"mobius 25%": "method", "band control": "control", "periodic control": "control"}
    variants = [
        Variant(name, partial(MobiusLM, config), kind=kinds.get(name, "ablation")) for name, config in arms.items()
    ]
    comparison = study.compare(
        task,
        baseline=variants[0],
        candidates=variants[1:],
        steps=study.steps("train", smoke=20, standard=350, full=4000),
        device=device,
        # One look, at the end: a variance over seeds must not be shaped by early stopping.
        # All of it was chosen on the standard arm's validation recall, which must neither saturate nor fail.
        recipe=Recipe(learning_rate=3e-3, batch_size=32, validations=1, schedule="cosine"),
    )
    comparison.clauses = decide(comparison)
    return comparison


def specimens() -> list[Specimen]:
    """A tiny hybrid; its switches are the arms and the options."""
    config = MobiusConfig(vocabulary=60, length=16, dim=32, heads=4, layers=2)  # 4 planes: with 2, band is mobius
    generator = torch.Generator().manual_seed(0)
    vocabulary = RecallVocabulary(40, symbols=9)
    recall, answer, _ = recall_sequences(
        torch.linspace(0, 1, 6), 16, 2, torch.randint(40, (300,), generator=generator), vocabulary, generator
    )
    batch = {
        "recall": recall,
        "asked_at": torch.full((6,), 15),
        "answer": answer,
        "text": torch.randint(40, (6, 17), generator=generator),
    }

    def pad(batch: Batch) -> Batch:
        return {**batch, "recall": F.pad(batch["recall"], (0, 3))}

    def change_later(batch: Batch) -> Batch:
        longer = F.pad(batch["recall"], (0, 2), value=7)
        return {**batch, "recall": longer}

    switches = {
        "share=0": replace(config, share=0.0),
        "share=1": replace(config, share=1.0),
        "ladder=band": replace(config, ladder="band"),
        "ladder=periodic": replace(config, ladder="periodic"),
        "positions=False": replace(config, positions=False),
        "recall_weight=1": replace(config, recall_weight=1.0),
        "length=32": replace(config, length=32),
        "kv_heads=1": replace(config, kv_heads=1, share=1.0),
    }
    specimen = Specimen(
        name="hybrid",
        build=lambda: MobiusLM(config),
        batch=batch,
        shape=(6, 60),
        pad=pad,
        change_later=change_later,
        switches={name: partial(MobiusLM, c) for name, c in switches.items()},
    )
    periodic = replace(config, ladder="periodic")
    control = replace(
        specimen,
        name="periodic control",
        build=lambda: MobiusLM(periodic),
        switches={"periodic_offset=0": lambda: MobiusLM(replace(periodic, periodic_offset=0))},
    )
    return [specimen, control]
