"""RankMixer: Scaling Up Ranking Models in Industrial Recommenders (arXiv:2507.15551, ByteDance).

Official code: none.

The idea: cut all embedded fields into a few feature tokens; mix tokens by swapping slices of them, without parameters
or attention; give each token a feed-forward network of its own. Everything is a large dense product, and the networks
can be made sparse by ReLU-gated experts whose serving router is trained beside a dense one (DTSI).

Differs from the paper: MovieLens ratings instead of Douyin's logs, so one task tower (like) instead of several; AdamW
for all parameters instead of RMSProp and Adagrad; no statement about MFU or latency, which a CPU cannot support.

Letters: B examples, F width of all embedded fields, T tokens, D width of a token, k expansion of the feed-forward
networks, L blocks, E experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from auto_research.layers.attention import MultiHeadAttention
from auto_research.layers.experts import AdaptivePenalty, LoadMeter, ReLUExperts, Routing, TopKExperts
from auto_research.layers.token_mixing import MixerBlock, MixerTrunk, PerTokenFFN, TokenMixing
from auto_research.layers.towers import (
    DCNv2,
    FeatureEmbedding,
    Field,
    Pooling,
    ScoreMLP,
    forward_flops,
    matched_width,
    parameters_of,
)
from auto_research.layers.transformer import FeedForward
from auto_research.runtime.device import device_for
from auto_research.study.compare import Comparison, Kind, Variant
from auto_research.study.specimen import Specimen
from auto_research.study.verdict import Clause, beats, not_below
from auto_research.tasks.base import Batch, Recipe
from auto_research.tasks.click import ClickTask, PastMeans, Ranker, click_loss, miniature, pad_history

if TYPE_CHECKING:
    from auto_research.study.context import Study


@dataclass(frozen=True)
class RankMixerConfig:
    """Sizes and switches; the defaults are the standard run's dense model.

    Attributes:
        tokens, width, blocks, expansion: T, D, L, k.
        hidden: width of the feed-forward networks' hidden layer; 0 is k·D.
        field_width: columns of each group of fields, so that F = groups · field_width.
        mixing: `tokens` is the paper's; `attention` and `none` are ablations.
        ffn: `per-token` is the paper's dense form and `relu` its sparse one; `top-k` is the usual sparse one.
            `shared` is one network of the same hidden width for all tokens (equal FLOPs), `shared-wide` one of T times
            that (equal parameters).
        experts: E of each token, who share out the hidden width k·D, so that all of them together cost exactly the
            dense network.
        active: share of experts to be active: k/E of top-k, the budget of ReLU routing.
        routers: `two` is DTSI, `one` makes the router sparse that is trained.
        shared_router: one router for all tokens (the paper leaves this open; we take one a token).
        penalty_start, penalty_rate, penalty_limit: of the adaptive weight λ (the paper leaves its rule open).
        balance: weight of the balancing loss of top-k.
        residual, norm: the two ablations of the block.
        history: how the external sequence module pools the history.
    """

    tokens: int = 8
    width: int = 32
    blocks: int = 2
    expansion: int = 2
    hidden: int = 0
    field_width: int = 32
    mixing: Literal["tokens", "attention", "none"] = "tokens"
    ffn: Literal["per-token", "shared", "shared-wide", "top-k", "relu"] = "per-token"
    experts: int = 4
    active: float = 1.0
    routers: Literal["two", "one"] = "two"
    shared_router: bool = False
    penalty_start: float = 1e-5
    penalty_rate: float = 1.2
    penalty_limit: float = 3e-3
    balance: float = 0.0
    residual: bool = True
    norm: bool = True
    history: Pooling = "liked-mean"

    @property
    def sparse(self) -> bool:
        """Whether the feed-forward networks are routed experts."""
        return self.ffn in ("top-k", "relu")

    @property
    def hidden_width(self) -> int:
        """k·D, unless it is given."""
        return self.hidden or self.expansion * self.width

    @property
    def block_parameters(self) -> int:
        """The paper's size law: about 2·k·L·T·D² weights in the per-token networks (biases aside)."""
        return 2 * self.hidden_width * self.blocks * self.tokens * self.width

    @property
    def block_flops(self) -> int:
        """The paper's law for one sample forward: 4·k·L·T·D² (a multiplication and an addition a weight)."""
        return 2 * self.block_parameters


SIZES: dict[str, RankMixerConfig] = {
    "D16": RankMixerConfig(width=16),
    "D32": RankMixerConfig(),
    "D64": RankMixerConfig(width=64),
    "D128": RankMixerConfig(width=128, expansion=4),
}
"""Four sizes for a scaling curve at equal data; the paper prefers width over depth and tokens."""


class RankMixerTrunk(MixerTrunk):
    """Embedded fields -> T tokens -> L blocks -> mean over tokens -> task tower, as configured."""

    def __init__(self, inputs: int, config: RankMixerConfig) -> None:
        super().__init__(inputs, config.tokens, config.width, _blocks(config))


def _blocks(config: RankMixerConfig) -> Iterator[MixerBlock]:
    for _ in range(config.blocks):
        mixing, feed_forward = _mixing(config), _feed_forward(config)
        yield MixerBlock(config.width, mixing, feed_forward, residual=config.residual, norm=config.norm)


def _mixing(config: RankMixerConfig) -> nn.Module | None:
    if config.mixing == "attention":
        return MultiHeadAttention(config.width, heads=4)
    return TokenMixing() if config.mixing == "tokens" else None


def _feed_forward(config: RankMixerConfig) -> nn.Module:
    tokens, width, hidden = config.tokens, config.width, config.hidden_width
    if config.ffn == "shared":
        return FeedForward(width, hidden)
    if config.ffn == "shared-wide":
        return FeedForward(width, tokens * hidden)
    if config.ffn == "relu":
        return ReLUExperts(
            tokens, width, hidden, config.experts, routers=config.routers, shared_router=config.shared_router
        )
    if config.ffn == "top-k":
        k = max(1, round(config.active * config.experts))
        return TopKExperts(tokens, width, hidden, config.experts, k=k, shared_router=config.shared_router)
    return PerTokenFFN(tokens, width, hidden)


class RankMixer(Ranker):
    """The whole model over the fields of a ranking task; `liked` is the smallest rating code that counts as liked."""

    trunk: RankMixerTrunk

    def __init__(self, fields: Sequence[Field], config: RankMixerConfig, *, liked: int = 8) -> None:
        features = FeatureEmbedding(fields, config.field_width, history=config.history, liked=liked)
        super().__init__(features, RankMixerTrunk(features.width, config))
        self.config = config
        self.penalty = AdaptivePenalty(
            config.active, start=config.penalty_start, rate=config.penalty_rate, limit=config.penalty_limit
        )
        self._seen_active: Tensor | None = None
        self._meter = LoadMeter()

    def loss(self, batch: Batch) -> Tensor:
        """Binary cross-entropy; with DTSI of both routers, plus λ times the inference router's penalty."""
        config, label = self.config, batch["label"]
        if not config.sparse:
            return click_loss(self.scores(batch), label)
        e = self.features(batch)
        serving = Routing("infer")
        loss = click_loss(self.trunk(e, serving), label)
        if config.ffn == "top-k":
            return loss + config.balance * serving.penalty()
        self._seen_active = serving.active_ratio()
        if config.routers == "two":
            # A second pass through the same experts: dense training beside sparse inference.
            loss = loss + click_loss(self.trunk(e, Routing("train")), label)
        return loss + self.penalty(serving.penalty())

    def scores(self, batch: Batch) -> Tensor:
        """Logit of a like (B,); the inference router alone decides which experts take part."""
        e = self.features(batch)
        if not self.config.sparse:
            return self.trunk(e)
        routing = Routing("infer")
        logit = self.trunk(e, routing)
        if not self.training:
            self._meter.add(routing)
        return logit

    def on_step_end(self, step: int) -> None:
        """Steers λ by the active ratio of the batch that was just trained on."""
        if self._seen_active is not None:
            self.penalty.update(self._seen_active)

    def start_report(self) -> None:
        """Forgets the expert load counted so far."""
        self._meter = LoadMeter()

    def report(self) -> dict[str, float]:
        """Load of the experts since `start_report`, λ, and the FLOPs that active experts leave."""
        if not self.config.sparse:
            return {}
        load = self._meter.report()
        saved = (1 - load["active ratio"]) * self.config.block_flops
        flops = {"active flops": self.logged["flops"] - saved} if "flops" in self.logged else {}
        return {**load, **flops, "penalty weight": float(self.penalty.weight)}


# -- the comparison ------------------------------------------------------------------------------------------------

DENSE = "rankmixer"
SHARED_FLOPS = "shared ffn, equal flops"
SHARED_PARAMETERS = "shared ffn, equal parameters"
NO_MIXING = "no mixing"
ATTENTION = "self-attention"
RATIOS = {"1": 1.0, "1/2": 0.5, "1/4": 0.25}
TOP_K = {ratio: f"top-k {ratio}" for ratio in RATIOS}
DTSI = {ratio: f"relu + dtsi {ratio}" for ratio in RATIOS}


def decision_rule() -> list[Clause]:
    """Dense and sparse direction; the equal-parameter control is reported and decides nothing."""
    dense = [
        beats(DENSE, SHARED_FLOPS, "auc"),
        beats(DENSE, NO_MIXING, "auc"),
        not_below(DENSE, ATTENTION, "auc", tolerance=0.001),
        beats(DENSE, SHARED_PARAMETERS, "auc", required=False),
    ]
    sparse = [
        not_below(DTSI["1/4"], DTSI["1"], "auc", tolerance=0.001),
        beats(DTSI["1/4"], TOP_K["1/4"], "auc"),
    ]
    return [replace(c, text=f"dense direction: {c.text}") for c in dense] + [
        replace(c, text=f"sparse direction: {c.text}") for c in sparse
    ]


def variants(task: ClickTask, config: RankMixerConfig) -> list[Variant]:
    """Arms a to h of the protocol, the parameter-matched DLRM-MLP (the baseline) first."""
    sample = task.rows(task.train[:8], torch.device("cpu"))

    def tower(trunk: Callable[[int, int], nn.Module], width: int) -> Ranker:
        features = FeatureEmbedding(task.fields, config.field_width, history=config.history, liked=task.liked_code)
        return Ranker(features, trunk(features.width, width))

    def mixer(**changes: object) -> Callable[[], Ranker]:
        changed = replace(config, **changes)  # type: ignore[arg-type]
        return lambda: RankMixer(task.fields, changed, liked=task.liked_code)

    def arm(name: str, build: Callable[[], Ranker], kind: Kind, note: str) -> Variant:
        def priced() -> Ranker:
            model = build()
            embedded = sum(p.numel() for p in model.features.parameters())
            total = sum(p.numel() for p in model.parameters())
            model.logged = {
                "flops": forward_flops(lambda: model.scores(sample)) / len(sample["label"]),
                "parameters without embeddings": total - embedded,
            }
            return model

        return Variant(name, priced, kind=kind, note=note)

    target = parameters_of(mixer())

    def matched(trunk: Callable[[int, int], nn.Module]) -> Callable[[], Ranker]:
        width = matched_width(lambda w: parameters_of(lambda: tower(trunk, w)), target)
        return lambda: tower(trunk, width)

    return [
        arm("dlrm-mlp", matched(lambda inputs, w: ScoreMLP(inputs, w, w)), "baseline", "parameter-matched"),
        arm("dcn-v2", matched(lambda inputs, w: DCNv2(inputs, w, w, rank=w)), "control", "parameter-matched"),
        arm(SHARED_FLOPS, mixer(ffn="shared"), "ablation", "one network for all tokens, hidden k·D"),
        arm(SHARED_PARAMETERS, mixer(ffn="shared-wide"), "control", "one network for all tokens, hidden T·k·D"),
        arm(NO_MIXING, mixer(mixing="none"), "ablation", "tokens meet in the read-out alone"),
        arm(ATTENTION, mixer(mixing="attention"), "control", "more parameters and FLOPs"),
        arm(DENSE, mixer(), "method", "token mixing, per-token networks"),
        *(
            arm(TOP_K[ratio], mixer(ffn="top-k", active=share), "control", "private experts, plain top-k")
            for ratio, share in RATIOS.items()
        ),
        *(
            arm(DTSI[ratio], mixer(ffn="relu", active=share), "method", "private experts, two ReLU routers")
            for ratio, share in RATIOS.items()
        ),
        Variant("past means", PastMeans, kind="floor", note="user mean + item mean, no training"),
    ]


def specimens() -> list[Specimen]:
    """Tiny instances of the dense and both sparse models, with every option switched once."""
    task = miniature()
    batch = task.rows(task.train[::6], torch.device("cpu"))
    tiny = RankMixerConfig(width=16, field_width=8)

    def of(config: RankMixerConfig) -> Callable[[], RankMixer]:
        return lambda: RankMixer(task.fields, config, liked=task.liked_code)

    def specimen(name: str, config: RankMixerConfig, switches: dict[str, dict[str, object]]) -> Specimen:
        return Specimen(
            name,
            of(config),
            batch,
            shape=(len(batch["label"]),),
            pad=pad_history,
            # The only thing in a batch that is not earlier than the score.
            change_later=lambda b: {**b, "label": 1 - b["label"]},
            switches={title: of(replace(config, **changes)) for title, changes in switches.items()},  # type: ignore[arg-type]
        )

    return [
        specimen(
            "dense",
            tiny,
            {
                "tokens = 4": {"tokens": 4},
                "width = 32": {"width": 32},
                "blocks = 1": {"blocks": 1},
                "expansion = 3": {"expansion": 3},
                "mixing = attention": {"mixing": "attention"},
                "mixing = none": {"mixing": "none"},
                "ffn = shared": {"ffn": "shared"},
                "ffn = shared-wide": {"ffn": "shared-wide"},
                "ffn = top-k": {"ffn": "top-k"},
                "ffn = relu": {"ffn": "relu"},
                "residual = false": {"residual": False},
                "norm = false": {"norm": False},
                "history = mean": {"history": "mean"},
                "history = din": {"history": "din"},
            },
        ),
        specimen(
            "relu + dtsi",
            replace(tiny, ffn="relu", active=0.5),
            {
                "routers = one": {"routers": "one"},
                "shared_router = true": {"shared_router": True},
                "experts = 8": {"experts": 8},
                "penalty_start = 1e-2": {"penalty_start": 1e-2},
            },
        ),
        specimen(
            "top-k",
            replace(tiny, ffn="top-k", active=0.5),
            {"active = 1/4": {"active": 0.25}, "balance = 0.1": {"balance": 0.1}},
        ),
    ]


def run(study: Study) -> Comparison:
    """Trains arms a to h on explicit feedback and applies the decision rule."""
    device = device_for(study.device)
    with study.stage("features", trains=False):
        interactions = study.dataset("ml-1m" if study.budget == "full" else None)
        interactions = interactions.subset_users(study.size("users", smoke=120, standard=10_000), seed=0)
        task = ClickTask(
            interactions,
            history_length=32,
            catalogue_users=study.size("catalogue users", smoke=1, standard=40),
        )
    if interactions.users is None:
        study.note(f"{interactions.name} has no demographics: the profile group is absent and slices shift")
    config = RankMixerConfig(width=study.size("width", smoke=32, standard=32, full=64))
    baseline, *candidates = variants(task, config)
    return study.compare(
        task,
        baseline=baseline,
        candidates=candidates,
        steps=study.steps("ranker", smoke=12, standard=400, full=4000),  # 2.5 passes over ML-100K and over ML-1M
        device=device,
        recipe=Recipe(
            batch_size=study.size("batch", smoke=128, standard=512),
            validations=study.size("validations", smoke=1, standard=4),
        ),
        learning_rates=(1e-3,) if study.budget == "smoke" else (1e-3, 3e-3),
        clauses=decision_rule(),
    )
