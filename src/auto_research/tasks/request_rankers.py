"""Rankers over one tokenisation of personal requests: user tokens, a sequence of events, and targets.

A ranker embeds the three fields, passes them through a trunk and reads a logit for each task off each target's state.
Models that differ in their trunk alone are compared by it alone.

Letters: B requests, L_u user tokens, L events, L_t targets (candidates), d width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.attention import padding_mask
from auto_research.layers.heads import TaskHeads
from auto_research.layers.hstu import HSTUBlock, RelativeBias
from auto_research.layers.longer import GAPS, gap_buckets
from auto_research.layers.towers import MLP, FeatureEmbedding, TargetAttention, embedding_table
from auto_research.layers.transformer import FeedForward, TransformerEncoder, make_norm
from auto_research.tasks.base import Batch
from auto_research.tasks.event_log import Exposures
from auto_research.tasks.personal_requests import PersonalRequests
from auto_research.tasks.request_ranking import OUTCOMES, outcome_loss


@dataclass(frozen=True)
class Events:
    """A sequence at some depth.

    Attributes:
        x: vectors (B, L, d), zero at padding.
        seconds: (B, L) int64, how long before the request.
        valid: (B, L), False at padding, which stands on the left.
    """

    x: Tensor
    seconds: Tensor
    valid: Tensor

    def with_vectors(self, x: Tensor) -> Events:
        """The same events with other vectors; padding is zero again."""
        return replace(self, x=x * self.valid[..., None])

    def whole_groups(self, size: int) -> Events:
        """Padded on the left to a multiple of `size`, so that groups are counted from the latest event."""
        missing = -self.x.shape[1] % size
        if not missing:
            return self
        return Events(
            F.pad(self.x, (0, 0, missing, 0)), F.pad(self.seconds, (missing, 0)), F.pad(self.valid, (missing, 0))
        )


class RequestRanker(nn.Module):
    """Tokens of a request, a trunk over them, and a head a task; all arms differ in their trunk alone.

    User tokens are the groups of `task.user_fields`; an event is its item (id, genres, year) plus the reaction to it;
    a target is its item. Each field is brought to unit scale before the trunk.

    Args:
        trunk: (user, events, targets) -> states (B, L_t, trunk.outputs).
    """

    def __init__(self, task: PersonalRequests, width: int, trunk: nn.Module) -> None:
        super().__init__()
        self.exposures = Exposures(task.log, width)
        self.features = FeatureEmbedding(task.user_fields, width)
        self.norms = nn.ModuleDict({name: make_norm("rms", width) for name in ("user", "sequence", "target")})
        self.trunk = trunk
        self.heads = TaskHeads(int(trunk.outputs), dict.fromkeys(OUTCOMES, 1), hidden=width)  # type: ignore[arg-type]
        self.width = width
        self.logged: dict[str, float] = {}

    def user_and_events(self, batch: Batch) -> tuple[Tensor, Events]:
        """User tokens (B, L_u, d) and the sequence."""
        user = self.norms["user"](self.features(batch).unflatten(-1, (-1, self.width)))
        x = self.norms["sequence"](self.exposures(batch["item"]) + self.exposures.action(batch["action"]))
        events = Events(x, batch["age"], batch["item"] > 0)
        return user, events.with_vectors(x)

    def targets(self, batch: Batch) -> Tensor:
        """Candidates as tokens (B, L_t, d)."""
        return self.norms["target"](self.exposures(batch["candidate"]))

    def logits(self, states: Tensor) -> Tensor:
        """States (B, L_t, ·) -> logits float32 (B, L_t, tasks)."""
        return torch.stack([*self.heads(states).values()], -1)

    def scores(self, batch: Batch) -> Tensor:
        """Logits (B, L_t, tasks) of all candidates of each request in one pass; reactions to them are not read."""
        return self.logits(self.trunk(*self.user_and_events(batch), self.targets(batch)))

    def loss(self, batch: Batch) -> Tensor:
        """Mean over tasks of the binary cross-entropy, a float32 scalar."""
        return outcome_loss(self.scores(batch), batch["label"])


class SelfAttentionTrunk(nn.Module):
    """Self-attention over [sequence; user; targets] with a learned bias over position and time.

    The sequence is causal; user tokens see the sequence and each other; a target sees both and itself. In the last
    block only the targets ask.

    Args:
        kind: `hstu` is pointwise SiLU attention, `softmax` a pre-norm Transformer; both with the same bias.
        hidden: width of the feed-forward network behind attention; 0 leaves an HSTU block as published, without one.
        length: longest sequence.
    """

    def __init__(
        self, kind: Literal["hstu", "softmax"], width: int, heads: int, hidden: int, layers: int, length: int
    ) -> None:
        super().__init__()
        self.outputs = width
        self.bias = RelativeBias(heads, length + 1)
        self.encoder: TransformerEncoder | None = None
        self.blocks, self.networks = nn.ModuleList(), nn.ModuleList()
        if kind == "softmax":
            self.encoder = TransformerEncoder(width, heads, hidden, layers)
            return
        for _ in range(layers):
            self.blocks.append(HSTUBlock(width, heads, length))
            if hidden:
                self.networks.append(nn.Sequential(nn.LayerNorm(width), FeedForward(width, hidden)))
        self.norm = nn.LayerNorm(width)

    def forward(self, user: Tensor, events: Events, target: Tensor) -> Tensor:
        """User (B, L_u, d), sequence and targets (B, L_t, d) -> states (B, L_t, d)."""
        length, others = events.x.shape[1], user.shape[1] + target.shape[1]
        x = torch.cat([events.x, user, target], dim=1)
        place = torch.arange(length + 2, device=x.device)
        counts = torch.tensor([1] * length + [user.shape[1], target.shape[1]], device=x.device)
        position = place.repeat_interleave(counts, output_size=length + others)
        apart = torch.eye(len(position), dtype=torch.bool, device=x.device)
        together = position == length
        allowed = (position[None, :] < position[:, None]) | apart | (together[:, None] & together)
        allowed = allowed & padding_mask(F.pad(events.valid, (0, others), value=True))
        bias = self.bias(position, F.pad(events.seconds, (0, others)))
        latest = target.shape[1]
        if self.encoder is not None:
            return self.encoder(x, mask=torch.where(allowed, bias, -torch.inf), latest=latest)
        final = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            x = block(x, allowed, bias, latest=latest if i == final else None)
            if self.networks:
                x = x + self.networks[i](x)
        return self.norm(x)


class DINTrunk(nn.Module):
    """DIN: the candidate weighs events that also carry their age, beside the user's tokens, in a plain network."""

    def __init__(self, width: int, users: int, length: int) -> None:
        super().__init__()
        self.ages = embedding_table(GAPS, width)
        self.attention, self.length = TargetAttention(width), length
        self.tower = MLP((2 + users) * width, 4 * width, width, activation="prelu")
        self.outputs = width

    def forward(self, user: Tensor, events: Events, target: Tensor) -> Tensor:
        """User (B, L_u, d), sequence and targets (B, L_t, d) -> states (B, L_t, d)."""
        keys = events.x + self.ages(gap_buckets(events.seconds))
        read = self.attention.each(target, keys, events.valid) / self.length
        shared = user.flatten(1)[:, None].expand(-1, target.shape[1], -1)
        x = torch.cat([target, read, shared], dim=-1)
        return self.tower(x.flatten(0, 1)).view(target.shape)
