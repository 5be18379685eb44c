"""Vector quantisers that turn continuous vectors into discrete codes.

`RQVAE` learns a residual quantiser (TIGER, arXiv:2305.05065; residual quantisation: arXiv:2203.01941),
`residual_kmeans` and `lsh_codes` are its training-free relatives, and `ParallelCodebooks` quantises several vectors
side by side with index back-propagation (IBQ, arXiv:2412.02692). The nearest codeword is always looked up in float32:
bfloat16 distances flip codes.

Letters: N vectors, D their width, L levels, K codes a level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def squared_distances(x: Tensor, codebook: Tensor) -> Tensor:
    """Squared Euclidean distances of x (..., N, D) to codebook (..., K, D), (..., N, K) in float32.

    Differences are taken before squaring, so that a vector's codes do not depend on the batch it came in.
    """
    mode = "donot_use_mm_for_euclid_dist"
    return torch.cdist(x.float(), codebook.float(), compute_mode=mode).square()


def nearest_code(x: Tensor, codebook: Tensor) -> Tensor:
    """Index of the nearest codeword, x (N, D), codebook (K, D) -> (N,) int64; the lower index wins a tie."""
    with torch.no_grad():
        return squared_distances(x, codebook).argmin(-1)


# -- usage ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodeUsage:
    """How evenly one level's codes are used.

    Attributes:
        used: share of the codes that occur at least once.
        entropy: of the code distribution, in bits; at most log2 of the number of codes.
    """

    used: float
    entropy: float

    @property
    def perplexity(self) -> float:
        """Number of equally used codes that would have this entropy."""
        return 2.0**self.entropy


def code_usage(codes: Tensor, size: int) -> CodeUsage:
    """Usage of one level: codes (N,) in 0..size-1."""
    count = torch.bincount(codes.flatten(), minlength=size).double()
    share = count / count.sum()
    entropy = -(share * share.clamp_min(1e-300).log2()).sum()
    return CodeUsage(used=float((count > 0).double().mean()), entropy=float(entropy))


# -- k-means --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def kmeans(x: Tensor, size: int, *, iterations: int = 25, generator: torch.Generator | None = None) -> Tensor:
    """Lloyd's algorithm: x (N, D) -> centroids (size, D), float32, on x's device.

    Starts from distinct random points (from repeated ones when there are fewer than `size`). A centroid that loses all
    of its points moves to the point that is farthest from its own centroid.
    """
    x = x.float()
    order = torch.randperm(len(x), generator=generator).to(x.device)
    centroids = x[order.repeat(-(-size // len(x)))[:size]].clone()
    for _ in range(iterations):
        distance, code = squared_distances(x, centroids).min(1)
        count = torch.zeros(size, device=x.device).index_add_(0, code, torch.ones_like(distance))
        total = torch.zeros_like(centroids).index_add_(0, code, x)
        centroids = total / count.clamp_min(1.0)[:, None]
        empty = (count == 0).nonzero().flatten()[: len(x)]
        centroids[empty] = x[distance.topk(len(empty)).indices]
    return centroids


@torch.no_grad()
def residual_kmeans(
    x: Tensor,
    levels: int,
    size: int,
    *,
    iterations: int = 25,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """k-means, then k-means of what is left, `levels` times.

    x (N, D) -> (codebooks (L, K, D), codes (N, L)).
    """
    residual = x.float()
    codebooks, codes = [], []
    for _ in range(levels):
        codebook = kmeans(residual, size, iterations=iterations, generator=generator)
        code = nearest_code(residual, codebook)
        residual = residual - codebook[code]
        codebooks.append(codebook)
        codes.append(code)
    return torch.stack(codebooks), torch.stack(codes, dim=1)


def lsh_codes(x: Tensor, levels: int, planes: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Locality-sensitive hashing: each level writes the sides of `planes` random hyperplanes as one binary number.

    x (N, D) -> codes (N, L) in 0..2**planes - 1. The hyperplanes go through the mean of x, which splits the
    data evenly; levels are independent of each other, unlike residual levels.
    """
    x = x.float()
    normal = torch.randn(levels, planes, x.shape[1], generator=generator).to(x.device)
    side = torch.einsum("nd,lpd->nlp", x - x.mean(0), normal) > 0
    return (side * (2 ** torch.arange(planes, device=x.device))).sum(-1)


# -- residual quantiser ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantised:
    """What a residual quantiser makes of latents z (N, D).

    Attributes:
        codes: (N, L) int64.
        vector: (N, D) the sum of the chosen codewords, ẑ.
        straight_through: (N, D) equals ẑ; its gradient goes to z as if nothing had been quantised.
        residuals: (L, N, D) what each level was given, without gradient.
        codebook_loss: mean over vectors of Σ_l ‖sg[r_l] − e_l‖², which moves the codewords.
        commitment_loss: mean over vectors of Σ_l ‖r_l − sg[e_l]‖², which moves z.
    """

    codes: Tensor
    vector: Tensor
    straight_through: Tensor
    residuals: Tensor
    codebook_loss: Tensor
    commitment_loss: Tensor


class ResidualQuantiser(nn.Module):
    """L separate codebooks; each level quantises what the levels before it left over.

    r_0 = z;  c_l = argmin_k ‖r_l − e_{l,k}‖;  r_{l+1} = r_l − e_{l,c_l}.
    """

    def __init__(self, levels: int, size: int, dim: int) -> None:
        super().__init__()
        self.levels, self.size = levels, size
        self.codebooks = nn.Parameter(torch.randn(levels, size, dim) / math.sqrt(dim))

    @torch.no_grad()
    def initialise(self, z: Tensor, *, generator: torch.Generator | None = None) -> None:
        """Sets every codebook by k-means of the residuals of latents z (N, D); random ones collapse."""
        codebooks, _ = residual_kmeans(z, self.levels, self.size, generator=generator)
        self.codebooks.copy_(codebooks)

    @torch.no_grad()
    def codes(self, z: Tensor) -> Tensor:
        """(N, D) -> (N, L)."""
        return self(z).codes

    @torch.no_grad()
    def revive(self, residuals: Tensor, used: Tensor) -> int:
        """Moves each code that is not `used` (L, K) onto a random one of its level's residuals (L, N, D).

        Returns how many were moved.
        """
        pick = torch.randint(residuals.shape[1], used.shape, device=residuals.device)
        drawn = residuals.gather(1, pick[..., None].expand(-1, -1, residuals.shape[2]))
        self.codebooks.copy_(torch.where(used[..., None], self.codebooks, drawn.to(self.codebooks.dtype)))
        return int((~used).sum())

    def forward(self, z: Tensor) -> Quantised:
        """Quantises z (N, D), in float32 whatever its dtype."""
        z = z.float()
        residual = z
        chosen, codes, residuals = [], [], []
        codebook_loss = commitment_loss = z.new_zeros(())
        for codebook in self.codebooks.float():
            code = nearest_code(residual, codebook)
            word = codebook[code]
            codebook_loss = codebook_loss + (residual.detach() - word).square().sum(-1).mean()
            commitment_loss = commitment_loss + (residual - word.detach()).square().sum(-1).mean()
            residuals.append(residual.detach())
            # The codewords themselves are moved by the codebook loss alone.
            residual = residual - word.detach()
            chosen.append(word)
            codes.append(code)
        vector = torch.stack(chosen).sum(0)
        return Quantised(
            codes=torch.stack(codes, dim=1),
            vector=vector,
            straight_through=z + (vector - z).detach(),
            residuals=torch.stack(residuals),
            codebook_loss=codebook_loss,
            commitment_loss=commitment_loss,
        )


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them and none after the last."""
    layers: list[nn.Module] = []
    for entry, exit_ in pairwise(widths):
        layers += [nn.Linear(entry, exit_), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class RQVAE(nn.Module):
    """Residual-quantised autoencoder of TIGER (arXiv:2305.05065, section 3.1).

    ‖x − x̂‖² + Σ_l (‖sg[r_l] − e_{l,c_l}‖² + β ‖r_l − sg[e_{l,c_l}]‖²), with x̂ = D(z + sg[ẑ − z]).

    Args:
        dim: width of the content vectors.
        hidden: widths between content and latent; the decoder mirrors them.
        latent: width of the latent.
        levels, size: L codebooks of K codewords.
        beta: weight of the commitment term.
        revive_every: updates after which codes that went unused since the last time are moved onto residuals of the
            current batch; 0 never does.
    """

    counts: Tensor

    def __init__(
        self,
        dim: int,
        *,
        hidden: Sequence[int] = (512, 256, 128),
        latent: int = 32,
        levels: int = 3,
        size: int = 256,
        beta: float = 0.25,
        revive_every: int = 0,
    ) -> None:
        super().__init__()
        widths = [dim, *hidden, latent]
        self.encoder = mlp(widths)
        self.decoder = mlp(widths[::-1])
        self.quantiser = ResidualQuantiser(levels, size, latent)
        self.beta, self.revive_every = beta, revive_every
        self.register_buffer("counts", torch.zeros(levels, size), persistent=False)
        self._residuals: Tensor | None = None

    @torch.no_grad()
    def initialise(self, content: Tensor, *, generator: torch.Generator | None = None) -> None:
        """k-means initialisation of the codebooks on the latents of a large batch (N, dim)."""
        self.quantiser.initialise(self.encoder(content), generator=generator)

    def forward(self, content: Tensor) -> tuple[Tensor, Quantised]:
        """content (N, dim) -> (reconstruction (N, dim), what the quantiser did)."""
        quantised = self.quantiser(self.encoder(content))
        return self.decoder(quantised.straight_through.to(content.dtype)), quantised

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Training objective on `content` (N, dim): a scalar, squared norms averaged over vectors."""
        content = batch["content"]
        reconstruction, quantised = self(content)
        if self.training and self.revive_every:
            one = torch.ones_like(quantised.codes.T, dtype=self.counts.dtype)
            self.counts.scatter_add_(1, quantised.codes.T, one)
            self._residuals = quantised.residuals
        error = (content - reconstruction).float().square().sum(-1).mean()
        return error + quantised.codebook_loss + self.beta * quantised.commitment_loss

    def on_step_end(self, step: int) -> None:
        """Revives unused codes; called by the training loop after each update."""
        if self.revive_every and (step + 1) % self.revive_every == 0 and self._residuals is not None:
            self.quantiser.revive(self._residuals, self.counts > 0)
            self.counts.zero_()

    @torch.no_grad()
    def encode(self, content: Tensor) -> Tensor:
        """Codes (N, L) of content (N, dim)."""
        return self.quantiser.codes(self.encoder(content))


# -- parallel codebooks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParallelCodes:
    """What parallel codebooks make of vectors u (N, G, D).

    Attributes:
        codes: (N, G) int64.
        vector: (N, G, D) codewords; its gradient reaches every codeword and u.
        probability: (N, G, K) softmax of the similarities.
    """

    codes: Tensor
    vector: Tensor
    probability: Tensor


class ParallelCodebooks(nn.Module):
    """G codebooks side by side, one a sub-space, trained by index back-propagation.

    Forward picks one codeword a group, e_hard; backward treats the pick as the soft distribution p:
    e = e_hard − sg[p] + p and z = eᵀC. So *every* codeword gets a gradient through p (arXiv:2412.02692), whereas the
    ordinary straight-through estimator (`estimator="vector"`) trains the chosen one only.

    Args:
        groups, size, dim: G codebooks of K codewords of width D.
        temperature: of p = softmax(−‖u − C_k‖² / temperature).
    """

    def __init__(self, groups: int, size: int, dim: int, *, temperature: float = 1.0, estimator: str = "index") -> None:
        super().__init__()
        if estimator not in ("index", "vector"):
            raise ValueError(f"estimator '{estimator}' is neither 'index' nor 'vector'")
        self.temperature, self.estimator, self.size = temperature, estimator, size
        self.codebooks = nn.Parameter(torch.randn(groups, size, dim) / math.sqrt(dim))

    def forward(self, u: Tensor) -> ParallelCodes:
        """Quantises u (N, G, D), in float32 whatever its dtype."""
        u, codebooks = u.float(), self.codebooks.float()
        # Through the square rather than cdist, whose gradient is not finite where u meets a codeword.
        difference = u[:, :, None] - codebooks
        distance = difference.square().sum(-1)  # (N, G, K)
        probability = (-distance / self.temperature).softmax(-1)
        codes = distance.argmin(-1)
        hard = F.one_hot(codes, self.size).to(probability.dtype)
        if self.estimator == "index":
            index = hard - probability.detach() + probability
            vector = torch.einsum("ngk,gkd->ngd", index, codebooks)
        else:
            word = torch.einsum("ngk,gkd->ngd", hard, codebooks)
            vector = word + u - u.detach()
        return ParallelCodes(codes, vector, probability)
