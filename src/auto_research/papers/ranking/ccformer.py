"""CCFormer: cross-field interaction and hierarchical sequence compression (arXiv:2607.28070, Tencent).

Official code: none.

The idea: user, behaviour sequence and targets are three fields that meet in directed streams of attention: the user
reads the sequence, targets read the sequence and the user, and the sequence itself never asks. Within the sequence
cheap local operators take the place of attention: a time and position weighting inside groups of m events, private
networks for subspaces of a group, and a strided convolution that halves the sequence after every block. Nothing reads
a target, so user and sequence are worked out once for all candidates of a request.

Differs from the paper: MovieLens requests instead of Tencent's logs, with likes and loves as the two tasks; float32
tables instead of INT8 with double hashing; AdamW at a rate chosen on validation.

Letters: B requests, L_u user tokens, L_s events, L_t targets (candidates), d width, H heads, m events of a group,
n channels of a subspace, P groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.attention import KVCache, attend, attend_packed, padding_mask
from auto_research.layers.token_mixing import PerTokenFFN
from auto_research.layers.towers import matched_width, parameters_of
from auto_research.layers.transformer import FeedForward, TransformerBlock, make_norm
from auto_research.runtime.device import device_for
from auto_research.study.compare import Comparison, Kind, Variant
from auto_research.study.specimen import Specimen
from auto_research.study.verdict import Clause, Compare, State, beats, fact
from auto_research.tasks.base import Batch, Recipe
from auto_research.tasks.personal_requests import PersonalRequests, miniature, packed_gap
from auto_research.tasks.request_cost import priced
from auto_research.tasks.request_rankers import DINTrunk, Events, RequestRanker, SelfAttentionTrunk
from auto_research.tasks.request_ranking import OUTCOMES, change_outcomes, pad_requests
from auto_research.tasks.timing import median_seconds

if TYPE_CHECKING:
    from auto_research.study.context import Study

DAY = 86_400


@dataclass(frozen=True)
class CCFormerConfig:
    """Sizes and switches; the defaults are the standard run's model.

    Attributes:
        width, layers, heads: d, number of blocks, H.
        group, subspace: m and n.
        kernel, stride: k and s of the convolution after each block; a stride of 1 compresses nothing.
        hidden: hidden width of the networks of user and targets; 0 is 2·d.
        mixing_hidden: hidden width of a subspace's network; 0 is m·n.
        attention: `separate` is three directed streams; `fused` one attention over [user; sequence; targets] with
            one set of weights, in which the sequence asks, too.
        mixing: `subspace`, `attention` (a Transformer block over the sequence, of equal parameters) or `none`.
        encoding: place of the time and position encoding, `after` or `before` the cross attention, or `none`.
        clock: how |t_i - t_j| is measured: `log` is log(1 + seconds), `days` is days.
        skip: to what the result of cross attention is added: the block's `input` or the network's output (`ffn`).
        encoding_residual, mixing_residual: whether the group's own events are added to these two operators.
        zero_init: whether the last matrix of the subspaces' networks begins at zero.
        read_out: `all` gives the heads the means of user and sequence beside the target, `target` the target alone.
    """

    width: int = 32
    layers: int = 3
    heads: int = 2
    group: int = 4
    subspace: int = 8
    kernel: int = 3
    stride: int = 2
    hidden: int = 0
    mixing_hidden: int = 0
    attention: Literal["separate", "fused"] = "separate"
    mixing: Literal["subspace", "attention", "none"] = "subspace"
    encoding: Literal["after", "before", "none"] = "after"
    clock: Literal["log", "days"] = "log"
    skip: Literal["input", "ffn"] = "input"
    encoding_residual: bool = True
    mixing_residual: bool = True
    zero_init: bool = False
    read_out: Literal["all", "target"] = "all"

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width % self.subspace:
            raise ValueError(f"a width of {self.width} is no multiple of {self.heads} heads or n = {self.subspace}")

    @property
    def mixing_parameters(self) -> int:
        """Parameters of the subspaces' networks of a block."""
        wide = self.group * self.subspace
        return 3 * (self.width // self.subspace) * wide * (self.mixing_hidden or wide)


# -- within the sequence -------------------------------------------------------------------------------------------


class TimePositionEncoding(nn.Module):
    """Each group S_p of m events becomes (W_time + W_pos) S_p, at a cost of L·m instead of L².

    W_time[i, j] = α β^(γ |t_i - t_j|) with α, γ > 0 and 0 < β < 1 learned; W_pos[i, j] = w[i - j + m - 1] with a
    learned w of 2m - 1 entries that begins at zero. Weights are worked out in float32.
    """

    offset: Tensor

    def __init__(self, group: int, clock: Literal["log", "days"] = "log") -> None:
        super().__init__()
        self.group, self.clock = group, clock
        # Softplus of these is 1/m, so that a group is averaged at first, and 1/4; the sigmoid of zero is 1/2.
        self.scale = nn.Parameter(torch.tensor(math.log(math.expm1(1 / group))))
        self.rate = nn.Parameter(torch.tensor(math.log(math.expm1(0.25))))
        self.base = nn.Parameter(torch.tensor(0.0))
        self.position = nn.Parameter(torch.zeros(2 * group - 1))
        place = torch.arange(group)
        self.register_buffer("offset", place[:, None] - place + group - 1, persistent=False)

    def weights(self, seconds: Tensor) -> Tensor:
        """Moments of the events of groups, int64 (..., m) -> W_time + W_pos, float32 (..., m, m)."""
        apart = (seconds[..., :, None] - seconds[..., None, :]).abs().float()
        apart = apart.log1p() if self.clock == "log" else apart / DAY
        # β^x = exp(x log β), and the logarithm of a sigmoid is exact where the sigmoid itself rounds to 0 or 1.
        decay = (F.softplus(self.rate.float()) * apart * F.logsigmoid(self.base.float())).exp()
        return F.softplus(self.scale.float()) * decay + self.position.float()[self.offset]

    def forward(self, x: Tensor, seconds: Tensor) -> Tensor:
        """x (B, L, d), seconds (B, L), L a multiple of m -> (B, L, d)."""
        weights = self.weights(seconds.unflatten(1, (-1, self.group)))
        return (weights.to(x.dtype) @ x.unflatten(1, (-1, self.group))).flatten(1, 2)


class SubspaceMixing(nn.Module):
    """Private networks for subspaces of n channels over the m events of a group.

    The channels are cut into d/n subspaces; in each, the n channels of the m events lie side by side, an m·n vector,
    which passes a gated network of the subspace's own: W_o (silu(x W_g) ⊙ (x W_v)). All groups share the networks.
    """

    def __init__(self, width: int, group: int, subspace: int, hidden: int = 0, *, zero_init: bool = False) -> None:
        super().__init__()
        self.group, self.subspace = group, subspace
        wide = group * subspace
        self.networks = PerTokenFFN(width // subspace, wide, hidden or wide, "swiglu", bias=False)
        if zero_init:
            nn.init.zeros_(self.networks.fall.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, d), L a multiple of m -> (B, L, d)."""
        batch, length, width = x.shape
        grid = x.view(batch, length // self.group, self.group, width // self.subspace, self.subspace)
        rows = grid.transpose(2, 3).flatten(3).flatten(0, 1)  # (B·P, d/n, m·n)
        mixed = self.networks(rows).unflatten(-1, (self.group, self.subspace))
        return mixed.transpose(1, 2).reshape(x.shape)


class Compression(nn.Module):
    """Conv1D along time, d -> d channels: a sequence of L events becomes ⌈L/s⌉ whose last window ends at the latest.

    Each takes its moment from the last event of its window.
    """

    def __init__(self, width: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, width, kernel, stride)

    def forward(self, events: Events) -> Events:
        (kernel,), (stride,) = self.convolution.kernel_size, self.convolution.stride
        length = events.x.shape[1]
        before = (-(-length // stride) - 1) * stride + kernel - length
        x = self.convolution(F.pad(events.x.mT, (before, 0))).mT
        ends = slice((length - 1) % stride, None, stride)
        return Events(x, events.seconds[:, ends], events.valid[:, ends]).with_vectors(x)


# -- between the fields --------------------------------------------------------------------------------------------


@dataclass
class Kept:
    """What targets of a block read: keys and values (B, H, ·, D), and which of the sequence's are real (B, L)."""

    sequence: KVCache
    user: KVCache
    valid: Tensor


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, d) -> (B, H, L, d/H)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(B, H, L, d/H) -> (B, L, d)."""
    return x.transpose(1, 2).flatten(2)


class CrossFieldAttention(nn.Module):
    """Three directed streams: user -> sequence, target -> sequence and target -> user (asking -> read)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.user_norm, self.sequence_norm = make_norm("rms", width), make_norm("rms", width)
        self.user = nn.Linear(width, 3 * width, bias=False)
        self.sequence = nn.Linear(width, 2 * width, bias=False)
        self.target = nn.Linear(width, 2 * width, bias=False)  # queries of both streams side by side
        self.user_out = nn.Linear(width, width, bias=False)
        self.target_out = nn.Linear(2 * width, width, bias=False)

    def _split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        return tuple(split_heads(part, self.heads) for part in x.chunk(parts, dim=-1))

    def request(self, user: Tensor, events: Events) -> tuple[Tensor, None, Kept]:
        """User (B, L_u, d) and sequence -> ΔU (B, L_u, d), no change of the sequence, and what targets read."""
        query, *own = self._split(self.user(self.user_norm(user)), 3)
        key, value = self._split(self.sequence(self.sequence_norm(events.x)), 2)
        found = attend(query, key, value, padding_mask(events.valid))
        return self.user_out(join_heads(found)), None, Kept(KVCache(key, value), KVCache(*own), events.valid)

    def read(self, target: Tensor, kept: Kept) -> Tensor:
        """Targets (B, L_t, d) -> ΔT (B, L_t, d); they do not see each other."""
        to_sequence, to_user = self._split(self.target(target), 2)
        found = [
            attend(to_sequence, *_filled(kept.sequence), padding_mask(kept.valid)),
            attend(to_user, *_filled(kept.user)),
        ]
        return self.target_out(torch.cat([join_heads(part) for part in found], dim=-1))


class FusedAttention(nn.Module):
    """Ablation: one attention over [sequence; user; targets] with one set of weights, and the sequence asks, too.

    Sequence and user see each other; a target sees them and itself, no other target.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = make_norm("rms", width)
        self.inputs = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def _inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(split_heads(part, self.heads) for part in self.inputs(self.norm(x)).chunk(3, dim=-1))

    def request(self, user: Tensor, events: Events) -> tuple[Tensor, Tensor, Kept]:
        """User (B, L_u, d) and sequence -> their changes, and what targets read."""
        valid = F.pad(events.valid, (0, user.shape[1]), value=True)
        query, key, value = self._inputs(torch.cat([events.x, user], dim=1))
        found = self.output(join_heads(attend(query, key, value, padding_mask(valid))))
        sequence, own = found.split([events.x.shape[1], user.shape[1]], dim=1)
        return own, sequence, Kept(KVCache(key, value), KVCache(), valid)

    def read(self, target: Tensor, kept: Kept) -> Tensor:
        """Targets (B, L_t, d) -> their change (B, L_t, d)."""
        query, key, value = (part[:, :, :, None] for part in self._inputs(target))  # packs of one token
        found = attend_packed(query, key, value, *_filled(kept.sequence), kept.valid)
        return self.output(join_heads(found.squeeze(3)))


def _filled(cache: KVCache) -> tuple[Tensor, Tensor]:
    assert cache.key is not None
    assert cache.value is not None
    return cache.key, cache.value


# -- the block and the trunk ---------------------------------------------------------------------------------------


class CCFormerBlock(nn.Module):
    """Networks of user and target, cross-field attention, and the operators within the sequence."""

    def __init__(self, config: CCFormerConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden or 2 * config.width
        self.config = config
        self.user_network = FeedForward(width, hidden, activation="swiglu", bias=False)
        self.target_network = FeedForward(width, hidden, activation="swiglu", bias=False)
        streams = FusedAttention if config.attention == "fused" else CrossFieldAttention
        self.attention = streams(width, config.heads)
        self.encoding = TimePositionEncoding(config.group, config.clock) if config.encoding != "none" else None
        self.mixing: nn.Module | None = None
        if config.mixing == "subspace":
            self.mixing = SubspaceMixing(
                width, config.group, config.subspace, config.mixing_hidden, zero_init=config.zero_init
            )
        elif config.mixing == "attention":
            rest = (config.mixing_parameters - 4 * width**2) / (2 * width)
            self.mixing = TransformerBlock(width, config.heads, max(1, round(rest)), norm="rms", bias=False)
        self.compression = Compression(width, config.kernel, config.stride)

    def request(self, user: Tensor, events: Events) -> tuple[Tensor, Events, Kept]:
        """User (B, L_u, d) and sequence -> both after the block, and what its targets read."""
        config = self.config
        passed = self.user_network(user)
        events = events.whole_groups(config.group)
        if config.encoding == "before":
            events = self._encode(events)
        change, moved, kept = self.attention.request(passed, events)
        if moved is not None:
            events = events.with_vectors(events.x + moved)
        if config.encoding == "after":
            events = self._encode(events)
        if config.mixing == "attention":
            assert self.mixing is not None
            events = events.with_vectors(self.mixing(events.x, padding_mask(events.valid)))
        elif self.mixing is not None:
            mixed = self.mixing(events.x)
            events = events.with_vectors(events.x + mixed if config.mixing_residual else mixed)
        return self._base(user, passed) + change, self.compression(events), kept

    def read(self, target: Tensor, kept: Kept) -> Tensor:
        """Targets (B, L_t, d) -> targets after the block."""
        passed = self.target_network(target)
        return self._base(target, passed) + self.attention.read(passed, kept)

    def _base(self, before: Tensor, passed: Tensor) -> Tensor:
        return before if self.config.skip == "input" else passed

    def _encode(self, events: Events) -> Events:
        assert self.encoding is not None
        encoded = self.encoding(events.x, events.seconds)
        return events.with_vectors(events.x + encoded if self.config.encoding_residual else encoded)


@dataclass
class RequestSide:
    """What a request needs no candidate for: what targets read in each block, and the read-out (B, 2·d) of the rest."""

    kept: list[Kept]
    summary: Tensor | None


class CCFormerTrunk(nn.Module):
    """All blocks, and the states [mean user; mean sequence; target] of the targets.

    Attributes:
        outputs: width of a state.
    """

    def __init__(self, config: CCFormerConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CCFormerBlock(config) for _ in range(config.layers))
        names = ("user", "sequence", "target") if config.read_out == "all" else ("target",)
        self.norms = nn.ModuleDict({name: make_norm("rms", config.width) for name in names})
        self.outputs = len(names) * config.width

    def request(self, user: Tensor, events: Events) -> RequestSide:
        """Everything that does not depend on a target; after the last block only what is read out."""
        kept = []
        for block in self.blocks:
            user, events, seen = block.request(user, events)
            kept.append(seen)
        if "user" not in self.norms:
            return RequestSide(kept, None)
        sequence = self.norms["sequence"](events.x) * events.valid[..., None]
        count = events.valid.sum(1, keepdim=True).clamp(min=1)
        return RequestSide(kept, torch.cat([self.norms["user"](user).mean(1), sequence.sum(1) / count], dim=-1))

    def read(self, side: RequestSide, target: Tensor) -> Tensor:
        """States (B, L_t, outputs) of targets (B, L_t, d)."""
        for block, kept in zip(self.blocks, side.kept, strict=True):
            target = block.read(target, kept)
        target = self.norms["target"](target)
        if side.summary is None:
            return target
        return torch.cat([side.summary[:, None].expand(-1, target.shape[1], -1), target], dim=-1)

    def forward(self, user: Tensor, events: Events, target: Tensor) -> Tensor:
        """User (B, L_u, d), sequence and targets (B, L_t, d) -> states (B, L_t, outputs)."""
        return self.read(self.request(user, events), target)


class CCFormer(RequestRanker):
    """CCFormer as a ranker that can read a request once and score candidates later."""

    def __init__(self, task: PersonalRequests, config: CCFormerConfig) -> None:
        super().__init__(task, config.width, CCFormerTrunk(config))
        length = task.history
        for i in range(config.layers):
            self.logged[f"sequence tokens in block {i + 1}"] = float(length)
            length = -(-(length + -length % config.group) // config.stride)

    def request_side(self, batch: Batch) -> RequestSide:
        """Everything that needs no candidate."""
        return self.trunk.request(*self.user_and_events(batch))  # type: ignore[operator]

    def candidate_scores(self, side: RequestSide, batch: Batch) -> Tensor:
        """Logits (B, L_t, tasks) of `candidate` (B, L_t) against what was worked out, which is left as it was."""
        return self.logits(self.trunk.read(side, self.targets(batch)))  # type: ignore[operator]


# -- the comparison ------------------------------------------------------------------------------------------------

METHOD = "ccformer"
HSTU = "hstu"
SOFTMAX = "softmax attention"
ATTENTION = "mixing by self-attention"
NO_MIXING = "no mixing"
NO_COMPRESSION = "no compression"
NO_ENCODING = "no time-position encoding"
FUSED = "one fused attention"
PLAIN = "hstu, narrow"
"""HSTU without the networks that bring it to equal parameters; timed, not trained."""


def users_of(task: PersonalRequests) -> int:
    """Number of user tokens."""
    return len({field.group for field in task.user_fields})


def baseline(
    task: PersonalRequests, config: CCFormerConfig, kind: Literal["hstu", "softmax"], hidden: int | None = None
) -> Callable[[], RequestRanker]:
    """Builds a self-attention baseline whose networks are as wide as equal parameters ask, or `hidden`."""

    def build(width: int) -> RequestRanker:
        return RequestRanker(
            task, config.width, SelfAttentionTrunk(kind, config.width, config.heads, width, config.layers, task.history)
        )

    if hidden is None:
        target = parameters_of(lambda: CCFormer(task, config))
        hidden = matched_width(lambda width: parameters_of(lambda: build(width)), target)
    return lambda: build(hidden)


def fused(task: PersonalRequests, config: CCFormerConfig) -> CCFormerConfig:
    """The fused ablation; the networks of user and target take up the parameters that one attention saves."""

    def one(hidden: int) -> CCFormerConfig:
        return replace(config, attention="fused", hidden=hidden)

    target = parameters_of(lambda: CCFormer(task, config))
    return one(matched_width(lambda hidden: parameters_of(lambda: CCFormer(task, one(hidden))), target))


def variants(task: PersonalRequests, config: CCFormerConfig) -> list[Variant]:
    """All arms, the baseline first; each tells the FLOPs of scoring a request."""
    sample = task.rows(task.requests["train"][:4], torch.device("cpu"))

    def arm(name: str, build: Callable[[], nn.Module], kind: Kind, note: str) -> Variant:
        return Variant(name, priced(build, sample), kind=kind, note=note)

    def ours(name: str, kind: Kind, note: str, changed: CCFormerConfig) -> Variant:
        return arm(name, lambda: CCFormer(task, changed), kind, note)

    def din() -> RequestRanker:
        return RequestRanker(task, config.width, DINTrunk(config.width, users_of(task), task.history))

    return [
        arm(HSTU, baseline(task, config, "hstu"), "baseline", "equal width, depth and parameters"),
        ours(METHOD, "method", "three streams, mixing, compression", config),
        arm(SOFTMAX, baseline(task, config, "softmax"), "control", "the same, with softmax attention"),
        ours(
            ATTENTION, "ablation", "a Transformer block of equal parameters mixes", replace(config, mixing="attention")
        ),
        ours(NO_MIXING, "ablation", "no subspace networks", replace(config, mixing="none")),
        ours(NO_COMPRESSION, "ablation", "the same convolution with stride 1", replace(config, stride=1)),
        ours(NO_ENCODING, "ablation", "events of a group are not weighted", replace(config, encoding="none")),
        ours(FUSED, "ablation", "one attention over all fields, equal parameters", fused(task, config)),
        arm("din", din, "floor", "target attention and a plain network"),
    ]


@dataclass(frozen=True)
class TrainingSpeed:
    """Requests a second in training (forward and backward), by arm, at one history length."""

    history: int
    requests: dict[str, float]

    @property
    def ratio(self) -> float:
        """Speed of the method in units of its baseline's."""
        return self.requests[METHOD] / self.requests[HSTU]

    def __str__(self) -> str:
        speeds = ", ".join(f"{name} {value:.0f}" for name, value in self.requests.items())
        return f"{self.ratio:.2f}x at a history of {self.history}; requests/s in training: {speeds}"


def measure_training(
    task: PersonalRequests,
    config: CCFormerConfig,
    device: torch.device,
    *,
    batch_size: int,
    rounds: int,
    extra: tuple[str, ...] = (PLAIN, SOFTMAX, NO_COMPRESSION, ATTENTION),
) -> TrainingSpeed:
    """Times a training step of the method, the baseline and `extra` arms, in alternating rounds."""
    builders: dict[str, Callable[[], RequestRanker]] = {
        METHOD: lambda: CCFormer(task, config),
        HSTU: baseline(task, config, "hstu"),
        PLAIN: baseline(task, config, "hstu", hidden=0),
        SOFTMAX: baseline(task, config, "softmax"),
        NO_COMPRESSION: lambda: CCFormer(task, replace(config, stride=1)),
        ATTENTION: lambda: CCFormer(task, replace(config, mixing="attention")),
    }
    batch = next(task.batches(0, batch_size, device))

    def step(model: nn.Module) -> Callable[[], None]:
        def way() -> None:
            model.loss(batch).backward()
            model.zero_grad(set_to_none=True)

        return way

    ways = {name: step(builders[name]().to(device).train()) for name in (METHOD, HSTU, *extra)}
    seconds = median_seconds(ways, device, rounds=rounds)
    return TrainingSpeed(task.history, {name: len(batch["item"]) / value for name, value in seconds.items()})


def efficiency(speed: TrainingSpeed, *, at_least: float = 1.5, within: float = 0.001) -> Clause:
    """Holds when training is `at_least` times as fast as HSTU's and mean AUC not more than `within` below, relative."""

    def decide(compare: Compare) -> tuple[State, str]:
        d = compare(METHOD, HSTU, "like auc")
        near = d.mean >= -within * abs(d.baseline_mean)
        state: State = "holds" if speed.ratio >= at_least and near else "reversed"
        return state, f"{speed}; like auc {d.mean:+.5f} [{d.low:+.5f}, {d.high:+.5f}]"

    text = f"efficiency: trains at least {at_least} times as fast as {HSTU} with like auc within {within:.1%}"
    return Clause(text, decide)


def decision_rule(speed: TrainingSpeed, gap: float) -> list[Clause]:
    """Accuracy, core mechanism and efficiency, each judged by itself; anything but a clear yes counts against it."""
    accuracy = beats(METHOD, HSTU, "like auc", strict=True)
    core = beats(METHOD, NO_MIXING, "like auc", strict=True)
    return [
        replace(accuracy, text=f"accuracy: {accuracy.text}"),
        replace(core, text=f"core mechanism: {core.text}"),
        efficiency(speed),
        fact(
            "serving: candidates in one pack score as each alone, to 1e-5",
            "holds" if gap < 1e-5 else "reversed",
            f"largest difference {gap:.1e}",
            required=False,
        ),
        beats(METHOD, SOFTMAX, "like auc", required=False),
        *(
            beats(METHOD, other, "like auc", required=False)
            for other in (ATTENTION, NO_COMPRESSION, NO_ENCODING, FUSED)
        ),
        beats(METHOD, "din", "like auc", required=False),
    ]


def run(study: Study) -> Comparison:
    """Measures training speed and serving, then trains all arms on the same requests."""
    device = device_for(study.device)
    smoke = study.budget == "smoke"
    with study.stage("requests", trains=False):
        interactions = study.dataset().subset_users(study.size("users", smoke=40, standard=400), seed=0)
        width = study.size("candidates", smoke=16, standard=16)
        task = PersonalRequests(interactions, history=study.size("history", smoke=48, standard=96), width=width)
        long = PersonalRequests(interactions, history=study.size("timed history", smoke=48, standard=192), width=width)
    if interactions.users is None:
        study.note(f"{interactions.name} has no demographics: there is one user token less")
    config = CCFormerConfig(
        width=study.size("width", smoke=32, standard=32), layers=study.size("layers", smoke=2, standard=3)
    )
    batch_size = study.size("batch", smoke=16, standard=16)
    with study.stage("speed", trains=False):
        speed = measure_training(
            long,
            config,
            device,
            batch_size=batch_size,
            rounds=study.size("timings", smoke=1, standard=9),
            extra=() if smoke else (PLAIN, SOFTMAX, NO_COMPRESSION, ATTENTION),
        )
        gap = packed_gap(CCFormer(task, config).to(device), task.rows(task.requests["test"][:16], device))
    arms = variants(task, config)
    steps = study.steps("ranker", smoke=2, standard=task.steps_per_pass(batch_size))
    return study.compare(
        task,
        baseline=arms[0],
        candidates=arms[1:],
        steps=steps,
        device=device,
        recipe=Recipe(batch_size=batch_size, validations=study.size("validations", smoke=1, standard=2)),
        learning_rates=(3e-3,) if smoke else (3e-3, 1e-2),
        clauses=decision_rule(speed, gap),
    )


def specimens() -> list[Specimen]:
    """Tiny models with every option switched once."""
    task = miniature(events=60, history=10)
    batch = task.rows(task.requests["train"][6:24:3], torch.device("cpu"))
    tiny = CCFormerConfig(width=16, layers=2, heads=2, group=4, subspace=4)

    def of(config: CCFormerConfig) -> Callable[[], CCFormer]:
        return lambda: CCFormer(task, config)

    def specimen(name: str, build: Callable[[], nn.Module], switches: dict[str, dict[str, object]]) -> Specimen:
        return Specimen(
            name,
            build,
            batch,
            shape=(*batch["candidate"].shape, len(OUTCOMES)),
            pad=pad_requests,
            change_later=change_outcomes,
            switches={title: of(replace(tiny, **changes)) for title, changes in switches.items()},  # type: ignore[arg-type]
        )

    return [
        specimen(
            "ccformer",
            of(tiny),
            {
                "width = 32": {"width": 32},
                "layers = 1": {"layers": 1},
                "heads = 4": {"heads": 4},
                "group = 2": {"group": 2},
                "subspace = 8": {"subspace": 8},
                "kernel = 2": {"kernel": 2},
                "stride = 1": {"stride": 1},
                "hidden = 8": {"hidden": 8},
                "mixing_hidden = 8": {"mixing_hidden": 8},
                "attention = fused": {"attention": "fused"},
                "mixing = attention": {"mixing": "attention"},
                "mixing = none": {"mixing": "none"},
                "encoding = before": {"encoding": "before"},
                "encoding = none": {"encoding": "none"},
                "clock = days": {"clock": "days"},
                "skip = ffn": {"skip": "ffn"},
                "encoding_residual = false": {"encoding_residual": False},
                "mixing_residual = false": {"mixing_residual": False},
                "zero_init = true": {"zero_init": True},
                "read_out = target": {"read_out": "target"},
            },
        ),
        specimen("fused", of(replace(tiny, attention="fused")), {}),
        specimen("mixing by self-attention", of(replace(tiny, mixing="attention")), {}),
        specimen("hstu", baseline(task, tiny, "hstu"), {}),
        specimen("softmax attention", baseline(task, tiny, "softmax"), {}),
        specimen("din", lambda: RequestRanker(task, 16, DINTrunk(16, users_of(task), task.history)), {}),
    ]
