"""Private experts for each token, routed by ReLU gates or by top-k, with the means to steer and to read their load.

Letters: B examples, T tokens, D width, E experts a token. A gate of exactly zero switches its expert off.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.token_mixing import GroupedLinear

RouterName = Literal["train", "infer"]


@dataclass
class Routing:
    """Which router a forward pass uses, and what the layers it went through report.

    Attributes:
        router: of layers that have two.
        only_active: compute only experts whose gate is not zero (the same output, for serving).
        gates: one (B, T, E) a layer.
        penalties: one scalar a layer, float32: what the layer asks to be added to the loss, before its weight.
    """

    router: RouterName = "infer"
    only_active: bool = False
    gates: list[Tensor] = field(default_factory=list)
    penalties: list[Tensor] = field(default_factory=list)

    def active_ratio(self) -> Tensor:
        """Share of gates above zero over all layers, examples, tokens and experts; a scalar without gradient."""
        return torch.stack([(g.detach() > 0).float().mean() for g in self.gates]).mean()

    def penalty(self) -> Tensor:
        """Sum of the layers' penalties."""
        return torch.stack(self.penalties).sum()


class TokenExperts(nn.Module):
    """Two-layer GELU experts, E of them for each token: out_t = Σ_j gate_tj · (W2_tj GELU(W1_tj s_t + b1_tj) + b2_tj).

    The experts of a token lie side by side in one hidden layer, so that all T·E of them are two batched products
    with the gates in between; with gates of one this is exactly a `PerTokenFFN` of the same hidden width.
    """

    def __init__(self, tokens: int, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        if hidden % experts:
            raise ValueError(f"hidden width {hidden} cannot be shared out over {experts} experts")
        self.experts = experts
        self.rise = GroupedLinear(tokens, width, hidden)
        self.fall = GroupedLinear(tokens, hidden, width, bias=False)
        self.offset = GroupedLinear(tokens, experts, width, bias=False)  # row j of token t is b2_tj

    def forward(self, x: Tensor, gates: Tensor, *, only_active: bool = False) -> Tensor:
        """x (B, T, D), gates (B, T, E) -> (B, T, D). `only_active` skips the experts whose gate is zero."""
        if only_active:
            return self._active(x, gates)
        hidden = F.gelu(self.rise(x)).unflatten(-1, (self.experts, -1)) * gates[..., None]
        return self.fall(hidden.flatten(-2)) + self.offset(gates)

    def _active(self, x: Tensor, gates: Tensor) -> Tensor:
        """The same sum, from the (example, token, expert) triples with a gate above zero alone."""
        tokens, experts = gates.shape[1:]
        per_token = gates.permute(1, 2, 0)
        token, expert, row = per_token.nonzero(as_tuple=True)  # sorted by token, then by expert
        sizes = (per_token > 0).sum(-1).flatten().tolist()
        gate = gates[row, token, expert]
        rise = self.rise.weight.unflatten(2, (experts, -1)).transpose(1, 2).flatten(0, 1)  # (T·E, D, hidden/E)
        rise_bias = self.rise.bias.unflatten(1, (experts, -1)).flatten(0, 1)  # type: ignore[union-attr]
        fall = self.fall.weight.unflatten(1, (experts, -1)).flatten(0, 1)  # (T·E, hidden/E, D)
        offset = self.offset.weight.flatten(0, 1)
        # One product for each expert that some example uses.
        parts = [
            F.gelu(rows @ rise[i] + rise_bias[i]) @ fall[i] + offset[i]
            for i, rows in enumerate(x[row, token].split(sizes))
        ]
        values = torch.cat(parts) * gate[:, None]
        out = x.new_zeros(x.shape[0] * tokens, x.shape[2], dtype=values.dtype)
        return out.index_add(0, row * tokens + token, values).view(x.shape)


class TokenRouter(nn.Module):
    """Linear scores of each token's experts.

    Weights start small and all biases at `bias`, so that a ReLU router begins with every gate near `bias`.

    Args:
        shared: one map for all tokens instead of one for each.
    """

    def __init__(self, tokens: int, width: int, experts: int, *, shared: bool = False, bias: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, experts) if shared else GroupedLinear(tokens, width, experts)
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
            self.linear.bias.fill_(bias)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, E)."""
        return self.linear(x)


class ReLUExperts(nn.Module):
    """ReLU routing with dense training and sparse inference (DTSI, arXiv:2507.15551).

    Gates are ReLU(h(s)): no top-k, no softmax, no renormalisation. Of the two routers `infer` alone serves, and
    alone is made sparse: the penalty, the batch mean of ΣG over tokens and experts, is computed on a detached input
    and so reaches nothing but the weights of `infer`. The caller makes one pass with each router, so that both learn
    from the task and the experts stay trained even where `infer` has closed its gates.

    Args:
        routers: `one` is ReLU routing without dense training: a single router, made sparse while it trains.
    """

    def __init__(
        self,
        tokens: int,
        width: int,
        hidden: int,
        experts: int,
        *,
        routers: Literal["two", "one"] = "two",
        shared_router: bool = False,
    ) -> None:
        super().__init__()
        self.experts = TokenExperts(tokens, width, hidden, experts)
        names: tuple[RouterName, ...] = ("train", "infer") if routers == "two" else ("infer",)
        self.routers = nn.ModuleDict(
            {f"for_{name}": TokenRouter(tokens, width, experts, shared=shared_router, bias=1.0) for name in names}
        )

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """(B, T, D) -> (B, T, D); reports gates, and a penalty when the inference router was used."""
        router = self.routers[f"for_{routing.router}"]  # "train" alone is a name that modules have taken
        gates = F.relu(router(x))
        routing.gates.append(gates)
        if routing.router == "infer":
            routing.penalties.append(F.relu(router(x.detach())).float().sum((1, 2)).mean())
        return self.experts(x, gates, only_active=routing.only_active)


class TopKExperts(nn.Module):
    """Top-k routing: gates are E·softmax(h(s)) at the k best experts and zero elsewhere.

    The probabilities are not renormalised, so that the router learns at every k, 1 included; the factor E makes an
    undecided router give gates of one, as ReLU routing begins. The penalty is the balancing loss of the Switch
    Transformer (arXiv:2101.03961), E · Σ_j (share routed to j) · (mean probability of j), averaged over tokens: 1
    when the load is even.
    """

    def __init__(
        self, tokens: int, width: int, hidden: int, experts: int, *, k: int, shared_router: bool = False
    ) -> None:
        super().__init__()
        if not 1 <= k <= experts:
            raise ValueError(f"k must lie between 1 and {experts}, got {k}")
        self.k = k
        self.experts = TokenExperts(tokens, width, hidden, experts)
        self.router = TokenRouter(tokens, width, experts, shared=shared_router)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """(B, T, D) -> (B, T, D); reports gates and the balancing loss."""
        probability = self.router(x).float().softmax(-1)
        best = probability.topk(self.k, dim=-1).indices
        chosen = torch.zeros_like(probability).scatter(-1, best, 1.0)
        count = probability.shape[-1]
        routing.penalties.append(count * (chosen.mean(0) / self.k * probability.mean(0)).sum(-1).mean())
        gates = (count * probability * chosen).to(x.dtype)
        routing.gates.append(gates)
        return self.experts(x, gates, only_active=routing.only_active)


class AdaptivePenalty(nn.Module):
    """Weight λ of a sparsity penalty, steered so that the active ratio tracks a budget.

    After each update λ is multiplied by `rate` when the measured ratio is above the budget and divided by it
    otherwise. It starts very small, never falls below where it started, and never rises above `limit`: gates need
    many updates to close, and an unbounded λ would meanwhile grow until it drowns the task and closes all of them
    for good (a ReLU that is closed on every example gets no gradient). λ is a buffer: saved with the model.
    """

    weight: Tensor

    def __init__(self, budget: float, *, start: float = 1e-6, rate: float = 1.2, limit: float = 1e-2) -> None:
        super().__init__()
        if not 0 < budget <= 1:
            raise ValueError(f"the budget is a share of experts in (0, 1], got {budget}")
        self.budget, self.start, self.rate, self.limit = budget, start, rate, limit
        self.register_buffer("weight", torch.tensor(start))

    def forward(self, penalty: Tensor) -> Tensor:
        """λ · penalty, a float32 scalar."""
        return self.weight * penalty.float()

    @torch.no_grad()
    def update(self, active_ratio: Tensor) -> None:
        """One step of λ, from the active ratio of the batch just seen."""
        factor = torch.where(active_ratio > self.budget, self.rate, 1 / self.rate)
        self.weight.mul_(factor.to(self.weight)).clamp_(self.start, self.limit)


class LoadMeter:
    """Adds up which experts were used over an evaluation."""

    def __init__(self) -> None:
        self._active: Tensor | None = None
        self._examples = 0

    @torch.no_grad()
    def add(self, routing: Routing) -> None:
        """Counts the gates of one pass."""
        active = torch.stack([(g > 0).sum(0) for g in routing.gates]).cpu().double()  # (layers, T, E)
        self._active = active if self._active is None else self._active + active
        self._examples += len(routing.gates[0])

    def usage(self) -> Tensor:
        """Share of examples that used each expert, (layers, T, E)."""
        if self._active is None:
            raise ValueError("no pass was added to this meter")
        return self._active / self._examples

    def report(self) -> dict[str, float]:
        """Active ratio (whole, and of each layer's tokens), experts never used, and the load of the busiest expert
        of a token relative to an even one (mean over tokens in use)."""
        usage = self.usage()
        total = usage.sum(-1)
        used = total > 0
        figures = {
            "active ratio": float(usage.mean()),
            "experts never active": float((usage == 0).sum()),
            "busiest expert": float((usage.amax(-1) * usage.shape[-1] / total)[used].mean()) if used.any() else 0.0,
        }
        for layer, tokens in enumerate(usage.mean(-1).tolist()):
            figures.update({f"active ratio, block {layer} token {t}": share for t, share in enumerate(tokens)})
        return figures
