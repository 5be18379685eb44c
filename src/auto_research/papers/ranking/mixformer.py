"""MixFormer: Co-Scaling Up Dense and Sequence in Industrial Recommenders (arXiv:2602.14110, ByteDance).

Official code: none.

The idea: one kind of block in which N feature heads first exchange slices without parameters, then read the behaviour
sequence, each head being itself the query of its own attention, then pass a network of their own; so every further
block crosses heads that already carry sequence evidence. A mask on the exchange keeps the user's heads free of the
candidate, so that they are computed once a request.

Differs from the paper: MovieLens ratings instead of Douyin's logs, so one task (like) instead of Finish and Skip;
AdamW for all parameters; hidden widths, the alignment of events and the task network are choices (see the card).

Letters: N heads of width D, T events, L blocks, R requests with C candidates each, B examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.attention import MultiHeadAttention, attend, padding_mask
from auto_research.layers.heads import binary_task_losses
from auto_research.layers.history import HistoryFeatures
from auto_research.layers.token_mixing import GroupedLinear, MixerTrunk, PerTokenFFN, dense_blocks, mix_tokens
from auto_research.layers.towers import MLP, FeatureEmbedding, Field, ScoreMLP, matched_pair
from auto_research.layers.transformer import CrossAttentionBlock, FeedForward, make_norm
from auto_research.runtime.device import device_for
from auto_research.study.compare import Comparison, Kind, Variant
from auto_research.study.scaling import scaling_curve
from auto_research.study.specimen import Specimen
from auto_research.study.verdict import Clause, Compare, State, any_of, beats, not_below
from auto_research.tasks.base import Batch, Recipe
from auto_research.tasks.click import GAPS, RATINGS, ClickTask, PastMeans, pad_history
from auto_research.tasks.request_clicks import RequestClicks, miniature_requests
from auto_research.tasks.request_cost import RequestCost, measure_requests, priced, scoring_cost

if TYPE_CHECKING:
    from auto_research.study.context import Study


@dataclass(frozen=True)
class MixFormerConfig:
    """Sizes and switches; the defaults are the standard run's model.

    Attributes:
        heads, width, blocks: N (even), D (a multiple of N), L.
        expansion: hidden width of every SwiGLU over its input's width.
        history: T, the latest events that are read.
        field_width, event_width: columns of a group of fields, and of the rating's and gap's vector of an event.
        alignment: how an event's features get the width N·D, by one linear map or by an `mlp` of one hidden layer.
        mixing: `heads` is the paper's exchange of slices; `attention` among heads and `none` are ablations.
        mixer_ffn: whether a network of each head follows the exchange.
        sequence_ffn: one for each block (the paper) or `shared` by all.
        fusion_ffn: one for each head (the paper) or `shared` by all heads of a block.
        query_norm: whether queries are normalised before attention (as the figure draws it; the equations do not).
        read_out: the tower reads the final heads side by side (`flatten`) or their `mean`.
        decoupled: UI-MixFormer's mask, which keeps the first half of the heads free of the candidate.
    """

    heads: int = 4
    width: int = 8
    blocks: int = 2
    expansion: int = 2
    history: int = 50
    field_width: int = 16
    event_width: int = 8
    alignment: Literal["linear", "mlp"] = "linear"
    mixing: Literal["heads", "attention", "none"] = "heads"
    mixer_ffn: bool = True
    sequence_ffn: Literal["per-layer", "shared"] = "per-layer"
    fusion_ffn: Literal["per-head", "shared"] = "per-head"
    query_norm: bool = False
    read_out: Literal["flatten", "mean"] = "flatten"
    decoupled: bool = False

    def __post_init__(self) -> None:
        if self.heads % 2 or self.width % self.heads:
            raise ValueError(f"heads {self.heads} must be even and divide the width {self.width}")
        if self.decoupled and self.mixing == "attention":
            raise ValueError("the mask of decoupled acts on the exchange of slices, not on attention among heads")

    @property
    def sequence_width(self) -> int:
        """N·D, width of an aligned event."""
        return self.heads * self.width


# -- inputs --------------------------------------------------------------------------------------------------------


class SequenceInput(nn.Module):
    """The raw aligned sequence S (B, T, width): each event's [item; genres; rating; gap] mapped to one width."""

    def __init__(self, features: FeatureEmbedding, config: MixFormerConfig, width: int) -> None:
        super().__init__()
        self.events = HistoryFeatures(features, ratings=RATINGS, gaps=GAPS, width=config.event_width)
        hidden = (width,) if config.alignment == "mlp" else ()
        self.align = MLP(self.events.width, *hidden, width, activation="gelu")
        self.history = config.history

    def forward(self, features: FeatureEmbedding, batch: Batch) -> tuple[Tensor, Tensor]:
        """-> S (B, T, width) and which events are real (B, T); only the latest `history` events are read."""
        latest = {name: v[:, -self.history :] for name, v in batch.items() if name.startswith("history_")}
        return self.align(self.events(features, latest)), latest["history_item"] > 0


class HeadInput(nn.Module):
    """All other fields cut into N equal slices, each with a map of its own to a head.

    The request's fields fill the first half of the heads and the candidate's the second; the shorter side is padded.
    """

    def __init__(self, request: Sequence[Field], candidate: Sequence[Field], config: MixFormerConfig) -> None:
        super().__init__()
        self.request = FeatureEmbedding(request, config.field_width)
        self.candidate = FeatureEmbedding(candidate, config.field_width)
        self.half = config.heads // 2
        self.slice = -(-max(self.request.width, self.candidate.width) // self.half)
        self.split = GroupedLinear(config.heads, self.slice, config.width)

    def request_heads(self, batch: Batch) -> Tensor:
        """(B, N/2, D)."""
        return self._heads(self.request(batch), slice(None, self.half))

    def candidate_heads(self, batch: Batch) -> Tensor:
        """Fields (B, ...), or (R, C, ...) of requests -> (B or R·C, N/2, D)."""
        return self._heads(self.candidate(batch).flatten(0, -2), slice(self.half, None))

    def _heads(self, e: Tensor, part: slice) -> Tensor:
        e = F.pad(e, (0, self.half * self.slice - e.shape[1]))
        return self.split(e.unflatten(-1, (self.half, self.slice)), part)


# -- the block -----------------------------------------------------------------------------------------------------


def decoupling_mask(heads: int, width: int) -> Tensor:
    """M (N, D) bool: False where a request head (the first half) would receive a slice of a candidate head."""
    head, column = torch.arange(heads)[:, None], torch.arange(width)
    return ~((head < heads // 2) & (column >= heads // 2 * (width // heads)))


class SequenceNetwork(nn.Module):
    """h_t = SwiGLU(Norm(s_t)) + s_t for every event: (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = make_norm("rms", width)
        self.network = FeedForward(width, hidden, activation="swiglu")

    def forward(self, s: Tensor) -> Tensor:
        return self.network(self.norm(s)) + s


class SequenceReader(nn.Module):
    """What a block makes of S: its own network, then keys and values of each head from that head's slice."""

    def __init__(self, config: MixFormerConfig, network: SequenceNetwork) -> None:
        super().__init__()
        self.network = network
        self.norm = make_norm("rms", config.sequence_width)
        self.heads = config.heads
        self.key_value = GroupedLinear(config.heads, config.width, 2 * config.width, bias=False)

    def forward(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """S (B, T, N·D) -> keys and values (B, N, T, D)."""
        h = self.norm(self.network(s))
        both = self.key_value(h.flatten(0, 1).unflatten(-1, (self.heads, -1)))
        key, value = both.unflatten(0, s.shape[:2]).transpose(1, 2).chunk(2, dim=-1)
        return key, value


class MixFormerBlock(nn.Module):
    """Query mixer, cross-attention with one query a head, output fusion.

    Each step takes the heads in `part` alone where a request's and a candidate's heads go separate ways.
    """

    mask: Tensor | None

    def __init__(self, config: MixFormerConfig, sequence_network: SequenceNetwork) -> None:
        super().__init__()
        heads, width, hidden = config.heads, config.width, config.expansion * config.width
        self.mixing = config.mixing
        self.mixer_norm = nn.Identity() if config.mixing == "none" else make_norm("rms", width)
        self.attention = MultiHeadAttention(width, heads) if config.mixing == "attention" else None
        self.register_buffer("mask", decoupling_mask(heads, width) if config.decoupled else None, persistent=False)
        self.mixer_ffn_norm = make_norm("rms", width) if config.mixer_ffn else nn.Identity()
        self.mixer_ffn = PerTokenFFN(heads, width, hidden, "swiglu") if config.mixer_ffn else None
        self.reader = SequenceReader(config, sequence_network)
        self.query_norm = make_norm("rms", width) if config.query_norm else nn.Identity()
        self.fusion_norm = make_norm("rms", width)
        self.fusion_ffn: nn.Module = (
            PerTokenFFN(heads, width, hidden, "swiglu")
            if config.fusion_ffn == "per-head"
            else FeedForward(width, hidden, activation="swiglu")
        )

    def mix(self, x: Tensor, part: slice = slice(None)) -> Tensor:
        """Queries (B, n, D) of the heads in `part` from all heads x (B, N, D)."""
        p = self._exchange(x)[:, part] + x[:, part] if self.mixing != "none" else x[:, part]
        return p if self.mixer_ffn is None else self.mixer_ffn(self.mixer_ffn_norm(p), part) + p

    def _exchange(self, x: Tensor) -> Tensor:
        y = self.mixer_norm(x)
        if self.attention is not None:
            return self.attention(y)
        mixed = mix_tokens(y)
        return mixed if self.mask is None else mixed * self.mask

    def read(self, q: Tensor, key: Tensor, value: Tensor, valid: Tensor, part: slice = slice(None)) -> Tensor:
        """z_i = Σ_t α_it v_t^i + q_i for q (R·C, n, D), with keys and values (R, N, T, D), valid (R, T), of requests.

        The candidates of a request are further queries of its head, so that nothing of the request is repeated.
        """
        query = self.query_norm(q).unflatten(0, (len(key), -1)).transpose(1, 2)  # (R, n, C, D)
        found = attend(query, key[:, part], value[:, part], padding_mask(valid))
        return found.transpose(1, 2).flatten(0, 1) + q

    def fuse(self, z: Tensor, part: slice = slice(None)) -> Tensor:
        """o_i = SwiGLU_i(Norm(z_i)) + z_i, (B, n, D)."""
        y = self.fusion_norm(z)
        return (self.fusion_ffn(y, part) if isinstance(self.fusion_ffn, PerTokenFFN) else self.fusion_ffn(y)) + z

    def forward(self, x: Tensor, s: Tensor, valid: Tensor) -> Tensor:
        """Heads (B, N, D), sequence (B, T, N·D), valid (B, T) -> heads (B, N, D)."""
        key, value = self.reader(s)
        return self.fuse(self.read(self.mix(x), key, value, valid))


# -- the model -----------------------------------------------------------------------------------------------------


@dataclass
class RequestSide:
    """What the candidates of a request share.

    Attributes:
        keys_values: of each block, (R, N, T, D) both.
        valid: which events are real (R, T).
        heads: the request's heads (R, N/2, D) before the first block and, when decoupled, after each.
    """

    keys_values: list[tuple[Tensor, Tensor]]
    valid: Tensor
    heads: list[Tensor]


class MixFormer(nn.Module):
    """The whole model: heads and sequence, L blocks, and a tower over the final heads."""

    shares_requests = True

    def __init__(self, request: Sequence[Field], candidate: Sequence[Field], config: MixFormerConfig) -> None:
        super().__init__()
        self.config = config
        wide = config.sequence_width
        self.inputs = HeadInput(request, candidate, config)
        self.sequence = SequenceInput(self.inputs.candidate, config, wide)

        def network() -> SequenceNetwork:
            return SequenceNetwork(wide, config.expansion * wide)

        one = network() if config.sequence_ffn == "shared" else None
        self.blocks = nn.ModuleList(MixFormerBlock(config, one or network()) for _ in range(config.blocks))
        self.norm = make_norm("rms", config.width)
        self.tower = ScoreMLP(wide if config.read_out == "flatten" else config.width, wide)
        self.logged: dict[str, float] = {}
        self._moved: Tensor | None = None
        self._watching = False

    def heads(self, batch: Batch) -> Tensor:
        """X (B, N, D), request heads first."""
        return torch.cat([self.inputs.request_heads(batch), self.inputs.candidate_heads(batch)], dim=1)

    def states(self, batch: Batch) -> list[Tensor]:
        """Heads after every block, (B, N, D) each."""
        s, valid = self.sequence(self.inputs.candidate, batch)
        found = [self.heads(batch)]
        for block in self.blocks:
            found.append(block(found[-1], s, valid))
        return found[1:]

    def _read_out(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.tower(x.flatten(1) if self.config.read_out == "flatten" else x.mean(1))

    def scores(self, batch: Batch) -> Tensor:
        """Logit of a like: (R, C) of requests, each read once, or (B,) of examples that share nothing."""
        if self._watching:
            self._moved, self._watching = self.invariance_error(batch), False
        if batch["item"].dim() == 1:
            return self._read_out(self.states(batch)[-1])
        return self.candidate_scores(self.request_side(batch), batch).view_as(batch["item"])

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy, a float32 scalar."""
        return like_loss(self.scores(batch), batch["label"])

    # -- one request, many candidates --

    def request_side(self, batch: Batch) -> RequestSide:
        """Keys and values of every block; when decoupled the request's heads through all blocks as well."""
        s, valid = self.sequence(self.inputs.candidate, batch)
        side = RequestSide([block.reader(s) for block in self.blocks], valid, [self.inputs.request_heads(batch)])
        if self.config.decoupled:
            part = slice(None, self.inputs.half)
            for block, kept in zip(self.blocks, side.keys_values, strict=True):
                x = side.heads[-1]
                # What candidate heads would send is masked; zeros stand in for them.
                q = block.mix(torch.cat([x, torch.zeros_like(x)], dim=1), part)
                side.heads.append(block.fuse(block.read(q, *kept, valid, part), part))
        return side

    def candidate_scores(self, side: RequestSide, batch: Batch) -> Tensor:
        """(R·C,): all heads pass the blocks, or when decoupled the candidate's heads alone."""
        own = self.inputs.candidate_heads(batch)
        times = len(own) // len(side.valid)
        shared = [x[:, None].expand(-1, times, -1, -1).flatten(0, 1) for x in side.heads]
        x, part = torch.cat([shared[0], own], dim=1), slice(None)
        if self.config.decoupled:
            part = slice(self.inputs.half, None)
        for i, (block, kept) in enumerate(zip(self.blocks, side.keys_values, strict=True)):
            x = block.fuse(block.read(block.mix(x, part), *kept, side.valid, part), part)
            if self.config.decoupled:
                x = torch.cat([shared[i + 1], x], dim=1)
        return self._read_out(x)

    # -- whether request heads keep free of the candidate --

    @torch.no_grad()
    def invariance_error(self, batch: Batch, rows: int = 64) -> Tensor:
        """Largest change of a request head, in any block, when the first `rows` requests exchange their candidates."""
        some = {name: value[:rows] for name, value in batch.items()}
        names = [field.name for field in self.inputs.candidate.fields]
        if some["item"].dim() == 2:
            some |= {name: some[name][:, 0] for name in names}
        other = some | {name: some[name].roll(1, 0) for name in names}
        half = self.inputs.half
        moved = [(x - y)[:, :half].abs().max() for x, y in zip(self.states(some), self.states(other), strict=True)]
        return torch.stack(moved).max()

    def start_report(self) -> None:
        """Asks for the invariance error of the next batch that is scored."""
        self._moved, self._watching = None, True

    def report(self) -> dict[str, float]:
        """The invariance error; exactly 0 when decoupled."""
        return {} if self._moved is None else {INVARIANCE: float(self._moved)}


INVARIANCE = "invariance error"


def like_loss(logit: Tensor, label: Tensor) -> Tensor:
    """Mean binary cross-entropy of logits against labels of the same shape, NaN where there is no candidate."""
    return binary_task_losses({"like": logit.float()}, {"like": label})["like"]


class Stacked(nn.Module):
    """The usual way: target attention over the sequence, as many layers as the method has blocks, feeds a RankMixer.

    The target is one vector of all fields. It reads S in every layer, behind a sequence network of that layer's own,
    and is half as wide as the method's sequence: at full width it would leave the RankMixer nothing of the budget. A
    request's sequence is read once here, too.

    Args:
        sequence_hidden, mixer_hidden: hidden widths by which parameters and FLOPs are matched.
        parallel: the RankMixer does not see what was read; the tower alone joins both.
    """

    shares_requests = True

    def __init__(
        self,
        request: Sequence[Field],
        candidate: Sequence[Field],
        config: MixFormerConfig,
        sequence_hidden: int,
        mixer_hidden: int,
        *,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        wide, width, heads, blocks = config.sequence_width // 2, config.width, config.heads, config.blocks
        self.request, self.candidate = (FeatureEmbedding(fields, config.field_width) for fields in (request, candidate))
        inputs = self.request.width + self.candidate.width
        self.sequence = SequenceInput(self.candidate, config, wide)
        self.target = nn.Linear(inputs, wide)
        self.networks = nn.ModuleList(SequenceNetwork(wide, sequence_hidden) for _ in range(blocks))
        self.readers = nn.ModuleList(
            CrossAttentionBlock(wide, heads, wide, activation="swiglu", norm="rms") for _ in range(blocks)
        )
        trunk = dense_blocks(heads, width, mixer_hidden, blocks)
        if parallel:
            self.mixer = MixerTrunk(inputs, heads, width, trunk, nn.Identity())
            self.tower: ScoreMLP | None = ScoreMLP(width + wide, width)
        else:
            self.mixer, self.tower = MixerTrunk(inputs + wide, heads, width, trunk), None
        reading = (self.sequence, self.target, self.networks, self.readers)
        self.logged: dict[str, float] = {
            "parameters of target attention": sum(p.numel() for part in reading for p in part.parameters()),
            "parameters of the rankmixer": sum(p.numel() for p in self.mixer.parameters()),
        }

    def scores(self, batch: Batch) -> Tensor:
        """Logit of a like: (R, C) of requests, or (B,) of examples that share nothing."""
        return self.candidate_scores(self.request_side(batch), batch).view_as(batch["item"])

    def request_side(self, batch: Batch) -> tuple[Tensor, list[Tensor], Tensor]:
        """The request's fields (R, F), each layer's sequence (R, T, width), and the mask of real events."""
        s, valid = self.sequence(self.candidate, batch)
        return self.request(batch), [network(s) for network in self.networks], padding_mask(valid)

    def candidate_scores(self, side: tuple[Tensor, list[Tensor], Tensor], batch: Batch) -> Tensor:
        """(R·C,): the candidates of a request are so many queries of its sequence."""
        shared, memories, mask = side
        own = self.candidate(batch)
        own = own.view(len(shared), -1, own.shape[-1])
        e = torch.cat([shared[:, None].expand(-1, own.shape[1], -1), own], dim=-1)
        x = self.target(e)  # (R, C, width)
        for reader, memory in zip(self.readers, memories, strict=True):
            x = reader(x, memory, mask)
        e, x = e.flatten(0, 1), x.flatten(0, 1)
        if self.tower is not None:
            return self.tower(torch.cat([self.mixer(e), x], dim=-1))
        return self.mixer(torch.cat([e, x], dim=-1))

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy, a float32 scalar."""
        return like_loss(self.scores(batch), batch["label"])


# -- the comparison ------------------------------------------------------------------------------------------------

METHOD = "mixformer"
STACKED = "stacked"
PARALLEL = "parallel"
NO_MIXING = "no head mixing"
ATTENTION = "self-attention among heads"
SHARED_SEQUENCE = "one sequence ffn for all blocks"
SHARED_FUSION = "one fusion ffn for all heads"
DECOUPLED = "ui-mixformer"
LENGTHS = (10, 100)
"""Histories of the co-scaling sweep beside the method's own 50."""
WIDTHS = (4, 12, 16)
"""Widths of the scaling curve beside the method's own 8."""

Pairs = dict[int, tuple[str, str]]
"""History length -> names of the method and of its stacked control at this length."""


def decoupling(cost: RequestCost, invariance: float) -> Clause:
    """UI-MixFormer loses no more than 0.1 % of AUC, its request heads never move, and sharing saves over 30 %."""
    quality = not_below(DECOUPLED, METHOD, "auc", tolerance=0.001)
    shares = invariance == 0 and cost.packed_flops < 0.7 * cost.plain_flops

    def decide(compare: Compare) -> tuple[State, str]:
        state, detail = quality.decide(compare)
        return state if shares else "reversed", f"{detail}; largest change of a request head {invariance:.1e}; {cost}"

    text = (
        f"decoupling: {quality.text}, its request heads do not move with the candidate, and sharing takes more than"
        " 30% off the FLOPs of 100 candidates"
    )
    return Clause(text, decide, required=False)


def co_scaling(pairs: Pairs, metric: str = "auc") -> Clause:
    """The gain over stacked does not shrink as the history grows.

    Holds when no mean gain is below that of the next shorter history, is reversed when the longest history's interval
    lies below the shortest's.
    """
    lengths = sorted(pairs)

    def decide(compare: Compare) -> tuple[State, str]:
        gains = [compare(*pairs[length], metric) for length in lengths]
        means = [d.mean for d in gains]
        state: State = (
            "holds" if means == sorted(means) else "reversed" if gains[-1].high < gains[0].low else "undecided"
        )
        shown = (f"T {n}: {d.mean:+.5f} [{d.low:+.5f}, {d.high:+.5f}]" for n, d in zip(lengths, gains, strict=True))
        return state, f"gain over stacked on {metric}: {', '.join(shown)}"

    text = f"co-scaling: the mean gain over stacked does not shrink from {lengths[0]} to {lengths[-1]} events"
    return Clause(text, decide, required=False)


def decision_rule(scales: dict[str, float], pairs: Pairs, cost: RequestCost, invariance: float) -> list[Clause]:
    """The accuracy claim decides; decoupling, co-scaling and the scaling curve (variant -> FLOPs) are reported."""
    clauses = [
        any_of(beats(METHOD, STACKED, "auc"), beats(METHOD, STACKED, "user_auc")),
        any_of(beats(METHOD, NO_MIXING, "auc"), beats(METHOD, SHARED_FUSION, "auc")),
        decoupling(cost, invariance),
    ]
    if len(pairs) > 1:
        clauses.append(co_scaling(pairs))
    if len(scales) > 1:
        clauses.append(scaling_curve(scales, "auc"))
    return clauses


@dataclass(frozen=True)
class Arms:
    """The arms, the baseline first; FLOPs of the scaling curve's; the pairs of the co-scaling sweep."""

    variants: list[Variant]
    scales: dict[str, float]
    pairs: Pairs


def variants(
    task: ClickTask, config: MixFormerConfig, *, widths: Sequence[int] = WIDTHS, lengths: Sequence[int] = LENGTHS
) -> Arms:
    """All arms of the protocol; with one block there is no sequence network to share."""
    sample = task.rows(task.train[:8], torch.device("cpu"))
    sides = task.request_fields, task.candidate_fields

    def mix(**changes: object) -> Callable[[], MixFormer]:
        changed = replace(config, **changes)  # type: ignore[arg-type]
        return lambda: MixFormer(*sides, changed)

    def stacked(like: MixFormerConfig, *, parallel: bool = False) -> Callable[[], nn.Module]:
        def of(sequence: int, mixer: int) -> Callable[[], nn.Module]:
            return lambda: Stacked(*sides, like, sequence, mixer, parallel=parallel)

        target = scoring_cost(lambda: MixFormer(*sides, like), sample)
        return of(*matched_pair(lambda a, b: scoring_cost(of(a, b), sample), target))

    def arm(name: str, build: Callable[[], nn.Module], kind: Kind, note: str) -> Variant:
        return Variant(name, priced(build, sample), kind=kind, note=note)

    arms = [
        arm(STACKED, stacked(config), "baseline", "target attention, then RankMixer; matched parameters and FLOPs"),
        arm(PARALLEL, stacked(config, parallel=True), "control", "both side by side; matched parameters and FLOPs"),
        arm(NO_MIXING, mix(mixing="none"), "ablation", "heads meet in the tower alone"),
        arm(ATTENTION, mix(mixing="attention"), "ablation", "self-attention instead of the exchange of slices"),
        arm(SHARED_FUSION, mix(fusion_ffn="shared"), "ablation", "equal FLOPs, fewer parameters"),
        arm(DECOUPLED, mix(decoupled=True), "method", "request heads free of the candidate"),
        arm(METHOD, mix(), "method", "exchange of slices, one query a head, private networks"),
    ]
    if config.blocks > 1:
        arms.append(
            arm(SHARED_SEQUENCE, mix(sequence_ffn="shared"), "ablation", "equal FLOPs, fewer parameters"),
        )
    pairs: Pairs = {config.history: (METHOD, STACKED)}
    for length in lengths:
        method, control = pairs[length] = f"{METHOD}, T {length}", f"{STACKED}, T {length}"
        like = replace(config, history=length)
        arms += [
            arm(method, mix(history=length), "control", "history of the co-scaling sweep"),
            arm(control, stacked(like), "control", "matched parameters and FLOPs at this history"),
        ]
    scales = {METHOD: float(scoring_cost(mix(), sample)[1])}
    for width in widths:
        name = f"{METHOD}, D {width}"
        arms.append(arm(name, mix(width=width), "control", "size of the scaling curve"))
        scales[name] = float(scoring_cost(mix(width=width), sample)[1])
    arms.append(Variant("past means", PastMeans, kind="floor", note="user mean + item mean, no training"))
    return Arms(arms, scales, pairs)


def specimens() -> list[Specimen]:
    """A tiny model with every option switched once, and the decoupled one."""
    task = miniature_requests()
    batch = task.shown(task.requests["train"][1::2], torch.device("cpu"))
    tiny = MixFormerConfig(heads=4, width=8, history=8, field_width=8, event_width=4)

    def of(config: MixFormerConfig) -> Callable[[], MixFormer]:
        return lambda: MixFormer(task.request_fields, task.candidate_fields, config)

    def specimen(name: str, config: MixFormerConfig, switches: dict[str, dict[str, object]]) -> Specimen:
        return Specimen(
            name,
            of(config),
            batch,
            shape=tuple(batch["label"].shape),
            pad=pad_history,
            # The only thing in a batch that is not earlier than the score.
            change_later=lambda b: {**b, "label": 1 - b["label"]},
            switches={title: of(replace(config, **changes)) for title, changes in switches.items()},  # type: ignore[arg-type]
        )

    return [
        specimen(
            "mixformer",
            tiny,
            {
                "heads = 2": {"heads": 2},
                "width = 16": {"width": 16},
                "blocks = 1": {"blocks": 1},
                "expansion = 3": {"expansion": 3},
                "history = 3": {"history": 3},
                "alignment = mlp": {"alignment": "mlp"},
                "mixing = attention": {"mixing": "attention"},
                "mixing = none": {"mixing": "none"},
                "mixer_ffn = false": {"mixer_ffn": False},
                "sequence_ffn = shared": {"sequence_ffn": "shared"},
                "fusion_ffn = shared": {"fusion_ffn": "shared"},
                "query_norm = true": {"query_norm": True},
                "read_out = mean": {"read_out": "mean"},
                "decoupled = true": {"decoupled": True},
            },
        ),
        specimen("ui-mixformer", replace(tiny, decoupled=True), {}),
    ]


def request_models(task: ClickTask) -> dict[str, MixFormer]:
    """Models of the standard width for the benchmark of a request's cost, at the history length of `task`."""
    config = MixFormerConfig(history=task.history_length)
    sides = task.request_fields, task.candidate_fields
    return {METHOD: MixFormer(*sides, config), DECOUPLED: MixFormer(*sides, replace(config, decoupled=True))}


def run(study: Study) -> Comparison:
    """Trains all arms on explicit feedback, measures decoupling, and applies the decision rule."""
    device = device_for(study.device)
    smoke = study.budget == "smoke"
    config = MixFormerConfig(
        width=study.size("width", smoke=16, standard=8),
        blocks=study.size("blocks", smoke=1, standard=2),
        history=study.size("history", smoke=20, standard=50),
    )
    lengths = [] if smoke else [length for length in LENGTHS if length != config.history]
    widths = [] if smoke else [width for width in WIDTHS if width != config.width]
    with study.stage("features", trains=False):
        interactions = study.dataset().subset_users(study.size("users", smoke=60, standard=10_000), seed=0)
        task = RequestClicks(
            interactions,
            width=study.size("candidates", smoke=8, standard=8),
            history_length=max([config.history, *lengths]),
            catalogue_users=study.size("catalogue users", smoke=1, standard=20),
        )
    if interactions.users is None:
        study.note(f"{interactions.name} has no demographics: the request's heads have one group of fields less")
    arms = variants(task, config, widths=widths, lengths=lengths)
    with study.stage("serving", trains=False):
        model = MixFormer(task.request_fields, task.candidate_fields, replace(config, decoupled=True)).to(device).eval()
        cost = measure_requests(task, model, device, candidates=100, rounds=3 if smoke else 9)
    comparison = study.compare(
        task,
        baseline=arms.variants[0],
        candidates=arms.variants[1:],
        steps=study.steps("ranker", smoke=4, standard=100),
        device=device,
        recipe=Recipe(
            batch_size=study.size("batch", smoke=16, standard=64),
            validations=study.size("validations", smoke=1, standard=2),
        ),
        learning_rates=(3e-3,) if smoke else (3e-3, 1e-2),
    )
    # Of the trained models, on test, in the worst seed.
    invariance = max(trial.test.diagnostics[INVARIANCE] for trial in comparison.trials[DECOUPLED])
    comparison.clauses = decision_rule(arms.scales, arms.pairs, cost, invariance)
    return comparison
